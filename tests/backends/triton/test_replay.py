"""Replayed launches, without a GPU: a stand-in for the driver reads the parameters where they are to lie."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from polyflash.backends.gpu.views import NO_OPERANDS, Operands, Rows, View, rows_of, view_of
from polyflash.backends.triton import replay, runtime
from polyflash.results import NO_LSE
from polyflash.spec import Arguments

C_TYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float, "i1": ctypes.c_bool}
FUNCTION, STREAM = 4711, 99


class Driver:
    """Reads each parameter by its kind when a kernel is started."""

    def __init__(self, kinds: list[str]) -> None:
        self.kinds, self.seen, self.answer = kinds, [], 0
        self.stream, self.capturing = STREAM, False  # of the thread

    def __call__(self, config, function, places, extra) -> int:
        c = config._obj
        assert (function.value, c.threads_y, c.threads_z, extra) == (FUNCTION, 1, 1, None)
        assert (c.stream or 0) == self.stream
        assert not c.attributes and c.num_attributes == 0
        values = []
        for kind, place in zip([*self.kinds, "i64", "i64"], places, strict=True):
            if kind == "map":
                assert place % 64 == 0
                values.append(ctypes.string_at(place, 128))
            else:
                values.append(C_TYPES.get(kind, ctypes.c_uint64).from_address(place).value)
        self.seen.append(((c.x, c.y, c.z, c.threads, c.shared), values))
        return self.answer


def compiled(signature, **metadata):
    plain = {
        **{"num_ctas": 1, "num_warps": 4, "shared": 1024, "global_scratch_size": 0},
        **{"profile_scratch_size": 0, "launch_pdl": False, "launch_cooperative_grid": False},
    }
    source = SimpleNamespace(signature=signature)
    made = SimpleNamespace(metadata=SimpleNamespace(**{**plain, **metadata}), src=source, function=FUNCTION)
    return made


VIEW = View("*fp32", "i32", "i64", "i32", "constexpr")
SIGNATURE = {
    "q": VIEW,
    "q0": "constexpr",
    "k": VIEW,
    "v": VIEW,
    "v_view": VIEW,
    "out": VIEW,
    "lse": Rows("*fp32", "i32", "i32", "constexpr"),
    "x": Operands(*["constexpr"] * 15)._replace(kv_lens="*i32"),
    "batch": "i32",
    "scale": "fp32",
    "BLOCK": "constexpr",
}
KINDS = [
    *["*", "i32", "i64", "i32"] * 5,
    *("*", "i32", "i32", "*", "i32", "fp32"),
]


def tensors(offset=0):
    q, k, v = (torch.randn(300)[offset : offset + 256].view(1, 2, 8, 16) for _ in range(3))
    return q, k, v


def arguments_of(q, k, v, out, lse, lens):
    views = [view_of(x) for x in (q, k, v, v, out)]
    q_view, *others = views
    x = NO_OPERANDS._replace(kv_lens=lens)
    return (q_view, None, *others, rows_of(lse), x, 7, 0.25)


@pytest.fixture
def driver(monkeypatch):
    made = Driver(KINDS)
    monkeypatch.setattr(replay, "_driver", made)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: made.stream, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: made.capturing, raising=False)
    monkeypatch.setattr(replay, "_rooms", {})
    monkeypatch.setattr(runtime, "hooked", lambda: False)
    return made


def launch_of(signature=SIGNATURE, scratch=False, **metadata):
    """A row whose `run` starts one kernel, without one."""
    lens = torch.ones(4, dtype=torch.int32)

    def run(launch, q, k, v, out, lse, args):
        log = runtime._recorder.log
        place = runtime.scratch((8, 16), q.device).view(1, 1, 8, 16) if scratch else out
        if scratch:
            log.scratch[0] = place
        given = arguments_of(q, k, v, place, lse, launch.lens)
        log.started.append(runtime.Started(compiled(signature, **metadata), (3, 2, 1), given))

    return SimpleNamespace(run=run, lens=None, table=lens)


def numbers(q, k, v, out, lse):
    flat = []
    for x in (q, k, v, v, out):
        flat += [x.data_ptr(), *x.stride()[:3]]
    return [*flat, lse.data_ptr(), *lse.stride()[:2], 7, 0.25, 0, 0]


NO_LENS = {**SIGNATURE, "x": Operands(*["constexpr"] * 15)}
NO_LENS_KINDS = [*["*", "i32", "i64", "i32"] * 5, *("*", "i32", "i32", "i32", "fp32")]


def test_the_second_call_is_recorded_and_the_third_replayed_at_its_own_addresses(driver):
    driver.kinds = NO_LENS_KINDS
    repeat = replay.Repeat(launch_of(NO_LENS), Arguments(need_lse=True))
    repeat(*tensors())
    assert driver.seen == [] and repeat.replay is not None
    for _ in range(2):
        inputs = tensors()
        out, lse = repeat(*inputs)
        (shape, values) = driver.seen.pop()
        assert shape == (3, 2, 1, 128, 1024)
        assert values == numbers(*inputs, out, lse)
        assert out.shape == (1, 2, 8, 16) and lse.shape == (1, 2, 8) and lse.dtype is torch.float32
    assert repeat.args.kv_lens is None


def test_packed_members_are_replayed_at_their_own_bounds(driver):
    """Tensors in and out as their caller has them, (total, heads, head_dim)."""
    packed = {**SIGNATURE, "x": NO_LENS["x"]._replace(cu_seqlens_q="*i32", cu_seqlens_k="*i32")}
    driver.kinds = [*["*", "i32", "i64", "i32"] * 5, *("*", "i32", "i32", "*", "*", "i32", "fp32")]

    def run(launch, q, k, v, out, lse, args):
        assert q.shape == (1, 2, 8, 16) and args.cu_seqlens_q is not None
        given = list(arguments_of(q, k, v, out, lse, None))
        given[7] = NO_OPERANDS._replace(cu_seqlens_q=args.cu_seqlens_q, cu_seqlens_k=args.cu_seqlens_k)
        runtime._recorder.log.started.append(runtime.Started(compiled(packed), (3, 2, 1), tuple(given)))

    def calls():
        q, k, v = (x.view(8, 2, 16) for x in tensors())
        return q, k, v, *(torch.zeros(3, dtype=torch.int32) for _ in range(2))

    first = calls()
    args = Arguments(need_lse=True, cu_seqlens_q=first[3], cu_seqlens_k=first[4])
    repeat = replay.Repeat(SimpleNamespace(run=run), args)
    assert repeat.args.cu_seqlens_q is repeat.args.cu_seqlens_k is None
    shapes = [x.shape for x in repeat(*first)]
    for one in (False, True):
        q, k, v, cu_q, cu_k = calls()
        cu_k = cu_q if one else cu_k
        out, lse = repeat(q, k, v, cu_q, cu_k)
        assert [out.shape, lse.shape] == shapes == [(8, 2, 16), (2, 8)] and out.is_contiguous()
        values = driver.seen.pop()[1]
        at = [values[4 * i] for i in range(5)]
        assert at == [x.data_ptr() for x in (q, k, v, v, out)]
        assert [values[20], values[23], values[24]] == [x.data_ptr() for x in (lse, cu_q, cu_k)]


@pytest.mark.parametrize("paged", [False, True])
def test_codes_are_replayed_with_tables_of_their_own(driver, paged):
    """Each call reads its own scales and shifts; what K or V has none of stays absent."""
    signature = {**dict.fromkeys(("q", "k", "v", "k_scale", "k_shift"), VIEW), "v_scale": VIEW}
    signature |= {"out": VIEW, "x": Operands(*["constexpr"] * 15)}
    if paged:
        signature["x"] = signature["x"]._replace(page_table="*i32", kv_lens="*i32")
    driver.kinds = ["*", "i32", "i64", "i32"] * 7 + ["*", "*"] * paged
    asked = []

    def run(launch, q, k, v, out, lse, args):
        asked.append((k.shape, args.v_shift))
        tables = args.k_scale, args.k_shift, args.v_scale
        x = NO_OPERANDS._replace(page_table=args.page_table, kv_lens=args.kv_lens)
        given = (*map(view_of, (q, k, v, *tables, out)), x)
        runtime._recorder.log.started.append(runtime.Started(compiled(signature), (3, 2, 1), given))

    def call():
        q, k, v = tensors()
        q = q[:, :, 0].contiguous() if paged else q
        more = [torch.zeros(1, 4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)] * paged
        return q, k, v[..., :8].contiguous(), *more, *(torch.randn(1, 2, 8, 4) for _ in range(3))

    q, k, v, *rest = call()
    codes = "int4/1x0+1x0,int4/1x0"
    args = Arguments(codes=codes, **dict(zip(("k_scale", "k_shift", "v_scale"), rest[-3:], strict=True)))
    if paged:
        args = args._replace(page_table=rest[0], kv_lens=rest[1])
    repeat = replay.Repeat(SimpleNamespace(run=run, spec=SimpleNamespace(head_dim_v=16)), args)
    assert repeat.args.k_scale is repeat.args.v_scale is repeat.args.page_table is None
    repeat(q, k, v, *rest)
    assert asked == [(k.shape, None)]
    for _ in range(2):
        given = call()
        out, _ = repeat(*given)
        assert out.shape == given[0].shape
        values = driver.seen.pop()[1]
        at = [values[4 * i] for i in range(7)] + (values[28:30] if paged else [])
        q, k, v, *rest = given
        assert at == [x.data_ptr() for x in (q, k, v, *rest[-3:], out, *rest[-4::-1])]
    odd = torch.randn(300)[1:65].view(1, 2, 8, 4)
    assert repeat(*given[:-1], odd) is None and len(asked) == 1


@pytest.fixture
def place_of(driver):
    """Where a call with scratch has it written."""
    driver.kinds = NO_LENS_KINDS
    repeat = replay.Repeat(launch_of(NO_LENS, scratch=True), Arguments(need_lse=True))
    repeat(*tensors())

    def place(stream=STREAM, capturing=False):
        driver.stream, driver.capturing = stream, capturing
        out, lse = repeat(*tensors())
        found = driver.seen.pop()[1][16]
        assert found not in (0, out.data_ptr(), lse.data_ptr()) and found % 16 == 0
        return found

    return place


def test_scratch_is_the_streams_and_of_a_graph_its_own(place_of, monkeypatch):
    """Calls of one stream follow one another; a graph may be replayed beside any of them."""
    one = place_of()
    (room,) = replay._rooms.values()
    assert one == place_of() == room.data_ptr() and len(room) >= 4 * 8 * 16
    assert one != place_of(capturing=True)
    assert one not in (place_of(stream=5), place_of(stream=6)) and one == place_of()
    assert {stream for _, stream in replay._rooms} == {STREAM, 5, 6}
    assert place_of(stream=0, capturing=True) == place_of(stream=0), "the default stream is none of a graph"
    monkeypatch.setattr(replay, "_MOST_ROOM", 4)
    replay._rooms.clear()
    assert place_of() != one and not replay._rooms, "what is large is not kept"


def test_launches_of_a_call_share_its_addresses(driver):
    """The second reads what the first wrote, on whichever stream the call is."""
    driver.kinds = NO_LENS_KINDS

    def run(launch, q, k, v, out, lse, args):
        between = runtime.scratch(q.shape, q.device), runtime.scratch(lse.shape, q.device)
        for given in ((q, k, v, *between), (between[0], k, v, out, lse)):
            started = runtime.Started(compiled(NO_LENS), (3, 2, 1), arguments_of(*given, None))
            runtime._recorder.log.started.append(started)

    repeat = replay.Repeat(SimpleNamespace(run=run), Arguments(need_lse=True))
    repeat(*tensors())
    for driver.stream in (STREAM, 5, STREAM):
        q, k, v = tensors()
        out, lse = repeat(q, k, v)
        room = replay._rooms[None, driver.stream][: 4 * (256 + 16)].view(torch.float32)
        parts, part_lse = room[:256].view(q.shape), room[256:].view(lse.shape)
        assert [values for _, values in driver.seen] == [
            numbers(q, k, v, parts, part_lse), numbers(parts, k, v, out, lse)
        ]  # fmt: skip
        driver.seen.clear()


def test_rooms_grow_and_few_are_kept(place_of):
    place_of()
    ((key, room),) = replay._rooms.items()
    replay._rooms[key] = room[:16]
    place_of()
    assert len(replay._rooms[key]) >= 4 * 8 * 16
    for stream in range(100):
        place_of(stream=stream)
    assert len(replay._rooms) <= replay._KEPT_ROOMS


def test_what_another_call_cannot_take_over_is_not_replayed(driver):
    """An operand that the launch copied, scratch of the compiler's, clusters, early launches."""
    row = launch_of()
    row.lens = torch.ones(4, dtype=torch.int32)
    copied = replay.Repeat(row, Arguments(need_lse=True))
    assert copied(*tensors()) is not None and copied(*tensors()) is None
    for other in ({"num_ctas": 2}, {"global_scratch_size": 8}, {"launch_pdl": True}):
        repeat = replay.Repeat(launch_of(NO_LENS, **other), Arguments(need_lse=True))
        assert repeat(*tensors()) is not None and repeat(*tensors()) is None, other
    assert driver.seen == []


def test_calls_that_the_kernel_was_not_compiled_for_take_the_whole_way(driver, monkeypatch):
    driver.kinds = NO_LENS_KINDS
    repeat = replay.Repeat(launch_of(NO_LENS), Arguments(need_lse=True))
    repeat(*tensors())
    assert repeat(*tensors(offset=1)) is None, "not at 16 bytes"
    assert repeat(*tensors()) is not None
    driver.answer = 201
    assert repeat(*tensors()) is None, "the driver refused"
    driver.answer = 0
    monkeypatch.setattr(runtime, "hooked", lambda: True)
    assert repeat(*tensors()) is None, "somebody watches launches"
    monkeypatch.setattr(runtime, "hooked", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    assert repeat(*tensors()) is None, "another device is current"


def test_calls_at_odd_addresses_are_not_what_is_recorded(driver):
    """They take the whole way, and those after them are recorded and replayed all the same."""
    driver.kinds = NO_LENS_KINDS
    repeat = replay.Repeat(launch_of(NO_LENS), Arguments(need_lse=True))
    for offset in (1, 2, 0):
        assert repeat(*tensors(offset)) is not None and repeat.recorded is (offset == 0)
    assert driver.seen == [] and repeat(*tensors(1)) is None
    assert repeat(*tensors()) is not None and len(driver.seen) == 1


def test_gradients_at_odd_addresses_are_not_what_is_recorded(gradients):
    for offset, whole in ((0, 1), (1, 2), (2, 3), (0, 4), (0, 4), (1, 5), (0, 5)):
        gradients(*tensors(offset)[:2], 0.5)
        assert gradients.whole == whole
    assert len(gradients.driver.seen) == 2


def test_tensor_maps_are_those_of_the_calls_addresses(driver, monkeypatch):
    from triton.tools.tensor_descriptor import TensorDescriptor

    made = []

    def encoded(address, *how):
        made.append((address, how))
        return address.to_bytes(8, "little") * 16

    monkeypatch.setattr(replay, "_encoded", encoded)
    kinds = {"q": "*fp32", "k": "tensordesc<fp32[1, 1, 8, 16]>", "out": "*fp32", "size": "i32"}
    driver.kinds = ["*", "map", *["i32"] * 4, *["i64"] * 4, "*", "i32"]
    meta = {"swizzle": 3, "elem_size": 4, "elem_type": 7, "block_size": [1, 1, 8, 16], "fp4_padded": False}

    def run(launch, q, k, v, out, lse, args):
        described = TensorDescriptor(k, list(k.shape), list(k.stride()), [1, 1, 8, 16])
        code = compiled(kinds, tensordesc_meta=[meta])
        runtime._recorder.log.started.append(runtime.Started(code, (1, 1, 1), (q, described, out, 5)))

    repeat = replay.Repeat(SimpleNamespace(run=run), Arguments())
    first = tensors()
    repeat(*first)
    others, (q, k, v) = tensors(), tensors()
    repeat(*others)
    for _ in range(3):
        out, lse = repeat(q, k, v)
        assert lse is NO_LSE
    _, values = driver.seen[-1]
    assert values[0] == q.data_ptr() and values[1] == k.data_ptr().to_bytes(8, "little") * 16
    assert values[2:] == [*k.shape, *k.stride(), out.data_ptr(), 5, 0, 0]
    how = 3, 4, 7, [1, 1, 8, 16], tuple(k.shape), k.stride(), 0
    addresses = [x.data_ptr() for x in (first[1], others[1], k)]
    assert made == [(address, how) for address in addresses], "each encoded once, the first when recorded"


def test_an_encoder_of_another_triton_leaves_calls_to_the_whole_way(driver, monkeypatch):
    from triton.tools.tensor_descriptor import TensorDescriptor

    def unknown(*_):
        raise replay.NotReplayable

    monkeypatch.setattr(replay, "_encoded", unknown)
    meta = {"swizzle": 3, "elem_size": 4, "elem_type": 7, "block_size": [1, 1, 8, 16], "fp4_padded": False}

    def run(launch, q, k, v, out, lse, args):
        described = TensorDescriptor(k, list(k.shape), list(k.stride()), [1, 1, 8, 16])
        code = compiled({"k": "tensordesc<fp32[1, 1, 8, 16]>", "out": "*fp32"}, tensordesc_meta=[meta])
        runtime._recorder.log.started.append(runtime.Started(code, (1, 1, 1), (described, out)))

    repeat = replay.Repeat(SimpleNamespace(run=run), Arguments())
    assert repeat(*tensors()) is not None and repeat(*tensors()) is None and driver.seen == []


BACKWARD = {"q": VIEW, "dout": VIEW, "dq": VIEW, "delta": "*fp32", "odd": "*i32"}


@pytest.fixture
def gradients(driver, monkeypatch):
    """Gradients of a row that makes dq of q and dout, with memory between; counts calls the whole way."""
    driver.kinds = [*["*", "i32", "i64", "i32"] * 3, "*", "*"]
    driver.filled = []
    monkeypatch.setattr(replay, "_is_current", lambda device: True)
    monkeypatch.setattr(replay, "_fill", lambda *filled: driver.filled.append(filled) and 0)
    known = replay.Calls()

    def call(q, dout, *args):
        def make():
            call.whole += 1
            dq = torch.empty_like(q)
            delta = runtime.scratch((300,), q.device)[:256].view(2, 128)
            odd = runtime.scratch((2,), q.device, torch.int32, zero=True)
            if runtime._recorder.log is not None:
                given = view_of(q), view_of(dout), view_of(dq), delta, odd
                runtime._recorder.log.started.append(runtime.Started(compiled(BACKWARD), (3, 2, 1), given))
            return dq, None

        return known((q, dout, None), args, make, (True,))

    call.whole, call.driver = 0, driver
    return call


def test_gradients_are_replayed_from_the_third_call_on(gradients):
    """At their own addresses, with memory that is 0 where it was."""
    for whole in (1, 2, 2, 2):
        q, dout, _ = tensors()
        dq, other = gradients(q, dout, 0.5)
        assert (gradients.whole, other, dq.shape, dq.stride()) == (whole, None, q.shape, q.stride())
    (room,) = replay._rooms.values()
    assert len(gradients.driver.seen) == 2 and len(room) == 1280 + 256
    values = gradients.driver.seen[-1][1]
    assert [values[0], values[4], values[8]] == [q.data_ptr(), dout.data_ptr(), dq.data_ptr()]
    assert values[12:14] == [room.data_ptr(), room.data_ptr() + 1280]
    assert gradients.driver.filled == [(room.data_ptr() + 1280, 0, 8, STREAM)] * 2


def test_gradients_of_other_calls_are_recorded_anew(gradients):
    """Of other strides, numbers or operands, one tensor as two among them, as another call may bring two;
    what is not at 16 bytes, or what the driver refuses, takes the whole way."""
    q, dout, lens = tensors()
    for _ in range(3):
        gradients(q, dout, 0.5)
    calls = (q, dout, 0.25), (q, dout, lens), (q.mT.contiguous().mT, dout, 0.5)
    for n, other in enumerate(calls, 3):
        gradients(*other)
        assert gradients.whole == n, other
    before = gradients.whole
    for kind in (0.5, 0.125):
        for _ in range(4):
            gradients(q, q, kind)
    assert gradients.whole == before + 4
    gradients(q, dout, 0.125)
    assert gradients.whole == before + 5, "two where another call had one"
    gradients(tensors(offset=1)[0], dout, 0.5)
    assert gradients.whole == before + 6
    with runtime.recorded() as log:
        gradients(q, dout, 0.5)
    assert gradients.whole == before + 7 and len(log.started) == 1, (
        "a call that is recorded as part of another"
    )
    gradients.driver.answer = 201
    gradients(q, dout, 0.5)
    assert gradients.whole == before + 8


def test_gradients_of_a_call_like_one_of_the_last_need_no_key(driver, monkeypatch):
    """All of q, k, v, out, lse, dout and dlse at addresses of their own; what differs is made as others."""
    driver.kinds = [*["*", "i32", "i64", "i32"] * 8, *("*", "i32", "i32") * 2]
    names = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
    kinds = {**dict.fromkeys(names, VIEW), **dict.fromkeys(("lse", "dlse"), SIGNATURE["lse"])}
    monkeypatch.setattr(replay, "_is_current", lambda device: True)
    calls, args, wanted = replay.Calls(), Arguments(need_lse=True), (True, True, True, False, False)

    def fresh(offset=0):
        out, dout, _ = tensors(offset)
        lse, dlse = torch.randn(1, 2, 8), torch.randn(1, 2, 8)
        return *tensors(), out, dout, lse, dlse

    def call(given, args=args, needs=wanted):
        def make():
            made = tuple(torch.empty_like(x) for x in given[:3])
            if runtime._recorder.log is not None:
                views = map(view_of, (*given[:5], *made))
                arguments = *views, rows_of(given[5]), rows_of(given[6])
                runtime._recorder.log.started.append(runtime.Started(compiled(kinds), (3, 2, 1), arguments))
            return made

        return calls(given, args, make, needs)

    @torch.no_grad()
    def again(q, k, v, out, dout, lse, dlse, args=args):
        return calls.again((q, k, v, out, lse), dout, dlse, args)

    for _ in range(3):
        assert again(*fresh()) is None
        call(fresh())
    given = fresh()
    found = again(*given)
    values = driver.seen[-1][1]
    assert len(driver.seen) == 2
    assert [values[4 * i] for i in range(8)] == [x.data_ptr() for x in (*given[:5], *found)]
    assert [values[32], values[35]] == [x.data_ptr() for x in given[5:]]
    assert [(x.shape, x.stride()) for x in found] == [(x.shape, x.stride()) for x in given[:3]]

    q, k, v, out, dout, lse, dlse = given
    shrunk = dout.clone()
    shrunk.untyped_storage().resize_(64)
    other = Arguments(need_lse=True)
    odd = {
        "strides": dout.mT.contiguous().mT, "dtype": dout.half(), "one tensor twice": out,
        "negated": torch._neg_view(dout), "storage": shrunk, "address": fresh(offset=1)[4],
    }  # fmt: skip
    for why, x in odd.items():
        assert again(q, k, v, out, x, lse, dlse) is None, why
    assert again(q, k, v, out, dout, lse, None) is again(*given, args=other) is None
    assert calls.again((q, k, v, out, lse), dout, dlse, args) is None, "second derivatives are refused"
    with torch.autograd.profiler.profile():
        assert again(*given) is None, "a profiler sees calls"
    monkeypatch.setattr(runtime, "hooked", lambda: True)
    assert again(*given) is None
    monkeypatch.setattr(runtime, "hooked", lambda: False)
    assert again(*given) is not None and len(driver.seen) == 3
    driver.answer = 201
    assert again(*given) is None


def test_what_makes_nothing_is_replayed_once(driver, monkeypatch):
    """A forward call writes to what it is given."""
    driver.kinds = ["*", "i32", "i64", "i32"] * 2
    monkeypatch.setattr(replay, "_is_current", lambda device: True)
    calls, args, whole = replay.Calls(), Arguments(), []
    for _ in range(4):
        q, _, out = tensors()

        def make(q=q, out=out):
            whole.append(q)
            if runtime._recorder.log is not None:
                code = compiled({"q": VIEW, "out": VIEW})
                runtime._recorder.log.started.append(
                    runtime.Started(code, (3, 2, 1), (view_of(q), view_of(out)))
                )
            return ()

        assert calls((q, q, None, None, None, out, None), args, make) == ()
    assert len(whole) == 2 and len(driver.seen) == 2 and not calls.seen


def test_gradients_of_which_not_all_are_wanted_have_keys(driver, monkeypatch):
    monkeypatch.setattr(replay, "_is_current", lambda device: True)
    calls, args = replay.Calls(), Arguments(need_lse=True)
    driver.kinds = [*["*", "i32", "i64", "i32"] * 3, *("*", "*")]
    given = *tensors(), *tensors()[:2], torch.randn(1, 2, 8), None

    def make():
        delta, odd = runtime.scratch((256,), given[0].device), runtime.scratch((2,), given[0].device)
        views = *map(view_of, given[:3]), delta, odd
        if runtime._recorder.log is not None:
            runtime._recorder.log.started.append(runtime.Started(compiled(BACKWARD), (3, 2, 1), views))
        return torch.empty_like(given[0]), None, None

    for _ in range(4):
        calls(given, args, make, (True, False, False, False, False))
    assert len(driver.seen) == 2 and not calls.seen


def test_gradients_have_the_strides_that_were_recorded():
    """Packed members are a batch of one, and a view's stride of it says nothing."""
    packed = torch.empty(24, 4, 16).transpose(0, 1).unsqueeze(0)
    made = torch.empty(1, 24, 4, 16).transpose(1, 2)
    assert packed.stride() != made.stride()
    found = replay.Found(SimpleNamespace(start=lambda addresses, device: True), (made, None))
    again, none = found((packed,), packed.device)
    assert (again.stride(), none) == (made.stride(), None)
