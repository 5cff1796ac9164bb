"""Scenes from a list: what is used, what is left out and why, and how an image becomes a frame."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pipeline.errors import DataError
from pipeline.scenes import load_image, read_scenes


def picture(path: Path, height: int = 30, width: int = 40, seed: int = 0) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def scene_list(folder: Path, *entries: Any) -> Path:
    (folder / "list.json").write_text(json.dumps(list(entries)))
    return folder / "list.json"


def entry(**change: Any) -> dict[str, Any]:
    return {"image_path": "a.png", "caption": "a room"} | change


BAD: list[tuple[Any, str]] = [
    (entry(caption="  "), "its caption is empty"),
    (entry(caption=None), "its caption is empty or no text"),
    ({"image_path": "a.png"}, "has no caption"),
    ({"caption": "x"}, "has no image_path"),
    (entry(image_path="nowhere.png"), "nowhere.png: is missing"),
    (entry(image_path="list.json"), "is no image"),
    (entry(image_path="cut.png"), "the image cannot be read"),
    (entry(image_path="."), ": is missing"),
    (entry(prompt="x"), "unknown key 'prompt'"),
    (entry(word="w-3", poses="p.json"), "both word and poses"),
    (entry(word="x-3"), '"x'),
    (entry(poses="nowhere.json"), "cannot read the pose file"),
    ("a.png", "is a str"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD)
def test_a_bad_entry_is_left_out_by_name_and_the_others_stay(tmp_path: Path, bad: Any, reason: str) -> None:
    picture(tmp_path / "a.png")
    whole = picture(tmp_path / "cut.png", 300, 300).read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    good = entry(caption="another room")
    used, left_out = read_scenes(scene_list(tmp_path, bad, good), frame_size=(32, 64))
    assert [(one.index, one.caption) for one in used] == [(1, "another room")]
    (said,) = left_out
    assert said.index == 0
    assert reason in said.reason
    if isinstance(bad, dict) and "image_path" in bad:
        assert bad["image_path"] in str(said)


def test_the_same_scene_twice_is_used_once(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    other_word = entry(word="w-3")
    used, (said,) = read_scenes(scene_list(tmp_path, entry(), other_word, entry(caption="a  room ")))
    assert [one.word for one in used] == [None, "w-3"]
    assert (said.index, said.reason) == (2, "is entry 0 again")
    assert len({one.key for one in used}) == 2


def test_keys_follow_content_and_not_place(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    (first,), _ = read_scenes(scene_list(tmp_path, entry()))
    (moved,), _ = read_scenes(scene_list(tmp_path, entry(caption="a   room")))
    assert first.key == moved.key
    picture(tmp_path / "a.png", seed=1)
    (changed,), _ = read_scenes(scene_list(tmp_path, entry()))
    assert changed.key != first.key
    assert changed.key.startswith("a-")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{}", "must be a list"),
        ("[", "not valid JSON"),
        ("[]", "none of its 0"),
        ('[{"caption": ""}]', "none of its 1"),
    ],
)
def test_a_list_that_is_none_is_an_error(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "list.json").write_text(text)
    with pytest.raises(DataError, match=match):
        read_scenes(tmp_path / "list.json")
    with pytest.raises(DataError, match="cannot be read"):
        read_scenes(tmp_path / "nowhere.json")


@settings(max_examples=25, deadline=None)
@given(height=st.integers(1, 90), width=st.integers(1, 90))
def test_any_aspect_covers_the_frame_and_keeps_its_middle(
    tmp_path_factory: pytest.TempPathFactory, height: int, width: int
) -> None:
    """Red to the left, green to the right: the frame is full, the border stays in its middle, nothing is squeezed."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, : (width + 1) // 2, 0] = 255
    pixels[:, (width + 1) // 2 :, 1] = 255
    path = tmp_path_factory.mktemp("image") / "a.png"
    Image.fromarray(pixels).save(path)
    frame = load_image(path, (32, 64))
    assert frame.shape == (32, 64, 3)
    assert (frame.max(axis=-1) > 60).all()  # no black edge
    if width > 1 and width % 2 == 0:
        assert frame[:, 0, 0].min() > 200 > 60 > frame[:, -1, 0].max()
        red = (frame[16, :, 0] > 127).sum()
        assert abs(red - 32) <= 1 + 64 / width


def test_aspect_is_kept(tmp_path: Path) -> None:
    """A circle stays a circle where a plain resize would make an ellipse."""
    y, x = np.mgrid[:200, :300]
    disc = (((y - 100) ** 2 + (x - 150) ** 2) < 50**2).astype(np.uint8) * 255
    Image.fromarray(np.stack([disc] * 3, -1)).save(tmp_path / "a.png")
    frame = load_image(tmp_path / "a.png", (64, 64))[..., 0] > 127
    rows, columns = frame.any(1).sum(), frame.any(0).sum()
    assert abs(int(rows) - int(columns)) <= 1
    assert rows == pytest.approx(32, abs=1)


def test_exif_orientation_and_transparency(tmp_path: Path) -> None:
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:, :20] = (255, 0, 0)
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    frame = load_image(tmp_path / "a.png", (20, 40))
    assert frame[10, 35, 0] > 200 > 60 > frame[10, 5, 0]
    Image.fromarray(np.full((9, 9, 4), 128, np.uint8)).save(tmp_path / "b.png")
    assert load_image(tmp_path / "b.png", (8, 8)).shape == (8, 8, 3)
    Image.fromarray(np.full((9, 9), 7, np.uint8)).save(tmp_path / "grey.png")
    assert (load_image(tmp_path / "grey.png", (8, 8)) == 7).all()
