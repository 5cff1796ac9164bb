"""Every relation is one of poses, and a copy of past frames satisfies none."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.actions import label_of, parse_word
from pipeline.camera import StepSize, poses_from_labels
from pipeline.closed_words import full_turn, polygon, square
from pipeline.errors import WordError
from pipeline.relations import find_relations, pose_key, sample_relations

MINI = StepSize(0.4, 6.0)
MOVES = [label_of(key) for key in ("w", "s", "d", "a", "right", "left")]


def end(word: tuple[int, ...]) -> np.ndarray:
    return poses_from_labels(word, MINI)[-1]


def test_known_relations_are_found_and_named() -> None:
    def relate(*words: str) -> list[str]:
        return [found.kind for found in find_relations([parse_word(word) for word in words], MINI)]

    assert relate("w-2, d-3", "d-3, w-2") == ["commuting"]
    assert relate("w-1, d-1, w-1, d-1", "d-2, w-2") == ["equivalent"]
    assert relate("w+d-3", "w-3, d-3") == ["equivalent"]
    assert relate("right-15, w-2, left-15", "d-2") == ["equivalent"]
    assert relate("w-2, right-3", "right-3, w-2") == []  # a move and a turn do not commute
    assert relate("w-2", "w-2") == []  # one word twice
    assert relate("w-3, d-1", "w-2, d-1, w-1") == []  # a shared beginning: the same frames
    assert relate("w-2, s-2") == []  # retracing


def test_loops_close_and_retracing_ones_are_left_out() -> None:
    loops = [square(2), full_turn(MINI), polygon(1, 4, MINI)]
    found = find_relations([*loops, parse_word("w-3, s-3"), parse_word("w-1, d-1, a-1, s-1")], MINI)
    assert [(r.first, r.second, r.kind) for r in found] == [(word, (), "closure") for word in loops]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(3, 10))
def test_sampled_relations_hold(seed: int, actions: int) -> None:
    found = sample_relations(np.random.default_rng(seed), MINI, actions=actions, keys=MOVES, words=60)
    for relation in found:
        assert len(relation.first) == actions
        assert relation.first != relation.second
        assert end(relation.first) == pytest.approx(end(relation.second), abs=1e-9)
        ways = [poses_from_labels(word, MINI) for word in (relation.first, relation.second) if word]
        inside = [pose_key(pose) for way in ways for pose in way[1:-1]]
        if relation.kind == "closure":
            assert len(set(inside)) == len(inside)
        else:
            assert not {pose_key(p) for p in ways[0][1:-1]} & {pose_key(p) for p in ways[1][1:-1]}


def test_sampling_finds_relations_and_repeats_itself() -> None:
    def sample() -> list:
        return sample_relations(np.random.default_rng(3), MINI, actions=8, keys=MOVES)

    found = sample()
    assert {relation.kind for relation in found} == {"commuting", "equivalent", "closure"}
    assert found == sample()
    turns = sample_relations(np.random.default_rng(3), MINI, actions=60, keys=MOVES, words=1)
    assert full_turn(MINI) in [relation.first for relation in turns]
    assert sample_relations(np.random.default_rng(0), StepSize(0.4, 7.0), actions=3, keys=[9], words=5) == []
    with pytest.raises(WordError, match="at least 1"):
        sample_relations(np.random.default_rng(0), MINI, actions=3, keys=[])
