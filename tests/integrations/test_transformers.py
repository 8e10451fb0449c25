"""polyflash inside transformers: tiny random models from configs, and the same weights with torch SDPA."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402
from transformers.masking_utils import (  # noqa: E402
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from polyflash.errors import SpecError, UnsupportedError  # noqa: E402
from polyflash.integrations import transformers as ours  # noqa: E402

TOLERANCE = 2e-5  # fp32 through two layers; a dropped mask gives 0.1 and more
SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": None}


@pytest.fixture(scope="module", autouse=True)
def name() -> str:
    return ours.register()


def twins(kind: str, reference: str = "sdpa", head: str = "Model", **config: Any) -> tuple[Any, Any]:
    """The same random weights twice: with attention `reference` and with polyflash."""
    models = []
    for implementation in (reference, "poly"):
        torch.manual_seed(7)
        settings = getattr(transformers, f"{kind}Config")(**config)  # each its own: loading one changes it
        model = getattr(transformers, f"{kind}{head}")._from_config(
            settings, attn_implementation=implementation
        )
        models.append(model.eval())
    return models[0], models[1]


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(
        1, 97, (batch, length), generator=torch.Generator().manual_seed(batch * 1000 + length)
    )


def padding(kind: str, batch: int, length: int) -> torch.Tensor | None:
    """int64 (batch, length); request b lacks 3·b tokens at its right or left end, or in the middle."""
    if kind == "none":
        return None
    mask = torch.ones(batch, length, dtype=torch.int64)
    for b in range(1, batch):
        where = {"right": slice(length - 3 * b, None), "left": slice(0, 3 * b), "hole": slice(2, 2 + 3 * b)}[
            kind
        ]
        mask[b, where] = 0
    return mask


@pytest.mark.parametrize("pads", ["none", "right", "left", "hole"])
def test_encoder_gives_the_states_of_sdpa(pads: str) -> None:
    theirs, mine = twins("Bert", **SMALL)
    ids, mask = tokens(4, 17), padding(pads, 4, 17)
    with torch.inference_mode():
        want, got = (m(input_ids=ids, attention_mask=mask).last_hidden_state for m in (theirs, mine))
    live = torch.ones(4, 17, dtype=torch.bool) if mask is None else mask.bool()
    torch.testing.assert_close(got[live], want[live], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("pads", ["none", "right", "left", "hole"])
def test_decoder_gives_the_logits_and_gradients_of_sdpa(pads: str) -> None:
    theirs, mine = twins("Llama", head="ForCausalLM", **GROUPED)
    ids, mask = tokens(3, 19), padding(pads, 3, 19)
    live = torch.ones(3, 19, dtype=torch.bool) if mask is None else mask.bool()
    outcomes = []
    for model in (theirs, mine):
        logits = model(input_ids=ids, attention_mask=mask).logits[live]
        logits.square().mean().backward()
        outcomes.append((logits, model.model.layers[0].self_attn.k_proj.weight.grad))
    for want, got in zip(*outcomes, strict=True):
        torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("pads", ["none", "left"])
def test_generation_gives_the_tokens_of_sdpa(pads: str, cache: str) -> None:
    theirs, mine = twins("Llama", head="ForCausalLM", **GROUPED)
    ids, mask = tokens(3, 11), padding(pads, 3, 11)
    how = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    how |= {"attention_mask": torch.ones_like(ids) if mask is None else mask, "output_logits": True}
    want, got = (m.generate(ids, return_dict_in_generate=True, **how) for m in (theirs, mine))
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), atol=TOLERANCE, rtol=0)
    assert torch.equal(want.sequences, got.sequences)


def test_chunked_prefill_sees_the_cache() -> None:
    theirs, mine = twins("Llama", head="ForCausalLM", **GROUPED)
    ids = tokens(2, 24)
    results = []
    for model in (theirs, mine):
        with torch.inference_mode():
            first = model(input_ids=ids[:, :15], use_cache=True)
            results.append(model(input_ids=ids[:, 15:], past_key_values=first.past_key_values).logits)
    torch.testing.assert_close(results[1], results[0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("kind", "reference", "config"),
    [
        ("Mistral", "sdpa", {**GROUPED, "sliding_window": 7}),
        ("Gemma2", "eager", {**GROUPED, "head_dim": 16, "sliding_window": 7, "attn_logit_softcapping": 0.01}),
        ("GptOss", "eager", {**GROUPED, "head_dim": 16, "sliding_window": 7, "num_local_experts": 4}),
    ],
)
def test_windows_softcap_and_sinks(kind: str, reference: str, config: dict[str, Any]) -> None:
    theirs, mine = twins(kind, reference, "ForCausalLM", **config)
    ids, mask = tokens(3, 21), padding("left", 3, 21)
    with torch.inference_mode():
        want, got = (m(input_ids=ids, attention_mask=mask).logits for m in (theirs, mine))
    live = mask.bool()
    torch.testing.assert_close(got[live], want[live], atol=TOLERANCE, rtol=1e-4)


def test_relative_position_bias_and_cross_attention() -> None:
    config = {"vocab_size": 97, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    theirs, mine = twins("T5", **config, decoder_start_token_id=0)
    ids, mask = tokens(3, 17), padding("right", 3, 17)
    with torch.inference_mode():
        want, got = (
            m(input_ids=ids, attention_mask=mask, decoder_input_ids=tokens(3, 9)).last_hidden_state
            for m in (theirs, mine)
        )
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


def test_packed_documents_do_not_see_each_other() -> None:
    _, mine = twins("Llama", head="ForCausalLM", **GROUPED)
    ids = tokens(1, 20)
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    with torch.inference_mode():
        packed = mine(input_ids=ids, position_ids=positions, use_cache=False).logits
        alone = [mine(input_ids=part, use_cache=False).logits for part in (ids[:, :8], ids[:, 8:])]
    torch.testing.assert_close(packed, torch.cat(alone, 1), atol=TOLERANCE, rtol=0)


def test_is_causal_of_the_call_decides_without_a_mask() -> None:
    theirs, mine = twins("Llama", **GROUPED)
    ids = tokens(2, 9)
    with torch.inference_mode():
        want, got = (m(input_ids=ids, is_causal=False).last_hidden_state for m in (theirs, mine))
        causal = mine(input_ids=ids).last_hidden_state
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)
    assert (got - causal).abs().max() > 1e-3


@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("seqlen_q", [1, 3, 5])
def test_without_a_mask_it_is_the_function_of_sdpa(seqlen_q: int, is_causal: bool | None) -> None:
    """Five keys and fewer queries: a static cache whose end is not written yet."""
    q, k, v = torch.randn(2, 4, seqlen_q, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    module = torch.nn.Identity()
    module.num_key_value_groups, module.is_causal = 2, True
    want, _ = sdpa_attention_forward(module, q, k, v, None, is_causal=is_causal)
    got, _ = ours._attention_forward(module, q, k, v, None, is_causal=is_causal)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


MASKS = [
    (causal_mask_function, 5, 5, 0, 0),
    (causal_mask_function, 5, 12, 7, 0),
    (causal_mask_function, 5, 12, 0, 0),  # prefill of a static cache
    (causal_mask_function, 1, 12, 4, 0),  # a step of a static cache
    (causal_mask_function, 1, 12, 11, 0),
    (causal_mask_function, 3, 8, 9, 4),
    (bidirectional_mask_function, 5, 5, 0, 0),
    (bidirectional_mask_function, 3, 9, 0, 0),
]


@pytest.mark.parametrize("tensor_offset", [False, True])
@pytest.mark.parametrize("pads", ["none", "right", "left", "short"])
@pytest.mark.parametrize(("function", "q_length", "kv_length", "q_offset", "kv_offset"), MASKS)
def test_structured_mask_is_the_mask_of_sdpa(
    function: Any,
    q_length: int,
    kv_length: int,
    q_offset: int,
    kv_offset: int,
    pads: str,
    tensor_offset: bool,
) -> None:
    seen = q_offset + q_length if pads == "short" else kv_length + kv_offset
    mask = padding("right" if pads == "short" else pads, 2, seen)
    call = {
        "batch_size": 2,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": torch.tensor(q_offset) if tensor_offset else q_offset,
        "kv_offset": kv_offset,
        "mask_function": function,
        "attention_mask": None if mask is None else mask.bool(),
    }
    want = sdpa_mask(**call, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    got = ours._mask_of_batch(**call)
    if got is None:
        assert mask is None and function is causal_mask_function and want.tril(q_offset).equal(want)
    else:
        assert isinstance(got, ours.BatchMask), "ends of padding need no dense mask"
        assert torch.equal(got.dense(), want)
        assert ours._mask_of_batch(**(call | {"attention_mask": got})) is got


@pytest.mark.parametrize(
    "change",
    [
        {"mask_function": sliding_window_causal_mask_function(3)},
        {"attention_mask": torch.tensor([[1, 0, 1, 1, 1]]).bool()},
        {"allow_is_causal_skip": False},
        {"use_vmap": True},
    ],
    ids=["window", "hole", "materialised", "overlay"],
)
def test_other_patterns_become_the_dense_mask(change: dict[str, Any]) -> None:
    call = {"batch_size": 1, "q_length": 5, "kv_length": 5, **change}
    want = sdpa_mask(**{**call, "allow_is_causal_skip": False})
    got = ours._mask_of_batch(**call)
    assert isinstance(got, torch.Tensor)
    assert torch.equal(got, want)


def test_a_mask_moves_like_a_tensor() -> None:
    lens = torch.tensor([2, 3], dtype=torch.int32)
    mask = ours.BatchMask((2, 1, 3, 3), torch.device("cpu"), True, 0, lens)
    assert mask.to("cpu") is mask and mask.to(torch.float16) is mask and mask.to(lens) is mask
    moved = mask.to("meta", non_blocking=True)
    assert moved.device.type == "meta" and moved.kv_lens.device.type == "meta" and moved.causal
    assert mask.ndim == 4 and mask.contiguous() is mask


REFUSED = {
    "output_attentions": True,
    "cache": object(),
    "cu_seq_lens_q": torch.tensor([0, 3]),
    "max_length_k": 3,
    "indices": torch.zeros(1, 3, 2),
    "some_new_argument": 1.0,
}


@pytest.mark.parametrize("argument", REFUSED)
def test_what_would_change_the_result_is_refused(argument: str) -> None:
    x = torch.zeros(1, 2, 3, 8)
    with pytest.raises(UnsupportedError, match=argument):
        ours._attention_forward(torch.nn.Identity(), x, x, x, None, **{argument: REFUSED[argument]})
    quiet = {argument: None, "position_ids": torch.arange(3), "use_cache": True}
    ours._attention_forward(torch.nn.Identity(), x, x, x, None, **quiet)


def test_a_window_that_the_mask_does_not_hold_is_refused() -> None:
    x = torch.zeros(1, 2, 9, 8)
    with pytest.raises(UnsupportedError, match="sliding_window"):
        ours._attention_forward(torch.nn.Identity(), x, x, x, None, sliding_window=4)
    ours._attention_forward(torch.nn.Identity(), x, x, x, None, sliding_window=9)


def test_a_mask_of_another_length_is_refused() -> None:
    x = torch.zeros(1, 2, 9, 8)
    mask = ours.BatchMask((1, 1, 9, 8), torch.device("cpu"), False, 0)
    with pytest.raises(SpecError, match="attention_mask: got 9 queries x 8 keys"):
        ours._attention_forward(torch.nn.Identity(), x, x, x, mask)


@pytest.mark.parametrize("bad", ["polyflash", "my_sdpa", "org/poly", "paged|poly", "eager", ""])
def test_names_that_transformers_parses_are_refused(bad: str) -> None:
    with pytest.raises(SpecError, match="name: got"):
        ours.register(bad)


def test_importing_polyflash_touches_no_other_library() -> None:
    code = (
        "import sys, polyflash; "
        "bad = {'transformers', 'diffusers', 'matplotlib', 'rich', 'numba', 'llvmlite'} & set(sys.modules); "
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
