"""What a fresh checkout promises: dependencies that need no compiler, two commands, errors in one line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import polyflash
from tests import processes

ROOT = Path(__file__).resolve().parents[2]
TARGETS = (
    "demo", "test", "test-cpu", "test-distributed", "test-triton", "test-codegen", "test-webgpu",
    "test-metal", "test-gpu", "test-all", "lint", "bench", "clean",
)  # fmt: skip

pytestmark = pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="needs a checkout")


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def constraints() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_one_version_everywhere(project: dict) -> None:
    assert project["version"] == polyflash.__version__


def test_pins_lie_within_the_declared_ranges(project: dict) -> None:
    extras = project["optional-dependencies"]
    declared = [Requirement(text) for text in (*project["dependencies"], *extras["bench"], *extras["dev"])]
    pinned = {name: [r for r in constraints() if r.name == name] for name in {r.name for r in declared}}
    for requirement in declared:
        pins = pinned[requirement.name]
        assert pins, f"{requirement.name} has no pin"
        for pin in pins:
            for specifier in pin.specifier:
                if specifier.operator == "==":
                    assert specifier.version in requirement.specifier, f"{pin} is outside {requirement}"


def test_torch_is_exact_where_an_open_range_would_bring_cuda() -> None:
    (exact,) = [r for r in constraints() if r.name == "torch" and "==" in str(r.specifier)]
    linux = {"sys_platform": "linux", "python_version": "3.11"}
    assert exact.marker.evaluate(linux)
    for place in (linux | {"sys_platform": "darwin"}, linux | {"python_version": "3.13"}):
        applying = [r for r in constraints() if r.name == "torch" and r.marker.evaluate(place)]
        assert len(applying) == 1 and applying[0] is not exact


def test_the_triton_of_the_tests_lies_within_its_range_and_binds_no_torch(project: dict) -> None:
    """A torch for GPUs names its own triton, so that a pin among the constraints would refuse it."""
    (extra,) = map(Requirement, project["optional-dependencies"]["triton"])
    setup = (ROOT / "scripts/setup.sh").read_text(encoding="utf-8")
    (version,) = re.findall(r"triton==([\d.]+)", setup)
    assert version in extra.specifier and not [r for r in constraints() if r.name == "triton"]
    for system, machine, asked in (("linux", "aarch64", True), ("darwin", "arm64", False)):
        assert extra.marker.evaluate({"sys_platform": system, "platform_machine": machine}) is asked


@pytest.mark.parametrize("machine", ["x86_64", "AMD64", "aarch64", "arm64", "riscv64"])
def test_numba_is_asked_for_where_it_has_wheels(project: dict, machine: str) -> None:
    (numba,) = [r for r in map(Requirement, project["dependencies"]) if r.name == "numba"]
    asked = numba.marker.evaluate({"platform_machine": machine, "python_version": "3.12"})
    assert asked is (machine != "riscv64")


def test_installed_package_is_typed_and_has_its_command() -> None:
    assert (Path(polyflash.__file__).parent / "py.typed").exists()
    installed = [d for d in metadata.distributions() if d.metadata["Name"] == "polyflash"]
    if not installed:
        pytest.skip("polyflash runs from its source folder here")
    (command,) = [e for e in installed[0].entry_points if e.group == "console_scripts"]
    assert (command.name, command.value) == ("polyflash", "polyflash.__main__:main")


def test_files_name_no_registry_and_no_folder_of_a_machine() -> None:
    suspicious = re.compile(rf"https?://[^\s\"']*(py{'pi'}|python{'hosted'}|whl)|/(root|home|work|opt)/\w")
    texts = ["Makefile", "pyproject.toml", "constraints.txt", ".ci/run", "scripts/setup.sh"]
    for name in (*texts, *(str(p.relative_to(ROOT)) for p in (ROOT / "examples").glob("*.py"))):
        found = suspicious.search((ROOT / name).read_text(encoding="utf-8"))
        assert not found, f"{name}: {found}"


EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "long_context" else pytest.mark.slow) for n in EXAMPLES]
)
def test_examples_have_help(name: str) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = processes.begun([str(ROOT / "examples" / f"{name}.py"), "--help"], timeout=240, env=env)
    if "No module named" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0 and done.stdout.startswith("usage: "), done.stderr


def in_a_new_process(code: str, *, imported: bool) -> str:
    """What the code prints where nothing was imported, or torch alone."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if imported:
        done = processes.begun(["-c", code], env=env)
    else:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class TestNames:
    """Public names are imported when they are asked for."""

    def test_import_brings_no_torch_and_knows_every_name(self) -> None:
        said = in_a_new_process(
            "import sys, polyflash\n"
            "print('torch' in sys.modules, set(polyflash.__all__) - set(dir(polyflash)))",
            imported=False,
        )
        assert said == "False set()"

    def test_every_way_to_a_name_gives_the_same_function(self) -> None:
        """Beside torch the ops are there at once: a saved program is loaded with nothing but the import."""
        said = in_a_new_process(
            "import torch, polyflash\n"
            "print([hasattr(torch.ops.polyflash, n) for n in ('attention', 'column_sums')])\n"
            "from polyflash import merge, attention; import polyflash.merging, pickle\n"
            "print(polyflash.merge is merge is polyflash.merging.merge, polyflash.attention is attention,"
            " pickle.loads(pickle.dumps(attention)) is attention, hasattr(polyflash, 'magic'))",
            imported=True,
        )
        assert said == "[True, True]\nTrue True True False"

    def test_subpackages_are_imported_when_they_are_asked_for(self) -> None:
        said = in_a_new_process(
            "import sys, polyflash\n"
            "print('polyflash.quant' in sys.modules, polyflash.quant.Scheme.__name__)\n"
            "names = 'integrations kvcache parallel webgpu'.split()\n"
            "print(*(getattr(polyflash, name).__name__ for name in names))",
            imported=False,
        )
        names = "integrations polyflash.kvcache polyflash.parallel polyflash.webgpu"
        assert said == f"False Scheme\npolyflash.{names}"

    def test_no_submodule_takes_a_name_over(self) -> None:
        modules = {path.stem for path in Path(polyflash.__file__).parent.iterdir()}
        assert not modules & set(polyflash.__all__)

    def test_types_and_names_agree(self) -> None:
        stub = Path(polyflash.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
        found = re.findall(r"from polyflash\.([\w.]+) import (\w+) as (\w+)", stub)
        assert [name for _, name, _ in found] == [name for _, _, name in found]
        assert {name: home for home, name, _ in found} == polyflash._HOME
        assert polyflash.__all__ == sorted(polyflash._HOME)


class TestWheel:
    """The package alone, as a wheel installs it: nothing of `benchmarks/`, `tests/` or `scripts/` is near."""

    @pytest.fixture(scope="class")
    def alone(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("site")
        package = Path(polyflash.__file__).parent
        shutil.copytree(package, folder / "polyflash", ignore=shutil.ignore_patterns("__pycache__"))
        return folder

    def call(
        self, alone: Path, *words: str, start: Sequence[str] = ("-m", "polyflash")
    ) -> tuple[int, str, str]:
        env = {**os.environ, "PYTHONPATH": str(alone)}
        done = processes.begun([*start, *words], timeout=240, cwd=alone, env=env)
        return done.returncode, done.stdout, done.stderr

    def test_wheel_has_the_package_alone(self) -> None:
        built = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
        assert built["targets"]["wheel"] == {"packages": ["src/polyflash"]}
        for module in Path(polyflash.__file__).parent.rglob("*.py"):
            text = module.read_text(encoding="utf-8")
            assert not re.search(r"^\s*(from|import) (benchmarks|tests|scripts)\b", text, re.M), module

    def test_bench_measures_against_sdpa(self, alone: Path) -> None:
        names = "small-full-float32-16-b1-h1,small-causal-bfloat16-128-b1-h2"
        words = ("--quick", "--rows", names, "--seconds", "0.01", "--json", "bench.json")
        code, out, err = self.call(alone, "bench", *words)
        assert (code, err) == (0, "") and all(name in out for name in names.split(","))
        found = json.loads((alone / "bench.json").read_text(encoding="utf-8"))
        assert found["schema"] == "polyflash.bench/1" and [r["name"] for r in found["rows"]] == names.split(
            ","
        )
        assert all(r["ratio"] > 0 and set(r["rounds"][0]["seconds"]) == set(r["arms"]) for r in found["rows"])
        from benchmarks import tables

        text = tables.page_of(tables.merged([tables.read(str(alone / "bench.json"))]))
        assert "small, float32" in text and "small, bfloat16" in text

    def test_bench_lists_the_cases_of_its_suites(self, alone: Path) -> None:
        code, out, err = self.call(alone, "bench", "--list")
        assert (code, err) == (0, "")
        assert {name.split("-")[0] for name in out.split()} == {"full", "causal", "window", "small"}

    def test_what_needs_the_laboratory_says_where_it_is(self, alone: Path) -> None:
        asked = ("--suite decode", "--peers jax", "--calls", "--plot a.png", "--from a.json")
        code = "import sys; from polyflash import cli\n"
        code += "for words in sys.argv[1:]: print(cli.main(['bench', *words.split()]), file=sys.stderr)"
        _, out, err = self.call(alone, *asked, start=("-c", code))
        said = err.split("\n1\n")  # every one ends with exit code 1
        assert not out and len(said) == len(asked) + 1 and not said[-1], err
        for words, text in zip(asked, said, strict=False):
            assert words.split()[0] in text and "benchmarks/" in text

    def test_ablate_and_tune(self, alone: Path) -> None:
        words = ("--backend", "cpu", "--device", "cpu", "--seqlen", "40", "--dtype", "fp32")
        switched = ("--switch", "panels", "--seconds", "0.02", "--json", "a.json")
        ends, _, err = self.call(alone, "ablate", *words, *switched)
        assert (ends, err) == (0, "") and json.loads((alone / "a.json").read_text(encoding="utf-8"))["rows"]
        code = (
            "import sys; from polyflash import cli\nfor words in sys.argv[1:]: print(cli.main(words.split()))"
        )
        ends, out, err = self.call(
            alone, " ".join(("ablate", *words, "--groups", "2")), "tune --list", start=("-c", code)
        )
        assert ends == 0 and out.startswith("1\n") and out.endswith("\n0\n")
        assert "--groups" in err and "benchmarks/" in err


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
class TestMake:
    def make(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        clean = {
            k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k not in ("PYTHON", "MFLAGS")
        }
        return subprocess.run(
            ["make", "-C", str(ROOT), *arguments],
            env=clean | variables,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def test_help_is_the_default_and_names_every_target(self) -> None:
        done = self.make()
        assert done.returncode == 0, done.stderr
        assert all(f"make {target} " in done.stdout for target in TARGETS)

    @pytest.mark.parametrize("target", TARGETS)
    def test_every_target_is_known(self, target: str) -> None:
        done = self.make("-n", target)
        assert done.returncode == 0, done.stderr

    @pytest.mark.parametrize("target", ["test-triton", "test-codegen"])
    def test_without_triton_its_targets_say_so_in_a_line(self, target: str, tmp_path: Path) -> None:
        folder = tmp_path / ".venv" / "bin"
        folder.mkdir(parents=True)
        (folder / "python").write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
        (folder / "python").chmod(0o755)
        shutil.copy(ROOT / "Makefile", tmp_path)
        alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        done = subprocess.run(
            ["make", "-o", ".venv/.test", target],
            cwd=tmp_path, capture_output=True, text=True, timeout=60, env=alone,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(rf"{target}: Triton has no build for this machine.*\n", done.stdout)

    def test_ci_runs_make_test(self) -> None:
        text = (ROOT / ".ci/run").read_text(encoding="utf-8")
        assert "make test" in text and os.access(ROOT / ".ci/run", os.X_OK)


class TestSetup:
    """scripts/setup.sh in an empty folder of its own, with stand-ins for a Python that lacks something."""

    def install(
        self, folder: Path, python: Path | str, step: str = "torch"
    ) -> subprocess.CompletedProcess[str]:
        (folder / "scripts").mkdir(exist_ok=True)
        shutil.copy(ROOT / "scripts/setup.sh", folder / "scripts/setup.sh")
        return subprocess.run(
            ["sh", "scripts/setup.sh", step],
            cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHON": str(python)},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def stand_in(self, folder: Path, script: str) -> Path:
        path = folder / "python"
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        path.chmod(0o755)
        return path

    def test_an_old_python_is_named_with_the_remedy(self, tmp_path: Path) -> None:
        old = self.stand_in(tmp_path, 'case "$2" in *exit*) exit 1;; *) echo 3.9.6;; esac')
        done = self.install(tmp_path, old)
        assert done.returncode == 1 and not done.stdout
        assert re.fullmatch(
            r"setup: Python 3\.11 or newer is needed, found 3\.9\.6 .*make PYTHON=.*\n", done.stderr
        )

    def test_a_missing_python_is_named(self, tmp_path: Path) -> None:
        done = self.install(tmp_path, "no-such-python")
        assert done.returncode == 1
        assert re.fullmatch(
            r"setup: Python 3\.11 or newer is needed, found none as no-such-python.*\n", done.stderr
        )

    def test_a_missing_venv_module_is_named(self, tmp_path: Path) -> None:
        bare = self.stand_in(
            tmp_path, f'case "$2" in *ensurepip*) exit 1;; *) exec "{sys.executable}" "$@";; esac'
        )
        done = self.install(tmp_path, bare)
        assert done.returncode == 1 and not (tmp_path / ".venv").exists()
        assert re.fullmatch(r"setup: .*has no venv module: .*apt install python3-venv\)\n", done.stderr)

    def test_a_failing_install_says_what_failed(self, tmp_path: Path) -> None:
        fake_pip = (
            'if [ "$1 $2" = "-m venv" ]; then mkdir -p .venv/bin && cp "$0" .venv/bin/python; exit; fi\n'
            'if [ "$1 $2" = "-m pip" ]; then echo "no route" >&2; exit 1; fi\n'
            f'exec "{sys.executable}" "$@"'
        )
        done = self.install(tmp_path, self.stand_in(tmp_path, fake_pip))
        assert done.returncode == 1
        assert "no route" in done.stderr and "setup: installing torch failed" in done.stderr

    def test_an_unknown_step_is_refused(self, tmp_path: Path) -> None:
        done = self.install(tmp_path, sys.executable, "everything")
        assert done.returncode == 1 and "usage" in done.stderr


def test_every_extra_is_used(project: dict) -> None:
    """No extra installs what no module imports yet."""
    assert set(project["optional-dependencies"]) == {"bench", "peers", "hf", "triton", "webgpu", "dev"}
