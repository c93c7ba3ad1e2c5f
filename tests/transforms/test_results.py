"""Values, dtypes, shapes and trees of results."""

from __future__ import annotations

import jax
import pytest

from tests.compare import assert_matches, assert_trees_close

from .problem import ALL, Problem


@pytest.mark.parametrize("name", ALL)
def test_eager(name: str, backend: str):
    problem = Problem(name)
    assert_matches(problem.wrapped(*problem.arguments), problem.torch_result())


@pytest.mark.parametrize("name", ALL)
def test_jit(name: str, backend: str):
    problem = Problem(name)
    statics: list[object] = []

    @jax.jit
    def run(leaves):
        out, tree = jax.tree.flatten(problem.wrapped(*problem.tree.unflatten(leaves)))
        statics[:] = [tree, *(x for x in out if not isinstance(x, jax.Array))]
        return [x for x in out if isinstance(x, jax.Array)]

    # Numbers among the arguments are traced by jit, so here they are arrays for torch too.
    leaves = [x if hasattr(x, "shape") else jax.numpy.asarray(x).__array__() for x in problem.leaves]
    out = run([jax.numpy.asarray(x) for x in leaves])
    expected, tree = jax.tree.flatten(problem.torch_result(leaves))
    assert statics[0] == tree
    assert statics[1:] == [x for x in expected if not hasattr(x, "shape")]
    assert_matches(out, [x for x in expected if hasattr(x, "shape")])


@pytest.mark.parametrize("name", ALL)
def test_jit_equals_eager(name: str, backend: str):
    """The same torch functions run on the same numbers, so the results are the same to the last bit."""
    problem = Problem(name)
    primals = [jax.numpy.asarray(x) for x in problem.primals]
    assert_trees_close(jax.jit(problem.jax_fn)(*primals), problem.jax_fn(*primals), tolerance=0.0)
