"""Greedy generation by language models: `jtbridge.generate` beside `model.generate`, with both kinds of cache.

``llama``: 8 layers, 256 wide. ``smollm2``: the sizes of SmolLM2-135M. Both have random weights.
"""

import os
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import torch

from benchmarks._measure import CLOCKS, interleaved, minimum_of_children
from benchmarks._results import TORCH, XLA, Calls, Cell, Options, Row, Target

_STATIC = "torch, static cache"
_PROMPT, _NEW = 16, 128


@cache
def _model(name: str) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(_config(transformers.LlamaConfig, name)).eval()
    model.generation_config.eos_token_id = None  # every contestant makes all tokens
    model.generation_config.pad_token_id = 0
    return model


def _config(kind: Any, name: str) -> Any:
    if name == "llama":
        heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
        return kind(vocab_size=1024, hidden_size=256, intermediate_size=688, num_hidden_layers=8, **heads)
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    return kind(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, **heads)


def _prompts(batch: int) -> np.ndarray:
    return np.random.default_rng(0).integers(5, 1000, (batch, _PROMPT))


def decode(name: str, batch: int, target: float, options: Options) -> Row:
    """Time the generation of a token for all rows of a batch. All contestants must generate the same tokens."""
    import jtbridge

    model, ids = _model(name), _prompts(batch)
    net = jtbridge.module(model)
    params, state = net.init()

    def of_torch(**settings: Any) -> np.ndarray:
        with torch.no_grad():
            return model.generate(torch.from_numpy(ids), max_new_tokens=_NEW, do_sample=False, **settings).numpy()

    calls: Calls = {
        XLA: lambda: np.asarray(jtbridge.generate(net, params, state, ids, max_new_tokens=_NEW)),
        _STATIC: lambda: of_torch(cache_implementation="static"),
        TORCH: of_torch,
    }
    seconds = interleaved(calls, rounds=1 if options.quick else 3, clock=options.clock)
    cells: dict[str, Cell] = {
        contestant: 1e3 * cell / _NEW if isinstance(cell, float) else cell for contestant, cell in seconds.items()
    }
    targets = (Target(XLA, 1 / target, TORCH), Target(XLA, 1 / target, _STATIC))
    return Row(f"generate-{name}-{batch}", f"{name}: {_NEW} tokens, batch {batch}", "ms a token", cells, TORCH, targets)


def first_seconds(contestant: str, clock: str) -> float:
    """Return the seconds to trace, compile and run a first generation of SmolLM2. Call it in a fresh process."""
    import jtbridge

    net = jtbridge.module(_model("smollm2"))
    params, state = net.init()
    jax.block_until_ready(jax.jit(lambda x: x + 1)(np.ones(3)))
    del contestant
    start = CLOCKS[clock]()
    jax.block_until_ready(jtbridge.generate(net, params, state, _prompts(1), max_new_tokens=_NEW))
    return CLOCKS[clock]() - start


def first(options: Options) -> Row:
    """Time the first call, up to its last token."""
    repeats = 1 if options.quick else 3
    cells = minimum_of_children((XLA,), "generation.first_seconds", options.clock, repeats=repeats)
    return Row("generate-first", f"smollm2: first call, {_NEW} tokens", "s", cells)


ROWS = {
    "generate-llama-1": partial(decode, "llama", 1, 5.0),
    "generate-llama-8": partial(decode, "llama", 8, 5.0),
    "generate-smollm2-1": partial(decode, "smollm2", 1, 2.5),
    "generate-smollm2-8": partial(decode, "smollm2", 8, 2.5),
    "generate-first": first,
}
