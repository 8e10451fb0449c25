"""Models whose sequences, and with FSDP2 whose parameters too, are spread over ranks: steps like one's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import polyflash
from polyflash import parallel

ROWS, WIDTH, HEADS = 37, 32, 4


class Block(nn.Module):
    """Attention with a window and sinks, over a mesh or on one rank."""

    def __init__(self, mesh: DeviceMesh | None, checkpointed: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.sinks = nn.Parameter(torch.linspace(-1, 1, HEADS))
        self.mesh, self.checkpointed = mesh, checkpointed

    def attend(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(2, (2 * HEADS, WIDTH // HEADS))
        q, k, v = heads.split((HEADS, HEADS // 2, HEADS // 2), 2)
        how: Any = {"causal": True, "window": (19, None), "sinks": self.sinks, "layout": "bshd"}
        if self.mesh is None:
            out = polyflash.attention(q, k, v, **how)
        else:
            out = parallel.attention(q, k, v, mesh=self.mesh, **how)
        return x + self.out(out.flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.attend, x, use_reentrant=False) if self.checkpointed else self.attend(x)


def build(mesh: DeviceMesh | None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(mesh, False), Block(mesh, True))


def steps(model: nn.Module, batches: list[Tensor], scale: float, shares: Any = None) -> None:
    """Three steps of SGD on the sum of squares; `shares` adds up the gradients of ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x in batches:
        optimizer.zero_grad()
        (model(x).square().sum() * scale).backward()
        if shares is not None:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=shares)
        optimizer.step()


def compare(rank: int, ranks: int) -> list[str]:
    """Two by two ranks: FSDP2 shards parameters over all four, each pair shares the rows of its batch."""
    wrong = []
    torch.manual_seed(1)
    data = [torch.randn(2, ROWS, WIDTH) for _ in range(3)]
    scale = 1.0 / (2 * ROWS * WIDTH)
    whole = build(None)
    steps(whole, data, scale)

    everyone = init_device_mesh("cpu", (ranks,))
    own = build(everyone)
    steps(own, [parallel.split(x, mesh=everyone, dim=1) for x in data], scale, everyone.get_group())
    wrong += _apart("context parallel", whole, own)

    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "cp"))
    both = build(mesh["cp"])
    flat = mesh._flatten("all")
    for block in both:
        fully_shard(block, mesh=flat)
    fully_shard(both, mesh=flat)
    mine = [x[mesh["dp"].get_local_rank() :][:1] for x in data]
    rows = [parallel.split(x, mesh=mesh["cp"], dim=1) for x in mine]
    steps(both, rows, scale * ranks)  # FSDP takes the mean of gradients over all ranks
    wrong += _apart("FSDP2 x context parallel", whole, both)

    compiled = build(everyone)
    x = parallel.split(data[0], mesh=everyone, dim=1)
    expected, got = compiled(x), torch.compile(compiled, backend="aot_eager")(x)
    if not torch.allclose(expected, got, atol=1e-6):
        wrong.append("compiled: another result")
    return wrong


def _apart(name: str, whole: nn.Module, own: nn.Module) -> list[str]:
    wrong = []
    for (at, a), b in zip(whole.named_parameters(), own.parameters(), strict=True):
        b = b.full_tensor() if hasattr(b, "full_tensor") else b
        if not torch.allclose(a, b, rtol=1e-5, atol=1e-6):
            wrong.append(f"{name}: {at} is off by {(a - b).abs().max():.3g}")
    return wrong
