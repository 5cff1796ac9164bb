"""conf/cluster.yaml is read strictly, and the scripts made of it say what it says."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster.config import ClusterConfig, load_cluster, parse_cluster
from pipeline.cluster.script import Job, render
from pipeline.errors import ConfigError

ROOT = Path(__file__).parents[3]


def job(stage: str = "rollout", tasks: int = 4, array: tuple[int, ...] = (1, 2, 3, 4)) -> Job:
    command = ["wcpipe", stage, "--epoch", "e001", "--set", "update.lr=1e-4"]
    return Job(
        f"wcpipe.e001.{stage}.t.0", stage, command, tasks, array, Path("/w/log/cluster/e001/x"), Path("/w")
    )


def test_the_committed_file_is_valid_and_local() -> None:
    config = load_cluster(ROOT / "conf" / "cluster.yaml")
    assert not any(config.launches(stage) for stage in ("base", "rollout", "update"))
    assert config.resources("update").ranks == 64
    assert config.resources("advantage").gres is None
    assert config.tasks("rollout", 16, 1) == 16  # never more tasks than shards
    assert config.tasks("rollout", 1000, 21) == 48


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"launchr": "slurm"}, "unknown key 'launchr'; did you mean 'launcher'"),
        ({"defaults": {"partitions": "gpu"}}, "unknown key 'defaults.partitions'"),
        ({"stages": {"rollouts": {}}}, "stages.rollouts: no such stage; did you mean 'rollout'"),
        ({"stages": {"rollout": {"gpus": 1}}}, "unknown key 'stages.rollout.gpus'"),
        (
            {"stages": {"update": {"tasks": 2}}},
            "stages.update.tasks is 2: only prefix, rollout, score have parts",
        ),
        ({"stages": {"rollout": {"nodes": 2}}}, "only update uses several nodes"),
        ({"margin": 120, "stages": {"score": {"time": 3}}}, "stages.score.time is 3 minutes: SLURM may send"),
        ({"signal": "KILL"}, 'signal is "KILL"'),
        ({"retries": "3"}, 'retries is "3"'),
    ],
)
def test_a_mistake_is_named_with_its_remedy(data: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_cluster(data)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_environment_overrides_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_cluster({"stages": {"base": {"launcher": "local"}}})
    monkeypatch.setenv("WCPIPE_LAUNCHER", "slurm")
    assert config.launches("rollout")
    assert not config.launches("base")
    monkeypatch.setenv("WCPIPE_LAUNCHER", "local")
    assert not parse_cluster({"launcher": "slurm"}).launches("rollout")
    monkeypatch.setenv("WCPIPE_LAUNCHER", "Slurm")
    with pytest.raises(ConfigError, match="WCPIPE_LAUNCHER is 'Slurm'"):
        config.launches("rollout")


def test_an_array_script_says_what_the_file_says() -> None:
    config = parse_cluster(
        {
            "setup": ["source .venv/bin/activate"],
            "container": "apptainer exec --nv wcpipe.sif",
            "defaults": {"partition": "gpu", "account": "vision", "gres": "gpu:h20:1", "time": 30},
            "stages": {"rollout": {"throttle": 2, "extra": ["--constraint=ib"]}},
        }
    )
    text = render(job(array=(1, 2, 4)), config)
    for line in (
        "#SBATCH --array=1-2,4%2",
        "#SBATCH --account=vision",
        "#SBATCH --gres=gpu:h20:1",
        "#SBATCH --signal=B:USR2@120",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --constraint=ib",
        "source .venv/bin/activate",
    ):
        assert line in text.splitlines()
    assert "--qos" not in text
    assert "-- \\\n  apptainer exec --nv wcpipe.sif wcpipe rollout" in text
    assert text.rstrip().endswith('--set update.lr=1e-4 --shard "$SLURM_ARRAY_TASK_ID/4"')
    assert "--shard" not in render(job("advantage", 1, (1,)), config)


@pytest.mark.parametrize("nodes", [1, 8])
def test_every_script_is_valid_bash(nodes: int) -> None:
    config = parse_cluster({"stages": {"update": {"nodes": nodes, "processes": 8}}})
    for stage in ("rollout", "update"):
        script = render(job(stage), config)
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
    assert "torchrun" in script
    assert f"#SBATCH --nodes={nodes}" in script
    assert "SLURM_JOB_NODELIST" in script


def test_without_a_file_everything_runs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WCPIPE_CLUSTER", raising=False)
    monkeypatch.delenv("WCPIPE_LAUNCHER", raising=False)
    assert load_cluster() == ClusterConfig()
    assert not load_cluster().launches("rollout")
    monkeypatch.setenv("WCPIPE_CLUSTER", "nowhere.yaml")
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        load_cluster()
