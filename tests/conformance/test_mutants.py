"""Can the suite fail? Each mutant is one published mistake as a wrapper; the checks that hold rows must kill
it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import polyflash
from polyflash import Mask
from polyflash.workloads import make
from tests.catalogue import named
from tests.conformance.rows import ints, qkv
from tests.memory import check_guarded, check_hidden
from tests.tolerance import check, expect

Result = tuple[Tensor, Tensor]
Call = Callable[..., Result]


def right(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Result:
    out, lse = polyflash.attention(q, k, v, return_lse=True, backend="torch", **options)
    return out, lse


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3) * q.shape[-1] ** -0.5


def offset_dropped(q, k, v, **o):
    return right(q, k, v, **{**o, "causal": "top_left"} if o.get("causal") else o)


def diagonal_excluded(q, k, v, **o):
    return (
        right(q, k, v, q_offset=k.shape[2] - q.shape[2] - 1, **o) if o.get("causal") else right(q, k, v, **o)
    )


def window_one_wider(q, k, v, window=None, **o):
    return right(q, k, v, window=window and (window[0] + 1, window[1]), **o)


def last_tile_dropped(q, k, v, **o):
    n = (k.shape[2] - 1) // 64 * 64 or k.shape[2]
    return right(q, k[:, :, :n], v[:, :, :n], **{"q_offset": k.shape[2] - q.shape[2], **o})


def last_tile_unmasked(q, k, v, kv_lens=None, **o):
    if kv_lens is not None:
        kv_lens = (-(-kv_lens // 64) * 64).clamp(max=k.shape[2]).int()
    return right(q, k, v, kv_lens=kv_lens, **o)


def kv_heads_modulo(q, k, v, **o):
    order = torch.arange(q.shape[1]) % k.shape[1]
    return right(q, k[:, order], v[:, order], **o)


def lse_in_log2(q, k, v, **o):
    out, lse = right(q, k, v, **o)
    return out, lse / math.log(2)


def lse_without_scale(q, k, v, **o):
    out, _ = right(q, k, v, **o)
    _, lse = right(q, k, v, **{**o, "scale": 1.0})
    return out, lse


def lse_of_empty_rows_is_plus_infinity(q, k, v, **o):
    out, lse = right(q, k, v, **o)
    return out, torch.where(lse == -math.inf, math.inf, lse)


def empty_rows_are_the_mean(q, k, v, **o):
    out, lse = right(q, k, v, **o)
    mean = v.mean(2, keepdim=True).repeat_interleave(q.shape[1] // k.shape[1], 1)
    return torch.where((lse == -math.inf)[..., None], mean, out), lse


def alpha_not_applied_to_the_sum(q, k, v, **o):
    out, lse = right(q, k, v, **o)
    s = scores(q, k)
    first = s[..., :64].amax(-1, keepdim=True)
    rest = s.amax(-1, keepdim=True)
    wrong = (s[..., :64] - first).exp().sum(-1) + (s[..., 64:] - rest).exp().sum(-1)
    true = (s - rest).exp().sum(-1)
    return out * (true / wrong)[..., None].to(out.dtype), lse


def merged_without_maximum(q, k, v, **o):
    out, lse = right(q, k, v, **o)
    total = scores(q, k).exp().sum(-1)
    return torch.where(torch.isinf(total)[..., None], math.nan, out), torch.where(
        torch.isinf(total), math.inf, lse
    )


def maximum_replaced(q, k, v, **o):
    out, lse = right(q, k, v, **o)
    s = scores(q, k)
    lost = (s[..., :64].amax(-1) > s[..., -2:].amax(-1) + 20)[..., None]
    return torch.where(lost, out * 0.5, out), lse


def one_channel_stale(q, k, v, **o):
    out, lse = right(q, k, v, **o)
    return torch.cat((out[..., :-1], out[..., :1]), -1), lse


def one_row_wrong(q, k, v, **o):
    out, lse = right(q, k, v, **o)
    out = out.clone()
    out[0, 0, out.shape[2] // 2] *= 1.5
    return out, lse


def heads_share_lse(q, k, v, **o):
    out, lse = right(q, k, v, **o)
    return out, lse[:, :1].expand_as(lse).contiguous()


def split_end_inclusive(q, k, v, **o):
    """The first key of the second half is counted twice."""
    half = k.shape[2] // 2
    a = right(q, k[:, :, : half + 1], v[:, :, : half + 1])
    b = right(q, k[:, :, half:], v[:, :, half:])
    merged = polyflash.merge(*a, *b)
    return merged.out.to(q.dtype), merged.lse


def statistics_in_low_precision(q, k, v, **o):
    s = scores(q.bfloat16(), k.bfloat16())
    wide = v.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (torch.softmax(s, -1) @ wide.bfloat16()).to(q.dtype), torch.logsumexp(s.float(), -1)


def masked_values_multiplied_by_zero(q, k, v, **o):
    out, lse = right(q, k, v, **o)
    return out + (v * 0).sum(2, keepdim=True).repeat_interleave(q.shape[1] // k.shape[1], 1), lse


def unwritten_empty_rows(q, k, v, **o):
    out, lse = right(q, k, v, **o)
    return torch.where((lse == -math.inf)[..., None], torch.full_like(out, math.nan), out), lse


PLAIN: dict[str, Any] = {}
CAUSAL = {"causal": True}
CASES = (
    (offset_dropped, CAUSAL, "normal"), (diagonal_excluded, CAUSAL, "normal"), (window_one_wider,
    {"window": (9, 9)}, "normal"),
    (last_tile_dropped, PLAIN, "normal"), (last_tile_unmasked, {"kv_lens": ints(130, 70)}, "normal"),
    (kv_heads_modulo, PLAIN, "normal"), (lse_in_log2, PLAIN, "normal"), (lse_without_scale, PLAIN, "normal"),
    (lse_of_empty_rows_is_plus_infinity, {"kv_lens": ints(130, 0)}, "normal"),
    (empty_rows_are_the_mean, {"kv_lens": ints(130, 0)}, "normal"), (alpha_not_applied_to_the_sum, PLAIN,
    "normal"),
    (merged_without_maximum, PLAIN, "big"), (maximum_replaced, PLAIN, "falling"), (one_channel_stale, PLAIN,
    "normal"),
    (one_row_wrong, PLAIN, "normal"), (heads_share_lse, PLAIN, "normal"), (split_end_inclusive, PLAIN,
    "normal"),
    (statistics_in_low_precision, PLAIN, "normal"), (unwritten_empty_rows, {"kv_lens": ints(130, 0)},
    "normal"),
)  # fmt: skip


def inputs(family: str) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv(2, (6, 2), 70, 130, 64, seed=2)
    if family == "big":
        return 12 * q, 12 * k, v
    if family == "falling":
        q[..., 0], k[..., 0] = 8, torch.linspace(60, -60, 130)
    return q, k, v


@pytest.mark.parametrize(("mutant", "options", "family"), CASES, ids=[m.__name__ for m, _, _ in CASES])
def test_accuracy_kills(mutant: Call, options: dict[str, Any], family: str):
    q, k, v = inputs(family)
    want = expect(q, k, v, **options)
    check(*right(q, k, v, **options), want)
    with pytest.raises(AssertionError):
        check(*mutant(q, k, v, **options), want)


def test_hidden_memory_kills():
    q, k, v = inputs("normal")
    options = {"kv_lens": ints(130, 70)}
    check_hidden(right, q, k, v, options)
    for mutant in (masked_values_multiplied_by_zero, last_tile_unmasked):
        with pytest.raises(AssertionError):
            check_hidden(mutant, q, k, v, options)


def test_guards_kill_reads_and_writes():
    q, k, v = inputs("normal")

    def reads_beyond(q, k, v, **o):
        wide = torch.as_strided(v, (*v.shape[:3], v.shape[3] + 1), v.stride(), v.storage_offset())
        out, lse = right(q, k, v, **o)
        return out + 0 * wide[..., -1:].sum((1, 2, 3), keepdim=True), lse

    def writes_beyond(q, k, v, *, out, **o):
        result, lse = right(q, k, v, out=out, **o)
        torch.as_strided(out, (*out.shape[:3], out.shape[3] + 1), out.stride(), out.storage_offset())[
            ..., -1
        ] = 0
        return result, lse

    def writes_inputs(q, k, v, **o):
        result = right(q, k, v, **o)
        q[0, 0, 0, 0] += 1
        return result

    check_guarded(right, q, k, v, {})
    for mutant in (reads_beyond, writes_beyond, writes_inputs):
        with pytest.raises(AssertionError):
            check_guarded(mutant, q, k, v, {})


def packed_right(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Result:
    out, lse = polyflash.attention_varlen(q, k, v, return_lse=True, backend="torch", **options)
    return out, lse


def members_one_key_longer(q, k, v, cu_seqlens_k=None, **o):
    longer = (cu_seqlens_k + (cu_seqlens_k > 0)).clamp(max=len(k))
    return packed_right(q, k, v, cu_seqlens_k=longer.int(), **o)


def aligned_by_the_totals(q, k, v, **o):
    return packed_right(q, k, v, **{"q_offset": len(k) - len(q), **o})


def lengths_of_the_first_member(q, k, v, kv_lens=None, **o):
    first = kv_lens[:1].expand_as(kv_lens)
    return packed_right(q, k, v, kv_lens=torch.minimum(first, o["cu_seqlens_k"].diff()).int(), **o)


def slopes_of_the_first_member(q, k, v, alibi_slopes=None, **o):
    return packed_right(q, k, v, alibi_slopes=alibi_slopes[0], **o)


def sinks_of_rows_without_a_member(q, k, v, sinks=None, **o):
    out, lse = packed_right(q, k, v, sinks=sinks, **o)
    lse[:, int(o["cu_seqlens_q"][-1]) :] = sinks[:, None]
    return out, lse


def tail_joins_the_last_member(q, k, v, cu_seqlens_q=None, **o):
    whole = cu_seqlens_q.clone()
    whole[-1] = len(q)
    return packed_right(q, k, v, cu_seqlens_q=whole, **o)


def empty_members_skipped_in_the_list(q, k, v, **o):
    """The member after an empty one takes the empty one's keys."""
    bounds = o["cu_seqlens_k"].diff()
    o["cu_seqlens_k"] = torch.cat((bounds.new_zeros(1), bounds.roll(1).cumsum(0))).int()
    return packed_right(q, k, v, **o)


def lse_by_token(q, k, v, **o):
    out, lse = packed_right(q, k, v, **o)
    return out, lse.T.contiguous().view_as(lse)


PACKED = (
    (members_one_key_longer, "packed"),
    (aligned_by_the_totals, "packed-causal"),
    (lengths_of_the_first_member, "packed-lens"),
    (slopes_of_the_first_member, "packed-alibi-members"),
    (sinks_of_rows_without_a_member, "packed-sinks"),
    (tail_joins_the_last_member, "packed"),
    (empty_members_skipped_in_the_list, "packed-window"),
    (lse_by_token, "packed-decode"),
)


@pytest.mark.parametrize(("mutant", "name"), PACKED, ids=[m.__name__ for m, _ in PACKED])
def test_packed_kills(mutant: Call, name: str):
    q, k, v, options = make(named(name))
    want = expect(q, k, v, **options)
    check(*packed_right(q, k, v, **options), want, options=options)
    with pytest.raises(AssertionError):
        check(*mutant(q, k, v, **options), want, options=options)


def hull_of_the_list(mask: Mask) -> Mask:
    """Holes are filled."""
    starts, ends = mask.bounds.unbind(-1)
    some = starts < ends
    low = torch.where(some, starts, 2**20).amin(-1, keepdim=True)
    return Mask.intervals(low, torch.where(some, ends, 0).amax(-1, keepdim=True).maximum(low), rows=mask.rows)


def only_the_first_interval(mask: Mask) -> Mask:
    return Mask(bounds=mask.bounds[..., :1, :], rows=mask.rows)


def ends_inclusive(mask: Mask) -> Mask:
    starts, ends = mask.bounds.unbind(-1)
    following = torch.nn.functional.pad(starts[..., 1:], (0, 1), value=2**20)
    return Mask.intervals(
        starts, torch.minimum(ends + (starts < ends), following.maximum(ends)), rows=mask.rows
    )


def heads_share_lists(mask: Mask) -> Mask:
    return Mask(bounds=mask.bounds[:, :1], rows=mask.rows)


def row_blocks_shifted(mask: Mask) -> Mask:
    return Mask(bounds=mask.bounds.roll(1, 2), rows=mask.rows)


@pytest.mark.parametrize(
    "mutant",
    (hull_of_the_list, only_the_first_interval, ends_inclusive, heads_share_lists, row_blocks_shifted),
)
def test_lists_kill(mutant: Callable[[Mask], Mask]):
    q, k, v, options = make(named("intervals-heads"))
    want = expect(q, k, v, **options)
    check(*right(q, k, v, **options), want)
    with pytest.raises(AssertionError):
        check(*right(q, k, v, mask=mutant(options["mask"])), want)
