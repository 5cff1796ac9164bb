"""Which engine measures what: `rewards.<section>.scorer` names it, and a store belongs to what is measured.

Three measurements feed rewards: camera poses (`pose`), visual quality (`critic`) and tracks of points (`tracks`). Each
has an embedded engine and may have a real scorer instead. What is stored has the measurement's name and the engine's
identity in its inputs, so another scorer measures that again and nothing else: no rollout, no other measurement.

Nothing here imports torch or zarr: params.yaml is checked with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from pipeline.errors import ConfigError
from pipeline.scorers import registry
from pipeline.scorers.worker_settings import SETTINGS, worker_settings

if TYPE_CHECKING:
    from pipeline.config import Params
    from pipeline.scorers.registry import Engine

# measurement -> (section of params.yaml's `rewards`, the embedded engine's name there, real scorers of the same)
MEASUREMENTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "pose": ("action", "pose", ("depth-anything-3",)),
    "critic": ("quality", "critic", ("hpsv3",)),
    "tracks": ("closure", "lucas-kanade", ("cotracker",)),
}
WITHOUT_UNITS = frozenset({"depth-anything-3"})  # poses up to one factor a scene


@dataclass(frozen=True)
class Choice:
    """The engine that measures `measurement`: an embedded one with weights in `folder`, or the worker `worker`."""

    measurement: str
    folder: Path
    workers: Mapping[str, Any]
    worker: str | None = None

    def digest(self) -> str:
        """Identity of the engine. CheckpointError or DependencyError where weights or packages are missing."""
        if self.worker is None:
            return registry.engine_digest(self.measurement, self.folder)
        from pipeline.scorers.workers import worker_digest

        return worker_digest(self.worker, worker_settings(self.worker, self.workers))

    def open(self) -> Engine:
        """The engine. A worker starts with the first clip it gets. Raises as `digest`, ConfigError for no engine."""
        if self.worker is None:
            return registry.open_engine(self.measurement, self.folder)
        from pipeline.scorers.workers import open_worker

        return open_worker(self.worker, worker_settings(self.worker, self.workers))

    def release(self) -> None:
        """Between two epochs: end a worker that is not to be kept."""
        if self.worker is not None and not worker_settings(self.worker, self.workers).keep:
            from pipeline.scorers.workers import close_workers

            close_workers()


def choose(measurement: str, params: Params) -> Choice:
    """The engine that params.yaml names for a measurement of `score.scorers`."""
    folder, workers = Path(params.score.weights), params.score.workers
    if measurement in SETTINGS:  # a real scorer beside the embedded one, whose values no reward reads
        return Choice(measurement, folder, workers, measurement)
    section, embedded, _ = MEASUREMENTS.get(measurement, ("", "", ()))
    named = (params.rewards.get(section) or {}).get("scorer", embedded) if section else embedded
    return Choice(measurement, folder, workers, None if named == embedded else named)


def check(params: Params, source: str, at: str = "") -> None:
    """Check scorers, their settings and what depends on them. Raises ConfigError."""
    from pipeline.config import nearest, validate

    known = [*registry.ENGINES, *SETTINGS]
    for scorer in params.score.scorers:
        if scorer not in known:
            raise ConfigError(
                f"{source}: {at}score.scorers: unknown scorer {scorer!r}; {nearest(scorer, known)}"
            )
    for name, data in params.score.workers.items():
        key = f"{at}score.workers.{name}"
        if name not in SETTINGS:
            raise ConfigError(f"{source}: unknown key {key!r}; {nearest(name, list(SETTINGS))}")
        validate(SETTINGS[name], data or {}, source, at=f"{key}.")
    for section, embedded, real in MEASUREMENTS.values():
        named = (params.rewards.get(section) or {}).get("scorer", embedded)
        if named not in (embedded, *real):
            raise ConfigError(
                f"{source}: {at}rewards.{section}.scorer is {named!r}; known here: {', '.join((embedded, *real))}"
            )
    _check_needs(params, source, at)


def _check_needs(params: Params, source: str, at: str) -> None:
    sections = {name: params.rewards.get(name) or {} for name in ("action", "quality", "closure")}
    poses = sections["action"].get("scorer", "pose")
    if poses in WITHOUT_UNITS:
        why = f"but {poses} measures without units: set it to scene"
        if sections["action"].get("scale", "auto") == "world":
            raise ConfigError(f"{source}: {at}rewards.action.scale is 'world', {why}")
        gated = sections["closure"].get("gated", True)
        if (
            "tracks" in params.score.scorers
            and gated
            and sections["closure"].get("scale", "world") == "world"
        ):
            raise ConfigError(f"{source}: {at}rewards.closure.scale is 'world', {why}")
    if "quality_caption" in params.advantage.weights:
        hpsv3 = params.score.workers.get("hpsv3") or {}
        if sections["quality"].get("scorer") != "hpsv3" or not hpsv3.get("caption"):
            raise ConfigError(
                f"{source}: {at}advantage.weights.quality_caption needs rewards.quality.scorer: hpsv3 and "
                "score.workers.hpsv3.caption: true"
            )


def settings_of(name: str, params: Params) -> Any:
    """The settings of a worker, for `wcpipe scorers`. Raises ConfigError."""
    try:
        return worker_settings(name, params.score.workers)
    except ValidationError as error:
        raise ConfigError(f"score.workers.{name}: {error.errors()[0]['msg']}") from error
