"""`wcpipe report`: compare evaluated policies, before and after, with paired intervals."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from stages import options as o
from stages.evaluate import result_path

MEASURES = (
    ("oracle_joint", "action accuracy, oracle (%)", 100.0),
    ("scorer_joint", "action accuracy, pose scorer (%)", 100.0),
    ("quality", "visual quality, critic", 1.0),
    ("psnr", "PSNR to the commanded view (dB)", 1.0),
    ("oracle_failed", "frames off the manifold (%)", 100.0),
)
CONTROLS = (("control-static", "static video"), ("control-render", "true render"))
log = logging.getLogger("wcpipe.report")


def load_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of an evaluation. Raises DataError when the file is missing or not an evaluation."""
    from pipeline import files
    from pipeline.errors import DataError

    kind = path.stem.removeprefix("control-")
    remedy = (
        f"run `wcpipe evaluate {'--epoch' if kind == path.stem else '--control'} {kind.partition('-')[0]}`"
    )
    rows = files.read_json(path, remedy).get("rows")
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{path}: holds no rows of an evaluation; delete it and {remedy}")
    return rows


def compare(
    before: list[dict[str, Any]],
    after: list[list[dict[str, Any]]],
    controls: Mapping[str, list[dict[str, Any]]] | None = None,
) -> list[dict[str, Any]]:
    """One row a kind and measure: means with intervals and the paired difference over all seeds in `after`.

    `controls` are further evaluations by title, such as the floor and the ceiling; they get means and no interval.
    Raises DataError when the files do not hold the same cases.
    """
    import numpy as np

    from pipeline.benchmark.statistics import bootstrap, paired
    from pipeline.errors import DataError

    def cases(rows: list[dict[str, Any]]) -> list[tuple[str, str, int]]:
        return [(row["kind"], row["word"], row["scene"]) for row in rows]

    controls = controls or {}
    if any(cases(rows) != cases(before) for rows in (*after, *controls.values())):
        raise DataError("the evaluations hold different cases: make both with the same `evaluate` parameters")
    table = []
    for kind in ("basic", "compound"):
        chosen = [i for i, row in enumerate(before) if row["kind"] == kind]
        for name, title, scale in MEASURES:
            b = np.array([before[i][name] for i in chosen])
            a = np.array([[rows[i][name] for i in chosen] for rows in after])
            table.append(
                {
                    "kind": kind,
                    "measure": name,
                    "title": title,
                    "scale": scale,
                    "before": bootstrap(b),
                    "after": bootstrap(a.mean(0)),
                    "difference": paired(a, b),
                    "controls": {
                        title: float(np.mean([rows[i][name] for i in chosen]))
                        for title, rows in controls.items()
                    },
                }
            )
    return table


def columns(table: list[dict[str, Any]]) -> list[str]:
    """Titles of the printed columns; the controls stand before the policies."""
    return ["actions", "measure", *table[0]["controls"], "before", "after", "difference, paired 95 %"]


def cells(row: dict[str, Any]) -> list[str]:
    """What is printed of one row of `compare`."""
    digits = 1 if row["scale"] == 100 else 2
    controls = [f"{value * row['scale']:.{digits}f}" for value in row["controls"].values()]
    means = [row[name].shown(row["scale"], digits) for name in ("before", "after", "difference")]
    return [row["kind"], row["title"], *controls, *means]


def as_markdown(table: list[dict[str, Any]]) -> str:
    """The comparison as a markdown table."""
    titles = columns(table)
    lines = [titles, ["---"] * len(titles), *map(cells, table)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def load_controls(root: Path, before: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The controls that were judged on the cases of `before`, by column title."""
    found = {}
    for name, title in CONTROLS:
        path = result_path(root, name)
        if path.exists():
            rows = load_rows(path)
            cases = [[(row["kind"], row["word"], row["scene"]) for row in some] for some in (rows, before)]
            if cases[0] == cases[1]:
                found[title] = rows
            else:
                log.warning("%s: holds other cases and is left out; run `wcpipe evaluate --control`", path)
    return found


def as_metrics(table: list[dict[str, Any]]) -> dict[str, Any]:
    """The comparison for `dvc metrics show` and `diff`: means before and after, by kind and measure."""
    found: dict[str, Any] = {}
    for row in table:
        of_kind = found.setdefault(row["kind"], {})
        of_kind[row["measure"]] = {name: row[name].mean for name in ("before", "after", "difference")}
    return found


def reward_curve(root: Path) -> str:
    """Mean of each reward over the finished epochs, as CSV for `dvc plots`: epoch, reward, mean."""
    import json

    lines = ["epoch,reward,mean"]
    for path in sorted(root.glob("e[0-9]*/metrics/advantage.json"), key=lambda p: int(p.parts[-3][1:])):
        for name, value in json.loads(path.read_text()).items():
            if name.endswith("/mean") and value is not None:
                lines.append(f"{int(path.parts[-3][1:])},{name.removesuffix('/mean')},{value:.6g}")
    return "\n".join(lines) + "\n"


def run_report(root: Path, before: str, after: list[Path], as_json: bool) -> None:
    """Write `evaluation/report.md`, `metrics.json` and `rewards.csv` beside it, and print the table."""
    import json

    from pipeline import files

    rows = load_rows(result_path(root, before))
    table = compare(rows, [load_rows(path) for path in after], load_controls(root, rows))
    files.write_bytes(root / "evaluation" / "report.md", as_markdown(table).encode())
    files.write_json(root / "evaluation" / "metrics.json", as_metrics(table))
    files.write_bytes(root / "evaluation" / "rewards.csv", reward_curve(root).encode())
    if as_json:
        keep = ("kind", "measure", "before", "after", "difference", "controls")
        print(
            json.dumps([{name: getattr(row[name], "__dict__", row[name]) for name in keep} for row in table])
        )
        return
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=f"{before} and {', '.join(path.stem for path in after)}, held-out rooms")
    for column in columns(table):
        shown.add_column(column)
    for row in table:
        shown.add_row(*cells(row))
    Console().print(shown)


def command(
    before: Annotated[str, typer.Option(help="Epoch that is compared against.")] = "e000",
    after: Annotated[str, typer.Option(help="Epoch to compare.", show_default=False)] = "",
    root: o.Root = o.ARTIFACTS,
    runs: Annotated[
        list[Path] | None,
        typer.Option("--run", help="Further evaluation files of the same cases (other seeds)."),
    ] = None,
    suite: Annotated[str, typer.Option(help="actions, or cyclebench.")] = "actions",
    arms: Annotated[
        list[str] | None,
        typer.Option("--arm", help="cyclebench: name=file,file (one a seed); the first is compared against."),
    ] = None,
    json: o.Json = False,
) -> None:
    """Compare policies that `wcpipe evaluate` has judged: a table on the terminal and evaluation/report.md.

    Example: wcpipe report --before e000 --after e008
    """
    from pipeline.errors import UsageError

    if suite == "cyclebench":
        from stages.cyclebench import run_bench_report

        run_bench_report(root, arms or (), json)
        return
    if suite != "actions" or arms:
        raise UsageError("report: --suite is actions or cyclebench, and --arm belongs to cyclebench")
    chosen = ([result_path(root, after)] if after else []) + list(runs or ())
    if not chosen:
        raise UsageError("report needs --after EPOCH or --run FILE; for example `wcpipe report --after e008`")
    run_report(root, before, chosen, json)
