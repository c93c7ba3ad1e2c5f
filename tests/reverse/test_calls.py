"""Calls: trees, dtypes, devices, memory, compilation, keys, threads and lifetimes."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.core.jax_calls import HANDLES
from jtbridge.reverse._tensors import to_array, to_tensor


def test_trees_and_static_values():
    @jtbridge.to_torch_function
    def f(tree, *, scale, name, flag=None):
        assert (name, flag) == ("a", None)
        return {"sum": tree["x"] + tree["y"][0], "list": [tree["y"][1] * scale], "none": None, "tuple": ()}

    x = torch.arange(3.0)
    got = f({"x": x, "y": (x, x)}, scale=2.5, name="a")
    assert got.keys() == {"sum", "list", "none", "tuple"}
    assert (got["none"], got["tuple"]) == (None, ())
    torch.testing.assert_close(got["sum"], 2 * x)
    torch.testing.assert_close(got["list"], [2.5 * x])
    assert f.__name__ == "f"


def test_several_results_of_a_torch_operator_are_named_tuples():
    traces = []

    @jtbridge.to_torch_function
    def f(found):
        traces.append(1)
        return jax.jit(lambda found: found.values * 2 + found[1].astype(float))(found)

    x = torch.tensor([[1.0, 5.0], [3.0, 2.0]])
    found = x.max(0)
    assert f(found).tolist() == [7.0, 10.0]
    found.values.mul_(10)
    assert f(found).tolist() == [61.0, 100.0]
    assert f(x.sort().values.max(0)).tolist() == [5.0, 10.0]
    assert len(traces) == 1
    _, tangent = torch.func.jvp(lambda x: f(x.max(0)), (x,), (torch.ones(2, 2),))
    assert tangent.tolist() == [2.0, 2.0]


def test_keywords_that_jtbridge_uses_itself():
    f = jtbridge.to_torch_function(lambda self, args, kwargs, name=1: self * args * kwargs * name)
    assert f(self=torch.tensor(2), args=torch.tensor(3), kwargs=torch.tensor(5), name=7).item() == 210


def test_equal_static_values_of_different_types_are_distinguished():
    f = jtbridge.to_torch_function(lambda x, n: x if isinstance(n, bool) else x + n)
    x = torch.arange(3.0)
    torch.testing.assert_close(f(x, 1), x + 1)
    torch.testing.assert_close(f(x, True), x)
    torch.testing.assert_close(f(x, 1.0), x + 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Scaled:
    x: object
    scale: object = dataclasses.field(metadata={"static": True})


def test_equal_static_tree_parts_of_different_types_are_distinguished():
    f = jtbridge.to_torch_function(lambda s: Scaled(jnp.asarray(s.scale), s.scale))
    for scale in (0.0, -0.0, 0, False):
        got = f(Scaled(torch.ones(2), scale))
        assert (str(got.x.item()), str(got.scale)) == (str(scale), str(scale))
    g = jtbridge.to_torch_function(lambda tree: jnp.asarray([key for key in tree if key != 5]))
    assert [g({5: torch.ones(2), key: 0}).dtype for key in (1, 1.0)] == [torch.int64, torch.float32]


def test_as_a_decorator_with_options():
    @jtbridge.to_torch_function(int32="keep")
    def f(x):
        return x + 1

    assert f(torch.tensor([1], dtype=torch.int32)).dtype is torch.int32
    assert f(torch.tensor([1])).dtype is torch.int32  # int64 is int32 in JAX while x64 is off


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32),
    *(torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)], ids=str)
def test_dtypes_that_both_sides_have(dtype: torch.dtype, shape: tuple[int, ...]):
    x = torch.randint(0, 2, shape).to(dtype)
    got = jtbridge.to_torch_function(lambda x: (x, jnp.reshape(x, (-1,))))(x)
    assert [y.dtype for y in got] == [dtype, dtype]
    assert torch.equal(got[0].to(torch.complex64), x.to(torch.complex64))
    assert got[1].shape == (x.numel(),)


@pytest.mark.parametrize(
    ("dtype", "inside", "result"),
    [
        (torch.int64, "int32", torch.int64),
        (torch.int32, "int32", torch.int64),
        (torch.float64, "float32", torch.float32),
        (torch.complex128, "complex64", torch.complex64),
    ],
    ids=str,
)
def test_wide_dtypes_while_x64_is_off(dtype: torch.dtype, inside: str, result: torch.dtype):
    seen = []
    f = jtbridge.to_torch_function(lambda x: (seen.append(str(x.dtype)), x + x)[1])
    x = torch.tensor([1, 2]).to(dtype)
    assert f(x).dtype is result
    assert set(seen) == {inside}


def test_the_gradient_of_a_wide_argument_is_wide():
    x = torch.rand(3, dtype=torch.float64, requires_grad=True)
    jtbridge.to_torch_function(lambda x: jnp.sum(x**2))(x).backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.float64
    torch.testing.assert_close(x.grad, 2 * x, rtol=1e-6, atol=1e-6)


def test_x64_is_on_in_the_forward_and_off_in_the_backward():
    f = jtbridge.to_torch_function(lambda x: x**3)
    x = torch.tensor([1 / 3], dtype=torch.float64, requires_grad=True)
    with jax.enable_x64(True):
        wide = f(x)
    narrow = f(x)
    assert (wide.dtype, narrow.dtype) == (torch.float64, torch.float32)
    (gradient,) = torch.autograd.grad(wide, x)  # x64 is off where the backward runs
    torch.testing.assert_close(gradient, 3 * x**2, rtol=1e-15, atol=0)


def test_conversions_do_not_copy():
    cpu = jax.local_devices(backend="cpu")[0]
    x = torch.zeros(1 << 16)
    array = to_array(x, cpu)
    assert array.unsafe_buffer_pointer() == x.data_ptr()
    assert to_tensor(array, x.device).data_ptr() == x.data_ptr()


def test_results_have_separate_memory():
    constant = jnp.arange(4.0)
    f = jtbridge.to_torch_function(lambda x: (x, x, constant, jnp.zeros(4), jnp.zeros(4)))
    x = torch.ones(4)
    first = f(x)
    for number, result in enumerate(first):
        result.fill_(number + 10)
    assert x.tolist() == [1.0] * 4
    assert constant.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert [y.tolist()[0] for y in first] == [10.0, 11.0, 12.0, 13.0, 14.0]
    assert [y.tolist()[1] for y in f(x)] == [1.0, 1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.T,
        lambda x: x[:, ::2],
        lambda x: x[1:, 1:],
        lambda x: x[:1].expand(4, 6),
        lambda x: torch.view_as_complex(x.reshape(4, 3, 2)).conj(),
        lambda x: torch.view_as_complex(x.reshape(4, 3, 2)).conj().imag,
        lambda x: torch._efficientzerotensor((2, 3)),
        lambda x: torch.nn.Parameter(x),
        lambda x: jtbridge.to_torch(jnp.asarray(x.numpy())),
    ],
)
def test_views_and_special_tensors(view):
    x = view(torch.rand(4, 6))
    got = jtbridge.to_torch_function(lambda x: x * 2)(x)
    torch.testing.assert_close(got, 2 * x.detach().as_subclass(torch.Tensor).clone())


def test_one_trace_for_each_signature():
    traces = []

    @jtbridge.to_torch_function
    def f(x, n):
        traces.append((x.shape, n))
        return x * n

    for _ in range(3):
        for size in (2, 3):
            for n in (1.0, 2.0):
                f(torch.rand(size), n)
    assert len(traces) == 4
    x = torch.rand(2, requires_grad=True)
    f(x, 1.0).sum().backward()
    many = len(traces)
    for _ in range(5):
        f(x, 1.0).sum().backward()
    assert len(traces) == many
    assert many <= 4 + 3


def test_closed_over_arrays_are_read_at_trace_time_as_in_jit():
    box = [jnp.ones(())]
    f = jtbridge.to_torch_function(lambda x: x * box[0])
    assert f(torch.ones(())).item() == 1
    box[0] = jnp.full((), 5.0)
    assert f(torch.ones(())).item() == 1
    assert f(torch.ones(1)).item() == 5  # a new shape is a new trace


def test_random_keys():
    f = jtbridge.to_torch_function(lambda key, x: x * jax.random.bernoulli(key, 0.5, x.shape))
    x = torch.ones(64, requires_grad=True)
    with jax.numpy_dtype_promotion("standard"):
        typed, bits = f(jax.random.key(3), x), f(torch.tensor([0, 3], dtype=torch.uint32), x)
        assert torch.equal(typed, bits)
        assert not torch.equal(typed, f(jax.random.key(4), x))
        (gradient,) = torch.autograd.grad(typed.sum(), x)
        assert torch.equal(gradient, typed)  # the same mask in forward and backward
        keys = jtbridge.to_torch(jax.random.key_data(jax.random.split(jax.random.key(0), 5)))
        rows = torch.vmap(f, in_dims=(0, None))(keys, x)
    assert len({tuple(row.tolist()) for row in rows}) == 5


def test_functions_without_tensors():
    f = jtbridge.to_torch_function(lambda n: jnp.arange(n))
    assert f(3).tolist() == [0, 1, 2]
    assert f(3).dtype is torch.int64


def test_arrays_of_jax_and_numpy_among_the_arguments():
    f = jtbridge.to_torch_function(lambda a, b, c: a + b + c)
    got = f(torch.ones(2), jnp.ones(2), np.ones(2, np.float32))
    assert got.tolist() == [3.0, 3.0]


def test_weakly_typed_arrays_follow_jax_promotion():
    f = jtbridge.to_torch_function(lambda a, b: a * b)
    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    for b in (jnp.asarray(2.0), jnp.ones((), jnp.float32)):
        with jax.numpy_dtype_promotion("standard"):
            got = f(x, b)
            expected = jnp.multiply(jnp.ones(2, jnp.bfloat16), b)
            assert str(got.dtype) == f"torch.{expected.dtype}"
            got.sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]


def test_dropped_functions_are_collected():
    class Owner:
        def __call__(self, x):
            return jnp.sin(x) * 2

    def use() -> weakref.ref:
        owner = Owner()
        f = jtbridge.to_torch_function(owner)
        x = torch.rand(3, requires_grad=True)
        torch.autograd.grad(torch.autograd.grad(f(x).sum(), x, create_graph=True)[0].sum(), x)
        torch.func.vmap(torch.func.grad(f))(torch.rand(3))
        return weakref.ref(owner)

    gc.collect()
    before = len(HANDLES)
    references = [use() for _ in range(3)]
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
    assert len(HANDLES) <= before


def test_autograd_graph_keeps_its_function_alive():
    x = torch.rand(3, requires_grad=True)
    value = jtbridge.to_torch_function(lambda x: jnp.sin(x).sum())(x)
    gc.collect()
    value.backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_signatures_do_not_accumulate(monkeypatch):
    monkeypatch.setattr("jtbridge.reverse._bound._MAX_SIGNATURES", 4)
    f = jtbridge.to_torch_function(lambda x, n: x + n)
    gc.collect()
    before = len(HANDLES)
    for n in range(10):
        assert f(torch.zeros(()), n).item() == n
    gc.collect()
    assert len(HANDLES) - before == 4


def test_threads():
    f = jtbridge.to_torch_function(lambda x, n: jnp.sin(x) * n)

    def work(seed: int) -> float:
        x = torch.rand(8, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        (gradient,) = torch.autograd.grad(f(x, float(seed % 3)).sum(), x)
        return float((gradient - x.detach().cos() * (seed % 3)).abs().max())

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert max(pool.map(work, range(64))) < 1e-6


def test_a_backward_on_another_thread():
    f = jtbridge.to_torch_function(lambda x: jnp.exp(x).sum())
    x = torch.rand(3, requires_grad=True)
    value = f(x)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(value.backward).result()
    torch.testing.assert_close(x.grad, x.detach().exp())


@pytest.mark.parametrize("size", [8, 1 << 16])
def test_results_on_several_devices_are_gathered(size: int):
    f = jtbridge.to_torch_function(jnp.sin)
    x = torch.rand(size, requires_grad=True)
    with jax.set_mesh(jax.make_mesh((2,), ("d",))):
        y = f(x)
        y.sum().backward()
    torch.testing.assert_close(y, x.sin())
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_settings_of_torch_and_jax_are_unchanged():
    def state():
        return (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads(), dict(jax.config.values))

    before = state()
    f = jtbridge.to_torch_function(lambda x: x**2)
    x = torch.rand(3, requires_grad=True)
    torch.func.hessian(lambda x: f(x).sum())(x)
    f(x).sum().backward()
    assert state() == before


IMPORTS = """
import sys, torch, jax.numpy as jnp, jtbridge
f = jtbridge.to_torch_function(lambda x: x**2)
x = torch.rand(3, requires_grad=True)
f(x).sum().backward()
print(*[name for name in ("torch._dynamo", "sympy", "flax", "equinox", "jtbridge.capture") if name in sys.modules])
"""


def test_call_and_gradient_import_no_heavy_modules():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_settings_and_caches_of_jax_changed_between_calls():
    f = jtbridge.to_torch_function(lambda x: {"y": jnp.sin(x) ** 2})

    def check():
        x = torch.rand(3, requires_grad=True)
        got = torch.autograd.grad(f(x)["y"].sum(), x, create_graph=True)[0]
        torch.testing.assert_close(got, torch.sin(2 * x))
        torch.autograd.grad(got.sum(), x)

    check()
    jax.clear_caches()
    check()
    for setting in (jax.checking_leaks, lambda: jax.enable_checks(True), lambda: jax.debug_nans(True), jax.disable_jit):
        with setting():
            check()
    check()


def test_without_jit_arguments_are_arrays_of_jax():
    def f(x):
        x += 1
        return x.at[0].set(0)

    x = torch.ones(3)
    with jax.disable_jit():
        assert jtbridge.to_torch_function(f)(x).tolist() == [0.0, 2.0, 2.0]
    assert x.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("size", [4, 100_000])
def test_array_stored_by_the_function_without_jit_does_not_change(size: int):
    kept = []
    x = torch.ones(size)
    with jax.disable_jit():
        jtbridge.to_torch_function(lambda x: kept.append(x) or x + 1)(x)
    x.zero_()
    assert (kept[0] == 1).all()


def test_a_function_in_a_compiled_loop_of_torch_threads_and_recursion():
    g = jtbridge.to_torch_function(lambda x: x * 2)
    f = jtbridge.to_torch_function(
        lambda x: jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + 1
    )
    x = torch.ones(2)
    for _ in range(3):
        x = f(g(x))
    assert x.tolist() == [15.0, 15.0]


def test_the_forward_runs_once_for_a_gradient():
    runs = []

    @jax.custom_jvp
    def counted(x):
        return jax.pure_callback(lambda v: (runs.append(1), v)[1], jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    counted.defjvp(lambda primals, tangents: (counted(*primals), tangents[0]))
    f = jtbridge.to_torch_function(lambda x: jnp.sin(counted(x)).sum())
    x = torch.rand(3, requires_grad=True)
    for number in range(1, 4):
        f(x).backward()
        assert len(runs) == number
    torch.testing.assert_close(x.grad, 3 * x.detach().cos())


def test_a_gradient_belongs_to_the_forward_that_ran():
    """This also holds if JAX traces the forward again in between, with a changed closure."""
    box = [jnp.full((), 2.0)]
    f = jtbridge.to_torch_function(lambda x: jnp.sum(jnp.sin(x * box[0])))
    x = torch.rand(3, requires_grad=True)
    first = f(x)
    box[0] = jnp.full((), 5.0)
    jax.clear_caches()
    second = f(x)
    torch.testing.assert_close(torch.autograd.grad(first, x)[0], 2 * torch.cos(2 * x))
    torch.testing.assert_close(torch.autograd.grad(second, x)[0], 5 * torch.cos(5 * x))


@pytest.mark.parametrize("size", [16, 1 << 18])
def test_large_and_small_results_can_be_written_to(size: int):
    f = jtbridge.to_torch_function(lambda x: (x + 1, x))
    x = torch.zeros(size)
    for _ in range(3):
        a, b = f(x)
        a.add_(1)
        b.add_(1)
        assert (float(a.sum()), float(b.sum()), float(x.sum())) == (2 * size, size, 0)


def test_dict_results_keep_their_order_and_key_types():
    f = jtbridge.to_torch_function(lambda x: {"b": x, 1: {"z": 2 * x, "y": [{"d": 3 * x, "c": x}]}, "a": x})
    x = torch.ones(2)
    for found in (f(x), torch.func.vmap(f)(x), torch.func.jacrev(f)(x)):
        assert list(found) == ["b", 1, "a"]
        assert list(found[1]) == ["z", "y"]
        assert list(found[1]["y"][0]) == ["d", "c"]
    assert f(x)[1]["y"][0]["d"].tolist() == [3, 3]
