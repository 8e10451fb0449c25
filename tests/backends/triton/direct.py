"""The forward and decode kernels, called as a plan calls them: with a config that no table chose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from polyflash.arguments import normalise
from polyflash.backends.triton import decode, forward
from polyflash.backends.triton.configs import DecodeConfig, ForwardConfig
from polyflash.entry import packed_views, paged_views
from polyflash.spec import Arguments
from tests import device

Config = ForwardConfig | DecodeConfig
TILE = ForwardConfig(16, 16, 4, 1)
SPLITS = DecodeConfig(16, 16, 4, 1, 32)
_NAMES = (
    *("causal", "window", "mask", "bias", "alibi_slopes", "softcap", "sinks", "scale", "kv_lens"),
    *("kv_starts", "q_offset", "dropout_p", "dropout_seed"),
)
_DEFAULTS = {"causal": False, "softcap": 0.0, "dropout_p": 0.0, "dropout_seed": 0}


def launch_of(config: Config, cores: int = 3, name: str = "") -> Any:
    target = SimpleNamespace(cores=cores, name=name or device.here().name)
    return SimpleNamespace(config=config, prepared=None, target=target)


def there(x: Any) -> Any:
    """Operands on the device under test; a seed stays."""
    return x.to(device.DEVICE) if isinstance(x, Tensor) and x.dtype is not torch.int64 else x


def operands(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Any, ...]:
    """What a plan hands to a backend for a call of `attention`, `attention_varlen` or `attention_paged`, on
    the device under test: q, k, v as (batch, heads, seqlen, channels), and the arguments."""
    options = {"return_lse": True, "batch_invariant": False, **options}
    packing = tuple(options.get(f"{n}_{side}") for n in ("cu_seqlens", "max_seqlen") for side in "qk")
    table = options.get("page_table")
    if table is not None:
        q, k, v = paged_views(q, k, v, packing[0] is not None)[:3]
    elif packing[0] is not None:
        q, k, v = packed_views(q, k, v, None)[:3]
    chosen = (options.get(name, _DEFAULTS.get(name)) for name in _NAMES)
    args = normalise(
        q, k, v, *chosen, options["return_lse"], options["batch_invariant"], None, None, False, packing, table
    )
    q, k, v = map(there, (q, k, v))
    return q, k, v, Arguments(*map(there, args))


def empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse, NaN until something is written."""
    out = torch.full((*q.shape[:3], v.shape[3]), torch.nan, dtype=q.dtype, device=q.device)
    return out, torch.full(q.shape[:3], torch.nan, dtype=torch.float32, device=q.device)


def call(
    config: Config, q: Tensor, k: Tensor, v: Tensor, *, launch: Any = None, cores: int = 3, **options: Any
) -> tuple[Tensor, Tensor]:
    """out (batch, heads, seqlen_q, head_dim_v) and lse (batch, heads, seqlen_q), packed or not, on the CPU.
    `options` are those of the public functions."""
    q, k, v, args = operands(q, k, v, options)
    out, lse = empty_results(q, v)
    phase = decode if isinstance(config, DecodeConfig) else forward
    phase.run(launch or launch_of(config, cores), q, k, v, out, lse, args)
    return out.cpu(), lse.cpu()
