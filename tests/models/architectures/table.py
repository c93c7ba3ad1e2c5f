"""The rows of all kinds."""

from __future__ import annotations

from collections.abc import Iterable

from . import (
    audio,
    decoders,
    encoder_decoders,
    encoders,
    experts,
    multimodal,
    state_space,
    time_series,
    vision,
)
from .row import Row

KINDS: dict[str, dict[str, Row]] = {
    "decoders": decoders.ROWS,
    "mixtures of experts": experts.ROWS,
    "state-space models and hybrids": state_space.ROWS,
    "encoders": encoders.ROWS,
    "encoders and decoders": encoder_decoders.ROWS,
    "vision": vision.ROWS,
    "audio": audio.ROWS,
    "images and text": multimodal.ROWS,
    "time series": time_series.ROWS,
}
ROWS = {name: row for rows in KINDS.values() for name, row in rows.items()}

# Models that are called: two read sizes from tensors, and two convert a layer in the call, by `Module.to`.
CALLED = frozenset({"jetmoe", "nllb_moe", "smolvlm", "switch_transformers"})
# A model that draws in its call, also in eval mode: the order of the patches of an image. It needs a key.
REFUSED = frozenset({"vilt"})


def verdicts(names: Iterable[str]) -> dict[str, str]:
    """Return the verdict that each row must have."""
    special = dict.fromkeys(CALLED, "called") | dict.fromkeys(REFUSED, "error")
    return {name: special.get(name, "translated") for name in names}


# The models that CI compares: one of each kind, and the models with special requirements.
SAMPLE = (
    "gpt2",
    "gemma2",
    "mixtral",
    "gpt_oss",
    "mamba",
    "deberta_v2",
    "modernbert",
    "yoso",
    "t5",
    "swin",
    "wav2vec2",
    "qwen2_vl",
    "patchtst",
)
