"""Which arguments a kernel writes to is read from its intermediate representation."""

from __future__ import annotations

from tests.kernels.harness import needs_compiler, needs_triton

pytestmark = [needs_triton, needs_compiler]


def written(kernel, **values):
    import torch

    from jtbridge.triton._ir import kernel_ir
    from jtbridge.triton.launches._mutation_analysis import mutated_parameters

    tensors = {name: torch.float32 for name in kernel.arg_names if name.endswith("_ptr")}
    code = kernel_ir(kernel, {**tensors, **values})
    return mutated_parameters(code, kernel.arg_names)


def test_pointers_through_loops_branches_and_calls():
    from . import odd_kernels as k

    assert written(k.in_a_loop, n=100) == {"out_ptr"}
    assert written(k.one_of_two, flag=3) == {"x_ptr", "y_ptr"}
    assert written(k.by_a_branch, n=100) == {"c_ptr", "b_ptr"}
    assert written(k.in_a_while_loop, n=100) == {"b_ptr"}
    assert written(k.atomically) == {"sum_ptr"}
    assert written(k.swapped, n=100) == {"a_ptr", "b_ptr"}
    assert written(k.nothing) == set()


def test_a_pointer_from_memory_could_be_any():
    from . import odd_kernels as k

    assert written(k.from_memory) is None
