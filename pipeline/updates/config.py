"""Parameters of the update stage, and the few numbers that follow from them.

Why the sampler's `steps` and `shift` are here: the update draws its noise levels from the very levels that
the rollout used, without replacement, and never sigma 0 (there x0 is known and the loss is 0/0). Sources:
spec/worldcompass.md 5.1, 5.3-5.5 (the numbers of WorldCompass and of DiffusionNFT), DESIGN 6.1, 6.2."""

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OldDecayConfig(_Strict):
    """How slowly the behaviour policy follows: old <- d old + (1 - d) live, d = min(max, start + rate *
    iteration).

    WorldCompass: start 0.2, rate 0.01, max 0.9. DiffusionNFT type 0: 0, 0, 0; type 1: 0, 0.001, 0.5;
    type 2: 0, 0.0075, 0.999 with delay 75. The iteration is the epoch, counted from 1.
    """

    start: float = Field(default=0.2, ge=0, le=1, description="decay of the first epochs")
    rate: float = Field(default=0.01, ge=0, description="what the decay grows by, each epoch")
    max: float = Field(default=0.9, ge=0, le=1, description="largest decay")
    delay: int = Field(default=0, ge=0, description="epochs before the decay starts to grow")

    def at(self, iteration: int) -> float:
        """The decay of epoch `iteration` (from 1)."""
        return min(self.max, self.start + self.rate * max(0, iteration - self.delay))


class ParamsConfig(_Strict):
    """Which weights are trained: all of them or LoRA adapters."""

    kind: Literal["full", "lora"] = Field(
        default="full", description="full fine-tuning or LoRA adapters (peft)"
    )
    rank: int = Field(default=16, ge=1, description="LoRA rank")
    alpha: float = Field(default=32.0, gt=0, description="LoRA scale is alpha / rank")
    targets: list[str] = Field(
        default=["to_q", "to_k", "to_v", "to_out.0", "to_out_prope.0"],
        min_length=1,
        description="names (endings, as to_q or ffn.net.2) of the linear layers that get an adapter, within the "
        "video side of the network's blocks",
    )


class ExecutionConfig(_Strict):
    """How an update is computed, which does not change what it computes (beyond rounding): no part of any digest."""

    checkpointing: bool = Field(
        default=False,
        description="recompute each block's activations in the backward pass: much less memory, a third more time",
    )
    shard: int | None = Field(
        default=None,
        ge=1,
        description="under torchrun: neighbouring ranks that share one copy of the weights; empty: those of a node, "
        "1: every rank holds all weights",
    )


class UpdateConfig(_Strict):
    """Parameters of `wcpipe update` (params.yaml: `update`)."""

    old: Literal["ema", "self"] = Field(
        default="ema", description="v_old: behaviour policy, or the live model as in the released code"
    )
    beta: float = Field(
        default=1.0, gt=0, description="distance of v+, v- from v_old; smaller: faster, less stable"
    )
    space: Literal["x0", "v"] = Field(default="x0", description="space of the loss; x0 is self-normalising")
    timesteps: int | None = Field(
        default=None, ge=1, description="noise levels trained per sample; empty: from timestep_fraction"
    )
    timestep_fraction: float = Field(
        default=0.5, gt=0, le=1, description="share of the sampler's levels per sample"
    )
    sigma_min: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="lowest noise level that is trained; motion is decided at the high ones",
    )
    noise: Literal["candidate", "group"] = Field(
        default="candidate",
        description="what shares its noise levels and noise: nothing, or all candidates of a group, so that the best "
        "and the worst differ in their videos alone",
    )
    steps: int = Field(default=5, ge=1, description="sampler steps whose noise levels are drawn from")
    shift: float = Field(default=3.0, gt=0, description="shift of the sampler's noise levels")
    lr: float = Field(default=2e-4, gt=0, description="AdamW learning rate")
    weight_decay: float = Field(default=1e-4, ge=0, description="decoupled weight decay")
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="AdamW moment decays")
    eps: float = Field(default=1e-8, gt=0, description="AdamW epsilon")
    grad_clip: float = Field(
        default=1.0, gt=0, description="largest norm of the gradient of an optimizer step"
    )
    warmup_steps: int = Field(default=0, ge=0, description="optimizer steps of linear learning-rate warm-up")
    accumulation: int = Field(default=16, ge=1, description="samples per optimizer step")
    micro_batch: int = Field(
        default=16, ge=1, description="(sample, noise level) pairs per forward; bounds memory only"
    )
    old_decay: OldDecayConfig = Field(
        default=OldDecayConfig(), description="schedule of the behaviour policy"
    )
    old_update: Literal["epoch", "step"] = Field(
        default="epoch", description="when old follows live: after an epoch, or after each optimizer step"
    )
    ema_decay: float = Field(
        default=0.9, ge=0, lt=1, description="decay of the evaluation average, per optimizer step"
    )
    params: ParamsConfig = Field(default=ParamsConfig(), description="which weights are trained")
    execution: ExecutionConfig = Field(
        default=ExecutionConfig(), description="memory and sharding; changes no artifact beyond rounding"
    )

    @model_validator(mode="after")
    def _timesteps_fit(self) -> "UpdateConfig":
        if self.timesteps is not None and self.timesteps > self.levels:
            raise ValueError(
                f"update.timesteps is {self.timesteps}, but of the sampler's {self.steps} levels only {self.levels} "
                f"are at update.sigma_min ({self.sigma_min}) or above: lower one of the two"
            )
        if not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"update.betas is {self.betas}: both must be in [0, 1)")
        return self

    @property
    def levels(self) -> int:
        """How many of the sampler's levels may be trained: the first ones, down to `sigma_min`."""
        # `flow.sigmas` without torch, which reading parameters must not import; a level that is written down counts
        uniform = [1 - step / self.steps for step in range(self.steps)]
        return sum(self.shift * u / (1 + (self.shift - 1) * u) >= self.sigma_min - 1e-6 for u in uniform)

    @property
    def timesteps_per_sample(self) -> int:
        """Noise levels drawn for each sample: `timesteps`, or the fraction rounded down, at least 1."""
        if self.timesteps is not None:
            return self.timesteps
        return max(1, math.floor(self.levels * self.timestep_fraction + 1e-9))

    def optimizer_steps(self, samples: int) -> int:
        """Optimizer steps of an epoch with this many samples; left-over samples are spread, never dropped."""
        return math.ceil(samples / self.accumulation)

    def lr_at(self, step: int) -> float:
        """Learning rate of optimizer step `step` (from 0)."""
        return self.lr * min(1.0, (step + 1) / (self.warmup_steps + 1))
