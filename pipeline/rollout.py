"""Rollouts at clip level: one shared prefix, then G candidates of the target clip in one batch.

WHY clips and not whole videos: a reward of one clip that every candidate continues from the same past says which motion
was better; a reward of G whole videos mixes that with everything that went wrong before (spec worldcompass 6.4:
12.45 % accuracy with sample-level rollouts against 50 and more). It is also cheap: the past is sampled once, and its
context cache is built once and shared by all candidates and later by all forwards of the update.

Randomness is keyed by (seed, epoch, group, candidate, purpose), never by the order of work, and a group is one batch:
any split of groups over processes gives the same bits. Poses stay in float64 and latents in the model's own scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline import flow
from pipeline.actions import format_word
from pipeline.camera import clip_latents
from pipeline.digests import SHORT, digest_of
from pipeline.errors import DataError
from pipeline.worlds.base import ClipCondition, ContextCache, Guidance, Scene, WorldModel


def target_clip(epoch: int, n_min: int, n_max: int) -> int:
    """The clip (from 1) that epoch `epoch` (from 1) trains: n_min, …, n_max, n_min, … (DESIGN 6.6)."""
    return n_min + (epoch - 1) % (n_max - n_min + 1)


def group_key(scene: str, labels_T: NDArray[np.int64], clip: int, policy: str) -> str:
    """Name of a group: scene + word + target clip + policy digest; never the prompt's text (DESIGN 2)."""
    return digest_of([scene, format_word(labels_T[1:].tolist()), clip, policy])[:SHORT]


@dataclass(frozen=True)
class Sampling:
    """How a group is sampled: the sampler's levels, the keys of its noise, and the scale of guidance (1: none)."""

    steps: int
    shift: float
    seed: int
    epoch: int
    cfg: float = 1.0

    def sigmas(self) -> torch.Tensor:
        return flow.sigmas(self.steps, self.shift)

    def noise(self, shape: tuple[int, ...], group: str, candidate: int, purpose: str) -> torch.Tensor:
        return flow.keyed_noise(
            shape, seed=self.seed, epoch=self.epoch, group=group, candidate=candidate, purpose=purpose
        )


def clip_slice(world: WorldModel, clip: int) -> slice:
    """Latents of clip `clip` (from 1): 4(clip-1) .. 4 clip."""
    return clip_latents(clip - 1, world.spec.clip_latents)


def clip_context(
    world: WorldModel,
    scene: Scene,
    history_CTHW: torch.Tensor,
    condition: ClipCondition,
    c2w_T44: NDArray[np.float64],
    clip: int,
    seed: int,
) -> ContextCache | None:
    """Context cache (batch 1) for clip `clip` (from 1); None for the first clip. Chosen by poses alone, so that rollout
    and update choose the same latents. `history_CTHW` holds the 4(clip-1) latents before it, in model scale.
    """
    chosen = world.select_context(c2w_T44[: clip_slice(world, clip).stop], clip - 1, seed)
    return world.build_context(scene, history_CTHW, chosen, condition) if chosen else None


def clip_guidance(
    world: WorldModel,
    scene: Scene,
    history_CTHW: torch.Tensor,
    condition: ClipCondition,
    c2w_T44: NDArray[np.float64],
    clip: int,
    sampling: Sampling,
) -> Guidance | None:
    """What clip `clip` (from 1) is led away from: the negative text, with a context of its own; None without guidance.

    Raises DataError when the scene holds no negative text.
    """
    if sampling.cfg == 1:
        return None
    if scene.negative is None:
        raise DataError(
            f"scene {scene.key}: has no negative text to be led away from; set sampler.cfg to 1, or take scenes of "
            "`wcpipe encode`"
        )
    context = clip_context(world, scene.negative, history_CTHW, condition, c2w_T44, clip, sampling.seed)
    return Guidance(sampling.cfg, scene.negative, context)


def sample_prefix(
    world: WorldModel,
    scene: Scene,
    condition: ClipCondition,
    c2w_T44: NDArray[np.float64],
    clips: int,
    sampling: Sampling,
    key: str,
) -> torch.Tensor:
    """Latents of the clips before target clip `clips`, float32 [C, T, h, w] with T = max(1, 4(clips-1)).

    Latent 0 is the scene's conditioning latent; for the first clip it is all there is. S forwards a clip, twice that
    with guidance.
    """
    channels, height, width = world.spec.latent_shape
    latents = scene.first_latent_CHW[:, None].float()
    for clip in range(1, clips):
        at = clip_slice(world, clip)
        context = clip_context(world, scene, latents, condition, c2w_T44, clip, sampling.seed)
        shape = (1, channels, world.spec.clip_latents, height, width)
        guidance = clip_guidance(world, scene, latents, condition, c2w_T44, clip, sampling)
        noise = sampling.noise(shape, key, 0, f"prefix/{clip}")
        sigmas = sampling.sigmas()
        x0 = world.sample_clip(scene, context, condition.select(at), sigmas, noise, guidance)[0].float()
        latents = x0 if clip == 1 else torch.cat([latents, x0], dim=1)
    return latents


def sample_candidates(
    world: WorldModel,
    scene: Scene,
    prefix_CTHW: torch.Tensor,
    condition: ClipCondition,
    c2w_T44: NDArray[np.float64],
    clip: int,
    candidates: int,
    sampling: Sampling,
    key: str,
) -> torch.Tensor:
    """G candidates of the target clip, float32 [G, C, 4, h, w]: one batch, one shared context, S forwards each.

    They differ in their initial noise alone, and candidate g starts from the same noise for any G and shard.
    """
    context = clip_context(world, scene, prefix_CTHW, condition, c2w_T44, clip, sampling.seed)
    guidance = clip_guidance(world, scene, prefix_CTHW, condition, c2w_T44, clip, sampling)
    channels, height, width = world.spec.latent_shape
    shape = (channels, world.spec.clip_latents, height, width)
    noise = torch.stack(
        [sampling.noise(shape, key, candidate, "candidate") for candidate in range(candidates)]
    )
    at = condition.select(clip_slice(world, clip))
    return world.sample_clip(scene, context, at, sampling.sigmas(), noise, guidance).float()


def decode_prefix(world: WorldModel, prefix_CTHW: torch.Tensor) -> NDArray[np.uint8]:
    """Frames of the prefix, uint8 [F, H, W, 3] with F = 1 + stride (T - 1)."""
    return world.decode(prefix_CTHW)[0]


def decode_candidates(
    world: WorldModel, prefix_CTHW: torch.Tensor, x0_GCTHW: torch.Tensor, clip: int
) -> NDArray[np.uint8]:
    """Frames of each candidate's clip, uint8 [G, F, H, W, 3], decoded as the continuation of the prefix.

    F as `camera.clip_frames`: the first clip begins with frame 0, later ones with the first frame after the prefix.
    """
    state = None if clip == 1 else world.decode(prefix_CTHW)[1]
    return np.stack([world.decode(x0_CTHW, state)[0] for x0_CTHW in x0_GCTHW])
