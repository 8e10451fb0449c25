"""Tiny random models from configs, one per feature of attention, and what to compare them with.

Weights are large (`initializer_range`), so that attention is far from uniform and a wrong mask, scale or sink
shows in the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.device import generator

WINDOW = 7
TEXT = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "pad_token_id": 0,
}
DECODER = {**TEXT, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": None}
HEAD16 = {**DECODER, "head_dim": 16}
OF_ATTENTION = ("attention_dropout", "attention_probs_dropout_prob")
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}


@dataclass(frozen=True)
class Recipe:
    """How to build one model, and who else of transformers can run it."""

    name: str
    head: str
    config: dict[str, Any]
    peers: tuple[str, ...] = ("sdpa", "eager")
    kind: str = "decoder"  # "encoder", "vision", "text to text", "speech to text"
    exercises: str = ""
    config_class: str = ""
    generates: tuple[str, ...] = ("dynamic", "static")
    experts: bool = False


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("Llama", "ForCausalLM", DECODER, exercises="causal, grouped heads"),
        Recipe(
            "Mistral", "ForCausalLM", {**DECODER, "sliding_window": WINDOW}, exercises="window in every layer"
        ),
        Recipe("Qwen2", "ForCausalLM", DECODER, exercises="biased projections"),
        Recipe("Qwen3", "ForCausalLM", HEAD16, exercises="normed queries and keys"),
        Recipe(
            "Gemma2",
            "ForCausalLM",
            {**HEAD16, **LAYERS, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4},
            peers=("eager",),
            exercises="softcap, window in every other layer, scale of its own",
        ),
        Recipe(
            "Gemma3",
            "ForCausalLM",
            {**HEAD16, **LAYERS, "query_pre_attn_scalar": 16},
            config_class="Gemma3TextConfig",
            exercises="two mask objects per call, by layer type",
        ),
        Recipe(
            "GptOss",
            "ForCausalLM",
            # All experts: where two tie, rounding would choose, and half precision differ by a whole expert.
            {**HEAD16, **LAYERS, "num_local_experts": 4, "num_experts_per_tok": 4},
            peers=("eager",),
            experts=True,
            exercises="sinks, window",
        ),
        Recipe(
            "Llama4",
            "ForCausalLM",
            {
                **HEAD16,
                "layer_types": ["chunked_attention", "full_attention"],
                "attention_chunk_size": 8,
                "no_rope_layers": [1, 0],
                "num_local_experts": 2,
                "intermediate_size_mlp": 96,
                "moe_layers": [],
            },
            config_class="Llama4TextConfig",
            experts=True,
            exercises="chunks of keys",
        ),
        Recipe(
            "DeepseekV3",
            "ForCausalLM",
            {
                **DECODER,
                "num_key_value_heads": 4,
                "q_lora_rank": 24,
                "kv_lora_rank": 16,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 16,
                "v_head_dim": 16,
                "n_routed_experts": 4,
                "n_shared_experts": 1,
                "num_experts_per_tok": 2,
                "n_group": 1,
                "topk_group": 1,
                "moe_intermediate_size": 32,
                "first_k_dense_replace": 1,
            },
            experts=True,
            exercises="head_dim 24, head_dim_v 16",
        ),
        Recipe("Bert", "Model", TEXT, kind="encoder", exercises="no causality"),
        Recipe(
            "ViT",
            "Model",
            {
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "intermediate_size": 96,
                "image_size": 16,
                "patch_size": 4,
                "initializer_range": 0.15,
            },
            kind="vision",
            exercises="no mask at all",
        ),
        Recipe(
            "T5",
            "ForConditionalGeneration",
            {
                "vocab_size": 97,
                "d_model": 64,
                "d_kv": 16,
                "d_ff": 96,
                "num_layers": 2,
                "num_heads": 4,
                "decoder_start_token_id": 0,
                "pad_token_id": 0,
                "eos_token_id": None,
            },
            kind="text to text",
            exercises="position bias, scale 1, cross-attention",
        ),
        Recipe(
            "Whisper",
            "ForConditionalGeneration",
            {
                "vocab_size": 97,
                "d_model": 64,
                "encoder_layers": 1,
                "decoder_layers": 2,
                "encoder_attention_heads": 4,
                "decoder_attention_heads": 4,
                "encoder_ffn_dim": 96,
                "decoder_ffn_dim": 96,
                "num_mel_bins": 8,
                "max_source_positions": 12,
                "max_target_positions": 40,
                "init_std": 0.15,
                "decoder_start_token_id": 1,
                "bos_token_id": 1,
                "pad_token_id": 0,
                "eos_token_id": None,
                "begin_suppress_tokens": None,
                "suppress_tokens": None,
            },
            kind="speech to text",
            generates=(),
            exercises="encoder without mask, cross-attention",
        ),
    )
}


@cache
def build(name: str, implementation: str, experts: str = "eager", dropout: float | None = None) -> Any:
    """The model `name` in evaluation mode; the same weights whatever the attention implementation.

    `experts`: how a mixture of experts multiplies. "eager" alone has float64, and it cannot be compiled.
    `dropout`: of attention, and none elsewhere; None leaves the model's own."""
    recipe = RECIPES[name]
    torch.manual_seed(7)
    config_class = getattr(transformers, recipe.config_class or f"{name}Config")
    # A config each: loading changes it.
    config = config_class(**recipe.config)
    if dropout is not None:
        for setting in config.to_dict():
            if "drop" in setting and isinstance(getattr(config, setting), float):
                setattr(config, setting, dropout if setting in OF_ATTENTION else 0.0)
    model_class = getattr(transformers, f"{name}{recipe.head}")
    model = model_class._from_config(config, attn_implementation=implementation).eval()
    if recipe.experts:
        model.set_experts_implementation(experts)
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight_name.endswith("sinks"):
                weight.copy_(torch.tensor([2.0, 1.0, 0.0, -1.0]))
    return model


def tokens(batch: int, length: int) -> Tensor:
    drawn = generator(batch * 1000 + length)
    return torch.randint(2, 97, (batch, length), generator=drawn)


def padding(kind: str, batch: int, length: int) -> Tensor | None:
    """int64 (batch, length); request b lacks 3·b tokens at its right or left end, or in the middle."""
    if kind == "none":
        return None
    mask = torch.ones(batch, length, dtype=torch.int64)
    for b in range(1, batch):
        where = {
            "right": slice(length - 3 * b, None),
            "left": slice(0, 3 * b),
            "hole": slice(2, 2 + 3 * b),
        }
        mask[b, where[kind]] = 0
    return mask


def positions(mask: Tensor | None) -> dict[str, Tensor]:
    """Positions as generate() counts them: padding takes none."""
    if mask is None:
        return {}
    return {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def call(name: str, pads: str, batch: int = 3, length: int = 21) -> tuple[dict[str, Any], Tensor | None]:
    """Inputs of a forward pass, and the live output rows: bool (batch, length), None for all."""
    kind = RECIPES[name].kind
    if kind == "vision":
        drawn = generator(1)
        return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=drawn)}, None
    if kind == "speech to text":
        drawn = generator(1)
        features = torch.randn(batch, 8, 24, generator=drawn)
        return {"input_features": features, "decoder_input_ids": tokens(batch, 9)}, None
    ids, mask = tokens(batch, length), padding(pads, batch, length)
    if kind == "text to text":
        mask_of_target = padding("right" if pads != "none" else "none", batch, 10)
        live = None if mask_of_target is None else mask_of_target.bool()
        inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": tokens(batch, 10)}
        return inputs | {"decoder_attention_mask": mask_of_target}, live
    inputs = {"input_ids": ids, "attention_mask": mask}
    if kind == "decoder":
        inputs |= positions(mask)
    return inputs, None if mask is None else mask.bool()


def answer(model: Any, inputs: dict[str, Any], live: Tensor | None = None) -> Tensor:
    """Logits, or the last states of a model without a head: (rows, channels) of the live tokens."""
    with torch.inference_mode():
        output = model(**inputs)
    states = output.logits if "logits" in output else output.last_hidden_state
    return states.flatten(0, 1) if live is None else states[live]


class _Wide(TorchFunctionMode):
    """float32 is float64: models that compute norms, rotations and softmax in float32 do it in float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {n: torch.float64 if x is torch.float32 else x for n, x in (kwargs or {}).items()}
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        return torch.Tensor.double(*args, **kwargs) if func is torch.Tensor.float else func(*args, **kwargs)


def step(model: Any, inputs: dict[str, Any], live: Tensor | None = None) -> dict[str, Tensor]:
    """The gradient of every parameter that takes part, of a random linear function of the live answers."""
    model.zero_grad()
    output = model(**inputs)
    states = output.logits if "logits" in output else output.last_hidden_state
    states = states.flatten(0, 1) if live is None else states[live]
    weights = torch.randn(states.shape, generator=generator(3))
    (states * weights.to(states.dtype)).mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def step_in_float64(name: str, inputs: dict[str, Any], live: Tensor | None) -> dict[str, Tensor]:
    """The same in float64 throughout, with transformers' own eager attention and without dropout."""
    model = build.__wrapped__(name, "eager", dropout=0.0).double().train()
    with _Wide():
        gradients = step(model, _wide(inputs), live)
    assert all(x.dtype is torch.float64 for x in gradients.values())
    return gradients


def _wide(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in inputs.items()
    }


def answer_in_float64(name: str, inputs: dict[str, Any], live: Tensor | None) -> Tensor:
    """The same in float64 throughout, with transformers' own eager attention."""
    model = build.__wrapped__(name, "eager").double()
    with _Wide():
        result = answer(model, _wide(inputs), live)
    assert result.dtype is torch.float64
    return result
