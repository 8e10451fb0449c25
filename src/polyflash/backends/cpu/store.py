"""The folder of compiled objects: what an entry looks like, who may write it, and what is thrown away.

An object is code, so the folder must be the user's own and writable by nobody else: to share a cache folder
is to share the right to run code. Whatever looks wrong is a miss, and no trouble with the disk stops a call.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import struct
import time
import warnings
from dataclasses import dataclass

from polyflash import env

SCHEMA = 2
MAX_OBJECT_BYTES = 64 << 20
MAX_KEY_BYTES = 4096
KEPT_DAYS, KEPT_ENTRIES = 30, 512  # an entry nobody loaded for so long goes; beyond so many, the oldest go

SUFFIX, UNFINISHED = ".pfo", ".tmp"
_MAGIC = b"PFOBJ\0"
HEADER = struct.Struct("<6sHIIQ32s32s")  # magic, schema, bytes of key, symbol, object; origin, checksum
_DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Info:
    """The folder of compiled objects, how many it holds, their bytes; `refusal` says why it is not used."""

    path: str
    entries: int
    bytes: int
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the cache folder: its bytes, the days since it was last loaded, and its key ("" if it is no
    entry). `stale`: made by other sources, versions or another CPU than this; None if that cannot be known.
    """

    file: str
    bytes: int
    days: float
    key: str
    stale: bool | None


@dataclass(frozen=True, slots=True)
class Object:
    """Machine code, the name of its entry point, and what it was made for and by."""

    symbol: str
    code: bytes
    key: str = ""
    origin: bytes = bytes(32)


_warned: set[str] = set()


def path() -> str:
    """The folder of compiled objects, whether or not it exists."""
    return env.CACHE_DIR.read() or os.path.join(env.user_cache_home(), "polyflash", "kernels")


def info() -> Info:
    """What the cache folder holds now."""
    place = path()
    try:
        folder = open_folder(create=False)
    except FileNotFoundError:
        return Info(place, 0, 0)
    except OSError as error:
        return Info(place, 0, 0, str(error))
    try:
        sizes = [status.st_size for _, status in _files(folder, SUFFIX)]
        return Info(place, len(sizes), sum(sizes))
    finally:
        os.close(folder)


def entries(origin: bytes) -> list[Entry]:
    """Every entry of the cache folder, by key; OSError if the folder cannot be trusted.

    `origin` is the digest of what would make an entry now, empty if that is unknown.
    """
    try:
        folder = open_folder(create=False)
    except FileNotFoundError:
        return []
    found = []
    try:
        for name, status in _files(folder, SUFFIX):
            key, made_by = _peek(folder, name)
            stale = (not key or made_by != origin) if origin else None
            days = (time.time() - status.st_mtime) / _DAY_S
            found.append(Entry(name, status.st_size, days, key, stale))
    finally:
        os.close(folder)
    return sorted(found, key=lambda entry: (entry.key, entry.days))


def trouble() -> str:
    """Why no entry can be written to the cache folder, which is made if need be; empty if one can."""
    try:
        folder = open_folder(create=True)
        try:
            name = f".{secrets.token_hex(16)}{UNFINISHED}"
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder))
            os.unlink(name, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError as error:
        return str(error)
    return ""


def clear(*, origin: bytes = b"") -> int:
    """Removes every compiled object from the folder, or with an `origin` those that it makes stale; returns
    how many. Code that is loaded stays loaded."""
    try:
        kept = {entry.file for entry in entries(origin) if not entry.stale} if origin else set()
        folder = open_folder(create=False)
    except OSError:
        return 0
    try:
        names = [name for name, _ in _files(folder, SUFFIX, UNFINISHED) if name not in kept]
        return sum(_removed(folder, name) and name.endswith(SUFFIX) for name in names)
    finally:
        os.close(folder)


def purge(folder: int) -> None:
    """Removes entries that nobody loaded for `KEPT_DAYS`, the oldest beyond `KEPT_ENTRIES`, and what a killed
    process left unfinished a day ago: sources and versions change, and nobody asks for old entries again."""
    now = time.time()
    files = sorted((now - status.st_mtime, name) for name, status in _files(folder, SUFFIX, UNFINISHED))
    entries = [name for _, name in files if name.endswith(SUFFIX)]
    old = [name for age, name in files if age > (KEPT_DAYS if name.endswith(SUFFIX) else 1) * _DAY_S]
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
        data = os.read(file, HEADER.size + MAX_KEY_BYTES)
        magic, schema, key_bytes, _, _, origin, _ = HEADER.unpack_from(data)
        if (magic, schema) != (_MAGIC, SCHEMA) or key_bytes > MAX_KEY_BYTES:
            return "", b""
        return data[HEADER.size : HEADER.size + key_bytes].decode(), origin
    except (OSError, ValueError, struct.error):
        return "", b""
    finally:
        os.close(file)


def open_folder(*, create: bool) -> int:
    """A descriptor of the cache folder, through which its files are reached; OSError if it cannot be trusted.

    What is checked is the open folder itself, so nobody can exchange it afterwards.
    """
    if os.name != "posix":
        raise OSError("no folder can be proved private on this system")
    place = os.path.realpath(path())
    if create:
        os.makedirs(os.path.dirname(place), mode=0o700, exist_ok=True)
        os.makedirs(place, mode=0o700, exist_ok=True)
    folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _check_private(os.fstat(folder), place)
        parent = os.path.dirname(place)
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


def read(folder: int, name: str) -> Object | None:
    """The entry `name`, or None if it is absent or anything about it is unexpected."""
    try:
        # O_NONBLOCK: opening a pipe that somebody left here must not wait for a writer.
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        warn_once(f"polyflash ignores a file in its kernel cache: {error}")
        return None
    try:
        status = os.fstat(file)
        _check_private(status, name)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_OBJECT_BYTES:
            raise OSError(f"{name} is no plain file of at most {MAX_OBJECT_BYTES} bytes")
        with os.fdopen(os.dup(file), "rb") as stream:
            made = decode(name, stream.read(MAX_OBJECT_BYTES + 1))
        if time.time() - status.st_mtime > _DAY_S:
            with contextlib.suppress(OSError):
                os.utime(file)  # it is in use: `purge` spares it
        return made
    except (OSError, ValueError) as error:
        warn_once(f"polyflash compiles anew, as an entry of its kernel cache is damaged: {error}")
        return None
    finally:
        os.close(file)


def encode(name: str, made: Object) -> bytes:
    key, symbol = made.key.encode()[:MAX_KEY_BYTES], made.symbol.encode()
    check = _checksum(name, made.origin, key, symbol, made.code)
    header = HEADER.pack(_MAGIC, SCHEMA, len(key), len(symbol), len(made.code), made.origin, check)
    return header + key + symbol + made.code


def decode(name: str, data: bytes) -> Object:
    """The object in `data`; ValueError unless every byte is as `encode` wrote it under this very name."""
    if len(data) < HEADER.size:
        raise ValueError(f"{name} is truncated")
    magic, schema, key_bytes, symbol_bytes, code_bytes, origin, checksum = HEADER.unpack_from(data)
    if (magic, schema) != (_MAGIC, SCHEMA) or len(
        data
    ) != HEADER.size + key_bytes + symbol_bytes + code_bytes:
        raise ValueError(f"{name} has an unknown header or a wrong length")
    symbol_at, code_at = HEADER.size + key_bytes, HEADER.size + key_bytes + symbol_bytes
    key, symbol, code = data[HEADER.size : symbol_at], data[symbol_at:code_at], data[code_at:]
    if checksum != _checksum(name, origin, key, symbol, code):
        raise ValueError(f"{name} has a wrong checksum")
    return Object(symbol.decode(), code, key.decode(), origin)


def _checksum(name: str, *parts: bytes) -> bytes:
    lengths = struct.pack(f"<{len(parts)}Q", *map(len, parts))
    return hashlib.sha256(b"".join((name.encode(), lengths, *parts))).digest()


def write(folder: int, name: str, made: Object) -> None:
    """Publishes an entry in one step: a reader meets all of it or nothing."""
    unfinished = f".{secrets.token_hex(16)}{UNFINISHED}"
    try:
        file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
        try:
            with os.fdopen(file, "wb") as stream:
                stream.write(encode(name, made))
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished, dir_fd=folder)
            raise
    except OSError as error:
        warn_once(f"polyflash could not keep a compiled CPU kernel: {error}")


def warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=2)
