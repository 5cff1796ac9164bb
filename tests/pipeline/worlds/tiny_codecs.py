"""Tiny random autoencoders of both published kinds, as folders: the classes and layout of the real ones."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKLHunyuanVideo15, AutoencoderKLWan
from torch import nn


def _shaken(vae: nn.Module, seed: int) -> nn.Module:
    """Random weights large enough that every frame and every cached convolution shows in the pixels."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in vae.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("gamma"):
            parameter.data = 1 + 0.1 * noise
        elif parameter.ndim > 1:
            parameter.data = noise / parameter[0].numel() ** 0.5
        else:
            parameter.data = 0.1 * noise
    return vae


def wan_vae(folder: Path, channels: int = 4) -> Path:
    """16 x 16 pixels and 4 frames a latent in the residual layout of Wan 2.2, with patches of 2 pixels."""
    torch.manual_seed(0)
    vae = AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=4,
        z_dim=channels,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1 * i for i in range(channels)],
        latents_std=[1.0 + 0.1 * i for i in range(channels)],
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_temporal=4,
        scale_factor_spatial=16,
    )
    _shaken(vae, 1).save_pretrained(folder)
    return folder


def hunyuan_vae(folder: Path, channels: int = 8) -> Path:
    """16 x 16 pixels and 4 frames a latent, as HunyuanVideo-1.5's."""
    torch.manual_seed(0)
    vae = AutoencoderKLHunyuanVideo15(
        latent_channels=channels, block_out_channels=(8, 16, 16, 16, 16), layers_per_block=1
    )
    _shaken(vae, 2).save_pretrained(folder)
    return folder
