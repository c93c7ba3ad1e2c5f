"""Safetensors files with torch's names."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from jtbridge.core.cache_folder import MALFORMED, read_text
from jtbridge.core.messages import kind_of
from jtbridge.errors import ModelError


def write_file(path: str | os.PathLike[str], state_dict: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Write a ``state_dict``. A tied tensor is written under one name; the metadata maps its other names to this one.

    An existing file is replaced when the new one is complete.
    """
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    known: dict[tuple, str] = {}
    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            raise ModelError(
                f"`{name}` is {kind_of(value)}, and a safetensors file has only tensors. Save it with "
                "`torch.save(net.state_dict(params, state), path)`."
            )
        memory = value.data_ptr(), value.shape, value.stride(), value.dtype
        first = known.setdefault(memory, name) if value.numel() else name
        if first == name:
            tensors[name] = value.contiguous()
        else:
            ties[name] = first
    if clash := sorted(ties.keys() & metadata.keys()):
        raise ModelError(f"The metadata has the key `{clash[0]}`, which is another name of a tied weight: rename it.")
    if not all(isinstance(text, str) for text in (*metadata, *metadata.values())):
        raise ModelError("The metadata of a safetensors file must be a dict from str to str.")
    place = pathlib.Path(path)
    with _as_model_errors(f"`{place}` cannot be written", ". A file that was there is unchanged"):
        place = place.resolve()  # a symbolic link is kept, and its target replaced
        if place.exists() and not place.is_file():
            raise ModelError(f"`{place}` is not a regular file, and is not replaced.")
        str(place).encode()  # safetensors can open only names in UTF-8
        incomplete = place.with_name(f".{uuid.uuid4().hex}")
        try:
            save_file(tensors, incomplete, metadata={"format": "pt", **ties, **metadata})
            os.replace(incomplete, place)
        finally:
            with contextlib.suppress(OSError):
                incomplete.unlink(missing_ok=True)


@contextlib.contextmanager
def _as_model_errors(what: str, more: str = "") -> Iterator[None]:
    """Raise the errors of a path or a file as a `ModelError`."""
    from safetensors import SafetensorError

    try:
        yield
    except ModelError:
        raise
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:  # also a loop of links, and a null character
        raise ModelError(f"{what}: {error}{more}.") from error


def read_files(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read a file, or the files of a folder or of an index; return the tensors, and other names for some of them.

    The tensors are views of the mapped files: memory is read when values are used. The other names are the keys of the
    metadata whose values are names of tensors, as ``safetensors.torch.save_model`` writes them. User metadata may look
    the same.
    """
    place = pathlib.Path(path)
    with _as_model_errors(f"`{place}` cannot be opened"):
        if place.is_dir():
            known = [place / "model.safetensors", place / "model.safetensors.index.json"]
            place = next((file for file in known if file.exists()), place)
            if place.is_dir():
                raise ModelError(f"`{place}` has neither `model.safetensors` nor `model.safetensors.index.json`.")
    if place.suffix != ".json":
        return _read_file(place)
    tensors: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    for name in _files_of_index(place):
        more_tensors, more_ties = _read_file(place.parent / name)
        if twice := sorted(tensors.keys() & more_tensors.keys()):
            raise ModelError(f"`{place}` names several files with the tensor `{twice[0]}`: there must be one.")
        tensors |= more_tensors
        ties |= more_ties
    return tensors, ties


def _files_of_index(path: pathlib.Path) -> list[str]:
    _check_can_be_opened(path)
    try:
        names = sorted(set(json.loads(read_text(path))["weight_map"].values()))
        if not all(isinstance(name, str) and name == os.path.basename(name) and name.strip(".") for name in names):
            raise TypeError(f"{names} are not names of files in its folder")
        return names
    except (OSError, *MALFORMED, AttributeError) as error:
        raise ModelError(
            f"`{path}` is not an index of safetensors files: its `weight_map` cannot be read, or it names files "
            "outside of its folder."
        ) from error


def _read_file(path: pathlib.Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    from safetensors import safe_open

    _check_can_be_opened(path)
    what = f"`{path}` is not a safetensors file, or it is damaged"
    with _as_model_errors(what), safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no dict)
        ties = {name: first for name, first in (file.metadata() or {}).items() if first in tensors}
    return tensors, ties


def _check_can_be_opened(path: pathlib.Path) -> None:
    with _as_model_errors(f"`{path}` cannot be opened"):
        str(path).encode()  # safetensors can open only names in UTF-8
        if not path.exists():
            raise ModelError(f"There is no file `{path}`.")
        if not path.is_file():  # opening a pipe would block
            raise ModelError(f"`{path}` is not a regular file.")
        path.open("rb").close()  # safetensors says of a file without permission that there is none
