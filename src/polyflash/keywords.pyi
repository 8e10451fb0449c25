"""Keywords of the public functions beside `return_lse`, as their overloads name them: for type checkers."""

from collections.abc import Sequence
from typing import Any, Required, TypedDict

from torch import Tensor

from polyflash.arguments import Causal, Layout, WindowSides
from polyflash.mask import Mask

class _Numbers(TypedDict, total=False):
    alibi_slopes: Tensor | None
    softcap: float
    sinks: Tensor | None
    scale: float | None

class _Scores(_Numbers, total=False):
    backend: str | None

class OnDevice(_Numbers, total=False):
    causal: Causal
    window: WindowSides | None
    mask: Tensor | Mask | None
    bias: Tensor | None
    page_table: Tensor | None
    kv_lens: Tensor | None
    kv_starts: Tensor | None
    q_offset: int | Tensor | None
    config: Any

class _Rows(_Scores, total=False):
    window: WindowSides | None
    causal: Causal
    kv_starts: Tensor | None
    q_offset: int | Tensor | None
    out: Tensor | None
    batch_invariant: bool | None
    checked: bool

class _Dropped(_Rows, total=False):
    kv_lens: Tensor | None
    dropout_p: float
    dropout_seed: int | Tensor | None
    config: Any

class OfAttention(_Dropped, total=False):
    mask: Tensor | Mask | None
    bias: Tensor | None
    layout: Layout

class OfVarlen(_Dropped, total=False):
    max_seqlen_q: int | None
    max_seqlen_k: int | None

class OfPaged(_Rows, total=False):
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | None
    config: Any

class OfCache(_Rows, total=False):
    layer: int
    counts: int | Sequence[int] | None
    cascade: bool
    kv_lens: Tensor | None

class OfGroups(_Scores, total=False):
    q_offsets: Required[Sequence[int]]
    kv_lens: Sequence[int] | None
    causal: bool
    window: WindowSides | Sequence[WindowSides | None] | None
    mask: Tensor | Mask | Sequence[Tensor | Mask | None] | None
    bias: Tensor | Sequence[Tensor | None] | None
    layout: Layout
    fused: bool | None
    config: Any
