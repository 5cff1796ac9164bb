"""Which rank trains which samples of which optimizer step: pure arithmetic that every rank does for itself.

The samples of an epoch, in group order, are cut into optimizer steps, and each step's samples into one contiguous share
a rank. So the number of ranks changes neither what a step is the mean of nor the order of steps; and because a share is
contiguous, few contexts have to be built twice. Left-over samples are spread over the steps (6 samples at 4 a step are
3 + 3), where the reference throws them away.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Some samples (`rows`) of one group."""

    group: int
    rows: range


Share = list[Piece]


def spread(samples: int, per_step: int) -> list[int]:
    """Samples of each optimizer step: ceil(samples / per_step) steps of nearly equal size."""
    return _even(samples, -(-samples // per_step))


def plan(sizes: Sequence[int], per_step: int, ranks: int) -> list[list[Share]]:
    """`plan[step][rank]` for groups of these sizes; a share is empty where a step has fewer samples than ranks."""
    cursor = _Cursor(sizes)
    return [
        [cursor.take(count) for count in _even(samples, ranks)] for samples in spread(sum(sizes), per_step)
    ]


def straddlers(steps: Sequence[Sequence[Share]], rank: int) -> dict[int, int]:
    """step -> the group that another rank begins in that step and this rank goes on with in a later one.

    At most one a step: only the last group of a step goes on. Its context belongs to the step in which it begins, in
    case the behaviour policy moves with every step.
    """
    begins: dict[int, int] = {}
    for step, shares in enumerate(steps):
        for piece in (piece for share in shares for piece in share):
            begins.setdefault(piece.group, step)
    mine = [(step, piece.group) for step, shares in enumerate(steps) for piece in shares[rank]]
    return {begins[group]: group for _, group in mine if (begins[group], group) not in mine}


def _even(total: int, parts: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]


class _Cursor:
    """Walks through the samples of all groups."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes, self.group, self.row = sizes, 0, 0

    def take(self, count: int) -> Share:
        share = []
        while count:
            last = min(self.sizes[self.group], self.row + count)
            if last > self.row:
                share.append(Piece(self.group, range(self.row, last)))
                count, self.row = count - (last - self.row), last
            if self.row == self.sizes[self.group] and count:
                self.group, self.row = self.group + 1, 0
        return share
