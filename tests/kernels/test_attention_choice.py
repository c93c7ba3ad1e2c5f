"""The choice between the Triton kernel and cuDNN for attention on a GPU, and that programs lower with either."""

from __future__ import annotations

import functools
import re
import types

import jax
import jax.numpy as jnp
import pytest
import torch

import jtbridge
from jtbridge import _compat
from jtbridge.errors import BackendError
from jtbridge.kernels import attention
from jtbridge.kernels._attention import choice, chosen_attention, cudnn, differentiable
from jtbridge.kernels._chip import Chip

from .harness import assert_close, needs_compiler, needs_triton, normal, pretending

pytestmark = pytest.mark.cpu

H100, A100 = Chip("NVIDIA H100 80GB HBM3", 90), Chip("NVIDIA A100-SXM4-80GB", 80)
T4, MI300 = Chip("Tesla T4", 75), Chip("AMD Instinct MI300X", None)


def of(length=1024, d=64, dtype="bfloat16", heads=4, kv_heads=4, kv_len=None):
    """Return the shapes of query, key and value."""
    query = jax.ShapeDtypeStruct((2, heads, length, d), jnp.dtype(dtype))
    key = jax.ShapeDtypeStruct((2, kv_heads, kv_len or length, d), jnp.dtype(dtype))
    return query, key, key


@pytest.fixture
def on(monkeypatch):
    """Return a function ``on(chip)`` that simulates a GPU and cuDNN."""

    def use(chip, version=91002):
        monkeypatch.setattr(choice, "present", lambda: chip)
        monkeypatch.setattr(choice, "cudnn_version", lambda: version)

    yield use
    differentiable.kernel_or_cudnn.cache_clear()  # the cache may hold a function with which a test replaced cuDNN


MASK = jax.ShapeDtypeStruct((1024, 1024), jnp.dtype(bool))


@pytest.mark.parametrize(
    ("shape", "keywords", "implementation", "reason"),
    [
        ({}, {}, "cudnn", "made for Hopper"),
        ({"d": 128, "dtype": "float16"}, {"is_causal": True}, "cudnn", "made for Hopper"),
        ({"heads": 8, "kv_heads": 2}, {"is_causal": True, "scale": -2.0}, "cudnn", "made for Hopper"),
        ({"d": 96}, {}, "triton", "preferred for heads of 64 and 128, not 96"),
        ({"length": 128}, {}, "triton", "preferred between equal lengths of 512 or more"),
        ({"kv_len": 2048}, {}, "triton", "preferred between equal lengths of 512 or more"),
        ({}, {"is_causal": True, "window": (64, None)}, "triton", "the kernels skip what is outside a window"),
        ({"dtype": "float32"}, {}, "triton", "cuDNN takes bfloat16 and float16, not float32"),
        ({"d": 60}, {}, "triton", "cuDNN takes heads of a multiple of 8 up to 128, not 60"),
        ({"d": 256}, {}, "triton", "cuDNN takes heads of a multiple of 8 up to 128, not 256"),
        ({}, {"mask": MASK}, "triton", "a query for which the mask leaves no key would not get 0"),
        ({}, {"dropout_rate": 0.1}, "triton", "cuDNN draws other random numbers"),
        ({}, {"return_logsumexp": True}, "triton", "no gradient of the logarithm"),
        ({}, {"window": (3, 4)}, "triton", "only if it looks back"),
        ({}, {"window": (3, None)}, "triton", "only if it looks back"),
        ({"kv_len": 2048}, {"is_causal": True}, "triton", "needs queries and keys of equal length, not 1024 and"),
        ({}, {"scale": 0.0}, "triton", "cuDNN takes a `scale` over 0"),
        ({"d": 300}, {}, "jnp", "the kernels take up to 256"),
    ],
)
def test_choice_on_hopper(on, shape, keywords, implementation, reason):
    on(H100)
    got = chosen_attention(*of(**shape), **keywords)
    assert got.implementation == implementation
    assert reason in got.reason


@pytest.mark.parametrize(
    ("chip", "version", "reason"),
    [
        (A100, 91002, "cuDNN is preferred on compute capability 9.0 alone"),
        (None, None, "cuDNN is preferred on compute capability 9.0 alone"),
        (T4, 91002, "needs an NVIDIA GPU of compute capability 8.0 or more, this is Tesla T4"),
        (MI300, None, "needs an NVIDIA GPU of compute capability 8.0 or more, this is AMD Instinct MI300X"),
        (H100, None, "JAX finds no cuDNN"),
        (H100, 8907, "JAX finds no cuDNN of 90000 or more, but 8907"),
    ],
)
def test_choice_on_other_chips(on, chip, version, reason):
    on(chip, version)
    got = chosen_attention(*of())
    assert got.implementation == "triton"
    assert reason in got.reason


def test_explicit_implementation(on):
    on(A100)
    assert chosen_attention(*of(), implementation="cudnn") == ("cudnn", "it is asked for")
    on(H100)
    assert chosen_attention(*of(), implementation="triton") == ("triton", "it is asked for")
    on(T4)
    with pytest.raises(BackendError, match=r"`implementation=\"cudnn\"`: cuDNN needs an NVIDIA GPU"):
        chosen_attention(*of(), implementation="cudnn")


@pytest.mark.parametrize(
    ("shape", "keywords", "message"),
    [
        (
            {"dtype": "float32"},
            {"implementation": "cudnn"},
            "is 'cudnn', which cannot do this: cuDNN takes bfloat16",
        ),
        ({}, {"implementation": "cudnn", "return_logsumexp": True}, "has no gradient of the logarithm"),
        ({}, {"implementation": "cudnn", "mask": jnp.ones((8, 8), bool)}, "leaves no key"),
        ({"d": 300}, {"implementation": "triton"}, "'triton', which cannot do this: `query` has heads of 300"),
        ({}, {"implementation": "xla"}, "`implementation` is 'xla', expected None or one of triton, cudnn"),
    ],
)
def test_unsupported_cudnn_arguments_are_refused(shape, keywords, message):
    arrays = [jnp.zeros(x.shape, x.dtype) for x in of(**({"length": 8} | shape))]
    with pytest.raises(ValueError, match=message):
        attention(*arrays, **keywords)


def test_jax_with_changed_internals_is_refused(on, monkeypatch):
    on(H100)
    module = _compat.cudnn_attention()
    monkeypatch.setattr(module, "_dot_product_attention_fwd_impl", lambda query, key: None)
    got = chosen_attention(*of())
    assert got.implementation == "triton"
    assert "takes other arguments than those that are known" in got.reason


def lowered(f, *args, platforms=("cuda",)):
    """Return the custom calls of attention in a program, in order."""
    with pretending(90):
        text = jax.jit(f).trace(*args).lower(lowering_platforms=platforms).as_text()
    return re.findall(r"@(triton_kernel_call|__cudnn\$\w+)", text)


def gradients(**keywords):
    def f(*args):
        return jax.grad(lambda *x: attention(*x, **keywords).astype("float32").sum(), (0, 1, 2))(*args)

    return f


KERNELS = ["triton_kernel_call"] * 3
CUDNN = ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]


@needs_triton
@needs_compiler
@pytest.mark.parametrize("is_causal", [False, True])
def test_program_contains_the_chosen_implementation(on, is_causal):
    on(H100)
    args = [jnp.zeros(x.shape, x.dtype) for x in of(heads=4, kv_heads=2)]
    forward = functools.partial(attention, is_causal=is_causal)
    assert lowered(forward, *args) == CUDNN[:1]
    assert lowered(gradients(is_causal=is_causal), *args) == CUDNN
    assert lowered(gradients(is_causal=is_causal), *args, platforms=("cpu", "cuda")) == CUDNN
    assert lowered(gradients(is_causal=is_causal), *args, platforms=("cpu",)) == []
    assert lowered(gradients(is_causal=is_causal, implementation="triton"), *args) == KERNELS
    assert lowered(jax.vmap(gradients(is_causal=is_causal)), *(x[None] for x in args)) == CUDNN
    on(A100)
    assert lowered(gradients(is_causal=is_causal), *args) == KERNELS
    assert lowered(gradients(is_causal=is_causal, implementation="cudnn"), *args) == CUDNN
    on(T4)
    with pytest.raises(BackendError, match="this is Tesla T4"):
        lowered(gradients(is_causal=is_causal, implementation="cudnn"), *args)


@needs_compiler
def test_cudnn_needs_no_triton(on, monkeypatch):
    on(H100)
    monkeypatch.setattr(differentiable, "triton_unsupported_reason", lambda: "`triton` is not installed")
    args = [jnp.zeros(x.shape, x.dtype) for x in of()]
    text = jax.jit(gradients()).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"@(__cudnn\$\w+)", text) == CUDNN
    on(A100)
    text = jax.jit(gradients()).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call" not in text


@needs_compiler
def test_cudnn_calls_match_those_of_jax(monkeypatch):
    """Compare the custom calls with those of ``jax.nn.dot_product_attention``, which has [batch, length, heads, d]."""
    module = _compat.cudnn_attention()
    monkeypatch.setattr(module, "check_cudnn_version", lambda: 91002)
    args = [jnp.zeros(x.shape, x.dtype) for x in of(heads=4, kv_heads=2)]

    def theirs(**keywords):
        def loss(*x):
            moved = [a.swapaxes(1, 2) for a in x]
            out = jax.nn.dot_product_attention(*moved, **keywords, implementation="cudnn")
            return out.astype("float32").sum()

        return lambda *x: jax.grad(loss, (0, 1, 2))(*x)

    def requests(f):
        # JAX refuses to lower its own calls without devices, but the lowering rule by itself needs no devices.
        for name in ("_dot_product_attention_fwd", "_dot_product_attention_bwd"):
            rule = getattr(module, f"{name}_impl_wrapper", None) or getattr(module, f"{name}_impl")  # from jax 0.12 on
            monkeypatch.setattr(module, f"{name}_p_wrapper", types.SimpleNamespace(bind=rule))
        text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        calls = re.findall(r"@__cudnn\$(\w+)\(.*?backend_config = \"(.*?)\"[,}]", text)
        # The dimensions over which the products sum show the layout.
        return [(name, re.sub(r"dot_dimension_numbers\\22: \{.*?\]\}", "", config)) for name, config in calls]

    for ours, keywords in [
        ({}, {}),
        ({"is_causal": True, "scale": 0.3}, {"is_causal": True, "scale": 0.3}),
        ({"is_causal": True, "window": (5, None)}, {"is_causal": True, "local_window_size": (5, 0)}),
    ]:
        got = requests(gradients(**ours, implementation="cudnn"))
        assert [name for name, _ in got] == ["fmhaSoftmax", "fmhaSoftmaxBackward"]
        assert got == requests(theirs(**keywords))


@needs_compiler
def test_arrays_and_residuals_passed_to_cudnn(on, monkeypatch):
    """Replace cuDNN by the reference: it gets the arrays, residuals and cotangent in the form that cuDNN expects."""
    on(H100)
    query, key, value, ct = (normal(1, 2, 512, 64, dtype="bfloat16", seed=i) for i in range(4))
    reference = differentiable.reference
    settings = reference.AttentionSettings(0.125, None, 0, "none", 0.0)

    def backward(query, key, value, out, logsumexp, ct, *, settings):
        assert logsumexp.dtype == "float32"
        inputs = (query, key, value, out, logsumexp, ct, jnp.zeros_like(logsumexp))
        return reference.backward(*inputs, settings=settings)

    monkeypatch.setattr(cudnn, "forward", lambda *x, settings: reference.forward(*x, settings=settings))
    monkeypatch.setattr(cudnn, "output", lambda *x, settings: reference.forward(*x, settings=settings)[:1])
    monkeypatch.setattr(cudnn, "backward", backward)
    differentiable.kernel_or_cudnn.cache_clear()
    either = differentiable.kernel_or_cudnn(settings, None)
    differentiable.kernel_or_cudnn.cache_clear()

    want, pull = jax.vjp(lambda *x: attention(*x, is_causal=True), query, key, value)
    outputs = either.forward.kernel(query, key, value)
    gradients = either.backward.kernel(query, key, value, *outputs, ct)
    assert_close([outputs[0], *gradients], [want, *pull(ct)])


@pytest.mark.parametrize("implementation", [None, "triton", "cudnn"])
def test_values_match_on_cpu(implementation):
    shapes = of(length=16, d=8, heads=4, kv_heads=2)
    args = [normal(*x.shape, dtype=x.dtype, seed=i) for i, x in enumerate(shapes)]
    f = functools.partial(attention, is_causal=True, scale=-0.5)
    want, their_pull = jax.vjp(lambda *x: f(*x, return_logsumexp=True)[0], *args)
    got, pull = jax.vjp(lambda *x: f(*x, implementation=implementation), *args)
    assert_close(got, want)
    assert_close(pull(want), their_pull(want))
    along = [normal(*x.shape, dtype=x.dtype, seed=9) for x in args]
    moved = jax.jvp(lambda *x: f(*x, implementation=implementation), args, along)
    assert_close(moved, jax.jvp(lambda *x: f(*x, return_logsumexp=True)[0], args, along))
    batch = [jnp.stack([x, 2 * x]) for x in args]
    rows = jnp.stack([f(*args), f(*(2 * x for x in args))])
    assert_close(jax.vmap(lambda *x: f(*x, implementation=implementation))(*batch), rows)


@pytest.mark.gpu
@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, {"is_causal": True, "window": (100, None)}])
@pytest.mark.parametrize("d", [64, 128])
def test_cudnn_matches_the_kernels(d, keywords):
    args = [normal(*x.shape, dtype=x.dtype, seed=i) for i, x in enumerate(of(length=640, d=d, kv_heads=2))]
    ct = normal(*args[0].shape, dtype="bfloat16", seed=9)

    def both(implementation):
        out, pull = jax.vjp(lambda *x: attention(*x, **keywords, implementation=implementation), *args)
        return out, *pull(ct)

    assert_close(jax.jit(both, static_argnums=0)("cudnn"), jax.jit(both, static_argnums=0)("triton"), factor=4)


@needs_triton
@needs_compiler
@pytest.mark.parametrize(("chip", "calls"), [(H100, CUDNN), (A100, KERNELS)])
def test_backend_chooses_the_implementation(on, chip, calls):
    on(chip)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    f = jtbridge.wrap(lambda q, k, v: sdpa(q, k, v, is_causal=True), backend="triton")
    args = [jnp.zeros(x.shape, x.dtype) for x in of()]
    assert lowered(f, *args) == calls[:1]
    assert lowered(lambda *args: jax.grad(lambda *x: f(*x).astype("float32").sum(), (0, 1, 2))(*args), *args) == calls
