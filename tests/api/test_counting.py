"""What ran is counted: every launch of a row, every call that goes to torch with the reason, in every thread,
and what runs within a `watch` alone."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from torch.nn import functional as F

import polyflash
from polyflash import attention, counters, counting, repeats, torch_ops, watch
from polyflash.integrations import sdpa
from tests import device
from tests.rows_here import needs_cpu_engine

DOUBLE = "dtype: has bfloat16, float16, float32, asked for float64"


def qkv(rows: int = 40, keys: int = 300, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    sizes = (2, 4, rows, 32), (2, 2, keys, 32), (2, 2, keys, 32)
    return tuple(torch.randn(size).to(dtype) for size in sizes)


def seen(call) -> dict:
    with watch(quiet=True) as w:
        call()
    return w.counters()


@pytest.fixture(autouse=True)
def from_zero():
    counters(reset=True)
    yield


class TestRows:
    @needs_cpu_engine
    def test_phases(self):
        q, k, v = (torch.randn(1, 2, 140, 16) for _ in range(3))

        def every_phase():
            attention(q, k, v, causal=True)
            attention(q[:, :, :1], k, v)
            leaf = q.clone().requires_grad_()
            out, lse = attention(leaf, k, v, return_lse=True)
            out.sum().backward()
            polyflash.column_sums(q, k, lse.detach())
            polyflash.row_stats(q, k, lse.detach())

        wanted = {"cpu/forward": 2, "cpu/decode": 1, "cpu/backward": 1, "cpu/statistics": 2}
        assert seen(every_phase)["calls"] == wanted
        assert counters()["calls"] == wanted and counters()["left_to_torch"] == {}

    @needs_cpu_engine
    def test_known_calls_are_counted_too(self):
        q, k, v = qkv(rows=1)
        for n in range(200, 260):
            attention(q, k[:, :, :n], v[:, :, :n])
        assert any(repeats._known.values()), "no call took the quick way"
        assert counters()["calls"] == {"cpu/decode": 60}

    def test_an_evicted_route_loses_no_count(self):
        q, k, v = qkv(rows=3)
        for _ in range(3):
            attention(q, k, v)
            torch_ops._routes.clear()
            repeats._known.clear()
        assert sum(counters()["calls"].values()) == 3

    def test_groups_compiled_and_vmapped_calls(self):
        q, k, v = qkv()
        options = {"q_offsets": [0, 5], "fused": False}
        found = seen(lambda: polyflash.attention_groups([q, q], k, v, **options))
        assert sum(found["calls"].values()) == 2
        function = torch.compile(lambda q: attention(q, k, v), fullgraph=True, backend="aot_eager")
        assert [sum(seen(lambda: function(q))["calls"].values()) for _ in range(3)] == [1, 1, 1]

    def test_empty_and_refused_calls_are_none(self):
        q, k, v = qkv()
        attention(q[:, :, :0], k, v)
        with pytest.raises(polyflash.SpecError):
            attention(q, k, v, window=(-1, 0))
        assert counters() == {"calls": {}, "left_to_torch": {}, "compiled": {}}

    def test_what_torch_is_given_is_kept(self):
        """torch 2.11 takes no reference to it: a watch there met freed memory."""
        with polyflash.watch(quiet=True):
            mine = counting._watching()
            assert any(mine is kept is twice for kept, twice in counting._kept)
        assert counting._watching() is mine and not mine

    def test_reset_begins_anew_and_leaves_watches_alone(self):
        q, k, v = qkv()
        with watch(quiet=True) as w:
            attention(q, k, v)
            first = counters(reset=True)
            assert counters()["calls"] == {} and sum(first["calls"].values()) == 1
            attention(q, k, v)
        assert sum(counters()["calls"].values()) == 1 and sum(w.counters()["calls"].values()) == 2


class TestReasons:
    @needs_cpu_engine
    def test_the_torch_row_says_why(self):
        attention(*qkv(dtype=torch.float64))
        attention(*qkv(), backend="torch")
        found = counters()
        assert found["calls"] == {"torch/forward": 2}
        assert found["left_to_torch"] == {
            "polyflash": {f"cpu/forward: {DOUBLE}": 1, "asked for by name": 1},
        }
        assert json.loads(json.dumps(found)) == found

    def test_reasons_are_bounded(self, monkeypatch):
        from polyflash import counting

        monkeypatch.setattr(counting, "_MOST_TALLIES", len(counting._tallies) + 2)
        for n in range(5):
            counting.leave("sdpa", f"size {n}")
        assert counters()["left_to_torch"] == {"sdpa": {"other reasons": 3, "size 0": 1, "size 1": 1}}

    def test_sdpa(self):
        q, k, v = qkv(dtype=torch.float64)
        with sdpa.enabled():
            for _ in range(3):
                F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            with pytest.raises(RuntimeError):  # torch's own error: nothing ran
                F.scaled_dot_product_attention(q, k[..., :5], v)
        left = counters()["left_to_torch"]
        assert list(left) == ["sdpa"], "a call went to torch in silence"
        (reason,) = left["sdpa"].items()
        assert reason[0].startswith("dtype: ") and reason[1] == 3 and not counters()["calls"]

    def test_compiled_functions_count_what_they_leave_once(self):
        q, k, v = qkv(dtype=torch.float64)
        call = torch.compile(
            lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            fullgraph=True,
            backend="aot_eager",
        )
        with sdpa.enabled():
            call()
            call()
        (reason,) = counters()["left_to_torch"]["sdpa"].items()
        assert reason[0].endswith("(compiled: counted once)") and reason[1] == 1

    def test_multi_head_attention(self):
        layer, x = torch.nn.MultiheadAttention(32, 4), torch.randn(5, 2, 32)
        padded = torch.nn.MultiheadAttention(32, 4, add_zero_attn=True)
        with sdpa.enabled():
            layer(x, x, x)
            padded(x, x, x, need_weights=False)
            layer(x, x, x, need_weights=False)
        reasons = counters()["left_to_torch"]["multi_head_attention"]
        assert {why.partition(":")[0].split(",")[0] for why in reasons} == {"need_weights", "bias_k"}

    def test_diffusers(self):
        diffusers = pytest.importorskip("polyflash.integrations.diffusers")
        q = torch.randn(1, 5, 2, 8, dtype=torch.float64)
        diffusers._attention(q, q, q)
        assert list(counters()["left_to_torch"]) == ["diffusers"]


class TestWatch:
    def test_it_prints_a_table_on_stderr_at_its_end(self, capsys):
        with watch() as w:
            attention(*qkv(dtype=torch.float64))
            assert capsys.readouterr() == ("", "")
        said = capsys.readouterr()
        assert said.out == "" and said.err == f"{w}\n"
        assert "torch/forward" in said.err and "left to torch by polyflash:" in said.err
        with watch() as w:
            pass
        assert "no call" in capsys.readouterr().err

    def test_it_nests_and_ends(self):
        q, k, v = qkv()
        with watch(quiet=True) as outer:
            attention(q, k, v)
            with watch(quiet=True) as inner:
                attention(q, k, v)
            attention(q, k, v)
        attention(q, k, v)
        with pytest.raises(ZeroDivisionError), watch(quiet=True) as broken:
            attention(q, k, v)
            raise ZeroDivisionError
        assert [sum(w.counters()["calls"].values()) for w in (outer, inner, broken)] == [3, 1, 1]

    def test_a_reason_is_seen_too(self):
        q, k, v = qkv(dtype=torch.float64)
        with sdpa.enabled(), watch(quiet=True) as w:
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        assert sum(w.counters()["left_to_torch"]["sdpa"].values()) == 1

    def test_other_threads_are_not_seen(self):
        q, k, v = qkv()
        with watch(quiet=True) as here:
            there = []

            def work():
                with watch(quiet=True) as w:
                    attention(q, k, v)
                there.append(w)

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            attention(q, k, v)
            attention(q, k, v)
        assert [sum(w.counters()["calls"].values()) for w in (here, *there)] == [2, 1]
        assert sum(counters()["calls"].values()) == 3

    def test_gradients_are_seen_whichever_thread_computes_them(self):
        """On a GPU autograd has threads of its own: `pytest --device cuda`."""
        q, k, v = (x.to(device.DEVICE).requires_grad_() for x in qkv())
        with watch(quiet=True) as w:
            attention(q, k, v).sum().backward()
        phases = {row.partition("/")[2]: n for row, n in w.counters()["calls"].items()}
        assert phases == {"forward": 1, "backward": 1}


@needs_cpu_engine
def test_no_count_is_lost_between_threads():
    q, k, v = qkv(rows=1, keys=20)
    attention(q, k, v)
    counters(reset=True)
    start = threading.Barrier(8)

    def work():
        start.wait()
        with watch(quiet=True) as w:
            for _ in range(400):
                attention(q, k, v)
        assert sum(w.counters()["calls"].values()) == 400

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters()["calls"] == {"cpu/decode": 3200}
