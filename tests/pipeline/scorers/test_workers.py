"""Real scorers as engines: what they ask of a worker, what becomes of its answers, and who chooses them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import config
from pipeline.camera import WORLDPLAY_STEP, poses_from_labels, relative_poses
from pipeline.errors import CheckpointError, ConfigError, DataError, DependencyError, ScorerUnavailable
from pipeline.pairs import FramePairs
from pipeline.rewards import find
from pipeline.rewards.base import RawScores, RewardContext
from pipeline.scorers import environments, workers
from pipeline.scorers.choice import choose
from pipeline.scorers.registry import AsksRecord, measure_group
from pipeline.scorers.worker.protocol import Failed, Item, Outcome
from pipeline.scorers.worker_settings import SETTINGS, DepthAnything3Settings, HPSv3Settings, worker_settings

FRAMES = np.zeros((8, 17, 40, 64, 3), np.uint8)
FRAMES[:, :, 0, 0, 0] = np.arange(8)[:, None]
FRAMES[:, :, 0, 1, 0] = np.arange(17)
PAST = np.zeros((13, 40, 64, 3), np.uint8)
PAST[:, 0, 1, 0] = np.arange(13)


class WorkerDouble:
    """Answers in-process what `answer(item)` says; candidate 3 fails where it is told to."""

    version = "double"

    def __init__(self, answer: Callable[[Item], Outcome], fails: int | None = None) -> None:
        self.answer, self.fails = answer, fails
        self.items: list[Item] = []

    def measure(self, items: Sequence[Item]) -> list[Outcome]:
        self.items += items
        failed = Failed("the worker was killed by SIGKILL")
        return [failed if item.video_FHW3[0, 0, 0, 0] == self.fails else self.answer(item) for item in items]


def scores(item: Item) -> Outcome:
    """10 times the candidate, the frame's number, and the length of the prompt in thousandths."""
    number = item.video_FHW3[:, 0, 1, 0].astype(np.float64)
    rows = [
        10.0 * item.video_FHW3[0, 0, 0, 0] + number + len(prompt) / 1000 for prompt in item.about["prompts"]
    ]
    return {"score": np.stack(rows)}


def hpsv3(settings: HPSv3Settings, fails: int | None = None) -> tuple[Any, WorkerDouble]:
    double = WorkerDouble(scores, fails)
    return workers.HPSv3Engine(double, settings), double  # type: ignore[arg-type]


def raw(measured: Any) -> dict[str, RawScores]:
    reasons = tuple(measured.reasons.get(g) for g in range(8))
    return {"critic": RawScores(measured.arrays, reasons)}


CONTEXT = RewardContext(np.zeros(17, np.int64), 4, WORLDPLAY_STEP)


def test_hpsv3_judges_the_last_frame_of_each_latent_and_the_first_of_the_video() -> None:
    engine, _ = hpsv3(HPSv3Settings(prompt="12345"))
    measured = measure_group(engine, FRAMES, PAST, {})
    assert measured.reasons == {}
    expected = 10 * np.arange(8)[:, None] + np.array([4, 8, 12, 16]) + 0.005
    np.testing.assert_allclose(measured.arrays["new_quality"], expected, rtol=1e-6)
    np.testing.assert_allclose(measured.arrays["first"], 0.005, rtol=1e-6)
    for spec in engine.arrays(8, 17, 13):
        assert measured.arrays[spec.name].shape == spec.shape
    quality, drift = find("quality"), find("quality_drift")
    np.testing.assert_allclose(
        quality.compute(raw(measured), CONTEXT, quality.config()).value_G, expected.mean(1)
    )
    drifted = -np.abs(expected - 0.005).mean(1)
    np.testing.assert_allclose(
        drift.compute(raw(measured), CONTEXT, drift.config()).value_G, drifted, rtol=1e-5
    )


def test_hpsv3_judges_for_the_caption_of_the_group_as_a_reward_of_its_own() -> None:
    engine, _ = hpsv3(HPSv3Settings(prompt="12345", caption=True))
    assert isinstance(engine, AsksRecord)
    measured = measure_group(engine.for_group({"caption": "a red room"}), FRAMES, PAST, {})
    caption = find("quality_caption")
    values = caption.compute(raw(measured), CONTEXT, caption.config()).value_G
    np.testing.assert_allclose(values, 10 * np.arange(8) + 10 + 0.010, rtol=1e-6)
    without = measure_group(engine, FRAMES, PAST, {})
    assert set(without.reasons) == set(range(8))
    assert "no caption" in without.reasons[0]


def test_hpsv3_follows_the_frames_of_a_latent() -> None:
    engine, _ = hpsv3(HPSv3Settings())
    assert engine.judged(17) == [4, 8, 12, 16]
    assert engine.for_group({"stride": 1}).judged(5) == [1, 2, 3, 4]  # the mini world
    assert hpsv3(HPSv3Settings(every=2))[0].for_group({"stride": 4}).judged(5) == [2, 4]


def test_hpsv3_without_a_frame_to_judge_is_refused() -> None:
    engine, _ = hpsv3(HPSv3Settings(every=4))
    with pytest.raises(DataError, match="every is 4, above the 3 frames of a clip"):
        engine.arrays(8, 4, 1)


def test_one_of_eight_that_fails_leaves_seven_and_a_retry_asks_for_that_one_only() -> None:
    engine, double = hpsv3(HPSv3Settings(), fails=3)
    measured = measure_group(engine, FRAMES, PAST, {})
    assert measured.reasons == {3: "the worker was killed by SIGKILL"}
    assert np.isnan(measured.arrays["new_quality"][3]).all()
    assert np.isfinite(np.delete(measured.arrays["new_quality"], 3, axis=0)).all()
    double.fails, double.items = None, []
    again = measure_group(engine, FRAMES, PAST, {}, measured)
    assert again.reasons == {}
    assert [int(item.video_FHW3[0, 0, 0, 0]) for item in double.items] == [
        0,
        3,
    ]  # the video's first frame, and it
    np.testing.assert_array_equal(
        np.delete(again.arrays["new_quality"], 3, 0), np.delete(measured.arrays["new_quality"], 3, 0)
    )


def test_a_value_of_another_shape_is_missing() -> None:
    double = WorkerDouble(lambda item: {"score": np.zeros((1, 1 if len(item.video_FHW3) == 1 else 99))})
    measured = measure_group(workers.HPSv3Engine(double, HPSv3Settings()), FRAMES, PAST, {})  # type: ignore[arg-type]
    assert "shape" in measured.reasons[0]
    assert len(measured.reasons) == 8


def poses(item: Item) -> Outcome:
    path = poses_from_labels([9] * 8 + [1] * 8, WORLDPLAY_STEP)[: len(item.video_FHW3)].copy()
    path[:, :3, 3] *= 7.0
    return {"c2w": path}


def test_depth_anything_gives_relative_motions_and_names_the_shared_frame() -> None:
    double = WorkerDouble(poses, fails=3)
    engine: Any = workers.DepthAnything3Engine(double, DepthAnything3Settings())  # type: ignore[arg-type]
    measured = measure_group(engine, FRAMES, PAST, {})
    assert measured.reasons == {3: "the worker was killed by SIGKILL"}
    expected = relative_poses(poses(Item(FRAMES[0]))["c2w"])  # type: ignore[index]
    np.testing.assert_allclose(measured.arrays["relative"][0], expected)
    assert measured.arrays["past_relative"].shape == (12, 4, 4)
    assert [item.about["unit_frame"] for item in double.items] == [0] * 8 + [12]  # the frame before the clip
    for spec in engine.arrays(8, 17, 13):
        assert measured.arrays[spec.name].shape == spec.shape
    bad_past = WorkerDouble(lambda item: Failed("no depth") if len(item.video_FHW3) == 13 else poses(item))
    engine = workers.DepthAnything3Engine(bad_past, DepthAnything3Settings())  # type: ignore[arg-type]
    assert measure_group(engine, FRAMES, PAST, {}).reasons[0] == "RuntimeError: no depth"


def test_poses_without_units_are_scaled_by_the_scene() -> None:
    from pipeline.rewards.action import ActionConfig

    assert not ActionConfig().fitted
    assert ActionConfig(scorer="depth-anything-3").fitted
    assert ActionConfig(scale="scene").fitted
    assert not ActionConfig(scale="world").fitted


def moved(item: Item) -> Outcome:
    """Both trackers' answers for a second frame that is the first one moved by 3 pixels to the right."""
    if "points" in item.arrays:
        points = item.arrays["points"]
        return {"end": points + np.array([3, 0]), "back": points, "confidence": np.full(len(points), 0.8)}
    way = 3 if item.video_FHW3[0, 0, 2, 0] == 0 else -3
    start = item.arrays["queries"][:, 1:]
    return {"tracks": np.stack([start, start + np.array([way, 0])]), "visible": np.ones((2, len(start)))}


@pytest.mark.parametrize("kind", [workers.CoTrackerPairs, workers.RoMaPairs])
def test_both_trackers_follow_there_and_back_as_the_embedded_ones_do(kind: Any) -> None:
    first = FRAMES[:, 0].copy()
    second = first.copy()
    second[:, 0, 2, 0] = 1
    points = np.array([[10.0, 10.0], [30.0, 20.0]], np.float32)
    tracks = kind(WorkerDouble(moved)).follow(first, second, points)
    np.testing.assert_allclose(tracks.end_PN2, np.tile(points + np.array([3, 0], np.float32), (8, 1, 1)))
    np.testing.assert_allclose(tracks.back_PN2, np.tile(points, (8, 1, 1)))
    assert (tracks.confidence_PN > 0).all()
    partly = kind(WorkerDouble(moved, fails=3)).follow(first, second, points)
    assert np.isnan(partly.confidence_PN[3]).all()  # unknown, and not lost
    assert np.isfinite(np.delete(partly.confidence_PN, 3, axis=0)).all()
    empty = kind(WorkerDouble(moved)).follow(first[:0], second[:0], points)
    assert empty.end_PN2.shape == (0, 2, 2)


def test_a_pair_that_a_worker_cannot_track_makes_its_candidate_missing() -> None:
    engine = workers.WorkerTracksEngine(workers.CoTrackerPairs(WorkerDouble(moved, fails=3)))  # type: ignore[arg-type]
    pairs = FramePairs(np.array([[5, 20], [9, 28]]), np.array([0, 0]))
    bound = engine.for_pairs(pairs, room=2, size_HW=(40, 64))
    measured = measure_group(bound, FRAMES, PAST, {})
    assert set(measured.reasons) == {3}
    assert np.isfinite(np.delete(measured.arrays["shift"], 3, axis=0)).all()
    assert engine.name == "cotracker"


# ---------------------------------------------------------------- who chooses


def load(tmp_path: Path, *overrides: str) -> config.Params:
    path = tmp_path / "params.yaml"
    path.write_text(
        "epochs: {e001: {prev: e000}}\nadvantage: {weights: {action_fine: 2.0, quality_drift: 1.0}}\n"
    )
    return config.load(path, overrides)


def test_rewards_name_the_engine_and_old_parameters_mean_the_embedded_ones(tmp_path: Path) -> None:
    old = load(tmp_path)
    assert [choose(name, old).worker for name in old.score.scorers] == [None, None]
    new = load(tmp_path, "rewards.quality.scorer=hpsv3", "rewards.action.scorer=depth-anything-3")
    assert [choose(name, new).worker for name in new.score.scorers] == ["depth-anything-3", "hpsv3"]
    tracks = load(tmp_path, "rewards.closure.scorer=cotracker")
    assert choose("tracks", tracks).worker == "cotracker"
    beside = load(tmp_path, "score.scorers=[pose, critic, hpsv3]")
    assert choose("hpsv3", beside).worker == "hpsv3"
    assert choose("critic", beside).worker is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rewards.quality.scorer=depth-anything-3"],
            r"quality\.scorer is 'depth-anything-3'; known here: critic, hpsv3",
        ),
        (["rewards.action.scorer=hpsv3"], r"action\.scorer is 'hpsv3'; known here: pose, depth-anything-3"),
        (["score.scorers=[pose, critic, hspv3]"], "unknown scorer 'hspv3'; did you mean 'hpsv3'"),
        (["score.workers={hpsv4: {}}"], r"unknown key 'score\.workers\.hpsv4'; did you mean 'hpsv3'"),
        (["score.workers={hpsv3: {promt: x}}"], r"score\.workers\.hpsv3\.promt.*did you mean 'prompt'"),
        (["score.workers={depth-anything-3: {resolution: 500}}"], "multiple of 14"),
        (
            ["rewards.action.scorer=depth-anything-3", "rewards.action.scale=world"],
            r"action\.scale is 'world', but depth-anything-3 measures without units: set it to scene",
        ),
        (
            ["advantage.weights={quality_caption: 1.0}"],
            r"quality_caption needs rewards\.quality\.scorer: hpsv3 and",
        ),
    ],
)
def test_what_cannot_be_is_said_when_the_file_is_read(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, *overrides)


def installed(home: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: str = "1.0.0") -> None:
    import sys

    monkeypatch.setenv("WCPIPE_SCORERS", str(home))
    record = {"scorer": name, "python": sys.executable, "requirements": "x", "packages": {name: version}}
    (home / name).mkdir(parents=True, exist_ok=True)
    (home / name / environments.RECORD).write_text(json.dumps(record))


def test_identity_is_package_weights_and_what_changes_values_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WCPIPE_SCORERS", str(tmp_path / "home"))
    weights = tmp_path / "weights"
    settings = HPSv3Settings(weights=str(weights))
    with pytest.raises(DependencyError, match="no environment of hpsv3; run `wcpipe scorers install hpsv3`"):
        workers.worker_digest("hpsv3", settings)
    installed(tmp_path / "home", monkeypatch, "hpsv3")
    with pytest.raises(CheckpointError, match=r"HPSv3\.safetensors: is missing; `wcpipe scorers list hpsv3`"):
        workers.worker_digest("hpsv3", settings)
    (weights / "Qwen2-VL-7B-Instruct").mkdir(parents=True)
    (weights / "HPSv3.safetensors").write_bytes(b"1")
    (weights / "Qwen2-VL-7B-Instruct" / "config.json").write_text("{}")
    first = workers.worker_digest("hpsv3", settings)
    same = {"batch": 1, "device": "cuda:1", "tries": 5, "images": 1, "item_seconds": 1.0, "keep": False}
    assert workers.worker_digest("hpsv3", settings.model_copy(update=same)) == first
    for change in ({"prompt": "other"}, {"caption": True}, {"every": 1}):
        assert workers.worker_digest("hpsv3", settings.model_copy(update=change)) != first
    moved_to = tmp_path / "elsewhere"
    weights.rename(moved_to)
    there = settings.model_copy(update={"weights": str(moved_to)})
    assert workers.worker_digest("hpsv3", there) == first
    (moved_to / "HPSv3.safetensors").write_bytes(b"2")
    assert workers.worker_digest("hpsv3", there) != first
    installed(tmp_path / "home", monkeypatch, "hpsv3", "1.0.1")
    assert workers.worker_digest("hpsv3", there) != first


def test_a_worker_without_its_package_stops_the_stage_and_is_no_missing_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment is this one, which has no hpsv3: every clip would fail alike."""
    installed(tmp_path, monkeypatch, "hpsv3")
    engine = workers.open_worker("hpsv3", HPSv3Settings(weights=str(tmp_path)))
    try:
        with pytest.raises(ScorerUnavailable, match="ModuleNotFoundError: No module named 'hpsv3'"):
            measure_group(engine, FRAMES, PAST, {})
    finally:
        workers.close_workers()


def test_every_real_scorer_has_settings_an_environment_requirements_and_a_check() -> None:
    from pipeline.scorers.self_test import CHECKS
    from pipeline.scorers.worker.random_weights import MAKERS
    from pipeline.scorers.worker.serve import ADAPTERS

    names = set(SETTINGS)
    assert names == set(environments.ABOUT) == set(ADAPTERS) == set(MAKERS) == set(CHECKS)
    for name in names:
        assert (environments.REQUIREMENTS / f"{name}.txt").exists()
        assert worker_settings(name, {}).weights
        assert workers.weight_files(name, worker_settings(name, {}))
