"""`wcpipe import`: a published WorldPlay checkpoint becomes a base folder of ours, checked key by key and streamed.

The weights are not downloaded here: take them from their publisher and name the file. What the source must look like
and what was proved without it is in docs/bases.md.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from stages import options as o
from stages.common import STOP, report, step_bar


class BaseName(StrEnum):
    """The published bases."""

    worldplay_5b = "worldplay-5b"
    worldplay_8b = "worldplay-8b"


class DtypeName(StrEnum):
    """What weights are stored in."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def command(
    base: Annotated[BaseName, typer.Argument(help="Which base it is.", show_default=False)],
    source: Annotated[
        Path,
        typer.Argument(
            help="The published file (5B: model.pt; 8B: *.safetensors), or its folder.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to make, such as artifacts/base.")],
    config: Annotated[
        Path | None, typer.Option("--config", help="A config.json, if it is not the full-size network.")
    ] = None,
    part: Annotated[
        str, typer.Option("--part", help="Entry of the 5B's envelope: generator or generator_ema.")
    ] = "generator",
    dtype: Annotated[DtypeName, typer.Option("--dtype", help="Store weights as.")] = DtypeName.bfloat16,
    json: o.Json = False,
) -> None:
    """Import published WorldPlay weights into a diffusers folder, checked and streamed.

    Example: wcpipe import worldplay-5b wan_distilled_model/model.pt --out artifacts/base
    Example: wcpipe import worldplay-8b ar_distilled_action_model --out artifacts/base
    """
    from pipeline.worlds.importer import import_base, plan_import

    plan = plan_import(base.value, config)
    with step_bar("import", len(plan.shapes)) as advance:

        def progress(done: int) -> None:
            advance(done)
            STOP.check()

        note = import_base(plan, source, out, part=part, dtype=dtype.value, progress=progress)
    report({"stage": "import"} | note | {"folder": str(out)}, json)
