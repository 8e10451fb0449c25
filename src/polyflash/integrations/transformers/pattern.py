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

    def is_sound(self) -> bool:
        """Positions that restart say nothing about the order of keys unless documents are kept apart too."""
        found = self.pattern
        return found.positions is None or (found.documents is not None and not self.plain_positions)

    def _with(self, **fields: Any) -> bool:
        self.pattern = replace(self.pattern, **fields)
        return True

    def take(self, term: Any) -> bool:
        if not isinstance(term, Term):
            return False
        if term.kind == "&":
            return self.take(term.parts[0]) and self.take(term.parts[1])
        if term.kind == "true":
            return True
        if term.kind == ">=":  # every position is at least 0
            return self._is(term.parts[0], "query") and _is_int(term.parts[1]) and term.parts[1] <= 0
        if term.kind == "<=":
            return self._order(term.parts[0], term.parts[1])
        if term.kind == ">":
            return self._window(term.parts[0], term.parts[1])
        if term.kind == "==":
            return self._chunks(term.parts[0], term.parts[1]) or self._documents(*term.parts)
        return False

    def _order(self, a: Any, b: Any) -> bool:
        """key <= query, or |query - key| <= n."""
        if self._is(a, "key") and self._is(b, "query"):
            return self._with(causal=True)
        if not (_is_term(a, "abs") and _is_int(b) and b >= 0 and _is_term(a.parts[0], "-")):
            return False
        x, y = a.parts[0].parts
        if not (self._is(x, "query") and self._is(y, "key")):
            return False
        return self._with(left=_smaller(self.pattern.left, b), right=_smaller(self.pattern.right, b))

    def _window(self, a: Any, b: Any) -> bool:
        """key > query - n: the query itself and n - 1 keys before it."""
        if not (self._is(a, "key") and _is_term(b, "-") and self._is(b.parts[0], "query")):
            return False
        n = b.parts[1]
        if not (_is_int(n) and n >= 1):
            return False
        return self._with(left=_smaller(self.pattern.left, n - 1))

    def _documents(self, a: Any, b: Any) -> bool:
        """ids[batch, query] == ids[batch, key]."""
        ids = _table(a, "query")
        if ids is None or ids is not _table(b, "key") or self.pattern.documents is not None:
            return False
        return self._with(documents=ids)

    def _chunks(self, a: Any, b: Any) -> bool:
        """(key - starts[batch]) // n == (query - starts[batch]) // n."""
        if not (_is_term(a, "//") and _is_term(b, "//") and self.pattern.chunk is None):
            return False
        (x, n), (y, m) = a.parts, b.parts
        if not (_is_int(n) and _is_int(m) and n == m and _is_term(x, "-") and _is_term(y, "-")):
            return False
        starts = _per_request(x.parts[1])
        if starts is None or starts is not _per_request(y.parts[1]):
            return False
        if not (self._is(x.parts[0], "key") and self._is(y.parts[0], "query")):
            return False
        return self._with(chunk=n, chunk_starts=starts)

    def _is(self, term: Any, axis: str) -> bool:
        """Says whether `term` is the index of `axis`, or one table of positions at that index."""
        if _is_term(term, axis):
            self.plain_positions = True
            return True
        table, positions = _table(term, axis), self.pattern.positions
        if table is None or (positions is not None and positions is not table):
            return False
        return self._with(positions=table)


def _is_term(term: Any, kind: str) -> bool:
    return isinstance(term, Term) and term.kind == kind


def _is_int(x: Any) -> bool:
    return isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool)


def _table(term: Any, axis: str) -> Tensor | None:
    """The tensor of `tensor[batch, axis]`."""
    if not (_is_term(term, "at") and len(term.parts) == 3):
        return None
    tensor, batch, index = term.parts
    return tensor if _is_term(batch, "batch") and _is_term(index, axis) and tensor.ndim == 2 else None


def _per_request(term: Any) -> Tensor | None:
    """The tensor of `tensor[batch]`."""
    if not (_is_term(term, "at") and len(term.parts) == 2):
        return None
    tensor, batch = term.parts
    return tensor if _is_term(batch, "batch") and tensor.ndim == 1 else None


def _smaller(a: int | None, b: int) -> int:
    return b if a is None else min(a, b)
