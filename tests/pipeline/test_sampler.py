"""Presets: the numbers of each checkpoint, equal to diffusers' Euler scheduler, and what is said about few steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from pipeline import flow
from pipeline.config import Params
from pipeline.errors import ConfigError
from pipeline.sampler import PRESETS, SamplerConfig, sampler_warnings


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_is_diffusers_euler_scheduler_with_explicit_sigmas(name: str) -> None:
    """The same levels, and the same x0 from the same velocities."""
    preset = PRESETS[name]
    scheduler = FlowMatchEulerDiscreteScheduler(shift=preset.shift)
    scheduler.set_timesteps(sigmas=np.linspace(1, 0, preset.steps + 1)[:-1])
    sigmas = flow.sigmas(preset.steps, preset.shift)
    torch.testing.assert_close(sigmas, scheduler.sigmas, rtol=0, atol=2e-7)
    torch.testing.assert_close(flow.timestep(sigmas[:-1]), scheduler.timesteps, rtol=0, atol=2e-4)
    generator = torch.Generator().manual_seed(0)
    ours = theirs = torch.randn(2, 3, generator=generator)
    for i, t in enumerate(scheduler.timesteps):
        v = torch.randn(2, 3, generator=generator)
        ours = flow.euler_step(ours, v, sigmas[i], sigmas[i + 1])
        theirs = scheduler.step(v, t, theirs).prev_sample
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


def test_published_numbers() -> None:
    assert flow.sigmas(4, 8.0).tolist() == pytest.approx([1, 0.96, 0.8889, 0.7273, 0], abs=5e-5)
    assert flow.sigmas(4, 5.0).tolist() == pytest.approx([1, 0.9375, 0.8333, 0.625, 0], abs=5e-5)
    said = {name: (p.steps, p.shift, p.cfg, p.truncate_timestep) for name, p in PRESETS.items()}
    assert said == {
        "mini": (5, 3.0, 1.0, False),
        "worldplay-5b-distilled": (4, 8.0, 1.0, False),
        "worldplay-8b-ar": (50, 5.0, 6.0, False),
        "worldplay-8b-distilled": (4, 5.0, 1.0, False),
        "worldcompass-rl": (40, 5.0, 1.0, True),
    }


def params(**sections: Any) -> Params:
    return Params.model_validate_strict(sections)


def test_a_preset_fills_what_is_not_written_and_the_update_follows() -> None:
    read = params(sampler={"preset": "worldcompass-rl", "steps": 20}, update={"timesteps": 20})
    assert (read.sampler.steps, read.sampler.shift, read.sampler.truncate_timestep) == (20, 5.0, True)
    assert (read.update.steps, read.update.shift) == (20, 5.0)
    assert read.sampler.written() == {"preset": "worldcompass-rl", "steps": 20, "latents": "float16"}
    assert Params.model_validate_strict(read.written()) == read
    with pytest.raises(ConfigError, match=r"update.steps differs from sampler.steps = 40"):
        params(sampler={"preset": "worldcompass-rl"}, update={"steps": 20})
    with pytest.raises(ConfigError, match='sampler.preset is "rl"'):
        params(sampler={"preset": "rl"})


def test_an_epoch_may_change_the_preset() -> None:
    read = params(
        sampler={"preset": "worldplay-8b-distilled"},
        epochs={"e001": {"prev": "e000", "sampler": {"preset": "worldcompass-rl"}}},
    )
    own = read.for_epoch("e001")
    assert (own.sampler.steps, own.sampler.shift, own.update.steps) == (40, 5.0, 40)
    assert (read.sampler.steps, read.sampler.shift) == (4, 5.0)


def test_artifacts_made_before_there_were_presets_stay_valid() -> None:
    assert Params().dump("sampler") == {"sampler": {"steps": 5, "shift": 3.0, "latents": "float16"}}


def test_few_steps_and_guidance_are_said_loudly() -> None:
    distilled, rl, guided = (
        SamplerConfig(preset=p) for p in ("worldplay-5b-distilled", "worldcompass-rl", "worldplay-8b-ar")
    )
    assert sampler_warnings(SamplerConfig(), None) == []  # the mini world was trained for its 5 steps
    assert sampler_warnings(rl, "ar") == []
    for sampler, checkpoint in ((distilled, "distilled"), (distilled, "unknown"), (rl, "ar-distilled")):
        (line,) = sampler_warnings(sampler, checkpoint)
        assert line.startswith("WARNING: ")
        assert "NFT" in line
    (line,) = sampler_warnings(guided, "ar")
    assert "sampler.cfg is 6" in line
