"""Generation by models whose rotary positions depend on the length of a sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import ModelError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
KINDS: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 2.0},
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32},
}


@pytest.mark.parametrize("kind", KINDS)
def test_length_dependent_positions_that_change_are_refused_unless_fixed(kind: str):
    torch.manual_seed(0)
    rope = {"rope_type": kind, "rope_theta": 10000.0, **KINDS[kind]}
    config = transformers.LlamaConfig(
        **SIZES, num_attention_heads=4, max_position_embeddings=64, rope_parameters=rope, tie_word_embeddings=False
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = np.array([[5, 9, 21, 33]])
    net = jtbridge.module(model)
    with pytest.raises(ModelError, match=f"`model.rotary_emb` changes the frequencies.*is '{kind}'.*= \"default\"`"):
        jtbridge.generate(net, *net.init(), ids, max_new_tokens=6)
    expected = model.generate(torch.from_numpy(ids), max_new_tokens=6, do_sample=False, pad_token_id=0)
    model.get_submodule("model.rotary_emb").rope_type = "default"
    tokens = jtbridge.generate(net, *net.init(), ids, max_new_tokens=6)
    np.testing.assert_array_equal(tokens, expected)
