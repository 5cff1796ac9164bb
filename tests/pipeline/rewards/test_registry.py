"""Rewards are found by name, with their parameters checked and a nearest name for typing errors."""

import re
from pathlib import Path

import numpy as np
import pytest

from pipeline import rewards
from pipeline.camera import StepSize
from pipeline.config import Params
from pipeline.errors import ConfigError
from pipeline.rewards import Reward, RewardValues
from pipeline.rewards.action import ActionConfig


def test_built_in_rewards_and_what_they_need():
    assert {"action_fine", "action_joint", "quality", "quality_drift"} <= set(rewards.REWARDS)
    assert rewards.needs(["action_fine", "action_joint", "quality_drift", "quality"]) == ["pose", "critic"]


def test_unknown_names_and_keys_are_named():
    with pytest.raises(ConfigError, match="did you mean 'action_fine'"):
        rewards.find("action_fin")
    with pytest.raises(ConfigError, match=r"rewards\.acton"):
        rewards.check_sections({"acton": {}})
    with pytest.raises(ConfigError, match="prest"):
        rewards.settings("action_fine", {"action": {"prest": "per_frame"}})


def test_settings_are_read_from_the_section():
    config = rewards.settings("action_joint", {"action": {"preset": "per_frame", "taus": [0.5]}})
    assert isinstance(config, ActionConfig)
    assert config.taus == [0.5]
    assert rewards.settings("action_fine", {}) == ActionConfig()


def test_register_your_own(monkeypatch):
    monkeypatch.setattr(rewards, "REWARDS", dict(rewards.REWARDS))

    def zeros(raw, context, config):
        return RewardValues(np.zeros(2), (None, None))

    mine = rewards.register(Reward("mine", ("quality",), zeros, section="mine"))
    assert rewards.find("mine") is mine
    with pytest.raises(ConfigError, match="exists already"):
        rewards.register(mine)


def test_a_missing_value_without_a_reason_is_a_bug():
    with pytest.raises(ValueError, match="needs a reason"):
        RewardValues(np.array([1.0, np.nan]), (None, None))
    with pytest.raises(ValueError, match="no other may have one"):
        RewardValues(np.array([1.0]), ("because",))


def test_the_reward_of_the_manual_works_as_written(monkeypatch):
    """docs/rewards.md: registered before the parameters are read, weighted and configured like the embedded ones."""
    monkeypatch.setattr(rewards, "REWARDS", dict(rewards.REWARDS))
    text = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], {"__name__": "steady"})
    params = Params.model_validate_strict(
        {"advantage": {"weights": {"steady": 0.5}}, "rewards": {"steady": {"power": 2.0}}}
    )
    config = rewards.settings("steady", params.rewards)
    relative = np.tile(np.eye(4), (2, 3, 1, 1))
    relative[1, 2, 0, 3] = 0.4  # the second candidate leaps at its end
    raw = {"pose": rewards.RawScores({"relative": relative}, (None, None))}
    context = rewards.RewardContext(np.array([0, 9, 9, 9]), 1, StepSize(0.4, 6.0))
    found = rewards.find("steady").compute(raw, context, config)
    np.testing.assert_allclose(found.value_G, [0, -0.25])
    assert found.details["change"].shape == (2,)
