"""`wcpipe scorers check`: one real scorer, through its own worker and engine, on a clip that is known exactly.

The clip is a fixed path through a mini room. A pose scorer must find the path, and a wrong convention is named; HPSv3
must prefer the clip to its noise; a tracker must follow points of a still camera to where they are. With random weights
only the machinery is proved, and the findings say so.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from pipeline.errors import DependencyError, ScorerUnavailable
from pipeline.scorers import environments
from pipeline.scorers.conventions import judge, known_path
from pipeline.scorers.registry import measure_group
from pipeline.scorers.worker_settings import SETTINGS, WorkerSettings
from pipeline.scorers.workers import close_workers, live_worker, open_tracker, open_worker, worker_digest

MAKE_RANDOM = Path(__file__).parent / "worker" / "random_weights.py"
SMALL: dict[str, dict[str, Any]] = {  # what makes random weights quick enough for a CPU
    "hpsv3": {"images": 2},
    "depth-anything-3": {"resolution": 56},
    "cotracker": {"resolution": [64, 96]},
    "roma": {"resolution": 112, "upsample": 0},
}
Say = Callable[[str], None]


def make_random_weights(name: str, folder: Path) -> None:
    """Write random weights in the scorer's own formats, by its own packages. Raises DependencyError."""
    python = environments.record(name)["python"]
    command = [python, str(MAKE_RANDOM), name, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise DependencyError(f"{name}: its packages made no random weights ({last[:200]})")


def check_scorer(name: str, settings: WorkerSettings, say: Say, random: bool = False) -> dict[str, Any]:
    """Run the scorer and return what was found: version, weights, `passed` and findings (lines).

    `random` makes random weights first and asks nothing of their values but that they are numbers. Raises
    DependencyError without an environment or with a worker that cannot be used.
    """
    environments.about(name)
    with TemporaryDirectory() as temporary:
        if random:
            say(f"{name}: making random weights")
            make_random_weights(name, Path(temporary))
            settings = type(settings).model_validate(
                settings.model_dump() | SMALL[name] | {"weights": temporary, "device": "cpu"}
            )
        say(f"{name}: measuring")
        digest = worker_digest(name, settings)
        worker = live_worker(name, settings)
        try:
            passed, findings = CHECKS[name](settings, random)
            return {
                "scorer": name,
                "version": worker.version,
                "weights": "random" if random else worker.weights,
                "digest": digest,
                "passed": passed,
                "findings": findings,
            }
        except ScorerUnavailable as error:
            log = worker.log().strip()
            raise ScorerUnavailable(f"{error}\n{log[-4000:]}" if log else str(error)) from error
        finally:
            close_workers()


Found = tuple[bool, list[str]]


def _quality(settings: WorkerSettings, random: bool) -> Found:
    frames, _ = known_path()
    noise = np.random.default_rng(0).integers(0, 256, frames.shape, dtype=np.uint8)
    engine: Any = open_worker("hpsv3", settings)
    engine = engine.for_group({"caption": "a room"})
    measured = measure_group(engine, np.stack([frames, noise]), frames[:1], {})
    if measured.reasons:
        return False, [f"missing: {reason}" for reason in measured.reasons.values()]
    clean, noisy = measured.arrays["new_quality"].mean(axis=1)
    found = f"clean {clean:.3f}, noise {noisy:.3f}"
    return random or bool(clean > noisy), [
        found if random or clean > noisy else f"{found}: the wrong way round"
    ]


def _poses(settings: WorkerSettings, random: bool) -> Found:
    frames, true_c2w = known_path()
    measured = measure_group(open_worker("depth-anything-3", settings), frames[None], frames[:1], {})
    if measured.reasons:
        return False, [f"missing: {reason}" for reason in measured.reasons.values()]
    poses = [np.eye(4)]
    for motion in measured.arrays["relative"][0]:
        poses.append(poses[-1] @ motion)
    verdict = judge(np.stack(poses), true_c2w)
    return random or verdict.name == "right", [str(verdict)]


def _tracks(name: str) -> Callable[[WorkerSettings, bool], Found]:
    def check(settings: WorkerSettings, random: bool) -> Found:
        frames, _ = known_path()
        tracker = open_tracker(name, settings)
        points = np.stack(np.meshgrid(np.arange(8.0, 56, 8), np.arange(8.0, 32, 8)), -1).reshape(-1, 2)
        tracks = tracker.follow(frames[:1], frames[:1], points.astype(np.float32))
        if np.isnan(tracks.confidence_PN).any():
            return False, ["missing: the worker could not track a pair of equal frames"]
        kept = tracks.confidence_PN[0] > 0
        off = np.linalg.norm(tracks.end_PN2[0] - points, axis=1)[kept]
        median = float(np.median(off)) if len(off) else float("nan")
        good = len(off) >= len(points) / 2 and median < 0.5
        found = f"a frame and itself: {len(off)} of {len(points)} points kept, median error {median:.2f} px"
        return random or good, [found]

    return check


CHECKS: dict[str, Callable[[WorkerSettings, bool], Found]] = {
    "hpsv3": _quality,
    "depth-anything-3": _poses,
    "cotracker": _tracks("cotracker"),
    "roma": _tracks("roma"),
}
assert set(CHECKS) == set(SETTINGS) == set(SMALL)
