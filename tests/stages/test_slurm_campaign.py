"""A short fault campaign on a real SLURM, with and without accounting: tens of minutes, so not part of `slow`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.slurm_world import why_not

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.campaign,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


@pytest.mark.parametrize("accounting", [False, True])
def test_a_short_fault_campaign(tmp_path: Path, accounting: bool) -> None:
    command = [sys.executable, "benchmarks/slurm_faults.py", "--faults", "12", "--seed", "5", "--groups", "4"]
    command += ["--minutes", "20"]
    quick = ["stage_killed", "task_killed", "client_killed", "all_killed", "preempted", "time_warning"]
    quick += [
        "last_task_requeued",
        "controller_killed",
        "byte_flipped",
        "file_truncated",
        "disk_full",
        "same_shard_twice",
    ]
    command += ["--out", str(tmp_path / "faults.json"), "--only", *quick, *(["--acct"] if accounting else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "faults.json").read_text())
    assert found["all_identical"]
    assert found["made_twice"] == 0
    assert found["faults"] >= 5  # a run can end before all that were drawn for it have struck
    assert re.search(r"finished groups made twice: 0", done.stdout)
