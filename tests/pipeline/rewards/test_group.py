"""One pose scale a scene, pooled over its candidates from the first frame on."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.camera import StepSize, poses_from_labels, relative_poses
from pipeline.rewards.group import scene_scale

STEP = StepSize(0.4, 6.0)


def motions(labels: list[int], scale: float = 1.0) -> np.ndarray:
    relative = relative_poses(poses_from_labels(labels, STEP)).copy()
    relative[:, :3, 3] *= scale
    return relative


def test_a_foreign_unit_is_found_from_past_and_clip_together() -> None:
    labels = [9, 9, 9, 10, 1, 18, 9]
    c2w_T44 = poses_from_labels(labels, STEP)
    whole = motions(labels, 0.25)
    pose = {"relative": np.stack([whole[3:], whole[3:]]), "past_relative": whole[:3]}
    assert scene_scale(pose, c2w_T44, stride=1) == pytest.approx(4.0)
    first_clip = {"relative": np.stack([motions(labels[:3], 0.25)] * 2)}
    assert scene_scale(first_clip, c2w_T44[:4], stride=1) == pytest.approx(4.0)


def test_a_lazy_candidate_is_not_scaled_up_by_itself() -> None:
    labels = [9, 9, 9, 9]
    c2w_T44 = poses_from_labels(labels, STEP)
    pose = {"relative": np.stack([motions(labels), motions(labels), motions(labels), motions(labels, 0.1)])}
    assert 0.9 < scene_scale(pose, c2w_T44, stride=1) < 1.1


def test_without_motion_there_is_no_scale() -> None:
    still = np.tile(np.eye(4), (2, 3, 1, 1))
    assert np.isnan(scene_scale({"relative": still}, poses_from_labels([9, 9, 9], STEP), stride=1))
    assert np.isnan(scene_scale({"relative": still * np.nan}, poses_from_labels([9, 9, 9], STEP), stride=1))
