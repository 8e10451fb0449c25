"""Attention on data that stay on a WebGPU device.

`polyflash.attention(..., backend="webgpu")` copies CPU tensors there and back. Here nothing is copied and
nothing waits until a result is read:

    q, k, v = map(GpuTensor.of, (q, k, v))
    with batch():
        for _ in range(100):
            q = attention(q, k, v, causal=True)
    out = q.torch()
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack, overload

import torch
from torch import Tensor

from polyflash import backends, plan, target, torch_ops
from polyflash.arguments import Causal, Options, WindowSides, normalise
from polyflash.backends.webgpu import device, forward
from polyflash.backends.webgpu.device import DeviceError
from polyflash.backends.webgpu.tensor import GpuTensor
from polyflash.errors import described, spec_error
from polyflash.mask import Mask
from polyflash.routes import spec_of, without_gradients
from polyflash.spec import Phase

if TYPE_CHECKING:
    from polyflash.keywords import OnDevice

__all__ = ("DeviceError", "DeviceOutput", "GpuTensor", "attention", "batch")


class DeviceOutput(NamedTuple):
    """Results of a call with return_lse=True: out (batch, num_q_heads, seqlen_q, head_dim_v), in q's dtype,
    and lse (batch, num_q_heads, seqlen_q), float32."""

    out: GpuTensor
    lse: GpuTensor


@overload
def attention(
    q: GpuTensor, k: GpuTensor, v: GpuTensor, *, return_lse: Literal[False] = ..., **options: Unpack[OnDevice]
) -> GpuTensor: ...
@overload
def attention(
    q: GpuTensor, k: GpuTensor, v: GpuTensor, *, return_lse: Literal[True], **options: Unpack[OnDevice]
) -> DeviceOutput: ...
def attention(
    q: GpuTensor,
    k: GpuTensor,
    v: GpuTensor,
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
    return_lse: bool = False,
    config: Any = None,
) -> GpuTensor | DeviceOutput:
    """`polyflash.attention` of q (batch, num_q_heads, seqlen_q, head_dim), k (batch, num_kv_heads, seqlen_k,
    head_dim) and v (batch, num_kv_heads, seqlen_k, head_dim_v) on the device. No gradients.

    Everything else is a CPU tensor, or a number, and means what it means there. Raises SpecError and
    UnsupportedError before anything is launched; what a device refuses later is a DeviceError of the next
    read, with the names of the kernels."""
    options = (causal, window, softcap, scale, q_offset, return_lse, config)
    key = None
    if mask is bias is alibi_slopes is sinks is kv_lens is kv_starts is None and type(q) is GpuTensor:
        key = _key(q, k, v, options)
    prepared = None if key is None else q.block.device.calls.get(key)
    if prepared is None:
        masks: dict[str, Any] = {"causal": causal, "window": window, "mask": mask, "kv_lens": kv_lens}
        scores: dict[str, Any] = {"bias": bias, "alibi_slopes": alibi_slopes, "softcap": softcap}
        scores |= {"sinks": sinks, "scale": scale, "return_lse": return_lse, "config": config}
        prepared = _prepared(q, k, v, Options(**masks, **scores, kv_starts=kv_starts, q_offset=q_offset))
        if key is not None:
            q.block.device.keep(key, prepared)
    out, lse = forward.launch_forward(q, k, v, prepared)
    return DeviceOutput(out, lse) if lse is not None else out


def _key(q: GpuTensor, k: GpuTensor, v: GpuTensor, options: tuple[Any, ...]) -> Any:
    """Key of a call without tensors beside q, k, v; types too, as 1 and True are equal. None if it cannot be
    looked up."""
    if any(isinstance(x, Tensor) for x in options):  # equal to itself, whatever it holds
        return None
    try:
        key = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, options, tuple(map(type, options)))
        hash(key)
    except (AttributeError, TypeError):
        return None
    return key


def _prepared(q: GpuTensor, k: GpuTensor, v: GpuTensor, options: Options) -> forward.Prepared:
    """Checks a call, plans it and binds it."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, GpuTensor):
            change = "Use GpuTensor.of(x), or polyflash.attention(..., backend='webgpu')."
            raise spec_error(name, described(x), "a GpuTensor", change)
    args = normalise(options._replace(backend="webgpu"))
    # without memory: shapes, dtypes and operands are all that is looked at
    like = [torch.empty((1,), dtype=x.dtype, device="cpu").expand(x.shape) for x in (q, k, v)]
    torch_ops.check(like[0], like[1], like[2], args)
    spec = without_gradients(spec_of(like[0], like[1], like[2], args))
    launch = plan.select(spec, target.detect("cpu"), backends.TABLE, backend="webgpu", config=args.config)
    return forward.prepared_of(q, k, v, args, launch.config, launch.row.phase is Phase.DECODE)


def batch() -> AbstractContextManager[None]:
    """A context whose calls are sent to the device together, at its end: less time of the host per call."""
    return device.current().batch()
