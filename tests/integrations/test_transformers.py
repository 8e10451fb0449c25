"""The mask function and the attention function, called as transformers calls them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from transformers import masking_utils as theirs  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

from polyflash.errors import SpecError, UnsupportedError  # noqa: E402
from polyflash.integrations import transformers as ours  # noqa: E402
from polyflash.integrations.transformers.pattern import Term, read  # noqa: E402
from tests.integrations.models import build, call, padding, tokens  # noqa: E402

CAUSAL, FULL = theirs.causal_mask_function, theirs.bidirectional_mask_function
WINDOW = theirs.sliding_window_causal_mask_function(3)
AROUND = theirs.sliding_window_bidirectional_mask_function(2)
NONE = torch.zeros(2, dtype=torch.int64)


def packed(function: Any, *lengths: int, batch: int = 2) -> Any:
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(batch, -1)
    documents = theirs.find_packed_sequence_indices(positions)
    return theirs.packed_sequence_compatibility_function(function, positions, documents)


def call_of(
    function: Any, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0
) -> dict[str, Any]:
    return {
        "batch_size": 2,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": function,
    }


CALLS = {
    "causal": call_of(CAUSAL, 5, 5),
    "causal, cached": call_of(CAUSAL, 5, 12, 7),
    "causal, prefill of a static cache": call_of(CAUSAL, 5, 12, 0),
    "causal, step of a static cache": call_of(CAUSAL, 1, 12, 4),
    "causal, step": call_of(CAUSAL, 1, 12, 11),
    "causal, cache without its beginning": call_of(CAUSAL, 3, 8, 9, 4),
    "full": call_of(FULL, 5, 5),
    "full, cross": call_of(FULL, 3, 9),
    "window": call_of(WINDOW, 9, 9),
    "window, one key longer": call_of(WINDOW, 4, 4),
    "window, within it": call_of(WINDOW, 3, 3),
    "window, cached": call_of(WINDOW, 5, 12, 7),
    "window, sliding cache": call_of(WINDOW, 4, 6, 9, 7),
    "window, step of a sliding cache": call_of(WINDOW, 1, 3, 11, 9),
    "window, static sliding cache": call_of(WINDOW, 3, 6, 0),
    "window of one": call_of(theirs.sliding_window_causal_mask_function(1), 5, 5),
    "around": call_of(AROUND, 9, 9),
    "around, cross": call_of(AROUND, 4, 9, 3),
    "chunks": call_of(theirs.chunked_causal_mask_function(4, NONE), 11, 11),
    "chunks, within one": call_of(theirs.chunked_causal_mask_function(16, NONE), 11, 11),
    "chunks, after padding": call_of(theirs.chunked_causal_mask_function(4, torch.tensor([0, 3])), 11, 11),
    "chunks, cached": call_of(theirs.chunked_causal_mask_function(4, NONE), 3, 6, 9, 6),
    "chunks, step": call_of(theirs.chunked_causal_mask_function(4, NONE), 1, 9, 8),
    "documents": call_of(packed(CAUSAL, 5, 1, 4), 10, 10) | {"allow_is_causal_skip": False},
    "documents, window": call_of(packed(WINDOW, 5, 1, 6), 12, 12) | {"allow_is_causal_skip": False},
    "documents, chunks": call_of(packed(theirs.chunked_causal_mask_function(4, NONE), 6, 9), 15, 15)
    | {"allow_is_causal_skip": False},
}
PADS = ["none", "right", "left", "hole", "short", "all of one"]


def with_padding(arguments: dict[str, Any], pads: str) -> dict[str, Any]:
    seen = arguments["kv_length"] + arguments["kv_offset"]
    if pads == "short":  # of a static cache, up to the tokens seen so far
        mask = torch.ones(2, arguments["q_offset"] + arguments["q_length"], dtype=torch.bool)
    elif pads == "all of one":
        mask = torch.tensor([[True], [False]]).expand(2, seen)
    else:
        mask = padding(pads, 2, seen)
    return arguments | {"attention_mask": None if mask is None else mask.bool()}


def dense_of_theirs(arguments: dict[str, Any]) -> Tensor:
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return theirs.sdpa_mask(**(arguments | skips))


@pytest.mark.parametrize("tensor_offset", [False, True])
@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize("case", CALLS)
def test_structured_mask_is_the_mask_of_sdpa(case: str, pads: str, tensor_offset: bool) -> None:
    arguments = with_padding(CALLS[case], pads)
    if tensor_offset:
        arguments["q_offset"] = torch.tensor(arguments["q_offset"])
    want = dense_of_theirs(arguments)
    got = ours._mask_of_batch(**arguments)
    if got is None:
        assert want.equal(torch.ones_like(want).tril(arguments["q_offset"] - arguments["kv_offset"]))
        return
    assert isinstance(got, ours.BatchMask), "this needs no dense mask"
    # What a query at a padded place sees is nobody's business; with chunks it differs.
    assert torch.equal(got.dense(), want)
    assert ours._mask_of_batch(**(arguments | {"attention_mask": got})) is got


@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize("case", CALLS)
def test_what_the_layer_is_given_says_the_same(case: str, pads: str) -> None:
    """The arguments of attention(), through the float64 oracle: the rows of the identity are the mask."""
    from polyflash import attention

    arguments = with_padding(CALLS[case], pads)
    got = ours._mask_of_batch(**arguments)
    if got is None:
        return
    want = dense_of_theirs(arguments)
    seqlen_q, seqlen_k = want.shape[2:]
    q = torch.zeros(2, 1, seqlen_q, 4, dtype=torch.float64)
    k = torch.zeros(2, 1, seqlen_k, 4, dtype=torch.float64)
    v = torch.eye(seqlen_k, dtype=torch.float64).expand(2, 1, -1, -1)
    options = got.options(seqlen_q, seqlen_k)
    assert torch.equal(attention(q, k, v, **options) > 0, want)


@pytest.mark.parametrize("function", [CAUSAL, WINDOW])
def test_one_pack_has_cumulative_lengths_too(function: Any) -> None:
    arguments = call_of(packed(function, 5, 1, 4, batch=1), 10, 10) | {"batch_size": 1}
    got = ours._mask_of_batch(**arguments)
    assert got.cu_seqlens.dtype is torch.int32 and got.cu_seqlens.tolist() == [0, 5, 6, 10]
    assert torch.equal(got.dense(), dense_of_theirs(arguments))
    assert ours._mask_of_batch(**CALLS["documents"]).cu_seqlens is None, "two packs are no single one"


def or_first(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key <= 0


UNREAD = {
    "or": theirs.or_masks(CAUSAL, or_first),
    "blocks": theirs.or_masks(CAUSAL, theirs.blockwise_overlay(torch.zeros(2, 5, dtype=torch.int64))),
    "either": lambda batch, head, query, key: (key > query - 3) | (key <= query),
    "of a head": lambda batch, head, query, key: (key <= query) & (head >= 0),
    "strict": lambda batch, head, query, key: key < query,
    "turned": lambda batch, head, query, key: query <= key,
    "dilated": lambda batch, head, query, key: (key <= query) & ((query - key) % 2 == 0),
    "shifted": lambda batch, head, query, key: key <= query + 1,
    "asymmetric chunks": lambda b, h, q, k: (k - NONE[b]) // 3 == (q - NONE[b]) // 4,
    "two kinds of positions": lambda b, h, q, k: torch.arange(5).expand(2, -1)[b, k] <= q,
    "two tables": lambda b, h, q, k: torch.zeros(2, 5)[b, q] == torch.ones(2, 5)[b, k],
    "no tensor": lambda batch, head, query, key: True,
    "branching": lambda batch, head, query, key: key <= query if query > 3 else key >= query,
    "positions alone": theirs.remap_positions_for_packed_sequence(
        CAUSAL, torch.zeros(2, 5, dtype=torch.int64)
    ),
}


@pytest.mark.parametrize("function", UNREAD)
def test_other_functions_are_not_taken_for_a_known_pattern(function: str) -> None:
    assert read(UNREAD[function]) is None


def test_comparing_two_symbols_makes_no_truth() -> None:
    with pytest.raises(TypeError, match="branches"):
        bool(Term("query") == Term("query"))


@pytest.mark.parametrize(
    "change",
    [
        {"mask_function": UNREAD["or"]},
        {"mask_function": UNREAD["blocks"]},
        {"allow_is_causal_skip": False},
        {"allow_is_causal_skip": False, "q_length": 1, "q_offset": 4},
        {"use_vmap": True},
        {"mask_function": FULL, "allow_is_bidirectional_skip": False},
    ],
    ids=["or", "blocks", "asked for", "step of a sliding cache", "overlay", "asked for, full"],
)
def test_other_patterns_become_the_dense_mask(change: dict[str, Any]) -> None:
    arguments = call_of(CAUSAL, 5, 5) | change
    got = ours._mask_of_batch(**arguments)
    assert isinstance(got, Tensor)
    assert torch.equal(got, dense_of_theirs(arguments))


def test_a_step_of_a_static_cache_is_structured_though_no_skip_is_allowed() -> None:
    arguments = call_of(CAUSAL, 1, 12, torch.tensor(4)) | {"allow_is_causal_skip": False}
    got = ours._mask_of_batch(**arguments)
    assert isinstance(got, ours.BatchMask) and torch.equal(got.dense(), dense_of_theirs(arguments))


def test_a_mask_moves_like_a_tensor() -> None:
    lens = torch.tensor([2, 3], dtype=torch.int32)
    mask = ours.BatchMask((2, 1, 3, 3), torch.device("cpu"), True, 0, lens)
    assert mask.to("cpu") is mask and mask.to(torch.bool) is mask and mask.to(mask.dense()) is mask
    moved = mask.to("meta", non_blocking=True)
    assert moved.device.type == "meta" and moved.kv_lens.device.type == "meta" and moved.causal
    assert mask.ndim == 4 and mask.contiguous() is mask


def test_a_model_that_computes_with_the_mask_gets_the_dense_one() -> None:
    mask = ours._mask_of_batch(**call_of(WINDOW, 9, 9))
    dense = mask.dense()
    assert torch.equal(mask[:, :, :4, :5], dense[:, :, :4, :5])
    assert torch.equal(torch.where(mask, 1.0, 0.0), dense.float())
    assert torch.equal(torch.cat([mask, dense], -1), torch.cat([dense, dense], -1))
    assert torch.equal(mask.to(torch.float32), dense.float()) and torch.equal(
        mask.expand(2, 4, -1, -1)[0], dense[0].expand(4, -1, -1)
    )
    assert not hasattr(mask, "no_such_method")


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
    assert got.is_contiguous()


@pytest.mark.parametrize("kind", ["bool", "float", "none"])
def test_masks_and_position_bias_add_up_as_in_sdpa(kind: str) -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    bias = torch.randn(1, 4, 5, 5)
    seen = torch.rand(2, 1, 5, 5) > 0.4
    seen[..., 0] = True
    mask = {"bool": seen, "float": torch.where(seen, 0.5, -1e30), "none": None}[kind]
    module = torch.nn.Identity()
    module.num_key_value_groups, module.is_causal = 2, True
    want, _ = sdpa_attention_forward(module, q, k, v, mask, position_bias=bias, scaling=1.0)
    got, _ = ours._attention_forward(module, q, k, v, mask, position_bias=bias, scaling=1.0)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("pads", ["none", "right", "left", "hole"])
def test_gradients_are_those_of_sdpa(pads: str) -> None:
    inputs, live = call("Mistral", pads)
    outcomes = []
    for implementation in ("sdpa", "poly"):
        model = build("Mistral", implementation)
        model.zero_grad()
        logits = model(**inputs).logits
        (logits if live is None else logits[live]).square().mean().backward()
        outcomes.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    torch.testing.assert_close(outcomes[1], outcomes[0], atol=1e-4, rtol=1e-3)


def test_is_causal_of_the_call_decides_without_a_mask() -> None:
    want, got, causal = (
        build("Llama", implementation)(tokens(2, 9), **options).logits
        for implementation, options in (
            ("sdpa", {"is_causal": False}),
            ("poly", {"is_causal": False}),
            ("poly", {}),
        )
    )
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert (got - causal).abs().max() > 0.1


X = torch.zeros(1, 2, 3, 8)
ENDS = torch.tensor([0, 2, 3], dtype=torch.int32)
REFUSED = {
    "output_attentions": {"output_attentions": True},
    "cache": {"cache": object()},
    "indices": {"indices": torch.zeros(1, 3, 2)},
    "some_new_argument": {"some_new_argument": 1.0},
    "cu_seq_lens_q": {"cu_seq_lens_q": ENDS},
    "cu_seq_lens_q: got a dense": {
        "cu_seq_lens_q": ENDS,
        "cu_seq_lens_k": ENDS,
        "attention_mask": torch.ones(1, 1, 3, 3, dtype=torch.bool),
    },
    "cu_seq_lens_k": {
        "cu_seq_lens_q": ENDS,
        "cu_seq_lens_k": torch.tensor([0, 1, 3], dtype=torch.int32),
        "position_bias": torch.zeros(1, 2, 3, 3),
    },
}


@pytest.mark.parametrize("argument", REFUSED)
def test_what_would_change_the_result_is_refused(argument: str) -> None:
    refused = {"attention_mask": None} | REFUSED[argument]
    with pytest.raises(UnsupportedError, match=argument):
        ours._attention_forward(torch.nn.Identity(), X, X, X, **refused)
    quiet = {
        "some_new_argument": None,
        "position_ids": torch.arange(3)[None],
        "use_cache": True,
        "max_length_q": 3,
    }
    ours._attention_forward(torch.nn.Identity(), X, X, X, None, **quiet)


def test_cumulative_lengths_want_a_batch_of_one() -> None:
    x = X.expand(2, -1, -1, -1)
    with pytest.raises(UnsupportedError, match="batch of one"):
        ours._attention_forward(torch.nn.Identity(), x, x, x, None, cu_seq_lens_q=ENDS, cu_seq_lens_k=ENDS)


def test_a_window_that_the_mask_does_not_hold_is_refused() -> None:
    x = torch.zeros(1, 2, 9, 8)
    with pytest.raises(UnsupportedError, match="sliding_window"):
        ours._attention_forward(torch.nn.Identity(), x, x, x, None, sliding_window=4)
    ours._attention_forward(torch.nn.Identity(), x, x, x, None, sliding_window=9)


def test_a_mask_of_another_length_is_refused() -> None:
    mask = ours.BatchMask((1, 1, 3, 4), torch.device("cpu"), False, 0)
    with pytest.raises(SpecError, match="attention_mask: got 3 queries x 4 keys"):
        ours._attention_forward(torch.nn.Identity(), X, X, X, mask)


def test_a_mask_of_two_dimensions_is_refused() -> None:
    """(batch, seqlen_k) would broadcast to (seqlen_q, seqlen_k) where the sizes happen to agree."""
    x = torch.zeros(3, 2, 3, 8)
    with pytest.raises(SpecError, match="attention_mask: got 2 dimensions"):
        ours._attention_forward(torch.nn.Identity(), x, x, x, torch.ones(3, 3, dtype=torch.bool))


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
