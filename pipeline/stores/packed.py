"""A store whose files hold a block of groups each: a thousand groups in a few hundred files, and still no group lost.

WHY two steps: a zarr shard is written whole, so adding groups one by one would write it again for each of them, and
waiting for the block would lose all its groups with a killed process. A finished group first goes to one file of its
own (`staged/00012.npz`: its arrays, its record and their checksums) and counts as finished from then on. When the
block is complete, its owner writes each array's shard once, then the block's records, then its marks, and deletes the
staged files. A kill anywhere leaves staged files or a marked block, never neither.

Records and marks are per group as in `GroupStore`, but several records lie in one file (`records/00003.json`), and
their sha256 are of the values of the group's arrays, since no file is the group's alone.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from pipeline import files
from pipeline.errors import DataError
from pipeline.stores.store import RECORDS, GroupStore

if TYPE_CHECKING:
    import zarr

log = logging.getLogger("wcpipe.stores")

STAGED = "staged"
_RECORD = "record.json"  # beside the arrays in a staged file; no array has this name
_UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, EOFError, zipfile.BadZipFile)


class PackedStore(GroupStore):
    """A `GroupStore` of blocks of `block` groups. `GroupStore.prepare` and `open` return one where it is needed."""

    def __init__(self, path: Path, root: zarr.Group) -> None:
        super().__init__(path, root)
        self._records: dict[int, tuple[int, list[dict[str, Any]]]] = {}  # block -> time of its file, records

    # ---------------------------------------------------------------- what is done

    def done(self) -> NDArray[np.uint32]:
        marks = super().done()
        for index in self._staged():
            if marks[index] == 0:
                marks[index] = self._mark(index)
        return marks

    def _mark(self, index: int) -> int:
        packed = super()._mark(index)
        if packed or not self._staged_path(index).exists():
            return packed
        try:
            return _crc(self._staged_record(index))
        except DataError:  # half a file: as good as none, and its group is made again
            return 0

    def mark(self, index: int) -> int:
        return _crc(self.record(index))

    # ---------------------------------------------------------------- reading and writing one group

    def write(self, index: int, arrays: Mapping[str, NDArray[Any]], record: Mapping[str, Any]) -> None:
        self._fits(arrays)
        sha256 = {name: _sha256(arrays[name]) for name in self.specs}
        own = {"key": self.keys[index], "index": index, "sha256": sha256}
        with files.storage_errors(self.path, "the groups that are finished stay valid"):
            self.invalidate(index)
            self._stage(index, arrays, {**own, **record})
            self._pack(index // self.block)

    def read(self, index: int, name: str) -> NDArray[Any]:
        if self._packed(index) or not self._staged_path(index).exists():
            return super().read(index, name)
        try:
            with np.load(self._staged_path(index)) as staged:
                return np.asarray(staged[name])
        except _UNREADABLE as error:
            raise self.damaged(index, f"{name}: {error}") from error

    def record(self, index: int) -> dict[str, Any]:
        if not self._packed(index) and self._staged_path(index).exists():
            return self._own(self._staged_record(index), index, self._staged_path(index))
        block, path = index // self.block, self.record_path(index)
        changed = path.stat().st_mtime_ns if path.exists() else -1
        if self._records.get(block, (None, []))[0] != changed:
            found = files.read_json(path, self._repair_hint()).get("groups")
            self._records[block] = (changed, found if isinstance(found, list) else [])
        at, records = index % self.block, self._records[block][1]
        if at >= len(records):
            raise DataError(f"{path}: holds no record of group {index}; {self._repair_hint()}")
        return self._own(records[at], index, path)

    def invalidate(self, index: int) -> None:
        """As in `GroupStore`; the other groups of its block that are whole are staged again first, and kept."""
        self._staged_path(index).unlink(missing_ok=True)
        members = self._members(index // self.block)
        # one read for the block: asking for each member made writing n groups cost n * n reads
        if not super().done()[members.start : members.stop].any():
            return
        for member in members:
            if member == index or self._staged_path(member).exists():
                continue
            try:
                arrays = {name: self.read(member, name) for name in self.specs}
                record = self.record(member)
            except DataError:
                continue  # damaged as well: it is made again
            if all(record["sha256"].get(name) == _sha256(array) for name, array in arrays.items()):
                self._stage(member, arrays, record)
        self._arrays["done"][members.start : members.stop] = np.zeros(len(members), np.uint32)
        for path in self._block_files(index):
            path.unlink(missing_ok=True)

    def sweep(self) -> int:
        """As in `GroupStore`; also finishes what a kill left between staging a block's last group and its last step."""
        with files.Claims(self.path) as claims:
            for block in sorted({index // self.block for index in self._staged()}):
                if not self._packed(block * self.block) and claims.take(block):
                    self._pack(block)
                    claims.release(block)
        marks = super().done()
        stale = [self._staged_path(index) for index in self._staged() if marks[index] != 0]
        temporary = list((self.path / STAGED).glob(".*.tmp"))
        for path in (*stale, *temporary):
            path.unlink(missing_ok=True)
        self._tidy()
        return super().sweep() + len(stale) + len(temporary)

    # ---------------------------------------------------------------- staging and packing

    def _stage(self, index: int, arrays: Mapping[str, NDArray[Any]], record: Mapping[str, Any]) -> None:
        buffer = io.BytesIO()
        text = np.frombuffer(json.dumps(record, allow_nan=False).encode(), np.uint8)
        np.savez(buffer, **{_RECORD: text}, **{name: arrays[name] for name in self.specs})  # type: ignore[arg-type]
        files.write_bytes(self._staged_path(index), buffer.getvalue())

    def _pack(self, block: int) -> None:
        """Write the block's shards if all its groups are staged; a damaged staged file makes its group undone."""
        members = self._members(block)
        if not all(self._staged_path(member).exists() for member in members):
            return
        records = []
        for member in members:
            try:
                records.append(self._staged_record(member))
                with np.load(self._staged_path(member)) as staged:
                    for name in self.specs:
                        staged[name]  # reads it against its checksum
            except _UNREADABLE as error:
                log.warning("%s: group %d is made again (%s)", self.path, member, error)
                self._staged_path(member).unlink(missing_ok=True)
                return
        for name in self.specs:
            values = np.stack([self.read(member, name) for member in members])
            self._arrays[name][members.start : members.stop] = values
        files.write_json(self.record_path(members.start), {"groups": records})
        marks = np.array([_crc(record) for record in records], np.uint32)
        self._arrays["done"][members.start : members.stop] = marks
        for member in members:
            self._staged_path(member).unlink(missing_ok=True)
        self._tidy()

    def _tidy(self) -> None:
        """Remove the folder of staged files once it is empty, so that finished stores have the same files."""
        try:
            os.rmdir(self.path / STAGED)
        except OSError:
            return  # not empty, or not there

    # ---------------------------------------------------------------- where a group lies

    def _members(self, block: int) -> range:
        return range(block * self.block, min((block + 1) * self.block, len(self)))

    def _packed(self, index: int) -> bool:
        return super()._mark(index) != 0

    def _staged_path(self, index: int) -> Path:
        return self.path / STAGED / f"{index:05d}.npz"

    def _staged(self) -> list[int]:
        return sorted(int(path.stem) for path in (self.path / STAGED).glob("[0-9]*.npz"))

    def _staged_record(self, index: int) -> dict[str, Any]:
        try:
            with np.load(self._staged_path(index)) as staged:
                record = json.loads(staged[_RECORD].tobytes())
        except _UNREADABLE as error:
            raise self.damaged(index, f"{self._staged_path(index).name}: {error}") from error
        return dict(record)

    def _block_files(self, index: int) -> list[Path]:
        return [*(self.array_path(index, name) for name in self.specs), self.record_path(index)]

    def record_path(self, index: int) -> Path:
        """The file of the records of the group's block."""
        return self.path / RECORDS / f"{index // self.block:05d}.json"

    def array_path(self, index: int, name: str) -> Path:
        """The one file of the group's block in array `name`."""
        return super().array_path(index // self.block, name)

    def group_files(self, index: int) -> list[Path]:
        if not self._packed(index) and self._staged_path(index).exists():
            return [self._staged_path(index)]
        return self._block_files(index)

    def known_files(self) -> set[Path]:
        return {path for first in range(0, len(self), self.block) for path in self._block_files(first)}

    def shard_digests(self, index: int) -> dict[str, str]:
        """sha256 of the values of each array of this group. Raises DataError when one cannot be read."""
        if self._packed(index):
            for path in self._block_files(index):
                if not path.exists():  # zarr would read it as zeros
                    raise self.damaged(index, f"{path.relative_to(self.path)} is missing")
        return {name: _sha256(self.read(index, name)) for name in self.specs}


def _sha256(array: NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def _crc(record: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> int:
    text = json.dumps(dict(record), sort_keys=True, ensure_ascii=True)
    return google_crc32c.value(text.encode()) or 1
