"""Two states merged in one pass, beside `polyflash.merge`."""

from __future__ import annotations

import pytest
import torch

from polyflash.backends.triton.merge import add_into, merge_into
from polyflash.merging import merge
from tests import device


@pytest.mark.parametrize("dim", [16, 80])
@pytest.mark.parametrize(
    "kinds", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2]
)
def test_it_is_merge_rounded_once(kinds: tuple[torch.dtype, torch.dtype], dim: int):
    """Rows and blocks of rows that one state or both have no keys for, far lse, and NaN; late rows alone, in
    another layout."""
    draw = torch.Generator().manual_seed(dim)
    outs = [torch.randn(2, 75, 3, dim, generator=draw).to(kind).transpose(1, 2) for kind in kinds]
    lses = [torch.randn(2, 3, 75, generator=draw) * 3 for _ in kinds]
    for i, rows in ((0, slice(10, 20)), (1, slice(15, 25)), (1, slice(40, 75))):
        outs[i][:, :, rows], lses[i][:, :, rows] = 0.0, -torch.inf
    lses[0][:, :, 30], lses[1][:, :, 31], lses[1][:, :, 32] = 3e4, 3e4, torch.nan
    outs[1][:, :, 30, 0], outs[0][:, :, 31, 1] = torch.inf, -torch.inf  # of no weight
    lses[1][0, :, 50] = torch.nan  # of its block of rows all others have no key there
    right = merge([(x[:, :, 8:], y[:, :, 8:]) for x, y in zip(outs, lses, strict=True)])
    state = [x.clone().to(device.DEVICE) for x in (outs[0], lses[0])]
    other = [x.to(device.DEVICE) for x in (outs[1], lses[1])]
    merge_into(*(x[:, :, 8:] for x in (*state, *other)))
    near = 2.0**-8 if kinds[0] is torch.bfloat16 else 1e-5
    torch.testing.assert_close(state[1][:, :, 8:].cpu(), right.lse, atol=1e-6, rtol=1e-6, equal_nan=True)
    torch.testing.assert_close(
        state[0][:, :, 8:].cpu().float(), right.out, atol=1e-6, rtol=near, equal_nan=True
    )
    assert torch.equal(state[0][:, :, :8].cpu(), outs[0][:, :, :8])


def test_bits_repeat():
    """A warp that read an lse which another had already written showed on devices alone."""
    draw = torch.Generator().manual_seed(1)
    outs = [torch.randn(1, 2, 64, 128, generator=draw).to(device.DEVICE) for _ in range(2)]
    lses = [torch.randn(1, 2, 64, generator=draw).to(device.DEVICE) for _ in range(2)]
    states = []
    for _ in range(200 if device.DEVICE.type != "cpu" else 2):
        state = outs[0].clone(), lses[0].clone()
        merge_into(*state, outs[1], lses[1])
        states.append(state)
    assert all(torch.equal(x, y) for state in states for x, y in zip(state, states[0], strict=True))


@pytest.mark.parametrize("kinds", ["bbb", "fbb", "bb", "bf"])
@pytest.mark.parametrize("inside", [False, True])
def test_parts_are_added_up_in_float32_and_rounded_once(kinds: str, inside: bool):
    """Late rows alone, in two layouts, as the additions of torch would; into one of them too."""
    draw = torch.Generator().manual_seed(len(kinds))
    types = {"b": torch.bfloat16, "f": torch.float32}
    parts = [torch.randn(2, 75, 3, 24, generator=draw).to(types[kind]).transpose(1, 2) for kind in kinds]
    parts[1] = parts[1].contiguous()
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    parts = [x.to(device.DEVICE) for x in parts]
    into = parts[1] if inside else torch.full((2, 3, 75, 24), torch.nan, dtype=torch.bfloat16)
    into = into.to(device.DEVICE)
    before = into.clone()
    add_into(into[:, :, 8:], [x[:, :, 8:] for x in parts])
    assert torch.equal(into[:, :, 8:].cpu(), total[:, :, 8:].to(into.dtype))
    assert torch.equal(into[:, :, :8].isnan(), before[:, :, :8].isnan())
