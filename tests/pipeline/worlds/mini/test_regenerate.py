"""What the base repaints: the first frame is given, layout survives low noise, the second clip sees the first."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline import flow
from pipeline.worlds.mini.clips import CLIP, paths
from pipeline.worlds.mini.load import load_mini
from pipeline.worlds.mini.regenerate import regenerate
from pipeline.worlds.mini.renderer import MiniScene, SceneBatch, render_batch, start_poses
from pipeline.worlds.mini.text import encode_caption
from pipeline.worlds.wan_world import WanWorld


@pytest.fixture(scope="module")
def world() -> WanWorld:
    return load_mini(Path("weights/mini"))


def repaint(world: WanWorld, frames: int, start: int) -> tuple[np.ndarray, np.ndarray]:
    """(true renders, repainted ones) of one room, walked forward, from level `start` of five."""
    scene = MiniScene.make(3_000_001)
    labels = np.full((1, frames - 1), 9)
    c2w = start_poses(scene, np.random.default_rng(0), 1)[:, None] @ paths(labels)
    true = render_batch(SceneBatch.stack([scene]), torch.from_numpy(c2w).float())
    painted = regenerate(
        world,
        true,
        np.concatenate([[[0]], labels], 1),
        c2w,
        encode_caption(scene.caption)[None],
        flow.sigmas(5, 3.0)[start:],
        torch.Generator().manual_seed(0),
    )
    return (true * 255).round().numpy().astype(np.uint8), painted


def test_the_first_frame_is_only_decoded_and_noise_grows_with_the_level(world: WanWorld) -> None:
    errors = []
    for start in (4, 1):
        true, painted = repaint(world, CLIP, start)
        assert (painted.shape, painted.dtype) == ((1, CLIP, 40, 64, 3), np.uint8)
        coded = world.decode(world.codec.encode(true[0, :1]))[0]
        np.testing.assert_allclose(painted[0, 0].astype(int), coded[0].astype(int), atol=1)
        errors.append(np.abs(painted[0, 1:].astype(float) - true[0, 1:]).mean())
    assert 1 < errors[0] < errors[1]


def test_two_clips_are_one_video(world: WanWorld) -> None:
    one, two = repaint(world, CLIP, 3)[1], repaint(world, 2 * CLIP, 3)[1]
    assert two.shape == (1, 2 * CLIP, 40, 64, 3)
    np.testing.assert_array_equal(one[0], two[0, :CLIP])
    assert np.abs(two[0, CLIP].astype(float) - two[0, CLIP - 1]).mean() < 40  # no cut between them
