"""Memory layout of tokens: pools of pages (num_pages, page_size, num_kv_heads, head_dim), and slots.

Slot p·page_size + j is place j of page p. A pool may have any strides, as long as no two elements share an
address: pages with padding between them, one of two interleaved tensors, heads outside of the page. Offsets
are 64-bit numbers throughout."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from polyflash.errors import described, spec_error
from polyflash.kvcache.handles import is_ints
from polyflash.mask import is_strided
from polyflash.validate import overlaps

PoolLayout = Literal["NHD", "HND"]
_SHAPES = {
    "NHD": "(num_pages, page_size, num_kv_heads, head_dim)",
    "HND": "(num_pages, num_kv_heads, page_size, head_dim)",
}


def layers_of(name: str, pools: Tensor | Sequence[Tensor], layout: PoolLayout) -> tuple[Tensor, ...]:
    """Makes one (num_pages, page_size, num_kv_heads, head_dim) view per layer: of a pool, of a 5-D tensor of
    pools with the layer first, or of a sequence of pools, none of whose elements share addresses."""
    if not isinstance(layout, str) or layout not in _SHAPES:
        change = "FlashInfer calls the same layouts so."
        raise spec_error("layout", described(layout), "'NHD' or 'HND'", change)
    if isinstance(pools, Tensor):
        found = pools.unbind(0) if is_strided(pools) and pools.ndim == 5 else (pools,)
    else:
        found = tuple(pools)
    for pool in found:
        if not isinstance(pool, Tensor) or not is_strided(pool) or pool.ndim != 4 or pool.requires_grad:
            got = f"{described(pool)}{' that needs gradients' * getattr(pool, 'requires_grad', False)}"
            change = "One pool per layer, or all in one tensor with the layer first."
            raise spec_error(name, got, f"a tensor {_SHAPES[layout]}", change)
        if overlaps(pool):
            got = f"strides {pool.stride()} for {tuple(pool.shape)}"
            raise spec_error(name, got, "an address of its own per element", "Use .contiguous().")
    return tuple(pool.transpose(1, 2) for pool in found) if layout == "HND" else found


def check_pools(k_pages: Sequence[Tensor], v_pages: Sequence[Tensor]) -> None:
    """Checks that all pools share dtype, device, page count, page size and head count, and those of one kind
    their head_dim."""
    if len(k_pages) != len(v_pages) or not k_pages:
        wanted, change = "as many of each, one or more", "Every layer has both pools."
        raise spec_error("k_pages, v_pages", f"{len(k_pages)} and {len(v_pages)} layers", wanted, change)
    first = k_pages[0]
    for name, pools in (("k_pages", k_pages), ("v_pages", v_pages)):
        for pool in pools:
            alike = pool.shape[:3] == first.shape[:3] and pool.shape[3] == pools[0].shape[3]
            if not alike or pool.dtype is not first.dtype or pool.device != first.device:
                wanted = f"what k_pages of layer 0 has: {described(first)} on {first.device}"
                change = "Only head_dim of v may differ."
                raise spec_error(name, f"{described(pool)} on {pool.device}", wanted, change)
    if not first.is_floating_point() or 0 in first.shape[1:] or v_pages[0].shape[3] == 0:
        change = "Zero sizes and codes make no keys."
        raise spec_error("k_pages", described(first), "floats, with every size but num_pages >= 1", change)


def slots_of(pages: Any, page_size: int, starts: Sequence[int], counts: Sequence[int]) -> tuple[Tensor, ...]:
    """Slots and positions, int64 (total,) each on the CPU, of `counts[b]` tokens from position `starts[b]` on
    of every request, which stands in `pages[b]`. A few integers are not worth waking torch's threads; those
    of one token each not even numpy or torch.tensor, which are slow once keys have filled the caches."""
    if all(n == 1 for n in counts):
        each = zip(pages, starts, strict=True)
        slots = [int(p[at // page_size]) * page_size + at % page_size for p, at in each]
        return tuple(ints(x, torch.device("cpu"), torch.int64) for x in (slots, starts))
    spans = [np.arange(at, at + n) for at, n in zip(starts, counts, strict=True)]
    pages = [np.asarray(p, np.int64)[x // page_size] for p, x in zip(pages, spans, strict=True)]
    places = [p * page_size + x % page_size for p, x in zip(pages, spans, strict=True)]
    return tuple(torch.from_numpy(np.concatenate((np.arange(0), *x))) for x in (places, spans))


def moved(x: Tensor, device: torch.device) -> Tensor:
    """Copies x from the host to `device`; through pinned memory to a GPU, so that nothing waits for it."""
    if device.type != "cuda" or not x.numel():
        return x if x.device == device else x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def ints(values: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    """Makes a tensor (len(values),) on `device`, whatever the default device is."""
    x = array("q" if dtype is torch.int64 else "i", values)
    return moved(torch.frombuffer(x, dtype=dtype) if x else torch.empty(0, dtype=dtype, device="cpu"), device)


def write_slots(pages: Tensor, values: Tensor, slots: Tensor) -> None:
    """Writes values (tokens, num_kv_heads, head_dim) to their slots, int64 (tokens,), all different and
    inside the pool: nothing is checked."""
    num_pages, page_size = pages.shape[:2]
    if pages.stride(0) == page_size * pages.stride(1) or page_size == 1:
        flat = pages.as_strided(  # which looks whether the storage has so many
            (num_pages * page_size, *pages.shape[2:]),
            (pages.stride(0) // page_size, *pages.stride()[2:]),
            pages.storage_offset(),
        )
        flat.index_copy_(0, slots, values)
        return
    page = torch.div(slots, page_size, rounding_mode="floor")
    pages.index_put_((page, slots - page * page_size), values)


def read_slots(pages: Tensor, slots: Tensor) -> Tensor:
    """Reads (tokens, num_kv_heads, head_dim) at `slots`."""
    page = torch.div(slots, pages.shape[1], rounding_mode="floor")
    return pages[page, slots - page * pages.shape[1]]


def copy_pages(pages: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copies whole pages, int64 (n,) each; the targets are all different and none is a source."""
    pages.index_copy_(0, targets, pages.index_select(0, sources))


def write_tokens(k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Writes k and v of tokens into one layer's pools, at slots of the caller's choice; -1 skips a token.

    k (tokens, num_kv_heads, head_dim) and v (tokens, num_kv_heads, head_dim_v), dtype of the pools;
    slot_mapping int32 or int64 (tokens,). On a device, looking for -1 synchronises.

    Raises:
        SpecError: shapes, dtypes or devices do not fit; or a slot is below -1, beyond the pool, or there
            twice. Nothing is written then."""
    (k_pool,), (v_pool,) = layers_of("k_pages", k_pages, "NHD"), layers_of("v_pages", v_pages, "NHD")
    check_pools((k_pool,), (v_pool,))
    check_tokens("k", k, k_pool, None)
    check_tokens("v", v, v_pool, k.shape[0])
    slots = slot_mapping
    if not is_ints(slots, (k.shape[0],), k_pool.device):
        wanted = f"int32 or int64 ({k.shape[0]},) on {k_pool.device}"
        raise spec_error("slot_mapping", described(slots), wanted, "One slot per token.")
    slots = slots.long()
    live = slots != -1
    if not bool(live.all()):
        k, v, slots = k[live], v[live], slots[live]
    most = k_pool.shape[0] * k_pool.shape[1]
    if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < most:
        change = "Slot = page · page_size + place."
        raise spec_error("slot_mapping", "a slot elsewhere", f"-1, or a slot from 0 to {most - 1}", change)
    if slots.unique().numel() != slots.numel():
        raise spec_error("slot_mapping", "a slot twice", "different slots", "Give each token its own slot.")
    write_slots(k_pool, k, slots)
    write_slots(v_pool, v, slots)


def check_tokens(name: str, tokens: Tensor, pool: Tensor, count: int | None) -> None:
    """Checks that `tokens` can be written to `pool` as they are: assignment would broadcast and cast."""
    if count is None and isinstance(tokens, Tensor) and tokens.ndim:
        count = tokens.shape[0]
    shape = (count, *pool.shape[2:])
    fits = isinstance(tokens, Tensor) and is_strided(tokens) and tuple(tokens.shape) == shape
    if not fits or tokens.dtype is not pool.dtype or tokens.device != pool.device:
        got = described(tokens) + (f" on {tokens.device}" if isinstance(tokens, Tensor) else "")
        wanted = f"{pool.dtype} ({'tokens' if shape[0] is None else shape[0]}, {shape[1]}, {shape[2]})"
        change = f"Use {name}.to({str(pool.device)!r}, {pool.dtype})."
        if not fits:
            change = f"{name} is (tokens, num_kv_heads, channels) of the cache."
        raise spec_error(name, got, f"{wanted} on {pool.device}", change)
