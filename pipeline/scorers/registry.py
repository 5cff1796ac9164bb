"""Engines by name: what the score stage runs over the frames of a group, and what it stores of each.

An engine measures and does not judge: poses between frames, one quality a frame. Judging (thresholds, weights) is done
by the rewards in the advantage stage, so changing a threshold measures nothing again. A measurement that failed is
missing, with a reason: NaN in its arrays, never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from pipeline.digests import digest_file, digest_of
from pipeline.errors import CheckpointError, ConfigError, ScorerUnavailable
from pipeline.scorers.frames import fit_frames

if TYPE_CHECKING:
    from pipeline.stores import ArraySpec

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Partial:
    """What `measure` returns when it knows why some of its videos (by their place) are missing."""

    arrays: Arrays
    reasons: dict[int, str]


class Engine(Protocol):
    """Measures videos."""

    name: str

    def arrays(self, candidates: int, frames: int, past_frames: int) -> list[ArraySpec]:
        """What is stored of one group: arrays of `measure` (first axis G), then those of `measure_past`."""

    def measure(self, frames_GFHW3: NDArray[np.uint8], past_FHW3: NDArray[np.uint8]) -> Arrays | Partial:
        """Raw values of G videos; frame 0 is the one before the first action. `past_FHW3` is the decoded prefix, whose
        first frame is that of the whole video. Values that could not be measured are NaN; `Partial` says why.
        """

    def measure_past(self, past_FHW3: NDArray[np.uint8]) -> Arrays:
        """Raw values of the prefix, shared by the group; nothing where the prefix is a single frame."""


@runtime_checkable
class AsksRecord(Protocol):
    """An engine that must know more of a group than its frames, such as its caption."""

    def for_group(self, record: Mapping[str, Any]) -> Engine:
        """The engine for the group of this record of `prefixes.zarr`."""


@dataclass(frozen=True)
class Measured:
    """Arrays of one group and why candidates are missing from them (candidate -> reason)."""

    arrays: Arrays
    reasons: dict[int, str]


class PoseEngine:
    """The embedded pose network: relative camera-to-world motion between neighbouring frames, in units of the world.

    It measures the prefix too: a scene's pose scale is fitted from its first frame on, not per clip (DESIGN 6.4).
    """

    name = "pose"

    def __init__(self, folder: Path) -> None:
        from pipeline.scorers.pose_net import PoseScorer

        self._scorer = PoseScorer.load(folder)
        config = self._scorer.net.config
        self.frame_size: tuple[int, int] | None = (config.height, config.width)

    def arrays(self, candidates: int, frames: int, past_frames: int) -> list[ArraySpec]:
        """`relative` float64 [G, F-1, 4, 4]; `past_relative` float64 [past_frames-1, 4, 4]."""
        # imported here, so that reading params.yaml, which looks up ENGINES, needs no zarr
        from pipeline.stores import ArraySpec

        specs = [ArraySpec("relative", (candidates, frames - 1, 4, 4), "float64")]
        if past_frames > 1:
            specs.append(ArraySpec("past_relative", (past_frames - 1, 4, 4), "float64"))
        return specs

    def measure(self, frames_GFHW3: NDArray[np.uint8], past_FHW3: NDArray[np.uint8]) -> Arrays:
        return {"relative": self._scorer.relative(frames_GFHW3)}

    def measure_past(self, past_FHW3: NDArray[np.uint8]) -> Arrays:
        return {"past_relative": self._scorer.relative(past_FHW3[None])[0]} if len(past_FHW3) > 1 else {}


class CriticEngine:
    """The embedded preference critic: one quality a frame, and that of the video's first frame."""

    name = "critic"

    def __init__(self, folder: Path) -> None:
        from pipeline.scorers.critic import CriticScorer
        from pipeline.scorers.pose_net import PoseNetConfig

        self._scorer = CriticScorer.load(folder)
        # it takes any size, but was trained on frames of the pose network's
        self.frame_size: tuple[int, int] | None = (PoseNetConfig().height, PoseNetConfig().width)

    def arrays(self, candidates: int, frames: int, past_frames: int) -> list[ArraySpec]:
        """`quality` float32 [G, F], of each frame; `first` float32 [G], the same for all candidates."""
        from pipeline.stores import ArraySpec

        return [
            ArraySpec("quality", (candidates, frames), "float32"),
            ArraySpec("first", (candidates,), "float32"),
        ]

    def measure(self, frames_GFHW3: NDArray[np.uint8], past_FHW3: NDArray[np.uint8]) -> Arrays:
        G, F = frames_GFHW3.shape[:2]
        flat = np.concatenate([frames_GFHW3.reshape(G * F, *frames_GFHW3.shape[2:]), past_FHW3[:1]])
        scores = self._scorer.score(flat)
        return {"quality": scores[:-1].reshape(G, F), "first": np.repeat(scores[-1:], G)}

    def measure_past(self, past_FHW3: NDArray[np.uint8]) -> Arrays:
        return {}


@dataclass(frozen=True)
class EngineKind:
    """How an engine is loaded from `score.weights`, and what its identity is made of.

    files     names of its files in that folder, digested; none for an engine without weights
    version   raise it when a change of the engine's code changes what it measures
    """

    load: Callable[[Path], Engine]
    files: tuple[str, ...] = ()
    version: int = 1


def _tracks(folder: Path) -> Engine:
    from pipeline.scorers.tracks import TracksEngine

    return TracksEngine()


ENGINES: dict[str, EngineKind] = {
    "pose": EngineKind(PoseEngine, ("pose_net.safetensors", "pose_net.json")),
    "critic": EngineKind(CriticEngine, ("critic.safetensors", "critic.json")),
    "tracks": EngineKind(_tracks),
}


def open_engine(name: str, folder: Path) -> Engine:
    """Load an engine from its folder. Raises ConfigError for an unknown name, CheckpointError for bad weights."""
    return _kind(name).load(folder)


def engine_digest(name: str, folder: Path) -> str:
    """Identity of an engine: its version and files; nothing is loaded. Raises CheckpointError when one is missing."""
    kind = _kind(name)
    for file in kind.files:
        if not (folder / file).exists():
            raise CheckpointError(
                f"{folder / file}: is missing; restore the shipped weights or train the scorer again"
            )
    return digest_of([name, kind.version, *(digest_file(folder / file) for file in kind.files)])


def _kind(name: str) -> EngineKind:
    if name not in ENGINES:
        raise ConfigError(f"score.scorers: unknown scorer {name!r}; known: {', '.join(ENGINES)}")
    return ENGINES[name]


def measure_group(
    engine: Engine,
    frames_GFHW3: NDArray[np.uint8],
    past_FHW3: NDArray[np.uint8],
    unusable: dict[int, str],
    known: Measured | None = None,
) -> Measured:
    """Measure one group: candidates in `unusable` are missing from the start; with `known`, only its missing ones are
    measured again. An engine that fails makes the candidates it was given missing, with its error as the reason; so
    does a prefix that cannot be measured, since all candidates of the group are judged against it.
    """
    G, F = frames_GFHW3.shape[:2]
    if known is None:
        specs = engine.arrays(G, F, len(past_FHW3))
        arrays = {spec.name: np.full(spec.shape, np.nan, spec.stored_dtype) for spec in specs}
        wanted = [g for g in range(G) if g not in unusable]
    else:
        arrays = {name: value.copy() for name, value in known.arrays.items()}
        wanted = [g for g in known.reasons if g not in unusable]
    reasons = dict(unusable)
    if not wanted:
        return Measured(arrays, reasons)
    size = getattr(engine, "frame_size", None)  # of what the engine was trained on; without one it takes any
    if size is not None:
        frames_GFHW3, past_FHW3 = fit_frames(frames_GFHW3, size), fit_frames(past_FHW3, size)
    measured = {name: value.copy() for name, value in arrays.items()}
    try:
        answer = engine.measure(frames_GFHW3[wanted], past_FHW3)
        found, known_reasons = (
            (answer.arrays, answer.reasons) if isinstance(answer, Partial) else (answer, {})
        )
        past = {name: value for name, value in measured.items() if name not in found}
        # a prefix that was measured before stays: other candidates were judged against it
        if not _finite(past):
            for name, values in engine.measure_past(past_FHW3).items():
                past[name][...] = values
        for name, values in found.items():
            measured[name][wanted] = values
    # Any error, a bug of the engine included: hours of other groups must not end with one clip that it cannot read.
    # It is not hidden: the reason is stored, and a scorer that fails everywhere exceeds score.missing_share. Running
    # out of memory is an error of this clip like any other. KeyboardInterrupt is no Exception and does stop the stage,
    # and so does a worker that cannot be used for any clip.
    except ScorerUnavailable:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return Measured(arrays, reasons | dict.fromkeys(wanted, text))
    if not _finite(past):
        text = f"{engine.name} returned a value that is not finite for the clips before"
        return Measured(arrays, reasons | dict.fromkeys(wanted, text))
    for place, g in enumerate(wanted):
        if place in known_reasons or not _finite({name: measured[name][g] for name in found}):
            reasons[g] = known_reasons.get(place, f"{engine.name} returned a value that is not finite")
            for name in found:  # all of a candidate is missing or nothing
                measured[name][g] = np.nan
    return Measured(measured, reasons)


def _finite(arrays: Arrays) -> bool:
    return all(bool(np.isfinite(value).all()) for value in arrays.values())
