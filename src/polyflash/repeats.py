"""Fast path for repeated calls: reuse the checks, the plan and the launch of an earlier call like this one.

A step of generation makes the same few calls again and again, each behind megabytes of keys that drove
Python itself out of every cache; there a line of Python costs ten times what it costs in a loop. On a GPU the
device waits for Python. Plain calls are known: no mode, no operand but pages and lengths. Of steps over a
growing cache the length is no part of what is known, so they add nothing. A call with gradients gets its node
in the graph behind a known forward pass."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from polyflash import entry, torch_ops
from polyflash.arguments import int32_of
from polyflash.counting import Tally
from polyflash.entry import Bound
from polyflash.likeness import alike, unwatched
from polyflash.plan import Launch
from polyflash.quant import codec
from polyflash.quant.tensor import QuantizedTensor
from polyflash.routes import backend_in_use, compiling, quiet, tracing
from polyflash.spec import CODE_TABLES, DECODE_ROWS, MANY_KEYS, MOST_POSITIONS, is_decode
from polyflash.storages import span, stored

Results = tuple[Tensor, Tensor]
Key = tuple[Any, ...]


class Repeat(Protocol):
    """Runs calls like one before them; None: this one needs the whole way, or its error."""

    tally: Tally
    reaches: tuple[int, ...]  # bytes from each tensor's first element to its end; (): it looks at them itself

    def __call__(self, *tensors: Tensor) -> Results | None: ...


_KEPT = 1024
_MOST_KEYS = MOST_POSITIONS - DECODE_ROWS
_KEPT_CHECKS = 4
_BEHIND = "page_table", "kv_lens", "cu_seqlens_q", "cu_seqlens_k", *CODE_TABLES  # q, k and v in a call
_known: dict[Key, Any] = {}  # a Repeat or None, or the `seen` ones of some sizes


def key_of(q: Tensor, k: Any, v: Any, options: Key) -> Key | None:
    """The key of a call of `attention` whose other arguments are defaults but for `options`, or None if
    it is not to be known. Tensors are (batch, heads, seqlen, head_dim)."""
    kinds = quiet(q, k, v, trained=True)
    if kinds is None:
        return None
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if q.is_cuda and q.is_contiguous() and k.is_contiguous() and v.is_contiguous():
        return kinds, options, q_shape, k_shape, v_shape  # other strides of size-1 dimensions lead nowhere
    k_stride, v_stride = k.stride(), v.stride()
    if not len(q_shape) == len(k_shape) == len(v_shape) == 4:
        return None
    batch, num_kv_heads, seqlen_k, head_dim = k_shape
    batch_v, num_v_heads, seqlen_v, head_dim_v = v_shape
    if (
        q.is_cuda
        or kinds[-1] is True
        or q_shape[2] > DECODE_ROWS
        or not q.is_contiguous()
        or not is_decode(q_shape[1], num_v_heads, q_shape[2], seqlen_k, device="cpu")
    ):
        return kinds, options, q_shape, k_shape, v_shape, q.stride(), k_stride, v_stride
    if seqlen_k != seqlen_v or not 0 < seqlen_k <= _MOST_KEYS:
        return None
    sizes = q_shape, batch, num_kv_heads, head_dim, batch_v, num_v_heads, head_dim_v
    order = k_stride[1] >= k_stride[2], v_stride[1] >= v_stride[2], *k_stride[2:], *v_stride[2:]
    return kinds, options, sizes, order, seqlen_k >= MANY_KEYS


def key_of_paged(
    q: Tensor, k: Any, v: Any, table: Any, lens: Any, options: Key, slots: int = 1
) -> Key | None:
    """A key like `key_of`, for one token per request over pages: q (batch, heads, head_dim), pools
    (num_pages, page_size, heads, head_dim), or with another axis for the slots of a page."""
    kinds = quiet(q, k, v, table, lens)
    if kinds is None or q.ndim != 3 or k.ndim != 4 or table.ndim != 2:
        return None
    requests, columns = table.shape
    most = k.shape[slots] * columns
    if not (requests and 0 < most <= _MOST_KEYS):
        return None
    fixed = q.shape, k.shape, k.stride(), v.shape, v.stride(), requests, lens.shape
    if q.is_cuda:
        return kinds, options, fixed, q.stride(), columns, table.stride(), lens.stride()
    if not q.is_contiguous():
        return None
    return kinds, options, fixed, most >= MANY_KEYS


def key_of_packed(q: Tensor, k: Any, v: Any, cu_q: Any, cu_k: Any, options: Key) -> Key | None:
    """A key like `key_of`, for packed members on a GPU: q, k, v (total, heads, head_dim), bounds in int32."""
    kinds = quiet(q, k, v, cu_q, cu_k) if q.is_cuda else None
    if kinds is None or not cu_q.dtype is cu_k.dtype is torch.int32:
        return None
    tensors = q, k, v, cu_q, cu_k
    return kinds, options, *[x.shape for x in tensors], *[x.stride() for x in tensors]


def of_codes(
    q: Tensor, k: Any, v: Any, options: Key, table: Any = None, lens: Any = None
) -> tuple[Key | None, tuple[Any, ...], Repeat | None]:
    """The key of such a call of few rows whose k and v are `QuantizedTensor`s, over pages if there is a
    table, its tensors, and the call itself if it needs no key."""
    opened = _opened(k, v)
    if opened is None:
        return None, (), None
    forms, (k_codes, v_codes, *tables) = opened
    paged = () if table is None else (table, lens)
    whole = q, k_codes, v_codes, *paged, *tables
    repeat = seen((options, *forms), *whole) if q.is_cuda else None
    if repeat is not None:
        return None, whole, repeat
    if table is None:
        key = key_of(q, k.codes, v.codes, options)
    else:
        key = key_of_paged(q, k.codes, v.codes, table, lens, options, slots=2)
    if key is None or key[0][-1] is True or quiet(q, *tables) is None:
        return None, (), None
    short = k.scheme.rotation == "none" if q.is_cuda else type(key[-1]) is bool
    if not short:  # of a CPU calls of few rows alone
        return None, (), None
    sizes = tuple((x.shape, x.stride()) for x in tables) if q.is_cuda or table is not None else ()
    key = key[0], (options, *forms), sizes, key
    if k.scheme.rotation != "none" and _known.get(key) is not None:
        try:
            q = codec.one_pass("cpu").rotate(q) if stored(q) else q  # which is refused
        except NotImplementedError:  # as in `call`
            return None, (), None
    return key, (q, *whole[1:]), None


def _opened(k: Any, v: Any) -> tuple[Key, tuple[Tensor, ...]] | None:
    """The forms of quantised k and v, and their tensors, codes first; None of others, and of trained ones."""
    if not (type(k) is type(v) is QuantizedTensor and k.source is v.source is None):
        return None
    tables = [x for x in (k.scale, k.shift, v.scale, v.shift) if x is not None]
    return (k.scheme, v.scheme, k.layout, v.layout), (k.codes, v.codes, *tables)


def at_once(q: Tensor, k: Any, v: Any, options: Key, *paged: Tensor) -> Tensor | None:
    """The result of a call on a CPU whose every size and stride was that of others just before, as torch
    tells in one go. `paged`: the table and lengths of one over pages."""
    if compiling():
        return None
    given: tuple[Any, ...] = q, k, v, *paged
    if type(k) is QuantizedTensor:
        opened = _opened(k, v)
        if opened is None:
            return None
        forms, (k_codes, v_codes, *tables) = opened
        options, given = (options, *forms), (q, k_codes, v_codes, *paged, *tables)
    for check, backend, run in _known.get(options, ()):
        if check(*given) and backend == backend_in_use.get():
            return run(*given) if unwatched() else None
    return None


def seen(options: Key, q: Tensor, k: Tensor, *others: Any) -> Repeat | None:
    """Repeats a call on a GPU that needs no key: torch compares all that one asks of tensors in one go."""
    if compiling() or tracing() is not None:
        return None
    try:
        found = _known.get((options, q.shape, k.shape), ())
    except RuntimeError:  # nested tensors have no shape, and are refused in words later
        return None
    for check, kinds, repeat in found:
        if check(q, k, *others) and kinds[1] == backend_in_use.get() and unwatched():
            known: Repeat = repeat
            return None if kinds[-1] is True and not torch.is_grad_enabled() else known
    return None


def call(key: Key | None, *tensors: Any, repeat: Repeat | None = None) -> Results | None:
    """The results of a call whose like is known, by its key or as the one that was `seen`."""
    if repeat is None:
        repeat = None if key is None else _known.get(key)
        if repeat is None:
            return None
    try:
        for x, size in zip(tensors, repeat.reaches, strict=False):  # as `hold`, and not a call more
            first = x.storage_offset()
            if (first and first * x.itemsize) + size > x.untyped_storage().nbytes():
                return None
        results = repeat(*tensors)
    except NotImplementedError:  # tensors without storage, as a transform that looks like none has them
        return None
    if results is not None:
        repeat.tally.count()
        if key is not None and getattr(repeat, "same", False):
            shorten(key, repeat, *tensors)
    return results


def shorten(key: Key, repeat: Any, *tensors: Tensor) -> None:
    """Calls of these very sizes and strides are made `at_once` from now on; of rotated keys, whose q is
    another one, none is."""
    (_, backend, *_), options, *_ = key
    if type(options[0]) is tuple and options[1].rotation != "none":
        return
    check = alike(*tensors)
    run = check and repeat.once(repeat.tally.count, *tensors)
    if run is not None:
        others = _known.pop(options, ())[: _KEPT_CHECKS - 1]
        _make_room()
        _known[options] = ((check, backend, run), *others)


def _make_room() -> None:
    if len(_known) > _KEPT - 2:  # what is learnt may have two entries
        for old in list(_known)[:2]:  # another thread may change it meanwhile
            _known.pop(old, None)


def attend(key: Key | None, bound: Bound, *given: Tensor) -> Results:
    """The results of a call that is not known. What was decided for it is kept under its key, for calls like
    it; `given` are its tensors as `call` takes them, but for packed members."""
    if key is not None and type(bound.k) is QuantizedTensor:
        opened = entry.opened_of(bound)
        ready = entry.read_in_walk(bound, opened)
        if ready is None:
            return entry.attend_coded(bound, opened)
        if not (ready.k is bound.k.codes and ready.v is bound.v.codes):  # type: ignore[union-attr]
            key = None  # values of codes are no operands of the next call
        elif ready.q is not bound.q and key not in _known:  # rotated: the next call finds it compiled
            codec.one_pass("cpu").rotate(bound.q)
        bound = ready
    plain = None if key is None else torch_ops.call_plain(bound.q, bound.k, bound.v, bound.args)
    if key is None or plain is None:
        return entry.attend(bound)
    launch, results = plain
    if key not in _known:
        learn(key, launch, bound, given)
    return results


def learn(key: Key, launch: Launch, bound: Bound, given: tuple[Tensor, ...]) -> None:
    """Calls with this key are made as `bound` was; None is kept if its row has no shorter way for them."""
    q, k, v, _, args, _ = bound
    _make_room()
    maker = getattr(import_module(launch.row.module), "repeat", None)
    trained = key[0][-1] is True
    repeat = maker and maker(launch, q, k, v, args._replace(need_lse=True) if trained else args)
    if repeat is not None:
        repeat = torch_ops.trained(repeat, launch, q, k, v, args) if trained else repeat
        narrow = args.page_table is not None and given[4].dtype is torch.int64
        repeat = _narrowing(repeat) if narrow else repeat
        repeat.tally = launch.tally
        if not hasattr(repeat, "reaches"):
            tensors = q, k, v, *(getattr(args, name) for name in _BEHIND)
            repeat.reaches = tuple(span(x) for x in tensors if x is not None)
        if given and q.is_cuda and q.dtype is not torch.float32:  # not of TF32
            check, sizes = alike(*given), (key[1], given[0].shape, given[1].shape)
            others = _known.get(sizes, ())[: _KEPT_CHECKS - 1]
            _known[sizes] = others if check is None else ((check, key[0], repeat), *others)
    _known[key] = repeat


def _narrowing(repeat: Repeat) -> Any:
    """`repeat` reads int32 lengths, and its calls come with int64 ones."""
    return lambda q, k, v, table, lens, *rest: repeat(q, k, v, table, int32_of("kv_lens", lens, False), *rest)
