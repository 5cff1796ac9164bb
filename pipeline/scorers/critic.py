"""The embedded quality critic: a small CNN that gives each frame an unbounded score (Bradley-Terry, as
HPSv3's).

Why learned from pairs: what matters is the order "less degraded above more degraded" over the failures that
generated frames show (blur, noise, melting, ghosts, colour drift), not any absolute number. P(a better than
b) = sigmoid(score(a) - score(b)). Unbounded scores must be normalised before they are fused (advantages.py
does).

Not here: a judgement of content or of motion. A sharp frame of the wrong place scores well; that is the
action reward's and the oracle's business."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from pipeline.scorers.weights import load_module, save_module


@dataclass(frozen=True)
class CriticConfig:
    """Channels of the network (`width` a multiple of 8); it takes frames of any size from 16 pixels up."""

    width: int = 32
    hidden: int = 64


class Critic(nn.Module):
    """Frames (N, 3, H, W) in [0, 1] -> scores (N,); 0.14 M parameters by default."""

    def __init__(self, config: CriticConfig = CriticConfig()) -> None:
        super().__init__()
        self.config = config
        w = config.width
        sizes = ((3, w, 1), (w, w * 3 // 2, 2), (w * 3 // 2, w * 2, 2), (w * 2, w * 3, 2))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, 3, stride=s, padding=1), nn.GroupNorm(4, o), nn.GELU())
            for i, o, s in sizes
        )
        # Mean, spread and peak of every level: blur lives in the first, melted shapes in the last.
        pooled = 3 * sum(o for _, o, _ in sizes)
        self.head = nn.Sequential(nn.Linear(pooled, config.hidden), nn.GELU(), nn.Linear(config.hidden, 1))

    def forward(self, frames_N3HW: torch.Tensor) -> torch.Tensor:
        x, pooled = 2 * frames_N3HW - 1, []
        for layer in self.layers:
            x = layer(x)
            flat = x.flatten(2)
            pooled += [flat.mean(2), flat.var(2, unbiased=False).add(1e-6).sqrt(), flat.amax(2)]
        out: torch.Tensor = self.head(torch.cat(pooled, 1))[:, 0]
        return out


def preference_loss(better_N: torch.Tensor, worse_N: torch.Tensor) -> torch.Tensor:
    """-log sigmoid(better - worse), mean, plus a light pull of the scores to 0: pairs alone do not fix
    their offset."""
    pull = 1e-3 * (better_N.square() + worse_N.square()).mean()
    return F.softplus(worse_N - better_N).mean() + pull


class CriticScorer:
    """A trained critic: uint8 frames in, one float32 score each."""

    name = "critic"

    def __init__(self, net: Critic, device: str = "cpu", batch: int = 64) -> None:
        self.net, self.device, self.batch = net.to(device).eval(), device, batch

    @torch.inference_mode()
    def score(self, frames_NHW3: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Scores (N,) of uint8 frames (N, H, W, 3). Raises ValueError for another layout."""
        if frames_NHW3.ndim != 4 or frames_NHW3.shape[-1] != 3 or frames_NHW3.dtype != np.uint8:
            raise ValueError(
                f"the critic reads uint8 frames (N, H, W, 3), got {frames_NHW3.dtype} {frames_NHW3.shape}"
            )
        parts = [torch.zeros(0)]
        for start in range(0, len(frames_NHW3), self.batch):
            part = torch.from_numpy(np.ascontiguousarray(frames_NHW3[start : start + self.batch]))
            parts.append(self.net(part.to(self.device).permute(0, 3, 1, 2).float() / 255).cpu())
        return torch.cat(parts).numpy()

    def save(self, folder: Path) -> None:
        """Write critic.safetensors and critic.json."""
        save_module(folder, self.name, self.net, {"net": asdict(self.net.config)})

    @classmethod
    def load(cls, folder: Path, device: str = "cpu") -> "CriticScorer":
        """Read what `save` wrote. Raises CheckpointError naming the file or key."""
        return load_module(
            folder, cls.name, lambda config: cls._build(config, device), lambda scorer: scorer.net
        )

    @classmethod
    def _build(cls, config: dict[str, Any], device: str) -> "CriticScorer":
        return cls(Critic(CriticConfig(**config["net"])), device)
