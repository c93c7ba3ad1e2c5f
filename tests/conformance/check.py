"""One case from end to end: torch's reference, the subject's JAX program, the comparison."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .compare import MismatchError, compare
from .convert import to_jax
from .modes import Problem, build
from .samples import NotApplicableError, Sample
from .subjects import Subject
from .traits import Traits
from .trees import leaves, skeleton

Status = Literal["passed", "failed", "not applicable"]
_OTHER_KEYS = range(1, 101)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case. `detail` says why it failed or does not apply; `note` says how a pass was judged."""

    status: Status
    detail: str = ""
    note: str = ""
    traceback: str = ""


class Checker:
    """Runs the cases of one sample. A function that was wrapped for one mode is used for the other modes too."""

    def __init__(self, sample: Sample, traits: Traits):
        self.sample = sample
        self.traits = traits
        self._problems: dict[str, Problem | NotApplicableError] = {}
        self._wrapped: dict[tuple[str, Callable[..., Any]], Callable[..., Any]] = {}

    def check(self, mode: str, subject: Subject) -> Outcome:
        try:
            problem = self._problem(mode)
        except NotApplicableError as error:
            return Outcome("not applicable", str(error))
        except Exception as error:  # noqa: BLE001 - a mistake here must not pass for something torch cannot do
            return Outcome("failed", f"no reference: {summary(error)}", traceback=traceback.format_exc()[-6000:])
        try:
            note = self._check(mode, problem, subject)
        except MismatchError as error:
            return Outcome("failed", str(error)[:500])
        except Exception as error:  # noqa: BLE001 - whatever a subject raises is its failure, and is reported
            return Outcome("failed", summary(error), traceback=traceback.format_exc()[-6000:])
        return Outcome("passed", note=note)

    def _problem(self, mode: str) -> Problem:
        if mode not in self._problems:
            try:
                self._problems[mode] = build(mode, self.sample)
            except NotApplicableError as error:
                self._problems[mode] = error
        found = self._problems[mode]
        if isinstance(found, NotApplicableError):
            raise found
        return found

    def _wrap(self, problem: Problem, subject: Subject) -> Callable[..., Any]:
        key = (subject.name, problem.function)
        if key not in self._wrapped:
            output = problem.example if self.traits.shape_depends_on_data else None
            self._wrapped[key] = subject.wrap(problem.function, self.sample.tensors, output)
        return self._wrapped[key]

    def _check(self, mode: str, problem: Problem, subject: Subject) -> str:
        wrapped = self._wrap(problem, subject)
        containers: list[str] = []

        def program(key: jax.Array, *arrays: jax.Array) -> list[Any]:
            def call(*inner: Any) -> list[Any]:
                out = wrapped(*inner, rng=key) if self.traits.draws else wrapped(*inner)
                containers.append(skeleton(out))
                return leaves(out)

            return problem.program(call)(*arrays)

        compiled = jax.jit(program)
        arrays = [to_jax(tensor) for tensor in problem.inputs]
        before = [np.array(array) for array in arrays]
        actual = jax.block_until_ready(compiled(jax.random.key(0), *arrays))
        exact = (lambda: problem.exact) if subject.translates else None
        note = compare(self.sample.operator, mode, problem.expected, actual, self.traits.values_compare, exact)
        if problem.skeleton is not None and containers[-1] != problem.skeleton:
            raise MismatchError(f"the result is {containers[-1]}, torch's is {problem.skeleton}")
        _require_untouched(before, arrays)
        if self.traits.random:
            _require_repeatable(mode, compiled, arrays, actual, problem.expected)
            return "random: shape, dtype and repeatability"
        if self.traits.uninitialised:
            return "uninitialised: shape and dtype"
        return note if any(map(_has_values, problem.expected)) else "no elements: shape and dtype"


def _has_values(leaf: Any) -> bool:
    return not isinstance(leaf, torch.Tensor) or leaf.numel() > 0


def _require_untouched(before: list[np.ndarray], arrays: list[jax.Array]) -> None:
    for i, (was, now) in enumerate(zip(before, arrays, strict=True)):
        if was.tobytes() != np.asarray(now).tobytes():
            raise MismatchError(f"input array {i} was written to")


def _require_repeatable(
    mode: str, compiled: Callable[..., Any], arrays: list[jax.Array], first: list[Any], expected: list[Any]
) -> None:
    """Require that a key repeats its values, others change them (forward), and derivatives are finite as torch's."""
    again = compiled(jax.random.key(0), *arrays)
    if _bytes(again) != _bytes(first):
        raise MismatchError("the same key gave another result the second time")
    if mode == "forward" and all(
        _bytes(compiled(jax.random.key(seed), *arrays)) == _bytes(first) for seed in _OTHER_KEYS
    ):
        raise MismatchError(f"{len(_OTHER_KEYS)} other keys gave the same result as the first one")
    if mode in ("grad", "jvp", "gradgrad") and all(bool(leaf.isfinite().all()) for leaf in expected):
        for i, leaf in enumerate(first):
            if not bool(jnp.isfinite(leaf).all()):
                raise MismatchError(f"output {i}, a derivative, is not finite, torch's is")


def _bytes(leaves_: list[Any]) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in leaves_]


def summary(error: BaseException) -> str:
    """Return an exception in one line. If it quotes a traceback, keep the text before it and the last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines)
    if "Traceback" in text:
        text = f"{text.partition('Traceback')[0]}... {lines[-1]}"
    return f"{type(error).__name__}: {text}"[:500]
