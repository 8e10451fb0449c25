"""torch.export: a program holds the op, with static and with dynamic lengths, and gives what eager gives."""

from __future__ import annotations

import io

import pytest
import torch

from polyflash import Mask, attention, attention_varlen


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = torch.nn.Linear(32, 64)

    def forward(self, x, lens):
        q, k, v = self.qkv(x).unflatten(2, (8, 8)).split((4, 2, 2), 2)
        mask = Mask.lengths(lens) & Mask.causal("top_left") & Mask.window(6, None)
        return attention(q, k, v, mask=mask, layout="bshd", return_lse=True)


class Packed(Model):
    def forward(self, x, bounds):
        q, k, v = self.qkv(x).unflatten(1, (8, 8)).split((4, 2, 2), 1)
        return attention_varlen(q, k, v, bounds, bounds, causal=True, return_lse=True)


def inputs(kind, length, last):
    torch.manual_seed(length)
    if kind is Packed:
        return torch.randn(length, 32), torch.tensor([0, last, length], dtype=torch.int32)
    return torch.randn(2, length, 32), torch.tensor([length, last], dtype=torch.int32)


def ops_of(program):
    return [str(node.target) for node in program.graph.nodes if "polyflash" in str(node.target)]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", [Model, Packed])
def test_static(kind, grad, strict):
    model, given = kind(), inputs(kind, 9, 3)
    with torch.set_grad_enabled(grad):
        program = torch.export.export(model, given, strict=strict)
        got, want = program.module()(*given), model(*given)
    assert ops_of(program) == ["polyflash.attention.default"]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    changed = inputs(kind, 9, 1)
    assert torch.equal(program.module()(*changed)[0], model(*changed)[0])
    with pytest.raises((RuntimeError, AssertionError)):
        program.module()(*inputs(kind, 11, 3))


@pytest.mark.parametrize("kind", [Model, Packed])
def test_dynamic_lengths_saved_and_loaded(kind):
    model = kind()
    length = torch.export.Dim("length", min=2, max=4096)
    shapes = {"x": {0 if kind is Packed else 1: length}, "bounds" if kind is Packed else "lens": None}
    program = torch.export.export(model, inputs(kind, 9, 3), dynamic_shapes=shapes)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    for each in (program, program.run_decompositions(), torch.export.load(buffer)):
        assert ops_of(each) == ["polyflash.attention.default"]
        for n, last in ((2, 1), (9, 9), (40, 17), (300, 2)):
            got, want = each.module()(*inputs(kind, n, last)), model(*inputs(kind, n, last))
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_gradients_of_an_exported_program():
    model, (x, lens) = Model(), inputs(Model, 9, 3)
    program = torch.export.export(model, (x, lens))
    found = []
    for module in (model, program.module()):
        leaf = x.clone().requires_grad_()
        found.append(torch.autograd.grad(module(leaf, lens)[0].square().sum(), leaf)[0])
    assert torch.equal(*found)


def test_refusals_are_raised_by_the_export():
    model, (x, lens) = Model(), inputs(Model, 9, 3)
    with pytest.raises(Exception, match="kv_lens"):
        torch.export.export(model, (x, lens.short()))
