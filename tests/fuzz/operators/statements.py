"""Statements that are not one expression: gradients inside, modes, control flow, several results."""

from __future__ import annotations

from tests.fuzz.programs import Writer


def gradient_inside(w: Writer) -> None:
    """Write a part of the program that torch differentiates."""
    x = w.real()
    u = w.new()
    function = w.rng.choice(
        [
            "({u}.sin() * {u}).sum()",
            "({u} ** 3).mean()",
            "{u}.tanh().square().sum()",
            "torch.logsumexp({u}.flatten(), 0)",
            "({u} * {u}.detach()).sum()",
            "F.softplus({u}).prod() * 0.1",
            "({u}.cumsum(-1) ** 2).sum()",
            "F.softmax({u}, -1).square().sum()",
            "({u} @ {u}.mT).sin().sum()",
        ]
    )
    start = w.rng.choice(
        ["{x}.detach().requires_grad_()", "{x} if {x}.requires_grad else {x}.detach().requires_grad_()"]
    )
    result = w.new()
    # Without `create_graph=True`, jtbridge requires `stop_gradient`, where torch treats the result as a constant.
    again = ", create_graph=True"
    w.do(
        "with torch.enable_grad():",
        f"    {u} = {start.format(x=x)}",
        f"    ({result},) = torch.autograd.grad({function.format(u=u)}, {u}{again})",
    )


def without_recording(w: Writer) -> None:
    x = w.real()
    name = w.new()
    body = w.rng.choice(["{x}.sin() * {n}", "{x} * {x}", "{x}.cumsum(-1)", "{x}.clone().mul_({n})", "{x}.softmax(-1)"])
    mode = w.rng.choice(["torch.no_grad()", "torch.set_grad_enabled(False)", "torch.enable_grad()"])
    w.do(f"with {mode}:", f"    {name} = " + body.format(x=x, n=w.number() or 0.5))


def python(w: Writer) -> None:
    """Write Python control flow that depends on shapes."""
    x = w.real(at_least=1)
    name, n = w.new(), w.number() or 0.5
    w.do(
        *w.rng.choice(
            [
                [f"{name} = {x}.sum(0) if {x}.shape[0] > 2 else {x} * {n}"],
                [f"{name} = sum({x}[i] * (i + 1) for i in range({x}.shape[0]))"],
                [f"{name} = torch.stack([row * i for i, row in enumerate({x})])"],
                [
                    f"{name} = {x}.clone()",
                    f"for i in range(1, {x}.shape[0]):",
                    f"    {name}[i] = {name}[i] + {n} * {name}[i - 1]",
                ],
                [f"{name} = {x} * 1", f"for row in {name}:", f"    row.mul_({n})"],
                [
                    f"{name} = {x}.new_zeros({x}.shape[0])",
                    f"for i in range({x}.shape[0]):",
                    f"    {name}[i] = {x}[i].sum()",
                ],
                [f"{name} = {x}", "for _ in range(3):", f"    {name} = {name}.tanh() + {x}"],
                [f"{name} = {x}", f"while {name}.ndim > 1:", f"    {name} = {name}.mean(-1)"],
                [f"{name} = torch.cat([{x}[i:i + 1] * {n} ** i for i in range(len({x}))])"],
                [f"first, *_ = {x}.unbind(0)", f"{name} = first + {x}"],
                [f"{name} = {x}.reshape({x}.numel() // 2, 2) if {x}.numel() % 2 == 0 else {x}.flatten()"],
                [f"{name} = torch.zeros_like({x})", f"{name}[...] = {x}", f"{name}[0] *= {n}"],
                [f"{name} = {x}.sin()", f"{name}.detach_()"],
                [f"{name} = [{x}]", f"{name}.append({x} * {n})", f"{name} = {name}[0] + {name}.pop()"],
            ]
        )
    )


def several(w: Writer) -> None:
    """Write an operator with several results, which all become variables."""
    x = w.real(at_least=1)
    d = w.dim(x)
    first, second = w.new(), w.new()
    text, *guards = w.rng.choice(
        [
            ("{x}.sort({d})", "distinct({x}, {d})"),
            ("{x}.topk(2, {d})", "distinct({x}, {d})"),
            ("{x}.max({d})", "distinct({x}, {d})"),
            ("torch.var_mean({x}, {d})", "spread({x}, {d})"),
            ("torch.std_mean({x}, {d})", "spread({x}, {d})"),
            ("{x}.chunk(2, {d})",),
            ("{x}.tensor_split(2, {d})",),
            ("torch.aminmax({x}, dim={d})", "distinct({x}, {d})"),
            ("torch.broadcast_tensors({x}, {x}[:1])",),
            ("torch.cummax({x}, {d})", "distinct({x}, {d})"),
            ("torch.frexp({x}.detach())", "away({x}, 0, 0.5, 1, 2, 4, -0.5, -1, -2, -4)"),
            ("torch.linalg.slogdet(torch.eye({x}.shape[-1], dtype={x}.dtype) * 9 + {x})", "below({x}, 1.5)"),
            ("F.max_pool1d({x}, 2, return_indices=True)", "distinct({x}, -1)"),
            ("{x}.median({d})", "distinct({x}, {d})"),
            ("torch.gradient({x}, dim={d})[0], {x}.mean()",),
        ]
    )
    w.do(f"{first}, {second} = {text.format(x=x, d=d)}", guards=[g.format(x=x, d=d) for g in guards])
