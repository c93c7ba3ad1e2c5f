"""Random operators are a pure function of the JAX key that the call was given."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge._compat import _draws
from jtbridge.errors import ArgumentError, RandomnessError

from .compare import assert_matches

KEY = jax.random.key(7)
ONES = jnp.ones((4, 5))


def dropout(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x, 0.5)


def normal(x: torch.Tensor) -> torch.Tensor:
    return x * torch.randn(3)


def torch_dropout(key: jax.Array, x: torch.Tensor) -> torch.Tensor:
    """Return torch's draws with the seed that jtbridge derives from the key."""
    low, high = (int(word) for word in jax.random.bits(key, (2,), jnp.uint32))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed((high << 32) | low)
        return dropout(x)


@pytest.mark.parametrize("jit", [False, True])
def test_draws_match_torch(jit: bool, backend: str):
    f = jtbridge.wrap(dropout)
    call = jax.jit(lambda x, key: f(x, rng=key)) if jit else (lambda x, key: f(x, rng=key))
    for seed in range(3):
        key = jax.random.key(seed)
        assert_matches(call(ONES, key), torch_dropout(key, torch.ones(4, 5)))


def test_other_key_other_numbers(backend: str):
    f = jtbridge.wrap(dropout)
    assert (f(ONES, rng=KEY) == f(ONES, rng=KEY)).all()
    assert (f(ONES, rng=KEY) != f(ONES, rng=jax.random.key(8))).any()
    assert (f(ONES, rng=KEY) == f(ONES, rng=jax.random.PRNGKey(7))).all()  # a raw key


@pytest.mark.parametrize("residuals", ["save", "recompute"])
@pytest.mark.parametrize("jit", [False, True])
def test_one_mask_in_forward_and_backward(jit: bool, residuals: str, backend: str):
    """The gradient of dropout(x) by x is the mask, scaled like the result."""
    f = jtbridge.wrap(dropout, residuals=residuals)

    def run(x, key):
        value, pullback = jax.vjp(lambda x: f(x, rng=key), x)
        return value, pullback(jnp.ones_like(x))[0]

    value, gradient = (jax.jit(run) if jit else run)(ONES, KEY)
    assert_matches(value, torch_dropout(KEY, torch.ones(4, 5)))
    assert (gradient == value).all()


def test_one_mask_in_forward_mode_and_second_derivatives(backend: str):
    f = jtbridge.wrap(lambda x: dropout(x) ** 2)
    mask = torch_dropout(KEY, torch.ones(5))
    value, tangent = jax.jvp(lambda x: f(x, rng=KEY), (jnp.ones(5),), (jnp.ones(5),))
    assert_matches(value, mask**2)
    assert_matches(tangent, 2 * mask**2)
    hessian = jax.jit(jax.hessian(lambda x, key: f(x, rng=key).sum()))(jnp.ones(5), KEY)
    assert_matches(hessian, torch.diag(2 * mask**2))


def test_checkpoint_draws_the_same_again(backend: str):
    f = jtbridge.wrap(lambda x: dropout(x).exp())
    again = jax.checkpoint(lambda x, rng: f(x, rng=rng))
    plain, remade = (jax.jit(jax.grad(lambda x, g=g: g(x, rng=KEY).sum()))(ONES) for g in (f, again))
    assert (plain == remade).all()


@pytest.mark.parametrize(("fn", "jit"), [(dropout, True), (normal, False)])
def test_vmap_over_keys_matches_a_loop(fn, jit: bool, backend: str, rng: np.random.Generator):
    f = jtbridge.wrap(fn)
    keys, xs = jax.random.split(KEY, 4), jnp.asarray(rng.normal(size=(4, 3)).astype(np.float32))
    run = jax.vmap(lambda x, key: f(x, rng=key))
    found = (jax.jit(run) if jit else run)(xs, keys)
    assert (found == jnp.stack([f(x, rng=key) for x, key in zip(xs, keys, strict=True)])).all()
    assert len({tuple(row) for row in found.tolist()}) == 4


@pytest.mark.parametrize(("fn", "jit"), [(dropout, True), (normal, False)])
def test_one_key_under_vmap_matches_a_loop(fn, jit: bool, backend: str, rng: np.random.Generator):
    f = jtbridge.wrap(fn)
    xs = jnp.asarray(rng.normal(size=(4, 3)).astype(np.float32))
    run = jax.vmap(lambda x, key: f(x, rng=key), in_axes=(0, None))
    found = (jax.jit(run) if jit else run)(xs, KEY)
    np.testing.assert_allclose(found, jnp.stack([f(x, rng=KEY) for x in xs]), rtol=1e-6)


@pytest.mark.parametrize(
    "draw", [torch.rand_like, torch.randn_like, lambda x: torch.randint_like(x, 1000), lambda x: torch.rand_like(x) * x]
)
@pytest.mark.parametrize("called", [False, True])
def test_one_key_gives_each_row_the_numbers_of_a_call(draw, called: bool):
    f = jtbridge.wrap(draw, backend="dlpack" if called else "auto")
    xs = jnp.ones((4, 3)) * jnp.arange(1.0, 5)[:, None]
    run = jax.vmap(lambda x, key: f(x, rng=key), in_axes=(0, None))
    found = (jax.jit(run) if called else run)(xs, KEY)
    np.testing.assert_allclose(found, jnp.stack([jtbridge.wrap(draw)(x, rng=KEY) for x in xs]), rtol=1e-6)


@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
@pytest.mark.parametrize("keywords", [{}, {"rng": KEY}])
@pytest.mark.parametrize("draw", [lambda x, g: torch.rand(x.shape, generator=g), torch.rand_like, torch.bernoulli])
def test_generator_seeded_by_the_function_restarts_for_each_row(draw, keywords: dict):
    @jtbridge.wrap
    def f(x: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        drawn = draw(x, generator=generator) if draw in (torch.rand_like, torch.bernoulli) else draw(x, generator)
        return x + drawn

    xs = jnp.full((4, 8), 0.5)
    rows = [f(x, **keywords) for x in xs]
    np.testing.assert_array_equal(jax.vmap(lambda x: f(x, **keywords))(xs), jnp.stack(rows))


def test_gradients_under_vmap_over_keys_match_a_loop(backend: str, rng: np.random.Generator):
    f = jtbridge.wrap(lambda x: (dropout(x) ** 2).sum())
    keys, xs = jax.random.split(KEY, 4), jnp.asarray(rng.normal(size=(4, 6)).astype(np.float32))
    gradient = jax.grad(lambda x, key: f(x, rng=key))
    loop = jnp.stack([gradient(x, key) for x, key in zip(xs, keys, strict=True)])
    np.testing.assert_allclose(jax.jit(jax.vmap(gradient))(xs, keys), loop, rtol=1e-6)


def test_scan_with_a_key_per_step(backend: str):
    f = jtbridge.wrap(normal)
    keys = jax.random.split(KEY, 3)
    last, _ = jax.jit(lambda x: jax.lax.scan(lambda x, key: (f(x, rng=key), None), x, keys))(jnp.ones(3))
    expected = jnp.ones(3)
    for key in keys:
        expected = f(expected, rng=key)
    np.testing.assert_allclose(last, expected, rtol=1e-6)


def test_the_users_generator_is_untouched(backend: str):
    f = jtbridge.wrap(dropout)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    f(ONES, rng=KEY)
    jax.jit(jax.grad(lambda x, key: f(x, rng=key).sum()))(ONES, KEY).block_until_ready()
    jax.vmap(lambda key: f(ONES, rng=key))(jax.random.split(KEY, 2))
    with pytest.raises(RandomnessError):
        jax.jit(f)(ONES)
    assert torch.equal(torch.get_rng_state(), before)
    drawn = f(ONES)  # eagerly and without a key it draws as torch does
    torch.set_rng_state(before)
    assert_matches(drawn, dropout(torch.ones(4, 5)))


def test_the_users_generator_is_untouched_by_a_failure(backend: str):
    def fail(x: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(3)
        raise ValueError("after the draw", drawn.shape)

    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="after the draw"):
        jtbridge.wrap(fail)(ONES, rng=KEY)
    assert torch.equal(torch.get_rng_state(), before)


def test_missing_key_under_a_trace(backend: str):
    f = jtbridge.wrap(normal)
    with pytest.raises(RandomnessError) as caught:
        jax.jit(f)(jnp.ones(3))
    assert str(caught.value) == (
        "`normal` draws random numbers (aten.randn.default) but was called without a key. Pass a JAX key as "
        "`rng=`, for example `f(x, rng=jax.random.key(0))`; the same key gives the same numbers. "
        "A module that should not draw needs `model.eval()`, or `train=False` if it is called by `jtbridge.module`."
    )


def test_missing_key_of_a_function_that_cannot_be_traced(backend: str):
    f = jtbridge.wrap(lambda x: x * torch.randn(3) if x.sum().item() > -1 else x)
    with pytest.raises(RandomnessError, match=r"aten\.randn\.default"):
        jax.jit(f)(jnp.ones(3))
    late = jtbridge.wrap(lambda x: x * torch.randn(3) if x.sum().item() > 0 else x)  # draws on ones, not on zeros
    with pytest.raises(RandomnessError, match=r"draws random numbers \(aten\.randn"):
        jax.jit(late).trace(jnp.zeros(3))  # both ways are traced
    assert late(jnp.zeros(3)).tolist() == [0, 0, 0]
    # The branch that NumPy's numbers select is known only in a run; example arguments are zeros and ones.
    hidden = jtbridge.wrap(lambda x: x * torch.randn(3) if x.numpy().sum() > 100 else x)
    run = jax.jit(hidden)
    assert run(jnp.ones(3)).tolist() == [1, 1, 1]
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=r"draws random numbers \(aten\.randn"):
        jax.block_until_ready(run(jnp.full(3, 50.0)))


def test_a_function_that_cannot_be_traced_draws_as_torch_does_eagerly(backend: str):
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * torch.randn(3) if x.sum().item() > 0 else x

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        found = jtbridge.wrap(fn)(jnp.ones(3))
        torch.manual_seed(3)
        assert_matches(found, fn(torch.ones(3)))


def test_generator_of_the_function_is_refused(backend: str):
    generator = torch.Generator().manual_seed(0)
    f = jtbridge.wrap(lambda x: x * torch.randn(3, generator=generator))
    for keywords in ({}, {"rng": KEY}):
        with pytest.raises(RandomnessError, match=r"draws from a torch\.Generator of its own \(aten\.randn"):
            jax.jit(lambda x, keywords=keywords: f(x, **keywords))(jnp.ones(3))
        before = generator.get_state()
        drawn = f(jnp.ones(3), **keywords)  # an eager call draws from the generator as torch does
        assert_matches(drawn, torch.randn(3, generator=generator.clone_state().set_state(before)))


@pytest.mark.parametrize("key", [3, np.uint32(3), jnp.ones(2), jnp.zeros(3, jnp.uint32), jnp.zeros(0, jnp.uint32)])
def test_invalid_keys_are_refused(key: object, backend: str):
    f = jtbridge.wrap(dropout)
    for call in (lambda x: f(x, rng=key), jax.jit(lambda x: f(x, rng=key))):
        with pytest.raises(ArgumentError, match=r"`rng` must be a JAX key such as `jax\.random\.key"):
            call(ONES)


@pytest.mark.parametrize("jit", [False, True])
def test_a_raw_key_may_be_a_numpy_array(jit: bool, backend: str):
    f = jtbridge.wrap(dropout)
    call = (jax.jit if jit else lambda g: g)(lambda x, key: f(x, rng=key))
    raw = jax.random.key_data(KEY)
    np.testing.assert_array_equal(call(ONES, np.asarray(raw)), call(ONES, KEY))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_rows_draw_by_keys_of_other_prng_implementations(impl: str, jit: bool, backend: str):
    f = jtbridge.wrap(lambda x: torch.rand_like(x))
    call = (jax.jit if jit else lambda g: g)(lambda key: f(ONES, rng=key))
    keys = jax.random.split(jax.random.key(1, impl=impl), 3)
    rows = jax.vmap(call)(keys)
    np.testing.assert_array_equal(rows, jnp.stack([call(key) for key in keys]))
    assert len(np.unique(rows[:, 0, 0])) == 3
    np.testing.assert_array_equal(rows[0], call(jax.random.key_data(keys[0])))


@pytest.mark.parametrize("keys", [jax.random.split(KEY, 2), jax.random.split(jax.random.PRNGKey(0), 2)])
def test_several_keys_are_refused(keys: jax.Array, backend: str):
    f = jtbridge.wrap(dropout)
    for call in (f, jax.jit(lambda x, rng: f(x, rng=rng))):
        with pytest.raises(ArgumentError, match="`rng` must be one JAX key, but it is an array of shape"):
            call(ONES, rng=keys)


def test_key_that_is_not_needed(backend: str):
    f = jtbridge.wrap(torch.sin)
    assert_matches(jax.jit(lambda x: f(x, rng=KEY))(jnp.ones(2)), torch.sin(torch.ones(2)))


def test_module_in_training_and_evaluation(backend: str):
    model = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Dropout(0.5))
    f = jtbridge.wrap(model)
    with pytest.raises(RandomnessError):
        jax.jit(lambda x: f(x))(ONES)
    assert (f(ONES, rng=KEY) == 0).any()
    model.eval()
    expected = model(torch.ones(4, 5)).detach()
    assert_matches(f(ONES), expected)
    assert_matches(f(ONES, rng=KEY), expected)
    model.train()
    assert (f(ONES, rng=KEY) == 0).any()
    with pytest.raises(RandomnessError):
        jax.jit(lambda x: f(x))(ONES)


F = torch.nn.functional
# Overloads of one operator that differ only in the types of their arguments, and all other ways to draw.
DRAWS = {
    "normal, tensor and number": lambda x: torch.normal(x, 0.5),
    "normal, number and tensor": lambda x: torch.normal(0.5, x),
    "normal, tensors": lambda x: torch.normal(x, x),
    "normal, out": lambda x: torch.normal(x, 0.5, out=torch.empty_like(x)),
    "normal, numbers": lambda x: torch.normal(0.0, 1.0, x.shape) + x,
    "normal_": lambda x: x.clone().normal_(1, 2),
    "bernoulli": lambda x: torch.bernoulli(x / 2),
    "bernoulli, number": lambda x: torch.bernoulli(x, 0.5),
    "bernoulli_, number": lambda x: x.clone().bernoulli_(0.5),
    "bernoulli_, tensor": lambda x: x.clone().bernoulli_(x / 2),
    "randint_like": lambda x: torch.randint_like(x, 1000),
    "randint_like, low": lambda x: torch.randint_like(x, 5, 1000),
    "randint_like, tensor": lambda x: torch.randint_like(x, torch.tensor(1000)),
    "randint": lambda x: torch.randint(1000, x.shape) + x,
    "randint, low": lambda x: torch.randint(5, 1000, x.shape) + x,
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "rand": lambda x: torch.rand(x.shape) + x,
    "randn": lambda x: torch.randn(x.shape) + x,
    "randperm": lambda x: torch.randperm(100) + x.sum(),
    "multinomial": lambda x: torch.multinomial(x, 5, replacement=True),
    "poisson": lambda x: torch.poisson(x * 100),
    "binomial": lambda x: torch.binomial(x * 100, x / 2),
    "gamma": lambda x: torch._standard_gamma(x),
    "dirichlet": lambda x: torch._sample_dirichlet(x),
    "random_": lambda x: x.clone().random_(),
    "random_, to": lambda x: x.clone().random_(1000),
    "random_, from": lambda x: x.clone().random_(5, 1000),
    "uniform_": lambda x: x.clone().uniform_(),
    "cauchy_": lambda x: x.clone().cauchy_(),
    "exponential_": lambda x: x.clone().exponential_(),
    "geometric_": lambda x: x.clone().geometric_(0.1),
    "log_normal_": lambda x: x.clone().log_normal_(),
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.5, inplace=True),
    "feature_dropout": lambda x: F.dropout1d(x[None], 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x[None], 0.5, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True),
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "rrelu in place": lambda x: F.rrelu_(-x, training=True),
    "gumbel_softmax": F.gumbel_softmax,
    "fractional pooling": lambda x: F.fractional_max_pool2d(
        torch.arange(400.0).view(1, 20, 20) * x.sum(), 2, output_size=6
    ),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
    "Normal": lambda x: torch.distributions.Normal(x, x).sample(),
    "Gamma": lambda x: torch.distributions.Gamma(x, x).rsample(),
    "Categorical": lambda x: torch.distributions.Categorical(x).sample((9,)),
    "lstm with dropout": lambda x: torch.lstm(
        x[None],
        (torch.zeros(2, 4, 5), torch.zeros(2, 4, 5)),
        [torch.ones(20, 5)] * 4,
        False,
        2,
        0.5,
        True,
        False,
        False,
    )[0],
}


@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", DRAWS)
def test_every_random_operator_draws_by_the_key(name: str, jit: bool, backend: str):
    f = jtbridge.wrap(DRAWS[name], backend=backend)
    call = jax.jit(lambda x, key: f(x, rng=key)) if jit else (lambda x, key: f(x, rng=key))
    before = torch.get_rng_state()
    first, again, *others = (
        [np.asarray(leaf) for leaf in jax.tree.leaves(call(ONES, jax.random.key(seed)))] for seed in (0, 0, 1, 2, 3, 4)
    )
    assert torch.equal(torch.get_rng_state(), before)
    for one, same in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, same)
    assert any(not np.array_equal(one, it) for other in others for one, it in zip(first, other, strict=True))


def test_every_operator_that_takes_a_generator_is_seeded():
    takes = [
        schema
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::") and any(argument.name == "generator" for argument in schema.arguments)
    ]
    seeded = {str(operator) for operator, _ in _draws._random_kernels()}
    missing = [
        str(schema)
        for schema in takes
        if not schema.name.startswith("aten::_no_grad_") and str(_draws._overload_of_schema(schema)) not in seeded
    ]
    assert len(takes) > 50
    assert not missing


class NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.rand_like(grad)


def noisy_hook(x):
    y = x * 2
    if y.requires_grad:
        y.register_hook(lambda grad: grad * torch.rand_like(grad))
    return y


@pytest.mark.parametrize("fn", [NoisyGradient.apply, noisy_hook])
def test_draws_only_in_a_backward(fn):
    f = jtbridge.wrap(lambda x: fn(x).sum())

    def gradient(key):
        return jax.grad(lambda x: f(x, rng=key))(jnp.ones(4))

    state = torch.get_rng_state()
    first, again, other = map(gradient, [jax.random.key(0), jax.random.key(0), jax.random.key(1)])
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)
    for order in (jax.grad, jax.hessian):
        with pytest.raises(RandomnessError, match=r"A derivative of .* draws random numbers"):
            jax.jit(order(f))(jnp.ones(4))
        with pytest.raises(RandomnessError, match=r"A derivative of .* draws random numbers"):
            jax.jit(order(lambda x: f(x, rng=jax.random.key(0))))(jnp.ones(4))


def test_a_backward_draws_other_numbers_than_the_forward():
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * torch.rand_like(x)

        @staticmethod
        def backward(ctx, grad):
            return torch.rand_like(grad)

    f = jtbridge.wrap(Both.apply)
    for transform in (lambda g: g, jax.jit):
        out, pullback = transform(lambda x: jax.vjp(lambda x: f(x, rng=jax.random.key(0)), x))(jnp.ones(4))
        (gradient,) = pullback(jnp.ones(4))
        assert not np.intersect1d(out, gradient).size


def with_a_module_without_memory(x):
    with torch.device("meta"):
        module = torch.nn.Linear(2, 2)
        torch.nn.functional.dropout(torch.rand_like(torch.empty(3)))
    torch.rand_like(x, device="meta")
    return torch.func.functional_call(module, {"weight": 2 * torch.eye(2), "bias": torch.ones(2)}, (x,))


def the_same_untraceable(x):
    return with_a_module_without_memory(x) * int(x.detach().numpy().shape[0] == 2)


@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
@pytest.mark.parametrize("fn", [with_a_module_without_memory, the_same_untraceable])
@pytest.mark.parametrize("rng", [{}, {"rng": jax.random.key(0)}], ids=["no key", "a key"])
def test_meta_device_draws_do_not_advance_the_generator(fn, rng):
    f, x = jtbridge.wrap(fn), jnp.array([1.0, 2.0])
    before = torch.get_rng_state()
    np.testing.assert_array_equal(f(x, **rng), [3, 5])
    np.testing.assert_array_equal(jax.jit(lambda x: f(x, **rng))(x), [3, 5])
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: f(x, **rng).sum()))(x), [2, 2])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("jit", [False, True])
def test_a_complex_normal_has_its_mean_in_both_parts(jit: bool, backend: str):
    f = jtbridge.wrap(lambda x: torch.empty(20_000, dtype=torch.complex64).normal_(3.0, 1.0) + 0 * x)
    drawn = (jax.jit if jit else lambda g: g)(lambda x: f(x, rng=KEY))(jnp.ones(()))
    np.testing.assert_allclose([drawn.mean().real, drawn.mean().imag], [3, 3], atol=0.05)
    np.testing.assert_allclose([jnp.std(drawn.real), jnp.std(drawn.imag)], [0.5**0.5] * 2, atol=0.02)


@pytest.mark.parametrize("jit", [False, True])
def test_dropout_with_probability_one_propagates_nan(jit: bool, backend: str):
    f = jtbridge.wrap(lambda x: torch.native_dropout(x, 1.0, True)[0])
    dropped = (jax.jit if jit else lambda g: g)(lambda x: f(x, rng=KEY))(jnp.array([jnp.nan, jnp.inf, 1.0]))
    np.testing.assert_array_equal(dropped, [np.nan, np.nan, 0])
