"""The score stage with a real worker: the same bytes for any batch and shard, and nothing lost to a dead one."""

from __future__ import annotations

import shutil
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from pipeline import config
from pipeline.digests import digest_tree
from pipeline.scorers import workers
from pipeline.scorers.worker.client import Limits, Worker
from pipeline.scorers.worker_settings import WorkerSettings
from pipeline.stores import GroupStore, Shard
from stages.advantage import run_advantage
from stages.base import run_base
from stages.common import EpochPaths
from stages.prefix import run_prefix
from stages.rollout import run_rollout
from stages.score import run_score
from tests.conftest import TINY
from tests.stages import quality_double

EPOCH = "e001"


@pytest.fixture(scope="module")
def rolled_out(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with params.yaml and an epoch up to its rollouts: 3 groups of 8 candidates."""
    folder = tmp_path_factory.mktemp("workers")
    (folder / "params.yaml").write_text(TINY.format(weights=tiny_base))
    loaded = config.load(folder / "params.yaml", ["rollout.candidates=8"])
    run_base(loaded, folder / "root")
    run_prefix(loaded, EPOCH, folder / "root", Shard())
    run_rollout(loaded, EPOCH, folder / "root", Shard())
    return folder


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """`rewards.quality.scorer: hpsv3` is measured by quality_double.py in a worker; returns its folder."""
    folder, live = tmp_path / "double", []
    folder.mkdir()

    def live_worker(name: str, settings: WorkerSettings) -> Worker:
        limits = Limits(batch=settings.batch, start=120, tries=settings.tries, beat=0.2)
        sent = settings.model_dump(mode="json")
        live.append(Worker(name, Path(sys.executable), sent, scorer=quality_double.__file__, limits=limits))
        return live[-1]

    monkeypatch.setattr(workers, "live_worker", live_worker)
    monkeypatch.setattr(workers, "worker_digest", lambda name, settings: str(settings.measured_with()))
    yield folder
    for worker in live:
        worker.close()


def params(rolled_out: Path, double: Path, *overrides: str, batch: int = 8) -> config.Params:
    settings = f"{{hpsv3: {{weights: {double}, batch: {batch}}}}}"
    fixed = ["rollout.candidates=8", "rewards.quality.scorer=hpsv3", f"score.workers={settings}"]
    return config.load(rolled_out / "params.yaml", [*fixed, *overrides])


def scored(rolled_out: Path, tmp_path: Path, name: str) -> Path:
    shutil.copytree(rolled_out / "root", tmp_path / name)
    return tmp_path / name


def videos(root: Path, group: int) -> list[str]:
    """crc32 of what the worker gets of each candidate of a group."""
    frames = GroupStore.open(EpochPaths(root, EPOCH).rollouts).read(group, "frames")
    return [str(zlib.crc32(np.ascontiguousarray(video[1:]).tobytes())) for video in frames]


def test_the_same_bytes_for_batches_of_1_2_3_and_shuffled_shards(
    rolled_out: Path, double: Path, tmp_path: Path
) -> None:
    digests = set()
    for batch in (1, 2, 3):
        root = scored(rolled_out, tmp_path, f"batch{batch}")
        run_score(params(rolled_out, double, batch=batch), EPOCH, root, Shard(), only="critic")
        digests.add(digest_tree(EpochPaths(root, EPOCH).scores("critic")))
    root = scored(rolled_out, tmp_path, "shards")
    for index in (3, 1, 2):
        run_score(params(rolled_out, double, batch=3), EPOCH, root, Shard(index, 3), only="critic")
    digests.add(digest_tree(EpochPaths(root, EPOCH).scores("critic")))
    assert len(digests) == 1
    store = GroupStore.open(EpochPaths(root, EPOCH).scores("critic"))
    rollouts = GroupStore.open(EpochPaths(root, EPOCH).rollouts)
    for group in range(3):  # each value is that of its own candidate
        frames = rollouts.read(group, "frames")[:, 1:]
        prompt = len("A high-quality, ultra-detailed and well-structured image.")
        expected = frames.reshape(*frames.shape[:2], -1).mean(axis=2) + prompt
        np.testing.assert_allclose(store.read(group, "new_quality"), expected, rtol=1e-6)


def test_one_deadly_clip_of_eight_is_missing_and_only_it_is_measured_again(
    rolled_out: Path, double: Path, tmp_path: Path
) -> None:
    root, loaded = scored(rolled_out, tmp_path, "root"), params(rolled_out, double, batch=8)
    bad = videos(root, 1)[5]
    (double / "deadly").write_text(bad)
    summary = run_score(loaded, EPOCH, root, Shard())
    assert summary["critic"]["missing"] == 1
    assert summary["critic"]["of"] == 24
    store = GroupStore.open(EpochPaths(root, EPOCH).scores("critic"))
    assert [len(store.record(group)["reasons"]) for group in range(3)] == [0, 1, 0]
    assert "killed by SIGKILL (out of memory?)" in store.record(1)["reasons"]["5"]
    assert np.isnan(store.read(1, "new_quality")[5]).all()
    assert np.isfinite(np.delete(store.read(1, "new_quality"), 5, axis=0)).all()
    run_advantage(loaded, EPOCH, root)  # 1 of 24 may be missing

    (double / "deadly").unlink()
    (double / "asked").unlink()
    before = store.read(1, "new_quality")
    again = run_score(loaded, EPOCH, root, Shard(), retry_missing=True)
    assert again["critic"]["missing"] == 0
    asked = (double / "asked").read_text().split()
    assert len(asked) == 2  # the video's first frame, and the clip that was missing
    assert asked[1] == bad
    np.testing.assert_array_equal(np.delete(store.read(1, "new_quality"), 5, 0), np.delete(before, 5, 0))


def test_swapping_the_scorer_measures_quality_again_and_nothing_else(
    rolled_out: Path, double: Path, tmp_path: Path
) -> None:
    root = scored(rolled_out, tmp_path, "root")
    embedded = config.load(rolled_out / "params.yaml", ["rollout.candidates=8"])
    assert run_score(embedded, EPOCH, root, Shard())["pose"]["made"] == 3
    digests = {name: digest_tree(EpochPaths(root, EPOCH).scores(name)) for name in ("pose", "critic")}
    real = run_score(params(rolled_out, double), EPOCH, root, Shard())
    assert (real["pose"]["made"], real["critic"]["made"]) == (0, 3)
    assert digest_tree(EpochPaths(root, EPOCH).scores("pose")) == digests["pose"]
    assert digest_tree(EpochPaths(root, EPOCH).scores("critic")) != digests["critic"]
    assert run_rollout(embedded, EPOCH, root, Shard())["made"] == 0
    back = run_score(embedded, EPOCH, root, Shard())
    assert (back["pose"]["made"], back["critic"]["made"]) == (0, 3)
    assert {name: digest_tree(EpochPaths(root, EPOCH).scores(name)) for name in digests} == digests


def test_too_many_missing_scores_end_the_command_with_exit_code_9(rolled_out: Path, tmp_path: Path) -> None:
    from pipeline.errors import MissingScoresError
    from stages.score import refuse_missing

    summary = {"pose": {"missing": 0, "of": 24}, "critic": {"missing": 3, "of": 24, "reason": "SIGKILL"}}
    refuse_missing({**summary, "groups": 3}, 0.2, EPOCH)
    with pytest.raises(
        MissingScoresError, match=r"3 of 24 scores of critic are missing .*SIGKILL.*--retry-missing"
    ):
        refuse_missing({**summary, "groups": 3}, 0.1, EPOCH)
