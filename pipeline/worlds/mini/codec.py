"""The mini world's frame codec: a closed-form linear code of 8 x 8 pixel patches.

One frame is one latent (stride 1, nothing to stream). Principal components of the patches need no training run, decode
in microseconds and lose less than a learned codec of the same size does (docs/results.md has both, measured); what
the world model cannot draw sharply is then the world model's fault and not the codec's.

Latents are scaled by std ** 0.5 of their component: unit variance would make flow matching spend its effort on the
faintest detail, raw components would drown all detail in noise. An overall factor brings the mean square to 1.
"""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from pipeline.errors import CheckpointError
from pipeline.worlds.mini.renderer import HEIGHT, WIDTH

PATCH = 8
GRID_H, GRID_W = HEIGHT // PATCH, WIDTH // PATCH


def _patches(frames_F: torch.Tensor) -> torch.Tensor:
    """[F, 40, 64, 3] -> [F, 5, 8, 192]."""
    F = frames_F.shape[0]
    grid = frames_F.reshape(F, GRID_H, PATCH, GRID_W, PATCH, 3)
    return grid.permute(0, 1, 3, 2, 4, 5).reshape(F, GRID_H, GRID_W, -1)


class PatchCodec:
    """Linear codec between uint8 frames [F, 40, 64, 3] and latents [C, T = F, 5, 8] (float32, about unit variance)."""

    stride = 1

    def __init__(self, mean_D: torch.Tensor, basis_CD: torch.Tensor, scale_C: torch.Tensor) -> None:
        self.mean, self.basis, self.scale = mean_D, basis_CD, scale_C

    @property
    def channels(self) -> int:
        """Number of latent channels C."""
        return self.basis.shape[0]

    @staticmethod
    def fit(frames_F: np.ndarray, channels: int) -> "PatchCodec":
        """Fit to uint8 frames [F, 40, 64, 3] by principal components of their patches."""
        patches = _patches(torch.from_numpy(frames_F).double() / 127.5 - 1).reshape(-1, PATCH * PATCH * 3)
        mean = patches.mean(0)
        centred = patches - mean
        variance, vectors = torch.linalg.eigh(centred.T @ centred / len(centred))
        order = variance.argsort(descending=True)[:channels]
        basis = vectors[:, order].T
        basis = (
            basis * torch.sign(basis[torch.arange(channels), basis.abs().argmax(1)])[:, None]
        )  # a fixed sign
        std = variance[order].sqrt()
        scale = std.rsqrt()
        scale = scale / (std * scale).square().mean().sqrt()
        return PatchCodec(mean.float(), basis.float().contiguous(), scale.float())

    def encode(self, frames_FHW3: np.ndarray) -> torch.Tensor:
        """uint8 [F, 40, 64, 3] -> float32 [C, F, 5, 8]."""
        return self.encode_float(torch.from_numpy(np.ascontiguousarray(frames_FHW3)).float() / 255)

    def encode_float(self, frames_FHW3: torch.Tensor) -> torch.Tensor:
        """Frames in [0, 1], [F, 40, 64, 3] -> float32 [C, F, 5, 8] (pretraining skips the rounding to uint8)."""
        latents = ((_patches(frames_FHW3 * 2 - 1) - self.mean) @ self.basis.T) * self.scale
        return latents.permute(3, 0, 1, 2).contiguous()

    def decode(self, latents_CTHW: torch.Tensor, state: None = None) -> tuple[np.ndarray, None]:
        """Float latents [C, T, 5, 8] -> (uint8 [T, 40, 64, 3], None): a frame depends on its own latent alone."""
        T = latents_CTHW.shape[1]
        patches = (latents_CTHW.detach().float().permute(1, 2, 3, 0) / self.scale) @ self.basis + self.mean
        grid = patches.reshape(T, GRID_H, GRID_W, PATCH, PATCH, 3).permute(0, 1, 3, 2, 4, 5)
        frames = grid.reshape(T, HEIGHT, WIDTH, 3)
        return ((frames + 1) * 127.5).clamp(0, 255).add(0.5).to(torch.uint8).numpy(), None

    def save(self, path: Path) -> None:
        """Write one safetensors file."""
        save_file({"mean": self.mean, "basis": self.basis, "scale": self.scale}, path)

    @staticmethod
    def load(path: Path) -> "PatchCodec":
        """Read one safetensors file; CheckpointError when it is missing or damaged."""
        try:
            tensors = load_file(path)
            return PatchCodec(tensors["mean"], tensors["basis"], tensors["scale"])
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{path}: not a readable patch codec ({error}); restore the file or re-run `wcpipe pretrain`"
            ) from error
        except (
            Exception
        ) as error:  # safetensors raises its own SafetensorError, which derives from Exception alone
            raise CheckpointError(
                f"{path}: not a readable patch codec ({error}); restore the file or re-run `wcpipe pretrain`"
            ) from error
