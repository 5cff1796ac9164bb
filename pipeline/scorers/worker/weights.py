"""Which weights measured something: one sha256 over a scorer's files, remembered, since 17 GB take a minute to read.

Both sides compute it: the stage for the identity of what it stores, the worker for what it really loaded. Standard
library only.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

_BLOCK = 1 << 22


def digest_weights(folder: Path, patterns: Sequence[str], cache: Path | None = None) -> str:
    """sha256 over names and contents of the files in `folder` that match, in any depth.

    `cache` is a JSON file that remembers digests by path, size and time of change. Raises FileNotFoundError when a
    pattern matches nothing: weights that are not there have no identity.
    """
    files: dict[str, Path] = {}
    for pattern in patterns:
        found = [path for path in folder.rglob(pattern) if path.is_file()]
        if not found:
            raise FileNotFoundError(f"{folder / pattern}: is missing")
        files |= {path.relative_to(folder).as_posix(): path for path in found}
    known = _read(cache)
    digests = {}
    for name, path in sorted(files.items()):
        about = path.stat()
        key = f"{path.resolve()}|{about.st_size}|{about.st_mtime_ns}"
        if key not in known:
            known[key] = _digest(path)
            _remember(cache, key, known[key])
        digests[name] = known[key]
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            sha.update(block)
    return sha.hexdigest()


def _read(cache: Path | None) -> dict[str, str]:
    try:
        content = json.loads(cache.read_bytes()) if cache is not None else {}
    except (OSError, ValueError):
        return {}  # it only saves time
    return content if isinstance(content, dict) else {}


def _remember(cache: Path | None, key: str, digest: str) -> None:
    if cache is None:
        return
    temporary = cache.with_name(f".{cache.name}.{os.getpid()}.tmp")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(_read(cache) | {key: digest}, indent=1))
        os.replace(temporary, cache)
    except OSError:
        temporary.unlink(missing_ok=True)  # a read-only folder: it will be computed again
