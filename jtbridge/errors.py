"""Exceptions and warnings of jtbridge.

Each message says what happened, to which argument or operator, what was expected, and what to do about it. All
exceptions derive from :class:`JtbridgeError`, so ``except jtbridge.errors.JtbridgeError`` catches them all.
"""

from __future__ import annotations


class JtbridgeError(Exception):
    """Base class of all exceptions that jtbridge raises on purpose."""


class ArgumentError(JtbridgeError, TypeError):
    """An argument or an option is not valid, such as an argument that is neither an array nor hashable."""


class DTypeError(JtbridgeError, TypeError):
    """A dtype exists only in JAX or only in torch, or torch's default dtype is not the one of the trace.

    The message names the dtype, and the side that lacks it.
    """


class ShapeInferenceError(JtbridgeError):
    """The output shapes cannot be found without the real inputs. Pass ``output_shapes=``."""


class DataDependentShapeError(ShapeInferenceError):
    """The output shape depends on the values of the inputs, which a JAX program cannot express."""


class RandomnessError(JtbridgeError):
    """The function draws random numbers without ``rng=``, or from a generator other than torch's default one."""


class MutationError(JtbridgeError):
    """The function keeps state: it writes to state that it reaches, or uses a tensor stored in an earlier call."""


class DifferentiationError(JtbridgeError, RuntimeError):
    """Torch cannot compute the requested derivative, or would compute it wrongly."""


class EffectsError(JtbridgeError):
    """A function with ordered effects is under a transformation that cannot keep the order."""


class ModelError(JtbridgeError, ValueError):
    """Parameters or state do not fit their torch module, or the module cannot be called with any but its own."""


class ShardingError(JtbridgeError, ValueError):
    """Rules do not fit the parameters or the mesh, or a batch cannot be divided by the devices."""


class OutputMismatchError(JtbridgeError):
    """The function returned another shape, dtype or tree than in its trace, or than ``output_shapes=`` declares."""


class VerificationError(JtbridgeError):
    """With ``verify=True``, a translated function gave another result than torch does for the same values.

    XLA passes on only the text, so the caller of a compiled program gets JAX's own error with this text.
    """


class TorchCallError(JtbridgeError, RuntimeError):
    """The torch function raised inside a compiled JAX program.

    The text contains the original type, message and torch traceback. XLA passes on only the text, so the caller of a
    compiled program gets JAX's own ``jax.errors.JaxRuntimeError`` (or ValueError) with it. An eager call raises the
    original exception instead.
    """


class JaxCallError(JtbridgeError, RuntimeError):
    """Torch code calls a JAX function that cannot run, for example inside a callback of XLA, or after it was freed."""


class BackendError(JtbridgeError):
    """A backend name is unknown, or the backend cannot run here. The message lists all backends with their reasons."""


class TranslationError(JtbridgeError):
    """A function, or one of its derivatives, cannot be translated to JAX operations. The message names the operator."""


class LoweringError(JtbridgeError, ValueError):
    """A lowering cannot be registered; or a user's lowering fails, or gives other shapes or dtypes than torch."""


class LaunchError(JtbridgeError):
    """A Triton kernel is launched in a way that cannot be part of a JAX program. The message names the kernel."""


class DeviceError(JtbridgeError):
    """Tensors are on different devices, or on a device that the backend cannot reach."""


class ForkError(JtbridgeError, RuntimeError):
    """The process was forked from one that uses JAX, so calls of JAX could wait for ever."""


class SequentialVmapWarning(UserWarning):
    """``torch.vmap`` cannot batch a function, so its rows are run one after another inside one call."""


class CalledWarning(UserWarning):
    """``backend="auto"`` calls torch because a function cannot be translated, which is slower. The text says why."""


class PurityWarning(UserWarning):
    """A traced function with ``purity="warn"`` writes to state, or draws from Python's or NumPy's global generator."""


class ConstantsWarning(UserWarning):
    """A function closes over tensors: large ones, which become literals, or trained ones, which get no gradient."""


class ShardingWarning(UserWarning):
    """A preset of :func:`jtbridge.shard` leaves a large parameter whole on each device."""


class RetracingWarning(UserWarning):
    """A function is traced again for every new value of a Python number. The text names the argument."""


class TuningWarning(UserWarning):
    """A kernel or an operator was to be tuned and is not, or the result of tuning cannot be read or written."""


class ProofWarning(UserWarning):
    """The record of kernels that were proven on a chip cannot be read, or a kernel that failed its proof is used."""
