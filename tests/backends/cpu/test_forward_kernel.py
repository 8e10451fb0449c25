"""The kernel below the public API: edges the conformance suite does not reach by name, and its object code.

Few keys on purpose: each costs seconds to compile on a machine without a cache.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import subprocess
import sys
import threading

import pytest
import torch

from polyflash import target
from polyflash.backends.cpu import capabilities, configs
from polyflash.backends.cpu.configs import Config, KernelKey
from polyflash.errors import SpecError
from polyflash.plan import Launch
from polyflash.spec import Arguments, AttentionSpec, Phase

# A plan for a CPU with AMX takes no dots of bfloat16, so nothing else would run them there.
HERE = target.replace(target.detect("cpu"), features=target.detect("cpu").features - {"amx_bf16"})
pytestmark = pytest.mark.skipif(HERE.arch != "avx512", reason="the kernel needs AVX-512")


def attend(q, k, v, config=None, **options):
    """(out, lse) of the kernel itself."""
    from polyflash.backends.cpu import forward

    args = Arguments(**{"need_lse": True, **options})
    sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    spec = AttentionSpec(
        Phase.FORWARD, str(q.dtype).removeprefix("torch."), "cpu", *sizes, frozenset(), causal=args.causal
    )
    launch = Launch(
        capabilities.CAPABILITIES[0], config or configs.choose(spec, HERE), "heuristic", HERE, spec
    )
    out = torch.full((*q.shape[:3], v.shape[3]), math.nan, dtype=q.dtype)
    lse = torch.full(q.shape[:3], math.nan) if args.need_lse else torch.empty(0)
    return forward.run(launch, q, k, v, out, lse, args)


def exact(q, k, v, visible=None, scale=None):
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if visible is not None:
        s = s.masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(s, -1)
    return torch.exp(s - lse.nan_to_num(neginf=0.0)[..., None]) @ v, lse


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    "dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_tails_in_every_direction(dtype, bound, causal):
    q, k, v = (
        randn(2, 6, 133, 59, dtype=dtype),
        randn(2, 2, 301, 59, dtype=dtype, seed=1),
        randn(2, 2, 301, 41, dtype=dtype, seed=2),
    )
    visible = torch.arange(301) <= torch.arange(133)[:, None] + 301 - 133 if causal else None
    out, lse = attend(q, k, v, causal=causal)
    want, want_lse = exact(q, k, v, visible)
    assert (out.double() - want).norm() / want.norm() <= bound
    assert (lse - want_lse).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_visible_key_returns_its_value_bit_for_bit(dtype):
    q, k, v = (randn(1, 2, 70, 64, dtype=dtype, seed=i) for i in range(3))
    out, lse = attend(q, k, v, window_left=0, window_right=0)
    assert torch.equal(out, v)
    assert (lse - (q.double() * k.double()).sum(-1) / 8).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_bad_value_reaches_only_the_rows_that_see_it(dtype, poison):
    q, k, v = (randn(1, 2, 200, 64, dtype=dtype, seed=i) for i in range(3))
    clean, _ = attend(q, k, v, causal=True)
    bad = v.clone()
    bad[0, 1, 77, 5] = poison
    out, lse = attend(q, k, bad, causal=True)
    assert torch.isfinite(lse).all()
    assert torch.equal(out[0, 0], clean[0, 0]) and torch.equal(out[0, 1, :77], clean[0, 1, :77])
    finite = torch.isfinite(out[0, 1, 77:])
    assert not finite[:, 5].any() and finite[:, :5].all() and finite[:, 6:].all()


def test_bits_do_not_depend_on_rows_beside_or_threads_or_panels():
    q, k, v = (randn(1, 2, 300, 64, seed=i) for i in range(3))
    whole, lse = attend(q, k, v, causal=True)
    for first, last in ((0, 1), (5, 21), (70, 100), (100, 300)):
        part, part_lse = attend(q[:, :, first:last], k, v, causal=True, offset=first)
        assert torch.equal(part, whole[:, :, first:last]) and torch.equal(part_lse, lse[:, :, first:last])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone, _ = attend(q, k, v, causal=True)
        torch.set_num_threads(5)
        many, _ = attend(q, k, v, causal=True, config=Config(128, 1))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone, whole) and torch.equal(many, whole)


def test_scales_of_any_sign():
    q, k, v = (randn(1, 2, 65, 64, seed=i) for i in range(3))
    for scale in (-0.4, 1e-30, 0.7):
        out, lse = attend(q, k, v, scale=scale)
        want, want_lse = exact(q, k, v, scale=scale)
        assert (out - want).abs().max() <= 1e-5 and (lse - want_lse).abs().max() <= 1e-4
    for dtype in (torch.float32, torch.bfloat16):
        a, b, c = (x.to(dtype) for x in (q, k, v))
        assert torch.equal(attend(-a, b, c, scale=-0.4)[0], attend(a, b, c, scale=0.4)[0])
    out, lse = attend(q, k, v, scale=0.0)
    assert (out - v.mean(-2, keepdim=True)).abs().max() <= 1e-6
    assert (lse - math.log(65)).abs().max() <= 1e-6


def test_masks_broadcast_and_strided():
    q, k, v = (randn(2, 2, 77, 64, seed=i) for i in range(3))
    wide = torch.rand(2, 2, 77, 154, generator=torch.Generator().manual_seed(9)) < 0.6
    for mask in (
        wide[..., :77],
        wide[..., ::2],
        wide[:1, :1, :, :77],
        wide[:, :1, :1, :77],
        wide[0, 0, :, :1],
        wide[..., :77].mT,
    ):
        out, lse = attend(q, k, v, mask=mask)
        want, want_lse = exact(q, k, v, mask.expand(2, 2, 77, 77))
        empty = want_lse == -math.inf
        assert torch.equal(lse == -math.inf, empty) and (out[empty] == 0).all()
        assert (out - want).abs().max() <= 2e-6


def at_page_end(x):
    """A copy whose last byte is the last before an unreadable page: an over-read kills the process."""
    size = x.numel() * x.element_size()
    pages = -(-size // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    guard = ctypes.c_void_p(start + pages * mmap.PAGESIZE)
    assert ctypes.CDLL(None).mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    offset = pages * mmap.PAGESIZE - size
    flat = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=offset)
    return flat.view(x.shape).copy_(x)


@pytest.mark.skipif(sys.platform == "win32", reason="pages are protected through mprotect")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, keys, dims", [(77, 77, 59), (64, 129, 64), (33, 31, 1)])
def test_no_byte_past_an_operand_is_touched(dtype, rows, keys, dims):
    q = at_page_end(randn(1, 2, rows, dims, dtype=dtype))
    k, v = (at_page_end(randn(1, 2, keys, dims, dtype=dtype, seed=i)) for i in (1, 2))
    mask = at_page_end(torch.rand(1, 2, rows, keys, generator=torch.Generator().manual_seed(9)) < 0.6)
    for options in ({}, {"mask": mask}, {"mask": mask[..., :1]}):
        out, _ = attend(q, k, v, **options)
        visible = options["mask"].expand(1, 2, rows, keys) if options else None
        assert (out - exact(q, k, v, visible)[0]).abs().max() <= 0.02


def test_python_threads_share_one_launch():
    inputs = [tuple(randn(1, 2, 130, 64, seed=3 * i + j) for j in range(3)) for i in range(6)]
    wanted = [attend(*x)[0] for x in inputs]
    wrong = []

    def work(i):
        wrong.extend(i for _ in range(20) if not torch.equal(attend(*inputs[i])[0], wanted[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_config_for_another_machine_is_refused():
    x = randn(1, 1, 20, 64)
    with pytest.raises(SpecError, match="compute"):
        attend(x, x, x, config=Config(128, 4, "bf16dot"))


def test_the_object_needs_no_symbol_from_outside(tmp_path):
    from polyflash.backends.cpu.kernels import forward

    code = forward.build(KernelKey("avx512", "f32", "float32", 1, 64))._library._get_compiled_object()
    path = tmp_path / "kernel.o"
    path.write_bytes(code)
    try:
        symbols = subprocess.run(
            ["nm", "-u", path], capture_output=True, text=True, check=True, timeout=20
        ).stdout
    except FileNotFoundError:
        pytest.skip("no nm here")
    assert symbols.split() == []
