"""Ranks of a gloo group: `python -m tests.distributed.worker`. Each line of its input is a JSON list: suite,
number of ranks, and a folder, in which every rank writes what went wrong as JSON, behind all else that it
says. Its answer is how they ended. Ranks are forked, so that what they import is imported once."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import polyflash
from polyflash import SpecError, parallel
from polyflash.parallel.comm import Team
from tests.distributed import cases

TIMEOUT_S, SHORT_S = 100, 4


def some_cases(rank: int, ranks: int) -> list[str]:
    """A fourth of the cases, on each number of ranks up to four another one."""
    return _checked(rank, ranks, slice(ranks % 4, None, 4))


def every_case(rank: int, ranks: int) -> list[str]:
    return _checked(rank, ranks, slice(None))


def _checked(rank: int, ranks: int, some: slice) -> list[str]:
    """On the default group; on four ranks also two rings at once, and a mesh of two dimensions."""
    torch.manual_seed(rank)
    wrong = _judged(list(cases.cases(ranks, ("ring", "all_gather", "ulysses")))[some], rank, ranks, None)
    if ranks == 4:
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        own, mesh = pairs[rank % 2], init_device_mesh("cpu", (2, 2))
        few = [
            case for case in cases.cases(2, ("ring", "all_gather")) if case.mask in ("causal", "sinks-window")
        ]
        wrong += _judged(few, rank // 2, 2, own, group=own)
        wrong += _judged(list(cases.cases(4, ("ulysses+ring",)))[some], rank, ranks, None, mesh=mesh)
    return wrong


def _judged(some: Any, rank: int, ranks: int, sums: Any, **where: Any) -> list[str]:
    wrong = []
    for i, case in enumerate(some):
        results = cases.run(case, ranks, **where)
        for x in results[5:]:
            dist.all_reduce(x, group=sums)
        if i % ranks == rank:
            wrong.append(cases.judge(case, ranks, results))
    return [text for text in wrong if text]


def disagreements(rank: int, ranks: int) -> list[str]:
    """One rank says something else: every rank ends with the same words, and the group lives on."""
    odd, wrong = rank == 1, []
    whole = [
        torch.randn(2, 4, 5 * ranks + 1, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)
    ]
    q, k, v = (parallel.split(x) for x in whole)
    lens = torch.tensor([3, 9 if odd else 8])
    called: dict[str, tuple[Callable[[], Any], str, str]] = {
        "dtype": (lambda: _attend(q, k, v, odd, torch.Tensor.double), "dtype", ""),
        "shape": (lambda: _attend(q, k, v, odd, lambda x: x[..., :4]), "head_dim", ""),
        "batch": (lambda: _attend(q, k, v, odd, lambda x: x[:1]), "batch", ""),
        "rows": (lambda: _attend(q, k, v, odd, lambda x: x[:, :, :1]), "rows", ""),
        "causal": (lambda: parallel.attention(q, k, v, causal=odd), "causal", ""),
        "window": (lambda: parallel.attention(q, k, v, window=(3 + odd, 0)), "window left", ""),
        "scale": (lambda: parallel.attention(q, k, v, scale=0.5 + odd), "scale", ""),
        "lengths": (lambda: parallel.attention(q, k, v, kv_lens=lens), "contents", ""),
        "order": (lambda: parallel.attention(q, k, v, order="contiguous" if odd else "zigzag"), "order", ""),
        "method": (lambda: parallel.attention(q, k, v, method="ring" if odd else "all_gather"), "method", ""),
        "gradients": (lambda: _attend(q, k, v, odd, lambda x: x.clone().requires_grad_()), "gradients", ""),
        "function": (lambda: parallel.restore(q) if odd else parallel.attention(q, k, v), "function", ""),
        "seed": (
            lambda: parallel.attention(q, k, v, dropout_p=0.5, dropout_seed=3 + odd),
            "dropout_seed",
            "",
        ),
        "refusal": (lambda: parallel.attention(q, k, v, window=(3 - 9 * odd, 0)), "rank 1 refused", "window"),
        "option": (
            lambda: parallel.attention(q, k, v, method="tree" if odd else None),
            "rank 1 refused",
            "'tree'",
        ),
    }
    for name, (call, expected, of_odd) in called.items():
        try:
            call()
            wrong.append(f"{name}: no error")
        except (SpecError, NotImplementedError) as error:
            if (of_odd if odd and of_odd else expected) not in str(error):
                wrong.append(f"{name}: {error}")
    out = parallel.restore(parallel.attention(q, k, v, causal=True))
    if not torch.allclose(
        out, torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True), atol=1e-5
    ):
        wrong.append("the group is of no use any more")
    return wrong


def _attend(q: Any, k: Any, v: Any, odd: bool, change: Callable[[Any], Any]) -> Any:
    return parallel.attention(*(change(x) if odd else x for x in (q, k, v)))


def lost(how: str, method: str, backward: bool) -> Callable[[int, int], list[str]]:
    """The last rank dies or hangs in the middle of a pass: every other ends with one clear error, in time."""

    def suite(rank: int, ranks: int) -> list[str]:
        q, k, v = (torch.randn(1, 2, 8, 8, requires_grad=True) for _ in range(3))
        call: Any = {"causal": True, "method": method, "backend": "torch"}  # to compile may take longer
        parallel.attention(q, k, v, **call).sum().backward()
        if not backward and rank == ranks - 1:
            _lose(how)
        started = time.monotonic()
        try:
            out = parallel.attention(q, k, v, **call)
            if rank == ranks - 1:
                _lose(how)
            started = time.monotonic()
            out.sum().backward()
        except RuntimeError as error:
            took, text = time.monotonic() - started, str(error)
            if took > 4 * SHORT_S or "polyflash.parallel: rank" not in text or "got no answer" not in text:
                return [f"after {took:.1f} s: {text}"]
            return []
        return ["no error"]

    return suite


def _lose(how: str) -> None:
    """From now on this rank dies, or hangs, at the next thing that it sends after a handshake."""

    def stop(*given: Any) -> Any:
        if how == "hangs":
            time.sleep(SHORT_S + 2)
        print("[]", flush=True)
        os._exit(0)

    Team.exchange = stop  # type: ignore[method-assign]
    gather = Team.gather
    Team.gather = lambda self, x, what: gather(self, x, what) if "compared" in what else stop()  # type: ignore


def examples(rank: int, ranks: int) -> list[str]:
    """FSDP2 beside context parallelism, activation checkpoints and torch.compile."""
    from tests.distributed import training

    return training.compare(rank, ranks)


def shards(rank: int, ranks: int) -> list[str]:
    """FSDP2 alone."""
    from tests.distributed import sharded

    return sharded.compare(rank, ranks)


def models(rank: int, ranks: int) -> list[str]:
    """Models of transformers with windows and sinks."""
    from tests.distributed import language

    return language.compare(ranks)


def dtensors(rank: int, ranks: int) -> list[str]:
    """Results and gradients of DTensors, sharded by torch or dealt by split()."""
    torch.manual_seed(0)
    mesh, wrong = init_device_mesh("cpu", (ranks,)), []
    for layout, dim, order in (("bhsd", 2, "contiguous"), ("bshd", 1, "contiguous"), ("bhsd", 2, "zigzag")):
        whole = [torch.randn(2, 4, 8 * ranks, 16).transpose(1, 3 - dim) for _ in range(4)]
        spread = [
            distribute_tensor(x, mesh, [Shard(dim)])
            if order == "contiguous"
            else DTensor.from_local(parallel.split(x, mesh=mesh, dim=dim), mesh, [Shard(dim)])
            for x in whole
        ]
        leaves = [x.detach().requires_grad_() for x in spread[:3]]
        how: Any = {"layout": layout, "causal": True}
        out = parallel.attention(*leaves, order=order, **how)
        out.backward(spread[3])
        given = [x.clone().requires_grad_() for x in whole[:3]]
        right = polyflash.attention(*given, **how)
        right.backward(whole[3])
        for name, x, y in zip(
            ("out", "dq", "dk", "dv"), (out, *(x.grad for x in leaves)), (right, *(x.grad for x in given)),
            strict=True,
        ):  # fmt: skip
            if not isinstance(x, DTensor) or x.placements != (Shard(dim),) or x.shape != y.shape:
                wrong.append(f"{name} is {x}")
                continue
            got = parallel.restore(x.to_local().detach(), mesh=mesh, dim=dim, order=order)
            if not torch.allclose(got, y, atol=1e-5):
                wrong.append(f"{layout} {order}: {name} is off by {(got - y).abs().max():.3g}")
    q, k, v = spread[:3]
    for bad in ((q, k.to_local(), v), (q, k.redistribute(mesh, [Replicate()]), v)):
        try:
            parallel.attention(*bad)
            wrong.append("no error")
        except SpecError as error:
            wrong += [] if "placements" in str(error) else [str(error)]
    packed = [x.to_local()[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    rows = [DTensor.from_local(x, mesh, [Shard(0)]) for x in packed]
    cu = torch.tensor([0, 8 * ranks])
    result = parallel.attention_varlen(*rows, cu, cu, causal=True, return_lse=True)
    direct = parallel.attention_varlen(*packed, cu, cu, mesh=mesh, causal=True, return_lse=True)
    same = [torch.equal(a.to_local(), b) for a, b in zip(result, direct, strict=True)]
    return wrong if all(same) else [*wrong, f"packed DTensors differ: {same}"]


def diffusion(rank: int, ranks: int) -> list[str]:
    """A model of diffusers under its own context parallelism."""
    from tests.distributed import diffusion

    return diffusion.compare(ranks)


SUITES: dict[str, tuple[Callable[[int, int], list[str]], int]] = {
    "some cases": (some_cases, TIMEOUT_S),
    "every case": (every_case, TIMEOUT_S),
    "disagreements": (disagreements, TIMEOUT_S),
    "dies in a ring": (lost("dies", "ring", False), SHORT_S),
    "hangs in a ring": (lost("hangs", "ring", True), SHORT_S),
    "dies in a gather": (lost("dies", "all_gather", True), SHORT_S),
    "models": (models, TIMEOUT_S),
    "dtensors": (dtensors, TIMEOUT_S),
    "diffusion": (diffusion, TIMEOUT_S),
    "shards": (shards, TIMEOUT_S),
    "training": (examples, TIMEOUT_S),
}


MODULES = {
    "models": "language",
    "diffusion": "diffusion",
    "shards": "sharded",
    "training": "training",
}  # beside the suites here


def main() -> None:
    torch.set_num_threads(1)  # a process with other threads cannot fork
    for line in sys.stdin:
        suite, ranks, place = json.loads(line)
        if suite in MODULES:
            importlib.import_module(f"tests.distributed.{MODULES[suite]}")
        children = []
        for rank in range(ranks):
            children.append(os.fork())
            if not children[-1]:
                _be(rank, ranks, Path(place), suite)
        print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children], flush=True)


def _be(rank: int, ranks: int, place: Path, suite: str) -> None:
    """This process is a rank from now on; it ends here."""
    said = os.open(place / f"said-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    try:
        body, timeout = SUITES[suite]
        dist.init_process_group(
            "gloo", init_method=f"file://{place / 'rendezvous'}", rank=rank, world_size=ranks,
            timeout=timedelta(seconds=timeout),
        )  # fmt: skip
        print(json.dumps(body(rank, ranks)), flush=True)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # threads of gloo may let go of tensors while the interpreter ends, which aborts the process


if __name__ == "__main__":
    main()
