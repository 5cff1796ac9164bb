"""One run of `dvc repro` that the fault campaign disturbs: what it looks at, and what its operator does.

The faults themselves are in slurm_injections.py.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.slurm_world import Cluster, Project
from pipeline.errors import DataError
from pipeline.stores import GroupStore
from stages.jobs import RUNNING, JobFolder

STAGES = ("prefix", "rollout", "score")
STORES = ("prefixes.zarr", "rollouts.zarr", "scores.zarr/pose", "scores.zarr/critic")


class Missed(Exception):
    """The stage ended before the fault could be injected."""


class Run:
    """One disturbed `dvc repro`: started, struck, started again, and watched for work that is done twice."""

    def __init__(self, project: Project, cluster: Cluster, dice: random.Random, target: str) -> None:
        self.project, self.cluster, self.dice, self.target = project, cluster, dice, target
        self.repros = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.helpers: list[subprocess.Popen[bytes]] = []
        self.undo: list[Callable[[], object]] = []
        self.damaged: set[Path] = set()
        self._seen: dict[Path, int] = {}

    # ---------------------------------------------------------------- the repro

    def start(self) -> None:
        self.repros += 1
        self.process = self.project.start(sys.executable, "-m", "dvc", "repro", self.target)

    def alive(self) -> bool:
        assert self.process is not None
        return self.process.poll() is None

    def finish(self) -> None:
        """Start it again until it succeeds and finds nothing damaged."""
        for _ in range(12):
            assert self.process is not None
            code = self.process.wait(timeout=900)
            self.restore(again=False)
            broken = self.wcpipe("verify", "artifacts") == 5
            if broken:
                self.wcpipe("verify", "--repair", "artifacts")
            elif code == 0:
                for helper in self.helpers:
                    helper.wait(timeout=300)
                self.cluster.idle()
                return
            self.start()
        raise RuntimeError(f"does not complete: {self.project.output()[-3000:]}")

    def wcpipe(self, *arguments: str) -> int:
        return self.project.start("wcpipe", *arguments, launcher="local").wait(timeout=300)

    def restore(self, again: bool = True) -> None:
        """Undo what an operator would: free the disk, give files back, raise nodes; start a dead repro `again`."""
        for action in reversed(self.undo):
            action()
        self.undo.clear()
        self.cluster.raise_drained()
        if again and self.process is not None and self.process.poll() not in (None, 0):
            self.start()

    # ---------------------------------------------------------------- looking

    def strike(self) -> None:
        """Note which groups are finished now: none of them may be made again, unless it gets damaged."""
        for name in STORES:
            try:
                store = GroupStore.open(self.project.folder / "artifacts" / "e001" / name)
                done = store.done()
            except (DataError, OSError):
                continue
            for index in range(len(store)):
                path = store.record_path(index)
                if done[index] and path not in self._seen:
                    try:
                        self._seen[path] = path.stat().st_mtime_ns
                    except OSError:
                        continue

    def made_twice(self) -> list[str]:
        """Groups that were finished at some fault, were not damaged, and have another record now."""
        root = self.project.folder
        return sorted(
            str(path.relative_to(root))
            for path, before in self._seen.items()
            if path not in self.damaged and path.stat().st_mtime_ns != before
        )

    def folder(self, stage: str) -> JobFolder:
        return JobFolder(self.project.folder / "artifacts", "e001", stage)

    def running(
        self, stages: Sequence[str] = (*STAGES, "advantage", "update"), seconds: float = 240
    ) -> tuple[str, int, str, int]:
        """(stage, task, ARRAY_TASK, pid of its batch process) of a task of `stages` that runs now; waits for one."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found = []
            for stage in stages:
                folder = self.folder(stage)
                record = folder.read() if (folder.path / "job.json").exists() else None
                for task in record.all_tasks if record is not None else []:
                    said = folder.task(task)
                    alive = said.get("state") == RUNNING and Path(f"/proc/{said['pid']}").exists()
                    if alive and record is not None and said["token"] == record.token:
                        found.append((stage, task, said["job"], said["pid"]))
            if found:
                time.sleep(self.dice.uniform(0.0, 1.0))
                self.strike()
                stage, task, job, pid = self.dice.choice(found)
                if Path(f"/proc/{pid}").exists():
                    return stage, task, job, pid
            if not self.alive():
                if self.process is not None and self.process.returncode == 0:
                    raise Missed
                self.start()
            time.sleep(0.05)
        raise Missed

    def client(self) -> int:
        """Pid of the waiting `wcpipe` that dvc started."""
        assert self.process is not None
        until = time.monotonic() + 60
        while time.monotonic() < until and self.alive():
            for pid in descendants(self.process.pid):
                if "/wcpipe\0" in command_line(pid):
                    return pid
            time.sleep(0.05)
        raise Missed


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return found
    for child in children:
        found += [int(child), *descendants(int(child))]
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").rstrip("\0")
    except OSError:
        return ""


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError as error:
        raise Missed from error
