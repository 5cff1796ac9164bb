"""A mini base folder opens as a world, or says what is wrong with it."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.errors import CheckpointError
from pipeline.worlds.mini.load import load_mini
from pipeline.worlds.mini.renderer import HEIGHT, WIDTH, MiniScene, render, start_poses


def test_the_world_of_a_folder(tiny_base: Path) -> None:
    world = load_mini(tiny_base)
    spec = world.spec
    assert (spec.latent_shape, spec.frame_size, spec.stride, spec.clip_latents) == (
        (8, 5, 8),
        (HEIGHT, WIDTH),
        1,
        4,
    )
    scene = MiniScene.make(1)
    frame = render(scene, start_poses(scene, np.random.default_rng(0), 1))[0]
    encoded = world.encode_scene(frame, scene.caption, "key")
    assert encoded.first_latent_CHW.shape == spec.latent_shape
    assert torch.isfinite(encoded.first_latent_CHW).all()


@pytest.mark.parametrize("missing", ["codec.safetensors", "transformer"])
def test_a_missing_part_is_named(tiny_base: Path, tmp_path: Path, missing: str) -> None:
    folder = tmp_path / "mini"
    shutil.copytree(tiny_base, folder)
    path = folder / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(CheckpointError, match=missing.split(".")[0]):
        load_mini(folder)
