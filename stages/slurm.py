"""Talking to SLURM: every command with a time limit, and silence told apart from an answer.

WHY: a controller that restarts, a full database or a wrong munge socket make clients hang for minutes (cluster.md, A).
A command that did not answer raises `SlurmSilent`; whoever waits goes on waiting, for nothing is known then. A command
that SLURM refused raises `ClusterError` with SLURM's own words.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from pipeline.cluster import states
from pipeline.cluster.states import TaskState
from pipeline.errors import ClusterError, DependencyError

_SILENT = (
    "unable to contact slurm controller",
    "connection refused",
    "connection timed out",
    "socket timed out",
    "zero bytes were transmitted",
    "unable to connect",
    "communication",
    "error resolving",
    "protocol authentication error",
    "backup controller",
    "connect failure",
    "slurm_load_jobs error: unexpected message",
)
_UNKNOWN_JOB = ("invalid job id", "job/step already completing or completed", "invalid job array")


class SlurmSilent(ClusterError):
    """SLURM did not answer in time; nothing is known about its jobs."""


class UnknownJob(ClusterError):
    """SLURM answered that it does not know the job (any more)."""


class Slurm:
    """The client commands. `timeout` is in seconds, for each call."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._accounting: bool | None = None  # unknown until sacct has answered once

    def call(self, *command: str) -> str:
        """Standard output of a SLURM command. Raises SlurmSilent, UnknownJob, ClusterError, DependencyError."""
        if shutil.which(command[0]) is None:
            raise DependencyError(
                f"{command[0]} is not here; run this on a login node, or use launcher: local"
            )
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=self.timeout, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired as error:
            raise SlurmSilent(f"{command[0]} did not answer within {self.timeout:g} s") from error
        if done.returncode == 0:
            return done.stdout
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        if done.returncode < 0:  # the client itself was killed: it has said nothing of the job
            raise SlurmSilent(f"{command[0]} was killed by signal {-done.returncode}")
        if any(word in said.lower() for word in _SILENT):
            raise SlurmSilent(f"{command[0]}: {said}")
        if any(word in said.lower() for word in _UNKNOWN_JOB):
            raise UnknownJob(f"{command[0]}: {said}")
        raise ClusterError(f"{command[0]}: {said}")

    def submit(self, script: Path, dependency: str = "") -> str:
        """Job id of the array that `script` asks for. A job whose dependency can never be met ends by itself."""
        extra = [f"--dependency={dependency}", "--kill-on-invalid-dep=yes"] if dependency else []
        return self.call("sbatch", "--parsable", *extra, str(script)).strip().split(";")[0]

    def states(self, job_ids: Sequence[str], tasks: Iterable[int], since: float) -> dict[int, TaskState]:
        """What SLURM says of each task; the newest of `job_ids` (a stage's submissions, in order) that has it wins.

        since   time (epoch seconds) of the first submission: accounting looks no further back
        Raises SlurmSilent when the controller does not answer.
        """
        wanted = sorted(tasks)
        found: dict[int, TaskState] = {}
        for job in reversed(job_ids):
            rest = [task for task in wanted if task not in found]
            if not rest:
                break
            states_ = states.combine(rest, self.queued(job), self.accounted(job, since), {})
            if any(state.state == states.UNKNOWN for state in states_.values()):
                states_ = states.combine(rest, self.queued(job), self.accounted(job, since), self.shown(job))
            found |= {task: state for task, state in states_.items() if state.state != states.UNKNOWN}
        return {task: found.get(task, TaskState()) for task in wanted}

    def queued(self, job: str) -> dict[int, TaskState]:
        """Tasks of the array that live."""
        try:
            return states.parse_squeue(self.call("squeue", "-h", "-r", "-j", job, "-o", "%F|%K|%T|%r|%N"))
        except UnknownJob:
            return {}

    def accounted(self, job: str, since: float) -> dict[int, list[TaskState]]:
        """Runs of each task by the accounting; nothing where it is off or silent: others are asked then."""
        if self._accounting is False:
            return {}
        start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since - 60))
        command = ["sacct", "-n", "-P", "-X", "-D", "-j", job, "--starttime", start]
        try:
            text = self.call(*command, "-o", "JobID,State,ExitCode,NodeList")
        except SlurmSilent:
            return {}
        except (ClusterError, DependencyError):
            self._accounting = False  # "Slurm accounting storage is disabled"
            return {}
        self._accounting = True
        return states.parse_sacct(text)

    def shown(self, job: str) -> dict[int, TaskState]:
        """Tasks that the controller still remembers (some minutes after their end)."""
        try:
            return states.parse_scontrol(self.call("scontrol", "show", "job", job, "-o"))
        except UnknownJob:
            return {}

    def find(self, name: str) -> str | None:
        """Array job id of the job of this name, or None when SLURM knows none. Raises SlurmSilent."""
        listed = self.call("squeue", "-h", f"--name={name}", "-o", "JobId=%A ArrayJobId=%F JobName=%j")
        return states.job_names(listed).get(name) or states.job_names(
            self.call("scontrol", "show", "job", "-o")
        ).get(name)

    def cancel(self, jobs: Iterable[str], wait: float = 60.0) -> bool:
        """Cancel arrays and wait until none of their tasks lives; False when some still do after `wait` seconds."""
        until = time.monotonic() + wait
        left = list(jobs)
        while True:
            try:
                for job in left:
                    try:
                        self.call("scancel", job)
                    except UnknownJob:
                        continue
                left = [job for job in left if self.queued(job)]
            except SlurmSilent:
                pass  # asked again until the time is up
            if not left:
                return True
            if time.monotonic() > until:
                return False
            time.sleep(1.0)

    def release(self, job: str, task: int) -> str:
        """Let a task of an array run that SLURM holds; why it would not, or nothing. Raises SlurmSilent."""
        return self._refusal("scontrol", "release", f"{job}_{task}")

    def drop(self, job: str, task: int) -> str:
        """Cancel one task of an array without waiting for its end; as `release`."""
        return self._refusal("scancel", f"{job}_{task}")

    def _refusal(self, *command: str) -> str:
        try:
            self.call(*command)
        except SlurmSilent:
            raise
        except ClusterError as error:  # it ran or ended meanwhile, or a policy of the site forbids it
            return str(error)
        return ""

    def requeue(self, task: str) -> None:
        """Queue one array task again; given as ARRAY_TASK: SLURM_JOB_ID of an array's last task is the whole array."""
        self.call("scontrol", "requeue", task)
