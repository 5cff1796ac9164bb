"""The sbatch script of a stage, as text that a person can read, keep and submit by hand.

Every stage is an array job, of one task where it has no parts: states, logs and requeueing are the same for all.
The batch process is `wcpipe cluster task` itself (by `exec`): SLURM's signals reach it and nothing stands between.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.cluster.config import SHARDED, ClusterConfig
from pipeline.cluster.states import compact_tasks

TASK = "$SLURM_ARRAY_TASK_ID"


@dataclass(frozen=True)
class Job:
    """One stage to submit.

    name        of the job in SLURM; unique, so that a job is found again whose id was lost
    command     of the stage, without --shard
    tasks       parts that the stage is cut into
    array       which of them to run (all at first; those that died later)
    folder      of the job: script, logs, records of tasks; absolute
    working     folder that the stage runs in; absolute
    """

    name: str
    stage: str
    command: Sequence[str]
    tasks: int
    array: Sequence[int]
    folder: Path
    working: Path


def render(job: Job, config: ClusterConfig) -> str:
    """The script. It sets nothing that conf/cluster.yaml leaves empty."""
    ask = config.resources(job.stage)
    # a stage without groups starts from nothing: what did not fit into its time limit would not fit again
    restarts = config.restarts if job.stage in SHARDED else 0
    throttle = f"%{ask.throttle}" if ask.throttle is not None else ""
    options = [
        f"--job-name={job.name}",
        f"--array={compact_tasks(job.array)}{throttle}",
        *_given("partition", ask.partition),
        *_given("account", ask.account),
        *_given("qos", ask.qos),
        f"--nodes={ask.nodes}",
        "--ntasks-per-node=1",
        *_given("gres", ask.gres),
        *_given("cpus-per-task", ask.cpus),
        *_given("mem", ask.mem),
        f"--time={ask.time}",
        f"--signal=B:{config.signal}@{config.margin}",
        "--requeue",
        "--open-mode=append",
        f"--chdir={job.working}",
        f"--output={job.folder}/logs/%a.log",
        *ask.extra,
    ]
    lines = [
        "#!/bin/bash",
        f"# {job.stage}: rendered by wcpipe from conf/cluster.yaml, which is the file to edit.",
        *(f"#SBATCH {option}" for option in options),
        "",
        "set -eo pipefail",
        *config.setup,
        "export WCPIPE_LAUNCHER=local   # a task is where the work is done; it submits nothing",
    ]
    if ask.ranks > 1:
        lines += _rendezvous()
    lines += [
        "",
        "# Runs the command below, passes signals on, notes how it ended, and queues this task again where that helps.",
        f"exec wcpipe cluster task --job {shlex.quote(str(job.folder))} --signal {config.signal} "
        f"--retries {config.retries} --restarts {restarts} --ranks {ask.ranks} -- \\",
        f"  {_command(job, config)}",
        "",
    ]
    return "\n".join(lines)


def _given(name: str, value: object) -> list[str]:
    return [] if value in (None, "") else [f"--{name}={value}"]


def _rendezvous() -> list[str]:
    """Shell lines that find the address and a port of the first node, from SLURM's variables only."""
    return [
        "",
        "# torchrun processes meet on the first node of the job",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "address=$(scontrol show node \"$first\" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')",
        "port=$((20000 + SLURM_JOB_ID % 20000))",
    ]


def _command(job: Job, config: ClusterConfig) -> str:
    ask = config.resources(job.stage)
    words = shlex.join(job.command)
    container = f"{config.container} " if config.container else ""
    if job.tasks > 1:
        words += f' --shard "{TASK}/{job.tasks}"'
    if ask.ranks == 1:
        return f"{container}{words}"
    run = (
        'srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \\\n  '
        f'{container}torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node={ask.processes} \\\n    '
        '--rdzv-backend=c10d --rdzv-endpoint="$address:$port" '
        '--rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" --max-restarts=0 \\\n    --no-python '
    )
    return run + words
