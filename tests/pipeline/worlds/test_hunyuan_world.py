"""HunyuanWorld: the image in its channels, text read once a prompt, none of it stale under trained weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import flow
from pipeline.worlds.base import ClipCondition, Guidance, MemoryRule, Scene, WorldSpec
from pipeline.worlds.checkpoints import load_hunyuan
from pipeline.worlds.hunyuan import WorldPlayHunyuan
from pipeline.worlds.hunyuan_world import HunyuanWorld
from tests.pipeline.worlds.hunyuan_tiny import CONFIG, LATENTS, SCENE_TEXT, TEXT, filled, gap

SPEC = WorldSpec(
    latent_shape=(8, 3, 4),
    frame_size=(3, 4),
    stride=1,
    memory=MemoryRule(budget=8, recent=4),
    steps=2,
    shift=5.0,
)
SIGMAS = flow.sigmas(SPEC.steps, SPEC.shift)


class FlatCodec:
    """A frame's mean colour fills its latent."""

    def encode(self, frames_FHW3: np.ndarray) -> torch.Tensor:
        value = torch.from_numpy(frames_FHW3).float().mean(-1) / 127.5 - 1
        return value[None].expand(8, -1, -1, -1)

    def decode(self, latents_CTHW: torch.Tensor, state: Any = None) -> tuple[np.ndarray, Any]:
        return np.zeros((latents_CTHW.shape[1], 3, 4, 3), np.uint8), state


@pytest.fixture
def world() -> HunyuanWorld:
    model = filled()
    model.requires_grad_(False)
    return HunyuanWorld(model, FlatCodec(), SPEC)


@pytest.fixture
def scene(world: HunyuanWorld) -> Scene:
    return world.encode_scene(np.arange(36, dtype=np.uint8).reshape(3, 4, 3) * 7, SCENE_TEXT, "room")


@pytest.fixture
def condition() -> ClipCondition:
    c2w = np.tile(np.eye(4), (12, 1, 1))
    c2w[:, 2, 3] = np.arange(12) * 0.1
    return ClipCondition.of(np.full(12, 9), c2w, np.diag([0.5, 0.8, 1.0]))


def noise(count: int, latents: int = 4) -> torch.Tensor:
    shape = (8, latents, 3, 4)
    return torch.stack(
        [flow.keyed_noise(shape, seed=0, epoch=0, group="g", candidate=i, purpose="x") for i in range(count)]
    )


def test_the_image_stands_in_the_condition_channels_of_latent_0(
    world: HunyuanWorld, scene: Scene, condition: ClipCondition
) -> None:
    """Against a call of the network with channels laid out by hand, first clip, context and later clip."""
    x, given = noise(1), condition.batched()
    cache = world.model("text", TEXT)

    def by_hand(mode: str, latents: torch.Tensor, at: Any, t: float, image_at: list[int], **more: Any) -> Any:
        channels = torch.zeros(1, 17, latents.shape[2], 3, 4)
        channels[:, :8] = latents
        for i in image_at:
            channels[0, 8:16, i], channels[0, 16, i] = scene.first_latent_CHW, 1.0
        timestep = torch.full((1, latents.shape[2]), t)
        cameras = given.labels_T[:, at], given.w2c_T44[:, at], given.K_T33[:, at]
        with torch.no_grad():
            return world.model(mode, cache, channels, timestep, *cameras, **more)

    with torch.no_grad():
        first = world.velocity(x, 0.5, condition.select(slice(0, 4)), scene, None)
        history, chosen = noise(1, 8)[0], [0, 1, 2, 3, 6, 7]
        context = world.build_context(scene, history, chosen, condition)
        later = world.velocity(x, 0.5, condition.select(slice(8, 12)), scene, context)
        blind = world.build_context(scene, history, [4, 5, 6, 7], condition)
    assert torch.equal(first, by_hand("velocity", x, slice(0, 4), 500.0, [0]))
    expected = by_hand("context", history[None, :, chosen], chosen, 14.0, [0])
    assert context is not None
    assert all(
        torch.equal(a, b)
        for mine, his in zip(context.layers, expected.layers, strict=True)
        for a, b in zip(mine, his, strict=True)
    )
    assert torch.equal(later, by_hand("velocity", x, slice(8, 12), 500.0, [], rope_start=6, context=expected))
    assert blind is not None
    assert torch.equal(
        blind.layers[0][0], by_hand("context", history[None, :, 4:8], slice(4, 8), 14.0, []).layers[0][0]
    )


def test_the_first_clip_generates_all_its_latents(
    world: HunyuanWorld, scene: Scene, condition: ClipCondition
) -> None:
    assert world.loss_mask_T(0).tolist() == [True] * 4
    x0 = world.sample_clip(scene, None, condition.select(slice(0, 4)), SIGMAS, noise(2))
    assert x0.shape == (2, 8, 4, 3, 4)
    assert gap(x0[0, :, 0], scene.first_latent_CHW) > 0.1
    assert (world.forwards.denoiser, world.forwards.context) == (4, 0)


def test_frozen_text_is_read_once_a_prompt(
    world: HunyuanWorld, scene: Scene, condition: ClipCondition
) -> None:
    clip = condition.select(slice(4, 8))
    context = world.build_context(scene, LATENTS[0, :8, :4], range(4), condition)
    world.sample_clip(scene, context, clip, SIGMAS, noise(2))
    assert world.text_passes == 1
    other = world.encode_scene(
        np.zeros((3, 4, 3), np.uint8), SCENE_TEXT | {"text": -SCENE_TEXT["text"]}, "room"
    )
    a, b = (world.sample_clip(s, context, clip, SIGMAS, noise(1)) for s in (scene, other))
    assert world.text_passes == 2
    assert gap(a, b) > 0.1  # the scene's own text, although both have one key


def test_trained_text_is_never_stale(world: HunyuanWorld, scene: Scene, condition: ClipCondition) -> None:
    """A weight set that is swapped in by pointer, as the policy does, must change the text too."""
    clip = condition.select(slice(0, 4))
    weight = world.model.context_embedder.proj_in.weight
    weight.requires_grad_(True)
    before = world.velocity(noise(1), 0.5, clip, scene, None)
    weight.data = weight.data * 0.5
    after = world.velocity(noise(1), 0.5, clip, scene, None)
    assert gap(before, after) > 1e-3
    assert world.text_passes == 2
    assert not after.requires_grad  # text is read without gradient, as WorldCompass trains


def test_gradient_goes_through_the_clip_alone(
    world: HunyuanWorld, scene: Scene, condition: ClipCondition
) -> None:
    world.model.requires_grad_(True)
    context = world.build_context(scene, LATENTS[0, :8, :4], range(4), condition)
    assert context is not None
    assert not any(tensor.requires_grad for pair in context.layers for tensor in pair)
    world.velocity(
        noise(2), torch.tensor([0.3, 0.9]), condition.select(slice(4, 8)), scene, context
    ).mean().backward()
    got = {name.split(".")[0] for name, p in world.model.named_parameters() if p.grad is not None}
    assert got == {
        "x_embedder",
        "time_embed",
        "action_embedder",
        "transformer_blocks",
        "norm_out",
        "proj_out",
    }


def test_scenes_need_encoded_text_of_known_parts(
    world: HunyuanWorld, scene: Scene, condition: ClipCondition
) -> None:
    with pytest.raises(ValueError, match="pass embeddings"):
        world.encode_scene(np.zeros((3, 4, 3), np.uint8), "a room", "k")
    scene.extras["glyphs"] = scene.extras["byt5"]
    with pytest.raises(ValueError, match="reads no 'glyphs'"):
        world.velocity(noise(1), 0.5, condition.select(slice(0, 4)), scene, None)


def test_guidance_leads_away_from_the_negative_text_and_reads_each_text_once(
    world: HunyuanWorld, scene: Scene, condition: ClipCondition
) -> None:
    """One guided Euler step by hand; scale 1 is no guidance; both texts stay in memory while they take turns."""
    negative = Scene(scene.first_latent_CHW, -scene.text_LD, scene.key, dict(scene.extras))
    scene.negative = negative
    clip, x = condition.select(slice(4, 8)), noise(2)
    history = LATENTS[0, :8, :4]
    contexts = [world.build_context(s, history, range(4), condition) for s in (scene, negative)]
    world.forwards.reset()

    def sample(scale: float) -> torch.Tensor:
        return world.sample_clip(scene, contexts[0], clip, SIGMAS, x, Guidance(scale, negative, contexts[1]))

    guided = sample(6.0)
    assert (world.text_passes, world.forwards.denoiser) == (2, 2 * 2 * SPEC.steps)
    with torch.no_grad():
        by_hand = x
        for sigma, after in zip(SIGMAS[:-1].tolist(), SIGMAS[1:].tolist(), strict=True):
            v, v_negative = (
                world.velocity(by_hand, sigma, clip, s, c)
                for s, c in zip((scene, negative), contexts, strict=True)
            )
            by_hand = flow.euler_step(by_hand, 6 * v - 5 * v_negative, sigma, after)
    torch.testing.assert_close(guided, by_hand, rtol=1e-4, atol=1e-3)
    plain = world.sample_clip(scene, contexts[0], clip, SIGMAS, x)
    torch.testing.assert_close(sample(1.0), plain, rtol=1e-4, atol=1e-4)
    assert gap(guided, plain) > 0.1
    assert world.text_passes == 2
    other = Scene(scene.first_latent_CHW, 2 * scene.text_LD, "other", dict(scene.extras))
    world.velocity(x, 0.5, clip, other, contexts[0])
    assert [known for known, _ in world._texts] == [other]  # the next prompt's takes their place


def test_save_writes_a_loadable_folder(
    world: HunyuanWorld, scene: Scene, condition: ClipCondition, tmp_path: Path
) -> None:
    world.save(tmp_path)
    loaded = load_hunyuan(tmp_path / "transformer")
    assert isinstance(loaded, WorldPlayHunyuan)
    again = HunyuanWorld(loaded, FlatCodec(), SPEC)
    clip = condition.select(slice(0, 4))
    with torch.no_grad():
        first, second = (w.velocity(noise(1), 0.5, clip, scene, None) for w in (world, again))
    assert torch.equal(first, second)
    assert loaded.config.num_layers == CONFIG["num_layers"]
