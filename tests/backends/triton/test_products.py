"""How float32 is multiplied: exactly, whatever the values; which way a call takes, and torch's switch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from polyflash import env, routes, target, torch_ops
from polyflash.backends.triton import configs
from polyflash.backends.triton.config_types import PRECISIONS, product_of
from polyflash.errors import SpecError
from polyflash.spec import Arguments, AttentionSpec, Phase
from tests import device
from tests.backends.triton.direct import SPLITS, TILE, call
from tests.tolerance import expect, relative_l2

INF, NAN = float("inf"), float("nan")
runs_kernels = pytest.mark.skipif(
    not env.TRITON_INTERPRET.is_set() and device.DEVICE.type == "cpu",
    reason="needs Triton's interpreter or a GPU",
)
PLAIN = AttentionSpec(Phase.FORWARD, "float32", "cuda", 1, 8, 8, 2048, 2048, 64, 64, frozenset())
H200 = target.parse("cuda:sm90")
PARTS = tuple(p for p in PRECISIONS if p != "ieee")


def problem(rows: int = 20, keys: int = 70, seed: int = 3) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, 2, n, 32, generator=g) for n in (rows, keys, keys))


@runs_kernels
@pytest.mark.parametrize("config", (TILE, SPLITS), ids=("forward", "decode"))
def test_parts_are_as_exact_as_multiply_adds(config):
    q, k, v = problem()
    for size in (1.0, 4.0):  # scores of up to 50 too
        want = expect(size * q, size * k, v)
        plain, parts = (
            relative_l2(call(replace(config, precision=p), size * q, size * k, v)[0], want.out)
            for p in ("ieee", "bf16x6")
        )
        assert parts <= 1.5 * plain, f"{parts} against {plain}"


# Odd values that stand together: where they are seen each in a channel of its own, which has its own sums.
SEEN, HIDDEN = ((3.4e38, -3.4e38), (INF, -INF, NAN)), ((NAN, INF, -INF), (3.4e38, 3.4e38, -3.4e38))


@runs_kernels
@pytest.mark.parametrize("alone", (False, pytest.param(True, marks=pytest.mark.slow)))
def test_values_that_have_no_parts(alone: bool):
    """What IEEE arithmetic makes of the largest values, infinities and NaN: parts neither overflow nor make
    NaN of what is visible; hidden values leave no trace."""
    seen, unseen = ([(x,) for odd in odds for x in odd] if alone else odds for odds in (SEEN, HIDDEN))
    for odd in seen:
        q, k, v = problem()
        v[:, :, 40, 5 : 5 + len(odd)] = torch.tensor(odd)
        got, want = (call(replace(TILE, precision=p), q, k, v, causal=True)[0] for p in ("bf16x6", "ieee"))
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf()), odd
        finite = want.isfinite()
        torch.testing.assert_close(got[finite], want[finite], rtol=1e-5, atol=1e-6)
    q, k, v = problem()
    hidden = torch.arange(70) % 3 == 1
    clean = call(replace(TILE, precision="bf16x6"), q, k, v, mask=~hidden.expand(20, 70))[0]
    for odd in unseen:
        values = torch.tensor(odd).repeat(24)[: int(hidden.sum()), None]
        k[:, :, hidden], v[:, :, hidden] = values, values
        assert torch.equal(
            call(replace(TILE, precision="bf16x6"), q, k, v, mask=~hidden.expand(20, 70))[0], clean
        )


@runs_kernels
def test_an_infinite_score_is_one():
    """An infinity times a finite value: the whole weight of its row, as eager operations have it."""
    q, k, v = problem()
    q[:, :, 4], k[:, :, 7] = 0.0, 0.0
    q[:, :, 4, 0], k[:, :, 7, 0], k[:, :, :7, 0], k[:, :, 8:, 0] = 1.0, -INF, 1.0, 1.0
    got, want = (call(replace(TILE, precision=p), q, k, v)[0] for p in ("bf16x6", "ieee"))
    assert torch.equal(got.isnan(), want.isnan())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)


@runs_kernels
def test_small_and_large_values_keep_their_bits():
    """Parts have the size of their value, so that those of the smallest normal numbers are none below it."""
    q, k, v = problem()
    for size, bound in ((2.0**100, 2e-6), (2.0**-100, 2e-6), (2.0**-122, 2e-6), (2.0**-130, 2e-5)):
        out, _ = call(replace(TILE, precision="bf16x6"), q, k, size * v)
        assert relative_l2(out.double() / size, expect(q, k, v).out) <= bound, size


def test_what_is_chosen():
    for phase in Phase:
        spec = replace(PLAIN, phase=phase, seqlen_q=1 if phase is Phase.DECODE else 2048)
        for arch, wanted in (("cuda:sm90", "bf16x6"), ("cuda:sm89", "ieee"), ("hip:gfx942", "ieee")):
            config = configs.choose(spec, target.parse(arch))
            assert config.precision == wanted
            note = "six bfloat16 products" if wanted == "bf16x6" else "multiply-adds"
            assert any(note in n for n in config.notes(spec))
            assert product_of(config, spec, target.parse(arch)) == wanted
        assert configs.choose(replace(spec, dtype="bfloat16"), H200).precision == "ieee"
        precisions = {c.precision for c in configs.switches(spec, H200)}
        assert precisions == set(PRECISIONS)
    for dim, kept in ((64, True), (128, False)):
        forward = configs.choose(replace(PLAIN, head_dim=dim, head_dim_v=dim), H200)
        assert forward.compensate is kept
        found = {c.compensate for c in configs.switches(replace(PLAIN, head_dim=dim, head_dim_v=dim), H200)}
        assert found == {True, False}
    wide = configs.choose(replace(PLAIN, head_dim=576, head_dim_v=512), H200)
    assert wide.precision == "ieee" and wide.compensate


def test_tf32_where_torch_says_so_and_nowhere_else(monkeypatch: pytest.MonkeyPatch):
    config = configs.choose(PLAIN, H200)
    asked = replace(PLAIN, tf32=True)
    assert product_of(config, asked, H200) == "tf32"
    assert any("TF32" in note for note in config.notes(asked))
    assert product_of(config, asked, target.parse("hip:gfx942")) == config.precision
    assert product_of(config, replace(asked, dtype="bfloat16"), H200) == "ieee"
    with pytest.raises(SpecError, match="precision"):
        product_of(replace(config, precision="tf32x3"), PLAIN, target.parse("hip:gfx942"))
    # torch's switch, in its old and its new words
    matmul, found = torch.backends.cuda.matmul, []
    before = matmul.fp32_precision
    tensor = SimpleNamespace(dtype=torch.float32, is_cuda=True)
    try:
        for word in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(word)
            found.append(routes.takes_tf32(tensor))
        for word in ("ieee", "tf32"):
            matmul.fp32_precision = word
            found.append(routes.takes_tf32(tensor))
        assert not routes.takes_tf32(SimpleNamespace(dtype=torch.bfloat16, is_cuda=True))
        assert not routes.takes_tf32(SimpleNamespace(dtype=torch.float32, is_cuda=False))
    finally:
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = before
    assert found == [False, True, True, False, True]


def test_the_switch_may_change_between_two_calls(monkeypatch: pytest.MonkeyPatch):
    """The route of a call depends on it, and the spec that is planned says so."""
    q, k, v = (x.float() for x in problem())
    monkeypatch.setattr(torch_ops, "_routes", {})
    seen = []
    for switched in (False, True, False):
        for module in (torch_ops, routes):
            monkeypatch.setattr(module, "takes_tf32", lambda x, switched=switched: switched)
        seen.append(torch_ops._route(Phase.DECODE, q, k, v, Arguments(), (False, None, False)).spec.tf32)
    assert seen == [False, True, False] and len(torch_ops._routes) == 2
