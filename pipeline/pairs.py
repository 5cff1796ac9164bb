"""Which frames of a video must show the same view, as numbers that travel with a group.

WHY a record and not the word: the score stage measures pairs and the advantage stage judges them, and neither draws
words again. So the prefix stage, which made the word, writes down the pairs that end in the target clip, and everything
later reads them (DESIGN 6.7). Frames count from the video's first one; `REFERENCE` stands for a frame of another video,
the end of a second word that leads to the same pose (`relations.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.cycles import ClosedWord
from pipeline.errors import DataError

IndexArray = npt.NDArray[np.int64]
KINDS = ("spatial", "temporal", "relation")
REFERENCE = -1


@dataclass(frozen=True)
class FramePairs:
    """`index_Q2` (earlier, later) frames and `kind_Q`, each pair's place in KINDS.

    spatial: the way out and the way back, the end of a loop, no-ops at the end. temporal: a later cycle and the first.
    relation: the reference and the last frame.
    """

    index_Q2: IndexArray
    kind_Q: IndexArray

    def __post_init__(self) -> None:
        later, kinds = self.index_Q2[:, 1:], self.kind_Q
        if self.index_Q2.shape != (len(kinds), 2) or (self.index_Q2[:, :1] >= later).any():
            raise DataError("pairs of frames must be (Q, 2), the earlier frame first, with one kind each")
        if ((kinds < 0) | (kinds >= len(KINDS))).any() or (self.index_Q2 < REFERENCE).any():
            raise DataError(f"a pair has no kind of {', '.join(KINDS)}, or a frame below {REFERENCE}")

    def __len__(self) -> int:
        return len(self.kind_Q)

    def of(self, kind: str) -> IndexArray:
        """The places (in this list) of the pairs of one kind."""
        return np.flatnonzero(self.kind_Q == KINDS.index(kind))

    def ending_in(self, frames: slice) -> FramePairs:
        """Those whose later frame lies in `frames` (with start and stop)."""
        later = self.index_Q2[:, 1]
        kept = (later >= frames.start) & (later < frames.stop)
        return FramePairs(self.index_Q2[kept], self.kind_Q[kept])

    def to_json(self) -> list[list[Any]]:
        """[[earlier, later, "spatial"], ...], for a group's record."""
        return [
            [int(i), int(j), KINDS[k]] for (i, j), k in zip(self.index_Q2, self.kind_Q.tolist(), strict=True)
        ]

    @staticmethod
    def from_json(rows: Iterable[Sequence[Any]]) -> FramePairs:
        """The inverse of `to_json`. Raises DataError for an unknown kind."""
        listed = list(rows)
        unknown = {row[2] for row in listed} - set(KINDS)
        if unknown:
            raise DataError(f"a pair of frames is of kind {min(unknown)!r}: known are {', '.join(KINDS)}")
        index = np.array([row[:2] for row in listed], np.int64).reshape(-1, 2)
        return FramePairs(index, np.array([KINDS.index(row[2]) for row in listed], np.int64))

    @staticmethod
    def of_word(word: ClosedWord, stride: int) -> FramePairs:
        """All pairs of a closed word, in frames of `stride` a latent; ordered by their later frame."""
        ends = [cycle.end for cycle in word.cycles if not cycle.retracing]
        loops = np.array([(0, stride * end) for end in ends], np.int64).reshape(-1, 2)
        spatial = np.concatenate([word.mirror_pairs(stride), loops, word.idle_pairs(stride)])
        temporal = word.repeat_pairs(stride)
        index = np.concatenate([spatial, temporal])
        kind = np.repeat(np.arange(2), [len(spatial), len(temporal)])
        order = np.lexsort((kind, index[:, 0], index[:, 1]))
        return FramePairs(index[order], kind[order])

    @staticmethod
    def to_reference(last_frame: int) -> FramePairs:
        """The one pair of a relation: the reference and the last frame."""
        return FramePairs(np.array([[REFERENCE, last_frame]]), np.array([KINDS.index("relation")]))
