"""Words that close without retracing: squares, full turns, polygons.

WHY: a model that plays its own past frames backwards closes every retracing cycle perfectly. Only a word that comes
home another way shows whether it knows the place (spec/worldcycle.md 1.3, 1.7 row 5). Closure is never assumed:
`cycles.loop` checks each of these words.
"""

from collections.abc import Sequence

from pipeline.actions import label_of
from pipeline.camera import StepSize
from pipeline.errors import WordError


def legs(keys: Sequence[str], lengths: Sequence[int]) -> tuple[int, ...]:
    """Each key held for its number of actions: legs(["w", "a"], [2, 1]) is w-2, a-1. WordError below one action."""
    if len(keys) != len(lengths) or any(length < 1 for length in lengths):
        raise WordError(
            f"{len(keys)} legs with lengths {list(lengths)}: give each a whole positive number of actions"
        )
    return tuple(label_of(key) for key, length in zip(keys, lengths, strict=True) for _ in range(length))


def square(side: int, keys: Sequence[str] = ("w", "a", "s", "d")) -> tuple[int, ...]:
    """A square of four moves, `side` actions each; other orders of the keys give other squares."""
    return legs(keys, [side] * len(keys))


def turn_actions(step: StepSize, degrees: float) -> int:
    """How many yaw actions turn by that many degrees; WordError unless a whole number does so exactly."""
    count = round(degrees / step.rotation_deg)
    if count < 1 or abs(count * step.rotation_deg - degrees) > 1e-9:
        raise WordError(
            f"turns of {step.rotation_deg} degrees do not add up to {degrees:g}: choose a step that divides it"
        )
    return count


def full_turn(step: StepSize, key: str = "right") -> tuple[int, ...]:
    """360 degrees of yaw. WordError if the step's angle does not divide it."""
    return legs([key], [turn_actions(step, 360.0)])


def polygon(side: int, corners: int, step: StepSize, key: str = "right") -> tuple[int, ...]:
    """Walk along a regular polygon: `side` actions forward, then a turn, for each corner.

    Raises WordError for fewer than three corners or an angle that the step does not divide.
    """
    if corners < 3:
        raise WordError(f"a polygon of {corners} corners: give it at least 3")
    return legs(["w", key], [side, turn_actions(step, 360.0 / corners)]) * corners
