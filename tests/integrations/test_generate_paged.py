"""transformers models that keep their keys in pages, and the example that generates with one."""

from __future__ import annotations

import copy
import json
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5")

from polyflash import SpecError, UnsupportedError  # noqa: E402
from polyflash.integrations import transformers as plug_in  # noqa: E402
from polyflash.integrations.transformers import layer  # noqa: E402
from polyflash.integrations.transformers_cache import PagedCache, PagedStates, register  # noqa: E402
from polyflash.kvcache import KVCache, OutOfPages, Rope  # noqa: E402
from polyflash.quant.families import FAMILIES  # noqa: E402
from tests.device import DEVICE  # noqa: E402
from tests.integrations.models import RECIPES, build, padding, tokens  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "generate_paged.py"
NAME = "poly pages"
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


@pytest.fixture(autouse=True, scope="module")
def pages_registered() -> None:
    register(NAME)


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers whose keys or values were copied out of their pages."""
    layers: list[int] = []
    dense = PagedStates.dense

    def noted(self: PagedStates) -> Tensor:
        layers.append(self.layer)
        return dense(self)

    monkeypatch.setattr(PagedStates, "dense", noted)
    return layers


def generate(name: str, implementation: str, pads: str = "left", **how: Any) -> Tensor:
    ids, mask = tokens(3, 11), padding(pads, 3, 11)
    how = {"max_new_tokens": 9, "do_sample": False, "disable_compile": True, **how}
    torch.manual_seed(5)
    return build(name, implementation).generate(
        ids, attention_mask=torch.ones_like(ids) if mask is None else mask, **how
    )


def in_pages(name: str, page_size: int = 4, cascade: bool = False) -> PagedCache:
    return PagedCache.of(build(name, NAME), 700, page_size=page_size, cascade=cascade)


@pytest.mark.parametrize("how", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_models_generate_from_pages_of_codes(quant: str, name: str, how: Any, gathered: list[int]):
    """The tokens that the values of the same codes give: gathered, through transformers' own attention."""
    model = build(name, NAME)
    caches = [PagedCache.of(model, 1400, page_size=64, quant=quant) for _ in range(2)]
    # Rows of padding see no key: of Gemma2 each attention makes others of them, which groups of tokens hold.
    pads = "none" if (quant, name) == ("int4", "Gemma2") else "left"
    got = generate(name, NAME, pads, past_key_values=caches[0], **how)
    assert not gathered and caches[0].cache.bytes_per_token < caches[0].cache.dtype.itemsize * sum(
        x.shape[2] * x.shape[3] * 2 for x in caches[0].cache.k_pages
    )
    assert torch.equal(got, generate(name, RECIPES[name].peers[0], pads, past_key_values=caches[1], **how))
    assert gathered
    for cache in caches:
        cache.reset()
        kv = cache.cache
        held = sum(x.nbytes for layer in range(kv.num_layers) for x in kv.stores(layer))
        assert kv.stats().tail_bytes == 0 and held == kv.bytes_per_token * kv.num_pages * kv.page_size


@pytest.mark.parametrize(
    ("family", "quant"),
    [
        pytest.param(family, quant, marks=() if "bias" in family else pytest.mark.slow)
        for family, quant in zip(
            FAMILIES, ("fp8", "int4", "int8", "int4-token", "int8-channel", "nf4"), strict=True
        )
    ],
)
def test_long_texts_from_codes_stay_finite(family: str, quant: str):
    """256 tokens of a bfloat16 Llama, whose q, k and v are made like those of a family of inputs."""
    model, draw = copy.deepcopy(build("Llama", NAME)).bfloat16(), torch.Generator().manual_seed(0)

    def changed(module: Any, given: Any, out: Tensor, which: int) -> Tensor:
        heads = out.unflatten(-1, (-1, 16)).cpu()
        return FAMILIES[family](*(heads.clone() for _ in "qkv"), draw)[which].flatten(-2).to(out)

    for name, module in model.named_modules():
        if (end := name[-6:]) in PROJECTIONS:
            module.register_forward_hook(partial(changed, which=PROJECTIONS.index(end)))
    cache = PagedCache.of(model, 700, page_size=64, quant=quant)
    how = {"max_new_tokens": 256, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    found = model.generate(tokens(2, 11), past_key_values=cache, disable_compile=True, **how)
    assert cache.length == 11 + 255 and len(found.logits) == 256
    assert bool(torch.stack(found.logits).isfinite().all())


@pytest.mark.parametrize("pads", ["none", "left"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen3", "Gemma2", "Gemma3", "GptOss"])
def test_models_generate_the_same_tokens_from_pages(name: str, pads: str, gathered: list[int]):
    """Windows shorter than the prompt, softcap, sinks, two masks per call; padding at the left."""
    cache = in_pages(name)
    got = generate(name, NAME, pads, past_key_values=cache)
    assert torch.equal(got, generate(name, RECIPES[name].peers[0], pads)) and not gathered
    assert cache.length == got.shape[1] - 1 and cache.get_seq_length() == cache.length
    cache.cache.check()
    cache.reset()
    assert cache.length == 0 and cache.cache.num_free_pages == cache.cache.num_pages


@pytest.mark.parametrize("how", [
    {"num_beams": 4}, {"num_beams": 3, "num_return_sequences": 2, "early_stopping": True},
    {"do_sample": True, "num_return_sequences": 3},
])  # fmt: skip
@pytest.mark.parametrize("cascade", [False, True])
def test_beams_and_samples_share_pages(how: dict[str, Any], cascade: bool, gathered: list[int]):
    cache = in_pages("Llama", cascade=cascade)
    got = generate("Llama", NAME, "none", past_key_values=cache, **how)
    assert torch.equal(got, generate("Llama", "sdpa", "none", **how)) and not gathered
    used, whole = cache.cache.num_pages - cache.cache.num_free_pages, -(-cache.length // 4)
    entries = how.get("num_beams", 3)
    assert len(cache.requests) == 3 * entries
    assert used < 3 * entries * whole if "num_beams" in how else used == 3 * entries * whole
    cache.cache.check()


def test_speculation_cuts_the_cache_back(gathered: list[int]):
    """Prompt lookup: several rows per step, rejected tokens truncated away."""
    ids = tokens(1, 6).repeat(1, 4)
    how = {"max_new_tokens": 24, "do_sample": False, "prompt_lookup_num_tokens": 3}
    want, got = (
        build("Llama", name).generate(
            ids, **how, **({"past_key_values": in_pages("Llama")} if name == NAME else {})
        )
        for name in ("sdpa", NAME)
    )
    assert torch.equal(got, want) and not gathered


def test_a_conversation_goes_on_in_its_cache():
    model, cache = build("Llama", NAME), in_pages("Llama", 3)
    how = {"max_new_tokens": 5, "do_sample": False, "past_key_values": cache}
    first = model.generate(tokens(2, 7), **how)
    longer = torch.cat((first, tokens(2, 4)), 1)
    second = model.generate(longer, **how)
    want = build("Llama", "sdpa").generate(longer, max_new_tokens=5, do_sample=False)
    assert torch.equal(second, want) and cache.length == second.shape[1] - 1


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "poly"])
def test_any_attention_sees_the_tensors_it_expects(implementation: str, gathered: list[int]):
    """Those that know nothing of pages gather them; polyflash reads them, whoever registered it."""
    plug_in.register("poly")
    got = generate("Llama", implementation, past_key_values=in_pages("Llama"))
    assert torch.equal(got, generate("Llama", "sdpa"))
    assert set(gathered) == (set() if implementation == "poly" else {0, 1})


@torch.no_grad()
@pytest.mark.parametrize("pads", ["left", "right", "hole"])
def test_padding_anywhere_and_masks_that_lengths_cannot_say(pads: str, gathered: list[int]):
    """Those with holes are attended over a copy."""
    ids, mask = tokens(3, 21), padding(pads, 3, 21)
    live = mask.bool()  # type: ignore[union-attr]
    positions = (live.long().cumsum(1) - 1).clamp(min=0)
    want, got = (
        build("Llama", name)(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits[
            live
        ]
        for name, cache in (("sdpa", None), (NAME, in_pages("Llama")))
    )
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert bool(gathered) is (pads == "hole")


@torch.no_grad()
def test_packed_documents_and_unknown_arguments():
    model = build("Llama", NAME)
    ids = tokens(1, 12)
    restarting = torch.tensor([[*range(5), *range(7)]])
    got = model(ids, position_ids=restarting, past_key_values=in_pages("Llama")).logits
    want = build("Llama", "poly")(ids, position_ids=restarting, use_cache=False).logits
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    for arguments in ({"unheard_of": 3}, {"cache": 3}):
        with pytest.raises(UnsupportedError):
            layer._attention_forward(
                model,
                torch.randn(1, 4, 1, 16),
                *in_pages("Llama").write(0, *torch.randn(2, 1, 2, 3, 16)),
                None,
                **arguments,
            )


@torch.no_grad()
def test_a_failed_pass_is_taken_back(monkeypatch: pytest.MonkeyPatch):
    model, cache = build("Llama", NAME), in_pages("Llama")
    ids = tokens(2, 13)
    want = model(ids, use_cache=False).logits
    model(ids[:, :6], past_key_values=cache)
    free = cache.cache.num_free_pages
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1].mlp, "forward", lambda x: 1 / 0)
        patch.setattr(model.model.layers[1].self_attn.q_proj, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, 6:], past_key_values=cache)
    assert cache.length == 6
    with pytest.raises(SpecError, match="crop"):
        model(ids[:, 6:], past_key_values=cache)
    cache.crop(0)
    assert cache.cache.num_free_pages == free
    torch.testing.assert_close(
        model(ids[:, 6:], past_key_values=cache).logits, want[:, 6:], atol=1e-4, rtol=1e-4
    )
    small = PagedCache(KVCache(3, 4, 2, 16, num_layers=2))
    model(ids[:, :4], past_key_values=small)
    with pytest.raises(OutOfPages):
        model(ids[:, 4:], past_key_values=small)
    assert small.length == 4
    small.crop(torch.tensor(-2))  # as assisted generation counts
    model(ids[:, 2:4], past_key_values=small)
    torch.testing.assert_close(
        PagedStates(small, 1, 0, 4).dense(),
        PagedStates(cache, 1, 0, 13).dense()[:, :, :4],
        atol=1e-5,
        rtol=1e-5,
    )


@torch.no_grad()
def test_entries_are_chosen_repeated_and_cropped():
    model, cache = build("Llama", NAME), in_pages("Llama")
    model(tokens(3, 6), past_key_values=cache)
    before = PagedStates(cache, 0, 1, 6).dense()
    assert cache.batch_size == 3 and len(cache) == 2 and cache.is_croppable and not cache.is_compileable
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([5, 0, 0, -2]))
    cache.reorder_cache(torch.tensor([3, 1, 2, 0]))
    assert torch.equal(PagedStates(cache, 0, 1, 6).dense(), before[[2, 0, 0, 2]])
    cache.batch_select_indices(torch.tensor([True, False, True, False]))
    cache.crop(-2)
    assert torch.equal(PagedStates(cache, 0, 1, 4).dense(), before[[2, 0], :, :4]) and cache.length == 4
    cache.cache.check()
    assert len(cache.cache.requests()) == 2 and "layer 0" in repr(PagedStates(cache, 0, 1, 4))
    for wrong in (
        lambda: cache.crop(3), lambda: model(tokens(3, 2), past_key_values=cache), lambda: PagedCache(None),  # type: ignore[arg-type]
        lambda: cache.layers[0].reorder_cache(torch.tensor([0])), lambda: register("flash"),
        lambda: PagedCache.of(build("Bert", "sdpa").__class__(transformers.BertConfig(head_dim="x")), 4),
    ):  # fmt: skip
        with pytest.raises(SpecError):
            wrong()
    cache.layers[1].reset()
    assert cache.batch_size == -1 and cache.length == 0 and not cache.cache.requests()
    cache.batch_select_indices(torch.tensor([0]))
    assert cache.layers[0].get_max_length() == -1 and cache.get_mask_sizes(5, 0) == (5, 0)


@torch.no_grad()
def test_a_cache_too_small_for_its_first_pass_serves_a_smaller_one():
    model = build("Llama", NAME)
    cache, ids = PagedCache.of(model, 24, page_size=4), tokens(3, 11)
    others = cache.cache.add(1)
    with pytest.raises(OutOfPages):
        model(ids, past_key_values=cache)
    assert not cache.requests and cache.cache.requests() == others and cache.cache.num_free_pages == 6
    got = model(ids[:1], past_key_values=cache).logits
    torch.testing.assert_close(got, build("Llama", "sdpa")(ids[:1]).logits, atol=1e-4, rtol=1e-4)
    kept = cache.requests
    with pytest.raises(OutOfPages):
        model(tokens(1, 14), past_key_values=cache)
    assert cache.requests == kept and cache.length == 11
    cache.cache.check()


@torch.no_grad()
def test_autocast_fills_a_pool_of_the_models_dtype():
    """Values leave their projection in bfloat16, keys leave the rotation in float32."""
    model, cache, ids = build("Llama", NAME), in_pages("Llama"), tokens(2, 11)
    plain = transformers.DynamicCache()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        got = model(ids, past_key_values=cache).logits
        want = build("Llama", "sdpa")(ids, past_key_values=plain).logits
    for request, keys, values in zip(
        cache.requests, plain.layers[0].keys, plain.layers[0].values, strict=True
    ):
        stored = cache.cache.read(request)
        assert torch.equal(stored[0], keys.transpose(0, 1).float())
        assert torch.equal(stored[1], values.transpose(0, 1).float())
        assert torch.equal(stored[1], stored[1].bfloat16().float())
    exact = build("Llama", "sdpa")(ids).logits
    assert (got - exact).norm() <= 1.5 * (want - exact).norm() <= 0.03 * exact.norm()


def test_a_refused_token_says_what_to_change():
    pool = KVCache(4, 4, 2, 8)
    good, words = torch.zeros(3, 2, 8), rf"Use v\.to\('{pool.device}', torch\.float32\)"
    with pool.reserve(pool.add(1), 3) as step:
        for wrong in (good.bfloat16(), good.double(), good.to("meta")):
            with pytest.raises(SpecError, match=words):
                step.write(good, wrong)
        for wrong in (good[:2], good.bfloat16()[:2], good.to_sparse(), None):
            with pytest.raises(SpecError, match=r"v is \(tokens, num_kv_heads, channels\) of the cache"):
                step.write(good, wrong)
        step.write(good, good)


@pytest.mark.parametrize("change, words", [
    ({"page_size": 0}, "page_size: got 0, wanted an int from 1"),
    ({"page_size": 4.0}, r"page_size: got 4\.0"),
    ({"tokens": 64.0}, r"tokens: got 64\.0, wanted an int from 0"),
    ({"tokens": -5}, "tokens: got -5"),
])  # fmt: skip
def test_a_cache_of_no_such_size_is_refused(change: dict[str, Any], words: str):
    with pytest.raises(SpecError, match=words):
        PagedCache.of(build("Llama", NAME), **{"tokens": 64} | change)


def test_several_caches_share_one_pool():
    pool = in_pages("Llama").cache
    first, second = PagedCache(pool), PagedCache(pool)
    want = generate("Llama", "sdpa")
    for cache in (first, second):
        assert torch.equal(generate("Llama", NAME, past_key_values=cache), want)
    first.reset()
    assert second.length == want.shape[1] - 1
    pool.check()


def test_the_rotation_of_transformers_is_ours():
    from transformers.models.llama import modeling_llama

    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=64)
    x, at = torch.randn(1, 4, 33, 16), torch.arange(33)[None]
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(x, at)
    want, _ = modeling_llama.apply_rotary_pos_emb(x, x, cos, sin)
    rows = x[0].transpose(0, 1)
    for rope in (Rope(), Rope(cos=cos[0, :, :8], sin=sin[0, :, :8])):
        assert float((rope.rotate(rows, at[0]).transpose(0, 1) - want[0]).abs().max()) <= 1e-6


@pytest.mark.skipif(not EXAMPLE.exists(), reason="needs a checkout")
def test_the_example_draws_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    example = runpy.run_path(str(EXAMPLE), run_name="example")
    small = [
        "--tokens",
        "6",
        "--beams",
        "2",
        "--layers",
        "2",
        "--width",
        "32",
        "--heads",
        "4",
        "--seconds",
        "0.02",
    ]
    files = ["--plot", str(tmp_path / "a.png"), "--json", str(tmp_path / "a.json")]
    assert example["main"]([*small, "--contexts", "16,64", *files]) == 0
    results = json.loads((tmp_path / "a.json").read_text("utf-8"))
    assert [x["how"] for x in results["generated"]] == ["greedy", "beams"]
    assert all(x["equal"] for x in results["generated"])
    assert results["generated"][1]["pages"] < results["generated"][1]["unshared"]
    assert [p["context"] for p in results["points"]] == [16, 64]
    assert all(p["difference"] < 1e-4 and min(p["rates"].values()) > 0 for p in results["points"])
    assert (tmp_path / "a.png").read_bytes().startswith(
        b"\x89PNG"
    ) and "same tokens" in capsys.readouterr().out
    for wrong in (["--heads", "3"], ["--tokens", "0"], ["--contexts", "8,x"], ["--dtype", "int8"]):
        with pytest.raises(SystemExit) as ended:
            example["arguments"](wrong)
        assert ended.value.code == 2
