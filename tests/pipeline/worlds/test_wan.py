"""WorldPlayWan against the published network's outputs, the stock network, and its own invariances."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file

from pipeline.worlds import attention, wan
from pipeline.worlds.attention import Geometry, RawContext, turned
from pipeline.worlds.prope import camera_transforms, transform
from pipeline.worlds.wan import WorldPlayWan
from tests.golden.fill import fill_parameters, poses, wave

GOLDEN = Path(__file__).parents[2] / "golden"
CONFIG: dict[str, Any] = {
    "patch_size": (1, 2, 2),
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
LATENTS = wave("x", (1, 4, 8, 4, 6), 0.6)
TEXT = wave("text", (1, 7, 16), 0.6)
LABELS = torch.tensor([[0, 9, 11, 40, 9, 9, 0, 12]])
W2C = poses(8)
K = torch.tensor([[0.505050505, 0, 0.5], [0, 0.897867565, 0.5], [0, 0, 1]]).expand(1, 8, 3, 3)
FIRST_T = torch.tensor([[14.0, 500, 500, 500]])


@pytest.fixture(scope="module")
def model() -> WorldPlayWan:
    made = WorldPlayWan(**CONFIG).eval()
    fill_parameters(made.named_parameters())
    return made


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "wan5b.safetensors")


def call(model: WorldPlayWan, mode: str, at: slice, timestep: torch.Tensor, **change: Any) -> Any:
    given = {
        "latents_BCTHW": LATENTS[:, :, at],
        "timestep_BT": timestep,
        "labels_BT": LABELS[:, at],
        "w2c_BT44": W2C[:, at],
        "K_BT33": K[:, at],
        "text_BLD": TEXT,
    }
    return model(mode, **(given | change))


def first(model: WorldPlayWan, **change: Any) -> torch.Tensor:
    with torch.no_grad():
        return call(model, "velocity", slice(0, 4), FIRST_T, **change)


def history(model: WorldPlayWan, timestep: float = 14.0, **change: Any) -> RawContext:
    with torch.no_grad():
        return call(model, "context", slice(0, 4), torch.full((1, 4), timestep), **change)


def second(
    model: WorldPlayWan, context: RawContext | None, rope_start: int = 4, **change: Any
) -> torch.Tensor:
    with torch.no_grad():
        at, t = slice(4, 8), torch.full((1, 4), 960.0)
        return call(model, "velocity", at, t, rope_start=rope_start, context=context, **change)


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def test_first_clip_equals_the_published_network(
    model: WorldPlayWan, golden: dict[str, torch.Tensor]
) -> None:
    assert gap(first(model), golden["chunk0"]) < 1e-5


def test_second_clip_with_context_equals_the_published_network(
    model: WorldPlayWan, golden: dict[str, torch.Tensor]
) -> None:
    assert gap(second(model, history(model)), golden["chunk1"]) < 1e-5


def test_each_of_seven_mistakes_moves_the_output(
    model: WorldPlayWan, golden: dict[str, torch.Tensor]
) -> None:
    """A parity test that cannot fail proves nothing."""
    still = torch.eye(4).expand(1, 4, 4, 4)
    square = torch.eye(3).expand(1, 4, 3, 3)
    context = history(model)
    mistakes = {
        "RoPE offset": second(model, context, rope_start=0),
        "no context": second(model, None),
        "actions 0": second(model, context, labels_BT=torch.zeros(1, 4, dtype=torch.long)),
        "identity poses": second(model, history(model, w2c_BT44=still), w2c_BT44=still),
        "K = I": second(model, history(model, K_BT33=square), K_BT33=square),
        "context at timestep 0": second(model, history(model, timestep=0.0)),
        "additions zeroed": second(_without_additions(model), history(_without_additions(model))),
    }
    moved = {name: gap(out, golden["chunk1"]) for name, out in mistakes.items()}
    assert all(value > 0.1 for value in moved.values()), moved


def _without_additions(model: WorldPlayWan) -> WorldPlayWan:
    plain = WorldPlayWan(**CONFIG).eval()
    zeroed = {
        name: torch.zeros_like(value) if "action_embedder" in name or "to_out_prope" in name else value
        for name, value in model.state_dict().items()
    }
    plain.load_state_dict(zeroed)
    return plain


def _rotate_with_sines(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """RoPE as the stock network computes it; the complex product rounds differently on some processors."""
    even, odd = x.unflatten(-1, (-1, rotation.shape[-1], 2)).unbind(-1)
    cos, sin = rotation.real, rotation.imag
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(3)


def test_without_the_additions_it_is_the_stock_network_exactly(
    model: WorldPlayWan, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = _without_additions(model)
    stock = WanTransformer3DModel(**CONFIG).eval()
    stock.load_state_dict(
        {name: value for name, value in plain.state_dict().items() if name in stock.state_dict()}
    )
    per_token = FIRST_T.repeat_interleave(6, dim=1)
    with torch.no_grad():
        expected = stock(LATENTS[:, :, :4], per_token, TEXT, return_dict=False)[0]
    assert gap(first(plain), expected) < 5e-6
    for module in (attention, wan):
        monkeypatch.setattr(module, "rotate", _rotate_with_sines)
    assert gap(first(plain), expected) == 0.0


def test_names_and_shapes_are_those_of_the_published_checkpoints(model: WorldPlayWan) -> None:
    with torch.device("meta"):
        full = WorldPlayWan()
    for made, name in ((model, "manifest_wan5b_tiny.json"), (full, "manifest_wan5b.json")):
        manifest = json.loads((GOLDEN / name).read_text())
        assert {key: list(value.shape) for key, value in made.state_dict().items()} == manifest
    assert sum(p.numel() for p in full.parameters()) == pytest.approx(5.293e9, rel=1e-3)


def test_batch_equals_loop(model: WorldPlayWan) -> None:
    """Different latents, times, actions, poses and text in one batch; each with its own context."""
    at = [slice(0, 4), slice(4, 8)]
    rows = [
        {
            "latents_BCTHW": LATENTS[:, :, s],
            "timestep_BT": FIRST_T + 100 * i,
            "labels_BT": LABELS[:, s],
            "w2c_BT44": W2C[:, s],
            "K_BT33": K[:, s] * (1 + 0.1 * i),
            "text_BLD": TEXT + i,
        }
        for i, s in enumerate(at)
    ]
    both = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    with torch.no_grad():
        loop = [model("velocity", **row, rope_start=4, context=model("context", **row)) for row in rows]
        batch = model("velocity", **both, rope_start=4, context=model("context", **both))
    assert gap(batch, torch.cat(loop)) < 1e-5


def test_what_is_shared_may_have_batch_1(model: WorldPlayWan) -> None:
    """Context, text, poses, actions and times of batch 1 serve three candidates as if they had been expanded."""
    candidates = torch.cat([LATENTS[:, :, 4:] + 0.1 * i for i in range(3)])
    context = history(model)
    shared = second(model, context, latents_BCTHW=candidates)
    expanded = second(
        model,
        context.expand(3),
        latents_BCTHW=candidates,
        timestep_BT=torch.full((3, 4), 960.0),
        labels_BT=LABELS[:, 4:].expand(3, -1),
        w2c_BT44=W2C[:, 4:].expand(3, -1, -1, -1),
        K_BT33=K[:, 4:].expand(3, -1, -1, -1),
        text_BLD=TEXT.expand(3, -1, -1),
    )
    assert gap(shared, expanded) < 1e-5
    assert context.expand(3).layers[0][0].data_ptr() == context.layers[0][0].data_ptr()
    assert gap(shared[0], shared[2]) > 0.01


def test_cache_equals_one_masked_pass(model: WorldPlayWan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Context and clip packed into one pass in which context never looks at the clip."""
    cached = second(model, history(model))
    tokens, context = 8 * 6, 4 * 6
    mask = torch.ones(tokens, tokens, dtype=torch.bool)
    mask[:context, context:] = False
    monkeypatch.setattr(
        wan,
        "attend",
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask if k.shape[2] == tokens else None
        ),
    )
    timestep = torch.tensor([[14.0] * 4 + [960.0] * 4])
    with torch.no_grad():
        packed = call(model, "velocity", slice(0, 8), timestep)
    assert gap(packed[:, :, 4:], cached) < 1e-5


def test_plain_context_equals_one_turned_beforehand_in_half_the_memory(
    model: WorldPlayWan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of both branches kept by the context pass (as the reference keeps them) give the same clip."""
    context = history(model)
    expected = second(model, context)
    geometry = Geometry(model._rotation(0, 4, 2, 3), camera_transforms(W2C[:, :4], K[:, :4], 24))
    kept = {pair[0].data_ptr(): turned(*pair, geometry, 2) for pair in context.layers}
    turns = []

    def once(key: torch.Tensor, value: torch.Tensor, *where: Any) -> Any:
        turns.append(key.data_ptr() in kept)
        return kept[key.data_ptr()] if key.data_ptr() in kept else turned(key, value, *where)

    monkeypatch.setattr(wan, "turned", once)
    assert torch.equal(second(model, context), expected)
    assert turns == [False, True] * 2  # each layer: its own clip, then the context
    plain = sum(t.numel() for pair in context.layers for t in pair)
    assert 2 * plain == sum(t.numel() for pair in kept.values() for t in pair)


def test_context_remembers_where_it_stood(model: WorldPlayWan, golden: dict[str, torch.Tensor]) -> None:
    """It is turned by its own RoPE times and cameras, whatever those of the clip are; `to` leaves cameras in fp32."""
    context = history(model)
    for change in ({"start": 1}, {"w2c_BT44": W2C[:, 4:]}, {"K_BT33": K[:, :4] * 1.5}):
        assert gap(second(model, replace(context, **change)), golden["chunk1"]) > 1e-2, change
    narrow = context.to(torch.bfloat16)
    assert isinstance(narrow, RawContext)
    assert narrow.w2c_BT44.dtype == narrow.K_BT33.dtype == torch.float32
    assert gap(second(model, narrow), golden["chunk1"]) < 0.1


def test_only_relative_cameras_matter(model: WorldPlayWan) -> None:
    """Gauge invariance: moving the whole world changes nothing."""
    angle = torch.tensor(0.7)
    world = torch.eye(4)
    world[0, 0] = world[1, 1] = angle.cos()
    world[0, 1], world[1, 0] = -angle.sin(), angle.sin()
    world[:3, 3] = torch.tensor([0.5, -1.0, 2.0])
    moved = W2C @ world
    out = second(model, history(model, w2c_BT44=moved[:, :4]), w2c_BT44=moved[:, 4:])
    assert gap(out, second(model, history(model))) < 1e-4


def test_gradients_reach_every_weight_and_checkpointing_changes_none(model: WorldPlayWan) -> None:
    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        context = call(model, "context", slice(0, 4), torch.full((1, 4), 14.0))
        v = call(model, "velocity", slice(4, 8), torch.full((1, 4), 960.0), rope_start=4, context=context)
        v.square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    assert set(plain) == {name for name, _ in model.named_parameters()}
    # The bias of to_k alone could vanish (softmax ignores a common shift), but RMS norm and PRoPE make it matter too.
    assert all(value.abs().max() > 0 for value in plain.values())
    model.enable_gradient_checkpointing()
    try:
        again = gradients()
    finally:
        model.disable_gradient_checkpointing()
        model.zero_grad()
    assert max(gap(plain[name], again[name]) for name in plain) < 1e-6


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_bf16_stays_close(model: WorldPlayWan, golden: dict[str, torch.Tensor], weights: torch.dtype) -> None:
    """Autocast on fp32 weights, and bf16 weights without autocast (as the 5B is loaded)."""
    narrow = WorldPlayWan(**CONFIG).eval()
    narrow.load_state_dict(model.state_dict())
    narrow.to(weights)
    with torch.autocast("cpu", torch.bfloat16, enabled=weights == torch.float32):
        out = second(narrow, history(narrow)).float()
    assert gap(out, golden["chunk1"]) < 0.25
    assert (out - golden["chunk1"]).square().mean() < 1e-3 * golden["chunk1"].square().mean()


def test_wrong_calls_are_named(model: WorldPlayWan) -> None:
    with pytest.raises(ValueError, match="mode"):
        call(model, "forward", slice(0, 4), FIRST_T)
    with pytest.raises(ValueError, match="layers"):
        second(model, replace(history(model), layers=history(model).layers[:1]))
    with pytest.raises(ValueError, match="rope_max_seq_len"):
        second(model, history(model), rope_start=61)
    with pytest.raises(ValueError, match="patches"):
        first(model, latents_BCTHW=LATENTS[:, :, :4, :3])
    with pytest.raises(ValueError, match="image embedding"):
        WorldPlayWan(**CONFIG | {"patch_size": (2, 2, 2)})


def test_prope_is_the_formula_of_the_specification() -> None:
    """q P^T . P^-1 k = q^T P_i P_j^-1 k for every group of 4 channels, with the principal point dropped."""
    cameras = camera_transforms(W2C, K, 24)
    projection = torch.eye(4).repeat(8, 1, 1)
    projection[:, 0, 0], projection[:, 1, 1] = K[0, :, 0, 0], K[0, :, 1, 1]
    P = projection @ W2C[0]
    query, key = wave("q", (1, 8, 1, 24)), wave("k", (1, 8, 1, 24))
    moved_query, moved_key = transform(query, cameras.query), transform(key, cameras.key_value)
    moved_back = transform(key, cameras.output)
    for group in range(6):
        at = slice(4 * group, 4 * group + 4)
        for i, j in ((0, 0), (2, 5), (7, 1)):
            expected = query[0, i, 0, at] @ P[i] @ torch.linalg.inv(P[j]) @ key[0, j, 0, at]
            assert float(moved_query[0, i, 0, at] @ moved_key[0, j, 0, at]) == pytest.approx(
                float(expected), abs=1e-5
            )
        assert gap(moved_back[0, 3, 0, at], P[3] @ key[0, 3, 0, at]) < 1e-5
    with pytest.raises(ValueError, match="multiple of 4"):
        camera_transforms(W2C, K, 6)
