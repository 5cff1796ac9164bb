"""From what is stored of a group to its rewards: the bridge between the stores and the pure reward functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.camera import StepSize, relative_poses
from pipeline.groups import scored_labels
from pipeline.pairs import FramePairs
from pipeline.plan import candidate_frames, first_clip
from pipeline.rewards.action import accumulate, fit_scale
from pipeline.rewards.base import RawScores, RewardContext
from pipeline.stores import GroupStore


def read_raw(store: GroupStore, index: int) -> RawScores:
    """One scorer's measurements of one group, with the reasons of missing candidates."""
    values = {name: store.read(index, name) for name in store.specs}
    candidates = next(iter(store.specs.values())).shape[0]
    reasons = store.record(index)["reasons"]
    return RawScores(values, tuple(reasons.get(str(g)) for g in range(candidates)))


def read_context(
    prefixes: GroupStore, index: int, raw: Mapping[str, RawScores], progress: float = 0.0
) -> RewardContext:
    """What a group was asked to do, and the pose scale of its scene where a scorer measured poses.

    `progress` is the share of the run's optimizer updates before this epoch.
    """
    record = prefixes.record(index)
    stride, latents = int(record["stride"]), int(record["clip_latents"])
    first, last = first_clip(record), int(record["target_clip"])
    labels_T, c2w_T44 = prefixes.read(index, "labels"), prefixes.read(index, "c2w")
    begin = max(
        0, latents * (first - 1) - 1
    )  # the latent whose last frame is the one before the first action
    frames = prefixes.specs["first_frame"].shape
    whole = [scored_labels(labels_T, clip, latents, stride) for clip in range(first, last + 1)]
    # each clip's labels begin with the 0 of the frame before it, which belongs to the clip before
    labels_F = np.concatenate([whole[0], *(labels[1:] for labels in whole[1:])])
    return RewardContext(
        labels_F=labels_F,
        stride=stride,
        step=StepSize(**record["step"]),
        scale=scene_scale(raw["pose"].values, c2w_T44, stride) if "pose" in raw else 1.0,
        c2w_T44=c2w_T44[begin : latents * last],
        pairs=FramePairs.from_json(record["pairs"]) if "pairs" in record else None,
        shared_frames=max(1, candidate_frames(record).start),
        size_HW=(frames[0], frames[1]),
        progress=progress,
    )


def scene_scale(pose: Mapping[str, Any], c2w_T44: np.ndarray, stride: int) -> float:
    """World units per unit of the pose estimator: one number for the scene, fitted over its videos from their first
    frame on. All measured candidates are pooled, so a lazy one cannot scale itself up. NaN where nothing moves.
    """
    clips = [rel for rel in pose["relative"] if np.isfinite(rel).all()]
    past = pose.get("past_relative")
    if past is not None and np.isfinite(past).all():
        clips = [np.concatenate([past, rel]) for rel in clips]
    elif past is not None:
        return float("nan")
    if not clips:
        return float("nan")
    estimated = np.concatenate([accumulate(rel, stride) for rel in clips])
    commanded = np.concatenate([relative_poses(c2w_T44)] * len(clips))
    return fit_scale(estimated, commanded)
