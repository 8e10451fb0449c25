"""Rows of the Metal engine, for tensors on Apple GPUs (torch's device type mps). They run calls that name
them: no Mac has run them yet, and the torch rows keep the free choice until one has."""

from __future__ import annotations

from polyflash.backends.metal import configs
from polyflash.capability import Capability, Yield
from polyflash.spec import MOST_POSITIONS, Feature, Phase

_F = Feature
DTYPES = frozenset({"float32", "bfloat16", "float16"})
UNPROVEN = "no Mac has run it yet (`make bench-metal` does); backend='metal' takes it"
FEATURES = frozenset(
    {
        *(_F.CAUSAL, _F.WINDOW, _F.Q_OFFSET, _F.KV_LENS, _F.KV_STARTS, _F.MASK, _F.BIAS, _F.ALIBI),
        *(_F.SOFTCAP, _F.SINKS, _F.GQA, _F.HEAD_DIM_V, _F.LSE, _F.BATCH_INVARIANT, _F.SEGMENTS, _F.VARLEN),
        _F.DROPOUT,
    }
)
READ = frozenset({_F.CODES, _F.PAGED})  # by kernels without gradients
_ROWS = (
    (Phase.FORWARD, FEATURES | READ, configs.MOST_CHANNELS, configs.choose_forward),
    (
        Phase.DECODE,
        (FEATURES | READ) - {_F.BATCH_INVARIANT, _F.VARLEN, _F.DROPOUT},
        configs.MOST_CHANNELS,
        configs.choose_decode,
    ),
    (Phase.BACKWARD, FEATURES, configs.MOST_BACKWARD_CHANNELS, configs.choose_backward),
)

CAPABILITIES = tuple(
    Capability(
        backend="metal",
        phase=phase,
        module=f"polyflash.backends.metal.{phase.value}",
        targets=("metal:",),
        dtypes=DTYPES,
        max_head_dim=most,
        features=features,
        priority=50,
        choose=choose,
        refuses=configs.refuses,
        yields=(Yield("", DTYPES, FEATURES | READ, UNPROVEN),),
        max_positions=MOST_POSITIONS,
    )
    for phase, features, most, choose in _ROWS
)
