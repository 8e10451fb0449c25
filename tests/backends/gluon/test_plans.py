"""Which calls the Gluon engine takes, which it leaves, and why: without a GPU."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

import polyflash
from polyflash import SpecError, plan
from polyflash.backends import TABLE
from polyflash.backends.gluon import configs
from polyflash.backends.gluon.capabilities import CAPABILITIES
from polyflash.spec import MANY_KEYS, AttentionSpec, Feature, Phase, length_class
from polyflash.target import parse

HOPPER = parse("cuda:sm90")
ROW = CAPABILITIES[0]
SPEC = AttentionSpec(Phase.FORWARD, "bfloat16", "cuda", 4, 16, 16, 4096, 4096, 128, 128, frozenset())


def explained(dims: int = 128, *, rows: int = 4096, keys: int = 4096, dtype=torch.bfloat16, **options):
    q = torch.empty(4, 16, rows, dims, device="meta", dtype=dtype)
    k = torch.empty(4, 4, keys, dims, device="meta", dtype=dtype)
    return polyflash.explain(q, k, k, target=options.pop("target", "cuda:sm90"), **options)


def why(**options) -> str:
    found = explained(**options)
    assert found.backend != "gluon"
    return next("; ".join(v.reasons) for v in found.verdicts if v.row is ROW)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", configs.HEAD_DIMS)
def test_what_it_takes(dims: int, dtype: torch.dtype):
    for options in ({}, {"causal": True}, {"causal": True, "q_offset": 7}):
        found = explained(dims, dtype=dtype, **options, backend="gluon" if dims == 64 else None)
        assert found.backend == "gluon" and found.rung == "table"
        assert found.config == configs.FORWARD[dims, bool(options)]
        assert "TMA" in str(found)


def test_what_it_refuses_in_words():
    assert "has multiples of 8, asked for 100" in why(dims=100)
    assert "no bias" in why(bias=torch.empty(4096, 4096, device="meta"))
    assert "dtype" in why(dtype=torch.float32)
    assert "needs cuda:sm90" in why(target="cuda:sm100")


def test_what_it_leaves_unless_asked_by_name():
    for few in ({"rows": 32}, {"keys": MANY_KEYS - 1}):
        assert "whole warpgroups" in why(**few)
        assert explained(**few, backend="gluon").backend == "gluon"
    ints = torch.zeros(4, dtype=torch.int32, device="meta")
    heads = torch.zeros(16, device="meta")
    features = {"softcap": 3.0, "sinks": heads, "alibi_slopes": heads, "window": (8, 0)}
    features |= {"kv_lens": ints, "kv_starts": ints, "q_offset": ints}
    for name, value in features.items():
        named = explained(causal=True, **{name: value}, backend="gluon")
        assert named.backend == "gluon" and named.config == configs.FORWARD[128, True]
        assert f"{name}: not known to be quicker" in why(dims=256, causal=True, **{name: value})
        least = configs.LEAST_KEYS_OF[Phase.FORWARD, 128].get(Feature(name), 0)
        if least:
            taken = explained(causal=True, keys=least, **{name: value})
            assert taken.backend == "gluon" and taken.rung == "table"
            assert f"under {least} keys" in why(causal=True, keys=least - 1, **{name: value})
        else:
            assert f"{name}: not known" in why(causal=True, **{name: value})
    q = torch.empty(4096, 16, 128, device="meta", dtype=torch.bfloat16)
    for members, backend in ((4, "gluon"), (5, "triton")):
        bounds = torch.zeros(members + 1, dtype=torch.int32, device="meta")
        packed = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "target": "cuda:sm90"}
        assert polyflash.explain(q, q, q, **packed).backend == backend
        named = polyflash.explain(q, q, q, **packed, backend="gluon")
        assert named.config == replace(configs.FORWARD[128, False], order="counter")
    assert explained(window=(8, 0), backend="gluon").config == configs.FORWARD[128, True]
    assert explained(kv_lens=ints, backend="gluon").config.order == "counter"
    assert explained(64, causal=True, backend="gluon").backend == "gluon"
    assert explained(64, causal=True, alibi_slopes=heads).backend == "gluon"
    for more in ({"window": (8, 0)}, {"alibi_slopes": heads}, {"softcap": 3.0}):
        assert explained(64, causal=True, **more, backend="gluon").config == configs.BOUNDED_64


@pytest.mark.parametrize(
    "dims, box, taken", [(8, 64, False), (56, 64, False), (72, 128, False), (80, 128, True), (96, 128, True),
    (112, 128, True), (136, 192, True), (184, 192, True), (200, 256, True), (248, 256, True)],
)  # fmt: skip
def test_head_dims_between_boxes(dims: int, box: int, taken: bool):
    """By name any; by itself where not too much of a box is filled with 0."""
    named = explained(dims, backend="gluon")
    assert named.backend == "gluon" and named.rung == "safe default"
    assert named.config == configs.FORWARD[box, False]
    assert explained(dims).backend == ("gluon" if taken else "triton")
    if not taken:
        assert f"head_dim {dims} costs as much as {box}" in why(dims=dims)


@pytest.mark.parametrize("dims", [*range(8, 257, 8)])
def test_boxes_hold_the_head_dim(dims: int):
    parts = configs.parts_of(dims)
    assert dims <= sum(parts) == configs.box_of(dims) and all(x & (x - 1) == 0 for x in parts)


@pytest.mark.parametrize(
    "dims, causal, rows, keys, batch, words",
    [
        (64, 0, 4096, 1023, 4, "under 1024 keys of head_dim 64"),
        (64, 0, 4096, 1024, 4, ""),
        (64, 0, 1024, 1024, 8, ""),
        (64, 0, 2048, 2048, 16, ""),
        (64, 1, 4096, 1023, 4, "under 1024 keys of head_dim 64"),
        (64, 1, 1024, 1024, 4, "256 tiles of 256 rows leave some of 132 cores idle"),
        (64, 1, 1024, 1024, 7, ""),
        (64, 1, 2048, 2048, 2, ""),
        (128, 0, 4096, 1023, 4, "under 1024 keys of head_dim 128"),
        (128, 1, 1024, 1024, 4, ""),
        (256, 0, 4096, 1024, 4, ""),
        (96, 0, 4096, 1023, 4, "under 1024 keys of head_dim 96"),
        (192, 0, 4096, 1024, 4, ""),
        (128, 0, 1024, 1024, 1, "128 tiles of 128 rows leave some of 132 cores idle"),
        (128, 0, 1025, 1025, 1, ""),
    ],
)
def test_what_it_leaves_by_exact_sizes(dims: int, causal: int, rows: int, keys: int, batch: int, words: str):
    """What `explain` says is what a call does, whichever sizes its route was made with."""
    q = torch.empty(batch, 16, rows, dims, device="meta", dtype=torch.bfloat16)
    k = torch.empty(batch, 16, keys, dims, device="meta", dtype=torch.bfloat16)
    found = polyflash.explain(q, k, k, target="cuda:sm90", causal=bool(causal))
    assert found.backend == ("triton" if words else "gluon")
    told = next(v.reasons for v in found.verdicts if v.row is ROW)
    assert told == ((f"yields: {told[0].removeprefix('yields: ')}",) if words else ()) and words in str(told)
    named = polyflash.explain(q, k, k, target="cuda:sm90", causal=bool(causal), backend="gluon")
    assert named.backend == "gluon"
    for length in (600, 8192):
        spec = replace(SPEC, seqlen_q=length, seqlen_k=length, head_dim=dims, head_dim_v=dims)
        spec = replace(spec, causal=bool(causal))
        launch = plan.select(spec, HOPPER, TABLE, backend="", config="")
        made = launch.of_sizes(batch, rows, keys)
        assert launch.row is ROW and made.row.backend == found.backend
        same_route = length_class(length) == length_class(rows)
        assert words or not same_route or made.config == found.config
        assert launch.of_sizes(batch, rows, keys) is made  # and what it has prepared
        launch = plan.select(spec, HOPPER, TABLE, backend="gluon", config="")
        made = launch.of_sizes(batch, rows, keys)
        assert made.row is ROW and made.rung == named.rung
        assert not same_route or made.config == named.config


@pytest.mark.parametrize(
    "version, taken", [("3.6.0", True), ("3.9.1", False), ("3.7.1", False), ("3.10.0", False)]
)
def test_another_triton_turns_it_off(version: str, taken: bool):
    here = replace(HOPPER, packages=(("triton", version),))
    launch = plan.select(SPEC, here, TABLE, backend="", config="")
    assert launch.row.backend == ("gluon" if taken else "triton")
    (reason, *_) = ROW.reasons_against(SPEC, here, by_name=True) or ("",)
    assert taken or (version in reason and "is not checked" in reason)


def test_gradients_leave_a_way_out():
    features = frozenset({Feature.LSE})
    launch = plan.select(
        replace(SPEC, needs_grad=True, features=features), HOPPER, TABLE, backend="", config=""
    )
    assert launch.row is ROW and launch.instead.row.backend == "triton"
    back = plan.select(replace(SPEC, phase=Phase.BACKWARD), HOPPER, TABLE, backend="", config="")
    assert back.row.backend == "gluon" and back.instead.row.backend == "triton"
    wide = replace(SPEC, phase=Phase.BACKWARD, head_dim=256, head_dim_v=256)
    assert plan.select(wide, HOPPER, TABLE, backend="", config="").row.backend == "triton"


def test_a_call_that_is_named_is_never_left():
    assert plan.select(SPEC, HOPPER, TABLE, backend="gluon", config="").instead is None
    config = plan.encode_config(replace(configs.FORWARD[128, False], heads=1))
    launch = plan.select(SPEC, HOPPER, TABLE, backend="", config=config)
    assert launch.instead is None and launch.row is ROW and launch.config.heads == 1


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_operands_are_made_such_that_the_kernel_takes_them():
    """A copy where TMA or the scale asks for one, and none elsewhere: bits follow neither."""
    from polyflash.backends.gluon import forward
    from polyflash.spec import Arguments

    q = torch.randn(2, 3, 5, 64).bfloat16()
    wide = torch.randn(2, 3, 5, 128).bfloat16()
    assert forward.boxed(q) is q and forward.boxed(q.transpose(1, 2)).data_ptr() == q.data_ptr()
    for x in (wide[..., ::2], wide[..., 1:65], q.expand(2, 3, 5, 64).flip(3), q[:1, :1].expand(2, 3, 5, 64)):
        copy = forward.boxed(x)
        assert forward.is_boxed(copy) and torch.equal(copy, x)
        assert forward.is_boxed(x) == (x.data_ptr() == copy.data_ptr())
    args = Arguments(scale=0.3)
    assert forward.with_positive_scale(q, args) == (q, args)
    for scale in (-0.3, 0.0, -0.0, 1e-40):
        made, given = forward.with_positive_scale(q, args._replace(scale=scale))
        wanted = (q if scale < -0.1 else 0 * q).float() * scale
        assert given.scale > 1e-37 and torch.equal(made.float() * given.scale, wanted)


def test_short_calls_at_64():
    """Four consumers where they were measured to be ahead, and heads by the keys that have to stay near."""
    spec = replace(SPEC, head_dim=64, seqlen_q=1024)
    causal, full = configs.choose_forward(replace(spec, causal=True), HOPPER), configs.FORWARD[64, False]
    assert causal is configs.SHORT_CAUSAL_64
    for features in ({Feature.KV_LENS}, {Feature.SINKS}):
        bound = replace(spec, causal=True, features=frozenset(features))
        assert configs.choose_forward(bound, HOPPER).consumers == 3
    long = replace(spec, causal=True, seqlen_q=4096)
    assert configs.choose_forward(long, HOPPER) is configs.FORWARD[64, True]
    assert configs.choose_forward(replace(spec, features=frozenset({Feature.SINKS})), HOPPER) is full
    heads = {keys: configs.side_by_side(causal, keys) for keys in (64, 1024, 1025, 2048, 2049, 4095, 1 << 20)}
    assert list(heads.values()) == [32, 32, 16, 16, 8, 8, 8]
    assert configs.side_by_side(full, 1 << 20) == full.heads


def test_batch_and_rows_choose_three_or_four_consumers():
    """What a plan of such sizes says, and that launches of one route follow it: one of each config."""
    sizes = (8, 1024), (4, 2048), (32, 1024), (16, 2048), (16, 4095), (1, 4096)
    four = [True, True, True, False, False, False]
    x = [torch.empty(batch, 16, rows, 64, device="meta", dtype=torch.bfloat16) for batch, rows in sizes]
    plans = [polyflash.explain(q, q, q, target="cuda:sm90", backend="gluon") for q in x]
    expected = [configs.SHORT_64 if f else configs.FORWARD[64, False] for f in four]
    assert [p.config for p in plans] == expected and all(p.rung == "table" for p in plans)
    told = "the quicker by rounds of all cores: 768 tiles of 192 rows or 512 tiles of 256 rows"
    assert told in plans[0].notes and "cores: 2816 tiles of 192 rows or 2048 tiles" in str(plans[3])
    assert not any("the quicker" in note for p in (plans[5], explained(128)) for note in p.notes)
    spec = replace(SPEC, head_dim=64, head_dim_v=64, seqlen_q=600)
    launch = plan.select(spec, HOPPER, TABLE, backend="gluon", config="")
    made = [launch.of_sizes(batch, rows, rows) for batch, rows in sizes[:5]]
    assert [m.config for m in made] == expected[:5] and len(set(map(id, made))) == 2
    for rows in range(1024, 1324):
        assert launch.of_sizes(8, rows, rows) in (made[0], made[3]) and len(launch.by_sizes) <= 256
    for config in configs.SHORT_64, configs.FORWARD[64, False]:  # one that is given holds for all sizes
        launch = plan.select(spec, HOPPER, TABLE, backend="", config=plan.encode_config(config))
        assert all(launch.of_sizes(batch, rows, rows) is launch for batch, rows in sizes)


def test_configs_are_checked():
    with pytest.raises(SpecError, match="consumers"):
        configs.ForwardConfig(4, 128)
    with pytest.raises(SpecError, match="consumers"):
        replace(configs.SHORT_64, turns=True)
    short = replace(SPEC, head_dim=64, causal=True, seqlen_q=1024)
    assert all(config.consumers == 4 for config in configs.candidates(short, HOPPER))
    for (head_dim, causal), config in configs.FORWARD.items():
        spec = replace(SPEC, head_dim=head_dim, causal=causal)
        chosen, *others = configs.candidates(spec, HOPPER)
        assert chosen is config and others and config not in others
        assert len(set(configs.switches(spec, HOPPER))) > 5
        assert config.notes(spec)
