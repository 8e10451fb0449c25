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

from polyflash import backends, plan, target, torch_ops, validate
from polyflash.arguments import Causal, Options, WindowSides, normalise
from polyflash.backends.webgpu import device, forward
from polyflash.backends.webgpu.codes import KV, GpuCodes
from polyflash.backends.webgpu.device import DeviceError
from polyflash.backends.webgpu.tensor import GpuTensor
from polyflash.errors import described, spec_error
from polyflash.mask import Mask
from polyflash.quant.scheme import text_of
from polyflash.routes import spec_of, without_gradients
from polyflash.spec import CODE_TABLES, Phase

if TYPE_CHECKING:
    from polyflash.keywords import OnDevice

__all__ = ("DeviceError", "DeviceOutput", "GpuCodes", "GpuTensor", "attention", "batch")


MOST_HELD = 1 << 16  # bytes of a tensor beside q, k, v by whose values a call is known again


class DeviceOutput(NamedTuple):
    """Results of a call with return_lse=True: out (batch, num_q_heads, seqlen_q, head_dim_v), in q's dtype,
    and lse (batch, num_q_heads, seqlen_q), float32."""

    out: GpuTensor
    lse: GpuTensor


@overload
def attention(
    q: GpuTensor, k: KV, v: KV, *, return_lse: Literal[False] = ..., **options: Unpack[OnDevice]
) -> GpuTensor: ...
@overload
def attention(
    q: GpuTensor, k: KV, v: KV, *, return_lse: Literal[True], **options: Unpack[OnDevice]
) -> DeviceOutput: ...
def attention(
    q: GpuTensor,
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
    page_table: Tensor | None = None,
    kv_lens: Tensor | None = None,
    kv_starts: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    return_lse: bool = False,
    config: Any = None,
) -> GpuTensor | DeviceOutput:
    """`polyflash.attention` of q (batch, num_q_heads, seqlen_q, head_dim), k (batch, num_kv_heads, seqlen_k,
    head_dim) and v (batch, num_kv_heads, seqlen_k, head_dim_v) on the device, of which k and v may be
    quantised: `GpuCodes`. No gradients. With `page_table` and `kv_lens`, as in `polyflash.attention_paged`, k
    and v are pools (num_pages, num_kv_heads, page_size, ·), and every request has seqlen_q rows.

    Everything else is a CPU tensor, or a number, and means what it means there. Raises SpecError and
    UnsupportedError before anything is launched; what a device refuses later is a DeviceError of the next
    read, with the names of the kernels."""
    key = None
    if mask is bias is None and type(q) is GpuTensor:
        places = page_table, kv_lens, kv_starts, q_offset
        scores = causal, window, softcap, scale, alibi_slopes, sinks
        key = _key(q, k, v, (*places, *scores, return_lse, config))
    prepared = None if key is None else q.block.device.calls.get(key)
    if prepared is None:
        masks: dict[str, Any] = {"causal": causal, "window": window, "mask": mask, "kv_lens": kv_lens}
        given: dict[str, Any] = {"bias": bias, "alibi_slopes": alibi_slopes, "softcap": softcap}
        given |= {"sinks": sinks, "scale": scale, "return_lse": return_lse, "config": config}
        masks |= {"page_table": page_table, "kv_starts": kv_starts, "q_offset": q_offset}
        prepared = _prepared(q, k, v, Options(**masks, **given))
        if key is not None:
            q.block.device.keep(key, prepared)
    out, lse = forward.launch_forward(q, k, v, prepared)
    return DeviceOutput(out, lse) if lse is not None else out


def _key(q: GpuTensor, k: KV, v: KV, options: tuple[Any, ...]) -> Any:
    """Key of a call, with small tensors by what they hold; types too, as 1 and True are equal. None if it
    cannot be looked up."""
    try:
        kinds = q.dtype, *(x.form if isinstance(x, GpuCodes) else x.dtype for x in (k, v))
        known = tuple(_held(x) if isinstance(x, Tensor) else x for x in options)
        key = (q.shape, k.shape, v.shape, kinds, known, tuple(map(type, options)))
        hash(key)
    except (AttributeError, TypeError):
        return None
    return key


def _held(x: Tensor) -> tuple[Any, ...]:
    """Dtype, shape and values; TypeError if those are many, or not to be read."""
    if x.device.type != "cpu" or x.requires_grad or x.nbytes > MOST_HELD:
        raise TypeError
    return x.dtype, x.shape, x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _prepared(q: GpuTensor, k: KV, v: KV, options: Options) -> forward.Prepared:
    """Checks a call, plans it and binds it."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, GpuTensor if name == "q" else (GpuTensor, GpuCodes)):
            change = "Use GpuTensor.of(x), or polyflash.attention(..., backend='webgpu')."
            wanted = "a GpuTensor" if name == "q" else "a GpuTensor or GpuCodes"
            raise spec_error(name, described(x), wanted, change)
    k_form, v_form = (x.form if isinstance(x, GpuCodes) else None for x in (k, v))
    args = normalise(options._replace(backend="webgpu"))
    if k_form is not None or v_form is not None:
        args = args._replace(codes=text_of(k_form, v_form))
    # without memory: shapes, dtypes and operands are all that is looked at
    (like_q, *_), (like_k, *of_k), (like_v, *of_v) = (x.like() for x in (q, k, v))
    told = args._replace(**dict(zip(CODE_TABLES, (*of_k, *of_v), strict=True))) if args.codes else args
    torch_ops.check(like_q, like_k, like_v, told)
    args = validate.checked_contents(args, like_q, like_k)
    spec = without_gradients(spec_of(like_q, like_k, like_v, told))
    launch = plan.select(spec, target.detect("cpu"), backends.TABLE, backend="webgpu", config=args.config)
    return forward.prepared_of(q, k, v, args, launch.config, launch.row.phase is Phase.DECODE)


def batch() -> AbstractContextManager[None]:
    """A context whose calls are sent to the device together, at its end: less time of the host per call."""
    return device.current().batch()
