"""The oracle on a stored group: true renders are found where they are, for candidates after a past and whole videos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.actions import parse_word
from pipeline.benchmark.group_truth import track_group, within
from pipeline.stores import ArraySpec, GroupStore
from pipeline.worlds.mini.prompts import Prompt, make_prompt_for_word
from pipeline.worlds.mini.renderer import MiniScene, render

LABELS = np.array(parse_word("w-3, left+w-4"))


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return make_prompt_for_word("rl", 0, 5, LABELS)


def store(path: Path, arrays: dict[str, np.ndarray], record: dict[str, Any]) -> GroupStore:
    specs = [ArraySpec(name, array.shape, str(array.dtype)) for name, array in arrays.items()]
    made = GroupStore.prepare(path, kind="k", arrays=specs, keys=["a"], inputs={}, block=1)
    made.write(0, arrays, record)
    return made


@pytest.mark.parametrize("whole", [False, True])
def test_true_renders_are_found_where_they_are(prompt: Prompt, tmp_path: Path, whole: bool) -> None:
    true_T44 = prompt.start_44 @ prompt.c2w_T44
    frames = render(MiniScene.make(prompt.scene_seed), true_T44)
    past, new = (frames[:1], frames) if whole else (frames[:4], frames[4:])
    record = {
        "scene_seed": prompt.scene_seed,
        "start": prompt.start_44.tolist(),
        "target_clip": 2,
        "first_clip": 1 if whole else 2,
        "stride": 1,
        "clip_latents": 4,
    }
    labels_T = np.concatenate([[0], prompt.labels_A])
    prefixes = store(tmp_path / "p.zarr", {"frames": past, "labels": labels_T, "c2w": prompt.c2w_T44}, record)
    still = np.broadcast_to(new[:1], new.shape)  # the second candidate does not move after its first frame
    rollouts = store(tmp_path / "r.zarr", {"frames": np.stack([new, still])}, {})
    poses, failed = track_group(prefixes, rollouts, 0)
    assert poses.shape == (2, 8, 4, 4)
    assert not failed.any()
    np.testing.assert_allclose(poses[0, :, :3, 3], true_T44[:, :3, 3], atol=0.05)
    at = 0 if whole else 4
    np.testing.assert_allclose(poses[1, at:, :3, 3], np.tile(true_T44[at, :3, 3], (8 - at, 1)), atol=0.05)


def test_only_the_order_inside_groups_correlates() -> None:
    value = np.array([[0.0, 1.0, 2.0], [5.0, 6.0, 7.0]])
    assert within(value, 3 * value + np.array([[100.0], [-100.0]])) == pytest.approx(1.0)
    assert within(value, -value) == pytest.approx(-1.0)
    assert np.isnan(within(value, np.ones_like(value)))
