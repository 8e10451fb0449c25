"""Keys, scratch, chunks and items of the CPU backward engine: arithmetic that needs no compiler."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from polyflash.backends.cpu import backward_configs as bc
from polyflash.backends.cpu import configs, pool
from polyflash.backends.cpu.backward_configs import BackwardConfig, BackwardKey
from polyflash.backends.cpu.configs import KernelKey
from polyflash.backends.cpu.words import BACKWARD, BACKWARD_ITEM
from polyflash.errors import SpecError
from polyflash.spec import AttentionSpec, Feature, Phase
from polyflash.target import parse
from tests.backends.cpu import keys as every

TARGETS = tuple(
    parse(name) for name in ("cpu:avx512+avx512_bf16", "cpu:avx512", "cpu:avx2", "cpu:neon", "cpu:generic")
)


def spec_of(dtype: str = "float32", seqlen: int = 2048, head_dim: int = 64, **more) -> AttentionSpec:
    made = AttentionSpec(
        Phase.BACKWARD, dtype, "cpu", 1, 8, 8, seqlen, seqlen, head_dim, head_dim, frozenset()
    )
    return replace(made, **more)


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name + str(len(t.features)))
def test_keys_are_few_distinct_and_named_apart(target):
    keys, forward = list(every.backward(target)), list(every.forward(target))
    names = {key.name for key in (*keys, *forward)}
    assert 0 < len(keys) <= 64 and len(names) == len(keys) + len(forward)
    assert BackwardKey("avx512", "f32", "float32", 4, 64) != KernelKey("avx512", "f32", "float32", 4, 64)
    assert {key.builder.rpartition(".")[2] for key in keys} == {"backward", "bias_gradient"}


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name + str(len(t.features)))
def test_a_plan_asks_for_keys_of_the_list_and_fits_the_cache(target):
    listed = set(every.backward(target))
    for dtype in configs.STORAGE_BYTES:
        for head_dim in (1, 64, 65, 128, 200, 576):
            for seqlen in (1, 16, 33, 5000):
                spec = spec_of(dtype, seqlen, head_dim)
                config = bc.choose(spec, target)
                nv = configs.panel_vectors(config.isa, seqlen)
                key = bc.key_for(config, spec, nv)
                assert key in listed
                tiles = bc.scratch(key, 1, config.block_n)
                assert tiles.total <= max(target.l2_bytes, 2 << 20)
                assert all(offset % 64 == 0 for offset in tiles)
                whole = bc.scratch(key, config.row_panels, config.block_n)
                assert whole.total <= pool.KEPT_SCRATCH, (key.name, whole.total)


@pytest.mark.parametrize("compute, storage", [("f32", "float16"), ("bf16dot", "bfloat16")])
def test_tiles_do_not_overlap(compute, storage):
    """Every tile has an address of its own but those that float32 shares on purpose."""
    key = BackwardKey("avx512", compute, storage, 4, 128)
    tiles = bc.scratch(key, 3, 64)
    offsets = tiles[:-1]
    shared = 0 if key.pack == 2 else 3
    assert len(set(offsets)) == len(offsets) - shared
    assert sorted(set(offsets))[-1] < tiles.total
    assert len(offsets) == len(BACKWARD.tiles) - 1  # one has two names
    assert tiles.kinds - tiles.item >= bc.ITEM_WORDS * 8
    assert len(BACKWARD_ITEM.words) < bc.ITEM_WORDS


@pytest.mark.parametrize("seqlen", [1, 63, 256, 257, 4096, 4097, 100_000])
def test_chunks_hold_whole_blocks_and_are_few(seqlen):
    chunk = bc.chunk_keys(seqlen)
    assert chunk % 128 == 0 and chunk >= bc.CHUNK_KEYS
    assert -(-seqlen // chunk) <= bc.MOST_CHUNKS


@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("heads", [1, 3, 64])
def test_items_cover_every_key_once(heads, threads):
    lens_q, lens_k = np.array([5, 0, 700, 1, 9]), np.array([3000, 9, 1, 0, 100_000])
    table, parts = bc.entry_table(lens_q, lens_k, heads, threads)
    assert table.dtype == np.int32 and table.shape[1] == 5
    for b, (rows, keys) in enumerate(zip(lens_q, lens_k, strict=True)):
        own = sorted(map(tuple, table[table[:, 0] == b].tolist()), key=lambda x: x[1])
        if rows == 0 or keys == 0:
            assert not own
            continue
        assert own[0][1] == 0 and own[-1][2] == keys
        assert all(x[2] == y[1] for x, y in pairwise(own))
        chunk = bc.chunk_keys(int(keys))
        assert all(x[4] == chunk for x in own)
        if len(own) > 1:  # one chunk each, and the partial sum of its number
            assert [x[3] for x in own] == [x[1] // chunk for x in own] == list(range(len(own)))
        assert all(x[3] < parts for x in own)


def test_heads_share_their_keys_only_if_threads_would_be_idle():
    lens = np.array([4096])
    assert [bc.entry_table(lens, lens, heads, 2)[1] for heads in (1, 2, 3, 5, 6, 8, 9)] == [
        8,
        1,
        8,
        8,
        1,
        1,
        1,
    ]
    assert [bc.entry_table(lens, lens, heads, 8)[1] for heads in (2, 8, 12, 16)] == [8, 1, 8, 1]
    assert bc.entry_table(lens, lens, 1, 1)[1] == 1
    many = np.full(8, 4096)
    assert bc.entry_table(many, many, 1, 2)[1] == 1
    assert bc.entry_table(many, many, 1, 2, 1)[1] == bc.MOST_CHUNKS
    uneven = np.array([4096, 1024])
    assert bc.entry_table(uneven, uneven, 1, 2)[1] == bc.MOST_CHUNKS
    assert bc.entry_table(uneven, uneven, 2, 2)[1] == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"block_n": 48},
        {"block_n": 64.0},
        {"row_panels": 0},
        {"row_panels": True},
        {"compute": "tf32"},
        {"isa": "sse9"},
    ],
)
def test_a_config_refuses_what_it_cannot_be(bad):
    with pytest.raises(SpecError):
        BackwardConfig(**{"block_n": 64, "row_panels": 4, **bad})


def test_masks_take_finer_blocks_and_notes_name_the_kernel():
    target = TARGETS[0]
    plain, masked = (bc.choose(spec_of(features=f), target) for f in (frozenset(), frozenset({Feature.MASK})))
    assert masked.block_n <= 64 <= plain.block_n
    notes = plain.notes(spec_of())
    assert "backward_avx512_f32_float32_nv4_d64" in notes[0] and "256 keys" in notes[1]
