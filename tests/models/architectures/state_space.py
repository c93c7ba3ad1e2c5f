"""State-space models, linear attention, and hybrids of these with attention."""

from __future__ import annotations

from .decoders import GROUPED, SIZES, WIDE
from .row import Row, tokens

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
MAMBA2 = {**SMALL, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4, "expand": 2}

ROWS = {
    "bamba": Row(
        "BambaForCausalLM",
        {
            **GROUPED,
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 4,
            "attn_layer_indices": [1],
        },
        tokens,
    ),
    "falcon_h1": Row(
        "FalconH1ForCausalLM",
        {
            **WIDE,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 4,
        },
        tokens,
    ),
    "falcon_mamba": Row("FalconMambaForCausalLM", SMALL, tokens),
    "granitemoehybrid": Row(
        "GraniteMoeHybridForCausalLM",
        {
            **GROUPED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 4,
        },
        tokens,
    ),
    "jamba": Row(
        "JambaForCausalLM",
        {
            **GROUPED,
            "num_experts": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        tokens,
    ),
    "lfm2": Row("Lfm2ForCausalLM", {**GROUPED, "layer_types": ["conv", "full_attention"]}, tokens),
    "mamba": Row("MambaForCausalLM", SMALL, tokens),
    "mamba2": Row("Mamba2ForCausalLM", MAMBA2, tokens),
    "nemotron_h": Row(
        "NemotronHForCausalLM",
        {
            **WIDE,
            "hybrid_override_pattern": "M*",
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 4,
        },
        tokens,
    ),
    "qwen3_next": Row(
        "Qwen3NextForCausalLM",
        {
            **WIDE,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
        tokens,
    ),
    "recurrent_gemma": Row(
        "RecurrentGemmaForCausalLM",
        {
            **GROUPED,
            "lru_width": 32,
            "attention_window_size": 4,
            "block_types": ["recurrent", "attention"],
        },
        tokens,
    ),
    "rwkv": Row(
        "RwkvForCausalLM", {**SMALL, "attention_hidden_size": 32, "context_length": 64, "use_cache": False}, tokens
    ),
    "zamba2": Row(
        "Zamba2ForCausalLM",
        {
            **SIZES,
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "layers_block_type": ["mamba", "mamba", "hybrid"],
            "hybrid_layer_ids": [2],
            "mamba_d_state": 8,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "chunk_size": 4,
            "adapter_rank": 8,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
        },
        tokens,
    ),
}
