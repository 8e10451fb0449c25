"""Calls over codes of 8 bits on Hopper, without a GPU: which multiply codes, and why not others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import polyflash
from polyflash.backends.gluon import configs
from polyflash.quant import QuantizedTensor, Scheme

SCHEME = Scheme(dtype="fp8_e4m3", granularity="head", compute="fp8")


def explained(dims: int = 128, *, rows: int = 4096, keys: int = 4096, scheme: Scheme = SCHEME, **options):
    q = torch.empty(4, 16, rows, dims, device="meta", dtype=torch.bfloat16)
    codes = torch.empty(4, 4, keys, dims, device="meta", dtype=torch.float8_e4m3fn)
    scale = torch.empty(4, 4, *scheme.codes.scale.counts(keys, dims), device="meta")
    k = QuantizedTensor(codes, scale, None, scheme, torch.bfloat16)
    return polyflash.explain(q, k, k, target=options.pop("target", "cuda:sm90"), **options)


@pytest.mark.parametrize("dims", [80, 128, 144, 192, 256])
def test_what_it_takes(dims: int):
    ints = torch.zeros(4, dtype=torch.int32, device="meta")
    bounds = {"kv_lens": ints, "kv_starts": ints, "q_offset": ints, "window": (5, 0)}
    sinks = torch.zeros(16, device="meta")
    for options in ({}, {"causal": True}, {"sinks": sinks}, *({name: x} for name, x in bounds.items())):
        found = explained(dims, **options)
        assert found.chosen.name == "gluon/fp8" and "codes" in found.notes[-1], options
        differ = bool(options) and "sinks" not in options and "q_offset" not in options
        change = {"order": "counter", "num_stages": 3 if dims <= 128 else 2} if differ else {}
        assert found.config == replace(configs.FP8[configs.box_of(dims)], **change)
        assert f"sums of {found.config.level * found.config.block_n} keys in tensor cores" in str(found)
    assert explained(scheme=replace(SCHEME, granularity="tensor")).chosen.name == "gluon/fp8"


def test_what_it_leaves_the_triton_engine_takes_or_decodes():
    for words, then, options in (
        ("asked for fp8_e4m3/0x0,", ", decoded to", {"scheme": replace(SCHEME, compute="float")}),
        ("asked for fp8_e4m3/1x0", "as it is, v decoded", {"scheme": replace(SCHEME, granularity="token")}),
        ("no softcap", "read in the walk", {"softcap": 3.0}),
        ("multiples of 16", "read in the walk", {"dims": 88}),
        ("multiples of 16", "as it is, v decoded", {"dims": 90}),
        ("blocks of 128, 192, 256, asked for 64", "read in the walk", {"dims": 64}),
        ("needs cuda:sm90", "read in the walk", {"target": "cuda:sm89"}),
        ("needs cuda:sm90", ", decoded to", {"target": "cuda:sm86"}),
        ("needs cuda:sm90", ", decoded to", {"target": "hip:gfx942"}),
    ):
        found = explained(**options)
        assert found.chosen.name != "gluon/fp8" and then in found.notes[-1], words
        assert words in why(options), words


def why(options) -> str:
    """The row's reasons against the call as one over codes."""
    from polyflash.backends.gluon.capabilities import CAPABILITIES
    from polyflash.routes import spec_of, without_gradients
    from polyflash.spec import Arguments
    from polyflash.target import parse

    scheme, dims = options.get("scheme", SCHEME), options.get("dims", 128)
    q = torch.empty(4, 16, options.get("rows", 4096), dims, device="meta", dtype=torch.bfloat16)
    codes = torch.empty(4, 4, 4096, dims, device="meta", dtype=torch.float8_e4m3fn)
    scale = torch.empty(4, 4, 1, 1, device="meta")
    args = Arguments(
        softcap=options.get("softcap", 0.0),
        codes=f"{scheme.codes},{scheme.codes}",
        k_scale=scale,
        v_scale=scale,
    )
    row = next(row for row in CAPABILITIES if row.name == "gluon/fp8")
    spec = without_gradients(spec_of(q, codes, codes, args))
    return "; ".join(row.reasons_against(spec, parse(options.get("target", "cuda:sm90")), by_name=False))
