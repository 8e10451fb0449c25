"""Lengths, bounds and positions may be int64, and none of them is cut to 32 bits in silence."""

from __future__ import annotations

import pytest
import torch

from polyflash import (
    Mask,
    SpecError,
    attention,
    attention_paged,
    attention_varlen,
    column_sums,
    explain,
    repeats,
)
from tests.rows_here import HERE
from tests.tolerance import same_bits

FAR = 2**32 + 3  # whose low 32 bits are a legal length
LENS, STARTS, PLACES = (torch.tensor(x) for x in ((7, 3), (1, 0), (4, -2)))
CU = torch.tensor((0, 2, 6))
NAMED = {"kv_lens": LENS, "kv_starts": STARTS, "q_offset": PLACES}
Q, K, V = (
    torch.randn(2, heads, n, 16, generator=torch.Generator().manual_seed(n))
    for heads, n in ((4, 5), (2, 9), (2, 9))
)
TOKENS = [x[:1, :, :6].transpose(1, 2)[0].contiguous() for x in (Q.repeat(1, 1, 2, 1), K, V)]
POOLS = [torch.randn(6, 4, 2, 16, generator=torch.Generator().manual_seed(n)) for n in (1, 2)]
TABLE = torch.arange(6, dtype=torch.int32).view(2, 3)


def narrow(options):
    return {name: x.int() for name, x in options.items()}


def results(found):
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("names", [("kv_lens",), ("q_offset",), tuple(NAMED)], ids=str)
def test_they_are_read_as_int32_ones(names, backend):
    given = {name: NAMED[name] for name in names}
    paged = {"kv_lens": given.get("kv_lens", LENS)}
    for call in (
        lambda **x: attention(Q, K, V, causal=True, return_lse=True, backend=backend, **x),
        lambda **x: attention_paged(Q[:, :, 0], *POOLS, TABLE, **(paged | x)),
        lambda **x: column_sums(Q, K, torch.zeros(2, 4, 5), **x),
        lambda **x: str(explain(Q, K, V, **x)),
    ):  # fmt: skip
        got, want = (results(call(**x)) for x in (given, narrow(given)))
        assert all(
            torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
            for a, b in zip(got, want, strict=True)
        )
    mask = Mask.lengths(LENS, STARTS)
    same_bits(attention(Q, K, V, mask=mask), attention(Q, K, V, kv_lens=LENS.int(), kv_starts=STARTS.int()))


@pytest.mark.parametrize("backend", HERE)
def test_bounds_of_members(backend):
    q, k, v = TOKENS
    got = attention_varlen(q, k, v, CU, CU, causal=True, backend=backend, kv_lens=torch.tensor((2, 3)))
    want = attention_varlen(
        q, k, v, CU.int(), CU.int(), causal=True, backend=backend, kv_lens=torch.tensor((2, 3)).int()
    )
    same_bits(got, want)
    got = attention_paged(q, *POOLS, TABLE, LENS, cu_seqlens_q=CU, backend=backend)
    same_bits(got, attention_paged(q, *POOLS, TABLE, LENS.int(), cu_seqlens_q=CU.int(), backend=backend))


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("far", (FAR, -FAR, 2**31, 2**63 - 1))
def test_what_has_more_bits_is_refused(name, far):
    wrong = torch.tensor((3, far))
    with pytest.raises(SpecError, match=f"^{name}: got {far}, wanted numbers of 32 bits"):
        attention(Q, K, V, **{name: wrong})
    compiled = torch.compile(lambda x: attention(Q, K, V, **{name: x}), backend="eager", fullgraph=True)
    if name == "q_offset":  # in a graph the end of int32 stands for it: no row is farther from its keys
        same_bits(compiled(wrong), attention(Q, K, V))
    else:
        with pytest.raises(Exception, match=f"{name}: got -?21474836[0-9]+ for request 1, wanted"):
            compiled(wrong)


def test_bounds_and_pages_with_more_bits_are_refused():
    q, k, v = TOKENS
    with pytest.raises(SpecError, match=f"^cu_seqlens_k: got {FAR}, wanted"):
        attention_varlen(q, k, v, CU, torch.tensor((0, 2, FAR)))
    with pytest.raises(SpecError, match=f"^kv_lens: got {FAR}, wanted"):
        attention_paged(Q[:, :, 0], *POOLS, TABLE, torch.tensor((3, FAR)))


def test_graphs_transforms_and_meta_tensors_take_them():
    call = lambda lens: attention(Q, K, V, kv_lens=lens)  # noqa: E731
    same_bits(torch.compile(call, backend="eager", fullgraph=True)(LENS), call(LENS.int()))
    many = torch.stack((LENS, LENS + 1))
    same_bits(torch.func.vmap(call)(many)[1], torch.func.vmap(call)(many.int())[1])
    meta = [x.to("meta") for x in (Q, K, V, LENS)]
    assert attention(*meta[:3], kv_lens=meta[3], checked=False).is_meta


@pytest.mark.parametrize("way", ["narrow first", "wide first"])
def test_known_calls_of_both_widths_are_told_apart(way):
    """Eight bytes of a length read as four would be another length: here 0, and a neighbour's."""
    repeats._known.clear()
    q = Q[:, :, 0].contiguous()
    widths = [LENS.int(), LENS]
    for lens in widths if way == "narrow first" else widths[::-1]:
        for moved in (0, 1, 0):
            got = [attention_paged(q, *POOLS, TABLE, lens + moved) for _ in range(2)]
            want = attention_paged(q, *POOLS, TABLE, (lens + moved).int(), checked=True, softcap=0)
            for x in got:
                same_bits(x, want)
        with pytest.raises((SpecError, OverflowError), match=r"^kv_lens: got|maximum$") as caught:
            attention_paged(q, *POOLS, TABLE, lens + 2**30 * 3 if lens.dtype is torch.int64 else lens + 99)
        assert caught.type is SpecError, "lengths were read with the other width"
