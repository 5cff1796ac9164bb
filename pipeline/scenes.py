"""Scenes from a person's own images and captions: the list, its images cut to a world's frames, and what is left out.

The list is the JSON of the official release, `[{"image_path": ..., "caption": ...}, ...]`, with two optional keys of
ours: `word`, the actions to practise on that scene, or `poses`, a pose file. An entry that cannot be used is left out
with its name and a reason, never replaced by another or by a black image: a run of 5000 prompts must neither die of one
broken file nor silently train on 4999 and a hole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.actions import parse_word
from pipeline.camera import pose_json_load
from pipeline.digests import SHORT, digest_file, digest_of
from pipeline.errors import DataError, WordError

KEYS = ("image_path", "caption", "word", "poses")


@dataclass(frozen=True)
class SceneEntry:
    """One usable line of a list: its place (from 0), the image's path as written, and optional actions.

    `key` names the scene in groups and digests: its image's file name, and a digest of all that it was made of.
    """

    index: int
    name: str
    image: Path
    caption: str
    key: str
    word: str | None = None
    poses: Path | None = None


@dataclass(frozen=True)
class LeftOut:
    """An entry that is not used: its place in the list (from 0), its name and why."""

    index: int
    name: str
    reason: str

    def __str__(self) -> str:
        return f"entry {self.index} ({self.name}): {self.reason}"


def read_scenes(
    path: Path, images: Path | None = None, frame_size: tuple[int, int] = (1, 1)
) -> tuple[list[SceneEntry], list[LeftOut]]:
    """The usable entries of a list, in its order, and the others with their reasons.

    Paths are relative to `images` (None: the list's folder). Every image is opened and decoded once here. Raises
    DataError when the file is no such list or nothing of it can be used.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); give the list of images and captions"
        ) from error
    except ValueError as error:
        raise DataError(f"{path}: is not valid JSON ({error}); see docs/your-data.md") from error
    if not isinstance(content, list):
        raise DataError(
            f'{path}: must be a list, [{{"image_path": ..., "caption": ...}}, ...], found a {type(content).__name__}'
        )
    used: list[SceneEntry] = []
    left_out: list[LeftOut] = []
    seen: dict[str, int] = {}
    for index, item in enumerate(content):
        name = str(item.get("image_path", "no image_path")) if isinstance(item, dict) else "no entry"
        try:
            entry = _entry(index, item, images or path.parent)
            load_image(entry.image, frame_size)
            if entry.key in seen:
                raise DataError(f"is entry {seen[entry.key]} again")
        except (DataError, WordError) as error:
            left_out.append(LeftOut(index, name, str(error)))
            continue
        seen[entry.key] = index
        used.append(entry)
    if not used:
        first = f" (the first: {left_out[0]})" if left_out else ""
        raise DataError(f"{path}: none of its {len(content)} entries can be used{first}")
    return used, left_out


def _entry(index: int, item: Any, folder: Path) -> SceneEntry:
    """Check one entry. Raises DataError or WordError with the reason."""
    if not isinstance(item, Mapping):
        raise DataError(f"is a {type(item).__name__}, not a mapping")
    if unknown := sorted(set(item) - set(KEYS)):
        raise DataError(f"has the unknown key {unknown[0]!r}; known are {', '.join(KEYS)}")
    for key in KEYS[:2]:
        if not isinstance(item.get(key), str) or not item[key].strip():
            raise DataError(f"has no {key}" if key not in item else f"its {key} is empty or no text")
    word, poses = item.get("word"), item.get("poses")
    if word is not None and poses is not None:
        raise DataError("has both word and poses; keep one")
    for key, value in (("word", word), ("poses", poses)):
        if value is not None and not isinstance(value, str):
            raise DataError(f"its {key} is no text")
    if word is not None:
        parse_word(word)
    if poses is not None:
        pose_json_load(folder / poses)
    image, caption = folder / item["image_path"], " ".join(item["caption"].split())
    parts = [image] if poses is None else [image, folder / poses]
    for path in parts:
        if not path.is_file():
            raise DataError(f"{path}: is missing")
    content = digest_of([*map(digest_file, parts), caption, word])
    return SceneEntry(
        index=index,
        name=item["image_path"],
        image=image,
        caption=caption,
        key=f"{image.stem}-{content[:SHORT]}",
        word=word,
        poses=None if poses is None else folder / poses,
    )


def load_image(path: Path, frame_size: tuple[int, int]) -> NDArray[np.uint8]:
    """An image as a frame, uint8 [H, W, 3]: turned as its EXIF says, scaled to cover the frame, its middle cut out.

    Its aspect is kept. Raises DataError when it is missing, no image, damaged or too large to be one.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    height, width = frame_size
    try:
        with Image.open(path) as opened:
            image = ImageOps.exif_transpose(opened).convert("RGB")
    except FileNotFoundError as error:
        raise DataError("the image is missing") from error
    except UnidentifiedImageError as error:
        raise DataError("is no image that can be read") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"the image cannot be read ({str(error).splitlines()[0]})") from error
    scale = max(height / image.height, width / image.width)
    # rounded up: one pixel short would leave a black edge
    size = (
        max(width, math.ceil(image.width * scale - 1e-6)),
        max(height, math.ceil(image.height * scale - 1e-6)),
    )
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    scaled = image.resize(size, Image.Resampling.LANCZOS)
    return np.array(scaled.crop((left, top, left + width, top + height)), np.uint8)
