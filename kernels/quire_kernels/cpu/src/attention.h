// Causal attention of a ragged batch over its paged context, as kernels/quire_kernels/ops.py defines it.
//
// Sequences with few query rows go through attention_decode.h, others through attention_tiles.h. How a sequence is
// computed follows from its own lengths: its result does not depend on the batch around it, nor on the threads.
#pragma once

#include <algorithm>
#include <vector>

#include "attention_call.h"
#include "attention_decode.h"
#include "attention_tiles.h"
#include "gemm.h"
#include "layout.h"
#include "pool.h"

namespace quire {
namespace attention {

// Rows of one KV head up to which going over the cache once, without copying it, is the faster way.
constexpr int max_decode_rows = 16;

// The tasks of one sequence: num_parts (tiles of its queries, or splits of its context) for each KV head.
struct Work {
  int first_task;
  int sequence;
  int num_parts;
  int first_split;    // decode only; counted from position 0
  int64_t partials;   // decode only: its place among all partial results
  int counters;       // decode only: its place among the numbers of splits that are not done, one per KV head
};

template <class T, class KV>
void run(const Call<T>& call) {
  struct Partials;
  struct Counters;
  const Batch& batch = call.batch;
  const int heads = call.kv.num_kv_heads, groups = call.groups;
  const int tile_tokens = std::max(Tile<T, KV>::tile_rows / groups, 1);
  auto is_decode = [&](int sequence) {
    int num_new = call.num_new(sequence);
    return num_new == 1 || num_new * groups <= max_decode_rows;
  };

  thread_local std::vector<Work> memory;
  std::vector<Work>& works = memory;
  works.clear();
  int num_tasks = 0, num_counters = 0;
  int64_t num_partials = 0;
  // Tiles come first: they take longest.
  for (int i = 0; i < batch.num_seqs; ++i) {
    if (is_decode(i)) continue;
    int num_tiles = (call.num_new(i) + tile_tokens - 1) / tile_tokens;
    works.push_back({num_tasks, i, num_tiles, 0, 0, 0});
    num_tasks += num_tiles * heads;
  }
  const int num_tile_tasks = num_tasks;
  for (int i = 0; i < batch.num_seqs; ++i) {
    if (!is_decode(i)) continue;
    int first = call.seen_from(batch.seq_lens[i] - call.num_new(i)) / split_size;
    int num_splits = (batch.seq_lens[i] + split_size - 1) / split_size - first;
    works.push_back({num_tasks, i, num_splits, first, num_partials, num_counters});
    num_tasks += num_splits * heads;
    num_partials += num_splits * heads * Partial::size(call.num_new(i) * groups, call.kv.head_dim);
    num_counters += heads;
  }
  float* partials = scratch<Partials, float>(num_partials);
  int* counters = scratch<Counters, int>(num_counters);
  for (const Work& work : works)
    if (work.first_task >= num_tile_tasks) std::fill_n(counters + work.counters, heads, work.num_parts);

  parallel_for(num_tasks, [&](int task) {
    auto after = std::upper_bound(works.begin(), works.end(), task,
                                  [](int task, const Work& work) { return task < work.first_task; });
    const Work& work = *(after - 1);
    const int part = (task - work.first_task) / heads, head = (task - work.first_task) % heads;
    if (task < num_tile_tasks) {
      // The last tile first: it sees most.
      int first = (work.num_parts - 1 - part) * tile_tokens;
      int num_tokens = std::min(call.num_new(work.sequence) - first, tile_tokens);
      tile_task<T, KV>(call, work.sequence, head, first, num_tokens);
      return;
    }
    const int rows = call.num_new(work.sequence) * groups, seq_len = batch.seq_lens[work.sequence];
    const int64_t stride = Partial::size(rows, call.kv.head_dim);
    float* mine = partials + work.partials + int64_t(head) * work.num_parts * stride;
    const int start = (work.first_split + part) * split_size, stop = std::min(start + split_size, seq_len);
    const int first = std::max(start, call.seen_from(seq_len - call.num_new(work.sequence)));
    decode_split<T, KV>(call, work.sequence, head, first, stop, Partial(mine + part * stride, rows));
    // Whoever finishes the last split sees the others' results.
    if (__atomic_sub_fetch(counters + work.counters + head, 1, __ATOMIC_ACQ_REL) == 0)
      merge_splits(call, work.sequence, head, mine, work.num_parts, stride);
  });
}

}  // namespace attention

// query and out: [num_tokens][num_heads][head_dim], tokens of the query `query_stride` elements apart; keys and values
// of the new tokens are in the cache. The token at position p sees (p - window, p], or [0, p] if window is 0.
// Scores are q . k * scale, or softcap * tanh(q . k * scale / softcap) if softcap is not 0. scale is positive.
template <class T>
void paged_attention(const T* query, int64_t query_stride, int num_heads, const Matrix<T>& out,
                     const KVLayer& kv, const Batch& batch, float scale, int window, float softcap) {
  attention::Call<T> call{query, query_stride, out, kv, batch, num_heads / kv.num_kv_heads, scale, window, softcap};
  switch (kv.type) {
    case KVType::float32: return attention::run<T, float>(call);
    case KVType::bfloat16: return attention::run<T, bf16>(call);
    case KVType::int8: return attention::run<T, int8_t>(call);
  }
}

}  // namespace quire
