"""What an epoch samples: levels, target clips that come back, and the training mix untouched."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from pipeline import config
from pipeline.cycle_config import CycleConfig
from pipeline.plan import candidate_frames, plan_inputs, plan_of, returning_clips
from pipeline.rollout import target_clip


def params(tmp_path: Path, text: str) -> config.Params:
    (tmp_path / "params.yaml").write_text(text)
    return config.load(tmp_path / "params.yaml")


def test_the_training_mix_is_as_it_was(tmp_path: Path) -> None:
    plain = params(tmp_path, "target: {n_min: 1, n_max: 3}\n")
    for epoch in range(1, 9):
        plan = plan_of(plain, epoch)
        assert (plan.clip, plan.first, plan.about()) == (target_clip(epoch, 1, 3), plan.clip, {})
    assert plan_inputs(plain) == {}


def test_levels_are_drawn_alike_and_the_target_comes_back(tmp_path: Path) -> None:
    cycles = params(tmp_path, "cycle: {words: retracing, smallest: 1, levels: 4}\n")
    plans = [plan_of(cycles, epoch) for epoch in range(1, 401)]
    levels = Counter(plan.level for plan in plans)
    assert set(levels) == {0, 1, 2, 3}
    assert min(levels.values()) > 60  # of 100 each
    for plan in plans:
        assert plan.cycle_clips == 16 >> (plan.level or 0)
        assert plan.clip in returning_clips(16, plan.cycle_clips)
        assert plan.first == plan.clip
    deepest = {plan.clip for plan in plans if plan.level == 3}
    assert deepest == set(range(2, 17))  # turns and returns everywhere
    assert plan_of(cycles, 7) == plan_of(cycles, 7)


def test_whole_videos_end_with_the_tail(tmp_path: Path) -> None:
    cycles = params(tmp_path, "cycle: {words: retracing, levels: 2}\nrollout: {mode: cycle}\n")
    plan = plan_of(cycles, 1)
    assert (plan.first, plan.clip) == (1, 4)
    record = {"target_clip": 4, "first_clip": 1, "stride": 4, "clip_latents": 4}
    assert candidate_frames(record) == slice(0, 61)
    assert candidate_frames(record | {"first_clip": 4}) == slice(45, 61)
    assert plan_inputs(cycles)["mode"] == "cycle"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cycle: {words: retracing, levels: 5}", "32 clips, above cycle.max_clips = 16"),
        ("cycle: {words: retracing, smallest: 3, levels: 3}", "24 clips, above"),
        ("cycle: {words: retracing, levels: 3, max_clips: 4}", "8 clips, above cycle.max_clips = 4"),
        ("cycle: {words: relation, relation_clips: 9, max_clips: 8}", "relation_clips is 9"),
        ("cycle: {wrds: retracing}", "unknown key 'cycle.wrds'; did you mean 'words'"),
        ("score: {scorers: [pose, critic, tracks]}", "cycle.words is none"),
        ("rollout: {mode: cycle}", "no word closes"),
        ("advantage: {weights: {spatial: 1.0}}", "needs the scorer 'tracks'"),
    ],
)
def test_what_does_not_fit_is_said(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(config.ConfigError, match=message):
        params(tmp_path, text + "\n")


CLOSED = "score: {scorers: [pose, critic, tracks]}\nrewards: {closure: {alpha: 5.0}}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cycle: {words: retracing, levels: 1}\nadvantage: {weights: {temporal: 0.5}}", "single cycles only"),
        (
            "cycle: {words: retracing}\nadvantage: {weights: {relation: 1.0}}",
            "no epoch has cycle.words: relation",
        ),
        (
            "cycle: {words: relation}\nadvantage: {weights: {spatial: 1.0}}",
            "no epoch has cycle.words: retracing",
        ),
        (
            "cycle: {words: retracing}\nadvantage: {weights: {spatial: 1.0}}\nrewards: {closure: {alpha: null}}",
            "alpha is not set.*wcpipe calibrate",
        ),
        ("cycle: {words: retracing}\nrewards: {closure: {alpha: 0}}", "rewards.closure.alpha is 0"),
        ("cycle: {words: retracing}\nrewards: {closure: {alfa: 1}}", "did you mean 'alpha'"),
    ],
)
def test_closure_rewards_need_what_they_measure(tmp_path: Path, text: str, message: str) -> None:
    lines = CLOSED if "rewards:" not in text else CLOSED.splitlines()[0] + "\n"
    with pytest.raises(config.ConfigError, match=message):
        params(tmp_path, lines + text + "\n")


def test_a_single_cycle_may_be_logged_and_epochs_may_differ(tmp_path: Path) -> None:
    params(
        tmp_path,
        CLOSED + "cycle: {words: retracing, levels: 1}\nadvantage: {weights: {spatial: 1, temporal: 0}}\n",
    )
    both = CLOSED + (
        "cycle: {words: retracing}\nadvantage: {weights: {spatial: 1, relation: 1}}\n"
        "epochs: {e001: {prev: e000}, e002: {prev: e001, cycle: {words: relation}}}\n"
    )
    loaded = params(tmp_path, both)
    assert plan_of(loaded.for_epoch("e002"), 2).words == "relation"
    assert plan_of(loaded.for_epoch("e001"), 1).words == "retracing"
    assert CycleConfig().words == "none"
