"""Names of other libraries, and slips of the pen, get the name that is right here."""

from __future__ import annotations

import functools
import inspect
import typing

import pytest
import torch

import polyflash
from polyflash import attention, attention_groups, attention_paged, attention_varlen, explain, hints

FUNCTIONS = (attention, attention_varlen, attention_paged, attention_groups, explain)
GIVEN = torch.ones(1, 2, 3, 8)


def required(function):
    """With something for every argument that has no default."""
    takes = inspect.signature(function).parameters.values()
    return functools.partial(
        function, **{p.name: GIVEN for p in takes if p.default is inspect.Parameter.empty}
    )


SAID = [
    (attention, "is_causal", "Use causal=. True aligns the last row with the last key; .*causal='top_left'"),
    (attention, "attn_mask", r"Use mask=. A bool mask \(True = attend\) is mask=, floats .* are bias="),
    (attention, "enable_gqa", "Drop it: query heads are grouped"),
    (attention, "score_mod", "Use bias=. No function is called per score"),
    (attention, "block_mask", r"Use mask=. Mask.blocks\("),
    (attention, "key_padding_mask", "Use kv_lens=. .*~key_padding_mask"),
    (attention, "dropout", "Use dropout_p=.$"),
    (attention, "softmax_scale", "Use scale=.$"),
    (attention, "window_size", "Use window=. A side without bound is None"),
    (attention, "attn_bias", "Use bias=.$"),
    (attention, "cu_seqlens", r"attention\(\) takes no cu_seqlens_q=; attention_varlen\(\) does"),
    (attention, "page_table", r"attention\(\) takes no page_table=; attention_paged\(\) does"),
    (attention, "casual", "Use causal=.$"),
    (attention, "kv_len", "Use kv_lens=.$"),
    (attention_varlen, "attn_mask", r"attention_varlen\(\) takes no mask=; attention\(\) does"),
    (attention_paged, "block_table", "Use page_table=.$"),
    (attention_paged, "bias", r"takes no bias=; attention\(\) does"),
    (attention_groups, "dropout", r"takes no dropout_p=; attention_varlen\(\) does"),
    (explain, "softmax_scale", "Use scale=.$"),
    (explain, "zzz", "$"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "name", "words"), SAID, ids=[f"{f.__name__}-{n}" for f, n, _ in SAID])
def test_an_unknown_name_is_answered(function, name: str, words: str):
    start = f"^{function.__name__}\\(\\) got an unexpected keyword argument '{name}'.*"
    with pytest.raises(TypeError, match=start + words):
        required(function)(**{name: True})


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_every_name_elsewhere_has_words_and_is_none_of_ours(function):
    takes = inspect.signature(function).parameters
    for name, (ours, words) in hints._NAMES.items():
        assert name not in takes and (ours or words)
        assert not ours or ours in {*inspect.signature(explain).parameters, "return_lse"}, name
        assert str(hints.unexpected(function, {"other": 1, name: 2})).count(repr(name)) == 1


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_signatures_do_not_show_what_is_refused(function):
    kinds = {p.kind for p in inspect.signature(function).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds and "unknown" not in typing.get_type_hints(function)
    assert inspect.getfullargspec(function).varkw is None and not hasattr(function, "__wrapped__")


def test_a_compiled_call_is_one_graph_and_refuses_alike():
    compiled = torch.compile(lambda q, **names: attention(q, q, q, **names), backend="eager", fullgraph=True)
    assert torch.equal(compiled(GIVEN, causal=True), polyflash.attention(GIVEN, GIVEN, GIVEN, causal=True))
    with pytest.raises(Exception, match="unexpected"):
        compiled(GIVEN, is_causal=True)
