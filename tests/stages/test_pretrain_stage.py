"""`wcpipe pretrain` on a tiny base: what is finished stays, a signal stops it, the same command goes on."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path

import pytest

from pipeline.config import Params
from pipeline.errors import CheckpointError, Interrupted, UsageError
from pipeline.worlds.mini.config import PretrainConfig
from pipeline.worlds.registry import base_digest
from stages.base import run_base
from stages.common import STOP, EpochPaths
from stages.pretrain import command, run_pretrain

TINY = PretrainConfig(
    horizon=0,
    anneal=0,
    steps=4,
    batch=2,
    channels=8,
    dim=32,
    heads=2,
    layers=1,
    ffn=32,
    save_every=2,
    clip_shares=[1.0],
)


@pytest.fixture
def folder(tiny_base: Path, tmp_path: Path) -> Path:
    """A folder that holds a codec already: fitting one takes six hundred rooms."""
    (tmp_path / "base").mkdir()
    shutil.copy(tiny_base / "codec.safetensors", tmp_path / "base")
    return tmp_path / "base"


def test_a_base_is_trained_and_can_be_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.worlds.mini import pretrain

    summary = run_pretrain(TINY, folder, "world", workers=0, compiled=False)
    assert summary["steps"] == 4
    assert 0 < summary["loss"] < 10
    whole = base_digest(folder)

    # the same, stopped by a signal on the way
    second = folder.with_name("second")
    second.mkdir()
    shutil.copy(folder / "codec.safetensors", second)
    loss_of = pretrain.training_loss

    def signalled(model, codec, config, batch, step):  # type: ignore[no-untyped-def]
        if step == 2:
            STOP.name = "SIGTERM"
        return loss_of(model, codec, config, batch, step)

    monkeypatch.setattr(pretrain, "training_loss", signalled)
    with pytest.raises(Interrupted, match="SIGTERM.*one each 2 steps.*same command"):
        run_pretrain(TINY, second, "world", workers=0, compiled=False)
    monkeypatch.undo()
    assert json.loads((second / "pretrain.json").read_text())["step"] == 2
    run_pretrain(TINY, second, "world", workers=0, compiled=False)
    assert base_digest(second) == whole
    assert run_pretrain(TINY, second, "world", workers=0, compiled=False)["steps"] == 4  # nothing left to do


def test_a_finished_base_is_not_trained_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.worlds.mini import pretrain

    run_pretrain(TINY, folder, "world", workers=0, compiled=False)
    (folder / "state.safetensors").unlink()
    monkeypatch.setattr(pretrain, "training_loss", lambda *args: pytest.fail("it trains"))
    assert run_pretrain(TINY, folder, "world", workers=0, compiled=False)["made"] == 0
    other = TINY.model_copy(update={"lr": 1e-3})
    with pytest.raises(CheckpointError, match=r"pretrain\.json: .*other pretrain parameters.*another folder"):
        run_pretrain(other, folder, "world", workers=0, compiled=False)


def test_a_codec_of_other_channels_is_refused(folder: Path) -> None:
    before = (folder / "codec.safetensors").read_bytes()
    wide = TINY.model_copy(update={"channels": 12})
    with pytest.raises(CheckpointError, match=r"codec\.safetensors: has 8 channels where .*channels is 12"):
        run_pretrain(wide, folder, "world", workers=0, compiled=False)
    assert (folder / "codec.safetensors").read_bytes() == before


def test_a_trained_base_lies_beside_the_one_that_is_used(folder: Path, tiny_base: Path) -> None:
    """`wcpipe base` with shipped weights replaces `base`; a training of hours must not be lost by that."""
    default = inspect.signature(command).parameters["folder"].default
    assert default == EpochPaths(Path("artifacts"), "e000").pretrained != Path("artifacts/base")
    root = folder.parent / "root"
    (root / "pretrain").mkdir(parents=True)
    shutil.copy(folder / "codec.safetensors", root / "pretrain")
    run_pretrain(TINY, root / "pretrain", "world", workers=0, compiled=False)
    world = {"base": "pretrain", "weights": str(tiny_base)}
    params = Params.model_validate_strict({"world": world, "pretrain": TINY.model_dump(mode="json")})
    assert run_base(params, root)["made"] == 1
    assert base_digest(root / "base") == base_digest(root / "pretrain")
    shipped = Params.model_validate_strict({"world": {**world, "base": "shipped"}})
    assert run_base(shipped, root)["made"] == 1
    assert base_digest(root / "base") == base_digest(tiny_base)
    assert (root / "pretrain" / "state.safetensors").exists()
    assert run_base(params, root)["made"] == 1
    assert base_digest(root / "base") == base_digest(root / "pretrain")


def test_an_unknown_part_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="world, pose or critic"):
        run_pretrain(TINY, folder, "oracle", workers=0, compiled=False)
