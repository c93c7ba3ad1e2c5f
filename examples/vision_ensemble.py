"""Five convolutional nets of torch trained at once, by `jax.vmap`: `python examples/vision_ensemble.py`.

The data are scikit-learn's digits: 1797 images of 8 times 8 pixels. The members differ in their initial weights, in
the order of their batches and in dropout. Where they disagree, the ensemble is unsure, and often wrong.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
import torch
from sklearn.datasets import load_digits
from torch import nn
from tqdm import trange

import jtbridge

mpl.use("agg")
import matplotlib.pyplot as plt

MEMBERS = 5
PLOT = Path("build/examples/vision_ensemble.png")


def convolutional(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(128, 10)),
    )


def load() -> tuple[np.ndarray, np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    return images[order].reshape(-1, 1, 8, 8).astype(np.float32) / 16, labels[order].astype(np.int32)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    images, labels = load()
    train_images, train_labels = jnp.asarray(images[:400]), jnp.asarray(labels[:400])
    test_images, test_labels = images[400:], labels[400:]

    def loss(model, rows):
        scores = model(train_images[rows])
        return optax.softmax_cross_entropy_with_integer_labels(scores, train_labels[rows]).mean()

    # The members are one module with stacked parameters, and the step of one member is mapped over them.
    nets = [jtbridge.module(convolutional(seed)) for seed in range(MEMBERS)]
    step = jtbridge.train_step(nets[0], loss, optax.adam(3e-3))
    members = [step.init(jax.random.key(seed), *net.init()) for seed, net in enumerate(nets)]
    ensemble = jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)
    steps_of_all = jax.jit(jax.vmap(step), donate_argnums=0)

    rng = np.random.default_rng(0)
    for _ in (bar := trange(steps, desc=f"{MEMBERS} members")):
        rows = rng.integers(0, len(train_images), (MEMBERS, 64))
        ensemble, metrics = steps_of_all(ensemble, rows)
        bar.set_postfix(loss=f"{metrics['loss'].mean():.3f}")

    scores, _ = jax.jit(jax.vmap(nets[0], in_axes=(0, 0, None)))(ensemble.params, ensemble.state, test_images)
    chances = jax.nn.softmax(scores)  # members, images, classes
    mean = np.asarray(chances.mean(0))
    for number, own in enumerate(np.asarray(chances.argmax(-1))):
        print(f"member {number}: {(own == test_labels).mean():.1%} of {len(test_labels)} test images right")
    answers = mean.argmax(-1)
    print(f"the ensemble: {(answers == test_labels).mean():.1%}")
    agreed = np.asarray((chances.argmax(-1) == chances.argmax(-1)[:1]).all(0))
    right = answers == test_labels
    print(f"all members agree on {agreed.mean():.1%} of the images: {right[agreed].mean():.1%} right there, ", end="")
    print(f"{right[~agreed].mean():.1%} elsewhere" if not agreed.all() else "all of them")

    unsure = np.argsort(mean.max(-1))[:10]
    figure, axes = plt.subplots(2, 5, figsize=(8, 3.8))
    for axis, image in zip(axes.flat, unsure, strict=True):
        axis.imshow(test_images[image, 0], cmap="gray_r")
        votes = np.asarray(chances[:, image].argmax(-1))
        axis.set_title(f"{test_labels[image]}: votes {' '.join(map(str, votes))}", fontsize=8)
        axis.axis("off")
    figure.suptitle("The images of which the ensemble is least sure")
    figure.tight_layout()
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, dpi=120)
    print(f"the images of which it is least sure: {PLOT}")


if __name__ == "__main__":
    main()
