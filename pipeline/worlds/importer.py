"""Import a published WorldPlay checkpoint into a base folder: `transformer/`, `vae/`, world.json and import.json.

Everything that can be wrong is found before the first weight is read: names and shapes against the manifest that the
key rules give, room on the disk. Then tensors stream one by one from the mapped file into the shards; more than one is
never in memory. The folder appears whole or not at all.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline import files
from pipeline.errors import CheckpointError, StorageError, UsageError
from pipeline.worlds.checkpoints import describe_network, kept_in_fp32, read_config
from pipeline.worlds.codecs import HunyuanCodec, WanCodec
from pipeline.worlds.hunyuan import WorldPlayHunyuan
from pipeline.worlds.import_keys import Source, manifest, sources_5b, sources_8b
from pipeline.worlds.published import Published, open_published
from pipeline.worlds.shards import byte_size, write_shards
from pipeline.worlds.wan import WorldPlayWan
from pipeline.worlds.worldplay import KINDS, WORLD, About, guess_checkpoint

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Base:
    """A published base: our class, whose defaults are the full-size configuration, and the rules of its names."""

    network: type[Any]
    sources: Callable[[list[str]], dict[str, Source]]


CODECS: dict[str, type[WanCodec] | type[HunyuanCodec]] = {
    "worldplay-5b": WanCodec,
    "worldplay-8b": HunyuanCodec,
}
BASES = {"worldplay-5b": Base(WorldPlayWan, sources_5b), "worldplay-8b": Base(WorldPlayHunyuan, sources_8b)}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NAMED = 20  # names of one kind that fit into one line; all of them go to the list beside the target


@dataclass(frozen=True)
class Plan:
    """What a base's published file must hold: a network without memory, its rules, our shapes, published shapes."""

    base: str
    network: Any
    sources: dict[str, Source]
    shapes: dict[str, tuple[int, ...]]
    published: dict[str, tuple[int, ...]]


def plan_import(base: str, config: Path | None = None) -> Plan:
    """The plan of a base at full size, or as a config.json says. Raises CheckpointError for a bad one."""
    kind = BASES[base]
    options = read_config(config, kind.network) if config else {}
    with torch.device("meta"):
        network = kind.network(**options)
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    sources = kind.sources(list(shapes))
    return Plan(base, network, sources, shapes, manifest(sources, shapes))


def import_base(
    plan: Plan,
    source: Path,
    out: Path,
    *,
    vae: Path | None = None,
    checkpoint: str | None = None,
    frame_size: tuple[int, int] | None = None,
    part: str = "generator",
    dtype: str = "bfloat16",
    shard_bytes: int = 4 << 30,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Convert `source` into `out`; returns what import.json says. `progress(done)` is called for each tensor.

    `vae` is the base's frame codec as diffusers publishes it, checked and copied. `checkpoint` (None: what the source's
    path says) and `frame_size` (None: the published one; height, width) go into world.json. What diffusers keeps in
    fp32 (norms and time embedding of the 5B) stays fp32 if it is so in the file. Raises CheckpointError, naming every
    missing, unexpected or misshapen key, UsageError when `out` holds anything but an earlier import, and StorageError;
    `out` is then as it was before.
    """
    if out.exists() and not (out / "import.json").exists():
        raise UsageError(
            f"{out}: exists and is no earlier import, which alone is replaced; choose another --out"
        )
    found = open_published(source, part)
    check_published(source, found.shapes, plan.published, out)
    about = About(
        plan.base,
        checkpoint or guess_checkpoint(plan.base, source.absolute()),
        frame_size or KINDS[plan.base].frame_size,
    )
    codec = [] if vae is None else check_codec(plan.base, vae, out)
    kind = type(plan.network)
    dtypes = {
        name: torch.float32
        if kept_in_fp32(kind, name) and found.get(plan.sources[name].key).dtype == torch.float32
        else DTYPES[dtype]
        for name in plan.shapes
    }
    layout = {name: (dtypes[name], shape) for name, shape in plan.shapes.items()}
    _check_room(
        out, sum(byte_size(*entry) for entry in layout.values()) + sum(p.stat().st_size for p in codec)
    )
    note = {
        "base": plan.base,
        "checkpoint": about.checkpoint,
        "source": source.name,
        "dtype": dtype,
        "tensors": len(layout),
        "published_tensors": len(plan.published),
        "parameters": sum(parameter.numel() for parameter in plan.network.parameters()),
    }
    with files.replace_folder(out) as folder:
        (folder / "transformer").mkdir()
        plan.network.save_config(folder / "transformer")
        stream = _converted(source, found, plan, dtypes, progress)
        write_shards(folder / "transformer", layout, stream, shard_bytes)
        for path in codec:
            (folder / "vae").mkdir(exist_ok=True)
            shutil.copyfile(path, folder / "vae" / path.name)
        files.write_json(folder / WORLD, about.to_json())
        files.write_json(folder / "import.json", note)
    return note


def check_codec(base: str, folder: Path, out: Path) -> list[Path]:
    """Files of a codec folder to copy, its names and shapes checked against its own config. Raises CheckpointError."""
    codec = CODECS[base](folder)
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in describe_network(codec.network, folder).state_dict().items()
    }
    check_published(folder, open_published(folder).shapes, shapes, out)
    return [
        folder / "config.json",
        *sorted(folder.glob("*.safetensors")),
        *sorted(folder.glob("*.index.json")),
    ]


def check_published(source: Path, found: Shapes, wanted: Shapes, out: Path) -> None:
    """Raise CheckpointError unless `found` is `wanted`; a list too long for one line is written beside `out`."""
    problems = {
        "missing": [name for name in wanted if name not in found],
        "unexpected": [name for name in found if name not in wanted],
        "misshapen": [
            f"{name} is {list(found[name])}, not {list(shape)}"
            for name, shape in wanted.items()
            if name in found and found[name] != shape
        ],
    }
    problems = {kind: names for kind, names in problems.items() if names}
    if not problems:
        return
    said = "; ".join(f"{len(names)} {kind}: {', '.join(names[:NAMED])}" for kind, names in problems.items())
    where = ""
    if any(len(names) > NAMED for names in problems.values()):
        listing = out.with_name(f"{out.name}.keys.txt")
        lines = [f"{kind}\t{name}" for kind, names in problems.items() for name in names]
        files.write_bytes(listing, ("\n".join(lines) + "\n").encode())
        where = f" ... (all of them: {listing})"
    raise CheckpointError(
        f"{source}: not the tensors of this base: {said}{where}; take the other base, or give its --config"
    )


def _check_room(out: Path, need: int) -> None:
    place = next(path for path in (out, *out.resolve().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < need:
        raise StorageError(f"{out}: needs {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; free some space")


def _converted(
    source: Path,
    found: Published,
    plan: Plan,
    dtypes: dict[str, torch.dtype],
    progress: Callable[[int], None] | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Our tensors in our order, each made when it is asked for and checked for values that are no numbers."""
    for done, (name, dtype) in enumerate(dtypes.items(), start=1):
        rule = plan.sources[name]
        tensor = rule.take(found.get(rule.key)).to(dtype)
        if not bool(torch.isfinite(tensor.sum(dtype=torch.float32))):
            raise CheckpointError(f"{source}: {rule.key!r} has infinite or undefined values; copy it again")
        if progress:
            progress(done)
        yield name, tensor
        del tensor
