"""P16: the bits of a request hang on nothing but the request. By default that holds for decode steps and
ragged calls over batches, neighbours, page layouts and threads; with batch_invariant=True over chunks too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from polyflash.spec import Feature, Phase
from polyflash.workloads import in_pages
from tests.conformance.rows import DTYPES, Runner, ints, qkv
from tests.tolerance import same_bits

LENS = (700, 1, 64, 2049, 300, 1025)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"causal": True, "window": (200, None)},
    "sinks": {"sinks": torch.linspace(-2, 2, 4)},
}  # fmt: skip


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return KINDS[request.param]


def alone(step: Runner, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> list[Any]:
    """Each request by itself, with its own keys and no others."""
    return [
        step(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], **options) for b, n in enumerate(LENS)
    ]


def promise(step: Runner) -> dict[str, Any]:
    """What asks for bits that no neighbour changes: a GPU engine splits keys by the batch otherwise."""
    return {} if step.row.backend in ("cpu", "torch") else {"batch_invariant": True}


def same(got: Any, want: Any, label: str) -> None:
    same_bits(got.out.contiguous(), want.out.contiguous(), f"{label}: out")
    same_bits(got.lse.contiguous(), want.lse.contiguous(), f"{label}: lse")


def entry(got: Any, b: int) -> Any:
    return got._replace(out=got.out[b : b + 1], lse=got.lse[b : b + 1])


def threads() -> Iterator[int]:
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            yield count
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("rows", (1, 4))
def test_batches_and_neighbours(step: Runner, rows: int, dtype: torch.dtype, kind: dict[str, Any]):
    """B-pag-08: a request alone, in a padded batch, in another order, twice; by one thread and by two."""
    q, k, v = qkv(len(LENS), (4, 2), rows, max(LENS), 64, dtype=dtype)
    lens, kind = ints(*LENS), {**kind, **promise(step)}
    wants = alone(step, q, k, v, **kind)
    for count in threads():
        whole = step(q, k, v, kv_lens=lens, **kind)
        for b, want in enumerate(wants):
            same(entry(whole, b), want, f"request {b}, {count} threads")
        order = torch.tensor((4, 4, 0, 3, 5))
        turned = step(q[order], k[order], v[order], kv_lens=lens[order], **kind)
        for at, b in enumerate(order.tolist()):
            same(entry(turned, at), wants[b], f"request {b} at {at}, {count} threads")
        small = alone(step, q, k, v, **kind)
        for b, want in enumerate(wants):
            same(small[b], want, f"request {b} again, {count} threads")


def test_large_batches(step: Runner):
    """The share of a batch that a request is: one of 1, of 3, of 100; heads alike."""
    q, k, v = qkv(1, (8, 2), 1, 1500, 64, dtype=torch.bfloat16)
    asked = promise(step)
    want = step(q, k, v, **asked)
    for batch in (3, 100):
        for count in threads():
            got = step(*(x.expand(batch, *x.shape[1:]) for x in (q, k, v)), **asked)
            for b in (0, batch // 2, batch - 1):
                same(entry(got, b), want, f"{b} of {batch}, {count} threads")
    for h in range(2):
        own = slice(h, h + 1)
        one = step(q[:, 4 * h : 4 * h + 4], k[:, own], v[:, own], **asked)
        same_bits(one.out.contiguous(), want.out[:, 4 * h : 4 * h + 4].contiguous(), "one kv head of two")


@pytest.mark.parametrize("page_size", (1, 3, 16, 128))
def test_page_layouts(step: Runner, page_size: int, dtype: torch.dtype):
    """Contiguous keys, and the same in any pages, beside other requests in other orders."""
    q, k, v = qkv(len(LENS), (4, 2), 1, max(LENS), 64, dtype=dtype)
    for options in ({**KINDS[name], **promise(step)} for name in ("plain", "window")):
        wants = alone(step, q, k, v, **options)
        for seed, spare in ((1, 0), (2, 50)):
            generator = torch.Generator().manual_seed(seed)
            k_pages, v_pages, table = in_pages(k, v, LENS, page_size, generator, spare=spare)
            for chosen in (range(len(LENS)), (3,), (5, 0, 0, 2)):
                order = torch.tensor(chosen)
                got = step(
                    q[order, :, 0], k_pages, v_pages, page_table=table[order], kv_lens=ints(*LENS)[order],
                    **options,
                )  # fmt: skip
                for at, b in enumerate(chosen):
                    same_bits(got.out[at], wants[b].out[0, :, 0], f"request {b} of {chosen}")
                    same_bits(got.lse[:, at].contiguous(), wants[b].lse[0, :, 0].contiguous(), f"request {b}")


MEMBERS = ((1, 700), (33, 70), (1, 1), (4, 1025), (0, 20), (64, 128), (1, 0), (2, 2))


def ragged(members: Any, dtype: torch.dtype) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """q, k, v (seqlen, heads, head_dim) of each member, the same whatever it is packed with."""
    found = {}
    for b, (rows, keys) in members:
        q, k, v = qkv(1, (4, 2), rows, keys, 64, dtype=dtype, seed=b)
        found[b] = tuple(x[0].transpose(0, 1) for x in (q, k, v))
    return found


@pytest.mark.parametrize("invariant", (False, True))
def test_ragged_calls(run: Runner, invariant: bool, dtype: torch.dtype):
    """A member's bits are its own, beside others, in other orders, packed and in pages; by default too, but
    for the last resort, whose tiles follow the longest member."""
    if run.row.backend == "torch" and not invariant:
        pytest.skip("torch/forward promises it with batch_invariant=True")
    parts = ragged(tuple(enumerate(MEMBERS)), dtype)
    how: dict[str, Any] = {"causal": True, "batch_invariant": True} if invariant else {"causal": True}

    def packed(chosen: tuple[int, ...]) -> tuple[Any, list[int]]:
        q, k, v = (torch.cat([parts[b][i] for b in chosen]) for i in range(3))
        bounds = [torch.tensor([0, *(MEMBERS[b][side] for b in chosen)]).cumsum(0).int() for side in (0, 1)]
        own = {"cu_seqlens_q": bounds[0], "cu_seqlens_k": bounds[1]}
        return run(q, k, v, **own, **how), bounds[0].tolist()

    wants = [packed((b,))[0] for b in range(len(MEMBERS))]
    for count in threads():
        for chosen in (tuple(range(len(MEMBERS))), (5, 3, 1, 0), (0, 2, 7), (3, 3, 3)):
            got, starts = packed(chosen)
            for at, b in enumerate(chosen):
                own = slice(starts[at], starts[at + 1])
                same_bits(got.out[own], wants[b].out, f"member {b} of {chosen}, {count} threads")
                same_bits(got.lse[:, own].contiguous(), wants[b].lse, f"member {b} of {chosen}")
    lens = [keys for _, keys in MEMBERS]
    wide = [torch.zeros(len(MEMBERS), 2, max(lens), 64, dtype=dtype) for _ in range(2)]
    for b, n in enumerate(lens):
        for x, flat in zip(wide, parts[b][1:], strict=True):
            x[b, :, :n] = flat.transpose(0, 1)
    for page_size in (1, 16, 100):
        pools = in_pages(wide[0], wide[1], lens, page_size, torch.Generator().manual_seed(3))
        for chosen in (tuple(range(len(MEMBERS))), (6, 5, 3, 0)):
            q = torch.cat([parts[b][0] for b in chosen])
            bounds = torch.tensor([0, *(MEMBERS[b][0] for b in chosen)]).cumsum(0).int()
            got = run(
                q, pools[0], pools[1], page_table=pools[2][torch.tensor(chosen)], cu_seqlens_q=bounds,
                kv_lens=ints(*(lens[b] for b in chosen)), **how,
            )  # fmt: skip
            for at, b in enumerate(chosen):
                own = slice(int(bounds[at]), int(bounds[at + 1]))
                same_bits(got.out[own], wants[b].out, f"member {b} in pages of {page_size}")


@pytest.mark.parametrize("name", ("plain", "window", "sinks"))
def test_chunks(run: Runner, name: str, dtype: torch.dtype):
    """M24 bit for bit with batch_invariant=True: prefill in any cuts, token by token, packed and in pages,
    over a cache that is longer than what is live, by one thread and by two."""
    options = {**KINDS[name], "causal": True, "batch_invariant": True}
    n = 130
    q, k, v = qkv(1, (4, 2), n, n, 64, dtype=dtype, seed=4)
    cache_k, cache_v = (torch.cat((x, torch.full_like(x, 9.0)), 2) for x in (k, v))
    whole = run(q, k, v, **options)
    packed_q = q[0].transpose(0, 1)
    k_pages, v_pages, table = in_pages(k, v, (n,), 16, torch.Generator().manual_seed(1))
    for count in threads():
        same(run(q, k, v, **options), whole, f"{count} threads")
        for cuts in ((64, n), (1, 2, 70, 77, n), tuple(range(n - 4, n + 1))):
            start = 0
            for end in cuts:
                rows, label = slice(start, end), f"rows {start} to {end}, {count} threads"
                want = whole.out[:, :, rows].contiguous()
                got = run(q[:, :, rows], k[:, :, :end], v[:, :, :end], **options)
                same_bits(got.out.contiguous(), want, label)
                same_bits(got.lse.contiguous(), whole.lse[:, :, rows].contiguous(), label)
                got = run(q[:, :, rows], cache_k, cache_v, kv_lens=ints(end), **options)
                same_bits(got.out.contiguous(), want, f"{label}, a longer cache")
                paged = {"page_table": table, "kv_lens": ints(end), "cu_seqlens_q": ints(0, end - start)}
                got = run(packed_q[rows], k_pages, v_pages, **paged, **options)
                same_bits(got.out.transpose(0, 1)[None].contiguous(), want, f"{label}, in pages")
                start = end


def test_the_flag_takes_no_decode_row(step: Runner):
    """What promises nothing about chunks never runs a call that asks for it."""
    dtype = torch.float32 if "float32" in step.row.dtypes else torch.bfloat16
    q, k, v = qkv(2, (4, 2), 1, 300, 64, dtype=dtype)
    reasons = step.reasons(q, k, v, batch_invariant=True)
    has_none = step.row.phase is Phase.DECODE or not step.is_for(Feature.BATCH_INVARIANT)
    assert bool(reasons) == has_none
