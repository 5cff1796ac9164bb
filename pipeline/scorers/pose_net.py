"""The embedded pose scorer: a small network that reads the camera motion between the frames of a short window.

Why this shape: a plain CNN on stacked frames learned nothing in the prototype, because it must invent
matching first. Here matching is given: all frames go through one encoder, and every cell of one frame is
compared (cosine) with the cells of a window around it in another. Motion can then be read off by a few
convolutions that also know where in the image they are (a shift means yaw or strafe, an expansion means
forward), so it learns in minutes on two cores.

A pair of neighbours alone cannot tell a strafe from a turn in a soft, generated frame: at this size both move the
picture by four pixels. So each frame is compared with its neighbour and with the window's first frame, where parallax
has added up, and attention over the window weighs them: like the big pose models, which see a whole clip at once.

Motion convention, the step map of `camera.step_transform`: rotate first (yaw, then pitch, about the
camera's own axes), then translate by (tx, ty, tz) along the axes of the *new* camera. The five outputs are
in units of one step (of `step.translation` and `step.rotation_deg`); roll is not estimated and is 0.
Relative poses are camera-to-world: c2w[i]^-1 @ c2w[i + 1], in units of the world.

Not here: any absolute scale for other worlds. The network knows the step of the world that it was trained on.
"""

import math
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

_HEADS = 4
MOTION = ("tx", "ty", "tz", "yaw", "pitch")


@dataclass(frozen=True)
class PoseNetConfig:
    """Sizes of the network; height and width in pixels, divisible by 8; `radius` in cells of half resolution (of
    quarter resolution against the first frame); `window` frames are read together."""

    height: int = 40
    width: int = 64
    features: int = 32
    radius: int = 4
    trunk: int = 64
    hidden: int = 128
    layers: int = 2
    window: int = 5


class PoseNet(nn.Module):
    """Windows of up to `window` frames -> motion in units of a step, (B, F-1, 5) in the order of `MOTION`; about 0.9 M
    parameters by default."""

    def __init__(self, config: PoseNetConfig = PoseNetConfig()) -> None:
        super().__init__()
        self.config = config
        c, d = config.features, config.hidden
        if d % _HEADS:
            raise ValueError(f"hidden is {d}, not a multiple of the {_HEADS} attention heads")
        self.encoder = nn.Sequential(
            nn.Conv2d(3, c, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Conv2d(c, c, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(c, c, 3, padding=1),
        )
        half = (config.height // 2, config.width // 2)
        self.near = PairReader(half, c, config.radius, config.trunk, d, stride=2)
        self.far = PairReader((half[0] // 2, half[1] // 2), c, config.radius, config.trunk, d, stride=1)
        self.place = nn.Parameter(0.02 * torch.randn(config.window - 1, d))
        layer = nn.TransformerEncoderLayer(d, _HEADS, 2 * d, 0.0, "gelu", batch_first=True, norm_first=True)
        self.mix = nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)
        self.head = nn.Linear(d, len(MOTION))

    def forward(self, frames_BF3HW: torch.Tensor) -> torch.Tensor:
        """Motion between neighbours, (B, F-1, 5), of windows in [0, 1]; each frame is encoded once and centred, since
        brightness is not motion."""
        b, f = frames_BF3HW.shape[:2]
        flat = frames_BF3HW.flatten(0, 1)
        features = self.encoder(4 * (flat - flat.mean(dim=(1, 2, 3), keepdim=True)))
        coarse = F.avg_pool2d(features, 2).unflatten(0, (b, f))
        features = features.unflatten(0, (b, f))
        near = self.near(features[:, :-1].flatten(0, 1), features[:, 1:].flatten(0, 1))
        first = coarse[:, :1].expand(-1, f - 1, -1, -1, -1)
        far = self.far(first.flatten(0, 1), coarse[:, 1:].flatten(0, 1))
        tokens = (near + far).unflatten(0, (b, f - 1)) + self.place[: f - 1]
        out: torch.Tensor = self.head(self.mix(tokens))
        return out


class PairReader(nn.Module):
    """Two feature maps -> what their displacement says, (N, hidden): correlation volume, convolutions, one vector."""

    def __init__(
        self, size: tuple[int, int], features: int, radius: int, trunk: int, hidden: int, stride: int
    ) -> None:
        super().__init__()
        self.radius = radius
        self.trunk = nn.Sequential(
            nn.Conv2d((2 * radius + 1) ** 2 + features + 2, trunk, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(trunk, trunk * 3 // 2, 3, stride=stride, padding=1),
            nn.GELU(),
            nn.Conv2d(trunk * 3 // 2, trunk * 3 // 2, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(trunk * 3 // 2, trunk // 2, 1),
            nn.GELU(),
        )
        cells = math.ceil(size[0] / (2 * stride)) * math.ceil(size[1] / (2 * stride))
        self.vector = nn.Sequential(
            nn.Flatten(), nn.Linear(trunk // 2 * cells, hidden), nn.GELU(), nn.Linear(hidden, hidden)
        )
        y, x = torch.meshgrid(torch.linspace(-1, 1, size[0]), torch.linspace(-1, 1, size[1]), indexing="ij")
        self.register_buffer("position", torch.stack([x, y])[None], persistent=False)
        self.log_sharpness = nn.Parameter(torch.tensor(1.0))

    def forward(self, first_NCHW: torch.Tensor, second_NCHW: torch.Tensor) -> torch.Tensor:
        matches = local_correlation(
            F.normalize(first_NCHW, dim=1), F.normalize(second_NCHW, dim=1), self.radius
        )
        position = self.position.expand(len(first_NCHW), -1, -1, -1)  # type: ignore[operator]
        seen = torch.cat([self.log_sharpness.exp() * matches, first_NCHW, position], dim=1)
        out: torch.Tensor = self.vector(self.trunk(seen))
        return out


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
            reach = (
                self.net.config.window - 1
            )  # windows share a frame: the last of one is the first of the next
            windows = [video[:, at : at + reach + 1] for at in range(0, video.shape[1] - 1, reach)]
            parts.append(torch.cat([self.net(window).cpu() for window in windows], dim=1))
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
