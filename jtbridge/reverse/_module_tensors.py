"""The arrays of a JAX model as parameters and buffers of a torch module."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jtbridge._compat import forward_pre_hooks, weakly_typed
from jtbridge.core.convert import to_jax, to_torch
from jtbridge.core.definitions import module_of
from jtbridge.core.dtypes import is_differentiable, torch_dtype
from jtbridge.core.static import same_static
from jtbridge.errors import ModelError


class Part(torch.nn.Module):
    """A submodule that holds tensors of a JAX model.

    Attributes:
        has_mode: whether the model behaves differently in training.
    """

    has_mode = False

    def train(self, mode: bool = True) -> Part:
        """Set the mode. If the model has modes, raise an error for a mode other than that of the whole module."""
        if self.has_mode and mode is not self.training:
            raise ModelError(
                f"`{'train' if mode else 'eval'}()` of a part of a JAX model has no effect on the model, whose mode is "
                "that of the whole module. Call it on the module that `to_torch_module` returned, or set the mode of "
                "the part in the JAX model first, such as `model.norm.eval()` of Flax NNX."
            )
        set_mode(self, mode)
        return self


def compute_weights(module: torch.nn.Module) -> None:
    """Compute the weights that `torch.nn.utils` derives from others, such as pruned ones, in the parts of a JAX model.

    Torch does so in a forward pre-hook of a submodule, but a `Part` is never called.
    """
    for part in module.modules():
        if isinstance(part, Part):
            for hook in forward_pre_hooks(vars(part)):
                if module_of(type(hook)).startswith("torch.nn.utils."):
                    hook(part, ())


def set_mode(module: torch.nn.Module, mode: bool) -> None:
    """Set the mode of a module and its submodules, including the parts of a JAX model."""
    module.training = mode
    for child in module.children():
        if isinstance(child, Part):
            set_mode(child, mode)
        else:
            child.train(mode)


# Torch has unsigned integers of more than one byte, but few operators for them: it cannot send them to other processes.
# A tensor has the signed integers of the same bits instead.
_SIGNED = {np.dtype(f"uint{bits}"): np.dtype(f"int{bits}") for bits in (16, 32, 64)}


@dataclasses.dataclass(frozen=True)
class ArrayEntry:
    """One array of a tree: where its tensor is in the module, and how the tensor becomes an array again."""

    path: tuple[str, ...]  # the names of the submodules that lead to the tensor, and the tensor's name
    key: str | None  # the implementation of a random key; None for other arrays
    dtype: np.dtype  # of the array, or of the key's bits
    weak: bool  # whether the array is weakly typed

    @property
    def name(self) -> str:
        return ".".join(self.path)

    def tensor(self, module: torch.nn.Module) -> torch.Tensor | None:
        """Return the entry's current tensor in a module, where it may have been replaced; None if it is missing."""
        found: Any = module
        for name in self.path:
            found = getattr(found, name, None)
        return found

    def array(self, tensor: torch.Tensor) -> jax.Array:
        """Return a copy of the tensor as an array of the kind that the entry was made from."""
        return self.restored(to_jax(tensor.cpu()))

    def restored(self, array: Any) -> Any:
        """Return an array of the tensor's values as the kind of array that the tensor was made from."""
        if self.dtype in _SIGNED:
            array = array.astype(self.dtype)  # the same bits
        if self.key is not None:
            return jax.random.wrap_key_data(array, impl=self.key)
        return weakly_typed(array) if self.weak else array

    def kept(self, array: Any) -> Any:
        """Return the values for the tensor from an array like the one that the tensor was made from."""
        array = array if self.key is None else jax.random.key_data(array)
        return array.astype(_SIGNED.get(array.dtype, array.dtype))


class TensorTree:
    """A JAX tree whose arrays are tensors of a module. Other leaves stay as they are.

    Args:
        module: the module that gets the tensors, under the names of the tree. ``layers[0].weight`` becomes the
            parameter ``weight`` of the module ``layers.0``, so `state_dict` has the key ``layers.0.weight``.
        tree: the tree.
        train: whether float and complex arrays become parameters; otherwise all arrays become buffers.
    """

    def __init__(self, module: torch.nn.Module, tree: Any, *, train: bool):
        paths, self.structure = jax.tree_util.tree_flatten_with_path(tree)
        values = [path for path, _ in paths if path and str(getattr(path[-1], "name", "")) == "value"]
        drop = len(values) == len(paths)  # a state of Flax NNX: the last step, to a variable's value, is not in names
        self.entries: list[ArrayEntry] = []
        self._leaves: list[Any] = []
        for path, leaf in paths:
            is_array = isinstance(leaf, jax.Array | np.ndarray)
            self._leaves.append(None if is_array else leaf)
            if is_array:
                names = [_step_name(step) for step in (path[:-1] if drop else path)] or ["value"]
                self.entries.append(_add_tensor(module, names, leaf, train))
        self._places = [i for i, (_, leaf) in enumerate(paths) if isinstance(leaf, jax.Array | np.ndarray)]

    def __deepcopy__(self, memo: Any) -> TensorTree:
        return self  # nothing writes to it, and static values may be compared by identity

    def rebuild(self, arrays: Any) -> Any:
        """Return the tree with arrays in the places of the entries; those of random keys are given as their bits."""
        leaves = list(self._leaves)
        for place, entry, array in zip(self._places, self.entries, arrays, strict=True):
            leaves[place] = entry.restored(array)
        return self.structure.unflatten(leaves)

    def changed(self, tree: Any, before: Sequence[Any], given: Any, name: str) -> dict[int, Any]:
        """Return the arrays of a tree that a call replaced by others, by their positions among the entries.

        They are returned as values for the tensors.

        Args:
            tree: the tree after the call.
            before: the leaves of the tree before it.
            given: the arrays of the entries before it.
            name: the name of the model.

        Raises:
            ModelError: the tree has another structure, or the tensor of an entry cannot hold its new leaf.
        """
        leaves, structure = jax.tree.flatten(tree)
        if structure != self.structure:
            raise ModelError(
                f"`{name}` returned a state of another structure than it was given: expected\n{self.structure}\n"
                f"but got\n{structure}\nReturn it with the same containers and keys."
            )
        for place in set(range(len(leaves))).difference(self._places):
            if not same_static(leaves[place], self._leaves[place]):
                raise ModelError(
                    f"`{name}` returned {leaves[place]!r} in the state for {self._leaves[place]!r}. Only arrays of a "
                    "state may change: make it an array."
                )
        found = {}
        for i, (place, entry) in enumerate(zip(self._places, self.entries, strict=True)):
            if leaves[place] is not before[place]:
                new = leaves[place] if entry.key is not None else jnp.asarray(leaves[place])
                found[i] = entry.kept(new)
                _check_kept(f"`{name}` returned the state `{entry.name}`", found[i], given[i])
        return found

    def tensors(self, module: torch.nn.Module, name: str) -> list[torch.Tensor]:
        """Return the present tensors of the module, in the order of the tree.

        Raises:
            ModelError: the tensor of an entry was removed from the module of the model `name`.
        """
        tensors = []
        for entry in self.entries:
            tensor = entry.tensor(module)
            if tensor is None:
                raise ModelError(
                    f"`{name}` needs the tensor `{entry.name}`, but it was set to None or removed. Set it to zeros, or "
                    "make a model without it."
                )
            tensors.append(tensor)
        return tensors

    def arrays(self, module: torch.nn.Module, name: str) -> Any:
        """Return the tree with copies of the tensors as arrays."""
        leaves, tensors = list(self._leaves), self.tensors(module, name)
        for place, entry, tensor in zip(self._places, self.entries, tensors, strict=True):
            leaves[place] = entry.array(tensor)
        return self.structure.unflatten(leaves)


def _check_kept(what: str, new: Any, old: Any) -> None:
    types = [torch_dtype(x.dtype, what) for x in (new, old)]
    if new.shape != old.shape or not torch.can_cast(*types):
        raise ModelError(
            f"{what} as {new.dtype}{list(new.shape)}, but it was given as {old.dtype}{list(old.shape)}. Return it with "
            "the same shape and a dtype that the given one can hold."
        )


def _step_name(step: Any) -> str:
    found = next((getattr(step, kind) for kind in ("key", "name", "idx") if hasattr(step, kind)), step)
    return str(found).replace(".", "_") or "_"


def _add_tensor(module: torch.nn.Module, path: list[str], leaf: Any, train: bool) -> ArrayEntry:
    """Add a tensor to the submodule that a path names, and the submodules on the path that are missing."""
    holder, steps = module, []
    for name in path[:-1]:
        children = dict(holder.named_children())
        name = _free(holder, name, children)
        if name not in children:
            holder.add_module(name, Part())
        holder = holder.get_submodule(name)
        steps.append(name)
    name = _free(holder, path[-1], {})
    key, weak = None, getattr(leaf, "weak_type", False)
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        key, leaf = str(jax.random.key_impl(leaf)), jax.random.key_data(leaf)
    values = np.asarray(leaf).view(_SIGNED[leaf.dtype]) if leaf.dtype in _SIGNED else leaf
    tensor = to_torch(values, copy=True).clone()  # in memory of torch, whose alignment lets XLA read it
    if train and is_differentiable(leaf.dtype):
        holder.register_parameter(name, torch.nn.Parameter(tensor))
    else:
        holder.register_buffer(name, tensor)
    return ArrayEntry((*steps, name), key, np.dtype(leaf.dtype), weak)


def _free(holder: torch.nn.Module, name: str, known: Any) -> str:
    """Return a name with underscores appended until it is in `known` or no attribute of the module has it."""
    while hasattr(holder, name) and name not in known:
        name += "_"
    return name
