"""Small language models of transformers with random weights, one of each kind of generating model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import jtbridge

transformers.logging.set_verbosity_error()
IGNORED_WARNINGS = [
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _made(model: str, config: str, scale: float = 1.0, **options: Any) -> Any:
    """Return a model with large random weights and an untied output layer, so that it generates different tokens."""
    torch.manual_seed(0)
    options = {**ENDS, "tie_word_embeddings": False, **options}
    made = getattr(transformers, model)(getattr(transformers, config)(**options)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, scale / parameter.shape[-1] ** 0.5)
    return made


def gpt2() -> Any:
    return _made("GPT2LMHeadModel", "GPT2Config", vocab_size=64, n_positions=128, n_embd=32, n_layer=2, n_head=2)


def opt() -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return _made("OPTForCausalLM", "OPTConfig", **sizes, max_position_embeddings=128, word_embed_proj_dim=32)


def llama() -> Any:
    return _made("LlamaForCausalLM", "LlamaConfig", **SIZES, **HEADS)


def qwen3() -> Any:
    return _made("Qwen3ForCausalLM", "Qwen3Config", **SIZES, **HEADS, head_dim=8)


def mistral() -> Any:
    """Return a model with a window that the prompts of the tests fill, at once or during generation."""
    return _made("MistralForCausalLM", "MistralConfig", **SIZES, **HEADS, sliding_window=12)


def gemma3() -> Any:
    types = ["sliding_attention", "full_attention"]
    options = {"head_dim": 8, "sliding_window": 12, "layer_types": types}
    return _made("Gemma3ForCausalLM", "Gemma3TextConfig", **SIZES, **HEADS, **options)


def phi() -> Any:
    return _made("PhiForCausalLM", "PhiConfig", **SIZES, num_attention_heads=4, max_position_embeddings=128)


def mixtral() -> Any:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    return _made("MixtralForCausalLM", "MixtralConfig", **SIZES, **HEADS, **experts)


def mamba() -> Any:
    return _made("MambaForCausalLM", "MambaConfig", vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8)


MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4}


def bamba() -> Any:
    """Layers of attention beside layers with recurrent states."""
    return _made("BambaForCausalLM", "BambaConfig", **SIZES, **HEADS, **MAMBA2, attn_layer_indices=[1])


def falcon_h1() -> Any:
    """Attention and recurrent states in each layer."""
    return _made("FalconH1ForCausalLM", "FalconH1Config", **SIZES, **HEADS, **MAMBA2, head_dim=8, mamba_d_ssm=64)


def zamba2() -> Any:
    """Attention and recurrent states in some layers, and recurrent states alone in others."""
    types = {"layers_block_type": ["mamba", "mamba", "hybrid"], "adapter_rank": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "attention_hidden_size": 64, "attention_head_dim": 16}
    states = {"mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_headdim": 8, "chunk_size": 4}
    sizes = {**SIZES, "num_hidden_layers": 3, "max_position_embeddings": 128}
    return _made("Zamba2ForCausalLM", "Zamba2Config", **sizes, **heads, **states, **types)


def zaya() -> Any:
    """Recurrent states beside full attention, and beside a window."""
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "router_hidden_size": 16}
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8, "sliding_window": 12}
    return _made("ZayaForCausalLM", "ZayaConfig", **sizes, **HEADS, **experts, layer_types=["hybrid_sliding", "hybrid"])


def t5() -> Any:
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return _made("T5ForConditionalGeneration", "T5Config", 2.0, **sizes, decoder_start_token_id=0)


BART = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "vocab_size": 64,
    "d_model": 32,
    "max_position_embeddings": 128,
    "decoder_start_token_id": 1,
}


def bart() -> Any:
    return _made("BartForConditionalGeneration", "BartConfig", **BART)


def m2m100() -> Any:
    """A table of positions that grows in torch, and is a buffer."""
    return _made("M2M100ForConditionalGeneration", "M2M100Config", **BART)


def moonshine() -> Any:
    """Return a model with an encoder of sound, which passes its mask to the decoder."""
    heads = {"encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4}
    layers = {"encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2, "decoder_start_token_id": 1}
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 128}
    return _made("MoonshineForConditionalGeneration", "MoonshineConfig", **sizes, **heads, **layers)


CAUSAL: dict[str, Callable[[], Any]] = {
    "gpt2": gpt2,
    "opt": opt,
    "llama": llama,
    "qwen3": qwen3,
    "mistral": mistral,
    "gemma3": gemma3,
    "phi": phi,
    "mixtral": mixtral,
    "mamba": mamba,
    "bamba": bamba,
    "falcon_h1": falcon_h1,
    "zamba2": zamba2,
    "zaya": zaya,
}
WITH_ENCODER: dict[str, Callable[[], Any]] = {"t5": t5, "bart": bart, "m2m100": m2m100}


def net_of(make: Callable[[], Any]) -> tuple[Any, Any, Any, Any]:
    """Return a model, the model as a JAX module, and the module's parameters and state."""
    model = make()
    net = jtbridge.module(model)
    return model, net, *net.init()


def prompts(length: int, rows: int = 3, seed: int = 0) -> np.ndarray:
    """Return random tokens of shape ``(rows, length)``."""
    return np.random.default_rng(seed).integers(3, 64, (rows, length))


def torch_tokens(model: Any, ids: np.ndarray, mask: np.ndarray | None = None, **options: Any) -> np.ndarray:
    """Return the tokens that transformers generates, padded to the largest possible number."""
    given = {} if mask is None else {"attention_mask": torch.from_numpy(mask)}
    with torch.no_grad():
        tokens = model.generate(torch.from_numpy(ids), **{"do_sample": False, **given, **options}).numpy()
    start = 1 if model.config.is_encoder_decoder else ids.shape[1]
    padded = np.zeros((tokens.shape[0], start + options["max_new_tokens"]), tokens.dtype)
    padded[:, : tokens.shape[1]] = tokens
    return padded
