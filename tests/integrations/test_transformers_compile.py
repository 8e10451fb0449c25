"""torch.compile: one graph, the same numbers, and no (seqlen_q, seqlen_k) tensor anywhere in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from polyflash.integrations import transformers as ours  # noqa: E402
from tests.integrations.models import RECIPES, answer, build, call, padding, tokens  # noqa: E402
from tests.integrations.test_transformers import CALLS, PADS, dense_of_theirs, with_padding  # noqa: E402

OTHERS = [(False, False), (False, True), (True, False)]
LENGTH = 23  # no other size of the models, nor a sum of them


class Graphs:
    """A backend of torch.compile that runs the graph as it is and keeps the shapes in it."""

    def __init__(self) -> None:
        self.count = 0
        self.shapes: set[tuple[int, ...]] = set()

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        for node in graph.graph.nodes:
            value = node.meta.get("example_value")
            for x in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(x, torch.Tensor):
                    self.shapes.add(tuple(int(n) for n in x.shape))
        return graph.forward

    def squares(self, rows: int, keys: int) -> list[tuple[int, ...]]:
        """Shapes that hold a number per query and key."""
        return [shape for shape in self.shapes if shape[-2:] == (rows, keys)]


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


MODELS = [
    ("Llama", "left"),
    ("Mistral", "hole"),
    ("GptOss", "left"),
    ("Bert", "right"),
    *(
        pytest.param(name, pads, marks=pytest.mark.slow)
        for name in ("Llama", "Mistral", "Gemma2", "Gemma3", "GptOss", "Llama4", "DeepseekV3", "Bert")
        for pads in ("none", "left", "right", "hole")
    ),
]


@pytest.mark.parametrize(("name", "pads"), MODELS)
def test_a_compiled_model_is_one_graph_without_a_square(name: str, pads: str) -> None:
    inputs, live = call(name, pads, length=LENGTH)
    model = build(name, "poly", experts="batched_mm")
    want = answer(model, inputs, live)
    graphs = Graphs()
    compiled = torch.compile(model, fullgraph=True, backend=graphs, dynamic=False)
    got = answer(compiled, inputs, live)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert graphs.count == 1 and graphs.shapes
    assert not graphs.squares(LENGTH, LENGTH), graphs.squares(LENGTH, LENGTH)


def test_the_search_for_squares_finds_the_mask_of_sdpa() -> None:
    inputs, live = call("Llama", "left", length=LENGTH)
    graphs = Graphs()
    answer(torch.compile(build("Llama", "sdpa"), fullgraph=True, backend=graphs, dynamic=False), inputs, live)
    assert graphs.squares(LENGTH, LENGTH)


@pytest.mark.parametrize(
    ("use_cache", "ones"), [(True, True), *(pytest.param(*x, marks=pytest.mark.slow) for x in OTHERS)]
)
def test_compiled_packed_documents_do_not_see_each_other(use_cache: bool, ones: bool) -> None:
    """Whether positions restart, or ones are all ones, is not known while tracing."""
    model, parts = build("Mistral", "poly"), (6, 13, 4)
    ids = tokens(1, LENGTH)
    restarting = torch.cat([torch.arange(n) for n in parts])[None]
    rising = torch.arange(LENGTH)[None]
    graphs = Graphs()
    compiled = torch.compile(model, fullgraph=True, backend=graphs, dynamic=False)
    options = {"use_cache": use_cache, "attention_mask": torch.ones_like(ids) if ones else None}
    with torch.inference_mode():
        packed = compiled(ids, position_ids=restarting, **options).logits
        plain = compiled(ids, position_ids=rising, **options).logits
        want = model(ids, use_cache=False).logits
        alone = [model(part, use_cache=False).logits for part in ids.split(parts, 1)]
    torch.testing.assert_close(plain, want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(packed, torch.cat(alone, 1), atol=1e-4, rtol=1e-4)
    assert graphs.count == 1 and not graphs.squares(LENGTH, LENGTH)


TRACED = [
    pytest.param(case, pads, marks=() if (i + PADS.index(pads)) % len(PADS) == 0 else pytest.mark.slow)
    for i, case in enumerate(case for case in CALLS if "step" not in case)
    for pads in PADS
]


@pytest.mark.parametrize(("case", "pads"), TRACED)
def test_a_mask_made_while_tracing_says_the_same(case: str, pads: str) -> None:
    arguments = with_padding(CALLS[case], pads)
    want = dense_of_theirs(arguments)
    function, padded = arguments.pop("mask_function"), arguments.pop("attention_mask")
    graphs = Graphs()

    def mask_of(padded: torch.Tensor | None) -> Any:
        return ours._mask_of_batch(**arguments, mask_function=function, attention_mask=padded)

    got = torch.compile(mask_of, fullgraph=True, backend=graphs, dynamic=False)(padded)
    if got is None:
        assert padded is None
        return
    assert isinstance(got, ours.BatchMask) and torch.equal(got.dense(), want)
    assert not graphs.squares(*want.shape[2:])


STEPS = [("Llama", "left")]
SLOW_STEPS = [("Llama", "none"), ("Mistral", "left"), ("Mistral", "none"), ("GptOss", "left")]


@pytest.mark.parametrize(
    ("name", "pads"), [*STEPS, *(pytest.param(*x, marks=pytest.mark.slow) for x in SLOW_STEPS)]
)
def test_steps_with_a_static_cache_compile_no_more_often_than_with_sdpa(name: str, pads: str) -> None:
    ids, mask = tokens(2, 11), padding(pads, 2, 11)
    mask = torch.ones_like(ids) if mask is None else mask
    want, theirs = steps_of(name, RECIPES[name].peers[0], ids, mask)
    got, ours = steps_of(name, "poly", ids, mask)
    assert torch.equal(got, want)
    assert ours <= theirs, f"compiled {ours} times, {theirs} with {RECIPES[name].peers[0]}"
    if name == "Llama":
        assert ours == 1


def steps_of(name: str, implementation: str, ids: Any, mask: Any) -> tuple[torch.Tensor, int]:
    """Eight tokens the way generate() makes them where it compiles: the masks are made outside the graph.

    Returns the tokens and how often a step was compiled.
    """
    from transformers.masking_utils import create_masks_for_generate

    torch._dynamo.reset()
    model, graphs = build(name, implementation, experts="batched_mm"), Graphs()
    step = torch.compile(model.forward, fullgraph=True, backend=graphs)
    past = transformers.StaticCache(config=model.config, max_cache_len=20)
    forward = model.forward
    with torch.inference_mode():
        for i in range(8):
            new = ids if i == 0 else ids[:, -1:].clone()
            masks = create_masks_for_generate(model.config, torch.empty(*new.shape, 64), mask, past)
            places = (mask.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :].clone()
            out = forward(new, attention_mask=masks, past_key_values=past, position_ids=places)
            ids = torch.cat([ids, out.logits[:, -1:].argmax(-1)], 1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            forward = step
    return ids, graphs.count
