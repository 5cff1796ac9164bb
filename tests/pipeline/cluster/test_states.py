"""What SLURM says, parsed from its own words (22.05, with and without accounting), and what is made of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cluster.states import (
    UNKNOWN,
    TaskState,
    combine,
    compact_tasks,
    expand_tasks,
    job_names,
    parse_sacct,
    parse_scontrol,
    parse_squeue,
)

SQUEUE = """\
1|3|PENDING|JobArrayTaskLimit|
1|1|RUNNING|None|n1
1|2|COMPLETING|None|n2
7|N/A|RUNNING|None|n1
"""
SACCT = """\
12_1|COMPLETED|0:0|n1
12_2|PREEMPTED|0:15|n1
12_2|COMPLETED|0:0|n2
12_3|OUT_OF_MEMORY|0:125|n1
12_4|CANCELLED by 0|0:0|None assigned
12_5|TIMEOUT|0:0|n2
12_6|NODE_FAIL|1:0|n2
12_7|FAILED|5:0|n2
12_8|FAILED|0:9|n2
12_[9-11%2]|PENDING|0:0|None assigned
13|COMPLETED|0:0|n1
"""
SCONTROL = """\
JobId=1 ArrayJobId=1 ArrayTaskId=3 JobName=t.sh JobState=RUNNING Restarts=2 ExitCode=0:0 NodeList=n1
JobId=3 ArrayJobId=1 ArrayTaskId=2 JobName=t.sh JobState=FAILED Restarts=0 ExitCode=7:0 NodeList=n2
JobId=4 ArrayJobId=1 ArrayTaskId=4-6%2 JobName=t.sh JobState=PENDING Reason=Resources Restarts=0 ExitCode=0:0 NodeList=
"""


def test_the_queue_of_an_array() -> None:
    found = parse_squeue(SQUEUE)
    assert {task: state.state for task, state in found.items()} == {
        1: "RUNNING",
        2: "COMPLETING",
        3: "PENDING",
    }
    assert found[1].node == "n1"
    assert found[3].meaning() == "pending (JobArrayTaskLimit)"
    assert all(state.living for state in found.values())


def test_time_limit_preemption_node_memory_and_failure_are_told_apart() -> None:
    found = parse_sacct(SACCT)
    assert [state.state for state in found[2]] == ["PREEMPTED", "COMPLETED"]
    meanings = {task: runs[-1].meaning() for task, runs in found.items()}
    assert meanings == {
        1: "completed",
        2: "completed",
        3: "out of memory",
        4: "cancelled",
        5: "met its time limit",
        6: "its node failed",
        7: "failed with exit code 5",
        8: "killed by SIGKILL",
        9: "pending",
        10: "pending",
        11: "pending",
    }
    assert found[2][0].meaning() == "preempted by a job of higher priority"
    assert len(set(meanings.values())) == 8


def test_the_controllers_memory() -> None:
    found = parse_scontrol(SCONTROL)
    assert (found[3].state, found[3].restarts) == ("RUNNING", 2)
    assert (found[2].exit_code, found[2].meaning()) == (7, "failed with exit code 7")
    assert found[5].state == "PENDING"
    assert job_names(SCONTROL) == {"t.sh": "1"}


def test_a_task_that_nobody_knows_is_unknown_and_nothing_else() -> None:
    found = combine([1, 2, 3], {}, {}, {})
    assert {state.state for state in found.values()} == {UNKNOWN}
    assert not any(state.ended or state.living for state in found.values())


def test_a_requeued_task_lives_although_its_former_run_ended() -> None:
    ended = {1: [TaskState("PREEMPTED")], 2: [TaskState("COMPLETED")], 3: [TaskState("NODE_FAIL")]}
    found = combine([1, 2, 3], {1: TaskState("PENDING")}, ended, {3: TaskState("RUNNING")})
    assert [found[task].state for task in (1, 2, 3)] == ["PENDING", "COMPLETED", "NODE_FAIL"]


@pytest.mark.parametrize(
    "text", ["", "slurm_load_jobs error: Invalid job id specified", "a|b", "1|x|RUNNING|None|n1"]
)
def test_strange_words_say_nothing(text: str) -> None:
    assert parse_squeue(text) == parse_scontrol(text) == {}
    assert parse_sacct(text) == {}
    assert parse_sacct("12_1|SOMETHING_NEW|0:0|n1")[1][0].state == UNKNOWN


@given(st.sets(st.integers(0, 300), min_size=1))
def test_ranges_of_tasks_come_back(tasks: set[int]) -> None:
    text = compact_tasks(tasks)
    assert expand_tasks(text) == sorted(tasks)
    assert expand_tasks(f"[{text}%4]") == sorted(tasks)
