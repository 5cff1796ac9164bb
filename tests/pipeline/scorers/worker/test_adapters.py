"""What the adapters promise about each package, against doubles that hold the package's contract (and its traps).

The real packages run in tests/scorers (marker `scorers`); CoTracker, which is no package of PyPI, has only this double
and an opt-in test there.
"""

from __future__ import annotations

import itertools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.camera import WORLDCOMPASS_STEP, WORLDPLAY_STEP, anchor, invert, poses_from_labels
from pipeline.scorers.worker.adapters import cotracker, depth_anything_3, hpsv3, roma
from pipeline.scorers.worker.protocol import Failed, Item

STEP_PATH = poses_from_labels([9, 3, 1, 36, 12, 4, 9, 27, 10, 2], WORLDPLAY_STEP)


def video(frames: int, height: int = 8, width: int = 12) -> np.ndarray:
    return np.random.default_rng(frames).integers(0, 255, (frames, height, width, 3), dtype=np.uint8)


# ---------------------------------------------------------------- HPSv3


class RewardDouble:
    """hpsv3's inferencer: mean and spread of each image; gradients unless it is told otherwise."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def reward(self, *, image_paths: list[Any], prompts: list[str]) -> torch.Tensor:
        assert torch.is_inference_mode_enabled()
        assert len(image_paths) == len(prompts)
        assert all(
            hpsv3.TOKEN not in prompt for prompt in prompts
        )  # it must stand once in a row, which hpsv3 adds
        self.calls.append(len(image_paths))
        values = [
            float(np.asarray(image).mean()) + len(prompt)
            for image, prompt in zip(image_paths, prompts, strict=True)
        ]
        return torch.tensor([[value, -1000.0] for value in values])


def hpsv3_adapter(images: int) -> tuple[hpsv3.HPSv3, RewardDouble]:
    adapter = hpsv3.HPSv3.__new__(hpsv3.HPSv3)
    adapter.images, adapter.scorer = images, RewardDouble()
    return adapter, adapter.scorer


def test_hpsv3_is_called_with_keywords_and_gives_the_mean_for_each_prompt() -> None:
    adapter, double = hpsv3_adapter(images=2)
    frames = video(5)
    (found,) = adapter.measure([Item(frames, about={"prompts": ["four", "<|Rew<|Reward|>ard|> {x}"]})])
    assert isinstance(found, dict)
    mean = frames.reshape(5, -1).mean(axis=1)
    np.testing.assert_allclose(found["score"], np.stack([mean + 4, mean + 3]), rtol=1e-6)
    assert double.calls == [2, 2, 1, 2, 2, 1]  # bounded memory


@given(st.text(max_size=30), st.text(max_size=30))
@settings(max_examples=60, deadline=None)
def test_no_prompt_smuggles_the_pooling_token(before: str, after: str) -> None:
    for prompt in (before + hpsv3.TOKEN + after, hpsv3.TOKEN[:5] + hpsv3.TOKEN + hpsv3.TOKEN[5:] + before):
        assert hpsv3.TOKEN not in hpsv3.clean(prompt)


# ---------------------------------------------------------------- Depth-Anything-3


class DepthDouble:
    """An exact estimator with DA3's traps: any world frame, another scale each call, (N, 3, 4) world-to-camera,
    `is_metric` an empty dict."""

    def __init__(self, c2w_F44: np.ndarray, depth: float = 2.0, poses: bool = True) -> None:
        self.c2w, self.depth, self.poses, self.calls = c2w_F44, depth, poses, 0

    def inference(self, image: list[np.ndarray], process_res: int, export_dir: None) -> SimpleNamespace:
        at = [int(frame[0, 0, 0]) for frame in image]
        self.calls += 1
        scale = 0.3 * 1.7**self.calls
        world = poses_from_labels([40, 13], WORLDCOMPASS_STEP)[-1]
        c2w = self.c2w[at].copy()
        c2w[:, :3, 3] *= scale
        c2w = world @ c2w
        depth = np.stack([np.full((4, 6), scale * self.depth * (1 + 0.1 * index)) for index in at])
        depth[:, 0] = 1e6  # sky, of which the model is not sure
        sure = np.ones((4, 6))
        sure[0] = 0.01
        return SimpleNamespace(
            depth=depth,
            conf=np.stack([sure] * len(at)),
            extrinsics=invert(c2w)[:, :3].astype(np.float32) if self.poses else None,
            intrinsics=None,
            is_metric={},
        )


def depth_adapter(double: DepthDouble, chunk: int) -> depth_anything_3.DepthAnything3:
    adapter = depth_anything_3.DepthAnything3.__new__(depth_anything_3.DepthAnything3)
    adapter.model, adapter.resolution, adapter.chunk = double, 56, chunk
    return adapter


def numbered(frames: int) -> np.ndarray:
    frames_FHW3 = np.zeros((frames, 4, 6, 3), np.uint8)
    frames_FHW3[:, 0, 0, 0] = np.arange(frames)
    return frames_FHW3


@pytest.mark.parametrize("chunk", [64, 11, 5, 3, 2])
@pytest.mark.parametrize("unit", [0, -1])
def test_da3_poses_are_camera_to_world_from_frame_0_in_units_of_the_shared_frame(
    chunk: int, unit: int
) -> None:
    adapter = depth_adapter(DepthDouble(STEP_PATH), chunk)
    (found,) = adapter.measure([Item(numbered(11), about={"unit_frame": unit})])
    assert isinstance(found, dict)
    expected = anchor(STEP_PATH)
    expected[:, :3, 3] /= 2.0 * (1 + 0.1 * (unit % 11))  # the depth of that frame, whatever scale a call had
    np.testing.assert_allclose(found["c2w"], expected, atol=1e-5)
    np.testing.assert_array_equal(found["c2w"][0], np.eye(4))


def test_da3_candidates_and_the_past_share_their_unit() -> None:
    """The frame before the clip is the past's last and the clip's first one; both calls have other scales."""
    double = DepthDouble(STEP_PATH)
    adapter = depth_adapter(double, 64)
    past, clip = adapter.measure(
        [
            Item(numbered(11)[:6], about={"unit_frame": 5}),
            Item(numbered(11)[5:], about={"unit_frame": 0}),
        ]
    )
    assert isinstance(past, dict)
    assert isinstance(clip, dict)
    joined = np.concatenate([past["c2w"], past["c2w"][-1] @ clip["c2w"][1:]])
    expected = anchor(STEP_PATH)
    expected[:, :3, 3] /= 2.0 * 1.5
    np.testing.assert_allclose(joined, expected, atol=1e-5)


@pytest.mark.parametrize("label", [0, 9])  # standing still, and straight ahead
def test_da3_needs_no_alignment_on_degenerate_paths(label: int) -> None:

    path = poses_from_labels([label] * 8, WORLDPLAY_STEP)
    (found,) = depth_adapter(DepthDouble(path), 64).measure([Item(numbered(9), about={"unit_frame": 0})])
    assert isinstance(found, dict)
    np.testing.assert_allclose(found["c2w"][:, :3, 3] * 2.0, path[:, :3, 3], atol=1e-5)


def test_da3_without_poses_or_depth_is_missing_with_the_reason() -> None:
    item = Item(numbered(4), about={"unit_frame": 0})
    (none,) = depth_adapter(DepthDouble(STEP_PATH, poses=False), 64).measure([item])
    assert isinstance(none, Failed)
    assert "gives no poses" in none.reason
    (flat,) = depth_adapter(DepthDouble(STEP_PATH, depth=np.nan), 64).measure([item])
    assert isinstance(flat, Failed)
    assert "not finite" in flat.reason
    (one,) = depth_adapter(DepthDouble(STEP_PATH), 64).measure([Item(numbered(1), about={"unit_frame": 0})])
    assert isinstance(one, Failed)


@given(st.integers(2, 400), st.integers(2, 80))
def test_chunks_cover_all_frames_and_share_one(frames: int, size: int) -> None:
    ranges = depth_anything_3.chunks(frames, size)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == frames
    assert all(2 <= stop - start <= size for start, stop in ranges)
    assert all(after[0] == before[1] - 1 for before, after in itertools.pairwise(ranges))


# ---------------------------------------------------------------- CoTracker


class PredictorDouble(torch.nn.Module):
    """CoTracker's predictors: every point moves by (2, -1) a frame. Integer queries are taken without an error and give
    garbage; without queries it divides by zero; the online one keeps its state until the next first step."""

    step = 8

    def __init__(self, checkpoint: str, offline: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.offline, self.queries, self.seen = offline, None, 0

    def forward(
        self, video: Any = None, queries: Any = None, video_chunk: Any = None, is_first_step: bool = False
    ) -> Any:
        if self.offline:
            return self._tracks(queries, video.shape[1])
        assert video_chunk.shape[1] == 2 * self.step
        if is_first_step:
            self.queries, self.seen = queries, 0
            return None, None
        self.seen += self.step
        return self._tracks(self.queries, self.seen + self.step)

    def _tracks(self, queries: torch.Tensor, frames: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert queries is not None
        noise = 0 if queries.is_floating_point() else 20
        time = torch.arange(frames)[None, :, None, None] - queries[:, None, :, :1]
        tracks = queries[:, None, :, 1:] + time * torch.tensor([2.0, -1.0]) + noise
        return tracks, torch.ones(tracks.shape[:3], dtype=torch.bool)


@pytest.fixture
def cotracker_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> dict[str, Any]:
    package, predictor = ModuleType("cotracker"), ModuleType("cotracker.predictor")
    predictor.CoTrackerPredictor = PredictorDouble  # type: ignore[attr-defined]
    predictor.CoTrackerOnlinePredictor = PredictorDouble  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cotracker", package)
    monkeypatch.setitem(sys.modules, "cotracker.predictor", predictor)
    for name in (cotracker.OFFLINE, cotracker.ONLINE):
        torch.save({"model": {"weight": torch.zeros(1)}}, tmp_path / name)
    return {"weights": str(tmp_path), "mode": "offline", "resolution": [64, 96]}


@pytest.mark.parametrize("mode", ["offline", "online"])
@pytest.mark.parametrize("frames", [2, 16, 17, 40])
def test_cotracker_follows_explicit_float_queries_and_starts_anew(
    cotracker_package: dict[str, Any], mode: str, frames: int
) -> None:
    adapter = cotracker.load(cotracker_package | {"mode": mode}, "cpu")
    assert adapter.model.interp_shape == (64, 96)
    queries = np.array([[0, 3, 100], [0, 5, 90]])  # integers on purpose
    for item_queries in (queries, queries[:1]):  # the second video must not see the first one's state
        (found,) = adapter.measure([Item(video(frames, 128, 128), {"queries": item_queries})])
        assert isinstance(found, dict)
        expected = item_queries[None, :, 1:] + np.arange(frames)[:, None, None] * np.array([2.0, -1.0])
        np.testing.assert_allclose(found["tracks"], expected)
        inside = ((expected >= -0.5) & (expected <= 127.5)).all(-1)
        np.testing.assert_array_equal(
            found["visible"], inside.astype(np.float32)
        )  # outside the frame is lost


def test_cotracker_needs_queries_and_says_how_to_get_it(
    cotracker_package: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = cotracker.load(cotracker_package, "cpu")
    (bad,) = adapter.measure([Item(video(3), {"queries": np.array([[0, np.nan, 1]])})])
    assert isinstance(bad, Failed)
    (none,) = adapter.measure([Item(video(3), {"queries": np.zeros((0, 3))})])
    assert isinstance(none, dict)
    assert none["tracks"].shape == (3, 0, 2)
    monkeypatch.setitem(sys.modules, "cotracker.predictor", None)
    with pytest.raises(ModuleNotFoundError, match="wcpipe scorers install cotracker"):
        cotracker.load(cotracker_package, "cpu")


def test_cotracker_weights_with_code_in_them_are_refused(cotracker_package: dict[str, Any]) -> None:
    import pickle
    from pathlib import Path

    class Evil:
        def __reduce__(self) -> Any:
            return (exec, ("raise SystemExit('executed')",))

    torch.save({"model": Evil()}, Path(cotracker_package["weights"]) / cotracker.OFFLINE)
    with pytest.raises(pickle.UnpicklingError):
        cotracker.load(cotracker_package, "cpu")


# ---------------------------------------------------------------- RoMa


class MatcherDouble:
    """RoMa's matcher where the second frame is the first one moved by (dx, dy) pixels: pixel *edges* are -1 and 1."""

    def __init__(self, dx: float, dy: float, certainty: float = 0.9) -> None:
        self.shift, self.certainty = (dx, dy), certainty

    def match(self, first: Any, second: Any) -> tuple[torch.Tensor, torch.Tensor]:
        width, height = first.size
        H, W = 20, 30  # the size it works at
        y, x = torch.meshgrid(
            torch.linspace(-1 + 1 / H, 1 - 1 / H, H), torch.linspace(-1 + 1 / W, 1 - 1 / W, W), indexing="ij"
        )
        grid = torch.stack([x, y], -1)
        move = torch.tensor([2 * self.shift[0] / width, 2 * self.shift[1] / height])
        there, back = (grid + move).clamp(-1, 1), (grid - move).clamp(-1, 1)
        warp = torch.cat([torch.cat([grid, there], -1), torch.cat([back, grid], -1)], 1)
        certainty = torch.full((H, 2 * W), self.certainty)
        certainty[:, :W][(grid + move).abs().amax(-1) > 1] = 0
        certainty[:, W:][(grid - move).abs().amax(-1) > 1] = 0
        return warp[None], certainty[None]

    def sample(
        self, warp: torch.Tensor, certainty: torch.Tensor, num: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.multinomial(certainty.reshape(-1), num)
        return warp.reshape(-1, 4)[at], certainty.reshape(-1)[at]


def roma_adapter(double: MatcherDouble) -> roma.RoMa:
    adapter = roma.RoMa.__new__(roma.RoMa)
    adapter.model, adapter.device = double, "cpu"
    return adapter


def test_roma_points_have_no_half_pixel_shift_and_come_back() -> None:
    points = np.array([[10.0, 8.0], [20.5, 30.25], [40.0, 20.0]], np.float32)
    adapter = roma_adapter(MatcherDouble(3.0, -2.0))
    (found,) = adapter.measure([Item(video(2, 40, 64), {"points": points})])
    assert isinstance(found, dict)
    np.testing.assert_allclose(found["end"], points + np.array([3, -2]), atol=1e-3)
    np.testing.assert_allclose(found["back"], points, atol=1e-3)
    np.testing.assert_allclose(found["confidence"], 0.9, atol=1e-5)


def test_roma_is_sure_of_nothing_that_left_the_frame() -> None:
    (found,) = roma_adapter(MatcherDouble(30.0, 0.0)).measure(
        [Item(video(2, 40, 64), {"points": np.array([[60.0, 20.0], [5.0, 20.0]], np.float32)})]
    )
    assert isinstance(found, dict)
    assert found["confidence"][0] < 1e-3
    assert found["confidence"][1] > 0.8


def test_roma_samples_alike_in_any_order_and_fails_where_it_is_sure_of_nothing() -> None:
    items = [Item(video(2, 40, 64), about={"sample": 6}, seed=seed) for seed in (1, 2)]
    adapter = roma_adapter(MatcherDouble(3.0, 0.0))
    forward, backward = list(adapter.measure(items)), list(adapter.measure(items[::-1]))[::-1]
    for one, other in zip(forward, backward, strict=True):
        assert isinstance(one, dict)
        assert isinstance(other, dict)
        np.testing.assert_array_equal(one["first"], other["first"])
        np.testing.assert_allclose(one["second"] - one["first"], np.tile([3.0, 0.0], (6, 1)), atol=0.05)
    (nothing,) = roma_adapter(MatcherDouble(0, 0, certainty=0.0)).measure(items[:1])
    assert isinstance(nothing, Failed)
    assert "certain of no match" in nothing.reason
    (three,) = adapter.measure([Item(video(3, 40, 64), about={"sample": 6})])
    assert isinstance(three, Failed)


@given(st.floats(-50, 150), st.floats(-50, 150), st.integers(1, 400), st.integers(1, 400))
def test_roma_coordinates_are_inverse_and_centred(x: float, y: float, width: int, height: int) -> None:
    back = roma.to_pixels(roma.to_unit(np.array([[x, y]]), width, height), width, height)
    np.testing.assert_allclose(back, [[x, y]], atol=1e-3)
    corners = roma.to_unit(np.array([[-0.5, -0.5], [width - 0.5, height - 0.5]]), width, height)
    np.testing.assert_allclose(corners, [[-1, -1], [1, 1]], atol=1e-5)
