"""Calls of the decode kernels like one before them: its argument block, with their addresses and lengths."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from polyflash.backends.cpu import decode, pool, runtime
from polyflash.backends.cpu.words import DECODE
from polyflash.quant.scheme import Block, codes_of
from polyflash.results import NO_LSE, empty_of
from polyflash.spec import Arguments
from polyflash.storages import hold, holds, near, span, stored

# Calls alike before a shorter way is made for more of them, which takes as long as some calls of few keys
# save: layers of a model whose cache has grown are not to make one for every token.
OFTEN, MANY_BYTES = 32, 1 << 24
JOB_BYTES = 1 << 21  # of the results of splits of a call over pages that is kept


class Repeat:
    """State shared by such calls. `args` has no tensor that a later call could change but pages and
    lengths."""

    reaches = ()  # that of keys grows

    def __init__(self, frame: decode.Frame, q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> None:
        forms = codes_of(args.codes) if args.codes else (None, None)
        self.frame, self.head_dim_v = frame, v.shape[3] * (forms[1].packed if forms[1] else 1)
        self.q_bytes = q.nbytes
        self.need_lse = args.need_lse
        self.short = not args.need_lse and pool.again() is not None
        self.same = False
        self.tables: list[tuple[int, Block, int]] = []  # of codes: first word, what shares an entry, channels
        for x, form, name in zip((k, v), forms, "kv", strict=True):
            for table in ("scale", "shift"):
                shared = getattr(form, table, None)
                if form is not None and shared is not None:
                    word = getattr(DECODE, f"{name}_{table}")
                    self.tables.append((word, shared, x.shape[3] * form.packed))
        self.args = args._replace(  # keeps no caller's tensor alive
            page_table=None, kv_lens=None, k_scale=None, k_shift=None, v_scale=None, v_shift=None
        )

    def outputs(self, q: Tensor, block: array[int]) -> tuple[Tensor, Tensor]:
        """Room for the results of q, and its address and those of q and lse in the block."""
        *sizes, head_dim = q.shape
        same = head_dim == self.head_dim_v
        out = torch.empty_like(q) if same else q.new_empty((*sizes, self.head_dim_v))
        lse = NO_LSE
        if self.need_lse:
            lse = q.new_empty(sizes, dtype=torch.float32)
            block[DECODE.lse] = lse.data_ptr()
        block[DECODE.q], block[DECODE.out] = q.data_ptr(), out.data_ptr()
        return out, lse


class OfKeys(Repeat):
    """q (batch, heads, seqlen_q, head_dim) over whole tensors."""

    def __init__(self, frame: decode.Frame, q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> None:
        super().__init__(frame, q, k, v, args)
        self.k_bytes, self.v_bytes = (span(x[:1, :1, :1]) for x in (k, v))  # of a key
        self.sizes: Any = None  # of K and V in the last call, and how many more were alike
        self.times = 0

    def place(self, block: array[int], q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, decode.Walks]:
        """Writes all of a call but addresses into its block. Bytes from the first element of K and of V to
        the end, and the splits."""
        size = k.element_size()
        batch, _, rows, _ = q.shape
        _, heads, seqlen_k, _ = sizes = k.shape
        (k_batch, k_head, k_row, _), (v_batch, v_head, v_row, _) = strides = k.stride(), v.stride()
        self.times = self.times + 1 if (sizes, strides) == self.sizes else 0
        self.sizes = sizes, strides
        if batch == 1:  # a stride that steps over nothing may be any number
            k_batch = v_batch = 0
        if heads == 1:
            k_head = v_head = 0
        k_reach = ((batch - 1) * k_batch + (heads - 1) * k_head + (seqlen_k - 1) * k_row) * size
        v_reach = ((batch - 1) * v_batch + (heads - 1) * v_head + (seqlen_k - 1) * v_row) * size
        self.same = self.short and self.times >= (1 if k_reach + v_reach >= MANY_BYTES else OFTEN)
        block[DECODE.seqlen_k] = seqlen_k
        block[DECODE.k_batch], block[DECODE.k_head] = k_batch * size, k_head * size
        block[DECODE.v_batch], block[DECODE.v_head] = v_batch * size, v_head * size
        first, count = decode.walk(self.args, rows, 0, seqlen_k, seqlen_k - rows, self.frame.cut.split_keys)
        return k_reach + self.k_bytes, v_reach + self.v_bytes, decode.Walks(first, count, batch * count)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *tables: Tensor) -> tuple[Tensor, Tensor] | None:
        block = self.frame.words[:]
        batch, heads, seqlen_k, _ = k.shape
        k_bytes, v_bytes, walks = self.place(block, q, k, v)
        if not (holds(q, self.q_bytes) and holds(k, k_bytes) and holds(v, v_bytes)):
            return None
        if not self.lay(block, batch, heads, seqlen_k, tables):
            return None
        out, lse = self.outputs(q, block)
        block[DECODE.k], block[DECODE.v] = at = k.data_ptr(), v.data_ptr()
        if 0 in at or not block[DECODE.q]:  # of a tensor around another one
            return None
        decode.start(self.frame, block, walks, batch * seqlen_k, [])
        return out, lse

    def lay(self, block: array[int], batch: int, heads: int, seqlen_k: int, tables: Sequence[Tensor]) -> bool:
        """Writes tables of codes into a call's block, unless one is not what it reads."""
        for (word, shared, channels), x in zip(self.tables, tables, strict=True):
            if x.shape != (batch, heads, *shared.counts(seqlen_k, channels)) or not stored(x):
                return False
            if x.shape[3] > 1 and x.stride(3) != 1:
                return False
            steps = (
                0 if n == 1 else x.element_size() * s for n, s in zip(x.shape[:3], x.stride(), strict=False)
            )
            block[word], block[word + 1], block[word + 2], block[word + 3] = x.data_ptr(), *steps
        return True

    def once(
        self, count: Callable[[], None], q: Tensor, k: Tensor, v: Tensor, *tables: Tensor
    ) -> Callable[..., Tensor | None] | None:
        """A function that runs calls of just these sizes and strides: storages and addresses are left, and to
        `count` each. None if another thread has changed a table since the call."""
        again, block = pool.again(), self.frame.words[:]
        k_bytes, v_bytes, walks = self.place(block, q, k, v)
        if not self.lay(block, len(k), k.shape[1], k.shape[2], tables):
            return None
        reaches, words = [span(x) for x in tables], [word for word, _, _ in self.tables]
        none = (0,) * (pool.MOST_FURTHER - len(tables))
        frame, most_keys, q_bytes, size = self.frame, len(k) * k.shape[2], self.q_bytes, k.element_size()
        q_size = q.element_size()
        out, _ = self.outputs(q, block)
        empty, likeness, caller = empty_of(q.device), (tuple(out.shape), out.stride(), out.dtype), pool.caller

        def run(q: Tensor, k: Tensor, v: Tensor, *tables: Tensor) -> Tensor | None:
            if (
                q.storage_offset() * q_size + q_bytes > q.untyped_storage().nbytes()
                or k.storage_offset() * size + k_bytes > k.untyped_storage().nbytes()
                or v.storage_offset() * size + v_bytes > v.untyped_storage().nbytes()
                or not hold(tables, reaches)
            ):
                return None
            count()
            job, out = caller.jobs.get(run), empty(*likeness)
            # A finalizer may call, too, and be done before the addresses of this call are written.
            while job is None or again(job[0], *[x.data_ptr() for x in (q, k, v, out, *tables)], *none):
                job = caller.jobs[run] = decode.job(frame, block, walks, most_keys, words)
            return out

        return run


class OfPages(Repeat):
    """q (batch, heads, head_dim), one token per request, over pools (num_pages, page_size, heads,
    head_dim)."""

    def __init__(self, frame: decode.Frame, q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> None:
        super().__init__(frame, q, k, v, args)
        self.k_bytes, self.v_bytes = span(k), span(v)
        self.sizes: Any = None  # of the table and lengths in the last call, and how many more were alike
        self.times = 0

    def place(self, block: array[int], table: Tensor, lens: Tensor) -> None:
        """Writes all of a table but its address into a call's block."""
        sizes = table.shape, table.stride(), lens.stride()
        self.times = self.times + 1 if sizes == self.sizes else 0
        self.sizes, self.same = sizes, self.short and self.times >= OFTEN
        block[DECODE.seqlen_k] = block[DECODE.page_size] * table.shape[1]
        row, entry = near(table).stride()
        block[DECODE.page_table_batch], block[DECODE.page_table_entry] = 4 * row, 4 * entry
        block[DECODE.kv_lens_stride] = 4

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor, *tables: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        frame = self.frame
        if not (
            holds(q, self.q_bytes)
            and holds(k, self.k_bytes)
            and holds(v, self.v_bytes)
            and stored(table, lens, *tables)
        ):
            return None
        block = frame.words[:]
        for (word, _, _), x in zip(self.tables, tables, strict=True):  # whose strides are known
            block[word] = x.data_ptr()
        block[DECODE.k], block[DECODE.v] = k.data_ptr(), v.data_ptr()
        self.place(block, table, lens)
        live = array("i", lens.tolist())  # read once: another thread may write the caller's
        block[DECODE.page_table], block[DECODE.kv_lens] = table.data_ptr(), live.buffer_info()[0]
        at = q.data_ptr(), block[DECODE.k], block[DECODE.v], block[DECODE.page_table]  # 0: as above
        if not (all(at) and _names_pages()(block.buffer_info()[0], len(q))):
            return None
        out, lse = self.outputs(q, block)
        most_keys = block[DECODE.num_pages] * block[DECODE.page_size]
        decode.start(frame, block, self.walks(live), most_keys, [])
        return out, lse

    def once(
        self, count: Callable[[], None], q: Tensor, k: Tensor, v: Tensor, *rest: Tensor
    ) -> Callable[..., Tensor | None]:
        """A function that runs calls of just these sizes and strides, or gives None for what is to be refused
        elsewhere. `rest`: the table, lengths, and tables of codes. Requests that differ in their splits, and
        many splits, whose results take much memory, are no job that is kept."""
        again, names_pages, frame = pool.again(), _names_pages(), self.frame
        block, cut = frame.words[:], frame.cut
        self.place(block, *rest[:2])
        reaches = [span(x) for x in (q, k, v, *rest)]
        words = [DECODE.page_table, DECODE.kv_lens, *(word for word, _, _ in self.tables)]
        none = (0,) * (pool.MOST_FURTHER - len(words))
        most_splits = JOB_BYTES // (frame.num_kv_heads * cut.chunks * cut.partial_bytes)
        most_keys, requests = block[DECODE.num_pages] * block[DECODE.page_size], len(q)
        out, _ = self.outputs(q, block)
        empty, likeness, caller = empty_of(q.device), (tuple(out.shape), out.stride(), out.dtype), pool.caller

        def run(
            q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor, *tables: Tensor
        ) -> Tensor | None:
            if not hold((q, k, v, table, lens, *tables), reaches):
                return None
            live = array("i", lens.tolist())
            further = table.data_ptr(), live.buffer_info()[0], *[x.data_ptr() for x in tables]
            asked = block[:]
            asked[DECODE.page_table], asked[DECODE.kv_lens], *_ = further
            if not names_pages(asked.buffer_info()[0], requests):
                return None
            count()
            walks, out = self.walks(live), empty(*likeness)
            of_call = [x.data_ptr() for x in (q, k, v, out)]
            if walks.each is not None or walks.splits > most_splits:
                for word, address in zip((*range(4), *words), (*of_call, *further), strict=True):
                    asked[word] = address
                decode.start(frame, asked, walks, most_keys, [])
                return out
            job = caller.jobs.get((run, walks))
            while job is None or again(job[0], *of_call, *further, *none):
                job = caller.jobs[run, walks] = decode.job(frame, block, walks, most_keys, words)
            return out

        return run

    def walks(self, live: Sequence[int]) -> decode.Walks:
        """The walks of requests with so many keys each."""
        fewest, most = self.walk(min(live)), self.walk(max(live))
        if fewest != most:  # a walk grows with its keys
            return decode.unlike([(b, *self.walk(n)) for b, n in enumerate(live)])
        return decode.Walks(*most, len(live) * most[1])

    def walk(self, live: int) -> tuple[int, int]:
        """First split and number of splits of a request with so many keys."""
        return decode.walk(self.args, 1, 0, live, live - 1, self.frame.cut.split_keys)


@dataclass(frozen=True)
class TableKey:
    """Names the compiled check in the kernel cache."""

    name: str = "names_pages"
    builder: str = "polyflash.backends.cpu.decode_repeat"


@lru_cache(maxsize=1)
def _names_pages() -> Any:
    """(argument block, requests) -> 1 if every length is one and every live page is one of the pool."""
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(runtime.load(TableKey()))


def build(key: TableKey) -> Any:
    """Compile the check: a numba cfunc `int64(args, requests)`."""
    from numba import cfunc, types

    from polyflash.backends.cpu.compilers import KERNEL
    from polyflash.backends.cpu.intrinsics import load_i32
    from polyflash.backends.cpu.structs import Words

    @cfunc(types.int64(Words(DECODE), types.int64), error_model="numpy", **KERNEL)
    def names_pages(args, requests):
        size, step = args.page_size, args.page_table_entry
        for b in range(requests):
            live = load_i32(args.kv_lens + b * args.kv_lens_stride)
            if live < 0 or live > args.seqlen_k:
                return 0
            row, wrong = args.page_table + b * args.page_table_batch, 0
            for j in range((live + size - 1) // size):
                page = load_i32(row + j * step)
                wrong |= page < 0 or page >= args.num_pages
            if wrong != 0:
                return 0
        return 1

    return names_pages


def made(prepared: decode.Prepared, q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> Repeat | None:
    """For calls like this one; q, k, v are (batch, heads, seqlen, head_dim), pools with pages for batch."""
    if not (q.is_contiguous() and q.numel() and v.numel()):
        return None
    kept: list[Any] = []
    q, k, v, args = map(near, (q, k, v, args))
    num_q_heads, seqlen_q = q.shape[1:3]
    cut = prepared.cut(num_q_heads // v.shape[1] * seqlen_q)
    out = q.new_empty((*q.shape[:3], prepared.spec.head_dim_v))
    frame = decode.framed(cut, q, k, v, out, NO_LSE, args, kept)
    if kept or args.kv_starts is not None or args.q_offset is not None:
        return None
    return (OfKeys if args.page_table is None else OfPages)(frame, q, k, v, args)
