"""The state that a call must not change: the settings of its thread, and the random generators of the process."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch


def of_thread() -> dict[str, Any]:
    """Return the settings of the calling thread that a call could disturb."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "forward mode": torch._C._is_fwd_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "default device": str(torch.get_default_device()),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "transforms of torch.func": torch._C._functorch.maybe_current_level(),
        "hooks of saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(False) is not None,
        "x64": jax.config.jax_enable_x64,  # type: ignore[attr-defined]
        "transforms of JAX": jax.core.trace_ctx.is_top_level() if hasattr(jax.core, "trace_ctx") else True,
    }


def random_numbers() -> tuple[bytes, bytes]:
    """Return the states of the generators of torch and numpy that every thread shares."""
    return torch.get_rng_state().numpy().tobytes(), np.random.get_state()[1].tobytes()  # type: ignore[union-attr, index]
