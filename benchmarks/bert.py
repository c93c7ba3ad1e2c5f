"""A transformer of BERT-base's width, four layers, 8 x 128 tokens: what a call costs beside real work."""

from functools import cache
from typing import Any

import jax
import torch

from benchmarks._contestants import wrap_all
from benchmarks._measure import interleaved
from benchmarks._results import TORCH, Calls, Options, Row

_GRAD_MODE = "torch, recording gradients"


@cache
def _setup() -> tuple[torch.nn.Module, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    model = BertModel(BertConfig(num_hidden_layers=4), add_pooling_layer=False).eval()
    lengths = torch.randint(64, 129, (8, 1))
    mask = (torch.arange(128) < lengths).long()
    return model, dict(model.named_parameters()), torch.randint(0, 30_000, (8, 128)), mask


def _hidden(params: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(_setup()[0], params, (ids, mask)).last_hidden_state


def _loss(params: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return _hidden(params, ids, mask).sin().mean()


def _milliseconds(calls: Calls, options: Options) -> dict:
    times = interleaved(calls, rounds=3 if options.quick else 12, clock=options.clock)
    return {name: 1e3 * t if isinstance(t, float) else t for name, t in times.items()}


def forward(options: Options) -> Row:
    """The last hidden state. The parameters are arguments, as JAX wants them."""
    model, params, ids, mask = _setup()

    def eager() -> torch.Tensor:
        return model(ids, mask).last_hidden_state

    calls = wrap_all(_hidden, params, ids, mask)
    calls[_GRAD_MODE] = lambda: eager().detach()
    calls[TORCH] = torch.no_grad()(eager)
    cells = _milliseconds(calls, options)
    recording = cells.pop(_GRAD_MODE)
    note = f"bert-forward: torch is measured under no_grad; recording gradients it takes {recording:.0f} ms"
    return Row("bert-forward", "BERT width, 4 layers, 8 x 128: forward", "ms", cells, TORCH, 1.03, [note])


def gradient(options: Options) -> Row:
    """Of a scalar with respect to every parameter; torch runs forward and backward."""
    _, params, ids, mask = _setup()
    names = sorted(params)  # the order in which JAX flattens a dict

    def eager() -> list[torch.Tensor]:
        return list(torch.autograd.grad(_loss(params, ids, mask), [params[name] for name in names]))

    calls = wrap_all(_loss, params, ids, mask, then=lambda f: jax.jit(jax.grad(f)))
    calls[TORCH] = eager
    title = "BERT width, 4 layers, 8 x 128: gradient"
    return Row("bert-gradient", title, "ms", _milliseconds(calls, options), TORCH, 1.03)


ROWS = {"bert-forward": forward, "bert-gradient": gradient}
