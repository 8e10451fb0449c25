"""The catalogue: names, tags, reproducibility, and that each family is what it says."""

from __future__ import annotations

import math

import pytest
import torch

from polyflash.spec import is_decode
from polyflash.workloads import Workload
from tests.catalogue import CATALOGUE, DTYPES, named, with_dtype, workloads
from tests.families import FAMILIES, make
from tests.tolerance import visible


def test_names_and_tags():
    names = [w.name for w in CATALOGUE]
    assert len(set(names)) == len(names)
    assert {tag for w in CATALOGUE for tag in w.tags} == {
        *("ci", "varlen", "decode", "paged", "bench", "tune")
    }
    assert named("decode").kv_heads == 2
    with pytest.raises(KeyError, match="wanted one of"):
        named("nothing")


def test_ci_workloads_are_small():
    for w in workloads("ci"):
        assert w.batch * w.heads * w.seqlen_q * w.seqlen_k <= 2**19, w.name
        assert w.heads % w.kv_heads == 0


def test_workloads_are_hashable_plain_data():
    assert len({hash(w) for w in CATALOGUE}) == len(CATALOGUE)


@pytest.mark.parametrize("workload", workloads("ci"), ids=lambda w: w.name)
def test_make(workload: Workload):
    for dtype in DTYPES:
        q, k, v, options = make(with_dtype(workload, dtype), seed=3)
        assert q.shape == (workload.batch, workload.heads, workload.seqlen_q, workload.head_dim)
        assert v.shape == (workload.batch, workload.kv_heads, workload.seqlen_k, workload.dim_v)
        assert str(q.dtype) == str(k.dtype) == str(v.dtype) == f"torch.{dtype}"
        again = make(with_dtype(workload, dtype), seed=3)
        assert all(torch.equal(a, b) for a, b in zip((q, k, v), again[:3], strict=True))
        assert options.keys() == again[3].keys()
    assert visible(q, k, **options).any(), "every row is empty"


@pytest.mark.parametrize("workload", workloads("varlen"), ids=lambda w: w.name)
def test_make_packed(workload: Workload):
    q, k, v, options = make(workload, seed=3)
    assert q.shape == (workload.seqlen_q, workload.heads, workload.head_dim) and q.is_contiguous()
    assert v.shape == (workload.seqlen_k, workload.kv_heads, workload.dim_v)
    for side, x in enumerate((q, k)):
        bounds = options[f"cu_seqlens_{'qk'[side]}"]
        assert bounds.dtype is torch.int32 and int(bounds[-1]) <= len(x)
        assert bounds.diff().tolist() == [member[side] for member in workload.members]


@pytest.mark.parametrize("workload", workloads("decode"), ids=lambda w: w.name)
def test_decode_workloads_are_decode_problems(workload: Workload):
    w = workload
    assert is_decode(w.heads, w.kv_heads, w.seqlen_q, w.seqlen_k)
    assert w.batch * w.heads * w.seqlen_q * w.seqlen_k <= 2**17
    q, k, _, options = make(w, seed=3)
    assert visible(q, k, **options).any(), "every row is empty"


@pytest.mark.parametrize("workload", workloads("paged"), ids=lambda w: w.name)
def test_make_in_pages(workload: Workload):
    """Each needed page is one request's, and holds its keys; what no request has is NaN, and no page number
    that stands beyond the live keys is to be believed."""
    w = workload
    q, k, v, options = make(w, seed=3)
    assert q.shape == (w.seqlen_q if w.members else w.batch, w.heads, w.head_dim)
    table, lens = options["page_table"], options["kv_lens"].tolist()
    assert table.dtype is torch.int32 and table.shape == (w.requests, w.columns)
    assert k.shape == (len(k), w.page_size, w.kv_heads, w.head_dim) and v.shape == (*k.shape[:3], w.dim_v)
    needed = torch.cat([row[: -(-n // w.page_size)] for row, n in zip(table, lens, strict=True)])
    assert len(set(needed.tolist())) == len(needed) < len(k) and int(needed.min()) >= 0
    assert len(needed) == 1 or needed.tolist() != sorted(needed.tolist())
    assert int((~k.isnan()).sum()) == sum(lens) * w.kv_heads * w.head_dim
    beyond = torch.cat([row[-(-n // w.page_size) :] for row, n in zip(table, lens, strict=True)])
    assert ((beyond < 0) | (beyond >= len(k))).any()
    again = make(w, seed=3)
    assert torch.equal(again[3]["page_table"], table) and torch.equal(again[0], q)


def test_intervals_have_holes_and_overhang():
    starts, ends = make(named("intervals-heads"))[3]["mask"].bounds.unbind(-1)
    assert (starts[..., 1:] >= ends[..., :-1]).all() and (starts == ends)[:, :, 0].all()
    assert (starts[..., 1:] > ends[..., :-1]).any() and (ends > 200).any() and (starts < ends).any()


def test_features_name_the_options():
    assert not named("cross").features
    for w in workloads("ci"):
        _, _, _, options = make(w)
        extra = (
            (w.heads != w.kv_heads)
            + (w.dim_v != w.head_dim)
            + (w.causal == "top_left")
            - (w.scale is not None)
        )
        assert len(w.features) == len(options) + extra, w.name


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_finite(family: str, dtype: str):
    q, k, v, _ = make(with_dtype(named("cross"), dtype), family=family)
    assert torch.isfinite(q).all() and torch.isfinite(k).all()
    assert torch.isfinite(v).all() != (family == "nanrow")


def test_families_are_what_they_say():
    def scores(family: str) -> torch.Tensor:
        q, k, _, _ = make(named("long"), family=family)
        return (q @ k.mT).double() / 8

    assert (scores("zeros") == 0).all()
    s = scores("equal")
    assert float((s - s[..., :1]).abs().max()) < 1e-5
    blocks = scores("rising")[..., :1088].unflatten(-1, (-1, 64)).mean(-1).mean((0, 1, 2))
    assert (blocks.diff() > 4).all() and (blocks.diff() < 8).all()
    assert (scores("falling")[..., :1088].unflatten(-1, (-1, 64)).mean(-1).mean((0, 1, 2)).diff() < -4).all()
    s = scores("sink")
    assert 3 < float((s[..., 0] - s[..., 1:].mean(-1)).mean()) < 5
    assert scores("sharp").std() > 2.5
    _, k, _, _ = make(named("cross"), family="alternating")
    assert (k[:, :, ::2] >= 0).all() and (k[:, :, 1::2] <= 0).all()
    assert float(make(named("cross"), family="vbias")[2].mean()) > 4
    _, k, _, _ = make(named("long"), family="kbias")
    assert int((k.mean((0, 1, 2)).abs() > 7).sum()) == 6
    _, k, _, _ = make(named("long"), family="kscale")
    assert int((k.std((0, 1, 2)) > 6).sum()) == 4
    tiny = make(named("cross"), family="subnormal")[2]
    assert 0 < float(tiny.abs().max()) < 8 * torch.finfo(torch.float32).smallest_normal
    huge = make(with_dtype(named("cross"), "float16"), family="huge")[2]
    assert float(huge.abs().max()) == torch.finfo(torch.float16).max
    q, k, _, _ = make(named("cross"), family="huge")
    assert math.isfinite(float((q @ k.mT).abs().max()))
