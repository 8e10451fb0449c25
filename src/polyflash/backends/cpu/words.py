"""The words that the host and the kernels share, each named once: the host fills the tuples of this page,
kernels read `args.q_row`, `tile.k` and `item.head` (structs.py).

A block is int64 words, one after the other; addresses and strides are in bytes, and an operand that is absent
has address 0. The kernel of a tile, the pass over its scores, dropout and the sum of a bias gradient are
compiled apart and meet in these blocks.
"""

from __future__ import annotations

from collections import namedtuple
from typing import TYPE_CHECKING, Any

from polyflash.backends.cpu.backward_configs import BackwardScratch
from polyflash.backends.cpu.configs import Scratch


class Layout:
    """The words of several tuples, one after the other: an attribute is the number of the word of that name.

    The words of a scratch are offsets of tiles; their names are kept apart, in `tiles`. A number among the
    parts is so many words without a name, and `more` are second names, for tiles in which a kernel keeps
    something else than the forward's."""

    if TYPE_CHECKING:

        def __getattr__(self, word: str) -> int: ...

    def __init__(self, *parts: Any, **more: str) -> None:
        self.name = "_".join(part.__name__ if isinstance(part, type) else str(part) for part in parts)
        self.tiles: dict[str, int] = {}
        self.words: list[str] = []
        for part in parts:
            names = [""] * part if isinstance(part, int) else [n for n in part._fields if n != "total"]
            named = self.tiles if part in (Scratch, BackwardScratch) else vars(self)
            for word in names:
                named[word] = len(self.words)
                self.words.append(word)
        self.tiles |= {name: self.tiles[tile] for name, tile in more.items()}

    def begins_as(self, other: Layout) -> bool:
        """Whether the words of `other` are the first of this one, too."""
        return self.words[: len(other.words)] == other.words


# Of out and lse: rows with unit stride; of lse strides are in elements.
Tensors = namedtuple(
    "Tensors",
    """
    q k v out lse
    q_batch q_head q_row q_dim
    k_batch k_head k_row k_dim
    v_batch v_head v_row v_dim
    out_batch out_head out_row lse_batch lse_head
    num_kv_heads group seqlen_q seqlen_k head_dim head_dim_v
    """,
)
# Scales are 1 where the pass has scaled. scale_log2: float32 bits of |scale|·log2(e) and, above them, of what
# they miss; scale: of |scale|; sign: the sign bit of a negative scale. score_pass: its address, or 0.
Softmax = namedtuple("Softmax", "scale_log2 scale sign left right has_offset offset sinks score_pass")
# pass_does to cap: what the pass over scores does, float32 bits of scale, of scale / softcap and of
# softcap. intervals: row block r sees interval_count pairs of int32 (start, end). members: a table of
# items, int32 (member, row, end). drop_seed: Philox's key; drop_threshold: floor(p·2^32); drop: the
# address of the stage, or 0; drop_kept: float32 bits of 1 - p (1 if p is 1). With a page table k_batch
# and v_batch lie between pages.
Operands = namedtuple(
    "Operands",
    """
    q_offset q_offset_stride kv_lens kv_lens_stride kv_starts kv_starts_stride
    pass_does pass_scale to_cap cap
    mask mask_batch mask_head mask_row mask_key
    bias bias_batch bias_head bias_row bias_key bias_kind
    slopes slopes_batch slopes_head
    q_ids q_ids_batch q_ids_row k_ids k_ids_batch k_ids_key
    intervals intervals_batch intervals_head intervals_block interval_count interval_rows
    members cu_q cu_k
    drop_seed drop_threshold drop drop_kept
    page_table page_table_batch page_table_entry page_size num_pages
    """,
)
# An item is heads x row_panels panels; the heads of a kv head are chunks items, and a row block is others
# items. zero is 0, read at run time: a fill with a known zero would become a call of memset.
Cut = namedtuple("Cut", "block_n heads chunks row_panels row_blocks others zero")

# An item: which rows of what it is, then what the pass tells of a key block.
Item = namedtuple(
    "Item",
    """
    batch head heads row panels row_end seqlen_k offset lo_shift hi_shift
    start live key first last any_seen
    """,
)
# Operands of one column of the pass, `lanes` rows of a panel: `full` squares, then `cut` ones, of which
# the end of the keys leaves `rest` keys.
Column = namedtuple(
    "Column",
    """
    scores full cut rest bias bias_row bias_kind rows slope place q_ids
    k_ids mask mask_row limits key bounded top
    """,
)

# Float32 sums of the gradients, rows with unit stride. dlse has the strides of lse; dq_part bytes lie between
# the partial sums of dQ.
Sums = namedtuple(
    "Sums",
    """
    do do_batch do_head do_row dlse
    dq dq_part dq_batch dq_head dq_row
    dk dk_batch dk_head dk_row dv dv_batch dv_head dv_row
    """,
)
# Float32 sums of the bias gradient; strides of 0 where it broadcasts, a sum per chunk if it has one key.
# add_bias: what adds a tile to it; chunk: its keys.
BiasGradient = namedtuple(
    "BiasGradient", "dbias dbias_batch dbias_head dbias_row dbias_key dbias_chunk add_bias"
)
# Which products are needed; float32 bits of the signed scale and of 1 / (1 - dropout_p).
Gradients = namedtuple("Gradients", "chunk needs grad_scale drop_scale")
# Items: entry = item // heads_here of the table (batch entry, first key, end key, partial, keys per chunk),
# kv head = first_head + item % heads_here.
Entries = namedtuple("Entries", "entries first_head heads_here")
# An item's index into the tensors, first row of a packed member, rows of dK and dV, keys, keys of a chunk.
BackwardItem = namedtuple("BackwardItem", "tensor first_q dk dv begin end chunk")

# Column sums (0: not wanted), copies of them columns_copy bytes apart; entropy and largest score (0: not
# wanted), with the strides of lse.
Statistics = namedtuple(
    "Statistics", "entries columns columns_copy columns_batch columns_head entropy max_logit"
)

# entries: rows of `Entry` for requests that differ; 0: all are alike. What each split of `heads` kv heads
# leaves lies at partials + number·heads·partial_bytes, the tiles of a split one after the other; done:
# how many splits of a tile are; 0 if all items have one head and all its keys. score_factor: what scales
# scores before the softmax (bit 32 set, float32 bits below), score_cap: what caps them (float32 bits); or
# 0. q_tile: bytes of the Q of one kv head; gathered_row: of a gathered row; zero_vectors: vectors of a
# row of zeros. row_bounds: int32 (start, end) of a query row. splits_per_item: consecutive ones, at most.
# side_by_side: whether keys are read with all heads of an item, see decode_heads.py. Scales and shifts of
# codes lie like K and V, a batch entry or page first; their channels touch.
Decode = namedtuple(
    "Decode",
    """
    split_keys first_split num_splits entries num_entries
    partials partial_bytes done score_factor score_cap
    q_tile gathered_row zero_vectors row_bounds row_bounds_row row_bounds_side
    splits_per_item side_by_side
    k_scale k_scale_batch k_scale_head k_scale_token k_shift k_shift_batch k_shift_head k_shift_token
    v_scale v_scale_batch v_scale_head v_scale_token v_shift v_shift_batch v_shift_head v_shift_token
    """,
)
Entry = namedtuple("Entry", "first_item request first_split num_splits first_partial")

# Tables of codes: scales and shifts lie like K and V, a batch entry or page first, strides in bytes; a stride
# is 0 where all tokens share one. shift_tokens: that share a shift of K. v_channels: scales of V's channels,
# or 0.
Tables = namedtuple(
    "Tables",
    """
    k_scale k_scale_batch k_scale_head k_scale_token k_shift k_shift_batch k_shift_head k_shift_token
    v_scale v_scale_batch v_scale_head v_scale_token v_channels v_channels_batch v_channels_head shift_tokens
    """,
)
# Where the tables of an item's kv head begin.
TablesItem = namedtuple("TablesItem", "k_scales v_scales k_shifts v_channel_scales")

# Values that are quantised: strides in bytes; bases of values, codes, scales and shifts, from which each
# group has distances of its own; tails: bytes from a tail of the first layer to that of this one. A group is
# `tokens` tokens in blocks that share scales; a unit is one head of `part` of its blocks, an item `units` of
# these. shared: channels that share a scale; mean: of each group and head, or 0; zero: the byte of codes that
# stand for 0. hadamard: channels that are rotated together, times `factor` (a float32). cos, sin: float32
# (new tokens, half) of rotary positions, or 0; neighbours: pairs are channels 2i and 2i + 1. The scratch has
# a block of rotated float32, and from `turned` on one of values as they came.
Quantize = namedtuple(
    "Quantize",
    """
    values tails codes scale shift
    groups num_groups heads tokens block part parts units x_head x_token channels shared mean
    codes_head codes_token table_head table_block zero
    hadamard factor cos sin half neighbours turned
    """,
)
# source: its first new value; live: tokens that it has, new ones included. tail: the address of the values
# of those before `first`, behind which the new ones are copied before all are read there; 0: it has none.
# codes, table: distances from their bases; shifts lie as scales do. kept: tokens whose codes are there, made
# without those that follow. turn: number of its first new token, for `cos`.
Group = namedtuple("Group", "source live tail first codes table kept turn")

# Of codes that become values, which lie one behind the other: a work item is `part` tokens of a head.
Values = namedtuple(
    "Values",
    """
    codes values scale shift heads tokens part parts codes_batch codes_head codes_token
    scale_batch scale_head scale_block shift_batch shift_head shift_block
    """,
)

FORWARD = Layout(Tensors, Softmax, Operands, Cut, Scratch, pages="k_ids")
BACKWARD = Layout(
    Tensors, Softmax, Operands, Cut, BackwardScratch, Sums, BiasGradient, Gradients, Entries, pages="k_ids"
)
STATISTICS = Layout(Tensors, Softmax, Operands, Cut, Scratch, Statistics, pages="k_ids", column_sums="v")
DECODE = Layout(
    *(Tensors, Softmax, Operands, Cut, Scratch, Decode),
    **{"pages": "k_ids", "k_rows": "k", "v_rows": "v", "bounds": "q_ids", "addresses": "pass_stage"},
)
K_BATCH, V_BATCH = DECODE.k_batch, DECODE.v_batch  # strides over rows and channels follow two further
ENTRY, ITEM, COLUMN = Layout(Entry), Layout(Item), Layout(Column)
BACKWARD_ITEM = Layout(Item, 20, BackwardItem)  # the column of the pass lies between
CODED = Layout(Tensors, Softmax, Operands, Cut, Scratch, Tables, pages="k_ids")
CODED_ITEM = Layout(Item, 20, TablesItem)
QUANTIZE, GROUP, VALUES = Layout(Quantize), Layout(Group), Layout(Values)

# What the pass over scores does.
DOES_MASK, DOES_BIAS, DOES_ALIBI, DOES_SOFTCAP, DOES_SEGMENTS, DOES_TINY_SCALE = 1, 2, 4, 8, 16, 32
DOES_SCALE = DOES_BIAS | DOES_ALIBI | DOES_SOFTCAP | DOES_TINY_SCALE  # scores leave the pass scaled
# What the pass is called for.
START_ITEM, START_BLOCK, CHANGE_SCORES, MARK_SEEN = range(4)
# How a key block touches a panel.
UNSEEN, CHANGED, PLAIN = range(3)
# Which gradients a call needs.
NEEDS_DQ, NEEDS_DK, NEEDS_DV, NEEDS_DBIAS = 1, 2, 4, 8
NEEDS_DS = NEEDS_DQ | NEEDS_DK | NEEDS_DBIAS
