"""Which key blocks a tile of the Triton forward visits: those of `mask.block_range`, each once, in rising
order, and of interval lists those that a list of a row touches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from polyflash import env, mask
from polyflash.workloads import Workload, make
from tests import device
from tests.catalogue import workloads

if not env.TRITON_INTERPRET.is_set() and device.DEVICE.type == "cpu":
    pytest.skip("needs Triton's interpreter or a GPU", allow_module_level=True)

from polyflash.backends.triton import forward, forward_kernel
from polyflash.backends.triton.configs import DecodeConfig, ForwardConfig
from polyflash.backends.triton.interpreter import INTERPRET
from tests.backends.triton.direct import Config, call

NOBODY = -1  # stays in the counter of a program that has no rows
CORES = 3
FORWARD = {
    "heads": ForwardConfig(32, 32, 4, 2),
    "packed": ForwardConfig(16, 32, 4, 2, pack_gqa=True, order="heavy_first"),
    "persistent": ForwardConfig(64, 16, 4, 2, pack_gqa=True, persistent=True),
}
DECODE = {
    "splits": DecodeConfig(16, 32, 4, 2, 128),
    "splits-of-heads": DecodeConfig(16, 16, 4, 2, 256, pack_gqa=False),
}
Blocks = list[int] | None  # those that a program visits; None: it has no rows


@dataclass
class Grid:
    """The programs of a launch as `mask.block_range` and the lists of a workload want them."""

    w: Workload
    config: Config
    lists: Tensor | None = None  # (batch or 1, heads or 1, row blocks, intervals, 2)
    split_keys: int = 0

    @property
    def group(self) -> int:
        return self.w.heads // self.w.kv_heads if self.config.pack_gqa else 1

    def programs(self) -> list[Blocks]:
        """In the order of the program number: splits, tiles, heads, requests, the first the fastest."""
        w = self.w
        keys = w.columns * w.page_size if w.page_size else w.seqlen_k
        splits = range(-(-keys // self.split_keys)) if self.split_keys else (None,)
        found: list[Blocks] = []
        for b in range(1 if w.members else w.batch):
            for head in range(w.heads // self.group):
                tiles = self.packed(head) if w.members else self.request(b, head, w.seqlen_q)
                if getattr(self.config, "order", "") == "heavy_first":
                    tiles.reverse()
                found += [self.part(tile, split) for tile in tiles for split in splits]
        return found

    def part(self, tile: Blocks, split: int | None) -> Blocks:
        if tile is None or split is None:
            return tile
        return [n for n in tile if n * self.config.block_n // self.split_keys == split]

    def packed(self, head: int) -> list[Blocks]:
        """Room for one tile more than rows need per member, and for the rows of nobody, which see nothing."""
        w, m = self.w, self.config.block_m
        firsts = [0, *accumulate(rows for rows, _ in w.members)]
        tiles: list[Blocks] = [None] * (w.seqlen_q * self.group // m + len(w.members) + 1)
        for b, (rows, _) in enumerate((*w.members, (w.seqlen_q - firsts[-1], 0))):
            own = self.request(b, head, rows) if b < len(w.members) else [[]] * -(-rows * self.group // m)
            at = firsts[b] * self.group // m + b
            assert tiles[at : at + len(own)] == [None] * len(own)
            tiles[at : at + len(own)] = own
        return tiles

    def request(self, b: int, head: int, rows: int) -> list[Blocks]:
        """The tiles of one head of a request."""
        w, group, m = self.w, self.group, self.config.block_m
        live = w.lens[b]
        if w.members and not w.page_size:
            live = min(live, w.members[b][1])
        offset = w.offset[b] if isinstance(w.offset, tuple) else w.offset
        if offset is None:
            offset = 0 if w.causal == "top_left" else live - rows
        bounds: Any = {
            "seqlen_k": live,
            "offset": offset,
            "causal": bool(w.causal),
            "window": w.window or (None, None),
            "kv_start": w.kv_starts[b] if w.kv_starts else 0,
        }
        interval, block_n = partial(mask.row_interval, **bounds), self.config.block_n
        tiles: list[Blocks] = []
        for first in range(0, rows * group, m):
            packed = range(first, min(first + m, rows * group))
            blocks = range(*mask.block_range(packed[0] // group, packed[-1] // group, block_n, interval))
            pairs = {(head * group + r % group, r // group // w.interval_rows) for r in packed}
            tiles.append([n for n in blocks if self.lists is None or self.touched(b, pairs, n)])
        return tiles

    def touched(self, b: int, pairs: set[tuple[int, int]], block: int) -> bool:
        assert self.lists is not None
        n = self.config.block_n
        keys = range(block * n, block * n + n)
        of_entry = self.lists[b if self.lists.shape[0] > 1 else 0]
        return any(
            start < end and start < keys.stop and end > keys.start
            for head, row_block in pairs
            for start, end in of_entry[head if of_entry.shape[0] > 1 else 0, row_block].tolist()
        )


@dataclass
class Seen:
    """What launches did: their counters, and in the interpreter the blocks of every program that had rows."""

    counts: list[Tensor]
    blocks: list[list[int]]
    split_keys: int = 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Gives every launch a counter. In the interpreter blocks are noted and not computed, which takes a
    tenth of the time."""
    found = Seen([], [])
    attend_call, store, open_blocks = forward.attend_call, forward_kernel.finalize, []

    def counted(*args: Any, **options: Any) -> None:
        counter = torch.full((1 << 16,), NOBODY, dtype=torch.int32, device=device.DEVICE)
        attend_call(*args, visits=counter, **options)
        found.counts.append(counter.cpu())
        found.split_keys = options.get("split_keys", 0)

    sums = forward_kernel.attend_block.arg_names.index("sums")  # what a block changes

    def attend_block(*args: Any) -> Any:
        open_blocks.append(int(args[0]))
        return args[sums]

    def finalize(*args: Any) -> Any:
        found.blocks.append(list(open_blocks))
        open_blocks.clear()
        return store(*args)

    for module in (forward,):
        monkeypatch.setattr(module, "attend_call", counted)
    if INTERPRET:
        monkeypatch.setattr(forward_kernel, "attend_block", attend_block)
        monkeypatch.setattr(forward_kernel, "finalize", finalize)
    return found


def check(seen: Seen, w: Workload, config: Config, **more: Any) -> None:
    q, k, v, options = make(w, seed=1)
    call(config, q, k, v, cores=CORES, **options, **more)
    lists = options["mask"].bounds if w.intervals else None
    programs = Grid(w, config, lists, seen.split_keys).programs()
    (counter,) = seen.counts
    want = torch.tensor([NOBODY if blocks is None else len(blocks) for blocks in programs])
    assert counter[: len(want)].tolist() == want.tolist()
    assert (counter[len(want) :] == NOBODY).all()
    if INTERPRET:
        turn = range(len(programs))
        if getattr(config, "persistent", False):
            turn = [i for first in range(CORES) for i in turn[first::CORES]]
            assert seen.blocks == [programs[i] for i in turn if programs[i] is not None]
        else:  # in the order of the grid, which nothing depends on
            assert sorted(seen.blocks) == sorted(blocks for blocks in programs if blocks is not None)


def cases(configs: dict[str, Any], problems: list[Workload]) -> list[Any]:
    """Every problem with every config. By default each config takes its turn with the problems that need a
    feature which none before them needed."""
    found, known, turn = [], set(), 0
    for w in problems:
        fresh = not found or not w.features <= known
        known |= w.features
        for place, name in enumerate(configs):
            mine = fresh and place == turn % len(configs)
            marks = () if mine else (pytest.mark.slow,)
            found.append(pytest.param(w, configs[name], id=f"{w.name}-{name}", marks=marks))
        turn += fresh
    return found


PROBLEMS = [w for tag in ("ci", "varlen", "paged", "decode") for w in workloads(tag)]
STEPS = [w for tag in ("decode", "paged") for w in workloads(tag) if not w.members]


@pytest.mark.parametrize(("w", "config"), cases(FORWARD, PROBLEMS))
def test_a_tile_visits_the_blocks_of_its_rows(w: Workload, config: Config, seen: Seen):
    check(seen, w, config)


@pytest.mark.parametrize(("w", "config"), cases(DECODE, STEPS))
def test_the_parts_of_a_split_walk_add_up(w: Workload, config: Config, seen: Seen):
    check(seen, w, config, batch_invariant=True)


def test_splits_are_of_the_size_that_the_config_names(seen: Seen):
    (w,) = [w for w in STEPS if w.name == "step-group-8"]
    check(seen, w, DECODE["splits"], batch_invariant=True)
    assert seen.split_keys == 128 and (seen.counts[0] != NOBODY).sum() == -(-1100 // 128)


@pytest.mark.parametrize(
    ("options", "counts"),
    (({"kv_lens": torch.tensor([330], dtype=torch.int32)}, [4, 4, 3]), ({"window": (500, 0)}, [6, 6, 5])),
    ids=("lens", "window"),
)
def test_parts_of_one_request_are_equal_whatever_its_length(
    options: dict[str, Any], counts: list[int], seen: Seen
):
    """The host knows how long it may be, and no more."""
    q, k, v = torch.randn(1, 2, 1, 16), torch.randn(1, 1, 1100, 16), torch.randn(1, 1, 1100, 16)
    call(DECODE["splits"], q, k, v, cores=CORES, **options)
    (counter,) = seen.counts
    assert counter[:4].tolist() == [*counts, NOBODY]


@pytest.mark.parametrize("page_size", (16, 32, 64, 96))
@pytest.mark.parametrize("lens", ((330,), (7,), (0,), (330, 64, 1)), ids=str)
def test_blocks_lie_in_one_page_or_in_several(page_size: int, lens: tuple[int, ...]):
    """An entry that names no page hides its keys either way."""
    columns, pages = -(-400 // page_size), 40
    table = torch.randint(0, pages, (len(lens), columns), dtype=torch.int32)
    table[0, 1] = -1
    pools = torch.randn(2, pages, page_size, 1, 16)
    q, kv_lens = torch.randn(len(lens), 2, 16), torch.tensor(lens, dtype=torch.int32)
    got = call(DECODE["splits"], q, *pools, cores=CORES, page_table=table, kv_lens=kv_lens)
    for b, n in enumerate(lens):
        at = torch.arange(n)
        page = table[b, at // page_size]
        k, v = (x[page, at % page_size, 0][page >= 0] for x in pools)
        want = (q[b] @ k.T / 4).softmax(-1) @ v
        assert torch.allclose(got[0][b], want, atol=1e-5), (b, n)
