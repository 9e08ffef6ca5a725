// Packing of weights, once at load.
#pragma once

#include "gemm.h"
#include "gemm_grouped.h"

namespace quire {

// Row of W that is column c of the packed weights: gates and ups take turns, sixteen at a time.
inline int64_t packed_row(const Weight& w, int64_t c) {
  if (w.activation == Activation::none) return c;
  int64_t block = c / block_columns, j = c % block_columns;
  return j < half_block ? block * half_block + j : w.num_columns / 2 + block * half_block + j - half_block;
}

// Position of input i of a block's column c in pair order.
inline int64_t pair_place(int64_t i, int64_t c) { return i / 2 * 2 * block_columns + 2 * c + i % 2; }

// Writes W, [N][K] and contiguous, into the memory of `w`, padded with zeros to whole blocks. T is float or bfloat16
// for those formats, int8_t for quantised ones: their numbers, [-127, 127] or [-8, 7], with the scales of each
// row, float32 [N][1] or [N][K / 32]. `bias` is float32 [N] or null.
template <class T>
void pack(const T* source, const float* scales, const float* bias, const Weight& w) {
  // The engine only reads weights; here they are still to be written.
  char* data = static_cast<char*>(const_cast<void*>(w.data));
  float* packed_scales = const_cast<float*>(w.scales);
  float* packed_bias = const_cast<float*>(w.bias);
  int64_t k = w.num_inputs, num_scales = w.format == Format::int4 ? k / int4_group : 1;
  parallel_for(int(w.num_blocks()), [&](int block) {
    char* to = data + block * w.block_bytes();
    std::memset(to, 0, w.block_bytes());
    for (int64_t c = 0; c < block_columns; ++c) {
      int64_t column = int64_t(block) * block_columns + c;
      bool is_there = column < w.num_columns;
      int64_t row = is_there ? packed_row(w, column) : 0;
      const T* from = source + row * k;
      if (bias) packed_bias[column] = is_there ? bias[row] : 0;
      if (scales)
        for (int64_t s = 0; s < num_scales; ++s)
          packed_scales[(block * num_scales + s) * block_columns + c] = is_there ? scales[row * num_scales + s] : 0;
      if (!is_there) continue;
      for (int64_t i = 0; i < k; ++i) {
        if constexpr (sizeof(T) == 4) {
          reinterpret_cast<float*>(to)[i * block_columns + c] = from[i];
        } else if constexpr (sizeof(T) == 2) {
          reinterpret_cast<bf16*>(to)[pair_place(i, c)] = from[i];
        } else if (w.format == Format::w8a8) {
          reinterpret_cast<uint8_t*>(to)[i / 4 * 4 * block_columns + 4 * c + i % 4] = uint8_t(from[i] + 128);
        } else if (w.format == Format::int8) {
          reinterpret_cast<int8_t*>(to)[pair_place(i, c)] = from[i];
        } else {
          // Byte b of a line of 64 numbers holds those at b and b + 32.
          int64_t place = pair_place(i, c) % (2 * block_columns), line = i / 2 * block_columns;
          to[line + place % block_columns] |= char((from[i] + 8) << (place < block_columns ? 0 : 4));
        }
      }
    }
  });
}

// Rows of W as they were before packing, into y [n][K]: the lookup of an embedding in an output head's weights.
// T is the type of the format, which is not quantised, and the weight not gated.
template <class T>
void unpack_rows(const Weight& w, const int64_t* rows, int64_t num_rows, T* y) {
  int64_t k = w.num_inputs;
  parallel_for(num_rows, 2048 / k, [&](int64_t n) {
    int64_t block = rows[n] / block_columns, c = rows[n] % block_columns;
    const char* from = static_cast<const char*>(w.data) + block * w.block_bytes();
    T* to = y + n * k;
    if constexpr (sizeof(T) == 4) {
      for (int64_t i = 0; i < k; ++i) to[i] = reinterpret_cast<const float*>(from)[i * block_columns + c];
    } else {
      for (int64_t i = 0; i < k; i += 2)
        std::memcpy(to + i, reinterpret_cast<const bf16*>(from) + pair_place(i, c), 2 * sizeof(T));
    }
  });
}

// What grouped weights are packed from, contiguous: codes [N][K] of a byte each; scales and minimums (or null) [N][K / group]
// of the type in a block, nibbles of a byte each; their factors float16 [N][K / 256] where they are integers; float32 [N]
// what rows are multiplied by in the end, and a bias, each of them or null.
struct GroupedSource {
  const uint8_t* codes;
  const void *scales, *minimums, *factors, *minimum_factors;
  const float *row_scales, *bias;
};

// A unit's codes [8][128], a byte each, in planes of bits, which are zeros before.
inline void pack_planes(const uint8_t* codes, int bits, uint8_t* to) {
  constexpr int row = gemm::unit_row;
  if (bits == 8) std::memcpy(to, codes, 8 * row);
  if (bits >= 4 && bits <= 6) {
    for (int i = 0; i < 8; ++i)
      for (int b = 0; b < row; ++b) to[i / 2 * row + b] |= uint8_t((codes[i * row + b] & 15) << i % 2 * 4);
    to += 4 * row;
  }
  if (bits == 2 || bits == 3 || bits == 6) {
    for (int i = 0; i < 8; ++i)
      for (int b = 0; b < row; ++b) to[i / 4 * row + b] |= uint8_t((codes[i * row + b] >> (bits == 6 ? 4 : 0) & 3) << i % 4 * 2);
    to += 2 * row;
  }
  if (bits == 3 || bits == 5)
    for (int i = 0; i < 8; ++i)
      for (int b = 0; b < row; ++b) to[b] |= uint8_t((codes[i * row + b] >> (bits - 1) & 1) << i);
}

// The four codes of a column in row i of a unit's planes, a byte each.
inline uint32_t unpack_planes(const uint8_t* planes, int bits, int i, int64_t column) {
  auto four = [&](int row) {
    uint32_t out;
    std::memcpy(&out, planes + row * gemm::unit_row + 4 * column, 4);
    return out;
  };
  if (bits == 8) return four(i);
  uint32_t codes = 0;
  int planes_before = 0, bits_before = 0;
  if (bits >= 4) codes = four(i / 2) >> i % 2 * 4 & 0x0f0f0f0f, planes_before = 4, bits_before = 4;
  if (bits % 4 >= 2) codes |= (four(planes_before + i / 4) >> i % 4 * 2 & 0x03030303) << bits_before, planes_before += 2, bits_before += 2;
  if (bits % 2) codes |= (four(planes_before) >> i & 0x01010101) << bits_before;
  return codes;
}

inline void pack_grouped(const GroupedSource& source, const Weight& w) {
  using namespace gemm;
  char* data = static_cast<char*>(const_cast<void*>(w.data));
  float *packed_scales = const_cast<float*>(w.scales), *packed_bias = const_cast<float*>(w.bias);
  const Groups& groups = w.groups;
  const int64_t k = w.num_inputs;
  const int stretch_groups = groups.inputs() / groups.size, size = groups.scales_row() / block_columns;
  parallel_for(int(w.num_blocks()), [&](int block) {
    char* stretch = data + block * w.block_bytes();
    std::memset(stretch, 0, w.block_bytes());
    for (int64_t start = 0; start < k; start += groups.inputs(), stretch += groups.stretch_bytes())
      for (int64_t c = 0; c < block_columns; ++c) {
        const int64_t column = int64_t(block) * block_columns + c;
        if (column >= w.num_columns) break;
        const int64_t row = packed_row(w, column);
        // `count` numbers of every row, of `size` bytes each, behind each other; those that this stretch has.
        auto put = [&](const void* from, int count, int bytes, char* to) {
          if (!from) return;
          const char* p = static_cast<const char*>(from) + (row * (k / groups.inputs()) + start / groups.inputs()) * count * bytes;
          for (int i = 0; i < count; ++i) std::memcpy(to + (i * block_columns + c) * bytes, p + i * bytes, bytes);
        };
        char* scales = stretch + groups.factors_bytes();
        put(source.factors, 1, 2, stretch);
        put(source.minimum_factors, 1, 2, stretch + 64);
        put(source.scales, stretch_groups, size, scales);
        if (groups.scale_type != ScaleType::nibbles) {
          put(source.minimums, stretch_groups, size, scales + groups.scales_bytes());
        } else {
          const uint8_t* minimums = static_cast<const uint8_t*>(source.minimums) + (row * k + start) / groups.size;
          for (int i = 0; i < stretch_groups; ++i) scales[i * block_columns + c] |= char(minimums[i] << 4);
        }
        if (start == 0 && w.scales) packed_scales[column] = source.row_scales[row];
        if (start == 0 && w.bias) packed_bias[column] = source.bias[row];
      }
    uint8_t* planes = reinterpret_cast<uint8_t*>(data + block * w.block_bytes());
    for (int64_t start = 0; start < k; start += unit_inputs, planes += groups.unit_bytes()) {
      if (start % groups.inputs() == 0) planes += groups.header_bytes();
      uint8_t codes[8][block_columns][4] = {};
      for (int64_t c = 0; c < block_columns; ++c) {
        const int64_t column = int64_t(block) * block_columns + c;
        if (column >= w.num_columns) break;
        const uint8_t* from = source.codes + packed_row(w, column) * k + start;
        for (int i = 0; i < 8; ++i) std::memcpy(codes[i][c], from + 4 * i, 4);
      }
      pack_planes(&codes[0][0][0], groups.bits, planes);
    }
  });
}

// Rows of grouped weights, in float32 and then rounded to T; otherwise like unpack_rows.
template <class T>
void unpack_grouped_rows(const Weight& w, const int64_t* rows, int64_t num_rows, T* y) {
  using namespace gemm;
  const Groups& groups = w.groups;
  const int64_t k = w.num_inputs;
  parallel_for(num_rows, 2048 / k, [&](int64_t n) {
    const int64_t block = rows[n] / block_columns, c = rows[n] % block_columns;
    const char* stretch = grouped_block(w, block);
    T* to = y + n * k;
    for (int64_t start = 0; start < k; start += groups.inputs(), stretch += groups.stretch_bytes())
      for (int input = 0; input < groups.inputs(); input += 4) {
        auto scale_of = [&](bool minimums) {
          alignas(64) float some[width];
          store(some, load_scales(groups, stretch, minimums, input / groups.size, int(c) / width * width));
          return some[c % width];
        };
        const float scale = scale_of(false), minimum = groups.has_minimums ? scale_of(true) : 0;
        const char* planes = stretch + groups.header_bytes() + input / unit_inputs * groups.unit_bytes();
        uint32_t codes = unpack_planes(reinterpret_cast<const uint8_t*>(planes), groups.bits, input % unit_inputs / 4, c);
        for (int i = 0; i < 4; ++i, codes >>= 8) {
          const int code = codes & 255;
          float value = float((groups.table ? groups.table[code] : code) - groups.zero) * scale;
          // Rounded, not fused with what follows.
          asm volatile("" : "+x"(value));
          value -= minimum;
          if (w.scales) value *= w.scales[rows[n]];
          to[start + input + i] = from_float<T>(value);
        }
      }
  });
}

}  // namespace quire
