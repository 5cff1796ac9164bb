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

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.actions import CODES, HELD_81K, LabelArray, check_labels, codes_of_bits
from pipeline.errors import ConfigError, DataError, StorageError, WordError

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


# --- The lattice: frame 0 comes from latent 0; action i (from 1) makes latent i and its `stride` frames. ---


def frames_of_latents(latents: int, stride: int) -> int:
    """How many video frames that many latents decode to: 1 + stride * (latents - 1). DataError below 1."""
    if latents < 1 or stride < 1:
        raise DataError(f"{latents} latents with stride {stride}: both must be at least 1")
    return 1 + stride * (latents - 1)


def latents_of_frames(frames: int, stride: int) -> int:
    """How many latents a video of that many frames has; DataError if no whole number of latents gives
    them."""
    if frames < 1 or stride < 1:
        raise DataError(f"{frames} frames with stride {stride}: both must be at least 1")
    steps, rest = divmod(frames - 1, stride)
    if rest:
        below, above = frames_of_latents(steps + 1, stride), frames_of_latents(steps + 2, stride)
        raise DataError(
            f"{frames} frames do not fit stride {stride} (1 + {stride} * (latents - 1)): "
            f"use {below} ({steps + 1} latents) or {above} ({steps + 2} latents)"
        )
    return steps + 1


def action_of_frame(frame: int, stride: int) -> int | None:
    """Index of the action (= of the latent it makes) that a frame shows: 1 + (frame - 1) // stride; None for
    0."""
    if frame < 0 or stride < 1:
        raise DataError(f"frame {frame} with stride {stride}: frames count from 0 and the stride from 1")
    return None if frame == 0 else 1 + (frame - 1) // stride


def frame_labels(labels_T: Sequence[int] | LabelArray, stride: int) -> LabelArray:
    """labels_F of a whole video: 0 for frame 0, then the label of the action that made each frame.

    The one label-frame alignment that reward and evaluation share (DESIGN.md 6.4). `labels_T` starts with the
    0 of latent 0; WordError if it does not, which is a list of actions or a clip out of the middle passed by
    mistake.
    """
    labels = check_labels(labels_T)
    if labels.ndim != 1 or len(labels) == 0 or labels[0] != 0:
        raise WordError("frame labels need the labels of all latents from latent 0 on, whose label is 0")
    return np.concatenate([labels[:1], np.repeat(labels[1:], stride)])


def clip_latents(clip_index0: int, clip: int = 4) -> slice:
    """The latents of a clip counted from 0; the first clip holds the conditioning latent and clip - 1
    actions."""
    if clip_index0 < 0 or clip < 1:
        raise DataError(
            f"clip {clip_index0} of {clip} latents: clips count from 0 and have at least 1 latent"
        )
    return slice(clip * clip_index0, clip * (clip_index0 + 1))


def clip_frames(clip_index0: int, stride: int, clip: int = 4) -> slice:
    """The video frames that the latents of a clip decode to (13 for the first clip of 4 at stride 4, then
    16)."""
    latents = clip_latents(clip_index0, clip)
    first = frames_of_latents(latents.start, stride) if latents.start else 0
    return slice(first, frames_of_latents(latents.stop, stride))


# --- Intrinsics ---


@dataclass(frozen=True)
class Intrinsics:
    """A pinhole camera in pixels. ConfigError unless all four are positive."""

    fx: float
    fy: float
    cx: float
    cy: float

    def __post_init__(self) -> None:
        for name in ("fx", "fy", "cx", "cy"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"intrinsics {name} = {value}: set a positive number of pixels")

    @classmethod
    def from_fov(cls, horizontal_deg: float, width: int, height: int) -> "Intrinsics":
        """Square pixels, centred, with this horizontal field of view; width and height in pixels."""
        if not 0 < horizontal_deg < 180:
            raise ConfigError(f"field of view {horizontal_deg} degrees: set a number between 0 and 180")
        focal = width / 2 / math.tan(math.radians(horizontal_deg) / 2)
        return cls(focal, focal, width / 2, height / 2)

    def matrix(self) -> PoseArray:
        """K (3, 3) in pixels."""
        return np.array([[self.fx, 0.0, self.cx], [0.0, self.fy, self.cy], [0.0, 0.0, 1.0]])

    def normalised(self) -> PoseArray:
        """K_33 as the world models take it; see normalised_intrinsics."""
        return normalised_intrinsics(self.matrix())


# What the published bases were trained and run with, for 1920x1080 (spec/worldplay.md 3).
WORLDPLAY_INTRINSICS = Intrinsics(969.697, 969.697, 960.0, 540.0)


def normalised_intrinsics(K_33: npt.ArrayLike) -> PoseArray:
    """K (..., 3, 3) in pixels -> fx/(2cx), fy/(2cy), centre 0.5, 0.5: independent of the image's size.

    Raises WordError unless focal lengths and principal points are positive.
    """
    pixels = np.asarray(K_33, dtype=np.float64)
    if pixels.shape[-2:] != (3, 3):
        raise WordError(f"intrinsics must be 3x3 matrices, got shape {pixels.shape}")
    focal = np.stack([pixels[..., 0, 0], pixels[..., 1, 1]], axis=-1)
    centre = pixels[..., :2, 2]
    if not (np.isfinite(pixels).all() and (focal > 0).all() and (centre > 0).all()):
        raise WordError("intrinsics need positive fx, fy, cx and cy (pixels) in a 3x3 matrix")
    normalised = np.zeros_like(pixels)
    normalised[..., 0, 0], normalised[..., 1, 1] = (
        focal[..., 0] / (2 * centre[..., 0]),
        focal[..., 1] / (2 * centre[..., 1]),
    )
    normalised[..., :2, 2] = 0.5
    normalised[..., 2, 2] = 1.0
    return normalised


# --- Pose files: {"0": {"extrinsic": 4x4 camera-to-world, "K": 3x3 pixels}, "1": ...}, one entry a latent ---


class CameraPath(NamedTuple):
    """A path from a pose file: c2w_T44 relative to frame 0 and the normalised K_T33 of each latent."""

    c2w_T44: PoseArray
    K_T33: PoseArray


def pose_json_load(path: str | Path, latents: int | None = None) -> CameraPath:
    """Read a pose file of WorldPlay's form, its first `latents` poses (None: all), re-anchored to the first
    one.

    The published name "extrinsic" means camera-to-world here. Raises DataError if the file cannot be read,
    WordError if it is not of that form, is shorter than `latents`, or holds a matrix that is no rigid motion.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot read the pose file ({error.strerror}); check the path") from error
    except ValueError as error:
        raise WordError(f"{path}: not a JSON file ({error})") from error
    if not isinstance(content, dict) or not content:
        raise WordError(f'{path}: expected {{"0": {{"extrinsic": 4x4, "K": 3x3}}, ...}}, one entry a latent')
    have = len(content)
    missing = next((i for i in range(have) if str(i) not in content), None)
    if missing is not None:
        raise WordError(f'{path}: entry "{missing}" is missing; number the {have} poses "0" to "{have - 1}"')
    need = have if latents is None else latents
    if need > have:
        raise WordError(
            f"{path}: {have} poses, but {need} latents need {need}; add poses or ask for fewer latents"
        )
    c2w_T44 = np.stack([_json_matrix(path, content, i, "extrinsic", 4) for i in range(need)])
    K_T33 = np.stack([_json_matrix(path, content, i, "K", 3) for i in range(need)])
    _check_rigid(path, c2w_T44)
    try:
        return CameraPath(anchor(c2w_T44), normalised_intrinsics(K_T33))
    except WordError as error:
        raise WordError(f"{path}: {error}") from error


def pose_json_save(path: str | Path, c2w_T44: npt.ArrayLike, intrinsics: Intrinsics) -> None:
    """Write a path as pose_json_load and WorldPlay's own scripts read it; StorageError if it cannot be
    written."""
    poses, pixels = _matrices(c2w_T44), intrinsics.matrix().tolist()
    content = {str(i): {"extrinsic": pose.tolist(), "K": pixels} for i, pose in enumerate(poses)}
    try:
        Path(path).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path}: cannot write the pose file ({error.strerror})") from error


def _json_matrix(path: Path, content: dict[str, Any], i: int, name: str, size: int) -> PoseArray:
    entry = content[str(i)]
    if not isinstance(entry, dict) or name not in entry:
        hint = (
            " (but w2c: a file of the supervised trainer)"
            if isinstance(entry, dict) and "w2c" in entry
            else ""
        )
        raise WordError(f'{path}: entry "{i}" has no "{name}"{hint}; write a {size}x{size} matrix there')
    try:
        matrix = np.asarray(entry[name], dtype=np.float64)
    except (TypeError, ValueError):
        matrix = np.empty(0)
    if matrix.shape != (size, size) or not np.isfinite(matrix).all():
        raise WordError(f'{path}: "{name}" of entry "{i}" is not a {size}x{size} matrix of finite numbers')
    return matrix


def _check_rigid(path: Path, c2w_T44: PoseArray) -> None:
    rotation = c2w_T44[:, :3, :3]
    skewed = np.abs(np.swapaxes(rotation, 1, 2) @ rotation - np.eye(3)).max(axis=(1, 2)) > 1e-3
    wrong = skewed | (np.linalg.det(rotation) < 0) | (np.abs(c2w_T44[:, 3] - [0, 0, 0, 1]).max(axis=1) > 1e-6)
    if wrong.any():
        raise WordError(
            f'{path}: "extrinsic" of entry "{int(wrong.argmax())}" is not a rigid motion: write a rotation '
            "without scale or mirroring, and 0 0 0 1 as the last row"
        )
