"""The dropout stage alone: bits of Philox on every instruction set that runs here, at odd starts and ends."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import numpy as np
import pytest
import torch

from polyflash import attention
from polyflash.backends.cpu import arguments as a
from polyflash.backends.cpu import configs, runtime
from polyflash.backends.cpu.configs import DropoutKey
from polyflash.backends.cpu.words import FORWARD
from polyflash.backends.torch.philox import kept
from polyflash.errors import SpecError
from polyflash.reference import dropout_keep
from polyflash.spec import Arguments
from tests.backends.cpu.test_isas import ARM, HERE, LINUX, randn
from tests.rows_here import needs_cpu_engine

# The NEON form is plain vector arithmetic: it runs on any CPU.
ALL = [(isa, nv) for isa in (*configs._RUNS[HERE], "neon") for nv in configs.ISAS[isa].group_keys]
WEIGHTS = 0x3F80BCDE
_KIND = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 7)


def argument_block(p: float, seed: int) -> np.ndarray:
    """The words of a call that has dropout alone."""
    args = Arguments(dropout_p=p, dropout_seed=torch.tensor(seed))
    words = a.operands(args, 1.0, 0, [], 0, drop=1)
    return np.frombuffer(bytes(8 * FORWARD.q_offset) + words, dtype=np.int64).copy()


def dropped_tile(
    key: DropoutKey, p: float, seed: int, head: int, row: int, first: int, keys: int, pack: int
) -> np.ndarray:
    """uint32 (keys, panel_rows) of a tile of WEIGHTS, or with pack 2 uint16 halves of it; the words before
    and after the tile are seen to be untouched."""
    stage = _KIND(runtime.load(key))
    tile = np.full((-(-keys // pack) + 2, key.panel_rows), WEIGHTS, np.uint32)
    block = argument_block(p, seed)
    stage(block.ctypes.data, tile[1:].ctypes.data, head, row, first, keys, pack)
    assert (tile[0] == WEIGHTS).all() and (tile[-1] == WEIGHTS).all()
    if pack == 1:
        return tile[1:-1]
    halves = tile[1:-1].view(np.uint16).reshape(-1, key.panel_rows, 2)
    return halves.transpose(0, 2, 1).reshape(-1, key.panel_rows)[:keys]


def expected_tile(
    rows: int, p: float, seed: int, head: int, row: int, first: int, keys: int, pack: int
) -> np.ndarray:
    start = first // 4 * 4
    keep = kept(torch.tensor([head]), row, rows, start, first - start + keys, p=p, seed=seed)[0]
    whole = WEIGHTS
    if pack == 2:
        whole = np.where(np.arange(keys) % 2 == 0, WEIGHTS & 0xFFFF, WEIGHTS >> 16)[:, None]
    return np.where(keep.T[first - start :].numpy(), whole, 0)


TILES = [  # p, seed, head, row, first key, keys
    (0.5, 0, 0, 0, 0, 64),
    (0.1, -1, 3, 7, 1, 37),
    (0.9, 1 << 62, 40_000, 1_000_003, 2, 1),
    (0.25, -(1 << 63), 1, 48, 3, 2),
    (0.75, 0x123456789ABCDEF, (1 << 31) + 5, 2**31 - 5000, 2**31 - 4001, 130),
    (1e-12, 5, 0, 0, 4, 3),
    (1 - 2**-53, 6, 0, 0, 5, 33),
    (1.0, 7, 2, 16, 6, 20),
    (1 / 3, (1 << 63) - 1, 9, 1, 7, 16),
]


@needs_cpu_engine
@pytest.mark.parametrize("isa, nv", ALL)
def test_bits_are_those_of_every_backend(isa: str, nv: int):
    key = DropoutKey(isa, nv)
    for p, seed, head, row, first, keys in TILES:
        for pack in (1, 2):
            case = p, seed, head, row, first // pack * pack, keys, pack
            np.testing.assert_array_equal(dropped_tile(key, *case), expected_tile(key.panel_rows, *case))


@needs_cpu_engine
def test_bits_do_not_depend_on_the_tile():
    """Tiles of any size laid side by side give the oracle's mask."""
    keep = dropout_keep((2, 3, 40, 61), 0.4, 99)
    key = DropoutKey(configs._RUNS[HERE][0], 1)
    for step in (1, 5, 16, 61):
        for head, row in ((0, 0), (4, 13), (5, 40 - key.panel_rows)):
            tiles = [
                dropped_tile(key, 0.4, 99, head, row, j, min(step, 61 - j), 1) for j in range(0, 61, step)
            ]
            want = keep[head // 3, head % 3, row : row + key.panel_rows].T
            np.testing.assert_array_equal(np.concatenate(tiles) != 0, want)


@pytest.mark.parametrize(
    "isa, triple, cpu, multiply",
    [("neon", *x, r"umull2?(\.2d|\s+v\d+\.2d)") for x in ARM]
    + [("avx2", LINUX, "haswell", r"vpmuludq\s.*ymm")],
)
def test_products_are_vector_code(isa: str, triple: str, cpu: str, multiply: str):
    """Widening multiplications, two words of two vectors per round, and no library."""
    llvm = pytest.importorskip("llvmlite.binding")
    from llvmlite import ir

    from polyflash.backends.cpu import dropout, intrinsics

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    module.triple = triple
    for name, arity, emit, returns in intrinsics.emissions(dropout.DropoutTile(DropoutKey(isa, 1))):
        intrinsics.function_in(module, name, arity, emit, isa, returns).linkage = "external"
    parsed = llvm.parse_assembly(str(module))
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(parsed, builder)
    lines = [x.strip() for x in machine.emit_assembly(parsed).splitlines()]
    products = sum(bool(re.match(multiply, line)) for line in lines)
    # Two functions by two halves; of the 20 products of ten rounds 4 are scalar.
    assert products == 2 * 2 * 16
    assert not [x for x in lines if re.match(r"(bl|callq?)\s", x) and "get_pc" not in x]


def test_keys_are_checked():
    with pytest.raises(SpecError, match="nv"):
        DropoutKey("avx512", 3)
    with pytest.raises(SpecError, match="isa"):
        DropoutKey("sve", 1)
    assert DropoutKey("avx2", 3).name == "dropout_avx2_nv3" and DropoutKey("avx2", 3).panel_rows == 24


def test_words_of_a_call():
    """Seed as it is, threshold floor(p·2^32), the share of kept weights as float32; nothing without p."""
    words = argument_block(0.25, -2)
    assert (
        words[FORWARD.drop_seed] == -2
        and words[FORWARD.drop_threshold] == 1 << 30
        and words[FORWARD.drop] == 1
    )
    assert words[FORWARD.drop_kept] == int(np.float32(0.75).view(np.uint32))
    assert argument_block(1.0, 0)[FORWARD.drop_kept] == int(np.float32(1.0).view(np.uint32))
    assert a.any_table(Arguments(dropout_p=0.5)) and not a.any_table(Arguments())
    assert not argument_block(0.0, 3)[FORWARD.drop_seed :].any()


@needs_cpu_engine
@pytest.mark.parametrize("isa, dtype", [("avx2", "float32"), ("generic", "bfloat16")])
@pytest.mark.parametrize("width", (64, pytest.param(131, marks=pytest.mark.slow)))
def test_forward_of_narrower_sets_drops_the_same(isa: str, dtype: str, width: int):
    if isa not in configs._RUNS[HERE]:
        pytest.skip(f"{HERE} does not run {isa}")
    kind = getattr(torch, dtype)
    q, k = randn(2, 6, 77, 59).to(kind), randn(2, 2, 131, 59, seed=1).to(kind)
    columns = torch.eye(131, dtype=kind).expand(2, 2, 131, 131).split(width, -1)
    how: dict[str, Any] = {"backend": "cpu", "config": configs.Config(64, 4, isa=isa)}
    out = torch.cat([attention(q, k, v, dropout_p=0.4, dropout_seed=77, **how) for v in columns], -1)
    assert torch.equal(out != 0, torch.from_numpy(dropout_keep((2, 6, 77, 131), 0.4, 77)))
