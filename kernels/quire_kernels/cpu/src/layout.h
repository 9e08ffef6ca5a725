// The paged cache and a batch over it, as the operators receive them: views of memory that Python owns.
#pragma once

#include <cstdint>

#include "simd.h"

namespace quire {

enum class KVType : int32_t { float32 = 0, bfloat16 = 1, int8 = 2 };

// One layer's keys and values: [num_blocks][2][num_kv_heads][block_size][head_dim], keys at 0 of the second
// dimension and values at 1. A block's head is contiguous; the outer dimensions have strides, since a block holds
// all layers. int8: one scale per token and KV head, a number is its data times its scale.
struct KVLayer {
  void* data;
  bf16* scales;                                                 // [num_blocks][2][num_kv_heads][block_size]; or null
  int64_t block_stride, kv_stride, head_stride;                   // in elements of data
  int64_t scale_block_stride, scale_kv_stride, scale_head_stride; // in elements of scales
  KVType type;
  int32_t block_size, num_kv_heads;
  int32_t head_dim;  // a multiple of 16
};

// Sequence i owns the rows [query_start_loc[i], query_start_loc[i + 1]) of the batch; they are the last of its
// seq_lens[i] tokens, in order.
struct Batch {
  const int32_t* query_start_loc;  // [num_seqs + 1]
  const int32_t* seq_lens;         // [num_seqs]: context length, the new tokens included
  const int32_t* block_table;      // [num_seqs][block_table_stride]: block ids in order of position
  int64_t block_table_stride;
  const int64_t* slot_mapping;     // [num_tokens]: block id * block_size + offset of each new token
  int32_t num_seqs, num_tokens;
  const bool* joint;  // [num_seqs]: whether a sequence's new tokens see each other in both directions; null: no one's do
};

}  // namespace quire
