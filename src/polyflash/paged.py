"""Attention over keys in pages: a cache whose requests take memory by the page."""

from __future__ import annotations

from typing import Any, Literal, Never, overload

from torch import Tensor

from polyflash import repeats
from polyflash.arguments import Causal, Options, WindowSides
from polyflash.entry import Form, bind
from polyflash.hints import answering, unexpected
from polyflash.merging import AttentionOutput


@overload
def attention_paged(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, kv_lens: Tensor, *,
    cu_seqlens_q: Tensor | None = ..., max_seqlen_q: int | None = ..., causal: Causal = ...,
    window: WindowSides | None = ..., alibi_slopes: Tensor | None = ..., softcap: float = ...,
    sinks: Tensor | None = ..., scale: float | None = ..., kv_starts: Tensor | None = ...,
    q_offset: int | Tensor | None = ..., return_lse: Literal[False] = ..., out: Tensor | None = ...,
    batch_invariant: bool | None = ..., backend: str | None = ..., config: Any = ..., checked: bool = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attention_paged(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, kv_lens: Tensor, *,
    cu_seqlens_q: Tensor | None = ..., max_seqlen_q: int | None = ..., causal: Causal = ...,
    window: WindowSides | None = ..., alibi_slopes: Tensor | None = ..., softcap: float = ...,
    sinks: Tensor | None = ..., scale: float | None = ..., kv_starts: Tensor | None = ...,
    q_offset: int | Tensor | None = ..., return_lse: Literal[True], out: Tensor | None = ...,
    batch_invariant: bool | None = ..., backend: str | None = ..., config: Any = ..., checked: bool = ...,
) -> AttentionOutput: ...  # fmt: skip
@answering
def attention_paged(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, kv_lens: Tensor, *,
    cu_seqlens_q: Tensor | None = None, max_seqlen_q: int | None = None, causal: Causal = False,
    window: WindowSides | None = None, alibi_slopes: Tensor | None = None, softcap: float = 0.0,
    sinks: Tensor | None = None, scale: float | None = None, kv_starts: Tensor | None = None,
    q_offset: int | Tensor | None = None, return_lse: bool = False, out: Tensor | None = None,
    batch_invariant: bool | None = None, backend: str | None = None, config: Any = None,
    checked: bool = False, **unknown: Never,
) -> Tensor | AttentionOutput:  # fmt: skip
    """`attention` of each request of a batch to its own keys, which stand in pages of a pool.

    Key j of request b stands in page page_table[b, j // page_size], slot j % page_size; its kv_lens[b] first
    keys are live. Everything relative to keys counts from a request's first one, as with `kv_lens` in
    `attention`: causal aligns the last row with the last live key. Pages may stand in any order, and in
    several places and requests. For inference: no gradients. Under torch.autocast q is cast to the dtype of
    the pools, which are never copied. Arguments not listed are those of `attention`.

    Args:
        q: (batch, num_q_heads, head_dim), one token per request; or with cu_seqlens_q (total_q, num_q_heads,
            head_dim), any number of rows per request. Any strides.
        k_pages: (num_pages, page_size, num_kv_heads, head_dim), dtype of q, page_size >= 1. Any strides: a
            view of a tensor that holds both pools, or has heads before slots, is read where it is.
        v_pages: (num_pages, page_size, num_kv_heads, head_dim_v), dtype of q.
        page_table: int32 (batch, max_pages). Entries of pages without a key that a row sees (beyond the
            live length, before the window) are not looked at.
        kv_lens: int32 or int64 (batch,), live keys of each request, 0 to max_pages·page_size.
        cu_seqlens_q: int32 or int64 (batch + 1,): request b is rows [cu_seqlens_q[b], cu_seqlens_q[b+1]) of
            q, maybe none. Rows beyond the last bound get out 0 and lse -inf.
        max_seqlen_q: at least the longest request's rows; lets a plan on a device know what it may not read.
        kv_starts: int32 or int64 (batch,): first live key of each request; hides keys, moves no position.
        q_offset: position of a request's row 0 among its keys, int, int32 or int64 (batch,).
        checked: also check the contents of tables and lengths that live on a device (synchronises); those on
            a CPU always are. Unchecked, a page outside the pool hides its keys.

    Returns:
        (batch, num_q_heads, head_dim_v) or (total_q, num_q_heads, head_dim_v), dtype and dense stride order
        of q; with return_lse=True an `AttentionOutput(out, lse)` with lse (num_q_heads, batch) or
        (num_q_heads, total_q), fp32 (fp64 for fp64 inputs), as `merge(..., layout="thd")` takes them.

    Raises:
        SpecError: as `attention`; a table or length that points outside, with its request and column.
        UnsupportedError: as `attention`; an input needs a gradient.

    Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention
    (2023)."""
    if unknown:
        raise unexpected(attention_paged, unknown)
    key = None
    if (
        cu_seqlens_q is max_seqlen_q is window is alibi_slopes is sinks is kv_starts is q_offset is None
        and batch_invariant is out is config is None
        and (causal is False or causal is True)
        and (return_lse is False or return_lse is True)
        and (checked is False or checked is True)
        and type(softcap) is float
        and (scale is None or type(scale) is float)
        and (backend is None or type(backend) is str)
        and type(q) is type(k_pages) is type(v_pages) is Tensor
    ):
        fixed = causal, return_lse, softcap, scale, backend, checked
        key = repeats.of_pages(q, k_pages, v_pages, page_table, kv_lens, fixed)
        found = repeats.call(key, q, k_pages, v_pages, page_table, kv_lens)
        if found is not None:
            return AttentionOutput(found[0], found[1].transpose(0, 1)) if return_lse else found[0]
    options = Options(
        causal=causal, window=window, alibi_slopes=alibi_slopes, softcap=softcap, sinks=sinks, scale=scale,
        kv_lens=kv_lens, kv_starts=kv_starts, q_offset=q_offset, return_lse=return_lse,
        batch_invariant=batch_invariant, backend=backend, config=config, checked=checked,
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, page_table=page_table,
    )  # fmt: skip
    form = Form.PAGED if cu_seqlens_q is None else Form.PAGED_ROWS
    bound = bind(q, k_pages, v_pages, options, form, out)
    return bound.returned(*repeats.attend(key, bound, kv_lens), out)
