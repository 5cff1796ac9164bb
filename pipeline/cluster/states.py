"""What SLURM says of array tasks: parsing sacct, squeue and scontrol, and what a state means.

SLURM's word is a hint and never the truth (spec cluster A): accounting may be off, records vanish after minutes, a
requeued task shows as ended for a moment. So a task that nobody knows is UNKNOWN, which is not FAILED, and whether
work is finished is said by wcpipe's own records alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

UNKNOWN = "UNKNOWN"
LIVING = frozenset(
    (
        *("PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD"),
        *("REQUEUE_FED", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SPECIAL_EXIT"),
    )
)
ENDED = frozenset(
    (
        *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY"),
        *("BOOT_FAIL", "DEADLINE", "REVOKED"),
    )
)
MEANING = {
    "TIMEOUT": "met its time limit",
    "PREEMPTED": "preempted by a job of higher priority",
    "NODE_FAIL": "its node failed",
    "BOOT_FAIL": "its node did not boot",
    "OUT_OF_MEMORY": "out of memory",
    "CANCELLED": "cancelled",
    "DEADLINE": "its deadline passed",
    "REVOKED": "revoked by the federation",
    "FAILED": "failed",
    "COMPLETED": "completed",
    UNKNOWN: "SLURM does not know it (any more)",
}
_SIGNALS = {9: "KILL", 11: "SEGV", 15: "TERM", 6: "ABRT", 7: "BUS"}


@dataclass(frozen=True)
class TaskState:
    """What SLURM says of one array task: its state, exit code and signal, node, restarts, and the reason it gives."""

    state: str = UNKNOWN
    exit_code: int | None = None
    signal: int | None = None
    node: str = ""
    restarts: int | None = None
    reason: str = ""

    @property
    def living(self) -> bool:
        return self.state in LIVING

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def unlaunched(self) -> bool:
        """SLURM could not start it on a node (one that fell out, or one that a restarted controller takes for busy),
        queued it again and holds it: it waits for ever unless somebody releases it.
        """
        return self.living and self.reason.replace("_", " ").lower() == "launch failed requeued held"

    def meaning(self) -> str:
        """One phrase for a person: which of time limit, preemption, node, memory or failure it was."""
        text = MEANING.get(self.state, self.state.lower())
        if self.state == "FAILED" and self.signal:
            return f"killed by SIG{_SIGNALS.get(self.signal, self.signal)}"
        if self.state == "FAILED" and self.exit_code in (137, 139, 143):
            return f"killed by SIG{_SIGNALS[self.exit_code - 128]}"
        if self.state == "FAILED" and self.exit_code is not None:
            return f"failed with exit code {self.exit_code}"
        if self.state == "PENDING" and self.reason not in ("", "None"):
            return f"pending ({self.reason})"
        return text


def expand_tasks(text: str) -> list[int]:
    """`1-3,7%2` -> [1, 2, 3, 7]; brackets and the throttle are ignored. An empty or strange text gives []."""
    found: list[int] = []
    for part in text.strip().strip("[]").partition("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part.strip())
        if match:
            first, last, step = match.group(1), match.group(2) or match.group(1), match.group(3) or "1"
            found += range(int(first), int(last) + 1, int(step))
    return found


def compact_tasks(tasks: Iterable[int]) -> str:
    """[1, 2, 3, 7] -> `1-3,7`: what `sbatch --array` takes."""
    runs: list[list[int]] = []
    for task in sorted(set(tasks)):
        if runs and task == runs[-1][1] + 1:
            runs[-1][1] = task
        else:
            runs.append([task, task])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def parse_squeue(text: str) -> dict[int, TaskState]:
    """Lines of `squeue -h -r -o '%F|%K|%T|%r|%N'` (array job, task, state, reason, nodes) by task."""
    found = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) != 5:
            continue
        for task in expand_tasks(fields[1]):
            found[task] = TaskState(state=_state(fields[2]), reason=fields[3], node=_none(fields[4]))
    return found


def parse_sacct(text: str) -> dict[int, list[TaskState]]:
    """Lines of `sacct -n -P -X -D -o JobID,State,ExitCode,NodeList` by task: each run of it, oldest first."""
    found: dict[int, list[TaskState]] = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        match = re.fullmatch(r"\d+_(\[?[\d,\-:%]+\]?)", fields[0])
        if match is None or len(fields) < 4:
            continue
        code, signal = _exit(fields[2])
        for task in expand_tasks(match.group(1)):
            found.setdefault(task, []).append(TaskState(_state(fields[1]), code, signal, _none(fields[3])))
    return found


def parse_scontrol(text: str) -> dict[int, TaskState]:
    """Lines of `scontrol show job ID -o` by task."""
    found = {}
    for line in text.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        code, signal = _exit(fields.get("ExitCode", ""))
        state = TaskState(
            state=_state(fields.get("JobState", "")),
            exit_code=code,
            signal=signal,
            node=_none(fields.get("NodeList", "")),
            restarts=int(fields["Restarts"]) if fields.get("Restarts", "").isdigit() else None,
            reason=fields.get("Reason", ""),
        )
        for task in expand_tasks(fields.get("ArrayTaskId", "")):
            found[task] = state
    return found


def job_names(text: str) -> dict[str, str]:
    """`scontrol show job -o` or `squeue -h -o 'JobId=%A ArrayJobId=%F JobName=%j'`: job name -> array job id."""
    found = {}
    for line in text.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        if "JobName" in fields:
            found[fields["JobName"]] = fields.get("ArrayJobId") or fields.get("JobId", "")
    return found


def combine(
    tasks: Iterable[int],
    queued: Mapping[int, TaskState],
    accounted: Mapping[int, list[TaskState]],
    shown: Mapping[int, TaskState],
) -> dict[int, TaskState]:
    """One state a task. What lives is in the queue; of what ended accounting knows most, then `scontrol`.

    A task that is in the queue is alive even if accounting says that it ended: its former run did.
    """
    result = {}
    for task in tasks:
        ended = [state for state in accounted.get(task, []) if state.ended]
        if task in queued and not queued[task].ended:
            result[task] = queued[task]
        elif ended and task not in queued:
            result[task] = ended[-1]
        else:
            result[task] = shown.get(task) or queued.get(task) or TaskState()
    return result


def _state(text: str) -> str:
    """`CANCELLED by 0` and `CANCELLED+` -> CANCELLED."""
    word = text.strip().split(" ")[0].rstrip("+")
    return word if word in LIVING | ENDED else UNKNOWN


def _exit(text: str) -> tuple[int | None, int | None]:
    match = re.fullmatch(r"(\d+):(\d+)", text.strip())
    return (int(match.group(1)), int(match.group(2)) or None) if match else (None, None)


def _none(text: str) -> str:
    return "" if text in ("None assigned", "(null)", "None") else text.strip()
