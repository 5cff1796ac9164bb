"""WorldPlay on Wan 2.2: the stock diffusers transformer plus actions, cameras and a context cache.

Two additions to `WanTransformer3DModel` (spec worldplay 1a): an action embedder whose output is added to the time
embedding of a frame, and a second self-attention branch on the same q, k, v, in which cameras (PRoPE) take the place
of 3D RoPE. Every other weight keeps its stock name, so published and stock checkpoints load strictly.

Why an own block forward: the stock one modulates per token, has no cache and one branch. Here modulation is computed
once a frame and broadcast; both branches run as one attention call with twice the heads; a context pass keeps plain
keys and values (attention.RawContext) and skips the rest of the last block. `forward` is the only entry, so that FSDP
and checkpoint hooks fire.
"""

from typing import Any, ClassVar, Literal

import torch
from diffusers.configuration_utils import register_to_config
from diffusers.models.embeddings import TimestepEmbedding
from diffusers.models.transformers.transformer_wan import (
    WanAttention,
    WanTransformer3DModel,
    WanTransformerBlock,
)
from torch import nn

from pipeline.worlds.attention import Geometry, KeyValue, RawContext, attend, rotate, stack_branches, turned
from pipeline.worlds.prope import camera_transforms, transform


class WorldPlayBlock(WanTransformerBlock):
    """A Wan block with a second, projective self-attention branch (`attn1.to_out_prope`)."""

    def __init__(
        self, dim: int, ffn_dim: int, num_heads: int, qk_norm: str, cross_attn_norm: bool, eps: float
    ) -> None:
        super().__init__(dim, ffn_dim, num_heads, qk_norm, cross_attn_norm, eps)
        self.attn1.to_out_prope = nn.ModuleList([nn.Linear(dim, dim)])

    def forward(
        self,
        x_BTLD: torch.Tensor,
        text_BSD: torch.Tensor,
        modulation_BT6D: torch.Tensor,
        geometry: Geometry,
        context: tuple[torch.Tensor, torch.Tensor, Geometry] | None,
        only_keys: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (x, keys, values), the latter [B, T, L, D] of x alone (without the context's), before any rotation.

        `context` is keys and values as returned by an earlier pass, with their own geometry. With `only_keys` x is
        returned unchanged: the last block of a context pass.
        """
        parts = (self.scale_shift_table.float() + modulation_BT6D.float()).unsqueeze(3).unbind(2)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        h = (self.norm1(x_BTLD.float()) * (1 + scale1) + shift1).type_as(x_BTLD)
        key, value = _normed(self.attn1.norm_k, self.attn1.to_k(h)), self.attn1.to_v(h)
        if only_keys:
            return x_BTLD, key, value
        attended = _self_attention(self.attn1, h, geometry, key, value, context)
        x = (x_BTLD.float() + attended * gate1).type_as(x_BTLD)
        h = self.norm2(x.float()).type_as(x)
        x = x + _cross_attention(self.attn2, h, text_BSD)
        h = (self.norm3(x.float()) * (1 + scale2) + shift2).type_as(x)
        return (x.float() + self.ffn(h).float() * gate2).type_as(x), key, value


class WorldPlayWan(WanTransformer3DModel):
    """Wan transformer with actions, cameras and memory: stock weights plus `action_embedder` and `to_out_prope`."""

    _no_split_modules: ClassVar[list[str]] = ["WorldPlayBlock"]
    _repeated_blocks: ClassVar[list[str]] = ["WorldPlayBlock"]
    lora_scope: ClassVar[str] = (
        r"blocks\.\d+\.(?=attn1\.|attn2\.|ffn\.)"  # updates.trained: what LoRA may adapt
    )

    # The signature is repeated because diffusers stores only what it can see: with *args the configuration is lost.
    @register_to_config
    def __init__(
        self,
        patch_size: tuple[int, ...] = (1, 2, 2),
        num_attention_heads: int = 24,
        attention_head_dim: int = 128,
        in_channels: int = 48,
        out_channels: int = 48,
        text_dim: int = 4096,
        freq_dim: int = 256,
        ffn_dim: int = 14336,
        num_layers: int = 30,
        cross_attn_norm: bool = True,
        qk_norm: str | None = "rms_norm_across_heads",
        eps: float = 1e-6,
        image_dim: int | None = None,
        added_kv_proj_dim: int | None = None,
        rope_max_seq_len: int = 1024,
        pos_embed_seq_len: int | None = None,
    ) -> None:
        if patch_size[0] != 1 or image_dim is not None or added_kv_proj_dim is not None:
            raise ValueError(
                "WorldPlayWan needs patch_size[0] = 1 and no image embedding: a camera belongs to one latent"
            )
        super().__init__(
            patch_size=patch_size,
            num_attention_heads=num_attention_heads,
            attention_head_dim=attention_head_dim,
            in_channels=in_channels,
            out_channels=out_channels,
            text_dim=text_dim,
            freq_dim=freq_dim,
            ffn_dim=ffn_dim,
            num_layers=0,
            cross_attn_norm=cross_attn_norm,
            qk_norm=qk_norm,
            eps=eps,
            rope_max_seq_len=rope_max_seq_len,
            pos_embed_seq_len=pos_embed_seq_len,
        )
        self.register_to_config(
            num_layers=num_layers
        )  # the stock blocks were left out on purpose, see the line below
        dim = num_attention_heads * attention_head_dim
        self.blocks = nn.ModuleList(
            WorldPlayBlock(dim, ffn_dim, num_attention_heads, str(qk_norm), cross_attn_norm, eps)
            for _ in range(num_layers)
        )
        self.condition_embedder.action_embedder = TimestepEmbedding(in_channels=freq_dim, time_embed_dim=dim)

    def forward(
        self,
        mode: Literal["context", "velocity"],
        latents_BCTHW: torch.Tensor,
        timestep_BT: torch.Tensor,
        labels_BT: torch.Tensor,
        w2c_BT44: torch.Tensor,
        K_BT33: torch.Tensor,
        text_BLD: torch.Tensor,
        rope_start: int = 0,
        context: RawContext | None = None,
    ) -> Any:
        """Velocity of a noisy clip (mode "velocity", [B, C, T, H, W]) or RawContext of clean history (mode "context").

        Every argument but the latents may have batch 1 and is then shared, including the context. `timestep_BT` is
        0..1000, one a latent; `w2c` is relative to frame 0, in units of the world; `K` is normalised by the image size.
        `rope_start` is the RoPE time of the first latent. Both modes are differentiable where autograd is enabled.
        """
        if mode not in ("context", "velocity"):
            raise ValueError(f"mode must be 'context' or 'velocity', got {mode!r}")
        B, _, T, H, W = latents_BCTHW.shape
        _, p_h, p_w = self.config.patch_size
        if H % p_h or W % p_w:
            raise ValueError(f"latents of {H} x {W} cells do not divide into patches of {p_h} x {p_w}")
        rows, columns = H // p_h, W // p_w
        x = self.patch_embedding(latents_BCTHW.to(self.patch_embedding.weight.dtype))
        if torch.is_autocast_enabled(x.device.type):
            x = x.float()  # the residual stream keeps full precision under autocast; only products are narrow
        x = x.flatten(3).permute(0, 2, 3, 1).contiguous()
        temb_BTD, modulation_BT6D = self._conditions(timestep_BT, labels_BT)
        text = self.condition_embedder.text_embedder(text_BLD.to(self.proj_out.weight.dtype))
        geometry = Geometry(
            self._rotation(rope_start, T, rows, columns),
            camera_transforms(w2c_BT44, K_BT33, self.config.attention_head_dim),
        )
        past = None
        if context is not None:
            if len(context.layers) != len(self.blocks):
                raise ValueError(
                    f"the context has {len(context.layers)} layers, the model {len(self.blocks)}"
                )
            past = Geometry(
                self._rotation(context.start, context.frames, rows, columns),
                camera_transforms(context.w2c_BT44, context.K_BT33, self.config.attention_head_dim),
            )
        kept: list[KeyValue] = []
        checkpoint = self.gradient_checkpointing and torch.is_grad_enabled()
        for index, block in enumerate(self.blocks):
            only_keys = mode == "context" and index == len(self.blocks) - 1
            remembered = None if context is None or past is None else (*context.layers[index], past)
            arguments = (x, text, modulation_BT6D, geometry, remembered, only_keys)
            x, key, value = (
                self._gradient_checkpointing_func(block, *arguments) if checkpoint else block(*arguments)
            )
            if mode == "context":
                kept.append((key, value))
        if mode == "context":
            return RawContext(layers=kept, frames=T, w2c_BT44=w2c_BT44, K_BT33=K_BT33, start=rope_start)
        shift, scale = (self.scale_shift_table + temb_BTD.unsqueeze(2)).unsqueeze(3).unbind(2)
        x = self.proj_out((self.norm_out(x.float()) * (1 + scale) + shift).type_as(x))
        x = x.view(B, T, rows, columns, p_h, p_w, -1).permute(0, 6, 1, 2, 4, 3, 5)
        return x.reshape(B, -1, T, H, W)

    def _conditions(
        self, timestep_BT: torch.Tensor, labels_BT: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedding of time plus action [B, T, D] and the six modulations of every block [B, T, 6, D].

        Autocast is off here: one row a frame costs nothing, and bf16 cannot tell neighbouring timesteps apart.
        """
        embedder = self.condition_embedder
        with torch.autocast(timestep_BT.device.type, enabled=False):
            time, action = (
                embedder.timesteps_proj(values.float().flatten()).unflatten(0, values.shape)
                for values in (timestep_BT, labels_BT)
            )
            temb = embedder.time_embedder(time.to(embedder.time_embedder.linear_1.weight.dtype))
            temb = temb + embedder.action_embedder(
                action.to(embedder.action_embedder.linear_1.weight.dtype)
            ).to(temb.dtype)
            temb = temb.to(embedder.time_proj.weight.dtype)
            return temb, embedder.time_proj(embedder.act_fn(temb)).unflatten(-1, (6, -1))

    def _rotation(self, start: int, T: int, rows: int, columns: int) -> torch.Tensor:
        """Complex 3D RoPE of latents start..start+T-1, [1, T, L, 1, head_dim/2], complex64."""
        if start + T > self.rope.max_seq_len:
            raise ValueError(
                f"RoPE positions {start}..{start + T - 1} exceed rope_max_seq_len = {self.rope.max_seq_len}"
            )
        # The stock tables repeat every frequency for the two channels of a pair: every second column is enough.
        table = torch.complex(self.rope.freqs_cos.float()[:, ::2], self.rope.freqs_sin.float()[:, ::2])
        time, row, column = table.split(
            [size // 2 for size in (self.rope.t_dim, self.rope.h_dim, self.rope.w_dim)], dim=1
        )
        shape = (T, rows, columns, -1)
        full = torch.cat(
            (
                time[start : start + T, None, None].expand(shape),
                row[None, :rows, None].expand(shape),
                column[None, None, :columns].expand(shape),
            ),
            dim=-1,
        )
        return full.reshape(1, T, rows * columns, 1, -1)


def _normed(norm: nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """RMS norm in the dtype of its weight (fp32 under autocast): mixed dtypes fall back to a ten times slower path."""
    return norm(x.to(norm.weight.dtype))


def _self_attention(
    attn: WanAttention,
    h_BTLD: torch.Tensor,
    geometry: Geometry,
    key: torch.Tensor,
    value: torch.Tensor,
    context: tuple[torch.Tensor, torch.Tensor, Geometry] | None,
) -> torch.Tensor:
    """Both branches over context and clip together (no mask inside), projected and summed: [B, T, L, D]."""
    query = _normed(attn.norm_q, attn.to_q(h_BTLD))
    query = stack_branches(
        rotate(query, geometry.rotation), transform(query, geometry.cameras.query), attn.heads, value.dtype
    )
    key, value = turned(key, value, geometry, attn.heads)
    if context is not None:
        past_key, past_value, past_geometry = context
        past = turned(past_key, past_value.to(value.dtype), past_geometry, attn.heads)
        past_key, past_value = (part.expand(key.shape[0], -1, -1, -1) for part in past)
        key, value = torch.cat((past_key, key), dim=2), torch.cat((past_value, value), dim=2)
    out = attend(query, key, value)
    rotary, projective = (part.transpose(1, 2).reshape(h_BTLD.shape) for part in out.chunk(2, dim=1))
    projective = transform(projective, geometry.cameras.output).to(out.dtype)
    return attn.to_out[0](rotary) + attn.to_out_prope[0](projective)


def _cross_attention(attn: WanAttention, h_BTLD: torch.Tensor, text_BSD: torch.Tensor) -> torch.Tensor:
    """Stock text attention; keys and values of a shared text are computed once and expanded."""
    value = attn.to_v(text_BSD)
    query = _normed(attn.norm_q, attn.to_q(h_BTLD)).flatten(1, 2)
    key = _normed(attn.norm_k, attn.to_k(text_BSD))
    query, key, value = (
        part.to(value.dtype).unflatten(-1, (attn.heads, -1)).transpose(1, 2) for part in (query, key, value)
    )
    key, value = (part.expand(query.shape[0], -1, -1, -1) for part in (key, value))
    return attn.to_out[0](attend(query, key, value).transpose(1, 2).reshape(h_BTLD.shape))
