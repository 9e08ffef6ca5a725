// The tile instructions that the kernels use, in plain C++: `-include`d, the sources for AMX run on any AVX512-BF16 processor.
//
// After Intel's description of each: TDPBF16PS adds the products of even and of odd inputs in fused steps, two chains of their
// own, and then both to the sum; subnormal numbers are zeros.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace amx_emulated {

struct Tile {
  int rows = 0, bytes = 0;
  uint8_t data[16][64] = {};
};

inline Tile& tile(int i) {
  thread_local Tile tiles[8];
  return tiles[i];
}

inline void load_config(const void* memory) {
  const uint8_t* config = static_cast<const uint8_t*>(memory);
  for (int i = 0; i < 8; ++i) {
    uint16_t bytes;
    std::memcpy(&bytes, config + 16 + 2 * i, 2);
    tile(i) = Tile();
    tile(i).bytes = bytes;
    tile(i).rows = config[48 + i];
  }
}

inline void load(int i, const void* from, int64_t stride) {
  Tile& t = tile(i);
  for (int r = 0; r < t.rows; ++r) std::memcpy(t.data[r], static_cast<const uint8_t*>(from) + r * stride, t.bytes);
}

inline void store(int i, void* to, int64_t stride) {
  Tile& t = tile(i);
  for (int r = 0; r < t.rows; ++r) std::memcpy(static_cast<uint8_t*>(to) + r * stride, t.data[r], t.bytes);
}

inline void zero(int i) { std::memset(tile(i).data, 0, sizeof(tile(i).data)); }

inline __m512 half(__m512i pairs, int odd) {
  return _mm512_castsi512_ps(odd ? _mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000))) : _mm512_slli_epi32(pairs, 16));
}

inline void dpbf16(int to, int left, int right) {
  Tile &c = tile(to), &a = tile(left), &b = tile(right);
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040);
  for (int m = 0; m < c.rows; ++m) {
    __m512 chains[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int k = 0; k < a.bytes / 4; ++k) {
      int32_t pair;
      std::memcpy(&pair, a.data[m] + 4 * k, 4);
      const __m512i row = _mm512_loadu_si512(b.data[k]);
      for (int odd = 0; odd < 2; ++odd)
        chains[odd] = _mm512_fmadd_ps(half(_mm512_set1_epi32(pair), odd), half(row, odd), chains[odd]);
    }
    const __m512 sum = _mm512_add_ps(_mm512_loadu_ps(c.data[m]), _mm512_add_ps(chains[0], chains[1]));
    _mm512_mask_storeu_ps(c.data[m], __mmask16((1u << (c.bytes / 4)) - 1), sum);
  }
  _mm_setcsr(saved);
}

inline void dpbsud(int to, int left, int right) {
  Tile &c = tile(to), &a = tile(left), &b = tile(right);
  for (int m = 0; m < c.rows; ++m)
    for (int n = 0; n < c.bytes / 4; ++n) {
      int32_t sum;
      std::memcpy(&sum, c.data[m] + 4 * n, 4);
      for (int k = 0; k < a.bytes; ++k) sum += int8_t(a.data[m][k]) * int(b.data[k / 4][4 * n + k % 4]);
      std::memcpy(c.data[m] + 4 * n, &sum, 4);
    }
}

}  // namespace amx_emulated

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig(memory) amx_emulated::load_config(memory)
#define _tile_release() ((void)0)
#define _tile_loadd(i, from, stride) amx_emulated::load(i, from, stride)
#define _tile_stream_loadd(i, from, stride) amx_emulated::load(i, from, stride)
#define _tile_stored(i, to, stride) amx_emulated::store(i, to, stride)
#define _tile_zero(i) amx_emulated::zero(i)
#define _tile_dpbf16ps(c, a, b) amx_emulated::dpbf16(c, a, b)
#define _tile_dpbsud(c, a, b) amx_emulated::dpbsud(c, a, b)
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#define __AMX_TILE__ 1
