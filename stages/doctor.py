"""`wcpipe doctor`: what is installed, what is missing, and whether this machine can run the loop."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from stages import options as o

# distribution, imported module, what it is needed for; a test compares them with pyproject.toml
CORE = (
    ("torch", "torch", "world models and updates"),
    ("diffusers", "diffusers", "the transformer"),
    ("peft", "peft", "LoRA"),
    ("safetensors", "safetensors", "weights"),
    ("transformers", "transformers", "encoders of published bases, LoRA"),
    ("pillow", "PIL", "your own images"),
    ("av", "av", "wcpipe preview"),
    ("zarr", "zarr", "stores"),
    ("google-crc32c", "google_crc32c", "marks of finished groups"),
    ("numpy", "numpy", "everything"),
    ("opencv-python-headless", "cv2", "the embedded tracker of closure rewards"),
    ("pydantic", "pydantic", "params.yaml"),
    ("ruamel.yaml", "ruamel.yaml", "params.yaml"),
    ("typer", "typer", "the command line"),
    ("rich", "rich", "progress bars and tables"),
    ("dvc", "dvc", "dvc repro"),
)


def _installed(distribution: str, module: str) -> str | None:
    try:
        if importlib.util.find_spec(module) is None:
            return None
    except ModuleNotFoundError:  # the parent of a dotted name
        return None
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown version"


def run_doctor(root: Path, params: Path) -> list[dict[str, Any]]:
    """One row a check: name, state ("ok", "missing", "optional"), detail. Nothing is changed."""
    rows: list[dict[str, Any]] = []

    def row(name: str, state: str, detail: str) -> None:
        rows.append({"name": name, "state": state, "detail": detail})

    row("python", "ok", platform.python_version())
    for distribution, module, purpose in CORE:
        found = _installed(distribution, module)
        row(distribution, "ok" if found else "missing", found or f"needed for {purpose}: pip install -e .")
    _devices(row)
    _parameters(row, params)
    free = shutil.disk_usage(next(path for path in (root, *root.absolute().parents) if path.exists())).free
    row("disk", "ok" if free > 2 << 30 else "missing", f"{free / (1 << 30):.1f} GiB free for {root}")
    return rows


def _devices(row: Any) -> None:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    row("cpu", "ok", f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads")
    count = torch.cuda.device_count()
    names = ", ".join(sorted({torch.cuda.get_device_name(index) for index in range(count)}))
    row(
        "gpu",
        "ok" if count else "optional",
        f"{count} x {names}" if count else "none; the mini world needs none",
    )


def _parameters(row: Any, path: Path) -> None:
    from pipeline.errors import WcpipeError

    try:
        from pipeline import config
        from pipeline.scorers.choice import choose
        from pipeline.worlds.registry import base_digest, source_inputs

        params = config.load(path)
    except ImportError as error:
        row(str(path), "missing", f"cannot be read before what is missing above is installed ({error})")
        return
    except WcpipeError as error:
        row(str(path), "missing", str(error))
        return
    row(str(path), "ok", f"{len(params.epochs)} epochs")
    weights = Path(params.world.weights)
    if params.world.base == "pretrain":
        row("base", "ok", "world.base is pretrain: `wcpipe base` trains it, for hours")
    else:
        remedy = f"{weights}: holds no base; restore it from the repository or set world.base: pretrain"
        if params.world.name != "mini":
            remedy = f"{weights}: holds no base; make it with `wcpipe import`"
            _weights(row, "scenes", None, lambda: str(source_inputs(params.world)["scenes"]))
        _weights(row, "base", remedy, partial(base_digest, weights))
    for scorer in params.score.scorers:
        choice = choose(scorer, params)
        by = f" ({choice.worker})" if choice.worker else ""
        _weights(row, f"scorer {scorer}{by}", None, choice.digest)


def _weights(row: Any, name: str, remedy: str | None, digest: Callable[[], str]) -> None:
    """A row for weights that a digest reads whole; `remedy` replaces the error's own words."""
    from pipeline.digests import SHORT
    from pipeline.errors import WcpipeError

    try:
        row(name, "ok", f"digest {digest()[:SHORT]}")
    except WcpipeError as error:
        row(name, "missing", remedy or str(error))


def command(root: o.Root = o.ARTIFACTS, params: o.ParamsFile = o.PARAMS, json: o.Json = False) -> None:
    """Say what is installed and what is missing; exit code 10 when something needed is missing.

    Example: wcpipe doctor
    """
    from pipeline.errors import DependencyError

    rows = run_doctor(root, params)
    if json:
        import json as encoder

        print(encoder.dumps(rows))
    else:
        for row in rows:
            mark = {"ok": "ok", "missing": "MISSING", "optional": "-"}[row["state"]]
            print(f"{mark:<8} {row['name']:<24} {row['detail']}")
    missing = [row["name"] for row in rows if row["state"] == "missing"]
    if missing:
        raise DependencyError(f"missing: {', '.join(missing)}; the lines above say what to do")
