// Attention of few query rows: one pass over keys and values as they lie in the cache, split along the context.
//
// A split is a fixed range of positions, one unit or several. All query heads of a KV head, and all new tokens of the
// sequence, share each load of a key or value. A unit's result is its softmax's maximum and sum and the weighted sum of
// values; those of a context are added up in the order of positions, whoever has computed them.
#pragma once

#include <tuple>

#include "attention_call.h"
#include "gemm.h"

namespace quire {
namespace attention {

#if defined(__AMX_BF16__)
constexpr int split_size = 512;   // positions
#else
constexpr int split_size = 256;
#endif
constexpr int prefetch_bytes = 8192;  // of keys or values, ahead of those in use
constexpr int max_prefetch_rows = 64;
constexpr int num_streams = 8;

// The result of a unit, for all rows.
struct Partial {
  float* peaks;   // [rows]: maximum of the exponents
  float* totals;  // [rows]: sum of the weights
  float* sums;    // [rows][row_size]: sum of the weighted values
  static int row_size(int head_dim) { return (head_dim + 31) / 32 * 32; }
  static int64_t size(int rows, int head_dim) { return int64_t(rows + 7) / 8 * 16 + int64_t(rows) * row_size(head_dim); }
  Partial(float* memory, int rows) : peaks(memory), totals(memory + rows), sums(memory + (rows + 7) / 8 * 16) {}
};

// Asks for a cache line in the second-level cache: streams lie multiples of 4 KiB apart, and a first-level one of eight ways
// (Zen 4) loses again what is asked for this far ahead. Prefetches are spread over the arithmetic: many at once would wait for
// each other.
// Always inlined: GCC takes a function that does nothing else for one without effects, and drops calls of it.
template <class KV>
inline __attribute__((always_inline)) void prefetch(const KV* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
}

template <class KV>
inline int prefetch_rows(int size) {
  return std::min(std::max(prefetch_bytes / (size * int(sizeof(KV))), 1), max_prefetch_rows);
}

// The bytes of a key from dimension `d` on, and zeros behind `size`.
template <class KV>
inline vec load_key(const KV* key, int d, int size) {
  constexpr int lane = 4 / sizeof(KV);
  const float* from = reinterpret_cast<const float*>(key + d);
  return size - d >= width * lane ? load(from) : load_first(from, (size - d) / lane);
}

// Of four keys to lanes: lane 4 c + j of columns[i] has the four bytes i of 16 of key j, which belong to chain c.
template <class KV>
inline void load_columns(const KV* const* keys, int ahead, int d, int size, vec columns[4]) {
  vec x[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    prefetch(keys[j + ahead] + d);
    x[j] = load_key(keys[j], d, size);
  }
  vec low = unpack_low(x[0], x[1]), high = unpack_high(x[0], x[1]);
  vec low2 = unpack_low(x[2], x[3]), high2 = unpack_high(x[2], x[3]);
  columns[0] = unpack_low_pairs(low, low2), columns[1] = unpack_high_pairs(low, low2);
  columns[2] = unpack_low_pairs(high, high2), columns[3] = unpack_high_pairs(high, high2);
}

// A block of a query as load_columns() has keys: columns[i] of the four bytes i of each 16.
inline void spread_query(vec block, float* to, int step) {
  store(to, lanes_of_four<0>(block));
  store(to + step, lanes_of_four<1>(block));
  store(to + 2 * step, lanes_of_four<2>(block));
  store(to + 3 * step, lanes_of_four<3>(block));
}

// Lane i of the result is the score of key i: sums[i / 4] has its chains.
template <int rows>
inline vec add_chains(const vec sums[score_chains][rows], int r) {
#if defined(__AVX512F__)
  auto fold = [](vec a, vec b) { return add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee)); };
  vec a = fold(sums[0][r], sums[1][r]), b = fold(sums[2][r], sums[3][r]);
  return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
#else
  return add(_mm256_permute2f128_ps(sums[0][r], sums[1][r], 0x20), _mm256_permute2f128_ps(sums[0][r], sums[1][r], 0x31));
#endif
}

// Calls f(number N of a column, N as a constant), for those of a lane.
template <class KV, class F, int... N>
inline void for_numbers(vec column, F&& f, std::integer_sequence<int, N...>) {
  (f(number<4 / sizeof(KV), N>(column), std::integral_constant<int, N>()), ...);
}
template <class KV, class F>
inline void for_numbers(vec column, F&& f) {
  for_numbers<KV>(column, f, std::make_integer_sequence<int, 4 / sizeof(KV)>());
}

// Chains of a number of sums by fused additions. `as_tiles`: as TDPBF16PS adds them, of 32 numbers the even ones and the odd
// ones in chains of their own.
template <int count, bool as_tiles>
struct Chains {
  vec sums[count];
  vec parts[as_tiles ? count : 1][2];

  // The step of sum i with number n.
  void add(int i, int n, vec a, vec b) {
    vec& to = as_tiles ? parts[i][n % 2] : sums[i];
    to = fma(a, b, to);
  }
  void begin() {
    if constexpr (as_tiles)
      for (auto& part : parts) part[0] = part[1] = zero();
  }
  void end() {
    if constexpr (as_tiles)
#pragma GCC unroll 16
      for (int i = 0; i < count; ++i) sums[i] = quire::add(sums[i], quire::add(parts[i][0], parts[i][1]));
  }
};

// The two products for few rows, in float32. `Query` and `Weight`: what queries and weights are made into.
template <class KV, bool as_tiles>
struct FewInFloat {
  using Query = float;
  using Weight = float;
  using Mode = std::conditional_t<as_tiles, FlushSubnormals, std::tuple<>>;
  static constexpr int lane = 4 / sizeof(KV), block = width * lane;  // numbers per lane and vector of a key
  // Floats of a row: [blocks of dimensions][4 columns][numbers of a lane][width]; as tiles: the dimensions, in whole blocks.
  static constexpr int query_size(int size) { return (size + block - 1) / block * block * (as_tiles ? 1 : 4); }

  template <class T>
  static void load_query(const T* from, int size, Query* to) {
    for (int d = 0; d < size; d += block, to += as_tiles ? block : 4 * block) {
      alignas(64) float numbers[lane][width];
      for (int i = 0; i < block; ++i)
        (as_tiles ? to[i] : numbers[i % lane][i / lane]) = d + i < size ? to_float(from[d + i]) : 0.0f;
      if (!as_tiles)
        for (int n = 0; n < lane; ++n) spread_query(load(numbers[n]), to + n * width, lane * width);
    }
  }

  static void put(Weight* to, vec weights) {
    bf16 rounded[width];
    if (as_tiles) store(rounded, weights), weights = load(rounded);
    store(to, weights);
  }

  // scores[r][k] = query[r] . keys[k], for `rows` rows and `count` keys, a multiple of unit_step.
  template <int rows>
  static void score(const Query* query, const KV* const* keys, int count, int size, float* scores) {
    const int row_size = query_size(size), ahead = prefetch_rows<KV>(size);
    for (int k = 0; k < count; k += width, keys += width) {
      if constexpr (as_tiles) {
        Chains<rows, true> chains = {};
        for (int d = 0; d < size; d += block) {
          vec columns[width];
          for (int j = 0; j < width; ++j) columns[j] = load_key(keys[j], d, size);
          transpose(columns);
          for (int i = 0; i < width; ++i) {
            if (i * lane % 32 == 0) chains.begin();
            for_numbers<KV>(columns[i], [&](vec key, auto n) __attribute__((always_inline)) {
              for (int r = 0; r < rows; ++r) chains.add(r, n, splat(query[d + i * lane + n + r * row_size]), key);
            });
            if ((i + 1) * lane % 32 == 0) chains.end();
          }
        }
        for (int r = 0; r < rows; ++r) store(scores + r * unit_size + k, chains.sums[r]);
      } else {
        vec sums[score_chains][rows];
        for (auto& group : sums)
          for (vec& sum : group) sum = zero();
#pragma GCC unroll 4
        for (int g = 0; g < score_chains; ++g) {
          const float* at = query;
          for (int d = 0; d < size; d += block, at += 4 * block) {
            vec columns[4];
            load_columns(keys + 4 * g, ahead, d, size, columns);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i)
              for_numbers<KV>(columns[i], [&](vec key, auto n) __attribute__((always_inline)) {
#pragma GCC unroll 4
                for (int r = 0; r < rows; ++r)
                  sums[g][r] = fma(load(at + (i * lane + n) * width + r * row_size), key, sums[g][r]);
              });
          }
        }
        for (int r = 0; r < rows; ++r) store(scores + r * unit_size + k, add_chains<rows>(sums, r));
      }
    }
  }

  // sums[r][0..vecs * width) += weights[r][k] * values[k][offset ...], over `count` values, at most unit_step.
  template <int rows, int vecs>
  static void weigh_slice(const Weight* weights, const KV* const* values, int offset, int count, int size, float* sums) {
    const int row_size = Partial::row_size(size), ahead = prefetch_rows<KV>(size);
    Chains<vecs, as_tiles> chains[rows];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < vecs; ++v) chains[r].sums[v] = load(sums + r * row_size + v * width);
      chains[r].begin();
    }
    auto step = [&](int k, int parity) __attribute__((always_inline)) {
      vec value[vecs];
#pragma GCC unroll 16
      for (int v = 0; v < vecs; ++v) {
        if (v * width * sizeof(KV) % 64 == 0) prefetch(values[k + ahead] + offset + v * width);
        value[v] = load(values[k] + offset + v * width);
      }
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        vec weight = splat(weights[r * unit_size + k]);
#pragma GCC unroll 16
        for (int v = 0; v < vecs; ++v) chains[r].add(v, parity, weight, value[v]);
      }
    };
    if (as_tiles)
      for (int k = 0; k < count; k += 2) step(k, 0), step(k + 1, 1);
    else
      for (int k = 0; k < count; ++k) step(k, 0);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      chains[r].end();
#pragma GCC unroll 16
      for (int v = 0; v < vecs; ++v) store(sums + r * row_size + v * width, chains[r].sums[v]);
    }
  }

  // The same for the dimensions from `offset` on, in slices of `vecs` vectors and then narrower ones: as many sums as hide
  // the latency of an addition.
  template <int rows, int vecs = std::min((width == 16 ? 16 : 8) / (as_tiles ? 2 : 1) / rows, 8)>
  static void weigh(const Weight* weights, const KV* const* values, int count, int size, float* sums, int offset = 0) {
    for (; offset + vecs * width <= size; offset += vecs * width)
      weigh_slice<rows, vecs>(weights, values, offset, count, size, sums + offset);
    if constexpr (vecs > 1) weigh<rows, vecs / 2>(weights, values, count, size, sums, offset);
  }

  static void finish(int, float*) {}
};

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

// The same in pairs of bfloat16.
template <class KV>
struct FewInPairs {
  using Query = int32_t;
  using Weight = bf16;
  using Mode = std::tuple<>;
  static constexpr int pairs = 2 / sizeof(KV), block = 2 * pairs * width;  // pairs of a lane, dimensions of a vector of a key
  static constexpr int query_size(int size) { return (size + block - 1) / block * block * 2; }

  static void load_query(const bf16* from, int size, Query* to) {
    for (int d = 0; d < size; d += block, to += 2 * block) {
      alignas(64) bf16 numbers[pairs][width][2];
      for (int i = 0; i < block; i += 2)
        for (int n = 0; n < 2; ++n)
          numbers[i / 2 % pairs][i / 2 / pairs][n] = d + i < size ? from[d + i + n] : bf16(0);
      for (int p = 0; p < pairs; ++p)
        spread_query(load(reinterpret_cast<const float*>(numbers[p])), reinterpret_cast<float*>(to) + p * width, pairs * width);
    }
  }

  static void put(Weight* to, vec weights) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(weights)); }

  template <int rows>
  static void score(const Query* query, const KV* const* keys, int count, int size, float* scores) {
    const int row_size = query_size(size), ahead = prefetch_rows<KV>(size);
    for (int k = 0; k < count; k += width, keys += width) {
      vec sums[score_chains][rows];
      for (auto& group : sums)
        for (vec& sum : group) sum = zero();
#pragma GCC unroll 4
      for (int g = 0; g < score_chains; ++g) {
        const Query* at = query;
        for (int d = 0; d < size; d += block, at += 2 * block) {
          vec columns[4];
          load_columns(keys + 4 * g, ahead, d, size, columns);
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
            for (int p = 0; p < pairs; ++p) {
              vec pair = columns[i];
              if constexpr (pairs == 2)
                pair = p ? both(number<4, 2>(pair), number<4, 3>(pair)) : both(number<4, 0>(pair), number<4, 1>(pair));
#pragma GCC unroll 4
              for (int r = 0; r < rows; ++r)
                sums[g][r] = _mm512_dpbf16_ps(sums[g][r], (__m512bh)pair,
                                              (__m512bh)_mm512_loadu_si512(at + (i * pairs + p) * width + r * row_size));
            }
        }
      }
      for (int r = 0; r < rows; ++r) store(scores + r * unit_size + k, add_chains<rows>(sums, r));
    }
  }

  // 32 dimensions at a time; `count` is even. Sums have their own order within 32 until finish().
  template <int rows, int vecs>
  static void weigh_slice(const Weight* weights, const KV* const* values, int offset, int count, int size, float* sums) {
    const int row_size = Partial::row_size(size), ahead = prefetch_rows<KV>(size);
    vec acc[rows][vecs][2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < vecs; ++v)
#pragma GCC unroll 16
        for (int h = 0; h < 2; ++h) acc[r][v][h] = load(sums + r * row_size + v * 32 + h * 16);
    for (int k = 0; k < count; k += 2) {
      __m512bh pairs[vecs][2];
#pragma GCC unroll 16
      for (int v = 0; v < vecs; ++v) {
        const int d = offset + v * 32;
        if (v * 32 * sizeof(KV) % 64 == 0) prefetch(values[k + ahead] + d), prefetch(values[k + 1 + ahead] + d);
        take(values[k] + d, values[k + 1] + d, size - d, pairs[v]);
      }
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        int32_t bits;
        std::memcpy(&bits, weights + r * unit_size + k, 4);
        const __m512bh weight = (__m512bh)_mm512_set1_epi32(bits);
#pragma GCC unroll 16
        for (int v = 0; v < vecs; ++v)
#pragma GCC unroll 16
          for (int h = 0; h < 2; ++h) acc[r][v][h] = _mm512_dpbf16_ps(acc[r][v][h], pairs[v][h], weight);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < vecs; ++v)
#pragma GCC unroll 16
        for (int h = 0; h < 2; ++h) store(sums + r * row_size + v * 32 + h * 16, acc[r][v][h]);
  }

  template <int rows, int vecs = std::min(8 / rows, 4)>
  static void weigh(const Weight* weights, const KV* const* values, int count, int size, float* sums, int offset = 0) {
    for (; offset + vecs * 32 <= Partial::row_size(size); offset += vecs * 32)
      weigh_slice<rows, vecs>(weights, values, offset, count, size, sums + offset);
    if constexpr (vecs > 1) weigh<rows, vecs / 2>(weights, values, count, size, sums, offset);
  }

  static void finish(int size, float* sums) {
    if (sizeof(KV) == 1) return;
    const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i back = _mm512_add_epi32(front, _mm512_set1_epi32(8));
    for (int d = 0; d < size; d += 32) {
      vec low = load(sums + d), high = load(sums + d + 16);
      store(sums + d, _mm512_permutex2var_ps(low, front, high));
      store(sums + d + 16, _mm512_permutex2var_ps(low, back, high));
    }
  }

 private:
  // Pairs of numbers that bfloat16 has exactly.
  static vec both(vec first, vec second) {
    return _mm512_castsi512_ps(_mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(_mm512_castps_si512(first), 16),
                                                       _mm512_castps_si512(second)));
  }

  // Pairs of 32 dimensions of two values, of which there are `left`.
  static void take(const bf16* first, const bf16* second, int left, __m512bh pairs[2]) {
    const __mmask32 there = left >= 32 ? ~0u : 0xffffu;
    __m512i a = _mm512_maskz_loadu_epi16(there, first), b = _mm512_maskz_loadu_epi16(there, second);
    pairs[0] = (__m512bh)_mm512_unpacklo_epi16(a, b);
    pairs[1] = (__m512bh)_mm512_unpackhi_epi16(a, b);
  }
  static void take(const int8_t* first, const int8_t* second, int left, __m512bh pairs[2]) {
    pairs[0] = (__m512bh)both(load(first), load(second));
    pairs[1] = left >= 32 ? (__m512bh)both(load(first + 16), load(second + 16)) : pairs[0];
  }
};

#endif

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
template <class T, class KV>
using Few = std::conditional_t<in_pairs<T, KV>, FewInPairs<KV>, FewInFloat<KV, false>>;
#else
template <class T, class KV>
using Few = FewInFloat<KV, in_pairs<T, KV>>;
#endif

// Calls f(first position, first place) for the keys of a unit that stay together in the order in which their scores are computed:
// an eighth of the unit beside the other. Blocks are pieces of some KiB anywhere in memory, and several of them read side by
// side keep more of the processor's prefetchers busy than one after the other.
constexpr int keys_together = width / num_streams;
template <class F>
inline void for_interleaved(int count, F&& f) {
  for (int i = 0, place = 0; place < count; i += keys_together)
    for (int s = 0; s < num_streams; ++s, place += keys_together) f(s * (count / num_streams) + i, place);
}

template <class KV>
inline void interleave(const KV** rows, int count) {
  const KV* ordered[unit_size];
  for_interleaved(count, [&](int position, int place) { std::copy_n(rows + position, keys_together, ordered + place); });
  std::copy(ordered, ordered + count, rows);
}

// Their scores in the order of positions.
inline void in_order(float* scores, int count) {
  alignas(64) float ordered[unit_size];
  for_interleaved(count, [&](int position, int place) { std::memcpy(ordered + position, scores + place, keys_together * 4); });
  std::memcpy(scores, ordered, count * sizeof(float));
}

// f(first row, number of them as a constant) for all rows, at most four at a time.
template <class F>
inline void for_rows(int rows, F&& f) {
  int row = 0;
  for (; row + 4 <= rows; row += 4) f(row, std::integral_constant<int, 4>());
  if (rows & 2) f(row, std::integral_constant<int, 2>()), row += 2;
  if (rows & 1) f(row, std::integral_constant<int, 1>());
}

// Makes scores, of which a row sees [begin, end), into weights, and gives their maximum and sum. `count`: a multiple of
// unit_step; what the first score is of lies at one.
template <class T, class Put>
inline void softmax_row(const Call<T>& call, const float* key_scales, const float* value_scales, int begin, int end,
                        int count, float* scores, float& peak, float& total, Put&& put) {
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
  vec factor = splat(call.factor()), shift = sub(zero(), splat(peak));
  __m256 sums = _mm256_setzero_ps();
  for (int k = 0; k < count; k += width) {
    vec weight = exp2(fma(load(scores + k), factor, shift));
    put(k, value_scales ? mul(weight, load(value_scales + k)) : weight);
#if defined(__AVX512F__)
    sums = _mm256_add_ps(sums, _mm512_castps512_ps256(weight));
    sums = _mm256_add_ps(sums, _mm512_extractf32x8_ps(weight, 1));
#else
    sums = add(sums, weight);
#endif
  }
  alignas(32) float eight[8];
  _mm256_store_ps(eight, sums);
  total = sum_eight(eight, [](float a, float b) { return a + b; });
}

// The positions [first, stop) of a sequence, at most split_size, under one KV head: the partial results of the units, `stride`
// numbers apart.
template <class T, class KV>
inline void decode_split(const Call<T>& call, int sequence, int head, int first, int stop, float* to, int64_t stride) {
  struct Queries;
  struct Scores;
  struct Weights;
  using Arithmetic = Few<T, KV>;
  using Query = typename Arithmetic::Query;
  using Weight = typename Arithmetic::Weight;
  static_assert(split_size % unit_size == 0 && unit_size % unit_step == 0, "");
  const KVLayer& kv = call.kv;
  const int size = kv.head_dim, rows = call.num_new(sequence) * call.groups, query_size = Arithmetic::query_size(size);
  const int first_new = call.batch.seq_lens[sequence] - call.num_new(sequence);
  const int32_t* blocks = call.batch.block_table + sequence * call.batch.block_table_stride;

  // Of each unit the keys and then the values. What is asked for together begins at a multiple of unit_step and ends at one:
  // the first and last row are repeated.
  const KV* context[2 * split_size + max_prefetch_rows];
  const int base = first / unit_step * unit_step;
  int num_rows = 0;
  for (int begin = base, end; begin < stop; begin = end) {
    end = std::min(begin / unit_size * unit_size + unit_size, (stop + unit_step - 1) / unit_step * unit_step);
    const int from = std::max(begin, first), to = std::min(end, stop);
    for (int half = 0; half < 2; ++half, num_rows += end - begin) {
      const KV** place = context + num_rows;
      locate(kv, blocks, head, half, from, to, place + (from - begin));
      std::fill(place, place + (from - begin), place[from - begin]);
      std::fill(place + (to - begin), place + (end - begin), place[to - begin - 1]);
      if (half == 0) interleave(place, end - begin);
    }
  }
  std::fill_n(context + num_rows, max_prefetch_rows, context[num_rows - 1]);
  // The first ones are wanted at once.
  for (int d = 0; d < size; d += 64 / sizeof(KV))
    for (int i = 0; i < prefetch_rows<KV>(size); ++i) prefetch(context[i] + d);
  alignas(64) float key_scales[unit_size], value_scales[unit_size];
  constexpr bool is_quantized = std::is_same<KV, int8_t>::value;

  Query* query = scratch<Queries, Query>(size_t(rows) * query_size);
  for (int r = 0; r < rows; ++r) Arithmetic::load_query(call.query_row(sequence, head, r), size, query + r * query_size);
  float* scores = scratch<Scores, float>(size_t(rows) * unit_size);
  Weight* weights = std::is_same_v<Weight, float> ? reinterpret_cast<Weight*>(scores)
                                                  : scratch<Weights, Weight>(size_t(rows) * unit_size);
  const KV* const* keys = context;
  for (int begin = base, end; begin < stop; begin = end, to += stride) {
    end = std::min(begin / unit_size * unit_size + unit_size, (stop + unit_step - 1) / unit_step * unit_step);
    const int count = end - begin, seen = std::max(first - begin, 0), last = std::min(end, stop) - begin;
    const KV* const* values = keys + count;
    const Partial result(to, rows);
    [[maybe_unused]] typename Arithmetic::Mode mode;
    for_rows(rows, [&](int row, auto n) {
      Arithmetic::template score<n>(query + row * query_size, keys, count, size, scores + row * unit_size);
      for (int r = 0; r < n; ++r) in_order(scores + (row + r) * unit_size, count);
    });
    if constexpr (is_quantized)
      for (int half = 0; half < 2; ++half) {
        float* scales = half ? value_scales : key_scales;
        std::fill(scales, scales + seen, 0.0f);
        std::fill(scales + last, scales + count, 0.0f);
        locate_scales(kv, blocks, head, half, begin + seen, begin + last, scales + seen);
      }
    for (int r = 0; r < rows; ++r) {
      const int position = first_new + r / call.groups;
      const int from = std::clamp(call.seen_from(position) - begin, seen, last);
      const int to = std::clamp(position + 1 - begin, from, last);
      softmax_row(call, is_quantized ? key_scales : nullptr, is_quantized ? value_scales : nullptr, from, to, count,
                  scores + r * unit_size, result.peaks[r], result.totals[r],
                  [&](int k, vec weight) { Arithmetic::put(weights + r * unit_size + k, weight); });
    }
    std::fill(result.sums, result.sums + int64_t(rows) * Partial::row_size(size), 0.0f);
    for (int k = 0; k < last; k += unit_step) {
      const int run = std::min(unit_step, (last - k + 1) / 2 * 2);
      for_rows(rows, [&](int row, auto n) {
        Arithmetic::template weigh<n>(weights + row * unit_size + k, values + k, run, size,
                                      result.sums + row * Partial::row_size(size));
      });
    }
    for (int r = 0; r < rows; ++r) Arithmetic::finish(size, result.sums + r * Partial::row_size(size));
    keys = values + count;
  }
}

// Adds up `count` units, `stride` numbers apart, and writes the rows.
template <class T>
inline void merge_units(const Call<T>& call, int sequence, int head, float* partials, int count, int64_t stride) {
  const int size = call.kv.head_dim, rows = call.num_new(sequence) * call.groups;
  for (int r = 0; r < rows; ++r) {
    Running state{splat(call.first_peak(head, r)), splat(call.first_total()), zero(), zero()};
    float* sums = Partial(partials, rows).sums + int64_t(r) * Partial::row_size(size);
    for (int u = 0; u < count; ++u) {
      const Partial unit(partials + u * stride, rows);
      state.add(splat(unit.peaks[r]), splat(unit.totals[r]));
      const float* from = unit.sums + int64_t(r) * Partial::row_size(size);
      for (int d = 0; d < size; d += width)
        store(sums + d, Running::sums(u ? load(sums + d) : zero(), state.keep, load(from + d), state.gain));
    }
    const vec factor = div(splat(1.0f), state.total);
    const Row<T> out = call.out_row(sequence, head, r);
    for (int d = 0; d < size; d += width) store(out.at(d), mul(load(sums + d), factor));
  }
}

}  // namespace attention
}  // namespace quire
