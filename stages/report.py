"""`wcpipe report`: compare evaluated policies, before and after, with paired intervals."""

from __future__ import annotations

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


def load_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of an evaluation. Raises DataError when the file is missing or not an evaluation."""
    from pipeline import files
    from pipeline.errors import DataError

    remedy = f"run `wcpipe evaluate --epoch {path.stem}`"
    rows = files.read_json(path, remedy).get("rows")
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{path}: holds no rows of an evaluation; delete it and {remedy}")
    return rows


def compare(before: list[dict[str, Any]], after: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row a kind and measure: means with intervals and the paired difference over all seeds in `after`.

    Raises DataError when the files do not hold the same cases.
    """
    import numpy as np

    from pipeline.benchmark.statistics import bootstrap, paired
    from pipeline.errors import DataError

    def cases(rows: list[dict[str, Any]]) -> list[tuple[str, str, int]]:
        return [(row["kind"], row["word"], row["scene"]) for row in rows]

    if any(cases(rows) != cases(before) for rows in after):
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
                }
            )
    return table


def as_markdown(table: list[dict[str, Any]]) -> str:
    """The comparison as a markdown table."""
    lines = ["| actions | measure | before | after | difference, paired 95 % |", "|---|---|---|---|---|"]
    for row in table:
        digits = 1 if row["scale"] == 100 else 2
        cells = [row[name].shown(row["scale"], digits) for name in ("before", "after", "difference")]
        lines.append(f"| {row['kind']} | {row['title']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def run_report(root: Path, before: str, after: list[Path], as_json: bool) -> None:
    """Write `evaluation/report.md` and print the table."""
    import json

    from pipeline import files

    table = compare(load_rows(result_path(root, before)), [load_rows(path) for path in after])
    text = as_markdown(table)
    files.write_bytes(root / "evaluation" / "report.md", text.encode())
    if as_json:
        keep = ("kind", "measure", "before", "after", "difference")
        print(
            json.dumps([{name: getattr(row[name], "__dict__", row[name]) for name in keep} for row in table])
        )
        return
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=f"{before} and {', '.join(path.stem for path in after)}, held-out rooms")
    for column in ("actions", "measure", "before", "after", "difference, paired 95 %"):
        shown.add_column(column)
    for line in text.splitlines()[2:]:
        shown.add_row(*[cell.strip() for cell in line.strip("|").split("|")])
    Console().print(shown)


def command(
    before: Annotated[str, typer.Option(help="Epoch that is compared against.")] = "e000",
    after: Annotated[str, typer.Option(help="Epoch to compare.", show_default=False)] = "",
    root: o.Root = o.ARTIFACTS,
    runs: Annotated[
        list[Path] | None,
        typer.Option("--run", help="Further evaluation files of the same cases (other seeds)."),
    ] = None,
    json: o.Json = False,
) -> None:
    """Compare policies that `wcpipe evaluate` has judged: a table on the terminal and evaluation/report.md.

    Example: wcpipe report --before e000 --after e008
    """
    from pipeline.errors import UsageError

    chosen = ([result_path(root, after)] if after else []) + list(runs or ())
    if not chosen:
        raise UsageError("report needs --after EPOCH or --run FILE; for example `wcpipe report --after e008`")
    run_report(root, before, chosen, json)
