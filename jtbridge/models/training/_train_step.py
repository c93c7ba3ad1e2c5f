"""Training steps: :func:`jtbridge.train_step`, and the state that a step passes to the next one."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import torch
from jax.sharding import NamedSharding, PartitionSpec

from jtbridge.core.convert import to_jax
from jtbridge.core.messages import kind_of
from jtbridge.core.random_numbers import check_key
from jtbridge.errors import ArgumentError
from jtbridge.models._layout import entries
from jtbridge.models._module import Arrays, JaxModule
from jtbridge.models._optimizer_states import name_of, spec_of_state
from jtbridge.models._sharding import with_sharding
from jtbridge.models._whole_numbers import as_whole_number

from ._bound_model import BoundModel
from ._microbatches import check_metrics, microbatches

Loss = Callable[[BoundModel, Any], Any]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "state", "opt_state", "key", "step"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a training run needs to go on: a pytree, which orbax saves and restores in one call.

    Attributes:
        params: the parameters that train, by torch's names.
        state: the other tensors of the module: frozen parameters, buffers.
        opt_state: the state of the optimizer.
        key: the JAX key of the run. Step number n draws from ``jax.random.fold_in(key, n)``.
        step: the number of steps so far, int32.
    """

    params: Arrays
    state: Arrays
    opt_state: Any
    key: jax.Array
    step: jax.Array


class TrainStep:
    """A compiled training step, made by :func:`jtbridge.train_step`: ``train, metrics = step(train, batch)``."""

    def __init__(
        self,
        net: JaxModule,
        loss: Loss,
        optimizer: Any,
        *,
        accumulate: int,
        weight: Callable[[Any], Any] | None,
        compute_dtype: Any,
        train: bool | None,
        donate: bool,
    ):
        self._net = net
        self._loss = loss
        self._optimizer = optimizer
        self._accumulate = accumulate
        self._weight = weight
        self._dtype = compute_dtype
        self._train = train
        self._donated = ("params", "opt_state") if donate else ()
        self._compiled: dict[Any, Any] = {}  # compiled steps, by the shardings of their arguments

    def init(
        self, key: jax.Array, params: Mapping[str, Any] | None = None, state: Mapping[str, Any] | None = None
    ) -> TrainState:
        """Return the state at step zero.

        Args:
            key: a JAX key, for dropout and other random operators.
            params, state: the tensors to start from, such as those of ``net.init(release=True)`` or of
                ``net.load_safetensors(path)``; the module's present ones by default. The first step donates `params`.

        Example:
            >>> import jax, jtbridge, optax, torch
            >>> net = jtbridge.module(torch.nn.Linear(1, 1))
            >>> step = jtbridge.train_step(net, lambda model, x: model(x).mean(), optax.sgd(0.1))
            >>> int(step.init(jax.random.key(0)).step)
            0
        """
        check_key(key, "key")
        if (params is None) != (state is None):
            raise ArgumentError("`init` takes both `params` and `state`, or neither of them.")
        if params is None or state is None:
            params, state = self._net.init()
        kept: Arrays = {name: jnp.asarray(value) for name, value in state.items()}
        first: Arrays = {name: jnp.asarray(value) for name, value in params.items()}
        trained, opt_state = jax.tree.map(_of_strong_type, (first, self._optimizer.init(first)))
        trained, opt_state = _without_aliases((trained, opt_state), kept)
        return _on_mesh_of(trained, TrainState(trained, kept, opt_state, key, jnp.zeros((), jnp.int32)))

    def __call__(self, train: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Take one step; return the new state of the run, and the metrics.

        The parameters of `train` and the state of its optimizer are donated: use the returned ones. Entries of
        `state` that the step does not change, such as frozen parameters, are returned as they are.

        Args:
            train: the state of the run, of :meth:`init` or of the previous step.
            batch: the second argument of the loss: a pytree of arrays, in which tensors of torch become JAX arrays. The
                result of a tokenizer of transformers becomes a dict.

        Returns:
            The new :class:`TrainState`, and a dict with "loss" and the metrics that the loss returned. With
            ``accumulate=``, they are means over the microbatches.
        """
        if not isinstance(train, TrainState):
            raise ArgumentError(
                f"A training step takes a `jtbridge.TrainState`, but got {kind_of(train)}. Start from "
                "`train = step.init(key)`, then call `train, metrics = step(train, batch)`."
            )
        _refuse_donated(train, "train")
        if isinstance(batch, Mapping) and jax.tree_util.all_leaves([batch]):  # such as the result of a tokenizer
            batch = dict(batch)
        batch = jax.tree.map(lambda leaf: to_jax(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)
        _refuse_donated(batch, "batch")
        if self._donated:
            batch = _copied_where_in(batch, (train.params, train.opt_state))
        params, opt_state, changed, step, metrics = self._step_for(train)(
            params=train.params,
            opt_state=train.opt_state,
            state=train.state,
            key=train.key,
            step=train.step,
            batch=batch,
        )
        return TrainState(params, train.state | changed, opt_state, train.key, step), metrics

    def _step_for(self, train: TrainState) -> Callable[..., Any]:
        """Return the compiled step whose results have the shardings of its arguments."""
        leaves, tree = jax.tree.flatten((train.params, train.opt_state, train.state))
        placed = None
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            found = [leaf.sharding if isinstance(leaf, jax.Array) else None for leaf in leaves]
            if any(sharding is not None and len(sharding.device_set) > 1 for sharding in found):
                placed = (tree, tuple(found))
        if placed not in self._compiled:
            update, results = self._update, None
            if placed is not None:
                *updated, places = jax.tree.unflatten(tree, placed[1])
                update, results = functools.partial(update, places=places), (*updated, None, None, None)
            self._compiled[placed] = jax.jit(update, donate_argnames=self._donated, out_shardings=results)
        return self._compiled[placed]

    def _update(
        self,
        params: Arrays,
        opt_state: Any,
        state: Arrays,
        key: Any,
        step: Any,
        batch: Any,
        places: Mapping[str, Any] | None = None,
    ) -> tuple[Any, ...]:
        import optax

        key = jax.random.fold_in(key, step)
        gradient = self._gradient if self._accumulate == 1 else self._accumulated_gradient
        gradients, changed, metrics = gradient(params, state, key, batch)

        def value_fn(params: Arrays) -> jax.Array:
            if self._accumulate > 1:
                raise ArgumentError(
                    "The optimizer computes the loss at other parameters, as for a line search, which needs the whole "
                    "batch at once. Leave out `accumulate=`."
                )
            return self._value(params, state, key, batch)[0]

        told = _accepted_arguments(self._optimizer.update, value=metrics["loss"], grad=gradients, value_fn=value_fn)
        updates, opt_state = self._optimizer.update(gradients, opt_state, params, **told)
        # Otherwise XLA chooses the shardings of new state, and the next step is compiled again for these.
        changed = {
            name: _sharded_like_old(value, state.get(name), (places or {}).get(name)) for name, value in changed.items()
        }
        return optax.apply_updates(params, updates), opt_state, changed, step + 1, metrics

    def _value(self, params: Arrays, state: Arrays, key: Any, batch: Any) -> tuple[Any, tuple[Arrays, dict[str, Any]]]:
        model = BoundModel(self._net, params, state, key, self._train, self._dtype)
        value, metrics = _value_and_metrics(self._loss(model, batch))
        changed = {name: value for name, value in model.state.items() if value is not state.get(name)}
        return value, (changed, {"loss": value, **metrics})

    def _gradient(self, params: Arrays, state: Arrays, key: Any, batch: Any) -> tuple[Arrays, Arrays, dict[str, Any]]:
        gradients, (changed, metrics) = jax.grad(self._value, has_aux=True)(params, state, key, batch)
        # The loss grows along the conjugate of JAX's gradient of a complex parameter.
        gradients = jax.tree.map(lambda g: g.conj() if jnp.iscomplexobj(g) else g, gradients)
        return gradients, changed, metrics

    def _accumulated_gradient(
        self, params: Arrays, state: Arrays, key: Any, batch: Any
    ) -> tuple[Arrays, Arrays, dict[str, Any]]:
        kinds = {name: entry.kind for name, entry in entries(self._net.module).items()}
        # The loop copies its carry, so the carry holds only the tensors that a microbatch may change. In the first
        # attempt these are the buffers. If the loss assigns to frozen parameters, a second attempt adds them.
        buffers = {name: value for name, value in state.items() if kinds.get(name) not in ("parameter", "frozen")}
        try:
            return self._accumulated_over(params, state, buffers, key, batch)
        except _ChangesFrozen as found:
            carried = buffers | {name: state[name] for name in found.names}
        return self._accumulated_over(params, state, carried, key, batch)

    def _accumulated_over(
        self, params: Arrays, state: Arrays, carried: Arrays, key: Any, batch: Any
    ) -> tuple[Arrays, Arrays, dict[str, Any]]:
        """Return the gradients, the changed state and the metrics of a batch; `carried` is the state that may change.

        Raises:
            _ChangesFrozen: a microbatch changes another entry of the state.
        """
        names: set[str] = set()  # the entries that a microbatch changes

        def body(carry: Any, numbered: Any) -> Any:
            total, buffers = carry
            number, part = numbered
            gradients, changed, metrics = self._gradient(params, state | buffers, jax.random.fold_in(key, number), part)
            names.update(changed)
            if new := sorted(changed.keys() - state.keys()):
                raise ArgumentError(
                    f"A call of `{self._net.__name__}` makes new state ({', '.join(new)})"
                    ", which the first microbatch does not have. Call the module once, and add what it returns to the "
                    "state of `init`: `state | changed`."
                )
            if frozen := changed.keys() - buffers.keys():
                raise _ChangesFrozen(frozen)
            check_metrics(metrics)
            weight = self._weight_of(part)
            gradients, metrics = jax.tree.map(lambda leaf: _weighted_leaf(leaf, weight), (gradients, metrics))
            return (jax.tree.map(jnp.add, total, gradients), buffers | changed), (metrics, weight)

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, _accumulator_dtype(p.dtype)), params)
        parts = jnp.arange(self._accumulate), microbatches(batch, self._accumulate)
        (total, buffers), (metrics, weights) = jax.lax.scan(body, (zeros, carried), parts)
        sum_of_weights = weights.sum()
        gradients = jax.tree.map(lambda t, p: (t / sum_of_weights.astype(t.dtype)).astype(p.dtype), total, params)
        metrics = jax.tree.map(lambda m: m.sum(0) / sum_of_weights.astype(m.dtype), metrics)
        return gradients, {name: buffers[name] for name in names}, metrics

    def _weight_of(self, microbatch: Any) -> jax.Array:
        """Return the float32 weight of a microbatch in the mean over all microbatches."""
        weight = jnp.ones(()) if self._weight is None else jnp.asarray(self._weight(microbatch))
        if weight.ndim or jnp.iscomplexobj(weight):
            raise ArgumentError(f"`weight` must return a real scalar, but returned {weight.aval.str_short()}.")
        return weight.astype(jnp.float32)

    def __repr__(self) -> str:
        return f"<jtbridge.train_step of {self._net.__name__}>"


class _ChangesFrozen(Exception):
    """A microbatch changes frozen parameters."""

    def __init__(self, names: Iterable[str]):
        super().__init__()
        self.names = sorted(names)


def train_step(
    net: JaxModule,
    loss: Loss,
    optimizer: Any,
    *,
    accumulate: int = 1,
    weight: Callable[[Any], Any] | None = None,
    compute_dtype: Any = None,
    train: bool | None = True,
    donate: bool = True,
) -> TrainStep:
    """Make a compiled training step of a module, with an optimizer of optax.

    The loss is a function ``loss(model, batch)`` of JAX. It may call ``model(x)`` several times, and returns a
    scalar, or a scalar and a dict of metrics. The step takes care of the rest: gradients of the parameters that train,
    state that the calls change, and keys for dropout. Frozen parameters are never copied. The module's Python state
    (modes, hooks, attributes) is read when the step is compiled: make a new step after a change.

    Args:
        net: the module, from :func:`jtbridge.module`.
        loss: the loss of one batch. ``model.params`` are the parameters, ``model.method(name)`` another method.
        optimizer: any ``optax.GradientTransformation``. Clipping, schedules and masks are part of it. It is told the
            loss as `value`, the gradient as `grad` and the function of the loss as `value_fn`, if it takes them.
        accumulate: the number of microbatches that a batch is split into, to save memory. The gradient is the mean
            over the microbatches: that of the whole batch, if the loss is a mean over rows. In BatchNorm, each
            microbatch has its own statistics, and updates the running ones.
        weight: a function from a microbatch to its weight in that mean, for a loss that is a mean over something else
            than rows, such as ``lambda batch: (batch["labels"] >= 0).sum()`` for a mean over tokens.
        compute_dtype: ``jnp.bfloat16`` runs the module under ``torch.autocast``: products and convolutions in bfloat16.
            Parameters, gradients and results are float32.
        train: whether calls are in train mode, as for ``net``.
        donate: with False, the step does not reuse the memory of the previous parameters and optimizer state.

    Raises:
        ArgumentError: an argument is of another kind, a batch cannot be split into microbatches, or the memory of
            `train` was donated to an earlier step.
        ModelError: `params` and `state` do not fit the module, or a call writes to a parameter.

    Example:
        >>> import jax, jax.numpy as jnp, jtbridge, optax, torch
        >>> net = jtbridge.module(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.1)))
        >>> def loss(model, batch):
        ...     return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
        >>> step = jtbridge.train_step(net, loss, optax.sgd(0.1))
        >>> train = step.init(jax.random.key(0))
        >>> train, metrics = step(train, {"x": jnp.ones((8, 1)), "y": jnp.ones((8, 1))})
        >>> int(train.step), list(metrics)
        (1, ['loss'])
    """
    if not isinstance(net, JaxModule):
        raise ArgumentError(f"`train_step` takes the result of `jtbridge.module(model)`, but got {kind_of(net)}.")
    if not callable(loss):
        raise ArgumentError(f"`loss` must be a function `loss(model, batch)`, but is {kind_of(loss)}.")
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ArgumentError(
            f"`optimizer` must be one of optax, such as `optax.adamw(1e-3)`, but is {kind_of(optimizer)}."
        )
    accumulate = as_whole_number(accumulate)
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise ArgumentError(f"`accumulate` must be a number of microbatches, 1 or more, but is {accumulate!r}.")
    if weight is not None and not callable(weight):
        raise ArgumentError(f"`weight` must be a function of a microbatch, but is {kind_of(weight)}.")
    if compute_dtype is not None and not _is_bfloat16(compute_dtype):
        raise ArgumentError(
            f"`compute_dtype` must be `jnp.bfloat16` or None, but is {compute_dtype!r}. Small gradients are lost in "
            "float16, and scaling of the loss is not supported."
        )
    if not isinstance(donate, bool):
        raise ArgumentError(f"`donate` must be True or False, but is {donate!r}.")
    options = {"accumulate": accumulate, "weight": weight, "compute_dtype": compute_dtype}
    return TrainStep(net, loss, optimizer, train=train, donate=donate, **options)


def _refuse_donated(tree: Any, name: str) -> None:
    """Raise an error for an argument that holds an array whose memory a step has reused."""
    if not any(_is_deleted(leaf) for leaf in jax.tree.leaves(tree)):
        return
    path = next(path for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if _is_deleted(leaf))
    raise ArgumentError(
        f"The memory of `{name}{jax.tree_util.keystr(path)}` was donated: a step reuses the memory of `params` and "
        "`opt_state`. Pass the state that the last step returned. To keep an earlier one, as for a target network, "
        "copy it before the step, `jax.tree.map(jnp.copy, train)`, or make the step with `donate=False`."
    )


def _copied_where_in(batch: Any, donated: Any) -> Any:
    """Return a batch in which each array that is also in `donated` is a copy, so that the batch keeps its memory."""
    arrays = {id(leaf) for leaf in jax.tree.leaves(donated)}
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if id(leaf) in arrays else leaf, batch)


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted()


def _is_bfloat16(dtype: Any) -> bool:
    try:
        return jnp.dtype(dtype) == jnp.bfloat16
    except TypeError:  # such as a dtype of torch
        return False


def _accepted_arguments(update: Callable[..., Any], **told: Any) -> dict[str, Any]:
    """Return the keyword arguments that the update of an optimizer takes."""
    parameters = inspect.signature(update).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return told
    return {name: value for name, value in told.items() if name in parameters}


def _value_and_metrics(result: Any) -> tuple[Any, dict[str, Any]]:
    """Return the value and the metrics of the result of a loss."""
    value, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    is_scalar = isinstance(value, jax.Array) and not value.ndim and jnp.issubdtype(value.dtype, jnp.floating)
    if not is_scalar or not isinstance(metrics, dict) or "loss" in metrics:
        shown = jax.typeof(value).str_short() if isinstance(value, jax.Array) else f"{kind_of(value)}"
        names = f"metrics {list(metrics)}" if isinstance(metrics, dict) else f"{kind_of(metrics)}"
        raise ArgumentError(
            "The loss must return a floating-point scalar, or a scalar and a dict of metrics without the name `loss`, "
            f"but it returned {shown} and {names}."
        )
    return value, metrics


def _of_strong_type(leaf: Any) -> Any:
    """Return an array as a strongly typed one. A step returns such arrays, and is compiled again for others."""
    return leaf.astype(leaf.dtype) if getattr(leaf, "weak_type", False) else leaf


def _without_aliases(donated: Any, kept: Any) -> Any:
    """Return `donated` with a copy of each array that occurs twice or is in `kept`: it cannot be donated twice."""
    seen = {id(leaf) for leaf in jax.tree.leaves(kept)}

    def own(leaf: Any) -> Any:
        if id(leaf) in seen:
            return jnp.copy(leaf)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(own, donated)


def _on_mesh_of(params: Mapping[str, Any], train: TrainState) -> TrainState:
    """Place arrays of one device on the mesh of the parameters. Otherwise the first step does, and two are compiled.

    An array that an optimizer keeps for a parameter is split like the parameter. Other arrays are replicated.
    """
    placed = {name: p for name, p in params.items() if isinstance(getattr(p, "sharding", None), NamedSharding)}
    if not placed:
        return train
    mesh = next(iter(placed.values())).sharding.mesh

    def on_mesh(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
            return leaf
        parameter, spec = placed.get(name_of(path)), PartitionSpec()
        if parameter is not None:
            spec = spec_of_state(parameter.sharding.spec, parameter.shape, jnp.shape(leaf))
        return with_sharding(leaf, NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(on_mesh, train)


def _sharded_like_old(value: jax.Array, old: Any, sharding: Any) -> jax.Array:
    """Return new state with the sharding of the old state, if both have the same shape."""
    if sharding is None or jnp.shape(old) != value.shape:
        return value
    return jax.lax.with_sharding_constraint(value, sharding)


def _weighted_leaf(leaf: jax.Array, weight: jax.Array) -> jax.Array:
    """Return a gradient or metric times its weight. For weight 0, return zeros: the mean of an empty set is NaN."""
    wide = leaf.astype(_accumulator_dtype(leaf.dtype))
    return jnp.where(weight != 0, wide * weight.astype(wide.dtype), jnp.zeros_like(wide))


def _accumulator_dtype(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)
