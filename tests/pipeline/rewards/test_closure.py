"""The discrepancy has its known values, no hack makes it small, and it is never NaN."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import ConfigError, DataError
from pipeline.rewards.closure import (
    Discrepancy,
    DiscrepancyConfig,
    calibrate_alpha,
    closeness,
    closure_ratio,
    cycle_reward,
    discrepancy,
    excursion_gate,
    followed_points,
    symmetric,
    textured_points,
)

CONFIG = DiscrepancyConfig()
SIZE = (40, 64)


def points(count: int = 200, size: tuple[int, int] = SIZE, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((count, 2)) * [size[1], size[0]]


def d_of(start: np.ndarray, end: np.ndarray, followed: np.ndarray | None = None) -> Discrepancy:
    return discrepancy(start, end, np.ones(len(start), bool) if followed is None else followed, SIZE, CONFIG)


def test_identity_is_zero_and_a_shift_is_exact() -> None:
    start = points()
    assert d_of(start, start) == Discrepancy(0.0, 200, 200, False)
    assert d_of(start, start + np.array([3.0, 4.0])).d == pytest.approx(5 / 104)


@pytest.mark.parametrize(("size", "expected"), [((480, 832), 0.266), ((64, 64), 0.261)])
def test_unrelated_points_are_at_the_random_level(size: tuple[int, int], expected: float) -> None:
    loose = DiscrepancyConfig(d_fail=1.0)
    one, other = points(50_000, size), points(50_000, size, seed=1)
    assert discrepancy(one, other, np.ones(50_000, bool), size, loose).d == pytest.approx(expected, abs=0.003)
    # With the published level as the most that a point costs, noise never earns less than a failure.
    assert discrepancy(one, other, np.ones(50_000, bool), size, CONFIG).d <= CONFIG.d_fail


def test_no_points_are_a_failure_and_not_nan() -> None:
    empty = np.zeros((0, 2))
    assert d_of(empty, empty) == Discrepancy(CONFIG.d_fail, 0, 0, True)
    assert d_of(empty, empty).coverage == 0.0
    start = points(9)
    assert d_of(start, start).d == CONFIG.d_fail  # under the least number
    lost = d_of(points(), np.full((200, 2), np.nan))
    assert (lost.d, lost.failed) == (CONFIG.d_fail, True)


def test_a_few_surviving_points_do_not_pay() -> None:
    start = points()
    for survivors, failed in ((0, True), (12, True), (60, False), (150, False)):
        followed = np.arange(200) < survivors
        found = d_of(start, start, followed)  # survivors stay where they are: the published d would be 0
        expected = CONFIG.d_fail if failed else (1 - survivors / 200) * CONFIG.d_fail
        assert found.d == pytest.approx(expected)
        assert found.failed is failed


def test_one_wild_point_costs_no_more_than_a_lost_one() -> None:
    start = points()
    end = start.copy()
    end[0] += 1e6
    assert d_of(start, end).d == pytest.approx(d_of(start, start, np.arange(200) > 0).d)


numbers = st.floats(allow_nan=True, allow_infinity=True, width=32)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(numbers, numbers, numbers, numbers, st.booleans()), max_size=40))
def test_d_is_always_between_zero_and_the_cost_of_failure(
    rows: list[tuple[float, float, float, float, bool]],
) -> None:
    start, end = np.array([row[:2] for row in rows]), np.array([row[2:4] for row in rows])
    found = discrepancy(start, end, np.array([row[4] for row in rows], bool), SIZE, CONFIG)
    assert 0 <= found.d <= CONFIG.d_fail * (1 + 1e-12)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 199), st.floats(0, 20))
def test_losing_a_point_never_lowers_d(lost: int, shift: float) -> None:
    start = points()
    followed = np.ones(200, bool)
    before = d_of(start, start + shift, followed).d
    followed[lost] = False
    assert d_of(start, start + shift, followed).d >= before - 1e-12


def test_a_point_must_come_back_and_keep_its_colour() -> None:
    start = np.zeros((5, 2))
    back = np.array([[0, 0], [1.4, 0], [1.2, 1.2], [np.nan, 0], [0, 0]])
    assert followed_points(start, back, CONFIG).tolist() == [True, True, False, False, True]
    colour = [0.5, 0.1, 0.0, 0.0, np.nan]
    assert followed_points(start, back, CONFIG, colour).tolist() == [False, True, False, False, False]
    with pytest.raises(DataError, match="came back"):
        followed_points(start, back[:2], CONFIG)


def test_points_lie_on_texture_of_the_given_frame() -> None:
    rng = np.random.default_rng(0)
    frame = np.full(SIZE, 0.5)
    frame[:, :32] = rng.random((40, 32))
    found = textured_points(frame, CONFIG)
    assert len(found) >= 80
    assert found[:, 0].max() < 34
    assert found[0].tolist() == [1.5, 1.5]  # centre of a cell of 4 pixels
    assert textured_points(np.full(SIZE, 0.5), CONFIG).shape == (0, 2)
    edge = np.zeros(SIZE)
    edge[:, 30:] = 1.0
    assert len(textured_points(edge, CONFIG)) == 0  # a straight edge holds no point
    with pytest.raises(DataError, match="0..1"):
        textured_points(frame * 255, CONFIG)
    with pytest.raises(DataError, match="at least 4 pixels"):
        textured_points(np.zeros((3, 64)), CONFIG)


def test_both_directions_count() -> None:
    start = points()
    both = symmetric(d_of(start, start), d_of(start, start, np.zeros(200, bool)))
    assert both == Discrepancy(CONFIG.d_fail / 2, 400, 200, True)


def test_wrong_numbers_of_points_are_errors() -> None:
    with pytest.raises(DataError, match="one of each"):
        discrepancy(points(5), points(6), np.ones(5, bool), SIZE, CONFIG)
    with pytest.raises(DataError, match=r"\(N, 2\)"):
        discrepancy(np.zeros((3, 3)), points(3), np.ones(3, bool), SIZE, CONFIG)
    with pytest.raises(DataError, match="0 x 64"):
        discrepancy(points(5), points(5), np.ones(5, bool), (0, 64), CONFIG)


def test_closeness_is_the_mean_over_pairs_and_absent_without_any() -> None:
    assert closeness([0.0, 0.0], 7.0) == 1.0
    assert closeness([0.0, 0.1], 7.0) == pytest.approx((1 + math.exp(-0.7)) / 2)
    assert closeness([], 7.0) is None  # one cycle has no repeats: neither 0 nor 1
    with pytest.raises(ConfigError, match="alpha"):
        closeness([0.1], 0.0)
    for bad in (np.nan, -0.1):
        with pytest.raises(DataError, match="not NaN"):
            closeness([bad], 7.0)


def test_alpha_gives_half_at_the_median_of_the_base() -> None:
    alpha = calibrate_alpha([0.05, 0.1, 0.2])
    assert alpha == pytest.approx(6.93, abs=0.01)
    assert closeness([0.1], alpha) == pytest.approx(0.5)
    for base in ([], [0.0, 0.0, 0.1]):
        with pytest.raises(DataError, match="calibrated"):
            calibrate_alpha(base)


def test_the_gate_takes_the_reward_of_static_and_slow_videos() -> None:
    asked = (6.0, 90.0)
    assert excursion_gate((6.5, 95.0), asked) == 1.0
    assert excursion_gate((3.0, 45.0), asked) == 0.5
    assert excursion_gate((0.0, 90.0), asked) == 0.0
    assert excursion_gate((0.1, 45.0), (0.0, 90.0)) == 0.5  # only what was asked for counts
    assert excursion_gate((2.5, 90.0), asked, full=0.4) == 1.0  # and no more for going further
    assert excursion_gate((1.2, 90.0), asked, full=0.4) == pytest.approx(0.5)
    assert excursion_gate((math.nan, 90.0), asked) is None
    for wrong in ((0.0, 0.0), (math.nan, 1.0)):
        with pytest.raises(DataError, match="excursion"):
            excursion_gate((1.0, 1.0), wrong)

    def total(d: float, gate: float | None) -> float:
        value = cycle_reward(closeness([d], 7.0), closeness([d], 7.0), gate)
        assert value is not None
        return value

    render, honest, slow, static = total(0.01, 1.0), total(0.08, 0.95), total(0.02, 0.5), total(0.0, 0.0)
    assert render > honest > slow > static == 0.0
    assert total(0.0, 1.0) > render  # ungated, the static video would win


def test_parts_that_do_not_exist_do_not_count() -> None:
    assert cycle_reward(0.8, 0.6, 1.0) == pytest.approx(1.1)
    assert cycle_reward(0.8, None, 0.5) == pytest.approx(0.4)
    assert cycle_reward(0.8, 0.6, 1.0, temporal_weight=0.0) == pytest.approx(0.8)
    assert cycle_reward(None, None, 1.0) is None
    assert cycle_reward(None, 0.6, 1.0, temporal_weight=0.0) is None
    assert cycle_reward(0.8, 0.6, None) is None


def test_closure_ratio_is_absent_for_a_video_that_never_left() -> None:
    assert closure_ratio(0.05, [0.1, 0.2]) == pytest.approx(0.25)
    assert closure_ratio(0.0, [0.0, 0.0]) is None
    assert closure_ratio(0.0, []) is None
