"""The epoch loop on a toy world: what it costs, what it does not depend on, and that it learns."""

import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pipeline import flow
from pipeline.errors import NumericsError
from pipeline.updates.config import OldDecayConfig, ParamsConfig, UpdateConfig
from pipeline.updates.loop import Levels, TrainingGroup, update_epoch
from pipeline.updates.nft import nft_loss
from pipeline.updates.policy import Policy, prepare_params
from pipeline.worlds.base import ClipCondition, ContextCache, ForwardCounter, Scene

C, T, H, W = 2, 4, 3, 3
OLD = OldDecayConfig(start=0.5, rate=0.0, max=0.5)


class ToyModel(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.to_q, self.level, self.remember = nn.Linear(C, C), nn.Linear(1, C), nn.Linear(C, C)


class ToyWorld:
    """A linear velocity that sees noise level and context; counts as the real worlds do."""

    def __init__(self, seed=0):
        self.model, self.forwards = ToyModel(seed), ForwardCounter()
        self.grad_in_context = []

    def build_context(self, scene, latents_CTHW, indices, condition):
        self.grad_in_context.append(torch.is_grad_enabled())
        self.forwards.context += 1
        seen = self.model.remember(latents_CTHW[:, list(indices)].mean(dim=(1, 2, 3)))
        return ContextCache([(seen[None], seen[None])], len(indices))

    def velocity(self, x_BCTHW, sigma_B, clip, scene, context):
        self.forwards.denoiser += len(x_BCTHW)
        v = self.model.to_q(x_BCTHW.movedim(1, -1)).movedim(-1, 1)
        shift = self.model.level(sigma_B[:, None])
        if context is not None:
            shift = shift + context.layers[0][0]
        return v + shift[:, :, None, None, None]


def make_groups(count=3, size=4, first_clip=False, seed=0):
    g = torch.Generator().manual_seed(seed)
    labels, w2c, K = (
        torch.zeros(8, dtype=torch.long),
        torch.eye(4).expand(8, 4, 4),
        torch.eye(3).expand(8, 3, 3),
    )
    condition = ClipCondition(labels, w2c, K)
    mask = torch.ones(T, dtype=torch.bool)
    mask[0] = not first_clip
    return [
        TrainingGroup(
            key=f"group{i}",
            scene=Scene(torch.zeros(C, H, W), torch.zeros(1, 1), f"scene{i}"),
            history_CTHW=torch.randn(C, 1 if first_clip else 4, H, W, generator=g),
            context=[] if first_clip else [0, 1, 3],
            condition=condition,
            clip=condition.select(slice(4, 8)),
            x0_NCTHW=torch.randn(size, C, T, H, W, generator=g),
            r_N=torch.rand(size, generator=g),
            candidates=list(range(1, size + 1)),
            loss_mask_T=mask,
        )
        for i in range(count)
    ]


def config(**changes):
    base = {
        "steps": 5,
        "timesteps": 2,
        "lr": 1e-2,
        "accumulation": 4,
        "micro_batch": 3,
        "old_decay": OLD,
        "weight_decay": 0.0,
    }
    return UpdateConfig(**(base | changes))


def run(groups, cfg, world=None, epochs=(1,), seed=7, **kwargs):
    world = world or ToyWorld()
    policy = Policy(world.model, cfg)
    for epoch in epochs:
        metrics = update_epoch(world, policy, groups, cfg, seed, epoch, **kwargs)
    return world, policy, metrics


def weights(policy, name="live"):
    return {k: t.clone() for k, t in policy.sets[name].items()}


def close(a, b, **tolerance):
    for key in a:
        torch.testing.assert_close(a[key], b[key], **tolerance)


@pytest.mark.parametrize("old", ["ema", "self"])
def test_forwards_equal_the_formula(old):
    cfg = config(old=old)
    world, policy, m = run(make_groups(), cfg)
    pairs = 3 * 4 * 2  # B samples x k levels
    old_forwards = 0 if old == "self" else pairs
    assert m["live_forwards"] == m["backwards"] == pairs
    assert m["old_forwards"] == old_forwards
    assert world.forwards.denoiser == pairs + old_forwards
    assert world.forwards.context == m["context_passes"] == 3  # once a group
    assert policy.step == m["optimizer_steps"] == 3
    assert policy.epoch == 1


@pytest.mark.parametrize(("noise", "teaches"), [("group", False), ("candidate", True)])
def test_a_best_and_a_worst_that_are_the_same_video_teach_nothing_under_shared_noise(noise, teaches):
    """With one noise the two gradients are opposite to the last bit of their sum; with two, only their means are."""
    groups = make_groups(count=1, size=2)
    groups[0].x0_NCTHW[1] = groups[0].x0_NCTHW[0]
    groups[0].r_N[:] = torch.tensor([0.75, 0.25])
    _, _, metrics = run(groups, config(noise=noise, accumulation=2))
    assert metrics["optimizer_steps"] == 1
    assert (metrics["grad_norm"] > 1e-3) == teaches
    if not teaches:
        assert metrics["grad_norm"] < 1e-6


def test_same_seed_same_bits_and_other_seed_other_bits():
    one, two, three = (weights(run(make_groups(), config(), seed=s, epochs=(1, 2))[1]) for s in (7, 7, 8))
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert not all(torch.equal(one[k], three[k]) for k in one)


@pytest.mark.parametrize("micro_batch", [1, 2, 64])
def test_micro_batches_change_no_gradient(micro_batch):
    close(
        weights(run(make_groups(), config())[1]),
        weights(run(make_groups(), config(micro_batch=micro_batch))[1]),
        rtol=1e-4,
        atol=1e-6,
    )


def test_one_step_is_the_mean_over_all_samples_and_levels():
    """The gradient of an epoch of one optimizer step, against a plain loop over samples and levels."""
    cfg, groups = config(accumulation=12, grad_clip=1e9), make_groups()
    world = ToyWorld()
    policy, levels, losses = Policy(world.model, cfg), Levels(cfg, 7, 1), []
    for group in groups:
        with torch.no_grad():
            context = world.build_context(group.scene, group.history_CTHW, group.context, group.condition)
        for n, candidate in enumerate(group.candidates):
            for level in levels.draw(group.key, candidate):
                sigma, x0 = levels.sigmas_S[level : level + 1], group.x0_NCTHW[n : n + 1]
                x = flow.add_noise(x0, levels.noise(x0.shape[1:], group.key, candidate, level)[None], sigma)
                v = world.velocity(x, sigma, group.clip, group.scene, context)
                losses.append(nft_loss(x0, x, sigma, v, v.detach(), group.r_N[n : n + 1], cfg.beta)[0])
    torch.cat(losses).mean().backward()
    expected = {k: p.grad.clone() for k, p in policy.params.items() if p.grad is not None}
    assert "remember.weight" not in expected  # no gradient through the context

    seen = {}
    other = ToyWorld()
    spied = Policy(other.model, cfg)
    step = spied.optimizer_step
    spied.optimizer_step = lambda: (
        seen.update({k: p.grad.clone() for k, p in spied.params.items() if p.grad is not None}),
        step(),
    )[1]
    metrics = update_epoch(other, spied, groups, cfg, 7, 1)
    close(expected, seen, rtol=1e-4, atol=1e-6)
    assert metrics["loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(
        float(np.sqrt(sum(float(g.square().sum()) for g in expected.values()))), rel=1e-4
    )


def test_a_group_cut_by_an_optimizer_step_is_trained_whole():
    _, policy, m = run(make_groups(count=2, size=3), config(accumulation=4))  # 6 samples: 3 + 3
    assert m["optimizer_steps"] == 2
    world, policy, m = run(make_groups(count=1, size=5), config(accumulation=2))  # 2 + 2 + 1 inside one group
    assert policy.step == 3
    assert m["live_forwards"] == 10
    assert world.forwards.context == 1


def test_only_one_context_is_alive_at_a_time():
    """At full size one is 5 to 14 GB."""

    class Kept(ContextCache):
        def detach(self):
            return self

    world, made, alive = ToyWorld(), [], []
    build = world.build_context

    def spy(*args):
        alive.append(sum(reference() is not None for reference in made))
        context = Kept(build(*args).layers, 3)
        made.append(weakref.ref(context))
        return context

    world.build_context = spy
    run(make_groups(count=4, size=3), config(accumulation=5), world)
    assert alive == [0, 0, 0, 0]


def test_context_is_built_by_the_old_policy_without_gradient():
    world = ToyWorld()
    cfg = config()
    policy = Policy(world.model, cfg)
    seen = []
    build = world.build_context

    def spy(*args):
        seen.append(policy.active)
        return build(*args)

    world.build_context = spy
    update_epoch(world, policy, make_groups(), cfg, 7, 1)
    assert seen == ["old"] * 3
    assert world.grad_in_context == [False] * 3
    assert policy.active == "live"


def test_old_policy_matters_once_live_has_moved():
    def second_epoch(old):
        return weights(run(make_groups(), config(old=old, lr=3e-2), epochs=(1, 2))[1])

    ema, own = second_epoch("ema"), second_epoch("self")
    assert max((ema[k] - own[k]).abs().max() for k in ema) > 1e-4


def test_half_weight_and_self_move_nothing():
    groups = make_groups()
    for group in groups:
        group.r_N = torch.full_like(group.r_N, 0.5)
    world = ToyWorld()
    before = {k: p.detach().clone() for k, p in world.model.named_parameters()}
    _, policy, m = run(groups, config(old="self"), world)
    assert m["grad_norm"] < 1e-6
    torch.testing.assert_close(m["r"], 0.5)
    assert m["v_gap"] == 0
    # Adam normalises even a rounding-sized gradient, so only the gradient is asserted, and the frozen context weights
    assert torch.equal(policy.sets["live"]["remember.weight"], before["remember.weight"])


def test_first_clip_shows_the_conditioning_latent_clean_and_does_not_train_on_it():
    groups = make_groups(first_clip=True)
    seen = []

    class Spy(ToyWorld):
        def velocity(self, x_BCTHW, sigma_B, clip, scene, context):
            seen.append((x_BCTHW[:, :, 0].detach().clone(), context))
            return super().velocity(x_BCTHW, sigma_B, clip, scene, context)

    _world, policy, m = run(groups, config(), Spy())
    clean = torch.cat([g.x0_NCTHW[:, :, 0] for g in groups])
    for latent, context in seen:
        assert context is None
        assert all(any(torch.equal(x, c) for c in clean) for x in latent)
    assert m["context_passes"] == 0
    moved = [g.x0_NCTHW.clone() for g in groups]
    for x0 in moved:
        x0[:, :, 0] += 100.0
    for group, x0 in zip(groups, moved, strict=True):
        group.x0_NCTHW = x0
    close(weights(policy), weights(run(groups, config())[1]))


def test_nan_loss_is_named_and_leaves_the_weights(tmp_path: Path):
    groups = make_groups()
    groups[1].x0_NCTHW[2, 0, 0, 0, 0] = float("nan")
    world, cfg = ToyWorld(), config(accumulation=12)
    policy = Policy(world.model, cfg)
    policy.save(tmp_path / "policy")
    before = {f.name: f.read_bytes() for f in (tmp_path / "policy").iterdir()}
    live = weights(policy)
    with pytest.raises(NumericsError, match="group1"):
        update_epoch(world, policy, groups, cfg, 7, 1)
    assert policy.epoch == policy.step == 0
    assert policy.active == "live"
    assert all(torch.equal(live[k], t) for k, t in policy.sets["live"].items())
    assert {f.name: f.read_bytes() for f in (tmp_path / "policy").iterdir()} == before


def test_four_epochs_equal_two_resume_two(tmp_path: Path):
    groups, cfg = make_groups(), config()
    _, whole, _ = run(groups, cfg, epochs=(1, 2, 3, 4))
    _, half, _ = run(groups, cfg, epochs=(1, 2))
    half.save(tmp_path / "policy")
    world = ToyWorld(seed=3)
    resumed = Policy(world.model, cfg)
    resumed.load(tmp_path / "policy")
    for epoch in (3, 4):
        update_epoch(world, resumed, groups, cfg, 7, epoch)
    for name in ("live", "old", "ema"):
        a, b = weights(whole, name), weights(resumed, name)
        assert all(torch.equal(a[k], b[k]) for k in a), name
    assert torch.equal(whole.rng.get_state(), resumed.rng.get_state())
    assert whole.digest() == resumed.digest()


def test_groups_loaded_one_at_a_time_equal_a_list_and_announced_sizes_are_checked():
    cfg, calls, loaded = config(accumulation=5), [], []
    listed = make_groups(count=4, size=3)

    class Stored:
        sizes = (3, 3, 3, 3)

        def __getitem__(self, index):
            loaded.append(index)
            return make_groups(count=4, size=3)[index]

    _, at_once, _ = run(listed, cfg)
    _, lazily, _ = run(Stored(), cfg, on_progress=lambda done, total, m: calls.append((done, total)))
    close(weights(at_once), weights(lazily), rtol=0, atol=0)
    assert calls == [(4, 12), (8, 12), (12, 12)]
    assert loaded == [0, 1, 2, 3]  # each once, although steps cut through groups
    for announced in (2, 4):
        Stored.sizes = (3, 3, 3, announced)
        with pytest.raises(ValueError, match="announced"):
            run(Stored(), cfg)


def test_nothing_to_train_still_finishes_the_epoch():
    _, policy, m = run([], config())
    assert policy.epoch == 1
    assert policy.step == m["samples"] == m["optimizer_steps"] == 0


def test_global_random_state_is_neither_used_nor_moved():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    world = ToyWorld()
    torch.set_rng_state(before)
    run(make_groups(), config(), world)
    assert torch.equal(torch.get_rng_state(), before)


def test_lora_trains_only_adapters():
    world, cfg = ToyWorld(), config(params=ParamsConfig(kind="lora", rank=2, alpha=4, targets=["to_q"]))
    prepare_params(world.model, cfg.params, 0)
    _, policy, m = run(make_groups(), cfg, world)
    assert all("lora_" in name for name in policy.params)
    assert m["grad_norm"] > 0
    assert policy.sets["live"]["to_q.lora_B.policy.weight"].abs().max() > 0


def test_it_learns_to_prefer_the_good_sample():
    """One good and one bad constant sample: after some epochs the flow's x0 prediction leans to the good one."""
    groups = make_groups(count=1, size=2)
    groups[0].x0_NCTHW[0], groups[0].x0_NCTHW[1] = 1.0, -1.0
    groups[0].r_N = torch.tensor([1.0, 0.0])
    cfg = config(lr=3e-2, timesteps=4, steps=4, accumulation=2)
    world, _policy, _ = run(groups, cfg, epochs=range(1, 31))
    with torch.no_grad():
        noise, one = torch.randn(64, C, T, H, W, generator=torch.Generator().manual_seed(0)), torch.ones(64)
        context = world.build_context(
            groups[0].scene, groups[0].history_CTHW, groups[0].context, groups[0].condition
        )
        x0 = noise - world.velocity(noise, one, groups[0].clip, groups[0].scene, context)
        base = ToyWorld()
        x0_base = noise - base.velocity(noise, one, groups[0].clip, groups[0].scene, context)
    assert x0.mean() > x0_base.mean() + 0.2


def test_mismatched_groups_are_refused():
    group = make_groups(count=1)[0]
    with pytest.raises(ValueError, match="group0"):
        TrainingGroup(**{**group.__dict__, "candidates": [1]})
