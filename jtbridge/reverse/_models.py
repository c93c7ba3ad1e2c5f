"""Models of Equinox, Flax NNX, Flax Linen and plain JAX behind one interface."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import torch

from jtbridge.core.messages import kind_of
from jtbridge.errors import ArgumentError, ModelError


@dataclasses.dataclass(frozen=True)
class Model:
    """A JAX model: its tensors, and the function that computes it.

    Attributes:
        name: the name of the model, for messages.
        params: the tree whose float arrays are trained.
        state: the tree of arrays that a call returns new values of.
        apply: ``(mode, params, state, args, kwargs) -> (result, new state, new params)``; the last is None if a call
            cannot write to parameters.
        rebuild: ``(params, state) -> `` the model as the user gave it.
        mode: a static value that `apply` takes: how the model behaves.
        modes: returns the `mode` for training (True) or for evaluation (False).
    """

    name: str
    params: Any
    state: Any
    apply: Callable[..., Any]
    rebuild: Callable[[Any, Any], Any]
    mode: Any = None
    modes: Callable[[bool], Any] = lambda train: None

    def __deepcopy__(self, memo: Any) -> Model:
        return self  # nothing writes to it, and static fields of a tree may be compared by identity

    def __reduce__(self) -> Any:
        raise ModelError(
            f"`{self.name}` is a JAX model, which refers to functions, so its torch module cannot be pickled. Save "
            "`module.state_dict()`, make the module again by `to_torch_module`, and load the state there."
        )

    def in_mode(self, train: bool) -> Model:
        return dataclasses.replace(self, mode=self.modes(train))


def model_of(f: Any, params: Any, state: Any) -> Model:
    """Return the model that the arguments of :func:`jtbridge.to_torch_module` describe.

    Raises:
        ArgumentError: `f` is neither a model of Equinox or Flax NNX nor a function that is given with its parameters.
    """
    if isinstance(f, torch.nn.Module):
        raise ArgumentError("`to_torch_module` takes a JAX model, but got a torch module.")
    linen = sys.modules.get("flax.linen")
    is_linen = linen is not None and isinstance(f, linen.Module)
    if is_linen and params is not None:
        if state is not None:
            raise ArgumentError(
                "`to_torch_module` takes no `state=` with a model of Flax Linen, whose `apply` must be told which "
                "collections it writes to. Pass a function `f(params, state, *args)` that returns "
                "`(result, new_state)`, or all variables as `params`: then calls only read them."
            )
        f = f.apply
    if params is not None and state is None and _is_of_linen(f, params):
        return _of_linen(f, params)
    if params is not None:
        return _of_function(f, params, state)
    if state is not None:
        raise ArgumentError("`to_torch_module` got a state without parameters. Pass `params=`, which may be `{}`.")
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(f, nnx.Module):
        return _of_nnx(f, nnx)
    if is_linen:
        raise ArgumentError(
            "A model of Flax Linen does not hold its parameters. Pass both: "
            "`to_torch_module(model, model.init(key, x))`."
        )
    if callable(f) and not jax.tree_util.all_leaves([f]):
        return _of_tree(f)
    raise ArgumentError(
        f"`to_torch_module` takes a model of Equinox or Flax NNX, or a function and its parameters, but got a "
        f"{type(f).__name__} alone. Pass `to_torch_module(f, params)` for a function `f(params, *args)`, and "
        "`to_torch_function(f)` for a function without parameters."
    )


def _of_function(f: Callable[..., Any], params: Any, state: Any) -> Model:
    if not callable(f):
        raise ArgumentError(f"`to_torch_module` takes a function of `params`, but got {kind_of(f)}.")
    for argument, tree in (("params", params), ("state", state)):
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            if isinstance(leaf, torch.Tensor):
                raise ArgumentError(
                    f"`{argument}{jax.tree_util.keystr(path)}` is a torch tensor, but `to_torch_module` takes JAX "
                    "arrays there, and copies them. Convert it: `jtbridge.to_jax(tensor)`."
                )
    name = getattr(f, "__name__", type(f).__name__)

    def apply(mode: Any, params: Any, given: Any, args: Any, kwargs: Any) -> Any:
        del mode
        if state is None:
            return f(params, *args, **kwargs), given, None
        result = f(params, given, *args, **kwargs)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ArgumentError(f"`{name}` has a state, so it must return `(result, new_state)`.")
        return *result, None

    def rebuild(params: Any, given: Any) -> Any:
        return params if state is None else (params, given)

    return Model(name, params, state, apply, rebuild)


def _is_of_linen(f: Any, variables: Any) -> bool:
    """Return whether a tree has collections of Flax Linen, of which only "params" is trained."""
    linen = sys.modules.get("flax.linen")
    if linen is None or not isinstance(variables, Mapping) or "params" not in variables or len(variables) == 1:
        return False
    while isinstance(f, functools.partial):
        f = f.func
    return isinstance(getattr(f, "__self__", None), linen.Module) or "batch_stats" in variables


def _of_linen(f: Callable[..., Any], variables: Mapping[str, Any]) -> Model:
    model = _of_function(f, {"params": variables["params"]}, None)
    others = {name: value for name, value in variables.items() if name != "params"}

    def apply(mode: Any, params: Any, given: Any, args: Any, kwargs: Any) -> Any:
        result, _, _ = model.apply(mode, {**params, **given}, None, args, kwargs)
        return result, given, None

    return dataclasses.replace(model, state=others, apply=apply, rebuild=lambda params, given: {**params, **given})


def _of_tree(model: Any) -> Model:
    """Return a model that is a callable pytree, such as a model of Equinox."""

    def apply(mode: Any, params: Any, state: Any, args: Any, kwargs: Any) -> Any:
        equinox = sys.modules.get("equinox")
        if equinox is not None and mode is not None:
            params = equinox.nn.inference_mode(params, value=not mode)
        return params(*args, **kwargs), state, None

    return Model(type(model).__name__, model, None, apply, lambda params, state: params, None, lambda train: train)


def _of_nnx(model: Any, nnx: Any) -> Model:
    first, params, state = nnx.split(model, nnx.Param, ...)

    def apply(mode: Any, params: Any, state: Any, args: Any, kwargs: Any) -> Any:
        merged = nnx.merge(mode, params, state)
        out = merged(*args, **kwargs)
        structure, after, new = nnx.split(merged, nnx.Param, ...)
        if structure != mode:
            raise ModelError(
                f"A call of `{type(model).__name__}` changes an attribute that is not a variable, or adds one. A torch "
                "module keeps only changes of variables, such as `nnx.BatchStat`, which the model must have from the "
                "beginning."
            )
        return out, new, after

    def rebuild(params: Any, state: Any) -> Any:
        return nnx.merge(first, params, state)

    def mode(train: bool) -> Any:
        copy = nnx.merge(first, params, state)
        copy.train() if train else copy.eval()
        return nnx.split(copy, nnx.Param, ...)[0]

    return Model(type(model).__name__, params, state, apply, rebuild, first, mode)
