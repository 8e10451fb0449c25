"""The operands of a call beyond q, k and v: one entry each, in the order of the op's schema, rare ones last.

An entry says what an operand is. The op's schema, the features of a call, the checks, what may stand beside
packed members and pages, vmap, gradients and the backends' lists of operands are read off this table;
`spec.Arguments` writes the same names out for readers and type checkers, and a test holds it to the table."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from polyflash.spec import Arguments, Feature

BATCH, HEADS, ROWS, KEYS = "batch", "num_q_heads", "seqlen_q", "seqlen_k"
SCORES = (BATCH, HEADS, ROWS, KEYS)

# How vmap treats an operand. "batch": the entries of all samples become one batch; the batch dimension of one
# sample may be 1 or missing. "loop if mapped": samples run one by one if the operand is mapped. "loop": if it
# is given at all.
Axes = tuple[str | int, ...]
Vmap = Literal["", "batch", "loop if mapped", "loop"]


class Operand(NamedTuple):
    """One operand. `axes` name the sizes of a tensor's dimensions; of a packed or paged call "batch" is its
    members or requests."""

    name: str
    kind: str  # in the op's schema
    default: Any = None
    feature: Feature | None = None  # what a call that has it needs of a kernel
    axes: Axes = ()
    dtype: str = ""  # "float" is any float dtype
    beside_packed: bool = True
    beside_pages: bool = True
    differentiable: bool = False
    contents: bool = False  # do its values say which memory is read?
    vmap: Vmap = ""
    words: tuple[str, ...] = ()  # of the argument block of CPU kernels

    @property
    def is_tensor(self) -> bool:
        return self.kind == "Tensor?"

    @property
    def schema(self) -> str:
        default = '""' if self.default == "" else self.default
        return f"{self.kind} {self.name}={default}"

    def given(self, x: Any) -> bool:
        """Does a call have this operand, whose argument is `x`?"""
        return x is not None if self.default is None else bool(x != self.default)


def _tensor(
    name: str, feature: Feature, axes: Axes, dtype: str, words: str, dense: bool = False, **more: Any
) -> Operand:
    """A tensor that kernels read. `words` are its name in the argument block, and what follows that name in
    others; the shape of a `dense` one belongs to a padded batch."""
    first, *strides = words.split()
    beside = {"beside_packed": not dense, "beside_pages": not dense}
    block = (first, *(f"{first}_{stride}" for stride in strides), *more.pop("more_words", ()))
    shape: dict[str, Any] = {"axes": axes, "dtype": dtype, "vmap": "batch", "words": block}
    return Operand(name, "Tensor?", None, feature, **(shape | beside | more))


_F, _LISTS = Feature, (BATCH, HEADS, "row_blocks", "intervals", 2)
_COUNTS: dict[str, Any] = {"contents": True, "more_words": ("INTERVAL_COUNT", "INTERVAL_ROWS")}
_TABLE = ("batch or pages", "num_kv_heads", "token blocks", "channel blocks")
_BOUNDS: dict[str, Any] = {"vmap": "loop", "contents": True}
OPERANDS = (
    Operand("causal", "bool", False, Feature.CAUSAL),
    Operand("scale", "float?"),
    Operand("need_lse", "bool", False, Feature.LSE),
    Operand("window_left", "SymInt?", feature=Feature.WINDOW),
    Operand("window_right", "SymInt?", feature=Feature.WINDOW),
    Operand("offset", "SymInt?", feature=Feature.Q_OFFSET),
    _tensor("kv_lens", _F.KV_LENS, (BATCH,), "int32", "KV_LENS STRIDE", contents=True),
    _tensor("kv_starts", _F.KV_STARTS, (BATCH,), "int32", "KV_STARTS STRIDE", contents=True),
    _tensor("q_offset", _F.Q_OFFSET, (BATCH,), "int32", "Q_OFFSET STRIDE"),
    _tensor("mask", _F.MASK, SCORES, "bool", "MASK BATCH HEAD ROW KEY", dense=True),
    _tensor("bias", _F.BIAS, SCORES, "float", "BIAS BATCH HEAD ROW KEY KIND", True, differentiable=True),
    _tensor("alibi_slopes", _F.ALIBI, (BATCH, HEADS), "float", "SLOPES BATCH HEAD"),
    _tensor("sinks", _F.SINKS, (HEADS,), "float", "SINKS", vmap="loop if mapped", differentiable=True),
    _tensor("q_segments", _F.SEGMENTS, (BATCH, ROWS), "int32", "Q_IDS BATCH ROW", dense=True),
    _tensor("k_segments", _F.SEGMENTS, (BATCH, KEYS), "int32", "K_IDS BATCH KEY", dense=True),
    Operand("softcap", "float", 0.0, Feature.SOFTCAP),
    Operand("dropout_p", "float", 0.0, Feature.DROPOUT, beside_pages=False, vmap="loop"),
    Operand("dropout_seed", "Tensor?", dtype="int64"),
    Operand("batch_invariant", "bool", False, Feature.BATCH_INVARIANT),
    Operand("checked", "bool", False),
    Operand("backend", "str", ""),
    Operand("config", "str", ""),
    _tensor("intervals", _F.INTERVALS, _LISTS, "int32", "INTERVALS BATCH HEAD BLOCK", True, **_COUNTS),
    Operand("interval_rows", "SymInt", 0),
    _tensor("cu_seqlens_q", _F.VARLEN, ("members + 1",), "int32", "CU_Q", **_BOUNDS),
    _tensor("cu_seqlens_k", _F.VARLEN, ("members + 1",), "int32", "CU_K", **_BOUNDS, beside_pages=False),
    Operand("max_seqlen_q", "SymInt?"),
    Operand("max_seqlen_k", "SymInt?", beside_pages=False),
    _tensor("page_table", _F.PAGED, (BATCH, "max_pages"), "int32", "PAGE_TABLE BATCH ENTRY", **_BOUNDS),
    _tensor("row_bounds", _F.ROW_BOUNDS, (ROWS, 2), "int32", "ROW_BOUNDS ROW SIDE", True, vmap="loop"),
    Operand("codes", "str", "", Feature.CODES, vmap="loop"),
    *(
        _tensor(
            f"{x}_{table}",
            _F.CODES,
            _TABLE,
            "float32",
            f"{x}_{table} BATCH HEAD TOKEN CHANNEL".upper(),
            vmap="loop",
        )
        for x in "kv"
        for table in ("scale", "shift")
    ),
    Operand("wide_gradients", "bool", False, Feature.WIDE_GRADIENTS),
)
BY_NAME = {operand.name: operand for operand in OPERANDS}
# Those that kernels read: the seed of dropout is a number to them.
TENSORS = tuple(operand for operand in OPERANDS if operand.is_tensor and operand.axes)
DIFFERENTIABLE = tuple(operand.name for operand in OPERANDS if operand.differentiable)


def differentiable(q: Any, k: Any, v: Any, args: Arguments) -> tuple[Any, ...]:
    """The operands with gradients, in the order of its backward op's results."""
    return (q, k, v, *(getattr(args, name) for name in DIFFERENTIABLE))


def features_of(
    args: Arguments, *, num_q_heads: int, num_kv_heads: int, head_dim: int, head_dim_v: int
) -> frozenset[Feature]:
    """The features a call needs, from the presence of its operands."""
    wanted = {x.feature for x, value in zip(OPERANDS, args, strict=True) if x.feature and x.given(value)}
    if num_q_heads != num_kv_heads:
        wanted.add(Feature.GQA)
    if head_dim != head_dim_v:
        wanted.add(Feature.HEAD_DIM_V)
    return frozenset(wanted)
