"""What the embedded scorers are trained on: rooms of their own, motions of all sizes, and a note of the training."""

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline import camera
from pipeline.errors import CheckpointError, UsageError
from pipeline.scorers.critic import CriticScorer
from pipeline.scorers.pose_net import PoseScorer, motion_of_relative
from pipeline.worlds.mini import pretrain_scorers as module
from pipeline.worlds.mini.clips import STEP
from pipeline.worlds.mini.codec import PatchCodec
from pipeline.worlds.mini.config import PretrainConfig
from pipeline.worlds.mini.pretrain import build_model
from pipeline.worlds.mini.pretrain_scorers import pose_videos, train, views
from pipeline.worlds.mini.renderer import SPLITS, MiniScene

SMALL = PretrainConfig(channels=8, dim=32, heads=2, layers=1, ffn=32, steps=1)


@pytest.fixture
def scenes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Seeds of the rooms that are made while a test runs."""
    seeds: list[int] = []
    make = MiniScene.make

    def noted(seed: int) -> MiniScene:
        seeds.append(seed)
        return make(seed)

    monkeypatch.setattr(MiniScene, "make", staticmethod(noted))
    return seeds


def test_videos_and_views_are_of_the_scorers_own_rooms_and_repeatable(scenes: list[int]) -> None:
    frames, relative = pose_videos(np.random.default_rng(0), 3)
    count = frames.shape[1]
    assert (frames.shape, frames.dtype) == ((3, count, 40, 64, 3), np.uint8)
    assert relative.shape == (3, count - 1, 4, 4)
    # a first clip, or a later one and the frame before it: what the score stage measures
    assert {pose_videos(np.random.default_rng(seed), 1)[0].shape[1] for seed in range(6)} == {4, 5}
    again = pose_videos(np.random.default_rng(0), 3)
    np.testing.assert_array_equal(frames, again[0])
    np.testing.assert_array_equal(relative, again[1])
    one, two = (views(np.random.default_rng(1), 4) for _ in range(2))
    assert (one.shape, one.dtype) == ((4, 40, 64, 3), np.uint8)
    np.testing.assert_array_equal(one, two)
    assert len(np.unique(one.reshape(4, -1), axis=0)) == 4
    low, high = SPLITS["scorer"]
    assert scenes
    assert all(low <= seed < high for seed in scenes)


def test_motions_are_of_all_sizes_and_not_only_whole_actions() -> None:
    _, relative = pose_videos(np.random.default_rng(2), 12)
    motion = np.abs(np.stack([motion_of_relative(rel, STEP) for rel in relative])).max(-1)  # in steps
    assert motion.max() < 1.7
    assert np.mean((motion > 0.25) & (motion < 0.85)) > 0.2
    labels = camera.labels_from_relative(relative, 0.35 * STEP.translation, 0.35 * STEP.rotation_deg)
    assert len(np.unique(labels)) > 8


@pytest.mark.parametrize("part", ["pose", "critic"])
def test_a_part_is_trained_and_noted(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.STEPS, part, 2)
    if part == "pose":
        draw = pose_videos
        monkeypatch.setattr(
            module, "pose_videos", lambda rng, batch, world: draw(rng, 2, world)
        )  # the time is in the size
    with pytest.raises(CheckpointError, match=r"codec\.safetensors"):
        train(part, tmp_path)
    PatchCodec.fit(views(np.random.default_rng(0), 12), 8).save(tmp_path / "codec.safetensors")
    if part == "pose":
        with pytest.raises(CheckpointError, match="transformer"):
            train(part, tmp_path)  # it learns from what the base paints
        build_model(SMALL).save_pretrained(tmp_path / "transformer")
    steps: list[int] = []
    summary = train(part, tmp_path, lambda step, loss: steps.append(step))
    assert steps == [0, 1]
    note = json.loads((tmp_path / f"{part}.training.json").read_text())
    assert note == summary
    assert note["steps"] == 2
    assert np.isfinite(note["loss"])
    if part == "pose":
        assert PoseScorer.load(tmp_path).step == STEP
    else:
        assert np.isfinite(CriticScorer.load(tmp_path).score(views(np.random.default_rng(3), 2))).all()


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="pose or critic"):
        train("world", tmp_path)
