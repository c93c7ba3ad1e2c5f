"""The record of the Triton kernels that were proven on this chip."""

from __future__ import annotations

from collections.abc import Sequence

from jtbridge.diagnosis._checks import Check
from jtbridge.diagnosis._report import FAILURE, NOTE, OK, WARNING, Finding
from jtbridge.kernels import _chip, _proofs
from jtbridge.kernels._launch import interpreting
from jtbridge.triton import unsupported_reason

_GROUP = "kernels"
_FIX = "`auto` does without it. Report it with this whole report."


def _proof_findings() -> Sequence[Finding]:
    chip = _chip.present()
    if chip is None:
        text = "JAX has no GPU: the kernels are computed in jnp, and there is nothing to prove"
        return [Finding(_GROUP, "proof", NOTE, text)]
    reason = unsupported_reason("rocm" if chip.capability is None else "cuda")
    if reason and not interpreting():
        return [Finding(_GROUP, "proof", WARNING, f"no kernel can run: {reason}", "See `versions` above.")]
    record = _proofs.record()
    if record is None:
        return [Finding(_GROUP, "proof", WARNING, _proofs.UNPROVEN)]  # the doctor proves them, and replaces this
    path = _proofs.path_of(_proofs.key() or {})
    text = f"{len(record.proven)} kernels are proven on {chip.name}, by {path}"
    return [
        Finding(_GROUP, "proof", OK, text),
        *(Finding(_GROUP, name, FAILURE, wrong, _FIX) for name, wrong in record.failed.items()),
    ]


CHECKS = (Check(_GROUP, "proof", _proof_findings, "calls"),)
