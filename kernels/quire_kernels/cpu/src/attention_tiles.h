// Attention of many query rows: a tile of them against one unit (`chunk`) of the context after the other, whose results are
// added to what there was, corrected as larger scores come (online softmax).
//
// Scores lie as [key][query row], so that the softmax works on whole vectors of rows and keys need no transposing.
// Rows are computed in blocks of `row_block`, whose scores stay in the first-level cache.
#pragma once

#include "amx.h"
#include "attention_call.h"
#include "gemm.h"

namespace quire {
namespace attention {

#if defined(__AVX512F__)
constexpr int row_block = 32;
#else
constexpr int row_block = 24;
#endif
constexpr int block_vecs = row_block / width;

// a[rows][depth] * b[depth][vecs * width] for the columns of a in [begin, end), of these for `run` columns every `stride`;
// consecutive rows of a are `a_row` apart, its columns `a_step`. put(r, v, sum) takes the results.
template <int rows, int vecs, int run, int stride, class Put>
inline void multiply(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_step, int begin, int end,
                     Put&& put) {
  vec sums[rows][vecs];
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < vecs; ++v) sums[r][v] = zero();
  for (; begin < end; begin += stride) {
    const float *left_at = a + begin * a_step, *right_at = b + begin * b_step;
#pragma GCC unroll 4
    for (int i = 0; i < run; ++i, left_at += a_step, right_at += b_step) {
      vec right[vecs];
      for (int v = 0; v < vecs; ++v) right[v] = load(right_at + v * width);
      for (int r = 0; r < rows; ++r) {
        vec left = splat(left_at[r * a_row]);
        for (int v = 0; v < vecs; ++v) sums[r][v] = fma(left, right[v], sums[r][v]);
      }
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < vecs; ++v) put(r, v, sums[r][v]);
}

// The sums of a score's chains, as they come.
template <int rows, int vecs>
struct ScoreSums {
  vec kept[2][rows][vecs];

  // The sum of those so far that belong together, and of all with the last.
  vec add(int chain, int r, int v, vec sum) {
    if (chain >= 2) sum = quire::add(kept[chain - 2][r][v], sum);
    if (chain == score_chains - 1 && chain % 2) return quire::add(kept[0][r][v], sum);
    return kept[chain % 2][r][v] = sum;
  }
};

// What a tile's arithmetic is made of, in float32. An arithmetic has: the rows a tile should have, the positions of
// a chunk, to which multiple of keys it rounds up, and the steps below. `Query` and `Sums` hold all rows of the
// tile, `Keys` and `Values` a chunk, zero where nothing was loaded.
template <class T, class KV>
class FloatTile {
 public:
  static constexpr int tile_rows = 5 * 24, chunk = unit_size, key_step = 8;
  using Weight = float;

  FloatTile(int num_blocks, int head_dim) : size_(head_dim) {
    size_t rows = size_t(num_blocks) * row_block;
    query_ = scratch<Query, float>(rows * size_);
    sums_ = scratch<Sums, float>(rows * size_);
    keys_ = scratch<Keys, float>(chunk * size_);
    values_ = scratch<Values, float>(chunk * size_);
    std::fill(sums_, sums_ + rows * size_, 0.0f);
  }

  // rows[i]: a row of the query, or null for none; `width` of them, from row `first` of the block on.
  void load_query(int block, int first, const T* const* rows) {
    float* to = query_ + int64_t(block) * row_block * size_ + first;
    for (int d = 0; d < size_; d += width) {
      vec square[width];
      for (int i = 0; i < width; ++i) square[i] = rows[i] ? load(rows[i] + d) : zero();
      transpose(square);
      for (int i = 0; i < width; ++i) store(to + (d + i) * row_block, square[i]);
    }
  }

  // Keys and values [begin, end) of the chunk, and zeros around them up to multiples of key_step.
  void load_context(const KV* const* keys, const KV* const* values, int begin, int end) {
    for (int k = begin / key_step * key_step; k < end || k % key_step; ++k)
      for (int d = 0; d < size_; d += width) {
        bool is_there = k >= begin && k < end;
        store(keys_ + k * size_ + d, is_there ? load(keys[k - begin] + d) : zero());
        store(values_ + k * size_ + d, is_there ? load(values[k - begin] + d) : zero());
      }
  }

  // scores[begin, end)[row_block] of a block of rows.
  void score(int block, int begin, int end, float* scores) const {
    constexpr int rows = width == 16 ? 8 : 4;
    const float* query = query_ + int64_t(block) * row_block * size_;
    constexpr int run = 16 / sizeof(KV), stride = score_chains * run;
    for (int k = begin; k < end; k += rows) {
      ScoreSums<rows, block_vecs> chains;
      for_chains([&](int chain, bool is_last) {
        auto put = [&](int r, int v, vec sum) {
          sum = chains.add(chain, r, v, sum);
          if (is_last) store(scores + (k + r) * row_block + v * width, sum);
        };
        multiply<rows, block_vecs, run, stride>(keys_ + k * size_, size_, 1, query, row_block, chain * run, size_, put);
      });
    }
  }

  // The weights of keys k and k + 1 for `width` rows, in the place of their scores.
  static void put(Weight* weights, int k, int row, vec first, vec second) {
    store(weights + k * row_block + row, first);
    store(weights + (k + 1) * row_block + row, second);
  }

  // Adds the weighted values of a unit, times `gain`, to the sums, times `keep` [row_block].
  void add_values(int block, int begin, int end, const Weight* weights, const float* keep, const float* gain) {
    constexpr int rows = width == 16 ? 8 : 6;
    float* sums = sums_ + int64_t(block) * row_block * size_;
    weights += begin * row_block;
    const float* values = values_ + begin * size_;
    auto add = [&](auto vecs, int row, int d) {
      multiply<rows, vecs, 1, 1>(weights + row, 1, row_block, values + d, size_, 0, end - begin, [&](int r, int v, vec unit) {
        float* to = sums + (row + r) * size_ + d + v * width;
        store(to, Running::sums(load(to), splat(keep[row + r]), unit, splat(gain[row + r])));
      });
    };
    int d = 0;
    for (; d + 2 * width <= size_; d += 2 * width)
      for (int r = 0; r < row_block; r += rows) add(std::integral_constant<int, 2>(), r, d);
    if (d < size_)
      for (int r = 0; r < row_block; r += rows) add(std::integral_constant<int, 1>(), r, d);
  }

  // Writes `count` rows, at most `width`, times `factors`, from row `first` of the block on.
  void write(int block, int first, const float* factors, const Row<T>* rows, int count) {
    const float* sums = sums_ + (int64_t(block) * row_block + first) * size_;
    for (int i = 0; i < count; ++i) {
      vec factor = splat(factors[i]);
      for (int d = 0; d < size_; d += width) store(rows[i].at(d), mul(load(sums + i * size_ + d), factor));
    }
  }

 private:
  struct Query;
  struct Sums;
  struct Keys;
  struct Values;
  float* query_;   // [num_blocks][head_dim][row_block]
  float* sums_;    // [num_blocks * row_block][head_dim]
  float* keys_;    // [chunk][head_dim]
  float* values_;  // [chunk][head_dim]
  int size_;
};

#if defined(__AVX512BF16__)

// What the arithmetics with bfloat16 keys, queries, values and weights and float32 sums share. Eight-bit integers are
// exact in bfloat16. `value_tile`: keys of a dimension that lie behind each other, those of 16 dimensions together.
template <class KV, int value_tile>
class PairTile {
 public:
  static constexpr int tile_rows = 256, chunk = unit_size, key_step = 32;
  using Weight = bf16;

  PairTile(int num_blocks, int head_dim) : size_(head_dim), depth_((head_dim + 31) / 32 * 32) {
    size_t rows = size_t(num_blocks) * row_block;
    query_ = scratch<Query, bf16>(rows * depth_);
    sums_ = scratch<Sums, float>(rows * size_);
    keys_ = scratch<Keys, bf16>(chunk * depth_);
    values_ = scratch<Values, bf16>(chunk * size_);
    std::fill(sums_, sums_ + rows * size_, 0.0f);
    std::fill(keys_, keys_ + chunk * depth_, bf16(0));
  }

  void load_query(int block, int first, const bf16* const* rows) {
    bf16* to = query_ + (int64_t(block) * depth_ * row_block + 2 * first);
    for (int d = 0; d < depth_; d += 32) {
      vec square[16];
      for (int i = 0; i < 16; ++i) {
        __mmask32 there = !rows[i] ? 0 : d + 32 <= size_ ? ~0u : 0xffffu;
        square[i] = _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(there, rows[i] + d));
      }
      transpose(square);
      for (int i = 0; i < 16; ++i) _mm512_storeu_ps(to + (d + 2 * i) * row_block, square[i]);
    }
  }

  void load_context(const KV* const* keys, const KV* const* values, int begin, int end) {
    int from = begin / key_step * key_step, to = (end + key_step - 1) / key_step * key_step;
    for (int k = from; k < to; ++k)
      copy_key(k >= begin && k < end ? keys[k - begin] : nullptr, keys_ + k * depth_);
    const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
    for (int k = from; k < to; k += key_step)
      for (int d = 0; d < size_; d += 16) {
        // Pairs of keys [16 pairs][16 dimensions], to be [16 dimensions][32 keys].
        vec square[16];
        for (int i = 0; i < 16; ++i) {
          __m512i pair[2];
          for (int j = 0; j < 2; ++j) {
            int at = k + 2 * i + j;
            pair[j] = _mm512_castps_si512(at >= begin && at < end ? load(values[at - begin] + d) : zero());
          }
          square[i] = _mm512_castsi512_ps(
              _mm512_or_si512(_mm512_srli_epi32(pair[0], 16), _mm512_and_si512(pair[1], upper)));
        }
        transpose(square);
        for (int i = 0; i < 16; ++i) _mm512_store_ps(value(d, k) + i * value_tile, square[i]);
      }
  }

  // The weights of keys k and k + 1 for 16 rows, as pairs of keys.
  static void put(Weight* weights, int k, int row, vec first, vec second) {
    const __m512i order = _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006,
                                            0x170007, 0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d,
                                            0x1e000e, 0x1f000f);
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    _mm512_store_si512(weights + k * row_block + 2 * row, _mm512_permutexvar_epi16(order, both));
  }

  void write(int block, int first, const float* factors, const Row<bf16>* rows, int count) {
    const float* sums = sums_ + int64_t(block) * row_block * size_ + first;
    vec factor = load(factors);
    for (int d = 0; d < size_; d += 16) {
      vec square[16];
      for (int i = 0; i < 16; ++i) square[i] = mul(load(sums + (d + i) * row_block), factor);
      transpose(square);
      for (int i = 0; i < count; ++i) store(rows[i].at(d), square[i]);
    }
  }

 protected:
  // Adds those of a unit for dimensions [d, d + count) of a block of rows to its sums.
  void merge(int block, int d, int count, const float* unit, const float* keep, const float* gain) {
    float* sums = sums_ + (int64_t(block) * size_ + d) * row_block;
    for (int row = 0; row < row_block; row += width) {
      const vec old = load(keep + row), added = load(gain + row);
      for (int i = 0; i < count; ++i) {
        float* to = sums + i * row_block + row;
        store(to, Running::sums(load(to), old, load(unit + i * row_block + row), added));
      }
    }
  }

  // Values of 16 dimensions from `d` on and the keys from `k` on, multiples of 16 and key_step.
  bf16* value(int d, int k) const { return values_ + d * chunk + (value_tile == chunk ? k : k * 16); }

  bf16* query_;   // [num_blocks][depth / 2][row_block][2]
  float* sums_;   // [num_blocks][head_dim][row_block]
  bf16* keys_;    // [chunk][depth]
  bf16* values_;  // [head_dim / 16][chunk / value_tile][16 dimensions][value_tile]
  int size_;
  int depth_;  // head_dim, padded with zeros to whole tiles

 private:
  struct Query;
  struct Sums;
  struct Keys;
  struct Values;

  void copy_key(const KV* from, bf16* to) const {
    if (!from) std::memset(to, 0, size_ * sizeof(bf16));
    else if constexpr (sizeof(KV) == sizeof(bf16)) std::memcpy(to, from, size_ * sizeof(bf16));
    else
      for (int d = 0; d < size_; d += 16) store(to + d, load(from + d));
  }
};

#if defined(__AMX_BF16__)

// Products by tiles of the matrix unit.
template <class KV>
class Bf16Tile : public PairTile<KV, 32> {
  using Base = PairTile<KV, 32>;
  using Base::depth_, Base::keys_, Base::query_, Base::size_;

 public:
  using Base::Base;

  // Tiles 0 to 3 are sums, 4 and 5 the left factors, 6 and 7 the right ones.

  void score(int block, int begin, int end, float* scores) const {
    const bf16* query = query_ + int64_t(block) * depth_ * row_block;
    Tiles::sync();
    for (int k = begin; k < end; k += 32) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int d = 0; d < depth_; d += 32) {
        _tile_loadd(4, keys_ + k * depth_ + d, depth_ * 2);
        _tile_loadd(6, query + d * row_block, row_block * 4);
        _tile_loadd(7, query + d * row_block + 32, row_block * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, keys_ + (k + 16) * depth_ + d, depth_ * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      float* to = scores + k * row_block;
      _tile_stored(0, to, row_block * 4);
      _tile_stored(1, to + 16, row_block * 4);
      _tile_stored(2, to + 16 * row_block, row_block * 4);
      _tile_stored(3, to + 16 * row_block + 16, row_block * 4);
    }
  }

  void add_values(int block, int begin, int end, const bf16* weights, const float* keep, const float* gain) {
    alignas(64) float unit[32 * row_block];
    Tiles::sync();
    for (int d = 0; d < size_; d += 32) {
      const bool is_pair = d + 32 <= size_;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int k = begin; k < end; k += 32) {
        const bf16* tile = Base::value(d, k);
        _tile_loadd(4, tile, 64);
        _tile_loadd(6, weights + k * row_block, row_block * 4);
        _tile_loadd(7, weights + k * row_block + 32, row_block * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (!is_pair) continue;
        _tile_loadd(5, tile + 16 * Base::chunk, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, unit, row_block * 4);
      _tile_stored(1, unit + 16, row_block * 4);
      if (is_pair) {
        _tile_stored(2, unit + 16 * row_block, row_block * 4);
        _tile_stored(3, unit + 16 * row_block + 16, row_block * 4);
      }
      Base::merge(block, d, is_pair ? 32 : 16, unit, keep, gain);
    }
  }

 private:
  Tiles tiles_;
};

#else

// Products by vectors of pairs: keys are to a block of queries, and dimensions of values to its weights, what rows of x are
// to a block of columns.
template <class KV>
class Bf16Tile : public PairTile<KV, PairTile<KV, 0>::chunk> {
  using Base = PairTile<KV, PairTile<KV, 0>::chunk>;
  static_assert(row_block == block_columns, "");

 public:
  using Base::Base;

  void score(int block, int begin, int end, float* scores) const {
    constexpr int rows = 8, run = 16 / sizeof(KV), stride = score_chains * run;
    const int depth = Base::depth_;
    const bf16* query = Base::query_ + int64_t(block) * depth * row_block;
    for (int k = begin; k < end; k += rows) {
      ScoreSums<rows, block_vecs> chains;
      const bf16* keys = Base::keys_ + k * depth;
      for_chains([&](int chain, bool is_last) {
        vec sums[rows][block_vecs];
        for (auto& row : sums)
          for (vec& sum : row) sum = zero();
        for (int first = chain * run; first < depth; first += stride)
          for (int d = first; d < std::min(first + run, depth); d += 2) {
            __m512bh right[block_vecs];
            for (int v = 0; v < block_vecs; ++v) right[v] = (__m512bh)load(reinterpret_cast<const float*>(query + d * row_block) + v * width);
            for (int r = 0; r < rows; ++r) {
              int32_t bits;
              std::memcpy(&bits, keys + r * depth + d, 4);
              const __m512bh left = (__m512bh)_mm512_set1_epi32(bits);
              for (int v = 0; v < block_vecs; ++v) sums[r][v] = (vec)_mm512_dpbf16_ps(sums[r][v], left, right[v]);
            }
          }
        for (int r = 0; r < rows; ++r)
          for (int v = 0; v < block_vecs; ++v) {
            vec sum = chains.add(chain, r, v, sums[r][v]);
            if (is_last) store(scores + (k + r) * row_block + v * width, sum);
          }
      });
    }
  }

  void add_values(int block, int begin, int end, const bf16* weights, const float* keep, const float* gain) {
    constexpr int most = 2 * gemm::max_tile_rows;
    alignas(64) float unit[most * row_block];
    for (int d = 0; d < Base::size_; d += most) {
      const int count = std::min(most, Base::size_ - d);
      gemm::vector_rows(count, Base::value(0, begin) + d * Base::chunk, Base::chunk, weights + begin * row_block, end - begin,
                        unit, true);
      Base::merge(block, d, count, unit, keep, gain);
    }
  }
};

#endif

template <class T, class KV>
using Tile = std::conditional_t<in_pairs<T, KV>, Bf16Tile<KV>, FloatTile<T, KV>>;

#else

template <class T, class KV>
using Tile = FloatTile<T, KV>;

#endif

// The softmax of a block of rows so far.
struct Softmax {
  alignas(64) float peaks[row_block];   // maximum of the exponents
  alignas(64) float totals[row_block];  // sum of the weights
  alignas(64) float keep[row_block];    // factor of what was added up before the last unit
  alignas(64) float gain[row_block];    // of the last unit
};

// Makes the scores of keys [begin, end) of a unit, multiples of 8, into weights, which may lie in the same place.
template <class Arithmetic>
inline void softmax_block(float factor, const float* value_scales, int begin, int end, const float* scores,
                          typename Arithmetic::Weight* weights, Softmax& state) {
  for (int row = 0; row < row_block; row += width) {
    vec even = load(scores + begin * row_block + row), odd = even;
    for (int k = begin; k < end; k += 2) {
      even = max(even, load(scores + k * row_block + row));
      odd = max(odd, load(scores + (k + 1) * row_block + row));
    }
    const vec peak = max(splat(no_peak), mul(max(even, odd), splat(factor))), shift = sub(zero(), peak);
    vec totals[8];
    for (vec& total : totals) total = zero();
    for (int k = begin; k < end; k += 8)
      for (int i = 0; i < 8; i += 2) {
        vec first = exp2(fma(load(scores + (k + i) * row_block + row), splat(factor), shift));
        vec second = exp2(fma(load(scores + (k + i + 1) * row_block + row), splat(factor), shift));
        totals[i] = add(totals[i], first);
        totals[i + 1] = add(totals[i + 1], second);
        if (value_scales) {
          first = mul(first, splat(value_scales[k + i]));
          second = mul(second, splat(value_scales[k + i + 1]));
        }
        Arithmetic::put(weights, k + i, row, first, second);
      }
    Running running{load(state.peaks + row), load(state.totals + row), zero(), zero()};
    running.add(peak, sum_eight(totals, [](vec a, vec b) { return add(a, b); }));
    store(state.peaks + row, running.peak);
    store(state.totals + row, running.total);
    store(state.keep + row, running.keep);
    store(state.gain + row, running.gain);
  }
}

// The new tokens [first_token, first_token + num_tokens) of a sequence under one KV head.
template <class T, class KV>
inline void tile_task(const Call<T>& call, int sequence, int head, int first_token, int num_tokens) {
  struct Scores;
  struct Weights;
  struct States;
  using Arithmetic = Tile<T, KV>;
  constexpr int chunk = Arithmetic::chunk, key_step = Arithmetic::key_step;
  constexpr bool is_quantized = std::is_same<KV, int8_t>::value;
  const KVLayer& kv = call.kv;
  const int groups = call.groups, rows = num_tokens * groups, num_blocks = (rows + row_block - 1) / row_block;
  const int32_t* blocks = call.batch.block_table + sequence * call.batch.block_table_stride;
  const int low = call.batch.seq_lens[sequence] - call.num_new(sequence) + first_token, high = low + num_tokens;
  const bool is_joint = call.is_joint(sequence);
  const int stop = is_joint ? call.batch.seq_lens[sequence] : high;  // behind what any of them sees

  Arithmetic tile(num_blocks, kv.head_dim);
  Softmax* states = scratch<States, Softmax>(num_blocks);
  for (int row = 0; row < num_blocks * row_block; row += width) {
    const T* from[width];
    for (int i = 0; i < width; ++i)
      from[i] = row + i < rows ? call.query_row(sequence, head, int64_t(first_token) * groups + row + i) : nullptr;
    tile.load_query(row / row_block, row % row_block, from);
    Softmax& state = states[row / row_block];
    for (int i = 0; i < width; ++i) state.peaks[row % row_block + i] = call.first_peak(head, row + i);
    store(state.totals + row % row_block, splat(call.first_total()));
  }

  float* scores = scratch<Scores, float>(chunk * row_block);
  // float32 weights take the place of their scores.
  auto* weights = std::is_same<typename Arithmetic::Weight, float>::value
                      ? reinterpret_cast<typename Arithmetic::Weight*>(scores)
                      : scratch<Weights, typename Arithmetic::Weight>(chunk * row_block);
  alignas(64) float key_scales[chunk], value_scales[chunk];
  const int seen_from = call.seen_from(low);
  for (int start = seen_from / chunk * chunk; start < stop; start += chunk) {
    const int begin = std::max(start, seen_from), end = std::min(start + chunk, stop);
    const KV *keys[chunk], *values[chunk];
    locate(kv, blocks, head, 0, begin, end, keys);
    locate(kv, blocks, head, 1, begin, end, values);
    tile.load_context(keys, values, begin - start, end - start);
    if (is_quantized) {
      std::fill(key_scales, key_scales + chunk, 0.0f);
      std::fill(value_scales, value_scales + chunk, 0.0f);
      locate_scales(kv, blocks, head, 0, begin, end, key_scales + begin - start);
      locate_scales(kv, blocks, head, 1, begin, end, value_scales + begin - start);
    }
    for (int b = 0; b < num_blocks; ++b) {
      // Positions of the block's rows, and what any of them sees of the chunk.
      const int first_row = b * row_block, last_row = std::min(first_row + row_block, rows) - 1;
      const int first = low + first_row / groups, last = low + last_row / groups;
      const int from = std::max(begin, call.seen_from(first)), to = is_joint ? end : std::min(end, last + 1);
      if (from >= to) continue;
      const int key_begin = (from - start) / key_step * key_step;
      const int key_end = (to - start + key_step - 1) / key_step * key_step;
      tile.score(b, key_begin, key_end, scores);
      for (int k = key_begin; k < key_end; ++k) {
        float* row = scores + k * row_block;
        if (is_quantized || call.softcap)
          for (int r = 0; r < row_block; r += width)
            store(row + r, call.cap(is_quantized ? mul(load(row + r), splat(key_scales[k])) : load(row + r)));
        // The rows that see the key: from its own position on (all, if joint), until it leaves the window.
        const float hidden = -std::numeric_limits<float>::infinity();
        const int position = start + k;
        if (is_joint ? position >= stop : position > first)
          std::fill(row, row + (is_joint ? row_block : std::min((position - low) * groups - first_row, row_block)), hidden);
        if (call.window && call.window <= last - position)
          std::fill(row + std::max((position + call.window - low) * groups - first_row, 0), row + row_block, hidden);
      }
      softmax_block<Arithmetic>(call.factor(), is_quantized ? value_scales : nullptr, key_begin, key_end, scores,
                                weights, states[b]);
      tile.add_values(b, key_begin, key_end, weights, states[b].keep, states[b].gain);
    }
  }

  for (int row = 0; row < num_blocks * row_block; row += width) {
    Row<T> to[width];
    const int count = std::min(width, rows - row);
    for (int i = 0; i < count; ++i) to[i] = call.out_row(sequence, head, int64_t(first_token) * groups + row + i);
    float* totals = states[row / row_block].totals + row % row_block;
    store(totals, div(splat(1.0f), load(totals)));
    if (count > 0) tile.write(row / row_block, row % row_block, totals, to, count);
  }
}

}  // namespace attention
}  // namespace quire
