"""PTX that kernels hold where Triton has no word for it; NVIDIA alone."""

from __future__ import annotations

import triton


@triton.constexpr_function
def rescaling(count: int) -> str:
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
def in_place(count: int) -> str:
    """Constraints of `count` float32 results: each in the register of its first operand, beside a second."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)
