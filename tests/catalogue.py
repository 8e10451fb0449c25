"""The problems of the tests: small ones for every feature ("ci"), packed members ("varlen"), steps of
generation ("decode") and pages ("paged"), beside those that the package benches and tunes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyflash.workloads import CATALOGUE as TIMED
from polyflash.workloads import Workload

DTYPES = ("float32", "bfloat16", "float16", "float64")
_CI = frozenset({"ci"})

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


_DECODE = frozenset({"decode"})
_STEPS = (
    Workload("step", _DECODE, 2, 4, 4, 1, 1300, 64),
    Workload("step-one-key", _DECODE, 1, 4, 4, 1, 1, 64, causal=True),
    Workload("step-group-2", _DECODE, 3, 4, 2, 1, 257, 64, causal=True),
    Workload("step-group-3", _DECODE, 1, 6, 2, 1, 700, 96),
    Workload("step-group-5", _DECODE, 2, 10, 2, 1, 129, 80, causal=True),
    Workload("step-group-7", _DECODE, 1, 14, 2, 1, 333, 40),
    Workload("step-group-8", _DECODE, 1, 8, 1, 1, 1100, 128, causal=True),
    Workload("step-one-kv-head", _DECODE, 1, 6, 1, 1, 2049, 64),
    Workload("step-rows-2", _DECODE, 2, 4, 2, 2, 513, 64, causal=True),
    Workload("step-rows-3", _DECODE, 1, 4, 2, 3, 200, 64),
    Workload("step-rows-4", _DECODE, 1, 4, 1, 4, 1500, 128, causal=True),
    Workload("step-rows-5", _DECODE, 2, 3, 1, 5, 1025, 64, causal=True),
    Workload("step-rows-8", _DECODE, 1, 4, 4, 8, 65, 64, causal=True),
    Workload("step-rows-64", _DECODE, 1, 8, 1, 8, 1100, 64, causal=True),
    Workload("step-tall", _DECODE, 1, 4, 4, 8, 5, 64, causal=True),
    Workload("step-top-left", _DECODE, 1, 4, 4, 8, 130, 64, causal="top_left"),
    Workload("step-window", _DECODE, 2, 4, 2, 1, 900, 64, causal=True, window=(255, None)),
    Workload("step-window-both", _DECODE, 2, 4, 2, 3, 900, 64, window=(300, 7), offset=(500, 20)),
    Workload("step-window-rows", _DECODE, 1, 4, 1, 6, 1400, 64, causal=True, window=(1100, None)),
    Workload("step-lens", _DECODE, 4, 4, 2, 1, 1300, 64, causal=True, kv_lens=(1300, 0, 1, 511)),
    Workload("step-lens-rows", _DECODE, 4, 4, 2, 4, 1100, 64, causal=True, kv_lens=(1100, 0, 3, 257)),
    Workload("step-starts", _DECODE, 3, 4, 2, 1, 1300, 64, kv_starts=(0, 700, 1300)),
    Workload("step-offset", _DECODE, 3, 4, 2, 2, 700, 64, causal=True, offset=(0, 650, -2)),
    Workload("step-softcap", _DECODE, 2, 4, 2, 1, 600, 64, softcap=5.0),
    Workload("step-sinks", _DECODE, 3, 4, 2, 1, 1300, 64, sinks=True, kv_lens=(1300, 0, 600)),
    Workload("step-sinks-rows", _DECODE, 2, 8, 2, 3, 1300, 64, sinks=True, causal=True, kv_lens=(1300, 2)),
    Workload("step-alibi", _DECODE, 2, 4, 2, 1, 600, 64, alibi="h", causal=True),
    Workload("step-alibi-rows", _DECODE, 2, 4, 2, 3, 600, 64, alibi="bh"),
    Workload("step-mask-keys", _DECODE, 2, 4, 2, 1, 700, 64, mask="b11k"),
    Workload("step-mask", _DECODE, 2, 4, 2, 4, 300, 64, mask="bhqk"),
    Workload("step-bias", _DECODE, 2, 4, 2, 1, 700, 64, bias="1h1k"),
    Workload("step-segments", _DECODE, 2, 4, 2, 4, 700, 64, segments=3),
    Workload("step-intervals", _DECODE, 3, 4, 2, 2, 700, 64, intervals="bhr", interval_rows=1),
    Workload("step-dim-1", _DECODE, 2, 4, 2, 1, 300, 1),
    Workload("step-dim-3", _DECODE, 2, 4, 2, 2, 300, 3, causal=True),
    Workload("step-dim-16", _DECODE, 2, 4, 2, 1, 300, 16),
    Workload("step-dim-256", _DECODE, 1, 4, 2, 1, 530, 256, causal=True),
    Workload("step-dim-v-smaller", _DECODE, 1, 4, 2, 2, 530, 192, 128, causal=True),
    Workload("step-dim-v-larger", _DECODE, 1, 4, 2, 1, 530, 40, 96),
    Workload("step-latent", _DECODE, 1, 8, 1, 1, 300, 576, 512),
    Workload("step-scale", _DECODE, 1, 4, 2, 1, 530, 64, scale=-0.3),
    Workload("step-everything", _DECODE, 3, 4, 2, 3, 700, 64, 48, causal=True, window=(400, None),
    kv_lens=(700, 0, 390), kv_starts=(3, 0, 300), alibi="bh", softcap=8.0, sinks=True),
)  # fmt: skip

_PAGED = frozenset({"paged"})
_MIXED = ((1, 130), (33, 70), (0, 20), (1, 1), (64, 128), (1, 0), (5, 257), (1, 300))


def _pages(name: str, page_size: int, **options: Any) -> Workload:
    """One token per request over shuffled pages."""
    plain = Workload(name, _PAGED, 4, 4, 2, 1, 300, 64, kv_lens=(300, 0, 1, 193), page_size=page_size)
    return replace(plain, **options)


def _mixed(
    name: str, page_size: int, members: tuple[tuple[int, int], ...] = _MIXED, **options: Any
) -> Workload:
    """Prefill and decode in one call over shuffled pages, with rows of nobody behind them."""
    rows, keys = sum(m[0] for m in members) + 5, max(m[1] for m in members)
    plain = Workload(name, _PAGED, 1, 4, 2, rows, keys, 64, causal=True, members=members, page_size=page_size)
    return replace(plain, **options)


_PAGES = (
    *(_pages(f"paged-{n}", n) for n in (1, 3, 16, 64, 128, 256)),
    _pages("paged-long", 16, heads=8, kv_heads=8, seqlen_k=2300, kv_lens=(2300, 17, 1024, 2049)),
    _pages("paged-group-7", 16, heads=7, kv_heads=1, causal=True),
    _pages("paged-group-8", 64, heads=16, head_dim=128),
    _pages("paged-one", 300, batch=1, kv_lens=(300,)),
    _pages("paged-window", 16, causal=True, window=(100, None)),
    _pages("paged-window-3", 3, window=(31, 0)),
    _pages("paged-starts", 16, kv_starts=(20, 0, 1, 100)),
    _pages("paged-offset", 16, causal=True, offset=(250, 0, 5, -1)),
    _pages("paged-softcap", 16, softcap=5.0),
    _pages("paged-sinks", 16, sinks=True),
    _pages("paged-alibi", 16, alibi="bh"),
    _pages("paged-dim-v", 16, head_dim=40, head_dim_v=96),
    _pages("paged-dim-80", 3, head_dim=80, causal=True),
    _pages("paged-scale", 16, scale=0.0),
    *(_mixed(f"paged-mixed-{n}", n) for n in (1, 3, 16, 128)),
    _mixed("paged-mixed-full", 16, causal=False),
    _mixed("paged-mixed-first", 16, ((70, 300), (1, 90), (7, 30), (1, 1))),
    _mixed("paged-mixed-middle", 16, ((1, 90), (7, 30), (70, 300), (1, 1))),
    _mixed("paged-mixed-last", 16, ((1, 1), (1, 90), (7, 30), (70, 300))),
    _mixed("paged-mixed-window", 16, window=(60, None)),
    _mixed("paged-mixed-group-5", 16, heads=10),
    _mixed("paged-mixed-starts", 16, kv_starts=(5, 60, 0, 1, 0, 0, 200, 290)),
    _mixed("paged-mixed-offset", 16, offset=(3, 20, 0, -5, 64, 0, 250, 299)),
    _mixed("paged-mixed-everything", 16, window=(90, None), alibi="bh", softcap=8.0, sinks=True,
    kv_starts=(1, 0, 0, 0, 9, 0, 100, 0), head_dim_v=48),
)  # fmt: skip

CATALOGUE = _CORRECTNESS + _PACKED + _STEPS + _PAGES + TIMED


def workloads(tag: str) -> tuple[Workload, ...]:
    """Every workload that carries `tag`, in catalogue order."""
    return tuple(w for w in CATALOGUE if tag in w.tags)


def named(name: str) -> Workload:
    """The workload of that name; `KeyError` lists what there is."""
    for w in CATALOGUE:
        if w.name == name:
            return w
    raise KeyError(f"workload: got {name!r}, wanted one of {', '.join(w.name for w in CATALOGUE)}")


def with_dtype(workload: Workload, dtype: str) -> Workload:
    """The same problem in another storage dtype."""
    return replace(workload, dtype=dtype)
