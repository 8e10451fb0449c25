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
from polyflash.integrations.context_parallel import context_parallel

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

    wrong += _region(everyone, data[0])
    compiled = build(everyone)
    x = parallel.split(data[0], mesh=everyone, dim=1)
    expected, got = compiled(x), torch.compile(compiled, backend="aot_eager")(x)
    if not torch.allclose(expected, got, atol=1e-6):
        wrong.append("compiled: another result")
    return wrong


class Causal(nn.Module):
    """A block that knows torch's function alone."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(
            1, 2
        ).flatten(2)


def _region(mesh: DeviceMesh, x: Tensor) -> list[str]:
    """torch's region: buffers are shards inside, attention that of the whole, refusals in words."""
    torch.manual_seed(0)
    whole, own, before = nn.Sequential(Causal(), Causal()), nn.Sequential(Causal(), Causal()), x.clone()
    own.load_state_dict(whole.state_dict())
    whole(x).square().sum().backward()
    wrong = []
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        if x.shape[1] > ROWS // mesh.size() + 2:
            wrong.append(f"region: a buffer of {x.shape[1]} rows")
        checkpoint(own, x, use_reentrant=False).square().sum().backward()
        try:
            mask = torch.ones(4, 4)
            nn.functional.scaled_dot_product_attention(*(torch.randn(1, 2, 4, 8),) * 3, attn_mask=mask)
            wrong.append("region: attn_mask taken")
        except NotImplementedError:
            pass
    for a, b in zip(whole.parameters(), own.parameters(), strict=True):
        dist.all_reduce(b.grad)
        if not torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-4):
            wrong.append(f"region: a gradient is off by {(a.grad - b.grad).abs().max():.3g}")
    return wrong if torch.equal(x, before) else [*wrong, "region: a buffer was not restored"]


def _apart(name: str, whole: nn.Module, own: nn.Module) -> list[str]:
    wrong = []
    for (at, a), b in zip(whole.named_parameters(), own.parameters(), strict=True):
        b = b.full_tensor() if hasattr(b, "full_tensor") else b
        if not torch.allclose(a, b, rtol=1e-5, atol=1e-6):
            wrong.append(f"{name}: {at} is off by {(a - b).abs().max():.3g}")
    return wrong
