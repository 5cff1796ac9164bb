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
from pipeline.scorers import choice

if TYPE_CHECKING:
    from pipeline.config import Params


def check(params: Params, source: str, at: str = "") -> None:
    """Check names and combinations; `at` is "epochs.e001." for an epoch's overrides. Raises ConfigError."""
    rewards.check_sections(params.rewards, source, at)
    choice.check(params, source, at)
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
    _check_world(params, source)
    _check_cycles(params, source, at)
    if params.advantage.best_of_n > params.rollout.candidates:
        raise ConfigError(
            f"{source}: {at}advantage.best_of_n is {params.advantage.best_of_n}, above rollout.candidates = "
            f"{params.rollout.candidates}: lower it or draw more candidates"
        )


def _check_world(params: Params, source: str) -> None:
    """The mini world is shipped or trained here and makes its prompts; published ones are imported and have scenes."""
    world = params.world
    mini = world.name == "mini"
    if mini == (world.base == "imported"):
        allowed = "shipped or pretrain" if mini else "imported"
        raise ConfigError(
            f"{source}: world.base is {world.base!r}, but world.name: {world.name} needs {allowed}"
        )
    if mini and world.step != type(world.step)():
        raise ConfigError(
            f"{source}: world.step is for published worlds; the mini world's step is fixed: remove it"
        )
    if mini and params.sampler.cfg != 1:
        raise ConfigError(
            f"{source}: sampler.cfg is {params.sampler.cfg:g}: the mini world has no negative text; set it to 1"
        )
    if mini == bool(world.scenes):
        remedy = (
            "the mini world makes its own scenes: remove it"
            if mini
            else "name the store that `wcpipe encode` wrote"
        )
        raise ConfigError(f"{source}: world.scenes is {world.scenes!r}: {remedy}")


def _check_cycles(params: Params, source: str, at: str) -> None:
    """Words that close, their engine and their rewards belong together; so do rewards and what they need to exist."""
    cycle = params.cycle
    closure = {name for name in params.advantage.weights if rewards.find(name).section == "closure"}
    trained = {name for name in closure if params.advantage.weights[name] > 0}
    everywhere = at != "" or any("words" not in entry.get("cycle", {}) for entry in params.epochs.values())
    if cycle.words == "none" and "tracks" in params.score.scorers and (everywhere or not params.epochs):
        raise ConfigError(
            f"{source}: {at}score.scorers lists 'tracks', which compares frames of words that close, but "
            f"{at}cycle.words is none: set it, or take the scorer out"
        )
    if "temporal" in trained and cycle.words == "retracing" and cycle.levels == 1:
        raise ConfigError(
            f"{source}: {at}advantage.weights.temporal is above 0, but cycle.levels = 1 has single cycles only, which "
            "have no temporal consistency: raise cycle.levels or remove the weight"
        )
    if trained and rewards.settings("spatial", params.rewards).model_dump()["alpha"] is None:
        raise ConfigError(
            f"{source}: {at}rewards.closure.alpha is not set, and {min(trained)} needs it: "
            f"run `wcpipe calibrate --params {source} --write {source}`"
        )


def check_file(params: Params, source: str) -> None:
    """What a whole file must have somewhere, and one epoch alone need not. Raises ConfigError."""
    own = [entry.get("cycle", {}) for entry in params.epochs.values()]
    kinds = {params.cycle.words} | {entry["words"] for entry in own if "words" in entry}
    if params.rollout.mode == "cycle" and kinds == {"none"}:
        raise ConfigError(f"{source}: rollout.mode is 'cycle', but no word closes: set cycle.words")
    wanted = {"spatial": "retracing", "temporal": "retracing", "cycle": "retracing", "relation": "relation"}
    for name, weight in params.advantage.weights.items():
        if weight > 0 and wanted.get(name, params.cycle.words) not in kinds:
            raise ConfigError(
                f"{source}: advantage.weights.{name} is above 0, but no epoch has cycle.words: {wanted[name]}"
            )
