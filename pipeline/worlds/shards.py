"""Write safetensors shards one tensor at a time.

The library's `save_file` wants all tensors of a file at once, which for a base of 10 to 17 GB costs at least a whole
shard of memory. The format is simple enough to stream: its header needs only names, dtypes and shapes, which are known
before the first weight is read. Files and index are those of diffusers, so `from_pretrained` reads the folder too.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from pipeline import files

STEM = "diffusion_pytorch_model"
INDEX = f"{STEM}.safetensors.index.json"
_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def byte_size(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Bytes of one tensor."""
    return math.prod(shape) * dtype.itemsize


def write_shards(
    folder: Path, layout: Layout, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int
) -> list[str]:
    """Write tensors, which must come in the order of `layout`, into shards of at most about `shard_bytes`.

    Returns the names of the files. Raises StorageError when the disk is full and ValueError when a tensor is not what
    the layout says or one is left out.
    """
    shards = _split(layout, shard_bytes)
    names = (
        [f"{STEM}.safetensors"]
        if len(shards) == 1
        else [f"{STEM}-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    )
    stream = iter(tensors)
    with files.storage_errors(folder):
        for file, keys in zip(names, shards, strict=True):
            with (folder / file).open("wb") as handle:
                handle.write(_header(layout, keys))
                for key in keys:
                    name, tensor = next(stream, (None, torch.empty(0)))
                    if name != key or (tensor.dtype, tuple(tensor.shape)) != layout[key]:
                        raise ValueError(f"shard {file} needs {key} {layout[key]} next, got {name}")
                    handle.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
                    del tensor  # before the next one is made: two of the largest are a quarter of a gigabyte
    if len(shards) > 1:
        weight_map = {key: file for file, keys in zip(names, shards, strict=True) for key in keys}
        total = sum(byte_size(*entry) for entry in layout.values())
        files.write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return names


def _split(layout: Layout, shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    used = 0
    for key, entry in layout.items():
        size = byte_size(*entry)
        if shards[-1] and used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(key)
        used += size
    return shards


def _header(layout: Layout, keys: list[str]) -> bytes:
    """Length and JSON header, padded with spaces so that the data begin at a multiple of 8."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for key in keys:
        dtype, shape = layout[key]
        size = byte_size(dtype, shape)
        entries[key] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
