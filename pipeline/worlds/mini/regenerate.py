"""Videos that the base has painted, of motions that are known.

A pose scorer that has seen only renders is nearly blind inside a group of generated candidates (docs/results.md). Real
footage is out of reach for it, the oracle must stay a judge; so true renders are noised to a level at which their
layout survives and denoised by the base, under the true labels and poses: frames with the base's softness and
inventions whose camera path is still the rendered one. The higher the level the more is the base's own.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline import flow
from pipeline.worlds.mini.clips import CLIP, INTRINSICS_33
from pipeline.worlds.wan_world import WanWorld


@torch.no_grad()
def regenerate(
    world: WanWorld,
    frames_BFHW3: torch.Tensor,
    labels_BF: NDArray[np.int64],
    c2w_BF44: NDArray[np.float64],
    text_BLD: torch.Tensor,
    sigmas: torch.Tensor,
    generator: torch.Generator,
) -> NDArray[np.uint8]:
    """Repaint one or two whole clips (F = 4 or 8 frames in [0, 1]) from sigmas[0] on; uint8, frame 0 only decoded.

    The second clip sees the repainted first one as its context, as in a rollout. `sigmas` end with 0.
    """
    B, F = frames_BFHW3.shape[:2]
    flat = world.codec.encode_float(frames_BFHW3.flatten(0, 1))  # type: ignore[attr-defined]
    x0 = flat.reshape(flat.shape[0], B, F, *flat.shape[2:]).transpose(0, 1)
    relative = np.linalg.inv(c2w_BF44[:, :1]) @ c2w_BF44
    w2c = torch.from_numpy(np.linalg.inv(relative)).float()
    labels = torch.from_numpy(labels_BF)
    K = torch.from_numpy(INTRINSICS_33).float().expand(B, CLIP, 3, 3)
    done: list[torch.Tensor] = []
    context = None
    for at in range(0, F, CLIP):
        part = slice(at, at + CLIP)
        given = {
            "labels_BT": labels[:, part],
            "w2c_BT44": w2c[:, part],
            "K_BT33": K,
            "text_BLD": text_BLD,
        }
        clean = x0[:, :, part]
        x = flow.add_noise(clean, torch.randn(clean.shape, generator=generator), float(sigmas[0]))
        with torch.autocast("cpu", torch.bfloat16):
            if at:
                context = world.model(
                    "context",
                    latents_BCTHW=done[-1],
                    timestep_BT=torch.full((B, CLIP), float(world.spec.context_timestep)),
                    **given | {"labels_BT": labels[:, :CLIP], "w2c_BT44": w2c[:, :CLIP]},
                )
            for sigma, below in zip(sigmas[:-1].tolist(), sigmas[1:].tolist(), strict=True):
                timestep = torch.full((B, CLIP), flow.TIMESTEPS * sigma)
                if not at:
                    x = torch.cat([clean[:, :, :1], x[:, :, 1:]], 2)
                    timestep[:, 0] = world.spec.context_timestep
                v = world.model(
                    "velocity",
                    latents_BCTHW=x,
                    timestep_BT=timestep,
                    rope_start=at,
                    context=context,
                    **given,
                )
                x = flow.euler_step(x, v.float(), sigma, below)
        done.append(x if at else torch.cat([clean[:, :, :1], x[:, :, 1:]], 2))
    latents = torch.cat(done, 2)
    return np.stack([world.decode(latents[b])[0] for b in range(B)])
