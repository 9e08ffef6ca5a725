// Causal attention of a ragged batch over its paged context, as kernels/quire_kernels/ops.py defines it.
//
// Sequences with few query rows go through attention_decode.h, others through attention_tiles.h. Both add in the order of
// attention_call.h: a row's result does not depend on the rows beside it, nor on the threads.
#pragma once

#include <algorithm>
#include <vector>

#include "attention_call.h"
#include "attention_decode.h"
#include "attention_decode_amx.h"
#include "attention_tiles.h"
#include "gemm.h"
#include "layout.h"
#include "pool.h"

namespace quire {
namespace attention {

// Rows of one KV head up to which going over the cache once, without copying it, is the faster way.
constexpr int max_decode_rows = 16;

// Positions that sequences have in common are read once for all of them from so many on, and in multiples of that.
constexpr int min_shared = 32;

// A sequence whose queries are computed in tiles: num_parts tiles for each KV head.
struct Tiled {
  int first_task, sequence, num_parts;
};

// One whose context is computed split by split.
struct Decoded {
  int sequence;
  int first_split, num_splits;  // counted from position 0
  int first_unit, num_units;    // too
  int64_t partials;             // its place among all partial results: [heads][num_units]
  int counters;                 // its place among the numbers of splits that are not done, one per KV head
};

// Decoded sequences [first, first + count) of `order` whose contexts begin with the same `shared` positions.
struct Cluster {
  int first, count, shared;
};

// What a task computes: a split of the sequences of a cluster, or of one of them.
struct Piece {
  int first, count, split, shared;
};

// How many positions at the beginning of two contexts are the same blocks, those of new tokens not counted.
inline int shared_positions(const Batch& batch, int block_size, int a, int b) {
  const int32_t *left = batch.block_table + a * batch.block_table_stride;
  const int32_t *right = batch.block_table + b * batch.block_table_stride;
  const int most = (std::min(batch.seq_lens[a], batch.seq_lens[b]) - 1) / block_size;
  int same = 0;
  while (same < most && left[same] == right[same]) ++same;
  return same * block_size;
}

// Orders sequences by what their contexts share: those with one new token, at most `most` together.
template <class T>
inline void cluster(const Call<T>& call, int most, const std::vector<Decoded>& decoded, std::vector<Cluster>& clusters,
                    std::vector<int>& order) {
  // `blocks`, `last`: first block (-1: nobody may join) and last sequence of each cluster; `next`: who follows a sequence.
  thread_local std::vector<int32_t> blocks;
  thread_local std::vector<int> last, next;
  blocks.clear();
  last.clear();
  clusters.clear();
  next.assign(decoded.size(), -1);
  for (int i = 0; i < int(decoded.size()); ++i) {
    const int sequence = decoded[i].sequence;
    const bool may_share = most > 1 && call.num_new(sequence) == 1;
    const int32_t block = may_share ? call.batch.block_table[sequence * call.batch.block_table_stride] : -1;
    size_t c = may_share ? 0 : clusters.size();
    int shared = 0;
    for (; c < clusters.size(); ++c) {
      // Most of them share nothing, and are many.
      if (blocks[c] != block || clusters[c].count >= most) continue;
      shared = shared_positions(call.batch, call.kv.block_size, decoded[clusters[c].first].sequence, sequence);
      if (shared >= min_shared && (clusters[c].count == 1 || shared >= clusters[c].shared)) break;
    }
    if (c == clusters.size()) {
      clusters.push_back({i, 1, 0});
      blocks.push_back(block);
      last.push_back(i);
      continue;
    }
    clusters[c].shared = clusters[c].count++ == 1 ? shared : std::min(shared, clusters[c].shared);
    next[last[c]] = i;
    last[c] = i;
  }
  order.clear();
  for (Cluster& c : clusters) {
    int i = c.first;
    c.first = int(order.size());
    for (; i >= 0; i = next[i]) order.push_back(i);
  }
}

template <class T, class KV>
void run(const Call<T>& call) {
  struct Partials;
  struct Counters;
  const Batch& batch = call.batch;
  const int heads = call.kv.num_kv_heads, groups = call.groups;
  const int tile_tokens = std::max(Tile<T, KV>::tile_rows / groups, 1);
  auto is_decode = [&](int sequence) {
    int num_new = call.num_new(sequence);
    return num_new == 1 || (num_new * groups <= max_decode_rows && !call.is_joint(sequence));
  };
  bool in_tiles = false;
#if defined(__AMX_BF16__)
  in_tiles = std::is_same_v<T, bf16> && decodes_in_tiles(call.kv, groups);
  static_assert(max_decode_rows <= max_together && min_shared % group_keys == 0, "what is together fits");
#endif

  thread_local std::vector<Tiled> tiled;
  thread_local std::vector<Decoded> decoded;
  thread_local std::vector<Cluster> clusters;
  thread_local std::vector<Piece> pieces;
  thread_local std::vector<int> order;
  tiled.clear();
  decoded.clear();
  pieces.clear();
  int num_tile_tasks = 0, num_counters = 0;
  int64_t num_partials = 0;
  for (int i = 0; i < batch.num_seqs; ++i) {
    if (!is_decode(i)) {
      int num_tiles = (call.num_new(i) + tile_tokens - 1) / tile_tokens;
      tiled.push_back({num_tile_tasks, i, num_tiles});
      num_tile_tasks += num_tiles * heads;
      continue;
    }
    const int from = call.seen_from(batch.seq_lens[i] - call.num_new(i)), last = batch.seq_lens[i] - 1;
    const int num_splits = last / split_size - from / split_size + 1, num_units = last / unit_size - from / unit_size + 1;
    decoded.push_back({i, from / split_size, num_splits, from / unit_size, num_units, num_partials, num_counters});
    num_partials += num_units * heads * Partial::size(call.num_new(i) * groups, call.kv.head_dim);
    num_counters += heads;
  }
  // Sequences that see a window may see none of what they have in common.
  cluster(call, in_tiles && !call.window ? max_decode_rows / groups : 1, decoded, clusters, order);
  for (const Cluster& c : clusters)
    for (int split = decoded[order[c.first]].first_split, left = c.count; left > 0; ++split) {
      const int shared = std::clamp(c.shared - split * split_size, 0, split_size) / min_shared * min_shared;
      left = 0;
      for (int m = 0; m < c.count; ++m) {
        const Decoded& who = decoded[order[c.first + m]];
        if (split >= who.first_split + who.num_splits) continue;
        ++left;
        if (shared == 0) pieces.push_back({c.first + m, 1, split, 0});
      }
      // What all share, all have.
      if (shared) pieces.push_back({c.first, c.count, split, shared});
    }
  float* partials = scratch<Partials, float>(num_partials);
  int* counters = scratch<Counters, int>(num_counters);
  for (const Decoded& who : decoded) std::fill_n(counters + who.counters, heads, who.num_splits);

  // Neighbouring heads are neighbours in memory.
  const int heads_each = in_tiles && heads % 2 == 0 ? 2 : 1;
  const int head_tasks = heads / heads_each;
  // Threads other than this one see its vectors through these.
  const Tiled *tiled_begin = tiled.data(), *tiled_end = tiled_begin + tiled.size();
  const Decoded* all_decoded = decoded.data();
  const Piece* all_pieces = pieces.data();
  const int* members_of = order.data();
  // Tiles come first: they take longest.
  parallel_for(num_tile_tasks + int(pieces.size()) * head_tasks, [&](int task) {
    if (task < num_tile_tasks) {
      auto after = std::upper_bound(tiled_begin, tiled_end, task,
                                    [](int task, const Tiled& work) { return task < work.first_task; });
      const Tiled& work = *(after - 1);
      const int part = (task - work.first_task) / heads, head = (task - work.first_task) % heads;
      // The last tile first: it sees most.
      int first = (work.num_parts - 1 - part) * tile_tokens;
      int num_tokens = std::min(call.num_new(work.sequence) - first, tile_tokens);
      tile_task<T, KV>(call, work.sequence, head, first, num_tokens);
      return;
    }
    const Piece& piece = all_pieces[(task - num_tile_tasks) / head_tasks];
    const int first_head = (task - num_tile_tasks) % head_tasks * heads_each;
    auto decoded_at = [&](int m) -> const Decoded& { return all_decoded[members_of[piece.first + m]]; };
    const int rows = call.num_new(decoded_at(0).sequence) * groups;
    const int64_t stride = Partial::size(rows, call.kv.head_dim);
    auto results = [&](const Decoded& who, int head, int first_unit) {
      return partials + who.partials + (int64_t(head) * who.num_units + first_unit - who.first_unit) * stride;
    };
    auto positions = [&](const Decoded& who, int& first, int& stop) {
      const int seq_len = batch.seq_lens[who.sequence];
      stop = std::min((piece.split + 1) * split_size, seq_len);
      first = std::max(piece.split * split_size, call.seen_from(seq_len - call.num_new(who.sequence)));
    };
    bool is_done = false;
#if defined(__AMX_BF16__)
    if constexpr (std::is_same_v<T, bf16>)
      if (in_tiles) {
        Member members[max_together];
        for (int m = 0; m < piece.count; ++m) {
          const Decoded& who = decoded_at(m);
          members[m].sequence = who.sequence;
          positions(who, members[m].first, members[m].stop);
          for (int h = 0; h < heads_each; ++h)
            members[m].to[h] = results(who, first_head + h, members[m].first / unit_size);
        }
        decode_tiles(call, members, piece.count, rows, piece.shared, first_head, heads_each, stride);
        is_done = true;
      }
#endif
    for (int head = first_head; head < first_head + heads_each; ++head) {
      if (!is_done) {
        const Decoded& who = decoded_at(0);
        int first, stop;
        positions(who, first, stop);
        decode_split<T, KV>(call, who.sequence, head, first, stop, results(who, head, first / unit_size), stride);
      }
      // Whoever finishes the last split sees the others' results.
      for (int m = 0; m < piece.count; ++m) {
        const Decoded& who = decoded_at(m);
        if (__atomic_sub_fetch(counters + who.counters + head, 1, __ATOMIC_ACQ_REL) == 0)
          merge_units(call, who.sequence, head, results(who, head, who.first_unit), who.num_units, stride);
      }
    }
  });
}

}  // namespace attention

// query and out: [num_tokens][num_heads][head_dim], tokens of the query `query_stride` elements apart; keys and values
// of the new tokens are in the cache. The token at position p sees (p - window, p], or [0, p] if window is 0; one of a joint
// sequence also sees all positions after its own.
// Scores are q . k * scale, or softcap * tanh(q . k * scale / softcap) if softcap is not 0. scale is positive. A head's sink,
// if there are any, is one more score whose value is zero.
template <class T>
void paged_attention(const T* query, int64_t query_stride, int num_heads, const Matrix<T>& out,
                     const KVLayer& kv, const Batch& batch, float scale, int window, float softcap,
                     const float* sinks) {
  attention::Call<T> call{query, query_stride, out, kv, batch, num_heads / kv.num_kv_heads, scale, window, softcap, sinks};
  switch (kv.type) {
    case KVType::float32: return attention::run<T, float>(call);
    case KVType::bfloat16: return attention::run<T, bf16>(call);
    case KVType::int8: return attention::run<T, int8_t>(call);
  }
}

}  // namespace quire
