"""The oracles of packed members, of pages and of statistics: `polyflash.reference`, request by request."""

from __future__ import annotations

import torch
from torch import Tensor

from polyflash.mask import Mask
from polyflash.merging import AttentionOutput
from polyflash.reference import _masked_scores, _softmax, attention_reference

_INF = float("inf")


def statistics_reference(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    kv_lens: Tensor | None = None,
    kv_starts: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    layout: str = "bhsd",
) -> tuple[Tensor, Tensor, Tensor]:
    """Float64 (column_sums, entropy, max_logit) of the weights of `attention_reference`: Σ_i p_ij (batch,
    num_q_heads, seqlen_k), -Σ_j p_ij·ln p_ij with the sink's term, and max_j s_ij (batch, num_q_heads,
    seqlen_q). An empty row has entropy 0 and maximum -inf."""
    if layout == "bshd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    s, visible = _masked_scores(
        q, k, causal, window, mask, bias, alibi_slopes, softcap, scale, kv_lens, kv_starts, q_offset
    )
    p, _, rest = _softmax(s, visible, sinks)
    whole = torch.cat([p, rest], -1)
    entropy = -torch.where(whole == 0.0, 0.0, whole * torch.log(whole)).sum(-1)
    top = torch.cat([s, torch.full_like(rest, -_INF)], -1).amax(-1)
    return p.sum(-2), entropy, top


def varlen_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    kv_lens: Tensor | None = None,
    kv_starts: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
) -> AttentionOutput:
    """`attention_reference` of each member; q (total_q, Hq, D), k, v (total_k, Hkv, ·), cu_seqlens (members
    + 1,), kv_lens, kv_starts and q_offset per member. Returns out (total_q, Hq, Dv) and lse (Hq, total_q);
    rows beyond the last member are 0 and -inf."""
    rows, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    outs, lses = [], []
    for b in range(len(rows) - 1):
        one_q = q[None, rows[b] : rows[b + 1]]
        one_k, one_v = (x[None, keys[b] : keys[b + 1]] for x in (k, v))
        slopes = alibi_slopes[b] if alibi_slopes is not None and alibi_slopes.ndim == 2 else alibi_slopes
        out, lse = attention_reference(
            one_q, one_k, one_v, causal=causal, window=window, alibi_slopes=slopes, softcap=softcap,
            sinks=sinks, scale=scale, dropout_p=dropout_p, dropout_seed=dropout_seed, layout="bshd",
            first_batch=b, kv_lens=None if kv_lens is None else kv_lens[b : b + 1],
            kv_starts=None if kv_starts is None else kv_starts[b : b + 1],
            q_offset=q_offset[b : b + 1] if isinstance(q_offset, Tensor) else q_offset,
        )  # fmt: skip
        outs.append(out[0])
        lses.append(lse[0])
    rest = q.shape[0] - rows[-1]
    outs.append(q.new_zeros((rest, q.shape[1], v.shape[2]), dtype=torch.float64))
    lses.append(q.new_full((q.shape[1], rest), -_INF, dtype=torch.float64))
    return AttentionOutput(torch.cat(outs, 0), torch.cat(lses, 1))


def paged_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    kv_starts: Tensor | None = None,
    q_offset: int | Tensor | None = None,
) -> AttentionOutput:
    """Gathers the pages (num_pages, page_size, Hkv, ·) of each request and attends to its first kv_lens[b]
    keys; all that counts keys counts from the first of them. A table entry outside the pool hides its keys.
    q (batch, Hq, D), or (total_q, Hq, D) with cu_seqlens_q; out like q, lse (Hq, total_q)."""
    num_pages, page_size = k_pages.shape[:2]
    rows = list(range(q.shape[0] + 1)) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    outs, lses = [], []
    for b in range(len(rows) - 1):
        live = int(kv_lens[b])
        pages = page_table[b, : -(-live // page_size)].long()  # what lies beyond is never looked at
        mapped = (pages >= 0) & (pages < num_pages)
        one_k, one_v = (_gathered(x, pages, mapped)[None, :live] for x in (k_pages, v_pages))
        slopes = alibi_slopes[b] if alibi_slopes is not None and alibi_slopes.ndim == 2 else alibi_slopes
        out, lse = attention_reference(
            q[None, rows[b] : rows[b + 1]], one_k, one_v, causal=causal, window=window,
            mask=mapped.repeat_interleave(page_size)[:live], alibi_slopes=slopes, softcap=softcap,
            sinks=sinks, scale=scale, layout="bshd",
            kv_starts=None if kv_starts is None else kv_starts[b : b + 1],
            q_offset=q_offset[b : b + 1] if isinstance(q_offset, Tensor) else q_offset,
        )  # fmt: skip
        outs.append(out[0])
        lses.append(lse[0])
    rest = q.shape[0] - rows[-1]
    outs.append(q.new_zeros((rest, q.shape[1], v_pages.shape[3]), dtype=torch.float64))
    lses.append(q.new_full((q.shape[1], rest), -_INF, dtype=torch.float64))
    return AttentionOutput(torch.cat(outs, 0), torch.cat(lses, 1))


def _gathered(pool: Tensor, pages: Tensor, mapped: Tensor) -> Tensor:
    """Concatenates the keys of these pages, (keys, heads, channels); those of unmapped pages may be
    anything."""
    if not pool.shape[0]:
        return pool.new_zeros((len(pages), *pool.shape[1:])).flatten(0, 1)
    return pool[torch.where(mapped, pages, 0)].flatten(0, 1)
