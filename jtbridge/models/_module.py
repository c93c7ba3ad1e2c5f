"""The public class and function: :class:`jtbridge.JaxModule` and :func:`jtbridge.module`."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.core
import numpy as np
import torch

from jtbridge._compat import ReleasedTensor, unwrap_compiled
from jtbridge.calls._wrap import wrap
from jtbridge.core.convert import to_torch
from jtbridge.core.messages import kind_of
from jtbridge.core.nested_calls import is_inside
from jtbridge.errors import ArgumentError, ModelError

from ._caches import register_caches
from ._layout import call_once, check_initialized, entries, has_lazy, overlapping, refuse_own_class
from ._made_state import MadeState, MadeTensor
from ._own_arguments import check_own_arguments
from ._placing import converter
from ._programs import Programs
from ._release import load_into, release_tensor
from ._run import Run, bound, check_names, written_parameter
from ._safetensors import read_files, write_file
from ._sharding import Rules
from ._state_dict import from_state_dict, to_state_dict

Arrays = dict[str, jax.Array]
_ARRAYS = (jax.Array, np.ndarray, torch.Tensor)


class JaxModule:
    """A torch module as a JAX function of its parameters and state, made by :func:`jtbridge.module`.

    ``net(params, state, *args)`` returns ``(out, changed)``; the new state is ``state | changed``. The function is
    static: all arrays are in `params` and `state`, which are plain dicts with torch's names. So `net` may be closed
    over, be a static argument, or be a field of another framework's module.
    """

    def __init__(self, module: torch.nn.Module, options: dict[str, Any], made: Iterable[MadeTensor] = ()):
        self._module = module
        self._options = options
        self._wrapped = wrap(Run(module, options["purity"]), return_mutated=True, **options)
        self._made = MadeState(made)
        self._programs = Programs()  # compiled by `jtbridge.generate`
        self.__name__ = type(module).__name__

    @property
    def module(self) -> torch.nn.Module:
        """Return the torch module. Its structure, hooks and Python attributes are read in each call."""
        return self._module

    def init(
        self,
        *args: Any,
        release: bool = False,
        mesh: jax.sharding.Mesh | None = None,
        rules: Rules | None = None,
        **kwargs: Any,
    ) -> tuple[Arrays, Arrays]:
        """Return the module's present tensors as `params` and `state`, by torch's names.

        `params` has the parameters with ``requires_grad``, for ``jax.grad`` and an optimizer. `state` has the
        frozen parameters, the buffers (persistent or not), and tensors in plain attributes. A tied tensor is listed
        once, by its first name. An entry may be moved from one dict to the other.

        Args:
            args, kwargs: the arguments of a call, for a lazy module that has no shapes yet: the torch module is called
                with them once, in eval mode. Other modules ignore them.
            release: with True, the torch module frees its parameters and persistent buffers one at a time, as they are
                converted, so that memory holds the weights once. Then the torch module raises an error if it is used,
                until :meth:`load`.
            mesh, rules: the devices to distribute the tensors over, and how, as for :func:`jtbridge.shard`. Each
                device gets its own part directly from the torch tensor. Presets split parameters; buffers are
                replicated.

        Raises:
            ModelError: a lazy module has no shapes yet, a parameter shares memory with another tensor, a tensor is
                sparse or nested, or the weights were released before.

        Example:
            >>> import jtbridge, torch
            >>> params, state = jtbridge.module(torch.nn.BatchNorm1d(2)).init()
            >>> list(params), list(state)
            (['weight', 'bias'], ['running_mean', 'running_var', 'num_batches_tracked'])
        """
        found = entries(self._module)
        if (args or kwargs) and has_lazy(found):
            call_once(self._module, *to_torch((args, kwargs)))
            found = entries(self._module)
        elif any(_is_key(leaf) for leaf in jax.tree.leaves((args, kwargs))):
            raise ArgumentError(
                f"`{self.__name__}`: `init` takes no JAX key, because the weights are those of the torch module. For "
                "other weights, call `torch.manual_seed(...)` before the module is made."
            )
        check_initialized(found)
        for entry in found.values():
            if isinstance(entry.tensor, ReleasedTensor):
                raise ModelError(
                    f"`{entry.name}` of `{self.__name__}` was released by `init(release=True)`, so `init` cannot read "
                    "it again. Keep the `params` and `state` of that call, or put weights back with "
                    "`net.load(params, state)`."
                )
            if entry.kind in ("parameter", "frozen"):
                refuse_own_class(self.__name__, entry.name, entry.tensor)
        convert = converter(found, mesh, rules)
        overlaps = overlapping(found)
        params: Arrays = {}
        state: Arrays = {}
        names = list(found)
        for name in names:
            entry = found.pop(name)  # a released tensor is freed before the next one is converted
            (params if entry.kind == "parameter" else state)[name] = convert(name, entry.tensor)
            if release and entry.persistent and name not in overlaps:
                release_tensor(self._module, entry.tensor)
        return params, state

    def __call__(
        self, params: Any, state: Any, /, *args: Any, rng: Any = None, train: bool | None = False, **kwargs: Any
    ) -> tuple[Any, Arrays]:
        """Call the module with these parameters and this state; return the result and the changed state.

        The new state is ``state | changed``. Only entries that the call wrote to or assigned are in `changed`, because
        ``jit`` copies every array that a program returns, even an unchanged one. The torch module is not
        changed.

        Args:
            params: the parameters by name, see :meth:`init`.
            state: the rest of the module's tensors by name.
            args, kwargs: the arguments of the module's ``forward``, as for a function of :func:`jtbridge.wrap`.
            rng: a JAX key, for dropout and other random operators.
            train: whether the call is in train mode (True) or in eval mode (False); with None, each submodule keeps its
                own mode.

        Raises:
            ModelError: a tensor of the module is missing, is in both dicts, or is unknown; a parameter has another
                shape than the module's; or the call writes to a parameter.
            MutationError: the call changed a Python value in an attribute.
            ArgumentError: ``forward`` itself has an argument `train` or `rng`, which would not get the given value.

        Example:
            >>> import jax, jax.numpy as jnp, jtbridge, torch
            >>> net = jtbridge.module(torch.nn.BatchNorm1d(2))
            >>> params, state = net.init()
            >>> train = jax.jit(lambda params, state, x: net(params, state, x, train=True))
            >>> out, changed = train(params, state, jnp.ones((4, 2)))
            >>> (state | changed)["running_mean"]
            Array([0.1, 0.1], dtype=float32)
        """
        return self._call("forward", params, state, args, kwargs, rng, train)

    def method(self, name: str | Callable[..., Any]) -> BoundMethod:
        """Return another method of the module as a function like the module itself.

        Args:
            name: the name of the method; or a torch function whose first argument is the module, such as
                ``lambda model, x: model.encoder(x)``. The function gets the copy of the module that the call runs.

        Raises:
            ArgumentError: the module has no such method.

        Example:
            >>> import jax.numpy as jnp, jtbridge, torch
            >>> net = jtbridge.module(torch.nn.Embedding(3, 2))
            >>> out, _ = net.method("extra_repr")(*net.init())
            >>> out
            '3, 2'
        """
        if not callable(name) and not callable(getattr(self._module, name, None)):
            raise ArgumentError(f"`{self.__name__}` has no method `{name}`.")
        return BoundMethod(self, name)

    def load(self, params: Mapping[str, Any], state: Mapping[str, Any]) -> torch.nn.Module:
        """Copy parameters and state into the torch module, and return it.

        Weights that ``init(release=True)`` released are allocated again.

        Raises:
            ModelError: a tensor is missing, is unknown, or has another shape than the module's; or a buffer that shares
                memory with another tensor has another value.

        Example:
            >>> import jax, jtbridge, torch
            >>> net = jtbridge.module(torch.nn.Linear(1, 1))
            >>> params, state = net.init()
            >>> net.load(jax.tree.map(jax.numpy.zeros_like, params), state).bias
            Parameter containing:
            tensor([0.], requires_grad=True)
        """
        arrays = self._checked(params, state)
        return load_into(
            self._module, self.__name__, arrays, self._made.of(arrays.keys() - entries(self._module).keys())
        )

    def state_dict(self, params: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the ``state_dict`` that the torch module would have with these tensors, for ``torch.save``.

        Names, dtypes, tied entries, extra state and version metadata are torch's. They share no memory with arrays.

        Raises:
            ModelError: a tensor is missing or unknown.

        Example:
            >>> import jtbridge, torch
            >>> net = jtbridge.module(torch.nn.Linear(1, 1))
            >>> list(net.state_dict(*net.init()))
            ['weight', 'bias']
        """
        arrays = self._checked(params, state)
        return to_state_dict(self._module, arrays, self._made)

    def from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        *,
        strict: bool = True,
        mesh: jax.sharding.Mesh | None = None,
        rules: Rules | None = None,
    ) -> tuple[Arrays, Arrays]:
        """Return `params` and `state` from a ``state_dict`` of the module. The torch module is not changed.

        Tensors that a ``state_dict`` does not have, such as buffers that are not persistent, are taken from the module.

        Args:
            state_dict: torch tensors, NumPy or JAX arrays by torch's names. Of tied names, one suffices.
            strict: with False, missing entries are taken from the module, and unknown entries are ignored.
            mesh, rules: the devices to distribute the tensors over, and how, as for :meth:`init`.

        Raises:
            ModelError: entries are missing, are not expected, or have another shape or dtype; or tied entries differ.

        Example:
            >>> import jtbridge, torch
            >>> net = jtbridge.module(torch.nn.Linear(1, 1))
            >>> params, state = net.from_state_dict({"weight": torch.ones(1, 1), "bias": torch.zeros(1)})
        """
        if not isinstance(state_dict, Mapping):
            raise ArgumentError(
                f"`from_state_dict` takes a dict of tensors by name, such as `model.state_dict()`, but got "
                f"{kind_of(state_dict)}. For a file: `torch.load(path)`, or `net.load_safetensors(path)`."
            )
        return from_state_dict(self._module, state_dict, strict=strict, mesh=mesh, rules=rules)

    def save_safetensors(
        self,
        path: str | os.PathLike[str],
        params: Mapping[str, Any],
        state: Mapping[str, Any],
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write the ``state_dict`` to a safetensors file, with each tied tensor once. Needs `safetensors`.

        Args:
            path: the file.
            params, state: the tensors.
            metadata: strings to store in the file, beside ``{"format": "pt"}`` and the names of tied tensors.

        Raises:
            ModelError: a tensor is missing or unknown, or the file cannot be written.
        """
        arrays = self._checked(params, state)
        write_file(path, to_state_dict(self._module, arrays, self._made, shared=True), metadata or {})

    def load_safetensors(
        self,
        path: str | os.PathLike[str],
        *,
        strict: bool = True,
        mesh: jax.sharding.Mesh | None = None,
        rules: Rules | None = None,
    ) -> tuple[Arrays, Arrays]:
        """Return `params` and `state` from a safetensors checkpoint, like :meth:`from_state_dict`. Needs `safetensors`.

        With `mesh` and `rules`, a process reads from the file only the parts that its own devices hold. The torch
        module may have parameters without memory, on torch's device "meta".

        Args:
            path: a file, a folder with ``model.safetensors``, or one with several files and
                ``model.safetensors.index.json``, as transformers writes them; or the path of that index.
            strict, mesh, rules: as for :meth:`from_state_dict`.

        Raises:
            ModelError: as for :meth:`from_state_dict`; or there is no such file.
        """
        tensors, ties = read_files(path)
        return from_state_dict(self._module, tensors, strict=strict, mesh=mesh, rules=rules, other_names=ties)

    def clear_cache(self) -> None:
        """Forget the traces of this module: its next call, also by `jax.jit(net)`, reads all state again.

        Compiled programs of other functions that call the module are kept; `jax.clear_caches()` drops them.
        """
        self._wrapped.clear_cache()
        jax.jit(self).clear_cache()  # type: ignore[attr-defined]

    def __copy__(self) -> JaxModule:
        return JaxModule(self._module, self._options, self._made)

    def __deepcopy__(self, memo: dict[int, Any]) -> JaxModule:
        return JaxModule(copy.deepcopy(self._module, memo), self._options, self._made)

    def __reduce__(self) -> Any:
        return JaxModule, (self._module, self._options, tuple(self._made))

    def __repr__(self) -> str:
        return f"<jtbridge.module of {self.__name__}>"

    def __jtbridge_wrapped__(self) -> Any:
        """Return the function of a call, for `explain`, `check` and `purity`."""
        return self._as_wrapped("forward", self.__name__)

    def _as_wrapped(self, method: Any, name: str) -> Any:
        run = Run(self._module, self._options["purity"])

        def call(params: Any, state: Any, *args: Any, train: bool | None = False, **kwargs: Any) -> Any:
            return run(params, state, args, kwargs, method, train, self._made.of(params, state))[:2]

        call.__name__ = name
        return wrap(call, **{**self._options, "batched": ()})

    def _call(self, method: Any, params: Any, state: Any, args: tuple, kwargs: Any, rng: Any, train: Any) -> Any:
        if is_inside():
            raise ArgumentError(
                f"`jtbridge.module` of `{self.__name__}` was called inside a wrapped function, which is torch code. "
                "Call the torch module there, or `torch.func.functional_call`."
            )
        _check_dicts(self.__name__, params, state)
        if train is not None and not isinstance(train, bool):
            raise ArgumentError(
                f"`train` of `{self.__name__}` must be True, False or None, but it is {kind_of(train)}. `jit` "
                'makes arguments arrays: use `jax.jit(net, static_argnames="train")`.'
            )
        check_own_arguments(self._module, method, args, {"train": train, "rng": rng})
        params, state = dict(params), dict(state)
        key = {} if rng is None else {"rng": rng}
        in_parts = bool(jax.sharding.get_abstract_mesh().manual_axes)  # inside `shard_map`
        known = self._made.of(params, state)
        (out, changed, made), written = self._wrapped(
            params, state, args, kwargs, method, train, known, in_parts, **key
        )
        for name in params:
            if f"params[{name!r}]" in written:
                raise written_parameter(self.__name__, name)
        # If a tensor was written to and then replaced, only its replacement is part of the new state.
        for name in state:
            if name not in changed and (place := f"state[{name!r}]") in written:
                changed[name] = written[place]
        self._check_overlap(changed)
        self._made.add(self.__name__, made)
        return out, changed

    def _check_overlap(self, changed: Mapping[str, Any]) -> None:
        for name in overlapping(entries(self._module)) & changed.keys() if changed else ():
            raise ModelError(
                f"A call of `{self.__name__}` writes to `{name}`, which shares memory with another tensor of the "
                "module: in torch the other one changes as well. Give it its own memory, with `.clone()`."
            )

    def _checked(self, params: Any, state: Any) -> Arrays:
        _check_dicts(self.__name__, params, state)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in (*params.values(), *state.values())):
            raise ArgumentError(
                f"Weights of `{self.__name__}` cannot be written to torch or to a file inside `jax.jit` or another "
                "transformation, where arrays have no values. Return the arrays, and call the method outside."
            )
        found = entries(self._module)
        check_names(self.__name__, found, params, state)
        arrays = {**params, **state}
        bound(
            self._module, found, arrays, self._made.of(arrays.keys() - found.keys())
        )  # raises for a name that the module does not have
        return arrays


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


class BoundMethod:
    """A method of a module as a function ``(params, state, *args, rng=, train=) -> (out, changed)``."""

    def __init__(self, net: JaxModule, name: str | Callable[..., Any]):
        self._net = net
        self._method = name
        self.__name__ = name if isinstance(name, str) else getattr(name, "__name__", type(name).__name__)

    def __call__(
        self, params: Any, state: Any, /, *args: Any, rng: Any = None, train: bool | None = False, **kwargs: Any
    ) -> tuple[Any, Arrays]:
        return self._net._call(self._method, params, state, args, kwargs, rng, train)

    def __jtbridge_wrapped__(self) -> Any:
        """Return the function of a call, for `explain`, `check` and `purity`."""
        return self._net._as_wrapped(self._method, self.__name__)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BoundMethod) and (self._net, self._method) == (other._net, other._method)

    def __hash__(self) -> int:
        return hash((self._net, self._method))

    def __repr__(self) -> str:
        return f"<method {self.__name__} of {self._net!r}>"


def module(
    module: torch.nn.Module,
    *,
    backend: str = "auto",
    residuals: str = "save",
    repeated_blocks: str = "inline",
    islands: str = "auto",
    int32: str = "int64",
    verify: bool = False,
    purity: str = "error",
    batched: bool = False,
) -> JaxModule:
    """Make a torch module a JAX function of its parameters and state.

    The result is called as ``out, changed = net(params, state, *args, rng=key, train=True)``: eagerly, where torch
    runs, and under ``jit``, ``grad``, ``vmap``, ``scan``, ``checkpoint`` and ``shard_map``. A call never changes the
    torch module: it runs a copy of its Python objects that holds `params` and `state`. Hooks, parametrisations and
    adapters work as in torch.

    Args:
        module: any ``torch.nn.Module`` that is not TorchScript.
        backend, residuals, repeated_blocks, islands, int32, verify: as for :func:`jtbridge.wrap`.
        purity: the reaction if a call changes Python state, as for :func:`jtbridge.wrap`.
        batched: whether the first axis of all array arguments and results of a call, except `params` and `state`, is a
            batch of independent rows, as for :func:`jtbridge.wrap`.

    Raises:
        ArgumentError: `module` is not a torch module or contains TorchScript, or `batched` is not a bool.

    Example:
        >>> import jax, jax.numpy as jnp, jtbridge, torch
        >>> net = jtbridge.module(torch.nn.Linear(3, 1))
        >>> params, state = net.init()
        >>> out, changed = jax.jit(net)(params, state, jnp.ones((2, 3)))
        >>> out.shape
        (2, 1)
    """
    if not isinstance(batched, bool):
        raise ArgumentError(
            f"`batched` of `jtbridge.module` must be True or False, but it is {batched!r}: it is for all arguments of "
            "the module. `jtbridge.wrap` takes the names of arguments."
        )
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(
            f"`jtbridge.module` takes a `torch.nn.Module`, but got {kind_of(module)}. For a function use "
            "`jtbridge.wrap(f)`."
        )
    plain = unwrap_compiled(module)
    for path, part in plain.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            place = f"`{path}`" if path else "the module"
            raise ArgumentError(
                f"`jtbridge.module` cannot exchange the parameters of TorchScript, and {place} is TorchScript. Use the "
                "Python module that it was made from, or `jtbridge.wrap`, which treats the weights as constants."
            )
    register_caches()
    options = {
        "backend": backend,
        "residuals": residuals,
        "repeated_blocks": repeated_blocks,
        "islands": islands,
        "int32": int32,
        "verify": verify,
        "purity": purity,
        "batched": ("args", "kwargs") if batched else (),  # arguments of `Run`
    }
    return JaxModule(plain, options)


def _check_dicts(name: str, params: Any, state: Any) -> None:
    for argument, value in (("params", params), ("state", state)):
        if not isinstance(value, Mapping):
            raise ArgumentError(
                f"`{argument}` of `{name}` must be a dict of arrays by name, but it is {kind_of(value)}. Call "
                "`net(params, state, *args)`, with `params, state = net.init()`."
            )
        for key, leaf in value.items():
            if not isinstance(key, str) or not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                raise ArgumentError(
                    f"`{argument}` of `{name}` must have arrays by name, but `{argument}[{key!r}]` is {kind_of(leaf)}. "
                    "The names and shapes are those of `params, state = net.init()`."
                )
            if not isinstance(leaf, _ARRAYS) and not jax.tree_util.all_leaves([leaf]):
                raise ArgumentError(
                    f"`{argument}` of `{name}` must have arrays by name, but `{argument}[{key!r}]` is {kind_of(leaf)}, "
                    "which holds an array. Pass that array, such as `variable.get_value()` for a variable of Flax NNX."
                )
