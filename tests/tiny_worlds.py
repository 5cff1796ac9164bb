"""Tiny random WorldPlay worlds as a person has them: published files, codec, encoders, images and captions.

Everything is of the real classes and layouts; only the sizes are small. `make` walks the way of docs/your-data.md with
the commands themselves: import, then encode.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from pipeline.worlds.hunyuan import WorldPlayHunyuan
from pipeline.worlds.wan import WorldPlayWan
from tests.pipeline.worlds import hunyuan_tiny
from tests.pipeline.worlds.tiny_codecs import hunyuan_vae, wan_vae
from tests.pipeline.worlds.tiny_encoders import hunyuan_encoders, wan_encoders

FRAME = {"worldplay-5b": (32, 64), "worldplay-8b": (32, 48)}
WAN: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 24,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 32,
    "ffn_dim": 64,
    "num_layers": 2,
    "rope_max_seq_len": 64,
}
CAPTIONS = ("A room with a red box.", 'A sign that says "exit" over a door.', "Fog.")


@dataclass(frozen=True)
class Tiny:
    """Paths of a tiny world: what was downloaded, so to speak, and what the commands made of it."""

    name: str
    published: Path
    config: Path
    vae: Path
    encoders: Path
    scenes_json: Path
    base: Path
    scenes: Path


def materials(name: str, folder: Path) -> Tiny:
    """Published files, codec, encoders and a list of three scenes for one world; nothing is imported yet."""
    source = folder / "downloads"
    source.mkdir(parents=True)
    torch.manual_seed(5)
    if name == "worldplay-5b":
        wan = WorldPlayWan(**WAN)
        wan.save_config(source)
        published = source / "model.pt"
        torch.save({"generator": {f"model.{k}": v for k, v in wan.state_dict().items()}}, published)
        vae, encoders = wan_vae(source / "vae"), wan_encoders(source)
    else:
        hunyuan = WorldPlayHunyuan(**hunyuan_tiny.CONFIG)
        hunyuan.save_config(source)
        (source / "ar_model").mkdir()
        published = source / "ar_model" / "model.safetensors"
        save_file(hunyuan_tiny.published(hunyuan), published)
        vae, encoders = hunyuan_vae(source / "vae"), hunyuan_encoders(source)
    return Tiny(
        name=name,
        published=published,
        config=source / "config.json",
        vae=vae,
        encoders=encoders,
        scenes_json=scene_list(folder),
        base=folder / "base",
        scenes=folder / "scenes.zarr",
    )


def scene_list(folder: Path) -> Path:
    """Three images of different shape with captions, as the official release lists them."""
    (folder / "images").mkdir(exist_ok=True)
    entries = []
    for number, caption in enumerate(CAPTIONS):
        pixels = np.random.default_rng(number).integers(0, 256, (40 + 30 * number, 90, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
        entries.append({"image_path": f"images/{number}.png", "caption": caption})
    path = folder / "scenes.json"
    path.write_text(json.dumps(entries))
    return path


def wcpipe(*arguments: object) -> str:
    """Run a command in this process; it must succeed. Returns its stdout."""
    from stages.cli import app

    ran = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return ran.stdout


def import_base(tiny: Tiny, dtype: str = "bfloat16") -> dict[str, Any]:
    """`wcpipe import`; a full fine-tune needs float32."""
    height, width = FRAME[tiny.name]
    given = [
        "import",
        tiny.name,
        tiny.published,
        "--out",
        tiny.base,
        "--config",
        tiny.config,
        "--vae",
        tiny.vae,
    ]
    return json.loads(wcpipe(*given, "--frame-size", f"{height}x{width}", "--dtype", dtype, "--json"))


def encode(tiny: Tiny, *more: object) -> dict[str, Any]:
    """`wcpipe encode`."""
    given = [
        "encode",
        tiny.scenes_json,
        "--base",
        tiny.base,
        "--encoders",
        tiny.encoders,
        "--out",
        tiny.scenes,
    ]
    return json.loads(wcpipe(*given, *more, "--json"))


def make(name: str, folder: Path) -> Tiny:
    """A tiny world, imported, with its scenes encoded."""
    tiny = materials(name, folder)
    import_base(tiny)
    encode(tiny)
    return tiny
