"""CycleBench's words are the same for ever, close in every world and fill their videos."""

import numpy as np
import pytest

from pipeline.actions import is_compound
from pipeline.benchmark.cycle_words import (
    DIGEST,
    MINI_DIGEST,
    SETTINGS,
    TASKS,
    cyclebench_words,
    words_digest,
)
from pipeline.camera import WORLDPLAY_STEP, StepSize

WORDS = cyclebench_words()


def test_the_set_is_the_one_of_the_digest() -> None:
    assert words_digest(WORDS) == DIGEST
    assert words_digest(WORDS[::-1]) != DIGEST


def test_there_are_47_words_in_every_task_and_setting() -> None:
    assert len(WORDS) == len({(w.setting, w.task, w.name) for w in WORDS}) == 47
    assert {(w.task, w.setting) for w in WORDS} == {(t, s) for t in TASKS for s in SETTINGS}


@pytest.mark.parametrize("step", [WORLDPLAY_STEP, StepSize(0.4, 6.0)])
def test_every_word_closes_and_leaves_one_idle_action(step: StepSize) -> None:
    for word in WORDS:
        closed = word.build(step)
        assert len(closed.labels_T) == word.latents == SETTINGS[word.setting]
        assert closed.idle == 1
        assert np.abs(closed.c2w_T44[-1] - np.eye(4)).max() < 1e-9
        assert (is_compound(closed.labels_A).any()) == (word.setting == "composite")
        assert (len(closed.mirror_pairs()) > 0) == (
            word.task in ("reversible", "cascaded") or (word.task, word.setting) == ("repeated", "composite")
        )
        assert (len(closed.repeat_pairs()) > 0) == (word.task == "repeated")
        for pairs in (closed.mirror_pairs(), closed.repeat_pairs(), closed.end_pairs()):
            one, other = closed.c2w_T44[pairs[:, 0]], closed.c2w_T44[pairs[:, 1]]
            assert np.abs(one - other).max(initial=0) < 1e-9


def test_labels_are_the_same_for_every_step() -> None:
    for word in WORDS:
        assert np.array_equal(word.build(WORLDPLAY_STEP).labels_A, word.build(StepSize(0.4, 6.0)).labels_A)


def test_the_set_of_the_mini_world_has_the_same_families_at_half_the_lengths() -> None:
    words, published = cyclebench_words("mini"), cyclebench_words()
    assert words_digest(words) == MINI_DIGEST
    assert [(w.task, w.setting) for w in words] == [(w.task, w.setting) for w in published]
    assert [2 * w.latents for w in words] == [w.latents for w in published]
    for word in words:
        built = word.build(StepSize(0.4, 6.0))
        assert len(built.c2w_T44) == word.latents
        assert built.idle == 1
        assert np.abs(built.c2w_T44[-1] - np.eye(4)).max() < 1e-9
