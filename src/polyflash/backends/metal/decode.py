"""Decode in Metal: the forward's launch, as the row for few query rows names it. All query heads of a kv head
are rows of one tile, so K and V are read once; splits of the keys fill the device."""

from __future__ import annotations

from polyflash.backends.metal.forward import run as run
