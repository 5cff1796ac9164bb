"""How far apart two frames are that should show the same view, and what a cycle earns for it.

Pure functions of points that a tracker already followed from an earlier frame to a later one. WHY they are longer than
the published formula: that one averages over the points that survived, so blur, darkness or a new scene that leaves a
few self-consistent points is *rewarded*, and a video that never moves closes perfectly. Here (spec/worldcycle.md 1.4,
1.7):

* points are chosen where the *earlier* frame has texture, and each of them counts: one that is lost, fails the
  forward-backward check or changes its colour costs `d_fail`, the level of unrelated frames;
* too few points are a failure with `d_fail`, never NaN, never left out;
* the reward is gated by the excursion that was achieved.

d is in half perimeters: pixels / (height + width). Unrelated points give about 0.26.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from pipeline.errors import ConfigError, DataError

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


class DiscrepancyConfig(BaseModel):
    """When a tracked point counts and what a lost one costs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    d_fail: float = Field(
        0.27, gt=0, le=1, description="cost of a lost point, and the most a point costs (half perimeters)"
    )
    min_points: int = Field(10, ge=1, description="fewer chosen or followed points are a failure")
    min_coverage: float = Field(
        0.25, ge=0, le=1, description="a smaller share of points followed is a failure"
    )
    forward_backward: float = Field(
        1.5, gt=0, description="pixels a point may be off after tracking there and back"
    )
    colour: float = Field(
        0.25,
        gt=0,
        description="a point whose colour changed more (0 to 1) counts as lost; 1: any change is allowed",
    )
    texture: float = Field(
        1e-4,
        gt=0,
        description="smallest structure-tensor eigenvalue of a cell (grey 0 to 1, mean over the cell)",
    )
    texture_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="an earlier frame with fewer textured cells than this share of the first frame's pays for the rest",
    )
    confidence: float = Field(
        0.5, ge=0, le=1, description="a point of which the tracker itself is less sure counts as lost"
    )


@dataclass(frozen=True)
class Discrepancy:
    """One comparison: `d` (never NaN), the points chosen and followed, and whether it failed as a whole.

    `points` of the chosen ones really have texture in the earlier frame; the others are the shortage against the first.
    """

    d: float
    chosen: int
    followed: int
    failed: bool
    points: int = field(default=0, compare=False)

    @property
    def coverage(self) -> float:
        """Share of the chosen points that were followed; 0 without any."""
        return self.followed / self.chosen if self.chosen else 0.0


def grid_cell(size_HW: tuple[int, int]) -> int:
    """Side of a grid cell in pixels: a 32nd of the longer side, so that the number of points hardly depends on the
    size of the frames, and at least 4.
    """
    return max(4, round(max(size_HW) / 32))


def cell_texture(frame_HW: npt.ArrayLike, cell: int = 4) -> FloatArray:
    """Texture of each cell, (rows, columns): the smaller eigenvalue of the mean structure tensor.

    `frame_HW` is grey in 0..1 (DataError otherwise). An edge alone does not count, since a point slides along it.
    """
    frame = np.asarray(frame_HW, dtype=np.float64)
    if frame.ndim != 2 or min(frame.shape) < max(2, cell) or cell < 2:
        raise DataError(f"a grey frame of at least {max(2, cell)} pixels a side is needed, got {frame.shape}")
    if not np.isfinite(frame).all() or frame.min() < 0 or frame.max() > 1:
        raise DataError("grey values must lie in 0..1: divide bytes by 255")
    rows, columns = frame.shape[0] // cell, frame.shape[1] // cell
    down, right = (np.asarray(np.gradient(frame, axis=axis), dtype=np.float64) for axis in (0, 1))

    def mean(product: FloatArray) -> FloatArray:
        cells = product[: rows * cell, : columns * cell].reshape(rows, cell, columns, cell)
        return np.asarray(cells.mean(axis=(1, 3)), dtype=np.float64)

    xx, yy, xy = mean(right * right), mean(down * down), mean(right * down)
    return np.asarray((xx + yy) / 2 - np.hypot((xx - yy) / 2, xy))


def textured_points(frame_HW: npt.ArrayLike, config: DiscrepancyConfig, cell: int = 4) -> FloatArray:
    """Centres (N, 2) x, y in pixels of the cells of the *earlier* frame that have texture in both directions.

    Raises DataError as `cell_texture` does. N may be 0.
    """
    row, column = np.nonzero(cell_texture(frame_HW, cell) >= config.texture)
    centres = np.stack([column, row], axis=1).astype(np.float64)
    return centres * cell + (cell - 1) / 2


def followed_points(
    start_N2: npt.ArrayLike,
    back_N2: npt.ArrayLike,
    config: DiscrepancyConfig,
    colour_N: npt.ArrayLike | None = None,
) -> BoolArray:
    """Which points (N,) were followed: back near `start_N2` after tracking there and back, with their colour kept.

    `colour_N` is the colour difference at both ends, 0..1. A value that is not finite means lost.
    """
    start, back = _points(start_N2), _points(back_N2)
    if start.shape != back.shape:
        raise DataError(f"{len(start)} points went, {len(back)} came back: track the same ones")
    with np.errstate(invalid="ignore", over="ignore"):
        kept: BoolArray = np.hypot(*(start - back).T) <= config.forward_backward
        if colour_N is not None:
            kept &= np.asarray(colour_N, dtype=np.float64) <= config.colour
    return kept


def discrepancy(
    start_N2: npt.ArrayLike,
    end_N2: npt.ArrayLike,
    followed_N: npt.ArrayLike,
    size_HW: tuple[int, int],
    config: DiscrepancyConfig,
    least_chosen: int = 0,
) -> Discrepancy:
    """d of one direction: positions (x, y pixels) of all chosen points in the earlier and the later frame.

    d = c * mean(min(shift / (H + W), d_fail)) + (1 - c) * d_fail, with c the share of points followed. Fewer chosen
    points than `least_chosen` count as that many, the shortage as lost: an earlier frame that lost its texture hides
    nothing. DataError if the numbers of points differ; a position that is not finite is a lost point.
    """
    start, end = _points(start_N2), _points(end_N2)
    followed = np.asarray(followed_N, dtype=bool)
    if start.shape != end.shape or followed.shape != (len(start),):
        raise DataError(
            f"{len(start)} points, {len(end)} ends and {followed.size} flags: one of each is needed"
        )
    height, width = size_HW
    if height < 1 or width < 1:
        raise DataError(f"a frame of {height} x {width} pixels: give its height and width")
    followed = followed & np.isfinite(start).all(axis=1) & np.isfinite(end).all(axis=1)
    chosen, count = max(len(start), least_chosen), int(followed.sum())
    if count < config.min_points or count < config.min_coverage * chosen:
        return Discrepancy(config.d_fail, chosen, count, True, len(start))
    shift = np.hypot(*(end[followed] - start[followed]).T) / (height + width)
    coverage = count / chosen
    mean = float(np.minimum(shift, config.d_fail).mean())
    d = coverage * mean + (1 - coverage) * config.d_fail
    return Discrepancy(d, chosen, count, False, len(start))


def pair_discrepancies(
    tracks: Mapping[str, npt.ArrayLike],
    first_texture_N: npt.ArrayLike,
    size_HW: tuple[int, int],
    config: DiscrepancyConfig,
) -> list[Discrepancy]:
    """One symmetric d for each of Q tracked pairs. `tracks` holds what `scorers/tracks.py: PairTracks` describes:
    shift, back, colour, confidence (Q, 2, N) and texture (Q, N).
    """
    names = ("shift", "back", "colour", "confidence")
    shift, back, colour, confidence = (np.asarray(tracks[name], np.float64) for name in names)
    texture_QN = np.asarray(tracks["texture"], np.float64)
    usual = int((np.asarray(first_texture_N) >= config.texture).sum())
    least = math.ceil(config.texture_share * usual)
    found = []
    for q in range(len(shift)):
        chosen = texture_QN[q] >= config.texture
        zeros = np.zeros((int(chosen.sum()), 2))
        both = []
        for way in range(2):
            gone, error = (np.stack([a[q, way, chosen], zeros[:, 0]], axis=1) for a in (shift, back))
            kept = followed_points(zeros, error, config, colour[q, way, chosen])
            kept &= confidence[q, way, chosen] >= config.confidence
            both.append(discrepancy(zeros, gone, kept, size_HW, config, least))
        found.append(symmetric(*both))
    return found


def published_d(tracks: Mapping[str, npt.ArrayLike], q: int, size_HW: tuple[int, int]) -> float:
    """d of one pair as published: the mean over the points that survived, whatever is left of them; NaN without any.

    For tables that show what it rewards. Survivors are points that came back within 1.5 pixels; one direction.
    """
    shift, back = (np.asarray(tracks[name], np.float64)[q, 0] for name in ("shift", "back"))
    kept = back <= 1.5
    return float(shift[kept].mean() / sum(size_HW)) if kept.any() else math.nan


def symmetric(there: Discrepancy, back: Discrepancy) -> Discrepancy:
    """The mean of both directions; it failed if one of them did."""
    return Discrepancy(
        (there.d + back.d) / 2,
        there.chosen + back.chosen,
        there.followed + back.followed,
        there.failed or back.failed,
        there.points + back.points,
    )


def _points(points_N2: npt.ArrayLike) -> FloatArray:
    points = np.asarray(points_N2, dtype=np.float64)
    if points.size == 0:
        return np.zeros((0, 2))
    if points.ndim != 2 or points.shape[1] != 2:
        raise DataError(f"points must be (N, 2) x, y in pixels, got shape {points.shape}")
    return points


def closeness(d_N: npt.ArrayLike, alpha: float) -> float | None:
    """Mean of exp(-alpha d) over pairs of frames, 0..1; None where there is no pair to compare.

    Over mirrored pairs it is the spatial reward, over repeats the temporal one, which a single cycle does not have: it
    is absent then, neither 0 nor 1. Raises DataError on a d that is not finite or negative.
    """
    if not (math.isfinite(alpha) and alpha > 0):
        raise ConfigError(f"alpha = {alpha}: set a positive number, calibrated on the base model")
    d = _distances(d_N)
    return float(np.exp(-alpha * d).mean()) if d.size else None


def calibrate_alpha(base_d_N: npt.ArrayLike) -> float:
    """alpha = ln 2 / median d of the base model: half the base's pairs earn more than 1/2. Frozen before training.

    Raises DataError without pairs, or for a median of 0 (the base never moves, or a frame was compared with itself).
    """
    d = _distances(base_d_N)
    median = float(np.median(d)) if d.size else 0.0
    if median <= 0:
        raise DataError(
            f"alpha cannot be calibrated: the median of {d.size} distances is {median}; is the base static?"
        )
    return math.log(2) / median


def _distances(d_N: npt.ArrayLike) -> FloatArray:
    d = np.asarray(d_N, dtype=np.float64).ravel()
    if not np.isfinite(d).all() or (d < 0).any():
        raise DataError(
            "a distance between frames is negative or not finite: a failed pair has d_fail, not NaN"
        )
    return d


def excursion_gate(achieved: Sequence[float], commanded: Sequence[float], full: float = 1.0) -> float | None:
    """How far the gate of a closure reward is open, 0..1; both excursions are (distance, turn in degrees).

    The lesser of both achieved shares, over what was commanded at all: a video that turns but does not walk has not
    obeyed. From the share `full` on the gate is fully open. None if the achieved excursion is unknown (not finite).
    DataError for a word without any excursion: it gates nothing.
    """
    shares = []
    for got, asked in zip(achieved, commanded, strict=True):
        if not (math.isfinite(asked) and asked >= 0):
            raise DataError(f"a commanded excursion of {asked}: it is never negative or unknown")
        if not math.isfinite(got):
            return None
        if asked > 1e-6:
            shares.append(min(max(got / (full * asked), 0.0), 1.0))
    if not shares:
        raise DataError("the word commands no excursion: a cycle reward would pay for standing still")
    return min(shares)


def cycle_reward(
    spatial: float | None,
    temporal: float | None,
    gate: float | None,
    *,
    spatial_weight: float = 1.0,
    temporal_weight: float = 0.5,
) -> float | None:
    """gate * (weighted sum of the parts that exist); None if the gate is unknown or no part with a weight exists."""
    parts = [
        weight * value
        for value, weight in ((spatial, spatial_weight), (temporal, temporal_weight))
        if value is not None and weight > 0
    ]
    return None if gate is None or not parts else gate * sum(parts)


def closure_ratio(end_d: float, from_first_N: npt.ArrayLike) -> float | None:
    """d at the end over the largest d from the first frame on the way: about 1 is no return. None if it never left."""
    largest = _distances(from_first_N).max(initial=0.0)
    return float(_distances([end_d])[0] / largest) if largest > 0 else None
