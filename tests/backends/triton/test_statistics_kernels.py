"""The statistics kernels, called as a plan calls them, in Triton's interpreter or on the GPU under test:
against the torch row, which the float64 oracle holds."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from polyflash import env
from polyflash.backends.torch import forward as torch_forward
from polyflash.backends.torch import statistics as torch_statistics
from polyflash.backends.torch.configs import Config
from polyflash.spec import Arguments
from polyflash.target import Target
from tests import device

if not env.TRITON_INTERPRET.is_set() and device.DEVICE.type == "cpu":
    pytest.skip("needs Triton's interpreter or a GPU", allow_module_level=True)

from polyflash.backends.triton import statistics
from polyflash.backends.triton.configs import StatisticsConfig

CONFIG = StatisticsConfig(16, 32, 4, 1)
BOUND = {torch.float32: 4e-6, torch.bfloat16: 1e-5, torch.float16: 1e-5}  # of sums and scores up to 10


def measured(run: Any, launch: Any, q: Tensor, k: Tensor, lse: Tensor, args: Arguments) -> list[Tensor]:
    """column sums, entropy and largest score; canaries show what was not written."""
    sums = torch.full((*q.shape[:2], k.shape[2]), math.nan, device=q.device)
    entropy, top = (torch.full(lse.shape, math.nan, device=q.device) for _ in range(2))
    run(launch, q, k, lse, (sums, None, None), args)
    run(launch, q, k, lse, (None, entropy, top), args)
    return [x.cpu() for x in (sums, entropy, top)]


def agree(q: Tensor, k: Tensor, args: Arguments) -> list[Tensor]:
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3])
    rows: Any = SimpleNamespace(config=Config(16, 16), rung="")
    torch_forward.run(rows, q, k, k, out, lse, args._replace(need_lse=True))
    want = measured(torch_statistics.run, rows, q, k, lse, args)
    here = Arguments(*(x.to(device.DEVICE) if isinstance(x, Tensor) else x for x in args))
    spec = SimpleNamespace(dtype="float32", tf32=False)
    launch = SimpleNamespace(config=CONFIG, prepared=None, spec=spec, target=Target("cpu:interpreted"))
    got = measured(statistics.run, launch, *(x.to(device.DEVICE) for x in (q, k, lse)), here)
    for name, a, b in zip(("column_sums", "entropy", "max_logit"), got, want, strict=True):
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf()), name
        error = float((a - b)[b.isfinite()].abs().max()) if b.isfinite().any() else 0.0
        assert error <= BOUND[q.dtype], f"{name}: {error:.2e}"
    return got


def qk(
    heads: tuple[int, int] = (4, 2), rows: int = 21, keys: int = 39, dim: int = 16
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(1, heads[0], rows, dim), torch.randn(1, heads[1], keys, dim)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


SINKS = torch.linspace(-1, 2, 4)


@pytest.mark.parametrize(
    "args",
    (
        Arguments(),
        Arguments(causal=True),
        Arguments(window_left=5, window_right=2),
        Arguments(sinks=SINKS, softcap=2.0, causal=True),
        Arguments(mask=torch.arange(21)[:, None] % 3 == torch.arange(39) % 2, sinks=SINKS),
        Arguments(mask=(torch.arange(21) < 9)[:, None].expand(21, 39)),
        Arguments(scale=-0.5, causal=True),
        Arguments(kv_lens=ints(23), kv_starts=ints(3), causal=True),
        Arguments(alibi_slopes=SINKS.abs(), bias=torch.linspace(-2, 2, 39)),
    ),
    ids=range(9),
)
def test_every_feature(args: Arguments):
    agree(*qk(), args)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_sixteen_bits_and_two_blocks_of_channels(dtype: torch.dtype):
    q, k = qk(dim=40)
    agree(q.to(dtype), k.to(dtype), Arguments(causal=True))


def test_what_is_not_finite():
    """A NaN key is the largest score of the rows that see it, and of no other."""
    q, k = qk()
    k[0, 0, 25] = math.nan
    _, _, top = agree(q, k, Arguments(causal=True))
    assert top[0, :2].isnan().sum() == 2 * 14 and not top[0, 2:].isnan().any()


def test_packed_members():
    """What belongs to nobody is 0, and -inf."""
    args = Arguments(
        causal=True, cu_seqlens_q=ints(0, 7, 7, 19), cu_seqlens_k=ints(0, 12, 20, 33), max_seqlen_q=12,
        max_seqlen_k=13, sinks=SINKS,
    )  # fmt: skip
    sums, entropy, top = agree(*qk(), args)
    assert (
        (sums[..., 33:] == 0).all() and (entropy[..., 19:] == 0).all() and (top[..., 19:] == -math.inf).all()
    )
