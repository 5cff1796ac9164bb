"""Following points from one frame into another: the one interface of all trackers, and the embedded two.

WHY pairs and not videos: closure compares frames that are far apart in time but must show the same view. Followed
through the whole video, points leave the view and drift; in a two-frame clip they cannot (spec/worldcycle.md 1.4, b).
A tracker returns raw tracks, there and back again, and judges nothing: which points count and what a lost one costs is
decided where rewards are computed (`rewards/closure.py`), for every tracker alike.

Two embedded families, so that what rewards never judges: `LucasKanade` follows gradients from where the point was, and
`PatchMatcher` searches the whole frame for the patch that correlates best. CoTracker3 and RoMa fit the same protocol.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import DataError

FloatArray = NDArray[np.float32]
Frames = NDArray[np.uint8]


@dataclass(frozen=True)
class Tracks:
    """P pairs of frames, the same N points in each pair; positions are x, y in pixels, pixel centres are whole numbers.

    `end_PN2` where each point of the first frame is in the second, `back_PN2` where that is in the first frame when
    followed back; NaN where the tracker lost it. `confidence_PN` in 0..1 is the tracker's own opinion, 1 where it has
    none and 0 for a lost point.
    """

    end_PN2: FloatArray
    back_PN2: FloatArray
    confidence_PN: FloatArray

    def __post_init__(self) -> None:
        shape = self.confidence_PN.shape
        if len(shape) != 2 or any(a.shape != (*shape, 2) for a in (self.end_PN2, self.back_PN2)):
            raise DataError(
                f"tracks of shapes {self.end_PN2.shape}, {self.back_PN2.shape} and {shape} do not fit together: "
                "(P, N, 2), (P, N, 2) and (P, N) are needed"
            )


class Tracker(Protocol):
    """Follows points between frames. The same input gives the same output; pairs do not influence each other.

    `least_side` is the smallest height or width in pixels that it can work on.
    """

    name: str
    least_side: int

    def follow(self, first_PHW3: Frames, second_PHW3: Frames, points_N2: FloatArray) -> Tracks:
        """Follow the same points (x, y) of each first frame into the second and back. Any number of pairs, 0 included.

        Raises DataError for frames that are not uint8 (P, H, W, 3), differ in shape or are too small.
        """


def check_pairs(tracker: Tracker, first_PHW3: Frames, second_PHW3: Frames, points_N2: FloatArray) -> None:
    """The checks that every tracker shares. Raises DataError."""
    if first_PHW3.ndim != 4 or first_PHW3.shape[-1] != 3 or first_PHW3.dtype != np.uint8:
        raise DataError(
            f"{tracker.name} reads uint8 frames (P, H, W, 3), got {first_PHW3.dtype} {first_PHW3.shape}"
        )
    if second_PHW3.shape != first_PHW3.shape or second_PHW3.dtype != np.uint8:
        raise DataError(
            f"{tracker.name}: pairs of frames {first_PHW3.shape} and {second_PHW3.shape}: one shape is needed"
        )
    if min(first_PHW3.shape[1:3]) < tracker.least_side:
        raise DataError(
            f"{tracker.name} needs frames of at least {tracker.least_side} pixels a side, got "
            f"{first_PHW3.shape[1]} x {first_PHW3.shape[2]}: leave closure out or use larger frames"
        )
    if points_N2.ndim != 2 or points_N2.shape[1] != 2:
        raise DataError(f"{tracker.name}: points must be (N, 2) x, y in pixels, got {points_N2.shape}")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def opencv() -> Any:
    """OpenCV, imported late and on one thread of its own: pairs run in parallel here, and two pools of threads that
    wait for each other took 50 times as long on two cores.
    """
    import cv2

    if cv2.getNumThreads() != 1:
        cv2.setNumThreads(1)
    return cv2


def follow_each(
    tracker: Tracker,
    first_PHW3: Frames,
    second_PHW3: Frames,
    points_N2: FloatArray,
    one: Callable[[Frames, Frames, FloatArray], FloatArray],
) -> Tracks:
    """Tracks from a function of one pair that returns (N, 5): end, back, confidence; pairs run on all cores."""
    check_pairs(tracker, first_PHW3, second_PHW3, points_N2)
    points = np.ascontiguousarray(points_N2, np.float32)
    pairs = list(zip(first_PHW3, second_PHW3, strict=True))
    if len(pairs) > 1 and cores() > 1:
        with ThreadPoolExecutor(cores()) as pool:
            found = list(pool.map(lambda pair: one(pair[0], pair[1], points), pairs))
    else:
        found = [one(first, second, points) for first, second in pairs]
    rows = np.stack(found) if found else np.zeros((0, len(points), 5), np.float32)
    return Tracks(rows[..., 0:2], rows[..., 2:4], rows[..., 4])


class LucasKanade:
    """OpenCV's pyramidal Lucas-Kanade on colour frames: sub-pixel, fast, and lost after a large jump.

    The pyramid ends where the smaller side is about as large as the window, so that a jump of a third of the frame can
    still be followed.
    """

    name = "lucas-kanade"
    least_side = 32

    def __init__(self, window: int = 11) -> None:
        self.window = window

    def follow(self, first_PHW3: Frames, second_PHW3: Frames, points_N2: FloatArray) -> Tracks:
        """As `Tracker.follow`."""
        return follow_each(self, first_PHW3, second_PHW3, points_N2, self._pair)

    def _pair(self, first_HW3: Frames, second_HW3: Frames, points_N2: FloatArray) -> FloatArray:
        there, found = self._flow(first_HW3, second_HW3, points_N2)
        back, returned = self._flow(second_HW3, first_HW3, there)
        kept = found & returned
        rows = np.concatenate([there, back, kept[:, None]], axis=1).astype(np.float32)
        rows[~kept, :4] = np.nan
        return rows

    def _flow(
        self, first_HW3: Frames, second_HW3: Frames, points_N2: FloatArray
    ) -> tuple[FloatArray, NDArray[np.bool_]]:
        cv2 = opencv()
        if not len(points_N2):
            return np.zeros((0, 2), np.float32), np.zeros(0, np.bool_)
        levels = max(0, int(math.log2(min(first_HW3.shape[:2]) / self.window)))
        criteria = (cv2.TERM_CRITERIA_COUNT | cv2.TERM_CRITERIA_EPS, 30, 0.01)
        ends, status, _ = cv2.calcOpticalFlowPyrLK(
            np.ascontiguousarray(first_HW3),
            np.ascontiguousarray(second_HW3),
            points_N2.reshape(-1, 1, 2),
            np.empty(0, np.float32),
            winSize=(self.window, self.window),
            maxLevel=levels,
            criteria=criteria,
        )
        return ends.reshape(-1, 2), status.ravel() == 1


class PatchMatcher:
    """Nearest neighbours among normalised patches, over the whole frame: no starting point and no gradient.

    Each point's patch (mean removed, unit norm) is compared with every position of the other frame, and its best match
    is matched back. So a large jump costs nothing, and unrelated frames give unrelated positions. Wide frames are
    shrunk to `widest` pixels first, since the search grows with the square of their area. Positions are refined by a
    parabola through the neighbours; `confidence` is the correlation.
    """

    name = "patches"
    least_side = 24

    def __init__(self, patch: int = 9, widest: int = 96, least_correlation: float = 0.5) -> None:
        self.patch, self.widest, self.least_correlation = patch, widest, least_correlation

    def follow(self, first_PHW3: Frames, second_PHW3: Frames, points_N2: FloatArray) -> Tracks:
        """As `Tracker.follow`."""
        return follow_each(self, first_PHW3, second_PHW3, points_N2, self._pair)

    def _pair(self, first_HW3: Frames, second_HW3: Frames, points_N2: FloatArray) -> FloatArray:
        cv2 = opencv()
        height, width = first_HW3.shape[:2]
        scale = min(1.0, self.widest / max(height, width))
        if scale < 1:
            size = (max(1, round(width * scale)), max(1, round(height * scale)))
            first, second = (
                cv2.resize(frame, size, interpolation=cv2.INTER_AREA) for frame in (first_HW3, second_HW3)
            )
            ratio = np.array([size[0] / width, size[1] / height], np.float32)
        else:
            first, second, ratio = first_HW3, second_HW3, np.ones(2, np.float32)
        one, other = self._descriptors(first), self._descriptors(second)
        start = (points_N2 + 0.5) * ratio - 0.5
        there, confidence = self._match(one, other, start)
        back, again = self._match(other, one, there)
        confidence = np.minimum(confidence, again)
        rows = np.concatenate(
            [(there + 0.5) / ratio - 0.5, (back + 0.5) / ratio - 0.5, confidence[:, None]], axis=1
        ).astype(np.float32)
        lost = ~(confidence >= self.least_correlation)
        rows[lost, :4], rows[lost, 4] = np.nan, 0
        return rows

    def _descriptors(self, frame_HW3: Frames) -> FloatArray:
        """(H, W, D) normalised patches around every pixel; the border is mirrored; a flat patch is all zeros."""
        margin = self.patch // 2
        padded = np.pad(
            frame_HW3.astype(np.float32), ((margin, margin), (margin, margin), (0, 0)), mode="reflect"
        )
        windows = np.lib.stride_tricks.sliding_window_view(padded, (self.patch, self.patch), axis=(0, 1))
        patches = windows.reshape(*frame_HW3.shape[:2], 3, -1)
        patches = (patches - patches.mean(-1, keepdims=True)).reshape(*frame_HW3.shape[:2], -1)
        norm = np.linalg.norm(patches, axis=-1, keepdims=True)
        # below one grey level of contrast a pixel there is only noise
        flat = norm < math.sqrt(patches.shape[-1])
        return np.where(flat, 0, patches / np.maximum(norm, 1e-6)).astype(np.float32)

    def _match(
        self, one_HWD: FloatArray, other_HWD: FloatArray, points_N2: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Best position (N, 2) in the other frame for each point, and its correlation."""
        height, width, depth = one_HWD.shape
        near = np.rint(points_N2).astype(np.int64)
        x, y = np.clip(near[:, 0], 0, width - 1), np.clip(near[:, 1], 0, height - 1)
        wanted_ND = one_HWD[y, x]
        correlation = wanted_ND @ other_HWD.reshape(-1, depth).T
        best = correlation.argmax(1)
        row, column = np.divmod(best, width)
        # A peak's parabola leans to where the texture is: the same patch found again leans alike, so that is taken off
        # together with what was rounded off the start, and a frame compared with itself gives exactly 0.
        shift = _peak(other_HWD, wanted_ND, column, row) - _peak(one_HWD, wanted_ND, x, y)
        end = np.stack([column, row], axis=1) + shift + (points_N2 - near)
        return end.astype(np.float32), correlation[np.arange(len(best)), best].astype(np.float32)


def _peak(
    frame_HWD: FloatArray, wanted_ND: FloatArray, x_N: NDArray[np.int64], y_N: NDArray[np.int64]
) -> FloatArray:
    """Sub-pixel offsets (N, 2) within half a pixel: parabolas through the correlations beside each position."""
    height, width = frame_HWD.shape[:2]

    def at(dx: int, dy: int) -> FloatArray:
        there = frame_HWD[np.clip(y_N + dy, 0, height - 1), np.clip(x_N + dx, 0, width - 1)]
        return np.asarray((there * wanted_ND).sum(-1))

    here, offsets = at(0, 0), []
    for dx, dy, inside in (
        (1, 0, (x_N > 0) & (x_N < width - 1)),
        (0, 1, (y_N > 0) & (y_N < height - 1)),
    ):
        before, after = at(-dx, -dy), at(dx, dy)
        bend = before - 2 * here + after
        offset = 0.5 * (before - after) / np.minimum(bend, -1e-6)
        offsets.append(np.where(inside & (bend < -1e-6), np.clip(offset, -0.5, 0.5), 0))
    return np.stack(offsets, axis=1).astype(np.float32)


TRACKERS: dict[str, Callable[[], Tracker]] = {"lucas-kanade": LucasKanade, "patches": PatchMatcher}
