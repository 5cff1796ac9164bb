"""Worlds by name: load one, put a policy's weights into it, and draw its prompts. Stages know no world by name.

A policy folder holds only what is trained; architecture, codec and frozen weights come from the base. So the identity
of what rolls out is the digest of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline import files
from pipeline.camera import StepSize
from pipeline.digests import digest_of, digest_tree
from pipeline.errors import CheckpointError, DataError
from pipeline.updates.config import UpdateConfig
from pipeline.words import TrainingMix

if TYPE_CHECKING:
    from pipeline.updates.policy import SetName
    from pipeline.worlds.base import Scene
    from pipeline.worlds.wan_world import WanWorld

# what of a mini base folder the world is made of; the scorers' weights may lie beside it and do not belong to it
MINI_FILES = ("transformer/config.json", "transformer/*.safetensors", "codec.safetensors")
MINI_NOTES = ("pretrain.json",)


@dataclass(frozen=True)
class Prompt:
    """One prompt of any world.

    `labels_A` are the commanded actions, `c2w_T44` their poses (T = A + 1, float64, relative to frame 0), `step` how
    far one action goes, `K_33` normalised intrinsics; `about` is kept in the group's record (room, start pose).
    `scene` reads it encoded, where it was encoded beforehand.
    """

    index: int
    scene_key: str
    caption: str
    first_frame_HW3: NDArray[np.uint8]
    labels_A: NDArray[np.int64]
    c2w_T44: NDArray[np.float64]
    K_33: NDArray[np.float64]
    step: StepSize
    about: dict[str, Any]
    scene: Callable[[], Scene] | None = None


def scene_of(world: WanWorld, prompt: Prompt) -> Scene:
    """The prompt's scene: encoded beforehand (`wcpipe encode`), or by the world itself."""
    if prompt.scene is not None:
        return prompt.scene()
    return world.encode_scene(prompt.first_frame_HW3, prompt.caption, prompt.scene_key)


def base_digest(folder: Path) -> str:
    """Digest of a base's weights and configuration. Raises CheckpointError when they are not there."""
    try:
        return digest_tree(folder, MINI_FILES)
    except DataError as error:
        raise CheckpointError(f"{folder}: holds no base; run `wcpipe base`") from error


def copy_base(source: Path, target: Path) -> None:
    """Copy a base folder atomically, without anything that is not part of the world. Raises CheckpointError."""
    import shutil

    chosen = [path for pattern in (*MINI_FILES, *MINI_NOTES) for path in sorted(source.glob(pattern))]
    if not (source / "transformer" / "config.json").exists():
        raise CheckpointError(
            f"{source}: holds no mini base (transformer/config.json is missing); "
            "restore it from the repository or set world.base: pretrain"
        )
    with files.replace_folder(target) as folder:
        for path in chosen:
            copy = folder / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def open_world(name: str, folder: Path) -> WanWorld:
    """The world model with its base weights, on the CPU in float32."""
    assert name == "mini", name  # config.WorldConfig admits no other
    from pipeline.worlds.mini.load import load_mini

    return load_mini(folder)


def policy_digest(base: Path, policy: Path) -> str:
    """Identity of what rolls out: the base and the policy's old weights; reads no tensors of the policy."""
    from pipeline.updates.checkpoint import read_state

    return digest_of([base_digest(base), read_state(policy)["state"]["digest"]])


def open_policy(
    name: str, base: Path, policy: Path, weights: SetName, update: UpdateConfig, seed: int
) -> WanWorld:
    """The world under one weight set of a saved policy, for inference. Raises CheckpointError when they do not fit."""
    from pipeline.updates.policy import load_weights, prepare_params

    world = open_world(name, base)
    prepare_params(world.model, update.params, seed)
    load_weights(world.model, policy, weights)
    world.model.eval()
    return world


def make_prompts(
    name: str, split: str, indices: Iterable[int], seed: int, actions: int, words: TrainingMix
) -> list[Prompt]:
    """Prompts number `indices` of a split ("rl", "evaluation"), each a pure function of (split, index, seed)."""
    assert name == "mini", name
    from pipeline.worlds.mini.clips import INTRINSICS_33, STEP
    from pipeline.worlds.mini.prompts import make_prompt

    prompts = []
    for index in indices:
        made = make_prompt(split, index, seed, actions, words)
        prompts.append(
            Prompt(
                index=index,
                scene_key=made.scene_key,
                caption=made.caption,
                first_frame_HW3=made.first_frame_HW3,
                labels_A=np.asarray(made.labels_A, np.int64),
                c2w_T44=np.asarray(made.c2w_T44, np.float64),
                K_33=np.asarray(INTRINSICS_33, np.float64),
                step=STEP,
                about={
                    "scene_seed": made.scene_seed,
                    "start": np.asarray(made.start_44, np.float64).tolist(),
                },
            )
        )
    return prompts
