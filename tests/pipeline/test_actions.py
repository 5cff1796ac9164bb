"""Labels and words: the codes are the published ones, every label has one spelling, every typing error an
answer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.actions import (
    HELD_81K,
    KEYS,
    OPPOSITE,
    check_labels,
    codes_of_bits,
    format_word,
    inverse,
    is_compound,
    keys_of,
    label_of,
    parse_word,
    rotation_code,
    translation_code,
)
from pipeline.errors import WordError

ALL = np.arange(81)
labels_lists = st.lists(st.integers(0, 80), min_size=1, max_size=40)

# spec/worldplay.md section 3, typed out independently of the tables under test.
TRANSLATIONS = ["", "w", "s", "d", "a", "w+d", "w+a", "s+d", "s+a"]
ROTATIONS = ["", "right", "left", "up", "down", "right+up", "right+down", "left+up", "left+down"]


def test_measured_example_of_the_reference() -> None:
    assert parse_word("w-3, right-1, d-4") == [9, 9, 9, 1, 27, 27, 27, 27]
    assert label_of("w+right") == 10


@pytest.mark.parametrize("label", range(81))
def test_every_label_is_nine_times_translation_plus_rotation(label: int) -> None:
    translation, rotation = divmod(label, 9)
    keys = [
        key for text in (TRANSLATIONS[translation], ROTATIONS[rotation]) for key in text.split("+") if key
    ]
    assert label_of(keys) == label
    assert set(keys_of(label)) == set(keys)
    assert translation_code(label) == translation
    assert rotation_code(label) == rotation
    assert is_compound(label) is (len(keys) >= 2)
    assert parse_word(format_word([label])) == [label]


def test_keys_come_back_in_one_order_whatever_order_they_were_typed_in() -> None:
    assert keys_of(label_of(["up", "left", "a", "s"])) == ("s", "a", "left", "up")
    assert parse_word(" RIGHT + W - 2 ,none-1") == [10, 10, 0]
    assert format_word([10, 10, 0]) == "w+right-2, none-1"


def test_inverse_flips_every_key_and_is_its_own_inverse() -> None:
    for label in range(81):
        assert set(keys_of(inverse(label))) == {OPPOSITE[key] for key in keys_of(label)}
    np.testing.assert_array_equal(inverse(inverse(ALL)), ALL)
    assert [label for label in range(81) if inverse(label) == label] == [0]
    single = {"w": "s", "d": "a", "right": "left", "up": "down"}
    for key, opposite in single.items():
        assert inverse(label_of(key)) == label_of(opposite)


def test_scalars_stay_scalars_and_arrays_keep_their_shape() -> None:
    assert type(inverse(9)) is int
    assert type(is_compound(10)) is bool
    grid = ALL.reshape(9, 9)
    assert (translation_code(grid) == grid // 9).all()
    assert (rotation_code(grid) == grid % 9).all()
    assert is_compound(grid).sum() == 81 - 1 - 8
    assert type(inverse(np.int64(9))) is int


def test_table_of_held_keys_has_no_opposites_and_all_distinct_rows() -> None:
    assert HELD_81K.shape == (81, len(KEYS))
    assert not (HELD_81K[:, 0::2] & HELD_81K[:, 1::2]).any()
    assert len(np.unique(HELD_81K, axis=0)) == 81
    with pytest.raises(ValueError, match="read-only"):
        HELD_81K[0, 0] = True


def test_opposite_bits_have_no_code() -> None:
    with pytest.raises(WordError, match="opposite"):
        codes_of_bits(np.array([[True, True, False, False]]))


@given(labels_lists)
def test_words_round_trip(labels: list[int]) -> None:
    word = format_word(labels)
    assert parse_word(word) == labels
    assert format_word(parse_word(word)) == word


@given(st.text(alphabet="wsdaright up-+,0123456789.n", max_size=20))
def test_any_text_is_a_word_or_a_word_error(text: str) -> None:
    labels: list[int] = []
    try:
        labels = parse_word(text)
    except WordError as error:
        message = str(error)
    else:
        message = ""
    assert "\n" not in message
    assert message or (labels and all(0 <= label <= 80 for label in labels))


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("w-0.5", r'"w-0\.5".*"0\.5" is not a whole positive number.*"w-1"'),
        ("d-2, w-0", '"w-0".*whole positive'),
        ("w--3", "no|whole positive|unknown key"),
        ("w-", "whole positive"),
        ("w", '"w": no duration; write "w-1"'),
        ("w-٣", "whole positive"),
        ("w-3,,d-1", "empty part"),
        ("", "empty part"),
        ("w-3,", "empty part"),
        ("-3", "empty key"),
        ("w+-3", "empty key"),
        ("rigth-2", 'unknown key "rigth": did you mean "right"'),
        ("forward-2", 'did you mean "w"'),
        ("q-2", 'unknown key "q".*w, s, d, a, right, left, up, down and none'),
        ("w+s-2", '"w" and "s" are opposite'),
        ("up+d+down-2", '"up" and "down" are opposite'),
        ("w+w-2", "given twice"),
        ("w+none-2", "stands alone"),
        ("w-99999999", "exceed"),
        ("w-" + "9" * 5000, "whole positive"),
    ],
)
def test_typing_errors_name_the_part_and_the_remedy(word: str, says: str) -> None:
    with pytest.raises(WordError, match=says):
        parse_word(word)


@pytest.mark.parametrize("labels", [[81], [-1], [0.5], ["w"], [True]])
def test_what_is_no_label_is_refused(labels: list[object]) -> None:
    for function in (check_labels, inverse, translation_code, format_word):
        with pytest.raises(WordError, match="label"):
            function(labels)  # type: ignore[operator]


def test_no_labels_are_no_word() -> None:
    assert format_word([]) == ""
    assert check_labels([]).dtype == np.int64
