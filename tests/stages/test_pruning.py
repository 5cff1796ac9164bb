"""Thinning out finished epochs: what stays can still be judged, and a run goes on after it."""
# ruff: noqa: F811 - a fixture of the other file is imported by name, as pytest wants it

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.errors import CheckpointError
from stages.common import EpochPaths
from stages.run import parse_keep, prune, run_epochs
from tests.stages.test_loop import copy, digest, epochs, finished  # noqa: F401


def test_pruning_keeps_policies_and_a_run_goes_on_after_it(
    finished: tuple[Path, Path], tmp_path: Path
) -> None:
    params, root = copy(finished, tmp_path)
    prev = {"e001": "e000", "e002": "e001"}
    assert prune(root, prev, ["e001", "e002"], keep=1) == ["e001"]
    assert not EpochPaths(root, "e001").rollouts.exists()
    assert EpochPaths(root, "e002").rollouts.exists()
    assert run_epochs(params, root)["made"] == 0
    run_epochs(epochs(finished[0], 3), root, keep=1)
    assert not EpochPaths(root, "e002").rollouts.exists()
    kept = {path.name for path in EpochPaths(root, "e001").policy.iterdir()}
    assert kept == {"state.json", "ema.safetensors"}
    whole = {path.name for path in EpochPaths(root, "e003").policy.iterdir()}
    assert whole > kept
    assert whole == {path.name for path in EpochPaths(root, "e000").policy.iterdir()}
    shutil.rmtree(EpochPaths(root, "e003").folder)  # its own start, e002, was thinned out
    with pytest.raises(CheckpointError, match=r"e002/policy/old\.safetensors: is missing.*another --root"):
        run_epochs(epochs(finished[0], 3), root)
    assert (parse_keep("all"), parse_keep("last:3")) == (None, 3)


def test_pruning_spares_what_an_unfinished_epoch_starts_from(
    finished: tuple[Path, Path], tmp_path: Path
) -> None:
    _, root = copy(finished, tmp_path)
    prev = {"e001": "e000", "e002": "e001", "e003": "e001"}
    assert prune(root, prev, ["e001", "e002"], keep=1) == []
    assert EpochPaths(root, "e001").rollouts.exists()
    assert prune(root, prev, ["e001", "e002", "e003"], keep=1) == ["e001", "e002"]


def test_a_changed_run_over_old_policies_prunes_none_that_it_needs(
    finished: tuple[Path, Path], tmp_path: Path
) -> None:
    """All epochs have policies, of former parameters: none of them counts as finished before its turn."""
    _, root = copy(finished, tmp_path)
    assert run_epochs(epochs(finished[0], 2, "update.lr=1e-3"), root, keep=1)["made"] == 2
    assert {path.name for path in EpochPaths(root, "e001").policy.iterdir()} == {
        "state.json",
        "ema.safetensors",
    }
    assert len(list(EpochPaths(root, "e002").policy.iterdir())) > 2
