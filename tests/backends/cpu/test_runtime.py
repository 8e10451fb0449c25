"""The cache of compiled objects: what it stores and refuses, and that no trouble with a disk stops a call."""

from __future__ import annotations

import ctypes
import errno
import io
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
import warnings
from dataclasses import dataclass
from pathlib import Path

import llvmlite.binding as llvm
import pytest
from hypothesis import given
from hypothesis import strategies as st

import polyflash
from polyflash import target
from polyflash.backends.cpu import pool, runtime, store
from polyflash.cache import PrivateFolder

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the cache needs POSIX ownership")

SOURCE = str(Path(polyflash.__file__).parent)

# A process that imports the CPU runtime without the rest of the package, hence without torch.
PRELUDE = f"""
import sys, types
for name in ("polyflash", "polyflash.backends", "polyflash.backends.cpu"):
    module = types.ModuleType(name)
    module.__path__ = [{SOURCE!r} + name.replace(".", "/").removeprefix("polyflash")]
    sys.modules[name] = module
sys.modules["polyflash"].__version__ = "test"
from polyflash.backends.cpu import pool, runtime
"""


@dataclass(frozen=True)
class Key:
    name: str
    builder: str = "tiny_kernels"


class Compiled:
    """Looks like a numba cfunc to the runtime: a native name, and a library that has an object."""

    def __init__(self, symbol: str, text: str) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(jit=True)
        module = llvm.parse_assembly(text)
        module.verify()
        code = machine.emit_object(module)
        self.native_name = symbol
        self._library = types.SimpleNamespace(_get_compiled_object=lambda: code)


def storing(number: int) -> Compiled:
    """A kernel that writes `number` where its argument points."""
    return Compiled(
        "kernel",
        f"""define void @kernel(i64 %args, i64 %item, i64 %scratch) {{
            %p = inttoptr i64 %args to ptr
            store i64 {number}, ptr %p
            ret void
        }}""",
    )


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A builder module of kernels named "store-<n>"; the list names every compilation."""
    made: list[str] = []

    def build(key: Key) -> Compiled:
        made.append(key.name)
        return storing(int(key.name.rpartition("-")[2]))

    monkeypatch.setitem(sys.modules, "tiny_kernels", types.SimpleNamespace(build=build))
    return made


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own, and a runtime that has loaded nothing."""
    path = tmp_path / "kernels"
    monkeypatch.setenv("POLYFLASH_CACHE_DIR", str(path))
    monkeypatch.delenv("POLYFLASH_NO_CACHE", raising=False)
    forget(monkeypatch)
    return path


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process would start."""
    monkeypatch.setattr(runtime, "_addresses", {})
    monkeypatch.setattr(store, "_warned", set())


def stored(address: int) -> int:
    """What the kernel at `address` writes."""
    place = ctypes.c_int64(-1)
    kernel = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(address)
    kernel(ctypes.addressof(place), 0, 0)
    return place.value


def only_entry(folder: Path) -> Path:
    (entry,) = folder.iterdir()
    return entry


def test_disk_then_memory(folder, builds, monkeypatch):
    key = Key("store-7")
    first = runtime.load(key)
    assert stored(first) == 7 and builds == ["store-7"]
    assert runtime.load(Key("store-7")) == first
    forget(monkeypatch)
    assert stored(runtime.load(key)) == 7
    assert builds == ["store-7"], "the second process compiled again"


def test_objects_with_equal_symbols_stay_apart(builds):
    addresses = [runtime.load(Key(f"store-{n}")) for n in (1, 2, 3)]
    assert [stored(address) for address in addresses] == [1, 2, 3]


def test_private_files_under_digest_names(folder, builds):
    """S13, S14: a folder of 0700, files of 0600 named by a digest; no text of a key becomes a path."""
    runtime.load(Key("store-../../escape-7"))
    entry = only_entry(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert entry.stat().st_mode & 0o777 == 0o600
    assert len(entry.stem) == 64 and set(entry.stem) <= set("0123456789abcdef") and entry.suffix == ".pfo"


def flip(at: int):
    def damage(entry: Path, _other: Path) -> None:
        data = bytearray(entry.read_bytes())
        data[at] ^= 1
        entry.write_bytes(data)

    return damage


def link(entry: Path, _other: Path) -> None:
    real = entry.parent.parent / "elsewhere"
    shutil.move(entry, real)
    entry.symlink_to(real)


def pipe(entry: Path, _other: Path) -> None:
    entry.unlink()
    os.mkfifo(entry)


DAMAGE = {
    "empty": lambda entry, _: entry.write_bytes(b""),
    "half": lambda entry, _: entry.write_bytes(entry.read_bytes()[: entry.stat().st_size // 2]),
    "one byte more": lambda entry, _: entry.write_bytes(entry.read_bytes() + b"x"),
    "magic": flip(0),
    "schema": flip(6),
    "symbol length": flip(8),
    "object length": flip(12),
    "checksum": flip(30),
    "symbol": flip(store.HEADER.size),
    "last byte": flip(-1),
    "foreign": lambda entry, other: shutil.copy(other, entry),
    "text": lambda entry, _: entry.write_text("not an object " * 1000),
    "symlink": link,
    "pipe": pipe,
    "group writable": lambda entry, _: entry.chmod(0o660),
    "world writable": lambda entry, _: entry.chmod(0o606),
    "too large": lambda entry, _: os.truncate(entry, store.MAX_OBJECT_BYTES + 1),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_entry_is_a_miss_and_is_replaced(folder, builds, monkeypatch, damage):
    """S14, S15: whatever somebody left in place of an entry is a miss, and is put right."""
    key = Key("store-7")
    runtime.load(key)
    entry = only_entry(folder)
    good = entry.read_bytes()
    runtime.load(Key("store-8"))
    (other,) = set(folder.iterdir()) - {entry}
    damage(entry, other)
    forget(monkeypatch)
    with pytest.warns(RuntimeWarning, match="polyflash"):
        assert stored(runtime.load(key)) == 7
    assert builds == ["store-7", "store-8", "store-7"]
    assert not entry.is_symlink() and entry.read_bytes() == good and entry.stat().st_mode & 0o777 == 0o600
    forget(monkeypatch)
    assert stored(runtime.load(key)) == 7 and len(builds) == 3


def test_directory_in_place_of_an_entry_is_harmless(folder, builds, monkeypatch):
    runtime.load(Key("store-7"))
    entry = only_entry(folder)
    entry.unlink()
    entry.mkdir()
    forget(monkeypatch)
    with pytest.warns(RuntimeWarning):
        assert stored(runtime.load(Key("store-7"))) == 7
    assert list(folder.iterdir()) == [entry]


def test_every_truncation_is_refused():
    """S15, S24: cut at every byte and flipped at every byte."""
    name = "a.pfo"
    data = store.encode(name, store.Object("kernel", bytes(range(40))))
    assert store.decode(name, data) == store.Object("kernel", bytes(range(40)))
    for size in range(len(data)):
        with pytest.raises(ValueError):
            store.decode(name, data[:size])
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 0x80
        with pytest.raises(ValueError):
            store.decode(name, bytes(changed))


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_folder_others_can_write_is_refused_once(folder, builds, monkeypatch, mode):
    """S13"""
    folder.mkdir()
    folder.chmod(mode)
    with pytest.warns(RuntimeWarning, match="others may write"):
        assert stored(runtime.load(Key("store-1"))) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stored(runtime.load(Key("store-2"))) == 2
    assert not list(folder.iterdir())
    assert "others may write" in store.info().refusal


def test_open_parent_is_refused(folder, builds):
    """S13: who may rename a parent may put another folder in its place."""
    folder.parent.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="everyone may write"):
        assert stored(runtime.load(Key("store-1"))) == 1
    folder.parent.chmod(0o1777)
    runtime.load(Key("store-2"))
    assert store.info().entries == 1


def test_folder_of_another_user_is_refused(folder, builds, monkeypatch):
    """S13"""
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.warns(RuntimeWarning, match="another user"):
        assert stored(runtime.load(Key("store-1"))) == 1
    assert not list(folder.iterdir())


@pytest.mark.parametrize("place", ["/proc/polyflash/kernels", "/dev/null/kernels"])
def test_folder_that_cannot_be_made(place, builds, monkeypatch):
    monkeypatch.setenv("POLYFLASH_CACHE_DIR", place)
    with pytest.warns(RuntimeWarning, match="cache"):
        assert stored(runtime.load(Key("store-1"))) == 1
    assert store.info().entries == 0 and store.clear() == 0


@pytest.mark.parametrize("step", ["open", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ESTALE])
def test_no_disk_error_is_fatal(folder, builds, monkeypatch, step, code):
    """S15, B-cch-10: any error of the disk is a miss."""
    real = getattr(os, step)

    def failing(*args, **options):
        if step == "open" and not (args[1] & os.O_CREAT):
            return real(*args, **options)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, step, failing)
    with pytest.warns(RuntimeWarning, match=os.strerror(code)):
        assert stored(runtime.load(Key("store-1"))) == 1
    assert not list(folder.iterdir()), "an unfinished file was left"


def test_no_cache_variable(folder, builds, monkeypatch):
    """S18"""
    monkeypatch.setenv("POLYFLASH_NO_CACHE", "1")
    assert stored(runtime.load(Key("store-1"))) == 1
    assert not folder.exists()


def test_home_unset(builds, monkeypatch, tmp_path):
    """Never a predictable place in /tmp (S13): the user's own by XDG, else by the password file."""
    monkeypatch.delenv("POLYFLASH_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("HOME", raising=False)
    runtime.load(Key("store-1"))
    assert store.path() == str(tmp_path / "xdg" / "polyflash" / "kernels")
    assert (tmp_path / "xdg" / "polyflash").stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv("XDG_CACHE_HOME")
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert store.path() == os.path.join(home, ".cache", "polyflash", "kernels")


def test_changed_compiler_settings_are_not_kept(folder, builds, monkeypatch):
    config = types.SimpleNamespace(CPU_NAME="haswell", CPU_FEATURES=None, OPT=3)
    monkeypatch.setitem(sys.modules, "numba", types.SimpleNamespace(config=config))
    assert stored(runtime.load(Key("store-1"))) == 1
    assert store.info().entries == 0


def test_key_depends_on_sources(tmp_path):
    """S16"""
    runtime._sources_digest.cache_clear()
    source = tmp_path / "source"
    source.mkdir()
    seen = set()

    def digest() -> None:
        runtime._sources_digest.cache_clear()
        seen.add(runtime._sources_digest(str(source)))

    digest()
    (source / "a.py").write_text("x = 1\n")
    digest()
    (source / "a.py").write_text("x = 2\n")
    digest()
    (source / "a.py").rename(source / "b.py")
    digest()
    (source / "a.py").write_text("")
    digest()
    assert len(seen) == 5
    (source / "notes.txt").write_text("no code")
    digest()
    assert len(seen) == 5


def test_key_depends_on_everything_else(monkeypatch):
    """S16, B-cch-01, B-cch-04: keys that differ in anything have entries of their own."""
    key = Key("store-1")
    names = {
        runtime.entry_name(key),
        runtime.entry_name(Key("store-2")),
        runtime.entry_name(Key("store-1", "x")),
    }
    detected = runtime.target.detect("cpu")
    changes = [
        (runtime, "_sources_digest", lambda _folder: "other"),
        (sys.modules["polyflash"], "__version__", "9.9.9"),
        (llvm, "llvm_version_info", (1, 2, 3)),
        (llvm, "get_host_cpu_name", lambda: "other"),
        (sys.modules["llvmlite"], "__version__", "9.9.9"),
        (runtime.target, "cpu_flags", lambda: frozenset({"other"})),
        (runtime.target, "detect", lambda _: runtime.target.Target("cpu:other", packages=detected.packages)),
        (runtime.target, "detect", lambda _: runtime.target.replace(detected, packages=(("numba", "9"),))),
    ]
    for owner, name, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            names.add(runtime.entry_name(key))
    assert len(names) == 3 + len(changes)
    assert runtime.entry_name(key) in names


def test_one_thread_compiles(builds, monkeypatch):
    build = sys.modules["tiny_kernels"].build
    slow = threading.Event()

    def building(key):
        slow.wait(0.2)
        return build(key)

    monkeypatch.setitem(sys.modules, "tiny_kernels", types.SimpleNamespace(build=building))
    got: list[int] = []
    threads = [threading.Thread(target=lambda: got.append(runtime.load(Key("store-5")))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert builds == ["store-5"] and len(got) == 4 and len(set(got)) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError])
def test_failed_compilation_leaves_nothing_behind(folder, builds, monkeypatch, error):
    working = sys.modules["tiny_kernels"]

    def failing(_key):
        raise error

    monkeypatch.setitem(sys.modules, "tiny_kernels", types.SimpleNamespace(build=failing))
    with pytest.raises(error):
        runtime.load(Key("store-1"))
    monkeypatch.setitem(sys.modules, "tiny_kernels", working)
    done = threading.Thread(target=lambda: runtime.load(Key("store-1")))
    done.start()
    done.join(10)
    assert not done.is_alive(), "the lock was left taken"
    assert stored(runtime.load(Key("store-1"))) == 1 and store.info().entries == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_says_what_it_compiled_to_a_person_only(builds, monkeypatch):
    """One line per kernel that no cache had, on a terminal or where the log is asked for."""
    line = rf"polyflash: compiled store-(\d) for cpu:{target.host_arch()} in \d+\.\d s\n"
    polyflash.counters(reset=True)
    monkeypatch.delenv("POLYFLASH_LOG", raising=False)
    monkeypatch.setattr(sys, "stderr", Terminal())
    runtime.load(Key("store-1"))
    waiting, _, rest = sys.stderr.getvalue().partition("\r\x1b[2K")
    assert waiting.startswith("polyflash: compiling store-1 for ") and re.fullmatch(line, rest)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    runtime.load(Key("store-2"))
    assert sys.stderr.getvalue() == ""
    monkeypatch.setenv("POLYFLASH_LOG", "1")
    runtime.load(Key("store-3"))
    assert re.fullmatch(line, sys.stderr.getvalue())
    runtime._addresses.clear()
    runtime.load(Key("store-3"))  # from the folder: nothing to say
    assert sys.stderr.getvalue().count("\n") == 1 and len(polyflash.counters()["compiled"]) == 3
    monkeypatch.setattr(sys, "stderr", None)
    runtime.load(Key("store-4"))


def test_undefined_symbols_are_refused(folder, monkeypatch):
    """B-cpu-04: code that could raise inside a parallel region does not get through."""
    text = """declare void @PyErr_Clear()
        define void @kernel(i64 %args, i64 %item, i64 %scratch) {
            call void @PyErr_Clear()
            ret void
        }"""
    monkeypatch.setitem(
        sys.modules, "tiny_kernels", types.SimpleNamespace(build=lambda _key: Compiled("kernel", text))
    )
    with pytest.raises(RuntimeError, match="PyErr_Clear"):
        runtime.load(Key("store-1"))
    assert not list(folder.iterdir())


def test_memory_functions_of_libc_are_linked(monkeypatch):
    text = """declare ptr @memset(ptr, i32, i64)
        define void @kernel(i64 %args, i64 %item, i64 %scratch) {
            %p = inttoptr i64 %args to ptr
            %q = call ptr @memset(ptr %p, i32 1, i64 8)
            ret void
        }"""
    monkeypatch.setitem(
        sys.modules, "tiny_kernels", types.SimpleNamespace(build=lambda _key: Compiled("kernel", text))
    )
    assert stored(runtime.load(Key("store-1"))) == 0x0101010101010101


def test_info_and_clear(folder, builds, monkeypatch):
    assert store.info() == store.Info(str(folder), 0, 0)
    for n in range(3):
        runtime.load(Key(f"store-{n}"))
    (folder / ".left.tmp").write_bytes(b"unfinished")
    info = store.info()
    assert info.entries == 3 and info.bytes == sum(p.stat().st_size for p in folder.glob("*.pfo"))
    address = runtime.load(Key("store-2"))
    assert store.clear() == 3 and not list(folder.iterdir())
    assert stored(address) == 2
    forget(monkeypatch)
    assert stored(runtime.load(Key("store-2"))) == 2 and len(builds) == 4


def start(code: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def finish(process: subprocess.Popen, timeout: float = 60) -> str:
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out


def test_two_processes_compile_then_one_has_no_numba(folder):
    """Cold start together: every process works, one entry remains. The next process never imports numba."""
    pytest.importorskip("numba")
    load = "print(runtime.load(pool.PoolKey()) > 0, 'numba' in sys.modules)"
    together = [start(load) for _ in range(2)]
    assert [finish(process).split()[0] for process in together] == ["True"] * 2
    assert len(list(folder.iterdir())) == 1
    assert finish(start(load)).split() == ["True", "False"]


def test_fork_while_another_thread_compiles(folder):
    """A fork waits for the compiler to rest; if patience ends first, the child has a lock of its own."""
    code = """
        import os, threading, time
        compiling = threading.Event()
        def build(key):
            compiling.set()
            time.sleep(0.4)
            raise LookupError
        sys.modules["slow_kernels"] = types.SimpleNamespace(build=build)
        class Key:
            name, builder = "slow", "slow_kernels"
        def compile():
            try:
                runtime.load(Key())
            except LookupError:
                pass
        for patience in (10, 0.05):
            runtime.FORK_PATIENCE_S = patience
            compiling.clear()
            thread = threading.Thread(target=compile)
            thread.start()
            compiling.wait()
            child = os.fork()
            if not child:
                os._exit(0 if runtime._lock.acquire(timeout=2) else 1)
            assert os.waitpid(child, 0)[1] == 0, "the child hangs on a lock of its parent"
            thread.join()
            assert runtime._lock.acquire(timeout=2)
            runtime._lock.release()
    """
    finish(start(code))


def test_pool_object_has_no_undefined_symbols(monkeypatch):
    """B-cpu-04"""
    pytest.importorskip("numba")
    from polyflash.backends.cpu import pool_kernel

    code = pool_kernel.build(pool.PoolKey())._library._get_compiled_object()
    assert runtime.undefined_symbols(code) == set()


# Fuzz: whatever the bytes, a reader says ValueError or "no entry", and never takes more than it was given.

HEADER = st.tuples(
    st.one_of(st.just(store._MAGIC), st.binary(min_size=6, max_size=6)),
    st.one_of(st.just(store.SCHEMA), st.integers(0, 2**16 - 1)),
    st.one_of(st.integers(0, 40), st.integers(0, 2**32 - 1)),
    st.one_of(st.integers(0, 40), st.integers(0, 2**32 - 1)),
    st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 1)),
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=32, max_size=32),
).map(lambda fields: store.HEADER.pack(*fields))


@given(st.one_of(st.binary(max_size=300), st.tuples(HEADER, st.binary(max_size=200)).map(b"".join)))
def test_fuzz_of_an_entry(data):
    """S24: no header, however its lengths lie, is believed without its checksum."""
    with pytest.raises(ValueError):
        store.decode("a.pfo", data)


@given(st.binary(max_size=60), st.binary(max_size=60), st.integers(0, 10**6), st.integers(1, 255))
def test_fuzz_of_a_changed_entry(symbol, code, at, change):
    """S15, S24: a changed byte anywhere, or another name, is refused; what was written is read."""
    made = store.Object(symbol.hex(), code, "key " + code.hex(), bytes(range(32)))
    data = store.encode("a.pfo", made)
    assert store.decode("a.pfo", data) == made
    changed = bytearray(data)
    changed[at % len(data)] ^= change
    for name, bad in (("a.pfo", bytes(changed)), ("b.pfo", data), ("a.pfo", data + b"x")):
        with pytest.raises(ValueError):
            store.decode(name, bad)


@given(st.one_of(st.binary(max_size=300), st.tuples(HEADER, st.binary(max_size=200)).map(b"".join)))
def test_fuzz_of_the_listing(tmp_path_factory, data):
    """S24: `polyflash cache ls` reads headers alone, and of any bytes says a key within them or none."""
    folder = tmp_path_factory.mktemp("listed", numbered=True)
    (folder / "a.pfo").write_bytes(data)
    with PrivateFolder.open(str(folder)) as opened:
        key, origin = store._peek(opened, "a.pfo")
    assert key.encode() in data and origin in data
    shutil.rmtree(folder)


# What is thrown away.


def test_entries_say_what_they_are(folder, builds, monkeypatch):
    runtime.load(Key("store-1"))
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "_sources_digest", lambda _folder: "other")
        runtime.load(Key("store-2"))
        other = runtime.origin()
    (folder / "noise.pfo").write_bytes(b"noise")
    (folder / "link.pfo").symlink_to(folder / "noise.pfo")
    found = {entry.key: entry for entry in store.entries(runtime.origin())}
    assert {key: entry.stale for key, entry in found.items()} == {"store-1": False, "store-2": True, "": True}
    assert found["store-1"].bytes == (folder / found["store-1"].file).stat().st_size
    assert abs(found["store-1"].days) < 0.01
    assert [e.stale for e in store.entries(other) if e.key] == [True, False]
    assert {e.stale for e in store.entries(b"")} == {None}
    assert store.clear(origin=runtime.origin()) == 3
    assert [entry.key for entry in store.entries(runtime.origin())] == ["store-1"]
    forget(monkeypatch)
    runtime.load(Key("store-1"))
    assert builds == ["store-1", "store-2"], "what is current was thrown away"


def age(path: Path, days: float) -> None:
    then = time.time() - days * 86400
    os.utime(path, (then, then))


def test_unused_entries_go_and_used_ones_stay(folder, builds, monkeypatch):
    """Entries of old sources must not pile up; a load counts as use."""
    for n in (1, 2, 3):
        runtime.load(Key(f"store-{n}"))
    entries = {entry.key: folder / entry.file for entry in store.entries(b"")}
    leftovers = [folder / name for name in (".old.tmp", ".new.tmp")]
    for path in leftovers:
        path.write_bytes(b"unfinished")
    for path in (*entries.values(), leftovers[0]):
        age(path, store.KEPT_DAYS + 1)
    (folder / "mine.txt").write_text("not polyflash's")
    age(folder / "mine.txt", 1000)
    forget(monkeypatch)
    runtime.load(Key("store-2"))  # a hit
    assert len(list(folder.glob("*.pfo"))) == 3, "a hit is not the time to clean up"
    runtime.load(Key("store-4"))
    assert {entry.key for entry in store.entries(b"")} == {"store-2", "store-4"}
    assert not leftovers[0].exists() and leftovers[1].exists() and (folder / "mine.txt").exists()


def test_the_oldest_beyond_the_bound_go(folder, builds, monkeypatch):
    monkeypatch.setattr(store, "KEPT_ENTRIES", 3)
    for n in range(5):
        runtime.load(Key(f"store-{n}"))
        for entry in store.entries(b""):
            age(folder / entry.file, entry.days + 1)
    assert {entry.key for entry in store.entries(b"")} == {"store-2", "store-3", "store-4"}


@pytest.mark.parametrize("days", [-4000, 4000])
def test_clock_jumps(folder, builds, monkeypatch, days):
    """S19: no time decides whether an entry is right; a clock that jumps costs a compilation at most."""
    runtime.load(Key("store-1"))
    real = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + days * 86400)
        forget(monkeypatch)
        assert stored(runtime.load(Key("store-1"))) == 1 and builds == ["store-1"]
        assert stored(runtime.load(Key("store-2"))) == 2
    forget(monkeypatch)
    assert stored(runtime.load(Key("store-2"))) == 2


def test_two_versions_share_a_folder(folder, builds, monkeypatch):
    """B-cch-09: each finds its own entry, and neither spoils the other's."""
    for version in ("1.0", "2.0", "1.0", "2.0"):
        forget(monkeypatch)
        monkeypatch.setattr(sys.modules["polyflash"], "__version__", version)
        runtime.load(Key("store-1"))
    assert builds == ["store-1", "store-1"] and store.info().entries == 2


TINY = """
import time
import llvmlite.binding as llvm
def build(key):
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(jit=True)
    text = "define void @kernel(i64 %a, i64 %i, i64 %s) { ret void }"
    code = machine.emit_object(llvm.parse_assembly(text))
    kernel = types.SimpleNamespace(native_name="kernel")
    kernel._library = types.SimpleNamespace(_get_compiled_object=lambda: code)
    return kernel
sys.modules["tiny"] = types.SimpleNamespace(build=build)
class Key:
    builder = "tiny"
    def __init__(self, name):
        self.name = name
"""


def tiny(code: str, **environment: str) -> subprocess.Popen:
    """A process with a builder of kernels that do nothing."""
    program = PRELUDE + TINY + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-W", "always", "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def test_eight_processes_at_once(folder, tmp_path):
    """B-cch-05, B-cch-10: a cold start of eight, let go together, with one that keeps clearing the folder."""
    go = tmp_path / "go"
    wait = f"""
        import os
        print(llvm.llvm_version_info, flush=True)
        while not os.path.exists({str(go)!r}): time.sleep(0.001)
    """
    load = (
        wait
        + """
        for turn in range(20):
            assert runtime.load(Key(f"k{turn}")) > 0
    """
    )
    clear = (
        wait
        + """
        from polyflash.backends.cpu import store
        for _ in range(60):
            store.clear()
            store.entries(runtime.origin())
            time.sleep(0.001)
    """
    )
    started = [tiny(load) for _ in range(8)] + [tiny(clear)]
    for process in started:
        process.stdout.readline()
    go.touch()
    for process in started:
        finish(process)
    assert not list(folder.glob(".*")), "an unfinished file was left"
    finish(tiny("for turn in range(20): runtime.load(Key(f'k{turn}'))"))
    assert len(list(folder.glob("*.pfo"))) == 20


def test_disk_full_and_home_read_only_for_real(folder, tmp_path):
    """A file size limit stands for a full disk; another user's home for one that cannot be written."""
    full = """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
        assert runtime.load(Key("a")) > 0
    """
    process = tiny(full)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0 and "could not keep a compiled CPU kernel" in said, said
    assert not list(folder.iterdir())
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o555)
    closed = """
        import importlib.metadata, os, secrets
        runtime.entry_name(Key("a"))  # what it imports lies in folders that nobody may not read
        if os.getuid() == 0:
            os.setuid(65534)
        assert runtime.load(Key("a")) > 0
    """
    process = tiny(closed, POLYFLASH_CACHE_DIR=str(home / "deep" / "kernels"))
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0 and "for want of a cache" in said, said
    assert not list(home.iterdir())


def test_interrupt_during_a_compilation(folder):
    """SIGINT while a kernel is compiled: the call ends, no lock stays taken, and the next call compiles."""
    code = """
        import os, signal, threading
        slow, real = threading.Event(), build
        def building(key):
            if not slow.is_set():
                slow.set()
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
            return real(key)
        sys.modules["tiny"].build = building
        try:
            runtime.load(Key("a"))
        except KeyboardInterrupt:
            print("interrupted")
        done = threading.Thread(target=lambda: print(runtime.load(Key("a")) > 0))
        done.start()
        done.join(10)
        assert not done.is_alive()
    """
    assert finish(tiny(code)).split() == ["interrupted", "True"]


def test_killed_while_writing(folder):
    """PF26's like: a process killed in mid-write leaves nothing that a reader takes for an entry."""
    code = """
        import os, signal
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        runtime.load(Key("a"))
    """
    process = tiny(code)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    (left,) = folder.iterdir()
    assert left.name.startswith(".") and store.info().entries == 0
    finish(tiny("runtime.load(Key('a'))"))
    assert store.info().entries == 1
