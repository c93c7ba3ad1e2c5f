"""Inputs that are errors in PyTorch's own test suite: torch refuses them, and so does jtbridge under jit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
import torch
from torch.testing._internal.common_modules import ModuleErrorEnum, module_db
from torch.utils import _pytree as torch_pytree

import jtbridge

from .convert import jax_unsupported_reason, plain, to_jax
from .samples import operators

VALUES = "torch looks at values; a compiled program cannot raise, and gives an invalid value"
OUT = "the dtype of `out=`: the program converts to it"
# Inputs that jtbridge does not refuse: the operator or module, and the position of the input.
NOT_REFUSED: dict[tuple[str, int], str] = {
    ("complex", 2): OUT,
    ("gather", 4): VALUES,
    ("multinomial", 2): OUT,
    ("nn.Embedding", 0): VALUES,
    **{("multinomial", i): VALUES for i in range(7, 21)},
    ("scatter", 3): VALUES,
    ("scatter_add", 3): VALUES,
}
OPERATORS = {name: info for name, info in operators().items() if info.error_inputs_func is not None}
MODULES = [info for info in module_db if info.module_error_inputs_func is not None]


def as_function(op: Callable[..., Any], *arguments: Any) -> tuple[Callable[..., Any], list[torch.Tensor]] | None:
    """Return a call of `op` as a function of its tensors; None if JAX has no arrays for them."""
    leaves, tree = torch_pytree.tree_flatten(arguments)
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if any(jax_unsupported_reason(leaves[i]) or leaves[i].dim() > 32 for i in at):
        return None

    def function(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for i, tensor in zip(at, tensors, strict=True):
            filled[i] = tensor
        args, kwargs = torch_pytree.tree_unflatten(filled, tree)
        return op(*args, **kwargs)

    return function, [plain(leaves[i]) for i in at]


def is_refused(function: Callable[..., Any], tensors: list[torch.Tensor]) -> bool:
    key = jax.random.key(0)
    wrapped = jtbridge.wrap(function)
    try:
        jax.block_until_ready(jax.jit(lambda *arrays: wrapped(*arrays, rng=key))(*map(to_jax, tensors)))
    except Exception:  # noqa: BLE001  (any refusal)
        return True
    return False


def refused_by_torch(calls: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Yield the calls that JAX has arrays for, and that torch refuses if its arguments are contiguous."""
    for number, call in calls:
        if call is None:
            continue
        function, tensors = call
        try:
            function(*[tensor.clone() for tensor in tensors])
        except Exception:  # noqa: BLE001
            yield number, call


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_refuse_error_inputs(name: str, x64: None):
    info = OPERATORS[name]
    try:
        found = [(i, error.sample_input) for i, error in enumerate(info.error_inputs("cpu"))]
    except Exception as error:  # noqa: BLE001
        pytest.skip(f"torch cannot make its inputs: {error}")
    calls = ((i, as_function(info.op, (x.input, *x.args), x.kwargs)) for i, x in found)
    accepted = [i for i, call in refused_by_torch(calls) if not is_refused(*call)]
    assert accepted == [i for operator, i in NOT_REFUSED if operator == name]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("info", MODULES, ids=lambda info: info.name)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_modules_refuse_error_inputs(info: Any, training: bool, x64: None):
    errors = info.module_error_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=False, training=training
    )
    accepted = []
    for number, error in enumerate(errors):
        if error.error_on is not ModuleErrorEnum.FORWARD_ERROR:
            continue
        built, inputs = error.module_error_input.constructor_input, error.module_error_input.forward_input
        module = info.module_cls(*built.args, **built.kwargs).train(training)
        calls = iter([(number, as_function(module, inputs.args, inputs.kwargs))])
        accepted += [i for i, call in refused_by_torch(calls) if not is_refused(*call)]
    assert accepted == [i for module, i in NOT_REFUSED if module == info.name]
