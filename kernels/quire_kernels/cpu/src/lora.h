// Low-rank adapters: y[t] += B[slot] (A[slot] x[t]), for rows of a batch of which each has an adapter of its own, or none.
//
// Rows are brought together by slots, so that an adapter's weights are read once. Then there are two phases, shared by all
// threads: A x in float32, and what B makes of that. Each number has one order of additions, in vectors over the inputs and
// as a chain over the ranks: it depends on its row alone.
#pragma once

#include <vector>

#include "gemm.h"
#include "pool.h"

namespace quire {

// The stacked adapters of a layer: T a[slots][rank][inputs], T b[slots][outputs][rank].
template <class T>
struct Adapters {
  const T *a, *b;
  int64_t a_slot, b_slot;  // elements from a slot's matrix to the next
  int num_slots, rank;
  int64_t num_inputs, num_outputs;
};

namespace lora {

constexpr int tile_ranks = 4, tile_rows = width / tile_ranks;  // whose sums, one vector each, are a square
constexpr int64_t chunk_bytes = 128 << 10;  // of x, which stay in the second-level cache while the ranks take turns
constexpr int64_t wide_bytes = 16 << 10;    // of B in float32, in the first-level cache
constexpr int64_t max_chunk_rows = 128;

// Rows of a batch that have one adapter: [first, first + count) of those in the order of slots.
struct Group {
  int slot;
  int64_t first, count;
};

// sums[row][rank] += x[row] * a[rank] of `width` or, where numbers lie in pairs, twice as many inputs from i on.
template <int ROWS>
inline void add_products(const float* const* x, const float* const* a, int64_t i, vec (*sums)[tile_ranks]) {
  for (int j = 0; j < tile_ranks; ++j) {
    const vec weights = load(a[j] + i);
    for (int r = 0; r < ROWS; ++r) sums[r][j] = fma(load(x[r] + i), weights, sums[r][j]);
  }
}

template <int ROWS>
inline void add_products(const bf16* const* x, const bf16* const* a, int64_t i, vec (*sums)[tile_ranks]) {
#if defined(__AVX512BF16__)
  for (int j = 0; j < tile_ranks; ++j) {
    const __m512bh weights = (__m512bh)_mm512_loadu_si512(a[j] + i);
    for (int r = 0; r < ROWS; ++r)
      sums[r][j] = _mm512_dpbf16_ps(sums[r][j], (__m512bh)_mm512_loadu_si512(x[r] + i), weights);
  }
#else
  vec even[ROWS], odd[ROWS];
  for (int r = 0; r < ROWS; ++r) split_pairs(x[r] + i, even[r], odd[r]);
  for (int j = 0; j < tile_ranks; ++j) {
    vec first, second;
    split_pairs(a[j] + i, first, second);
    for (int r = 0; r < ROWS; ++r) sums[r][j] = fma(odd[r], second, fma(even[r], first, sums[r][j]));
  }
#endif
}

// products[tile_rows][tile_ranks] of ROWS rows of x, the rest of which are zeros, and of rows of A, both of k numbers.
template <int ROWS, class T>
inline void shrink_tile(const T* const* x, const T* const* a, int64_t k, float* products) {
  constexpr int step = width * 4 / sizeof(T);
  vec sums[tile_rows][tile_ranks];
  for (auto& row : sums)
    for (vec& sum : row) sum = zero();
  int64_t i = 0;
  for (; i + step <= k; i += step) {
    // What the next ranks have at this place: they come next.
    for (int j = 0; j < tile_ranks; ++j)
      _mm_prefetch(reinterpret_cast<const char*>(a[j] + i + tile_ranks * k), _MM_HINT_T0);
    add_products<ROWS>(x, a, i, sums);
  }
  if (i < k) {
    alignas(64) T rest[ROWS + tile_ranks][step] = {};
    const T* pointers[ROWS + tile_ranks];
    for (int r = 0; r < ROWS + tile_ranks; ++r) {
      std::memcpy(rest[r], (r < ROWS ? x[r] : a[r - ROWS]) + i, (k - i) * sizeof(T));
      pointers[r] = rest[r];
    }
    add_products<ROWS>(pointers, pointers + ROWS, 0, sums);
  }
  vec* lanes = sums[0];
  transpose(lanes);
  for (int apart = width / 2; apart > 0; apart /= 2)
    for (int l = 0; l < apart; ++l) lanes[l] = add(lanes[l], lanes[l + apart]);
  store(products, lanes[0]);
}

// inner[rows][rank]: ranks [first, first + tile_ranks), as far as there are any, of A x for rows of x at `tokens`.
template <class T>
inline void shrink(const Matrix<const T>& x, const int64_t* tokens, int rows, const T* a, int64_t k, int first, int rank,
                   float* inner) {
  const T* weights[tile_ranks];
  for (int j = 0; j < tile_ranks; ++j) weights[j] = a + std::min(first + j, rank - 1) * k;
  const int ranks = std::min(tile_ranks, rank - first);
  for (int row = 0, count; row < rows; row += count) {
    count = std::min(rows - row, tile_rows);
    const T* from[tile_rows];
    for (int r = 0; r < count; ++r) from[r] = x.data + tokens[row + r] * x.ld;
    alignas(64) float products[width];
    gemm::with_rows<tile_rows>(count, [&](auto n) { shrink_tile<n>(from, weights, k, products); });
    for (int r = 0; r < count; ++r) std::memcpy(inner + (row + r) * rank + first, products + r * tile_ranks, ranks * 4);
  }
}

// columns[r]: number r, of `width`, of `width` rows that begin `ld` apart.
inline void load_columns(const float* rows, int64_t ld, vec* columns) {
  for (int i = 0; i < width; ++i) columns[i] = load(rows + i * ld);
  transpose(columns);
}

// The same of 16 numbers of bfloat16, in pairs: neighbours share a lane until the end.
inline void load_columns(const bf16* rows, int64_t ld, vec* columns) {
  vec pairs[8];
#if defined(__AVX512F__)
  auto two_rows = [&](int i) {
    const __m256 low = _mm256_loadu_ps(reinterpret_cast<const float*>(rows + i * ld));
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), _mm256_loadu_ps(reinterpret_cast<const float*>(rows + (i + 4) * ld)), 1);
  };
  vec x[8], y[8];
  for (int i = 0; i < 4; ++i) x[i] = two_rows(i), x[4 + i] = two_rows(8 + i);
  for (int i = 0; i < 8; i += 2) y[i] = unpack_low(x[i], x[i + 1]), y[i + 1] = unpack_high(x[i], x[i + 1]);
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      x[i + 2 * j] = unpack_low_pairs(y[i + j], y[i + j + 2]);
      x[i + 2 * j + 1] = unpack_high_pairs(y[i + j], y[i + j + 2]);
    }
  for (int i = 0; i < 4; ++i) {
    pairs[i] = _mm512_shuffle_f32x4(x[i], x[4 + i], 0x88);
    pairs[4 + i] = _mm512_shuffle_f32x4(x[i], x[4 + i], 0xdd);
  }
#else
  for (int i = 0; i < 8; ++i) pairs[i] = load(reinterpret_cast<const float*>(rows + i * ld));
  transpose(pairs);
#endif
  for (int i = 0; i < 8; ++i) {
    columns[2 * i] = number<2, 0>(pairs[i]);
    columns[2 * i + 1] = number<2, 1>(pairs[i]);
  }
}

// to[rank][32]: rows [first, first + 32) of a slot's B in float32, zeros where there are none.
template <class T>
inline void widen_block(const T* b, int64_t num_outputs, int rank, int64_t first, float* to) {
  constexpr int step = sizeof(T) == 2 ? 16 : width;
  for (int c = 0; c < block_columns; c += width)
    for (int r = 0; r < rank; r += step) {
      const int64_t row = first + c;
      const int ranks = std::min(step, rank - r);
      const T* from = b + row * rank + r;
      int64_t ld = rank;
      alignas(64) T last[width * step];
      // What is read behind a row's last rank is not stored, but it must be there.
      if ((row + width - 1) * rank + r + step > num_outputs * rank) {
        std::memset(last, 0, sizeof last);
        for (int i = 0; i < std::min<int64_t>(width, num_outputs - row); ++i)
          std::memcpy(last + i * step, from + i * ld, ranks * sizeof(T));
        from = last;
        ld = step;
      }
      vec columns[step];
      load_columns(from, ld, columns);
      for (int i = 0; i < ranks; ++i) store(to + (r + i) * block_columns + c, columns[i]);
    }
}

inline void add_to(float* y, const vec* sums) {
  for (int v = 0; v < block_columns / width; ++v) store(y + v * width, add(load(y + v * width), sums[v]));
}

inline void add_to(bf16* y, const vec* sums) {
  for (int v = 0; v < block_columns / width; v += 2, y += 2 * width)
    store_two(y, add(load(y), sums[v]), add(load(y + width), sums[v + 1]));
}

// y[tokens] += inner[ROWS][rank] wide[rank][32], of `columns` columns.
template <int ROWS, class T>
inline void expand_tile(const float* inner, int rank, const float* wide, const int64_t* tokens, const Matrix<T>& y,
                        int64_t column, int columns) {
  constexpr int num = block_columns / width;
  vec sums[ROWS][num];
  for (auto& row : sums)
    for (vec& sum : row) sum = zero();
  for (int i = 0; i < rank; ++i) {
    vec weights[num];
    for (int v = 0; v < num; ++v) weights[v] = load(wide + i * block_columns + v * width);
    for (int r = 0; r < ROWS; ++r) {
      const vec value = splat(inner[r * rank + i]);
      for (int v = 0; v < num; ++v) sums[r][v] = fma(value, weights[v], sums[r][v]);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    T* to = y.data + tokens[r] * y.ld + column;
    if (columns == block_columns) {
      add_to(to, sums[r]);
    } else {
      alignas(64) T last[block_columns] = {};
      std::memcpy(last, to, columns * sizeof(T));
      add_to(last, sums[r]);
      std::memcpy(to, last, columns * sizeof(T));
    }
  }
}

// y[tokens] += B inner in `blocks` blocks of columns, from `block` on.
template <class T>
inline void expand(const float* inner, const int64_t* tokens, int rows, const T* b, const Adapters<T>& layer, int64_t block,
                   int blocks, const Matrix<T>& y) {
  struct Wide;
  const int rank = layer.rank;
  float* wide = scratch<Wide, float>(int64_t(blocks) * rank * block_columns);
  for (int i = 0; i < blocks; ++i)
    widen_block(b, layer.num_outputs, rank, (block + i) * block_columns, wide + i * rank * block_columns);
  for (int row = 0, count; row < rows; row += count) {
    count = gemm::next_tile(rows - row);
    for (int i = 0; i < blocks; ++i)
      gemm::with_rows(count, [&](auto n) {
        const int64_t column = (block + i) * block_columns;
        expand_tile<n>(inner + int64_t(row) * rank, rank, wide + i * rank * block_columns, tokens + row, y, column,
                       int(std::min<int64_t>(block_columns, layer.num_outputs - column)));
      });
  }
}

}  // namespace lora

// Rows of y whose slot is negative stay as they are. x and y are plain matrices.
template <class T>
void add_lora(const Matrix<T>& y, const Matrix<const T>& x, const int32_t* slots, int64_t num_tokens,
              const Adapters<T>& layer) {
  using namespace lora;
  struct Tokens;
  struct Inner;
  // Tokens in the order of their slots.
  std::vector<int64_t> places(layer.num_slots + 1);
  for (int64_t t = 0; t < num_tokens; ++t)
    if (slots[t] >= 0) ++places[slots[t] + 1];
  std::vector<Group> groups;
  for (int slot = 0; slot < layer.num_slots; ++slot) {
    if (const int64_t count = places[slot + 1]) groups.push_back({slot, places[slot], count});
    places[slot + 1] += places[slot];
  }
  const int64_t num_groups = int64_t(groups.size()), num_rows = places[layer.num_slots];
  int64_t* tokens = scratch<Tokens, int64_t>(num_rows);
  for (int64_t t = 0; t < num_tokens; ++t)
    if (slots[t] >= 0) tokens[places[slots[t]]++] = t;
  float* inner = scratch<Inner, float>(num_rows * layer.rank);

  const int64_t k = layer.num_inputs, rank_tiles = (layer.rank + tile_ranks - 1) / tile_ranks;
  const int64_t shrink_rows =
      std::clamp<int64_t>(chunk_bytes / (k * sizeof(T)) / tile_rows * tile_rows, tile_rows, max_chunk_rows);
  parallel_for_all(
      num_groups, [&](int64_t g) { return (groups[g].count + shrink_rows - 1) / shrink_rows * rank_tiles; },
      [&](int64_t g, int64_t task) {
        const Group& group = groups[g];
        const int64_t start = task / rank_tiles * shrink_rows, row = group.first + start;
        shrink(x, tokens + row, int(std::min(shrink_rows, group.count - start)), layer.a + group.slot * layer.a_slot, k,
               int(task % rank_tiles) * tile_ranks, layer.rank, inner + row * layer.rank);
      });

  const int64_t num_blocks = (layer.num_outputs + block_columns - 1) / block_columns;
  const int64_t blocks_each = std::clamp<int64_t>(wide_bytes / (layer.rank * block_columns * 4), 1, 8);
  const int64_t column_tasks = (num_blocks + blocks_each - 1) / blocks_each;
  parallel_for_all(
      num_groups, [&](int64_t g) { return (groups[g].count + max_chunk_rows - 1) / max_chunk_rows * column_tasks; },
      [&](int64_t g, int64_t task) {
        const Group& group = groups[g];
        const int64_t start = task / column_tasks * max_chunk_rows, row = group.first + start;
        const int64_t block = task % column_tasks * blocks_each;
        expand(inner + row * layer.rank, tokens + row, int(std::min(max_chunk_rows, group.count - start)),
               layer.b + group.slot * layer.b_slot, layer, block, int(std::min(blocks_each, num_blocks - block)), y);
      });
}

}  // namespace quire
