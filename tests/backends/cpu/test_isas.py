"""Every instruction set from one emitter: AVX2 and plain SSE run here, NEON is emitted for CPUs that are not.

The two loops that take the time, the inner ones of both products, must be vector code that keeps its
accumulators in registers, and no stage may call a library.
"""

from __future__ import annotations

import functools
import importlib
import math
import platform
import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import polyflash
from polyflash import target
from polyflash.backends.cpu import configs
from polyflash.backends.cpu.configs import Config, KernelKey, ScoreKey
from polyflash.backends.cpu.decode_codes_configs import CodesKey, FloatsKey
from polyflash.backends.cpu.decode_configs import DecodeKey
from polyflash.backends.cpu.decode_units import sums_of_lanes
from polyflash.backends.cpu.simd import Emitter
from polyflash.reference import attention_reference

pytest.importorskip("llvmlite")
HERE = target.host_arch()
ARM = (("aarch64-unknown-linux-gnu", "neoverse-n1"), ("arm64-apple-macosx", "apple-m1"))
LINUX = "x86_64-unknown-linux-gnu"


TILES = {
    "forward": ("blocks", "Tile"),
    "backward": ("backward_blocks", "BackwardTile"),
    "scores": ("scores", "ScoreTile"),
    "dropout": ("dropout", "DropoutTile"),
    "bias_gradient": ("bias_gradient", "BiasTile"),
}


@functools.cache
def assembly(key: KernelKey | ScoreKey, triple: str, cpu: str) -> dict[str, list[list[str]]]:
    """The stages of `key` for a CPU that need not be here: basic blocks of instructions by stage."""
    import llvmlite.binding as llvm
    from llvmlite import ir

    from polyflash.backends.cpu import intrinsics

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    module.triple = triple
    where, tile = TILES[key.kind]
    tile = getattr(importlib.import_module(f"polyflash.backends.cpu.{where}"), tile)(key)
    names = []
    for name, arity, emit, returns in intrinsics.emissions(tile):
        intrinsics.function_in(module, name, arity, emit, key.isa, returns).linkage = "external"
        names.append(name)
    parsed = llvm.parse_assembly(str(module))
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(parsed, builder)
    found: dict[str, list[list[str]]] = {}
    current: list[list[str]] = []
    for line in machine.emit_assembly(parsed).splitlines():
        label = re.match(r"[._]?(\w+):", line)
        if label and label.group(1) in names:
            current = found[label.group(1)] = [[]]
        elif label:
            current.append([])
        elif current and line.startswith("\t") and not line.startswith("\t."):
            current[-1].append(line.strip())
            if re.match(r"(j\w+|b\.\w+|b|cbz|cbnz|tbz|tbnz)\s", line.strip()):
                current.append([])
    assert set(found) == set(names)
    return found


def hottest(stage: list[list[str]], multiply: str) -> list[str]:
    """The basic block with the most multiplications: the inner loop."""
    return max(stage, key=lambda block: sum(multiply in line for line in block))


@pytest.mark.parametrize("triple, cpu", ARM)
@pytest.mark.parametrize(
    "storage, nv",
    [
        pytest.param(storage, nv, marks=pytest.mark.slow if (i + j) % 2 else ())
        for i, storage in enumerate(("float32", "bfloat16", "float16"))
        for j, nv in enumerate(configs.ISAS["neon"].group_keys)
    ],
)
def test_neon_products_stay_in_registers(triple, cpu, storage, nv):
    stages = assembly(KernelKey("neon", "f32", storage, nv, 128), triple, cpu)
    accumulators = nv * configs.ISAS["neon"].group_keys[nv]
    for name in ("scores", "accumulate"):
        loop = hottest(stages[name], "fmla")
        products = sum(bool(re.match(r"fmla(\.4s|\s+v\d+\.4s)", line)) for line in loop)
        assert products == 4 * accumulators, (name, products)
        spills = [line for line in loop if "[sp" in line or "[x29" in line]
        assert not spills, (name, spills)
    calls = [
        line for stage in stages.values() for block in stage for line in block if re.match(r"bl\s", line)
    ]
    assert not calls
    if storage == "float16":
        assert any("fcvtl" in line for block in stages["load_rows"] for line in block)


@pytest.mark.parametrize(
    "isa, triple, cpu",
    [("neon", *a) for a in ARM] + [("avx2", LINUX, "haswell"), ("generic", LINUX, "x86-64")],
)
def test_no_stage_calls_a_library(isa, triple, cpu):
    wide = max(configs.ISAS[isa].group_keys)
    keys = [ScoreKey(isa, wide)] + [KernelKey(isa, "f32", s, wide, 64) for s in configs.STORAGE_BYTES]
    for key in keys:
        for name, stage in assembly(key, triple, cpu).items():
            calls = [
                x for block in stage for x in block if re.match(r"(bl|callq?)\s", x) and "get_pc" not in x
            ]
            assert not calls, (key.name, name, calls)


@pytest.mark.parametrize("nv", configs.ISAS["avx2"].group_keys)
def test_avx2_products_stay_in_sixteen_registers(nv):
    stages = assembly(KernelKey("avx2", "f32", "float32", nv, 128), LINUX, "haswell")
    accumulators = nv * configs.ISAS["avx2"].group_keys[nv]
    for name in ("scores", "accumulate"):
        loop = hottest(stages[name], "vfmadd")
        assert sum("vfmadd" in line and "ymm" in line for line in loop) == 4 * accumulators
        assert not [line for line in loop if "rsp" in line], name


def test_a_lost_register_would_be_noticed():
    """Twice the accumulators do spill: the check above can fail."""
    wide = configs.Isa(8, {3: 8}, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(configs.ISAS, "avx2", wide)
        assembly.cache_clear()
        loop = hottest(
            assembly(KernelKey("avx2", "f32", "float32", 3, 128), LINUX, "haswell")["scores"], "vfmadd"
        )
    assembly.cache_clear()
    assert [line for line in loop if "rsp" in line]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


CASES = {
    "plain": {},
    "causal": {"causal": True, "window": (40, 0)},
    "mask": {"mask": randn(2, 1, 77, 131) > 0},
    "bias": {"bias": randn(6, 77, 131), "softcap": 5.0, "sinks": randn(6)},
    "half bias": {"bias": randn(1, 131).half(), "alibi_slopes": randn(2, 6).abs()},
    "segments": {
        "mask": polyflash.Mask.segments(
            (torch.arange(77) // 20).int().expand(2, -1), (torch.arange(131) // 33).int().expand(2, -1)
        )
    },
    "lists": {"mask": polyflash.Mask.blocks(randn(3, 5) > 0, rows=32, keys=32)},
}


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="needs an x86 CPU")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "isa, dtype",
    [
        ("avx2", "float32"),
        ("avx2", "float16"),
        pytest.param("generic", "float32", marks=pytest.mark.slow),
        ("generic", "bfloat16"),
        pytest.param("generic", "float16", marks=pytest.mark.slow),
    ],
)
def test_narrower_sets_run_here(isa, dtype, case):
    """The same semantics from the code of a CPU with fewer registers, chosen by config."""
    if isa not in configs._RUNS[HERE] or not target.detect("cpu").has_package("numba"):
        pytest.skip(f"{HERE} does not run {isa}")
    kind = getattr(torch, dtype)
    q, k, v = (
        randn(2, 6, 77, 59).to(kind),
        randn(2, 2, 131, 59, seed=1).to(kind),
        randn(2, 2, 131, 41, seed=2).to(kind),
    )
    out, lse = polyflash.attention(
        q, k, v, return_lse=True, backend="cpu", config=Config(64, 4, isa=isa), **CASES[case]
    )
    want, want_lse = attention_reference(q, k, v, **CASES[case])
    bound = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    assert (out.double() - want).norm() <= bound * want.norm()
    same = torch.isneginf(lse) == torch.isneginf(want_lse)
    assert bool(same.all())
    assert (lse.double() - want_lse).nan_to_num(neginf=0.0).abs().max() <= 1e-5


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="needs an x86 CPU")
def test_a_narrower_set_holds_at_the_edges():
    """Empty rows, one visible key, NaN where nobody looks, weights that underflow: as on the widest set."""
    if "avx2" not in configs._RUNS[HERE] or not target.detect("cpu").has_package("numba"):
        pytest.skip(f"{HERE} does not run avx2")
    q, k, v = randn(1, 2, 40, 16), randn(1, 2, 50, 16, seed=1), randn(1, 2, 50, 16, seed=2)
    mask = torch.ones(40, 50, dtype=torch.bool)
    mask[3], mask[4], mask[:, 7] = False, False, False
    mask[4, 9] = True
    k[0, :, 7], v[0, :, 7] = math.nan, math.nan
    k[0, 0, 20] *= 1e4
    options = {"return_lse": True, "backend": "cpu", "config": Config(32, 2, isa="avx2"), "mask": mask}
    out, lse = polyflash.attention(q, k, v, **options)
    assert torch.equal(out[:, :, 3], torch.zeros(1, 2, 16)) and bool(torch.isneginf(lse[:, :, 3]).all())
    assert torch.equal(out[:, :, 4], v[:, :, 9])
    assert bool(torch.isfinite(out).all())
    clean_k, clean_v = k.clone(), v.clone()
    clean_k[0, :, 7], clean_v[0, :, 7] = 0, 0
    assert torch.equal(out, polyflash.attention(q, clean_k, clean_v, **options)[0])


CODED = "scores_of_codes", "accumulate_codes"
INT8, INT4, NF4 = "int8/1x0,int8/1x0", "int4/64x1,int4/1x0", "nf4/1x0,nf4/1x0"


@pytest.mark.parametrize(
    "key, stages, wanted",
    [
        (CodesKey("avx512", "int8dot", "bfloat16", 1, 128, 128, INT8), CODED, ({2: 36, 3: 32}, {2: 9, 3: 8})),
        (CodesKey("avx512", "int8dot", "bfloat16", 4, 128, 128, INT4), CODED, ({2: 8, 3: 8}, {2: 3, 3: 4})),
        (CodesKey("avx2", "f32", "bfloat16", 1, 128, 128, INT8), CODED, ({2: 2}, {2: 4})),
        (FloatsKey("avx512", "f32", "float32", 1, 64, 64, NF4), ("accumulate_values",), ({2: 1},)),
    ],
    ids=lambda x: x.name if isinstance(x, DecodeKey) else "",
)  # fmt: skip
def test_lines_of_codes_are_asked_for_once_in_each_cache(key, stages, wanted):
    """In the second, far ahead, for a single row once more, of every fourth key; on CPUs where it pays in the
    first, too, shortly before they are read. Of a loop's keys each line once, whatever the loops that share
    them; of four rows a quarter of V's are asked for with the weights."""
    assert [asked(key, stage) for stage in stages] == [Counter(x) for x in wanted]


@pytest.mark.parametrize(
    "compute, rows, levels",
    [
        *(("f32", rows, {2, 3}) for rows in (1, 2, 4, 8)),
        *(("bf16dot", rows, {2}) for rows in (1, 2)),
        ("bf16dot", 4, set()),
        ("bf16dot", 8, {2, 3}),
    ],
)
def test_lines_of_bfloat16_by_turns_are_asked_for_in_the_first_cache_but_for_few_rows_of_dots(
    compute, rows, levels
):
    """Four rows of dots ask for none."""
    key = DecodeKey("avx512", compute, "bfloat16", rows)
    assert key.by_turns and set(asked(key, "weigh_and_score")) == levels


@pytest.mark.parametrize(
    "rows, channels, codes, by_turns",
    [(1, 128, INT8, True), (2, 128, INT8, False), (1, 128, INT4, False), (1, 192, INT8, False)],
)
def test_one_row_of_8_bit_codes_by_turns_asks_for_nothing(rows, channels, codes, by_turns):
    key = CodesKey("avx512", "int8dot", "bfloat16", rows, channels, channels, codes)
    assert key.by_turns == by_turns and not (by_turns and asked(key, "add_and_score"))


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize("codes", [INT8, INT4])
@pytest.mark.parametrize("in_bytes", [True, False])
def test_rows_of_v_are_asked_for_once_with_weights_and_values(rows, codes, in_bytes):
    """Of some rows one more line. Scores that are finished among the next products have the first keys in
    front of the loop, so each request is emitted twice."""
    asks = codes.replace(",", "*int8,") + "*int8" if in_bytes and rows > 1 else codes
    key = CodesKey("avx512", "int8dot", "bfloat16", rows, 128, 128, asks)
    weighing, vectors = key.rows_weighing, rows * configs.STEP // key.lanes
    assert weighing * vectors + configs.STEP // key.joined * key.rows_later == configs.STEP
    assert (weighing > 0) != key.by_turns
    lines, more = (2 if codes == INT8 else 1), int(key.whole_rows or rows == 1)
    assert key.whole_rows == (codes == INT8 and rows == 4 and in_bytes)
    assert asked(key, "weigh_scores" if key.bytes else "weigh_codes")[2] == lines * weighing
    assert asked(key, "accumulate_codes")[2] == lines * key.rows_later + more
    if key.bytes:
        keys = 4 if rows == 8 else 8
        assert asked(key, "scores_of_codes")[2] == (1 + key.woven) * (lines * keys + more)


@pytest.mark.parametrize("codes", [INT8, INT4])
def test_a_fold_goes_on_among_products(codes):
    """Of four rows of bytes the sums of eight keys are finished in the loop over the next: the six steps of
    their fold are each behind eight of the 64 products, and LLVM is told to leave them there."""
    key = CodesKey("avx512", "int8dot", "bfloat16", 4, 128, 128, codes.replace(",", "*int8,") + "*int8")
    if Emitter.in_turn.__module__ != Emitter.__module__:
        pytest.skip("an emulation keeps no order")
    text = emitted(key, "scores_of_codes")
    loop = text[text.index("\nbody:") :]
    turns = loop[: loop.index("\nthen")].split("asm sideeffect")
    assert len(turns) == 9 and [part.count("vpdpbusd") for part in turns] == [8] * 8 + [0]
    shuffles = [part.count("shufflevector") for part in turns[:8]]
    transposed = 16  # of a unit of eight keys
    assert shuffles == [transposed + 2, 2, 2, 2, 2 + transposed * (codes == INT8), 2, 0, 0]


@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_sums_over_lanes_keep_the_order_of_their_vectors(count):
    """Those of AVX-512, by numpy: a sum has the lanes of its vector's place."""
    numbers = np.random.default_rng(count).integers(-99, 99, (count, 16))
    lanes = SimpleNamespace(
        lanes=16,
        vf="floats",
        b=SimpleNamespace(fadd=lambda x, y: vector(x.lanes + y.lanes)),
        shuffle=lambda x, y, order: vector(np.concatenate((x.lanes, y.lanes))[list(order)]),
    )
    total = sums_of_lanes(lanes, [vector(x) for x in numbers])
    assert total.lanes.reshape(count, -1).sum(1).tolist() == numbers.sum(1).tolist()


def vector(lanes: np.ndarray) -> SimpleNamespace:
    return SimpleNamespace(type="floats", lanes=lanes)


def asked(key: DecodeKey, stage: str) -> Counter[int]:
    """How many prefetches a stage has, by the level of the cache."""
    levels = re.findall(r'@"llvm\.prefetch\.p0"\(.*i32 0, i32 (\d), i32 1\)', emitted(key, stage))
    return Counter(map(int, levels))


def emitted(key: DecodeKey, stage: str) -> str:
    """LLVM's text of a stage."""
    from llvmlite import ir

    from polyflash.backends.cpu import decode_few, intrinsics
    from polyflash.backends.cpu.decode_blocks import DecodeTile

    tile = decode_few.TILES.get(type(key), DecodeTile)(key)
    (emission,) = (x for x in intrinsics.emissions(tile) if x[0] == stage)
    name, arity, emit, returns = emission
    return str(intrinsics.function_in(ir.Module(), name, arity, emit, key.isa, returns))
