"""Calls that torch SDPA computes whole: dense, or causal from the first key on, without masks or gradients.

torch's CPU kernel makes numbers of some scores that are not finite, and a NaN in V reaches rows that do not
see it. So a row that could see one is computed in tiles, and no other: what a row sees decides its bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from polyflash.errors import spec_error
from polyflash.spec import Arguments

if TYPE_CHECKING:
    from polyflash.plan import Launch

_PLAIN = Arguments()
_DENSE = ("window_left", "window_right", "offset", "softcap", "dropout_p", "batch_invariant")
_LARGE = 1e18  # no score is above the product of two such norms, which float32 holds


def hands_over(launch: Launch, q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> bool:
    """May torch SDPA compute this very call? The plan knew the operands' presence, not their sizes."""
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    dense = all(getattr(args, name) == getattr(_PLAIN, name) for name in _DENSE)
    dense = dense and all(not isinstance(x, Tensor) for x in args) and q.shape[3] == v.shape[3]
    dense = dense and (not args.causal or seqlen_q in (1, seqlen_k))  # torch aligns the other corner
    if not dense or q.dtype is torch.float64 or q.device.type != "cpu":
        if launch.rung == "explicit":
            change = "Set sdpa=False: only dense and causal calls on a CPU are known to equal torch SDPA."
            raise spec_error("config sdpa", got=True, wanted="False for this call", change=change)
        return False
    positive = args.scale is None or args.scale > 0
    return not args.need_lse and positive


def attend(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, args: Arguments, tiled: Callable[[], Tensor]
) -> Tensor:
    """The output (B, Hq, Sq, D), in `out` or elsewhere. `tiled()` computes all rows and returns `out`."""
    q, k, v = (x if _is_laid_out(x) else x.contiguous() for x in (q, k, v))
    causal = args.causal and q.shape[2] > 1
    grow = max(1.0, args.scale or 0.0)
    bad_q = _large(q, grow)
    bad_k = _large(k, 1.0) | ~v.sum(-1, dtype=torch.float32).isfinite()
    if not (bool(bad_q.any()) or bool(bad_k.any())):
        result = _sdpa(q, k, v, args.scale, causal)
        return result if result.stride() == out.stride() else out.copy_(result)
    seen = bad_k.cummax(-1).values if causal else bad_k.any(-1, keepdim=True)
    odd = bad_q | seen.repeat_interleave(q.shape[1] // k.shape[1], 1)
    q, k, v = (x.masked_fill(bad[..., None], 0.0) for x, bad in ((q, bad_q), (k, bad_k), (v, bad_k)))
    even = _sdpa(q, k, v, args.scale, causal)
    return out.copy_(torch.where(odd[..., None], tiled(), even))


def _large(x: Tensor, grow: float) -> Tensor:
    """Rows whose product with another could leave float32's range, or is not finite."""
    return ~(torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32) * grow < _LARGE)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> Tensor:
    """torch repeats the keys of grouped heads. Without an order of rows, heads of a group are rows of one."""
    group = q.shape[1] // k.shape[1]
    if group > 1 and not causal:
        rows = q.unflatten(1, (-1, group)).flatten(2, 3)
        found = F.scaled_dot_product_attention(rows, k, v, scale=scale)
        return found.unflatten(2, (group, -1)).flatten(1, 2)
    return F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=causal, enable_gqa=group > 1)


def _is_laid_out(x: Tensor) -> bool:
    """Are channels beside one another and rows apart? torch takes other kernels for strided channels, and its
    bfloat16 ones are wrong where rows or heads overlap. Expanded batches and heads are fine."""
    batch, head, row, channel = x.stride()
    apart = all(n == 1 or s == 0 or s >= x.shape[3] for n, s in zip(x.shape[:2], (batch, head), strict=True))
    return channel == 1 and apart and (x.shape[2] == 1 or row >= x.shape[3])
