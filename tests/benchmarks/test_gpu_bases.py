"""The GPU benchmark's whole path on the CPU with a tiny network, and what it says where there is no GPU."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_bases

GOLDEN = Path(__file__).parents[1] / "golden"


def test_every_part_is_measured_on_a_tiny_network(tmp_path: Path) -> None:
    out = tmp_path / "tiny.json"
    words = [
        "--size",
        "tiny",
        "--device",
        "cpu",
        "--out",
        str(out),
        "--golden",
        str(GOLDEN),
        "--repeats",
        "1",
    ]
    assert gpu_bases.main(words) == 0
    found = json.loads(out.read_text())
    assert found["run"] is True
    assert found["golden"]["fp32_largest"] < 1e-5
    assert 0 < found["golden"]["bf16_relative_squared"] < 1e-3
    # 2 layers of keys and values in bf16, 8 latents of 6 tokens, width 48: the plain form, half of both branches
    assert found["context"]["cache_gb"] == pytest.approx(2 * 2 * 8 * 6 * 48 * 2 / 1e9)
    assert found["clip"]["largest_difference"] < 0.1
    assert found["clip"]["seconds_sequential"] > 0
    for part in ("update_checkpointed", "update_plain"):
        assert found[part]["finite"] is True
        assert found[part]["grad_norm"] > 0
        # rank 2 on 9 layers of each of 2 blocks, 48 x 48, but keys and values of text read it in the network's width
        assert found[part]["trained_weights"] == 2 * 9 * 2 * (48 + 48)
    assert found["update_plain"]["grad_norm"] == pytest.approx(
        found["update_checkpointed"]["grad_norm"], rel=0.05
    )


def test_parts_that_do_not_fit_into_the_time_are_said(tmp_path: Path) -> None:
    out = tmp_path / "short.json"
    words = [
        "--size",
        "tiny",
        "--device",
        "cpu",
        "--out",
        str(out),
        "--golden",
        str(GOLDEN),
        "--seconds",
        "30",
    ]
    assert gpu_bases.main(words) == 0
    found = json.loads(out.read_text())
    assert "skipped" in found["build"]
    assert "context" not in found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_that_it_was_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.json"
    assert gpu_bases.main(["--out", str(out)]) == 10
    assert "not run: no GPU" in capsys.readouterr().err
    assert json.loads(out.read_text())["run"] is False


def test_the_arithmetic_is_that_of_the_documentation() -> None:
    """docs/bases.md: 78 TFLOP a step and 276 a context pass at full size (spec worldplay 5)."""

    with torch.device("meta"):
        config = gpu_bases.WorldPlayWan(num_layers=1).config
    found = gpu_bases.tflop(type(config)({**config, "num_layers": 30}), gpu_bases.SIZES["5b"])
    assert found["step"] == pytest.approx(78, abs=1)
    assert found["context"] == pytest.approx(276, abs=1)
