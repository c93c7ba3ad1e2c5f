"""State that a function writes: refused by name where it is traced, left as it was, and kept where it is wanted."""

from __future__ import annotations

import collections
import functools
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import MutationError, PurityWarning, RandomnessError
from tests import with_state

X = jnp.asarray([1.0, 2.0, 4.0])
calls = 0


class Case:
    """A function that writes to state: `state` is what it writes, as a value to compare."""

    def __init__(self, name: str, fn: Callable[..., Any], state: Callable[[], Any], written: str):
        self.name, self.fn, self.state, self.written = name, fn, state, written


class Module(torch.nn.Module):
    """A module that runs `body` with itself."""

    limit = 3

    def __init__(self, body: Callable[..., Any]):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("table", torch.zeros(3))
        self.calls, self.last = 0, None
        self.body = [body]  # not a method

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body[0](self, x)


class Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


def counting() -> Case:
    counter = {"n": 1}

    def f(x):
        counter["n"] += 1
        return x * counter["n"]

    return Case("a dict of a closure", f, lambda: dict(counter), '`counter["n"]`')


def nonlocal_variable() -> Case:
    total = 0

    def f(x):
        nonlocal total
        total += 1
        return x * total

    return Case("a variable of a closure", f, lambda: total, "`total`")


def global_variable() -> Case:
    def f(x):
        global calls
        calls += 1
        return x * calls

    return Case("a global", f, lambda: calls, "global `calls`")


def of_another_module() -> Case:
    def f(x):
        with_state.count += 1
        return x * with_state.count

    return Case("a variable of a module", f, lambda: with_state.count, "global `count`")


def by_helpers() -> Case:
    return Case(
        "by a helper of a helper", lambda x: with_state.outer(x), lambda: list(with_state.seen), "global `seen`"
    )


def growing_list() -> Case:
    seen: list[Any] = []

    def f(x):
        seen.append(x.shape)
        return x * len(seen)

    return Case("a list that grows", f, lambda: list(seen), "`seen`")


def list_of_tensors() -> Case:
    seen: list[Any] = []

    def f(x):
        seen.append(x * 2)
        return x + 1

    return Case("a list of tensors", f, lambda: list(seen), "`seen`")


def set_of_numbers() -> Case:
    known: set[int] = set()

    def f(x):
        known.add(len(known))
        return x

    return Case("a set", f, lambda: set(known), "`known`")


def queue() -> Case:
    last = collections.deque([0, 0], maxlen=2)

    def f(x):
        last.append(last[-1] + 1)
        return x * last[0]

    return Case("a deque", f, lambda: list(last), "`last[1]`")


def attribute() -> Case:
    def body(self, x):
        self.calls += 1
        return self.linear(x) * self.calls

    module = Module(body)
    return Case("an attribute of a module", module, lambda: module.calls, "`self.calls`")


def attribute_of_a_method() -> Case:
    class Model:
        def __init__(self):
            self.steps = [0]

        def step(self, x):
            self.steps[0] += 1
            return x * self.steps[0]

    model = Model()
    return Case("an attribute behind a method", model.step, lambda: list(model.steps), "`self.steps[0]`")


def tensor_attribute() -> Case:
    def body(self, x):
        before = 0 if self.last is None else self.last
        self.last = x * 2
        return x + before

    module = Module(body)
    return Case("the last argument in a module", module, lambda: module.last, "`self.last`")


def rebound_buffer() -> Case:
    def body(self, x):
        self.table = self.table + x
        return self.table * 1

    module = Module(body)
    buffer = module.table
    return Case("a buffer, assigned", module, lambda: module.table is buffer, "`self.table`")


def rebound_constant() -> Case:
    def body(self, x):
        self.table = self.table + 1
        return x * self.table

    module = Module(body)
    return Case("a buffer that counts", module, lambda: module.table.tolist(), "`self.table`")


def inner_module() -> Case:
    def body(self, x):
        self.calls += 1
        return x

    outer = torch.nn.Sequential(torch.nn.Identity(), Module(body))
    return Case("an inner module", outer, lambda: outer[1].calls, "`self[1].calls`")


def class_attribute() -> Case:
    class Counter:
        made = 0

        def __call__(self, x):
            type(self).made += 1
            return x * Counter.made

    return Case("an attribute of a class", Counter(), lambda: Counter.made, "`Counter.made`")


def slot() -> Case:
    slotted = Slotted()

    def f(x):
        slotted.n += 1
        return x

    return Case("a slot", f, lambda: slotted.n, "`slotted.n`")


def attribute_of_a_function() -> Case:
    def f(x):
        f.calls = getattr(f, "calls", 0) + 1
        return x * f.calls

    return Case("an attribute of a function", f, lambda: hasattr(f, "calls"), "`f.calls`")


def default_argument() -> Case:
    def f(x, seen=[]):  # noqa: B006
        seen.append(1)
        return x * len(seen)

    return Case("a default argument", f, lambda: list(f.__defaults__[0]), "`seen`")


def cache_of_arguments() -> Case:
    cache: dict[str, Any] = {}

    def f(x):
        if "x" not in cache:
            cache["x"] = x * 2
        return x + cache["x"]

    return Case("a cache of an argument", f, lambda: dict(cache), '`cache["x"]`')


def gradient() -> Case:
    weight = torch.nn.Parameter(torch.ones(3))

    def f(x):
        loss = (weight * x).sum()
        loss.backward()
        return loss.detach()

    return Case("a gradient", f, lambda: weight.grad, "`weight.grad`")


def array() -> Case:
    counts = np.zeros(2)

    def f(x):
        counts[0] += 1
        return x * float(counts[0])

    return Case("a NumPy array", f, lambda: counts.tolist(), "`counts`")


def iterator(make: Callable[[], Iterator[Any]], name: str) -> Callable[[], Case]:
    def case() -> Case:
        numbers = make()

        def rest() -> Any:
            nonlocal numbers
            taken = [*itertools.islice(numbers, 2)]
            numbers = itertools.chain(taken, numbers)
            return taken

        return Case(name, lambda x: x * next(numbers), rest, "`numbers`")

    return case


def own_generator(make: Callable[[], Any], draw: Callable[[Any], float], name: str) -> Callable[[], Case]:
    def case() -> Case:
        source = make()
        state = (lambda: source.getstate()) if name == "random.Random" else (lambda: str(source.bit_generator.state))
        return Case(name, lambda x: x * draw(source), state, "`source`")

    return case


CASES = [
    *(counting, nonlocal_variable, global_variable, of_another_module, by_helpers, growing_list, list_of_tensors),
    *(set_of_numbers, queue, attribute, attribute_of_a_method, tensor_attribute, rebound_buffer, rebound_constant),
    *(
        inner_module,
        class_attribute,
        slot,
        attribute_of_a_function,
        default_argument,
        cache_of_arguments,
        gradient,
        array,
    ),
    iterator(lambda: iter([1, 2, 3]), "an iterator over a list"),
    iterator(lambda: iter({1: 0, 2: 0, 3: 0}), "an iterator over a dict"),
    iterator(lambda: itertools.count(1), "itertools.count"),
    iterator(lambda: itertools.cycle([1, 2, 3]), "itertools.cycle"),
    iterator(lambda: map(float, [1, 2, 3]), "map"),
    own_generator(lambda: random.Random(0), lambda source: source.random(), "random.Random"),
    own_generator(lambda: np.random.default_rng(0), lambda source: source.random(), "numpy.random.Generator"),
]
ROUTES: dict[str, Callable[[Callable], Any]] = {
    "jit": lambda f: jax.jit(f)(X),
    "eval_shape": lambda f: jax.eval_shape(f, X),
    "scan": lambda f: jax.lax.scan(lambda x, _: (x, f(x)), X, None, length=2),
    "jit(grad)": lambda f: jax.jit(jax.grad(lambda x: jnp.sum(f(x))))(X),
}


@pytest.mark.parametrize("make", CASES, ids=lambda make: getattr(make, "__name__", ""))
@pytest.mark.parametrize("backend", ["xla", "dlpack"])
@pytest.mark.parametrize("route", ROUTES)
def test_it_is_refused_by_name_and_put_back(make, backend, route):
    case = make()
    before = case.state()
    with pytest.raises(MutationError) as caught:
        ROUTES[route](jtbridge.wrap(case.fn, backend=backend))
    assert case.written in str(caught.value), case.name
    assert 'effects="ordered"' in str(caught.value)
    assert repr(case.state()) == repr(before), case.name


def test_a_generator_that_is_advanced_is_refused():
    numbers = (i for i in range(5))
    with pytest.raises(MutationError, match="`numbers`"):
        jax.jit(jtbridge.wrap(lambda x: x * next(numbers)))(X)


def test_a_backward_that_counts_is_refused():
    class Counted(torch.autograd.Function):
        runs = 0

        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, g):
            Counted.runs += 1
            return g * (1 + Counted.runs)

    for backend in ("xla", "dlpack"):
        f = jtbridge.wrap(lambda x: Counted.apply(x), backend=backend)
        with pytest.raises(MutationError, match=r"`Counted.runs`"):
            jax.jit(jax.grad(lambda x, f=f: f(x).sum()))(X)
        assert Counted.runs == 0


def test_a_trace_that_fails_leaves_nothing():
    seen = []

    def f(x):
        seen.append(x)
        raise LookupError("on purpose")

    with pytest.raises(LookupError, match="on purpose"):
        jax.jit(jtbridge.wrap(f))(X)
    assert seen == []


def test_a_state_that_only_real_values_reach_is_put_back():
    seen = []

    def f(x):
        seen.append(float(x.sum()))
        return x * len(seen)

    with pytest.raises(MutationError, match="`seen`"):
        jax.jit(jtbridge.wrap(f))(X)
    assert seen == []


@pytest.mark.parametrize("backend", ["xla", "dlpack"])
def test_with_a_warning_it_runs_from_the_state_it_had(backend):
    case = counting()
    f = jtbridge.wrap(case.fn, backend=backend, purity="warn")
    with pytest.warns(PurityWarning, match=r'`counter\["n"\]`'):
        compiled = jax.jit(f).lower(X).compile()
    assert case.state() == {"n": 1}
    np.testing.assert_array_equal(compiled(X), 2 * X)


def test_what_is_allowed_is_not_written_by_a_trace():
    case = counting()
    f = jax.jit(jtbridge.wrap(case.fn, backend="xla", purity="allow"))
    for _ in range(3):
        np.testing.assert_array_equal(f(X), 2 * X)
    assert case.state() == {"n": 1}


# --- What is not state -----------------------------------------------------------------------------------------------


class Lazy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mask, self.known, self.ready = None, {}, False

    @functools.cached_property
    def scale(self):
        return torch.full((3,), 2.0)

    def forward(self, x):
        self.ready = True
        if self.mask is None:
            self.mask = torch.triu(torch.ones(3, 3))
        if x.shape not in self.known:
            self.known[x.shape] = torch.arange(3.0)
        return self.mask @ x * self.scale + self.known[x.shape]


@pytest.mark.parametrize("backend", ["xla", "dlpack"])
def test_lazily_built_constants_are_kept(backend):
    module = Lazy()
    want = Lazy()(torch.tensor(np.asarray(X)))
    f = jtbridge.wrap(module, backend=backend)
    for _ in range(2):
        np.testing.assert_allclose(jax.jit(f)(X), want)
        np.testing.assert_allclose(jax.jit(jax.grad(lambda x: f(x).sum()))(X), [2, 4, 6])
    for tensor in (module.mask, module.scale, *module.known.values()):
        assert type(tensor) is torch.Tensor
    torch.testing.assert_close(module(torch.tensor(np.asarray(X))), want)


def test_local_state_is_no_state():
    def f(x):
        seen, n = [], 0
        for row in x:
            seen.append(row)
            n += 1
        it = iter(seen)
        return next(it) * n + random.Random(3).random()

    assert float(jax.jit(jtbridge.wrap(f))(X)) == pytest.approx(3 + random.Random(3).random())


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", [torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm])
def test_torchs_old_hooks_that_assign_weights(norm):
    module = norm(torch.nn.Linear(3, 3)).eval()
    x = torch.tensor(np.asarray(X))
    want = module(x).detach().numpy()
    state = jtbridge.to_jax({**dict(module.named_parameters()), **dict(module.named_buffers())})
    f = jtbridge.wrap(lambda state, x: torch.func.functional_call(module, state, (x,)))
    np.testing.assert_allclose(jax.jit(jtbridge.wrap(module))(X), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(f)(state, X), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(module(x).detach().numpy(), want, rtol=1e-5, atol=1e-6)


def test_reading_state_and_printing_is_not_refused(capsys):
    settings = {"scale": 3.0}

    def f(x):
        print("traced")  # noqa: T201
        return x * settings["scale"]

    np.testing.assert_array_equal(jax.jit(jtbridge.wrap(f))(X), 3 * X)
    assert "traced" in capsys.readouterr().out


# --- Global generators -----------------------------------------------------------------------------------------------

DRAWS: dict[str, Callable[[], float]] = {
    "random.random": lambda: random.random(),
    "random.gauss": lambda: random.gauss(0, 1),
    "random.choice": lambda: random.choice([1.0, 2.0, 3.0]),
    "numpy.random.rand": lambda: float(np.random.rand()),
    "numpy.random.normal": lambda: np.random.normal(size=2)[0],
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("backend", ["xla", "dlpack"])
def test_draws_from_a_global_generator_are_refused(name, backend):
    draw = DRAWS[name]
    random.seed(5)
    np.random.seed(5)
    want = draw()
    random.seed(5)
    np.random.seed(5)
    with pytest.raises(RandomnessError, match=r"test_state_written\.py:\d+.*`rng=`"):
        jax.jit(jtbridge.wrap(lambda x: x * draw(), backend=backend))(X)
    assert draw() == want


def test_other_threads_draw_undisturbed_and_are_not_taken_for_the_function():
    source = random.Random(7)
    want = [source.random() for _ in range(20_000)]
    found: list[float] = []
    draws = np.random.RandomState(7).rand(2_000).tolist()
    found_numpy: list[float] = []

    def draw():
        found.extend(random.random() for _ in range(20_000))
        found_numpy.extend(np.random.rand() for _ in range(2_000))

    def f(x):
        return x * random.random() if len(x) > 5 else x + 1

    random.seed(7)
    np.random.seed(7)
    thread = threading.Thread(target=draw)
    thread.start()
    traced = 0
    while thread.is_alive() or not traced:
        np.testing.assert_array_equal(jax.jit(jtbridge.wrap(f))(X), X + 1)
        with pytest.raises(RandomnessError):
            jax.jit(jtbridge.wrap(f))(jnp.ones(6))
        traced += 1
    thread.join()
    assert found == want
    assert found_numpy == draws


# --- Functions whose state is wanted ---------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=0.1),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True),
}


def training_step(optimizer: str) -> tuple[Callable[..., Any], torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    made = OPTIMIZERS[optimizer](model.parameters())

    def step(x):
        made.zero_grad()
        loss = (model(x) ** 2).sum()
        loss.backward()
        made.step()
        return loss.detach()

    return step, model, made


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("route", ["eager", "jit", "scan"])
def test_training_steps_in_order(optimizer, route):
    step, model, _ = training_step(optimizer)
    x = torch.tensor(np.asarray(X))
    want = [float(step(x)) for _ in range(5)]
    step, ours, made = training_step(optimizer)
    f = jtbridge.wrap(step, effects="ordered")
    if route == "scan":
        found = jax.jit(lambda x: jax.lax.scan(lambda x, _: (x, f(x)), x, None, length=5)[1])(X).tolist()
    else:
        run = jax.jit(f) if route == "jit" else f
        found = [float(run(X)) for _ in range(5)]
    jax.effects_barrier()
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
    for parameter, other in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter, other)
        assert type(parameter.grad) is torch.Tensor
        for value in made.state[parameter].values():
            assert value is None or type(value) in (torch.Tensor, int, float)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_tracing_a_training_step_leaves_no_effect(optimizer):
    step, model, made = training_step(optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    jax.eval_shape(jtbridge.wrap(step, effects="ordered"), X)
    assert [p.grad for p in model.parameters()] == [None, None]
    assert len(made.state) == 0
    for parameter, was in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, was)
    step(torch.ones(3))
    state = [{k: v.clone() for k, v in made.state[p].items() if v is not None} for p in model.parameters()]
    grads = [p.grad.clone() for p in model.parameters()]
    jax.eval_shape(jtbridge.wrap(step, effects="ordered"), jnp.ones((2, 3)))
    for parameter, grad, was in zip(model.parameters(), grads, state, strict=True):
        assert torch.equal(parameter.grad, grad)
        for name, value in was.items():
            assert torch.equal(made.state[parameter][name], value)


@pytest.mark.parametrize("reads_values", [False, True])
def test_a_buffer_that_is_assigned_in_order(reads_values):
    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", torch.zeros(3))
            self.n = 0

        def forward(self, v):
            self.b = self.b + v
            self.n += 1
            if reads_values and float(v.sum()) > 100:
                return self.b * 0
            return self.b * 1

    module = Sum()
    f = jtbridge.wrap(module, effects="ordered")
    found = [f(X).tolist(), jax.jit(f)(X).tolist(), jax.jit(lambda x: f(x))(X).tolist()]
    jax.effects_barrier()
    assert found == [[n * v for v in X.tolist()] for n in (1, 2, 3)]
    assert type(module.b) is torch.Tensor
    assert module.b.tolist() == found[-1]
    assert module.n == 3


class Linked:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def writes_on_one_branch(x: torch.Tensor, written: list) -> torch.Tensor:
    if x.sum() > 0:
        written.append(1)
    return x


def writes_on_the_other_branch(x: torch.Tensor, written: list) -> torch.Tensor:
    if x.sum() > 0:
        return x
    written.append(1)
    return x * 2


def writes_a_size_that_depends_on_data(x: torch.Tensor, written: list) -> torch.Tensor:
    n = x[x > 0].shape[0]
    if n > 1:
        written.append(n)
    return x


def writes_where_branches_differ_in_shape(x: torch.Tensor, written: list) -> torch.Tensor:
    if x.sum() > 0:
        written.append(1)
    return (x if x.sum() > 0 else x[:1]).sum()


def writes_an_object_that_refers_to_itself(x: torch.Tensor, written: list) -> torch.Tensor:
    written.append(Linked())
    return x


@pytest.mark.parametrize("backend", ["auto", "xla", "dlpack", "callback"])
@pytest.mark.parametrize(
    "fn",
    [
        writes_on_one_branch,
        writes_on_the_other_branch,
        writes_a_size_that_depends_on_data,
        writes_where_branches_differ_in_shape,
        writes_an_object_that_refers_to_itself,
    ],
)
def test_what_is_written_on_some_way_through_a_function_is_refused(fn: Callable[..., Any], backend: str):
    written: list[Any] = []
    with pytest.raises(MutationError, match="written"):
        jax.jit(jtbridge.wrap(lambda x: fn(x, written), backend=backend))(X)
    assert written == []


@pytest.mark.parametrize("backend", ["auto", "dlpack"])
def test_a_cache_that_is_filled_on_one_branch_is_kept(backend: str):
    cache: dict[str, torch.Tensor] = {}

    def fn(x: torch.Tensor) -> torch.Tensor:
        if x.sum() < 0:
            return x * 2
        if "ones" not in cache:
            cache["ones"] = torch.ones(3)
        return x * cache["ones"]

    f = jax.jit(jtbridge.wrap(fn, backend=backend))
    assert f(X).tolist() == [1, 2, 4]
    assert f(-X).tolist() == [-2, -4, -8]
    assert cache["ones"].tolist() == [1, 1, 1]
