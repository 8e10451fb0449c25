"""What of this suite runs by default on a CPU that executes shaders, as every other kernel is compiled for
seconds there; the rest is `slow`. tests/backends/webgpu has each template by itself.
"""

from __future__ import annotations

# Of these tests every case.
WHOLE: dict[str, tuple[str, ...]] = {
    "test_accuracy": ("test_row_has_its_features", "test_pinned_row_refuses"),
    "test_bugs_masks": (
        "test_B_msk_01_finite_minimum_is_not_minus_infinity",
        "test_B_msk_08_lse_of_an_empty_row",
    ),
    "test_bugs_runs": ("test_B_cpu_01_two_python_threads",),
    "test_bugs_shapes": ("test_fork_after_use",),
    "test_bugs_varlen": ("test_B_big_10_more_members_than_a_grid_has_blocks",),
    "test_decode": ("test_rows_without_keys",),
    "test_paged": ("test_pages_that_no_row_sees_are_not_looked_at",),
}
# Of these the cases whose id, without the row's name, is listed.
CASES: dict[tuple[str, str], tuple[str, ...]] = {
    ("test_accuracy", "test_workload"): (
        *("causal-float32", "window-offset-float32", "mask-dense-float32", "bias-dense-float32"),
        *("alibi-per-request-float32", "softcap-float32", "sinks-float32", "segments-causal-float32"),
        *("lens-causal-float32", "everything-float32", "everything-bfloat16"),
        *("offset-per-request-float16",),
    ),
    ("test_codes", "test_scheme"): ("int8-float32", "int4-bfloat16", "fp8-e5m2-float32", "rotated-float16"),
    ("test_codes", "test_features"): ("int8-lens", "int4-cap"),
    ("test_codes", "test_any_head_dim"): ("dims2",),
    ("test_codes", "test_hidden_codes_change_no_bit"): ("int4-token",),
    ("test_codes", "test_many_rows"): ("int8-channel",),
    ("test_codes", "test_packed_members"): ("int8-channel",),
    ("test_codes", "test_pages"): ("int8-channel",),
    ("test_codes", "test_gradients_go_straight_through"): ("int8-smooth",),
    ("test_decode", "test_workload"): (
        *("step-group-3-float32", "step-lens-rows-float16", "step-sinks-rows-bfloat16"),
        *("step-rows-5-float32", "step-mask-float32", "step-everything-float32"),
    ),
    ("test_decode", "test_infinite_values_far_below_the_maximum"): ("torch.float32",),
    ("test_decode", "test_visible_nonfinite_values"): ("torch.float32",),
    ("test_dropout", "test_dropout_joins_every_feature"): ("bias-torch.float32",),
    ("test_dropout", "test_dropout_of_packed_members"): ("torch.float32",),
    ("test_dropout", "test_the_mask_is_the_rule_s"): ("torch.float32-17",),
    ("test_memory", "test_guard_bands"): ("lens-causal-float32", "everything-bfloat16"),
    ("test_memory", "test_visible_nonfinite_scores"): ("torch.float32",),
    ("test_metamorphic", "test_M10_constant_values"): ("torch.float32",),
    ("test_paged", "test_guard_bands"): ("paged-window",),
    ("test_paged", "test_workload"): (
        *("paged-3-bfloat16", "paged-16-float32", "paged-mixed-everything-float32"),
    ),
    ("test_shapes", "test_lengths"): ("33",),
    ("test_shapes", "test_group"): ("3",),
    ("test_shapes", "test_head_dim"): ("3",),
    ("test_varlen", "test_members"): ("packed-causal-float32", "packed-everything-float32"),
    ("test_varlen", "test_gradients"): ("packed-causal-float32",),
    ("test_gradients", "test_gradients"): (
        *("mask-dense-float32", "softcap-float32"),
        *("sinks-float32", "lens-causal-float32", "dim-v-larger-bfloat16", "bias-shared-float32"),
    ),
    ("test_saturated", "test_saturated_rows"): ("torch.float32-20",),
}


def by_default(module: str, test: str, case: str) -> bool:
    return test in WHOLE.get(module, ()) or case in CASES.get((module, test), ())
