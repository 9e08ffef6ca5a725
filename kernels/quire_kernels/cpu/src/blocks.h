// Blocks of GGUF files, as ggml lays them out, taken apart.
#pragma once

#include "gemm_grouped.h"

namespace quire {

// Numbers of ggml; none: weights are not in blocks.
enum class BlockKind : int32_t {
  none = 0, q4_0 = 2, q4_1 = 3, q5_0 = 6, q5_1 = 7, q8_0 = 8, q2_k = 10, q3_k = 11, q4_k = 12, q5_k = 13, q6_k = 14,
  iq4_nl = 20, iq4_xs = 23, mxfp4 = 39
};

inline int64_t bytes_of_block(BlockKind kind) {
  switch (kind) {
    case BlockKind::mxfp4: return 17;
    case BlockKind::q4_0:
    case BlockKind::iq4_nl: return 18;
    case BlockKind::q4_1: return 20;
    case BlockKind::q5_0: return 22;
    case BlockKind::q5_1: return 24;
    case BlockKind::q8_0: return 34;
    case BlockKind::q2_k: return 84;
    case BlockKind::q3_k: return 110;
    case BlockKind::iq4_xs: return 136;
    case BlockKind::q4_k: return 144;
    case BlockKind::q5_k: return 176;
    case BlockKind::q6_k: return 210;
    default: return 0;
  }
}

// What a stretch of a row has: codes of a byte each, and the rest as in a block of packed weights, or null.
struct RowStretch {
  const uint8_t* codes;
  const void *scales, *minimums, *factor, *minimum_factor;
};

// Memory for what does not lie in a file as it is in a RowStretch.
struct BlockRoom {
  alignas(64) uint8_t codes[256];
  uint8_t scales[16], minimums[16];
};

// Adds to codes, or puts there first, numbers of BITS bits times 2^shift: the lowest of RUN bytes, the next ones of the same
// bytes, and so on.
template <int BITS, int RUN, bool FIRST = true>
inline void take_bits(const uint8_t* from, int bytes, uint8_t* codes, int shift = 0) {
  for (const uint8_t* end = from + bytes; from < end; from += RUN)
    for (int place = 0; place < 8; place += BITS, codes += RUN)
      for (int i = 0; i < RUN; ++i) {
        const int number = (from[i] >> place & ((1 << BITS) - 1)) << shift;
        codes[i] = uint8_t(FIRST ? number : codes[i] | number);
      }
}

inline RowStretch take_apart(BlockKind kind, const uint8_t* p, BlockRoom& room) {
  uint8_t *codes = room.codes, *scales = room.scales, *minimums = room.minimums;
  const RowStretch of_scale{codes, p, nullptr, nullptr, nullptr};
  // float16 behind the scale, which is added.
  auto with_offset = [&] {
    minimums[0] = p[2], minimums[1] = p[3] ^ 128;
    return RowStretch{codes, p, minimums, nullptr, nullptr};
  };
  auto five_bits = [&](const uint8_t* from) {
    uint32_t high;
    std::memcpy(&high, from, 4);
    take_bits<4, 16>(from + 4, 16, codes);
    for (int i = 0; i < 32; ++i) codes[i] |= uint8_t((high >> i & 1) << 4);
  };
  auto six_bit_scales = [&] {
    for (int i = 0; i < 4; ++i) {
      const uint8_t scale = p[4 + i], minimum = p[8 + i], high = p[12 + i];
      scales[i] = scale & 63, scales[4 + i] = uint8_t((high & 15) | (scale >> 2 & 48));
      minimums[i] = minimum & 63, minimums[4 + i] = uint8_t(high >> 4 | (minimum >> 2 & 48));
    }
    return RowStretch{codes, scales, minimums, p, p + 2};
  };
  switch (kind) {
    case BlockKind::q4_0:
    case BlockKind::iq4_nl: take_bits<4, 16>(p + 2, 16, codes); return of_scale;
    case BlockKind::q4_1: take_bits<4, 16>(p + 4, 16, codes); return with_offset();
    case BlockKind::q5_0: five_bits(p + 2); return of_scale;
    case BlockKind::q5_1: five_bits(p + 4); return with_offset();
    case BlockKind::q8_0:
      for (int i = 0; i < 32; ++i) codes[i] = p[2 + i] ^ 128;
      return of_scale;
    case BlockKind::q2_k: take_bits<2, 32>(p + 16, 64, codes); return {codes, p, nullptr, p + 80, p + 82};
    case BlockKind::q3_k:
      take_bits<2, 32>(p + 32, 64, codes);
      take_bits<1, 32, false>(p, 32, codes, 2);
      for (int i = 0; i < 16; ++i) {
        const int low = p[96 + i % 8] >> i / 8 * 4 & 15, high = p[104 + i % 4] >> i / 4 * 2 & 3;
        scales[i] = uint8_t((low | high << 4) - 32);
      }
      return {codes, scales, nullptr, p + 108, nullptr};
    case BlockKind::q4_k: take_bits<4, 32>(p + 16, 128, codes); return six_bit_scales();
    case BlockKind::q5_k:
      take_bits<4, 32>(p + 48, 128, codes);
      take_bits<1, 32, false>(p + 16, 32, codes, 4);
      return six_bit_scales();
    case BlockKind::q6_k:
      take_bits<4, 64>(p, 128, codes);
      take_bits<2, 32, false>(p + 128, 64, codes, 4);
      return {codes, p + 192, nullptr, p + 208, nullptr};
    case BlockKind::iq4_xs:
      take_bits<4, 16>(p + 8, 128, codes);
      for (int i = 0; i < 8; ++i) {
        const int low = p[4 + i / 2] >> i % 2 * 4 & 15, high = (p[2] | p[3] << 8) >> 2 * i & 3;
        scales[i] = uint8_t((low | high << 4) - 32);
      }
      return {codes, scales, nullptr, p, nullptr};
    default: {  // mxfp4
      take_bits<4, 16>(p + 1, 16, codes);
      // Half of 2^(exponent - 127), since the table has twice the numbers, in bfloat16: a subnormal one below 2.
      const int bits = p[0] < 2 ? 32 << p[0] : (p[0] - 1) << 7;
      scales[0] = uint8_t(bits), scales[1] = uint8_t(bits >> 8);
      return {codes, scales, nullptr, nullptr, nullptr};
    }
  }
}

}  // namespace quire
