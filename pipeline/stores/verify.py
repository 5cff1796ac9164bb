"""Reading a whole store against its checksums: what `wcpipe verify` reports and, when asked, prepares for repair."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline import files
from pipeline.errors import DataError
from pipeline.stores.store import RECORDS, ForeignGroup, GroupStore


@dataclass(frozen=True)
class Problem:
    """One finding: `missing` (never finished), `damaged` (bytes changed or lost) or `foreign` (not of this store)."""

    kind: str
    index: int  # of the group; -1 for a file that belongs to none
    key: str
    detail: str
    path: Path | None = None  # of such a file


def verify(store: GroupStore) -> list[Problem]:
    """Check every finished group's mark and shards, and look for files that belong to nobody; reads every byte."""
    problems: list[Problem] = []
    expected = store.known_files()
    for index, mark in enumerate(store.done()):
        key = store.keys[index]
        if mark == 0:
            problems.append(Problem("missing", index, key, "not finished"))
            continue
        found = _check(store, index, int(mark))
        if found is not None:
            problems.append(found)
    for folder in (store.path / RECORDS, *(store.path / name for name in store.specs)):
        for path in folder.iterdir():
            if path not in expected and path.name != "zarr.json" and path.suffix not in (".partial", ".tmp"):
                problems.append(Problem("foreign", -1, path.name, f"{path} belongs to no group", path))
    return problems


def _check(store: GroupStore, index: int, mark: int) -> Problem | None:
    """The first thing that is wrong with a finished group: its record, then its shards against the record."""
    key = store.keys[index]
    try:
        record = store.record(index)
        if store.mark(index) != mark:
            raise store.damaged(index, "its record differs from the mark written when it was finished")
        for name, digest in store.shard_digests(index).items():
            if record["sha256"].get(name) != digest:
                store.read(index, name)  # says more where the chunk's own checksum finds it
                raise store.damaged(index, f"{name} differs from the record")
    except ForeignGroup as error:
        return Problem("foreign", index, key, str(error))
    except DataError as error:
        return Problem("damaged", index, key, str(error))
    return None


def repair(store: GroupStore, problems: list[Problem]) -> list[int]:
    """Mark damaged and foreign groups as not done and delete their files; returns their indices.

    Files that belong to no group are deleted too: a stage would never overwrite them.
    """
    indices = sorted(
        {problem.index for problem in problems if problem.kind != "missing" and problem.index >= 0}
    )
    for index in indices:
        store.invalidate(index)
    for problem in problems:
        if problem.path is not None:
            files.remove(problem.path)
    return indices
