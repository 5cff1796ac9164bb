"""Stages on a real SLURM with two virtual nodes: the same bytes as here, chains of epochs, several nodes, faults.

`.ci/run` installs what is needed; where it cannot be installed, these tests are skipped and say why.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.slurm_world import Cluster, Project, make_project, preloaded, slurm, why_not

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
TARGET = ("-m", "dvc", "repro", "update@e001")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Below /tmp itself: sockets of the cluster have short names."""
    folder = Path(subprocess.check_output(["mktemp", "-d", "/tmp/wcpipe-slurm.XXXXXX"], text=True).strip())
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def path(work: Path) -> Iterator[Path]:
    with preloaded(work / "preloaded") as found:
        yield found


def started(folder: Path, accounting: bool, port: int) -> Iterator[Cluster]:
    try:
        with slurm(folder, accounting, port) as cluster:
            yield cluster
    except RuntimeError as error:
        pytest.skip(f"SLURM cannot be started here: {error}")


@pytest.fixture(scope="module")
def plain(work: Path) -> Iterator[Cluster]:
    yield from started(work / "plain", False, 28800)


@pytest.fixture(scope="module")
def accounted(work: Path) -> Iterator[Cluster]:
    yield from started(work / "accounted", True, 29800)


@pytest.fixture(scope="module")
def calm(work: Path, path: Path, tiny_base: Path) -> Project:
    """The same project, run here."""
    project = make_project(work / "calm", tiny_base, None, str(path))
    assert project.start(sys.executable, *TARGET, launcher="local").wait() == 0, project.output()[-2000:]
    return project


def wcpipe(project: Project, *arguments: str, launcher: str = "slurm") -> str:
    """Run a command to its end; it must succeed."""
    log = f"{time.monotonic_ns()}.txt"
    code = project.start("wcpipe", *arguments, launcher=launcher, log=log).wait(timeout=600)
    assert code == 0, project.output(log)
    return project.output(log)


def status(project: Project) -> dict[str, dict[str, Any]]:
    return {row["stage"]: row for row in json.loads(wcpipe(project, "cluster", "status", "--json"))}


@pytest.mark.parametrize("kind", ["plain", "accounted"])
def test_dvc_repro_on_slurm_makes_the_artifacts_of_a_local_run(
    work: Path, path: Path, tiny_base: Path, calm: Project, kind: str, request: pytest.FixtureRequest
) -> None:
    cluster: Cluster = request.getfixturevalue(kind)
    project = make_project(work / kind / "project", tiny_base, cluster.conf, str(path))
    assert project.start(sys.executable, *TARGET).wait() == 0, project.output()[-3000:]
    assert project.artifacts() == calm.artifacts()
    rows = status(project)
    assert {stage: (row["done"], row["state"]) for stage, row in rows.items()} == {
        "prefix": (2, "finished"),
        "rollout": (2, "finished"),
        "score": (2, "finished"),
        "advantage": (1, "finished"),
        "update": (1, "finished"),
    }
    # the whole array again: finished groups are passed over in well under a second each
    wcpipe(project, "rollout", "--epoch", "e001")
    lines = (project.folder / "artifacts/log/rollout.jsonl").read_text().splitlines()
    again = [said for said in map(json.loads, lines) if said.get("made") == 0]
    assert len(again) == 2
    assert all(said["seconds"] - said["time"]["load"] < 2.0 for said in again)  # two groups each
    assert project.artifacts() == calm.artifacts()
    assert "made 0" in wcpipe(project, "cluster", "logs", "rollout", "--epoch", "e001", "--task", "2")


def test_a_chain_of_epochs_is_submitted_cancelled_and_resumed(
    work: Path, path: Path, tiny_base: Path, calm: Project, plain: Cluster
) -> None:
    project = make_project(work / "chain", tiny_base, plain.conf, str(path))
    wcpipe(project, "cluster", "submit", "--epoch", "e001")
    rows = status(project)
    assert list(rows) == ["prefix", "rollout", "score", "advantage", "update"]
    wcpipe(project, "cluster", "cancel")
    plain.idle()
    assert {row["state"] for row in status(project).values()} <= {"cancelled", "submitted"}
    wcpipe(project, "cluster", "resume")
    ids = {stage: row["jobs"] for stage, row in status(project).items()}
    wcpipe(project, "cluster", "submit", "--epoch", "e001")  # nothing is submitted twice
    assert {stage: row["jobs"] for stage, row in status(project).items()} == ids
    plain.idle(900)
    assert all(row["done"] == row["tasks"] for row in status(project).values())
    mine = project.artifacts()
    assert {name: mine[name] for name in mine if name.startswith("e0")} == {
        name: digest for name, digest in calm.artifacts().items() if name.startswith("e0")
    }


def test_a_chain_whose_stage_failed_ends_and_goes_on_when_it_is_mended(
    work: Path, path: Path, tiny_base: Path, plain: Cluster
) -> None:
    project = make_project(work / "broken", tiny_base, plain.conf, str(path), groups=2)
    wcpipe(project, "base", launcher="local")
    codec = project.folder / "artifacts/base/codec.safetensors"
    codec.rename(codec.with_suffix(".away"))
    wcpipe(project, "cluster", "submit", "--epoch", "e001")
    plain.idle(600)  # what depends on the failed stage is cancelled by SLURM, not left pending for ever
    rows = status(project)
    assert rows["prefix"]["done"] == 0
    assert "failed with exit code" in rows["prefix"]["other"][0]["why"]
    assert rows["update"]["done"] == 0
    codec.with_suffix(".away").rename(codec)
    wcpipe(project, "cluster", "resume")
    plain.idle(900)
    assert all(row["done"] == row["tasks"] for row in status(project).values())


def test_the_update_runs_on_two_nodes(work: Path, calm: Project, plain: Cluster) -> None:
    folder = work / "nodes"
    shutil.copytree(calm.folder, folder)
    project = Project(folder, plain.conf)  # torchrun starts `wcpipe` itself: the real one
    conf = folder / "conf" / "cluster.yaml"
    update = 'update: {nodes: 2, processes: 1, gres: "gpu:h20:1"}'
    conf.write_text(conf.read_text().replace("advantage: {gres: }", f"advantage: {{gres: }}\n  {update}"))
    shutil.rmtree(folder / "artifacts/e001/policy")
    wcpipe(project, "update", "--epoch", "e001")
    script = (folder / "artifacts/log/cluster/e001/update/job.sbatch").read_text()
    assert "#SBATCH --nodes=2" in script
    last = json.loads((folder / "artifacts/log/update.jsonl").read_text().splitlines()[-2])
    assert last["ranks"] == 2
    before, after = (load_file(p.folder / "artifacts/e001/policy/live.safetensors") for p in (calm, project))
    assert before.keys() == after.keys()
    assert (
        max(np.abs(before[name] - after[name]).max() for name in before) < 1e-4
    )  # Adam's first steps are signs


def test_a_client_cancels_when_it_is_asked_to_stop_and_finds_its_job_again_when_it_died(
    work: Path, path: Path, tiny_base: Path, plain: Cluster
) -> None:
    project = make_project(work / "client", tiny_base, plain.conf, str(path), groups=4, steps=40)
    wcpipe(project, "base", launcher="local")
    record = project.folder / "artifacts/log/cluster/e001/prefix/job.json"
    client = project.start("wcpipe", "prefix", "--epoch", "e001", log="first.txt")
    while not record.exists() or json.loads(record.read_text())["state"] != "submitted":
        time.sleep(0.1)
    client.kill()
    client.wait()
    wcpipe(project, "prefix", "--epoch", "e001")
    ids = json.loads(record.read_text())["ids"]
    assert len(ids) == 1  # attached or finished, never a second array beside the first
    client = project.start("wcpipe", "rollout", "--epoch", "e001", log="second.txt")
    record = project.folder / "artifacts/log/cluster/e001/rollout/job.json"
    while not record.exists() or json.loads(record.read_text())["state"] != "submitted":
        time.sleep(0.1)
    client.terminate()
    assert client.wait(timeout=120) == 75
    assert "its job was cancelled" in project.output("second.txt")
    plain.idle(10)
    wcpipe(project, "rollout", "--epoch", "e001")
