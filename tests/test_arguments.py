"""Arguments: trees of arrays of any origin, static values, and clear refusals of all others."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import ArgumentError, DTypeError

from .compare import assert_matches

Pair = collections.namedtuple("Pair", ["left", "right"])


class Mode(enum.Enum):
    DOUBLE = 2
    TRIPLE = 3


@dataclasses.dataclass
class Batch:
    x: Any
    scale: float


@dataclasses.dataclass(frozen=True)
class Options:
    power: int


def test_nested_trees(backend: str):
    f = jtbridge.wrap(lambda tree, *rest, **named: tree["a"][0] + tree["b"].left * rest[0] - named["z"][1])
    got = jax.jit(f)({"a": [jnp.ones(2)], "b": Pair(jnp.full(2, 3.0), None)}, jnp.full(2, 2.0), z=(0.0, jnp.ones(2)))
    assert_matches(got, torch.full((2,), 6.0))


@pytest.mark.parametrize("make", [jnp.asarray, np.asarray, torch.as_tensor])
def test_arrays_of_any_origin(make: Any, backend: str):
    array = make(np.array([1.0, 2.0], np.float32))
    assert_matches(jtbridge.wrap(lambda x: x * 2)(array), torch.tensor([2.0, 4.0]))


def test_numpy_scalars_are_arrays(backend: str):
    seen = []
    f = jtbridge.wrap(lambda x: (seen.append(x), x * 2)[1], purity="allow")
    assert_matches(f(np.float32(1.5)), torch.tensor(3.0))
    assert all(isinstance(x, torch.Tensor) for x in seen)


def test_foreign_byte_order_is_refused(backend: str):
    with pytest.raises(TypeError, match=r">f4"):
        jtbridge.wrap(lambda x: x)(np.ones(2, ">f4"))


def test_non_contiguous_numpy_and_torch_arguments(backend: str):
    base = np.arange(6, dtype=np.float32).reshape(2, 3)
    f = jtbridge.wrap(lambda x: x * 1)
    assert_matches(f(base.T), torch.from_numpy(base).T.contiguous())
    assert_matches(f(base[::-1, ::2]), torch.from_numpy(base[::-1, ::2].copy()))
    assert_matches(f(torch.from_numpy(base).T), torch.from_numpy(base).T.contiguous())


@pytest.mark.parametrize(
    "value",
    [2, 2.0, True, "two", None, Mode.DOUBLE, (1, 2), slice(0, 2), torch.float16, torch.device("cpu"), Options(2), len],
    ids=repr,
)
def test_static_values_arrive_as_they_are(value: Any, backend: str):
    seen = []
    f = jtbridge.wrap(lambda x, v: (seen.append(v), x)[1], purity="allow")
    jax.jit(lambda x: f(x, value))(jnp.ones(2)).block_until_ready()
    assert seen
    for got in seen:
        assert type(got) is type(value)
        assert got == value


@pytest.mark.parametrize(("first", "second"), [(1, 1.0), (1, True), (0.0, -0.0), (0, False), ("1", 1), (2, 3)])
def test_equal_static_values_of_different_types_are_distinguished(first: Any, second: Any, backend: str):
    """1 == 1.0 == True in Python, but torch computes different things with them."""
    f = jtbridge.wrap(lambda x, v: torch.full((2,), v) if not isinstance(v, str) else x)
    for value in (first, second, first):
        expected = torch.zeros(1) if isinstance(value, str) else torch.full((2,), value)
        got = f(jnp.zeros(1), value)
        assert_matches(got, expected)
        assert np.signbit(np.asarray(got, float)).tolist() == np.signbit(expected.numpy().astype(float)).tolist()


@pytest.mark.parametrize("make", [jtbridge.wrap, jtbridge.to_torch_function])
def test_equal_ranges_written_differently_are_distinguished(make):
    f = make(lambda x, r: x * r.stop)
    x = jnp.ones(1) if make is jtbridge.wrap else torch.ones(1)
    assert [float(f(x, r)[0]) for r in (range(0, 3, 2), range(0, 4, 2), range(0, 3, 2))] == [3, 4, 3]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Scaled:
    x: Any
    scale: Any = dataclasses.field(metadata={"static": True})


@pytest.mark.parametrize("wrap", [jtbridge.wrap, lambda f: jtbridge.wrap(f, backend="xla")], ids=["eager", "xla"])
def test_static_parts_of_a_tree_are_distinguished_by_type(wrap):
    f = wrap(lambda s: Scaled(s.x * s.scale, s.scale))
    x = jnp.ones(2, int)
    for scale in (0, False, -0.0, 0.0, 0):
        got, expected = f(Scaled(x, scale)), torch.ones(2, dtype=torch.int32) * scale
        assert_matches(got.x, expected)
        assert str(got.scale) == str(scale)
        assert np.signbit(np.asarray(got.x, float)).tolist() == torch.signbit(expected.float()).tolist()


def test_nan_as_a_static_value_does_not_retrace_each_call():
    f = jtbridge.wrap(lambda x, v: x * v, backend="xla")
    for _ in range(3):
        assert np.isnan(f(jnp.ones(2), float("nan"))).all()
    assert len(f._traced_calls.outside_traces) == 1


def test_keyword_arguments_and_defaults(backend: str):
    def f(x, /, y=2.0, *, z=None):
        return x * y if z is None else x * y + z

    wrapped = jax.jit(jtbridge.wrap(f), static_argnames="y")
    assert wrapped(jnp.ones(1)).tolist() == [2]
    assert wrapped(jnp.ones(1), y=3.0).tolist() == [3]
    assert wrapped(jnp.ones(1), z=jnp.ones(1)).tolist() == [3]


def test_keywords_that_jtbridge_uses_itself(backend: str):
    f = jtbridge.wrap(lambda self, args, kwargs, name=1: self * args * kwargs * name)
    assert f(self=jnp.array(2), args=jnp.array(3), kwargs=jnp.array(5), name=7) == 210


def test_changing_shapes_and_dtypes(backend: str):
    f = jtbridge.wrap(lambda x: x.sum(0))
    for shape in [(3,), (2, 3), (0, 2), (3,)]:
        assert_matches(f(jnp.ones(shape)), torch.ones(shape).sum(0))
    assert_matches(f(jnp.ones(2, jnp.int32)), torch.ones(2, dtype=torch.int64).sum(0))


def test_no_array_arguments(backend: str):
    f = jtbridge.wrap(lambda n: torch.arange(n) * 2)
    assert_matches(f(3), torch.arange(3) * 2)
    assert_matches(jax.jit(f, static_argnums=0)(3), torch.arange(3) * 2)
    assert_matches(jtbridge.wrap(lambda: torch.ones(2))(), torch.ones(2))


def test_dataclass_with_arrays_is_a_tree(backend: str):
    f = jtbridge.wrap(lambda batch: batch.x * batch.scale)
    assert_matches(f(Batch(jnp.ones(2), 3.0)), torch.full((2,), 3.0))


def test_hugging_face_output_as_an_argument(backend: str):
    from transformers.modeling_outputs import BaseModelOutput

    f = jtbridge.wrap(lambda out: out.last_hidden_state * 2)
    assert_matches(f(BaseModelOutput(last_hidden_state=jnp.ones(2))), torch.full((2,), 2.0))


def test_module_as_a_static_argument(backend: str):
    layer = torch.nn.Linear(2, 3)
    f = jtbridge.wrap(lambda layer, x: layer(x))
    assert_matches(f(layer, jnp.ones(2)), layer(torch.ones(2)).detach())


def test_unhashable_static_value_is_named(backend: str):
    with pytest.raises(ArgumentError) as caught:
        jtbridge.wrap(lambda x, s: x)(jnp.ones(2), {"ids": {1, 2}})
    assert str(caught.value) == (
        "argument `s['ids']` of `<lambda>` is a set, which is neither an array nor hashable. Pass arrays in "
        "tuples, lists, dicts or other pytrees, and static values as hashable ones; or close over it."
    )


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([object()]), np.zeros(2, "M8[s]"), np.zeros(2, "i4,f4")])
def test_arrays_that_are_not_numbers(array: np.ndarray, backend: str):
    with pytest.raises(ArgumentError, match=r"is a NumPy array of dtype .* which is not a number"):
        jtbridge.wrap(lambda x: x)(array)


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
def test_long_doubles(dtype: type, backend: str):
    with pytest.raises(DTypeError, match=r"argument `x` of .* which neither JAX nor torch has.*x\.astype\("):
        jtbridge.wrap(lambda x: x)(np.ones(2, dtype))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, lambda f: jax.jit(jax.vmap(f))])
def test_key_as_a_plain_argument_points_to_rng(backend: str, transform: Callable):
    f = transform(jtbridge.wrap(lambda x, key: x))
    with pytest.raises(DTypeError, match=r"argument `key` of `.*` has JAX dtype `key<fry>`.*passed as `rng=`"):
        f(jnp.ones(2), jax.random.split(jax.random.key(0)))


def test_wrong_number_of_arguments_is_torch_like(backend: str):
    f = jtbridge.wrap(lambda x, y: x + y)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'"):
        f(jnp.ones(2))
    assert f(jnp.ones(1), jnp.ones(1)).tolist() == [2]


def test_same_array_twice_are_two_tensors(backend: str):
    """Writing to one must not change the other."""
    f = jtbridge.wrap(lambda x, y: (x.add_(1), y * 1))
    x = jnp.zeros(2)
    first, second = f(x, x)
    assert first.tolist() == [1, 1]
    assert second.tolist() == [0, 0]


def test_large_tree(backend: str):
    tree = {f"k{i}": jnp.full((), float(i)) for i in range(100)}
    f = jtbridge.wrap(lambda tree: sum(tree.values()))
    assert float(jax.jit(f)(tree)) == sum(range(100))
    assert all(float(g) == 1 for g in jax.grad(f)(tree).values())


def test_wrap_refuses_objects_that_are_not_callable():
    with pytest.raises(ArgumentError, match="`wrap` takes a callable, but got an int"):
        jtbridge.wrap(3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"residuals": "keep"}, "`residuals` must be one of 'save', 'recompute', but it is 'keep'."),
        ({"effects": "io"}, "`effects` must be one of None, 'ordered', but it is 'io'."),
        ({"int32": "int32"}, "`int32` must be one of 'int64', 'keep', but it is 'int32'."),
        ({"verify": "no"}, "`verify` must be one of True, False, but it is 'no'."),
        ({"return_mutated": "x"}, "`return_mutated` must be one of True, False, but it is 'x'."),
        ({"batched": 3}, "`batched` must be the name of an argument, or a tuple of names, but it is 3."),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str):
    with pytest.raises(ArgumentError) as caught:
        jtbridge.wrap(torch.sin, **options)
    assert str(caught.value) == message


@pytest.mark.parametrize("options", [{"verify": "no"}, {"tune": 2}], ids=str)
def test_switches_of_config_are_checked(options: dict[str, Any]):
    with (
        pytest.raises(ArgumentError, match=f"`{next(iter(options))}` must be True or False"),
        jtbridge.config(**options),
    ):
        pass


def test_batched_of_a_module_accepts_no_names():
    with pytest.raises(ArgumentError, match=r"`batched` of `jtbridge.module` must be True or False, but it is 'x'"):
        jtbridge.module(torch.nn.Linear(1, 1), batched="x")  # type: ignore[arg-type]


def test_wrap_refuses_functions_of_jax():
    for fn in (jnp.sin, jax.jit(lambda x: x)):
        with pytest.raises(
            ArgumentError, match=r"`wrap` takes a torch function, but `.*` is a JAX function. Call it as"
        ):
            jtbridge.wrap(fn)


@jax.tree_util.register_pytree_with_keys_class
class Checked:
    """A container whose constructor looks at its child, which JAX's documentation advises against."""

    def __init__(self, x: Any):
        if x.ndim != 1:
            raise ValueError("not a vector")
        self.x = x

    def tree_flatten_with_keys(self) -> tuple[Any, None]:
        return ((jax.tree_util.GetAttrKey("x"), self.x),), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Checked:
        return cls(*children)


@pytest.mark.parametrize("run", [lambda f: f, jax.jit])
def test_container_that_refuses_placeholders(run: Callable[..., Any], backend: str):
    f = run(jtbridge.wrap(lambda tree, scale: Checked(tree["b"].x * tree["a"][0] * scale)))
    x = jnp.arange(3.0)
    assert_matches(f({"b": Checked(x), "a": [x + 1]}, 2.0).x, torch.tensor([0.0, 4.0, 12.0]))
    gradient = run(jax.grad(lambda tree: f(tree, 2.0).x.sum()))({"b": Checked(x), "a": [x + 1]})
    assert_matches(gradient["b"].x, torch.tensor([2.0, 4.0, 6.0]))


def test_names_within_a_container_that_refuses_placeholders():
    def write(tree: Any) -> None:
        tree["b"].x.zero_()
        tree["a"][0].zero_()

    f = jtbridge.wrap(write, return_mutated=True)
    for run in (f, jax.jit(f)):
        _, mutated = run({"b": Checked(jnp.ones(3)), "a": [jnp.ones(2)]})
        assert sorted(mutated) == ["tree['a'][0]", "tree['b'][<flat index 0>]"]


@pytest.mark.parametrize(
    "transform", [lambda f: torch.func.grad(lambda x: f(x).sum()), torch.vmap], ids=["grad", "vmap"]
)
def test_a_tensor_of_a_torch_transformation_is_refused(transform):
    f = jtbridge.wrap(lambda x: x * 2)
    with pytest.raises(ArgumentError, match=r"a tensor of a transformation of `torch.func`.*call its `.function`"):
        transform(f)(torch.ones(3))
    torch.testing.assert_close(transform(f.function)(torch.ones(3)), transform(lambda x: x * 2)(torch.ones(3)))


@pytest.mark.parametrize("make", [float, np.float32, lambda x: np.full(2, x)], ids=["number", "scalar", "array"])
def test_values_that_jax_gives_to_a_function_of_custom_jvp(make: Callable[[float], Any]):
    """JAX makes a `TypedFloat` of a Python number; the wrapped function takes the `TypedFloat` as an array."""
    f = jax.custom_jvp(jtbridge.wrap(torch.sin))
    f.defjvps(lambda tangent, out, x: tangent * 2)
    x = make(3.0)
    for call in (f, jax.jit(f)):
        np.testing.assert_allclose(call(x), np.sin(x), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(x), np.full_like(x, 2.0))
