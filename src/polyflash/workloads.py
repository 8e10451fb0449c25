"""Named attention problems, shared by tests ("ci"), benchmarks ("bench") and tuning ("tune").

A `Workload` is a frozen description without tensors; `make()` builds its tensors from a seed and an input
family. Families matter as much as shapes: several published defects are invisible on normal inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from polyflash.mask import Mask
from polyflash.spec import AttentionSpec, Feature, Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Triple = tuple[Tensor, Tensor, Tensor]
    Family = Callable[[Tensor, Tensor, Tensor, torch.dtype, torch.Generator], Triple]

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, slots=True)
class Workload:
    """One problem: lengths and head dims in elements, options as plain values.

    `mask` and `bias` name the broadcast form of their tensor, one letter per dimension out of "bhqk", "1"
    where the dimension is broadcast and fewer letters for fewer dimensions: "b11k" is a key padding mask,
    "qk" one for all. `intervals` names that of interval lists likewise, out of "bhr1", r for row blocks.
    With `members`, q, k, v are packed, (total, heads, head_dim): `seqlen_q` and `seqlen_k` are the totals, of
    which the members may leave a tail, and what is per request is per member."""

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

    @property
    def requests(self) -> int:
        return len(self.members) or self.batch

    @property
    def dim_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def features(self) -> frozenset[Feature]:
        """What a capability row must have to run this, `Feature.LSE` left out."""
        wanted = {
            Feature.CAUSAL: bool(self.causal),
            Feature.WINDOW: self.window not in (None, (None, None)),
            Feature.Q_OFFSET: self.offset is not None or self.causal == "top_left",
            Feature.KV_LENS: self.kv_lens is not None,
            Feature.KV_STARTS: self.kv_starts is not None,
            Feature.MASK: bool(self.mask),
            Feature.BIAS: bool(self.bias),
            Feature.SEGMENTS: bool(self.segments),
            Feature.INTERVALS: bool(self.intervals),
            Feature.VARLEN: bool(self.members),
            Feature.ALIBI: bool(self.alibi),
            Feature.SOFTCAP: self.softcap != 0.0,
            Feature.SINKS: self.sinks,
            Feature.GQA: self.heads != self.kv_heads,
            Feature.HEAD_DIM_V: self.dim_v != self.head_dim,
        }
        return frozenset(feature for feature, on in wanted.items() if on)

    def spec(
        self, *, phase: Phase = Phase.FORWARD, device: str = "cpu", need_lse: bool = False
    ) -> AttentionSpec:
        """The spec this problem has when planned: enough to ask every capability row."""
        offset = 0 if self.causal == "top_left" and self.offset is None else self.offset
        return AttentionSpec(
            phase=phase,
            dtype=self.dtype,
            device=device,
            batch=self.batch,
            num_q_heads=self.heads,
            num_kv_heads=self.kv_heads,
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_k,
            head_dim=self.head_dim,
            head_dim_v=self.dim_v,
            features=self.features | ({Feature.LSE} if need_lse else frozenset()),
            causal=bool(self.causal),
            window=self.window or (None, None),
            offset=offset if isinstance(offset, int) else None,
            scale=self.scale,
            members=len(self.members),
        )


def with_dtype(workload: Workload, dtype: str) -> Workload:
    """The same problem in another storage dtype."""
    return replace(workload, dtype=dtype)


def workloads(tag: str) -> tuple[Workload, ...]:
    """Every workload that carries `tag`, in catalogue order."""
    return tuple(w for w in CATALOGUE if tag in w.tags)


def named(name: str) -> Workload:
    """The workload of that name; `KeyError` lists what there is."""
    for w in CATALOGUE:
        if w.name == name:
            return w
    raise KeyError(f"workload: got {name!r}, wanted one of {', '.join(w.name for w in CATALOGUE)}")


def make(
    workload: Workload, *, seed: int = 0, family: str = "normal", device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Tensors of a workload: q (batch, heads, seqlen_q, head_dim), k, v, and the keyword arguments of
    `attention`; packed, q (total_q, heads, head_dim), k, v, and those of `attention_varlen`.

    The same seed gives the same tensors on every device. Values are drawn in float32 (float64 for float64)
    and rounded once to the storage dtype."""
    w = workload
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, w.dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=wide)

    q = draw(w.batch, w.heads, w.seqlen_q, w.head_dim)
    k = draw(w.batch, w.kv_heads, w.seqlen_k, w.head_dim)
    v = draw(w.batch, w.kv_heads, w.seqlen_k, w.dim_v)
    q, k, v = FAMILIES[family](q, k, v, dtype, generator)
    options = {
        name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in _options(w, generator).items()
    }
    if w.members:
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    return q.to(dtype).to(device), k.to(dtype).to(device), v.to(dtype).to(device), options


def _options(w: Workload, generator: torch.Generator) -> dict[str, Any]:
    """The keyword arguments beyond q, k, v; only those that are not at their default."""
    kwargs: dict[str, Any] = {}
    for name in ("causal", "window", "scale", "softcap"):
        value = getattr(w, name)
        if value not in (None, False, 0.0):
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
    for side, total in enumerate((w.seqlen_q, w.seqlen_k) if w.members else ()):
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
    ids = [
        torch.randint(w.segments, (w.batch, n), generator=generator).int() for n in (w.seqlen_q, w.seqlen_k)
    ]
    return Mask.segments(ids[0].sort(-1).values, ids[1].sort(-1).values)


def _form(w: Workload, form: str) -> tuple[int, ...]:
    sizes = {"b": w.batch, "h": w.heads, "q": w.seqlen_q, "k": w.seqlen_k, "1": 1}
    return tuple(sizes[letter] for letter in form)


# Input families: (q, k, v, storage dtype, generator) -> (q, k, v), in the wide dtype.


def _normal(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Triple:
    return q, k, v


def _scaled(factor: float) -> Family:
    return lambda q, k, v, dtype, generator: (q * factor, k * factor, v * factor)


def _channels(k: Tensor, count: int) -> Tensor:
    """`count` channels spread over the head dim, the same in every head."""
    return torch.arange(min(count, k.shape[-1])) * max(1, k.shape[-1] // count) % k.shape[-1]


def _kbias(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Triple:
    at = _channels(k, 6)
    shift = torch.linspace(8, 12, len(at)) * (1 - 2 * (torch.arange(len(at)) % 2))
    k[..., at] += shift.to(k.dtype)
    return q, k, v


def _qkbias(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Triple:
    at = _channels(q, 6)
    q[..., at] += (torch.linspace(2, 5, len(at)) * (1 - 2 * (torch.arange(len(at)) % 2))).to(q.dtype)
    return _kbias(q, k, v, dtype, generator)


def _kscale(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Triple:
    k[..., _channels(k, 4)] *= 8
    return q, k, v


def _sparse(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Triple:
    def spikes(x: Tensor) -> Tensor:
        hit = torch.rand(x.shape, generator=generator) < 0.001
        return x + 10 * torch.randn(x.shape, generator=generator).to(x.dtype) * hit

    return spikes(q), spikes(k), spikes(v)


def _sharp(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Triple:
    return 3 * q, k, v


def _vbias(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Triple:
    return q, k, v + 5


def _sink(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Triple:
    """The first key scores 4 more than it would, for every row."""
    q[..., 0] = 1
    k[..., :1, 0] += 4 * q.shape[-1] ** 0.5
    return q, k, v


def _slope(sign: int) -> Family:
    """Scores that rise (or fall) by 6 per 64 keys, so that the row maximum moves at every block (or at
    none)."""

    def family(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Triple:
        q[..., 0] = 1
        steps = torch.arange(k.shape[-2], dtype=k.dtype) * (6 / 64)
        k[..., 0] = sign * steps * q.shape[-1] ** 0.5
        return q, k, v

    return family


def _equal(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Triple:
    return q, k[..., :1, :].expand_as(k).clone(), v


def _zeros(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Triple:
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def _onehot(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Triple:
    def hot(x: Tensor) -> Tensor:
        at = torch.arange(x.shape[-2]) % x.shape[-1]
        return torch.zeros_like(x).scatter_(-1, at.view(-1, 1).expand(*x.shape[:-1], 1), 8.0)

    return hot(q), hot(k), v


def _huge(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Triple:
    """The largest magnitudes with a finite answer: powers of two, so that equal scores tie exactly in
    float32.

    A kernel that divides by the row sum last holds a sum of seqlen_k values, so V leaves that room below the
    maximum of the accumulator (float16 accumulates in float32 and needs none)."""
    narrow = dtype is torch.float16
    size = 2.0**15 if narrow else 2.0**60
    room = 1 if narrow else 4 * max(1, k.shape[-2])
    return q.sign() * size, k.sign() * size, v.sign() * (torch.finfo(dtype).max / room)


def _subnormal(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Triple:
    tiny = torch.finfo(dtype).smallest_normal / 4
    return q * tiny, k * tiny, v * tiny


def _alternating(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Triple:
    sign = (1 - 2 * (torch.arange(k.shape[-2]) % 2)).to(k.dtype)[:, None]
    return q, sign * k.abs(), sign * v.abs()


def _nanrow(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Triple:
    """One value row is NaN: exactly the query rows that see it must be."""
    if v.numel():
        v[0, 0, v.shape[2] // 2] = torch.nan
    return q, k, v


FAMILIES: dict[str, Family] = {
    "normal": _normal,
    "x4": _scaled(4),
    "x10": _scaled(10),
    "kbias": _kbias,
    "qkbias": _qkbias,
    "kscale": _kscale,
    "sparse": _sparse,
    "sharp": _sharp,
    "vbias": _vbias,
    "sink": _sink,
    "rising": _slope(1),
    "falling": _slope(-1),
    "equal": _equal,
    "zeros": _zeros,
    "onehot": _onehot,
    "huge": _huge,
    "subnormal": _subnormal,
    "alternating": _alternating,
    "nanrow": _nanrow,
}

_CI = frozenset({"ci"})
_BENCH = frozenset({"bench", "tune"})

_CORRECTNESS = (
    Workload("single", _CI, 1, 1, 1, 1, 1, 64),
    Workload("self", _CI, 2, 3, 3, 65, 65, 64),
    Workload("cross", _CI, 1, 2, 2, 33, 257, 64),
    Workload("tall", _CI, 1, 2, 2, 257, 33, 80),
    Workload("long", _CI, 1, 1, 1, 70, 1100, 64),
    Workload("decode", _CI, 3, 8, 2, 1, 129, 128, causal=True),
    Workload("chunk", _CI, 1, 6, 2, 17, 129, 64, causal=True),
    Workload("causal", _CI, 1, 1, 1, 280, 280, 128, causal=True),
    Workload("causal-tall", _CI, 2, 2, 1, 129, 65, 64, causal=True),
    Workload("causal-top-left", _CI, 1, 2, 2, 65, 129, 64, causal="top_left"),
    Workload("offset", _CI, 1, 2, 2, 65, 200, 64, causal=True, offset=77),
    Workload("offset-negative", _CI, 1, 2, 2, 65, 100, 64, causal=True, offset=-20),
    Workload("offset-per-request", _CI, 3, 2, 1, 65, 200, 64, causal=True, offset=(0, 40, 135)),
    Workload("window", _CI, 1, 2, 2, 200, 200, 64, window=(31, 17)),
    Workload("window-left", _CI, 1, 2, 1, 150, 150, 64, window=(40, None)),
    Workload("window-right", _CI, 1, 2, 1, 150, 150, 64, window=(None, 5)),
    Workload("window-causal", _CI, 1, 2, 1, 260, 260, 64, causal=True, window=(63, None)),
    Workload("window-self", _CI, 1, 2, 2, 100, 100, 64, window=(0, 0)),
    Workload("window-tall", _CI, 1, 2, 2, 300, 100, 64, window=(16, 16)),
    Workload("window-offset", _CI, 2, 2, 2, 65, 300, 64, window=(20, 3), offset=(10, 250)),
    Workload("lens", _CI, 3, 4, 2, 33, 129, 64, kv_lens=(0, 77, 129)),
    Workload("lens-causal", _CI, 4, 2, 2, 40, 129, 64, causal=True, kv_lens=(129, 40, 7, 0)),
    Workload("starts", _CI, 3, 2, 1, 33, 129, 64, kv_starts=(0, 64, 129)),
    Workload("ragged-window", _CI, 3, 4, 1, 50, 160, 64, causal=True, window=(30, None), kv_lens=(160, 100,
    20), kv_starts=(5, 90, 20)),
    Workload("mask-dense", _CI, 2, 4, 2, 65, 130, 64, mask="bhqk"),
    Workload("mask-keys", _CI, 2, 4, 2, 65, 130, 64, mask="b11k"),
    Workload("mask-shared", _CI, 2, 4, 2, 65, 130, 64, mask="qk"),
    Workload("mask-rows", _CI, 2, 4, 2, 65, 130, 64, mask="b1q1"),
    Workload("mask-heads", _CI, 2, 4, 2, 65, 130, 64, mask="1h1k"),
    Workload("mask-causal", _CI, 2, 4, 2, 100, 130, 64, mask="b1qk", causal=True),
    Workload("mask-lens-window", _CI, 2, 2, 2, 100, 130, 64, mask="hqk", window=(50, 20), kv_lens=(130, 61)),
    Workload("bias-dense", _CI, 2, 4, 2, 65, 130, 64, bias="bhqk"),
    Workload("bias-shared", _CI, 2, 4, 2, 65, 130, 64, bias="qk", bias_dtype="float32"),
    Workload("bias-keys-causal", _CI, 2, 4, 2, 65, 130, 64, bias="b11k", causal=True),
    Workload("alibi", _CI, 2, 4, 2, 65, 130, 64, alibi="h", causal=True),
    Workload("alibi-per-request", _CI, 2, 4, 2, 65, 130, 64, alibi="bh"),
    Workload("softcap", _CI, 1, 4, 2, 65, 130, 64, softcap=5.0),
    Workload("sinks", _CI, 2, 4, 2, 65, 130, 64, sinks=True, causal=True, kv_lens=(130, 0)),
    Workload("segments", _CI, 2, 2, 2, 100, 130, 64, segments=4),
    Workload("segments-causal", _CI, 2, 4, 2, 130, 130, 64, segments=3, causal=True),
    Workload("everything", _CI, 2, 4, 2, 65, 130, 64, 48, causal=True, window=(70, None), kv_lens=(130, 90),
    kv_starts=(3, 0), mask="b1qk", bias="1hqk", alibi="h", softcap=8.0, sinks=True),
    Workload("intervals", _CI, 1, 2, 2, 200, 260, 64, intervals="r"),
    Workload("intervals-heads", _CI, 2, 4, 2, 130, 200, 64, 48, intervals="bhr", interval_rows=16),
    Workload("intervals-batch", _CI, 2, 4, 2, 70, 200, 64, intervals="br", interval_rows=7),
    Workload("intervals-rows", _CI, 2, 4, 1, 33, 130, 64, intervals="1hr", interval_rows=1),
    Workload("intervals-causal", _CI, 1, 2, 2, 200, 260, 64, causal=True, intervals="r"),
    Workload("intervals-decode", _CI, 3, 8, 2, 1, 300, 64, causal=True, intervals="bhr", interval_rows=1),
    Workload("intervals-lens-window", _CI, 2, 4, 2, 100, 300, 64, window=(120, 10), kv_lens=(300, 170),
    kv_starts=(0, 9), intervals="b1r", interval_rows=32),
    Workload("dim-v-smaller", _CI, 1, 2, 1, 65, 130, 192, 128, causal=True),
    Workload("dim-v-larger", _CI, 1, 2, 2, 65, 130, 40, 96),
    Workload("scale-given", _CI, 1, 2, 2, 65, 130, 64, scale=0.3),
)  # fmt: skip

_VARLEN = frozenset({"varlen"})
_MEMBERS = ((33, 70), (1, 130), (0, 20), (65, 65), (20, 0), (7, 3), (0, 0), (64, 128))
_STEP = ((1, 5), (1, 130), (1, 0), (0, 64), (1, 64), (1, 65))


def _packed(name: str, members: tuple[tuple[int, int], ...], *, tail: int = 5, **options: Any) -> Workload:
    """Packed members with `tail` rows and keys that belong to none."""
    rows, keys = (sum(lengths) + tail for lengths in zip(*members, strict=True))
    return replace(Workload(name, _VARLEN, 1, 4, 2, rows, keys, 64, members=members), **options)


_PACKED = (
    _packed("packed", _MEMBERS),
    _packed("packed-whole", _MEMBERS, tail=0, causal=True),
    _packed("packed-causal", _MEMBERS, causal=True),
    _packed("packed-top-left", _MEMBERS, causal="top_left"),
    _packed("packed-window", _MEMBERS, window=(20, 5)),
    _packed("packed-window-causal", _MEMBERS, causal=True, window=(30, None)),
    _packed("packed-decode", _STEP, causal=True, heads=8, tail=0),
    _packed("packed-decode-tail", _STEP, heads=6, head_dim=128),
    _packed("packed-equal", ((16, 48),) * 5, causal=True),
    _packed("packed-short", ((1, 1),) * 9 + ((2, 1), (1, 2)), causal=True),
    _packed("packed-one", ((90, 130),), causal=True, tail=0),
    _packed("packed-lens", _MEMBERS, kv_lens=(50, 0, 20, 65, 0, 1, 0, 77), causal=True),
    _packed("packed-starts", _MEMBERS, kv_starts=(5, 130, 1, 0, 0, 2, 0, 64)),
    _packed("packed-offset", _MEMBERS, causal=True, offset=(0, 9, 3, -20, 0, 1, 5, 100)),
    _packed("packed-offset-one", _MEMBERS, causal=True, offset=17),
    _packed("packed-alibi", _MEMBERS, causal=True, alibi="h"),
    _packed("packed-alibi-members", _MEMBERS, alibi="bh"),
    _packed("packed-softcap", _MEMBERS, softcap=5.0),
    _packed("packed-sinks", _MEMBERS, sinks=True, causal=True),
    _packed("packed-dim-v", _MEMBERS, head_dim=40, head_dim_v=96),
    _packed("packed-group-3", _MEMBERS, heads=9, kv_heads=3, causal=True),
    _packed("packed-everything", _MEMBERS, causal=True, window=(60, None), kv_lens=(70, 90, 0, 60, 0, 3, 0,
    128), kv_starts=(1, 0, 0, 5, 0, 1, 0, 9), alibi="bh", softcap=8.0, sinks=True, head_dim_v=48),
)  # fmt: skip


def _bench() -> tuple[Workload, ...]:
    rows = []
    for dtype in ("float32", "bfloat16", "float16"):
        for head_dim in (64, 128):
            for seqlen in (512, 2048, 8192):
                for causal in (False, True):
                    kind = "causal" if causal else "full"
                    name = f"{kind}-{dtype}-{seqlen}-d{head_dim}"
                    rows.append(
                        Workload(name, _BENCH, 1, 8, 8, seqlen, seqlen, head_dim, dtype=dtype, causal=causal)
                    )
        rows.append(
            Workload(f"gqa-{dtype}-2048-d64", _BENCH, 1, 8, 2, 2048, 2048, 64, dtype=dtype, causal=True)
        )
        name = f"window-{dtype}-8192-d64"
        window = (255, None)
        rows.append(Workload(name, _BENCH, 1, 8, 8, 8192, 8192, 64, dtype=dtype, causal=True, window=window))
    return tuple(rows)


CATALOGUE = _CORRECTNESS + _PACKED + _bench()
