"""Every shipped kernel and tile as a call to compile: which ones, and the very arguments of their launches.

A case runs the backend's own `run` on tensors without memory, and keeps what it would have launched. So a
kernel is compiled with the constants, strides and optional operands that a call gives it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from polyflash import target as targets
from polyflash.backends.gluon import configs as gluon_configs
from polyflash.backends.triton import configs, tables, tiles
from polyflash.quant.scheme import KINDS, codes_of
from polyflash.routes import spec_of
from polyflash.spec import LONGEST_ROWS, Arguments, AttentionSpec, Phase
from polyflash.target import Target

GPUS = tuple(t.name for t in targets.KNOWN if t.kind in ("cuda", "hip"))
BATCH, HEADS, KEYS, PAGES = 2, 16, 2048, 64


class Launched(NamedTuple):
    """A kernel with the arguments and options of one launch."""

    kernel: Any
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]


class Problem(NamedTuple):
    """What is asked of a call, and its shapes beside its head dim."""

    options: Mapping[str, Any] = MappingProxyType({})
    query_heads: int = HEADS
    kv_heads: int = HEADS
    seqlen_q: int = KEYS
    seqlen_k: int = KEYS
    batch: int = BATCH
    page_size: int = 0  # keys per page, of PAGES in the pool
    codes: str = ""


def _meta(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


_LONG: dict[str, Any] = {"seqlen_q": LONGEST_ROWS, "seqlen_k": LONGEST_ROWS}
_TOKEN: dict[str, Any] = {"query_heads": 32, "kv_heads": 8, "seqlen_q": 1}
_FEW: dict[str, Any] = {**_TOKEN, "seqlen_q": 4}
_CAUSAL, _WINDOW, _LENS = {"causal": True}, {"causal": True, "window_left": 512}, {"kv_lens": _meta(BATCH)}
_STARTS = {**_LENS, "kv_starts": _meta(BATCH)}
_CAPPED = {"causal": True, "softcap": 30.0, "sinks": _meta(HEADS, dtype=torch.float32)}
_ALIBI = {"causal": True, "alibi_slopes": _meta(HEADS, dtype=torch.float32)}
_MEMBERS = {"cu_seqlens_q": _meta(5), "cu_seqlens_k": _meta(5), "max_seqlen_q": KEYS, "max_seqlen_k": KEYS}
_EVERY = {**_CAPPED, **_ALIBI, **_WINDOW, **_STARTS, "softcap": 2.0, "row_bounds": _meta(KEYS, 2)}
_HEADS = _meta(BATCH, HEADS, 1, 1, dtype=torch.float32)
_BOTH = ",".join(["fp8_e4m3/0x0*fp8"] * 2)
_BLOCKS = "int4/64x1+64x1:bfloat16,int4/1x32+1x32:bfloat16"
_CODES = {"codes": _BOTH, "k_scale": _HEADS, "v_scale": _HEADS}
PROBLEMS = {
    "codes": Problem(_CODES),
    "codes-causal": Problem({**_CODES, **_CAUSAL}),
    "full": Problem(),
    "causal": Problem(_CAUSAL),
    "long": Problem(**_LONG),
    "long-causal": Problem(_CAUSAL, **_LONG),
    "ragged": Problem(seqlen_q=KEYS - 1, seqlen_k=KEYS - 1),
    "window": Problem(_WINDOW),
    "lens": Problem(_STARTS),
    "mask": Problem({"mask": _meta(BATCH, 1, KEYS, KEYS, dtype=torch.bool)}),
    "bias": Problem({"bias": _meta(BATCH, HEADS, KEYS, KEYS, dtype=torch.bfloat16)}),
    "dropout": Problem({"causal": True, "dropout_p": 0.1, "dropout_seed": torch.tensor(1)}),
    "packed": Problem({"causal": True, **_MEMBERS}, batch=1),
    "alibi": Problem(_ALIBI),
    "capped": Problem(_CAPPED),
    "grouped": Problem(_CAUSAL, kv_heads=4),
    "everything": Problem(_EVERY, kv_heads=4),  # in no record: does it compile?
    "token": Problem(_LENS, **_TOKEN),
    "int8": Problem(_LENS, **_TOKEN, codes="int8/1x0,int8/1x0"),
    "int4": Problem(_LENS, **_TOKEN, codes="int4/64x1+64x1:bfloat16,int4/1x0+1x0:bfloat16"),
    "int4-blocks": Problem(_LENS, **_TOKEN, codes=_BLOCKS),
    "fp8": Problem(_LENS, **_TOKEN, codes="fp8_e4m3/1x0,fp8_e4m3/1x0"),
    "int4-rows": Problem(_CAUSAL, **_FEW, codes=_BLOCKS),
    "int4-few": Problem(_CAUSAL, **_TOKEN | {"seqlen_q": 2}, codes=_BLOCKS),
    "mxfp4-rows": Problem(_CAUSAL, **_FEW, codes="mxfp4/1x32:bfloat16,mxfp4/1x32:bfloat16"),
    "int8-products": Problem(codes="int8/1x0*int8,-"),
    "int8-products-causal": Problem(_CAUSAL, codes="int8/1x0+0x1*int8,-"),
    "fp8-products": Problem(codes=_BOTH),
    "fp8-products-causal": Problem(_CAUSAL, codes=_BOTH),
    "paged": Problem({**_LENS, "page_table": _meta(BATCH, KEYS // 128)}, **_TOKEN, page_size=128),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One call on one target. Its id names entries of the recorded file, with a kernel's name behind."""

    phase: Phase
    target_name: str
    dtype: str
    head_dim: int
    problem: str
    backend: str = "triton"

    @property
    def id(self) -> str:
        _, _, arch = self.target_name.partition(":")
        engine = "" if self.backend == "triton" else f"{self.backend}-"
        return f"{engine}{self.phase.value}/{arch}/{self.dtype}/d{self.head_dim}/{self.problem}"

    @property
    def target(self) -> Target:
        """With the Triton at hand, on which a choice may depend."""
        return replace(targets.parse(self.target_name), packages=targets.detect("cpu").packages)

    def call(self) -> tuple[Tensor, Tensor, Arguments]:
        """q, k as v is unless that is of floats, and the arguments."""
        p, dtype = PROBLEMS[self.problem], getattr(torch, self.dtype)
        first, rows = (PAGES, p.page_size) if p.page_size else (p.batch, p.seqlen_k)
        q = _meta(p.batch, p.query_heads, p.seqlen_q, self.head_dim, dtype=dtype)
        k_dtype = torch.float8_e4m3fn if self.has_codes else dtype
        tables: dict[str, Any] = {}
        k = _meta(first, p.kv_heads, rows, self.head_dim, dtype=k_dtype)
        for name, form in zip("kv", codes_of(p.codes) if p.codes else (), strict=False):
            if form is None:
                continue
            k = k[..., : self.head_dim // form.packed].to(getattr(torch, KINDS[form.dtype].storage))
            for table, block in (("scale", form.scale), ("shift", form.shift)):
                if block is not None:
                    shape = first, p.kv_heads, *block.counts(rows, self.head_dim)
                    tables[f"{name}_{table}"] = _meta(*shape, dtype=getattr(torch, form.tables))
        given: dict[str, Any] = {"codes": p.codes, **tables, **p.options}
        return q, k, Arguments(need_lse=True, **given)

    def spec(self) -> AttentionSpec:
        q, k, args = self.call()
        return replace(spec_of(q, k, k, args, phase=self.phase), device=self.target_name)

    @property
    def has_codes(self) -> bool:
        return "codes" in PROBLEMS[self.problem].options

    def config(self) -> Any:
        choose = gluon_configs.CHOOSE[self.phase] if self.backend == "gluon" else configs.choose
        choose = gluon_configs.choose_fp8 if self.has_codes else choose
        return choose(self.spec(), self.target)

    def launches(self, config: Any = None) -> list[Launched]:
        """What the call launches with its own config or another; kept instead of made, for one thread."""
        from polyflash.backends.triton.runtime import Kernels, spaced, unknown

        found: list[Launched] = []

        def keep(
            self: Any, kernel: Any, grid: Any, given: Sequence[Any], options: Any, key: Any, device: Any
        ) -> None:
            t, n, c, *others = given
            named = dict(zip(kernel.arg_names, (t, unknown(n), spaced(c, t), *others), strict=True))
            found.append(Launched(kernel, named, options))

        name = "fp8" if self.has_codes else self.phase.value
        run = importlib.import_module(f"polyflash.backends.{self.backend}.{name}").run
        about = {"config": config or self.config(), "rung": "", "target": self.target, "spec": self.spec()}
        launch, (q, k, args) = SimpleNamespace(**about, row=None, run=None, prepared=None), self.call()
        v, lse, out = k.clone(), _meta(*q.shape[:3], dtype=torch.float32), torch.empty_like(q)
        v = v.to(q.dtype) if args.codes.endswith("-") else v
        with mock.patch.object(Kernels, "launch", keep):
            if self.phase is Phase.BACKWARD:
                wanted = (True, True, True, args.bias is not None, False)
                run(launch, out.clone(), None, q, k, v, out, lse, args, wanted)
            elif self.phase is Phase.STATISTICS:
                sums = _meta(*q.shape[:2], k.shape[2], dtype=torch.float32)
                run(launch, q, k, lse, (sums, lse.clone(), lse.clone()), args)
            else:
                run(launch, q, k, v, out, lse, args)
        return found


HEAD_DIMS = tuple(sorted((*tables.CLASSES, 80)))  # 80 takes two blocks of channels
ONE_OF_EACH = ("cuda:sm90", "hip:gfx942")


class Shipped(NamedTuple):
    """What of a phase is compiled: `everywhere` in bfloat16 at head dims `narrow` and in float32 at `wide`;
    `more` at head dims 64 and 128 in bfloat16; `rare` at 128 on one GPU of each vendor."""

    everywhere: str
    more: tuple[str, ...] = ()
    rare: tuple[str, ...] = ()
    narrow: tuple[int, ...] = HEAD_DIMS
    wide: tuple[int, ...] = (64, 128)


CODED = ("int8", "int4", "int4-blocks", "fp8")
MULTIPLIED = ("int8-products", "int8-products-causal")
_FEATURES = ("window", "bias", "dropout", "packed", "grouped")
SHIPPED = {
    Phase.FORWARD: Shipped("causal", ("full", "mask"), (*_FEATURES, *MULTIPLIED), wide=HEAD_DIMS),
    Phase.DECODE: Shipped("token", rare=("paged", *CODED)),
    Phase.BACKWARD: Shipped("causal", ("full", "mask"), _FEATURES),
    Phase.STATISTICS: Shipped("causal", narrow=(64, 128), wide=()),
}


@cache
def every_case() -> tuple[Case, ...]:
    """All of them, by phase and target."""
    made = []
    for (phase, shipped), gpu in product(SHIPPED.items(), GPUS):
        case = partial(Case, phase, gpu)
        for dtype, dims in (("bfloat16", shipped.narrow), ("float32", shipped.wide)):
            made += [case(dtype, d, shipped.everywhere) for d in dims]
        for d in (64, 128):
            made += [case("bfloat16", d, problem) for problem in shipped.more]
            if phase is Phase.FORWARD or gpu in ONE_OF_EACH:
                made.append(case("float16", d, shipped.everywhere))
        made += [case("bfloat16", 128, problem) for problem in shipped.rare if gpu in ONE_OF_EACH]
        if phase is Phase.FORWARD:
            arch = tables.ARCHS[targets.parse(gpu).arch]
            for d, hides in tables.LONG.get((arch.family, 2), {}):
                made.append(case("bfloat16", d, "long-causal" if hides else "long"))
    return (*made, *GLUON, *LONG, *CODES, *EIGHTS, *CODED_ROWS)


_KINDS = "full", "causal", "ragged", "window", "lens", "packed", "capped", "alibi"
GLUON = tuple(
    Case(phase, "cuda:sm90", "bfloat16", d, problem, "gluon")
    for phase, dims in ((Phase.FORWARD, 4), (Phase.BACKWARD, 2))
    for problem, d in product(_KINDS, gluon_configs.HEAD_DIMS[:dims])
)
LONG = tuple(  # of three consumers
    Case(Phase.FORWARD, "cuda:sm90", "bfloat16", 64, problem, "gluon") for problem in ("long", "long-causal")
)
CODES = tuple(
    Case(Phase.FORWARD, "cuda:sm90", "bfloat16", d, problem, "gluon")
    for problem, d in product(("codes", "codes-causal"), (128, 256))
)
EIGHTS = tuple(
    Case(Phase.FORWARD, gpu, "bfloat16", d, "fp8-products-causal")
    for gpu, d in product(GPUS, (64, 128, 256))
    if targets.parse(gpu).arch not in configs.WITHOUT_FP8
)
# The second pass over values that may not be finite: Triton 3.6 failed where both passes shared a split q.
CODED_ROWS = tuple(
    Case(Phase.DECODE, gpu, dtype, 64, f"{codes}-rows")
    for gpu, dtype, codes in product(ONE_OF_EACH, ("bfloat16", "float32"), ("int4", "mxfp4"))
)
_OTHERS = ("bfloat16", "rows"), ("bfloat16", "few"), ("float16", "rows"), ("float16", "blocks")
CODED_ROWS += tuple(Case(Phase.DECODE, "cuda:sm90", dtype, 128, f"int4-{kind}") for dtype, kind in _OTHERS)
# (phase, architectures) whose kernels of head dims 64 and 128 in 16 bits spill nothing, unless that is faster
CLEAN = (
    (Phase.FORWARD, ("sm80", "sm90", "gfx942", "gfx950")),
    (Phase.BACKWARD, ("sm90",)),
)


def must_be_clean(case: Case) -> bool:
    """An exception for it says what was measured."""
    return (
        case.backend == "triton"
        and case.head_dim in (64, 128)
        and tiles.ELEMENT_BYTES[case.dtype] == 2
        and case.problem in ("causal", "full", "long", "long-causal")
        and any(case.phase is phase and case.target.arch in archs for phase, archs in CLEAN)
    )


def default_cases() -> tuple[Case, ...]:
    """One of every target; of every kernel and most features one, on one GPU of each vendor or on one. Of
    what must be clean causal at 128 and full at 64: the other two of those four differ in nothing more."""
    return tuple(c for c in every_case() if c in _SINGLE)


AS_SM80 = ("cuda:sm86", "cuda:sm89")  # at head dim 128 their code has the very figures of sm80's
_SINGLE = {Case(Phase.FORWARD, gpu, "bfloat16", 64, "full") for gpu in (*ONE_OF_EACH, *AS_SM80)}
_SINGLE |= {Case(Phase.FORWARD, gpu, "bfloat16", 128, "causal") for gpu in GPUS if gpu not in AS_SM80}
_SINGLE |= {Case(Phase.FORWARD, "cuda:sm90", "bfloat16", 80, "causal"), CODES[2]}
_DIMS = {Phase.FORWARD: {"full": (64, 256), "causal": (128,), "window": (64,)}}
_DIMS[Phase.BACKWARD] = {"causal": (128,), "packed": (64,), "capped": (64,)}
_SINGLE |= {c for c in GLUON if c.head_dim in _DIMS[c.phase].get(c.problem, ())}
_SINGLE |= {Case(Phase.DECODE, gpu, "bfloat16", 128, "token") for gpu in ONE_OF_EACH}
_SINGLE |= {Case(Phase.DECODE, "cuda:sm90", "bfloat16", 128, "int4")}
_SINGLE |= {Case(Phase.DECODE, "hip:gfx942", "bfloat16", 128, "int8")}
_SINGLE |= {Case(Phase.DECODE, "cuda:sm90", "float32", 64, "mxfp4-rows")}
_SINGLE |= {Case(Phase.BACKWARD, "cuda:sm90", "bfloat16", *what) for what in ((128, "causal"), (64, "full"))}
_SINGLE |= {Case(Phase.BACKWARD, "hip:gfx942", "bfloat16", 64, "causal")}
_SINGLE |= {Case(Phase.FORWARD, "hip:gfx942", "float32", 64, "causal")}
_SINGLE |= {
    Case(Phase.FORWARD, "cuda:sm90", "bfloat16", 128, f"{codes}-products-causal") for codes in ("int8", "fp8")
}
