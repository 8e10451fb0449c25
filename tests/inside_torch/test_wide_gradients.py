"""`wide_gradients`: gradients as the sums they are, for callers that add up those of several calls."""

from __future__ import annotations

import pytest
import torch

from polyflash.spec import Arguments

_forward = torch.ops.polyflash.attention.default
_backward = torch.ops.polyflash.attention_backward.default


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_narrow_gradients_are_wide_ones_rounded(backend: str, packed: bool):
    q, k, v, dout = (torch.randn(1, h, 37, 16).bfloat16() for h in (4, 2, 2, 4))
    bounds = torch.tensor([0, 20, 37]).int() if packed else None
    args = Arguments(causal=True, need_lse=True, backend=backend, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    out, lse = _forward(q, k, v, *args)
    both = [
        _backward(
            dout, None, q, k, v, out, lse, [True] * 3 + [False] * 2, *args._replace(wide_gradients=wide)
        )
        for wide in (False, True)
    ]
    for narrow, wide in zip(both[0][:3], both[1][:3], strict=True):
        assert narrow.dtype is torch.bfloat16 and wide.dtype is torch.float32
        assert torch.equal(narrow, wide.bfloat16()) and not torch.equal(narrow.float(), wide)
