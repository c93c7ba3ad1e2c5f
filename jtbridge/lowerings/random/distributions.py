"""Random draws, which follow torch's distributions and supports, but not its sequence of numbers.

Where a parameter is one for which torch raises, such as a probability above 1, the result holds the invalid value of
:mod:`jtbridge.lowerings.indexing._out_of_range`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import fx

from jtbridge.lowerings._common import convert, opmath, out_dtype, out_shape
from jtbridge.lowerings._registry import register_lowering
from jtbridge.lowerings.indexing._out_of_range import invalid_value

Key = Callable[[], jax.Array]


def _uniform01(key: Key, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """Draw uniformly from [0, 1); for complex numbers, both parts."""
    if jnp.issubdtype(dtype, np.complexfloating):
        parts = jax.random.uniform(key(), (2, *shape), np.finfo(dtype).dtype)
        return jax.lax.complex(parts[0], parts[1])
    return jax.random.uniform(key(), shape, dtype)


def _valid_if(valid: jax.Array, drawn: jax.Array) -> jax.Array:
    return jnp.where(valid, drawn, jnp.asarray(invalid_value(drawn.dtype), drawn.dtype))


@register_lowering("rand", "rand_like", node=True, key=True)
def _rand(*args: Any, node: fx.Node, key: Key, **kwargs: Any) -> jax.Array:
    del args, kwargs
    return _uniform01(key, out_shape(node), out_dtype(node))


@register_lowering("randn", "randn_like", node=True, key=True)
def _randn(*args: Any, node: fx.Node, key: Key, **kwargs: Any) -> jax.Array:
    del args, kwargs
    dtype = out_dtype(node)
    return jax.random.normal(key(), out_shape(node), opmath(dtype)).astype(dtype)


def _uniform_integers(key: Key, low: Any, high: Any, node: fx.Node) -> jax.Array:
    """Draw integers uniformly from [low, high)."""
    return jax.random.randint(key(), out_shape(node), low, high, np.int64).astype(out_dtype(node))


@register_lowering("randint", node=True, key=True)
def _randint(high: Any, size: Any, *, node: fx.Node, key: Key, **kwargs: Any) -> jax.Array:
    del size, kwargs
    return _uniform_integers(key, 0, high, node)


@register_lowering("randint.low", node=True, key=True)
def _randint_from(low: Any, high: Any, size: Any, *, node: fx.Node, key: Key, **kwargs: Any) -> jax.Array:
    del size, kwargs
    return _uniform_integers(key, low, high, node)


@register_lowering("randint_like", "randint_like.Tensor", node=True, key=True)
def _randint_like(x: jax.Array, high: Any, *, node: fx.Node, key: Key, **kwargs: Any) -> jax.Array:
    del x, kwargs
    return _uniform_integers(key, 0, high, node)


@register_lowering("randint_like.low_dtype", node=True, key=True)
def _randint_like_from(x: jax.Array, low: Any, high: Any, *, node: fx.Node, key: Key, **kwargs: Any) -> jax.Array:
    del x, kwargs
    return _uniform_integers(key, low, high, node)


@register_lowering("random", node=True, key=True)
def _random(x: jax.Array, *, generator: Any = None, node: fx.Node, key: Key) -> jax.Array:
    del generator
    return _uniform_integers(key, 0, _end_of_random(x.dtype), node)


@register_lowering("random.to", node=True, key=True)
def _random_to(x: jax.Array, to: Any, *, generator: Any = None, node: fx.Node, key: Key) -> jax.Array:
    del x, generator
    return _uniform_integers(key, 0, to, node)


@register_lowering("random.from", node=True, key=True)
def _random_from(x: jax.Array, low: Any, to: Any, *, generator: Any = None, node: fx.Node, key: Key) -> jax.Array:
    del generator
    return _uniform_integers(key, low, _end_of_random(x.dtype) if to is None else to, node)


def _end_of_random(dtype: np.dtype) -> int:
    """Return one more than the largest integer that `random` draws; all integers below it are exact in `dtype`."""
    if dtype == np.bool_:
        return 2
    if jnp.issubdtype(dtype, np.floating):
        return 2 ** (jnp.finfo(dtype).nmant + 1) + 1
    return min(int(jnp.iinfo(dtype).max) + 1, 2**63 - 1)


@register_lowering("randperm", node=True, key=True)
def _randperm(n: int, *, node: fx.Node, key: Key, **kwargs: Any) -> jax.Array:
    del kwargs
    return jax.random.permutation(key(), jnp.arange(n, dtype=np.int64)).astype(out_dtype(node))


@register_lowering("bernoulli", node=True, key=True)
def _bernoulli(x: jax.Array, *, generator: Any = None, node: fx.Node, key: Key) -> jax.Array:
    del generator
    return _coins(x, node, key)


@register_lowering("bernoulli.p", "bernoulli.Tensor", node=True, key=True)
def _bernoulli_p(x: jax.Array, p: Any, *, generator: Any = None, node: fx.Node, key: Key) -> jax.Array:
    del x, generator
    return _coins(p, node, key)


def _coins(p: Any, node: fx.Node, key: Key) -> jax.Array:
    p = jnp.asarray(p)
    p = p.astype(np.float64 if p.dtype == np.float64 else np.float32)
    drawn = (jax.random.uniform(key(), out_shape(node), p.dtype) < p).astype(out_dtype(node))
    return _valid_if((p >= 0) & (p <= 1), drawn)


@register_lowering("uniform", node=True, key=True)
def _uniform(
    x: jax.Array, low: Any = 0.0, to: Any = 1.0, *, generator: Any = None, node: fx.Node, key: Key, **kwargs: Any
) -> jax.Array:
    del generator
    low = kwargs.get("from", low)
    first, last = (jnp.asarray(v, x.dtype) for v in (low, to))
    return _uniform01(key, out_shape(node), out_dtype(node)) * (last - first) + first


@register_lowering("normal_functional", node=True, key=True)
def _normal_functional(
    x: jax.Array, mean: Any = 0.0, std: Any = 1.0, *, generator: Any = None, node: fx.Node, key: Key
) -> jax.Array:
    del x, generator
    return _normal_of(mean, std, node, key)


@register_lowering("normal.float_float", node=True, key=True)
def _normal_numbers(mean: Any, std: Any, size: Any, *, node: fx.Node, key: Key, **kwargs: Any) -> jax.Array:
    del size, kwargs
    return _normal_of(mean, std, node, key)


@register_lowering("normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor", node=True, key=True)
def _normal_tensors(mean: Any, std: Any = 1.0, *, generator: Any = None, node: fx.Node, key: Key) -> jax.Array:
    del generator
    return _normal_of(mean, std, node, key)


def _normal_of(mean: Any, std: Any, node: fx.Node, key: Key) -> jax.Array:
    dtype = out_dtype(node)
    wide = opmath(dtype)
    std = jnp.asarray(std, wide)
    if jnp.issubdtype(wide, jnp.complexfloating) and isinstance(mean, float | int):
        mean = complex(mean, mean)  # in torch, this is the mean of both parts
    drawn = jax.random.normal(key(), out_shape(node), wide)
    return _valid_if(~(std < 0), (drawn * std + jnp.asarray(mean, wide)).astype(dtype))


@register_lowering("log_normal", node=True, key=True)
def _log_normal(
    x: jax.Array, mean: Any = 1.0, std: Any = 2.0, *, generator: Any = None, node: fx.Node, key: Key
) -> jax.Array:
    del generator
    wide = opmath(x.dtype)
    drawn = jax.random.normal(key(), out_shape(node), wide)
    return jnp.exp(drawn * jnp.asarray(std, wide) + jnp.asarray(mean, wide)).astype(x.dtype)


@register_lowering("exponential", node=True, key=True)
def _exponential(x: jax.Array, lambd: Any = 1.0, *, generator: Any = None, node: fx.Node, key: Key) -> jax.Array:
    """Draw from an exponential distribution; never 0, so that a caller may divide by the result."""
    del generator
    wide = opmath(x.dtype)
    drawn = jax.random.exponential(key(), out_shape(node), wide)
    least = jnp.asarray(jnp.finfo(wide).eps / 2, wide)
    return (jnp.maximum(drawn, least) / jnp.asarray(lambd, wide)).astype(x.dtype)


@register_lowering("geometric", node=True, key=True)
def _geometric(x: jax.Array, p: Any, *, generator: Any = None, node: fx.Node, key: Key) -> jax.Array:
    """Draw the number of the first success, counted from 1."""
    del generator
    wide = np.dtype(np.float64)
    drawn = jax.random.uniform(key(), out_shape(node), wide, minval=jnp.finfo(wide).tiny, maxval=1.0)
    return jnp.ceil(jnp.log(drawn) / np.log1p(-float(p))).astype(x.dtype)


@register_lowering("cauchy", node=True, key=True)
def _cauchy(
    x: jax.Array, median: Any = 0.0, sigma: Any = 1.0, *, generator: Any = None, node: fx.Node, key: Key
) -> jax.Array:
    del generator
    wide = opmath(x.dtype)
    drawn = jax.random.cauchy(key(), out_shape(node), wide)
    return (drawn * jnp.asarray(sigma, wide) + jnp.asarray(median, wide)).astype(x.dtype)


@register_lowering("poisson", node=True, key=True)
def _poisson(x: jax.Array, generator: Any = None, *, node: fx.Node, key: Key) -> jax.Array:
    del generator
    drawn = jax.random.poisson(key(), x.astype(opmath(x.dtype)), out_shape(node), np.int64).astype(x.dtype)
    return _valid_if(x >= 0, drawn)


@register_lowering("binomial", node=True, key=True)
def _binomial(count: jax.Array, prob: jax.Array, generator: Any = None, *, node: fx.Node, key: Key) -> jax.Array:
    del generator
    wide = opmath(count.dtype)
    drawn = jax.random.binomial(key(), count.astype(wide), prob.astype(wide), out_shape(node), wide)
    return drawn.astype(count.dtype)


@register_lowering("_standard_gamma", node=True, key=True)
def _standard_gamma(x: jax.Array, generator: Any = None, *, node: fx.Node, key: Key) -> jax.Array:
    del generator
    wide = opmath(x.dtype)
    drawn = jax.random.gamma(key(), x.astype(wide), out_shape(node), wide).astype(x.dtype)
    return jnp.maximum(drawn, jnp.finfo(x.dtype).tiny)


@register_lowering("_standard_gamma_grad")
def _standard_gamma_grad(x: jax.Array, output: jax.Array) -> jax.Array:
    wide = opmath(x.dtype)
    return jax.lax.random_gamma_grad(x.astype(wide), output.astype(wide)).astype(x.dtype)  # type: ignore[call-arg]


@register_lowering("_sample_dirichlet", node=True, key=True)
def _sample_dirichlet(x: jax.Array, generator: Any = None, *, node: fx.Node, key: Key) -> jax.Array:
    del generator
    wide = opmath(x.dtype)
    logs = jax.random.loggamma(key(), x.astype(wide), out_shape(node), wide)
    drawn = jax.nn.softmax(logs, axis=-1).astype(x.dtype)
    return jnp.maximum(drawn, jnp.finfo(x.dtype).tiny)


_POINTS = 128  # the number of points of a double exponential quadrature
_VANISHES = 40.0  # exp of less than -40 is negligible


@register_lowering("_dirichlet_grad")
def _dirichlet_grad(x: jax.Array, alpha: jax.Array, total: jax.Array) -> jax.Array:
    """Return the derivative of a Beta sample by `alpha`, over ``1 - x``; the other concentration is ``total - alpha``.

    It is ``-dF(x; alpha, beta)/dalpha / pdf(x) / (1 - x)``. The derivative of F is an integral over the smaller tail,
    with a relative error below 1e-9; torch's approximations have one of up to 6e-4.
    """
    dtype, wide = x.dtype, opmath(x.dtype)
    tiny = jnp.finfo(wide).tiny
    x, alpha, beta = x.astype(wide), alpha.astype(wide), (total - alpha).astype(wide)
    x, y = jnp.maximum(x, tiny), jnp.maximum(1 - x, jnp.finfo(wide).eps / 2)
    mean_log = jax.scipy.special.digamma(alpha) - jax.scipy.special.digamma(alpha + beta)
    is_left = x * beta < y * alpha
    # The tail is an interval of the length `near` at one end of [0, 1]. At the distance t from this end, the density
    # is proportional to t^(a - 1) (1 - t)^(b - 1).
    near, far = jnp.where(is_left, x, y), jnp.where(is_left, y, x)
    a, b = jnp.where(is_left, alpha, beta), jnp.where(is_left, beta, alpha)
    # With s = -log(t / near), log density(s) - log density(0) is about -2 slope s - curvature s^2 / 2 for small s.
    slope = jnp.maximum(a - (b - 1) * near / far, 0) / 2
    curvature = jnp.maximum((b - 1) * near / far**2, 0)
    unit = 1 / (slope + jnp.sqrt(curvature + slope**2) + tiny)
    first = -math.log(_VANISHES)
    step = (math.log(_VANISHES) + jnp.maximum(-jnp.log(a * unit), 0) - first) / (_POINTS - 1)

    def add(i: jax.Array, sum_: jax.Array) -> jax.Array:
        v = first + step * i
        s = unit * jnp.exp(v - jnp.exp(-v))
        gone = -near * jnp.expm1(-s)
        log_of_t = jnp.where(is_left, jnp.log(near) - s, jnp.log1p(gone - near))
        density = jnp.exp(-a * s + (b - 1) * jnp.log1p(gone / far))
        return sum_ + density * (log_of_t - mean_log) * s * (1 + jnp.exp(-v))

    integral = jax.lax.fori_loop(0, _POINTS, add, jnp.zeros_like(x)) * near * step
    return (jnp.where(is_left, -integral, integral) / y).astype(dtype)


@register_lowering("multinomial", node=True, key=True)
def _multinomial(
    x: jax.Array, num_samples: int, replacement: bool = False, *, generator: Any = None, node: fx.Node, key: Key
) -> jax.Array:
    """Draw indices by weights that need not sum to 1.

    With replacement, indices of weight 0 are not drawn. Without replacement, they come after all others.
    """
    del generator
    shape = out_shape(node)
    if 0 in shape:
        return jnp.zeros(shape, np.int64)
    rows = x.reshape(-1, x.shape[-1])
    if replacement:
        totals = jnp.cumsum(rows.astype(np.float64), axis=-1)
        drawn = jax.random.uniform(key(), (rows.shape[0], num_samples), np.float64) * totals[:, -1:]
        found = jax.vmap(lambda total, u: jnp.searchsorted(total, u, side="right"))(totals, drawn)
        last = x.shape[-1] - 1 - jnp.argmax(rows[:, ::-1] > 0, axis=-1, keepdims=True)
        found = jnp.minimum(found, last)  # rounding may lead past the last positive weight
    else:  # the largest of logits plus Gumbel variates have the distribution of successive draws
        logs = jnp.log(rows.astype(opmath(rows.dtype)))
        _, found = jax.lax.top_k(logs + jax.random.gumbel(key(), rows.shape, logs.dtype), num_samples)
    valid = jnp.all((rows >= 0) & (rows < np.inf), axis=-1, keepdims=True) & jnp.any(rows > 0, axis=-1, keepdims=True)
    return _valid_if(valid, found.astype(np.int64)).reshape(shape)


@register_lowering("native_dropout", node=True, key=True)
def _native_dropout(
    x: jax.Array, p: float, train: bool | None, *, node: fx.Node, key: Key
) -> tuple[jax.Array, jax.Array]:
    if train is False or p == 0:
        return x, jnp.ones(x.shape, bool)
    if p == 1:  # NaN stays NaN, as in torch
        none = jnp.zeros(x.shape, bool)
        return _dropped(x, none, 0.0, x.dtype), none
    kept = jax.random.bernoulli(key(), 1.0 - p, x.shape)
    return _dropped(x, kept, 1.0 / (1.0 - p), x.dtype), kept


@register_lowering("native_dropout_backward", node=True)
def _native_dropout_backward(grad: jax.Array, mask: jax.Array, scale: float, *, node: fx.Node) -> jax.Array:
    return _dropped(grad, mask, scale, out_dtype(node))


def _dropped(x: jax.Array, mask: jax.Array, scale: float, dtype: np.dtype) -> jax.Array:
    wide = opmath(dtype)
    return (x.astype(wide) * convert(mask, wide) * jnp.asarray(scale, wide)).astype(dtype)


@register_lowering("rrelu_with_noise_functional", node=True, key=True)
def _rrelu(
    x: jax.Array,
    noise: jax.Array,
    lower: Any = 0.125,
    upper: Any = 1 / 3,
    training: bool = False,
    generator: Any = None,
    *,
    node: fx.Node,
    key: Key,
) -> tuple[jax.Array, jax.Array]:
    """Return a leaky ReLU, whose slopes are drawn while training, and the slopes; `noise` if not training."""
    del generator
    if not training:
        slope = jnp.asarray((float(lower) + float(upper)) / 2, x.dtype)
        return jnp.where(x > 0, x, x * slope), noise
    drawn = jax.random.uniform(key(), x.shape, opmath(x.dtype), float(lower), float(upper)).astype(x.dtype)
    slopes = jnp.where(x <= 0, drawn, jnp.ones((), x.dtype))
    return x * slopes, slopes
