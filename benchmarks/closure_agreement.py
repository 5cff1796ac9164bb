"""Do the closure rewards measure what the oracle sees? One epoch of cycles, candidate by candidate.

As `reward_agreement.py`, for words that close: a policy improves by the order inside a group alone. Truth is how near
the camera of each paired frame really is to that of the earlier frame. Only rooms of the rl split are looked at. Needs
an epoch with its scores. Prints one JSON object. With `--set rollout.mode=cycle` candidates are whole videos.

    wcpipe base
    for stage in prefix rollout score; do wcpipe $stage --params experiments/cycle-both.yaml --epoch e001; done
    python benchmarks/closure_agreement.py --epoch e001
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline import rewards
from pipeline.benchmark.group_truth import track_group, within
from pipeline.config import Params
from pipeline.pairs import FramePairs
from pipeline.rewards.group import read_context, read_raw
from pipeline.stores import GroupStore
from pipeline.worlds.mini.clips import STEP
from stages.common import EpochPaths, load_params

KINDS = ("spatial", "temporal")
FULL = (1.0, 0.5, 0.4, 0.25)  # of rewards.closure.full_excursion


def apart(a_44: NDArray[np.float64], b_44: NDArray[np.float64]) -> NDArray[np.float64]:
    """Distance of cameras (..., 4, 4) in steps: translation in units of a step plus rotation in units of a step."""
    moved = np.linalg.norm(a_44[..., :3, 3] - b_44[..., :3, 3], axis=-1) / STEP.translation
    cosine = (np.einsum("...ij,...ij->...", a_44[..., :3, :3], b_44[..., :3, :3]) - 1) / 2
    return np.asarray(moved + np.degrees(np.arccos(np.clip(cosine, -1, 1))) / STEP.rotation_deg)


def truth(c2w_GF44: NDArray[np.float64], failed_GF: NDArray[np.bool_], index_Q2: NDArray[np.int64]) -> Any:
    """1 / (1 + distance in steps), mean over pairs; 0 where a frame is off the manifold: (G,)."""
    first, second = index_Q2.T
    near = 1 / (1 + apart(c2w_GF44[:, first], c2w_GF44[:, second]))
    return np.where(failed_GF[:, first] | failed_GF[:, second], 0.0, near).mean(1)


def measure(params: Params, paths: EpochPaths, groups: int) -> dict[str, Any]:
    """Rewards and truth of the first `groups` groups that have a value for every candidate."""
    prefixes, rollouts = GroupStore.open(paths.prefixes), GroupStore.open(paths.rollouts)
    scores = {name: GroupStore.open(paths.scores(name)) for name in ("pose", "tracks")}
    table: dict[str, dict[str, list[NDArray[np.float64]]]] = {kind: defaultdict(list) for kind in KINDS}
    for index in range(min(groups, len(prefixes))):
        raw = {name: read_raw(store, index) for name, store in scores.items()}
        context = read_context(prefixes, index, raw, progress=1.0)
        pairs = FramePairs.from_json(prefixes.record(index)["pairs"])
        poses, failed = track_group(prefixes, rollouts, index)
        for kind in KINDS:
            rows = pairs.of(kind)
            reward, config = rewards.find(kind), rewards.settings(kind, params.rewards)
            found = {
                full: reward.compute(raw, context, config.model_copy(update={"full_excursion": full}))
                for full in FULL
            }
            proportional = found[1.0]
            if not len(rows) or not np.isfinite(proportional.value_G).all():
                continue
            for full, values in found.items():
                table[kind][f"reward, gate open from {full:g}"].append(values.value_G)
            for name in ("closeness", "gate", "coverage"):
                table[kind][name].append(np.asarray(proportional.details[name], float))
            table[kind]["true closeness"].append(truth(poses, failed, pairs.index_Q2[rows]))
    answer: dict[str, Any] = {}
    for kind, columns in table.items():
        stacked = {name: np.stack(values) for name, values in columns.items()}
        if stacked:
            answer[kind] = {
                "groups": len(stacked["closeness"]),
                "correlation with the truth inside groups": {
                    name: round(within(values, stacked["true closeness"]), 3)
                    for name, values in stacked.items()
                    if name != "true closeness"
                },
                "mean": {name: round(float(values.mean()), 3) for name, values in stacked.items()},
                "standard deviation inside groups": {
                    name: round(float(values.std(1).mean()), 3) for name, values in stacked.items()
                },
            }
    return answer


def main() -> None:
    """Parse the arguments and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=Path("artifacts"))
    parser.add_argument("--epoch", default="e001")
    parser.add_argument("--params", type=Path, default=Path("experiments/cycle-both.yaml"))
    parser.add_argument("--groups", type=int, default=16)
    options = parser.parse_args()
    params = load_params(options.params, None)
    print(json.dumps(measure(params, EpochPaths(options.root, options.epoch), options.groups), indent=1))


if __name__ == "__main__":
    main()
