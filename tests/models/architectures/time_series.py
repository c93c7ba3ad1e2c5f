"""Models of time series and of trajectories."""

from __future__ import annotations

from typing import Any

import torch

from .row import Inputs, Row, noise

SERIES: dict[str, Any] = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2],
    "num_time_features": 2,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}
PATCHES: dict[str, Any] = {"context_length": 16, "prediction_length": 4, "patch_length": 4, "num_input_channels": 3}


def _series() -> Inputs:
    past = 8 + 2
    return {
        **noise("past_values", 2, past),
        **noise("past_time_features", 2, past, 2),
        "past_observed_mask": torch.ones(2, past),
        **noise("future_values", 2, 4),
        **noise("future_time_features", 2, 4, 2),
    }


def _channels() -> Inputs:
    return noise("past_values", 2, 16, 3)


def _trajectory() -> Inputs:
    return {
        **noise("states", 2, 5, 6),
        **noise("actions", 2, 5, 3),
        **noise("rewards", 2, 5, 1),
        **noise("returns_to_go", 2, 5, 1),
        "timesteps": torch.arange(5).repeat(2, 1),
        "attention_mask": torch.ones(2, 5, dtype=torch.int64),
    }


ROWS = {
    "autoformer": Row("AutoformerModel", {**SERIES, "moving_average": 3, "label_length": 2}, _series),
    "decision_transformer": Row(
        "DecisionTransformerModel",
        {"state_dim": 6, "act_dim": 3, "hidden_size": 32, "n_layer": 2, "n_head": 4, "max_ep_len": 16},
        _trajectory,
    ),
    "patchtsmixer": Row("PatchTSMixerForPrediction", {**PATCHES, "patch_stride": 4, "d_model": 16}, _channels),
    "patchtst": Row(
        "PatchTSTForPrediction",
        {**PATCHES, "patch_stride": 4, "d_model": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "ffn_dim": 64},
        _channels,
    ),
    "time_series_transformer": Row("TimeSeriesTransformerModel", SERIES, _series),
    "timesfm": Row(
        "TimesFmModelForPrediction",
        {
            "patch_length": 4,
            "context_length": 16,
            "horizon_length": 8,
            "hidden_size": 32,
            "intermediate_size": 32,
            "head_dim": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        lambda: noise("past_values", 2, 16),
    ),
}
