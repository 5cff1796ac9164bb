"""alpha of the closure rewards: how far apart mirrored frames of the base model are, before any training.

exp(-alpha d) is nearly 1 everywhere for a small alpha and nearly 0 for a large one, and in both cases all candidates of
a group earn the same. With alpha = ln 2 / median d of the base, half its pairs earn more than 1/2 (spec/worldcycle.md
1.5). The number is measured once and frozen: it must not move while the policy does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.benchmark.cyclebench import distances
from pipeline.plan import Plan
from pipeline.rewards.closure import calibrate_alpha, closeness

if TYPE_CHECKING:
    from pipeline.config import Params
    from pipeline.rewards.closure import Discrepancy, DiscrepancyConfig
    from pipeline.scorers.tracker import Tracker
    from pipeline.worlds.base import WorldModel

FIRST_PROMPT = 9_000_000  # far from the prompts that are trained on
KINDS = ("spatial", "temporal")


def base_distances(
    world: WorldModel,
    params: Params,
    config: DiscrepancyConfig,
    tracker: Tracker,
    prompts: int,
    on_prompt: Callable[[int, int], Any] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Sample whole cycles of every level in turn and measure all their pairs: one row a prompt, with its d by kind."""
    from pipeline.rollout import Sampling, sample_prefix
    from pipeline.worlds.base import ClipCondition
    from pipeline.worlds.closed_prompts import make_closed_prompts
    from pipeline.worlds.registry import prompt_source, scene_of

    source = prompt_source(params.world, world.spec)
    cycle = params.cycle.model_copy(update={"words": "retracing"})
    sampling = Sampling(params.sampler.steps, params.sampler.shift, params.seed, 0, params.sampler.cfg)
    rows = []
    for number in range(prompts):
        level = number % cycle.levels
        plan = Plan("retracing", cycle.clips, 1, level, cycle.clips >> level)
        indices = [FIRST_PROMPT + number]
        closed = make_closed_prompts(
            source, "rl", indices, params.seed, plan, cycle, params.words, world.spec
        )[0]
        prompt = closed.prompt
        labels_T = np.concatenate([np.zeros(1, np.int64), prompt.labels_A])
        condition = ClipCondition.of(labels_T, prompt.c2w_T44, prompt.K_33)
        key = f"calibrate/{prompt.index}"
        scene = scene_of(world, prompt, params.sampler.cfg != 1)
        latents = sample_prefix(world, scene, condition, prompt.c2w_T44, plan.clip + 1, sampling, key)
        video = world.decode(latents)[0]
        found = distances(tracker, video, video, closed.pairs.index_Q2, config)
        rows.append({"level": level} | {kind: [found[q] for q in closed.pairs.of(kind)] for kind in KINDS})
        on_prompt(number + 1, prompts)
    return rows


def calibration(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """alpha from the spatial pairs of all levels, and what it does to the base. Raises DataError without a usable d."""
    pairs: dict[str, list[Discrepancy]] = {
        kind: [pair for row in rows for pair in row[kind]] for kind in KINDS
    }
    alpha = calibrate_alpha([pair.d for pair in pairs["spatial"]])
    out: dict[str, Any] = {"alpha": round(alpha, 3), "prompts": len(rows)}
    for kind, found in pairs.items():
        d = np.array([pair.d for pair in found])
        if not len(d):
            continue
        low, median, high = np.quantile(d, [0.25, 0.5, 0.75])
        videos = [closeness([pair.d for pair in row[kind]], alpha) for row in rows if row[kind]]
        out[kind] = {
            "pairs": len(d),
            "d_quartiles": [round(float(q), 4) for q in (low, median, high)],
            "coverage": round(float(np.mean([pair.coverage for pair in found])), 3),
            "failed": round(float(np.mean([pair.failed for pair in found])), 3),
            "reward_mean": round(float(np.mean([v for v in videos if v is not None])), 3),
            "reward_std": round(float(np.std([v for v in videos if v is not None])), 3),
        }
    return out
