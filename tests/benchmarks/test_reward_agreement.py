"""Reward against truth inside groups: a scorer that reads what the oracle reads agrees wholly, one that guesses does
not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import reward_agreement as module
from pipeline.stores import GroupStore, Shard
from stages.base import run_base
from stages.common import EpochPaths, load_params
from stages.prefix import run_prefix
from stages.rollout import run_rollout


class Likeness:
    """Stands in for the pose scorer: the oracle's own motions of the group asked for, or noise."""

    def __init__(self, told: list[np.ndarray], noisy: bool) -> None:
        self.told, self.noisy, self.asked = told, noisy, 0

    def relative(self, frames: np.ndarray) -> np.ndarray:
        motions = self.told[self.asked]
        self.asked += 1
        if self.noisy:
            motions = motions.copy()
            motions[..., :3, 3] = np.random.default_rng(self.asked).normal(size=(*motions.shape[:2], 3))
        return motions


def test_agreement_is_whole_with_the_oracle_itself_and_less_with_noise(
    tiny_params: Path, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = load_params(tiny_params, ["words.hold=[3,3]"]).for_epoch("e001")
    root, shard = tmp_path / "runs", Shard(1, 1)
    run_base(params, root)
    run_prefix(params, "e001", root, shard)
    run_rollout(params, "e001", root, shard)
    paths = EpochPaths(root, "e001")
    measured, true = module.oracle_motions, {}

    def once(
        prefixes: GroupStore, rollouts: GroupStore, index: int, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        if index not in true:  # tracking is what takes the time here
            true[index] = measured(prefixes, rollouts, index, count)[0]
        return true[index], np.zeros(true[index].shape[:2], bool)

    monkeypatch.setattr(module, "oracle_motions", once)
    first = module.measure(paths, tiny_base, groups=2)  # the untrained scorer
    assert first["groups"] == len(true) == 2
    for noisy in (False, True):
        likeness = Likeness([true[0], true[1]], noisy)
        monkeypatch.setattr(module.PoseScorer, "load", lambda folder, likeness=likeness: likeness)
        answer = module.measure(paths, tiny_base, groups=2)
        soft = answer["correlation within groups"]["all"]["action_soft"]["action_soft"]
        assert soft == pytest.approx(1.0) if not noisy else soft < 0.99
        translation = [answer["median |scorer - oracle|, in steps"][name] for name in ("tx", "ty")]
        assert (translation == [0.0, 0.0]) is not noisy


def test_an_agreement_that_cannot_be_told_is_null_and_not_nan(
    tiny_params: Path, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = load_params(tiny_params, ["words.hold=[3,3]", "target.n_max=1", "prefix.groups=1"]).for_epoch(
        "e001"
    )
    root = tmp_path / "runs"
    run_base(params, root)
    run_prefix(params, "e001", root, Shard(1, 1))
    run_rollout(params, "e001", root, Shard(1, 1))
    still = np.tile(np.eye(4), (4, 3, 1, 1))
    monkeypatch.setattr(module, "oracle_motions", lambda *args: (still, np.zeros((4, 3), bool)))
    monkeypatch.setattr(module.PoseScorer, "load", lambda folder: Likeness([still], noisy=False))
    answer = module.measure(EpochPaths(root, "e001"), tiny_base, groups=1)
    assert answer["correlation within groups"]["all"]["action_soft"]["action_soft"] is None
    json.dumps(answer, allow_nan=False)
