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
from polyflash import Mask, backends
from polyflash.capability import Capability
from polyflash.spec import Feature, Phase, is_decode
from polyflash.workloads import Workload
from tests import device
from tests.conformance.pages import contiguous
from tests.tolerance import Expected, Figures, check, expect

# A row for another instruction set proves itself where that one is the target, simulated or not.
HERE = tuple(row for row in backends.TABLE if device.here().name.startswith(row.targets))
FORWARD = tuple(row for row in HERE if row.phase is Phase.FORWARD)
STEPS = tuple(row for row in HERE if row.phase in (Phase.FORWARD, Phase.DECODE))  # decode problems too
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = ("float32", "bfloat16", "float16")
# Of rows that are for less than all calls: what they have, and no more.
_F = Feature
_BOUNDED = frozenset(
    {_F.CAUSAL, _F.WINDOW, _F.Q_OFFSET, _F.KV_LENS, _F.KV_STARTS, _F.VARLEN, _F.SINKS, _F.GQA, _F.LSE}
)
_SCORED = frozenset({_F.SOFTCAP, _F.ALIBI, _F.MASK, _F.SEGMENTS, _F.HEAD_DIM_V})
_METAL = _BOUNDED | _SCORED | {_F.BIAS, _F.BATCH_INVARIANT, _F.DROPOUT}
_READ = frozenset({_F.CODES, _F.PAGED})
ALL_OF = {
    ("metal", Phase.FORWARD): _METAL | _READ,
    ("metal", Phase.DECODE): (_METAL | _READ) - {_F.BATCH_INVARIANT, _F.VARLEN, _F.DROPOUT},
    ("metal", Phase.BACKWARD): _METAL,
    ("gluon", Phase.FORWARD): _BOUNDED | {_F.SOFTCAP, _F.ALIBI},
    ("gluon", Phase.BACKWARD): _BOUNDED,
    ("webgpu", Phase.FORWARD): _BOUNDED | _SCORED | _READ | {_F.BIAS, _F.BATCH_INVARIANT, _F.DROPOUT},
    ("webgpu", Phase.DECODE): (_BOUNDED | _SCORED | _READ | {_F.BIAS}) - {_F.VARLEN},
    ("webgpu", Phase.BACKWARD): _BOUNDED | _SCORED | {_F.BIAS, _F.BATCH_INVARIANT, _F.DROPOUT},
}
USUAL = tuple(row for row in STEPS if (row.backend, row.phase) not in ALL_OF)  # for all calls, or nearly
EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257)
HEAD_DIMS = (1, 3, 8, 16, 40, 59, 63, 64, 80, 96, 111, 128, 160, 192, 256)
# Rounding alone, as relative L2: what two exact algorithms may differ by (M3).
ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Runner:
    """Calls `polyflash.attention`, or `attention_varlen` with cu_seqlens, or `attention_paged` with a page
    table, on one row. A refusal skips the test with the row's own words.

    A forward row whose backend has a decode row gets decode problems with batch_invariant=True, which the
    decode row leaves to it."""

    row: Capability

    def is_for(self, feature: Feature) -> bool:
        """Is the row meant to have it?"""
        return feature in ALL_OF.get((self.row.backend, self.row.phase), Feature)

    def reasons(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[str, ...]:
        return self.pinned(q, k, v, options)[0]

    def pinned(
        self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Why this row does not run the call, and the options with which it does."""
        for own in (options, {**options, "batch_invariant": True}):
            asked = {n: x for n, x in own.items() if n != "checked"}
            try:
                plan = polyflash.explain(q, k, v, return_lse=True, backend=self.row.backend, **asked)
            except polyflash.SpecError:
                if own is options and options.get("config") is not None:
                    continue  # a config of this row where another one was chosen
                raise
            if plan.chosen is self.row:
                assert plan.backend == self.row.backend
                return (), own
            if plan.chosen is None or plan.chosen.phase is not Phase.DECODE:
                break
        words = [verdict.reasons for verdict in plan.verdicts if verdict.row is self.row]
        return (words[0] if words else ()) or (f"phase: {plan.spec.phase.value}",), options

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None = None, **options: Any) -> Any:
        with torch.no_grad():
            reasons, options = self.pinned(q, k, v, options)
            if reasons:
                pytest.skip(f"{self.row.name}: {'; '.join(reasons)}")
            function: Any = polyflash.attention
            if "page_table" in options:
                function = polyflash.attention_paged
            elif "cu_seqlens_q" in options:
                function = polyflash.attention_varlen
            return function(q, k, v, return_lse=True, backend=self.row.backend, out=out, **options)

    def skip_unless(self, workload: Workload) -> None:
        w = workload
        spec = w.spec(phase=self.row.phase, need_lse=True)
        reasons = self.row.reasons_against(spec, device.here(), by_name=True)
        if self.row.phase is Phase.DECODE and (
            w.members or not is_decode(w.heads, w.kv_heads, w.seqlen_q, spec.seqlen_k, device=spec.device)
        ):
            reasons += ("phase: not a decode problem",)
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
        lse = got.lse
        if "page_table" in options:
            q, k, v, options = contiguous(q, k, v, options)
            lse = lse.contiguous()  # of one token per request it is a view of (batch, heads, 1)
        layout = options.get("layout", "bhsd")
        out = got.out.transpose(1, 2) if layout == "bshd" else got.out
        # lavapipe's exp2 is off by 1e-6, which no longer cancels where dropout has a weight in l alone
        loose = self.row.backend == "webgpu" and bool(options.get("dropout_p"))
        want = expected(q, k, v, options)
        check(out, lse, want, label=label, options=options, pool=pool, loose=loose)
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
