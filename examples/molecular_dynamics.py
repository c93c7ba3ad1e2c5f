"""Molecular dynamics in JAX with a force field of torch: `python examples/molecular_dynamics.py`.

The force field is SO3LR, a transformer over atoms, with its published weights. Its energy and the forces, which are
`torch.autograd.grad` of the energy, are torch code. The time steps are a loop of JAX, compiled as one program. Nothing
heats or cools the molecule, so its total energy must stay the same.
"""

import argparse
import copy
import time
from importlib.resources import files
from pathlib import Path

import ase
import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import torch
from ase import units
from ase.build import molecule
from tqdm import tqdm

import jtbridge

mpl.use("agg")
import matplotlib.pyplot as plt

PLOT = Path("build/examples/molecular_dynamics.png")
MOLECULE = "CH3CH2OH"  # ethanol
STEP = 0.5  # femtoseconds
CHUNK = 50  # steps of one compiled program
TEMPERATURE = 300  # kelvin


def force_field_of(atoms: ase.Atoms):
    """Return a torch function: positions in angstrom to the energy in eV and the forces in eV per angstrom."""
    weights = files("so3krates_torch") / "pretrained/so3lr/so3lr.model"
    model = torch.load(str(weights), weights_only=False).double().eval().requires_grad_(False)
    numbers = torch.from_numpy(atoms.numbers)
    # All pairs of atoms. The list stays valid wherever the atoms move: the model's short-range terms are multiplied by
    # a function that is zero beyond their cutoff, and its long-range terms have no cutoff.
    pairs = (~torch.eye(len(atoms), dtype=torch.bool)).nonzero().T
    graph = {
        "atomic_numbers": numbers,
        "node_attrs": torch.nn.functional.one_hot(numbers - 1, model.num_elements).double(),
        **dict.fromkeys(("edge_index", "edge_index_lr"), pairs),
        **dict.fromkeys(("shifts", "shifts_lr"), torch.zeros(pairs.shape[1], 3)),  # no periodic images
        "cell": torch.zeros(3, 3),
        "batch": torch.zeros(len(atoms), dtype=torch.int64),  # all atoms belong to one molecule
        "ptr": torch.tensor([0, len(atoms)]),
        "total_charge": torch.zeros(1),
        "total_spin": torch.zeros(1),  # all electrons are paired
        "head": torch.zeros(1, dtype=torch.int64),
    }

    def energy_and_forces(positions):
        positions = positions.detach().requires_grad_()
        # The model stores intermediate results in its attributes. A shallow copy shares the weights and is dropped.
        energy = copy.copy(model)({**graph, "positions": positions}, compute_force=False)["energy"][0]
        (slope,) = torch.autograd.grad(energy, positions)
        return energy.detach(), -slope

    return energy_and_forces


def verlet(force_field, masses, state, step):
    """Take one step of velocity Verlet, with arrays of JAX or tensors of torch.

    Args:
        force_field: a function from positions to the energy and the forces.
        masses: the masses of the atoms, in u, of shape [atoms, 1].
        state: positions in angstrom, velocities in angstrom per time, and forces, each of shape [atoms, 3].
        step: the time step, in ASE's unit of time, angstrom * sqrt(u / eV).

    Returns:
        The next state, and its potential and kinetic energy in eV.
    """
    positions, velocities, forces = state
    velocities = velocities + step / 2 * forces / masses
    positions = positions + step * velocities
    potential, forces = force_field(positions)
    velocities = velocities + step / 2 * forces / masses
    return (positions, velocities, forces), (potential, (masses * velocities**2).sum() / 2)


def thermal_velocities(masses: np.ndarray) -> np.ndarray:
    """Draw velocities of the Maxwell-Boltzmann distribution, without motion of the molecule as a whole."""
    noise = np.random.default_rng(0).normal(size=(len(masses), 3))
    velocities = noise * np.sqrt(units.kB * TEMPERATURE / masses)
    return velocities - (masses * velocities).sum(0) / masses.sum()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000, help=f"of {STEP} fs, rounded up to a multiple of {CHUNK}")
    steps = max(1, parser.parse_args().steps)
    # The energy is more than a thousand eV and its changes are thousandths, so all numbers have 64 bits.
    jax.config.update("jax_enable_x64", True)
    atoms, step = molecule(MOLECULE), STEP * units.fs

    in_torch = force_field_of(atoms)
    force_field = jtbridge.wrap(in_torch)
    masses = atoms.get_masses()[:, None]

    @jax.jit
    def advance(state, step):
        return jax.lax.scan(lambda state, _: verlet(force_field, masses, state, step), state, length=CHUNK)

    positions = jnp.asarray(atoms.positions)
    _, forces = force_field(positions)  # not in `jit`: torch itself runs
    start = (positions, jnp.asarray(thermal_velocities(masses)), forces)
    began = time.perf_counter()
    program = advance.lower(start, step).compile()
    print(f"{MOLECULE}, {len(atoms)} atoms: compiled in {time.perf_counter() - began:.0f} s")

    states, energies, seconds = [start], [], []
    with tqdm(total=-(-steps // CHUNK) * CHUNK, unit="step") as bar:
        while bar.n < bar.total:
            began = time.perf_counter()
            state, of_chunk = jax.block_until_ready(program(states[-1], step))
            seconds.append(time.perf_counter() - began)
            states.append(state)
            energies.append(np.stack(of_chunk, -1))  # potential, kinetic
            bar.update(CHUNK)
            bar.set_postfix_str(f"total {energies[-1][-1].sum():.4f} eV")

    # Compute the first chunk again, in torch.
    state = tuple(torch.from_numpy(np.array(part)) for part in start)
    seconds_of_torch = []
    for _ in range(CHUNK):
        began = time.perf_counter()
        state, _ = verlet(in_torch, torch.from_numpy(masses), state, step)
        seconds_of_torch.append(time.perf_counter() - began)
    apart = [np.abs(ours - theirs.numpy()).max() for ours, theirs in zip(states[1], state, strict=True)]
    print(f"{CHUNK / min(seconds):.0f} steps per second, {1 / min(seconds_of_torch):.0f} in torch")
    print(f"after {CHUNK} steps, positions are {apart[0]:.0e} angstrom apart, forces {apart[2]:.0e} eV per angstrom")

    # The error of velocity Verlet is of second order: with half the step, it is a quarter.
    middle, (potential, kinetic) = program(start, step / 2)
    _, (later_potential, later_kinetic) = program(middle, step / 2)
    halved = np.concatenate([potential + kinetic, later_potential + later_kinetic])
    print(f"in the first {CHUNK * STEP:g} fs: the total energy varies by ", end="")
    print(f"{1000 * energies[0].sum(-1).std():.3f} meV, with half the step by {1000 * halved.std():.3f} meV")

    potential, kinetic = np.concatenate(energies).T
    times = STEP * np.arange(1, len(kinetic) + 1)
    total = potential + kinetic
    drift = np.polyfit(times, total, 1)[0] * times[-1]
    print(f"in {times[-1] / 1000:g} ps: the potential energy varies by {1000 * potential.std():.1f} meV, ", end="")
    print(f"the total energy by {1000 * total.std():.2f} meV, its drift is {1000 * drift:.2f} meV")

    plt.figure(figsize=(7, 3.5))
    plt.plot(times, potential - potential[0], lw=0.8, label="potential")
    plt.plot(times, kinetic - kinetic[0], lw=0.8, label="kinetic")
    plt.plot(times, total - total[0], "k", lw=1, label="total")
    plt.xlabel("time, fs")
    plt.ylabel("energy since the start, eV")
    plt.legend(ncols=3)
    plt.title(f"{MOLECULE} at {TEMPERATURE} K, forces by SO3LR")
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    plt.savefig(PLOT, dpi=100, bbox_inches="tight")
    print(f"as a plot: {PLOT}")


if __name__ == "__main__":
    main()
