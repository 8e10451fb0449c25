"""polyflash as torch's flash attention for the whole process, through torch's registry of implementations."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from polyflash.errors import UnsupportedError
from polyflash.spec import Arguments

NAME = "POLYFLASH"  # in torch's registry


class Handle:
    """The registration that torch's registry keeps, and calls to undo."""

    def __init__(self, library: torch.library.Library, order: list[int] | None) -> None:
        self.library, self.order = library, order

    def remove(self) -> None:
        self.library._destroy()
        if self.order is not None:
            torch._C._set_sdp_priority_order(self.order)


def registry() -> Any:
    """torch's registry.

    Raises:
        UnsupportedError: this torch has none."""
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        told = "has no registry of flash implementations. Use enabled()"
        raise UnsupportedError(f"torch {torch.__version__} {told}")
    return torch.nn.attention


def register(on_gpus: bool) -> Handle:
    """Puts polyflash in the place of torch's kernels, those of GPUs too if asked to."""
    library, order = torch.library.Library("aten", "IMPL"), None
    library.impl("_scaled_dot_product_flash_attention_for_cpu", _flash_forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", _flash_backward, "CPU")
    if on_gpus:
        library.impl("_scaled_dot_product_flash_attention", _gpu_forward, "CUDA")
        library.impl("_scaled_dot_product_flash_attention_backward", _gpu_backward, "CUDA")
        order = put_flash_first("cuda")
    return Handle(library, order)


def put_flash_first(device: str) -> list[int]:
    """Puts flash attention before cuDNN where torch asks its kernels in order; returns the old order."""
    x = torch.empty(1, 1, 8, 8, dtype=torch.float16, device=device)
    torch._fused_sdp_choice(x, x, x)  # torch makes its order at its first choice, over any that was set
    before: list[int] = torch._C._get_sdp_priority_order()
    first = int(SDPBackend.FLASH_ATTENTION)  # type: ignore[call-overload]
    torch._C._set_sdp_priority_order([first, *(kernel for kernel in before if kernel != first)])
    return before


# Their arguments are those of torch's ops: torch leaves out what has its default, and gives the rest by
# position, but for `attn_mask` and `scale`.


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, *how: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    args = _flash_arguments(*how, **named)
    return cast(tuple[Tensor, Tensor], torch.ops.polyflash.attention(query, key, value, *args))


def _flash_backward(*given: Any, **named: Any) -> tuple[Tensor, ...]:
    *tensors, dropout_p, is_causal = given
    return _gradients(_flash_arguments(dropout_p, is_causal, **named), *tensors)


def _gpu_forward(
    query: Tensor, key: Tensor, value: Tensor, *how: Any, scale: float | None = None
) -> tuple[Any, ...]:
    """Does what torch's kernel does, with the seed on the CPU in both places of its random state, so that
    nothing waits. `how`: dropout_p, is_causal and return_debug_mask."""
    defaults: tuple[Any, ...] = (0.0, False, False)
    dropout_p, is_causal, debug = how + defaults[len(how) :]
    if debug:
        raise UnsupportedError("return_debug_mask: no matrix of weights is ever made. Leave it False")
    state = torch.zeros(2, dtype=torch.int64, device="cpu")
    if dropout_p:
        state.random_(-(2**63), 2**63 - 1)
    args = _gpu_arguments(dropout_p, is_causal, scale, state)
    out, lse = torch.ops.polyflash.attention(query, key, value, *args)
    random_state = state.view(torch.uint64)
    nothing = query.new_empty(0)
    return out, lse, None, None, query.shape[2], key.shape[2], random_state, random_state[0], nothing


def _gpu_backward(*given: Any, scale: float | None = None) -> tuple[Tensor, ...]:
    dropout_p, is_causal, philox_seed, _ = given[-4:]
    args = _gpu_arguments(dropout_p, is_causal, scale, philox_seed.view(torch.int64))
    return _gradients(args, *given[:6])


def _gpu_arguments(dropout_p: float, is_causal: bool, scale: float | None, state: Tensor) -> Arguments:
    args = _flash_arguments(0.0, is_causal, None, scale)
    return args._replace(dropout_p=dropout_p, dropout_seed=state[0]) if dropout_p else args


def _gradients(args: Arguments, grad_out: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
    """dq, dk and dv; `saved` are q, k, v, out and lse."""
    *tensors, lse = saved
    needs = [True, True, True, False, False]
    gradients = torch.ops.polyflash.attention_backward(
        grad_out, None, *tensors, lse.contiguous(), needs, *args
    )
    return tuple(gradients[:3])


def _flash_arguments(
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Arguments:
    if dropout_p:
        raise UnsupportedError("dropout_p: torch's flash attention for CPUs has none. Use enabled()")
    seen = attn_mask is not None and attn_mask.dtype is torch.bool
    return Arguments(
        causal=is_causal,
        scale=scale,
        need_lse=True,
        offset=0 if is_causal else None,  # top-left
        mask=attn_mask if seen else None,
        bias=None if seen else attn_mask,
    )
