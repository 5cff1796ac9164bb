"""Weight sets stay apart, swaps survive exceptions, checkpoints are atomic, strict and resume bit-equal."""

import json
import os

import pytest
import torch
from torch import nn

from pipeline.errors import CheckpointError, ConfigError, NumericsError, StorageError
from pipeline.updates import checkpoint
from pipeline.updates.config import OldDecayConfig, ParamsConfig, UpdateConfig
from pipeline.updates.policy import Policy, load_weights, prepare_params

CONFIG = UpdateConfig(
    lr=0.05, ema_decay=0.5, old_decay=OldDecayConfig(start=0.25, rate=0.25, max=0.6), warmup_steps=2
)


class Net(nn.Module):
    def __init__(self, seed=0, wide=4):
        super().__init__()
        torch.manual_seed(seed)
        self.to_q, self.to_out, self.unused = nn.Linear(3, wide), nn.Linear(wide, 1), nn.Linear(2, 2)

    def forward(self, x):
        return self.to_out(torch.tanh(self.to_q(x)))


def policy(seed=0, config=CONFIG, **net):
    return Policy(Net(seed, **net), config, seed=11)


def train(p, epochs=1, steps=2):
    x = torch.linspace(-1, 1, 30).view(10, 3)
    for _ in range(epochs):
        for _ in range(steps):
            noise = torch.rand((), generator=p.rng)
            (p.model(x) - noise).square().mean().backward()
            p.optimizer_step()
        p.finish_epoch()


def snapshot(p):
    flat = {f"{s}/{k}": t.clone() for s, tensors in p.sets.items() for k, t in tensors.items()}
    for name, parameter in p.params.items():
        flat |= {f"opt/{name}/{k}": v.clone() for k, v in p.optimizer.state.get(parameter, {}).items()}
    return flat | {"rng": p.rng.get_state(), "epoch": torch.tensor(p.epoch), "step": torch.tensor(p.step)}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_sets_start_equal_and_follow_their_own_schedules():
    p = policy()
    first = snapshot(p)
    assert same({k: first[f"live/{k}"] for k in p.params}, {k: first[f"old/{k}"] for k in p.params})
    train(p, steps=1)
    w = "to_q.weight"
    live, old, ema = (p.sets[s][w] for s in ("live", "old", "ema"))
    torch.testing.assert_close(ema, 0.5 * first[f"ema/{w}"] + 0.5 * live)
    torch.testing.assert_close(old, 0.5 * first[f"old/{w}"] + 0.5 * live)  # decay of epoch 1: 0.25 + 0.25
    assert not torch.equal(live, first[f"live/{w}"])


@pytest.mark.parametrize(("decay", "like"), [(0.0, "live"), (1.0, "before")])
def test_extreme_decays_are_exact(decay, like):
    p = policy()
    train(p)
    before = {k: t.clone() for k, t in p.sets["old"].items()}
    p.update_old(decay)
    want = p.sets["live"] if like == "live" else before
    assert all(torch.equal(p.sets["old"][k], want[k]) for k in want)


def test_old_update_per_step_moves_old_inside_the_epoch():
    p = policy(config=CONFIG.model_copy(update={"old_update": "step"}))
    before = p.digest()
    p.model(torch.ones(1, 3)).sum().backward()
    p.optimizer_step()
    assert p.digest() != before
    inside = p.digest()
    p.finish_epoch()
    assert p.digest() == inside


def test_swap_shares_memory_nests_and_survives_exceptions():
    p = policy()
    train(p)
    x = torch.ones(1, 3)
    live, weight = p.model(x).item(), p.model.to_q.weight
    with p.swap("old") as model:
        assert weight.data_ptr() == p.sets["old"]["to_q.weight"].data_ptr()
        old = model(x).item()
        with p.swap("ema"):
            ema = p.model(x).item()
        assert p.model(x).item() == old
    assert len({live, old, ema}) == 3
    with pytest.raises(ZeroDivisionError), p.swap("old"):
        1 / 0  # noqa: B018
    assert p.active == "live"
    assert p.model(x).item() == live
    assert p.model.to_q.weight is weight


def test_training_under_a_swap_is_refused():
    p = policy()
    with p.swap("old"), pytest.raises(RuntimeError, match="wrong set"):
        p.optimizer_step()
    with pytest.raises(ValueError, match="live, old, ema"), p.swap("new"):
        pass


def test_backward_survives_a_swap_in_between():
    p = policy()
    train(p)
    x = torch.ones(2, 3)
    p.model(x).sum().backward()
    expected = p.model.to_q.weight.grad.clone()
    p.optimizer.zero_grad()
    out = p.model(x).sum()
    with torch.no_grad(), p.swap("old"):
        p.model(x)
    out.backward()
    assert torch.equal(p.model.to_q.weight.grad, expected)


def test_digest_is_of_the_old_weights_only():
    p = policy()
    before = p.digest()
    p.model(torch.ones(1, 3)).sum().backward()
    p.optimizer_step()
    assert p.digest() == before
    with p.swap("ema"):
        assert p.digest() == before
    p.finish_epoch()
    assert p.digest() != before


def test_four_epochs_equal_two_save_load_two(tmp_path):
    whole = policy()
    train(whole, epochs=4)
    first = policy()
    train(first, epochs=2)
    first.save(tmp_path / "policy", {"base": "abc"})
    second = policy(seed=5)
    torch.rand(7)
    assert second.load(tmp_path / "policy") == {"base": "abc"}
    assert same(snapshot(first), snapshot(second))
    train(second, epochs=2)
    assert same(snapshot(whole), snapshot(second))


def test_equal_content_gives_equal_bytes(tmp_path):
    for name in ("a", "b"):
        p = policy()
        train(p)
        p.save(tmp_path / name)
    names = sorted(f.name for f in (tmp_path / "a").iterdir())
    assert names == [
        "ema.safetensors",
        "live.safetensors",
        "old.safetensors",
        "optimizer.safetensors",
        "rng.safetensors",
        "state.json",
    ]
    assert all((tmp_path / "a" / n).read_bytes() == (tmp_path / "b" / n).read_bytes() for n in names)


def saved(tmp_path, epochs=1):
    p = policy()
    train(p, epochs=epochs)
    p.save(tmp_path / "policy")
    return p


@pytest.mark.parametrize("name", ["live", "old", "ema", "optimizer", "rng"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "changed"])
def test_damage_is_named_and_changes_nothing(tmp_path, name, damage):
    saved(tmp_path)
    path = tmp_path / "policy" / f"{name}.safetensors"
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    else:
        content[-1] ^= 1
        path.write_bytes(content if damage == "changed" else content[:-9])
    p = policy(seed=5)
    before = snapshot(p)
    with pytest.raises(CheckpointError, match=rf"{name}\.safetensors"):
        p.load(tmp_path / "policy")
    assert same(before, snapshot(p))


def test_foreign_state_and_other_models_are_named(tmp_path):
    saved(tmp_path)
    with pytest.raises(CheckpointError, match=r"to_out\.weight"):
        policy(wide=5).load(tmp_path / "policy")
    with pytest.raises(CheckpointError, match=r"state\.json"):
        policy().load(tmp_path / "nothing")
    path = tmp_path / "policy" / "state.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        policy().load(tmp_path / "policy")
    path.write_text("{")
    with pytest.raises(CheckpointError, match=r"state\.json"):
        policy().load(tmp_path / "policy")


def test_full_disk_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    saved(tmp_path)
    before = {f.name: f.read_bytes() for f in (tmp_path / "policy").iterdir()}

    def full(*args, **kwargs):
        raise checkpoint.safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint.safetensors.torch, "save_file", full)
    other = policy()
    with pytest.raises(StorageError, match=r"disk is full.*previous checkpoint is untouched"):
        other.save(tmp_path / "policy")
    assert {f.name: f.read_bytes() for f in (tmp_path / "policy").iterdir()} == before
    assert [f.name for f in tmp_path.iterdir()] == ["policy"]


@pytest.mark.parametrize("killed_at", range(1, 11))
def test_a_kill_anywhere_leaves_old_or_new(tmp_path, monkeypatch, killed_at):
    """Die at the n-th flush or rename of the second save; no clean-up code runs, as after kill -9."""

    class Killed(BaseException):
        pass

    old = saved(tmp_path)
    new = policy()
    train(new, epochs=2)
    calls = 0

    def dying(real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == killed_at:
                raise Killed
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as m:
        m.setattr(checkpoint, "_sync", dying(checkpoint._sync))
        m.setattr(checkpoint.os, "replace", dying(os.replace))
        m.setattr(checkpoint.shutil, "rmtree", lambda *a, **k: None)
        with pytest.raises(Killed):
            new.save(tmp_path / "policy")
    p = policy(seed=5)
    p.load(tmp_path / "policy")
    assert same(snapshot(p), snapshot(old)) or same(snapshot(p), snapshot(new))
    new.save(tmp_path / "policy")
    p.load(tmp_path / "policy")
    assert same(snapshot(p), snapshot(new))
    assert [f.name for f in tmp_path.iterdir()] == ["policy"]


def test_load_weights_for_inference(tmp_path):
    p = saved(tmp_path)
    net = Net(seed=9)
    assert load_weights(net, tmp_path / "policy", "old") == p.digest()
    assert all(torch.equal(net.get_parameter(k), t) for k, t in p.sets["old"].items())


def test_not_finite_gradient_changes_nothing():
    p = policy()
    (p.model(torch.ones(1, 3)).sum() * float("inf")).backward()
    before = snapshot(p)
    with pytest.raises(NumericsError, match="epoch 1"):
        p.optimizer_step()
    assert same(before, snapshot(p))


def test_lora_trains_adapters_only_and_starts_as_the_base(tmp_path):
    def build(seed):
        net = Net()
        prepare_params(net, ParamsConfig(kind="lora", rank=2, alpha=4, targets=["to_q"]), seed)
        return Policy(net, CONFIG)

    x = torch.ones(2, 3)
    p = build(0)
    assert torch.equal(p.model(x), Net()(x))
    assert set(p.params) == {"to_q.lora_A.policy.weight", "to_q.lora_B.policy.weight"}
    assert torch.equal(build(0).params["to_q.lora_A.policy.weight"], p.params["to_q.lora_A.policy.weight"])
    assert not torch.equal(
        build(1).params["to_q.lora_A.policy.weight"], p.params["to_q.lora_A.policy.weight"]
    )
    train(p)
    assert not torch.equal(p.model(x), Net()(x))
    p.save(tmp_path / "policy")
    q = build(3)
    q.load(tmp_path / "policy")
    assert torch.equal(q.model(x), p.model(x))
    with pytest.raises(ConfigError, match="targets"):
        prepare_params(Net(), ParamsConfig(kind="lora", targets=["nowhere"]), 0)


def test_bf16_or_frozen_weights_are_refused():
    with pytest.raises(ConfigError, match="bfloat16"):
        Policy(Net().to(torch.bfloat16), CONFIG)
    with pytest.raises(ConfigError, match="no parameter"):
        Policy(Net().requires_grad_(False), CONFIG)
