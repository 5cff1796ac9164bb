"""The renderer against an independent ray caster, and its rooms: the oracle's verdicts rest on both."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from pipeline import camera
from pipeline.actions import label_of
from pipeline.worlds.mini import renderer
from pipeline.worlds.mini.renderer import (
    BOXES,
    CEILING,
    FLOOR,
    FOCAL,
    FOG,
    HEIGHT,
    SPLITS,
    SURFACES,
    WIDTH,
    MiniScene,
    SceneBatch,
    place_path,
    render,
    render_batch,
    start_poses,
)

STEP = camera.StepSize(0.4, 6.0)
# the room of seed 0: half its size in x and z, its caption, the mean of its first view
GOLDEN_SIZE = (3.3036, 3.5384)
GOLDEN_CAPTION = "A room with red and yellow walls, a grey floor and a grey ceiling."
GOLDEN_MEAN = 118.364


def pose(position=(0.0, 0.0, 0.0), yaw=0.0, pitch=0.0):
    """Camera-to-world matrix; degrees, yaw right and pitch up are positive (as in camera.py)."""
    y, p = np.radians([yaw, pitch])
    turn = np.array([[np.cos(y), 0, np.sin(y)], [0, 1, 0], [-np.sin(y), 0, np.cos(y)]])
    tilt = np.array([[1, 0, 0], [0, np.cos(p), -np.sin(p)], [0, np.sin(p), np.cos(p)]])
    out = np.eye(4)
    out[:3, :3], out[:3, 3] = turn @ tilt, position
    return out


def painted(scene, colours):
    """The scene with uniform surfaces: colours[surface] in [0, 1]."""
    texture = np.broadcast_to(np.asarray(colours, np.float32)[:, None, None, None], scene.texture_SNN3.shape)
    return replace(scene, texture_SNN3=np.ascontiguousarray(texture))


def without_boxes(scene):
    away = np.full_like(scene.lo_K3, 50.0)
    return replace(scene, lo_K3=away, hi_K3=away + 1)


def cast(scene, c2w, height=HEIGHT, width=WIDTH):
    """Reference, float64: nearest of all planes whose hit lies on their face -> (depth, surface, axis), [H, W]."""
    focal = FOCAL * width / WIDTH
    x, y = np.meshgrid(
        (np.arange(width) + 0.5 - width / 2) / focal, (np.arange(height) + 0.5 - height / 2) / focal
    )
    direction = np.stack([x, y, np.ones_like(x)], -1) @ c2w[:3, :3].T
    origin = c2w[:3, 3]
    room = np.array([[-scene.half_x, CEILING, -scene.half_z], [scene.half_x, FLOOR, scene.half_z]])
    bodies = [(room, 0)] + [
        (np.stack(pair).astype(float), 6 + k)
        for k, pair in enumerate(zip(scene.lo_K3, scene.hi_K3, strict=True))
    ]
    depth, surface, normal = np.full(x.shape, np.inf), np.full(x.shape, -1), np.full(x.shape, -1)
    for corners, first in bodies:
        for axis in range(3):
            for side in range(2):
                with np.errstate(divide="ignore", invalid="ignore"):
                    t = (corners[side, axis] - origin[axis]) / direction[..., axis]
                    hit = origin + t[..., None] * direction
                others = [a for a in range(3) if a != axis]
                on = (
                    (hit[..., others] >= corners[0, others] - 1e-9)
                    & (hit[..., others] <= corners[1, others] + 1e-9)
                ).all(-1)
                nearer = on & (t > 1e-3) & (t < depth)
                depth = np.where(nearer, t, depth)
                surface = np.where(nearer, 2 * axis + side if first == 0 else first, surface)
                normal = np.where(nearer, axis, normal)
    return depth, surface, normal


def render_float(scene, c2w, height=HEIGHT, width=WIDTH):
    poses = torch.from_numpy(np.asarray(c2w)).float()[None, None]
    return render_batch(SceneBatch.stack([scene]), poses, height, width)[0, 0].numpy()


def clear_poses(scene, seed, count):
    """Poses clear of everything, at any heading, height and pitch."""
    rng = np.random.default_rng(seed)
    out = []
    while len(out) < count:
        position = np.array([rng.uniform(-5, 5), rng.uniform(-0.8, 0.5), rng.uniform(-5, 5)])
        if scene.clear(position[None])[0]:
            out.append(pose(position, rng.uniform(-180, 180), rng.uniform(-25, 25)))
    return out


def test_a_seed_is_a_room_and_stays_it() -> None:
    a, b, c = MiniScene.make(7), MiniScene.make(7), MiniScene.make(8)
    assert (a.caption, a.half_x, a.half_z) == (b.caption, b.half_x, b.half_z)
    np.testing.assert_array_equal(a.texture_SNN3, b.texture_SNN3)
    np.testing.assert_array_equal(a.lo_K3, b.lo_K3)
    assert a.half_x != c.half_x
    # the shipped weights were trained on these very rooms: a numpy that draws others must be noticed
    first = MiniScene.make(0)
    assert (round(first.half_x, 4), round(first.half_z, 4)) == GOLDEN_SIZE
    assert first.caption == GOLDEN_CAPTION
    assert render(first, np.eye(4)[None]).mean() == pytest.approx(GOLDEN_MEAN, abs=0.5)


def test_splits_are_disjoint_ranges() -> None:
    ranges = sorted(SPLITS.values())
    assert set(SPLITS) == {"pretrain", "rl", "evaluation", "scorer"}
    assert all(low < high for low, high in ranges)
    assert all(before[1] <= after[0] for before, after in pairwise(ranges))


def test_boxes_stand_on_the_floor_inside_the_room() -> None:
    for seed in range(20):
        scene = MiniScene.make(seed)
        assert scene.lo_K3.shape == scene.hi_K3.shape == (BOXES, 3)
        assert (scene.lo_K3 < scene.hi_K3).all()
        assert np.allclose(scene.hi_K3[:, 1], FLOOR)
        assert (
            np.abs(np.stack([scene.lo_K3, scene.hi_K3]))[..., [0, 2]] <= [scene.half_x, scene.half_z]
        ).all()
        assert scene.texture_SNN3.min() > 0
        assert scene.texture_SNN3.max() < 1


@pytest.mark.parametrize("size", [(HEIGHT, WIDTH), (20, 32)])
def test_every_pixel_sees_what_an_independent_ray_caster_sees(size: tuple[int, int]) -> None:
    colours = np.linspace(0.2, 0.9, SURFACES)
    for seed in range(4):
        scene = painted(MiniScene.make(seed), colours)
        for c2w in clear_poses(scene, seed, 3):
            depth, surface, axis = cast(scene, c2w, *size)
            assert (surface >= 0).all()
            side = np.where(surface >= 6, 1 - 0.18 * axis, 1.0)
            expected = colours[surface] * side * np.exp(-FOG * depth)
            wrong = np.abs(render_float(scene, c2w, *size) - expected[..., None]).max(-1) > 2e-3
            assert (
                wrong.mean() <= 2e-3
            )  # an edge may fall on the pixel's centre, in float32 on the other side


def test_a_wall_moves_in_the_image_as_the_pinhole_says() -> None:
    """A step right by `depth / focal` world units moves a wall that is faced straight on by one pixel to the left."""
    scene = without_boxes(MiniScene.make(3))
    depth = 2.0
    here = np.array([0.0, 0.0, scene.half_z - depth])
    pixels = 3
    before = render_float(scene, pose(here))
    after = render_float(scene, pose(here + np.array([pixels * depth / FOCAL, 0, 0])))
    right, up = before[10:30, pixels:], after[10:30, :-pixels]
    facing = slice(
        4, -4
    )  # 90 degrees see half a width of 2 units of the wall, less than the room's half width
    np.testing.assert_allclose(up[:, facing], right[:, facing], atol=2e-3)
    assert (
        np.abs(before[10:30, 4:-4] - after[10:30, 4:-4]).mean() > 2e-3
    )  # and it is a motion that can be seen


@pytest.mark.parametrize(("key", "direction"), [("right", -1), ("left", 1)])
def test_a_yaw_moves_a_corner_as_the_pinhole_says(key: str, direction: int) -> None:
    """The corner between two walls at 30 degrees left or right: its column before and after one action."""
    scene = without_boxes(MiniScene.make(5))
    scene = painted(scene, [0.9, 0.9, 0.1, 0.1, 0.2, 0.2] + [0.1] * BOXES)
    corner = np.array([scene.half_x, scene.half_z])
    for bearing in (-20.0, 0.0, 25.0):
        heading = np.degrees(np.arctan2(*corner)) - bearing
        for actions in (0, 1):
            c2w = pose(yaw=heading)
            for _ in range(actions):
                c2w = c2w @ camera.step_transform(label_of(key), STEP)
            row = render_float(scene, c2w)[HEIGHT // 2, :, 0]
            column = np.abs(np.diff(row)).argmax() + 1  # the edge in pixels from the left border
            expected = WIDTH / 2 + FOCAL * np.tan(
                np.radians(bearing + direction * actions * STEP.rotation_deg)
            )
            assert abs(column - expected) <= 0.51


def test_pitching_up_moves_the_horizon_down() -> None:
    scene = painted(without_boxes(MiniScene.make(5)), [0.9, 0.9, 0.1, 0.1, 0.9, 0.9] + [0.1] * BOXES)
    for pitch in (-10.0, 0.0, 8.0):
        column = render_float(scene, pose(pitch=pitch))[:, WIDTH // 2, 0]
        upper, lower = np.flatnonzero(np.abs(np.diff(column)) > 0.1)[[0, -1]] + 1
        for found, height in ((upper, CEILING), (lower, FLOOR)):
            angle = np.degrees(np.arctan2(height, scene.half_z)) + pitch
            assert abs(found - (HEIGHT / 2 + FOCAL * np.tan(np.radians(angle)))) <= 0.51


@pytest.mark.parametrize(
    "size", [(HEIGHT, WIDTH), (39, 63)]
)  # an odd size has rays along the axes, components 0
def test_rays_along_the_axes_have_finite_right_colours(size: tuple[int, int]) -> None:
    scene = painted(without_boxes(MiniScene.make(11)), [0.3, 0.4, 0.5, 0.6, 0.7, 0.8] + [0.1] * BOXES)
    middle = (size[0] // 2, size[1] // 2)
    # heading -> (surface that the middle pixel sees, its distance); exact rotations, with zeros and negative zeros
    seen = {
        ((1, 0, 0), (0, 1, 0), (0, 0, 1)): (5, scene.half_z),
        ((-1, 0, 0), (0, 1, 0), (0, 0, -1)): (4, scene.half_z),
        ((0, 0, 1), (0, 1, 0), (-1, 0, 0)): (1, scene.half_x),
        ((0, 0, -1), (0, 1, 0), (1, 0, 0)): (0, scene.half_x),
        ((1, 0, 0), (0, 0, -1), (0, 1, 0)): (2, -CEILING),
        ((1, 0, 0), (0, 0, 1), (0, -1, 0)): (3, FLOOR),
    }
    for rotation, (surface, distance) in seen.items():
        for sign in (1.0, -1.0):
            c2w = np.eye(4)
            c2w[:3, :3] = np.array(rotation, float)
            c2w[:3, :3] = np.where(c2w[:3, :3] == 0, sign * 0.0, c2w[:3, :3])
            frame = render_float(scene, c2w, *size)
            assert np.isfinite(frame).all()
            assert frame.min() >= 0
            assert frame.max() <= 1
            assert frame[middle].max() == pytest.approx(
                (0.3 + 0.1 * surface) * np.exp(-FOG * distance), abs=2e-3
            )


def test_cameras_outside_the_room_or_inside_a_box_get_finite_colours() -> None:
    rng = np.random.default_rng(0)
    scene = MiniScene.make(2)
    outside = [pose(rng.uniform(-30, 30, 3), rng.uniform(-180, 180), rng.uniform(-90, 90)) for _ in range(40)]
    inside = [
        pose((lo + hi) / 2, yaw)
        for lo, hi in zip(scene.lo_K3, scene.hi_K3, strict=True)
        for yaw in (0, 90, 33)
    ]
    on_wall = [pose((scene.half_x, 0, 0), 90), pose((0, FLOOR, 0), 0, -90)]
    poses = torch.from_numpy(np.stack(outside + inside + on_wall)).float()[None]
    frames = render_batch(SceneBatch.stack([scene]), poses)
    assert torch.isfinite(frames).all()
    assert frames.min() >= 0
    assert frames.max() <= 1


def test_a_batch_renders_what_single_calls_render() -> None:
    scenes = [MiniScene.make(seed) for seed in (1, 2, 3)]
    poses = np.stack([clear_poses(scene, 4, 2) for scene in scenes])
    together = renderer.to_uint8(render_batch(SceneBatch.stack(scenes), torch.from_numpy(poses).float()))
    alone = np.stack(
        [[render(scene, one[None])[0] for one in path] for scene, path in zip(scenes, poses, strict=True)]
    )
    assert together.shape == (3, 2, HEIGHT, WIDTH, 3)
    assert np.abs(together.astype(int) - alone).max() <= 1  # one rounding of float32


def test_clear_means_away_from_walls_and_boxes() -> None:
    scene = MiniScene.make(4)
    assert not scene.clear(
        np.array([[scene.half_x - 0.5, 0, 0], [0, 0, -scene.half_z], [0, 0.95, 0], [0, -1.4, 0]])
    ).any()
    centres = (scene.lo_K3 + scene.hi_K3) / 2
    assert not scene.clear(centres).any()
    beside = centres.copy()
    beside[:, 0] = scene.hi_K3[:, 0] + 0.5  # inside the margin of 0.55
    assert not scene.clear(beside).any()
    empty = without_boxes(scene)
    assert empty.clear(np.array([[0, 0, 0], [scene.half_x - 0.6, 0, scene.half_z - 0.6]])).all()


def test_start_poses_are_level_rigid_and_in_the_room() -> None:
    scene = MiniScene.make(6)
    poses = start_poses(scene, np.random.default_rng(0), 50)
    rotation = poses[:, :3, :3]
    np.testing.assert_allclose(
        rotation @ rotation.transpose(0, 2, 1), np.tile(np.eye(3), (50, 1, 1)), atol=1e-12
    )
    np.testing.assert_allclose(np.linalg.det(rotation), 1)
    np.testing.assert_array_equal(poses[:, 1, 3], 0)
    np.testing.assert_array_equal(rotation[:, 1], np.tile([0, 1, 0], (50, 1)))
    assert (np.abs(poses[:, 0, 3]) <= scene.half_x).all()
    assert len(np.unique(rotation[:, 0, 2].round(3))) > 40


def test_place_path_keeps_the_whole_path_clear_or_says_none() -> None:
    path = camera.poses_from_labels([label_of("w")] * 5, STEP)
    for seed in range(10):
        scene = MiniScene.make(seed)
        start = place_path(scene, np.random.default_rng(seed), path)
        assert start is not None
        assert scene.clear((start @ path)[:, :3, 3]).all()
    too_long = camera.poses_from_labels([label_of("w")] * 40, STEP)  # 16 units; no room is longer than 10
    assert place_path(MiniScene.make(0), np.random.default_rng(0), too_long) is None
