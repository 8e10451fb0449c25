"""torch's own checks of the three ops: schema, autograd registration, fake tensors, AOT dispatch with
static and with dynamic shapes; over layouts, empty sizes, every operand and subsets that need gradients."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from polyflash import Mask
from polyflash.spec import Arguments
from tests.chosen import chosen

OPS = torch.ops.polyflash
FORWARD, OUT, BACKWARD = OPS.attention.default, OPS.attention_out.default, OPS.attention_backward.default
CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)
LENS = torch.tensor([9, 4], dtype=torch.int32)
IDS = torch.tensor([[0] * 4 + [1] * 5, [0] * 9], dtype=torch.int32)


def arguments():
    torch.manual_seed(0)
    blocks = Mask.blocks(torch.rand(2, 4, 3, 5) < 0.5, rows=4, keys=2)
    return {
        "plain": Arguments(),
        "window": Arguments(causal=True, scale=0.3, window_left=3, offset=1, softcap=2.0),
        "mask": Arguments(mask=torch.ones(9, 9, dtype=torch.bool).tril(), batch_invariant=True),
        "bias and sinks": Arguments(bias=torch.randn(1, 4, 1, 9), sinks=torch.randn(4)),
        "lengths": Arguments(causal=True, kv_lens=LENS, kv_starts=LENS // 3, q_offset=LENS),
        "segments": Arguments(q_segments=IDS, k_segments=IDS, alibi_slopes=torch.rand(2, 4)),
        "dropout": Arguments(dropout_p=0.3, dropout_seed=torch.tensor(7)),
        "intervals": Arguments(intervals=blocks.bounds, interval_rows=blocks.rows),
    }


ARGUMENTS = arguments()
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced": lambda x: torch.cat([x, x], 3)[..., : x.shape[3]],
    "expanded": lambda x: x[:1].expand(2, -1, -1, -1),
    "last dim strided": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
}
EMPTY = {"no request": (0, 9, 9), "no row": (2, 0, 9), "no key": (2, 9, 0)}


def qkv(batch=2, rows=9, keys=9, head_dim_v=8):
    torch.manual_seed(1)
    shapes = ((4, rows, 8), (2, keys, 8), (2, keys, head_dim_v))
    return [torch.randn(batch, *shape) for shape in shapes]


def backward_inputs(q, k, v, args, needs, layout=lambda x: x):
    args = args._replace(need_lse=True)
    out, lse = FORWARD(q, k, v, *args)
    dout = torch.randn(out.shape)
    return (
        layout(dout) if dout.shape[0] == 2 else dout,
        torch.randn(lse.shape),
        q,
        k,
        v,
        out,
        lse,
        needs,
        *args,
    )


def needs_of(args):
    return [True, True, True, args.bias is not None, args.sinks is not None]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_operands(name):
    q, k, v = qkv(head_dim_v=5)
    args = ARGUMENTS[name]
    opcheck(FORWARD, (q, k, v, *args._replace(need_lse=name != "plain")), test_utils=CHECKS)
    opcheck(OUT, (q, k, v, q.new_empty(2, 4, 9, 5), *args), test_utils=CHECKS)
    opcheck(BACKWARD, backward_inputs(q, k, v, args, needs_of(args)), test_utils=CHECKS)


@pytest.mark.parametrize("name, dtype", [("plain", torch.bfloat16), ("bias and sinks", torch.float64)])
def test_dtypes(name, dtype):
    args = ARGUMENTS[name]._replace(need_lse=True)
    opcheck(FORWARD, (*(x.to(dtype) for x in qkv(head_dim_v=5)), *args), test_utils=CHECKS)


@pytest.mark.parametrize("layout", chosen(LAYOUTS, "contiguous", "sliced"))
def test_layouts(layout):
    change = LAYOUTS[layout]
    q, k, v = map(change, qkv())
    args = Arguments(causal=True)
    opcheck(FORWARD, (q, k, v, *args), test_utils=CHECKS)
    if layout != "expanded":
        opcheck(OUT, (q, k, v, change(torch.zeros(2, 4, 9, 8)), *args), test_utils=CHECKS)
    opcheck(BACKWARD, backward_inputs(q, k, v, args, needs_of(args), change), test_utils=CHECKS)


@pytest.mark.parametrize("size", EMPTY)
def test_empty(size):
    q, k, v = qkv(*EMPTY[size])
    args = Arguments(need_lse=True, sinks=torch.randn(4))
    opcheck(FORWARD, (q, k, v, *args), test_utils=CHECKS)
    opcheck(OUT, (q, k, v, torch.empty_like(q), *args), test_utils=CHECKS)
    opcheck(BACKWARD, backward_inputs(q, k, v, args, needs_of(args)), test_utils=CHECKS)


@pytest.mark.parametrize("wanted", chosen([{0}, {1, 2}, {3}, {4}, {0, 3, 4}], {3}, {4}))
def test_subsets_that_need_gradients(wanted):
    """Forward with them, backward for them."""
    args = ARGUMENTS["bias and sinks"]._replace(need_lse=True)
    inputs = [*qkv(), args.bias.clone(), args.sinks.clone()]
    needs = [i in wanted for i in range(5)]
    opcheck(BACKWARD, backward_inputs(*inputs[:3], args, needs), test_utils=CHECKS)
    q, k, v, bias, sinks = (x.requires_grad_(need) for x, need in zip(inputs, needs, strict=True))
    args = args._replace(bias=bias, sinks=sinks, need_lse=len(wanted) > 1)
    opcheck(FORWARD, (q, k, v, *args), test_utils=CHECKS)


def test_packed():
    cu = torch.tensor([0, 4, 4, 8], dtype=torch.int32)
    q, k, v = qkv(batch=1)
    lens = torch.tensor([3, 0, 4], dtype=torch.int32)
    args = Arguments(causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=5, kv_lens=lens)
    for grad in (False, True):
        opcheck(FORWARD, (q.requires_grad_(grad), k, v, *args), test_utils=CHECKS)
    q = q.detach()
    opcheck(OUT, (q, k, v, torch.empty_like(q), *args), test_utils=CHECKS)
    opcheck(BACKWARD, backward_inputs(q, k, v, args, needs_of(args)), test_utils=CHECKS)


@pytest.mark.parametrize("name", ["tokens", "rows"])
def test_pages(name):
    q, k, v = torch.randn(2, 4, 1, 8), torch.randn(7, 2, 3, 8), torch.randn(7, 3, 2, 5).transpose(1, 2)
    table = torch.tensor([[6, 0, 2], [1, 1, 99]], dtype=torch.int32)
    args = Arguments(causal=True, kv_lens=torch.tensor([8, 5], dtype=torch.int32), page_table=table)
    if name == "rows":
        q, bounds = torch.randn(1, 4, 9, 8), torch.tensor([0, 3, 7], dtype=torch.int32)
        args = args._replace(cu_seqlens_q=bounds, max_seqlen_q=4, window_left=2)
    opcheck(FORWARD, (q, k, v, *args._replace(need_lse=name == "rows")), test_utils=CHECKS)
    opcheck(OUT, (q, k, v, q.new_empty((*q.shape[:3], 5)), *args), test_utils=CHECKS)


def test_bounds_of_rows():
    q, k, v = qkv()
    bounds = torch.tensor([[i % 3, i + 1] for i in range(9)], dtype=torch.int32)
    args = Arguments(row_bounds=bounds, sinks=torch.randn(4))
    opcheck(FORWARD, (q, k, v, *args._replace(need_lse=True)), test_utils=CHECKS)
    opcheck(OUT, (q, k, v, torch.empty_like(q), *args), test_utils=CHECKS)
