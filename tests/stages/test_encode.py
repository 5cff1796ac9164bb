"""`wcpipe encode` and what comes of it: embeddings as the encoders give them, prompts, worlds opened from a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.errors import CheckpointError, ConfigError, DataError, WordError
from pipeline.groups import prefix_arrays, scene_tensors
from pipeline.scenes import load_image
from pipeline.stores import GroupStore, Shard
from pipeline.words import TrainingMix
from pipeline.worlds.encoders import open_encoders
from pipeline.worlds.hunyuan_world import HunyuanWorld
from pipeline.worlds.registry import copy_base, make_prompts, open_world, scene_of
from pipeline.worlds.scene_store import Scenes
from pipeline.worlds.wan_world import WanWorld
from pipeline.worlds.worldplay import guess_checkpoint, read_world
from stages.encode import run_encode
from tests.tiny_worlds import CAPTIONS, FRAME, Tiny, encode, import_base, make, materials

WORDS = TrainingMix(hold=(1, 3))


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tiny]:
    folder = tmp_path_factory.mktemp("tiny")
    return {name: make(name, folder / name) for name in FRAME}


@pytest.fixture(params=sorted(FRAME))
def tiny(worlds: dict[str, Tiny], request: pytest.FixtureRequest) -> Tiny:
    return worlds[request.param]


def test_sizes_of_a_world_come_from_its_folder(tiny: Tiny) -> None:
    world = open_world(tiny.name, tiny.base, truncate_timestep=True)
    five = tiny.name == "worldplay-5b"
    assert isinstance(world, WanWorld if five else HunyuanWorld)
    spec = world.spec
    assert spec.latent_shape == ((4, 2, 4) if five else (8, 2, 3))
    assert (spec.frame_size, spec.stride, spec.truncate_timestep) == (FRAME[tiny.name], 4, True)
    assert (spec.memory.budget, spec.memory.sink) == ((16, 0) if five else (20, 4))
    assert (spec.steps, spec.shift, spec.fps) == ((4, 8.0, 16) if five else (50, 5.0, 24))
    assert read_world(tiny.base).checkpoint == ("distilled" if five else "ar")


def test_a_scene_is_what_codec_and_encoders_give(tiny: Tiny) -> None:
    """Read back: the frame's latent, each caption's embeddings, the empty caption as negative with the same image."""
    world = open_world(tiny.name, tiny.base)
    scenes = Scenes.open(tiny.scenes, world.spec)
    assert len(scenes) == 3
    encoders = open_encoders(tiny.name, tiny.encoders, dtype=torch.bfloat16)
    encoders.prepare([*CAPTIONS, ""])
    for index, caption in enumerate(CAPTIONS):
        image = tiny.scenes_json.parent / "images" / f"{index}.png"
        frame = load_image(image, world.spec.frame_size)
        np.testing.assert_array_equal(scenes.first_frame(index), frame)
        scene = scenes.scene(index)
        torch.testing.assert_close(scene.first_latent_CHW, world.codec.encode(frame[None])[:, 0])
        found, expected = scene.tensors(), encoders.encode(caption, frame)
        empty = encoders.encode("", frame)
        assert {name for name in found if not name.startswith("negative.")} == set(expected)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)
            torch.testing.assert_close(found[f"negative.{name}"], empty[name])
        assert scenes.record(index)["caption"] == caption


def test_padding_is_only_padding(tiny: Tiny) -> None:
    """The 8B's masks say which tokens are real, whatever the longest caption of the store; the 5B has zeros behind."""
    encoders = open_encoders(tiny.name, tiny.encoders, dtype=torch.float32)
    caption = 'A "way out".'
    encoders.prepare([caption])
    short = encoders.encode(caption, None)
    encoders.prepare([caption, 'a much longer caption with "more text in it" than the first'])
    long = encoders.encode(caption, None)
    if tiny.name == "worldplay-5b":
        count = encoders.tokens(caption)["UMT5"][0]
        assert short["text"].shape == (512, 16)
        assert short["text"][:count].abs().sum(1).min() > 0
        assert not short["text"][count:].any()
        torch.testing.assert_close(short["text"], long["text"])
        return
    for part, mask in (("text", "extra.text_mask"), ("extra.byt5", "extra.byt5_mask")):
        assert len(long[part]) > len(short[part])
        assert long[mask].sum() == short[mask].sum() > 0
        torch.testing.assert_close(long[part][long[mask]], short[part][short[mask]], rtol=1e-4, atol=1e-5)


def test_prompts_are_pure_and_show_every_scene_in_turn(tiny: Tiny) -> None:
    world = open_world(tiny.name, tiny.base)
    scenes = Scenes.open(tiny.scenes, world.spec)
    prompts = make_prompts(scenes, "rl", range(9), 0, 7, WORDS)
    again = make_prompts(scenes, "rl", [4], 0, 7, WORDS)[0]
    assert prompts[4].scene_key == again.scene_key
    np.testing.assert_array_equal(prompts[4].c2w_T44, again.c2w_T44)
    for lap in range(3):
        assert {p.scene_key for p in prompts[3 * lap : 3 * lap + 3]} == {scenes.key(i) for i in range(3)}
    assert len({tuple(p.labels_A.tolist()) for p in prompts}) > 5
    assert prompts[0].c2w_T44.shape == (8, 4, 4)
    assert prompts[0].step.translation == 0.1
    guided, plain = scene_of(world, prompts[0], guided=True), scene_of(world, prompts[0])
    assert guided.negative is not None
    assert plain.negative is None
    with pytest.raises(ConfigError, match="no split 'evaluation'"):
        make_prompts(scenes, "evaluation", [0], 0, 7, WORDS)


def test_stored_groups_give_the_scene_back(tiny: Tiny, tmp_path: Path) -> None:
    """All embeddings, the negative and the 8B's condition latent survive the prefix store, in their own types."""
    from pipeline.groups import read_past
    from pipeline.stores import to_array

    world = open_world(tiny.name, tiny.base)
    prompt = make_prompts(Scenes.open(tiny.scenes, world.spec), "rl", [0], 0, 7, WORDS)[0]
    scene = scene_of(world, prompt, guided=True)
    arrays = prefix_arrays(world.spec, 2, scene, "float32")
    store = GroupStore.prepare(tmp_path / "p.zarr", kind="prefixes", arrays=arrays, keys=["g"], inputs={})
    values = {spec.name: np.zeros(spec.shape, spec.stored_dtype) for spec in store.specs.values()}
    values |= {
        name: to_array(tensor, store.specs[name].dtype)
        for name, tensor in scene_tensors(scene, world.spec).items()
    }
    values["latents"][:, 0] = 7  # the 8B generates latent 0: it is not the scene's
    values["K"], values["c2w"] = np.eye(3), np.tile(np.eye(4), (8, 1, 1))
    store.write(0, values, {"target_clip": 2, "scene": scene.key})
    past = read_past(store, 0)
    found, expected = past.scene.tensors(), scene.tensors()
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        torch.testing.assert_close(found[name], value)
    assert past.scene.negative is not None
    first = past.scene.first_latent_CHW
    if tiny.name == "worldplay-5b":
        assert (first == 7).all()
    else:
        torch.testing.assert_close(first, scene.first_latent_CHW)
        torch.testing.assert_close(past.scene.negative.first_latent_CHW, first)


def test_encoding_resumes_and_shards(worlds: dict[str, Tiny], tmp_path: Path) -> None:
    tiny = worlds["worldplay-5b"]
    assert encode(tiny)["made"] == 0
    given = (tiny.scenes_json, tiny.base, tiny.encoders, tmp_path / "parts.zarr")
    parts = [run_encode(*given, shard=Shard(i, 2)) for i in (1, 2)]
    assert [part["made"] for part in parts] == [2, 2]
    assert [part["missing"] for part in parts] == [2, 0]
    whole, split = (GroupStore.open(path).content_digest() for path in (tiny.scenes, tmp_path / "parts.zarr"))
    assert whole == split


def test_what_cannot_be_used_is_said_by_name(
    worlds: dict[str, Tiny], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = worlds["worldplay-5b"]
    entries = json.loads(tiny.scenes_json.read_text())
    poses = {
        str(i): {"extrinsic": np.eye(4).tolist(), "K": [[9.0 + i, 0, 5], [0, 9, 5], [0, 0, 1]]}
        for i in range(9)
    }
    (tmp_path / "zoom.json").write_text(json.dumps(poses))
    image = str(tiny.scenes_json.parent / entries[0]["image_path"])
    bad = [
        {"image_path": "gone.png", "caption": "x"},
        {"image_path": image, "caption": " "},
        {"image_path": image, "caption": "word " * 200},
        {"image_path": image, "caption": "x", "poses": "zoom.json"},
    ]
    (tmp_path / "list.json").write_text(json.dumps([{"image_path": image, "caption": "good"}, *bad]))
    out = tmp_path / "s.zarr"
    ran = run_encode(tmp_path / "list.json", tiny.base, tiny.encoders, out)
    assert (ran["scenes"], ran["left_out"], ran["made"]) == (1, 4, 2)
    listed = json.loads((tmp_path / "s.left-out.json").read_text())["left_out"]
    assert [one["index"] for one in listed] == [1, 2, 3, 4]
    for one, reason in zip(listed, ("missing", "empty", "UMT5 reads 512", "intrinsics change"), strict=True):
        assert reason in one["reason"]
        assert any(one["name"] in line and one["reason"] in line for line in caplog.messages)
    (tmp_path / "list.json").write_text(json.dumps([{"image_path": image, "caption": "good"}]))
    assert run_encode(tmp_path / "list.json", tiny.base, tiny.encoders, out)["made"] == 0
    assert not (tmp_path / "s.left-out.json").exists()


def test_a_scenes_own_actions(worlds: dict[str, Tiny], tmp_path: Path) -> None:
    """A word or a pose file beside the caption replaces the drawn word; too few actions are an error by name."""
    from pipeline.camera import WORLDPLAY_INTRINSICS, WORLDPLAY_STEP, pose_json_save, poses_from_labels

    tiny = worlds["worldplay-5b"]
    c2w = poses_from_labels([9, 9, 1], WORLDPLAY_STEP)
    pose_json_save(tmp_path / "path.json", c2w, WORLDPLAY_INTRINSICS)
    image = str(tiny.scenes_json.parent / "images/0.png")
    entries = [
        {"image_path": image, "caption": "x", "word": "w-2, right-1"},
        {"image_path": image, "caption": "x", "poses": "path.json"},
    ]
    (tmp_path / "list.json").write_text(json.dumps(entries))
    run_encode(tmp_path / "list.json", tiny.base, tiny.encoders, tmp_path / "s.zarr")
    world = open_world(tiny.name, tiny.base)
    scenes = Scenes.open(tmp_path / "s.zarr", world.spec)
    word, path = (scenes.path(index, 0, 0, 3, WORDS) for index in (0, 1))
    assert word[0].tolist() == path[0].tolist() == [9, 9, 1]
    np.testing.assert_allclose(path[1], c2w, atol=1e-9)
    assert word[1][1, 2, 3] == pytest.approx(0.1)
    with pytest.raises(WordError, match="has 3 actions of its own, the target clip needs 7"):
        scenes.path(0, 0, 0, 7, WORDS)


def test_wrong_folders_are_named(worlds: dict[str, Tiny], tmp_path: Path) -> None:
    five, eight = worlds["worldplay-5b"], worlds["worldplay-8b"]
    with pytest.raises(CheckpointError, match="is 'worldplay-8b', not worldplay-5b"):
        open_world("worldplay-5b", eight.base)
    with pytest.raises(CheckpointError, match="text_encoder_2: missing"):
        run_encode(eight.scenes_json, eight.base, five.encoders, tmp_path / "s.zarr")
    with pytest.raises(DataError, match="encoded for another base or frame size"):
        Scenes.open(five.scenes, open_world(eight.name, eight.base).spec)
    with pytest.raises(
        CheckpointError, match=r"world.json: is missing; make the folder with `wcpipe import`"
    ):
        copy_base("worldplay-5b", tmp_path, tmp_path / "copy")


@pytest.mark.parametrize("lost", ["vae/config.json", "vae/diffusion_pytorch_model.safetensors", "world.json"])
def test_a_base_that_lacks_a_part_is_an_error_with_its_name(
    worlds: dict[str, Tiny], tmp_path: Path, lost: str
) -> None:
    base = tmp_path / "base"
    copy_base("worldplay-5b", worlds["worldplay-5b"].base, base)
    (base / lost).unlink()
    with pytest.raises(CheckpointError, match="vae|world.json"):
        open_world("worldplay-5b", base).decode(torch.zeros(4, 1, 2, 4))


def test_encoders_must_be_complete(tmp_path: Path) -> None:
    """transformers would fill a weight that is not there with random numbers."""
    from safetensors.torch import load_file, save_file

    from tests.pipeline.worlds.tiny_encoders import wan_encoders

    folder = wan_encoders(tmp_path)
    path = folder / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    lost = next(name for name in tensors if "DenseReluDense.wi" in name)
    save_file({name: value for name, value in tensors.items() if name != lost}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match="is missing or of another shape"):
        open_encoders("worldplay-5b", folder)


def test_import_checks_the_codec_and_says_what_it_made(tmp_path: Path) -> None:
    tiny = materials("worldplay-8b", tmp_path)
    assert import_base(tiny)["checkpoint"] == "ar"
    other = materials("worldplay-5b", tmp_path / "other")
    with pytest.raises(CheckpointError, match="unknown option"):
        import_base(Tiny(**{**vars(tiny), "vae": other.vae}))
    (tiny.vae / "diffusion_pytorch_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="truncated"):
        import_base(tiny)
    assert (tiny.base / "vae" / "config.json").exists()  # what was there stays


@pytest.mark.parametrize(
    ("world", "source", "checkpoint"),
    [
        ("worldplay-5b", "anything/model.pt", "distilled"),
        ("worldplay-8b", "HY/ar_model/diffusion_pytorch_model.safetensors", "ar"),
        ("worldplay-8b", "HY/ar_rl_model", "ar-rl"),
        ("worldplay-8b", "HY/ar_distilled_action_model/model.safetensors", "ar-distilled"),
        ("worldplay-8b", "HY/bidirectional_model", "unknown"),
    ],
)
def test_the_checkpoint_is_known_by_its_published_folder(world: str, source: str, checkpoint: str) -> None:
    assert guess_checkpoint(world, Path(source)) == checkpoint


@pytest.mark.parametrize(
    ("sections", "match"),
    [
        ({"world": {"name": "worldplay-5b"}}, "world.base is 'shipped', but .* needs imported"),
        ({"world": {"base": "imported"}}, "needs shipped or pretrain"),
        ({"world": {"name": "worldplay-8b", "base": "imported"}}, "world.scenes is ''"),
        ({"world": {"scenes": "s.zarr"}}, "makes its own scenes"),
        ({"sampler": {"cfg": 6.0}}, "sampler.cfg is 6"),
        ({"world": {"step": {"rotation_deg": 3.0}}}, "world.step is for published worlds"),
        ({"world": {"step": {"rotation_deg": 0}}}, "world.step.rotation_deg is 0"),
        ({"world": {"name": "worldplay-9b"}}, "world.name is"),
    ],
)
def test_parameters_of_worlds_are_checked_when_read(sections: dict[str, Any], match: str) -> None:
    from pipeline.config import Params

    with pytest.raises(ConfigError, match=match):
        Params.model_validate_strict(sections)


def test_guided_candidates_cost_twice_and_need_a_negative(worlds: dict[str, Tiny]) -> None:
    """Both worlds, first clip and a later one: scale 1 is no guidance, above it the negative has its own context."""
    from pipeline import rollout
    from pipeline.worlds.base import ClipCondition

    for tiny in worlds.values():
        world = open_world(tiny.name, tiny.base)
        prompt = make_prompts(Scenes.open(tiny.scenes, world.spec), "rl", [0], 0, 7, WORDS)[0]
        scene = scene_of(world, prompt, guided=True)
        labels = np.concatenate([[0], prompt.labels_A])
        condition = ClipCondition.of(labels, prompt.c2w_T44, prompt.K_33)
        found = {}
        for cfg in (1.0, 3.0):
            sampling = rollout.Sampling(steps=2, shift=5.0, seed=0, epoch=1, cfg=cfg)
            world.forwards.reset()
            given = (world, scene, condition, prompt.c2w_T44, 2, sampling, "g")
            prefix = rollout.sample_prefix(*given)
            found[cfg] = rollout.sample_candidates(
                world, scene, prefix, condition, prompt.c2w_T44, 2, 3, sampling, "g"
            )
            times = 1 if cfg == 1 else 2
            assert (world.forwards.denoiser, world.forwards.context) == (times * 2 * (1 + 3), times)
        assert not torch.allclose(found[1.0], found[3.0], atol=1e-3)
        with pytest.raises(DataError, match="has no negative text"):
            rollout.sample_prefix(world, scene_of(world, prompt), condition, prompt.c2w_T44, 2, sampling, "g")


def test_evaluation_of_a_published_world_is_refused(worlds: dict[str, Tiny], tmp_path: Path) -> None:
    from pipeline.config import Params
    from stages.evaluate import run_evaluate

    tiny = worlds["worldplay-5b"]
    world = {"name": tiny.name, "base": "imported", "weights": str(tiny.base), "scenes": str(tiny.scenes)}
    with pytest.raises(ConfigError, match="only the mini world has"):
        run_evaluate(Params.model_validate_strict({"world": world}), "e000", tmp_path)


def test_published_worlds_take_the_gpu_of_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.worlds.registry import default_device

    assert default_device("worldplay-8b") == ("cuda:0" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "6")
    assert default_device("worldplay-8b") == "cuda:2"
    assert default_device("mini") == "cpu"


def test_words_that_close_run_on_scenes_too(worlds: dict[str, Tiny]) -> None:
    """Retracing cycles need poses alone, no room: the scene keeps its image and gets the cycle's word."""
    from pipeline.config import Params
    from pipeline.plan import plan_of
    from pipeline.worlds.closed_prompts import make_closed_prompts

    tiny = worlds["worldplay-5b"]
    spec = open_world(tiny.name, tiny.base).spec
    scenes = Scenes.open(tiny.scenes, spec)
    world = {"name": tiny.name, "base": "imported", "weights": str(tiny.base), "scenes": str(tiny.scenes)}
    params = Params.model_validate_strict({"world": world, "cycle": {"words": "retracing"}})
    plan = plan_of(params, 1)
    closed = make_closed_prompts(scenes, "rl", range(3), 0, plan, params.cycle, params.words, spec)
    assert {one.prompt.scene_key for one in closed} == {scenes.key(i) for i in range(3)}
    for one in closed:
        assert len(one.prompt.c2w_T44) == plan.clip * spec.clip_latents
        assert one.prompt.scene is not None
