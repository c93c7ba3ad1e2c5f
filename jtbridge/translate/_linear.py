"""Analysis of a graph: whether a torch function is linear, up to a constant, in some of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any

import jax
import torch
from jax.extend.core import jaxpr_as_fun
from torch import fx

from jtbridge._compat import OpOverload, overload_name
from jtbridge.capture import aten_graph, origin
from jtbridge.core.functions import TorchFunction
from jtbridge.core.positions import replaced
from jtbridge.core.signals import raise_if_from_signal
from jtbridge.core.writes import returns_view
from jtbridge.errors import TranslationError
from jtbridge.transforms import Jvp, Vjp, unbatched

from ._program import jax_semantics, precision, translate


def nonlinear_reason(fn: TorchFunction, wrt: tuple[int, ...]) -> str | None:
    """Return why the transpose of `fn` in its inputs `wrt` is not its vector-Jacobian product at zero; None if it is.

    Every operator that depends on the inputs must be linear in them, by the table below; or JAX must be able to
    transpose the whole translated program. Torch's derivative is then the transpose, unless a part of the function is
    hidden from autograd.
    """
    fn = unbatched(fn)
    if isinstance(fn, Vjp | Jvp) and min(wrt) >= len(fn.fn.in_types):
        return None  # a derivative is linear in its tangents or cotangents
    known = fn.base.cache.nonlinear_reasons
    if (fn, wrt) not in known:
        known[fn, wrt] = _nonlinear_reason(fn, wrt)
    return known[fn, wrt]


def _nonlinear_reason(fn: TorchFunction, wrt: tuple[int, ...]) -> str | None:
    traits = fn.base.traits
    if traits.autograd.switches_grad_mode or traits.autograd.uses_data:
        return "it computes a part without gradients (`torch.no_grad()` or `.data`), which its derivative leaves out"
    try:
        reached = _reached(aten_graph(fn), wrt)
    except TranslationError as error:
        return f"it has no graph that could show that it is linear: {error}"
    for node in reached:
        if node.meta.get("detached"):
            return f"it detaches a tensor from autograd{_line_suffix(node)}, so its derivative leaves a part out"
    nonlinear = next((node for node in reached if not _is_linear(node, reached)), None)
    if nonlinear is None or _is_transposed_by_jax(fn, wrt):
        return None
    return f"operator `{nonlinear.target}`{_line_suffix(nonlinear)} is not linear, or not known to be"


def _line_suffix(node: fx.Node) -> str:
    line = origin(node).get("line")
    return f" ({line})" if line else ""


def _reached(module: fx.GraphModule, wrt: tuple[int, ...]) -> dict[fx.Node, None]:
    """Return the nodes whose values depend on the values of the inputs `wrt`, in order."""
    placeholders = module.graph.find_nodes(op="placeholder")
    differentiated = {placeholders[i] for i in wrt}
    reached: dict[fx.Node, None] = {}
    for node in module.graph.nodes:
        depends = any(x in reached for x in node.all_input_nodes) and node.op == "call_function"
        if node in differentiated or (depends and _packet_name(node) not in _TYPE_ONLY):
            reached[node] = None
    return reached


def _is_linear(node: fx.Node, reached: dict[fx.Node, None]) -> bool:
    """Return whether a node is jointly linear in all of its inputs that are `reached`."""
    if node.op == "placeholder" or node.target is getitem:
        return True
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex()):
        return False
    differentiated = {i for i, arg in enumerate(node.args) if any(x in reached for x in _nodes_in(arg))}
    if not isinstance(node.target, OpOverload) or any(x in reached for x in _nodes_in(list(node.kwargs.values()))):
        return False
    if returns_view(node.target):
        return differentiated == {0}
    if overload_name(node.target) in ("Tensor_mode", "Scalar_mode", "reduce", "value_reduce"):
        return False  # a rounded quotient, or a scatter that multiplies
    terms, factors = _LINEAR.get(_packet_name(node), ((), ()))
    return differentiated <= {*terms, *factors} and len(differentiated & {*factors}) <= 1


def _nodes_in(arg: Any) -> Sequence[fx.Node]:
    if isinstance(arg, list | tuple):
        return [node for part in arg for node in _nodes_in(part)]
    return [arg] if isinstance(arg, fx.Node) else []


def _packet_name(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").partition(".")[0]


def _is_transposed_by_jax(fn: TorchFunction, wrt: tuple[int, ...]) -> bool:
    """Return whether JAX can transpose the translated program of `fn`."""
    try:
        program = translate(fn)
    except TranslationError:
        return False
    run = jaxpr_as_fun(program)
    avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.in_avals]
    cotangents = [jax.ShapeDtypeStruct(a.shape, a.to_tangent_aval().dtype) for a in program.out_avals]

    def transposed(arrays: list[Any], cotangents: list[Any]) -> Any:
        def of_differentiated(*differentiated: Any) -> list[Any]:
            return run(*replaced(arrays, wrt, differentiated))

        return jax.linear_transpose(of_differentiated, *(avals[i] for i in wrt))(cotangents)

    try:
        with jax_semantics(precision(fn.base)):
            jax.eval_shape(transposed, avals, cotangents)
    except Exception as error:  # noqa: BLE001  (JAX raises errors of many classes where an operation is not linear)
        raise_if_from_signal(error)
        return False
    return True


# Operators whose results depend only on the shapes and dtypes of their tensors.
_TYPE_ONLY = {
    *("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"),
    *("sym_size", "new_empty_strided"),
}

# Operators that are linear in some of their arguments, as two tuples of positions. An operator is jointly linear in the
# arguments of the first tuple and at most one argument of the second, while the others are fixed. Views need no entry.
_TABLE = {
    """
    neg sum mean cumsum clone _to_copy reshape flip roll gather index index_select tril triu trace repeat embedding
    masked_fill div cat stack conj _conj_physical im2col col2im avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d
    _adaptive_avg_pool3d _fft_r2c _fft_c2r _fft_c2c grid_sampler_2d grid_sampler_3d slice_backward select_backward
    diagonal_backward unfold_backward triangular_solve cholesky_solve constant_pad_nd reflection_pad1d reflection_pad2d
    reflection_pad3d replication_pad1d replication_pad2d replication_pad3d upsample_nearest1d upsample_nearest2d
    upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    """: ((0,), ()),
    "add sub rsub complex copy fill lerp slice_scatter select_scatter diagonal_scatter": ((0, 1), ()),
    "mul mm bmm mv dot vdot matmul": ((), (0, 1)),
    "addmm baddbmm addbmm addmv addr addcmul": ((0,), (1, 2)),
    "scatter scatter_add index_add index_fill": ((0, 3), ()),
    "linalg_solve_triangular _linalg_solve_ex": ((1,), ()),
    "convolution": ((2,), (0, 1)),
    "index_put": ((0, 2), ()),
    "linalg_lu_solve": ((2,), ()),
    "where": ((1, 2), ()),
}
_LINEAR = {name: arguments for names, arguments in _TABLE.items() for name in names.split()}
