"""Training clips of the mini world, with openly declared label noise.

Post-training can only mend a base that is *uncertain* about actions, as real bases are: the pose labels of their
training videos are noisy. Here the noise is a parameter. In a share of the clips a compound executes only its first or
only its second key, and a single key is ignored, while labels and conditioning poses stay the commanded ones. What is
executed is drawn once a clip, so the base learns a mixture of whole motions and the candidates of a group differ.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from pipeline import actions, camera
from pipeline.words import TrainingMix
from pipeline.worlds.base import MemoryRule
from pipeline.worlds.mini.config import LabelNoise
from pipeline.worlds.mini.renderer import (
    FOCAL,
    HEIGHT,
    SPLITS,
    WIDTH,
    MiniScene,
    SceneBatch,
    place_path,
    render_batch,
)
from pipeline.worlds.mini.text import encode_caption

CLIP = 4
STEP = camera.StepSize(translation=0.4, rotation_deg=6.0)
"""Motion of one action: about three pixels at 64 px, so that every action can be seen (spec worldcycle 6.1)."""
MEMORY = MemoryRule(budget=8, recent=4, sink=0)
INTRINSICS_33 = np.array([[FOCAL / WIDTH, 0, 0.5], [0, FOCAL / HEIGHT, 0.5], [0, 0, 1]])


@lru_cache(maxsize=1)
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """Return (executed[label, mode] for modes full/first/second/ignored, step transforms [81, 4, 4])."""
    executed = np.zeros((81, 4), np.int64)
    for label in range(81):
        keys = actions.keys_of(label)
        executed[label, 0] = label
        executed[label, 1] = actions.label_of(keys[:1]) if len(keys) > 1 else label
        executed[label, 2] = actions.label_of(keys[1:]) if len(keys) > 1 else label
        executed[label, 3] = 0 if len(keys) == 1 else label
    return executed, np.stack([camera.step_transform(label, STEP) for label in range(81)])


def paths(labels_BA: np.ndarray) -> np.ndarray:
    """Integrate labels to poses relative to the first: [B, A] -> [B, A + 1, 4, 4] (batched `poses_from_labels`)."""
    steps = _tables()[1][labels_BA]
    poses = [np.tile(np.eye(4), (len(labels_BA), 1, 1))]
    for action in range(labels_BA.shape[1]):
        poses.append(poses[-1] @ steps[:, action])
    return np.stack(poses, 1)


def execute(labels_BA: np.ndarray, noise: LabelNoise, rng: np.random.Generator) -> np.ndarray:
    """Return the labels that the camera really executes, drawn once a clip (actions 0..2 are clip 0, 3..6 clip 1)."""
    B, A = labels_BA.shape
    clip = (np.arange(A) + 1) // CLIP
    u_compound, u_single = rng.random((2, B, clip[-1] + 1))
    mode_compound = np.select(
        [
            u_compound < noise.compound_first_only,
            u_compound < noise.compound_first_only + noise.compound_second_only,
        ],
        [1, 2],
        0,
    )
    mode_single = np.where(u_single < noise.single_ignored, 3, 0)
    compound = actions.is_compound(labels_BA)
    return _tables()[0][labels_BA, np.where(compound, mode_compound[:, clip], mode_single[:, clip])]


@dataclass(frozen=True)
class ClipBatch:
    """A batch of clips as the world model sees them; context axis T = c latents, target axis T = 4.

    frames in [0, 1]; `w2c` relative to the first frame's camera; context fields are None for a word's first clip.
    """

    frames_BTHW3: torch.Tensor
    labels_BT: torch.Tensor
    w2c_BT44: torch.Tensor
    context_frames_BTHW3: torch.Tensor | None
    context_labels_BT: torch.Tensor | None
    context_w2c_BT44: torch.Tensor | None
    text_BLD: torch.Tensor


def _context(rng: np.random.Generator, batch: int, clip_index: int) -> np.ndarray:
    """Context latents [batch, c]: the last clip and, from the third clip on, one older clip.

    The older one is drawn at random and not by view overlap, so that the base copes with whatever the memory finds.
    """
    last = np.tile(np.arange(CLIP) + CLIP * (clip_index - 1), (batch, 1))
    if clip_index == 1:
        return last
    older = rng.integers(clip_index - 1, size=(batch, 1)) * CLIP + np.arange(CLIP)
    return np.concatenate([older, last], 1)


def sample_clips(
    rng: np.random.Generator,
    batch: int,
    clip_index: int,
    mix: TrainingMix,
    noise: LabelNoise,
    split: str = "pretrain",
) -> ClipBatch:
    """Draw `batch` words and rooms and render their clip `clip_index` (0-based) with the context of `_context`."""
    latents = CLIP * (clip_index + 1)
    scenes: list[MiniScene] = []
    labels, true_poses = np.zeros((batch, latents - 1), np.int64), np.zeros((batch, latents, 4, 4))
    while len(scenes) < batch:  # a word that fits nowhere in a room is drawn again
        scene = MiniScene.make(int(rng.integers(*SPLITS[split])))
        word = np.asarray(mix.sample(rng, latents - 1))[None]
        path = paths(execute(word, noise, rng))[0]
        start = place_path(scene, rng, path)
        if start is not None:
            labels[len(scenes)], true_poses[len(scenes)] = word[0], start @ path
            scenes.append(scene)
    commanded = paths(labels)
    w2c = torch.from_numpy(np.linalg.inv(commanded)).float()
    latent_labels = torch.from_numpy(np.concatenate([np.zeros((batch, 1), np.int64), labels], 1))
    text = torch.stack([encode_caption(scene.caption) for scene in scenes])
    stacked = SceneBatch.stack(scenes)
    target = np.arange(latents - CLIP, latents)
    if clip_index == 0:
        frames = render_batch(stacked, torch.from_numpy(true_poses[:, target]).float())
        return ClipBatch(frames, latent_labels[:, target], w2c[:, target], None, None, None, text)
    chosen = _context(rng, batch, clip_index)
    rows = np.arange(batch)[:, None]
    seen = np.concatenate([chosen, np.tile(target, (batch, 1))], 1)
    frames = render_batch(stacked, torch.from_numpy(true_poses[rows, seen]).float())
    context = chosen.shape[1]
    return ClipBatch(
        frames[:, context:],
        latent_labels[:, target],
        w2c[:, target],
        frames[:, :context],
        latent_labels[rows, chosen],
        w2c[rows, chosen],
        text,
    )
