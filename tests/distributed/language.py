"""Language models of transformers whose tokens are spread over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

from polyflash import parallel
from polyflash.integrations.transformers.shards import register

ROWS, WINDOW = 41, 9
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 128,
    "sliding_window": WINDOW, "attention_dropout": 0.0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Mistral": {},
    "Gemma3": {"config": "Gemma3TextConfig", "layer_types": ["sliding_attention", "full_attention"]},
    "GptOss": {"num_local_experts": 2, "num_experts_per_tok": 1},
}


def build(name: str, implementation: str) -> Any:
    more = dict(MODELS[name])
    config = getattr(transformers, more.pop("config", f"{name}Config"))(**SIZES, **more)
    torch.manual_seed(0)
    config._attn_implementation = implementation
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(config)
    with torch.no_grad():
        for at, x in model.named_parameters():
            if "sinks" in at:
                x.copy_(torch.linspace(-1, 1, x.numel()))
    return model.train()


def compare(ranks: int) -> list[str]:
    """Logits, and the gradients of every parameter, of a model on all ranks and of one on one."""
    mesh = init_device_mesh("cpu", (ranks,))
    names = {order: register(f"poly_{order}", mesh=mesh, order=order) for order in ("zigzag", "contiguous")}
    tokens = torch.randint(64, (2, ROWS), generator=torch.Generator().manual_seed(1))
    places, wrong = torch.arange(ROWS)[None], []
    for name in MODELS:
        whole = build(name, "eager")
        logits = whole(input_ids=tokens, position_ids=places, use_cache=False).logits
        logits.square().sum().backward()
        for order, implementation in names.items():
            own = build(name, implementation)
            own.load_state_dict(whole.state_dict())
            ids, at = (parallel.split(x, mesh=mesh, dim=1, order=order) for x in (tokens, places))
            some = own(input_ids=ids, position_ids=at, use_cache=False).logits
            some.square().sum().backward()
            got = parallel.restore(some.detach(), mesh=mesh, dim=1, order=order)
            if not torch.allclose(got, logits, atol=1e-4):
                wrong.append(f"{name} {order}: logits are off by {float((got - logits).abs().max()):.3g}")
            for (at_, a), b in zip(whole.named_parameters(), own.parameters(), strict=True):
                mine = torch.zeros_like(b) if b.grad is None else b.grad
                dist.all_reduce(mine)
                if a.grad is not None and not torch.allclose(mine, a.grad, atol=1e-3, rtol=1e-3):
                    wrong.append(f"{name} {order}: {at_} is off by {float((mine - a.grad).abs().max()):.3g}")
        try:
            own(input_ids=ids, position_ids=at * 0, use_cache=False)
            wrong.append(f"{name}: packed documents taken")
        except NotImplementedError:
            pass
    return wrong
