"""Judging and comparing policies end to end on a tiny random base, and what keeps a comparison honest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline import config, files
from pipeline.benchmark import action_accuracy
from pipeline.benchmark.config import AccuracyConfig
from pipeline.errors import CheckpointError, DataError, Interrupted, UsageError
from stages import report
from stages.base import run_base
from stages.common import STOP, EpochPaths
from stages.evaluate import command, result_name, result_path, run_control, run_evaluate
from stages.report import MEASURES, as_markdown, compare, load_controls, load_rows, reward_curve, run_report

SMALL = ("evaluate.basic=1", "evaluate.compound=1", "evaluate.clips=1")


@pytest.fixture(scope="module")
def judged(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """(params.yaml, root, summary) with the base judged, and a copy of it as the policy of e001."""
    from tests.conftest import TINY

    folder = tmp_path_factory.mktemp("judged")
    (folder / "params.yaml").write_text(TINY.format(weights=tiny_base))
    params, root = config.load(folder / "params.yaml", SMALL), folder / "root"
    run_base(params, root)
    summary = run_evaluate(params, "e000", root)
    shutil.copytree(EpochPaths(root, "e000").policy, EpochPaths(root, "e001").policy)
    return folder / "params.yaml", root, summary


def row(kind: str, scene: int, **values: float) -> dict[str, Any]:
    return {"kind": kind, "word": "w-3", "scene": scene} | {name: 0.5 for name, _, _ in MEASURES} | values


ROWS = [row("basic", 1), row("basic", 2), row("compound", 3), row("compound", 4)]


def test_a_policy_is_judged_once(judged: tuple[Path, Path, dict[str, Any]]) -> None:
    path, root, summary = judged
    assert summary["made"] == 2
    assert set(summary["basic"]) == set(summary["compound"])
    rows = load_rows(result_path(root, "e000"))
    assert [r["kind"] for r in rows] == ["basic", "compound"]
    assert summary["basic"]["oracle_joint"] == round(rows[0]["oracle_joint"], 4)
    before = result_path(root, "e000").read_bytes()
    again = run_evaluate(config.load(path, SMALL), "e000", root)
    assert again["made"] == 0
    assert again["basic"] == summary["basic"]
    assert result_path(root, "e000").read_bytes() == before
    assert "seconds" not in before.decode()


def test_the_same_weights_are_judged_alike_and_the_table_says_no_difference(
    judged: tuple[Path, Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    path, root, _ = judged
    run_evaluate(config.load(path, SMALL), "e001", root)
    assert load_rows(result_path(root, "e001")) == load_rows(result_path(root, "e000"))
    run_report(root, "e000", [result_path(root, "e001")], as_json=False)
    assert "e000 and e001, held-out rooms" in capsys.readouterr().out
    metrics = files.read_json(root / "evaluation" / "metrics.json", "")
    assert metrics["compound"]["oracle_joint"]["difference"] == 0.0
    assert metrics["basic"]["quality"]["before"] == metrics["basic"]["quality"]["after"]
    text = (root / "evaluation" / "report.md").read_text()
    assert len(text.splitlines()) == 2 + 2 * len(MEASURES)
    assert all(
        line.endswith(("| 0.0 [0.0, 0.0] |", "| 0.00 [0.00, 0.00] |")) for line in text.splitlines()[2:]
    )
    run_report(root, "e000", [result_path(root, "e001")], as_json=True)
    table = json.loads(capsys.readouterr().out)
    assert [entry["measure"] for entry in table] == 2 * [name for name, _, _ in MEASURES]
    assert table[0]["difference"] == {"mean": 0.0, "low": 0.0, "high": 0.0}


def test_the_reward_curve_is_in_order_of_the_epochs_and_leaves_out_what_is_unknown(tmp_path: Path) -> None:
    for epoch, value in (("e010", 0.5), ("e002", None), ("e001", 0.25)):
        files.write_json(
            tmp_path / epoch / "metrics" / "advantage.json", {"action_fine/mean": value, "selected": 4}
        )
    assert reward_curve(tmp_path) == "epoch,reward,mean\n1,action_fine,0.25\n10,action_fine,0.5\n"


def test_other_parameters_are_judged_again(judged: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> None:
    path, root, _ = judged
    shutil.copytree(root, tmp_path / "root")
    other = config.load(path, (*SMALL, "evaluate.seed=5"))
    assert run_evaluate(other, "e000", tmp_path / "root")["made"] == 2
    shutil.copy(result_path(root, "e000"), result_path(tmp_path / "root", "e001"))
    with pytest.raises(DataError, match="different cases"):
        run_report(tmp_path / "root", "e000", [result_path(tmp_path / "root", "e001")], as_json=False)


def test_a_damaged_or_missing_file_says_what_to_run(
    judged: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    path, root, _ = judged
    with pytest.raises(CheckpointError):
        run_evaluate(config.load(path, SMALL), "e002", root)
    for content in (None, b"{", b"[]", b"{}", b'{"rows": []}'):
        file = tmp_path / "e003.json"
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(DataError, match=r"e003\.json: .*wcpipe evaluate --epoch e003"):
            load_rows(file)
    with pytest.raises(DataError, match="run `wcpipe evaluate --control static`"):
        load_rows(tmp_path / "control-static.json")


def test_a_damaged_result_is_made_again(judged: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> None:
    path, root, _ = judged
    shutil.copytree(root, tmp_path / "root")
    result = result_path(tmp_path / "root", "e000")
    result.write_bytes(result.read_bytes()[:50])
    again = run_evaluate(config.load(path, SMALL), "e000", tmp_path / "root")
    assert again["made"] == 2
    assert result.read_bytes() == result_path(root, "e000").read_bytes()


def test_other_rooms_and_weights_have_their_own_file_and_a_new_seed_replaces_it(
    judged: tuple[Path, Path, dict[str, Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert result_name("e003", AccuracyConfig()) == "e003"
    assert result_name("e003", AccuracyConfig(split="rl", weights="live")) == "e003-rl-live"
    path, root, _ = judged
    shutil.copytree(root, tmp_path / "root")
    monkeypatch.setattr(action_accuracy, "evaluate_policy", lambda *args: ROWS)
    run_evaluate(config.load(path, (*SMALL, "evaluate.weights=old")), "e000", tmp_path / "root")
    assert load_rows(result_path(tmp_path / "root", "e000-old")) == ROWS
    assert not caplog.text
    run_evaluate(config.load(path, (*SMALL, "evaluate.seed=5")), "e000", tmp_path / "root")
    assert (
        "e000.json: was made from other inputs (params.evaluate.seed: 4000 -> 5): it is repl" in caplog.text
    )
    named = run_evaluate(config.load(path, SMALL), "e000", tmp_path / "root", "mine")
    assert named["made"] == 4
    assert load_rows(result_path(tmp_path / "root", "mine")) == ROWS


def test_the_training_seed_changes_no_row_and_judges_nothing_again(
    judged: tuple[Path, Path, dict[str, Any]],
) -> None:
    path, root, _ = judged
    assert run_evaluate(config.load(path, (*SMALL, "seed=7")), "e000", root)["made"] == 0


def test_a_signal_stops_an_evaluation_between_cases(
    judged: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    path, root, _ = judged
    shutil.copytree(root, tmp_path / "root")
    result_path(tmp_path / "root", "e000").unlink()
    STOP.name = "SIGTERM"
    with pytest.raises(Interrupted, match="SIGTERM before the end: the cases so far are lost"):
        run_evaluate(config.load(path, SMALL), "e000", tmp_path / "root")
    assert not result_path(tmp_path / "root", "e000").exists()


def test_controls_are_the_floor_and_the_ceiling_of_the_table(
    judged: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    path, root, _ = judged
    shutil.copytree(root, tmp_path / "root")
    params = config.load(path, SMALL)
    static, render = (run_control(params, name, tmp_path / "root") for name in ("static", "control-render"))
    for kind in ("basic", "compound"):
        assert render[kind]["oracle_joint"] == 1.0
        assert static[kind]["oracle_joint"] < 0.2
        assert render[kind]["psnr"] > 60 > static[kind]["psnr"]
    again = run_control(config.load(path, (*SMALL, "evaluate.weights=old")), "static", tmp_path / "root")
    assert again["made"] == 0  # no policy takes part
    run_report(tmp_path / "root", "e000", [result_path(tmp_path / "root", "e000")], as_json=False)
    lines = (tmp_path / "root" / "evaluation" / "report.md").read_text().splitlines()
    assert lines[0].startswith("| actions | measure | static video | true render | before |")
    assert all(line.count("|") == 8 for line in lines)
    assert lines[2].split("|")[4].strip() == "100.0"


def test_controls_of_other_cases_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files.write_json(result_path(tmp_path, "control-static"), {"rows": ROWS})
    files.write_json(result_path(tmp_path, "control-render"), {"rows": ROWS[:3]})
    assert list(load_controls(tmp_path, ROWS)) == ["static video"]
    assert "control-render.json: holds other cases" in caplog.text


def test_an_evaluation_is_of_a_policy_or_of_a_control(tmp_path: Path, tiny_params: Path) -> None:
    for given in ({}, {"epoch": "e000", "control": "static"}):
        with pytest.raises(UsageError, match="either --epoch or --control"):
            command(**given)
    with pytest.raises(UsageError, match="--control still: choose static or render"):
        command(control="still", params=tiny_params, root=tmp_path)


def test_compare_pairs_cases_and_averages_seeds() -> None:
    after = [[r | {"oracle_joint": r["oracle_joint"] + gain} for r in ROWS] for gain in (0.1, 0.3)]
    table = {(entry["kind"], entry["measure"]): entry for entry in compare(ROWS, after)}
    assert len(table) == 2 * len(MEASURES)
    entry = table["basic", "oracle_joint"]
    assert entry["before"].mean == pytest.approx(0.5)
    assert entry["after"].mean == pytest.approx(0.7)
    assert (entry["difference"].low, entry["difference"].high) == (pytest.approx(0.1), pytest.approx(0.3))
    assert table["compound", "psnr"]["difference"].mean == 0
    assert "| basic | action accuracy, oracle (%) | 50.0 [50.0, 50.0] | 70.0 " in as_markdown(
        list(table.values())
    )


@pytest.mark.parametrize(
    "other",
    [ROWS[:3], ROWS[::-1], [*ROWS[:3], row("compound", 5)], [*ROWS[:3], ROWS[3] | {"word": "s-3"}]],
)
def test_compare_refuses_different_cases(other: list[dict[str, Any]]) -> None:
    with pytest.raises(DataError, match="different cases"):
        compare(ROWS, [ROWS, other])


def test_report_needs_something_to_compare() -> None:
    with pytest.raises(UsageError, match="--after"):
        report.command(before="e000", after="", runs=None)


def test_results_refuse_what_is_not_a_number(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(tmp_path / "e000.json", {"rows": [row("basic", 1, psnr=float("nan"))]})
