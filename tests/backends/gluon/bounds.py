"""Problems whose rows see parts of the keys, for schedules that run in Python."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, product
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from polyflash import mask
from polyflash.backends.gluon import places, schedule
from polyflash.backends.gluon.forward import band_of
from polyflash.spec import Arguments


class Case(NamedTuple):
    """Rows and keys of a request, of which some are live, and what else bounds a row."""

    rows: int
    keys: int
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    offset: int | None = None
    lens: int | None = None
    start: int = 0
    own: bool = False  # is the offset one of an int per request?

    @property
    def position(self) -> int:
        live = self.keys if self.lens is None else self.lens
        return live - self.rows if self.offset is None else self.offset

    def interval(self, i: int) -> tuple[int, int]:
        """Keys of row i, by the module that every engine is held to."""
        live = self.keys if self.lens is None else self.lens
        bounds = {"causal": self.causal, "window": self.window, "kv_start": self.start}
        return mask.row_interval(i, seqlen_k=live, offset=self.position, **bounds)


def cases() -> Iterator[Case]:
    draw = random.Random(0)
    for offset, keys, causal in product((-400, -200, -64, -1, 0, 1, 63, 150, 900), (1, 64, 65, 384), (0, 1)):
        yield Case(200, keys, bool(causal), offset=offset)
    for _ in range(3000):
        keys = draw.choice((1, 63, 64, 65, 128, 200, 384, 700))
        sides = (None, 0, 1, 20, 63, 64, 130, 300, 2**31 - 1)
        yield Case(
            draw.choice((1, 64, 130, 200, 500)), keys, draw.random() < 0.4,
            (draw.choice(sides), draw.choice(sides)), draw.choice((None, None, 0, -70, 33, 500, -(2**30))),
            draw.choice((None, 0, keys // 2, keys)), draw.choice((0, 0, 1, 64, keys // 2, keys)),
            draw.random() < 0.5,
        )  # fmt: skip


class Memory:
    """A kernel's pointer to values."""

    def __init__(self, *values: int, at: int = 0):
        self.values, self.at = values, at

    def __add__(self, steps: int) -> Memory:
        return Memory(*self.values, at=self.at + steps)

    def load(self, mask: bool = True, other: int = 0) -> int:
        if not mask:
            return other
        assert 0 <= self.at < len(self.values), "reads what is not there"
        return self.values[self.at]


@contextmanager
def in_python() -> Iterator[None]:
    """Functions of `places` and `schedule`, without the jit (`.fn`), call one another."""
    language = SimpleNamespace(load=Memory.load, cast=lambda x, kind: x, int32=None, int64=None, float32=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(places, "gl", language)
        patch.setattr(schedule, "gl", language)
        used = (
            "find_member",
            "span",
            "spans",
            "load_own",
            "band",
            "stand",
            "stand_in",
            "tile_of",
            "tile_in",
        )
        for name in used:
            patch.setattr(places, name, getattr(places, name).fn)
        yield


def divided(num_tiles: int, **more: Any) -> SimpleNamespace:
    """Numbers of a call with so many tiles of a plane."""
    inverse, shift = schedule.inverse_of(num_tiles)
    return SimpleNamespace(num_tiles=num_tiles, inverse=inverse, shift=shift, **more)


def launched(case: Case, block_m: int, block_n: int) -> tuple[SimpleNamespace, ...]:
    """Tensors, numbers and constants of a call of one request."""

    def given(x: int | None) -> Memory | None:
        return None if x is None else Memory(x)

    t = SimpleNamespace(kv_lens=given(case.lens), kv_starts=given(case.start or None), q_offset=None)
    offset = case.offset
    if case.own:
        t.q_offset, offset = given(offset), None
    args = Arguments(case.causal, None, False, *case.window, offset, t.kv_lens, t.kv_starts, t.q_offset)
    how = band_of(case.rows, case.keys, args)
    left = case.window[0] is not None
    c = SimpleNamespace(
        BLOCK_M=block_m, BLOCK_N=block_n, HAS_RIGHT=how.bounded, HAS_LEFT=left, BELOW=left or case.start > 0,
        SHORT=case.lens is not None, OWN=how.own, PACKED=False, ALIBI=False,
    )  # fmt: skip
    n = SimpleNamespace(
        num_heads=1, seqlen_q=case.rows, seqlen_k=case.keys, offset=how.right, left=how.left, members=None
    )
    return t, n, c


class Packed(NamedTuple):
    """Members' rows and keys, where each begins, and how many tokens there are, those of nobody too."""

    rows: list[int]
    keys: list[int]
    at_q: list[int]
    at_k: list[int]
    total_q: int
    total_k: int


def packed_calls(count: int = 200) -> Iterator[tuple[Packed, random.Random]]:
    """Beside each a source for what else is drawn."""
    draw = random.Random(0)
    for _ in range(count):
        rows = [draw.choice((0, 1, 63, 64, 128, 192, 384, 500)) for _ in range(draw.randrange(9))]
        keys = [draw.choice((0, 1, 64, 130, 300)) for _ in rows]
        at_q, at_k = [0, *accumulate(rows)], [0, *accumulate(keys)]
        total_q, total_k = at_q[-1] + draw.choice((0, 5, 200)), at_k[-1] + draw.choice((0, 5))
        yield Packed(rows, keys, at_q, at_k, total_q, total_k), draw
