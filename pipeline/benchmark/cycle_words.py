"""The 47 words of CycleBench: four families of closed words at 32, 64 and 96 latents, and compound ones at 32.

The published trajectories are not available; this set is a reconstruction from the page's figure (spec/worldcycle.md
2.1), fixed by its digest so that results stay comparable. The choice of keys, and the compound words of the last three
families, are ours. Every word fills its video but for one no-op: T latents have T - 1 actions, so a loop of whole clips
is two actions shorter than drawn in the figure (two opposite legs lose one) and the action left over is idle.

Words hold no step size: a retracing part is written as its way out, and `build` makes poses for a world's step.

The second set, `mini`, is the same four families at half the lengths: the published ones walk through the walls of the
mini world's rooms. Its long ways out take a corner for the same reason.
"""

from dataclasses import dataclass
from typing import Literal

from pipeline.actions import format_word
from pipeline.camera import StepSize
from pipeline.closed_words import legs
from pipeline.cycles import ClosedWord, Part, compose
from pipeline.digests import digest_of

SETTINGS = {"short": 32, "mid": 64, "long": 96, "composite": 32}  # latents
TASKS = ("reversible", "closed", "repeated", "cascaded")
DIGEST = "1d3473f3885f32aeb9e23a74b42fd28e7a915e63530013c19c5f83e22b2b0029"
MINI_DIGEST = "6e27aa9793b6bc9cc04c4fde10e8755bdb0cba60e5ae79193ec5ecd8b1479d25"


@dataclass(frozen=True)
class CycleWord:
    """A word of the benchmark: its task and setting, the latents of its video and its cycles in order."""

    task: str
    setting: str
    name: str
    latents: int
    parts: tuple[Part, ...]

    def build(self, step: StepSize) -> ClosedWord:
        """Labels and poses for a world's step. Raises WordError if the word does not close or read back with it."""
        return compose(self.parts, step, self.latents - 1)


def cyclebench_words(which: Literal["published", "mini"] = "published") -> list[CycleWord]:
    """All words of a set, in a fixed order: 47 at the published lengths, or as many at half of them."""
    half = 1 if which == "published" else 2
    simple = ("short", "mid", "long")
    words = [word for setting in simple for word in _simple(setting, SETTINGS[setting] // half, half > 1)]
    return words + _composite(SETTINGS["composite"] // half)


def words_digest(words: list[CycleWord]) -> str:
    """Identity of a set of words: everything that decides what a model is asked to do."""
    return digest_of(
        [
            [
                w.task,
                w.setting,
                w.name,
                w.latents,
                [[format_word(p.labels), p.retracing, p.family] for p in w.parts],
            ]
            for w in words
        ]
    )


def _loop(keys: str, side: int, family: int = 0, shorter: int = 0) -> Part:
    """A square of single keys; `shorter` is taken off its first and third leg."""
    return Part(legs(keys, [side - shorter, side, side - shorter, side]), False, family)


def _out(key: str, length: int, family: int = 0) -> Part:
    return Part(legs([key], [length]), True, family)


def _bend(key: str, other: str, length: int) -> Part:
    """A way out that takes a corner halfway."""
    return Part(legs([key, other], [length - length // 2, length // 2]), True)


def _simple(setting: str, latents: int, bent: bool) -> list[CycleWord]:
    unit = latents // 16  # actions of one of the 16 keys of the published figure

    def word(task: str, name: str, *parts: Part) -> CycleWord:
        return CycleWord(task, setting, name, latents, parts)

    out = latents // 2 - 1
    corner = {"w": "d", "s": "a", "d": "s", "a": "w"}
    words = [
        word(
            "reversible",
            key,
            _bend(key, corner[key], out) if bent and setting == "long" and key in corner else _out(key, out),
        )
        for key in ("w", "s", "d", "a", "right", "left")
    ]
    words += [word("closed", keys, _loop(keys, latents // 4, shorter=1)) for keys in ("wasd", "wdsa")]
    # 16 latents hold two squares of side 2, not four of side 1: the last one of those could not be shortened
    side, times = (unit, 4) if unit > 1 else (2, 2)
    for keys in ("wasd", "dwas"):
        repeated = [_loop(keys, side)] * (times - 1)
        words.append(word("repeated", f"{keys} x {times}", *repeated, _loop(keys, side, shorter=1)))
    for first, second, third, last in (("w", "wasd", "a", "dwas"), ("d", "dsaw", "s", "wdsa")):
        parts = [_out(first, 2 * unit, 0), _loop(second, unit, 1)]
        if unit > 1:
            parts += [_out(third, 2 * unit, 2), _loop(last, unit, 3, shorter=1)]
        else:
            parts += [_out(third, 3, 2)]
        names = (first, second, third, last) if unit > 1 else (first, second, third)
        words.append(word("cascaded", ", ".join(names), *parts))
    return words


def _composite(latents: int) -> list[CycleWord]:
    def word(task: str, name: str, *parts: Part) -> CycleWord:
        return CycleWord(task, "composite", name, latents, parts)

    turning = ("w+right", "w+left", "s+right", "d+left", "a+right")
    words = [word("reversible", keys, _out(keys, latents // 2 - 1)) for keys in turning]
    # Moves with a turn do not close on another way within 31 actions; diagonals do.
    for diagonals in (("w+d", "w+a", "s+a", "s+d"), ("w+a", "w+d", "s+d", "s+a")):
        lengths = [latents // 4 - 1, latents // 4] * 2
        words.append(word("closed", ", ".join(diagonals), Part(legs(diagonals, lengths), False)))
    unit = latents // 8
    for keys in ("w+right", "d+left"):
        words.append(word("repeated", f"{keys} x 4", *[_out(keys, unit)] * 3, _out(keys, unit - 1)))
    for cascade in (("w+right", "w+left", "d+right", "a+left"), ("w+left", "s+left", "a+right", "w+right")):
        parts = [_out(keys, unit if i < 3 else unit - 1, i) for i, keys in enumerate(cascade)]
        words.append(word("cascaded", ", ".join(cascade), *parts))
    return words
