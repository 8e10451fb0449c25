"""The native half of the thread pool: how items are claimed, run and awaited, and how workers park.

One function, `participate(block)`, plays these roles, named by the first word of its argument block:

    SERIAL      run every item here                   block: a caller's words
    CALLER      publish a job, work on it, await it   block: a caller's words
    WORKER      serve jobs for ever                   block: this worker's words in the control memory
    TEAM        CALLER, or lend the items to torch's OpenMP team while that spins
    MEMBER      what each thread of that team runs    block: of TEAM, in memory that outlives the call
    ROLL_CALL   have the threads of that team write down their ids, once
    ANSWER      what each thread of that team runs then

All shared state is 64-bit words of the control memory (layout: `pool.py`), which is never freed. The claim
word of a job slot holds its generation (high half) and its unclaimed items (low half). What a worker reads
of a job counts only after a compare-and-swap has lowered that very word, so a late worker can neither take
an item of a newer job nor see the arguments of a finished one. Nobody waits for a thread: callers wait for
items.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils

from polyflash.backends.cpu import pool
from polyflash.backends.cpu.compilers import INLINED, KERNEL
from polyflash.backends.cpu.intrinsics import call_native, emits
from polyflash.backends.cpu.simd import Value

WORKER_SPIN_NS = 50_000  # more takes time from a busy neighbour; less parks between back-to-back calls
CALLER_SPIN_NS = 50_000
CALLER_YIELD_NS = 1_000_000
NAP_NS = 50_000
ITEM_BITS = 32
ITEM_MASK = (1 << ITEM_BITS) - 1

_MACHINE = {"amd64": "x86_64", "aarch64": "arm64"}.get(platform.machine().lower(), platform.machine().lower())
_MXCSR_CONTROL = 0xFFC0  # rounding, denormals, exception masks; without the sticky flags
_I64, _I32 = ir.IntType(64), ir.IntType(32)
_ADDRESS = _I64.as_pointer()
device: Any = njit(**INLINED)


def _at(builder: ir.IRBuilder, address: Value) -> Value:
    return builder.inttoptr(address, _ADDRESS)


def _call(builder: ir.IRBuilder, address: Value, args: Sequence[Value], returns: ir.Type = _I32) -> Value:
    """A call through an address, so that the object names no function for a linker to find."""
    kind = ir.FunctionType(returns, [a.type for a in args])
    return builder.call(builder.inttoptr(address, kind.as_pointer()), args)


def _named(builder: ir.IRBuilder, name: str, returns: ir.Type, args: Sequence[Value] = ()) -> Value:
    kind = ir.FunctionType(returns, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _words(builder: ir.IRBuilder, count: int) -> list[Value]:
    """Addresses of adjacent words on the stack; in the entry block, so that a loop does not grow it."""
    base = cgutils.alloca_once(builder, ir.ArrayType(_I64, count))
    start = builder.bitcast(base, _ADDRESS)
    return [start, *(builder.gep(start, [_I32(i)]) for i in range(1, count))]


@emits(types.int64)
def peek(builder: ir.IRBuilder, address: Value) -> Value:
    """The word at `address`, in no order with other memory."""
    return builder.load_atomic(_at(builder, address), "monotonic", 8)


@emits(types.int64)
def load(builder: ir.IRBuilder, address: Value) -> Value:
    """The word at `address`, in one order with every other `load`, `store`, `add` and `swap`."""
    return builder.load_atomic(_at(builder, address), "seq_cst", 8)


@emits(types.void)
def poke(builder: ir.IRBuilder, address: Value, value: Value) -> None:
    """Writes a word, in no order with other memory."""
    builder.store_atomic(value, _at(builder, address), "monotonic", 8)


@emits(types.void)
def store(builder: ir.IRBuilder, address: Value, value: Value) -> None:
    """Writes a word after everything before it: who loads it sees all that."""
    builder.store_atomic(value, _at(builder, address), "seq_cst", 8)


@emits(types.int64)
def add(builder: ir.IRBuilder, address: Value, value: Value) -> Value:
    """Adds to a word; returns what it held."""
    return builder.atomic_rmw("add", _at(builder, address), value, "seq_cst")


@emits(types.boolean)
def swap(builder: ir.IRBuilder, address: Value, expected: Value, value: Value) -> Value:
    """Writes `value` if the word still is `expected`; whether it did."""
    exchanged = builder.cmpxchg(_at(builder, address), expected, value, "seq_cst", "seq_cst")
    return builder.extract_value(exchanged, 1)


# `int function(void)`, `int function(void *)`, `int function(void *, void *)`
call0, call1, call2 = (call_native(n, types.int32) for n in range(3))
call_kernel = call_native(3)  # `void kernel(int64 arguments, int64 item, int64 scratch)`


@emits(types.int32)
def call3(builder: ir.IRBuilder, function: Value, first: Value, second: Value, third: Value) -> Value:
    """`int function(int, size_t, void *)`"""
    return _call(builder, function, [builder.trunc(first, _I32), second, third])


@emits(types.int64)
def count_cores(builder: ir.IRBuilder, getaffinity: Value) -> Value:
    """Cores this thread may run on now; more than anybody has if the system does not say."""
    words = _words(builder, pool.CPU_BYTES // 8)
    failed = _call(builder, getaffinity, [_I32(0), _I64(pool.CPU_BYTES), words[0]])
    total = _I64(0)
    for word in words:
        total = builder.add(total, _named(builder, "llvm.ctpop.i64", _I64, [builder.load(word)]))
    return builder.select(builder.icmp_signed("==", failed, _I32(0)), total, _I64(1 << 20))


@emits(types.void)
def call_parallel(
    builder: ir.IRBuilder, parallel: Value, function: Value, data: Value, threads: Value
) -> None:
    """`void GOMP_parallel(void (*function)(void *), void *data, unsigned threads, unsigned flags)`"""
    _call(builder, parallel, [function, data, builder.trunc(threads, _I32), _I32(0)], ir.VoidType())


@emits(types.int64)
def now(builder: ir.IRBuilder, clock: Value, clock_id: Value) -> Value:
    """Nanoseconds, by clock_gettime."""
    seconds, rest = _words(builder, 2)
    builder.store(_I64(0), seconds)
    builder.store(_I64(0), rest)  # what an unknown clock says
    _call(builder, clock, [builder.trunc(clock_id, _I32), seconds])
    return builder.add(builder.mul(builder.load(seconds), _I64(1_000_000_000)), builder.load(rest))


@emits(types.int32)
def nap(builder: ir.IRBuilder, sleep: Value, nanoseconds: Value) -> Value:
    """Sleeps less than a second, by nanosleep."""
    seconds, rest = _words(builder, 2)
    builder.store(_I64(0), seconds)
    builder.store(nanoseconds, rest)
    return _call(builder, sleep, [seconds, _I64(0)])


@emits(types.void)
def pause(builder: ir.IRBuilder) -> None:
    """Tells the core that this is a waiting loop."""
    if _MACHINE == "x86_64":
        _named(builder, "llvm.x86.sse2.pause", ir.VoidType())
    elif _MACHINE == "arm64":
        _named(builder, "llvm.aarch64.hint", ir.VoidType(), [_I32(1)])


@emits(types.int64)
def float_mode(builder: ir.IRBuilder) -> Value:
    """How this thread rounds and treats denormals."""
    if _MACHINE == "x86_64":
        (place,) = _words(builder, 1)
        word = builder.bitcast(place, _I32.as_pointer())
        _named(builder, "llvm.x86.sse.stmxcsr", ir.VoidType(), [word])
        return builder.zext(builder.and_(builder.load(word), _I32(_MXCSR_CONTROL)), _I64)
    return _named(builder, "llvm.aarch64.get.fpcr", _I64) if _MACHINE == "arm64" else _I64(0)


@emits(types.void)
def set_float_mode(builder: ir.IRBuilder, mode: Value) -> None:
    """Makes this thread round and treat denormals as the thread that read `mode`: same bits on any thread."""
    if _MACHINE == "x86_64":
        (place,) = _words(builder, 1)
        word = builder.bitcast(place, _I32.as_pointer())
        builder.store(builder.trunc(mode, _I32), word)
        _named(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), [word])
    elif _MACHINE == "arm64":
        _named(builder, "llvm.aarch64.set.fpcr", ir.VoidType(), [mode])


@device
def clock(control: int) -> int:
    return now(peek(control + pool.CLOCK), peek(control + pool.CLOCK_ID))


@device
def send_elsewhere(control: int, worker: int) -> None:
    """Lets a parked worker run on this thread's cores except the present one: woken there, it would wait for
    milliseconds while its caller works. Its lock is held, so its words are ours."""
    thread, cpus = peek(worker + pool.THREAD), worker + pool.CPUS
    if peek(control + pool.GETCPU) == 0 or thread == 0:
        return
    core = types.int64(call0(peek(control + pool.GETCPU)))
    if core < 0 or core >= 8 * pool.CPU_BYTES:
        return
    if call3(peek(control + pool.GETAFFINITY), 0, pool.CPU_BYTES, cpus) != 0:
        return
    own = cpus + (core >> 6) * 8
    allowed = peek(own)
    poke(own, allowed & ~(types.int64(1) << (core & 63)))
    others = types.int64(0)
    for word in range(0, pool.CPU_BYTES, 8):
        others |= peek(cpus + word)
    if others == 0:
        poke(own, allowed)
    news = types.int64(0)
    for word in range(0, pool.CPU_BYTES, 8):
        news |= peek(cpus + word) ^ peek(worker + pool.SENT + word)
    if news == 0:  # which spares the slowest of a wake-up's calls
        return
    if call3(peek(control + pool.SETAFFINITY), thread, pool.CPU_BYTES, cpus) == 0:
        for word in range(0, pool.CPU_BYTES, 8):
            poke(worker + pool.SENT + word, peek(cpus + word))


@device
def wake(control: int, limit: int) -> None:
    """Wakes at most two parked workers numbered below `limit`; each wakes two more, if items are left.

    A worker whose lock is taken is on its way to park or back; it is tried again at the next item.
    """
    if load(control + pool.PARKED) == 0:
        return
    woken = 0
    for number in range(1, limit):
        worker = control + pool.FIRST_WORKER + number * pool.WORKER_BYTES
        if load(worker + pool.ASLEEP) == 0 or call1(peek(control + pool.TRYLOCK), worker + pool.MUTEX) != 0:
            continue
        asleep = load(worker + pool.ASLEEP)
        if asleep != 0:
            send_elsewhere(control, worker)
            store(worker + pool.ASLEEP, 0)
            add(control + pool.PARKED, -1)
        call1(peek(control + pool.UNLOCK), worker + pool.MUTEX)
        if asleep != 0:
            call1(peek(control + pool.SIGNAL), worker + pool.CONDITION)
            woken += 1
            if woken == 2:
                return


@device
def run_items(control: int, slot: int, number: int) -> int:
    """Runs items of the job in `slot` until none is unclaimed, as participant `number`; returns how many."""
    ran = 0
    while True:
        claim = load(slot + pool.CLAIM)
        left = claim & ITEM_MASK
        threads = peek(slot + pool.THREADS)
        if left == 0 or number >= threads:
            return ran
        kernel, arguments = peek(slot + pool.KERNEL), peek(slot + pool.ARGUMENTS)
        item = peek(slot + pool.ITEMS) - left
        scratch = peek(slot + pool.SCRATCH) + number * peek(slot + pool.STRIDE)
        mode = peek(slot + pool.FLOAT_MODE)
        if not swap(slot + pool.CLAIM, claim, claim - 1):
            pause()
            continue
        if left > 1:
            wake(control, threads)
        if number > 0:
            set_float_mode(mode)
        call_kernel(kernel, arguments, item, scratch)
        if number > 0:
            add(slot + pool.DONE, 1)
        ran += 1


@device
def run_serially(block: int) -> None:
    for item in range(peek(block + pool.CALLER_ITEMS)):
        call_kernel(
            peek(block + pool.CALLER_KERNEL),
            peek(block + pool.CALLER_ARGUMENTS),
            item,
            peek(block + pool.CALLER_SCRATCH),
        )


@device
def free_slot(control: int) -> int:
    """A slot that is now this caller's; 0 if there is none."""
    for index in range(pool.SLOTS):
        slot = control + pool.FIRST_SLOT + index * pool.SLOT_BYTES
        if load(slot + pool.BUSY) == 0 and swap(slot + pool.BUSY, 0, 1):
            return slot
    return 0


@device
def await_items(control: int, slot: int, count: int) -> None:
    """Returns when the workers have finished `count` items: spins, then yields, then naps."""
    start = clock(control)
    while load(slot + pool.DONE) != count:
        waited = clock(control) - start
        if waited < CALLER_SPIN_NS:
            for _ in range(8):
                pause()
        elif waited < CALLER_YIELD_NS:
            call0(peek(control + pool.YIELD))
        else:
            nap(peek(control + pool.SLEEP), NAP_NS)


@device
def useful_threads(block: int) -> int:
    """Threads of a call, but no more than cores it may run on: two on one core take turns of milliseconds."""
    control, threads = peek(block + pool.CONTROL), peek(block + pool.CALLER_THREADS)
    if peek(control + pool.CAPPED) == 0:
        return threads
    return max(1, min(threads, count_cores(peek(control + pool.GETAFFINITY))))


@device
def run_shared(block: int, threads: int) -> None:
    """Publishes a job, works on it and returns when all its items are done; alone if every slot is busy."""
    control = peek(block + pool.CONTROL)
    slot = free_slot(control) if threads > 1 else 0
    if slot == 0:
        run_serially(block)
        return
    items = peek(block + pool.CALLER_ITEMS)
    poke(slot + pool.KERNEL, peek(block + pool.CALLER_KERNEL))
    poke(slot + pool.ARGUMENTS, peek(block + pool.CALLER_ARGUMENTS))
    poke(slot + pool.ITEMS, items)
    poke(slot + pool.THREADS, threads)
    poke(slot + pool.SCRATCH, peek(block + pool.CALLER_SCRATCH))
    poke(slot + pool.STRIDE, peek(block + pool.CALLER_STRIDE))
    poke(slot + pool.FLOAT_MODE, float_mode())
    poke(slot + pool.DONE, 0)
    generation = (peek(slot + pool.CLAIM) >> ITEM_BITS) + 1
    store(slot + pool.CLAIM, (generation << ITEM_BITS) | items)
    add(control + pool.EPOCH, 1)
    ran = run_items(control, slot, 0)
    await_items(control, slot, items - ran)
    store(slot + pool.BUSY, 0)


@device
def team_spins(block: int, control: int) -> bool:
    """Are the team's threads on a core right now? Then their CPU clocks move; a dead thread has none."""
    read = peek(control + pool.CLOCK)
    for index in range(peek(block + pool.TEAM_NUM_CLOCKS)):
        clock_id = peek(peek(block + pool.TEAM_CLOCKS) + 8 * index)
        before = now(read, clock_id)
        for _ in range(8):
            pause()
        if now(read, clock_id) == before:
            return False
    return True


@device
def run_lent(block: int) -> None:
    """The job on torch's team while that spins; otherwise on our own workers, or here if none is to wake."""
    threads = useful_threads(block)
    if threads == 1 or not team_spins(block, peek(block + pool.CONTROL)):
        run_shared(block, threads if peek(block + pool.TEAM_WORD) != 0 else 1)
        return
    poke(block + pool.CALLER_THREADS, threads)
    poke(block + pool.TEAM_FLOAT_MODE, float_mode())
    start_team(block, pool.ROLE_MEMBER)


@device
def start_team(block: int, role: int) -> None:
    poke(block + pool.TEAM_NEXT, 0)
    poke(block + pool.TEAM_NUMBERS, 0)
    store(block + pool.ROLE, role)
    threads = peek(block + pool.TEAM_SIZE)  # fewer would end the others, and torch would start new ones
    call_parallel(peek(block + pool.TEAM_PARALLEL), peek(block + pool.TEAM_ENTRY), block, threads)


@device
def run_as_member(block: int) -> None:
    """Items in order, as long as there are any; the team's join is what the caller waits for."""
    number, items = add(block + pool.TEAM_NUMBERS, 1), peek(block + pool.CALLER_ITEMS)
    if number >= peek(block + pool.CALLER_THREADS):
        return
    own_mode = float_mode()
    set_float_mode(peek(block + pool.TEAM_FLOAT_MODE))
    scratch = peek(block + pool.CALLER_SCRATCH) + number * peek(block + pool.CALLER_STRIDE)
    kernel, arguments = peek(block + pool.CALLER_KERNEL), peek(block + pool.CALLER_ARGUMENTS)
    item = add(block + pool.TEAM_NEXT, 1)
    while item < items:
        call_kernel(kernel, arguments, item, scratch)
        item = add(block + pool.TEAM_NEXT, 1)
    set_float_mode(own_mode)


@device
def park(control: int, worker: int, seen: int) -> None:
    """Sleeps until woken or until a job newer than epoch `seen` is there."""
    call1(peek(control + pool.LOCK), worker + pool.MUTEX)
    store(worker + pool.ASLEEP, 1)
    add(control + pool.PARKED, 1)
    while load(worker + pool.ASLEEP) != 0 and load(control + pool.EPOCH) == seen:
        call2(peek(control + pool.WAIT), worker + pool.CONDITION, worker + pool.MUTEX)
    if load(worker + pool.ASLEEP) != 0:
        store(worker + pool.ASLEEP, 0)
        add(control + pool.PARKED, -1)
    call1(peek(control + pool.UNLOCK), worker + pool.MUTEX)


@device
def serve(worker: int) -> None:
    """The life of a worker: run what there is, spin a little, park."""
    control, number = peek(worker + pool.CONTROL), peek(worker + pool.NUMBER)
    if peek(control + pool.GETTID) != 0:
        poke(worker + pool.THREAD, call0(peek(control + pool.GETTID)))
    last_work = clock(control)
    while True:
        seen = load(control + pool.EPOCH)
        ran = 0
        for index in range(pool.SLOTS):
            ran += run_items(control, control + pool.FIRST_SLOT + index * pool.SLOT_BYTES, number)
        if ran > 0:
            last_work = clock(control)
        while load(control + pool.EPOCH) == seen:
            if clock(control) - last_work > WORKER_SPIN_NS:
                park(control, worker, seen)
                last_work = clock(
                    control
                )  # who was woken is wanted: late for this job, it is in time for the next
                break
            for _ in range(8):
                pause()
            call0(peek(control + pool.YIELD))  # the caller may need this very core


def participate(block: int) -> int:
    role = peek(block + pool.ROLE)
    if role == pool.ROLE_SERIAL:
        run_serially(block)
    elif role == pool.ROLE_CALLER:
        run_shared(block, useful_threads(block))
    elif role == pool.ROLE_TEAM:
        run_lent(block)
    elif role == pool.ROLE_MEMBER:
        run_as_member(block)
    elif role == pool.ROLE_ROLL_CALL:
        start_team(block, pool.ROLE_ANSWER)
    elif role == pool.ROLE_ANSWER:
        place = block + pool.TEAM_THREADS + 8 * add(block + pool.TEAM_NUMBERS, 1)
        poke(place, call0(peek(block + pool.TEAM_WORD)))
    else:
        serve(block)
    return 0


def again(job: int, q: int, k: int, v: int, out: int, a: int, b: int, c: int, d: int, e: int, f: int) -> int:
    """A job of pool.py's, at these addresses; 1 if torch wants another number of threads than it has."""
    if call0(peek(job + pool.AGAIN_ASK)) != peek(job + pool.AGAIN_WANTED):
        return 1
    args, zeros = peek(job + pool.CALLER_ARGUMENTS), peek(job + pool.AGAIN_ZEROS)
    places = job + pool.AGAIN_FURTHER
    poke(args + peek(places), a)
    poke(args + peek(places + 8), b)
    poke(args + peek(places + 16), c)
    poke(args + peek(places + 24), d)
    poke(args + peek(places + 32), e)
    poke(args + peek(places + 40), f)
    poke(args, q)  # after those that there are not, which go here
    poke(args + 8, k)
    poke(args + 16, v)
    poke(args + 24, out)
    for i in range(peek(job + pool.AGAIN_NUM_ZEROS)):
        poke(zeros + 8 * i, 0)
    poke(job + pool.ROLE, peek(job + pool.AGAIN_ROLE))
    poke(job + pool.CALLER_THREADS, peek(job + pool.AGAIN_THREADS))
    call1(peek(job + pool.TEAM_ENTRY), job)
    return 0


def build(key: Any) -> Any:
    """The compiled `int64 participate(int64)`, also fit to be a thread's entry, or `again`."""
    if isinstance(key, pool.AgainKey):
        return cfunc(types.int64(*[types.int64] * (5 + pool.MOST_FURTHER)), **KERNEL)(again)
    return cfunc(types.int64(types.int64), **KERNEL)(participate)
