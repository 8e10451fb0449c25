"""Every place of the package's core that refuses a call is reached by a case here, which also gets its words.

The places are read off the syntax trees, so one without a case fails the last test. Those of integrations/,
kvcache/, bench/, tuning/, code generation and files have their cases beside their other tests;
`pytest --refusals` counts them over a whole run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import polyflash
from polyflash import (
    Mask,
    SpecError,
    UnsupportedError,
    attention,
    attention_varlen,
    explain,
    merge,
    target,
    torch_ops,
)
from polyflash.backends.cpu import backward_configs, configs, decode_configs, runtime
from polyflash.backends.gluon import configs as gluon_configs
from polyflash.backends.metal import configs as metal_configs
from polyflash.backends.torch import configs as torch_configs
from polyflash.backends.triton import config_types, tiles
from polyflash.backends.triton import configs as triton_configs
from polyflash.integrations import flash_registry
from polyflash.quant import Scheme, quantize
from polyflash.spec import Arguments, AttentionSpec, Phase
from tests.refusals import BESIDE, Refusals, Site, advice, missing, sites

META = torch.device("meta")
WIDE = AttentionSpec(Phase.FORWARD, "float32", "mps", 1, 1, 1, 64, 64, 128, 128, frozenset())


def x(*shape: int, **kinds: Any) -> Tensor:
    return torch.ones(shape or (2, 2, 5, 8), **kinds)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def call(**options: Any) -> Callable[[], Any]:
    """`attention` on right operands but for these."""
    return functools.partial(attention, **{"q": x(), "k": x(), "v": x(), **options})


def packed(**options: Any) -> Callable[[], Any]:
    given = {n: x(5, 2, 8) for n in "qkv"} | {f"cu_seqlens_{s}": ints(0, 2, 5) for s in "qk"}
    return functools.partial(attention_varlen, **{**given, **options})


def op(**options: Any) -> Callable[[], Any]:
    """The op's own checks, of primitives that no public function lets through."""
    return lambda: torch_ops.check(x(), x(), x(), Arguments(**options))


def coded(k: Tensor | None = None, **options: Any) -> None:
    """The op's own checks of codes."""
    k = torch.ones(2, 2, 5, 8, dtype=torch.int8) if k is None else k
    torch_ops.check(x(), k, x(), Arguments(**options))


def raw_lists(shape: tuple[int, ...], rows: int = 5, **kinds: Any) -> Callable[[], Any]:
    bounds = torch.zeros(shape, **{"dtype": torch.int32, **kinds})
    return op(intervals=bounds, interval_rows=rows)


def statistics(**options: Any) -> Callable[[], Any]:
    given = {"q": x(), "k": x(), "lse": x(2, 2, 5)}
    return functools.partial(polyflash.row_stats, **{**given, **options})


def tangent() -> Any:
    with forward_ad.dual_level():
        return attention(forward_ad.make_dual(x(), x()), x(), x())


def second_derivative() -> Any:
    q = x().requires_grad_()
    (dq,) = torch.autograd.grad(attention(q, x(), x()).sum(), q, create_graph=True)
    return torch.autograd.grad(dq.sum(), q)


def second_derivative_of_func() -> Any:
    loss = lambda q: attention(q, x(), x()).sum()  # noqa: E731
    return torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(x())


def tangent_of_func() -> Any:
    return torch.func.jvp(lambda q: attention(q, x(), x()), (x(),), (x(),))


def tangent_of_backward() -> Any:
    """Through the cotangent alone: the forward pass carries no tangent."""
    back = lambda dout: torch.func.vjp(lambda q: attention(q, x(), x()), x())[1](dout)  # noqa: E731
    return torch.func.jvp(back, (x(),), (x(),))


def results_of_another_call() -> Any:
    lse = x(2, 2, 6)
    needs = [True] * 3 + [False] * 2
    return torch.ops.polyflash.attention_backward(x(), None, x(), x(), x(), x(), lse, needs)


def no_registry() -> Any:
    with mock.patch.object(flash_registry.torch.nn, "attention", object()):
        return flash_registry.registry()


def unknown_backend_in_use() -> Any:
    token = torch_ops.backend_in_use.set("nobody")
    try:
        return attention(x(), x(), x())
    finally:
        torch_ops.backend_in_use.reset(token)


def out_under_a_transform() -> Any:
    return torch.func.vmap(lambda q: attention(q, x(), x(), out=x()))(x(3, 2, 2, 5, 8))


def config(**options: Any) -> Callable[[], Any]:
    return lambda: replace(configs.Config(64, 4), **options)


def fits(**options: Any) -> Callable[[], Any]:
    def check() -> None:
        where = target.parse("cpu:avx512")
        spec = explain(x(), x(), x(), backend="cpu", target="cpu:avx512").spec
        configs.check_fits(replace(configs.Config(64, 4), **options), spec, where)

    return check


def sdpa_by_hand() -> Any:
    plan = explain(x(), x(), x(), backend="torch")
    return attention(x(), x(), x(), backend="torch", softcap=5.0, config=replace(plan.config, sdpa=True))


CPU_KEY = {"isa": "avx512", "compute": "f32", "storage": "float32", "nv": 2, "bucket": 64}


def key(**options: Any) -> Callable[[], Any]:
    return lambda: configs.KernelKey(**{**CPU_KEY, **options})


def pages(**options: Any) -> Callable[[], Any]:
    """`attention_paged` on one token of two requests over four pages of three keys."""
    given = {"q": x(2, 2, 8), "k_pages": x(4, 3, 2, 8), "v_pages": x(4, 3, 2, 8)}
    given |= {"page_table": torch.zeros(2, 2, dtype=torch.int32), "kv_lens": ints(4, 2)}
    return functools.partial(polyflash.attention_paged, **{**given, **options})


def groups(**options: Any) -> Callable[[], Any]:
    """`attention_groups` of two groups of five rows."""
    given = {"q_groups": [x(), x()], "k": x(), "v": x(), "q_offsets": [0, 0]}
    return functools.partial(polyflash.attention_groups, **{**given, **options})


def paged(q: Tensor | None = None, pool: Tensor | None = None, **options: Any) -> Callable[[], Any]:
    """The op on one token of two requests over four pages of three keys."""
    pool = x(4, 2, 3, 8) if pool is None else pool
    given = {"page_table": torch.zeros(2, 2, dtype=torch.int32), "kv_lens": ints(4, 2), **options}
    return lambda: torch_ops.call(x(2, 2, 1, 8) if q is None else q, pool, pool, Arguments(**given))


def freed() -> Any:
    keys = x()
    keys.untyped_storage().resize_(16)
    return attention(x(), keys, x())


CASES: dict[str, Callable[[], Any]] = {
    # q, k, v
    "no tensor": call(q=None), "sparse": call(k=x().to_sparse()), "rank": call(q=x(5, 8)),
    "dtype": call(q=x().int(), k=x().int(), v=x().int()), "another dtype": call(k=x().half()),
    "another device": call(k=x(device=META)), "another batch": call(k=x(1, 2, 5, 8)),
    "heads of v": call(v=x(2, 1, 5, 8)), "seqlen of v": call(v=x(2, 2, 6, 8)),
    "head_dim of k": call(k=x(2, 2, 5, 9)), "no channels": call(q=x(2, 2, 5, 0), k=x(2, 2, 5, 0)),
    "freed storage": freed,
    "ratio of heads": call(k=x(2, 3, 5, 8), v=x(2, 3, 5, 8)),
    "no channels of v": call(v=x(2, 2, 5, 0)),
    # scalars
    "scale": call(scale=float("inf")), "no number": call(scale=True), "number": call(scale=10**400),
    "softcap": call(softcap=-1.0), "dropout_p": call(dropout_p=1.0), "causal": call(causal="left"),
    "layout": call(layout="hbsd"), "rank under bshd": call(layout="bshd", q=x(5, 8)),
    "backend": call(backend="nobody"), "backend in use": unknown_backend_in_use,
    "q_offset": call(q_offset=1.5), "far q_offset": call(q_offset=2**80),
    "seed": call(dropout_p=0.5, dropout_seed=x(2)), "far seed": call(dropout_p=0.5, dropout_seed=2**70),
    # operands
    "kv_lens of another type": call(kv_lens=[5, 5]), "kv_lens dtype": call(kv_lens=x(2)),
    "kv_lens shape": call(kv_lens=ints(5)), "kv_lens contents": call(kv_lens=ints(5, 6)),
    "flag": call(batch_invariant=x(2)), "device of a mask": lambda: Mask.causal().to(3.5),
    "mask of another type": call(mask="causal"), "mask dtype": call(mask=x(5)),
    "mask shape": call(mask=x(7, dtype=torch.bool)),
    "mask device": call(mask=x(5, dtype=torch.bool, device=META)),
    "bias dtype": call(bias=x(5).int()), "slopes dtype": call(alibi_slopes=x(2).int()),
    "slopes shape": call(alibi_slopes=x(3)), "trained slopes": call(alibi_slopes=x(2, requires_grad=True)),
    "window": call(window=3), "window side": call(window=("a", 0)), "far window": call(window=(-1, 0)),
    "out": call(out=3), "out with gradients": call(out=x(), q=x(requires_grad=True)),
    "out shape": call(out=x(1)), "out shared": call(out=x(1, 1, 1, 8).expand(2, 2, 5, 8)),
    "out under vmap": out_under_a_transform,
    "ids of one side": op(q_segments=ints(0, 0)[:, None].expand(2, 5)),
    "max_seqlen alone": op(max_seqlen_q=3),
    # packed members
    "no members": packed(cu_seqlens_k=None), "members of another type": packed(cu_seqlens_q=[0, 5]),
    "rank of members": packed(q=x(1, 5, 2, 8)), "bias beside members": op(cu_seqlens_q=ints(0), bias=x()),
    "batch beside members": op(cu_seqlens_q=ints(0, 5), cu_seqlens_k=ints(0, 5)),
    "members dtype": packed(cu_seqlens_q=x(3)), "beyond 32 bits": call(kv_lens=torch.tensor((5, 2**31))),
    "members device": packed(cu_seqlens_q=torch.zeros(3, dtype=torch.int32, device=META)),
    "other members": packed(cu_seqlens_k=ints(0, 5)), "max_seqlen below 0": packed(max_seqlen_q=-1),
    "first bound": packed(cu_seqlens_q=ints(1, 2, 5)), "falling bounds": packed(cu_seqlens_q=ints(0, 4, 2)),
    "last bound": packed(cu_seqlens_q=ints(0, 2, 9)), "max_seqlen too low": packed(max_seqlen_q=1),
    # pages
    "table dtype": paged(page_table=torch.zeros(2, 2)), "table rank": paged(page_table=ints(0, 0)),
    "table device": paged(page_table=torch.zeros(2, 2, dtype=torch.int32, device=META)),
    "table rows": paged(page_table=torch.zeros(3, 2, dtype=torch.int32)),
    "mask beside pages": paged(mask=x(6, dtype=torch.bool)), "dropout beside pages": paged(dropout_p=0.5),
    "keys' bounds beside pages": paged(cu_seqlens_k=ints(0, 4, 6)), "no kv_lens": paged(kv_lens=None),
    "no page_size": paged(pool=x(4, 2, 0, 8)), "max_seqlen_q of tokens": paged(max_seqlen_q=1),
    "pages of v": lambda: torch_ops.check(
        x(), x(4, 2, 3, 8), x(5, 2, 3, 8), Arguments(page_table=ints(0, 0)[:, None], kv_lens=ints(1, 1))
    ),
    "page beyond the pool": paged(page_table=ints(3, 9, 3, 9).view(2, 2)),
    "gradient of pages": paged(q=x(2, 2, 1, 8, requires_grad=True)),
    "gradient of bounded rows": lambda: torch_ops.call(
        x(requires_grad=True), x(), x(), Arguments(row_bounds=torch.zeros(5, 2, dtype=torch.int32))
    ),
    "row bounds": op(row_bounds=ints(0, 5)),
    "rank of tokens": pages(q=x(2, 1, 2, 8)), "rank of pages": pages(k_pages=x(12, 2, 8)),
    "table of another type": pages(page_table=[[0, 1], [2, 3]]), "several tokens": pages(q=x(6, 2, 8)),
    "pages of another type": pages(v_pages=None),
    # groups
    "groups of another type": groups(q_groups=x()),
    "group of other heads": groups(q_groups=[x(), x(2, 4, 5, 8)]),
    "keys of another shape": groups(k=x(1)), "masks of fewer groups": groups(mask=[None]),
    "mask of other keys": groups(mask=torch.ones(9, dtype=torch.bool)),
    "mask of one group": groups(mask=[None, torch.ones(2)]),
    "fused beside bias": groups(bias=torch.ones(1), fused=True),
    "ids of one group": groups(mask=Mask.segments(ints(1), ints(1))),
    "length beyond the keys": groups(kv_lens=[5, 6]), "causal by name": groups(causal="top_left"),
    "fused by name": groups(fused="yes"), "offsets of fewer groups": groups(q_offsets=[0]),
    "lengths by tensor": groups(kv_lens=ints(1, 2)), "offset of another type": groups(q_offsets=[0, 1.5]),
    # interval lists
    "lists dtype": raw_lists((1, 1, 1, 1, 2), dtype=torch.int64), "lists rows": raw_lists((1, 1, 1, 1, 2), 0),
    "lists row blocks": raw_lists((1, 1, 3, 1, 2)), "lists shape": raw_lists((3, 1, 1, 1, 2)),
    "lists device": raw_lists((1, 1, 1, 1, 2), device=META),
    "lists overlap": call(mask=Mask.intervals(ints(0, 1)[None], ints(3, 4)[None], rows=5)),
    # masks
    "alignment": lambda: Mask.causal("left"), "rows alone": lambda: Mask(rows=3),
    "one side of segments": lambda: Mask.segments(None, ints(0)), "& a tensor": lambda: Mask.causal() & x(),
    "two lengths": lambda: Mask.lengths(ints(1)) & Mask.lengths(ints(2)),
    "starts dtype": lambda: Mask.intervals(x(1, 1), x(1, 1), rows=1),
    "starts rank": lambda: Mask.intervals(ints(0), ints(1), rows=1),
    "ends shape": lambda: Mask.intervals(ints(0)[None], ints(1, 2)[None], rows=1),
    "rows of lists": lambda: Mask.intervals(ints(0)[None], ints(1)[None], rows=0),
    "blocks": lambda: Mask.blocks(x(2, 2), rows=1, keys=1),
    # merge
    "merge of ints": lambda: merge(x().int(), x(2, 2, 5), x(), x(2, 2, 5)),
    "merge devices": lambda: merge(x(device=META), x(2, 2, 5), x(), x(2, 2, 5)),
    "merge layout": lambda: merge(x(), x(2, 2, 5), x(), x(2, 2, 5), layout="x"),
    "merge rank": lambda: merge(x(2, 5, 8), x(2, 5), x(2, 5, 8), x(2, 5)),
    "merge shapes": lambda: merge(x(), x(2, 2, 5), x(2, 2, 6, 8), x(2, 2, 5)),
    "merge lse": lambda: merge(x(), x(2, 2, 6), x(), x(2, 2, 5)),
    "merge of nothing": lambda: merge([]),
    # gradients
    "tangent": tangent, "second derivative": second_derivative, "tangent of torch.func": tangent_of_func,
    "second derivative of torch.func": second_derivative_of_func,
    "tangent of a gradient": tangent_of_backward, "results of another call": results_of_another_call,
    # torch's own registry
    "no registry": no_registry,
    "a compiler that does not import": lambda: runtime._compile(SimpleNamespace(name="x", builder="nowhere")),
    "a numba of other insides": lambda: runtime._compile(SimpleNamespace(name="x", builder="math")),
    "dropout of the registry": lambda: flash_registry._flash_arguments(0.5, False, None, None),
    # statistics
    "lse of another type": statistics(lse=None), "lse shape": statistics(lse=x(2, 2, 6)),
    "statistics layout": statistics(layout="bshd", cu_seqlens_q=ints(0, 5), cu_seqlens_k=ints(0, 5)),
    "lse rank": statistics(cu_seqlens_q=ints(0, 5), cu_seqlens_k=ints(0, 5)),
    "statistics under torch.func": lambda: torch.func.vmap(lambda q: polyflash.row_stats(q, x(), x(2, 2, 5)))(
        x(3, 2, 2, 5, 8)
    ),
    # plans and configs
    "no kernel": call(backend="cpu", q=x().double(), k=x().double(), v=x().double()),
    "target": lambda: target.parse("cpu:z80"), "no config": call(config=3),
    "config of another backend": lambda: attention(
        x(), x(), x(), backend="torch", config=configs.Config(64, 4)
    ),
    "torch config": lambda: torch_configs.Config(3, 64),
    "torch scores": lambda: torch_configs.Config(64, 64, max_scores=0), "sdpa by hand": sdpa_by_hand,
    "cpu block_n": config(block_n=17), "cpu panels": config(panels=0), "cpu int": config(block_n=64.0),
    "cpu compute": config(compute="f8"), "cpu isa": config(isa="z80"),
    "cpu isa here": fits(isa="neon"), "cpu compute here": fits(compute="bf16dot"),
    "key isa": key(isa="z80"), "key nv": key(nv=99), "key storage": key(storage="int8"),
    "key compute": key(compute="bf16dot"), "key bucket": key(bucket=7),
    "decode int": lambda: decode_configs.DecodeConfig(1024.0, 128),
    "decode block_n": lambda: decode_configs.DecodeConfig(1024, 17),
    "decode split_keys": lambda: decode_configs.DecodeConfig(1000, 128),
    "decode rows": lambda: decode_configs.DecodeKey("avx512", "f32", "float32", 3),
    "backward int": lambda: backward_configs.BackwardConfig(64.0, 4),
    "backward block_n": lambda: backward_configs.BackwardConfig(17, 4),
    "backward panels": lambda: backward_configs.BackwardConfig(64, 0),
    "gluon consumers": lambda: gluon_configs.ForwardConfig(4, 128),
    "metal chunks": lambda: metal_configs.ForwardConfig(16, 16, split_exp=4),
    "metal forward's splits": lambda: metal_configs.ForwardConfig(16, 16, split_keys=64),
    "metal split_keys": lambda: metal_configs.DecodeConfig(8, 16, 100),
    "metal memory": lambda: metal_configs.check_memory(
        metal_configs.ForwardConfig(64, 64, stages=2), WIDE
    ),
    "triton tile": lambda: triton_configs.ForwardConfig(48, 64, 4, 2),
    "triton stages": lambda: triton_configs.ForwardConfig(64, 64, 4, 0),
    "triton flag": lambda: triton_configs.ForwardConfig(64, 64, 4, 2, base2=1),
    "triton word": lambda: triton_configs.ForwardConfig(64, 64, 4, 2, loads="far"),
    "triton chunks": lambda: triton_configs.ForwardConfig(64, 64, 4, 2, split_exp=8),
    "triton products of hip": lambda: config_types.product_of(
        triton_configs.ForwardConfig(64, 64, 4, 2, precision="tf32x3"),
        explain(x(), x(), x(), target="hip:gfx942").spec, target.parse("hip:gfx942"),
    ),
    "triton split_keys": lambda: triton_configs.DecodeConfig(16, 64, 4, 2, 100),
    "codes in another layout": call(k=quantize(x(), Scheme(), layout="bshd")),
    "codes of another dtype": lambda: coded(codes="int4/1x0,-", k=x(2, 2, 5, 4)),
    "codes without a table": lambda: coded(codes="int8/1x0,-"),
    "codes with a wrong table": lambda: coded(codes="int8/1x0,-", k_scale=x(2, 2, 5, 2)),
    "triton head_dim": lambda: tiles.split_dim(0),
    "triton rows of a tile": lambda: tiles.check_rows(
        target.parse("cuda:sm90"), 8, explain(x(), x(), x(), target="cuda:sm90").spec
    ),
    "triton stages of sm_90": lambda: tiles.check_stages(target.parse("cuda:sm90"), 1),
    "triton keys of a block of codes": lambda: tiles.check_keys(16),
}  # fmt: skip


@functools.cache
def reached() -> tuple[dict[str, BaseException | None], set[tuple[str, int]]]:
    """What each case raised, and the lines errors were made in."""
    watcher = Refusals()
    raised: dict[str, BaseException | None] = {}
    with watcher:
        for name, case in CASES.items():
            try:
                case()
                raised[name] = None
            except Exception as error:
                raised[name] = error
    return raised, watcher.reached


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_teaches(name: str):
    error = reached()[0][name]
    assert isinstance(error, (SpecError, UnsupportedError)), f"{type(error).__name__}: {error}"
    text = str(error)
    assert (len(text) > 20 and ". " in text) or isinstance(error, UnsupportedError), text


def core(found: list[Site]) -> list[Site]:
    return [site for site in found if not site.file.startswith(tuple(BESIDE))]


def test_every_refusal_of_the_core_has_a_case():
    left = missing(reached()[1], core(sites()))
    assert not left, "\n".join(map(str, left)) + f"\n{advice(left)}"


def test_a_place_without_a_case_is_found():
    """Not vacuous: without its cases a file's places are missing."""
    others = {(file, line) for file, line in reached()[1] if file != "merging.py"}
    merging = [site for site in sites() if site.file == "merging.py"]
    assert missing(others, core(sites())) == merging and len(merging) >= 5
    assert {site.file for site in missing(set(), core(sites()))} >= {"api.py", "mask.py", "validate.py"}
    assert "CASES of tests/null/test_refusals.py" in advice(merging) and str(merging[0]).startswith(
        "merging.py:"
    )
    others = [site for site in sites() if site.file.startswith(("kvcache/", "tensor_files.py"))]
    assert "a test in tests/kvcache;" in advice(others)
    assert "a test in tests/tools/test_cli.py;" in advice(others)
    assert len(core(sites())) > 100
