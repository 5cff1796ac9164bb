"""The records of a stage that runs on the cluster: which jobs it was given to, and how each task ended.

They lie in `<root>/log/cluster/<epoch>/<stage>/`, beside the artifacts and in none of them:

    job.json       which command and parameters, job ids, attempts; written before and after each submission
    params.yaml    the parameters as they were when it was submitted: editing the file does not reach queued tasks
    job.sbatch     the script
    tasks/3.json   how task 3 ended, written by itself; this, and not SLURM's word, says that it is finished
    logs/3.log     what it printed
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline import files
from pipeline.errors import DataError

SUBMITTING, SUBMITTED, FINISHED, CANCELLED = "submitting", "submitted", "finished", "cancelled"
DONE, RUNNING, STOPPED, FAILED = "done", "running", "stopped", "failed"


@dataclass
class JobRecord:
    """job.json. `ids` are the arrays submitted for it, in order; `token` marks one submission of the stage."""

    stage: str
    epoch: str
    command: list[str]
    fingerprint: str
    tasks: int
    state: str = SUBMITTING
    token: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    ids: list[str] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)  # tasks of a submission whose job id is not known yet
    attempts: dict[str, int] = field(default_factory=dict)  # task -> how often it was submitted
    since: float = field(default_factory=time.time)
    dependency: str = ""

    def name(self) -> str:
        """Of the newest submission in SLURM; unique, so it can be found when its id was lost."""
        return f"wcpipe.{self.epoch}.{self.stage}.{self.token}.{len(self.ids)}"

    @property
    def all_tasks(self) -> list[int]:
        return list(range(1, self.tasks + 1))


class JobFolder:
    """One stage's records below `<root>/log/cluster`."""

    def __init__(self, root: Path, epoch: str, stage: str) -> None:
        self.path = root / "log" / "cluster" / epoch / stage
        self.epoch, self.stage = epoch, stage

    @staticmethod
    def all_below(root: Path) -> list[JobFolder]:
        """Every stage that was ever submitted, in order of submission."""
        found = [
            JobFolder(root, path.parent.parent.name, path.parent.name)
            for path in sorted((root / "log" / "cluster").glob("*/*/job.json"))
        ]
        return sorted(found, key=lambda folder: (record := folder.read()) is not None and record.since)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One client decides at a time; the kernel drops the lock with the process."""
        with files.locked(self.path / "job.json"):
            yield

    def read(self) -> JobRecord | None:
        """The record, or None when the stage was never submitted. Raises DataError when it is damaged."""
        path = self.path / "job.json"
        if not path.exists():
            return None
        data = files.read_json(
            path, "delete that folder; its jobs, if any live, have to be cancelled by hand"
        )
        try:
            return JobRecord(**data)
        except TypeError as error:
            raise DataError(f"{path}: is of another version ({error}); delete that folder") from error

    def write(self, record: JobRecord) -> None:
        files.write_json(self.path / "job.json", asdict(record))

    def log(self, task: int) -> Path:
        return self.path / "logs" / f"{task}.log"

    # ---------------------------------------------------------------- tasks

    def task(self, number: int) -> dict[str, Any]:
        """What the task said of itself; empty when it never ran or its record is unreadable."""
        try:
            return files.read_json(self.path / "tasks" / f"{number}.json", "")
        except DataError:
            return {}

    def write_task(self, number: int, content: dict[str, Any]) -> None:
        files.write_json(self.path / "tasks" / f"{number}.json", content)

    def finished(self, record: JobRecord) -> list[int]:
        """Tasks of this submission that said that they are done."""
        return [task for task in record.all_tasks if self.is_done(record, task)]

    def is_done(self, record: JobRecord, task: int) -> bool:
        return self.is_done_by(record.token, task)

    def is_done_by(self, token: str, task: int) -> bool:
        said = self.task(task)
        return said.get("token") == token and said.get("state") == DONE

    def last_words(self, task: int, lines: int = 1) -> str:
        """The end of a task's log, for error messages."""
        try:
            with self.log(task).open("rb") as file:
                file.seek(max(0, self.log(task).stat().st_size - 4096))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])
