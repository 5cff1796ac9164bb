"""The update loop on the real mini world (tiny, random weights): both kinds of clip, old weights, LoRA, autocast."""

import numpy as np
import pytest
import torch

from pipeline import rollout
from pipeline.actions import parse_word
from pipeline.camera import poses_from_labels
from pipeline.updates.config import ParamsConfig, UpdateConfig
from pipeline.updates.loop import TrainingGroup, update_epoch
from pipeline.updates.policy import Policy, prepare_params
from pipeline.worlds.base import ClipCondition
from pipeline.worlds.mini.clips import INTRINSICS_33, STEP
from pipeline.worlds.mini.load import load_mini

CANDIDATES = 4
CONFIG = UpdateConfig(steps=3, timesteps=2, lr=1e-3, accumulation=4, micro_batch=8)


def group(world, clip, r=(1.0, 0.0, 0.8, 0.3)):
    """Candidates of target clip `clip` (from 1), sampled by the world itself, with the given weights."""
    labels = np.array([0, *parse_word("w+right-4, a-3")])[: 4 * clip]
    c2w = poses_from_labels(labels[1:], STEP)
    condition = ClipCondition.of(labels, c2w, INTRINSICS_33)
    frame = np.random.default_rng(0).integers(0, 255, (*world.spec.frame_size, 3), dtype=np.uint8)
    scene = world.encode_scene(frame, "a room", "scene")
    sampling = rollout.Sampling(steps=3, shift=3.0, seed=0, epoch=1)
    history = rollout.sample_prefix(world, scene, condition, c2w, clip, sampling, "key")
    x0 = rollout.sample_candidates(world, scene, history, condition, c2w, clip, CANDIDATES, sampling, "key")
    at = rollout.clip_slice(world, clip)
    return TrainingGroup(
        key=f"key{clip}",
        scene=scene,
        history_CTHW=history,
        context=world.select_context(c2w[: at.stop], clip - 1, 0),
        condition=condition,
        clip=condition.select(at),
        x0_NCTHW=x0,
        r_N=torch.tensor(r),
        candidates=list(range(CANDIDATES)),
        loss_mask_T=world.loss_mask_T(clip - 1),
    )


@pytest.mark.parametrize("clip", [1, 2])
def test_costs_and_movement(tiny_base, clip):
    world = load_mini(tiny_base)
    policy = Policy(world.model, CONFIG)
    before = {k: t.clone() for k, t in policy.sets["live"].items()}
    training = group(world, clip)
    world.forwards.reset()
    metrics = update_epoch(world, policy, [training], CONFIG, 0, 1)
    pairs = CANDIDATES * CONFIG.timesteps_per_sample
    assert world.forwards.denoiser == 2 * pairs == metrics["live_forwards"] + metrics["old_forwards"]
    assert world.forwards.context == metrics["context_passes"] == (clip > 1)
    assert metrics["v_gap"] == 0  # old and live are still the same weights, to the last bit
    assert any(not torch.equal(before[k], t) for k, t in policy.sets["live"].items())
    assert np.isfinite(list(metrics.values())).all()


def test_no_gradient_at_half_while_live_is_old(tiny_base):
    """r = 1/2, beta = 1, live = old: the two branches cancel, up to fp32 rounding of a bf16 network's gradient."""
    world = load_mini(tiny_base)
    policy = Policy(world.model, CONFIG)
    half = update_epoch(world, policy, [group(world, 2, r=(0.5,) * 4)], CONFIG, 0, 1)["grad_norm"]
    world = load_mini(tiny_base)
    full = update_epoch(world, Policy(world.model, CONFIG), [group(world, 2)], CONFIG, 0, 1)["grad_norm"]
    assert half < 1e-4 * full


def test_swapped_weights_run_as_if_loaded(tiny_base, tmp_path):
    """Autocast must not keep products of another set: under `old` the world equals a fresh one with the old weights."""
    world = load_mini(tiny_base)
    policy = Policy(world.model, CONFIG.model_copy(update={"lr": 1e-2}))
    training = group(world, 1)
    for epoch in (1, 2):
        update_epoch(world, policy, [training], policy.config, 0, epoch)
    x, sigma = training.x0_NCTHW, torch.full((CANDIDATES,), 0.7)

    def velocity(of):
        return of.velocity(x, sigma, training.clip, training.scene, None)

    live = velocity(world).detach()
    with torch.no_grad(), policy.swap("old"):
        old = velocity(world)
    assert torch.equal(velocity(world).detach(), live)
    assert not torch.equal(live, old)
    fresh = load_mini(tiny_base)
    other = Policy(fresh.model, CONFIG)
    policy.save(tmp_path / "policy")
    other.load(tmp_path / "policy")
    assert torch.equal(velocity(fresh).detach(), live)
    with torch.no_grad(), other.swap("old"):
        assert torch.equal(velocity(fresh), old)


def test_lora_on_the_real_network(tiny_base):
    world = load_mini(tiny_base)
    params = ParamsConfig(kind="lora", rank=2, alpha=4)
    prepare_params(world.model, params, seed=0)
    policy = Policy(world.model, CONFIG)
    blocks = len(world.model.blocks)
    assert all(".lora_" in name for name in policy.params)
    # q, k, v, out of both attentions and the camera branch's own output, two matrices each
    assert len(policy.params) == blocks * 2 * (4 + 4 + 1)
    metrics = update_epoch(world, policy, [group(world, 2)], CONFIG, 0, 1)
    assert metrics["grad_norm"] > 0
    assert policy.sets["live"]["blocks.0.attn1.to_out_prope.0.lora_B.policy.weight"].abs().max() > 0


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_activation_checkpointing_changes_no_bit(tiny_base, kind):
    """Under autocast too: the recomputed blocks run in the very precision of the first run."""

    def trained(checkpointing):
        world = load_mini(tiny_base)
        prepare_params(world.model, ParamsConfig(kind=kind, rank=2), seed=0)
        if checkpointing:
            world.model.enable_gradient_checkpointing()
        calls = []
        for block in world.model.blocks:
            block.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
        policy = Policy(world.model, CONFIG)
        update_epoch(world, policy, [group(world, 2)], CONFIG, 0, 1)
        return policy.sets["live"], sum(calls)

    (plain, once), (again, twice) = trained(False), trained(True)
    assert twice == 2 * once > 0  # each block with gradient ran twice
    assert all(torch.equal(plain[key], again[key]) for key in plain)
