"""Models of speech and sound."""

from __future__ import annotations

from typing import Any

from .row import Inputs, Row, noise, tokens

WAV2VEC2: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": [16, 16],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 4],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}
WHISPER: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def _wave() -> Inputs:
    return noise("input_values", 2, 400)


def _decoded(inputs: Inputs) -> Inputs:
    return {**inputs, **tokens(6, name="decoder_input_ids", seed=3)}


ROWS = {
    "audio_spectrogram_transformer": Row(
        "ASTForAudioClassification",
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "patch_size": 8,
            "frequency_stride": 8,
            "time_stride": 8,
            "max_length": 32,
            "num_mel_bins": 16,
        },
        lambda: noise("input_values", 2, 32, 16),
    ),
    "hubert": Row("HubertForCTC", WAV2VEC2, _wave),
    "moonshine": Row(
        "MoonshineForConditionalGeneration",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 2,
            "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4,
        },
        lambda: _decoded(noise("input_values", 2, 2000)),
    ),
    "speech_to_text": Row(
        "Speech2TextForConditionalGeneration",
        {**WHISPER, "input_feat_per_channel": 8, "conv_channels": 16, "max_source_positions": 64},
        lambda: _decoded(noise("input_features", 2, 32, 8)),
    ),
    "wav2vec2": Row("Wav2Vec2ForCTC", WAV2VEC2, _wave),
    "wav2vec2_bert": Row(
        "Wav2Vec2BertForCTC",
        {**WAV2VEC2, "feature_projection_input_dim": 16, "conv_depthwise_kernel_size": 3},
        lambda: noise("input_features", 2, 12, 16),
    ),
    "wav2vec2_conformer": Row("Wav2Vec2ConformerForCTC", {**WAV2VEC2, "conv_depthwise_kernel_size": 3}, _wave),
    "wavlm": Row("WavLMForCTC", WAV2VEC2, _wave),
    "whisper": Row(
        "WhisperForConditionalGeneration",
        {**WHISPER, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16},
        lambda: _decoded(noise("input_features", 2, 8, 32)),
    ),
}
