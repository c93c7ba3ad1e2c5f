"""In-place writes: to variables, and to views and their bases."""

from __future__ import annotations

from tests.fuzz.programs import NoChoice, Writer

# In-place writes. {v} is the variable that is written to.
_IN_PLACE = [
    "{v}.add_({y})",
    "{v}.mul_({y})",
    "{v}.sub_({n})",
    "{v} += {y}",
    "{v} *= {n}",
    "{v} -= {y}",
    "{v}.neg_()",
    "{v}.sin_()",
    "{v}.tanh_()",
    "{v}.copy_({y})",
    "{v}.zero_()",
    "{v}.fill_({n})",
    "{v}[0] = {y}",
    "{v}[0] += {n}",
    "{v}[..., -1] = {n}",
    "{v}[1:] = {v}[:-1].clone()",
    "{v}[::2].mul_({n})",
    "{v}[..., 0].add_({n})",
    "{v}.select(0, 0).fill_({n})",
    "{v}.flatten()[0] = {n}",
    "{v}.view(-1)[1:3].mul_(2)",
    "{v}.T.add_({n})",
    "{v}.diagonal().add_({n})",
    "{v}.diagonal().zero_()",
    "{v}.unsqueeze(0).mul_({n})",
    "{v}.narrow(0, 0, 1).copy_({y})",
    "{v}.transpose(0, -1)[0].sin_()",
    "{v}.masked_fill_({v} > 0, {n})",
    "{v}[{v} > 0.0] = {n}",
    "{v}[[0, -1]] = {n}",
    "{v}.index_fill_(0, torch.tensor([0]), {n})",
    "{v}.index_add_(0, torch.tensor([0, 0]), {v}[:2].detach())",
    "{v}.index_copy_(0, torch.tensor([1, 0]), {v}[:2].clone())",
    "{v}.scatter_(0, torch.zeros_like({v}[:1], dtype=torch.long), {n})",
    "{v}.clamp_(max={n})",
    "{v}.addcmul_({y}, {y}, value={n})",
    "{v}.lerp_({y}, 0.5)",
    "{v}.addmm_({v}, {v})",
    "{v}.swapaxes_(0, -1)",
    "{v}.t_()",
    "{v}.unsqueeze_(0)",
    "{v}.squeeze_()",
    "{v}.cumsum_(0)",
    "{v}.tril_()",
    "{v}.split(1)[0].add_({n})",
    "{v}.chunk(2, -1)[1].mul_({y})",
    "{v}.unbind(0)[1].add_({v}[0])",
    "{v}.data.mul_({n})",
    "{v}.detach().add_({n})",
    "{v}.real.mul_({n})",
    "{v}.expand(2, *{v}.shape)[0].add_({n})",
    "torch.add({v}, {n}, out={v})",
    "torch.mul({v}.detach(), {n}, out={v}.data)",
    "{v}.as_strided((2,), (1,)).mul_({n})",
    "{v}.relu_()",
    "{v}.sigmoid_()",
    "{v}.pow_(2)",
    "{v}.masked_scatter_({v} > 0, {v}.detach() * 2)",
    "{v}.index_put_((torch.tensor([0, 1]),), {v}[:2].detach() * {n})",
    "{v}.index_put_((torch.tensor([0, 0]),), torch.ones((), dtype={v}.dtype), accumulate=True)",
    "{v}.resize_as_({v})",
    "{v}.set_({v}.clone())",
    "{v}.fill_diagonal_({n})",
    "{v}.div_({p})",
    "{v}.requires_grad_({v}.requires_grad)",
]


def in_place(w: Writer) -> None:
    v = w.real()
    if v in w.arguments and w.rng.random() < 0.5:
        raise NoChoice
    template = w.rng.choice(_IN_PLACE)
    near = ["away({v}, 0)"] if "> 0" in template or "relu" in template else []
    if "clamp" in template:
        near = ["away({v}, {n})"]
    fields = {"v": v, "y": w.like(v), "n": w.number() or 0.5, "p": abs(w.number()) + 0.25}
    lines = [template.format(**fields)]
    if w.rng.random() < 0.15:
        lines = ["with torch.no_grad():", "    " + lines[0]]
    w.do(*lines, guards=[g.format(**fields) for g in near])


def in_place_of_others(w: Writer) -> None:
    """Write in place to an integer, boolean or complex tensor."""
    kind = w.rng.choice(["i", "m", "z"])
    if kind == "i":
        v = w.integer()
        template = w.rng.choice(
            [
                "{v}.add_(1)",
                "{v}[0] = 2",
                "{v}.mul_(2)",
                "{v} %= 3",
                "{v}.flatten()[0] = 1",
                "{v}[..., -1] += 1",
                "{v}.bitwise_and_(3)",
                "{v}.clamp_(0, 2)",
                "{v}.neg_()",
            ]
        )
    elif kind == "m":
        v = w.boolean()
        template = w.rng.choice(
            ["{v}.logical_not_()", "{v}[0] = True", "{v} &= True", "{v}[..., -1] = False", "{v} ^= True"]
        )
    else:
        v = w.complex()
        template = w.rng.choice(
            [
                "{v}.mul_(1j)",
                "{v}.real.add_(0.5)",
                "{v}.imag.neg_()",
                "{v}[0] = 1j",
                "torch.view_as_real({v})[..., 0].mul_(2)",
                "{v}.add_({v}.conj())",
                "{v}.conj_physical_()",
                "{v}.conj().mul_(1j)",
            ]
        )
    w.do(template.format(v=v))


def view_then_write(w: Writer) -> None:
    """Write a copy, a view of it that stays a variable, and a write to one of the two."""
    x = w.real(at_least=1)
    base = w.let(f"{x}.clone()" if w.rng.random() < 0.7 else f"{x} * 1")
    view = w.new()
    expression = w.rng.choice(
        [
            "{v}[0]",
            "{v}[1:]",
            "{v}.T",
            "{v}.view(-1)",
            "{v}[..., 0]",
            "{v}.unsqueeze(0)",
            "{v}.diagonal()",
            "{v}.flatten()[::2]",
            "{v}.reshape(-1)",
            "{v}.transpose(0, -1)",
            "{v}.detach()",
            "{v}.expand(2, *{v}.shape)",
            "{v}.squeeze()",
            "{v}.chunk(2)[1]",
            "{v}.contiguous()",
            "{v}.mT",
            "{v}[...]",
            "{v}.narrow(0, 1, 1)",
            "{v}.unfold(0, 2, 1)[0]",
            "{v}.view({v}.shape)",
        ]
    )
    w.do(f"{view} = {expression.format(v=base)}")
    written = w.rng.choice([base, view])
    w.do(
        w.rng.choice(
            [
                "{v}.mul_({n})",
                "{v}.add_({n})",
                "{v}[0] = {n}",
                "{v}.zero_()",
                "{v}[..., -1].mul_({n})",
                "{v} -= {n}",
                "{v}.sin_()",
                "{v}.copy_({v} * 2)",
            ]
        ).format(v=written, n=w.number() or 0.5)
    )
