"""Encoder-decoder models of text."""

from __future__ import annotations

from typing import Any

from .decoders import GROUPED
from .row import Inputs, Row, configuration, padded, tokens

BART: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}


def _both() -> Inputs:
    return {**padded(), **tokens(6, name="decoder_input_ids", seed=3)}


def _t5gemma() -> Any:
    part = {**GROUPED, "head_dim": 8, "sliding_window": 4}
    return configuration("T5GemmaConfig", encoder=part, decoder=part, vocab_size=64)


ROWS = {
    "bart": Row("BartForConditionalGeneration", BART, _both),
    "led": Row(
        "LEDForConditionalGeneration",
        {
            **BART,
            "attention_window": 4,
            "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
        },
        lambda: {**tokens(16), **tokens(6, name="decoder_input_ids", seed=3)},
    ),
    "longt5": Row(
        "LongT5ForConditionalGeneration", {**T5, "local_radius": 3, "encoder_attention_type": "local"}, _both
    ),
    "pegasus": Row("PegasusForConditionalGeneration", BART, _both),
    "prophetnet": Row(
        "ProphetNetForConditionalGeneration",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "max_position_embeddings": 64,
        },
        _both,
    ),
    "t5": Row("T5ForConditionalGeneration", T5, _both),
    "t5gemma": Row("T5GemmaForConditionalGeneration", _t5gemma, _both),
    "umt5": Row("UMT5ForConditionalGeneration", T5, _both),
}
