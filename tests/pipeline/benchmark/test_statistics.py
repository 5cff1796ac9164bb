"""Intervals on data whose answer is known."""

import numpy as np
import pytest

from pipeline.benchmark.statistics import Interval, bootstrap, paired


def test_constants_have_no_width() -> None:
    assert bootstrap(np.full(7, 0.25)) == Interval(0.25, 0.25, 0.25)
    assert paired(np.full((3, 7), 0.5), np.full(7, 0.25)) == Interval(0.25, 0.25, 0.25)


def test_a_mean_and_its_normal_interval() -> None:
    values = np.random.default_rng(0).normal(3.0, 1.0, 400)
    found = bootstrap(values)
    assert found.mean == values.mean()
    half = 1.96 * values.std() / 20
    assert found.low == pytest.approx(values.mean() - half, abs=0.15 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.15 * half)
    narrow = bootstrap(values, level=0.5)
    assert found.low < narrow.low < narrow.high < found.high


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    hits = []
    for _ in range(300):
        found = bootstrap(rng.binomial(1, 0.4, 60).astype(float), draws=300)
        hits.append(found.low <= 0.4 <= found.high)
    assert 0.90 <= np.mean(hits) <= 0.98


def test_the_same_seed_gives_the_same_interval() -> None:
    values = np.random.default_rng(2).random((2, 30))
    assert bootstrap(values[0]) == bootstrap(values[0])
    assert bootstrap(values[0]) != bootstrap(values[0], seed=1)
    assert paired(values, values[0]) == paired(values, values[0])


def test_missing_cases_are_left_out_and_never_zero() -> None:
    values = np.array([1.0, np.nan, 3.0, np.inf])
    assert bootstrap(values).mean == 2.0
    with pytest.raises(ValueError, match="no case"):
        bootstrap(np.array([np.nan, np.nan]))
    # a case that is missing in any arm or seed counts in none
    after = np.array([[1.0, 2.0, np.nan], [1.0, 2.0, 9.0]])
    before = np.array([0.0, np.nan, 0.0])
    assert paired(after, before) == Interval(1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="both arms"):
        paired(after[:, 2:], before[2:])


def test_pairing_removes_what_the_cases_share() -> None:
    rng = np.random.default_rng(3)
    hard = rng.normal(0, 5, 80)  # cases differ much more than the arms do
    before, after = hard + rng.normal(0, 0.2, 80), hard + 0.5 + rng.normal(0, 0.2, 80)
    difference = paired(after, before)
    assert difference.low > 0.35
    assert difference.high < 0.65
    assert difference.mean == pytest.approx(after.mean() - before.mean())
    assert bootstrap(after).low < bootstrap(before).high  # unpaired, nothing would be seen


def test_training_seeds_are_resampled_too() -> None:
    """Two seeds that disagree: the interval spans both, however many cases each has."""
    after = np.stack([np.full(200, 0.0), np.full(200, 1.0)])
    found = paired(after, np.zeros(200))
    assert (found.mean, found.low, found.high) == (0.5, 0.0, 1.0)
    single = paired(after[:1], np.zeros(200))
    assert (single.low, single.high) == (0.0, 0.0)
    # before with seeds of its own: row s belongs to row s
    assert paired(after, after + np.array([[1.0], [1.0]])) == Interval(-1.0, -1.0, -1.0)


def test_shown() -> None:
    assert Interval(0.234, 0.21, 0.2591).shown(100) == "23.4 [21.0, 25.9]"
    assert Interval(0.234, 0.21, 0.2591).shown(digits=2) == "0.23 [0.21, 0.26]"
