"""Which frame codec for the mini world: principal components of patches, or diffusers' AutoencoderTiny?

Both are fitted on rooms of the pretraining range and judged on rooms of the scorers' range, which no result is drawn
from: PSNR and time to decode, at the same grid of 8 x 5 cells. The learned codec is trained for a bounded time; what it
gains after that is not known here. Prints one JSON object.

    OMP_NUM_THREADS=1 python benchmarks/codec.py --channels 12 16 24 32 48 --tiny-steps 600
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderTiny
from numpy.typing import NDArray

from pipeline.worlds.mini.codec import PatchCodec
from pipeline.worlds.mini.renderer import SPLITS, MiniScene, render, start_poses

Frames = NDArray[np.uint8]


def frames(split: str, rooms: int, seed: int) -> Frames:
    """Up to 4 views of each of `rooms` rooms, uint8 [F, 40, 64, 3]."""
    views = []
    for room in range(SPLITS[split][0], SPLITS[split][0] + rooms):
        scene = MiniScene.make(room)
        poses = start_poses(scene, np.random.default_rng([seed, room]), 64)
        views.append(render(scene, poses[scene.clear(poses[:, :3, 3])][:4]))
    return np.concatenate(views)


def judge(decode: Callable[[], Frames], truth: Frames) -> dict[str, float]:
    """PSNR in dB (mean over frames) and decoding time in microseconds a frame (best of 5)."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        shown = decode()
        seconds.append(time.perf_counter() - start)
    error = ((shown.astype(np.float64) - truth) ** 2).mean((1, 2, 3))
    return {
        "psnr": round(float((10 * np.log10(255**2 / error)).mean()), 2),
        "decode_us": round(1e6 * min(seconds) / len(truth), 1),
    }


def train_tiny(views: Frames, channels: int, width: int, steps: int, seed: int) -> AutoencoderTiny:
    """A small AutoencoderTiny, three times down to the patch codec's grid, trained on the mean square error."""
    torch.manual_seed(seed)
    net = AutoencoderTiny(
        encoder_block_out_channels=(width,) * 4,
        decoder_block_out_channels=(width,) * 4,
        latent_channels=channels,
        num_encoder_blocks=(1, 1, 1, 1),
        num_decoder_blocks=(1, 1, 1, 1),
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    rng, data = np.random.default_rng(seed), torch.from_numpy(views).permute(0, 3, 1, 2)
    for _ in range(steps):
        batch = data[rng.integers(len(data), size=32)].float() / 255
        loss = (net.decode(net.encode(batch).latents).sample - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return net.eval()


@torch.inference_mode()
def main() -> None:
    """Fit, judge, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--channels", type=int, nargs="+", default=[12, 16, 24, 32, 48])
    parser.add_argument("--tiny-channels", type=int, nargs="*", default=[24])
    parser.add_argument("--tiny-width", type=int, default=32)
    parser.add_argument("--tiny-steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    views, truth = frames("pretrain", 600, options.seed), frames("scorer", 100, options.seed)
    rows: list[dict[str, Any]] = []
    for channels in options.channels:
        codec = PatchCodec.fit(views, channels)
        latents = codec.encode(truth)
        row = judge(lambda codec=codec, latents=latents: codec.decode(latents)[0], truth)  # type: ignore[misc]
        rows.append({"codec": "patch components", "channels": channels, **row})
    for channels in options.tiny_channels:
        with torch.inference_mode(False):
            start = time.perf_counter()
            net = train_tiny(views, channels, options.tiny_width, options.tiny_steps, options.seed)
            spent = time.perf_counter() - start
        code = net.encode(torch.from_numpy(truth).permute(0, 3, 1, 2).float() / 255).latents

        def decode(net: AutoencoderTiny = net, code: torch.Tensor = code) -> Frames:
            shown = net.decode(code).sample.clamp(0, 1).permute(0, 2, 3, 1)
            return (shown * 255).round().to(torch.uint8).numpy()

        rows.append(
            {
                "codec": "AutoencoderTiny",
                "channels": channels,
                "parameters": sum(p.numel() for p in net.parameters()),
                "train_seconds": round(spent),
                **judge(decode, truth),
            }
        )
    print(json.dumps({"frames": len(truth), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
