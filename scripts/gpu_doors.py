"""Every door that the README names, on a GPU: does our kernel run behind it, and is the answer right?

    python scripts/gpu_doors.py                      # every door
    python scripts/gpu_doors.py sdpa registry        # these
    TRITON_INTERPRET=1 python scripts/gpu_doors.py --device cpu --backend triton    # the script itself

Each door is called as its users call it, forward and backward, and again with the device as torch's default.
torch's profiler says which kernels ran: ours (`attend`, `make_dkv`), and no attention of torch's. Results and
gradients are held by the relative rule: at most twice (gradients: three times) the largest error of torch's
own attention in the same dtype against float64, and a rounding unit (`gpu_harness.py`). Prints one line per
door: ok, FAILED or skip, and why. Returns 1 if one failed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from gpu_harness import (
    BACKWARD,
    FORWARD,
    GLUON,
    Expected,
    Skip,
    Where,
    attention_call,
    compare,
    hold_rows,
    module_call,
    no_waiting,
)
from torch import Tensor
from torch.nn import functional as F

import polyflash
from polyflash.integrations import flash_attn, sdpa
from polyflash.kvcache import KVCache, Rope

override = functools.partial(sdpa.enabled, strict=True)


def door_sdpa(w: Where) -> str:
    """`with sdpa.enabled()`: causal, grouped heads, masks of both kinds, float32 too."""
    seen = torch.ones(w.rows, w.rows, dtype=torch.bool, device=w.device).tril(3)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for name, options in (("causal", {"is_causal": True}), ("bool mask", {"attn_mask": seen})):
            compare(w, f"{dtype} {name}", attention_call(w, (4, 2), **options), dtype, override)
    bias = w.normal(2, 1, w.rows, w.rows)
    compare(w, "float mask", attention_call(w, (4, 4), attn_mask=bias), torch.bfloat16, override)
    return "7 calls and their gradients"


def door_registry(w: Where) -> str:
    """`sdpa.activate()`: torch's dispatcher calls our kernel, dropout too, until `deactivate()`."""
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        raise Skip(f"torch {torch.__version__} has no registry")

    @contextlib.contextmanager
    def active() -> Iterator[None]:
        sdpa.activate()
        try:
            yield
        finally:
            sdpa.deactivate()

    for heads in ((4, 4), (4, 2)):
        for options in ({"is_causal": True}, {"scale": 0.3}):
            call = attention_call(w, heads, **options)
            compare(w, f"{heads} {options}", call, torch.bfloat16, active)
    if w.is_cuda:
        call, found = attention_call(w, (4, 4), dropout_p=0.3), []
        for _ in range(2):
            torch.manual_seed(5)
            with active(), w.runs(BACKWARD):
                found.append(call(torch.bfloat16))
        if not all(torch.equal(a, b) for a, b in zip(*found, strict=True)):
            raise AssertionError("dropout: one seed, two results")
    before = call_without(w)
    with active():
        pass
    if not torch.equal(before, call_without(w)):
        raise AssertionError("torch's own function is another one after deactivate()")
    return "bfloat16, grouped heads" + ", dropout" * w.is_cuda


def call_without(w: Where) -> Tensor:
    torch.manual_seed(0)
    q = w.normal(1, 2, 64, 64)
    return F.scaled_dot_product_attention(q, q, q)


def door_modules(w: Where) -> str:
    """`nn.MultiheadAttention` and `nn.TransformerEncoderLayer`, in training."""
    x = w.normal(2, w.rows, 128)
    hidden = torch.zeros(2, w.rows, dtype=torch.bool, device=w.device)
    hidden[1, -7:] = True
    own = torch.nn.MultiheadAttention(128, 4, batch_first=True, device=w.device)
    layer = torch.nn.TransformerEncoderLayer(128, 4, 128, dropout=0.0, batch_first=True, device=w.device)

    def run(m: Any, mask: Tensor | None = None) -> Tensor:
        y = x.to(m.out_proj.weight.dtype)
        return m(y, y, y, key_padding_mask=mask, need_weights=False)[0]

    calls = {
        "attention": module_call(own, run),
        "padding": module_call(own, lambda m: run(m, hidden)),
        "encoder layer": module_call(layer, lambda m: m(x.to(m.linear1.weight.dtype))),
    }
    for name, call in calls.items():
        compare(w, name, call, torch.bfloat16, override)
    return ", ".join(calls)


def llama(w: Where, implementation: str = "sdpa") -> Any:
    try:
        import transformers
    except ImportError as error:
        raise Skip("transformers is not installed") from error
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.1, pad_token_id=0,
        bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(7)
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=implementation).to(w.device)


def tokens(w: Where, batch: int, count: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(batch + count)
    return torch.randint(2, 97, (batch, count), generator=generator, device="cpu").to(w.device)


def door_transformers(w: Where) -> str:
    """A Llama with `attn_implementation="poly"`, and with "sdpa" within the override; with padding too."""
    model = llama(w)
    from polyflash.integrations.transformers import register

    ids, live = tokens(w, 2, w.rows), torch.ones(2, w.rows, dtype=torch.int64, device=w.device)
    live[1, :5] = 0
    for name, mask in (("plain", None), ("padded", live)):
        seen = slice(None) if mask is None else mask.bool()

        def run(m: Any, mask: Tensor | None = mask, seen: Any = seen) -> Tensor:
            return m(input_ids=ids, attention_mask=mask).logits[seen]

        call = module_call(model, run)
        compare(w, f"sdpa, {name}", call, torch.bfloat16, override)
        expected, ours = Expected.of(call, torch.bfloat16), llama(w, register())
        with w.runs(BACKWARD):
            got = module_call(ours, run)(torch.bfloat16)
        expected.hold(f"poly, {name}", got)
    return "Llama by both ways, with padding, and every parameter's gradient"


def door_paged_cache(w: Where) -> str:
    """`model.generate(past_key_values=PagedCache.of(model, ...))`: the tokens of torch's SDPA."""
    plain = llama(w).eval()
    from polyflash.integrations.transformers_cache import PagedCache, register

    ids, count = tokens(w, 3, 40), 12
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    how = {"attention_mask": mask, "max_new_tokens": count, "do_sample": False, "disable_compile": True}
    want = plain.generate(ids, **how)
    model = llama(w, register()).eval()
    for more in ({}, {"num_beams": 2}):
        cache = PagedCache.of(model, 3 * 2 * (40 + count) + 96)
        if cache.cache.device != next(model.parameters()).device:
            raise AssertionError(f"the pages are on {cache.cache.device}")
        with w.runs(FORWARD):
            got = model.generate(ids, past_key_values=cache, **how, **more)
        if not torch.equal(got, plain.generate(ids, **how, **more) if more else want):
            raise AssertionError(f"other tokens than torch's SDPA {more}")
        cache.reset()
    return f"{count} tokens of 3 requests, greedily and with 2 beams"


def door_diffusers(w: Where) -> str:
    """A tiny Flux with `set_attention_backend("poly")`."""
    try:
        import diffusers
    except ImportError as error:
        raise Skip("diffusers is not installed") from error
    from polyflash.integrations.diffusers import register, unregister

    torch.manual_seed(7)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    ).to(w.device)  # fmt: skip
    places = torch.arange(64, device=w.device)
    image = torch.stack((torch.zeros_like(places), places // 8, places % 8), 1).float()
    given = {
        "hidden_states": w.normal(2, 64, 4), "encoder_hidden_states": w.normal(2, 7, 32),
        "pooled_projections": w.normal(2, 32), "timestep": torch.tensor([0.3, 0.7], device=w.device),
    }  # fmt: skip

    def run(m: Any) -> Tensor:
        cast = {name: x.to(m.dtype) for name, x in given.items()}
        out: Tensor = m(**cast, img_ids=image, txt_ids=torch.zeros(7, 3, device=w.device)).sample
        return out

    call = module_call(model, run)
    expected = Expected.of(call, torch.bfloat16)
    model.set_attention_backend(register())
    try:
        with w.runs(BACKWARD):
            got = call(torch.bfloat16)
    finally:
        unregister()
    expected.hold("Flux", got)
    return f"Flux, {len(got) - 1} gradients"


def door_flash_attn(w: Where) -> str:
    """`flash_attn_func`, `_varlen_func` and `_with_kvcache`."""
    n = w.rows
    q, k, v, dout = (w.normal(2, n, h, 64) for h in (4, 2, 2, 4))

    def torchs_call(dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in inputs), is_causal=True, enable_gqa=True
        )
        grads = torch.autograd.grad(out, inputs, dout.transpose(1, 2).to(dtype))
        return [out.transpose(1, 2).detach(), *grads]

    expected = Expected.of(torchs_call, torch.bfloat16)
    bounds = torch.tensor([0, n, 2 * n], dtype=torch.int32, device=w.device)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    for packed in (False, True):
        with w.runs(BACKWARD):
            if packed:
                flat = [x.flatten(0, 1) for x in inputs]
                out = flash_attn.flash_attn_varlen_func(*flat, bounds, bounds, n, n, causal=True)
                out = out.view(q.shape)
            else:
                out = flash_attn.flash_attn_func(*inputs, causal=True)
            got = [out.detach(), *torch.autograd.grad(out, inputs, dout)]
        expected.hold(f"{packed=}", got)
    k_cache, v_cache = (torch.zeros(2, n + 8, 2, 64, device=w.device, dtype=torch.bfloat16) for _ in "kv")
    k_cache[:, : n - 1], v_cache[:, : n - 1] = k[:, :-1], v[:, :-1]
    pages = [x.view(-1, 8, 2, 64).clone() for x in (k_cache, v_cache)]
    table = torch.arange(pages[0].shape[0], dtype=torch.int32, device=w.device).view(2, -1)
    lens = torch.full((2,), n - 1, dtype=torch.int32, device=w.device)
    last = Expected([expected.exact[0][:, -1:]], [[sample[0][:, -1:]] for sample in expected.samples])
    for caches, options in (((k_cache, v_cache), {}), (pages, {"block_table": table})):
        with w.runs(FORWARD):
            out = flash_attn.flash_attn_with_kvcache(
                q[:, -1:], *caches, k[:, -1:], v[:, -1:], cache_seqlens=lens, causal=True, **options
            )
        last.hold(f"a step, {[*options]}", [out])
    return "plain, packed, a step over rows and over pages"


def door_kvcache(w: Where) -> str:
    """`KVCache`: prompts, steps with rotation, forks that share pages, a cascade, swaps."""
    given = {} if torch.empty(0).device == torch.empty(0, device=w.device).device else {"device": w.device}
    cache = KVCache(256, 16, 2, 64, num_layers=2, dtype=torch.bfloat16, **given)
    a, b = cache.add(2)
    rope, kept = Rope(), []
    for counts in ([40, 25], [1, 1], [1, 3]):
        q, k, v = (w.normal(sum(counts), h, 64) for h in (4, 2, 2))
        with cache.reserve([a, b], counts) as step, w.runs(FORWARD):
            for layer in range(2):
                turned = step.write(k, v, layer=layer, rope=rope, q=q)
                out = cache.attend(turned, step, layer=layer)
        kept.append((counts, turned, out))
    counts, q, out = kept[-1]
    first = 0
    for request, rows in zip((a, b), counts, strict=True):
        k, v = cache.read(request, layer=1)
        own = slice(first, first + rows)
        hold_rows(f"request of {k.shape[0]}", q[own], k, v, out[own])
        first += rows
    (c,) = cache.fork(a)
    q = w.normal(2, 4, 64)
    with w.runs(FORWARD):
        out = cache.attend(q, [a, c], layer=0, cascade=True)
    k, v = cache.read(a, layer=0)
    hold_rows("cascade", q[:1], k, v, out[:1])
    (a,) = cache.swap_in(cache.swap_out(a))
    if not torch.equal(cache.read(a, layer=0)[0], k):
        raise AssertionError("other keys after a swap")
    cache.check()
    return f"on {cache.device}: 3 steps of 2 layers, a cascade, a swap"


def door_graphs(w: Where) -> str:
    """Within CUDA graph capture and torch's sync debug mode nothing waits for the GPU."""
    if not w.is_cuda:
        raise Skip("wants a CUDA device")
    q = w.normal(2, 4, w.rows, 64)
    caches = [w.normal(32, 16, 2, 64) for _ in "kv"]
    table = torch.arange(32, dtype=torch.int32, device=w.device).view(2, 16)
    lens, new = torch.full((2,), 100, dtype=torch.int32, device=w.device), w.normal(2, 1, 2, 64)

    def by_sdpa() -> Tensor:
        with sdpa.enabled(strict=True):
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    def dropped() -> Tensor:
        with sdpa.enabled(strict=True):
            return F.scaled_dot_product_attention(q, q, q, dropout_p=0.2)

    def by_flash() -> Tensor:
        return flash_attn.flash_attn_with_kvcache(
            q[:, :, :1].transpose(1, 2), *caches, new, new, cache_seqlens=lens, block_table=table, causal=True
        )

    for call in (by_sdpa, dropped, by_flash):
        call()  # compiles
        torch.cuda.synchronize()
        with no_waiting():
            call()
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            out = call()
        if call is not dropped:
            q.copy_(w.normal(*q.shape))
        recorded.replay()
        torch.cuda.synchronize()
        if call is not dropped and not torch.equal(out, call()):
            raise AssertionError(f"{call.__name__}: a replay differs from a call")
    cache = KVCache(64, 16, 2, 64, dtype=torch.bfloat16, device=w.device)
    requests = cache.add(2)
    k = w.normal(40, 2, 64)
    cache.append(requests, k, k, counts=20)
    for counts in (1, 2):
        k, rows = w.normal(2 * counts, 2, 64), w.normal(2 * counts, 4, 64)
        for waits in (contextlib.nullcontext, no_waiting):
            with waits(), cache.reserve(requests, counts) as step:
                rows = step.write(k, k, rope=Rope(), q=rows)
                cache.attend(rows, step)
    return "SDPA, dropout, a paged step with writes; KVCache steps without a wait"


def functions(w: Where) -> dict[str, Callable[[torch.dtype], list[Tensor]]]:
    """Calls of every function, on copies of the same values."""
    n, long = w.rows, 2048 if w.is_cuda else 48
    q, k, v = (w.normal(2, h, n, 64) for h in (4, 2, 2))
    far, *others = (w.normal(3, h, long, 128) for h in (8, 4, 4))  # enough tiles for Gluon
    bounds = torch.tensor([0, n // 3, n], dtype=torch.int32, device=w.device)
    table = torch.arange(n // 4, dtype=torch.int32, device=w.device).view(2, -1)
    lens = torch.tensor([n, n - 5], dtype=torch.int32, device=w.device)

    def trained(call: Callable[..., Tensor], *given: Tensor) -> list[Tensor]:
        inputs = [x.requires_grad_() for x in given]
        out = call(*inputs)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]

    def sums(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        _, lse = polyflash.attention(q, k, v, causal=True, return_lse=True)
        return [lse, polyflash.column_sums(q, k, lse, causal=True)]

    def varlen(*rows: Tensor) -> Tensor:
        return polyflash.attention_varlen(*rows, bounds, bounds, causal=True)

    def paged(q: Tensor, *pools: Tensor) -> list[Tensor]:
        pages = (x.transpose(1, 2).reshape(-1, 8, 2, 64) for x in pools)
        return [polyflash.attention_paged(q[:, :, -1], *pages, table, lens)]

    def groups(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        parts = q.split([n // 3, n - n // 3], 2)
        return polyflash.attention_groups(parts, k, v, q_offsets=[0, n // 3], fused=True)

    causal = functools.partial(polyflash.attention, causal=True)
    near, packed = (q, k, v), [x[0].transpose(0, 1) for x in (q, k, v)]
    calls: dict[str, tuple[Callable[..., list[Tensor]], Sequence[Tensor]]] = {
        "attention": (lambda *x: [causal(*x)], near),
        "gradients": (functools.partial(trained, causal), near),
        "long": (lambda *x: [causal(*x)], (far, *others)),
        "long gradients": (functools.partial(trained, causal), (far, *others)),
        "step": (lambda q, k, v: [causal(q[:, :, -1:], k, v)], (far, *others)),
        "varlen": (functools.partial(trained, varlen), packed),
        **{name: (call, near) for name, call in (("paged", paged), ("groups", groups), ("sums", sums))},
    }
    copied = functools.partial(torch.Tensor.to, copy=True)
    return {
        name: lambda dtype, call=call, given=given: call(*(copied(x.detach(), dtype) for x in given))
        for name, (call, given) in calls.items()
    }


def door_functions(w: Where) -> str:
    """Every function by its own name, four times each, so that a replayed call is met: the same bits, those
    of torch operations in float64 within the rule."""
    gluon = w.is_cuda and torch.cuda.get_device_capability(w.device) == (9, 0)
    wanted = {"gradients": BACKWARD} | ({"long": GLUON[:1], "long gradients": GLUON} if gluon else {})
    for name, call in functions(w).items():
        with polyflash.use_backend("torch"):
            expected = Expected(call(torch.float64), [call(torch.bfloat16)])
        with w.runs(wanted.get(name, FORWARD)):
            found = [call(torch.bfloat16) for _ in range(4)]
        expected.hold(name, found[0])
        for again in found[1:]:
            if not all(torch.equal(a, b) for a, b in zip(found[0], again, strict=True)):
                raise AssertionError(f"{name}: other bits in a later call")
        if any(x.device != w.device for x in found[-1]):
            raise AssertionError(f"{name}: a result left {w.device}")
    return ", ".join(functions(w))


def door_second_device(w: Where) -> str:
    """Tensors of another GPU than the current one, through SDPA, a cache, the flash-attn façade and every
    function; the functions again on both GPUs by turns, with the other as torch's default, or current."""
    if not w.is_cuda or torch.cuda.device_count() < 2:
        raise Skip(f"{torch.cuda.device_count()} GPUs")
    other = Where(f"cuda:{torch.cuda.device_count() - 1}", w.backend)
    torch.cuda.set_device(0)
    done = [door(other) for door in (door_sdpa, door_kvcache, door_flash_attn, door_functions)]
    for place in (other.device, torch.cuda.device(other.device)):
        door_functions(w)
        with place:
            door_functions(other)
    with other.device:
        door_kvcache(other)
    if torch.cuda.current_device() != 0:
        raise AssertionError("another device is current now")
    w.seen |= other.seen
    return f"{other.device}: {'; '.join(done)}"


DOORS: dict[str, Callable[[Where], str]] = {
    name.removeprefix("door_").replace("_", "-"): function
    for name, function in list(globals().items())
    if name.startswith("door_")
}


def answer(name: str, w: Where, default: bool) -> tuple[str, str]:
    """ok, FAILED or skip, and what there is to say."""
    torch.manual_seed(0)
    w.seen = set()
    chosen = polyflash.use_backend(w.backend) if w.backend else contextlib.nullcontext()
    place = torch.device(w.device) if default else contextlib.nullcontext()
    try:
        with warnings.catch_warnings(), place, chosen:
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            said = DOORS[name](w)
    except Skip as reason:
        return "skip", str(reason)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return "FAILED", f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
    return "ok", f"{said} [{', '.join(sorted(w.seen))}]"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("doors", nargs="*", metavar="DOOR", help=f"of {', '.join(DOORS)}; all")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--backend", help="ask for it by name; without it the table must choose our kernel")
    options = parser.parse_args(argv)
    unknown = set(options.doors) - set(DOORS)
    if unknown:
        parser.error(f"no door {', '.join(sorted(unknown))}; there are {', '.join(DOORS)}")
    w, failed = Where(options.device, options.backend), 0
    if w.is_cuda:
        print(f"{torch.cuda.get_device_name(w.device)}, torch {torch.__version__}", flush=True)
    for name in options.doors or DOORS:
        for default in (False, True):
            began = time.monotonic()
            verdict, said = answer(name, w, default)
            failed += verdict == "FAILED"
            label = f"{name}{', default device' * default}"
            print(f"{verdict:<7}{label:<32}{time.monotonic() - began:6.1f} s  {said}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
