"""Text and image encoders of the published bases, run once over all scenes by `wcpipe encode` and never again.

5B: UMT5, 512 tokens, zeros behind a caption's last token (Wan's convention, without a mask). 8B: Qwen2.5-VL inside a
chat template whose tokens are cut off again, byT5 for text in quotation marks, SigLIP for the first frame. The 8B's
three are run by diffusers' own functions, so template, layer and crop are those of HunyuanVideo-1.5.

A folder of encoders is a diffusers pipeline: text_encoder, tokenizer (8B also: text_encoder_2, tokenizer_2,
image_encoder, feature_extractor). Nothing is downloaded. transformers fills weights that a folder lacks with random
numbers and goes on; here that is an error.
"""

from __future__ import annotations

import html
import inspect
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from pipeline.digests import digest_of, digest_tree
from pipeline.errors import CheckpointError, DataError

log = logging.getLogger("wcpipe.encode")

Shapes = dict[str, tuple[tuple[int, ...], str]]
UMT5_TOKENS = 512
QWEN_TOKENS = 1000
BYT5_TOKENS = 256
QWEN_TEMPLATE = 108  # tokens of the chat template before the caption, with Qwen's own tokenizer


class Encoders(Protocol):
    """Captions and first frames -> embeddings by the names of `Scene.tensors`, without batch axes."""

    def tokens(self, caption: str) -> dict[str, tuple[int, int]]:
        """Tokens of a caption and the most that are read, for each text encoder."""

    def prepare(self, captions: Sequence[str]) -> Shapes:
        """Fix the padding by the longest of these captions; returns name -> (shape, dtype) of `encode`."""

    def encode(self, caption: str, frame_HW3: np.ndarray | None) -> dict[str, torch.Tensor]:
        """Embeddings on the CPU. Without a frame (negative scenes) those of the image are zeros."""


def open_encoders(
    world: str, folder: Path, device: str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> Encoders:
    """Load a world's encoders in eval mode. Raises CheckpointError when one is missing, incomplete or damaged."""
    kind = WanEncoders if world == "worldplay-5b" else HunyuanEncoders
    missing = [part for part in kind.parts if not (folder / part).is_dir()]
    if missing:
        raise CheckpointError(
            f"{folder / missing[0]}: missing; --encoders needs a diffusers folder with {', '.join(kind.parts)}"
        )
    return kind(folder, device, dtype)


def encoders_digest(world: str, folder: Path) -> str:
    """Identity of a folder of encoders: all files of its parts. Raises DataError when one is missing."""
    kind = WanEncoders if world == "worldplay-5b" else HunyuanEncoders
    return digest_of([[part, digest_tree(folder / part)] for part in kind.parts])


def too_long(encoders: Encoders, caption: str) -> str | None:
    """Why a caption cannot be read whole, or None: what is cut off silently would not be what was written."""
    for name, (count, most) in encoders.tokens(caption).items():
        if count > most:
            return f"its caption has {count} tokens, {name} reads {most}: shorten it"
    return None


class WanEncoders:
    """UMT5 of Wan 2.2."""

    parts = ("text_encoder", "tokenizer")

    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        from transformers import UMT5EncoderModel

        self.tokenizer = _tokenizer(folder / "tokenizer")
        self.text_encoder = _network(UMT5EncoderModel, folder / "text_encoder", device, dtype)
        self.dtype = dtype

    def tokens(self, caption: str) -> dict[str, tuple[int, int]]:
        return {"UMT5": (len(self.tokenizer(_clean(caption)).input_ids), UMT5_TOKENS)}

    def prepare(self, captions: Sequence[str]) -> Shapes:
        return {"text": ((UMT5_TOKENS, self.text_encoder.config.d_model), _name(self.dtype))}

    @torch.no_grad()
    def encode(self, caption: str, frame_HW3: np.ndarray | None) -> dict[str, torch.Tensor]:
        given = self.tokenizer(_clean(caption), return_tensors="pt").to(self.text_encoder.device)
        text_LD = self.text_encoder(given.input_ids, given.attention_mask).last_hidden_state[0]
        return {"text": _padded(text_LD, UMT5_TOKENS).to("cpu", self.dtype)}


class HunyuanEncoders:
    """Qwen2.5-VL, byT5 and SigLIP of HunyuanVideo-1.5."""

    parts = (
        "text_encoder",
        "tokenizer",
        "text_encoder_2",
        "tokenizer_2",
        "image_encoder",
        "feature_extractor",
    )

    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        from transformers import (
            Qwen2_5_VLTextModel,
            SiglipImageProcessorPil,
            SiglipVisionModel,
            T5EncoderModel,
        )

        self.tokenizer = _tokenizer(folder / "tokenizer")
        self.tokenizer.padding_side = "right"  # the template is cut off at the left
        self.tokenizer_2 = _tokenizer(folder / "tokenizer_2")
        self.text_encoder = _network(Qwen2_5_VLTextModel, folder / "text_encoder", device, dtype)
        self.text_encoder_2 = _network(T5EncoderModel, folder / "text_encoder_2", device, dtype)
        self.image_encoder = _network(SiglipVisionModel, folder / "image_encoder", device, dtype)
        self.feature_extractor = SiglipImageProcessorPil.from_pretrained(
            folder / "feature_extractor", local_files_only=True
        )
        self.device, self.dtype = torch.device(device), dtype
        self.template = self._template_tokens()
        if self.template != QWEN_TEMPLATE:
            log.warning(
                "%s: the chat template has %d tokens before a caption, Qwen2.5-VL's has %d: this is another tokenizer",
                folder / "tokenizer",
                self.template,
                QWEN_TEMPLATE,
            )
        self._text_tokens = self._glyph_tokens = 0

    def tokens(self, caption: str) -> dict[str, tuple[int, int]]:
        return {
            "Qwen2.5-VL": (len(self._chat(caption)) - self.template, QWEN_TOKENS),
            "byT5": (self._glyphs(caption), BYT5_TOKENS),
        }

    def prepare(self, captions: Sequence[str]) -> Shapes:
        self._text_tokens = max(len(self._chat(caption)) - self.template for caption in captions)
        self._glyph_tokens = max(self._glyphs(caption) for caption in captions)
        kind = _name(self.dtype)
        shapes: Shapes = {
            "text": ((self._text_tokens, self.text_encoder.config.hidden_size), kind),
            "extra.text_mask": ((self._text_tokens,), "bool"),
        }
        if self._glyph_tokens:
            shapes["extra.byt5"] = ((self._glyph_tokens, self.text_encoder_2.config.d_model), kind)
            shapes["extra.byt5_mask"] = ((self._glyph_tokens,), "bool")
        vision = self.image_encoder.config
        patches = (vision.image_size // vision.patch_size) ** 2
        return shapes | {"extra.vision": ((patches, vision.hidden_size), kind)}

    @torch.no_grad()
    def encode(self, caption: str, frame_HW3: np.ndarray | None) -> dict[str, torch.Tensor]:
        pipeline, device = _hunyuan_pipeline(), self.device
        text, mask = pipeline._get_mllm_prompt_embeds(
            self.text_encoder,
            self.tokenizer,
            caption,
            device,
            tokenizer_max_length=self._text_tokens,
            crop_start=self.template,
        )
        found = {"text": text[0], "extra.text_mask": mask[0].bool()}
        if self._glyph_tokens:
            glyphs, glyph_mask = pipeline._get_byt5_prompt_embeds(
                self.tokenizer_2,
                self.text_encoder_2,
                caption,
                device,
                tokenizer_max_length=self._glyph_tokens,
            )
            found |= {"extra.byt5": glyphs[0], "extra.byt5_mask": glyph_mask[0].bool()}
        if frame_HW3 is None:
            vision = self.image_encoder.config
            patches = (vision.image_size // vision.patch_size) ** 2
            found["extra.vision"] = torch.zeros(patches, vision.hidden_size)
        else:
            found["extra.vision"] = self._image(frame_HW3)
        return {
            name: value.to("cpu", torch.bool if name.endswith("_mask") else self.dtype)
            for name, value in found.items()
        }

    def _image(self, frame_HW3: np.ndarray) -> torch.Tensor:
        from PIL import Image

        embeds = _hunyuan_pipeline()._get_image_embeds(
            self.image_encoder, self.feature_extractor, Image.fromarray(frame_HW3), self.device
        )
        return embeds[0]

    def _chat(self, caption: str) -> list[int]:
        """Token ids of a caption inside the chat template."""
        from diffusers.pipelines.hunyuan_video1_5 import pipeline_hunyuan_video1_5_image2video as module

        function = _hunyuan_pipeline()._get_mllm_prompt_embeds
        system = inspect.signature(function).parameters["system_message"].default
        chat = module.format_text_input([caption], system)
        given = self.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return list(given["input_ids"][0])

    def _template_tokens(self) -> int:
        """Tokens before a caption: what two different captions have in common from the start."""
        one, other = self._chat("a"), self._chat("7")
        return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)

    def _glyphs(self, caption: str) -> int:
        """Tokens of the text in quotation marks; 0 without any."""
        from diffusers.pipelines.hunyuan_video1_5 import pipeline_hunyuan_video1_5_image2video as module

        text = module.extract_glyph_texts(caption)
        return 0 if text is None else len(self.tokenizer_2(text).input_ids)


def _hunyuan_pipeline() -> Any:
    from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5_image2video import (
        HunyuanVideo15ImageToVideoPipeline,
    )

    return HunyuanVideo15ImageToVideoPipeline


def _clean(caption: str) -> str:
    """As Wan cleans captions: HTML entities resolved twice, white space single."""
    return " ".join(html.unescape(html.unescape(caption)).split())


def _padded(x_LD: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat((x_LD, x_LD.new_zeros(length - len(x_LD), x_LD.shape[1])))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{folder}: no tokenizer ({_first_line(error)}); copy the folder again"
        ) from error


def _network(kind: type[Any], folder: Path, device: str, dtype: torch.dtype) -> Any:
    """A frozen transformers network; every weight must be in the folder."""
    from safetensors import SafetensorError

    try:
        network, loading = kind.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True, use_safetensors=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder}: cannot be loaded as {kind.__name__} ({_first_line(error)}); copy the folder again"
        ) from error
    lacking = sorted({*loading["missing_keys"], *(str(key) for key in loading["mismatched_keys"])})
    if lacking:
        raise CheckpointError(
            f"{folder}: {lacking[0]!r} is missing or of another shape ({len(lacking)} in all); copy the folder again"
        )
    return network.to(device).eval().requires_grad_(False)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def check_finite(embeddings: Mapping[str, torch.Tensor], name: str) -> None:
    """Raises DataError when an embedding is not finite: fp16 encoders overflow on some captions."""
    for part, value in embeddings.items():
        if not bool(torch.isfinite(value.float()).all()):
            raise DataError(f"{name}: its {part} is not finite; encode with --dtype float32")
