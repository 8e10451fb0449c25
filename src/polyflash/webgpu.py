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

from torch import Tensor

from polyflash import backends, plan, target, torch_ops
from polyflash.arguments import Causal, Options, WindowSides, normalise
from polyflash.backends.webgpu import device, forward
from polyflash.backends.webgpu.codes import KV, TABLES, GpuCodes
from polyflash.backends.webgpu.device import DeviceError
from polyflash.backends.webgpu.tensor import GpuTensor
from polyflash.errors import described, spec_error
from polyflash.mask import Mask
from polyflash.quant.scheme import Codes, text_of
from polyflash.routes import spec_of, without_gradients
from polyflash.spec import Arguments, Phase

if TYPE_CHECKING:
    from polyflash.keywords import OnDevice

__all__ = ("DeviceError", "DeviceOutput", "GpuCodes", "GpuTensor", "attention", "batch")


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
    kv_lens: Tensor | None = None,
    kv_starts: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    return_lse: bool = False,
    config: Any = None,
) -> GpuTensor | DeviceOutput:
    """`polyflash.attention` of q (batch, num_q_heads, seqlen_q, head_dim), k (batch, num_kv_heads, seqlen_k,
    head_dim) and v (batch, num_kv_heads, seqlen_k, head_dim_v) on the device, of which k and v may be
    quantised: `GpuCodes`. No gradients.

    Everything else is a CPU tensor, or a number, and means what it means there. Raises SpecError and
    UnsupportedError before anything is launched; what a device refuses later is a DeviceError of the next
    read, with the names of the kernels."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, GpuTensor if name == "q" else (GpuTensor, GpuCodes)):
            change = "Use GpuTensor.of(x), or polyflash.attention(..., backend='webgpu')."
            wanted = "a GpuTensor" if name == "q" else "a GpuTensor or GpuCodes"
            raise spec_error(name, described(x), wanted, change)
    masks: dict[str, Any] = {"causal": causal, "window": window, "mask": mask, "kv_lens": kv_lens}
    scores: dict[str, Any] = {"bias": bias, "alibi_slopes": alibi_slopes, "softcap": softcap, "sinks": sinks}
    masks |= {"kv_starts": kv_starts, "q_offset": q_offset}
    asked = {"scale": scale, "return_lse": return_lse, "backend": "webgpu", "config": config}
    forms = (x.form if isinstance(x, GpuCodes) else None for x in (k, v))
    args = normalise(Options(**masks, **scores, **asked))._replace(codes=_codes(*forms))
    launch = _planned(q, k, v, args)
    few = launch.row.phase is Phase.DECODE
    out, lse = forward.attend(q, k, v, args, launch.config, few)
    return DeviceOutput(out, lse) if lse is not None else out


def _codes(k: Codes | None, v: Codes | None) -> str:
    return "" if k is v is None else text_of(k, v)


def _planned(q: GpuTensor, k: KV, v: KV, args: Arguments) -> plan.Launch:
    """The launch of a call, kept for equal ones that have no tensors beside q, k, v."""
    plain = not any(type(x) is Tensor for x in args)
    kinds = (q.dtype, *("" if isinstance(x, GpuCodes) else x.dtype for x in (k, v)))
    key = (q.shape, k.shape, v.shape, kinds, args) if plain else None
    launch = _planned_calls.get(key)
    if launch is None:
        # without memory: shapes, dtypes and operands are all that is looked at
        (like_q, *_), (like_k, *of_k), (like_v, *of_v) = (x.like() for x in (q, k, v))
        tables = dict(zip(TABLES, (*of_k, *of_v), strict=True)) if args.codes else {}
        known_args = args._replace(**tables)
        torch_ops.check(like_q, like_k, like_v, known_args)
        spec = without_gradients(spec_of(like_q, like_k, like_v, known_args))
        known = target.parse("webgpu")
        launch = plan.select(spec, known, backends.TABLE, backend="webgpu", config=args.config)
        if plain:
            if len(_planned_calls) >= _KEPT_CALLS:
                _planned_calls.clear()
            _planned_calls[key] = launch
    return launch


_KEPT_CALLS = 256
_planned_calls: dict[Any, plan.Launch] = {}


def batch() -> AbstractContextManager[None]:
    """A context whose calls are sent to the device together, at its end: less time of the host per call."""
    return device.current().batch()
