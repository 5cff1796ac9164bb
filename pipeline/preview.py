"""Videos to look at: rows of frames as one PNG, and the same rows as one mp4.

A number that rises can hide a picture that melts. The grid shows every frame at once, one row a video; the film plays
the rows side by side. Small frames are enlarged without smoothing: blur must be the model's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from pipeline import files
from pipeline.errors import DataError

_LEGIBLE = 160  # pixels of width from which on a frame is shown as it is
_BAR = 14  # height of a line of text
_GAP = 4


@dataclass(frozen=True)
class Row:
    """One video, uint8 [F, H, W, 3], and what is written above it."""

    caption: str
    frames_FHW3: NDArray[np.uint8]


def _enlarge(frames_FHW3: NDArray[np.uint8]) -> NDArray[np.uint8]:
    factor = max(1, -(-_LEGIBLE // frames_FHW3.shape[2]))
    return frames_FHW3.repeat(factor, axis=1).repeat(factor, axis=2)


def _line(text: str, width: int) -> NDArray[np.uint8]:
    """One line of white text on black, [_BAR, width, 3]; cut where the picture ends."""
    bar = Image.new("RGB", (width, _BAR))
    ImageDraw.Draw(bar).text((2, 1), text, font=ImageFont.load_default(10), fill=(255, 255, 255))
    return np.asarray(bar)


def _same_length(rows: Sequence[Row]) -> int:
    if not rows or len({row.frames_FHW3.shape for row in rows}) != 1:
        shapes = ", ".join(f"{row.caption}: {row.frames_FHW3.shape}" for row in rows) or "none"
        raise DataError(f"preview: videos of one shape are needed, got {shapes}")
    return len(rows[0].frames_FHW3)


def grid(rows: Sequence[Row], actions: Sequence[str]) -> NDArray[np.uint8]:
    """All frames of all rows, uint8 [H, W, 3]; `actions` names the keys that led to each frame.

    Raises DataError when the videos differ in shape or there is not one action a frame.
    """
    count = _same_length(rows)
    if len(actions) != count:
        raise DataError(f"preview: {len(actions)} actions for {count} frames")
    lines = []
    for row in rows:
        frames = _enlarge(row.frames_FHW3)
        width = frames.shape[2]
        cells = [
            np.concatenate([_line(key, width), frame]) for key, frame in zip(actions, frames, strict=True)
        ]
        gap = np.zeros((cells[0].shape[0], _GAP, 3), np.uint8)
        line = np.concatenate([part for cell in cells for part in (cell, gap)][:-1], axis=1)
        lines += [_line(row.caption, line.shape[1]), line]
    return np.concatenate(lines)


def write_png(path: Path, image_HW3: NDArray[np.uint8]) -> None:
    """Write one image, atomically."""
    buffer = BytesIO()
    Image.fromarray(image_HW3).save(buffer, "PNG")
    files.write_bytes(path, buffer.getvalue())


def write_mp4(path: Path, rows: Sequence[Row], actions: Sequence[str], fps: float) -> None:
    """Write the rows side by side as H.264, each frame under its keys, atomically. Raises DataError as `grid`."""
    import av

    count = _same_length(rows)
    if len(actions) != count:
        raise DataError(f"preview: {len(actions)} actions for {count} frames")
    videos = [_enlarge(row.frames_FHW3) for row in rows]
    buffer = BytesIO()
    with av.open(buffer, "w", format="mp4") as film:
        stream = None
        for f in range(count):
            picture = np.concatenate(
                [
                    np.concatenate([_line(row.caption, v.shape[2]), _line(actions[f], v.shape[2]), v[f]])
                    for row, v in zip(rows, videos, strict=True)
                ],
                axis=1,
            )
            even = picture[
                : picture.shape[0] // 2 * 2, : picture.shape[1] // 2 * 2
            ]  # 4:2:0 halves both sides
            if stream is None:
                stream = film.add_stream("libx264", rate=round(fps), options={"crf": "12"})
                stream.height, stream.width = even.shape[:2]
                stream.pix_fmt = "yuv420p"
            film.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(even), format="rgb24")))
        assert stream is not None
        film.mux(stream.encode(None))
    files.write_bytes(path, buffer.getvalue())
