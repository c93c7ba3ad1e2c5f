"""Audio codecs of transformers, which compute sizes from integers in their buffers."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

import jtbridge

transformers = pytest.importorskip("transformers")


def encodec() -> torch.nn.Module:
    sizes = {"hidden_size": 16, "num_filters": 4, "codebook_size": 32, "codebook_dim": 16, "num_lstm_layers": 1}
    return transformers.EncodecModel(transformers.EncodecConfig(**sizes, upsampling_ratios=[4, 2]))


def mimi() -> torch.nn.Module:
    sizes = {"hidden_size": 32, "num_filters": 4, "upsampling_ratios": [4, 2], "frame_rate": 1500.0}
    codes = {"codebook_size": 32, "codebook_dim": 8, "vector_quantization_hidden_dimension": 8, "num_quantizers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "num_hidden_layers": 1}
    config = transformers.MimiConfig(**sizes, **codes, **heads, intermediate_size=32, upsample_groups=32)
    return transformers.MimiModel(config)


@pytest.mark.parametrize("make", [encodec, mimi])
def test_codec_with_sizes_in_buffers_is_translated(make):
    torch.manual_seed(0)
    model = make().eval()
    x = torch.randn(1, 1, 200)
    want = model(x).audio_values  # before `init`: the first call of Mimi makes tensors
    net = jtbridge.module(model)
    params, state = net.init()

    def decoded(params, x):
        return net(params, state, x)[0]["audio_values"]

    lowered = jax.jit(decoded).lower(params, x.numpy())
    assert "callback" not in lowered.as_text()
    np.testing.assert_allclose(lowered.compile()(params, x.numpy()), want.detach(), atol=1e-5)
    gradients = jax.jit(jax.grad(lambda params, x: decoded(params, x).sum()))(params, x.numpy())
    want.sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            np.testing.assert_allclose(gradients[name], parameter.grad, rtol=1e-3, atol=1e-4)
