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
Vmap = Literal["", "batch", "loop if mapped", "loop"]


class Operand(NamedTuple):
    """One operand. `axes` name the sizes of a tensor's dimensions; of a packed or paged call "batch" is its
    members or requests."""

    name: str
    kind: str  # in the op's schema
    default: Any = None
    feature: Feature | None = None  # what a call that has it needs of a kernel
    axes: tuple[str | int, ...] = ()
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


def _words(name: str, *strides: str) -> tuple[str, ...]:
    return (name, *(f"{name}_{stride}" for stride in strides))


OPERANDS = (
    Operand("causal", "bool", False, Feature.CAUSAL),
    Operand("scale", "float?"),
    Operand("need_lse", "bool", False, Feature.LSE),
    Operand("window_left", "SymInt?", feature=Feature.WINDOW),
    Operand("window_right", "SymInt?", feature=Feature.WINDOW),
    Operand("offset", "SymInt?", feature=Feature.Q_OFFSET),
    Operand(
        "kv_lens", "Tensor?", feature=Feature.KV_LENS, axes=(BATCH,), dtype="int32", contents=True,
        vmap="batch", words=_words("KV_LENS", "STRIDE"),
    ),
    Operand(
        "kv_starts", "Tensor?", feature=Feature.KV_STARTS, axes=(BATCH,), dtype="int32", contents=True,
        vmap="batch", words=_words("KV_STARTS", "STRIDE"),
    ),
    Operand(
        "q_offset", "Tensor?", feature=Feature.Q_OFFSET, axes=(BATCH,), dtype="int32", vmap="batch",
        words=_words("Q_OFFSET", "STRIDE"),
    ),
    Operand(
        "mask", "Tensor?", feature=Feature.MASK, axes=SCORES, dtype="bool", beside_packed=False,
        beside_pages=False, vmap="batch", words=_words("MASK", "BATCH", "HEAD", "ROW", "KEY"),
    ),
    Operand(
        "bias", "Tensor?", feature=Feature.BIAS, axes=SCORES, dtype="float", beside_packed=False,
        beside_pages=False, differentiable=True, vmap="batch",
        words=_words("BIAS", "BATCH", "HEAD", "ROW", "KEY", "KIND"),
    ),
    Operand(
        "alibi_slopes", "Tensor?", feature=Feature.ALIBI, axes=(BATCH, HEADS), dtype="float", vmap="batch",
        words=_words("SLOPES", "BATCH", "HEAD"),
    ),
    Operand(
        "sinks", "Tensor?", feature=Feature.SINKS, axes=(HEADS,), dtype="float", differentiable=True,
        vmap="loop if mapped", words=("SINKS",),
    ),
    Operand(
        "q_segments", "Tensor?", feature=Feature.SEGMENTS, axes=(BATCH, ROWS), dtype="int32",
        beside_packed=False, beside_pages=False, vmap="batch", words=_words("Q_IDS", "BATCH", "ROW"),
    ),
    Operand(
        "k_segments", "Tensor?", feature=Feature.SEGMENTS, axes=(BATCH, KEYS), dtype="int32",
        beside_packed=False, beside_pages=False, vmap="batch", words=_words("K_IDS", "BATCH", "KEY"),
    ),
    Operand("softcap", "float", 0.0, Feature.SOFTCAP),
    Operand("dropout_p", "float", 0.0, Feature.DROPOUT, beside_pages=False, vmap="loop"),
    Operand("dropout_seed", "Tensor?", dtype="int64"),
    Operand("batch_invariant", "bool", False, Feature.BATCH_INVARIANT),
    Operand("checked", "bool", False),
    Operand("backend", "str", ""),
    Operand("config", "str", ""),
    Operand(
        "intervals", "Tensor?", feature=Feature.INTERVALS, axes=(BATCH, HEADS, "row_blocks", "intervals", 2),
        dtype="int32", beside_packed=False, beside_pages=False, contents=True, vmap="batch",
        words=(*_words("INTERVALS", "BATCH", "HEAD", "BLOCK"), "INTERVAL_COUNT", "INTERVAL_ROWS"),
    ),
    Operand("interval_rows", "SymInt", 0),
    Operand(
        "cu_seqlens_q", "Tensor?", feature=Feature.VARLEN, axes=("members + 1",), dtype="int32",
        contents=True, vmap="loop", words=("CU_Q",),
    ),
    Operand(
        "cu_seqlens_k", "Tensor?", feature=Feature.VARLEN, axes=("members + 1",), dtype="int32",
        beside_pages=False, contents=True, vmap="loop", words=("CU_K",),
    ),
    Operand("max_seqlen_q", "SymInt?"),
    Operand("max_seqlen_k", "SymInt?", beside_pages=False),
    Operand(
        "page_table", "Tensor?", feature=Feature.PAGED, axes=(BATCH, "max_pages"), dtype="int32",
        contents=True, vmap="loop", words=_words("PAGE_TABLE", "BATCH", "ENTRY"),
    ),
    Operand(
        "row_bounds", "Tensor?", feature=Feature.ROW_BOUNDS, axes=(ROWS, 2), dtype="int32",
        beside_packed=False, beside_pages=False, vmap="loop", words=_words("ROW_BOUNDS", "ROW", "SIDE"),
    ),
)  # fmt: skip
BY_NAME = {operand.name: operand for operand in OPERANDS}
# Those that kernels read: the seed of dropout is a number to them.
TENSORS = tuple(operand for operand in OPERANDS if operand.is_tensor and operand.axes)
DIFFERENTIABLE = tuple(operand.name for operand in OPERANDS if operand.differentiable)


def differentiable(q: Any, k: Any, v: Any, args: Arguments) -> tuple[Any, ...]:
    """What the op has gradients for, in the order of its backward op's results."""
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
