"""The Jacobian-vector product of a torch function."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence

import torch

from jtbridge._compat import FakeTensor, differentiating, innermost, outside_modes
from jtbridge.core.array_types import ArrayType, Tensors
from jtbridge.core.dtypes import torch_dtype
from jtbridge.core.forward_mode import FORWARD_MODE
from jtbridge.core.messages import first_line, text_of
from jtbridge.core.nested_calls import setting_inside
from jtbridge.core.positions import of_differentiated
from jtbridge.core.signals import raise_if_from_signal
from jtbridge.errors import DifferentiationError

from ._composite import ReplacementMode
from ._derived import (
    Derived,
    DetachedBackwardError,
    UntraceableBackwardError,
    differentiable_norms,
    refuse_once_differentiable,
)
from ._padded_embedding import PADDED
from ._vjp import Vjp

MAX_JACOBIAN = 1 << 24  # elements
_UNITS = (1, 1j)  # the real part of (1j * dy) is minus the imaginary part of dy


@dataclasses.dataclass(frozen=True)
class Jvp(Derived):
    """Jacobian-vector product ``(x, dx) -> Df(x) @ dx`` for the inputs `wrt` and the outputs `outs`.

    The product is computed by two reverse modes: the transpose in ``ct`` of ``ct -> ct @ Df(x)``, which follows every
    rule that the gradient follows. For a first derivative of torch's own operators, torch's forward mode is used, which
    is faster and right there. Elsewhere torch's forward mode is silently wrong (torch 2.13): it ignores `no_grad`,
    drops the tangents of custom operators, and its formulas for layer_norm, linalg.solve and others cannot be
    differentiated again.
    """

    wrt: tuple[int, ...]
    outs: tuple[int, ...]

    @property
    def in_types(self) -> tuple[ArrayType, ...]:  # type: ignore[override]
        return self.fn.in_types + tuple(self.fn.in_types[i] for i in self.wrt)

    @property
    def out_types(self) -> tuple[ArrayType, ...]:  # type: ignore[override]
        return tuple(self.fn.out_types[o] for o in self.outs)

    @setting_inside
    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        if not self._may_use_forward_mode(tensors):
            with differentiable_norms(self):
                return self.by_reverse_mode(tensors)
        try:
            return self._by_forward_mode(tensors)
        except Exception as error:  # noqa: BLE001  (if the function itself is at fault, reverse mode raises too)
            raise_if_from_signal(error)
            try:
                with differentiable_norms(self):
                    result = self.by_reverse_mode(tensors)
            except Exception as other:
                raise other from error
            self.base.cache.double_reverse.add(self)
            return result

    @setting_inside
    def by_gradient(self, *tensors: torch.Tensor) -> Tensors:
        """Compute the product as the transpose of the gradient, for a comparison with forward mode."""
        with differentiable_norms(self):
            return self.by_reverse_mode(tensors)

    def _may_use_forward_mode(self, tensors: Tensors) -> bool:
        traits = self.base.traits
        return not (
            self in self.base.cache.double_reverse
            or self.fn.order > 0
            or traits.autograd.switches_grad_mode
            or traits.autograd.uses_data
            or traits.autograd.unseen_write_reason
            or traits.autograd.inner_autograd
            or traits.autograd.forward_mode  # torch 2.13 treats the tangent of a Function in two levels as 0
            or traits.custom_operator
            or traits.autograd.wrong_forward_mode
            or traits.untraceable_reason  # no trace has shown whether forward mode agrees with the gradient
            or self.base.cache.reads_graph
            or differentiating()
            or any(tensor.requires_grad for tensor in tensors)
        )

    def _by_forward_mode(self, tensors: Tensors) -> Tensors:
        count = len(self.fn.in_types)
        primals, tangents = tensors[:count], tensors[count:]

        of_wrt = of_differentiated(self.fn, self.wrt, self.outs, primals)
        # The locks of modules are taken first: a thread that traces already holds them here.
        with self.base.locked(), FORWARD_MODE, ReplacementMode(PADDED):
            found = torch.func.jvp(of_wrt, tuple(primals[i] for i in self.wrt), tuple(tangents))[1]
        # Torch returns float64 tangents of a float32 tensor without axes that was multiplied by a number.
        return tuple(
            tangent.to(torch_dtype(type_.dtype, "a tangent"))
            for tangent, type_ in zip(found, self.out_types, strict=True)
        )

    def by_reverse_mode(self, tensors: Tensors) -> Tensors:
        """Compute the product by two reverse modes, or by the rows of the Jacobian.

        The rows are used if torch fails to differentiate the gradient, if its derivative of the gradient is NaN, as for
        a norm at zero, or if the function may overwrite values that the gradient reads. A trace has no values, so NaN
        is not detected there.
        """
        hidden = self.base.traits.autograd.unseen_write_reason
        if hidden is not None:
            if not self._has_small_jacobian():
                raise DifferentiationError(
                    f"`{self.base.name}` has no forward mode: {hidden}, and its Jacobian is too large to compute. Use "
                    "reverse mode, or write to a copy."
                )
            return self._by_rows(tensors)
        try:
            products = self._by_two_vjps(tensors)
        except UntraceableBackwardError:
            raise
        except DetachedBackwardError:
            if self.fn.order > 0 or not self._has_small_jacobian():
                raise
            return self._by_rows(tensors)
        except RuntimeError as error:
            if isinstance(error, DifferentiationError):
                raise
            if not self._has_small_jacobian():
                if "is not implemented" not in text_of(error):
                    raise
                raise DifferentiationError(
                    f"`{self.base.name}` has no forward mode: torch cannot differentiate a gradient in it "
                    f"({first_line(error)}), and its Jacobian is too large to compute. Use reverse mode, or other "
                    "operators."
                ) from error
            return self._by_rows(tensors)
        if have_nan(products) and not have_nan(tensors) and self._has_small_jacobian():
            return without_nan(products, self._by_rows(tensors))
        return products

    def _has_small_jacobian(self) -> bool:
        """Return whether the Jacobian has few enough elements to be computed."""
        rows = sum(math.prod(type_.shape) for type_ in self.out_types)
        columns = sum(math.prod(self.fn.in_types[i].shape) for i in self.wrt)
        return rows * columns <= MAX_JACOBIAN

    def _by_rows(self, tensors: Tensors) -> Tensors:
        """Compute every element of ``Df(x) @ dx`` as the product of a gradient and dx.

        No derivative of a gradient is needed. Torch's forward mode would not need one either, but it is wrong in the
        cases that :class:`Jvp` lists.
        """
        count = len(self.fn.in_types)
        primals, tangents = tensors[:count], tensors[count:]
        pullback = Vjp(self.fn, self.wrt, self.outs)

        def product(*cotangents: torch.Tensor) -> torch.Tensor:
            gradients = pullback(*primals, *cotangents)
            products = [torch.real(g * dx).sum() for g, dx in zip(gradients, tangents, strict=True)]
            return sum(products[1:], products[0])

        def products(units: Sequence[torch.Tensor]) -> torch.Tensor:
            batch = None
            with contextlib.suppress(RuntimeError):  # torch has no batching rule
                # Otherwise torch.func reads other values than autograd.
                if self.base.traits.autograd.unseen_write_reason is None:
                    batch = torch.func.vmap(product)(*units)
            if batch is None or have_nan([batch]):  # torch has other formulas for batches, which may divide 0 by 0
                batch = torch.stack([product(*(unit[i] for unit in units)) for i in range(len(units[0]))])
            return batch

        zeros = [
            torch.zeros(type_.shape, dtype=torch_dtype(type_.dtype, "a cotangent"), device=tensors[0].device)
            for type_ in self.out_types
        ]
        results = []
        for number, zero in enumerate(zeros):
            if not zero.numel():
                results.append(zero)
                continue
            unit = torch.eye(zero.numel(), dtype=zero.dtype, device=zero.device).reshape(-1, *zero.shape)
            batch = [other.expand(len(unit), *other.shape) for other in zeros]
            parts = [
                products([*batch[:number], factor * unit, *batch[number + 1 :]])
                for factor in _UNITS[: 1 + zero.is_complex()]
            ]
            result = torch.complex(parts[0], -parts[1]) if zero.is_complex() else parts[0]
            results.append(result.reshape(zero.shape).to(zero.dtype))
        return tuple(results)

    def _by_two_vjps(self, tensors: Tensors) -> Tensors:
        refuse_once_differentiable(self.base, 2)
        count = len(self.fn.in_types)
        primals, tangents = tensors[:count], tensors[count:]
        pullback = Vjp(self.fn, self.wrt, self.outs, linearly=True)
        transpose = Vjp(pullback, tuple(range(count, count + len(self.outs))), tuple(range(len(self.wrt))))
        # The pullback is linear in the cotangent, or refused, so it may be differentiated at any cotangent. Zero is
        # excluded: the backward of logcumsumexp takes the logarithm of the cotangent, whose derivative is NaN at zero.
        anywhere = [
            torch.ones(type_.shape, dtype=torch_dtype(type_.dtype, "a cotangent"), device=tensors[0].device)
            for type_ in self.out_types
        ]
        return transpose(*primals, *anywhere, *tangents)


def without_nan(products: Tensors, rows: Tensors) -> Tensors:
    """Return `products` with each NaN replaced by the element of `rows`. Other elements of `rows` may be NaN."""
    return tuple(
        torch.where(product.isnan(), row.reshape(product.shape).to(product.dtype), product)
        for product, row in zip(products, rows, strict=True)
    )


def have_nan(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether any element of some tensors, which may be batched, is NaN; False for tensors without values."""
    with outside_modes(), torch.no_grad():
        values = [innermost(tensor) for tensor in tensors]
        return any(bool(value.isnan().any()) for value in values if not isinstance(value, FakeTensor))
