"""Canonical sha256 digests: the only identity that artifacts, policies and parameters have.

A digest must be the same on every machine and in every run, so numbers are written the shortest way that reads back
exactly (Python's repr), keys are sorted, and nothing about files enters it but their relative name and their bytes.
An integral float equals the integer (5 and 5.0 in params.yaml mean the same).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import DataError

if TYPE_CHECKING:
    import torch

SHORT = 16  # hex digits that are enough to show to a person and to tell any two groups apart
_BLOCK = 1 << 20


def _plain(value: Any) -> Any:
    """Reduce `value` to JSON types with one spelling each; refuse what has no canonical form (NaN, sets, objects)."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"cannot digest the non-finite number {value!r}")
        return int(value) if value.is_integer() and abs(value) < 2**53 else float(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy scalars and small arrays
        return _plain(value.tolist())
    raise TypeError(f"cannot digest a {type(value).__name__}: {value!r}")


def canonical_json(value: Any) -> str:
    """One spelling for equal values: sorted keys, no spaces, ASCII only."""
    return json.dumps(
        _plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def digest_of(value: Any) -> str:
    """sha256 (64 hex digits) of a nested value of numbers, strings, lists and mappings."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def digest_file(path: Path) -> str:
    """sha256 of a file's bytes. Raises DataError when it cannot be read."""
    sha = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                sha.update(block)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); re-run the stage that makes it"
        ) from error
    return sha.hexdigest()


def digest_tree(folder: Path, patterns: Iterable[str] = ("*",)) -> str:
    """sha256 over the relative names and contents of the files below `folder` that match one of `patterns`.

    Raises DataError when nothing matches: a digest of nothing would make every empty folder look the same.
    """
    names = sorted(
        {
            path.relative_to(folder).as_posix()
            for pattern in patterns
            for path in folder.rglob(pattern)
            if path.is_file()
        }
    )
    if not names:
        raise DataError(f"{folder}: holds no file like {', '.join(patterns)}; re-run the stage that makes it")
    return digest_of([[name, digest_file(folder / name)] for name in names])


def digest_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """sha256 over names, dtypes, shapes and raw bytes of tensors, in name order; independent of the device."""
    import torch

    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        sha.update(canonical_json([name, str(tensor.dtype), list(tensor.shape)]).encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def input_changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What differs between two nested inputs, as lines like `params.rollout.steps: 5 -> 6` (digests shortened)."""
    lines: list[str] = []
    for key in sorted({*old, *new}):
        name = f"{prefix}{key}"
        before, after = old.get(key, "absent"), new.get(key, "absent")
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += input_changes(before, after, f"{name}.")
        elif _plain(before) != _plain(after):
            lines.append(f"{name}: {_shown(before)} -> {_shown(after)}")
    return lines


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else canonical_json(value)
    return text if len(text) <= 40 else f"{text[:12]}…"
