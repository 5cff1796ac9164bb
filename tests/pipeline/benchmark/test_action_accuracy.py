"""The benchmark's cases, and its verdict on true renders: the best that any policy can reach."""

import numpy as np
import pytest
import torch

from pipeline import actions
from pipeline.actions import label_of
from pipeline.benchmark import action_accuracy
from pipeline.benchmark.action_accuracy import (
    BASIC,
    COMPOUND,
    CONTROLS,
    evaluate_control,
    evaluate_policy,
    generate,
    held,
    judge,
    make_cases,
)
from pipeline.benchmark.config import AccuracyConfig
from pipeline.errors import NumericsError
from pipeline.scorers.critic import Critic, CriticConfig, CriticScorer
from pipeline.scorers.pose_net import PoseNet, PoseNetConfig, PoseScorer
from pipeline.worlds.mini.clips import STEP
from pipeline.worlds.mini.load import load_mini
from pipeline.worlds.mini.renderer import SPLITS, MiniScene, render

SMALL = AccuracyConfig(seed=3, basic=1, compound=1, clips=1)


@pytest.fixture(scope="module")
def scorers() -> tuple[PoseScorer, CriticScorer]:
    torch.manual_seed(0)
    pose = PoseScorer(PoseNet(PoseNetConfig(features=8, radius=2, trunk=16, hidden=16)), STEP)
    return pose, CriticScorer(Critic(CriticConfig(width=8, hidden=8)))


def test_the_actions_are_the_papers() -> None:
    assert sorted(actions.keys_of(label)[0] for label in BASIC) == sorted(actions.KEYS)
    assert len(COMPOUND) == len(set(COMPOUND)) == 24
    assert all(len(actions.keys_of(label)) == 2 for label in COMPOUND)


def test_held() -> None:
    assert held(label_of("w"), 7).tolist() == [label_of("w")] * 7
    assert held(label_of("right+up"), 3).tolist() == [label_of("right+up")] * 3
    turned = held(label_of("a+up"), 7).tolist()
    assert turned == [label_of("a+up")] * 4 + [label_of("a+down")] * 3
    assert held(label_of("w+down"), 4).tolist() == [label_of("w+down")] * 2 + [label_of("w+up")] * 2
    assert {label_of("w+left")} == set(held(label_of("w+left"), 11).tolist())


def test_cases_are_fixed_by_the_seed_and_cover_all_actions() -> None:
    config = AccuracyConfig(seed=1, basic=9, compound=25, clips=2)
    cases = make_cases(config, 8)
    assert [case.kind for case in cases] == ["basic"] * 9 + ["compound"] * 25
    first = [int(case.prompt.labels_A[0]) for case in cases]
    assert set(first[:9]) == set(BASIC)
    assert set(first[9:]) == set(COMPOUND)
    assert first[8] == first[0]  # in turn
    low, high = SPLITS["evaluation"]
    assert all(low <= case.prompt.scene_seed < high for case in cases)
    assert len({case.prompt.scene_key for case in cases}) == len(cases)
    assert len({case.prompt.index for case in cases}) == len(cases)  # it keys the noise
    for case in cases:
        assert len(case.prompt.labels_A) == 7
        assert (
            MiniScene.make(case.prompt.scene_seed)
            .clear((case.prompt.start_44 @ case.prompt.c2w_T44)[:, :3, 3])
            .all()
        )
    again = make_cases(config, 8)
    assert [case.prompt.scene_key for case in again] == [case.prompt.scene_key for case in cases]
    more = make_cases(config.model_copy(update={"basic": 3, "compound": 4}), 8)
    assert [case.prompt.scene_key for case in more] == [
        cases[i].prompt.scene_key for i in (0, 1, 2, 9, 10, 11, 12)
    ]


def test_true_renders_are_the_ceiling(scorers: tuple[PoseScorer, CriticScorer]) -> None:
    cases = make_cases(SMALL, 4)
    prompts = [case.prompt for case in cases]
    videos = np.stack([render(MiniScene.make(p.scene_seed), p.start_44 @ p.c2w_T44) for p in prompts])
    rows = judge(cases, videos, *scorers)
    assert [row["kind"] for row in rows] == ["basic", "compound"]
    assert [row["word"] for row in rows] == ["w-3", "w+d-3"]
    for row, prompt in zip(rows, prompts, strict=True):
        assert row["oracle_joint"] == row["oracle_fine"] == 1.0
        assert row["oracle_failed"] == 0.0
        assert row["residual"] < 0.02
        assert row["psnr"] > 60
        assert row["scene"] == prompt.scene_seed
        assert row["moved"] == pytest.approx(np.linalg.norm(prompt.c2w_T44[-1][:3, 3]), abs=0.05)
        assert 0 <= row["scorer_joint"] <= row["scorer_fine"] <= 1
        assert all(np.isfinite(value) for value in row.values() if isinstance(value, float))


def test_a_policy_that_knows_nothing(tiny_base, scorers: tuple[PoseScorer, CriticScorer]) -> None:
    world = load_mini(tiny_base)
    seen: list[tuple[int, int]] = []
    rows = evaluate_policy(world, *scorers, SMALL, 2, 3.0, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]
    assert [row["kind"] for row in rows] == ["basic", "compound"]
    for row in rows:
        assert row["oracle_joint"] < 1  # noise for frames
        assert row["psnr"] < 25
    prompt = make_cases(SMALL, 4)[1].prompt
    videos = [generate(world, prompt, 1, seed, 2, 3.0) for seed in (3, 3, 4)]
    assert videos[0].shape == (4, 40, 64, 3)
    np.testing.assert_array_equal(videos[0], videos[1])
    assert (videos[0] != videos[2])[1:].any()


def test_a_sample_that_is_not_finite_is_never_judged_as_frames(
    tiny_base, scorers: tuple[PoseScorer, CriticScorer]
) -> None:
    world = load_mini(tiny_base)
    with torch.no_grad():
        world.model.proj_out.weight.fill_(float("nan"))
    with pytest.raises(NumericsError, match=r"case 0 \(w-3\) is not finite"):
        evaluate_policy(world, *scorers, SMALL, 2, 3.0)


def test_controls_are_judged_on_the_same_cases(
    scorers: tuple[PoseScorer, CriticScorer], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    config = SMALL.model_copy(update={"compound": 2})
    rows = evaluate_control("static", *scorers, config, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert [row["word"] for row in rows] == ["w-3", "w+d-3", "w+a-3"]
    assert all(row["oracle_joint"] == 0 and row["moved"] < 0.02 for row in rows)
    monkeypatch.setattr(action_accuracy, "CHUNK", 2)
    for row, other in zip(rows, evaluate_control("static", *scorers, config), strict=True):
        numbers = {name: value for name, value in row.items() if isinstance(value, float)}
        assert {name: other[name] for name in numbers} == pytest.approx(numbers, abs=1e-5)
    video = CONTROLS["render"](make_cases(config, 4)[0])
    assert (video.shape, video.dtype) == ((4, 40, 64, 3), np.uint8)
