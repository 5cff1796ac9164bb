"""Schedules and derived numbers of the update parameters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.flow import sigmas
from pipeline.updates.config import OldDecayConfig, UpdateConfig


def test_old_decay_reproduces_the_published_schedules():
    compass = OldDecayConfig(start=0.2, rate=0.01, max=0.9)
    assert compass.at(0) == pytest.approx(0.2)
    assert compass.at(10) == pytest.approx(0.3)
    assert compass.at(70) == compass.at(1000) == pytest.approx(0.9)
    assert OldDecayConfig(start=0, rate=0, max=0).at(50) == 0
    type1 = OldDecayConfig(start=0, rate=0.001, max=0.5)
    assert type1.at(100) == pytest.approx(0.1)
    assert type1.at(900) == 0.5
    type2 = OldDecayConfig(start=0, rate=0.0075, max=0.999, delay=75)
    assert type2.at(75) == 0
    assert type2.at(175) == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({"steps": 40}, 20),
        ({"steps": 5}, 2),
        ({"steps": 10, "timestep_fraction": 0.7}, 7),
        ({"timesteps": 4}, 4),
        ({"steps": 5, "sigma_min": 0.8, "timestep_fraction": 1.0}, 3),
        ({"steps": 5, "sigma_min": 0.99}, 1),
    ],
)
def test_timesteps_per_sample(config, count):
    assert UpdateConfig(**config).timesteps_per_sample == count


@given(st.integers(1, 60), st.floats(0.2, 12), st.floats(0, 0.99))
def test_trained_levels_are_the_samplers_from_sigma_min_on(steps, shift, sigma_min):
    config = UpdateConfig(steps=steps, shift=shift, sigma_min=sigma_min)
    levels = sigmas(steps, shift)[:-1]
    assert 1 <= config.levels <= steps
    assert bool((levels[: config.levels] >= sigma_min - 1e-5).all())
    assert bool((levels[config.levels :] < sigma_min + 1e-5).all())


@given(st.integers(1, 60), st.floats(0.2, 12), st.data())
def test_a_level_that_is_given_as_sigma_min_is_trained(steps, shift, data):
    level = data.draw(st.integers(0, steps - 1))
    sigma = float(sigmas(steps, shift)[level])
    if sigma < 1:
        assert UpdateConfig(steps=steps, shift=shift, sigma_min=sigma).levels > level


def test_optimizer_steps_keep_left_over_samples():
    config = UpdateConfig(accumulation=4)
    assert [config.optimizer_steps(n) for n in (0, 1, 4, 6, 8)] == [0, 1, 1, 2, 2]


def test_warm_up_is_linear_and_ends_at_lr():
    config = UpdateConfig(lr=1.0, warmup_steps=3)
    assert [config.lr_at(s) for s in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert UpdateConfig(lr=1.0).lr_at(0) == 1.0


@pytest.mark.parametrize(
    "bad",
    [
        {"nope": 1},
        {"timesteps": 9},
        {"timesteps": 4, "sigma_min": 0.8},
        {"noise": "epoch"},
        {"old": "live"},
        {"beta": 0},
        {"betas": (0.9, 1.0)},
        {"old_decay": {"x": 1}},
    ],
)
def test_bad_parameters_are_refused(bad):
    with pytest.raises(ValidationError):
        UpdateConfig(**bad)
