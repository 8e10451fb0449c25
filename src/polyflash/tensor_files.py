"""Q, K, V from files and the output back into one of the same kind: .safetensors, .npz, .npy. No pickle is
ever read."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyflash.errors import SpecError, spec_error
from polyflash.options import FILES


def read_qkv(
    paths: Sequence[str], *, q: str | None, k: str | None, v: str | None, layout: str
) -> tuple[list[str], list[Tensor]]:
    """Names and tensors of q, k, v, each of 3 or each of 4 dimensions.

    `paths` is one .safetensors or .npz, whose tensors `q`, `k`, `v` name (None: found by their names), or
    three .npy. Raises SpecError: not such files, no such names, no floats, other ranks."""
    files = [Path(path) for path in paths]
    suffixes = {file.suffix for file in files}
    if suffixes == {".npy"} and len(files) == 3:
        names = [file.name for file in files]
        found = [_from_numpy(file.name, _load_numpy(file)) for file in files]
    elif suffixes <= {".safetensors", ".npz"} and len(files) == 1:
        read = _read_safetensors if suffixes == {".safetensors"} else _read_npz
        names, found = read(files[0], {"q": q, "k": k, "v": v})
    else:
        change = "The suffix says what a file is."
        raise spec_error("files", " ".join(paths), "one .safetensors or .npz, or three .npy", change)
    ranks = {x.ndim for x in found}
    if ranks != {3} and ranks != {4}:
        shapes = ", ".join(str(tuple(x.shape)) for x in found)
        inner = "seqlen, heads" if layout == "bshd" else "heads, seqlen"
        change = "layout says in which order; it is never guessed."
        raise spec_error("q, k, v", shapes, f"([batch,] {inner}, head_dim) each", change)
    return names, found


def _read_safetensors(path: Path, asked: dict[str, str | None]) -> tuple[list[str], list[Tensor]]:
    safetensors = _safetensors()
    with _reading(path, "a .safetensors file"), safetensors.safe_open(path, framework="pt") as file:
        names = _named(asked, list(file.keys()))
        return names, [file.get_tensor(name) for name in names]


def _read_npz(path: Path, asked: dict[str, str | None]) -> tuple[list[str], list[Tensor]]:
    with _load_numpy(path) as file:
        names = _named(asked, list(file.files))
        return names, [_from_numpy(name, _entry(path, file, name)) for name in names]


def _load_numpy(path: Path) -> Any:
    with _reading(path, f"a {path.suffix} file of plain numbers"):
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray) is (path.suffix == ".npz"):
            raise ValueError("the content of another kind of file")
        return found


def _entry(path: Path, file: Any, name: str) -> np.ndarray:
    with _reading(f"{path}: {name}", "plain numbers"):
        inside = (i.file_size for i in file.zip.infolist() if i.filename in (name, f"{name}.npy"))
        size = max(inside, default=0)
        if size > _memory():
            raise ValueError(f"{size:,} bytes, more than the memory of this machine")
        found = file[name]
        if not isinstance(found, np.ndarray):
            raise ValueError("no array")
        return found


def _memory() -> float:
    """Bytes of this machine's memory, as far as the system tells."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return math.inf


@contextlib.contextmanager
def _reading(what: object, wanted: str) -> Iterator[None]:
    """Says in one line what is wrong with a damaged file: readers raise whatever their parsers do."""
    try:
        yield
    except Exception as error:
        if isinstance(error, SpecError) or (isinstance(error, OSError) and error.filename):
            raise
        told = " ".join(str(error).split()).partition(". ")[0] or type(error).__name__
        told = told if len(told) <= 160 else f"{told[:120]}..."
        raise SpecError(f"{what}: got {told}, wanted {wanted}") from None


def _from_numpy(name: str, array: np.ndarray) -> Tensor:
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        change = "Convert it; bfloat16 needs a .safetensors file."
        raise spec_error(f"{name} dtype", array.dtype, "float16, float32 or float64", change)
    return torch.from_numpy(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")))


def _named(asked: dict[str, str | None], names: list[str]) -> list[str]:
    """The tensors for q, k, v: those asked for; else by sibling of the one named for q, else by last word."""
    chosen = []
    for role, name in asked.items():
        sibling = asked["q"][:-1] + role if asked["q"] and asked["q"].endswith("q") else role
        fitting = [n for n in names if re.split(r"[./_-]", n)[-1].lower() == role]
        if name is None:
            name = sibling if sibling in names else fitting[0] if len(fitting) == 1 else None
        if name not in names:
            listed = ", ".join((fitting if len(fitting) > 1 else names)[:12]) or "a file with tensors"
            got = name or (f"{len(fitting)} that fit" if fitting else f"no {role} in the file")
            raise spec_error(role, got, f"one of {listed}", f"Pass --{role} NAME.")
        chosen.append(name)
    return chosen


def output_paths(output: str, inputs: Sequence[str]) -> list[Path]:
    """The files to write: one for `out` and `lse`, or two .npy; in the family of the suffix of `output`, else
    of the input's. SpecError if one of them is an input, by whatever name."""
    path = Path(output)
    suffix = path.suffix if path.suffix in FILES else Path(inputs[0]).suffix
    path = path if path.suffix == suffix else path.with_name(path.name + suffix)
    paths = [path, path.with_suffix(".lse.npy")] if suffix == ".npy" else [path]
    for written in paths:
        for name in inputs:
            if written.exists() and written.samefile(name):
                got = written if str(written) == name else f"{written}, which is {name}"
                raise spec_error("-o", got, "another file than the inputs", "Name a new file.")
    return paths


def write_output(paths: Sequence[Path], out: Tensor, lse: Tensor, *, metadata: dict[str, str]) -> None:
    """Writes `out` and `lse` to the files that `output_paths` named."""
    path, suffix = paths[0], paths[0].suffix
    tensors = {"out": out.contiguous(), "lse": lse.contiguous()}
    if suffix == ".safetensors":
        _safetensors()
        from safetensors.torch import save_file

        save_file(tensors, path, metadata=metadata)
        return
    # numpy has no bfloat16: float32 holds every value of it
    arrays = {n: (x.float() if x.dtype is torch.bfloat16 else x).numpy() for n, x in tensors.items()}
    if suffix == ".npz":
        np.savez(path, out=arrays["out"], lse=arrays["lse"])
    else:
        for written, array in zip(paths, arrays.values(), strict=True):
            np.save(written, array)


def _safetensors() -> Any:
    try:
        import safetensors
    except ImportError:
        told = "got no such package, wanted it for this file. pip install safetensors"
        raise SpecError(f"safetensors: {told}") from None
    return safetensors
