"""Words that close, through the real stages on a tiny base: both rollout modes, relations, warm-up, counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline import config, files
from pipeline.digests import digest_tree
from pipeline.errors import DataError
from pipeline.pairs import FramePairs
from pipeline.plan import candidate_frames, plan_of
from pipeline.rewards import ABSENT
from pipeline.stores import GroupStore, Shard
from stages.advantage import run_advantage
from stages.base import run_base
from stages.common import EpochPaths
from stages.prefix import run_prefix
from stages.rollout import run_rollout
from stages.run import run_epochs
from stages.score import run_score
from stages.update import is_finished, run_update

CYCLES = """
seed: 2
world: {{weights: {weights}}}
words: {{hold: [1, 2]}}
cycle: {{words: retracing, smallest: 1, levels: 2}}
sampler: {{steps: 2}}
prefix: {{groups: 3}}
rollout: {{candidates: 4}}
score: {{weights: {weights}, scorers: [pose, critic, tracks]}}
rewards: {{closure: {{alpha: 5.0}}}}
advantage:
  weights: {{spatial: 1.0, temporal: 0.5, action_fine: 2.0, quality_drift: 1.0}}
  best_of_n: 2
update: {{timesteps: 1, accumulation: 4}}
epochs:
  e001: {{prev: e000}}
  e002: {{prev: e001}}
  e003: {{prev: e002}}
"""


def load(tiny_base: Path, folder: Path, *overrides: str) -> config.Params:
    (folder / "params.yaml").write_text(CYCLES.format(weights=tiny_base))
    return config.load(folder / "params.yaml", overrides)


@pytest.fixture(scope="module")
def finished(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[config.Params, Path]:
    folder = tmp_path_factory.mktemp("cycles")
    params = load(tiny_base, folder)
    run_epochs(params, folder / "root")
    return params, folder / "root"


def test_the_target_clip_comes_back_and_its_frames_have_partners(
    finished: tuple[config.Params, Path],
) -> None:
    params, root = finished
    levels = set()
    for number in (1, 2, 3):
        plan = plan_of(params, number)
        levels.add(plan.level)
        paths = EpochPaths(root, f"e{number:03d}")
        prefixes, rollouts = GroupStore.open(paths.prefixes), GroupStore.open(paths.rollouts)
        assert plan.cycle_clips is not None
        assert plan.clip > plan.cycle_clips // 2
        for index in range(len(prefixes)):
            record = prefixes.record(index)
            pairs, frames = FramePairs.from_json(record["pairs"]), candidate_frames(record)
            assert record["target_clip"] == plan.clip == record["first_clip"]
            assert len(pairs.of("spatial")) + len(pairs.of("temporal")) > 0
            assert (pairs.index_Q2[:, 1] >= frames.start).all()
            assert (pairs.index_Q2[:, 1] < frames.stop).all()
            c2w = prefixes.read(index, "c2w")
            assert np.abs(c2w[pairs.index_Q2[:, 0]] - c2w[pairs.index_Q2[:, 1]]).max() < 1e-9
        P, G, S = params.prefix.groups, params.rollout.candidates, params.sampler.steps
        counted = [files.read_json(paths.metrics(stage), "")["forwards"] for stage in ("prefix", "rollout")]
        assert [c["denoiser"] for c in counted] == [P * S * (plan.clip - 1), P * S * G]
        assert rollouts.specs["latents"].shape[2] == 4
    assert levels == {0, 1}  # this seed draws both


def test_a_single_cycle_has_no_temporal_reward_and_that_is_no_missing_score(
    finished: tuple[config.Params, Path],
) -> None:
    params, root = finished
    for number in (1, 2, 3):
        store = GroupStore.open(EpochPaths(root, f"e{number:03d}").advantages)
        plan = plan_of(params, number)
        for index in range(len(store)):
            reasons = store.record(index)["reasons"]["temporal"]
            values = store.read(index, "reward.temporal")
            absent = [reason.startswith(ABSENT) for reason in reasons.values()]
            assert (len(absent) == 4 and all(absent)) == bool(np.isnan(values).all())
            if plan.level == 0:
                assert np.isnan(values).all()
            assert np.isfinite(store.read(index, "r")).all()  # the other rewards' weights make up for it
            spatial = store.read(index, "reward.spatial")
            assert ((spatial >= 0) & (spatial <= 1) | np.isnan(spatial)).all()
            gate = store.read(index, "detail.spatial.gate")
            assert ((gate >= 0) & (gate <= 1) | np.isnan(gate)).all()


def test_a_second_run_makes_nothing_and_shards_give_the_same_bytes(
    finished: tuple[config.Params, Path], tmp_path: Path
) -> None:
    params, root = finished
    assert run_epochs(params, root)["made"] == 0
    paths, other = EpochPaths(root, "e001"), EpochPaths(tmp_path, "e001")
    run_base(params, tmp_path)
    for part in (2, 1):
        run_prefix(params, "e001", tmp_path, Shard(part, 2))
    for part in (1, 2):
        run_rollout(params, "e001", tmp_path, Shard(part, 2))
    for part in (2, 1):
        run_score(params, "e001", tmp_path, Shard(part, 2))
    for one, two in ((paths.rollouts, other.rollouts), (paths.scores("tracks"), other.scores("tracks"))):
        assert digest_tree(one, ["c/*", "c.*"]) == digest_tree(two, ["c/*", "c.*"])


def test_warm_up_is_a_share_of_the_updates(tiny_base: Path, tmp_path: Path) -> None:
    params = load(tiny_base, tmp_path, "rewards.closure.temporal_warmup=0.5")
    assert [params.progress(f"e00{n}") for n in (1, 2, 3)] == pytest.approx([0, 1 / 3, 2 / 3])
    data = params.written()
    data["epochs"]["e001"]["prefix"] = {"groups": 12}  # four times as many updates as the others
    longer = config.Params.model_validate_strict(data)
    assert longer.progress("e002") == pytest.approx(6 / 10)

    run_base(params, tmp_path / "root")
    epoch = "e001"
    data["epochs"] = {"e001": {"prev": "e000"}, "e002": {"prev": "e001"}}
    data["seed"] = next(n for n in range(50) if plan_of(params.model_copy(update={"seed": n}), 1).level == 1)
    warm = config.Params.model_validate_strict(data)
    for stage in (run_prefix, run_rollout, run_score):
        stage(warm, epoch, tmp_path / "root", Shard())
    run_advantage(warm, epoch, tmp_path / "root")
    store = GroupStore.open(EpochPaths(tmp_path / "root", epoch).advantages)
    assert all(np.isnan(store.read(i, "reward.temporal")).all() for i in range(len(store)))
    assert "warm-up" in store.record(0)["reasons"]["temporal"]["0"]
    data["rewards"]["closure"]["temporal_warmup"] = 0.0
    joint = config.Params.model_validate_strict(data)
    run_advantage(joint, epoch, tmp_path / "root")
    store = GroupStore.open(EpochPaths(tmp_path / "root", epoch).advantages)
    assert any(np.isfinite(store.read(i, "reward.temporal")).all() for i in range(len(store)))


def test_whole_videos_have_pasts_of_their_own(tiny_base: Path, tmp_path: Path) -> None:
    params = load(tiny_base, tmp_path, "rollout.mode=cycle", "epochs={e001: {prev: e000}}")
    root = tmp_path / "root"
    run_epochs(params, root)
    plan, paths = plan_of(params, 1), EpochPaths(root, "e001")
    assert (plan.first, plan.clip) == (1, 4)
    P, G, S = params.prefix.groups, params.rollout.candidates, params.sampler.steps
    counted = {stage: files.read_json(paths.metrics(stage), "") for stage in ("prefix", "rollout", "update")}
    assert counted["prefix"]["forwards"]["denoiser"] == 0
    assert counted["rollout"]["forwards"]["denoiser"] == P * G * S * 4
    rollouts = GroupStore.open(paths.rollouts)
    assert rollouts.read(0, "frames").shape[:2] == (G, 16)
    latents = rollouts.read(0, "latents").astype(np.float32)
    assert np.abs(latents[0, :, 1:4] - latents[1, :, 1:4]).max() > 1e-3  # they part in the first clip
    samples = counted["update"]["samples"]
    assert samples > 0
    assert counted["update"]["context_passes"] == samples  # one past each
    assert counted["update"]["live_forwards"] == samples * params.update.timesteps_per_sample
    spatial = GroupStore.open(paths.advantages).read(0, "reward.spatial")
    assert np.isfinite(spatial).all()
    assert is_finished(params, "e001", root)
    assert run_update(params, "e001", root)["made"] == 0


def test_a_relation_compares_with_the_end_of_another_word(tiny_base: Path, tmp_path: Path) -> None:
    weights = "advantage.weights={relation: 1.0, action_fine: 2.0, quality_drift: 1.0}"
    params = load(
        tiny_base, tmp_path, "cycle.words=relation", weights, "epochs={e001: {prev: e000}}", "prefix.groups=6"
    )
    root = tmp_path / "root"
    run_epochs(params, root)
    paths = EpochPaths(root, "e001")
    prefixes = GroupStore.open(paths.prefixes)
    counted = files.read_json(paths.metrics("prefix"), "")["forwards"]["denoiser"]
    others = sum("other" in prefixes.record(index) for index in range(len(prefixes)))
    assert others > 0
    assert counted == params.sampler.steps * (
        len(prefixes) + 2 * others
    )  # prefixes, and both clips of each other word
    for index in range(len(prefixes)):
        assert prefixes.read(index, "reference").shape == (40, 64, 3)
        assert len(FramePairs.from_json(prefixes.record(index)["pairs"])) == 1
    values = GroupStore.open(paths.advantages).read(0, "reward.relation")
    assert np.isfinite(values).all()


def test_tracking_words_that_do_not_close_is_refused(
    finished: tuple[config.Params, Path], tiny_params: Path, tmp_path: Path
) -> None:
    from pipeline.scorers.registry import open_engine
    from pipeline.scorers.tracks import bound

    open_words = config.load(tiny_params, ["epochs={e001: {prev: e000}}"])
    run_base(open_words, tmp_path / "root")
    run_prefix(open_words, "e001", tmp_path / "root", Shard())
    prefixes = GroupStore.open(EpochPaths(tmp_path / "root", "e001").prefixes)
    with pytest.raises(DataError, match="do not close"):
        bound(open_engine("tracks", tmp_path), prefixes)
