"""The embedded pose scorer: a small network that reads the camera motion between neighbouring frames.

Why this shape: a plain CNN on stacked frames learned nothing in the prototype, because it must invent
matching first. Here matching is given: both frames go through one encoder, and every cell of the first is
compared (cosine) with the cells of a window around it in the second. Motion can then be read off by a few
convolutions that also know where in the image they are (a shift means yaw or strafe, an expansion means
forward), so it learns in minutes on two cores.

Motion convention, the step map of `camera.step_transform`: rotate first (yaw, then pitch, about the
camera's own axes), then translate by (tx, ty, tz) along the axes of the *new* camera. The five outputs are
in units of one step (of `step.translation` and `step.rotation_deg`); roll is not estimated and is 0.
Relative poses are camera-to-world: c2w[i]^-1 @ c2w[i + 1], in units of the world.

Not here: any absolute scale for other worlds. The network knows the step of the world that it was trained on.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from pipeline.camera import StepSize
from pipeline.scorers.weights import load_module, save_module

MOTION = ("tx", "ty", "tz", "yaw", "pitch")


@dataclass(frozen=True)
class PoseNetConfig:
    """Sizes of the network; height and width in pixels, divisible by 8; `radius` in cells of half
    resolution."""

    height: int = 40
    width: int = 64
    features: int = 32
    radius: int = 4
    trunk: int = 64
    hidden: int = 128


class PoseNet(nn.Module):
    """Frame pairs -> motion in units of a step, (N, 5) in the order of `MOTION`; 0.39 M parameters by
    default."""

    def __init__(self, config: PoseNetConfig = PoseNetConfig()) -> None:
        super().__init__()
        self.config = config
        c, t = config.features, config.trunk
        self.encoder = nn.Sequential(
            nn.Conv2d(3, c, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Conv2d(c, c, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(c, c, 3, padding=1),
        )
        window = (2 * config.radius + 1) ** 2
        self.trunk = nn.Sequential(
            nn.Conv2d(window + c + 2, t, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(t, t * 3 // 2, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(t * 3 // 2, t * 3 // 2, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(t * 3 // 2, t // 2, 1),
            nn.GELU(),
        )
        cells = (config.height // 8) * (config.width // 8)
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Linear(t // 2 * cells, config.hidden),
            nn.GELU(),
            nn.Linear(config.hidden, len(MOTION)),
        )
        y, x = torch.meshgrid(
            torch.linspace(-1, 1, config.height // 2), torch.linspace(-1, 1, config.width // 2), indexing="ij"
        )
        self.register_buffer("position", torch.stack([x, y])[None], persistent=False)
        self.log_sharpness = nn.Parameter(torch.tensor(1.0))

    def encode(self, frames_N3HW: torch.Tensor) -> torch.Tensor:
        """Frames in [0, 1] -> features (N, C, H/2, W/2). Each frame is centred: brightness is not motion."""
        centred = frames_N3HW - frames_N3HW.mean(dim=(1, 2, 3), keepdim=True)
        features: torch.Tensor = self.encoder(4 * centred)
        return features

    def motion(self, first_NCHW: torch.Tensor, second_NCHW: torch.Tensor) -> torch.Tensor:
        """Motion (N, 5) between the features of two frames."""
        matches = local_correlation(
            F.normalize(first_NCHW, dim=1), F.normalize(second_NCHW, dim=1), self.config.radius
        )
        position = self.position.expand(len(first_NCHW), -1, -1, -1)  # type: ignore[operator]
        seen = torch.cat([self.log_sharpness.exp() * matches, first_NCHW, position], dim=1)
        out: torch.Tensor = self.head(self.trunk(seen))
        return out

    def forward(self, frames_BF3HW: torch.Tensor) -> torch.Tensor:
        """Motion between neighbours, (B, F-1, 5), of videos in [0, 1]; each frame is encoded once."""
        b, f = frames_BF3HW.shape[:2]
        features = self.encode(frames_BF3HW.flatten(0, 1)).unflatten(0, (b, f))
        motion = self.motion(features[:, :-1].flatten(0, 1), features[:, 1:].flatten(0, 1))
        return motion.unflatten(0, (b, f - 1))


def local_correlation(first_NCHW: torch.Tensor, second_NCHW: torch.Tensor, radius: int) -> torch.Tensor:
    """Dot products of each cell with the window around it in the second map: (N, (2r+1)^2, H, W), row shift
    outermost.

    Outside the map the product is 0. Each row of cells is multiplied with the rows around it as one matrix product,
    (W x C) by (C x (2r+1)(W+2r)); the wanted band is then a view with slanted strides, which costs no gather.
    """
    n, c, h, w = first_NCHW.shape
    side, wide = 2 * radius + 1, w + 2 * radius
    around = F.pad(second_NCHW, (radius,) * 4).unfold(2, side, 1)  # (N, C, H, W+2r, row shift)
    rows = around.permute(0, 2, 1, 4, 3).reshape(n * h, c, side * wide)
    product = torch.bmm(first_NCHW.permute(0, 2, 3, 1).reshape(n * h, w, c), rows)
    band = product.as_strided((n * h, side, side, w), (w * side * wide, wide, 1, side * wide + 1))
    return band.reshape(n, h, side * side, w).permute(0, 2, 1, 3)


def motion_of_relative(rel_N44: NDArray[Any], step: StepSize) -> NDArray[np.float64]:
    """Relative c2w poses (..., 4, 4) -> motions (..., 5) in steps; inverse of `relative_of_motion` where
    roll is 0."""
    rel = np.asarray(rel_N44, dtype=np.float64)
    pitch = np.degrees(np.arctan2(rel[..., 2, 1], rel[..., 2, 2]))
    yaw = np.degrees(np.arctan2(-rel[..., 2, 0], np.hypot(rel[..., 0, 0], rel[..., 1, 0])))
    local = np.einsum("...ji,...j->...i", rel[..., :3, :3], rel[..., :3, 3]) / step.translation
    return np.concatenate([local, np.stack([yaw, pitch], axis=-1) / step.rotation_deg], axis=-1)


def relative_of_motion(motion_N5: NDArray[Any], step: StepSize) -> NDArray[np.float64]:
    """Motions (..., 5) in steps -> relative c2w poses (..., 4, 4) in units of the world."""
    motion = np.asarray(motion_N5, dtype=np.float64)
    yaw, pitch = (np.radians(motion[..., i] * step.rotation_deg) for i in (3, 4))
    cy, sy, cp, sp = np.cos(yaw), np.sin(yaw), np.cos(pitch), np.sin(pitch)
    zero, one = np.zeros_like(yaw), np.ones_like(yaw)
    around_y = np.stack([cy, zero, sy, zero, one, zero, -sy, zero, cy], axis=-1).reshape(*yaw.shape, 3, 3)
    around_x = np.stack([one, zero, zero, zero, cp, -sp, zero, sp, cp], axis=-1).reshape(*yaw.shape, 3, 3)
    rotation = around_y @ around_x
    rel = np.zeros((*yaw.shape, 4, 4))
    rel[..., :3, :3] = rotation
    rel[..., :3, 3] = np.einsum("...ij,...j->...i", rotation, motion[..., :3] * step.translation)
    rel[..., 3, 3] = 1.0
    return rel


class PoseScorer:
    """A trained PoseNet with the step of its world: uint8 videos in, relative poses out."""

    name = "pose_net"

    def __init__(self, net: PoseNet, step: StepSize, device: str = "cpu", batch: int = 16) -> None:
        self.net, self.step, self.device, self.batch = net.to(device).eval(), step, device, batch

    @torch.inference_mode()
    def motion(self, frames_BFHW3: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Motions (B, F-1, 5) in steps of uint8 videos (B, F, H, W, 3). Raises ValueError for another frame
        size."""
        size = (self.net.config.height, self.net.config.width, 3)
        if frames_BFHW3.ndim != 5 or frames_BFHW3.shape[2:] != size or frames_BFHW3.dtype != np.uint8:
            raise ValueError(
                f"the pose network reads uint8 videos (B, F, {size[0]}, {size[1]}, 3), "
                f"got {frames_BFHW3.dtype} {frames_BFHW3.shape}"
            )
        parts = []
        for start in range(0, len(frames_BFHW3), self.batch):
            part = torch.from_numpy(np.ascontiguousarray(frames_BFHW3[start : start + self.batch]))
            video = part.to(self.device).permute(0, 1, 4, 2, 3).float() / 255
            parts.append(self.net(video).cpu())
        return torch.cat(parts).double().numpy()

    def relative(self, frames_BFHW3: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Relative c2w poses between neighbours, (B, F-1, 4, 4) float64, units of the world."""
        return relative_of_motion(self.motion(frames_BFHW3), self.step)

    def save(self, folder: Path) -> None:
        """Write pose_net.safetensors and pose_net.json."""
        save_module(folder, self.name, self.net, {"net": asdict(self.net.config), "step": asdict(self.step)})

    @classmethod
    def load(cls, folder: Path, device: str = "cpu") -> "PoseScorer":
        """Read what `save` wrote. Raises CheckpointError naming the file or key."""
        return load_module(
            folder, cls.name, lambda config: cls._build(config, device), lambda scorer: scorer.net
        )

    @classmethod
    def _build(cls, config: dict[str, Any], device: str) -> "PoseScorer":
        return cls(PoseNet(PoseNetConfig(**config["net"])), StepSize(**config["step"]), device)
