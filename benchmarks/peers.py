"""Other attention implementations that this machine may have, each with the call it wants, and processes that
may hang or crash.

No peer is imported before it is asked for: it lives in a process of its own, because two pools of spinning
threads in one process starve each other. Every adapter takes q, k, v (batch, heads, seqlen, head_dim), causal
or not, and a thread count, brings the tensors into the peer's own layout once, and returns a call whose
output is (batch, heads, seqlen, head_dim) again.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Tensor]
Answer = Callable[[Any], dict[str, Any]]
_SPAWN, _GRACE = get_context("spawn"), 5.0  # seconds
# TensorProto's numbers
_ONNX_ELEMENT = {"float32": 1, "uint8": 2, "int8": 3, "int32": 6, "float16": 10, "bfloat16": 16}
MICROSOFT = "com.microsoft"  # the domain of onnxruntime's own operators
_ONNX_IR = 11  # the oldest that knows opset 23
# Threads of onnxruntime spin while a call runs, and no longer: by default they take another 37 ms of CPU time
# from whoever comes next.
_ONNX_SETTING = ("session.force_spinning_stop", "1")


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


_ONNX, _HERE = ("onnxruntime", "onnx"), "benchmarks.peers:"
PEERS = {
    "onnxruntime-mha": Peer("onnxruntime MultiHeadAttention", _ONNX, _HERE + "onnxruntime_mha"),
    "onnxruntime-attention": Peer("onnxruntime Attention-23", _ONNX, _HERE + "onnxruntime_attention"),
    "flexattention": Peer("compiled FlexAttention", ("torch",), _HERE + "flexattention", ("g++", "clang++")),
    "jax": Peer("jax.nn.dot_product_attention", ("jax",), _HERE + "jax_attention"),
}


def onnxruntime_mha(q: Tensor, k: Tensor, v: Tensor, causal: bool, threads: int) -> Call:
    """com.microsoft.MultiHeadAttention; its layout is (batch, seqlen, heads·head_dim)."""
    batch, heads, seqlen, head_dim = q.shape
    q, k, v = (x.transpose(1, 2).reshape(batch, x.shape[2], -1).contiguous() for x in (q, k, v))
    options = {"domain": MICROSOFT, "num_heads": heads, "unidirectional": int(causal)}
    out = torch.empty_like(q)
    run = onnx_node("MultiHeadAttention", options, {"q": q, "k": k, "v": v}, {"out": out}, threads)
    return lambda: run().view(batch, seqlen, heads, head_dim).transpose(1, 2)


def onnxruntime_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, threads: int) -> Call:
    """ai.onnx Attention, opset 23."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    out, options = torch.empty_like(q), {"is_causal": int(causal)}
    return onnx_node("Attention", options, {"q": q, "k": k, "v": v}, {"out": out}, threads)


def onnxruntime_codes(q: Tensor, k: Tensor, v: Tensor, bits: int, threads: int) -> Call:
    """com.microsoft.GroupQueryAttention over a cache with one scale per channel, in float32 with 16 bits. It
    always writes the newest token; here it writes the last one again."""
    heads, head_dim = q.shape[1], q.shape[3]
    caches, scales, newest = zip(*(_encoded(x, bits) for x in (k, v)), strict=True)
    tokens = caches[0].shape[2]
    options = {"domain": MICROSOFT, "num_heads": heads, "kv_num_heads": caches[0].shape[1]}
    inputs: dict[str, Tensor | None] = {"q": q.reshape(1, 1, -1), "k": newest[0], "v": newest[1]}
    inputs |= {"past_k": caches[0], "past_v": caches[1], "lens": torch.tensor([tokens - 1]).int()}
    inputs |= {"total": torch.tensor(tokens).int()}
    if bits < 16:
        inputs |= dict.fromkeys(("cosines", "sines", "positions", "bias", "sinks"))
        inputs |= {"k_scale": scales[0], "v_scale": scales[1]}
        options |= dict.fromkeys(("k_quant_type", "v_quant_type"), "PER_CHANNEL")
        options["kv_cache_bit_width"] = bits
    outputs = {"out": torch.empty(1, 1, heads * head_dim), "present_k": caches[0], "present_v": caches[1]}
    run = onnx_node("GroupQueryAttention", options, inputs, outputs, threads)
    return lambda: run().view(1, heads, 1, head_dim)


def _encoded(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes as onnxruntime keeps them, a scale per head and channel, and the newest token
    (1, 1, ·)."""
    newest = x[:, :, -1].reshape(1, 1, -1).contiguous()
    if bits == 16:
        return x.clone(), x.new_ones(()), newest
    top = (1 << bits - 1) - 1
    scale = x.abs().amax(2, keepdim=True) / top
    codes = (x / scale).round().clamp(-top - 1, top)
    if bits == 4:
        low, high = (codes + 8).byte().unflatten(3, (-1, 2)).unbind(4)
        return (low | high << 4).contiguous(), scale.flatten(), newest
    return codes.to(torch.int8), scale.flatten(), newest


def onnx_node(
    name: str, options: dict[str, Any], inputs: Mapping[str, Tensor | None], outputs: Mapping[str, Tensor],
    threads: int,
) -> Call:  # fmt: skip
    """A model of one node on bound tensors (None: an input left out), as the call that gives its first
    output."""
    import numpy
    import onnxruntime
    from onnx import helper

    def element(x: Tensor) -> int:
        return _ONNX_ELEMENT[str(x.dtype).removeprefix("torch.")]

    def infos(places: Mapping[str, Tensor]) -> list[Any]:
        return [helper.make_tensor_value_info(at, element(x), [*x.shape]) for at, x in places.items()]

    given = {at: x for at, x in inputs.items() if x is not None}
    node = helper.make_node(name, [at if at in given else "" for at in inputs], [*outputs], **options)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(MICROSOFT, 1)]
    graph = helper.make_graph([node], "attention", infos(given), infos(outputs))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=_ONNX_IR).SerializeToString()
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.inter_op_num_threads = threads, 1
    settings.log_severity_level = 4
    settings.add_session_config_entry(*_ONNX_SETTING)
    session = onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for bind, places in ((binding.bind_input, given), (binding.bind_output, outputs)):
        for at, x in places.items():
            kind = element(x) if x.dtype is torch.bfloat16 else getattr(numpy, str(x.dtype)[6:])
            bind(at, "cpu", 0, kind, tuple(x.shape), x.data_ptr())
    kept = (given, outputs)  # as their addresses are bound

    def run() -> Tensor:
        session.run_with_iobinding(binding)
        return next(iter(kept[1].values()))

    return run


def flexattention(q: Tensor, k: Tensor, v: Tensor, causal: bool, threads: int = 0) -> Call:
    """torch.compile(flex_attention) for this very shape, with a block mask if causal; for as many threads as
    torch has."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask, sizes = None, (None, None, q.shape[2], k.shape[2])
    if causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, *sizes, device=str(q.device))
    compiled, grouped = torch.compile(flex_attention, dynamic=False), q.shape[1] != k.shape[1]
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=grouped)


def jax_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, threads: int) -> Call:
    """jax.jit of jax.nn.dot_product_attention; its layout is (batch, seqlen, heads, head_dim). Its threads
    are as many as the process may run on."""
    import jax

    operands = [jax.numpy.from_dlpack(x.transpose(1, 2).contiguous()) for x in (q, k, v)]
    compiled = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal))
    return lambda: torch.from_dlpack(compiled(*operands).block_until_ready()).transpose(1, 2)


class Child:
    """A process in which what `prepare(*settings)` returns answers every request; whatever libraries print
    goes to a file, whose last line is the reason if the process dies. `alive` is False once it was killed or
    died; it then has no more answers."""

    def __init__(self, prepare: Callable[..., Answer], settings: Sequence[Any], patience: float) -> None:
        self._printed = tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._pipe, theirs = _SPAWN.Pipe()
        given = theirs, self._printed.name, prepare, settings
        self._process = _SPAWN.Process(target=_serve, args=given, daemon=True)
        self._process.start()
        theirs.close()
        self.alive, self._refusal = True, ""
        self._answer(patience)  # that it is ready

    def ask(self, request: Any, patience: float) -> dict[str, Any]:
        """Its answer; if none comes in so many seconds, or it dies, {"reason": …}, and it is not alive."""
        if self.alive:
            with suppress(OSError):  # dead before it read: its last words say why
                self._pipe.send(request)
        return self._answer(patience)

    def _answer(self, patience: float) -> dict[str, Any]:
        if not self.alive:
            return {"reason": self._refusal}
        try:
            if self._pipe.poll(patience):
                answer: dict[str, Any] = self._pipe.recv()
                if answer.pop("fatal", False):  # the last one
                    self.alive = False
                    self.end()
                return answer
            self._refusal = f"hung: no answer in {patience:.0f} s"
        except (EOFError, OSError):
            self._process.join()
            lines = [line.strip() for line in self._printed if line.strip()]
            said = f": {lines[-1][:200]}" if lines else ""
            self._refusal = f"its process ended with code {self._process.exitcode}{said}"
        self.alive = False
        self.end()
        return {"reason": self._refusal}

    def end(self) -> None:
        """One that answers is given time to leave nothing behind."""
        self._pipe.close()
        self._process.join(_GRACE if self.alive else 0.0)
        self.alive = False
        self._process.kill()
        self._process.join()
        self._printed.close()


def _serve(pipe: Connection, printed: str, prepare: Callable[..., Answer], settings: Sequence[Any]) -> None:
    file = os.open(printed, os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(file, standard)
    answer = prepare(*settings)
    pipe.send({})
    with suppress(EOFError):  # nobody asks any more
        while True:
            pipe.send(answer(pipe.recv()))


def why(error: BaseException) -> str:
    """The reason for a table: the kind of an error and its first line."""
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line.strip()[:160]}"
