"""`polyflash doctor`, `env` and `cache`: what they find; no broken part stops the report about it."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from scripts import tables

import polyflash
from polyflash import backends, cli, doctor, env, reports, target
from polyflash.advice import Advice, Report
from polyflash.backends.cpu import cores, runtime, store
from polyflash.backends.triton import report as triton_report
from polyflash.backends.webgpu import device as webgpu_device
from polyflash.spec import Phase
from tests import processes
from tests.chosen import chosen
from tests.rows_here import HERE

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(polyflash.__file__).parent
CASES = {case.name for case in doctor.cases()}


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (*env.ALL, *env.OF_OTHERS):
        if variable is not env.XDG_CACHE_HOME:
            monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setattr(webgpu_device, "why_none", lambda: "")  # tests/backends/webgpu has what it says


def say(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(argv)
    said = capsys.readouterr()
    return code, said.out, said.err


def row(backend: str, phase: Phase = Phase.FORWARD):
    here = target.detect("cpu")
    rows = [r for r in backends.TABLE if r.backend == backend and r.phase is phase]
    return next(r for r in rows if here.name.startswith(r.targets))


def failures(examined: dict) -> set[str]:
    return {case["case"] for case in examined["cases"] if case["state"] == doctor.FAILED}


# What doctor examines.


@pytest.mark.parametrize("backend", HERE)
def test_rows_of_this_machine_are_well(backend):
    for phase in Phase:
        rows = [r for r in backends.TABLE if r.backend == backend and r.phase is phase]
        if rows:
            examined = doctor.examine(row(backend, phase))
            assert not failures(examined), examined
            refused = [case["why"] for case in examined["cases"] if case["state"] == doctor.REFUSED]
            if phase is Phase.DECODE:  # the forward row serves what its own row has not
                assert all(why.startswith("features: has no ") for why in refused), examined
                assert len(refused) < len(examined["cases"]) / 2
            else:
                assert not refused


def test_a_dozen_cases_cover_the_features():
    assert len(CASES) >= 12
    spelled = {f.value for case in doctor.cases() for f in case.features}
    for feature in ("causal", "grouped heads", "bool mask", "bias", "softcap", "sinks", "window", "kv_lens"):
        assert feature in spelled
    assert {case.dtype for case in doctor.cases()} == {"float32", "bfloat16", "float16"}
    assert all(case.seqlen_q != case.seqlen_k for case in doctor.cases())


def without(name):
    def mutant(attention):
        return lambda q, k, v, **o: attention(q, k, v, **{n: x for n, x in o.items() if n != name})

    return mutant


def last_keys_dropped(attention):
    def call(q, k, v, **o):
        o = {n: x[..., :-1] if n in ("mask", "bias") else x for n, x in o.items()}
        if "kv_lens" in o:
            o["kv_lens"] = o["kv_lens"] - 1
        shift = k.shape[2] - q.shape[2]
        return attention(q, k[:, :, :-1], v[:, :, :-1], **{"q_offset": shift, **o})

    return call


def changed(change):
    """The result through `change(out, lse)`; without lse the output alone."""

    def mutant(attention):
        def call(q, k, v, **o):
            got = attention(q, k, v, **o)
            if isinstance(got, torch.Tensor):
                return change(got, torch.zeros(got.shape[:3]))[0]
            return polyflash.AttentionOutput(*change(got.out.clone(), got.lse))

        return call

    return mutant


def one_row_nan(out, lse):
    bad = torch.zeros_like(out)
    bad[-1, -1, -1, -1] = math.nan
    return out + bad, lse


def modulo_heads(attention):
    def call(q, k, v, **o):
        order = torch.arange(q.shape[1]) % k.shape[1]
        return attention(q, k[:, order], v[:, order], **o)

    return call


def raises(_attention):
    def call(*_, **__):
        raise TypeError("planted")

    return call


MUTANTS = {
    "no causal": (without("causal"), {"causal, more keys than rows", "rows that see no key", "gradient"}),
    "no mask": (without("mask"), {"bool mask"}),
    "no bias": (without("bias"), {"bias"}),
    "no softcap": (without("softcap"), {"softcap"}),
    "no sinks": (without("sinks"), {"sinks"}),
    "no window": (without("window"), {"window"}),
    "no lengths": (without("kv_lens"), {"key lengths"}),
    "keys dropped": (last_keys_dropped, {"plain", "bfloat16", "bool mask", "gradient"}),
    "heads modulo": (modulo_heads, {"grouped heads", "gradient"}),
    "lse in log2": (changed(lambda out, lse: (out, lse / math.log(2))), {"plain", "float16"}),
    "empty rows 1": (changed(lambda out, lse: (out.masked_fill(lse[..., None] == -math.inf, 1), lse)),
                     {"rows that see no key", "key lengths"}),
    "empty lse +inf": (changed(lambda out, lse: (out, lse.abs())), {"rows that see no key"}),
    "one NaN": (changed(one_row_nan), {"plain", "sinks"}),
    "one part in 100": (changed(lambda out, lse: (out * 1.01, lse)), {"plain", "window", "gradient"}),
    "raises": (raises, CASES),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_row_fails_its_cases(mutant, monkeypatch):
    wrap, expected = MUTANTS[mutant]
    monkeypatch.setattr(polyflash, "attention", wrap(polyflash.attention))
    failed = failures(doctor.examine(row("torch"))) | failures(doctor.examine(row("torch", Phase.BACKWARD)))
    assert expected <= failed


DEFECTS = {
    "wrong numbers": ("run = lambda *a, _run=run: (_run(*a)[0] * 1.5, _run(*a)[1])", "worst row"),
    "raises": ("def run(*_): raise LookupError('planted')", "LookupError: planted"),
    "does not import": ("raise ImportError('planted')", "ImportError: planted"),
    "crashes": ("import os, signal\ndef run(*_): os.kill(os.getpid(), signal.SIGABRT)", "signal 6"),
    "exits": ("import os\ndef run(*_): os._exit(3)", "exit code 3"),
    "hangs": ("import time\ndef run(*_): time.sleep(100)", "no result"),
}


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A copy of the package whose torch row ends with a defect, and which the processes of doctor import."""

    def plant(text: str) -> None:
        shutil.copytree(PACKAGE, tmp_path / "polyflash", ignore=shutil.ignore_patterns("__pycache__"))
        with (tmp_path / "polyflash/backends/torch/forward.py").open("a", encoding="utf-8") as file:
            file.write(f"\n\n{text}\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return plant


@pytest.mark.parametrize("defect", chosen(DEFECTS, "raises", "exits"))
def test_a_planted_defect_is_reported_and_the_exit_code_is_1(defect, planted, monkeypatch, capsys):
    text, word = DEFECTS[defect]
    planted(text)
    monkeypatch.setattr(backends, "BACKENDS", ("torch",))
    monkeypatch.setattr(reports, "probe_torch", lambda: {"version": "2.13", "threads": 1})
    if defect == "hangs":
        monkeypatch.setattr(doctor, "EXAMINE_SECONDS", 2.0)
    code, out, err = say(capsys, "doctor", "--json")
    found = json.loads(out)
    assert (code, err, found["ok"], found["schema"]) == (1, "", False, "polyflash.doctor/1")
    (forward,) = [r for r in found["rows"] if r["row"] == "torch/forward"]
    assert any(word in case["why"] for case in forward["cases"] if case["state"] == "failed"), forward


def test_a_row_is_printed_as_it_ends(planted, tmp_path):
    """While the last row hangs, what the others found can be read already."""
    planted("import time\ndef run(*_): time.sleep(100)")
    rows = tmp_path / "polyflash/backends/torch/capabilities.py"
    first = "in sorted(_FEATURES.items(), key=lambda item: item[0] is not Phase.BACKWARD)"
    rows.write_text(rows.read_text(encoding="utf-8").replace("in _FEATURES.items()", first), encoding="utf-8")
    (tmp_path / "polyflash/backends/torch/backward.py").write_text(
        "raise ImportError('planted')\n", encoding="utf-8"
    )
    code = "from polyflash import backends, cli, reports; backends.BACKENDS = ('torch',)\n"
    code += "reports.probe_torch = lambda: {'version': '2.13', 'threads': 1}\ncli.main(['doctor'])"
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)
    try:
        assert process.stdout.readline().startswith("torch/backward: 1 failed")
        assert process.poll() is None, "it was printed at the end"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def well(monkeypatch):
    """A machine on which nothing is in the way and every row is well, without asking it."""
    monkeypatch.setattr(reports, "probe_torch", lambda: {"version": "2.13", "threads": 2})
    rows = [{"row": "a/forward", "cases": [{"case": "plain", "state": "ok", "why": ""}]}]
    monkeypatch.setattr(doctor, "examine_all", lambda: rows)
    monkeypatch.setattr(cores, "quota_threads", lambda: cores.UNLIMITED)
    monkeypatch.setattr(cores, "allowed", lambda: 64)
    return rows


def test_doctor_as_text(well, capsys):
    code, out, err = say(capsys, "doctor")
    assert (code, err) == (0, "")
    assert re.search(r"a/forward: 1 ok\n  ok       plain\nall well, 0\.\d s\n$", out)
    well[0]["cases"].append({"case": "bias", "state": "failed", "why": "it is off"})
    well.append(
        {"row": "b/forward", "cases": [{"case": "plain", "state": "refused", "why": "target: other"}]}
    )
    code, out, _ = say(capsys, "doctor")
    assert code == 1
    assert "failed   bias: it is off" in out and "b/forward: not for this machine, target: other" in out
    assert "1 cases failed" in out


def version(monkeypatch, name, text):
    real = target.installed_version
    monkeypatch.setattr(target, "installed_version", lambda n: text if n == name else real(n))


def open_folder(monkeypatch, tmp_path):
    tmp_path.chmod(0o777)
    monkeypatch.setenv("POLYFLASH_CACHE_DIR", str(tmp_path))


def other_isa(monkeypatch, _):
    monkeypatch.setenv("POLYFLASH_CPU_ISA", "avx512+amx_bf16")
    monkeypatch.setattr(target, "detect", lambda _: target.parse("cpu:avx512+amx_bf16"))
    monkeypatch.setattr(target, "cpu_flags", lambda: frozenset({"avx512f"}))


ADVICE = {
    "numba absent": (lambda m, _: version(m, "numba", ""), "numba is not installed", "pip install 'numba>="),
    "numba old": (lambda m, _: version(m, "numba", "0.61.2"), "older than 0.62", "pip install 'numba>="),
    "torch old": (
        lambda m, _: version(m, "torch", "2.5.1"),
        "torch 2.5.1 is older",
        "pip install 'torch>=2.6'",
    ),
    "torch broken": (
        lambda m, _: m.setattr(reports, "probe_torch", lambda: {"error": "OSError: libc10"}),
        "does not import: OSError: libc10",
        "reinstall torch",
    ),
    "insecure folder": (open_folder, "others may write", "chmod go-w"),
    "unwritable folder": (
        lambda m, _: m.setenv("POLYFLASH_CACHE_DIR", "/proc/polyflash/kernels"),
        "cannot be written: .*/proc",
        "set POLYFLASH_CACHE_DIR",
    ),
    "no cache": (lambda m, _: m.setenv("POLYFLASH_NO_CACHE", "1"), "compiles its kernels anew", "unset"),
    "quota": (
        lambda m, _: m.setattr(cores, "quota_threads", lambda: 1),
        "2 threads where the CPU quota has room for 1",
        "set OMP_NUM_THREADS=1",
    ),
    "affinity": (
        lambda m, _: m.setattr(cores, "allowed", lambda: 1),
        "the affinity mask has room for 1",
        "set OMP_NUM_THREADS=1",
    ),
    "waiting": (
        lambda m, _: m.setenv("OMP_WAIT_POLICY", "ACTIVE"),
        "keep their cores busy",
        "unset OMP_WAIT",
    ),
    "tied": (lambda m, _: m.setenv("OMP_PROC_BIND", "close"), "ties the calling thread", "unset OMP_PROC"),
    "wrong isa": (other_isa, "which this CPU lacks", "unset POLYFLASH_CPU_ISA"),
    "unknown isa": (
        lambda m, _: m.setattr(target, "detect", target.parse),
        "wanted one of",
        "unset POLYFLASH",
    ),
}
GPU = {"version": "2.13", "threads": 2, "cuda": "12.8", "hip": False, "gpus": 1}


def gpu(monkeypatch, *, triton="3.6.0", programs=("gcc",), header=True, driver="libcuda.so.1", **probed):
    """A machine with a GPU, and what Triton needs there but for what is named."""
    monkeypatch.setattr(reports, "probe_torch", lambda: GPU | probed)
    version(monkeypatch, "triton", triton)
    monkeypatch.setattr(triton_report.shutil, "which", lambda name: name if name in programs else None)
    include = Path(__file__).parents[1]
    monkeypatch.setattr(
        triton_report.sysconfig, "get_path", lambda _: str(include / "with" if header else include)
    )
    exists, there = os.path.exists, {str(include / "with" / "Python.h"), *probed.get("files", ())}
    monkeypatch.setattr(triton_report.os.path, "exists", lambda path: path in there or exists(path))
    monkeypatch.setattr(triton_report, "find_library", lambda name: driver if name == "cuda" else None)


def other_compiler(monkeypatch, name, **options):
    monkeypatch.setenv("CC", name)
    gpu(monkeypatch, **options)


ADVICE |= {
    "triton absent": (lambda m, _: gpu(m, triton=""), "triton is not installed, so calls on a GPU run on the "
                      "torch row", "pip install 'triton>=3.6'"),
    "triton old": (lambda m, _: gpu(m, triton="3.5.1"), "triton 3.5.1 is older than 3.6", "pip install"),
    "no compiler": (lambda m, _: gpu(m, programs=()), "no C compiler is here", "apt install gcc"),
    "compiler misnamed": (lambda m, _: other_compiler(m, "gcc-4"), "CC=gcc-4 is no program", "unset CC"),
    "neither compiler": (lambda m, _: other_compiler(m, "cc9", programs=()), "CC=cc9 is no", "apt install"),
    "no header": (lambda m, _: gpu(m, header=False), "Python.h is not here", "apt install python3-dev"),
    "no libcuda": (lambda m, _: gpu(m, driver=None), "no libcuda.so.1", "sudo ldconfig"),
    "old driver": (
        lambda m, _: gpu(m, gpus=0, files=[triton_report._NVIDIA_DRIVER]),
        "built for CUDA 12.8 and sees no GPU, though /proc",
        "update the driver",
    ),
    "no rights": (
        lambda m, _: gpu(m, gpus=0, hip=True, cuda="6.4", files=[triton_report._AMD_DRIVER]),
        "built for ROCm 6.4 and sees no GPU, though /dev/kfd",
        "sudo usermod -aG render,video",
    ),
}  # fmt: skip
COMPLETE = {
    "all there": {},
    "clang": {"programs": ("clang",)},
    "amd": {"hip": True, "cuda": "6.4", "driver": None},
    "no gpu and no driver": {"gpus": 0, "programs": (), "header": False},
    "torch without cuda": {"cuda": "", "gpus": 0, "triton": "", "programs": ()},
}


@pytest.mark.parametrize("case", COMPLETE)
def test_nothing_is_said_of_triton_where_it_is_complete_or_not_needed(case, well, monkeypatch, capsys):
    monkeypatch.setattr(triton_report, "_AMD_DRIVER", "/no/such")
    monkeypatch.setattr(triton_report, "_NVIDIA_DRIVER", "/no/such")
    gpu(monkeypatch, **COMPLETE[case])
    assert say(capsys, "doctor")[1].count("remedy") == 0


def test_libcuda_may_be_named(well, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", "/some/where")
    gpu(monkeypatch, driver=None)
    assert say(capsys, "doctor")[1].count("remedy") == 0


def test_rows_of_a_gpu_are_examined_there(monkeypatch):
    """A row that the CPU cannot run, where there is a GPU; others stay on the CPU."""
    wanted = replace(row("torch"), targets=("cuda:",))
    assert doctor._place(wanted) == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert doctor._place(wanted) == "cuda" and doctor._place(row("torch")) == "cpu"


FATAL = {"torch old", "torch broken", "unknown isa"}


@pytest.mark.parametrize("case", ADVICE)
def test_what_is_in_the_way_has_one_remedy(case, well, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("POLYFLASH_CACHE_DIR", str(tmp_path / "kernels"))
    assert say(capsys, "doctor")[1].count("remedy") == 0
    arrange, words, remedy = ADVICE[case]
    arrange(monkeypatch, tmp_path)
    code, out, _ = say(capsys, "doctor")
    assert re.search(words, out) and f"remedy: {remedy}" in out, out
    assert out.count("remedy") == 1
    assert code == (1 if case in FATAL else 0)
    assert ("error: " in out) is (case in FATAL)


# Reports where torch is broken or absent.

BROKEN = {
    "raises": "raise OSError('libtorch_cpu.so: cannot open shared object file')",
    "crashes": "import os; os.abort()",
    "is half there": "x = 1",
}


@pytest.fixture
def broken(tmp_path):
    """Runs a command as users do, in an environment whose torch is broken."""
    (tmp_path / "torch").mkdir()
    script = tmp_path / "bin" / "polyflash"
    script.parent.mkdir()
    script.write_text("import sys\nfrom polyflash.__main__ import main\nsys.exit(main())\n")

    def call(how: str, text: str, *argv: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "torch/__init__.py").write_text(text)
        command = [str(script)] if how == "script" else ["-m", "polyflash"]
        return subprocess.run(
            [sys.executable, *command, *argv],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(PACKAGE.parent)))},
            cwd=tmp_path / "bin",
        )

    return call


@pytest.mark.parametrize("how", ["script", "module"])
@pytest.mark.parametrize("what", BROKEN)
def test_env_runs_where_torch_does_not(broken, how, what):
    done = broken(how, BROKEN[what], "env", "--json")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    found = json.loads(done.stdout)
    assert found["polyflash"] == polyflash.__version__ and "error" in found["torch"]
    if what == "raises":
        assert "libtorch_cpu.so: cannot open" in found["torch"]["error"]
    assert found["cpu"]["flags"] == sorted(target.cpu_flags())
    assert found["cores"]["allowed"] == cores.allowed()
    assert found["cache"]["path"] and found["rows"][0]["needs"] == ["numba"]
    assert {v["name"] for v in found["variables"]} == {v.name for v in (*env.ALL, *env.OF_OTHERS)}


def test_doctor_and_cache_run_where_torch_does_not(broken, tmp_path):
    done = broken("script", BROKEN["raises"], "doctor")
    assert done.returncode == 1 and not done.stderr
    assert "torch does not import: OSError: libtorch" in done.stdout and "nothing can run" in done.stdout
    done = broken("module", BROKEN["raises"], "cache", "path")
    assert (done.returncode, done.stdout) == (0, store.path() + "\n")
    done = broken("module", BROKEN["raises"], "explain")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "OSError: libtorch" in done.stderr and "polyflash doctor" in done.stderr


def test_env_runs_without_numpy(broken, tmp_path):
    (tmp_path / "numpy.py").write_text("raise ImportError('planted')")
    done = broken("script", BROKEN["raises"], "env", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["cpu"]["flags"] and found["variables"]
    done = broken("script", BROKEN["raises"], "doctor")
    assert done.returncode == 1 and not done.stderr and "torch does not import" in done.stdout


def test_env_imports_neither_torch_nor_rich(tmp_path):
    script = tmp_path / "polyflash"
    script.write_text(
        "import sys\nfrom polyflash.__main__ import main\nmain()\n"
        "print([m for m in ('torch', 'rich', 'numba', 'llvmlite') if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), "env"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


@pytest.mark.parametrize(
    "command", chosen(["tool.py env", "-m tool env", "-m polyflashy env"], "-m tool env")
)
def test_import_polyflash_is_whole_everywhere_else(command, tmp_path):
    for name in ("tool.py", "polyflashy.py"):
        (tmp_path / name).write_text("import polyflash\nprint(polyflash.attention.__name__)\n")
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = processes.begun(command.split(), env=env, cwd=tmp_path)
    assert done.stdout == "attention\n", done.stderr


# What `env` says.


@pytest.fixture(scope="module")
def sections():
    return reports.facts()


@pytest.mark.parametrize("name", backends.BACKENDS)
def test_every_backend_answers_the_report_protocol(name, sections):
    """A new engine gets its sections of `env`, its advice and its folder of kernels by one module."""
    report = backends.report_of(name)
    wanted = {x for x in vars(Report) if not x.startswith("_")}
    assert wanted == {"facts", "advice", "kernel_cache"} and wanted <= set(dir(report))
    for section, find in report.facts().items():
        assert set(find()) == set(sections[section])
    assert all(isinstance(a, Advice) for a in report.advice(GPU | {"gpus": 0}))
    cache = report.kernel_cache()
    assert cache is None or (cache[0].path() and isinstance(cache[1], bytes))


def test_env_as_text_and_as_json(capsys, monkeypatch):
    for variable in (*env.ALL, *env.OF_OTHERS):  # a long path of the user's own makes a long line
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("POLYFLASH_CACHE_DIR", "/some/where")
    code, out, err = say(capsys, "env")
    assert (code, err) == (0, "")
    for word in (
        torch.__version__.partition("+")[0],
        target.detect("cpu").name,
        "/some/where",
        "quota",
        "torch/backward",
    ):
        assert word in out
    assert max(map(len, out.splitlines())) <= 120
    for variable in (*env.ALL, *env.OF_OTHERS):
        assert re.search(rf"{variable.name} +\S+.* {re.escape(variable.doc)}", out)
    code, out, _ = say(capsys, "env", "--json")
    found = json.loads(out)
    assert code == 0 and found["schema"] == "polyflash.env/1"
    assert torch.__version__.startswith(found["torch"]["version"])
    (cache,) = [v for v in found["variables"] if v["name"] == "POLYFLASH_CACHE_DIR"]
    assert (cache["value"], cache["set"], cache["default"]) == ("/some/where", True, "")
    assert {r["row"].split(" ")[0] for r in found["rows"]} == {r.name for r in backends.TABLE}


def test_env_survives_what_it_reports(monkeypatch):
    monkeypatch.setattr(target, "detect", lambda _: 1 / 0)
    monkeypatch.setattr(store, "info", lambda: 1 / 0)
    monkeypatch.setattr(reports, "probe_torch", lambda: {"error": "none"})
    text = reports.text_of(reports.facts())
    assert text.count("ZeroDivisionError") == 3


def test_wanted_versions_are_the_declared_ones():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    listed = (*project["dependencies"], *extras["triton"], *extras["webgpu"])
    declared = {r.name: str(r.specifier) for r in map(Requirement, listed)}
    wanted = {name: f">={version}" for name, version in reports.PACKAGES.items() if version}
    assert wanted == declared
    for name, least in target.MINIMUM_PACKAGES.items():
        assert least == tuple(map(int, reports.PACKAGES[name].split(".")))


def test_every_variable_of_env_is_listed():
    made = {value for value in vars(env).values() if isinstance(value, env.Variable)}
    assert made == {*env.ALL, *env.OF_OTHERS} and all(v.doc for v in made)


def test_pages_say_what_the_code_says(tmp_path, monkeypatch, capsys):
    """docs/capabilities.md, env.md, api.md and quantisation.md, but for the one page that is spoiled here;
    `python scripts/tables.py` mends it."""
    pytest.importorskip("safetensors")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.setattr(tables, "DOCS", tmp_path / "docs")
    page = tmp_path / "docs" / "env.md"
    page.write_text(page.read_text(encoding="utf-8").replace("POLYFLASH_NO_CACHE", "OTHER"), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    assert tables.main() == 1
    assert capsys.readouterr().out == "docs/env.md differs from the code: run python scripts/tables.py\n"
    monkeypatch.setattr(sys, "argv", ["tables.py"])
    monkeypatch.setattr(tables, "PAGES", {page.name: tables.PAGES[page.name]})
    assert tables.main() == 0
    assert page.read_text(encoding="utf-8") == (ROOT / "docs" / "env.md").read_text(encoding="utf-8")


def test_tables_name_every_row_and_feature():
    table = tables.capability_table()
    for r in backends.TABLE:
        assert table.count(f"| {r.name}") >= 2
    lines = [line.split(" | ") for line in table.splitlines() if line.startswith("| dropout")]
    wanted = ["yes" if "dropout" in {f.value for f in r.features} else "-" for r in backends.TABLE]
    assert [cell.strip(" |") for cell in lines[0][1:]] == wanted


# The cache command; the folder itself is tested in backends/cpu/test_runtime.py.


@pytest.fixture
def folder(tmp_path, monkeypatch):
    pytest.importorskip("llvmlite")
    if os.name != "posix":
        pytest.skip("the cache needs POSIX ownership")
    path = tmp_path / "kernels"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("POLYFLASH_CACHE_DIR", str(path))
    for name, key, origin in (("a", "now", runtime.origin()), ("b", "then", bytes(32))):
        made = store.Object("kernel", b"code", key, origin)
        (path / f"{name}.pfo").write_bytes(store.encode(f"{name}.pfo", made))
    (path / "c.pfo").write_bytes(b"neither")
    os.utime(path / "b.pfo", (0, 0))
    return path


def test_cache_ls_path_and_clear(folder, capsys):
    assert say(capsys, "cache", "path") == (0, f"{folder}\n", "")
    code, out, _ = say(capsys, "cache", "ls")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0 and " current " in lines["now"] and " stale " in lines["then"]
    assert " stale " in lines["unreadable"] and lines["3"].startswith(f"3 in {folder}, ")
    found = json.loads(say(capsys, "cache", "ls", "--json")[1])
    assert found["schema"] == "polyflash.cache/1" and found["path"] == str(folder)
    ages = {entry["key"]: (entry["stale"], entry["days"] > 1000) for entry in found["entries"]}
    assert ages == {"now": (False, False), "then": (True, True), "": (True, False)}
    code, out, _ = say(capsys, "cache", "clear", "--stale")
    assert (code, out) == (0, f"removed 2 entries from {folder}\n")
    assert [p.name for p in folder.iterdir()] == ["a.pfo"]
    assert say(capsys, "cache", "clear")[1] == f"removed 1 entry from {folder}\n"
    assert say(capsys, "cache", "ls")[1].startswith("no entries\n")


def test_cache_clear_stale_without_a_compiler_clears_nothing(folder, capsys, monkeypatch):
    def no_compiler() -> bytes:
        raise ImportError("no llvmlite")

    monkeypatch.setattr(runtime, "origin", no_compiler)
    code, out, err = say(capsys, "cache", "clear", "--stale")
    assert (code, out) == (1, "") and "--stale" in err and len(list(folder.iterdir())) == 3
    assert " unknown " in say(capsys, "cache", "ls")[1]


def test_cache_ls_says_why_a_folder_is_not_used(folder, capsys):
    folder.chmod(0o777)
    code, out, err = say(capsys, "cache", "ls")
    assert (code, out) == (1, "") and "others may write" in err
    assert say(capsys, "cache", "clear")[:2] == (0, f"removed 0 entries from {folder}\n")
