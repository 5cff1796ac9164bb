"""Cycles close exactly, their labels read back from their poses, and their pairs show the same view."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.actions import LABELS, format_word, inverse, label_of, parse_word
from pipeline.camera import WORLDPLAY_STEP, StepSize, labels_from_poses, poses_from_labels
from pipeline.closed_words import full_turn, legs, polygon, square
from pipeline.cycles import ClosedWord, MultiScale, Part, compose, loop, naive_residual, retrace
from pipeline.errors import WordError
from pipeline.words import TrainingMix

MINI = StepSize(0.4, 6.0)
words = st.lists(st.integers(0, LABELS - 1), min_size=1, max_size=12)
sizes = st.builds(StepSize, st.floats(0.01, 1.0), st.floats(0.5, 8.0))


def check(word: ClosedWord) -> None:
    """What every closed word promises: closure, labels of its poses, pairs of equal poses."""
    assert word.c2w_T44.shape == (len(word.labels_A) + 1, 4, 4)
    assert np.abs(word.c2w_T44[-1] - np.eye(4)).max() < 1e-9
    assert (word.labels_T == labels_from_poses(word.c2w_T44)).all()
    for pairs in (word.mirror_pairs(), word.end_pairs(), word.repeat_pairs(), word.idle_pairs()):
        assert (pairs[:, 0] < pairs[:, 1]).all()
        assert np.abs(word.c2w_T44[pairs[:, 0]] - word.c2w_T44[pairs[:, 1]]).max(initial=0) < 1e-9


def video(word: ClosedWord, stride: int) -> np.ndarray:
    """(F, 2, 2) frames whose pixels hold where inside which action the camera is; equal views have equal numbers."""
    points = word.c2w_T44[:, :3].reshape(len(word.c2w_T44), -1)
    steps = np.arange(stride, 0, -1)[::-1, None] / stride
    frames = [points[:1]]
    for before, after in pairwise(points):
        frames.append(before + steps * (after - before))
    return np.concatenate(frames)


@settings(max_examples=40, deadline=None)
@given(words, st.integers(1, 4), st.data())
def test_every_retraced_word_closes_with_any_speed(
    forward: list[int], repeats: int, data: st.DataObject
) -> None:
    step = data.draw(st.lists(sizes, min_size=len(forward), max_size=len(forward)))
    word = retrace(forward, step, repeats=repeats)
    check(word)
    m = len(forward)
    assert (word.c2w_T44[2 * m] == np.eye(4)).all()  # bit for bit
    assert word.labels_A[:m].tolist() == forward
    assert word.labels_A[m : 2 * m].tolist() == inverse(np.array(forward))[::-1].tolist()
    assert len(word.mirror_pairs()) == repeats * m
    assert len(word.repeat_pairs()) == (repeats - 1) * (2 * m + 1)


def test_labels_of_the_way_back_are_the_opposite_keys_for_all_81() -> None:
    for label in range(LABELS):
        assert retrace([label], WORLDPLAY_STEP).labels_A.tolist() == [label, inverse(label)]


def test_speeds_of_the_way_out_are_those_of_the_way_back_in_a_shortened_repeat() -> None:
    steps = [StepSize(0.1, 2.0), StepSize(0.2, 4.0), StepSize(0.3, 6.0)]
    word = retrace(parse_word("w+right-3"), steps, repeats=2, actions=11)
    check(word)
    assert word.turns() == [3, 8]
    with pytest.raises(WordError, match="2 step sizes for 3"):
        retrace(parse_word("w-3"), steps[:2])


@pytest.mark.parametrize(
    ("word", "half"),
    [("w+right", 15), ("w+right", 32), ("w+up", 7), ("w+d+left", 9), ("w+d+down", 6), ("d+up", 6)],
)
def test_opposite_keys_leave_the_predicted_residual(word: str, half: int) -> None:
    integrated, predicted = naive_residual(label_of(word), half, WORLDPLAY_STEP)
    assert integrated == pytest.approx(predicted, rel=1e-9, abs=1e-12)
    check(retrace([label_of(word)] * half, WORLDPLAY_STEP))
    assert naive_residual(label_of("w+right"), 15, WORLDPLAY_STEP)[0] == pytest.approx(0.0612, abs=1e-4)
    assert naive_residual(label_of("w+right"), 32, WORLDPLAY_STEP)[0] == pytest.approx(0.119, abs=1e-3)
    with pytest.raises(WordError, match="one turn key"):
        naive_residual(label_of("w"), 3, WORLDPLAY_STEP)


@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("actions", [12, 13, 15])
def test_pairs_of_a_counter_video_are_equal_frames(stride: int, actions: int) -> None:
    word = retrace(parse_word("w-3, right-3"), MINI, actions=actions)
    frames = video(word, stride)
    assert len(frames) == 1 + stride * actions
    assert word.idle == actions - 12
    mirror = word.mirror_pairs(stride)
    assert len(mirror) == 6 * stride  # every frame of the way out but the turn
    assert mirror[0].tolist() == [0, 12 * stride]
    assert mirror[-1].tolist() == [6 * stride - 1, 6 * stride + 1]
    idle = word.idle_pairs(stride)
    assert len(idle) == word.idle * stride
    for pairs in (mirror, idle, word.end_pairs(stride)):
        assert frames[pairs[:, 0]] == pytest.approx(frames[pairs[:, 1]], abs=1e-12)
    # Mirroring the whole odd video instead, frame f with F - 1 - f, is the mistake that padding avoids.
    if word.idle:
        assert np.abs(frames - frames[::-1]).max() > 0.1


@pytest.mark.parametrize("stride", [1, 4])
def test_repeats_share_their_border_frames(stride: int) -> None:
    word = retrace(parse_word("w-1, d-1"), MINI, repeats=3)
    frames = video(word, stride)
    pairs = word.repeat_pairs(stride)
    assert len(pairs) == 2 * (4 * stride + 1)
    assert [0, 4 * stride] in pairs.tolist()
    assert [4 * stride, 8 * stride] in pairs.tolist()
    assert frames[pairs[:, 0]] == pytest.approx(frames[pairs[:, 1]], abs=1e-12)
    assert len(retrace(parse_word("w-2"), MINI).repeat_pairs(stride)) == 0


@pytest.mark.parametrize("stride", [1, 4])
def test_a_shortened_last_repeat_is_compared_where_it_agrees(stride: int) -> None:
    word = retrace(parse_word("w-1, d-1, w-1, d-1"), MINI, repeats=2, actions=15)
    check(word)
    assert (word.idle, word.turns()) == (1, [4, 11])
    frames = video(word, stride)
    pairs = word.repeat_pairs(stride)
    assert frames[pairs[:, 0]] == pytest.approx(frames[pairs[:, 1]], abs=1e-12)
    assert set(pairs[:, 1]) == set(range(8 * stride, 14 * stride + 1))  # every frame of the repeat


def test_closed_loops_that_do_not_retrace() -> None:
    for labels in (square(3), full_turn(MINI), polygon(2, 4, MINI), polygon(1, 6, MINI, "left")):
        word = loop(labels, MINI, repeats=2, actions=2 * len(labels) + 1)
        check(word)
        assert word.idle == 1
        assert len(word.mirror_pairs()) == 0
        assert len(word.repeat_pairs()) == len(labels) + 1
    assert format_word(square(2)) == "w-2, a-2, s-2, d-2"
    assert len(full_turn(WORLDPLAY_STEP)) == 120


def test_words_that_do_not_close_or_do_not_fit_are_errors() -> None:
    with pytest.raises(WordError, match="does not close"):
        loop(parse_word("w-4, right-5, s-4, left-5"), MINI)
    with pytest.raises(WordError, match="does not close"):
        loop(parse_word("w+right-15, s+left-15"), WORLDPLAY_STEP)  # opposite keys are not inverse steps
    with pytest.raises(WordError, match="only 9 are there"):
        retrace(parse_word("w-6"), MINI, actions=9)
    with pytest.raises(WordError, match="do not add up to 360"):
        full_turn(StepSize(0.4, 7.0))
    with pytest.raises(WordError, match="at least 3"):
        polygon(1, 2, MINI)
    with pytest.raises(WordError, match="at least 1"):
        retrace(parse_word("w-2"), MINI, repeats=0)
    with pytest.raises(WordError, match="without actions"):
        retrace([], MINI)
    with pytest.raises(WordError, match="at least one cycle"):
        compose([], MINI)
    with pytest.raises(WordError, match="lengths"):
        legs(["w", "a"], [1, 0])
    with pytest.raises(WordError, match="too few"):
        retrace(parse_word("w-1"), MINI, actions=1)


def test_labels_that_their_poses_do_not_show_are_an_error() -> None:
    with pytest.raises(WordError, match="reads as"):
        retrace(parse_word("w+right-2"), StepSize(1.0, 45.0))  # so large a turn makes "w" read as "w+d"
    with pytest.raises(WordError, match="reads as"):
        retrace(parse_word("w-2"), StepSize(1e-5, 3.0))  # too small a move reads as none


def test_cycles_of_different_kinds_follow_each_other() -> None:
    parts = [
        Part(tuple(parse_word("w-2")), True, 0),
        Part(square(1), False, 1),
        Part(tuple(parse_word("a-2")), True, 2),
    ]
    word = compose(parts, MINI, actions=13)
    check(word)
    assert word.end_pairs().tolist() == [[0, 4], [0, 8], [0, 12]]
    assert word.mirror_pairs().tolist() == [[0, 4], [1, 3], [8, 12], [9, 11]]
    assert word.idle == 1


def test_scales_are_the_published_ones_and_fill_the_video() -> None:
    scales = MultiScale()
    assert scales.clips == 16
    assert scales.table() == [(16, 1), (8, 2), (4, 4), (2, 8)]
    turns = set()
    for level, (clips, repeats) in enumerate(scales.table()):
        word = scales.sample(np.random.default_rng(level), level, TrainingMix(), MINI)
        check(word)
        assert len(word.labels_T) == 64
        assert (word.idle, len(word.cycles)) == (1, repeats)
        assert word.cycles[0].actions == min(4 * clips, 62)
        turns |= set(word.turns())
    assert {4, 8, 12, 16, 20, 24, 28, 31, 36, 40, 44, 47, 52, 55, 59} <= turns
    rng = np.random.default_rng(0)
    counts = np.bincount([scales.draw(rng) for _ in range(4000)], minlength=4)
    assert len(counts) == 4
    assert np.abs(counts - 1000).max() < 120  # 4 sigma of a binomial
    for level in (-1, 4):
        with pytest.raises(WordError, match="levels 0 to 3"):
            scales.sample(rng, level, TrainingMix(), MINI)
    with pytest.raises(WordError, match="do not split"):
        MultiScale(smallest=1, levels=1).sample(rng, 0, TrainingMix(), MINI, clip_latents=1)
    with pytest.raises(ValidationError, match="at most 1024"):
        MultiScale(smallest=1000)


def test_poses_of_a_word_are_those_of_the_camera() -> None:
    word = retrace(parse_word("w+right-4"), MINI)
    assert np.array_equal(word.c2w_T44[:5], poses_from_labels(parse_word("w+right-4"), MINI))
