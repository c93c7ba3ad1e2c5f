"""A few calls of every kind, with only the installed package and its dependencies. Run by `make test-wheel`."""

import importlib.metadata
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jtbridge


def main() -> None:
    assert "site-packages" in pathlib.Path(jtbridge.__file__).parts, jtbridge.__file__
    assert (pathlib.Path(jtbridge.__file__).parent / "py.typed").exists()
    check_metadata()
    x = jnp.arange(6.0).reshape(2, 3)
    want = np.sin(np.asarray(x)) * 2
    for backend in ("auto", "xla", "dlpack", "callback"):
        f = jtbridge.wrap(lambda x: torch.sin(x) * 2, backend=backend)
        np.testing.assert_allclose(f(x), want, rtol=1e-6)
        np.testing.assert_allclose(jax.jit(jax.vmap(f))(x), want, rtol=1e-6)
        gradient = jax.jit(jax.grad(lambda x, f=f: f(x).sum()))(x)
        np.testing.assert_allclose(gradient, 2 * np.cos(np.asarray(x)), rtol=1e-6)
    model = torch.nn.Linear(3, 4)
    got = jax.jit(jtbridge.wrap(model))(x)
    expected = model(torch.from_numpy(np.array(x))).detach().numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    for name in jtbridge.__all__:
        getattr(jtbridge, name)
    shown = subprocess.run([sys.executable, "-m", "jtbridge", "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith(f"jtbridge {jtbridge.__version__}, jax {jax.__version__}"), shown.stdout


def check_metadata() -> None:
    """Check that the wheel holds only the package, and that its metadata is complete."""
    metadata = importlib.metadata.metadata("jtbridge")
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Summary"]
    assert metadata["Author"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert {"export", "triton", "test", "docs"} <= set(metadata.get_all("Provides-Extra"))
    needed = {line.split(">")[0] for line in importlib.metadata.requires("jtbridge") if "extra ==" not in line}
    assert needed == {"jax", "numpy", "torch"}, needed
    files = [str(file) for file in importlib.metadata.files("jtbridge")]
    strays = [name for name in files if not name.startswith(("jtbridge/", "jtbridge-"))]
    assert not strays, strays
    assert any(name.endswith("licenses/LICENSE") for name in files)


if __name__ == "__main__":
    main()
