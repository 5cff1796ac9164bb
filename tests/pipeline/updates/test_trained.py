"""What LoRA adapts and what it leaves alone, on both architectures; adapters that take turns without side effects."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeline.errors import ConfigError
from pipeline.updates.config import OldDecayConfig, ParamsConfig, UpdateConfig
from pipeline.updates.policy import Policy
from pipeline.updates.trained import lora_pattern, prepare_params, use_adapter
from pipeline.worlds.hunyuan import TEXT_SIDE
from tests.pipeline.updates.ranks_job import Case, Groups, make_world

DEFAULT = ParamsConfig(kind="lora", rank=2, alpha=4)
CONFIG = UpdateConfig(lr=0.05, ema_decay=0.5, old_decay=OldDecayConfig(start=0.25, rate=0, max=0.5))


def matched(network: str, targets: list[str]) -> set[str]:
    model = make_world(network).model
    pattern = lora_pattern(model, targets)
    return {name for name, _ in model.named_modules() if re.fullmatch(pattern, name)}


def test_default_targets_are_all_of_the_video_side_and_nothing_else() -> None:
    ends = ("to_q", "to_k", "to_v", "to_out.0")
    wan = {f"blocks.{i}.attn{j}.{end}" for i in (0, 1) for j in (1, 2) for end in ends}
    assert matched("wan", DEFAULT.targets) == wan | {f"blocks.{i}.attn1.to_out_prope.0" for i in (0, 1)}
    hunyuan = {f"transformer_blocks.{i}.attn.{end}" for i in (0, 1) for end in (*ends, "to_out_prope.0")}
    assert matched("hunyuan", DEFAULT.targets) == hunyuan
    # the trap: the same endings exist in the text refiner, and text-side layers of a block end alike
    names = [name for name, _ in make_world("hunyuan").model.named_modules()]
    assert any(name.endswith("to_q") and name not in hunyuan for name in names)
    assert matched("hunyuan", ["net.2"]) == {f"transformer_blocks.{i}.ff.net.2" for i in (0, 1)}


@pytest.mark.parametrize("network", ["wan", "hunyuan"])
def test_no_target_reaches_the_text_side(network: str) -> None:
    model = make_world(network).model
    scope = re.compile(model.lora_scope)
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    allowed = [name for name in linears if scope.match(name)]
    assert allowed
    assert not [name for name in allowed if TEXT_SIDE.match(f"{name}.weight")]


@pytest.mark.parametrize("target", ["q", "add_q_proj", "to_add_out", "linear", "ff_context.net.2", "nowhere"])
def test_a_target_without_a_layer_is_named_with_those_there_are(target: str) -> None:
    with pytest.raises(ConfigError, match=rf"targets: '{target}'.*attn\.to_q, .*ff\.net\.2"):
        prepare_params(make_world("hunyuan").model, DEFAULT.model_copy(update={"targets": [target]}), 0)


def test_full_fine_tuning_trains_in_fp32_exactly_what_gets_gradient() -> None:
    """The 8B's text side is half of its weights: averages and moments of it would be 100 GB for nothing."""
    world = make_world("hunyuan")
    world.model.to(torch.bfloat16)
    world.autocast = torch.bfloat16
    prepare_params(world.model, ParamsConfig(), 0)
    trained = {name: p for name, p in world.model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    case = Case((2,), CONFIG, "hunyuan")
    group = Groups(world, case)[0]
    context = world.build_context(group.scene, group.history_CTHW, group.context, group.condition)
    sigma_B = torch.tensor([0.5, 0.9])
    world.velocity(group.x0_NCTHW, sigma_B, group.clip, group.scene, context).square().mean().backward()
    assert {name for name, p in world.model.named_parameters() if p.grad is not None} == set(trained)
    frozen = sum(p.numel() for p in world.model.parameters() if not p.requires_grad)
    assert frozen > 0


@pytest.fixture
def policy() -> Policy:
    """LoRA on a tiny 5B in bf16, moved by two steps, so that live, old, ema and base all differ."""
    model = make_world("wan").model.to(torch.bfloat16)
    prepare_params(model, DEFAULT, seed=0)
    made = Policy(model, CONFIG)
    for parameter in made.params.values():
        parameter.grad = torch.ones_like(parameter)
    made.optimizer_step()
    made.finish_epoch()
    return made


def layer_output(policy: Policy) -> torch.Tensor:
    layer = policy.model.blocks[0].attn1.to_q
    return layer(torch.linspace(-1, 1, 32, dtype=torch.bfloat16)[None]).detach().float()


def test_adapters_are_fp32_beside_narrow_frozen_weights(policy: Policy) -> None:
    assert {p.dtype for p in policy.params.values()} == {torch.float32}
    assert policy.model.blocks[0].attn1.to_q.base_layer.weight.dtype == torch.bfloat16
    assert {n.split(".")[-2] for n, p in policy.model.named_parameters() if p.requires_grad} == {"policy"}


def test_sets_take_turns_and_what_is_trained_stays(policy: Policy) -> None:
    def trained() -> set[str]:
        return {name for name, p in policy.model.named_parameters() if p.requires_grad}

    before, outputs = trained(), {"live": layer_output(policy)}
    for name in ("old", "ema", "base"):
        with policy.swap(name):
            outputs[name] = layer_output(policy)
            assert trained() == before
            with policy.swap("live"):
                assert torch.equal(layer_output(policy), outputs["live"])
            assert torch.equal(layer_output(policy), outputs[name])
    assert torch.equal(layer_output(policy), outputs["live"])
    assert trained() == before
    values = list(outputs.values())
    assert all(not torch.equal(a, b) for i, a in enumerate(values) for b in values[:i])
    layer = make_world("wan").model.to(torch.bfloat16).blocks[0].attn1.to_q
    x = torch.linspace(-1, 1, 32, dtype=torch.bfloat16)[None]
    assert torch.equal(outputs["base"], layer(x).detach().float())  # not touched by a single bit


def test_old_and_live_share_no_memory_and_old_runs_from_its_adapter(policy: Policy) -> None:
    key = "blocks.0.attn1.to_q.lora_B.policy.weight"
    adapter = policy.model.get_parameter(key.replace("policy", "old"))
    assert adapter.data_ptr() == policy.sets["old"][key].data_ptr()
    assert not torch.equal(adapter, policy.sets["live"][key])
    with policy.swap("old"):
        assert policy.model.get_parameter(key).data_ptr() == policy.sets["live"][key].data_ptr()


def test_without_adapters_there_is_no_base_set() -> None:
    model = make_world("wan").model
    prepare_params(model, ParamsConfig(), 0)
    with pytest.raises(ValueError, match="live, old, ema"), Policy(model, CONFIG).swap("base"):
        pass


def test_a_gradient_survives_turns_between_forward_and_backward(policy: Policy) -> None:
    layer, x = policy.model.blocks[0].attn1.to_q, torch.ones(1, 32, dtype=torch.bfloat16)
    out = layer(x).float().sum()
    use_adapter(policy.model, "old")
    use_adapter(policy.model, None)
    use_adapter(policy.model, "policy")
    out.backward()
    assert layer.lora_B.policy.weight.grad.abs().max() > 0
    assert layer.lora_B.old.weight.grad is None


def test_resuming_is_exact(policy: Policy, tmp_path: Path) -> None:
    policy.save(tmp_path / "policy")
    model = make_world("wan").model.to(torch.bfloat16)
    prepare_params(model, DEFAULT, seed=9)
    other = Policy(model, CONFIG)
    other.load(tmp_path / "policy")
    for name in ("live", "old", "ema", "base"):
        with policy.swap(name), other.swap(name):
            assert torch.equal(layer_output(policy), layer_output(other)), name
    for made in (policy, other):
        for parameter in made.params.values():
            parameter.grad = torch.full_like(parameter, 0.3)
        made.optimizer_step()
        made.finish_epoch()
    assert policy.digest() == other.digest()
    assert all(torch.equal(policy.sets["live"][k], other.sets["live"][k]) for k in policy.params)
