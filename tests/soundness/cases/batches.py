"""Batches of functions whose operators torch or XLA batches by rules of their own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F

from ._case import ROWS, case


@case("batches")
def numbers_rolled_in_a_batch(run):
    yield run.vmap(run.wrap(lambda v: v.sum().roll(1) + v), ROWS)


@case("batches")
def warp_of_a_batch_by_one_grid(run):
    m = torch.arange(6.0).reshape(2, 3)
    yield run.vmap(run.wrap(lambda row: (row * m).sum(0)), torch.ones(4, 3))


@case("batches", isolated=True)
def grid_sample_of_a_batch_of_images(run):
    generator = torch.Generator().manual_seed(0)
    grid = torch.rand(2, 4, 4, 2, generator=generator) * 1.6 - 0.8
    images = torch.rand(3, 2, 3, 4, 4, generator=generator)

    def f(images):
        return F.grid_sample(images, grid, align_corners=True)

    yield run.vmap(run.wrap(f), images)


@case("batches", isolated=True)
def grid_sample_of_one_image_by_many_grids(run):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(3, 2, 3, 4, 4, generator=generator)
    grids = torch.rand(2, 4, 4, 2, generator=generator) * 1.6 - 0.8
    g = run.wrap(lambda g, im: F.grid_sample(im, g, align_corners=True))
    yield run.either(
        lambda: torch.stack([g(grids, im) for im in images]),
        lambda: jax.vmap(g, (None, 0))(jnp.asarray(grids.numpy()), jnp.asarray(images.numpy())),
    )
