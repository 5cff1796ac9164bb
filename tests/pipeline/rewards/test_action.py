"""A perfect camera scores exactly 1, an off-by-one does not, thresholds and missing values behave as documented."""

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.actions import parse_word
from pipeline.camera import (
    WORLDCOMPASS_STEP,
    StepSize,
    frame_labels,
    invert,
    poses_from_labels,
    relative_poses,
    step_transform,
)
from pipeline.errors import DataError
from pipeline.rewards import RawScores, RewardContext, find
from pipeline.rewards.action import (
    ActionConfig,
    accumulate,
    closeness,
    excursion,
    fit_scale,
    score_action,
    step_labels,
)

MINI = StepSize(translation=0.4, rotation_deg=6.0)
SWITCHING = parse_word("w-1, right+w-1, a-1, up-1, s+left-1, d+w-1, none-1, down+d-1")


def part(step, stride):
    return StepSize(step.translation / stride, step.rotation_deg / stride)


def perfect(word, stride, step=MINI):
    """(relative motions between frames, labels of the frames) of a camera that does exactly what it is told."""
    labels_F = frame_labels([0, *word], stride)
    return relative_poses(poses_from_labels(labels_F[1:], part(step, stride))), labels_F


@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("preset", ["per_latent", "per_frame"])
def test_a_perfect_camera_that_switches_at_every_latent_scores_one(stride, preset):
    rel, labels_F = perfect(SWITCHING, stride)
    score = score_action(rel, labels_F, ActionConfig(preset=preset), MINI, stride)
    assert score.joint == 1.0
    assert score.fine == 1.0
    assert score.hits_S2.shape == (len(SWITCHING) * (1 if preset == "per_latent" else stride), 2)


@pytest.mark.parametrize("preset", ["per_latent", "per_frame"])
def test_absolute_published_thresholds_fit_their_own_world(preset):
    rel, labels_F = perfect(SWITCHING, 4, WORLDCOMPASS_STEP)
    config = ActionConfig(preset=preset, relative_to_step=False)
    assert score_action(rel, labels_F, config, WORLDCOMPASS_STEP, 4).joint == 1.0
    mine = ActionConfig(preset=preset).thresholds(WORLDCOMPASS_STEP, 4)
    published = config.thresholds(WORLDCOMPASS_STEP, 4)
    np.testing.assert_allclose(mine[0], published[0])
    np.testing.assert_allclose(mine[1], published[1])


def test_relative_thresholds_scale_with_the_step():
    taus, rotation = ActionConfig().thresholds(MINI, 1)
    np.testing.assert_allclose(taus, [0.04, 0.08, 0.12, 0.16, 0.2])
    assert rotation == pytest.approx(3.0)
    taus, rotation = ActionConfig(taus=[0.5], rotation=0.25).thresholds(MINI, 4)
    assert taus == [0.2]
    assert rotation == 1.5
    taus, rotation = ActionConfig(preset="per_frame", taus=[0.5], rotation=0.25).thresholds(MINI, 4)
    assert taus == [0.05]
    assert rotation == 0.375


def test_labels_one_frame_late_lose():
    rel, labels_F = perfect(SWITCHING, 4)
    late = np.concatenate([labels_F[:1], labels_F[2:], labels_F[-1:]])
    score = score_action(rel, late, ActionConfig(preset="per_frame"), MINI, 4)
    assert score.joint == pytest.approx(1 - (len(SWITCHING) - 1) / rel.shape[0])
    with pytest.raises(DataError, match="one frame late"):
        score_action(rel, late, ActionConfig(preset="per_latent"), MINI, 4)


def test_labels_one_action_late_lose_at_stride_one():
    rel, labels_F = perfect(SWITCHING, 1)
    late = np.concatenate([labels_F[:1], labels_F[2:], labels_F[-1:]])
    assert score_action(rel, late, ActionConfig(), MINI, 1).joint <= 1 / len(SWITCHING)


def test_half_a_compound_is_fine_half_but_not_joint():
    rel, _ = perfect(parse_word("w-4"), 1)
    commanded = frame_labels([0, *parse_word("w+right-4")], 1)
    score = score_action(rel, commanded, ActionConfig(), MINI, 1)
    assert score.joint == 0.0
    assert score.fine == 0.5
    assert score.hits_S2.tolist() == [[True, False]] * 4


@pytest.mark.parametrize("stride", [1, 4])
def test_closeness_is_one_where_obeyed_and_falls_linearly_with_the_share_that_is_missing(stride):
    rel, labels_F = perfect(SWITCHING, stride)
    # four quarter turns on an arc end a little beside one whole step
    near = 1e-6 if stride == 1 else 0.03
    assert closeness(rel, labels_F, MINI, stride) == pytest.approx(1.0, abs=near)
    commanded = frame_labels([0, *parse_word("w+right-4")], stride)
    for share in (0.0, 0.25, 0.5, 1.0):
        lazy, _ = perfect(parse_word("w-4"), stride, StepSize(max(share, 1e-9) * MINI.translation, 6.0))
        # forward by a share of the step, no turn at all: half of it is worth `share`
        assert closeness(lazy, commanded, MINI, stride) == pytest.approx(share / 2, abs=near)
    backwards, _ = perfect(parse_word("s-4"), stride)
    assert closeness(backwards, commanded, MINI, stride) == 0.0


def test_closeness_never_rewards_more_than_obeying():
    rng = np.random.default_rng(3)
    rel, labels_F = perfect(parse_word("w-4"), 1)
    for _ in range(20):
        other = rel.copy()
        other[:, :3, 3] += rng.normal(scale=0.3, size=(4, 3))
        assert 0.5 <= closeness(other, labels_F, MINI, 1) < 1  # the rotation is right throughout
    with pytest.raises(DataError, match="4 estimated motions for 9 labelled frames"):
        closeness(rel, np.zeros(9, np.int64), MINI, 1)


def test_static_camera_is_right_on_no_ops_only():
    rel, _ = perfect(parse_word("none-4"), 1)
    labels = frame_labels([0, *parse_word("w-2, none-2")], 1)
    score = score_action(rel, labels, ActionConfig(), MINI, 1)
    assert score.joint == 0.5
    assert score.fine == 0.75


def test_best_tau_is_taken_first_on_ties():
    jitter = step_transform(
        9, StepSize(0.4 * 0.35, 6.0)
    )  # a third of a step: still under the larger thresholds only
    rel, labels = np.stack([jitter, step_transform(9, MINI)]), np.array([0, 0, 9])
    score = score_action(rel, labels, ActionConfig(), MINI, 1)
    assert score.joint == 1.0
    assert score.tau == pytest.approx(0.4 * 0.4)
    both = score_action(rel[1:], labels[[0, 2]], ActionConfig(), MINI, 1)
    assert both.tau == pytest.approx(0.4 * 0.1)


def test_accumulate_is_the_product_and_refuses_left_overs():
    rel, _ = perfect(SWITCHING, 4)
    c2w = np.concatenate([np.eye(4)[None], np.zeros((len(rel), 4, 4))])
    for i, r in enumerate(rel):
        c2w[i + 1] = c2w[i] @ r
    np.testing.assert_allclose(accumulate(rel, 4), invert(c2w[:-1:4]) @ c2w[4::4], atol=1e-12)
    with pytest.raises(DataError, match="31 motions"):
        accumulate(rel[:-1], 4)
    assert step_labels(frame_labels([0, 5, 7], 4), 4).tolist() == [5, 7]


def test_excursion_is_the_largest_not_the_last():
    rel, _ = perfect(parse_word("w-3, s-3, right-5, left-5"), 1)
    distance, turn = excursion(rel)
    assert distance == pytest.approx(1.2)
    assert turn == pytest.approx(30.0)


def test_scale_is_fitted_and_refused_where_nothing_moves():
    rel, _ = perfect(SWITCHING, 1)
    small = rel.copy()
    small[:, :3, 3] *= 0.25
    assert fit_scale(small, rel) == pytest.approx(4.0)
    still = np.tile(np.eye(4), (3, 1, 1))
    assert np.isnan(fit_scale(still, rel[:3]))
    backwards = rel.copy()
    backwards[:, :3, 3] *= -1
    assert np.isnan(fit_scale(backwards, rel))


def group(rel, labels_F, scale=1.0):
    bad = rel.copy()
    bad[2, 0, 3] = np.nan
    scores = RawScores({"relative": np.stack([rel, bad, rel])}, (None, None, "worker ran out of memory"))
    return {"pose": scores}, RewardContext(labels_F, 1, MINI, scale)


def test_reward_values_details_and_reasons():
    rel, labels_F = perfect(SWITCHING, 1)
    raw, context = group(rel, labels_F)
    for name in ("action_fine", "action_joint", "action_soft"):
        out = find(name).compute(raw, context, ActionConfig())
        assert out.value_G[0] == pytest.approx(1.0)
        assert np.isnan(out.value_G[1:]).all()
        assert out.reasons == (None, "an estimated pose is not finite", "worker ran out of memory")
        assert out.details["joint"][0] == out.details["fine"][0] == 1.0
        assert out.details["excursion"][0] > 0.3
        assert np.isnan(out.details["tau"][1:]).all()


def test_scene_scale_is_applied_or_missing():
    rel, labels_F = perfect(SWITCHING, 1)
    tiny = rel.copy()
    tiny[:, :3, 3] *= 1e-3
    config = ActionConfig(scale="scene")
    raw, context = group(tiny, labels_F, scale=1000.0)
    assert find("action_joint").compute(raw, context, config).value_G[0] == 1.0
    assert find("action_joint").compute(raw, context, ActionConfig()).value_G[0] < 1.0
    raw, context = group(tiny, labels_F, scale=float("nan"))
    out = find("action_joint").compute(raw, context, config)
    assert np.isnan(out.value_G[0])
    assert "scale" in out.reasons[0]


@pytest.mark.parametrize(
    "bad", [{"taus": []}, {"taus": [0.0]}, {"rotation": 0.0}, {"preset": "per_clip"}, {"x": 1}]
)
def test_bad_parameters_are_refused(bad):
    with pytest.raises(ValidationError):
        ActionConfig(**bad)
