"""A small Flux whose rows of text and image diffusers spreads over ranks, beside the model on one."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ContextParallelConfig, FluxTransformer2DModel

from polyflash.integrations.diffusers import register

SIZES: dict[str, Any] = {
    "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
    "num_attention_heads": 4, "joint_attention_dim": 32, "pooled_projection_dim": 32,
    "axes_dims_rope": [4, 4, 8],
}  # fmt: skip


def model() -> FluxTransformer2DModel:
    torch.manual_seed(0)
    made = FluxTransformer2DModel(**SIZES).eval()
    made.set_attention_backend(register())
    return made


def inputs() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    return {
        "hidden_states": normal(2, 16, 4), "encoder_hidden_states": normal(2, 8, 32),
        "pooled_projections": normal(2, 32), "timestep": torch.tensor([1.0, 0.5]),
        "img_ids": torch.arange(16.0)[:, None].expand(16, 3), "txt_ids": torch.zeros(8, 3),
    }  # fmt: skip


def compare(ranks: int) -> list[str]:
    """What is off, by a ring, by Ulysses, and by both."""
    if not torch.accelerator.is_available():
        torch.accelerator.device_count = lambda: 1  # diffusers divides by it
    whole, wrong = model()(**inputs()).sample, []
    meshes = [(ranks, 1), (1, ranks)] if ranks == 2 else [(2, ranks // 2)]
    for ring, sharing in meshes:
        spread = model()
        spread.enable_parallelism(config=ContextParallelConfig(ring_degree=ring, ulysses_degree=sharing))
        with torch.no_grad():
            out = spread(**inputs(), return_dict=False)[0]
        if not torch.allclose(out, whole, atol=1e-5, rtol=1e-5):
            wrong.append(f"flux over {ring} x {sharing}: off by {(out - whole).abs().max():.3g}")
    return wrong
