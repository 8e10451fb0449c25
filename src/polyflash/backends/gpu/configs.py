"""Fields of configs that say what they may be and when another value is worth a try: the checks of a config,
what `tune` and `ablate` try, and its notes follow from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from polyflash.errors import described, spec_error

if TYPE_CHECKING:
    from polyflash.spec import AttentionSpec
    from polyflash.target import Target

CHANGE = "Take explain(...).config."
Config = TypeVar("Config")


class Option(NamedTuple):
    """Facts about a field."""

    values: tuple[Any, ...]
    wanted: str  # the values in words
    switched: tuple[Any, ...]  # what `ablate` tries, and what `tune`
    tuned: tuple[Any, ...]
    needs: Callable[[Any, Any, AttentionSpec, Target], bool]  # config, value: may it be tried?
    note: str  # of a value that is not the default


def option(
    *values: Any,
    default: Any = MISSING,
    wanted: str = "",
    switched: tuple[Any, ...] | None = None,
    tuned: tuple[Any, ...] = (),
    needs: Callable[..., bool] = lambda *_: True,
    note: str = "",
) -> Any:
    """A field of a config that has one of `values`; `ablate` tries all of them, unless told which."""
    wanted = wanted or " or ".join(map(repr, values))
    tried = values if switched is None else switched
    return field(default=default, metadata={"option": Option(values, wanted, tried, tuned, needs, note)})


def flag(
    default: bool,
    *,
    tuned: tuple[bool, ...] = (),
    needs: Callable[..., bool] = lambda *_: True,
    note: str = "",
) -> Any:
    return option(True, False, default=default, tuned=tuned, needs=needs, note=note)


def power_of_two(low: int, high: int) -> Any:
    """A size of a tile: what is tried beside it is no switch."""
    values = (n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if low <= n <= high)
    return option(*values, wanted=f"a power of two from {low} to {high}", switched=())


def check(config: Any) -> None:
    """SpecError if a field has none of its values."""
    for f in fields(config):
        value, allowed = getattr(config, f.name), f.metadata["option"]
        if allowed.values and (type(value) is not type(allowed.values[0]) or value not in allowed.values):
            raise spec_error(f.name, got=described(value), wanted=allowed.wanted, change=CHANGE)


def varied(config: Config, spec: AttentionSpec, target: Target, which: str) -> Iterator[Config]:
    """The config with one field changed at a time; `which` is "switched" or "tuned"."""
    for f in fields(config):  # type: ignore[arg-type]
        chosen, told = getattr(config, f.name), f.metadata["option"]
        for value in getattr(told, which):
            if value != chosen and told.needs(config, value, spec, target):
                yield replace(config, **{f.name: value})  # type: ignore[type-var]


def notes(config: Any) -> Iterator[str]:
    """Notes of a plan about fields that are not as usual."""
    for f in fields(config):
        if f.metadata["option"].note and getattr(config, f.name) != f.default:
            yield f.metadata["option"].note
