"""`wcpipe update` under torchrun, through the disk: one rank's artifacts, one voice, and an end for every fault."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from pipeline import config, files
from pipeline.digests import digest_tree
from pipeline.errors import UsageError
from pipeline.stores import Shard
from pipeline.updates.checkpoint import read_state
from stages.advantage import run_advantage
from stages.base import run_base
from stages.common import EpochPaths
from stages.prefix import run_prefix
from stages.rollout import run_rollout
from stages.score import run_score
from stages.update import is_finished, run_update
from tests.pipeline.updates.test_ranks import ROOT, torchrun

pytestmark = pytest.mark.timeout(600)
EPOCH = "e001"
FAULT = str(ROOT / "tests/stages/ranks_fault.py")


@pytest.fixture(scope="module")
def ready(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(params.yaml, root) of an epoch in which only the update is missing."""
    from tests.conftest import TINY

    folder = tmp_path_factory.mktemp("ranks")
    (folder / "params.yaml").write_text(
        TINY.format(weights=tiny_base).replace("accumulation: 4", "accumulation: 3")
    )
    params, root = config.load(folder / "params.yaml"), folder / "root"
    run_base(params, root)
    for stage in (run_prefix, run_rollout, run_score):
        stage(params, EPOCH, root, Shard())
    run_advantage(params, EPOCH, root)
    return folder / "params.yaml", root


def words(ready: tuple[Path, Path], root: Path) -> list[str]:
    return ["update", "--epoch", EPOCH, "--root", str(root), "--params", str(ready[0]), "--json"]


def copied(ready: tuple[Path, Path], tmp_path: Path) -> Path:
    shutil.copytree(ready[1], tmp_path / "root")
    return tmp_path / "root"


def test_two_ranks_write_what_one_writes(ready: tuple[Path, Path], tmp_path: Path) -> None:
    params, one, two = config.load(ready[0]), copied(ready, tmp_path), tmp_path / "two"
    shutil.copytree(one, two)
    run_update(params, EPOCH, one)
    done = torchrun("-m", "stages.cli", *words(ready, two), "--set", "update.execution.checkpointing=true")
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)  # one object: only rank 0 speaks
    assert summary["made"] == 1
    assert summary["ranks"] == 2
    for name in ("live", "old", "ema"):
        a, b = (load_file(EpochPaths(root, EPOCH).policy / f"{name}.safetensors") for root in (one, two))
        assert a.keys() == b.keys()
        # the mini world multiplies in bfloat16, which rounds a batch of other size otherwise
        assert max(float((a[key] - b[key]).abs().max()) for key in a) < 2 * params.update.lr
    expected, found = (files.read_json(EpochPaths(r, EPOCH).metrics("update"), "") for r in (one, two))
    assert found.keys() == expected.keys()
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3)
    assert len((two / "log/update.jsonl").read_text().splitlines()) == 1
    # the same inputs: sharding and recomputing are no part of what the policy was made from
    assert is_finished(params, EPOCH, two)
    assert run_update(params, EPOCH, two)["made"] == 0
    one_state, two_state = (read_state(EpochPaths(r, EPOCH).policy)["state"] for r in (one, two))
    assert one_state["extra"] == two_state["extra"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("kill", "wcpipe: rank 0 of 2 lost the others"),
        ("signal", "wcpipe: stopped by SIGUSR1 before the epoch's policy was written"),
        ("full", "the disk is full; the previous checkpoint is untouched"),
    ],
)
def test_every_fault_ends_the_job_with_one_line_and_a_usable_policy(
    ready: tuple[Path, Path], tmp_path: Path, fault: str, line: str
) -> None:
    params, root = config.load(ready[0]), copied(ready, tmp_path)
    before = digest_tree(EpochPaths(root, "e000").policy)
    done = torchrun(FAULT, fault, *words(ready, root))
    assert done.returncode != 0
    assert done.stderr.count(line) == 1, done.stderr[-3000:]
    assert "stages/update.py" not in done.stderr  # tracebacks are torchrun's own, none is a rank's
    assert digest_tree(EpochPaths(root, "e000").policy) == before
    assert not is_finished(params, EPOCH, root)
    assert run_update(params, EPOCH, root)["made"] == 1  # by one rank, as if nothing had been


def test_other_stages_refuse_to_be_several_processes(
    ready: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    params = config.load(ready[0])
    with pytest.raises(UsageError, match=r"`wcpipe prefix` is one process, but WORLD_SIZE is 2"):
        run_prefix(params, EPOCH, tmp_path / "root", Shard())
    assert not (tmp_path / "root").exists()
