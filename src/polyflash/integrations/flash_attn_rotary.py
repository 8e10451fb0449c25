"""flash-attn's rotary embedding, `flash_attn.layers.rotary.apply_rotary_emb`, and the rotation of caches."""

from __future__ import annotations

import torch
from torch import Tensor

from polyflash import validate
from polyflash.errors import described, spec_error
from polyflash.integrations.flash_attn_arguments import facade, flag, per_request, scalar
from polyflash.kvcache.handles import is_ints
from polyflash.kvcache.rope import Rope
from polyflash.spec import Arguments


@facade({"cu_seqlens_q": "cu_seqlens", "max_seqlen_q": "max_seqlen"})
def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Turns the first rotary_dim channels of x by the position of each token. Gradients reach x.

    Args:
        x: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with cu_seqlens.
        cos: (positions, rotary_dim / 2), of any float dtype.
        sin: likewise.
        interleaved: pairs of channels are neighbours; otherwise they stand rotary_dim / 2 apart.
        inplace: write the result to x, and return x.
        seqlen_offsets: the position of each request's first token, int, int32 or int64 (batch,).
        cu_seqlens: int32 or int64 (batch + 1,): request b is tokens [cu_seqlens[b], cu_seqlens[b+1]). Those
            beyond stay as they are.
        max_seqlen: at least the longest request's tokens; not needed here.

    Raises:
        SpecError: shapes, dtypes or devices do not fit, or (looked at on a CPU only) bounds or a position
            beyond the tables. On a device a token beyond the tables stays as it is, as in flash-attn."""
    ndim = 4 if cu_seqlens is None else 3
    if not isinstance(x, Tensor) or x.ndim != ndim:
        wanted = "(batch, seqlen, heads, head_dim), or (total, heads, head_dim) with cu_seqlens"
        raise spec_error("x", described(x), wanted, "Use flatten() or unflatten().")
    live = None
    if cu_seqlens is None:
        offsets = per_request("seqlen_offsets", seqlen_offsets, x.shape[0], x.device)
        at = offsets[:, None] + torch.arange(x.shape[1], device=x.device)
    else:
        if not is_ints(cu_seqlens) or cu_seqlens.ndim != 1 or not len(cu_seqlens):
            change = "Put a 0 before torch.cumsum(lengths, 0)."
            raise spec_error("cu_seqlens", described(cu_seqlens), "int32 (batch + 1,)", change)
        bounds = cu_seqlens.long()
        if bounds.device.type == "cpu":
            longest = scalar("max_seqlen", max_seqlen)
            validate.check_contents(Arguments(cu_seqlens_q=bounds, max_seqlen_q=longest), x.shape[0], x)
        tokens = torch.arange(x.shape[0], device=x.device)
        request = torch.searchsorted(bounds[1:], tokens, right=True)
        live = request < len(bounds) - 1
        starts = per_request("seqlen_offsets", seqlen_offsets, len(bounds) - 1, x.device) - bounds[:-1]
        at = tokens + torch.cat((starts, -bounds[-1:]))[request]  # tokens of no request are near 0
    turned = rotated(x, at, cos, sin, flag("interleaved", interleaved), live=live)
    return x.copy_(turned) if flag("inplace", inplace) else turned


def rotated(
    x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, live: Tensor | None = None
) -> Tensor:
    """Turns x (..., heads, head_dim) by `positions`, int64 (...). Channels beyond rotary_dim stay, and tokens
    that are not `live`. Pairs are neighbours if `interleaved`, else half of rotary_dim apart."""
    rope = Rope(interleaved=interleaved, cos=cos, sin=sin)
    rows = cos.shape[0]
    if 2 * cos.shape[1] > x.shape[-1]:
        wanted = f"(positions, rotary_dim / 2), rotary_dim <= head_dim {x.shape[-1]}"
        raise spec_error("cos", tuple(cos.shape), wanted, "Rotate fewer channels.")
    if positions.device.type == "cpu":
        asked = positions if live is None else positions[live]
        low, high = (int(asked.min()), int(asked.max())) if asked.numel() else (0, -1)
        if low < 0 or high >= rows:
            change = "Positions count from 0." if low < 0 else "Make the tables longer."
            raise spec_error("cos", f"{rows} rows", f"one for each position, {low} to {high}", change)
    elif rows:
        inside = (positions >= 0) & (positions < rows)
        live = inside if live is None else live & inside
    if not x.numel() or not rows:
        return x.clone()
    if live is not None:
        positions = torch.where(live, positions, 0)
    turned = rope.rotate(x.flatten(0, -3), positions.flatten()).view(x.shape)
    return turned if live is None else torch.where(live[..., None, None], turned, x)
