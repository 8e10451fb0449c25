"""Tuned configs of this device on disk: JSON, one file per device and set of versions.

A file is read when a route is made, and believed only as a whole: schema, device, driver and versions must be
those of now, each entry must be plain numbers and words, and the config's own class has the last word. Any
trouble is a reason in `explain`, never an error. An entry decides a route's config, so its key holds nothing
that a route does not: classes of lengths, no length and no batch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from polyflash import env
from polyflash.cache import PrivateFolder
from polyflash.errors import SpecError
from polyflash.spec import MANY_KEYS, AttentionSpec, Feature, Phase, length_class
from polyflash.target import cpu_model, detect, installed_version

if TYPE_CHECKING:
    from polyflash.capability import Capability
    from polyflash.target import Target

SCHEMA = "polyflash.tuned/1"
SUFFIX = ".json"
MAX_BYTES = 4 << 20
_NOT_IN_KEY = frozenset((Feature.LSE, Feature.GQA, Feature.HEAD_DIM_V))  # said by sizes, or of no effect


@dataclass(frozen=True, slots=True)
class Entry:
    """A tuned config: its kind and fields, the seconds of it and of the untuned one, when it was made, and
    how many of how many candidates it was held against so far."""

    kind: str
    values: dict[str, Any]
    seconds: float
    untuned_seconds: float
    when: str = ""
    tried: int = 0
    of: int = 0


@dataclass(frozen=True, slots=True)
class Book:
    """The entries of a file by key; `why` says why there are none of it, "" for an absent file."""

    entries: dict[str, Entry]
    why: str = ""


def folder() -> str:
    """The folder of tuned files, whether or not it exists."""
    chosen = env.CACHE_DIR.read()
    return os.path.join(chosen or os.path.join(env.user_cache_home(), "polyflash"), "tuned")


def file_of(target: Target) -> str:
    """The file of a device that is here, with the versions of now."""
    whose = json.dumps(identity(target), sort_keys=True).encode()
    name = target.name.replace(":", "-")
    return os.path.join(folder(), f"{name}-{hashlib.sha256(whose).hexdigest()[:12]}{SUFFIX}")


def identity(target: Target) -> dict[str, str]:
    """The identity a tuned config holds for: the device, its driver, and the versions that make its code."""
    device, driver = _device(target.kind, target.name)
    compiler = "numba" if target.kind == "cpu" else "triton"
    return {
        **{"target": str(target), "cores": str(target.cores)},
        **{"device": device, "driver": driver, compiler: dict(target.packages).get(compiler, "")},
        **{name: _version(name) or "0" for name in ("polyflash", "torch")},
    }


_version = lru_cache(maxsize=8)(installed_version)


@lru_cache(maxsize=16)
def _device(kind: str, name: str) -> tuple[str, str]:
    """Name and driver of the first device called `name`; of a CPU its model, and no driver."""
    if kind == "cpu":
        return cpu_model(), ""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = (torch.cuda.get_device_name(i) for i in range(count) if detect("cuda", i).name == name)
    return next(here, ""), gpu_driver()


def gpu_driver() -> str:
    """The kernel driver's version as its module says it, else that of CUDA or ROCm."""
    for path in ("/sys/module/nvidia/version", "/sys/module/amdgpu/version"):
        with contextlib.suppress(OSError), open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    import torch

    return str(torch.version.cuda or torch.version.hip or "")


def key_of(row: Capability, spec: AttentionSpec) -> str:
    """The key of an entry, as text; "" for calls that take no tuned config. Those whose bits no length may
    change are such: another length is another entry."""
    if Feature.BATCH_INVARIANT in spec.features:
        return ""
    features = "+".join(sorted(f.name.lower() for f in spec.features - _NOT_IN_KEY))
    heads = f"h{spec.num_q_heads}/{spec.num_kv_heads}" if row.phase is Phase.DECODE else f"g{spec.group}"
    keys = "many" if spec.seqlen_k >= MANY_KEYS else "few"
    dims = f"d{spec.head_dim}/{spec.head_dim_v}"
    on = f" on {row.runs_on()}" if row.runs_on is not None else ""
    lengths = f"r{length_class(spec.seqlen_q)} {keys}"
    return f"{row.name} {spec.dtype} {heads} {dims} {lengths} {features}".strip() + on


def find(row: Capability, spec: AttentionSpec, target: Target, kind: type) -> tuple[Any, str]:
    """The tuned config of class `kind` for `spec`, or None, and why there is none although a file is here."""
    if not target.packages or env.NO_CACHE.is_set():  # a simulated device, or one told to keep nothing
        return None, ""
    key = key_of(row, spec)
    if not key or not os.path.isdir(folder()):  # most users never tune, and a route is to cost them one look
        return None, ""
    book = read(target)
    entry = book.entries.get(key)
    if entry is None:
        return None, book.why
    if entry.kind != kind_of(kind):
        return None, f"tuned file: {key} has a {entry.kind}, wanted {kind_of(kind)}"
    if set(entry.values) != {f.name for f in fields(kind)}:
        return None, f"tuned file: {key} has other fields than {kind.__name__}"
    try:
        return kind(**entry.values), ""
    except (SpecError, TypeError, ValueError) as error:
        return None, f"tuned file: {key}: {error}"


def kind_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def read(target: Target) -> Book:
    """The entries of this device and these versions, from memory while the file stays as it is."""
    path = file_of(target)
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        prefix = target.name.replace(":", "-") + "-"
        with contextlib.suppress(OSError):
            if others := [n for n in os.listdir(folder()) if n.startswith(prefix) and n.endswith(SUFFIX)]:
                return Book({}, f"tuned files: {len(others)} of other versions or drivers, none of these")
        return Book({})
    return _read(path, status.st_mtime_ns, status.st_size, status.st_ino, json.dumps(identity(target)))


@lru_cache(maxsize=8)
def _read(path: str, _mtime: int, _size: int, _inode: int, wanted: str) -> Book:
    place, name = os.path.split(path)
    try:
        with PrivateFolder.open(place) as tuned:
            return Book(decode(tuned.read(name, MAX_BYTES), json.loads(wanted)))
    except (OSError, ValueError, RecursionError) as error:
        return Book({}, f"tuned file {name} is ignored: {error}")


def decode(data: bytes, wanted: dict[str, str]) -> dict[str, Entry]:
    """The entries in `data`; ValueError unless all is as `encode` writes it, for the identity `wanted`."""
    content = json.loads(data.decode("utf-8"))
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"no {SCHEMA}")
    made_for = content.get("made_for")
    if not isinstance(made_for, dict):
        raise ValueError("it does not say what it was made for")
    if made_for != wanted:
        odd = sorted(n for n in {*made_for, *wanted} if made_for.get(n) != wanted.get(n))
        told = ", ".join(f"{n} {made_for.get(n)!r}, here {wanted.get(n)!r}" for n in odd)
        raise ValueError(f"made for {told}")
    entries = content.get("entries")
    if not isinstance(entries, dict):
        raise ValueError("it has no entries")
    return {key: _entry(key, found) for key, found in entries.items()}


def _entry(key: str, found: Any) -> Entry:
    if not isinstance(found, dict) or set(found) != {f.name for f in fields(Entry)}:
        raise ValueError(f"{key} has other fields than an entry")
    values = found["values"]
    plain = isinstance(values, dict) and all(type(x) in (int, bool, str, float) for x in values.values())
    times = all(type(found[n]) is float and found[n] > 0 for n in ("seconds", "untuned_seconds"))
    counts = all(type(found[n]) is int and found[n] >= 0 for n in ("tried", "of"))
    words = isinstance(found["kind"], str) and isinstance(found["when"], str)
    if not (plain and times and counts and words):
        raise ValueError(f"{key} is not made of plain values")
    return Entry(**found)


def encode(entries: dict[str, Entry], made_for: dict[str, str]) -> bytes:
    plain = {key: asdict(entry) for key, entry in sorted(entries.items())}
    content = {"schema": SCHEMA, "made_for": made_for, "entries": plain}
    return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()


def keep(target: Target, changed: dict[str, Entry]) -> str:
    """Adds entries to this device's file; two that write at once lose nothing of each other, and a damaged
    file is written anew. Returns the path; OSError if it cannot be written."""
    path = file_of(target)
    name = os.path.basename(path)
    with PrivateFolder.open(folder(), create=True) as tuned, tuned.lock(name):
        try:
            before = decode(tuned.read(name, MAX_BYTES), identity(target))
        except (OSError, ValueError, RecursionError):
            before = {}
        tuned.publish(name, encode({**before, **changed}, identity(target)))
    return path


def forget(target: Target) -> bool:
    """Removes this device's file; whether there was one."""
    try:
        os.unlink(file_of(target))
    except OSError:
        return False
    return True


def report(target: Target) -> str:
    """One line on this device's file for reports: what it holds, or why it is ignored; "" without one."""
    if env.NO_CACHE.is_set() or not os.path.isdir(folder()):
        return ""
    book = read(target)
    if book.why or not book.entries:
        return book.why
    return f"{len(book.entries)} tuned configs of {target.name} in {file_of(target)}"
