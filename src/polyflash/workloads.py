"""Attention problems as plain data: what `bench` ("bench"), `tune` ("tune"), `doctor` and `warmup` run.

A `Workload` is a frozen description without tensors; `make()` builds its tensors from a seed. The problems of
the tests are in tests/catalogue.py, their input families in tests/families.py."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from polyflash.mask import Mask
from polyflash.spec import AttentionSpec, Feature, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Workload:
    """One problem: lengths and head dims in elements, options as plain values.

    `mask` and `bias` name the broadcast form of their tensor, one letter per dimension out of "bhqk", "1"
    where the dimension is broadcast and fewer letters for fewer dimensions: "b11k" is a key padding mask,
    "qk" one for all. `intervals` names that of interval lists likewise, out of "bhr1", r for row blocks.
    With `members`, q, k, v are packed, (total, heads, head_dim): `seqlen_q` and `seqlen_k` are the totals, of
    which the members may leave a tail, and what is per request is per member.
    With `page_size`, k and v are pools of shuffled pages for `attention_paged`, `seqlen_k` is the longest
    request's, and q is one row per request, or packed members, whose keys are then their live lengths."""

    name: str
    tags: frozenset[str]
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int = 0  # 0: as head_dim
    dtype: str = "float32"
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    offset: int | tuple[int, ...] | None = None  # q_offset: one int, or one per request
    kv_lens: tuple[int, ...] | None = None
    kv_starts: tuple[int, ...] | None = None
    mask: str = ""
    bias: str = ""
    bias_dtype: str = ""  # "": as q
    segments: int = 0  # number of distinct ids
    alibi: str = ""  # "h": one slope per head, "bh": per request and head
    softcap: float = 0.0
    sinks: bool = False
    scale: float | None = None
    intervals: str = ""
    interval_rows: int = 64
    members: tuple[tuple[int, int], ...] = ()  # (rows, keys) of each packed member
    page_size: int = 0  # keys per page; 0: contiguous ones

    @property
    def requests(self) -> int:
        return len(self.members) or self.batch

    @property
    def lens(self) -> tuple[int, ...]:
        """Live keys of each request."""
        return self.kv_lens or tuple(n for _, n in self.members) or (self.seqlen_k,) * self.batch

    @property
    def columns(self) -> int:
        """Columns of the page table: one more than the longest request needs."""
        return -(-self.seqlen_k // self.page_size) + 1

    @property
    def dim_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def features(self) -> frozenset[Feature]:
        """The features a capability row must have to run this, `Feature.LSE` left out."""
        named = {f: getattr(self, _FIELDS.get(f, f.name.lower()), None) for f in Feature}
        wanted = {feature for feature, value in named.items() if value and value != (None, None)}
        told = {
            Feature.Q_OFFSET: self.offset is not None or self.causal == "top_left",
            Feature.KV_LENS: self.kv_lens is not None or bool(self.page_size),
            Feature.GQA: self.heads != self.kv_heads,
            Feature.HEAD_DIM_V: self.dim_v != self.head_dim,
        }
        return frozenset((wanted - set(told)) | {feature for feature, on in told.items() if on})

    def spec(
        self, *, phase: Phase = Phase.FORWARD, device: str = "cpu", need_lse: bool = False
    ) -> AttentionSpec:
        """The spec this problem has when planned: enough to ask every capability row."""
        offset = 0 if self.causal == "top_left" and self.offset is None else self.offset
        keys = self.columns * self.page_size if self.page_size else self.seqlen_k
        sizes = (self.batch, self.heads, self.kv_heads, self.seqlen_q, keys, self.head_dim, self.dim_v)
        features = self.features | ({Feature.LSE} if need_lse else frozenset())
        rest: dict[str, Any] = {"causal": bool(self.causal), "window": self.window or (None, None)}
        rest |= {"offset": offset if isinstance(offset, int) else None, "scale": self.scale}
        rest |= {"members": len(self.members), "page_size": self.page_size}
        return AttentionSpec(phase, self.dtype, device, *sizes, features, **rest)


# Where a field has another name than the feature that a call with it needs.
_FIELDS = {Feature.VARLEN: "members", Feature.PAGED: "page_size"}


def make(
    workload: Workload, *, seed: int = 0, device: str = "cpu", family: Callable[..., Any] | None = None
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Tensors of a workload: q (batch, heads, seqlen_q, head_dim), k, v, and the keyword arguments of
    `attention`; packed, q (total_q, heads, head_dim), k, v, and those of `attention_varlen`; in pages,
    q (total_q or batch, heads, head_dim), k_pages, v_pages, and those of `attention_paged`.

    The same seed gives the same tensors on every device. Values are drawn in float32 (float64 for float64),
    changed by `family` (q, k, v, dtype, generator) if there is one, and rounded once to the storage dtype."""
    with torch.device("cpu"):
        *tensors, options = _made(workload, seed, family)
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    q, k, v = (x.to(device) for x in tensors)
    return q, k, v, options


def _made(w: Workload, seed: int, family: Callable[..., Any] | None) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, w.dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=wide)

    entries = w.requests if w.page_size else w.batch
    q = draw(w.batch, w.heads, w.seqlen_q, w.head_dim)
    k = draw(entries, w.kv_heads, w.seqlen_k, w.head_dim)
    v = draw(entries, w.kv_heads, w.seqlen_k, w.dim_v)
    q, k, v = (q, k, v) if family is None else family(q, k, v, dtype, generator)
    options = _options(w, generator)
    if w.page_size:
        q = q[0].transpose(0, 1).contiguous() if w.members else q[:, :, 0]
        k, v, options["page_table"] = in_pages(k, v, w.lens, w.page_size, generator, columns=w.columns)
        options["kv_lens"] = torch.tensor(w.lens, dtype=torch.int32)
    elif w.members:
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    return q.to(dtype), k.to(dtype), v.to(dtype), options


def in_pages(
    k: Tensor,
    v: Tensor,
    lens: Sequence[int],
    page_size: int,
    generator: torch.Generator,
    *,
    columns: int = 0,
    spare: int = 2,
) -> tuple[Tensor, Tensor, Tensor]:
    """The first lens[b] keys of each request of k, v (batch, kv_heads, seqlen_k, ·) in shuffled pages.

    Returns pools (num_pages, page_size, kv_heads, ·) with `spare` pages of nobody, and the table, int32
    (batch, columns). What no request has is poison: NaN in the slots, random bits in the table."""
    pages = [-(-n // page_size) for n in lens]
    columns = columns or max(pages, default=0)
    ids = torch.randperm(sum(pages) + spare, generator=generator)
    live = torch.arange(columns) < torch.tensor(pages, dtype=torch.int64)[:, None]
    table = torch.randint(-(2**31), 2**31, live.shape, generator=generator)
    table[live] = ids[: len(ids) - spare]
    pools = []
    for x in (k, v):
        padded = x.new_full((len(pages), columns * page_size, x.shape[1], x.shape[3]), torch.nan)
        for b, n in enumerate(lens):
            padded[b, :n] = x[b, :, :n].transpose(0, 1)
        pool = x.new_full((len(ids), page_size, x.shape[1], x.shape[3]), torch.nan)
        pool[table[live]] = padded.view(*live.shape, page_size, *padded.shape[2:])[live]
        pools.append(pool)
    return pools[0], pools[1], table.to(torch.int32)


def _options(w: Workload, generator: torch.Generator) -> dict[str, Any]:
    """The keyword arguments beyond q, k, v; only those that are not at their default."""
    kwargs: dict[str, Any] = {}
    for name in ("causal", "window", "scale", "softcap"):
        value = getattr(w, name)
        if value is not None and (value or name == "scale"):
            kwargs[name] = value
    if isinstance(w.offset, tuple):
        kwargs["q_offset"] = torch.tensor(w.offset, dtype=torch.int32)
    elif w.offset is not None:
        kwargs["q_offset"] = w.offset
    for name in ("kv_lens", "kv_starts"):
        if getattr(w, name) is not None:
            kwargs[name] = torch.tensor(getattr(w, name), dtype=torch.int32)
    if w.mask:
        kwargs["mask"] = random_mask(_form(w, w.mask), generator)
    if w.bias:
        bias = 2 * torch.randn(_form(w, w.bias), generator=generator)
        hidden = torch.rand(bias.shape, generator=generator) < 0.1
        kwargs["bias"] = bias.masked_fill(hidden, -torch.inf).to(getattr(torch, w.bias_dtype or w.dtype))
    if w.intervals:
        kwargs["mask"] = random_intervals(w, generator)
    totals = (w.seqlen_q,) if w.page_size else (w.seqlen_q, w.seqlen_k)
    for side, total in enumerate(totals if w.members else ()):
        bounds = [0, *accumulate(member[side] for member in w.members)]
        if bounds[-1] > total:
            raise ValueError(f"{w.name}: members end at {bounds[-1]}, beyond the total {total}")
        kwargs[f"cu_seqlens_{'qk'[side]}"] = torch.tensor(bounds, dtype=torch.int32)
    if w.segments:
        kwargs["mask"] = _segments(w, generator) if "mask" not in kwargs else kwargs["mask"]
    if w.alibi:
        shape = (w.heads,) if w.alibi == "h" else (w.requests, w.heads)
        kwargs["alibi_slopes"] = torch.rand(shape, generator=generator)
    if w.sinks:
        kwargs["sinks"] = torch.randn(w.heads, generator=generator)
    return kwargs


def random_mask(shape: tuple[int, ...], generator: torch.Generator, keep: float = 0.7) -> Tensor:
    """A bool mask, True = attend, whose first row (where it has rows) hides every key."""
    mask = torch.rand(shape, generator=generator) < keep
    if len(shape) >= 2 and shape[-2] > 1:
        mask[..., 0, :] = False
    return mask


def random_intervals(w: Workload, generator: torch.Generator) -> Mask:
    """Interval lists of up to four runs with holes between them, empty ones among them; the first row block
    sees nothing where there are several, and the last run of some lists overhangs the keys."""
    sizes = {"b": w.batch, "h": w.heads, "r": -(-w.seqlen_q // w.interval_rows), "1": 1}
    shape = tuple(sizes[letter] for letter in w.intervals)
    bounds = torch.randint(0, w.seqlen_k + w.seqlen_k // 4 + 1, (*shape, 8), generator=generator).int()
    bounds = bounds.sort(-1).values.view(*shape, 4, 2)
    empty = torch.rand((*shape, 4), generator=generator) < 0.2
    if shape[-1] > 1:
        empty[..., 0, :] = True
    starts, ends = bounds.unbind(-1)
    return Mask.intervals(starts, torch.where(empty, starts, ends), rows=w.interval_rows)


def _segments(w: Workload, generator: torch.Generator) -> Mask:
    shapes = ((w.batch, w.seqlen_q), (w.batch, w.seqlen_k))
    ids = [torch.randint(w.segments, shape, generator=generator).int() for shape in shapes]
    return Mask.segments(*(x.sort(-1).values for x in ids))


def _form(w: Workload, form: str) -> tuple[int, ...]:
    sizes = {"b": w.batch, "h": w.heads, "q": w.seqlen_q, "k": w.seqlen_k, "1": 1}
    return tuple(sizes[letter] for letter in form)


_BENCH = frozenset({"bench", "tune"})


def _bench() -> tuple[Workload, ...]:
    made = []
    for dtype in ("float32", "bfloat16", "float16"):
        for head_dim, n, causal in itertools.product((64, 128), (512, 2048, 8192), (False, True)):
            name = f"{'causal' if causal else 'full'}-{dtype}-{n}-d{head_dim}"
            made.append(Workload(name, _BENCH, 1, 8, 8, n, n, head_dim, 0, dtype, causal))
        made.append(Workload(f"gqa-{dtype}-2048-d64", _BENCH, 1, 8, 2, 2048, 2048, 64, 0, dtype, True))
        name, window = f"window-{dtype}-8192-d64", (255, None)
        made.append(Workload(name, _BENCH, 1, 8, 8, 8192, 8192, 64, 0, dtype, True, window))
    return tuple(made)


CATALOGUE = _bench()


def workloads(tag: str) -> tuple[Workload, ...]:
    """Every workload that carries `tag`, in catalogue order."""
    return tuple(w for w in CATALOGUE if tag in w.tags)
