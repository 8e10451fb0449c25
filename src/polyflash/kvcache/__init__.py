"""A cache of keys and values in pages, shared between requests where they begin alike."""

from polyflash.kvcache.cache import KVCache, Step, SwappedRequest
from polyflash.kvcache.handles import OutOfPages, Request, Snapshot
from polyflash.kvcache.layout import write_tokens
from polyflash.kvcache.occupancy import CacheStats, heavy_hitters
from polyflash.kvcache.pages import Pages
from polyflash.kvcache.rope import Rope
from polyflash.kvcache.shared_prefix import AttendPlan
from polyflash.kvcache.tables import FlashInferTable, PageTable, from_flashinfer, to_flashinfer

__all__ = ["AttendPlan", "CacheStats", "FlashInferTable", "KVCache", "OutOfPages", "PageTable", "Pages"]
__all__ += ["Request", "Rope", "Snapshot", "Step", "SwappedRequest", "from_flashinfer", "heavy_hitters"]
__all__ += ["to_flashinfer", "write_tokens"]
