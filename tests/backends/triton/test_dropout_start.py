"""Parts of a call that count dropout from where they stand, in the interpreter or on a GPU."""

from __future__ import annotations

import pytest

from tests.device import DEVICE
from tests.inside_torch import test_dropout_start as parts


@pytest.mark.parametrize("part", parts.parts(), ids=str)
def test_a_part_drops_what_the_whole_drops(part: tuple[slice, slice, slice]):
    parts.check("triton", part, DEVICE)
