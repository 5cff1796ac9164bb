"""conf/cluster.yaml: where stages run, and what each asks of SLURM.

WHY a file of its own: no stage depends on it, so another partition or another number of tasks redoes nothing. It is
read as strictly as params.yaml: a misspelt key would silently ask for the wrong machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from pipeline.config import Section, merge, nearest, read_yaml, validate
from pipeline.errors import ConfigError

FILE = Path("conf/cluster.yaml")
Launcher = Literal["local", "slurm"]
SHARDED = ("prefix", "rollout", "score")
STAGES = ("base", *SHARDED, "advantage", "update", "evaluate", "report")
EARLY = 60  # SLURM may send the warning signal this many seconds early (man sbatch, --signal)


class Resources(Section):
    """What one task of a stage gets. Empty values are left out of the script: the cluster's defaults hold."""

    launcher: Launcher | None = Field(None, description="where this stage runs; empty: as `launcher` says")
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gres: str | None = Field(None, description="such as gpu:h20:1, for each node of a task")
    time: int = Field(60, ge=1, description="minutes")
    cpus: int | None = Field(None, ge=1, description="cores a task")
    mem: str | None = Field(None, description="memory a node, such as 64G")
    nodes: int = Field(1, ge=1, description="nodes of one task; more than 1 for `update` only")
    processes: int = Field(1, ge=1, description="torchrun ranks a node; one a GPU; `update` only")
    tasks: int = Field(
        1, ge=1, description="array tasks that share the groups; prefix, rollout and score only"
    )
    throttle: int | None = Field(None, ge=1, description="array tasks that run at a time")
    extra: list[str] = Field([], description="further sbatch options, such as --constraint=h20")

    @property
    def ranks(self) -> int:
        return self.nodes * self.processes


class Polling(Section):
    """How the waiting client asks SLURM."""

    every: float = Field(10.0, gt=0, description="seconds between two questions")
    timeout: float = Field(
        20.0, gt=0, description="seconds until a SLURM command that does not answer is ended"
    )
    lost: float = Field(
        300.0,
        gt=0,
        description="seconds a task may be unknown to a SLURM that answers, until it counts as lost",
    )


class ClusterConfig(Section):
    """All of conf/cluster.yaml."""

    launcher: Launcher = Field("local", description="local: stages run in this process; slurm: as array jobs")
    setup: list[str] = Field(
        [], description="lines of shell before the stage, such as source .venv/bin/activate"
    )
    container: str = Field(
        "", description="put before the stage's command, such as apptainer exec --nv wcpipe.sif"
    )
    signal: Literal["USR1", "USR2"] = Field("USR2", description="what SLURM sends before the time limit")
    margin: int = Field(120, ge=10, description="seconds before the time limit at which it is sent")
    retries: int = Field(3, ge=0, description="how often a task that was killed is run again")
    restarts: int = Field(20, ge=0, description="how often a task that met its time limit is queued again")
    polling: Polling = Polling()
    defaults: Resources = Resources()
    stages: dict[str, dict[str, Any]] = Field({}, description="overrides of `defaults`, by stage")

    @model_validator(mode="after")
    def _sensible(self) -> ClusterConfig:
        for stage in self.stages:
            if stage not in STAGES:
                raise ValueError(f"stages.{stage}: no such stage; {nearest(stage, STAGES)}")
            self.resources(stage)
        return self

    def resources(self, stage: str) -> Resources:
        """What `stage` asks for: `defaults` with its overrides. Raises ConfigError."""
        data = merge(self.defaults.model_dump(mode="json"), self.stages.get(stage, {}))
        found = validate(Resources, data, str(FILE), at=f"stages.{stage}.")
        at = f"{FILE}: stages.{stage}"
        if stage in self.stages or stage == "update":
            if found.tasks > 1 and stage not in SHARDED:
                raise ConfigError(
                    f"{at}.tasks is {found.tasks}: only {', '.join(SHARDED)} have parts; write 1"
                )
            if found.ranks > 1 and stage != "update":
                raise ConfigError(
                    f"{at}: only update uses several nodes or processes; give {stage} more tasks"
                )
        if self.margin + EARLY >= found.time * 60:
            raise ConfigError(
                f"{at}.time is {found.time} minutes: SLURM may send the signal {EARLY} s early, so it has to be more "
                f"than margin + {EARLY} = {self.margin + EARLY} s; raise it or lower margin"
            )
        return found

    def tasks(self, stage: str, groups: int, block: int) -> int:
        """Array tasks of `stage`: never more than there are zarr shards to share."""
        return min(self.resources(stage).tasks, -(-groups // block)) if stage in SHARDED else 1

    def launches(self, stage: str) -> bool:
        """Whether `stage` goes to SLURM. WCPIPE_LAUNCHER=local|slurm overrides the file. Raises ConfigError."""
        if (forced := os.environ.get("WCPIPE_LAUNCHER")) not in (None, "", "local", "slurm"):
            raise ConfigError(f"WCPIPE_LAUNCHER is {forced!r}: write local or slurm")
        general = forced or self.launcher
        return general == "slurm" and self.resources(stage).launcher != "local"


def load_cluster(path: Path | None = None) -> ClusterConfig:
    """Read `path`, WCPIPE_CLUSTER or conf/cluster.yaml; without a file, everything runs here. Raises ConfigError."""
    named = path or (Path(os.environ["WCPIPE_CLUSTER"]) if os.environ.get("WCPIPE_CLUSTER") else None)
    if named is None and not FILE.exists():
        return ClusterConfig()
    return parse_cluster(read_yaml(named or FILE), str(named or FILE))


def parse_cluster(data: Mapping[str, Any], source: str = str(FILE)) -> ClusterConfig:
    """Validate the contents of the file. Raises ConfigError."""
    return validate(ClusterConfig, data, source)
