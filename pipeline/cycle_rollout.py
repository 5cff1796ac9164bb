"""Sampling of words that close: whole videos as candidates, and the end of a relation's other word.

WHY apart from rollout.py: with `rollout.mode: clip` a cycle is sampled as any other word, from one shared past. What
is special is only this: with `mode: cycle` each candidate is a whole video of its own (reading B of spec/worldcycle.md
1.6: cost N * G instead of N + G, noisy credit), and a relation needs one more video to be compared with.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray

from pipeline import rollout
from pipeline.camera import frames_of_latents
from pipeline.groups import rollout_arrays
from pipeline.plan import Plan
from pipeline.stores import ArraySpec
from pipeline.worlds.base import ClipCondition, Scene, WorldModel, WorldSpec

if TYPE_CHECKING:
    from pipeline.worlds.closed_prompts import ClosedPrompt

REFERENCE = "reference"


def with_words(plan: Plan, spec: WorldSpec, specs: list[ArraySpec]) -> list[ArraySpec]:
    """The arrays of `prefixes.zarr` for this plan, from those of a prefix that ends before clip `plan.first`.

    Labels and poses reach to the end of the trained clip; of a relation `reference` is kept as well: the last frame of
    its other word, uint8 [H, W, 3] (the video's first frame where the relation is a loop).
    """
    total = spec.clip_latents * plan.clip
    long = {"labels": (total,), "c2w": (total, 4, 4)}
    arrays = [replace(s, shape=long.get(s.name, s.shape)) for s in specs]
    if plan.words == "relation":
        arrays.append(ArraySpec(REFERENCE, (*spec.frame_size, 3), "uint8"))
    return arrays


def reference_frame(
    world: WorldModel, scene: Scene, closed: ClosedPrompt, plan: Plan, sampling: rollout.Sampling, key: str
) -> dict[str, Any]:
    """The array `reference` of one group, or nothing where the words are no relation. S forwards a clip of it."""
    if plan.words != "relation":
        return {}
    other = closed.other
    if other is None:
        return {REFERENCE: closed.prompt.first_frame_HW3}
    labels_T = [0, *other.labels_A.tolist()]
    condition = ClipCondition.of(labels_T, other.c2w_T44, other.K_33)  # type: ignore[arg-type]
    latents = rollout.sample_prefix(
        world, scene, condition, other.c2w_T44, plan.clip + 1, sampling, f"{key}/other"
    )
    frames = rollout.decode_prefix(world, latents.nan_to_num(0.0, 0.0, 0.0))
    return {REFERENCE: frames[-1]}


def candidate_arrays(plan: Plan, spec: WorldSpec, candidates: int, latents: str) -> list[ArraySpec]:
    """Arrays of `rollouts.zarr`: the target clip of each candidate, or its whole video from latent 0 on."""
    arrays = rollout_arrays(spec, plan.first, candidates, latents)
    if plan.first == plan.clip:
        return arrays
    count = spec.clip_latents * plan.clip
    shapes = {
        "latents": (candidates, spec.latent_shape[0], count, *spec.latent_shape[1:]),
        "frames": (candidates, frames_of_latents(count, spec.stride), *spec.frame_size, 3),
    }
    return [replace(array, shape=shapes[array.name]) for array in arrays]


def sample_group(
    plan: Plan,
    world: WorldModel,
    scene: Scene,
    prefix_CTHW: torch.Tensor,
    condition: ClipCondition,
    c2w_T44: NDArray[Any],
    clip: int,
    candidates: int,
    sampling: rollout.Sampling,
    key: str,
) -> torch.Tensor:
    """G candidates [G, C, T, h, w]: the target clip (T = 4), or whole videos with `rollout.mode: cycle`.

    A whole video is sampled as a prefix is, clip by clip, with noise of its own key: S forwards a clip and candidate.
    """
    if plan.first == plan.clip:
        return rollout.sample_candidates(
            world, scene, prefix_CTHW, condition, c2w_T44, clip, candidates, sampling, key
        )
    videos = [
        rollout.sample_prefix(world, scene, condition, c2w_T44, clip + 1, sampling, f"{key}/video/{g}")
        for g in range(candidates)
    ]
    return torch.stack(videos)
