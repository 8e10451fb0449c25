"""Watching what codes cost in use: now and then some rows are computed from k and v as they are, too."""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from polyflash import api
from polyflash.compare import worst_error
from polyflash.errors import described, spec_error
from polyflash.merging import AttentionOutput
from polyflash.quant.choosing import Pair
from polyflash.quant.scheme import NAMED, Scheme
from polyflash.quant.tensor import QuantizedTensor, quantize

OnBreach = Literal["warn", "raise", "exact"]
Exact = tuple[Tensor, Tensor]
Operand = Tensor | QuantizedTensor
_BY_ROWS = {"causal", "window", "softcap", "sinks", "scale", "layout"}  # rows of such calls stand alone
_KEPT = 0.8  # of the books at each sample: what the data is now counts more than what it was


class ErrorBudgetExceeded(RuntimeError):
    """Codes cost more than their guard allows."""


class Guard:
    """A budget for the error of quantised keys and values, and what happens when it is spent.

        guard = quant.Guard("int8", error=1e-2)
        out = guard(q, k, v, causal=True)       # attention over codes
        print(guard)

    Of the first call and of every `every`-th after it, some rows are computed again from k and v as they
    are. The books hold the differences of these rows, the latest with most weight; the budget is spent when
    their relative L2 is above `error`. Calls between are counted, nothing more. A guard is for one thread.

    Args:
        scheme: how calls quantise k and v: a name of `quant.NAMED`, or a pair of schemes.
        error: relative L2 allowed.
        every: calls from one comparison to the next.
        rows: neighbouring query rows of one request to compare, others each time. Calls with operands per row
            or request are compared whole.
        on_breach: "warn" once and go on; "raise" `ErrorBudgetExceeded`; "exact": warn once, and run this call
            and all later ones on k and v as they are.

    Attributes:
        calls, compared, breaches: how many calls were made, compared, and found beyond the budget.
        exact: calls that ran on k and v as they are.
        unknown: calls that were due and could not be compared: given codes alone, or dropping weights.
        error, worst_row: relative L2 in the books, and the largest of any compared row.

    Raises:
        SpecError: an unknown scheme or word, or a number that is not positive."""

    def __init__(
        self,
        scheme: str | Pair = "int8",
        *,
        error: float = 1e-2,
        every: int = 64,
        rows: int = 16,
        on_breach: OnBreach = "warn",
    ) -> None:
        pair = NAMED.get(scheme) if isinstance(scheme, str) else scheme
        if not isinstance(pair, tuple) or [type(x) for x in pair] != [Scheme, Scheme]:
            got, change = described(scheme), "One scheme is for k, one for v."
            raise spec_error("scheme", got, f"a pair of schemes, or one of {', '.join(NAMED)}", change)
        for name, x, kind in (("error", error, (int, float)), ("every", every, int), ("rows", rows, int)):
            if not isinstance(x, kind) or not 0 < x < math.inf:
                raise spec_error(name, described(x), "a positive number", "See the docstring of Guard.")
        if on_breach not in get_args(OnBreach):
            raise spec_error("on_breach", described(on_breach), ", ".join(get_args(OnBreach)), "Choose one.")
        self.scheme, self.allowed, self.every, self.rows, self.on_breach = pair, error, every, rows, on_breach
        self.calls = self.compared = self.breaches = self.exact = self.unknown = 0
        self.error = self.worst_row = self._off = self._size = 0.0
        self._warned: set[str] = set()

    def __call__(
        self, q: Tensor, k: Operand, v: Operand, *, exact: Exact | None = None, **options: Any
    ) -> Any:
        """`attention(q, k, v, **options)` over the codes of k and v, watched. k and v are float, quantised
        here, or codes, which alone do not tell what they lost: `exact` are k and v as they were."""
        if exact is None and isinstance(k, Tensor) and isinstance(v, Tensor):
            exact = k, v
        due = self.due()
        if self.on_breach == "exact" and self.breaches:
            return self._run_exact(q, exact, options)
        layout = options.get("layout", "bhsd")
        coded: list[Any] = [
            quantize(x, scheme, layout=layout) if isinstance(x, Tensor) else x
            for x, scheme in zip((k, v), self.scheme, strict=True)
        ]
        result = api.attention(q, *coded, **options)
        if due and (exact is None or options.get("dropout_p")):
            self.unknown += 1
            told = "this call cannot be compared: give it exact=(k, v) beside codes, and no dropout"
            self._warn("unknown", told, 3)
        elif due and exact is not None:
            with torch.no_grad():
                within = self.check(*self._again(q, exact, result, options))
            if not within and self.on_breach == "exact":
                return self._run_exact(q, exact, options)
        return result

    def due(self) -> bool:
        """Counts a call and says whether to compare it: with `check`, for calls of other functions."""
        self.calls += 1
        return (self.calls - 1) % self.every == 0

    def check(self, found: Tensor, exact: Tensor) -> bool:
        """Enters the difference of two results (..., channels) into the books. Returns whether the budget
        holds; where it does not, warns or raises as `on_breach` says."""
        a, b = found.detach().double(), exact.detach().double()
        off = (a - b).masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)
        b = b.masked_fill(~b.isfinite(), 0.0)
        self.compared += 1
        self._off = _KEPT * self._off + float(off.square().sum())
        self._size = _KEPT * self._size + float(b.square().sum())
        self.error = math.sqrt(self._off / self._size) if self._size else math.inf if self._off else 0.0
        self.worst_row = max(self.worst_row, worst_error(off, b))
        if self.error <= self.allowed:
            return True
        self.breaches += 1
        text = f"quantised k and v cost {self.error:.1e}, more than the {self.allowed:.1e} allowed"
        if self.on_breach == "raise":
            raise ErrorBudgetExceeded(f"{text}. {self}")
        then = "k and v are read as they are from now on" if self.on_breach == "exact" else "calls go on"
        self._warn("breach", f"{text}; {then}")
        return False

    def _again(self, q: Tensor, exact: Exact, result: Any, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Some rows of a result, and the same computed from k and v as they are, in float32 or wider."""
        out = result.out if isinstance(result, AttentionOutput) else result
        given = {n: x for n, x in options.items() if x is not None and n not in ("out", "return_lse")}
        if not given.keys() <= _BY_ROWS:
            return out, api.attention(q, *exact, **given)
        dim = 1 if given.get("layout") == "bshd" else 2
        ahead = q.shape[dim] - min(self.rows, q.shape[dim])
        first, request = self.compared * 7919 % (ahead + 1), self.compared % max(1, q.shape[0])
        behind = 0 if given.get("causal") == "top_left" else exact[0].shape[dim] - q.shape[dim]
        given["q_offset"] = first + behind
        q, k, v, out = (x[request : request + 1] for x in (q, *exact, out))
        q, out = (x.narrow(dim, first, q.shape[dim] - ahead) for x in (q, out))
        wide = torch.promote_types(q.dtype, torch.float32)
        return out, api.attention(*(x.to(wide) for x in (q, k, v)), **given)

    def _run_exact(self, q: Tensor, exact: Exact | None, options: dict[str, Any]) -> Any:
        if exact is None:
            wanted = "exact: got None, wanted k and v as they are, which calls fall back on beyond the budget"
            raise ErrorBudgetExceeded(f"{wanted}. {self}")
        self.exact += 1
        return api.attention(q, *exact, **options)

    def _warn(self, kind: str, text: str, depth: int = 4) -> None:
        """Warns of each kind of trouble once."""
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"polyflash.quant.Guard: {text}", UserWarning, stacklevel=depth)

    def __repr__(self) -> str:
        counts = (f"{getattr(self, n)} {n}" for n in ("calls", "compared", "unknown", "exact", "breaches"))
        found = f"error {self.error:.1e} of {self.allowed:.1e}, worst row {self.worst_row:.1e}"
        return f"Guard: {', '.join(counts)}; {found}"
