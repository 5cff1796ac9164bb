"""Frame codecs of the published bases: diffusers' video autoencoders, decoded as a stream.

Candidates of a group continue one past, so a clip is decoded from the state that its past left behind. diffusers
forgets that state (Wan) or has none (HunyuanVideo-1.5), so the decoders are walked here, one latent at a time: a clip
costs the memory of four frames, and decoding clip by clip gives the very pixels of decoding the whole (spec worldplay
2, "VAE"). A state is never changed: every candidate starts from the same one.

WorldPlay's 8B codec attends within a frame in its middle block, the stock class to all earlier frames as well; here it
is as in WorldPlay. Latents are the posterior's mode: the reference's 5B draws a sample of it, which would make a scene
depend on a random number.

Weights are read at the first use: the update never needs a codec, nor does a rollout that starts from encoded scenes
need its encoder before it decodes.
"""

from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

import numpy as np
import torch
from diffusers import AutoencoderKLHunyuanVideo15, AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, unpatchify
from torch import nn
from torch.nn import functional as F

from pipeline.camera import latents_of_frames
from pipeline.errors import CheckpointError
from pipeline.worlds.checkpoints import describe_network, load_network


class VideoCodec(Protocol):
    """What both codecs are: `Codec`, and the sizes that the folder's config.json says.

    `channels` of a latent, `stride` frames a latent, `spatial` pixels a cell in each direction.
    """

    channels: int
    stride: int
    spatial: int

    def encode(self, frames_FHW3: np.ndarray) -> torch.Tensor: ...

    def decode(self, latents_CTHW: torch.Tensor, state: Any = None) -> tuple[np.ndarray, Any]: ...


class _Autoencoder(ABC):
    """What the two have in common: lazy weights, pixels, and the loop over latents."""

    network: ClassVar[type[Any]]
    stride: int

    def __init__(self, folder: Path, device: torch.device | str = "cpu") -> None:
        self.folder, self.device = folder, torch.device(device)
        self.config = describe_network(self.network, folder).config

    @cached_property
    def vae(self) -> Any:
        """The autoencoder with its weights. Raises CheckpointError as `load_network`."""
        return load_network(self.network, self.folder, self.device)

    @torch.no_grad()
    def encode(self, frames_FHW3: np.ndarray) -> torch.Tensor:
        """uint8 [F, H, W, 3], F = 1 + stride (T - 1) -> latents fp32 [C, T, h, w] on the CPU.

        Raises DataError for another number of frames.
        """
        latents_of_frames(len(frames_FHW3), self.stride)
        pixels = torch.from_numpy(np.ascontiguousarray(frames_FHW3)).to(self.device)
        x = (pixels.permute(3, 0, 1, 2)[None].float() / 127.5 - 1).to(self.vae.dtype)
        return self._normalised(self.vae.encode(x).latent_dist.mode().float())[0].cpu()

    @torch.no_grad()
    def decode(self, latents_CTHW: torch.Tensor, state: Any = None) -> tuple[np.ndarray, Any]:
        """Latents [C, T, h, w] -> uint8 frames [F, H, W, 3] and the state for the latents that follow.

        F = 1 + stride (T - 1) where the video begins (`state` None), stride T after it.
        """
        z = self._plain(latents_CTHW.to(self.device, torch.float32)[None]).to(self.vae.dtype)
        frames = []
        for index in range(z.shape[2]):
            x, state = self._decode_latent(z[:, :, index : index + 1], state)
            pixels = ((x[0].float() + 1) * 127.5).clamp(0, 255).add(0.5).to(torch.uint8)
            frames.append(pixels.permute(1, 2, 3, 0).cpu().numpy())
        return np.concatenate(frames), state

    @abstractmethod
    def _normalised(self, z: torch.Tensor) -> torch.Tensor:
        """The autoencoder's latents as the transformer sees them."""

    @abstractmethod
    def _plain(self, z: torch.Tensor) -> torch.Tensor:
        """The inverse of `_normalised`."""

    @abstractmethod
    def _decode_latent(self, z_1C1HW: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        """Pixels of one latent in [-1, 1], [1, 3, F, H, W], and the state for the next one."""


class WanCodec(_Autoencoder):
    """Wan 2.2's autoencoder (5B: 48 channels, 16 x 16 pixels a cell): (z - mean) / std per channel, from the config.

    Its state is diffusers' own feature cache, one entry a causal convolution.
    """

    network = AutoencoderKLWan

    def __init__(self, folder: Path, device: torch.device | str = "cpu") -> None:
        super().__init__(folder, device)
        config = self.config
        self.channels: int = config.z_dim
        self.stride = 2 ** sum(config.temperal_downsample)
        self.spatial = 2 ** (len(config.dim_mult) - 1) * (config.patch_size or 1)
        statistics = (config.latents_mean, config.latents_std)
        if self.stride != 4 or any(len(values) != self.channels for values in statistics):
            raise CheckpointError(
                f"{folder / 'config.json'}: {self.stride} frames a latent and {len(statistics[0])} latent means for "
                f"z_dim = {self.channels}; needed are 4 and one mean and std a channel: take the base's own vae"
            )
        self._mean, self._std = (
            torch.tensor(values, device=self.device).view(1, -1, 1, 1, 1) for values in statistics
        )

    def _normalised(self, z: torch.Tensor) -> torch.Tensor:
        return (z - self._mean) / self._std

    def _plain(self, z: torch.Tensor) -> torch.Tensor:
        return z * self._std + self._mean

    def _decode_latent(
        self, z_1C1HW: torch.Tensor, state: list[Any] | None
    ) -> tuple[torch.Tensor, list[Any]]:
        convolutions = sum(isinstance(module, WanCausalConv3d) for module in self.vae.decoder.modules())
        cache = (
            [None] * convolutions if state is None else list(state)
        )  # the decoder replaces entries of its list
        x = self.vae.decoder(
            self.vae.post_quant_conv(z_1C1HW), feat_cache=cache, feat_idx=[0], first_chunk=state is None
        )
        return (unpatchify(x, self.config.patch_size) if self.config.patch_size else x), cache


class FrameLocalAttention(HunyuanVideo15AttnBlock):
    """The middle block's attention within each frame alone; weights are the stock block's."""

    def forward(self, x_BCTHW: torch.Tensor) -> torch.Tensor:
        B, C, T, H, W = x_BCTHW.shape
        h = self.norm(x_BCTHW)
        query, key, value = (
            part(h).permute(0, 2, 3, 4, 1).reshape(B * T, 1, H * W, C)
            for part in (self.to_q, self.to_k, self.to_v)
        )
        out = F.scaled_dot_product_attention(query, key, value)
        return x_BCTHW + self.proj_out(out.view(B, T, H, W, C).permute(0, 4, 1, 2, 3))

    @staticmethod
    def replace_in(vae: nn.Module) -> None:
        """Put one in the place of every stock attention of an autoencoder, with its weights."""
        for module in list(vae.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, HunyuanVideo15AttnBlock):
                    with torch.device("meta"):
                        local = FrameLocalAttention(child.in_channels)
                    local.load_state_dict(child.state_dict(), assign=True)
                    module._modules[name] = local.requires_grad_(False).train(child.training)


class HunyuanCodec(_Autoencoder):
    """HunyuanVideo-1.5's autoencoder (8B: 32 channels, 16 x 16 pixels a cell): z times a scaling factor.

    Its state is the last two input frames of every causal convolution, in the order in which the decoder meets them.
    """

    network = AutoencoderKLHunyuanVideo15

    def __init__(self, folder: Path, device: torch.device | str = "cpu") -> None:
        super().__init__(folder, device)
        self.channels: int = self.config.latent_channels
        self.stride: int = self.config.temporal_compression_ratio
        self.spatial: int = self.config.spatial_compression_ratio

    @cached_property
    def vae(self) -> Any:
        vae = load_network(self.network, self.folder, self.device)
        FrameLocalAttention.replace_in(vae)
        return vae

    def _normalised(self, z: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, z * self.config.scaling_factor)

    def _plain(self, z: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, z / self.config.scaling_factor)

    def _decode_latent(
        self, z_1C1HW: torch.Tensor, state: list[torch.Tensor] | None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        walk = _HunyuanWalk(state)
        return walk.decode(self.vae.decoder, z_1C1HW), walk.kept


class _HunyuanWalk:
    """One latent through the stock decoder's modules, with the past of every causal convolution at hand.

    `first`: the video begins; then a convolution repeats its first frame backwards, and an upsampling in time makes
    one frame of one, as in the stock class.
    """

    def __init__(self, past: list[torch.Tensor] | None) -> None:
        self.past, self.kept = past, list[torch.Tensor]()

    @property
    def first(self) -> bool:
        return self.past is None

    def decode(self, decoder: Any, z: torch.Tensor) -> torch.Tensor:
        x = self._conv(decoder.conv_in, z) + z.repeat_interleave(decoder.repeat, dim=1)
        middle = decoder.mid_block
        x = self._resnet(middle.resnets[0], x)
        for attention, resnet in zip(middle.attentions, middle.resnets[1:], strict=True):
            x = self._resnet(resnet, x if attention is None else attention(x))
        for block in decoder.up_blocks:
            for resnet in block.resnets:
                x = self._resnet(resnet, x)
            for upsampler in block.upsamplers or ():
                x = self._upsample(upsampler, x)
        return self._conv(decoder.conv_out, decoder.conv_act(decoder.norm_out(x)))

    def _conv(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        *spatial, depth, _ = module.time_causal_padding
        before = x[:, :, :1].expand(-1, -1, depth, -1, -1) if self.past is None else self.past[len(self.kept)]
        x = torch.cat((before, x), dim=2)
        self.kept.append(x[:, :, x.shape[2] - depth :].clone())
        return cast(torch.Tensor, module.conv(F.pad(x, (*spatial, 0, 0), mode=module.pad_mode)))

    def _resnet(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        h = self._conv(block.conv1, block.nonlinearity(block.norm1(x)))
        h = self._conv(block.conv2, block.nonlinearity(block.norm2(h)))
        return h + (x if block.conv_shortcut is None else block.conv_shortcut(x))

    def _upsample(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        times = 2 if block.add_temporal_upsample and not self.first else 1
        h, shortcut = (
            block._dcae_upsample_rearrange(part, r1=times) for part in (self._conv(block.conv, x), x)
        )
        repeats = block.repeats
        if block.add_temporal_upsample and self.first:  # one frame of one: half of the channels go
            h, repeats = h[:, : h.shape[1] // 2], repeats // 2
        if not block.add_temporal_upsample:
            shortcut = block._dcae_upsample_rearrange(x.repeat_interleave(repeats, dim=1), r1=1)
            return cast(torch.Tensor, h + shortcut)
        return cast(torch.Tensor, h + shortcut.repeat_interleave(repeats, dim=1))
