"""Query groups that share keys: one walk or a call each, against the whole sequence and a float64 oracle."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import polyflash
from polyflash import SpecError, attention, attention_groups, explain_groups
from polyflash.groups import RULES, fuses
from polyflash.reference import attention_reference
from polyflash.spec import Feature, Phase
from tests.chosen import in_turn
from tests.device import generator
from tests.rows_here import HERE

INF = float("inf")
MODES = (True, False)


def tensors(
    rows=(5, 1, 0, 12), keys=40, heads=4, kv_heads=2, head_dim=16, head_dim_v=24, dtype=torch.float32
):
    drawn = generator(sum(rows) + keys)
    shapes = [(heads, n, head_dim) for n in rows] + [(kv_heads, keys, d) for d in (head_dim, head_dim_v)]
    *groups, k, v = (torch.randn(2, *shape, generator=drawn).to(dtype) for shape in shapes)
    return groups, k, v


def oracle(groups, k, v, q_offsets, kv_lens=None, causal=True, layout="bhsd", **options):
    """Each group alone over its own keys, in float64."""
    kv_lens = [k.shape[2]] * len(groups) if kv_lens is None else kv_lens
    return [
        attention_reference(q, k[:, :, :n], v[:, :, :n], causal=causal, q_offset=offset, **options)
        for q, offset, n in zip(groups, q_offsets, kv_lens, strict=True)
    ]


def close(got, want, tolerance=1e-5):
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.out.double(), other.out, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(one.lse.double(), other.lse, rtol=tolerance, atol=tolerance)


PLACES = {"q_offsets": [3, 39, 7, 20], "kv_lens": [9, 40, 12, 33]}
OPTIONS = {
    "causal": {},
    "all keys": {"kv_lens": None},
    "not causal": {"causal": False},
    "window": {"window": (6, None)},
    "two sides": {"causal": False, "window": (4, 9)},
    "right side under causal": {"window": (None, 3)},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])},
    "scale": {"scale": -0.7},
    "a group sees no key": {"kv_lens": [0, 40, 12, 0], "sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])},
    "nobody sees a key": {"kv_lens": [0, 0, 0, 0]},
    "before the keys": {"q_offsets": [-100, -3, 0, -12]},
    "behind the keys": {"q_offsets": [100, 2**40, 40, 39], "window": (70, None)},
}


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("fused", MODES)
@pytest.mark.parametrize("name", OPTIONS)
def test_each_group_is_attention_of_its_own(name, fused, backend):
    groups, k, v = tensors()
    options = {**PLACES, **OPTIONS[name]}
    got = attention_groups(groups, k, v, fused=fused, return_lse=True, backend=backend, **options)
    close(got, oracle(groups, k, v, **options))
    assert [one.lse.dtype for one in got] == [torch.float32] * 4


@pytest.mark.parametrize(
    "heads, kv_heads, dtype, fused",
    in_turn([(2, 2), (6, 1)], [torch.float64, torch.bfloat16, torch.float16], MODES, of=2),
    ids=str,
)
def test_dtypes_and_heads(heads, kv_heads, dtype, fused):
    groups, k, v = tensors(heads=heads, kv_heads=kv_heads, dtype=dtype)
    got = attention_groups(groups, k, v, fused=fused, return_lse=True, **PLACES)
    assert all(one.out.dtype is dtype for one in got)
    close(got, oracle(groups, k, v, **PLACES), {torch.float64: 1e-12}.get(dtype, 2e-2))


@pytest.mark.parametrize("fused", MODES)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_zigzag_ranks_together_are_full_causal_attention(ranks, fused):
    """Of 2W chunks rank r has r and 2W-1-r, whose rows stand at positions of the whole sequence."""
    chunks, rows = 2 * ranks, 5
    (q,), k, v = tensors((chunks * rows,), keys=chunks * rows)
    want, lse = attention_reference(q, k, v, causal=True)
    pieces = q.split(rows, 2)
    found: dict[int, polyflash.AttentionOutput] = {}
    for rank in range(ranks):
        own = (rank, chunks - 1 - rank)
        got = attention_groups(
            [pieces[i] for i in own], k, v, q_offsets=[i * rows for i in own],
            kv_lens=[(i + 1) * rows for i in own], fused=fused, return_lse=True,
        )  # fmt: skip
        found |= dict(zip(own, got, strict=True))
    assert sorted(found) == list(range(chunks))
    whole = [torch.cat([found[i][part] for i in range(chunks)], 2).double() for part in (0, 1)]
    torch.testing.assert_close(whole[0], want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole[1], lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("fused", MODES)
def test_keys_a_group_does_not_see_are_absent(fused, backend):
    """NaN beyond a group's length or after its rows reaches no bit of it, though another group reads it."""
    groups, k, v = tensors()
    options = {"fused": fused, "return_lse": True, "backend": backend, **PLACES}
    before = attention_groups(groups, k, v, **options)
    for x in (k, v):
        x[:, :, 9:12] = torch.nan
    after = attention_groups(groups, k, v, **options)
    assert torch.equal(before[0].out, after[0].out) and torch.equal(before[0].lse, after[0].lse)
    assert after[1].out.isnan().all() and after[3].out.isnan().all()


@pytest.mark.parametrize("fused", MODES)
def test_any_number_of_groups(fused):
    _, k, v = tensors()
    assert attention_groups([], k, v, q_offsets=[], fused=fused) == []
    assert attention_groups([], k, v, q_offsets=[], kv_lens=[], fused=fused, return_lse=True) == []
    for count in (1, 3, 20):
        groups, k, v = tensors((1, 2, 3, 4) * 5)
        places = {"q_offsets": list(range(count)), "kv_lens": [40 - i for i in range(count)]}
        got = attention_groups(groups[:count], k, v, fused=fused, return_lse=True, **places)
        close(got, oracle(groups[:count], k, v, **places))
    empty = [torch.empty(2, 4, 0, 16)] * 2
    got = attention_groups(empty, k, v, q_offsets=[0, 5], fused=fused)
    assert [x.shape for x in got] == [(2, 4, 0, 24)] * 2


@pytest.mark.parametrize("fused", [True, False, None])
def test_layout_of_groups_is_that_of_results(fused):
    groups, k, v = tensors()
    want = attention_groups(groups, k, v, fused=fused, return_lse=True, **PLACES)
    turned = [x.transpose(1, 2).contiguous() for x in (*groups, k, v)]
    got = attention_groups(turned[:-2], *turned[-2:], fused=fused, return_lse=True, layout="bshd", **PLACES)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one.out.transpose(1, 2), other.out) and torch.equal(one.lse, other.lse)


@pytest.mark.parametrize("fused", [True, False, None])
def test_without_lse_there_are_tensors_alone(fused):
    groups, k, v = tensors()
    got = attention_groups(groups, k, v, fused=fused, **PLACES)
    want = attention_groups(groups, k, v, fused=fused, return_lse=True, **PLACES)
    assert type(got) is list and all(torch.equal(a, b.out) for a, b in zip(got, want, strict=True))


def test_separate_groups_have_the_bits_of_attention():
    groups, k, v = tensors()
    got = attention_groups(groups, k, v, fused=False, **PLACES)
    for out, q, offset, n in zip(got, groups, *PLACES.values(), strict=True):
        assert torch.equal(out, attention(q, k[:, :, :n], v[:, :, :n], causal=True, q_offset=offset))


def test_inputs_are_not_changed():
    groups, k, v = tensors()
    copies = [x.clone() for x in (*groups, k, v)]
    attention_groups(groups, k, v, fused=True, **PLACES)
    assert all(torch.equal(a, b) for a, b in zip(copies, (*groups, k, v), strict=True))


FEW_ROWS, SEVERAL_GROUPS, MANY_ROWS, KEYS_PER_ROW, _ = RULES["cpu"]


class TestRequests:
    """Groups that are alike as requests of one batch, which a GPU takes from 64 rows on."""

    @pytest.fixture(autouse=True)
    def as_on_a_gpu(self, monkeypatch):
        monkeypatch.setattr(polyflash.groups, "_on_gpu", lambda *_: True)
        monkeypatch.setattr(polyflash.groups, "REQUEST_ROWS", 5)

    def alike(self, count=4, **given):
        groups, k, v = tensors((5,) * count, **given)
        return [x[:1] for x in groups], k[:1], v[:1]

    @pytest.mark.parametrize("backend", HERE)
    @pytest.mark.parametrize("name", OPTIONS)
    def test_each_group_is_attention_of_its_own(self, name, backend):
        groups, k, v = self.alike()
        options = {**PLACES, **OPTIONS[name]}
        plan = explain_groups(groups, k, v, fused=True, backend=backend, **options)
        far = max(options["q_offsets"]) >= 1 << 31
        assert plan.fused and ("requests of one batch" in plan.why) is not far
        assert plan.plans[0].spec.batch == (1 if far else 4)
        got = attention_groups(groups, k, v, fused=True, return_lse=True, backend=backend, **options)
        close(got, oracle(groups, k, v, **options))
        out = attention_groups(groups, k, v, fused=True, backend=backend, **options)
        assert all(torch.equal(a, b.out) for a, b in zip(out, got, strict=True))

    @pytest.mark.parametrize("backend", HERE)
    def test_keys_a_group_does_not_see_are_absent(self, backend):
        groups, k, v = self.alike()
        options = {"fused": True, "return_lse": True, "backend": backend, **PLACES}
        before = attention_groups(groups, k, v, **options)
        for x in (k, v):
            x[:, :, 9:12] = torch.nan
        after = attention_groups(groups, k, v, **options)
        assert torch.equal(before[0].out, after[0].out) and torch.equal(before[0].lse, after[0].lse)
        assert after[1].out.isnan().all() and after[3].out.isnan().all()

    def test_others_are_the_rows_of_one_call(self):
        groups, k, v = self.alike()
        several = {"q_offsets": [0] * 4, "fused": True}
        assert "requests" in explain_groups(groups, k, v, **several).why
        of_batch = [x.expand(2, -1, -1, -1) for x in (*groups, k, v)]
        windows = [(3, None), None, (3, None), None]
        for plan in (
            explain_groups([*groups[:3], groups[3][:, :, :4]], k, v, **several),
            explain_groups([x[:, :, :4] for x in groups], k, v, **several),
            explain_groups(of_batch[:-2], *of_batch[-2:], **several),
            explain_groups(groups, k, v, window=windows, **several),
        ):
            assert plan.fused and "requests" not in plan.why and plan.plans[0].spec.phase is Phase.DECODE

    def test_gradients_and_layouts_are_those_of_separate_groups(self):
        groups, k, v = self.alike()
        inputs = [x.clone().requires_grad_() for x in (*groups, k, v)]
        found = []
        for fused in MODES:
            turned = [x.transpose(1, 2) for x in inputs]
            given = {"fused": fused, "return_lse": True, "layout": "bshd", **PLACES}
            got = attention_groups(turned[:-2], *turned[-2:], **given)
            total = sum((x.out**2).sum() + x.lse.sum() for x in got)
            found.append(torch.autograd.grad(total, inputs))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)

    def test_the_rule_of_a_gpu(self):
        few, several, _, _, most = RULES["gpu"]
        heads = {"num_q_heads": 8, "num_kv_heads": 2, "on_gpu": True}
        rows = few // 4
        assert several == 2 and fuses([rows] * 2, [9] * 2, **heads)
        assert not fuses([rows + 1] * 2, [9] * 2, **heads) and not fuses([4096] * 2, [1 << 30] * 2, **heads)
        assert fuses([most // 8] * 2, [9] * 2, alike=True, **heads)
        assert not fuses([most // 8 + 1] * 2, [9] * 2, alike=True, **heads)
        assert not fuses([rows] * 2, [9, 0], alike=True, **heads)
        assert f"up to {most} of all query heads" in str(RULES["gpu"]) and "on if" not in str(RULES["gpu"])

    @pytest.mark.parametrize("rows", [8, 4])
    def test_by_rule_a_gpu_takes_it(self, rows):
        groups, k, v = self.alike(2)
        groups = [x[:, :, :1].expand(-1, -1, rows, -1) for x in groups]
        plan = explain_groups(groups, k, v, q_offsets=[0, 9])
        assert plan.fused and ("requests" in plan.why) is (rows >= 5)


class TestRule:
    """`fuses`, on both sides of each of its thresholds."""

    def test_rows_of_all_groups_count_per_key_value_head(self):
        for group in (1, 4):
            heads = {"num_q_heads": 2 * group, "num_kv_heads": 2}
            few, many = FEW_ROWS // group, MANY_ROWS // group
            keys = [KEYS_PER_ROW * MANY_ROWS, 9]
            assert not fuses([few, 1], keys, **heads) and not fuses([many - 2, 1], keys, **heads)
            assert fuses([many - 1, 1], keys, **heads) and not fuses([many, 1], keys, **heads)
            assert not fuses([many - 1, 1], [keys[0] - 1, 9], **heads)
        assert fuses([FEW_ROWS - 1, 1], [9, 9], num_q_heads=2, num_kv_heads=2)

    def test_several_groups_count_on_their_average(self):
        heads, n = {"num_q_heads": 2, "num_kv_heads": 2}, SEVERAL_GROUPS
        assert fuses([FEW_ROWS] * n, [9] * n, **heads) and not fuses([FEW_ROWS + 1] * n, [9] * n, **heads)
        assert not fuses([FEW_ROWS] * (n - 1), [9] * (n - 1), **heads)
        assert not fuses([FEW_ROWS] * n, [9] * (n - 1) + [0], **heads)

    def test_two_groups_must_share_keys(self):
        heads = {"num_q_heads": 2, "num_kv_heads": 2}
        assert not fuses([], [], **heads) and not fuses([4], [9], **heads)
        assert not fuses([4, 0], [9, 9], **heads) and not fuses([2, 2], [9, 0], **heads)
        assert fuses([2, 1], [9, 1], **heads)

    def test_a_gpu_has_numbers_of_its_own(self, monkeypatch):
        groups, k, v = tensors()
        monkeypatch.setitem(RULES, "gpu", RULES["gpu"]._replace(few=1000))
        assert not explain_groups(groups, k, v, **PLACES).fused
        plan = explain_groups(groups, k, v, target="cuda:sm90", **PLACES)
        assert plan.fused and "fused up to 1000, " in plan.why

    def test_no_heads(self):
        assert fuses([2, 2], [9, 9], num_q_heads=0, num_kv_heads=0)

    def test_the_rule_is_what_a_call_follows(self, monkeypatch):
        groups, k, v = tensors()
        for chosen in MODES:
            monkeypatch.setattr(polyflash.groups, "fuses", lambda *_, chosen=chosen, **__: chosen)
            plan = explain_groups(groups, k, v, **PLACES)
            assert plan.fused is chosen and len(plan.plans) == (1 if chosen else 4)
            by_rule = attention_groups(groups, k, v, **PLACES)
            asked = attention_groups(groups, k, v, fused=chosen, **PLACES)
            assert all(torch.equal(a, b) for a, b in zip(by_rule, asked, strict=True))


class TestExplain:
    def test_it_launches_nothing_and_takes_meta_tensors(self):
        groups, k, v = tensors()
        meta = [x.to("meta") for x in (*groups, k, v)]
        assert f"fused up to {FEW_ROWS}, " in str(explain_groups(groups, k, v, **PLACES))
        plan = explain_groups(meta[:-2], *meta[-2:], target="cpu:generic", fused=True, **PLACES)
        assert plan.fused and "one call" in str(plan)
        spec = plan.plans[0].spec
        assert spec.phase is Phase.DECODE and spec.seqlen_q == 18 and Feature.ROW_BOUNDS in spec.features

    def test_separate_groups_have_a_plan_each(self):
        groups, k, v = tensors()
        plan = explain_groups(groups, k, v, fused=False, **PLACES)
        assert not plan.fused and plan.why == "asked for by fused=False" and "4 calls" in str(plan)
        assert [p.spec.seqlen_k for p in plan.plans] == PLACES["kv_lens"]
        assert all(Feature.ROW_BOUNDS not in p.spec.features for p in plan.plans)
        assert [p.spec.offset for p in plan.plans] == PLACES["q_offsets"]

    def test_no_group_is_no_call(self):
        _, k, v = tensors()
        plan = explain_groups([], k, v, q_offsets=[])
        assert not plan.fused and plan.plans == () and "there are none" in str(plan)

    def test_keys_beyond_every_group_are_no_part_of_a_walk(self):
        groups, k, v = tensors()
        plan = explain_groups(groups, k, v, q_offsets=[0] * 4, kv_lens=[3, 8, 0, 17], fused=True)
        assert plan.plans[0].spec.seqlen_k == 17


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q_offsets": [1, 2]}, "q_offsets: got list of 2, wanted a list of 4"),
        ({"q_offsets": torch.zeros(4)}, "Use .tolist()"),
        ({"q_offsets": [0, 1.5, 0, 0]}, r"q_offsets\[1\]: got float"),
        ({"kv_lens": [1, 2, 3, 41]}, r"kv_lens\[3\]: got 41, wanted 0 to 40"),
        ({"kv_lens": [-1, 2, 3, 4]}, r"kv_lens\[0\]: got -1"),
        ({"causal": "bottom_right"}, "causal: got 'bottom_right', wanted True or False"),
        ({"fused": 1}, "fused: got 1"),
        ({"window": (-1, 0)}, "Use None for unbounded"),
        ({"layout": "sbhd"}, "layout: got 'sbhd'"),
        ({"softcap": -1.0}, "softcap: got -1.0"),
        ({"backend": "gpu"}, "one of cpu, gluon, triton, webgpu, metal, torch"),
    ],
)
def test_wrong_arguments_are_refused_alike(change, words):
    groups, k, v = tensors()
    for fused in MODES:
        with pytest.raises(SpecError, match=words):
            attention_groups(groups, k, v, **{**PLACES, "fused": fused, **change})


@pytest.mark.parametrize("other", [(2, 4, 5, 8), (1, 4, 5, 16), (2, 2, 5, 16), (4, 5, 16)])
def test_groups_differ_in_rows_alone(other):
    groups, k, v = tensors()
    groups[2] = torch.empty(other)
    with pytest.raises(SpecError, match=r"q_groups\[2\]: got .* as group 0, but for the rows"):
        attention_groups(groups, k, v, **PLACES)
    groups[2] = torch.empty(2, 4, 5, 16, dtype=torch.float16)
    with pytest.raises(SpecError, match=r"q_groups\[2\]: got torch\.float16"):
        attention_groups(groups, k, v, **PLACES)
    with pytest.raises(SpecError, match=r"q_groups: got torch\.float32"):
        attention_groups(groups[0], k, v, q_offsets=[0])


@pytest.mark.parametrize("fused", MODES)
def test_compiled_groups_follow_their_offsets_with_few_graphs(fused):
    groups, k, v = tensors()
    torch._dynamo.reset()
    counter = CompileCounter()

    def call(groups, k, v, offset):
        return attention_groups(groups, k, v, q_offsets=[offset + i for i in range(4)], fused=fused)

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for offset in range(2, 12):
        got, want = compiled(groups, k, v, offset), call(groups, k, v, offset)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert counter.frame_count <= 2


def test_a_loop_of_steps_adds_no_route():
    groups, k, v = tensors((1, 1, 1), keys=400)
    before = None
    for n in range(40):
        attention_groups(groups, k, v, q_offsets=[100 + n] * 3, kv_lens=[101 + n] * 3)
        before = len(polyflash.torch_ops._routes) if n == 0 else before
    assert len(polyflash.torch_ops._routes) == before
