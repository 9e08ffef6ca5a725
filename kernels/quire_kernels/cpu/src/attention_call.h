// What both ways of computing attention share: the call, where keys and values are, and the softmax's exponential.
#pragma once

#include <algorithm>

#include "layout.h"
#include "matrix.h"
#include "simd.h"

namespace quire {
namespace attention {

constexpr float log2_e = 1.44269504088896341f;

// The maximum of no scores. Finite, so that differences are not NaN; far enough below every score.
constexpr float no_peak = -1e30f;

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

  // "Row" i of a sequence's KV head is query head i % groups of its new token i / groups.
  const T* query_row(int sequence, int head, int64_t row) const {
    return query + token_of(sequence, row) * query_stride + column_of(head, row);
  }
  Row<T> out_row(int sequence, int head, int64_t row) const {
    return out.row(token_of(sequence, row), column_of(head, row));
  }

  int num_new(int sequence) const { return batch.query_start_loc[sequence + 1] - batch.query_start_loc[sequence]; }
  // First position that a token at `position` sees.
  int seen_from(int position) const { return window ? std::max(position - window + 1, 0) : 0; }
  // The softmax's exponents, as powers of two, are this times `scores` after `cap`.
  float factor() const { return (softcap ? 1.0f : scale) * log2_e; }
  vec cap(vec score) const {
    return softcap ? mul(splat(softcap), tanh(mul(score, splat(scale / softcap)))) : score;
  }

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

// Lane i of the result is the sum of x[i]'s lanes.
inline vec sum_each(const vec x[width]) {
#if defined(__AVX512F__)
  vec y[8], z[4];
  for (int i = 0; i < 8; ++i)
    y[i] = add(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
  for (int i = 0; i < 4; ++i) {
    __m512d a = _mm512_castps_pd(y[2 * i]), b = _mm512_castps_pd(y[2 * i + 1]);
    z[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  for (int i = 0; i < 2; ++i)
    y[i] = add(_mm512_shuffle_f32x4(z[2 * i], z[2 * i + 1], 0x88),
               _mm512_shuffle_f32x4(z[2 * i], z[2 * i + 1], 0xdd));
  return add(_mm512_shuffle_f32x4(y[0], y[1], 0x88), _mm512_shuffle_f32x4(y[0], y[1], 0xdd));
#else
  vec y[4], z[2];
  for (int i = 0; i < 4; ++i)
    y[i] = add(_mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1]));
  for (int i = 0; i < 2; ++i) {
    __m256d a = _mm256_castps_pd(y[2 * i]), b = _mm256_castps_pd(y[2 * i + 1]);
    z[i] = add(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
  }
  return add(_mm256_permute2f128_ps(z[0], z[1], 0x20), _mm256_permute2f128_ps(z[0], z[1], 0x31));
#endif
}

}  // namespace attention
}  // namespace quire
