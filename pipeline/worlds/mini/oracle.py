"""The oracle: where is the camera really, and how far is a frame from any true view? (spec worldcycle 6.2)

Render-and-compare: the pose of a generated frame is fitted with the true renderer of its scene, from several starts
(the last estimate moved by all, half or parts of the commanded step, and the commanded pose), by Levenberg-Marquardt on
a robust photometric error, so that invented content at the border does not drag the pose away. It judges experiments
and is never a reward. A frame whose best fit still leaves a large residual is off the manifold: a *failure*, which
counts as a wrong action, never as a missing one.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from pipeline import actions, camera
from pipeline.worlds.mini.clips import STEP
from pipeline.worlds.mini.renderer import MiniScene, SceneBatch, render_batch

FAILURE_RESIDUAL = 0.085
"""Median absolute colour error (of 1) above which a frame is off the manifold. Fixed on renders, not on any result:
true renders through the codec stay under it, frames of another room are above it (docs/results.md, oracle table)."""
THRESHOLD = 0.5
"""A motion counts from half of the commanded step on, in translation and in rotation: nearer to obeyed than to ignored.
The pose scorer's rotation threshold is the same half, so the two draw one line (docs/results.md)."""
_SIZES = ((20, 32), (40, 64))
_ITERATIONS = (6, 4)
_CAUCHY = 0.08
_DELTA = torch.tensor([0.01, 0.01, 0.005, 0.005])
"""Half the differences of the numerical Jacobian: right, forward (units), yaw, pitch (radians), all that keys can
ask for. A free height and roll took what belongs to the pitch on soft frames: 0.4 of a step off where it is 0.14 now.
Central differences: forward ones over the hard edges of these renders left fits of half an action 0.08 units and 1.4
degrees off, central ones 0.03 and 0.5."""


@dataclass(frozen=True)
class OracleTrack:
    """`c2w_BF44` fitted poses in the scenes' frames (frame 0 is the given one), `residual_BF`, `failed_BF`."""

    c2w_BF44: np.ndarray
    residual_BF: np.ndarray
    failed_BF: np.ndarray

    def labels_BF(self) -> np.ndarray:
        """The action that the camera really did before each frame; -1 where the frame or the one before has failed."""
        relative = np.linalg.inv(self.c2w_BF44[:, :-1]) @ self.c2w_BF44[:, 1:]
        labels = camera.labels_from_relative(
            relative.reshape(-1, 4, 4), THRESHOLD * STEP.translation, THRESHOLD * STEP.rotation_deg
        )
        labels = labels.reshape(relative.shape[:2])
        labels[self.failed_BF[:, 1:] | self.failed_BF[:, :-1]] = -1
        return np.concatenate([np.zeros((len(labels), 1), np.int64), labels], 1)


def _move(delta_N4: torch.Tensor) -> torch.Tensor:
    """Small motion [x, z, yaw, pitch] in camera axes as matrices [N, 4, 4]."""
    zero = torch.zeros(len(delta_N4))
    yaw, pitch = delta_N4[:, 2], delta_N4[:, 3]
    generator = torch.stack([zero, zero, yaw, zero, zero, -pitch, -yaw, pitch, zero], -1).reshape(-1, 3, 3)
    out = torch.eye(4).repeat(len(delta_N4), 1, 1)
    out[:, :3, :3] = torch.linalg.matrix_exp(generator)
    out[:, 0, 3], out[:, 2, 3] = delta_N4[:, 0], delta_N4[:, 1]
    return out


def _smooth(frames: torch.Tensor) -> torch.Tensor:
    """Blur [..., H, W, 3] by a 3 x 3 tent, so that a slightly soft frame still fits its sharp render."""
    lead, (H, W) = frames.shape[:-3], frames.shape[-3:-1]
    x = frames.reshape(-1, H, W, 3).permute(0, 3, 1, 2)
    kernel = torch.tensor([0.25, 0.5, 0.25])
    x = F.conv2d(
        F.pad(x, (1, 1, 1, 1), mode="replicate"), (kernel[:, None] * kernel).expand(3, 1, 3, 3), groups=3
    )
    return x.permute(0, 2, 3, 1).reshape(*lead, H, W, 3)


def _hypotheses(
    previous_B44: torch.Tensor, commanded_B44: torch.Tensor, labels_B: np.ndarray
) -> torch.Tensor:
    """Starts [B, 8, 4, 4]: last estimate moved by shares of the commanded step, and the commanded pose itself."""
    starts = []
    for translation, rotation in ((1, 1), (1, 0), (0, 1), (0, 0), (0.5, 0.5), (1, 0.5), (0.5, 1)):
        step = camera.StepSize(
            max(translation, 1e-9) * STEP.translation, max(rotation, 1e-9) * STEP.rotation_deg
        )
        moves = np.stack([camera.step_transform(int(label), step) for label in labels_B])
        starts.append(previous_B44 @ torch.from_numpy(moves).float())
    return torch.stack([*starts, commanded_B44], 1)


def _cost(difference: torch.Tensor) -> torch.Tensor:
    """Cauchy cost of [..., H, W, 3] differences, mean over pixels."""
    return torch.log1p((difference / _CAUCHY).square()).mean((-3, -2, -1))


@torch.no_grad()
def _refine(
    scenes: SceneBatch, frames: torch.Tensor, poses: torch.Tensor, size: tuple[int, int], iterations: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Levenberg-Marquardt on poses [B, S, 4, 4] against frames [B, H, W, 3]; returns (poses, costs [B, S])."""
    B, S = poses.shape[:2]
    damping = torch.full((B, S), 1e-2)
    target = frames[:, None]
    moves, n = _move(torch.cat([torch.diag(_DELTA), torch.diag(-_DELTA)])), len(_DELTA)

    def images(p: torch.Tensor) -> torch.Tensor:
        return _smooth(render_batch(scenes, p.reshape(B, -1, 4, 4), *size))

    for _ in range(iterations):
        probe = torch.cat([poses[:, :, None], poses[:, :, None] @ moves], 2)  # B S 1+2n 4 4
        rendered = images(probe).reshape(B, S, 1 + 2 * n, *size, 3)
        difference = rendered[:, :, 0] - target
        cost = _cost(difference)
        jacobian = (
            (rendered[:, :, 1 : 1 + n] - rendered[:, :, 1 + n :]) / (2 * _DELTA[:, None, None, None])
        ).flatten(3)
        weight = (1 / (1 + (difference / _CAUCHY).square())).flatten(2)
        weighted = jacobian * weight[:, :, None]
        hessian = weighted @ jacobian.transpose(-1, -2)
        gradient = (weighted @ difference.flatten(2)[..., None])[..., 0]
        diagonal = torch.diag_embed(torch.diagonal(hessian, dim1=-2, dim2=-1) * damping[..., None] + 1e-4)
        step = -torch.linalg.solve(hessian + diagonal, gradient).clamp(-0.3, 0.3)
        proposal = poses @ _move(step.reshape(-1, n)).reshape(B, S, 4, 4)
        better = _cost(images(proposal).reshape(B, S, *size, 3) - target) < cost
        poses = torch.where(better[..., None, None], proposal, poses)
        damping = torch.where(better, damping * 0.3, damping * 5)
    return poses, _cost(images(poses).reshape(B, S, *size, 3) - target)


@torch.no_grad()
def track(
    scenes: list[MiniScene],
    frames_BFHW3: np.ndarray,
    start_B44: np.ndarray,
    labels_BF: np.ndarray,
    chunk: int = 16,
    commanded_BF44: np.ndarray | None = None,
) -> OracleTrack:
    """Fit every frame of B videos whose frame 0 is the true view at `start_B44`; `labels_BF` are the commanded actions.

    frames uint8 [B, F, 40, 64, 3]; labels_BF[:, f] is the action before frame f (labels_BF[:, 0] is not used).
    `commanded_BF44` are the commanded poses in the scenes' frames, where they are not what the labels integrate to (the
    way back of a cycle); they are one of the starts of each fit.
    """
    parts = [
        _track(
            scenes[i : i + chunk],
            frames_BFHW3[i : i + chunk],
            start_B44[i : i + chunk],
            labels_BF[i : i + chunk],
            None if commanded_BF44 is None else commanded_BF44[i : i + chunk],
        )
        for i in range(0, len(scenes), chunk)
    ]
    return OracleTrack(
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("c2w_BF44", "residual_BF", "failed_BF")
        )
    )


def _track(
    scenes: list[MiniScene],
    frames_BFHW3: np.ndarray,
    start_B44: np.ndarray,
    labels_BF: np.ndarray,
    commanded_BF44: np.ndarray | None,
) -> OracleTrack:
    B, frame_count = frames_BFHW3.shape[:2]
    batch = SceneBatch.stack(scenes)
    pose = torch.from_numpy(start_B44).float()
    commanded = pose.clone()
    fitted, residuals = [pose.double().numpy()], [np.zeros(B)]
    for f in range(1, frame_count):
        moves = np.stack([camera.step_transform(int(label), STEP) for label in labels_BF[:, f]])
        commanded = commanded @ torch.from_numpy(moves).float()
        if commanded_BF44 is not None:
            commanded = torch.from_numpy(commanded_BF44[:, f]).float()
        full = torch.from_numpy(frames_BFHW3[:, f].astype(np.float32) / 255)
        small = F.avg_pool2d(full.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)
        starts = _hypotheses(pose, commanded, labels_BF[:, f])
        smooth = _smooth(small)
        cost = _cost(_smooth(render_batch(batch, starts, *_SIZES[0])) - smooth[:, None])
        best = cost.topk(3, largest=False).indices
        poses, cost = _refine(
            batch, smooth, starts[torch.arange(B)[:, None], best], _SIZES[0], _ITERATIONS[0]
        )
        poses = poses[torch.arange(B), cost.argmin(1)][:, None]
        poses, _ = _refine(batch, _smooth(full), poses, _SIZES[1], _ITERATIONS[1])
        pose = poses[:, 0]
        error = (_smooth(render_batch(batch, pose[:, None]))[:, 0] - _smooth(full)).abs().mean(-1)
        residuals.append(error.flatten(1).median(1).values.double().numpy())
        fitted.append(pose.double().numpy())
    residual = np.stack(residuals, 1)
    return OracleTrack(np.stack(fitted, 1), residual, residual > FAILURE_RESIDUAL)


def accuracy(labels_BF: np.ndarray, commanded_BF: np.ndarray) -> dict[str, np.ndarray]:
    """Per-frame hits of the oracle's labels, [B, F - 1]: `joint` (whole label), `fine` (mean of its two parts).

    A failed frame (-1) hits nothing.
    """
    found, asked = labels_BF[:, 1:], commanded_BF[:, 1:]
    valid = found >= 0
    seen = np.where(valid, found, 0)
    translation = valid & (actions.translation_code(seen) == actions.translation_code(asked))
    rotation = valid & (actions.rotation_code(seen) == actions.rotation_code(asked))
    return {
        "joint": (translation & rotation).astype(float),
        "fine": (translation.astype(float) + rotation) / 2,
    }
