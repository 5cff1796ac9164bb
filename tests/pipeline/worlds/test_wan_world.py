"""WanWorld: what rollout and update rely on - one velocity, shared caches, counted costs, a fixed first latent."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import flow
from pipeline.worlds.base import ClipCondition, MemoryRule, Scene, WorldSpec
from pipeline.worlds.checkpoints import load_wan
from pipeline.worlds.wan import WorldPlayWan
from pipeline.worlds.wan_world import WanWorld

SPEC = WorldSpec(
    latent_shape=(3, 2, 4),
    frame_size=(2, 4),
    stride=1,
    memory=MemoryRule(budget=8, recent=4),
    steps=3,
    shift=3.0,
)
SIGMAS = flow.sigmas(SPEC.steps, SPEC.shift)


class PixelCodec:
    """A frame is its own latent."""

    def encode(self, frames_FHW3: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(frames_FHW3).permute(3, 0, 1, 2).float() / 127.5 - 1

    def decode(self, latents_CTHW: torch.Tensor, state: Any = None) -> tuple[np.ndarray, Any]:
        frames = ((latents_CTHW.permute(1, 2, 3, 0) + 1) * 127.5).round().clamp(0, 255)
        return frames.to(torch.uint8).numpy(), (state or 0) + latents_CTHW.shape[1]


def make_world(**options: Any) -> WanWorld:
    torch.manual_seed(0)
    model = WorldPlayWan(
        patch_size=(1, 1, 1),
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=3,
        out_channels=3,
        text_dim=8,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    return WanWorld(model.eval(), PixelCodec(), SPEC, **options)


@pytest.fixture(scope="module")
def world() -> WanWorld:
    return make_world()


@pytest.fixture(scope="module")
def scene(world: WanWorld) -> Scene:
    frame = np.arange(24, dtype=np.uint8).reshape(2, 4, 3) * 10
    return world.encode_scene(frame, torch.ones(5, 8), "room")


@pytest.fixture(scope="module")
def video() -> tuple[ClipCondition, np.ndarray]:
    """Twelve latents walking forward."""
    c2w = np.tile(np.eye(4), (12, 1, 1))
    c2w[:, 2, 3] = np.arange(12) * 0.4
    return ClipCondition.of(np.full(12, 9), c2w, np.diag([0.5, 0.8, 1.0])), c2w


def noise(count: int, shape: tuple[int, ...] = (3, 4, 2, 4)) -> torch.Tensor:
    return torch.stack(
        [flow.keyed_noise(shape, seed=0, epoch=0, group="g", candidate=i, purpose="x") for i in range(count)]
    )


def test_first_clip_keeps_the_scene_latent_and_hides_its_noise(
    world: WanWorld, scene: Scene, video: tuple[ClipCondition, np.ndarray]
) -> None:
    clip = video[0].select(slice(0, 4))
    x = noise(2)
    x0 = world.sample_clip(scene, None, clip, SIGMAS, x)
    assert torch.equal(x0[:, :, 0], scene.first_latent_CHW.expand(2, -1, -1, -1))
    x[:, :, 0] = 7.0
    assert torch.equal(world.sample_clip(scene, None, clip, SIGMAS, x), x0)
    assert world.loss_mask_T(0).tolist() == [False, True, True, True]
    assert world.loss_mask_T(1).all()


def test_sampler_is_euler_on_velocity(
    world: WanWorld, scene: Scene, video: tuple[ClipCondition, np.ndarray]
) -> None:
    condition, c2w = video
    history = noise(1, (3, 8, 2, 4))[0]
    context = world.build_context(scene, history, world.select_context(c2w, 2), condition)
    clip = condition.select(slice(8, 12))
    x = noise(2)
    sampled = world.sample_clip(scene, context, clip, SIGMAS, x)
    with torch.no_grad():
        for now, after in itertools.pairwise(SIGMAS):
            x = flow.euler_step(x, world.velocity(x, now.expand(2), clip, scene, context), now, after)
    torch.testing.assert_close(sampled, x, rtol=0, atol=1e-6)
    assert not sampled.requires_grad


def test_velocity_is_the_model_at_the_contract_positions(
    world: WanWorld, scene: Scene, video: tuple[ClipCondition, np.ndarray]
) -> None:
    """Context clean at timestep 14 and RoPE 0.., the clip at RoPE n_ctx.., true poses; first clip [14, t, t, t]."""
    condition, _ = video
    history, x, chosen = noise(1, (3, 8, 2, 4))[0], noise(1), [0, 1, 2, 3, 6, 7]
    given = condition.batched()
    text = scene.text_LD[None]
    with torch.no_grad():
        cache = world.model(
            "context",
            history[None, :, chosen],
            torch.full((1, 6), 14.0),
            given.labels_T[:, chosen],
            given.w2c_T44[:, chosen],
            given.K_T33[:, chosen],
            text,
        )
        at = slice(8, 12)
        cameras = given.labels_T[:, at], given.w2c_T44[:, at], given.K_T33[:, at]
        expected = world.model("velocity", x, torch.full((1, 4), 500.0), *cameras, text, 6, cache)
        context = world.build_context(scene, history, chosen, condition)
        assert torch.equal(world.velocity(x, 0.5, condition.select(at), scene, context), expected)

        start = slice(0, 4)
        cameras = given.labels_T[:, start], given.w2c_T44[:, start], given.K_T33[:, start]
        with_first = torch.cat([scene.first_latent_CHW[None, :, None], x[:, :, 1:]], dim=2)
        expected = world.model("velocity", with_first, torch.tensor([[14.0, 500, 500, 500]]), *cameras, text)
        assert torch.equal(world.velocity(x, 0.5, condition.select(start), scene, None), expected)


def test_context_is_chosen_by_the_memory_rule(
    world: WanWorld, video: tuple[ClipCondition, np.ndarray]
) -> None:
    c2w = np.concatenate([video[1]] * 2)
    assert world.select_context(c2w, 0) == []
    assert world.select_context(c2w, 1) == list(range(4))
    assert world.select_context(c2w, 2) == list(range(8))
    assert len(world.select_context(c2w, 4)) == 8


def test_costs_are_counted_in_sequences(scene: Scene, video: tuple[ClipCondition, np.ndarray]) -> None:
    world = make_world()
    condition, _ = video
    assert world.build_context(scene, noise(1)[0], [], condition) is None
    context = world.build_context(scene, noise(1)[0], [0, 1, 2, 3], condition)
    world.sample_clip(scene, context, condition.select(slice(4, 8)), SIGMAS, noise(5))
    assert (world.forwards.denoiser, world.forwards.context) == (SPEC.steps * 5, 1)
    world.forwards.reset()
    assert (world.forwards.denoiser, world.forwards.context) == (0, 0)


def test_gradient_goes_through_the_clip_and_not_into_the_context(
    scene: Scene, video: tuple[ClipCondition, np.ndarray]
) -> None:
    world = make_world()
    context = world.build_context(scene, noise(1)[0], [0, 1, 2, 3], video[0])
    assert context is not None
    assert not any(tensor.requires_grad for pair in context.layers for tensor in pair)
    world.velocity(
        noise(2), torch.tensor([0.3, 0.9]), video[0].select(slice(4, 8)), scene, context
    ).mean().backward()
    assert all(p.grad is not None for p in world.model.parameters())


def test_a_level_for_each_candidate_equals_one_at_a_time(
    world: WanWorld, scene: Scene, video: tuple[ClipCondition, np.ndarray]
) -> None:
    clip, x, levels = video[0].select(slice(0, 4)), noise(3), torch.tensor([0.9, 0.5, 0.1])
    with torch.no_grad():
        batch = world.velocity(x, levels, clip, scene, None)
        loop = torch.cat(
            [world.velocity(x[i : i + 1], float(levels[i]), clip, scene, None) for i in range(3)]
        )
    torch.testing.assert_close(batch, loop, rtol=0, atol=2e-6)


def test_swapped_weights_count_even_inside_a_callers_autocast(
    scene: Scene, video: tuple[ClipCondition, np.ndarray]
) -> None:
    """Autocast caches narrow weights by parameter: a swap of data, and a forward without gradient, must not be seen."""
    world = make_world(autocast=torch.bfloat16)
    clip, x = video[0].select(slice(0, 4)), noise(1)
    parameters = list(world.model.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            before = world.velocity(x, 0.5, clip, scene, None)
            for p in parameters:
                p.data = p.data * 0.5
            after = world.velocity(x, 0.5, clip, scene, None)
        v = world.velocity(x, 0.5, clip, scene, None)
    assert not torch.equal(before, after)
    assert torch.equal(v.detach(), after)
    assert v.dtype == torch.float32
    v.mean().backward()
    assert all(p.grad is not None for p in parameters)


def test_bf16_sampling_stays_close_to_fp32(
    world: WanWorld, scene: Scene, video: tuple[ClipCondition, np.ndarray]
) -> None:
    clip = video[0].select(slice(0, 4))
    exact = world.sample_clip(scene, None, clip, SIGMAS, noise(2))
    narrow = make_world(autocast=torch.bfloat16).sample_clip(scene, None, clip, SIGMAS, noise(2))
    assert (exact - narrow).abs().max() < 0.05
    assert not torch.equal(exact, narrow)


def test_truncated_timesteps_are_an_option(scene: Scene, video: tuple[ClipCondition, np.ndarray]) -> None:
    world = make_world()
    clip, x = video[0].select(slice(0, 4)), noise(1)
    with torch.no_grad():
        plain = world.velocity(x, 0.5009, clip, scene, None)
        world.spec = replace(SPEC, truncate_timestep=True)
        truncated = world.velocity(x, 0.5009, clip, scene, None)
        whole = world.velocity(x, 0.5, clip, scene, None)
    assert torch.equal(truncated, whole)
    assert not torch.equal(plain, whole)


def test_scenes_and_frames(world: WanWorld, scene: Scene) -> None:
    frames, state = world.decode(scene.first_latent_CHW[:, None])
    assert frames[0].tolist() == (np.arange(24, dtype=np.uint8).reshape(2, 4, 3) * 10).tolist()
    assert world.decode(scene.first_latent_CHW[:, None], state)[1] == 2
    with pytest.raises(ValueError, match="no text encoder"):
        world.encode_scene(np.zeros((2, 4, 3), np.uint8), "a room", "k")
    with pytest.raises(ValueError, match="first frame"):
        world.encode_scene(np.zeros((4, 2, 3), np.uint8), torch.ones(5, 8), "k")
    told = make_world(encode_text=lambda text: torch.full((5, 8), float(len(text))))
    assert told.encode_scene(np.zeros((2, 4, 3), np.uint8), "room", "k").text_LD[0, 0] == 4


def test_save_writes_a_loadable_folder(
    world: WanWorld, scene: Scene, video: tuple[ClipCondition, np.ndarray], tmp_path: Path
) -> None:
    world.save(tmp_path)
    again = WanWorld(load_wan(tmp_path / "transformer"), PixelCodec(), SPEC)
    clip = video[0].select(slice(0, 4))
    with torch.no_grad():
        first, second = (w.velocity(noise(1), 0.5, clip, scene, None) for w in (world, again))
    assert torch.equal(first, second)
