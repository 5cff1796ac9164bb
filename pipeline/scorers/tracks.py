"""The engine behind closure rewards: what a tracker saw of every pair of frames, stored raw.

Not the discrepancy d but what it is made of is stored, point by point, so that another threshold, another cost of a
lost point or another alpha tracks nothing again (DESIGN 5). Every cell of a grid is tracked and its texture is stored
beside it: which cells count is decided later, on the *earlier* frame, where a generated frame cannot hide (spec 1.4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import DataError
from pipeline.pairs import REFERENCE, FramePairs
from pipeline.rewards.closure import cell_texture, grid_cell

if TYPE_CHECKING:
    from pipeline.scorers.registry import Engine
    from pipeline.scorers.tracker import Tracker
    from pipeline.stores import ArraySpec, GroupStore

Arrays = dict[str, NDArray[Any]]
Frames = NDArray[np.uint8]
LOST = 1e6  # stands in stored shifts and errors for "lost": NaN there means that nothing was measured
CHUNK = 32  # pairs that are tracked in one call, so that a long video needs no more memory than a short one


@dataclass(frozen=True)
class PairTracks:
    """Q pairs, both directions (0: earlier to later), N cells of the grid.

    `shift_Q2N` pixels that a point moved, `back_Q2N` pixels that it is off after coming back, both LOST where it was
    lost; `colour_Q2N` largest colour difference of its ends, 0..1; `confidence_Q2N` the tracker's own, 0..1;
    `texture_QN` of the earlier frame (smallest eigenvalue of the structure tensor, grey 0 to 1).
    """

    shift_Q2N: NDArray[np.float32]
    back_Q2N: NDArray[np.float32]
    colour_Q2N: NDArray[np.float32]
    confidence_Q2N: NDArray[np.float32]
    texture_QN: NDArray[np.float32]


def grid(size_HW: tuple[int, int]) -> NDArray[np.float32]:
    """Centres (N, 2) x, y of all cells, in the order of `cell_texture`."""
    cell = grid_cell(size_HW)
    rows, columns = size_HW[0] // cell, size_HW[1] // cell
    row, column = np.mgrid[:rows, :columns].reshape(2, -1)
    return (np.stack([column, row], axis=1) * cell + (cell - 1) / 2).astype(np.float32)


def texture_of(frame_HW3: Frames) -> NDArray[np.float32]:
    """Texture (N,) of each cell of one frame."""
    grey = frame_HW3.astype(np.float64).mean(-1) / 255
    return cell_texture(grey, grid_cell(frame_HW3.shape[:2])).ravel().astype(np.float32)


def track_pairs(tracker: Tracker, earlier_QHW3: Frames, later_QHW3: Frames) -> PairTracks:
    """Track pairs of frames in both directions, CHUNK at a time. Raises DataError for frames it cannot work on."""
    size = (earlier_QHW3.shape[1], earlier_QHW3.shape[2])
    points = grid(size)
    found: list[list[NDArray[np.float32]]] = []
    for start in range(0, len(earlier_QHW3), CHUNK):
        pair = earlier_QHW3[start : start + CHUNK], later_QHW3[start : start + CHUNK]
        count = len(pair[0])
        first, second = np.concatenate(pair), np.concatenate(pair[::-1])
        tracks = tracker.follow(first, second, points)
        shift = _length(tracks.end_PN2 - points)
        back = _length(tracks.back_PN2 - points)
        colour = np.stack([_colour(*row, points) for row in zip(first, second, tracks.end_PN2, strict=True)])
        parts = [shift, back, colour, tracks.confidence_PN]
        found.append([np.stack([a[:count], a[count:]], axis=1).astype(np.float32) for a in parts])
    if not found:
        empty = np.zeros((0, 2, len(points)), np.float32)
        return PairTracks(empty, empty, empty, empty, np.zeros((0, len(points)), np.float32))
    texture = np.stack([texture_of(frame) for frame in earlier_QHW3])
    shift, back, colour, confidence = (np.concatenate(column) for column in zip(*found, strict=True))
    return PairTracks(shift, back, colour, confidence, texture)


def _length(vector_PN2: NDArray[np.float32]) -> NDArray[np.float32]:
    length = np.hypot(vector_PN2[..., 0], vector_PN2[..., 1])
    return np.where(np.isfinite(length), np.minimum(length, LOST), LOST).astype(np.float32)


def _colour(
    first_HW3: Frames, second_HW3: Frames, end_N2: NDArray[np.float32], start_N2: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Largest difference of a channel between both ends of each track, 0..1; 1 where it is lost or out of the frame."""
    height, width = first_HW3.shape[:2]
    lost: NDArray[np.bool_] = np.logical_not(np.isfinite(end_N2).all(axis=1))
    safe = np.where(lost[:, None], 0, end_N2)
    outside = (safe < -0.5).any(axis=1) | (safe[:, 0] > width - 0.5) | (safe[:, 1] > height - 0.5)
    difference = np.abs(_sample(first_HW3, start_N2) - _sample(second_HW3, safe)).max(axis=1) / 255
    return np.where(lost | outside, 1.0, difference).astype(np.float32)


def _sample(frame_HW3: Frames, points_N2: NDArray[np.float32]) -> NDArray[np.float32]:
    """Bilinear colours (N, 3); positions outside take the border's."""
    height, width = frame_HW3.shape[:2]
    x = np.clip(points_N2[:, 0], 0, width - 1)
    y = np.clip(points_N2[:, 1], 0, height - 1)
    x0, y0 = np.minimum(x.astype(np.int64), width - 2), np.minimum(y.astype(np.int64), height - 2)
    fx, fy = (x - x0)[:, None], (y - y0)[:, None]
    frame = frame_HW3.astype(np.float32)
    top = frame[y0, x0] * (1 - fx) + frame[y0, x0 + 1] * fx
    bottom = frame[y0 + 1, x0] * (1 - fx) + frame[y0 + 1, x0 + 1] * fx
    return np.asarray(top * (1 - fy) + bottom * fy, np.float32)


class TracksEngine:
    """A tracker (Lucas-Kanade unless another is given) as an engine of the score stage.

    It measures pairs, so it works once a group's pairs are bound to it: `bound`, or `for_pairs` for one group.
    """

    name = "tracks"

    def __init__(self, tracker: Tracker | None = None) -> None:
        from pipeline.scorers.tracker import LucasKanade

        self.tracker: Tracker = tracker or LucasKanade()

    def arrays(self, candidates: int, frames: int, past_frames: int) -> list[ArraySpec]:
        """Raises DataError: what is stored depends on the pairs."""
        raise DataError(f"{self.name} measures pairs of frames: bind a group's pairs to it first")

    def measure(self, frames_GFHW3: Frames, past_FHW3: Frames) -> Arrays:
        """Raises DataError, as `arrays` does."""
        raise DataError(f"{self.name} measures pairs of frames: bind a group's pairs to it first")

    def measure_past(self, past_FHW3: Frames) -> Arrays:
        """Nothing."""
        return {}

    def for_pairs(
        self,
        pairs: FramePairs,
        room: int,
        size_HW: tuple[int, int],
        reference_HW3: Frames | None = None,
    ) -> BoundTracks:
        """The engine for one group: its pairs, `room` for as many as the largest group of the store has, the size of
        its frames and the end frame of a relation's other word.
        """
        return BoundTracks(self.tracker, pairs, room, size_HW, reference_HW3, self.name)


@dataclass
class BoundTracks:
    """As `registry.Engine`, for groups with these pairs."""

    tracker: Tracker
    pairs: FramePairs
    room: int
    size_HW: tuple[int, int]
    reference_HW3: Frames | None
    name: str = "tracks"

    def arrays(self, candidates: int, frames: int, past_frames: int) -> list[ArraySpec]:
        """`shift`, `back`, `colour`, `confidence` float32 [G, Q, 2, N], `texture` [G, Q, N], `first_texture` [G, N]."""
        from pipeline.stores import ArraySpec

        G, Q, N = candidates, self.room, len(grid(self.size_HW))
        names = ("shift", "back", "colour", "confidence")
        specs = [ArraySpec(name, (G, Q, 2, N), "float32") for name in names]
        specs += [ArraySpec("texture", (G, Q, N), "float32"), ArraySpec("first_texture", (G, N), "float32")]
        return specs

    def measure(self, frames_GFHW3: Frames, past_FHW3: Frames) -> Arrays:
        """As `Engine.measure`: frame 0 of each video is the last one of `past_FHW3`. Raises DataError."""
        videos = [np.concatenate([past_FHW3, frames[1:]]) for frames in frames_GFHW3]
        index = self.pairs.index_Q2
        if len(index) > self.room or index.max(initial=-1) >= len(videos[0]):
            raise DataError(
                f"{len(index)} pairs up to frame {index.max(initial=-1)} do not fit a video of {len(videos[0])} frames "
                f"and room for {self.room} pairs: run the stages of this epoch again"
            )
        if (index == REFERENCE).any() and self.reference_HW3 is None:
            raise DataError("a pair with the end of another word, but that word's end frame is not stored")
        earlier = np.concatenate([self._frames(video, index[:, 0]) for video in videos])
        later = np.concatenate([video[index[:, 1]] for video in videos])
        tracks = track_pairs(self.tracker, earlier, later)
        arrays = {
            "shift": tracks.shift_Q2N,
            "back": tracks.back_Q2N,
            "colour": tracks.colour_Q2N,
            "confidence": tracks.confidence_Q2N,
            "texture": tracks.texture_QN,
        }
        G, Q = len(videos), len(index)
        padded = {}
        for name, values in arrays.items():
            out = np.zeros((G, self.room, *values.shape[1:]), np.float32)
            out[:, :Q] = values.reshape(G, Q, *values.shape[1:])
            padded[name] = out
        return padded | {"first_texture": np.repeat(texture_of(videos[0][0])[None], G, axis=0)}

    def measure_past(self, past_FHW3: Frames) -> Arrays:
        """Nothing: a prefix alone has no pairs that are judged."""
        return {}

    def _frames(self, video_FHW3: Frames, index_Q: NDArray[np.int64]) -> Frames:
        frames = video_FHW3[np.maximum(index_Q, 0)].copy()
        if self.reference_HW3 is not None:
            frames[index_Q == REFERENCE] = self.reference_HW3
        return frames


def bound(engine: Engine, prefixes: GroupStore) -> Callable[[int], Engine]:
    """Group index -> the engine that measures it: itself, or, if it measures pairs, bound to the group's pairs.

    Raises DataError where the groups have none.
    """
    if not isinstance(engine, TracksEngine):
        return lambda index: engine
    listed = [prefixes.record(index).get("pairs") for index in range(len(prefixes))]
    if any(rows is None for rows in listed):
        raise DataError(
            f"{prefixes.path}: its words do not close, so {engine.name} has nothing to compare; set cycle.words or "
            f"take {engine.name} out of score.scorers"
        )
    pairs = [FramePairs.from_json(rows or ()) for rows in listed]
    room = max(len(one) for one in pairs)
    height, width = prefixes.specs["first_frame"].shape[:2]

    def of(index: int) -> Engine:
        frame = prefixes.read(index, "reference") if "reference" in prefixes.specs else None
        return engine.for_pairs(pairs[index], room, (height, width), frame)

    return of
