"""Training clips: the declared label noise is the one that is drawn, and frames show what was executed."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from pipeline import actions, camera
from pipeline.words import TEMPLATES, TrainingMix
from pipeline.worlds.mini.clips import CLIP, INTRINSICS_33, STEP, LabelNoise, execute, paths, sample_clips
from pipeline.worlds.mini.renderer import HEIGHT, WIDTH
from pipeline.worlds.mini.text import TEXT_DIM, TOKENS

MIX = TrainingMix(hold=(1, 3))
NONE = LabelNoise(compound_first_only=0, compound_second_only=0, single_ignored=0)


def first_of(label: int) -> int:
    return actions.label_of(actions.keys_of(label)[:1])


def second_of(label: int) -> int:
    return actions.label_of(actions.keys_of(label)[1:])


def test_shares_of_what_is_executed_match_the_parameters() -> None:
    noise = LabelNoise(compound_first_only=0.3, compound_second_only=0.2, single_ignored=0.15)
    rng = np.random.default_rng(0)
    compound, single = actions.label_of("w+right"), actions.label_of("left")
    done = execute(np.tile([[compound], [single]], (4000, 1)), noise, rng)[:, 0]
    compounds, singles = done[::2], done[1::2]
    for label, share in ((first_of(compound), 0.3), (second_of(compound), 0.2), (compound, 0.5)):
        assert np.mean(compounds == label) == pytest.approx(
            share, abs=0.03
        )  # 4 standard deviations of 4000 draws
    assert np.mean(singles == 0) == pytest.approx(0.15, abs=0.025)
    assert np.mean(singles == single) == pytest.approx(0.85, abs=0.025)


def test_all_templates_execute_only_themselves_or_a_part() -> None:
    labels = np.tile(np.array(TEMPLATES)[:, None], (20, 1))
    done = execute(labels, LabelNoise(single_ignored=0.5), np.random.default_rng(1))
    for label in TEMPLATES:
        keys = actions.keys_of(label)
        allowed = {label, first_of(label), second_of(label)} if len(keys) > 1 else {label, 0}
        assert set(done[labels == label].tolist()) == allowed


def test_what_is_executed_is_constant_inside_a_clip_and_drawn_for_each() -> None:
    """Actions 0..2 belong to clip 0, 3..6 to clip 1, 7..10 to clip 2."""
    label = actions.label_of("s+left")
    done = execute(np.full((300, 11), label), LabelNoise(), np.random.default_rng(2))
    parts = [done[:, :3], done[:, 3:7], done[:, 7:]]
    assert all((part == part[:, :1]).all() for part in parts)
    modes = np.stack([part[:, 0] for part in parts], 1)
    assert len(np.unique(modes, axis=0)) > 15  # of 27 combinations: the clips are independent


def test_no_noise_executes_the_labels_and_no_op_stays() -> None:
    labels = np.random.default_rng(3).integers(0, 81, (20, 7))
    np.testing.assert_array_equal(execute(labels, NONE, np.random.default_rng(0)), labels)
    idle = np.zeros((5, 7), np.int64)
    np.testing.assert_array_equal(execute(idle, LabelNoise(), np.random.default_rng(0)), idle)
    with pytest.raises(ValidationError):
        LabelNoise(single_ignored=1.5)
    with pytest.raises(ValidationError, match="compound_first_only [+] compound_second_only is 1.2"):
        LabelNoise(compound_first_only=0.6, compound_second_only=0.6)
    assert LabelNoise(compound_first_only=0.4, compound_second_only=0.6).compound_second_only == 0.6


def test_paths_are_those_of_camera() -> None:
    labels = np.random.default_rng(4).integers(0, 81, (6, 11))
    expected = np.stack([camera.poses_from_labels(word, STEP) for word in labels])
    np.testing.assert_allclose(paths(labels), expected, atol=1e-12)


def test_intrinsics_are_normalised_by_the_frame_size() -> None:
    """90 degrees to the left and right border together: x = z at the border, u = 1."""
    border = INTRINSICS_33 @ np.array([1.0, HEIGHT / WIDTH, 1.0])
    np.testing.assert_allclose(border, [1.0, 1.0, 1.0])


@pytest.mark.parametrize(("clip_index", "context"), [(0, None), (1, 4), (2, 8), (3, 8)])
def test_shapes_of_a_batch(clip_index: int, context: int | None) -> None:
    batch = sample_clips(np.random.default_rng(5), 3, clip_index, MIX, LabelNoise())
    assert batch.frames_BTHW3.shape == (3, CLIP, HEIGHT, WIDTH, 3)
    assert batch.frames_BTHW3.min() >= 0
    assert batch.frames_BTHW3.max() <= 1
    assert batch.labels_BT.shape == (3, CLIP)
    assert batch.w2c_BT44.shape == (3, CLIP, 4, 4)
    assert batch.text_BLD.shape == (3, TOKENS, TEXT_DIM)
    assert (clip_index == 0) == bool((batch.labels_BT[:, 0] == 0).all())
    if context is None:
        assert batch.context_frames_BTHW3 is None
        torch.testing.assert_close(batch.w2c_BT44[:, 0], torch.eye(4).expand(3, 4, 4))
        return
    assert batch.context_frames_BTHW3 is not None
    assert batch.context_labels_BT is not None
    assert batch.context_w2c_BT44 is not None
    assert batch.context_frames_BTHW3.shape == (3, context, HEIGHT, WIDTH, 3)
    assert batch.context_labels_BT.shape == (3, context)
    assert batch.context_w2c_BT44.shape == (3, context, 4, 4)
    # the last clip is always seen: the target's first pose is one action after the context's last
    label = batch.labels_BT[0, 0].item()
    motion = batch.context_w2c_BT44[0, -1].double() @ torch.linalg.inv(batch.w2c_BT44[0, 0].double())
    np.testing.assert_allclose(motion, camera.step_transform(int(label), STEP), atol=1e-5)


def test_batches_are_a_function_of_the_generator() -> None:
    one, two, other = (
        sample_clips(np.random.default_rng(seed), 2, 1, MIX, LabelNoise()) for seed in (6, 6, 7)
    )
    for name in ("frames_BTHW3", "labels_BT", "w2c_BT44", "context_frames_BTHW3", "text_BLD"):
        assert torch.equal(getattr(one, name), getattr(two, name))
    assert not torch.equal(one.frames_BTHW3, other.frames_BTHW3)


def test_frames_show_what_was_executed_while_poses_stay_commanded() -> None:
    """Singles that are all ignored: a frozen picture under labels and poses that move."""
    singles = TrainingMix(
        hold=(1, 3), two_translations=0, yaw_and_pitch=0, translation_and_yaw=0, translation_and_pitch=0
    )
    noise = LabelNoise(compound_first_only=0, compound_second_only=0, single_ignored=1)
    batch = sample_clips(np.random.default_rng(8), 3, 0, singles, noise)
    still = batch.frames_BTHW3 - batch.frames_BTHW3[:, :1]
    assert still.abs().max() < 1e-6
    assert (batch.labels_BT[:, 1:] > 0).all()
    commanded = paths(batch.labels_BT[:, 1:].numpy())
    np.testing.assert_allclose(torch.linalg.inv(batch.w2c_BT44.double()), commanded, atol=1e-5)
    moving = sample_clips(np.random.default_rng(8), 3, 0, singles, NONE).frames_BTHW3
    assert ((moving[:, 1:] - moving[:, :-1]).abs().mean((2, 3, 4)) > 2e-3).all()
