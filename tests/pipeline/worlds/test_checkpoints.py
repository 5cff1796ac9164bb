"""Folders of WorldPlayWan: round trips, strict errors, stock folders, and LoRA on the real names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from pipeline.errors import CheckpointError
from pipeline.worlds.checkpoints import load_wan
from pipeline.worlds.wan import WorldPlayWan

CONFIG = {
    "patch_size": (1, 1, 1),
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 3,
    "out_channels": 3,
    "text_dim": 8,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 16,
}
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    WorldPlayWan(**CONFIG).save_pretrained(tmp_path / "transformer")
    return tmp_path / "transformer"


def velocity(model: WorldPlayWan) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        return model(
            "velocity",
            torch.randn(1, 3, 2, 3, 4, generator=generator),
            torch.tensor([[500.0, 20.0]]),
            torch.tensor([[9, 10]]),
            torch.eye(4).expand(1, 2, 4, 4),
            torch.eye(3).expand(1, 2, 3, 3),
            torch.randn(1, 5, 8, generator=generator),
        )


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / WEIGHTS)
    for name, value in changes.items():
        key = name.replace("__", ".")
        if value is None:
            del tensors[key]
        else:
            tensors[key] = value
    save_file(tensors, folder / WEIGHTS)


def test_round_trip_keeps_configuration_and_output(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["_class_name"] == "WorldPlayWan"
    assert config["num_layers"] == 2
    loaded = load_wan(folder)
    torch.manual_seed(0)
    assert torch.equal(velocity(loaded), velocity(WorldPlayWan(**CONFIG).eval()))
    assert torch.equal(velocity(WorldPlayWan.from_pretrained(folder)), velocity(loaded))
    assert not any(tensor.is_meta for tensor in [*loaded.parameters(), *loaded.buffers()])


def test_sharded_folders_load(folder: Path, tmp_path: Path) -> None:
    expected = velocity(load_wan(folder))
    load_wan(folder).save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert torch.equal(velocity(load_wan(tmp_path / "shards")), expected)
    next((tmp_path / "shards").glob("*00001*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match="00001"):
        load_wan(tmp_path / "shards")


def test_narrow_loading_keeps_norms_and_time_in_fp32(folder: Path) -> None:
    model = load_wan(folder, dtype=torch.bfloat16)
    assert model.blocks[0].ffn.net[2].weight.dtype == torch.bfloat16
    assert model.blocks[0].norm2.weight.dtype == torch.float32
    assert model.condition_embedder.time_embedder.linear_1.weight.dtype == torch.float32
    assert velocity(model).isfinite().all()


def test_damage_is_named(folder: Path, tmp_path: Path) -> None:
    def broken(name: str) -> Path:
        return Path(shutil.copytree(folder, tmp_path / name))

    with pytest.raises(CheckpointError, match=r"nowhere.*config\.json"):
        load_wan(tmp_path / "nowhere")

    lacking = broken("lacking")
    edit(lacking, blocks__1__attn1__to_out_prope__0__bias=None)
    with pytest.raises(CheckpointError, match=r"'blocks\.1\.attn1\.to_out_prope\.0\.bias' is missing"):
        load_wan(lacking)

    surplus = broken("surplus")
    edit(surplus, blocks__7__extra=torch.zeros(1))
    with pytest.raises(CheckpointError, match=r"'blocks\.7\.extra' is unknown"):
        load_wan(surplus)

    reshaped = broken("reshaped")
    edit(reshaped, proj_out__bias=torch.zeros(4))
    with pytest.raises(CheckpointError, match=r"'proj_out\.bias' has shape \(4,\).*\(3,\)"):
        load_wan(reshaped)

    truncated = broken("truncated")
    content = (truncated / WEIGHTS).read_bytes()
    (truncated / WEIGHTS).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=rf"{WEIGHTS}: truncated or damaged"):
        load_wan(truncated)

    empty = broken("empty")
    (empty / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        load_wan(empty)

    foreign = broken("foreign")
    (foreign / "config.json").write_text(json.dumps({"hidden_size": 3}))
    with pytest.raises(CheckpointError, match="unknown option 'hidden_size'"):
        load_wan(foreign)

    garbled = broken("garbled")
    (garbled / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_wan(garbled)


def test_a_stock_folder_starts_as_the_identity(tmp_path: Path) -> None:
    torch.manual_seed(0)
    stock = WanTransformer3DModel(**CONFIG).eval()
    stock.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"'condition_embedder\.action_embedder.* is missing"):
        load_wan(tmp_path)
    model = load_wan(tmp_path, add_missing=True)
    generator = torch.Generator().manual_seed(1)
    latents, text = torch.randn(1, 3, 2, 3, 4, generator=generator), torch.randn(1, 5, 8, generator=generator)
    timesteps = torch.tensor([[500.0, 20.0]]).repeat_interleave(12, dim=1)
    with torch.no_grad():
        expected = stock(latents, timesteps, text, return_dict=False)[0]
    torch.testing.assert_close(velocity(model), expected, rtol=0, atol=1e-5)
    assert model.condition_embedder.action_embedder.linear_1.weight.abs().max() > 0

    (tmp_path / "partial").mkdir()
    shutil.copy(tmp_path / "config.json", tmp_path / "partial")
    shutil.copy(tmp_path / WEIGHTS, tmp_path / "partial")
    edit(tmp_path / "partial", proj_out__bias=None)
    with pytest.raises(CheckpointError, match="missing"):
        load_wan(tmp_path / "partial", add_missing=True)


def test_lora_by_regex_starts_as_the_identity_and_learns(folder: Path, tmp_path: Path) -> None:
    model = load_wan(folder)
    before = velocity(model)
    targets = r"blocks\.\d+\.(attn1\.(to_[qkv]|to_out\.0|to_out_prope\.0)|ffn\.net\.(0\.proj|2))"
    model.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=targets), adapter_name="policy")
    assert torch.equal(velocity(model), before)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * 7
    assert all("lora" in name for name in trained)
    with torch.no_grad():
        for name, p in trained.items():
            if "lora_B" in name:
                p.fill_(0.01)
    changed = velocity(model)
    assert not torch.equal(changed, before)
    model.save_lora_adapter(tmp_path / "lora", adapter_name="policy")
    model.disable_adapters()
    assert torch.equal(velocity(model), before)
    model.enable_adapters()
    assert torch.equal(velocity(model), changed)
    again = load_wan(folder)
    again.load_lora_adapter(tmp_path / "lora", prefix=None, adapter_name="policy", use_safetensors=True)
    torch.testing.assert_close(velocity(again), changed, rtol=0, atol=1e-6)
