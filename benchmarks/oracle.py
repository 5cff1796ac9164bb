"""What the oracle says where the truth is known: its floor, its calibration and its control rows.

Rooms come from the scorers' range of seeds, so nothing here touches the evaluation rooms. Prints one JSON object.

    python benchmarks/oracle.py --weights weights/mini --videos 24
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline import camera, flow
from pipeline.words import FAMILIES
from pipeline.worlds.mini import oracle
from pipeline.worlds.mini.clips import CLIP, STEP
from pipeline.worlds.mini.codec import PatchCodec
from pipeline.worlds.mini.load import load_mini
from pipeline.worlds.mini.regenerate import regenerate
from pipeline.worlds.mini.renderer import SPLITS, MiniScene, place_path, render
from pipeline.worlds.mini.text import encode_caption
from pipeline.worlds.wan_world import WanWorld

ACTIONS = 5


class Videos:
    """True renders of one compound an action, executed by given shares of its translation and rotation."""

    def __init__(
        self,
        count: int,
        translation: float = 1.0,
        rotation: float = 1.0,
        seed: int = 0,
        compounds: Sequence[int] = FAMILIES["translation_and_yaw"],
    ) -> None:
        rng = np.random.default_rng([seed, 77])
        step = camera.StepSize(
            max(translation, 1e-9) * STEP.translation, max(rotation, 1e-9) * STEP.rotation_deg
        )
        self.scenes: list[MiniScene] = []
        frames, labels, poses = [], [], []
        while len(self.scenes) < count:
            scene = MiniScene.make(int(rng.integers(*SPLITS["scorer"])))
            word = np.full(ACTIONS, compounds[len(self.scenes) % len(compounds)])
            path = camera.poses_from_labels(word, step)
            start = place_path(scene, rng, path)
            if start is not None:
                self.scenes.append(scene)
                poses.append(start @ path)
                frames.append(render(scene, start @ path))
                labels.append(np.concatenate([[0], word]))
        self.frames_BFHW3, self.labels_BF, self.poses_BF44 = (
            np.stack(frames),
            np.stack(labels),
            np.stack(poses),
        )

    def row(self, frames_BFHW3: NDArray[np.uint8] | None = None) -> dict[str, Any]:
        """Oracle summary of these videos, or of others (or their beginnings) that claim to be of the same rooms and
        actions.
        """
        frames = self.frames_BFHW3 if frames_BFHW3 is None else frames_BFHW3
        labels_BF = self.labels_BF[:, : frames.shape[1]]
        track = oracle.track(self.scenes, frames, self.poses_BF44[:, 0], labels_BF)
        hits = oracle.accuracy(track.labels_BF(), labels_BF)
        residual = track.residual_BF[:, 1:]
        relative = np.linalg.inv(track.c2w_BF44[:, :-1]) @ track.c2w_BF44[:, 1:]
        moved = np.linalg.norm(relative[..., :3, 3], axis=-1) / STEP.translation
        cosine = np.clip((np.trace(relative[..., :3, :3], axis1=-2, axis2=-1) - 1) / 2, -1, 1)
        turned = np.degrees(np.arccos(cosine)) / STEP.rotation_deg
        return {
            "joint": float(hits["joint"].mean()),
            "fine": float(hits["fine"].mean()),
            "failed": float(track.failed_BF[:, 1:].mean()),
            "residual_median": float(np.median(residual)),
            "residual_1_99": [float(q) for q in np.quantile(residual, [0.01, 0.99])],
            "translation_of_step": [float(q) for q in np.quantile(moved, [0.1, 0.5, 0.9])],
            "rotation_of_step": [float(q) for q in np.quantile(turned, [0.1, 0.5, 0.9])],
        }

    def repainted(self, world: WanWorld, level: int) -> NDArray[np.uint8]:
        """The first clip, noised to the sampler's level (0 is pure noise) and denoised by the base: soft and partly
        invented frames whose true motion is still the rendered one.
        """
        return regenerate(
            world,
            torch.from_numpy(self.frames_BFHW3[:, :CLIP]).float() / 255,
            self.labels_BF[:, :CLIP],
            self.poses_BF44[:, :CLIP],
            torch.stack([encode_caption(scene.caption) for scene in self.scenes]),
            flow.sigmas(world.spec.steps, world.spec.shift)[level:],
            torch.Generator().manual_seed(0),
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weights", type=Path, default=Path("weights/mini"))
    parser.add_argument("--videos", type=int, default=24)
    arguments = parser.parse_args()
    world = load_mini(arguments.weights)  # first: what is missing is said before minutes of fitting
    codec = PatchCodec.load(arguments.weights / "codec.safetensors")
    true = Videos(arguments.videos)
    coded = np.stack([codec.decode(codec.encode(video))[0] for video in true.frames_BFHW3])
    static = np.repeat(true.frames_BFHW3[:, :1], ACTIONS + 1, axis=1)
    other = np.roll(true.frames_BFHW3, 1, axis=0)
    other[:, 0] = true.frames_BFHW3[:, 0]
    rows = {"true render": true.row(), "through the codec": true.row(coded), "static video": true.row(static)}
    rows["another room"] = true.row(other)
    for share in (0.0, 0.25, 0.5, 0.75, 1.25):
        rows[f"{share:.0%} of the step"] = Videos(arguments.videos, share, share).row()
    rows["translation only"] = Videos(arguments.videos, 1.0, 0.0).row()
    rows["rotation only"] = Videos(arguments.videos, 0.0, 1.0).row()
    sigmas = flow.sigmas(world.spec.steps, world.spec.shift)
    for family in ("translation_and_yaw", "translation_and_pitch"):
        videos = Videos(arguments.videos, compounds=FAMILIES[family])
        for level in (3, 4):  # above them the base moves as it likes
            name = f"repainted from sigma {float(sigmas[level]):.2f}, {family.replace('_', ' ')}"
            rows[name] = videos.row(videos.repainted(world, level))
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
