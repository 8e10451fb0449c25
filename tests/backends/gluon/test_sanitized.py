"""What compute-sanitizer says is read right: what is known passes, and all else is told."""

from __future__ import annotations

from pathlib import Path

from polyflash.backends import gluon
from tests.backends.gluon.sanitized import place_of, unknown

REPORT = """========= Error: Race reported between {0} access at attend_sm90+0x550 in {1}
=========     and {2} access at attend_sm90+0x21410 in {3} [24 hazards]
========= 
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def line_of(file: str, text: str) -> str:
    lines = Path(gluon.__file__).with_name(file).read_text(encoding="utf-8").splitlines()
    return f"{file}:{next(i for i, line in enumerate(lines, 1) if text in line)}"


def test_place_of_a_line():
    file, _, line = line_of("forward_sm90.py", "gl.warp_specialize([").partition(":")
    assert place_of(file, int(line)) == "start_roles"
    file, _, line = line_of("forward_sm90.py", "def attend_sm90(").partition(":")
    assert place_of(file, int(line) - 1) == "def attend_sm90", "the line of its decorator"
    assert place_of("nowhere.py", 1) == ""


def test_what_is_known():
    role = line_of("forward_sm90.py", "def attend_sm90("), line_of("forward_sm90.py", "def start_roles(")
    assert unknown(REPORT.format("Read", role[0], "Write", role[1])) == []
    assert unknown(REPORT.format("Write", role[1], "Read", role[0])) == []
    word, tell = line_of("channel.py", "return gl.max(board.tile"), line_of("channel.py", ".store(word)")
    assert unknown(REPORT.format("Read", word, "Write", tell)) == []


def test_what_is_not():
    role, clean = line_of("forward_sm90.py", "def attend_sm90("), line_of("mending.py", "slice(i, 16).store(")
    assert unknown(REPORT.format("Write", clean, "Write", clean)) == ["1 x Write of mending.py clean"]
    assert unknown(REPORT.format("Read", role, "Write", clean))
    word, tell = line_of("channel.py", "return gl.max(board.tile"), line_of("channel.py", ".store(word)")
    assert unknown(REPORT.format("Read", word, "Write", clean))
    assert unknown(REPORT.format("Write", word, "Write", tell)), "known by kind too"
    number = line_of("backward_sm90.py", "i_t = gl.atomic_add(")  # the number of a program, before its roles
    head = line_of("backward_sm90.py", "def differentiate_sm90(")
    assert unknown(REPORT.format("Read", number, "Write", head))
    for said in ("Invalid __global__ read of size 4 bytes", "Barrier error detected. Missing wait."):
        assert unknown(f"========= {said}\n") == [said]
    assert unknown("========= Error: Race reported between something else\n"), "what cannot be read is told"
