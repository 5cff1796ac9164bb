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
from pipeline.benchmark.action_accuracy import SAME_LINE
from pipeline.groups import scored_frames, scored_labels
from pipeline.rewards.action import closeness
from pipeline.rewards.base import RawScores
from pipeline.rewards.group import read_context
from pipeline.scorers.pose_net import MOTION, PoseScorer, motion_of_relative
from pipeline.stores import GroupStore
from pipeline.words import TrainingMix
from pipeline.worlds.mini import oracle
from pipeline.worlds.mini.clips import STEP
from pipeline.worlds.mini.prompts import make_prompt
from pipeline.worlds.mini.renderer import MiniScene
from stages.common import EpochPaths, load_params

REWARDS = ("action_soft", "action_fine", "action_joint")


def within(a_PG: NDArray[np.float64], b_PG: NDArray[np.float64]) -> float:
    """Correlation of the deviations from the group means: what a group-normalised advantage can see."""
    a, b = (x - x.mean(1, keepdims=True) for x in (a_PG, b_PG))
    scale = float(np.sqrt((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / scale if scale else float("nan")


def oracle_motions(
    prefixes: GroupStore, rollouts: GroupStore, index: int, seed: int, mix: TrainingMix
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """True motions of a group's scored frames, (G, F-1, 4, 4), and which of them failed, (G, F-1)."""
    record, labels_T = prefixes.record(index), prefixes.read(index, "labels")
    prompt = make_prompt("rl", int(record["prompt"]), seed, len(labels_T) - 1, mix)
    new = rollouts.read(index, "frames")
    G, count = (
        len(new),
        len(scored_labels(labels_T, int(record["target_clip"]), int(record["clip_latents"]), 1)) - 1,
    )
    past = np.broadcast_to(prefixes.read(index, "frames"), (G, *prefixes.specs["frames"].shape))
    videos = new if int(record["target_clip"]) == 1 else np.concatenate([past, new], axis=1)
    scene, labels = MiniScene.make(prompt.scene_seed), np.tile(labels_T, (G, 1))
    found = oracle.track([scene] * G, videos, np.stack([prompt.start_44] * G), labels)
    motions = np.linalg.inv(found.c2w_BF44[:, :-1]) @ found.c2w_BF44[:, 1:]
    failed = found.failed_BF[:, 1:] | found.failed_BF[:, :-1]
    return motions[:, -count:], failed[:, -count:]


def measure(paths: EpochPaths, weights: Path, groups: int, seed: int, mix: TrainingMix) -> dict[str, Any]:
    """Oracle and pose scorer on every candidate of the first `groups` groups, and the rewards of either."""
    prefixes, rollouts = GroupStore.open(paths.prefixes), GroupStore.open(paths.rollouts)
    scorer = PoseScorer.load(weights)
    table: dict[str, list[NDArray[np.float64]]] = defaultdict(list)
    errors, failures = [], []
    for index in range(min(groups, len(prefixes))):
        record = prefixes.record(index)
        clip, labels_T = int(record["target_clip"]), prefixes.read(index, "labels")
        labels_F = scored_labels(labels_T, clip, int(record["clip_latents"]), 1)
        read = scorer.relative(
            scored_frames(prefixes.read(index, "frames"), rollouts.read(index, "frames"), clip)
        )
        true, failed = oracle_motions(prefixes, rollouts, index, seed, mix)
        context = read_context(prefixes, index, {})
        for source, motions in (("oracle", true), ("scorer", read)):
            raw = {"pose": RawScores({"relative": motions}, (None,) * len(motions))}
            for name in REWARDS:
                table[f"{source} {name}"].append(rewards.find(name).compute(raw, context, SAME_LINE).value_G)
        assert closeness(true[0], labels_F, STEP, 1) == table["oracle action_soft"][-1][0]
        errors.append(np.abs(motion_of_relative(true, STEP) - motion_of_relative(read, STEP))[~failed])
        failures.append(failed.mean())
    columns = {key: np.stack(value) for key, value in table.items()}
    error = np.concatenate(errors)
    return {
        "groups": len(failures),
        "correlation within groups": {
            name: {to: round(within(columns[f"scorer {name}"], columns[f"oracle {to}"]), 3) for to in REWARDS}
            for name in REWARDS
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
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--weights", type=Path, default=Path("weights/mini"))
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--set", action="append", dest="overrides", help="as for the stages: seed, words")
    options = parser.parse_args()
    params = load_params(options.params, options.overrides)
    paths = EpochPaths(options.root, options.epoch)
    print(json.dumps(measure(paths, options.weights, options.groups, params.seed, params.words), indent=1))


if __name__ == "__main__":
    main()
