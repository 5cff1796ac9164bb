"""The memory rule: what is kept, what is retrieved, and that it is a pure function of the poses."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import ConfigError
from pipeline.worlds.base import MemoryRule
from pipeline.worlds.memory import overlap, select

RULE_5B = MemoryRule(budget=16, recent=12, sink=0)
RULE_8B = MemoryRule(budget=20, recent=12, sink=4)


def yaw(degrees: float, position: tuple[float, float, float] = (0, 0, 0)) -> np.ndarray:
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    pose = np.eye(4)
    pose[:3, :3] = [[c, 0, s], [0, 1, 0], [-s, 0, c]]
    pose[:3, 3] = position
    return pose


def path(headings: list[float]) -> np.ndarray:
    """One clip of four latents a heading."""
    return np.stack([yaw(heading) for heading in headings for _ in range(4)])


@pytest.mark.parametrize("clips", range(5))
def test_short_history_is_kept_whole(clips: int) -> None:
    c2w = path([0.0] * (clips + 1))
    assert select(c2w, 4 * clips, RULE_5B) == list(range(4 * clips))


def test_the_clip_that_saw_the_same_view_is_retrieved() -> None:
    """Clip 2 looked where clip 7 will look; everything recent looked elsewhere."""
    c2w = path([0, 90, 180, 270, 60, 120, 240, 185])
    assert select(c2w, 28, RULE_5B) == [8, 9, 10, 11, *range(16, 28)]


def test_the_sink_stays_and_is_not_retrieved_twice() -> None:
    c2w = path([180, 90, 0, 175, 270, 60, 120, 240, 180])
    assert select(c2w, 32, RULE_8B) == [*range(4), *range(12, 16), *range(20, 32)]


def test_a_larger_budget_retrieves_more_clips() -> None:
    c2w = path([0, 90, 5, 270, 60, 120, 240, 180, 0])
    rule = MemoryRule(budget=16, recent=8, sink=0)
    assert select(c2w, 32, rule) == [*range(4), *range(8, 12), *range(24, 32)]


@given(
    headings=st.lists(st.floats(-180, 180), min_size=2, max_size=9),
    seed=st.integers(0, 1000),
    rule=st.sampled_from([RULE_5B, RULE_8B, MemoryRule(budget=8, recent=4), MemoryRule(budget=4, recent=4)]),
)
@settings(deadline=None, max_examples=40)
def test_indices_are_history_sorted_within_budget_and_repeatable(
    headings: list[float], seed: int, rule: MemoryRule
) -> None:
    c2w = path(headings)
    start = 4 * (len(headings) - 1)
    chosen = select(c2w, start, rule, seed)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(start, rule.budget)
    assert set(range(max(0, start - rule.recent), start)) <= set(chosen) <= set(range(start))
    assert set(range(min(start, rule.sink))) <= set(chosen)
    np.random.seed(seed)  # noqa: NPY002 - the global generator must not matter
    assert select(c2w, start, rule, seed) == chosen


def test_only_relative_poses_matter() -> None:
    c2w = path([0, 90, 180, 270, 60, 120, 240, 185])
    moved = yaw(33, (5, -2, 1)) @ c2w
    assert select(moved, 28, RULE_5B) == select(c2w, 28, RULE_5B)


def test_overlap_of_known_views() -> None:
    """The same view shares everything, the opposite nothing, and half the cone half of it."""
    history = np.stack([yaw(0), yaw(180), yaw(30), yaw(0, (0, 0, 100))])
    rule = MemoryRule(points=200_000)
    shared = overlap(np.eye(4)[None], history, rule, seed=0, clip_start=4)[0]
    assert shared[0] == 1
    assert shared[1] == 0
    assert shared[2] == pytest.approx(0.5, abs=0.03)
    assert shared[3] == 0


def test_mistakes_are_named() -> None:
    c2w = path([0] * 6)
    with pytest.raises(ValueError, match="multiples of 4"):
        select(c2w, 18, RULE_5B)
    with pytest.raises(ValueError, match="24 poses"):
        select(c2w, 24, RULE_5B)
    with pytest.raises(ConfigError, match="budget 16"):
        MemoryRule(budget=16, recent=12, sink=8)
    with pytest.raises(ConfigError, match="multiples"):
        MemoryRule(budget=18)
