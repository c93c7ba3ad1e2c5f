"""`jtbridge.to_torch_module`: a JAX model as a torch module."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import jax
import torch

from jtbridge._compat import in_backward, writes

from ._bound import Caller
from ._function import check_int32, torch_function
from ._models import Model, model_of
from ._module_tensors import Part, TensorTree, compute_weights, set_mode
from ._start_of_call import StateUse, recomputation_error, start_of_call


def to_torch_module(f: Any, params: Any = None, state: Any = None, *, int32: str = "int64") -> TorchModule:
    """Make a JAX model a torch module, with its arrays as parameters and buffers.

    The module works like any other: torch's optimizers train it, `state_dict` and `load_state_dict` save and load it,
    and its ``forward`` is a function of :func:`jtbridge.to_torch_function`. Names follow the tree: ``layers[0].weight``
    is ``layers.0.weight``. A name that `torch.nn.Module` uses itself gets an underscore. ``module.to_jax()`` returns
    the model with copies of the present values.

    Args:
        f: a model of Equinox (any callable pytree), Flax NNX or Flax Linen, or a function
            ``f(params, *args, **kwargs)``, such as the ``apply`` of a model of Flax Linen. ``train()`` and ``eval()``
            set the mode of models of Equinox and Flax NNX, from their first call on.
        params: the parameters of a function, or the variables of a model of Flax Linen: a pytree. Float and complex
            arrays become parameters. Other arrays and keys become buffers, and other leaves stay as they are. Of the
            variables of Flax Linen, "params" is trained, and other collections, such as "batch_stats", become buffers
            that a call only reads.
        state: a pytree of arrays, for a function ``f(params, state, *args, **kwargs)`` that returns
            ``(result, new_state)``. It becomes buffers, to which each call writes the new state. The state of a model
            of Flax NNX (statistics, random streams) is treated in the same way.
        int32: see :func:`jtbridge.to_torch_function`.

    Returns:
        A `torch.nn.Module` on the CPU, which has copies of the arrays.

    Raises:
        ArgumentError: `f` is not a model, or is a function or a model of Flax Linen without `params`, or is a model of
            Flax Linen and `state` is given.
        ModelError: when called, if the new state has another structure, other shapes or other kinds of dtypes than the
            state; if a call of a model of Flax NNX changes a Python attribute; and in a recomputation of
            `torch.utils.checkpoint` whose result depends on a state that has changed, such as a random key.

    Example:
        >>> import jax.numpy as jnp, jtbridge, torch
        >>> model = jtbridge.to_torch_module(lambda p, x: x @ p["w"], {"w": jnp.ones((3, 2))})
        >>> model(torch.ones(3)).sum().backward()
        >>> model.w.grad.shape
        torch.Size([3, 2])

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html
    """
    check_int32(int32)
    return TorchModule(model_of(f, params, state), int32)


# Torch's counts of the writes to the state of a module at the start of its last call outside of a backward. They are
# not an attribute, because `jtbridge.module` refuses calls that change one.
_VERSIONS: weakref.WeakKeyDictionary[TorchModule, list[int]] = weakref.WeakKeyDictionary()


class TorchModule(torch.nn.Module):
    """A torch module that computes a JAX model of its parameters and buffers."""

    def __init__(self, model: Model, int32: str):
        super().__init__()
        # These attributes are set first, because a tensor does not get the name of an attribute.
        self._trees: tuple[TensorTree, ...] = ()
        self._written: set[int] = set()  # the positions of the parameters that calls write to
        self._modes: dict[bool, tuple[Model, Callable[..., Any], StateUse]] = {}
        self._model, self._call = model, model.apply
        self._use: Any = None
        params = TensorTree(self, model.params, train=True)
        state = TensorTree(self, model.state, train=False)
        self._trees = (params, state)
        models = {train: model.in_mode(train) for train in (True, False)}
        calls = {m.mode: _tensor_function(m, params, state, int32) for m in (model, *models.values())}
        self._modes = {train: (m, *calls[m.mode]) for train, m in models.items()}
        self._model, (self._call, self._use) = model, calls[model.mode]
        for part in self.modules():
            if isinstance(part, Part):
                part.has_mode = models[True].mode != models[False].mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the JAX model; the new state goes to the buffers."""
        compute_weights(self)
        params, state = (tree.tensors(self, self._model.name) for tree in self._trees)
        traced = torch.compiler.is_compiling()
        if not traced and in_backward():
            self._check_recomputed(params, state, args, kwargs)
        elif not traced:
            _VERSIONS[self] = [writes(x) for x in state]
        # The backward needs copies of the tensors that are written to.
        given = [x.clone() if i in self._written else x for i, x in enumerate(params)]
        copies = [x.clone() for x in state]
        kept = [*state, *[params[i] for i in self._written]]
        start = None
        if traced and kept:
            start, *copied = start_of_call(kept, self._use.handle)
            copies = [x if x.requires_grad else y for x, y in zip(copies, copied, strict=False)]
        out, new, written = self._call(given, copies, args, kwargs, start)
        if not self._written.issuperset(written):
            self._written.update(written)
            return self.forward(*args, **kwargs)
        changed = [*[state[i] for i in new], *[params[i] for i in written]]
        # A tensor that keeps its value is not written to: torch.func and `jtbridge.wrap` refuse such writes.
        for tensor, value in zip(changed, [*new.values(), *written.values()], strict=True):
            tensor.detach().copy_(value.detach())  # not in `torch.no_grad`, whose exported graph could not be saved
        return out

    def _check_recomputed(self, params: Any, state: Any, args: Any, kwargs: Any) -> None:
        """Refuse a call that cannot repeat an earlier one, because its result depends on a state that has changed."""
        given = (params, state, args, kwargs, None)
        out, new, written = self._use.caller.structure(given, {})
        changed = [*[state[i] for i in new], *[params[i] for i in written]]
        versions = _VERSIONS.get(self, [])  # empty if there were calls only in compiled graphs
        changed += [x for x, old in zip(state, versions, strict=False) if writes(x) != old]
        if not changed:
            return
        used = self._use.caller.used_tensors(given, {}, len(jax.tree.leaves(out)))
        for tensor, is_used in zip([*params, *state], used, strict=False):
            if is_used and any(tensor is x for x in changed):
                raise recomputation_error(self._model.name)

    def train(self, mode: bool = True) -> TorchModule:
        """Set the mode of this module, and of the JAX model if its class has one."""
        set_mode(self, bool(mode))
        self._model, self._call, self._use = self._modes[bool(mode)]
        return self

    def to_jax(self) -> Any:
        """Return a copy of the model with the present parameters and state.

        Returns:
            The model, if it is of Equinox or Flax NNX. Otherwise `params`, or `(params, state)` if a `state` was given.
        """
        compute_weights(self)
        return self._model.rebuild(*(tree.arrays(self, self._model.name) for tree in self._trees))


def _tensor_function(
    model: Model, params: TensorTree, state: TensorTree, int32: str
) -> tuple[Callable[..., Any], StateUse]:
    """Return the model in its mode as a torch function of ``(params, state, args, kwargs, start)``.

    It returns the result, and the arrays of the state and of the parameters that the call changed, by their positions.
    The mode is not an argument, because torch.compile could not trace it. `start` is the marker of
    :func:`start_of_call`.
    """
    apply, mode, name = model.apply, model.mode, model.name

    def run(params_: Any, state_: Any, args: Any, kwargs: Any, start: Any = None) -> Any:
        del start
        trees = params.rebuild(params_), state.rebuild(state_)
        before = [jax.tree.leaves(tree) for tree in trees]  # a call may write to the trees
        out, new, tree = apply(mode, *trees, args, kwargs)
        written = {} if tree is None else params.changed(tree, before[0], params_, name)
        changed = state.changed(new, before[1], state_, name)
        use.changes = use.changes or bool(changed or written)
        return out, changed, written

    run.__name__ = model.name
    use = StateUse(Caller(run, model.name, keep_int32=int32 == "keep"))
    return torch_function(use.caller, run), use
