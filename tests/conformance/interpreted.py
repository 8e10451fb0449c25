"""What Triton's interpreter runs of this suite by default; the rest is `slow` there, as it takes milliseconds
per tile. tests/backends/triton/test_small_workloads.py has every feature, a quarter as long.
"""

from __future__ import annotations

# Of these tests every case.
WHOLE: dict[str, tuple[str, ...]] = {
    "test_accuracy": (
        "test_row_has_its_features",
        "test_large_scores_of_one_size",
        "test_pinned_row_refuses",
    ),
    "test_batch_invariance": ("test_the_flag_takes_no_decode_row",),
    "test_bugs_gradients": (
        "test_B_msk_05_mostly_empty_rows",
        "test_B_dim_05_B_dim_07_dim_v",
        "test_B_grad_13_fp32_is_ieee",
        "test_B_str_08_gradients_do_not_depend_on_layout",
        "test_B_grad_07_autocast",
        "test_B_grad_03_one_small_input",
        "test_B_msk_06_one_by_one",
        "test_B_grad_11_residue_of_a_constant_softmax",
        "test_B_big_12_keys_stored_by_position",
    ),
    "test_bugs_masks": (
        "test_B_msk_01_finite_minimum_is_not_minus_infinity",
        "test_B_msk_02_padding_hides_one_entry",
        "test_B_msk_06_one_by_one",
        "test_B_msk_08_lse_of_an_empty_row",
        "test_B_msk_10_live_length_below_the_rows",
        "test_B_msk_12_causal_and_mask_hide_a_row_together",
        "test_B_msk_13_B_msk_14_mask_and_causal_combine",
        "test_B_msk_19_scores_beyond_fp16",
        "test_B_msk_22_offset_keeps_earlier_keys",
        "test_B_msk_23_no_logarithm_of_zero",
        "test_B_emp_01_no_keys",
        "test_B_emp_04_zero_anywhere",
        "test_B_emp_09_no_batch_no_rows",
        "test_B_cau_06_chunk_over_a_longer_cache",
        "test_B_cau_12_alignment_by_live_length",
        "test_B_q_20_B_q_21_zero_and_negative_scale",
    ),
    "test_bugs_paged": (
        "test_B_pag_05_tables_of_another_batch",
        "test_B_pag_09_wide_metadata",
    ),
    "test_bugs_runs": (
        "test_B_big_14_strides_below_zero_and_zero",
        "test_results_round_to_nearest_even",
        "test_lists_that_overlap_are_refused",
        "test_B_msk_20_a_fall_beyond_the_exponent",
    ),
    "test_bugs_shapes": (
        "test_B_dim_01_every_channel_counts",
        "test_B_dim_06_shape_of_the_result",
        "test_B_gqa_02_B_gqa_05_kv_head_of_a_query_head",
        "test_B_gqa_07_default_scale",
        "test_B_big_01_B_big_07_row_offsets_beyond_31_bits",
        "test_B_big_02_B_big_05_batch_and_head_offsets",
        "test_B_big_12_sequence_major_cache",
        "test_B_big_06_B_big_15_mask_offsets",
        "test_B_spl_02_lse_is_natural",
        "test_B_wg_05_head_dim_above_the_bound",
    ),
    "test_bugs_varlen": (
        "test_B_emp_06_decode_with_empty_members",
        "test_B_emp_09_no_members_no_rows",
        "test_B_pag_15_bounds_are_validated",
    ),
}
# Of these the cases whose id, without the row's name, is listed.
CASES: dict[tuple[str, str], tuple[str, ...]] = {
    ("test_accuracy", "test_workload"): ("single-float32", "single-bfloat16", "single-float16"),
    ("test_decode", "test_a_softcap_that_float32_does_not_hold"): ("1-float32-5e-324", "40-float32-1e+39"),
    ("test_decode", "test_workload"): ("step-one-key-float32", "step-one-key-bfloat16"),
    ("test_decode", "test_infinite_values_far_below_the_maximum"): ("torch.float32",),
    ("test_memory", "test_guard_bands"): ("lens-causal-float32",),
    ("test_memory", "test_visible_nonfinite_scores"): ("torch.float32",),
}


def by_default(module: str, test: str, case: str) -> bool:
    return test in WHOLE.get(module, ()) or case in CASES.get((module, test), ())
