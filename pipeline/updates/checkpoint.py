"""A folder of safetensors files and one state.json that is either wholly there, in its old or its new form, or refused.

The reference deletes the previous resume state before it writes the new one, and restores half of what it needs; both
lose runs. Here the new folder is written beside the old one, flushed to disk, and swapped in by two renames. A kill
between the two leaves the old folder aside and the new one complete: the next read or write finishes the swap.
state.json is written last and holds the sha256 and size of every other file.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from pipeline import files
from pipeline.digests import digest_file, digest_of
from pipeline.errors import CheckpointError, DataError

FORMAT = 1
STATE = "state.json"
REMEDY = "restore the folder, or delete it and run `wcpipe update` of its epoch again"
Tensors = Mapping[str, torch.Tensor]
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U8": torch.uint8,
}


def _beside(folder: Path) -> tuple[Path, Path]:
    """(incoming, previous): hidden siblings, so that a rename never crosses a file system."""
    return folder.with_name(f".{folder.name}.incoming"), folder.with_name(f".{folder.name}.previous")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def recover(folder: Path) -> None:
    """Finish a swap that was killed between its two renames; does nothing otherwise."""
    incoming, previous = _beside(folder)
    if folder.exists() or not previous.exists():
        return
    os.replace(incoming if incoming.exists() else previous, folder)


def write_checkpoint(folder: Path, tensors: Iterable[tuple[str, Tensors]], state: Mapping[str, Any]) -> None:
    """Write `{name}.safetensors` for each group of tensors and state.json, and replace `folder` atomically.

    `tensors` may be a generator that holds one group at a time. Equal content gives equal bytes. Raises StorageError
    when the disk is full; the old folder then stays as it was.
    """
    incoming, previous = _beside(folder)
    with files.storage_errors(folder, "the previous checkpoint is untouched"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        recover(folder)
        for leftover in (incoming, previous):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            incoming.mkdir()
            about = {}
            for name, group in tensors:
                path = incoming / f"{name}.safetensors"
                _save(path, group)
                about[path.name] = {"sha256": digest_file(path), "bytes": path.stat().st_size}
            text = json.dumps(
                {"format": FORMAT, "files": about, "state": state}, indent=2, sort_keys=True, allow_nan=False
            )
            (incoming / STATE).write_text(text + "\n", encoding="utf-8")
            _sync(incoming / STATE)
            _sync(incoming)
        except BaseException:
            shutil.rmtree(incoming, ignore_errors=True)
            raise
        if folder.exists():
            os.replace(folder, previous)
        os.replace(incoming, folder)
        _sync(folder.parent)
        shutil.rmtree(previous, ignore_errors=True)


def _save(path: Path, group: Tensors) -> None:
    plain = {key: tensor.detach().cpu().contiguous() for key, tensor in group.items()}
    try:
        safetensors.torch.save_file(plain, path, {"format": "pt"})
    except safetensors.SafetensorError as error:  # it hides the errno in its text
        code = re.search(r"os error (\d+)", str(error))
        raise OSError(int(code[1]) if code else errno.EIO, str(error)) from error
    _sync(path)


def read_state(folder: Path) -> dict[str, Any]:
    """The whole of state.json. Raises CheckpointError naming what is missing or foreign."""
    recover(folder)
    path = folder / STATE
    try:
        content = files.read_json(path, REMEDY)
    except DataError as error:
        raise CheckpointError(str(error)) from error
    if content.get("format") != FORMAT or "files" not in content or "state" not in content:
        raise CheckpointError(
            f"{path}: format {content.get('format')!r} where {FORMAT} is needed: another version wrote it; {REMEDY}"
        )
    return content


def verified(folder: Path, name: str, content: Mapping[str, Any], hashed: bool = True) -> Path:
    """The path of `{name}.safetensors`, whose size and sha256 must be those of state.json.

    `hashed` False compares the size only: one process hashes for all that read the same file. Raises CheckpointError
    naming the file: missing, truncated, changed.
    """
    listed = content["files"]
    path = folder / f"{name}.safetensors"
    if path.name not in listed:
        raise CheckpointError(f"{folder / STATE}: does not list {path.name}; {REMEDY}")
    if not path.exists():
        raise CheckpointError(f"{path}: is missing; {REMEDY}")
    size, expected = path.stat().st_size, listed[path.name]["bytes"]
    if size != expected:
        raise CheckpointError(
            f"{path}: has {size} bytes where {expected} were written (truncated?); {REMEDY}"
        )
    try:
        digest = digest_file(path) if hashed else listed[path.name]["sha256"]
    except DataError as error:
        raise CheckpointError(f"{path}: cannot be read; {REMEDY}") from error
    if digest != listed[path.name]["sha256"]:
        raise CheckpointError(f"{path}: its content changed after it was written (sha256 differs); {REMEDY}")
    return path


def read_tensors(folder: Path, name: str, content: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of `{name}.safetensors`, verified. Raises CheckpointError as `verified`."""
    return safetensors.torch.load_file(verified(folder, name, content))


def read_shapes(path: Path) -> dict[str, torch.Tensor]:
    """Shapes and dtypes of a safetensors file as tensors without memory, from its header alone."""
    with _opened(path) as file:
        return {
            key: torch.empty(part.get_shape(), dtype=_DTYPES[part.get_dtype()], device="meta")
            for key, part in ((key, file.get_slice(key)) for key in file.keys())  # noqa: SIM118 (not a mapping)
        }


def each_tensor(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor, one after the other, mapped from the file: never all of a large file in memory."""
    with _opened(path) as file:
        for key in file.keys():  # noqa: SIM118 (not a mapping)
            yield key, file.get_tensor(key)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path}: is no safetensors file ({error}); {REMEDY}") from error


def check_fit(path: Path, have: Tensors, need: Tensors, partial: bool = False) -> None:
    """Raise CheckpointError naming the first key of `have` that is missing, unknown, or of another shape or dtype.

    With `partial`, keys may be missing (parameters that never had a gradient have no optimizer state).
    """
    for key in sorted({*have, *need}):
        if key not in have:
            if partial:
                continue
            raise CheckpointError(f"{path}: key {key!r} is missing: it belongs to another model; {REMEDY}")
        if key not in need:
            raise CheckpointError(f"{path}: unknown key {key!r}: it belongs to another model; {REMEDY}")
        if have[key].shape != need[key].shape or have[key].dtype != need[key].dtype:
            got, wanted = ((tuple(t.shape), str(t.dtype)) for t in (have[key], need[key]))
            raise CheckpointError(f"{path}: {key!r} is {got} where {wanted} is needed; {REMEDY}")


def checkpoint_digest(folder: Path) -> str:
    """Identity of the whole checkpoint, optimizer included, from the digests in state.json; reads no tensors."""
    return digest_of(read_state(folder)["files"])
