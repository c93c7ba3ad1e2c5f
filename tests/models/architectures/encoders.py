"""Encoders of text."""

from __future__ import annotations

from typing import Any

from .decoders import SIZES
from .row import Inputs, Row, padded, tokens

BERT: dict[str, Any] = {**SIZES, "type_vocab_size": 2}


def _long() -> Inputs:
    return tokens(16)


ROWS = {
    "albert": Row("AlbertForMaskedLM", {**BERT, "embedding_size": 16}, padded),
    "bert": Row("BertForMaskedLM", BERT, padded),
    "big_bird": Row(
        "BigBirdForMaskedLM",
        {
            **BERT,
            "attention_type": "block_sparse",
            "block_size": 4,
            "num_random_blocks": 1,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
        lambda: tokens(32),
    ),
    "canine": Row(
        "CanineModel",
        {
            **BERT,
            "downsampling_rate": 2,
            "num_hash_functions": 2,
            "num_hash_buckets": 16,
            "local_transformer_stride": 8,
        },
        _long,
    ),
    "convbert": Row("ConvBertForMaskedLM", {**BERT, "embedding_size": 16, "conv_kernel_size": 3}, padded),
    "deberta": Row(
        "DebertaForMaskedLM",
        {**BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False},
        padded,
    ),
    "deberta_v2": Row(
        "DebertaV2ForMaskedLM",
        {**BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4},
        padded,
    ),
    "distilbert": Row(
        "DistilBertForMaskedLM",
        {"vocab_size": 64, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64},
        padded,
    ),
    "electra": Row("ElectraForPreTraining", {**BERT, "embedding_size": 16}, padded),
    "esm": Row("EsmForMaskedLM", {**BERT, "position_embedding_type": "rotary", "mask_token_id": 3}, padded),
    "fnet": Row("FNetForMaskedLM", BERT, tokens),
    "funnel": Row(
        "FunnelForMaskedLM",
        {"vocab_size": 64, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64, "block_sizes": [1, 1]},
        tokens,
    ),
    "longformer": Row("LongformerForMaskedLM", {**BERT, "attention_window": [4], "num_hidden_layers": 1}, _long),
    "mobilebert": Row(
        "MobileBertForMaskedLM",
        {**BERT, "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
        padded,
    ),
    "modernbert": Row(
        "ModernBertForMaskedLM",
        {**SIZES, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2, "global_attn_every_n_layers": 2},
        padded,
    ),
    "mpnet": Row("MPNetForMaskedLM", SIZES, padded),
    "nystromformer": Row("NystromformerForMaskedLM", {**BERT, "num_landmarks": 4, "segment_means_seq_len": 16}, _long),
    "perceiver": Row(
        "PerceiverForMaskedLM",
        {
            "vocab_size": 64,
            "d_model": 32,
            "d_latents": 32,
            "num_latents": 8,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 4,
            "num_cross_attention_heads": 4,
            "max_position_embeddings": 16,
        },
        lambda: tokens(16, name="inputs"),
    ),
    "roberta": Row("RobertaForMaskedLM", BERT, padded),
    "roformer": Row("RoFormerForMaskedLM", {**BERT, "embedding_size": 32}, padded),
    "squeezebert": Row("SqueezeBertForMaskedLM", {**BERT, "embedding_size": 32}, padded),
    "xlm": Row(
        "XLMWithLMHeadModel", {"n_words": 64, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "pad_index": 0}, tokens
    ),
    "xlnet": Row(
        "XLNetLMHeadModel", {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}, tokens
    ),
    "yoso": Row("YosoForMaskedLM", {**BERT, "use_expectation": True}, padded),
}
