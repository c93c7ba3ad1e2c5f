"""Detection of a call that uses the torch module's own tensors instead of those that it was given.

The mode that does so also implements, for parameters of a call, `copy.deepcopy` and `requires_grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from jtbridge._compat import (
    ReleasedTensor,
    innermost,
    inside_functorch,
    is_graph_leaf,
    mark_as_parameter,
    reads_no_values,
    storage_id,
)
from jtbridge.core.containers import tensors_in
from jtbridge.core.jax_calls import called_function
from jtbridge.errors import ModelError

from ._layout import TensorEntry

_COMPUTED = "a tensor"  # in messages, for a tensor without a name that an object of the module holds
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # tensors of a trace and of a vmap level are not the module's own
_GRADIENT = torch.Tensor.grad.__get__  # type: ignore[attr-defined]
_SETTERS = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


class RefuseOwnTensors(TorchFunctionMode):
    """A mode that raises an error where a torch function gets a tensor of the torch module, or a view of one.

    Apart from `stale`, the copy that a call runs has other tensors. Code that uses the module's own reached the module
    itself, by a global variable, a class attribute or an object that is not copied. Its result would not depend on
    `params`.

    In an eager gradient, parameters are not leaves of torch's graph. So the mode implements ``copy.deepcopy`` for them,
    and refuses a call that sets their `requires_grad` to False, or a JAX function that closes over
    one.

    Args:
        module: the name of the module, for the message.
        found: the tensors of the module, including those that an earlier call computed.
        given: the tensors of the call, which may be the module's own if a caller passes these.
        stale: tensors that an earlier call computed, and that the copy of the module holds.
        trained: the parameters of the call that require a gradient, by name.
    """

    def __init__(
        self,
        module: str,
        found: Mapping[str, TensorEntry],
        given: Iterable[torch.Tensor],
        stale: Iterable[torch.Tensor],
        trained: Mapping[str, torch.Tensor],
    ):
        super().__init__()
        self._trained = {id(tensor): name for name, tensor in trained.items()}
        self._module = module
        self._found = found
        own = {storage_id(tensor): _COMPUTED for tensor in stale if tensor.layout is torch.strided} | {
            storage_id(entry.tensor): name
            for name, entry in found.items()
            if entry.tensor.layout is torch.strided and not isinstance(entry.tensor, ReleasedTensor)
        }
        passed = {storage_id(innermost(tensor)) for tensor in given if tensor.layout is torch.strided}
        self._own = {storage: name for storage, name in own.items() if storage not in passed}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if args and id(args[0]) in self._trained:
            if func is torch.Tensor.__deepcopy__:
                return _copied_parameter(*args)
            if func == _GRADIENT and not args[0].is_leaf:
                return None  # `module.to(dtype)` reads it; torch would warn that it is not a leaf
            if func in _SETTERS and not is_graph_leaf(args[0]) and not (*args[1:], *kwargs.values(), True)[0]:
                raise requires_grad_error(self._module, self._trained[id(args[0])])
        if not reads_no_values(func):
            self._refuse_own(tensors_in(args, kwargs.values()), lambda: resolve_name(func) or func)
        result = func(*args, **kwargs)
        function = called_function(func, args)
        if function is not None:  # `reads` has the tensors that it closes over, because JAX has traced it
            self._refuse_own(function.reads.tensors(), lambda: function.name)
            self._refuse_trained(function)
        return result

    def _refuse_trained(self, function: Any) -> None:
        """Raise if a JAX function closes over a parameter of the call, which then gets no gradient."""
        for tensor in function.reads.without_gradient():
            if id(tensor) in self._trained:
                raise ModelError(
                    f"`{function.name}`, a JAX function that `{self._module}` calls, closes over "
                    f"`{self._trained[id(tensor)]}`, which gets no gradient from it. Pass the parameter to "
                    f"`{function.name}` as an argument; or, if no gradient is wanted, close over its `.detach()`."
                )
        if function.reads.derived:
            raise ModelError(
                f"`{function.name}`, a JAX function that `{self._module}` calls, reads a tensor of shape "
                f"{function.reads.derived[0]} that requires a gradient, and gets none from it. Pass it to "
                f"`{function.name}` as an argument; or, if no gradient is wanted, read its `.detach()`."
            )

    def _refuse_own(self, tensors: Iterable[torch.Tensor], user: Callable[[], Any]) -> None:
        """Raise if one of the tensors is the module's own; `user` returns the name of the function that uses it."""
        for tensor in tensors:
            if type(tensor) in _PLAIN and tensor.layout is torch.strided:
                name = self._own.get(storage_id(innermost(tensor)))
                if name is not None:
                    raise self._error(name, user())

    def _error(self, name: str, user: Any) -> ModelError:
        if name == _COMPUTED or self._found[name].tensor.grad_fn is not None:
            return ModelError(
                f"A call of `{self._module}` uses {name if name == _COMPUTED else f'`{name}`'} in "
                f"`{user}`, which an earlier call computed from other parameters than those in "
                "`params`. Clear what earlier calls stored in the module, or make a new one."
            )
        return ModelError(
            f"A call of `{self._module}` uses the torch module's own `{name}` in `{user}`, and "
            "not the one in `params` or `state`. A call runs a copy of the module, and the code reached the module "
            "itself: by a global variable, a class attribute, a cache, or an object that is not copied. Reach "
            f"`{name}` by an attribute of the module (`self...`), or pass it as an argument."
        )


def requires_grad_error(module: str, name: str) -> ModelError:
    """Return the error for a call that stops a parameter from training."""
    return ModelError(
        f"A call of `{module}` sets `requires_grad` of `{name}` to False. A parameter trains if it is in `params`, so "
        f"no call can change that. To freeze it: `state[{name!r}] = params.pop({name!r})`. To leave one use of it out "
        f"of the gradient, use `{name.rpartition('.')[2]}.detach()` there, or `torch.no_grad()`."
    )


def _copied_parameter(parameter: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """Return a copy of a parameter as ``copy.deepcopy`` does: a leaf, outside the graph of the parameter."""
    if id(parameter) not in memo:
        copy = parameter.detach().clone()
        mark_as_parameter(copy, parameter)
        memo[id(parameter)] = copy if inside_functorch() else copy.requires_grad_()
    return memo[id(parameter)]
