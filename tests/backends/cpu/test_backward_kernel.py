"""The CPU backward kernel itself: its order of sums, its instruction sets, what it leaves out and what of its
operands must not matter. Its gradients against the reference are the conformance suite's."""

from __future__ import annotations

import platform
import re
from dataclasses import replace

import pytest
import torch

import polyflash
from polyflash import backends, target
from polyflash.backends.cpu import backward, configs, pool
from polyflash.backends.cpu.backward_configs import BackwardConfig, BackwardKey, BiasGradientKey
from polyflash.backends.cpu.words import BACKWARD
from polyflash.plan import Launch
from polyflash.spec import Arguments, Phase
from polyflash.torch_ops import spec_of
from tests.backends.cpu.test_isas import ARM, CASES, LINUX, assembly, hottest

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.skipif(
    not target.detect("cpu").has_package("numba"), reason="the CPU engine needs numba"
)
HERE = target.host_arch()
WITHOUT_AMX = target.replace(target.detect("cpu"), features=target.detect("cpu").features - {"amx_bf16"})
ROW = next(r for r in backends.TABLE if r.backend == "cpu" and r.phase is Phase.BACKWARD)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(tensors, do, **options):
    leaves = [x.detach().requires_grad_(True) for x in tensors]
    out = polyflash.attention(*leaves, backend="cpu", **options)
    return torch.autograd.grad(out, leaves, do)


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (700, 3)}], ids=str)
def test_no_bit_depends_on_threads_or_on_shared_out_keys(dtype, options):
    """One head's 1500 keys: one item on one thread, six items with sums of their own on two."""
    tensors = [randn(1, 1, 90, 40, seed=0), randn(1, 1, 1500, 40, seed=1), randn(1, 1, 1500, 24, seed=2)]
    tensors, do = [x.to(dtype) for x in tensors], randn(1, 1, 90, 24, seed=3).to(dtype)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(gradients(tensors, do, **options))
    finally:
        torch.set_num_threads(before)
    assert same(found[0], found[1]) and same(found[0], found[2])


def test_no_bit_depends_on_the_rest_of_the_batch():
    """Four requests of a head keep two threads busy; one alone has its keys shared out."""
    q, k, v, do = (randn(4, 1, n, 32, seed=i) for i, n in enumerate((70, 1100, 1100, 70)))
    together = gradients([q, k, v], do, causal=True)
    for b in range(4):
        alone = gradients([x[b : b + 1] for x in (q, k, v)], do[b : b + 1], causal=True)
        assert same(alone, [x[b : b + 1] for x in together])


@pytest.mark.parametrize("shape", [(1, 1, 1, 900), (2, 1, 60, 900), (1, 4, 60, 900), (60, 1)], ids=str)
def test_bias_gradients_have_one_order_of_sums(shape):
    tensors = [randn(2, 4, 60, 16, seed=0), randn(2, 2, 900, 16, seed=1), randn(2, 2, 900, 16, seed=2)]
    bias, do = randn(*shape, seed=3), randn(2, 4, 60, 16, seed=4)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):  # the keys of four items are shared out to three
            torch.set_num_threads(threads)
            leaf = bias.clone().requires_grad_(True)
            out = polyflash.attention(*tensors, bias=leaf, backend="cpu")
            found.append(torch.autograd.grad(out, leaf, do)[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("asked", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_only_the_gradients_asked_for_are_computed(asked, monkeypatch):
    blocks = []

    def spy(kernel, arguments, items, *rest):
        import ctypes

        address = (ctypes.c_int64 * (BACKWARD.heads_here + 1)).from_address(arguments)
        blocks.append([address[i] for i in (BACKWARD.needs, BACKWARD.dq, BACKWARD.dk, BACKWARD.dv)])
        return run(kernel, arguments, items, *rest)

    run = pool.run
    tensors, do = [randn(1, 2, 80, 32, seed=i) for i in range(3)], randn(1, 2, 80, 32, seed=3)
    whole = gradients(tensors, do)
    monkeypatch.setattr(backward.pool, "run", spy)
    leaves = [x.clone().requires_grad_(i in asked) for i, x in enumerate(tensors)]
    out = polyflash.attention(*leaves, backend="cpu")
    found = torch.autograd.grad(out, [leaves[i] for i in asked], do)
    needs, *sums = blocks[-1]
    assert needs == sum(1 << i for i in asked)
    assert [bool(x) for x in sums] == [i in asked for i in range(3)]
    assert same(found, [whole[i] for i in asked])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{"causal": True}, {"mask": True}, {"kv_lens": True}], ids=str)
def test_what_nobody_sees_changes_no_bit(options, dtype):
    """NaN in keys that no row sees, and in gradients of rows that see no key; ragged rows beside them."""
    q, k, v, do = (randn(1, 2, n, 20, seed=i).to(dtype) for i, n in enumerate((70, 90, 90, 70)))
    visible = torch.rand(70, 90, generator=torch.Generator().manual_seed(9)) < 0.6
    visible[:, 13], visible[5] = False, False
    kept = {
        "causal": ({"causal": True, "q_offset": 3}, range(73, 90), ()),
        "mask": ({"mask": visible}, (13,), (5,)),
        "kv_lens": ({"kv_lens": torch.tensor([60], dtype=torch.int32)}, range(60, 90), ()),
    }[next(iter(options))]
    arguments, keys, rows = kept
    clean = gradients([q, k, v], do, **arguments)
    for j in keys:
        k[:, :, j], v[:, :, j] = float("nan"), float("inf")
    for i in rows:
        do[:, :, i] = float("nan")
    dirty = gradients([q, k, v], do, **arguments)
    assert same(clean, dirty)
    assert all(bool((x[:, :, j] == 0).all()) for x in dirty[1:] for j in keys)
    assert all(bool((dirty[0][:, :, i] == 0).all()) for i in rows)


def test_a_gradient_that_is_not_finite_reaches_the_keys_its_row_sees():
    q, k, v, do = (randn(1, 1, n, 24, seed=i) for i, n in enumerate((40, 40, 40, 40)))
    do[0, 0, 9, 5] = float("inf")
    dq, dk, dv = gradients([q, k, v], do, causal=True)
    assert bool(torch.isinf(dv[0, 0, :10, 5]).all()) and bool(torch.isfinite(dv[0, 0, 10:]).all())
    assert bool(torch.isfinite(dv[0, 0, :, :5]).all())
    assert bool(torch.isnan(dq[0, 0, 9]).any()) and bool(torch.isfinite(dq[0, 0, :9]).all())
    assert bool(torch.isfinite(dk[0, 0, 10:]).all())


def direct(config: BackwardConfig, tensors, do, **options):
    """The row's own `run` with a config that a plan would not choose here."""
    names = {"mask": "mask", "bias": "bias", "softcap": "softcap", "sinks": "sinks", "causal": "causal"}
    q, k, v = tensors
    args = Arguments(need_lse=True, **{names[n]: x for n, x in options.items()})
    out, lse = polyflash.attention(q, k, v, return_lse=True, backend="cpu", **options)
    spec = replace(spec_of(q, k, v, args), phase=Phase.BACKWARD)
    launch = Launch(ROW, config, "explicit", WITHOUT_AMX, spec)
    needs = (True, True, True, args.bias is not None, args.sinks is not None)
    return [x for x in backward.run(launch, do, None, q, k, v, out, lse, args, needs) if x is not None]


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="needs an x86 CPU")
@pytest.mark.parametrize("case", ["plain", "mask", "bias"])
@pytest.mark.parametrize(
    "isa, dtype, compute",
    [
        ("avx2", "float32", "f32"),
        ("avx2", "bfloat16", "f32"),
        ("generic", "float16", "f32"),
        ("avx512", "bfloat16", "bf16dot"),
    ],
)
def test_what_a_plan_does_not_choose_here_runs(isa, dtype, compute, case):
    """Narrower sets; and dots of bfloat16, which a plan for a CPU with AMX leaves out."""
    if isa not in configs._RUNS[HERE] or (compute != "f32" and "avx512_bf16" not in WITHOUT_AMX.features):
        pytest.skip(f"{HERE} does not run {isa} with {compute}")
    kind = getattr(torch, dtype)
    shapes = ((2, 6, 77, 59), (2, 2, 131, 59), (2, 2, 131, 41), (2, 6, 77, 41))
    q, k, v, do = (randn(*s, seed=i).to(kind) for i, s in enumerate(shapes))
    options = CASES[case]
    found = direct(BackwardConfig(32, 2, compute, isa), (q, k, v), do, **options)
    leaves = [x.double().requires_grad_(True) for x in (q, k, v)]
    more = {
        n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for n, x in options.items()
    }
    trained = [n for n in ("bias", "sinks") if n in more]
    leaves += [more[n].requires_grad_(True) for n in trained]
    out = polyflash.attention(*leaves[:3], backend="torch", **more)
    bound = {"float32": 4e-6, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype]
    for got, want in zip(found, torch.autograd.grad(out, leaves, do.double()), strict=True):
        assert (got.double() - want).norm() <= bound * want.norm()


@pytest.mark.parametrize("block_n, row_panels", [(16, 1), (32, 3), (128, 2)])
def test_every_config_computes_the_same(block_n, row_panels):
    q, k, v, do = (randn(1, 2, n, 36, seed=i) for i, n in enumerate((300, 333, 333, 300)))
    found = direct(BackwardConfig(block_n, row_panels, isa=HERE), (q, k, v), do, causal=True)
    want = gradients([q, k, v], do, causal=True)
    for a, b in zip(found, want, strict=True):
        assert (a - b).norm() <= 2e-6 * b.norm()


HOT = {"product": 4, "outer": 4, "accumulate_grad": 4}


@pytest.mark.parametrize(
    "isa, compute, storage, triple, cpu, multiply",
    [("neon", "f32", "float32", *ARM[0], "fmla"), ("neon", "f32", "bfloat16", *ARM[1], "fmla")]
    + [
        pytest.param("neon", "f32", s, *a, "fmla", marks=pytest.mark.slow)
        for s, a in (("bfloat16", ARM[0]), ("float32", ARM[1]))
    ]
    + [("avx2", "f32", "float32", LINUX, "haswell", "vfmadd")]
    + [("avx512", "f32", "float32", LINUX, "znver4", "vfmadd")]
    + [("avx512", "bf16dot", "bfloat16", LINUX, "znver4", "vdpbf16ps")],
)
def test_all_five_products_stay_in_registers(isa, compute, storage, triple, cpu, multiply):
    nv = max(configs.ISAS[isa].group_keys)
    stages = assembly(BackwardKey(isa, compute, storage, nv, 128), triple, cpu)
    accumulators = nv * configs.ISAS[isa].group_keys[nv]
    for name, unroll in HOT.items():
        loop = hottest(stages[name], multiply)
        unroll = 2 if name == "accumulate_grad" and compute == "bf16dot" else unroll
        assert sum(multiply in line for line in loop) == unroll * accumulators, name
        assert not [line for line in loop if re.search(r"\[sp|\[x29|rsp", line)], name


@pytest.mark.parametrize(
    "isa, triple, cpu", [("neon", *ARM[0]), ("avx2", LINUX, "haswell"), ("generic", LINUX, "x86-64")]
)
def test_no_stage_calls_a_library(isa, triple, cpu):
    wide = max(configs.ISAS[isa].group_keys)
    for key in (BackwardKey(isa, "f32", "float16", wide, 64), BiasGradientKey(isa, wide)):
        for name, stage in assembly(key, triple, cpu).items():
            calls = [
                x for block in stage for x in block if re.match(r"(bl|callq?)\s", x) and "get_pc" not in x
            ]
            assert not calls, (key.name, name, calls)


def test_all_keys_have_code_for_this_cpu():
    """A chosen key of every dtype loads: nothing in its object is left undefined."""
    for dtype in ROW.dtypes:
        x = randn(1, 1, 3, 8).to(getattr(torch, dtype)).requires_grad_(True)
        polyflash.attention(x, x, x, backend="cpu").sum().backward()
        assert bool(torch.isfinite(x.grad).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seqlen_k", [70, 1100], ids=["whole", "shared out"])
def test_gradients_are_laid_out_as_their_operands(seqlen_k, dtype):
    """Rows of a (batch, seqlen, heads, head_dim) tensor get such gradients, and no copy is made of them."""
    shapes = ((1, 70, 1, 24), (1, seqlen_k, 1, 24), (1, seqlen_k, 1, 40))
    wide = [randn(b, s, 3 * h, d, seed=i).to(dtype) for i, (b, s, h, d) in enumerate(shapes)]
    views = [x.view(x.shape).transpose(1, 2)[:, :1].requires_grad_(True) for x in wide]
    plain = [x.detach().contiguous().requires_grad_(True) for x in views]
    do = randn(1, 1, 70, 40, seed=5).to(dtype)
    found, want = (torch.autograd.grad(polyflash.attention(*x, backend="cpu"), x, do) for x in (views, plain))
    assert same(found, want)
    heads = [randn(2, 9, 4, 8, seed=i).to(dtype).transpose(1, 2).requires_grad_(True) for i in range(3)]
    for x, gradient in zip(
        heads, torch.autograd.grad(polyflash.attention(*heads, backend="cpu").sum(), heads), strict=True
    ):
        assert gradient.stride() == x.stride()


@pytest.mark.parametrize(
    "options", [{}, {"mask": torch.ones(1, 1, dtype=torch.bool)}, {"softcap": 50.0}], ids=str
)
def test_the_weight_of_an_only_key_is_one(options):
    """However large its score: dV is dO itself, and nothing is left for Q and K."""
    q, k, v, do = (30 * randn(2, 3, 1, 24, seed=i) for i in range(4))
    dq, dk, dv = gradients([q, k, v], do, **options)
    assert torch.equal(dv, do)
    assert dq.abs().max() <= 1e-5 * (do * v).abs().sum() and dk.abs().max() <= 1e-5 * (do * v).abs().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("least", [torch.finfo(torch.float32).min, -1e30], ids=["lowest", "low"])
def test_a_row_of_huge_negative_bias_spoils_nothing(least, dtype):
    """Left padding as a finite additive mask: the row's weights mean nothing, and its dO is 0."""
    q, k, v, do = (randn(1, 2, 40, 24, seed=i).to(dtype) for i in range(4))
    bias = torch.zeros(1, 1, 40, 40)
    bias[:, :, :7] = least
    do[:, :, :7] = 0
    found = gradients([q, k, v], do, bias=bias)
    assert all(bool(torch.isfinite(x).all()) for x in found)
    want = gradients([q[:, :, 7:], k, v], do[:, :, 7:])
    for got, right in zip((found[0][:, :, 7:], *found[1:]), want, strict=True):
        torch.testing.assert_close(got.float(), right.float(), rtol=1e-2, atol=2e-3)


def test_sums_to_one_element_do_not_depend_on_threads():
    q, k, v = (randn(1, 1, n, 4, seed=i) for i, n in enumerate((40_001, 3, 3)))
    sinks, bias, do = randn(1, seed=4), randn(1, 1, 1, 1, seed=5), randn(1, 1, 40_001, 4, seed=3)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            leaves = [x.clone().requires_grad_(True) for x in (sinks, bias)]
            out, lse = polyflash.attention(
                q, k, v, sinks=leaves[0], bias=leaves[1], backend="cpu", return_lse=True
            )
            found.append(torch.autograd.grad([out, lse], leaves, [do, do[..., 0].contiguous()]))
    finally:
        torch.set_num_threads(before)
    assert all(same(found[0], x) for x in found[1:])
