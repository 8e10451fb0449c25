"""At 32k tokens a mask is a few numbers per token, not one per pair of tokens."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from transformers.masking_utils import create_masks_for_generate

from tests.integrations.mask_memory import measured
from tests.integrations.models import build, padding

TOKENS = 32768
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")


class Largest(TorchDispatchMode):
    """The most elements that any result of an operation has."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return result


@pytest.mark.parametrize("pads", ["left", "right", "hole", "documents"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "GptOss", "Llama4"])
def test_masks_of_a_long_prompt_are_linear_in_it(name: str, pads: str) -> None:
    batch, length = 2, TOKENS
    mask = None if pads == "documents" else padding(pads, batch, length)
    places = (torch.arange(length) % 1000).expand(batch, -1) if pads == "documents" else None
    embedded = torch.empty(batch, length, 1)
    with Largest() as largest:
        masks = create_masks_for_generate(build(name, "poly").config, embedded, mask, None, places)
        for each in masks.values() if isinstance(masks, dict) else (masks,):
            each.options(length, length)
    assert 0 < largest.numel <= 2 * batch * length


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_peak_memory_of_a_long_prompt(name: str) -> None:
    """1 GiB is the bool mask of 32k x 32k; torch SDPA holds it, and a float copy of it, while it runs."""
    theirs = measured(name, "sdpa", "mask", TOKENS)
    ours = measured(name, "poly", "mask", TOKENS)
    assert theirs["mib"] >= 1000, "the measurement sees a mask of 1 GiB"
    assert ours["mib"] <= 8
    forward = measured(name, "poly", "forward", TOKENS)
    assert forward["mib"] <= 200
