"""A pure allocator of page ids, without tensors: it knows which page holds which tokens.

A request owns a list of pages; its token j stands in place j % page_size of page j // page_size of that list.
A page counts its owners: requests, snapshots, open reservations and the memory of prefixes. A page with
several owners is copied before the first write, and the writer gets the copy.

    invariants: a page is free, or has as many owners as `check()` can find; never both
                a request has exactly ceil(length / page_size) pages, all different; those before `start`,
                which were given back, are -1"""

from __future__ import annotations

import itertools
import threading
from array import array
from collections.abc import Hashable, Iterable, Sequence

from polyflash.errors import described, spec_error
from polyflash.kvcache.handles import (
    Copy,
    Counts,
    Entry,
    OutOfPages,
    Request,
    Requests,
    Reservation,
    Snapshot,
    Tokens,
    checked_count,
    listed,
    numbers,
    token_list,
)
from polyflash.kvcache.prefixes import Prefixes
from polyflash.spec import MOST_POSITIONS

_serials = itertools.count(1)  # of allocators, so that a handle fits no other than its own


class Pages:
    """The allocator. Every method holds one lock, changes everything it says or nothing, and may be called
    from any thread.

    Raises (all methods):
        SpecError: a request that was freed, is of another allocator, is named twice in one call, or has a
            reservation open where it is to be changed; a count or length that is no such number.
        OutOfPages: too few free pages."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = checked_count("num_pages", num_pages, 0, 2**31 - 1)
        self.page_size = checked_count("page_size", page_size, 1, 2**31 - 1)
        self.lock = threading.RLock()
        self.version = 0  # moves with every change of a length or a table
        self._id = next(_serials)
        self._generation = itertools.count(1)
        self._free = list(range(num_pages - 1, -1, -1))
        self._owners = [0] * num_pages
        self._entries: dict[Request, Entry] = {}
        self._reservations: dict[int, Reservation] = {}
        self._snapshots: dict[int, Snapshot] = {}
        self._prefixes = Prefixes(page_size)
        self._idle: dict[int, None] = {}  # remembered pages that nobody else owns, the longest unused first
        self._reused: list[int] = []
        self.evictions = 0

    @property
    def num_free(self) -> int:
        """Pages that a reservation may take: those nobody owns, and those that are only remembered."""
        return len(self._free) + len(self._idle)

    def requests(self) -> tuple[Request, ...]:
        with self.lock:
            return tuple(self._entries)

    def length(self, request: Request) -> int:
        with self.lock:
            return self._entry(request).length

    def entries(self, requests: Sequence[Request]) -> tuple[Entry, ...]:
        """Copies of what is known of requests."""
        with self.lock:
            return tuple(self._entry(request).copy() for request in requests)

    def pages(self, request: Request) -> array[int]:
        """A copy of the request's pages, in the order of its tokens; -1 for those given back."""
        with self.lock:
            return self._entry(request).pages[:]

    def owners(self, page: int) -> int:
        with self.lock:
            return self._owners[page]

    def add(self, count: int = 1) -> tuple[Request, ...]:
        """Makes requests without tokens or pages."""
        checked_count("count", count, 0, 2**31 - 1)
        with self.lock:
            made = tuple(self._handle() for _ in range(count))
            self._entries.update((request, Entry()) for request in made)
            return made

    def fork(self, request: Request, count: int = 1) -> tuple[Request, ...]:
        """Makes requests with the tokens of `request`. No page is copied now."""
        checked_count("count", count, 0, 2**31 - 1)
        with self.lock:
            parent = self._entry(request)
            made = tuple(self._handle() for _ in range(count))
            for child in made:
                self._entries[child] = parent.copy()
            for page in parent.owned:
                self._owners[page] += count
            return made

    def reserve(self, requests: Requests, counts: Counts) -> Reservation:
        """Reserves room for `counts[b]` more tokens each: for all requests, or `OutOfPages` and for none.

        A last page with other owners is replaced by a copy. One of its owners may write in place if all of
        them write in this call: the longest, whose first new slot lies behind what the others read."""
        with self.lock:
            entries, added, copied, more = self._wanted(requests, counts)
            needed = len(copied) + sum(more)
            if needed > self.num_free:
                raise self._out_of_pages(f"{sum(added)} tokens for {len(entries)} requests", needed)
            after, copies, taken = [], [], []
            for i, (entry, count) in enumerate(zip(entries.values(), added, strict=True)):
                new = entry.copy()
                new.length += count
                fresh = [self._take() for _ in range(more[i] + (i in copied))]
                taken += fresh
                if i in copied:
                    new.pages[-1] = fresh.pop(0)
                    copies.append(Copy(entry.pages[-1], new.pages[-1], entry.length % self.page_size))
                new.pages.extend(fresh)
                after.append(new)
                entry.reserved = True
            given = (tuple(entries), tuple(added), tuple(after))
            made = Reservation(*given, tuple(copies), tuple(taken), self._taken_anew())
            self._reservations[id(made)] = made
            return made

    def needed(self, requests: Requests, counts: Counts, new: Sequence[int]) -> int:
        """Counts the pages that `reserve` would take now, together with requests of `new` tokens."""
        with self.lock:
            _, _, copied, more = self._wanted(requests, counts)
            lengths = [checked_count("new", n, 0, MOST_POSITIONS) for n in new]
            return len(copied) + sum(more) + sum(map(self._pages_of, lengths))

    def commit(self, reservation: Reservation) -> list[int]:
        """Makes the reserved tokens part of their requests. Returns the pages that nobody owns any more."""
        with self.lock:
            self._close(reservation)
            self._entries.update(zip(reservation.requests, reservation.entries, strict=True))
            self.version += 1
            return self._leave(copy.source for copy in reservation.copies)

    def rollback(self, reservation: Reservation) -> list[int]:
        """Takes a reservation back. Returns the pages that it had taken."""
        with self.lock:
            self._close(reservation)
            return self._leave(reversed(reservation.taken))

    def truncate(self, requests: Requests, lengths: Counts) -> list[int]:
        """Keeps only the first `lengths[b]` tokens of each. Returns the pages that nobody owns any more."""
        with self.lock:
            entries = self._distinct(requests)
            kept = [*zip(entries.values(), numbers("lengths", lengths, entries), strict=True)]
            for entry, length in kept:
                checked_count("lengths", length, 0, MOST_POSITIONS)
                if length > entry.length:
                    change = "append() makes a request longer."
                    raise spec_error("lengths", length, f"at most the {entry.length} there are", change)
                least = max(entry.start, entry.kept)
                if 0 < length < least:
                    change = "The tokens before it were evicted or given back, at least in part."
                    raise spec_error("lengths", length, f"0, or {least} or more", change)
            left: list[int] = []
            for entry, length in kept:
                pages = self._pages_of(length)
                left.extend(page for page in reversed(entry.pages[pages:]) if page >= 0)
                del entry.pages[pages:]
                entry.length = length
                if not length:
                    entry.start = entry.evicted = entry.kept = 0
            self.version += 1
            return self._leave(left)

    def free(self, requests: Requests) -> list[int]:
        """Ends the requests, whose handles fit nothing any more. Returns the pages that nobody owns now."""
        with self.lock:
            entries = self._distinct(requests)
            for request in entries:
                del self._entries[request]
            self.version += 1
            return self._leave(page for entry in entries.values() for page in reversed(entry.owned))

    def free_left(self, requests: Requests, left: int) -> list[int]:
        """Gives back the pages whose every token stands more than `left` before a request's last one. Returns
        the pages that nobody owns any more."""
        with self.lock:
            entries = self._distinct(requests)
            checked_count("left", left, 0, MOST_POSITIONS)
            gone: list[int] = []
            for entry in entries.values():
                first, end = entry.start // self.page_size, (entry.length - 1 - left) // self.page_size
                for column in reversed(range(first, max(first, end))):
                    gone.append(entry.pages[column])
                    entry.pages[column] = -1
                entry.start = max(first, end) * self.page_size
            self.version += 1
            return self._leave(gone)

    def compact(self, request: Request, length: int, same: int) -> tuple[int, list[int]]:
        """Shortens the request to `length` tokens, of which the first `same` keep their place. Returns the
        first place that must be written again, and the pages whose contents nobody needs."""
        with self.lock:
            entry = self._distinct(request)[request]
            checked_count("length", length, 0, entry.length)
            stay = self._pages_of(length) if same >= length else same // self.page_size
            mine = [p >= 0 and self._owners[p] == 1 for p in entry.pages[stay : self._pages_of(length)]]
            if mine.count(False) > self.num_free:
                raise self._out_of_pages(f"{length} tokens that move", mine.count(False))
            new = entry.pages[: self._pages_of(length)]
            for column, own in enumerate(mine, stay):
                if not own:
                    new[column] = self._take()
            left = [page for page in reversed(entry.owned) if page not in set(new)]
            entry.pages = new
            entry.evicted += entry.length - length
            entry.length = entry.kept = length
            entry.start = 0
            self.version += 1
            return min(stay * self.page_size, length), [*self._leave(left), *self._taken_anew()]

    def place(self, request: Request, start: int, evicted: int, kept: int) -> None:
        """Puts a request without tokens where another one stood when it was swapped out."""
        with self.lock:
            if start % self.page_size:
                got, change = f"{start} tokens given back", "Swap it into a cache with pages of that size."
                raise spec_error("swapped", got, f"whole pages of {self.page_size} tokens", change)
            entry = self._entry(request)
            entry.pages = array("i", [-1] * (start // self.page_size))
            entry.length = entry.start = start
            entry.evicted, entry.kept = evicted, kept
            self.version += 1

    def remember(self, request: Request, tokens: Tokens, key: Hashable) -> int:
        """Makes the request's full pages findable by its tokens. Returns how many tokens those hold."""
        tokens = token_list(tokens)
        with self.lock:
            entry = self._entry(request)
            if entry.start or entry.evicted or len(tokens) > entry.length:
                got = f"{len(tokens)} for {entry.length} in the cache"
                if entry.start or entry.evicted:
                    got = "a request of which some were evicted or given back"
                change = "Pass the tokens whose keys the request holds, from its first one on."
                raise spec_error("tokens", got, "those of the request", change)
            for page in self._prefixes.insert(tokens, entry.pages, key):
                self._owners[page] += 1
            return len(tokens) // self.page_size * self.page_size

    def found(self, tokens: Tokens, key: Hashable) -> list[int]:
        """Remembered pages of the longest prefix, without the last token."""
        with self.lock:
            return self._prefixes.find(token_list(tokens)[:-1], key)

    def begin(self, tokens: Tokens, key: Hashable) -> Request:
        """Makes a request that begins with the pages of `found`."""
        with self.lock:
            pages = array("i", self.found(tokens, key))
            made = self._handle()
            self._entries[made] = Entry(pages, len(pages) * self.page_size)
            for page in pages:
                self._owners[page] += 1
                self._idle.pop(page, None)
            return made

    def forget(self) -> list[int]:
        """Forgets all prefixes. Returns the pages that nobody owns any more."""
        with self.lock:
            pages = self._prefixes.clear()
            self._idle.clear()
            return self._leave(pages)

    def snapshot(self) -> Snapshot:
        """Records what every request is now, without tokens of open reservations. The pages stay as they are
        until `release`: an append to one of them copies it first."""
        with self.lock:
            entries = {request: entry.copy() for request, entry in self._entries.items()}
            made = Snapshot(entries)
            for page in made.pages:
                self._owners[page] += 1
            self._snapshots[id(made)] = made
            return made

    def restore(self, snapshot: Snapshot) -> list[int]:
        """Makes every request what it was; those made since are gone. The snapshot may be used again. Returns
        the pages that nobody owns any more."""
        with self.lock:
            self._held(snapshot)
            if self._reservations:
                raise spec_error("restore", "open reservations", "none", "Commit or roll back first.")
            left = [page for entry in self._entries.values() for page in reversed(entry.owned)]
            self._entries = {request: entry.copy() for request, entry in snapshot.entries.items()}
            for page in snapshot.pages:
                self._owners[page] += 1
            self.version += 1
            return self._leave(left)

    def release(self, snapshot: Snapshot) -> list[int]:
        """Ends a snapshot, which then owns nothing. Returns the pages that nobody owns any more."""
        with self.lock:
            self._held(snapshot)
            del self._snapshots[id(snapshot)]
            snapshot.held = False
            return self._leave(snapshot.pages)

    def contents(self) -> tuple[list[Entry], list[Entry], list[int], int, int]:
        """Copies of the entries of requests, of those of snapshots, remembered pages; and the numbers of free
        pages and of those that are only remembered."""
        with self.lock:
            entries = [entry.copy() for entry in self._entries.values()]
            held = [entry.copy() for one in self._snapshots.values() for entry in one.entries.values()]
            return entries, held, self._prefixes.pages(), len(self._free), len(self._idle)

    def check(self) -> None:
        """Counts every page's owners anew.

        Raises:
            RuntimeError: an invariant is broken, which no sequence of calls may bring about."""
        with self.lock:
            found = [0] * self.num_pages
            wrong = []
            for request, entry in self._entries.items():
                if len(entry.pages) != self._pages_of(entry.length):
                    wrong.append(f"{request} has {len(entry.pages)} pages for {entry.length} tokens")
                if len(set(entry.owned)) != len(entry.owned):
                    wrong.append(f"{request} has a page twice")
                first = entry.start // self.page_size
                if any((page < 0) != (n < first) for n, page in enumerate(entry.pages)):
                    wrong.append(f"{request} lacks other pages than those before {entry.start}")
            owned = [page for entry in self._entries.values() for page in entry.owned]
            owned += [page for snapshot in self._snapshots.values() for page in snapshot.pages]
            owned += [page for reservation in self._reservations.values() for page in reservation.taken]
            remembered = self._prefixes.pages()
            for page in (*owned, *remembered):
                found[page] += 1
            if set(self._idle) != {page for page in remembered if self._owners[page] == 1}:
                wrong.append("other pages are idle than those that are only remembered")
            free = set(self._free)
            if len(free) != len(self._free):
                wrong.append("a page is free twice")
            for page, (count, owners) in enumerate(zip(found, self._owners, strict=True)):
                if count != owners or (page in free) == (count > 0):
                    state = "free" if page in free else "taken"
                    wrong.append(f"page {page} is {state} with {owners} owners, of which {count} exist")
            if wrong:
                raise RuntimeError("; ".join(wrong))

    def check_settled(self, requests: Sequence[Request]) -> None:
        """Checks that none of the requests has a step open."""
        with self.lock:
            self._distinct(tuple(dict.fromkeys(requests)))

    def _handle(self) -> Request:
        return Request(next(self._generation), self._id)

    def _pages_of(self, length: int) -> int:
        return -(-length // self.page_size)

    def _wanted(
        self, requests: Requests, counts: Counts
    ) -> tuple[dict[Request, Entry], list[int], set[int], list[int]]:
        """Works out what `reserve` with these arguments needs: entries, checked counts, indices of those
        whose last page is copied, and the number of new pages of each."""
        entries = self._distinct(requests)
        added = [checked_count("counts", n, 0, MOST_POSITIONS) for n in numbers("counts", counts, entries)]
        more = []
        for entry, n in zip(entries.values(), added, strict=True):
            if entry.length + entry.evicted + n > MOST_POSITIONS:
                got = f"{entry.length + entry.evicted} tokens and {n} more"
                raise spec_error("counts", got, f"at most {MOST_POSITIONS}", "Positions are 32-bit numbers.")
            more.append(self._pages_of(entry.length + n) - len(entry.pages))
        return entries, added, self._to_copy([*entries.values()], added), more

    def _take(self) -> int:
        """A page that nobody owns, or the remembered one that was unused for longest. There is one."""
        if self._free:
            page = self._free.pop()
        else:
            page = next(iter(self._idle))
            del self._idle[page]
            self._prefixes.forget(page)
            self._reused.append(page)
            self.evictions += 1
        self._owners[page] = 1
        return page

    def _taken_anew(self) -> tuple[int, ...]:
        reused, self._reused = tuple(self._reused), []
        return reused

    def _leave(self, pages: Iterable[int]) -> list[int]:
        """Takes one owner from each; pages left without any are freed, and returned."""
        freed = []
        for page in pages:
            self._owners[page] -= 1
            if self._owners[page] == 0:
                freed.append(page)
            elif self._owners[page] == 1 and page in self._prefixes:
                self._idle[page] = None
        self._free.extend(freed)
        return freed

    def _to_copy(self, entries: Sequence[Entry], counts: Sequence[int]) -> set[int]:
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

    def _entry(self, request: Request) -> Entry:
        entry = self._entries.get(request) if isinstance(request, Request) else None
        if entry is not None:
            return entry
        if not isinstance(request, Request):
            got, change = described(request), "Pass what add() or fork() gave."
        elif request.allocator != self._id:
            got, change = "a handle of another cache", "Pass it to the cache that made it."
        else:
            got, change = "a handle that was freed", "Its pages may belong to others by now."
        raise spec_error("request", got, "a living request", change)

    def _distinct(self, requests: Requests) -> dict[Request, Entry]:
        who = listed(requests)
        entries = {request: self._entry(request) for request in who}
        if len(who) != len(entries):
            change = "Name each once per call."
            raise spec_error("requests", "one of them twice", "different requests", change)
        if any(entry.reserved for entry in entries.values()):
            change = "Commit it or roll it back first."
            raise spec_error("requests", "one with a step open", "none with a step open", change)
        return entries

    def _close(self, reservation: Reservation) -> None:
        if self._reservations.pop(id(reservation), None) is None:
            change = "A reservation is committed or rolled back once."
            raise spec_error("reservation", "one that is closed", "an open one", change)
        reservation.open = False
        for request in reservation.requests:
            self._entries[request].reserved = False

    def _held(self, snapshot: Snapshot) -> None:
        if not isinstance(snapshot, Snapshot) or id(snapshot) not in self._snapshots:
            got = described(snapshot) if not isinstance(snapshot, Snapshot) else "one released or of another"
            change = "Take one by snapshot(), and release it once."
            raise spec_error("snapshot", got, "a snapshot of this cache", change)

    def _out_of_pages(self, what: str, needed: int) -> OutOfPages:
        free = self.num_free
        change = "Free or truncate requests, or make the pool larger. Nothing was changed."
        got = f"{what}, which take {needed} pages"
        error = spec_error("append", got=got, wanted=f"at most the {free} free pages", change=change)
        return OutOfPages(str(error), needed, free)
