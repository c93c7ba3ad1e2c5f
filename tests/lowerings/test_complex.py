"""Complex numbers where torch's semantics differ from JAX's."""

import torch

from .harness import check

NAN, INF = float("nan"), float("inf")
COMPLEX = torch.tensor([[0j, 1 + 2j, complex(-2, -0.0)], [0.5j, complex(NAN, 1), complex(INF, -1)]])
REAL = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0, -3.0])


def test_conjugates():
    check(lambda x: (x.conj(), x.conj_physical(), x.conj().resolve_conj(), x.conj().imag, -x.conj(), x.mH @ x), COMPLEX)
    check(lambda x: (x.conj(), x.conj_physical()), REAL)


def test_views_as_pairs():
    check(lambda x: (torch.view_as_real(x), torch.view_as_complex(torch.view_as_real(x) * 2), x.real, x.imag), COMPLEX)


def test_writing_into_a_part_of_a_complex_tensor():
    def function(x):
        y = x.clone()
        y.imag.mul_(2)
        y.conj().real.add_(1)
        return y

    check(function, COMPLEX)


def test_angles():
    check(lambda x, y: (torch.angle(x), torch.angle(y)), COMPLEX, REAL)
    check(lambda x, y: (torch.angle(x), torch.angle(y)), torch.tensor([-3, 0, 4]), torch.tensor([True, False]))


def test_absolute_values_do_not_overflow():
    check(lambda x: (x.abs(), x.sgn()), torch.tensor([1e38 + 1e38j, 1e-30 + 1e-30j, 0j, 3 + 4j]))
    check(torch.sgn, torch.tensor([complex(INF, 0), complex(NAN, 1), complex(1, -INF)]))


def test_complex_numbers_from_parts():
    check(torch.complex, torch.tensor([1.0, -0.0]), torch.tensor([[2.0], [NAN]]))
    check(torch.polar, torch.tensor([1.0, 2.0, 0.0]), torch.tensor([0.5, -3.0, 1.0]), grad=True)


def test_gradients_through_complex_numbers():
    def function(x, y):
        z = torch.complex(x, y)
        return (z * z.conj() + z.exp() / (z + 2)).abs(), torch.angle(z), torch.view_as_real(z.sqrt()), z.sgn().real

    check(function, torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0]), grad=True)
    check(lambda x, y: torch.complex(x, y).abs(), torch.zeros(2), torch.zeros(2), grad=True)


def test_the_absolute_value_of_an_infinite_number_is_infinite():
    x = torch.tensor([complex("inf+nanj"), complex("nan-infj"), complex("nan+1j"), 3 + 4j])
    check(torch.abs, x)
