"""Prompts of the mini world: a room, a start pose from which the word can be walked, and the word itself.

A prompt is a pure function of (split, index, seed): prefixes can be re-made on any machine and in any shard.
"""

from dataclasses import dataclass

import numpy as np

from pipeline.errors import WordError
from pipeline.words import TrainingMix
from pipeline.worlds.mini.clips import paths
from pipeline.worlds.mini.renderer import SPLITS, MiniScene, place_path, render


@dataclass(frozen=True)
class Prompt:
    """`start_44` is in the room's frame; `labels_A` are the commanded actions, `c2w_T44` their poses from frame 0.

    `first_frame_HW3` is uint8 [40, 64, 3]. The scene key names room and start pose.
    """

    index: int
    scene_seed: int
    start_44: np.ndarray
    labels_A: np.ndarray
    c2w_T44: np.ndarray
    first_frame_HW3: np.ndarray
    caption: str

    @property
    def scene_key(self) -> str:
        """Room and start pose in one word."""
        return f"mini-{self.scene_seed}-" + "-".join(
            f"{value:.4f}" for value in self.start_44[[0, 2, 0], [3, 3, 2]]
        )


def place(scene: MiniScene, rng: np.random.Generator, labels_A: np.ndarray) -> np.ndarray | None:
    """Start pose for a given word in a given room, or None where it fits nowhere."""
    return place_path(scene, rng, paths(np.asarray(labels_A)[None])[0], tries=256)


def prompt_of(index: int, scene: MiniScene, start_44: np.ndarray, labels_A: np.ndarray) -> Prompt:
    """Put a prompt together from its parts; renders the first frame."""
    labels = np.asarray(labels_A, np.int64)
    return Prompt(
        index,
        scene.seed,
        start_44,
        labels,
        paths(labels[None])[0],
        render(scene, start_44[None])[0],
        scene.caption,
    )


def make_prompt(split: str, index: int, seed: int, actions: int, mix: TrainingMix) -> Prompt:
    """Prompt number `index` of a split ('rl', 'evaluation', ...) with a word of `actions` actions drawn from `mix`."""
    lowest, highest = SPLITS[split]
    rng = np.random.default_rng([seed, index, lowest])
    for _ in range(200):
        scene = MiniScene.make(int(rng.integers(lowest, highest)))
        labels = np.asarray(mix.sample(rng, actions), np.int64)
        start = place(scene, rng, labels)
        if start is not None:
            return prompt_of(index, scene, start, labels)
    raise WordError(
        f"words of {actions} actions do not fit into the mini world's rooms; lower the number of clips (target.n_max)"
    )


def make_prompt_for_word(split: str, index: int, seed: int, labels_A: np.ndarray) -> Prompt:
    """Prompt number `index` of a split for one given word; rooms are drawn until the word fits."""
    lowest, highest = SPLITS[split]
    rng = np.random.default_rng([seed, index, lowest, 1])
    for _ in range(400):
        scene = MiniScene.make(int(rng.integers(lowest, highest)))
        start = place(scene, rng, labels_A)
        if start is not None:
            return prompt_of(index, scene, start, labels_A)
    raise WordError(f"a word of {len(labels_A)} actions fits into none of 400 rooms; use a shorter word")
