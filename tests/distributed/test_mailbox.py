"""Numbers through memory that ranks of a host share: whole, in turns, and from ranks that live."""

from __future__ import annotations

import os
import struct
import threading
from pathlib import Path
from typing import Any

import pytest

from polyflash.parallel import mailbox
from polyflash.parallel.mailbox import Mailbox

pytestmark = pytest.mark.skipif(mailbox.fcntl is None, reason="no such locks")


class Telling:
    """What a backend does, between threads."""

    def __init__(self, size: int) -> None:
        self.met, self.said = threading.Barrier(size, timeout=20), [[0, 0]] * size

    def of(self, rank: int) -> Any:
        def tell(words: Any) -> Any:
            self.said[rank] = list(words)
            self.met.wait()
            said = list(self.said)
            self.met.wait()
            return said

        return tell


def boxes(size: int, seconds: float = 20.0, elsewhere: int | None = None) -> list[Mailbox | None]:
    """Those of ranks, of which one may be on another host."""
    telling, made = Telling(size), [None] * size

    def body(rank: int) -> None:
        tell = telling.of(rank)
        if rank == elsewhere:  # it finds no file of such names
            tell = lambda words, told=tell: [  # noqa: E731
                [x ^ 2, y] if abs(x) > 1 else [x, y] for x, y in told(words)
            ]
        made[rank] = mailbox.shared(rank, size, tell, seconds)  # type: ignore[call-overload]

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


def two(seconds: float = 20.0) -> list[Mailbox]:
    return [box for box in boxes(2, seconds) if box is not None]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mailbox, "FOLDER", str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def locks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One process holds all locks here, and takes them from itself."""
    free = [False]
    monkeypatch.setattr(mailbox, "_is_free", lambda file: free[0])
    return free


def test_each_rank_reads_what_all_wrote(folder: Path):
    made = boxes(3)
    for turn in range(1, 11):
        for rank, box in enumerate(made):
            assert box is not None and box.put([turn, -rank]) == turn
        for box in made:
            assert box is not None and box.take(turn, 2) == [[turn, 0], [turn, -1], [turn, -2]]
    assert not os.listdir(folder)  # nothing is left behind by ranks that are killed


def test_ranks_of_several_hosts_have_none():
    assert boxes(2, elsewhere=1) == [None, None]


def test_numbers_that_are_not_whole_are_not_read():
    one, other = two()
    turn = one.put([1, 2])
    at = turn % mailbox.TURNS * mailbox.SIZE
    other.put([3, 4])
    body = one._maps[1][at : at + 24]
    one._maps[1][at + 8 : at + 16] = struct.pack("=q", 5)  # before its checksum is there
    read = threading.Timer(0.2, lambda: one._maps[1].__setitem__(slice(at, at + 24), body))
    read.start()
    assert one.take(turn, 2) == [[1, 2], [3, 4]]
    assert not read.is_alive()


def test_what_a_rank_wrote_before_it_ended_is_read(locks: list[bool]):
    one, other = two()
    turn = other.put([1])
    one.put([2])
    locks[0] = True
    assert one.take(turn, 1) == [[2], [1]]
    one.put([3])
    with pytest.raises(RuntimeError, match="rank 1 said nothing"):
        one.take(turn + 1, 1)


def test_a_silent_rank_is_waited_for_so_long():
    one, _ = two(seconds=0.1)
    with pytest.raises(RuntimeError, match="rank 1 said nothing"):
        one.take(one.put([1]), 1)


def test_a_rank_that_went_on_alone_is_noticed():
    one, other = two()
    for _ in range(1 + mailbox.TURNS):
        other.put([1])
    with pytest.raises(RuntimeError, match="rank 1 said nothing"):
        one.take(one.put([1]), 1)
