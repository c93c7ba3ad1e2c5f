"""Every overload that torch tags as core ATen has a lowering or a decomposition of torch's."""

from __future__ import annotations

import pytest
import torch

from jtbridge._compat import decomposition_of
from jtbridge.lowerings import find

WITHOUT = {
    "aten::nonzero": "the shape of its result depends on data",
    "aten::_local_scalar_dense": "a number in Python that depends on data",
    "aten::resize_": "changes the memory of a tensor in place",
}


def _core() -> dict[str, torch._ops.OpOverload]:
    found = {}
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        operator, _, overload = rest.partition(".")
        try:
            op = getattr(getattr(getattr(torch.ops, namespace), operator), overload or "default")
        except (AttributeError, RuntimeError):  # it exists in TorchScript only
            continue
        if torch.Tag.core in op.tags:
            found[name] = op
    return found


CORE = _core()


def test_number_of_core_operators_matches_torch():
    assert len(CORE) >= 189
    assert set(WITHOUT) <= set(CORE)


@pytest.mark.parametrize("name", CORE)
def test_has_a_lowering_or_a_decomposition(name: str):
    can = find(CORE[name]) is not None or decomposition_of(CORE[name]) is not None
    assert can == (name not in WITHOUT), WITHOUT.get(name)
