"""What closure costs: seconds of CPU to generate a 16-clip cycle on the mini world, and to track all its pairs.

    python benchmarks/cycle_cost.py [--clips 16] [--repeat 2]

CPU seconds of all threads, so that other work on the machine does not count. One line of JSON a level of multi-scale
cycles: denoiser forwards, generation, tracking by Lucas-Kanade (what the score stage does) and by the matcher of
CycleBench, and the share of the first tracking in the generation.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.cycle_config import CycleConfig
from pipeline.plan import Plan
from pipeline.rollout import Sampling, sample_prefix
from pipeline.scorers.tracker import LucasKanade, PatchMatcher
from pipeline.scorers.tracks import TracksEngine
from pipeline.words import TrainingMix
from pipeline.worlds.base import ClipCondition
from pipeline.worlds.closed_prompts import make_closed_prompts
from pipeline.worlds.mini.load import load_mini
from pipeline.worlds.registry import scene_of
from pipeline.worlds.wan_world import WanWorld


def cpu(work: Callable[[], Any], repeat: int) -> tuple[float, Any]:
    """Fewest CPU seconds of `repeat` runs, and what the last one gave."""
    best, found = float("inf"), None
    for _ in range(repeat):
        start = time.process_time()
        found = work()
        best = min(best, time.process_time() - start)
    return best, found


def cost(world: WanWorld, config: CycleConfig, level: int, repeat: int) -> dict[str, Any]:
    """One line: a cycle of this level, generated once by a policy and tracked by both trackers."""
    plan = Plan("retracing", config.clips, 1, level, config.clips >> level)
    mix = TrainingMix(hold=(1, 2))  # short holds: a long way out must fit into a room
    closed = make_closed_prompts("mini", "evaluation", [0], 0, plan, config, mix, world.spec)[0]
    prompt = closed.prompt
    labels_T = np.concatenate([np.zeros(1, np.int64), prompt.labels_A])
    condition = ClipCondition.of(labels_T, prompt.c2w_T44, prompt.K_33)
    scene = scene_of(world, prompt)

    def generate() -> np.ndarray:
        world.forwards.reset()
        sampling, c2w = Sampling(5, 3.0, 0, 0), prompt.c2w_T44
        return world.decode(sample_prefix(world, scene, condition, c2w, plan.clip + 1, sampling, "cost"))[0]

    made, video = cpu(generate, repeat)
    size = (video.shape[1], video.shape[2])
    found = {}
    for tracker in (LucasKanade(), PatchMatcher()):
        engine = TracksEngine(tracker).for_pairs(closed.pairs, len(closed.pairs), size)
        found[tracker.name] = cpu(partial(engine.measure, video[None], video[:1]), repeat)[0]
    return {
        "clips": plan.clip,
        "level": level,
        "denoiser_forwards": world.forwards.denoiser,
        "pairs": len(closed.pairs),
        "generate_s": round(made, 2),
        **{f"{name}_s": round(seconds, 3) for name, seconds in found.items()},
        "share": round(found["lucas-kanade"] / made, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clips", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--weights", type=Path, default=Path("weights/mini"))
    arguments = parser.parse_args()
    world = load_mini(arguments.weights)
    levels = int(np.log2(arguments.clips))
    config = CycleConfig(words="retracing", smallest=1, levels=levels)
    for level in range(levels):
        print(json.dumps(cost(world, config, level, arguments.repeat)), flush=True)


if __name__ == "__main__":
    main()
