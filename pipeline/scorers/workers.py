"""Real scorers as engines of the score stage: what is asked of a worker for a group, and what becomes of its answers.

HPSv3 judges frames, Depth-Anything-3 gives poses, CoTracker3 and RoMa follow points between two frames as the embedded
trackers do. Each keeps one worker process, started with the first clip; a clip that it cannot measure is missing with
the worker's own reason, and the others of its group are not.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.camera import relative_poses
from pipeline.digests import digest_of
from pipeline.errors import CheckpointError, DataError
from pipeline.scorers import environments
from pipeline.scorers.registry import Arrays, Engine, Partial
from pipeline.scorers.tracker import Tracks, check_pairs
from pipeline.scorers.tracks import TracksEngine
from pipeline.scorers.worker.client import Limits, Worker
from pipeline.scorers.worker.protocol import Failed, Item, Outcome, Values
from pipeline.scorers.worker.weights import digest_weights
from pipeline.scorers.worker_settings import (
    CoTrackerSettings,
    DepthAnything3Settings,
    HPSv3Settings,
    RoMaSettings,
    WorkerSettings,
)

if TYPE_CHECKING:
    from pipeline.stores import ArraySpec

Frames = NDArray[np.uint8]
FloatArray = NDArray[np.float32]


# ---------------------------------------------------------------- identity and processes


def weight_files(name: str, settings: WorkerSettings) -> tuple[str, ...]:
    """Patterns of the files that a scorer's values depend on, as its adapter names them."""
    from pipeline.scorers.worker.adapters import cotracker, depth_anything_3, hpsv3, roma

    mode = getattr(settings, "mode", "offline")
    return {
        "hpsv3": hpsv3.FILES,
        "depth-anything-3": depth_anything_3.FILES,
        "cotracker": (cotracker.ONLINE if mode == "online" else cotracker.OFFLINE,),
        "roma": (roma.WEIGHTS, roma.DINO),
    }[name]


def _adapter_version(name: str) -> int:
    from pipeline.scorers.worker.adapters import cotracker, depth_anything_3, hpsv3, roma

    modules = {"hpsv3": hpsv3, "depth-anything-3": depth_anything_3, "cotracker": cotracker, "roma": roma}
    return modules[name].ADAPTER


def digest_cache() -> Path:
    """Where digests of large weights are remembered."""
    return environments.home() / "digests.json"


def worker_digest(name: str, settings: WorkerSettings) -> str:
    """Identity of a scorer: its package, adapter, settings and weights; nothing is started.

    Raises DependencyError without an environment, CheckpointError without weights.
    """
    packages = environments.record(name)["packages"]
    package = {"roma": "romatch"}.get(name, name)
    try:
        weights = digest_weights(Path(settings.weights), weight_files(name, settings), digest_cache())
    except FileNotFoundError as error:
        raise CheckpointError(f"{error}; `wcpipe scorers list {name}` says where to get it") from error
    return digest_of([name, _adapter_version(name), packages.get(package), settings.measured_with(), weights])


_LIVE: dict[str, Worker] = {}


def live_worker(name: str, settings: WorkerSettings) -> Worker:
    """The worker of these settings, one for this process; it ends with it. Raises DependencyError."""
    sent = settings.model_dump(mode="json") | {"cache": str(digest_cache())}
    python = environments.record(name)["python"]
    key = json.dumps([name, python, sent], sort_keys=True)
    if key not in _LIVE:
        limits = Limits(
            batch=settings.batch,
            start=settings.start_seconds,
            item=settings.item_seconds,
            silence=settings.silence_seconds,
            tries=settings.tries,
        )
        if not _LIVE:
            atexit.register(close_workers)
        _LIVE[key] = Worker(name, Path(python), sent, device=settings.device, limits=limits)
    return _LIVE[key]


def close_workers() -> None:
    """End all workers of this process and free their memory."""
    while _LIVE:
        _LIVE.popitem()[1].close()


def open_worker(name: str, settings: WorkerSettings) -> Engine:
    """The engine of a real scorer. Raises DependencyError without an environment."""
    worker = live_worker(name, settings)
    if isinstance(settings, HPSv3Settings):
        return HPSv3Engine(worker, settings)
    if isinstance(settings, DepthAnything3Settings):
        return DepthAnything3Engine(worker, settings)
    if isinstance(settings, CoTrackerSettings | RoMaSettings):
        return WorkerTracksEngine(open_tracker(name, settings, worker))
    raise TypeError(f"no engine for {type(settings).__name__}")


def values_or_raise(outcome: Outcome) -> Values:
    """Raises RuntimeError with the worker's reason for an item that failed."""
    if isinstance(outcome, Failed):
        raise RuntimeError(outcome.reason)
    return outcome


def collect(
    outcomes: Sequence[Outcome], shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, str]
) -> Partial:
    """Outcomes of G candidates as arrays [G, ...]; `values` says which value fills which array.

    A candidate whose value has another shape than declared is missing too.
    """
    arrays: Arrays = {name: np.full((len(outcomes), *shape), np.nan) for name, shape in shapes.items()}
    reasons: dict[int, str] = {}
    for g, outcome in enumerate(outcomes):
        if isinstance(outcome, Failed):
            reasons[g] = outcome.reason
            continue
        for name, source in values.items():
            found = outcome.get(source)
            if found is None or found.shape != shapes[name]:
                shown = None if found is None else found.shape
                reasons[g] = f"the worker's {source} has shape {shown}, {shapes[name]} is needed"
                break
            arrays[name][g] = found
    return Partial(arrays, reasons)


# ---------------------------------------------------------------- quality


class HPSv3Engine:
    """HPSv3 as the quality engine: the last frame of each latent (or every n-th) for the fixed prompt, and the video's
    first frame.

    Arrays: `new_quality` float32 [G, K] and `first` [G]; with `caption` also `caption` [G, K], judged for the caption
    that the group's record holds. The scores have no bounds.
    """

    name = "hpsv3"

    def __init__(
        self, worker: Worker, settings: HPSv3Settings, caption: str | None = None, stride: int = 4
    ) -> None:
        self.worker, self.settings, self._caption = worker, settings, caption
        self.every = settings.every or stride

    def for_group(self, record: Mapping[str, Any]) -> HPSv3Engine:
        """The engine for one group: it knows its caption, and the frames of a latent (`stride`)."""
        return HPSv3Engine(
            self.worker, self.settings, str(record.get("caption", "")), int(record.get("stride", 4))
        )

    def judged(self, frames: int) -> list[int]:
        """Which of F scored frames are judged; frame 0 was there before the clip."""
        return list(range(self.every, frames, self.every))

    def arrays(self, candidates: int, frames: int, past_frames: int) -> list[ArraySpec]:
        """Raises DataError when no frame would be judged."""
        from pipeline.stores import ArraySpec

        count = len(self.judged(frames))
        if not count:
            raise DataError(
                f"score.workers.hpsv3.every is {self.every}, above the {frames - 1} frames of a clip: lower it"
            )
        specs = [
            ArraySpec("new_quality", (candidates, count), "float32"),
            ArraySpec("first", (candidates,), "float32"),
        ]
        return (
            [*specs, ArraySpec("caption", (candidates, count), "float32")] if self.settings.caption else specs
        )

    def measure(self, frames_GFHW3: Frames, past_FHW3: Frames) -> Partial:
        prompts = [self.settings.prompt]
        if self.settings.caption:
            if not self._caption:
                raise DataError(
                    "the group has no caption: score.workers.hpsv3.caption needs captioned prompts"
                )
            prompts.append(self._caption)
        at = self.judged(frames_GFHW3.shape[1])
        items = [Item(frames[at], about={"prompts": prompts}) for frames in frames_GFHW3]
        first, *found = self.worker.measure([Item(past_FHW3[:1], about={"prompts": prompts[:1]}), *items])
        partial = collect(found, {"score": (len(prompts), len(at))}, {"score": "score"})
        score_GPK = partial.arrays["score"]
        arrays: Arrays = {
            "new_quality": score_GPK[:, 0].astype(np.float32),
            "first": np.full(len(found), values_or_raise(first)["score"].item(), np.float32),
        }
        if self.settings.caption:
            arrays["caption"] = score_GPK[:, 1].astype(np.float32)
        return Partial(arrays, partial.reasons)

    def measure_past(self, past_FHW3: Frames) -> Arrays:
        return {}


# ---------------------------------------------------------------- poses


class DepthAnything3Engine:
    """Depth-Anything-3 as the pose engine: relative camera-to-world motions, in units of the depth of the frame before
    the clip, which all candidates and the clips before share. `rewards.action.scale: scene` finds what one unit is.
    """

    name = "depth-anything-3"

    def __init__(self, worker: Worker, settings: DepthAnything3Settings) -> None:
        self.worker, self.settings = worker, settings

    def arrays(self, candidates: int, frames: int, past_frames: int) -> list[ArraySpec]:
        """As the embedded pose engine: `relative` [G, F-1, 4, 4] and `past_relative` [past_frames-1, 4, 4]."""
        from pipeline.stores import ArraySpec

        specs = [ArraySpec("relative", (candidates, frames - 1, 4, 4), "float64")]
        if past_frames > 1:
            specs.append(ArraySpec("past_relative", (past_frames - 1, 4, 4), "float64"))
        return specs

    def measure(self, frames_GFHW3: Frames, past_FHW3: Frames) -> Partial:
        found = self.worker.measure([Item(frames, about={"unit_frame": 0}) for frames in frames_GFHW3])
        partial = collect(found, {"c2w": (frames_GFHW3.shape[1], 4, 4)}, {"c2w": "c2w"})
        return Partial({"relative": relative_poses(partial.arrays["c2w"])}, partial.reasons)

    def measure_past(self, past_FHW3: Frames) -> Arrays:
        if len(past_FHW3) < 2:
            return {}
        (found,) = self.worker.measure([Item(past_FHW3, about={"unit_frame": len(past_FHW3) - 1})])
        return {"past_relative": relative_poses(values_or_raise(found)["c2w"])}


# ---------------------------------------------------------------- tracks


@dataclass
class CoTrackerPairs:
    """CoTracker3 as a `Tracker`: each pair is a video of two frames, followed there and, turned round, back."""

    worker: Worker
    name: str = "cotracker"
    least_side: int = 32

    def follow(self, first_PHW3: Frames, second_PHW3: Frames, points_N2: FloatArray) -> Tracks:
        """As `Tracker.follow`; a pair that the worker cannot track has a confidence of NaN, which makes it missing."""
        check_pairs(self, first_PHW3, second_PHW3, points_N2)
        P = len(first_PHW3)
        starts = np.broadcast_to(np.asarray(points_N2, np.float32), (P, *points_N2.shape))
        end, seen, bad = self._one_way(first_PHW3, second_PHW3, starts)
        back, again, worse = self._one_way(second_PHW3, first_PHW3, np.where(np.isfinite(end), end, 0))
        confidence = np.minimum(seen, again)
        lost = ~(confidence > 0)
        end[lost], back[lost], confidence[lost] = np.nan, np.nan, 0
        confidence[bad | worse] = np.nan
        return Tracks(end, back, confidence)

    def _one_way(
        self, first_PHW3: Frames, second_PHW3: Frames, points_PN2: FloatArray
    ) -> tuple[FloatArray, FloatArray, NDArray[np.bool_]]:
        P, N = points_PN2.shape[:2]
        time_N1 = np.zeros((N, 1), np.float32)
        items = [
            Item(np.stack([one, other]), {"queries": np.concatenate([time_N1, points], axis=1)})
            for one, other, points in zip(first_PHW3, second_PHW3, points_PN2, strict=True)
        ]
        partial = collect(
            self.worker.measure(items),
            {"tracks": (2, N, 2), "visible": (2, N)},
            {"tracks": "tracks", "visible": "visible"},
        )
        bad = np.isin(np.arange(P), list(partial.reasons))
        tracks, visible = partial.arrays["tracks"], partial.arrays["visible"]
        return tracks[:, 1].astype(np.float32), visible[:, 1].astype(np.float32), bad


@dataclass
class RoMaPairs:
    """RoMa as a `Tracker`: one dense match a pair, read at the points, both ways."""

    worker: Worker
    name: str = "roma"
    least_side: int = 32

    def follow(self, first_PHW3: Frames, second_PHW3: Frames, points_N2: FloatArray) -> Tracks:
        """As `Tracker.follow`; a pair that the worker cannot match has a confidence of NaN, which makes it missing."""
        check_pairs(self, first_PHW3, second_PHW3, points_N2)
        N, points = len(points_N2), np.asarray(points_N2, np.float32)
        items = [
            Item(np.stack(pair), {"points": points}) for pair in zip(first_PHW3, second_PHW3, strict=True)
        ]
        names = {"end": (N, 2), "back": (N, 2), "confidence": (N,)}
        partial = collect(self.worker.measure(items), names, {name: name for name in names})
        arrays = {name: array.astype(np.float32) for name, array in partial.arrays.items()}
        lost = arrays["confidence"] <= 0
        arrays["end"][lost], arrays["back"][lost] = np.nan, np.nan
        return Tracks(arrays["end"], arrays["back"], arrays["confidence"])


def open_tracker(
    name: str, settings: WorkerSettings, worker: Worker | None = None
) -> CoTrackerPairs | RoMaPairs:
    """A real tracker by name, for rewards or evaluation. Raises DependencyError without an environment."""
    worker = worker or live_worker(name, settings)
    return CoTrackerPairs(worker) if name == "cotracker" else RoMaPairs(worker)


class WorkerTracksEngine(TracksEngine):
    """The tracks engine with a real tracker."""

    def __init__(self, tracker: CoTrackerPairs | RoMaPairs) -> None:
        super().__init__(tracker)
        self.name = tracker.name
