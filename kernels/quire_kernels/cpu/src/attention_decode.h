// Attention of few query rows: one pass over keys and values as they lie in the cache, split along the context.
//
// A split is a fixed range of positions. All query heads of a KV head, and all new tokens of the sequence, share
// each load of a key or value. A split's result is its softmax's maximum and sum and the weighted sum of values;
// those of a context are added up in the order of positions, whoever has computed them.
#pragma once

#include "attention_call.h"
#include "gemm.h"

namespace quire {
namespace attention {

#if defined(__AMX_BF16__)
constexpr int split_size = 512;   // positions
#else
constexpr int split_size = 256;
#endif
constexpr int value_run = 32;     // values that are added up while the sums are in registers
constexpr int prefetch_bytes = 4096;  // of keys or values, ahead of those in use
constexpr int max_prefetch_rows = 64;
constexpr int num_streams = 8;

// The result of a split, for all rows.
struct Partial {
  float* peaks;   // [rows]: maximum of the exponents
  float* totals;  // [rows]: sum of the weights
  float* sums;    // [rows][head_dim]: sum of the weighted values
  static int64_t size(int rows, int head_dim) { return int64_t(rows + 7) / 8 * 16 + int64_t(rows) * head_dim; }
  Partial(float* memory, int rows) : peaks(memory), totals(memory + rows), sums(memory + (rows + 7) / 8 * 16) {}
};

template <class KV>
inline int prefetch_rows(int size) {
  return std::min(std::max(prefetch_bytes / (size * int(sizeof(KV))), 1), max_prefetch_rows);
}

// Asks for the cache line that begins at `row[d]`, if one does. Prefetches are spread over the arithmetic: many at
// once would wait for each other.
template <class KV>
inline void prefetch(const KV* row, int d) {
  if (d * sizeof(KV) % 64 == 0) _mm_prefetch(reinterpret_cast<const char*>(row + d), _MM_HINT_T0);
}

// Puts what belongs to the positions of a split into the order in which they are computed: an eighth beside the
// other, position 0, count / 8, count / 4 ... Blocks are pieces of some KiB anywhere in memory, and several of them
// read side by side keep more of the processor's prefetchers busy than one after the other.
template <class T>
inline void interleave(T* rows, int count) {
  const int part = count / num_streams;
  T ordered[split_size];
  for (int i = 0; i < part; ++i)
    for (int s = 0; s < num_streams; ++s) ordered[i * num_streams + s] = rows[s * part + i];
  std::copy(ordered, ordered + part * num_streams, rows);
}

// scores[r][k] = query[r] . keys[k], for `rows` rows and `count` keys, rounded up to `width`. There are pointers to
// prefetch_rows(size) rows more.
template <int rows, class KV>
inline void score_keys(const float* query, const KV* const* keys, int count, int size, float* scores) {
  constexpr int step = width / rows;
  const int ahead = prefetch_rows<KV>(size);
  for (int k = 0; k < count; k += step) {
    vec sums[width];
    for (vec& sum : sums) sum = zero();
    for (int d = 0; d < size; d += width) {
      vec q[rows];
      for (int r = 0; r < rows; ++r) q[r] = load(query + r * size + d);
      for (int j = 0; j < step; ++j) {
        prefetch(keys[k + j + ahead], d);
        vec key = load(keys[k + j] + d);
        for (int r = 0; r < rows; ++r) sums[r * step + j] = fma(q[r], key, sums[r * step + j]);
      }
    }
    alignas(64) float results[width];
    store(results, sum_each(sums));
    for (int r = 0; r < rows; ++r) std::memcpy(scores + r * split_size + k, results + r * step, step * sizeof(float));
  }
}

// sums[r][0..vecs * width) += weights[r][k] * values[k][offset ...], over `count` values.
template <int rows, int vecs, class KV>
inline void weigh_slice(const float* weights, const KV* const* values, int offset, int count, int size,
                        float* sums) {
  const int ahead = prefetch_rows<KV>(size);
  vec acc[rows][vecs];
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < vecs; ++v) acc[r][v] = load(sums + r * size + v * width);
  for (int k = 0; k < count; ++k) {
    vec value[vecs];
    for (int v = 0; v < vecs; ++v) {
      prefetch(values[k + ahead], offset + v * width);
      value[v] = load(values[k] + offset + v * width);
    }
    for (int r = 0; r < rows; ++r) {
      vec weight = splat(weights[r * split_size + k]);
      for (int v = 0; v < vecs; ++v) acc[r][v] = fma(weight, value[v], acc[r][v]);
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < vecs; ++v) store(sums + r * size + v * width, acc[r][v]);
}

// The same for the dimensions from `offset` on, in slices of `vecs` vectors and then narrower ones.
template <int rows, int vecs, class KV>
inline void weigh_values(const float* weights, const KV* const* values, int offset, int count, int size,
                         float* sums) {
  for (; offset + vecs * width <= size; offset += vecs * width)
    weigh_slice<rows, vecs>(weights, values, offset, count, size, sums + offset);
  if constexpr (vecs > 1) weigh_values<rows, vecs / 2>(weights, values, offset, count, size, sums);
}

// f(first row, number of them as a constant) for all rows, at most four at a time.
template <class F>
inline void for_rows(int rows, F&& f) {
  int row = 0;
  for (; row + 4 <= rows; row += 4) f(row, std::integral_constant<int, 4>());
  if (rows & 2) f(row, std::integral_constant<int, 2>()), row += 2;
  if (rows & 1) f(row, std::integral_constant<int, 1>());
}

// Makes scores, of which a row sees [begin, end), into weights, and gives their maximum and sum.
template <class T>
inline void softmax_row(const Call<T>& call, const float* key_scales, const float* value_scales, int begin, int end,
                        int count, float* scores, float& peak, float& total) {
  if (key_scales || call.softcap)
    for (int k = 0; k < count; k += width) {
      vec score = load(scores + k);
      store(scores + k, call.cap(key_scales ? mul(score, load(key_scales + k)) : score));
    }
  const float hidden = -std::numeric_limits<float>::infinity();
  std::fill(scores, scores + begin, hidden);
  std::fill(scores + end, scores + count, hidden);
  vec tops = splat(hidden);
  for (int k = 0; k < count; k += width) tops = max(tops, load(scores + k));
  peak = std::max(largest(tops) * call.factor(), no_peak);
  vec factor = splat(call.factor()), shift = splat(-peak), sums = zero();
  for (int k = 0; k < count; k += width) {
    vec weight = exp2(fma(load(scores + k), factor, shift));
    sums = add(sums, weight);
    store(scores + k, value_scales ? mul(weight, load(value_scales + k)) : weight);
  }
  total = sum(sums);
}

// The positions [first, stop) of a sequence, at most split_size, under one KV head.
template <class T, class KV>
inline void decode_split(const Call<T>& call, int sequence, int head, int first, int stop, const Partial& to) {
  struct Query;
  struct Scores;
  const KVLayer& kv = call.kv;
  const int size = kv.head_dim, num_new = call.num_new(sequence), rows = num_new * call.groups;
  const int first_new = call.batch.seq_lens[sequence] - num_new;
  const int32_t* blocks = call.batch.block_table + sequence * call.batch.block_table_stride;

  // Keys, repeating the last up to whole vectors, then values, then the last again for who prefetches.
  const KV* context[2 * split_size + max_prefetch_rows + width];
  const int count = stop - first, padded = (count + width - 1) / width * width;
  const KV** values = context + padded;
  locate(kv, blocks, head, 0, first, stop, context);
  locate(kv, blocks, head, 1, first, stop, values);
  // The row of a single new token sees all of the positions, so that their order does not matter.
  const bool is_interleaved = num_new == 1;
  if (is_interleaved) interleave(context, count), interleave(values, count);
  std::fill(context + count, values, context[count - 1]);
  std::fill(values + count, values + count + max_prefetch_rows, values[count - 1]);
  alignas(64) float key_scales[split_size], value_scales[split_size];
  constexpr bool is_quantized = std::is_same<KV, int8_t>::value;
  if constexpr (is_quantized) {
    locate_scales(kv, blocks, head, 0, first, stop, key_scales);
    locate_scales(kv, blocks, head, 1, first, stop, value_scales);
    if (is_interleaved) interleave(key_scales, count), interleave(value_scales, count);
    std::fill(key_scales + count, key_scales + padded, 0.0f);
    std::fill(value_scales + count, value_scales + padded, 0.0f);
  }

  float* query = scratch<Query, float>(size_t(rows) * size);
  for (int r = 0; r < rows; ++r) {
    const T* from = call.query_row(sequence, head, r);
    for (int d = 0; d < size; d += width) store(query + r * size + d, load(from + d));
  }
  float* scores = scratch<Scores, float>(size_t(rows) * split_size);
  for_rows(rows, [&](int row, auto n) {
    score_keys<n>(query + row * size, context, count, size, scores + row * split_size);
  });
  for (int r = 0; r < rows; ++r) {
    int position = first_new + r / call.groups;
    int begin = std::clamp(call.seen_from(position) - first, 0, count);
    int end = std::clamp(position + 1 - first, begin, count);
    softmax_row(call, is_quantized ? key_scales : nullptr, is_quantized ? value_scales : nullptr, begin, end, padded,
                scores + r * split_size, to.peaks[r], to.totals[r]);
  }
  std::fill(to.sums, to.sums + int64_t(rows) * size, 0.0f);
  for (int k = 0; k < count; k += value_run) {
    int run = std::min(value_run, count - k);
    for_rows(rows, [&](int row, auto n) {
      // As many sums as hide the latency of an addition.
      constexpr int most = width == 16 ? 16 : 8, vecs = std::min(most / int(n), 8);
      weigh_values<n, vecs>(scores + row * split_size + k, values + k, 0, run, size, to.sums + row * size);
    });
  }
}

// Adds up `count` splits, `stride` numbers apart, and writes the rows.
template <class T>
inline void merge_splits(const Call<T>& call, int sequence, int head, float* partials, int count, int64_t stride) {
  const int size = call.kv.head_dim, rows = call.num_new(sequence) * call.groups;
  for (int r = 0; r < rows; ++r) {
    float peak = no_peak, total = 0.0f;
    for (int s = 0; s < count; ++s) peak = std::max(peak, Partial(partials + s * stride, rows).peaks[r]);
    Partial result(partials, rows);
    float* sums = result.sums + int64_t(r) * size;
    for (int s = 0; s < count; ++s) {
      Partial part(partials + s * stride, rows);
      float weight = exp2(part.peaks[r] - peak);
      total += part.totals[r] * weight;
      vec factor = splat(weight);
      const float* from = part.sums + int64_t(r) * size;
      for (int d = 0; d < size; d += width)
        store(sums + d, s ? fma(load(from + d), factor, load(sums + d)) : mul(load(from + d), factor));
    }
    vec factor = splat(1.0f / total);
    const Row<T> out = call.out_row(sequence, head, r);
    for (int d = 0; d < size; d += width) store(out.at(d), mul(load(sums + d), factor));
  }
}

}  // namespace attention
}  // namespace quire
