"""The acceptance table of docs/resilience.md: the tests that show each row, or why there is none.

`python -m tests.resilience.rows` prints those elsewhere than here, for `make chaos`.
"""

ACCEPTANCE, SUPERVISOR = "resilience/test_acceptance.py", "resilience/test_supervisor.py"
HERE = f"{ACCEPTANCE}::test_the_run_ends_with_the_bits_of_the_undisturbed_one"
NAMED = f"{SUPERVISOR}::test_a_rank_that_fails_is_named_and_all_are_started_again"
NO_MEMORY = f"{ACCEPTANCE}::test_after_a_loss_of_everything_in_memory_the_disk_is_used"
MACHINES, NODES = "resilience/test_machines.py", "resilience/test_elastic_runs.py"
SUPERVISED, SLOTS = "resilience/test_supervised_runs.py", "resilience/test_memory_slots.py"
STORE, KILLED = "train/checkpoints/test_checkpoints_store.py", "train/checkpoints/test_checkpoints_killed.py"
DAMAGE, GUARDS = "train/checkpoints/test_checkpoints_damage.py", "train/test_train_guards.py"
MEMORY, RANKS = "train/test_train_memory.py", "train/checkpoints/test_checkpoints_ranks.py"
RESUME, DATA = "train/test_train_resume.py", "train/test_train_data.py"
ON_A_GPU = "needs a GPU"

ROWS: dict[int, list[str] | str] = {
    1: [NAMED, HERE],
    2: [f"{SUPERVISOR}::test_all_ranks_killed_at_once_are_started_again", HERE],
    3: [f"{SUPERVISOR}::test_nothing_survives_a_supervisor_that_is_killed_not_even_a_stopped_rank", NO_MEMORY],
    4: [
        NO_MEMORY,
        "resilience/test_copies.py::test_a_machine_without_memory_fetches_the_newest_step_that_all_have",
        "resilience/test_peer_runs.py::test_a_replaced_machine_continues_from_the_memory_of_the_other_or_from_the_disk",
    ],
    5: [
        f"{SUPERVISOR}::test_a_deadline_ends_in_a_save",
        f"{RESUME}::test_a_run_asked_to_stop_saves_and_says_so_and_its_rerun_ends_with_the_same_bits",
    ],
    6: [f"{ACCEPTANCE}::test_signals_during_a_save_leave_no_half_checkpoint"],
    7: [NAMED, HERE],
    8: [f"{SUPERVISED}::test_a_rank_that_skips_a_collective_is_named_and_the_run_ends_with_the_same_bits"],
    9: [NAMED, HERE],
    10: [NAMED, HERE],
    11: [f"{SUPERVISOR}::test_the_same_error_at_the_same_step_is_tried_twice_and_then_given_up"],
    12: [f"{SUPERVISOR}::test_progress_gives_the_restarts_back", HERE],
    13: [f"{SLOTS}::test_a_kill_during_the_copy_leaves_a_whole_state", HERE],
    14: [f"{KILLED}::test_a_kill_at_every_file_operation_of_a_save_leaves_old_or_new", HERE],
    15: [f"{KILLED}::test_a_kill_at_every_file_operation_of_a_save_leaves_old_or_new", HERE],
    16: ["train/checkpoints/test_checkpoints_retention.py::test_what_killed_saves_and_deletions_left_is_swept", HERE],
    17: [f"{KILLED}::test_a_power_cut_finds_nothing_renamed_that_was_not_on_the_disk_before"],
    18: [f"{DAMAGE}::test_no_flipped_byte_and_no_cut_loads_in_silence"],
    19: [
        f"{DAMAGE}::test_no_flipped_byte_and_no_cut_loads_in_silence",
        f"{SLOTS}::test_of_500_byte_flips_none_is_accepted_and_the_older_state_is_used",
        HERE,
    ],
    20: [
        f"{DAMAGE}::test_a_damaged_or_missing_file_makes_the_run_fall_back_and_is_set_aside_with_its_reason",
        f"{DAMAGE}::test_a_spoilt_hint_changes_nothing",
    ],
    21: [f"{DAMAGE}::test_when_every_checkpoint_is_damaged_the_run_stops_now_and_later"],
    22: [f"{STORE}::test_a_disk_that_fills_up_in_the_middle_of_a_save_costs_that_save_only", HERE],
    23: [f"{RANKS}::test_when_one_rank_cannot_write_all_learn_it_and_nothing_is_committed"],
    24: [f"{GUARDS}::test_a_disk_that_cannot_hold_a_checkpoint_is_noticed_before_the_first_step"],
    25: [f"{STORE}::test_a_file_larger_than_the_system_allows_costs_that_save_only", HERE],
    26: [f"{STORE}::test_the_next_save_waits_for_the_one_before", f"{STORE}::test_or_is_left_out_and_says_so", HERE],
    27: [f"{MEMORY}::test_without_room_the_disk_is_used_and_the_start_says_so"],
    # The saver is a thread, which cannot be killed alone; it can fail.
    28: [f"{STORE}::test_a_document_that_is_no_json_is_a_failed_save_and_the_next_one_works"],
    29: [f"{RANKS}::test_when_one_rank_cannot_write_all_learn_it_and_nothing_is_committed", HERE],
    30: [
        "train/test_train_exact.py::test_a_sharded_run_resumes_at_any_number_of_processes_and_micro_batch",
        f"{RANKS}::test_what_two_ranks_saved_comes_back_bit_for_bit_at_one_two_and_three",
    ],
    31: [f"{MACHINES}::test_a_machine_that_is_lost_is_left_out_and_taken_in_again_when_it_comes_back"],
    32: [
        f"{MACHINES}::test_without_machine_0_the_others_end_their_ranks_and_wait_for_it",
        f"{NODES}::test_when_machine_0_is_lost_the_other_ends_its_ranks_and_goes_on_once_it_is_back",
    ],
    33: [
        f"{STORE}::test_a_process_that_lost_the_run_commits_nothing",
        f"{NODES}::test_a_machine_that_is_cut_off_commits_nothing_and_joins_again_when_the_network_heals",
    ],
    34: [f"{RESUME}::test_a_second_process_on_the_same_run_is_refused_and_a_dead_one_holds_nothing"],
    35: [
        "train/test_two_machines.py::test_a_rank_that_does_not_come_is_named",
        f"{MACHINES}::test_machines_that_do_not_come_are_named_and_the_minimum_starts_without_them",
    ],
    36: ["train/hooks/test_stragglers.py::test_a_rank_that_is_stopped_half_of_the_time_is_named_in_the_events"],
    37: [
        "parallel/test_parallel_health.py::test_one_that_is_in_no_good_pair_is_named_whichever_it_is",
        "parallel/test_parallel_health.py::test_a_bad_machine_is_left_out_and_the_command_gets_its_name",
    ],
    38: [f"{GUARDS}::test_a_step_that_is_not_finite_changes_no_bit_of_weights_and_moments"],
    39: [f"{GUARDS}::test_a_run_over_a_poisoned_window_goes_back_leaves_it_out_and_ends_like_the_clean_one"],
    40: [f"{GUARDS}::test_a_run_that_keeps_failing_ends_with_code_12_and_weights_from_before"],
    41: [
        f"{ACCEPTANCE}::test_a_flipped_bit_of_a_weight_is_found_and_the_run_starts_again_from_its_checkpoint",
        f"{MEMORY}::test_replicas_that_differ_are_found_at_the_next_check",
        f"{MEMORY}::test_a_step_computed_twice_changes_nothing_and_a_wrong_one_is_named",
    ],
    42: [
        f"{DATA}::test_a_run_stops_at_a_damaged_shard_without_saving_and_goes_on_once_it_is_mended",
        "packed/test_packed_verify.py::test_a_missing_or_short_file_of_any_kind_is_named",
    ],
    43: [f"{DATA}::test_a_run_whose_reading_process_is_killed_goes_on_to_the_same_bits_and_writes_it_down"],
    44: [HERE],  # memory of the machine; that of a GPU: benchmarks/gpu_faults.py
    45: ON_A_GPU,  # benchmarks/gpu_faults.py, and row 46
    46: ON_A_GPU,
    47: ON_A_GPU,
    48: [
        "train/checkpoints/test_checkpoints_malice.py::test_a_pickle_in_any_file_is_refused_and_its_code_does_not_run",
        "train/checkpoints/test_checkpoints_malice.py::test_names_that_lead_elsewhere_are_refused",
    ],
    49: [
        f"{DAMAGE}::test_a_whole_checkpoint_of_another_version_stops_the_run_and_is_left_where_it_is",
        "train/test_trainer.py::test_changed_settings_are_listed_and_refused",
        f"{GUARDS}::test_data_packed_with_another_tokenizer_is_refused",
    ],
    50: [f"{SUPERVISED}::test_a_clock_that_jumps_is_no_hang"],
    51: [
        "train/test_trainer.py::test_metrics_that_cannot_be_written_do_not_stop_the_run_and_are_reported_at_its_end",
        "track/test_writer.py::test_a_disk_that_stays_full_raises_nothing_and_the_loss_is_counted",
    ],
    52: ["resilience/test_soak.py::test_random_faults_leave_the_bits_of_the_undisturbed_run"],
}  # row -> its tests, or why there is none

if __name__ == "__main__":
    named = {test for tests in ROWS.values() if isinstance(tests, list) for test in tests}
    print(*sorted(f"tests/{test}" for test in named if not test.startswith("resilience/")))  # that folder runs anyway
