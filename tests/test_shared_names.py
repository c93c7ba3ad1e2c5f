"""No two classes, and no two functions of different meaning, have the same name."""

import ast
import collections
import pathlib

PACKAGE = pathlib.Path(__file__).parent.parent / "jtbridge"

# The parts that several files must each define: a name stands here with the protocol that gives it its meaning.
ROLES = {
    "a custom operator or an `autograd.Function`": "_forward _backward _save _save_backward _double_backward _fake",
    "a JAX primitive: its rules, and the function that binds it": (
        "bind _impl _abstract _jvp _transpose _batch _lower _policy_rule"
    ),
    "the folder of a kernel (docs/contributing/add-a-kernel.md)": (
        "forward backward cases differentiable_kernel unsupported_reason default candidates "
        "default_forward default_backward candidates_forward candidates_backward _launched"
    ),
    "a rule for one operator of torch: a lowering, a composite rule, a matcher": (
        "_attention _attention_backward _cat _cdist _embedding _functional_batch_norm _gelu _group_norm _layer_norm "
        "_layer_norm_backward _log_softmax _logcumsumexp _mean _native_batch_norm _native_dropout _rms_norm "
        "_rms_norm_backward _softmax _softmax_backward _sort"
    ),
    "a program": "main",
    "Python": "_ __getattr__",
}


def _definitions() -> dict[str, set[str]]:
    found = collections.defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[node.name].add(path.relative_to(PACKAGE).as_posix())  # overloads stand in one file
    return found


def test_no_two_definitions_share_a_name_without_a_shared_role():
    roles = {name for names in ROLES.values() for name in names.split()}
    shared = {name: files for name, files in _definitions().items() if len(files) > 1 and name not in roles}
    assert not shared


def test_each_role_is_filled_in_several_files():
    found = _definitions()
    for names in ROLES.values():
        for name in names.split():
            assert len(found[name]) > 1, f"{name} needs no place among the roles any more"
