// y = x W^T with weights and activations of eight bits (w8a8), in integers.
//
// A row of x is quantised when it comes, a scale for every 64 inputs; weights have one for each output feature. The
// sums of a group are exact integers, and its scale times them is added in the order of the groups: the result is
// the same, bitwise, on every instruction set that fuses multiplication and addition, and for any number of rows.
//
// Weights are stored plus 128, since the instructions want one side without sign: what that adds to a group's sum,
// 128 times the sum of x's numbers, is taken off where the sum begins. A block holds [K / 4][32][4].
//
// Without AVX-512 numbers of x are 16 bits wide, the middle two of every four having changed places: weights are
// widened in registers, the even and the odd ones of each four.
#pragma once

#include "gemm.h"
#include "gemm_avx2.h"

namespace quire {
namespace gemm {

constexpr int int8_group = 64;  // inputs

#if defined(__AVX512F__)
using Number = int8_t;
#else
using Number = int16_t;
#endif

// x: numbers in tiles of 16 rows and a group, those of the same rows behind each other.
struct QuantisedRows {
  Number* numbers;
  float* scales;     // [rows][groups]
  int32_t* offsets;  // [rows][groups]: -128 times the sum of the group's numbers
  int64_t groups;

  Number* of(int64_t row, int64_t group) const { return numbers + ((row / 16 * groups + group) * 16 + row % 16) * 64; }
};

// Rounds, to nearest even, numbers of at most 127; returns their sum.
#if defined(__AVX512F__)
inline uint32_t store_numbers(int8_t* p, vec x) {
  __m512i whole = _mm512_cvtps_epi32(x);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(whole));
  return uint32_t(_mm512_reduce_add_epi32(whole));
}
#else
inline uint32_t sum_of(__m128i shorts) {
  __m128i sums = _mm_madd_epi16(shorts, _mm_set1_epi16(1));
  sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0x4e));
  return uint32_t(_mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0xb1))));
}
inline __m128i shorts_of(__m256i whole) {
  return _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
}
inline uint32_t store_numbers(int16_t* p, vec x) {
  __m128i numbers = shorts_of(_mm256_shuffle_epi32(_mm256_cvtps_epi32(x), 0xd8));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), numbers);
  return sum_of(numbers);
}
inline uint32_t store_numbers(int8_t* p, vec x) {
  __m128i numbers = shorts_of(_mm256_cvtps_epi32(x));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(numbers, numbers));
  return sum_of(numbers);
}
#endif

// Gives the numbers of GROUP inputs, and the sum of every 16 of them; returns their scale.
template <int GROUP, class X, class N>
inline float quantise_group(const X* x, N* numbers, uint32_t* sums) {
  vec most = zero(), is_finite = zero();
  for (int i = 0; i < GROUP; i += width) {
    vec value = load(x + i);
    most = max(most, max(value, sub(zero(), value)));
    is_finite = add(is_finite, sub(value, value));
  }
  float extreme = largest(most), finite = sum(is_finite);
  float inverse = extreme > 0 ? 127.0f / extreme : 0.0f;
  for (int i = 0; i < GROUP; i += 16) {
    sums[i / 16] = 0;
    for (int j = i; j < i + 16; j += width) sums[i / 16] += store_numbers(numbers + j, mul(load(x + j), splat(inverse)));
  }
  // NaN where the group held one, or an infinity; its numbers are of no importance then.
  return finite == 0 ? extreme / 127.0f : finite;
}

template <class X>
inline void quantise_row(const X* x, int64_t row, const QuantisedRows& to) {
  for (int64_t group = 0; group < to.groups; ++group, x += int8_group) {
    uint32_t sums[int8_group / 16];
    to.scales[row * to.groups + group] = quantise_group<int8_group>(x, to.of(row, group), sums);
    to.offsets[row * to.groups + group] = int32_t(-128u * (sums[0] + sums[1] + sums[2] + sums[3]));
  }
}

inline const uint8_t* int8_block(const Weight& w, int64_t block) {
  return static_cast<const uint8_t*>(w.data) + block * w.block_bytes();
}

#if defined(__AVX512VNNI__)

// acc[STREAMS][ROWS][32]: rows from `row` on times STREAMS blocks, which are read side by side.
template <int ROWS, int STREAMS>
inline void int8_tile(const Weight& w, int64_t block, const QuantisedRows& x, int64_t row, float* acc, bool prefetch) {
  vec sums[STREAMS][ROWS][2];
  for (auto& stream : sums)
    for (auto& sum : stream) sum[0] = sum[1] = zero();
  for (int64_t group = 0; group < x.groups; ++group) {
    // The next groups of each stream, or the first of the next blocks: see grouped_row.
    auto after = [&](int groups) {
      return groups * int8_group * block_columns + (group + groups < x.groups ? 0 : (STREAMS - 1) * w.block_bytes());
    };
    const int64_t near = after(1), far = after(2);
    __m512i dots[STREAMS][ROWS][2];
    const int8_t* numbers[ROWS];
    for (int r = 0; r < ROWS; ++r) {
      numbers[r] = x.of(row + r, group);
      for (auto& stream : dots) stream[r][0] = stream[r][1] = _mm512_set1_epi32(x.offsets[(row + r) * x.groups + group]);
    }
    for (int i = 0; i < int8_group; i += 4)
      for (int q = 0; q < STREAMS; ++q) {
        const uint8_t* p = int8_block(w, block + q) + (group * int8_group + i) * block_columns;
        if (prefetch) {
          for (int line = 0; line < 128; line += 64) {
            _mm_prefetch(reinterpret_cast<const char*>(p + near + line), _MM_HINT_T0);
            if (ROWS == 1) _mm_prefetch(reinterpret_cast<const char*>(p + far + line), _MM_HINT_T1);
          }
        }
        __m512i left = _mm512_load_si512(p), right = _mm512_load_si512(p + 64);
        for (int r = 0; r < ROWS; ++r) {
          int32_t four;
          std::memcpy(&four, numbers[r] + i, 4);
          dots[q][r][0] = _mm512_dpbusd_epi32(dots[q][r][0], left, _mm512_set1_epi32(four));
          dots[q][r][1] = _mm512_dpbusd_epi32(dots[q][r][1], right, _mm512_set1_epi32(four));
        }
      }
    for (int q = 0; q < STREAMS; ++q)
      for (int r = 0; r < ROWS; ++r)
        for (int half = 0; half < 2; ++half) {
          vec scale = splat(x.scales[(row + r) * x.groups + group]);
          sums[q][r][half] = fma(_mm512_cvtepi32_ps(dots[q][r][half]), scale, sums[q][r][half]);
        }
  }
  for (int q = 0; q < STREAMS; ++q)
    for (int r = 0; r < ROWS; ++r)
      for (int half = 0; half < 2; ++half) store(acc + (q * ROWS + r) * block_columns + half * 16, sums[q][r][half]);
}

#elif defined(__AVX512F__)

// Four numbers of `width` columns each: number t of every column.
inline vec byte_of(const uint8_t* p, int t) {
  __m512i fours = _mm512_loadu_si512(p);
  return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srl_epi32(fours, _mm_cvtsi32_si128(8 * t)), _mm512_set1_epi32(255)));
}

// The same in float32, which holds the sums of a group exactly (64 * 255 * 127 < 2^24).
template <int ROWS, int STREAMS>
inline void int8_tile(const Weight& w, int64_t block, const QuantisedRows& x, int64_t row, float* acc, bool) {
  static_assert(STREAMS == 1, "");
  constexpr int num = block_columns / width;
  for (int v = 0; v < num; ++v) {
    vec sums[ROWS];
    for (vec& sum : sums) sum = zero();
    for (int64_t group = 0; group < x.groups; ++group) {
      vec dots[ROWS];
      for (int r = 0; r < ROWS; ++r) dots[r] = splat(float(x.offsets[(row + r) * x.groups + group]));
      for (int i = 0; i < int8_group; ++i) {
        const uint8_t* p = int8_block(w, block) + (group * int8_group + i / 4 * 4) * block_columns + v * width * 4;
        vec weights = byte_of(p, i % 4);
        for (int r = 0; r < ROWS; ++r) dots[r] = fma(weights, splat(float(x.of(row + r, group)[i])), dots[r]);
      }
      for (int r = 0; r < ROWS; ++r) sums[r] = fma(dots[r], splat(x.scales[(row + r) * x.groups + group]), sums[r]);
    }
    for (int r = 0; r < ROWS; ++r) store(acc + r * block_columns + v * width, sums[r]);
  }
}

#else

// acc[STREAMS][ROWS][..]: rows from `row` on times NUM vectors of columns of STREAMS blocks, which are read side by
// side; `w` is of the first of the columns, `acc_block` apart are the sums of the blocks. For each four inputs LINES
// cache lines of each block from `ahead` on are asked for.
template <int ROWS, int NUM, int STREAMS, int LINES>
inline void int8_tile(const uint8_t* w, int64_t block_bytes, const QuantisedRows& x, int64_t row, float* acc,
                      int64_t acc_block, const uint8_t* ahead) {
  const __m256i lower = _mm256_set1_epi16(255);
  for (int64_t group = 0; group < x.groups; ++group) {
    __m256i dots[STREAMS][ROWS][NUM];
    const int16_t* numbers = x.of(row, group);
    for (auto& stream : dots)
      for (int r = 0; r < ROWS; ++r)
        for (auto& dot : stream[r]) dot = _mm256_set1_epi32(x.offsets[(row + r) * x.groups + group]);
    for (int i = 0; i < int8_group; i += 4, w += 4 * block_columns) {
      for (int line = 0; line < LINES; ++line, ahead += 64)
        for (int q = 0; q < STREAMS; ++q)
          _mm_prefetch(reinterpret_cast<const char*>(ahead + q * block_bytes), _MM_HINT_T0);
      for (bool odd : {false, true}) {
        for (int q = 0; q < STREAMS; ++q) {
          __m256i weights[NUM];
          for (int v = 0; v < NUM; ++v) {
            __m256i fours = _mm256_load_si256(reinterpret_cast<const __m256i*>(w + q * block_bytes + v * 32));
            weights[v] = odd ? _mm256_srli_epi16(fours, 8) : _mm256_and_si256(fours, lower);
          }
          for (int r = 0; r < ROWS; ++r) {
            int32_t two;
            std::memcpy(&two, numbers + r * int8_group + i + 2 * odd, 4);
            const __m256i pair = _mm256_set1_epi32(two);
            for (int v = 0; v < NUM; ++v) {
              dots[q][r][v] = now(_mm256_add_epi32(dots[q][r][v], _mm256_madd_epi16(weights[v], pair)));
            }
          }
        }
        w = load_again(w);
      }
    }
    for (int q = 0; q < STREAMS; ++q)
      for (int r = 0; r < ROWS; ++r) {
        const vec scale = splat(x.scales[(row + r) * x.groups + group]);
        float* to = acc + q * acc_block + r * block_columns;
        for (int v = 0; v < NUM; ++v, to += width)
          store(to, fma(_mm256_cvtepi32_ps(dots[q][r][v]), scale, group ? load(to) : zero()));
      }
  }
}

#endif

#if defined(__AMX_INT8__)

// acc[STREAMS][rows][32] of up to 16 rows from `row` on, a multiple of 16, times as many blocks, which are read side by
// side. Sums of a group leave the tiles while those of the next one are computed.
template <int STREAMS>
inline void int8_tiles(const Weight& w, int64_t block, const QuantisedRows& x, int64_t row, int rows, float* acc,
                       int64_t acc_block, bool prefetch) {
  constexpr int stride = block_columns * 4, step = int8_group * block_columns;
  alignas(64) int32_t dots[2][16][block_columns];
  const uint8_t* weights = int8_block(w, block);
  const int64_t block_size = w.block_bytes();
  auto take = [&](int64_t turn) {
    const int64_t group = turn / STREAMS;
    float* sums = acc + turn % STREAMS * acc_block;
    for (int r = 0; r < rows; ++r) {
      const __m512i offset = _mm512_set1_epi32(x.offsets[(row + r) * x.groups + group]);
      const vec scale = splat(x.scales[(row + r) * x.groups + group]);
      for (int half = 0; half < 2; ++half) {
        __m512i whole = _mm512_add_epi32(_mm512_load_si512(&dots[turn % 2][r][half * 16]), offset);
        float* sum = sums + r * block_columns + half * 16;
        store(sum, fma(_mm512_cvtepi32_ps(whole), scale, group ? load(sum) : zero()));
      }
    }
  };
  configure_tiles(rows, rows);
  int64_t turn = 0;
  for (int64_t group = 0; group < x.groups; ++group, weights += step) {
    const uint8_t* next = weights + step + (group + 1 < x.groups ? 0 : (STREAMS - 1) * block_size);
    for (int q = 0; q < STREAMS; ++q, ++turn) {
      if (prefetch)
        for (int line = 0; line < step / 64 / STREAMS; ++line, next += 64)
          for (int s = 0; s < STREAMS; ++s)
            _mm_prefetch(reinterpret_cast<const char*>(next + s * block_size), _MM_HINT_T0);
      _tile_zero(0);
      _tile_zero(1);
      _tile_loadd(4, x.of(row, group), 64);
      _tile_loadd(6, weights + q * block_size, stride);
      _tile_dpbsud(0, 4, 6);
      _tile_loadd(7, weights + q * block_size + 64, stride);
      _tile_dpbsud(1, 4, 7);
      _tile_stored(0, &dots[turn % 2][0][0], stride);
      _tile_stored(1, &dots[turn % 2][0][16], stride);
      asm volatile("" ::: "memory");
      if (turn) take(turn - 1);
    }
  }
  take(turn - 1);
}

#endif

// acc[blocks][rows][32] of rows from `row` on, a multiple of 16.
#if defined(__AVX512F__)
inline void int8_rows(const Weight& w, int64_t block, int blocks, const QuantisedRows& x, int64_t row, int rows,
                      float* acc) {
#if defined(__AVX512VNNI__)
  if (rows == 1)
    for (; blocks >= 4; blocks -= 4, block += 4, acc += 4 * block_columns) int8_tile<1, 4>(w, block, x, row, acc, true);
#endif
#if defined(__AMX_INT8__)
  if (rows > 1)
    for (; blocks >= 4; blocks -= 4, block += 4, acc += 4 * rows * block_columns)
      for (int done = 0; done < rows; done += 16)
        int8_tiles<4>(w, block, x, row + done, std::min(rows - done, 16), acc + done * block_columns,
                      rows * block_columns, done == 0);
#endif
  for (int b = 0; b < blocks; ++b)
    for (int done = 0; done < rows;) {
      float* to = acc + (b * rows + done) * block_columns;
      bool is_first = done == 0;
#if defined(__AMX_INT8__)
      if (rows > 1) {
        int count = std::min(rows - done, 16);
        int8_tiles<1>(w, block + b, x, row + done, count, to, 0, is_first);
        done += count;
        continue;
      }
#endif
      if (rows - done >= 4) {
        int8_tile<4, 1>(w, block + b, x, row + done, to, is_first);
        done += 4;
      } else {
        int8_tile<1, 1>(w, block + b, x, row + done, to, is_first);
        done += 1;
      }
    }
}
#else
inline void int8_rows(const Weight& w, int64_t block, int blocks, const QuantisedRows& x, int64_t row, int rows,
                      float* acc) {
  const int64_t block_bytes = w.block_bytes();
  const uint8_t* data = int8_block(w, block);
  if (rows == 1)
    for (; blocks >= 2; blocks -= 2, data += 2 * block_bytes, acc += 2 * block_columns)
      int8_tile<1, 4, 2, 2>(data, block_bytes, x, row, acc, block_columns, data + 2048);
  for (; blocks > 0; --blocks, data += block_bytes)
    for (int done = 0, count; done < rows; done += count, acc += count * block_columns) {
      // A tile of numbers is not left.
      count = next_wide_tile(std::min(rows - done, 16 - done % 16));
      with_rows<wide_rows>(count, [&](auto n) {
        constexpr int num = n <= 2 ? 4 : 2;
        for (int v = 0; v < 4; v += num) {
          if (done == 0) int8_tile<n, num, 1, num / 2>(data + v * 32, 0, x, row, acc + v * width, 0, data + 4096 + v * 32);
          else int8_tile<n, num, 1, 0>(data + v * 32, 0, x, row + done, acc + v * width, 0, nullptr);
        }
      });
    }
}
#endif

// See PlainInput.
template <class X>
class Int8Input {
 public:
  Int8Input(const Matrix<const X>& x, int64_t num_rows, const Weight& w, Arena& arena) : x_(x), num_rows_(num_rows) {
    const int64_t k = w.num_inputs, groups = k / int8_group, padded = (num_rows + 15) / 16 * 16;
    quantised_ = {arena.take<Number>(padded * k), arena.take<float>(num_rows * groups),
                  arena.take<int32_t>(num_rows * groups), groups};
  }

  int64_t num_pieces() const { return num_rows_; }
  int64_t pieces_each() const { return 8192 / (quantised_.groups * int8_group); }
  void prepare(int64_t row) const { quantise_row(x_.data + row * x_.ld, row, quantised_); }

  template <class Sink>
  void multiply(const Part& part, const Weight& w, Sink& to) const {
    struct Sums;
    float* sums = scratch<Sums, float>(int64_t(part.rows) * part.blocks * block_columns);
    int8_rows(w, part.first_block, part.blocks, quantised_, part.first_row, part.rows, sums);
    to.take(part, sums);
  }

 private:
  Matrix<const X> x_;
  int64_t num_rows_;
  QuantisedRows quantised_;
};

}  // namespace gemm
}  // namespace quire
