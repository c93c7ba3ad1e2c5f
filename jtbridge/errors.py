"""Every exception and warning of jtbridge.

Each message says what happened, to which argument or operator, what was expected, and what to do about it.
All of them derive from :class:`JtbridgeError`, so ``except jtbridge.errors.JtbridgeError`` catches them all.
"""

from __future__ import annotations


class JtbridgeError(Exception):
    """Base class of everything jtbridge raises on purpose."""


class ArgumentError(JtbridgeError, TypeError):
    """An argument cannot cross into torch: it is neither an array nor a hashable static value."""


class DTypeError(JtbridgeError, TypeError):
    """A dtype exists on one side only. The message names it and the side that lacks it."""


class ShapeInferenceError(JtbridgeError):
    """The output shapes could not be found out without the real inputs. Pass ``output_shapes=``."""


class DataDependentShapeError(ShapeInferenceError):
    """The output shape depends on the values of the inputs, which a JAX program cannot express."""


class RandomnessError(JtbridgeError):
    """The function drew random numbers, but was called without ``rng=`` (or from a generator of its own)."""


class MutationError(JtbridgeError):
    """The function keeps state: it wrote to a buffer of a module, or used what it kept of an earlier call."""


class DifferentiationError(JtbridgeError, RuntimeError):
    """Torch itself would not give the derivative that was asked for."""


class EffectsError(JtbridgeError):
    """A function with ordered effects was put under a transformation that cannot keep the order."""


class OutputMismatchError(JtbridgeError):
    """At run time the function returned another shape, dtype or tree than when it was traced."""


class VerificationError(JtbridgeError):
    """With ``verify=True``, a translated function gave another result than torch does for the same values.

    A compiled program passes on text alone: what reaches its caller is JAX's own error around this text.
    """


class TorchCallError(JtbridgeError, RuntimeError):
    """The torch function raised inside a compiled JAX program.

    The text holds the original type, message and torch traceback. XLA passes on text alone, so what reaches the
    caller of a compiled program is JAX's own ``jax.errors.JaxRuntimeError`` (or ValueError) around that text. In
    eager calls the original exception is raised as it is instead.
    """


class BackendError(JtbridgeError):
    """A backend name is unknown, or the backend cannot run here. The message lists all with their reasons."""


class TranslationError(JtbridgeError):
    """A function, or one of its derivatives, cannot be translated to JAX operations. The message names the operator."""


class LoweringError(JtbridgeError, ValueError):
    """A lowering was registered for an operator that does not exist, or that has one already."""


class LaunchError(JtbridgeError):
    """A Triton kernel is launched in a way that cannot be part of a JAX program. The message names the kernel."""


class DeviceError(JtbridgeError):
    """Tensors live on different devices, or on a device that the backend cannot reach."""


class SequentialVmapWarning(UserWarning):
    """``torch.vmap`` cannot batch a function, so its rows are run one after another inside one call."""


class CalledWarning(UserWarning):
    """``backend="auto"`` calls torch because a function cannot be translated, which is slower. The text says why."""


class PurityWarning(UserWarning):
    """A function that is traced writes to state, or draws without a key, and is wrapped with ``purity="warn"``."""


class RetracingWarning(UserWarning):
    """A function is traced again for every new value of a Python number. The text names the argument."""


class TuningWarning(UserWarning):
    """A kernel has its default configuration where tuning was asked for, or where what was tuned cannot be read."""
