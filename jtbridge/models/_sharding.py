"""The public functions :func:`jtbridge.shard`, :func:`jtbridge.shardings` and :func:`jtbridge.shard_batch`."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jtbridge.core.dtypes import canonical_dtype
from jtbridge.core.host_memory import to_canonical_numpy
from jtbridge.core.messages import warn_user
from jtbridge.errors import ArgumentError, ShardingError, ShardingWarning

from ._layout import shown
from ._optimizer_states import Shape, name_of, spec_of_state
from ._sharding_presets import Role, largest_axis, role_of, tensor_axis, transposed_layers

Rules = str | Mapping[str, Any]
_PRESETS = ("replicated", "fsdp", "tensor", "tensor+fsdp")
_TENSOR_AXES = ("model", "tensor", "tp")
_FULLY_SHARDED_AXES = ("fsdp", "data")
_OF_OPTIMIZER = "If it is the state of an optimizer, pass its parameters: `jtbridge.shard(..., params=params)`."
_WORTH_TELLING = 1 << 16  # a replicated parameter with at least this many elements causes a warning


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array to place.

    Attributes:
        name: its name.
        shape: its shape.
        is_parameter: whether presets may split it. They replicate buffers.
    """

    name: str
    shape: Shape
    is_parameter: bool = True


def shard(tree: Any, mesh: Mesh, rules: Rules, *, params: Any = None) -> Any:
    """Distribute parameters over the devices of a mesh, by rules on their names.

    Each device gets only its part. ``net.init(mesh=..., rules=...)`` and ``net.load_safetensors(..., mesh=...,
    rules=...)`` do the same while they convert, so that a split parameter is never whole on a device.

    Presets:

    - "replicated": each device has everything, as for data parallelism.
    - "fsdp": the largest axis that the number of devices divides is split over the mesh axis "fsdp" or "data".
    - "tensor": layers of known names (Llama, Mistral, Qwen, Gemma, Phi, GPT-2, OPT, T5, BART, BERT, ViT and others) are
      split over the mesh axis "model", "tensor" or "tp": query, key, value, gate and up projections by outputs, output
      and down projections by inputs, embeddings by the vocabulary, experts one by one.
    - "tensor+fsdp": both, over two mesh axes.

    If the mesh has one axis, a preset uses this axis, under any name. Axes of the mesh are used in JAX's mode
    `AxisType.Auto`: the compiler places the operations. Under ``jit``, such as for gradients, the sharding is a
    constraint for the compiler.

    Args:
        tree: `params`, `state` or ``(params, state)``: dicts by name, of JAX or NumPy arrays or torch tensors. In
            another pytree, such as the state of an optimizer, the name of a leaf consists of the last consecutive dict
            keys on its path, and leaves without a name are replicated.
        mesh: the devices, such as ``jax.make_mesh((2, 4), ("data", "model"))``.
        rules: a preset; or a dict from patterns to a ``PartitionSpec`` or a preset. In a pattern, ``*`` stands for any
            text. The first pattern that matches counts.
        params: if `tree` is the state of an optimizer, its parameters. The rules then apply to their shapes, and an
            array of the state that has another shape than its parameter is split like the axes that both have: the
            history of L-BFGS, the means of rows and columns of Adafactor.

    Raises:
        ShardingError: a pattern matches no name, a name matches no pattern, a spec names an axis that the mesh does not
            have, is longer than the shape, or does not divide it.
        ArgumentError: `mesh` is not a mesh, or a rule is neither a known preset nor a ``PartitionSpec``.

    Warns:
        ShardingWarning: a preset leaves a large matrix whole on each device, because its name is not known or no axis
            can be divided.

    Example:
        >>> import jax, jtbridge, torch
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> params, state = jtbridge.module(torch.nn.Linear(4, 8)).init()
        >>> params = jtbridge.shard(params, mesh, {"weight": P("model", None), "*": P()})
        >>> params["weight"].sharding.spec
        P('model', None)
    """
    return jax.tree.map(with_sharding, tree, shardings(tree, mesh, rules, params=params))


def shardings(tree: Any, mesh: Mesh, rules: Rules, *, params: Any = None) -> Any:
    """Return the sharding of each array as :func:`jtbridge.shard` chooses it, without placing anything.

    They are for ``in_shardings`` and ``out_shardings`` of ``jax.jit``, and for restoring a checkpoint.

    Args:
        tree, mesh, rules, params: as for :func:`jtbridge.shard`; leaves may be ``jax.ShapeDtypeStruct`` too.

    Example:
        >>> import jax, jtbridge
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> shape = jax.ShapeDtypeStruct((4, 8), "float32")
        >>> jtbridge.shardings({"weight": shape}, mesh, "fsdp")["weight"].spec
        P(None, 'data')
    """
    of_params = {name_of(path): tuple(np.shape(value)) for path, value in jax.tree_util.tree_leaves_with_path(params)}
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves, shapes = [], []
    for path, value in paths:
        name, shape = name_of(path), tuple(np.shape(value))
        leaves.append(Leaf(name, of_params.get(name, shape), bool(name) and _has_inexact_dtype(value)))
        shapes.append(shape)
    found = [
        NamedSharding(sharding.mesh, spec_of_state(sharding.spec, leaf.shape, shape))
        for sharding, leaf, shape in zip(shardings_of(leaves, mesh, rules), leaves, shapes, strict=True)
    ]
    return structure.unflatten(found)


def shard_batch(batch: Any, mesh: Mesh, *, axis: str | Sequence[str] | None = None, local: bool = False) -> Any:
    """Distribute the first axis of each array of a batch over the data axes of a mesh.

    Args:
        batch: a pytree of JAX or NumPy arrays or torch tensors. Numbers and arrays without axes are replicated.
        mesh: the devices.
        axis: the mesh axes; by default all but "model", "tensor" and "tp". The batch is replicated over other axes.
        local: with False, each process has the whole batch, and its devices take their rows. With True, each process
            has only its own rows, and the batch is made of the rows of all processes.

    Raises:
        ShardingError: the number of devices along the axes does not divide the number of rows.

    Example:
        >>> import jax, jtbridge, numpy as np
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> jtbridge.shard_batch(np.zeros((8, 3), np.float32), mesh).sharding.spec
        P('data',)
    """
    mesh = _with_auto_axes(mesh)
    if axis is None:
        axes = tuple(name for name in mesh.axis_names if name not in _TENSOR_AXES)
    else:
        axes = (axis,) if isinstance(axis, str) else tuple(axis)
    _check_axes(f"`axis={axis!r}`", axes, mesh)
    entry = axes[0] if len(axes) == 1 else axes
    size = math.prod(mesh.shape[name] for name in axes)

    def put(path: Any, value: Any) -> jax.Array:
        shape = tuple(np.shape(value))
        if not shape or not axes:
            return with_sharding(value, NamedSharding(mesh, PartitionSpec()))
        sharding = NamedSharding(mesh, PartitionSpec(entry))
        rows = shape[0] * jax.process_count() if local else shape[0]
        if rows % size:
            raise ShardingError(
                f"`batch{jax.tree_util.keystr(path)}` has {rows} rows, which {size} devices along {_quoted(axes)} "
                "cannot share equally. Pad the batch, or leave rows out."
            )
        if local:
            return jax.make_array_from_process_local_data(sharding, _as_numpy(value))
        return with_sharding(value, sharding)

    return jax.tree_util.tree_map_with_path(put, batch)


def shardings_of(leaves: Sequence[Leaf], mesh: Mesh, rules: Rules) -> list[NamedSharding]:
    """Return the sharding of each leaf: see :func:`jtbridge.shard`."""
    mesh = _with_auto_axes(mesh)
    patterns = _checked_rules(rules)
    matched: set[str] = set()
    unmatched: list[str] = []
    whole: list[str] = []  # large arrays that a preset did not split
    of_tensor: list[str] = []  # matrices that the preset "tensor" is for
    transposed = transposed_layers({leaf.name: leaf.shape for leaf in leaves})
    found = []
    for leaf in leaves:
        pattern = next((pattern for pattern in patterns if _matches(pattern, leaf.name)), None)
        spec = PartitionSpec()
        if pattern is None:
            if leaf.is_parameter:
                unmatched.append(leaf.name)
        elif isinstance(rule := patterns[pattern], str):
            matched.add(pattern)
            if leaf.is_parameter:
                spec = _preset(leaf, mesh, rule, transposed)
                if "tensor" in rule and len(leaf.shape) > 1:
                    of_tensor.append(leaf.name)
                if rule != "replicated" and _is_notably_whole(leaf, spec):
                    whole.append(f"`{leaf.name}` {leaf.shape}")
        else:
            matched.add(pattern)
            if leaf.name:
                spec = PartitionSpec() if rule is None else rule
                _check_spec(leaf, spec, mesh)
        found.append(NamedSharding(mesh, spec))
    _check_matches(patterns, matched, unmatched, leaves)
    if of_tensor and all(role_of(name) is None for name in of_tensor):
        raise ShardingError(
            f'The preset "tensor" knows none of the names {shown(of_tensor)}. Give a rule for each layer, such as '
            '`{"*.first.weight": PartitionSpec("model", None), ..., "*": PartitionSpec()}`, or use the preset "fsdp".'
        )
    if whole:
        warn_user(
            f"The preset leaves these parameters whole on each device: {shown(whole)}. The mesh does not divide their "
            'axes, or the preset "tensor" does not know their names. Give rules for them, such as '
            '`{"NAME": PartitionSpec(None, "model"), "*": "tensor"}`, or `{"NAME": PartitionSpec(), ...}` without this '
            "warning.",
            ShardingWarning,
        )
    return found


def with_sharding(value: Any, sharding: NamedSharding) -> jax.Array:
    """Return a JAX array with a sharding; only the part of each device is converted and copied to it."""
    if isinstance(value, Tracer):
        return jax.lax.with_sharding_constraint(value, sharding)
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        # JAX cannot put typed keys on devices of other processes, but their numbers.
        numbers = with_sharding(jax.random.key_data(value), sharding)
        return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(value))
    if isinstance(value, jax.Array) and (jax.process_count() == 1 or not value.is_fully_addressable):
        return jax.device_put(value, sharding)
    whole = value if isinstance(value, torch.Tensor) else np.asarray(value)
    return jax.make_array_from_callback(tuple(whole.shape), sharding, lambda index: _as_numpy(whole[index]))


def _checked_rules(rules: Rules) -> Mapping[str, Any]:
    patterns = {"*": rules} if isinstance(rules, str) else rules
    if not isinstance(patterns, Mapping):
        raise ArgumentError(f"`rules` must be a preset or a dict from patterns to rules, but it is {rules!r}.")
    for pattern, rule in patterns.items():
        if isinstance(rule, str) and rule not in _PRESETS:
            raise ArgumentError(f"`rules` has no preset {rule!r}. Known: {_quoted(_PRESETS)}.")
        if not isinstance(rule, str | PartitionSpec | None):
            raise ArgumentError(
                f"The rule for `{pattern}` is {rule!r}. It must be a `jax.sharding.PartitionSpec` or a preset: "
                f"{_quoted(_PRESETS)}."
            )
    return patterns


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name, re.DOTALL) is not None


def _check_matches(
    patterns: Mapping[str, Any], matched: set[str], unmatched: list[str], leaves: Sequence[Leaf]
) -> None:
    names = [leaf.name for leaf in leaves if leaf.name]
    unused = [pattern for pattern in patterns if pattern not in matched and pattern != "*"]
    if unused:
        raise ShardingError(
            f"No parameter has a name like {_quoted(unused)}, or an earlier pattern matches it. There are: "
            f"{shown(names)}. In a pattern, `*` stands for any text."
        )
    if unmatched:
        raise ShardingError(
            f"No rule is for {shown([f'`{name}`' for name in unmatched])}. End the rules with one for all others, such "
            'as `"*": PartitionSpec()`, which leaves them whole on each device, or `"*": "fsdp"`.'
        )


def _check_spec(leaf: Leaf, spec: PartitionSpec, mesh: Mesh) -> None:
    if len(spec) > len(leaf.shape):
        raise ShardingError(
            f"The rule {spec} for `{leaf.name}` has {len(spec)} entries, and the shape is {leaf.shape}. Give at "
            f"most one entry for each axis. {_OF_OPTIMIZER}"
        )
    for axis, entry in enumerate(spec):
        names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        _check_axes(f"The rule {spec} for `{leaf.name}`", names, mesh)
        size = math.prod(mesh.shape[name] for name in names)
        if leaf.shape[axis] % size:
            raise ShardingError(
                f"The rule {spec} for `{leaf.name}` splits axis {axis} into {size} parts, which do not divide its "
                f"{leaf.shape[axis]} elements: the shape is {leaf.shape}. Split another axis, or use "
                f"`PartitionSpec()`. {_OF_OPTIMIZER}"
            )


def _check_axes(what: str, names: Iterable[Any], mesh: Mesh) -> None:
    for name in names:
        if name not in mesh.shape:
            raise ShardingError(
                f"{what} names the axis {name!r}, and the mesh has {_quoted(mesh.axis_names)}. Use one of these, or "
                f"name the axes by `jax.make_mesh(sizes, names)`."
            )


def _preset(leaf: Leaf, mesh: Mesh, preset: str, transposed: bool) -> PartitionSpec:
    entries: list[str | None] = [None] * len(leaf.shape)
    if "tensor" in preset:
        name = _axis_for(mesh, _TENSOR_AXES, preset)
        axis = tensor_axis(leaf.name, leaf.shape, mesh.shape[name], transposed=transposed)
        if axis is not None:
            entries[axis] = name
    if "fsdp" in preset:
        name = _axis_for(mesh, _FULLY_SHARDED_AXES, preset)
        axis = largest_axis(leaf.shape, mesh.shape[name], [i for i, entry in enumerate(entries) if entry is None])
        if axis is not None:
            entries[axis] = name
    return PartitionSpec(*entries) if any(entries) else PartitionSpec()


def _axis_for(mesh: Mesh, names: Sequence[str], preset: str) -> str:
    found = next((name for name in names if name in mesh.shape), None)
    if found is None and len(mesh.axis_names) == 1 and preset != "tensor+fsdp":
        found = mesh.axis_names[0]
    if found is None:
        raise ShardingError(
            f"The preset {preset!r} needs a mesh axis with one of the names {_quoted(names)}, and the mesh has "
            f"{_quoted(mesh.axis_names)}. Rename the axis, or give `PartitionSpec`s."
        )
    return found


def _is_notably_whole(leaf: Leaf, spec: PartitionSpec) -> bool:
    return (
        len(leaf.shape) > 1
        and not any(spec)
        and math.prod(leaf.shape) >= _WORTH_TELLING
        and role_of(leaf.name) is not Role.REPLICATED
    )


def _with_auto_axes(mesh: Mesh) -> Mesh:
    """Return the mesh with all axes in the mode in which the compiler places operations.

    In JAX's explicit mode the types of arrays hold shardings, which torch's operators do not have.
    """
    if not isinstance(mesh, Mesh):
        raise ArgumentError(
            f"`mesh` must be a `jax.sharding.Mesh`, such as `jax.make_mesh((8,), ('data',))`, but it is a "
            f"{type(mesh).__name__}."
        )
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _as_numpy(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        return to_canonical_numpy(value)
    array = np.asarray(value)
    return np.array(array, canonical_dtype(array.dtype))


def _has_inexact_dtype(value: Any) -> bool:
    dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    if isinstance(dtype, torch.dtype):
        return dtype.is_floating_point or dtype.is_complex
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _quoted(names: Iterable[Any]) -> str:
    return ", ".join(f'"{name}"' for name in names)
