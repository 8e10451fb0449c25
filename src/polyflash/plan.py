"""Kernel selection: which kernel runs a spec, with which config, and why.

Pure: the table and the target are arguments.

`select()` makes no strings and sits on the path of a call; `explain()` reruns it with one verdict per row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import Any

from polyflash.capability import Capability
from polyflash.errors import UnsupportedError, spec_error
from polyflash.spec import AttentionSpec, Feature, Phase, mean_sizes
from polyflash.target import Target
from polyflash.tuning import store
from polyflash.work import Work, work_of

_KEPT_SIZES = 256  # per route


@dataclass(slots=True)
class Launch:
    """A chosen row with its config: what `run` of a backend receives. `prepared` is the backend's own slot,
    filled at the first call of a route and kept with it (a loaded kernel, an argument block)."""

    row: Capability
    config: Any
    rung: str
    target: Target
    spec: AttentionSpec
    run: Any = None  # the module's `run`, imported when the route is made
    tally: Any = None  # counts its calls
    contents: bool = True  # have its calls operands whose values say which memory is read?
    prepared: Any = None
    again: Any = None  # the gradients of a call like one of the last, or None, if its row has a short way
    backward: Launch | None = None  # of the gradients, planned at the first call that needs them
    instead: Launch | None = None  # of calls of its route that its row leaves by their sizes
    by_sizes: dict[Any, Launch] | None = None  # of calls of its route; None: all are this one's

    def of_sizes(
        self, batch: int, seqlen_q: int, seqlen_k: int, members: int = 0, longest: int | None = None
    ) -> Launch:
        """The launch that runs a call of these sizes, totals of so many members if it is packed."""
        if self.by_sizes is None:
            return self
        key = batch, seqlen_q, seqlen_k, members, longest
        found = self.by_sizes.get(key)
        if found is None:
            if len(self.by_sizes) >= _KEPT_SIZES:
                for old in list(self.by_sizes)[:1]:  # another thread may change it meanwhile
                    self.by_sizes.pop(old, None)
            found = self.by_sizes[key] = self._find(mean_sizes(batch, members, seqlen_q, seqlen_k, longest))
        return found

    def _find(self, sizes: tuple[int, int, int]) -> Launch:
        row, spec = self.row, self.spec
        if self.instead and row.leaves_sizes and row.leaves_sizes(spec, self.target, sizes):
            return self.instead
        if row.by_sizes is None or not row.by_sizes(spec) or self.rung in ("explicit", "tuned"):
            return self
        exact = replace(spec, batch=sizes[0], seqlen_q=sizes[1], seqlen_k=sizes[2])
        config = row.choose(exact, self.target)
        known = (made for made in (self, *list((self.by_sizes or {}).values())) if made.config == config)
        fresh: dict[str, Any] = dict.fromkeys(("prepared", "backward", "instead", "by_sizes"))
        return next(known, None) or replace(self, config=config, **fresh)


@dataclass(frozen=True, slots=True)
class Verdict:
    row: Capability
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The result of `explain()`: the chosen row, its config and where that came from, a verdict per row."""

    spec: AttentionSpec
    target: Target
    chosen: Capability | None
    config: Any
    rung: str
    verdicts: tuple[Verdict, ...]
    work: Work
    notes: tuple[str, ...] = field(default=())
    backward: Plan | None = None  # of the gradients, if an input needs one

    @property
    def backend(self) -> str | None:
        return self.chosen.backend if self.chosen else None

    def __str__(self) -> str:
        s = self.spec
        kind = "causal" if s.causal else "full"
        packed = Feature.VARLEN in s.features
        batch, lengths = (f"members={s.members}", "total") if packed else (f"batch={s.batch}", "seqlen")
        decode = " decode" if s.phase is Phase.DECODE else ""
        paged = f" page_size={s.page_size}" if s.page_size else ""
        lines = [
            f"attention{decode} {kind} {s.dtype} {batch} heads={s.num_q_heads}/{s.num_kv_heads}"
            f" {lengths}={s.seqlen_q}x{s.seqlen_k}{paged} head_dim={s.head_dim}/{s.head_dim_v}"
            f" on {self.target}",
            f"  needs: {', '.join(sorted(f.value for f in s.features)) or 'no features'}",
            f"  work: {'at most ' if packed or paged else ''}{self.work.flops / 1e9:.3g} GFLOP,"
            f" {self.work.bytes / 1e6:.3g} MB",
        ]
        for v in self.verdicts:
            mark = f"chosen [{self.rung}] {self.config}"
            if v.row is not self.chosen:
                mark = "refused" if v.reasons else f"could run, priority {v.row.priority}"
            lines.append(f"  {v.row.name:<16} {mark}")
            lines.extend(f"    - {reason}" for reason in v.reasons)
        lines.extend(f"  note: {note}" for note in self.notes)
        if self.backward is not None:
            lines.extend(("gradients:", str(self.backward)))
        return "\n".join(lines)


def select(
    spec: AttentionSpec, target: Target, table: Sequence[Capability], *, backend: str, config: str
) -> Launch:
    """The row that runs `spec`: the requested one or nothing; without a request, the first that accepts, or
    that the explicit config belongs to."""
    rows = candidates(table, spec, backend)
    accepting = [row for row in rows if row.accepts(spec, target, by_name=bool(backend))]
    if not accepting:
        raise unsupported(spec, target, table, backend)
    row = _first_of(accepting, spec, target, config)
    chosen, rung, _ = choose_config(row, spec, target, config)
    launch = Launch(row, chosen, rung, target, seen_by(row, spec))
    if row.leaves_sizes is not None and not (backend or config):
        others = [other for other in table if other is not row]
        launch.instead = select(spec, target, others, backend="", config="")
    sized = row.by_sizes is not None and row.by_sizes(launch.spec)
    launch.by_sizes = {} if launch.instead or sized else None
    return launch


def candidates(table: Sequence[Capability], spec: AttentionSpec, backend: str) -> list[Capability]:
    """Rows that serve the spec's phase, best first, those of the very phase before others; those of `backend`
    alone if it is named."""
    rows = [row for row in table if row.serves(spec.phase) and backend in ("", row.backend)]
    return sorted(rows, key=lambda row: (row.phase is not spec.phase, -row.priority))


def _first_of(rows: Sequence[Capability], spec: AttentionSpec, target: Target, config: str) -> Capability:
    """The first row; with an explicit config the first whose config is of that kind, if one is."""
    if not config:
        return rows[0]
    kind = json.loads(config)["kind"]
    return next((row for row in rows if _kind(row.choose(seen_by(row, spec), target)) == kind), rows[0])


def seen_by(row: Capability, spec: AttentionSpec) -> AttentionSpec:
    """The spec as one of the row's own phase."""
    return spec if spec.phase is row.phase else replace(spec, phase=row.phase)


def choose_config(row: Capability, spec: AttentionSpec, target: Target, config: str) -> tuple[Any, str, str]:
    """The ladder: explicit, then the tuned file of the device, then the row's own choice: out of its table,
    by the safe default where it has no table for the target, or by a rule. Returns the config, the rung it
    came from, and why a tuned file was not used although there is one."""
    spec = seen_by(row, spec)
    default = row.choose(spec, target)
    if config:
        values = json.loads(config)
        kind = values.pop("kind")
        if kind != _kind(default):
            change = "Take one from explain(...).config, and name its backend."
            raise spec_error("config", kind, _kind(default), change)
        return type(default)(**values), "explicit", ""
    tuned, why = store.find(row, spec, target, type(default))
    if tuned is not None:
        return tuned, "tuned", ""
    if row.tabled is None:
        return default, "heuristic", why
    return default, "table" if row.tabled(spec, target) else "safe default", why


def encode_config(config: Any) -> str:
    """A config as text, so that it passes through the op, whose arguments are primitives."""
    if not is_dataclass(config) or isinstance(config, (type, Plan)):
        change = "Take one from explain(...).config."
        raise spec_error("config", type(config).__name__, "a backend's Config", change)
    return json.dumps({"kind": _kind(config), **asdict(config)}, sort_keys=True)


def _kind(config: Any) -> str:
    return store.kind_of(type(config))


def unsupported(
    spec: AttentionSpec, target: Target, table: Sequence[Capability], backend: str
) -> UnsupportedError:
    """The refusal of every candidate, worded by the rows themselves."""
    rows = candidates(table, spec, backend)
    reasons = tuple((row.name, row.reasons_against(spec, target, by_name=bool(backend))) for row in rows)
    asked = f"backend {backend!r}" if backend else "any backend"
    lines = [f"no {spec.phase.value} kernel of {asked} runs this call on {target.name}:"]
    lines += [f"  {name}: {'; '.join(why)}" for name, why in reasons] or ["  there is no such row"]
    lines.append("Drop the feature, change the dtype, or leave backend=None to let polyflash choose.")
    return UnsupportedError("\n".join(lines), reasons)


def explain(
    spec: AttentionSpec, target: Target, table: Sequence[Capability], *, backend: str = "", config: str = ""
) -> Plan:
    """The choice of `select()`, with a verdict per row; launches nothing, never raises for a refusal."""
    rows = candidates(table, spec, "")
    verdicts = []
    for row in rows:
        reasons = row.reasons_against(spec, target, by_name=backend == row.backend)
        if backend and row.backend != backend:
            reasons = (f"backend: {backend} was asked for by name", *reasons)
        if row.leaves_sizes is not None and not (backend or config or reasons):
            sizes = mean_sizes(spec.batch, spec.members, spec.seqlen_q, spec.seqlen_k, spec.max_seqlen_k)
            why = row.leaves_sizes(spec, target, sizes)
            reasons = (f"yields: {why}",) if why else ()
        verdicts.append(Verdict(row, reasons))
    accepting = [v.row for v in verdicts if not v.reasons]
    chosen = _first_of(accepting, spec, target, config) if accepting else None
    picked, rung, why = None, "none", ""
    if chosen:
        picked, rung, why = choose_config(chosen, spec, target, config)
    notes = tuple(picked.notes(seen_by(chosen, spec))) if chosen and picked else ()
    if why:
        notes = (*notes, why)
    if Feature.VARLEN in spec.features:
        notes = (*notes, "packed: cu_seqlens are not read, so the work is that of the longest members")
    if Feature.PAGED in spec.features:
        notes = (*notes, "paged: kv_lens are not read, so the work is that of full rows of the page table")
    return Plan(spec, target, chosen, picked, rung, tuple(verdicts), work_of(spec), notes)
