"""The public function :func:`jtbridge.generate`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jtbridge.calls._config import backend_or, islands_or, verify_or
from jtbridge.core.messages import kind_of
from jtbridge.core.random_numbers import check_key
from jtbridge.core.torch_state import TorchState
from jtbridge.errors import ArgumentError, ModelError
from jtbridge.models._module import JaxModule

from ._beams import search
from ._decoder import Decoder, own_generation, plain_model, takes
from ._prompt import check_positions, check_tokens, in_bucket, integers, mask_of
from ._sample import sample
from ._settings import OF_THE_MODEL, GenerationSettings, settings_of
from ._stream import Stream, emit, emit_to


def generate(
    net: JaxModule,
    params: Any,
    state: Any,
    inputs: Any,
    /,
    *,
    max_new_tokens: int,
    attention_mask: Any = None,
    rng: Any = None,
    temperature: Any = None,
    top_k: int | None = None,
    top_p: Any = None,
    min_p: Any = None,
    repetition_penalty: Any = None,
    no_repeat_ngram_size: int | None = None,
    num_beams: int | None = None,
    length_penalty: Any = None,
    early_stopping: bool | str | None = None,
    min_new_tokens: int | None = None,
    eos_token_id: Any = None,
    pad_token_id: int | None = None,
    stream: Callable[[np.ndarray], Any] | None = None,
    **model_inputs: Any,
) -> jax.Array:
    """Generate tokens with a language model of transformers.

    The prompt is read at once. Then one compiled loop generates all tokens, with a cache of a fixed size. Prompts of
    different lengths share a program: they are padded to the next power of two. Without a key, the tokens are those of
    ``model.generate`` of transformers with the same settings.

    Settings that are not given are those of ``model.generation_config``, except that tokens are sampled exactly if
    `rng` is given.

    Args:
        net: a causal or an encoder-decoder language model, as :func:`jtbridge.module` made it.
        params, state: its tensors, see :meth:`JaxModule.init`.
        inputs: the prompts, integers of shape ``(batch, length)``, padded on the left; or the input of the encoder.
        max_new_tokens: the largest number of tokens to generate.
        attention_mask: 1 for tokens of the prompt that count, 0 for others, in the shape of the prompt. By default, all
            tokens count except the padding token, which counts if it also ends sequences.
        rng: a JAX key to sample with. By default, the most probable token is taken.
        temperature: the divisor of the scores before sampling.
        top_k: sample from this many of the most probable tokens; from all tokens if it is 0, or is None here and in the
            configuration.
        top_p: sample from the most probable tokens, up to this probability.
        min_p: sample from tokens that are at least this probable, relative to the most probable one.
        repetition_penalty: above 1, tokens that the sequence already has become less probable.
        no_repeat_ngram_size: the length of n-grams that no sequence, including its prompt, has twice; 0 for no limit.
        num_beams: the number of sequences that beam search keeps.
        length_penalty, early_stopping: settings of beam search, as in transformers.
        min_new_tokens: no sequence ends before this many tokens.
        eos_token_id: the token that ends a sequence, or several.
        pad_token_id: the token that fills a sequence after its end.
        stream: a function that gets the tokens of each step, when they are generated, as a NumPy array of shape
            ``(batch,)``. If it returns True, the generation ends. Its exceptions are raised here.
        model_inputs: further arguments of the model, such as ``pixel_values``.

    Returns:
        Prompt and generated tokens, of shape ``(batch, length + max_new_tokens)``, with `pad_token_id` after the end
        of a sequence. For an encoder-decoder model, the start token replaces the prompt.

    Raises:
        ArgumentError: an argument is out of range or does not fit.
        ModelError: the model is not a language model of transformers, or its cache or its ``generation_config`` has
            something that is not supported.

    Example:
        >>> import jtbridge, numpy as np, transformers
        >>> sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        >>> config = transformers.LlamaConfig(**sizes, num_attention_heads=2)
        >>> net = jtbridge.module(transformers.LlamaForCausalLM(config))
        >>> params, state = net.init()
        >>> jtbridge.generate(net, params, state, np.array([[3, 5]]), max_new_tokens=4).shape
        (1, 6)
    """
    model = _language_model(net)
    _check_inputs(model, model_inputs)
    has_encoder = bool(model.config.is_encoder_decoder)
    inputs = integers(inputs) if model.main_input_name == "input_ids" else jnp.asarray(inputs)
    length = 1 if has_encoder else inputs.shape[1]
    given = {
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": min_new_tokens,
        "num_beams": num_beams,
        "early_stopping": early_stopping,
        "length_penalty": length_penalty,
        "repetition_penalty": repetition_penalty,
        "no_repeat_ngram_size": no_repeat_ngram_size,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
    }
    if rng is not None:
        check_key(rng)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    settings, controls = settings_of(
        model.generation_config, given, length=length, sampled=rng is not None, vocabulary=vocabulary
    )
    if stream is not None and not callable(stream):
        raise ArgumentError(f"`stream` must be a function of the tokens of a step, but it is {kind_of(stream)}.")
    if stream is not None and settings.num_beams > 1:
        raise ArgumentError("Beam search knows its tokens only at the end, so it takes no `stream`.")
    mask = mask_of(model, inputs, attention_mask, pad_token_id, settings)
    check_positions(model, inputs, settings)
    check_tokens(model, inputs, mask, settings)
    padded, mask = (inputs, mask) if model_inputs else in_bucket(model, inputs, mask)
    program = _Program(settings, model.main_input_name, _start_token(model) if has_encoder else None)
    arrays = _Arrays(params, state, padded, mask, rng, controls, model_inputs)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arrays)):
        tokens = program.run(net, arrays, None if stream is None else functools.partial(emit_to, stream))
    else:
        tokens = _compiled(net, program, arrays, stream)
    start = inputs if program.start is None else jnp.full((inputs.shape[0], 1), program.start, tokens.dtype)
    return jnp.concatenate([start, tokens], 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Arrays:
    """The arguments of a compiled program.

    Attributes:
        params, state: the tensors of the model.
        inputs: the prompt, or the input of the encoder.
        mask: which tokens of the prompt count, if the model takes a mask.
        rng: a key, if tokens are sampled.
        controls: temperature, penalties and probabilities, and the length of the prompt if n-grams are limited.
        further: further arguments of the model.
    """

    params: Any
    state: Any
    inputs: jax.Array
    mask: jax.Array | None
    rng: Any
    controls: dict[str, Any]
    further: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Program:
    """The static facts that a program is compiled for, in addition to the shapes of its arguments.

    Attributes:
        settings: the settings of the generation.
        main_input: the name of the model's first argument.
        start: the first token of the decoder, if there is an encoder.
    """

    settings: GenerationSettings
    main_input: str
    start: int | None

    def run(self, net: JaxModule, arrays: _Arrays, emit: Callable[[jax.Array], jax.Array] | None) -> jax.Array:
        """Return the generated tokens, of shape ``(batch, max_new_tokens)``.

        Args:
            net: the model.
            arrays: the arguments of the program.
            emit: passes the tokens of a step to the user's function, and returns whether to stop.
        """
        inputs, mask = arrays.inputs, arrays.mask
        ids, encoder = inputs, {}
        if self.start is not None:
            encoder = {self.main_input: inputs} | ({} if mask is None else {"attention_mask": mask})
            ids = jnp.full((inputs.shape[0], 1), self.start, jnp.int32)
        if mask is None or self.start is not None:
            mask = jnp.ones(ids.shape, jnp.int32)
        decoder = Decoder(net, arrays.params, arrays.state, ids.shape[1] + self.settings.max_new_tokens)
        start = decoder.read(ids, mask, encoder, arrays.further)
        if self.settings.num_beams > 1:
            return search(decoder, start, self.settings, arrays.controls)
        return sample(decoder, start, self.settings, arrays.controls, arrays.rng, emit)


def _compiled(net: JaxModule, program: _Program, arrays: _Arrays, stream: Any) -> jax.Array:
    """Run a program. It is compiled in its first run, and again when the Python state of the model has changed."""
    programs = net._programs
    streams = stream is not None
    options = backend_or("auto"), islands_or("auto"), verify_or(False)
    key = (program, streams, *options, TorchState.current())
    compiled = programs.get(key)
    if compiled is None:

        def run(number: Any, arrays: _Arrays) -> jax.Array:
            return program.run(net, arrays, functools.partial(emit, number) if streams else None)

        compiled = jax.jit(run)
    if stream is None:
        tokens = compiled(0, arrays)
        programs.keep(key, compiled, net.module)
        return tokens
    with Stream(stream) as opened:
        tokens = jax.block_until_ready(compiled(opened.number, arrays))
        jax.effects_barrier()
    programs.keep(key, compiled, net.module)
    if opened.error is not None:
        raise opened.error
    return tokens


def _check_inputs(model: Any, given: dict[str, Any]) -> None:
    """Raise an error for further arguments that the model does not take, or that `generate` makes itself."""
    taking = [model, model.get_encoder()] if model.config.is_encoder_decoder else [model]
    for name in given:
        is_setting = hasattr(model.generation_config, name)
        if name in _MADE_HERE or is_setting or not any(takes(part, name) for part in taking):
            if name in OF_THE_MODEL:
                way = f"Set `model.generation_config.{name}` instead."
            else:
                way = _INSTEAD.get(name, "Write the loop with `jtbridge.module`.")
            raise ArgumentError(f"`jtbridge.generate` takes no argument `{name}`. {way}")


_INSTEAD = {
    "generation_config": "Set `model.generation_config` instead: settings that are not arguments are read from it.",
    "stopping_criteria": "A function of the tokens of each step ends the generation if it returns True: `stream=`.",
    "do_sample": "Tokens are sampled if there is a key: `rng=jax.random.key(0)`.",
    "max_length": "Pass `max_new_tokens`, which does not count the prompt.",
    "streamer": "Pass a function of the tokens of each step: `stream=`.",
    "num_return_sequences": "To sample several sequences for one prompt, repeat the prompt: `ids.repeat(n, 0)`.",
}
_MADE_HERE = {
    "cache",
    "cache_params",
    "decoder_attention_mask",
    "decoder_input_ids",
    "encoder_outputs",
    "inputs_embeds",
    "labels",
    "logits_to_keep",
    "mm_token_type_ids",
    "past_key_values",
    "position_ids",
    "token_type_ids",
    "use_cache",
}


def _language_model(net: Any) -> Any:
    """Return the torch model of transformers in a module.

    Raises:
        ArgumentError: `net` is not a :class:`JaxModule`.
        ModelError: `generate` does not support the model.
    """
    if not isinstance(net, JaxModule):
        raise ArgumentError(
            f"`jtbridge.generate` takes the result of `jtbridge.module(model)`, but got a {type(net).__name__}."
        )
    model = plain_model(net.module)
    if not (hasattr(model, "prepare_inputs_for_generation") and hasattr(model, "generation_config")):
        raise ModelError(
            f"`{net.__name__}` is not a model of transformers that can generate, such as `LlamaForCausalLM`: it has no "
            "`generation_config`."
        )
    adapters: Any = net.module
    if model is not adapters and adapters.active_peft_config.is_prompt_learning:
        raise ModelError("`jtbridge.generate` takes adapters such as LoRA, but not learned prompts.")
    _refuse_changing_positions(model)
    if model.config.model_type == "falcon" and model.config.alibi:
        raise ModelError(
            f"`{type(model).__name__}` with `alibi` computes its positions from a mask that a cache of a fixed size, "
            "which `jtbridge.generate` needs, does not have. Write the loop with `jtbridge.module`."
        )
    own = own_generation(model)
    if own is not None:
        raise ModelError(
            f"`{type(model).__name__}` overrides `{own}` of transformers, which `jtbridge.generate` does not support. "
            "Write the loop with `jtbridge.module`."
        )
    return model


def _refuse_changing_positions(model: Any) -> None:
    """Raise an error for rotary positions whose frequencies a model changes when a sequence becomes long."""
    for path, part in model.named_modules():
        kinds = getattr(part, "rope_type", None)  # one type, or a dict with one for each kind of layer
        for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                raise ModelError(
                    f"`{path}` changes the frequencies of its rotary positions with the length of a sequence "
                    f"(`rope_type` is {kind!r}), which the compiled loop of `jtbridge.generate` does not do. If your "
                    "sequences stay within the length that the model was first trained for, its frequencies do not "
                    f'change: set `model.get_submodule("{path}").rope_type = "default"`. Otherwise write the loop '
                    "with eager calls of `jtbridge.module`."
                )


def _start_token(model: Any) -> int:
    """Return the first token of the decoder."""
    config = model.generation_config
    for start in (config.decoder_start_token_id, config.bos_token_id):
        if isinstance(start, int):
            return start
    raise ModelError("Set `model.generation_config.decoder_start_token_id`: the token that the decoder starts with.")
