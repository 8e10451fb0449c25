"""Folders of this user's own files: compiled kernels, which are code, and tuned configs.

A folder is private if it belongs to the user and nobody else can write to it: to share one is to share the
right to run code. What is checked is the open folder, through which its files are then reached, so nobody can
exchange it afterwards. Every trouble is an OSError; what to do about it is the caller's affair."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass

UNFINISHED = ".tmp"
DAY_S = 86400.0
LOCK_SECONDS = 10.0  # after which a lock is taken for one that a killed process left


@dataclass(frozen=True, slots=True)
class PrivateFolder:
    """An open folder; a context that closes it. `descriptor` is None on systems without POSIX ownership."""

    path: str
    descriptor: int | None

    @classmethod
    def open(cls, path: str, *, create: bool = False, holds_code: bool = False) -> PrivateFolder:
        """Opens the folder, made if need be; a folder that `holds_code` must be proved private."""
        place = os.path.realpath(path)
        if os.name != "posix" and holds_code:
            raise OSError("no folder can be proved private on this system")
        if create:
            os.makedirs(os.path.dirname(place), mode=0o700, exist_ok=True)
            os.makedirs(place, mode=0o700, exist_ok=True)
        if os.name != "posix":
            return cls(place, None)
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _check_owner(os.fstat(descriptor), place)
            parent = os.path.dirname(place)
            while parent != os.path.dirname(parent):
                mode = os.stat(parent).st_mode
                if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                    raise PermissionError(f"everyone may write to {parent}")
                parent = os.path.dirname(parent)
        except OSError:
            os.close(descriptor)
            raise
        return cls(place, descriptor)

    def __enter__(self) -> PrivateFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)

    def files(self, *suffixes: str) -> list[tuple[str, os.stat_result]]:
        """Files with one of `suffixes`, except those another process removes meanwhile."""
        found = []
        for name in os.listdir(self.path if self.descriptor is None else self.descriptor):
            if name.endswith(suffixes):
                with contextlib.suppress(OSError):
                    status = os.stat(self._at(name), dir_fd=self.descriptor, follow_symlinks=False)
                    found.append((name, status))
        return found

    def read(self, name: str, most: int) -> bytes:
        """The bytes of a plain file of at most `most`, which nobody else may write."""
        # O_NONBLOCK: opening a pipe that somebody left here must not wait for a writer.
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        with os.fdopen(os.open(self._at(name), flags, dir_fd=self.descriptor), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > most:
                raise OSError(f"{name} is no plain file of at most {most} bytes")
            if self.descriptor is not None:
                _check_owner(status, name)
            return file.read(most + 1)

    def publish(self, name: str, data: bytes) -> None:
        """Writes a file in one step: a reader meets all of it or what was there before."""
        unfinished = self._at(f".{secrets.token_hex(16)}{UNFINISHED}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        file = os.open(unfinished, flags, 0o600, dir_fd=self.descriptor)
        try:
            with os.fdopen(file, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(unfinished, self._at(name), src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished, dir_fd=self.descriptor)
            raise

    def touch(self, name: str) -> None:
        """Marks a file as in use, once a day, so that `purge` spares it."""
        with contextlib.suppress(OSError):
            if time.time() - os.stat(self._at(name), dir_fd=self.descriptor).st_mtime > DAY_S:
                os.utime(self._at(name), dir_fd=self.descriptor)

    def remove(self, name: str) -> bool:
        """Removes a file; whether there was one."""
        try:
            os.unlink(self._at(name), dir_fd=self.descriptor)
        except OSError:
            return False
        return True

    def purge(self, suffix: str, *, days: float, most: int) -> None:
        """Removes files that nobody used for `days`, the oldest beyond `most`, and what a killed process left
        unfinished a day ago."""
        now = time.time()
        files = sorted((now - status.st_mtime, name) for name, status in self.files(suffix, UNFINISHED))
        old = [name for age, name in files if age > (days if name.endswith(suffix) else 1) * DAY_S]
        for name in {*old, *[name for _, name in files if name.endswith(suffix)][most:]}:
            self.remove(name)

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Admits one writer of a file at a time, by a folder that only one of them can make. A lock that a
        killed process left is taken over."""
        lock, began = self._at(f"{name}.lock"), time.monotonic()
        while True:
            try:
                os.mkdir(lock, dir_fd=self.descriptor)
                break
            except FileExistsError:
                if time.monotonic() - began > LOCK_SECONDS:
                    with contextlib.suppress(OSError):
                        os.rmdir(lock, dir_fd=self.descriptor)
                time.sleep(0.01)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.rmdir(lock, dir_fd=self.descriptor)

    def _at(self, name: str) -> str:
        return os.path.join(self.path, name) if self.descriptor is None else name


def _check_owner(status: os.stat_result, what: str) -> None:
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{what} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others may write to {what}")
