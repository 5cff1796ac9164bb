"""`wcpipe import` as a person meets it: a base folder, one line when something is wrong, and an exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file
from typer.testing import CliRunner

from pipeline.errors import CheckpointError
from pipeline.worlds.checkpoints import load_hunyuan
from pipeline.worlds.hunyuan import WorldPlayHunyuan
from stages.cli import app
from tests.pipeline.worlds.hunyuan_tiny import CONFIG, published


def test_import_of_a_tiny_8b(tmp_path: Path) -> None:
    network = WorldPlayHunyuan(**CONFIG)
    network.save_config(tmp_path)
    save_file(published(network), tmp_path / "model.safetensors")
    given = ["import", "worldplay-8b", str(tmp_path / "model.safetensors"), "--out", str(tmp_path / "base")]
    config = ["--config", str(tmp_path / "config.json")]
    ran = CliRunner().invoke(app, [*given, *config, "--json"])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["published_tensors"] == 137
    assert load_hunyuan(tmp_path / "base" / "transformer").config.num_layers == 2

    full_size = CliRunner().invoke(app, given)
    assert isinstance(full_size.exception, CheckpointError)
    assert "1768 missing" in str(full_size.exception)
    assert load_hunyuan(tmp_path / "base" / "transformer").config.num_layers == 2


@pytest.mark.parametrize("given", [["worldplay-9b", "x", "--out", "y"], ["worldplay-5b", "x"]])
def test_wrong_arguments_are_usage_errors(given: list[str]) -> None:
    assert CliRunner().invoke(app, ["import", *given]).exit_code == 2
