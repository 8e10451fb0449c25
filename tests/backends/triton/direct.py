"""The forward and decode kernels, called as a plan calls them: with a config that no table chose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from polyflash.arguments import Options, normalise
from polyflash.backends.triton import forward
from polyflash.backends.triton.configs import DecodeConfig, ForwardConfig
from polyflash.entry import Form, views_of
from polyflash.reference import attention_reference
from tests import device
from tests.references import paged_reference, varlen_reference

Config = ForwardConfig | DecodeConfig
STAGES = 1 if device.NAME == "cpu" else 2  # no kernel of one stage starts on sm_90
TILE = ForwardConfig(16, 16, 4, STAGES)
SPLITS = DecodeConfig(16, 16, 4, STAGES, 32)


def launch_of(config: Config, cores: int = 3, name: str = "", dtype: str = "float32") -> Any:
    name = name or device.here().name
    target = SimpleNamespace(cores=cores, name=name, kind=name.partition(":")[0])
    spec = SimpleNamespace(dtype=dtype, tf32=False)
    return SimpleNamespace(config=config, prepared=None, target=target, spec=spec)


def operands(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Any, ...]:
    """What a plan hands to a backend for a call of `attention`, `attention_varlen` or `attention_paged`: q,
    k, v as (batch, heads, seqlen, channels), and the arguments."""
    given = Options(**{"return_lse": True, "batch_invariant": False, "dropout_seed": 0, **options})
    packed = given.cu_seqlens_q is not None
    if given.page_table is not None:
        q, k, v, _ = views_of(Form.PAGED_ROWS if packed else Form.PAGED, q, k, v)
    elif packed:
        q, k, v, _ = views_of(Form.PACKED, q, k, v)
    args = normalise(given)
    return q, k, v, args


def call(
    config: Config, q: Tensor, k: Tensor, v: Tensor, *, launch: Any = None, cores: int = 3,
    out: Tensor | None = None, lse: Tensor | None = None, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse as the public functions return them, on the CPU; NaN where nothing was written. `options`
    are theirs; with `out` and `lse` the kernel writes there, whatever their strides."""
    packed, paged = options.get("cu_seqlens_q") is not None, options.get("page_table") is not None
    trip = device.Trip()
    there = trip.there if device.NAME != "cpu" else _as_it_is  # views of one storage stay that
    given = {n: x if n == "dropout_seed" else there(x) for n, x in options.items()}
    q, k, v, args = operands(there(q), there(k), there(v), given)
    result = torch.full((*q.shape[:3], v.shape[3]), torch.nan, dtype=q.dtype, device=q.device)
    rows = torch.full(q.shape[:3], torch.nan, dtype=torch.float32, device=q.device)
    if out is not None:
        result = there(out)
        result = result.transpose(0, 1)[None] if packed else result[:, :, None] if paged else result
    if lse is not None:
        rows = there(lse)
    launch = launch or launch_of(config, cores, dtype=str(q.dtype).removeprefix("torch."))
    forward.run(launch, q, k, v, result, rows, args)
    trip.bring_writes()
    if packed:
        result, rows = result[0].transpose(0, 1), rows[0]
    elif paged:
        result, rows = result[:, :, 0], rows[:, :, 0].T
    return result.cpu(), rows.cpu()


def _as_it_is(x: Any) -> Any:
    return x


def oracle(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The same of the float64 reference."""
    if "page_table" in options:
        return paged_reference(q, k, v, **options)
    return (varlen_reference if "cu_seqlens_q" in options else attention_reference)(q, k, v, **options)


def close(
    got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], label: str = "", bound: float = 3e-6
) -> None:
    """Every element written; out by its L2 norm and by rows, lse by element; 0 and -inf exactly."""
    for x, right, name in zip(got, want, ("out", "lse"), strict=True):
        assert x.shape == right.shape, f"{label} {name}"
        unwritten = (x.isnan() & ~right.isnan()).nonzero()
        assert not len(unwritten), (
            f"{label} {name}: {len(unwritten)} unwritten, first {unwritten[0].tolist()}"
        )
        other = ~(x.isfinite() & right.isfinite() | (x == right) | x.isnan() & right.isnan()).all()
        assert not other, f"{label} {name}: other NaN or infinities"
    (out, lse), (right_out, right_lse) = ((a.double(), b.double()) for a, b in (got, want))
    out, right_out = out.nan_to_num(0, 0, 0), right_out.nan_to_num(0, 0, 0)
    empty = right_lse == -torch.inf
    nothing = (right_out == 0).all(-1)
    assert (out[nothing] == 0).all(), f"{label} out: rows that see nothing are not 0"
    off = (lse - right_lse).masked_fill(empty, 0).abs() / (1 + right_lse.masked_fill(empty, 0).abs())
    assert float(off.max() if off.numel() else 0) <= bound, f"{label} lse: off by {float(off.max()):.1e}"
    error, size = (out - right_out).norm(dim=-1), right_out.norm(dim=-1)
    worst = float((error / (size + size.mean() / 16 + 1e-30)).max()) if error.numel() else 0.0
    assert worst <= 8 * bound, f"{label} out: a row is off by {worst:.1e}"


def hold(config: Config, q: Tensor, k: Tensor, v: Tensor, *, bound: float = 3e-6, **options: Any) -> None:
    """A call against the oracle."""
    own = {n: x for n, x in options.items() if n not in ("max_seqlen_q", "batch_invariant")}
    close(call(config, q, k, v, **options), oracle(q, k, v, own), str(config), bound)
