"""Does the reward measure what the oracle sees? One epoch of rollouts, candidate by candidate.

A policy improves by the order *inside* a group alone, so what counts is the correlation of reward and truth within
groups; an estimator that is right on average can still be blind there. Only rooms of the rl split are looked at.
Prints one JSON object.

    wcpipe base && wcpipe prefix --epoch e001 && wcpipe rollout --epoch e001
    python benchmarks/reward_agreement.py --epoch e001 --groups 16
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline import rewards
from pipeline.actions import is_compound
from pipeline.benchmark.action_accuracy import SAME_LINE
from pipeline.benchmark.group_truth import track_group, within
from pipeline.groups import scored_frames, scored_labels
from pipeline.rewards.action import closeness
from pipeline.rewards.base import RawScores
from pipeline.rewards.group import read_context
from pipeline.scorers.pose_net import MOTION, PoseScorer, motion_of_relative
from pipeline.stores import GroupStore
from pipeline.worlds.mini.clips import STEP
from stages.common import EpochPaths

REWARDS = ("action_soft", "action_fine", "action_joint")


def oracle_motions(
    prefixes: GroupStore, rollouts: GroupStore, index: int, count: int
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """True motions before a group's last `count` frames, (G, count, 4, 4), and which of them failed, (G, count)."""
    c2w_GF44, failed_GF = track_group(prefixes, rollouts, index)
    motions = np.linalg.inv(c2w_GF44[:, :-1]) @ c2w_GF44[:, 1:]
    failed = failed_GF[:, 1:] | failed_GF[:, :-1]
    return motions[:, -count:], failed[:, -count:]


def measure(paths: EpochPaths, weights: Path, groups: int) -> dict[str, Any]:
    """Oracle and pose scorer on every candidate of the first `groups` groups, and the rewards of either."""
    prefixes, rollouts = GroupStore.open(paths.prefixes), GroupStore.open(paths.rollouts)
    scorer = PoseScorer.load(weights)
    table: dict[str, list[NDArray[np.float64]]] = defaultdict(list)
    errors, failures, compound = [], [], []
    for index in range(min(groups, len(prefixes))):
        record = prefixes.record(index)
        clip, labels_T = int(record["target_clip"]), prefixes.read(index, "labels")
        labels_F = scored_labels(labels_T, clip, int(record["clip_latents"]), 1)
        read = scorer.relative(
            scored_frames(prefixes.read(index, "frames"), rollouts.read(index, "frames"), clip)
        )
        true, failed = oracle_motions(prefixes, rollouts, index, len(labels_F) - 1)
        context = read_context(prefixes, index, {})
        for source, motions in (("oracle", true), ("scorer", read)):
            raw = {"pose": RawScores({"relative": motions}, (None,) * len(motions))}
            for name in REWARDS:
                table[f"{source} {name}"].append(rewards.find(name).compute(raw, context, SAME_LINE).value_G)
        assert closeness(true[0], labels_F, STEP, 1) == table["oracle action_soft"][-1][0]
        errors.append(np.abs(motion_of_relative(true, STEP) - motion_of_relative(read, STEP))[~failed])
        failures.append(failed.mean())
        compound.append(bool(is_compound(labels_F[1:]).any()))
    columns = {key: np.stack(value) for key, value in table.items()}
    error, with_two = np.concatenate(errors), np.array(compound)

    def agreement(reward: str, truth: str, rows_P: NDArray[np.bool_]) -> float | None:
        found = within(columns[f"scorer {reward}"][rows_P], columns[f"oracle {truth}"][rows_P])
        return round(found, 3) if np.isfinite(found) else None  # a reward that is constant in every group

    return {
        "groups": len(failures),
        "correlation within groups": {
            of: {name: {to: agreement(name, to, rows) for to in REWARDS} for name in REWARDS}
            for of, rows in (
                ("all", np.ones_like(with_two)),
                ("one key", ~with_two),
                ("two keys in some action", with_two),
            )
            if rows.any()
        },
        "mean": {key: round(float(value.mean()), 3) for key, value in columns.items()},
        "standard deviation within groups": {
            key: round(float(value.std(1).mean()), 3) for key, value in columns.items()
        },
        "median |scorer - oracle|, in steps": dict(
            zip(MOTION, np.median(error, 0).round(3).tolist(), strict=True)
        ),
        "failed": round(float(np.mean(failures)), 3),
    }


def main() -> None:
    """Parse the arguments and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=Path("artifacts"))
    parser.add_argument("--epoch", default="e001")
    parser.add_argument("--weights", type=Path, default=Path("weights/mini"))
    parser.add_argument("--groups", type=int, default=16)
    options = parser.parse_args()
    print(
        json.dumps(
            measure(EpochPaths(options.root, options.epoch), options.weights, options.groups), indent=1
        )
    )


if __name__ == "__main__":
    main()
