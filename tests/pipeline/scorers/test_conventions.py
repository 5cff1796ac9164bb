"""Every mistake in the conventions of a pose scorer is called by its name, and a bad scorer is not given one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.camera import anchor, invert, poses_from_labels
from pipeline.scorers.conventions import MISTAKES, RIGHT, WORD, judge, known_path

# how a mistake is made; all but one are their own repair
BOTH = "world-to-camera, and frames in reverse order"
MAKE = MISTAKES | {BOTH: lambda c2w: MISTAKES["frames in reverse order"](invert(c2w))}
WEIGHTS = Path(__file__).parents[3] / "weights" / "mini"


@pytest.fixture(scope="module")
def path() -> tuple[np.ndarray, np.ndarray]:
    return known_path()


@pytest.fixture(scope="module")
def estimate(path: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """What the shipped pose scorer makes of the rendered path, as poses."""
    from pipeline.scorers.pose_net import PoseScorer

    relative = PoseScorer.load(WEIGHTS).relative(path[0][None])[0]
    poses = [np.eye(4)]
    for motion in relative:
        poses.append(poses[-1] @ motion)
    return np.stack(poses)


def test_the_path_is_fixed_and_starts_at_the_identity(path: tuple[np.ndarray, np.ndarray]) -> None:
    frames, c2w = path
    assert frames.shape == (17, 40, 64, 3)
    assert len(c2w) == 17
    np.testing.assert_array_equal(c2w[0], np.eye(4))
    assert np.ptp(c2w[:, :3, 3], axis=0)[[0, 2]].min() > 0.5  # it moves along both axes of the floor


@pytest.mark.parametrize("name", MISTAKES)
def test_every_mistake_of_the_shipped_pose_scorer_is_named(
    name: str, path: tuple[np.ndarray, np.ndarray], estimate: np.ndarray
) -> None:
    wrong = MAKE[name](estimate)
    verdict = judge(wrong, path[1])
    assert verdict.name == name, verdict.errors
    assert name in str(verdict)


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("scale", [1.0, 0.01, 250.0])
def test_an_exact_scorer_with_any_scale_and_origin_is_judged_exactly(name: str, scale: float) -> None:
    from pipeline.actions import parse_word
    from pipeline.worlds.mini.clips import STEP

    true = poses_from_labels(parse_word(WORD), STEP)
    scaled = true.copy()
    scaled[:, :3, 3] *= scale
    start = poses_from_labels(parse_word("right+w-3, up-2"), STEP)[-1]
    moved = scaled if "axes" in name or "swap" in name or "mirror" in name else start @ scaled
    verdict = judge(MAKE[name](anchor(moved)), true)
    assert verdict.name == name
    assert verdict.errors[name] < 1e-6


def test_reversed_frames_really_given_to_a_scorer_are_named(path: tuple[np.ndarray, np.ndarray]) -> None:
    from pipeline.scorers.pose_net import PoseScorer

    relative = PoseScorer.load(WEIGHTS).relative(path[0][None, ::-1].copy())[0]
    poses = [np.eye(4)]
    for motion in relative:
        poses.append(poses[-1] @ motion)
    assert judge(np.stack(poses), path[1]).name == "frames in reverse order"


@pytest.mark.parametrize("kind", ["still", "random", "nan"])
def test_poses_that_are_simply_bad_get_no_name(kind: str, path: tuple[np.ndarray, np.ndarray]) -> None:
    rng = np.random.default_rng(0)
    poses = np.tile(np.eye(4), (17, 1, 1))
    if kind == "random":
        from pipeline.actions import parse_word
        from pipeline.worlds.mini.clips import STEP

        poses = poses_from_labels([int(label) for label in rng.integers(0, 81, 16)], STEP)
        assert parse_word(WORD) != []
    if kind == "nan":
        poses[3] = np.nan
    verdict = judge(poses, path[1])
    assert verdict.name is None
    assert "no convention fits" in str(verdict)
    assert RIGHT in verdict.errors
    np.testing.assert_allclose(invert(invert(poses[0])), poses[0])
