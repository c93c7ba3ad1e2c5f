"""The examples in the docstrings of the public names run and print the output that they show."""

from __future__ import annotations

import doctest
from typing import Any

import pytest

import jtbridge
from jtbridge import kernels

KERNELS = [function for name, function in vars(kernels).items() if callable(function) and not name.startswith("_")]
PUBLIC = [
    jtbridge.wrap,
    jtbridge.config,
    jtbridge.backends,
    jtbridge.check,
    jtbridge.doctor,
    jtbridge.explain,
    jtbridge.export,
    jtbridge.generate,
    jtbridge.module,
    jtbridge.prove,
    jtbridge.purity,
    jtbridge.register_lowering,
    jtbridge.shard,
    jtbridge.shard_batch,
    jtbridge.shardings,
    jtbridge.to_jax,
    jtbridge.to_torch,
    jtbridge.to_torch_function,
    jtbridge.to_torch_module,
    jtbridge.train_step,
]


METHODS = [
    getattr(jtbridge.JaxModule, name)
    for name in ("init", "__call__", "method", "load", "state_dict", "from_state_dict")
]
METHODS.append(jtbridge.TrainStep.init)


@pytest.mark.parametrize("public", [*PUBLIC, *KERNELS, *METHODS], ids=lambda public: public.__name__)
def test_examples(public: Any):
    (test,) = doctest.DocTestFinder(recurse=False).find(public, public.__name__, globs={})
    assert test.examples, f"`{public.__name__}` has no example"
    output: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=output.append)
    assert not output, "".join(output)


def test_every_public_function_has_examples():
    functions = {name for name in jtbridge.__all__ if callable(getattr(jtbridge, name)) and name.islower()}
    assert functions == {public.__name__ for public in PUBLIC}


def test_every_public_name_has_a_docstring():
    classes = [value for value in vars(jtbridge.errors).values() if isinstance(value, type)]
    for value in [jtbridge, kernels, *classes, *(getattr(jtbridge, name) for name in jtbridge.__all__)]:
        assert (value.__doc__ or "").strip(), value
