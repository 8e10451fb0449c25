"""Decode in Triton: few query rows against many keys. All query heads of a key/value head are rows of one
tile, so that keys are read once. The rest is the forward's, which cuts the keys into splits."""

from __future__ import annotations

from polyflash.backends.triton.forward import repeat as repeat
from polyflash.backends.triton.forward import run as run
