"""The bugs that `tests.mutations` plants: the kind that a tired engineer makes, over the whole project.

`old` is as short as it can be and still stands in its file once, so that changes around it leave it alone.
Where the code moves on, its mutant goes with it: a planted bug is about a rule, not about a line.
"""

from __future__ import annotations

from tests.drawn_mutants import DRAWN
from tests.mutations import Mutant

_SURVIVORS = (  # of a review of 49 planted bugs
    Mutant(
        "a stream that goes on draws with another seed",
        "backend/quire/triton/sending/generation.py",
        "seed=choices[0].seed, prompt_logprobs=None",
        "prompt_logprobs=None",
        ("tests/triton/test_continuation.py::test_a_request_without_a_seed_goes_on_with_its_own",),
    ),
    Mutant(
        "what goes on stands behind what came later",
        "backend/quire/core/policies/queue.py",
        "number += (int(request.arrival_time * 1e6) << 20) - (1 << 90)",
        "pass",
        (
            "tests/triton/test_continuation.py"
            "::test_places_in_the_queue_survive_and_no_limit_refuses_what_was_admitted",
        ),
    ),
    Mutant(
        "whoever was in a fatal step twice is the killer",
        "backend/quire/triton/sending/generation.py",
        "if is_suspect and suspects.is_alone else 0",
        "if is_suspect else 0",
        (
            "tests/triton/test_continuation.py"
            "::test_a_request_that_kills_engines_ends_and_no_other[kind0-9-1]",
        ),
    ),
    Mutant(
        "an idle engine that does not look at messages is healthy",
        "backend/quire/engine/link.py",
        "self._sent_at > beat and self._watchdog_s",
        "False",
        (
            "tests/triton/test_watchdog.py"
            "::test_an_idle_engine_is_healthy_until_it_does_not_look_at_a_message",
        ),
    ),
    Mutant(
        "an image is told by its first row",
        "backend/quire/request/multimodal.py",
        "np.ascontiguousarray(embeds[first_row : first_row + length])",
        "np.ascontiguousarray(embeds[first_row : first_row + 1])",
        ("tests/unit/test_shared_array.py::test_an_image_is_told_by_all_of_its_rows_and_by_no_others",),
    ),
    Mutant(
        "async_scheduling never expires a deadline",
        "backend/quire/engine/core.py",
        "outputs = self.scheduler.expire()",
        "outputs = [] if self.executor.depth > 1 else self.scheduler.expire()",
        ("tests/unit/test_async_scheduling.py::test_a_deadline_ends_its_request_alone",),
    ),
    Mutant(
        "choices after the first have no deadline",
        "backend/quire/core/roster.py",
        "self._deadlines.push(child)\n",
        "\n",
        ("tests/unit/test_choices.py::test_choices_that_outlive_the_first_keep_the_deadline",),
    ),
    Mutant(
        "sessions of two tenants share a name",
        "backend/quire/core/roster.py",
        'return f"session {tenant}/{session}" if tenant else f"session {session}"',
        'return f"session {session}"',
        ("tests/unit/test_prefix_cache.py::test_no_two_tenants_and_sessions_have_one_pin",),
    ),
    Mutant(
        "a refusal looks at all that wait",
        "backend/quire/core/scheduler.py",
        "        if not request.num_deaths:\n            self._admission.check(",
        "        for one in roster.requests.values():\n            assert one is not request\n"
        "        if not request.num_deaths:\n            self._admission.check(",
        ("tests/unit/test_overload.py::test_a_refusal_costs_the_same_however_many_wait",),
    ),
    Mutant(
        "a cache reset leaves the tiers full",
        "backend/quire/core/scheduler.py",
        "count += self.transfers.tiers.clear()",
        "pass",
        ("tests/unit/test_engine.py::test_a_reset_leaves_nothing_in_any_tier",),
    ),
    Mutant(
        "the quantisation of weights is missing from the fingerprint",
        "backend/quire/kv_tiers/fingerprint.py",
        '"num_threads", "seed", "tokenizer",\n',
        '"num_threads", "quantization", "seed", "tokenizer",\n',
        (
            "tests/unit/test_kv_tiers_fingerprint.py"
            "::test_a_key_finds_blocks_only_where_they_are_what_it_would_compute[quantization]",
        ),
    ),
    Mutant(
        "no BlockRemoved when a time to live ends",
        "backend/quire/core/block_pool.py",
        "                self.forget((block_id,))\n",
        "                on_evict, self.on_evict = self.on_evict, None\n"
        "                self.forget((block_id,))\n"
        "                self.on_evict = on_evict\n",
        ("tests/unit/test_prefix_cache.py::test_blocks_whose_time_is_over_are_told_as_removed",),
    ),
    Mutant(
        "the predicted time to first token ignores prompts being computed",
        "backend/quire/core/scheduler.py",
        "roster.num_prompt_tokens_left if self._admission.predicts(request) else 0",
        "0",
        (
            "tests/unit/test_policies_admission.py"
            "::test_prompts_that_are_being_computed_are_ahead_of_a_new_one",
        ),
    ),
    Mutant(
        "a dead engine is an internal error",
        "backend/quire/triton/sending/continuation.py",
        'self._ends.fail(handle, f"{DIED}: {reason}", "UNAVAILABLE")',
        'self._ends.fail(handle, f"{DIED}: {reason}", "INTERNAL")',
        ("tests/triton/test_responder.py::test_an_engine_that_dies_is_unavailable_and_the_next_one_serves",),
    ),
    Mutant(
        "an engine that dies pauses the streams of all engines",
        "backend/quire/triton/sending/continuation.py",
        "self._requests.generations.items() if request_id in request_ids]",
        "self._requests.generations.items() if request_ids is not None]",
        ("tests/triton/test_several_engines.py::test_streams_of_the_other_engine_never_pause",),
    ),
    Mutant(
        "a new request goes to an engine that is gone",
        "backend/quire/engine/client.py",
        "(not link.is_up, len(self._requests[link]))",
        "len(self._requests[link])",
        (
            "tests/triton/test_several_engines.py"
            "::test_an_engine_that_is_gone_for_ever_takes_its_own_streams_along",
        ),
    ),
    Mutant(
        "a request that has ended stays with its engine",
        "backend/quire/engine/client.py",
        "            request_ids.discard(request_id)",
        "            pass",
        ("tests/triton/test_several_engines.py::test_requests_go_to_the_engine_with_the_fewest_open_ones",),
    ),
    Mutant(
        "a command is answered by the first engine alone",
        "backend/quire/engine/client.py",
        "        if len(results) < len(self.results):\n",
        "        if not results:\n",
        (
            "tests/triton/test_several_engines.py"
            "::test_a_cancellation_by_name_finds_its_requests_wherever_they_are",
        ),
    ),
    Mutant(
        "a nucleus of exactly p takes one token more",
        "kernels/quire_kernels/reference/sampling.py",
        "(top_probs.double().cumsum(dim=-1) < wanted[:, None])",
        "(top_probs.double().cumsum(dim=-1) <= wanted[:, None])",
        ("tests/unit/test_sampler.py::test_a_nucleus_whose_mass_is_exactly_p_is_complete",),
    ),
)

_POOL = (
    Mutant(
        "a shared block keeps its deadline",
        "backend/quire/core/block_pool.py",
        "self.num_cached -= 1\n                self._deadlines.pop(block_id, None)",
        "self.num_cached -= 1",
        ("tests/unit/test_block_pool.py::test_a_block_that_is_used_again_does_not_end_at_its_old_time",),
    ),
    Mutant(
        "a lower retention replaces a higher one",
        "backend/quire/core/block_pool.py",
        "if retention > self._retentions[found] and",
        "if retention < self._retentions[found] and",
        ("tests/unit/test_block_pool.py",),
    ),
    Mutant(
        "a prompt of full blocks is shared with its last token",
        "backend/quire/core/request.py",
        "count = len(self.token_ids) - 1",
        "count = len(self.token_ids)",
        ("tests/unit/test_prefix_cache.py::test_the_same_prompt_again_computes_one_block_at_most",),
    ),
    Mutant(
        "prompts whose logits are wanted are taken from the cache",
        "backend/quire/core/request.py",
        "return count if self.prompt_logprobs is None else",
        "return count if True else",
        ("tests/unit/test_logprobs.py::test_equal_to_transformers_chunked_and_with_prefix_hits",),
    ),
    Mutant(
        "a session that is used stays the next to give way",
        "backend/quire/core/pins.py",
        "pin = self._pins.pop(name, None)\n        if pin is not None:\n            pin.deadline",
        "pin = self._pins.get(name)\n        if pin is not None:\n            pin.deadline",
        ("tests/unit/test_prefix_cache.py::test_a_pin_that_is_used_is_the_last_to_give_way",),
    ),
    Mutant(
        "a request's own time to live is ignored",
        "backend/quire/core/kv_cache_manager.py",
        "ttl = scheduling.cache_ttl_s if scheduling.cache_ttl_s is not None else self.cache_ttl_s or None",
        "ttl = self.cache_ttl_s or None",
        ("tests/unit/test_prefix_cache.py::test_time_to_live_of_blocks_and_pins",),
    ),
    Mutant(
        "a block leaves its window one token early",
        "backend/quire/core/kv_cache_manager.py",
        "window + 1) // self.block_size\n            first = table.released",
        "window + 2) // self.block_size\n            first = table.released",
        (
            "tests/unit/test_sliding_window_blocks.py"
            "::test_a_block_stays_until_the_last_token_that_sees_it_is_computed",
        ),
    ),
    Mutant(
        "a fork of several groups copies the first one's block",
        "backend/quire/core/kv_cache_manager.py",
        "copies.append((source.blocks[group][count], taken[group]))",
        "copies.append((source.blocks[0][count], taken[group]))",
        ("tests/unit/test_choices.py::test_each_group_of_layers_has_a_copy_of_its_own",),
    ),
    Mutant(
        "a block of a windowed group is told to routers as another",
        "backend/quire/core/kv_cache_manager.py",
        "self.events is not None and len(key) == 16:",
        "self.events is not None:",
        ("tests/unit/test_kv_events.py::test_blocks_of_other_groups_are_nobodys_business",),
    ),
    Mutant(
        "groups of windows need a block less than they hold",
        "backend/quire/models/kv_groups.py",
        "math.ceil(positions / block_size) + 1)",
        "math.ceil(positions / block_size))",
        ("tests/unit/test_kv_groups.py::test_no_sequence_needs_more_blocks_than_stated",),
    ),
)

_STATES = (
    Mutant(
        "a prefix is found where there is no snapshot",
        "backend/quire/models/kv_groups.py",
        "STATE_WINDOW = 2\n",
        "STATE_WINDOW = 1\n",
        ("tests/unit/test_state_groups.py::test_attention_without_a_snapshot_is_no_hit",),
    ),
    Mutant(
        "linear attention begins with what its block held",
        "kernels/quire_kernels/cpu/src/gated_delta.h",
        "  if (begins(batch, i) && begin == batch.query_start_loc[i]) {",
        "  if (false) {",
        ("tests/kernels/test_gated_delta.py::test_each_row_goes_on_from_its_state",),
    ),
    Mutant(
        "Mamba-2 begins with what its block held",
        "kernels/quire_kernels/cpu/src/mamba.h",
        "  if (delta::begins(batch, i))\n    for (int r = 0;",
        "  if (false)\n    for (int r = 0;",
        ("tests/kernels/test_mamba.py::test_each_row_goes_on_from_its_state",),
    ),
    Mutant(
        "a short convolution forgets its inputs",
        "backend/quire/layers/short_conv.py",
        ".view(x.dtype)\n",
        ".view(x.dtype).clone()\n",
        ("tests/unit/test_models.py::test_greedy_output_equals_transformers",),
    ),
    Mutant(
        "the convolution before linear attention forgets its inputs",
        "backend/quire/layers/gated_delta.py",
        "states, inputs = memory[:, : shape.rule_bytes], memory[:, shape.rule_bytes : end]",
        "states, inputs = memory[:, : shape.rule_bytes], memory[:, shape.rule_bytes : end].clone()",
        ("tests/unit/test_qwen3_next.py::test_a_turn_computes_its_new_tokens_and_at_most_a_block",),
    ),
    Mutant(
        "a snapshot is of the block before",
        "backend/quire/core/kv_cache_manager.py",
        "index = len(blocks) - 1",
        "index = len(blocks) - 2",
        ("tests/unit/test_state_groups.py::test_a_prefix_is_found_where_there_is_a_snapshot",),
    ),
    Mutant(
        "a request writes on into the snapshot that others find",
        "backend/quire/core/kv_cache_manager.py",
        "        if request.num_computed_tokens % self.block_size == 0:\n            missing +=",
        "        if request.num_computed_tokens == 0:\n            missing +=",
        ("tests/unit/test_state_groups.py::test_a_snapshot_is_shared_in_the_step_that_leaves_it",),
    ),
    Mutant(
        "a state may be found in the step that computes it",
        "backend/quire/core/kv_cache_manager.py",
        "if is_over and num_computed",
        "if num_computed",
        ("tests/unit/test_state_groups.py::test_a_snapshot_is_not_found_in_the_step_that_computes_it",),
    ),
    Mutant(
        "choices begin with a state that is a token ahead of them",
        "backend/quire/core/planner.py",
        "(request.num_pending_tokens > 1 or self._kv.num_state_groups)",
        "request.num_pending_tokens > 1",
        ("tests/unit/test_state_groups.py::test_choices_begin_with_copies_of_the_state",),
    ),
    Mutant(
        "prompts pass the border at which others would find them",
        "backend/quire/core/kv_cache_manager.py",
        "return last - begin if last > begin else num_new_tokens",
        "return num_new_tokens",
        ("tests/unit/test_state_groups.py::test_a_prefix_is_found_where_there_is_a_snapshot",),
    ),
    Mutant(
        "what a failed row's next row has offered stays findable",
        "backend/quire/core/scheduler.py",
        "                if other is request:\n",
        "                if False:\n",
        (
            "tests/unit/test_state_groups.py"
            "::test_the_state_of_a_failed_row_is_forgotten_with_what_the_next_row_offered",
        ),
    ),
    Mutant(
        "a beam that waits is swapped with one token less than its state has",
        "backend/quire/core/roster.py",
        "        if request.drafter is not None:\n",
        "        if True:\n",
        (
            "tests/unit/test_state_groups.py"
            "::test_a_beam_that_waits_for_another_is_swapped_with_the_state_it_has",
        ),
    ),
)

_SCHEDULER = (
    Mutant(
        "several choices join where there is one seat",
        "backend/quire/core/planner.py",
        "if request.num_sequences > roster.num_free_seats:\n                    self.admission_blocked_by",
        "if roster.num_free_seats < 1:\n                    self.admission_blocked_by",
        ("tests/unit/test_choices.py::test_choices_survive_preemption_chunks_and_a_tiny_pool",),
    ),
    Mutant(
        "a copy into blocks that were given up is still made",
        "backend/quire/core/roster.py",
        "self._copies = [pair for pair in self._copies if pair[1] not in own]",
        "pass",
        ("tests/unit/test_choices.py::test_choices_that_end_with_their_first_token_copy_nothing",),
    ),
    Mutant(
        "a prompt takes the room of those that decode behind it",
        "backend/quire/core/planner.py",
        "count = min(count, step.budget - num_behind)",
        "count = min(count, step.budget)",
        (
            "tests/unit/test_priority_and_fairness.py"
            "::test_a_prompt_that_joins_late_at_an_early_rank_does_not_stall_who_decodes",
        ),
    ),
    Mutant(
        "one long prompt too many",
        "backend/quire/core/planner.py",
        "return under_way >= most",
        "return under_way > most",
        ("tests/unit/test_priority_and_fairness.py::test_short_prompts_overtake_a_4k_prompt",),
    ),
    Mutant(
        "what a failed row was to fill stays findable",
        "backend/quire/core/scheduler.py",
        "        self.kv.uncache_from(request, row.num_computed_tokens)",
        "        pass",
        ("tests/unit/test_failed_steps.py::test_nobody_finds_what_a_row_without_finite_logits_has_filled",),
    ),
    Mutant(
        "what a failed step was to fill stays findable",
        "backend/quire/core/scheduler.py",
        "                self.kv.uncache(newly_cached)\n                if not",
        "                if not",
        (
            "tests/unit/test_failed_steps.py"
            "::test_nobody_finds_what_a_failed_step_was_to_compute_of_a_request_cancelled_meanwhile",
        ),
    ),
    Mutant(
        "a request without a row goes on from what a failed step was to fill",
        "backend/quire/core/scheduler.py",
        "        self.roster.restart()\n",
        "",
        ("tests/unit/test_failed_steps.py::test_copies_of_a_failed_step_are_not_trusted",),
    ),
    Mutant(
        "a request that gives way loses its place",
        "backend/quire/core/policies/queue.py",
        "if request.rank[1] == 0:",
        "if request.rank[1] >= 0:",
        ("tests/unit/test_scheduler.py::test_preemption_takes_the_youngest_and_puts_it_first_in_the_queue",),
    ),
    Mutant(
        "a tenant that was idle saves its share up",
        "backend/quire/core/policies/queue.py",
        "account.counter = max(account.counter, reference.counter)",
        "pass",
        ("tests/unit/test_policies_queue.py::test_idling_saves_nothing_up",),
    ),
    Mutant(
        "what a queued request has now is taken off, not what it had",
        "backend/quire/core/policies/queue.py",
        "count[1] -= num_tokens",
        "count[1] -= request.num_tokens",
        (
            "tests/unit/test_policies_queue.py"
            "::test_a_token_that_comes_while_a_request_waits_does_not_upset_the_counts",
        ),
    ),
    Mutant(
        "a tenant runs one request more than its cap",
        "backend/quire/core/policies/tenants.py",
        ".num_running < limits.max_running",
        ".num_running <= limits.max_running",
        ("tests/unit/test_policies_tenants.py::test_caps_on_running_and_waiting_requests",),
    ),
    Mutant(
        "a quota is refilled twice for the same seconds",
        "backend/quire/core/policies/tenants.py",
        "        account.time = now\n",
        "",
        ("tests/unit/test_policies_tenants.py::test_over_quota_is_unavailable_until_the_time_that_is_named",),
    ),
    Mutant(
        "the request itself needs no seat",
        "backend/quire/core/policies/admission.py",
        "num_departures = num_waiting + 1 - max(0, num_free_seats)",
        "num_departures = num_waiting - max(0, num_free_seats)",
        ("tests/unit/test_policies_admission.py::test_the_wait_for_a_seat_follows_the_rate_of_departures",),
    ),
    Mutant(
        "a deadline of the first token ends who has one",
        "backend/quire/core/policies/admission.py",
        'and not (which == "ttft_deadline" and request.num_output_tokens)',
        "",
        (
            "tests/unit/test_policies_admission.py"
            "::test_expired_requests_are_told_once_and_with_the_deadline_that_passed",
        ),
    ),
    Mutant(
        "the last request's deadline is not looked at",
        "backend/quire/core/policies/admission.py",
        "while self._heap and self._heap[0][0] <= now:",
        "while len(self._heap) > 1 and self._heap[0][0] <= now:",
        (
            "tests/unit/test_policies_admission.py"
            "::test_expired_requests_are_told_once_and_with_the_deadline_that_passed",
        ),
    ),
    Mutant(
        "a reservation counts one output token less",
        "backend/quire/core/policies/reservation.py",
        "request.max_output_tokens(self._max_model_len) - 1",
        "request.max_output_tokens(self._max_model_len) - 2",
        (
            "tests/unit/test_policies_reservation.py"
            "::test_no_evict_counts_the_longest_output_within_the_model_length",
        ),
    ),
    Mutant(
        "the longest output ever is never forgotten",
        "backend/quire/core/policies/reservation.py",
        "del self._lengths[bisect.bisect_left(self._lengths, self._recent.popleft())]",
        "del self._lengths[0], self._recent[0]",
        (
            "tests/unit/test_policies_reservation.py"
            "::test_the_expected_length_is_the_mean_of_those_longer_than_what_is_there",
        ),
    ),
    Mutant(
        "the way back from the host costs nothing",
        "backend/quire/core/policies/preemption.py",
        "(1 / out + 1 / (back or out))",
        "(1 / out)",
        ("tests/unit/test_policies_admission.py::test_auto_takes_what_is_cheaper_by_measured_rates",),
    ),
    Mutant(
        "choices share one seed",
        "backend/quire/core/sequence_group.py",
        "seed = None if params.seed is None else choice_seed(params.seed, index)",
        "seed = params.seed",
        ("tests/unit/test_choices.py::test_four_choices_use_the_blocks_of_the_prompt_once",),
    ),
    Mutant(
        "the best choice is the shortest",
        "backend/quire/frontend/output_processor.py",
        "(self.cumulative_logprob or 0.0) / max(self.num_output_tokens, 1)",
        "self.cumulative_logprob or 0.0",
        ("tests/unit/test_choices.py::test_the_best_choices_come_at_the_end_and_in_order",),
    ),
    Mutant(
        "a beam ends from one place too far down",
        "backend/quire/core/sequence_group.py",
        "elif end is not None and place < width:",
        "elif end is not None and place <= width:",
        ("tests/unit/test_beam_search.py::test_results_are_those_of_the_search_alone",),
    ),
    Mutant(
        "choices lengthen one list of hashes",
        "backend/quire/core/sequence_group.py",
        "child.block_hashes = list(parent.block_hashes)",
        "child.block_hashes = parent.block_hashes",
        ("tests/unit/test_choices.py::test_choices_survive_preemption_chunks_and_a_tiny_pool",),
    ),
    Mutant(
        "a swap that is given up is still saved",
        "backend/quire/core/transfers.py",
        "self._saves = [save for save in self._saves if save.key not in gone]",
        "pass",
        ("tests/unit/test_transfers.py",),
    ),
    Mutant(
        "swaps of one step are promised the same room",
        "backend/quire/core/transfers.py",
        "self.tiers.can_pin(num_pinned + count)",
        "self.tiers.can_pin(count)",
        ("tests/unit/test_transfers.py",),
    ),
    Mutant(
        "a trace forgets which arrivals came before an end",
        "backend/quire/core/trace.py",
        '            entry[3] += len(record["arrivals"])\n',
        "",
        (
            "tests/unit/test_scheduler_batching.py::test_trace_counts_the_arrivals_before_an_end_over_a_plan_that_was_not_executed",
        ),
    ),
)

_TIERS = (
    Mutant(
        "a block evicted during its load counts as whole",
        "backend/quire/kv_tiers/host.py",
        "if self._generation[slot] != generation:",
        "if self._generation[slot] < generation:",
        (
            "tests/unit/test_kv_tiers.py::TestHostTier::test_a_slot_that_changes_hands_during_a_load_is_a_miss",
        ),
    ),
    Mutant(
        "a pinned block that is dropped keeps its slot",
        "backend/quire/kv_tiers/host.py",
        "slot = self._pinned.pop(key, None)",
        "self._pinned.pop(key, None)",
        ("tests/unit/test_kv_tiers.py::TestKVTiers::test_random_plans_agree_with_what_was_computed",),
    ),
    Mutant(
        "what was read before a clear comes back",
        "backend/quire/kv_tiers/tiers.py",
        "if self.num_clears != num_clears:",
        "if self.num_clears < num_clears:",
        ("tests/unit/test_kv_tiers.py::TestKVTiers::test_what_was_read_before_a_clear_does_not_come_back",),
    ),
    Mutant(
        "other models' blocks do not count",
        "backend/quire/kv_tiers/disk.py",
        "self._foreign_bytes + num_bytes > self._capacity:",
        "num_bytes > self._capacity:",
        ("tests/unit/test_disk_tier.py::test_the_bound_is_that_of_all_models",),
    ),
    Mutant(
        "a block dropped while it is written stays on disk",
        "backend/quire/kv_tiers/disk.py",
        "        if written and not is_wanted:\n            self._remove([key])\n",
        "",
        ("tests/unit/test_disk_tier.py::test_dropping_a_block_that_is_being_written",),
    ),
    Mutant(
        "the checksum is that of the header alone",
        "backend/quire/kv_tiers/block_file.py",
        "    checksum.update(data.data)\n",
        "",
        ("tests/unit/test_disk_tier.py::test_a_changed_byte_is_found",),
    ),
)

_WORKER = (
    Mutant(
        "a preempted request comes back before the tokens that are still drawn for it",
        "backend/quire/core/planner.py",
        "                if request.num_pending_tokens:\n                    break",
        "                if False:\n                    break",
        ("tests/unit/test_lookahead.py::test_outputs_are_the_same[two ahead-preemption]",),
    ),
    Mutant(
        "a block leaves the window that choices are still to fork from",
        "backend/quire/core/planner.py",
        "(request.num_pending_tokens > 1 or self",
        "(self",
        ("tests/unit/test_lookahead.py::test_outputs_are_the_same[two ahead-windows]",),
    ),
    Mutant(
        "penalties forget the token before the newest",
        "backend/quire/worker/sampling_batch.py",
        "return self.has_penalties and self.num_pending > 1",
        "return False",
        (
            "tests/unit/test_async_scheduling.py::test_a_step_waits_for_no_more_tokens_than_the_host_must_know",
        ),
    ),
    Mutant(
        "two steps ahead a full block is cached with the next one",
        "backend/quire/core/kv_cache_manager.py",
        "            if table.num_cached < request.num_computed_tokens // size:\n"
        "                return 0  # a block is full, of tokens of which some are pending\n",
        "",
        ("tests/unit/test_lookahead.py::test_a_block_can_be_found_once_its_tokens_are_known",),
    ),
    Mutant(
        "embeddings get the hidden states of tokens that are sampled from",
        "backend/quire/worker/input_batch.py",
        "if not (inputs.prompt_rows or inputs.pool_rows):",
        "if not inputs.prompt_rows:",
        ("tests/unit/test_embeddings.py::test_alone_and_in_a_batch_bit_for_bit",),
    ),
    Mutant(
        "recorded steps are taken to have hidden states of sampled tokens alone",
        "backend/quire/worker/model_runner.py",
        "hidden, has_all = recorded.run(forward), True",
        "hidden = recorded.run(forward)",
        (
            "tests/unit/test_model_interface.py"
            "::test_cached_chunked_and_preempted_it_generates_what_it_does_alone[recorded-greedy]",
        ),
    ),
    Mutant(
        "an image whose tokens see each other is cut",
        "backend/quire/request/multimodal.py",
        "and self.is_joint]",
        "and False]",
        (
            "tests/unit/test_vision_language.py"
            "::test_an_image_whose_tokens_see_each_other_is_in_one_step[gemma3]",
        ),
    ),
    Mutant(
        "Gemma 4's experts have no factors of their own",
        "backend/quire/models/gemma4.py",
        "shares * self.per_expert_scale[experts]",
        "shares",
        ("tests/unit/test_models.py::test_logits_equal_transformers[whole-gemma4_moe]",),
    ),
    Mutant(
        "an image's tokens see each other in the layers that are causal",
        "backend/quire/models/gemma4.py",
        "meta = meta.causal()",
        "pass",
        (
            "tests/unit/test_vision_families.py::test_answers_and_log_probabilities_are_those_of_transformers"
            "[gemma4_large]",
        ),
    ),
    Mutant(
        "recorded attention of a causal layer sees images both ways",
        "kernels/quire_kernels/metadata.py",
        "attend(query, meta.causal()))",
        "attend(query, meta))",
        ("tests/unit/test_vision_families.py::test_recorded_pieces_know_which_layers_see_images_both_ways",),
    ),
    Mutant(
        "tokens behind the images have the text's positions",
        "backend/quire/worker/input_batch.py",
        "            axes[:, behind : start + item.num_scheduled_tokens] += embeds.position_delta\n",
        "",
        ("tests/unit/test_vision_language.py::test_images_give_the_tokens_of_transformers",),
    ),
    Mutant(
        "on transformers' code tokens see beyond their window",
        "backend/quire/models/transformers_fallback.py",
        "sliding_window=self._window,",
        "",
        ("tests/unit/test_transformers_fallback.py::test_logits_equal_transformers[whole-starcoder2]",),
    ),
    Mutant(
        "a mask that shows later tokens is taken for one with a window",
        "backend/quire/models/transformers_fallback.py",
        "seen[position + 1 :].any() or ",
        "",
        (
            "tests/unit/test_transformers_fallback.py"
            "::test_models_that_need_more_are_refused_with_the_reason[bert-its tokens see others than those "
            "right before them (it is not causal, for one)]",
        ),
    ),
    Mutant(
        "packed weights are a family's and transformers' alike",
        "backend/quire/loader/packed_cache.py",
        '            "model": model_identity(model),\n',
        "",
        (
            "tests/unit/test_packed_cache.py"
            "::test_a_model_on_transformers_code_is_not_kept_and_takes_no_other_for_its_own",
        ),
    ),
    Mutant(
        "one token more than the least is generated",
        "backend/quire/worker/sampling_batch.py",
        "num_output_tokens < params.min_tokens",
        "num_output_tokens <= params.min_tokens",
        ("tests/unit/test_sampler.py::test_transform_equals_numpy_reference",),
    ),
    Mutant(
        "a draw handed over early repeats the one before",
        "backend/quire/worker/sampling_batch.py",
        "return len(self.token_ids) + self.num_pending - self.num_prompt_tokens",
        "return len(self.token_ids) - self.num_prompt_tokens",
        ("tests/unit/test_async_scheduling.py::test_a_request_gets_the_same_tokens",),
    ),
    Mutant(
        "blocks are copied the wrong way",
        "backend/quire/worker/kv_cache.py",
        "source, target = torch.tensor(",
        "target, source = torch.tensor(",
        ("tests/unit/test_kv_cache.py::test_copies_read_all_sources_first",),
    ),
    Mutant(
        "blocks of one adapter are found by requests of another",
        "backend/quire/core/block_hash.py",
        "adapter.digest + salt",
        "salt",
        ("tests/unit/test_lora.py::test_no_prefix_is_found_of_another_adapter",),
    ),
    Mutant(
        "a slot that is promised is given to who comes later",
        "backend/quire/core/adapter_slots.py",
        "self._promised.get(slot, adapter) is adapter",
        "True",
        ("tests/unit/test_lora_slots.py::test_an_adapter_is_not_starved_by_others_that_keep_coming",),
    ),
    Mutant(
        "recorded steps write the padding into a request's row",
        "backend/quire/worker/graph_runner.py",
        "np.array([[self._scratch_row], [1], [0], [0], [-1]])",
        "np.array([[0], [1], [0], [0], [-1]])",
        ("tests/unit/test_async_scheduling.py::test_a_request_gets_the_same_tokens[recorded-greedy]",),
    ),
    Mutant(
        "tables of later groups are mirrored in the first one's place",
        "backend/quire/worker/graph_runner.py",
        "places = places + places // (rows * width) * width",
        "places = places + 0",
        (
            "tests/unit/test_async_scheduling.py::test_recorded_steps_know_the_blocks_of_every_group_of_layers",
        ),
    ),
    Mutant(
        "blocks are copied before they are saved",
        "backend/quire/kv_tiers/moves.py",
        "    if output.block_copies:\n        pool.copy_blocks(output.block_copies)\n",
        "",
        ("tests/unit/test_model_runner.py::test_a_copied_block_goes_on_as_its_source",),
    ),
    Mutant(
        "a row's old owner writes last",
        "backend/quire/worker/block_table.py",
        "_, last = np.unique(changes[0, ::-1], return_index=True)\n"
        "        return np.ascontiguousarray(changes[:, ::-1][:, last])",
        "_, last = np.unique(changes[0], return_index=True)\n"
        "        return np.ascontiguousarray(changes[:, last])",
        (
            "tests/unit/test_async_scheduling.py::test_a_block_table_tells_what_was_appended_and_the_newest_of_a_place",
        ),
    ),
)

_MODELS = (
    Mutant(
        "indexers count negative scores",
        "backend/quire/layers/indexer.py",
        "weight @ torch.relu(heads @ keys[: first + i].T)",
        "weight @ (heads @ keys[: first + i].T)",
        ("tests/unit/test_models.py::test_logits_equal_transformers[whole-deepseek_v32]",),
    ),
    Mutant(
        "scores have YaRN's factor once",
        "backend/quire/models/deepseek_v2.py",
        'yarn_scale(rope.parameters["factor"], all_dim) ** 2',
        'yarn_scale(rope.parameters["factor"], all_dim)',
        ("tests/unit/test_models.py::test_logits_equal_transformers[whole-deepseek_v3]",),
    ),
    Mutant(
        "on a CPU a token's bits depend on its chunk",
        "backend/quire/layers/latent_attention.py",
        'if device_type != "cpu":',
        "if device_type:",
        ("tests/unit/test_latent_attention.py::test_where_expanding_pays",),
    ),
    Mutant(
        "the attention factor of a scaling is lost",
        "backend/quire/layers/rotary.py",
        "torch.cat([angles.cos(), angles.sin()], -1) * self.attention_factor",
        "torch.cat([angles.cos(), angles.sin()], -1)",
        ("tests/unit/test_rope.py::test_tables_equal_transformers",),
    ),
    Mutant(
        "axes that take turns end too early",
        "backend/quire/layers/rotary.py",
        "axes[axis : 3 * sections[axis] : 3] = axis",
        "axes[axis : sections[axis] : 3] = axis",
        ("tests/unit/test_rope.py::test_mrope_equals_transformers",),
    ),
    Mutant(
        "gpt-oss: a gate's rows are those of what it gates",
        "backend/quire/models/gpt_oss.py",
        '"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)',
        '"gate_proj": slice(1, None, 2), "up_proj": slice(0, None, 2)',
        ("tests/unit/test_gpt_oss.py::test_mxfp4_equals_transformers",),
    ),
    Mutant(
        "every layer has the window of the first",
        "backend/quire/layers/attention.py",
        "config.sliding_windows[layer]",
        "config.sliding_windows[0]",
        ("tests/unit/test_models.py::test_logits_equal_transformers",),
    ),
    Mutant(
        "neighbours that rotate together stay as they lie",
        "backend/quire/layers/rotary.py",
        "turned = turned.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)",
        "turned = turned.contiguous()",
        ("tests/unit/test_models.py::test_logits_equal_transformers",),
    ),
    Mutant(
        "a layer reads the keys of the first of its kind",
        "backend/quire/models/gemma4.py",
        "enumerate(kinds[:count])}",
        "reversed([*enumerate(kinds[:count])])}",
        ("tests/unit/test_models.py::test_logits_equal_transformers",),
    ),
    Mutant(
        "a chunk begins one block late",
        "kernels/quire_kernels/metadata.py",
        "torch.tensor(chunks_of, device=device)[:, None] * width + firsts",
        "torch.tensor(chunks_of, device=device)[:, None] * width + firsts + 1",
        ("tests/kernels/test_paged_attention.py::test_chunks_are_sequences_of_their_own",),
    ),
    Mutant(
        "embeddings are scaled without the rounding of their type",
        "backend/quire/models/gemma.py",
        "float(torch.tensor(config.hidden_size**0.5, dtype=dtype))",
        "config.hidden_size**0.5",
        ("tests/unit/test_models.py::test_embeddings_are_scaled_by_a_number_of_their_own_type",),
    ),
    Mutant(
        "a narrow scale multiplies before the rounding",
        "backend/quire/layers/norm.py",
        "return ops.rms_norm(x.float(), self.weight, self.eps).to(x.dtype)",
        "return ops.rms_norm(x, self.weight.to(x.dtype), self.eps)",
        ("tests/unit/test_models.py::test_half_precision_is_as_close_to_float32_as_stated",),
    ),
    Mutant(
        "biases of keys and values are those of queries",
        "backend/quire/layers/scheme.py",
        'StoredTensor(f"{name}.bias", rows, 0, None)',
        'StoredTensor(f"{name}.bias", self.bias[: len(rows)], 0, None)',
        ("tests/unit/test_models.py::test_logits_equal_transformers",),
    ),
    Mutant(
        "ranks divide the inputs of a layer whose inputs are whole",
        "backend/quire/layers/linear.py",
        '"column": out_dim, "row": in_dim',
        '"column": in_dim, "row": out_dim',
        ("tests/unit/test_schemes.py::test_ranks_compute_what_the_whole_model_does",),
    ),
    Mutant(
        "Gemma 2: windows in the odd layers",
        "backend/quire/models/gemma2.py",
        "None if layer % 2 else window",
        "window if layer % 2 else None",
        ("tests/unit/test_models.py::test_windows_are_in_the_layers_that_transformers_says",),
    ),
    Mutant(
        "Gemma 3: the layer without a window comes one too late",
        "backend/quire/models/gemma3.py",
        "window if (layer + 1) % period else None",
        "window if layer % period else None",
        ("tests/unit/test_models.py::test_gemma3_files_of_transformers_4",),
    ),
    Mutant(
        "Qwen2 and Qwen2-VL: no windows",
        "backend/quire/models/qwen2.py",
        "qkv_bias=True, sliding_windows=windows)",
        "qkv_bias=True)",
        ("tests/unit/test_models.py::test_windows_are_in_the_layers_that_transformers_says",),
    ),
    Mutant(
        "an index names files outside the checkpoint",
        "common/quire_common/weight_files.py",
        "isinstance(shard, str) and Path(shard).name == shard",
        "isinstance(shard, str)",
        ("tests/unit/test_loader.py::test_broken_index",),
    ),
    Mutant(
        "GGUF: keys are reordered by the number of query heads",
        "backend/quire/loader/gguf/weights.py",
        '"attn_k": _heads(opened, "head_count_kv")',
        '"attn_k": _heads(opened, "head_count")',
        ("tests/unit/test_loader.py::test_gguf_equals_transformers_with_the_decoded_weights",),
    ),
    Mutant(
        "groups of eight bits may end in the middle of a row",
        "backend/quire/layers/scheme.py",
        'DenseScheme("w8a8", W8A8_GROUP)',
        'DenseScheme("w8a8")',
        ("tests/unit/test_weight_quantization.py::test_sizes_that_do_not_divide_are_refused_by_name",),
    ),
    Mutant(
        "the generation configuration's ends are ignored",
        "backend/quire/loader/info.py",
        'ends = stated or _token_ids(hf.path, hf.get("eos_token_id"))',
        'ends = _token_ids(hf.path, hf.get("eos_token_id"))',
        ("tests/unit/test_loader.py::test_eos_comes_from_generation_config_first",),
    ),
)

_KERNELS = (
    Mutant(
        "what chooses an expert weighs it, too",
        "kernels/quire_kernels/reference/moe.py",
        "shares = scores.gather(1, experts)",
        "shares = choice.gather(1, experts)",
        (
            "tests/kernels/test_moe.py"
            "::test_routes_are_as_defined_also_among_equals[8-options0-True-sigmoid-reference-cpu]",
        ),
    ),
    Mutant(
        "of equal experts any is chosen",
        "kernels/quire_kernels/reference/moe.py",
        "return values.argsort(dim=1, descending=True, stable=True)[:, :count]",
        "return values.topk(count).indices",
        (
            "tests/kernels/test_moe.py"
            "::test_routes_are_as_defined_also_among_equals[60-options2-True-softmax-reference-cpu]",
        ),
    ),
    Mutant(
        "C++: a group is as good as its best expert",
        "kernels/quire_kernels/cpu/src/moe.h",
        "for (int i = 0; i < found; ++i) sums[group]",
        "for (int i = 0; i < 1; ++i) sums[group]",
        ("tests/unit/test_moe.py::test_a_layer_equals_that_of_transformers[1000-dots1]",),
    ),
    Mutant(
        "reference: one slot that nobody wrote is read",
        "kernels/quire_kernels/reference/attention.py",
        "factor[:, keys.written :] = 0.0",
        "factor[:, keys.written + 1 :] = 0.0",
        ("tests/kernels/test_paged_attention.py::test_random_batches_equal_dense_attention",),
    ),
    Mutant(
        "reference: rows of a tile have the sinks of other heads",
        "kernels/quire_kernels/reference/attention.py",
        "sinks.repeat_interleave(count, dim=1)",
        "sinks.repeat(1, count, 1)",
        ("tests/kernels/test_paged_attention.py::test_sinks_take_their_share_of_the_weights",),
    ),
    Mutant(
        "reference: the newest token counts for its neighbours too",
        "kernels/quire_kernels/reference/sampling.py",
        "is_newest = token_ids == newest[rows]",
        "is_newest = token_ids <= newest[rows]",
        ("tests/kernels/test_sampling.py::test_a_token_counts_that_only_the_device_knows",),
    ),
    Mutant(
        "the up half of a joined projection has no adapter",
        "kernels/quire_kernels/cpu/src/lora.h",
        "half * (num_outputs / 2)",
        "half * num_outputs",
        ("tests/unit/test_family_matrix.py::test_adapters_of_gate_and_up_in_one_tensor",),
    ),
    Mutant(
        "C++: ranks behind the last whole vector are not added",
        "kernels/quire_kernels/cpu/src/lora.h",
        "for (int i = 0; i < ranks; ++i) store(",
        "for (int i = 0; i < ranks / 8 * 8; ++i) store(",
        ("tests/kernels/test_lora.py::test_each_row_gets_its_own_adapters_product",),
    ),
    Mutant(
        "Triton-language: all parts of the inputs are the first one",
        "kernels/quire_kernels/triton_lang/lora.py",
        "num_tokens.to(tl.int64) * part + token",
        "token",
        ("tests/kernels/test_lora.py::test_each_row_gets_its_own_adapters_product",),
    ),
    Mutant(
        "C++: the norm is that of the sum's first part",
        "kernels/quire_kernels/cpu/src/elementwise.h",
        "  if (residual) from = residual;\n",
        "",
        ("tests/kernels/test_elementwise.py::test_rms_norm",),
    ),
    Mutant(
        "C++: scales of a block's later tokens overwrite the first one's",
        "kernels/quire_kernels/cpu/src/elementwise.h",
        "head * kv.scale_head_stride + offset] = scale",
        "head * kv.scale_head_stride] = scale",
        ("tests/kernels/test_cache_ops.py::test_write_kv_quantizes_within_half_a_step",),
    ),
)

_FRONTEND = (
    Mutant(
        "a character that is not whole yet is sent when the window is cut",
        "backend/quire/frontend/detokenizer.py",
        "emitted = len(self._decoder.decode(context)) - self._undecided",
        "emitted = len(self._decoder.decode(context))",
        ("tests/unit/test_detokenizer.py::test_concatenated_deltas_equal_the_whole_decode",),
    ),
    Mutant(
        "a stop string hides in the end of a longer one",
        "backend/quire/frontend/stop_matcher.py",
        "self.match[child] or self.match[fail]",
        "self.match[child]",
        ("tests/unit/test_detokenizer.py::test_stream_never_contains_a_stop_nor_leaks_its_prefix",),
    ),
    Mutant(
        "tokens behind a stop string are told",
        "backend/quire/frontend/output_processor.py",
        "del self._token_ids[num_before + max(used, 0) :]",
        "pass",
        ("tests/unit/test_detokenizer.py::test_tokens_behind_a_stop_string_are_not_told",),
    ),
    Mutant(
        "long steps are polled at every period",
        "backend/quire/triton/sending/cancellation.py",
        "now + max(period, min(handle.step_s, MAX_POLL_S))",
        "now + period",
        ("tests/triton/test_responder.py::test_a_request_with_long_steps_is_polled_once_per_step",),
    ),
    Mutant(
        "a position one behind the last is accepted",
        "backend/quire/triton/request_parser.py",
        "max(positions) >= info.max_model_len",
        "max(positions) > info.max_model_len",
        ("tests/triton/test_request_parser.py::test_positions_are_those_of_the_longest_sequence",),
    ),
    Mutant(
        "an interval's open end is closed",
        "backend/quire/converters.py",
        "or (low_open and value == low)",
        "",
        ("tests/unit/test_sampling_params.py::test_refused_naming_the_parameter",),
    ),
    Mutant(
        "a later source's value wins",
        "backend/quire/request/sampling_params.py",
        "given.setdefault(field, converted)",
        "given[field] = converted",
        ("tests/unit/test_sampling_params.py::test_first_source_wins_and_all_are_checked",),
    ),
    Mutant(
        "Triton's timeout is taken for milliseconds",
        "backend/quire/triton/scheduling_fields.py",
        "limits_ms.append(timeout_us / 1000)",
        "limits_ms.append(timeout_us)",
        ("tests/unit/test_scheduling_fields.py::test_the_smaller_deadline_wins",),
    ),
    Mutant(
        "embeddings that are gone still count",
        "backend/quire/engine/shared_array.py",
        "EmbedsBuffer.total_bytes -= self._num_bytes",
        "pass",
        ("tests/triton/test_request_parser.py::test_image_embeddings_are_bounded_together_and_given_back",),
    ),
    Mutant(
        "a dead frontend's requests are computed to their end",
        "backend/quire/engine/loop.py",
        "        self.core.abort(gone, FinishReason.CANCELLED)\n",
        "",
        ("tests/triton/test_choices.py::test_requests_of_a_frontend_that_has_gone_are_not_computed",),
    ),
    Mutant(
        "requests without a seed share one",
        "backend/quire/engine/core.py",
        "0x9E3779B97F4A7C15 * next(self._seeds)",
        "0x9E3779B97F4A7C15",
        ("tests/unit/test_engine.py::test_unseeded_requests_do_not_repeat",),
    ),
    Mutant(
        "a kernel that was named computes also what it leaves to others",
        "kernels/quire_kernels/registry.py",
        "        if not one.leaves_call(facts):\n            return one",
        "        return one",
        ("tests/kernels/test_registry.py::test_what_a_chosen_implementation_leaves_to_others_is_the_nexts",),
    ),
    Mutant(
        "a replay leaves out the message it was asked from",
        "backend/quire/engine/kv_event_publisher.py",
        'if number >= int.from_bytes(first, "big"):',
        'if number > int.from_bytes(first, "big"):',
        ("tests/unit/test_kv_events.py::test_replay_gives_what_is_still_kept",),
    ),
    Mutant(
        "a wait for signals that is interrupted has found one",
        "backend/quire/server/serve.py",
        "return found if found > 0 else None",
        "return found or None",
        (
            "tests/unit/test_serve.py"
            "::test_a_wait_that_is_interrupted_until_its_time_is_over_has_found_no_signal",
        ),
    ),
    Mutant(
        "metrics listen on every address",
        "backend/quire/server/serve.py",
        '        ("metrics-address", of_http),\n',
        "",
        ("tests/unit/test_serve.py::test_everything_listens_on_the_one_address",),
    ),
    Mutant(
        "files of a run that lives are removed",
        "backend/quire/server/run_files.py",
        "        except BlockingIOError:\n            continue\n",
        '        except BlockingIOError:\n            _remove(lock.name.removesuffix("lock"))\n',
        ("tests/unit/test_serve.py::test_files_of_a_live_run_are_not_stale",),
    ),
    Mutant(
        "a start waits for a stub that is taken for dead",
        "backend/quire/server/serve.py",
        "            for pid, name in stubs.look().items():\n",
        "            for pid, name in dict[int, str]().items():\n",
        ("tests/fault/test_starts.py::test_a_stub_that_is_taken_for_dead_does_not_hold_up_the_start[1]",),
    ),
    Mutant(
        "a stub that dies before its first answer is not missed",
        "backend/quire/server/lost_stubs.py",
        "child.status() == psutil.STATUS_ZOMBIE and",
        "child.status() == psutil.STATUS_IDLE and",
        (
            "tests/fault/test_starts.py"
            "::test_a_stub_that_dies_before_it_has_answered_does_not_hold_up_the_start",
        ),
    ),
    Mutant(
        "not healthy is a success",
        "backend/quire/server/healthcheck.py",
        "        sys.exit(1)\n",
        "        sys.exit(0)\n",
        ("tests/unit/test_serve.py::test_healthcheck_without_a_server_is_one_line_and_status_1",),
    ),
)

_ENSEMBLE = (
    Mutant(
        "a rendered conversation begins twice",
        "ensemble/quire_ensemble/tokenizer.py",
        "add_special_tokens=False, field=chat.FIELD",
        "field=chat.FIELD",
        ("tests/unit/test_ensemble_tokenizer.py::test_messages_equal_apply_chat_template",),
    ),
    Mutant(
        "text parts run into each other",
        "ensemble/quire_ensemble/messages.py",
        'return "\\n".join(part["text"] for part in parts)',
        'return "".join(part["text"] for part in parts)',
        (
            "tests/unit/test_ensemble_tokenizer.py"
            "::test_parts_reach_templates_that_know_them_and_are_joined_for_others",
        ),
    ),
    Mutant(
        "pictures lie on the wrong side",
        "ensemble/quire_ensemble/images.py",
        '    6: "ROTATE_270",\n    7: "TRANSVERSE",\n    8: "ROTATE_90",\n',
        '    6: "ROTATE_90",\n    7: "TRANSVERSE",\n    8: "ROTATE_270",\n',
        ("tests/unit/test_images.py::test_exif_orientation_is_applied_as_transformers_load_image_does",),
    ),
    Mutant(
        "the height of a lossless WebP is read from its width",
        "ensemble/quire_ensemble/images.py",
        "(bits >> 14 & 0x3FFF) + 1",
        "(bits & 0x3FFF) + 1",
        ("tests/unit/test_images.py::test_the_sides_of_a_webp_are_told_apart",),
    ),
    Mutant(
        "any number of images",
        "ensemble/quire_ensemble/vision.py",
        "        check_count(len(sources), self.limits)\n",
        "",
        ("tests/unit/test_vision_processor.py::test_limits_of_a_request_hold",),
    ),
    Mutant(
        "a wide image moves what follows by its height",
        "ensemble/quire_ensemble/mrope.py",
        "position += max(h, w)",
        "position += h",
        ("tests/unit/test_vision_processor.py::test_positions_of_random_layouts_equal_get_rope_index",),
    ),
    Mutant(
        "an embedding that is replaced is counted twice",
        "ensemble/quire_ensemble/encoder_cache.py",
        "            self.bytes -= old.nbytes\n",
        "            pass\n",
        ("tests/unit/test_encoder_cache.py::test_putting_again_replaces_and_counts_once",),
    ),
    Mutant(
        "a LLaVA of full features has a row less",
        "ensemble/quire_ensemble/vision_config.py",
        "extra_rows = _CLASS_ROWS[vision.model_type] - dropped",
        "extra_rows = _CLASS_ROWS[vision.model_type] - 1",
        ("tests/unit/test_vision_processor.py::test_whole_prompts_equal_those_of_transformers",),
    ),
    Mutant(
        "tiles have no marks behind their lines",
        "ensemble/quire_ensemble/vision_config.py",
        "self.tile_tokens + rows * (columns + 1)",
        "self.tile_tokens + rows * columns",
        ("tests/unit/test_vision_processor.py::test_whole_prompts_equal_those_of_transformers",),
    ),
    Mutant(
        "every level of deepstack is the first",
        "backend/quire/models/decoder.py",
        "(index + 1) * size : (index + 2) * size",
        "size : 2 * size",
        ("tests/unit/test_vision_language.py::test_images_give_the_tokens_of_transformers",),
    ),
    Mutant(
        "a forward is cut one image too late",
        "ensemble/quire_ensemble/vision_tower.py",
        "patches + more > self.max_patches",
        "patches > self.max_patches",
        ("tests/unit/test_vision_tower.py::test_forwards_are_cut_between_images_by_patches",),
    ),
    Mutant(
        "the unary model has the instances of the streaming one",
        "ensemble/quire_ensemble/builder.py",
        "instance_count=instance_count if decoupled else 1",
        "instance_count=instance_count",
        ("tests/unit/test_ensemble_builder.py::test_every_config_parses_and_is_complete",),
    ),
    Mutant(
        "images of one grid are one image",
        "ensemble/quire_ensemble/triton_vision_encoder.py",
        "    content.update(np.ascontiguousarray(pixels).data)\n",
        "",
        ("tests/triton/test_vision_encoder.py::test_requests_of_a_batch_are_encoded_by_one_forward",),
    ),
)

_CLIENT = (
    Mutant(
        "the server is told milliseconds",
        "client/quire_client/protocol.py",
        "math.ceil(timeout * 1e6)",
        "math.ceil(timeout * 1e3)",
        ("tests/unit/test_client.py::test_timeout_is_told_to_the_server_too",),
    ),
    Mutant(
        "a stream that is left is not cancelled",
        "client/quire_client/client.py",
        "run_blocking(self._async.__aexit__(*raised))",
        "pass",
        ("tests/unit/test_client.py::test_leaving_a_stream_cancels_on_the_server",),
    ),
    Mutant(
        "a configuration that has changed is never asked again",
        "client/quire_client/aio.py",
        "            self._client._schemas.pop(self.model, None)\n",
        "            pass\n",
        ("tests/unit/test_client.py::test_async_configuration_is_asked_again_after_an_invalid_argument",),
    ),
    Mutant(
        "addresses in IPv6 of private ones are public",
        "client/quire_client/openai/images.py",
        "        if inner is not None:\n            return is_public(str(inner))\n",
        "",
        ("tests/unit/test_openai_gateway.py::test_addresses_that_are_not_public",),
    ),
    Mutant(
        "choices that did not end stay open",
        "client/quire_client/openai/stream.py",
        "                    open_choices.discard(index)\n",
        "",
        ("tests/unit/test_openai_gateway.py::test_streamed_choices",),
    ),
    Mutant(
        "a quota is the server's fault",
        "client/quire_client/openai/errors.py",
        "if retry_after(error) is not None:",
        "if retry_after(error) is None and False:",
        ("tests/unit/test_openai_gateway.py::test_a_used_up_quota_is_429_with_retry_after",),
    ),
)

_SIMULATOR = (
    Mutant(
        "a prompt's tokens do not see themselves",
        "backend/quire/plan/cost.py",
        "count * (count + 1) // 2",
        "count * (count - 1) // 2",
        ("tests/unit/test_simulator.py::test_time_is_what_the_cost_model_says",),
    ),
    Mutant(
        "a turn forgets the answer before it",
        "benchmarks/simulator/workload.py",
        "                length += outputs[index]\n",
        "",
        ("tests/unit/test_simulator.py::test_a_turn_begins_with_the_turn_before_and_its_output",),
    ),
    Mutant(
        "latencies count from the first request",
        "backend/quire/plan/simulate.py",
        "self.first_token_at - self.arrival.at",
        "self.first_token_at",
        ("tests/unit/test_simulator.py::test_time_is_what_the_cost_model_says",),
    ),
)

_CHAT = (
    Mutant(
        "half a marker is sent as content",
        "backend/quire/frontend/chat/machine.py",
        "held = 0 if found is not None or self._is_last else markers.held(self._text, self._at)",
        "held = 0",
        ("tests/unit/test_chat_parsers.py::test_golden_transcripts_whole_and_cut_anywhere",),
    ),
    Mutant(
        "a call that was broken off counts as complete",
        "backend/quire/frontend/chat/sink.py",
        "return 0 < self._num_begun == self._num_ended",
        "return 0 < self._num_begun",
        ("tests/unit/test_chat_parsers.py::test_golden_transcripts_as_tokens",),
    ),
    Mutant(
        "a call cut short ends with tool_calls",
        "backend/quire/frontend/output_processor.py",
        "if self.finish_reason == FinishReason.STOP.value and self.answer.has_all_calls:",
        "if self.answer.has_all_calls:",
        ("tests/unit/test_chat_parsers.py::test_a_call_cut_short_reports_length",),
    ),
    Mutant(
        "reasoning is counted by texts, not by tokens",
        "backend/quire/frontend/output_processor.py",
        "size = 1 if answer.counts_tokens else len(token_ids) - position",
        "size = len(token_ids) - position",
        ("tests/unit/test_chat_parsers.py::test_reasoning_is_counted_token_by_token",),
    ),
    Mutant(
        "a closing tag that has begun is forced anew",
        "backend/quire/worker/token_history.py",
        "self._num_forced = written",
        "self._num_forced = 0",
        ("tests/unit/test_thinking_budget.py::test_the_closing_tag_follows_the_budget",),
    ),
    Mutant(
        "a step ahead does not wait for what may be forced",
        "backend/quire/worker/sampling_batch.py",
        "if params.thinking is not None and not (self._thinking is not None and self._thinking.is_over):",
        "if False:",
        ("tests/unit/test_thinking_budget.py::test_a_budget_holds_whatever_happens_to_the_request",),
    ),
    Mutant(
        "tool_choice may name any tool",
        "ensemble/quire_ensemble/messages.py",
        'if all(tool["function"]["name"] != name for tool in tools):',
        "if False:",
        ("tests/triton/test_chat.py::test_tools_are_checked_wherever_they_come_in",),
    ),
)

_OFF_THE_PATHS = (  # of a review of 39 planted bugs: units, orders, resets, first samples, ties
    Mutant(
        "an adapter's new path is not kept",
        "backend/quire/engine/adapter_registry.py",
        """                old.path = str(path)
                self.on_change(self.saved())""",
        "                old.path = str(path)",
        ("tests/unit/test_lora.py::test_the_same_content_at_another_path_is_read_there_by_the_next_engine",),
    ),
    Mutant(
        "adapters' weights leave the host first in, first out",
        "backend/quire/engine/adapter_registry.py",
        "self._weights.move_to_end(adapter)",
        "pass",
        ("tests/unit/test_lora.py::test_weights_in_host_memory_that_were_just_used_stay",),
    ),
    Mutant(
        "past time counts at a key's new rate",
        "client/quire_client/openai/keys.py",
        """        self._refill()
        self._rate, self._most""",
        "        self._rate, self._most",
        ("tests/unit/test_openai_access.py::test_a_debt_is_paid_at_the_rate_of_its_time",),
    ),
    Mutant(
        "each token of a chunk waited for all",
        "client/quire_client/openai/observer.py",
        "between.observe((now - last) / count)",
        "between.observe(now - last)",
        ("tests/unit/test_openai_access.py::test_a_chunk_of_several_tokens_is_as_many_gaps",),
    ),
    Mutant(
        "a hit in Redis is not kept in memory",
        "backend/quire/triton/result_cache.py",
        "self._memory.put(key, data)",
        "pass",
        ("tests/triton/test_result_cache.py::test_what_a_redis_had_is_in_memory_from_then_on",),
    ),
    Mutant(
        "the first step came after an endless one",
        "backend/quire/triton/sending/pacing.py",
        "min(now - self._last_step, MAX_PERIOD_S)",
        "(now - self._last_step)",
        ("tests/triton/test_pacing.py::test_a_pause_counts_as_a_tenth_of_a_second",),
    ),
    Mutant(
        "a call in the analysis channel is reasoning",
        "backend/quire/frontend/chat/tool_formats.py",
        """            self.is_reasoning = False
            self.sink.begin_call(recipient[1])""",
        "            self.sink.begin_call(recipient[1])",
        ("tests/unit/test_chat_parsers.py::test_a_call_in_the_analysis_channel_is_no_reasoning",),
    ),
    Mutant(
        "values of a call share the limit",
        "backend/quire/frontend/chat/tool_formats.py",
        "self._value, self._num_held = [], 0",
        "self._value = []",
        ("tests/unit/test_chat_parsers.py::test_each_value_of_a_call_has_the_limit_for_itself",),
    ),
    Mutant(
        "a list's opening is written again behind its calls",
        "backend/quire/frontend/chat/tool_formats.py",
        'self._at += char in ",]"\n        self._opened = ""',
        'self._at += char in ",]"',
        ("tests/unit/test_chat_parsers.py::test_a_comma_and_no_call_behind_it_are_content",),
    ),
    Mutant(
        "a router's logits are rounded",
        "backend/quire/layers/moe.py",
        "logits = self.packed(x, torch.float32)",
        "logits = self.packed(x, torch.float32).to(x.dtype).float()",
        ("tests/unit/test_moe.py::test_a_router_in_bf16_decides_by_float32_logits",),
    ),
    Mutant(
        "GPTQ's zeros do not wrap round",
        "backend/quire/loader/quantized/formats.py",
        "zeros = zeros + self.zero_offset & (1 << self.bits) - 1",
        "zeros = zeros + self.zero_offset",
        ("tests/unit/test_quantized_formats.py::test_a_gptq_zero_of_all_ones_is_zero",),
    ),
    Mutant(
        "a slot is lost where two threads save one block",
        "backend/quire/kv_tiers/host.py",
        """                self._free.append(slot)
                if pinned and key""",
        "                if pinned and key",
        (
            "tests/unit/test_kv_tiers.py::TestHostTier::test_a_block_that_two_threads_save_at_once_takes_one_slot",
        ),
    ),
)

MUTANTS: tuple[Mutant, ...] = (
    *_SURVIVORS,
    *_OFF_THE_PATHS,
    *DRAWN,
    *_POOL,
    *_STATES,
    *_SCHEDULER,
    *_TIERS,
    *_WORKER,
    *_MODELS,
    *_KERNELS,
    *_FRONTEND,
    *_CHAT,
    *_ENSEMBLE,
    *_CLIENT,
    *_SIMULATOR,
)
