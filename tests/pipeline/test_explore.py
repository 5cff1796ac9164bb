"""Exploration: candidate 0 is as ever, the others are pushed to move, and each guided step costs one more forward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pipeline import config, rollout
from pipeline.actions import parse_word
from pipeline.errors import ConfigError
from pipeline.explore import ExploreConfig
from pipeline.rollout import Sampling
from pipeline.scorers.pose_net import PoseScorer
from pipeline.words import TrainingMix
from pipeline.worlds.base import ClipCondition
from pipeline.worlds.mini.prompts import make_prompt_for_word
from pipeline.worlds.registry import make_prompts, open_world
from pipeline.worlds.wan_world import WanWorld

SHIPPED = Path("weights/mini")
PLAIN = Sampling(steps=5, shift=3.0, seed=0, epoch=1)
EXPLORING = replace(PLAIN, explore=ExploreConfig(scale=1.75, above=0.8))


def sample(
    world: WanWorld,
    frame_HW3: NDArray[np.uint8],
    caption: str,
    labels_A: NDArray[np.int64],
    c2w_T44: NDArray[np.float64],
    K_33: NDArray[np.float64],
    clip: int,
    sampling: Sampling,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(prefix, four candidates) of one prompt; counts forwards of the candidates alone."""
    scene = world.encode_scene(frame_HW3, caption, "key")
    condition = ClipCondition.of(np.concatenate([[0], labels_A]), c2w_T44, K_33)
    prefix = rollout.sample_prefix(world, scene, condition, c2w_T44, clip, sampling, "k")
    world.forwards.reset()
    return prefix, rollout.sample_candidates(world, scene, prefix, condition, c2w_T44, clip, 4, sampling, "k")


@pytest.mark.parametrize("clip", [1, 2])
def test_the_first_candidate_and_the_past_are_as_ever_and_forwards_are_counted(
    tiny_base: Path, clip: int
) -> None:
    world = open_world("mini", tiny_base)
    prompt = make_prompts("mini", "rl", [0], 0, 4 * clip - 1, TrainingMix(hold=(1, 3)))[0]
    given = (prompt.first_frame_HW3, prompt.caption, prompt.labels_A, prompt.c2w_T44, prompt.K_33, clip)
    past, plain = sample(world, *given, PLAIN)
    assert world.forwards.denoiser == 4 * 5
    same_past, exploring = sample(world, *given, EXPLORING)
    assert torch.equal(past, same_past)
    assert world.forwards.denoiser == 4 * (5 + 3)  # sigmas 1, 0.92 and 0.82 are above 0.8
    assert EXPLORING.explore.guided(EXPLORING.sigmas()) == 3
    assert torch.equal(plain[0], exploring[0])
    new = (plain - exploring)[:, :, 1 if clip == 1 else 0 :].flatten(1).norm(dim=1)
    assert (new.diff() > 0).all()  # the further from the first, the stronger


def test_guidance_away_from_standing_still_makes_the_shipped_base_move_more() -> None:
    world, scorer = open_world("mini", SHIPPED), PoseScorer.load(SHIPPED)
    moved: dict[str, list[float]] = {"plain": [], "exploring": []}
    labels_A = np.array(parse_word("w+left-3"))
    for index in range(4):
        prompt = make_prompt_for_word("rl", index, 3, labels_A)
        K_33 = make_prompts("mini", "rl", [0], 0, 3, TrainingMix())[0].K_33
        for name, sampling in (("plain", PLAIN), ("exploring", EXPLORING)):
            prefix, made = sample(
                world, prompt.first_frame_HW3, prompt.caption, labels_A, prompt.c2w_T44, K_33, 1, sampling
            )
            motion = scorer.motion(rollout.decode_candidates(world, prefix, made, 1)[-1:])
            moved[name].append(float(np.abs(motion[0, :, [2, 3]]).mean()))  # of a step: forward and yaw
    assert np.mean(moved["exploring"]) > 1.1 * np.mean(moved["plain"])


def test_exploration_is_left_out_of_inputs_where_it_is_idle_and_refused_where_it_has_no_meaning() -> None:
    params = config.Params.model_validate_strict({})
    assert "explore" not in params.dump("rollout")["rollout"]
    exploring = {"rollout": {"explore": {"scale": 1.5}}}
    assert (
        config.Params.model_validate_strict(exploring).dump("rollout")["rollout"]["explore"]["scale"] == 1.5
    )
    with pytest.raises(ConfigError, match=r"rollout\.explore\.scale is 1\.5"):
        config.Params.model_validate_strict({"rollout": exploring["rollout"] | {"mode": "cycle"}})
