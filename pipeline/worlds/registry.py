"""Worlds by name: load one, put a policy's weights into it, and draw its prompts. Stages know no world by name.

A policy folder holds only what is trained; architecture, codec and frozen weights come from the base. So the identity
of what rolls out is the digest of both.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
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
from pipeline.worlds.worldplay import FILES, WORLD, codec_digest, open_worldplay, read_world

if TYPE_CHECKING:
    from pipeline.config import WorldConfig
    from pipeline.updates.policy import SetName
    from pipeline.worlds.base import Scene, WorldModel, WorldSpec
    from pipeline.worlds.scene_store import Scenes
    from pipeline.worlds.wan_world import WanWorld

# what of a mini base folder the world is made of; the scorers' weights may lie beside it and do not belong to it
MINI_FILES = ("transformer/config.json", "transformer/*.safetensors", "codec.safetensors")
MINI_NOTES = ("pretrain.json",)
NOTES = ("import.json", "transformer/*.index.json", "vae/*.index.json")


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


def scene_of(world: WorldModel, prompt: Prompt, guided: bool = False) -> Scene:
    """The prompt's scene, encoded beforehand (`wcpipe encode`) or by the world itself; a negative only if `guided`."""
    if prompt.scene is not None:
        scene = prompt.scene()
        return scene if guided else replace(scene, negative=None)
    return world.encode_scene(prompt.first_frame_HW3, prompt.caption, prompt.scene_key)


def base_digest(folder: Path) -> str:
    """Digest of a base's weights and configuration. Raises CheckpointError when they are not there."""
    try:
        return digest_tree(folder, FILES if (folder / WORLD).exists() else MINI_FILES)
    except DataError as error:
        raise CheckpointError(f"{folder}: holds no base; run `wcpipe base`") from error


def copy_base(name: str, source: Path, target: Path) -> None:
    """Put a base folder of world `name` in place atomically, without anything that is not part of the world.

    Published weights are linked where the file system can: nothing ever writes into a file of a base. Raises
    CheckpointError when `source` is no base of that world.
    """
    if name != "mini":
        read_world(source, name)
    elif not (source / "transformer" / "config.json").exists():
        raise CheckpointError(
            f"{source}: holds no mini base (transformer/config.json is missing); "
            "restore it from the repository or set world.base: pretrain"
        )
    patterns = (*MINI_FILES, *MINI_NOTES) if name == "mini" else (*FILES, *NOTES)
    chosen = [path for pattern in patterns for path in sorted(source.glob(pattern))]
    with files.replace_folder(target) as folder:
        for path in chosen:
            copy = folder / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            _place(path, copy, link=name != "mini")


def _place(path: Path, copy: Path, link: bool) -> None:
    if link:
        with contextlib.suppress(OSError):  # another file system, or one without links
            os.link(path.resolve(), copy)
            return
    shutil.copyfile(path, copy)


def default_device(name: str) -> str:
    """Where a world runs unless told: published bases on the GPU of this process (`LOCAL_RANK`), if there is one.

    The mini world stays on the CPU: it is too small to gain, and its artifacts are compared bit by bit.
    """
    import torch

    if name == "mini" or not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"


def open_world(name: str, folder: Path, truncate_timestep: bool = False) -> WanWorld:
    """The world model with its base weights, on `default_device`. Mini: float32; published: the file's dtype.

    `truncate_timestep` is `sampler.truncate_timestep`. Raises CheckpointError when `folder` is no base of that world.
    """
    if name == "mini":
        from pipeline.worlds.mini.load import load_mini

        world = load_mini(folder)
        world.spec = replace(world.spec, truncate_timestep=truncate_timestep)
        return world
    return open_worldplay(name, folder, default_device(name), truncate_timestep)


def checkpoint_of(name: str, folder: Path) -> str | None:
    """Which published checkpoint a base folder holds; None for the mini world."""
    return None if name == "mini" else read_world(folder, name).checkpoint


def policy_digest(base: Path, policy: Path) -> str:
    """Identity of what rolls out: the base and the policy's old weights; reads no tensors of the policy."""
    from pipeline.updates.checkpoint import read_state

    return digest_of([base_digest(base), read_state(policy)["state"]["digest"]])


def open_policy(
    name: str,
    base: Path,
    policy: Path,
    weights: SetName,
    update: UpdateConfig,
    seed: int,
    truncate_timestep: bool = False,
) -> WanWorld:
    """The world under one weight set of a saved policy, for inference. Raises CheckpointError when they do not fit."""
    from pipeline.updates.policy import load_weights, prepare_params

    world = open_world(name, base, truncate_timestep)
    prepare_params(world.model, update.params, seed)
    load_weights(world.model, policy, weights)
    world.model.eval()
    return world


def prompt_source(config: WorldConfig, spec: WorldSpec, base: Path | None = None) -> str | Scenes:
    """Where a world's prompts come from: "mini", which makes its own, or a store of encoded scenes (`world.scenes`).

    Raises DataError when the scenes were encoded with another frame codec than that of `base` (None: not checked).
    """
    if config.name == "mini":
        return config.name
    from pipeline.worlds.scene_store import REMEDY, Scenes

    scenes = Scenes.open(Path(config.scenes), spec, StepSize(**config.step.model_dump()))
    if base is not None and scenes.store.about["inputs"]["codec"] != codec_digest(base):
        raise DataError(
            f"{config.scenes}: was encoded with another frame codec than that of {base}; {REMEDY}"
        )
    return scenes


def source_inputs(config: WorldConfig) -> dict[str, Any]:
    """What a world's prompts follow from, for the inputs of an artifact; nothing for the mini world."""
    if config.name == "mini":
        return {}
    from pipeline.stores import GroupStore
    from pipeline.worlds.scene_store import REMEDY

    scenes = GroupStore.open(Path(config.scenes), REMEDY)
    return {"scenes": scenes.content_digest(), "step": config.step.model_dump()}


def make_prompts(
    source: str | Scenes, split: str, indices: Iterable[int], seed: int, actions: int, words: TrainingMix
) -> list[Prompt]:
    """Prompts number `indices` of a split ("rl", "evaluation"), each a pure function of (split, index, seed)."""
    if not isinstance(source, str):
        return _scene_prompts(source, split, indices, seed, actions, words)
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


def _scene_prompts(
    scenes: Scenes, split: str, indices: Iterable[int], seed: int, actions: int, words: TrainingMix
) -> list[Prompt]:
    from pipeline.worlds.scene_store import indices_of

    prompts = []
    for index, at in indices_of(scenes, split, indices, seed):
        labels_A, c2w_T44, K_33 = scenes.path(at, index, seed, actions, words)
        record = scenes.record(at)
        prompts.append(
            Prompt(
                index=index,
                scene_key=scenes.key(at),
                caption=record["caption"],
                first_frame_HW3=scenes.first_frame(at),
                labels_A=labels_A,
                c2w_T44=c2w_T44,
                K_33=K_33,
                step=scenes.step,
                about={"image": record["image"]},
                scene=partial(scenes.scene, at),
            )
        )
    return prompts
