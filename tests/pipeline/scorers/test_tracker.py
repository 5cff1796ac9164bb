"""Both trackers: identity is exact, a shift is exact, unrelated frames are at the random level, nothing is NaN."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import DataError
from pipeline.rewards.closure import DiscrepancyConfig, pair_discrepancies
from pipeline.scorers.tracker import TRACKERS, LucasKanade, PatchMatcher, Tracker, Tracks
from pipeline.scorers.tracks import grid, texture_of, track_pairs

SIZE = (40, 64)
CONFIG = DiscrepancyConfig()


def texture(seed: int, size: tuple[int, int] = (72, 96)) -> np.ndarray:
    """A smooth random colour image, uint8: blobs of some pixels."""
    rng = np.random.default_rng(seed)
    image = rng.random((size[0] // 3 + 4, size[1] // 3 + 4, 3))
    y, x = np.arange(size[0]) / 3, np.arange(size[1]) / 3
    y0, x0 = y.astype(int), x.astype(int)
    fy, fx = (y - y0)[:, None, None], (x - x0)[None, :, None]
    rows = image[y0] * (1 - fy) + image[y0 + 1] * fy
    out = rows[:, x0] * (1 - fx) + rows[:, x0 + 1] * fx
    return (out * 255).astype(np.uint8)


def crop(image: np.ndarray, dx: int = 0, dy: int = 0) -> np.ndarray:
    return image[16 + dy : 16 + dy + SIZE[0], 16 + dx : 16 + dx + SIZE[1]]


def d_of(
    tracker: Tracker, first: np.ndarray, second: np.ndarray, config: DiscrepancyConfig = CONFIG
) -> float:
    found = track_pairs(tracker, first[None], second[None])
    arrays = {name: getattr(found, f"{name}_Q2N") for name in ("shift", "back", "colour", "confidence")}
    arrays["texture"] = found.texture_QN
    d = pair_discrepancies(arrays, texture_of(first), SIZE, config)[0].d
    assert 0 <= d <= config.d_fail + 1e-12
    return d


@pytest.fixture(params=sorted(TRACKERS))
def tracker(request: pytest.FixtureRequest) -> Tracker:
    return TRACKERS[request.param]()


def test_a_frame_and_itself_are_exactly_zero_apart(tracker: Tracker) -> None:
    frame = crop(texture(0))
    assert d_of(tracker, frame, frame) == 0.0
    tracks = tracker.follow(frame[None], frame[None], grid(SIZE))
    assert np.abs(tracks.end_PN2[0] - grid(SIZE)).max() < 1e-3
    assert (tracks.confidence_PN > 0.99).all()


@settings(max_examples=8, deadline=None)
@given(
    dx=st.integers(-4, 4),
    dy=st.integers(-4, 4),
    seed=st.integers(0, 3),
    name=st.sampled_from(sorted(TRACKERS)),
)
def test_a_known_shift_is_followed(dx: int, dy: int, seed: int, name: str) -> None:
    """Points whose neighbourhood stays in the frame land where they must, to a twentieth of a pixel."""
    image = texture(seed)
    tracks = TRACKERS[name]().follow(crop(image)[None], crop(image, dx, dy)[None], grid(SIZE))
    x, y = grid(SIZE).T
    inner = (x > 14) & (x < 50) & (y > 14) & (y < 26)
    moved = tracks.end_PN2[0, inner] - grid(SIZE)[inner]
    assert np.median(np.abs(moved - [-dx, -dy])) < 0.05
    assert np.abs(np.median(moved, axis=0) - [-dx, -dy]).max() < 0.05


def test_unrelated_frames_are_at_the_random_level(tracker: Tracker) -> None:
    found = [d_of(tracker, crop(texture(2 * s)), crop(texture(2 * s + 1))) for s in range(6)]
    assert np.mean(found) == pytest.approx(0.265, abs=0.01)


def test_descriptors_of_unrelated_frames_match_anywhere() -> None:
    """Without any guard, the mean distance of best matches is that of random points, 0.26 half perimeters."""
    raw = []
    for s in range(6):
        frames = crop(texture(2 * s))[None], crop(texture(2 * s + 1))[None]
        tracks = PatchMatcher(least_correlation=-1.0).follow(*frames, grid(SIZE))
        raw.append(np.hypot(*(tracks.end_PN2[0] - grid(SIZE)).T).mean() / sum(SIZE))
    assert np.mean(raw) == pytest.approx(0.26, abs=0.03)


@pytest.mark.parametrize("kind", ["black", "blur", "noise", "other"])
def test_no_spoiled_frame_is_closer_than_a_slightly_wrong_one(tracker: Tracker, kind: str) -> None:
    from pipeline.benchmark.cycle_controls import blurred

    image = texture(5)
    good = crop(image)
    spoiled = {
        "black": np.zeros_like(good),
        "blur": blurred(blurred(np.stack([good, good])))[1],
        "noise": np.random.default_rng(0).integers(0, 256, good.shape).astype(np.uint8),
        "other": crop(texture(6)),
    }[kind]
    assert d_of(tracker, good, spoiled) > d_of(tracker, good, crop(image, 1, 0))


def test_a_frame_without_texture_fails_and_is_not_nan(tracker: Tracker) -> None:
    flat, frame = np.full((*SIZE, 3), 90, np.uint8), crop(texture(1))
    assert d_of(tracker, flat, flat) == CONFIG.d_fail
    assert d_of(tracker, flat, frame) == CONFIG.d_fail
    assert d_of(tracker, frame, flat) == CONFIG.d_fail


def test_losing_texture_in_the_earlier_frame_hides_nothing() -> None:
    """A first half that is mostly flat keeps a few perfect points; the shortage against the first frame is charged."""
    first = crop(texture(1))
    poor = first.copy()
    poor[:, 16:] = 90
    found = track_pairs(LucasKanade(), poor[None], poor[None])
    arrays = {name: getattr(found, f"{name}_Q2N") for name in ("shift", "back", "colour", "confidence")}
    arrays["texture"] = found.texture_QN
    charged = pair_discrepancies(arrays, texture_of(first), SIZE, CONFIG)[0]
    free = pair_discrepancies(arrays, texture_of(poor), SIZE, CONFIG)[0]
    assert free.d == 0.0
    assert charged.d > 0.05


def test_pairs_do_not_influence_each_other(tracker: Tracker) -> None:
    first = np.stack([crop(texture(s)) for s in range(5)])
    second = np.stack([crop(texture(s), 2, 1) for s in range(5)])
    together = tracker.follow(first, second, grid(SIZE))
    alone = tracker.follow(first[3:4], second[3:4], grid(SIZE))
    assert np.array_equal(together.end_PN2[3], alone.end_PN2[0], equal_nan=True)
    assert np.array_equal(together.confidence_PN[3], alone.confidence_PN[0])
    none = tracker.follow(first[:0], second[:0], grid(SIZE))
    assert none.end_PN2.shape == (0, len(grid(SIZE)), 2)
    assert tracker.follow(first, second, grid(SIZE)[:0]).confidence_PN.shape == (5, 0)


def test_large_frames_are_shrunk_and_positions_come_back_in_pixels() -> None:
    image = np.kron(texture(3, (120, 160)), np.ones((2, 2, 1), np.uint8))
    first, second = image[20:180, 20:280], image[20:180, 28:288]
    points = grid((160, 260))
    tracks = PatchMatcher().follow(first[None], second[None], points)
    inner = (points[:, 0] > 60) & (points[:, 0] < 200) & (points[:, 1] > 40) & (points[:, 1] < 120)
    assert np.abs(np.nanmedian(tracks.end_PN2[0, inner] - points[inner], axis=0) - [-8, 0]).max() < 0.7
    assert len(points) < 1200  # the grid does not grow with the frame


def test_what_cannot_be_tracked_is_refused(tracker: Tracker) -> None:
    frame = crop(texture(0))[None]
    with pytest.raises(DataError, match="at least"):
        tracker.follow(frame[:, :16, :16], frame[:, :16, :16], grid(SIZE))
    with pytest.raises(DataError, match="uint8"):
        tracker.follow(frame.astype(np.float32), frame, grid(SIZE))
    with pytest.raises(DataError, match="one shape"):
        tracker.follow(frame, frame[:, :, :50], grid(SIZE))
    with pytest.raises(DataError, match="do not fit together"):
        Tracks(np.zeros((1, 3, 2), np.float32), np.zeros((1, 2, 2), np.float32), np.zeros((1, 3), np.float32))
