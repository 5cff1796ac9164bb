"""How large an epoch is on disk, by arithmetic: sizes and file counts of every artifact, before a GPU has run.

Sizes are those of the arrays as they are stored (`groups.prefix_arrays`, `groups.rollout_arrays`, the engines). Latents
hardly compress at all, and lz4 takes little off real frames (spec cluster C): raw bytes are what a quota has to hold.
Files follow from `stores.sharding`: one a group and array up to 64 groups, blocks beyond.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

BYTES = {"uint8": 1, "bool": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int64": 8}
GB = 1e9
Arrays = list[tuple[str, tuple[int, ...], str]]  # name, shape of one group, type


@dataclass(frozen=True)
class Scale:
    """An experiment's size. Defaults: WorldPlay-5B at 480p, 64 prompts, 16 candidates, 253 frames (64 latents)."""

    name: str = "5B, 480p"
    prompts: int = 64
    candidates: int = 16
    clip: int = 16  # target clip; the video has 1 + stride (4 clip - 1) frames
    channels: int = 48
    latent: tuple[int, int] = (30, 52)
    frame: tuple[int, int] = (480, 832)
    stride: int = 4
    embeddings: tuple[tuple[int, int], ...] = ((512, 4096),)  # tokens, width of each text or image embedding
    scores: int = 12  # rewards, advantages and their details, numbers a candidate
    weights: float = 126e6  # trained weights: LoRA of rank 64 (docs/bases.md)
    sets: int = 5  # live, old, ema, two moments, float32


@dataclass(frozen=True)
class Row:
    """One array or file of an epoch."""

    artifact: str
    array: str
    shape: str
    groups: int
    bytes_group: float
    files: int

    @property
    def gigabytes(self) -> float:
        return self.groups * self.bytes_group / GB

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"gigabytes": round(self.gigabytes, 4)}


def frames_until(clip: int, stride: int) -> int:
    """Frames of a video of `clip` clips of 4 latents: the first latent is one frame, each later one `stride`."""
    return 1 + stride * (4 * clip - 1)


def epoch(scale: Scale) -> list[Row]:
    """Every artifact of one epoch whose target clip is `scale.clip`."""
    from pipeline.stores.sharding import block_size

    P, G, C = scale.prompts, scale.candidates, scale.channels
    h, w = scale.latent
    H, W = scale.frame
    past = max(1, 4 * (scale.clip - 1))
    shown = frames_until(scale.clip - 1, scale.stride) if scale.clip > 1 else 1
    new = frames_until(1, scale.stride) if scale.clip == 1 else 4 * scale.stride
    scored = new + (scale.clip > 1)
    shards = -(-P // block_size(P))
    rows: list[Row] = []

    def add(artifact: str, arrays: Arrays, files: int, record: int) -> None:
        for name, shape, dtype in arrays:
            size = math.prod(shape) * BYTES[dtype]
            rows.append(Row(artifact, name, " x ".join(map(str, shape)) + f" {dtype}", P, size, files + 1))
        rows.append(Row(artifact, "records, done", "JSON, uint32", P, record, 2 * files + 2))

    prefixes: Arrays = [
        ("latents", (C, past, h, w), "float16"),
        ("frames", (shown, H, W, 3), "uint8"),
        ("first_frame", (H, W, 3), "uint8"),
        *((f"embedding {n}", shape, "float32") for n, shape in enumerate(scale.embeddings, 1)),
        ("labels", (4 * scale.clip,), "int64"),
        ("c2w", (4 * scale.clip, 4, 4), "float64"),
        ("K", (3, 3), "float64"),
    ]
    add("prefixes.zarr", prefixes, shards, 2000)
    candidates: Arrays = [
        ("latents", (G, C, 4, h, w), "float16"),
        ("frames", (G, new, H, W, 3), "uint8"),
    ]
    add("rollouts.zarr", candidates, shards, 1500)
    poses: Arrays = [("relative", (G, scored - 1, 4, 4), "float64")]
    poses += [("past_relative", (shown - 1, 4, 4), "float64")] if shown > 1 else []
    add("scores.zarr/pose", poses, shards, 600)
    add("scores.zarr/quality", [("quality", (G, scored), "float32"), ("first", (G,), "float32")], shards, 600)
    add("advantages.zarr", [(f"{scale.scores} arrays", (scale.scores, G), "float64")], 1, 2000)
    rows[-2] = replace(rows[-2], files=2 * scale.scores)
    size = scale.weights * 4 * scale.sets
    rows.append(Row("policy/", "live, old, ema, moments", f"{scale.weights:.3g} weights float32", 1, size, 6))
    return rows


PAPER = (
    Scale(),
    Scale(
        name="8B, 480p",
        channels=32,
        embeddings=((1000, 3584), (256, 1472), (729, 1152)),
        weights=142e6,
    ),
    Scale(name="5B, 480p, first clip", clip=1),
    Scale(name="5B, 480p, full fine-tuning", weights=5.3e9),
    Scale(name="5B, 480p, 1000 prompts", prompts=1000),
)


def paper_epoch() -> list[Row]:
    """Paper scale, row by row: the 5B with LoRA at its largest target clip."""
    return epoch(Scale())


def totals(scale: Scale) -> dict[str, tuple[float, int]]:
    """Gigabytes and files of each artifact of an epoch, and of all together."""
    found: dict[str, tuple[float, int]] = {"all": (0.0, 0)}
    for row in epoch(scale):
        for name in (row.artifact, "all"):
            size, files = found.get(name, (0.0, 0))
            found[name] = (size + row.gigabytes, files + row.files)
    return found


def table(rows: list[Row]) -> str:
    """Markdown: the arrays of one epoch at paper scale, then totals of several scales."""
    lines = [
        "64 prompts x 16 candidates, 253 frames at 480p (WorldPlay-5B, LoRA of rank 64), target clip 16:",
        "",
        "| artifact | array | of one group | MB a group | GB | files |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        size = f"{row.bytes_group / 1e6:.3g}"
        lines.append(
            f"| {row.artifact} | {row.array} | {row.shape} | {size} | {row.gigabytes:.3g} | {row.files} |"
        )
    names = list(totals(PAPER[0]))
    lines += [
        "",
        f"| GB (files) of an epoch | {' | '.join(names)} |",
        "|---|" + "---|" * len(names),
    ]
    for scale in PAPER:
        found = totals(scale)
        cells = " | ".join(f"{found[name][0]:.3g} ({found[name][1]})" for name in names)
        lines.append(f"| {scale.name} | {cells} |")
    return "\n".join(lines)
