"""Rows of the Triton engine. With TRITON_INTERPRET set its kernels run in Triton's interpreter, on CPU
tensors too, for those who name the backend."""

from __future__ import annotations

from polyflash import env
from polyflash.backends.triton import configs, tiles
from polyflash.capability import USUAL_FEATURES, Capability, Yield
from polyflash.spec import MOST_POSITIONS, Feature, Phase

DTYPES = frozenset({"float32", "bfloat16", "float16"})
_GPUS = ("cuda:", "hip:")
_INTERPRETED = env.TRITON_INTERPRET.is_set()  # read once, as Triton does where a kernel is decorated
_ROWS = (
    (Phase.FORWARD, USUAL_FEATURES | {Feature.DROPOUT_START, Feature.CODES}, configs.choose_forward),
    # With batch_invariant a step has the bits of the prefill: both are of the forward row, as packed calls.
    (
        Phase.DECODE,
        (USUAL_FEATURES - {Feature.DROPOUT, Feature.BATCH_INVARIANT, Feature.VARLEN}) | {Feature.CODES},
        configs.choose_decode,
    ),
    (
        Phase.BACKWARD,
        (USUAL_FEATURES - {Feature.PAGED, Feature.ROW_BOUNDS})
        | {Feature.WIDE_GRADIENTS, Feature.DROPOUT_START},
        configs.choose_backward,
    ),
    (
        Phase.STATISTICS,
        USUAL_FEATURES - {Feature.PAGED, Feature.ROW_BOUNDS, Feature.DROPOUT},
        configs.choose_statistics,
    ),
)

_REFUSES = {Phase.FORWARD: configs.refuses_products, Phase.DECODE: configs.refuses}

CAPABILITIES = tuple(
    Capability(
        backend="triton",
        phase=phase,
        module=f"polyflash.backends.triton.{phase.value}",
        targets=(*_GPUS, "cpu:") if _INTERPRETED else _GPUS,
        dtypes=DTYPES,
        max_head_dim=576,
        features=features,
        priority=50,
        choose=choose,
        tabled=tiles.has_table,
        needs=("triton",),
        max_positions=MOST_POSITIONS,
        refuses=_REFUSES.get(phase),
        yields=(
            Yield(
                "",
                DTYPES,
                frozenset(Feature),
                f"{env.TRITON_INTERPRET.name} is set, and interpreting is slow",
            ),
        )
        if _INTERPRETED
        else (),
    )
    for phase, features, choose in _ROWS
)
