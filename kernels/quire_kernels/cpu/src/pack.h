// Packing of weights, once at load.
#pragma once

#include "gemm.h"

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

}  // namespace quire
