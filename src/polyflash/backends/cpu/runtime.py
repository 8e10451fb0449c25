"""Native code by key: from memory, else from this user's cache of compiled objects, else compiled.

A cached object is loaded with llvmlite alone: milliseconds, against 0.1 s to import numba and seconds to
compile. An object is code, so the folder must be the user's own and writable by nobody else: to share a
cache folder is to share the right to run code. Whatever looks wrong is a miss, and no trouble with the disk
stops a call.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import platform
import secrets
import stat
import struct
import sys
import threading
import time
import warnings
from dataclasses import dataclass, replace
from typing import Any, Protocol

from polyflash import env, target

SCHEMA = 2
MAX_OBJECT_BYTES = 64 << 20
MAX_KEY_BYTES = 4096
KEPT_DAYS, KEPT_ENTRIES = 30, 512  # an entry nobody loaded for so long goes; beyond so many, the oldest go
DEFAULT_BUILDER = "polyflash.backends.cpu.forward"
FORK_PATIENCE_S = 10.0  # a fork waits this long for a compilation, so that the child gets a compiler at rest

_SUFFIX, _UNFINISHED = ".pfo", ".tmp"
_MAGIC = b"PFOBJ\0"
_HEADER = struct.Struct("<6sHIIQ32s32s")  # magic, schema, bytes of key, symbol, object; origin, checksum
_DAY_S = 86400.0
_C_LIBRARY = frozenset(
    ("memcpy", "memmove", "memset", "_GLOBAL_OFFSET_TABLE_")
)  # a loop may become such a call


class Key(Protocol):
    """What `load` takes: hashable, with a name that tells all generated code apart.

    A key may have a `builder`: the module whose `build(key)` returns the numba cfunc (default: the forward
    kernels). Functions the cfunc calls need `forceinline=True`, or the object keeps numba's way to raise.
    """

    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """The folder of compiled objects, how many it holds, their bytes; `refusal` says why it is not used."""

    path: str
    entries: int
    bytes: int
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One file of the cache folder: its bytes, the days since it was last loaded, and its key ("" if it is no
    entry). `stale`: made by other sources, versions or another CPU than this; None if that cannot be known.
    """

    file: str
    bytes: int
    days: float
    key: str
    stale: bool | None


@dataclass(frozen=True, slots=True)
class _Object:
    """Machine code, the name of its entry point, and what it was made for and by."""

    symbol: str
    code: bytes
    key: str = ""
    origin: bytes = bytes(32)


_addresses: dict[Any, int] = {}
_engines: list[Any] = []  # an engine owns its code, so it lives as long as the process
_warned: set[str] = set()
_lock = threading.RLock()


def load(key: Key) -> int:
    """The native address of the code that `key` names; loaded or compiled by one thread, once per process."""
    address = _addresses.get(key)
    if address is None:
        with _lock:
            address = _addresses.get(key)
            if address is None:
                address = _addresses[key] = _link(_find_or_compile(key))
    return address


def cache_path() -> str:
    """The folder of compiled objects, whether or not it exists."""
    return env.CACHE_DIR.read() or os.path.join(env.user_cache_home(), "polyflash", "kernels")


def cache_info() -> CacheInfo:
    """What the cache folder holds now."""
    path = cache_path()
    try:
        folder = _open_folder(create=False)
    except FileNotFoundError:
        return CacheInfo(path, 0, 0)
    except OSError as error:
        return CacheInfo(path, 0, 0, str(error))
    try:
        sizes = [status.st_size for _, status in _files(folder, _SUFFIX)]
        return CacheInfo(path, len(sizes), sum(sizes))
    finally:
        os.close(folder)


def cache_entries() -> list[CacheEntry]:
    """Every entry of the cache folder, by key; OSError if the folder cannot be trusted."""
    try:
        folder = _open_folder(create=False)
    except FileNotFoundError:
        return []
    try:
        here = _origin()
    except ImportError:  # without a compiler nothing says what it would make
        here = b""
    found = []
    try:
        for name, status in _files(folder, _SUFFIX):
            key, origin = _peek(folder, name)
            stale = not key or origin != here if here else None
            days = (time.time() - status.st_mtime) / _DAY_S
            found.append(CacheEntry(name, status.st_size, days, key, stale))
    finally:
        os.close(folder)
    return sorted(found, key=lambda entry: (entry.key, entry.days))


def clear_cache(*, stale_only: bool = False) -> int:
    """Removes every compiled object from the folder, or those alone that are `stale` here; returns how many.
    Code that is loaded stays loaded."""
    try:
        kept = {entry.file for entry in cache_entries() if not entry.stale} if stale_only else set()
        folder = _open_folder(create=False)
    except OSError:
        return 0
    try:
        names = [name for name, _ in _files(folder, _SUFFIX, _UNFINISHED) if name not in kept]
        return sum(_removed(folder, name) and name.endswith(_SUFFIX) for name in names)
    finally:
        os.close(folder)


def _purge(folder: int) -> None:
    """Removes entries that nobody loaded for `KEPT_DAYS`, the oldest beyond `KEPT_ENTRIES`, and what a killed
    process left unfinished a day ago: sources and versions change, and nobody asks for old entries again."""
    now = time.time()
    files = sorted((now - status.st_mtime, name) for name, status in _files(folder, _SUFFIX, _UNFINISHED))
    entries = [name for _, name in files if name.endswith(_SUFFIX)]
    old = [name for age, name in files if age > (KEPT_DAYS if name.endswith(_SUFFIX) else 1) * _DAY_S]
    for name in {*old, *entries[KEPT_ENTRIES:]}:
        _removed(folder, name)


def _files(folder: int, *suffixes: str) -> list[tuple[str, os.stat_result]]:
    """Files of the folder with one of `suffixes`, except those another process removes meanwhile."""
    found = []
    for name in os.listdir(folder):
        if name.endswith(suffixes):
            with contextlib.suppress(OSError):
                found.append((name, os.stat(name, dir_fd=folder, follow_symlinks=False)))
    return found


def _removed(folder: int, name: str) -> bool:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        return False
    return True


def _peek(folder: int, name: str) -> tuple[str, bytes]:
    """Key and origin in the header of an entry; ("", b"") if it is none. The checksum is not checked."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return "", b""
    try:
        data = os.read(file, _HEADER.size + MAX_KEY_BYTES)
        magic, schema, key_bytes, _, _, origin, _ = _HEADER.unpack_from(data)
        if (magic, schema) != (_MAGIC, SCHEMA) or key_bytes > MAX_KEY_BYTES:
            return "", b""
        return data[_HEADER.size : _HEADER.size + key_bytes].decode(), origin
    except (OSError, ValueError, struct.error):
        return "", b""
    finally:
        os.close(file)


def entry_name(key: Key) -> str:
    """The file name of `key`: a digest of everything its code depends on, so that a stale entry is never met.

    That is where its code comes from, the key's builder and its name.
    """
    parts = _origin().hex(), _builder(key), key.name
    return hashlib.sha256("\0".join(parts).encode()).hexdigest() + _SUFFIX


def _origin() -> bytes:
    """A digest of the sources of this backend, the versions that generate code, and the CPU."""
    import llvmlite
    import llvmlite.binding as llvm

    device = target.detect("cpu")
    parts = (
        _sources_digest(os.path.dirname(__file__)),
        getattr(sys.modules["polyflash"], "__version__", ""),
        dict(device.packages).get("numba", ""),
        llvmlite.__version__,
        ".".join(map(str, llvm.llvm_version_info)),
        llvm.get_process_triple(),
        llvm.get_host_cpu_name(),
        target.host_arch(),
        " ".join(sorted(target.cpu_flags())),
        " ".join((device.name, *sorted(device.features))),
    )
    return hashlib.sha256("\0".join(parts).encode()).digest()


def _find_or_compile(key: Key) -> _Object:
    folder, name = None, ""
    if not env.NO_CACHE.is_set():
        try:
            name = entry_name(key)
            folder = _open_folder(create=True)
        except OSError as error:
            _warn_once(f"polyflash compiles CPU kernels anew in every process, for want of a cache: {error}")
    if folder is None:
        return _compile(key, "once per process")
    try:
        found = _read(folder, name)
        if found is None:
            found = _compile(key, "once per machine")
            if _compiler_is_default():
                _write(folder, name, replace(found, key=key.name, origin=_origin()))
                _purge(folder)
        return found
    finally:
        os.close(folder)


def _builder(key: Key) -> str:
    return getattr(key, "builder", DEFAULT_BUILDER)


@functools.lru_cache(maxsize=4)
def _sources_digest(folder: str) -> str:
    """A digest of every Python file in `folder`, by name and contents."""
    digest = hashlib.sha256()
    for name in sorted(os.listdir(folder)):
        if name.endswith(".py"):
            with open(os.path.join(folder, name), "rb") as file:
                text = file.read()
            digest.update(f"{name} {len(text)} ".encode() + text)
    return digest.hexdigest()


def _compile(key: Key, how_often: str) -> _Object:
    """Builds the object of `key`. On a terminal it says so, as this is the one slow step a user can meet."""
    stream = sys.stderr
    shown = stream is not None and stream.isatty()
    start = time.perf_counter()
    if shown:
        stream.write(f"polyflash: compiling CPU kernel {key.name} ({how_often}) ...")
        stream.flush()
    try:
        kernel = importlib.import_module(_builder(key)).build(key)
        made = _Object(kernel.native_name, _object_code(kernel, getattr(key, "isa", "")))
    finally:
        if shown:
            stream.write(f" {time.perf_counter() - start:.1f} s\n")
    missing = undefined_symbols(made.code) - _C_LIBRARY
    if missing:
        raise RuntimeError(
            f"kernel {key.name}: got undefined symbols {', '.join(sorted(missing))}, wanted none. "
            "Remove what calls Python or libm: a raise, an array view, a checked division, a call not inlined"
        )
    return made


def _object_code(kernel: Any, isa: str) -> bytes:
    """The object of a numba cfunc for this CPU; or, if the key asks for a narrower instruction set, for a CPU
    of that set: a simulated target runs the instructions of the real one."""
    cpu = _CPU_OF.get(isa)
    if cpu is None or isa == target.host_arch():
        return kernel._library._get_compiled_object()
    import llvmlite.binding as llvm

    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=cpu, opt=3, reloc="pic", codemodel="jitdefault", jit=True
    )
    return machine.emit_object(llvm.parse_assembly(kernel._library.get_llvm_str()))


_CPU_OF = {"avx2": "haswell", "generic": "x86-64"} if platform.machine() in ("x86_64", "AMD64") else {}


def _compiler_is_default() -> bool:
    """Whether numba's own settings are untouched: the cache key does not know them, so only this is kept."""
    numba = sys.modules.get("numba")
    if numba is None:
        return True
    config = numba.config
    return not config.CPU_NAME and config.CPU_FEATURES is None and int(config.OPT) == 3


def undefined_symbols(code: bytes) -> set[str]:
    """Names that an ELF64 object expects from elsewhere; empty for other object formats."""
    import llvmlite.binding as llvm

    tables = {s.name(): s.data() for s in llvm.ObjectFileRef.from_data(code).sections()}
    symbols, strings = tables.get(b".symtab", b""), tables.get(b".strtab", b"")
    names = set()
    for offset, _info, _other, section, _value, _size in struct.iter_unpack("<IBBHQQ", symbols):
        if section == 0 and offset:
            names.add(strings[offset : strings.index(b"\0", offset)].decode())
    return names


def _link(made: _Object) -> int:
    """Puts an object into memory, in an engine of its own: objects compiled elsewhere repeat symbol names."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(made.code))
    engine.finalize_object()
    address = engine.get_function_address(made.symbol)
    if not address:
        raise RuntimeError(f"object without its entry point {made.symbol}. Call clear_cache() and try again")
    _engines.append(engine)
    return address


def _open_folder(*, create: bool) -> int:
    """A descriptor of the cache folder, through which its files are reached; OSError if it cannot be trusted.

    What is checked is the open folder itself, so nobody can exchange it afterwards.
    """
    if os.name != "posix":
        raise OSError("no folder can be proved private on this system")
    path = os.path.realpath(cache_path())
    if create:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        os.makedirs(path, mode=0o700, exist_ok=True)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _check_private(os.fstat(folder), path)
        parent = os.path.dirname(path)
        while parent != os.path.dirname(parent):
            mode = os.stat(parent).st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise PermissionError(f"everyone may write to {parent}")
            parent = os.path.dirname(parent)
    except OSError:
        os.close(folder)
        raise
    return folder


def _check_private(status: os.stat_result, what: str) -> None:
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{what} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others may write to {what}")


def _read(folder: int, name: str) -> _Object | None:
    """The entry `name`, or None if it is absent or anything about it is unexpected."""
    try:
        # O_NONBLOCK: opening a pipe that somebody left here must not wait for a writer.
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_once(f"polyflash ignores a file in its kernel cache: {error}")
        return None
    try:
        status = os.fstat(file)
        _check_private(status, name)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_OBJECT_BYTES:
            raise OSError(f"{name} is no plain file of at most {MAX_OBJECT_BYTES} bytes")
        with os.fdopen(os.dup(file), "rb") as stream:
            made = _decode(name, stream.read(MAX_OBJECT_BYTES + 1))
        if time.time() - status.st_mtime > _DAY_S:
            with contextlib.suppress(OSError):
                os.utime(file)  # it is in use: `_purge` spares it
        return made
    except (OSError, ValueError) as error:
        _warn_once(f"polyflash compiles anew, as an entry of its kernel cache is damaged: {error}")
        return None
    finally:
        os.close(file)


def _encode(name: str, made: _Object) -> bytes:
    key, symbol = made.key.encode()[:MAX_KEY_BYTES], made.symbol.encode()
    check = _checksum(name, made.origin, key, symbol, made.code)
    header = _HEADER.pack(_MAGIC, SCHEMA, len(key), len(symbol), len(made.code), made.origin, check)
    return header + key + symbol + made.code


def _decode(name: str, data: bytes) -> _Object:
    """The object in `data`; ValueError unless every byte is as `_encode` wrote it under this very name."""
    if len(data) < _HEADER.size:
        raise ValueError(f"{name} is truncated")
    magic, schema, key_bytes, symbol_bytes, code_bytes, origin, checksum = _HEADER.unpack_from(data)
    if (magic, schema) != (_MAGIC, SCHEMA) or len(
        data
    ) != _HEADER.size + key_bytes + symbol_bytes + code_bytes:
        raise ValueError(f"{name} has an unknown header or a wrong length")
    symbol_at, code_at = _HEADER.size + key_bytes, _HEADER.size + key_bytes + symbol_bytes
    key, symbol, code = data[_HEADER.size : symbol_at], data[symbol_at:code_at], data[code_at:]
    if checksum != _checksum(name, origin, key, symbol, code):
        raise ValueError(f"{name} has a wrong checksum")
    return _Object(symbol.decode(), code, key.decode(), origin)


def _checksum(name: str, *parts: bytes) -> bytes:
    lengths = struct.pack(f"<{len(parts)}Q", *map(len, parts))
    return hashlib.sha256(b"".join((name.encode(), lengths, *parts))).digest()


def _write(folder: int, name: str, made: _Object) -> None:
    """Publishes an entry in one step: a reader meets all of it or nothing."""
    unfinished = f".{secrets.token_hex(16)}{_UNFINISHED}"
    try:
        file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
        try:
            with os.fdopen(file, "wb") as stream:
                stream.write(_encode(name, made))
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished, dir_fd=folder)
            raise
    except OSError as error:
        _warn_once(f"polyflash could not keep a compiled CPU kernel: {error}")


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _before_fork() -> None:
    _lock.acquire(timeout=FORK_PATIENCE_S)


def _after_fork_in_parent() -> None:
    with contextlib.suppress(RuntimeError):  # not ours: the patience ran out
        _lock.release()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
    )
