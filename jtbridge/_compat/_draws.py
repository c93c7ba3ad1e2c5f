"""Random operators of one thread that draw from another generator, without a change to torch's default generator.

Torch has one default generator per device and process, and no public way to give one thread another generator. The
dispatcher makes this possible: it sends an operator to the kernel of a dispatch key that a thread switched on for
itself. Kernels for the key ``TESTING_ONLY_GenericMode``, which torch has for its own C++ tests, are registered for the
operators that take a `generator`. They pass a generator if the caller gave none. On a thread that has not switched the
key on, the dispatcher ignores these kernels. Operators without such a kernel fall through to their own kernel,
at no cost.

Tried on torch 2.13. A TorchDispatchMode would do the same by public APIs, but costs microseconds on each operator,
random or not, and is not active inside the Python implementation of a custom operator.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from ._interrupts import on_own_thread
from ._torch import OpOverload
from ._torch_modes import outside_modes

_SLOT = "jtbridge.draws"  # key of an object that torch stores for each thread, and passes to autograd's threads
_KEY = torch._C._parse_dispatch_key("TESTING_ONLY_GenericMode")
_KEYS = torch._C.DispatchKeySet(_KEY)  # type: ignore[arg-type]
_CPU = torch.device("cpu")
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_INSTALLING = threading.Lock()
_libraries: list[torch.library.Library] = []  # registrations last as long as these objects
_seen_higher_order = 0  # number of higher-order operators when the key was last registered with them
# CUDA operators that draw from the default generator and take no `generator`.
_FUSED_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
)

# The operators that return a random tensor like another one, and the functions that draw its elements in place.
_FILLS: dict[str, Callable[..., torch.Tensor]] = {
    "rand_like": torch.Tensor.uniform_,
    "randn_like": torch.Tensor.normal_,
    "randint_like": lambda out, *bounds, generator: out.random_(*((0, *bounds)[-2:]), generator=generator),
}


class DrawSource(Protocol):
    """The source of a thread's random numbers."""

    def generator(self, device: torch.device, operator: str) -> torch.Generator:
        """Return the generator for a random operator on a device, or raise to refuse the draw."""
        ...

    def state_generator(self, device: torch.device) -> torch.Generator:
        """Return the generator whose state ``torch.get_rng_state``, ``torch.manual_seed`` etc. read and write."""
        ...

    def note_new_seed(self) -> None:
        """Record that the function seeds the generator."""
        ...


class EarlierDraws:
    """A source that repeats the draws of default generators from earlier states.

    Args:
        state: the state of the CPU's generator.
        on_gpus: the states of the GPUs' generators. On other GPUs, draws use the default generators.
    """

    def __init__(self, state: torch.Tensor, on_gpus: Mapping[torch.device, torch.Tensor] | None = None):
        self.generators: dict[torch.device, torch.Generator] = {}
        for device, earlier in {_CPU: state, **(on_gpus or {})}.items():
            self.generators[device] = torch.Generator(device)
            self.generators[device].set_state(earlier)

    def generator(self, device: torch.device, operator: str) -> torch.Generator:
        del operator
        return self.state_generator(device)

    def state_generator(self, device: torch.device) -> torch.Generator:
        return self.generators.get(device) or default_generator(device)

    def note_new_seed(self) -> None:
        """Do nothing: as in torch, the next draws follow from the new seed."""


def default_generator(device: torch.device) -> torch.Generator:
    """Return torch's own default generator of a device, also if this thread draws from another source."""
    if device.type == "cpu":
        return torch.default_generator
    torch.cuda.init()
    return tuple.__getitem__(torch.cuda.default_generators, device.index)


def states_on_gpus() -> dict[torch.device, torch.Tensor]:
    """Return the states of the default generators of GPUs; none if torch has not used a GPU yet."""
    devices = (torch.device("cuda", index) for index in range(len(torch.cuda.default_generators)))
    return {device: default_generator(device).get_state() for device in devices}


def draw_source() -> DrawSource | None:
    """Return the source of this thread's draws; None for torch's default generators."""
    return torch._C._get_obj_in_tls(_SLOT) if torch._C._is_key_in_tls(_SLOT) else None


def _set_draw_source(source: DrawSource | None) -> None:
    """Set the source of this thread's draws."""
    if _storing_takes_a_reference():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(source))
    torch._C._stash_obj_in_tls(_SLOT, source)


@functools.cache
def _storing_takes_a_reference() -> bool:
    """Return whether `_stash_obj_in_tls` takes over the caller's reference to the object that it stores.

    Tried on torch 2.11, where it does, and on 2.13, where it adds a new reference.
    """
    stored = object()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(stored))
    before = sys.getrefcount(stored)
    torch._C._stash_obj_in_tls("jtbridge.references", stored)
    return sys.getrefcount(stored) == before


class drawing_from:
    """A context in which this thread's random operators draw from `source`, and ``torch.get_rng_state`` etc. use it."""

    def __init__(self, source: DrawSource):
        self._source = source

    def __enter__(self) -> None:
        _install()
        self._before = draw_source()
        _set_draw_source(self._source)
        self._guard = torch._C._IncludeDispatchKeyGuard(_KEY)  # type: ignore[arg-type]
        self._guard.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._guard.__exit__(*error)
        _set_draw_source(self._before)


def same_generator(a: torch.Generator, b: torch.Generator) -> bool:
    """Return whether two Python objects are the same generator: modes receive a new object. Tried on torch 2.13."""
    return a._cdata == b._cdata  # type: ignore[attr-defined]


def inside_mode() -> contextlib.AbstractContextManager[None]:
    """Return a context that keeps `drawing_from` active inside a TorchDispatchMode.

    In a mode, torch excludes all dispatch keys except those of devices.
    """
    if draw_source() is None:
        return contextlib.nullcontext()
    return torch._C._SetExcludeDispatchKeyGuard(_KEY, False)  # type: ignore[attr-defined]


@contextlib.contextmanager
def random_state_of(source: DrawSource) -> Iterator[None]:
    """Make ``torch.get_rng_state`` etc. of this thread act on `source`.

    Random operators do not draw from `source`. This context is for fake tensors, on which nothing is drawn.
    """
    _install()
    before = draw_source()
    _set_draw_source(source)
    try:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            yield
    finally:
        _set_draw_source(before)


def _install() -> None:
    """Register the kernels, once per process, and make new higher-order operators fall through the key."""
    if _libraries and len(torch._ops._higher_order_ops) == _seen_higher_order:
        return
    # Ctrl-C interrupts only the main thread. It must not interrupt the registrations: torch refuses to repeat some.
    on_own_thread(_install_now)


def _install_now() -> None:
    global _seen_higher_order
    higher_order = torch._ops._higher_order_ops
    with _INSTALLING:
        for operator in list(higher_order.values()):
            operator.fallthrough(_KEY)
        _seen_higher_order = len(higher_order)
        if not _libraries:
            torch.random.default_generator = _GeneratorOfThread(_CPU)  # type: ignore[assignment]
            torch.cuda._lazy_call(_watch_gpus)  # called now, or when torch first uses a GPU
            _libraries.extend(_registered())


def _registered() -> list[torch.library.Library]:
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "TESTING_ONLY_GenericMode")
    library = torch.library.Library("aten", "IMPL")
    for operator, kernel in _random_kernels():
        library.impl(operator, kernel, "TESTING_ONLY_GenericMode")
    return [others, library]


def _random_kernels() -> Iterator[tuple[OpOverload, Callable[..., Any]]]:
    """Yield each operator of torch that draws random numbers, with its kernel."""
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::")]
    taking = {  # operators that take a generator
        _without_generator(schema): _overload_of_schema(schema)
        for schema in schemas
        if _takes_generator(schema) and not schema.name.startswith("aten::_no_grad_")
    }
    for operator in taking.values():
        if operator._schema.name.removeprefix("aten::") not in _FILLS or _is_out(operator._schema):
            yield operator, _with_generator(operator)
    for schema in schemas:
        if schema.name.removeprefix("aten::") in _FILLS and not _is_out(schema):
            yield (operator := _overload_of_schema(schema)), _filling(operator)
        elif not _takes_generator(schema) and (other := taking.get(_without_generator(schema))) is not None:
            yield (operator := _overload_of_schema(schema)), _as_one_that_takes_a_generator(operator, other)
        elif schema.name.removeprefix("aten::") in _FUSED_ATTENTION:
            yield (operator := _overload_of_schema(schema)), _with_default_generator_replaced(operator)
    yield torch.ops.aten.native_dropout.default, _native_dropout
    yield torch.ops.aten._cudnn_rnn.default, _cudnn_rnn


def _takes_generator(schema: Any) -> bool:
    return any(argument.name == "generator" for argument in schema.arguments)


def _is_out(schema: Any) -> bool:
    return any(argument.name == "out" for argument in schema.arguments)


def _without_generator(schema: Any) -> tuple[Any, ...]:
    """Return the name of an operator, and the names and types of its arguments except a generator.

    Some overloads differ only in types: ``torch.normal(mean, std)`` has three for numbers and tensors.
    """
    arguments = [(each.name, str(each.type)) for each in schema.arguments if each.name != "generator"]
    return schema.name, *arguments


def _overload_of_schema(schema: Any) -> OpOverload:
    packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"))
    return getattr(packet, schema.overload_name or "default")


def _source_for_drawing(args: Any, kwargs: Any) -> DrawSource | None:
    """Return the source of this thread's draws; None for torch's default generators, and for tensors without values."""
    if on_meta((*args, *kwargs.values()), kwargs.get("device")) or torch._C._get_dispatch_mode(_FAKE) is not None:
        return None
    return draw_source()


def on_meta(operands: Sequence[Any], device: Any) -> bool:
    """Return whether an operator computes on the meta device, where nothing is drawn.

    Args:
        operands: the arguments of the operator.
        device: its argument `device`; None if there is none.
    """
    if device is not None:
        return torch.device(device).type == "meta"
    return any(isinstance(x, torch.Tensor) and x.device.type == "meta" for x in operands)


def _with_generator(operator: OpOverload) -> Callable[..., Any]:
    """Return a kernel that calls an operator with the generator of this thread's source, if the caller gave none."""
    names = [argument.name for argument in operator._schema.arguments]
    position = names.index("generator")
    training = names.index("training") if "training" in names else None
    is_out = _is_out(operator._schema)
    shown = str(operator)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            given = args[position] if len(args) > position else kwargs.get("generator")
            does_draw = training is None or (len(args) > training and args[training]) or kwargs.get("training")
            source = _source_for_drawing(args, kwargs)
            if given is not None or not does_draw or source is None:
                return operator(*args, **kwargs)
            generator = source.generator(_drawing_device(args, kwargs), shown)
            args, kwargs = args[:position], {**kwargs, "generator": generator}
            if is_out or isinstance(source, EarlierDraws):
                return operator(*args, **kwargs)
            return _draw_in_order(operator, args, kwargs)

    return kernel


def _draw_in_order(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a random operator so that it draws in the order of the elements, for any strides of its arguments.

    Torch draws in the order of the memory. A tensor may have other strides as a tangent, in a batch or in a graph, and
    must get the same numbers for a key there.
    """
    names = [argument.name for argument in operator._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    ordered = {name: x.contiguous() for name, x in given.items() if _is_permuted(x)}
    if not ordered:
        return operator(*args, **kwargs)
    out = operator(**{**given, **ordered})
    for argument in operator._schema.arguments:
        if argument.name in ordered and argument.alias_info is not None and argument.alias_info.is_write:
            given[argument.name].copy_(ordered[argument.name])
            out = given[argument.name] if out is ordered[argument.name] else out
    first = given[names[0]]
    if _is_permuted(first) and isinstance(out, torch.Tensor) and out is not first and out.shape == first.shape:
        return torch.empty_like(first, dtype=out.dtype).copy_(out)  # torch's result has these strides
    return out


def _draw_elements(out: torch.Tensor, source: DrawSource, fill: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """Draw the elements of `out` by `fill`, in the order of :func:`_draw_in_order`, and return `out`.

    For :class:`EarlierDraws` the order is torch's.
    """
    target = out if isinstance(source, EarlierDraws) else out.contiguous()
    fill(target)
    return out if target is out else out.copy_(target)


def _is_permuted(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_contiguous()


def _as_one_that_takes_a_generator(operator: OpOverload, other: OpOverload) -> Callable[..., Any]:
    """Return a kernel for an operator without `generator` that calls the overload with `generator`."""
    shown = str(operator)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            source = _source_for_drawing(args, kwargs)
            if source is None:
                return operator(*args, **kwargs)
            generator = source.generator(_drawing_device(args, kwargs), shown)
            return other(*args, **kwargs, generator=generator)

    return kernel


def _filling(operator: OpOverload) -> Callable[..., Any]:
    """Return a kernel for an operator like ``rand_like`` that fills an empty tensor, as torch's own kernel does.

    The overloads with a generator have no batching rule: torch.vmap would draw different numbers for each row.
    """
    shown = str(operator)
    fill = _FILLS[operator._schema.name.removeprefix("aten::")]

    def kernel(x: torch.Tensor, *bounds: Any, generator: torch.Generator | None = None, **kwargs: Any) -> torch.Tensor:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            source = _source_for_drawing((x,), kwargs)
            if generator is not None or source is None:
                given = {} if generator is None else {"generator": generator}
                return operator(x, *bounds, **given, **kwargs)
            out = torch.empty_like(x, **kwargs)
            generator = source.generator(out.device, shown)
            return _draw_elements(out, source, lambda x: fill(x, *map(int, bounds), generator=generator))

    return kernel


def _native_dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
    """Compute ``native_dropout``, which has no overload with a generator.

    The formula is that of torch's CPU kernel. Torch's GPU kernel draws other numbers; it runs to repeat earlier draws.
    """
    operator = torch.ops.aten.native_dropout.default
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        source = _source_for_drawing((x,), {})
        if source is None or train is False:
            return operator(x, p, train)
        if p == 0:  # torch's kernel draws here too
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        generator = source.generator(x.device, str(operator))
        if isinstance(source, EarlierDraws) and x.is_cuda:
            with _lent_to_default(generator):
                return operator(x, p, train)
        mask = torch.empty_like(x, dtype=torch.bool)
        mask = _draw_elements(mask, source, lambda x: x.bernoulli_(1 - p, generator=generator))
        return (x * mask).mul(0.0 if p == 1 else 1 / (1 - p)), mask


def _cudnn_rnn(*args: Any) -> Any:
    """Compute ``_cudnn_rnn`` with a dropout state that is seeded from this thread's source.

    Torch creates the state of the dropout between layers in the first call of a process, and cuDNN advances it in every
    call.
    """
    operator = torch.ops.aten._cudnn_rnn.default
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        *others, dropout, train, bidirectional, sizes, _ = args
        source = _source_for_drawing(args, {})
        if source is None or isinstance(source, EarlierDraws) or not (dropout and train):
            return operator(*args)
        with outside_modes():  # a mode must see the recurrent operator draw, not those below
            seed = torch.empty((), dtype=torch.int64).random_(generator=source.generator(_CPU, str(operator)))
            state = torch.ops.aten._cudnn_init_dropout_state.default(
                dropout, train, int(seed), dtype=torch.uint8, device=args[0].device
            )
        return operator(*others, dropout, train, bidirectional, sizes, state)


def _with_default_generator_replaced(operator: OpOverload) -> Callable[..., Any]:
    """Return a kernel for fused attention with dropout on a GPU, which takes no `generator`."""
    names = [argument.name for argument in operator._schema.arguments]
    position = names.index("dropout_p")
    default = operator._schema.arguments[position].default_value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            probability = args[position] if len(args) > position else kwargs.get("dropout_p", default)
            source = _source_for_drawing(args, kwargs)
            if not probability or source is None:
                return operator(*args, **kwargs)
            with _lent_to_default(source.generator(_drawing_device(args, kwargs), str(operator))):
                return operator(*args, **kwargs)

    return kernel


@contextlib.contextmanager
def _lent_to_default(generator: torch.Generator) -> Iterator[None]:
    """Exchange the state of a GPU's default generator for that of `generator` inside the block.

    Draws in the block advance `generator`. This is the only place where a default generator is written to.
    """
    theirs = default_generator(generator.device)
    if same_generator(generator, theirs):
        yield
        return
    with _INSTALLING:
        state = theirs.get_state()
        theirs.set_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(theirs.get_state())
            theirs.set_state(state)


def _drawing_device(args: Any, kwargs: dict[str, Any]) -> torch.device:
    """Return the device on which an operator draws, with its index."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device
    device = torch.device(kwargs.get("device") or _CPU)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


class _GeneratorOfThread:
    """A stand-in for a default generator in ``torch.get_rng_state``, ``torch.cuda.manual_seed`` etc.

    On a thread with a source of draws it acts as the generator of that source, so ``torch.utils.checkpoint`` rewinds
    only this thread's draws. On any other thread it acts as the default generator.
    """

    def __init__(self, device: torch.device):
        self._device = device

    def __getattr__(self, name: str) -> Any:
        source = draw_source()
        if source is None:
            return getattr(default_generator(self._device), name)
        if name in ("manual_seed", "seed"):
            source.note_new_seed()
        return getattr(source.state_generator(self._device), name)


class _GeneratorsOfGpus(tuple[torch.Generator, ...]):
    """The default generators of the GPUs. On a thread with a source of draws, stand-ins for them."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if draw_source() is None or not isinstance(found, torch.Generator):
            return found
        return _GeneratorOfThread(found.device)


def _watch_gpus() -> None:
    """Replace ``torch.cuda.default_generators``, which torch indexes, by :class:`_GeneratorsOfGpus`.

    Tried on torch 2.11 and 2.13.
    """
    torch.cuda.default_generators = _GeneratorsOfGpus(torch.cuda.default_generators)
