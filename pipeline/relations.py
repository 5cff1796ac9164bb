"""Words that end at the same pose by different ways: their last frames must look alike.

WHY: retracing cycles alone reward a model that plays its past frames backwards. Two words that lead to one pose by ways
that share no pose in between cannot be satisfied that way (spec/worldcycle.md 1.7, 5 E1). No relation is assumed from
algebra, which is wrong for most words with turns: poses are computed, hashed, and every collision is a relation.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from typing import Literal

import numpy as np

from pipeline.actions import check_labels, inverse
from pipeline.camera import PoseArray, StepSize, poses_from_labels
from pipeline.closed_words import full_turn
from pipeline.cycles import CLOSURE_TOLERANCE
from pipeline.errors import WordError

Kind = Literal["equivalent", "commuting", "closure"]
Word = tuple[int, ...]
PoseKey = tuple[int, ...]

# Poses of one lattice differ by rounding (1e-12) or by far more than this. The odd offset keeps the common values of a
# lattice away from the borders of the hash's cells, where rounding would split equal poses.
_CELL = 1e-6
_OFFSET = 0.318309886


@dataclass(frozen=True)
class Relation:
    """Two words with one end pose. `closure`: the second is empty, so the end frame is compared with the first frame.

    `commuting`: the same runs of keys in another order; `equivalent`: any other pair.
    """

    first: Word
    second: Word
    kind: Kind


def pose_key(c2w_44: PoseArray) -> PoseKey:
    """Hashable form of a pose: equal for poses that differ by rounding only."""
    return tuple(np.floor(c2w_44[:3].ravel() / _CELL + _OFFSET).astype(np.int64).tolist())


def find_relations(words: Iterable[Sequence[int]], step: StepSize) -> list[Relation]:
    """All relations among words, and of each with the empty word, in the order of the words.

    Left out are pairs that a copy of past frames could satisfy or that prove nothing: equal words, and ways that share
    a pose between start and end. Raises WordError for a label outside 0..80.
    """
    ways: dict[Word, PoseArray] = {}
    for given in words:
        word = tuple(check_labels(list(given)).tolist())
        if word and word not in ways:
            ways[word] = poses_from_labels(word, step)
    inside = {word: {pose_key(pose) for pose in path[1:-1]} for word, path in ways.items()}
    start = pose_key(np.eye(4))
    found: list[Relation] = []
    by_end: dict[PoseKey, list[Word]] = defaultdict(list)
    for word, path in ways.items():
        by_end[pose_key(path[-1])].append(word)
    for end, group in by_end.items():
        if end == start:
            # A loop must not visit a pose twice: then it is not a retracing cycle in disguise.
            found += [
                Relation(word, (), "closure")
                for word in group
                if start not in inside[word] and len(inside[word]) == len(word) - 1 > 0
                if np.abs(ways[word][-1] - np.eye(4)).max() < CLOSURE_TOLERANCE
            ]
            continue
        found += [
            Relation(one, other, "commuting" if _same_runs(one, other) else "equivalent")
            for one, other in combinations(group, 2)
            if inside[one].isdisjoint(inside[other])
            and inside[one].isdisjoint((start, end))
            and inside[other].isdisjoint((start, end))
            and np.abs(ways[one][-1] - ways[other][-1]).max() < CLOSURE_TOLERANCE
        ]
    return found


def _runs(word: Word) -> list[Word]:
    return [tuple(run) for _, run in groupby(word)]


def _same_runs(one: Word, other: Word) -> bool:
    return sorted(_runs(one)) == sorted(_runs(other))


def sample_relations(
    rng: np.random.Generator,
    step: StepSize,
    *,
    actions: int,
    keys: Sequence[int],
    hold: tuple[int, int] = (1, 4),
    words: int = 400,
) -> list[Relation]:
    """Relations among random words of exactly `actions` actions: runs of `keys` (labels), each held for `hold` actions.

    Loops, which chance hardly finds, are made of two ways of half the length that meet: out on one, back on the other;
    a full turn is added where it fits exactly. May be empty: not every set of keys has relations. Raises WordError for
    impossible numbers.
    """
    shortest, longest = hold
    if actions < 1 or not 1 <= shortest <= longest or not keys or words < 1:
        raise WordError(
            "relations need actions, keys, words and a hold of at least 1, shortest before longest"
        )
    pool = _random_words(rng, actions, keys, hold, words)
    if actions >= 4 and actions % 2 == 0:
        ways = find_relations(_random_words(rng, actions // 2, keys, hold, words), step)
        # Opposite keys do not undo a compound step; find_relations drops the loops that are none.
        pool += [(*r.first, *inverse(np.array(r.second[::-1])).tolist()) for r in ways if r.second]
    pool += [turn for key in ("right", "left") for turn in _full_turns(step, key) if len(turn) == actions]
    return find_relations(pool, step)


def _random_words(
    rng: np.random.Generator, actions: int, keys: Sequence[int], hold: tuple[int, int], words: int
) -> list[Word]:
    """Random runs of keys, every word with one shuffle of its runs: chance alone finds few commuting pairs."""
    shortest, longest = hold
    pool: list[Word] = []
    for _ in range(words):
        runs: list[Word] = []
        left = actions
        while left:
            length = min(left, shortest + int(rng.random() * (longest - shortest + 1)))
            runs.append((int(keys[int(rng.random() * len(keys))]),) * length)
            left -= length
        shuffled = sorted(runs, key=lambda _: rng.random())
        pool += [tuple(label for run in order for label in run) for order in (runs, shuffled)]
    return pool


def _full_turns(step: StepSize, key: str) -> list[Word]:
    try:
        return [full_turn(step, key)]
    except WordError:
        return []  # this step's angle does not divide 360 degrees: there is none to add
