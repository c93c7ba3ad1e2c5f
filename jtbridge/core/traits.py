"""Facts about a torch function that a trace of it shows."""

from __future__ import annotations

import dataclasses
import weakref

from .array_types import ArrayType


@dataclasses.dataclass(frozen=True)
class Effects:
    """Side effects of a function.

    Attributes:
        mutated: positions of the arguments that the function writes to.
        reshaped: the positions of the arguments whose type the function changes, as by ``x.unsqueeze_(0)``, each with
            the new type.
        random_operator: an operator that draws random numbers, if any.
        launches: a Triton kernel that the function launches, if any.
        modules: weak references to the modules that the function calls.
        ordered: whether the function may have side effects, among them draws from torch's generator.
    """

    mutated: tuple[int, ...] = ()
    reshaped: tuple[tuple[int, ArrayType], ...] = ()
    random_operator: str | None = None
    launches: str | None = None
    modules: tuple[weakref.ref, ...] = ()
    ordered: bool = False


@dataclasses.dataclass(frozen=True)
class AutogradTraits:
    """Facts about a function's use of autograd.

    Attributes:
        switches_grad_mode: the function switches gradient recording on or off.
        inner_autograd: the function takes gradients inside.
        forward_mode: which of torch's forward modes the function may use inside: "torch.func", "forward_ad" or None.
        uses_data: the function reads `.data`, a detach that torch.func does not see.
        unseen_write_reason: how the function writes to memory in a way that autograd does not follow, if it does. A
            gradient may then be computed from values that were written over.
        breaks_inner_graph: the function takes gradients inside, and never with `create_graph=True`.
        fused_norm: an operator that torch differentiates wrongly beyond the first derivative, if any.
        wrong_forward_mode: an operator whose forward mode in torch is not the transpose of its gradient, if any.
        runs_without_grad: the function gives the same result with gradient recording off, at less cost.
    """

    switches_grad_mode: bool = False
    inner_autograd: bool = False
    forward_mode: str | None = None
    uses_data: bool = False
    unseen_write_reason: str | None = None
    breaks_inner_graph: bool = False
    fused_norm: str | None = None
    wrong_forward_mode: str | None = None
    runs_without_grad: bool = False


@dataclasses.dataclass(frozen=True)
class FunctionTraits:
    """Facts about a function that its trace shows, in addition to its types.

    Attributes:
        effects: the side effects of the function.
        autograd: the function's use of autograd.
        operators: the number of operators that the function runs.
        custom_operator: an operator that is not torch's own, if any.
        unbatchable: an operator that torch.vmap computes wrongly, if any.
        untraceable_reason: why the function cannot be traced on fake tensors; None if it can be.
        only_branches: the function is untraceable only because it reads values to branch on them or to assert something
            about them, so it can be translated.
        has_dynamic_sizes: the function is untraceable only because sizes or numbers inside depend on data, without
            deciding what it computes: it can be translated where torch runs the regions with such sizes.
        uses_default_dtype: the function may depend on torch's default dtype, so the traced function is valid for one
            default dtype only.
    """

    effects: Effects = Effects()
    autograd: AutogradTraits = AutogradTraits()
    operators: int = 0
    custom_operator: str | None = None
    unbatchable: str | None = None
    untraceable_reason: str | None = None
    only_branches: bool = False
    has_dynamic_sizes: bool = False
    uses_default_dtype: bool = True

    @property
    def untranslatable_reason(self) -> str | None:
        """Return why the function cannot be translated, as far as its trace shows; None if no reason is known."""
        return None if self.only_branches or self.has_dynamic_sizes else self.untraceable_reason
