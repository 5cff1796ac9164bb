"""Prompts whose words close: a room, a start pose from which the word can be walked, and the pairs that must agree.

The word's poses are the mirrored list of `cycles.py` and not what its labels integrate to; conditioning, placement and
the oracle all take the poses. A relation has two words from one start; the candidates walk the second, and the end
frame of the first, sampled once, is what they are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.actions import format_word
from pipeline.camera import StepSize, frames_of_latents, labels_from_poses, poses_from_labels
from pipeline.cycles import ClosedWord, MultiScale
from pipeline.errors import WordError
from pipeline.pairs import FramePairs
from pipeline.plan import Plan
from pipeline.relations import Relation, sample_relations
from pipeline.words import FAMILIES, TrainingMix
from pipeline.worlds.registry import Prompt, make_prompts

if TYPE_CHECKING:
    from pipeline.cycle_config import CycleConfig
    from pipeline.worlds.base import WorldSpec
    from pipeline.worlds.scene_store import Scenes

Poses = NDArray[np.float64]
TRIES = 400
# Keys of relations: single moves, diagonals and turns. Compound turns meet on no lattice.
RELATION_KEYS = tuple(
    label for family in ("translation", "yaw", "two_translations") for label in FAMILIES[family]
)


@dataclass(frozen=True)
class ClosedPrompt:
    """`prompt` with the actions up to the end of the trained clip; `pairs` of frames of the whole video.

    `other` is the first word of a relation from the same start (None: the video's own first frame is the reference).
    """

    prompt: Prompt
    pairs: FramePairs
    other: Prompt | None = None

    def about(self) -> dict[str, Any]:
        """What the group's record keeps."""
        kept: dict[str, Any] = {"pairs": self.pairs.to_json()}
        return kept | ({"other": format_word(self.other.labels_A)} if self.other is not None else {})


def make_closed_prompts(
    name: str | Scenes,
    split: str,
    indices: Iterable[int],
    seed: int,
    plan: Plan,
    config: CycleConfig,
    mix: TrainingMix,
    spec: WorldSpec,
) -> list[ClosedPrompt]:
    """Prompts number `indices`, each a pure function of (split, index, seed, plan, parameters). Raises WordError."""
    latents = spec.clip_latents * plan.clip
    made = []
    for index in indices:
        rng = np.random.default_rng([seed, index, 0xC105ED])
        for prompt in _starts(name, split, index, seed, mix):
            if plan.words == "relation":
                found = _relation(rng, prompt, seed, latents, spec, name)
            else:
                found = _cycle(rng, prompt, plan, config, mix, spec, name)
            if found is not None:
                made.append(found)
                break
        else:
            raise WordError(
                f"prompt {index}: closed words of {plan.clip} clips fit into none of {TRIES} rooms; lower cycle.levels "
                "or cycle.relation_clips"
            )
    return made


def _starts(name: str | Scenes, split: str, index: int, seed: int, mix: TrainingMix) -> Iterable[Prompt]:
    """Scenes to try for one prompt: many rooms of the mini world; elsewhere the one scene that the prompt has.

    Their words and poses are replaced.
    """
    if name != "mini":
        yield from make_prompts(name, split, [index], seed, 1, mix)
        return
    for attempt in range(TRIES):
        yield _room(split, index, seed, attempt)


def _room(split: str, index: int, seed: int, attempt: int) -> Prompt:
    """A room of the mini world, not rendered and without a start yet."""
    from pipeline.worlds.mini.clips import INTRINSICS_33, STEP
    from pipeline.worlds.mini.renderer import SPLITS

    rng = np.random.default_rng([seed, index, SPLITS[split][0], attempt, 0xC105ED])
    room = int(rng.integers(*SPLITS[split]))
    nothing = np.zeros((0, 0, 3), np.uint8)
    return Prompt(
        index,
        "",
        "",
        nothing,
        np.zeros(0, np.int64),
        np.eye(4)[None],
        np.asarray(INTRINSICS_33, np.float64),
        STEP,
        {"scene_seed": room},
    )


def placed(
    name: str | Scenes,
    prompt: Prompt,
    rng: np.random.Generator,
    labels_A: NDArray[np.int64],
    c2w_T44: Poses,
    ways: Poses,
) -> Prompt | None:
    """The prompt with this word; in the mini world at a start from which all poses `ways` stay clear, None if there is
    none.
    """
    if name != "mini":
        return replace(prompt, labels_A=labels_A, c2w_T44=c2w_T44)
    from pipeline.worlds.mini.prompts import Prompt as MiniPrompt
    from pipeline.worlds.mini.renderer import MiniScene, place_path, render

    scene = MiniScene.make(int(prompt.about["scene_seed"]))
    start = place_path(scene, rng, ways, tries=256)
    if start is None:
        return None
    frame = render(scene, start[None])[0]
    own = MiniPrompt(prompt.index, scene.seed, start, labels_A, c2w_T44, frame, scene.caption)
    return replace(
        prompt,
        scene_key=own.scene_key,
        caption=scene.caption,
        first_frame_HW3=frame,
        labels_A=labels_A,
        c2w_T44=c2w_T44,
        about={"scene_seed": scene.seed, "start": np.asarray(start, np.float64).tolist()},
    )


def closed_case(
    name: str | Scenes, split: str, index: int, seed: int, build: Callable[[StepSize], ClosedWord]
) -> tuple[ClosedWord, Prompt | None]:
    """A case of a benchmark: one given word (`build` makes it for the world's step) at its first fitting start."""
    rng = np.random.default_rng([seed, index, 0xCA5E])
    word = None
    for prompt in _starts(name, split, index, seed, TrainingMix()):
        word = word or build(prompt.step)
        found = placed(name, prompt, rng, word.labels_A, word.c2w_T44, word.c2w_T44)
        if found is not None:
            return word, found
    if word is None:
        raise WordError(f"prompt {index}: there is no scene to start from")
    return word, None


def _cycle(
    rng: np.random.Generator,
    prompt: Prompt,
    plan: Plan,
    config: CycleConfig,
    mix: TrainingMix,
    spec: WorldSpec,
    name: str | Scenes,
) -> ClosedPrompt | None:
    scale = MultiScale(smallest=config.smallest, levels=config.levels)
    assert plan.level is not None
    word = scale.sample(rng, plan.level, mix, prompt.step, spec.clip_latents)
    latents = spec.clip_latents * plan.clip
    found = placed(name, prompt, rng, word.labels_A[: latents - 1], word.c2w_T44[:latents], word.c2w_T44)
    if found is None:
        return None
    return ClosedPrompt(found, _pairs_of(word, plan, spec))


def _pairs_of(word: ClosedWord, plan: Plan, spec: WorldSpec) -> FramePairs:
    start = 0 if plan.first == 1 else frames_of_latents(spec.clip_latents * (plan.first - 1), spec.stride)
    stop = frames_of_latents(spec.clip_latents * plan.clip, spec.stride)
    return FramePairs.of_word(word, spec.stride).ending_in(slice(start, stop))


@lru_cache(maxsize=8)
def relation_pool(seed: int, step: StepSize, actions: int) -> tuple[Relation, ...]:
    """The relations that prompts of a seed draw from: many words are needed for one collision, so they share a pool."""
    rng = np.random.default_rng([seed, actions, 0x9E1A])
    found = sample_relations(rng, step, actions=actions, keys=RELATION_KEYS, hold=(1, 4), words=300)
    if not found:
        raise WordError(f"no two words of {actions} actions end at one pose: raise cycle.relation_clips")
    return tuple(found)


def _relation(
    rng: np.random.Generator, prompt: Prompt, seed: int, latents: int, spec: WorldSpec, name: str | Scenes
) -> ClosedPrompt | None:
    pool = relation_pool(seed, prompt.step, latents - 1)
    relation = pool[int(rng.random() * len(pool))]
    words = [relation.first, relation.second]
    if relation.second and rng.random() < 0.5:
        words.reverse()
    first, second = words if relation.second else (None, words[0])
    last = frames_of_latents(latents, spec.stride) - 1
    poses = poses_from_labels(list(second), prompt.step)
    ways = poses if first is None else np.concatenate([poses, poses_from_labels(list(first), prompt.step)])
    found = placed(name, prompt, rng, np.array(second, np.int64), poses, ways)
    if found is None:
        return None
    if first is None:  # a loop: its end must look like its own first frame
        return ClosedPrompt(found, FramePairs(np.array([[0, last]]), FramePairs.to_reference(last).kind_Q))
    other = poses_from_labels(list(first), prompt.step)
    told = labels_from_poses(other)[1:]
    return ClosedPrompt(found, FramePairs.to_reference(last), replace(found, labels_A=told, c2w_T44=other))
