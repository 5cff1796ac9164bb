"""Camera poses of a word and labels of poses, the frame <-> latent <-> action lattice, intrinsics and pose
files.

WHY one file: a sign, an order or an off-by-one that differs between sampler, reward and benchmark is not seen
in any loss; it only makes a perfect model look wrong. All of that is decided here, once.

Conventions (spec/worldcompass.md 1.4, spec/worldplay.md 3): numpy float64; poses are camera-to-world (c2w)
4x4, OpenCV axes (x right, y down, z forward), relative to frame 0. A step rotates first (yaw, then pitch,
both about the camera's own axes; yaw right and pitch up are positive) and then translates along the axes of
the *new* camera. T latents have T - 1 actions: pose 0 is the identity, pose i the camera after action i, and
label 0 is 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.actions import CODES, HELD_81K, LabelArray, check_labels, codes_of_bits
from pipeline.errors import ConfigError, DataError, WordError

PoseArray = npt.NDArray[np.float64]

# Below these a WorldPlay label counts an axis as still (spec/worldcompass.md 1.5).
TRANSLATION_THRESHOLD = 1e-4
ROTATION_THRESHOLD_DEG = 0.05


@dataclass(frozen=True)
class StepSize:
    """How far one action goes: world units a translation key, degrees a rotation key. Two keys give both in
    full.

    Raises ConfigError unless both are positive: with a zero or negative speed labels and poses would
    disagree.
    """

    translation: float
    rotation_deg: float

    def __post_init__(self) -> None:
        for name in ("translation", "rotation_deg"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"step size {name} = {value}: set a positive number")


WORLDPLAY_STEP = StepSize(translation=0.08, rotation_deg=3.0)
WORLDCOMPASS_STEP = StepSize(translation=0.1, rotation_deg=2.0)


def step_transform(label: int, step: StepSize) -> PoseArray:
    """The (4, 4) motion of one action in the camera's frame: multiply it on the right of the pose, c2w @
    motion.

    Two translation keys give a step of sqrt(2) * translation, as in the training data of the published bases.
    """
    held = HELD_81K[check_labels(label)].astype(float)
    forward, right, yaw, pitch = (
        held[0::2] - held[1::2]
    )  # KEYS are pairs of a positive and a negative direction
    angle = math.radians(step.rotation_deg)
    motion = np.eye(4)
    motion[:3, :3] = _rotation_y(angle * yaw) @ _rotation_x(angle * pitch)
    motion[:3, 3] = motion[:3, :3] @ (step.translation * np.array([right, 0.0, forward]))
    return motion


def _rotation_y(angle: float) -> PoseArray:
    """Turns the camera right for a positive angle: +z goes to +x."""
    c, s = math.cos(angle), math.sin(angle)
    return np.array([[c, 0.0, s], [0.0, 1.0, 0.0], [-s, 0.0, c]])


def _rotation_x(angle: float) -> PoseArray:
    """Turns the camera up for a positive angle: +z goes to -y, which is up in OpenCV axes."""
    c, s = math.cos(angle), math.sin(angle)
    return np.array([[1.0, 0.0, 0.0], [0.0, c, -s], [0.0, s, c]])


def poses_from_labels(labels_A: Sequence[int] | LabelArray, step: StepSize | Sequence[StepSize]) -> PoseArray:
    """c2w_T44 with T = A + 1: the identity, then the camera after each action.

    `labels_A` are the actions only (parse_word gives them), without the 0 of latent 0. `step` may be one size
    for each action. Raises WordError if their numbers differ or a label is outside 0..80.
    """
    labels = check_labels(labels_A)
    if labels.ndim != 1:
        raise WordError(f"actions must be one list of labels, got shape {labels.shape}")
    steps = [step] * len(labels) if isinstance(step, StepSize) else list(step)
    if len(steps) != len(labels):
        raise WordError(
            f"{len(steps)} step sizes for {len(labels)} actions: give one for each, or a single one"
        )
    motions: dict[tuple[int, StepSize], PoseArray] = {}
    c2w_T44 = np.empty((len(labels) + 1, 4, 4))
    c2w_T44[0] = np.eye(4)
    for i, key in enumerate(zip(labels.tolist(), steps, strict=True)):
        if key not in motions:
            motions[key] = step_transform(*key)
        c2w_T44[i + 1] = c2w_T44[i] @ motions[key]
    return c2w_T44


def invert(transform: npt.ArrayLike) -> PoseArray:
    """Inverse of rigid transforms (..., 4, 4), by transposing the rotation: exact where a general inverse is
    not."""
    matrix = _matrices(transform)
    rotation_t = np.swapaxes(matrix[..., :3, :3], -1, -2)
    inverse = np.zeros_like(matrix)
    inverse[..., :3, :3] = rotation_t
    inverse[..., :3, 3] = -np.einsum("...ij,...j->...i", rotation_t, matrix[..., :3, 3])
    inverse[..., 3, 3] = 1.0
    return inverse


def relative_poses(c2w_T44: npt.ArrayLike) -> PoseArray:
    """Motion between neighbours, (T-1, 4, 4): c2w[i-1]^-1 @ c2w[i]. Leading batch axes are kept."""
    c2w = _matrices(c2w_T44)
    if c2w.ndim < 3 or c2w.shape[-3] == 0:
        raise WordError(f"a list of poses (T, 4, 4) with T >= 1 is needed, got shape {c2w.shape}")
    return invert(c2w[..., :-1, :, :]) @ c2w[..., 1:, :, :]


def anchor(c2w_T44: npt.ArrayLike) -> PoseArray:
    """The same path relative to its first pose, which becomes exactly the identity. Leading batch axes are
    kept."""
    c2w = _matrices(c2w_T44)
    anchored = invert(c2w[..., :1, :, :]) @ c2w
    anchored[..., 0, :, :] = np.eye(4)
    return anchored


def labels_from_relative(rel_N44: npt.ArrayLike, tau_t: float, tau_r_deg: float) -> LabelArray:
    """Labels (N,) of relative c2w motions (N, 4, 4), any leading axes; the rule of spec/worldcompass.md 1.5
    and 3.3.

    Moving if |t| > tau_t (units of the poses): forward within 60 degrees of +z, right within 60 degrees of
    +x, and so on, so a diagonal sets two keys and a pure direction reaches 30 degrees to each side. Turning
    if the yaw or pitch of the Euler angles "xyz" exceeds tau_r_deg. Roll and vertical motion have no label,
    but tilt the direction. The direction is measured in the camera *before* the turn, so a diagonal with yaw
    and pitch keeps both keys only for steps under 13 degrees. Raises DataError on a value that is not finite:
    an unknown motion is never "no action".
    """
    rel = _matrices(rel_N44)
    if not np.isfinite(rel).all():
        raise DataError("a relative pose is not finite: drop that item as missing instead of labelling it")
    x, z = rel[..., 0, 3], rel[..., 2, 3]
    length = np.linalg.norm(rel[..., :3, 3], axis=-1)
    moving, within = length > tau_t, 0.5 * length  # cos 60 degrees
    translation = np.stack([z > within, z < -within, x > within, x < -within], axis=-1) & moving[..., None]
    # R = Rz(roll) Ry(yaw) Rx(pitch), the Euler angles that scipy calls "xyz".
    pitch = np.degrees(np.arctan2(rel[..., 2, 1], rel[..., 2, 2]))
    yaw = np.degrees(np.arctan2(-rel[..., 2, 0], np.hypot(rel[..., 0, 0], rel[..., 1, 0])))
    rotation = np.stack([yaw > tau_r_deg, yaw < -tau_r_deg, pitch > tau_r_deg, pitch < -tau_r_deg], axis=-1)
    return CODES * codes_of_bits(translation) + codes_of_bits(rotation)


def labels_from_poses(
    c2w_T44: npt.ArrayLike,
    translation_threshold: float = TRANSLATION_THRESHOLD,
    rotation_threshold_deg: float = ROTATION_THRESHOLD_DEG,
) -> LabelArray:
    """Labels (T,) int64 of a path, labels[0] = 0: what the world model is conditioned on, derived from the
    poses."""
    relative = labels_from_relative(relative_poses(c2w_T44), translation_threshold, rotation_threshold_deg)
    return np.concatenate([np.zeros((*relative.shape[:-1], 1), dtype=np.int64), relative], axis=-1)


def _matrices(value: Any) -> PoseArray:
    matrix = np.asarray(value, dtype=np.float64)
    if matrix.shape[-2:] != (4, 4):
        raise WordError(f"poses must be 4x4 matrices, got shape {matrix.shape}")
    return matrix
