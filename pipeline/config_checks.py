"""What no single section of params.yaml can see: names that must be registered, and sections that must fit together.

Checked when the file is read, so that a typing error costs a second and not the stages before the one that would meet
it. The registries are looked up at that moment: a reward or an engine that a program registers before it loads the
parameters is known here like the embedded ones. Nothing here imports torch or zarr.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline import rewards
from pipeline.config import nearest
from pipeline.errors import ConfigError
from pipeline.scorers.registry import ENGINES

if TYPE_CHECKING:
    from pipeline.config import Params


def check(params: Params, source: str, at: str = "") -> None:
    """Check names and combinations; `at` is "epochs.e001." for an epoch's overrides. Raises ConfigError."""
    for scorer in params.score.scorers:
        if scorer not in ENGINES:
            raise ConfigError(
                f"{source}: {at}score.scorers: unknown scorer {scorer!r}; {nearest(scorer, ENGINES)}"
            )
    rewards.check_sections(params.rewards, source, at)
    for name in params.advantage.weights:
        if name not in rewards.REWARDS:
            raise ConfigError(
                f"{source}: {at}advantage.weights: unknown reward {name!r}; {nearest(name, rewards.REWARDS)}"
            )
        for scorer in rewards.find(name).needs:
            if scorer not in params.score.scorers:
                raise ConfigError(
                    f"{source}: {at}advantage.weights.{name} needs the scorer {scorer!r}: add it to score.scorers"
                )
    if params.advantage.best_of_n > params.rollout.candidates:
        raise ConfigError(
            f"{source}: {at}advantage.best_of_n is {params.advantage.best_of_n}, above rollout.candidates = "
            f"{params.rollout.candidates}: lower it or draw more candidates"
        )
