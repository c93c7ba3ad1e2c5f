"""Files that jtbridge reads: reading them never runs code, whatever they contain."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import pickle

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import ModelError

PACKAGE = pathlib.Path(jtbridge.__file__).parent


class Payload:
    """An object that creates a file if it is unpickled."""

    def __reduce__(self):
        return (pathlib.Path.touch, (pathlib.Path("unpickled"),))


@pytest.fixture
def malicious(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Payload()))
    assert pathlib.Path("unpickled").exists()  # the payload works
    pathlib.Path("unpickled").unlink()
    return pickle.dumps(Payload())


def test_no_file_is_unpickled_by_the_package():
    """`core/pickling.py` reads the copy of a wrapped function that a user pickled, and nothing else."""
    calls = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if name.split(".")[0] in ("pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib") or name in (
                "torch.load",
                "torch.jit.load",
                "torch.export.load",
            ):
                calls.setdefault(str(path.relative_to(PACKAGE)), set()).add(name)
    assert calls == {"core/pickling.py": {"pickle.loads", "cloudpickle.dumps"}}


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "weights.pt"])
def test_weights(malicious: bytes, tmp_path: pathlib.Path, name: str):
    (tmp_path / name).write_bytes(malicious)
    net = jtbridge.module(torch.nn.Linear(2, 2))
    with pytest.raises(ModelError, match=name):
        net.load_safetensors(tmp_path / name)
    assert not pathlib.Path("unpickled").exists()


def test_an_index_that_names_a_pickle(malicious: bytes, tmp_path: pathlib.Path):
    (tmp_path / "weights.bin").write_bytes(malicious)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": "weights.bin"}}))
    with pytest.raises(ModelError, match=r"weights\.bin` is not a safetensors file"):
        jtbridge.module(torch.nn.Linear(2, 2)).load_safetensors(tmp_path)
    assert not pathlib.Path("unpickled").exists()


@pytest.mark.parametrize("content", ["", "[]", '{"weight_map": {"weight": 3}}', '{"weight_map": []}', "[" * 100_000])
def test_a_damaged_index(content: str, tmp_path: pathlib.Path):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match="is not an index of safetensors files"):
        jtbridge.module(torch.nn.Linear(2, 2)).load_safetensors(tmp_path)


def test_a_damaged_file_and_one_that_is_cut_off(tmp_path: pathlib.Path):
    net = jtbridge.module(torch.nn.Linear(2, 2))
    params, state = net.init()
    file = tmp_path / "model.safetensors"
    net.save_safetensors(file, params, state)
    whole = file.read_bytes()
    for damaged in (b"", whole[:7], whole[:-1], b"\xff" * 8 + whole[8:], whole[:20] + b"}" + whole[21:]):
        file.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"model\.safetensors` is not a safetensors file, or it is damaged"):
            net.load_safetensors(file)
    file.write_bytes(whole)
    np.testing.assert_array_equal(net.load_safetensors(file)[0]["weight"], params["weight"])


def test_full_disk_does_not_damage_existing_files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    import safetensors.torch

    net = jtbridge.module(torch.nn.Linear(2, 2))
    params, state = net.init()
    file = tmp_path / "model.safetensors"
    net.save_safetensors(file, params, state)

    def full(tensors: object, path: pathlib.Path, **options: object) -> None:
        pathlib.Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", full)
        with pytest.raises(ModelError, match=r"cannot be written: .*No space left.*unchanged"):
            net.save_safetensors(file, {**params, "weight": jnp.zeros((2, 2))}, state)
    assert list(tmp_path.iterdir()) == [file]
    np.testing.assert_array_equal(net.load_safetensors(file)[0]["weight"], params["weight"])


@pytest.mark.parametrize("path", ["file/m.safetensors", "loop", "a\0b", "\udcff.safetensors", "n" * 300])
def test_unusable_paths(path: str, tmp_path: pathlib.Path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(tmp_path.iterdir())
    net = jtbridge.module(torch.nn.Linear(2, 2))
    params, state = net.init()
    with pytest.raises(ModelError, match=r"cannot be written: .*unchanged"):
        net.save_safetensors(f"{tmp_path}/{path}", params, state)
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(ModelError, match=r"cannot be opened|There is no file"):
        net.load_safetensors(f"{tmp_path}/{path}")


def test_long_file_names_and_invalid_unicode(tmp_path: pathlib.Path):
    net = jtbridge.module(torch.nn.Linear(2, 2))
    params, state = net.init()
    file = tmp_path / ("n" * 250)
    net.save_safetensors(file, params, state)
    np.testing.assert_array_equal(net.load_safetensors(file)[0]["weight"], params["weight"])
    with pytest.raises(ModelError, match=r"cannot be written: .*unchanged"):
        net.save_safetensors(file, params, state, metadata={"key": "\ud800"})
    with pytest.raises(ModelError, match=r"There is no file"):
        net.load_safetensors(tmp_path / "index.json")


def test_arrays_outlive_the_file_that_they_were_read_from(tmp_path: pathlib.Path):
    net = jtbridge.module(torch.nn.Linear(500, 500))
    params, state = net.init()
    file = tmp_path / "model.safetensors"
    net.save_safetensors(file, params, state)
    loaded, _ = net.load_safetensors(file)
    with file.open("r+b") as written:  # in place, as another program may do
        written.seek(1000)
        written.write(bytes(400_000))
    np.testing.assert_array_equal(loaded["weight"], params["weight"])
    file.write_bytes(b"")
    np.testing.assert_array_equal(loaded["weight"], params["weight"])


def _saved(folder: pathlib.Path, index: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.parametrize("name", ["../secret.safetensors", "{folder}/secret.safetensors", "", ".", "..", "x" * 5000])
def test_index_may_name_only_files_of_its_folder(tmp_path: pathlib.Path, name: str):
    net = jtbridge.module(torch.nn.Linear(2, 2))
    params, state = net.init()
    net.save_safetensors(tmp_path / "secret.safetensors", params, state)
    _saved(tmp_path / "model", dict.fromkeys(["weight", "bias"], name.format(folder=tmp_path)))
    with pytest.raises(ModelError, match=r"outside of its folder|cannot be opened"):
        net.load_safetensors(tmp_path / "model")


def test_a_tensor_in_two_files_of_an_index_is_refused(tmp_path: pathlib.Path):
    net = jtbridge.module(torch.nn.Linear(2, 2))
    params, state = net.init()
    _saved(tmp_path / "model", {"weight": "a.safetensors", "bias": "b.safetensors"})
    for name in ("a", "b"):
        net.save_safetensors(tmp_path / "model" / f"{name}.safetensors", params, state)
    with pytest.raises(ModelError, match="names several files with the tensor `bias`"):
        net.load_safetensors(tmp_path / "model")


@pytest.mark.parametrize("by_index", [False, True])
def test_a_pipe_is_not_read_as_weights(tmp_path: pathlib.Path, by_index: bool):
    net = jtbridge.module(torch.nn.Linear(2, 2))
    os.mkfifo(tmp_path / "f.safetensors")
    _saved(tmp_path, {"weight": "f.safetensors"})
    with pytest.raises(ModelError, match="is not a regular file"):
        net.load_safetensors(tmp_path if by_index else tmp_path / "f.safetensors")


def test_weights_are_written_through_links_and_over_no_device(tmp_path: pathlib.Path):
    net = jtbridge.module(torch.nn.Linear(2, 2))
    params, state = net.init()
    link = tmp_path / "latest.safetensors"
    link.symlink_to(tmp_path / "a.safetensors")
    net.save_safetensors(link, params, state)
    assert link.is_symlink()
    np.testing.assert_array_equal(net.load_safetensors(tmp_path / "a.safetensors")[0]["bias"], params["bias"])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelError, match="is not a regular file, and is not replaced"):
        net.save_safetensors(tmp_path / "pipe", params, state)


@pytest.mark.parametrize(
    ("metadata", "text"), [({"b.weight": "c"}, "another name of a tied"), ({"n": 3}, "must be a dict from str to str")]
)
def test_metadata_that_would_damage_a_file(tmp_path: pathlib.Path, metadata, text):
    model = torch.nn.Module()
    model.a, model.b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    model.b.weight = model.a.weight
    net = jtbridge.module(model)
    params, state = net.init()
    with pytest.raises(ModelError, match=text):
        net.save_safetensors(tmp_path / "a.safetensors", params, state, metadata=metadata)
