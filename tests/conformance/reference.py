"""Torch's own results in each mode: plain autograd, forward-mode AD, and a Python loop over rows.

Everything here is in torch's convention for complex gradients; see :mod:`.modes` for JAX's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

from .samples import NotApplicableError, Sample
from .trees import leaves, skeleton

Tensors = Sequence[torch.Tensor]

# Exceptions of torch if an operator or its derivative does not exist for these inputs or on this machine.
REFUSALS = (RuntimeError, ValueError, IndexError, AssertionError)
ROWS = 2


def inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def run(function: Callable[..., Any], tensors: Tensors) -> Any:
    try:
        return function(*(tensor.clone() for tensor in tensors))
    except REFUSALS as error:
        raise NotApplicableError(f"torch: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def differentiable_inputs(tensors: Tensors, attempt: Callable[[list[int]], Any]) -> tuple[list[int], Any]:
    """Return the float and complex inputs that torch can differentiate by, and the result of `attempt` for them.

    All at once if torch can; else those that it can alone, for one input without a derivative (a loss's target,
    say) makes torch refuse the others with it.
    """
    everything = [i for i, tensor in enumerate(tensors) if inexact(tensor)]
    if not everything:
        raise NotApplicableError("no float or complex input")
    try:
        return everything, attempt(everything)
    except REFUSALS as error:
        reason = one_line(error)
    alone = []
    for i in everything if len(everything) > 1 else []:
        try:
            attempt([i])
        except (NotApplicableError, *REFUSALS):
            continue
        alone.append(i)
    if not alone:
        raise NotApplicableError(f"torch: {reason}")
    try:
        return alone, attempt(alone)
    except REFUSALS as error:
        raise NotApplicableError(f"torch: {one_line(error)}") from error


def float_outputs(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor) and inexact(leaf)]


def leaf_variables(tensors: Tensors, where: Sequence[int]) -> list[torch.Tensor]:
    return [tensor.clone().requires_grad_(i in where) for i, tensor in enumerate(tensors)]


def _grad(outputs: Tensors, inputs: Tensors, cotangents: Tensors, create_graph: bool) -> list[torch.Tensor]:
    used = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if not used:
        raise NotApplicableError("torch: no output has a derivative by any input")
    grads = torch.autograd.grad(
        [output for output, _ in used],
        inputs,
        [cotangent for _, cotangent in used],
        allow_unused=True,
        create_graph=create_graph,
    )
    # An input that the outputs do not depend on has no gradient in torch and a zero one in JAX. A gradient in
    # torch's sparse layout is compared as the dense one it stands for.
    return [
        torch.zeros_like(x) if g is None else g.to_dense() if g.layout is not torch.strided else g
        for x, g in zip(inputs, grads, strict=True)
    ]


def vjp(
    function: Callable[..., Any],
    variables: Tensors,
    where: Sequence[int],
    cotangents: Tensors,
    create_graph: bool = False,
) -> list[torch.Tensor]:
    """Return the gradients by the variables at `where` of all float outputs, weighted with `cotangents`."""
    # Clones, because autograd refuses writes to its leaves.
    outputs = float_outputs(function(*(variable.clone() for variable in variables)))
    return _grad(outputs, [variables[i] for i in where], cotangents, create_graph)


def double_vjp(
    function: Callable[..., Any],
    tensors: Tensors,
    where: Sequence[int],
    cotangents: Tensors,
    second_cotangents: Tensors,
) -> list[torch.Tensor]:
    """Return the vjp of :func:`vjp`: gradients by the inputs at `where`, then by the first cotangents."""
    variables = leaf_variables(tensors, where)
    firsts = [cotangent.clone().requires_grad_() for cotangent in cotangents]
    grads = vjp(function, variables, where, firsts, create_graph=True)
    inputs = [variables[i] for i in where] + firsts
    return _grad(grads, inputs, second_cotangents, create_graph=False)


# Torch's forward mode is wrong for these: it disagrees with finite differences, and torch's gradient agrees.
WITHOUT_FORWARD_MODE = frozenset({"cholesky_inverse", "triangular_solve"})


def jvp(
    function: Callable[..., Any],
    tensors: Tensors,
    where: Sequence[int],
    tangents: Tensors,
    *,
    forward_mode: bool = True,
) -> list[torch.Tensor]:
    """Return tangents of all float outputs by torch's forward mode, or two reverse passes if it is missing or wrong."""
    along = dict(zip(where, tangents, strict=True))
    try:
        if not forward_mode:
            raise NotImplementedError
        with forward_ad.dual_level():
            duals = [
                forward_ad.make_dual(tensor.clone(), along[i].clone()) if i in along else tensor.clone()
                for i, tensor in enumerate(tensors)
            ]
            pairs = [forward_ad.unpack_dual(output) for output in float_outputs(function(*duals))]
            if all(pair.tangent is None for pair in pairs):
                raise NotApplicableError("torch: no output has a derivative by any input")
            # For a bfloat16 output torch may return a float32 tangent (var does); JAX requires the output's dtype.
            return [
                torch.zeros_like(pair.primal) if pair.tangent is None else pair.tangent.to(pair.primal.dtype)
                for pair in pairs
            ]
    except REFUSALS:
        pass
    # The pullback is linear in its cotangent, so the pullback of the pullback, at any cotangent, is the pushforward.
    variables = leaf_variables(tensors, where)
    outputs = float_outputs(function(*(tensor.clone() for tensor in tensors)))
    cotangents = [torch.zeros_like(output).requires_grad_() for output in outputs]
    grads = vjp(function, variables, where, cotangents, create_graph=True)
    return _grad(grads, cotangents, tangents, create_graph=False)


def _rolled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.roll(1, 0) if tensor.ndim else tensor


def _scaled(tensor: torch.Tensor) -> torch.Tensor:
    # The float8 types have no multiplication.
    narrow = tensor.dtype.itemsize == 1
    return (tensor.float() * 0.9375).to(tensor.dtype) if narrow else tensor * 0.9375


# Operators whose integer results belong to their float results, such as the pivots of a factorisation.
_PAIRED_INTEGERS = ("linalg.ldl_solve",)


def _second_rows(sample: Sample) -> list[list[torch.Tensor]]:
    """Yield candidates for the second row of a batch, the most different first; the last one equals the first row.

    Scaling towards zero keeps most domains and shapes of matrices; a permutation of integers keeps indices valid.
    """
    tensors = sample.tensors
    scaled = [_scaled(tensor) if inexact(tensor) else tensor for tensor in tensors]
    both = [s if inexact(tensor) else _rolled(tensor) for s, tensor in zip(scaled, tensors, strict=True)]
    return [*([] if sample.operator in _PAIRED_INTEGERS else [both]), scaled, list(tensors)]


def rows(sample: Sample) -> tuple[list[Tensors], list[Any]]:
    """Return two rows of inputs whose results have the same shapes, and torch's result for each."""
    function, tensors = sample.function, sample.tensors
    first = run(function, tensors)
    reasons = []
    for candidate in _second_rows(sample):
        try:
            second = run(function, candidate)
        except NotApplicableError as error:
            reasons.append(str(error))
            continue
        if _form(first) == _form(second):
            return [tensors, candidate], [first, second]
        reasons.append("the rows' results differ in shape")
    raise NotApplicableError(reasons[0])


def _form(result: Any) -> tuple[Any, ...]:
    kinds = [(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves(result)]
    return skeleton(result), *kinds
