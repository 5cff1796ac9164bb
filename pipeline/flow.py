"""Flow matching: noise levels, the sampler's step and keyed noise.

A noisy latent is x_sigma = x0 + sigma (noise - x0), sigma from 1 (pure noise) to 0; models predict the velocity
noise - x0. The sampler is the deterministic Euler ODE of both papers (spec worldcompass 2.4, worldplay 2).

Noise is a pure function of what it is for, never of a generator's history: which shard, worker or order draws it makes
no difference. numpy's Philox and not torch's generator, whose normal draws depend on the CPU's vector width.
"""

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import torch

TIMESTEPS = 1000.0


def sigmas(steps: int, shift: float) -> torch.Tensor:
    """Noise levels of a sampler, float32 [steps + 1]: shift s / (1 + (shift - 1) s) of linspace(1, 0, steps + 1).

    Shift 8 and 4 steps give 1, 0.96, 0.8889, 0.7273, 0. Raises ValueError for steps < 1 or shift <= 0.
    """
    if steps < 1 or shift <= 0:
        raise ValueError(f"a sampler needs steps >= 1 and shift > 0, got steps {steps} and shift {shift}")
    linear = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return (shift * linear / (1 + (shift - 1) * linear)).float()


def timestep(sigma: torch.Tensor, truncate: bool = False) -> torch.Tensor:
    """What the model is told of a noise level: 1000 sigma, float; truncated to a whole number as WorldCompass does."""
    value = TIMESTEPS * sigma
    return value.floor() if truncate else value


def add_noise(x0: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor | float) -> torch.Tensor:
    """x_sigma = (1 - sigma) x0 + sigma noise. A sigma of shape [B] belongs to the first axis; others broadcast."""
    level = _level(sigma, x0)
    return (1 - level) * x0 + level * noise


def x0_from_velocity(x: torch.Tensor, v: torch.Tensor, sigma: torch.Tensor | float) -> torch.Tensor:
    """The clean latent that a velocity implies at x_sigma: x - sigma v."""
    return x - _level(sigma, x) * v


def euler_step(
    x: torch.Tensor, v: torch.Tensor, sigma: torch.Tensor | float, sigma_next: torch.Tensor | float
) -> torch.Tensor:
    """One step of the ODE from sigma to sigma_next: x + (sigma_next - sigma) v. A step to 0 gives x0."""
    return x + (_level(sigma_next, x) - _level(sigma, x)) * v


def keyed_noise(
    shape: Sequence[int], *, seed: int, epoch: int, group: str, candidate: int, purpose: str
) -> torch.Tensor:
    """Standard normal float32 on the CPU, the same for the same key and shape on any machine and in any order."""
    key = json.dumps([seed, epoch, group, candidate, purpose], ensure_ascii=True).encode()
    words = np.frombuffer(hashlib.sha256(key).digest()[:16], dtype="<u8").astype(np.uint64)
    generator = np.random.Generator(np.random.Philox(key=words))
    return torch.from_numpy(generator.standard_normal(tuple(shape), dtype=np.float32))


def _level(sigma: torch.Tensor | float, x: torch.Tensor) -> torch.Tensor:
    level = torch.as_tensor(sigma, device=x.device)
    return level.reshape(-1, *[1] * (x.ndim - 1)) if level.ndim == 1 and x.ndim > 1 else level
