"""Frame codecs on tiny random autoencoders: a stream equals the whole and the stock decoder, scale, local attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15, AutoencoderKLWan
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import CheckpointError, DataError
from pipeline.worlds.codecs import FrameLocalAttention, HunyuanCodec, WanCodec
from tests.pipeline.worlds.tiny_codecs import hunyuan_vae, wan_vae

Codec = WanCodec | HunyuanCodec


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Codec]:
    folder = tmp_path_factory.mktemp("vae")
    return {
        "wan": WanCodec(wan_vae(folder / "wan")),
        "hunyuan": HunyuanCodec(hunyuan_vae(folder / "hunyuan")),
    }


def latents(codec: Codec, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(codec.channels, count, 2, 3, generator=torch.Generator().manual_seed(seed))


def stock(codec: Codec, z_CTHW: torch.Tensor) -> torch.Tensor:
    """The whole video through diffusers' own `decode`, [F, H, W, 3] in [-1, 1]."""
    with torch.no_grad():
        return codec.vae.decode(codec._plain(z_CTHW[None])).sample[0].clamp(-1, 1).permute(1, 2, 3, 0)


@pytest.mark.parametrize("kind", ["wan", "hunyuan"])
def test_sizes_come_from_the_config(codecs: dict[str, Codec], kind: str) -> None:
    codec = codecs[kind]
    assert (codec.channels, codec.stride, codec.spatial) == ({"wan": 4, "hunyuan": 8}[kind], 4, 16)


@pytest.mark.parametrize("kind", ["wan", "hunyuan"])
def test_streamed_frames_are_those_of_the_stock_decoder(codecs: dict[str, Codec], kind: str) -> None:
    codec, z = codecs[kind], latents(codecs[kind], 5)
    frames, _ = codec.decode(z)
    expected = stock(codec, z)
    assert frames.shape == (17, 32, 48, 3) == tuple(expected.shape)
    assert frames.std() > 20  # pictures, not one colour
    wrong = np.abs(frames.astype(int) - ((expected + 1) * 127.5).round().numpy()).max()
    assert wrong <= 1, wrong  # a rounding of a half


@settings(max_examples=12, deadline=None)
@given(cut=st.integers(1, 5), then=st.integers(1, 5))
@pytest.mark.parametrize("kind", ["wan", "hunyuan"])
def test_clip_by_clip_equals_the_whole(codecs: dict[str, Codec], kind: str, cut: int, then: int) -> None:
    codec, z = codecs[kind], latents(codecs[kind], cut + then)
    whole, _ = codec.decode(z)
    first, state = codec.decode(z[:, :cut])
    second, _ = codec.decode(z[:, cut:], state)
    assert (len(first), len(second)) == (1 + 4 * (cut - 1), 4 * then)
    assert np.array_equal(np.concatenate([first, second]), whole)


@pytest.mark.parametrize("kind", ["wan", "hunyuan"])
def test_candidates_share_one_state_which_matters_and_is_never_changed(
    codecs: dict[str, Codec], kind: str
) -> None:
    codec = codecs[kind]
    _, state = codec.decode(latents(codec, 2))
    _, other = codec.decode(latents(codec, 2, seed=1))
    a, b = latents(codec, 2, seed=2), latents(codec, 2, seed=3)
    first = codec.decode(a, state)[0]
    codec.decode(b, state)
    assert np.array_equal(codec.decode(a, state)[0], first)
    assert not np.array_equal(codec.decode(a, other)[0], first)


@pytest.mark.parametrize("kind", ["wan", "hunyuan"])
def test_encoding_normalises_and_inverts_the_scale_of_decoding(codecs: dict[str, Codec], kind: str) -> None:
    codec = codecs[kind]
    frames = np.random.default_rng(0).integers(0, 256, (5, 32, 48, 3), dtype=np.uint8)
    z = codec.encode(frames)
    assert z.shape == (codec.channels, 2, 2, 3)
    assert z.dtype == torch.float32
    x = torch.from_numpy(frames).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
    with torch.no_grad():
        mode = codec.vae.encode(x).latent_dist.mode()
    torch.testing.assert_close(codec._plain(z[None]), mode)
    if kind == "wan":
        torch.testing.assert_close(z[1, 1], (mode[0, 1, 1] - 0.1) / 1.1)
    else:
        torch.testing.assert_close(z, mode[0] * 1.03682)
    with pytest.raises(DataError, match="4 frames"):
        codec.encode(frames[:4])


def test_attention_of_the_8b_is_frame_local(codecs: dict[str, Codec], tmp_path: Path) -> None:
    """Multi-frame encode and decode differ from stock attention, which sees earlier frames; single frames agree."""
    codec = codecs["hunyuan"]
    vae = AutoencoderKLHunyuanVideo15.from_pretrained(codec.folder)
    local = [m for m in codec.vae.modules() if isinstance(m, FrameLocalAttention)]
    assert len(local) == 2
    with torch.no_grad():
        for module in (*local, *(m for m in vae.modules() if hasattr(m, "to_q"))):
            module.to_q.weight.mul_(8)  # attention that is nearly uniform would hide the difference
        z = latents(codec, 3)
        plain = codec._plain(z[None])
        ours, theirs = (v.decode(plain).sample for v in (codec.vae, vae))
        assert (ours - theirs)[:, :, 1:].abs().max() > 0.02
        torch.testing.assert_close(ours[:, :, :1], theirs[:, :, :1], rtol=1e-4, atol=1e-4)
        x = torch.randn(1, 3, 9, 32, 48)
        ours, theirs = (v.encode(x).latent_dist.mode() for v in (codec.vae, vae))
        assert (ours - theirs)[:, :, 1:].abs().max() > 0.02
        torch.testing.assert_close(ours[:, :, :1], theirs[:, :, :1], rtol=1e-4, atol=1e-4)
        one = local[0]
        frames = torch.randn(2, one.in_channels, 3, 2, 3)
        apart = torch.cat([one(frames[:, :, i : i + 1]) for i in range(3)], dim=2)
        torch.testing.assert_close(one(frames), apart)
        for module in local:
            module.to_q.weight.div_(8)


def test_weights_are_read_at_first_use_and_strictly(tmp_path: Path) -> None:
    folder = wan_vae(tmp_path / "vae")
    next(folder.glob("*.safetensors")).unlink()
    codec = WanCodec(folder)
    assert codec.channels == 4
    with pytest.raises(CheckpointError, match="no \\*.safetensors"):
        codec.decode(latents(codec, 1))
    with pytest.raises(CheckpointError, match=r"config.json: missing"):
        HunyuanCodec(tmp_path)
    with pytest.raises(CheckpointError, match="unknown option 'attn_scales'"):
        HunyuanCodec(folder)


@pytest.mark.parametrize("change", [{"temperal_downsample": [False, False, True]}, {"latents_mean": [0.0]}])
def test_a_foreign_wan_codec_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    config = dict(AutoencoderKLWan.load_config(wan_vae(tmp_path / "vae"))) | change
    AutoencoderKLWan(**{k: v for k, v in config.items() if not k.startswith("_")}).save_config(
        tmp_path / "bad"
    )
    with pytest.raises(CheckpointError, match="take the base's own vae"):
        WanCodec(tmp_path / "bad")
