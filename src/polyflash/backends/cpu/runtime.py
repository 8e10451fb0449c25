"""Native code by key: from memory, else from this user's cache of compiled objects, else compiled.

A cached object is loaded with llvmlite alone: milliseconds, against 0.1 s to import numba and seconds to
compile. The folder it comes from, and what may be believed there: `store.py`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import platform
import struct
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from polyflash import compilation, env, target
from polyflash.backends.cpu import store
from polyflash.errors import UnsupportedError

FORK_PATIENCE_S = 10.0  # a fork waits this long for a compilation, so that the child gets a compiler at rest

_C_LIBRARY = frozenset(
    ("memcpy", "memmove", "memset", "_GLOBAL_OFFSET_TABLE_")
)  # a loop may become such a call


class Key(Protocol):
    """A key for `load`: hashable, with a name that tells all generated code apart.

    `builder` is the module whose `build(key)` returns the numba cfunc. Functions the cfunc calls need
    `forceinline=True`, or the object keeps numba's way to raise.
    """

    @property
    def name(self) -> str: ...
    @property
    def builder(self) -> str: ...


_addresses: dict[Any, int] = {}
_engines: list[Any] = []  # an engine owns its code, so it lives as long as the process


def lock_across_forks() -> Any:
    """A re-entrant lock for which a fork waits, so that the child gets what it guards at rest; in the child
    it is free, even if the patience of the fork ran out."""
    lock: Any = threading.RLock()

    def release() -> None:
        with contextlib.suppress(RuntimeError):  # not ours: the patience ran out
            lock.release()

    if hasattr(os, "register_at_fork"):
        before, after = lambda: lock.acquire(timeout=FORK_PATIENCE_S), lock._at_fork_reinit
        os.register_at_fork(before=before, after_in_parent=release, after_in_child=after)
    return lock


_lock = lock_across_forks()


def load(key: Key) -> int:
    """The native address of the code that `key` names; loaded or compiled by one thread, once per process."""
    address = _addresses.get(key)
    if address is None:
        with _lock:
            address = _addresses.get(key)
            if address is None:
                address = _addresses[key] = _link(_find_or_compile(key))
    return address


@functools.cache
def stage_address(kind: Any, isa: str, nv: int) -> int:
    """The address of code that the kernels of an isa call, by class of key and panel width."""
    return load(kind(isa, nv))


def entry_name(key: Key) -> str:
    """The file name of `key`: a digest of everything its code depends on, so that a stale entry is never met.

    That is where its code comes from, the key's builder and its name.
    """
    parts = origin().hex(), key.builder, key.name
    return hashlib.sha256("\0".join(parts).encode()).hexdigest() + store.SUFFIX


def origin() -> bytes:
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


def _find_or_compile(key: Key) -> store.Object:
    if env.NO_CACHE.is_set():
        return _compile(key)
    try:
        name, folder = entry_name(key), store.open_folder(create=True)
    except OSError as error:
        store.warn_once(f"polyflash compiles CPU kernels anew in every process, for want of a cache: {error}")
        return _compile(key)
    with folder:
        entry = store.read(folder, name)
        if entry is None:
            entry = _compile(key)
            if _compiler_is_default():
                store.write(folder, name, replace(entry, key=key.name, origin=origin()))
                store.purge(folder)
        return entry


@functools.lru_cache(maxsize=4)
def _sources_digest(folder: str) -> str:
    """A digest of every Python file in `folder` and those below, by name and contents."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).rglob("*.py")):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(text)} ".encode() + text)
    return digest.hexdigest()


def _compile(key: Key) -> store.Object:
    """Builds the object of `key`, and says so: this is the one slow step a user can meet."""
    with compilation.timed(key.name, f"cpu:{getattr(key, 'isa', '') or target.host_arch()}"):
        try:
            kernel = importlib.import_module(key.builder).build(key)
        except ImportError as error:  # as numba's beside a numpy that is newer than it knows
            told = "wanted a compiler that imports. pip install --upgrade numba, or take backend='torch'"
            raise UnsupportedError(f"numba: got {error}, {told}") from error
        except AttributeError as error:  # as of a numba whose insides are others than compilers.py knows
            told = "wanted one that polyflash knows. pip install 'numba<0.69', or take backend='torch'"
            raise UnsupportedError(f"numba: got {error}, {told}") from error
        made = store.Object(kernel.native_name, _object_code(kernel, getattr(key, "isa", "")))
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


def _link(made: store.Object) -> int:
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
        raise RuntimeError(
            f"object without its entry point {made.symbol}. Run polyflash cache clear and try again"
        )
    _engines.append(engine)
    return address
