"""Prompts can be made again anywhere from (split, index, seed), and their words can be walked."""

import dataclasses

import numpy as np
import pytest

from pipeline import camera
from pipeline.actions import parse_word
from pipeline.errors import WordError
from pipeline.words import TrainingMix
from pipeline.worlds.mini import prompts
from pipeline.worlds.mini.clips import STEP
from pipeline.worlds.mini.prompts import make_prompt, make_prompt_for_word, place
from pipeline.worlds.mini.renderer import SPLITS, MiniScene, render
from pipeline.worlds.mini.text import TEXT_DIM, TOKENS, encode_caption

MIX = TrainingMix(hold=(1, 4))


def test_a_prompt_is_a_function_of_split_index_and_seed() -> None:
    alone = make_prompt("rl", 5, 0, 7, MIX)
    among = [make_prompt("rl", index, 0, 7, MIX) for index in (4, 5, 6)][1]
    for field in dataclasses.fields(alone):
        np.testing.assert_array_equal(getattr(alone, field.name), getattr(among, field.name))
    keys = {
        make_prompt(*key, 7, MIX).scene_key
        for key in (("rl", 5, 0), ("rl", 6, 0), ("rl", 5, 1), ("evaluation", 5, 0))
    }
    assert len(keys) == 4
    assert alone.scene_key in keys


@pytest.mark.parametrize("split", ["rl", "evaluation"])
def test_rooms_are_of_the_split_and_words_fit(split: str) -> None:
    low, high = SPLITS[split]
    for index in range(12):
        prompt = make_prompt(split, index, 3, 11, MIX)
        assert low <= prompt.scene_seed < high
        assert prompt.labels_A.shape == (11,)
        np.testing.assert_allclose(
            prompt.c2w_T44, camera.poses_from_labels(prompt.labels_A, STEP), atol=1e-12
        )
        scene = MiniScene.make(prompt.scene_seed)
        assert scene.clear((prompt.start_44 @ prompt.c2w_T44)[:, :3, 3]).all()
        assert prompt.caption == scene.caption
        np.testing.assert_array_equal(prompt.first_frame_HW3, render(scene, prompt.start_44[None])[0])


def test_a_given_word_gets_a_room() -> None:
    word = np.array(parse_word("w-9"))
    prompt = make_prompt_for_word("evaluation", 0, 0, word)
    np.testing.assert_array_equal(prompt.labels_A, word)
    assert make_prompt_for_word("evaluation", 0, 0, word).scene_key == prompt.scene_key
    assert make_prompt_for_word("evaluation", 1, 0, word).scene_key != prompt.scene_key


def test_a_word_that_fits_nowhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    word = np.array(parse_word("w-40"))  # 16 units; no room is longer than 10
    assert place(MiniScene.make(0), np.random.default_rng(0), word) is None
    monkeypatch.setattr(prompts, "place", lambda scene, rng, labels: None)
    with pytest.raises(WordError, match="40 actions"):
        make_prompt_for_word("evaluation", 0, 0, word)
    with pytest.raises(WordError, match=r"60 actions.*target\.n_max"):
        make_prompt("rl", 0, 0, 60, MIX)


def test_captions_are_fixed_vectors_a_word() -> None:
    red, blue = encode_caption("A red room"), encode_caption("A blue ROOM, ")
    assert red.shape == (TOKENS, TEXT_DIM)
    assert red.dtype == blue.dtype
    np.testing.assert_array_equal(red[[0, 2]], blue[[0, 2]])
    assert (red[1] - blue[1]).abs().max() > 0.5
    assert (red[3:] == 0).all()
    assert encode_caption("w " * 99).shape == (TOKENS, TEXT_DIM)
    assert encode_caption("").abs().sum() == 0
    # the shipped weights know these very vectors
    np.testing.assert_allclose(encode_caption("red")[0, :3], [0.6695, 2.1745, 0.3853], atol=1e-4)
