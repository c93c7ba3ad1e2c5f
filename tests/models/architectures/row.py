"""One architecture: a class of transformers, sizes, and inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

Inputs = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Row:
    """One architecture.

    Attributes:
        model: the class of transformers.
        sizes: the arguments of its configuration; or a function that makes the configuration.
        inputs: makes the keyword arguments of a call, the same in every run.
        static: makes arguments that the model reads as numbers, such as sizes of images. They are not arguments of the
            JAX function: its torch code makes tensors of them.
        fields: the fields of the output that are results; all of them if none is named.
    """

    model: str
    sizes: dict[str, Any] | Callable[[], Any]
    inputs: Callable[[], Inputs]
    static: Callable[[], Inputs] | None = None
    fields: tuple[str, ...] = ()

    def make(self) -> torch.nn.Module:
        """Return the model with random weights, none of which is 0 or 1 for all elements, in evaluation mode."""
        import transformers

        torch.manual_seed(0)
        model_class = getattr(transformers, self.model)
        config = self.sizes() if callable(self.sizes) else model_class.config_class(**self.sizes)
        model = model_class(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)
        if self.static is None and not self.fields:
            return model
        return _Part(model, {} if self.static is None else self.static(), self.fields)


class _Part(torch.nn.Module):
    """A model with some fixed arguments, which returns some fields of its output."""

    def __init__(self, model: torch.nn.Module, static: Inputs, fields: tuple[str, ...]):
        super().__init__()
        self.model = model
        self._static = {name: value.tolist() for name, value in static.items()}
        self._fields = fields

    def forward(self, **inputs: Any) -> Any:
        out = self.model(**inputs, **{name: torch.tensor(value) for name, value in self._static.items()})
        return tuple(out[field] for field in self._fields) or out


def configuration(name: str, /, **options: Any) -> Any:
    """Return a configuration of transformers."""
    import transformers

    return getattr(transformers, name)(**options)


def tokens(length: int = 8, count: int = 64, name: str = "input_ids", seed: int = 1) -> Inputs:
    """Return token ids in ``[3, count)`` for a batch of two."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(3, count, (2, length), generator=generator)}


def noise(name: str, *shape: int) -> Inputs:
    """Return normally distributed numbers."""
    return {name: torch.randn(shape, generator=torch.Generator().manual_seed(2))}


def ones(name: str, *shape: int) -> Inputs:
    """Return a mask of ones."""
    return {name: torch.ones(shape, dtype=torch.int64)}


def images(size: int = 32, channels: int = 3, name: str = "pixel_values") -> Inputs:
    """Return a batch of two images."""
    return noise(name, 2, channels, size, size)


def padded(length: int = 8) -> Inputs:
    """Return token ids, and an attention mask that leaves out the end of the second row."""
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[1, -3:] = 0
    return {**tokens(length), "attention_mask": mask}
