"""Projective positional encoding (PRoPE): what the transformer knows about cameras.

A frame's camera is P = lift(diag(fx, fy, 1)) @ w2c, a 4x4 matrix (the principal point is dropped, as the published
bases were trained). Every group of 4 channels of a head is treated as a homogeneous vector that P moves between the
world and that camera: q -> P^T q, k -> P^-1 k, v -> P^-1 v, o -> P o. Attention then depends only on P_i P_j^-1, the
relative projection of two frames, never on the choice of the world frame (spec worldplay 1a).

Why block-diagonal matrices: a batched product with 4x4 matrices is all overhead on a CPU. The 4x4 is repeated along
the diagonal of one wider matrix, which is more arithmetic and several times faster. All of it stays in fp32, because
an inverse in bf16 would move the camera.
"""

from typing import NamedTuple

import torch

# Widest block: enough for an efficient product; a wider one only multiplies more zeros.
_MAX_BLOCK = 32


class CameraTransforms(NamedTuple):
    """The three block matrices of one call, fp32, [B, T, S, S], to be used as `row_vector @ matrix`."""

    query: torch.Tensor
    key_value: torch.Tensor
    output: torch.Tensor


def camera_transforms(w2c_BT44: torch.Tensor, K_BT33: torch.Tensor, head_dim: int) -> CameraTransforms:
    """Build the transforms of one clip from world-to-camera poses and intrinsics (units of the world, fp32).

    Raises ValueError when `head_dim` is not a multiple of 4.
    """
    if head_dim % 4:
        raise ValueError(f"PRoPE needs a head width that is a multiple of 4, got {head_dim}")
    w2c = w2c_BT44.float()
    focal = torch.diagonal(K_BT33.float(), dim1=-2, dim2=-1).clone()
    focal[..., 2] = 1.0
    rotation, translation = w2c[..., :3, :3], w2c[..., :3, 3:]
    bottom = w2c[..., 3:, :]
    project = torch.cat((torch.cat((rotation, translation), -1) * focal[..., :, None], bottom), -2)
    # Rigid inverse by hand: exact to rounding, and a batched LU is slow for thousands of 4x4.
    transposed = rotation.transpose(-1, -2)
    inverse_top = torch.cat((transposed / focal[..., None, :], -(transposed @ translation)), -1)
    inverse = torch.cat((inverse_top, bottom), -2)
    copies = max(
        n for n in range(1, head_dim // 4 + 1) if (head_dim // 4) % n == 0 and (4 * n <= _MAX_BLOCK or n == 1)
    )
    return CameraTransforms(
        query=_block_diagonal(project, copies),
        key_value=_block_diagonal(inverse.transpose(-1, -2), copies),
        output=_block_diagonal(project.transpose(-1, -2), copies),
    )


def transform(x_BTLD: torch.Tensor, matrix_BTSS: torch.Tensor) -> torch.Tensor:
    """Multiply every group of S channels of every token by its frame's matrix; fp32 out, shape kept.

    The matrices may have batch 1 (cameras shared by all candidates).
    """
    B, T, L, D = x_BTLD.shape
    size = matrix_BTSS.shape[-1]
    with torch.autocast(x_BTLD.device.type, enabled=False):
        return (x_BTLD.float().reshape(B, T, L * (D // size), size) @ matrix_BTSS).view(B, T, L, D)


def _block_diagonal(matrix_BT44: torch.Tensor, copies: int) -> torch.Tensor:
    B, T = matrix_BT44.shape[:2]
    eye = torch.eye(copies, dtype=matrix_BT44.dtype, device=matrix_BT44.device)
    blocks = eye[:, None, :, None] * matrix_BT44[:, :, None, :, None, :]
    return blocks.reshape(B, T, 4 * copies, 4 * copies)
