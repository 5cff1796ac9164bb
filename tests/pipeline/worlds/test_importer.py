"""Import of published checkpoints: bit-equal round trips on tiny networks, errors by name, memory of the stream."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from pipeline.errors import CheckpointError, StorageError, UsageError
from pipeline.worlds import importer
from pipeline.worlds.checkpoints import load_hunyuan, load_wan
from pipeline.worlds.hunyuan import WorldPlayHunyuan
from pipeline.worlds.import_keys import plain_name
from pipeline.worlds.importer import Plan, check_published, import_base, plan_import
from pipeline.worlds.wan import WorldPlayWan
from tests.golden.fill import fill_parameters
from tests.pipeline.worlds import hunyuan_tiny, test_wan
from tests.pipeline.worlds.hunyuan_tiny import filled, gap, history, published, second

GOLDEN = Path(__file__).parents[2] / "golden"
Tensors = dict[str, torch.Tensor]


def config_file(folder: Path, network: Any) -> Path:
    network.save_config(folder)
    return folder / "config.json"


@pytest.fixture
def plan_8b(tmp_path: Path) -> Plan:
    return plan_import("worldplay-8b", config_file(tmp_path / "c8", WorldPlayHunyuan(**hunyuan_tiny.CONFIG)))


@pytest.fixture
def plan_5b(tmp_path: Path) -> Plan:
    return plan_import("worldplay-5b", config_file(tmp_path / "c5", WorldPlayWan(**test_wan.CONFIG)))


@pytest.fixture(scope="module")
def tensors_5b() -> Tensors:
    model = WorldPlayWan(**test_wan.CONFIG)
    fill_parameters(model.named_parameters())
    return model.state_dict()


@pytest.fixture(scope="module")
def tensors_8b() -> Tensors:
    return published(WorldPlayHunyuan(**hunyuan_tiny.CONFIG))


def envelope(path: Path, tensors: Tensors) -> Path:
    """As the 5B is published: two networks, FSDP names."""

    def wrapped(name: str) -> str:
        return "model." + name.replace("blocks.", "blocks._fsdp_wrapped_module.", 1)

    content = {
        "generator": {wrapped(name): value for name, value in tensors.items()},
        "generator_ema": {wrapped(name): value + 1 for name, value in tensors.items()},
        "step": 4000,
    }
    torch.save(content, path)
    return path


@pytest.mark.parametrize(
    ("base", "manifest", "count"),
    [("worldplay-5b", "manifest_wan5b.json", 889), ("worldplay-8b", "manifest_hy8b.json", 1905)],
)
def test_full_size_manifests_follow_from_the_rules(base: str, manifest: str, count: int) -> None:
    published_shapes = plan_import(base).published
    expected = json.loads((GOLDEN / manifest).read_text())
    assert {name: list(shape) for name, shape in published_shapes.items()} == expected
    assert len(expected) == count


def test_8b_reproduces_the_golden_output_after_import(
    plan_8b: Plan, tensors_8b: Tensors, tmp_path: Path
) -> None:
    save_file(tensors_8b, tmp_path / "model.safetensors")
    note = import_base(plan_8b, tmp_path / "model.safetensors", tmp_path / "base", dtype="float32")
    model = load_hunyuan(tmp_path / "base" / "transformer")
    golden = load_file(GOLDEN / "hy8b.safetensors")
    assert gap(second(model, history(model)), golden["chunk1"]) < 1e-5
    assert note["published_tensors"] == 137
    assert json.loads((tmp_path / "base" / "import.json").read_text()) == note


def test_8b_round_trip_is_bit_equal(plan_8b: Plan, tmp_path: Path) -> None:
    """Ours -> published names (written here independently of the rules' application) -> ours."""
    torch.manual_seed(0)
    ours = WorldPlayHunyuan(**hunyuan_tiny.CONFIG).state_dict()
    back: dict[str, dict[int, torch.Tensor]] = {}
    for name, source in plan_8b.sources.items():
        value = torch.cat((ours[name][64:], ours[name][:64])) if source.swapped else ours[name]
        back.setdefault(source.key, {})[source.third or 0] = value
    theirs = {key: torch.cat([parts[i] for i in sorted(parts)]) for key, parts in back.items()}
    assert {key: tuple(v.shape) for key, v in theirs.items()} == plan_8b.published
    assert sum(source.swapped for source in plan_8b.sources.values()) == 2
    assert "final_layer.adaLN_modulation.1.weight" in theirs
    save_file(theirs, tmp_path / "model.safetensors")
    import_base(plan_8b, tmp_path, tmp_path / "base", dtype="float32", shard_bytes=1 << 20)
    again = load_hunyuan(tmp_path / "base" / "transformer").state_dict()
    assert all(torch.equal(again[name], value) for name, value in ours.items())
    assert len(list((tmp_path / "base" / "transformer").glob("*.safetensors"))) > 3


@pytest.mark.parametrize("part", ["generator", "generator_ema"])
def test_5b_envelope_round_trip(plan_5b: Plan, tensors_5b: Tensors, tmp_path: Path, part: str) -> None:
    source = envelope(tmp_path / "model.pt", tensors_5b)
    import_base(plan_5b, source, tmp_path / "base", dtype="float32", part=part)
    loaded = load_wan(tmp_path / "base" / "transformer")
    shift = 1 if part == "generator_ema" else 0
    assert all(torch.equal(loaded.state_dict()[n], v + shift) for n, v in tensors_5b.items())
    if not shift:
        golden = load_file(GOLDEN / "wan5b.safetensors")
        assert gap(test_wan.second(loaded, test_wan.history(loaded)), golden["chunk1"]) < 1e-5


def test_names_lose_their_wrappers() -> None:
    name = "model._fsdp_wrapped_module.blocks.3._fsdp_wrapped_module._orig_mod.attn1.to_q.weight"
    assert plain_name(name) == "blocks.3.attn1.to_q.weight"
    assert plain_name("img_mod.model.weight") == "img_mod.model.weight"


def test_a_bare_dictionary_and_a_diffusers_folder_import_too(
    plan_5b: Plan, tensors_5b: Tensors, tmp_path: Path
) -> None:
    torch.save(tensors_5b, tmp_path / "bare.pt")
    import_base(plan_5b, tmp_path / "bare.pt", tmp_path / "one", dtype="float32", shard_bytes=50_000)
    import_base(plan_5b, tmp_path / "one" / "transformer", tmp_path / "two", dtype="float32")
    first, second_ = (load_wan(tmp_path / name / "transformer").state_dict() for name in ("one", "two"))
    assert all(torch.equal(first[name], second_[name]) for name in tensors_5b)
    # the shards are plain diffusers files
    stock = WorldPlayWan.from_pretrained(tmp_path / "one" / "transformer")
    assert all(torch.equal(stock.state_dict()[name], value) for name, value in first.items())


def test_narrow_storage_keeps_what_diffusers_keeps(
    plan_5b: Plan, plan_8b: Plan, tensors_5b: Tensors, tensors_8b: Tensors, tmp_path: Path
) -> None:
    torch.save(tensors_5b, tmp_path / "model.pt")
    import_base(plan_5b, tmp_path / "model.pt", tmp_path / "five")
    five = load_file(tmp_path / "five/transformer/diffusion_pytorch_model.safetensors")
    assert five["blocks.0.norm2.weight"].dtype == torch.float32
    assert five["blocks.0.attn1.to_q.weight"].dtype == torch.bfloat16
    torch.save({name: value.bfloat16() for name, value in tensors_5b.items()}, tmp_path / "narrow.pt")
    import_base(plan_5b, tmp_path / "narrow.pt", tmp_path / "five")  # an earlier import is replaced
    five = load_file(tmp_path / "five/transformer/diffusion_pytorch_model.safetensors")
    assert {value.dtype for value in five.values()} == {torch.bfloat16}
    save_file(tensors_8b, tmp_path / "model.safetensors")
    import_base(plan_8b, tmp_path / "model.safetensors", tmp_path / "eight")
    model = load_hunyuan(tmp_path / "eight" / "transformer")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    wide = second(filled(), history(filled()))
    assert (second(model, history(model)).float() - wide).square().mean() < 1e-3 * wide.square().mean()


def test_every_wrong_key_is_named(plan_8b: Plan, tensors_8b: Tensors, tmp_path: Path) -> None:
    wrong = dict(tensors_8b)
    del wrong["double_blocks.1.img_attn_prope_proj.bias"], wrong["time_in.mlp.0.weight"]
    wrong["double_blocks.2.img_attn_q.weight"] = torch.zeros(1)
    wrong["img_in.proj.weight"] = torch.zeros(64, 16, 1, 1, 1)
    save_file(wrong, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        import_base(plan_8b, tmp_path / "model.safetensors", tmp_path / "base")
    said = str(caught.value)
    assert "2 missing: " in said
    assert "double_blocks.1.img_attn_prope_proj.bias" in said
    assert "time_in.mlp.0.weight" in said
    assert "1 unexpected: double_blocks.2.img_attn_q.weight" in said
    assert "img_in.proj.weight is [64, 16, 1, 1, 1], not [64, 17, 1, 1, 1]" in said
    assert "\n" not in said
    assert not (tmp_path / "base").exists()


def test_a_long_list_of_wrong_keys_is_written_out(plan_5b: Plan, tensors_8b: Tensors, tmp_path: Path) -> None:
    save_file(tensors_8b, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"77 missing: .*137 unexpected: .*base\.keys\.txt"):
        import_base(plan_5b, tmp_path / "model.safetensors", tmp_path / "base")
    lines = (tmp_path / "base.keys.txt").read_text().splitlines()
    assert len(lines) == 77 + 137
    assert "missing\tblocks.0.attn1.to_q.weight" in lines


def test_stock_weights_lack_the_additions(plan_5b: Plan, tmp_path: Path) -> None:
    stock = WanTransformer3DModel(**test_wan.CONFIG)
    stock.save_pretrained(tmp_path / "stock")
    with pytest.raises(CheckpointError, match="8 missing: condition_embedder.action_embedder"):
        import_base(plan_5b, tmp_path / "stock", tmp_path / "base")


class _Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("this must never run",))


def test_bad_files_are_refused_by_name(
    plan_5b: Plan, plan_8b: Plan, tensors_5b: Tensors, tensors_8b: Tensors, tmp_path: Path, capsys: Any
) -> None:
    def refused(name: str, match: str, plan: Plan = plan_5b, **options: Any) -> None:
        with pytest.raises(CheckpointError, match=match):
            import_base(plan, tmp_path / name, tmp_path / "base", **options)
        assert not (tmp_path / "base").exists()

    refused("nowhere.pt", r"nowhere\.pt: missing")
    (tmp_path / "notes.txt").write_text("x")
    refused("notes.txt", "neither")
    torch.save({"generator": _Code()}, tmp_path / "code.pt")
    refused("code.pt", r"code\.pt: holds more than tensors")
    assert "never" not in capsys.readouterr().out
    envelope(tmp_path / "good.pt", tensors_5b)
    refused("good.pt", "no tensors under 'critic'.*generator, generator_ema", part="critic")
    content = (tmp_path / "good.pt").read_bytes()
    (tmp_path / "half.pt").write_bytes(content[: len(content) // 2])
    refused("half.pt", r"half\.pt: truncated")
    torch.save(tensors_5b, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    refused("old.pt", r"old\.pt: truncated, damaged or of an old format")
    torch.save([1], tmp_path / "list.pt")
    refused("list.pt", "holds a list")
    torch.save(
        {"model.proj_out.bias": torch.zeros(1), "proj_out.bias": torch.zeros(1)}, tmp_path / "twice.pt"
    )
    refused("twice.pt", "in it twice")
    save_file(tensors_8b, tmp_path / "m.safetensors")
    content = (tmp_path / "m.safetensors").read_bytes()
    (tmp_path / "m.safetensors").write_bytes(content[:-100])
    refused("m.safetensors", r"m\.safetensors: truncated", plan_8b)
    (tmp_path / "several").mkdir()
    for name in ("a.pt", "b.pt"):
        torch.save({}, tmp_path / "several" / name)
    refused("several", "found a.pt, b.pt; name the file itself")
    broken = dict(tensors_5b)
    broken["proj_out.bias"] = torch.full_like(broken["proj_out.bias"], float("nan"))
    torch.save(broken, tmp_path / "nan.pt")
    refused("nan.pt", "'proj_out.bias' has infinite or undefined values")
    (tmp_path / "odd.json").write_text(json.dumps({"hidden_size": 3}))
    with pytest.raises(CheckpointError, match="odd.json: unknown option 'hidden_size'"):
        plan_import("worldplay-8b", tmp_path / "odd.json")


def test_a_missing_shard_and_a_missing_index_entry(
    plan_5b: Plan, tensors_5b: Tensors, tmp_path: Path
) -> None:
    torch.save(tensors_5b, tmp_path / "m.pt")
    import_base(plan_5b, tmp_path / "m.pt", tmp_path / "one", shard_bytes=50_000)
    folder = tmp_path / "one" / "transformer"
    next(folder.glob("*00002*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match="00002.*missing"):
        import_base(plan_5b, folder, tmp_path / "two")
    next(folder.glob("*.index.json")).write_text("{}")
    with pytest.raises(CheckpointError, match="not an index"):
        import_base(plan_5b, folder, tmp_path / "two")


def test_nothing_but_an_earlier_import_is_replaced(
    plan_5b: Plan, tensors_5b: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(tensors_5b, tmp_path / "m.pt")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="no earlier import"):
        import_base(plan_5b, tmp_path / "m.pt", tmp_path / "home")
    assert (tmp_path / "home" / "thesis.txt").exists()
    monkeypatch.setattr(importer.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(StorageError, match=r"needs 0\.0 GB"):
        import_base(plan_5b, tmp_path / "m.pt", tmp_path / "base")


def test_same_keys_raise_nothing(tmp_path: Path) -> None:
    check_published(tmp_path, {"a": (1,)}, {"a": (1,)}, tmp_path / "out")


# A process of its own: what earlier tests freed would hide what the import takes.
MEASURE = """
import sys
from pathlib import Path
from pipeline.worlds.importer import import_base, plan_import

base, config, source, out = sys.argv[1], *map(Path, sys.argv[2:])

def anonymous():  # what is no mapped file: memory that cannot be given back under pressure
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

plan = plan_import(base, config)
before, peaks = anonymous(), [0]
import_base(plan, source, out, progress=lambda _: peaks.append(anonymous() - before))
print(max(peaks))
"""


def peak_of_import(base: str, config: Path, source: Path, out: Path) -> int:
    """Largest growth of anonymous memory while a tensor is in hand, in bytes."""
    arguments = [sys.executable, "-c", MEASURE, base, *map(str, (config, source, out))]
    root = Path(__file__).parents[3]
    ran = subprocess.run(arguments, cwd=root, check=True, capture_output=True, text=True)
    return int(ran.stdout.split()[-1])


def wide_config(folder: Path, layers: int, width: int) -> Path:
    change = {"num_layers": layers, "num_attention_heads": width // 32}
    return config_file(folder, _meta(WorldPlayHunyuan, hunyuan_tiny.CONFIG | change))


def _meta(kind: Any, options: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return kind(**options)


def sparse_safetensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    """A published fp32 file of zeros that takes no room on the disk; returns its size."""
    from pipeline.worlds.shards import _header

    layout = {name: (torch.float32, shape) for name, shape in shapes.items()}
    size = sum(torch.Size(shape).numel() * 4 for shape in shapes.values())
    with path.open("wb") as handle:
        handle.write(_header(layout, list(layout)))
        handle.truncate(handle.tell() + size)
    return size


needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures by /proc")


@needs_proc
def test_import_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    """A safetensors file of 0.2 GB; its largest tensor is 14 MB."""
    config = wide_config(tmp_path, layers=2, width=768)
    source = tmp_path / "model.safetensors"
    size = sparse_safetensors(source, plan_import("worldplay-8b", config).published)
    peak = peak_of_import("worldplay-8b", config, source, tmp_path / "base")
    print(f"file {size / 1e6:.0f} MB, peak of anonymous memory {peak / 1e6:.0f} MB")
    assert size > 2e8
    assert 1e6 < peak < 60e6


@needs_proc
def test_a_pickled_envelope_is_mapped_not_read(tmp_path: Path) -> None:
    """An envelope of 0.2 GB; its largest tensor is 9 MB."""
    options = test_wan.CONFIG | {"num_attention_heads": 32, "ffn_dim": 3072, "num_layers": 2}
    config = config_file(tmp_path, _meta(WorldPlayWan, options))
    shapes = plan_import("worldplay-5b", config).published
    source = envelope(tmp_path / "model.pt", {name: torch.ones(shape) for name, shape in shapes.items()})
    size = source.stat().st_size
    peak = peak_of_import("worldplay-5b", config, source, tmp_path / "base")
    print(f"file {size / 1e6:.0f} MB, peak of anonymous memory {peak / 1e6:.0f} MB")
    assert size > 1.5e8
    assert 1e6 < peak < 60e6


@needs_proc
@pytest.mark.slow
def test_import_of_several_gigabytes(tmp_path: Path) -> None:
    """Seven blocks of full width."""
    config = wide_config(tmp_path, layers=7, width=2048)
    source = tmp_path / "model.safetensors"
    size = sparse_safetensors(source, plan_import("worldplay-8b", config).published)
    peak = peak_of_import("worldplay-8b", config, source, tmp_path / "base")
    print(f"file {size / 1e9:.2f} GB, peak of anonymous memory {peak / 1e6:.0f} MB")
    assert size > 4e9
    assert peak < 400e6
