"""The proof of kernels: each kernel runs beside its reference, on the cases in its folder's `proof.py`.

A case calls a public function of `jtbridge.kernels`, then its vjp. Every kernel primitive that these calls run is
computed twice, by the kernel and by the reference, and the calls go on with the result of the reference. So each kernel
gets the same inputs as in real use, and a wrong kernel does not change the inputs of the next kernel.
"""

from __future__ import annotations

import contextvars
import dataclasses
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtbridge.core.context_variables import assigned
from jtbridge.core.positions import replaced

from ._launch import interpreting

# By the dtype of a result, the largest allowed difference relative to its largest absolute value. It allows for several
# roundings to the dtype, and for float32 also for approximate exponentials and approximate products on tensor cores.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 4e-2, "float16": 6e-3}
# By the dtype of a kernel's arguments, the smallest tolerance of a float32 result: a kernel with 16-bit arguments
# rounds each term of a sum to 16 bits once.
_MIN_TOLERANCES = {"bfloat16": 1e-2, "float16": 1.5e-3}
_DTYPES = ("float32", "bfloat16", "float16")
# The function that runs each kernel primitive of this thread on its arrays, in place of `jit`; None outside of a proof.
OBSERVER: contextvars.ContextVar[Callable[[Any, Sequence[Any]], Sequence[Any]] | None] = contextvars.ContextVar(
    "jtbridge_proof", default=None
)


class NoKernelCalled(Exception):
    """The program of a kernel does not call a Triton kernel."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One case of a proof: a function and its arguments.

    Attributes:
        name: a description of the case, such as "rows of 1000, float32".
        function: a differentiable function of the arrays.
        arrays: its arguments.
        wrt: the positions of the arguments to differentiate.
    """

    name: str
    function: Callable[..., Any]
    arrays: Sequence[jax.Array]
    wrt: Sequence[int]


Found = Callable[[str, str | None], None]


def folders() -> list[str]:
    """Return the folders of `jtbridge.kernels` that have a file `proof.py`, without their underscore."""
    package = importlib.import_module("jtbridge.kernels")
    found = (file for file in pkgutil.iter_modules(package.__path__) if file.ispkg)
    return [
        file.name.removeprefix("_") for file in found if importlib.util.find_spec(f"jtbridge.kernels.{file.name}.proof")
    ]


def cases(folder: str) -> list[Case]:
    """Return the cases of a folder. Each call creates them again, with the same numbers."""
    return list(importlib.import_module(f"jtbridge.kernels._{folder}.proof").cases())


def normal(*shape: int, dtype: Any, seed: int = 0) -> jax.Array:
    """Return normally distributed random numbers, the same for the same arguments."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.dtype(dtype))


def dtypes() -> Sequence[str]:
    """Return the dtypes of the cases."""
    return _DTYPES


def run_case(case: Case, begins: Callable[[str], None], found: Found) -> None:
    """Run a case's function and its vjp, and compare each kernel that they run with its reference.

    Args:
        case: the case.
        begins: called with the name of a kernel before it runs.
        found: called with the name of a kernel after it ran, and with its error, or None.
    """

    def observe(primitive: Any, arrays: Sequence[Any]) -> Sequence[Any]:
        if primitive.kernel is primitive.reference:
            return primitive.reference(*arrays)  # no Triton kernel: for example a backward by XLA's matrix products
        begins(primitive.name)
        want = jax.block_until_ready(jax.jit(lambda *xs: list(primitive.reference(*xs)))(*arrays))
        try:
            got = _by_kernel(primitive, arrays)
            wrong = _disagreement(got, want, max(_MIN_TOLERANCES.get(str(x.dtype), 0.0) for x in arrays))
        except Exception as error:  # noqa: BLE001  (of the compiler or the driver: this kernel is not proven)
            lines = str(error).strip().splitlines()
            wrong = f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
        found(primitive.name, wrong and f"{case.name}: {wrong}")
        return want

    with assigned((OBSERVER, observe)), jax.default_matmul_precision("highest"):
        jax.block_until_ready(case.function(*case.arrays))

        def of_differentiated(*differentiated: Any) -> Any:
            return case.function(*replaced(case.arrays, case.wrt, differentiated))

        out, pull = jax.vjp(of_differentiated, *(case.arrays[i] for i in case.wrt))
        cotangents = [normal(*y.shape, dtype=y.dtype, seed=1 + i) for i, y in enumerate(jax.tree.leaves(out))]
        jax.block_until_ready(pull(jax.tree.unflatten(jax.tree.structure(out), cotangents)))


def _by_kernel(primitive: Any, arrays: Sequence[Any]) -> Sequence[Any]:
    program = jax.jit(lambda *xs: list(primitive.kernel(*xs))).lower(*arrays)
    if not interpreting() and "triton_kernel_call" not in program.as_text():
        raise NoKernelCalled("its program does not call a Triton kernel")
    return jax.block_until_ready(program.compile()(*arrays))


def _disagreement(got: Sequence[Any], want: Sequence[Any], of_sums: float) -> str | None:
    """Return how results differ; None if they agree. `of_sums` is the smallest tolerance of float32 results."""
    if len(got) != len(want):
        return f"{len(got)} results where the reference has {len(want)}"
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if g.shape != w.shape or g.dtype != w.dtype:
            return f"result {i} is {g.dtype}{list(g.shape)} where the reference's is {w.dtype}{list(w.shape)}"
        wide, expected = np.asarray(g, np.float64), np.asarray(w, np.float64)
        finite = np.isfinite(expected)
        if not np.array_equal(np.isfinite(wide), finite) or not np.array_equal(wide[~finite], expected[~finite], True):
            return f"result {i} has NaN or infinity at other positions than the reference's"
        scale = np.abs(expected[finite]).max(initial=1e-30)
        apart = np.abs(wide - expected)[finite].max(initial=0.0) / scale
        tolerance = max(_TOLERANCE.get(str(g.dtype), 1e-4), of_sums if g.dtype == jnp.float32 else 0.0)
        if apart > tolerance:
            return f"result {i} differs by {apart:.2g} of its largest number, where {tolerance:.2g} is allowed"
    return None
