// y = x W^T of bfloat16 rows on processors with 256-bit vectors, which have no products of bfloat16.
//
// Widening and broadcasting a number of x in scalar registers costs more than the products with it. So x is widened
// to float32 once, before the tasks, into tiles of up to `wide_rows` rows: [K][rows of the tile], a chunk of which
// lies in one place. Weights are widened in registers, as they are read; quantised ones for more rows than a tile has,
// once per chunk.
//
// One chain of additions over K as everywhere; of four-bit weights one for each group, whose result times the group's
// scale is added in the order of the groups.
#pragma once

#include "gemm.h"

#if !defined(__AVX512F__)

namespace quire {
namespace gemm {

constexpr int wide_rows = 6;      // 6 x 16 sums, a line of weights and a number of x fill the registers
constexpr int wide_inputs = 256;  // of K: 16 KiB of bfloat16, beside 6 KiB of x in the first-level cache
constexpr int wide_room = 128;    // the same in float32
constexpr int64_t wide_cache = 192 << 10;  // of x, which stay in the second-level cache

// Rows of the next tile, where tiles are as equal as can be: 16 rows are 6, 5 and 5.
inline int next_wide_tile(int rows) {
  const int tiles = (rows + wide_rows - 1) / wide_rows;
  return (rows + tiles - 1) / tiles;
}

// The compiler does what leads to `sum` before what follows: without that it keeps more numbers than registers hold.
template <class V>
inline V now(V sum) {
  asm volatile("" : "+x"(sum));
  return sum;
}

// The compiler takes the place for another: it loads again what it would else keep, for which registers do not suffice.
template <class T>
inline const T* load_again(const T* p) {
  asm volatile("" : "+r"(p));
  return p;
}

// to[k][ROWS]
template <int ROWS>
inline void widen_x(const bf16* x, int64_t ldx, int64_t k, float* to) {
  for (int64_t i = 0; i < k; i += width, to += width * ROWS) {
    if (ROWS == 1) {
      store(to, load(x + i));
      continue;
    }
    vec rows[width];
    for (int r = 0; r < width; ++r) rows[r] = r < ROWS ? load(x + r * ldx + i) : zero();
    transpose(rows);
    alignas(32) float columns[width][width];
    for (int c = 0; c < width; ++c) {
      store(columns[c], rows[c]);
      std::memcpy(to + c * ROWS, columns[c], ROWS * sizeof(float));
    }
  }
}

// Bytes of two inputs and 32 columns; float32 is what weights are widened to, [K][32].
template <Format FORMAT>
constexpr int pair_bytes = FORMAT == Format::float32 ? 256 : FORMAT == Format::bfloat16 ? 128 : FORMAT == Format::int8 ? 64 : 32;

// Eight columns of the first or the second of two inputs. Four-bit weights are not scaled, and their second and third
// four of every 16 columns have changed places.
template <Format FORMAT>
inline vec wide_weights(const char* pair, int v, bool second) {
  auto bytes = [&](int offset) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pair + offset)); };
  const __m256i upper = _mm256_set1_epi32(int(0xffff0000));
  auto half = [&](__m256i both) {
    return _mm256_castsi256_ps(second ? _mm256_and_si256(both, upper) : _mm256_slli_epi32(both, 16));
  };
  if constexpr (FORMAT == Format::float32) {
    return load(reinterpret_cast<const float*>(pair) + second * block_columns + v * width);
  } else if constexpr (FORMAT == Format::bfloat16) {
    return half(bytes(v * 32));
  } else if constexpr (FORMAT == Format::int8) {
    __m256i both = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(pair + v * 16)));
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(second ? both : _mm256_slli_epi32(both, 16), 16));
  } else {
    // The bytes of -8 to 7 in bfloat16.
    const __m256i lower_bytes = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, -32, -64, -96, -128, 64, 0, -128, 0, -128, 0, 64, -128, -96, -64, -32));
    const __m256i upper_bytes = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        -63, -64, -64, -64, -64, -64, -64, -65, 0, 63, 64, 64, 64, 64, 64, 64));
    __m256i packed = bytes(0);
    __m256i numbers = _mm256_and_si256(v < 2 ? packed : _mm256_srli_epi16(packed, 4), _mm256_set1_epi8(15));
    __m256i lower = _mm256_shuffle_epi8(lower_bytes, numbers), high = _mm256_shuffle_epi8(upper_bytes, numbers);
    return half(v % 2 ? _mm256_unpackhi_epi8(lower, high) : _mm256_unpacklo_epi8(lower, high));
  }
}

// Brings 16 columns of four-bit weights into their order.
inline void swap_quarters(vec& left, vec& right) {
  vec first = _mm256_permute2f128_ps(left, right, 0x20);
  right = _mm256_permute2f128_ps(left, right, 0x31);
  left = first;
}

// Inputs [0, k) to room[k][32].
template <Format FORMAT>
inline void widen_weights(const char* from, int k, float* room) {
  constexpr int num = block_columns / width;
  for (int i = 0; i < k; i += 2, from += pair_bytes<FORMAT>) {
    if (FORMAT == Format::int8 || i % 4 == 0) prefetch_ahead(from);
    for (bool second : {false, true}) {
      vec weights[num];
      for (int v = 0; v < num; ++v) weights[v] = wide_weights<FORMAT>(from, v, second);
      if (FORMAT == Format::int4)
        for (int v = 0; v < num; v += 2) swap_quarters(weights[v], weights[v + 1]);
      for (int v = 0; v < num; ++v, room += width) store(room, weights[v]);
    }
  }
}

// acc[STREAMS][ROWS][..] += x[k][ROWS] w of NUM vectors of columns of as many blocks, or = with `first`. Blocks are
// `block_bytes` apart, their sums `acc_block`. SCALED: of four-bit weights, `scales` are those of the chunk's groups.
// For each pair of inputs LINES cache lines from `ahead` on are asked for.
template <Format FORMAT, bool SCALED, int ROWS, int NUM, int STREAMS, int LINES>
inline void wide_tile(const float* x, const char* w, int64_t block_bytes, const float* scales, int64_t scales_block, int k,
                      float* acc, int64_t acc_block, bool first, const char* ahead) {
  const int step = SCALED ? int4_group : k;
  for (int start = 0; start < k; start += step, scales += block_columns, first = false) {
    vec sums[STREAMS][ROWS][NUM];
    for (int q = 0; q < STREAMS; ++q)
      for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < NUM; ++v)
          sums[q][r][v] = first || SCALED ? zero() : load(acc + q * acc_block + r * block_columns + v * width);
    for (int i = 0; i < step; i += 2, w += pair_bytes<FORMAT>) {
      for (int line = 0; line < LINES; ++line, ahead += 64)
        for (int q = 0; q < STREAMS; ++q) _mm_prefetch(ahead + q * block_bytes, _MM_HINT_T0);
      for (bool second : {false, true}) {
        for (int q = 0; q < STREAMS; ++q) {
          vec weights[NUM];
          for (int v = 0; v < NUM; ++v) weights[v] = wide_weights<FORMAT>(w + q * block_bytes, v, second);
          for (int r = 0; r < ROWS; ++r) {
            const vec value = splat(x[r]);
            for (int v = 0; v < NUM; ++v) {
              sums[q][r][v] = now(fma(value, weights[v], sums[q][r][v]));
            }
          }
        }
        x = load_again(x + ROWS);
        if (FORMAT == Format::bfloat16) w = load_again(w);
      }
    }
    for (int q = 0; q < STREAMS; ++q)
      for (int r = 0; r < ROWS; ++r) {
        float* to = acc + q * acc_block + r * block_columns;
        if (FORMAT == Format::int4)
          for (int v = 0; v < NUM; v += 2) swap_quarters(sums[q][r][v], sums[q][r][v + 1]);
        for (int v = 0; v < NUM; ++v, to += width)
          store(to, SCALED ? fma(sums[q][r][v], load(scales + q * scales_block + v * width), first ? zero() : load(to))
                           : sums[q][r][v]);
      }
  }
}

// All rows, in tiles, times a chunk of a block. LINES: while the first tile is computed, for each pair of inputs so many
// lines from `ahead` on are asked for.
template <Format FORMAT, bool SCALED, int LINES>
inline void wide_chunk(int rows, const float* x, int64_t k, int64_t start, int size, const char* w, const float* scales,
                       float* acc, const char* ahead) {
  for (int row = 0, count; row < rows; row += count) {
    count = next_wide_tile(rows - row);
    with_rows<wide_rows>(count, [&](auto n) {
      constexpr int num = n <= 2 ? 4 : 2;
      const float* from = x + row * k + start * n;
      for (int v = 0; v < 4; v += num) {
        const char* weights = w + pair_bytes<FORMAT> * v / (FORMAT == Format::float32 ? 8 : 4);
        float* to = acc + row * block_columns + v * width;
        if (LINES && row == 0)
          wide_tile<FORMAT, SCALED, n, num, 1, LINES * num / 4>(from, weights, 0, scales + v * width, 0, size, to, 0, start == 0, ahead + v / num * (size / 2) * (LINES * num / 4) * 64);
        else
          wide_tile<FORMAT, SCALED, n, num, 1, 0>(from, weights, 0, scales + v * width, 0, size, to, 0, start == 0, nullptr);
      }
    });
  }
}

// acc[blocks][32] of one row; two blocks are read side by side.
template <Format FORMAT>
inline void wide_row(const Weight& w, int64_t block, int blocks, const float* x, float* acc) {
  constexpr bool scaled = FORMAT == Format::int4;
  const int k = int(w.num_inputs);
  auto run = [&](auto n) {
    for (; blocks >= n; blocks -= n, block += n, acc += n * block_columns) {
      const char* data = static_cast<const char*>(w.data) + block * w.block_bytes();
      wide_tile<FORMAT, scaled, 1, 4, n, pair_bytes<FORMAT> / 64>(
          x, data, w.block_bytes(), w.scales + block * k, k, k, acc, block_columns, true, data + 4096);
    }
  };
  if (!scaled) run(std::integral_constant<int, 2>());
  run(std::integral_constant<int, 1>());
}

template <Format FORMAT>
inline void wide_part(const Part& part, const float* x, const Weight& w, float* sums) {
  struct Room;
  constexpr bool scaled = FORMAT == Format::int4;
  if (part.rows == 1) return wide_row<FORMAT>(w, part.first_block, part.blocks, x, sums);
  const int64_t k = w.num_inputs, chunk = scaled ? wide_room : wide_inputs, chunks = (k + chunk - 1) / chunk;
  float* room = scaled ? scratch<Room, float>(wide_room * block_columns) : nullptr;
  // Block by block, unless x has to be read from far then.
  const bool by_block = part.rows * k * int64_t(sizeof(float)) <= wide_cache;
  auto start_of = [&](int64_t turn) { return (by_block ? turn % chunks : turn / part.blocks) * chunk; };
  auto block_of = [&](int64_t turn) { return by_block ? turn / chunks : turn % part.blocks; };
  auto data_of = [&](int64_t turn) {
    return static_cast<const char*>(w.data) + (part.first_block + block_of(turn)) * w.block_bytes() +
           start_of(turn) / 2 * pair_bytes<FORMAT>;
  };
  for (int64_t turn = 0; turn < chunks * part.blocks; ++turn) {
    const int64_t start = start_of(turn), block = block_of(turn);
    const int size = int(std::min(chunk, k - start));
    float* acc = sums + block * part.rows * block_columns;
    const char* data = data_of(turn);
    const float* scales = nullptr;
    if (scaled) scales = w.scales + ((part.first_block + block) * k + start) / int4_group * block_columns;
    if constexpr (scaled) {
      widen_weights<FORMAT>(data, size, room);
      wide_chunk<Format::float32, scaled, 0>(part.rows, x, k, start, size, reinterpret_cast<const char*>(room), scales, acc, nullptr);
    } else {
      wide_chunk<FORMAT, false, pair_bytes<FORMAT> / 64>(part.rows, x, k, start, size, data, nullptr, acc, data_of(turn + 1));
    }
  }
}

// See PlainInput.
class WideInput {
 public:
  WideInput(const Matrix<const bf16>& x, int64_t num_rows, const Weight& w, Arena& arena)
      : x_(x), split_(num_rows, w), k_(w.num_inputs), wide_(arena.take<float>(num_rows * k_)),
        piece_(std::max<int64_t>(wide_inputs, 8192 / num_rows / width * width)), pieces_((k_ + piece_ - 1) / piece_) {}

  int64_t num_pieces() const { return split_.num_row_tasks() * pieces_; }
  int64_t pieces_each() const { return 1; }

  void prepare(int64_t task) const {
    const Part part = split_.part(int(task / pieces_ * split_.num_columns()));
    const int64_t start = task % pieces_ * piece_, size = std::min(piece_, k_ - start);
    for (int row = 0, count; row < part.rows; row += count) {
      count = next_wide_tile(part.rows - row);
      with_rows<wide_rows>(count, [&](auto n) {
        widen_x<n>(x_.data + (part.first_row + row) * x_.ld + start, x_.ld, size, wide_ + (part.first_row + row) * k_ + start * n);
      });
    }
  }

  template <class Sink>
  void multiply(const Part& part, const Weight& w, Sink& to) const {
    struct Sums;
    float* sums = scratch<Sums, float>(int64_t(part.rows) * part.blocks * block_columns);
    const float* rows = wide_ + part.first_row * k_;
    switch (w.format) {
      case Format::int8: wide_part<Format::int8>(part, rows, w, sums); break;
      case Format::int4: wide_part<Format::int4>(part, rows, w, sums); break;
      default: wide_part<Format::bfloat16>(part, rows, w, sums);
    }
    to.take(part, sums);
  }

 private:
  Matrix<const bf16> x_;
  Split split_;
  int64_t k_;
  float* wide_;
  int64_t piece_, pieces_;
};

}  // namespace gemm
}  // namespace quire

#endif
