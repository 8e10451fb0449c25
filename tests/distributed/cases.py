"""Problems for ranks, and what makes a result right: shared by threads that stand for ranks and by processes.

A result is judged beside one device's: its error against the float64 oracle may be twice (gradients: three
times) that of one call on one device, and one rounding unit; of more than 8 ranks, whose sums are longer,
twice that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

import polyflash
from polyflash import Mask, parallel
from polyflash.parallel.schedule import Shards
from polyflash.reference import attention_reference
from tests.references import varlen_reference

HEAD_DIM, HEAD_DIM_V, BATCH = 16, 24, 2
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
HEADS = ((4, 2), (4, 4), (6, 2), (4, 1))
NAMES = ("out", "lse", "dq", "dk", "dv")
Options = Callable[[int, int, int], dict[str, Any]]  # of query heads, rows and keys


def _segments(heads: int, rows: int, keys: int) -> dict[str, Any]:
    """Documents of mixed length; those of request 1 are permuted."""
    ids = torch.tensor([0, 3, 3, 1, 1, 1, 1, 7, 7, 2])
    q_ids = ids.repeat_interleave(-(-rows // 10))[:rows].int()
    k_ids = ids.repeat_interleave(-(-keys // 10))[:keys].int()
    mask = Mask.segments(torch.stack((q_ids, q_ids.flip(0))), torch.stack((k_ids, k_ids.flip(0))))
    return {"mask": mask, "causal": True}


def _lists(heads: int, rows: int, keys: int) -> dict[str, Any]:
    """Two intervals per 3 rows, of one head other ones than of the others."""
    first = torch.arange(-(-rows // 3))[None, :] + torch.arange(heads)[:, None] % 2
    starts = torch.stack((first // 3, first + 4), -1)[None]
    ends = torch.stack((first // 3 + 2, first + 9), -1)[None]
    made = [x.clamp(max=keys).int() for x in (starts, ends)]
    return {"mask": Mask.intervals(made[0], made[1], rows=3), "window": (None, 5)}


def _dense(heads: int, rows: int, keys: int) -> dict[str, Any]:
    mask = torch.arange(rows * keys).reshape(1, 1, rows, keys) * 7919 % 11 > 2
    return {"mask": mask, "bias": torch.linspace(-1, 1, heads * keys).reshape(heads, 1, keys)}


MASKS: dict[str, Options] = {
    "none": lambda h, n, m: {},
    "causal": lambda h, n, m: {"causal": True},
    "top-left": lambda h, n, m: {"causal": "top_left", "scale": 0.5},
    "window": lambda h, n, m: {"causal": True, "window": (3, None)},
    "window-both": lambda h, n, m: {"window": (2, 4), "softcap": 3.0},
    "sinks": lambda h, n, m: {"causal": True, "sinks": torch.linspace(-1, 2, h)},
    "sinks-window": lambda h, n, m: {"window": (1, 0), "sinks": torch.linspace(-1, 2, h), "q_offset": 5},
    "alibi": lambda h, n, m: {"causal": True, "alibi_slopes": torch.linspace(0.1, 1, h)},
    "lengths": lambda h, n, m: {"kv_lens": torch.tensor([m, m // 2]), "kv_starts": torch.tensor([m // 3, 0])},
    "lengths-causal": lambda h, n, m: {"kv_lens": torch.tensor([m // 2, m]), "causal": True},
    "segments": _segments,
    "lists": _lists,
    "dropout": lambda h, n, m: {"causal": True, "dropout_p": 0.4, "dropout_seed": 2**40 + 77},
    "dense": _dense,
}
PACKED = ("none", "causal", "window", "sinks", "alibi")


@dataclass(frozen=True)
class Case:
    mask: str
    method: str
    order: str
    heads: tuple[int, int]
    dtype: torch.dtype
    rows: int
    keys: int
    members: tuple[int, ...] = ()  # lengths of packed members
    layout: str = "bhsd"
    seed: int = field(default=0, compare=False)

    def __str__(self) -> str:
        sizes = f"{self.members}" if self.members else f"{self.rows}x{self.keys}"
        kind = str(self.dtype).removeprefix("torch.")
        heads = f"{self.heads[0]}/{self.heads[1]}"
        return f"{self.mask} {self.method} {self.order} {heads} {kind} {sizes} {self.layout}"

    def options(self) -> dict[str, Any]:
        return MASKS[self.mask](self.heads[0], self.rows, self.keys)

    def tensors(self, ranks: int) -> list[Tensor]:
        """q, k, v, dout, dlse of the whole; keys and values of each rank have a distribution of their own."""
        draw = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, dtype=torch.float64)

        q, k = (
            normal(BATCH, self.heads[0], self.rows, HEAD_DIM),
            normal(BATCH, self.heads[1], self.keys, HEAD_DIM),
        )
        v = normal(BATCH, self.heads[1], self.keys, HEAD_DIM_V)
        for rank in range(ranks):
            own = Shards((self.keys,), ranks, self.order).positions(rank)
            k[:, :, own] = k[:, :, own] * (0.5 + rank / ranks) + 0.2 * rank / ranks
            v[:, :, own] = v[:, :, own] * (1 + 4 * rank / ranks) - 4 * rank / ranks
        dout = normal(*q.shape[:3], HEAD_DIM_V)
        made = [x.to(self.dtype) for x in (q, k, v, dout)]
        dlse = normal(*q.shape[:3]).to(torch.float64 if self.dtype is torch.float64 else torch.float32)
        if self.members:
            return [x[0].transpose(0, 1).contiguous() for x in made] + [dlse[0]]
        return (
            [*(x.transpose(1, 2).contiguous() for x in made), dlse]
            if self.layout == "bshd"
            else [*made, dlse]
        )


def lengths(ranks: int) -> tuple[int, ...]:
    """Tiny and uneven ones."""
    few = {1, 2, max(1, ranks - 1), ranks + 1, 2 * ranks - 1, 2 * ranks + 1}
    return (*sorted(few), 5 * ranks + 3)


def cases(ranks: int, methods: tuple[str, ...]) -> Iterator[Case]:
    """Every method x order x mask, and beside them heads, dtypes and lengths in turn."""
    turn = count()
    sizes = lengths(ranks)
    for method in methods:
        for order in ("zigzag", "contiguous"):
            for mask in MASKS:
                i = next(turn)
                heads = HEADS[i % 4] if "ulysses" not in method else _dividing(ranks, i)
                rows = sizes[i % len(sizes)] if i % 3 else 7 * ranks + 3
                keys = rows if i % 5 or mask == "segments" else rows + 4
                layout = "bshd" if i % 7 == 3 else "bhsd"
                yield Case(mask, method, order, heads, DTYPES[i // 2 % 4], rows, keys, layout=layout, seed=i)
            for mask in PACKED:
                i = next(turn)
                heads = HEADS[i % 4] if "ulysses" not in method else _dividing(ranks, i)
                members = (ranks - 1, 1, 5 * ranks + 2, 0, 2 * ranks + 1)
                rows = sum(members)
                yield Case(mask, method, order, heads, DTYPES[i // 2 % 4], rows, rows, members, seed=i)


def _dividing(ranks: int, i: int) -> tuple[int, int]:
    """Query heads that ranks can share; key heads fewer than ranks, or as many."""
    return ((ranks, 1), (2 * ranks, 2), (2 * ranks, ranks))[i % 3]


def ranks_agree(results: list[list[Tensor]]) -> bool:
    return all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def run(case: Case, ranks: int, **where: Any) -> list[Tensor]:
    """out, lse, dq, dk, dv of all rows, and the gradients of sinks and bias if there are any, as this rank
    knows them. Another call comes between the forward and the backward pass."""
    options, cuts = case.options(), {"order": case.order, **where}
    cu = torch.tensor([0, *case.members]).cumsum(0).int() if case.members else None
    dim = 0 if case.members else 1 if case.layout == "bshd" else 2
    lse_dim = 1 if case.members else 2

    def call(tensors: list[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        shared = [options[n].detach().clone().requires_grad_() for n in ("sinks", "bias") if n in options]
        own = options | dict(zip([n for n in ("sinks", "bias") if n in options], shared, strict=True))
        q, k, v, dout = (parallel.split(x, dim=dim, cu_seqlens=cu, **cuts) for x in tensors[:4])
        dlse = parallel.split(tensors[4], dim=lse_dim, cu_seqlens=cu, **cuts)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        how: Any = {"method": case.method, "return_lse": True, **cuts, **own}
        if cu is None:
            out, lse = parallel.attention(q, k, v, layout=case.layout, **how)
        else:
            out, lse = parallel.attention_varlen(q, k, v, cu, cu, **how)
        loss = (out * dout).sum(dtype=torch.float64) + (lse.masked_fill(lse.isinf(), 0.0) * dlse).sum()
        return loss, [q, k, v, *shared], [out, lse]

    tensors = case.tensors(ranks)
    loss, leaves, results = call(tensors)
    other, _, _ = call([x.flip(0) + 1 for x in tensors])
    loss.backward()
    other.backward()
    q, k, v, *shared = (x.grad for x in leaves)
    rows = [(results[0], dim), (results[1], lse_dim), (q, dim), (k, dim), (v, dim)]
    whole = [parallel.restore(x.detach(), dim=d, cu_seqlens=cu, **cuts) for x, d in rows]
    return [*whole, *shared]


def judge(case: Case, ranks: int, results: list[Tensor]) -> str:
    """What is wrong with the results of all rows; "" if nothing is. Gradients of sinks and bias follow those
    of q, k and v, summed over ranks."""
    tensors = case.tensors(ranks)
    want, one = _oracle(case, tensors), _one_device(case, tensors)
    names = (*NAMES, *(f"d{n}" for n in ("sinks", "bias") if n in case.options()))
    for name, got, right, near in zip(names, results, want, one, strict=True):
        if got.shape != right.shape or (
            name != "lse" and not name.startswith(("ds", "db")) and got.dtype is not case.dtype
        ):
            return f"{case}: {name} is {got.dtype} {tuple(got.shape)}, not {tuple(right.shape)}"
        right = right.double()
        if not torch.equal(got.isinf(), right.isinf()) or got.isnan().any():
            return f"{case}: {name} has other infinities, or NaN"
        eps = max(torch.finfo(x).eps for x in (got.dtype, case.dtype if name != "lse" else got.dtype))
        got, near, right = (torch.where(x.isinf(), 0.0, x.double()) for x in (got, near, right))
        if not right.numel():
            continue
        unit = (8 if eps < 1e-9 else 2) * eps * float(right.abs().max()) + (0.0 if eps < 1e-9 else 1e-6)
        few = 1 if ranks <= 8 else 2
        most = few * (2 if name in ("out", "lse") else 3) * float((near - right).abs().max()) + unit
        error = float((got - right).abs().max())
        if not error <= most:
            return f"{case}: {name} is off by {error:.3g}, at most {most:.3g}"
    return ""


def _differentiated(case: Case, tensors: list[Tensor], attend: Callable[..., Any]) -> list[Tensor]:
    options = case.options()
    shared = {n: options[n].detach().clone().requires_grad_() for n in ("sinks", "bias") if n in options}
    q, k, v = (x.detach().clone().requires_grad_() for x in tensors[:3])
    out, lse = attend(q, k, v, options | shared)
    loss = (out * tensors[3]).sum(dtype=torch.float64) + (
        lse.masked_fill(lse.isinf(), 0.0) * tensors[4]
    ).sum()
    loss.backward()
    leaves = [q, k, v, *shared.values()]
    return [out.detach(), lse.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]


def _bounds(case: Case) -> Tensor:
    return torch.tensor([0, *case.members]).cumsum(0).int()


def _oracle(case: Case, tensors: list[Tensor]) -> list[Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
        if case.members:
            return varlen_reference(q, k, v, _bounds(case), _bounds(case), **options)
        return attention_reference(q, k, v, layout=case.layout, **options)

    return _differentiated(case, [x.double() for x in tensors], attend)


def _one_device(case: Case, tensors: list[Tensor]) -> list[Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
        if case.members:
            cu = _bounds(case)
            return polyflash.attention_varlen(q, k, v, cu, cu, return_lse=True, **options)
        return polyflash.attention(q, k, v, layout=case.layout, return_lse=True, **options)

    return _differentiated(case, tensors, attend)
