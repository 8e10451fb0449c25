"""A small Llama and a small diffusion transformer over quantised keys and values: what changes, and the time.

Weights are random and fixed by --seed, nothing is downloaded. Every attention of both models runs polyflash:
exact, or over codes of its keys and values that are made in that very call; or torch's own, which says what
another order of rounding does to such a model. Tables say how far logits and
images drift, how often the next token is the same, how many tokens of a text are, and how quick the whole
model is beside the exact one: the median of --seeds models, the least and the most.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import polyflash
from polyflash.bench import Arm, compare
from polyflash.quant import NAMED, Scheme

INTEGERS = Scheme(compute="int8", smoothing="mean"), Scheme(compute="int8")
ARMS = {"exact": None, "torch": None, "int8": NAMED["int8-smooth"], "int8 products": INTEGERS}
ARMS |= {name: NAMED[name] for name in ("fp8", "int4")}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
VOCABULARY = 1000


@dataclass(frozen=True)
class Settings:
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    tokens: int = 1024
    generated: int = 48
    image: int = 64
    steps: int = 6
    dtype: str = "fp32"
    seed: int = 0
    seeds: int = 3
    seconds: float = 2.0


class Attention(TorchFunctionMode):
    """Runs torch's attention calls on polyflash, over codes of k and v if it has schemes for them."""

    def __init__(self, pair: tuple[Scheme, Scheme] | None) -> None:
        super().__init__()
        self.pair, self.ran = pair, ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self.attend(*args, **(kwargs or {}))

    def attend(
        self, query: Tensor, key: Any, value: Any, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if self.pair is not None:
            key, value = (polyflash.quantize(x, s) for x, s in zip((key, value), self.pair, strict=True))
        options: dict[str, Any] = {
            "causal": "top_left" if is_causal else False,
            "mask": attn_mask,
            "scale": scale,
        }
        if not self.ran:
            plan = polyflash.explain(query, key, value, **options)
            notes = [] if self.pair is None else [re.sub(": [0-9.]+ MB", "", plan.notes[-1])]
            self.ran = ", ".join((plan.chosen.name if plan.chosen else "nothing", *notes))
        return polyflash.attention(query, key, value, **options)


def drift(found: Tensor, exact: Tensor) -> float:
    """Relative L2 difference."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


class Llama:
    """Logits of random tokens, and the tokens that it generates after the first of them."""

    def __init__(self, settings: Settings, seed: int) -> None:
        width = settings.heads * settings.head_dim
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, initializer_range=0.06,
            num_hidden_layers=settings.layers, num_attention_heads=settings.heads,
            num_key_value_heads=settings.kv_heads, max_position_embeddings=settings.tokens + 4096,
            pad_token_id=0, bos_token_id=1, eos_token_id=None, attn_implementation="sdpa",
        )  # fmt: skip
        torch.manual_seed(seed)
        self.model = transformers.LlamaForCausalLM(config).to(DTYPES[settings.dtype]).eval()
        self.ids, self.new = torch.randint(3, VOCABULARY, (1, settings.tokens)), settings.generated

    def once(self) -> Tensor:
        return self.model(self.ids, use_cache=False).logits  # type: ignore[no-any-return]

    def results(self) -> tuple[Tensor, ...]:
        prompt = self.ids[:, : min(64, self.ids.shape[1])]
        text = self.model.generate(prompt, max_new_tokens=self.new, do_sample=False)
        return self.once(), text[:, prompt.shape[1] :]

    @staticmethod
    def figures(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> dict[str, float]:
        same = (found[0].argmax(-1) == exact[0].argmax(-1)).double().mean()
        text = (found[1] == exact[1]).int().cumprod(-1).sum()
        return {"drift": drift(found[0], exact[0]), "same next": float(same), "same text": int(text)}


class Diffusion:
    """A transformer over patches of an image (DiT), by itself and in a few steps of DDIM."""

    def __init__(self, settings: Settings, seed: int) -> None:
        torch.manual_seed(seed)
        model = diffusers.DiTTransformer2DModel(
            num_attention_heads=settings.heads, attention_head_dim=settings.head_dim, in_channels=4,
            num_layers=settings.layers, sample_size=settings.image, patch_size=2, num_embeds_ada_norm=10,
            norm_num_groups=1,
        )  # fmt: skip
        with torch.no_grad():  # attention far from uniform
            for name, weight in model.named_parameters():
                if name.endswith(("to_q.weight", "to_k.weight")):
                    weight.mul_(4)
        self.model = model.to(DTYPES[settings.dtype]).eval()
        self.noise = torch.randn(1, 4, settings.image, settings.image).to(DTYPES[settings.dtype])
        self.scheduler = diffusers.DDIMScheduler()
        self.scheduler.set_timesteps(settings.steps)

    def predicted(self, x: Tensor, step: Tensor) -> Tensor:
        return self.model(x, step[None], torch.tensor([3])).sample  # type: ignore[no-any-return]

    def once(self) -> Tensor:
        return self.predicted(self.noise, torch.tensor(500))

    def results(self) -> tuple[Tensor, ...]:
        x = self.noise
        for step in self.scheduler.timesteps:
            x = self.scheduler.step(self.predicted(x, step), step, x).prev_sample
        return (x,)

    @staticmethod
    def figures(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> dict[str, float]:
        return {"drift": drift(found[0], exact[0])}


MODELS = {"Llama": Llama, "diffusion transformer": Diffusion}


@torch.inference_mode()
def measured(kind: str, settings: Settings, seed: int) -> list[dict[str, Any]]:
    """Every arm of one model: its figures beside the exact arm's, and the exact arm's time over its time."""
    model = MODELS[kind](settings, seed)
    modes: dict[str, Any] = {
        arm: nullcontext() if arm == "torch" else Attention(pair) for arm, pair in ARMS.items()
    }
    results = {}
    for arm, mode in modes.items():
        with mode:
            results[arm] = model.results()
            model.once()

    def call(arm: str) -> None:
        with modes[arm]:
            model.once()

    arms = [Arm(arm, lambda arm=arm: call(arm)) for arm in ARMS]
    times = compare(arms, seconds=settings.seconds)
    return [
        {
            "model": kind,
            "arm": arm,
            "seed": seed,
            "ran": getattr(modes[arm], "ran", "its own"),
            "seconds": times.summary(arm).median,
        }
        | {"speed": times.ratio("exact", arm), "contended": times.contended}
        | model.figures(results[arm], results["exact"])
        for arm in ARMS
    ]


def report(rows: list[dict[str, Any]], console: Console) -> None:
    for kind in MODELS:
        of_kind = [row for row in rows if row["model"] == kind]
        names = [name for name in ("drift", "same next", "same text", "speed") if name in of_kind[0]]
        table = Table(kind, *names, box=None, pad_edge=False)
        for arm in ARMS:
            of_arm = [row for row in of_kind if row["arm"] == arm]
            table.add_row(arm, *(spread([row[name] for row in of_arm]) for name in names))
        console.print(table, "")
    for arm in ARMS:
        console.print(f"{arm}: {'; '.join(sorted({row['ran'] for row in rows if row['arm'] == arm}))}")
    if any(row["contended"] for row in rows):
        console.print("[yellow]contended: shared cores or widely spread times; they mean little[/yellow]")


def spread(values: list[float]) -> str:
    """The median, and the least and the most."""
    middle, least, most = (
        f"{x:.1e}".replace("e-0", "e-") if 0 < x < 0.1 else f"{x:.2f}" if isinstance(x, float) else str(x)
        for x in (sorted(values)[len(values) // 2], min(values), max(values))
    )
    return f"{middle} ({least}, {most})"


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in asdict(Settings()).items():
        choices = tuple(DTYPES) if name == "dtype" else None
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(value), default=value, choices=choices, help=f"default {value}")
    parser.add_argument("--json", type=Path, help="write all figures there")
    chosen = parser.parse_args(words)
    if chosen.heads % chosen.kv_heads or chosen.head_dim % 2 or chosen.image % 2 or chosen.seeds < 1:
        parser.error("kv-heads divides heads, head-dim and image are even, seeds is 1 or more")
    return chosen


def main(words: list[str]) -> int:
    """0 if the exact arm is exact."""
    chosen = arguments(words)
    settings = Settings(**{name: getattr(chosen, name) for name in asdict(Settings())})
    console = Console(highlight=False)
    transformers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.set_verbosity_error()
    turns = [(kind, settings.seed + n) for kind in MODELS for n in range(settings.seeds)]
    rows = []
    for kind, seed in track(turns, "measuring", console=console, transient=True):
        rows += measured(kind, settings, seed)
    report(rows, console)
    if chosen.json:
        chosen.json.write_text(json.dumps({"settings": asdict(settings), "rows": rows}, indent=1), "utf-8")
    return 0 if all(row["drift"] == 0 for row in rows if row["arm"] == "exact") else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
