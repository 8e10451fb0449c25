"""What users meet: names, refusals that teach, layouts, autocast, out=, explain() and use_backend()."""

from __future__ import annotations

import copy
import math
import pickle
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import polyflash
from polyflash import (
    Mask,
    SpecError,
    UnsupportedError,
    attention,
    attention_varlen,
    backends,
    explain,
    routes,
    torch_ops,
    use_backend,
)
from polyflash.errors import described
from polyflash.reference import attention_reference
from polyflash.spec import Arguments
from tests.rows_here import HERE, needs_cpu_engine


def qkv(batch=2, heads=4, kv_heads=2, seqlen_q=5, seqlen_k=7, head_dim=8, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = ((heads, seqlen_q), (kv_heads, seqlen_k), (kv_heads, seqlen_k))
    return tuple(torch.randn(batch, h, s, head_dim, dtype=dtype) for h, s in shapes)


Q, K, V = qkv()
LENS = torch.tensor([7, 3], dtype=torch.int32)

# (what is wrong, positional arguments, keyword arguments, words the message must have)
REFUSED = [
    ("q is no tensor", ([1.0], K, V), {}, "q: got list, wanted a torch.Tensor"),
    ("k is None", (Q, None, V), {}, "k: got NoneType"),
    ("rank of q", (Q[0], K, V), {}, "q: got 3 dimensions"),
    ("rank of v", (Q, K, V[None]), {}, "v: got 5 dimensions"),
    ("dtype int", (Q.int(), K.int(), V.int()), {}, "q dtype: got torch.int32"),
    ("dtype complex", (Q.cfloat(), K.cfloat(), V.cfloat()), {}, "q dtype: got torch.complex64"),
    ("mixed dtypes", (Q, K.half(), V), {}, "k dtype: got torch.float16, wanted torch.float32, as q"),
    ("mixed devices", (Q, K.to("meta"), V), {}, "k device: got meta"),
    ("batch of k", (Q, K[:1], V[:1]), {}, "k batch: got 1, wanted 2"),
    ("heads of v", (Q, K, V[:, :1]), {}, "v heads: got 1, wanted 2"),
    (
        "head ratio 4/3",
        (Q, *(torch.randn(2, 3, 7, 8) for _ in "kv")),
        {},
        "4 query heads over 3 key/value heads",
    ),
    ("no kv heads", (Q, K[:, :0], V[:, :0]), {}, "4 query heads over 0"),
    ("length of v", (Q, K, V[:, :, :6]), {}, "v seqlen: got 6, wanted 7"),
    ("head_dim of k", (Q, K[..., :7], V), {}, "k head_dim: got 7, wanted 8"),
    ("head_dim 0", (Q[..., :0], K[..., :0], V), {}, "q head_dim: got 0"),
    ("head_dim_v 0", (Q, K, V[..., :0]), {}, "v head_dim: got 0"),
    ("layout", (Q, K, V), {"layout": "sbhd"}, "layout: got 'sbhd', wanted 'bhsd' or 'bshd'"),
    ("layout and rank", (Q[0], K, V), {"layout": "bshd"}, "q: got 3 dimensions"),
    ("causal word", (Q, K, V), {"causal": "lower"}, "causal: got 'lower'"),
    ("window negative", (Q, K, V), {"window": (-1, 0)}, "Use None for unbounded"),
    ("window of one", (Q, K, V), {"window": (3,)}, "wanted (left, right)"),
    ("window float", (Q, K, V), {"window": (1.5, 0)}, "window left: got 1.5"),
    ("mask shape", (Q, K, V), {"mask": torch.ones(5, 6, dtype=torch.bool)}, "mask shape: got (5, 6)"),
    ("mask rank", (Q, K, V), {"mask": torch.ones(1, 1, 1, 5, 7, dtype=torch.bool)}, "mask shape"),
    ("mask dtype", (Q, K, V), {"mask": torch.ones(5, 7)}, "mask dtype: got torch.float32, wanted torch.bool"),
    ("mask kind", (Q, K, V), {"mask": "causal"}, "mask: got str"),
    ("bias dtype", (Q, K, V), {"bias": torch.ones(5, 7, dtype=torch.int32)}, "bias dtype: got torch.int32"),
    ("bias shape", (Q, K, V), {"bias": torch.ones(4, 5)}, "bias shape: got (4, 5)"),
    (
        "two windows' lens",
        (Q, K, V),
        {"mask": Mask.lengths(LENS), "kv_lens": LENS.clone()},
        "kv_lens: got two different kv_lens, wanted one",
    ),
    ("kv_lens dtype", (Q, K, V), {"kv_lens": LENS.short()}, "kv_lens: got torch.int16, wanted int32"),
    ("kv_lens list", (Q, K, V), {"kv_lens": [7, 3]}, "kv_lens: got list"),
    ("kv_lens shape", (Q, K, V), {"kv_lens": LENS[:1]}, "kv_lens: got (1,)"),
    (
        "kv_lens past the end",
        (Q, K, V),
        {"kv_lens": LENS + 1},
        "kv_lens: got 8 for request 0, wanted values in [0, 7]",
    ),
    ("kv_lens negative", (Q, K, V), {"kv_lens": LENS - 4}, "kv_lens: got -1 for request 1"),
    ("kv_starts past the end", (Q, K, V), {"kv_starts": LENS + 1}, "kv_starts: got 8 for request 0"),
    ("q_offset float", (Q, K, V), {"q_offset": 1.0}, "q_offset: got float"),
    ("q_offset bool", (Q, K, V), {"q_offset": True}, "q_offset: got bool"),
    ("q_offset int16", (Q, K, V), {"q_offset": LENS.short()}, "q_offset: got torch.int16"),
    ("scale NaN", (Q, K, V), {"scale": math.nan}, "scale: got nan, wanted a finite number"),
    ("scale inf", (Q, K, V), {"scale": math.inf}, "scale: got inf"),
    ("scale text", (Q, K, V), {"scale": "x"}, "scale: got str, wanted a number"),
    ("scale tensor", (Q, K, V), {"scale": torch.zeros(3)}, "scale: got Tensor"),
    ("softcap text", (Q, K, V), {"softcap": "x"}, "softcap: got str"),
    ("dropout_p None", (Q, K, V), {"dropout_p": None}, "dropout_p: got NoneType"),
    ("out int", (Q, K, V), {"out": 4}, "out: got int, wanted a torch.Tensor"),
    (
        "out int bshd",
        tuple(x.transpose(1, 2) for x in (Q, K, V)),
        {"out": 4, "layout": "bshd"},
        "out: got int",
    ),
    ("softcap negative", (Q, K, V), {"softcap": -1.0}, "softcap: got -1.0"),
    ("softcap NaN", (Q, K, V), {"softcap": math.nan}, "softcap: got nan"),
    ("dropout_p 1", (Q, K, V), {"dropout_p": 1.0}, "dropout_p: got 1.0, wanted 0 <= p < 1"),
    (
        "dropout_seed",
        (Q, K, V),
        {"dropout_p": 0.5, "dropout_seed": 2**64},
        "dropout_seed: got 18446744073709551616",
    ),
    (
        "dropout_seed kind",
        (Q, K, V),
        {"dropout_p": 0.5, "dropout_seed": LENS},
        "dropout_seed: got torch.int32",
    ),
    ("sinks shape", (Q, K, V), {"sinks": torch.zeros(2)}, "sinks: got (2,)"),
    ("sinks dtype", (Q, K, V), {"sinks": LENS}, "sinks: got torch.int32"),
    ("alibi shape", (Q, K, V), {"alibi_slopes": torch.zeros(3)}, "alibi_slopes: got (3,)"),
    (
        "alibi gradient",
        (Q, K, V),
        {"alibi_slopes": torch.zeros(4, requires_grad=True)},
        "alibi_slopes: got requires",
    ),
    (
        "segments of one side",
        (Q, K, V),
        {"mask": Mask(q_ids=LENS[:, None].expand(2, 5))},
        "segments: got ids of one",
    ),
    ("segments shape", (Q, K, V), {"mask": Mask.segments(LENS, LENS)}, "q_segments: got (2,)"),
    ("backend", (Q, K, V), {"backend": "cuda"}, "backend: got 'cuda', wanted one of"),
    ("no backend", (Q, K, V), {"backend": ""}, "backend: got '', wanted one of"),
    ("out shape", (Q, K, V), {"out": torch.empty(2, 4, 5, 7)}, "out: got (2, 4, 5, 7)"),
    ("out dtype", (Q, K, V), {"out": torch.empty(2, 4, 5, 8).half()}, "out: got"),
    (
        "out and gradients",
        (Q.clone().requires_grad_(), K, V),
        {"out": torch.empty_like(Q)},
        "wanted inference",
    ),
    ("causal array", (Q, K, V), {"causal": np.array([True, False])}, "causal: got numpy bool (2,), wanted"),
    ("causal tensor", (Q, K, V), {"causal": torch.tensor([7])}, "causal: got torch.int64 (1,), wanted False"),
    ("causal int", (Q, K, V), {"causal": 1}, "causal: got 1, wanted False, True"),
    (
        "causal array, Mask",
        (Q, K, V),
        {"causal": np.ones(2), "mask": Mask()},
        "causal: got numpy float64 (2,), wanted",
    ),
    (
        "window tensor",
        (Q, K, V),
        {"window": (torch.tensor(2), None)},
        "window left: got torch.int64 (), wanted an int",
    ),
    ("window float tensor", (Q, K, V), {"window": (None, torch.tensor(2.5))}, "right: got torch.float32 ()"),
    ("window tensors", (Q, K, V), {"window": (torch.tensor([1, 2]), 0)}, "window left: got torch.int64 (2,)"),
    (
        "window of a tensor",
        (Q, K, V),
        {"window": torch.tensor([1, 2])},
        "window: got torch.int64 (2,), wanted",
    ),
    ("window huge", (Q, K, V), {"window": (10**5000, 0)}, "window left: got an int of 16610 bits, wanted"),
    ("q_offset huge", (Q, K, V), {"q_offset": -(10**5000)}, "q_offset: got an int of 16610 bits, wanted"),
    ("layout tensor", (Q, K, V), {"layout": torch.zeros(2)}, "layout: got torch.float32 (2,), wanted 'bhsd'"),
    ("layout array", (Q, K, V), {"layout": np.array([1, 2])}, "layout: got numpy int64 (2,), wanted 'bhsd'"),
    ("backend array", (Q, K, V), {"backend": np.array(["cpu", "x"])}, "backend: got numpy <U3 (2,), wanted"),
    ("backend list", (Q, K, V), {"backend": ["cpu"]}, "got list of 1, wanted one of cpu, gluon, triton"),
    ("window far", (Q, K, V), {"window": (2**63, 0)}, "wanted a 64-bit int >= 0"),
    ("scale beyond float64", (Q, K, V), {"scale": 2**2000}, "scale: got an int beyond 1e308"),
    ("seed float", (Q, K, V), {"dropout_p": 0.5, "dropout_seed": 1.5}, "wanted an int in [-2**63, 2**64)"),
    ("seed far", (Q, K, V), {"dropout_p": 0.5, "dropout_seed": -(2**63) - 1}, "low 64 bits: seed % 2**64"),
    (
        "bias float8",
        (Q, K, V),
        {"bias": torch.ones(5, 7).to(torch.float8_e5m2)},
        "bias dtype: got torch.float8_e5m2, wanted float64, float32, float16, bfloat16",
    ),
    ("config kind", (Q, K, V), {"config": 3}, "config: got int, wanted a backend's Config"),
]


def lists(*pairs, rows=5, shape=(1, -1)):
    """One row block (of five rows) with these intervals, as `mask=`."""
    starts, ends = (torch.tensor(x, dtype=torch.int32).view(shape) for x in zip(*pairs, strict=True))
    return {"mask": Mask.intervals(starts, ends, rows=rows)}


REFUSED += [
    ("intervals fall", (Q, K, V), lists((3, 5), (0, 2)), "intervals: got [0, 2) at (batch, head, row block"),
    ("intervals overlap", (Q, K, V), lists((0, 4), (3, 6)), "after an end of 4, wanted intervals with 0 <="),
    ("interval backwards", (Q, K, V), lists((4, 2)), "intervals: got [4, 2)"),
    ("interval negative", (Q, K, V), lists((-1, 2)), "intervals: got [-1, 2)"),
    (
        "intervals rows",
        (Q, K, V),
        lists((0, 4), rows=4),
        "intervals row blocks: got 1, wanted 2: ceil(seqlen_q",
    ),
    (
        "intervals batch",
        (Q, K, V),
        lists(*[(0, 4)] * 3, shape=(3, 1, 1)),
        "intervals shape: got (3, 1, 1, 1, 2)",
    ),
    (
        "intervals heads",
        (Q, K, V),
        lists(*[(0, 4)] * 2, shape=(1, 2, 1, 1)),
        "intervals shape: got (1, 2, 1, 1, 2), wanted (2 or 1, 4 or 1, 1, 1 or more, 2)",
    ),
    (
        "intervals int64",
        (Q, K, V),
        {"mask": Mask(bounds=torch.zeros(1, 1, 1, 1, 2, dtype=torch.int64), rows=5)},
        "intervals: got torch.int64",
    ),
    (
        "intervals device",
        (Q, K, V),
        {"mask": Mask(bounds=torch.zeros(1, 1, 1, 1, 2, dtype=torch.int32, device="meta"), rows=5)},
        "intervals device: got meta, wanted cpu",
    ),
]
REFUSED += [
    (f"{name} {got}", (Q, K, V), {name: value}, f"{name}: got {got}, wanted True or False. ")
    for name in ("return_lse", "batch_invariant", "checked")
    for got, value in (
        ("torch.float32 (0,)", torch.empty(0)),
        ("torch.bool (2,)", torch.ones(2).bool()),
        ("numpy bool (2,)", np.ones(2, dtype=bool)),
        ("1", 1),
        ("'no'", "no"),
    )
]


@pytest.mark.parametrize(("args", "kwargs", "words"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_bad_input_is_refused_with_got_wanted_and_remedy(args, kwargs, words):
    before = [x.clone() for x in args if isinstance(x, torch.Tensor) and x.device.type == "cpu"]
    with pytest.raises(SpecError) as caught:
        attention(*args, **kwargs)
    message = str(caught.value)
    assert words in message
    assert message.count(".") or "Use" in message or "Combine" in message
    for x, y in zip(
        before, (x for x in args if isinstance(x, torch.Tensor) and x.device.type == "cpu"), strict=True
    ):
        assert torch.equal(x, y)


PACKED = (torch.randn(9, 4, 8), torch.randn(11, 2, 8), torch.randn(11, 2, 6))
CU_Q, CU_K = torch.tensor([0, 3, 3, 8], dtype=torch.int32), torch.tensor([0, 4, 9, 10], dtype=torch.int32)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


REFUSED_PACKED = [
    ("4-D", (Q, K, V), {}, "q: got 4 dimensions (2, 4, 5, 8), wanted 3"),
    ("no tensor", (None, *PACKED[1:]), {}, "q: got NoneType, wanted a torch.Tensor"),
    ("k total", (PACKED[0], PACKED[1][:7], PACKED[2]), {}, "v seqlen"),
    ("bounds list", PACKED, {"cu_seqlens_q": [0, 3, 3, 8]}, "cu_seqlens_q: got list, wanted int32 tensor"),
    ("bounds None", PACKED, {"cu_seqlens_q": None}, "cu_seqlens: got None, wanted two int32"),
    (
        "bounds int16",
        PACKED,
        {"cu_seqlens_k": CU_K.short()},
        "cu_seqlens_k: got torch.int16 (4,), wanted int32",
    ),
    ("bounds 2-D", PACKED, {"cu_seqlens_q": CU_Q[None]}, "cu_seqlens_q: got torch.int32 (1, 4)"),
    ("bounds empty", PACKED, {"cu_seqlens_q": CU_Q[:0]}, "cu_seqlens_q: got torch.int32 (0,)"),
    ("bounds device", PACKED, {"cu_seqlens_q": CU_Q.to("meta")}, "cu_seqlens_q device: got meta, wanted cpu"),
    ("members", PACKED, {"cu_seqlens_k": CU_K[:3]}, "cu_seqlens_k: got 2 members, wanted 3 members"),
    ("first bound", PACKED, {"cu_seqlens_q": CU_Q + 1}, "cu_seqlens_q: got 1 first, wanted 0 first"),
    ("negative bound", PACKED, {"cu_seqlens_k": CU_K - 4}, "cu_seqlens_k: got -4 first, wanted 0 first"),
    (
        "falling",
        PACKED,
        {"cu_seqlens_q": ints(0, 5, 3, 8)},
        "cu_seqlens_q: got 3 after 5 (member 1), wanted bounds",
    ),
    (
        "past the rows",
        PACKED,
        {"cu_seqlens_q": ints(0, 3, 3, 10)},
        "cu_seqlens_q: got 10 last, wanted at most 9",
    ),
    (
        "past the keys",
        PACKED,
        {"cu_seqlens_k": ints(0, 3, 3, 12)},
        "cu_seqlens_k: got 12 last, wanted at most 11",
    ),
    ("max_seqlen_q", PACKED, {"max_seqlen_q": 4}, "max_seqlen_q: got 4, wanted 5 or more"),
    ("max_seqlen_k", PACKED, {"max_seqlen_k": 2}, "max_seqlen_k: got 2, wanted 5 or more"),
    ("max_seqlen negative", PACKED, {"max_seqlen_q": -1}, "max_seqlen_q: got -1, wanted 0 or more"),
    ("max_seqlen float", PACKED, {"max_seqlen_k": 5.0}, "max_seqlen_k: got float, wanted an int or None"),
    ("max_seqlen tensor", PACKED, {"max_seqlen_k": torch.ones(2)}, "max_seqlen_k: got Tensor, wanted an int"),
    ("kv_lens", PACKED, {"kv_lens": ints(4, 6, 1)}, "kv_lens: got 6 for request 1, wanted values in [0, 5]"),
    (
        "kv_starts",
        PACKED,
        {"kv_starts": ints(0, 5, 2)},
        "kv_starts: got 2 for request 2, wanted values in [0, 1]",
    ),
    ("kv_lens shape", PACKED, {"kv_lens": ints(4, 5)}, "kv_lens: got (2,)"),
    ("q_offset shape", PACKED, {"q_offset": ints(4, 5)}, "q_offset: got (2,)"),
    ("alibi shape", PACKED, {"alibi_slopes": torch.ones(2, 4)}, "alibi_slopes: got (2, 4)"),
    ("out shape", PACKED, {"out": torch.empty(9, 4, 8)}, "out: got (1, 4, 9, 8)"),
    ("out 4-D", PACKED, {"out": torch.empty(1, 9, 4, 6)}, "out: got 4 dimensions"),
    ("head ratio", (PACKED[0][:, :3], *PACKED[1:]), {}, "heads: got 3 query heads over 2"),
]


@pytest.mark.parametrize(
    ("args", "kwargs", "words"), [r[1:] for r in REFUSED_PACKED], ids=[r[0] for r in REFUSED_PACKED]
)
def test_bad_packed_input_is_refused(args, kwargs, words):
    for max_seqlen in ({}, {"max_seqlen_q": 5, "max_seqlen_k": 5}):
        with pytest.raises(SpecError) as caught:
            attention_varlen(*args, **{"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, **max_seqlen, **kwargs})
        assert words in str(caught.value) and str(caught.value).count(".")
    attention_varlen(*PACKED, CU_Q, CU_K, max_seqlen_q=5, max_seqlen_k=5)


@pytest.mark.parametrize("name", ["mask", "bias", "segments", "intervals"])
def test_packed_members_take_no_operand_of_a_padded_batch(name):
    options = {
        "mask": {"mask": torch.ones(9, 11, dtype=torch.bool)},
        "bias": {"bias": torch.zeros(9, 11)},
        "segments": {"mask": Mask.segments(torch.zeros(1, 9).int(), torch.zeros(1, 11).int())},
        "intervals": {"mask": Mask.intervals(ints(0)[None], ints(5)[None], rows=16)},
    }
    with pytest.raises(SpecError, match="none beside cu_seqlens"):
        explain(*PACKED, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, **options[name])
    for wrong in ({"max_seqlen_q": 5}, {"max_seqlen_k": 5}):
        with pytest.raises(SpecError, match="no cu_seqlens"):
            explain(Q, K, V, **wrong)


def test_mask_intervals_and_blocks_refuse_what_is_none():
    lists = torch.zeros(3, 2, dtype=torch.int32)
    for starts, ends, rows, words in (
        ([0], lists, 4, "intervals starts: got list"),
        (lists, lists.long(), 4, "intervals ends: got torch.int64 (3, 2), wanted an int32"),
        (lists, lists[:2], 4, "intervals ends: got (2, 2)"),
        (lists[0], lists[0], 4, "intervals starts: got (2,)"),
        (lists, lists, 0, "intervals rows: got 0"),
        (lists, lists, 1.5, "intervals rows: got 1.5"),
        (lists, lists, True, "intervals rows: got True"),
    ):
        with pytest.raises(SpecError) as caught:
            Mask.intervals(starts, ends, rows=rows)
        assert words in str(caught.value)
    grid = torch.ones(3, 2, dtype=torch.bool)
    for visible, rows, keys, words in (
        (grid.int(), 4, 4, "blocks: got torch.int32"),
        (grid[0], 4, 4, "blocks: got torch.bool (2,)"),
        ("x", 4, 4, "blocks: got 'x'"),
        (grid, 0, 4, "rows: got 0"),
        (grid, 4, -1, "keys: got -1"),
    ):
        with pytest.raises(SpecError) as caught:
            Mask.blocks(visible, rows=rows, keys=keys)
        assert words in str(caught.value)
    a, b = (Mask.intervals(lists, lists + 1, rows=4) for _ in range(2))
    with pytest.raises(SpecError, match="two different"):
        a & b
    assert (a & a).bounds is a.bounds and (a & Mask.causal()).rows == 4


def test_masks_refuse_what_would_be_ignored():
    ids = torch.zeros(2, 5, dtype=torch.int32)
    lists = torch.zeros(1, 1, 1, 1, 2, dtype=torch.int32)
    for make, words in (
        (lambda: Mask(rows=4), "rows without bounds"),
        (lambda: Mask(bounds=lists), "bounds without rows"),
        (lambda: Mask(bounds=lists, rows=0), "intervals rows: got 0"),
        (lambda: Mask.segments(None, None), "segments q_ids: got None"),
        (lambda: Mask.segments(ids, None), "segments k_ids: got None"),
        (lambda: Mask(alignment=True), "alignment: got True"),
        (lambda: Mask.causal(None), "alignment: got"),
        (lambda: Mask.causal() & torch.ones(5, 7, dtype=torch.bool), "Pass a tensor as mask="),
        (lambda: torch.ones(5, 7, dtype=torch.bool) & Mask.causal(), "Pass a tensor as mask="),
        (lambda: Mask.causal() & None, "mask &: got None, wanted"),
        (lambda: Mask.causal(torch.tensor([3.5])), "alignment: got torch.float32 (1,), wanted"),
        (lambda: Mask(left=torch.tensor([1, 2])) & Mask.window(1, 1), "window left: got torch.int64 (2,)"),
        (
            lambda: Mask(bounds=lists, rows=torch.tensor([1, 2])) & Mask(bounds=lists, rows=3),
            "rows: got torch",
        ),
        (
            lambda: Mask.intervals(lists[0, 0, 0], lists[0, 0, 0], rows=torch.tensor(8.0)),
            "got torch.float32 (",
        ),
        (lambda: Mask.intervals(lists[0, 0, 0], lists[0, 0, 0], rows=torch.tensor(8)), "got torch.int64 ()"),
        (
            lambda: Mask.blocks(torch.ones(1, 1).bool(), rows=1, keys=torch.ones(2)),
            "keys: got torch.float32 (2",
        ),
        (
            lambda: Mask.intervals(lists[0, 0, 0], lists[0, 0, 0], rows=2**63),
            "wanted a 64-bit int, 1 or more",
        ),
        (
            lambda: Mask.intervals(lists[0, 0, 0].to_sparse(), lists[0, 0, 0], rows=2),
            "starts: got torch.sparse",
        ),
        (
            lambda: Mask.blocks(torch.ones(1, 1).bool().to_sparse(), rows=2, keys=2),
            "blocks: got torch.sparse",
        ),
    ):
        with pytest.raises(SpecError) as caught:
            make()
        assert words in str(caught.value)


def test_a_wrong_argument_is_named_by_its_kind_never_by_its_contents():
    shown = {
        "None": None, "-3": -3, "2.5": 2.5, "'abc'": "abc", "tuple of 2": (torch.ones(3), 1), "list of 0": [],
        "dict": {}, "the class Tensor": torch.Tensor, "torch.float32 (2, 1)": torch.ones(2, 1),
        "an int of 201 bits": 2**200,
        "torch.sparse_coo torch.float64 (3,)": torch.ones(3, dtype=torch.float64).to_sparse(),
        "numpy float32 ()": np.float32(7), "numpy int64 (1,)": np.array([7]), "Linear": torch.nn.Linear(1, 1),
        f"'{'x' * 60}'... of 99 characters": "x" * 99,
    }  # fmt: skip
    for words, value in shown.items():
        assert described(value) == words


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_has_no_shape_to_show():
    nested = torch.nested.nested_tensor([torch.ones(2)])
    assert described(nested) == "a nested tensor"
    with pytest.raises(SpecError, match="layout: got a nested tensor"):
        attention(Q, K, V, layout=nested)


@pytest.mark.parametrize("shape", [(5, 8), (2, 4, 5, 8, 1), (1, 4, 5, 8), (2, 3, 5, 8)])
def test_a_trained_operand_is_checked_before_the_plan_of_its_gradients(shape):
    """A parameter takes the dispatcher's way, where a named backend is asked for its gradients first."""
    q = torch.nn.Parameter(torch.randn(shape))
    for backend in (None, *HERE):
        with pytest.raises(SpecError, match=r"q: got|k batch: got|heads: got"):
            attention(q, K, V, backend=backend)


SPARSE = {
    "q": torch.ones(2, 4, 5, 8),
    "k": torch.ones(2, 2, 7, 8),
    "v": torch.ones(2, 2, 7, 8),
    "kv_lens": LENS,
    "kv_starts": LENS,
    "q_offset": LENS,
    "mask": torch.ones(5, 7, dtype=torch.bool),
    "bias": torch.ones(5, 7),
    "alibi_slopes": torch.ones(4),
    "sinks": torch.ones(4),
    "q_segments": torch.ones(2, 5, dtype=torch.int32),
    "k_segments": torch.ones(2, 7, dtype=torch.int32),
    "out": torch.ones(2, 4, 5, 8),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("form", ["sparse", "nested"])
@pytest.mark.parametrize("name", SPARSE)
def test_operands_without_strides_are_refused(name, form):
    """Also where a call of the same shapes has made the route."""
    call = dict(zip("qkv", qkv(), strict=True))
    x = SPARSE[name]
    odd = x.to_sparse() if form == "sparse" else torch.nested.nested_tensor([x[:1], x])

    def options(x):
        if "segments" not in name:
            return {name: x}
        ids = {n: SPARSE[n] for n in ("q_segments", "k_segments")} | {name: x}
        return {"mask": Mask.segments(ids["q_segments"], ids["k_segments"])}

    for more in ({}, {"backend": "torch"}):
        attention(**{**call, **options(x.clone())}, **more)
        with pytest.raises(SpecError, match=f"{name} layout: got"):
            attention(**{**call, **options(odd)}, **more)
    if name != "out":
        call["v" if name == "q" else "q"].requires_grad_()
        with pytest.raises(SpecError, match=f"{name} layout: got"):
            attention(**{**call, **options(odd)}, backend="torch")
        with pytest.raises(SpecError, match=f"{name} layout: got"):
            explain(**{**call, **options(odd)})


def test_packed_bounds_without_strides_are_refused():
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        bounds = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}
        attention_varlen(*PACKED, **bounds)
        bounds[name] = bounds[name].to_sparse()
        with pytest.raises(SpecError, match=f"{name} layout: got torch.sparse_coo"):
            attention_varlen(*PACKED, **bounds)
    with pytest.raises(SpecError, match="max_seqlen_q") as caught:
        attention_varlen(*PACKED, CU_Q, CU_K, max_seqlen_q=2**70)
    assert "Far positions" not in str(caught.value) and "longest length" in str(caught.value)


def test_unsupported_names_every_reason():
    q, k, v = qkv(dtype=torch.float64)
    with pytest.raises(UnsupportedError) as caught:
        attention(q, k, v, backend="cpu")
    assert "float64" in str(caught.value) and "bfloat16" in str(caught.value)
    assert caught.value.reasons[0][0] == "cpu/forward"


@needs_cpu_engine
@pytest.mark.filterwarnings("ignore:Error detected in")
def test_named_backend_without_gradients_refuses_while_a_graph_is_traced(monkeypatch):
    q, k, v = qkv()
    ran = []
    monkeypatch.setattr(backends, "TABLE", tuple(r for r in backends.TABLE if r.name != "cpu/backward"))
    monkeypatch.setattr(torch_ops, "_routes", {})
    monkeypatch.setattr(torch_ops, "_run", lambda *x: ran.append(x))
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: attention(q, k, v, backend="cpu"), backend="aot_eager")
    with pytest.raises(Exception, match="no backward kernel of backend 'cpu'"):
        compiled(q.requires_grad_())
    assert not ran


@needs_cpu_engine
@pytest.mark.parametrize("profiled", [False, True])
def test_named_backend_without_gradients_refuses_before_the_forward_pass(monkeypatch, profiled):
    q, k, v = qkv()
    rows = tuple(row for row in backends.TABLE if row.name != "cpu/backward")
    monkeypatch.setattr(backends, "TABLE", rows)
    monkeypatch.setattr(torch_ops, "_routes", {})
    attention(q, k, v, backend="cpu")
    with torch.profiler.profile() if profiled else nullcontext():
        for _ in range(2):
            with pytest.raises(UnsupportedError, match="backward"):
                attention(q.requires_grad_(), k, v, backend="cpu")
            with pytest.raises(UnsupportedError, match="backward"), use_backend("cpu"):
                attention(q, k, v)


def test_errors_are_of_the_documented_classes():
    assert issubclass(SpecError, ValueError) and issubclass(UnsupportedError, NotImplementedError)


def test_public_names():
    for name in polyflash.__all__:
        assert getattr(polyflash, name).__doc__


@pytest.mark.parametrize("backend", HERE)
def test_bshd_is_the_same_function_on_views(backend):
    q, k, v = qkv()
    expected = attention(q, k, v, causal=True, backend=backend)
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    got, lse = attention(q, k, v, causal=True, layout="bshd", return_lse=True, backend=backend)
    assert got.is_contiguous() and got.shape == q.shape and lse.shape == (2, 4, 5)
    assert torch.equal(got.transpose(1, 2), expected)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3), (0, 1, 3, 2)])
def test_result_has_the_dense_stride_order_of_q(backend, order):
    q, k, v = qkv()
    shuffled = q.permute(order).contiguous().permute(*(order.index(d) for d in range(4)))
    out = attention(shuffled, k, v, backend=backend)
    assert torch.equal(out, attention(q, k, v, backend=backend))
    assert out.stride() == (shuffled if order[3] == 3 else q).stride()


@pytest.mark.parametrize("backend", HERE)
def test_out_is_written_whatever_its_strides(backend):
    q, k, v = qkv()
    expected = attention(q, k, v, causal=True, backend=backend)
    for out in (
        torch.empty_like(q),
        torch.empty(2, 5, 4, 8).transpose(1, 2),
        torch.empty(2, 4, 5, 16)[..., ::2],
    ):
        result = attention(q, k, v, causal=True, out=out, backend=backend)
        assert result is out and torch.equal(out, expected)


def test_autocast_casts_as_torch_sdpa_does_and_gradients_keep_their_dtype():
    q, k, v = qkv(kv_heads=4)
    q.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(q, k.bfloat16(), v)
        peer = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert out.dtype is peer.dtype is torch.bfloat16
    out.float().sum().backward()
    assert q.grad.dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        exact = attention(*(x.detach().double() for x in (q, k, v)), softcap=2.0)
    assert exact.dtype is torch.float64
    want = attention_reference(*(x.detach().double() for x in (q, k, v)), softcap=2.0).out
    torch.testing.assert_close(exact, want, rtol=1e-12, atol=1e-12)


def test_autocast_reaches_no_kernel():
    """Matrix products inside a row must not be cast by the caller's autocast."""
    q, k, v = (x.double() for x in qkv(kv_heads=4))
    plain = attention(q, k, v, backend="torch", softcap=2.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention(q, k, v, backend="torch", softcap=2.0), plain)


def test_mask_object_and_keywords_say_the_same():
    q, k, v = qkv()
    a = attention(q, k, v, mask=Mask.causal() & Mask.window(2, None) & Mask.lengths(LENS))
    b = attention(q, k, v, causal=True, window=(2, None), kv_lens=LENS)
    c = attention(q, k, v, mask=Mask.window(2, 5), causal=True, kv_lens=LENS)
    assert torch.equal(a, b) and torch.equal(b, c)


def test_mask_objects_copy_and_pickle():
    mask = Mask.causal() & Mask.lengths(LENS)
    for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert other.alignment == "bottom_right" and torch.equal(other.kv_lens, LENS)


def test_inputs_and_global_state_are_untouched():
    q, k, v = qkv()
    copies = [x.clone() for x in (q, k, v)]
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    attention(q, k, v, causal=True, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(copies, (q, k, v), strict=True))
    assert torch.equal(state, torch.get_rng_state()) and threads == torch.get_num_threads()


def test_dropout_seed_comes_from_the_default_generator():
    q, k, v = qkv()
    torch.manual_seed(1)
    a, b = attention(q, k, v, dropout_p=0.5), attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(a, attention(q, k, v, dropout_p=0.5)) and not torch.equal(a, b)


def test_a_seed_is_64_bits_signed_or_not():
    """torch.initial_seed() returns unsigned ones."""
    q, k, v = qkv()
    for seed in (2**63, 2**63 + 12345, 2**64 - 1):
        a, b = (attention(q, k, v, dropout_p=0.5, dropout_seed=s) for s in (seed, seed - 2**64))
        assert torch.equal(a, b)
    assert not torch.equal(a, attention(q, k, v, dropout_p=0.5, dropout_seed=2**63))


def test_what_is_made_for_a_call_ignores_the_default_device():
    """Seeds, and what is made once at import, belong on the CPU."""
    q, k, v = qkv()
    with torch.device("meta"):
        assert routes.plain_keys("cpu") <= routes.PLAIN_KEYS
    for seed in (None, 3):
        results = []
        for device in ("cpu", "meta"):
            torch.manual_seed(1)
            with torch.device(device):
                results.append(attention(q, k, v, dropout_p=0.5, dropout_seed=seed))
        assert torch.equal(*results)


def test_the_backward_op_reads_no_length_unchecked():
    q, k, v = qkv(kv_heads=4)
    out, lse = attention(q, k, v, return_lse=True)
    for wrong in (LENS + 1, LENS - 8):
        args = Arguments(need_lse=True, kv_lens=wrong)
        with pytest.raises(SpecError, match=r"kv_lens: got .* for request 0"):
            torch.ops.polyflash.attention_backward(
                out, None, q, k, v, out, lse, [True] * 3 + [False] * 2, *args
            )


@pytest.mark.parametrize("backend", HERE)
def test_gradients_of_a_compiled_call_obey_the_backend_in_use(monkeypatch, backend):
    """As POLYFLASH_BACKEND sets it for a process: both passes alike."""
    seen, run = [], torch_ops._differentiate
    monkeypatch.setattr(torch_ops, "_differentiate", lambda *x: seen.append(x[0].row.backend) or run(*x))
    q, k, v = (x.requires_grad_() for x in qkv())
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: attention(q, k, v), fullgraph=True, backend="aot_eager")
    with use_backend(backend):
        compiled(q, k, v).sum().backward()
    assert seen == [backend]


@needs_cpu_engine
@pytest.mark.parametrize("way", ["plain", "dispatcher", "vjp"])
def test_gradients_of_an_eager_call_do_not_obey_a_later_choice(monkeypatch, way):
    """A free choice, too, was made in the forward pass."""
    seen, run = [], torch_ops._differentiate
    monkeypatch.setattr(torch_ops, "_differentiate", lambda *x: seen.append(x[0].row.backend) or run(*x))
    q, k, v = qkv()
    if way == "vjp":
        _, backward = torch.func.vjp(lambda q: attention(q, k, v), q)
        back = lambda: backward(torch.ones_like(q))  # noqa: E731
    else:
        out = attention(torch.nn.Parameter(q) if way == "dispatcher" else q.requires_grad_(), k, v)
        back = lambda: out.sum().backward()  # noqa: E731
    with use_backend("torch"):
        back()
    assert seen == ["cpu"]


def test_use_backend_and_its_priorities():
    q, k, v = qkv(dtype=torch.float64)
    with use_backend("cpu"):
        with pytest.raises(UnsupportedError):
            attention(q, k, v)
        attention(q, k, v, backend="torch")
        with use_backend(None):
            attention(q, k, v)
    attention(q, k, v)
    with pytest.raises(SpecError), use_backend("gpu"):
        pass


def test_a_compiled_call_obeys_use_backend_at_run_time():
    q, k, v = qkv(dtype=torch.float64)
    compiled = torch.compile(lambda q, k, v: attention(q, k, v), fullgraph=True, backend="eager")
    compiled(q, k, v)
    with use_backend("cpu"), pytest.raises(UnsupportedError):
        compiled(q, k, v)


@needs_cpu_engine
@pytest.mark.parametrize("broken", [False, True])
def test_use_backend_inside_a_compiled_function(monkeypatch, broken):
    """It becomes part of the graph, goes before the context of the call, and costs no recompilation; with a
    graph break within it, too."""
    from torch._dynamo.testing import CompileCounter

    q, k, v = qkv()
    seen, run = [], torch_ops._run
    monkeypatch.setattr(torch_ops, "_run", lambda *x: seen.append(x[0].row.backend) or run(*x))

    def call(q, k, v):
        first = attention(q, k, v)
        with use_backend("torch"):
            second = attention(q, k, v)
            if broken:
                torch._dynamo.graph_break()
            with use_backend(None):
                third = attention(q, k, v)
            fourth = attention(q, k, v, backend="cpu")
        return first, second, third, fourth, attention(q, k, v)

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(call, fullgraph=not broken, backend=counter)
    for context in (None, "torch", "cpu", None):
        seen.clear()
        with use_backend(context):
            compiled(q, k, v)
        outside = context or "cpu"
        assert seen == [outside, "torch", "cpu", "cpu", outside]
    assert broken or counter.frame_count == 1
    assert torch_ops.in_graph.backend is None


def test_a_backend_named_inside_a_compiled_function_refuses_while_tracing():
    q, k, v = qkv(dtype=torch.float64)

    def call(q, k, v):
        with use_backend("cpu"):
            return attention(q, k, v)

    torch._dynamo.reset()
    with pytest.raises(Exception, match="has bfloat16, float16, float32, asked for float64"):
        torch.compile(call, fullgraph=True, backend="eager")(q, k, v)
    with pytest.raises(Exception, match="one of cpu, gluon, triton, webgpu, metal, torch"):
        torch.compile(lambda q: use_backend("gpu").__enter__(), backend="eager")(q)
    assert torch_ops.in_graph.backend is None and torch_ops.backend_in_use.get() == ""


@pytest.mark.parametrize("backend", [None, "torch"])
def test_packed_results_have_the_stride_order_of_q(backend):
    q, k, v = PACKED
    for order in ((0, 1, 2), (1, 0, 2)):
        shuffled = q.permute(order).contiguous().permute(order)
        out, lse = attention_varlen(shuffled, k, v, CU_Q, CU_K, causal=True, return_lse=True, backend=backend)
        assert out.shape == (9, 4, 6) and lse.shape == (4, 9) and lse.is_contiguous()
        assert out.stride() == q[..., :6].permute(order).contiguous().permute(order).stride()
    place = torch.empty(9, 4, 12)[..., ::2]
    got = attention_varlen(q, k, v, CU_Q, CU_K, causal=True, out=place, backend=backend)
    assert got is place and torch.equal(place, out)


class TestExplain:
    def test_packed_members_are_explained_without_contents(self):
        q, k = (torch.empty(n, 8, 64, device="meta", dtype=torch.bfloat16) for n in (300, 500))
        cu = torch.empty(5, dtype=torch.int32, device="meta")
        plan = explain(q, k, k, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_k=100, target="cpu:generic")
        assert plan.spec.members == 4 and plan.spec.seqlen_q == 300 and plan.spec.max_seqlen_k == 100
        assert "members=4" in str(plan) and "at most" in str(plan) and "cu_seqlens are not read" in str(plan)
        assert plan.work.flops == 4 * 64 * 8 * 300 * 100

    def test_it_launches_nothing_and_takes_meta_tensors(self):
        q = torch.empty(1, 8, 2048, 128, device="meta", dtype=torch.bfloat16)
        plan = explain(q, q, q, causal=True, target="cpu:avx512+avx512_bf16")
        assert plan.backend == "cpu" and "chosen" in str(plan)

    def test_every_row_has_a_verdict_and_refusals_say_why(self):
        q = torch.empty(1, 8, 128, 64)
        plan = explain(q, q, q, bias=torch.zeros(128, 128), sinks=torch.zeros(8), target="cuda:sm90")
        verdicts = {v.row.name: v.reasons for v in plan.verdicts}
        assert plan.backend == "triton" and not verdicts["triton/forward"] and not verdicts["torch/forward"]
        assert any("cuda:sm90" in reason for reason in verdicts["cpu/forward"])

    def test_amx_takes_bf16_prefill_to_the_torch_row_and_says_so(self):
        q = torch.empty(1, 8, 2048, 128, device="meta", dtype=torch.bfloat16)
        plan = explain(q, q, q, target="cpu:avx512+avx512_bf16+amx_bf16")
        reasons = next(v.reasons for v in plan.verdicts if v.row.name == "cpu/forward")
        assert plan.backend == "torch" and any("AMX" in reason for reason in reasons)
        assert explain(q.float(), q.float(), q.float(), target="cpu:avx512+amx_bf16").backend == "cpu"
        assert explain(q, q, q, target="cpu:avx512+amx_bf16", backend="cpu").backend == "cpu"

    def test_a_missing_or_old_numba_names_the_reason(self):
        from dataclasses import replace

        from polyflash.target import parse

        q = torch.empty(1, 2, 64, 64)
        for packages, word in (((("numba", ""),), "not installed"), ((("numba", "0.50.1"),), "older than")):
            plan = explain(q, q, q, target=replace(parse("cpu:avx512"), packages=packages))
            reasons = next(v.reasons for v in plan.verdicts if v.row.name == "cpu/forward")
            assert plan.backend == "torch" and any(word in reason for reason in reasons)

    def test_unknown_cpus_get_the_portable_kernel_and_gpus_their_engine(self):
        q = torch.empty(1, 2, 64, 64)
        assert explain(q, q, q, target="cpu:generic").backend == "cpu"
        assert explain(q, q, q, target="cuda:sm90").backend == "triton"
        assert explain(q, q, q, target="metal:m3").backend == "torch"  # until a Mac has run its engine
        assert explain(q, q, q, target="metal:m3", backend="metal").backend == "metal"

    def test_gradients_have_their_own_plan(self):
        q = torch.randn(1, 2, 64, 64, requires_grad=True)
        plan = explain(q, q, q, target="cpu:avx512")
        assert plan.backend == plan.backward.backend == "cpu" and "gradients" in str(plan)
        plan = explain(q.double(), q.double(), q.double(), target="cpu:avx512")
        assert plan.backward.backend == "torch"

    def test_the_plan_is_what_runs(self):
        q, k, v = qkv()
        plan = explain(q, k, v, causal=True)
        same = attention(q, k, v, causal=True, config=plan.config, backend=plan.backend)
        assert torch.equal(same, attention(q, k, v, causal=True))

    @needs_cpu_engine
    def test_an_explicit_config_is_the_first_rung_and_another_backends_is_refused(self):
        q, k, v = qkv()
        ours, torchs = explain(q, k, v).config, explain(q, k, v, backend="torch", softcap=1.0).config
        assert explain(q, k, v, config=ours).rung == "explicit" and explain(q, k, v).rung == "heuristic"
        with pytest.raises(SpecError, match="config"):
            attention(q, k, v, config=torchs, backend="cpu")

    def test_unknown_targets_are_refused_with_the_known_ones(self):
        with pytest.raises(SpecError, match="cuda:sm90"):
            explain(Q, K, V, target="tpu:v5")
