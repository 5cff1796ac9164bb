"""Keys, the 81 compound action labels and the words that people write: "w-3, right+w-2, d-4".

WHY a file of its own: the label is the one number that the world model is conditioned on, that the reward
compares and that the benchmark reports, so its codes are written down once, as tables, and everything else
looks them up.

A label is `9 * translation_code + rotation_code` (spec/worldplay.md section 3). Both codes use the same
numbering of four on/off bits, first to fourth: translation [w forward, s backward, d right, a left], rotation
[yaw right, yaw left, pitch up, pitch down]:

    0 none   1 first   2 second   3 third   4 fourth
    5 first+third   6 first+fourth   7 second+third   8 second+fourth

One label is one action, and one action is one latent step. The published grammar cuts durations with int()
(so "w-0.5" silently means nothing) and has no compound keys; here the first is an error and the second is
written "w+d".
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from pipeline.errors import WordError

LabelArray = npt.NDArray[np.int64]

KEYS = ("w", "s", "d", "a", "right", "left", "up", "down")
NO_OP_KEY = "none"
_PAIRS = tuple(zip(KEYS[::2], KEYS[1::2], strict=True))
OPPOSITE = dict(_PAIRS) | {second: first for first, second in _PAIRS}
CODES = 9
LABELS = CODES * CODES
NO_OP = 0
# A typing error such as "w-30000000" should get an answer, not exhaust the machine; no video is so long.
MAX_ACTIONS = 100_000

# (9, 4): the bits of each code; the same for translation and rotation.
_BITS_OF_CODE = np.array(
    [
        [0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1],
        [1, 0, 1, 0], [1, 0, 0, 1], [0, 1, 1, 0], [0, 1, 0, 1],
    ],
    dtype=bool,
)  # fmt: skip
_BIT_VALUES = np.array([8, 4, 2, 1])
_CODE_OF_BITS = np.full(16, -1, dtype=np.int64)  # -1: opposite bits together, which no code describes
_CODE_OF_BITS[_BITS_OF_CODE @ _BIT_VALUES] = np.arange(CODES)

# (81, 8): which of KEYS each label holds down.
HELD_81K: npt.NDArray[np.bool_] = np.concatenate(
    [np.repeat(_BITS_OF_CODE, CODES, axis=0), np.tile(_BITS_OF_CODE, (CODES, 1))], axis=1
)
HELD_81K.setflags(write=False)

# What people type instead of the keys; only used to name the right key in an error.
_SYNONYMS = {
    "forward": "w", "forwards": "w", "fwd": "w", "back": "s", "backward": "s", "backwards": "s",
    "noop": "none", "no-op": "none", "idle": "none", "wait": "none", "stay": "none",
    "→": "right", "←": "left", "↑": "up", "↓": "down",
}  # fmt: skip

_PART = re.compile(r"(?P<keys>.*?)\s*-\s*(?P<duration>[^-]*)", re.DOTALL)


def codes_of_bits(bits: npt.NDArray[np.bool_]) -> LabelArray:
    """Codes 0..8 (...) of on/off bits (..., 4) in the order of the module docstring.

    Raises WordError where both bits of an opposite pair are on.
    """
    codes: LabelArray = _CODE_OF_BITS[np.asarray(bits, dtype=bool) @ _BIT_VALUES]
    if (codes < 0).any():
        raise WordError(
            "opposite keys are held at once: an action can hold only one key of each opposite pair"
        )
    return codes


_INVERSE_CODE = codes_of_bits(_BITS_OF_CODE[:, [1, 0, 3, 2]])
_ALL = np.arange(LABELS)
_TRANSLATION_CODE = _ALL // CODES
_ROTATION_CODE = _ALL % CODES
_INVERSE = CODES * _INVERSE_CODE[_TRANSLATION_CODE] + _INVERSE_CODE[_ROTATION_CODE]
_IS_COMPOUND = HELD_81K.sum(axis=1) >= 2


def check_labels(labels: Any) -> LabelArray:
    """The labels as an int64 array of the same shape; WordError unless all are whole numbers in 0..80."""
    array = np.asarray(labels)
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise WordError(f"action labels must be whole numbers in 0..{LABELS - 1}, got {array.dtype} values")
    wrong = (array < 0) | (array >= LABELS)
    if wrong.any():
        raise WordError(f"action label {array[wrong].flat[0]} is outside 0..{LABELS - 1}")
    return array.astype(np.int64)


def _look_up(table: npt.NDArray[Any], label: Any) -> Any:
    found = table[check_labels(label)]
    return found.item() if np.ndim(found) == 0 else found


@overload
def translation_code(label: int) -> int: ...
@overload
def translation_code(label: npt.NDArray[np.integer[Any]]) -> LabelArray: ...
def translation_code(label: Any) -> Any:
    """Translation code 0..8 of a label (or of each of an array of labels); WordError outside 0..80."""
    return _look_up(_TRANSLATION_CODE, label)


@overload
def rotation_code(label: int) -> int: ...
@overload
def rotation_code(label: npt.NDArray[np.integer[Any]]) -> LabelArray: ...
def rotation_code(label: Any) -> Any:
    """Rotation code 0..8 of a label (or of each of an array of labels); WordError outside 0..80."""
    return _look_up(_ROTATION_CODE, label)


@overload
def inverse(label: int) -> int: ...
@overload
def inverse(label: npt.NDArray[np.integer[Any]]) -> LabelArray: ...
def inverse(label: Any) -> Any:
    """The label with every key replaced by its opposite (spec/worldcycle.md 1.2); WordError outside 0..80.

    Integrating it does not undo a step that translates and rotates (or yaws and pitches) at once: cycles
    mirror the list of poses instead (DESIGN.md 6.7). The labels of a mirrored list equal this table.
    """
    return _look_up(_INVERSE, label)


@overload
def is_compound(label: int) -> bool: ...
@overload
def is_compound(label: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.bool_]: ...
def is_compound(label: Any) -> Any:
    """Whether a label (or each of an array) holds two or more keys; WordError outside 0..80."""
    return _look_up(_IS_COMPOUND, label)


def keys_of(label: int) -> tuple[str, ...]:
    """The keys that a label holds, in the order of KEYS; () for the no-op. WordError outside 0..80."""
    held = HELD_81K[check_labels(label)]
    return tuple(key for key, down in zip(KEYS, held, strict=True) if down)


def label_of(keys: str | Iterable[str]) -> int:
    """The label of the keys held together, given as names or as one string "w+right"; 0 for none of them.

    Raises WordError for an unknown key (naming the nearest one), a key given twice, "none" together with
    another key, and opposite keys.
    """
    names = keys.split("+") if isinstance(keys, str) else list(keys)
    names = [name.strip().lower() for name in names]
    if names == [NO_OP_KEY]:
        return NO_OP
    for name in names:
        if name == NO_OP_KEY:
            raise WordError(
                f'"{"+".join(names)}": "{NO_OP_KEY}" stands alone; leave it out of a compound action'
            )
        if name not in KEYS:
            raise WordError(_unknown_key(name))
        if names.count(name) > 1:
            raise WordError(f'"{"+".join(names)}": key "{name}" is given twice; write it once')
        if OPPOSITE[name] in names:
            raise WordError(
                f'"{"+".join(names)}": "{name}" and "{OPPOSITE[name]}" are opposite; keep one of them'
            )
    held = np.array([key in names for key in KEYS])
    return int(CODES * codes_of_bits(held[:4]) + codes_of_bits(held[4:]))


def _unknown_key(name: str) -> str:
    if name == "":
        return f'an empty key: write one of {", ".join(KEYS)} or {NO_OP_KEY}, joined by "+"'
    near = (
        [_SYNONYMS[name]]
        if name in _SYNONYMS
        else difflib.get_close_matches(name, (*KEYS, NO_OP_KEY), 1, 0.5)
    )
    hint = f'did you mean "{near[0]}"? ' if near else ""
    return f'unknown key "{name}": {hint}The keys are {", ".join(KEYS)} and {NO_OP_KEY}'


def parse_word(word: str) -> list[int]:
    """The labels of a word, one an action (= a latent step after the first latent).

    Grammar: parts joined by ","; a part is keys joined by "+", then "-" and a whole positive number of
    actions: "w-3, right+w-2, d-4, none-1". Spaces and capitals do not matter. Raises WordError, naming the
    part and the remedy.
    """
    labels: list[int] = []
    for part in word.split(","):
        text = part.strip()
        if not text:
            raise WordError(
                f'"{word.strip()}": an empty part; write parts like "w-3" joined by single commas'
            )
        match = _PART.fullmatch(text)
        if match is None:
            raise WordError(f'"{text}": no duration; write "{text}-1" for one action')
        duration = match["duration"].strip()
        if not re.fullmatch("[0-9]{1,9}", duration) or int(duration) == 0:
            raise WordError(
                f'"{text}": the duration "{duration}" is not a whole positive number of actions '
                '(latent steps); write for example "w-1"'
            )
        label = label_of(match["keys"])
        if len(labels) + int(duration) > MAX_ACTIONS:
            raise WordError(f'"{text}": the word would exceed {MAX_ACTIONS} actions; shorten it')
        labels += [label] * int(duration)
    return labels


def format_word(labels: Sequence[int] | LabelArray) -> str:
    """The word of labels (A,), equal neighbours joined: parse_word gives them back. "" for no labels."""
    parts = []
    for label, run in groupby(check_labels(labels).tolist()):
        parts.append(f"{'+'.join(keys_of(label)) or NO_OP_KEY}-{len(list(run))}")
    return ", ".join(parts)
