"""Files that are either wholly there or not at all, and disk errors that say what to do.

Everything is written beside its final place and renamed: rename is atomic within a folder on local and on shared
file systems, so a killed process leaves the old file or the new one, never half of one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import DataError, StorageError

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file size limit is reached",
}
_CLOSED = {
    errno.EACCES: "no permission to write",
    errno.EROFS: "the file system is read-only",
    errno.EPERM: "not permitted",
}


@contextlib.contextmanager
def storage_errors(path: Path, finished: str = "what was finished before stays valid") -> Iterator[None]:
    """Turn a full or closed disk met while writing `path` into a StorageError that names the path and the remedy."""
    try:
        yield
    except OSError as error:
        code = error.errno or 0
        if code in _FULL:
            remedy = "free some space and run the same command again"
            raise StorageError(f"{path}: {_FULL[code]}; {finished}; {remedy}") from error
        if code in _CLOSED:
            raise StorageError(
                f"{path}: {_CLOSED[code]}; {finished}; make the folder writable or use --root"
            ) from error
        raise


def temporary_name(path: Path) -> Path:
    """A hidden sibling of `path` that nobody else uses; `remove_leftovers(path)` finds it after a kill."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


def remove_leftovers(path: Path) -> int:
    """Delete siblings of `path` that a killed writer left behind; returns how many. Only while no one else writes."""
    leftovers = list(path.parent.glob(f".{path.name}.*.tmp"))
    for leftover in leftovers:
        remove(leftover)
    return len(leftovers)


def remove(path: Path) -> None:
    """Delete a file or a folder; a folder is renamed away first, so that no half-deleted one is ever seen."""
    if path.is_dir() and not path.is_symlink():
        doomed = path if path.name.endswith(".tmp") else temporary_name(path)
        if doomed != path:
            os.replace(path, doomed)
        shutil.rmtree(doomed)
    else:
        path.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically, making its folder. Raises StorageError when the disk is full."""
    temporary = temporary_name(path)
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(content)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a mapping as readable JSON, atomically; key order is kept. NaN is refused: unknown must be said as null."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    write_bytes(path, (text + "\n").encode())


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON mapping. Raises DataError naming the file, what is wrong with it and `remedy`."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise DataError(f"{path}: is missing; {remedy}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error}); {remedy}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: holds a {type(value).__name__}, not a mapping; {remedy}")
    return value


@contextlib.contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder; when the block ends well it takes the place of `path`, otherwise it is deleted.

    Between the two renames `path` does not exist for an instant: a kill right there loses the old folder's name, not
    the contents of the new one, and the next run makes it again from its inputs.
    """
    temporary = temporary_name(path)
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path)
        temporary.mkdir()
        try:
            yield temporary
            if path.exists():
                remove(path)
            os.replace(temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock beside `path`; the kernel drops it when the process ends, however it ends.

    Guards only the moment in which a store is made or cleared. Groups are written without a lock: each has one writer.
    """
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _beside(path, "lock").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield


def _beside(path: Path, suffix: str) -> Path:
    """A hidden file for locks beside the artifact that `path` is (a part of); inside, it would be hashed with it."""
    outside = path.parent
    while outside.suffix == ".zarr":
        outside = outside.parent
    name = path.relative_to(outside).as_posix().replace("/", "-")
    return outside / f".{name}.{suffix}"


class Claims:
    """Which process works on which numbered part of `path`: locks on single bytes of one file beside it.

    The kernel drops them when the process ends, however it ends; on a shared file system they hold across nodes (NFS 4;
    Lustre mounted with `flock`). Where there are no such locks every claim succeeds: two processes that were given the
    same part then make it twice, with the same bytes.
    """

    def __init__(self, path: Path) -> None:
        with storage_errors(path):
            self._handle = _beside(path, "claims").open("w")

    def __enter__(self) -> Claims:
        return self

    def __exit__(self, *exception: object) -> None:
        self._handle.close()

    def take(self, number: int) -> bool:
        """Claim part `number`; False when another process holds it."""
        try:
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except OSError as error:
            return error.errno not in (errno.EACCES, errno.EAGAIN)
        return True

    def release(self, number: int) -> None:
        with contextlib.suppress(OSError):  # where there are no locks
            fcntl.lockf(self._handle, fcntl.LOCK_UN, 1, number)
