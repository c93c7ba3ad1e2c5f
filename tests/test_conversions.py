"""`to_jax` and `to_torch`: dtypes, layouts, shared memory, and that a JAX array is never written to."""

from __future__ import annotations

import copy as copying
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.core.dtypes import _PAIRS
from jtbridge.errors import ArgumentError, DTypeError, MutationError

from .compare import assert_matches


@pytest.mark.parametrize("pair", _PAIRS, ids=lambda pair: pair[1].name)
@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (0, 3)])
def test_every_dtype_there_and_back(pair: tuple[torch.dtype, np.dtype], shape: tuple, copy: bool, x64: None):
    torch_dtype, dtype = pair
    values = np.resize([1, 2, 4, 0.5, 8, 1], shape).astype(dtype)
    tensor = jtbridge.to_torch(jnp.asarray(values), copy=copy)
    assert (tensor.dtype, tuple(tensor.shape)) == (torch_dtype, shape)
    array = jtbridge.to_jax(torch.empty(shape, dtype=torch_dtype).copy_(tensor), copy=copy)
    assert (array.dtype, array.shape) == (dtype, shape)
    assert np.asarray(array).tobytes() == values.tobytes()


def test_64_bit_tensors_while_x64_is_off():
    for copy in (False, True):
        found = jtbridge.to_jax([torch.arange(3), torch.ones(2, dtype=torch.float64), torch.ones(1) * 1j], copy=copy)
        assert [x.dtype.name for x in found] == ["int32", "float32", "complex64"]
        assert [x.tolist() for x in found] == [[0, 1, 2], [1, 1], [1j]]


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[::2, 1:],
    "expanded": lambda x: x[:, :1].expand(-1, 4),
    "offset": lambda x: x[1],
    "scalar": lambda x: x[1, 1],
    "empty": lambda x: x[:0],
    "conjugate": lambda x: torch.complex(x, x + 1).conj(),
    "negative": lambda x: torch.complex(x, x + 1).conj().imag,
    "requires_grad": lambda x: x.clone().requires_grad_(),
    "not_a_leaf": lambda x: x.clone().requires_grad_() * 2,
    "parameter": torch.nn.Parameter,
    "lazy_zero": lambda x: torch._efficientzerotensor((3, 4)),
}


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, copy: bool):
    tensor = LAYOUTS[layout](torch.arange(12.0).reshape(3, 4))
    assert_matches(jtbridge.to_jax(tensor, copy=copy), tensor.detach() + 0)


def test_other_leaves_are_unchanged():
    tree = {"t": torch.ones(1), "j": jnp.ones(1), "n": np.ones(1), "s": "text", "none": None, "i": 3}
    found = jtbridge.to_jax(tree)
    assert isinstance(found["t"], jax.Array)
    assert all(found[key] is tree[key] for key in "jnsi")
    found = jtbridge.to_torch(tree)
    assert [type(found[key]) for key in "tn"] == [torch.Tensor, torch.Tensor]
    assert isinstance(found["j"], torch.Tensor)
    assert (found["s"], found["none"], found["i"]) == ("text", None, 3)


def test_to_jax_copies_unless_asked_not_to():
    tensor = torch.zeros(64)
    own, shared = jtbridge.to_jax(tensor), jtbridge.to_jax(tensor, copy=False)
    assert own.unsafe_buffer_pointer() != tensor.data_ptr()
    assert shared.unsafe_buffer_pointer() == tensor.data_ptr()
    tensor.fill_(1)
    assert own.tolist() == [0] * 64


def test_shared_memory_outlives_its_owner():
    assert float(jtbridge.to_jax(torch.full((1000,), 3.0), copy=False).sum()) == 3000
    tensor = jtbridge.to_torch(jnp.full((1000,), 3.0))
    assert tensor.sum().item() == 3000


def test_to_torch_shares_and_refuses_writes():
    array = jnp.arange(6.0).reshape(2, 3)
    tensor = jtbridge.to_torch(array)
    assert tensor.data_ptr() == array.unsafe_buffer_pointer()
    assert_matches(array, tensor)


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "in_place": lambda x: x.add_(1),
    "item": lambda x: x.__setitem__(0, 1.0),
    "augmented": lambda x: x.__iadd__(1),
    "slice": lambda x: x[1:].zero_(),
    "view": lambda x: x.view(-1)[0].fill_(1),
    "transposed": lambda x: x.T.mul_(2),
    "unbind": lambda x: x.unbind()[0].neg_(),
    "split": lambda x: x.split(1)[1].exp_(),
    "detached": lambda x: x.detach().add_(1),
    "data": lambda x: x.data.add_(1),
    "alias": lambda x: x.view_as(x).copy_(torch.zeros(2, 3)),
    "out": lambda x: torch.exp(torch.zeros(2, 3), out=x),
    "foreach": lambda x: torch._foreach_add_([x], 1.0),
    "no_grad": lambda x: torch.no_grad()(x.add_)(1),
    "index_put": lambda x: x.index_put_((torch.tensor([0]),), torch.tensor(1.0)),
    "resize": lambda x: x.resize_(7),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_are_refused(write: str):
    array = jnp.arange(6.0).reshape(2, 3)
    tensor = jtbridge.to_torch(array)
    with pytest.raises(MutationError, match=r"writes to a tensor that shares the memory of a JAX array"):
        WRITES[write](tensor)
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    "write",
    [
        lambda t: torch.nn.functional.batch_norm(torch.rand(4, 3), t, torch.ones(3), training=True),
        lambda t: torch.nn.functional.batch_norm(torch.rand(4, 3), torch.ones(3), t, training=True),
        lambda t: torch.empty(0).set_(t),
    ],
)
def test_writes_that_no_schema_declares_are_refused(write: Callable):
    x = jnp.ones(3) + 0
    with pytest.raises(MutationError, match="shares the memory of a JAX array"):
        write(jtbridge.to_torch(x))
    assert x.tolist() == [1, 1, 1]


def test_capsule_and_deep_copy_have_separate_memory():
    x = jnp.ones(3) + 0
    torch.from_dlpack(jtbridge.to_torch(x)).zero_()
    copying.deepcopy(jtbridge.to_torch(x)).zero_()
    assert x.tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "float32", "float16", "complex64"])
def test_a_shared_tensor_is_shown_as_a_tensor(dtype: str):
    x = jnp.arange(3).astype(dtype)
    assert str(jtbridge.to_torch(x)) == f"{jtbridge.to_torch(x)}" == str(jtbridge.to_torch(x, copy=True))
    assert f"{jtbridge.to_torch(x[2]).real.item():.2f}" == f"{jtbridge.to_torch(x[2], copy=True).real.item():.2f}"


def test_numpy_view_is_read_only():
    array = jnp.arange(3.0)
    tensor = jtbridge.to_torch(array)
    for view in (tensor.numpy(), tensor.detach().numpy(), np.asarray(tensor), tensor[1:].numpy()):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 9
    assert array.tolist() == [0, 1, 2]


def test_results_computed_from_a_shared_tensor_are_plain():
    tensor = jtbridge.to_torch(jnp.arange(3.0))
    for result in (tensor + 1, tensor.clone(), torch.stack([tensor, tensor]), tensor.sum(), tensor.to(torch.float64)):
        result.add_(1)
    assert tensor.tolist() == [0, 1, 2]
    assert type(tensor * 2) is torch.Tensor


def test_autograd_starts_at_a_shared_tensor():
    x = jtbridge.to_torch(jnp.arange(3.0)).requires_grad_()
    (gradient,) = torch.autograd.grad((x**2).sum(), x)
    assert gradient.tolist() == [0, 2, 4]


def test_copy_is_writable_and_separate():
    array = jnp.arange(3.0)
    tensor = jtbridge.to_torch({"x": array}, copy=True)["x"]
    tensor.add_(1)
    assert tensor.data_ptr() != array.unsafe_buffer_pointer()
    assert (tensor.tolist(), array.tolist()) == ([1, 2, 3], [0, 1, 2])
    source = np.arange(3.0)
    jtbridge.to_torch(source).add_(1)
    assert source.tolist() == [0, 1, 2]


def test_arrays_on_several_devices_are_gathered():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    array = jax.device_put(jnp.arange(8.0), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i")))
    assert jtbridge.to_torch(array).tolist() == list(range(8))
    assert jtbridge.to_torch(jax.device_put(jnp.ones(2), jax.devices()[1])).tolist() == [1, 1]


def test_converted_tensors_are_not_committed_to_a_device():
    """As with `jnp.asarray` of host memory, they are not committed to a device, so that they fit into any program."""
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.device_put(jnp.arange(8.0), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i")))
    assert (jtbridge.to_jax(torch.ones(8)) + sharded).tolist() == list(range(1, 9))


def test_unsupported_values_are_refused():
    with pytest.raises(ArgumentError, match=r"layout torch\.sparse_coo, which JAX does not have"):
        jtbridge.to_jax(torch.ones(2).to_sparse())
    with pytest.raises(DTypeError, match=r"a tensor has torch dtype `torch\.complex32`, which JAX does not have"):
        jtbridge.to_jax(torch.zeros(2, dtype=torch.complex64).to(torch.complex32))
    with pytest.raises(DTypeError, match=r"an array has JAX dtype `int4`, which torch does not have"):
        jtbridge.to_torch(jnp.zeros(2, jnp.int4))
    with pytest.raises(ArgumentError, match="in ordered containers, but got a set, which has no order"):
        jtbridge.to_jax({"of": {torch.ones(2)}})
    with pytest.raises(ArgumentError, match="but got an iterator"):
        jtbridge.to_jax(map(torch.ones, [2, 3]))
    with pytest.raises(ArgumentError, match="but got an iterator"):
        jtbridge.to_torch(jnp.ones(n) for n in range(2))
    with pytest.raises(ArgumentError, match="a masked NumPy array, whose mask would be lost"):
        jtbridge.to_torch(np.ma.array([1.0, 2.0], mask=[0, 1]))
    assert jtbridge.to_jax({"names": {"a"}}) == {"names": {"a"}}


def test_to_torch_of_a_traced_array_suggests_a_fix():
    with pytest.raises(ArgumentError, match=r"got an array that JAX traces\. Pass it as an argument of a wrapped"):
        jax.jit(jtbridge.to_torch)(jnp.ones(3))
