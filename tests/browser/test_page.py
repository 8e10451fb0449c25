"""examples/web in a headless Chromium: its kernels against float64, its training against the CPU engine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import web
from torch import Tensor
from torch.nn import functional

import polyflash
from tests.browser import chromium

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "examples" / "web"
SETTINGS = json.loads((PAGE / "training.json").read_text(encoding="utf-8"))


def test_the_page_has_the_engines_kernels(
    capsys: pytest.CaptureFixture[str], monkeypatch: Any, tmp_path: Path
):
    """`python scripts/web.py` mends it."""
    pytest.importorskip("wgpu")
    assert web.main(["--check"]) == 0, capsys.readouterr().out
    stale = tmp_path / "kernels.json"
    stale.write_text(web.PAGE.read_text(encoding="utf-8").replace("let ", "var ", 1), encoding="utf-8")
    monkeypatch.setattr(web, "PAGE", stale)
    assert web.main(["--check"]) == 1


def test_the_page_reaches_no_network():
    for path in PAGE.iterdir():
        text = path.read_text(encoding="utf-8")
        assert "//cdn" not in text and 'src="http' not in text and 'from "http' not in text, path.name
    assert (
        sum((PAGE / name).stat().st_size for name in ("gpu.js", "model.js", "page.js", "reference.js"))
        < 40_000
    )


@pytest.fixture
def server() -> Iterator[chromium.Server]:
    with chromium.served(PAGE) as opened:
        yield opened


@pytest.fixture
def browser() -> Iterator[chromium.Browser]:
    if chromium.executable() is None:
        pytest.skip("no Chromium here: `sh scripts/drivers.sh swiftshader` installs one on Debian")
    with chromium.browser() as opened:
        yield opened


def uniform(x: int) -> Iterator[float]:
    """xorshift of 32 bits, as reference.js has it."""
    while True:
        x ^= x << 13 & 0xFFFFFFFF
        x ^= x >> 17
        x ^= x << 5 & 0xFFFFFFFF
        yield x / 2**32


class Twin:
    """The model of model.js in torch, with the same seed."""

    def __init__(self, dtype: torch.dtype, attend: Any) -> None:
        self.dtype, self.attend, self.random = dtype, attend, uniform(SETTINGS["seed"])
        alphabet = sorted(set(SETTINGS["text"]))
        self.ids = torch.tensor([alphabet.index(c) for c in SETTINGS["text"]])
        self.width = w = SETTINGS["width"]
        wide = 1 / math.sqrt(w)
        self.parameters = {
            "characters": self.parameter(len(alphabet), w, 0.5),
            "places": self.parameter(SETTINGS["rows"], w, 0.5),
        }
        for i in range(SETTINGS["layers"]):
            self.parameters |= {
                f"qkv{i}": self.parameter(w, 3 * w, wide),
                f"out{i}": self.parameter(w, w, wide),
                f"up{i}": self.parameter(w, 4 * w, wide),
                f"down{i}": self.parameter(4 * w, w, wide / 2),
            }
        self.parameters["head"] = self.parameter(w, len(alphabet), wide)

    def parameter(self, rows: int, columns: int, size: float) -> Tensor:
        values = [(2 * next(self.random) - 1) * size for _ in range(rows * columns)]
        return torch.tensor(values).to(self.dtype).view(rows, columns).requires_grad_()

    def norm(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, (self.width,), eps=1e-5)

    def loss(self, batch: Tensor) -> Tensor:
        p, heads = self.parameters, SETTINGS["heads"]
        x = p["characters"][batch[:, :-1]] + p["places"]
        for i in range(SETTINGS["layers"]):
            qkv = (self.norm(x) @ p[f"qkv{i}"]).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            x = x + self.attend(*qkv).transpose(1, 2).flatten(2) @ p[f"out{i}"]
            x = x + functional.silu(self.norm(x) @ p[f"up{i}"]) @ p[f"down{i}"]
        logits = self.norm(x) @ p["head"]
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def train(self) -> Tensor:
        """The loss before each step."""
        given = {"lr": SETTINGS["rate"], "betas": tuple(SETTINGS["decay"]), "eps": SETTINGS["epsilon"]}
        optimizer, rows, losses = torch.optim.Adam(self.parameters.values(), **given), SETTINGS["rows"], []
        for _ in range(SETTINGS["steps"]):
            starts = [int(next(self.random) * (len(self.ids) - rows)) for _ in range(SETTINGS["batch"])]
            loss = self.loss(torch.stack([self.ids[start : start + rows + 1] for start in starts]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return torch.tensor(losses, dtype=torch.float64)


def by_the_cpu_engine(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return polyflash.attention(q, k, v, causal=True, backend="cpu")


def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.slow
def test_the_page_checks_measures_and_trains(server: chromium.Server, browser: chromium.Browser):
    browser.size(390, 844, "light")
    browser.open(f"{server.url}?report")
    assert server.has_posted.wait(400), browser.evaluate("document.body.innerText")
    (found,) = server.posted
    assert "failed" not in found, found["failed"]
    for scheme in ("light", "dark"):
        browser.size(390, 844, scheme)
        browser.screenshot(ROOT / "build" / "web" / f"page-{scheme}.png")
    width = browser.evaluate("document.documentElement.scrollWidth")
    assert width <= 390, "a phone scrolls sideways"
    assert found["machine"] == "cpu" and found["subgroup"] == 4
    checked = {(x["template"], x["head_dim"]) for x in found["checks"]}
    assert checked == {(template, d) for template in web.TEMPLATES for d in (16, 64)}
    for check in found["checks"]:
        assert set(check["errors"]) == {"out", "lse", "dq", "dk", "dv"}
        assert check["right"] and max(check["errors"].values()) < 2e-6, check
    assert found["measure"] and all(x["gflops"] > 0 for x in found["measure"])

    page = torch.tensor(found["train"], dtype=torch.float64)
    ours, exact = Twin(torch.float32, by_the_cpu_engine).train(), Twin(torch.float64, by_torch).train()
    rounding = (ours - exact).abs().cummax(0).values  # which grows from step to step
    assert page[-20:].mean() < 0.6 * page[0], "it learns"
    assert bool(((page - ours).abs() < 8 * rounding + 1e-6).all()), (page - ours).abs().max()
    assert float((page - ours).abs().max()) < 1e-3


# Every text as Dawn reads it. Those for graphics cards run, at a head_dim that SwiftShader compiles quickly.
_FOR_CARDS = """(async () => {
  const { open } = await import("./gpu.js");
  const { attention, error, normal, uniform } = await import("./reference.js");
  const gpu = await open(await (await fetch("kernels.json")).json());
  gpu.machine = "gpu";
  for (const { code } of gpu.facts.kernels) {
    const { messages } = await gpu.device.createShaderModule({ code }).getCompilationInfo();
    if (messages.length) throw new Error(messages[0].message);
  }
  const errors = {};
  for (const facts of gpu.calls("check")) {
    const call = await gpu.ready(facts), random = uniform(2);
    const [q, k, v, dout] = ["q", "k", "v", "q"].map((name) => normal(random, facts.bytes[name] / 4));
    const got = await call.forward(q, k, v), want = attention(facts, q, k, v, dout);
    Object.assign(got, await call.backward(got.out, got.lse, dout));
    errors[facts.template] = Object.keys(want).map((name) => error(got[name], want[name]));
  }
  return errors;
})()"""


@pytest.mark.slow
def test_texts_for_graphics_cards(server: chromium.Server, browser: chromium.Browser):
    browser.open(f"{server.url}training.json")
    errors = browser.evaluate(_FOR_CARDS)
    assert set(errors) == set(web.TEMPLATES)
    assert all(len(each) == 5 and max(each) < 2e-6 for each in errors.values()), errors


@pytest.mark.slow
def test_without_webgpu_the_page_says_so(server: chromium.Server, browser: chromium.Browser):
    hide = "Object.defineProperty(Navigator.prototype, 'gpu', { get: () => undefined })"
    browser.send("Page.enable")
    browser.send("Page.addScriptToEvaluateOnNewDocument", source=hide)
    browser.open(f"{server.url}?report")
    assert server.has_posted.wait(30)
    assert "offers no WebGPU adapter" in browser.evaluate("document.getElementById('status').textContent")
    assert browser.evaluate("document.getElementById('train').disabled")
