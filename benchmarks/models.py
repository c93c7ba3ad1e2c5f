"""Transformers and layers: the cost of a call beside real work, and the gain of a translation."""

from functools import partial

import jax
import torch

from benchmarks._contestants import WRAPPERS, to_jax, wrap_all
from benchmarks._measure import CLOCKS, milliseconds, minimum_of_children
from benchmarks._networks import EXPERTS, IN_BFLOAT16, named, title
from benchmarks._results import DLPACK, ISLANDS, TORCH, TORCHAX, XLA, Options, Row, Target

_GRAD_MODE = "torch, recording gradients"
# Relative to the largest number in a result. By this measure, torch's gradients of biases in bfloat16 differ by 7 %
# from those in float32, and jtbridge's by 0.3 %.
_TOLERANCE, _TOLERANCE_OF_BFLOAT16 = 1e-3, 8e-2


def forward(name: str, targets: tuple[Target, ...], options: Options) -> Row:
    """Time the forward, which returns the last hidden state or the logits. The parameters are arguments."""
    model = named(name)

    def eager() -> torch.Tensor:
        return model.call(model.parameters, *model.inputs)

    calls = wrap_all(model.call, model.parameters, *model.inputs)
    calls[_GRAD_MODE] = lambda: eager().detach()
    calls[TORCH] = torch.no_grad()(eager)
    cells = milliseconds(calls, options, _tolerance(name))
    recording = cells.pop(_GRAD_MODE)
    note = f"{name}-forward: torch is measured under no_grad; recording gradients it takes {recording:.0f} ms"
    return Row(f"{name}-forward", f"{title(name)}: forward", "ms", cells, TORCH, targets, [note])


def gradient(name: str, targets: tuple[Target, ...], options: Options) -> Row:
    """Time the gradient of a scalar with respect to every parameter. Torch runs forward and backward."""
    model = named(name)
    names = sorted(model.parameters)  # the order in which JAX flattens a dict

    def eager() -> list[torch.Tensor]:
        loss = model.loss(model.parameters, *model.inputs)
        return list(torch.autograd.grad(loss, [model.parameters[key] for key in names]))

    calls = wrap_all(model.loss, model.parameters, *model.inputs, then=lambda f: jax.jit(jax.grad(f)))
    calls[TORCH] = eager
    cells = milliseconds(calls, options, _tolerance(name))
    return Row(f"{name}-gradient", f"{title(name)}: gradient", "ms", cells, TORCH, targets)


def _tolerance(name: str) -> float:
    return _TOLERANCE_OF_BFLOAT16 if name in IN_BFLOAT16 else _TOLERANCE


def capture_seconds(contestant: str, clock: str) -> float:
    """Return the seconds to capture the forward of BERT, after another capture. Call it in a fresh process."""
    import jtbridge

    model = named("bert")
    arrays = jax.tree.map(to_jax, (model.parameters, *model.inputs))
    jtbridge.explain(torch.sin, arrays[1])
    del contestant
    start = CLOCKS[clock]()
    jax.make_jaxpr(jtbridge.wrap(model.call, backend="xla"))(*arrays)
    return CLOCKS[clock]() - start


def first_seconds(contestant: str, clock: str) -> float:
    """Return the seconds to capture, compile and run the forward of BERT, without imports, in a fresh process."""
    import jtbridge  # noqa: F401

    model = named("bert")
    arrays = jax.tree.map(to_jax, (model.parameters, *model.inputs))
    jax.block_until_ready(jax.jit(lambda x: x + 1)(arrays[1]))
    function = WRAPPERS[contestant](model.call, model.parameters, *model.inputs)
    start = CLOCKS[clock]()
    jax.block_until_ready(jax.jit(function)(*arrays))
    return CLOCKS[clock]() - start


def capture(options: Options) -> Row:
    """Time the capture alone."""
    repeats = 2 if options.quick else 5
    cells = minimum_of_children((XLA,), "models.capture_seconds", options.clock, repeats=repeats)
    return Row("bert-capture", "capture of the BERT forward", "s", cells, targets=(Target(XLA, 0.5),))


def first(options: Options) -> Row:
    """Time everything up to the first result."""
    repeats = 1 if options.quick else 3
    cells = minimum_of_children((XLA, DLPACK, TORCHAX), "models.first_seconds", options.clock, repeats=repeats)
    what = "BERT forward: capture, compile, first run"
    return Row("bert-first", what, "s", cells, TORCHAX, (Target(XLA, 1.0, TORCHAX),))


def _targets(translated: float, called: float | None = None) -> tuple[Target, ...]:
    of_call = () if called is None else (Target(DLPACK, called, TORCH),)
    return (Target(XLA, translated, TORCH), Target(XLA, 1.0, TORCHAX), *of_call)


ROWS = {
    "bert-forward": partial(forward, "bert", _targets(0.65, 1.03)),
    "bert-gradient": partial(gradient, "bert", _targets(0.65, 1.03)),
    "bert-sentence-forward": partial(forward, "bert-sentence", _targets(0.65)),
    "bert-sentence-gradient": partial(gradient, "bert-sentence", _targets(0.65)),
    "llama-forward": partial(forward, "llama", _targets(0.33)),
    "llama-gradient": partial(gradient, "llama", _targets(0.45)),
    "llama-sentence-forward": partial(forward, "llama-sentence", _targets(0.33)),
    "llama-sentence-gradient": partial(gradient, "llama-sentence", _targets(0.45)),
    "bert-bfloat16-forward": partial(forward, "bert-bfloat16", (Target(ISLANDS, 1.0, TORCH),)),
    "bert-bfloat16-gradient": partial(gradient, "bert-bfloat16", (Target(ISLANDS, 1.0, TORCH),)),
    "lstm-forward": partial(forward, "lstm", (Target(ISLANDS, 1.1, TORCH), Target(DLPACK, 1.05, TORCH))),
    "lstm-gradient": partial(gradient, "lstm", (Target(ISLANDS, 1.1, TORCH), Target(DLPACK, 1.05, TORCH))),
    "attention-forward": partial(forward, "attention", (Target(ISLANDS, 1.0, TORCH),)),
    "attention-gradient": partial(gradient, "attention", (Target(ISLANDS, 1.0, TORCH),)),
    **{
        f"{name}-{kind}": partial(run, name, (Target(ISLANDS, 0.5, TORCH),))
        for name in EXPERTS
        for kind, run in (("forward", forward), ("gradient", gradient))
    },
    "bert-capture": capture,
    "bert-first": first,
}
