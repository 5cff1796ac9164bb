"""The frame codec: fitted on few rooms it must carry rooms it has never seen, and survive the disk."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pipeline.errors import CheckpointError
from pipeline.worlds.mini.codec import GRID_H, GRID_W, PatchCodec
from pipeline.worlds.mini.renderer import HEIGHT, SPLITS, WIDTH, MiniScene, render, start_poses


def views(split: str, rooms: int) -> np.ndarray:
    frames = []
    for seed in range(SPLITS[split][0], SPLITS[split][0] + rooms):
        scene = MiniScene.make(seed)
        poses = start_poses(scene, np.random.default_rng(seed), 24)
        frames.append(render(scene, poses[scene.clear(poses[:, :3, 3])][:3]))
    return np.concatenate(frames)


@pytest.fixture(scope="module")
def fitted() -> tuple[PatchCodec, np.ndarray]:
    frames = views("pretrain", 50)
    return PatchCodec.fit(frames, 24), frames


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    return float(10 * np.log10(255**2 / max(1e-9, np.mean((a.astype(float) - b) ** 2))))


def test_held_out_rooms_come_back(fitted: tuple[PatchCodec, np.ndarray]) -> None:
    codec, _ = fitted
    frames = views("evaluation", 12)
    latents = codec.encode(frames)
    assert latents.shape == (24, len(frames), GRID_H, GRID_W)
    assert latents.dtype == torch.float32
    decoded, state = codec.decode(latents)
    assert (decoded.shape, decoded.dtype, state) == ((len(frames), HEIGHT, WIDTH, 3), np.uint8, None)
    assert psnr(decoded, frames) > 28


def test_more_channels_lose_less(fitted: tuple[PatchCodec, np.ndarray]) -> None:
    frames = fitted[1]
    losses = [
        psnr(codec.decode(codec.encode(frames))[0], frames)
        for codec in (PatchCodec.fit(frames, c) for c in (4, 12, 192))
    ]
    assert losses == sorted(losses)
    assert losses[-1] > 50  # all 192 components: only rounding is lost


def test_latents_have_unit_mean_square_and_the_strongest_come_first(
    fitted: tuple[PatchCodec, np.ndarray],
) -> None:
    codec, frames = fitted
    latents = codec.encode(frames)
    assert latents.square().mean().item() == pytest.approx(1, rel=1e-3)
    std = latents.std((1, 2, 3))
    assert (std[:-1] >= std[1:] - 1e-4).all()
    np.testing.assert_allclose(codec.basis @ codec.basis.T, np.eye(24), atol=1e-5)


def test_a_frame_is_coded_alone_and_fitting_is_deterministic(fitted: tuple[PatchCodec, np.ndarray]) -> None:
    codec, frames = fitted
    latents = codec.encode(frames[:4])
    torch.testing.assert_close(codec.encode(frames[2:3])[:, 0], latents[:, 2], atol=1e-5, rtol=0)
    np.testing.assert_array_equal(codec.decode(latents[:, 2:3])[0][0], codec.decode(latents)[0][2])
    torch.testing.assert_close(codec.encode_float(torch.from_numpy(frames[:4]).float() / 255), latents)
    again = PatchCodec.fit(frames, 24)
    assert torch.equal(again.basis, codec.basis)


def test_wild_latents_are_clamped_to_colours(fitted: tuple[PatchCodec, np.ndarray]) -> None:
    for value in (1e4, -1e4):
        frames, _ = fitted[0].decode(torch.full((24, 1, GRID_H, GRID_W), value))
        assert frames.min() == 0
        assert frames.max() == 255  # clamped to both ends, not wrapped round


def test_save_and_load(fitted: tuple[PatchCodec, np.ndarray], tmp_path: Path) -> None:
    codec, frames = fitted
    codec.save(tmp_path / "codec.safetensors")
    loaded = PatchCodec.load(tmp_path / "codec.safetensors")
    assert loaded.channels == 24
    assert torch.equal(loaded.encode(frames[:2]), codec.encode(frames[:2]))


@pytest.mark.parametrize("damage", ["missing", "cut", "garbage", "foreign"])
def test_a_damaged_file_is_named(fitted: tuple[PatchCodec, np.ndarray], tmp_path: Path, damage: str) -> None:
    path = tmp_path / "codec.safetensors"
    fitted[0].save(path)
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "garbage":
        path.write_bytes(b"not safetensors at all" * 10)
    else:
        save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(CheckpointError, match=r"codec\.safetensors: .*wcpipe pretrain"):
        PatchCodec.load(path)
