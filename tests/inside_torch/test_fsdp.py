"""FSDP2 on a mesh of two CPU processes: a step of a sharded model equals one of the whole model."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

WORKER = """
import os
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from polyflash import Mask, attention

rank, place = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)


class Block(torch.nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        self.sinks = torch.nn.Parameter(torch.randn(4))
        self.mask, self.checkpointed = Mask.causal() & Mask.window(9, None), checkpointed

    def attend(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, 4, 8)).unbind(2)
        return x + self.out(attention(q, k, v, mask=self.mask, sinks=self.sinks, layout="bshd").flatten(2))

    def forward(self, x):
        return checkpoint(self.attend, x, use_reentrant=False) if self.checkpointed else self.attend(x)


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(False), Block(True))


def train(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


whole, sharded = build(), build()
mesh = init_device_mesh("cpu", (2,))
for block in sharded:
    fully_shard(block, mesh=mesh)
fully_shard(sharded, mesh=mesh)
torch.manual_seed(1)
data = [torch.randn(4, 17, 32) for _ in range(2)]
train(whole, data)
train(sharded, [x[2 * rank : 2 * rank + 2] for x in data])
for (name, a), b in zip(whole.named_parameters(), sharded.parameters(), strict=True):
    assert b.to_local().numel() < a.numel(), name
    torch.testing.assert_close(b.grad.full_tensor(), a.grad, rtol=1e-5, atol=1e-7, msg=name)
    torch.testing.assert_close(b.full_tensor(), a, rtol=1e-5, atol=1e-7)
    assert a.grad.abs().sum() > 0
dist.destroy_process_group()
print("equal", flush=True)
# Threads of gloo may still let go of tensors while the interpreter ends, which aborts the process.
os._exit(0)
"""


@pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="torch without gloo",
)
def test_a_sharded_model_trains_like_a_whole_one(tmp_path):
    script, place = tmp_path / "worker.py", tmp_path / "rendezvous"
    script.write_text(WORKER)
    workers = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(place)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for worker in workers:
            out, err = worker.communicate(timeout=120)
            assert worker.returncode == 0 and out.strip() == "equal", out + err
    finally:
        for worker in workers:
            worker.kill()
