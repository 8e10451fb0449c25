"""A small causal model whose sequence is spread over processes: the same losses as in one process.

Starts two processes of a gloo group on this machine, or as many as `--ranks` says. Each holds its rows of
every sequence (`polyflash.parallel.split`), calls `polyflash.parallel.attention` where a model on one device
calls `polyflash.attention`, and adds up gradients of parameters at the end of a step, as in data parallelism.
The task is to copy what stood at an earlier place, so that rows need keys of other ranks."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import polyflash
from polyflash import parallel

SYMBOLS, WIDTH, HEADS, BATCH, ROWS, BACK = 16, 32, 4, 4, 192, 96


class Block(nn.Module):
    """Attention with a learned sink per head, then a small MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.sinks = nn.Parameter(torch.zeros(HEADS))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(functional.layer_norm(x, (WIDTH,))).unflatten(2, (3, HEADS, -1)).unbind(2)
        attend = parallel.attention if dist.is_initialized() else polyflash.attention
        x = x + self.out(attend(q, k, v, causal=True, sinks=self.sinks, layout="bshd").flatten(2))
        return x + self.mlp(functional.layer_norm(x, (WIDTH,)))


class Copier(nn.Module):
    """Embeds symbols and positions; a row's position is that in the whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(ROWS, WIDTH)
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, SYMBOLS)

    def forward(self, symbols: Tensor, places: Tensor) -> Tensor:
        return self.head(self.blocks(self.symbols(symbols) + self.places(places)))


def own_rows(x: Tensor) -> Tensor:
    """This process's columns of a tensor (batch, rows)."""
    return parallel.split(x, dim=1) if dist.is_initialized() else x


def train(steps: int) -> list[float]:
    """The loss of every step, over the whole batch and all rows."""
    torch.manual_seed(0)
    model, data = Copier(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    places = torch.arange(ROWS).expand(BATCH, ROWS)
    losses = []
    for _ in range(steps):
        symbols = torch.randint(SYMBOLS, (BATCH, ROWS), generator=data)
        labels = functional.pad(symbols[:, :-BACK], (BACK, 0), value=0)
        logits = model(own_rows(symbols), own_rows(places))
        wanted = own_rows(labels)
        loss = (
            functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum") / labels.numel()
        )
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach()
        if dist.is_initialized():  # a rank's loss and gradients are the shares of its rows
            dist.all_reduce(total)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(float(total))
    return losses


def work(rank: int, ranks: int, place: str, steps: int) -> None:
    """One process of the group; rank 0 prints the losses."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=ranks)
    losses = train(steps)
    if rank == 0:
        print(" ".join(map(repr, losses)), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may let go of tensors while the interpreter ends, which aborts the process


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes that share each sequence")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        return work(asked.rank, asked.ranks, asked.place, asked.steps)
    with tempfile.TemporaryDirectory() as folder:
        own = [
            "--ranks",
            str(asked.ranks),
            "--steps",
            str(asked.steps),
            "--place",
            str(Path(folder) / "place"),
        ]
        command = [sys.executable, __file__, *own, "--rank"]
        workers = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
            for rank in range(asked.ranks)
        ]
        alone = train(asked.steps)
        said = [worker.communicate()[0] for worker in workers]
    together = [float(x) for x in said[0].split()]
    apart = max(abs(a - b) for a, b in zip(alone, together, strict=True))
    shape = f"{BATCH} x {ROWS}, {HEADS} heads"
    print(
        parallel.explain(
            *(torch.empty(BATCH, HEADS, ROWS // asked.ranks, WIDTH // HEADS),) * 3,
            ranks=asked.ranks,
            causal=True,
        )
    )
    print(f"{shape}: loss {alone[0]:.4f} to {alone[-1]:.4f} in one process,")
    print(f"{together[0]:.4f} to {together[-1]:.4f} in {asked.ranks}; at most {apart:.1e} apart")
    if apart > 1e-3:
        sys.exit("the losses differ")


if __name__ == "__main__":
    main()
