"""Memory of prefixes: full pages, found by their tokens and all tokens before them.

A key depends on every token before it, so a page is found by its own tokens and by the page before it: a
dictionary from (entry of the page before, tokens) to the page. Tokens that hash alike are compared one by
one. Names of entries are never used twice, so what followed a forgotten page is not found behind another
one."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

_Place = tuple[Hashable, tuple[int, ...]]  # the entry before, or what the root is named by; and tokens


class Prefixes:
    """The pages of remembered prefixes; owners are counted elsewhere."""

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._names = itertools.count(1)
        self._entries: dict[_Place, tuple[int, int]] = {}  # name of the entry, page
        self._places: dict[int, _Place] = {}  # of pages

    def __contains__(self, page: int) -> bool:
        return page in self._places

    def pages(self) -> list[int]:
        return list(self._places)

    def find(self, tokens: Sequence[int], key: Hashable) -> list[int]:
        """Pages of the longest prefix of full pages."""
        before: Hashable = (key,)
        found = []
        for block in self._blocks(tokens):
            entry = self._entries.get((before, block))
            if entry is None:
                break
            before = entry[0]
            found.append(entry[1])
        return found

    def insert(self, tokens: Sequence[int], pages: Sequence[int], key: Hashable) -> list[int]:
        """Full pages of `tokens`, which stand in `pages`. Returns those that were not there in any place; who
        comes with another page for tokens that have one changes nothing."""
        before: Hashable = (key,)
        new = []
        for block, page in zip(self._blocks(tokens), pages, strict=False):
            place = before, block
            if place not in self._entries:
                if page in self._places:  # behind a page that was forgotten
                    self.forget(page)
                else:
                    new.append(page)
                self._entries[place] = next(self._names), page
                self._places[page] = place
            before = self._entries[place][0]
        return new

    def forget(self, page: int) -> None:
        del self._entries[self._places.pop(page)]

    def clear(self) -> list[int]:
        """Forgets all, and returns their pages."""
        pages = self.pages()
        self._entries.clear()
        self._places.clear()
        return pages

    def _blocks(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        ends = range(self._size, len(tokens) + 1, self._size)
        return [tuple(tokens[end - self._size : end]) for end in ends]
