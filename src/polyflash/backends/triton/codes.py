"""Launch of decode over codes: `codes_kernel.attend_codes`, in the walk of the forward's launch."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from polyflash.backends.gpu.launch import splits, tile_count
from polyflash.backends.gpu.numbers import Numbers, flags_of, sizes_of
from polyflash.backends.gpu.views import element_masked, operands_of, rows_of, view_of
from polyflash.backends.triton import configs, forward, runtime, tables, tiles
from polyflash.backends.triton.codes_kernel import CodedTensors, attend_codes
from polyflash.backends.triton.constants import Constants
from polyflash.quant.scheme import Block, Codes, codes_of, per_word

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.plan import Launch
    from polyflash.spec import Arguments

PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}  # of bfloat16 that hold a value
_PTX_FLOATS = 89  # sm from which floats of 8 bits are converted by instructions


class Ready(NamedTuple):
    """State shared by calls of the same numbers."""

    constants: Constants
    compiled_in: Constants
    numbers: tuple[Any, ...]


def words(x: Tensor) -> Tensor:
    """Codes as 16-bit words; copied where they do not lie so."""
    x = x.view(torch.int8)
    odd = x.storage_offset() % 2 or any(s % 2 for s in x.stride()[:3])
    if x.stride(3) != 1 or odd or x.data_ptr() % 2:
        x = x.contiguous()
    return x.view(torch.int16)


def in_words(x: Tensor | None) -> Tensor | None:
    """A table whose entries of 16 bits begin with a word of 32; so does each of its rows, if even."""
    if x is None or x.dtype is torch.float32:
        return x
    if x.shape[3] % 2 == 0 and (x.stride(3) != 1 or any(s % 2 for s in x.stride()[:3])):
        x = x.contiguous()
    return x.clone() if x.data_ptr() % 4 else x


def _place(block: Block, block_n: int, page_size: int) -> str:
    """The place of scales of such blocks; a block of keys lies in one of them, or they are of keys."""
    if block.channels == 0:
        return "key"
    whole = block.tokens % block_n == 0 and page_size % block_n == 0
    return "channel" if block.channels == 1 and whole else "element"


def _side(name: str, codes: Codes, dim: int, block_n: int, page_size: int) -> dict[str, Any]:
    """The constants of K or V. Scales and shifts of elements go together: a tile has either both or none."""
    per = per_word(codes)
    scale, shift = _place(codes.scale, block_n, page_size), ""
    if codes.shift is not None:
        shift = _place(codes.shift, block_n, page_size)
        if "element" in (scale, shift):
            scale = shift = "element"
    side = {
        "CODES": codes.dtype,
        "PER": per,
        "WORDS": tiles.power(dim // per),
        "SCALE": scale,
        "SHIFT": shift,
    }
    side |= {"TOKENS": codes.scale.tokens, "CHANNELS": codes.scale.channels}
    if codes.shift is not None:
        side |= {"SHIFT_TOKENS": codes.shift.tokens, "SHIFT_CHANNELS": codes.shift.channels}
    return {f"{name}_{key}": value for key, value in side.items()}


class Prepared(forward.Prepared):
    """A route's memory between calls."""

    __slots__ = ("few", "long", "many", "short")

    def __init__(self, launch: Launch, programs: float = 0) -> None:
        super().__init__(launch)
        self.few: list[Launch] = []  # of few rows, fewest first
        self.short: Launch | None = None  # of few keys
        self.long: Launch | None = None  # of many, as many as these say
        self.many: tables.ManyKeys | None = None
        usual = tables.CODED_PROGRAMS[configs.scales_channels(launch.spec.codes)]
        if not programs:
            about = launch.config, launch.spec, launch.target
            self.few = [_with(launch, config, usual) for config in configs.few_coded(*about)]
            if config := configs.short_coded(*about):
                *_, some = tables.CODED_SHORT[configs.coded_kind(launch.spec, config.block_m)]
                self.short = _with(launch, config, some)
            if config := configs.long_coded(*about):
                self.many = tables.CODED_LONG[configs.long_key(launch.spec, launch.target)]
                self.long = _with(launch, config, self.many.programs)
        self.cores = int(self.cores * (programs or usual))

    def of_few(self, q: Tensor, k: Tensor, args: Arguments) -> Launch | None:
        """The launch by a tile of fewer rows that holds those of a kv head."""
        if not self.few or args.cu_seqlens_q is not None:
            return None
        rows = q.shape[2] * (q.shape[1] // k.shape[1])
        return next((launch for launch in self.few if rows <= launch.config.block_m), None)

    def is_short(self, q: Tensor, k: Tensor, args: Arguments) -> bool:
        """Are there so few blocks of keys? See `tables.CODED_SHORT`."""
        if self.short is None or args.cu_seqlens_q is not None:
            return False
        config, cores = self.short.config, self.short.prepared.cores
        *_, most, _ = tables.CODED_SHORT[configs.coded_kind(self.short.spec, config.block_m)]
        size, parts = splits(config, q, k, args, cores)
        return abs(size) <= most * config.block_n and q.shape[0] * k.shape[1] * parts <= cores

    def is_long(self, q: Tensor, k: Tensor, args: Arguments) -> bool:
        """Are there so many keys? See `tables.CODED_LONG`."""
        if self.many is None or not args.cu_seqlens_q is args.page_table is None:  # pages were not measured
            return False
        walks, cores = q.shape[0] * k.shape[1], self.target.cores
        return walks >= self.many.walks * cores or walks * k.shape[2] >= self.many.keys * cores

    def coded(self, q: Tensor, k: Tensor, out: Tensor, args: Arguments, split: bool) -> Ready:
        page_size = 0 if args.page_table is None else k.shape[2]
        changes = args.scale, args.softcap, args.dropout_p, args.window_left, args.window_right, args.offset
        masked = element_masked(args) or q.shape[2] != 1
        key = changes, args.codes, page_size, split, q.shape[3], out.shape[3], masked
        found = self.ready.get(key)
        if found is None:
            if len(self.ready) >= forward._KEPT_CALLS:
                self.ready.clear()
            made = self._coded(q, out, args, split, page_size, not masked)
            numbers = self.numbers(q, k, args, flags_of(q, args))
            found = self.ready[key] = Ready(made, runtime.compiled_in(made), numbers)  # type: ignore[assignment]
        return found  # type: ignore[return-value]

    def _coded(
        self, q: Tensor, out: Tensor, args: Arguments, split: bool, page_size: int, alone: bool
    ) -> Constants:
        block_n, sides = self.config.block_n, dict[str, Any]()
        for name, codes, x in zip("KV", codes_of(args.codes), (q, out), strict=True):
            if codes is not None:
                sides |= _side(name, codes, x.shape[3], block_n, page_size)
        turned = self.config.block_m < tiles.LEAST
        for name in "KV":
            half = turned if sides[f"{name}_CODES"] == "int8" else sides[f"{name}_PER"] == 2
            half = half and sides[f"{name}_SCALE"] == "key" and self.target.kind != "hip"
            if name == "V":  # one largest scale for all rows, so they see the same keys; sums have V's units
                half = half and alone and sides["V_SHIFT"] != "channel"
            sides[f"{name}_HALF"] = half and PARTS[q.dtype] == 1
        # Groups of 8 words of V have scales: are there pairs of them for two warps, and one row of each head?
        # Of 8 rows in one part V times its scales takes less.
        few = 4 if PARTS[q.dtype] == 1 else 8 if PARTS[q.dtype] == 2 else 0
        pairs = alone and self.config.block_m <= few and sides["V_WORDS"] >= 32
        pairs = pairs and sides["V_SCALE"] == "element" and sides["V_PER"] == 4
        sides["V_GROUPED"] = pairs and sides["V_CHANNELS"] == sides.get("V_SHIFT_CHANNELS", 32) == 32
        floats = "fp8" in sides["K_CODES"] + sides["V_CODES"]
        arch = self.target.arch.removeprefix("sm")
        ptx = self.target.kind == "cuda" and not (floats and int(arch) < _PTX_FLOATS)
        base = self._constants(q, out, args, flags_of(q, args), split)
        return base._replace(
            **sides,
            DV0=sides["V_PER"] * sides["V_WORDS"],
            DV1=0,
            PAGE=page_size if page_size & (page_size - 1) == 0 else 0,
            FUSED=False,
            COMPENSATE=False,
            ALONE=alone,
            FINITE=alone or ("fp8" not in sides["V_CODES"] and sides["V_SCALE"] != "element"),
            PARTS=PARTS[q.dtype],
            PTX=ptx,
            TURNED=turned,
        )


def _with(launch: Launch, config: Any, programs: float) -> Launch:
    """The launch by another config, of so many programs per core."""
    made = copy(launch)
    made.config = config
    made.prepared = Prepared(made, programs)
    return made


def attend_call(
    prepared: Prepared,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    args: Arguments,
    *,
    split_keys: int = 0,
    num_splits: int = 1,
) -> None:
    """Launches `attend_codes`, as `forward.attend_call` does `attend`."""
    config = prepared.config
    ready = prepared.coded(q, k, out, args, split_keys != 0)
    batch, seqlen_q, seqlen_k = sizes_of(q, k, args)
    group, num_heads = q.shape[1] // k.shape[1], k.shape[1]
    num_tiles, requests = tile_count(seqlen_q * group, config.block_m, batch, False)
    total = num_tiles * num_heads * requests * num_splits
    tables = (view_of(in_words(x)) for x in (args.k_scale, args.k_shift, args.v_scale, args.v_shift))
    x = operands_of(args, k)
    views: tuple[Any, ...] = view_of(q), view_of(words(k)), view_of(words(v)), *tables
    views += view_of(out), rows_of(lse)
    t = CodedTensors._make((*views, x, num_heads, group, None))
    n = Numbers(batch, seqlen_q, seqlen_k, num_tiles, num_splits, split_keys, total, *ready.numbers)
    key = ready.constants, runtime.signature(views), runtime.signature(x)
    arguments = t, n, ready.compiled_in
    prepared.kernels.setdefault(None, runtime.Kernels()).launch(
        attend_codes, (total,), arguments, prepared.options, key, q.device
    )


def run(
    launch: Launch, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Tensor, Tensor]:
    """The forward's run, of another config where rows or keys are few, or keys many."""
    if launch.prepared is None:
        launch.prepared = Prepared(launch)
    if few := launch.prepared.of_few(q, k, args):
        launch = few
    elif launch.prepared.is_short(q, k, args):
        launch = launch.prepared.short
    elif launch.prepared.is_long(q, k, args):
        launch = launch.prepared.long
    return forward.run(launch, q, k, v, out, lse, args, Prepared, attend_call)
