"""Noise levels, steps and keyed noise against closed forms and diffusers' scheduler."""

from __future__ import annotations

import itertools

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import flow

KEY = {"seed": 1, "epoch": 2, "group": "scene/word", "candidate": 3, "purpose": "candidate"}


@given(steps=st.integers(1, 60), shift=st.floats(0.2, 20))
@settings(deadline=None)
def test_levels_fall_from_one_to_zero(steps: int, shift: float) -> None:
    levels = flow.sigmas(steps, shift)
    assert levels.dtype == torch.float32
    assert levels.shape == (steps + 1,)
    assert levels[0] == 1
    assert levels[-1] == 0
    assert bool((levels.diff() < 0).all())


def test_levels_of_the_distilled_bases() -> None:
    torch.testing.assert_close(flow.sigmas(4, 8.0), torch.tensor([1, 0.96, 8 / 9, 8 / 11, 0]))
    torch.testing.assert_close(flow.sigmas(4, 5.0), torch.tensor([1, 0.9375, 5 / 6, 0.625, 0]))


def test_impossible_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match="steps 0"):
        flow.sigmas(0, 5.0)
    with pytest.raises(ValueError, match="shift 0"):
        flow.sigmas(4, 0.0)


@pytest.mark.parametrize(("steps", "shift"), [(4, 8.0), (40, 5.0), (6, 3.0)])
def test_sampling_equals_diffusers_with_explicit_levels(steps: int, shift: float) -> None:
    """The scheduler's own set_timesteps(n) gives other levels (off by up to 0.6), so they are passed explicitly."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=torch.linspace(1, 0, steps + 1)[:-1].tolist())
    levels = flow.sigmas(steps, shift)
    torch.testing.assert_close(scheduler.sigmas, levels, rtol=0, atol=2e-7)
    torch.testing.assert_close(scheduler.timesteps, flow.timestep(levels[:-1]), rtol=0, atol=2e-4)
    theirs = ours = flow.keyed_noise((2, 3, 4), **KEY)
    for t, (now, after) in zip(scheduler.timesteps, itertools.pairwise(levels), strict=True):
        theirs = scheduler.step((theirs * 1.7).sin(), t, theirs, return_dict=False)[0]
        ours = flow.euler_step(ours, (ours * 1.7).sin(), now, after)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@given(sigma=st.floats(0.01, 1), sigma_next=st.floats(0, 1), seed=st.integers(0, 100))
@settings(deadline=None)
def test_steps_along_the_true_velocity_stay_on_the_line(sigma: float, sigma_next: float, seed: int) -> None:
    x0, noise = (flow.keyed_noise((2, 5), **KEY | {"seed": seed, "candidate": i}) for i in range(2))
    x, v = flow.add_noise(x0, noise, sigma), noise - x0
    torch.testing.assert_close(flow.x0_from_velocity(x, v, sigma), x0, rtol=0, atol=2e-6)
    moved = flow.euler_step(x, v, sigma, sigma_next)
    torch.testing.assert_close(moved, flow.add_noise(x0, noise, sigma_next), rtol=0, atol=2e-6)


def test_a_level_for_each_sample_belongs_to_the_first_axis() -> None:
    x0, noise = (flow.keyed_noise((2, 2), **KEY | {"candidate": i}) for i in range(2))
    levels = torch.tensor([0.25, 0.75])
    rows = torch.stack([flow.add_noise(x0[i], noise[i], float(levels[i])) for i in range(2)])
    torch.testing.assert_close(flow.add_noise(x0, noise, levels), rows)
    torch.testing.assert_close(flow.add_noise(x0, noise, levels[:, None]), rows)
    torch.testing.assert_close(
        flow.euler_step(x0, noise, levels, torch.zeros(2)), flow.x0_from_velocity(x0, noise, levels)
    )


def test_timesteps_are_whole_only_on_request() -> None:
    sigma = torch.tensor([8 / 9, 0.9375])
    torch.testing.assert_close(flow.timestep(sigma), torch.tensor([888.8889, 937.5]))
    assert flow.timestep(sigma, truncate=True).tolist() == [888, 937]


def test_noise_depends_on_every_part_of_its_key_and_on_nothing_else() -> None:
    reference = flow.keyed_noise((64,), **KEY)
    torch.manual_seed(5)
    assert torch.equal(reference, flow.keyed_noise((64,), **KEY))
    others = [
        KEY | {"seed": 9},
        KEY | {"epoch": 9},
        KEY | {"group": "9"},
        KEY | {"candidate": 9},
        KEY | {"purpose": "9"},
    ]
    for key in others:
        assert not torch.equal(reference, flow.keyed_noise((64,), **key))
    # No two keys may run into one another when they are joined.
    one, two = KEY | {"group": "a", "purpose": "b/c"}, KEY | {"group": "a/b", "purpose": "c"}
    assert not torch.equal(flow.keyed_noise((64,), **one), flow.keyed_noise((64,), **two))
    # The stream itself is part of every stored artifact: a change of it must be noticed.
    torch.testing.assert_close(
        reference[:3], torch.tensor([-0.0268320, -1.6169920, -0.1148517]), rtol=0, atol=1e-6
    )


def test_noise_is_standard_normal() -> None:
    sample = flow.keyed_noise((4, 25_000), **KEY).double()
    assert sample.mean().abs() < 0.015
    assert (sample.std() - 1).abs() < 0.01
    assert ((sample.abs() > 1.959964).double().mean() - 0.05).abs() < 0.004
