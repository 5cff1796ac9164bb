"""What a scorer's worker is told and what it answers: files of arrays, a JSON manifest, and JSON lines.

One request is a folder: `manifest.json`, a uint8 .npy for each video and further .npy files of arguments (query
points). Answers are lines on the worker's output, one for each item as soon as it is known, so that a worker that is
killed in mid-batch has already handed over what it had finished. Lines, with `type` first:

    to the worker     hello (protocol, scorer, settings, device, seconds between beats), measure (id, manifest)
    from the worker   ready (protocol, version, weights) | refused (reason); beat; item (id, index, seed, status ok |
                      failed, values | reason); done (id, seconds); batch_failed (id, reason)

Values are named arrays. Small finite ones stand in the line itself; others are .npy files in the request's folder,
since JSON knows no NaN. A value that is unknown is NaN or the item has failed; it is never 0.

Imported by both sides: numpy and the standard library only, and Python 3.10 is enough.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

VERSION = 1
MANIFEST = "manifest.json"
INLINE = 64  # numbers of an array that still go into the line itself

Values = dict[str, NDArray[Any]]


class ProtocolError(ValueError):
    """A message or a file is not what this version of the protocol says."""


@dataclass(frozen=True)
class Item:
    """One video to be measured.

    video_FHW3   uint8 frames
    arrays       further arguments, such as query points
    about        plain JSON arguments, such as the caption
    seed         of everything random in measuring this item; the same in any batch and order
    """

    video_FHW3: NDArray[np.uint8]
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class Failed:
    """An item that could not be measured, and why (one line)."""

    reason: str


Outcome = Values | Failed


def line(type_: str, **fields: Any) -> bytes:
    """One message. Raises ValueError on NaN: unknown must be said in another way."""
    return (json.dumps({"type": type_, **fields}, allow_nan=False) + "\n").encode()


def parse(text: bytes) -> dict[str, Any]:
    """The message in a line. Raises ProtocolError."""
    try:
        message = json.loads(text)
    except ValueError as error:
        raise ProtocolError(f"not a line of JSON: {text[:80]!r}") from error
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ProtocolError(f"a message without a type: {text[:80]!r}")
    return message


def one_line(error: BaseException) -> str:
    """An error as a reason: its type and the first line of its text."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"[:300]


def check_item(item: Item) -> None:
    """Raises ProtocolError unless the video is uint8 (F, H, W, 3) with at least one frame."""
    video = item.video_FHW3
    if video.dtype != np.uint8 or video.ndim != 4 or video.shape[-1] != 3 or not video.size:
        raise ProtocolError(
            f"a video is uint8 (F, H, W, 3) of at least one frame, got {video.dtype} {video.shape}"
        )


def write_request(folder: Path, items: Sequence[Item]) -> Path:
    """Write a batch into an empty folder; returns the manifest's path, which is written last. Raises ProtocolError."""
    entries = []
    for index, item in enumerate(items):
        check_item(item)
        names = {"video": f"{index}.video.npy"}
        np.save(folder / names["video"], np.ascontiguousarray(item.video_FHW3), allow_pickle=False)
        for name, array in item.arrays.items():
            names[name] = f"{index}.{name}.npy"
            np.save(folder / names[name], array, allow_pickle=False)
        entries.append({"files": names, "about": dict(item.about), "seed": item.seed})
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"protocol": VERSION, "items": entries}, allow_nan=False))
    return manifest


def read_request(manifest: Path) -> list[Item]:
    """The batch that `write_request` wrote. Raises ProtocolError for another version or a file that is none of ours."""
    try:
        content = json.loads(manifest.read_bytes())
        if content["protocol"] != VERSION:
            raise ProtocolError(f"{manifest}: protocol {content['protocol']}, this worker speaks {VERSION}")
        items = []
        for entry in content["items"]:
            files = {name: manifest.parent / file for name, file in entry["files"].items()}
            # mapped and not read: pages come when the scorer touches them, and writing to them changes no file
            video = np.load(files.pop("video"), mmap_mode="c", allow_pickle=False)
            arrays = {name: np.load(file, allow_pickle=False) for name, file in files.items()}
            items.append(Item(np.asarray(video), arrays, entry["about"], int(entry["seed"])))
    except ProtocolError:
        raise
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"{manifest}: is not a request ({one_line(error)})") from error
    for item in items:
        check_item(item)
    return items


def encode(values: Mapping[str, NDArray[Any]], folder: Path, index: int) -> dict[str, Any]:
    """Values of one item as the JSON of a line; what does not fit into it is written to `folder`."""
    encoded: dict[str, Any] = {}
    for name, value in values.items():
        array = np.asarray(value)
        if array.dtype.kind not in "fiub":
            raise ProtocolError(f"{name}: values are arrays of numbers, got {array.dtype}")
        if array.size <= INLINE and np.isfinite(array).all():
            encoded[name] = {
                "dtype": str(array.dtype),
                "shape": list(array.shape),
                "data": array.ravel().tolist(),
            }
        else:
            file = f"{index}.out.{name}.npy"
            np.save(folder / file, array, allow_pickle=False)
            encoded[name] = {"file": file}
    return encoded


def decode(encoded: Mapping[str, Any], folder: Path) -> Values:
    """The inverse of `encode`, exact to the bit. Raises ProtocolError."""
    try:
        return {
            name: np.load(folder / part["file"], allow_pickle=False)
            if "file" in part
            else np.array(part["data"], dtype=part["dtype"]).reshape(part["shape"])
            for name, part in encoded.items()
        }
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"the values of an item cannot be read ({one_line(error)})") from error
