"""Tuned files: believed only as a whole, never lost, used on the right rung. The search: no wrong or slower
config is kept, an interrupted one goes on."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import pytest
import torch

import polyflash
from polyflash import backends, cache, plan
from polyflash import target as targets
from polyflash.backends.torch.configs import Config
from polyflash.bench.timing import Comparison, Round
from polyflash.capability import Capability
from polyflash.cli import main
from polyflash.errors import UnsupportedError
from polyflash.spec import MANY_KEYS, AttentionSpec, Feature, Phase
from polyflash.target import Target
from polyflash.tuning import command, search, store
from polyflash.tuning.search import CHALLENGER, INCUMBENT, Step, tune
from polyflash.tuning.store import Entry
from polyflash.tuning.trial import difference_of, trial, worst_row
from polyflash.workloads import Workload
from tests.catalogue import named

HERE = replace(targets.detect("cpu"), packages=(("numba", "0.62"),))
SPEC = AttentionSpec(Phase.FORWARD, "float32", "cpu", 2, 4, 2, 40, 70, 64, 64, frozenset())
CHOSEN, TUNED = Config(32, 512), Config(64, 256)
ROW = Capability(
    backend="torch", phase=Phase.FORWARD, module="", targets=("cpu:",), dtypes=frozenset({"float32"}),
    max_head_dim=128, features=frozenset(Feature), priority=1, choose=lambda spec, target: CHOSEN,
)  # fmt: skip
KEY = store.key_of(ROW, SPEC)
FOLDER = store.folder


def entry(config: Any = TUNED, **changed: Any) -> Entry:
    made = Entry(store.kind_of(type(config)), asdict(config), 0.5, 1.0, "2026-01-01T00:00:00+00:00", 3, 3)
    return replace(made, **changed)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """A folder of tuned files of the test's own; kernels stay where they are compiled already."""
    monkeypatch.setattr(store, "folder", lambda: str(tmp_path / "tuned"))
    monkeypatch.delenv("POLYFLASH_NO_CACHE", raising=False)
    return tmp_path


def rung(row: Capability = ROW, spec: AttentionSpec = SPEC, target: Target = HERE) -> tuple[Any, str]:
    return plan.choose_config(row, spec, target, "")[:2]


def why(spec: AttentionSpec = SPEC, target: Target = HERE) -> str:
    """The note of `explain` on the tuned file."""
    notes = plan.explain(spec, target, (ROW,)).notes
    return next((note for note in notes if note.startswith("tuned file")), "")


@pytest.mark.skipif(os.name != "posix", reason="the convention of POSIX systems")
def test_the_file_lies_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("POLYFLASH_CACHE_DIR", str(tmp_path))
    assert FOLDER() == str(tmp_path / "tuned")
    monkeypatch.delenv("POLYFLASH_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert FOLDER() == str(tmp_path / "home" / "polyflash" / "tuned")


class TestLadder:
    def test_without_a_file_the_row_chooses(self):
        assert rung() == (CHOSEN, "heuristic") and why() == ""

    def test_a_table_and_a_safe_default_are_named(self):
        for has, name in ((True, "table"), (False, "safe default")):
            row = replace(ROW, tabled=lambda spec, target, has=has: has)
            assert rung(row) == (CHOSEN, name)
            assert plan.explain(SPEC, HERE, (row,)).rung == name

    def test_the_tuned_file_comes_before_the_table(self):
        store.keep(HERE, {KEY: entry()})
        row = replace(ROW, tabled=lambda spec, target: True)
        assert rung(row) == (TUNED, "tuned")
        shown = plan.explain(SPEC, HERE, (row,))
        assert (shown.config, shown.rung) == (TUNED, "tuned") and "[tuned]" in str(shown)
        launch = plan.select(SPEC, HERE, (row,), backend="", config="")
        assert (launch.config, launch.rung) == (TUNED, "tuned")

    def test_an_explicit_config_comes_before_the_tuned_file(self):
        store.keep(HERE, {KEY: entry()})
        given = Config(128, 1024)
        assert plan.choose_config(ROW, SPEC, HERE, plan.encode_config(given))[:2] == (given, "explicit")

    def test_bits_that_no_length_may_change_come_from_no_tuned_file(self):
        fixed = replace(SPEC, features=frozenset({Feature.BATCH_INVARIANT}))
        assert store.key_of(ROW, fixed) == ""
        store.keep(HERE, {KEY: entry(), "": entry()})
        assert rung(spec=fixed) == (CHOSEN, "heuristic")

    def test_a_simulated_device_has_no_tuned_file(self):
        store.keep(HERE, {KEY: entry()})
        assert rung(target=replace(HERE, packages=())) == (CHOSEN, "heuristic")

    def test_no_cache_is_obeyed(self, monkeypatch):
        store.keep(HERE, {KEY: entry()})
        monkeypatch.setenv("POLYFLASH_NO_CACHE", "1")
        assert rung() == (CHOSEN, "heuristic") and why() == "" and store.report(HERE) == ""

    def test_a_public_call_takes_it_and_is_right(self):
        q, k, v = (torch.randn(1, 2, 50, 24) for _ in range(3))
        expected = polyflash.attention(q, k, v, backend="torch")
        shown = polyflash.explain(q, k, v, backend="torch")
        small = Config(16, 16)
        store.keep(targets.detect("cpu"), {store.key_of(shown.chosen, shown.spec): entry(small)})
        again = polyflash.explain(q, k, v, backend="torch")
        assert (again.config, again.rung) == (small, "tuned")
        polyflash.torch_ops._routes.clear()
        try:
            found = polyflash.attention(q, k, v, backend="torch")
        finally:
            polyflash.torch_ops._routes.clear()
        torch.testing.assert_close(found, expected)


class TestKey:
    def test_it_tells_apart_what_a_route_does_and_nothing_else(self):
        for spec in (
            replace(SPEC, batch=9),
            replace(SPEC, seqlen_q=4000),
            replace(SPEC, seqlen_k=MANY_KEYS - 1),
            replace(SPEC, num_q_heads=8, num_kv_heads=4),
            replace(SPEC, features=frozenset({Feature.LSE})),
            replace(SPEC, needs_grad=True),
        ):
            assert store.key_of(ROW, spec) == KEY
        for spec in (
            replace(SPEC, seqlen_q=32),
            replace(SPEC, seqlen_q=5000),
            replace(SPEC, seqlen_k=MANY_KEYS),
            replace(SPEC, num_q_heads=8),
            replace(SPEC, dtype="bfloat16"),
            replace(SPEC, head_dim=80),
            replace(SPEC, head_dim_v=80),
            replace(SPEC, features=frozenset({Feature.CAUSAL})),
        ):
            assert store.key_of(ROW, spec) != KEY

    def test_splits_depend_on_heads_so_a_decode_entry_names_them(self):
        row = replace(ROW, phase=Phase.DECODE)
        assert "h4/2" in store.key_of(row, SPEC)
        assert store.key_of(row, replace(SPEC, num_q_heads=8, num_kv_heads=4)) != store.key_of(row, SPEC)


class TestFile:
    def test_what_is_kept_is_found(self):
        path = store.keep(HERE, {KEY: entry(), "other": entry(CHOSEN)})
        assert store.read(HERE) == store.Book({KEY: entry(), "other": entry(CHOSEN)})
        assert os.path.dirname(path) == store.folder() and os.stat(path).st_mode & 0o777 == 0o600
        assert store.report(HERE).startswith("2 tuned configs of cpu:")
        assert store.forget(HERE) and not store.forget(HERE) and rung() == (CHOSEN, "heuristic")

    def test_entries_are_added_and_replaced_and_seen_at_once(self):
        store.keep(HERE, {KEY: entry(CHOSEN)})
        assert rung() == (CHOSEN, "tuned")
        store.keep(HERE, {"other": entry()})
        store.keep(HERE, {KEY: entry()})
        assert rung() == (TUNED, "tuned") and len(store.read(HERE).entries) == 2

    def test_a_half_written_file_is_ignored_wherever_it_ends(self):
        path = store.keep(HERE, {KEY: entry()})
        with open(path, "rb") as file:
            whole = file.read()
        for end in range(0, len(whole) - 1):
            with open(path, "wb") as file:
                file.write(whole[:end])
            os.utime(path, ns=(end, end))
            assert rung() == (CHOSEN, "heuristic"), end
        assert "is ignored" in why()

    @pytest.mark.parametrize(
        "data",
        (
            b"",
            b"\0" * 100,
            b"\xff\xfe{}",
            b"[]",
            b"null",
            b"{}",
            b"[" * 100_000,
            b'{"schema": "other"}',
            b"NaN",
        ),
        ids=lambda data: repr(data[:12]),
    )
    def test_a_file_of_anything_else_is_ignored_with_a_reason_and_written_anew(self, data: bytes):
        path = store.keep(HERE, {KEY: entry()})
        with open(path, "wb") as file:
            file.write(data)
        assert rung() == (CHOSEN, "heuristic") and "is ignored" in why()
        assert "is ignored" in store.report(HERE)
        store.keep(HERE, {KEY: entry()})
        assert rung() == (TUNED, "tuned")

    def test_pickles_are_bytes_like_any_other(self):
        import pickle

        path = store.keep(HERE, {KEY: entry()})
        with open(path, "wb") as file:
            file.write(pickle.dumps({"schema": store.SCHEMA}))
        assert rung() == (CHOSEN, "heuristic")

    @pytest.mark.parametrize("name", sorted(store.identity(HERE)))
    def test_a_file_made_for_something_else_is_ignored_and_says_for_what(self, name: str):
        path = store.keep(HERE, {KEY: entry()})
        made_for = store.identity(HERE)
        with open(path, "wb") as file:
            file.write(store.encode({KEY: entry()}, {**made_for, name: "another"}))
        assert rung() == (CHOSEN, "heuristic")
        assert f"made for {name} 'another', here {made_for[name]!r}" in why()

    def test_another_version_has_another_file_and_the_first_is_named(self):
        newer = replace(HERE, packages=(("numba", "99"),))
        assert store.file_of(newer) != store.file_of(HERE)
        store.keep(newer, {KEY: entry()})
        assert rung() == (CHOSEN, "heuristic") and why().startswith("tuned files: 1 of other versions")
        store.keep(HERE, {"other": entry()})
        assert rung(target=newer) == (TUNED, "tuned") and why() == ""

    @pytest.mark.parametrize(
        "changed",
        (
            {"kind": "polyflash.backends.cpu.configs.Config"},
            {"kind": "builtins.dict"},
            {"values": {"block_m": 64}},
            {"values": {**asdict(TUNED), "more": 1}},
            {"values": {**asdict(TUNED), "block_m": 63}},
            {"values": {**asdict(TUNED), "block_m": -64}},
            {"values": {**asdict(TUNED), "block_m": "64"}},
        ),
        ids=str,
    )
    def test_an_entry_that_is_no_config_of_the_row_is_ignored_alone(self, changed: dict):
        store.keep(HERE, {KEY: entry(**changed), "other": entry()})
        assert rung() == (CHOSEN, "heuristic") and KEY in why()
        assert "other" in store.read(HERE).entries

    @pytest.mark.parametrize(
        "field, value",
        (
            ("values", [1]), ("values", {"block_m": [1]}), ("values", {"block_m": None}), ("seconds", 0.0),
            ("seconds", -1.0), ("seconds", "1"), ("seconds", True), ("kind", 3), ("when", None),
            ("tried", -1), ("of", 1.5), ("more", 1), ("kind", ...),
        ),
        ids=str,
    )  # fmt: skip
    def test_an_entry_that_is_not_plain_spoils_the_file(self, field: str, value: Any):
        path = store.keep(HERE, {KEY: entry()})
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        if value is ...:
            del content["entries"][KEY][field]
        else:
            content["entries"][KEY][field] = value
        with open(path, "w", encoding="utf-8") as file:
            json.dump(content, file)
        assert store.read(HERE).entries == {} and KEY in store.read(HERE).why
        assert rung() == (CHOSEN, "heuristic")

    @pytest.mark.skipif(os.name != "posix", reason="modes and links of POSIX")
    def test_a_file_that_others_may_write_a_link_a_pipe_and_a_huge_one_are_ignored(self, tmp_path):
        path = store.keep(HERE, {KEY: entry()})
        os.chmod(path, 0o622)
        assert rung() == (CHOSEN, "heuristic") and "others may write" in why()
        os.chmod(path, 0o600)
        os.rename(path, tmp_path / "elsewhere.json")
        os.symlink(tmp_path / "elsewhere.json", path)
        assert rung() == (CHOSEN, "heuristic")
        os.unlink(path)
        os.mkfifo(path)
        assert rung() == (CHOSEN, "heuristic")  # and does not wait for a writer
        os.unlink(path)
        with open(path, "wb") as file:
            file.truncate(store.MAX_BYTES + 1)
        assert rung() == (CHOSEN, "heuristic") and "plain file" in why()

    def test_a_killed_writer_leaves_the_old_file_whole(self, monkeypatch):
        store.keep(HERE, {KEY: entry()})

        def killed(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(os, "replace", killed)
            store.keep(HERE, {KEY: entry(CHOSEN)})
        assert rung() == (TUNED, "tuned") and len(os.listdir(store.folder())) == 1

    def test_a_lock_left_by_a_killed_process_is_taken_over(self, monkeypatch):
        monkeypatch.setattr(cache, "LOCK_SECONDS", 0.05)
        os.makedirs(store.file_of(HERE) + ".lock")
        store.keep(HERE, {KEY: entry()})
        assert rung() == (TUNED, "tuned")

    def test_writers_at_once_lose_nothing_and_readers_meet_whole_files(self):
        store.keep(HERE, {KEY: entry()})
        stop, broken = threading.Event(), []

        def read_on() -> None:
            while not stop.is_set():
                if KEY not in store.read(HERE).entries:
                    broken.append(store.read(HERE).why)

        def write(n: int) -> None:
            for i in range(8):
                store.keep(HERE, {f"{n} {i}": entry()})

        reader = threading.Thread(target=read_on)
        writers = [threading.Thread(target=write, args=(n,)) for n in range(6)]
        for thread in (reader, *writers):
            thread.start()
        for thread in writers:
            thread.join()
        stop.set()
        reader.join()
        assert not broken and len(store.read(HERE).entries) == 1 + 6 * 8

    @pytest.mark.slow
    def test_processes_that_write_at_once_lose_nothing(self, own_folder):
        code = (
            "import sys; sys.path[:0] = {path!r}\n"
            "from tests.null.test_tuning import HERE, entry, store\n"
            "for i in range(20): store.keep(HERE, {{'{n} %d' % i: entry()}})"
        )
        running = [
            subprocess.Popen(
                [sys.executable, "-c", code.format(path=sys.path, n=n)],
                env={**os.environ, "POLYFLASH_CACHE_DIR": str(own_folder)},
            )
            for n in range(4)
        ]
        assert [process.wait(120) for process in running] == [0] * 4
        assert len(store.read(HERE).entries) == 80


@dataclass(frozen=True)
class Knob:
    """A config whose time is `level` seconds, and what it gets wrong."""

    level: int = 100
    wrong: bool = False
    fails: bool = False


class Fake:
    """A trial of a kernel that does not exist: what the search is given, without a clock."""

    def __init__(self, *others: Knob) -> None:
        self.others, self.ran = others, []
        self.tolerance = 1e-3
        self.workload = named("single")
        self.launch = plan.Launch(ROW, Knob(), "heuristic", HERE, SPEC)

    def candidates(self) -> tuple[Knob, ...]:
        return (Knob(), *self.others)

    def run(self, config: Knob) -> Callable[[], Knob]:
        def call() -> Knob:
            self.ran.append(config)
            if config.fails:
                raise RuntimeError("out of resources: shared memory\nmore")
            return config

        return call

    def error(self, results: Knob) -> float:
        return math.inf if results.wrong else 0.0


def race_by_level(arms: Mapping[str, Callable[[], Any]], length: float) -> dict[str, float]:
    return {name: float(call().level) for name, call in arms.items()}


def searched(fake: Fake, race: search.Race = race_by_level, start: Entry | None = None) -> tuple[Any, ...]:
    kept: list[Entry] = []
    told: list[Step] = []
    when = datetime(2026, 1, 1, tzinfo=UTC)
    found = tune([fake], race, start=start, keep=kept.append, tell=told.append, now=lambda: when)
    return found, kept, told


class TestSearch:
    def test_the_quickest_right_candidate_is_kept(self):
        fake = Fake(Knob(90), Knob(120), Knob(10, wrong=True), Knob(5, fails=True), Knob(70), Knob(80))
        found, kept, told = searched(fake)
        assert found.values == asdict(Knob(70)) and (found.seconds, found.untuned_seconds) == pytest.approx(
            (70, 100)
        )
        assert [step.outcome.partition(":")[0] for step in told] == [
            "quicker", "slower", "wrong", "fails", "quicker", "slower",
        ]  # fmt: skip
        assert "RuntimeError: out of resources: shared memory" in told[3].outcome
        assert kept[-1] == found and (found.tried, found.of) == (6, 6)

    def test_every_candidate_is_kept_track_of_at_once(self):
        _, kept, _ = searched(Fake(Knob(90), Knob(120), Knob(70)))
        assert [e.tried for e in kept] == [1, 2, 3, 3]
        assert [e.values["level"] for e in kept] == [90, 90, 70, 70]

    def test_a_wrong_candidate_is_never_timed(self):
        fake = Fake(Knob(1, wrong=True))
        searched(fake)
        assert fake.ran.count(Knob(1, wrong=True)) == 1

    def test_a_narrow_win_is_noise(self):
        found, _, told = searched(Fake(Knob(99), Knob(101)))
        assert found.values == asdict(Knob()) and [s.outcome for s in told] == ["even", "even"]

    def test_a_win_that_the_longer_race_does_not_confirm_is_none(self):
        def race(arms: Mapping[str, Callable[[], Any]], length: float) -> dict[str, float]:
            return {n: 1.0 if n == INCUMBENT else (0.5 if length == search.SHORT else 1.0) for n in arms}

        found, _, told = searched(Fake(Knob(7)), race)
        assert found.values == asdict(Knob()) and told[0].outcome == "even"

    def test_never_worse_than_untuned_at_the_end(self):
        """Challengers win each race, but the last comparison says otherwise."""

        def race(arms: Mapping[str, Callable[[], Any]], length: float) -> dict[str, float]:
            if length == search.LONG and arms[INCUMBENT]() != Knob():
                return {n: 3.0 if n == INCUMBENT else 2.0 for n in arms}
            return {n: 1.0 if n == CHALLENGER else 2.0 for n in arms}

        found, _, _ = searched(Fake(Knob(50)), race)
        assert found.values == asdict(Knob()) and found.seconds == found.untuned_seconds

    def test_a_wrong_untuned_config_stops_the_search(self):
        fake = Fake(Knob(50))
        fake.error = lambda results: 1.0  # type: ignore[method-assign]
        with pytest.raises(ArithmeticError, match="nothing is tuned"):
            searched(fake)

    def test_an_interrupted_search_goes_on_behind_what_it_knew(self):
        knobs = [Knob(90), Knob(95), Knob(60), Knob(85)]
        fake, kept = Fake(*knobs), []

        def stop(step: Step) -> None:
            if step.number == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            tune([fake], race_by_level, keep=kept.append, tell=stop)
        assert kept[-1].tried == 2 and kept[-1].values == asdict(Knob(90))
        second = Fake(*knobs)
        found, _, told = searched(second, start=kept[-1])
        assert [step.number for step in told] == [3, 4] and found.values == asdict(Knob(60))
        assert Knob(95) not in second.ran

    def test_no_winner_of_a_contended_race_is_kept(self):
        """The machine is busy while the second candidate runs, and once more at the end."""
        busy = []

        def race(arms: Mapping[str, Callable[[], Any]], length: float) -> dict[str, float]:
            taken = race_by_level(arms, length)
            if 50.0 in taken.values():
                busy.append(length)
                raise search.ContendedError("3 of 6 rounds ran below 80% of the machine's speed")
            return taken

        found, kept, told = searched(Fake(Knob(90), Knob(50), Knob(80)), race)
        assert told[1].outcome.startswith("contended: 3 of 6 rounds") and math.isnan(told[1].ratio)
        assert found.values == asdict(Knob(80)) and all(e.values["level"] != 50 for e in kept)
        assert (found.tried, found.of) == (1, 3) and [e.tried for e in kept] == [1, 1, 1, 1]
        found, _, told = searched(Fake(Knob(90), Knob(50), Knob(80)), start=found)
        assert [step.number for step in told] == [2, 3] and found.values == asdict(Knob(50))
        assert found.tried == 3

    def test_a_search_that_begins_contended_keeps_nothing(self):
        def race(arms: Mapping[str, Any], length: float) -> dict[str, float]:
            raise search.ContendedError("busy")

        with pytest.raises(search.ContendedError):
            searched(Fake(Knob(50)), race)

    def test_other_candidates_than_before_start_anew(self):
        before = replace(entry(), kind=store.kind_of(Knob), values=asdict(Knob(90)), tried=2, of=9)
        _, _, told = searched(Fake(Knob(90), Knob(80)), start=before)
        assert [step.number for step in told] == [1, 2]


class TestTrial:
    @pytest.mark.parametrize("phase", (Phase.FORWARD, Phase.BACKWARD, Phase.STATISTICS))
    @pytest.mark.parametrize("name", ("causal-tall", "lens", "step-rows-2"))
    def test_candidates_of_the_cpu_row_are_right_and_a_wrong_result_is_seen(self, phase: Phase, name: str):
        one = trial(named(name), phase, "cpu")
        for config in (one.untuned, *one.candidates()[-2:]):
            assert one.error(one.run(config)()) <= one.tolerance
        spoilt = [x.clone() for x in one.reference]
        rows = spoilt[0].flatten(0, -2)
        rows[rows.norm(dim=-1).argmax()] *= 1.01
        assert one.error(tuple(spoilt)) == pytest.approx(0.01, rel=0.01)
        rows[-1] = torch.nan
        assert one.error(tuple(spoilt)) == math.inf

    def test_infinities_must_agree(self):
        x = torch.tensor([[1.0, -torch.inf], [2.0, 3.0]])
        assert worst_row(x, x.clone()) == 0
        assert worst_row(torch.tensor([[1.0, 5.0], [2.0, 3.0]]), x) == math.inf

    def test_differences_have_names(self):
        assert difference_of(CHOSEN, CHOSEN) == ""
        assert difference_of(CHOSEN, replace(CHOSEN, sdpa=True)) == "sdpa=on"
        assert difference_of(CHOSEN, Config(64, 512)) == "block_m=64"

    def test_packed_and_paged_problems_are_refused(self):
        for name in ("packed", "paged-16"):
            with pytest.raises(polyflash.SpecError, match="neither packed nor paged"):
                trial(named(name), Phase.FORWARD, "cpu")


SHAPE = ("--seqlen", "40/70", "--heads", "4/2", "--dtype", "float32", "--seconds", "0.001")


@pytest.fixture
def quick_clock(monkeypatch):
    """Races without a clock: each later config is quicker."""
    level = iter(range(10_000, 0, -1))
    monkeypatch.setattr(
        command, "_race", lambda device, seconds: lambda arms, length: {n: float(next(level)) for n in arms}
    )


class TestCommand:
    def test_tuning_the_cpu_row_changes_its_plan(self, quick_clock, capsys):
        assert main(["tune", "--backend", "cpu", *SHAPE, "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)["entries"]
        assert found["tried"] == found["of"] > 0 and found["row"] == "cpu/forward"
        q, k = torch.randn(1, 4, 40, 64), torch.randn(1, 2, 70, 64)
        shown = polyflash.explain(q, k, k, backend="cpu")
        assert shown.rung == "tuned" and asdict(shown.config) == found["values"]

    def test_a_second_run_has_nothing_to_do_unless_told(self, quick_clock, capsys):
        for words, resumed in ((), 0), ((), 1), (("--again",), 0):
            assert main(["tune", "--backend", "cpu", *SHAPE, "--json", *words]) == 0
            (found,) = json.loads(capsys.readouterr().out)["entries"]
            assert found["resumed_at"] == resumed * found["of"]
        assert main(["tune", "--backend", "cpu", "--forget"]) == 0
        assert not store.read(targets.detect("cpu")).entries

    def test_interrupting_keeps_what_is_known(self, monkeypatch, capsys):
        def stop(arms: Mapping[str, Any], length: float) -> dict[str, float]:
            calls.append(1)
            if len(calls) == 4:  # one is of the untuned config, two are of the first candidate
                raise KeyboardInterrupt
            return {n: 1.0 if n == CHALLENGER else 2.0 for n in arms}

        calls: list[int] = []
        monkeypatch.setattr(command, "_race", lambda device, seconds: stop)
        assert main(["tune", "--backend", "cpu", *SHAPE, "--quiet"]) == 130
        assert "the next run goes on" in capsys.readouterr().err
        monkeypatch.setattr(command, "_race", lambda device, seconds: race_of_equals)
        assert main(["tune", "--backend", "cpu", *SHAPE, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["entries"][0]["resumed_at"] == 1

    def test_a_contended_machine_is_named_and_nothing_kept(self, monkeypatch, capsys):
        rounds = tuple(Round({"incumbent": 1.0, "challenger": 0.5}, speed) for speed in (0.5, 0.6, 1.0, 1.0))
        monkeypatch.setattr(command, "compared", lambda *_: Comparison(rounds))
        assert main(["tune", "--backend", "cpu", *SHAPE]) == 1
        err = capsys.readouterr().err
        assert err.startswith("contended 2 of 4 rounds ran below 80%") and "nothing is kept" in err
        assert not store.read(targets.detect("cpu")).entries

    def test_what_decides_a_race(self):
        even = [Round({"a": 1.0 + 0.01 * i, "b": 2.0}, 1.0) for i in range(5)]
        assert command.decided(Comparison(tuple(even))) == {"a": 1.02, "b": 2.0}
        wide = [Round({"a": 1.0 + 0.3 * i, "b": 2.0}, 1.0) for i in range(5)]
        with pytest.raises(search.ContendedError, match="spread by 37%"):
            command.decided(Comparison(tuple(wide)))

    def test_gradients_are_tuned_too(self, quick_clock, capsys):
        assert main(["tune", "--backend", "torch", "--phase", "backward", *SHAPE, "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)["entries"]
        assert found["key"].startswith("torch/backward") and found["tried"] > 0

    def test_without_a_gpu_it_says_so_in_one_line(self, capsys, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        for name in ("tune", "ablate"):
            assert main([name, "--device", "cuda"]) == 2
            text = capsys.readouterr().err
            assert "finds no GPU here" in text and text.count("\n") == 1

    def test_a_backend_of_other_devices_is_refused_in_one_line(self, monkeypatch):
        row = replace(ROW, backend="triton", targets=("cuda:", "hip:"))
        monkeypatch.setattr(backends, "TABLE", (*backends.TABLE, row))
        options = type("Options", (), {"device": "cpu", "backend": "triton"})()
        with pytest.raises(UnsupportedError, match=r"^triton: its kernels need cuda:, hip: and this is cpu:"):
            command.device_of(options)

    def test_nothing_to_keep_is_an_error(self, monkeypatch, capsys):
        monkeypatch.setenv("POLYFLASH_NO_CACHE", "1")
        assert main(["tune", "--backend", "cpu", *SHAPE]) == 1
        assert "POLYFLASH_NO_CACHE" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "words", ("--phase sideways", "--seqlen x", "--seqlen 0", "--seqlen 4 --heads 3/2", "--backend none")
    )
    def test_wrong_words_are_usage_errors(self, words: str, capsys):
        assert main(["tune", *words.split()]) == 2

    def test_problems_that_do_not_exist_are_refused(self, capsys):
        assert main(["tune", "--backend", "cpu", "--filter", "zzz"]) == 1

    def test_list_names_the_problems_with_the_tag_tune(self, capsys):
        assert main(["tune", "--list", "--filter", "causal", "d64", "float32"]) == 0
        listed = capsys.readouterr().out.split()
        assert listed and all("tune" in named(name).tags for name in listed)


def race_of_equals(arms: Mapping[str, Any], length: float) -> dict[str, float]:
    return dict.fromkeys(arms, 1.0)


def test_problems_that_share_an_entry_are_tuned_together():
    one = Workload("a", frozenset(), 1, 2, 2, 40, 70, 64)
    found = [trial(replace(one, name=n, seqlen_q=m), Phase.FORWARD, "cpu") for n, m in (("a", 40), ("b", 50))]
    found.append(trial(replace(one, name="c", seqlen_q=20), Phase.FORWARD, "cpu"))
    grouped = command._by_entry(found)
    assert sorted(len(group) for _, group in grouped) == [1, 2]
