"""The arguments of the public functions, as users write them, normalised to the primitives of the one op."""

from __future__ import annotations

from numbers import Real
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from polyflash import backends, plan
from polyflash.errors import described, spec_error
from polyflash.mask import FAR_OFFSET, Mask, checked_window, integer, is_strided
from polyflash.operands import TENSORS
from polyflash.spec import Arguments
from polyflash.storages import check_storages

Layout = Literal["bhsd", "bshd"]
Causal = bool | Literal["bottom_right", "top_left"]
WindowSides = tuple[int | None, int | None]


class Options(NamedTuple):
    """The keyword arguments of a call as its user wrote them. Built by name, never by position."""

    causal: Causal = False
    window: WindowSides | None = None
    mask: Tensor | Mask | None = None
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    scale: float | None = None
    kv_lens: Tensor | None = None
    kv_starts: Tensor | None = None
    q_offset: int | Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: int | Tensor | None = None
    return_lse: bool = False
    batch_invariant: bool | None = None
    backend: str | None = None
    config: Any = None
    checked: bool = False
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    page_table: Tensor | None = None


def normalise(options: Options) -> Arguments:
    """The options as the op's primitives; what can be checked without q, k and v is checked here."""
    causal, window, mask = options.causal, options.window, options.mask
    kv_lens, kv_starts, q_offset = options.kv_lens, options.kv_starts, options.q_offset
    q_segments = k_segments = intervals = interval_rows = None
    if mask is not None and not isinstance(mask, Tensor):
        structured = _conjunction(mask, causal, window, kv_lens, kv_starts)
        causal = cast(Causal, structured.alignment or False)
        window = structured.window_sides
        kv_lens, kv_starts = structured.kv_lens, structured.kv_starts
        q_segments, k_segments = structured.q_ids, structured.k_ids
        intervals, interval_rows = structured.bounds, structured.rows
        mask = None
    batch_invariant = False if options.batch_invariant is None else options.batch_invariant
    _check_flag("return_lse", options.return_lse)
    _check_flag("batch_invariant", batch_invariant)
    _check_flag("checked", options.checked)
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
    scored = options.bias, options.alibi_slopes, options.sinks
    tensors: Any = (kv_lens, kv_starts, q_offset, mask, *scored, q_segments, k_segments)
    for x in tensors:  # not `in`: Dynamo of torch 2.11 cannot trace a tensor compared with None
        if x is not None:
            tensors = _checked_tensors(tensors, options.checked)
            break
    left, right = (None, None) if window is None else checked_window(window)
    dropout_p = _number("dropout_p", options.dropout_p)
    scale = None if options.scale is None else _number("scale", options.scale)
    softcap, seed = _number("softcap", options.softcap), _seed(options.dropout_seed) if dropout_p else None
    backend = known_backend(options.backend)
    config = "" if options.config is None else plan.encode_config(options.config)
    values: Any = (causal, scale, options.return_lse, left, right, offset, *tensors)
    values += (softcap, dropout_p, seed, batch_invariant, options.checked, backend, config)
    args = Arguments(*values)
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, page_table = options[-5:]
    if intervals is cu_seqlens_q is cu_seqlens_k is max_seqlen_q is max_seqlen_k is page_table is None:
        return args
    return _with_rare_operands(args, options, intervals, interval_rows)


def _check_flag(name: str, flag: Any) -> None:
    if flag is not True and flag is not False:
        raise spec_error(name, described(flag), "True or False", "A flag is known before any tensor is read.")


def _with_rare_operands(args: Arguments, options: Options, intervals: Any, interval_rows: Any) -> Arguments:
    """Interval lists, packed members and pages, which most calls are spared."""
    rare = {"intervals": intervals, "interval_rows": interval_rows or 0, "page_table": options.page_table}
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        x = getattr(options, name)
        if x is not None and not isinstance(x, Tensor):
            change = "Put a 0 before torch.cumsum(lengths, 0, dtype=torch.int32)."
            raise spec_error(name, type(x).__name__, "int32 tensor (members + 1,)", change)
        rare[name] = x if x is None else int32_of(name, x, options.checked)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        x, change = getattr(options, name), "Give the longest length, or None."
        rare[name] = x if x is None else checked_int(name, x, "an int or None", change)
    return args._replace(**rare)


_TENSORS = tuple(x.name for x in TENSORS[:9])  # kv_lens to k_segments


def _checked_tensors(tensors: tuple[Any, ...], checked: bool) -> list[Any]:
    """Refuses what is no tensor; returns them with lengths and positions as the op takes them."""
    for name, x in zip(_TENSORS, tensors, strict=True):
        if x is not None and not isinstance(x, Tensor):
            raise spec_error(name, type(x).__name__, "a torch.Tensor", "Use torch.tensor().")
    ints = zip(_TENSORS[:3], tensors[:3], strict=True)
    return [*(x if x is None else int32_of(name, x, checked) for name, x in ints), *tensors[3:]]


def int32_of(name: str, x: Tensor, checked: bool) -> Tensor:
    """Lengths, bounds or positions in int64 as the op takes them; other dtypes stay, and are checked later.

    What is too large goes to the end of int32, where no length lies, so that it is found by whoever looks at
    the others. On a CPU, and on a device that is to be checked, it is refused here, in its own words."""
    if x.dtype is not torch.int64 or not is_strided(x):
        return x
    ends, plain = torch.iinfo(torch.int32), type(x) is Tensor and _is_eager()
    if plain:
        check_storages({name: x})
    if plain and (x.device.type == "cpu" or (checked and not x.is_meta)) and x.numel():
        least, most = (int(end) for end in x.aminmax())
        if least < ends.min or most > ends.max:
            change = "It counts keys or rows."
            raise spec_error(name, most if most > ends.max else least, "numbers of 32 bits", change)
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
        raise spec_error("mask", type(mask).__name__, "a bool tensor or a polyflash.Mask", "True = attend.")
    whole = mask & Mask.lengths(kv_lens, kv_starts)
    if causal is not False:
        if causal is not True:
            _offset_of(causal)
        whole = whole & Mask.causal("bottom_right" if causal is True else causal)
    return whole if window is None else whole & Mask.window(*checked_window(window))


def _offset_of(causal: Any) -> int | None:
    if isinstance(causal, str) and causal in ("bottom_right", "top_left"):
        return None if causal == "bottom_right" else 0
    change = "True means 'bottom_right'."
    raise spec_error("causal", described(causal), "False, True, 'bottom_right' or 'top_left'", change)


def checked_int(
    name: str,
    value: Any,
    wanted: str = "an int or an int32 or int64 tensor (batch,)",
    change: str = "Far positions are all alike.",
) -> Any:
    """A 64-bit int, or what stands for one while torch.compile traces."""
    number = integer(value)
    if number is None:
        raise spec_error(name, type(value).__name__, wanted, "Use int().")
    # An int that may change while torch.compile traces is not to become a constant.
    if not (torch.compiler.is_compiling() or -(2**63) <= number < 2**63):
        raise spec_error(name, described(value), "a 64-bit int", change)
    return number


def _number(name: str, value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, (Real, torch.SymFloat)):
        raise spec_error(name, type(value).__name__, "a number", "Use float().")
    try:
        return float(value)
    except OverflowError:
        change = "Numbers are float64 here."
        raise spec_error(name, "an int beyond 1e308", "a finite number", change) from None


def _seed(seed: int | Tensor | None) -> Tensor:
    """An int64 scalar tensor on the CPU; drawn from torch's default generator if not given."""
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device="cpu")
    if isinstance(seed, Tensor):
        if not is_strided(seed) or seed.dtype is not torch.int64 or seed.numel() != 1:
            got = f"{seed.dtype} {tuple(seed.shape)}" if is_strided(seed) else "a tensor without strides"
            raise spec_error("dropout_seed", got, "one int64", "Use torch.tensor(seed).")
        return seed.reshape(())
    wanted = "an int in [-2**63, 2**64) or an int64 scalar tensor"
    if type(seed) is int and 2**63 <= seed < 2**64:
        seed -= 2**64  # the same 64 bits, as torch.initial_seed() counts them
    seed = checked_int("dropout_seed", seed, wanted, "Use its low 64 bits: seed % 2**64.")
    return torch.tensor(seed, dtype=torch.int64, device="cpu")


def known_backend(name: str | None) -> str:
    """The name as the op takes it, which "" gives free choice, or a `SpecError`."""
    if name is None:
        return ""
    if not isinstance(name, str) or name not in backends.BACKENDS:
        wanted = f"one of {', '.join(backends.BACKENDS)}, or None"
        raise spec_error("backend", described(name), wanted, "None takes the best row for the call.")
    return name
