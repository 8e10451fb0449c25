"""The arguments of the public functions, as users write them, normalised to the primitives of the one op."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any, Literal, cast

import torch
from torch import Tensor

from polyflash import backends, plan, validate
from polyflash.errors import described, spec_error
from polyflash.mask import FAR_OFFSET, Mask, checked_window, is_strided
from polyflash.spec import Arguments

Layout = Literal["bhsd", "bshd"]
Causal = bool | Literal["bottom_right", "top_left"]
WindowSides = tuple[int | None, int | None]


def normalise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: Causal,
    window: WindowSides | None,
    mask: Tensor | Mask | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    softcap: float,
    sinks: Tensor | None,
    scale: float | None,
    kv_lens: Tensor | None,
    kv_starts: Tensor | None,
    q_offset: int | Tensor | None,
    dropout_p: float,
    dropout_seed: int | Tensor | None,
    return_lse: bool,
    batch_invariant: bool | None,
    backend: str | None,
    config: Any,
    checked: bool,
    cu_seqlens: tuple[Any, Any, Any, Any] | None = None,
    page_table: Any = None,
) -> Arguments:
    """The user's arguments as the op's primitives; what needs no tensor is checked here. `cu_seqlens` are
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k of a packed call; beside a `page_table` k and v
    are pools."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        raise validate.explain_shapes(q, k, v)
    q_segments = k_segments = intervals = interval_rows = None
    if mask is not None and not isinstance(mask, Tensor):
        structured = _conjunction(mask, causal, window, kv_lens, kv_starts)
        causal = cast(Causal, structured.alignment or False)
        window = structured.window_sides
        kv_lens, kv_starts = structured.kv_lens, structured.kv_starts
        q_segments, k_segments = structured.q_ids, structured.k_ids
        intervals, interval_rows = structured.bounds, structured.rows
        mask = None
    if batch_invariant is None:
        batch_invariant = False
    for name, flag in (
        ("return_lse", return_lse),
        ("batch_invariant", batch_invariant),
        ("checked", checked),
    ):
        if flag is not True and flag is not False:
            change = "A flag is known before any tensor is read."
            raise spec_error(name, got=described(flag), wanted="True or False", change=change)
    offset = None
    if causal is not False and causal is not True:
        offset = _offset_of(causal)
        causal = True
    if q_offset is not None:
        if isinstance(q_offset, Tensor):
            offset = None
        else:
            offset, q_offset = checked_int("q_offset", q_offset), None
            offset = max(-FAR_OFFSET, min(offset, FAR_OFFSET))
    operands = (kv_lens, kv_starts, q_offset, mask, bias, alibi_slopes, sinks, q_segments, k_segments)
    for x in operands:  # not count(None): Dynamo of torch 2.11 cannot trace a tensor compared with None
        if x is not None:
            kv_lens, kv_starts, q_offset = _checked_tensors(operands, checked)
            break
    left, right = (None, None) if window is None else checked_window(window)
    dropout_p = _number("dropout_p", dropout_p)
    dropout_seed = _seed(dropout_seed) if dropout_p else None
    backend = known_backend(backend)
    if config is not None:
        config = plan.encode_config(config)
    rarest: tuple[Any, ...] = ()
    if intervals is not None or cu_seqlens is not None or page_table is not None:
        packing = _packing(cu_seqlens or (None,) * 4, checked)
        rarest = (intervals, interval_rows or 0, *packing, page_table)
    return Arguments(
        causal, scale if scale is None else _number("scale", scale), return_lse, left, right, offset, kv_lens,
        kv_starts, cast("Tensor | None", q_offset), mask, bias, alibi_slopes, sinks, q_segments, k_segments,
        _number("softcap", softcap), dropout_p, dropout_seed, batch_invariant, checked,
        backend, config or "", *rarest,
    )  # fmt: skip


def _packing(packed: tuple[Any, Any, Any, Any], checked: bool) -> tuple[Any, ...]:
    (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), bounds = packed, []
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if x is not None and not isinstance(x, Tensor):
            change = "Put a 0 before torch.cumsum(lengths, 0, dtype=torch.int32)."
            raise spec_error(name, got=type(x).__name__, wanted="int32 tensor (members + 1,)", change=change)
        bounds.append(x if x is None else int32_of(name, x, checked))
    longest = [
        x if x is None else checked_int(name, x, "an int or None", change="Give the longest length, or None.")
        for name, x in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k))
    ]
    return *bounds, *longest


_OPERANDS = (
    *("kv_lens", "kv_starts", "q_offset", "mask", "bias", "alibi_slopes", "sinks"),
    *("q_segments", "k_segments"),
)


def _checked_tensors(operands: tuple[Any, ...], checked: bool) -> list[Any]:
    """Refuses what is no tensor; returns kv_lens, kv_starts and q_offset as the op takes them."""
    for name, x in zip(_OPERANDS, operands, strict=True):
        if x is not None and not isinstance(x, Tensor):
            raise spec_error(
                name, got=type(x).__name__, wanted="a torch.Tensor", change="Use torch.tensor()."
            )
    ints = list(zip(_OPERANDS, operands, strict=True))[:3]
    return [x if x is None else int32_of(name, x, checked) for name, x in ints]


def int32_of(name: str, x: Tensor, checked: bool) -> Tensor:
    """Lengths, bounds or positions in int64 as the op takes them; other dtypes stay, and are checked later.

    What is too large goes to the end of int32, where no length lies, so that it is found by whoever looks at
    the others. On a CPU, and on a device that is to be checked, it is refused here, in its own words."""
    if x.dtype is not torch.int64 or not is_strided(x):
        return x
    ends = torch.iinfo(torch.int32)
    if (
        type(x) is Tensor
        and (x.device.type == "cpu" or (checked and not x.is_meta))
        and _is_eager()
        and x.numel()
    ):
        least, most = (int(end) for end in x.aminmax())
        if least < ends.min or most > ends.max:
            got, change = most if most > ends.max else least, "It counts keys or rows."
            raise spec_error(name, got=got, wanted="numbers of 32 bits", change=change)
    return x.clamp(ends.min, ends.max).to(torch.int32)


def _is_eager() -> bool:
    """May a tensor be read: is nothing traced, transformed or observed by a mode?"""
    return not torch.compiler.is_compiling() and (
        torch._C._functorch.peek_interpreter_stack() is None
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._get_tracing_state() is None
    )


def _conjunction(
    mask: Any, causal: Causal, window: Any, kv_lens: Tensor | None, kv_starts: Tensor | None
) -> Mask:
    """A `Mask` argument and the keyword arguments that say the same things, as one `Mask`."""
    if not isinstance(mask, Mask):
        change = "True = attend."
        raise spec_error(
            "mask", got=type(mask).__name__, wanted="a bool tensor or a polyflash.Mask", change=change
        )
    whole = mask & Mask.lengths(kv_lens, kv_starts)
    if causal is not False:
        if causal is not True:
            _offset_of(causal)
        whole = whole & Mask.causal("bottom_right" if causal is True else causal)
    return whole if window is None else whole & Mask.window(*checked_window(window))


def _offset_of(causal: Any) -> int | None:
    if isinstance(causal, str) and causal in ("bottom_right", "top_left"):
        return None if causal == "bottom_right" else 0
    wanted = "False, True, 'bottom_right' or 'top_left'"
    raise spec_error("causal", got=described(causal), wanted=wanted, change="True means 'bottom_right'.")


def checked_int(
    name: str,
    value: Any,
    wanted: str = "an int or an int32 or int64 tensor (batch,)",
    change: str = "Far positions are all alike.",
) -> Any:
    """A 64-bit int, or what stands for one while torch.compile traces."""
    if isinstance(value, (int, torch.SymInt)) and torch.compiler.is_compiling():
        return value  # an int that may change is not to become a constant
    if isinstance(value, (bool, Tensor)) or not hasattr(value, "__index__"):
        raise spec_error(name, got=type(value).__name__, wanted=wanted, change="Use int().")
    value = operator.index(value)
    if not -(2**63) <= value < 2**63:
        raise spec_error(name, got=described(value), wanted="a 64-bit int", change=change)
    return value


def _number(name: str, value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, (Real, torch.SymFloat)):
        raise spec_error(name, got=type(value).__name__, wanted="a number", change="Use float().")
    try:
        return float(value)
    except OverflowError:
        change = "Numbers are float64 here."
        raise spec_error(name, got="an int beyond 1e308", wanted="a finite number", change=change) from None


def _seed(seed: int | Tensor | None) -> Tensor:
    """An int64 scalar tensor on the CPU; drawn from torch's default generator if not given."""
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device="cpu")
    if isinstance(seed, Tensor):
        if not is_strided(seed) or seed.dtype is not torch.int64 or seed.numel() != 1:
            got = f"{seed.dtype} {tuple(seed.shape)}" if is_strided(seed) else "a tensor without strides"
            raise spec_error("dropout_seed", got=got, wanted="one int64", change="Use torch.tensor(seed).")
        return seed.reshape(())
    wanted = "an int in [-2**63, 2**64) or an int64 scalar tensor"
    if type(seed) is int and 2**63 <= seed < 2**64:
        seed -= 2**64  # the same 64 bits, as torch.initial_seed() counts them
    seed = checked_int("dropout_seed", seed, wanted, "Use its low 64 bits: seed % 2**64.")
    return torch.tensor(seed, dtype=torch.int64, device="cpu")


def known_backend(name: str | None) -> str:
    """The name as the op takes it ("" is free choice), or a `SpecError`."""
    if name is None:
        return ""
    if not isinstance(name, str) or name not in ("", *backends.BACKENDS):
        wanted = f"one of {', '.join(backends.BACKENDS)}, or None"
        change = "None takes the best row for the call."
        raise spec_error("backend", got=described(name), wanted=wanted, change=change)
    return name
