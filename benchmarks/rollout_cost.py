"""What clip-level batching saves, measured in one process so that a noisy machine cancels out.

(a) wcpipe: the context cache of a group is built once, all G candidates are one batch, S steps.
(b) the stock way: every candidate alone, and the context encoded again at every step.

Both produce the same candidates (checked), and forwards are counted. Prints one JSON object.

    python benchmarks/rollout_cost.py --weights weights/mini --clip 2 --groups 6 --repeats 3
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from pipeline import rollout
from pipeline.groups import Past
from pipeline.words import TrainingMix
from pipeline.worlds.base import ClipCondition, MemoryRule
from pipeline.worlds.registry import make_prompts, open_world
from pipeline.worlds.wan_world import WanWorld


def pasts(world: WanWorld, groups: int, clip: int, sampling: rollout.Sampling) -> list[Past]:
    """Sample the prefixes of some prompts."""
    out = []
    for prompt in make_prompts("mini", "rl", range(groups), 0, 4 * clip - 1, TrainingMix(hold=(2, 4))):
        scene = world.encode_scene(prompt.first_frame_HW3, prompt.caption, prompt.scene_key)
        labels = torch.cat([torch.zeros(1, dtype=torch.long), torch.from_numpy(prompt.labels_A)]).numpy()
        condition = ClipCondition.of(labels, prompt.c2w_T44, prompt.K_33)
        latents = rollout.sample_prefix(
            world, scene, condition, prompt.c2w_T44, clip, sampling, prompt.scene_key
        )
        out.append(Past(scene, latents, labels, prompt.c2w_T44, condition, clip))
    return out


def batched(world: WanWorld, past: Past, candidates: int, sampling: rollout.Sampling) -> torch.Tensor:
    """(a) the rollout stage's own function."""
    return rollout.sample_candidates(
        world,
        past.scene,
        past.latents_CTHW,
        past.condition,
        past.c2w_T44,
        past.clip,
        candidates,
        sampling,
        past.scene.key,
    )


@torch.no_grad()
def one_by_one(world: WanWorld, past: Past, candidates: int, sampling: rollout.Sampling) -> torch.Tensor:
    """(b) no batch and no cache across steps."""
    sigmas = sampling.sigmas()
    at = past.condition.select(rollout.clip_slice(world, past.clip))
    shape = (world.spec.latent_shape[0], world.spec.clip_latents, *world.spec.latent_shape[1:])
    out = []
    for candidate in range(candidates):
        x = sampling.noise(shape, past.scene.key, candidate, "candidate")[None]
        for step in range(sampling.steps):
            context = rollout.clip_context(
                world, past.scene, past.latents_CTHW, past.condition, past.c2w_T44, past.clip, sampling.seed
            )
            v = world.velocity(x, float(sigmas[step]), at, past.scene, context)
            x = x + (sigmas[step + 1] - sigmas[step]) * v
        out.append(x[0])
    return torch.stack(out)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, default=Path("weights/mini"))
    parser.add_argument("--groups", type=int, default=6)
    parser.add_argument("--clip", type=int, default=2, help="target clip: 2 has 4 context latents, 3 has 8")
    parser.add_argument(
        "--budget",
        type=int,
        help="latents of history that a clip may look at; the mini world's 8, 16 (5B), 20 (8B)",
    )
    parser.add_argument("--candidates", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    world = open_world("mini", arguments.weights)
    if arguments.budget:  # the cost depends on the lengths alone, not on what the weights have learnt
        recent = min(12, arguments.budget)
        world.spec = replace(world.spec, memory=MemoryRule(budget=arguments.budget, recent=recent))
    sampling = rollout.Sampling(steps=5, shift=3.0, seed=0, epoch=1)
    groups = pasts(world, arguments.groups, arguments.clip, sampling)
    batched(world, groups[0], arguments.candidates, sampling)  # warm up
    ratios, counts, worst = [], {}, 0.0
    for _ in range(arguments.repeats):
        for past in groups:  # the two ways alternate, so that load on the machine meets both alike
            seconds, results = {}, {}
            for name, way in (("batched", batched), ("one_by_one", one_by_one)):
                world.forwards.reset()
                start = time.perf_counter()
                results[name] = way(world, past, arguments.candidates, sampling)
                seconds[name] = time.perf_counter() - start
                counts[name] = {"denoiser": world.forwards.denoiser, "context": world.forwards.context}
            ratios.append(seconds["one_by_one"] / seconds["batched"])
            worst = max(worst, float((results["batched"] - results["one_by_one"]).abs().max()))
    seen = groups[0].c2w_T44[: rollout.clip_slice(world, arguments.clip).stop]
    context = len(world.select_context(seen, arguments.clip - 1, sampling.seed))
    summary = {
        "context_latents": context,
        "ratio_median": median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }
    print(json.dumps(summary | {"groups": len(ratios), "forwards": counts, "largest_difference": worst}))


if __name__ == "__main__":
    main()
