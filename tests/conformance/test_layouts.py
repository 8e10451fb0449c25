"""Any strides in, q's dense stride order out; `out=` in any layout; nothing modified."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import polyflash
from polyflash import results
from tests.conformance.rows import DTYPES, Runner, ints, qkv
from tests.tolerance import check, expect, same_bits

SHAPE = (2, 4, 33, 32)  # batch, heads, seqlen, head_dim


def packed(parts: int, order: str) -> list[Tensor]:
    """q, k, v as views of one (batch, seqlen, 3, heads, head_dim) or (batch, seqlen, heads, 3, head_dim)
    tensor."""
    batch, heads, seqlen, dim = SHAPE
    sizes = {"b": batch, "s": seqlen, "3": parts, "h": heads, "d": dim}
    whole = torch.randn([sizes[c] for c in order], generator=torch.Generator().manual_seed(7))
    return [
        whole.select(order.index("3"), i).permute(*_to(order.replace("3", ""), "bhsd")) for i in range(parts)
    ]


def _to(order: str, wanted: str) -> list[int]:
    return [order.index(c) for c in wanted]


def rearranged(x: Tensor, order: str) -> Tensor:
    """A (b, h, s, d) view of a copy of `x` stored densely in `order`."""
    stored = x.permute(*_to("bhsd", order)).contiguous()
    return stored.permute(*_to(order, "bhsd"))


def forms(x: Tensor) -> dict[str, Tensor]:
    """The same values under many layouts."""
    batch, heads, seqlen, dim = x.shape
    wide = torch.full((batch, heads, seqlen, 2 * dim), torch.nan, dtype=x.dtype)
    wide[..., ::2] = x
    gaps = torch.full((batch, heads, seqlen + 3, dim + 5), torch.nan, dtype=x.dtype)
    gaps[:, :, :seqlen, :dim] = x
    double = torch.full((batch, 2 * heads, 2 * seqlen, dim), torch.nan, dtype=x.dtype)
    double[:, ::2, ::2] = x
    orders = {
        order: rearranged(x, order)
        for order in ("bshd", "sbhd", "hbsd", "shbd", "hsbd", "bhds", "dsbh", "bdsh")
    }
    return {
        **orders,
        "stride 2 in the last dimension": wide[..., ::2],
        "gaps": gaps[:, :, :seqlen, :dim],
        "every second head and row": double[:, ::2, ::2],
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides(run: Runner, dtype: torch.dtype):
    """M28, B-str-01, B-str-02, B-str-13, B-gqa-07: each layout equals its contiguous copy bit for bit."""
    q, k, v = (x.to(dtype) for x in qkv(*SHAPE[:2], *SHAPE[2:3] * 2, SHAPE[3]))
    want = run(q, k, v, causal=True)
    check(want.out, want.lse, expect(q, k, v, causal=True))
    layouts = [forms(x) for x in (q, k, v)]
    names = list(layouts[0])
    for i, name in enumerate(names):
        other, third = names[(i + 1) % len(names)], names[(i + 4) % len(names)]
        for qn, kn, vn in ((name, name, name), (name, other, third)):
            views = layouts[0][qn], layouts[1][kn], layouts[2][vn]
            got = run(*views, causal=True)
            same_bits(got.out, want.out, f"{qn} / {kn} / {vn}")
            same_bits(got.lse, want.lse, f"{qn} / {kn} / {vn}")


@pytest.mark.parametrize("order", ("bs3hd", "bsh3d", "3bshd", "sb3hd", "b3hsd"))
def test_packed(run: Runner, order: str):
    """B-str-03: q, k, v sliced from one tensor."""
    q, k, v = packed(3, order)
    got = run.checked(q, k, v, causal=True)
    same_bits(got.out, run(q.contiguous(), k.contiguous(), v.contiguous(), causal=True).out, order)


def test_expanded(run: Runner):
    """Stride 0: one head for all, one batch for all, one key for all."""
    q, k, v = qkv(2, 4, 20, 33, 16)
    cases = {
        "kv batch": (q, k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1)),
        "kv head": (q, k[:, :1].expand(-1, 4, -1, -1), v[:, :1].expand(-1, 4, -1, -1)),
        "one key": (q, k[:, :, :1].expand(-1, -1, 33, -1), v),
        "one value": (q, k, v[:, :, :1].expand(-1, -1, 33, -1)),
        "one query": (q[:, :, :1].expand(-1, -1, 20, -1), k, v),
        "one channel": (q[..., :1].expand(-1, -1, -1, 16), k, v[..., :1].expand(-1, -1, -1, 16)),
        "all": tuple(torch.tensor(0.5).expand(x.shape) for x in (q, k, v)),
    }
    for name, views in cases.items():
        got = run.checked(*views, label=name)
        same_bits(got.out, run(*(x.contiguous() for x in views)).out, name)


def test_overlapping(run: Runner):
    """Rows that share storage: a sliding view, as of a signal."""
    signal = torch.randn(400, generator=torch.Generator().manual_seed(0))
    views = [signal.as_strided((1, 2, 60, 32), (0, 100, 2, 1), i) for i in range(3)]
    got = run.checked(*views, causal=True)
    same_bits(got.out, run(*(x.contiguous() for x in views), causal=True).out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_storage_offsets(run: Runner, dtype: torch.dtype):
    """M29, B-str-09: 1 to 15 elements off alignment, after an aligned call."""
    q, k, v = (x.to(dtype) for x in qkv(1, (2, 1), 35, 70, 24))
    want = run(q, k, v, causal=True)
    for offset in range(1, 16):
        views = []
        for x in (q, k, v):
            buffer = torch.full((x.numel() + 16,), torch.nan, dtype=dtype)
            view = buffer[offset : offset + x.numel()].view(x.shape)
            views.append(view.copy_(x))
        got = run(*views, causal=True)
        same_bits(got.out, want.out, f"offset {offset}")
        same_bits(got.lse, want.lse, f"offset {offset}")


def test_slices_of_heads(run: Runner):
    """B-str-12: kv heads in slices, head stride that of the whole."""
    q, k, v = qkv(2, (6, 3), 30, 50, 16)
    want = run(q, k, v, causal=True)
    for h in range(3):
        got = run(q[:, 2 * h : 2 * h + 2], k[:, h : h + 1], v[:, h : h + 1], causal=True)
        same_bits(got.out, want.out[:, 2 * h : 2 * h + 2], f"kv head {h}")


def test_layout_argument(run: Runner):
    for dtype in DTYPES:
        q, k, v = (x.to(dtype) for x in qkv(2, (4, 2), 30, 50, 16, 24))
        want = run(q, k, v, causal=True)
        views = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        got = run(*views, causal=True, layout="bshd")
        assert got.out.shape == (2, 30, 4, 24) and got.out.is_contiguous()
        same_bits(got.out.transpose(1, 2), want.out)
        same_bits(got.lse, want.lse)


def test_layout_is_never_guessed():
    q, k, v = qkv(1, 2, 4, 4, 8)
    for layout in ("sbhd", "BHSD", "", None):
        with pytest.raises(polyflash.SpecError, match="layout"):
            polyflash.attention(q, k, v, layout=layout)


@pytest.mark.parametrize("order", ("bhsd", "bshd", "sbhd", "hbsd", "shbd", "hsbd"))
def test_output_order_is_that_of_q(run: Runner, order: str):
    """B-str-08, api.md: the result has q's dense stride order, D_v channels, last stride 1."""
    q, k, v = qkv(2, (4, 2), 30, 50, 16, 24)
    out, lse = run(rearranged(q, order), k, v)
    want = rearranged(torch.zeros(2, 4, 30, 24), order)
    assert out.stride() == want.stride(), f"{order}: {out.stride()} instead of {want.stride()}"
    assert lse.is_contiguous()


def test_output_is_contiguous_without_dense_order(run: Runner):
    q, k, v = qkv(2, 4, 30, 50, 16)
    for name in ("bhds", "stride 2 in the last dimension"):
        assert run(forms(q)[name], k, v).out.is_contiguous(), name
    assert run(q[:1].expand(2, -1, -1, -1), k, v).out.is_contiguous()


def test_out_argument(run: Runner):
    """B-str-04: results in views of any strides; the bits of the plain call; gaps untouched."""
    q, k, v = qkv(2, (4, 2), 33, 50, 32)
    want = run(q, k, v, causal=True)
    for name, view in forms(torch.zeros(SHAPE)).items():
        got = run(q, k, v, causal=True, out=view)
        assert got.out.data_ptr() == view.data_ptr()
        same_bits(view, want.out, name)
        same_bits(got.lse, want.lse, name)
    plain = polyflash.attention(q, k, v, causal=True, out=torch.empty(SHAPE), backend=run.row.backend)
    same_bits(plain, want.out)
    bshd = torch.empty(2, 33, 4, 32)
    run(*(x.transpose(1, 2) for x in (q, k, v)), causal=True, layout="bshd", out=bshd)
    same_bits(bshd.transpose(1, 2), want.out)


def test_inputs_and_globals_untouched(run: Runner):
    """P18: no input bit, no global state."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = qkv(2, (4, 2), 33, 70, 32)
    options: dict[str, Any] = {
        "kv_lens": ints(70, 20),
        "mask": torch.rand(2, 1, 33, 70, generator=generator) < 0.5,
    }
    copies = [x.clone() for x in (q, k, v, *options.values())]
    before = _state()
    run(q, k, v, causal=True, **options)
    after = _state()
    for now, then in zip((q, k, v, *options.values()), copies, strict=True):
        same_bits(now, then)
    assert before == after


def _state() -> tuple[Any, ...]:
    import os

    return (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.get_float32_matmul_precision(),
        tuple(torch.get_rng_state().tolist()),
        torch.is_grad_enabled(),
        dict(os.environ),
    )


def within(out: Tensor, x: Tensor, start: int = 0) -> Tensor:
    """A copy of `x` in the memory of `out`, `start` bytes from its beginning."""
    size = x.numel() * x.element_size()
    return out.view(-1).view(torch.uint8)[start : start + size].view(x.dtype).view(x.shape).copy_(x)


_NOISE = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
_IDS = (torch.arange(64) // 9).int().repeat(2, 1)
SMALL: dict[str, tuple[Tensor, Any]] = {  # an operand, and how a call takes it
    "kv_lens": (ints(50, 20), lambda x: {"kv_lens": x}),
    "kv_starts": (ints(5, 20), lambda x: {"kv_starts": x}),
    "q_offset": (ints(5, -3), lambda x: {"q_offset": x, "causal": True}),
    "mask": (_NOISE > 0, lambda x: {"mask": x}),
    "bias": (_NOISE, lambda x: {"bias": x}),
    "alibi_slopes": (torch.tensor((0.5, 1.0, 0.25, 2.0)), lambda x: {"alibi_slopes": x}),
    "sinks": (torch.tensor((0.5, 1.0, 2.0, 3.0)), lambda x: {"sinks": x}),
    "segments": (_IDS, lambda x: {"mask": polyflash.Mask.segments(x, x)}),
    "intervals": (
        torch.tensor(((5, 30), (0, 64))).int().view(1, 1, 2, 1, 2),
        lambda x: {"mask": polyflash.Mask(bounds=x, rows=32)},
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_out_may_hold_an_operand(run: Runner, name: str):
    """The result replaces an operand only after everything has been read."""
    q, k, v = qkv(2, 4, 64, 64, 64)
    operand, options = SMALL[name]
    want = run(q, k, v, **options(operand))
    for start in (0, q.numel() * 4 - operand.numel() * operand.element_size()):
        out = torch.zeros_like(q)
        got = run(q, k, v, out=out, **options(within(out, operand, start)))
        same_bits(out, want.out, f"{name} at byte {start}")
        same_bits(got.lse, want.lse, f"{name} at byte {start}")


@pytest.mark.parametrize("name", ("cu_seqlens_q", "cu_seqlens_k"))
def test_out_may_hold_the_bounds_of_members(run: Runner, name: str):
    """Bounds overwritten in flight would be addresses: beyond a wrong result, a crash."""
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in qkv(1, 4, 96, 96, 16))
    bounds = {"cu_seqlens_q": ints(0, 30, 64, 96), "cu_seqlens_k": ints(0, 40, 64, 96)}
    want = run(q, k, v, **bounds)
    out = torch.zeros_like(q)
    got = run(q, k, v, out=out, **{**bounds, name: within(out, bounds[name])})
    same_bits(out, want.out)
    same_bits(got.lse, want.lse)


@pytest.mark.parametrize("place", range(3), ids=("q", "k", "v"))
@pytest.mark.parametrize("shift", (-64 * 64, 0, 64 * 64))
def test_out_may_overlap_an_input_of_another_storage(run: Runner, place: int, shift: int):
    """numpy hands one buffer to several storages, so only addresses tell."""
    inputs = list(qkv(2, 4, 64, 64, 64))
    want = run(*inputs)
    size, margin = inputs[0].numel(), 64 * 64
    buffer = np.zeros(size + 2 * margin, np.float32)
    parts = [
        torch.from_numpy(buffer[margin + at : margin + at + size]).view(2, 4, 64, 64) for at in (0, shift)
    ]
    assert parts[0].untyped_storage().data_ptr() != parts[1].untyped_storage().data_ptr() or not shift
    inputs[place] = parts[0].copy_(inputs[place])
    got = run(*inputs, out=parts[1])
    same_bits(got.out, want.out)
    same_bits(got.lse, want.lse)


def test_out_beside_the_inputs_is_written_directly():
    """Parts of one storage that share no byte, and empty ones, need no second result."""
    whole = torch.zeros(4, 2, 8, 8)
    assert results.apart(whole[0], (*whole[1:], None, 3.0, whole[0, :0]))
    assert not results.apart(whole[:, 0], (whole[:, 1],)) and not results.apart(whole[0], (whole[0, 1, 7],))
