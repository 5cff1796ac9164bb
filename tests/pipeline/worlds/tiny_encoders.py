"""Tiny random encoders of both published bases, as the diffusers folders that `wcpipe encode` reads."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    ByT5Tokenizer,
    PreTrainedTokenizerFast,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _byte_tokenizer(
    special: list[str], chat: str | None = None, ends_with: str | None = None
) -> PreTrainedTokenizerFast:
    """One token a byte, and the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(special)
    if ends_with:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {ends_with}", special_tokens=[(ends_with, vocabulary[ends_with])]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[1])
    fast.chat_template = chat
    return fast


def wan_encoders(folder: Path, dim: int = 16) -> Path:
    """UMT5 with one token a byte."""
    torch.manual_seed(3)
    tokenizer = _byte_tokenizer(["<pad>", "</s>"], ends_with="</s>")
    tokenizer.save_pretrained(folder / "tokenizer")
    config = UMT5Config(
        vocab_size=len(tokenizer), d_model=dim, d_kv=8, d_ff=32, num_layers=1, num_heads=2, pad_token_id=0
    )
    UMT5EncoderModel(config).save_pretrained(folder / "text_encoder")
    return folder


def hunyuan_encoders(folder: Path, dim: int = 24, vision: int = 20) -> Path:
    """Qwen2.5-VL (three layers: the third last is read), byT5 and SigLIP with four patches."""
    torch.manual_seed(4)
    tokenizer = _byte_tokenizer(["<|endoftext|>", "<|im_end|>", "<|im_start|>"], chat=CHAT)
    tokenizer.save_pretrained(folder / "tokenizer")
    Qwen2_5_VLTextModel(
        Qwen2_5_VLTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=dim,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            rope_scaling={"type": "default", "rope_type": "default", "mrope_section": [2, 2, 2]},
            pad_token_id=0,
        )
    ).save_pretrained(folder / "text_encoder")
    ByT5Tokenizer(extra_ids=0).save_pretrained(folder / "tokenizer_2")
    T5EncoderModel(
        T5Config(vocab_size=384, d_model=1472, d_kv=8, d_ff=8, num_layers=1, num_heads=1)
    ).save_pretrained(folder / "text_encoder_2")
    SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=vision,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=16,
            patch_size=8,
        )
    ).save_pretrained(folder / "image_encoder")
    SiglipImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder / "feature_extractor")
    return folder
