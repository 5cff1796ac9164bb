"""HPSv3 (package hpsv3 1.0.0): one unbounded score a frame, for a prompt; spec scorers, section 1.

What users of the package met, and what is done about it here: the order of arguments differs between its versions
(keywords only); it returns mean and spread (column 0 is the score); `reward` keeps gradients and runs out of memory
(inference mode, a bounded number of images a call); a prompt that holds the pooling token `<|Reward|>` breaks a whole
batch (it is removed); the shipped configuration cannot run on a CPU (float32 there); nothing may be fetched from a hub
(tokenizer, base and checkpoint are local folders).

Frames go in as they are: the package resizes each once, to about 200,704 pixels (PIL, bicubic). Resizing them here too
would resample them twice, since its rule is not idempotent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.scorers.worker.adapters.common import resolve_device, versions, weights_identity
from pipeline.scorers.worker.protocol import Item, Outcome

ADAPTER = 1
TOKEN = "<|Reward|>"
CHECKPOINT, BASE = "HPSv3.safetensors", "Qwen2-VL-7B-Instruct"
FILES = (CHECKPOINT, f"{BASE}/*.json")


def clean(prompt: str) -> str:
    """A prompt without the token at which the score is read: it must stand exactly once in a row."""
    while TOKEN in prompt:
        prompt = prompt.replace(TOKEN, "")
    return prompt.strip()


def write_config(folder: Path, base: Path, device: str) -> Path:
    """The package's own configuration with local weights, in float32 on a CPU."""
    import hpsv3
    from omegaconf import OmegaConf

    shipped = Path(str(hpsv3.__file__)).parent / "config" / "HPSv3_7B.yaml"
    config = OmegaConf.load(shipped)
    config.model_name_or_path = str(base.resolve())
    config.output_dir = str(folder)
    config.report_to = "none"
    if device == "cpu":
        config.bf16, config.torch_dtype, config.disable_flash_attn2 = False, "float32", True
    path = folder / "HPSv3_7B.yaml"
    OmegaConf.save(config, path)
    return path


class HPSv3:
    """Values of an item: `score` float64 (F,); with `about: {prompts: [...]}` one row a prompt, (P, F)."""

    def __init__(self, settings: dict[str, Any], device: str) -> None:
        from hpsv3.inference import HPSv3RewardInferencer

        self.device = resolve_device(device)
        folder, self.weights = weights_identity(settings, FILES)
        self.version = versions("hpsv3", ADAPTER)
        self.images = int(settings["images"])
        with TemporaryDirectory() as temporary:
            config = write_config(Path(temporary), folder / BASE, self.device)
            self.scorer = HPSv3RewardInferencer(
                config_path=str(config), checkpoint_path=str(folder / CHECKPOINT), device=self.device
            )

    def measure(self, items: Sequence[Item]) -> Iterator[Outcome]:
        for item in items:
            rows = [self._frames(item.video_FHW3, clean(prompt)) for prompt in item.about["prompts"]]
            yield {"score": np.stack(rows)}

    def _frames(self, video_FHW3: NDArray[np.uint8], prompt: str) -> NDArray[np.float64]:
        import torch
        from PIL import Image

        scores = []
        for start in range(0, len(video_FHW3), self.images):
            part = [Image.fromarray(frame) for frame in video_FHW3[start : start + self.images]]
            with torch.inference_mode():
                found = self.scorer.reward(image_paths=part, prompts=[prompt] * len(part))
            if tuple(found.shape) != (len(part), 2):
                raise ValueError(
                    f"hpsv3 returned {tuple(found.shape)} for {len(part)} images; (images, 2) is known"
                )
            scores.append(found[:, 0].double().cpu().numpy())
        return np.concatenate(scores)


def load(settings: dict[str, Any], device: str) -> HPSv3:
    return HPSv3(settings, device)
