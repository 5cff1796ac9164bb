"""Random weights in a scorer's own file formats: `python random_weights.py NAME FOLDER`, inside its environment.

They prove an environment, the adapter and the package's whole path without downloading anything (`wcpipe scorers check
--random`, the tests). What they measure is noise. HPSv3 becomes tiny, since its network is configured by files; the
others have their real shapes (DA3 the small one, 0.14 GB; RoMa 0.8 GB, in half precision).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
)
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_characters() -> list[str]:
    """One printable character for each byte, as byte-level tokenizers write them."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False))


def hpsv3(folder: Path) -> None:
    """A Qwen2-VL of 0.2 M parameters whose tokenizer knows bytes only, and the reward model's checkpoint."""
    import safetensors.torch
    import torch
    from hpsv3.model.qwen2vl_trainer import Qwen2VLRewardModelBT
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    base = folder / "Qwen2-VL-7B-Instruct"
    base.mkdir(parents=True)
    ids = {token: 256 + index for index, token in enumerate(TOKENS)}
    write(base / "vocab.json", {character: index for index, character in enumerate(byte_characters())})
    (base / "merges.txt").write_text("#version: 0.2\n")
    added = {str(index): {"content": token, "special": True} for token, index in ids.items()}
    tokenizer = {"tokenizer_class": "Qwen2Tokenizer", "pad_token": TOKENS[0], "eos_token": "<|im_end|>"}
    write(base / "tokenizer_config.json", {**tokenizer, "added_tokens_decoder": added, "chat_template": CHAT})
    write(base / "chat_template.json", {"chat_template": CHAT})
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor"}
    limits = {
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    colours = {
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    write(base / "preprocessor_config.json", processor | limits | colours)
    config = Qwen2VLConfig(
        vocab_size=256 + len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]},
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
        image_token_id=ids["<|image_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    torch.manual_seed(0)
    Qwen2VLForConditionalGeneration(config).save_pretrained(base)
    model = Qwen2VLRewardModelBT.from_pretrained(
        str(base), output_dim=2, reward_token="special", special_token_ids=[0], rm_head_type="ranknet"
    )
    model.resize_token_embeddings(256 + len(TOKENS) + 1)  # with <|Reward|>
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    safetensors.torch.save_file(state, folder / "HPSv3.safetensors")


def depth_anything_3(folder: Path) -> None:
    """The small any-view model, as its own `save_pretrained` writes it."""
    import torch
    from depth_anything_3.api import DepthAnything3

    torch.manual_seed(0)
    DepthAnything3(model_name="da3-small").save_pretrained(str(folder))


def roma(folder: Path) -> None:
    """Both state dicts; the package offers no way to build it without loading weights."""
    import torch
    from romatch.models.matcher import RegressionMatcher
    from romatch.models.model_zoo import roma_models
    from romatch.models.transformer import vit_large

    torch.manual_seed(0)
    backbone = vit_large(
        img_size=518, patch_size=14, init_values=1.0, ffn_layer="mlp", block_chunks=0
    ).state_dict()
    RegressionMatcher.load_state_dict = lambda self, weights: None
    model = roma_models.roma_model(
        resolution=112,
        upsample_preds=False,
        weights={},
        dinov2_weights=backbone,
        device="cpu",
        use_custom_corr=False,
    )
    for name, state in (("dinov2_vitl14_pretrain.pth", backbone), ("roma_outdoor.pth", model.state_dict())):
        half = {key: value.half() if value.is_floating_point() else value for key, value in state.items()}
        torch.save(half, folder / name)


def cotracker(folder: Path) -> None:
    """The offline model's state dict in the layout of its checkpoint."""
    import torch
    from cotracker.predictor import CoTrackerPredictor

    torch.manual_seed(0)
    model = CoTrackerPredictor(checkpoint=None, offline=True)
    torch.save(model.model.state_dict(), folder / "scaled_offline.pth")


MAKERS = {"hpsv3": hpsv3, "depth-anything-3": depth_anything_3, "roma": roma, "cotracker": cotracker}

if __name__ == "__main__":
    # this script's folder holds modules that must not stand in the way of the packages'
    sys.path[:] = [
        entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent
    ]
    target = Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    MAKERS[sys.argv[1]](target)
