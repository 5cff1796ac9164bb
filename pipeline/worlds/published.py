"""Published checkpoint files, opened without reading their weights: names and shapes at once, one tensor at a time.

The 5B comes as a pickled envelope of about 40 GB, the 8B as safetensors. Both are mapped into memory, so that only the
pages of the tensor in hand are read, and pickles are opened with `weights_only`: a file from the net never runs code.
"""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pipeline.errors import CheckpointError
from pipeline.worlds.import_keys import plain_name

PICKLES = (".pt", ".pth", ".bin", ".ckpt")


class Published:
    """Tensors of one published network by plain name (wrapper prefixes removed)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._read: dict[str, Callable[[], torch.Tensor]] = {}

    def add(self, name: str, shape: tuple[int, ...], read: Callable[[], torch.Tensor]) -> None:
        """Raises CheckpointError when two published names mean the same tensor."""
        plain = plain_name(name)
        if plain in self.shapes:
            raise CheckpointError(f"{self.path}: {plain!r} is in it twice (once as {name!r}); copy it again")
        self.shapes[plain], self._read[plain] = shape, read

    def get(self, name: str) -> torch.Tensor:
        """One tensor, mapped where possible."""
        return self._read[name]()


def open_published(source: Path, part: str = "generator") -> Published:
    """Open a published file, or a folder that holds one (safetensors shards, or a single pickle).

    `part` is the entry of an envelope to take. Raises CheckpointError when there is no such file or entry, or it is
    damaged or holds anything but tensors.
    """
    found = Published(source)
    for path in _files(source):
        if path.suffix in PICKLES:
            _add_pickle(found, path, part)
        else:
            _add_safetensors(found, path)
    return found


def _files(source: Path) -> list[Path]:
    if source.is_file():
        if source.suffix not in (*PICKLES, ".safetensors"):
            raise CheckpointError(
                f"{source}: neither *.safetensors nor a PyTorch file; give the published weights"
            )
        return [source]
    if not source.is_dir():
        raise CheckpointError(f"{source}: missing; give the published file or the folder that holds it")
    for index in sorted(source.glob("*.safetensors.index.json")):
        try:
            listed = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index}: not an index of shards; copy it again") from error
        return [source / name for name in listed]
    shards = sorted(source.glob("*.safetensors"))
    pickles = [path for path in sorted(source.iterdir()) if path.suffix in PICKLES]
    if not shards and len(pickles) != 1:
        names = ", ".join(path.name for path in pickles) or "nothing"
        raise CheckpointError(
            f"{source}: needs *.safetensors or one PyTorch file, found {names}; name the file itself"
        )
    return shards or pickles


def _add_safetensors(found: Published, path: Path) -> None:
    try:
        handle = safe_open(path, framework="pt")
        for name in handle.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
            shape = tuple(handle.get_slice(name).get_shape())
            found.add(name, shape, lambda name=name: handle.get_tensor(name))  # type: ignore[misc]
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing, although the index names it; copy it again") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path}: truncated or damaged ({error}); copy it again") from error


def _add_pickle(found: Published, path: Path, part: str) -> None:
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: holds more than tensors, which would run code on loading; refused. Take the published file"
        ) from error
    except (RuntimeError, EOFError, ValueError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path}: truncated, damaged or of an old format ({first}); copy it again"
        ) from error
    for name, tensor in _entry(path, content, part).items():
        found.add(name, tuple(tensor.shape), lambda tensor=tensor: tensor)  # type: ignore[misc]


def _entry(path: Path, content: Any, part: str) -> dict[str, torch.Tensor]:
    """The network inside an envelope; a bare dictionary of tensors is its own."""
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, no dictionary of tensors")
    inner = content.get(part)
    if inner is None and content and all(isinstance(value, torch.Tensor) for value in content.values()):
        inner = content
    if not isinstance(inner, dict) or not all(isinstance(value, torch.Tensor) for value in inner.values()):
        known = ", ".join(str(key) for key, value in content.items() if isinstance(value, dict)) or "none"
        raise CheckpointError(
            f"{path}: no tensors under {part!r}; entries that may hold some: {known} (--part)"
        )
    return inner
