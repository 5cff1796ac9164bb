"""One epoch of policy updates: selected candidates in, moved weights and metrics out.

For each sample a subset of the sampler's noise levels is drawn (without replacement, never sigma 0), and for each level
fresh noise; both are keyed by (seed, epoch, group, candidate), so neither the order of groups nor a restart matters.
Cost, countable and counted: B samples x k levels x (live forward + backward + old forward, the last not with
`old: self`), and one context pass a group. The context cache is built once, without gradient, by the behaviour policy
(`old`), and shared by all candidates and levels and not refreshed after optimizer steps: the candidates were sampled
under it (spec/worldcompass.md 5.1).

The loss of an optimizer step is the mean over its samples and levels, so micro-batches change memory, not gradients,
and several ranks share a step's samples (updates.shares): the same update within rounding. All ranks run the network
equally often, in the same order, because every run of a sharded network is a conversation. A rank with nothing left to
do says its part with an idle run whose gradient is zero.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from pipeline import flow
from pipeline.errors import NumericsError
from pipeline.updates.config import UpdateConfig
from pipeline.updates.nft import nft_loss
from pipeline.updates.policy import Policy
from pipeline.updates.shares import Piece, plan, straddlers
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


class Groups(Protocol):
    """The groups of an epoch, one loaded at a time; `sizes`, their numbers of samples, are known beforehand."""

    @property
    def sizes(self) -> Sequence[int]: ...

    def __getitem__(self, index: int) -> TrainingGroup: ...


class _Listed:
    """Groups that are in memory already."""

    def __init__(self, groups: Sequence[TrainingGroup]) -> None:
        self.groups, self.sizes = groups, [len(group) for group in groups]

    def __getitem__(self, index: int) -> TrainingGroup:
        return self.groups[index]


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
        ranks = self._noise((self.config.levels,), group, candidate, "update/levels").argsort()
        return [int(i) for i in ranks[: self.config.timesteps_per_sample]]

    def noise(self, shape: Sequence[int], group: str, candidate: int, level: int) -> torch.Tensor:
        """Fresh noise of one sample at one level, float32 on the CPU."""
        return self._noise(tuple(shape), group, candidate, f"update/noise/{level}")

    def _noise(self, shape: tuple[int, ...], group: str, candidate: int, purpose: str) -> torch.Tensor:
        if self.config.noise == "group":
            candidate = 0
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

    @staticmethod
    def joint(parts: "list[_Means]") -> dict[str, float]:
        """The means over all parts (of all ranks); empty if nothing was added to any."""
        count = sum(part.count for part in parts)
        names = next((part.sums for part in parts if part.count), {})
        return {name: sum(part.sums.get(name, 0.0) for part in parts) / count for name in names}


def update_epoch(
    world: WorldModel,
    policy: Policy,
    groups: Sequence[TrainingGroup] | Groups,
    config: UpdateConfig,
    seed: int,
    epoch: int,
    on_progress: Progress | None = None,
) -> dict[str, float]:
    """Train one epoch and finish it (old follows, the epoch counts); returns the metrics, the same on every rank.

    `groups` may load one group at a time. `on_progress(done, samples, metrics)` is called on every rank after each
    optimizer step. Raises NumericsError, before the weights of that step move and before anything is written, if the
    loss or the gradient is not finite.
    """
    listed = _Listed(groups) if isinstance(groups, Sequence) else groups
    epoch_run = _Epoch(world, policy, config, Levels(config, seed, epoch), listed, on_progress)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    inner = int(torch.randint(2**62, (), generator=policy.rng))
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(inner)  # dropout inside a model, if any, must not depend on what ran before
        epoch_run.run()
    decay = policy.old_decay
    metrics = epoch_run.metrics()
    policy.finish_epoch()
    return metrics | {"old_decay": decay, "lr": config.lr_at(max(0, policy.step - 1))}


class _Epoch:
    """One epoch on one rank: its plan, the groups in hand, counters and means."""

    def __init__(
        self,
        world: WorldModel,
        policy: Policy,
        config: UpdateConfig,
        levels: Levels,
        groups: Groups,
        on_progress: Progress | None,
    ) -> None:
        self.world, self.policy, self.config, self.levels = world, policy, config, levels
        self.groups, self.on_progress, self.ranks = groups, on_progress, policy.ranks
        self.samples = sum(groups.sizes)
        self.steps = plan(groups.sizes, config.accumulation, self.ranks.size)
        self.done = 0
        self.held: dict[int, tuple[TrainingGroup, ContextCache | None]] = {}
        self.spare: TrainingGroup | None = None
        self.device = next(iter(policy.params.values())).device
        self.failure: NumericsError | None = None
        self.grad_norms: list[float] = []
        self.counts = Counter(
            dict.fromkeys(("live_forwards", "backwards", "old_forwards", "context_passes"), 0)
        )
        self.means = _Means()
        policy.optimizer.zero_grad(set_to_none=True)

    def run(self) -> None:
        """Train all samples, step by step. A slot is one piece of work of every rank; some have none in it."""
        rank = self.ranks.index
        uses = Counter(piece.group for shares in self.steps for piece in shares[rank])
        # Only when `old` moves with every step does it matter when a context is built.
        early = straddlers(self.steps, rank) if self.config.old_update == "step" else {}
        for number, shares in enumerate(self.steps):
            size = sum(len(piece.rows) for share in shares for piece in share)
            for slot in range(max(map(len, shares))):
                piece = shares[rank][slot] if slot < len(shares[rank]) else None
                self._slot(piece, size)
                if piece is not None:
                    uses[piece.group] -= 1
                self.held = {index: kept for index, kept in self.held.items() if uses[index]}
            if self.config.old_update == "step" and self.ranks.size > 1:
                self._take(early.get(number))
            self._step(size)

    def _slot(self, piece: Piece | None, step_samples: int) -> None:
        # a method of its own: names of a loop would keep one context alive while the next is built
        group, context = self._take(None if piece is None else piece.group)
        self._accumulate(group, context, piece, step_samples)

    def _take(self, index: int | None) -> tuple[TrainingGroup, ContextCache | None]:
        """A group with its context, built if this is its first use; for None some group to be idle with.

        Every rank calls it at the same time, and if one builds a context all do. With several ranks the scene is a new
        object each time: a world that reads a scene's text once then does so once a slot, on every rank.
        """
        fresh = index is not None and index not in self.held
        if index is None:
            group, context = self._idle_group(), None
        elif fresh:
            group, context = self.groups[index], None
            if len(group) != self.groups.sizes[index]:
                raise ValueError(
                    f"group {group.key}: {len(group)} samples where {self.groups.sizes[index]} were announced"
                )
        else:
            group, context = self.held[index]
        if self.ranks.size > 1:
            group = replace(group, scene=replace(group.scene))
        wanted = fresh and len(group.context) > 0
        if self.ranks.most(int(wanted)):
            built = self._context(group, group.context if wanted else [0])
            context = built if wanted else context
            self.counts["context_passes"] += wanted
        if index is not None:
            self.held[index] = (group, context)
        return group, context

    def _idle_group(self) -> TrainingGroup:
        if self.held:
            return next(iter(self.held.values()))[0]
        if self.spare is None:
            self.spare = self.groups[next(index for index, size in enumerate(self.groups.sizes) if size)]
        return self.spare

    def _context(self, group: TrainingGroup, chosen: Sequence[int]) -> ContextCache | None:
        with torch.no_grad(), self.policy.swap("old"):
            context = self.world.build_context(group.scene, group.history_CTHW, chosen, group.condition)
        return None if context is None else context.detach()

    def _batches(self, group: TrainingGroup, rows: range) -> list[list[tuple[int, int]]]:
        """(row, level) pairs of these samples, cut into micro-batches."""
        pairs = [(n, level) for n in rows for level in self.levels.draw(group.key, group.candidates[n])]
        size = self.config.micro_batch
        return [pairs[start : start + size] for start in range(0, len(pairs), size)]

    def _accumulate(
        self, group: TrainingGroup, context: ContextCache | None, piece: Piece | None, step_samples: int
    ) -> None:
        # FSDP averages over ranks where a step's gradient is the sum over them
        scale = self.ranks.size / (step_samples * self.config.timesteps_per_sample)
        batches = [] if piece is None else self._batches(group, piece.rows)
        for number in range(self.ranks.most(len(batches))):
            if number < len(batches):
                self._train(group, context, batches[number], scale)
            else:
                self._idle(group)

    def _train(
        self,
        group: TrainingGroup,
        context: ContextCache | None,
        pairs: list[tuple[int, int]],
        scale: float,
    ) -> None:
        at = [n for n, _ in pairs]
        x0 = group.x0_NCTHW[at].float()
        noise = torch.stack(
            [self.levels.noise(x0.shape[1:], group.key, group.candidates[n], level) for n, level in pairs]
        )
        sigma_B = self.levels.sigmas_S[[level for _, level in pairs]].to(self.device)
        x0, noise, r_B = x0.to(self.device), noise.to(self.device), group.r_N[at].to(self.device)
        mask_T = group.loss_mask_T.to(self.device)
        x_sigma = torch.where(mask_T[:, None, None], flow.add_noise(x0, noise, sigma_B), x0)
        v_old = None
        if self.config.old != "self":
            v_old = self._old_velocity(group, context, x_sigma, sigma_B)
            self.counts["old_forwards"] += len(pairs)
        v = self.world.velocity(x_sigma, sigma_B, group.clip, group.scene, context)
        self.counts["live_forwards"] += len(pairs)
        mask_BT = None if bool(mask_T.all()) else mask_T.expand(len(pairs), -1)
        loss_B, metrics = nft_loss(
            x0, x_sigma, sigma_B, v, v_old, r_B, self.config.beta, self.config.space, mask_BT
        )
        if not bool(torch.isfinite(loss_B).all()):
            self._fail(
                f"the loss is not finite in group {group.key}, candidates {[group.candidates[n] for n in at]} "
                f"(epoch {self.levels.epoch}): lower update.lr ({self.config.lr}) or inspect that group's latents"
            )
        (loss_B.sum() * scale).backward()
        self.counts["backwards"] += len(pairs)
        self.means.add({"loss": loss_B, "r": r_B, **metrics})

    def _old_velocity(
        self, group: TrainingGroup, context: ContextCache | None, x_sigma: torch.Tensor, sigma_B: torch.Tensor
    ) -> torch.Tensor:
        with torch.no_grad(), self.policy.swap("old"):
            return self.world.velocity(x_sigma, sigma_B, group.clip, group.scene, context)

    def _idle(self, group: TrainingGroup) -> None:
        """Run the network as often as `_train` does, on one sample without context, for a gradient of zero."""
        x, sigma_B = group.x0_NCTHW[:1].float().to(self.device), self.levels.sigmas_S[:1].to(self.device)
        if self.config.old != "self":
            self._old_velocity(group, None, x, sigma_B)
        (self.world.velocity(x, sigma_B, group.clip, group.scene, None).sum() * 0.0).backward()

    def _fail(self, what: str) -> None:
        """One rank alone stops at once; several stop together before the weights of this step move."""
        self.failure = self.failure or NumericsError(what)
        if self.ranks.size == 1:
            raise self.failure

    def _step(self, samples: int) -> None:
        with self.ranks.agreed():
            if self.failure is not None:
                raise self.failure
        with self.ranks.agreed():
            self.grad_norms.append(self.policy.optimizer_step())
        self.done += samples
        if self.on_progress:
            means = _Means.joint(self.ranks.gather(self.means))
            self.on_progress(self.done, self.samples, means | {"grad_norm": self.grad_norms[-1]})

    def metrics(self) -> dict[str, float]:
        """Metrics of the epoch, over all ranks; runs of idle ranks are not counted."""
        out = _Means.joint(self.ranks.gather(self.means))
        if self.grad_norms:
            out["grad_norm"] = sum(self.grad_norms) / len(self.grad_norms)
            out["grad_clip_share"] = sum(g > self.config.grad_clip for g in self.grad_norms) / len(
                self.grad_norms
            )
        for counts in self.ranks.gather(dict(self.counts)):
            for name, count in counts.items():
                out[name] = out.get(name, 0.0) + float(count)
        return out | {"samples": float(self.samples), "optimizer_steps": float(len(self.grad_norms))}
