"""A character-level transformer, trained twice from one seed: with torch's attention and with polyflash's.

The text is Python's own language reference as shipped in the standard library (pydoc_data.topics; Copyright
Python Software Foundation, PSF License Agreement version 2), so nothing is downloaded. The model calls
torch's scaled_dot_product_attention and knows nothing of polyflash: `sdpa.enabled()` replaces it.

The two models take their steps in turns, on the same batches, so that both meet the same machine. The loss
curves are drawn over each other into build/demo/train_characters.png; a table says time and peak memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import polyflash
from polyflash.integrations import sdpa

ARMS = ("torch", "polyflash")
COLORS = {"torch": "#D55E00", "polyflash": "#0072B2"}  # Okabe and Ito's: told apart with any colour vision
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FOLDER = Path(__file__).resolve().parent.parent / "build" / "demo"


@dataclass(frozen=True)
class Settings:
    steps: int = 60
    seqlen: int = 512
    batch: int = 4
    width: int = 256
    heads: int = 4
    layers: int = 2
    dtype: str = "fp32"
    rate: float = 1e-3
    seed: int = 0


@dataclass
class Run:
    """Loss in nats per character and wall time in seconds of every step; growth of the peak in MiB."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_mib: float | None = None

    @property
    def median(self) -> float:
        """Median of the steps after the first, which compiles and allocates."""
        return statistics.median(self.seconds[1:] or self.seconds)


class Block(nn.Module):
    """Causal self-attention and a perceptron, each behind a norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, seqlen, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, seqlen, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seqlen, width))
        return x + self.perceptron(self.before_perceptron(x))


class Characters(nn.Module):
    """Logits of the next character at every place of (batch, seqlen) characters."""

    def __init__(self, alphabet: int, settings: Settings) -> None:
        super().__init__()
        self.characters = nn.Embedding(alphabet, settings.width)
        self.places = nn.Embedding(settings.seqlen, settings.width)
        self.blocks = nn.Sequential(*(Block(settings.width, settings.heads) for _ in range(settings.layers)))
        self.norm, self.head = nn.LayerNorm(settings.width), nn.Linear(settings.width, alphabet)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        return self.head(self.norm(self.blocks(self.characters(ids) + self.places(places))))


def text() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def encoded(whole: str) -> tuple[Tensor, int]:
    """The characters as int64 (length,), numbered in order, and how many different ones there are."""
    alphabet = {character: i for i, character in enumerate(sorted(set(whole)))}
    return torch.tensor([alphabet[character] for character in whole]), len(alphabet)


class Trainer:
    """One model, its optimiser, and its own sequence of batches; all from the seed."""

    def __init__(self, arm: str, settings: Settings) -> None:
        self.arm, self.settings = arm, settings
        self.ids, alphabet = encoded(text())
        torch.manual_seed(settings.seed)
        self.model = Characters(alphabet, settings)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.rate)
        self.batches = torch.Generator().manual_seed(settings.seed)

    def attention(self) -> AbstractContextManager[Any]:
        return sdpa.enabled() if self.arm == "polyflash" else nullcontext()

    def step(self, seqlen: int | None = None) -> float:
        """One step of the optimiser on a batch of random places of the text; the loss before it."""
        seqlen = seqlen or self.settings.seqlen
        starts = torch.randint(len(self.ids) - seqlen - 1, (self.settings.batch, 1), generator=self.batches)
        chosen = self.ids[starts + torch.arange(seqlen + 1)]
        narrow = torch.autocast("cpu", torch.bfloat16, enabled=self.settings.dtype == "bf16")
        with self.attention():
            with narrow:
                logits = self.model(chosen[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), chosen[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
        self.optimizer.step()
        return loss.item()


def train(settings: Settings, console: Console) -> dict[str, Run]:
    """Both arms in turns, the order changing every step."""
    trainers = {arm: Trainer(arm, settings) for arm in ARMS}
    runs = {arm: Run() for arm in ARMS}
    for i in track(range(settings.steps), "training", console=console, transient=True):
        for arm in ARMS if i % 2 == 0 else ARMS[::-1]:
            start = time.perf_counter()
            runs[arm].losses.append(trainers[arm].step())
            runs[arm].seconds.append(time.perf_counter() - start)
    return runs


def peak_of_steps(arm: str, settings: Settings) -> float | None:
    """MiB by which the resident peak of two whole steps lies above what was resident before, here;
    None where the system does not say. A short step goes first: its compiling is not the model's memory."""
    trainer = Trainer(arm, settings)
    trainer.step(seqlen=min(64, settings.seqlen))
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = _status("VmRSS")
        for _ in range(2):
            trainer.step()
        return (_status("VmHWM") - before) / 1024
    except OSError:
        return None


def _status(name: str) -> int:
    """KiB, from the kernel's account of this process."""
    return int(Path("/proc/self/status").read_text(encoding="ascii").partition(f"{name}:")[2].split()[0])


def peak_in_child(arm: str, settings: Settings) -> float | None:
    """`peak_of_steps` in a process of its own."""
    command = [sys.executable, __file__, "--peak-of", arm, *_as_flags(settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _as_flags(settings: Settings) -> list[str]:
    return [part for name, value in asdict(settings).items() for part in (f"--{name}", str(value))]


def report(settings: Settings, runs: dict[str, Run], console: Console) -> float:
    """The table; returns the largest difference between the two losses of a step."""
    table = Table(title=f"{settings.layers} layers, width {settings.width}, {settings.heads} heads, "
                        f"{settings.batch} × {settings.seqlen} characters, {settings.dtype}, "
                        f"{torch.get_num_threads()} threads")  # fmt: skip
    for column in ("attention", "first loss", "last 10", "ms per step", "middle half", "peak MiB"):
        table.add_column(column, justify="left" if column == "attention" else "right")
    for arm, run in runs.items():
        times = sorted(run.seconds[1:] or run.seconds)
        quarter = len(times) // 4
        table.add_row(
            arm,
            f"{run.losses[0]:.4f}",
            f"{statistics.fmean(run.losses[-10:]):.4f}",
            f"{run.median * 1e3:.1f}",
            f"{times[quarter] * 1e3:.1f} to {times[-1 - quarter] * 1e3:.1f}",
            "-" if run.peak_mib is None else f"{run.peak_mib:.0f}",
        )
    console.print(table)
    pairs = zip(*(run.losses for run in runs.values()), strict=True)
    apart = max(abs(a - b) for a, b in pairs)
    console.print(
        f"torch / polyflash, time per step: {runs['torch'].median / runs['polyflash'].median:.2f}; "
        f"the losses of a step differ by at most {apart:.1e}",
        soft_wrap=True,
        highlight=False,
    )
    return apart


def plan(settings: Settings) -> str:
    """Names the kernels that run the model's attention here."""
    shape = (settings.batch, settings.heads, settings.seqlen, settings.width // settings.heads)
    q = torch.empty(shape, dtype=DTYPES[settings.dtype], requires_grad=True)
    chosen = polyflash.explain(q, q, q, causal="top_left")
    names = [step.chosen.name for step in (chosen, chosen.backward) if step is not None and step.chosen]
    return " and ".join(names)


def plot(settings: Settings, runs: dict[str, Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=(3, 1), layout="constrained"
    )
    steps = range(1, settings.steps + 1)
    for arm, width, style in (("torch", 5.0, "-"), ("polyflash", 1.5, "--")):
        label = f"{arm}: {runs[arm].median * 1e3:.0f} ms per step"
        alpha = 0.45 if arm == "torch" else 1.0
        above.plot(steps, runs[arm].losses, style, color=COLORS[arm], lw=width, alpha=alpha, label=label)
    apart = [abs(a - b) for a, b in zip(runs["torch"].losses, runs["polyflash"].losses, strict=True)]
    below.semilogy(steps, [max(x, 1e-9) for x in apart], color="#333333")
    above.set_ylabel("loss, nats per character")
    above.legend(frameon=False)
    above.set_title(
        f"One model, seed and text: {settings.layers} layers, {settings.seqlen} characters, {settings.dtype}"
    )
    below.set_ylabel("|difference|")
    below.set_xlabel("step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in asdict(Settings()).items():
        choices = tuple(DTYPES) if name == "dtype" else None
        parser.add_argument(f"--{name}", type=type(value), default=value, choices=choices,
                            help=f"default {value}")  # fmt: skip
    parser.add_argument(
        "--plot", type=Path, default=FOLDER / "train_characters.png", help="where the curves go"
    )
    parser.add_argument("--json", type=Path, help="write settings, losses, times and peaks there")
    parser.add_argument("--no-peak", action="store_true", help="do not measure memory")
    parser.add_argument("--peak-of", choices=ARMS, help=argparse.SUPPRESS)
    chosen = parser.parse_args(words)
    least = min(chosen.steps, chosen.seqlen, chosen.batch, chosen.width, chosen.heads, chosen.layers)
    if least < 1 or chosen.width % chosen.heads:
        parser.error("steps, seqlen, batch, width, heads and layers are 1 or more, and heads divides width")
    return chosen


def main(words: list[str]) -> int:
    chosen = arguments(words)
    settings = Settings(**{name: getattr(chosen, name) for name in asdict(Settings())})
    if chosen.peak_of:
        print(json.dumps(peak_of_steps(chosen.peak_of, settings)))
        return 0
    console = Console()
    console.print(
        f"{len(text()):,} characters of Python's language reference; {plan(settings)}", highlight=False
    )
    runs = train(settings, console)
    if not chosen.no_peak:
        for arm, run in runs.items():
            run.peak_mib = peak_in_child(arm, settings)
    report(settings, runs, console)
    plot(settings, runs, chosen.plot)
    console.print(f"curves: {chosen.plot}", highlight=False, soft_wrap=True)
    if chosen.json:
        results = {"settings": asdict(settings)} | {arm: asdict(run) for arm, run in runs.items()}
        chosen.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
