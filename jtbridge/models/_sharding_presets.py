"""The presets of :func:`jtbridge.shard`: which axis of a parameter is split, by its name and shape.

Tensor parallelism follows Megatron-LM (https://arxiv.org/abs/1909.08053). Of two consecutive matrices, the first is
split by its outputs (a column) and the second by its inputs (a row), so that only the result of the second is summed
over the devices. Embeddings and output layers are split by the vocabulary. Fully sharded parameters follow ZeRO, stage
3 (https://arxiv.org/abs/1910.02054): XLA gathers a parameter where it is used.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

from ._optimizer_states import Shape


class Role(enum.Enum):
    """How tensor parallelism splits a layer."""

    COLUMN = "column"  # split by outputs
    ROW = "row"  # split by inputs
    EXPERTS = "experts"  # split by experts, the first axis
    REPLICATED = "replicated"


# Layers by the last parts of their names, in the models of transformers and others. Longer names count first.
_LAYERS = {
    Role.COLUMN: """
        q_proj k_proj v_proj qkv_proj gate_proj up_proj gate_up_proj fc1 w1 w3 query key value query_key_value
        q k v wi wi_0 wi_1 c_attn q_attn c_fc intermediate.dense dense_h_to_4h transform.dense pooler.dense
        patch_embeddings.projection
        embed_tokens wte shared word_embeddings embed_in tok_embeddings
        lm_head embed_out predictions predictions.decoder
    """,
    Role.ROW: "o_proj down_proj out_proj fc2 w2 o wo c_proj self_attn.dense output.dense attention.dense dense_4h_to_h",
    Role.REPLICATED: """
        wpe embed_positions position_embeddings token_type_embeddings relative_attention_bias cls_token gate router
        classifier score
    """,
}
_ROLES = {tuple(name.split(".")): role for role, names in _LAYERS.items() for name in names.split()}
_OF_CONV1D = ("c_attn", "q_attn", "c_fc", "c_proj")  # names of `transformers.Conv1D`, whose weight is (inputs, outputs)
_WEIGHT_AND_BIAS = ("weight", "bias")


def role_of(name: str) -> Role | None:
    """Return the role of the layer that a parameter belongs to, by its name; None if the name is not known."""
    layer, _ = _split_adapter(name)
    parts = tuple(part for part in layer.split(".") if part != "base_layer")  # of the layer inside an adapter
    if parts[-1] in _WEIGHT_AND_BIAS:
        parts = parts[:-1]
    if len(parts) > 1 and parts[-2] == "experts":
        return Role.EXPERTS
    for count in (2, 1):
        if len(parts) >= count and parts[-count:] in _ROLES:
            return _ROLES[parts[-count:]]
    return Role.REPLICATED if parts and ("norm" in parts[-1].lower() or parts[-1].startswith("ln_")) else None


def transposed_layers(shapes: Mapping[str, Shape]) -> bool:
    """Return whether layers with GPT-2's names hold weights as (inputs, outputs). If no bias tells, return True."""
    for name, shape in shapes.items():
        layer, _, kind = name.rpartition(".")
        bias = shapes.get(f"{layer}.bias")
        if kind == "weight" and _is_conv1d(name) and len(shape) == 2 and shape[0] != shape[1] and bias:
            return bias[0] == shape[1]
    return True


def tensor_axis(name: str, shape: Shape, size: int, *, transposed: bool) -> int | None:
    """Return the axis of a parameter that tensor parallelism splits into `size` parts; None if none is split.

    If `size` does not divide the axis of the parameter's role, another axis of a matrix is split.
    """
    _, adapter = _split_adapter(name)
    role = role_of(name)
    if role is None or role is Role.REPLICATED or not shape:
        return None
    if role is Role.EXPERTS:
        wanted = 0
    elif len(shape) == 1:
        return 0 if role is Role.COLUMN and shape[0] % size == 0 else None
    elif adapter is not None:  # the first of its two matrices has the layer's inputs, the second has the outputs
        wanted = {("lora_A", Role.ROW): 1, ("lora_B", Role.COLUMN): 0}.get((adapter, role))
        return wanted if wanted is not None and shape[wanted] % size == 0 else None
    else:
        wanted = 0 if role is Role.COLUMN else 1
        if transposed and len(shape) == 2 and _is_conv1d(name):
            wanted = 1 - wanted
    axes = (wanted, *(axis for axis in range(len(shape)) if axis != wanted))
    return next((axis for axis in axes if shape[axis] % size == 0 and shape[axis] > 0), None)


def largest_axis(shape: Shape, size: int, free: Iterable[int]) -> int | None:
    """Return the largest of the axes `free` that `size` divides, the first of equal ones; None if there is none."""
    divided = [axis for axis in free if shape[axis] and shape[axis] % size == 0]
    return max(divided, key=lambda axis: (shape[axis], -axis), default=None)


def _is_conv1d(name: str) -> bool:
    return any(part in _OF_CONV1D for part in name.split("."))


def _split_adapter(name: str) -> tuple[str, str | None]:
    """Split the name of a LoRA matrix into its layer and "lora_A" or "lora_B"; for others, return name and None."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part in ("lora_A", "lora_B"):
            return ".".join(parts[:place]), part
    return name, None
