"""FSDP2 on a mesh of CPU processes: a step of a sharded model equals one of the whole model."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from polyflash import Mask, attention


class Block(torch.nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        self.sinks = torch.nn.Parameter(torch.randn(4))
        self.mask, self.checkpointed = Mask.causal() & Mask.window(9, None), checkpointed

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, 4, 8)).unbind(2)
        return x + self.out(attention(q, k, v, mask=self.mask, sinks=self.sinks, layout="bshd").flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.attend, x, use_reentrant=False) if self.checkpointed else self.attend(x)


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(False), Block(True))


def train(model: torch.nn.Module, batches: list[torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def compare(rank: int, ranks: int) -> list[str]:
    whole, sharded = build(), build()
    mesh = init_device_mesh("cpu", (ranks,))
    for block in sharded:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    torch.manual_seed(1)
    data = [torch.randn(2 * ranks, 17, 32) for _ in range(2)]
    train(whole, data)
    train(sharded, [x[2 * rank : 2 * rank + 2] for x in data])
    for (name, a), b in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        assert b.to_local().numel() < a.numel(), name
        torch.testing.assert_close(b.grad.full_tensor(), a.grad, rtol=1e-5, atol=1e-7, msg=name)
        torch.testing.assert_close(b.full_tensor(), a, rtol=1e-5, atol=1e-7)
        assert a.grad.abs().sum() > 0
    return []
