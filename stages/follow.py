"""Submitting a stage as an array job and seeing it through, whatever dies meanwhile.

A stage is finished when each of its tasks has said so in a record of its own; SLURM is asked only why one has not yet.
Three kinds of silence are kept apart: a controller that does not answer (wait, without limit), a task that nobody knows
(wait for `polling.lost` seconds, then submit it again), a task that ended without a word (submit it again). Every
submission is announced in job.json before it is made and carries a name of its own, so that a client that died in
between finds its job again instead of submitting a second one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline import files
from pipeline.cluster.config import ClusterConfig
from pipeline.cluster.script import Job, render
from pipeline.cluster.states import TaskState
from pipeline.errors import ClusterError, Interrupted
from stages.common import STOP
from stages.jobs import CANCELLED, FAILED, FINISHED, SUBMITTED, SUBMITTING, JobFolder, JobRecord
from stages.slurm import Slurm, SlurmSilent

_OWN = range(
    2, 11
)  # exit codes of errors that a person can act on (pipeline.errors): another try fails alike


def say(text: str) -> None:
    print(f"wcpipe: {text}", file=sys.stderr, flush=True)


class Follower:
    """One stage on the cluster: submits it or finds its jobs, waits, submits what died again, cancels when asked to."""

    def __init__(self, folder: JobFolder, config: ClusterConfig) -> None:
        self.folder, self.config = folder, config
        self.slurm = Slurm(config.polling.timeout)
        self.label = f"{folder.stage} {folder.epoch}"
        self._quiet_since: dict[int, float] = {}  # task -> since when it neither lives nor has said anything
        self._silent = False
        # task -> how often it was asked to run again after a node could not start it
        self._released: dict[int, int] = {}
        self._codes: dict[int, int | None] = {}  # task that failed for good -> its exit code

    # ---------------------------------------------------------------- submitting

    def attach_or_submit(self, wanted: JobRecord) -> JobRecord:
        """The record of this stage's living jobs, if they are of this command and parameters; else a new submission.

        Jobs of another command or other parameters are cancelled first: they would write into the same stores.
        """
        with self.folder.locked():
            found = self.folder.read()
            if found is not None and found.state in (SUBMITTING, SUBMITTED):
                self.recover(found)
                if found.fingerprint == wanted.fingerprint and self.living(found):
                    say(f"{self.label}: found its job {' '.join(found.ids)} again")
                    return found
                self.end(
                    found, "of other parameters" if found.fingerprint != wanted.fingerprint else "left over"
                )
            self.submit(wanted, wanted.all_tasks)
            return wanted

    def submit(self, record: JobRecord, tasks: Sequence[int]) -> None:
        """Submit these tasks as one array; the caller holds the folder's lock."""
        record.state, record.pending = SUBMITTING, list(tasks)
        self.folder.write(record)
        (self.folder.path / "logs").mkdir(exist_ok=True)
        job = Job(
            record.name(),
            record.stage,
            record.command,
            record.tasks,
            tasks,
            self.folder.path.resolve(),
            Path.cwd(),
        )
        script = self.folder.path / "job.sbatch"
        files.write_bytes(script, render(job, self.config).encode())
        self._settle(record, lambda: self.slurm.submit(script, record.dependency))

    def _settle(self, record: JobRecord, make: Callable[[], str]) -> None:
        """Note the id of the announced submission: found by its name where it may have been made already, else made."""
        uncertain = False
        while True:
            try:
                found = self.slurm.find(record.name()) if uncertain else None
                job = found or make()
                break
            except SlurmSilent as error:
                uncertain = True
                self._notice(error)
                self._pause()
                STOP.check("before its job was submitted for certain; run the same command again")
        self._answered()
        record.ids.append(job)
        for task in record.pending:
            record.attempts[str(task)] = record.attempts.get(str(task), 0) + 1
        record.state, record.pending = SUBMITTED, []
        self.folder.write(record)
        say(f"{self.label}: job {job}, {len(record.attempts)} tasks; logs in {self.folder.path}/logs")

    def recover(self, record: JobRecord) -> None:
        """A submission that was announced and whose id nobody noted: find it, or know that it was never made."""
        if record.state != SUBMITTING:
            return
        while True:
            try:
                job = self.slurm.find(record.name())
                break
            except SlurmSilent as error:
                self._notice(error)
                self._pause()
                STOP.check("while SLURM was silent; run the same command again")
        if job is not None:
            record.ids.append(job)
            record.state, record.pending = SUBMITTED, []
            self.folder.write(record)

    def end(self, record: JobRecord, why: str) -> None:
        """Cancel what lives of a record and wait until it is gone. Raises ClusterError when it does not end."""
        try:
            living = [job for job in record.ids if self.slurm.queued(job)]
        except SlurmSilent:
            living = list(record.ids)  # `cancel` asks again for a while
        if living:
            say(f"{self.label}: cancelling job {' '.join(living)} ({why})")
            if not self.slurm.cancel(living):
                raise ClusterError(
                    f"{self.label}: job {' '.join(living)} does not end; cancel it by hand and run again"
                )
        record.state = CANCELLED
        self.folder.write(record)

    def living(self, record: JobRecord) -> bool:
        """Whether any task of the record is queued or running; waits while SLURM is silent."""
        while True:
            try:
                return any(self.slurm.queued(job) for job in record.ids)
            except SlurmSilent as error:
                self._notice(error)
                self._pause()
                STOP.check(
                    "while SLURM was silent; its job goes on, run the same command again to wait for it"
                )

    # ---------------------------------------------------------------- waiting

    def wait(self, record: JobRecord) -> JobRecord:
        """Return when every task has said that it is done. Raises ClusterError when one failed for good, Interrupted
        when a signal came (its jobs are cancelled then) or another client submitted the stage anew.
        """
        token = record.token
        while True:
            record = self._current(token)
            if STOP.name is not None:
                with self.folder.locked():
                    self.end(self._current(token), f"{STOP.name} came")
                STOP.check(
                    "and its job was cancelled; finished groups stay: run the same command again to go on"
                )
            left = [task for task in record.all_tasks if not self.folder.is_done(record, task)]
            if not left:
                self._drop_held(record)
                return record
            try:
                states = self.slurm.states(record.ids, left, record.since)
            except SlurmSilent as error:
                self._notice(error)
                self._pause()
                continue
            self._answered()
            self._release(record, states)
            fatal, dead = self._judge(record, states)
            resting = all(not state.living for state in states.values())
            if dead and not fatal:
                self._again(record, dead)
            elif fatal and resting:
                self._give_up(record, fatal)
            self._pause()

    def _release(self, record: JobRecord, states: dict[int, TaskState]) -> None:
        """Let tasks run again that SLURM holds because a node could not start them, `retries` times each.

        A task that a person holds stays held. Beyond the tries it waits, and `cluster status` says why.
        """
        held = {task for task, state in states.items() if state.unlaunched}
        held = {task for task in held if self._released.get(task, 0) < self.config.retries}
        for job in record.ids if held else ():
            try:
                tasks = held.intersection(self._unlaunched(job))
                for task in sorted(tasks):
                    why = self.slurm.release(job, task)
                    said = f"it cannot be released ({why})" if why else "it is released"
                    say(f"{self.label}: task {task} could not be started on its node and was held; {said}")
                    self._released[task] = self._released.get(task, 0) + 1
            except SlurmSilent:
                return  # asked again after the next pause

    def _drop_held(self, record: JobRecord) -> None:
        """Take back tasks that are done and that SLURM, which queued them again for nothing, holds for ever."""
        for job in record.ids:
            try:
                for task in self._unlaunched(job):
                    self.slurm.drop(job, task)
            except ClusterError:
                continue  # the stage is finished; a line in the queue is no reason to fail it

    def _unlaunched(self, job: str) -> list[int]:
        return sorted(task for task, state in self.slurm.queued(job).items() if state.unlaunched)

    def _judge(
        self, record: JobRecord, states: dict[int, TaskState]
    ) -> tuple[dict[int, str], dict[int, TaskState]]:
        """Tasks that failed for good (and why), and those that ended without finishing and can be submitted again."""
        fatal: dict[int, str] = {}
        dead: dict[int, TaskState] = {}
        now, polling = time.monotonic(), self.config.polling
        for task, state in states.items():
            said = self.folder.task(task)
            said = said if said.get("token") == record.token else {}
            if state.living or self.folder.is_done(record, task):
                self._quiet_since.pop(task, None)
                continue
            quiet = now - self._quiet_since.setdefault(task, now)
            # a record written on another node may show up late; a state is never believed on its first sight
            patience = polling.lost if not state.ended or state.state == "COMPLETED" else 2 * polling.every
            if said.get("state") == FAILED or (state.state == "FAILED" and state.exit_code in _OWN):
                code = said.get("exit_code") or state.exit_code  # a full disk kept it from writing a record
                fatal[task] = said.get("why") or f"failed with exit code {code}"
                self._codes[task] = code
            elif quiet < patience:
                continue
            elif state.state == "CANCELLED":
                fatal[task] = "cancelled by someone else"
            elif record.attempts.get(str(task), 0) > self.config.retries:
                fatal[task] = f"{state.meaning()}, {record.attempts[str(task)]} times"
            else:
                dead[task] = state
        return fatal, dead

    def _again(self, record: JobRecord, dead: dict[int, TaskState]) -> None:
        with self.folder.locked():
            now = self._current(record.token)
            if now.ids != record.ids:  # another client was quicker
                return
            for task, state in sorted(dead.items()):
                say(f"{self.label}: task {task} {state.meaning()}; it is submitted again")
                self._quiet_since.pop(task, None)
            now.dependency = ""
            self.submit(now, sorted(dead))

    def _give_up(self, record: JobRecord, fatal: dict[int, str]) -> None:
        task, why = min(fatal.items())
        code = self._codes.get(task)
        words = self.folder.last_words(task)
        more = f" (and {len(fatal) - 1} more tasks)" if len(fatal) > 1 else ""
        record.state = FAILED
        self.folder.write(record)
        error = ClusterError(
            f"{self.label}: task {task} {why}{more}: {words or 'its log is empty'}; log: {self.folder.log(task)}; "
            f"finished groups stay: run the same command again"
        )
        if isinstance(code, int) and code in _OWN:
            error.exit_code = code  # the stage's own: a full disk is a full disk on any node
        raise error

    def _current(self, token: str) -> JobRecord:
        record = self.folder.read()
        if record is None or record.token != token:
            raise Interrupted(
                f"{self.label}: another client submitted it anew and waits for it; this one stops"
            )
        return record

    # ---------------------------------------------------------------- silence

    def _pause(self) -> None:
        """Sleep until the next question, but not through a signal."""
        until = time.monotonic() + self.config.polling.every
        while time.monotonic() < until and STOP.name is None:
            time.sleep(min(0.2, self.config.polling.every))

    def _notice(self, error: ClusterError) -> None:
        if not self._silent:
            say(f"{self.label}: {error}; waiting, nothing is lost")
        self._silent = True

    def _answered(self) -> None:
        if self._silent:
            say(f"{self.label}: SLURM answers again")
        self._silent = False


def finish(folder: JobFolder, record: JobRecord) -> None:
    """Note that the stage's results were taken over: the next call submits anew."""
    with folder.locked():
        now = folder.read()
        if now is not None and now.token == record.token:
            now.state = FINISHED
            folder.write(now)
