"""Clip-level rollouts on the tiny base: keyed noise, shared past, forward counts, alignment of frames and labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline import rollout
from pipeline.groups import scored_frames, scored_labels
from pipeline.rollout import Sampling, group_key, target_clip
from pipeline.words import TrainingMix
from pipeline.worlds.base import ClipCondition
from pipeline.worlds.registry import make_prompts, open_world

SAMPLING = Sampling(steps=2, shift=3.0, seed=0, epoch=1)


@given(st.integers(1, 500), st.integers(1, 9), st.integers(0, 9))
def test_target_clip_stays_in_its_range_and_visits_all_of_it(epoch: int, n_min: int, extra: int) -> None:
    n_max = n_min + extra
    assert n_min <= target_clip(epoch, n_min, n_max) <= n_max
    assert target_clip(1, n_min, n_max) == n_min
    assert {target_clip(epoch + step, n_min, n_max) for step in range(extra + 1)} == set(
        range(n_min, n_max + 1)
    )


def test_group_keys_name_scene_word_clip_and_policy() -> None:
    labels = np.array([0, 9, 9, 3])
    keys = {
        group_key("room", labels, 2, "p"),
        group_key("hall", labels, 2, "p"),
        group_key("room", np.array([0, 9, 3, 3]), 2, "p"),
        group_key("room", labels, 1, "p"),
        group_key("room", labels, 2, "q"),
    }
    assert len(keys) == 5
    assert group_key("room", labels.copy(), 2, "p") in keys


def test_labels_switch_with_the_frames_that_their_action_made() -> None:
    """Labels that change at every latent: with stride 4, frames 1-4 show action 1, frames 5-8 action 2 (spec 6.1)."""
    labels_T = np.arange(12)
    assert scored_labels(labels_T[:4], 1, 4, 4).tolist() == [0] + [1] * 4 + [2] * 4 + [3] * 4
    second = [0] + [4] * 4 + [5] * 4 + [6] * 4 + [7] * 4
    assert scored_labels(labels_T[:8], 2, 4, 4).tolist() == second
    assert scored_labels(labels_T, 2, 4, 4).tolist() == second  # a longer word changes nothing
    assert scored_labels(labels_T, 3, 4, 1).tolist() == [0, 8, 9, 10, 11]


def test_scored_frames_begin_with_the_frame_before_the_clip() -> None:
    past = np.arange(5, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 2, 3), np.uint8)
    clips = np.full((3, 4, 2, 2, 3), 9, np.uint8)
    assert scored_frames(past, clips, 1).shape == (3, 4, 2, 2, 3)
    later = scored_frames(past, clips, 2)
    assert later.shape == (3, 5, 2, 2, 3)
    assert (later[:, 0] == 4).all()


@pytest.mark.parametrize("clip", [1, 2, 3])
def test_a_group_has_one_past_and_its_own_noise(tiny_base: Path, clip: int) -> None:
    world = open_world("mini", tiny_base)
    world.autocast = None
    prompt = make_prompts("mini", "rl", [0], 0, 4 * clip - 1, TrainingMix(hold=(1, 3)))[0]
    labels_T = np.concatenate([[0], prompt.labels_A])
    scene = world.encode_scene(prompt.first_frame_HW3, prompt.caption, prompt.scene_key)
    condition = ClipCondition.of(labels_T, prompt.c2w_T44, prompt.K_33)

    prefix = rollout.sample_prefix(world, scene, condition, prompt.c2w_T44, clip, SAMPLING, "k")
    assert prefix.shape[1] == max(1, 4 * (clip - 1))
    assert torch.equal(prefix[:, 0], scene.first_latent_CHW)
    assert world.forwards.denoiser == SAMPLING.steps * (clip - 1)

    def sample(candidates: int, key: str = "k") -> torch.Tensor:
        world.forwards.reset()
        made = rollout.sample_candidates(
            world, scene, prefix, condition, prompt.c2w_T44, clip, candidates, SAMPLING, key
        )
        assert world.forwards.denoiser == SAMPLING.steps * candidates
        assert world.forwards.context == (1 if clip > 1 else 0)
        return made

    four = sample(4)
    assert torch.equal(four, sample(4))
    torch.testing.assert_close(sample(2), four[:2], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(sample(4, "other"), four)
    assert (four[0] - four[1]).abs().max() > 1e-3
    frames = rollout.decode_candidates(world, prefix, four, clip)
    assert frames.shape == (4, 4, 40, 64, 3)
    assert rollout.decode_prefix(world, prefix).shape[0] == prefix.shape[1]
