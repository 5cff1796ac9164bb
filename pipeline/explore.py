"""Exploration: candidates that are pushed to move, so that a group has something to choose from.

WHY: a group teaches only what its candidates differ in, and a base that blends its motions draws eight clips that
differ in noise and hardly in motion: with the oracle itself as the reward such groups taught next to nothing about
compounds (docs/results.md). Classifier-free guidance away from *standing still* (the same past, no key pressed, the
camera where it was) makes the same network execute more of the command. So candidate 0 is sampled as ever and the
others are led away from standing still by scales that rise to `scale`; the reward decides how much was right.
DiffusionNFT may train on them: it moves the velocity towards or away from clips, whoever drew them. Guidance at all
noise levels spoils the picture; motion is decided at the high ones, so only levels above `above` are guided.

Judged policies are never guided. Neither paper does this. Sources: classifier-free guidance (arXiv 2207.12598), in a
limited interval of noise levels (arXiv 2404.07724).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    import torch

    from pipeline.worlds.base import ClipCondition, ContextCache, Guidance, Scene


class ExploreConfig(BaseModel):
    """How candidates of a group are pushed to move (params.yaml: `rollout.explore`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    scale: float = Field(
        1.0,
        ge=1,
        description="guidance of the last candidate away from standing still; the first has 1, the others lie between; "
        "1: no exploration",
    )
    above: float = Field(0.8, ge=0, lt=1, description="only noise levels (sigma) above this are guided")

    def guided(self, sigmas: torch.Tensor) -> int:
        """How many steps along `sigmas` (which end with 0) cost a second forward."""
        return int((sigmas[:-1] > self.above).sum()) if self.scale > 1 else 0


def away_from_standing_still(
    config: ExploreConfig,
    scene: Scene,
    context: ContextCache | None,
    condition: ClipCondition,
    start: int,
    latents: int,
    candidates: int,
) -> Guidance | None:
    """Guidance of the G candidates of the clip that begins at latent `start`; None without exploration.

    Its negative is the same past with no key pressed and the camera where it was before the clip.
    """
    if config.scale == 1:
        return None
    import torch

    from pipeline.worlds.base import ClipCondition, Guidance

    clip = condition.select(slice(start, start + latents))
    before_44 = condition.w2c_T44[max(0, start - 1)]
    still = ClipCondition(
        torch.zeros_like(clip.labels_T), before_44.expand_as(clip.w2c_T44).contiguous(), clip.K_T33
    )
    scale_G1111 = torch.linspace(1.0, config.scale, candidates)[:, None, None, None, None]
    return Guidance(scale_G1111, scene, context, still, config.above)
