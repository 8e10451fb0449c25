"""polyflash as the attention of Hugging Face transformers models.

    from polyflash.integrations.transformers import register

    model = AutoModel.from_pretrained(folder, attn_implementation=register())

`register()` registers an attention function and a mask function under one name. Both are needed: without a
mask function of that name transformers passes no mask at all, and padded keys take part without a warning.
transformers parses the name ("flash" in it starts an import of flash-attn), so it is "poly"."""

from __future__ import annotations

try:
    from transformers import AttentionInterface, AttentionMaskInterface
except ImportError as error:
    raise ImportError("this module needs transformers 5: pip install 'polyflash[hf]'") from error

from polyflash.errors import spec_error
from polyflash.integrations.transformers.batch_mask import BatchMask, _mask_of_batch
from polyflash.integrations.transformers.layer import _attention_forward

__all__ = ("BatchMask", "register")

_PARSED = ("flash", "sdpa", "flex_attention", "paged", "eager", "/", "|", "@", ":")


def register(name: str = "poly") -> str:
    """Make `attn_implementation=name` run polyflash in every model loaded from now on; returns the name.
    Calls with a `PagedCache` read its pages.

    Raises:
        SpecError: transformers gives the name, or a part of it, a meaning of its own."""
    if not name or any(part in name for part in _PARSED):
        change = "Choose a plain one, such as 'poly'."
        raise spec_error("name", repr(name), f"a word with none of {' '.join(_PARSED)} in it", change)
    AttentionInterface.register(name, _attention_forward)
    AttentionMaskInterface.register(name, _mask_of_batch)
    return name
