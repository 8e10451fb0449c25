"""Peak memory and time of one forward pass over a long padded prompt, or of its mask alone.

    python -m tests.integrations.mask_memory [tokens] [model ...]

Prints a row per model, attention and part. Each measurement is a process of its own: the peak is the largest
resident size since its model and inputs were built, less the size it had then.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

MODELS = ("Llama", "Mistral")
MIB = 1 << 20
ROOT = Path(__file__).parents[2]


def resident() -> int:
    """Bytes of this process in memory now."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()


def forget_peak() -> None:
    """The kernel's record of the largest resident size starts again from here."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def model_of(name: str, implementation: str, tokens: int) -> Any:
    """One or two layers with windows of 1024 keys, in inference mode and float32."""
    import transformers

    from polyflash.integrations.transformers import register
    from tests.integrations.models import RECIPES

    register()
    recipe = RECIPES[name]
    changes = {"max_position_embeddings": tokens, "num_hidden_layers": 1, "head_dim": 32}
    changes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    if "sliding_window" in recipe.config:
        changes["sliding_window"] = 1024
    if "layer_types" in recipe.config:
        changes |= {"layer_types": recipe.config["layer_types"], "num_hidden_layers": 2}
    config = getattr(transformers, f"{name}Config")(**(recipe.config | changes))
    return (
        getattr(transformers, f"{name}Model")._from_config(config, attn_implementation=implementation).eval()
    )


def measure(name: str, implementation: str, part: str, tokens: int) -> dict[str, float]:
    """{"mib": peak growth, "seconds": ...} of "mask" or "forward" for a prompt padded at its left."""
    from transformers.masking_utils import create_masks_for_generate

    model = model_of(name, implementation, tokens)
    ids = torch.ones(1, tokens, dtype=torch.int64)
    mask = torch.ones(1, tokens, dtype=torch.int64)
    mask[:, :100] = 0
    short = {"input_ids": ids[:, :64], "attention_mask": mask[:, 64:128]}
    with torch.inference_mode():
        model(**short, use_cache=False)  # what is compiled or allocated once
        embedded = torch.empty(1, tokens, 64)
        forget_peak()
        before, start = resident(), time.perf_counter()
        if part == "mask":
            kept = create_masks_for_generate(model.config, embedded, mask, None)
        else:
            kept = model(ids, attention_mask=mask, use_cache=False)
        seconds = time.perf_counter() - start
    del kept
    return {"mib": max(0, peak() - before) / MIB, "seconds": seconds}


def measured(name: str, implementation: str, part: str, tokens: int) -> dict[str, float]:
    """`measure()` in a process of its own."""
    arguments = ["one", name, implementation, part, str(tokens)]
    command = [sys.executable, "-m", "tests.integrations.mask_memory", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["one"]:
        name, implementation, part, tokens = arguments[1:]
        print(json.dumps(measure(name, implementation, part, int(tokens))))
        return
    tokens = int(arguments[0]) if arguments else 32768
    print(f"{tokens} tokens, 100 of them padding at the left, float32")
    for name in arguments[1:] or MODELS:
        for part in ("mask", "forward"):
            for implementation in ("sdpa", "poly"):
                got = measured(name, implementation, part, tokens)
                print(f"{name:<9}{part:<9}{implementation:<6}{got['mib']:10.1f} MiB{got['seconds']:9.3f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
