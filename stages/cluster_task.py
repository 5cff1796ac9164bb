"""`wcpipe cluster task`: the process that SLURM starts. It runs the stage and sees to it that its end is known.

The stage is a child; signals are passed on as TERM, which every stage understands: it stops after the item in progress.
How it ended goes to a record of this task's own, and only then may the task be queued again: `scontrol requeue` from
inside ends the job at once, so nothing comes after it (spec cluster A).

| the stage ended | then |
|---|---|
| with 0 | the task is done |
| because of SLURM's warning (time limit), or a TERM while SLURM lets the job run | queued again, --restarts times |
| because SLURM is ending the job (preemption, scancel) | SLURM queues it again itself, or not, as it was told |
| killed by a signal that nobody announced (kill -9, out of memory) | queued again, --retries times |
| with another exit code | failed: running it again would fail alike |

torchrun ends with 1 whatever ended its ranks; with --ranks above 1 that exit code counts as killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from pipeline.errors import ClusterError, DataError, UsageError
from stages.jobs import DONE, FAILED, RUNNING, STOPPED, JobFolder
from stages.slurm import Slurm

_PDEATHSIG = 1  # <sys/prctl.h>
SLURM_ENDS = "SLURM is ending the job"
TEMPORARY = 75  # errors.Interrupted: the stage says that it stopped because it was asked to
KILLED = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)


class Task:
    """One run of one array task."""

    def __init__(self, folder: JobFolder, token: str, number: int, identity: str, restarts: int) -> None:
        self.folder, self.token, self.number = folder, token, number
        self.identity = identity  # ARRAY_TASK
        self.restarts = restarts
        self.asked: str | None = None
        self.history: list[str] = []
        self._child: subprocess.Popen[bytes] | None = None
        self._started = time.time()

    @staticmethod
    def from_environment(path: Path) -> Task:
        """Raises UsageError outside a SLURM array task, DataError without the job's record."""
        try:
            array, number = os.environ["SLURM_ARRAY_JOB_ID"], os.environ["SLURM_ARRAY_TASK_ID"]
        except KeyError as error:
            raise UsageError(
                "cluster task runs inside an array task only; use `wcpipe cluster submit`"
            ) from error
        folder = JobFolder(path.parents[3], path.parent.name, path.name)
        record = folder.read()
        if record is None:
            raise DataError(f"{path}/job.json: is missing; submit the stage again")
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        task = Task(folder, record.token, int(number), f"{array}_{number}", restarts)
        before = folder.task(task.number)
        if before.get("token") == record.token:
            ended = before.get("why") or f"died without a word on {before.get('node') or 'its node'}"
            task.history = [*before.get("history", []), ended]
        return task

    def run(self, command: Sequence[str]) -> int:
        """Run the stage to its end; its exit code, as a shell gives it (128 + signal). Notes start and end."""
        for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"):
            signal.signal(getattr(signal, name), self._pass_on)
        self.note(RUNNING)
        try:
            self._child = subprocess.Popen(command, preexec_fn=die_with_parent)
        except OSError as error:
            raise ClusterError(
                f"{command[0]}: cannot be started ({error}); see `setup` in conf/cluster.yaml"
            ) from error
        if self.asked is not None:  # it came before there was a child
            self._child.terminate()
        code = self._child.wait()
        return 128 - code if code < 0 else code

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or signal.Signals(number).name
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()

    def spent(self, why: str) -> int:
        """How often it ended before in the way of `why` and was queued again by itself; SLURM's doings do not count."""
        kind = why.split(" ")[0]
        ended = [before for before in self.history if before.startswith(kind)]
        return sum(SLURM_ENDS not in before and "preempted" not in before for before in ended)

    def note(self, state: str, code: int | None = None, why: str = "") -> None:
        """Write this task's record."""
        self.folder.write_task(
            self.number,
            {
                "token": self.token,
                "state": state,
                "exit_code": code,
                "why": why,
                "history": self.history,
                "job": self.identity,
                "restarts": self.restarts,
                "node": os.environ.get("SLURMD_NODENAME", ""),
                "pid": os.getpid(),
                "started": round(self._started, 1),
                "ended": None if state == RUNNING else round(time.time(), 1),
            },
        )


def die_with_parent() -> None:
    """In the child: end when this process is killed. Not all clusters track every process of a job."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)


def run_task(
    path: Path, command: Sequence[str], warning: str, retries: int, restarts: int, ranks: int = 1
) -> int:
    """Run `command` as this array task; returns the exit code for SLURM. `warning` is the signal's name, as USR2."""
    task = Task.from_environment(path)
    if task.folder.is_done_by(task.token, task.number):
        return 0  # its end was noted, and the task was killed before SLURM learnt of it
    code = task.run(command)
    if code == 0:
        task.note(DONE, 0)
        return 0
    killed = code - 128 in [int(number) for number in KILLED] or (ranks > 1 and code == 1)
    if task.asked is None and code != TEMPORARY and not killed:
        task.note(FAILED, code)
        return code
    if task.asked is not None or code == TEMPORARY:
        why, limit = f"stopped by {task.asked or 'a signal to the stage'}", restarts
        if task.asked == f"SIG{warning}":
            why += ": the time limit was near"
    else:
        named = signal.Signals(code - 128).name if code > 128 else "what torchrun reports in its log"
        why, limit = f"killed by {named}", retries
    task.note(STOPPED, code, why)
    if task.spent(why) >= limit:
        why += f", and it was queued again {task.spent(why)} times before" if limit else ""
        remedy = "; raise its time in conf/cluster.yaml" if "time limit" in why else ""
        print(f"wcpipe: {why}: not any more{remedy}", file=sys.stderr)
        task.note(FAILED, code, why + remedy)
        return code
    _requeue(task, code, why)
    return code


def _requeue(task: Task, code: int, why: str) -> None:
    """Queue the task again, unless SLURM is ending the job: then whoever ended it told SLURM what to do with it."""
    slurm = Slurm(timeout=20.0)
    for attempt in range(6):
        try:
            state = slurm.shown(task.identity).get(task.number)
            if state is not None and state.state == "RUNNING":
                slurm.requeue(task.identity)
            elif state is not None:
                ended = state.meaning() if state.ended else SLURM_ENDS
                task.note(STOPPED, code, f"{why}: {ended}")
            return
        except ClusterError as error:
            print(f"wcpipe: {error}; attempt {attempt + 1} of 6 to queue the task again", file=sys.stderr)
            time.sleep(5.0)
