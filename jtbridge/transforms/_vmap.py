"""A torch function over a batch of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from jtbridge._compat import control_flow_outside_modes
from jtbridge.core.array_types import ArrayType, Tensors
from jtbridge.core.dtypes import torch_dtype
from jtbridge.core.functions import TorchFunction
from jtbridge.core.signals import raise_if_from_signal
from jtbridge.core.torch_state import TorchState

from ._derived import Derived
from ._vjp import Vjp
from ._vmap_guard import VmapGuard


@dataclasses.dataclass(frozen=True)
class Vmap(Derived):
    """`fn` over a batch of `size` rows in one call.

    `dims` holds the batch axis of each input, None for an input without one. Results have the batch axis first, except
    the results at the positions `summed`, which are summed over the batch.
    """

    dims: tuple[int | None, ...]
    size: int
    summed: tuple[int, ...] = ()

    @property
    def in_types(self) -> tuple[ArrayType, ...]:  # type: ignore[override]
        return tuple(
            type_ if dim is None else _with_axis(type_, dim, self.size)
            for type_, dim in zip(self.fn.in_types, self.dims, strict=True)
        )

    @property
    def out_types(self) -> tuple[ArrayType, ...]:  # type: ignore[override]
        return tuple(
            type_ if i in self.summed else _with_axis(type_, 0, self.size) for i, type_ in enumerate(self.fn.out_types)
        )

    @property
    def state(self) -> TorchState:
        return self.fn.state

    @property
    def order(self) -> int:
        return self.fn.order

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        rows = self._rows(tensors)
        return tuple(y.sum(0, dtype=y.dtype) if i in self.summed else y for i, y in enumerate(rows))

    def _rows(self, tensors: Tensors) -> Tensors:
        if self.size == 0:
            return self._empty(tensors)
        traits = self.base.traits
        if (
            self in self.base.cache.sequential
            or traits.unbatchable
            or (self.base.cache.reads_graph and self.order > 0)  # in torch.func a weight requires no gradient
            or (traits.autograd.uses_data and self.order > 0)  # inside torch.func, `.data` does not detach a tensor
        ):
            return self.by_loop(tensors)
        try:
            return self.by_torch_vmap(tensors)
        except Exception as error:  # noqa: BLE001
            raise_if_from_signal(error)
            # If a row fails by itself, the loop raises the real error.
            result = self.by_loop(tensors)
            self.base.cache.sequential.add(self)
            return result

    def by_torch_vmap(self, tensors: Tensors, randomness: str = "same", *, has_state: bool = False) -> Tensors:
        """Run all rows by one call of torch.vmap, which raises if it cannot batch the function.

        By default a key that is not batched draws the same numbers for every row, as in JAX. With `has_state`, the
        function may store tensors, and an error is raised if it stores a tensor of the batch.
        """
        guard = VmapGuard(tensors, self.dims, has_state=has_state)
        with guard, control_flow_outside_modes(_refuse_control_flow):

            def of_row(*row: torch.Tensor) -> Tensors:
                guard.note(row)
                return self.fn(*row)

            results = torch.func.vmap(of_row, in_dims=self.dims, randomness=randomness)(*tensors)
        guard.check_escaped()
        guard.check_errors(is_derivative=isinstance(self.fn, Derived))
        if any(y.dim() == 0 or len(y) != self.size for y in results):
            raise NotImplementedError("torch.vmap gives a result without the batch axis")
        return results

    def by_loop(self, tensors: Tensors) -> Tensors:
        """Run the rows one after another, which is right for every function."""
        rows = [self.fn(*self._arguments_of_row(tensors, i)) for i in range(self.size)]
        return tuple(torch.stack(column) for column in zip(*rows, strict=True))

    def _arguments_of_row(self, tensors: Tensors, i: int) -> list[torch.Tensor]:
        # A row is copied to new memory: as_strided and similar operators count from the start of the memory.
        return [t if d is None else t.select(d, i).clone() for t, d in zip(tensors, self.dims, strict=True)]

    def _empty(self, tensors: Tensors) -> Tensors:
        device = tensors[0].device
        return tuple(
            torch.empty((0, *type_.shape), dtype=torch_dtype(type_.dtype, "a result"), device=device)
            for type_ in self.fn.out_types
        )


def _refuse_control_flow() -> None:
    # The guard does not see the operators that these functions run.
    raise NotImplementedError("torch.vmap is not checked inside `torch.cond` and other operators that take functions")


def of_results(transpose: TorchFunction, used: Sequence[int]) -> TorchFunction:
    """Restrict a vector-Jacobian product, batched or not, to the cotangents of some results.

    `used` holds the positions of these results among the results that the product takes cotangents of.
    """
    if isinstance(transpose, Vmap):
        inner = of_results(transpose.fn, used)
        count = len(transpose.dims) - _cotangents(transpose)
        dims = (*transpose.dims[:count], *(transpose.dims[count + i] for i in used))
        return dataclasses.replace(transpose, fn=inner, dims=dims)
    assert isinstance(transpose, Vjp)
    return dataclasses.replace(transpose, outs=tuple(transpose.outs[i] for i in used))


def unbatched(fn: TorchFunction) -> TorchFunction:
    """Return the function inside all `Vmap` layers of `fn`."""
    while isinstance(fn, Vmap):
        fn = fn.fn
    return fn


def _cotangents(transpose: TorchFunction) -> int:
    """Return the number of cotangents that a vector-Jacobian product, batched or not, takes."""
    pullback = unbatched(transpose)
    assert isinstance(pullback, Vjp)
    return len(pullback.outs)


def _with_axis(type_: ArrayType, dim: int, size: int) -> ArrayType:
    return ArrayType((*type_.shape[:dim], size, *type_.shape[dim:]), type_.dtype)
