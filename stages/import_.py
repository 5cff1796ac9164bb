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


def parse_size(text: str | None) -> tuple[int, int] | None:
    """`704x1280` -> (704, 1280), height first; None stays None. Raises UsageError."""
    from pipeline.errors import UsageError

    if text is None:
        return None
    height, _, width = text.lower().partition("x")
    if not (height.isdigit() and width.isdigit() and int(height) and int(width)):
        raise UsageError(f"--frame-size {text}: write height x width in pixels, as 704x1280")
    return int(height), int(width)


def command(
    base: Annotated[BaseName, typer.Argument(help="Which base it is.", show_default=False)],
    source: Annotated[
        Path,
        typer.Argument(
            help="The published file (5B: model.pt; 8B: *.safetensors), or its folder.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to make, such as artifacts/base.")],
    vae: Annotated[
        Path | None,
        typer.Option("--vae", help="The base's frame codec: diffusers' vae folder.", show_default=False),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            help="5B: distilled; 8B: ar, ar-rl or ar-distilled. Else as the source's folder is called.",
            show_default=False,
        ),
    ] = None,
    frame_size: Annotated[
        str | None,
        typer.Option(
            "--frame-size",
            help="Height x width, if not the published 704x1280 or 480x832.",
            show_default=False,
        ),
    ] = None,
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

    Example: wcpipe import worldplay-5b wan_distilled_model/model.pt --vae Wan2.2-TI2V-5B/vae -o weights/worldplay-5b
    Example: wcpipe import worldplay-8b ar_model --vae HunyuanVideo-1.5/vae -o weights/worldplay-8b
    """
    from pipeline.errors import UsageError
    from pipeline.worlds.importer import import_base, plan_import
    from pipeline.worlds.worldplay import KINDS

    known = KINDS[base.value].checkpoints
    if checkpoint is not None and checkpoint not in known:
        raise UsageError(f"--checkpoint {checkpoint}: of {base.value} there are {', '.join(known)}")
    plan = plan_import(base.value, config)
    with step_bar("import", len(plan.shapes)) as advance:

        def progress(done: int) -> None:
            advance(done)
            STOP.check()

        note = import_base(
            plan,
            source,
            out,
            vae=vae,
            checkpoint=checkpoint,
            frame_size=parse_size(frame_size),
            part=part,
            dtype=dtype.value,
            progress=progress,
        )
    report({"stage": "import"} | note | {"folder": str(out)}, json)
