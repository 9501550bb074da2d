"""Families of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.gauntlet.row import Batch, Field, Loss, Row, classes, floats, ones, own

VOCABULARY, WIDTH, HEADS, LENGTH, CLASSES = 64, 32, 4, 12, 10


def _make(kind: str, sizes: dict[str, Any]) -> nn.Module:
    import transformers

    model_class = getattr(transformers, kind)
    config = _quiet(model_class.config_class(**sizes))
    return model_class(config)


def _quiet(config: Any) -> Any:
    """Without dropout, caches and masking at random, in its parts, too."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            _quiet(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif name in ("use_cache", "apply_spec_augment"):
            setattr(config, name, False)
    return config


TEXT = {"input_ids": classes(VOCABULARY, LENGTH), "attention_mask": ones(LENGTH), "labels": classes(VOCABULARY, LENGTH)}


FLAT = {**TEXT, "labels": classes(3)}
IMAGES = {"pixel_values": floats(3, 16, 16), "labels": classes(CLASSES)}


def _matched(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Each image with its text, and with no other: the loss of a batch then is the mean of those of its parts."""
    output = model(**batch)
    scores = (output.image_embeds * output.text_embeds).sum(-1) * model.logit_scale.exp() + model.logit_bias
    return -functional.logsigmoid(scores).mean()


def _row(kind: str, batch: dict[str, Field] = TEXT, loss: Loss = own, sequence: bool = True, **sizes: Any) -> Row:
    return Row("transformers", kind, lambda: _make(kind, sizes), batch, loss, sequence)


LLAMA: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": None,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_HEADS = {**LLAMA, "head_dim": 8}
_EVEN = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
_EXPERTS: dict[str, Any] = {
    **_HEADS, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
_ENCODER: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "vocab_size": VOCABULARY, "max_position_embeddings": 40, "pad_token_id": 0,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "image_size": 16, "patch_size": 4, "num_labels": CLASSES,
}  # fmt: skip
_WINDOWS: dict[str, Any] = {
    "image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
    "num_labels": CLASSES,
}  # fmt: skip
_PAIRS: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "max_position_embeddings": 32,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": HEADS,
    "decoder_start_token_id": 0,
}  # fmt: skip
_SPEECH: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "vocab_size": VOCABULARY, "conv_dim": [8, 8], "conv_stride": [4, 4], "conv_kernel": [8, 8],
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_labels": 3,
    "classifier_proj_size": 16,
}  # fmt: skip
_SERIES: dict[str, Any] = {
    "prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1, "d_model": 16,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
}  # fmt: skip

ROWS = [
    # decoders
    _row("SmolLM3ForCausalLM", **LLAMA),
    _row("Ernie4_5ForCausalLM", **LLAMA),
    _row("CohereForCausalLM", **LLAMA),
    _row("Cohere2ForCausalLM", **LLAMA, sliding_window=4),
    _row("GlmForCausalLM", **_HEADS),
    _row("Glm4ForCausalLM", **_HEADS),
    _row("GemmaForCausalLM", **_HEADS),
    _row("GraniteForCausalLM", **LLAMA),
    _row("HeliumForCausalLM", **_HEADS),
    _row("NemotronForCausalLM", **_HEADS),
    _row("ArceeForCausalLM", **LLAMA),
    _row("ApertusForCausalLM", **LLAMA),
    _row("SeedOssForCausalLM", **_HEADS),
    _row("HunYuanDenseV1ForCausalLM", **_HEADS),
    _row("Exaone4ForCausalLM", **LLAMA),
    _row("OlmoForCausalLM", **LLAMA),
    _row("Olmo3ForCausalLM", **LLAMA),
    _row("MinistralForCausalLM", **_HEADS),
    _row("DiffLlamaForCausalLM", **LLAMA),
    _row("BitNetForCausalLM", **LLAMA),
    _row("PersimmonForCausalLM", **_EVEN),
    _row("NanoChatForCausalLM", **LLAMA),
    _row("ModernBertDecoderForCausalLM", **{**_ENCODER, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
         "sep_token_id": 2, "local_attention": 8}),
    _row("BioGptForCausalLM", **_EVEN),
    _row("XGLMForCausalLM", vocab_size=VOCABULARY, d_model=WIDTH, num_layers=2, attention_heads=HEADS, ffn_dim=48,
         max_position_embeddings=32),
    _row("GPTBigCodeForCausalLM", vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=HEADS, n_positions=32),
    _row("OpenAIGPTLMHeadModel", {"input_ids": TEXT["input_ids"], "labels": TEXT["labels"]}, vocab_size=VOCABULARY,
         n_embd=WIDTH, n_layer=2, n_head=HEADS, n_positions=32),
    _row("CTRLLMHeadModel", vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=HEADS, n_positions=32, dff=48),
    _row("MiniCPM3ForCausalLM", **{**LLAMA, "num_key_value_heads": HEADS}, q_lora_rank=8, kv_lora_rank=8,
         qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8),
    _row("Gemma3nForCausalLM", **_HEADS, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY,
         altup_num_inputs=2, laurel_rank=4, num_kv_shared_layers=0, layer_types=["full_attention"] * 2,
         activation_sparsity_pattern=[0.0, 0.0]),
    # experts
    _row("OlmoeForCausalLM", **_EXPERTS),
    _row("GraniteMoeForCausalLM", **{**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    _row("Qwen2MoeForCausalLM", **_EXPERTS, shared_expert_intermediate_size=32),
    _row("PhimoeForCausalLM", **{**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}, router_jitter_noise=0.0,
         input_jitter_noise=0.0),
    _row("GptOssForCausalLM", **_EXPERTS, sliding_window=4),
    _row("JetMoeForCausalLM", **{**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}, kv_channels=8),
    _row("Ernie4_5_MoeForCausalLM", **LLAMA, moe_num_experts=4, moe_k=2, moe_intermediate_size=16,
         moe_num_shared_experts=1, moe_layer_start_index=1),
    _row("DeepseekV2ForCausalLM", **{**LLAMA, "num_key_value_heads": HEADS}, moe_intermediate_size=16,
         n_routed_experts=4, num_experts_per_tok=2, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4,
         qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1, n_group=1, topk_group=1),
    _row("Glm4MoeForCausalLM", **_HEADS, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
         first_k_dense_replace=1, n_group=1, topk_group=1),
    # state spaces, recurrences, and their mixtures with attention
    _row("Mamba2ForCausalLM", vocab_size=VOCABULARY, hidden_size=WIDTH, state_size=4, num_hidden_layers=2, num_heads=8,
         head_dim=8, n_groups=2, chunk_size=8),
    _row("FalconMambaForCausalLM", vocab_size=VOCABULARY, hidden_size=WIDTH, state_size=4, num_hidden_layers=2),
    _row("RwkvForCausalLM", {"input_ids": TEXT["input_ids"], "labels": TEXT["labels"]}, vocab_size=VOCABULARY,
         hidden_size=WIDTH, attention_hidden_size=WIDTH, num_hidden_layers=2, context_length=32),
    _row("RecurrentGemmaForCausalLM", **{**_HEADS, "num_hidden_layers": 3}, lru_width=WIDTH, attention_window_size=8),
    _row("Lfm2ForCausalLM", **LLAMA, layer_types=["conv", "full_attention"], block_multiple_of=8),
    _row("Qwen3NextForCausalLM", **_EXPERTS, layer_types=["linear_attention", "full_attention"],
         linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
         shared_expert_intermediate_size=16),
    _row("BambaForCausalLM", **LLAMA, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1,
         mamba_d_state=4, mamba_chunk_size=8),
    # encoders of text
    _row("ElectraForSequenceClassification", FLAT, **_ENCODER, embedding_size=16, num_labels=3),
    _row("MPNetForMaskedLM", **_ENCODER),
    _row("XLMRobertaForMaskedLM", **_ENCODER),
    _row("CamembertForSequenceClassification", FLAT, **_ENCODER, num_labels=3),
    _row("RobertaPreLayerNormForMaskedLM", **_ENCODER),
    _row("ErnieForMaskedLM", **_ENCODER),
    _row("MegatronBertForMaskedLM", **_ENCODER),
    _row("RoFormerForMaskedLM", **_ENCODER),
    _row("ConvBertForMaskedLM", **_ENCODER, embedding_size=16),
    _row("SqueezeBertForMaskedLM", **_ENCODER, embedding_size=WIDTH),
    _row("MobileBertForMaskedLM", **{**_ENCODER, "hidden_size": 32}, embedding_size=16, intra_bottleneck_size=16,
         num_feedforward_networks=2),
    _row("NystromformerForMaskedLM", **_ENCODER, num_landmarks=4, segment_means_seq_len=12),
    _row("FNetForMaskedLM", {"input_ids": TEXT["input_ids"], "labels": TEXT["labels"]},
         **{key: value for key, value in _ENCODER.items() if key != "num_attention_heads"}),
    _row("ModernBertForMaskedLM", **_ENCODER, cls_token_id=1, sep_token_id=2, local_attention=8,
         bos_token_id=1, eos_token_id=2),
    _row("EuroBertForMaskedLM", **LLAMA),
    _row("XmodForMaskedLM", **_ENCODER, languages=["en"], default_language="en"),
    _row("RemBertForMaskedLM", **_ENCODER, input_embedding_size=16, output_embedding_size=16),
    _row("DebertaForMaskedLM", **_ENCODER),
    _row("XLNetForSequenceClassification", FLAT, vocab_size=VOCABULARY, d_model=WIDTH, n_layer=2, n_head=HEADS,
         d_inner=48, num_labels=3),
    _row("FunnelForMaskedLM", vocab_size=VOCABULARY, d_model=WIDTH, n_head=HEADS, d_head=8, d_inner=48,
         block_sizes=[1, 1], num_decoder_layers=1),
    _row("LongformerForMaskedLM", **_ENCODER, attention_window=4),
    _row("BigBirdForMaskedLM", **_ENCODER, attention_type="original_full"),
    _row("EsmForMaskedLM", **_ENCODER, mask_token_id=3),
    _row("CanineForSequenceClassification", {"input_ids": classes(64, 16), "labels": classes(3)}, hidden_size=WIDTH,
         intermediate_size=48, num_hidden_layers=2, num_attention_heads=HEADS, max_position_embeddings=64,
         downsampling_rate=2, num_hash_functions=4, num_hash_buckets=16, local_transformer_stride=8, num_labels=3),
    # encoders with decoders
    _row("MBartForConditionalGeneration", **_PAIRS),
    _row("PegasusForConditionalGeneration", **_PAIRS),
    _row("BlenderbotForConditionalGeneration", **_PAIRS),
    _row("MarianMTModel", **_PAIRS),
    _row("M2M100ForConditionalGeneration", **_PAIRS),
    _row("PLBartForConditionalGeneration", **_PAIRS),
    _row("LEDForConditionalGeneration", **{key: value for key, value in _PAIRS.items()
         if key != "max_position_embeddings"}, attention_window=4, max_encoder_position_embeddings=32,
         max_decoder_position_embeddings=32),
    _row("ProphetNetForConditionalGeneration", vocab_size=VOCABULARY, hidden_size=WIDTH, encoder_ffn_dim=48,
         num_encoder_layers=2, num_encoder_attention_heads=HEADS, decoder_ffn_dim=48, num_decoder_layers=2,
         num_decoder_attention_heads=HEADS, max_position_embeddings=32, decoder_start_token_id=1, pad_token_id=0,
         disable_ngram_loss=False),
    _row("MT5ForConditionalGeneration", **_T5),
    _row("UMT5ForConditionalGeneration", **_T5),
    _row("LongT5ForConditionalGeneration", **_T5, local_radius=4),
    _row("SwitchTransformersForConditionalGeneration", **_T5, num_experts=4, expert_capacity=64,
         router_jitter_noise=0.0),
    # images
    _row("ViTForImageClassification", IMAGES, **_VISION),
    _row("DeiTForImageClassification", IMAGES, **_VISION),
    _row("BeitForImageClassification", IMAGES, **_VISION),
    _row("Data2VecVisionForImageClassification", IMAGES, **_VISION),
    _row("Dinov2ForImageClassification", IMAGES, **_VISION),
    _row("Dinov2WithRegistersForImageClassification", IMAGES, **_VISION),
    _row("ViTMSNForImageClassification", IMAGES, **_VISION),
    _row("IJepaForImageClassification", IMAGES, **_VISION),
    _row("SiglipForImageClassification", IMAGES, vision_config={key: value for key, value in _VISION.items()
         if key != "num_labels"}, num_labels=CLASSES),
    _row("Swinv2ForImageClassification", IMAGES, **_WINDOWS),
    _row("DonutSwinForImageClassification", IMAGES, **_WINDOWS),
    _row("HieraForImageClassification", {"pixel_values": floats(3, 32, 32), "labels": classes(CLASSES)},
         image_size=[32, 32], embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], num_labels=CLASSES),
    _row("PvtForImageClassification", {"pixel_values": floats(3, 32, 32), "labels": classes(CLASSES)}, image_size=32,
         hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4], num_labels=CLASSES),
    _row("SegformerForImageClassification", {"pixel_values": floats(3, 32, 32), "labels": classes(CLASSES)},
         hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4], num_labels=CLASSES),
    _row("MobileViTForImageClassification", {"pixel_values": floats(3, 32, 32), "labels": classes(CLASSES)},
         sequence=False, image_size=32, hidden_sizes=[16, 16, 16], neck_hidden_sizes=[8, 8, 8, 16, 16, 16, 32],
         num_attention_heads=2, num_labels=CLASSES),
    _row("PoolFormerForImageClassification", {"pixel_values": floats(3, 32, 32), "labels": classes(CLASSES)},
         sequence=False, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], num_labels=CLASSES),
    _row("ResNetForImageClassification", {"pixel_values": floats(3, 32, 32), "labels": classes(CLASSES)},
         sequence=False, embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], num_labels=CLASSES),
    _row("ConvNextV2ForImageClassification", {"pixel_values": floats(3, 32, 32), "labels": classes(CLASSES)},
         sequence=False, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], num_labels=CLASSES),
    _row("RegNetForImageClassification", {"pixel_values": floats(3, 32, 32), "labels": classes(CLASSES)},
         sequence=False, embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], groups_width=8,
         num_labels=CLASSES),
    _row("VideoMAEForVideoClassification", {"pixel_values": floats(4, 3, 16, 16), "labels": classes(CLASSES)},
         **_VISION, num_frames=4, tubelet_size=2),
    _row("TimesformerForVideoClassification", {"pixel_values": floats(2, 3, 16, 16), "labels": classes(CLASSES)},
         **_VISION, num_frames=2),
    # sound, series, and several kinds of input
    _row("ASTForAudioClassification", {"input_values": floats(16, 16), "labels": classes(CLASSES)}, **{
         key: value for key, value in _VISION.items() if key != "image_size"}, max_length=16, num_mel_bins=16,
         frequency_stride=4, time_stride=4),
    _row("Wav2Vec2ForSequenceClassification", {"input_values": floats(320), "labels": classes(3)}, **_SPEECH),
    _row("HubertForSequenceClassification", {"input_values": floats(320), "labels": classes(3)}, **_SPEECH),
    _row("WavLMForSequenceClassification", {"input_values": floats(320), "labels": classes(3)}, **_SPEECH),
    _row("Speech2TextForConditionalGeneration", {"input_features": floats(24, 8), "labels": TEXT["labels"]}, **{
         key: value for key, value in _PAIRS.items() if key != "max_position_embeddings"}, input_feat_per_channel=8,
         conv_channels=16, max_source_positions=64, max_target_positions=32),
    _row("PatchTSTForPrediction", {"past_values": floats(16, 2), "future_values": floats(4, 2)}, num_input_channels=2,
         context_length=16, patch_length=4, patch_stride=4, prediction_length=4, d_model=16, num_hidden_layers=2,
         num_attention_heads=2, ffn_dim=32),
    _row("PatchTSMixerForPrediction", {"past_values": floats(16, 2), "future_values": floats(4, 2)},
         num_input_channels=2, context_length=16, patch_length=4, patch_stride=4, prediction_length=4, d_model=16,
         num_layers=2),
    _row("TimeSeriesTransformerForPrediction", {"past_values": floats(10), "past_time_features": floats(10, 1),
         "past_observed_mask": ones(10), "future_values": floats(4), "future_time_features": floats(4, 1)}, **_SERIES),
    _row("SiglipModel", {"input_ids": classes(VOCABULARY, 8), "pixel_values": floats(3, 16, 16)}, _matched,
         text_config={**_ENCODER, "max_position_embeddings": 8, "projection_size": WIDTH},
         vision_config={key: value for key, value in _VISION.items() if key != "num_labels"}),
    _row("BlipForConditionalGeneration",
         {"pixel_values": floats(3, 16, 16), "input_ids": TEXT["input_ids"], "labels": TEXT["labels"]},
         text_config={**_ENCODER, "bos_token_id": 1, "sep_token_id": 2, "encoder_hidden_size": WIDTH},
         vision_config={key: value for key, value in _VISION.items() if key != "num_labels"}),
    _row("GitForCausalLM", {"pixel_values": floats(3, 16, 16), "input_ids": TEXT["input_ids"],
         "labels": TEXT["labels"]}, **_ENCODER,
         vision_config={key: value for key, value in _VISION.items() if key != "num_labels"}),
]  # fmt: skip
