// Packing of weights, once at load.
#pragma once

#include "blocks.h"
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

constexpr int64_t packed_at_once = 128;  // inputs of a block, which stay in the first-level cache while its columns take turns

// A row in eight bits, as `quantize_weight` rounds it, but for rows that are not finite, whose scale is NaN, and numbers
// too small for a scale; returns its scale.
template <class T>
inline float quantise_weights(const T* from, int64_t k, int8_t* to) {
  vec most = zero(), is_finite = zero();
  for (int64_t i = 0; i < k; i += width) {
    const vec value = load(from + i);
    most = max(most, max(value, sub(zero(), value)));
    is_finite = add(is_finite, sub(value, value));
  }
  const float finite = sum(is_finite), scale = finite == 0 ? largest(most) / 127.0f : finite;
  if (!(scale > 0)) {
    std::memset(to, 0, k);
    return scale;
  }
  for (int64_t i = 0; i < k; i += width)
    gemm::store_numbers(to + i, max(min(div(load(from + i), splat(scale)), splat(127.0f)), splat(-127.0f)));
  return scale;
}

// Gives a block `count` columns of packed_at_once inputs, or as many as there are from input `start` on.
template <class T>
inline void pack_inputs(const T* const* columns, int count, int64_t start, const Weight& w, char* block) {
  const int64_t stop = std::min(w.num_inputs, start + packed_at_once);
  for (int c = 0; c < count; ++c) {
    const T* from = columns[c];
    // Inputs that lie beside each other in the block, as one number.
    auto put = [&](auto together, auto flip) {
      constexpr int64_t size = sizeof(together) / sizeof(T);
      auto* to = reinterpret_cast<decltype(together)*>(block) + c;
      for (int64_t i = start; i < stop; i += size) {
        std::memcpy(&together, from + i, sizeof together);
        to[i / size * block_columns] = together ^ flip;
      }
    };
    if constexpr (sizeof(T) > 1) {
      put(uint32_t(), 0u);
    } else if (w.format == Format::w8a8) {
      put(uint32_t(), 0x80808080u);
    } else if (w.format == Format::int8) {
      put(uint16_t(), uint16_t(0));
    } else {
      for (int64_t i = start; i < stop; ++i) {
        // Byte b of a line of 64 numbers holds those at b and b + 32.
        int64_t place = pair_place(i, c) % (2 * block_columns), line = i / 2 * block_columns;
        block[line + place % block_columns] |= char((from[i] + 8) << (place < block_columns ? 0 : 4));
      }
    }
  }
}

// Writes W, [N][K] and contiguous, into the memory of `w`, padded with zeros to whole blocks. T is float or bfloat16
// for those formats, and for int8 and w8a8, which are quantised on the way; or int8_t for quantised ones: their numbers,
// [-127, 127] or [-8, 7], with the scales of each row, float32 [N][1] or [N][K / 32]. `bias` is float32 [N] or null.
template <class T>
void pack(const T* source, const float* scales, const float* bias, const Weight& w) {
  struct Codes;
  // The engine only reads weights; here they are still to be written.
  char* data = static_cast<char*>(const_cast<void*>(w.data));
  float* packed_scales = const_cast<float*>(w.scales);
  float* packed_bias = const_cast<float*>(w.bias);
  const int64_t k = w.num_inputs, num_scales = w.format == Format::int4 ? k / int4_group : 1;
  const bool quantises = sizeof(T) > 1 && w.scales;
  parallel_for(int(w.num_blocks()), [&](int block) {
    char* to = data + block * w.block_bytes();
    const int64_t first = int64_t(block) * block_columns;
    const int count = int(std::min<int64_t>(block_columns, w.num_columns - first));
    if (count < block_columns || w.format == Format::int4) std::memset(to, 0, w.block_bytes());
    int8_t* codes = quantises ? scratch<Codes, int8_t>(block_columns * k) : nullptr;
    const T* columns[block_columns];
    const int8_t* coded[block_columns];
    for (int c = 0; c < block_columns; ++c) {
      const bool is_there = c < count;
      const int64_t row = is_there ? packed_row(w, first + c) : 0;
      columns[c] = source + row * k;
      coded[c] = codes + c * k;
      if (bias) packed_bias[first + c] = is_there ? bias[row] : 0;
      for (int64_t s = 0; scales && s < num_scales; ++s)
        packed_scales[(block * num_scales + s) * block_columns + c] = is_there ? scales[row * num_scales + s] : 0;
      if constexpr (sizeof(T) > 1)
        if (quantises) packed_scales[first + c] = is_there ? quantise_weights(columns[c], k, codes + c * k) : 0;
    }
    for (int64_t start = 0; start < k; start += packed_at_once) {
      if (quantises) pack_inputs(coded, count, start, w, to);
      else pack_inputs(columns, count, start, w, to);
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

// What grouped weights are packed from, contiguous: codes [N][K] of a byte each, scales and minimums (or null) [N][K / group]
// of the type in a block; or, of a `kind`, a file's blocks in place of codes, and no scales. float32 [N]: what rows are
// multiplied by in the end, and a bias, each of them or null.
struct GroupedSource {
  const uint8_t* codes;
  const void *scales, *minimums;
  const float *row_scales, *bias;
  BlockKind kind;
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
  struct Codes;
  char* data = static_cast<char*>(const_cast<void*>(w.data));
  float *packed_scales = const_cast<float*>(w.scales), *packed_bias = const_cast<float*>(w.bias);
  const Groups& groups = w.groups;
  const int64_t inputs = groups.inputs(), stretches = w.num_inputs / inputs, block_size = bytes_of_block(source.kind);
  const int num_scales = int(inputs) / groups.size, scale_size = groups.scales_row() / block_columns;
  auto read = [&](int64_t stretch, BlockRoom& room) -> RowStretch {
    if (source.kind != BlockKind::none) return take_apart(source.kind, source.codes + stretch * block_size, room);
    auto of = [&](const void* scales) {
      return scales ? static_cast<const char*>(scales) + stretch * num_scales * scale_size : nullptr;
    };
    return {source.codes + stretch * inputs, of(source.scales), of(source.minimums), nullptr, nullptr};
  };
  parallel_for(int(w.num_blocks()), [&](int block) {
    char* stretch = data + block * w.block_bytes();
    std::memset(stretch, 0, w.block_bytes());
    const int64_t first = int64_t(block) * block_columns;
    const int count = int(std::min<int64_t>(block_columns, w.num_columns - first));
    auto* codes = scratch<Codes, uint8_t>(inputs * block_columns);  // [inputs / 4][32][4]
    std::memset(codes, 0, inputs * block_columns);
    for (int64_t done = 0; done < stretches; ++done, stretch += groups.stretch_bytes()) {
      char* scales = stretch + groups.factors_bytes();
      uint8_t* planes = reinterpret_cast<uint8_t*>(stretch + groups.header_bytes());
      for (int c = 0; c < count; ++c) {
        const int64_t row = packed_row(w, first + c);
        BlockRoom room;
        const RowStretch from = read(row * stretches + done, room);
        auto put = [&](auto number, const void* numbers, int n, char* to) {
          for (int i = 0; numbers && i < n; ++i)
            std::memcpy(to + (i * block_columns + c) * sizeof number,
                        static_cast<const char*>(numbers) + i * sizeof number, sizeof number);
        };
        auto put_scales = [&](const void* numbers, char* to) {
          if (scale_size == 1) put(uint8_t(), numbers, num_scales, to);
          else if (scale_size == 2) put(uint16_t(), numbers, num_scales, to);
          else put(float(), numbers, num_scales, to);
        };
        put(uint16_t(), from.factor, 1, stretch);
        put(uint16_t(), from.minimum_factor, 1, stretch + 64);
        put_scales(from.scales, scales);
        put_scales(from.minimums, scales + groups.scales_bytes());
        for (int64_t i = 0; i < inputs; i += 4) std::memcpy(codes + i * block_columns + 4 * c, from.codes + i, 4);
        if (done == 0 && w.scales) packed_scales[first + c] = source.row_scales[row];
        if (done == 0 && w.bias) packed_bias[first + c] = source.bias[row];
      }
      for (int64_t i = 0; i < inputs; i += unit_inputs, planes += groups.unit_bytes())
        pack_planes(codes + i * block_columns, groups.bits, planes);
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

// Rows of W as they were, in whichever of the two forms it is.
template <class T>
void look_up(const Weight& w, const int64_t* rows, int64_t num_rows, T* y) {
  if (w.format == Format::grouped) unpack_grouped_rows(w, rows, num_rows, y);
  else unpack_rows(w, rows, num_rows, y);
}

}  // namespace quire
