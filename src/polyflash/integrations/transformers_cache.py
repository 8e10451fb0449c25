"""A transformers cache whose keys and values stand in pages, and the attention that reads them there.

    from polyflash.integrations.transformers_cache import PagedCache, register

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=register())
    cache = PagedCache.of(model, tokens=8192)
    model.generate(**inputs, past_key_values=cache)
    cache.reset()

The layers get keys and values that stand for the whole cache and are never made: the attention that
`register()` registers reads the pages. Any other sees the tensors it expects, gathered when it looks at them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache, CacheLayerMixin
except ImportError as error:
    raise ImportError("this module needs transformers 5: pip install 'polyflash[hf]'") from error

from polyflash.errors import described, spec_error
from polyflash.integrations.transformers import register
from polyflash.integrations.transformers.layer import PagedStates
from polyflash.kvcache import KVCache, Request, Step
from polyflash.kvcache.code_pools import Quant
from polyflash.kvcache.handles import checked_count

__all__ = ("PagedCache", "PagedStates", "register")


class PagedLayer(CacheLayerMixin):
    """One layer of a `PagedCache`, which does all the work."""

    is_croppable = True
    is_sliding = False  # all keys stay; the mask says the window
    supports_early_init = False

    def __init__(self, parent: PagedCache, index: int) -> None:
        super().__init__()
        self.parent, self.index = parent, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the pools exist."""

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: Any
    ) -> tuple[PagedStates, PagedStates]:
        return self.parent.write(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.parent.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.parent.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        change = "Layers share their tables: call it on the PagedCache."
        raise spec_error("reorder_cache", "one layer", "all layers at once", change)


class PagedCache(Cache):
    """The cache of one `generate()` call, or of several that go on from each other, in the pages of a
    `KVCache`, which several of these may share.

    Beams, repeated and chosen batch entries are forks: they share pages, and only the last page of each is
    ever copied. `crop(0)` takes back a forward pass that failed. `cascade` reads what all entries
    share once per step (see `KVCache.attend`); not with padding. `reset()` gives the pages back.

    Raises:
        SpecError: no `KVCache`.
        OutOfPages: while a model runs, before anything of that pass is written."""

    def __init__(self, cache: KVCache, *, cascade: bool = False) -> None:
        if not isinstance(cache, KVCache):
            change = "PagedCache.of(model, tokens=...) makes one."
            raise spec_error("cache", described(cache), "a KVCache", change)
        self.cache, self.cascade = cache, cascade
        self.requests: tuple[Request, ...] = ()
        self._step: Step | None = None
        super().__init__(layers=[PagedLayer(self, index) for index in range(cache.num_layers)])

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        tokens: int,
        *,
        page_size: int = 16,
        cascade: bool = False,
        quant: Quant | None = None,
    ) -> PagedCache:
        """Makes a cache with room for `tokens` tokens in all, in whole pages, with the sizes, dtype and
        device of `model`; of codes with `quant`, as in `KVCache`.

        Raises:
            SpecError: no such number of tokens or page size; or the config of the model has no
                `num_key_value_heads` or `head_dim` for all layers alike. Make the KVCache yourself then."""
        checked_count("page_size", page_size, 1, 2**31 - 1)
        checked_count("tokens", tokens, 0, (2**31 - 1) * page_size)
        config = model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
        width = getattr(config, "head_dim", None)
        if width is None and heads and getattr(config, "hidden_size", None):
            width = config.hidden_size // config.num_attention_heads
        if not isinstance(heads, int) or not isinstance(width, int):
            change = "Pass a KVCache with the sizes of the keys and values."
            raise spec_error("model", type(config).__name__, "num_key_value_heads and head_dim", change)
        kind = {"num_layers": config.num_hidden_layers, "dtype": model.dtype, "device": model.device}
        kind["quant"] = quant
        return cls(KVCache(-(-tokens // page_size), page_size, heads, width, **kind), cascade=cascade)

    @property
    def length(self) -> int:
        """Tokens of each entry, without those of a pass that has not ended."""
        return self.cache.length(self.requests[0]) if self.requests else 0

    @property
    def batch_size(self) -> int:
        return len(self.requests) or -1

    @property
    def source(self) -> Step | tuple[Request, ...]:
        """The source that `KVCache.attend` takes: the step of a pass that has not ended, or the requests."""
        return self.requests if self._step is None else self._step

    def page_table(self) -> Tensor:
        """int32 (batch, max_pages), with the tokens of a pass that has not ended."""
        return self.cache.page_table(self.requests) if self._step is None else self._step.tables.page_table

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[PagedStates, PagedStates]:
        """Writes new tokens of one layer, (batch, num_kv_heads, new, head_dim), cast to the dtype of the
        pool: under torch.autocast they come in several. Returns what stands for all.

        Raises:
            OutOfPages: too few free pages for a new pass; the cache is as before it.
            SpecError: another batch than before; or the pass before did not reach the last layer: it failed,
                or the model has fewer layers than the `KVCache`."""
        batch, _, count, _ = k.shape
        if self._step is not None and self._step.has_written(layer):
            missing = [n for n in range(self.cache.num_layers) if not self._step.has_written(n)]
            got = f"a pass without layer {missing[0]}"
            raise spec_error("write", got, "a pass through all layers", "crop(0) takes a failed pass back.")
        if self._step is None:
            requests = self.requests or self.cache.add(batch)
            if len(requests) != batch:
                change = "Call reset(), or choose entries by batch_select_indices()."
                raise spec_error("batch", batch, f"{len(requests)}, as before", change)
            try:
                self._step = self.cache.reserve(requests, count)
            except Exception:
                if not self.requests:
                    self.cache.free(requests)
                raise
            self.requests = requests
        step = self._step
        step.write(*(x.transpose(1, 2).flatten(0, 1).to(self.cache.dtype) for x in (k, v)), layer=layer)
        tokens = step.tables.lengths[0] if batch else 0
        if all(step.has_written(n) for n in range(self.cache.num_layers)):
            step.commit()
            self._step = None
        return PagedStates(self, layer, 0, tokens), PagedStates(self, layer, 1, tokens)

    def reset(self) -> None:
        """Gives all pages back."""
        self._end_pass()
        self.cache.free(self.requests)
        self.requests = ()

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens of each entry, as `DynamicCache.crop` does."""
        self._end_pass()
        tokens_to_remove = int(tokens_to_remove)  # speculation counts on its device
        if tokens_to_remove > 0:
            change = "Say how many tokens to remove, as a negative number."
            raise spec_error("tokens_to_remove", tokens_to_remove, "0 or less", change)
        self.cache.truncate(self.requests, max(0, self.length + tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._become([i for i in range(len(self.requests)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        if indices.dtype is torch.bool:
            indices = indices.nonzero()[:, 0]
        self._become([i % len(self.requests) for i in indices.tolist()] if self.requests else [])

    def _become(self, entries: list[int]) -> None:
        """Entry i is a fork of entry `entries[i]`; one that is wanted once stays what it is."""
        self._end_pass()
        kept: dict[int, Request] = dict(enumerate(self.requests))
        chosen = []
        for i in entries:
            (request,) = (kept.pop(i),) if i in kept else self.cache.fork(self.requests[i])
            chosen.append(request)
        self.cache.free(list(kept.values()))
        self.requests = tuple(chosen)

    def _end_pass(self) -> None:
        """Takes back a pass that did not reach the last layer."""
        if self._step is not None:
            self._step.rollback()
            self._step = None
