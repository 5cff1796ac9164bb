"""One epoch of policy updates: selected candidates in, moved weights and metrics out.

For each sample a subset of the sampler's noise levels is drawn (without replacement, never sigma 0), and for each level
fresh noise; both are keyed by (seed, epoch, group, candidate), so neither the order of groups nor a restart matters.
Cost, countable and counted: B samples x k levels x (live forward + backward + old forward, the last not with
`old: self`), and one context pass a group. The context cache is built once, without gradient, by the behaviour policy
(`old`), and shared by all candidates and levels and not refreshed after optimizer steps: the candidates were sampled
under it (spec/worldcompass.md 5.1).

The loss of an optimizer step is the mean over its samples and levels, so micro-batches change memory, not gradients.
Left-over samples are spread over the steps (6 samples at 4 a step are 3 + 3), where the reference throws them away.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from pipeline import flow
from pipeline.errors import NumericsError
from pipeline.updates.config import UpdateConfig
from pipeline.updates.nft import nft_loss
from pipeline.updates.policy import Policy
from pipeline.worlds.base import ClipCondition, ContextCache, Scene, WorldModel

Progress = Callable[[int, int, dict[str, float]], None]


@dataclass
class TrainingGroup:
    """The selected candidates of one group and what they were sampled from.

    `history_CTHW` are all latents before the target clip, `context` the indices of those that the clip looks at (empty
    for the first clip), `condition` the actions and cameras of the whole video, `clip` those of the target clip.
    `x0_NCTHW` are the candidates' own clean latents, `r_N` their weights in [0, 1], `candidates` their numbers in the
    group. `loss_mask_T` is False where a latent carries no loss (the conditioning latent of the first clip).
    """

    key: str
    scene: Scene
    history_CTHW: torch.Tensor
    context: Sequence[int]
    condition: ClipCondition
    clip: ClipCondition
    x0_NCTHW: torch.Tensor
    r_N: torch.Tensor
    candidates: Sequence[int]
    loss_mask_T: torch.Tensor

    def __post_init__(self) -> None:
        n, t = self.x0_NCTHW.shape[0], self.x0_NCTHW.shape[2]
        if len(self.r_N) != n or len(self.candidates) != n or self.loss_mask_T.shape != (t,):
            raise ValueError(
                f"group {self.key}: {n} samples of {t} latents, but {len(self.r_N)} weights, "
                f"{len(self.candidates)} candidate numbers and a mask of {tuple(self.loss_mask_T.shape)}"
            )

    def __len__(self) -> int:
        return len(self.candidates)


@dataclass
class Levels:
    """Noise levels of an epoch's samples, keyed: the same draw in any order and after any restart."""

    config: UpdateConfig
    seed: int
    epoch: int

    def __post_init__(self) -> None:
        self.sigmas_S = flow.sigmas(self.config.steps, self.config.shift)[:-1]

    def draw(self, group: str, candidate: int) -> list[int]:
        """Indices of the levels that this sample trains, in the order drawn: ranks of keyed noise, cut to k."""
        ranks = self._noise((len(self.sigmas_S),), group, candidate, "update/levels").argsort()
        return [int(i) for i in ranks[: self.config.timesteps_per_sample]]

    def noise(self, shape: Sequence[int], group: str, candidate: int, level: int) -> torch.Tensor:
        """Fresh noise of one sample at one level, float32 on the CPU."""
        return self._noise(tuple(shape), group, candidate, f"update/noise/{level}")

    def _noise(self, shape: tuple[int, ...], group: str, candidate: int, purpose: str) -> torch.Tensor:
        return flow.keyed_noise(
            shape, seed=self.seed, epoch=self.epoch, group=group, candidate=candidate, purpose=purpose
        )


class _Means:
    """Running means over (sample, level) pairs, kept in Python floats so that they cost no graph."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.count = 0

    def add(self, values: dict[str, torch.Tensor]) -> None:
        self.count += len(next(iter(values.values())))
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value.detach().double().sum())

    def means(self) -> dict[str, float]:
        return {name: total / self.count for name, total in self.sums.items()}


def spread(samples: int, per_step: int) -> list[int]:
    """Samples of each optimizer step: ceil(samples / per_step) steps of nearly equal size."""
    steps = -(-samples // per_step)
    return [samples // steps + (i < samples % steps) for i in range(steps)]


def update_epoch(
    world: WorldModel,
    policy: Policy,
    groups: Iterable[TrainingGroup],
    config: UpdateConfig,
    seed: int,
    epoch: int,
    on_progress: Progress | None = None,
    samples: int | None = None,
) -> dict[str, float]:
    """Train one epoch and finish it (old follows, the epoch counts); returns the metrics.

    `groups` may be a generator that reads one group at a time, if `samples`, their number of samples in all, is given.
    `on_progress(done, samples, metrics)` is called after each optimizer step. Raises NumericsError, before the weights
    of that step move and before anything is written, if the loss or the gradient is not finite.
    """
    if samples is None:
        groups = list(groups)
        samples = sum(len(group) for group in groups)
    epoch_run = _Epoch(world, policy, config, Levels(config, seed, epoch), samples, on_progress)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    inner = int(torch.randint(2**62, (), generator=policy.rng))
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(inner)  # dropout inside a model, if any, must not depend on what ran before
        for group in groups:
            epoch_run.train(group)
    decay = policy.old_decay
    metrics = epoch_run.finish()
    policy.finish_epoch()
    return metrics | {"old_decay": decay, "lr": config.lr_at(max(0, policy.step - 1))}


class _Epoch:
    """What one epoch carries from group to group: the optimizer step in progress, counters and means."""

    def __init__(
        self,
        world: WorldModel,
        policy: Policy,
        config: UpdateConfig,
        levels: Levels,
        samples: int,
        on_progress: Progress | None,
    ) -> None:
        self.world, self.policy, self.config, self.levels = world, policy, config, levels
        self.samples, self.on_progress = samples, on_progress
        self.sizes = spread(samples, config.accumulation) if samples else []
        self.done = 0
        self.in_step = 0
        self.steps_done = 0
        self.grad_norms: list[float] = []
        self.counts = {"live_forwards": 0, "backwards": 0, "old_forwards": 0, "context_passes": 0}
        self.means = _Means()
        policy.optimizer.zero_grad(set_to_none=True)

    def train(self, group: TrainingGroup) -> None:
        """Train all samples of a group, taking optimizer steps where they fall due (also in its middle)."""
        if not len(group):
            return
        if self.done + len(group) > self.samples:
            raise ValueError(f"group {group.key}: more samples than the {self.samples} that were announced")
        context = self._context(group)
        first = 0
        while first < len(group):
            size = self.sizes[self.steps_done]
            last = min(len(group), first + size - self.in_step)
            self._accumulate(group, context, range(first, last), size)
            self.in_step, self.done, first = self.in_step + last - first, self.done + last - first, last
            if self.in_step == size:
                self._step()

    def _context(self, group: TrainingGroup) -> ContextCache | None:
        if not len(group.context):
            return None
        with torch.no_grad(), self.policy.swap("old"):
            context = self.world.build_context(
                group.scene, group.history_CTHW, group.context, group.condition
            )
        self.counts["context_passes"] += 1
        return None if context is None else context.detach()

    def _pairs(self, group: TrainingGroup, rows: range) -> Iterator[list[tuple[int, int]]]:
        """(row, level) pairs of these samples, cut into micro-batches."""
        pairs = [(n, level) for n in rows for level in self.levels.draw(group.key, group.candidates[n])]
        for start in range(0, len(pairs), self.config.micro_batch):
            yield pairs[start : start + self.config.micro_batch]

    def _accumulate(
        self, group: TrainingGroup, context: ContextCache | None, rows: range, step_samples: int
    ) -> None:
        device = next(iter(self.policy.params.values())).device
        scale = 1.0 / (step_samples * self.config.timesteps_per_sample)
        for pairs in self._pairs(group, rows):
            at = [n for n, _ in pairs]
            x0 = group.x0_NCTHW[at].float()
            noise = torch.stack(
                [self.levels.noise(x0.shape[1:], group.key, group.candidates[n], level) for n, level in pairs]
            )
            sigma_B = self.levels.sigmas_S[[level for _, level in pairs]].to(device)
            x0, noise, r_B = x0.to(device), noise.to(device), group.r_N[at].to(device)
            mask_T = group.loss_mask_T.to(device)
            x_sigma = torch.where(mask_T[:, None, None], flow.add_noise(x0, noise, sigma_B), x0)
            v_old = self._old_velocity(group, context, x_sigma, sigma_B)
            v = self.world.velocity(x_sigma, sigma_B, group.clip, group.scene, context)
            self.counts["live_forwards"] += len(pairs)
            mask_BT = None if bool(mask_T.all()) else mask_T.expand(len(pairs), -1)
            loss_B, metrics = nft_loss(
                x0, x_sigma, sigma_B, v, v_old, r_B, self.config.beta, self.config.space, mask_BT
            )
            if not bool(torch.isfinite(loss_B).all()):
                raise NumericsError(
                    f"the loss is not finite in group {group.key}, candidates {[group.candidates[n] for n in at]} "
                    f"(epoch {self.levels.epoch}): lower update.lr ({self.config.lr}) or inspect that group's latents"
                )
            (loss_B.sum() * scale).backward()
            self.counts["backwards"] += len(pairs)
            self.means.add({"loss": loss_B, "r": r_B, **metrics})

    def _old_velocity(
        self, group: TrainingGroup, context: ContextCache | None, x_sigma: torch.Tensor, sigma_B: torch.Tensor
    ) -> torch.Tensor | None:
        if self.config.old == "self":
            return None
        with torch.no_grad(), self.policy.swap("old"):
            v_old = self.world.velocity(x_sigma, sigma_B, group.clip, group.scene, context)
        self.counts["old_forwards"] += len(x_sigma)
        return v_old

    def _step(self) -> None:
        self.grad_norms.append(self.policy.optimizer_step())
        self.in_step, self.steps_done = 0, self.steps_done + 1
        if self.on_progress:
            self.on_progress(self.done, self.samples, self.means.means() | {"grad_norm": self.grad_norms[-1]})

    def finish(self) -> dict[str, float]:
        """Metrics of the epoch. Raises ValueError if fewer samples came than were announced."""
        if self.done != self.samples:
            raise ValueError(f"{self.done} samples were trained where {self.samples} were announced")
        out = self.means.means() if self.means.count else {}
        if self.grad_norms:
            out["grad_norm"] = sum(self.grad_norms) / len(self.grad_norms)
            out["grad_clip_share"] = sum(g > self.config.grad_clip for g in self.grad_norms) / len(
                self.grad_norms
            )
        counts = {name: float(count) for name, count in self.counts.items()}
        return out | counts | {"samples": float(self.samples), "optimizer_steps": float(len(self.grad_norms))}
