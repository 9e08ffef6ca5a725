// y = x W^T of weights of 2 to 8 bits whose groups of inputs have scales, and of rows of x in eight bits.
//
// Every 32 inputs of a row of x, a unit, share a scale. The sum of a group's products within a unit, in which `zero` is
// taken from each weight, is an exact integer. A result is one chain: for each group, or part of a group in a unit, in
// order, that sum times (scale * scale of x) is added, fused, and then the group's minimum times minus the sum of x. So
// it is the same, bitwise, on every instruction set, and for any number of rows.
//
// A block holds stretches of inputs, of one group or, where scales are integers, of 256 inputs:
//   factors of the scales and of the minimums, float16 [32] each, with integer scales
//   scales [groups][32], minimums [groups][32]; in `nibbles` the two share a byte
//   filled up to 64 bytes; then units of 128 * bits bytes, planes of bits of [8][32][4] weights behind each other:
//   eight bits [8][128]; four [4][128], of which byte b has number b of rows 2 i and 2 i + 1; two [2][128], of rows
//   4 i to 4 i + 3; and one [128], of all eight. Five bits are four and one, six are four and two, three are two and one.
#pragma once

#include "gemm.h"
#include "gemm_int8.h"

namespace quire {
namespace gemm {

constexpr int unit_inputs = 32;
constexpr int unit_row = 4 * block_columns;  // bytes: four inputs of all columns
constexpr int row_tile = 16;
constexpr int most_rows = 64;  // whose sums and numbers of a unit stay in the first-level cache

// x: numbers, and what is known of them, in tiles of row_tile rows (a single row: of one) and a unit.
struct GroupedRows {
  struct Unit {
    float scale;
    int32_t offsets[2];    // -zero * the sum of the numbers: of all of them, or of either half
    float negatives[2];    // -scale * the sum of the numbers, likewise
  };
  int8_t* numbers;
  Unit* units;
  int64_t num_units;
  int tile;

  int64_t place(int64_t row, int64_t unit) const { return (row / tile * num_units + unit) * tile + row % tile; }
};

template <class X>
inline void quantise_row(const X* x, int64_t row, const GroupedRows& to, const Groups& groups) {
  for (int64_t unit = 0; unit < to.num_units; ++unit, x += unit_inputs) {
    const int64_t place = to.place(row, unit);
    uint32_t sums[2];
    const float scale = quantise_group<unit_inputs>(x, to.numbers + place * unit_inputs, sums);
    if (groups.size >= unit_inputs) sums[0] += sums[1];
    auto negative = [&](int i) { return -scale * float(int32_t(sums[i])); };
    auto offset = [&](int i) { return int32_t(-uint32_t(groups.zero) * sums[i]); };
    to.units[place] = {scale, {offset(0), offset(1)}, {negative(0), negative(1)}};
  }
}

// Vectors of bytes: four inputs of `width` columns.
#if defined(__AVX512F__)
using bytes = __m512i;
typedef uint16_t shorts __attribute__((vector_size(64)));
inline bytes load_bytes(const uint8_t* p) { return _mm512_load_si512(p); }
inline bytes every_byte(int x) { return _mm512_set1_epi8(char(x)); }
inline bytes every_int(int32_t x) { return _mm512_set1_epi32(x); }
inline bytes look_up(const uint8_t* table, bytes x) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), x);
}
inline vec to_floats(bytes x) { return _mm512_cvtepi32_ps(x); }
inline bytes add_ints(bytes x, bytes y) { return _mm512_add_epi32(x, y); }
inline bytes add_shorts(bytes x, bytes y) { return _mm512_add_epi16(x, y); }
inline bytes pairs_of_bytes(bytes x, bytes y) { return _mm512_maddubs_epi16(x, y); }
inline bytes pairs_of_shorts(bytes x, int y) { return _mm512_madd_epi16(x, _mm512_set1_epi16(short(y))); }
inline vec load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline vec load_nibbles(const uint8_t* p, bool upper) {
  const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_cvtepi32_ps(upper ? _mm512_srli_epi32(both, 4) : _mm512_and_si512(both, _mm512_set1_epi32(15)));
}
#else
using bytes = __m256i;
typedef uint16_t shorts __attribute__((vector_size(32)));
inline bytes load_bytes(const uint8_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
inline bytes every_byte(int x) { return _mm256_set1_epi8(char(x)); }
inline bytes every_int(int32_t x) { return _mm256_set1_epi32(x); }
inline bytes look_up(const uint8_t* table, bytes x) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), x);
}
inline vec to_floats(bytes x) { return _mm256_cvtepi32_ps(x); }
inline bytes add_ints(bytes x, bytes y) { return _mm256_add_epi32(x, y); }
inline bytes add_shorts(bytes x, bytes y) { return _mm256_add_epi16(x, y); }
inline bytes pairs_of_bytes(bytes x, bytes y) { return _mm256_maddubs_epi16(x, y); }
inline bytes pairs_of_shorts(bytes x, int y) { return _mm256_madd_epi16(x, _mm256_set1_epi16(short(y))); }
inline vec load_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline vec load_nibbles(const uint8_t* p, bool upper) {
  const __m256i both = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm256_cvtepi32_ps(upper ? _mm256_srli_epi32(both, 4) : _mm256_and_si256(both, _mm256_set1_epi32(15)));
}
#endif
// Of each 16 bits; to the left by less than nothing.
inline bytes right(bytes x, int by) { return by < 0 ? bytes(shorts(x) << -by) : bytes(shorts(x) >> by); }

// What is called for every unit is inlined by force: which of it GCC inlines by itself changes with any line of a caller,
// and a call takes the vectors out of their registers.

// sum + w x of 16 inputs. MOST: the largest weight.
template <int MOST>
[[gnu::always_inline]] inline bytes dot(const bytes* w, const int8_t* x, bytes sum) {
  bytes numbers[4];
  for (int i = 0; i < 4; ++i) {
    int32_t four;
    std::memcpy(&four, x + 4 * i, 4);
    numbers[i] = every_int(four);
  }
#if defined(__AVX512VNNI__)
  for (int i = 0; i < 4; ++i) sum = _mm512_dpbusd_epi32(sum, w[i], numbers[i]);
  return sum;
#else
  // Products of two inputs are at most 254 * MOST, and fit in 16 bits while their sum is.
  auto shorts_of = [&](auto&& weight, int first, int stop) {
    bytes total = pairs_of_bytes(weight(first), numbers[first]);
    for (int i = first + 1; i < stop; ++i) total = add_shorts(total, pairs_of_bytes(weight(i), numbers[i]));
    return total;
  };
  auto whole = [&](int i) { return w[i]; };
  if (MOST <= 31) return add_ints(sum, pairs_of_shorts(shorts_of(whole, 0, 4), 1));
  if (MOST <= 63) {
    sum = add_ints(sum, pairs_of_shorts(shorts_of(whole, 0, 2), 1));
    return add_ints(sum, pairs_of_shorts(shorts_of(whole, 2, 4), 1));
  }
  const bytes low = every_byte(15);
  sum = add_ints(sum, pairs_of_shorts(shorts_of([&](int i) { return w[i] & low; }, 0, 4), 1));
  return add_ints(sum, pairs_of_shorts(shorts_of([&](int i) { return right(w[i], 4) & low; }, 0, 4), 16));
#endif
}

template <int BITS, bool TABLED>
struct GroupedKind {
  static constexpr int bits = BITS, most = TABLED ? 255 : (1 << BITS) - 1;

  // Vector v of columns of a unit: [8].
  [[gnu::always_inline]] static void decode(const uint8_t* planes, int v, const uint8_t* table, bytes* w) {
    const uint8_t* p = planes + v * sizeof(bytes);
    if (BITS == 8)
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) w[i] = load_bytes(p + i * unit_row);
    if (BITS == 4 || BITS == 5 || BITS == 6) {
      const bytes low = every_byte(15);
#pragma GCC unroll 8
      for (int i = 0; i < 4; ++i) {
        const bytes two = load_bytes(p + i * unit_row);
        w[2 * i] = two & low;
        w[2 * i + 1] = right(two, 4) & low;
      }
      p += 4 * unit_row;
    }
    if (BITS == 2 || BITS == 3 || BITS == 6) {
      constexpr int at = BITS == 6 ? 4 : 0;
      const bytes mask = every_byte(3 << at);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        const bytes part = right(load_bytes(p + i / 4 * unit_row), i % 4 * 2 - at) & mask;
        w[i] = at ? w[i] | part : part;
      }
      p += 2 * unit_row;
    }
    if (BITS == 3 || BITS == 5) {
      constexpr int at = BITS - 1;
      const bytes mask = every_byte(1 << at), eight = load_bytes(p);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) w[i] = w[i] | (right(eight, i - at) & mask);
    }
    if (TABLED)
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) w[i] = look_up(table, w[i]);
  }
};

// f(kind)
template <class F>
inline void with_kind(const Groups& groups, F&& f) {
  switch (groups.bits) {
    case 2: return f(GroupedKind<2, false>());
    case 3: return f(GroupedKind<3, false>());
    case 4: return groups.table ? f(GroupedKind<4, true>()) : f(GroupedKind<4, false>());
    case 5: return f(GroupedKind<5, false>());
    case 6: return f(GroupedKind<6, false>());
    default: return f(GroupedKind<8, false>());
  }
}

// Scales, or minimums, of a group, from a column on.
[[gnu::always_inline]] inline vec load_scales(const Groups& groups, const char* stretch, bool minimums, int group,
                                              int column) {
  const char* p = stretch + groups.factors_bytes() + group * groups.scales_row();
  auto whole = [&] { return minimums ? p + groups.scales_bytes() : p; };
  auto factors = [&] { return load_half(reinterpret_cast<const uint16_t*>(stretch + 64 * minimums) + column); };
  switch (groups.scale_type) {
    case ScaleType::float32: return load(reinterpret_cast<const float*>(whole()) + column);
    case ScaleType::float16: return load_half(reinterpret_cast<const uint16_t*>(whole()) + column);
    case ScaleType::bfloat16: return load(reinterpret_cast<const bf16*>(whole()) + column);
    case ScaleType::int8: return mul(load(reinterpret_cast<const int8_t*>(whole()) + column), factors());
    default: return mul(load_nibbles(reinterpret_cast<const uint8_t*>(p) + column, minimums), factors());
  }
}

// Scales and minimums of a unit: those of all of it, or of either half.
struct UnitScales {
  vec scales[2], minimums[2];

  [[gnu::always_inline]] UnitScales(const Groups& groups, const char* stretch, int unit, int column) {
    const int group = unit * unit_inputs / groups.size;
    for (int half = 0; half < (groups.size < unit_inputs ? 2 : 1); ++half) {
      scales[half] = load_scales(groups, stretch, false, group + half, column);
      if (groups.has_minimums) minimums[half] = load_scales(groups, stretch, true, group + half, column);
    }
  }

  // sum + what a unit of x adds.
  template <int MOST, bool HALVES, bool MINIMUMS>
  [[gnu::always_inline]] vec add_unit(vec sum, const bytes* w, const int8_t* numbers, const GroupedRows::Unit& x) const {
    bytes products = dot<MOST>(w, numbers, every_int(x.offsets[0]));
    const vec x_scale = splat(x.scale);
    auto add_group = [&](int half) {
      sum = fma(to_floats(products), mul(scales[half], x_scale), sum);
      if (MINIMUMS) sum = fma(minimums[half], splat(x.negatives[half]), sum);
    };
    if (HALVES) {
      add_group(0);
      products = every_int(x.offsets[1]);
    }
    products = dot<MOST>(w + 4, numbers + 16, products);
    add_group(HALVES);
    return sum;
  }
};

// f(whether groups are halves of a unit, whether there are minimums), as constants.
template <class F>
inline void with_groups(const Groups& groups, F&& f) {
  auto with_minimums = [&](auto halves) {
    if (groups.has_minimums) f(halves, std::true_type());
    else f(halves, std::false_type());
  };
  if (groups.size < unit_inputs) with_minimums(std::true_type());
  else with_minimums(std::false_type());
}

inline const char* grouped_block(const Weight& w, int64_t block) {
  return static_cast<const char*>(w.data) + block * w.block_bytes();
}

// acc[STREAMS][32] of one row times as many blocks, which are read side by side.
template <class Kind, bool HALVES, bool MINIMUMS, int STREAMS>
inline void grouped_row(const Weight& w, int64_t block, const GroupedRows& x, float* acc) {
  constexpr int num = block_columns / width;
  const Groups groups = w.groups;
  const int64_t block_bytes = w.block_bytes(), num_units = x.num_units;
  const int units = groups.inputs() / unit_inputs, header = groups.header_bytes();
  vec sums[STREAMS][num];
  for (auto& stream : sums)
    for (vec& sum : stream) sum = zero();
  const char* stretch = grouped_block(w, block);
  // What comes next of a stream, or the first of the next blocks, is asked for little by little: from memory early, and
  // from the second-level cache late, since few lines can be under way to the first. Inlined by force: GCC 12 drops
  // calls of what only prefetches.
  constexpr int near = 1024, far = 4096, unit_bytes = 4 * block_columns * Kind::bits;
  const char* end = stretch + block_bytes;
  auto prefetch = [&](const char* p, int64_t offset, int size) __attribute__((always_inline)) {
    auto ahead = [&](int distance) {
      return p + distance + (p + distance < end ? 0 : (STREAMS - 1) * block_bytes) + offset;
    };
    const char *soon = ahead(near), *later = ahead(far);
    for (int i = 0; i < size; i += 64) {
      _mm_prefetch(soon + i, _MM_HINT_T0);
      _mm_prefetch(later + i, _MM_HINT_T1);
    }
  };
  for (int64_t done = 0; done < num_units; stretch += groups.stretch_bytes()) {
    for (int q = 0; q < STREAMS; ++q) prefetch(stretch, q * block_bytes, header);
    const char* planes = stretch + header;
    for (int unit = 0; unit < units; ++unit, ++done, planes += unit_bytes) {
      for (int q = 0; q < STREAMS; ++q)
        for (int v = 0; v < num; ++v) {
          prefetch(planes, q * block_bytes + v * (unit_bytes / num), unit_bytes / num);
          bytes weights[8];
          Kind::decode(reinterpret_cast<const uint8_t*>(planes) + q * block_bytes, v, groups.table, weights);
          const UnitScales scales(groups, stretch + q * block_bytes, unit, v * width);
          sums[q][v] = scales.template add_unit<Kind::most, HALVES, MINIMUMS>(
              sums[q][v], weights, x.numbers + done * unit_inputs, x.units[done]);
        }
    }
  }
  for (int q = 0; q < STREAMS; ++q)
    for (int v = 0; v < num; ++v) store(acc + q * block_columns + v * width, sums[q][v]);
}

// acc[rows][32] of up to most_rows rows from `row` on, a multiple of 16, times a block. `prefetch`: w comes from memory.
template <class Kind, bool HALVES, bool MINIMUMS>
inline void grouped_rows(const Weight& w, int64_t block, const GroupedRows& x, int64_t row, int rows, float* acc,
                         bool prefetch) {
  constexpr int num = sizeof(bytes) == 64 ? 2 : 1;  // vectors of weights in registers
  const Groups groups = w.groups;
  const int units = groups.inputs() / unit_inputs, header = groups.header_bytes();
  const char* stretch = grouped_block(w, block);
  std::memset(acc, 0, rows * block_columns * sizeof(float));
  for (int64_t done = 0; done < x.num_units; stretch += groups.stretch_bytes()) {
    if (prefetch) prefetch_ahead(stretch, header);
    const char* planes = stretch + header;
    for (int unit = 0; unit < units; ++unit, ++done, planes += 4 * block_columns * Kind::bits) {
      if (prefetch) prefetch_ahead(planes, 4 * block_columns * Kind::bits);
      for (int v = 0; v < block_columns / width; v += num) {
        bytes weights[num][8];
        for (int n = 0; n < num; ++n)
          Kind::decode(reinterpret_cast<const uint8_t*>(planes), v + n, groups.table, weights[n]);
        const UnitScales scales[2] = {{groups, stretch, unit, v * width}, {groups, stretch, unit, (v + num - 1) * width}};
        for (int first = 0; first < rows; first += row_tile) {
          const int64_t place = x.place(row + first, done);
          const int8_t* numbers = x.numbers + place * unit_inputs;
          float* to = acc + first * block_columns + v * width;
          const int count = std::min(rows - first, row_tile);
          for (int r = 0; r < count; ++r, numbers += unit_inputs, to += block_columns)
            for (int n = 0; n < num; ++n)
              store(to + n * width, scales[n].template add_unit<Kind::most, HALVES, MINIMUMS>(
                                        load(to + n * width), weights[n], numbers, x.units[place + r]));
        }
      }
    }
  }
}

// acc[blocks][rows][32] of rows from `row` on, a multiple of 16.
inline void grouped_part(const Part& part, const GroupedRows& x, const Weight& w, float* acc) {
  with_kind(w.groups, [&](auto kind) {
    using Kind = decltype(kind);
    with_groups(w.groups, [&](auto halves, auto minimums) {
      if (part.rows == 1 && x.tile == 1) {
        int b = 0;
        for (; b + streams <= part.blocks; b += streams)
          grouped_row<Kind, halves, minimums, streams>(w, part.first_block + b, x, acc + b * block_columns);
        for (; b < part.blocks; ++b)
          grouped_row<Kind, halves, minimums, 1>(w, part.first_block + b, x, acc + b * block_columns);
        return;
      }
      for (int done = 0; done < part.rows; done += most_rows)
        for (int b = 0; b < part.blocks; ++b)
          grouped_rows<Kind, halves, minimums>(w, part.first_block + b, x, part.first_row + done,
                                               std::min(part.rows - done, most_rows),
                                               acc + (int64_t(b) * part.rows + done) * block_columns, done == 0);
    });
  });
}

// See PlainInput.
template <class X>
class GroupedInput {
 public:
  GroupedInput(const Matrix<const X>& x, int64_t num_rows, const Weight& w, Arena& arena)
      : x_(x), num_rows_(num_rows), groups_(w.groups) {
    const int64_t k = w.num_inputs, num_units = k / unit_inputs;
    const int tile = num_rows == 1 ? 1 : row_tile;
    const int64_t padded = (num_rows + tile - 1) / tile * tile;
    quantised_ = {arena.take<int8_t>(padded * k), arena.take<GroupedRows::Unit>(padded * num_units), num_units, tile};
  }

  int64_t num_pieces() const { return num_rows_; }
  int64_t pieces_each() const { return 8192 / (quantised_.num_units * unit_inputs); }
  void prepare(int64_t row) const { quantise_row(x_.data + row * x_.ld, row, quantised_, groups_); }

  template <class Sink>
  void multiply(const Part& part, const Weight& w, Sink& to) const {
    struct Sums;
    float* sums = scratch<Sums, float>(int64_t(part.rows) * part.blocks * block_columns);
    grouped_part(part, quantised_, w, sums);
    to.take(part, sums);
  }

 private:
  Matrix<const X> x_;
  int64_t num_rows_;
  Groups groups_;
  GroupedRows quantised_;
};

}  // namespace gemm
}  // namespace quire
