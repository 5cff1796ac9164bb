"""How submitted stages are: wcpipe's own records first, SLURM's word for what is not finished yet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cluster.states import UNKNOWN, TaskState
from pipeline.errors import ClusterError
from stages.jobs import SUBMITTED, SUBMITTING, JobFolder
from stages.slurm import Slurm

if TYPE_CHECKING:
    from pipeline.cluster.config import ClusterConfig


def rows(root: Path, epoch: str | None, config: ClusterConfig) -> list[dict[str, Any]]:
    """One row a stage: counts of tasks by state and, in `tasks`, one line for each that is neither done nor running."""
    slurm = Slurm(config.polling.timeout)
    found = []
    for folder in JobFolder.all_below(root):
        record = folder.read()
        if record is None or epoch not in (None, folder.epoch):
            continue
        left = [task for task in record.all_tasks if not folder.is_done(record, task)]
        states: dict[int, TaskState] = {}
        silent = ""
        if left and record.ids:
            try:
                states = slurm.states(record.ids, left, record.since)
            except ClusterError as error:
                silent = str(error)
        row: dict[str, Any] = {
            "epoch": folder.epoch,
            "stage": folder.stage,
            "jobs": record.ids,
            "state": record.state,
            "tasks": record.tasks,
            "done": record.tasks - len(left),
            "running": sum(state.state == "RUNNING" for state in states.values()),
            "pending": sum(state.living and state.state != "RUNNING" for state in states.values()),
            "other": [],
        }
        if silent:
            row["other"].append({"task": 0, "state": UNKNOWN, "why": silent, "log": ""})
        for task, state in sorted(states.items()):
            said = folder.task(task)
            said = said if said.get("token") == record.token else {}
            history = said.get("history", [])
            if state.state == "RUNNING" and not history:
                continue
            if state.state == "PENDING" and not history and not said:
                continue
            why = (
                said.get("why") if state.state in ("FAILED", UNKNOWN) and said.get("why") else state.meaning()
            )
            before = f"; before: {', '.join(history)}" if history else ""
            line = {"task": task, "state": state.state, "why": f"{why}{before}", "log": str(folder.log(task))}
            row["other"].append(line)
        if record.state not in (SUBMITTING, SUBMITTED):
            row["running"] = row["pending"] = 0
        found.append(row)
    return found


def table(found: list[dict[str, Any]]) -> None:
    """Print the rows for a person."""
    if not found:
        print(
            "nothing was submitted; `wcpipe cluster submit --epoch e001`, or launcher: slurm in conf/cluster.yaml"
        )
        return
    print(f"{'epoch':<8}{'stage':<11}{'state':<11}{'done':>9}{'running':>9}{'pending':>9}  job")
    for row in found:
        done = f"{row['done']}/{row['tasks']}"
        jobs = " ".join(row["jobs"])
        head = f"{row['epoch']:<8}{row['stage']:<11}{row['state']:<11}"
        print(f"{head}{done:>9}{row['running']:>9}{row['pending']:>9}  {jobs}")
        for line in row["other"]:
            log = f"  ({line['log']})" if line["log"] else ""
            print(f"    task {line['task']}: {line['why']}{log}" if line["task"] else f"    {line['why']}")
