"""A small Llama, seeded and never downloaded, generates from a paged cache what it generates with torch SDPA.

Prompts of different lengths in one batch, greedy and with beams: the tokens must be equal, and a table says
how many pages they took and how many they would have taken unshared. With --plot the speed of single decode
steps is measured over the context length, both caches in turns in one process on the same keys, and drawn.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import polyflash
from polyflash.bench import Arm, calibrate, compare
from polyflash.integrations.transformers_cache import PagedCache, register
from polyflash.target import cpu_model, detect

ARMS = {"torch": "sdpa", "polyflash": "poly"}
COLORS = {"torch": "#D55E00", "polyflash": "#0072B2"}  # Okabe and Ito's: told apart with any colour vision
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROMPTS = (23, 9, 1)  # tokens of each, padded at the left
VOCABULARY = 1000


@dataclass(frozen=True)
class Settings:
    tokens: int = 48
    beams: int = 4
    layers: int = 4
    width: int = 512
    heads: int = 8
    kv_heads: int = 2
    page_size: int = 16
    dtype: str = "fp32"
    seed: int = 0
    seconds: float = 2.0
    contexts: str = "256,1024,4096,16384,32768"

    @property
    def lengths(self) -> list[int]:
        return [int(n) for n in self.contexts.split(",")]


@dataclass
class Generated:
    """One generate() call by both arms. `pages` are those in use at its end, `unshared` without forks."""

    how: str
    equal: bool
    tokens: int
    seconds: dict[str, float]
    pages: int
    unshared: int


@dataclass
class Point:
    """Decode steps of one request at one context length. `difference`: relative L2 of the logits."""

    context: int
    rates: dict[str, float]
    difference: float
    contended: bool


def model_of(settings: Settings) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=settings.width,
        intermediate_size=2 * settings.width,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=2 * max(settings.lengths),
        initializer_range=0.06,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    torch.manual_seed(settings.seed)
    return transformers.LlamaForCausalLM(config).to(DTYPES[settings.dtype]).eval()


def prompts(settings: Settings) -> dict[str, Tensor]:
    """Random token ids, padded at the left, and the mask that says so."""
    generator = torch.Generator().manual_seed(settings.seed)
    ids = torch.randint(3, VOCABULARY, (len(PROMPTS), max(PROMPTS)), generator=generator)
    live = torch.arange(max(PROMPTS)) >= max(PROMPTS) - torch.tensor(PROMPTS)[:, None]
    return {"input_ids": ids.masked_fill(~live, 0), "attention_mask": live.long()}


def generated(model: transformers.LlamaForCausalLM, settings: Settings, how: str) -> Generated:
    """Greedily or with beams, by torch SDPA and a dynamic cache, and from pages."""
    inputs, seconds, ids = prompts(settings), {}, {}
    beams = settings.beams if how == "beams" else 1
    rows = len(PROMPTS) * beams
    whole = max(PROMPTS) + settings.tokens
    per_entry = -(-whole // settings.page_size)
    pages = 0
    for arm, implementation in ARMS.items():
        model.set_attn_implementation(implementation)
        options: dict[str, Any] = {"max_new_tokens": settings.tokens, "do_sample": False, "num_beams": beams}
        if arm == "polyflash":
            cache = PagedCache.of(
                model, 2 * rows * per_entry * settings.page_size, page_size=settings.page_size
            )
            options["past_key_values"] = cache
            with torch.inference_mode():  # kernels are compiled once, and not while the clock runs
                model(**inputs, past_key_values=cache)
                model(inputs["input_ids"][:, :1], past_key_values=cache)
            cache.reset()
        start = time.perf_counter()
        ids[arm] = model.generate(**inputs, **options)
        seconds[arm] = time.perf_counter() - start
        if arm == "polyflash":
            pages = cache.cache.num_pages - cache.cache.num_free_pages
            cache.reset()
    unshared = rows * -(-(whole - 1) // settings.page_size)  # the last token is never cached
    equal = torch.equal(ids["torch"], ids["polyflash"])
    return Generated(how, equal, settings.tokens, seconds, pages, unshared)


@torch.inference_mode()
def measured(model: transformers.LlamaForCausalLM, settings: Settings, context: int, speed: Any) -> Point:
    """A cache of `context` random keys, one token decoded and taken back, again and again."""
    caches: dict[str, Any] = {
        "torch": transformers.DynamicCache(config=model.config),
        "polyflash": PagedCache.of(model, context + settings.page_size, page_size=settings.page_size),
    }
    generator = torch.Generator().manual_seed(context)
    shape = (1, settings.kv_heads, context, settings.width // settings.heads)
    for layer in range(settings.layers):
        k, v = (torch.randn(shape, generator=generator).to(model.dtype) for _ in range(2))
        for cache in caches.values():
            cache.update(k, v, layer)
    token = torch.full((1, 1), 7)

    def step(arm: str) -> Tensor:
        model.set_attn_implementation(ARMS[arm])
        logits = model(token, past_key_values=caches[arm]).logits
        caches[arm].crop(-1)
        return logits

    theirs, ours = step("torch").double(), step("polyflash").double()
    arms = [Arm(arm, lambda arm=arm: step(arm)) for arm in ARMS]
    comparison = compare(arms, seconds=settings.seconds, speed=speed)
    rates = {arm: 1 / comparison.summary(arm).median for arm in ARMS}
    return Point(context, rates, float((ours - theirs).norm() / theirs.norm()), comparison.contended)


def draw(settings: Settings, points: list[Point], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 5), layout="constrained")
    contexts = [p.context for p in points]
    for arm, color in COLORS.items():
        rates = [p.rates[arm] for p in points]
        label = "torch SDPA, dynamic cache" if arm == "torch" else "polyflash, paged cache"
        axis.plot(contexts, rates, color=color, lw=1.8, label=label)
        fill = ["white" if p.contended else color for p in points]
        axis.scatter(contexts, rates, s=34, c=fill, edgecolors=color, linewidths=1.5, zorder=3)
    axis.set_xscale("log", base=2)
    axis.set_xticks(contexts, [str(n) for n in contexts])
    axis.set_ylim(0, None)
    axis.set_xlabel("context length (tokens)")
    axis.set_ylabel("decode throughput (tokens/s), higher is better")
    axis.grid(color="#e6e6e6")
    axis.set_axisbelow(True)
    axis.legend(frameon=False)
    axis.set_title(
        f"One request of a Llama with {settings.layers} layers, {settings.heads} query and "
        f"{settings.kv_heads} key/value heads, {settings.dtype}",
        loc="left",
        fontsize=10,
    )
    figure.supxlabel(about(), x=0.01, ha="left", fontsize=8, color="#444444")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def about() -> str:
    return (
        f"{cpu_model()}, {torch.get_num_threads()} threads. polyflash {polyflash.__version__}, torch "
        f"{torch.__version__}, transformers {transformers.__version__}. Medians of steps taken in turns; "
        "hollow: contended."
    )


def report(results: list[Generated], points: list[Point], console: Console) -> None:
    table = Table("", "tokens", "torch s", "ours s", "pages", "unshared", box=None, pad_edge=False)
    for row in results:
        said = "same tokens" if row.equal else "[red]OTHER TOKENS[/red]"
        times = (f"{row.seconds[arm]:.2f}" for arm in ARMS)
        table.add_row(f"{row.how}: {said}", str(row.tokens), *times, str(row.pages), str(row.unshared))
    console.print(table)
    if not points:
        return
    table = Table("context", "torch/s", "ours/s", "ratio", "logits differ by", "", box=None, pad_edge=False)
    for p in points:
        theirs, ours = p.rates["torch"], p.rates["polyflash"]
        note = "contended" if p.contended else ""
        table.add_row(
            str(p.context),
            f"{theirs:.1f}",
            f"{ours:.1f}",
            f"{ours / theirs:.2f}",
            f"{p.difference:.0e}",
            note,
        )
    console.print(table)


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in asdict(Settings()).items():
        choices = tuple(DTYPES) if name == "dtype" else None
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(value), default=value, choices=choices, help=f"default {value}")
    parser.add_argument("--plot", type=Path, help="measure decode steps and draw them there, a PNG")
    parser.add_argument("--json", type=Path, help="write all results there")
    chosen = parser.parse_args(words)
    least = min(chosen.tokens, chosen.beams, chosen.layers, chosen.heads, chosen.kv_heads, chosen.page_size)
    if least < 1 or chosen.width % (2 * chosen.heads) or chosen.heads % chosen.kv_heads:
        parser.error("sizes are 1 or more, heads divides width to an even number, kv-heads divides heads")
    if not all(n.isdigit() and int(n) for n in chosen.contexts.split(",")):
        parser.error("contexts are numbers with commas between")
    return chosen


def main(words: list[str]) -> int:
    chosen = arguments(words)
    settings = Settings(**{name: getattr(chosen, name) for name in asdict(Settings())})
    console = Console()
    register()
    model = model_of(settings)
    results = [generated(model, settings, how) for how in ("greedy", "beams")]
    points = []
    if chosen.plot:
        calibration = calibrate(detect("cpu"))
        speed = calibration.speed if calibration else None
        lengths = track(settings.lengths, "measuring", console=console, transient=True)
        points = [measured(model, settings, context, speed) for context in lengths]
    report(results, points, console)
    if chosen.plot:
        draw(settings, points, chosen.plot)
        console.print(f"plot: {chosen.plot}", highlight=False, soft_wrap=True)
    if chosen.json:
        told = {"settings": asdict(settings), "generated": [asdict(x) for x in results]}
        chosen.json.write_text(json.dumps(told | {"points": [asdict(p) for p in points]}, indent=1), "utf-8")
    return 0 if all(row.equal for row in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
