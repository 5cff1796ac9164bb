"""Reading a whole store against its checksums: what `wcpipe verify` reports and, when asked, prepares for repair."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import DataError
from pipeline.stores.store import RECORDS, GroupStore


@dataclass(frozen=True)
class Problem:
    """One finding: `missing` (never finished), `damaged` (bytes changed or lost) or `foreign` (not of this store)."""

    kind: str
    index: int
    key: str
    detail: str


def verify(store: GroupStore) -> list[Problem]:
    """Recompute every finished group's checksum, decode every chunk and look for files that belong to nobody."""
    problems: list[Problem] = []
    expected = {path for index in range(len(store)) for path in store.group_files(index)}
    for index, mark in enumerate(store.done()):
        key = store.keys[index]
        if mark == 0:
            problems.append(Problem("missing", index, key, "not finished"))
            continue
        try:
            if store.record(index).get("index") != index:
                raise DataError("the record is of another group")
        except DataError as error:
            kind = (
                "foreign" if "belongs to group" in str(error) or "another group" in str(error) else "damaged"
            )
            problems.append(Problem(kind, index, key, str(error)))
            continue
        try:
            if store.checksum(index) != int(mark):
                for name in store.specs:  # the chunk's own checksum tells which array it is
                    store.read(index, name)
                raise DataError("checksum differs from the mark written when it was finished")
        except DataError as error:
            problems.append(Problem("damaged", index, key, str(error)))
    for folder in (store.path / RECORDS, *(store.path / name for name in store.specs)):
        for path in folder.iterdir():
            if path not in expected and path.name != "zarr.json" and path.suffix not in (".partial", ".tmp"):
                problems.append(Problem("foreign", -1, path.name, f"{path} belongs to no group"))
    return problems


def repair(store: GroupStore, problems: list[Problem]) -> list[int]:
    """Mark damaged and foreign groups as not done (their files are deleted); returns their indices."""
    indices = sorted(
        {problem.index for problem in problems if problem.kind != "missing" and problem.index >= 0}
    )
    for index in indices:
        store.invalidate(index)
    return indices
