"""What the attention of both WorldPlay networks has in common: RoPE as complex products, and two branches in one call.

The RoPE branch and the projective branch (PRoPE) attend with the same q, k, v; stacked as twice as many heads they are
one attention call instead of two. Rotations and camera matrices are fp32; the result runs in the dtype of the weights.

The context cache keeps keys and values plain, before either branch turns them, and every forward turns them again: half
the memory of keeping both branches (5.2 and not 10.4 GB for the 5B at full size) for 1 to 2 % of a step. What is stored
is what the turning would have been given at once, so the numbers are the same to the last bit.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from pipeline.worlds.base import ContextCache
from pipeline.worlds.prope import CameraTransforms, transform

KeyValue = tuple[torch.Tensor, torch.Tensor]


class Geometry(NamedTuple):
    """What all blocks of one call share: complex RoPE rotations [1, T, L, 1, head_dim/2] and the camera matrices."""

    rotation: torch.Tensor
    cameras: CameraTransforms


@dataclass
class RawContext(ContextCache):
    """Context keys and values before any rotation, [B, T, tokens of a latent, D], and where their cameras stood.

    RoPE time of its first latent is `start`. Moving to a narrower dtype leaves the cameras in fp32.
    """

    w2c_BT44: torch.Tensor
    K_BT33: torch.Tensor
    start: int = 0

    def to(self, *args: Any, **kwargs: Any) -> "RawContext":
        moved = super().to(*args, **kwargs)
        assert isinstance(moved, RawContext)
        device = moved.layers[0][0].device
        moved.w2c_BT44, moved.K_BT33 = self.w2c_BT44.to(device), self.K_BT33.to(device)
        return moved


def rotate(x_BTLD: torch.Tensor, rotation_1TL1c: torch.Tensor) -> torch.Tensor:
    """RoPE on neighbouring channel pairs as one complex product (8 times faster than sines and cosines); fp32 out."""
    pairs = x_BTLD.float().unflatten(-1, (-1, rotation_1TL1c.shape[-1], 2))
    return torch.view_as_real(torch.view_as_complex(pairs) * rotation_1TL1c).flatten(3)


def split_heads(x_BTLD: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, T, L, D] -> [B, heads, T*L, head_dim] in the dtype that attention runs in."""
    return x_BTLD.to(dtype).flatten(1, 2).unflatten(-1, (heads, -1)).transpose(1, 2)


def stack_branches(first: torch.Tensor, second: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Stack the RoPE and the projective branch as twice as many heads: one attention call instead of two."""
    return torch.cat((split_heads(first, heads, dtype), split_heads(second, heads, dtype)), dim=1)


def turned(key_BTLD: torch.Tensor, value_BTLD: torch.Tensor, geometry: Geometry, heads: int) -> KeyValue:
    """Plain keys and values -> those of both branches, [B, 2 heads, T*L, head_dim], in the dtype of the values."""
    inverse, dtype = geometry.cameras.key_value, value_BTLD.dtype
    keys = stack_branches(rotate(key_BTLD, geometry.rotation), transform(key_BTLD, inverse), heads, dtype)
    return keys, stack_branches(value_BTLD, transform(value_BTLD, inverse), heads, dtype)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Softmax attention without a mask, [B, heads, tokens, head_dim]."""
    if query.device.type == "cpu" and query.dtype == torch.bfloat16:
        # Measured at 160 x 480 tokens, head_dim 32, with backward: 58 ms; torch's fused bf16 kernel 100, fp32 68.
        return (query * query.shape[-1] ** -0.5 @ key.transpose(-1, -2)).softmax(-1) @ value
    return F.scaled_dot_product_attention(query, key, value)
