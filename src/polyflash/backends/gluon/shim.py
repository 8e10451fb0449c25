"""Instructions that Gluon lacks by name on sm_90, or names by version: the only file with PTX or private
API. `configs.CHECKED` lists the Tritons it was compiled with."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}
_DTYPES[torch.float8_e4m3fn] = gl.float8e4nv
# Triton 3.9 names the copies after loads and stores.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@cache
def box_layout(dtype: torch.dtype, rows: int, channels: int) -> Any:
    """The shared layout of a box, which takes Gluon long to find."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, channels], _DTYPES[dtype])


def descriptor(x: Tensor, rows: int, channels: int) -> TensorDescriptor:
    """Boxes of `rows` rows of (batch, heads, seqlen, channels), which may be fewer. `describable` of the
    Triton engine has checked what their class would check again in every call."""
    made = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides = x, list(x.shape), list(x.stride())
    made.block_shape, made.padding = [1, 1, rows, channels], "zero"
    made.layout = box_layout(x.dtype, rows, channels)
    return made


def flat_descriptor(x: Tensor, *box: int) -> TensorDescriptor:
    """Boxes of a dense tensor of one or two dimensions."""
    made = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides = x, list(x.shape), list(x.stride())
    made.block_shape, made.padding, made.layout = list(box), "zero", flat_layout(x.dtype, box)
    return made


@cache
def flat_layout(dtype: torch.dtype, box: tuple[int, ...]) -> Any:
    if len(box) == 1:
        return gl.NVMMASharedLayout(0, 32, rank=1)
    return gl.NVMMASharedLayout.get_default_for(list(box), _DTYPES[dtype])


@gluon.constexpr_function
def bytes_of(block: Any) -> int:
    return getattr(block, "nbytes_per_cta", None) or block.nbytes


@gluon.jit
def load_box(box, at, full, slot, COUNT: gl.constexpr = 1, MORE: gl.constexpr = 0):
    """Asks for the descriptor's box at `at`; `full` is the barrier of its arrival, and of COUNT - 1 more such
    and MORE bytes. COUNT 0: an earlier call has said so."""
    SIZE: gl.constexpr = bytes_of(box.block_type)
    if COUNT > 0:
        mbarrier.expect(full, COUNT * SIZE + MORE)
    _load(box, at, full, slot)


@builtin
def add_box(box: Any, at: Any, slot: Any, _semantic: Any = None) -> None:
    """Adds what lies in `slot` to the descriptor's box, in any order with others that do."""
    at = _semantic._convert_to_ir_values(at, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, box.handle, at, slot.handle)


@gluon.jit
def stored():
    """Waits until what these warps have stored and added is in memory, not only read."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ASM: gl.constexpr = "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; mov.u32 $0, $1;"
    o = gl.arange(0, 32 * gl.num_warps(), layout=layout)
    gl.inline_asm_elementwise(ASM, "=r,r", [o], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_number(p, least):
    """A warp waits until the int32 at p is `least` or more, and sees what was in memory before it was."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    o = gl.arange(0, 32, layout=layout)
    ASM: gl.constexpr = (
        "{ .reg .pred q; .reg .b32 r; AGAIN: ld.acquire.gpu.global.b32 r, [$1];"
        " setp.lt.s32 q, r, $2; @q bra AGAIN; bar.warp.sync 0xffffffff; mov.b32 $0, r; }"
    )
    given = [p + o * 0, o * 0 + least]
    gl.inline_asm_elementwise(ASM, "=r,l,r", given, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def release_number(p, number):
    """A warp writes an int32 that `await_number` waits for, behind what it has stored."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    o = gl.arange(0, 32, layout=layout)
    ASM: gl.constexpr = (
        "{ .reg .pred q; setp.eq.s32 q, $3, 0; @q st.release.gpu.global.b32 [$1], $2; mov.b32 $0, $2; }"
    )
    given = [p + o * 0, o * 0 + number, o]
    gl.inline_asm_elementwise(ASM, "=r,l,r,r", given, dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def tile_layout(dtype: Any) -> Any:
    """Shared layout of a 64 x 64 operand."""
    return gl.NVMMASharedLayout.get_default_for([64, 64], dtype)


@gluon.constexpr_function
def _barrier(kind: str, threads: int) -> str:
    return f"{kind} $1, {threads}; mov.u32 $0, $1;"


@gluon.jit
def named_barrier(KIND: gl.constexpr, number, THREADS: gl.constexpr):
    """bar.sync or bar.arrive, once by every thread of the partition. `number` may be a run-time value."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    numbers = gl.full([32 * gl.num_warps()], number, gl.int32, layout)
    ASM: gl.constexpr = _barrier(KIND, THREADS)
    gl.inline_asm_elementwise(ASM, "=r,r", [numbers], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pinned(b_x):
    """x (>= 0), and what makes it is computed before whatever follows: ptxas moves a wait for a product above
    the exponentials otherwise. The store never executes."""
    ASM: gl.constexpr = (
        "{ .reg .pred q; .reg .u32 a; mov.u32 a, 0; setp.lt.f32 q, $1, 0fFF7FFFFF;"
        " @q st.volatile.shared.u32 [a], a; mov.f32 $0, $1; }"
    )
    return gl.inline_asm_elementwise(ASM, "=f,f", [b_x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def held(x):
    """An int32, which is computed here: the compiler would do it where it is needed first."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _keep(test: str, count: int) -> str:
    """Keeps of `count` scores $0.. of a thread, two rows by turns, those whose key passes the test."""
    keys = ((f"${i}", 2 * count + i // 2 % 2 * 2, i // 4 * 8 + i % 2) for i in range(count))
    lines = (f" setp.{test}.s32 q, ${b}, {j}; selp.f32 {s}, {s}, 0fFF800000, q;" for s, b, j in keys)
    return f"{{ .reg .pred q;{''.join(lines)} }}"


@gluon.jit
def keep_less(b_x, b_a, b_b):
    """x where a < b, else -inf; int32 a and b broadcast. Two instructions each, a mask of bools five."""
    ASM: gl.constexpr = "{ .reg .pred q; setp.lt.s32 q, $2, $3; selp.f32 $0, $1, 0fFF800000, q; }"
    given = [b_x, b_a, b_b]
    return gl.inline_asm_elementwise(ASM, "=f,f,r,r", given, dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def keep_64(b_s, bounds, TEST: gl.constexpr):
    ASM: gl.constexpr = _keep(TEST, 32)
    CONSTRAINTS: gl.constexpr = _in_place(32, "r")
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [b_s, bounds], dtype=gl.float32, is_pure=True, pack=32)


@gluon.jit
def keep_where(b_s, bound, TEST: gl.constexpr):
    """Keeps scores of 64 or 128 keys where `bound` of their row is "gt" or "lt", TEST, than the key's number;
    others are -inf. Numbers stand in the code, so they take no registers."""
    of_thread = gl.arange(0, b_s.shape[1], layout=gl.SliceLayout(0, b_s.type.layout)) & 6
    bounds = bound[:, None] - of_thread[None, :]
    if b_s.shape[1] == 64:
        found = keep_64(b_s, bounds, TEST)
    else:
        left, right = halves(b_s)
        near, far = halves(bounds)
        right = gl.convert_layout(keep_64(right, far - 64, TEST), left.type.layout, assert_trivial=True)
        found = gl.convert_layout(
            joined(keep_64(left, near, TEST), right), b_s.type.layout, assert_trivial=True
        )
    return found


@gluon.constexpr_function
def _lower(count: int) -> str:
    """`count` scores $0.. of a thread, two rows by turns, and the distance from its first column times a
    slope each."""
    told = []
    for i in range(count):
        at = f"{2 * count + i // 2 % 2 * 2}, {i // 4 * 8 + i % 2}.0"
        told.append(f" add.f32 d, ${at}; abs.f32 d, d; fma.rn.f32 ${i}, d, ${3 * count}, ${i};")
    return f"{{ .reg .f32 d;{''.join(told)} }}"


@gluon.jit
def lower_by_distance(b_x, b_steps, slope):
    """x + slope·|steps| in [64, 64]; `b_steps` are those of the first column of eight that a thread has, and
    further ones stand in the code."""
    ASM: gl.constexpr = _lower(32)
    CONSTRAINTS: gl.constexpr = _in_place(32, "f") + ",f" * 32
    given = [b_x, b_steps, slope]
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, given, dtype=gl.float32, is_pure=True, pack=32)


@gluon.jit
def reciprocal(b_x):
    """1 / x of what is 1 or more, in one instruction."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b_x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def _multiply(count: int) -> str:
    """`count` float32 $0.. times a factor each, of two rows by turns, unless those of a whole warp are 1."""
    lines = "".join(f" mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    return (
        f"{{ .reg .pred p, q; setp.neu.f32 p, ${2 * count}, 0f3F800000;"
        f" setp.neu.or.f32 p, ${2 * count + 2}, 0f3F800000, p;"
        f" vote.sync.any.pred q, p, 0xffffffff; @!q bra SKIP;{lines} SKIP: }}"
    )


@gluon.constexpr_function
def _in_place(count: int, kind: str) -> str:
    """Constraints of `count` values that are changed, and so many of another kind."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + [kind] * count)


@gluon.jit
def multiply_unless_one(acc, alpha, COUNT: gl.constexpr):
    """acc·alpha[:, None]; a warp whose alpha are all 1 skips it, COUNT values of a thread at a time. A
    branch, so only while no product is in flight."""
    ASM: gl.constexpr = _multiply(COUNT)
    CONSTRAINTS: gl.constexpr = _in_place(COUNT, "f")
    return gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, [acc, alpha[:, None]], dtype=gl.float32, is_pure=True, pack=COUNT
    )


@gluon.constexpr_function
def _convert(dtype: Any) -> str:
    return f"cvt.rn.{'bf16x2' if str(dtype) == 'bf16' else 'f16x2'}.f32 $0, $2, $1;"


@gluon.jit
def packed(b_p, DTYPE: gl.constexpr):
    """Weights rounded, those of neighbouring keys in one int32, as LLVM splits 16-bit values that a loop
    carries."""
    lo, hi = b_p.reshape([b_p.shape[0], b_p.shape[1] // 2, 2]).split()
    ASM: gl.constexpr = _convert(DTYPE)
    return gl.inline_asm_elementwise(ASM, "=r,f,f", [lo, hi], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpacked(b_pairs, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The inverse of `packed`, as an operand of a product."""
    lo = b_pairs.to(gl.int16).to(DTYPE, bitcast=True)
    hi = (b_pairs >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    b_p = gl.join(lo, hi).reshape([b_pairs.shape[0], 2 * b_pairs.shape[1]])
    return gl.convert_layout(b_p, LAYOUT)


@gluon.constexpr_function
def accumulator(columns: int) -> Any:
    """Layout of 64 rows in a warpgroup, as products leave them."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def products(columns: int) -> Any:
    """The same of products of 8 bits."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32])


@gluon.jit
def narrowed(b_p, LAYOUT: gl.constexpr):
    """Weights as e4m3 operands of a product. Its registers hold other keys of each 32 than those of scores,
    and V has its keys in that order, so nothing moves from thread to thread."""
    KEYS: gl.constexpr = b_p.shape[1]
    b_p = b_p.reshape([64, KEYS // 32, 2, 2, 4, 2]).permute((0, 1, 2, 4, 3, 5)).reshape([64, KEYS])
    ASM: gl.constexpr = (
        "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1;"
        " cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; mov.b32 $0, {a, b}; }"
    )
    b_p = gl.convert_layout(b_p, LAYOUT, assert_trivial=True)
    return gl.inline_asm_elementwise(ASM, "=r,f,f,f,f", [b_p], dtype=gl.float8e4nv, is_pure=True, pack=4)


@gluon.jit
def halves(b_x):
    """Left and right columns, within each thread."""
    return b_x.reshape([b_x.shape[0], 2, b_x.shape[1] // 2]).permute(0, 2, 1).split()


@gluon.jit
def joined(a, b):
    """The inverse of `halves`."""
    return gl.join(a, b).permute(0, 2, 1).reshape([a.shape[0], 2 * a.shape[1]])


@gluon.jit
def row_max(b_x):
    """Largest value of each row, as a tree."""
    a, b = halves(b_x)
    a, b = halves(gl.maximum(a, b))
    return gl.convert_layout(gl.max(gl.maximum(a, b), 1), gl.SliceLayout(1, b_x.type.layout))


@gluon.jit
def row_sum(b_x):
    """Sum of each row, as a tree."""
    a, b = halves(b_x)
    a, b = halves(a + b)
    a, b = halves(a + b)
    return gl.convert_layout(gl.sum(a + b, 1), gl.SliceLayout(1, b_x.type.layout))


@gluon.jit
def folded(b_x, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """[rows, keys] added up to [rows, COLUMNS] within each thread."""
    b_y = b_x
    for _ in gl.static_range(4):
        if b_y.shape[1] > COLUMNS:
            a, b = halves(b_y)
            b_y = a + b
    return gl.convert_layout(b_y, LAYOUT, assert_trivial=True)
