"""Dense decoders of text."""

from __future__ import annotations

from typing import Any

from .row import Row, padded, tokens

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
GPT2: dict[str, Any] = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
WIDE: dict[str, Any] = {**GROUPED, "head_dim": 8}

ROWS = {
    "bloom": Row("BloomForCausalLM", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}, tokens),
    "cohere": Row("CohereForCausalLM", GROUPED, tokens),
    "cohere2": Row("Cohere2ForCausalLM", {**WIDE, "sliding_window": 4}, tokens),
    "exaone4": Row("Exaone4ForCausalLM", {**GROUPED, "sliding_window": 4, "sliding_window_pattern": 2}, tokens),
    "falcon": Row("FalconForCausalLM", {**SIZES, "new_decoder_architecture": False}, tokens),
    "gemma": Row("GemmaForCausalLM", WIDE, tokens),
    "gemma2": Row("Gemma2ForCausalLM", {**WIDE, "sliding_window": 4}, tokens),
    "gemma3": Row("Gemma3ForCausalLM", {**WIDE, "sliding_window": 4}, tokens),
    "glm4": Row("Glm4ForCausalLM", WIDE, tokens),
    "gpt2": Row("GPT2LMHeadModel", GPT2, padded),
    "gpt_neo": Row(
        "GPTNeoForCausalLM",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "max_position_embeddings": 64,
        },
        tokens,
    ),
    "gpt_neox": Row("GPTNeoXForCausalLM", SIZES, tokens),
    "gptj": Row("GPTJForCausalLM", {**GPT2, "rotary_dim": 4}, tokens),
    "llama": Row("LlamaForCausalLM", GROUPED, padded),
    "mistral": Row("MistralForCausalLM", {**GROUPED, "sliding_window": 4}, tokens),
    "mpt": Row("MptForCausalLM", {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4}, tokens),
    "nemotron": Row("NemotronForCausalLM", GROUPED, tokens),
    "olmo3": Row("Olmo3ForCausalLM", {**GROUPED, "sliding_window": 4}, tokens),
    "opt": Row("OPTForCausalLM", {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32}, padded),
    "phi": Row("PhiForCausalLM", GROUPED, tokens),
    "phi3": Row("Phi3ForCausalLM", {**GROUPED, "sliding_window": 4}, tokens),
    "qwen2": Row("Qwen2ForCausalLM", GROUPED, tokens),
    "qwen3": Row("Qwen3ForCausalLM", WIDE, padded),
    "stablelm": Row("StableLmForCausalLM", GROUPED, tokens),
    "starcoder2": Row("Starcoder2ForCausalLM", {**GROUPED, "sliding_window": 4}, tokens),
}
