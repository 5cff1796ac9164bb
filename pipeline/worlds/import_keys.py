"""How the published WorldPlay files name their tensors, as rules: where each tensor of ours comes from.

5B: diffusers names inside an envelope (`generator`, `generator_ema`) behind wrapper prefixes. 8B: the original Tencent
names; the refiner's q, k, v are one tensor, and the final modulation is (shift, scale) where diffusers has
(scale, shift) (spec worldplay 1a, 1b). The manifest - every published name with its shape - follows from these rules
and the network's own shapes, so an importer can check a file before it reads a single weight.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

# (our prefix, their prefix, our module -> their module). `#` is a block's number; a rule holds for all tensors of a
# module. "fused 1" is the second third of a fused q, k, v; "swapped" exchanges the halves.
_HUNYUAN: tuple[tuple[str, str, dict[str, str]], ...] = (
    (
        "",
        "",
        {
            "x_embedder.proj": "img_in.proj",
            "cond_type_embed": "cond_type_embedding",
            "time_embed.timestep_embedder.linear_1": "time_in.mlp.0",
            "time_embed.timestep_embedder.linear_2": "time_in.mlp.2",
            "action_embedder.linear_1": "action_in.mlp.0",
            "action_embedder.linear_2": "action_in.mlp.2",
            "norm_out.linear": "final_layer.adaLN_modulation.1 swapped",
            "proj_out": "final_layer.linear",
        },
    ),
    (
        "image_embedder.",
        "vision_in.proj.",
        {"norm_in": "0", "linear_1": "1", "linear_2": "3", "norm_out": "4"},
    ),
    (
        "context_embedder_2.",
        "byt5_in.",
        {"norm": "layernorm", "linear_1": "fc1", "linear_2": "fc2", "linear_3": "fc3"},
    ),
    (
        "context_embedder.",
        "txt_in.",
        {
            "proj_in": "input_embedder",
            "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
            "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
            "time_text_embed.text_embedder.linear_1": "c_embedder.linear_1",
            "time_text_embed.text_embedder.linear_2": "c_embedder.linear_2",
        },
    ),
    (
        "context_embedder.token_refiner.refiner_blocks.#.",
        "txt_in.individual_token_refiner.blocks.#.",
        {
            "norm1": "norm1",
            "norm2": "norm2",
            "attn.to_q": "self_attn_qkv fused 0",
            "attn.to_k": "self_attn_qkv fused 1",
            "attn.to_v": "self_attn_qkv fused 2",
            "attn.to_out.0": "self_attn_proj",
            "ff.net.0.proj": "mlp.fc1",
            "ff.net.2": "mlp.fc2",
            "norm_out.linear": "adaLN_modulation.1",
        },
    ),
    (
        "transformer_blocks.#.",
        "double_blocks.#.",
        {
            "norm1.linear": "img_mod.linear",
            "attn.to_q": "img_attn_q",
            "attn.to_k": "img_attn_k",
            "attn.to_v": "img_attn_v",
            "attn.norm_q": "img_attn_q_norm",
            "attn.norm_k": "img_attn_k_norm",
            "attn.to_out.0": "img_attn_proj",
            "attn.to_out_prope.0": "img_attn_prope_proj",
            "ff.net.0.proj": "img_mlp.fc1",
            "ff.net.2": "img_mlp.fc2",
            "norm1_context.linear": "txt_mod.linear",
            "attn.add_q_proj": "txt_attn_q",
            "attn.add_k_proj": "txt_attn_k",
            "attn.add_v_proj": "txt_attn_v",
            "attn.norm_added_q": "txt_attn_q_norm",
            "attn.norm_added_k": "txt_attn_k_norm",
            "attn.to_add_out": "txt_attn_proj",
            "ff_context.net.0.proj": "txt_mlp.fc1",
            "ff_context.net.2": "txt_mlp.fc2",
        },
    ),
)
_RULES = {
    ours + module: (theirs + rule).split()
    for ours, theirs, modules in _HUNYUAN
    for module, rule in modules.items()
}
_BLOCK = re.compile(r"(?<=blocks\.)\d+(?=\.)")

# What FSDP, torch.compile and activation checkpointing leave in names, anywhere in them.
_WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")


class Source(NamedTuple):
    """Which published tensor one of ours is made of: all of it, one of three equal parts, or its halves swapped."""

    key: str
    third: int | None = None
    swapped: bool = False

    def take(self, published: torch.Tensor) -> torch.Tensor:
        """Our tensor; a view of the published one where that is possible."""
        if self.third is not None:
            return published.chunk(3)[self.third]
        if self.swapped:
            return torch.cat(published.chunk(2)[::-1])
        return published

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the published tensor."""
        return ours if self.third is None else (3 * ours[0], *ours[1:])


def plain_name(name: str) -> str:
    """A published name without what training wrappers put before and into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("model.")


def sources_5b(names: Iterable[str]) -> dict[str, Source]:
    """Our name -> where it comes from; the 5B uses diffusers names."""
    return {name: Source(name) for name in names}


def sources_8b(names: Iterable[str]) -> dict[str, Source]:
    """Our name -> where it comes from, by the rules above. Raises KeyError for a name that no rule covers."""
    found = {}
    for name in names:
        module, _, leaf = name.rpartition(".")
        number = _BLOCK.search(module)
        theirs, *how = _RULES[_BLOCK.sub("#", module)]
        key = f"{theirs.replace('#', number.group() if number else '#')}.{leaf}"
        third = int(how[1]) if how[:1] == ["fused"] else None
        found[name] = Source(key, third=third, swapped=how == ["swapped"])
    return found


def manifest(
    sources: Mapping[str, Source], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Published name -> shape, for every tensor that the published file must hold."""
    return {source.key: source.shape(shapes[name]) for name, source in sources.items()}
