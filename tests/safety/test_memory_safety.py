"""Calls read no memory but their operands': storages made smaller, lengths that another thread writes while
a call runs, strides of dimensions of size 1."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import polyflash
from polyflash import SpecError, attention, attention_paged, attention_varlen, repeats, validate
from polyflash.integrations import flash_attn, flash_attn_cache
from tests.rows_here import HERE
from tests.tolerance import near, same_bits

FAR = 2**62


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def qkv(rows: int = 5, keys: int = 40, heads: int = 2) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(rows)
    sizes = {"q": (2, heads, rows, 16), "k": (2, heads, keys, 16), "v": (2, heads, keys, 16)}
    return {name: torch.randn(size, generator=g) for name, size in sizes.items()}


def dense(rows: int) -> dict[str, Any]:
    return {
        **qkv(rows), "mask": torch.ones(2, 1, rows, 40, dtype=torch.bool), "bias": torch.zeros(rows, 40),
        "alibi_slopes": torch.full((2, 2), 0.1), "sinks": torch.zeros(2), "kv_lens": ints(40, 33),
        "kv_starts": ints(0, 3), "q_offset": ints(35, 28), "out": torch.empty(2, 2, rows, 16),
    }  # fmt: skip


def packed() -> dict[str, Any]:
    given = {name: x[0].transpose(0, 1).contiguous() for name, x in qkv(12).items()}
    return {**given, "cu_seqlens_q": ints(0, 2, 12), "cu_seqlens_k": ints(0, 30, 40), "kv_lens": ints(30, 9)}


def paged(rows: int = 0) -> dict[str, Any]:
    pools = {name: torch.randn(6, 4, 2, 16) for name in ("k_pages", "v_pages")}
    table = torch.tensor(((4, 2, 0), (1, 5, 3)), dtype=torch.int32)
    given = {"q": torch.randn(rows or 2, 2, 16), **pools, "page_table": table, "kv_lens": ints(12, 7)}
    return {**given, "cu_seqlens_q": ints(0, 1, rows)} if rows else given


def sums() -> dict[str, Any]:
    given = qkv()
    return {"q": given["q"], "k": given["k"], "lse": torch.randn(2, 2, 5), "kv_lens": ints(40, 33)}


DOORS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "a few rows": (attention, lambda: dense(1)),
    "rows": (attention, lambda: dense(40)),
    "packed": (attention_varlen, packed),
    "paged": (attention_paged, paged),
    "paged rows": (attention_paged, lambda: paged(9)),
    "column_sums": (polyflash.column_sums, sums),
    "row_stats": (polyflash.row_stats, sums),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_storage_made_smaller_is_refused_by_name(door: str):
    function, make = DOORS[door]
    function(**make())
    for name in make():
        for keep in (0.0, 0.5):
            given = make()
            storage = given[name].untyped_storage()
            size = storage.nbytes()
            storage.resize_(int(keep * size))
            with pytest.raises(SpecError, match=rf"^{name}: got a storage of {storage.nbytes()} bytes"):
                function(**given)
            if name == "out":
                storage.resize_(size)
                function(**given)  # whole again


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("rows", (1, 40))
def test_a_view_is_refused_only_where_it_leaves_its_storage(backend: str, rows: int):
    q, _, v = qkv(rows).values()
    whole = torch.randn(2, 2, 64, 16)
    part = whole[:, :, 10:50]
    whole.untyped_storage().resize_(4 * ((3 * 64 + 50) * 16))  # to its last element, no further
    same_bits(attention(q, part, v, backend=backend), attention(q, part.clone(), v, backend=backend))
    whole.untyped_storage().resize_(4 * ((3 * 64 + 50) * 16) - 1)
    with pytest.raises(SpecError, match="k: got a storage"):
        attention(q, part, v, backend=backend)
    empty = whole[:, :, 60:60]
    assert not attention(q, empty, empty, backend=backend).any()


@pytest.mark.parametrize("rows", (1, 40))
@pytest.mark.parametrize("which", range(3))
def test_known_calls_look_at_storages(which: int, rows: int):
    """Of keys that are whole tensors and views; over pages all five operands, below."""
    for view in (False, True):
        given = list(qkv(rows).values())
        given[1:] = [torch.cat((x, x), 2)[:, :, :40] if view else x for x in given[1:]]
        for _ in range(40):
            attention(*given)
        for keep in (4096, 0):
            given[which].untyped_storage().resize_(min(keep, given[which].nbytes - 4))
            with pytest.raises(SpecError, match=f"{'qkv'[which]}: got a storage"):
                attention(*given)


@pytest.mark.parametrize("name", paged())
def test_known_calls_over_pages_look_at_storages(name: str):
    for _ in range(3):
        attention_paged(**paged())
    given = paged()
    given[name].untyped_storage().resize_(given[name].nbytes - 4)
    with pytest.raises(SpecError, match=f"{name}: got a storage"):
        attention_paged(**given)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("which", range(4))
def test_a_storage_freed_between_the_passes_is_refused(backend: str, which: int):
    q, k, v = (x.requires_grad_() for x in qkv().values())
    try:
        out = attention(q, k, v, backend=backend)
    except polyflash.UnsupportedError as error:
        pytest.skip(str(error))
    (q, k, v, out)[which].untyped_storage().resize_(64)
    name = ("q", "k", "v", "out")[which]
    with pytest.raises(SpecError, match=f"^{name}: got a storage of 64 bytes"):
        out.backward(torch.ones(2, 2, 5, 16))


def flipped(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, flip: Callable[[], None]) -> None:
    """`flip` runs right after the check `module.name`."""
    check = getattr(module, name)

    def then(*given: Any) -> Any:
        found = check(*given)
        flip()
        return found

    monkeypatch.setattr(module, name, then)


# What another thread may write: far too many keys, none, and bounds that fall.
FLIPS = {
    "kv_lens": ints(2**31 - 1, 2**31 - 1), "kv_starts": ints(-(2**31), -9), "q_offset": ints(2**31 - 1, -9),
    "cu_seqlens_q": ints(0, 2**30, 3), "cu_seqlens_k": ints(7, 2**30, -3),
}  # fmt: skip


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("door", ("a few rows", "rows", "packed", "paged", "paged rows"))
def test_what_was_checked_is_what_is_read(monkeypatch, backend: str, door: str):
    function, make = DOORS[door]
    made = {name: x for name, x in make().items() if name != "out"}
    try:
        want = function(**made, backend=backend)
    except polyflash.UnsupportedError as error:
        pytest.skip(str(error))
    given = {name: x.clone() for name, x in made.items()}

    def flip() -> None:
        for name in FLIPS.keys() & given.keys():
            given[name].copy_(FLIPS[name][: given[name].shape[0]])

    flipped(monkeypatch, validate, "check_contents", flip)
    repeats._known.clear()
    same_bits(function(**given, backend=backend), want)
    with pytest.raises(SpecError):
        function(**given, backend=backend)


def test_gradients_read_what_was_checked(monkeypatch):
    gradients = []
    for flips in (False, True):
        q, k, v = (x.requires_grad_() for x in qkv().values())
        lens = torch.zeros(2, dtype=torch.int32)
        shared = lens.numpy()  # whose writes no version counter sees
        shared[:] = 40, 33
        out = attention(q, k, v, kv_lens=lens, causal=True)
        with monkeypatch.context() as patch:
            if flips:
                flipped(patch, validate, "check_contents", lambda: shared.fill(2**31 - 1))  # noqa: B023
            gradients.append(torch.autograd.grad(out.sum(), (q, k, v)))
        if flips:
            with pytest.raises(SpecError, match="kv_lens"):
                attention(q, k, v, kv_lens=lens)
    for a, b in zip(*gradients, strict=True):
        same_bits(a, b)


def test_known_calls_read_lengths_once(monkeypatch):
    pytest.importorskip("numba")
    from polyflash.backends.cpu import decode_repeat

    made = paged()
    want = attention_paged(**made)
    attention_paged(**made)
    lens, native = made["kv_lens"], decode_repeat._names_pages()
    seen = []

    def names_pages(*words: int) -> int:
        found = native(*words)
        seen.append(found)
        lens.copy_(FLIPS["kv_lens"])
        return found

    monkeypatch.setattr(decode_repeat, "_names_pages", lambda: names_pages)
    same_bits(attention_paged(**made), want)
    assert seen == [1]


@pytest.mark.parametrize("batch", (1, 2))
def test_new_keys_go_where_was_checked(monkeypatch, batch: int):
    """flash-attn's cache writes by the lengths that it looked at."""
    given = {name: x[:batch].transpose(1, 2).contiguous() for name, x in qkv(1).items()}
    caches = {"k_cache": given["k"], "v_cache": given["v"]}
    new = {"k": torch.ones(batch, 1, 2, 16), "v": torch.ones(batch, 1, 2, 16)}

    def call(lens: Tensor) -> Tensor:
        cleared = {name: x.clone() for name, x in caches.items()}
        return flash_attn.flash_attn_with_kvcache(given["q"], **cleared, **new, cache_seqlens=lens)

    lens = ints(30, 9)[:batch]
    want = call(lens.clone())
    flipped(monkeypatch, flash_attn_cache, "_check_room", lambda: lens.fill_(5))
    same_bits(call(lens), want)
    assert lens.tolist() == [5] * batch


@pytest.mark.parametrize("door", ("a few rows", "rows", "packed", "paged"))
def test_a_thread_that_writes_lengths(door: str):
    """Each call is right for some lengths that stood there, or one of the two errors; none is slow."""
    function, make = DOORS[door]
    given = {name: x for name, x in make().items() if name != "out"}
    right = {name: given[name].clone() for name in FLIPS.keys() & given.keys()}
    stop, failed = threading.Event(), []

    def write() -> None:
        while not stop.is_set():
            for values in (FLIPS, right):
                for name in right:
                    given[name].copy_(values[name][: right[name].shape[0]])
                stop.wait(1e-4)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(60):
            try:
                function(**given)
            except SpecError:
                pass
            except Exception as error:
                failed.append(error)
    finally:
        stop.set()
        writer.join()
    assert not failed, failed[0]


def far(x: Any, stride: int = FAR) -> Any:
    """The same tensor; dimensions of size 1 have another stride."""
    if not isinstance(x, Tensor):
        return x
    return x.as_strided(x.shape, [stride if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)])


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("stride", (FAR, 2**60, 2**63 - 1))
def test_strides_that_step_over_nothing_are_any_number(backend: str, stride: int):
    def equal(a: Tensor, b: Tensor, label: str) -> None:
        if backend == "cpu":
            same_bits(a, b, label)
        else:  # torch's own kernels go by strides
            near(a, b, 1e-6, label)

    g = torch.Generator().manual_seed(0)
    for sizes in ((1, 4, 1, 1, 9, 16), (1, 1, 1, 40, 1, 1), (2, 1, 1, 9, 40, 16), (1, 2, 2, 5, 5, 1)):
        batch, heads, kv_heads, rows, keys, dim = sizes
        shapes = (batch, heads, rows, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, dim)
        q, k, v = (torch.randn(shape, generator=g) for shape in shapes)
        lens = torch.full((batch,), keys, dtype=torch.int32)
        options = {
            "mask": torch.ones(1, 1, 1, keys, dtype=torch.bool), "kv_lens": lens, "sinks": q[0, :, 0, 0],
            "alibi_slopes": torch.ones(batch, heads), "bias": torch.zeros(1, 1, rows, 1),
        }  # fmt: skip
        for given in ({}, {}, options):
            want = attention(q, k, v, backend=backend, **given)
            got = attention(*map(far, (q, k, v), [stride] * 3), backend=backend,
                            **{name: far(x, stride) for name, x in given.items()})  # fmt: skip
            equal(got, want, f"{sizes} {list(given)}")
            out = far(torch.empty_like(want), stride)
            equal(attention(q, k, v, backend=backend, out=out, **given), want, f"{sizes} out")
        if backend != "triton":
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            other = [far(x.detach(), stride).requires_grad_() for x in (q, k, v)]
            for a, b in zip(*(torch.autograd.grad(attention(*x, causal=True, backend=backend).sum(), x)
                              for x in (leaves, other)), strict=True):  # fmt: skip
                equal(a, b, f"gradients, {sizes}")


@pytest.mark.parametrize("backend", HERE)
def test_far_strides_of_pages_and_packed_members(backend: str):
    g = torch.Generator().manual_seed(0)
    table, lens, bounds = torch.zeros(1, 1, dtype=torch.int32), ints(3), ints(0, 1)
    q, k, v = (torch.randn(1, n, 1, 16, generator=g) for n in (1, 4, 4))
    for _ in range(3):
        want = attention_paged(q[0], k, v, table, lens, backend=backend)
        got = attention_paged(*map(far, (q[0], k, v, table, lens)), backend=backend)
        same_bits(got, want)
    packed = attention_varlen(far(q[0]), far(k[0]), far(v[0]), bounds, ints(0, 3), backend=backend)
    same_bits(packed, attention_varlen(q[0], k[0], v[0], bounds, ints(0, 3), backend=backend))
    lse = attention(q, k.transpose(1, 2), v.transpose(1, 2), layout="bhsd", return_lse=True).lse
    for function in (polyflash.column_sums, polyflash.row_stats):
        function(far(q), far(k.transpose(1, 2)), far(lse))
