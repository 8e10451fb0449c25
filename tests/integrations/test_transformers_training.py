"""Every model takes a training step: the gradient of each parameter within the 2x rule, with checkpoints or
without, compiled or not, and attention dropout that obeys torch's generator.

Compared with the same weights under transformers' own attention: a float64 run is the truth, float32 runs
with "sdpa" and "eager" say how far from it plain arithmetic is."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from polyflash.plan import Launch  # noqa: E402
from polyflash.spec import Feature, Phase  # noqa: E402
from tests.integrations.models import (  # noqa: E402
    RECIPES,
    build,
    call,
    step,
    step_in_float64,
    tokens,
)
from tests.integrations.test_transformers_models import WHOLE, promised  # noqa: E402
from tests.tolerance import compare  # noqa: E402

CASES = [
    pytest.param(name, pads, marks=() if pads in ("none", "left") else pytest.mark.slow)
    for name, recipe in RECIPES.items()
    for pads in (("none",) if recipe.kind in WHOLE else ("none", "left", "right", "hole"))
]


def trained(model: Any, name: str, pads: str) -> dict[str, Tensor]:
    inputs, live = call(name, pads)
    if RECIPES[name].kind in ("decoder", "text to text"):
        inputs["use_cache"] = False  # as a training does
    return step(model.train(), inputs, live)


@cache
def truth(name: str, pads: str) -> dict[str, Tensor]:
    return step_in_float64(name, *call(name, pads))


def of_peers(name: str, pads: str, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    models = (build.__wrapped__(name, peer, dropout=0.0).to(dtype) for peer in RECIPES[name].peers)
    return [trained(model, name, pads) for model in models]


def ours(name: str) -> Any:
    return build.__wrapped__(name, "poly", dropout=0.0)


def assert_intended(launched: list[Launch], forwards_per_backward: int = 1) -> None:
    """Each attention ran forward and backward, on the row that the table promises for it here."""
    phases = [launch.row.phase for launch in launched]
    backwards = phases.count(Phase.BACKWARD)
    assert backwards and phases.count(Phase.FORWARD) == forwards_per_backward * backwards
    for launch in launched:
        wanted = promised(launch.spec)
        assert launch.row.backend == wanted, f"{launch.row.name} ran {sorted(launch.spec.features)}"


@pytest.mark.parametrize(("name", "pads"), CASES)
def test_gradients_are_within_the_rule(name: str, pads: str, launched: list[Launch]) -> None:
    right, plain = truth(name, pads), of_peers(name, pads, torch.float32)
    assert not launched
    got = trained(ours(name), name, pads)
    assert_intended(launched)
    assert got.keys() == right.keys() and len(got) > 20
    largest = max(float(x.abs().max()) for x in right.values())
    for weight, gradient in got.items():
        if float(right[weight].abs().max()) < 1e-12 * largest:  # a bias of keys moves every score of a row
            assert float(gradient.abs().max()) < 1e-6 * largest, weight
            continue
        samples = [each[weight].double() for each in plain]
        ratio = 3 if name == "Gemma2" else 2
        compare(gradient, right[weight], samples, torch.float32, ratio=ratio, label=f"{name} {weight}")


@pytest.mark.parametrize("name", ["Llama", "GptOss", "T5", "DeepseekV3"])
def test_half_precision_gradients_are_within_the_rule(name: str, launched: list[Launch]) -> None:
    dtype = torch.bfloat16
    right, plain = truth(name, "left"), of_peers(name, "left", dtype)
    got = trained(ours(name).to(dtype), name, "left")
    assert_intended(launched)
    for weight, gradient in got.items():
        samples = [each[weight].double() for each in plain]
        compare(gradient, right[weight], samples, dtype, ratio=2, label=f"{name} {weight}")


@pytest.mark.parametrize("name", RECIPES)
def test_checkpoints_change_no_bit(name: str, launched: list[Launch]) -> None:
    pads = "none" if RECIPES[name].kind in WHOLE else "left"
    model = ours(name)
    want = trained(model, name, pads)
    once = len(launched)
    model.activation_checkpointing_enable()
    got = trained(model, name, pads)
    assert_intended(launched[once:], forwards_per_backward=2)
    assert got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want)


def test_packed_documents_train_as_they_do_alone(launched: list[Launch]) -> None:
    """The gradient of a pack is the sum of its documents', by positions that restart."""
    model, parts = ours("Mistral").train(), (6, 11, 4)
    ids = tokens(1, sum(parts))
    restarting = torch.cat([torch.arange(n) for n in parts])[None]

    def gradients(*documents: Tensor, **options: Any) -> dict[str, Tensor]:
        model.zero_grad()
        for document in documents:
            model(document, use_cache=False, **options).logits.square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    want = gradients(*ids.split(parts, 1))
    del launched[:]
    got = gradients(ids, position_ids=restarting)
    assert all(Feature.VARLEN in launch.spec.features for launch in launched)
    assert_intended(launched)
    for name in want:
        torch.testing.assert_close(
            got[name], want[name], atol=1e-3 * float(want[name].abs().max()), rtol=1e-3
        )


DROPPING = [name for name in RECIPES if name != "T5"]  # one setting of T5's is for all its parts


@pytest.mark.parametrize("name", DROPPING)
def test_attention_dropout_obeys_the_generator(name: str, launched: list[Launch]) -> None:
    pads = "none" if RECIPES[name].kind in WHOLE else "left"
    model = build.__wrapped__(name, "poly", dropout=0.3)

    def seeded(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return trained(model, name, pads)

    want = seeded(1)
    assert_intended(launched)
    assert all(Feature.DROPOUT in launch.spec.features for launch in launched)
    again, other = seeded(1), seeded(2)
    assert all(torch.equal(again[n], want[n]) for n in want)
    assert any(not torch.equal(other[n], want[n]) for n in want)
    model.activation_checkpointing_enable()
    again = seeded(1)
    assert all(torch.equal(again[n], want[n]) for n in want), "a checkpoint drops the same weights"
    del launched[:]
    model.eval()
    inputs, live = call(name, pads)
    step(model, inputs, live)
    assert all(Feature.DROPOUT not in launch.spec.features for launch in launched)


@pytest.mark.parametrize(
    ("name", "pads"),
    [
        ("Llama", "left"),
        *(
            pytest.param(name, pads, marks=pytest.mark.slow)
            for name in ("Mistral", "Gemma2", "GptOss", "DeepseekV3", "Bert", "T5")
            for pads in ("none", "left")
        ),
    ],
)
@pytest.mark.parametrize("checkpoints", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_compiled_step_is_the_step(name: str, pads: str, checkpoints: bool, launched: list[Launch]) -> None:
    if checkpoints and name == "T5":
        pytest.skip("with checkpoints transformers' T5 cannot be traced, whatever the attention")
    torch._dynamo.reset()
    model = build.__wrapped__(name, "poly", experts="batched_mm", dropout=0.0)
    want = trained(model, name, pads)
    del launched[:]
    if checkpoints:
        model.activation_checkpointing_enable()
        model.config.use_cache = False  # or transformers warns, which cannot be traced
    compiled = torch.compile(model.train(), fullgraph=True, backend="aot_eager", dynamic=False)
    inputs, live = call(name, pads)
    if RECIPES[name].kind in ("decoder", "text to text"):
        inputs["use_cache"] = False
    got = {n.removeprefix("_orig_mod."): x for n, x in step(compiled, inputs, live).items()}
    assert any(launch.row.phase is Phase.BACKWARD for launch in launched)
    assert not any(got[weight].any() for weight in got.keys() - want.keys()), "weights that take no part"
    for weight in want:
        scale = float(want[weight].abs().max())
        torch.testing.assert_close(got[weight], want[weight], atol=1e-4 * scale + 1e-8, rtol=1e-3)
    torch._dynamo.reset()
