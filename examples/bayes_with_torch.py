"""Bayesian regression with a torch net, sampled by the No-U-Turn sampler: `python examples/bayes_with_torch.py`.

The net, its prior and its likelihood are torch code. NumPyro samples the weights: JAX compiles the sampler and takes
the gradients of the log density through the torch net. Where there are no data, the samples spread.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import torch
from numpyro.diagnostics import summary
from numpyro.infer import MCMC, NUTS

import jtbridge

mpl.use("agg")
import matplotlib.pyplot as plt

PLOT = Path("build/examples/bayes_with_torch.png")
NOISE = 0.1


def net_of(hidden: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(1, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500, help="samples, after as many steps of warm-up")
    parser.add_argument("--quiet", action="store_true", help="no progress bar, with which the sampler is slower")
    options = parser.parse_args()

    rng = np.random.default_rng(0)
    x = torch.from_numpy(np.concatenate([rng.uniform(-2, -0.7, 20), rng.uniform(0.7, 2, 20)]).astype(np.float32))
    y = torch.sin(2 * x) + NOISE * torch.from_numpy(rng.normal(size=40).astype(np.float32))
    net = net_of(hidden=10)

    @jtbridge.wrap
    def energy(weights):
        """Return minus the log density of the weights, given the data. All of it is torch code."""
        prior = sum(torch.distributions.Normal(0.0, 2.0).log_prob(weight).sum() for weight in weights.values())
        curve = torch.func.functional_call(net, weights, x[:, None])[:, 0]
        return -prior - torch.distributions.Normal(curve, NOISE).log_prob(y).sum()

    start = {name: jtbridge.to_jax(weight) for name, weight in net.named_parameters()}
    kernel = NUTS(potential_fn=energy)
    sampler = MCMC(kernel, num_warmup=options.steps, num_samples=options.steps, progress_bar=not options.quiet)
    sampler.run(jax.random.key(0), init_params=start, extra_fields=("potential_energy", "num_steps", "diverging"))
    weights, fields = sampler.get_samples(), sampler.get_extra_fields()
    print(f"{int(fields['num_steps'].sum())} gradients of the torch net, {int(fields['diverging'].sum())} divergences")
    found = summary({"energy": fields["potential_energy"][None]}, group_by_chain=True)["energy"]
    print(f"energy {found['mean']:.1f} +- {found['std']:.1f}, effective samples {found['n_eff']:.0f}")

    grid = jnp.linspace(-3, 3, 121)
    call = jtbridge.module(net)
    curves = jax.jit(jax.vmap(lambda weights: call(weights, {}, grid[:, None])[0][:, 0]))(weights)
    spread = curves.std(0)
    for place in (0.0, 1.5, 3.0):
        at = int(jnp.argmin(jnp.abs(grid - place)))
        print(f"at {place}: {curves[:, at].mean():+.2f} +- {spread[at]:.2f}, the truth is {np.sin(2 * place):+.2f}")

    plt.figure(figsize=(7, 4))
    plt.plot(grid, curves[:: max(1, len(curves) // 60)].T, color="tab:blue", alpha=0.15, lw=0.8)
    plt.plot(grid, curves.mean(0), color="tab:blue", label="mean of the samples")
    plt.plot(grid, np.sin(2 * grid), "k--", lw=1, label="truth")
    plt.plot(x, y, "k.", label="data")
    plt.ylim(-4, 4)
    plt.legend()
    plt.title("Samples of a torch net by NUTS")
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    plt.savefig(PLOT, dpi=120, bbox_inches="tight")
    print(f"as a plot: {PLOT}")


if __name__ == "__main__":
    main()
