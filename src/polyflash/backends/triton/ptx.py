"""PTX that kernels hold where Triton has no word for it: NVIDIA alone, and not in the interpreter."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _multiply(count: int) -> str:
    """`count` float32 $0.. times as many factors, unless those of a whole warp are 1. Four at a time, because
    ptxas sees that comparisons of a product's rows repeat every four registers, and keeps one of each."""
    factors = range(2 * count, 3 * count)
    lines = [".reg .pred some, four, vote;"]
    for first in factors[::4]:
        lines.append(f"setp.neu.f32 four, ${first}, 0f3F800000;")
        rest = range(first + 1, min(first + 4, factors.stop))
        lines += [f"setp.neu.or.f32 four, ${i}, 0f3F800000, four;" for i in rest]
        lines.append("mov.pred some, four;" if first == factors.start else "or.pred some, some, four;")
    lines.append("vote.sync.any.pred vote, some, 0xffffffff; @!vote bra.uni DONE;")
    lines += [f"mul.rn.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count)]
    return "{ " + " ".join(lines) + " DONE: }"


@triton.constexpr_function
def _in_place(count: int) -> str:
    """Constraints of `count` float32 results: each in the register of its first operand, beside a second."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@triton.jit
def multiply_unless_one(b_x, b_factor, COUNT: tl.constexpr):
    """x·factor of float32 tiles of one shape; a warp whose factors are all 1 skips it. COUNT, which divides
    the number of values of a thread, are looked at together."""
    return tl.inline_asm_elementwise(
        _multiply(COUNT), _in_place(COUNT), [b_x, b_factor], tl.float32, True, COUNT
    )
