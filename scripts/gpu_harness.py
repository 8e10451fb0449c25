"""How `gpu_doors.py` looks behind a door: which kernels run there, and whether their answers are right."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

FORWARD, BACKWARD = ("attend",), ("attend", "make_dkv")
GLUON = ("attend_sm90", "differentiate_sm90")
THEIRS = ("flash_fwd", "flash_bwd", "fmha", "cudnn_generated")  # in the names of kernels behind torch's SDPA
OPS = {"attend": "polyflash::attention", "make_dkv": "polyflash::attention_backward"}
FUSED = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)

Call = Callable[[torch.dtype], list[Tensor]]  # a result and its gradients: the same values in any dtype


class Skip(Exception):
    """The door has no place here; its text says why."""


class Where:
    """The device, how large problems are, and which of our kernels ran."""

    def __init__(self, device: str, backend: str | None) -> None:
        self.device, self.backend = torch.device(device), backend
        self.is_cuda = self.device.type == "cuda"
        self.rows = 384 if self.is_cuda else 24
        self.seen: set[str] = set()

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The same values at every call with one seed, whatever the default device is."""
        return torch.randn(shape, device="cpu").to(self.device, dtype)

    @contextlib.contextmanager
    def runs(self, kernels: Sequence[str]) -> Iterator[None]:
        """Within, these kernels run, and no attention of torch's."""
        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] if self.is_cuda else []
        with torch.profiler.profile(activities=kinds) as profile:
            yield
            if self.is_cuda:
                torch.cuda.synchronize(self.device)
        names = {event.name for event in profile.events()}
        wanted = set(kernels) if self.is_cuda else {OPS[name] for name in kernels if name in OPS}
        missing = {name for name in wanted if not any(n == name or n.startswith(name + "_") for n in names)}
        if missing:
            ran = ", ".join(sorted(names))[:900]
            raise AssertionError(f"{', '.join(sorted(missing))} did not run; ran: {ran}")
        theirs = sorted(name for name in names if any(word in name for word in THEIRS))
        if theirs:
            raise AssertionError(f"torch's own attention ran: {theirs[0]}")
        self.seen |= wanted


class Expected(NamedTuple):
    """What a call gives in float64, and in its own dtype by each of torch's kernels that takes it."""

    exact: list[Tensor]
    samples: list[list[Tensor]]

    @classmethod
    def of(cls, call: Call, dtype: torch.dtype) -> Expected:
        with sdpa_kernel(SDPBackend.MATH):
            exact, samples = call(torch.float64), [call(dtype)]
        for kernel in FUSED:
            with contextlib.suppress(RuntimeError), sdpa_kernel(kernel), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                samples.append(call(dtype))
        return cls(exact, samples)

    def hold(self, what: str, got: Sequence[Tensor]) -> None:
        """A result, and the gradients after it."""
        for i, x in enumerate(got):
            label = f"{what}, gradient {i}" if i else what
            _hold(label, x, self.exact[i], [sample[i] for sample in self.samples], 3 if i else 2)


def _hold(what: str, x: Tensor, exact: Tensor, samples: Sequence[Tensor], ratio: float) -> None:
    """The relative rule of docs/testing.md: the largest and the mean error."""
    unit = 2 * torch.finfo(x.dtype).eps * float(exact.abs().max())
    errors = [(y.double() - exact.double()).abs() for y in (x, *samples)]
    if not bool(errors[0].isfinite().all()):
        raise AssertionError(f"{what}: not finite")
    rules = ("largest", Tensor.max, ratio, unit), ("mean", Tensor.mean, 1.5, unit / 8)
    for name, pick, times, rest in rules:
        ours, theirs = float(pick(errors[0])), max(float(pick(e)) for e in errors[1:])
        if not ours <= times * theirs + rest:
            says = f"{name} error {ours:.2e}, torch's {theirs:.2e}, rounding {unit:.2e}"
            raise AssertionError(f"{what}: {says}")


def compare(w: Where, what: str, call: Call, dtype: torch.dtype, through: Callable[[], Any]) -> None:
    """A call that gives a result and gradients, within a door and without."""
    expected = Expected.of(call, dtype)
    with through(), w.runs(BACKWARD):
        got = call(dtype)
    expected.hold(what, got)


def attention_call(w: Where, heads: tuple[int, int], **options: Any) -> Call:
    """torch's function and its gradients."""
    drawn = [w.normal(2, h, w.rows, 64) for h in (heads[0], heads[1], heads[1], heads[0])]

    def cast(x: Any, dtype: torch.dtype) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    def call(dtype: torch.dtype) -> list[Tensor]:
        q, k, v = (x.to(dtype).requires_grad_() for x in drawn[:3])
        given = {name: cast(x, dtype) for name, x in options.items()}
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=heads[0] != heads[1], **given)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), drawn[3].to(dtype))]

    return call


def module_call(module: torch.nn.Module, run: Callable[[Any], Tensor]) -> Call:
    """A module's result and the gradients of its parameters, with the same weights in any dtype."""

    def call(dtype: torch.dtype) -> list[Tensor]:
        mine = copy.deepcopy(module).to(dtype)
        out = run(mine)
        weights = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float64).view(out.shape)
        used = [p for p in mine.parameters() if p.requires_grad]
        grads = torch.autograd.grad((out * weights.to(out.dtype)).sum(), used, allow_unused=True)
        return [out.detach(), *(g for g in grads if g is not None)]

    return call


def hold_rows(what: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """q (rows, heads, head_dim) at the end of k (tokens, kv_heads, head_dim)."""
    rows, count = q.shape[0], k.shape[0]
    seen = torch.ones(rows, count, dtype=torch.bool, device=q.device).tril(count - rows)

    def call(dtype: torch.dtype) -> list[Tensor]:
        args = (x.transpose(0, 1)[None].to(dtype) for x in (q, k, v))
        return [F.scaled_dot_product_attention(*args, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)]

    Expected.of(call, q.dtype).hold(what, [out])


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Within, what would wait for the GPU raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
