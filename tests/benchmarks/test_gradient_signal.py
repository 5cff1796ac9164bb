"""The share of a gradient that groups have in common, where it is known."""

import pytest
import torch

from benchmarks.gradient_signal import family_of, group_gradient, kind_of, signal_share
from pipeline.actions import parse_word
from pipeline.updates.loop import Levels, update_epoch
from pipeline.updates.policy import Policy
from tests.pipeline.updates.test_loop import ToyWorld, config, make_groups


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5])
def test_share_of_draws_with_a_known_mean(share):
    generator = torch.Generator().manual_seed(0)
    mean = torch.full((4000,), share**0.5)
    draws = mean + (1 - share) ** 0.5 * torch.randn(64, 4000, generator=generator)
    assert signal_share(draws) == pytest.approx(share, abs=0.005)


def test_equal_gradients_are_all_signal_and_none_are_none():
    assert signal_share(torch.ones(5, 3)) == pytest.approx(1.0)
    assert signal_share(torch.zeros(5, 3)) == 0.0


def test_layers_of_all_blocks_are_one_kind():
    assert (
        kind_of("blocks.3.attn1.to_out.0.weight") == kind_of("blocks.0.attn1.to_out.0.bias") == "attn1.to_out"
    )
    assert kind_of("condition_embedder.action_embedder.linear_1.weight").endswith("action_embedder.linear_1")
    assert kind_of("proj_out.weight") == "proj_out"


@pytest.mark.parametrize(
    ("word", "family"),
    [
        ("w-3", "translation"),
        ("w-1, d-2", "translation"),
        ("w+left-3", "translation_and_yaw"),
        ("w-1, w+left-2", "several"),
    ],
)
def test_a_clip_is_of_the_family_that_all_its_actions_are_of(word, family):
    assert family_of(torch.tensor(parse_word(word))) == family


@pytest.mark.parametrize("noise", ["candidate", "group"])
@pytest.mark.parametrize("first_clip", [True, False])
def test_mean_of_the_groups_gradients_is_the_gradient_that_an_update_steps_along(noise, first_clip):
    groups, cfg = make_groups(first_clip=first_clip), config(noise=noise, accumulation=12, grad_clip=1e9)
    world = ToyWorld()
    gradients = [group_gradient(world, group, Levels(cfg, 7, 1), cfg) for group in groups]
    norm = (
        sum(torch.stack([g[name] for g in gradients]).mean(0).square().sum() for name in gradients[0]) ** 0.5
    )
    other = ToyWorld()
    metrics = update_epoch(other, Policy(other.model, cfg), groups, cfg, 7, 1)
    assert metrics["optimizer_steps"] == 1
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
