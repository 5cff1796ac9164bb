"""Pretraining of a tiny base: killed and resumed gives the same bits, and nothing foreign or broken goes on."""

import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pipeline.errors import CheckpointError, NumericsError
from pipeline.words import FAMILIES
from pipeline.worlds.mini import pretrain as module
from pipeline.worlds.mini.codec import PatchCodec
from pipeline.worlds.mini.load import load_mini
from pipeline.worlds.mini.pretrain import (
    PretrainConfig,
    batches,
    build_model,
    draw_batch,
    lr_factor,
    make_optimizers,
    pretrain,
    pretraining_mix,
)
from pipeline.worlds.mini.renderer import MiniScene, render, start_poses

TINY = PretrainConfig(
    horizon=0,
    anneal=0,
    seed=1,
    steps=6,
    batch=2,
    warmup=2,
    clip_shares=[0.4, 0.4, 0.2],
    channels=6,
    dim=32,
    heads=2,
    layers=1,
    ffn=32,
    save_every=3,
)


class Killed(Exception):
    pass


@pytest.fixture(scope="module")
def codec() -> PatchCodec:
    """A codec of few rooms: the trainer takes the one that lies in its folder."""
    frames = [render(s, start_poses(s, np.random.default_rng(0), 4)) for s in map(MiniScene.make, range(4))]
    return PatchCodec.fit(np.concatenate(frames), TINY.channels)


@pytest.fixture
def folder(codec: PatchCodec, tmp_path: Path) -> Path:
    path = tmp_path / "base"
    path.mkdir()
    codec.save(path / "codec.safetensors")
    return path


@pytest.fixture(scope="module")
def straight(codec: PatchCodec, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """(folder, losses) of the uninterrupted training."""
    path = tmp_path_factory.mktemp("straight")
    codec.save(path / "codec.safetensors")
    losses: list[float] = []
    pretrain(TINY, path, lambda step, loss: losses.append(loss))
    return path, losses


def kill_at(last: int):
    def on_step(step: int, loss: float) -> None:
        if step == last:
            raise Killed

    return on_step


def assert_same(one: Path, two: Path) -> None:
    for name in ("state.safetensors", "transformer/diffusion_pytorch_model.safetensors"):
        a, b = load_file(one / name), load_file(two / name)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)
    for name in ("loss.csv", "pretrain.json", "transformer/config.json"):
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_what_a_training_leaves(straight: tuple[Path, list[float]]) -> None:
    path, losses = straight
    assert len(losses) == 6
    assert np.isfinite(losses).all()
    assert [float(line) for line in (path / "loss.csv").read_text().split()] == [
        round(loss, 6) for loss in losses
    ]
    assert json.loads((path / "pretrain.json").read_text()) == {
        "step": 6,
        "config": json.loads(TINY.model_dump_json()),
        "legs": [{"from_step": 0, "steps": 6, "horizon": 0, "anneal": 0, "save_every": 3}],
    }
    assert not list(path.rglob("*.partial"))
    state = load_file(path / "state.safetensors")
    world = load_mini(path)  # holds the EMA weights, not the live ones
    for name, parameter in world.model.named_parameters():
        assert torch.equal(parameter, state[f"ema.{name}"])
    assert any(
        not torch.equal(state[f"ema.{name}"], state[f"live.{name}"])
        for name, _ in world.model.named_parameters()
    )


@pytest.mark.parametrize("last", [3, 4])  # right after the checkpoint of step 3, and one step later
def test_killed_and_resumed_equals_uninterrupted(
    straight: tuple[Path, list[float]], folder: Path, last: int
) -> None:
    with pytest.raises(Killed):
        pretrain(TINY, folder, kill_at(last))
    assert json.loads((folder / "pretrain.json").read_text())["step"] == 3
    seen: list[int] = []
    pretrain(TINY, folder, lambda step, loss: seen.append(step))
    assert seen == [3, 4, 5]
    assert_same(folder, straight[0])


def test_killed_between_the_last_files_is_made_good(
    straight: tuple[Path, list[float]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state goes last: a kill before it repeats steps instead of leaving a stale base that looks finished."""
    saves = itertools.count()
    save_file = module.save_file

    def failing(*args, **kwargs):
        if next(saves) == 1:
            raise Killed
        save_file(*args, **kwargs)

    monkeypatch.setattr(module, "save_file", failing)
    with pytest.raises(Killed):
        pretrain(TINY, folder)
    monkeypatch.undo()
    pretrain(TINY, folder)
    assert_same(folder, straight[0])


def test_a_finished_training_does_nothing(straight: tuple[Path, list[float]]) -> None:
    before = {path: path.stat().st_mtime_ns for path in straight[0].rglob("*") if path.is_file()}
    pretrain(TINY, straight[0], kill_at(6))
    assert before == {path: path.stat().st_mtime_ns for path in straight[0].rglob("*") if path.is_file()}


def test_another_seed_is_another_training(straight: tuple[Path, list[float]], folder: Path) -> None:
    losses: list[float] = []
    pretrain(TINY.model_copy(update={"seed": 2, "steps": 1}), folder, lambda step, loss: losses.append(loss))
    assert losses[0] != straight[1][0]


@pytest.mark.parametrize(
    "change", [{"lr": 1e-3}, {"batch": 3}, {"seed": 5}, {"noise": {"single_ignored": 0.5}}]
)
def test_a_state_of_other_parameters_is_refused(straight: tuple[Path, list[float]], change: dict) -> None:
    other = PretrainConfig.model_validate(TINY.model_dump() | change)
    with pytest.raises(CheckpointError, match=r"state\.safetensors: .*other pretrain parameters"):
        pretrain(other, straight[0])


def test_a_training_goes_on_with_a_longer_schedule_and_notes_its_legs(
    straight: tuple[Path, list[float]], tmp_path: Path
) -> None:
    folder = tmp_path / "longer"
    shutil.copytree(straight[0], folder)
    longer = TINY.model_copy(update={"steps": 8, "horizon": 20, "anneal": 2})
    pretrain(longer, folder)
    about = json.loads((folder / "pretrain.json").read_text())
    assert about["step"] == 8
    assert [(leg["from_step"], leg["steps"], leg["horizon"]) for leg in about["legs"]] == [
        (0, 6, 0),
        (6, 8, 20),
    ]
    assert len((folder / "loss.csv").read_text().split()) == 8
    with pytest.raises(CheckpointError, match=r"at step 8, past pretrain\.steps = 7; raise pretrain\.steps"):
        pretrain(longer.model_copy(update={"steps": 7}), folder)


def test_a_damaged_state_is_named(straight: tuple[Path, list[float]], folder: Path) -> None:
    data = (straight[0] / "state.safetensors").read_bytes()
    for damaged in (data[: len(data) // 2], b"", b"x" * 1000):
        (folder / "state.safetensors").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"state\.safetensors: cannot be read .*delete it"):
            pretrain(TINY, folder)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(
    straight: tuple[Path, list[float]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = module.training_loss

    def broken(model, codec, config, batch, step):
        loss = whole(model, codec, config, batch, step)
        return loss * float("nan") if step == 4 else loss

    monkeypatch.setattr(module, "training_loss", broken)
    with pytest.raises(NumericsError, match=r"nan at step 4.*pretrain\.lr"):
        pretrain(TINY, folder)
    assert json.loads((folder / "pretrain.json").read_text())["step"] == 3
    assert all(tensor.isfinite().all() for tensor in load_file(folder / "state.safetensors").values())
    monkeypatch.undo()
    pretrain(TINY, folder)
    assert_same(folder, straight[0])


def test_the_loss_learns(folder: Path) -> None:
    """A few dozen steps at one kind of clip: well below the loss of predicting nothing."""
    config = TINY.model_copy(update={"steps": 30, "clip_shares": [0, 1.0], "batch": 4, "save_every": 30})
    losses: list[float] = []
    pretrain(config, folder, lambda step, loss: losses.append(loss))
    assert np.mean(losses[-8:]) < 0.85 * np.mean(losses[:4])


def test_workers_end_when_the_training_is_killed(tmp_path: Path) -> None:
    """A killed training once left a renderer of 0.9 GB behind for good."""
    program = (
        "from pipeline.worlds.mini.pretrain import PretrainConfig, batches\n"
        "import multiprocessing, time\n"
        "if __name__ == '__main__':\n"
        "    stream = batches(PretrainConfig(batch=2), 0, 1)\n"
        "    next(stream)\n"
        "    print(*[child.pid for child in multiprocessing.active_children()], flush=True)\n"
        "    time.sleep(60)\n"
    )
    path = tmp_path / "program.py"
    path.write_text(program)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[4])}
    with subprocess.Popen(
        [sys.executable, str(path)], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        workers = [int(pid) for pid in process.stdout.readline().split()]
        assert workers
        process.kill()
    deadline = time.monotonic() + 30
    while any(map(_runs, workers)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(map(_runs, workers))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_workers_render_the_same_batches_in_order() -> None:
    config = TINY.model_copy(update={"steps": 5})
    here, there = list(batches(config, 1, 0)), list(batches(config, 1, 1))
    assert len(here) == len(there) == 4
    for one, two in zip(here, there, strict=True):
        for field in dataclasses.fields(one):
            a, b = getattr(one, field.name), getattr(two, field.name)
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)
    assert torch.equal(here[0].labels_BT, draw_batch(config, 1).labels_BT)


def test_clip_shares_choose_the_clips() -> None:
    first = TINY.model_copy(update={"clip_shares": [1.0]})
    assert draw_batch(first, 0).context_frames_BTHW3 is None
    third = draw_batch(TINY.model_copy(update={"clip_shares": [0, 0, 3.0]}), 0)
    assert third.context_frames_BTHW3 is not None
    assert third.context_frames_BTHW3.shape[1] == 8


def test_the_mix_has_the_share_of_compounds() -> None:
    shares = pretraining_mix(PretrainConfig()).shares()
    compounds = {name for name in FAMILIES if name not in ("translation", "yaw", "pitch")}
    assert sum(shares[name] for name in compounds) == pytest.approx(0.4)
    assert shares["translation_and_yaw"] == pytest.approx(0.24)
    assert (
        sum(pretraining_mix(TINY.model_copy(update={"compound_weight": 0})).shares()[n] for n in compounds)
        == 0
    )


def test_learning_rate_and_who_gets_which_optimizer() -> None:
    config = PretrainConfig(steps=1000, warmup=100, horizon=0, anneal=0)
    assert lr_factor(0, config) == 0.01
    assert lr_factor(99, config) == lr_factor(100, config) == 1.0
    assert lr_factor(550, config) == pytest.approx(0.505)
    assert lr_factor(1000, config) == lr_factor(5000, config) == pytest.approx(0.01)
    stopped = config.model_copy(update={"steps": 600, "horizon": 1000, "anneal": 100})
    assert lr_factor(499, stopped) == lr_factor(499, config)  # the cosine of the horizon ...
    assert lr_factor(550, stopped) == pytest.approx(0.505 / 2)  # ... and the last steps down to 0
    assert lr_factor(600, stopped) == 0
    model = build_model(TINY)
    muon, adam = make_optimizers(model, TINY)
    matrices, rest = (optimizer.param_groups[0]["params"] for optimizer in (muon, adam))
    assert len(matrices) + len(rest) == len(list(model.parameters()))
    assert all(parameter.ndim == 2 for parameter in matrices)
    assert torch.equal(build_model(TINY).patch_embedding.weight, model.patch_embedding.weight)


def test_parameters_survive_json_and_unknown_ones_are_refused() -> None:
    """The state and the note beside the weights hold them as JSON."""
    assert PretrainConfig.model_validate_json(TINY.model_dump_json()) == TINY
    with pytest.raises(ValueError, match="learning_rate"):
        PretrainConfig.model_validate({"learning_rate": 1})
