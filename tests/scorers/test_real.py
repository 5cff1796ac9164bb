"""The real packages in the environments that `wcpipe scorers install` makes, on a CPU with random weights.

Marker `scorers`: the first run makes three environments (8 GB, 10 to 20 minutes on two cores); later ones use them. CI
runs them (`make scorers`). CoTracker is not on PyPI: its test runs where somebody has installed it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.scorers import environments, self_test, workers
from pipeline.scorers.conventions import known_path
from pipeline.scorers.registry import measure_group
from pipeline.scorers.worker.protocol import Item
from pipeline.scorers.worker_settings import WorkerSettings, worker_settings

pytestmark = [pytest.mark.scorers, pytest.mark.timeout(2400)]
ROOT = Path(__file__).parents[2]
HOME = Path(os.environ.get("WCPIPE_SCORERS") or ROOT / ".scorers")


@pytest.fixture(scope="module", autouse=True)
def home() -> Any:
    before = os.environ.get("WCPIPE_SCORERS")
    os.environ["WCPIPE_SCORERS"] = str(HOME)
    yield HOME
    workers.close_workers()
    if before is None:
        del os.environ["WCPIPE_SCORERS"]


def wcpipe(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "stages.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """name -> settings with random weights, its environment made on first use."""
    known: dict[str, WorkerSettings] = {}

    def make(name: str) -> WorkerSettings:
        if name not in known:
            result = wcpipe("scorers", "install", name)
            assert result.returncode == 0, result.stderr[-3000:]
            folder = tmp_path_factory.mktemp(name)
            self_test.make_random_weights(name, folder)
            small = self_test.SMALL[name] | {"weights": str(folder), "device": "cpu", "item_seconds": 1200.0}
            known[name] = worker_settings(name, {name: small})
        return known[name]

    return make


def videos(count: int, frames: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    noise = rng.integers(-20, 21, (count, frames, 40, 64, 3))
    return np.clip(known_path()[0][None, :frames] + noise, 0, 255).astype(np.uint8)


def test_hpsv3_runs_and_its_scores_do_not_depend_on_the_batch(ready: Any) -> None:
    settings = ready("hpsv3")
    engine: Any = workers.open_worker("hpsv3", settings.model_copy(update={"caption": True}))
    engine = engine.for_group({"caption": "a {room} <|Reward|> with boxes"})
    frames = videos(3, 9)
    measured = measure_group(engine, frames, frames[0, :1], {})
    assert measured.reasons == {}
    assert engine.worker.version == "hpsv3 1.0.0, adapter 1"
    assert measured.arrays["new_quality"].shape == measured.arrays["caption"].shape == (3, 2)
    assert np.unique(measured.arrays["new_quality"]).size > 1
    assert (measured.arrays["caption"] != measured.arrays["new_quality"]).any()
    for batch, images in ((1, 1), (2, 3)):
        other: Any = workers.open_worker(
            "hpsv3", settings.model_copy(update={"caption": True, "batch": batch, "images": images})
        )
        again = measure_group(
            other.for_group({"caption": "a {room}  with boxes"}), frames[::-1], frames[0, :1], {}
        )
        np.testing.assert_allclose(
            again.arrays["new_quality"][::-1], measured.arrays["new_quality"], atol=1e-5
        )
    workers.close_workers()


def test_depth_anything_3_gives_rigid_poses_that_do_not_depend_on_the_batch(ready: Any) -> None:
    settings = ready("depth-anything-3")
    engine: Any = workers.open_worker("depth-anything-3", settings)
    frames = videos(2, 5)
    measured = measure_group(engine, frames, frames[0, :3], {})
    assert measured.reasons == {}
    assert engine.worker.version == "depth-anything-3 0.1.1, adapter 1"
    for name, shape in (("relative", (2, 4, 4, 4)), ("past_relative", (2, 4, 4))):
        poses = measured.arrays[name]
        assert poses.shape == shape
        rotation = poses[..., :3, :3]
        np.testing.assert_allclose(rotation @ np.swapaxes(rotation, -1, -2) - np.eye(3), 0, atol=1e-4)
        np.testing.assert_allclose(np.linalg.det(rotation), 1, atol=1e-4)
    alone = measure_group(engine, frames[1:], frames[0, :3], {})
    np.testing.assert_allclose(alone.arrays["relative"][0], measured.arrays["relative"][1], atol=1e-4)
    (one,) = engine.worker.measure([Item(frames[0, :1], about={"unit_frame": 0})])
    assert "two frames" in one.reason
    workers.close_workers()


def test_roma_matches_both_ways_and_its_samples_depend_on_the_seed_alone(ready: Any) -> None:
    settings = ready("roma")
    tracker = workers.open_tracker("roma", settings)
    frames = known_path()[0]
    points = np.array([[8.0, 8.0], [30.0, 20.0], [60.0, 36.0]], np.float32)
    tracks = tracker.follow(frames[:1], frames[1:2], points)
    assert tracks.end_PN2.shape == (1, 3, 2)
    assert ((tracks.confidence_PN >= 0) & (tracks.confidence_PN <= 1)).all()
    pair = np.stack([frames[0], frames[1]])
    items = [Item(pair, about={"sample": 20}, seed=seed) for seed in (1, 2, 1)]
    first, second, third = tracker.worker.measure(items)
    np.testing.assert_array_equal(first["first"], third["first"])
    assert (first["first"] != second["first"]).any()
    assert tracker.worker.version == "romatch 0.1.2, adapter 1"
    workers.close_workers()


@pytest.mark.parametrize("name", ["hpsv3", "depth-anything-3"])
def test_check_proves_an_installation_without_weights(ready: Any, name: str) -> None:
    ready(name)
    result = wcpipe("scorers", "check", name, "--random", "--json")
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout)
    assert found["passed"]
    assert found["weights"] == "random"


def test_the_real_cotracker_follows_points_where_it_is_installed(tmp_path: Path) -> None:
    if not environments.is_current("cotracker"):
        pytest.skip("cotracker is not installed (not on PyPI): `wcpipe scorers install cotracker`")
    self_test.make_random_weights("cotracker", tmp_path)
    small = self_test.SMALL["cotracker"] | {"weights": str(tmp_path), "device": "cpu", "item_seconds": 1200.0}
    tracker = workers.open_tracker("cotracker", worker_settings("cotracker", {"cotracker": small}))
    frames = known_path()[0]
    tracks = tracker.follow(frames[:1], frames[1:2], np.array([[8.0, 8.0], [30.0, 20.0]], np.float32))
    assert not np.isnan(tracks.confidence_PN).any()
    workers.close_workers()
