"""`BatchMask`: the keys that each query of a batch sees, in O(seqlen) numbers; and the mask function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from polyflash.errors import spec_error
from polyflash.integrations.transformers.pattern import Pattern, read
from polyflash.mask import Mask

DEAD = -(1 << 30)  # segment id of a padded key: no query has it
_TENSORS = ("kv_lens", "kv_starts", "q_offset", "q_ids", "k_ids", "live", "cu_seqlens", "padded")


@dataclass(frozen=True, eq=False)
class BatchMask:
    """Stands where transformers wants a bool (batch, 1, seqlen_q, seqlen_k), True = attend.

    Query i of request b stands at position p = i + q_offset and sees key j iff all of these hold:

    - causal: j <= p
    - left, right: p - left <= j <= p + right; None is unbounded
    - kv_starts[b] <= j < kv_lens[b]; int32 (batch,)
    - q_ids[b, i] == k_ids[b, j]; int32 (batch, seqlen_q) and (batch, seqlen_k): documents, chunks
    - live[b, j]; bool (batch, seqlen_k), where padding leaves holes between live keys

    `q_offset` is an int or int32 (batch,). `cu_seqlens`, int32 (documents + 1,), says what the ids say where
    a batch of one holds whole documents and nothing else; None elsewhere, and under torch.compile. `padded`:
    does a request have padding? A bool tensor () where that may not be read, under torch.compile.

    `chunk`: the ids are those of chunks of so many keys, counted from the first key.

    A torch function or a tensor method called on the mask sees `dense()`."""

    shape: tuple[int, int, int, int]
    device: torch.device
    causal: bool
    q_offset: int | Tensor
    kv_lens: Tensor | None = None
    kv_starts: Tensor | None = None
    left: int | None = None
    right: int | None = None
    q_ids: Tensor | None = None
    k_ids: Tensor | None = None
    live: Tensor | None = None
    cu_seqlens: Tensor | None = None
    chunk: int | None = None
    padded: bool | Tensor = False

    @property
    def ndim(self) -> int:
        return 4

    @property
    def dtype(self) -> torch.dtype:
        return torch.bool

    def to(
        self, device: Any = None, dtype: Any = None, non_blocking: bool = False, copy: bool = False
    ) -> BatchMask | Tensor:
        """Moves the mask to another device, with the signature of `Tensor.to`; dense in another dtype."""
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        if isinstance(device, Tensor):
            device, dtype = device.device, device.dtype
        if dtype not in (None, torch.bool):
            return self.dense().to(device=device, dtype=dtype, non_blocking=non_blocking)
        if device is None or torch.device(device) == self.device:
            return self
        moved: dict[str, Any] = {
            name: x.to(device, non_blocking=non_blocking)
            for name in _TENSORS
            if isinstance(x := getattr(self, name), Tensor)
        }
        return replace(self, device=torch.device(device), **moved)

    def contiguous(self) -> BatchMask:
        return self

    def dense(self) -> Tensor:
        """Builds the bool (batch, 1, seqlen_q, seqlen_k) tensor that this mask stands for; True = attend."""
        batch, _, seqlen_q, seqlen_k = self.shape
        offset = self.q_offset.view(-1, 1, 1, 1) if isinstance(self.q_offset, Tensor) else self.q_offset
        at = torch.arange(seqlen_q, device=self.device)[:, None] + offset
        j = torch.arange(seqlen_k, device=self.device)
        seen = torch.ones(batch, 1, seqlen_q, seqlen_k, dtype=torch.bool, device=self.device)
        if self.causal:
            seen = seen & (j <= at)
        if self.left is not None:
            seen = seen & (j >= at - self.left)
        if self.right is not None:
            seen = seen & (j <= at + self.right)
        if self.kv_lens is not None:
            seen = seen & (j < self.kv_lens.view(-1, 1, 1, 1))
        if self.kv_starts is not None:
            seen = seen & (j >= self.kv_starts.view(-1, 1, 1, 1))
        if self.q_ids is not None and self.k_ids is not None:
            seen = seen & (self.q_ids[:, None, :, None] == self.k_ids[:, None, None, :])
        if self.live is not None:
            seen = seen & self.live[:, None, None, :]
        return seen

    def options(self, seqlen_q: int, seqlen_k: int) -> dict[str, Any]:
        """Translates the mask to arguments of `attention()`.

        Raises:
            SpecError: the mask is for other lengths."""
        if self.shape[2:] != (seqlen_q, seqlen_k):
            got, wanted = f"{self.shape[2]} queries x {self.shape[3]} keys", f"{seqlen_q} x {seqlen_k}"
            raise spec_error("attention_mask", got, wanted, "Build the mask for this layer's own cache.")
        causal, left = self.causal, self.left
        if not isinstance(self.q_offset, Tensor):
            if left is not None and self.q_offset + seqlen_q - 1 <= left:
                left = None  # the first key is near enough to the last row
            if seqlen_q == 1 and self.q_offset >= seqlen_k - 1:
                causal = False  # one row behind every key
        said: dict[str, Any] = {"kv_lens": self.kv_lens, "kv_starts": self.kv_starts, "causal": causal}
        if left is not None or self.right is not None:
            said["window"] = (left, self.right)
        usual = self.kv_lens is None and not isinstance(self.q_offset, Tensor)
        if (causal or "window" in said) and not (usual and self.q_offset == seqlen_k - seqlen_q):
            said["q_offset"] = self.q_offset
        if self.q_ids is not None or self.live is not None:
            q_ids, k_ids = self._ids()
            k_ids = k_ids if self.live is None else k_ids.masked_fill(~self.live, DEAD)
            said["mask"] = Mask.segments(q_ids, k_ids)
        return said

    def _ids(self) -> tuple[Tensor, Tensor]:
        """`q_ids` and `k_ids`, all equal where there are none."""
        if self.q_ids is not None and self.k_ids is not None:
            return self.q_ids, self.k_ids
        batch, _, seqlen_q, seqlen_k = self.shape
        q_ids = torch.zeros(batch, seqlen_q, dtype=torch.int32, device=self.device)
        return q_ids, torch.zeros(batch, seqlen_k, dtype=torch.int32, device=self.device)

    def within(self, ids: Tensor) -> BatchMask:
        """Adds documents to this mask: each of the last tokens sees only tokens of its own.

        `ids`: int (batch or 1, seqlen_q), not falling along the tokens; query i and key i + q_offset are the
        same token, and keys before belong to the first document of this call. Where `padded` is true, ids
        say nothing: padding makes positions restart."""
        batch, _, seqlen_q, seqlen_k = self.shape
        ids = ids.int().expand(batch, seqlen_q).contiguous()
        rows = torch.arange(seqlen_q, device=ids.device)
        keys = torch.arange(seqlen_k, device=ids.device)
        if isinstance(self.q_offset, Tensor):
            offset = self.q_offset[:, None]
        else:
            offset = torch.full((batch, 1), self.q_offset, device=ids.device)
        of_key = ids.gather(1, (keys - offset).clamp(0, seqlen_q - 1))
        cu_seqlens = None
        if self.k_ids is None:
            whole = seqlen_q == seqlen_k and not isinstance(self.q_offset, Tensor) and self.q_offset == 0
            cu_seqlens = _cu_seqlens(ids) if whole and self.kv_lens is None else None
        else:
            # A document's chunks are counted from its own first token.
            other = self.k_ids if self.chunk is None else (keys - _starts(of_key)) // self.chunk
            of_key = _runs(of_key, other)
            ids = of_key.gather(1, (rows + offset).clamp(0, seqlen_k - 1))
        if isinstance(self.padded, Tensor):
            before = self._ids()
            ids = torch.where(self.padded, before[0], ids)
            of_key = torch.where(self.padded, before[1], of_key)
        return replace(self, q_ids=ids, k_ids=of_key, cu_seqlens=cu_seqlens, chunk=None)

    def __getitem__(self, index: Any) -> Tensor:
        return self.dense()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"BatchMask has no {name!r}")
        return getattr(self.dense(), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*map(_densified, args), **{n: _densified(x) for n, x in (kwargs or {}).items()})


def _densified(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x)(map(_densified, x))
    return x.dense() if isinstance(x, BatchMask) else x


def _mask_of_batch(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | BatchMask | None = None, local_size: int | None = None,
    allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = True, use_vmap: bool = False,
    device: torch.device | str = "cpu", **kwargs: Any,
) -> Tensor | BatchMask | None:  # fmt: skip
    """The mask function: a `BatchMask` for every pattern that `read()` knows, padded anywhere or not.

    None stands for causal attention over equal lengths without padding, where transformers lets the layer's
    `is_causal` decide. The dense bool tensor that torch SDPA gets stands for every other pattern (an overlay
    of the model's or the user's), and where the model asked for a mask it can compute with.
    `attention_mask` is bool (batch, seen keys)."""
    if isinstance(attention_mask, BatchMask):
        return attention_mask
    pattern = None if use_vmap else read(mask_function)
    if pattern is not None:
        optional = allow_is_causal_skip if pattern.causal else allow_is_bidirectional_skip
        packed = pattern.documents is not None
        # transformers forbids the skip for packed documents and for steps of a static cache as well. A step
        # whose offset is a number is of a sliding cache: its one row is short, and a tensor compiles once.
        step = q_length == 1 and isinstance(q_offset, Tensor)
        fits = (optional or packed or step) and not (packed and q_length != kv_length)
        if not fits or (attention_mask is not None and attention_mask.shape[0] != batch_size):
            pattern = None
    if pattern is None:
        first: Any = q_offset  # a tensor with a static cache
        places = batch_size, q_length, kv_length, first, kv_offset
        how = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "use_vmap": use_vmap}
        dense: Tensor | None = sdpa_mask(
            *places, mask_function, attention_mask, local_size, device=device, **how
        )
        return dense
    sizes, offsets = (batch_size, q_length, kv_length), (q_offset, kv_offset)
    return _structured(pattern, sizes, offsets, attention_mask, torch.device(device))


Sizes = tuple[int, int, int]  # batch, queries, keys
Offsets = tuple[int | Tensor, int]  # of the first query, of the first key


def _structured(
    pattern: Pattern, sizes: Sizes, offsets: Offsets, attention_mask: Tensor | None, device: torch.device
) -> BatchMask | None:
    (batch, q_length, kv_length), (q_offset, kv_offset) = sizes, offsets
    starts = lens = live = None
    padded: bool | Tensor = False
    if attention_mask is not None:
        starts, lens, live = _ends(attention_mask, kv_length, kv_offset)
        padded = ~attention_mask.all()
        padded = padded if torch.compiler.is_compiling() else bool(padded)
    q_ids, k_ids = _ids(pattern, sizes, offsets, device)
    whole = pattern.documents is not None and q_ids is not None and lens is None
    cu_seqlens = _cu_seqlens(q_ids) if whole and q_ids is not None else None
    left, chunk = pattern.left, None
    if pattern.chunk is not None and q_ids is not None:
        chunk = pattern.chunk if pattern.documents is None else None
        left = pattern.chunk - 1 if left is None else min(left, pattern.chunk - 1)  # lets tiles be skipped
    offset = q_offset - kv_offset
    if isinstance(offset, Tensor):
        offset = offset.to(device=device, dtype=torch.int32).reshape(-1).expand(batch).contiguous()
    elif pattern.causal and q_ids is lens is starts is pattern.right is None:
        reaches = left is None or kv_length - 1 <= left
        if reaches and offset == kv_length - q_length and q_length in (1, kv_length):
            return None
    shape, limits = (batch, 1, q_length, kv_length), (lens, starts, left, pattern.right)
    rest: Any = (q_ids, k_ids, live, cu_seqlens, chunk, padded)
    return BatchMask(shape, device, pattern.causal, offset, *limits, *rest)


def _ends(
    attention_mask: Tensor, kv_length: int, kv_offset: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(kv_starts, kv_lens, live): the first key of this call's cache that is no padding, and one past the
    last; live, bool (batch, kv_length), if keys between are dead. Those beyond the cache are.

    None for "every key". Under torch.compile nothing may be read: all are tensors."""
    live = attention_mask[:, kv_offset : kv_offset + kv_length]
    if live.shape[1] < kv_length:
        live = torch.nn.functional.pad(live, (0, kv_length - live.shape[1]))
    reading = not torch.compiler.is_compiling()
    if reading and bool(live.all()):
        return None, None, None
    numbers = torch.arange(kv_length, dtype=torch.int32, device=live.device)
    lens = torch.where(live, numbers + 1, 0).amax(1)
    starts = torch.where(live, numbers, kv_length).amin(1).minimum(lens)
    if not reading:
        return starts, lens, live
    holes = not torch.equal(live.sum(1), lens - starts)
    return starts if bool(starts.any()) else None, lens, live if holes else None


def _ids(
    pattern: Pattern, sizes: Sizes, offsets: Offsets, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """int32 segment ids of queries (batch, q_length) and keys (batch, kv_length), or None twice."""
    (batch, q_length, kv_length), (q_offset, kv_offset) = sizes, offsets
    documents, chunk = pattern.documents, pattern.chunk
    starts: int | Tensor = 0 if pattern.chunk_starts is None else pattern.chunk_starts.to(device)[:, None]
    if documents is None:
        reading = not torch.compiler.is_compiling()
        if chunk is None or (reading and kv_offset + kv_length <= chunk):
            return None, None
        rows = torch.arange(q_length, device=device) + q_offset - starts
        keys = torch.arange(kv_length, device=device) + kv_offset - starts
        return (rows // chunk).int().expand(batch, -1), (keys // chunk).int().expand(batch, -1)
    documents = documents.to(device).expand(batch, -1)
    if chunk is not None:
        at = torch.arange(q_length, device=device) if pattern.positions is None else pattern.positions
        documents = _runs(documents, ((at.to(device) - starts) // chunk).expand(batch, -1))
    ids = documents.int().contiguous()
    return ids, ids


def _cu_seqlens(ids: Tensor) -> Tensor | None:
    """int32 (documents + 1,) of ids (1, seqlen) that do not fall; None for other batches or if compiling."""
    if ids.shape[0] != 1 or torch.compiler.is_compiling():
        return None
    first = (ids[0, 1:] != ids[0, :-1]).nonzero()[:, 0].int() + 1
    return torch.nn.functional.pad(torch.nn.functional.pad(first, (1, 0)), (0, 1), value=ids.shape[1])


def _starts(ids: Tensor) -> Tensor:
    """int64 (batch, seqlen): where the run of equal ids begins that each token is in."""
    numbers = torch.arange(1, ids.shape[1], device=ids.device)
    first = torch.where(ids[:, 1:] != ids[:, :-1], numbers, 0)
    return torch.nn.functional.pad(first.cummax(1).values if first.shape[1] else first, (1, 0))


def _runs(a: Tensor, b: Tensor) -> Tensor:
    """int32 ids of the runs of tokens (batch, seqlen) along which both `a` and `b` keep their value."""
    new = (a[:, 1:] != a[:, :-1]) | (b[:, 1:] != b[:, :-1])
    return torch.nn.functional.pad(new.int().cumsum(1, dtype=torch.int32), (1, 0))
