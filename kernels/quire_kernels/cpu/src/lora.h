// Low-rank adapters: y[t] += B[slot] (A[slot] x[t]), for rows of a batch of which each has an adapter of its own, or none.
//
// Rows are brought together by slots, so that an adapter's weights are read once. Then there are two phases, shared by all
// threads: A x in float32, and what B makes of that, which is added to y (add_lora) or to the sums of a product before they
// are rounded or gated (adapted_linear). Each number has one order of additions, in vectors over the inputs and as a chain
// over the ranks: it depends on its row alone.
#pragma once

#include <utility>
#include <vector>

#include "gemm.h"
#include "pool.h"

namespace quire {

// The adapters of one part of a layer: T a[slots][rank][num_inputs], T b[slots][num_outputs][rank].
struct AdapterPart {
  const void *a, *b;
  int64_t a_slot, b_slot;  // elements from a slot's matrix to the next
  int64_t num_outputs;
  const uint8_t* filled;  // [slots]: whether a slot's adapter changes this part; null: each does

  bool is_changed_by(int slot) const { return !filled || filled[slot]; }
  template <class T>
  const T* a_of(int slot) const { return static_cast<const T*>(a) + slot * a_slot; }
  template <class T>
  const T* b_of(int slot) const { return static_cast<const T*>(b) + slot * b_slot; }
};

// Those of all parts of a layer, whose outputs lie behind each other, or take turns where they are gated.
struct Adapters {
  const AdapterPart* parts;
  int32_t num_parts, rank;  // no parts: there are no adapters
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

// The rows of a batch that have adapters, in the order of their slots, ascending in each.
struct Grouping {
  std::vector<Group> groups;
  std::vector<int64_t> rows;

  Grouping(const int32_t* slots, int64_t num_rows) {
    std::vector<int64_t> ends;
    for (int64_t t = 0; t < num_rows; ++t)
      if (slots[t] >= 0) {
        if (slots[t] >= int64_t(ends.size())) ends.resize(slots[t] + 1);
        ++ends[slots[t]];
      }
    int64_t end = 0;
    for (size_t slot = 0; slot < ends.size(); ++slot) {
      if (ends[slot]) groups.push_back({int(slot), end, ends[slot]});
      end += std::exchange(ends[slot], end);
    }
    rows.resize(end);
    for (int64_t t = 0; t < num_rows; ++t)
      if (slots[t] >= 0) rows[ends[slots[t]]++] = t;
  }
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
inline void shrink_rows(const Matrix<const T>& x, const int64_t* tokens, int rows, const T* a, int64_t k, int first, int rank,
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

// to[rank][32], of which 16 columns are written: rows [first, first + 16) of a slot's B in float32, zeros where there are none.
template <class T>
inline void widen(const T* b, int64_t num_outputs, int rank, int64_t first, float* to) {
  constexpr int step = sizeof(T) == 2 ? 16 : width;
  for (int c = 0; c < half_block; c += width)
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
      vec numbers[step];
      load_columns(from, ld, numbers);
      for (int i = 0; i < ranks; ++i) store(to + (r + i) * block_columns + c, numbers[i]);
    }
}

// put(r, sums of row r) for inner[ROWS][rank] wide[rank][32], where each half of the columns has an `inner` of its own.
template <int ROWS, class Put>
inline void expand_tile(const float* inner, const float* inner_of_second, int rank, const float* wide, Put&& put) {
  constexpr int half = half_block / width;
  vec sums[ROWS][2 * half];
  for (auto& row : sums)
    for (vec& sum : row) sum = zero();
  for (int i = 0; i < rank; ++i) {
    vec weights[2 * half];
    for (int v = 0; v < 2 * half; ++v) weights[v] = load(wide + i * block_columns + v * width);
    for (int r = 0; r < ROWS; ++r) {
      const vec first = splat(inner[r * rank + i]), second = splat(inner_of_second[r * rank + i]);
      for (int v = 0; v < half; ++v) {
        sums[r][v] = fma(first, weights[v], sums[r][v]);
        sums[r][half + v] = fma(second, weights[half + v], sums[r][half + v]);
      }
    }
  }
#pragma GCC unroll 16  // else the sums go through memory
  for (int r = 0; r < ROWS; ++r) put(r, sums[r]);
}

template <class Put>
inline void expand(const float* inner, const float* inner_of_second, int64_t rows, int rank, const float* wide, Put&& put) {
  for (int64_t row = 0, count; row < rows; row += count, inner += count * rank, inner_of_second += count * rank) {
    count = gemm::next_tile(int(rows - row));
    gemm::with_rows(int(count), [&](auto n) {
      expand_tile<n>(inner, inner_of_second, rank, wide, [&](int r, const vec* sums) { put(row + r, sums); });
    });
  }
}

// y[32] += sums.
inline void add_to(float* y, const vec* sums) {
  for (int v = 0; v < block_columns / width; ++v) store(y + v * width, add(load(y + v * width), sums[v]));
}

inline void add_to(bf16* y, const vec* sums) {
  for (int v = 0; v < block_columns / width; v += 2, y += 2 * width)
    store_two(y, add(load(y), sums[v]), add(load(y + width), sums[v + 1]));
}

// inner[part][row of the grouping][rank] = A x, of the parts and adapters that change anything.
template <class T>
void shrink(const Adapters& layer, const Grouping& grouping, const Matrix<const T>& x, int64_t k, float* inner) {
  const int rank = layer.rank;
  const int64_t rank_tiles = (rank + tile_ranks - 1) / tile_ranks, num_groups = int64_t(grouping.groups.size());
  const int64_t chunk_rows =
      std::clamp<int64_t>(chunk_bytes / (k * sizeof(T)) / tile_rows * tile_rows, tile_rows, max_chunk_rows);
  auto part_of = [&](int64_t i) -> const AdapterPart& { return layer.parts[i / num_groups]; };
  auto group_of = [&](int64_t i) -> const Group& { return grouping.groups[i % num_groups]; };
  parallel_for_all(
      layer.num_parts * num_groups,
      [&](int64_t i) {
        const Group& group = group_of(i);
        return part_of(i).is_changed_by(group.slot) ? (group.count + chunk_rows - 1) / chunk_rows * rank_tiles : 0;
      },
      [&](int64_t i, int64_t task) {
        const Group& group = group_of(i);
        const int64_t start = task / rank_tiles * chunk_rows, row = group.first + start;
        float* to = inner + (i / num_groups * int64_t(grouping.rows.size()) + row) * rank;
        shrink_rows(x, grouping.rows.data() + row, int(std::min(chunk_rows, group.count - start)),
                    part_of(i).template a_of<T>(group.slot), k, int(task % rank_tiles) * tile_ranks, rank, to);
      });
}

// Whether some row's adapter changes a layer.
inline bool is_changed(const Adapters& layer, const Grouping& grouping) {
  for (int p = 0; p < layer.num_parts; ++p)
    for (const Group& group : grouping.groups)
      if (layer.parts[p].is_changed_by(group.slot)) return true;
  return false;
}

// What becomes of a product (see gemm.h) whose columns are [first_column, ...) of a layer's: its adapters' terms are added.
template <class T, class Y>
struct Adapted {
  const Weight& w;
  Matrix<Y> y;
  const Adapters& layer;
  const Grouping& grouping;
  const float* inner;  // of shrink
  int64_t first_column;

  void begin(const gemm::Split&) {}
  void take(const gemm::Part& part, const float* sums) const {
    struct Terms;
    float* terms = scratch<Terms, float>(int64_t(part.rows) * block_columns);
    const int64_t columns = w.activation == Activation::none ? block_columns : half_block;
    for (int b = 0; b < part.blocks; ++b, sums += int64_t(part.rows) * block_columns) {
      const int64_t block = part.first_block + b;
      const bool are_any = make_terms(part, block, terms);
      gemm::finish(w, block, part.rows, sums, y.row(part.first_row, block * columns).at(0), y.row_stride(),
                   are_any ? terms : nullptr);
    }
  }

 private:
  // Where 16 columns of a block come from: a part of the layer, none behind the last one, and the first of its outputs.
  struct Half {
    int part;
    int64_t output;
  };
  Half half_of(int64_t block, int half) const {
    Half found{0, first_column + block * block_columns + half * half_block};
    if (w.activation != Activation::none) {
      // Of gate, then of up: in two parts of a layer, or in the halves of one.
      int64_t num_outputs = 0;
      for (int i = 0; i < layer.num_parts; ++i) num_outputs += layer.parts[i].num_outputs;
      found.output = half * (num_outputs / 2) + block * half_block;
    }
    for (; found.part < layer.num_parts && found.output >= layer.parts[found.part].num_outputs; ++found.part)
      found.output -= layer.parts[found.part].num_outputs;
    return found;
  }

  // terms[rows of the part][32]; whether some row's adapter changes the block.
  bool make_terms(const gemm::Part& part, int64_t block, float* terms) const {
    struct Wide;
    const int rank = layer.rank;
    const Half halves[2] = {half_of(block, 0), half_of(block, 1)};
    bool are_any = false;
    for (const Group& group : grouping.groups) {
      const int64_t* stop = grouping.rows.data() + group.first + group.count;
      const int64_t* begin = std::lower_bound(stop - group.count, stop, part.first_row);
      const int64_t* end = std::lower_bound(begin, stop, part.first_row + part.rows);
      const float* inners[2] = {};
      float* wide = scratch<Wide, float>(int64_t(rank) * block_columns);
      for (int half = 0; half < 2; ++half) {
        const auto [index, output] = halves[half];
        if (begin == end || index == layer.num_parts || !layer.parts[index].is_changed_by(group.slot)) continue;
        const AdapterPart& own = layer.parts[index];
        widen(own.b_of<T>(group.slot), own.num_outputs, rank, output, wide + half * half_block);
        inners[half] = inner + (index * int64_t(grouping.rows.size()) + (begin - grouping.rows.data())) * rank;
      }
      if (!inners[0] && !inners[1]) continue;
      for (int half = 0; half < 2; ++half)
        if (!inners[half]) {
          for (int i = 0; i < rank; ++i) std::fill_n(wide + i * block_columns + half * half_block, half_block, 0.0f);
          inners[half] = inners[1 - half];
        }
      // Rows without an adapter keep their bits: what is added to those is -0.
      if (!are_any) std::fill_n(terms, int64_t(part.rows) * block_columns, -0.0f);
      are_any = true;
      expand(inners[0], inners[1], end - begin, rank, wide, [&](int64_t row, const vec* sums) {
        float* to = terms + (begin[row] - part.first_row) * block_columns;
        for (int v = 0; v < block_columns / width; ++v) store(to + v * width, sums[v]);
      });
    }
    return are_any;
  }
};

}  // namespace lora

// The products of a layer, whose columns lie behind each other in y, and what the rows' adapters add before they are
// rounded or gated: x and y are plain matrices then. Without a grouping no row has one; see `linear`.
template <class T>
void adapted_linear(const Matrix<T>& x, int64_t num_rows, std::initializer_list<const Weight*> weights,
                    const Adapters& layer, const lora::Grouping* grouping, const Matrix<T>& y) {
  struct Inner;
  const float* inner = nullptr;  // null: nothing is added
  if (grouping && lora::is_changed(layer, *grouping)) {
    float* made = scratch<Inner, float>(int64_t(layer.num_parts) * grouping->rows.size() * layer.rank);
    lora::shrink<T>(layer, *grouping, x, (*weights.begin())->num_inputs, made);
    inner = made;
  }
  int64_t column = 0;
  for (const Weight* w : weights) {
    if (!w->num_columns) continue;
    const Matrix<T> part{y.data + column, y.ld, y.is_tiled};
    if (inner) {
      lora::Adapted<T, T> to{*w, part, layer, *grouping, inner, column};
      gemm::multiply<T>(x, num_rows, *w, to);
    } else {
      linear(x, num_rows, *w, part);
    }
    column += w->num_columns;
  }
}

// Rows of y whose slot is negative stay as they are. x and y are plain matrices.
template <class T>
void add_lora(const Matrix<T>& y, const Matrix<const T>& x, const int32_t* slots, int64_t num_rows, const AdapterPart& part,
              int rank, int64_t num_inputs) {
  using namespace lora;
  struct Inner;
  const Grouping grouping(slots, num_rows);
  const Adapters layer{&part, 1, rank};
  float* inner = scratch<Inner, float>(int64_t(grouping.rows.size()) * rank);
  shrink<T>(layer, grouping, x, num_inputs, inner);

  const int64_t num_outputs = part.num_outputs, num_blocks = (num_outputs + block_columns - 1) / block_columns;
  const int64_t blocks_each = std::clamp<int64_t>(wide_bytes / (rank * block_columns * 4), 1, 8);
  const int64_t column_tasks = (num_blocks + blocks_each - 1) / blocks_each;
  parallel_for_all(
      int64_t(grouping.groups.size()),
      [&](int64_t g) { return (grouping.groups[g].count + max_chunk_rows - 1) / max_chunk_rows * column_tasks; },
      [&](int64_t g, int64_t task) {
        struct Wide;
        const Group& group = grouping.groups[g];
        const int64_t start = task / column_tasks * max_chunk_rows, count = std::min(max_chunk_rows, group.count - start);
        const int64_t first = task % column_tasks * blocks_each;
        const int64_t* rows = grouping.rows.data() + group.first + start;
        const float* from = inner + (group.first + start) * rank;
        const int64_t blocks = std::min(blocks_each, num_blocks - first), wide_size = int64_t(rank) * block_columns;
        float* wide = scratch<Wide, float>(blocks * wide_size);
        for (int64_t half = 0; half < 2 * blocks; ++half)
          widen(part.b_of<T>(group.slot), num_outputs, rank, first * block_columns + half * half_block,
                wide + half / 2 * wide_size + half % 2 * half_block);
        for (int64_t row = 0, tile; row < count; row += tile, rows += tile, from += tile * rank) {
          tile = gemm::next_tile(int(count - row));
          for (int64_t b = 0; b < blocks; ++b) {
            const int64_t column = (first + b) * block_columns, valid = std::min<int64_t>(block_columns, num_outputs - column);
            T* to = y.data + column;
            auto to_row = [&](int64_t r, const vec* sums) { add_to(to + rows[r] * y.ld, sums); };
            auto to_rest_of_row = [&](int64_t r, const vec* sums) {
              alignas(64) T rest[block_columns] = {};
              std::memcpy(rest, to + rows[r] * y.ld, valid * sizeof(T));
              add_to(rest, sums);
              std::memcpy(to + rows[r] * y.ld, rest, valid * sizeof(T));
            };
            // Apart, as the compiler keeps the sums of the first in registers.
            if (valid == block_columns) expand(from, from, tile, rank, wide + b * wide_size, to_row);
            else expand(from, from, tile, rank, wide + b * wide_size, to_rest_of_row);
          }
        }
      });
}

}  // namespace quire
