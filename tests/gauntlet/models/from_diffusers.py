"""Models of diffusers: transformers and U-nets that denoise, and autoencoders."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gauntlet.row import Batch, Field, Loss, Row, classes, fitted, floats


def _make(kind: str, arguments: dict[str, Any]) -> nn.Module:
    import diffusers

    return getattr(diffusers, kind)(**arguments)


def _row(kind: str, batch: dict[str, Field], sequence: bool = True, loss: Loss = fitted, **arguments: Any) -> Row:
    return Row("diffusers", kind, lambda: _make(kind, arguments), batch, loss, sequence)


def _flux(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Positions of text and image belong to no sample: [positions, 3] each."""
    texts, images = torch.zeros(8, 3), torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0))
    return fitted(lambda **inputs: model(**inputs, img_ids=images, txt_ids=texts), batch)


def _ltx(model: nn.Module, batch: Batch) -> torch.Tensor:
    return fitted(lambda **inputs: model(**inputs, num_frames=2, height=4, width=2), batch)


_HEADS: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2}
TIME, LATENTS, TEXT = classes(1000), floats(4, 8, 8), floats(8, 32)
_UNET: dict[str, Any] = {"sample_size": 16, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
_CODER: dict[str, Any] = {"block_out_channels": (8, 16), "norm_num_groups": 4}

ROWS = [
    _row("DiTTransformer2DModel",
         {"hidden_states": LATENTS, "timestep": TIME, "class_labels": classes(10)},
         **_HEADS, in_channels=4, sample_size=8, norm_num_groups=4, num_embeds_ada_norm=10),
    _row("PixArtTransformer2DModel", {"hidden_states": LATENTS, "encoder_hidden_states": TEXT, "timestep": TIME},
         **_HEADS, in_channels=4, out_channels=4, sample_size=8, cross_attention_dim=32, caption_channels=32,
         norm_num_groups=4, use_additional_conditions=False),
    _row("SD3Transformer2DModel",
         {"hidden_states": LATENTS, "encoder_hidden_states": TEXT, "pooled_projections": floats(16),
          "timestep": TIME},
         **_HEADS, sample_size=8, in_channels=4, out_channels=4, joint_attention_dim=32, caption_projection_dim=32,
         pooled_projection_dim=16, pos_embed_max_size=8),
    _row("FluxTransformer2DModel",
         {"hidden_states": floats(16, 8), "encoder_hidden_states": TEXT, "pooled_projections": floats(16),
          "timestep": floats()},
         loss=_flux, in_channels=8, num_layers=2, num_single_layers=2, attention_head_dim=8, num_attention_heads=4,
         joint_attention_dim=32, pooled_projection_dim=16, axes_dims_rope=(2, 2, 4)),
    _row("AuraFlowTransformer2DModel",
         {"hidden_states": LATENTS, "encoder_hidden_states": TEXT, "timestep": floats()},
         sample_size=8, in_channels=4, num_mmdit_layers=2, num_single_dit_layers=2, attention_head_dim=8,
         num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=32, out_channels=4,
         pos_embed_max_size=64),
    _row("CogView4Transformer2DModel",
         {"hidden_states": LATENTS, "encoder_hidden_states": TEXT, "timestep": TIME, "original_size": floats(2),
          "target_size": floats(2), "crop_coords": floats(2)},
         **{**_HEADS, "attention_head_dim": 8}, in_channels=4, out_channels=4, text_embed_dim=32, time_embed_dim=16,
         condition_dim=8, pos_embed_max_size=16, sample_size=8, rope_axes_dim=(16, 16)),
    _row("WanTransformer3DModel",
         {"hidden_states": floats(4, 2, 8, 8), "timestep": TIME, "encoder_hidden_states": TEXT},
         num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=32, freq_dim=16,
         ffn_dim=48, num_layers=2, rope_max_seq_len=32),
    _row("LTXVideoTransformer3DModel",
         {"hidden_states": floats(16, 8), "encoder_hidden_states": TEXT, "timestep": TIME,
          "encoder_attention_mask": Field((8,), 2, 1)},
         loss=_ltx, **_HEADS, in_channels=8, out_channels=8, cross_attention_dim=32, caption_channels=32),
    _row("PriorTransformer",
         {"hidden_states": floats(16), "timestep": TIME, "proj_embedding": floats(16),
          "encoder_hidden_states": floats(8, 16)},
         **_HEADS, embedding_dim=16, num_embeddings=8, additional_embeddings=4),
    _row("SanaTransformer2DModel", {"hidden_states": LATENTS, "encoder_hidden_states": TEXT, "timestep": TIME},
         **_HEADS, in_channels=4, out_channels=4, num_cross_attention_heads=4, cross_attention_head_dim=8,
         cross_attention_dim=32, caption_channels=32, sample_size=8),
    _row("MochiTransformer3DModel",
         {"hidden_states": floats(4, 2, 8, 8), "encoder_hidden_states": TEXT, "timestep": TIME,
          "encoder_attention_mask": Field((8,), 2, 1)},
         **_HEADS, pooled_projection_dim=16, in_channels=4, text_embed_dim=32, time_embed_dim=16,
         max_sequence_length=8),
    _row("CogVideoXTransformer3DModel",
         {"hidden_states": floats(2, 4, 8, 8), "encoder_hidden_states": TEXT, "timestep": TIME},
         **_HEADS, in_channels=4, out_channels=4, time_embed_dim=16, text_embed_dim=32, sample_width=8,
         sample_height=8, sample_frames=5, max_text_seq_length=8),
    _row("UNet2DModel", {"sample": floats(3, 16, 16), "timestep": TIME}, False, **_UNET, attention_head_dim=4,
         down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D")),
    _row("UNet2DConditionModel", {"sample": floats(4, 16, 16), "timestep": TIME, "encoder_hidden_states": TEXT}, False,
         **_UNET, attention_head_dim=4, cross_attention_dim=32,
         down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
         up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")),
    _row("AutoencoderKL", {"sample": floats(3, 16, 16)}, False, **_CODER,
         down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2),
    _row("VQModel", {"sample": floats(3, 16, 16)}, False, **_CODER, num_vq_embeddings=16,
         down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2),
]  # fmt: skip
