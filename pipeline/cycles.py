"""Words that end where they began, and which of their frames must look alike.

WHY a file of its own: a cycle reward compares frames that *should* show the same view. One wrong index, or an inverse
key that does not undo its step, and a perfect model is punished. So no return path is integrated here: the way out is,
and the way back is the same list of poses read backwards, P[2m-i] = P[i]; the labels of the way back are derived from
it (spec/worldcycle.md 1.1, 1.3). Closure is then exact for every word, compound, speed and angle.

The lattice is that of actions (one latent step), never of frames: T latents have T - 1 actions, an odd number for whole
clips, so a cycle of whole clips is one action short. Its last repeat turns one action early, and the action left over
is a no-op at the end, whose frames must equal the start.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipeline.actions import NO_OP, LabelArray, check_labels, format_word, inverse, keys_of
from pipeline.camera import PoseArray, StepSize, labels_from_poses, poses_from_labels
from pipeline.errors import WordError
from pipeline.words import WordSampler

PairArray = npt.NDArray[np.int64]
CLOSURE_TOLERANCE = (
    1e-9  # largest difference of any number of a 4x4 pose; rounding of long words stays under 1e-12
)


@dataclass(frozen=True)
class Part:
    """What one cycle is made of: the way out of a retracing cycle, or a whole loop that closes by itself.

    Parts of one `family` repeat the same cycle: the first is what the later ones are compared with.
    """

    labels: tuple[int, ...]
    retracing: bool
    family: int = 0


@dataclass(frozen=True)
class Cycle:
    """One closed stretch of a word: from latent `start` on, `actions` actions; it turns halfway if retracing."""

    start: int
    actions: int
    retracing: bool
    family: int

    @property
    def end(self) -> int:
        """The latent that must look like latent `start`."""
        return self.start + self.actions


@dataclass(frozen=True)
class ClosedWord:
    """A word that ends at its first pose: `labels_A` and `c2w_T44` (T = A + 1), its cycles, then `idle` no-ops.

    All pairs are (N, 2) indices (earlier, later) into the latents; with `stride`, into the frames. Latent i is seen
    complete in frame stride * i, and the motion inside an action mirrors too, so frame f pairs with 2 m stride - f.
    """

    labels_A: LabelArray
    c2w_T44: PoseArray
    cycles: tuple[Cycle, ...]
    idle: int

    @property
    def labels_T(self) -> LabelArray:
        """The label of each latent: 0 for the first, then the actions."""
        return np.concatenate([[NO_OP], self.labels_A])

    def turns(self) -> list[int]:
        """The latents at which retracing cycles turn back."""
        return [cycle.start + cycle.actions // 2 for cycle in self.cycles if cycle.retracing]

    def mirror_pairs(self, stride: int = 1) -> PairArray:
        """Way out and way back, without the turning point, which pairs with itself and is always right."""
        return _pairs(
            (stride * cycle.start + f, stride * cycle.end - f)
            for cycle in self.cycles
            if cycle.retracing
            for f in range(stride * cycle.actions // 2)
        )

    def end_pairs(self, stride: int = 1) -> PairArray:
        """The first frame and every later border of a cycle (end-point closure)."""
        return _pairs((0, stride * cycle.end) for cycle in self.cycles)

    def idle_pairs(self, stride: int = 1) -> PairArray:
        """The first frame and every frame of the no-ops at the end."""
        end = stride * self.cycles[-1].end
        return _pairs((0, end + f) for f in range(1, stride * self.idle + 1))

    def repeat_pairs(self, stride: int = 1) -> PairArray:
        """The first cycle of a family and its repeats at the same phase, borders shared; empty without repeats.

        A shortened repeat is compared where it agrees with the first: from its start on and back from its end.
        """
        found: set[tuple[int, int]] = set()
        first: dict[int, Cycle] = {}
        for cycle in self.cycles:
            anchor = first.setdefault(cycle.family, cycle)
            if anchor is cycle:
                continue
            ahead = self._agreement(anchor.start, cycle.start, 1, cycle.actions)
            back = self._agreement(anchor.end, cycle.end, -1, cycle.actions)
            found |= {
                (stride * anchor.start + f, stride * cycle.start + f) for f in range(stride * ahead + 1)
            }
            found |= {(stride * anchor.end - f, stride * cycle.end - f) for f in range(stride * back + 1)}
        return _pairs(iter(sorted(found, key=lambda pair: (pair[1], pair[0]))))

    def _agreement(self, one: int, other: int, direction: int, actions: int) -> int:
        """How many actions two paths agree for, walked from latents `one` and `other` in a direction."""
        for i in range(1, actions + 1):
            if _difference(self.c2w_T44[one + direction * i], self.c2w_T44[other + direction * i]) >= (
                CLOSURE_TOLERANCE
            ):
                return i - 1
        return actions


def _pairs(pairs: Iterator[tuple[int, int]]) -> PairArray:
    return np.array(list(pairs), dtype=np.int64).reshape(-1, 2)


def _difference(one: PoseArray, other: PoseArray) -> float:
    return float(np.abs(one - other).max())


def compose(
    parts: Sequence[Part], step: StepSize | Sequence[StepSize], actions: int | None = None
) -> ClosedWord:
    """Cycles one after another, then no-ops up to `actions` (None: no no-ops).

    `step` is one size, or one for each action of every part's labels in turn (the way back takes the sizes of the way
    out). Raises WordError if a loop does not close, a label does not agree with its pose or the word is too long.
    """
    if not parts:
        raise WordError("a closed word needs at least one cycle")
    lengths = [len(part.labels) for part in parts]
    steps = [step] * sum(lengths) if isinstance(step, StepSize) else list(step)
    if len(steps) != sum(lengths):
        raise WordError(
            f"{len(steps)} step sizes for {sum(lengths)} actions on the way out: give one for each"
        )
    poses, cycles, told = [np.eye(4)], list[Cycle](), list[int | None]()
    for part in parts:
        own, steps = steps[: len(part.labels)], steps[len(part.labels) :]
        if not part.labels:
            raise WordError("a cycle without actions: give its way out at least one")
        path = poses_from_labels(list(part.labels), own)
        told += part.labels
        if part.retracing:
            path = np.concatenate([path, path[-2::-1]])
            told += [None] * len(part.labels)
        gap = _difference(path[-1], path[0])
        if not gap < CLOSURE_TOLERANCE:
            raise WordError(
                f'"{format_word(part.labels)}" does not close: it ends {gap:.3g} from its start; '
                "use a retracing cycle or solve for a word that returns"
            )
        path[-1] = path[0]  # rounding must not add up over repeats
        cycles.append(Cycle(len(poses) - 1, len(path) - 1, part.retracing, part.family))
        poses += list(path[1:])
    used = len(poses) - 1
    idle = 0 if actions is None else actions - used
    if idle < 0:
        raise WordError(f"the cycles take {used} actions, but only {actions} are there: shorten the way out")
    c2w_T44 = np.stack(poses + [poses[0]] * idle)
    labels_A = labels_from_poses(c2w_T44)[1:]
    for i, label in enumerate(told):
        if label is not None and label != labels_A[i]:
            raise WordError(
                f'action {i + 1} is "{format_word([label])}", but its pose reads as '
                f'"{format_word(labels_A[i : i + 1])}": take smaller or larger steps'
            )
    return ClosedWord(labels_A, c2w_T44, tuple(cycles), idle)


def retrace(
    forward_A: Sequence[int] | LabelArray,
    step: StepSize | Sequence[StepSize],
    *,
    repeats: int = 1,
    actions: int | None = None,
) -> ClosedWord:
    """Go along a word and back on the same poses, `repeats` times.

    `actions` is the number that the video has (latents - 1). Cycles of whole clips need one more: then the last repeat
    turns one action early and a no-op is left over. Raises WordError where the word is longer than that.
    """
    forward = tuple(check_labels(forward_A).tolist())
    if repeats < 1:
        raise WordError(f"{repeats} repeats of a cycle: ask for at least 1")
    short = actions is not None and 2 * len(forward) * repeats == actions + 1
    parts = [Part(forward, True)] * repeats
    if short:
        parts = [*parts[:-1], Part(forward[:-1], True)]
        if not forward[:-1]:
            raise WordError(
                f"{actions} actions are too few for {repeats} cycles of {len(forward)} out and back"
            )
    steps = (
        step if isinstance(step, StepSize) else [*list(step) * repeats][: sum(len(p.labels) for p in parts)]
    )
    if not isinstance(step, StepSize) and len(step) != len(forward):
        raise WordError(
            f"{len(step)} step sizes for {len(forward)} actions on the way out: give one for each"
        )
    return compose(parts, steps, actions)


def loop(
    labels_A: Sequence[int] | LabelArray, step: StepSize, *, repeats: int = 1, actions: int | None = None
) -> ClosedWord:
    """A word that closes without going back the way it came, `repeats` times; WordError if it does not close."""
    if repeats < 1:
        raise WordError(f"{repeats} repeats of a loop: ask for at least 1")
    return compose([Part(tuple(check_labels(labels_A).tolist()), False)] * repeats, step, actions)


def naive_residual(label: int, half: int, step: StepSize) -> tuple[float, float]:
    """What opposite *keys* leave after m = `half` steps out and back of a move with one turn, in world units.

    (integrated, 2|v| sin(m theta / 2)): the reason why cycles are not made from opposite keys (spec/worldcycle.md 1.3).
    v is the part of the move across the turn's axis: a sideways move is along that of a pitch, and closes.
    WordError for a label with no turn or two.
    """
    keys = keys_of(label)
    turning = [key for key in keys if key in ("right", "left", "up", "down")]
    if len(turning) != 1:
        raise WordError(f'"{format_word([label])}": the formula holds for one turn key with a move')
    across = ("w", "s", "d", "a") if turning[0] in ("right", "left") else ("w", "s")
    moved = step.translation * math.sqrt(sum(key in across for key in keys))
    end = poses_from_labels([label] * half + [inverse(label)] * half, step)[-1]
    predicted = 2 * moved * abs(math.sin(half * math.radians(step.rotation_deg) / 2))
    return float(np.linalg.norm(end[:3, 3])), predicted


class MultiScale(BaseModel):
    """Cycles of several lengths in one video, so that the turn is never at a known place (spec/worldcycle.md 1.5).

    H = n * 2^Q clips; level k has 2^k cycles of H / 2^k clips. One level is drawn for a step of training.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    smallest: int = Field(1, ge=1, description="n: half the clips of the shortest cycle")
    levels: int = Field(4, ge=1, le=10, description="Q: how many lengths of cycles there are")

    @property
    def clips(self) -> int:
        """H, the clips of the whole video."""
        return self.smallest * 2**self.levels

    def table(self) -> list[tuple[int, int]]:
        """(clips a cycle, repeats) of every level."""
        return [(self.clips >> k, 1 << k) for k in range(self.levels)]

    def draw(self, rng: np.random.Generator) -> int:
        """A level 0..Q-1, each as likely; once for all words of a step."""
        return int(rng.random() * self.levels)

    def sample(
        self, rng: np.random.Generator, level: int, words: WordSampler, step: StepSize, clip_latents: int = 4
    ) -> ClosedWord:
        """A retracing cycle of that level in clips * clip_latents latents; its way out is drawn from `words`.

        Raises WordError for a level that does not exist or clips that do not split into a way out and a way back.
        """
        if not 0 <= level < self.levels:
            raise WordError(f"level {level} of cycles: there are levels 0 to {self.levels - 1}")
        clips, repeats = self.table()[level]
        half, rest = divmod(clips * clip_latents, 2)
        if rest or half * 2 * repeats - 1 < 2:
            raise WordError(f"cycles of {clips} clips of {clip_latents} latents do not split into two halves")
        return retrace(words.sample(rng, half), step, repeats=repeats, actions=2 * half * repeats - 1)

    @model_validator(mode="after")
    def _bounded(self) -> "MultiScale":
        if self.clips > 1024:
            raise ValueError(f"{self.clips} clips (smallest * 2^levels): at most 1024")
        return self
