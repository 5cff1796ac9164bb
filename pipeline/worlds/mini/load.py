"""Open a mini base folder (transformer/, codec.safetensors) as the WorldModel that the stages use."""

from pathlib import Path

import torch

from pipeline.allocator import keep_freed_memory
from pipeline.worlds.base import WorldSpec
from pipeline.worlds.checkpoints import load_wan
from pipeline.worlds.mini.clips import CLIP, MEMORY
from pipeline.worlds.mini.codec import GRID_H, GRID_W, PatchCodec
from pipeline.worlds.mini.renderer import HEIGHT, WIDTH
from pipeline.worlds.mini.text import encode_caption
from pipeline.worlds.wan_world import WanWorld


def mini_spec(channels: int) -> WorldSpec:
    """Constants of the mini world: one frame a latent, 40 tokens a frame."""
    return WorldSpec(
        latent_shape=(channels, GRID_H, GRID_W),
        frame_size=(HEIGHT, WIDTH),
        stride=1,
        clip_latents=CLIP,
        memory=MEMORY,
        steps=5,
        shift=3.0,
        fps=4,
    )


def load_mini(folder: Path, device: str = "cpu") -> WanWorld:
    """The world of a base folder, products in bfloat16. Raises CheckpointError when a file is missing or damaged."""
    if device == "cpu":
        keep_freed_memory()
    codec = PatchCodec.load(folder / "codec.safetensors")
    model = load_wan(folder / "transformer").to(device)
    return WanWorld(
        model, codec, mini_spec(codec.channels), encode_text=encode_caption, autocast=torch.bfloat16
    )
