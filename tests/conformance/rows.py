"""The rows under test and how a test calls one: pinned by name, and proved to be the one that ran."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

import polyflash
from polyflash import Mask, backends, target
from polyflash.capability import Capability
from polyflash.spec import Phase
from polyflash.workloads import Workload
from tests.tolerance import Expected, Figures, check, expect

FORWARD = tuple(
    row
    for row in backends.TABLE
    if row.phase is Phase.FORWARD and target.detect("cpu").name.startswith(row.targets)
)  # a row for another instruction set proves itself where that one is the target, simulated or not
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = ("float32", "bfloat16", "float16")
EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257)
HEAD_DIMS = (1, 3, 8, 16, 40, 59, 63, 64, 80, 96, 111, 128, 160, 192, 256)
# Rounding alone, as relative L2: what two exact algorithms may differ by (M3).
ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Runner:
    """Calls `polyflash.attention`, or `attention_varlen` with cu_seqlens, on one row. A refusal skips the
    test with the row's own words."""

    row: Capability

    def reasons(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[str, ...]:
        plan = polyflash.explain(q, k, v, return_lse=True, backend=self.row.backend, **options)
        if plan.chosen is self.row:
            assert plan.backend == self.row.backend
            return ()
        return next(verdict.reasons for verdict in plan.verdicts if verdict.row is self.row) or (
            "another row is first",
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None = None, **options: Any) -> Any:
        with torch.no_grad():
            reasons = self.reasons(q, k, v, **options)
            if reasons:
                pytest.skip(f"{self.row.name}: {'; '.join(reasons)}")
            function: Any = polyflash.attention_varlen if "cu_seqlens_q" in options else polyflash.attention
            return function(q, k, v, return_lse=True, backend=self.row.backend, out=out, **options)

    def skip_unless(self, workload: Workload) -> None:
        spec = workload.spec(need_lse=True)
        reasons = self.row.reasons_against(spec, target.detect("cpu"), by_name=True)
        if reasons:
            pytest.skip(f"{self.row.name}: {'; '.join(reasons)}")

    def skip_unless_here(self) -> None:
        """Skip where the row cannot run anything at all: wrong device, missing package."""
        self.skip_unless(Workload("plain", frozenset(), 1, 1, 1, 1, 1, 64))

    def checked(
        self, q: Tensor, k: Tensor, v: Tensor, *, label: str = "", pool: Figures | None = None, **options: Any
    ) -> Any:
        """Run, and hold the result to the oracle (its figures later, with a `pool`). Returns the result."""
        got = self(q, k, v, **options)
        layout = options.get("layout", "bhsd")
        out = got.out.transpose(1, 2) if layout == "bshd" else got.out
        check(out, got.lse, expected(q, k, v, options), label=label, options=options, pool=pool)
        return got


_expected: OrderedDict[bytes, Expected] = OrderedDict()


def expected(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Expected:
    """`expect`, remembered for the next row: tests run the same problem on every row in a row."""
    key = digest({"q": q, "k": k, "v": v, **options})
    if key not in _expected:
        _expected[key] = expect(q, k, v, **options)
        if len(_expected) > 200:
            _expected.popitem(last=False)
    return _expected[key]


def digest(given: dict[str, Any]) -> bytes:
    """What tells one problem from another: tensors by their values, a `Mask` by its fields."""
    found = hashlib.blake2b()
    for name, x in given.items():
        if isinstance(x, Mask):
            x = digest({f.name: getattr(x, f.name) for f in fields(x)})
        if isinstance(x, Tensor):
            found.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
            found.update(x.detach().contiguous().view(-1).view(torch.uint8).numpy())
        else:
            assert isinstance(x, (int, float, str, bytes, tuple, type(None))), name
            found.update(f"{name} {x!r}".encode())
    return found.digest()


def qkv(
    batch: int,
    heads: tuple[int, int] | int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    head_dim_v: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal q (batch, heads, seqlen_q, head_dim), k, v; `heads` is (query, key/value) or one number for
    both."""
    num_q, num_kv = heads if isinstance(heads, tuple) else (heads, heads)
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (batch, num_q, seqlen_q, head_dim),
        (batch, num_kv, seqlen_k, head_dim),
        (batch, num_kv, seqlen_k, head_dim_v or head_dim),
    )
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
