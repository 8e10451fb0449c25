"""Every model: logits within the 2x rule, the same tokens from generate(), no dense mask, the right row.

Compared with the same weights under transformers' own attention: a float64 run is the truth, float32 runs
with "sdpa" and "eager" say how far from it plain arithmetic is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from polyflash import repeats, torch_ops  # noqa: E402
from polyflash.backends import TABLE  # noqa: E402
from polyflash.integrations.transformers import layer  # noqa: E402
from polyflash.spec import AttentionSpec, Feature  # noqa: E402
from tests import device  # noqa: E402
from tests.integrations.models import (  # noqa: E402
    RECIPES,
    answer,
    answer_in_float64,
    build,
    call,
    padding,
    tokens,
)
from tests.tolerance import compare  # noqa: E402

DECODERS = [name for name, recipe in RECIPES.items() if recipe.kind == "decoder"]
WHOLE = ("vision", "speech to text")  # inputs of one length
CASES = [
    (name, pads)
    for name, recipe in RECIPES.items()
    for pads in (("none",) if recipe.kind in WHOLE else ("none", "left", "right", "hole"))
]


@dataclass
class Calls:
    """What reached `attention()` and `attention_varlen()`, and which rows of the table ran."""

    options: list[dict[str, Any]] = field(default_factory=list)
    rows: list[tuple[AttentionSpec, str]] = field(default_factory=list)

    @property
    def features(self) -> set[Feature]:
        return {feature for spec, _ in self.rows for feature in spec.features}

    def dense(self) -> list[tuple[int, ...]]:
        """Shapes of the dense masks of more than one row among the calls."""
        masks = (options.get("mask") for options in self.options)
        return [tuple(x.shape) for x in masks if isinstance(x, torch.Tensor) and x.shape[-2] > 1]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    seen = Calls()

    def spied(function: Any) -> Any:
        def spy(*args: Any, **options: Any) -> Any:
            seen.options.append(options)
            return function(*args, **options)

        return spy

    run = torch_ops._run

    def spy_on_rows(launch: Any, *rest: Any) -> Any:
        seen.rows.append((launch.spec, launch.row.backend))
        return run(launch, *rest)

    monkeypatch.setattr(layer, "attention", spied(layer.attention))
    monkeypatch.setattr(layer, "attention_varlen", spied(layer.attention_varlen))
    monkeypatch.setattr(torch_ops, "_run", spy_on_rows)
    monkeypatch.setattr(repeats, "_known", {})
    monkeypatch.setattr(repeats, "learn", lambda *x: None)  # each call is run by its route
    yield seen


def promised(spec: AttentionSpec) -> str:
    """The backend that the table promises for a call here: an engine as soon as its row has what it needs."""
    here = device.here()
    engines = [row for row in TABLE if row.backend != "torch" and row.phase is spec.phase]
    able = [
        row.backend
        for row in engines
        if here.name.startswith(row.targets)
        and row.absent is None  # those copy CPU tensors to another device, for calls that name them
        and spec.features <= row.features
        and spec.dtype in row.dtypes
        and max(spec.head_dim, spec.head_dim_v) <= row.max_head_dim
    ]
    return able[0] if able else "torch"


def assert_structured(calls: Calls) -> None:
    assert calls.options and calls.rows, "the model never came by"
    assert not calls.dense(), f"dense masks {calls.dense()}"
    for spec, ran in calls.rows:
        assert ran == promised(spec), f"{ran} ran a call for {promised(spec)}: {sorted(spec.features)}"


@pytest.mark.parametrize(("name", "pads"), CASES)
def test_logits_are_within_the_rule(name: str, pads: str, calls: Calls) -> None:
    inputs, live = call(name, pads)
    truth = answer_in_float64(name, inputs, live)
    plain = [answer(build(name, peer), inputs, live).double() for peer in RECIPES[name].peers]
    got = answer(build(name, "poly"), inputs, live)
    compare(got, truth, plain, torch.float32, ratio=3 if name == "Gemma2" else 2, label=f"{name} {pads}")
    assert_structured(calls)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("name", ["Llama", "GptOss", "T5", "DeepseekV3"])
def test_half_precision_is_within_the_rule(name: str, dtype: torch.dtype, calls: Calls) -> None:
    inputs, live = call(name, "left")
    truth = answer_in_float64(name, inputs, live)
    models = (build.__wrapped__(name, each).to(dtype) for each in (*RECIPES[name].peers, "poly"))
    *plain, got = (answer(model, inputs, live) for model in models)
    compare(got, truth, [x.double() for x in plain], dtype, ratio=2, label=f"{name} {dtype}")
    assert_structured(calls)


NEEDS = {
    "Llama": {Feature.CAUSAL, Feature.GQA},
    "Mistral": {Feature.CAUSAL, Feature.WINDOW},
    "Gemma2": {Feature.CAUSAL, Feature.WINDOW, Feature.SOFTCAP},
    "Gemma3": {Feature.CAUSAL, Feature.WINDOW},
    "GptOss": {Feature.CAUSAL, Feature.WINDOW, Feature.SINKS},
    "Llama4": {Feature.CAUSAL, Feature.SEGMENTS},
    "DeepseekV3": {Feature.CAUSAL, Feature.HEAD_DIM_V},
    "Bert": {Feature.KV_LENS, Feature.KV_STARTS},
    "T5": {Feature.BIAS, Feature.CAUSAL, Feature.KV_LENS},
}


@pytest.mark.parametrize("name", NEEDS)
def test_what_a_model_needs_reaches_the_kernel(name: str, calls: Calls) -> None:
    inputs, live = call(name, "left")
    answer(build(name, "poly"), inputs, live)
    assert calls.features >= NEEDS[name], NEEDS[name] - calls.features


GENERATING = [
    (name, cache, pads)
    for name, recipe in RECIPES.items()
    for cache in recipe.generates
    for pads in ("none", "left")
    if recipe.kind in ("decoder", "text to text")
]


@pytest.mark.parametrize(("name", "cache", "pads"), GENERATING)
def test_generation_gives_the_same_tokens(name: str, cache: str, pads: str, calls: Calls) -> None:
    """The window is shorter than the prompt, so sliding caches wrap; the chunk ends within the answer."""
    ids, mask = tokens(3, 11), padding(pads, 3, 11)
    how = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    how |= {"output_logits": True, "return_dict_in_generate": True}
    if RECIPES[name].kind == "text to text" and cache == "dynamic":
        how.pop("cache_implementation")  # its two caches are dynamic by default
    how["attention_mask"] = torch.ones_like(ids) if mask is None else mask
    want, got = (build(name, m).generate(ids, **how) for m in (RECIPES[name].peers[0], "poly"))
    assert got.sequences.shape[1] >= 8
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), atol=2e-4, rtol=1e-4)
    assert torch.equal(want.sequences, got.sequences)
    assert_structured(calls)


def test_speech_to_text_generates_the_same_tokens(calls: Calls) -> None:
    inputs, _ = call("Whisper", "none")
    how = {"max_new_tokens": 8, "do_sample": False, "return_timestamps": False}
    features = inputs["input_features"]
    want, got = (build("Whisper", m).generate(features, **how) for m in ("sdpa", "poly"))
    assert got.shape[1] >= 8 and torch.equal(got, want)
    assert_structured(calls)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma3", "GptOss", "Llama4"])
@pytest.mark.parametrize("cache", ["DynamicCache", "StaticCache"])
def test_chunked_prefill_sees_the_cache(name: str, cache: str, calls: Calls) -> None:
    """15 tokens, then 9 that see them, padding before both."""
    ids, mask = tokens(2, 24), padding("left", 2, 24)
    results = []
    for model in (build(name, RECIPES[name].peers[0]), build(name, "poly")):
        size = {"max_cache_len": 30} if cache == "StaticCache" else {}
        past = getattr(transformers, cache)(config=model.config, **size)
        with torch.inference_mode():
            model(ids[:, :15], attention_mask=mask[:, :15], past_key_values=past)
            results.append(model(ids[:, 15:], attention_mask=mask, past_key_values=past).logits)
    torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=1e-4)
    assert_structured(calls)


PARTS = (6, 11, 4)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "GptOss", "DeepseekV3"])
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_packed_documents_do_not_see_each_other(
    name: str, use_cache: bool, ones: bool, batch: int, calls: Calls
) -> None:
    """With a cache, and with a mask of ones, transformers' own SDPA lets them see each other."""
    model = build(name, "poly")
    ids = tokens(batch, sum(PARTS))
    restarting = torch.cat([torch.arange(n) for n in PARTS]).expand(batch, -1)
    mask = torch.ones_like(ids) if ones else None
    with torch.inference_mode():
        packed = model(ids, position_ids=restarting, use_cache=use_cache, attention_mask=mask).logits
        assert_structured(calls)
        alone = [model(part, use_cache=False).logits for part in ids.split(PARTS, 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "GptOss", "Llama4"])
@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("use_cache", [False, True])
def test_cumulative_lengths_pack_too(name: str, restart: bool, use_cache: bool, calls: Calls) -> None:
    model = build(name, "poly")
    ids = tokens(1, sum(PARTS))
    ends = torch.tensor([0, *PARTS]).cumsum(0).int()
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 11, "max_length_k": 11}
    places = torch.cat([torch.arange(n) for n in PARTS])[None] if restart else None
    with torch.inference_mode():
        packed = model(ids, position_ids=places, use_cache=use_cache, **lengths).logits
        assert_structured(calls)
        starts = ends[:-1].tolist()
        for start, part in zip(starts, ids.split(PARTS, 1), strict=True):
            # Without positions of their own the documents stand where they are in the pack.
            at = None if restart else torch.arange(start, start + part.shape[1])[None]
            alone = model(part, position_ids=at, use_cache=False).logits
            got = packed[:, start : start + part.shape[1]]
            torch.testing.assert_close(got, alone, atol=1e-4, rtol=1e-4)


def test_chunks_of_packed_documents_are_counted_from_their_first_token(calls: Calls) -> None:
    """Llama4 hands no positions to its layers, so packing shows in the mask, which takes use_cache=False."""
    model = build("Llama4", "poly")
    ids = tokens(1, sum(PARTS))
    restarting = torch.cat([torch.arange(n) for n in PARTS])[None]
    with torch.inference_mode():
        packed = model(ids, position_ids=restarting, use_cache=False).logits
        alone = [model(part, use_cache=False).logits for part in ids.split(PARTS, 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), atol=1e-4, rtol=1e-4)
    assert_structured(calls)


def test_packed_documents_run_as_members_not_as_a_square(calls: Calls) -> None:
    restarting = torch.cat([torch.arange(n) for n in PARTS])[None]
    with torch.inference_mode():
        build("Mistral", "poly")(tokens(1, sum(PARTS)), position_ids=restarting, use_cache=False)
    assert all(Feature.VARLEN in spec.features for spec, _ in calls.rows)


def test_a_cache_continues_the_first_document(calls: Calls) -> None:
    """6 cached tokens, 3 more of their document, then 5 of another."""
    model, ids = build("Llama", "poly"), tokens(1, 14)
    places = torch.cat([torch.arange(9), torch.arange(5)])[None]
    with torch.inference_mode():
        past = model(ids[:, :6], use_cache=True).past_key_values
        got = model(ids[:, 6:], position_ids=places[:, 6:], past_key_values=past).logits
        want = torch.cat([model(ids[:, :9]).logits[:, 6:], model(ids[:, 9:]).logits], 1)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_overlays_of_the_user_become_dense(calls: Calls) -> None:
    """A function of the user's own is not read, it is computed: right, and no longer structured."""
    from transformers.masking_utils import create_causal_mask

    def first_key_always(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key == 5

    inputs = torch.zeros(1, 9, 64)
    masks = []
    for implementation in ("sdpa", "poly"):
        config = build("Llama", implementation).config
        masks.append(create_causal_mask(config, inputs, None, None, or_mask_function=first_key_always))
    assert isinstance(masks[1], torch.Tensor) and torch.equal(*masks) and masks[0][0, 0, 2, 5]
