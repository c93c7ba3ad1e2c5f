"""Convolutional networks of standard sizes with random weights, on one image of 224 x 224 or one volume of 32^3."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks._results import ISLANDS, TORCH, Benchmark, Target
from benchmarks.models import Model, forward, gradient


def _of_transformers(name: str, **config: Any) -> Model:
    import transformers

    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**config))
    return _model(model, torch.randn(1, 3, 224, 224), lambda out: out.last_hidden_state)


def _model(model: torch.nn.Module, image: torch.Tensor, result: Callable[[Any], torch.Tensor]) -> Model:
    model.eval()
    buffers = dict(model.named_buffers())

    def call(parameters: Any, image: torch.Tensor) -> torch.Tensor:
        state = {**{name: buffer.to(image.device) for name, buffer in buffers.items()}, **parameters}
        return result(torch.func.functional_call(model, state, (image,)))

    return Model(dict(model.named_parameters()), (image,), call)


class _UNet(torch.nn.Module):
    """A U-Net of three scales, in two or three dimensions."""

    def __init__(self, dims: int, width: int):
        super().__init__()
        self._dims = dims
        widths = [width, 2 * width, 4 * width]
        self.down = torch.nn.ModuleList([self._block(i, o) for i, o in zip([1, *widths], widths, strict=False)])
        up = self._layer("ConvTranspose")
        self.grow = torch.nn.ModuleList([up(2 * w, w, 2, stride=2) for w in reversed(widths[:-1])])
        self.up = torch.nn.ModuleList([self._block(2 * w, w) for w in reversed(widths[:-1])])
        self.pool = self._layer("MaxPool")(2)
        self.head = self._layer("Conv")(width, 1, 1)

    def _layer(self, name: str) -> Any:
        return getattr(torch.nn, f"{name}{self._dims}d")

    def _block(self, ins: int, outs: int) -> torch.nn.Sequential:
        layers = []
        for channels in (ins, outs):
            layers += [
                self._layer("Conv")(channels, outs, 3, padding=1),
                self._layer("BatchNorm")(outs),
                torch.nn.ReLU(),
            ]
        return torch.nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = []
        for block in self.down[:-1]:
            x = block(x)
            skipped.append(x)
            x = self.pool(x)
        x = self.down[-1](x)
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([grow(x), skipped.pop()], 1))
        return self.head(x)


def _unet(dims: int, width: int, size: int) -> Model:
    return _model(_UNet(dims, width), torch.randn(1, 1, *[size] * dims), lambda out: out)


NETWORKS: dict[str, tuple[str, Callable[[], Model]]] = {
    "resnet18": (
        "ResNet-18",
        partial(_of_transformers, "ResNet", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], layer_type="basic"),
    ),
    "resnet50": ("ResNet-50", partial(_of_transformers, "ResNet")),
    "mobilenetv2": ("MobileNetV2", partial(_of_transformers, "MobileNetV2")),
    "convnext": ("ConvNeXt-tiny", partial(_of_transformers, "ConvNext")),
    "unet2d": ("U-Net, 128 x 128", partial(_unet, 2, 32, 128)),
    "unet3d": ("U-Net, 32 x 32 x 32", partial(_unet, 3, 16, 32)),
}
_FORWARD, _GRADIENT = (Target(ISLANDS, 0.95, TORCH),), (Target(ISLANDS, 1.05, TORCH),)
ROWS: dict[str, Benchmark] = {
    f"{name}-{kind}": partial(run, name, targets)
    for name in NETWORKS
    for kind, run, targets in (("forward", forward, _FORWARD), ("gradient", gradient, _GRADIENT))
}
