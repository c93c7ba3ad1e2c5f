"""One call of a module with other tensors than its own, and the state that it changed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import torch

from jtbridge._compat import (
    DispatchMode,
    gradients_required,
    has_gradient_hooks,
    innermost,
    mark_as_parameter,
    registered_buffers,
    registered_modules,
    registered_parameters,
    storage_id,
    unseen_by_function_modes,
    without_cached_weights,
    write_count,
)
from jtbridge.core.messages import summary_of, warn_user
from jtbridge.core.writes import written_tensors
from jtbridge.errors import ModelError, MutationError, PurityWarning

from ._aliases import refuse_new_overlaps, refuse_new_ties
from ._copying import Stale, copied
from ._layout import NARROWED, TensorEntry, entries, locate, refuse_own_class, shown
from ._made_state import MadeTensor, made_tensors, place_made
from ._own_tensors import RefuseOwnTensors, requires_grad_error
from ._python_state import python_changes

Tensors = Mapping[str, torch.Tensor]
_MISSING = object()
# Such a layer is often one of a library, whose code a user cannot change.
_FIRST_CALL = (
    "If only the first call does so, because a layer initializes itself from data or fills a cache, call the "
    "torch module once before `net.init()`."
)


class Run:
    """A call of a module as a function of tensors: ``(params, state, ...) -> out, changed, made``.

    `changed` has the tensors that the call assigned to attributes. It does not have an entry of `state` that the call
    writes to in place, because :func:`jtbridge.wrap` reports it as a mutated argument, unless the entry is a copy in
    the module's dtype. `made` says where the tensors are that the module itself does not have.

    Args:
        module: the torch module. It is read, and never written to.
        purity: the reaction if a call changes Python state: "error", "warn" or "allow".

    The argument `made` of a call is what earlier calls returned, for tensors in `params` and `state`; `in_parts` says
    whether parameters may be parts of the module's own, as inside `shard_map`.
    """

    def __init__(self, module: torch.nn.Module, purity: str):
        self.module = module
        self.purity = purity
        self.__name__ = type(module).__name__

    def objects_of_the_user(self) -> list[tuple[str, Any]]:
        """Return the module, whose state the guard of a trace restores."""
        return [("module", self.module)]

    def __call__(
        self,
        params: Tensors,
        state: Tensors,
        args: tuple,
        kwargs: dict[str, Any],
        method: str | Callable[..., Any],
        train: bool | None,
        made: Sequence[MadeTensor],
        in_parts: bool = False,
    ) -> tuple[Any, dict[str, torch.Tensor], tuple[MadeTensor, ...]]:
        ties: dict[str, str] = {}
        ties_after: dict[str, str] = {}
        with unseen_by_function_modes():
            everything = entries(self.module, computed=True, ties=ties)
            found = {name: e for name, e in everything.items() if e.kind != "attribute" or e.tensor.grad_fn is None}
            given = {**params, **state}
            dtypes = {name: entry.tensor.dtype for name, entry in found.items()} | {one.name: one.dtype for one in made}
            tensors = {name: _in_torch_dtype(given[name], dtype) for name, dtype in dtypes.items() if name in given}
            check_names(self.__name__, found, params, state)
            if not in_parts:
                self._check_shapes(found, tensors)
            self._check_gradient_hooks(found)
            for name, tensor in tensors.items():
                if name in found and found[name].kind in ("parameter", "frozen"):
                    refuse_own_class(self.__name__, name, found[name].tensor)
                    mark_as_parameter(tensor, found[name].tensor)
            before = {name: write_count(tensor) for name, tensor in tensors.items() if tensor is not given[name]}
            memory = {name: storage_id(innermost(tensor)) for name, tensor in given.items()}
            stale = Stale()
            module = bound(self.module, found, {**given, **tensors}, made, stale)
        if train is not None:
            self._set_mode(module, train)
        trained = {name: tensors[name] for name in params if name in tensors}
        converted = {name: tensor for name, tensor in trained.items() if tensor is not given[name]}
        with (
            gradients_required(trained.values()),  # under `jax.grad` they already do
            without_cached_weights(),
            RefuseOwnTensors(self.__name__, everything, given.values(), stale.copied, trained),
            RefuseWrites(self.__name__, converted, stale.in_objects)
            if converted or stale.in_objects
            else contextlib.nullcontext(),
        ):
            required = _requiring_gradients(trained)
            with self._explained_errors(stale):
                out = _bound_method(module, method)(*args, **kwargs)
            still = _requiring_gradients(trained)
            for name in required:
                if name not in still:
                    raise requires_grad_error(self.__name__, name)
        with unseen_by_function_modes():
            self._check_memory(memory, given)
            replaced = {id(entry.tensor): tensors[name] for name, entry in found.items()}
            self._check_attributes(module, train, replaced, stale)
            after = entries(module, computed=True, ties=ties_after)
            refuse_new_ties(self.__name__, self.module, ties, ties_after)
            refuse_new_overlaps(self.__name__, after, {**given, **tensors})
            changed = {
                name: entry.tensor
                for name, entry in after.items()
                if entry.tensor is not tensors.get(name, given.get(name))
                or (name in before and (write_count(entry.tensor) != before[name] or _may_have_changed(entry)))
            }
            self._check_changed(changed, found, params, given.keys() - after.keys())
            self._check_new_parameters(after, found, given)
            return out, changed, made_tensors(module, changed.keys() - found.keys())

    def _set_mode(self, module: torch.nn.Module, train: bool) -> None:
        try:
            module.train(train)
        except NotImplementedError as error:  # a module of `torch.export`
            raise ModelError(
                f"`{self.__name__}` has only one mode ({error}). Pass `train=None`, which leaves it as it is."
            ) from error

    @contextlib.contextmanager
    def _explained_errors(self, stale: Stale) -> Iterator[None]:
        """Replace an exception of the module's code by one that names the attributes that the module's copy lacks."""
        try:
            yield
        except (AttributeError, KeyError, TypeError) as error:
            if not stale.dropped:
                raise
            names = shown([f"`{name}`" for name in dict.fromkeys(stale.dropped)])
            raise ModelError(
                f"A call of `{self.__name__}` raised {summary_of(error)}. The copy of the module "
                f"that a call runs has no {names}: an earlier call computed it from parameters other than those in "
                "`params`. Compute it in each call, or clear it in the torch module."
            ) from error

    def _check_shapes(self, found: Mapping[str, TensorEntry], tensors: Tensors) -> None:
        """Refuse parameters of other shapes than in torch, which operators might broadcast."""
        other = [
            f"`{name}` {tuple(tensor.shape)}, in torch {tuple(found[name].tensor.shape)}"
            for name, tensor in tensors.items()
            if name in found
            and found[name].kind in ("parameter", "frozen")
            and tensor.shape != found[name].tensor.shape
        ]
        if other:
            raise ModelError(
                f"Parameters of `{self.__name__}` have other shapes than in the torch module: {shown(other)}. Stacked "
                "parameters of several models are for `jax.vmap`. For a model of other sizes, make a torch module of "
                "these sizes: `jtbridge.module(model)`."
            )

    def _check_gradient_hooks(self, found: Mapping[str, TensorEntry]) -> None:
        for name, entry in found.items():
            if entry.kind == "parameter" and has_gradient_hooks(entry.tensor):
                raise ModelError(
                    f"`{name}` of `{self.__name__}` has a hook for its gradient (`register_hook`), and the gradient of "
                    "`params` would not pass through it. Remove the hook, `handle.remove()`, and change the gradient "
                    f"that `jax.grad` returns: `gradients[{name!r}]`."
                )

    def _check_memory(self, before: Mapping[str, int], given: Tensors) -> None:
        for name, storage in before.items():
            if storage_id(innermost(given[name])) != storage:
                raise MutationError(
                    f"A call of `{self.__name__}` assigns to `.data` of `{name}`, which no trace sees. Write "
                    f"`{name.rpartition('.')[2]}.copy_(value)`, or assign the attribute itself. {_FIRST_CALL}"
                )

    def _check_changed(
        self, changed: dict[str, Any], found: dict[str, TensorEntry], params: Tensors, lost: Iterable[str]
    ) -> None:
        for name in lost:
            raise ModelError(
                f"A call of `{self.__name__}` removed `{name}` from the module, or replaced it by a value that is not "
                "a tensor. The state that a call returns needs a tensor for each one that it got."
            )
        for name in changed:
            if name in params or (name in found and found[name].kind in ("parameter", "frozen")):
                raise written_parameter(self.__name__, name)

    def _check_new_parameters(
        self, after: Mapping[str, TensorEntry], found: Mapping[str, TensorEntry], given: Tensors
    ) -> None:
        for name, entry in after.items():
            if entry.kind == "parameter" and name not in found and name not in given:
                raise ModelError(
                    f"A call of `{self.__name__}` made the parameter `{name}`, which is not in `params`, so it would "
                    "not train. Call the torch module once before `jtbridge.module(model).init()`, or make a buffer."
                )

    def _check_attributes(
        self, module: torch.nn.Module, train: bool | None, replaced: Mapping[int, torch.Tensor], stale: Stale
    ) -> None:
        """Raise or warn if a call changed a Python value in an attribute, which is not part of the state."""
        if self.purity == "allow":
            return
        original = self.module
        if train is not None and any(type(part).train is not torch.nn.Module.train for part in original.modules()):
            original = copied(original, {}, Stale())
            self._set_mode(original, train)  # so that attributes that `train` sets do not count as changed
        for name, before, after in python_changes(original, module, replaced, stale.objects):
            self._report(name, before, after)

    def _report(self, name: str, before: Any, after: Any) -> None:
        message = (
            f"A call of `{self.__name__}` changed the attribute `{name}` from {before!r} to {after!r}. It is Python "
            "state, which a compiled program reads when it is traced and cannot change. Store it as a tensor, with "
            '`register_buffer`, or pass `purity="allow"` to `jtbridge.module`: each call then starts from '
            f"{before!r}. {_FIRST_CALL}"
        )
        if self.purity == "error":
            raise MutationError(message)
        warn_user(message, PurityWarning)


def _bound_method(module: torch.nn.Module, method: str | Callable[..., Any]) -> Callable[..., Any]:
    if callable(method):
        return functools.partial(method, module)
    return module if method == "forward" else getattr(module, method)


class RefuseWrites(DispatchMode):
    """A mode that raises an error for an operator that writes to a tensor which a call must not change.

    Args:
        module: the name of the module, for the message.
        parameters: parameters that were converted to the module's dtype, by name. They are copies of arguments, so
            `wrap` does not report a write to them, and torch does not count all writes.
        in_objects: tensors of the torch module itself in objects of it. They are not part of the state.
    """

    def __init__(self, module: str, parameters: Tensors, in_objects: Sequence[torch.Tensor]):
        super().__init__()
        self._module = module
        self._names = {storage_id(innermost(tensor)): name for name, tensor in parameters.items()}
        self._in_objects = {storage_id(innermost(x)) for x in in_objects if x.layout is torch.strided}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in written_tensors(func, args, kwargs):
            if tensor.layout is not torch.strided:
                continue
            if (name := self._names.get(storage_id(tensor))) is not None:
                raise written_parameter(self._module, name)
            if storage_id(tensor) in self._in_objects:
                raise MutationError(
                    f"A call of `{self._module}` writes to a tensor of shape {tuple(tensor.shape)} in an object that "
                    "the module has in an attribute. The tensor is not part of the state that a call returns. Make it "
                    "a buffer, or an attribute of the module."
                )
        return func(*args, **kwargs)


def written_parameter(module: str, name: str) -> ModelError:
    """Return the error for a call that writes to a parameter."""
    return ModelError(
        f"A call of `{module}` writes to `{name}`, which is a parameter or in `params`. A call returns new state, and "
        "no new parameters. If no optimizer is to change it, move it into the state: "
        f"`state[{name!r}] = params.pop({name!r})`; register it as a buffer if the call writes to it. {_FIRST_CALL}"
    )


def check_names(module: str, found: Mapping[str, Any], params: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raise an error unless each tensor of the module is in exactly one of `params` and `state`."""
    twice = sorted(params.keys() & state.keys())
    missing = [name for name in found if name not in params and name not in state]
    if not twice and not missing:
        return
    problem = f"{shown(missing)} missing" if missing else f"{shown(twice)} in both"
    raise ModelError(
        f"`params` and `state` of `{module}` must have each of its {len(found)} tensors once: {problem}. Start from "
        "`params, state = net.init()`. A call returns the entries that it changed: the new state is `state | changed`. "
        "Move entries from one dict to the other with `state[name] = params.pop(name)`."
    )


def bound(
    module: torch.nn.Module,
    found: Mapping[str, TensorEntry],
    given: Mapping[str, Any],
    made: Sequence[MadeTensor] = (),
    stale: Stale | None = None,
) -> Any:
    """Return a copy of a module with the tensors `given`, by name.

    Args:
        module: the module.
        found: its tensors.
        given: the tensors of the copy.
        made: where earlier calls stored tensors that are not in `found`. Others go where their names say, see
            :func:`place`.
        stale: is filled with the tensors that earlier calls left in the module.
    """
    copy = copied(module, {id(entry.tensor): given[name] for name, entry in found.items()}, stale or Stale())
    known = {one.name for one in made}
    for name in sorted(given.keys() - found.keys() - known, key=_natural_order):
        place(copy, name, given[name])
    place_made(copy, made, given)
    return copy


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Return a key by which "h.2" comes before "h.10"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def place(module: torch.nn.Module, name: str, tensor: Any) -> None:
    """Put a tensor where its name says: a call of another :class:`JaxModule` stored it there, in another process.

    Raises:
        ModelError: no call could have stored a tensor under this name, or the name does not say where.
    """
    try:
        holder, key = locate(module, name)
    except ModelError as error:
        raise _unexpected(module, name) from error
    if isinstance(holder, torch.nn.Module) and key not in registered_modules(holder):
        if key in registered_parameters(holder):
            raise _unexpected(module, name)
        if key in registered_buffers(holder):
            registered_buffers(holder)[key] = tensor
            return
        present = vars(holder).get(key, getattr(type(holder), key, _MISSING))
        if isinstance(present, torch.Tensor | None):
            vars(holder)[key] = tensor
            return
    elif isinstance(holder, list) and key.isdigit() and int(key) <= len(holder):
        holder[int(key) :] = [tensor, *holder[int(key) + 1 :]]
        return
    elif isinstance(holder, dict):
        keys = [known for known in holder if str(known) == key]
        if len(keys) == 1:
            holder[keys[0]] = tensor
            return
    raise _unexpected(module, name)


def _requiring_gradients(tensors: Tensors) -> list[str]:
    """Return the names of the tensors that require a gradient, or whose tensor inside `torch.func` does."""
    with unseen_by_function_modes():
        return [name for name, tensor in tensors.items() if innermost(tensor).requires_grad]


def _unexpected(module: torch.nn.Module, name: str) -> ModelError:
    kind = type(module).__name__
    return ModelError(
        f"`{name}` is in `params` or `state`, and `{kind}` has no such tensor, or has it under another name to which "
        "it is tied. The names are those of `jtbridge.module(model).init()`. If a call in another process stored it in "
        "the module, let this one find out where, before it gets that state: "
        "`jax.eval_shape(net, *net.init(), *arguments)`."
    )


def _may_have_changed(entry: TensorEntry) -> bool:
    """Return whether a call may have written to a converted tensor: torch does not count all writes."""
    return entry.kind not in ("parameter", "frozen") and entry.tensor.dtype in (*NARROWED, torch.int32)


def _in_torch_dtype(tensor: torch.Tensor, own: torch.dtype) -> torch.Tensor:
    """Return a tensor in the dtype that it has in torch, if conversion to JAX and back changed it.

    While x64 is off, JAX narrows float64 and complex128, and an int32 array reaches torch as int64.
    """
    if tensor.dtype is torch.int64 and own is torch.int32:
        return tensor.to(own)
    narrowed = not jax.config.jax_enable_x64 and NARROWED.get(own) is tensor.dtype  # type: ignore[attr-defined]
    return tensor.to(own) if narrowed else tensor
