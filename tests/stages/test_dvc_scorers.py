"""What `dvc status` says when a scorer is swapped: score, advantage and then the update; no prefix and no rollout."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]


def dvc(folder: Path, *arguments: str) -> str:
    import os

    environment = os.environ | {"DVC_NO_ANALYTICS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dvc", *arguments]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's dvc.yaml and params.yaml with one epoch, all of whose stages count as done: `dvc commit` takes
    whatever lies at their outputs. Nothing is computed.
    """
    folder = tmp_path_factory.mktemp("dvc")
    shutil.copyfile(ROOT / "dvc.yaml", folder / "dvc.yaml")
    yaml = YAML()
    params = yaml.load((ROOT / "params.yaml").read_text())
    params["epochs"] = {"e001": {"prev": "e000"}}
    params["compare"]["after"] = "e001"
    with (folder / "params.yaml").open("w") as file:
        yaml.dump(params, file)
    dvc(folder, "init", "--no-scm")
    for name in ("weights/mini", "artifacts/base", "artifacts/e000/policy", "artifacts/e001/policy"):
        (folder / name).mkdir(parents=True)
        (folder / name / "w").write_text(name)
    for name in ("prefixes", "rollouts", "scores", "advantages"):
        (folder / "artifacts" / "e001" / f"{name}.zarr").mkdir()
        (folder / "artifacts" / "e001" / f"{name}.zarr" / "zarr.json").write_text(name)
    for name in (
        "e001/metrics/prefix",
        "e001/metrics/rollout",
        "e001/metrics/advantage",
        "e001/metrics/update",
    ):
        path = folder / "artifacts" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    (folder / "artifacts" / "evaluation").mkdir()
    for name in ("e000.json", "e001.json", "report.md", "metrics.json", "rewards.csv"):
        (folder / "artifacts" / "evaluation" / name).write_text("{}")
    dvc(folder, "commit", "--force")
    assert json.loads(dvc(folder, "status", "--json")) == {}
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "old", "new"),
    [
        ("quality", "critic", "hpsv3"),
        ("action", "pose", "depth-anything-3"),
        ("closure", "lucas-kanade", "cotracker"),
    ],
)
def test_another_scorer_redoes_score_advantage_and_update_alone(
    committed: Path, section: str, old: str, new: str
) -> None:
    path, yaml = committed / "params.yaml", YAML()
    text = path.read_text()
    params: Any = yaml.load(text)
    assert params["rewards"][section]["scorer"] == old
    params["rewards"][section]["scorer"] = new
    store = committed / "artifacts" / "e001" / "scores.zarr" / "zarr.json"
    advantages = committed / "artifacts" / "e001" / "advantages.zarr" / "zarr.json"
    try:
        with path.open("w") as file:
            yaml.dump(params, file)
        changed = json.loads(dvc(committed, "status", "--json"))
        assert set(changed) == {"score@e001", "advantage@e001"}  # both read the scorer's name
        # what follows once these two have written something else
        store.write_text("other scores")
        advantages.write_text("other advantages")
        changed = set(json.loads(dvc(committed, "status", "--json")))
        assert changed == {"score@e001", "advantage@e001", "update@e001"}
    finally:
        path.write_text(text)
        store.write_text("scores")
        advantages.write_text("advantages")
    assert json.loads(dvc(committed, "status", "--json")) == {}
