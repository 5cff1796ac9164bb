"""Which groups one process takes, and how many groups share one file.

WHY: the unit that a process writes is a zarr shard, and two writers in one shard lose data without any error (spec
cluster C: 22 of 64 items). So a part of the work is a contiguous run of whole shards, and anything else is refused.
Up to 64 groups each group is a shard of its own: that is the scale of the papers, and 64 tasks can share it. Larger
epochs put several groups into one shard, so that the number of files stays bounded, whatever the number of groups:
shared file systems and DVC are slow on many small files.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import UsageError

SINGLE = 64  # up to this many groups, each is a shard of its own
BLOCKS = 48  # beyond it, a store has at most this many shards


def block_size(groups: int) -> int:
    """Groups in one zarr shard of a store of `groups` groups: 1 up to 64 groups, 21 for a thousand."""
    return 1 if groups <= SINGLE else -(-groups // BLOCKS)


@dataclass(frozen=True)
class Shard:
    """Part `index` (from 1) of `count`, or the groups `only` = (first, end). Any split gives identical groups."""

    index: int = 1
    count: int = 1
    only: tuple[int, int] | None = None

    def part(self, groups: int, block: int = 1) -> range:
        """The contiguous groups of this part: whole blocks of `block` groups, so that no other part shares a file.

        Raises UsageError when `only` cuts through a block or reaches beyond the store.
        """
        if self.only is None:
            blocks = -(-groups // block)
            first, end = ((self.index + step) * blocks // self.count * block for step in (-1, 0))
            return range(min(first, groups), min(end, groups))
        first, end = self.only
        if end > groups:
            raise UsageError(f"--shard {first}:{end}: there are {groups} groups, 0:{groups}")
        if first % block or (end % block and end != groups):
            whole = f"{first // block * block}:{min(-(-end // block) * block, groups)}"
            raise UsageError(
                f"--shard {first}:{end} would share a zarr shard of {block} groups with another task: write {whole}"
            )
        return range(first, end)

    @property
    def alone(self) -> bool:
        return self.count == 1 and self.only is None
