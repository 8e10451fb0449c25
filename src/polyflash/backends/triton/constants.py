"""Constants compiled into Triton's kernels, and tensors as descriptors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from triton.tools.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    from torch import Tensor


class Constants(NamedTuple):
    """`c` of a kernel: what is compiled in."""

    D: int = 0  # channels, in blocks of powers of two
    D0: int = 0
    D1: int = 0
    DV: int = 0
    DV0: int = 0
    DV1: int = 0
    BLOCK_M: int = 0  # rows of a tile, and keys
    BLOCK_N: int = 0
    NUM_STAGES: int = 1
    AGAIN_STAGES: int = 1  # of a second pass
    PACK: bool = False  # the query heads of a key/value head are rows of one tile
    HAS_OFFSET: bool = False  # an int; else rows end where the keys end
    HAS_LEFT: bool = False
    HAS_RIGHT: bool = False
    NEGATIVE: bool = False  # scale < 0: Q is turned round
    CHANGED: bool = False  # scores are changed before the softmax, so they are scaled one by one
    SOFTCAP: bool = False
    DROPOUT: bool = False
    DROPOUT_START: bool = False
    BELOW: bool = True  # some row may begin behind key 0
    ALWAYS_MASKED: bool = False  # any pair of a block may be hidden, whatever lengths and distances say
    WHOLE: bool = False  # rows see every key of every block
    EXACT: bool = False  # float32
    FINITE: bool = True
    FUSED: bool = False  # see `weights`
    BASE2: bool = True
    PRODUCT: str = "ieee"
    SPLIT_EXP: int = 1
    LAZY: bool = False
    LATE_SUM: bool = False
    COMPENSATE: bool = True
    THREADS: int = 0  # of a program on NVIDIA
    HOLD_Q: bool = False
    MASK_ADD: bool = False
    HEAVY_FIRST: bool = False
    DESCRIPTOR: bool = False
    CACHE: str = ""
    PAGE: int = 0  # keys of a page, a power of two; 0: any number
    SPLIT: bool = False
    PERSISTENT: bool = False
    LINEAR: bool = False  # a grid of one dimension
    OVER_ROWS: bool = False  # sums of a bias
    OVER_KEYS: bool = False
    PARTS: int = 1  # of codes: `Side` of K and of V, and what their products are made of
    PTX: bool = False
    TURNED: bool = False  # products and sums, of few rows
    ALIGNED: int = 1  # elements, see `runtime.spaced`
    K_HALF: bool = False
    V_HALF: bool = False
    V_GROUPED: bool = False
    ALONE: bool = False  # all rows of a tile see the same keys, from the first to the last
    P_CODES: str = ""  # what weights are rounded to, where V is codes of it that are multiplied
    LEVEL: int = 0  # 1: of them each block has a sum of its own; 0: sums of tensor cores
    K_CODES: str = ""
    K_PER: int = 0
    K_WORDS: int = 0
    K_SCALE: str = ""
    K_TOKENS: int = 0
    K_CHANNELS: int = 0
    K_SHIFT: str = ""
    K_SHIFT_TOKENS: int = 0
    K_SHIFT_CHANNELS: int = 0
    V_CODES: str = ""
    V_PER: int = 0
    V_WORDS: int = 0
    V_SCALE: str = ""
    V_TOKENS: int = 0
    V_CHANNELS: int = 0
    V_SHIFT: str = ""
    V_SHIFT_TOKENS: int = 0
    V_SHIFT_CHANNELS: int = 0
    LAYOUT: int = 0  # of the tuples: another is another kernel


def describable(x: Tensor, repeated: bool = False) -> bool:
    """May blocks of rows be loaded by tensor descriptor, if the tensor starts at 16 bytes? Rows must be dense
    and multiples of that apart, less than the 40 bits that the hardware's have; `repeated`: entries of the
    batch may be one memory."""
    size, first = x.element_size(), 1 if repeated and x.stride(0) == 0 else 0
    strides = x.stride()[first:-1]
    return x.stride(-1) == 1 and all(0 < s * size < 1 << 40 and s * size % 16 == 0 for s in strides)


def descriptors(
    x: Tensor, rows: int, first: int, second: int, turned: Tensor | None = None
) -> tuple[Any, Any]:
    """Descriptors of both channel blocks of (batch, heads, seqlen, channels): boxes of `rows` rows; what lies
    outside is 0. Likewise of `turned` (batch, heads, channels, seqlen). `describable` has checked what their
    class would check again in every call."""
    if turned is not None:
        shape, strides = list(turned.shape), list(turned.stride())
        boxes = ([1, 1, width, rows] if width else None for width in (first, second))
        return tuple(box and _descriptor(turned, shape, strides, box) for box in boxes)  # type: ignore[return-value]
    shape, strides = list(x.shape), list(x.stride())
    return (
        _descriptor(x, shape, strides, [1, 1, rows, first]),
        _descriptor(x, shape, strides, [1, 1, rows, second]) if second else None,
    )


def entries(x: Tensor, keys: int) -> TensorDescriptor:
    """A descriptor of (batch, heads, seqlen, 1), an entry of each key: boxes of `keys` of them."""
    return _descriptor(x, list(x.shape[:3]), list(x.stride()[:3]), [1, 1, keys])


def _descriptor(x: Tensor, shape: list[int], strides: list[int], box: list[int]) -> TensorDescriptor:
    made = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape, made.padding = x, shape, strides, box, "zero"
    return made
