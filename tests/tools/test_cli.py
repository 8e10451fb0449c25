"""The command line: what it prints, writes and returns, on real tensors and on bad input."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

import polyflash
from benchmarks import command as bench_command
from polyflash import cli, commands, options, target, tensor_files
from polyflash.bench.command import machine
from polyflash.reference import attention_reference
from tests.chosen import chosen

SLICE = str(Path(__file__).parents[1] / "data" / "minilm_qkv_slice.safetensors")
ESCAPE = "\x1b["


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A narrow terminal without colour, and no time spent on medians."""
    monkeypatch.setattr(commands, "_TIMED", 0.0)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "NO_COLOR", "POLYFLASH_BACKEND"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def polyflash_main(capsys):
    """Runs a command; returns exit code, stdout, stderr."""

    def call(*argv: object) -> tuple[int, str, str]:
        code = cli.main([str(word) for word in argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def qkv(tmp_path):
    """q (2, 10, 8), k and v (1, 14, 8) float32 without a batch dimension, as .npz and as three .npy."""
    generator = np.random.default_rng(0)
    arrays = {"q": (2, 10, 8), "k": (1, 14, 8), "v": (1, 14, 8)}
    arrays = {name: generator.standard_normal(shape, dtype=np.float32) for name, shape in arrays.items()}
    np.savez(tmp_path / "qkv.npz", **arrays)
    for name, x in arrays.items():
        np.save(tmp_path / f"{name}.npy", x)
    return tmp_path, arrays


def oracle(arrays, **options):
    return attention_reference(*(torch.from_numpy(x)[None] for x in arrays.values()), **options)


def test_run_on_real_tensors_writes_output_and_lse(polyflash_main, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    code, out, err = polyflash_main("run", SLICE, "--causal", "-o", tmp_path / "result")
    assert (code, err) == (0, "")
    for word in (
        "layer3.q",
        "float16 1×2×256×32",
        "plan",
        "median of",
        "GFLOP/s",
        "relative L2",
        "ok",
        "result.safetensors",
    ):
        assert word in out
    assert ESCAPE not in out
    inputs = safetensors.load_file(SLICE)
    written = safetensors.load_file(tmp_path / "result.safetensors")
    expected = attention_reference(*(inputs[f"layer3.{r}"] for r in "qkv"), causal=True)
    assert written["out"].dtype is torch.float16
    assert torch.allclose(written["out"].double(), expected.out, atol=2e-3)
    assert torch.allclose(written["lse"].double(), expected.lse, atol=1e-5)


def test_run_json_has_a_schema_and_every_figure(polyflash_main):
    pytest.importorskip("safetensors")
    code, out, _ = polyflash_main("run", SLICE, "--json", "--window", "20,none", "--dtype", "bfloat16")
    found = json.loads(out)
    assert code == 0
    assert found["schema"] == "polyflash.run/1"
    assert found["plan"]["problem"]["dtype"] == "bfloat16"
    assert found["plan"]["problem"]["window"] == [20, None]
    assert found["plan"]["chosen"] in {"cpu/forward", "torch/forward"}
    assert found["error"]["ok"] and 0 < found["error"]["relative_l2"] < found["error"]["tolerance"]
    assert found["seconds"]["calls"] >= 3 and found["seconds"]["median"] > 0
    assert found["gflops"] > 0
    assert found["written"] == []


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_run_npz_without_a_batch_dimension(polyflash_main, qkv, dtype):
    folder, arrays = qkv
    code, _, err = polyflash_main(
        "run", folder / "qkv.npz", "--dtype", dtype, "-o", folder / "result", "--quiet"
    )
    assert (code, err) == (0, "")
    with np.load(folder / "result.npz") as written:
        expected = oracle(arrays)
        assert written["out"].dtype == np.dtype(dtype)
        assert np.allclose(written["out"], expected.out[0], atol=1e-5)
        assert np.allclose(written["lse"], expected.lse[0], atol=1e-5)


def test_run_three_npy_with_top_left_scale_and_window(polyflash_main, qkv):
    folder, arrays = qkv
    files = [folder / f"{name}.npy" for name in "qkv"]
    options = ("--causal", "top_left", "--scale", "-0.5", "--window", "4,1")
    code, out, _ = polyflash_main("run", *files, *options, "-o", folder / "result.npy")
    assert code == 0
    expected = oracle(arrays, causal="top_left", scale=-0.5, window=(4, 1))
    assert np.allclose(np.load(folder / "result.npy"), expected.out[0], atol=1e-5)
    assert np.allclose(np.load(folder / "result.lse.npy"), expected.lse[0], atol=1e-5)
    assert out.count("wrote") == 2


def test_run_layout_bshd(polyflash_main, qkv):
    folder, arrays = qkv
    swapped = {name: np.ascontiguousarray(x.swapaxes(0, 1)) for name, x in arrays.items()}
    np.savez(folder / "bshd.npz", **swapped)
    code, _, _ = polyflash_main(
        "run", folder / "bshd.npz", "--layout", "bshd", "--causal", "-o", folder / "result.npz"
    )
    assert code == 0
    with np.load(folder / "result.npz") as written:
        assert np.allclose(written["out"].swapaxes(0, 1), oracle(arrays, causal=True).out[0], atol=1e-5)


def test_run_bfloat16_into_npz_is_float32(polyflash_main, qkv):
    folder, _ = qkv
    code, _, _ = polyflash_main("run", folder / "qkv.npz", "--dtype", "bfloat16", "-o", folder / "result.npz")
    with np.load(folder / "result.npz") as written:
        assert code == 0 and written["out"].dtype == np.float32


def test_run_reads_big_endian_and_reversed_arrays(polyflash_main, qkv):
    folder, arrays = qkv
    np.savez(folder / "odd.npz", **{name: x[:, ::-1].astype(">f4") for name, x in arrays.items()})
    code, _, err = polyflash_main("run", folder / "odd.npz", "-o", folder / "result.npz")
    assert (code, err) == (0, "")
    with np.load(folder / "result.npz") as written:
        assert np.allclose(written["out"][:, ::-1], oracle(arrays).out[0], atol=1e-5)


def test_run_says_mismatch_and_returns_1(polyflash_main, qkv, monkeypatch):
    folder, _ = qkv
    attention = polyflash.attention

    def wrong(q, k, v, **options):
        out, lse = attention(q, k, v, **options)
        return polyflash.AttentionOutput(out * 1.01, lse)

    monkeypatch.setattr(polyflash, "attention", wrong)
    code, out, err = polyflash_main("run", folder / "qkv.npz")
    assert code == 1
    assert "mismatch" in out and "mismatch" in err
    code, out, _ = polyflash_main("run", folder / "qkv.npz", "--json")
    assert code == 1 and json.loads(out)["error"]["ok"] is False


def test_names_of_tensors():
    both = ["layer0.q", "layer0.k", "layer0.v", "layer1.q", "layer1.k", "layer1.v"]
    assert tensor_files._named({"q": "layer1.q", "k": None, "v": None}, both) == both[3:]
    assert tensor_files._named({"q": "layer1.q", "k": "layer0.k", "v": None}, both) == [
        both[3],
        both[1],
        both[5],
    ]
    assert tensor_files._named({"q": None, "k": None, "v": None}, ["a_Q", "k", "x/v", "mask"]) == [
        "a_Q",
        "k",
        "x/v",
    ]
    with pytest.raises(polyflash.SpecError, match=r"layer0\.q, layer1\.q\. Pass --q NAME"):
        tensor_files._named({"q": None, "k": None, "v": None}, both)


BAD = {
    "no such file": (1, ("run", "{}/none.npz"), ("none.npz", "No such file")),
    "one npy": (1, ("run", "{}/q.npy"), ("wanted one .safetensors or .npz, or three .npy",)),
    "unknown suffix": (1, ("run", "{}/q.pt"), ("wanted one .safetensors",)),
    "unknown name": (1, ("run", "{}/qkv.npz", "--k", "w"), ("k: got w, wanted one of ", "Pass --k NAME.")),
    "pickled": (1, ("run", "{}/pickled.npz"), ("wanted plain numbers",)),
    "no archive": (1, ("run", "{}/text.npz"), ("text.npz", "wanted")),
    "no safetensors": (1, ("run", "{}/text.safetensors"), ("wanted a .safetensors file",)),
    "integers": (1, ("run", "{}/integers.npz"), ("int64", "float16, float32 or float64")),
    "two dimensions": (1, ("run", "{}/flat.npz"), ("wanted ([batch,] heads, seqlen, head_dim) each",)),
    "head ratio": (1, ("run", "{}/ratio.npz"), ("3 query heads over 2", "a whole number")),
    "over an input": (1, ("run", "{}/qkv.npz", "-o", "{}/qkv.npz"), ("another file than the inputs",)),
    "no folder": (
        2,
        ("run", "{}/qkv.npz", "-o", "{}/none/out.npz"),
        ("none/out.npz'", "folder that is there"),
    ),
    "a folder": (2, ("ablate", "--seqlen", "40", "--json", "{}"), ("--json", "a folder that is there")),
    "sizes of no problem": (1, ("tune", "--heads", "32/8"), ("--heads", "without --seqlen")),
    "more than memory": (1, ("ablate", "--seqlen", "1000000000000"), ("can't allocate memory",)),
    "negative window": (1, ("run", "{}/qkv.npz", "--window=-1,0"), ("window", "None for unbounded")),
    "nan scale": (1, ("run", "{}/qkv.npz", "--scale", "nan"), ("scale", "a finite number")),
    "refused backend": (1, ("run", "{}/qkv.npz", "--dtype", "float64", "--backend", "cpu"), ("float64",)),
    "unknown target": (1, ("explain", "--target", "cuda:sm30"), ("cuda:sm30", "cuda:sm90")),
    "explained heads": (2, ("explain", "--heads", "8/3"), ("8 query heads over 3",)),
    "heads to warm up for": (2, ("warmup", "--heads", "7/2"), ("7 query heads over 2",)),
    "no heads": (2, ("explain", "--heads", "0"), ("'0'", "1 or more")),
    "a rate without its unit": (2, ("parallel-plan", "--link", "5"), ("'5'", "as in 450GB/s")),
    "no keys": (2, ("explain", "--seqlen", "8/0"), ("'0'", "1 or more")),
    "no such row": (1, ("bench", "--filter", "d65"), ("d65", "--list")),
    "no command": (2, (), ()),
    "unknown command": (2, ("walk",), ("invalid choice",)),
    "no file": (2, ("run",), ("FILE",)),
    "unknown dtype": (2, ("run", "{}/qkv.npz", "--dtype", "int8"), ("int8",)),
    "window of one": (2, ("run", "{}/qkv.npz", "--window", "3"), ("LEFT,RIGHT",)),
    "heads in words": (2, ("explain", "--heads", "many"), ("8/2",)),
    "negative length": (2, ("explain", "--seqlen=-3"), ("8/2",)),
    "negative batch": (2, ("explain", "--batch=-1"), ("a whole number",)),
    "endless length": (2, ("explain", "--seqlen", "9" * 18), ("sizes", "smaller")),
    "more than 64 bits": (2, ("explain", "--batch", "9" * 23), ("'9999", "18 digits")),
    "no suite": (2, ("bench", "--suite", ","), ("','", "names, with commas between")),
    "no features": (2, ("explain", "--features", ""), ("''", "softcap")),
    "no time": (2, ("bench", "--seconds", "0"), ("a positive number",)),
    "unknown feature": (2, ("explain", "--features", "bias,magic"), ("magic", "softcap")),
    "two masks": (2, ("explain", "--features", "mask,segments"), ("got mask and segments", "the others")),
    "three masks": (
        2,
        ("explain", "--features", "segments,mask,intervals"),
        ("mask and segments and inter",),
    ),
    "packed bias": (1, ("explain", "--features", "varlen,bias"), ("bias", "none beside cu_seqlens")),
    "causal in words": (2, ("explain", "--causal", "upwards"), ("upwards", "bottom_right", "top_left")),
    "causal before a file": (2, ("run", "--causal", "upwards", "{}/qkv.npz"), ("upwards", "bottom_right")),
    "causal of a race": (2, ("tune", "--causal", "1"), ("'1'", "bottom_right", "top_left")),
    "unknown switch": (
        1,
        ("ablate", "--backend", "cpu", "--seqlen", "40", "--switch", "panels", "magic"),
        ("switch: got magic, wanted some of", "panels"),
    ),
    "negative seconds": (2, ("ablate", "--seconds=-1"), ("'-1'", "a positive number")),
    "endless seconds": (2, ("tune", "--seconds", "inf"), ("'inf'", "a positive number")),
    "no device": (2, ("run", "{}/qkv.npz", "--device", "gpu"), ("'gpu'", "cpu, cuda or cuda:N")),
    "no index": (2, ("bench", "--device", "cuda:x"), ("'cuda:x'", "cpu, cuda or cuda:N")),
    "no backend": (2, ("explain", "--backend", "gpu"), ("'gpu'", "cpu, gluon, triton, webgpu, metal, torch")),
    "two devices": (
        2,
        ("explain", "--device", "cpu", "--target", "cuda:sm90"),
        ("cpu and --target cuda:sm90", "one of them"),
    ),
    "quick and long": (2, ("bench", "--quick", "--long"), ("not allowed",)),
}


@pytest.mark.parametrize("case", BAD, ids=str)
def test_bad_input_is_one_clean_message(polyflash_main, qkv, case):
    folder, arrays = qkv
    np.savez(folder / "pickled.npz", **{name: np.array([{"a": 1}], dtype=object) for name in "qkv"})
    np.savez(folder / "integers.npz", **{name: np.ones((2, 4, 8), dtype=np.int64) for name in "qkv"})
    np.savez(folder / "flat.npz", **{name: x[0] for name, x in arrays.items()})
    np.savez(folder / "ratio.npz", q=np.ones((3, 4, 8)), k=np.ones((2, 4, 8)), v=np.ones((2, 4, 8)))
    for name in ("text.npz", "text.safetensors"):
        (folder / name).write_text("neither the one nor the other")
    if case == "no safetensors":
        pytest.importorskip("safetensors")
    wanted, argv, words = BAD[case]
    code, out, err = polyflash_main(*(word.replace("{}", str(folder)) for word in argv))
    assert code == wanted
    assert "Traceback" not in err
    for word in words:
        assert word in err, err
    if wanted == 1:
        assert out == ""
        assert err.startswith("error ")


HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': %s, }\n"


def npy(header: str, body: bytes = b"", version: bytes = b"\1\0") -> bytes:
    return b"\x93NUMPY" + version + struct.pack("<H", len(header)) + header.encode() + body


DAMAGED = {  # an array inside a .npz, and a .npy of its own
    "cut short": npy(HEADER % "(2, 4, 8)", bytes(10)),
    "2^60 rows": npy(HEADER % f"({1 << 60}, 4, 8)"),
    "2^40 rows": npy(HEADER % f"({1 << 40}, 4, 8)"),
    "negative": npy(HEADER % "(-1, 4, 8)"),
    "a bool": npy(HEADER % "(True, 4, 8)", bytes(128)),
    "an open brace": npy("{'descr': '<f4'"),
    "deep": npy("(" * 5000 + ")" * 5000),
    "long": npy(HEADER % f"({'9' * 5000}, 4, 8)"),
    "objects": npy(HEADER.replace("<f4", "|O") % "(2, 4, 8)", bytes(512)),
    "another version": npy(HEADER % "(2, 4, 8)", version=b"\11\11"),
    "a pickle": b"\x80\x04K\x01.",
    "text": b"hello",
    "nothing": b"",
}


@pytest.mark.parametrize("what", DAMAGED)
@pytest.mark.parametrize("kind", [".npz", ".npy"])
def test_damaged_arrays_are_one_line_each(polyflash_main, qkv, what, kind):
    folder, _ = qkv
    files = [folder / f"bad{kind}"]
    if kind == ".npz":
        with zipfile.ZipFile(files[0], "w") as archive:
            for name in "qkv":
                archive.writestr(f"{name}.npy", DAMAGED[what])
    else:
        files[0].write_bytes(DAMAGED[what])
        files += [folder / "k.npy", folder / "v.npy"]
    code, out, err = polyflash_main("run", *files)
    assert (code, out) == (1, "") and err.count("\n") == 1 and len(err) < 400
    assert f"bad{kind}" in err and "wanted" in err


def whole_archives() -> dict[str, bytes]:
    buffer = io.BytesIO()
    np.savez(buffer, **{name: np.ones((2, 4, 8), np.float32) for name in "qkv"})
    good = buffer.getvalue()

    def changed(local: int, value: int) -> bytes:
        """Two bytes of every entry's headers: general flags at 6, method at 8."""
        data = bytearray(good)
        for sign, shift in ((b"PK\3\4", 0), (b"PK\1\2", 2)):
            at = data.find(sign)
            while at >= 0:
                data[at + local + shift] = value
                at = data.find(sign, at + 4)
        return bytes(data)

    return {
        "encrypted": changed(6, 1), "unknown method": changed(8, 99), "not lzma": changed(8, 14),
        "not bzip2": changed(8, 12), "half": good[: len(good) // 2], "a byte": good[:1],
        "an array": (Path(SLICE).parent / "x.npy").name.encode(),
    }  # fmt: skip


@pytest.mark.parametrize("what", whole_archives())
def test_damaged_archives_are_one_line_each(polyflash_main, tmp_path, what):
    (tmp_path / "bad.npz").write_bytes(whole_archives()[what])
    code, out, err = polyflash_main("run", tmp_path / "bad.npz")
    assert (code, out) == (1, "") and err.count("\n") == 1 and "bad.npz" in err


def test_an_archive_that_unpacks_beyond_memory_is_not_unpacked(polyflash_main, qkv, monkeypatch):
    monkeypatch.setattr(tensor_files, "_memory", lambda: 100.0)
    code, _, err = polyflash_main("run", qkv[0] / "qkv.npz")
    assert code == 1 and "more than the memory of this machine" in err


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<Q", 1 << 60) + b"{}",
        b"1234567",
        struct.pack("<Q", 2) + b"{]",
        struct.pack("<Q", 64) + bytes(64),
    ],
    ids=["2^60", "json", "nulls", "seven bytes"],
)
def test_damaged_safetensors_are_one_line_each(polyflash_main, tmp_path, data):
    pytest.importorskip("safetensors")
    (tmp_path / "bad.safetensors").write_bytes(data)
    code, out, err = polyflash_main("run", tmp_path / "bad.safetensors")
    assert (code, out) == (1, "") and err.count("\n") == 1 and "wanted a .safetensors file" in err


@pytest.mark.parametrize("link", [os.link, os.symlink])
@pytest.mark.parametrize("name", ["other.npz", "result.lse.npy"])
def test_an_input_by_another_name_is_not_written_over(polyflash_main, qkv, link, name):
    folder, _ = qkv
    files = [folder / "qkv.npz"] if name.endswith("npz") else [folder / f"{n}.npy" for n in "qkv"]
    link(files[-1], folder / name)
    before = files[-1].read_bytes()
    code, out, err = polyflash_main("run", *files, "-o", folder / name.replace(".lse", ""))
    assert (code, out) == (1, "") and f"{name}, which is " in err and "another file than the inputs" in err
    assert files[-1].read_bytes() == before


class Interrupted:
    """A row's measurement that Ctrl-C ends at the second row."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error, self.calls, self.measure = error, 0, bench_command.measure

    def __call__(self, case, **given):
        self.calls += 1
        if self.calls == 2:
            raise self.error
        return self.measure(case, **given)


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (BrokenPipeError, 141)])
def test_an_interrupted_bench_leaves_what_ran(polyflash_main, tmp_path, monkeypatch, error, code):
    monkeypatch.setattr(bench_command, "measure", Interrupted(error))
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # stdout is pytest's
    file = tmp_path / "bench.json"
    words = ("bench", "--quick", "--suite", "small", "--filter", "float32", "128", "--seconds", "0.01")
    found, out, err = polyflash_main(*words, "--json", file)
    assert found == code
    (row,) = json.loads(file.read_text())["rows"]
    if code == 130:
        assert err == f"interrupted: 1 rows were measured and are in {file}\n" and "ratio" in out
    assert polyflash_main("bench", "--from", file)[0] == 0 and row["ratio"]


def test_a_file_that_cannot_be_written_is_refused_before_measuring(polyflash_main, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_command, "measure", None)
    code, _, err = polyflash_main("bench", "--quick", "--json", tmp_path / "none" / "bench.json")
    assert code == 2 and "argument --json: got " in err and "a folder that is there" in err


class FakeGpu:
    """What a GPU's calibration is, on a machine without one."""

    ceilings: ClassVar = {"matmul_tflops": 700.0, "copy_gbs": 4000.0}

    def __init__(self, device: str) -> None:
        self.speed = lambda: 1.0

    def peak(self, kind: str) -> None:
        return None


def test_bench_of_a_gpu_has_the_same_document_and_page(polyflash_main, tmp_path, monkeypatch):
    """The way of a GPU, taken on the CPU: one clock, no threads."""
    about = {**machine(target.detect("cpu"), ()), "gpu": "a GPU", "driver": "1", "cuda": "2"}
    about["ceilings"] = FakeGpu.ceilings
    monkeypatch.setattr(bench_command, "device_here", lambda name: "cpu")
    monkeypatch.setattr(bench_command, "calibrated", lambda device, kinds: (about, FakeGpu(device)))
    words = ("bench", "--device", "cuda:0", "--quick", "--suite", "small", "--filter", "float32", "128")
    files = ("--json", tmp_path / "a.json", "--page", tmp_path / "a.md")
    code, out, err = polyflash_main(*words, "--seconds", "0.01", *files)
    assert (code, err) == (0, "") and "product of bfloat16: 700 TFLOP/s" in out
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["machine"]["gpu"] and found["commands"][0].startswith("polyflash bench --device cuda:0 ")
    assert len(found["rows"]) == 3 and all(r["ratio"] > 0 for r in found["rows"])
    page = (tmp_path / "a.md").read_text()
    assert "multiprocessors" in page and "copy 4000 GB/s" in page


@pytest.mark.parametrize(
    "words", [("--suite", "decode"), ("--suite", "dense,peers"), ("--calls",)], ids=" ".join
)
def test_bench_refuses_what_is_of_cpus_on_a_gpu(polyflash_main, words, monkeypatch):
    monkeypatch.setattr(bench_command, "device_here", lambda name: "cuda:0")
    code, _, err = polyflash_main("bench", "--device", "cuda", *words)
    assert code == 1 and "on a GPU" in err and "make bench-gpu" in err


def test_safetensors_missing_is_named(polyflash_main, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    code, _, err = polyflash_main("run", SLICE)
    assert code == 1
    assert "pip install safetensors" in err


def test_explain_lists_every_row_and_every_reason(polyflash_main):
    argv = (
        "explain",
        "--dtype",
        "float64",
        "--features",
        "dropout,softcap",
        "--target",
        "cuda:sm90",
        "--heads",
        "8/2",
    )
    code, out, _ = polyflash_main(*argv)
    assert code == 0
    text = " ".join(out.split())
    assert "chosen" in text and "refused" in text and "cuda:sm90" in text
    for reason in ("target: needs cpu:avx512", "dtype: has"):
        assert reason in text
    code, out, _ = polyflash_main(*argv, "--json")
    found = json.loads(out)
    assert found["schema"] == "polyflash.explain/1"
    assert found["chosen"] == "torch/forward"
    rows = {row["row"]: row["reasons"] for row in found["rows"]}
    assert len(rows["cpu/forward"]) == 2 and rows["torch/forward"] == []
    assert found["problem"]["num_kv_heads"] == 2


def test_explain_knows_every_feature(polyflash_main):
    for name in options.FEATURES:
        code, out, err = polyflash_main("explain", "--features", name, "--json")
        assert (code, err) == (0, "")
        assert len(json.loads(out)["problem"]["features"]) == 1, name


def test_explain_imagines_packed_members_as_long_as_asked(polyflash_main):
    argv = (
        "explain",
        "--features",
        "varlen,dropout",
        "--batch",
        "3",
        "--seqlen",
        "100/200",
        "--heads",
        "8/2",
    )
    _, out, _ = polyflash_main(*argv, "--grad", "--json")
    found = json.loads(out)
    for problem in (found["problem"], found["backward"]["problem"]):
        sizes = [
            problem[n] for n in ("batch", "members", "seqlen_q", "seqlen_k", "max_seqlen_q", "max_seqlen_k")
        ]
        assert sizes == [1, 3, 300, 600, 100, 200]
        assert {"varlen", "dropout", "grouped heads"} <= set(problem["features"])
    _, out, _ = polyflash_main(*argv)
    assert "members=3" in out and "total=300x600" in out


def test_explain_joins_interval_lists_and_segments(polyflash_main):
    _, out, _ = polyflash_main("explain", "--features", "intervals,segments", "--seqlen", "65/9", "--json")
    assert json.loads(out)["problem"]["features"] == ["interval lists", "segments"]


def test_explain_plans_gradients_and_unequal_sizes(polyflash_main):
    argv = (
        "explain",
        "--grad",
        "--causal",
        "--seqlen",
        "7/9",
        "--head-dim",
        "16/24",
        "--batch",
        "3",
        "--json",
    )
    code, out, _ = polyflash_main(*argv)
    found = json.loads(out)
    assert code == 0
    assert found["backward"]["problem"]["phase"] == "backward"
    sizes = [found["problem"][n] for n in ("batch", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")]
    assert sizes == [3, 7, 9, 16, 24]


def test_explain_returns_1_if_nobody_can(polyflash_main):
    code, out, _ = polyflash_main(
        "explain", "--backend", "cpu", "--features", "bias", "--target", "cuda:sm90"
    )
    assert code == 1
    assert "chosen" not in out


def test_causal_does_not_swallow_a_file_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare").touch()
    for words in (["run", "--causal", "a.npz"], ["run", "--causal", "bare"], ["run", "a.npz", "--causal"]):
        alone = words[words.index("--causal") + 1 :]
        assert options.with_alignment(words) == [*words[: -1 - len(alone)], "--causal=bottom_right", *alone]
    for words in (
        ["run", "--causal", "top_left"],
        ["run", "--causal", "upwards"],
        ["tune", "--causal", "a.b"],
    ):
        assert options.with_alignment(words) == words
    assert options.with_alignment([]) == []


def test_bench_compares_outputs_and_writes_json(polyflash_main, tmp_path):
    argv = ("bench", "--quick", "--rows", "small-causal-float32-128-b1-h2", "--seconds", "0.02")
    code, out, err = polyflash_main(*argv, "--json", tmp_path / "bench.json")
    assert (code, err) == (0, "")
    assert "ratio" in out and "causal  128 d64  h2" in out
    assert ESCAPE not in out and "…" not in out
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["schema"] == "polyflash.bench/1"
    assert found["machine"]["torch"] == torch.__version__ and found["machine"]["threads"] >= 1
    (row,) = found["rows"]
    assert row["ratio"] > 0 and row["difference"] < 1e-5
    assert len(row["rounds"]) >= 3
    assert set(row["rounds"][0]["seconds"]) == set(row["arms"])
    assert str(tmp_path) not in json.dumps(found)


def test_bench_refuses_a_ratio_on_a_mismatch(polyflash_main, tmp_path, monkeypatch):
    attention = polyflash.attention
    monkeypatch.setattr(polyflash, "attention", lambda *args, **options: attention(*args, **options) * 1.01)
    argv = ("bench", "--quick", "--rows", "small-full-float32-16-b1-h1", "--seconds", "0.01")
    code, out, _ = polyflash_main(*argv, "--json", tmp_path / "bench.json")
    assert code == 1
    assert "no ratio" in out and "worst row" in out
    (row,) = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert row["ratio"] is None and row["marks"][0] == "mismatch"


def test_bench_calls_stages_add_up(polyflash_main, tmp_path):
    code, out, _ = polyflash_main("bench", "--calls", "--seconds", "0.05", "--json", tmp_path / "calls.json")
    assert code == 0
    for word in ("argument normalisation", "route cache", "argument block", "torch SDPA", "budget"):
        assert word in out
    found = json.loads((tmp_path / "calls.json").read_text())
    assert found["schema"] == "polyflash.calls/1"
    at = {stage["name"]: stage["microseconds"] for stage in found["stages"]}
    total = at.pop("total")
    at.pop("torch SDPA")
    assert sum(at.values()) == pytest.approx(total)


def test_bench_list(polyflash_main):
    code, out, _ = polyflash_main("bench", "--list", "--long", "--filter", "window")
    assert code == 0
    assert out.split() and all(name.startswith("window") for name in out.split())


def test_quiet_is_quiet(polyflash_main, qkv):
    folder, _ = qkv
    assert polyflash_main("run", folder / "qkv.npz", "--quiet") == (0, "", "")


@pytest.mark.parametrize("no_color", [True, False])
def test_colour_only_where_it_is_wanted(polyflash_main, monkeypatch, no_color):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    _, out, _ = polyflash_main("explain")
    coloured = any(f"{ESCAPE}{code}" in out for code in ("32m", "1;32m", "33m"))
    assert coloured is not no_color


def test_a_terminal_of_no_width_is_printed_on(polyflash_main, monkeypatch):
    monkeypatch.setenv("COLUMNS", "0")
    assert "chosen" in polyflash_main("explain")[1]


@pytest.mark.parametrize("width", [80, 120])
def test_output_fits_the_terminal(polyflash_main, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = polyflash_main("explain", "--features", "bias,softcap,sinks,kv_lens", "--grad")
    assert max(map(len, out.splitlines())) <= width


@pytest.mark.parametrize("command", ["run", "explain", "bench", "tune", "ablate"])
def test_without_a_gpu_every_command_says_so_in_one_line(polyflash_main, qkv, command, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    files = [qkv[0] / "qkv.npz"] if command == "run" else []
    code, out, err = polyflash_main(command, *files, "--device", "cuda:0")
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith("error --device: got cuda:0, and torch ") and "finds no GPU here" in err


def test_a_gpu_that_is_not_there_is_named(polyflash_main, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    code, _, err = polyflash_main("explain", "--device", "cuda:7")
    assert (code, err) == (2, "error --device: got cuda:7, wanted cuda:0 to cuda:1\n")


@pytest.mark.parametrize(("short", "name"), [("bf16", "bfloat16"), ("FP32", "float32"), ("half", "float16")])
def test_short_names_of_dtypes(polyflash_main, short, name):
    code, out, _ = polyflash_main("explain", "--dtype", short, "--json")
    assert code == 0 and json.loads(out)["problem"]["dtype"] == name


def test_version(polyflash_main):
    assert polyflash_main("--version")[:2] == (0, f"polyflash {polyflash.__version__}\n")


def python(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    whole = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env}
    told = {"capture_output": True, "text": True, "errors": "replace", "timeout": 120}
    return subprocess.run([sys.executable, *words], env=whole, **told)


def test_import_polyflash_brings_no_command_line():
    code = "import sys, polyflash; sys.exit(any(m in sys.modules for m in sys.argv[1:]))"
    subprocess.run([sys.executable, "-c", code, "rich", "polyflash.cli", "polyflash.bench"], check=True)


@pytest.mark.parametrize(
    "words", [("--help",), ("bench", "--help"), ("run", "--causal=x", "f"), ("--version",)]
)
def test_help_and_usage_import_nothing_heavy(words):
    code = (
        "import sys; from polyflash.cli import main; main();"
        "print([m for m in ('torch', 'numpy', 'rich', 'numba') if m in sys.modules], file=sys.stderr)"
    )
    done = python("-c", code, *words)
    assert done.stderr.splitlines()[-1] == "[]", done.stderr


BUFFERED = {"PYTHONUNBUFFERED": ""}  # as users have it: what is not taken shows at the end
READERS = {
    "help": ("--help",),
    "bench": ("bench", "--list"),
    "explain": ("explain", "--json"),
    "tune": ("tune", "--list"),
    "env": ("env",),
}


@pytest.mark.parametrize("command", chosen(READERS, "bench", "tune"))
def test_a_reader_that_leaves_ends_it_quietly(command):
    reader, writer = os.pipe()
    os.close(reader)
    env = {**os.environ, **BUFFERED, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "polyflash", *READERS[command]],
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=120,
        env=env,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full device here")
@pytest.mark.parametrize(
    "words", chosen(("explain", "env", "cache path", "bench --list"), "env", "bench --list")
)
def test_an_output_that_takes_nothing_is_one_line(words):
    """A full disk, and no output at all."""
    env = {**os.environ, **BUFFERED, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "polyflash", *words.split()]
    for where, code, said in (
        (">/dev/full", 1, "error [Errno 28] No space left on device\n"),
        (">&-", 0, ""),
    ):
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {where}', "sh", *command],
            capture_output=True,
            text=True,
            timeout=120,
            env=env,
        )
        assert (done.returncode, done.stderr) == (code, said), where


SIGNS = """
import sys
from polyflash import cli
for words in (["run", sys.argv[1]], ["explain"], ["bench", "--help"], ["tune", "--help"]):
    try:
        code = cli.main(words)
    except SystemExit as end:
        code = end.code
    print("exit code", code)
"""


@pytest.mark.parametrize("encoding", chosen(["ascii", "latin-1"], "latin-1"))
def test_terminals_without_our_signs_print_others(encoding):
    pytest.importorskip("safetensors")
    done = python("-c", SIGNS, SLICE, PYTHONIOENCODING=encoding, LC_ALL="C")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("exit code 0\n") == 4, done.stdout
    assert done.stdout.isascii() or encoding != "ascii"
    assert "float16 1x2x256x32" in done.stdout or encoding != "ascii"


def test_a_file_name_that_no_terminal_prints_is_escaped(tmp_path):
    done = python("-m", "polyflash", "run", str(tmp_path / "ü.npz"), PYTHONIOENCODING="ascii")
    assert done.returncode == 1 and "\\xfc.npz: No such file" in done.stderr
