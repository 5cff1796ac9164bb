"""CycleBench on true renders and cheats: perfect where it must be, and every cheat is seen by some column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.benchmark.config import CycleBenchConfig
from pipeline.benchmark.cycle_controls import (
    CYCLE_CONTROLS,
    blurred,
    copied_back,
    other_room,
    palindrome,
    render_case,
    static,
)
from pipeline.benchmark.cyclebench import (
    CycleCase,
    Judges,
    evaluate_cycles,
    judge_by_oracle,
    make_cycle_cases,
    table,
)
from pipeline.scorers.registry import open_engine

CONFIG = CycleBenchConfig(settings=["composite"], rooms=1)
WANTED = ("w+right", "w+d, w+a, s+a, s+d", "w+right x 4")  # retracing, loop, repeated


@pytest.fixture(scope="module")
def cases() -> list[CycleCase]:
    made = make_cycle_cases(CONFIG, "mini")
    assert len(made) == 11
    return [case for case in made if case.word.name in WANTED]


@pytest.fixture(scope="module")
def judges(tiny_base: Path) -> Judges:
    return Judges.embedded(open_engine("pose", tiny_base), open_engine("critic", tiny_base))


@pytest.fixture(scope="module")
def judged(cases: list[CycleCase], judges: Judges) -> dict[str, list[dict[str, Any]]]:
    kinds = ("render", "static", "blurred", "palindrome", "random")
    return {
        kind: evaluate_cycles(
            cases, CYCLE_CONTROLS[kind], judges, 1, False, other_room(cases) if kind == "random" else None
        )
        for kind in kinds
    }


def mean(rows: list[dict[str, Any]], name: str) -> float:
    return float(np.mean([row[name] for row in rows if row[name] is not None]))


def test_cases_start_where_the_word_can_be_walked_and_are_the_same_again(cases: list[CycleCase]) -> None:
    again = [case for case in make_cycle_cases(CONFIG, "mini") if case.word.name in WANTED]
    for one, other in zip(cases, again, strict=True):
        assert one.prompt.about == other.prompt.about
        assert np.array_equal(one.prompt.first_frame_HW3, other.prompt.first_frame_HW3)
        video = render_case(one)
        assert np.array_equal(video[0], one.prompt.first_frame_HW3)
        assert np.array_equal(video[0], video[one.closed.cycles[-1].end])


def test_metrics_are_defined_by_the_word(judged: dict[str, list[dict[str, Any]]]) -> None:
    rows = {row["word"]: row for row in judged["render"]}
    assert rows["w+d, w+a, s+a, s+d"]["rps"] is None
    assert rows["w+right"]["rcs"] is None
    assert rows["w+right x 4"]["rcs"] is not None
    lines = {(line["task"], line["setting"]): line for line in table(judged["render"])}
    assert lines["all", "composite"]["videos"] == 3
    assert lines["closed", "composite"]["rps"] is None
    both = [rows[name]["rps"] for name in ("w+right", "w+right x 4")]
    assert lines["all", "composite"]["rps"] == pytest.approx(np.mean(both))


def test_a_true_render_is_perfect_and_unrelated_frames_are_at_the_random_level(
    judged: dict[str, list[dict[str, Any]]],
) -> None:
    assert mean(judged["render"], "esc") == 0.0
    assert mean(judged["render"], "failed") == 0.0
    assert mean(judged["render"], "coverage") > 0.99  # on a smooth wall a patch may be flat, and its point is lost
    assert mean(judged["render"], "closure_ratio") == 0.0
    assert mean(judged["random"], "esc") == pytest.approx(0.265, abs=0.012)


def test_cheats_that_close_perfectly_show_elsewhere(
    cases: list[CycleCase], judged: dict[str, list[dict[str, Any]]]
) -> None:
    assert mean(judged["static"], "esc") == 0.0
    assert mean(judged["palindrome"], "rps") < 0.002
    assert all(row["closure_ratio"] is None for row in judged["static"])  # it never left
    assert mean(judged["blurred"], "esc") > 0.02
    retracing, loop = cases[0], cases[1]
    true = render_case(retracing)
    assert np.array_equal(copied_back(true, retracing.closed), true)  # a perfect copy of a retracing cycle
    square = render_case(loop)
    assert np.abs(copied_back(square, loop.closed).astype(int) - square).mean() > 5  # but not of a loop
    half = (len(true) - 1) // 2
    assert np.array_equal(palindrome(true)[: 2 * half + 1], palindrome(true)[: 2 * half + 1][::-1])
    assert np.array_equal(static(true)[5], true[0])
    assert np.array_equal(blurred(true)[0], true[0])


def test_the_oracle_sees_where_the_camera_was(cases: list[CycleCase]) -> None:
    case = cases[0]
    true, slow = judge_by_oracle([case, case], [render_case(case), render_case(case, 0.5)])
    assert true["oracle_drift"] < 0.05
    assert true["oracle_excursion"] == pytest.approx(1.0, abs=0.05)
    assert true["oracle_accuracy"] == 1.0
    assert slow["oracle_excursion"] == pytest.approx(0.5, abs=0.1)
