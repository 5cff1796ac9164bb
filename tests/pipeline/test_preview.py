"""What is written can be opened again: sizes, order of the rows, and one line where videos do not fit together."""

from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from pipeline.errors import DataError
from pipeline.preview import Row, grid, write_mp4, write_png

KEYS = ["", "w", "w+left", "w"]


def video(level: int, frames: int = 4, size: tuple[int, int] = (40, 64)) -> np.ndarray:
    return np.full((frames, *size, 3), level, np.uint8)


def test_the_grid_has_a_row_a_video_and_a_column_a_frame(tmp_path: Path) -> None:
    image = grid([Row("dark", video(30)), Row("light", video(200))], KEYS)
    write_png(tmp_path / "a" / "grid.png", image)
    shown = np.asarray(Image.open(tmp_path / "a" / "grid.png"))
    np.testing.assert_array_equal(shown, image)
    half = shown.shape[0] // 2
    assert shown.shape[1] >= 4 * 160  # small frames are enlarged
    assert (shown[: half - 30] == 30).any()
    assert not (shown[:half] == 200).all(-1).any(0).all()
    assert (shown[half:] == 200).mean() > 0.6


def test_the_film_plays_the_rows_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "film.mp4"
    write_mp4(path, [Row("dark", video(30)), Row("light", video(200))], KEYS, 4.0)
    with av.open(str(path)) as film:
        stream = film.streams.video[0]
        assert float(stream.average_rate) == 4
        frames = [frame.to_ndarray(format="rgb24") for frame in film.decode(stream)]
    assert len(frames) == 4
    left, right = np.split(frames[2][40:-4], 2, axis=1)
    assert abs(float(np.median(left)) - 30) < 8
    assert abs(float(np.median(right)) - 200) < 8


@pytest.mark.parametrize("rows", [[], [Row("a", video(1)), Row("b", video(1, frames=3))]])
def test_videos_that_do_not_fit_are_refused(rows: list[Row], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="videos of one shape"):
        grid(rows, KEYS)
    with pytest.raises(DataError, match="videos of one shape"):
        write_mp4(tmp_path / "x.mp4", rows, KEYS, 4.0)
    assert not (tmp_path / "x.mp4").exists()


def test_actions_are_one_a_frame() -> None:
    with pytest.raises(DataError, match="3 actions for 4 frames"):
        grid([Row("a", video(1))], KEYS[:3])
