"""`wcpipe encode`: a list of images and captions becomes a store of encoded scenes, once.

The only command that loads encoders. What cannot be used is left out and said by name, on stderr and in a file beside
the store; a run that is started again encodes only what is missing.
"""

from __future__ import annotations

import logging
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stages import options as o
from stages.common import STOP, Stopwatch, parse_shard, report, track

if TYPE_CHECKING:
    from pipeline.scenes import LeftOut, SceneEntry
    from pipeline.stores import Shard
    from pipeline.worlds.encoders import Encoders

log = logging.getLogger("wcpipe.encode")

CODE = 1  # as in stages.prefix
SAID = 20  # left-out entries that are said on stderr; all are in the file


class EmbeddingType(StrEnum):
    """What encoders compute in and embeddings are stored as."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def run_encode(
    scenes: Path,
    base: Path,
    encoders_folder: Path,
    out: Path,
    images: Path | None = None,
    dtype: str = "bfloat16",
    shard: Shard | None = None,
) -> dict[str, Any]:
    """Write `out`, one group a usable scene and one for the empty caption; scenes that are done stay.

    Raises DataError when nothing can be used, CheckpointError for a bad base or encoder.
    """
    import torch

    from pipeline.scenes import load_image, read_scenes
    from pipeline.stores import GroupStore, Shard, block_size, to_array
    from pipeline.worlds.encoders import check_finite, encoders_digest, open_encoders
    from pipeline.worlds.registry import default_device
    from pipeline.worlds.scene_store import KIND, NEGATIVE, scene_arrays, scene_record
    from pipeline.worlds.worldplay import codec_digest, open_codec, read_world, world_spec

    watch, shard = Stopwatch(), shard or Shard()
    about = read_world(base)
    device = default_device(about.world)
    codec = open_codec(base, device)
    spec = world_spec(about, codec)
    with watch.time("read"):
        entries, left_out = read_scenes(scenes, images, spec.frame_size)
    with watch.time("load"):
        encoders = open_encoders(about.world, encoders_folder, device, getattr(torch, dtype))
        identity = encoders_digest(about.world, encoders_folder)
    entries, records = _readable(encoders, entries, left_out, scene_record)
    _report_left_out(out, scenes, entries, left_out)
    store = GroupStore.prepare(
        out,
        kind=KIND,
        arrays=scene_arrays(spec, encoders.prepare([*(entry.caption for entry in entries), ""])),
        keys=[*(entry.key for entry in entries), NEGATIVE],
        inputs={
            "stage": "encode",
            "code": CODE,
            "world": about.world,
            "frame_size": list(spec.frame_size),
            "codec": codec_digest(base),
            "encoders": identity,
            "dtype": dtype,
        },
        block=block_size(len(entries) + 1),
    )
    pending, made = store.pending(shard), 0
    for index in track(store.take(pending, STOP.check), "encode", len(pending)):
        entry = entries[index] if index < len(entries) else None
        arrays = {
            "first_frame": to_array(torch.zeros(*spec.frame_size, 3, dtype=torch.uint8), "uint8"),
            "first_latent": to_array(torch.zeros(spec.latent_shape), "float32"),
        }
        frame = None
        if entry is not None:
            frame = load_image(entry.image, spec.frame_size)
            with watch.time("codec"):
                arrays = {
                    "first_frame": frame,
                    "first_latent": to_array(codec.encode(frame[None])[:, 0], "float32"),
                }
        with watch.time("encoders"):
            embeddings = encoders.encode("" if entry is None else entry.caption, frame)
        check_finite(embeddings, store.keys[index])
        arrays |= {name: to_array(value, store.specs[name].dtype) for name, value in embeddings.items()}
        with watch.time("store"):
            store.write(index, arrays, {"caption": ""} if entry is None else records[index])
        made += 1
    if shard.alone or not store.pending():
        store.sweep()
    return {
        "stage": "encode",
        "scenes": len(entries),
        "left_out": len(left_out),
        "made": made,
        "missing": len(store.pending()),
        "time": watch.rounded(),
    }


def _readable(
    encoders: Encoders, entries: list[SceneEntry], left_out: list[LeftOut], record_of: Any
) -> tuple[list[SceneEntry], list[dict[str, Any]]]:
    """Entries whose caption fits and whose actions can be read, with their records; the others join `left_out`."""
    from pipeline.errors import DataError
    from pipeline.scenes import LeftOut
    from pipeline.worlds.encoders import too_long

    kept, records = [], []
    for entry in entries:
        reason = too_long(encoders, entry.caption)
        try:
            record = record_of(entry)
        except DataError as error:
            reason = str(error)
        if reason is not None:
            left_out.append(LeftOut(entry.index, entry.name, reason))
            continue
        kept.append(entry)
        records.append(record)
    left_out.sort(key=lambda one: one.index)
    return kept, records


def _report_left_out(out: Path, scenes: Path, entries: list[SceneEntry], left_out: list[LeftOut]) -> None:
    """Say what is left out, and keep it in `<out>.left-out.json`. Raises DataError when nothing is left."""
    from dataclasses import asdict

    from pipeline import files
    from pipeline.errors import DataError

    listing = out.with_name(f"{out.stem}.left-out.json")
    if left_out:
        for one in left_out[:SAID]:
            log.warning("%s: left out: %s", scenes, one)
        if len(left_out) > SAID:
            log.warning("%s: left out: %d more, all in %s", scenes, len(left_out) - SAID, listing)
        files.write_json(listing, {"list": str(scenes), "left_out": [asdict(one) for one in left_out]})
    else:
        listing.unlink(missing_ok=True)
    if not entries:
        raise DataError(f"{scenes}: no entry is left; all reasons are in {listing}")


def command(
    scenes: Annotated[
        Path,
        typer.Argument(help="The list: JSON, [{image_path, caption}, ...].", show_default=False),
    ],
    base: Annotated[
        Path, typer.Option("--base", help="Folder of `wcpipe import`, with its vae.", show_default=False)
    ],
    encoders: Annotated[
        Path,
        typer.Option(
            "--encoders",
            help="Diffusers folder of the base: text_encoder, tokenizer, ...",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Store to write, such as scenes.zarr.", show_default=False)
    ],
    images: Annotated[
        Path | None,
        typer.Option(
            "--images", help="Folder that image paths start from; else that of the list.", show_default=False
        ),
    ] = None,
    dtype: Annotated[
        EmbeddingType, typer.Option("--dtype", help="Compute and store embeddings in.")
    ] = EmbeddingType.bfloat16,
    shard: o.ShardText = o.WHOLE,
    json: o.Json = False,
) -> None:
    """Encode your own images and captions for a published world: latents and embeddings, once.

    Example: wcpipe encode scenes.json --base weights/worldplay-5b --encoders Wan2.2-TI2V-5B -o scenes.zarr
    """
    report(run_encode(scenes, base, encoders, out, images, dtype.value, parse_shard(shard)), json)
