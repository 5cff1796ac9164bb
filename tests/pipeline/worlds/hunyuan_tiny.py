"""The tiny WorldPlay-8B of the golden files: published tensors filled by name, renamed by the import's rules."""

from __future__ import annotations

from typing import Any

import torch

from pipeline.worlds.base import ContextCache
from pipeline.worlds.hunyuan import HunyuanText, RawContext, WorldPlayHunyuan
from pipeline.worlds.import_keys import manifest, sources_8b
from tests.golden.fill import poses, wave

CONFIG: dict[str, Any] = {
    "in_channels": 17,
    "out_channels": 8,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "num_layers": 2,
    "num_refiner_layers": 2,
    "text_embed_dim": 24,
    "text_embed_2_dim": 1472,
    "image_embed_dim": 20,
    "rope_axes_dim": (4, 14, 14),
}
LATENTS = wave("hx", (1, 17, 8, 3, 4), 0.6)
TEXT = HunyuanText(
    llm_BLD=wave("htext", (1, 9, 24), 0.6),
    llm_mask_BL=torch.tensor([[1] * 6 + [0] * 3]),
    byt5_BLD=wave("hbyt5", (1, 5, 1472), 0.6),
    byt5_mask_BL=torch.tensor([[1, 1, 1, 0, 0]]),
    vision_BLD=wave("himg", (1, 4, 20), 0.6),
)
# the same text as a scene holds it, without batch axis
SCENE_TEXT = {
    name: value[0]
    for name, value in zip(("text", "text_mask", "byt5", "byt5_mask", "vision"), TEXT, strict=True)
}
LABELS = torch.tensor([[0, 9, 11, 40, 9, 9, 0, 12]])
W2C = poses(8)
K = torch.tensor([[0.505050505, 0, 0.5], [0, 0.897867565, 0.5], [0, 0, 1]]).expand(1, 8, 3, 3)


def shapes(model: WorldPlayHunyuan) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def published(model: WorldPlayHunyuan) -> dict[str, torch.Tensor]:
    """Every tensor of the published file, filled by its name as the golden outputs were."""
    given = manifest(sources_8b(shapes(model)), shapes(model))
    return {
        key: wave(key, shape, 0.2, 1.0 if "norm" in key and key.endswith("weight") else 0.0)
        for key, shape in given.items()
    }


def filled(**change: Any) -> WorldPlayHunyuan:
    model = WorldPlayHunyuan(**CONFIG | change).eval()
    tensors = published(model)
    sources = sources_8b(shapes(model))
    model.load_state_dict({name: source.take(tensors[source.key]) for name, source in sources.items()})
    return model


def without_additions(model: WorldPlayHunyuan) -> WorldPlayHunyuan:
    plain = WorldPlayHunyuan(**CONFIG).eval()
    added = ("action_embedder", "to_out_prope")
    plain.load_state_dict(
        {
            name: torch.zeros_like(value) if any(part in name for part in added) else value
            for name, value in model.state_dict().items()
        }
    )
    return plain


def read(model: WorldPlayHunyuan, text: HunyuanText = TEXT) -> ContextCache:
    with torch.no_grad():
        return model("text", text)


def call(model: WorldPlayHunyuan, mode: str, at: slice, timestep: float, **change: Any) -> Any:
    given = {
        "latents_BCTHW": LATENTS[:, :, at],
        "timestep_BT": torch.full((1, at.stop - at.start), timestep),
        "labels_BT": LABELS[:, at],
        "w2c_BT44": W2C[:, at],
        "K_BT33": K[:, at],
    } | change
    if "text" not in given:
        given["text"] = read(model)
    return model(mode, **given)


def first(model: WorldPlayHunyuan, **change: Any) -> torch.Tensor:
    with torch.no_grad():
        return call(model, "velocity", slice(0, 4), 700.0, **change)


def history(model: WorldPlayHunyuan, timestep: float = 14.0, **change: Any) -> RawContext:
    with torch.no_grad():
        return call(model, "context", slice(0, 4), timestep, **change)


def second(
    model: WorldPlayHunyuan, context: RawContext | None, rope_start: int = 4, **change: Any
) -> torch.Tensor:
    with torch.no_grad():
        return call(model, "velocity", slice(4, 8), 700.0, rope_start=rope_start, context=context, **change)


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())
