"""Every error class, raised through the public functions: the message, and that the next call works."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import jtbridge
from jtbridge import errors

from .compare import assert_matches

X = jnp.array([1.0, 2.0])


@pytest.fixture(autouse=True)
def next_call_works(backend: str) -> Iterator[None]:
    """Check after each test that the next calls work, and that the state of the threads is unchanged."""
    grad_mode, dtype, generator = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_rng_state()
    yield
    f = jtbridge.wrap(torch.sin)
    assert_matches(f(X), torch.sin(torch.tensor([1.0, 2.0])))
    assert_matches(jax.jit(jax.grad(lambda x: f(x).sum()))(X), torch.cos(torch.tensor([1.0, 2.0])))
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == (grad_mode, dtype)
    assert torch.equal(torch.get_rng_state(), generator)


def test_every_error_class_has_the_base_class_and_is_documented():
    classes = [c for c in vars(errors).values() if isinstance(c, type)]
    raised = [c for c in classes if not issubclass(c, Warning)]
    assert all(issubclass(c, errors.JtbridgeError) for c in raised)
    assert all(c.__doc__ for c in classes)


def test_argument_error():
    with pytest.raises(errors.ArgumentError) as caught:
        jtbridge.wrap(torch.sin)({1, 2})
    assert str(caught.value) == (
        "argument `argument 0` of `sin` is a set, which is neither an array nor hashable. Pass arrays in tuples, "
        "lists, dicts or other pytrees, and static values as hashable ones; or close over it."
    )


def test_argument_error_for_a_sparse_result():
    with pytest.raises(errors.ArgumentError) as caught:
        jtbridge.wrap(lambda x: x.to_sparse())(X)
    assert (
        str(caught.value)
        == "A result has layout torch.sparse_coo, which JAX does not have. Return `.to_dense()` of it."
    )


def _nested(*rows: torch.Tensor, layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are a prototype of torch
        return torch.nested.nested_tensor(list(rows), layout=layout)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("program", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_argument_error_for_a_nested_result(program, layout):
    with pytest.raises(errors.ArgumentError) as caught:
        program(jtbridge.wrap(lambda x: _nested(x, x[:1], layout=layout)))(X)
    assert (
        str(caught.value)
        == "A result is a nested tensor, which JAX does not have. Return `.to_padded_tensor(0.0)` of it."
    )


def test_a_nested_tensor_that_is_closed_over():
    rows = _nested(torch.ones(2), torch.ones(3), layout=torch.strided)
    f = jtbridge.wrap(lambda x: x + rows.to_padded_tensor(0.0).sum(), backend="dlpack")
    assert jax.jit(f)(jnp.zeros(2)).tolist() == [5, 5]


@pytest.mark.parametrize(
    ("argument", "error", "text"),
    [
        (
            torch.eye(2).to_sparse(),
            errors.ArgumentError,
            "layout torch.sparse_coo, which JAX does not have. Pass `.to_d",
        ),
        (
            _nested(torch.ones(2), layout=torch.strided),
            errors.ArgumentError,
            "is a nested tensor, which JAX does not have.",
        ),
        (
            _nested(torch.ones(2), layout=torch.jagged),
            errors.ArgumentError,
            "is a nested tensor, which JAX does not have.",
        ),
        (
            torch.zeros(2).to(torch.complex32),
            errors.DTypeError,
            "torch dtype `torch.complex32`, which JAX does not have",
        ),
    ],
    ids=["sparse", "nested", "jagged", "complex32"],
)
def test_arguments_that_jax_does_not_have_are_named(argument, error, text):
    with pytest.raises(error) as caught:
        jtbridge.wrap(lambda batch: batch["x"])({"x": argument})
    assert str(caught.value).startswith("argument `batch['x']` of `<lambda>` ")
    assert text in str(caught.value)
    assert "inside the function" not in str(caught.value)


@pytest.mark.parametrize("program", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_argument_error_for_a_result_with_keys_that_jax_cannot_sort(program):
    with pytest.raises(errors.ArgumentError) as caught:
        program(jtbridge.wrap(lambda x: (x, {"a": [{"b": x, 1: x}]})))(X)
    assert (
        str(caught.value).partition("\n")[0]
        == "`result[1]['a'][0]` is a dict with the keys 'b', 1, which JAX cannot sort. Use keys of one type, such as "
        "strings."
    )


def test_dtype_error_of_an_argument():
    with pytest.raises(errors.DTypeError) as caught:
        jtbridge.wrap(lambda ids: ids)(jnp.zeros(2, jnp.int4))
    assert str(caught.value).startswith(
        "argument `ids` of `<lambda>` has JAX dtype `int4`, which torch does not have. Both sides have: bool, uint8, "
    )
    assert str(caught.value).endswith("Convert it with `.astype(...)` before the call.")


def test_dtype_error_of_a_result():
    with pytest.raises(errors.DTypeError) as caught:
        jtbridge.wrap(lambda x: (x, x.to(torch.complex32)))(X)
    assert str(caught.value).startswith(
        "Result 1 of `<lambda>` has torch dtype `torch.complex32`, which JAX does not have. Both sides have: torch.bool"
    )
    assert str(caught.value).endswith("Convert it with `.to(...)` inside the function.")


def test_data_dependent_shape_error():
    line = sys._getframe().f_lineno + 2
    with pytest.raises(errors.DataDependentShapeError) as caught:
        jax.jit(jtbridge.wrap(torch.nonzero))(X)
    assert str(caught.value) == (
        "The shape of the result of `nonzero` depends on the values of its arguments: the size of axis 0 comes from "
        f"`aten.nonzero.default` at {__file__}:{line}. A JAX program needs it before it runs. Return an array of a "
        "fixed size, such as `torch.where(mask, x, 0)` instead of `x[mask]`; or call it outside of `jax.jit`; or pass "
        "`output_shapes=` if you know the shape. If an integer argument gives a size, close over it, so that its value "
        "is known when JAX traces."
    )
    known = jtbridge.wrap(torch.nonzero, output_shapes=jax.ShapeDtypeStruct((2, 1), jnp.int32))
    assert jax.jit(known)(X).tolist() == [[0], [1]]


def test_shape_inference_error():
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * (1 // int(x.numpy().max() == 2))

    with pytest.raises(errors.ShapeInferenceError) as caught:
        jax.jit(jtbridge.wrap(f))(X)
    assert type(caught.value) is errors.ShapeInferenceError
    message = str(caught.value)
    assert message.startswith("No output shapes could be inferred for `f`: on fake tensors it raised ")
    assert "run on zeros it raised ZeroDivisionError: " in message
    assert message.endswith("Pass `output_shapes=`, a tree of `jax.ShapeDtypeStruct`.")
    assert jtbridge.wrap(f, output_shapes=jax.ShapeDtypeStruct((2,), jnp.float32))(X).tolist() == [1, 2]


def test_message_that_ends_with_a_full_stop_is_quoted_without_it():
    def f(x: torch.Tensor) -> torch.Tensor:
        if x.numpy().max() != 2:
            raise ValueError("The largest is not two.")
        return x

    with pytest.raises(errors.ShapeInferenceError, match=r"it raised ValueError: The largest is not two\. Pass"):
        jax.jit(jtbridge.wrap(f))(X)


def test_output_shapes_that_are_not_shapes():
    with pytest.raises(errors.ShapeInferenceError) as caught:
        jtbridge.wrap(torch.nonzero, output_shapes="same")(X)
    assert str(caught.value) == (
        "`output_shapes` must be a tree of `jax.ShapeDtypeStruct` (or arrays), but holds 'same'."
    )


def test_output_shapes_of_torch():
    f = jtbridge.wrap(lambda x: torch.tensor(x.numpy() + 1), output_shapes=torch.empty(2))
    assert jax.jit(f)(X).tolist() == [2, 3]
    with pytest.raises(errors.DTypeError, match=r"A result of `output_shapes` has torch dtype `torch.complex32`"):
        jtbridge.wrap(torch.sin, output_shapes=torch.empty(2, dtype=torch.complex32))(X)


def test_wrong_output_shapes_are_refused_when_traced():
    f = jtbridge.wrap(torch.sin, output_shapes=jax.ShapeDtypeStruct((3,), jnp.float32))
    with pytest.raises(errors.OutputMismatchError) as caught:
        f(X)
    assert str(caught.value) == (
        "`output_shapes` of `sin` declares (float32[3]), but for these arguments it returns (float32[2]). Leave "
        "`output_shapes` out, or correct it."
    )


def listed_backends() -> str:
    """Return the backends as an error message lists them."""
    statuses = jtbridge.backends("cpu")
    assert not statuses[0].available
    return "; ".join(f"{s.name} ({'available' if s.available else s.reason})" for s in statuses)


def test_backend_error():
    known = f"Known: auto, {listed_backends()}."
    assert known.startswith('Known: auto, triton (it needs a GPU, the platform is "cpu"); xla (available); ')
    with pytest.raises(errors.BackendError) as caught:
        jtbridge.wrap(torch.sin, backend="cuda")
    assert str(caught.value) == f"There is no backend `cuda`. {known}"
    with pytest.raises(errors.BackendError) as caught, jtbridge.config(backend="numpy"):
        pass
    assert str(caught.value) == f"There is no backend `numpy`. {known}"
    with pytest.raises(errors.BackendError) as caught:
        jtbridge.wrap(torch.sin, backend=["xla"])
    assert str(caught.value) == f"There is no backend `['xla']`. {known}"


@pytest.mark.parametrize("jit", [False, True])
def test_backend_error_when_it_cannot_run(jit: bool):
    f = jtbridge.wrap(torch.sin)
    with jtbridge.config(backend="triton"), pytest.raises(errors.BackendError) as caught:
        (jax.jit(f) if jit else f)(X)
    assert str(caught.value) == (
        'Backend `triton` cannot run on platform "cpu": it needs a GPU, the platform is "cpu". '
        f"Known: {listed_backends()}."
    )


def test_device_error():
    with pytest.raises(errors.DeviceError) as caught:
        jax.jit(jtbridge.wrap(lambda x: x.to("meta")))(X)
    assert str(caught.value) == (
        "Result 0 of `<lambda>` lies on device `meta`, but its arguments are on `cpu`. Make tensors inside the "
        "function on the device of its arguments (`device=x.device`)."
    )
    with pytest.raises(errors.DeviceError, match=r"Result 0 of `<lambda>` lies on device `meta`, which JAX does not"):
        jtbridge.wrap(lambda x: x.to("meta"))(X)
    with pytest.raises(errors.DeviceError, match=r"device `meta`, which JAX does not have\. Move it with `\.cpu"):
        jtbridge.to_jax(torch.empty(2, device="meta"))


def test_arguments_on_different_devices():
    f = jtbridge.wrap(lambda x, params: x + params["w"])
    x, w = (jax.device_put(X, device) for device in jax.devices()[:2])
    message = r"`<lambda>` lie on different devices: `x` on .*:0, `params\['w'\]` on .*:1.* `jax.device_put`"
    for run in (f, jax.grad(lambda x, params: f(x, params).sum()), jax.vmap(f, (0, None))):
        with pytest.raises(errors.DeviceError, match=message):
            run(x, {"w": w})
    with pytest.raises(ValueError, match="incompatible devices"):
        jax.jit(f)(x, {"w": w})
    assert f(X, {"w": w}).devices() == {jax.devices()[1]}  # X is not committed


def test_trace_error_is_shown_if_the_example_run_raises():
    def write(x, mask):
        x = x.clone()
        x[mask] = torch.zeros(3, dtype=torch.float64)
        return x

    for run in (jtbridge.wrap(write), jax.jit(jtbridge.wrap(write))):
        with pytest.raises(RuntimeError, match="dtypes match, got Float for the destination and Double"):
            run(jnp.ones(4), jnp.array([True, False, True, True]))


def test_differentiation_error():
    def force(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad((x**2).sum(), x)[0]

    f = jtbridge.wrap(force)
    assert f(X).tolist() == [2, 4]
    with pytest.raises(errors.DifferentiationError) as caught:
        jax.grad(lambda x: f(x).sum())(X)
    assert str(caught.value) == (
        "Result 0 of `force` comes from torch.autograd.grad or backward without `create_graph=True`, so torch has no "
        "derivative of it. Pass `create_graph=True` there; or, if no gradient is wanted, apply "
        "`jax.lax.stop_gradient` to the arguments of the call."
    )


def by_method(y: torch.Tensor, **kwargs: Any) -> None:
    y.backward(**kwargs)


@pytest.mark.parametrize("backward", [by_method, torch.autograd.backward], ids=["method", "function"])
def test_a_gradient_that_backward_stored_has_no_derivative(backward: Callable):
    @jtbridge.wrap
    def force(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        backward((x**3).sum())
        assert x.grad is not None
        return x.grad

    assert force(X).tolist() == [3, 12]
    gradient = jax.grad(lambda x: force(x).sum())
    for differentiated in (gradient, jax.jit(gradient)):
        with pytest.raises(errors.DifferentiationError, match="without `create_graph=True`"):
            differentiated(X)


@pytest.mark.parametrize("make", [lambda f: jax.grad(lambda x: f(x).sum()), jax.vmap], ids=["grad", "vmap"])
def test_effects_error(make: Callable):
    f = jtbridge.wrap(torch.sin, effects="ordered")
    with pytest.raises(errors.EffectsError, match='`sin` is wrapped with effects="ordered" and cannot be '):
        make(f)(X)
    assert_matches(jax.jit(f)(X), torch.sin(torch.tensor([1.0, 2.0])))


def test_tensor_subclass_construction_that_fails_only_in_a_trace():
    class Ones(torch.Tensor):
        pass

    f = jtbridge.wrap(lambda x: x + Ones([1.0]))
    with pytest.raises(RuntimeError, match="Creating a new Tensor subclass") as caught:
        jax.jit(f)(jnp.ones(1))
    assert "make it outside of the function" in caught.value.__notes__[0]


def test_a_pullback_after_a_weight_has_changed():
    with torch.random.fork_rng():
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    pullback = jax.vjp(jtbridge.wrap(model), X)[1]
    with torch.no_grad():
        model[1].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        pullback(jnp.ones(1))
    assert "`Sequential`" in caught.value.__notes__[0]
    assert "jtbridge.module" in caught.value.__notes__[0]


@pytest.mark.parametrize("backend", ["auto", "dlpack"])
def test_invalid_index_dtype_raises_the_error_of_torch(backend: str):
    f = jtbridge.wrap(lambda x, i: x[i], backend=backend)
    with pytest.raises(IndexError, match="tensors used as indices must be long"):
        jax.jit(f)(jnp.ones((2, 3)), jnp.ones(2))


@pytest.mark.parametrize("use", [jnp.sin, jnp.sum, lambda x: jax.lax.sin(x), lambda x: jax.nn.relu(x)])
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_jax_call_in_a_torch_function_suggests_a_fix(use: Callable, jitted: bool):
    f = jtbridge.wrap(lambda x: use(x))
    with pytest.raises(TypeError) as caught:
        (jax.jit(f) if jitted else f)(jnp.ones(2))
    assert any("jtbridge.to_torch_function(f)" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("platform", ["CPU", "", 3])
def test_backends_of_no_platform(platform):
    with pytest.raises(errors.ArgumentError, match="must be 'cpu', 'cuda', 'rocm', 'gpu' or 'tpu', but it is"):
        jtbridge.backends(platform)


def test_eager_call_on_several_devices_suggests_translation():
    """Torch itself would run it, and the error says how."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("d")))
    f = jtbridge.wrap(lambda x: x[x > 1])
    for run in (f, jax.vmap(lambda x, y: f(y), (0, None))):
        with pytest.raises(errors.DataDependentShapeError) as caught:
            run(*([x] if run is f else [jnp.ones(3), x]))
        assert "no arrays on several devices" in caught.value.__notes__[0]
    with pytest.raises(errors.DataDependentShapeError) as caught:
        jax.jit(f)(x)
    assert not any("several devices" in note for note in getattr(caught.value, "__notes__", []))
    assert f(jax.device_put(x, jax.devices("cpu")[0])).tolist() == [2.0]
