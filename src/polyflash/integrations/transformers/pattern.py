"""Recognition of transformers' mask functions, by calling each once with symbols for its indices.

transformers builds masks from functions (batch, head, query, key) -> bool, combined by closures: causal,
sliding window, chunks, packed documents. `read()` calls such a function with four `Term`s. Its comparisons
and index operations build an expression instead of numbers, and the expression is matched against the
patterns that need no (seqlen_q, seqlen_k) tensor. Nothing depends on names or closures, so a function that
computes something else is never mistaken for a known one, and torch.compile can trace it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function


@dataclass(frozen=True, eq=False)
class Pattern:
    """A conjunction: query at position p of request b sees the key at position n iff all of these hold.

    Positions are counted from the first key ever seen, or are `positions` where documents are packed.

    causal: n <= p.    left: n >= p - left.    right: n <= p + right.
    documents: (batch, seqlen) ids, those of p and n are equal.
    chunk: (n - start) // chunk == (p - start) // chunk, start = chunk_starts[b]."""

    causal: bool = False
    left: int | None = None
    right: int | None = None
    documents: Tensor | None = None  # int (batch, seqlen)
    positions: Tensor | None = None  # int (batch, seqlen)
    chunk: int | None = None
    chunk_starts: Tensor | None = None  # int (batch,)


def _operator(kind: str) -> Callable[..., Any]:
    """A method of `Term` that builds the node of an operator."""

    def build(self: Term, *others: Any) -> Term:
        return Term(kind, self, *others)

    return build


class Term:
    """A node of the expression: the operator's name and its operands; a leaf has none."""

    device = None  # mask functions move results to each other's device
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, kind: str, *parts: Any) -> None:
        self.kind = kind
        self.parts = parts

    __le__, __ge__ = _operator("<="), _operator(">=")
    __lt__, __gt__ = _operator("<"), _operator(">")
    __eq__, __ne__ = _operator("=="), _operator("!=")
    __and__ = __rand__ = _operator("&")
    __or__ = __ror__ = _operator("|")
    __add__, __sub__, __floordiv__ = _operator("+"), _operator("-"), _operator("//")
    __invert__, __abs__ = _operator("~"), _operator("abs")

    def __bool__(self) -> bool:
        raise TypeError("a mask function that branches on an index has no structure to read")

    def new_ones(self, *shape: Any, dtype: Any = None) -> Term:
        return Term("true")

    def new_zeros(self, *shape: Any, dtype: Any = None) -> Term:
        return Term("false")

    def to(self, *where: Any) -> Term:
        return self


class _Reading(TorchFunctionMode):
    """Indexing a tensor by a `Term` makes a `Term` as well."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if isinstance(index[-1], Term):
                return Term("at", args[0], *index)
        return func(*args, **(kwargs or {}))


_CAUSAL, _FULL = Pattern(causal=True), Pattern()
_UNREADABLE = (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError)


def read(mask_function: Callable[..., Any]) -> Pattern | None:
    """Returns the pattern that `mask_function` computes, or None if it is no conjunction of known ones."""
    if mask_function is causal_mask_function:
        return _CAUSAL
    if mask_function is bidirectional_mask_function:
        return _FULL
    try:
        with _Reading():
            term = mask_function(Term("batch"), Term("head"), Term("query"), Term("key"))
    except _UNREADABLE:
        return None
    matching = _Matching()
    return matching.pattern if matching.take(term) and matching.is_sound() else None


class _Matching:
    """Collects the atoms of a conjunction; `take()` is False at the first one that is not known."""

    def __init__(self) -> None:
        self.pattern = Pattern()
        self.plain_positions = False
        self.n: Any = None
        self.tensor: Tensor | None = None

    def is_sound(self) -> bool:
        """Positions that restart say nothing about the order of keys unless documents are kept apart too."""
        found = self.pattern
        return found.positions is None or (found.documents is not None and not self.plain_positions)

    def take(self, term: Any) -> bool:
        if not isinstance(term, Term):
            return False
        if term.kind == "&":
            return self.take(term.parts[0]) and self.take(term.parts[1])
        q, k, n = Term("position", "query"), Term("position", "key"), Term("int")
        starts = Term("at", Term("tensor", 1), Term("batch"))
        ids = [Term("at", Term("tensor", 2), Term("batch"), Term(axis)) for axis in ("query", "key")]
        found = self.pattern
        if self._fits(term, q >= n):  # every position is at least 0
            return self.n <= 0
        if self._fits(term, k <= q):
            return self._with(causal=True)
        if self._fits(term, abs(q - k) <= n):
            left, right = (_smaller(side, self.n) for side in (found.left, found.right))
            return self.n >= 0 and self._with(left=left, right=right)
        if self._fits(term, k > q - n):  # the query itself and n - 1 keys before it
            return self.n >= 1 and self._with(left=_smaller(found.left, self.n - 1))
        if self._fits(term, (k - starts) // n == (q - starts) // n):
            return found.chunk is None and self._with(chunk=self.n, chunk_starts=self.tensor)
        if self._fits(term, ids[0] == ids[1]):
            return found.documents is None and self._with(documents=self.tensor)
        return term.kind == "true"

    def _with(self, **fields: Any) -> bool:
        self.pattern = replace(self.pattern, **fields)
        return True

    def _fits(self, term: Any, template: Term) -> bool:
        self.n, self.tensor = None, None
        return self._match(term, template)

    def _match(self, term: Any, template: Term) -> bool:
        """Compares an expression with a template; its number and its tensor are the same wherever it has
        them, and become `n` and `tensor`."""
        kind, parts = template.kind, template.parts
        if kind == "position":
            return self._is(term, parts[0])
        if kind == "int":
            self.n = term if self.n is None else self.n
            return isinstance(term, (int, torch.SymInt)) and not isinstance(term, bool) and self.n == term
        if kind == "tensor":
            self.tensor = term if self.tensor is None else self.tensor
            return isinstance(term, Tensor) and term.ndim == parts[0] and self.tensor is term
        if not _is_term(term, kind) or len(term.parts) != len(parts):
            return False
        return all(self._match(x, y) for x, y in zip(term.parts, parts, strict=True))

    def _is(self, term: Any, axis: str) -> bool:
        """Says whether `term` is the index of `axis`, or one table of positions at that index."""
        if _is_term(term, axis):
            self.plain_positions = True
            return True
        if not (_is_term(term, "at") and len(term.parts) == 3):
            return False
        table, batch, index = term.parts
        if not (_is_term(batch, "batch") and _is_term(index, axis) and table.ndim == 2):
            return False
        known = self.pattern.positions
        return (known is None or known is table) and self._with(positions=table)


def _is_term(term: Any, kind: str) -> bool:
    return isinstance(term, Term) and term.kind == kind


def _smaller(a: int | None, b: int) -> int:
    return b if a is None else min(a, b)
