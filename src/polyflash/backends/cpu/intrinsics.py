"""Emissions as functions that numba kernels call: loads and stores of words, and the stages of a tile.

Addresses are int64 everywhere, so a kernel has no arrays, cannot raise and leaves no undefined symbol.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from polyflash.backends.cpu.simd import I8, I32, I64, POINTER, Emitter, Value


def function_in(
    module: ir.Module, name: str, arity: int, emit: Callable[..., Value | None], isa: str, returns: bool
) -> ir.Function:
    """`emit(emitter, *addresses)` as a function of its own that is never inlined: its registers are allocated
    for it alone. `name` must tell all emissions of a process apart."""
    function = module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(I64 if returns else ir.VoidType(), [I64] * arity)
        function = ir.Function(module, kind, name)
        function.linkage = "linkonce_odr"  # one copy for all callers
        function.attributes.add("noinline")
        function.attributes.add("nounwind")
        inner = ir.IRBuilder(function.append_basic_block("entry"))
        value = emit(Emitter(inner, isa), *function.args)
        inner.ret(value) if returns else inner.ret_void()
    return function


def native(
    name: str, arity: int, emit: Callable[..., Value | None], isa: str, *, returns: bool = False
) -> Any:
    """`function_in` the caller's module, as a function numba code can call with `arity` int64 arguments."""

    def call(builder: ir.IRBuilder, *args: Value) -> Value:
        return builder.call(function_in(builder.module, name, arity, emit, isa, returns), args)

    return callable_by_numba(name, arity, types.int64 if returns else types.void, call)


def emits(returns: Any) -> Callable[[Callable[..., Value | None]], Any]:
    """A decorator: this emission becomes `callable_by_numba`, and returns that numba type."""

    def decorate(emit: Callable[..., Value | None]) -> Any:
        arity = len(inspect.signature(emit).parameters) - 1
        return callable_by_numba(emit.__name__, arity, returns, emit)

    return decorate


def callable_by_numba(name: str, arity: int, returns: Any, emit: Callable[..., Value | None]) -> Any:
    """`emit(builder, *arguments)` as a function that numba code calls with `arity` int64 arguments."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[Value]) -> Value:
        value = emit(builder, *args)
        return context.get_dummy_value() if returns is types.void else value

    def definition(context: Any, *args: Any) -> tuple[Any, Any]:
        return returns(*[types.int64] * arity), codegen

    names = ["context", *(f"a{i}" for i in range(arity))]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    definition.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])  # type: ignore[attr-defined]
    definition.__name__ = definition.__qualname__ = name
    return intrinsic(definition)


Stage = tuple[str, int, Callable[..., Any], bool]  # name, number of arguments, emission, whether it returns


def stage(emission: Any) -> Any:
    """A decorator: this method of a tile emits a stage, which kernels call by its name and with its arguments
    after the emitter, all int64 (address, count or bits)."""
    emission.is_stage = True
    return emission


def emissions(tile: Any) -> Iterator[Stage]:
    """Every stage of `tile`."""
    for name, method in inspect.getmembers(tile, inspect.ismethod):
        if hasattr(method, "is_stage"):
            signature = inspect.signature(method)
            returns = signature.return_annotation in ("Value", Value)
            yield name, len(signature.parameters) - 1, method, returns


def stages(key: Any, tile: Any) -> Any:
    """The stages of `tile`, which is that of `key`, as kernels call them."""
    module = ModuleType(key.name)
    for name, arity, emit, returns in emissions(tile):
        vars(module)[name] = native(f"{key.name}_{name}", arity, emit, key.isa, returns=returns)
    return module


def namespace(*functions: Any) -> Any:
    """Functions that kernels call as `namespace.function(...)`: numba looks into modules, and into nothing
    else."""
    module = ModuleType("namespace")
    vars(module).update((function.__name__, function) for function in functions)
    return module


def merged(*namespaces: Any) -> Any:
    """One namespace of all their functions."""
    module = ModuleType("namespace")
    for each in namespaces:
        vars(module).update((n, f) for n, f in vars(each).items() if not n.startswith("__"))
    return module


def call_native(arity: int, returns: Any = types.void) -> Any:
    """(address, *arguments): calls native code compiled elsewhere, `void` or `int`, of so many int64."""
    kind = ir.FunctionType(ir.VoidType() if returns is types.void else I32, [I64] * arity)

    def call(builder: ir.IRBuilder, address: Value, *args: Value) -> Value:
        return builder.call(builder.inttoptr(address, kind.as_pointer()), args)

    return callable_by_numba(f"call_native_{arity}", arity + 1, returns, call)


def _memory(kind: ir.IntType) -> tuple[Any, Any]:
    """Scalar load (sign-extended to int64) and store (truncated) at an address."""

    @emits(types.int64)
    def load(builder: ir.IRBuilder, address: Value) -> Value:
        value = builder.load(builder.inttoptr(address, POINTER), typ=kind, align=kind.width // 8)
        return builder.sext(value, I64) if kind.width < 64 else value

    @emits(types.void)
    def store(builder: ir.IRBuilder, address: Value, word: Value) -> None:
        value = builder.trunc(word, kind) if kind.width < 64 else word
        builder.store(value, builder.inttoptr(address, POINTER), align=kind.width // 8)

    return load, store


_, store_i64 = _memory(I64)
load_i32, store_i32 = _memory(I32)
load_i8, store_i8 = _memory(I8)


@emits(types.int64)
def word(builder: ir.IRBuilder, block: Value, index: Value) -> Value:
    place = builder.gep(builder.inttoptr(block, POINTER), [index], source_etype=I64)
    return builder.load(place, typ=I64, align=8)


@emits(types.int64)
def least(builder: ir.IRBuilder, x: Value, y: Value) -> Value:
    return builder.select(builder.icmp_signed("<", x, y), x, y)


@emits(types.int64)
def quotient(builder: ir.IRBuilder, x: Value, y: Value) -> Value:
    """x // y of counts of keys, which fit 31 bits: one unsigned division of 32 bits and no look at signs."""
    return builder.zext(builder.udiv(builder.trunc(x, I32), builder.trunc(y, I32)), I64)


@emits(types.int64)
def greatest(builder: ir.IRBuilder, x: Value, y: Value) -> Value:
    return builder.select(builder.icmp_signed(">", x, y), x, y)
