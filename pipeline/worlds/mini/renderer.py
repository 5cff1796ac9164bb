"""The mini world's truth: a procedural room, ray-cast exactly, for any camera pose.

Why a renderer and not a folder of videos: the true state is known, so the oracle can ask where the camera *really* is
in a generated frame (spec worldcycle 6.2), and scenes for pretraining, RL and evaluation are disjoint by their seed.
Floor and ceiling have fixed heights, so depth can be read from one frame; textures are smooth value noise without any
repetition, so every view is unique (spec worldcycle 6.1). No anti-aliasing: a frame must cost well under a millisecond.

Axes are OpenCV's (x right, y down, z forward); lengths in world units; a scene's own frame has the floor at
y = +1.0, the ceiling at y = -1.5 and the room centred at x = z = 0.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

HEIGHT, WIDTH = 40, 64
"""Frame size in pixels. Wide as real videos are; 40 x 64 makes 40 tokens of 8 x 8 pixels."""
FOCAL = 32.0
"""Focal length in pixels of both axes: 90 degrees horizontally, 64 vertically."""
FLOOR, CEILING = 1.0, -1.5
BOXES = 5
SURFACES = 6 + BOXES
LATTICE = 16
WALL_CELL, BOX_CELL = 0.75, 0.4
"""Size of one noise cell in world units, on the room's faces and on the boxes."""
FOG = 0.06
SPLITS = {
    "pretrain": (0, 1_000_000),
    "rl": (1_000_000, 2_000_000),
    "evaluation": (2_000_000, 3_000_000),
    "scorer": (3_000_000, 4_000_000),
}
"""Half-open ranges of scene seeds: what is trained on, rewarded on and judged on never meet."""

_COLOURS = {
    "red": (0.75, 0.25, 0.22), "orange": (0.85, 0.52, 0.20), "yellow": (0.80, 0.72, 0.28), "green": (0.30, 0.62, 0.30),
    "teal": (0.22, 0.58, 0.58), "blue": (0.25, 0.38, 0.75), "violet": (0.52, 0.32, 0.70), "pink": (0.80, 0.45, 0.60),
    "grey": (0.55, 0.55, 0.55), "white": (0.82, 0.82, 0.80),
}  # fmt: skip
COLOUR_NAMES = tuple(_COLOURS)


@dataclass(frozen=True)
class MiniScene:
    """One room. `lo_K3`, `hi_K3`: corners of the K boxes; `texture_SNN3`: noise lattices of the S surfaces in [0, 1].

    Surfaces 0..5 are the room's faces (-x, +x, -y ceiling, +y floor, -z, +z), 6.. the boxes.
    """

    seed: int
    half_x: float
    half_z: float
    lo_K3: np.ndarray
    hi_K3: np.ndarray
    texture_SNN3: np.ndarray
    caption: str

    @staticmethod
    def make(seed: int) -> "MiniScene":
        """Build the room of a seed; the same seed gives the same room on every machine."""
        rng = np.random.default_rng([seed, 0x5CE7E])
        half_x, half_z = rng.uniform(3.2, 5.0, 2)
        lo, hi = np.zeros((BOXES, 3)), np.zeros((BOXES, 3))
        for box in range(BOXES):
            size = rng.uniform(0.3, 0.75, 2)
            centre = rng.uniform(-1, 1, 2) * (np.array([half_x, half_z]) - size)
            top = FLOOR - rng.uniform(0.6, 2.0)
            lo[box], hi[box] = (
                (centre[0] - size[0], top, centre[1] - size[1]),
                (centre[0] + size[0], FLOOR, centre[1] + size[1]),
            )
        names = rng.choice(len(COLOUR_NAMES), SURFACES)
        names[1] = names[0]  # a caption names one colour of the walls ...
        names[5] = names[4]  # ... but opposite walls only, so that four directions still differ
        base = np.array([_COLOURS[COLOUR_NAMES[i]] for i in names])
        light = rng.uniform(-1, 1, (SURFACES, LATTICE, LATTICE, 1)) * 0.30
        tint = rng.uniform(-1, 1, (SURFACES, LATTICE, LATTICE, 3)) * 0.12
        shade = np.array([0.85, 0.95, 1.0, 0.8, 0.9, 1.0] + [1.0] * BOXES)[:, None, None, None]
        texture = np.clip((base[:, None, None, :] + light + tint) * shade, 0.02, 0.98).astype(np.float32)
        caption = (
            f"A room with {COLOUR_NAMES[names[0]]} and {COLOUR_NAMES[names[4]]} walls, "
            f"a {COLOUR_NAMES[names[3]]} floor and a {COLOUR_NAMES[names[2]]} ceiling."
        )
        return MiniScene(
            seed, float(half_x), float(half_z), lo.astype(np.float32), hi.astype(np.float32), texture, caption
        )

    def clear(self, position_N3: np.ndarray, margin: float = 0.55) -> np.ndarray:
        """Return bool_N: is the position inside the room and at least `margin` away from walls and boxes?"""
        x, y, z = position_N3[..., 0], position_N3[..., 1], position_N3[..., 2]
        inside = (
            (np.abs(x) < self.half_x - margin)
            & (np.abs(z) < self.half_z - margin)
            & (y > CEILING + 0.4)
            & (y < FLOOR - 0.3)
        )
        near = position_N3[..., None, :]
        outside_box = (near < self.lo_K3 - margin) | (near > self.hi_K3 + margin)
        return inside & outside_box[..., 0::2].any(-1).all(-1)


@dataclass(frozen=True)
class SceneBatch:
    """Scenes stacked for one call of `render_batch`; leading axis S scenes."""

    half_S3: torch.Tensor
    lo_SK3: torch.Tensor
    hi_SK3: torch.Tensor
    texture: torch.Tensor  # flat [S * SURFACES * LATTICE * LATTICE, 3]

    @staticmethod
    def stack(scenes: list[MiniScene]) -> "SceneBatch":
        """Stack scenes; a single one may then be rendered from many poses."""
        half = torch.tensor([[s.half_x, 0.0, s.half_z] for s in scenes], dtype=torch.float32)
        lo, hi = (torch.from_numpy(np.stack([getattr(s, k) for s in scenes])) for k in ("lo_K3", "hi_K3"))
        return SceneBatch(
            half, lo, hi, torch.from_numpy(np.stack([s.texture_SNN3 for s in scenes])).reshape(-1, 3)
        )


@lru_cache(maxsize=4)
def _rays(height: int, width: int) -> torch.Tensor:
    """Return the viewing directions of all pixel centres in camera axes, [height * width, 3], z = 1."""
    scale = WIDTH / width
    x = (torch.arange(width) + 0.5 - width / 2) * scale / FOCAL
    y = (torch.arange(height) + 0.5 - height / 2) * scale / FOCAL
    grid = torch.stack((*torch.meshgrid(x, y, indexing="xy"), torch.ones(height, width)), -1)
    return grid.reshape(-1, 3)


@torch.no_grad()
def render_batch(
    batch: SceneBatch, c2w_SF44: torch.Tensor, height: int = HEIGHT, width: int = WIDTH
) -> torch.Tensor:
    """Render F frames of each of S scenes: float32 [S, F, height, width, 3] in [0, 1].

    `c2w_SF44` are camera-to-world matrices in the scenes' own frames, float32. Smaller sizes keep the field of view.
    """
    S, F = c2w_SF44.shape[:2]
    rays = _rays(height, width)
    R = F * rays.shape[0]
    direction = torch.einsum("sfij,rj->sfri", c2w_SF44[..., :3, :3], rays).reshape(S, R, 3)
    origin = c2w_SF44[..., None, :3, 3].expand(S, F, rays.shape[0], 3).reshape(S, R, 3)
    # A component near 0 keeps its sign: the inverse must point to the same wall as `towards_hi` below.
    direction = torch.where(direction.abs() < 1e-6, torch.copysign(torch.tensor(1e-6), direction), direction)
    inverse = 1.0 / direction

    # The room: the nearest of the three faces that the ray runs towards.
    bound_lo, bound_hi = -batch.half_S3.clone(), batch.half_S3.clone()
    bound_lo[:, 1], bound_hi[:, 1] = CEILING, FLOOR
    towards_hi = direction > 0
    wall = torch.where(towards_hi, bound_hi[:, None], bound_lo[:, None])
    distance, axis = ((wall - origin) * inverse).min(-1)
    surface = 2 * axis + towards_hi.gather(-1, axis[..., None])[..., 0]

    # The boxes: slab test, all at once.
    near = (batch.lo_SK3[:, None] - origin[:, :, None]) * inverse[:, :, None]
    far = (batch.hi_SK3[:, None] - origin[:, :, None]) * inverse[:, :, None]
    enter, enter_axis = torch.minimum(near, far).max(-1)
    leave = torch.maximum(near, far).amin(-1)
    enter = torch.where((enter < leave) & (enter > 1e-3), enter, torch.inf)
    box_distance, box = enter.min(-1)
    hit = box_distance < distance
    distance = torch.where(hit, box_distance, distance)
    axis = torch.where(hit, enter_axis.gather(-1, box[..., None])[..., 0], axis)
    surface = torch.where(hit, 6 + box, surface)

    # A camera that a fit has put outside the room must still give finite colours.
    distance = distance.clamp(0, 100)

    # Texture coordinates: the two world axes that are not the face's normal.
    point = origin + distance[..., None] * direction
    u = torch.where(axis == 0, point[..., 2], point[..., 0])
    v = torch.where(axis == 1, point[..., 2], point[..., 1])
    u, v = (torch.where(hit, c / BOX_CELL + 0.37 * axis, c / WALL_CELL) + LATTICE / 2 for c in (u, v))
    u, v = u.clamp(0, LATTICE - 1.001), v.clamp(0, LATTICE - 1.001)
    u0, v0 = u.floor(), v.floor()
    fu, fv = u - u0, v - v0
    fu, fv = fu * fu * (3 - 2 * fu), fv * fv * (3 - 2 * fv)
    scene_index = torch.arange(S)[:, None]
    index = ((scene_index * SURFACES + surface) * LATTICE + v0.long()) * LATTICE + u0.long()
    corners = [batch.texture[index + offset] for offset in (0, 1, LATTICE, LATTICE + 1)]
    top = torch.lerp(corners[0], corners[1], fu[..., None])
    bottom = torch.lerp(corners[2], corners[3], fu[..., None])
    colour = torch.lerp(top, bottom, fv[..., None])
    # Sides of boxes differ in brightness, and everything darkens with distance (a headlight): both are depth cues.
    side = torch.where(hit, 1.0 - 0.18 * axis.float(), torch.ones(()))
    colour = colour * (side * torch.exp(-FOG * distance))[..., None]
    return colour.reshape(S, F, height, width, 3)


def to_uint8(frames: torch.Tensor) -> np.ndarray:
    """Round frames in [0, 1] to uint8."""
    return (frames.clamp(0, 1) * 255 + 0.5).to(torch.uint8).numpy()


def render(scene: MiniScene, c2w_F44: np.ndarray) -> np.ndarray:
    """Render one scene: uint8 [F, 40, 64, 3] for camera-to-world matrices in the scene's own frame."""
    poses = torch.as_tensor(np.asarray(c2w_F44), dtype=torch.float32)[None]
    return to_uint8(render_batch(SceneBatch.stack([scene]), poses)[0])


def start_poses(scene: MiniScene, rng: np.random.Generator, count: int) -> np.ndarray:
    """Draw `count` level camera poses [count, 4, 4] anywhere in the room, height 0, any heading."""
    yaw = rng.uniform(-np.pi, np.pi, count)
    pose = np.tile(np.eye(4), (count, 1, 1))
    pose[:, 0, 0] = pose[:, 2, 2] = np.cos(yaw)
    pose[:, 0, 2], pose[:, 2, 0] = np.sin(yaw), -np.sin(yaw)
    pose[:, 0, 3] = rng.uniform(-1, 1, count) * scene.half_x
    pose[:, 2, 3] = rng.uniform(-1, 1, count) * scene.half_z
    return pose


def place_path(
    scene: MiniScene, rng: np.random.Generator, relative_T44: np.ndarray, tries: int = 48
) -> np.ndarray | None:
    """Find a start pose from which the whole path stays clear of walls and boxes; None if `tries` draws found none.

    `relative_T44` are poses relative to the first; the result is the [4, 4] start pose in the scene's frame.
    """
    starts = start_poses(scene, rng, tries)
    position = (starts[:, None] @ relative_T44[None])[..., :3, 3]
    good = np.flatnonzero(scene.clear(position).all(-1))
    return starts[good[0]] if len(good) else None
