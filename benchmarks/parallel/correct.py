"""Calls of all ranks beside one device and the float64 oracle, and how ranks that disagree end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import polyflash
from polyflash import Mask, SpecError, parallel
from polyflash.reference import attention_reference

MASKS = ("causal", "window", "segments", "packed", "dropout")
METHODS, ORDERS = ("ring", "all_gather", "ulysses"), ("zigzag", "contiguous")
NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Sizes:
    rows: int
    heads: tuple[int, int]
    head_dim: int

    @property
    def members(self) -> list[int]:
        """Packed documents: a long one, short ones, an empty one."""
        rest = self.rows - self.rows // 2 - 37 - 1
        return [self.rows // 2, 37, 0, 1, rest]


SMALL, LARGE = Sizes(515, (4, 2), 64), Sizes(8192, (8, 4), 128)


class Problem:
    """One call: q, k, v, dout of the whole sequence, on every rank alike, and its results by three ways."""

    def __init__(self, mask: str, dtype: torch.dtype, sizes: Sizes, device: torch.device) -> None:
        draw = torch.Generator().manual_seed(len(mask))
        shapes = [(1, h, sizes.rows, sizes.head_dim) for h in (*sizes.heads, sizes.heads[1], sizes.heads[0])]
        self.whole = [torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes]
        self.options: dict[str, Any] = {"causal": True}
        self.bounds: Any = None
        if mask == "window":
            self.options["window"] = (sizes.rows // 7, 0)
        elif mask == "dropout":
            self.options |= {"dropout_p": 0.3, "dropout_seed": 2**40 + 77}
        elif mask == "segments":
            lens = torch.tensor(sizes.members)
            ids = torch.arange(len(lens)).repeat_interleave(lens)[None].int().to(device)
            self.options["mask"] = Mask.segments(ids, ids)
        elif mask == "packed":
            self.bounds = torch.tensor([0, *sizes.members]).cumsum(0).int().to(device)

    def over_ranks(self, method: str, order: str, **where: Any) -> list[Tensor]:
        """Results of all rows."""
        packed: dict[str, Any] = {"dim": 0, "cu_seqlens": self.bounds} if self.bounds is not None else {}
        cut: dict[str, Any] = {"order": order, **packed}
        given = [x[0].transpose(0, 1) for x in self.whole] if packed else self.whole
        q, k, v, dout = (parallel.split(x, **cut) for x in given)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        how: Any = {"method": method, "order": order, "return_lse": True, **self.options, **where}
        if packed:
            how |= {"cu_seqlens_q": self.bounds, "cu_seqlens_k": self.bounds}
            call: Any = parallel.attention_varlen(leaves[0], leaves[1], leaves[2], **how)
        else:
            call = parallel.attention(*leaves, **how)
        out, lse = call
        (out.float() * dout.float()).sum().add(lse.sum()).backward()
        lse_cut = cut | {"dim": 1} if packed else cut
        whole = [parallel.restore(x.detach(), **cut) for x in (out, *(y.grad for y in leaves))]  # type: ignore[union-attr]
        whole.insert(1, parallel.restore(lse.detach(), **lse_cut))
        if packed:
            return [x[None] if i == 1 else x.transpose(0, 1)[None] for i, x in enumerate(whole)]
        return whole

    def on_one(self, exact: bool) -> list[Tensor]:
        """Results of one device, or of the oracle, of many rows a key head at a time."""
        whole = [x.double() if exact else x for x in self.whole]
        heads = self.whole[1].shape[1]
        by_head = exact and self.whole[0].shape[2] > SMALL.rows
        group = self.whole[0].shape[1] // heads if by_head else self.whole[0].shape[1]
        found = []
        for h in range(heads if by_head else 1):
            of_q, of_k = slice(h * group, (h + 1) * group), slice(h, h + 1) if by_head else slice(None)
            q, k, v, dout = (x[:, at] for x, at in zip(whole, (of_q, of_k, of_k, of_q), strict=True))
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out, lse = self._attend(leaves, exact)
            (out.to(lse.dtype) * dout.to(lse.dtype)).sum().add(lse.sum()).backward()
            found.append([out.detach(), lse.detach(), *(x.grad for x in leaves)])
        return [torch.cat(parts, 1) for parts in zip(*found, strict=True)]

    def _attend(self, leaves: list[Tensor], exact: bool) -> tuple[Tensor, Tensor]:
        if self.bounds is None:
            if exact:
                made = attention_reference(*leaves, **self.options)
                return made.out, made.lse
            return polyflash.attention(*leaves, return_lse=True, **self.options)
        if not exact:
            q, k, v = (x[0].transpose(0, 1) for x in leaves)
            cu = self.bounds
            out, lse = polyflash.attention_varlen(q, k, v, cu, cu, causal=True, return_lse=True)
            return out.transpose(0, 1)[None], lse[None]
        ends = self.bounds.tolist()
        runs = [slice(a, b) for a, b in pairwise(ends) if b > a]
        members = [attention_reference(*(x[:, :, run] for x in leaves), causal=True) for run in runs]
        return torch.cat([x.out for x in members], 2), torch.cat([x.lse for x in members], 2)


def judged(got: list[Tensor], near: list[Tensor], right: list[Tensor]) -> dict[str, Any]:
    """Largest errors of each result beside those of one device; `wrong` names results that are off."""
    row: dict[str, Any] = {"wrong": []}
    for name, x, one, exact in zip(NAMES, got, near, right, strict=True):
        error, base = (float((y.double() - exact).abs().max()) for y in (x, one))
        unit = 4 * max(torch.finfo(x.dtype).eps, 2e-6) * float(exact.abs().max())
        row[name] = [error, base]
        if not error <= 3 * base + unit:
            row["wrong"].append(name)
    return row


def cases(mask: str, dtype: str, size: str, device: torch.device) -> Iterator[dict[str, Any]]:
    """Every method and order of one mask and dtype."""
    sizes = {"small": SMALL, "large": LARGE}[size]
    problem = Problem(mask, getattr(torch, dtype), sizes, device)
    right, near = problem.on_one(True), problem.on_one(False)
    for order in ORDERS if size == "small" else ORDERS[:1]:
        for method in METHODS:
            row = {"kind": "case", "name": f"{mask} {dtype} {size} {method} {order}"}
            try:
                yield row | judged(problem.over_ranks(method, order), near, right)
            except Exception as error:
                yield row | {"wrong": [f"{type(error).__name__}: {error}"]}


def handshakes(device: torch.device) -> Iterator[dict[str, Any]]:
    """Ranks that agree, that disagree, and that agree again; without the handshake the same bits."""
    problem = Problem("causal", torch.float32, SMALL, device)
    first = problem.over_ranks("ring", "zigzag")
    q, k, v = (parallel.split(x) for x in problem.whole[:3])
    odd, said = dist.get_rank() == 1, "no error"
    try:
        parallel.attention(q, k, v, causal=not odd)
    except SpecError as error:
        said = str(error)
    yield {
        "kind": "case",
        "name": "ranks that disagree",
        "wrong": [] if "parallel causal" in said else [said],
    }
    again = problem.over_ranks("ring", "zigzag")
    quiet = problem.over_ranks("ring", "zigzag", handshake=False, seqlens=(SMALL.rows, SMALL.rows))
    same = all(map(torch.equal, first, again)) and all(map(torch.equal, first, quiet))
    yield {"kind": "case", "name": "bits after that", "wrong": [] if same else ["other bits"]}
