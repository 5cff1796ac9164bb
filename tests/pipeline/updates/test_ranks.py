"""Two ranks against one: the same update, the same checkpoint, nobody waits for ever, everybody stops together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.errors import ConfigError, UsageError
from pipeline.updates.checkpoint import read_state
from pipeline.updates.environment import EndedElsewhere, Place, place
from pipeline.updates.policy import SETS, Policy
from pipeline.updates.ranks import RankLost, Ranks, joined
from pipeline.updates.trained import prepare_params
from tests.pipeline.updates.ranks_job import CASES, make_world, update

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.timeout(
    600
)  # tens of seconds on free cores; a busy machine starts torch five times slower
SAME = [name for name, case in CASES.items() if not case.spoiled]


def torchrun(*words: str, ranks: int = 2, timeout: int = 580) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks would outlive it
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the ranks have: another order of sums, seen through Adam's first steps, is 3e-6 and no difference of ranks."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def results(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with every case run by one rank (in this process) and by two (one torchrun for all)."""
    out = tmp_path_factory.mktemp("ranks")
    for name in SAME:
        update(name, Ranks(), out)
    done = torchrun(str(ROOT / "tests/pipeline/updates/ranks_job.py"), str(out), *CASES)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def said(results: Path, name: str, ranks: int, rank: int = 0) -> dict[str, Any]:
    return json.loads((results / f"{name}-{ranks}.{rank}.json").read_text())


@pytest.mark.parametrize("name", SAME)
def test_two_ranks_make_the_update_of_one(results: Path, name: str) -> None:
    moved = 0.0
    start = make_world(CASES[name].network)
    prepare_params(start.model, CASES[name].config.params, seed=3)
    before = {key: p.detach() for key, p in start.model.named_parameters()}
    for weights in SETS:
        one, two = (load_file(results / f"{name}-{n}" / f"{weights}.safetensors") for n in (1, 2))
        assert one.keys() == two.keys()
        for key, tensor in one.items():
            assert two[key].shape == tensor.shape
            assert float((two[key] - tensor).abs().max()) < 1e-6, (weights, key)
        moved = max(moved, *(float((one[key] - before[key]).abs().max()) for key in one))
    assert moved > 1e-4  # something happened that could have differed
    one, two = (read_state(results / f"{name}-{n}") for n in (1, 2))
    assert {k: v["bytes"] for k, v in one["files"].items()} == {
        k: v["bytes"] for k, v in two["files"].items()
    }
    a, b, other = said(results, name, 1), said(results, name, 2), said(results, name, 2, rank=1)
    assert a["steps"] == b["steps"] == other["steps"]
    assert b["metrics"] == other["metrics"]
    for key, value in a["metrics"].items():
        if key != "context_passes":  # a group that two ranks share has its context built by both
            assert b["metrics"][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


def test_weights_are_sharded_or_whole_as_asked(results: Path) -> None:
    whole = said(results, "full", 1)["held"]
    assert said(results, "full", 2)["held"] + said(results, "full", 2, 1)["held"] == whole
    assert said(results, "full", 2)["held"] < 0.75 * whole
    whole = said(results, "step", 1)["held"]
    assert said(results, "step", 2)["held"] == said(results, "step", 2, 1)["held"] == whole


def test_a_rank_loads_only_what_it_trains(results: Path) -> None:
    """1 + 2 samples, one a step: they are all rank 0's, and rank 1 loads one group to be idle with."""
    epochs = len(CASES["idle"].epochs)
    assert said(results, "idle", 2)["loaded"] == [0, 1] * epochs
    assert said(results, "idle", 2, rank=1)["loaded"] == [0] * epochs


def test_a_checkpoint_of_two_ranks_is_read_by_one(results: Path) -> None:
    case = CASES["full"]
    world = make_world("wan")
    policy = Policy(world.model, case.config, 3)
    assert policy.load(results / "full-2") == {"case": "full"}
    assert policy.epoch == 2
    for weights in SETS:
        stored = load_file(results / "full-2" / f"{weights}.safetensors")
        assert all(torch.equal(policy.sets[weights][key], stored[key]) for key in stored)
    assert policy.digest() == read_state(results / "full-2")["state"]["digest"]
    assert len(policy.optimizer.state) == len(policy.params)


def test_a_bad_sample_of_one_rank_stops_all_before_the_weights_move(results: Path) -> None:
    """The last sample belongs to rank 1: it has the words, rank 0 the same exit code."""
    quiet, loud = said(results, "spoiled", 2), said(results, "spoiled", 2, rank=1)
    assert loud["error"] == "NumericsError"
    assert "group1" in loud["said"]
    assert quiet["error"] == "EndedElsewhere"
    assert quiet["code"] == loud["code"] == 8
    assert quiet["step"] == loud["step"] == 0


def test_one_process_agrees_with_itself() -> None:
    ranks = Ranks()
    assert ranks.gather("a") == ["a"]
    assert ranks.most(3) == 3
    with pytest.raises(ConfigError), ranks.agreed():
        raise ConfigError("x")
    with pytest.raises(RuntimeError, match="socket"), ranks.watched():
        raise RuntimeError("socket closed")  # not another rank's: there is none


def test_a_lost_connection_is_said_in_one_line() -> None:
    ranks = Ranks(Place(rank=0, size=2))
    words = r"rank 0 of 2 lost the others.*previous policy is untouched"
    with pytest.raises(RankLost, match=words) as lost, ranks.watched():
        raise RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:1\nmore")
    assert "\n" not in str(lost.value)
    assert lost.value.exit_code == 12
    with pytest.raises(RuntimeError, match="shape"), ranks.watched():
        raise RuntimeError("shape '[3]' is invalid")
    assert EndedElsewhere(5).exit_code == 5


def test_the_environment_is_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert place() == Place(0, 1, 0, 1)
    with joined() as ranks:
        assert ranks.size == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="RANK"):
        place()
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        place()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert place() == Place(3, 4, 1, 2)
    with pytest.raises(ConfigError, match=r"shard is 3.*4 ranks"), joined(3):
        pass
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(UsageError, match="none of WORLD_SIZE"):
        place()
