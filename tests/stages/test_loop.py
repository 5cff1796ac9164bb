"""The whole loop on a tiny random base, through the real stages and the disk: counts, resuming, sharding, changes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import config, files, rewards, rollout, stores
from pipeline.digests import digest_tree
from pipeline.errors import CheckpointError, DataError, Interrupted, MissingScoresError
from pipeline.stores import GroupStore, Shard
from stages.advantage import run_advantage
from stages.base import run_base
from stages.common import STOP, EpochPaths
from stages.prefix import run_prefix
from stages.rollout import run_rollout, unusable
from stages.run import prune, run_epochs
from stages.score import run_score
from stages.update import is_finished, run_update
from stages.verify import run_verify

ARTIFACTS = ["*.json", "c.*", "c/*", "*.safetensors"]


def digest(root: Path) -> str:
    """Identity of all artifacts below `root`; the log beside them holds clocks and is left out."""
    shutil.rmtree(root / "log", ignore_errors=True)
    return digest_tree(root, ARTIFACTS)


def epochs(path: Path, count: int, *overrides: str) -> config.Params:
    params = config.load(path, overrides)
    data = params.written() | {"epochs": config.epoch_chain(count, params.epochs)}
    return config.Params.model_validate_strict(data)


@pytest.fixture(scope="module")
def finished(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(params.yaml, root) of two finished epochs; tests copy the root before they change it."""
    from tests.conftest import TINY

    folder = tmp_path_factory.mktemp("loop")
    (folder / "params.yaml").write_text(TINY.format(weights=tiny_base))
    run_epochs(config.load(folder / "params.yaml"), folder / "root")
    return folder / "params.yaml", folder / "root"


def copy(finished: tuple[Path, Path], tmp_path: Path) -> tuple[config.Params, Path]:
    shutil.copytree(finished[1], tmp_path / "root")
    return config.load(finished[0]), tmp_path / "root"


def test_counts_equal_the_formulas_and_everything_verifies(finished: tuple[Path, Path]) -> None:
    params, root = config.load(finished[0]), finished[1]
    P, G, S, f = (
        params.prefix.groups,
        params.rollout.candidates,
        params.sampler.steps,
        params.update.timesteps,
    )
    for epoch, clip in (("e001", 1), ("e002", 2)):
        metrics = {
            stage: files.read_json(EpochPaths(root, epoch).metrics(stage), "")
            for stage in ("prefix", "rollout", "update")
        }
        assert metrics["prefix"]["forwards"] == {"denoiser": P * S * (clip - 1), "context": 0}
        assert metrics["rollout"]["forwards"]["denoiser"] == P * S * G
        assert (metrics["rollout"]["forwards"]["context"] > 0) == (clip > 1)
        samples = metrics["update"]["samples"]
        assert samples > 0
        for name in ("live_forwards", "backwards", "old_forwards"):
            assert metrics["update"][name] == samples * f
    summary = run_verify([root])
    assert (summary["bad"], summary["missing"], summary["stores"]) == (0, 0, 10)


def test_candidates_differ_and_share_their_past(finished: tuple[Path, Path]) -> None:
    paths = EpochPaths(finished[1], "e002")
    rollouts, prefixes = GroupStore.open(paths.rollouts), GroupStore.open(paths.prefixes)
    for index in range(len(rollouts)):
        latents = rollouts.read(index, "latents").astype(np.float32)
        assert np.isfinite(latents).all()
        assert min(np.abs(latents[0] - other).max() for other in latents[1:]) > 1e-3
        first = prefixes.read(index, "latents")[:, 0]
        assert first.shape == latents.shape[1:2] + latents.shape[3:]
    first_clip = GroupStore.open(EpochPaths(finished[1], "e001").rollouts).read(0, "latents")
    assert all(
        np.array_equal(first_clip[0][:, 0], other[:, 0]) for other in first_clip
    )  # the conditioning latent


def test_a_second_run_does_nothing(finished: tuple[Path, Path], tmp_path: Path) -> None:
    params, root = copy(finished, tmp_path)
    before = digest(root)
    assert run_epochs(params, root)["made"] == 0
    for epoch in ("e001", "e002"):
        assert run_prefix(params, epoch, root, Shard())["made"] == 0
        assert run_rollout(params, epoch, root, Shard())["made"] == 0
        assert run_score(params, epoch, root, Shard())["pose"]["made"] == 0
        assert run_advantage(params, epoch, root)["made"] == 0
        assert run_update(params, epoch, root)["made"] == 0
    assert digest(root) == before


def test_four_shards_in_any_order_give_the_same_bytes(finished: tuple[Path, Path], tmp_path: Path) -> None:
    params, root = copy(finished, tmp_path)
    before = digest(root)
    paths = EpochPaths(root, "e002")
    shutil.rmtree(paths.folder)
    for stage in (run_prefix, run_rollout, run_score):
        for part in (3, 1, 4, 2):
            stage(params, "e002", root, Shard(part, 4))
    run_advantage(params, "e002", root)
    run_update(params, "e002", root)
    assert digest(root) == before


def test_two_epochs_and_two_more_equal_four(finished: tuple[Path, Path], tmp_path: Path) -> None:
    """Live, old, ema, optimizer and generator come back bit-equal: the artifacts of all four epochs are the same."""
    _, root = copy(finished, tmp_path)
    run_epochs(epochs(finished[0], 4), root)
    run_epochs(epochs(finished[0], 4), tmp_path / "straight")
    assert digest(root) == digest(tmp_path / "straight")


def test_a_changed_update_redoes_no_rollout_of_its_epoch(finished: tuple[Path, Path], tmp_path: Path) -> None:
    _, root = copy(finished, tmp_path)
    params = epochs(finished[0], 2, "update.lr=1e-3", "advantage.weights={action_fine: 1.0}")
    before = {
        name: digest_tree(EpochPaths(root, "e001").folder / name)
        for name in ("prefixes.zarr", "rollouts.zarr")
    }
    assert run_rollout(params, "e001", root, Shard())["made"] == 0
    assert run_score(params, "e001", root, Shard())["critic"]["made"] == 0
    assert run_advantage(params, "e001", root)["made"] == 3
    assert run_update(params, "e001", root)["made"] == 1
    assert (
        run_prefix(params, "e002", root, Shard())["made"] == 3
    )  # another policy: the next epoch starts over
    after = {
        name: digest_tree(EpochPaths(root, "e001").folder / name)
        for name in ("prefixes.zarr", "rollouts.zarr")
    }
    assert before == after


def test_scores_that_are_missing_are_never_zero_and_can_be_retried(
    finished: tuple[Path, Path], tmp_path: Path
) -> None:
    params, root = copy(finished, tmp_path)
    paths = EpochPaths(root, "e001")
    store = GroupStore.open(paths.scores("pose"))
    arrays = {name: store.read(1, name) for name in store.specs}
    broken = {name: array.copy() for name, array in arrays.items()}
    broken["relative"][2] = np.nan
    store.write(1, broken, {"reasons": {"2": "the worker ran out of memory"}})

    run_advantage(params, "e001", root)
    advantages = GroupStore.open(paths.advantages)
    r, order = advantages.read(1, "r"), advantages.read(1, "order")
    assert np.isnan(r[2])
    assert np.isfinite(np.delete(r, 2)).all()
    assert 2 not in order
    assert advantages.record(1)["reasons"]["action_fine"] == {"2": "the worker ran out of memory"}

    strict = epochs(finished[0], 2, "score.missing_share=0.05")
    with pytest.raises(MissingScoresError, match=r"1 of 12 .*the worker ran out of memory.*--retry-missing"):
        run_advantage(strict, "e001", root)
    assert run_score(params, "e001", root, Shard())["pose"]["made"] == 0
    assert run_score(params, "e001", root, Shard(), retry_missing=True)["pose"] | {"time": 0} == {
        "made": 1,
        "missing": 0,
        "of": 12,
        "time": 0,
    }
    again = GroupStore.open(paths.scores("pose")).read(1, "relative")
    np.testing.assert_array_equal(
        np.delete(again, 2, 0), np.delete(arrays["relative"], 2, 0)
    )  # kept, not redone
    np.testing.assert_allclose(again[2], arrays["relative"][2], atol=1e-5)
    run_advantage(params, "e001", root)
    assert not np.isnan(GroupStore.open(paths.advantages).read(1, "r")).any()


def test_a_damaged_group_is_named_and_only_it_is_made_again(
    finished: tuple[Path, Path], tmp_path: Path
) -> None:
    params, root = copy(finished, tmp_path)
    before = digest(root)
    paths = EpochPaths(root, "e002")
    store = GroupStore.open(paths.rollouts)
    path = store.array_path(1, "latents")
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match="rollouts.zarr: damaged: .*group 1"):
        run_verify([root])
    (paths.policy / "state.json").unlink()
    with pytest.raises(DataError, match="group 1 .*wcpipe verify --repair"):
        run_update(params, "e002", root)
    assert run_verify([root], repair=True)["repaired"] == 1
    assert run_rollout(params, "e002", root, Shard())["made"] == 1
    run_update(params, "e002", root)
    assert digest(root) == before


def test_stages_say_what_has_to_run_first(tiny_params: Path, tmp_path: Path) -> None:
    params, root = config.load(tiny_params), tmp_path / "root"
    run_base(params, root)
    with pytest.raises(DataError, match=r"prefixes\.zarr: is missing; run `wcpipe prefix --epoch e001`"):
        run_rollout(params, "e001", root, Shard())
    run_prefix(params, "e001", root, Shard(1, 2))
    with pytest.raises(DataError, match=r"2 of 3 groups are not finished; run `wcpipe prefix"):
        run_rollout(params, "e001", root, Shard())
    with pytest.raises(CheckpointError, match=r"e001/policy: .*run `wcpipe prefix --epoch e001`"):
        run_prefix(params, "e002", root, Shard())


@pytest.mark.parametrize(
    ("stage", "lost", "says"),
    [
        (run_score, ["prefixes.zarr", "rollouts.zarr"], "wcpipe prefix"),
        (run_score, ["rollouts.zarr"], "wcpipe rollout"),
        (run_advantage, ["prefixes.zarr", "scores.zarr"], "wcpipe prefix"),
        (run_advantage, ["rollouts.zarr", "scores.zarr"], "wcpipe rollout"),
        (run_advantage, ["scores.zarr/critic"], "wcpipe score"),
        (run_update, ["rollouts.zarr", "advantages.zarr"], "wcpipe rollout"),
        (run_update, ["advantages.zarr"], "wcpipe advantage"),
    ],
)
def test_a_lost_input_is_remedied_by_the_stage_that_comes_first(
    finished: tuple[Path, Path], tmp_path: Path, stage: Any, lost: list[str], says: str
) -> None:
    params, root = copy(finished, tmp_path)
    for name in lost:
        shutil.rmtree(EpochPaths(root, "e001").folder / name)
    (EpochPaths(root, "e001").policy / "state.json").unlink()
    with pytest.raises(DataError, match=f"is missing; run `{says} --epoch e001`"):
        stage(params, "e001", root, *([Shard()] if stage is run_score else []))


def test_a_signal_stops_after_a_finished_group_and_the_rest_follows(
    finished: tuple[Path, Path], tmp_path: Path
) -> None:
    params, root = copy(finished, tmp_path)
    before = digest(root)
    shutil.rmtree(EpochPaths(root, "e002").rollouts)
    STOP.name = "SIGTERM"
    with pytest.raises(Interrupted, match="SIGTERM .*run the same command again") as caught:
        run_rollout(params, "e002", root, Shard())
    assert caught.value.exit_code == 75
    assert GroupStore.open(EpochPaths(root, "e002").rollouts).pending() == [1, 2]
    assert run_rollout(params, "e002", root, Shard())["made"] == 2
    assert digest(root) == before


def test_a_signal_stops_advantages_and_the_update_and_says_what_is_lost(
    finished: tuple[Path, Path], tmp_path: Path
) -> None:
    params, root = copy(finished, tmp_path)
    before = digest(root)
    paths = EpochPaths(root, "e002")
    shutil.rmtree(paths.advantages)
    STOP.name = "SIGINT"
    with pytest.raises(Interrupted, match="SIGINT before the advantages were written"):
        run_advantage(params, "e002", root)
    assert not paths.advantages.exists()
    run_advantage(params, "e002", root)
    (paths.policy / "state.json").unlink()
    STOP.name = "SIGTERM"
    with pytest.raises(Interrupted, match="the steps of this update are lost.*run the same command again"):
        run_update(params, "e002", root)
    assert run_update(params, "e002", root)["made"] == 1
    assert digest(root) == before


def test_the_update_of_a_finished_and_thinned_epoch_returns_at_once(
    finished: tuple[Path, Path], tmp_path: Path
) -> None:
    params, root = copy(finished, tmp_path)
    prune(root, {"e001": "e000", "e002": "e001"}, ["e001", "e002"], keep=1)
    before = digest(root)
    assert run_update(params, "e001", root)["made"] == 0
    assert digest(root) == before
    with pytest.raises(DataError, match=r"prefixes\.zarr: is missing; run `wcpipe prefix --epoch e001`"):
        run_update(epochs(finished[0], 2, "update.lr=1e-3"), "e001", root)


def test_a_finished_store_of_advantages_is_not_judged_again(
    finished: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that was changed without a new version leaves metrics and store alike; a new version redoes both."""
    params, root = copy(finished, tmp_path)
    before = digest(root)
    old = rewards.find("quality_drift")

    def halved(raw: Any, context: Any, config: Any) -> rewards.RewardValues:
        found = old.compute(raw, context, config)
        return rewards.RewardValues(found.value_G / 2, found.reasons, found.details)

    monkeypatch.setattr(rewards, "REWARDS", dict(rewards.REWARDS))
    rewards.REWARDS["quality_drift"] = replace(old, compute=halved)
    summary = run_advantage(params, "e001", root)
    assert summary["made"] == 0
    assert digest(root) == before
    metrics = files.read_json(EpochPaths(root, "e001").metrics("advantage"), "")
    assert summary["quality_drift"] == metrics["quality_drift/mean"]

    assert is_finished(params, "e001", root)
    rewards.REWARDS["quality_drift"] = replace(old, compute=halved, version=2)
    assert not is_finished(params, "e001", root)
    assert run_advantage(params, "e001", root)["made"] == 3
    again = files.read_json(EpochPaths(root, "e001").metrics("advantage"), "")
    assert again["quality_drift/mean"] == pytest.approx(metrics["quality_drift/mean"] / 2)


def test_what_overflows_the_stored_type_is_missing_with_a_reason(
    finished: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, root = copy(finished, tmp_path)
    paths = EpochPaths(root, "e002")
    shutil.rmtree(paths.rollouts)
    sample = rollout.sample_candidates

    def overflowing(*args: Any) -> torch.Tensor:
        x0 = sample(*args)
        x0[1, 0, 0, 0, 0] = 1e6  # finite, and infinite in float16
        return x0

    monkeypatch.setattr(rollout, "sample_candidates", overflowing)
    run_rollout(params, "e002", root, Shard())
    store = GroupStore.open(paths.rollouts)
    assert store.record(0)["reasons"] == {"1": "the sample is not finite in float16"}
    run_score(params, "e002", root, Shard())
    assert np.isnan(GroupStore.open(paths.scores("critic")).read(0, "quality")).any(1).tolist() == [
        False,
        True,
        False,
        False,
    ]
    run_advantage(epochs(finished[0], 2, "score.missing_share=0.3"), "e002", root)
    assert 1 not in GroupStore.open(paths.advantages).read(0, "order")


def test_candidates_of_a_prefix_that_is_not_finite_are_all_missing() -> None:
    past, fine = torch.zeros(2, 4, 1, 1), torch.zeros(3, 2, 4, 1, 1)
    assert unusable(past, fine, "float16") == {}
    past[0, 0] = torch.inf
    reasons = unusable(past, fine, "float16")
    assert list(reasons) == ["0", "1", "2"]
    assert reasons["0"] == "the clips before are not finite in float16"


def test_artifacts_hold_no_clock_and_their_parameters(finished: tuple[Path, Path]) -> None:
    root = finished[1]
    about = GroupStore.open(EpochPaths(root, "e001").rollouts).about
    assert about["inputs"]["params"]["sampler"] == {"steps": 2, "shift": 3.0, "latents": "float16"}
    state = json.loads((EpochPaths(root, "e002").policy / "state.json").read_text())
    chain: dict[str, Any] = state["state"]["extra"]["chain"]
    assert chain["params"]["update"]["timesteps"] == 1
    text = " ".join(path.read_text() for path in root.rglob("*.json"))
    assert "seconds" not in text
    assert not list(root.rglob("*.partial"))
    assert stores.verify(GroupStore.open(EpochPaths(root, "e001").prefixes)) == []
