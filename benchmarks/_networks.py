"""The models that are measured, as functions of their parameters: transformers, convolutional networks and layers.

Weights are random. ``bert`` has BERT-base's width and four layers, ``llama`` is a small Llama of four layers 128 wide.
Each runs on a batch of texts, where matrix products take most of the time, and on one sentence, where the other
operators take much of it. The mixtures of experts are of the size of ``llama``. The convolutional networks have one
image of 224 x 224, and the U-Nets one image or volume.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch


@dataclass(frozen=True)
class Model:
    """A model as a function of its parameters and inputs, which returns one tensor."""

    parameters: dict[str, torch.Tensor]
    inputs: tuple[torch.Tensor, ...]
    call: Callable[..., torch.Tensor]

    def loss(self, *args: Any) -> torch.Tensor:
        """Return a scalar that depends on all of the result."""
        return self.call(*args).sin().mean()


def _bert(batch: int, tokens: int) -> Model:
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(num_hidden_layers=4), add_pooling_layer=False).eval()
    lengths = torch.randint(tokens // 2, tokens + 1, (batch, 1))
    mask = (torch.arange(tokens) < lengths).long()

    def call(parameters: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        state = {**_buffers(model, ids.device), **parameters}
        return torch.func.functional_call(model, state, (ids, mask)).last_hidden_state

    return Model(dict(model.named_parameters()), (torch.randint(0, 30_000, (batch, tokens)), mask), call)


def _llama(batch: int, tokens: int) -> Model:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model = LlamaForCausalLM(config).eval()

    def call(parameters: Any, ids: torch.Tensor) -> torch.Tensor:
        state = {**_buffers(model, ids.device), **parameters}
        return torch.func.functional_call(model, state, (ids,), {"use_cache": False}).logits

    return Model(dict(model.named_parameters()), (torch.randint(0, 1000, (batch, tokens)),), call)


def _bert_in_bfloat16(batch: int, tokens: int) -> Model:
    model = _bert(batch, tokens)
    parameters = {name: p.detach().bfloat16().requires_grad_() for name, p in model.parameters.items()}
    # This parameter gets no gradient: torch sums the gradient over all tokens in bfloat16, with an error as large as
    # the gradient itself.
    name = "embeddings.token_type_embeddings.weight"
    inputs = (parameters.pop(name).detach(), *model.inputs)
    return Model(parameters, inputs, lambda given, fixed, *inputs: model.call({**given, name: fixed}, *inputs))


def _experts(name: str, **config: Any) -> Model:
    """Return a language model with four experts, two of which process each token."""
    import transformers

    sizes = {
        "vocab_size": 1000,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 2,
    }
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**(sizes | config)))
    model.eval()

    def call(parameters: Any, ids: torch.Tensor) -> torch.Tensor:
        state = {**_buffers(model, ids.device), **parameters}
        return torch.func.functional_call(model, state, (ids,), {"use_cache": False}).logits

    return Model(dict(model.named_parameters()), (torch.randint(0, 1000, (4, 64)),), call)


def _lstm() -> Model:
    model = torch.nn.LSTM(128, 256, batch_first=True)

    def call(parameters: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,))[0]

    return Model(dict(model.named_parameters()), (torch.randn(8, 100, 128),), call)


def _attention() -> Model:
    parameters = {name: torch.randn(2, 12, 512, 64, requires_grad=True) for name in ("query", "key", "value")}

    def call(parameters: Any) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(**parameters, is_causal=True)

    return Model(parameters, (), call)


def _buffers(model: torch.nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Return a model's buffers on a device: torchax has its own device, and does not accept tensors of others."""
    return {name: buffer.to(device) for name, buffer in model.named_buffers()}


def _of_transformers(name: str, **config: Any) -> Model:
    import transformers

    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**config))
    return _model(model, torch.randn(1, 3, 224, 224), lambda out: out.pooler_output)


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


# By name: the title in the tables, and the function that makes the model.
TRANSFORMERS: dict[str, tuple[str, Callable[[], Model]]] = {
    "bert": ("BERT width, 4 layers, 8 x 128", partial(_bert, 8, 128)),
    "bert-sentence": ("BERT width, 4 layers, 1 x 16", partial(_bert, 1, 16)),
    "llama": ("small Llama, 4 layers, 4 x 64", partial(_llama, 4, 64)),
    "llama-sentence": ("small Llama, 4 layers, 1 x 16", partial(_llama, 1, 16)),
}
CONVOLUTIONAL: dict[str, tuple[str, Callable[[], Model]]] = {
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
IN_BFLOAT16 = {"bert-bfloat16": ("BERT width, 4 layers, 8 x 128, bfloat16", partial(_bert_in_bfloat16, 8, 128))}
EXPERTS: dict[str, tuple[str, Callable[[], Model]]] = {
    "mixtral": ("small Mixtral, 4 x 64", partial(_experts, "Mixtral", num_local_experts=4)),
    "qwen3-moe": (
        "small Qwen3-MoE, 4 x 64",
        partial(_experts, "Qwen3Moe", num_experts=4, moe_intermediate_size=256, head_dim=32),
    ),
    "deepseek-v3": (
        "small DeepSeek-V3, 4 x 64",
        partial(
            _experts,
            "DeepseekV3",
            n_routed_experts=4,
            n_shared_experts=1,
            moe_intermediate_size=256,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            kv_lora_rank=32,
            q_lora_rank=32,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=32,
        ),
    ),
}
LAYERS: dict[str, tuple[str, Callable[[], Model]]] = {
    "lstm": ("LSTM, 8 x 100 x 128 -> 256", _lstm),
    "attention": ("causal attention, 2 x 12 x 512 x 64", _attention),
}
_ALL = TRANSFORMERS | IN_BFLOAT16 | EXPERTS | CONVOLUTIONAL | LAYERS


@cache
def named(name: str) -> Model:
    """Return a model by its name in the tables; later calls return the same model."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    return _ALL[name][1]()


def title(name: str) -> str:
    """Return the title of a model in a table."""
    return _ALL[name][0]
