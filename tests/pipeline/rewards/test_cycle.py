"""Closure rewards through the registry: absent is not missing, the gate bites, warm-up waits, no silent NaN."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline import rewards
from pipeline.camera import StepSize, poses_from_labels, relative_poses
from pipeline.errors import ConfigError
from pipeline.pairs import FramePairs
from pipeline.rewards import ABSENT
from pipeline.rewards.base import RawScores, Reward, RewardContext, RewardValues
from pipeline.rewards.cycle import CYCLE, RELATION, SPATIAL, TEMPORAL, ClosureConfig

STEP = StepSize(0.4, 6.0)
W = 9  # label of w
N, Q = 40, 6
CONFIG = ClosureConfig(alpha=7.0, full_excursion=1.0)
SPATIAL_ONLY = FramePairs(np.array([[0, 6], [1, 5], [2, 4]]), np.zeros(3, np.int64))
BOTH = FramePairs(np.array([[0, 6], [1, 5], [0, 7], [1, 8]]), np.array([0, 0, 1, 1]))


def tracks(shift: list[float], lost: int = 0, texture: float = 1.0) -> RawScores:
    """One candidate for each shift (pixels, all points alike); `lost` points of the last candidate are lost."""
    G = len(shift)
    moved = np.tile(np.array(shift, np.float32)[:, None, None, None], (1, Q, 2, N))
    moved[-1, :, :, :lost] = 1e6
    back = np.where(moved > 1e5, 1e6, 0).astype(np.float32)
    values = {
        "shift": moved,
        "back": back,
        "colour": np.zeros_like(moved),
        "confidence": np.ones_like(moved),
        "texture": np.full((G, Q, N), texture, np.float32),
        "first_texture": np.ones((G, N), np.float32),
    }
    return RawScores(values, (None,) * G)


def poses(*shares: float) -> RawScores:
    """Candidates that walk forward with that share of each step, three actions."""
    rel = []
    for share in shares:
        path = relative_poses(poses_from_labels([W] * 3, STEP))
        path[:, :3, 3] *= share
        rel.append(path)
    return RawScores({"relative": np.stack(rel)}, (None,) * len(shares))


def context(pairs: FramePairs | None, **changes: object) -> RewardContext:
    own = RewardContext(
        labels_F=np.array([0, W, W, W]),
        stride=1,
        step=STEP,
        c2w_T44=poses_from_labels([W] * 3, STEP),
        pairs=pairs,
        shared_frames=4,
        size_HW=(40, 64),
    )
    return replace(own, **changes)  # type: ignore[arg-type]


def compute(
    reward: Reward,
    where: RewardContext,
    shift: list[float],
    walked: list[float],
    config: ClosureConfig = CONFIG,
) -> RewardValues:
    return reward.compute({"tracks": tracks(shift), "pose": poses(*walked)}, where, config)


def test_values_are_the_gated_closeness() -> None:
    found = compute(SPATIAL, context(SPATIAL_ONLY), [0.0, 10.4, 0.0, 0.0], [1.0, 1.0, 0.5, 0.0])
    assert found.value_G == pytest.approx([1.0, np.exp(-0.7), 0.5, 0.0])
    assert found.details["gate"] == pytest.approx([1.0, 1.0, 0.5, 0.0])
    assert found.details["d"] == pytest.approx([0.0, 0.1, 0.0, 0.0])
    ungated = CONFIG.model_copy(update={"gated": False})
    free = compute(SPATIAL, context(SPATIAL_ONLY), [0.0, 10.4, 0.0, 0.0], [1.0, 1.0, 0.5, 0.0], ungated)
    assert free.value_G == pytest.approx([1.0, np.exp(-0.7), 1.0, 1.0])  # the static video wins here


def test_beyond_the_full_excursion_only_closeness_counts() -> None:
    early = CONFIG.model_copy(update={"full_excursion": 0.5})
    found = compute(SPATIAL, context(SPATIAL_ONLY), [0.0, 0.0, 0.0], [1.0, 0.5, 0.25], early)
    assert found.value_G == pytest.approx([1.0, 1.0, 0.5])


def test_what_has_no_pairs_is_absent_and_not_missing() -> None:
    for reward, pairs in ((TEMPORAL, SPATIAL_ONLY), (RELATION, BOTH), (SPATIAL, None)):
        found = compute(reward, context(pairs), [0.0, 1.0], [1.0, 1.0])
        assert np.isnan(found.value_G).all()
        assert all(reason is not None and reason.startswith(ABSENT) for reason in found.reasons)


def test_the_temporal_reward_waits_for_the_end_of_the_warm_up() -> None:
    warm = CONFIG.model_copy(update={"temporal_warmup": 0.3})
    before = compute(TEMPORAL, context(BOTH, progress=0.29), [0.0, 1.0], [1.0, 1.0], warm)
    assert all(str(reason).startswith(ABSENT) for reason in before.reasons)
    after = compute(TEMPORAL, context(BOTH, progress=0.3), [0.0, 1.0], [1.0, 1.0], warm)
    assert np.isfinite(after.value_G).all()
    spatial = compute(SPATIAL, context(BOTH, progress=0.0), [0.0, 1.0], [1.0, 1.0], warm)
    assert np.isfinite(spatial.value_G).all()


def test_the_sum_has_the_published_weights_and_lives_with_one_part() -> None:
    both = compute(CYCLE, context(BOTH), [0.0, 0.0], [1.0, 0.5])
    assert both.value_G == pytest.approx([1.5, 0.75])
    one = compute(CYCLE, context(SPATIAL_ONLY), [0.0, 0.0], [1.0, 0.5])
    assert one.value_G == pytest.approx([1.0, 0.5])
    none = compute(CYCLE, context(None), [0.0, 0.0], [1.0, 0.5])
    assert all(str(reason).startswith(ABSENT) for reason in none.reasons)


def test_lost_points_cost_and_too_many_fail() -> None:
    values = {"tracks": tracks([0.0, 0.0], lost=10), "pose": poses(1.0, 1.0)}
    found = SPATIAL.compute(values, context(SPATIAL_ONLY), CONFIG)
    assert found.details["d"] == pytest.approx([0.0, 0.25 * 0.27])
    assert found.details["coverage"] == pytest.approx([1.0, 0.75])
    gone = {"tracks": tracks([0.0, 0.0], lost=35), "pose": poses(1.0, 1.0)}
    failed = SPATIAL.compute(gone, context(SPATIAL_ONLY), CONFIG)
    assert failed.details["failed"].tolist() == [0.0, 1.0]
    assert failed.value_G[1] == pytest.approx(np.exp(-7 * 0.27))


def test_nothing_to_compare_with_is_absent_in_the_past_and_a_failure_in_ones_own_frames() -> None:
    blank = {"tracks": tracks([0.0], texture=0.0), "pose": poses(1.0)}
    shared = SPATIAL.compute(blank, context(SPATIAL_ONLY), CONFIG)
    assert np.isnan(shared.value_G).all()  # unknown, never 0
    assert str(shared.reasons[0]).startswith(ABSENT)
    assert "no textured point" in str(shared.reasons[0])
    both = CYCLE.compute(blank, context(SPATIAL_ONLY), CONFIG)
    assert str(both.reasons[0]).startswith(ABSENT)
    lost = {"tracks": RawScores(tracks([0.0], texture=0.0).values, ("tracker died",)), "pose": poses(1.0)}
    assert SPATIAL.compute(lost, context(SPATIAL_ONLY), CONFIG).reasons == ("tracker died",)
    own = SPATIAL.compute(blank, context(SPATIAL_ONLY, shared_frames=1), CONFIG)
    assert own.value_G == pytest.approx([np.exp(-7 * 0.27)])


def test_a_candidate_that_one_scorer_lacks_is_missing_with_its_reason() -> None:
    raw = {"tracks": tracks([0.0, 0.0]), "pose": RawScores(poses(1.0, 1.0).values, (None, "worker died"))}
    found = SPATIAL.compute(raw, context(SPATIAL_ONLY), CONFIG)
    assert found.reasons == (None, "worker died")
    free = SPATIAL.compute(raw, context(SPATIAL_ONLY), CONFIG.model_copy(update={"gated": False}))
    assert free.reasons == (None, None)  # without a gate poses are not needed


def test_a_clip_that_asks_for_no_motion_is_not_gated() -> None:
    still = context(SPATIAL_ONLY, c2w_T44=np.tile(np.eye(4), (4, 1, 1)))
    assert compute(SPATIAL, still, [0.0], [0.0]).value_G == pytest.approx([1.0])


def test_alpha_must_be_calibrated_and_names_are_known() -> None:
    with pytest.raises(ConfigError, match="wcpipe calibrate"):
        compute(SPATIAL, context(SPATIAL_ONLY), [0.0], [1.0], ClosureConfig())
    assert rewards.needs(["spatial", "temporal", "relation", "cycle"]) == ["tracks", "pose"]
    assert rewards.settings("temporal", {"closure": {"alpha": 3.0}}).model_dump()["alpha"] == 3.0
