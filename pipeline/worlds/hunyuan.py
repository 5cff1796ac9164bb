"""WorldPlay on HunyuanVideo-1.5: the stock diffusers sub-modules, an own autoregressive forward (spec worldplay 1b).

The stock forward embeds one time for a whole sample and always runs text and video jointly. WorldPlay-8B does neither:
text is read once a prompt at timestep 0, and every video query attends to [text, context latents, its own clip] in two
branches that share the text's keys. So this class has three modes behind one `forward` (FSDP and checkpoint hooks must
fire): "text" -> text cache, "context" -> context cache, "velocity". Added weights: an action embedder, and one
projection a block for the camera branch (`attn.to_out_prope`).

Two savings with the same numbers: modulation is computed once a frame, not once a token, and the context cache keeps
plain keys and values (attention.RawContext): half the memory, 13.8 GB and not 27.6 at full size.
"""

import re
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from diffusers.configuration_utils import register_to_config
from diffusers.models.embeddings import TimestepEmbedding
from diffusers.models.transformers.transformer_hunyuan_video15 import (
    HunyuanVideo15Transformer3DModel,
    HunyuanVideo15TransformerBlock,
)
from torch import nn

from pipeline.worlds.attention import (
    Geometry,
    KeyValue,
    RawContext,
    attend,
    rotate,
    split_heads,
    stack_branches,
    turned,
)
from pipeline.worlds.base import ContextCache
from pipeline.worlds.prope import camera_transforms, transform

# Weights that the text cache depends on; all others act on video alone.
TEXT_SIDE = re.compile(
    r"(context_embedder|context_embedder_2|image_embedder|cond_type_embed|time_embed)\."
    r"|transformer_blocks\.\d+\.(norm1_context|ff_context|attn\.(add_[qkv]_proj|to_add_out|norm_added_[qk]))\."
)


class HunyuanText(NamedTuple):
    """Embeddings of a prompt: language model [B, L, 3584], byT5 glyphs [B, L, 1472], SigLIP image tokens [B, L, 1152].

    A mask [B, L] is true where a token is no padding; None: all are valid. A part that a prompt lacks is None.
    """

    llm_BLD: torch.Tensor
    llm_mask_BL: torch.Tensor | None = None
    byt5_BLD: torch.Tensor | None = None
    byt5_mask_BL: torch.Tensor | None = None
    vision_BLD: torch.Tensor | None = None


class WorldPlayHunyuanBlock(HunyuanVideo15TransformerBlock):
    """A HunyuanVideo-1.5 block that reads text and watches video in two separate passes."""

    def __init__(
        self, num_attention_heads: int, attention_head_dim: int, mlp_ratio: float, qk_norm: str
    ) -> None:
        super().__init__(num_attention_heads, attention_head_dim, mlp_ratio=mlp_ratio, qk_norm=qk_norm)
        dim = num_attention_heads * attention_head_dim
        self.attn.to_out_prope = nn.ModuleList([nn.Linear(dim, dim)])

    def forward(
        self,
        x: torch.Tensor,
        vec_BTD: torch.Tensor,
        only_keys: bool,
        geometry: Geometry | None = None,
        text: KeyValue | None = None,
        context: tuple[torch.Tensor, torch.Tensor, Geometry] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One pass over text (x [B, S, D], no geometry) or video (x [B, T, L, D]); returns (x, keys, values).

        `only_keys` leaves x unchanged: the last block of a pass that only fills a cache. Keys and values are
        [B, heads, S, head_dim] of text, [B, T, L, D] of video (before rotation).
        """
        if geometry is None or text is None:
            return self._read(x, vec_BTD, only_keys)
        return self._watch(x, vec_BTD, only_keys, geometry, text, context)

    def _read(
        self, x_BSD: torch.Tensor, vec_B1D: torch.Tensor, only_keys: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        attn = self.attn
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            part.squeeze(1) for part in _modulation(self.norm1_context.linear, vec_B1D)
        )
        h = _modulated(self.norm1_context.norm, x_BSD, shift1, scale1)
        value = attn.add_v_proj(h)
        key, value = (
            split_heads(part[:, None], attn.heads, value.dtype)
            for part in (_head_norm(attn.norm_added_k, attn.add_k_proj(h), attn.heads), value)
        )
        if only_keys:
            return x_BSD, key, value
        query = _head_norm(attn.norm_added_q, attn.add_q_proj(h), attn.heads)
        out = attend(split_heads(query[:, None], attn.heads, value.dtype), key, value)
        x = (x_BSD + gate1 * attn.to_add_out(out.transpose(1, 2).flatten(2))).type_as(x_BSD)
        h = _modulated(self.norm2_context, x, shift2, scale2)
        return (x + gate2 * self.ff_context(h)).type_as(x_BSD), key, value

    def _watch(
        self,
        x_BTLD: torch.Tensor,
        vec_BTD: torch.Tensor,
        only_keys: bool,
        geometry: Geometry,
        text: KeyValue,
        context: tuple[torch.Tensor, torch.Tensor, Geometry] | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        attn, heads = self.attn, self.attn.heads
        shift1, scale1, gate1, shift2, scale2, gate2 = _modulation(self.norm1.linear, vec_BTD)
        h = _modulated(self.norm1.norm, x_BTLD, shift1, scale1)
        value = attn.to_v(h)
        key = _head_norm(attn.norm_k, attn.to_k(h), heads).to(value.dtype)
        if only_keys:
            return x_BTLD, key, value
        query = _head_norm(attn.norm_q, attn.to_q(h), heads)
        query = stack_branches(
            rotate(query, geometry.rotation), transform(query, geometry.cameras.query), heads, value.dtype
        )
        sources = [turned(key, value, geometry, heads)]
        if context is not None:
            past_key, past_value, past_geometry = context
            sources.insert(0, turned(past_key.to(key.dtype), past_value.to(key.dtype), past_geometry, heads))
        # text has no camera and no time: both branches see the same keys
        sources.insert(0, (torch.cat((text[0],) * 2, dim=1), torch.cat((text[1],) * 2, dim=1)))
        batch = len(x_BTLD)
        keys, values = (
            torch.cat([pair[i].to(key.dtype).expand(batch, -1, -1, -1) for pair in sources], dim=2)
            for i in range(2)
        )
        rotary, projective = (
            part.transpose(1, 2).reshape(x_BTLD.shape) for part in attend(query, keys, values).chunk(2, dim=1)
        )
        projective = transform(projective, geometry.cameras.output).to(value.dtype)
        attended = attn.to_out[0](rotary) + attn.to_out_prope[0](projective)
        x = (x_BTLD + gate1 * attended).type_as(x_BTLD)
        h = _modulated(self.norm2, x, shift2, scale2)
        return (x + gate2 * self.ff(h)).type_as(x_BTLD), key, value


class WorldPlayHunyuan(HunyuanVideo15Transformer3DModel):
    """HunyuanVideo-1.5 with actions, cameras and memory: stock weights plus `action_embedder` and `to_out_prope`."""

    _no_split_modules: ClassVar[list[str]] = ["WorldPlayHunyuanBlock"]
    _repeated_blocks: ClassVar[list[str]] = ["WorldPlayHunyuanBlock"]
    # for updates.trained: text is read without gradient, so its own weights (all but the shared time_embed) get none,
    # and LoRA leaves them alone; while nothing that text depends on is trained it is read once a prompt
    never_trained: ClassVar[str] = r"(?!time_embed\.)" + TEXT_SIDE.pattern
    lora_scope: ClassVar[str] = r"transformer_blocks\.\d+\.(?=attn\.to_(?!add)|ff\.)"

    # The signature is repeated because diffusers stores only what it can see: with *args the configuration is lost.
    @register_to_config
    def __init__(
        self,
        in_channels: int = 65,
        out_channels: int = 32,
        num_attention_heads: int = 16,
        attention_head_dim: int = 128,
        num_layers: int = 54,
        num_refiner_layers: int = 2,
        mlp_ratio: float = 4.0,
        patch_size: int = 1,
        patch_size_t: int = 1,
        qk_norm: str = "rms_norm",
        text_embed_dim: int = 3584,
        text_embed_2_dim: int = 1472,
        image_embed_dim: int = 1152,
        rope_theta: float = 256.0,
        rope_axes_dim: tuple[int, ...] = (16, 56, 56),
        target_size: int = 640,
        task_type: str = "i2v",
        use_meanflow: bool = False,
    ) -> None:
        if patch_size_t != 1 or use_meanflow or sum(rope_axes_dim) != attention_head_dim:
            raise ValueError(
                "WorldPlayHunyuan needs patch_size_t = 1 (a camera belongs to one latent), no meanflow, and "
                f"rope_axes_dim that sum to attention_head_dim = {attention_head_dim}"
            )
        super().__init__(
            in_channels=in_channels,
            out_channels=out_channels,
            num_attention_heads=num_attention_heads,
            attention_head_dim=attention_head_dim,
            num_layers=0,
            num_refiner_layers=num_refiner_layers,
            mlp_ratio=mlp_ratio,
            patch_size=patch_size,
            patch_size_t=patch_size_t,
            qk_norm=qk_norm,
            text_embed_dim=text_embed_dim,
            text_embed_2_dim=text_embed_2_dim,
            image_embed_dim=image_embed_dim,
            rope_theta=rope_theta,
            rope_axes_dim=rope_axes_dim,
            target_size=target_size,
            task_type=task_type,
            use_meanflow=use_meanflow,
        )
        self.register_to_config(num_layers=num_layers)  # the stock blocks were left out, ours follow
        self.transformer_blocks = nn.ModuleList(
            WorldPlayHunyuanBlock(num_attention_heads, attention_head_dim, mlp_ratio, qk_norm)
            for _ in range(num_layers)
        )
        dim = num_attention_heads * attention_head_dim
        self.action_embedder = TimestepEmbedding(in_channels=256, time_embed_dim=dim)

    def forward(
        self,
        mode: Literal["text", "context", "velocity"],
        text: HunyuanText | ContextCache,
        latents_BCTHW: torch.Tensor | None = None,
        timestep_BT: torch.Tensor | None = None,
        labels_BT: torch.Tensor | None = None,
        w2c_BT44: torch.Tensor | None = None,
        K_BT33: torch.Tensor | None = None,
        rope_start: int = 0,
        context: RawContext | None = None,
    ) -> Any:
        """Text cache (mode "text", from `HunyuanText` alone), RawContext ("context") or velocity [B, C, T, H, W].

        `text` is the text cache in the last two modes. `latents` are [latent | condition | mask] on the channel axis,
        `timestep_BT` is 0..1000, one a latent; w2c is relative to frame 0, which the 8B insists on: its projective
        queries also meet text keys. All but the latents may have batch 1. Differentiable where autograd is enabled.
        """
        if mode == "text" and isinstance(text, HunyuanText):
            return self._read_text(text)
        if mode not in ("context", "velocity") or isinstance(text, HunyuanText):
            raise ValueError(
                "mode is 'text' with embeddings, or 'context' or 'velocity' with a text cache; "
                f"got {mode!r} with {type(text).__name__}"
            )
        if (
            latents_BCTHW is None
            or timestep_BT is None
            or labels_BT is None
            or w2c_BT44 is None
            or K_BT33 is None
        ):
            raise ValueError(f"mode {mode!r} needs latents, timesteps, labels, w2c and K")
        B, _, T, H, W = latents_BCTHW.shape
        patch = self.config.patch_size
        if H % patch or W % patch:
            raise ValueError(f"latents of {H} x {W} cells do not divide into patches of {patch} x {patch}")
        rows, columns = H // patch, W // patch
        for cache in (text, context):
            if cache is not None and len(cache.layers) != len(self.transformer_blocks):
                raise ValueError(
                    f"a cache has {len(cache.layers)} layers, the model {self.config.num_layers}"
                )
        x = self._stream(self.x_embedder.proj(latents_BCTHW.to(self.x_embedder.proj.weight.dtype)))
        x = x.flatten(3).permute(0, 2, 3, 1).contiguous()
        vec_BTD = self._embed(self.time_embed.timestep_embedder, timestep_BT)
        vec_BTD = vec_BTD + self._embed(self.action_embedder, labels_BT).to(vec_BTD.dtype)
        geometry = self._geometry(rope_start, rows, columns, w2c_BT44, K_BT33)
        past = None
        if context is not None:
            past = self._geometry(context.start, rows, columns, context.w2c_BT44, context.K_BT33)
        kept: list[KeyValue] = []
        for index in range(len(self.transformer_blocks)):
            only_keys = mode == "context" and index == len(self.transformer_blocks) - 1
            remembered = None if context is None else (*context.layers[index], past)
            x, key, value = self._block(
                index, x, vec_BTD, only_keys, geometry, text.layers[index], remembered
            )
            if mode == "context":
                kept.append((key, value))
        if mode == "context":
            return RawContext(layers=kept, frames=T, w2c_BT44=w2c_BT44, K_BT33=K_BT33, start=rope_start)
        scale, shift = _modulation(self.norm_out.linear, vec_BTD, 2)
        x = self.proj_out(_modulated(self.norm_out.norm, x, shift, scale))
        x = x.view(B, T, rows, columns, -1, patch, patch).permute(0, 4, 1, 2, 5, 3, 6)
        return x.reshape(B, -1, T, H, W)

    def _read_text(self, text: HunyuanText) -> ContextCache:
        """[image tokens, valid glyph tokens, valid text tokens] through the text half of every block, at timestep 0."""
        dtype = self.proj_out.weight.dtype
        kind = self.cond_type_embed.weight
        llm = _valid(text.llm_BLD, text.llm_mask_BL).to(dtype)
        if not llm.shape[1]:
            raise ValueError(
                "a prompt without a single valid text token cannot be read; encode an empty caption"
            )
        zero_B1 = torch.zeros(len(llm), 1, device=llm.device)
        tokens = []
        if text.vision_BLD is not None:
            tokens.append(self.image_embedder(text.vision_BLD.to(dtype)) + kind[2])
        if text.byt5_BLD is not None:
            glyphs = _valid(text.byt5_BLD, text.byt5_mask_BL).to(dtype)
            tokens.append(self.context_embedder_2(glyphs) + kind[1])
        tokens.append(self.context_embedder(llm, zero_B1[:, 0]) + kind[0])
        x = self._stream(torch.cat(tokens, dim=1))
        vec_B1D = self._embed(self.time_embed.timestep_embedder, zero_B1)
        layers = []
        for index in range(len(self.transformer_blocks)):
            x, key, value = self._block(index, x, vec_B1D, index == len(self.transformer_blocks) - 1)
            layers.append((key, value))
        return ContextCache(layers=layers, frames=0)

    def _block(self, index: int, *arguments: Any) -> Any:
        block = self.transformer_blocks[index]
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return self._gradient_checkpointing_func(block, *arguments)
        return block(*arguments)

    def _stream(self, x: torch.Tensor) -> torch.Tensor:
        """The residual stream keeps full precision under autocast; only products are narrow."""
        return x.float() if torch.is_autocast_enabled(x.device.type) else x

    def _embed(self, embedder: TimestepEmbedding, values_BT: torch.Tensor) -> torch.Tensor:
        """Sinusoids in fp32, then the embedder in its own dtype: [B, T, D]. Autocast off, as in WorldPlayWan."""
        with torch.autocast(values_BT.device.type, enabled=False):
            waves = self.time_embed.time_proj(values_BT.float().flatten()).unflatten(0, values_BT.shape)
            return embedder(waves.to(embedder.linear_1.weight.dtype))

    def _geometry(
        self, start: int, rows: int, columns: int, w2c_BT44: torch.Tensor, K_BT33: torch.Tensor
    ) -> Geometry:
        """Rotations of latents start.. on a grid of tokens, and their cameras."""
        T, device = w2c_BT44.shape[1], w2c_BT44.device
        sizes, first = (T, rows, columns), (start, 0, 0)
        parts = []
        for axis, (dim, size, offset) in enumerate(zip(self.config.rope_axes_dim, sizes, first, strict=True)):
            half = torch.arange(0, dim, 2, dtype=torch.float32, device=device)
            position = torch.arange(offset, offset + size, dtype=torch.float32, device=device)
            angle = torch.outer(position, 1.0 / self.config.rope_theta ** (half / dim))
            shape = [size if a == axis else 1 for a in range(3)]
            parts.append(torch.polar(torch.ones_like(angle), angle).view(*shape, -1).expand(*sizes, -1))
        rotation = torch.cat(parts, dim=-1).reshape(1, T, rows * columns, 1, -1)
        return Geometry(rotation, camera_transforms(w2c_BT44, K_BT33, self.config.attention_head_dim))


def _valid(tokens_BLD: torch.Tensor, mask_BL: torch.Tensor | None) -> torch.Tensor:
    """Tokens without padding; all samples must have as many, because a cache has no mask."""
    if mask_BL is None:
        return tokens_BLD
    mask = mask_BL.bool()
    counts = mask.sum(1)
    if bool((counts != counts[0]).any()):
        raise ValueError(f"prompts of one batch must have equally many tokens, got {counts.tolist()}")
    return tokens_BLD[mask].unflatten(0, (len(mask), -1)) if counts[0] else tokens_BLD[:, :0]


def _modulation(linear: nn.Linear, vec_BTD: torch.Tensor, parts: int = 6) -> tuple[torch.Tensor, ...]:
    """Shifts, scales and gates of each latent, [B, T, 1, D] in fp32. One row a frame: autocast would save nothing."""
    with torch.autocast(vec_BTD.device.type, enabled=False):
        out = linear(nn.functional.silu(vec_BTD.to(linear.weight.dtype)))
    return out.float().unsqueeze(-2).chunk(parts, dim=-1)


def _modulated(norm: nn.Module, x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (norm(x.float()) * (1 + scale) + shift).type_as(x)


def _head_norm(norm: nn.Module, x: torch.Tensor, heads: int) -> torch.Tensor:
    """RMS norm over each head's channels, shape kept."""
    return norm(x.unflatten(-1, (heads, -1))).flatten(-2)
