"""Random draws of a derivative that the function itself does not make."""

from __future__ import annotations

from torch import fx

from jtbridge.core.functions import TorchFunction
from jtbridge.errors import RandomnessError

from .modes.effects import draws


def refuse_draws(fn: TorchFunction, module: fx.GraphModule) -> None:
    """Refuse the graph of a derivative that draws random numbers if the function itself draws none.

    Such a function has no key, and the numbers would come from torch's generator each time the program runs.

    Raises:
        RandomnessError: the graph draws.
    """
    if fn is fn.base or fn.base.seeded or fn.base.traits.effects.random_operator is not None:
        return
    for node in module.graph.nodes:
        if draws(node.target, node.args, node.kwargs):
            raise RandomnessError(
                f"A derivative of `{fn.base.name}` draws random numbers ({node.target}), for example in a hook or in "
                "the `backward` of an `autograd.Function`, and the function itself draws none. A JAX program has no "
                "key for them. Draw in the function, and pass a JAX key as `rng=`."
            )
