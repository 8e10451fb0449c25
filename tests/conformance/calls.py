"""Drawn calls of the public functions with odd values in the places of right ones: only documented errors
come out, and no call changes what it was given."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import polyflash
from polyflash import Mask

CONTENTS = re.compile(r"\btensor\([\[\d-]")
DOCUMENTED = (polyflash.SpecError, polyflash.UnsupportedError, TypeError)


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


ODD: dict[str, Callable[[], Any]] = {
    "none": lambda: None, "true": lambda: True, "zero": lambda: 0, "three": lambda: 3, "minus": lambda: -1,
    "beyond 64 bits": lambda: 2**70, "half": lambda: 0.5, "nan": lambda: math.nan, "inf": lambda: -math.inf,
    "word": lambda: "x", "no word": lambda: "", "causal": lambda: "causal", "list": lambda: [1.0, 2.0],
    "nothing": lambda: (), "pair": lambda: (2, 1), "half pair": lambda: (0.5, None), "dict": dict,
    "object": object, "type": lambda: Mask, "complex": lambda: 1j, "bytes": lambda: b"x",
    "scalar tensor": lambda: torch.tensor(2.0), "empty tensor": lambda: torch.empty(0),
    "two ints": lambda: _ints(2, 1), "far ints": lambda: _ints(2**31 - 1, -(2**31)),
    "rising ints": lambda: _ints(0, 2, 5), "falling ints": lambda: _ints(0, 9, 5),
    "long ints": lambda: torch.tensor((3, 3)), "two floats": lambda: torch.rand(2),
    "two heads": lambda: torch.randn(2), "operand": lambda: torch.randn(2, 2, 5, 8),
    "packed": lambda: torch.randn(5, 2, 8), "other rows": lambda: torch.randn(2, 2, 7, 8),
    "other heads": lambda: torch.randn(2, 3, 5, 8), "other batch": lambda: torch.randn(1, 2, 5, 8),
    "no channels": lambda: torch.randn(2, 2, 5, 0), "no keys": lambda: torch.randn(2, 2, 0, 8),
    "half operand": lambda: torch.randn(2, 2, 5, 8).half(),
    "int operand": lambda: torch.ones(2, 2, 5, 8).int(),
    "complex operand": lambda: torch.randn(2, 2, 5, 8, dtype=torch.complex64),
    "sparse": lambda: torch.randn(2, 2, 5, 8).to_sparse(),
    "meta": lambda: torch.empty(2, 2, 5, 8, device="meta"),
    "leaf": lambda: torch.randn(2, 2, 5, 8, requires_grad=True),
    "expanded": lambda: torch.randn(1, 1, 1, 8).expand(2, 2, 5, 8), "lse": lambda: torch.randn(2, 2, 5),
    "keys": lambda: torch.rand(5) < 0.5, "pairs": lambda: torch.rand(5, 5) < 0.5,
    "five dimensions": lambda: torch.rand(2, 2, 2, 2, 2) < 0.5, "mask": Mask.causal,
    "window": lambda: Mask.window(1, 0), "segments": lambda: Mask.segments(_ints(0, 0), _ints(0, 1)),
    "lists": lambda: Mask.intervals(_ints(0)[None], _ints(9)[None], rows=5),
}  # fmt: skip


def _qkv(*shape: int) -> dict[str, Any]:
    return {name: torch.randn(*shape) for name in ("q", "k", "v")}


_OPTIONS = (
    "causal", "window", "mask", "bias", "alibi_slopes", "softcap", "sinks", "scale", "kv_lens", "kv_starts",
    "q_offset", "dropout_p", "dropout_seed", "layout", "return_lse", "batch_invariant", "backend", "config",
)  # fmt: skip
_PACKED = tuple(n for n in _OPTIONS if n not in ("mask", "bias", "layout"))
# Of each function: right arguments, and the names that may be given beside them.
FUNCTIONS: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, ...]]] = {
    "attention": (lambda: _qkv(2, 2, 5, 8), (*_OPTIONS, "out", "checked")),
    "explain": (lambda: _qkv(2, 2, 5, 8), (*_OPTIONS, "target", "cu_seqlens_q", "cu_seqlens_k")),
    "attention_varlen": (
        lambda: {**_qkv(5, 2, 8), "cu_seqlens_q": _ints(0, 2, 5), "cu_seqlens_k": _ints(0, 2, 5)},
        (*_PACKED, "max_seqlen_q", "max_seqlen_k", "out", "checked"),
    ),
    "attention_paged": (
        lambda: {
            "q": torch.randn(2, 2, 8), "k_pages": torch.randn(3, 4, 2, 8), "v_pages": torch.randn(3, 4, 2, 8),
            "page_table": torch.tensor(((2, 0), (1, 1)), dtype=torch.int32), "kv_lens": _ints(5, 8),
        },
        (*(n for n in _PACKED if not n.startswith("dropout")), "cu_seqlens_q", "max_seqlen_q", "out",
         "checked"),
    ),
    "attention_groups": (
        lambda: {
            "q_groups": [torch.randn(2, 2, 3, 8), torch.randn(2, 2, 1, 8)], "k": torch.randn(2, 2, 5, 8),
            "v": torch.randn(2, 2, 5, 8), "q_offsets": (2, 0),
        },
        ("kv_lens", "causal", "window", "softcap", "sinks", "scale", "layout", "return_lse", "fused",
         "backend", "config"),
    ),
    "merge": (
        lambda: {n: torch.randn(2, 2, 5, 8)[..., 0 if "lse" in n else slice(None)] for n in
                 ("out_a", "lse_a", "out_b", "lse_b")},
        ("layout",),
    ),
    "Mask.window": (lambda: {"left": 1, "right": 0}, ()),
    "Mask.causal": (dict, ("alignment",)),
    "Mask.segments": (lambda: {"q_ids": _ints(0, 0)[None], "k_ids": _ints(0, 1)[None]}, ()),
    "Mask.intervals": (lambda: {"starts": _ints(0)[None], "ends": _ints(9)[None], "rows": 5}, ()),
    "Mask.blocks": (lambda: {"visible": torch.ones(2, 2, dtype=torch.bool), "rows": 3, "keys": 3}, ()),
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A function and the odd values of some of its arguments, by name; `backward` asks for gradients too."""

    function: str
    odd: tuple[tuple[str, str], ...]
    backward: bool = False

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @staticmethod
    def read(text: str) -> Call:
        plain = json.loads(text)
        return Call(plain["function"], tuple((a, b) for a, b in plain["odd"]), plain["backward"])


@st.composite
def calls(draw: st.DrawFn) -> Call:
    function = draw(st.sampled_from(tuple(FUNCTIONS)))
    base, others = FUNCTIONS[function]
    names = draw(st.lists(st.sampled_from((*base(), *others)), min_size=1, max_size=3, unique=True))
    odd = tuple((name, draw(st.sampled_from(tuple(ODD)))) for name in names)
    return Call(function, odd, draw(st.booleans()) if function.startswith("attention") else False)


def check_call(call: Call) -> None:
    """A result or a documented error, whose text carries no contents; operands keep their bits."""
    torch.manual_seed(0)
    base, _ = FUNCTIONS[call.function]
    given = {**base(), **{name: ODD[value]() for name, value in call.odd}}
    function: Any = polyflash
    for part in call.function.split("."):
        function = getattr(function, part)
    before = {n: x.clone() for n, x in given.items() if _comparable(x) and n != "out"}
    q = given.get("q")
    if call.backward and isinstance(q, Tensor) and q.is_floating_point() and q.is_leaf:
        q.requires_grad_()
    try:
        result = function(**given)
        if call.backward and isinstance(result, Tensor) and result.requires_grad and not result.is_meta:
            result.sum().backward()
    except DOCUMENTED as error:
        assert not CONTENTS.search(str(error)), f"{call}: {error}"
    for n, x in before.items():
        assert torch.equal(torch.nan_to_num(given[n].detach()), torch.nan_to_num(x.detach())), (
            f"{call}: {n} changed"
        )


def _comparable(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.strided and not x.is_meta


def replay(path: Path) -> None:
    check_call(Call.read(path.read_text(encoding="utf-8")))
