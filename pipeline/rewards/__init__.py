"""Rewards by name. Add your own with `register(Reward(...))` before the advantage stage runs, or as a file here."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from pipeline.errors import ConfigError
from pipeline.rewards.action import ACTION_FINE, ACTION_JOINT, ACTION_SOFT
from pipeline.rewards.base import ABSENT, RawScores, Reward, RewardContext, RewardValues
from pipeline.rewards.cycle import CLOSURE_REWARDS
from pipeline.rewards.quality import QUALITY, QUALITY_CAPTION, QUALITY_DRIFT

__all__ = [
    "ABSENT",
    "REWARDS",
    "RawScores",
    "Reward",
    "RewardContext",
    "RewardValues",
    "check_sections",
    "find",
    "needs",
    "register",
    "settings",
]

REWARDS: dict[str, Reward] = {
    r.name: r
    for r in (
        ACTION_FINE,
        ACTION_JOINT,
        ACTION_SOFT,
        QUALITY,
        QUALITY_CAPTION,
        QUALITY_DRIFT,
        *CLOSURE_REWARDS,
    )
}


def register(reward: Reward) -> Reward:
    """Make a reward known by its name. Raises ConfigError if the name is taken."""
    if reward.name in REWARDS:
        raise ConfigError(f"reward {reward.name!r} exists already: give yours another name")
    REWARDS[reward.name] = reward
    return reward


def find(name: str) -> Reward:
    """The reward of that name. Raises ConfigError naming the nearest one."""
    if name not in REWARDS:
        import difflib

        near = difflib.get_close_matches(name, REWARDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"unknown reward {name!r}: {hint}There are {', '.join(sorted(REWARDS))}")
    return REWARDS[name]


def needs(names: Iterable[str]) -> list[str]:
    """Scorers that these rewards need, each once, in order of first use."""
    return list(dict.fromkeys(scorer for name in names for scorer in find(name).needs))


def settings(name: str, sections: Mapping[str, Any]) -> BaseModel:
    """The validated parameters of a reward from params.yaml's `rewards`. Raises ConfigError naming the key."""
    from pipeline.config import validate  # it joins the configuration classes of all components

    reward = find(name)
    data = sections.get(reward.section)
    return validate(
        reward.config, {} if data is None else data, "params.yaml", at=f"rewards.{reward.section}."
    )


def check_sections(sections: Mapping[str, Any], source: str = "params.yaml", at: str = "") -> None:
    """Check all of params.yaml's `rewards`: known names, each with valid parameters. Raises ConfigError.

    `at` is "epochs.e001." for an epoch's overrides.
    """
    from pipeline.config import nearest, validate

    known = {reward.section: reward.config for reward in REWARDS.values()}
    for section, data in sections.items():
        if section not in known:
            hint = nearest(section, sorted(known))
            raise ConfigError(f"{source}: unknown key '{at}rewards.{section}'; {hint}")
        validate(known[section], {} if data is None else data, source, at=f"{at}rewards.{section}.")
