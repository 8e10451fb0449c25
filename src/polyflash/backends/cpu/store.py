"""The cache of compiled objects: what an entry looks like, and what is thrown away.

An object is code, so its folder must be private (`cache.py`). Whatever looks wrong is a miss, and no trouble
with the disk stops a call.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
import warnings
from dataclasses import dataclass

from polyflash import env
from polyflash.cache import DAY_S, UNFINISHED, PrivateFolder

SCHEMA = 2
MAX_OBJECT_BYTES = 64 << 20
MAX_KEY_BYTES = 4096
KEPT_DAYS, KEPT_ENTRIES = 30, 512  # an entry nobody loaded for so long goes; beyond so many, the oldest go
SUFFIX = ".pfo"
_MAGIC = b"PFOBJ\0"
HEADER = struct.Struct("<6sHIIQ32s32s")  # magic, schema, bytes of key, symbol, object; origin, checksum


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


def open_folder(*, create: bool = False) -> PrivateFolder:
    """The folder, open; OSError if it cannot be trusted, FileNotFoundError if there is none."""
    return PrivateFolder.open(path(), create=create, holds_code=True)


def info() -> Info:
    """The present contents of the cache folder."""
    try:
        with open_folder() as folder:
            sizes = [status.st_size for _, status in folder.files(SUFFIX)]
        return Info(path(), len(sizes), sum(sizes))
    except FileNotFoundError:
        return Info(path(), 0, 0)
    except OSError as error:
        return Info(path(), 0, 0, str(error))


def entries(origin: bytes) -> list[Entry]:
    """Every entry of the cache folder, by key; OSError if the folder cannot be trusted.

    `origin` is the digest of what would make an entry now, empty if that is unknown.
    """
    listed = []
    try:
        with open_folder() as folder:
            for name, status in folder.files(SUFFIX):
                key, made_by = _peek(folder, name)
                stale = (not key or made_by != origin) if origin else None
                days = (time.time() - status.st_mtime) / DAY_S
                listed.append(Entry(name, status.st_size, days, key, stale))
    except FileNotFoundError:
        return []
    return sorted(listed, key=lambda entry: (entry.key, entry.days))


def trouble() -> str:
    """Why no entry can be written to the cache folder, which is made if need be; empty if one can."""
    try:
        with open_folder(create=True) as folder:
            folder.publish(f".trial{UNFINISHED}", b"")
            folder.remove(f".trial{UNFINISHED}")
    except OSError as error:
        return str(error)
    return ""


def clear(*, origin: bytes = b"") -> int:
    """Removes every compiled object from the folder, or with an `origin` those that it makes stale; returns
    how many. Code that is loaded stays loaded."""
    try:
        kept = {entry.file for entry in entries(origin) if not entry.stale} if origin else set()
        with open_folder() as folder:
            names = [name for name, _ in folder.files(SUFFIX, UNFINISHED) if name not in kept]
            return sum(folder.remove(name) and name.endswith(SUFFIX) for name in names)
    except OSError:
        return 0


def purge(folder: PrivateFolder) -> None:
    """Forgets what nobody loads: sources and versions change, and nobody asks for old entries again."""
    folder.purge(SUFFIX, days=KEPT_DAYS, most=KEPT_ENTRIES)


def _peek(folder: PrivateFolder, name: str) -> tuple[str, bytes]:
    """Key and origin in the header of an entry; ("", b"") if it is none. The checksum is not checked."""
    try:
        data = folder.read(name, MAX_OBJECT_BYTES)
        magic, schema, key_bytes, _, _, origin, _ = HEADER.unpack_from(data)
        if (magic, schema) != (_MAGIC, SCHEMA) or key_bytes > MAX_KEY_BYTES:
            return "", b""
        return data[HEADER.size : HEADER.size + key_bytes].decode(), origin
    except (OSError, ValueError, struct.error):
        return "", b""


def read(folder: PrivateFolder, name: str) -> Object | None:
    """The entry `name`, or None if it is absent or anything about it is unexpected."""
    try:
        entry = decode(name, folder.read(name, MAX_OBJECT_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warn_once(f"polyflash compiles anew, as an entry of its kernel cache is damaged: {error}")
        return None
    folder.touch(name)
    return entry


def write(folder: PrivateFolder, name: str, entry: Object) -> None:
    """Publishes an entry, unless the disk refuses it."""
    try:
        folder.publish(name, encode(name, entry))
    except OSError as error:
        warn_once(f"polyflash could not keep a compiled CPU kernel: {error}")


def encode(name: str, entry: Object) -> bytes:
    key, symbol = entry.key.encode()[:MAX_KEY_BYTES], entry.symbol.encode()
    check = _checksum(name, entry.origin, key, symbol, entry.code)
    header = HEADER.pack(_MAGIC, SCHEMA, len(key), len(symbol), len(entry.code), entry.origin, check)
    return header + key + symbol + entry.code


def decode(name: str, data: bytes) -> Object:
    """The object in `data`; ValueError unless every byte is as `encode` wrote it under this very name."""
    if len(data) < HEADER.size:
        raise ValueError(f"{name} is truncated")
    magic, schema, key_bytes, symbol_bytes, code_bytes, origin, checksum = HEADER.unpack_from(data)
    symbol_at, code_at = HEADER.size + key_bytes, HEADER.size + key_bytes + symbol_bytes
    if (magic, schema) != (_MAGIC, SCHEMA) or len(data) != code_at + code_bytes:
        raise ValueError(f"{name} has an unknown header or a wrong length")
    key, symbol, code = data[HEADER.size : symbol_at], data[symbol_at:code_at], data[code_at:]
    if checksum != _checksum(name, origin, key, symbol, code):
        raise ValueError(f"{name} has a wrong checksum")
    return Object(symbol.decode(), code, key.decode(), origin)


def _checksum(name: str, *parts: bytes) -> bytes:
    lengths = struct.pack(f"<{len(parts)}Q", *map(len, parts))
    return hashlib.sha256(b"".join((name.encode(), lengths, *parts))).digest()


def warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=2)
