"""Other attention implementations that this machine may have, each with the call it wants.

Nothing here is imported before it is asked for: a peer lives in a process of its own, because two pools of
spinning threads in one process starve each other. Every adapter takes q, k, v (batch, heads, seqlen,
head_dim), causal or not, and a thread count, brings the tensors into the peer's own layout once, and returns
a call whose output is (batch, heads, seqlen, head_dim) again.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Tensor]
_ONNX_ELEMENT = {"float32": 1, "float16": 10, "bfloat16": 16}  # TensorProto's numbers
_ONNX_IR = 11  # the oldest that knows opset 23


@dataclass(frozen=True)
class Peer:
    """`packages` must be importable, the first one's version is shown; one of `tools` must be on the path."""

    title: str
    packages: tuple[str, ...]
    prepare: str  # "module:function", of the signature of the adapters below
    tools: tuple[str, ...] = ()

    @property
    def absent(self) -> str:
        """Why it cannot run here; empty if it seems it can."""
        missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if missing:
            return f"{' and '.join(missing)} not installed"
        if self.tools and not any(map(shutil.which, self.tools)):
            return f"needs a C++ compiler: no {' or '.join(self.tools)} on the path"
        return ""

    @property
    def version(self) -> str:
        return importlib.metadata.version(self.packages[0])


_ONNX = ("onnxruntime", "onnx")
PEERS = {
    "onnxruntime-mha": Peer("onnxruntime MultiHeadAttention", _ONNX, "benchmarks.peers:onnxruntime_mha"),
    "onnxruntime-attention": Peer(
        "onnxruntime Attention-23", _ONNX, "benchmarks.peers:onnxruntime_attention"
    ),
    "flexattention": Peer(
        "compiled FlexAttention", ("torch",), "benchmarks.peers:flexattention", ("g++", "clang++")
    ),
    "jax": Peer("jax.nn.dot_product_attention", ("jax",), "benchmarks.peers:jax_attention"),
}


def onnxruntime_mha(q: Tensor, k: Tensor, v: Tensor, causal: bool, threads: int) -> Call:
    """com.microsoft.MultiHeadAttention; its layout is (batch, seqlen, heads·head_dim)."""
    batch, heads, seqlen, head_dim = q.shape
    operands = [x.transpose(1, 2).reshape(batch, x.shape[2], -1).contiguous() for x in (q, k, v)]
    options = {"domain": "com.microsoft", "num_heads": heads, "unidirectional": int(causal)}
    run = _onnx_node("MultiHeadAttention", options, operands, threads)
    return lambda: run().view(batch, seqlen, heads, head_dim).transpose(1, 2)


def onnxruntime_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, threads: int) -> Call:
    """ai.onnx Attention, opset 23."""
    operands = [x.contiguous() for x in (q, k, v)]
    return _onnx_node("Attention", {"is_causal": int(causal)}, operands, threads)


def _onnx_node(name: str, options: dict[str, Any], operands: list[Tensor], threads: int) -> Call:
    """A model of one node on bound tensors, as the call that returns its output."""
    import numpy
    import onnxruntime
    from onnx import helper

    dtype = str(operands[0].dtype).removeprefix("torch.")
    element, out = _ONNX_ELEMENT[dtype], torch.empty_like(operands[0])
    places = dict(zip(("q", "k", "v", "out"), (*operands, out), strict=True))
    infos = [helper.make_tensor_value_info(at, element, list(x.shape)) for at, x in places.items()]
    node = helper.make_node(name, ["q", "k", "v"], ["out"], **options)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "attention", infos[:3], infos[3:])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=_ONNX_IR)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.inter_op_num_threads = threads, 1
    settings.log_severity_level = 4
    # Its threads spin while a call runs, and no longer: by default they take another 37 ms of CPU time from
    # whoever comes next.
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
    )
    binding = session.io_binding()
    kind = element if dtype == "bfloat16" else getattr(numpy, dtype)
    for at, x in places.items():
        bind = binding.bind_output if at == "out" else binding.bind_input
        bind(at, "cpu", 0, kind, tuple(x.shape), x.data_ptr())

    def run() -> Tensor:
        session.run_with_iobinding(binding)
        return places["out"]  # all of `places` is kept alive, as they are bound

    return run


def flexattention(q: Tensor, k: Tensor, v: Tensor, causal: bool, threads: int = 0) -> Call:
    """torch.compile(flex_attention) for this very shape, with a block mask if causal; for as many threads as
    torch has."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = None
    if causal:
        lengths, device = (q.shape[2], k.shape[2]), str(q.device)
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, *lengths, device=device)
    compiled, grouped = torch.compile(flex_attention, dynamic=False), q.shape[1] != k.shape[1]
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=grouped)


def jax_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, threads: int) -> Call:
    """jax.jit of jax.nn.dot_product_attention; its layout is (batch, seqlen, heads, head_dim). Its threads
    are as many as the process may run on."""
    import jax

    operands = [jax.numpy.from_dlpack(x.transpose(1, 2).contiguous()) for x in (q, k, v)]
    compiled = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal))
    return lambda: torch.from_dlpack(compiled(*operands).block_until_ready()).transpose(1, 2)
