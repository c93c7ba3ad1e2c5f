"""A Llama over eight devices, then over two processes with four each: `python examples/shard_llama.py`.

The devices are parts of this machine's CPU, so the script runs anywhere; on GPUs the same lines apply. The model
learns the bytes of Python's own documentation. Each layout of the parameters gives the same losses.
"""

import argparse
import pydoc_data.topics
import re
import socket
import subprocess
import sys
from collections import Counter

import jax
import numpy as np
import optax
import torch
import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import jtbridge

LAYOUTS = {
    "data parallel": ((8,), ("data",), "replicated"),
    "fully sharded": ((8,), ("data",), "fsdp"),
    "tensor parallel": ((8,), ("model",), "tensor"),
    "both": ((2, 4), ("data", "model"), "tensor+fsdp"),
}
TEXT = np.frombuffer("".join(pydoc_data.topics.topics.values()).encode(), np.uint8).astype(np.int32)


def make_llama(width: int, layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "vocab_size": 256}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=64))


def train(layout: str, options: argparse.Namespace) -> None:
    """Train for some steps, and print what a device holds, what the devices exchange, and the losses."""
    sizes, names, rules = LAYOUTS[layout]
    optimizer = optax.adamw(3e-3)

    # Only this concerns devices: a mesh, rules for the parameters and the optimizer, and the placement of a batch.
    mesh = jax.make_mesh(sizes, names)
    net = jtbridge.module(make_llama(options.width, options.layers))
    params, state = net.init(release=True, mesh=mesh, rules=rules)
    opt_state = jtbridge.shard(optimizer.init(params), mesh, rules)

    @jax.jit
    def step(params, opt_state, ids):
        def loss(params):
            out, _ = net(params, state, input_ids=ids, labels=ids, use_cache=False)
            return out.loss

        value, gradients = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    starts = np.random.default_rng(0).integers(len(TEXT) - 64, size=(options.steps, 16))
    batches = [jtbridge.shard_batch(TEXT[rows[:, None] + np.arange(64)], mesh) for rows in starts]
    compiled = step.lower(params, opt_state, batches[0]).compile()
    losses = []
    for ids in tqdm.tqdm(batches, layout, disable=not sys.stderr.isatty()):
        params, opt_state, loss = compiled(params, opt_state, ids)
        losses.append(f"{float(loss):.4f}")

    held = sum(part.data.nbytes for x in params.values() for part in x.addressable_shards[:1])
    share = held / sum(x.nbytes for x in params.values())
    exchanges = Counter(re.findall(r" (all-gather|all-reduce|all-to-all|reduce-scatter)\(", compiled.as_text()))
    exchanged = ", ".join(f"{count} {name}" for name, count in sorted(exchanges.items()))
    if jax.process_index() == 0:
        print(f"{layout:16} a device holds {share:.3f} of the parameters; {exchanged}")
        print(f"{'':16} losses {losses[0]} ... {losses[-1]}", flush=True)


def run_processes(arguments: list[str]) -> None:
    """Run this script as two processes, each with four devices; the first one prints."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, __file__, *arguments, "--coordinator", address, "--process"]
    processes = [subprocess.Popen([*command, str(number)]) for number in range(2)]
    try:
        if any(process.wait() for process in processes):
            raise SystemExit("a process failed")
    finally:
        for process in processes:
            process.kill()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Train a small Llama over eight devices and over two processes.")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS, metavar="NAME")
    parser.add_argument("--coordinator", help="the address at which processes meet")
    parser.add_argument("--process", type=int, help="the number of this process; by default this one starts two others")
    options = parser.parse_args(arguments)
    if options.process is None:
        jax.config.update("jax_num_cpu_devices", 8)
        print("One process with eight devices", flush=True)
        for layout in options.layouts:
            train(layout, options)
        print("Two processes with four devices each", flush=True)
        run_processes(arguments)
    else:
        jax.config.update("jax_num_cpu_devices", 4)
        jax.distributed.initialize(options.coordinator, num_processes=2, process_id=options.process)
        for layout in options.layouts:
            train(layout, options)


if __name__ == "__main__":
    main(sys.argv[1:])
