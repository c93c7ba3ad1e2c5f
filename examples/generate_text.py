"""Text generation in JAX with a transformers model: `make demo`, or `python examples/generate_text.py`.

SmolLM2 answers a few questions. The tokens and the time are compared with `model.generate`.
"""

import argparse
import time
from collections.abc import Callable

import jax
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from smollm2 import load

import jtbridge

QUESTIONS = ["What is the capital of France?", "Why is the sky blue?", "Write one sentence about the sea."]
ROUNDS = 2


def seconds(run: Callable[[], object]) -> float:
    """Return the shortest time of several runs, after a first run that compiles."""
    run()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=48, help="the most tokens of an answer")
    new = parser.parse_args().tokens
    console = Console() if Console().is_terminal else Console(width=120)
    model, tokenizer = load()
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="np"
    )
    ids, mask = prompts["input_ids"], prompts["attention_mask"]

    # Two lines are enough. The loop over the tokens is one compiled program.
    net = jtbridge.module(model)
    params, state = net.init()

    def answer(**options):
        return jtbridge.generate(net, params, state, ids, attention_mask=mask, max_new_tokens=new, **options)

    answers = np.asarray(answer())
    for question, tokens in zip(QUESTIONS, answers[:, ids.shape[1] :], strict=True):
        console.print(f"[bold]{question}[/bold]\n  {tokenizer.decode(tokens, skip_special_tokens=True)}")

    # This answer is sampled, and shown token by token.
    console.print("\n[bold]Another answer to the last question[/bold]\n  ", end="")
    show = lambda tokens: console.print(tokenizer.decode(tokens[-1:], skip_special_tokens=True), end="")  # noqa: E731
    answer(rng=jax.random.key(0), temperature=0.7, top_p=0.9, stream=show)
    console.print()

    given = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
    settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    runs = {
        "torch": lambda: model.generate(**given, **settings),
        "torch, static cache": lambda: model.generate(**given, **settings, cache_implementation="static"),
        "jtbridge": lambda: np.asarray(answer(min_new_tokens=new)),
    }
    console.print("\nNow the same by torch, and how long each takes: about two minutes")
    equal = (runs["torch"]().numpy() == runs["jtbridge"]()).mean()
    table = Table("", "tokens per second", title=f"SmolLM2, {len(ids)} prompts, {new} tokens", title_justify="left")
    for name, run in runs.items():
        table.add_row(name, f"{len(ids) * new / seconds(run):.1f}")
    console.print(table, f"Tokens that are the same in torch and in JAX: {equal:.1%}")


if __name__ == "__main__":
    main()
