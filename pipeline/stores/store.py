"""A store: a zarr v3 folder with one shard a group, a JSON record a group, and a `done` mark written last.

Three rules make a killed, sharded or repeated run give the same bytes (spec cluster C):

* One writer a group. A writer owns whole shards, so no two processes ever touch one file.
* A group is finished when `done[group]` says so, and nothing else proves it. Its record holds the sha256 of each of
  its shard files; the mark is the crc32c of the record, written last. 0 means not done (a checksum of 0 is stored
  as 1). The mark is not the crc32c of the shards themselves: zarr ends a chunk with its own crc32c, and a crc over
  data and its crc is the same number for all data.
* A store belongs to its inputs. They stand in its attributes; when they are the same the store resumes, when they are
  not it is cleared, and a line says what changed. DVC's `persist: true` does not check this, so the store does.

No clock, host name or job id is written, so equal inputs give equal bytes. Records are plain JSON files under
`records/` that a person can open; zarr readers see only the arrays.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google_crc32c
import numcodecs.blosc
import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import BloscCodec, Crc32cCodec

from pipeline import files
from pipeline.digests import digest_file, digest_of, input_changes
from pipeline.errors import DataError
from pipeline.stores.schema import ArraySpec, to_tensor
from pipeline.stores.sharding import Shard

if TYPE_CHECKING:
    import torch

log = logging.getLogger("wcpipe.stores")

FORMAT = 1
RECORDS = "records"
# blosc's threads append blocks in the order in which they finish: equal data, unequal bytes. One thread is exact.
numcodecs.blosc.use_threads = False


class ForeignGroup(DataError):
    """A group's record is that of another group."""


class GroupStore:
    """Arrays `[group, ...]` of one stage and epoch. Make or resume one with `prepare`, read one with `open`."""

    def __init__(self, path: Path, root: zarr.Group) -> None:
        self.path = path
        self._root = root
        about = root.attrs["wcpipe"]
        assert isinstance(about, dict)
        self.about: dict[str, Any] = about
        self.specs = {spec.name: spec for spec in map(ArraySpec.from_json, about["arrays"])}
        self.keys: list[str] = list(about["keys"])
        self.block = int(about.get("block", 1))
        self._arrays = {name: self._array(name) for name in (*self.specs, "done")}

    # ---------------------------------------------------------------- making and opening

    @classmethod
    def prepare(
        cls,
        path: Path,
        *,
        kind: str,
        arrays: Sequence[ArraySpec],
        keys: Sequence[str],
        inputs: Mapping[str, Any],
        block: int = 1,
    ) -> GroupStore:
        """Open the store at `path` if it was made from these inputs; otherwise clear it and make it anew, empty.

        kind     what the groups are ("rollouts"); part of the identity
        keys     one key a group, in order
        block    groups that share one file an array (`sharding.block_size`); above 1 it is a `PackedStore`
        inputs   everything that the contents follow from (parameters, digests of upstream artifacts); kept in the
                 attributes, so an artifact says what it was made with
        Raises StorageError when the disk is full, DataError when two groups have one key.
        """
        if len(set(keys)) != len(keys):
            raise DataError(
                f"{path}: two groups have the same key; draw other words or scenes (prefix.groups, seed)"
            )
        about = {
            "format": FORMAT,
            "kind": kind,
            "arrays": [spec.to_json() for spec in arrays],
            "keys": list(keys),
            "inputs": json.loads(json.dumps(inputs)),
        }
        if block > 1:  # absent otherwise: stores of single groups keep the identity that they always had
            about["block"] = block
        about["input_digest"] = digest_of(about)
        with files.locked(path), files.storage_errors(path):
            files.remove_leftovers(path)
            if path.exists() and not cls._belongs(path, about):
                files.remove(path)
            if not path.exists():
                temporary = files.temporary_name(path)
                _create(temporary, about, arrays)
                os.replace(temporary, path)
        return cls.open(path)

    @classmethod
    def open(cls, path: Path, remedy: str = "run the stage that writes it") -> GroupStore:
        """Open an existing store. Raises DataError when it is missing, not a store of this format, or unreadable."""
        if not (path / "zarr.json").exists():
            raise DataError(f"{path}: is missing; {remedy}")
        from pipeline.stores.packed import PackedStore  # a subclass: imported late, there is no cycle

        try:
            root = zarr.open_group(path, mode="r+", zarr_format=3, use_consolidated=False)
            about = root.attrs["wcpipe"]
            assert isinstance(about, dict)
            store = (PackedStore if about.get("block", 1) != 1 else GroupStore)(path, root)
        except (ValueError, KeyError, TypeError, AssertionError, OSError) as error:
            raise DataError(
                f"{path}: is not a wcpipe store or its zarr.json is damaged; delete it and {remedy}"
            ) from error
        if store.about.get("format") != FORMAT:
            raise DataError(
                f"{path}: has store format {store.about.get('format')}, this version writes {FORMAT}; {remedy}"
            )
        return store

    @classmethod
    def _belongs(cls, path: Path, about: Mapping[str, Any]) -> bool:
        try:
            found = cls.open(path).about
        except DataError as error:
            log.warning("%s; starting it over", error)
            return False
        if found["input_digest"] == about["input_digest"]:
            return True
        changes = input_changes(found["inputs"], about["inputs"]) or ["its groups or arrays"]
        more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
        log.warning(
            "%s was made from other inputs (%s%s): starting it over", path, "; ".join(changes[:3]), more
        )
        return False

    def _array(self, name: str) -> zarr.Array[Any]:
        array = self._root[name]
        assert isinstance(array, zarr.Array)
        # otherwise an all-zero group leaves no file, and a lost file would read as zeros
        return array if name == "done" else array.with_config({"write_empty_chunks": True})

    # ---------------------------------------------------------------- what is done

    def __len__(self) -> int:
        return len(self.keys)

    def done(self) -> NDArray[np.uint32]:
        """`done_P`: the mark of each finished group, 0 where it is not finished."""
        try:
            return np.asarray(self._arrays["done"][:], dtype=np.uint32)
        except ValueError as error:
            raise DataError(
                f"{self.path}/done: is damaged ({error}); delete that folder, the stage makes it again"
            ) from error

    def _mark(self, index: int) -> int:
        return int(np.asarray(self._arrays["done"][index]))

    def pending(self, shard: Shard = Shard()) -> list[int]:
        """Indices of this shard's groups that are still to be made."""
        done = self.done()
        return [index for index in shard.part(len(self), self.block) if done[index] == 0]

    def take(
        self, indices: Sequence[int], idle: Callable[[], None] = lambda: None, again: Collection[int] = ()
    ) -> Iterator[int]:
        """Yield each of `indices` that is still to be made, while this process alone holds it.

        Two processes that were given the same part share the work instead of doing it twice: what another one is making
        comes last, and when that one has finished or died. `idle` is called while waiting (it may raise, to stop);
        groups in `again` are yielded although they are finished.
        """
        blocks: dict[int, list[int]] = {}
        for index in indices:
            blocks.setdefault(index // self.block, []).append(index)
        with files.Claims(self.path) as claims:
            waiting = list(blocks)
            while waiting:
                held_elsewhere = []
                for number in waiting:
                    if not claims.take(number):
                        held_elsewhere.append(number)
                        continue
                    for index in blocks[number]:
                        if index in again or self._mark(index) == 0:
                            yield index
                    claims.release(number)
                if held_elsewhere == waiting:
                    idle()
                    time.sleep(0.1)
                waiting = held_elsewhere

    def require_complete(self, remedy: str) -> GroupStore:
        """This store, if every group is finished; otherwise DataError with the counts and `remedy`."""
        missing = self.pending()
        if missing:
            raise DataError(f"{self.path}: {len(missing)} of {len(self)} groups are not finished; {remedy}")
        return self

    def content_digest(self) -> str:
        """Identity of inputs and contents, for the inputs of the next stage; needs a complete store."""
        self.require_complete("finish that stage first")
        records = [digest_file(self.record_path(index)) for index in range(len(self))]
        return digest_of([self.about["input_digest"], records])

    # ---------------------------------------------------------------- reading and writing one group

    def write(self, index: int, arrays: Mapping[str, NDArray[Any]], record: Mapping[str, Any]) -> None:
        """Write one group and mark it done. Only its owner calls this; a group that was there before is replaced.

        record   JSON; `key`, `index` and `sha256` (of the shards) are added. NaN is refused (unknown is null).
        Raises StorageError when the disk is full: the group is then not done, all others stay valid.
        """
        self._fits(arrays)
        with files.storage_errors(self.path, "the groups that are finished stay valid"):
            self.invalidate(index)
            for name in self.specs:
                self._arrays[name][index] = arrays[name]
            own = {"key": self.keys[index], "index": index, "sha256": self.shard_digests(index)}
            files.write_json(self.record_path(index), {**own, **record})
            self._arrays["done"][index] = self.mark(index)

    def _fits(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        if set(arrays) != set(self.specs):
            raise ValueError(f"{self.path}: expected the arrays {sorted(self.specs)}, got {sorted(arrays)}")
        for name, spec in self.specs.items():
            if arrays[name].shape != spec.shape or arrays[name].dtype != spec.stored_dtype:
                got = f"{arrays[name].dtype}{arrays[name].shape}"
                raise ValueError(f"{self.path}: {name} must be {spec.stored_dtype}{spec.shape}, got {got}")

    def read(self, index: int, name: str) -> NDArray[Any]:
        """One array of one finished group, shape `specs[name].shape`. Raises DataError when undone or damaged."""
        if self._mark(index) == 0:
            raise DataError(
                f"{self.path}: group {index} ({self.keys[index]}) is not finished; run its stage again"
            )
        try:
            return np.asarray(self._arrays[name][index])
        except (ValueError, RuntimeError, OSError) as error:
            raise self.damaged(index, f"{name}: {error}") from error

    def read_tensor(self, index: int, name: str) -> torch.Tensor:
        """Like `read`, as a CPU tensor in the array's own dtype (bfloat16 restored from its bits)."""
        return to_tensor(self.read(index, name), self.specs[name].dtype)

    def record(self, index: int) -> dict[str, Any]:
        """The JSON record of one group. Raises DataError when it is missing, damaged or of another group."""
        path = self.record_path(index)
        return self._own(files.read_json(path, self._repair_hint()), index, path)

    def _own(self, record: dict[str, Any], index: int, path: Path) -> dict[str, Any]:
        if record.get("key") != self.keys[index] or record.get("index") != index:
            other = f"group {record.get('key')}, not {self.keys[index]}"
            raise ForeignGroup(f"{path}: belongs to {other}; {self._repair_hint()}")
        return record

    def invalidate(self, index: int) -> None:
        """Mark a group as not done and delete its files, so that its stage makes it again from nothing."""
        if self._mark(index) != 0:
            self._arrays["done"][index] = 0
        for path in self.group_files(index):
            path.unlink(missing_ok=True)

    def sweep(self) -> int:
        """Delete `*.partial` files of killed writers (DVC would hash them), while nobody writes; returns how many."""
        partial = list(self.path.rglob("*.partial"))
        for path in partial:
            path.unlink(missing_ok=True)
        leftovers = list((self.path / RECORDS).glob(".*.tmp"))
        for path in leftovers:
            path.unlink(missing_ok=True)
        return len(partial) + len(leftovers)

    # ---------------------------------------------------------------- where a group lies

    def record_path(self, index: int) -> Path:
        return self.path / RECORDS / f"{index:05d}.json"

    def array_path(self, index: int, name: str) -> Path:
        """The one file of the group in array `name`."""
        array = self._arrays[name]
        key = array.metadata.encode_chunk_key((index, *([0] * (array.ndim - 1))))
        return self.path / name / key

    def group_files(self, index: int) -> list[Path]:
        """The files that hold this group."""
        return [*(self.array_path(index, name) for name in self.specs), self.record_path(index)]

    def known_files(self) -> set[Path]:
        """Every file that a group of this store may have."""
        return {path for index in range(len(self)) for path in self.group_files(index)}

    def shard_digests(self, index: int) -> dict[str, str]:
        """sha256 of each array's file of this group. Raises DataError when one is missing."""
        digests = {}
        for name in self.specs:
            path = self.array_path(index, name)
            if not path.exists():
                raise self.damaged(index, f"{path.relative_to(self.path)} is missing")
            digests[name] = digest_file(path)
        return digests

    def mark(self, index: int) -> int:
        """crc32c of the group's record, which holds the digests of its shards; never 0."""
        return google_crc32c.value(self.record_path(index).read_bytes()) or 1

    def _repair_hint(self) -> str:
        return f"run `wcpipe verify --repair {self.path}`, then its stage again (only that group is redone)"

    def damaged(self, index: int, detail: str) -> DataError:
        """The error that names the store, the group, what is wrong with it and the remedy."""
        return DataError(
            f"{self.path}: group {index} ({self.keys[index]}) is damaged ({detail}); {self._repair_hint()}"
        )


def _create(path: Path, about: Mapping[str, Any], arrays: Sequence[ArraySpec]) -> None:
    root = zarr.create_group(path, zarr_format=3, attributes={"wcpipe": dict(about)})
    groups, block = len(about["keys"]), about.get("block", 1)
    for spec in arrays:
        root.create_array(
            spec.name,
            shape=(groups, *spec.shape),
            dtype=spec.stored_dtype,
            chunks=spec.chunks(),
            shards=spec.shards(block),
            compressors=[
                *([BloscCodec(cname="lz4", clevel=5, shuffle="noshuffle")] if spec.compressed else []),
                Crc32cCodec(),
            ],
            chunk_key_encoding={"name": "default", "separator": "."},
            fill_value=0,
            attributes={"dtype": spec.dtype},
        )
    root.create_array(
        "done",
        shape=(groups,),
        dtype="uint32",
        chunks=(block,),
        compressors=[Crc32cCodec()],
        chunk_key_encoding={"name": "default", "separator": "."},
        fill_value=0,
    )
    (path / RECORDS).mkdir()
