"""Encoded scenes on disk: what `wcpipe encode` writes once, and the prompts that are drawn from it.

Encoders of a published base are as large as the base itself, so no stage that trains or samples ever loads one: a
scene's first latent and all embeddings of its image and caption are read from here. One group of the store is one
scene; the last group is the empty caption, which guidance leads away from. Embeddings are padded to the longest caption
of the store where a world has a mask for it, and never cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.actions import parse_word
from pipeline.camera import (
    WORLDCOMPASS_STEP,
    WORLDPLAY_INTRINSICS,
    StepSize,
    labels_from_poses,
    pose_json_load,
    poses_from_labels,
)
from pipeline.errors import ConfigError, DataError, WordError
from pipeline.scenes import SceneEntry
from pipeline.stores import ArraySpec, GroupStore

if TYPE_CHECKING:
    import torch

    from pipeline.words import TrainingMix
    from pipeline.worlds.base import Scene, WorldSpec

KIND = "scenes"
NEGATIVE = "negative"
REMEDY = "run `wcpipe encode` again"
# embeddings of the image: a negative scene has another text and the same image
OF_THE_IMAGE = ("extra.vision",)
# keys of the two draws of a prompt
_ORDER, _WORD = 0x5CE9E, 0x3082D


def scene_arrays(spec: WorldSpec, embeddings: Mapping[str, tuple[tuple[int, ...], str]]) -> list[ArraySpec]:
    """Arrays of one scene: `first_frame` uint8 [H, W, 3], `first_latent` float32 [C, h, w] and the embeddings, given as
    name -> (shape, dtype) with the names of `Scene.tensors`.
    """
    return [
        ArraySpec("first_frame", (*spec.frame_size, 3), "uint8"),
        ArraySpec("first_latent", spec.latent_shape, "float32"),
        *(ArraySpec(name, shape, dtype) for name, (shape, dtype) in embeddings.items()),
    ]


def scene_record(entry: SceneEntry) -> dict[str, Any]:
    """What a scene's record says: image, caption, and its own actions as labels and poses, if it has any.

    Raises DataError when a pose file changes its intrinsics on the way.
    """
    record: dict[str, Any] = {"image": entry.name, "caption": entry.caption}
    if entry.word is not None:
        record["labels"] = parse_word(entry.word)
    if entry.poses is not None:
        path = pose_json_load(entry.poses)
        if not np.allclose(path.K_T33, path.K_T33[0]):
            raise DataError(f"{entry.poses}: its intrinsics change; use one K for all latents")
        labels = labels_from_poses(path.c2w_T44)[1:]
        record |= {"labels": labels.tolist(), "c2w": path.c2w_T44.tolist(), "K": path.K_T33[0].tolist()}
    return record


@dataclass(frozen=True)
class Scenes:
    """A finished store of encoded scenes, and how far one action goes in its prompts."""

    store: GroupStore
    step: StepSize = WORLDCOMPASS_STEP

    @staticmethod
    def open(path: Path, spec: WorldSpec, step: StepSize = WORLDCOMPASS_STEP) -> Scenes:
        """Open for a world of these sizes. Raises DataError when it is missing, unfinished or of other sizes."""
        store = GroupStore.open(path, REMEDY).require_complete(REMEDY)
        if store.about["kind"] != KIND:
            raise DataError(f"{path}: holds {store.about['kind']}, not encoded scenes; set world.scenes")
        for name, wanted in (("first_frame", (*spec.frame_size, 3)), ("first_latent", spec.latent_shape)):
            if (found := store.specs[name].shape) != wanted:
                raise DataError(
                    f"{path}: {name} is {found}, this world needs {wanted}: it was encoded for another base or frame "
                    f"size; {REMEDY}"
                )
        return Scenes(store, step)

    def __len__(self) -> int:
        return len(self.store) - 1

    def key(self, index: int) -> str:
        return self.store.keys[index]

    def record(self, index: int) -> dict[str, Any]:
        return self.store.record(index)

    def first_frame(self, index: int) -> NDArray[np.uint8]:
        """uint8 [H, W, 3]."""
        return self.store.read(index, "first_frame")

    def scene(self, index: int) -> Scene:
        """One scene with its negative; reads the store."""
        from pipeline.worlds.base import Scene

        scene = Scene.from_tensors(
            self._embeddings(index), self.store.read_tensor(index, "first_latent"), self.key(index)
        )
        negative = self._embeddings(len(self))
        negative |= {
            f"extra.{name}": value for name, value in scene.extras.items() if f"extra.{name}" in OF_THE_IMAGE
        }
        scene.negative = Scene.from_tensors(negative, scene.first_latent_CHW, scene.key)
        return scene

    def _embeddings(self, index: int) -> dict[str, torch.Tensor]:
        names = [name for name in self.store.specs if name == "text" or name.startswith("extra.")]
        return {name: self.store.read_tensor(index, name) for name in names}

    def place(self, prompt: int, seed: int) -> int:
        """Which scene prompt number `prompt` shows: all of them once, in an order of `seed`, then all again."""
        lap, at = divmod(prompt, len(self))
        return int(np.random.default_rng([seed, lap, _ORDER]).permutation(len(self))[at])

    def path(
        self, index: int, prompt: int, seed: int, actions: int, words: TrainingMix
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        """Labels [A], poses [A + 1, 4, 4] and K [3, 3]: the scene's own, or a word drawn from the mix.

        Raises WordError when the scene's own actions are too few.
        """
        record = self.record(index)
        K_33 = np.asarray(record.get("K", WORLDPLAY_INTRINSICS.normalised()), np.float64)
        if "labels" not in record:
            labels = np.asarray(words.sample(np.random.default_rng([seed, prompt, _WORD]), actions), np.int64)
            return labels, poses_from_labels(labels, self.step), K_33
        own = np.asarray(record["labels"], np.int64)
        if len(own) < actions:
            raise WordError(
                f"scene {self.key(index)}: has {len(own)} actions of its own, the target clip needs {actions}: "
                "lengthen its word or poses and encode again, or lower target.n_max"
            )
        labels = own[:actions]
        c2w = np.asarray(record["c2w"], np.float64)[: actions + 1] if "c2w" in record else None
        return labels, poses_from_labels(labels, self.step) if c2w is None else c2w, K_33


def indices_of(scenes: Scenes, split: str, indices: Iterable[int], seed: int) -> list[tuple[int, int]]:
    """(prompt, scene) pairs. Raises ConfigError for a split that scenes do not have."""
    if split != "rl":
        raise ConfigError(
            f"world.scenes has no split {split!r}: rooms with a known truth are the mini world's; "
            "encode the scenes to be judged into a store of their own"
        )
    return [(prompt, scenes.place(prompt, seed)) for prompt in indices]
