// What all ways of computing attention share: the call, where keys and values are, the softmax, and the order of additions.
//
// A row's result is the same to the last bit whichever way it is computed, so each of them does this. A context is cut at
// multiples of `unit_size` positions. A score has `score_chains` chains of additions over the dimensions, which take turns
// every 16 bytes of the key: few rows want short ways from memory to lanes. In a unit, weights are relative to its own
// largest score, their total has eight chains (every eighth position), and the weighted values are one chain in the order of
// positions. Units are added up in their order. `in_pairs`: both products take bfloat16, weights too, and a step of a
// chain is VDPBF16PS's for two dimensions or positions; TDPBF16PS has one chain, with steps of 32. What a row does not
// see has a weight of zero, which changes no sum.
#pragma once

#include <algorithm>
#include <type_traits>

#include "layout.h"
#include "matrix.h"
#include "simd.h"

namespace quire {
namespace attention {

constexpr float log2_e = 1.44269504088896341f;

// The maximum of no scores. Finite, so that differences are not NaN; far enough below every score.
constexpr float no_peak = -1e30f;

#if defined(__AVX512BF16__)
template <class T, class KV>
constexpr bool in_pairs = std::is_same_v<T, bf16> && !std::is_same_v<KV, float>;
#else
template <class T, class KV>
constexpr bool in_pairs = false;
#endif

constexpr int unit_size = 256;
constexpr int score_chains = width / 4;

// Calls f(chain, whether it is the last) in the order in which Score takes their results.
template <class F>
inline void for_chains(F&& f) {
  if constexpr (score_chains == 4) f(0, false), f(2, false), f(1, false), f(3, true);
  else f(0, false), f(1, true);
}

constexpr int unit_step = 32;  // positions that are computed together: what begins within them is hidden up to there

template <class T>
struct Call {
  const T* query;
  int64_t query_stride;  // elements between tokens
  Matrix<T> out;
  const KVLayer& kv;
  const Batch& batch;
  int groups;  // query heads per KV head
  float scale;
  int window;     // 0: none
  float softcap;  // 0: none
  const float* sinks;  // [num_heads], as scores behind `cap`; null: none

  // "Row" i of a sequence's KV head is query head i % groups of its new token i / groups.
  const T* query_row(int sequence, int head, int64_t row) const {
    return query + token_of(sequence, row) * query_stride + column_of(head, row);
  }
  Row<T> out_row(int sequence, int head, int64_t row) const {
    return out.row(token_of(sequence, row), column_of(head, row));
  }

  int num_new(int sequence) const { return batch.query_start_loc[sequence + 1] - batch.query_start_loc[sequence]; }
  bool is_joint(int sequence) const { return batch.joint && batch.joint[sequence]; }
  // First position that a token at `position` sees.
  int seen_from(int position) const { return window ? std::max(position - window + 1, 0) : 0; }
  // The softmax's exponents, as powers of two, are this times `scores` after `cap`.
  float factor() const { return (softcap ? 1.0f : scale) * log2_e; }
  vec cap(vec score) const {
    return softcap ? mul(splat(softcap), tanh(mul(score, splat(scale / softcap)))) : score;
  }
  // A row's softmax before its first unit: the maximum of the exponents, and the sum of the weights.
  float first_peak(int head, int64_t row) const {
    return sinks ? std::max(sinks[head * groups + row % groups] * log2_e, no_peak) : no_peak;
  }
  float first_total() const { return sinks ? 1.0f : 0.0f; }

 private:
  int64_t token_of(int sequence, int64_t row) const { return batch.query_start_loc[sequence] + row / groups; }
  int64_t column_of(int head, int64_t row) const { return (int64_t(head) * groups + row % groups) * kv.head_dim; }
};

// Calls f(index of p - begin, block id, offset in the block, count) for the runs of positions [begin, end) that lie
// behind each other in memory.
template <class F>
inline void for_runs(const KVLayer& kv, const int32_t* blocks, int begin, int end, F&& f) {
  for (int p = begin; p < end;) {
    int index = p / kv.block_size, offset = p - index * kv.block_size;
    int count = std::min(end - p, kv.block_size - offset);
    f(p - begin, int64_t(blocks[index]), offset, count);
    p += count;
  }
}

// rows[i]: the key (half 0) or value (half 1) of position begin + i.
template <class KV>
inline void locate(const KVLayer& kv, const int32_t* blocks, int head, int half, int begin, int end,
                   const KV** rows) {
  const KV* data = static_cast<const KV*>(kv.data) + half * kv.kv_stride + head * kv.head_stride;
  for_runs(kv, blocks, begin, end, [&](int first, int64_t block, int offset, int count) {
    const KV* row = data + block * kv.block_stride + int64_t(offset) * kv.head_dim;
    for (int i = 0; i < count; ++i, row += kv.head_dim) rows[first + i] = row;
  });
}

// scales[i]: that of the key or value of position begin + i.
inline void locate_scales(const KVLayer& kv, const int32_t* blocks, int head, int half, int begin, int end,
                          float* scales) {
  const bf16* data = kv.scales + half * kv.scale_kv_stride + head * kv.scale_head_stride;
  for_runs(kv, blocks, begin, end, [&](int first, int64_t block, int offset, int count) {
    const bf16* from = data + block * kv.scale_block_stride + offset;
    for (int i = 0; i < count; ++i) scales[first + i] = to_float(from[i]);
  });
}

// 2^x for x up to some hundred, relative error below 2e-7; exactly 1 at 0, 0 far below (-inf included), NaN at NaN.
inline vec exp2(vec x) {
#if defined(__AVX512F__)
  // x - floor(x), and 0 for -inf.
  vec r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
  const vec low = splat(-126.0f);
  vec clamped = max(low, x), n = _mm256_floor_ps(clamped), r = sub(clamped, n);
#endif
  vec p = splat(0.00186713007f);
  p = fma(p, r, splat(0.00901703032f));
  p = fma(p, r, splat(0.0557999131f));
  p = fma(p, r, splat(0.24016445f));
  p = fma(p, r, splat(0.693151312f));
  p = fma(p, r, splat(1.0f));
#if defined(__AVX512F__)
  return _mm512_scalef_ps(p, x);  // p * 2^floor(x)
#else
  return zero_where_less(scale_by_power(p, n), x, low);
#endif
}

inline float exp2(float x) {
  alignas(64) float lanes[width];
  store(lanes, exp2(splat(x)));
  return lanes[0];
}

// The sum of eight, in the one order in which weights are added up: those of every eighth position first.
template <class V, class F>
inline V sum_eight(const V* x, F&& add) {
  return add(add(add(x[0], x[4]), add(x[2], x[6])), add(add(x[1], x[5]), add(x[3], x[7])));
}

// The softmax of a row over the units so far: what was added up before is multiplied by `keep`, what comes by `gain`.
struct Running {
  vec peak, total, keep, gain;

  void add(vec unit_peak, vec unit_total) {
    vec before = peak;
    peak = max(before, unit_peak);
    keep = exp2(sub(before, peak));
    gain = exp2(sub(unit_peak, peak));
    total = fma(total, keep, mul(unit_total, gain));
  }
  static vec sums(vec before, vec keep, vec unit, vec gain) { return fma(unit, gain, mul(before, keep)); }
};

}  // namespace attention
}  // namespace quire
