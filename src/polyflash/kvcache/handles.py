"""Handles of requests, the allocator's records, the error of a full pool, and checks of what callers pass."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from polyflash.errors import SpecError, described, spec_error


class OutOfPages(SpecError):
    """The pool has too few free pages; nothing was changed.

    Attributes:
        needed: pages the call asked for.
        free: pages there were."""

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
Tokens = Sequence[int] | Tensor


class Copy(NamedTuple):
    """The first `slots` slots of page `source` go to page `target` before the reservation is written."""

    source: int
    target: int
    slots: int


@dataclass(eq=False, slots=True)
class Entry:
    pages: array[int] = field(default_factory=lambda: array("i"))
    length: int = 0
    reserved: bool = False
    start: int = 0  # tokens before it, in whole pages, were given back
    evicted: int = 0  # tokens taken out: the next one's position is so much ahead of its place
    kept: int = 0  # tokens that the last eviction left

    def copy(self) -> Entry:
        return Entry(self.pages[:], self.length, False, self.start, self.evicted, self.kept)

    @property
    def owned(self) -> array[int]:
        """The pages it has, in the order of its tokens."""
        return array("i", (page for page in self.pages if page >= 0)) if self.start else self.pages


@dataclass(eq=False, slots=True)
class Reservation:
    """Room for `counts[b]` more tokens of `requests[b]`, which stay what they are until `commit`."""

    requests: tuple[Request, ...]
    counts: tuple[int, ...]
    entries: tuple[Entry, ...]  # of the requests after `commit`
    copies: tuple[Copy, ...]  # due before the first write
    taken: tuple[int, ...]  # pages, those of copies included
    reused: tuple[int, ...] = ()  # of them: from the memory of prefixes, which has forgotten them
    open: bool = True

    @property
    def starts(self) -> tuple[int, ...]:
        """Places of the first new tokens."""
        return tuple(e.length - n for e, n in zip(self.entries, self.counts, strict=True))


@dataclass(eq=False, slots=True)
class Snapshot:
    """Lengths and pages of every request at one moment. Owns those pages until `release`."""

    entries: dict[Request, Entry]
    held: bool = True

    def __repr__(self) -> str:
        state = "held" if self.held else "released"
        return f"Snapshot({len(self.entries)} requests, {len(set(self.pages))} pages, {state})"

    @property
    def pages(self) -> list[int]:
        return [page for entry in self.entries.values() for page in entry.owned]


def checked_count(name: str, value: object, least: int, most: int) -> int:
    """`value` if it is an int within [least, most]; else a SpecError."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise spec_error(name, described(value), f"an int from {least} to {most}", "Pass a plain number.")
    return value


def is_ints(x: object, shape: tuple[int, ...] | None = None, device: object = None) -> TypeGuard[Tensor]:
    """Says whether x is an int32 or int64 tensor, of this shape and on this device if they are given."""
    return (
        isinstance(x, Tensor)
        and x.dtype in (torch.int32, torch.int64)
        and (shape is None or x.shape == shape)
        and (device is None or x.device == device)
    )


def listed(requests: Requests) -> tuple[Request, ...]:
    """One request or several as a tuple; a SpecError for anything else."""
    if isinstance(requests, Request):
        return (requests,)
    if isinstance(requests, Sequence) and not isinstance(requests, str):
        return tuple(requests)
    change = "Pass what add() or fork() gave."
    raise spec_error("requests", described(requests), "requests in a sequence", change)


def numbers(name: str, given: Counts, beside: Collection[object]) -> list[int]:
    """One number for each of `beside`, of one for all or one for each; else a SpecError."""
    if isinstance(given, int) and not isinstance(given, bool):
        return [given] * len(beside)
    if isinstance(given, Sequence) and not isinstance(given, str) and len(given) == len(beside):
        return list(given)
    raise spec_error(name, described(given), f"a number, or {len(beside)} in a sequence", "One per request.")


def token_list(tokens: Tokens) -> list[int]:
    """Ids of tokens as a list, of a sequence or of a vector of ints, else a SpecError; a vector on a device
    is read, which synchronises."""
    given = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    if not isinstance(given, Sequence) or not all(type(x) is int for x in given):
        change = "Pass what the model was given, from its first token on."
        raise spec_error("tokens", described(tokens), "ids in a sequence", change)
    return list(given)
