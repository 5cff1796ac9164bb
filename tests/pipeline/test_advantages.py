"""Constant groups are exactly 0, missing is never a grade, selection is balanced and deterministic."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.advantages import (
    AdvantageConfig,
    compute_advantages,
    fuse,
    normalise,
    reward_to_r,
    select_best_worst,
)
from pipeline.errors import ConfigError


@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, 11.24, -11.24, 0.0, 1e-7, 12345.678])
@pytest.mark.parametrize("size", [8, 12])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("std", ["group", "global"])
def test_constant_group_is_exactly_zero(value, size, dtype, std):
    raw = np.full((3, size), value, dtype=dtype)
    raw[2] += np.arange(size, dtype=dtype)  # a living group, so that the global std is not 0
    out = normalise(raw, std=std)
    assert np.array_equal(out.advantage_PG[:2], np.zeros((2, size)))
    assert out.trained_P.tolist() == [False, False, True]
    assert out.constant_P.tolist() == [True, True, False]


def test_fp32_rounding_noise_is_constant_but_a_real_difference_is_not():
    same = np.array([[np.float32(1 / 3), 1 / 3, np.float32(0.1) / np.float32(0.3), 1 / 3]])
    assert normalise(same).constant_P[0]
    assert normalise(np.array([[1 / 3, 1 / 3 + 1e-4, 1 / 3, 1 / 3]])).trained_P[0]


def test_matches_the_formula():
    raw = np.array([[1.0, 2.0, 3.0, 6.0], [10.0, 10.0, 11.0, 13.0]])
    group, glob = normalise(raw, std="group"), normalise(raw, std="global")
    np.testing.assert_allclose(
        group.advantage_PG, (raw - raw.mean(1, keepdims=True)) / raw.std(1, ddof=1, keepdims=True)
    )
    np.testing.assert_allclose(glob.advantage_PG, (raw - raw.mean(1, keepdims=True)) / raw.std(ddof=1))


def test_floor_bounds_tiny_spreads():
    out = normalise(np.array([[0.0, 1e-6]]), std="group", floor=1e-4)
    np.testing.assert_allclose(out.advantage_PG, [[-5e-3, 5e-3]])


def test_missing_scores_poison_nothing_and_stay_missing():
    raw = np.array([[1.0, np.nan, 3.0, np.inf], [1.0, 2.0, 3.0, 4.0]])
    valid = np.ones_like(raw, dtype=bool)
    valid[1, 3] = False
    out = normalise(raw, valid, std="group")
    np.testing.assert_allclose(out.advantage_PG[0, [0, 2]], [-1 / np.sqrt(2), 1 / np.sqrt(2)])
    assert np.isnan(out.advantage_PG[0, [1, 3]]).all()
    assert np.isnan(out.advantage_PG[1, 3])
    np.testing.assert_allclose(out.advantage_PG[1, :3], [-1.0, 0.0, 1.0])
    assert np.isfinite(out.mean_P).all()


def test_group_with_fewer_than_two_valid_is_untrained():
    out = normalise(np.array([[1.0, np.nan, np.nan], [np.nan] * 3, [1.0, 2.0, np.nan]]))
    assert out.trained_P.tolist() == [False, False, True]
    assert out.absent_P.tolist() == [False, True, False]
    assert out.advantage_PG[0, 0] == 0
    assert np.isnan(out.advantage_PG[1]).all()


def test_group_of_one_is_refused():
    with pytest.raises(ConfigError, match=r"rollout\.candidates"):
        normalise(np.ones((4, 1)))


def test_fuse_weights_sum_to_one_and_incomplete_candidates_are_missing():
    a = normalise(np.array([[0.0, 1.0, 2.0, 3.0]]), std="group")
    b = normalise(np.array([[3.0, np.nan, 1.0, 0.0]]), std="group")
    fused = fuse({"a": a, "b": b}, {"a": 2.0, "b": 1.0})
    np.testing.assert_allclose(
        fused.advantage_PG[0, 0], (2 * a.advantage_PG[0, 0] + b.advantage_PG[0, 0]) / 3
    )
    assert np.isnan(fused.advantage_PG[0, 1])
    assert not fused.valid_PG[0, 1]
    # the same candidate counts in the moments of the reward that it has
    assert a.mean_P[0] == 1.5


def test_fuse_reweights_a_reward_absent_from_a_group_and_ignores_weight_zero():
    a = normalise(np.array([[0.0, 1.0], [0.0, 1.0]]), std="group")
    b = normalise(np.array([[np.nan, np.nan], [1.0, 0.0]]), std="group")
    c = normalise(np.full((2, 2), np.nan))
    fused = fuse({"a": a, "b": b, "c": c}, {"a": 1.0, "b": 1.0, "c": 0.0})
    np.testing.assert_allclose(fused.advantage_PG[0], a.advantage_PG[0])
    np.testing.assert_allclose(fused.advantage_PG[1], 0.0, atol=1e-12)
    assert fused.trained_P.all()
    with pytest.raises(ConfigError, match="'nope'"):
        fuse({"a": a}, {"nope": 1.0})


def test_all_rewards_absent_leaves_the_group_untrained():
    out = compute_advantages({"a": np.full((1, 4), np.nan)}, AdvantageConfig(weights={"a": 1.0}, best_of_n=2))
    assert not out.trained_P[0]
    assert np.isnan(out.r_PG).all()
    assert out.selections[0].indices.size == 0


def test_r_is_half_at_zero_and_saturates_at_z():
    np.testing.assert_allclose(
        reward_to_r(np.array([-9, -2, -1, 0, 1, 2, 9.0]), 2.0), [0, 0, 0.25, 0.5, 0.75, 1, 1]
    )
    assert np.isnan(reward_to_r(np.array([np.nan]), 2.0)[0])


def test_selection_ties_go_by_index_and_never_overlap():
    picked = select_best_worst(np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0]), 4)
    assert picked.best.tolist() == [0, 1]
    assert picked.worst.tolist() == [5, 4]
    assert picked.indices.tolist() == [0, 5, 1, 4]


def test_selection_shrinks_balanced_when_few_are_valid():
    nan = np.nan
    assert select_best_worst(np.array([nan, 1.0, nan, 3.0, 2.0, nan]), 4).indices.tolist() == [3, 1]
    assert select_best_worst(np.array([nan, 1.0, nan, nan, nan, nan]), 4).indices.size == 0


@pytest.mark.parametrize("n", [0, 1, 3, 10])
def test_impossible_n_is_a_config_error(n):
    with pytest.raises(ConfigError, match="best_of_n"):
        select_best_worst(np.arange(8.0), n)


def test_config_rejects_odd_n_unknown_keys_and_bad_weights():
    for bad in (
        {"best_of_n": 3},
        {"nope": 1},
        {"weights": {"a": -1.0}},
        {"weights": {}},
        {"weights": {"a": 0.0}},
    ):
        with pytest.raises(ValidationError):
            AdvantageConfig(**bad)


def test_epoch_chain_and_metrics():
    rng = np.random.default_rng(0)
    action, quality = rng.integers(0, 5, (6, 8)) / 4, rng.normal(size=(6, 8))
    action[0], quality[0] = 0.1, 11.24
    quality[1, 2] = np.nan
    config = AdvantageConfig(weights={"action": 2.0, "quality": 1.0}, clip=1.0)
    out = compute_advantages({"action": action, "quality": quality}, config)
    assert np.array_equal(out.fused_PG[0], np.zeros(8))
    assert not out.trained_P[0]
    assert np.array_equal(out.r_PG[0], np.full(8, 0.5))
    assert out.selections[0].indices.size == 0
    assert 2 not in out.selections[1].indices
    assert out.selections[1].indices.size == 4
    assert np.nanmax(np.abs(out.advantage_PG)) <= 1.0
    assert out.metrics["quality/missing"] == 1
    assert out.metrics["missing_candidates"] == 1
    assert out.metrics["action/zero_variance_share"] >= 1 / 6
    assert out.metrics["clip_share"] == pytest.approx(
        np.mean(np.abs(out.fused_PG[np.isfinite(out.fused_PG)]) > 1.0)
    )
    assert out.metrics["selected"] == sum(s.indices.size for s in out.selections)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 10).flatmap(
        lambda g: st.tuples(
            st.lists(st.one_of(st.floats(-5, 5), st.just(float("nan"))), min_size=g, max_size=g),
            st.integers(1, g // 2).map(lambda h: 2 * h),
        )
    )
)
def test_selection_properties(case):
    values, n = np.array(case[0]), case[1]
    picked = select_best_worst(values, n)
    assert picked.best.size == picked.worst.size <= n // 2
    assert len(set(picked.indices.tolist())) == picked.indices.size
    assert np.isfinite(values[picked.indices]).all()
    if picked.best.size:
        rest = np.delete(values, picked.indices)
        rest = rest[np.isfinite(rest)]
        assert (values[picked.best].min() >= rest).all()
        assert (values[picked.worst].max() <= rest).all()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-100, 100, width=32), min_size=4, max_size=8), st.floats(-50, 50), st.floats(0.5, 20)
)
def test_group_advantage_ignores_shift_and_scale(values, shift, scale):
    raw = np.array([values])
    out = normalise(raw, std="group")
    if not out.trained_P[0] or out.std_P[0] < 1e-2:
        return
    moved = normalise(raw * scale + shift, std="group")
    np.testing.assert_allclose(moved.advantage_PG, out.advantage_PG, atol=1e-6)
    assert abs(out.advantage_PG.sum()) < 1e-9
