"""Which page holds which tokens: a pure allocator of page ids, without tensors.

A request owns a list of pages; its token j stands in place j % page_size of page j // page_size of that list.
A page counts its owners: requests, snapshots and open reservations. Nobody writes where another owner may
read: a page with several owners is copied before the first write, and the writer gets the copy.

    invariants: a page is free, or has as many owners as `check()` can find; never both
                a request has exactly ceil(length / page_size) pages, all different
"""

from __future__ import annotations

import itertools
import threading
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from polyflash.errors import SpecError, described, spec_error
from polyflash.spec import MOST_POSITIONS

_serials = itertools.count(1)  # of allocators, so that a handle fits no other than its own


class OutOfPages(SpecError):
    """The pool has too few free pages; nothing was changed.

    Attributes:
        needed: pages the call asked for.
        free: pages there were.
    """

    def __init__(self, message: str, needed: int, free: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.free = free


@dataclass(frozen=True, slots=True)
class Request:
    """A handle. `generation` is never used twice, so a handle that outlives its request fits no other."""

    generation: int
    allocator: int = field(repr=False)


Requests = Request | Sequence[Request]
Counts = int | Sequence[int]


class Copy(NamedTuple):
    """The first `slots` slots of page `source` go to page `target` before the reservation is written."""

    source: int
    target: int
    slots: int


@dataclass(eq=False, slots=True)
class _Entry:
    pages: array[int] = field(default_factory=lambda: array("i"))
    length: int = 0
    reserved: bool = False


@dataclass(eq=False, slots=True)
class Reservation:
    """Room for `counts[b]` more tokens of `requests[b]`, at positions from `starts[b]` on.

    Until `commit` the requests are what they were. `tails[b]` is the page that replaces the last one, or
    None; `fresh[b]` are the pages behind it; `copies` are due before the first write.
    """

    requests: tuple[Request, ...]
    counts: tuple[int, ...]
    starts: tuple[int, ...]
    tails: tuple[int | None, ...]
    fresh: tuple[tuple[int, ...], ...]
    copies: tuple[Copy, ...]
    open: bool = True

    @property
    def taken(self) -> list[int]:
        return [copy.target for copy in self.copies] + [page for pages in self.fresh for page in pages]


@dataclass(eq=False, slots=True)
class Snapshot:
    """Lengths and pages of every request at one moment. Owns those pages until `release`."""

    allocator: int
    entries: dict[Request, tuple[bytes, int]]
    held: bool = True

    @property
    def pages(self) -> list[int]:
        found: list[int] = []
        for pages, _ in self.entries.values():
            found.extend(array("i", pages))
        return found


class Pages:
    """The allocator. Every method holds one lock, changes everything it says or nothing, and may be called
    from any thread.

    Raises (all methods):
        SpecError: a request that was freed, is of another allocator, is named twice in one call, or has a
            reservation open where it is to be changed; a count or length that is no such number.
        OutOfPages: too few free pages.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = checked_count("num_pages", num_pages, 0, 2**31 - 1)
        self.page_size = checked_count("page_size", page_size, 1, 2**31 - 1)
        self.lock = threading.RLock()
        self.version = 0  # moves with every change of a length or a table
        self._id = next(_serials)
        self._generation = itertools.count(1)
        self._free = list(range(num_pages - 1, -1, -1))
        self._owners = [0] * num_pages
        self._entries: dict[Request, _Entry] = {}
        self._reservations: dict[int, Reservation] = {}
        self._snapshots: dict[int, Snapshot] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def requests(self) -> tuple[Request, ...]:
        with self.lock:
            return tuple(self._entries)

    def length(self, request: Request) -> int:
        with self.lock:
            return self._entry(request).length

    def lengths(self, requests: Sequence[Request]) -> list[int]:
        with self.lock:
            return [self._entry(r).length for r in requests]

    def pages(self, request: Request) -> array[int]:
        """A copy of the request's pages, in the order of its tokens."""
        with self.lock:
            return self._entry(request).pages[:]

    def owners(self, page: int) -> int:
        with self.lock:
            return self._owners[page]

    def add(self, count: int = 1) -> tuple[Request, ...]:
        """New requests without tokens or pages."""
        checked_count("count", count, 0, 2**31 - 1)
        with self.lock:
            made = tuple(self._handle() for _ in range(count))
            self._entries.update((request, _Entry()) for request in made)
            return made

    def fork(self, request: Request, count: int = 1) -> tuple[Request, ...]:
        """New requests with the tokens of `request`. No page is copied now."""
        checked_count("count", count, 0, 2**31 - 1)
        with self.lock:
            parent = self._entry(request)
            made = tuple(self._handle() for _ in range(count))
            for child in made:
                self._entries[child] = _Entry(parent.pages[:], parent.length)
            for page in parent.pages:
                self._owners[page] += count
            return made

    def reserve(self, requests: Sequence[Request], counts: Sequence[int]) -> Reservation:
        """Room for `counts[b]` more tokens each: for all requests, or `OutOfPages` and for none.

        A last page with other owners is replaced by a copy. One of its owners may write in place if all of
        them write in this call: the longest, whose first new slot lies behind what the others read.
        """
        with self.lock:
            entries = self._distinct(requests, unreserved=True)
            numbers = [checked_count("counts", n, 0, MOST_POSITIONS) for n in counts]
            if len(numbers) != len(entries):
                change = "Say how many tokens each request gets."
                raise spec_error("counts", got=len(numbers), wanted=f"{len(entries)} numbers", change=change)
            copied = self._to_copy(entries, numbers)
            more = []
            for entry, n in zip(entries, numbers, strict=True):
                if entry.length + n > MOST_POSITIONS:
                    change = "Positions are 32-bit numbers."
                    got = f"{entry.length} tokens and {n} more"
                    raise spec_error("counts", got=got, wanted=f"at most {MOST_POSITIONS}", change=change)
                more.append(self._pages_of(entry.length + n) - len(entry.pages))
            needed = len(copied) + sum(more)
            if needed > len(self._free):
                raise self._out_of_pages(needed, sum(numbers), len(entries))
            copies, tails = [], []
            for i, entry in enumerate(entries):
                tails.append(self._take() if i in copied else None)
                if (target := tails[-1]) is not None:
                    copies.append(Copy(entry.pages[-1], target, entry.length % self.page_size))
            made = Reservation(
                tuple(requests), tuple(numbers), tuple(e.length for e in entries), tuple(tails),
                tuple(tuple(self._take() for _ in range(n)) for n in more), tuple(copies),
            )  # fmt: skip
            for entry in entries:
                entry.reserved = True
            self._reservations[id(made)] = made
            return made

    def commit(self, reservation: Reservation) -> list[int]:
        """The tokens are there. Returns the pages that nobody owns any more."""
        with self.lock:
            self._close(reservation)
            left = []
            parts = (reservation.requests, reservation.counts, reservation.tails, reservation.fresh)
            for request, count, tail, fresh in zip(*parts, strict=True):
                entry = self._entries[request]
                if tail is not None:
                    left.append(entry.pages[-1])
                    entry.pages[-1] = tail
                entry.pages.extend(fresh)
                entry.length += count
            self.version += 1
            return self._leave(left)

    def rollback(self, reservation: Reservation) -> list[int]:
        """Nothing was reserved. Returns the pages that were taken."""
        with self.lock:
            self._close(reservation)
            return self._leave(reversed(reservation.taken))

    def truncate(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[int]:
        """Only the first `lengths[b]` tokens of each remain. Returns the pages that nobody owns any more."""
        with self.lock:
            entries = self._distinct(requests, unreserved=True)
            numbers = [checked_count("lengths", n, 0, MOST_POSITIONS) for n in lengths]
            if len(numbers) != len(entries):
                change = "Say how many tokens of each request remain."
                raise spec_error("lengths", got=len(numbers), wanted=f"{len(entries)} numbers", change=change)
            for entry, length in zip(entries, numbers, strict=True):
                if length > entry.length:
                    wanted = f"at most the {entry.length} there are"
                    change = "append() makes a request longer."
                    raise spec_error("lengths", got=length, wanted=wanted, change=change)
            left: list[int] = []
            for entry, length in zip(entries, numbers, strict=True):
                keep = self._pages_of(length)
                left.extend(entry.pages[keep:])
                del entry.pages[keep:]
                entry.length = length
            self.version += 1
            return self._leave(left)

    def free(self, requests: Sequence[Request]) -> list[int]:
        """Ends the requests; their handles fit nothing from here on. Returns the pages that nobody owns any
        more."""
        with self.lock:
            entries = self._distinct(requests, unreserved=True)
            for request in requests:
                del self._entries[request]
            self.version += 1
            return self._leave(page for entry in entries for page in entry.pages)

    def snapshot(self) -> Snapshot:
        """What every request is now, without tokens of open reservations. Its pages stay as they are until
        `release`: whoever appends to one of them copies it first."""
        with self.lock:
            entries = {r: (entry.pages.tobytes(), entry.length) for r, entry in self._entries.items()}
            made = Snapshot(self._id, entries)
            for page in made.pages:
                self._owners[page] += 1
            self._snapshots[id(made)] = made
            return made

    def restore(self, snapshot: Snapshot) -> list[int]:
        """Every request is again what it was, and those made since are gone. The snapshot may be used again.
        Returns the pages that nobody owns any more."""
        with self.lock:
            self._held(snapshot)
            if self._reservations:
                change = "Commit or roll back first."
                raise spec_error("restore", got="open reservations", wanted="none", change=change)
            left = [page for entry in self._entries.values() for page in entry.pages]
            self._entries = {r: _Entry(array("i", pages), n) for r, (pages, n) in snapshot.entries.items()}
            for page in snapshot.pages:
                self._owners[page] += 1
            self.version += 1
            return self._leave(left)

    def release(self, snapshot: Snapshot) -> list[int]:
        """The snapshot owns nothing any more. Returns the pages that nobody owns any more."""
        with self.lock:
            self._held(snapshot)
            del self._snapshots[id(snapshot)]
            snapshot.held = False
            return self._leave(snapshot.pages)

    def check(self) -> None:
        """Counts every page's owners anew.

        Raises:
            RuntimeError: an invariant is broken, which no sequence of calls may bring about.
        """
        with self.lock:
            found = [0] * self.num_pages
            wrong = []
            for request, entry in self._entries.items():
                if len(entry.pages) != self._pages_of(entry.length):
                    wrong.append(f"{request} has {len(entry.pages)} pages for {entry.length} tokens")
                if len(set(entry.pages)) != len(entry.pages):
                    wrong.append(f"{request} has a page twice")
            owned = [page for entry in self._entries.values() for page in entry.pages]
            owned += [page for snapshot in self._snapshots.values() for page in snapshot.pages]
            owned += [page for reservation in self._reservations.values() for page in reservation.taken]
            for page in owned:
                found[page] += 1
            free = set(self._free)
            if len(free) != len(self._free):
                wrong.append("a page is free twice")
            for page, (count, owners) in enumerate(zip(found, self._owners, strict=True)):
                if count != owners or (page in free) == (count > 0):
                    state = "free" if page in free else "taken"
                    wrong.append(f"page {page} is {state} with {owners} owners, of which {count} exist")
            if wrong:
                raise RuntimeError("; ".join(wrong))

    def _handle(self) -> Request:
        return Request(next(self._generation), self._id)

    def _pages_of(self, length: int) -> int:
        return -(-length // self.page_size)

    def _take(self) -> int:
        page = self._free.pop()
        self._owners[page] = 1
        return page

    def _leave(self, pages: Iterable[int]) -> list[int]:
        """One owner fewer for each; those without any are free, and returned."""
        freed = []
        for page in pages:
            self._owners[page] -= 1
            if self._owners[page] == 0:
                freed.append(page)
        self._free.extend(freed)
        return freed

    def _to_copy(self, entries: Sequence[_Entry], counts: Sequence[int]) -> set[int]:
        """Indices of those whose last page must not be written in place."""
        writers: dict[int, list[int]] = {}
        for i, (entry, n) in enumerate(zip(entries, counts, strict=True)):
            if n and entry.length % self.page_size and self._owners[entry.pages[-1]] > 1:
                writers.setdefault(entry.pages[-1], []).append(i)
        copied = set()
        for page, who in writers.items():
            copied.update(who)
            if len(who) == self._owners[page]:
                copied.remove(max(who, key=lambda i: entries[i].length))
        return copied

    def _entry(self, request: Request) -> _Entry:
        entry = self._entries.get(request) if isinstance(request, Request) else None
        if entry is not None:
            return entry
        if not isinstance(request, Request):
            got, change = described(request), "Pass what add() or fork() gave."
        elif request.allocator != self._id:
            got, change = "a handle of another cache", "Pass it to the cache that made it."
        else:
            got, change = "a handle that was freed", "Its pages may belong to others by now."
        raise spec_error("request", got=got, wanted="a living request", change=change)

    def _distinct(self, requests: Sequence[Request], unreserved: bool) -> list[_Entry]:
        entries = [self._entry(request) for request in requests]
        if len(set(requests)) != len(entries):
            got, change = "one of them twice", "Name each once per call."
            raise spec_error("requests", got=got, wanted="different requests", change=change)
        if unreserved and any(entry.reserved for entry in entries):
            got, change = "one with a step open", "Commit it or roll it back first."
            raise spec_error("requests", got=got, wanted="none with a step open", change=change)
        return entries

    def _close(self, reservation: Reservation) -> None:
        if self._reservations.pop(id(reservation), None) is None:
            change = "A reservation is committed or rolled back once."
            raise spec_error("reservation", got="one that is closed", wanted="an open one", change=change)
        reservation.open = False
        for request in reservation.requests:
            self._entries[request].reserved = False

    def _held(self, snapshot: Snapshot) -> None:
        if not isinstance(snapshot, Snapshot) or id(snapshot) not in self._snapshots:
            got = described(snapshot) if not isinstance(snapshot, Snapshot) else "one released or of another"
            change = "Take one by snapshot(), and release it once."
            raise spec_error("snapshot", got=got, wanted="a snapshot of this cache", change=change)

    def _out_of_pages(self, needed: int, tokens: int, requests: int) -> OutOfPages:
        free = len(self._free)
        got = f"{tokens} tokens for {requests} requests, which take {needed} pages"
        change = "Free or truncate requests, or make the pool larger. Nothing was changed."
        error = spec_error("append", got=got, wanted=f"at most the {free} free pages", change=change)
        return OutOfPages(str(error), needed, free)


def checked_count(name: str, value: object, least: int, most: int) -> int:
    """`value` if it is an int within [least, most].

    Raises:
        SpecError: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        wanted = f"an int from {least} to {most}"
        raise spec_error(name, got=described(value), wanted=wanted, change="Pass a plain number.")
    return value


def listed(requests: Requests) -> tuple[Request, ...]:
    """One request or several as a tuple.

    Raises:
        SpecError: no sequence at all.
    """
    if isinstance(requests, Request):
        return (requests,)
    if isinstance(requests, Sequence) and not isinstance(requests, str):
        return tuple(requests)
    change = "Pass what add() or fork() gave."
    raise spec_error("requests", got=described(requests), wanted="requests in a sequence", change=change)


def numbers(name: str, given: Counts, beside: Sequence[object]) -> list[int]:
    """One number for each of `beside`, of one for all or one for each.

    Raises:
        SpecError: neither.
    """
    if isinstance(given, int) and not isinstance(given, bool):
        return [given] * len(beside)
    if isinstance(given, Sequence) and not isinstance(given, str) and len(given) == len(beside):
        return list(given)
    wanted, change = f"a number, or {len(beside)} in a sequence", "One per request."
    raise spec_error(name, got=described(given), wanted=wanted, change=change)
