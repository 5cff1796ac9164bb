"""The published bases as worlds: a base folder becomes the WorldModel that the stages use.

    world.json        which world and checkpoint it is, and the size of its frames, which no network's config says
    transformer/      config.json, *.safetensors (`wcpipe import`)
    vae/              the frame codec, as diffusers publishes it

Every other size is read from the two config.json. Tiny networks of the same classes are worlds like the published
ones: that is what the tests run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import files
from pipeline.digests import digest_tree
from pipeline.errors import CheckpointError, DataError
from pipeline.sampler import PRESETS

if TYPE_CHECKING:
    import torch

    from pipeline.worlds.base import WorldSpec
    from pipeline.worlds.codecs import VideoCodec
    from pipeline.worlds.wan_world import WanWorld

WORLD = "world.json"
FILES = (
    WORLD,
    *(f"{part}/{name}" for part in ("transformer", "vae") for name in ("config.json", "*.safetensors")),
)


@dataclass(frozen=True)
class Kind:
    """What a published world is beyond its networks (spec worldplay 1, 2).

    frame_size      height, width in pixels
    checkpoints     published checkpoint -> its sampling preset (pipeline/sampler.py); the first is the usual one
    memory          budget, recent, sink, in latents
    """

    frame_size: tuple[int, int]
    fps: int
    memory: tuple[int, int, int]
    checkpoints: Mapping[str, str]


KINDS: dict[str, Kind] = {
    "worldplay-5b": Kind((704, 1280), 16, (16, 12, 0), {"distilled": "worldplay-5b-distilled"}),
    "worldplay-8b": Kind(
        (480, 832),
        24,
        (20, 12, 4),
        {
            "ar": "worldplay-8b-ar",
            "ar-rl": "worldplay-8b-ar",
            "ar-distilled": "worldplay-8b-distilled",
        },
    ),
}


@dataclass(frozen=True)
class About:
    """The content of world.json; `checkpoint` is "unknown" where nobody said which one it is."""

    world: str
    checkpoint: str
    frame_size: tuple[int, int]

    def to_json(self) -> dict[str, Any]:
        return {"world": self.world, "checkpoint": self.checkpoint, "frame_size": list(self.frame_size)}

    @property
    def preset(self) -> str:
        """Name of the checkpoint's own sampling preset; that of the usual checkpoint where it is unknown."""
        known = KINDS[self.world].checkpoints
        return known.get(self.checkpoint, next(iter(known.values())))


def guess_checkpoint(world: str, source: Path) -> str:
    """Which published checkpoint a path names (`ar_distilled_action_model/...`), else "unknown"."""
    known = list(KINDS[world].checkpoints)
    if len(known) == 1:
        return known[0]
    for part in reversed(source.parts):
        name = part.replace("_", "-").replace("-action", "").replace("-model", "")
        if name in known:
            return name
    return "unknown"


def read_world(folder: Path, name: str | None = None) -> About:
    """world.json of a base folder; with `name`, it must be that world. Raises CheckpointError."""
    path = folder / WORLD
    try:
        data = files.read_json(path, "make the folder with `wcpipe import`")
        height, width = (int(size) for size in data["frame_size"])
        about = About(str(data["world"]), str(data["checkpoint"]), (height, width))
    except DataError as error:
        raise CheckpointError(str(error)) from error
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: needs world, checkpoint and frame_size = [height, width]; make the folder with `wcpipe import`"
        ) from error
    if about.world not in KINDS or (name is not None and about.world != name):
        wanted = name or " or ".join(KINDS)
        raise CheckpointError(f"{path}: is {about.world!r}, not {wanted}; set world.name or world.weights")
    return about


def open_codec(folder: Path, device: torch.device | str = "cpu") -> VideoCodec:
    """The frame codec of a base folder; weights are read when it is first used. Raises CheckpointError."""
    from pipeline.worlds.codecs import HunyuanCodec, WanCodec

    kind = WanCodec if read_world(folder).world == "worldplay-5b" else HunyuanCodec
    if not (folder / "vae" / "config.json").exists():
        raise CheckpointError(
            f"{folder / 'vae'}: holds no frame codec; put diffusers' vae folder of the base there, or import with --vae"
        )
    return kind(folder / "vae", device)


def codec_digest(folder: Path) -> str:
    """Identity of a base folder's frame codec. Raises DataError when there is none."""
    return digest_tree(folder / "vae", ("config.json", "*.safetensors"))


def world_spec(about: About, codec: VideoCodec, truncate_timestep: bool = False) -> WorldSpec:
    """Constants of the world. Raises CheckpointError when frames do not divide into the codec's cells."""
    from pipeline.worlds.base import MemoryRule, WorldSpec

    kind, preset = KINDS[about.world], PRESETS[about.preset]
    height, width = about.frame_size
    if height % codec.spatial or width % codec.spatial:
        raise CheckpointError(
            f"world.json: frames of {height} x {width} pixels do not divide into the codec's cells of {codec.spatial}"
        )
    budget, recent, sink = kind.memory
    return WorldSpec(
        latent_shape=(codec.channels, height // codec.spatial, width // codec.spatial),
        frame_size=about.frame_size,
        stride=codec.stride,
        truncate_timestep=truncate_timestep,
        memory=MemoryRule(budget=budget, recent=recent, sink=sink),
        steps=preset.steps,
        shift=preset.shift,
        fps=kind.fps,
        condition_latent=about.world == "worldplay-8b",
    )


def open_worldplay(
    name: str, folder: Path, device: torch.device | str = "cpu", truncate_timestep: bool = False
) -> WanWorld:
    """The world of a base folder, products in bfloat16. Raises CheckpointError when something is missing or misfits."""
    import torch

    from pipeline.worlds.checkpoints import load_hunyuan, load_wan

    about, codec = read_world(folder, name), open_codec(folder, device)
    spec, C = world_spec(about, codec, truncate_timestep), codec.channels
    if name == "worldplay-5b":
        from pipeline.worlds.wan_world import WanWorld

        wan = load_wan(folder / "transformer", device=device)
        _check_fit(
            folder, (wan.config.in_channels, wan.config.out_channels), (C, C), spec, wan.config.patch_size[1:]
        )
        return WanWorld(wan, codec, spec, autocast=torch.bfloat16)
    from pipeline.worlds.hunyuan_world import HunyuanWorld

    hunyuan = load_hunyuan(folder / "transformer", device=device)
    channels = (hunyuan.config.in_channels, hunyuan.config.out_channels)
    _check_fit(folder, channels, (2 * C + 1, C), spec, (hunyuan.config.patch_size,) * 2)
    return HunyuanWorld(hunyuan, codec, spec, autocast=torch.bfloat16)


def _check_fit(
    folder: Path, have: tuple[int, int], need: tuple[int, int], spec: WorldSpec, patch: tuple[int, int]
) -> None:
    if have != need:
        raise CheckpointError(
            f"{folder}: the transformer takes and gives {have[0]} and {have[1]} channels, its codec needs {need[0]} "
            f"and {need[1]}: transformer/ and vae/ must be of one base"
        )
    if spec.latent_shape[1] % patch[0] or spec.latent_shape[2] % patch[1]:
        raise CheckpointError(
            f"{folder / WORLD}: {spec.latent_shape[1]} x {spec.latent_shape[2]} latent cells do not divide into the "
            f"transformer's patches of {patch[0]} x {patch[1]}: choose another frame_size"
        )
