"""`wcpipe scorers`: the real scorers' environments (made, listed) and whether each one works (checked).

Their packages exclude each other and the core, so each lives in a virtual environment of its own below `.scorers`
(or $WCPIPE_SCORERS). Nothing is downloaded but packages: weights are fetched by hand, from where `list` says.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from stages import options as o

app = typer.Typer(
    help="Real scorers (HPSv3, Depth-Anything-3, CoTracker3, RoMa), each in an environment of its own.",
    no_args_is_help=True,
)
Names = Annotated[
    list[str], typer.Argument(help="hpsv3, depth-anything-3, cotracker or roma.", show_default=False)
]
Name = Annotated[str, typer.Argument(help="hpsv3, depth-anything-3, cotracker or roma.", show_default=False)]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@app.command("install")
def install(
    names: Names,
    python: Annotated[
        Path | None,
        typer.Option("--python", help="Use this existing environment's interpreter.", show_default=False),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            "--base", help="Interpreter to make environments with; else this one.", show_default=False
        ),
    ] = None,
    find_links: Annotated[
        Path | None,
        typer.Option("--find-links", help="Install from this folder of wheels, offline.", show_default=False),
    ] = None,
    own_torch: Annotated[
        bool, typer.Option("--own-torch", help="A torch for each scorer instead of a shared one.")
    ] = False,
    json: o.Json = False,
) -> None:
    """Make the environment of one or more scorers, from requirements/NAME.txt.

    Example: wcpipe scorers install hpsv3 depth-anything-3
    """
    from pipeline.errors import UsageError
    from pipeline.scorers import environments

    if python is not None and len(names) != 1:
        raise UsageError("--python names the environment of one scorer: install one at a time")
    if find_links is not None and not find_links.is_dir():
        raise UsageError(f"--find-links {find_links}: is no folder; give one that holds wheels")
    for name in names:
        about = environments.about(name)
        _say(f"{name}: {about.measures}; {about.size} beside torch (5.5 GB, shared); {about.licence}")
        if python is not None:
            found = environments.register(name, python, _say)
        else:
            chosen = base or Path(sys.executable)
            found = environments.install(
                name, _say, base=chosen, find_links=find_links, shared_torch=not own_torch
            )
        _print({"scorer": name, "python": found["python"], "packages": len(found["packages"])}, json)
        for weights in about.weights:
            _say(f"{name}: fetch {weights.into} ({weights.size}): {weights.source}")


@app.command("list")
def list_(
    names: Annotated[list[str] | None, typer.Argument(help="Only these scorers.", show_default=False)] = None,
    params: o.ParamsFile = o.PARAMS,
    set_: o.Set = None,
    json: o.Json = False,
) -> None:
    """Say which real scorers there are, what is installed, their sizes, licences and weights.

    Example: wcpipe scorers list
    """
    for row in run_list(names or [], params, set_):
        if json:
            _print(row, json)
            continue
        print(f"{row['scorer']:<18} {row['measures']}: {row['state']}")
        for key in ("size", "licence", "note"):
            print(f"{'':<18} {key}: {row[key]}")
        for weights in row["weights"]:
            print(
                f"{'':<18} {weights['state']}: {weights['file']} ({weights['size']}), from {weights['source']}"
            )


def run_list(names: list[str], params: Path, set_: list[str] | None) -> list[dict[str, Any]]:
    """One row a scorer. Nothing is started."""
    from pipeline.errors import DependencyError
    from pipeline.scorers import environments

    rows = []
    for name in names or list(environments.ABOUT):
        about, settings = environments.about(name), _settings(name, params, set_)
        try:
            state = f"installed ({environments.record(name)['python']})"
            if not environments.is_current(name):
                state += f", but requirements/{name}.txt has changed since"
        except DependencyError as error:
            state = f"not installed ({error})"
        folder, weights = Path(settings.weights), []
        for one in about.weights:
            files = [part.strip() for part in one.into.split(",")]
            there = all((folder / part).exists() for part in files)
            weights.append(
                {
                    "file": str(folder / one.into),
                    "state": "there" if there else "missing",
                    "size": one.size,
                    "source": one.source,
                }
            )
        rows.append(
            {
                "scorer": name,
                "measures": about.measures,
                "state": state,
                "size": f"{about.size} beside torch, which all share (5.5 GB)",
                "licence": about.licence,
                "note": about.note,
                "weights": weights,
            }
        )
    return rows


@app.command("check")
def check(
    name: Name,
    random: Annotated[
        bool, typer.Option("--random", help="With random weights on a CPU: proves the installation alone.")
    ] = False,
    params: o.ParamsFile = o.PARAMS,
    set_: o.Set = None,
    json: o.Json = False,
) -> None:
    """Run a scorer on a clip that is known exactly; exit code 10 when it does not measure what it should.

    Example: wcpipe scorers check depth-anything-3
    """
    from pipeline.errors import DependencyError
    from pipeline.scorers import environments

    environments.about(name)
    environments.record(name)  # before the imports below, which take a while
    from pipeline.scorers.self_test import check_scorer

    found = check_scorer(name, _settings(name, params, set_), _say, random)
    _print(found, json)
    if not found["passed"]:
        raise DependencyError(f"{name} does not measure what it should: {'; '.join(found['findings'])}")


def _settings(name: str, path: Path, set_: list[str] | None) -> Any:
    """The scorer's settings from params.yaml where there is one."""
    from pipeline.scorers.choice import settings_of
    from pipeline.scorers.worker_settings import worker_settings
    from stages.common import load_params

    return settings_of(name, load_params(path, set_)) if path.exists() else worker_settings(name, {})


def _print(row: dict[str, Any], as_json: bool) -> None:
    import json

    if as_json:
        print(json.dumps(row))
    else:
        print(
            ", ".join(
                f"{key} {'; '.join(value) if isinstance(value, list) else value}"
                for key, value in row.items()
            )
        )
