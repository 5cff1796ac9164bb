"""The parts of `wcpipe cluster` that need no SLURM: records, frozen parameters, and how a task ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.cluster.config import ClusterConfig, parse_cluster
from pipeline.config import read_yaml
from pipeline.errors import ConfigError, DataError, UsageError
from stages import cluster
from stages.cluster_task import run_task
from stages.follow import Follower
from stages.jobs import DONE, FAILED, JobFolder, JobRecord
from stages.launch import parts, prepare, without
from stages.slurm import ClusterError, Slurm, SlurmSilent, UnknownJob

ROOT = Path(__file__).parents[2]


def wcpipe(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stages.cli", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobFolder:
    """A submitted stage whose second task is this process."""
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "12")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    folder = JobFolder(tmp_path, "e001", "rollout")
    record = JobRecord("rollout", "e001", ["wcpipe", "rollout"], "f", 3, ids=["12"])
    with folder.locked():
        folder.write(record)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    interrupt = signal.getsignal(signal.SIGINT)
    yield folder
    for number, handler in (*before.items(), (signal.SIGINT, interrupt)):
        signal.signal(number, handler)


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_a_task_that_finished_says_so_and_only_for_its_submission(folder: JobFolder) -> None:
    assert run_task(folder.path, script("pass"), "USR2", 3, 20) == 0
    record = folder.read()
    assert record is not None
    assert folder.finished(record) == [2]
    said = folder.task(2)
    assert (said["state"], said["exit_code"], said["job"], said["restarts"]) == (DONE, 0, "12_2", 1)
    assert run_task(folder.path, script("raise SystemExit(9)"), "USR2", 3, 20) == 0  # not run again
    record.token = "another"
    folder.write(record)
    assert folder.finished(record) == []


def test_an_error_that_would_come_again_is_final(folder: JobFolder) -> None:
    assert run_task(folder.path, script("raise SystemExit(5)"), "USR2", 3, 20) == 5
    assert folder.task(2)["state"] == FAILED
    assert folder.task(2)["exit_code"] == 5


def test_a_killed_stage_is_run_again_only_so_often(folder: JobFolder) -> None:
    history = ["stopped by SIGTERM: preempted by a job of higher priority", "killed by SIGKILL"]
    record = folder.read()
    assert record is not None
    folder.write_task(2, {"token": record.token, "why": "killed by SIGSEGV", "history": history})
    code = "import os; os.kill(os.getpid(), 9)"
    assert run_task(folder.path, script(code), "USR2", 2, 20) == 137
    said = folder.task(2)
    assert said["state"] == FAILED
    assert said["why"] == "killed by SIGKILL, and it was queued again 2 times before"
    assert said["history"] == [*history, "killed by SIGSEGV"]


def test_torchruns_exit_code_hides_what_happened(folder: JobFolder) -> None:
    assert run_task(folder.path, script("raise SystemExit(1)"), "USR2", 0, 20, ranks=8) == 1
    assert "torchrun" in folder.task(2)["why"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR2"])
def test_signals_reach_the_stage_and_its_word_is_waited_for(
    folder: JobFolder, tmp_path: Path, name: str
) -> None:
    stage = (
        "import signal, sys, time, pathlib\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        f"pathlib.Path({str(tmp_path / 'up')!r}).touch()\n"
        "time.sleep(60)"
    )
    helper = (
        "import os, pathlib, signal, sys, time\n"
        f"while not pathlib.Path({str(tmp_path / 'up')!r}).exists(): time.sleep(0.05)\n"
        f"os.kill({os.getpid()}, signal.{name})"
    )
    process = subprocess.Popen(script(helper))
    start = time.monotonic()
    assert run_task(folder.path, script(stage), "USR2", 3, restarts=0) == 75  # 0: it is not queued again here
    assert time.monotonic() - start < 50
    assert folder.task(2)["why"].startswith(f"stopped by {name}")
    assert ("raise its time" in folder.task(2)["why"]) == (name == "SIGUSR2")
    process.wait()


def test_a_stage_does_not_outlive_its_task(folder: JobFolder, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    stage = f"import os, pathlib, time; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); time.sleep(60)"
    code = (
        "import sys; from pathlib import Path; from stages.cluster_task import run_task\n"
        f"run_task(Path({str(folder.path)!r}), [sys.executable, '-c', {stage!r}], 'USR2', 3, 20)"
    )
    process = subprocess.Popen(script(code), cwd=ROOT)
    until = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    process.kill()
    process.wait()
    stage_pid = int(pid_file.read_text())
    while Path(f"/proc/{stage_pid}/cmdline").exists() and time.monotonic() < until:
        if not Path(f"/proc/{stage_pid}/cmdline").read_bytes():
            break  # a zombie that nobody reaps here
        time.sleep(0.05)
    assert time.monotonic() < until


def test_a_task_outside_of_an_array_is_refused(tmp_path: Path) -> None:
    done = wcpipe("cluster", "task", "--job", str(tmp_path), "--", "true", cwd=tmp_path)
    assert done.returncode == 2
    assert "runs inside an array task only" in done.stderr


def test_parameters_are_frozen_when_a_stage_is_submitted(tiny_params: Path, tmp_path: Path) -> None:
    config = parse_cluster({"stages": {"rollout": {"tasks": 8}}})
    folder = JobFolder(tmp_path / "root", "e001", "rollout")
    command = ["wcpipe", "rollout", "--params", str(tiny_params), "--epoch", "e001"]
    record = prepare(folder, "rollout", "e001", command, tiny_params, None, config)
    assert record.tasks == 3  # a task a group, and no more
    frozen = Path(record.command[-1])
    assert record.command == ["wcpipe", "rollout", "--epoch", "e001", "--params", str(frozen)]
    before = read_yaml(tiny_params)
    tiny_params.write_text("# a remark\n" + tiny_params.read_text())
    again = prepare(folder, "rollout", "e001", command, tiny_params, None, config)
    assert again.fingerprint == record.fingerprint
    tiny_params.write_text(tiny_params.read_text().replace("steps: 2", "steps: 3"))
    other = prepare(folder, "rollout", "e001", command, tiny_params, None, config)
    assert other.fingerprint != record.fingerprint
    assert read_yaml(frozen) == before
    with pytest.raises(ConfigError, match=r"epochs\.e009: no such epoch"):
        prepare(folder, "rollout", "e009", command, tiny_params, None, config)


def test_an_option_is_taken_out_of_a_command() -> None:
    command = ["wcpipe", "score", "--params", "a.yaml", "--epoch", "e001", "--params=b.yaml", "--json"]
    assert without(command, "--params") == ["wcpipe", "score", "--epoch", "e001", "--json"]


def test_only_stages_with_parts_have_them(tiny_params: Path) -> None:
    from pipeline.config import load

    config = ClusterConfig.model_validate({"defaults": {"tasks": 4}})
    assert parts("score", "e001", load(tiny_params), config) == 3
    assert parts("advantage", "e001", load(tiny_params), config) == 1


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path, "e001", "rollout")
    assert folder.read() is None
    folder.path.mkdir(parents=True)
    (folder.path / "job.json").write_text(json.dumps({"stage": "rollout"}))
    with pytest.raises(DataError, match=r"rollout/job\.json: is of another version"):
        folder.read()
    assert folder.task(1) == {}


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", SlurmSilent),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", SlurmSilent),
        ("slurm_load_jobs error: Invalid job id specified", UnknownJob),
        ("sbatch: error: invalid partition specified: gpus", ClusterError),
    ],
)
def test_silence_and_refusal_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, kind: type[Exception]
) -> None:
    command = tmp_path / "squeue"
    command.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(ClusterError) as caught:
        Slurm(5.0).call("squeue")
    assert type(caught.value) is kind
    command.write_text("#!/bin/sh\nkill -PIPE $$\n")
    with pytest.raises(SlurmSilent, match="squeue was killed by signal 13"):
        Slurm(5.0).call("squeue")
    command.write_text("#!/bin/sh\nsleep 60\n")
    with pytest.raises(SlurmSilent, match=r"did not answer within 0\.2 s"):
        Slurm(0.2).call("squeue")


def test_a_task_that_its_node_could_not_start_is_released_a_few_times_and_a_persons_hold_never(
    folder: JobFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After slurmctld died without saving its state SLURM held an array for ever; seen in the fault campaign."""
    commands, asked = tmp_path / "bin", tmp_path / "asked"
    commands.mkdir()
    queue = ("12|1|PENDING|launch failed requeued held|", "12|2|PENDING|JobHeldUser|", "12|3|RUNNING|None|n1")
    said = {
        "squeue": f"printf '%s\\n' {' '.join(map(repr, queue))}",
        "sacct": "exit 1",
        "scontrol": f'echo "$@" >> {asked}',
        "scancel": f'echo "cancel $@" >> {asked}',
    }
    for name, text in said.items():
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    follower, record = Follower(folder, ClusterConfig(retries=2)), folder.read()
    assert record is not None
    for _ in range(4):
        follower._release(record, follower.slurm.states(["12"], [1, 2, 3], 0.0))
    assert asked.read_text().splitlines() == ["release 12_1"] * 2
    follower._drop_held(record)  # once all tasks are done
    assert asked.read_text().splitlines()[2:] == ["cancel 12_1"]
    assert (
        capsys.readouterr().err.count("task 1 could not be started on its node and was held; it is rel") == 2
    )
    (commands / "scontrol").write_text("#!/bin/sh\necho 'Access/permission denied' >&2\nexit 1\n")
    (commands / "scancel").write_text("#!/bin/sh\necho 'Access/permission denied' >&2\nexit 1\n")
    another = Follower(folder, ClusterConfig(retries=1))
    another._release(record, another.slurm.states(["12"], [1], 0.0))
    assert "it cannot be released (scontrol: Access/permission denied)" in capsys.readouterr().err
    another._drop_held(record)  # a finished stage does not fail of it


def test_scripts_can_be_looked_at_without_slurm(
    tiny_params: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cluster.submit(
        epoch="e001", until="e002", root=Path("artifacts"), params=tiny_params, set_=None, dry=True
    )
    assert capsys.readouterr().out.count("#!/bin/bash") == 10
    cluster.status(root=Path("artifacts"), epoch=None, conf=None, json=False)
    assert "nothing was submitted" in capsys.readouterr().out
    with pytest.raises(DataError, match="run `wcpipe cluster submit` first"):
        cluster.resume(root=Path("artifacts"), conf=None)
    with pytest.raises(UsageError, match="--until e001 lies before --epoch e002"):
        cluster.submit(
            epoch="e002", until="e001", root=Path("artifacts"), params=tiny_params, set_=None, dry=True
        )
    with pytest.raises(DataError, match=r"logs/3\.log: is missing; there are logs of task - none"):
        cluster.logs(stage="rollout", epoch="e001", root=Path("artifacts"), task=3, lines=5)


def test_without_slurm_a_stage_says_what_is_missing(tiny_params: Path, tmp_path: Path) -> None:
    done = wcpipe("prefix", "--epoch", "e001", cwd=tmp_path, WCPIPE_LAUNCHER="slurm", PATH="/nowhere")
    assert done.returncode == 10, done.stderr
    assert "sbatch is not here; run this on a login node, or use launcher: local" in done.stderr
