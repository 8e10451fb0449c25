"""Sizes of Triton tiles: blocks of channels, shared memory, what fits a target. Pure arithmetic, no DSL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from polyflash.backends.triton import tables
from polyflash.backends.triton.tables import Tile
from polyflash.errors import spec_error
from polyflash.quant.scheme import codes_of
from polyflash.spec import Feature, Phase

if TYPE_CHECKING:
    from polyflash.spec import AttentionSpec
    from polyflash.target import Target

WARPGROUP_ROWS = 64  # of a matrix instruction of sm_90
LEAST = 16  # rows, keys and channels of the smallest operand of a matrix instruction
LEAST_CODED = 32  # keys or channels of one of 8 bits
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# with a plane of elements beside the scores
HEAVY = frozenset((Feature.MASK, Feature.BIAS, Feature.SEGMENTS, Feature.DROPOUT))
CHANGING = frozenset((Feature.BIAS, Feature.ALIBI, Feature.SOFTCAP))  # scores, before the softmax
HIDING = HEAVY | {  # what may hide a key from a row
    *(Feature.CAUSAL, Feature.WINDOW, Feature.KV_LENS, Feature.KV_STARTS, Feature.INTERVALS),
    *(Feature.VARLEN, Feature.PAGED, Feature.ROW_BOUNDS),
}


def split_dim(d: int, least: int = LEAST) -> tuple[int, int]:
    """A head dim as two power-of-two blocks of channels, of `least` or more; the second is 0 if one will do.
    80 is 64 + 16, so that little is computed on padding."""
    if d < 1:
        raise spec_error("head_dim", got=d, wanted="1 or more", change="Give the tensors a last dimension.")
    first = max(least, 1 << (d.bit_length() - 1))
    rest = d - first
    return first, 0 if rest <= 0 else max(least, power(rest))


def least_channels(target: Target, rows: int) -> int:
    """The fewest channels in a block that a product of `rows` rows makes. On sm_90 Triton 3.6 made wrong code
    where it was narrower than a matrix instruction is high (seen on an H200, not in the interpreter); small
    tiles use other instructions."""
    return WARPGROUP_ROWS if target.name == "cuda:sm90" and rows >= WARPGROUP_ROWS else LEAST


def channel_blocks(d: int, dv: int, least: int = LEAST, least_v: int = LEAST) -> dict[str, Any]:
    """Head dims and their blocks of channels, as kernels name them."""
    (d0, d1), (dv0, dv1) = split_dim(d, least), split_dim(dv, least_v)
    return {"D": d, "D0": d0, "D1": d1, "DV": dv, "DV0": dv0, "DV1": dv1}


def power(n: int) -> int:
    """The smallest power of two from n on, at least LEAST."""
    return max(LEAST, 1 << (n - 1).bit_length())


def channels(d: int) -> int:
    """Channels that tiles of head dim `d` hold, with padding."""
    return sum(split_dim(d))


def shared_limit(target: Target) -> int:
    """Bytes of shared memory of one program: as detected, else by architecture, else a safe least."""
    known = tables.ARCHS.get(target.arch)
    detected: int = getattr(target, "shared_bytes", 0)
    return detected or (known.shared_bytes if known else tables.SAFE_SHARED_BYTES)


def has_table(spec: AttentionSpec, target: Target) -> bool:
    """Is there an entry for the problem, so that no safe default is taken?"""
    return entry_key(spec, target) is not None


def entry_key(spec: AttentionSpec, target: Target) -> tuple[tuple[str, int], int] | None:
    arch, size = tables.ARCHS.get(target.arch), ELEMENT_BYTES.get(spec.dtype, 0)
    widest = max(spec.head_dim, spec.head_dim_v)
    head = next((c for c in tables.CLASSES if widest <= c), 0)
    return ((arch.family, size), head) if arch and size and head else None


def long_tile(spec: AttentionSpec, target: Target) -> Tile | None:
    """The tile of long problems, if this is one and they have their own; products with codes spill in it."""
    rows = spec.max_seqlen_q if Feature.VARLEN in spec.features else spec.seqlen_q
    key = entry_key(spec, target)
    if key is None or spec.features & (HEAVY | {Feature.BATCH_INVARIANT, Feature.CODES}):
        return None
    found = tables.LONG.get(key[0], {}).get((key[1], bool(spec.features & HIDING)))
    return found.tile if found and (rows or 0) >= found.rows else None


def exact_product(spec: AttentionSpec, target: Target) -> str:
    """How float32 is multiplied without losing bits."""
    arch = tables.ARCHS.get(target.arch)
    if arch is None or spec.dtype != "float32" or max(spec.head_dim, spec.head_dim_v) > tables.EXACT_DIMS:
        return "ieee"
    return tables.EXACT.get(arch.family, "ieee")


def compensates(spec: AttentionSpec, target: Target) -> bool:
    """Is what float32 loses between blocks kept?"""
    wide = max(spec.head_dim, spec.head_dim_v) > tables.UNCOMPENSATED
    return not (wide and exact_product(spec, target) != "ieee")


def holds_rows(spec: AttentionSpec, target: Target, block_m: int) -> bool:
    """Does Q stay in registers? With fewer than 64 rows there is no product of Hopper that could read it."""
    key = entry_key(spec, target)
    held = tables.HELD.get(key[0]) if key else None
    if key is None or held is None or spec.features & (HEAVY | {Feature.CODES}) or block_m < WARPGROUP_ROWS:
        return False
    triton = dict(target.packages).get("triton", "")
    if long_tile(spec, target) or (triton and not triton.startswith(tables.HELD_BY.get(key[1], ""))):
        return False
    return key[1] in (held.hiding if spec.features & HIDING else held.whole)


def defers(spec: AttentionSpec, target: Target) -> bool:
    """Are older sums scaled lazily, and rows added up late? The interpreter does both, as Hopper does."""
    key = entry_key(spec, target)
    named = target.kind == "cpu" or (key is not None and key[1] in tables.DEFERRED.get(key[0], ()))
    return named and can_scale_lazily(spec) and not spec.features & HEAVY


def can_add_late(spec: AttentionSpec) -> bool:
    """Not in float32, whose sums keep what they lose."""
    return spec.dtype != "float32"


def can_scale_lazily(spec: AttentionSpec) -> bool:
    """Nor where scores are changed, or where dropout would take weights beyond float16."""
    return can_add_late(spec) and not spec.features & (CHANGING | {Feature.DROPOUT})


def shared_bytes(tile: Tile, spec: AttentionSpec, target: Target) -> int:
    """A forward tile's shared memory, at most: Q and `num_stages` blocks of K and V; on AMD, which holds Q in
    registers and keeps one block fewer, blocks and the probabilities on their way to the second product."""
    size = ELEMENT_BYTES.get(spec.dtype, 4)
    d_k, d_v = channels(spec.head_dim), channels(spec.head_dim_v)
    q = tile.block_m * d_k * size
    one, both = tile.block_n * max(d_k, d_v) * size, tile.block_n * (d_k + d_v) * size
    held = one if tile.num_stages == 1 else both * tile.num_stages
    if target.kind != "hip":
        return q + held
    held = one if tile.num_stages == 1 else both * (tile.num_stages - 1)
    return max(q, held + tile.block_m * tile.block_n * size)


def backward_shared_bytes(tile: Tile, owns_rows: bool, spec: AttentionSpec, target: Target) -> int:
    """A backward tile's, at most: the operands of the block it owns, `num_stages` of the one it walks, and
    the weights on their way to the second product, unless that takes them from registers."""
    owned, walked = (tile.block_m, tile.block_n) if owns_rows else (tile.block_n, tile.block_m)
    in_parts = exact_product(spec, target) == "bf16x6"
    size = 6 if in_parts else ELEMENT_BYTES.get(spec.dtype, 4)
    both = channels(spec.head_dim) + channels(spec.head_dim_v)
    stay = in_parts and owned >= 16 * tile.num_warps
    scores = 0 if stay else tile.block_m * tile.block_n * size
    if target.kind == "hip":
        return max(owned * both * size // 2, walked * both * size * max(1, tile.num_stages - 1)) + scores
    return (owned + walked * tile.num_stages) * both * size + scores


def least_stages(target: Target) -> int:
    """The fewest stages of the loop over keys. Unpipelined, Triton 3.6 makes wrong code for sm_90: seen
    there."""
    return 2 if target.name == "cuda:sm90" else 1


def fitted(tile: Tile, spec: AttentionSpec, target: Target) -> Tile:
    """The tile, cut until it fits the shared memory: stages first, then keys, then rows."""
    room = shared_limit(target)
    while shared_bytes(tile, spec, target) > room:
        smaller = _smaller(tile, least_stages(target))
        if smaller == tile:
            break  # the least there is: the compiler has the last word
        tile = smaller
    return tile


def _smaller(tile: Tile, stages: int) -> Tile:
    if tile.num_stages > stages:
        return tile._replace(num_stages=tile.num_stages - 1)
    if tile.block_n > LEAST and tile.block_n * 2 > tile.block_m:
        return tile._replace(block_n=tile.block_n // 2)
    return tile._replace(block_m=max(LEAST, tile.block_m // 2))


def check_stages(target: Target, *stages: int) -> None:
    """Triton 3.6 makes wrong code for sm_90 of a loop without a pipeline whose product has less than 64
    columns: seen on an H200 (not in the interpreter), so no such kernel is started."""
    if min(stages) < least_stages(target):
        change = "Take 2 and a smaller block."
        raise spec_error("num_stages", got=min(stages), wanted=f"2 or more on {target.name}", change=change)


def check_rows(target: Target, rows: int, spec: AttentionSpec) -> None:
    """Fewer rows than LEAST are columns of turned products, which NVIDIA's kernels over codes have alone."""
    if rows < LEAST and not (spec.codes and target.kind != "hip"):
        wanted = f"{LEAST} or more here"
        raise spec_error("block_m", got=rows, wanted=wanted, change="Take explain(...).config.")


def multiplies_values(spec: AttentionSpec) -> bool:
    """Does the forward multiply codes of V as they are?"""
    return spec.phase is Phase.FORWARD and bool(spec.codes) and codes_of(spec.codes)[1] is not None


def coded_tile(spec: AttentionSpec, target: Target) -> tuple[Tile, int] | None:
    """The tile of products with codes of V, and its registers, if they have their own."""
    key = entry_key(spec, target)
    if key is None or not multiplies_values(spec) or spec.features & HEAVY:
        return None
    return tables.EIGHTS.get((*key, bool(spec.features & HIDING)))


def check_keys(keys: int) -> None:
    """A product of 8 bits with codes of V has LEAST_CODED keys or more."""
    if keys < LEAST_CODED:
        wanted = f"{LEAST_CODED} or more over codes of v"
        raise spec_error("block_n", got=keys, wanted=wanted, change="Take explain(...).config.")


def again_stages(target: Target, num_stages: int, size: int, widest: int) -> int:
    """Stages of the forward's rare second pass, whose registers count for the first. `size` is bytes of an
    element, `widest` channels of a head. At 16 bits and up to 128 channels it spills least without a
    pipeline, at others with the usual one (compiled for sm_80 to sm_120)."""
    return 1 if size == 2 and widest <= 128 and least_stages(target) == 1 else num_stages


def fitted_backward(tile: Tile, owns_rows: bool, spec: AttentionSpec, target: Target) -> Tile:
    """The tile of the dQ kernel (it owns rows) or of the dK/dV kernel, cut until it fits as `fitted` does."""
    room = shared_limit(target)
    while backward_shared_bytes(tile, owns_rows, spec, target) > room:
        smaller = _smaller(tile, least_stages(target))
        if smaller == tile:
            break
        tile = smaller
    return tile


def neighbours(tile: Tile, most_rows: int, spec: AttentionSpec, target: Target) -> Iterator[Tile]:
    """Tiles of half to twice the size that fit, of at most `most_rows` rows."""
    room = shared_limit(target)
    for m in sorted({max(LEAST, tile.block_m // 2), tile.block_m, min(most_rows, tile.block_m * 2)}):
        for n in sorted({max(LEAST, tile.block_n // 2), tile.block_n, min(128, tile.block_n * 2)}):
            for warps in (4, 8):
                for stages in range(least_stages(target), 5 if target.kind == "cuda" else 3):
                    near = Tile(m, n, warps, stages)
                    if shared_bytes(near, spec, target) <= room:
                        yield near
