"""`wcpipe pretrain` on a tiny base: parameters are checked, a signal stops it, the same command goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipeline.errors import ConfigError, Interrupted, UsageError
from pipeline.worlds.registry import base_digest
from stages.common import STOP
from stages.pretrain import run_pretrain

TINY = {
    "steps": 4, "batch": 2, "channels": 8, "dim": 32, "heads": 2, "layers": 1, "ffn": 32, "save_every": 2,
    "clip_shares": [1.0],
}  # fmt: skip


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
    with pytest.raises(Interrupted, match="SIGTERM.*same command"):
        run_pretrain(TINY, second, "world", workers=0, compiled=False)
    monkeypatch.undo()
    assert json.loads((second / "pretrain.json").read_text())["step"] == 2
    run_pretrain(TINY, second, "world", workers=0, compiled=False)
    assert base_digest(second) == whole
    assert run_pretrain(TINY, second, "world", workers=0, compiled=False)["steps"] == 4  # nothing left to do


def test_a_misspelt_parameter_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"pretrain\.step.*steps"):
        run_pretrain({"step": 4}, folder, "world", workers=0, compiled=False)


def test_an_unknown_part_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="world, pose or critic"):
        run_pretrain({}, folder, "oracle", workers=0, compiled=False)
