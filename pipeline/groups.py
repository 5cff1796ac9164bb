"""What a stored group holds (prefix, candidates), and how later stages get its past back from disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline.camera import clip_frames, frame_labels, frames_of_latents
from pipeline.stores import ArraySpec, GroupStore

if TYPE_CHECKING:
    import torch

    from pipeline.worlds.base import ClipCondition, Scene, WorldSpec


FIRST_LATENT = "first_latent"


def scene_tensors(scene: Scene, spec: WorldSpec) -> dict[str, torch.Tensor]:
    """What of a scene is stored with its group besides the history: text, extras, negative; see `prefix_arrays`."""
    own = {FIRST_LATENT: scene.first_latent_CHW.float()} if spec.condition_latent else {}
    return own | scene.tensors()


def prefix_arrays(spec: WorldSpec, clip: int, scene: Scene, latents: str) -> list[ArraySpec]:
    """Arrays of `prefixes.zarr` for target clip `clip` (from 1); all scenes of a store have the shapes of `scene`.

    latents       [C, T, h, w], T = max(1, 4(clip-1)); latent 0 is the conditioning latent
    frames        the prefix decoded, uint8 [1 + stride (T-1), H, W, 3]
    first_frame   the true first frame, uint8 [H, W, 3]
    text          [L, D]
    extra.<name>  further embeddings of the scene, and negative.text, negative.extra.<name> where it is guided
    first_latent  float32 [C, h, w], where it is not latent 0 of the video (8B)
    labels, c2w   of all 4 clip latents, target included: int64 [T'], float64 [T', 4, 4], camera-to-world
    K             normalised intrinsics, float64 [3, 3]
    """
    channels, height, width = spec.latent_shape
    past = max(1, spec.clip_latents * (clip - 1))
    total = spec.clip_latents * clip
    return [
        ArraySpec("latents", (channels, past, height, width), latents),
        ArraySpec("frames", (frames_of_latents(past, spec.stride), *spec.frame_size, 3), "uint8"),
        ArraySpec("first_frame", (*spec.frame_size, 3), "uint8"),
        *(
            ArraySpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in scene_tensors(scene, spec).items()
        ),
        ArraySpec("labels", (total,), "int64"),
        ArraySpec("c2w", (total, 4, 4), "float64"),
        ArraySpec("K", (3, 3), "float64"),
    ]


def rollout_arrays(spec: WorldSpec, clip: int, candidates: int, latents: str) -> list[ArraySpec]:
    """Arrays of `rollouts.zarr`, one chunk a candidate: `latents` [G, C, 4, h, w] (x0 of the target clip) and
    `frames` uint8 [G, F, H, W, 3] (what the clip adds to the video; `camera.clip_frames`).
    """
    channels, height, width = spec.latent_shape
    frames = (
        frames_of_latents(spec.clip_latents, spec.stride) if clip == 1 else spec.stride * spec.clip_latents
    )
    shape = (candidates, channels, spec.clip_latents, height, width)
    return [
        ArraySpec("latents", shape, latents, per_candidate=True),
        ArraySpec("frames", (candidates, frames, *spec.frame_size, 3), "uint8", per_candidate=True),
    ]


@dataclass(frozen=True)
class Past:
    """All that sampling and training need to know about one group besides its candidates."""

    scene: Scene
    latents_CTHW: torch.Tensor  # float32, the history of the target clip
    labels_T: NDArray[np.int64]
    c2w_T44: NDArray[np.float64]
    condition: ClipCondition
    clip: int


def read_past(store: GroupStore, index: int) -> Past:
    """The past of group `index`, read from `prefixes.zarr`. Raises DataError when it is missing or damaged."""
    from pipeline.worlds.base import ClipCondition, Scene

    record = store.record(index)
    latents_CTHW = store.read_tensor(index, "latents").float()
    labels_T, c2w_T44 = store.read(index, "labels"), store.read(index, "c2w")
    parts = ("text", "extra.", "negative.", FIRST_LATENT)
    stored = {name: store.read_tensor(index, name) for name in store.specs if name.startswith(parts)}
    return Past(
        scene=Scene.from_tensors(stored, stored.get(FIRST_LATENT, latents_CTHW[:, 0]), record["scene"]),
        latents_CTHW=latents_CTHW,
        labels_T=labels_T,
        c2w_T44=c2w_T44,
        condition=ClipCondition.of(labels_T, c2w_T44, store.read(index, "K")),
        clip=int(record["target_clip"]),
    )


def scored_frames(
    prefix_FHW3: NDArray[np.uint8], frames_GFHW3: NDArray[np.uint8], clip: int
) -> NDArray[np.uint8]:
    """What is measured: the clip's frames with the one frame before it, uint8 [G, 1 + new frames, H, W, 3].

    The first clip holds that frame already. Frame f >= 1 is then the first, second, … frame that an action made.
    """
    if clip == 1:
        return frames_GFHW3
    before = np.broadcast_to(prefix_FHW3[-1], (len(frames_GFHW3), 1, *prefix_FHW3.shape[1:]))
    return np.concatenate([before, frames_GFHW3], axis=1)


def scored_labels(labels_T: NDArray[np.int64], clip: int, latents: int, stride: int) -> NDArray[np.int64]:
    """Commanded label of each frame that `scored_frames` returns, [1 + new frames]; its first frame has none (0)."""
    at = clip_frames(clip - 1, stride, latents)
    labels = frame_labels(labels_T, stride)[max(0, at.start - 1) : at.stop]
    return np.concatenate([np.zeros(1, np.int64), labels[1:]])
