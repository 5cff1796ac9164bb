"""WorldPlayHunyuan against the published network's outputs, the stock network, and its own invariances."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import HunyuanVideo15Transformer3DModel
from safetensors.torch import load_file

from pipeline.worlds import hunyuan
from pipeline.worlds.hunyuan import TEXT_SIDE, HunyuanText, WorldPlayHunyuan
from pipeline.worlds.import_keys import manifest, sources_8b
from tests.pipeline.worlds.hunyuan_tiny import (
    CONFIG,
    LABELS,
    LATENTS,
    TEXT,
    W2C,
    K,
    call,
    filled,
    first,
    gap,
    history,
    read,
    second,
    shapes,
    without_additions,
)

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="module")
def model() -> WorldPlayHunyuan:
    return filled()


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "hy8b.safetensors")


def test_text_cache_equals_the_published_network(
    model: WorldPlayHunyuan, golden: dict[str, torch.Tensor]
) -> None:
    cache = read(model)
    assert gap(cache.layers[-1][0], golden["k_txt_last"]) < 1e-5
    assert cache.layers[-1][0].shape == (1, 2, 4 + 3 + 6, 32)


def test_first_clip_equals_the_published_network(
    model: WorldPlayHunyuan, golden: dict[str, torch.Tensor]
) -> None:
    assert gap(first(model), golden["chunk0"]) < 1e-5


def test_second_clip_with_context_equals_the_published_network(
    model: WorldPlayHunyuan, golden: dict[str, torch.Tensor]
) -> None:
    assert gap(second(model, history(model)), golden["chunk1"]) < 1e-5


def test_each_of_seven_mistakes_moves_the_output(
    model: WorldPlayHunyuan, golden: dict[str, torch.Tensor]
) -> None:
    """A parity test that cannot fail proves nothing."""
    still = torch.eye(4).expand(1, 4, 4, 4)
    square = torch.eye(3).expand(1, 4, 3, 3)
    plain, context = without_additions(model), history(model)
    mistakes = {
        "RoPE offset": second(model, context, rope_start=0),
        "no context": second(model, None),
        "actions 0": second(model, context, labels_BT=torch.zeros(1, 4, dtype=torch.long)),
        "identity poses": second(model, history(model, w2c_BT44=still), w2c_BT44=still),
        "K = I": second(model, history(model, K_BT33=square), K_BT33=square),
        "context at timestep 0": second(model, history(model, timestep=0.0)),
        "additions zeroed": second(plain, history(plain)),
    }
    moved = {name: gap(out, golden["chunk1"]) for name, out in mistakes.items()}
    assert all(value > 0.1 for value in moved.values()), moved


@pytest.mark.parametrize(
    "wrong",
    [
        {"llm_mask_BL": None},
        {"byt5_mask_BL": None},
        {"byt5_BLD": None, "byt5_mask_BL": None},
        {"vision_BLD": None},
    ],
    ids=["text padding kept", "glyph padding kept", "no glyphs", "no image"],
)
def test_text_mistakes_move_the_output(
    model: WorldPlayHunyuan, golden: dict[str, torch.Tensor], wrong: dict[str, Any]
) -> None:
    assert gap(first(model, text=read(model, TEXT._replace(**wrong))), golden["chunk0"]) > 0.1


@contextmanager
def _text_as_in_worldplay(stock: HunyuanVideo15Transformer3DModel, video: int) -> Iterator[None]:
    """Make the stock network read text as WorldPlay does: blind to video, and at timestep 0."""
    zero = torch.zeros(1)
    still = stock.time_embed(zero)
    hooks = [
        stock.context_embedder.register_forward_pre_hook(lambda _, given: (given[0], zero, given[2])),
        *(
            block.norm1_context.register_forward_pre_hook(
                lambda _, given, options: (given, options | {"emb": still}), with_kwargs=True
            )
            for block in stock.transformer_blocks
        ),
    ]

    def blind(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any, **_: Any) -> Any:
        mask = attn_mask.clone()
        mask[..., video:, :video] = False
        q, k, v = (part.transpose(1, 2) for part in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    module = __import__(
        "diffusers.models.transformers.transformer_hunyuan_video15", fromlist=["dispatch_attention_fn"]
    )
    original, module.dispatch_attention_fn = module.dispatch_attention_fn, blind
    try:
        yield
    finally:
        module.dispatch_attention_fn = original
        for hook in hooks:
            hook.remove()


def test_without_the_additions_it_is_the_stock_network(model: WorldPlayHunyuan) -> None:
    """The stock bidirectional network, its text made blind to video and read at timestep 0, is our clip without camera.

    One full joint pass of stock code against our text pass and cached video pass; and it is not the unmasked one.
    """
    plain = without_additions(model)
    stock = HunyuanVideo15Transformer3DModel(**CONFIG).eval()
    stock.load_state_dict(
        {name: value for name, value in plain.state_dict().items() if name in stock.state_dict()}
    )

    def joint() -> torch.Tensor:
        with torch.no_grad():
            return stock(
                LATENTS[:, :, :4],
                torch.tensor([700.0]),
                TEXT.llm_BLD,
                TEXT.llm_mask_BL,
                encoder_hidden_states_2=TEXT.byt5_BLD,
                encoder_attention_mask_2=TEXT.byt5_mask_BL,
                image_embeds=TEXT.vision_BLD,
                return_dict=False,
            )[0]

    ours = first(plain)
    with _text_as_in_worldplay(stock, video=4 * 12):
        assert gap(ours, joint()) < 1e-6 * ours.abs().max()  # outputs reach 20: rounding is what is left
    assert gap(ours, joint()) > 0.1


def test_published_names_and_shapes_follow_from_the_rules(model: WorldPlayHunyuan) -> None:
    with torch.device("meta"):
        full = WorldPlayHunyuan()
    for made, name in ((model, "manifest_hy8b_tiny.json"), (full, "manifest_hy8b.json")):
        sizes = shapes(made)
        rules = {key: list(shape) for key, shape in manifest(sources_8b(sizes), sizes).items()}
        assert rules == json.loads((GOLDEN / name).read_text())
    assert len(shapes(full)) == 1913
    assert sum(p.numel() for p in full.parameters()) == pytest.approx(8.558e9, rel=1e-3)
    text_side = sum(p.numel() for name, p in full.named_parameters() if TEXT_SIDE.match(name))
    assert text_side == pytest.approx(4.235e9, rel=2e-3)  # 49 %, with the time embedding that both sides use


def test_batch_equals_loop(model: WorldPlayHunyuan) -> None:
    """Different latents, times, actions, poses and text in one batch; each with its own context."""
    at = [slice(0, 4), slice(4, 8)]
    texts = [TEXT, TEXT._replace(llm_BLD=TEXT.llm_BLD + 1)]
    rows = [
        {
            "latents_BCTHW": LATENTS[:, :, s],
            "timestep_BT": torch.tensor([[14.0, 500, 600, 700]]) + 100 * i,
            "labels_BT": LABELS[:, s],
            "w2c_BT44": W2C[:, s],
            "K_BT33": K[:, s] * (1 + 0.1 * i),
        }
        for i, s in enumerate(at)
    ]
    both = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    together = HunyuanText(*(torch.cat(pair) for pair in zip(*texts, strict=True)))  # type: ignore[arg-type]
    with torch.no_grad():
        loop = []
        for text, row in zip(texts, rows, strict=True):
            cache = read(model, text)
            context = model("context", cache, **row)
            loop.append(model("velocity", cache, **row, rope_start=4, context=context))
        cache = read(model, together)
        batch = model("velocity", cache, **both, rope_start=4, context=model("context", cache, **both))
    assert gap(batch, torch.cat(loop)) < 2e-5


def test_what_is_shared_may_have_batch_1(model: WorldPlayHunyuan) -> None:
    candidates = torch.cat([LATENTS[:, :, 4:] + 0.1 * i for i in range(3)])
    context, text = history(model), read(model)
    shared = second(model, context, latents_BCTHW=candidates, text=text)
    expanded = second(
        model,
        context.expand(3),
        latents_BCTHW=candidates,
        text=text.expand(3),
        timestep_BT=torch.full((3, 4), 700.0),
        labels_BT=LABELS[:, 4:].expand(3, -1),
        w2c_BT44=W2C[:, 4:].expand(3, -1, -1, -1),
        K_BT33=K[:, 4:].expand(3, -1, -1, -1),
    )
    assert gap(shared, expanded) < 2e-5
    assert gap(shared[0], shared[2]) > 0.01


def test_cache_equals_one_masked_pass(model: WorldPlayHunyuan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Context and clip packed into one pass in which context never looks at the clip."""
    cached, text = second(model, history(model)), read(model)
    tokens, context = 8 * 12, 4 * 12
    mask = torch.ones(tokens, 13 + tokens, dtype=torch.bool)
    mask[:context, 13 + context :] = False
    monkeypatch.setattr(
        hunyuan, "attend", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    )
    with torch.no_grad():
        packed = call(
            model,
            "velocity",
            slice(0, 8),
            0.0,
            text=text,
            timestep_BT=torch.tensor([[14.0] * 4 + [700.0] * 4]),
        )
    assert gap(packed[:, :, 4:], cached) < 2e-5


def test_the_world_frame_matters_as_in_the_reference(model: WorldPlayHunyuan) -> None:
    """Unlike the 5B: text keys have no camera. So poses must be relative to frame 0."""
    world = torch.eye(4)
    world[:3, 3] = torch.tensor([0.5, -1.0, 2.0])
    assert gap(first(model, w2c_BT44=(W2C @ world)[:, :4]), first(model)) > 1e-3


def test_gradients_reach_the_video_side_and_checkpointing_changes_none(model: WorldPlayHunyuan) -> None:
    text = read(model)

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        context = call(model, "context", slice(0, 4), 14.0, text=text)
        v = call(model, "velocity", slice(4, 8), 700.0, text=text, rope_start=4, context=context)
        v.square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    shared = {name for name, _ in model.named_parameters() if name.startswith("time_embed")}
    video = {name for name, _ in model.named_parameters() if not TEXT_SIDE.match(name)}
    assert set(plain) == video | shared
    assert all(value.abs().max() > 0 for value in plain.values())
    model.enable_gradient_checkpointing()
    try:
        again = gradients()
    finally:
        model.disable_gradient_checkpointing()
        model.zero_grad()
    scale = max(float(value.abs().max()) for value in plain.values())
    assert max(gap(plain[name], again[name]) for name in plain) < 1e-6 * scale


def test_text_can_be_trained_too(model: WorldPlayHunyuan) -> None:
    """With autograd on, every weight gets gradient but what the last block would do with text that nobody reads."""
    model.zero_grad()
    call(model, "velocity", slice(0, 4), 700.0, text=model("text", TEXT)).square().mean().backward()
    without = {name for name, p in model.named_parameters() if p.grad is None}
    model.zero_grad()
    unread = re.compile(r"transformer_blocks\.1\.(ff_context|attn\.(add_q_proj|norm_added_q|to_add_out))\.")
    assert without == {name for name, _ in model.named_parameters() if unread.match(name)}


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_bf16_stays_close(
    model: WorldPlayHunyuan, golden: dict[str, torch.Tensor], weights: torch.dtype
) -> None:
    """Autocast on fp32 weights, and bf16 weights without autocast (as the 8B is loaded)."""
    narrow = WorldPlayHunyuan(**CONFIG).eval()
    narrow.load_state_dict(model.state_dict())
    narrow.to(weights)
    with torch.autocast("cpu", torch.bfloat16, enabled=weights == torch.float32):
        out = second(narrow, history(narrow)).float()
    assert (out - golden["chunk1"]).square().mean() < 2e-4 * golden["chunk1"].square().mean()


def test_a_narrow_context_keeps_its_cameras(model: WorldPlayHunyuan) -> None:
    narrow = history(model).to(torch.bfloat16)
    assert narrow.layers[0][0].dtype == torch.bfloat16
    assert narrow.w2c_BT44.dtype == narrow.K_BT33.dtype == torch.float32
    plain_elements = (
        2 * 2 * 4 * 12 * 64
    )  # layers, k and v, tokens, D: the rotated form would hold twice as many
    assert sum(t.numel() for pair in narrow.layers for t in pair) == plain_elements


def test_wrong_calls_are_named(model: WorldPlayHunyuan) -> None:
    with pytest.raises(ValueError, match="mode"):
        call(model, "forward", slice(0, 4), 700.0)
    with pytest.raises(ValueError, match="text cache"):
        call(model, "velocity", slice(0, 4), 700.0, text=TEXT)
    with pytest.raises(ValueError, match="needs latents"):
        model("velocity", read(model))
    with pytest.raises(ValueError, match="layers"):
        context = history(model)
        context.layers.pop()
        second(model, context)
    with pytest.raises(ValueError, match="single valid text token"):
        read(model, TEXT._replace(llm_mask_BL=torch.zeros(1, 9)))
    with pytest.raises(ValueError, match="equally many"):
        model("text", HunyuanText(TEXT.llm_BLD.expand(2, -1, -1), torch.tensor([[1] * 9, [1] * 8 + [0]])))
    with pytest.raises(ValueError, match="patch_size_t"):
        WorldPlayHunyuan(**CONFIG | {"patch_size_t": 2})
    with pytest.raises(ValueError, match="patches"):
        first(filled(patch_size=2, in_channels=17), latents_BCTHW=LATENTS[:, :, :4, :3])


def test_larger_patches_tile_the_frame() -> None:
    """Patch 2 (not published, but the configuration has it): output shape and locality of the last projection."""
    model = filled(patch_size=2)
    grid = LATENTS[:, :, :4, :2]
    out = first(model, latents_BCTHW=grid)
    assert out.shape == (1, 8, 4, 2, 4)
    with torch.no_grad():
        model.proj_out.weight.zero_()
        model.proj_out.bias.copy_(torch.arange(32.0))
    tile = first(model, latents_BCTHW=grid)[0, 1, 0]
    assert tile[:, :2].tolist() == tile[:, 2:].tolist() == [[4.0, 5.0], [6.0, 7.0]]
