"""polyflash as the attention of Hugging Face transformers models.

    from polyflash.integrations.transformers import register

    model = AutoModel.from_pretrained(folder, attn_implementation=register())

`register()` registers an attention function and a mask function under one name. Both are needed: without a
mask function of that name transformers passes no mask at all, and padded keys take part without a warning.
transformers parses the name ("flash" in it starts an import of flash-attn), so it is "poly"."""

from __future__ import annotations

try:
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: F401
except ImportError as error:
    raise ImportError("this module needs transformers 5: pip install 'polyflash[hf]'") from error

from polyflash.integrations.transformers.batch_mask import BatchMask
from polyflash.integrations.transformers.names import register

__all__ = ("BatchMask", "register")
