"""The training mix: the published shares, reproducible from the generator alone, never an opposite or idle
action."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.actions import format_word, is_compound, keys_of
from pipeline.errors import WordError
from pipeline.words import BASIC_FAMILIES, FAMILIES, TEMPLATES, TrainingMix


def runs_of(labels: np.ndarray) -> list[int]:
    edges = np.flatnonzero(np.diff(labels)) + 1
    return [len(run) for run in np.split(labels, edges)]


def test_templates_are_32_actions_of_one_or_two_keys() -> None:
    assert len(TEMPLATES) == len(set(TEMPLATES)) == 32
    assert {len(keys_of(label)) for label in TEMPLATES} == {1, 2}
    assert [len(labels) for labels in FAMILIES.values()] == [4, 2, 2, 4, 4, 8, 8]
    for name, labels in FAMILIES.items():
        assert all(is_compound(label) is (name not in BASIC_FAMILIES) for label in labels)


def test_default_shares_are_the_published_ones() -> None:
    shares = TrainingMix().shares()
    expected = [16, 8, 4, 24, 8, 48, 8]
    assert list(shares.values()) == pytest.approx([weight / 116 for weight in expected])
    assert sum(shares[name] for name in BASIC_FAMILIES) == pytest.approx(28 / 116)


def test_sampled_shares_follow_the_weights() -> None:
    # hold 1: every action is one draw, counts are binomial; 4 sigma of the largest share is 0.008.
    labels = TrainingMix(hold=(1, 1)).sample(np.random.default_rng(0), 60_000)
    for name, share in TrainingMix().shares().items():
        assert np.isin(labels, FAMILIES[name]).mean() == pytest.approx(share, abs=0.01), name
        counts = [int((labels == label).sum()) for label in FAMILIES[name]]
        assert max(counts) < 1.3 * min(counts), name
    assert is_compound(labels).mean() == pytest.approx(0.759, abs=0.01)


def test_hold_is_uniform_over_both_ends() -> None:
    labels = TrainingMix().sample(np.random.default_rng(1), 60_000)
    runs = np.array(runs_of(labels)[:-1])
    counts = np.bincount(runs, minlength=40)
    assert runs.min() == 2
    single_runs = counts[2:17]
    assert single_runs.min() > 0.75 * single_runs.max()
    assert counts[17:].sum() < 0.15 * len(runs)  # the same template drawn twice in a row


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(1, 140))
def test_a_seed_gives_one_word_of_the_asked_length(seed: int, actions: int) -> None:
    first = TrainingMix().sample(np.random.default_rng(seed), actions)
    again = TrainingMix().sample(np.random.default_rng(seed), actions)
    np.testing.assert_array_equal(first, again)
    assert first.shape == (actions,)
    assert first.dtype == np.int64
    assert np.isin(first, TEMPLATES).all()
    longer = TrainingMix().sample(np.random.default_rng(seed), actions + 7)
    np.testing.assert_array_equal(longer[:actions], first)
    assert min(runs_of(first)[:-1], default=2) >= 2


def test_seeds_differ_and_the_stream_is_pinned() -> None:
    words = {format_word(TrainingMix().sample(np.random.default_rng(seed), 31)) for seed in range(20)}
    assert len(words) == 20
    # A changed stream silently changes every prompt of a stored experiment.
    assert format_word(TrainingMix().sample(np.random.default_rng(0), 31)) == PINNED


PINNED = "s+right-6, s-2, d+left-15, w+left-8"


def test_a_zero_weight_family_is_never_drawn() -> None:
    only = TrainingMix(
        translation=0,
        yaw=1,
        pitch=0,
        two_translations=0,
        yaw_and_pitch=0,
        translation_and_yaw=0,
        translation_and_pitch=0,
    )
    assert set(only.sample(np.random.default_rng(0), 500).tolist()) == set(FAMILIES["yaw"])
    assert only.shares()["yaw"] == 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"yaws": 1},
        {"yaw": -1},
        {"yaw": float("nan")},
        {"hold": (0, 4)},
        {"hold": (5, 4)},
        dict.fromkeys(FAMILIES, 0),
    ],
)
def test_bad_numbers_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TrainingMix(**wrong)  # type: ignore[arg-type]


def test_a_word_needs_an_action() -> None:
    with pytest.raises(WordError, match="at least 1"):
        TrainingMix().sample(np.random.default_rng(0), 0)
