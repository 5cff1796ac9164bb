"""Pairs of frames travel through records unchanged and end where they are asked to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.actions import parse_word
from pipeline.camera import StepSize
from pipeline.closed_words import square
from pipeline.cycles import loop, retrace
from pipeline.errors import DataError
from pipeline.pairs import REFERENCE, FramePairs

STEP = StepSize(0.4, 6.0)


@settings(max_examples=20, deadline=None)
@given(out=st.integers(1, 5), repeats=st.integers(1, 3), stride=st.integers(1, 4), start=st.integers(0, 20))
def test_pairs_agree_in_pose_and_come_back_from_a_record(
    out: int, repeats: int, stride: int, start: int
) -> None:
    word = retrace(parse_word(f"w+right-{out}"), STEP, repeats=repeats, actions=2 * out * repeats + 1)
    pairs = FramePairs.of_word(word, stride)
    assert len(pairs.of("spatial")) == repeats * stride * out + stride  # and the no-op at the end
    assert len(pairs.of("temporal")) == (repeats - 1) * (2 * stride * out + 1)
    again = FramePairs.from_json(pairs.to_json())
    assert np.array_equal(again.index_Q2, pairs.index_Q2)
    assert np.array_equal(again.kind_Q, pairs.kind_Q)
    whole = pairs.index_Q2[(pairs.index_Q2 % stride == 0).all(1)] // stride
    assert np.abs(word.c2w_T44[whole[:, 0]] - word.c2w_T44[whole[:, 1]]).max() < 1e-9
    late = pairs.ending_in(slice(start, start + 4))
    assert all(start <= j < start + 4 for _, j in late.index_Q2)


def test_a_loop_is_compared_at_its_end_only() -> None:
    pairs = FramePairs.of_word(loop(square(2), STEP), 1)
    assert pairs.to_json() == [[0, 8, "spatial"]]


def test_a_relation_points_to_the_reference() -> None:
    pairs = FramePairs.to_reference(7)
    assert pairs.to_json() == [[REFERENCE, 7, "relation"]]
    assert len(FramePairs.from_json(pairs.to_json()).of("relation")) == 1


def test_nonsense_is_refused() -> None:
    with pytest.raises(DataError, match="'closs'"):
        FramePairs.from_json([[0, 1, "closs"]])
    for index in ([[2, 1]], [[1, 1]], [[0, 1], [0, 2]], [[-2, 1]]):
        with pytest.raises(DataError):
            FramePairs(np.array(index), np.zeros(1, np.int64))
