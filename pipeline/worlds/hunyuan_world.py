"""WorldModel on WorldPlayHunyuan: WorldPlay-8B, which starts from an image in another way than Wan (spec worldplay 2).

The first frame is no latent of the video but a condition: its latent stands in extra channels of latent 0, beside a
mask, and its SigLIP tokens in the text. Latent 0 itself begins as noise, so the first clip generates all four latents.

Text is read once a prompt: while all weights that it depends on are frozen (LoRA on the video side, the default at this
size), its cache is kept for the prompt in hand. When they are trained, it is read for every forward, because a cache of
other weights - swapped, averaged or stepped in the meantime - would go unnoticed. Either way without gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch

from pipeline import flow
from pipeline.worlds.base import ClipCondition, Codec, ContextCache, Scene, WorldSpec
from pipeline.worlds.hunyuan import TEXT_SIDE, HunyuanText, WorldPlayHunyuan
from pipeline.worlds.wan_world import WanWorld


class HunyuanWorld(WanWorld):
    """A world model made of a WorldPlayHunyuan and a codec; scenes take text embeddings, encoded beforehand."""

    model: WorldPlayHunyuan

    def __init__(
        self, model: WorldPlayHunyuan, codec: Codec, spec: WorldSpec, autocast: torch.dtype | None = None
    ) -> None:
        super().__init__(model, codec, spec, None, autocast)
        self.text_passes = 0
        self._texts: list[tuple[Scene, ContextCache]] = []

    def build_context(
        self, scene: Scene, latents_CTHW: torch.Tensor, indices: Sequence[int], condition: ClipCondition
    ) -> ContextCache | None:
        """As in WanWorld; latent 0, where chosen, is shown with its image condition."""
        if not len(indices):
            return None
        chosen = latents_CTHW[None, :, list(indices)].to(self.device)
        shown = self._with_condition(chosen, scene, [index == 0 for index in indices])
        timestep_BT = torch.full((1, len(indices)), self.spec.context_timestep, device=self.device)
        self.forwards.context += 1
        with torch.no_grad():
            return self._forward("context", shown, timestep_BT, condition.select(indices), scene, 0, None)

    def velocity(
        self,
        x_BCTHW: torch.Tensor,
        sigma_B: torch.Tensor | float,
        clip: ClipCondition,
        scene: Scene,
        context: ContextCache | None,
    ) -> torch.Tensor:
        B, T = x_BCTHW.shape[0], x_BCTHW.shape[2]
        x = self._with_condition(x_BCTHW.to(self.device), scene, [context is None] + [False] * (T - 1))
        sigma = torch.as_tensor(sigma_B, dtype=torch.float32, device=self.device).expand(B)
        timestep_BT = flow.timestep(sigma, self.spec.truncate_timestep)[:, None].expand(B, T)
        start = 0 if context is None else context.frames
        self.forwards.denoiser += B
        return self._forward("velocity", x, timestep_BT, clip, scene, start, context).float()

    def loss_mask_T(self, clip_index: int) -> torch.Tensor:
        """All true: also the first clip generates its latent 0."""
        return torch.ones(self.spec.clip_latents, dtype=torch.bool)

    def _with_first(self, x_BCTHW: torch.Tensor, scene: Scene) -> torch.Tensor:
        return x_BCTHW  # what the sampler of the first clip returns is all its own

    def _with_condition(self, x_BCTHW: torch.Tensor, scene: Scene, first_T: list[bool]) -> torch.Tensor:
        """[latent | condition | mask] on the channel axis; the condition stands where `first_T`, zeros elsewhere."""
        B, _, T, H, W = x_BCTHW.shape
        mask = torch.tensor(first_T, device=self.device, dtype=x_BCTHW.dtype).view(1, 1, T, 1, 1)
        image = scene.first_latent_CHW.to(x_BCTHW)[None, :, None] * mask
        parts = (image.expand(B, -1, -1, -1, -1), mask.expand(B, 1, T, H, W))
        return torch.cat((x_BCTHW, *parts), dim=1)

    def _text_cache(self, scene: Scene) -> ContextCache:
        for known, cache in self._texts:
            if known is scene:
                return cache
        # A cache is half a gigabyte at full size: only a scene and its negative, which take turns, are kept together.
        self._texts = [pair for pair in self._texts if pair[0] is scene.negative or pair[0].negative is scene]
        self.text_passes += 1
        with torch.no_grad(), self._precision():
            cache = self.model("text", hunyuan_text(scene, self.device))
        if not any(p.requires_grad for name, p in self.model.named_parameters() if TEXT_SIDE.match(name)):
            self._texts.append((scene, cache))
        return cache

    def _forward(
        self,
        mode: str,
        x_BCTHW: torch.Tensor,
        timestep_BT: torch.Tensor,
        condition: ClipCondition,
        scene: Scene,
        rope_start: int,
        context: ContextCache | None,
    ) -> Any:
        given = condition.to(self.device).batched()
        text = self._text_cache(scene)
        with self._precision():
            return self.model(
                mode,
                text,
                latents_BCTHW=x_BCTHW,
                timestep_BT=timestep_BT,
                labels_BT=given.labels_T,
                w2c_BT44=given.w2c_T44,
                K_BT33=given.K_T33,
                rope_start=rope_start,
                context=context,
            )


def hunyuan_text(scene: Scene, device: torch.device) -> HunyuanText:
    """The network's text of a scene, batch 1: `text_LD` is the language model's, `extras` hold the other parts."""
    given = {name: value[None].to(device) for name, value in scene.extras.items()}
    parts = ("text_mask", "byt5", "byt5_mask", "vision")
    if unknown := sorted(set(given) - set(parts)):
        raise ValueError(
            f"scene {scene.key}: the 8B reads no {unknown[0]!r}; it reads text, {', '.join(parts)}"
        )
    return HunyuanText(scene.text_LD[None].to(device), *(given.get(name) for name in parts))
