"""The time of an import, and the time to the first result, each in a fresh process."""

import importlib

import jax
import torch

from benchmarks._contestants import WRAPPERS
from benchmarks._measure import CLOCKS, minimum_of_children
from benchmarks._results import DLPACK, TORCH, TORCH2JAX, TORCHAX, XLA, Options, Row, Target

_MODULES = {XLA: "jtbridge", DLPACK: "jtbridge", TORCH2JAX: "wrap_torch2jax", TORCHAX: "torchax"}


def import_seconds(name: str, clock: str) -> float:
    """Return the seconds to import a contestant's package after jax and torch. Call it in a fresh process."""
    start = CLOCKS[clock]()
    importlib.import_module(_MODULES[name])
    return CLOCKS[clock]() - start


def first_call_seconds(name: str, clock: str) -> float:
    """Return the seconds from wrapping `a + b` to its first result under jit, after JAX has run something else.

    Call it in a fresh process.
    """
    a, b = torch.ones(16), torch.ones(16)
    x, y = jax.numpy.ones(16), jax.numpy.ones(16)
    if name in _MODULES:
        importlib.import_module(_MODULES[name])
    jax.block_until_ready(jax.jit(lambda x, y: x - y)(x, y))
    start = CLOCKS[clock]()
    if name == TORCH:
        _ = a + b
    else:
        jax.block_until_ready(jax.jit(WRAPPERS[name](lambda a, b: a + b, a, b))(x, y))
    return CLOCKS[clock]() - start


def imports(options: Options) -> Row:
    """Time the imports in addition to jax and torch. The contestant "pure_callback" imports nothing."""
    cells = minimum_of_children(_MODULES, "startup.import_seconds", options.clock, repeats=3 if options.quick else 7)
    note = f"import: the first import of {TORCH2JAX} on a machine compiles C++ first, which is not counted"
    return Row("import", "import, after jax and torch", "s", cells, targets=(Target(DLPACK, 0.3),), notes=[note])


def first_call(options: Options) -> Row:
    """Time the first call, with everything imported before."""
    names = (*WRAPPERS, TORCH)
    cells = minimum_of_children(names, "startup.first_call_seconds", options.clock, repeats=3 if options.quick else 7)
    return Row("first-call", "first jit(a + b), wrapping included", "s", cells, targets=(Target(DLPACK, 0.5),))


ROWS = {"import": imports, "first-call": first_call}
