"""A torch layer inside a flax model, trained by optax: `python examples/torch_layer_in_flax.py`.

The layer is an LSTM of torch. It reads a binary number digit by digit; a flax layer on top says after each digit
whether the number so far is divisible by three. JAX trains both.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
import torch
from flax import nnx
from tqdm import trange

import jtbridge

LENGTH = 12


class TorchLayer(nnx.Module):
    """A flax layer that runs a torch module. Its parameters are ``nnx.Param``, its buffers ``nnx.BatchStat``."""

    def __init__(self, module: torch.nn.Module):
        self.net = jtbridge.module(module)
        params, state = self.net.init()
        self.params, self.state = nnx.Param(params), nnx.BatchStat(state)

    def __call__(self, *args, train=True):
        out, changed = self.net(self.params.get_value(), self.state.get_value(), *args, train=train)
        self.state.set_value(self.state.get_value() | changed)
        return out


class Divisible(nnx.Module):
    """A model that predicts whether each prefix of a binary number is divisible by three."""

    def __init__(self, rngs: nnx.Rngs):
        self.lstm = TorchLayer(torch.nn.LSTM(1, 16, batch_first=True))
        self.out = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, digits):
        hidden, _ = self.lstm(digits[..., None])
        return self.out(hidden)[..., 0]


def numbers(key, count):
    """Return random digits, and whether the number that ends at each digit is divisible by three."""
    digits = jax.random.bernoulli(key, 0.5, (count, LENGTH)).astype(jnp.int32)
    values = jax.lax.associative_scan(lambda a, b: (a[0] * b[1] + b[0], a[1] * b[1]), (digits, 0 * digits + 2), axis=1)
    return digits.astype(jnp.float32), values[0] % 3 == 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1500)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    model = Divisible(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, key):
        digits, answers = numbers(key, 128)

        def loss(model):
            scores = model(digits)
            return optax.sigmoid_binary_cross_entropy(scores, answers).mean(), ((scores > 0) == answers).mean()

        (value, accuracy), gradients = nnx.value_and_grad(loss, has_aux=True)(model)
        optimizer.update(model, gradients)
        return value, accuracy

    print(f"{sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))} parameters, of torch and of flax")
    accuracy = 0.0
    for number in (bar := trange(steps, desc="training")):
        value, accuracy = step(model, optimizer, jax.random.key(number))
        if number % 50 == 0:
            bar.set_postfix(loss=f"{value:.3f}", accuracy=f"{accuracy:.3f}")
    print(f"after {steps} steps: {accuracy:.1%} of the prefixes are answered rightly")

    digits, _ = numbers(jax.random.key(-1), 3)
    for row, scores in zip(digits.astype(int), model(digits), strict=True):
        yes = [int("".join(map(str, row[: i + 1])), 2) for i in range(LENGTH) if scores[i] > 0]
        print(f"{''.join(map(str, row))}: divisible by three are the prefixes {yes}")


if __name__ == "__main__":
    main()
