"""The public functions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, Never, Unpack, overload

import torch
from torch import Tensor
from torch.utils import _pytree

from polyflash import repeats, torch_ops
from polyflash.arguments import Causal, Layout, Options, WindowSides, known_backend
from polyflash.entry import Bound, Form, bind, explained, form_of, views_of
from polyflash.errors import spec_error
from polyflash.hints import answering, unexpected
from polyflash.mask import Mask
from polyflash.merging import AttentionOutput
from polyflash.plan import Plan
from polyflash.quant.tensor import KV, QuantizedTensor
from polyflash.routes import backend_in_use
from polyflash.spec import Arguments
from polyflash.target import Target

if TYPE_CHECKING:
    from polyflash.keywords import OfAttention, OfPaged, OfVarlen

# Exported programs that return one can be saved.
_pytree._register_namedtuple(AttentionOutput, serialized_type_name="polyflash.AttentionOutput")


@overload
def attention(
    q: Tensor, k: KV, v: KV, *, return_lse: Literal[False] = ..., **options: Unpack[OfAttention]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: KV, v: KV, *, return_lse: Literal[True], **options: Unpack[OfAttention]
) -> AttentionOutput: ...
@answering
def attention(
    q: Tensor,
    k: KV,
    v: KV,
    *,
    causal: Causal = False,
    window: WindowSides | None = None,
    mask: Tensor | Mask | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    kv_lens: Tensor | None = None,
    kv_starts: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    layout: Layout = "bhsd",
    return_lse: bool = False,
    out: Tensor | None = None,
    batch_invariant: bool | None = None,
    backend: str | None = None,
    config: Any = None,
    checked: bool = False,
    **unknown: Never,
) -> Tensor | AttentionOutput:
    """softmax(softcap(scale·q·kᵀ) + bias + ALiBi, mask)·v, in exactly this order on every backend.

    Args:
        q: (batch, num_q_heads, seqlen_q, head_dim), or (batch, seqlen_q, num_q_heads, head_dim) with
            layout="bshd"; float32, bfloat16, float16 or float64; any strides.
        k: (batch, num_kv_heads, seqlen_k, head_dim), dtype of q, or a `QuantizedTensor` of that shape;
            num_q_heads is a multiple of num_kv_heads, and query head h reads kv head
            h // (num_q_heads / num_kv_heads).
        v: (batch, num_kv_heads, seqlen_k, head_dim_v), likewise.
        causal: True or "bottom_right": key j is visible to row i iff j <= i + (seqlen_k - seqlen_q).
            "top_left": iff j <= i. With `q_offset`: iff j <= i + q_offset.
        window: (left, right) neighbours of a row's position, itself not counted; None is unbounded.
        mask: bool, True = attend, broadcastable to (batch, num_q_heads, seqlen_q, seqlen_k) and never
            expanded; or a `Mask`.
        bias: any float dtype, broadcastable like mask; added to the scaled, soft-capped score; -inf masks.
        alibi_slopes: (num_q_heads,) or (batch, num_q_heads); adds -slope·|i + offset - j|.
        softcap: softcap·tanh(s / softcap) on scaled scores; 0 is off.
        sinks: (num_q_heads,) logits that join the denominator only.
        scale: multiplies q·k; any finite number, default 1/sqrt(head_dim).
        kv_lens: int32 or int64 (batch,): live keys of each request; keys beyond are not read.
        kv_starts: int32 or int64 (batch,): first live key (left padding); hides keys, moves no position.
        q_offset: position of row 0, int, int32 or int64 (batch,); default seqlen_k (live) - seqlen_q, or 0
            for "top_left".
        dropout_p: probability of dropping a weight; Philox4x32-10 by (seed, batch, head, query, key).
        dropout_seed: int or int64 tensor; None draws one from torch's default generator.
        layout: axis order of q, k, v and the result; never guessed from shapes.
        return_lse: also return the natural-log softmax denominator, (batch, num_q_heads, seqlen_q), fp32
            (fp64 for fp64 inputs), -inf for a row that sees no key.
        out: write the result here; inference only.
        batch_invariant: a request's bits depend on neither its neighbours nor chunking.
        backend: run this backend or raise; None takes the best row for the call.
        config: a backend's Config, as in `explain(...).config`; refused by the others.
        checked: also read and check the contents of length tensors that live on a device (synchronises).

    Returns:
        (batch, num_q_heads, seqlen_q, head_dim_v) in `layout`, dtype and dense stride order of q; with
        return_lse=True an `AttentionOutput(out, lse)`. A row that sees no key is exactly 0.

    Raises:
        SpecError: a shape, dtype, ratio, length or option is wrong; names got, wanted and what to change.
        UnsupportedError: no kernel, or not the requested backend, runs this call; lists every reason.

    Source: Dao et al., FlashAttention (2022) and FlashAttention-2 (2023); Milakov and Gimelshein, online
    softmax (2018)."""
    if unknown:
        raise unexpected(attention, unknown)
    given = out
    if not isinstance(layout, str) or layout != "bhsd":
        q, k, v, out = views_of(form_of(layout), q, k, v, out)
    key = results = None
    tensors: tuple[Any, ...] = ()
    plain = (  # each comparison with None by itself is the quickest, and on a GPU the device waits for Python
        window is None and mask is None and bias is None and alibi_slopes is None and sinks is None
        and kv_lens is None and kv_starts is None and q_offset is None and batch_invariant is None
        and config is None and checked is False and type(dropout_p) is float and dropout_p == 0.0
        and type(softcap) is float and type(causal) is type(return_lse) is bool and type(q) is Tensor
    )  # fmt: skip
    if (
        plain
        and out is None
        and (scale is None or type(scale) is float)
        and (backend is None or type(backend) is str)
    ):
        fixed = causal, return_lse, softcap, scale, backend
        repeat = None
        if q.is_cuda:
            repeat = repeats.seen(fixed, q, k, v) if type(k) is Tensor else None
        else:
            found = repeats.at_once(q, k, v, fixed)
            if found is not None:
                return found if layout == "bhsd" else found.transpose(1, 2)
        tensors = q, k, v
        if type(k) is type(v) is QuantizedTensor:
            key, tensors, repeat = repeats.of_codes(q, k, v, fixed)
        elif repeat is None:
            key = repeats.key_of(q, k, v, fixed)
        results = repeats.call(key, *tensors, repeat=repeat)
    if results is None:
        if plain and type(k) is type(v) is Tensor and scale is backend is None and softcap == 0.0:
            bound = Bound(q, k, v, out, Arguments(causal is True, None, return_lse))
        else:
            options = Options(
                causal=causal, window=window, mask=mask, bias=bias, alibi_slopes=alibi_slopes,
                softcap=softcap, sinks=sinks, scale=scale, kv_lens=kv_lens, kv_starts=kv_starts,
                q_offset=q_offset, dropout_p=dropout_p, dropout_seed=dropout_seed, return_lse=return_lse,
                batch_invariant=batch_invariant, backend=backend, config=config, checked=checked,
            )  # fmt: skip
            bound = bind(q, k, v, options, out=out)
        results = repeats.attend(key, bound, *tensors)
    result, lse = results
    if given is not None:
        result = given
    elif layout != "bhsd":
        result = result.transpose(1, 2)
    return AttentionOutput(result, lse) if return_lse else result


@overload
def attention_varlen(
    q: Tensor, k: KV, v: KV, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    return_lse: Literal[False] = ..., **options: Unpack[OfVarlen],
) -> Tensor: ...  # fmt: skip
@overload
def attention_varlen(
    q: Tensor, k: KV, v: KV, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    return_lse: Literal[True], **options: Unpack[OfVarlen],
) -> AttentionOutput: ...  # fmt: skip
@answering
def attention_varlen(
    q: Tensor, k: KV, v: KV, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, causal: Causal = False,
    window: WindowSides | None = None, alibi_slopes: Tensor | None = None, softcap: float = 0.0,
    sinks: Tensor | None = None, scale: float | None = None, kv_lens: Tensor | None = None,
    kv_starts: Tensor | None = None, q_offset: int | Tensor | None = None, dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None, return_lse: bool = False, out: Tensor | None = None,
    batch_invariant: bool | None = None, backend: str | None = None, config: Any = None,
    checked: bool = False, **unknown: Never,
) -> Tensor | AttentionOutput:  # fmt: skip
    """`attention` of each member of a packed batch: no padding, and no member sees another.

    Member b is rows [cu_seqlens_q[b], cu_seqlens_q[b+1]) of q and keys [cu_seqlens_k[b], cu_seqlens_k[b+1])
    of k and v; either may be none. All that `attention` says of a request holds for a member, alignment of
    causal and window, lengths and dropout's counter included. Arguments not listed are those of `attention`.

    Args:
        q: (total_q, num_q_heads, head_dim), any strides.
        k: (total_k, num_kv_heads, head_dim), dtype of q, or a `QuantizedTensor` with layout "thd".
        v: (total_k, num_kv_heads, head_dim_v), likewise.
        cu_seqlens_q: int32 or int64 (members + 1,): 0, then never falling, at most total_q. Rows beyond its
            last bound get out 0 and lse -inf, keys beyond belong to nobody, and gradients of both are 0.
        cu_seqlens_k: int32 or int64 (members + 1,), likewise for k and v.
        max_seqlen_q: at least the longest member's rows; lets a plan on a device know what it may not read.
            None never synchronises.
        max_seqlen_k: likewise for keys.
        alibi_slopes: (num_q_heads,) or (members, num_q_heads).
        kv_lens: int32 or int64 (members,): live keys of each member, counted from its first.
        kv_starts: int32 or int64 (members,): first live key of each member, counted likewise.
        q_offset: position of a member's row 0 among its keys, int, int32 or int64 (members,).

    Returns:
        (total_q, num_q_heads, head_dim_v), dtype and dense stride order of q; with return_lse=True an
        `AttentionOutput(out, lse)` with lse (num_q_heads, total_q), fp32 (fp64 for fp64 inputs).

    Raises:
        SpecError, UnsupportedError: as `attention`. Bounds in tensors on a CPU are always checked, those on
            a device under checked=True."""
    if unknown:
        raise unexpected(attention_varlen, unknown)
    key = None
    plain = window is alibi_slopes is sinks is kv_lens is kv_starts is q_offset is batch_invariant is None
    plain = plain and out is config is None and checked is False and type(causal) is type(return_lse) is bool
    plain = plain and type(softcap) is type(dropout_p) is float and dropout_p == 0.0
    plain = plain and (scale is None or type(scale) is float) and (backend is None or type(backend) is str)
    longest = max_seqlen_q, max_seqlen_k
    if plain and type(q) is Tensor and all(x is None or type(x) is int for x in longest):
        fixed = causal, return_lse, softcap, scale, backend, *longest
        key = repeats.key_of_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, fixed)
        found = repeats.call(key, q, k, v, cu_seqlens_q, cu_seqlens_k)
        if found is not None:
            return AttentionOutput(*found) if return_lse else found[0]
    scores: Any = {"window": window, "alibi_slopes": alibi_slopes, "softcap": softcap, "sinks": sinks}
    places: Any = {"causal": causal, "kv_lens": kv_lens, "kv_starts": kv_starts, "q_offset": q_offset}
    bounds: Any = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q}
    rest: Any = {"scale": scale, "dropout_p": dropout_p, "dropout_seed": dropout_seed, "backend": backend}
    rest |= {"return_lse": return_lse, "batch_invariant": batch_invariant, "config": config}
    options = Options(**scores, **places, **bounds, **rest, max_seqlen_k=max_seqlen_k, checked=checked)
    bound = bind(q, k, v, options, Form.PACKED, out)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise spec_error("cu_seqlens", "None", "two int32 tensors", "attention() takes unpacked batches.")
    return bound.returned(*repeats.attend(key, bound), out)


@overload
def attention_paged(
    q: Tensor, k_pages: KV, v_pages: KV, page_table: Tensor, kv_lens: Tensor, *,
    return_lse: Literal[False] = ..., **options: Unpack[OfPaged],
) -> Tensor: ...  # fmt: skip
@overload
def attention_paged(
    q: Tensor, k_pages: KV, v_pages: KV, page_table: Tensor, kv_lens: Tensor, *,
    return_lse: Literal[True], **options: Unpack[OfPaged],
) -> AttentionOutput: ...  # fmt: skip
@answering
def attention_paged(
    q: Tensor, k_pages: KV, v_pages: KV, page_table: Tensor, kv_lens: Tensor, *,
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
            view of a tensor that holds both pools, or has heads before slots, is read where it is. Or a
            `QuantizedTensor` with layout "bshd".
        v_pages: (num_pages, page_size, num_kv_heads, head_dim_v), likewise.
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
    tensors: tuple[Any, ...] = ()
    plain = cu_seqlens_q is max_seqlen_q is window is alibi_slopes is sinks is kv_starts is q_offset is None
    plain = plain and batch_invariant is out is config is None and type(softcap) is float
    plain = plain and type(causal) is type(return_lse) is type(checked) is bool
    plain = plain and (scale is None or type(scale) is float) and (backend is None or type(backend) is str)
    if plain and type(q) is Tensor and type(k_pages) is type(v_pages) in (Tensor, QuantizedTensor):
        fixed = causal, return_lse, softcap, scale, backend, checked
        result = None if q.is_cuda else repeats.at_once(q, k_pages, v_pages, fixed, page_table, kv_lens)
        if result is not None:
            return result
        if type(k_pages) is QuantizedTensor:
            key, tensors, repeat = repeats.of_codes(q, k_pages, v_pages, fixed, page_table, kv_lens)
        else:
            tensors = q, k_pages, v_pages, page_table, kv_lens
            repeat = repeats.seen(fixed, *tensors) if q.is_cuda else None  # type: ignore[arg-type]
            key = repeats.key_of_paged(*tensors, fixed) if repeat is None else None
        found = repeats.call(key, *tensors, repeat=repeat)
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
    return bound.returned(*repeats.attend(key, bound, *tensors), out)


@answering
def explain(
    q: Tensor, k: KV, v: KV, *, causal: Causal = False, window: WindowSides | None = None,
    mask: Tensor | Mask | None = None, bias: Tensor | None = None, alibi_slopes: Tensor | None = None,
    softcap: float = 0.0, sinks: Tensor | None = None, scale: float | None = None,
    kv_lens: Tensor | None = None, kv_starts: Tensor | None = None, q_offset: int | Tensor | None = None,
    dropout_p: float = 0.0, dropout_seed: int | Tensor | None = None, layout: Layout = "bhsd",
    return_lse: bool = False, batch_invariant: bool | None = None, backend: str | None = None,
    config: Any = None, target: str | Target | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    page_table: Tensor | None = None, **unknown: Never,
) -> Plan:  # fmt: skip
    """The kernel that would run `attention(...)` with these arguments, its config, and why every other row
    would not. With `cu_seqlens_q` and `cu_seqlens_k`, that of `attention_varlen(...)`: q, k, v are then
    (total, heads, head_dim). With `page_table` and `kv_lens`, who would run `attention_paged(...)`: q, k, v
    are then q, k_pages, v_pages.

    Launches nothing and reads no tensor contents: all may be meta tensors. `target` plans for a device
    that need not be here: "cuda:sm90", "cpu:avx512+amx_bf16", or a `Target`. If an input needs a gradient,
    the plan of the backward pass is its `.backward`. The result prints itself."""
    if unknown:
        raise unexpected(explain, unknown)
    seed = 0 if dropout_seed is None else dropout_seed
    given: dict[str, Any] = {"causal": causal, "window": window, "mask": mask, "bias": bias, "scale": scale}
    given |= {"alibi_slopes": alibi_slopes, "softcap": softcap, "sinks": sinks, "return_lse": return_lse}
    given |= {"kv_lens": kv_lens, "kv_starts": kv_starts, "q_offset": q_offset, "page_table": page_table}
    given |= {"dropout_p": dropout_p, "dropout_seed": seed, "backend": backend, "config": config}
    given |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "batch_invariant": batch_invariant}
    options = Options(**given, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    form = form_of(layout)
    if form is Form.BHSD and page_table is not None:
        form = Form.PAGED if cu_seqlens_q is None else Form.PAGED_ROWS
    elif form is Form.BHSD and not (cu_seqlens_q is cu_seqlens_k is None):
        form = Form.PACKED
    return explained(bind(q, k, v, options, form), target)


@contextlib.contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Within this context, calls without `backend=` run on backend `name` or raise; None: free choice again.

    Compiled functions obey it when they are called within it. Inside a compiled function it becomes part of
    the graph and goes before the context of the call. Threads started within it do not inherit it."""
    if torch.compiler.is_compiling():
        before, torch_ops.in_graph.backend = torch_ops.in_graph.backend, known_backend(name)
        try:
            yield
        finally:
            torch_ops.in_graph.backend = before
        return
    token = backend_in_use.set(known_backend(name))
    try:
        yield
    finally:
        backend_in_use.reset(token)
