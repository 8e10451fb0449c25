"""The numbers of a call as kernels read them: two structs, whose text in Metal is printed from the named
tuples that a launch fills. torch passes a list of ints as 64-bit ones and a list of floats as floats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, get_type_hints

from polyflash.backends.gpu.numbers import LOG2E, Flags, numbers_of, scale_of
from polyflash.backends.gpu.views import Ids, Operands, Plane, Rows, Slopes, Table, View, rows_of, view_of
from polyflash.quant.scheme import codes_of

_STRUCTS: tuple[Any, ...] = (View, Rows, Plane, Slopes, Ids, Table)


class Numbers(NamedTuple):
    """Strides and sizes, in elements. What a call does not have stays 0."""

    q: View
    k: View
    v: View
    out: View
    dout: View
    grad: View  # dq or dk
    dv: View
    lse: Rows
    dlse: Rows
    mask: Plane
    bias: Plane
    slopes: Slopes
    q_ids: Ids
    k_ids: Ids
    table: Table
    k_scale: View
    k_shift: View
    v_scale: View
    v_shift: View
    batch: int
    num_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    group: int
    pack: int  # query heads that are rows of one tile
    offset: int
    left: int
    right: int
    split_keys: int
    num_splits: int
    walked_batch: int  # entries and heads that share a tile of a bias
    walked_heads: int
    seed_lo: int  # of dropout
    seed_hi: int
    drop_below: int


_ABSENT = {f: t(*(0,) * len(t._fields)) for f, t in get_type_hints(Numbers).items() if t in _STRUCTS}


class Factors(NamedTuple):
    """Floats of a call."""

    scale: float
    softcap: float
    factor: float  # of scores in the exponent
    unit: float  # m times it is natural
    keep_scale: float  # of what dropout keeps


def struct_text() -> str:
    """Both structs and those of strides, in Metal. A pointer is an argument of its own."""
    lines = []
    for kind in _STRUCTS:
        lines.append(f"struct {kind.__name__} {{ long {', '.join(kind._fields[1:])}; }};")
    for name, kind, plain in (("Numbers", Numbers, "long"), ("Factors", Factors, "float")):
        hints = get_type_hints(kind)
        fields = (f"{hints[f].__name__ if hints[f] in _STRUCTS else plain} {f};" for f in kind._fields)
        lines.append(f"struct {name} {{ {' '.join(fields)} }};")
    return "\n".join(lines)


def words(numbers: Numbers) -> list[int]:
    """The numbers in the order of the struct."""

    def flat() -> Iterator[int]:
        for x in numbers:
            yield from x[1:] if isinstance(x, tuple) else (x,)

    return list(flat())


def channels_of(v: Any, args: Any) -> int:
    """Channels of v, which codes may hold two to an element."""
    codes = codes_of(args.codes)[1] if args.codes else None
    return int(v.shape[3]) * (1 if codes is None else codes.packed)


def numbers_for(
    q: Any, k: Any, v: Any, args: Any, x: Operands, config: Any, tensors: dict[str, Any]
) -> Numbers:
    """The numbers of a call; `tensors` are four- or three-dimensional and go to the fields of their names."""
    n, group = numbers_of(q, k, args), q.shape[1] // k.shape[1]
    strides = {
        name: (view_of(t) if t.ndim == 4 else rows_of(t)) for name, t in tensors.items() if t is not None
    }
    given: dict[str, Any] = {"mask": x.mask, "bias": x.bias, "slopes": x.alibi_slopes, "table": x.page_table}
    given |= {"q_ids": x.q_segments, "k_ids": x.k_segments}
    strides |= {name: t for name, t in given.items() if t is not None}
    return Numbers(
        **{**_ABSENT, **strides, "q": view_of(q), "k": view_of(k), "v": view_of(v)},
        batch=n.batch,
        num_heads=q.shape[1],
        seqlen_q=n.seqlen_q,
        seqlen_k=n.seqlen_k,
        head_dim=q.shape[3],
        head_dim_v=channels_of(v, args),
        group=group,
        pack=group if getattr(config, "pack_gqa", False) else 1,
        offset=n.offset,
        left=n.left,
        right=n.right,
        split_keys=0,
        num_splits=1,
        walked_batch=1,
        walked_heads=1,
        seed_lo=n.seed_lo,
        seed_hi=n.seed_hi,
        drop_below=n.drop_below,
    )


def factors_for(q: Any, k: Any, args: Any, flags: Flags, base2: bool) -> Factors:
    """Scores that nothing changes stay in units of q·k until the exponential."""
    n = numbers_of(q, k, args)
    unit = 1.0 if flags.CHANGED else abs(scale_of(q.shape[3], args))
    return Factors(n.scale, n.softcap or 1.0, unit * (LOG2E if base2 else 1.0), unit, n.keep_scale)
