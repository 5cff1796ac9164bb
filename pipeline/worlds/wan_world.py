"""WorldModel on WorldPlayWan: the mini world and WorldPlay-5B, which differ only in sizes, codec and text encoder.

`velocity` is the one place that runs the denoiser, so the sampler and the training loss cannot disagree about
timesteps, RoPE positions or the conditioning latent. `context is None` means the first clip: its latent 0 is the
scene's own latent, set before every forward and shown at the context's timestep.

Autocast is opened here, once a forward and without its weight cache: the cache outlives a swap of weights (it would
run the old policy's weights under the live policy's name) and, filled without gradient, it drops gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline import flow
from pipeline.worlds import memory
from pipeline.worlds.base import (
    ClipCondition,
    Codec,
    ContextCache,
    ForwardCounter,
    Guidance,
    Scene,
    WorldModel,
    WorldSpec,
)
from pipeline.worlds.wan import WorldPlayWan


class WanWorld(WorldModel):
    """A world model made of a WorldPlayWan, a codec and a text encoder; its methods are described in `WorldModel`.

    `encode_text` turns a caption into float32 [L, D]; without it scenes take text embeddings. `autocast` is the dtype
    of matrix products (bfloat16 on CPU and GPU), None for the model's own.
    """

    def __init__(
        self,
        model: WorldPlayWan,
        codec: Codec,
        spec: WorldSpec,
        encode_text: Callable[[str], torch.Tensor] | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.model, self.codec, self.spec = model, codec, spec
        self.encode_text, self.autocast = encode_text, autocast
        self.forwards = ForwardCounter()

    @property
    def device(self) -> torch.device:
        """Where the model is; arguments are moved there."""
        return self.model.proj_out.weight.device

    def encode_scene(
        self, frame_HW3: np.ndarray, text: str | torch.Tensor | Mapping[str, torch.Tensor], key: str
    ) -> Scene:
        if frame_HW3.shape != (*self.spec.frame_size, 3):
            raise ValueError(
                f"scene {key}: the first frame is {frame_HW3.shape}, need {(*self.spec.frame_size, 3)}"
            )
        if isinstance(text, str):
            if self.encode_text is None:
                raise ValueError(f"scene {key}: this world has no text encoder, pass embeddings")
            text = self.encode_text(text)
        extras = {"text": text} if isinstance(text, torch.Tensor) else dict(text)
        first = self.codec.encode(frame_HW3[None])[:, 0].float()
        return Scene(first_latent_CHW=first, text_LD=extras.pop("text"), key=key, extras=extras)

    def select_context(self, c2w_T44: np.ndarray, clip_index: int, seed: int = 0) -> list[int]:
        return memory.select(c2w_T44, clip_index * self.spec.clip_latents, self.spec.memory, seed)

    def build_context(
        self, scene: Scene, latents_CTHW: torch.Tensor, indices: Sequence[int], condition: ClipCondition
    ) -> ContextCache | None:
        if not len(indices):
            return None
        chosen = latents_CTHW[None, :, list(indices)].to(self.device)
        timestep_BT = torch.full((1, len(indices)), self.spec.context_timestep, device=self.device)
        self.forwards.context += 1
        with torch.no_grad():
            return self._forward("context", chosen, timestep_BT, condition.select(indices), scene, 0, None)

    def velocity(
        self,
        x_BCTHW: torch.Tensor,
        sigma_B: torch.Tensor | float,
        clip: ClipCondition,
        scene: Scene,
        context: ContextCache | None,
    ) -> torch.Tensor:
        """As in `WorldModel`. In the first clip latent 0 of x is replaced by the scene's, and v there means nothing."""
        B, T = x_BCTHW.shape[0], x_BCTHW.shape[2]
        x = x_BCTHW.to(self.device)
        sigma = torch.as_tensor(sigma_B, dtype=torch.float32, device=self.device).expand(B)
        timestep_BT = flow.timestep(sigma, self.spec.truncate_timestep)[:, None].repeat(1, T)
        if context is None:
            x = self._with_first(x, scene)
            timestep_BT[:, 0] = self.spec.context_timestep
        start = 0 if context is None else context.frames
        self.forwards.denoiser += B
        return self._forward("velocity", x, timestep_BT, clip, scene, start, context).float()

    @torch.no_grad()
    def sample_clip(
        self,
        scene: Scene,
        context: ContextCache | None,
        clip: ClipCondition,
        sigmas: torch.Tensor,
        noise_BCTHW: torch.Tensor,
        guidance: Guidance | None = None,
    ) -> torch.Tensor:
        x = noise_BCTHW.to(self.device, torch.float32)
        for sigma, sigma_next in zip(sigmas[:-1].tolist(), sigmas[1:].tolist(), strict=True):
            v = self.velocity(x, sigma, clip, scene, context)
            if guidance is not None:
                v_negative = self.velocity(x, sigma, clip, guidance.scene, guidance.context)
                v = v_negative + guidance.scale * (v - v_negative)
            x = flow.euler_step(x, v, sigma, sigma_next)
        return self._with_first(x, scene) if context is None else x

    def loss_mask_T(self, clip_index: int) -> torch.Tensor:
        mask = torch.ones(self.spec.clip_latents, dtype=torch.bool)
        mask[0] = clip_index > 0
        return mask

    def decode(self, latents_CTHW: torch.Tensor, state: Any = None) -> tuple[np.ndarray, Any]:
        return self.codec.decode(latents_CTHW.detach().float(), state)

    def save(self, folder: Path) -> None:
        # frozen parts stay where they came from
        self.model.save_pretrained(folder / "transformer")

    def _with_first(self, x_BCTHW: torch.Tensor, scene: Scene) -> torch.Tensor:
        first = scene.first_latent_CHW.to(x_BCTHW)[None, :, None].expand(len(x_BCTHW), -1, -1, -1, -1)
        return torch.cat((first, x_BCTHW[:, :, 1:]), dim=2)

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
        with self._precision():
            return self.model(
                mode,
                latents_BCTHW=x_BCTHW,
                timestep_BT=timestep_BT,
                labels_BT=given.labels_T,
                w2c_BT44=given.w2c_T44,
                K_BT33=given.K_T33,
                text_BLD=scene.text_LD[None].to(self.device),
                rope_start=rope_start,
                context=context,
            )

    def _precision(self) -> AbstractContextManager[Any]:
        kind = self.device.type
        if self.autocast is None:
            return torch.autocast(kind, enabled=False)
        return torch.autocast(kind, self.autocast, cache_enabled=False)
