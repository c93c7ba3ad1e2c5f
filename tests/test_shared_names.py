"""No two classes, and no two functions of different meaning, share a name; a leading underscore does not count."""

import ast
import collections
import pathlib
from typing import NamedTuple

PACKAGE = pathlib.Path(__file__).parent.parent / "jtbridge"


class Role(NamedTuple):
    """A part that several files must each define, with the protocol that gives its names their meaning.

    Attributes:
        protocol: the protocol.
        folders: the folders and files that follow it; "" for all.
        names: the names, without a leading underscore.
    """

    protocol: str
    folders: str
    names: str


ROLES = (
    Role(
        "a custom operator or an `autograd.Function`",
        "capture/chains capture/rewrites reverse",
        "forward backward save save_backward double_backward fake",
    ),
    Role(
        "a JAX primitive: its rules, and the function that binds it",
        "kernels lowerings primitives reverse translate triton/launches",
        "bind impl abstract jvp transpose batch lower policy_rule",
    ),
    Role(
        "the folder of a kernel (docs/contributing/add-a-kernel.md)",
        "kernels",
        "forward backward cases differentiable_kernel default candidates "
        "default_forward default_backward candidates_forward candidates_backward launched",
    ),
    Role("a part that cannot run everything", "_backends kernels triton", "unsupported_reason"),
    Role(
        "one operator: its definition, kernel, lowering, composite rule or matcher",
        "_compat capture/chains capture/rewrites kernels lowerings reverse transforms",
        "attention attention_backward cat cdist cross_entropy cross_entropy_backward ctc_loss ctc_loss_backward "
        "embedding functional_batch_norm gated_backward gated_product gelu group_norm grouped_mm layer_norm "
        "layer_norm_backward log_softmax logcumsumexp lu_solve mean native_batch_norm native_dropout recurrent "
        "recurrent_backward recurrent_double_backward rms_norm rms_norm_backward rope softmax softmax_backward "
        "solve_triangular sort start_of_call",
    ),
    Role("a program", "__main__.py diagnosis", "main"),
    Role("Python", "", "_ __getattr__"),
)


def _definitions() -> dict[str, set[str]]:
    """Return the files that define each name, without the leading underscore of the name."""
    found = collections.defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                is_of_python = node.name == "_" or node.name.startswith("__")
                name = node.name if is_of_python else node.name.removeprefix("_")
                found[name].add(path.relative_to(PACKAGE).as_posix())  # a set: overloads of a function share a file
    return found


def _of_role(role: Role, files: set[str]) -> set[str]:
    """Return the files in which a name may have the meaning that a role gives it."""
    folders = role.folders.split()
    return {file for file in files if not folders or any(f"{file}/".startswith(f"{folder}/") for folder in folders)}


def test_no_two_definitions_share_a_name_without_a_shared_role():
    shared = {name: files for name, files in _definitions().items() if len(files) > 1}
    for role in ROLES:
        for name in role.names.split():
            shared[name] = shared.get(name, set()) - _of_role(role, shared.get(name, set()))
    assert not {name: files for name, files in shared.items() if files}


def test_each_role_is_filled_in_several_files():
    found = _definitions()
    for role in ROLES:
        for name in role.names.split():
            assert len(_of_role(role, found[name])) > 1, f"{name} needs no place among the roles any more"
