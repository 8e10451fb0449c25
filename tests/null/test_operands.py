"""The table of operands says everything once: what is written out beside it agrees, and a new operand is one
entry."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

import polyflash.torch_ops
from polyflash.operands import BY_NAME, DIFFERENTIABLE, OPERANDS, TENSORS, features_of
from polyflash.spec import Arguments, Feature
from tests import processes

SIZES = {"num_q_heads": 4, "num_kv_heads": 4, "head_dim": 8, "head_dim_v": 8}


def test_arguments_are_the_table_written_out():
    assert Arguments._fields == tuple(x.name for x in OPERANDS)
    assert tuple(Arguments()) == tuple(x.default for x in OPERANDS)


def test_every_op_has_them_in_this_order():
    for name in ("attention", "attention_out", "attention_backward", "column_sums", "row_stats"):
        arguments = getattr(torch.ops.polyflash, name).default._schema.arguments[-len(OPERANDS) :]
        assert [x.name for x in arguments] == [x.name for x in OPERANDS]
        assert [x.default_value for x in arguments] == [x.default for x in OPERANDS]


def test_the_backward_op_has_a_gradient_of_each_differentiable_operand():
    returns = torch.ops.polyflash.attention_backward.default._schema.returns
    assert [x.name for x in returns] == [f"d{name}" for name in ("q", "k", "v", *DIFFERENTIABLE)]


def test_every_feature_has_an_operand_or_follows_from_sizes():
    by_sizes = {Feature.GQA, Feature.HEAD_DIM_V}
    assert {x.feature for x in OPERANDS if x.feature} == set(Feature) - by_sizes
    assert features_of(Arguments(), **SIZES) == frozenset()
    assert features_of(Arguments(), **{**SIZES, "num_kv_heads": 2, "head_dim_v": 4}) == by_sizes
    assert features_of(Arguments(offset=0, window_right=3), **SIZES) == {Feature.Q_OFFSET, Feature.WINDOW}


def test_a_tensor_says_what_it_is():
    for operand in TENSORS:
        assert operand.kind == "Tensor?" and operand.dtype and operand.feature and operand.vmap, operand.name
        assert operand.default is None and operand.words, operand.name
    assert {x.name for x in OPERANDS if x.is_tensor} - {x.name for x in TENSORS} == {"dropout_seed"}
    assert BY_NAME["page_table"].axes == ("batch", "max_pages")


# The exercise of docs/layout.md: an entry in operands.py, its feature, and its name written out in spec.py.
CHANGES = (
    (
        "operands.py",
        "\n)\nBY_NAME =",
        """
    Operand(
        "key_scale", "Tensor?", feature=Feature.KEY_SCALE, axes=(BATCH, KEYS), dtype="float",
        beside_packed=False, beside_pages=False, vmap="batch",
    ),
)
BY_NAME =""",
    ),
    ("spec.py", '= "row bounds"\n', '= "row bounds"\n    KEY_SCALE = "key scales"\n'),
    (
        "spec.py",
        "    dropout_heads: int = 0\n",
        "    dropout_heads: int = 0\n    key_scale: Tensor | None = None\n",
    ),
)
EXERCISE = """
import types
import torch, polyflash
from polyflash import SpecError, UnsupportedError, spec, torch_ops, transforms

def refusal(kind, call, *inputs, **options):
    try:
        call(*inputs, **options)
    except kind as error:
        return str(error)
    raise SystemExit("not refused")

ones, q = torch.ones, torch.ones(2, 4, 5, 8)
attention = torch.ops.polyflash.attention.default
print("schema", attention._schema.arguments[-1].name)
print("feature", refusal(UnsupportedError, attention, q, q, q, key_scale=ones(2, 5)))
with torch.device("meta"):
    print("fake", refusal(UnsupportedError, attention, *[ones(2, 4, 5, 8)] * 3, key_scale=ones(2, 5)))
print("shape", refusal(SpecError, attention, q, q, q, key_scale=ones(2, 4)))
print("dtype", refusal(SpecError, attention, q, q, q, key_scale=ones(2, 5).long()))
ends, one = torch.tensor([0, 5], dtype=torch.int32), q[:1]
packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "key_scale": ones(1, 5)}
print("packed", refusal(SpecError, attention, one, one, one, **packed))
paged = spec.Arguments(page_table=ends[None], kv_lens=ends[1:], key_scale=ones(1, 5))
print("paged", refusal(SpecError, torch_ops.check, one[:, :, :1], q, q, paged))

def spy(*inputs):
    print("vmap", tuple(spec.Arguments(*inputs[3:]).key_scale.shape))
    return q.new_empty(6, 4, 5, 8), q.new_empty(6, 4, 5)

args = spec.Arguments(need_lse=True, key_scale=ones(3, 2, 5))
dims = (0, 0, 0, *(0 if x is args.key_scale else None for x in args))
torch.ops.polyflash.attention.default = spy
transforms.map_forward(types.SimpleNamespace(batch_size=3), dims, *[ones(3, 2, 4, 5, 8)] * 3, *args)
print("without", tuple(attention(q, q, q)[0].shape))
"""
SAID = {
    "schema": "key_scale",
    "feature": "has no key scales",
    "fake": "has no key scales",
    "shape": "key_scale: got (2, 4) on cpu, wanted (5,) or (2, 5) on cpu",
    "dtype": "key_scale: got torch.int64",
    "packed": "key_scale: got one, wanted none beside cu_seqlens",
    "paged": "key_scale: got one, wanted none beside page_table",
    "vmap": "(6, 5)",
    "without": "(2, 4, 5, 8)",
}


def test_a_new_operand_is_one_entry(tmp_path: Path):
    """Its schema, feature, checks and vmap follow; kernels refuse it until a capability has the feature."""
    copy = tmp_path / "polyflash"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(polyflash.__file__).parent, copy, ignore=ignored)
    for name, old, new in CHANGES:
        text = (copy / name).read_text(encoding="utf-8")
        assert text.count(old) == 1, (name, old)
        (copy / name).write_text(text.replace(old, new), encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = processes.begun(["-c", EXERCISE], env=env, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, said in SAID.items():
        _, found, rest = done.stdout.partition(f"{name} ")
        assert found and said in rest, (name, rest[:400])
