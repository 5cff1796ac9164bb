"""Rewards are found by name, with their parameters checked and a nearest name for typing errors."""

import numpy as np
import pytest

from pipeline import rewards
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
