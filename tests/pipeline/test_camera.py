"""Poses, labels and the lattice: signs and orders checked against hand-made cases, not against the code
itself."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.actions import inverse, label_of, parse_word
from pipeline.camera import (
    WORLDCOMPASS_STEP,
    WORLDPLAY_INTRINSICS,
    WORLDPLAY_STEP,
    Intrinsics,
    StepSize,
    action_of_frame,
    anchor,
    clip_frames,
    clip_latents,
    frame_labels,
    frames_of_latents,
    invert,
    labels_from_poses,
    labels_from_relative,
    latents_of_frames,
    normalised_intrinsics,
    pose_json_load,
    pose_json_save,
    poses_from_labels,
    relative_poses,
    step_transform,
)
from pipeline.errors import ConfigError, DataError, WordError

STEPS = [WORLDPLAY_STEP, WORLDCOMPASS_STEP, StepSize(0.4, 6.0), StepSize(0.001, 0.06), StepSize(25.0, 12.0)]
ALL = np.arange(81)
words = st.lists(st.integers(0, 80), min_size=1, max_size=60)
steps = st.builds(StepSize, st.floats(0.001, 10.0), st.floats(0.06, 12.5))


# --- Conventions ---


def test_single_keys_move_and_turn_as_they_say() -> None:
    step = StepSize(0.5, 90.0)
    moves = {"w": [0, 0, 0.5], "s": [0, 0, -0.5], "d": [0.5, 0, 0], "a": [-0.5, 0, 0]}
    for key, expected in moves.items():
        np.testing.assert_allclose(step_transform(label_of(key), step)[:3, 3], expected, atol=1e-12)
    looks = {"right": [1, 0, 0], "left": [-1, 0, 0], "up": [0, -1, 0], "down": [0, 1, 0]}  # y points down
    for key, expected in looks.items():
        forward = step_transform(label_of(key), step)[:3, :3] @ [0, 0, 1]
        np.testing.assert_allclose(forward, expected, atol=1e-12)


def test_rotation_comes_first_and_translation_follows_the_new_heading() -> None:
    motion = step_transform(label_of("w+right"), StepSize(1.0, 90.0))
    np.testing.assert_allclose(motion[:3, 3], [1, 0, 0], atol=1e-12)


def test_yaw_comes_before_pitch_in_the_local_frame() -> None:
    # Right by 90, then up by 90 about the turned x axis: the camera looks straight up (-y), its right is -z.
    rotation = step_transform(label_of("right+up"), StepSize(1.0, 90.0))[:3, :3]
    np.testing.assert_allclose(rotation @ [0, 0, 1], [0, -1, 0], atol=1e-12)
    np.testing.assert_allclose(rotation @ [1, 0, 0], [0, 0, -1], atol=1e-12)


def test_two_translation_keys_are_not_renormalised() -> None:
    assert np.linalg.norm(step_transform(label_of("w+d"), WORLDPLAY_STEP)[:3, 3]) == pytest.approx(
        0.08 * 2**0.5
    )


def test_path_starts_at_the_identity_and_turns_a_square() -> None:
    c2w = poses_from_labels(
        parse_word("w-2, right-1, w-2, right-1, w-2, right-1, w-2, right-1"), StepSize(1.0, 90.0)
    )
    assert c2w.shape == (13, 4, 4)
    assert c2w.dtype == np.float64
    np.testing.assert_array_equal(c2w[0], np.eye(4))
    np.testing.assert_allclose(c2w[5, :3, 3], [2, 0, 2], atol=1e-12)
    np.testing.assert_allclose(c2w[-1], np.eye(4), atol=1e-12)


def test_no_op_leaves_the_pose_bit_identical() -> None:
    c2w = poses_from_labels(parse_word("w+right-3, none-2"), WORLDPLAY_STEP)
    np.testing.assert_array_equal(c2w[4], c2w[3])
    np.testing.assert_array_equal(c2w[5], c2w[3])
    assert labels_from_poses(c2w)[-2:].tolist() == [0, 0]


def test_each_action_may_have_its_own_speed() -> None:
    c2w = poses_from_labels([9, 9], [StepSize(1.0, 1.0), StepSize(0.25, 1.0)])
    np.testing.assert_allclose(c2w[:, 2, 3], [0, 1, 1.25])
    with pytest.raises(WordError, match="1 step sizes for 2 actions"):
        poses_from_labels([9, 9], [WORLDPLAY_STEP])


# --- Labels of poses ---


def test_measured_example_of_the_reference() -> None:
    c2w = poses_from_labels(parse_word("w-3, right-1, d-4"), WORLDPLAY_STEP)
    assert labels_from_poses(c2w).tolist() == [0, 9, 9, 9, 1, 27, 27, 27, 27]


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_all_81_labels_survive_the_poses(step: StepSize) -> None:
    np.testing.assert_array_equal(labels_from_poses(poses_from_labels(ALL, step)), [0, *ALL])
    motions = np.stack([step_transform(int(label), step) for label in ALL])
    np.testing.assert_array_equal(labels_from_relative(motions, 1e-4, 0.05), ALL)


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_mirrored_paths_have_the_labels_of_the_inverse_table(step: StepSize) -> None:
    c2w = poses_from_labels(ALL, step)
    np.testing.assert_array_equal(labels_from_poses(c2w[::-1])[1:], inverse(ALL)[::-1])


@given(words, steps)
def test_mixed_words_survive_the_poses(word: list[int], step: StepSize) -> None:
    c2w = poses_from_labels(word, step)
    np.testing.assert_array_equal(labels_from_poses(c2w), [0, *word])
    # the world frame does not matter
    moved = poses_from_labels([37, 50], StepSize(0.7, 40.0))[-1] @ c2w
    np.testing.assert_array_equal(labels_from_poses(moved), [0, *word])


def test_labels_survive_float32_storage() -> None:
    word = np.random.default_rng(0).integers(0, 81, 95)
    c2w = poses_from_labels(word, WORLDPLAY_STEP).astype(np.float32)
    np.testing.assert_array_equal(labels_from_poses(c2w), [0, *word])


def test_direction_reaches_thirty_degrees_to_each_side_of_an_axis() -> None:
    def label_at(degrees: float) -> int:
        motion = np.eye(4)
        motion[:3, 3] = [np.sin(np.radians(degrees)), 0, np.cos(np.radians(degrees))]
        return int(labels_from_relative(motion[None], 0.5, 0.2)[0])

    expected = {
        29: "w",
        31: "w+d",
        59: "w+d",
        61: "d",
        119: "d",
        121: "s+d",
        151: "s",
        209: "s",
        211: "s+a",
        -31: "w+a",
    }
    for degrees, keys in expected.items():
        assert label_at(degrees) == label_of(keys), degrees


def test_thresholds_roll_and_vertical_motion() -> None:
    motion = np.eye(4)
    motion[2, 3] = 0.005
    assert labels_from_relative(motion[None], 0.002, 0.2).tolist() == [9]
    assert labels_from_relative(motion[None], 0.005, 0.2).tolist() == [0]
    vertical = np.eye(4)
    vertical[1, 3] = 1.0
    roll = np.eye(4)
    roll[:2, :2] = [[np.cos(0.3), -np.sin(0.3)], [np.sin(0.3), np.cos(0.3)]]
    assert labels_from_relative(np.stack([vertical, roll]), 0.002, 0.2).tolist() == [0, 0]
    turn = step_transform(label_of("left"), StepSize(1.0, 0.3))
    assert labels_from_relative(turn[None], 0.002, 0.2).tolist() == [2]
    assert labels_from_relative(turn[None], 0.002, 1.0).tolist() == [0]


def test_batches_and_many_frames() -> None:
    word = np.random.default_rng(0).integers(0, 81, 50)
    c2w_B = np.stack([poses_from_labels(word, step) for step in STEPS])
    np.testing.assert_array_equal(labels_from_poses(c2w_B), np.tile([0, *word], (len(STEPS), 1)))
    many = np.broadcast_to(step_transform(10, WORLDPLAY_STEP), (300_000, 4, 4))
    start = time.perf_counter()
    assert (labels_from_relative(many, 1e-4, 0.05) == 10).all()
    assert time.perf_counter() - start < 10  # a Python loop takes far longer


def test_an_unknown_pose_is_not_a_no_op() -> None:
    c2w = poses_from_labels([9, 9], WORLDPLAY_STEP)
    c2w[1, 0, 3] = np.nan
    with pytest.raises(DataError, match="not finite"):
        labels_from_poses(c2w)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(WordError, match=r"\(5, 3, 4\)"):
        labels_from_poses(np.zeros((5, 3, 4)))
    with pytest.raises(WordError, match="T >= 1"):
        labels_from_poses(np.zeros((0, 4, 4)))
    with pytest.raises(WordError, match="one list"):
        poses_from_labels(np.zeros((2, 2), dtype=int), WORLDPLAY_STEP)
    assert labels_from_poses(np.eye(4)[None]).tolist() == [0]


@given(words, steps)
@settings(max_examples=50)
def test_rigid_algebra(word: list[int], step: StepSize) -> None:
    c2w = poses_from_labels(word, step)
    np.testing.assert_allclose(invert(c2w) @ c2w, np.broadcast_to(np.eye(4), c2w.shape), atol=1e-9)
    relative = relative_poses(c2w)
    rebuilt = [np.eye(4)]
    for motion in relative:
        rebuilt.append(rebuilt[-1] @ motion)
    np.testing.assert_allclose(np.stack(rebuilt), c2w, atol=1e-9)
    world = poses_from_labels([41, 9], StepSize(3.0, 77.0))[-1]
    np.testing.assert_allclose(anchor(world @ c2w), c2w, atol=1e-9)
    np.testing.assert_array_equal(anchor(world @ c2w)[0], np.eye(4))


@pytest.mark.parametrize("values", [(0, 1), (1, -1), (float("nan"), 1), (1, float("inf"))])
def test_step_sizes_are_positive(values: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="positive"):
        StepSize(*values)


# --- Lattice ---


def test_published_lengths() -> None:
    for latents, frames in {1: 1, 4: 13, 32: 125, 64: 253, 96: 381}.items():
        assert frames_of_latents(latents, 4) == frames
        assert latents_of_frames(frames, 4) == latents
    assert frames_of_latents(8, 1) == 8


@given(st.integers(1, 200), st.integers(1, 8))
def test_lattice_round_trips(latents: int, stride: int) -> None:
    frames = frames_of_latents(latents, stride)
    assert latents_of_frames(frames, stride) == latents
    actions = [action_of_frame(frame, stride) for frame in range(frames)]
    assert actions[0] is None
    assert [actions.count(i) for i in range(1, latents)] == [stride] * (latents - 1)


def test_frames_that_fit_no_latents_name_both_neighbours() -> None:
    with pytest.raises(DataError, match=r"124 frames.*stride 4.*121 \(31 latents\) or 125 \(32 latents\)"):
        latents_of_frames(124, 4)
    for call in (
        lambda: latents_of_frames(0, 4),
        lambda: frames_of_latents(0, 4),
        lambda: action_of_frame(-1, 4),
    ):
        with pytest.raises(DataError):
            call()


def test_frame_labels_switch_with_the_action() -> None:
    labels = labels_from_poses(poses_from_labels(parse_word("w-1, right-2"), WORLDPLAY_STEP))
    assert frame_labels(labels, 4).tolist() == [0, 9, 9, 9, 9, 1, 1, 1, 1, 1, 1, 1, 1]
    assert frame_labels(labels, 1).tolist() == labels.tolist()
    for frame, label in enumerate(frame_labels(labels, 4)):
        action = action_of_frame(frame, 4)
        assert label == (0 if action is None else labels[action])
    with pytest.raises(WordError, match="latent 0"):
        frame_labels([9, 9, 9], 4)


def test_clips_tile_latents_and_frames() -> None:
    assert clip_latents(0) == slice(0, 4)
    assert clip_latents(3) == slice(12, 16)
    assert clip_latents(2, clip=3) == slice(6, 9)
    assert clip_frames(0, 4) == slice(0, 13)
    assert clip_frames(1, 4) == slice(13, 29)
    assert clip_frames(15, 4).stop == 253
    assert clip_frames(1, 1) == slice(4, 8)
    # every frame of a clip belongs to a latent of that clip
    for index in range(4):
        frames, latents = clip_frames(index, 4), clip_latents(index)
        made_by = {action_of_frame(frame, 4) or 0 for frame in range(frames.start, frames.stop)}
        assert made_by == set(range(latents.start, latents.stop))
    with pytest.raises(DataError):
        clip_latents(-1)


# --- Intrinsics and pose files ---


def test_normalised_intrinsics_of_the_published_camera() -> None:
    expected = [[0.50505, 0, 0.5], [0, 0.89787, 0.5], [0, 0, 1]]
    np.testing.assert_allclose(WORLDPLAY_INTRINSICS.normalised(), expected, atol=1e-5)
    wide = Intrinsics.from_fov(90.0, 64, 40)
    np.testing.assert_allclose(wide.matrix(), [[32, 0, 32], [0, 32, 20], [0, 0, 1]])
    np.testing.assert_allclose(wide.normalised(), [[0.5, 0, 0.5], [0, 0.8, 0.5], [0, 0, 1]])
    once = normalised_intrinsics(np.stack([wide.matrix()] * 3))
    np.testing.assert_allclose(normalised_intrinsics(once), once)  # normalised values pass unchanged


def test_bad_intrinsics_are_refused() -> None:
    with pytest.raises(ConfigError, match="cx = 0"):
        Intrinsics(1, 1, 0, 1)
    with pytest.raises(ConfigError, match="field of view"):
        Intrinsics.from_fov(180, 64, 40)
    with pytest.raises(WordError, match="positive fx"):
        normalised_intrinsics(np.zeros((3, 3)))
    with pytest.raises(WordError, match="3x3"):
        normalised_intrinsics(np.zeros((3, 4)))


def test_pose_file_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "poses.json"
    word = parse_word("w-3, right+w-2, up-1")
    c2w = poses_from_labels(word, WORLDCOMPASS_STEP)
    pose_json_save(file, c2w, WORLDPLAY_INTRINSICS)
    path = pose_json_load(file)
    np.testing.assert_array_equal(path.c2w_T44, c2w)
    np.testing.assert_array_equal(path.K_T33, np.stack([WORLDPLAY_INTRINSICS.normalised()] * 7))
    assert pose_json_load(file, 4).c2w_T44.shape == (4, 4, 4)
    content = json.loads(file.read_text())
    assert list(content) == [str(i) for i in range(7)]
    np.testing.assert_array_equal(content["3"]["extrinsic"], c2w[3])  # camera-to-world, as published
    assert content["0"]["K"][0][0] == 969.697


def test_pose_file_is_anchored_to_its_first_pose(tmp_path: Path) -> None:
    file = tmp_path / "poses.json"
    word = parse_word("d-9, left+s-3")
    c2w = poses_from_labels(word, WORLDCOMPASS_STEP)
    pose_json_save(file, c2w[1:], WORLDPLAY_INTRINSICS)  # WorldCompass files start after the first motion
    path = pose_json_load(file)
    np.testing.assert_array_equal(path.c2w_T44[0], np.eye(4))
    assert labels_from_poses(path.c2w_T44).tolist() == [0, *word[1:]]


def test_short_pose_file_says_both_numbers(tmp_path: Path) -> None:
    file = tmp_path / "short.json"
    pose_json_save(file, poses_from_labels([9, 9], WORLDPLAY_STEP), WORLDPLAY_INTRINSICS)
    with pytest.raises(WordError, match=r"short\.json: 3 poses, but 8 latents need 8"):
        pose_json_load(file, 8)


IDENTITY = np.eye(4).tolist()
K = WORLDPLAY_INTRINSICS.matrix().tolist()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not a JSON file"),
        ("[]", "expected"),
        ("{}", "expected"),
        (
            json.dumps({"0": {"extrinsic": IDENTITY, "K": K}, "2": {"extrinsic": IDENTITY, "K": K}}),
            'entry "1" is missing',
        ),
        (json.dumps({"0": 5}), 'entry "0" has no "extrinsic"'),
        (json.dumps({"0": {"w2c": IDENTITY}}), "w2c"),
        (json.dumps({"0": {"extrinsic": IDENTITY}}), 'has no "K"'),
        (json.dumps({"0": {"extrinsic": IDENTITY[:3], "K": K}}), "not a 4x4 matrix"),
        (json.dumps({"0": {"extrinsic": [["x"] * 4] * 4, "K": K}}), "not a 4x4 matrix"),
        (json.dumps({"0": {"extrinsic": [[float("nan")] * 4] * 4, "K": K}}), "finite"),
        (json.dumps({"0": {"extrinsic": (2 * np.eye(4)).tolist(), "K": K}}), "rigid"),
        (json.dumps({"0": {"extrinsic": np.diag([-1, 1, 1, 1]).tolist(), "K": K}}), "mirroring"),
        (json.dumps({"0": {"extrinsic": IDENTITY, "K": np.zeros((3, 3)).tolist()}}), "positive fx"),
    ],
)
def test_malformed_pose_files_name_the_file_and_the_entry(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(WordError, match=says) as caught:
        pose_json_load(file)
    assert "bad.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_absent_pose_file_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.json"):
        pose_json_load(tmp_path / "absent.json")
