"""The committed dvc.yaml itself, on a tiny base: `dvc repro`, killed with -9 and started again, nothing to do after."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from pipeline.digests import digest_file, digest_tree

ROOT = Path(__file__).parents[2]
SMALL = {
    "words": {"hold": [1, 3]},
    "sampler": {"steps": 2},
    "prefix": {"groups": 3},
    "rollout": {"candidates": 4},
    "update": {"timesteps": 1, "accumulation": 4},
    "evaluate": {"basic": 2, "compound": 2},
    "compare": {"before": "e000", "after": "e002"},
}


def project(folder: Path, base: Path) -> Path:
    """A working folder with the repository's dvc.yaml and its params.yaml made small: two epochs on `base`."""
    shutil.copytree(base, folder / "weights" / "mini")
    shutil.copyfile(ROOT / "dvc.yaml", folder / "dvc.yaml")
    yaml = YAML()
    params = yaml.load((ROOT / "params.yaml").read_text())
    for section, values in SMALL.items():
        params.setdefault(section, {}).update(values)
    last = sorted(params["epochs"])[1]
    for epoch in list(params["epochs"]):
        if epoch > last:
            del params["epochs"][epoch]
    params["compare"]["after"] = last
    with (folder / "params.yaml").open("w") as file:
        yaml.dump(params, file)
    dvc(folder, "init", "--no-scm").wait()
    return folder


def dvc(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "DVC_NO_ANALYTICS": "1",
    }
    command = [sys.executable, "-m", "dvc", *arguments]
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )


def repro(folder: Path) -> str:
    """Run `dvc repro` to its end and return what it said. It must succeed."""
    (folder / "output.txt").write_bytes(b"")
    code = dvc(folder, "repro").wait(timeout=900)
    text = (folder / "output.txt").read_text()
    assert code == 0, text[-3000:]
    return text


def artifacts(folder: Path) -> dict[str, str]:
    """Digest of every artifact by name; the log holds clocks and is none."""
    root = folder / "artifacts"
    names = sorted(p for p in root.glob("*/*") if p.parent.name != "log" and not p.name.startswith("."))
    return {p.relative_to(root).as_posix(): digest_tree(p) if p.is_dir() else digest_file(p) for p in names}


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_killed_anywhere_it_finishes_with_the_same_bytes(tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "clean").mkdir()
    (tmp_path / "killed").mkdir()
    clean, killed = project(tmp_path / "clean", tiny_base), project(tmp_path / "killed", tiny_base)
    assert "update@e002" in repro(clean)
    expected = artifacts(clean)
    assert {"e002/policy", "e002/rollouts.zarr", "e001/metrics"} <= set(expected)

    dice, kills = random.Random(0), 0
    # Kills follow what has appeared on disk and not the clock: on a busy machine a share of the whole time is anything.
    for landmark in ("e001/prefixes.zarr", "e001/rollouts.zarr", "e001/policy", "e002/scores.zarr"):
        process = dvc(killed, "repro")
        while process.poll() is None and not (killed / "artifacts" / landmark).exists():
            time.sleep(0.02)
        time.sleep(dice.uniform(0.0, 0.5))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills == 4
    repro(killed)
    assert artifacts(killed) == expected
    assert "Data and pipelines are up to date" in repro(killed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_new_reward_weight_redoes_no_rollout_of_the_first_epoch(tiny_base: Path, tmp_path: Path) -> None:
    folder = project(tmp_path, tiny_base)
    repro(folder)
    params = (folder / "params.yaml").read_text()
    assert "quality_drift: 1.0" in params
    (folder / "params.yaml").write_text(params.replace("quality_drift: 1.0", "quality_drift: 0.5"))
    said = repro(folder)
    for stage in ("prefix@e001", "rollout@e001", "score@e001"):
        assert f"Stage '{stage}' didn't change, skipping" in said
    for stage in ("advantage@e001", "update@e001", "rollout@e002"):
        assert f"Running stage '{stage}'" in said
