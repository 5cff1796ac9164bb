"""The policy: three sets of the trained weights and everything that a faithful resume needs.

Three names, never mixed (DESIGN 6.1): `live` is what the optimizer moves; `old` is the behaviour policy that rolls out
and anchors the loss; `ema` is the average that evaluations use. Only trained parameters (requires_grad) are held, so
the same class serves full fine-tuning and LoRA. The module runs under another set by pointing its parameters at that
set's tensors, which copies nothing.

Trained weights must be float32: a moving average in bfloat16 loses most updates. Autocast gives the speed.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from pipeline.digests import digest_tensors
from pipeline.errors import CheckpointError, ConfigError, NumericsError
from pipeline.updates.checkpoint import check_fit, read_state, read_tensors, write_checkpoint
from pipeline.updates.config import ParamsConfig, UpdateConfig

SetName = Literal["live", "old", "ema"]
SETS: tuple[SetName, ...] = ("live", "old", "ema")
ADAPTER = "policy"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def prepare_params(model: nn.Module, config: ParamsConfig, seed: int) -> None:
    """Mark what is trained, in place: all weights, or LoRA adapters (peft) on `config.targets` with the rest frozen.

    Adapters start as the identity; their random half is drawn from `seed`. Raises ConfigError if no layer matches.
    """
    if config.kind == "full":
        model.requires_grad_(True)
        return
    from peft import LoraConfig, inject_adapter_in_model  # heavy, and only LoRA needs it

    lora = LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=list(config.targets))
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(lora, model, adapter_name=ADAPTER)
        except ValueError as error:
            raise ConfigError(
                f"update.params.targets {config.targets}: no layer of the model has such a name"
            ) from error


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter, of those with requires_grad. Raises ConfigError if there are none or one is not fp32/fp64."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise ConfigError("no parameter of the model is trained: set update.params.kind to full or lora")
    for name, parameter in found.items():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"trained weight {name!r} is {parameter.dtype}: keep trained weights in float32"
            )
    return found


class Policy:
    """A module's live, old and ema weights, its optimizer, counters and generator.

    The module must be on its device already. `epoch` counts finished epochs, `step` optimizer steps. `rng` seeds
    whatever randomness is inside the model; the noise of rollout and update is keyed and needs no state.
    """

    def __init__(self, model: nn.Module, config: UpdateConfig, seed: int = 0) -> None:
        self.model, self.config = model, config
        self.params = trained_parameters(model)
        self.sets: dict[str, dict[str, torch.Tensor]] = {
            "live": {name: p.data for name, p in self.params.items()},
            "old": {name: p.data.clone() for name, p in self.params.items()},
            "ema": {name: p.data.clone() for name, p in self.params.items()},
        }
        self.active: SetName = "live"
        self.optimizer = torch.optim.AdamW(
            self.params.values(),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        self.rng = torch.Generator().manual_seed(seed)
        self.epoch = 0
        self.step = 0

    @contextmanager
    def swap(self, name: SetName) -> Iterator[nn.Module]:
        """Run the module under another set of weights; the one before comes back whatever happens inside.

        Only for inference: a graph that was recorded under one set must not be back-propagated under another.
        """
        if name not in SETS:
            raise ValueError(f"no weight set {name!r}: there are {', '.join(SETS)}")
        before = self.active
        try:
            self._point_at(name)
            yield self.model
        finally:
            self._point_at(before)

    def _point_at(self, name: SetName) -> None:
        self.active = name
        for key, parameter in self.params.items():
            parameter.data = self.sets[name][key]

    def _require_live(self, what: str) -> None:
        if self.active != "live":
            raise RuntimeError(
                f"{what} while the {self.active} weights are swapped in would train the wrong set"
            )

    @torch.no_grad()
    def update_old(self, decay: float) -> None:
        """old <- decay * old + (1 - decay) * live."""
        self._follow("old", decay)

    @torch.no_grad()
    def update_ema(self) -> None:
        """ema <- ema_decay * ema + (1 - ema_decay) * live."""
        self._follow("ema", self.config.ema_decay)

    def _follow(self, name: SetName, decay: float) -> None:
        for key, follower in self.sets[name].items():
            follower.lerp_(self.sets["live"][key], 1 - decay)

    @property
    def old_decay(self) -> float:
        """The decay of the epoch in progress (epochs count from 1)."""
        return self.config.old_decay.at(self.epoch + 1)

    def optimizer_step(self) -> float:
        """Clip, step, clear the gradients, let ema (and old, if `old_update: step`) follow; returns the gradient's
        norm.

        Raises NumericsError, before any weight changes, if the gradient is not finite.
        """
        self._require_live("an optimizer step")
        norm = torch.nn.utils.clip_grad_norm_(self.params.values(), self.config.grad_clip)
        if not bool(torch.isfinite(norm)):
            raise NumericsError(
                f"the gradient's norm is {norm.item()} in epoch {self.epoch + 1}, optimizer step {self.step}: "
                f"lower update.lr ({self.config.lr}) or update.grad_clip ({self.config.grad_clip})"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr_at(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.update_ema()
        if self.config.old_update == "step":
            self.update_old(self.old_decay)
        return float(norm)

    def finish_epoch(self) -> None:
        """Count the epoch, and let old follow if `old_update: epoch`."""
        self._require_live("the end of an epoch")
        if self.config.old_update == "epoch":
            self.update_old(self.old_decay)
        self.epoch += 1

    def digest(self) -> str:
        """sha256 over the old weights: the identity of what rolls out (the frozen base has its own digest)."""
        return digest_tensors(self.sets["old"])

    def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write the folder atomically; `extra` (JSON) is kept with it, e.g. the resolved parameters and the base's
        digest.

        Raises StorageError when the disk is full, with the previous folder untouched.
        """
        self._require_live("saving")
        moments = {
            f"{name}/{key}": self.optimizer.state[p][key]
            for name, p in self.params.items()
            if p in self.optimizer.state
            for key in _MOMENTS
        }
        tensors = {**self.sets, "optimizer": moments, "rng": {"generator": self.rng.get_state()}}
        state = {
            "epoch": self.epoch,
            "step": self.step,
            "scheduler": {"next_step": self.step, "lr": self.config.lr_at(self.step)},
            "digest": self.digest(),
            "extra": dict(extra or {}),
        }
        write_checkpoint(folder, tensors, state)

    def load(self, folder: Path) -> dict[str, Any]:
        """Restore everything, bit-equal, and return `extra`; nothing changes unless all of it fits.

        Raises CheckpointError naming the file or key that is missing, truncated, changed or of another shape.
        """
        self._require_live("loading")
        content = read_state(folder)
        live = self.sets["live"]
        sets = {name: read_tensors(folder, name, content) for name in SETS}
        for name, tensors in sets.items():
            check_fit(folder / f"{name}.safetensors", tensors, live)
        moments = read_tensors(folder, "optimizer", content)
        scalar = torch.zeros(())
        need = {f"{n}/{k}": scalar if k == "step" else live[n] for n in live for k in _MOMENTS}
        check_fit(folder / "optimizer.safetensors", moments, need, partial=True)
        rng = read_tensors(folder, "rng", content)
        check_fit(folder / "rng.safetensors", rng, {"generator": self.rng.get_state()})
        state = content["state"]
        try:
            epoch, step, extra = int(state["epoch"]), int(state["step"]), dict(state["extra"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder / 'state.json'}: its state is not complete ({error})") from error

        with torch.no_grad():
            for set_name, tensors in sets.items():
                for key, tensor in tensors.items():
                    self.sets[set_name][key].copy_(tensor)
        self.optimizer.state.clear()
        for key, parameter in self.params.items():
            if f"{key}/step" in moments:
                self.optimizer.state[parameter] = {
                    k: moments[f"{key}/{k}"].to("cpu" if k == "step" else parameter.device) for k in _MOMENTS
                }
        self.rng.set_state(rng["generator"])
        self.epoch, self.step = epoch, step
        return extra


def load_weights(model: nn.Module, folder: Path, name: SetName) -> str:
    """Put one set of a saved policy into the model, for inference; returns the digest of its *old* weights.

    Reads that one file only. Raises CheckpointError as `Policy.load`.
    """
    content = read_state(folder)
    tensors, params = read_tensors(folder, name, content), trained_parameters(model)
    check_fit(folder / f"{name}.safetensors", tensors, {key: p.data for key, p in params.items()})
    with torch.no_grad():
        for key, parameter in params.items():
            parameter.copy_(tensors[key])
    return str(content["state"]["digest"])
