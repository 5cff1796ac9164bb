"""The oracle judges all experiments, so it is judged here on frames whose truth is known.

Few and short videos: fitting one frame costs about a tenth of a second. The full calibration, on more rooms and with
more damage, is an experiment (docs/results.md).
"""

import numpy as np
import pytest

from pipeline import actions
from pipeline.actions import parse_word
from pipeline.scorers.pose_net import MOTION, motion_of_relative
from pipeline.worlds.mini import oracle
from pipeline.worlds.mini.clips import STEP, paths
from pipeline.worlds.mini.codec import PatchCodec
from pipeline.worlds.mini.oracle import OracleTrack, accuracy, track
from pipeline.worlds.mini.prompts import make_prompt_for_word
from pipeline.worlds.mini.renderer import MiniScene, render

WORDS = ("w-2", "s+right-2", "up-2", "w+d-2")


def setting(words: tuple[str, ...], seed: int = 0) -> tuple[list[MiniScene], np.ndarray, np.ndarray]:
    """Rooms of the evaluation split, start poses [B, 4, 4] and labels [B, F], labels[:, 0] = 0."""
    prompts = [
        make_prompt_for_word("evaluation", i, seed, np.array(parse_word(word)))
        for i, word in enumerate(words)
    ]
    labels = np.stack([np.concatenate([[0], prompt.labels_A]) for prompt in prompts])
    return (
        [MiniScene.make(prompt.scene_seed) for prompt in prompts],
        np.stack([p.start_44 for p in prompts]),
        labels,
    )


def true_video(scenes: list[MiniScene], starts: np.ndarray, labels: np.ndarray) -> np.ndarray:
    poses = starts[:, None] @ paths(labels[:, 1:])
    return np.stack([render(scene, path) for scene, path in zip(scenes, poses, strict=True)])


def test_true_renders_are_all_right_and_soft_ones_too() -> None:
    scenes, starts, labels = setting(WORDS)
    frames = true_video(scenes, starts, labels)
    found = track(scenes, frames, starts, labels)
    hits = accuracy(found.labels_BF(), labels)
    assert hits["joint"].shape == (len(WORDS), 2)
    assert hits["joint"].min() == hits["fine"].min() == 1.0
    assert not found.failed_BF.any()
    assert found.residual_BF.max() < 0.02
    np.testing.assert_allclose(found.c2w_BF44, starts[:, None] @ paths(labels[:, 1:]), atol=0.05)

    codec = PatchCodec.fit(frames.reshape(-1, *frames.shape[2:]), 6)  # coarser than the shipped one of 24
    soft = np.stack([codec.decode(codec.encode(video))[0] for video in frames])[:, :2]
    found = track(scenes, soft, starts, labels[:, :2])
    assert accuracy(found.labels_BF(), labels[:, :2])["joint"].min() == 1.0
    assert not found.failed_BF.any()


def test_on_soft_frames_no_pitch_is_spent_on_height() -> None:
    """What no key can do must not explain what one did: free height and roll took part of a soft frame's pitch."""
    scenes, starts, labels = setting(("up-1", "w+up-1", "d+down-1", "s+down-1", "down-1", "a+up-1"), seed=3)
    frames = true_video(scenes, starts, labels)
    codec = PatchCodec.fit(frames.reshape(-1, *frames.shape[2:]), 3)
    soft = np.stack([codec.decode(codec.encode(video))[0] for video in frames])
    soft = np.clip(soft + 12 * np.random.default_rng(0).normal(size=soft.shape), 0, 255).astype(np.uint8)
    soft[:, 0] = frames[:, 0]
    motion = motion_of_relative(
        np.linalg.inv(starts) @ track(scenes, soft, starts, labels).c2w_BF44[:, 1], STEP
    )
    asked = motion_of_relative(paths(labels[:, 1:])[:, 1], STEP)
    assert np.abs(motion[:, MOTION.index("ty")]).max() < 0.05  # of a step
    assert np.abs(motion - asked)[:, MOTION.index("pitch")].mean() < 0.2


def test_a_static_video_did_nothing() -> None:
    scenes, starts, labels = setting(("w-1", "right-1", "s+left-1", "down-1"), seed=1)
    frames = np.repeat(true_video(scenes, starts, labels)[:, :1], 2, axis=1)
    found = track(scenes, frames, starts, labels)
    np.testing.assert_array_equal(found.labels_BF()[:, 1], 0)
    assert accuracy(found.labels_BF(), labels)["joint"].max() == 0.0
    assert accuracy(found.labels_BF(), labels)["fine"].ravel().tolist() == [0.5, 0.5, 0.0, 0.5]
    assert not found.failed_BF.any()  # wrong, but a true view


def test_what_was_executed_is_found_and_not_what_was_commanded() -> None:
    commanded = ("w+right-1", "s+left-1", "a+left-1", "d+up-1", "w+d-1", "right+up-1")
    scenes, starts, labels = setting(commanded, seed=2)
    keys = [actions.keys_of(int(label)) for label in labels[:, 1]]
    executed = labels.copy()
    executed[:, 1] = [actions.label_of(key[:1] if i % 2 else key[1:]) for i, key in enumerate(keys)]
    found = track(scenes, true_video(scenes, starts, executed), starts, labels)
    assert np.mean(found.labels_BF() == executed) >= 0.95
    assert accuracy(found.labels_BF(), labels)["joint"].mean() == 0
    assert accuracy(found.labels_BF(), executed)["joint"].mean() >= 0.95


def test_frames_of_another_room_fail_and_count_as_wrong() -> None:
    scenes, starts, labels = setting(("w-1", "right-1", "s+left-1", "none-1"), seed=3)
    frames = true_video(scenes, starts, labels)
    frames[:, 1] = np.roll(frames[:, 1], 1, axis=0)
    found = track(scenes, frames, starts, labels)
    assert found.failed_BF[:, 1].all()
    assert not found.failed_BF[:, 0].any()
    np.testing.assert_array_equal(found.labels_BF()[:, 1], -1)
    hits = accuracy(found.labels_BF(), labels)
    assert hits["joint"].sum() == hits["fine"].sum() == 0  # no-op and a failed frame: still wrong, not NaN


def test_known_small_motions_are_measured() -> None:
    """Calibration: 0.2 units and 3 degrees, half of an action and not along any hypothesis."""
    scenes, starts, labels = setting(("w-1", "right-1", "w+right-1", "a-1", "up-1", "none-1"), seed=4)
    rng = np.random.default_rng(0)
    motion = np.tile(np.eye(4), (len(scenes), 1, 1))
    turn = np.radians(3.0) * np.sign(rng.uniform(-1, 1, len(scenes)))
    motion[:, 0, 0] = motion[:, 2, 2] = np.cos(turn)
    motion[:, 0, 2], motion[:, 2, 0] = np.sin(turn), -np.sin(turn)
    heading = rng.uniform(-np.pi, np.pi, len(scenes))
    motion[:, 0, 3], motion[:, 2, 3] = 0.2 * np.sin(heading), 0.2 * np.cos(heading)
    truth = starts @ motion
    frames = np.stack(
        [render(s, np.stack(pair)) for s, pair in zip(scenes, zip(starts, truth, strict=True), strict=True)]
    )
    found = track(scenes, frames, starts, labels)
    error = np.linalg.inv(found.c2w_BF44[:, 1]) @ truth
    distance = np.linalg.norm(error[:, :3, 3], axis=1)
    angle = np.degrees(np.arccos(np.clip((np.trace(error[:, :3, :3], axis1=1, axis2=2) - 1) / 2, -1, 1)))
    assert distance.mean() < 0.05
    assert angle.mean() < 0.8
    # none is so far off that a motion would be seen where there was none
    assert distance.max() < oracle.THRESHOLD * oracle.STEP.translation
    assert angle.max() < oracle.THRESHOLD * oracle.STEP.rotation_deg
    assert not found.failed_BF.any()


def test_a_verdict_does_not_depend_on_the_rest_of_the_batch() -> None:
    scenes, starts, labels = setting(("w+right-1", "s-1", "left-1"), seed=5)
    frames = true_video(scenes, starts, labels)
    together, alone = (track(scenes, frames, starts, labels, chunk=chunk) for chunk in (16, 2))
    np.testing.assert_allclose(together.c2w_BF44, alone.c2w_BF44, atol=2e-3)
    np.testing.assert_allclose(together.residual_BF, alone.residual_BF, atol=2e-3)


def test_a_failed_frame_spoils_the_motion_into_it_and_out_of_it() -> None:
    word = np.array([parse_word("w-4")])
    c2w = paths(word)
    for failed, expected in (
        ([0, 0, 0, 0, 0], 0),
        ([0, 0, 1, 0, 0], 2),
        ([0, 0, 0, 0, 1], 1),
        ([0, 1, 1, 0, 0], 3),
    ):
        labels = OracleTrack(c2w, np.zeros((1, 5)), np.array([failed], bool)).labels_BF()
        assert (labels[0, 1:] == -1).sum() == expected
        assert labels[0, 0] == 0
        assert accuracy(labels, np.concatenate([[[0]], word], 1))["joint"].sum() == 4 - expected


@pytest.mark.parametrize(("share", "counts"), [(0.45, False), (0.55, True)])
def test_a_motion_counts_from_the_threshold_on(share: float, counts: bool) -> None:
    assert oracle.THRESHOLD == 0.5  # nearer to obeyed than to ignored
    c2w = np.tile(np.eye(4), (1, 2, 1, 1))
    c2w[0, 1, 2, 3] = share * oracle.STEP.translation
    label = OracleTrack(c2w, np.zeros((1, 2)), np.zeros((1, 2), bool)).labels_BF()[0, 1]
    assert label == (actions.label_of("w") if counts else 0)
