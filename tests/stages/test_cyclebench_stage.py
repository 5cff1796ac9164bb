"""The commands around cycles on a tiny base: calibrate writes alpha, CycleBench and its report, the hack table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline import config, files
from pipeline.errors import DataError, UsageError
from stages.base import run_base
from stages.calibrate import run_calibrate, write_alpha
from stages.cyclebench import (
    bench_path,
    compare_arms,
    load_bench,
    markdown,
    parse_arms,
    run_bench_report,
    run_cycle_control,
    run_cyclebench,
)
from stages.hacks import run_hacks

SMALL = ["cyclebench={settings: [composite], rooms: 1, oracle: false}", "epochs={e001: {prev: e000}}"]


@pytest.fixture(scope="module")
def root(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.conftest import TINY

    folder = tmp_path_factory.mktemp("bench")
    (folder / "params.yaml").write_text(TINY.format(weights=tiny_base))
    run_base(config.load(folder / "params.yaml", SMALL), folder)
    return folder


def load(root: Path, *overrides: str) -> config.Params:
    return config.load(root / "params.yaml", [*SMALL, *overrides])


def test_calibrate_measures_the_base_and_writes_one_number(root: Path) -> None:
    found = run_calibrate(load(root, "words.hold=[1, 2]"), "e000", root, 2)
    assert found["alpha"] == pytest.approx(np.log(2) / found["spatial"]["d_quartiles"][1], rel=0.01)
    assert found["temporal"]["pairs"] > 0
    assert files.read_json(root / "evaluation" / "calibration.json", "")["alpha"] == found["alpha"]
    path = root / "closure.yaml"
    path.write_text("# mine\nseed: 3  # kept\ncycle: {words: retracing}\n")
    write_alpha(path, 4.25)
    assert "# mine" in path.read_text()
    assert "seed: 3  # kept" in path.read_text()
    assert config.load(path).rewards == {"closure": {"alpha": 4.25}}
    write_alpha(path, 5.0)
    assert config.load(path).rewards == {"closure": {"alpha": 5.0}}


def test_cyclebench_is_made_once_and_compared_with_controls(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    params = load(root)
    summary = run_cyclebench(params, "e000", root)
    assert summary["made"] == 11
    assert 0 < summary["composite"]["esc"] <= 0.27
    assert run_cyclebench(params, "e000", root)["made"] == 0
    assert run_cycle_control(params, "control-render", root)["composite"]["esc"] == 0.0
    run_bench_report(root, (), False)
    shown = capsys.readouterr().out
    assert "control-render - " in shown
    assert "end closure ESC (d)" in shown
    assert (root / "evaluation" / "cyclebench.md").read_text() == shown
    with pytest.raises(UsageError, match="did you mean 'static'"):
        run_cycle_control(params, "control-statik", root)


def test_arms_are_paired_by_seed(root: Path) -> None:
    rows = load_bench(bench_path(root, "e000")) if bench_path(root, "e000").exists() else []
    if not rows:
        run_cyclebench(load(root), "e000", root)
        rows = load_bench(bench_path(root, "e000"))
    better = [row | {"esc": row["esc"] - 0.01} for row in rows]
    lines = compare_arms({"base": [rows], "new": [better, better]})
    esc = next(line for line in lines if line["metric"] == "esc" and line["setting"] == "all")
    difference = esc["new - base"]
    assert (difference.mean, difference.low, difference.high) == pytest.approx((-0.01,) * 3)
    assert "| all | end closure ESC (d) |" in markdown(lines)
    with pytest.raises(DataError, match="different videos"):
        compare_arms({"base": [rows], "new": [rows[::-1]]})
    with pytest.raises(UsageError, match="name=file"):
        parse_arms(["base"], root)
    with pytest.raises(DataError, match="no rows of cyclebench"):
        load_bench(root / "evaluation" / "calibration.json")


def test_the_hack_table_goes_through_the_real_rewards(root: Path) -> None:
    closure = "rewards.closure={alpha: 5.0, temporal_warmup: 0.3}"
    found = run_hacks(load(root, closure, "words.hold=[1, 2]"), "e000", root, 2, 1)
    table = {line["video"]: line for line in found["table"]}
    assert len(table) == 11
    render, still = table["render"], table["static"]
    assert render["spatial"] > 0.5  # 1 but for views without any texture, which cost d_fail
    assert still["published_spatial"] == still["published_temporal"] == pytest.approx(1.0)
    assert table["render, palindrome"]["spatial"] == pytest.approx(render["spatial"])
    assert table["base, palindrome"]["spatial"] > table["base"]["spatial"]
    assert table["render, scene swap"]["spatial"] < render["spatial"]
    assert table["render, blurred"]["spatial"] < render["spatial"]
    for line in table.values():
        assert line["gated"] <= line["spatial"] + 0.5 * line["temporal"] + 2 * line["action"] + 1e-9
    assert found["relation"]["render (ungated)"] > found["relation"]["render, palindrome (ungated)"]
    assert "| base |" in (root / "evaluation" / "hacks.md").read_text()
