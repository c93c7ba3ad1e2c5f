"""Mixtures of experts."""

from __future__ import annotations

from typing import Any

from .decoders import GROUPED, SIZES, WIDE
from .row import Row, tokens

EXPERTS: dict[str, Any] = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL: dict[str, Any] = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
LATENT: dict[str, Any] = {
    **ROUTED,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}


def _encoder_decoder() -> dict[str, Any]:
    return {**tokens(), **tokens(name="decoder_input_ids", seed=3)}


ROWS = {
    "deepseek_v2": Row("DeepseekV2ForCausalLM", {**LATENT, "topk_method": "greedy"}, tokens),
    "deepseek_v3": Row("DeepseekV3ForCausalLM", LATENT, tokens),
    "ernie4_5_moe": Row(
        "Ernie4_5_MoeForCausalLM", {**EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0}, tokens
    ),
    "gpt_oss": Row("GptOssForCausalLM", {**LOCAL, "head_dim": 8, "sliding_window": 4}, tokens),
    "granitemoe": Row("GraniteMoeForCausalLM", LOCAL, tokens),
    "jetmoe": Row(
        "JetMoeForCausalLM", {**LOCAL, "num_key_value_heads": 2, "kv_channels": 8, "num_attention_heads": 4}, tokens
    ),
    "llama4": Row(
        "Llama4ForCausalLM",
        {**LOCAL, "head_dim": 8, "intermediate_size_mlp": 64, "num_experts_per_tok": 1, "attention_chunk_size": 4},
        tokens,
    ),
    "minimax": Row("MiniMaxForCausalLM", {**LOCAL, "head_dim": 8, "block_size": 4}, tokens),
    "mixtral": Row("MixtralForCausalLM", {**LOCAL, "sliding_window": 4}, tokens),
    "nllb_moe": Row(
        "NllbMoeForConditionalGeneration",
        {
            "vocab_size": 64,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "num_experts": 4,
            "expert_capacity": 16,  # of this batch: the model stores it in an attribute
            "encoder_sparse_step": 2,
            "decoder_sparse_step": 2,
            "pad_token_id": 1,
            "decoder_start_token_id": 2,
        },
        _encoder_decoder,
    ),
    "olmoe": Row("OlmoeForCausalLM", EXPERTS, tokens),
    "phimoe": Row("PhimoeForCausalLM", LOCAL, tokens),
    "qwen2_moe": Row("Qwen2MoeForCausalLM", {**EXPERTS, "shared_expert_intermediate_size": 32}, tokens),
    "qwen3_moe": Row("Qwen3MoeForCausalLM", {**EXPERTS, **WIDE}, tokens),
    "switch_transformers": Row(
        "SwitchTransformersForConditionalGeneration",
        {
            "vocab_size": 64,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_sparse_encoder_layers": 1,
            "num_decoder_layers": 2,
            "num_sparse_decoder_layers": 1,
            "num_heads": 4,
            "num_experts": 4,
            "decoder_start_token_id": 0,
        },
        _encoder_decoder,
    ),
}
