"""`wcpipe verify`: read every store against its checksums; with --repair, undo what is damaged or foreign."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from stages import options as o
from stages.common import report, track


def find_stores(path: Path) -> list[Path]:
    """Group stores at or below `path`, in name order. Raises DataError when there is none."""
    from pipeline.errors import DataError

    found = sorted(done.parent.parent for done in path.rglob("done/zarr.json"))
    if not found:
        raise DataError(f"{path}: holds no store; give a .zarr folder or a folder of artifacts")
    return found


def run_verify(paths: list[Path], repair: bool = False, complete: bool = False) -> dict[str, Any]:
    """Verify stores at or below `paths`. Raises DataError when something is damaged or foreign and `repair` is off.

    complete   groups that are not finished are listed and raise DataError too
    """
    from pipeline import stores
    from pipeline.cluster.states import compact_tasks
    from pipeline.errors import DataError

    found = [store for path in paths for store in find_stores(path)]
    summary: dict[str, Any] = {
        "stage": "verify",
        "stores": len(found),
        "groups": 0,
        "missing": 0,
        "bad": 0,
        "repaired": 0,
        "deleted": 0,
    }
    lines: list[str] = []
    unfinished: list[str] = []
    for path in track(found, "verify", len(found)):
        store = stores.GroupStore.open(path)
        problems = stores.verify(store)
        bad = [problem for problem in problems if problem.kind != "missing"]
        summary["groups"] += len(store)
        summary["missing"] += len(problems) - len(bad)
        summary["bad"] += len(bad)
        lines += [f"{path}: {problem.kind}: {problem.detail}" for problem in bad]
        if repair:
            summary["repaired"] += len(stores.repair(store, problems))
            summary["deleted"] += sum(problem.path is not None for problem in problems) + store.sweep()
        if complete and (pending := store.pending()):
            unfinished.append(
                f"{path}: missing: {len(pending)} of {len(store)}: groups {compact_tasks(pending)}"
            )
    if lines and not repair:
        shown = "\n  ".join(lines[:20])
        more = f"\n  and {len(lines) - 20} more" if len(lines) > 20 else ""
        raise DataError(
            f"{len(lines)} problems; `--repair` marks these groups to be made again and deletes foreign files:"
            f"\n  {shown}{more}"
        )
    if unfinished:
        listed = "\n  ".join(unfinished)
        raise DataError(f"{len(unfinished)} stores are not finished; run their stages again:\n  {listed}")
    return summary


def command(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Stores or folders that hold stores.", show_default=False)
    ] = None,
    root: o.Root = o.ARTIFACTS,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Mark damaged groups to be made again by their stage; delete files of no group."
        ),
    ] = False,
    complete: Annotated[
        bool,
        typer.Option(
            "--complete", help="List groups that are not finished and exit with 5 if there are any."
        ),
    ] = False,
    json: o.Json = False,
) -> None:
    """Read stores against their checksums and list damaged, missing and foreign groups.

    Example: wcpipe verify                      (all of artifacts/)
    Example: wcpipe verify --complete artifacts/e003
    Example: wcpipe verify --repair artifacts/e003/rollouts.zarr
    """
    report(run_verify(paths or [root], repair, complete), json)
