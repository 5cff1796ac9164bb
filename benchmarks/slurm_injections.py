"""The faults of the campaign, one function each.

Each function waits for its moment (a task that is running), strikes, and returns what it did; it raises `Missed` when
the moment did not come. `Run.restore` applies the operator's remedy of what lasts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.slurm_run import STAGES, STORES, Missed, Run, command_line, descendants, kill
from pipeline.stores import GroupStore

# ------------------------------------------------------------------------------------------------ processes


def stage_killed(run: Run) -> str:
    """kill -9 of the stage inside a task."""
    stage, task, job, pid = run.running()
    children = descendants(pid)
    if not children:
        raise Missed
    kill(children[0])
    return f"{stage} task {task} ({job})"


def task_killed(run: Run) -> str:
    """kill -9 of a task's batch process."""
    stage, task, job, pid = run.running()
    kill(pid)
    return f"{stage} task {task} ({job})"


def client_killed(run: Run) -> str:
    """kill -9 of the waiting client."""
    stage, *_ = run.running()
    kill(run.client())
    return stage


def dvc_killed(run: Run) -> str:
    """kill -9 of dvc, its client waits on."""
    stage, *_ = run.running()
    assert run.process is not None
    kill(run.process.pid)
    run.process.wait()
    return stage


def all_killed(run: Run) -> str:
    """kill -9 of dvc and its client."""
    stage, *_ = run.running()
    assert run.process is not None
    os.killpg(run.process.pid, signal.SIGKILL)
    run.process.wait()
    return stage


def client_terminated(run: Run) -> str:
    """TERM to the waiting client, which cancels its jobs."""
    stage, *_ = run.running()
    os.kill(run.client(), signal.SIGTERM)
    assert run.process is not None
    run.process.wait(timeout=120)
    return stage


# ------------------------------------------------------------------------------------------------ SLURM


def preempted(run: Run) -> str:
    """preemption by a job of a partition with priority."""
    stage, _, job, _ = run.running()
    run.cluster.run(
        "sbatch", "-p", "urgent", "--nodes=2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 2"
    )
    return f"{stage} ({job})"


def time_warning(run: Run) -> str:
    """SLURM's warning signal before the time limit."""
    stage, task, job, _ = run.running()
    run.cluster.run("scancel", "--signal=USR2", "--batch", job, check=False)
    return f"{stage} task {task} ({job})"


def time_limit(run: Run) -> str:
    """time limit met by a stage that hangs (stopped with SIGSTOP)."""
    stage, task, job, pid = run.running()
    children = [child for child in descendants(pid) if command_line(child)]
    if not children:
        raise Missed
    try:
        os.kill(pid, signal.SIGSTOP)  # the batch process too: it cannot react to the warning
    except ProcessLookupError as error:
        raise Missed from error
    run.cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=1", check=False)
    until = time.monotonic() + 150
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.5)
    return f"{stage} task {task} ({job})"


def last_task_requeued(run: Run) -> str:
    """scontrol requeue of the array's last task."""
    stage, _, job, _ = run.running()
    record = run.folder(stage).read()
    assert record is not None
    run.cluster.run("scontrol", "requeue", f"{job.split('_')[0]}_{record.tasks}", check=False)
    return f"{stage} ({job})"


def node_failed(run: Run) -> str:
    """a node that goes down with its tasks."""
    stage, task, job, _ = run.running()
    node = str(run.folder(stage).task(task).get("node"))
    run.cluster.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=campaign")
    run.undo.append(
        lambda: run.cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
    )
    time.sleep(1.0)
    return f"{node}: {stage} task {task} ({job})"


def controller_killed(run: Run) -> str:
    """kill -9 of slurmctld, started again three seconds later."""
    stage, *_ = run.running()
    kill(run.cluster.pid("slurmctld"))
    time.sleep(3.0)
    run.cluster.start_daemon("slurmctld", "slurmctld", "-D", "-f", str(run.cluster.conf))
    until = time.monotonic() + 60
    while "UP" not in run.cluster.run("scontrol", "ping", check=False) and time.monotonic() < until:
        time.sleep(0.3)
    return stage


def job_cancelled(run: Run) -> str:
    """scancel of an array by somebody else."""
    stage, _, job, _ = run.running()
    run.cluster.run("scancel", job.split("_")[0], check=False)
    return f"{stage} ({job})"


# ------------------------------------------------------------------------------------------------ files


def _finished_file(run: Run) -> tuple[GroupStore, int, Path]:
    """A file of a finished group of a store whose stage is over, while a later stage runs."""
    stage, *_ = run.running(("rollout", "score", "advantage", "update"))
    done = {"rollout": STORES[:1], "score": STORES[:2]}.get(stage, STORES)
    store = GroupStore.open(run.project.folder / "artifacts" / "e001" / run.dice.choice(done))
    index = run.dice.randrange(len(store))
    return store, index, store.array_path(index, run.dice.choice(sorted(store.specs)))


def byte_flipped(run: Run) -> str:
    """a byte flipped in a finished group."""
    store, index, path = _finished_file(run)
    data = bytearray(path.read_bytes())
    at = run.dice.randrange(len(data))
    data[at] ^= 1 << run.dice.randrange(8)
    run.damaged.add(store.record_path(index))
    path.write_bytes(bytes(data))
    return f"{path.relative_to(run.project.folder / 'artifacts')} byte {at}"


def file_truncated(run: Run) -> str:
    """a file of a finished group truncated."""
    store, index, path = _finished_file(run)
    size = path.stat().st_size
    run.damaged.add(store.record_path(index))
    os.truncate(path, run.dice.randrange(size))
    return f"{path.relative_to(run.project.folder / 'artifacts')} of {size} bytes"


def task_fails(run: Run) -> str:
    """a file that a stage needs is gone, its tasks fail."""
    stage, *_ = run.running(STAGES[:2])
    path = run.project.folder / "artifacts" / "base" / "codec.safetensors"
    away = path.with_suffix(".away")
    if not path.exists():
        raise Missed
    path.rename(away)
    run.undo.append(lambda: away.exists() and away.rename(path))
    _, task, job, pid = run.running()
    kids = descendants(pid)
    if kids:
        kill(kids[0])  # so that it starts again and meets the missing file
    assert run.process is not None
    until = time.monotonic() + 60
    while run.alive() and time.monotonic() < until:
        time.sleep(0.2)
    return f"{stage} task {task} ({job}) without {path.name}"


def disk_full(run: Run) -> str:
    """the disk full (a small tmpfs)."""
    place = run.project.folder / "artifacts" / "e001"
    run.running()
    if not place.exists():
        raise Missed
    mounted = subprocess.run(["mountpoint", "-q", str(run.project.folder / "artifacts")], check=False)
    if mounted.returncode != 0:
        raise Missed
    ballast = run.project.folder / "artifacts" / "ballast"
    with ballast.open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        except OSError:
            pass
    run.undo.append(lambda: ballast.unlink(missing_ok=True))
    until = time.monotonic() + 25
    while run.alive() and time.monotonic() < until:
        time.sleep(0.2)
    return f"{ballast.stat().st_size >> 20} MiB of ballast"


def same_shard_twice(run: Run) -> str:
    """the shard of a running task given to a second process by hand."""
    stage, task, job, _ = run.running(STAGES)
    record = run.folder(stage).read()
    if record is None:
        raise Missed
    command = [*record.command, "--shard", f"{task}/{record.tasks}"]
    run.helpers.append(run.project.start(*command, launcher="local", log="by-hand.txt"))
    return f"{stage} {task}/{record.tasks} ({job})"


INJECTIONS: dict[str, Callable[[Run], str]] = {
    function.__name__: function
    for function in (
        stage_killed,
        task_killed,
        client_killed,
        dvc_killed,
        all_killed,
        client_terminated,
        preempted,
        time_warning,
        time_limit,
        last_task_requeued,
        node_failed,
        controller_killed,
        job_cancelled,
        byte_flipped,
        file_truncated,
        task_fails,
        disk_full,
        same_shard_twice,
    )
}
