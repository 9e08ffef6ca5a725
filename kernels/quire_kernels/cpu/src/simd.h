// Vectors of floats, `width` at a time, for the instruction set that the file is compiled for.
//
// One translation unit is compiled once per instruction set (avx2, avx512, avx512_bf16, amx); everything else is
// written against these few functions. Rounding of float32 to bfloat16 is to nearest even on every path.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

namespace quire {

using bf16 = uint16_t;

// For data that is read once, from memory: the processor's own prefetchers stop at every page of 4 KiB.
template <class T>
inline void prefetch_ahead(const T* p, int bytes = 64) {
  constexpr int distance = 4096;
  for (int i = 0; i < bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(p) + distance + i, _MM_HINT_T0);
}

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return bf16((bits >> 16) | 0x40);
  return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <class T>
inline T from_float(float x);
template <>
inline float from_float<float>(float x) { return x; }
template <>
inline bf16 from_float<bf16>(float x) { return to_bf16(x); }

// Loads a cache line and forgets it: unlike a prefetch, what the processor's own prefetchers learn from.
template <class T>
inline void touch(const T* p) {
  (void)*reinterpret_cast<const volatile char*>(p);
}

#if defined(__AVX512F__)

using vec = __m512;
constexpr int width = 16;

inline vec zero() { return _mm512_setzero_ps(); }
inline vec splat(float x) { return _mm512_set1_ps(x); }
inline vec load(const float* p) { return _mm512_loadu_ps(p); }
inline vec load(const bf16* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline vec load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline void store(float* p, vec x) { _mm512_storeu_ps(p, x); }
inline void store(bf16* p, vec x) {
  __m512i bits = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
// 2 * width numbers behind each other.
inline void store_two(bf16* p, vec a, vec b) {
#if defined(__AVX512BF16__)
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b, a));
#else
  store(p, a);
  store(p + width, b);
#endif
}
// width / 2 numbers, each in two neighbouring lanes.
inline vec load_twice(const float* p) {
  const __m512i lanes = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  return _mm512_permutexvar_ps(lanes, _mm512_castps256_ps512(_mm256_loadu_ps(p)));
}
// The first `count` numbers, a multiple of 4, and zeros.
inline vec load_first(const float* p, int count) { return _mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), p); }
// Number N of the `of` (1: float32, 2: bfloat16, 4: int8) that lie behind each other in each lane.
template <int of, int N>
inline vec number(vec lanes) {
  __m512i bits = _mm512_castps_si512(lanes);
  if constexpr (of == 1) return lanes;
  if constexpr (of == 2)
    return _mm512_castsi512_ps(N ? _mm512_and_si512(bits, _mm512_set1_epi32(int(0xffff0000))) : _mm512_slli_epi32(bits, 16));
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(bits, 24 - 8 * N), 24));
}
inline vec unpack_low(vec a, vec b) { return _mm512_unpacklo_ps(a, b); }
inline vec unpack_high(vec a, vec b) { return _mm512_unpackhi_ps(a, b); }
inline vec unpack_low_pairs(vec a, vec b) { return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))); }
inline vec unpack_high_pairs(vec a, vec b) { return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))); }
// Lane i of each four lanes in all of them.
template <int i>
inline vec lanes_of_four(vec x) { return _mm512_permute_ps(x, i * 0x55); }
inline vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
inline vec sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
inline vec mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
inline vec div(vec a, vec b) { return _mm512_div_ps(a, b); }
inline vec max(vec a, vec b) { return _mm512_max_ps(a, b); }
inline vec min(vec a, vec b) { return _mm512_min_ps(a, b); }
// a * b + c
inline vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
inline float sum(vec x) { return _mm512_reduce_add_ps(x); }
inline float largest(vec x) { return _mm512_reduce_max_ps(x); }

// x * 2^n for integral n; 0 below the range of normal numbers.
inline vec scale_by_power(vec x, vec n) { return _mm512_scalef_ps(x, n); }
inline vec round_to_integer(vec x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline vec zero_where_less(vec x, vec a, vec b) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ), x);
}
// x where a > b, else y.
inline vec where_greater(vec a, vec b, vec x, vec y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), y, x);
}
// A bit for each lane: whether a > b.
inline uint32_t lanes_above(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
// x in lanes whose bit is set, else y.
inline vec where_bits(uint32_t bits, vec x, vec y) { return _mm512_mask_blend_ps(__mmask16(bits), y, x); }
// NaN where x or y is, else y.
inline vec nan_of(vec x, vec y) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), y, x); }
// The lanes whose bit is set, behind each other; behind these as many of any content are written, `width` in all.
inline void store_chosen(float* p, uint32_t bits, vec x) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps(__mmask16(bits), x));  // in memory it takes ten times as long on Zen 4
}
// Half h, 0 or 1, of the lanes in float64.
using wide = __m512d;
inline wide half_of(vec x, int h) {
  return _mm512_cvtps_pd(h ? _mm512_extractf32x8_ps(x, 1) : _mm512_castps512_ps256(x));
}
using integers = __m512i;
inline integers no_integers() { return _mm512_setzero_si512(); }
inline integers add(integers a, integers b) { return _mm512_add_epi64(a, b); }
inline integers bits_of_sum(wide a, double b) { return _mm512_castpd_si512(_mm512_add_pd(a, _mm512_set1_pd(b))); }
inline void store(uint64_t* p, integers x) { _mm512_storeu_si512(p, x); }

#else

using vec = __m256;
constexpr int width = 8;

inline vec zero() { return _mm256_setzero_ps(); }
inline vec splat(float x) { return _mm256_set1_ps(x); }
inline vec load(const float* p) { return _mm256_loadu_ps(p); }
inline vec load(const bf16* p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline vec load(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline void store(float* p, vec x) { _mm256_storeu_ps(p, x); }
inline void store(bf16* p, vec x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(bits, _mm256_set1_epi32(0x400000)), is_nan);
  __m256i high = _mm256_srli_epi32(rounded, 16);
  __m128i narrow = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow);
}
inline void store_two(bf16* p, vec a, vec b) {
  store(p, a);
  store(p + width, b);
}
inline vec load_twice(const float* p) {
  const __m256i lanes = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
  return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), lanes);
}
inline vec load_first(const float* p, int) { return _mm256_castsi256_ps(_mm256_zextsi128_si256(_mm_loadu_si128((const __m128i*)p))); }
template <int of, int N>
inline vec number(vec lanes) {
  __m256i bits = _mm256_castps_si256(lanes);
  if constexpr (of == 1) return lanes;
  if constexpr (of == 2)
    return _mm256_castsi256_ps(N ? _mm256_and_si256(bits, _mm256_set1_epi32(int(0xffff0000))) : _mm256_slli_epi32(bits, 16));
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(bits, 24 - 8 * N), 24));
}
inline vec unpack_low(vec a, vec b) { return _mm256_unpacklo_ps(a, b); }
inline vec unpack_high(vec a, vec b) { return _mm256_unpackhi_ps(a, b); }
inline vec unpack_low_pairs(vec a, vec b) { return _mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(a), _mm256_castps_pd(b))); }
inline vec unpack_high_pairs(vec a, vec b) { return _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(a), _mm256_castps_pd(b))); }
template <int i>
inline vec lanes_of_four(vec x) { return _mm256_permute_ps(x, i * 0x55); }
inline vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
inline vec sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
inline vec mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
inline vec div(vec a, vec b) { return _mm256_div_ps(a, b); }
inline vec max(vec a, vec b) { return _mm256_max_ps(a, b); }
inline vec min(vec a, vec b) { return _mm256_min_ps(a, b); }
inline vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
inline float sum(vec x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}
inline float largest(vec x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
}
inline vec scale_by_power(vec x, vec n) {
  __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(exponent));
}
inline vec round_to_integer(vec x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline vec zero_where_less(vec x, vec a, vec b) { return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_NLT_UQ), x); }
inline vec where_greater(vec a, vec b, vec x, vec y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
inline uint32_t lanes_above(vec a, vec b) { return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ))); }
inline vec where_bits(uint32_t bits, vec x, vec y) {
  const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i chosen = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(bits)), lanes), lanes);
  return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(chosen));
}
inline vec nan_of(vec x, vec y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q)); }
// For each choice of 8 lanes their numbers, a byte each.
struct ChosenLanes {
  uint64_t of[256] = {};
  constexpr ChosenLanes() {
    for (int bits = 0; bits < 256; ++bits)
      for (int lane = 7; lane >= 0; --lane)
        if (bits >> lane & 1) of[bits] = of[bits] << 8 | uint64_t(lane);
  }
};
inline constexpr ChosenLanes chosen_lanes;
inline void store_chosen(float* p, uint32_t bits, vec x) {
  const __m128i lanes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(&chosen_lanes.of[bits]));
  _mm256_storeu_ps(p, _mm256_permutevar8x32_ps(x, _mm256_cvtepu8_epi32(lanes)));
}
using wide = __m256d;
inline wide half_of(vec x, int h) { return _mm256_cvtps_pd(h ? _mm256_extractf128_ps(x, 1) : _mm256_castps256_ps128(x)); }
using integers = __m256i;
inline integers no_integers() { return _mm256_setzero_si256(); }
inline integers add(integers a, integers b) { return _mm256_add_epi64(a, b); }
inline integers bits_of_sum(wide a, double b) { return _mm256_castpd_si256(_mm256_add_pd(a, _mm256_set1_pd(b))); }
inline void store(uint64_t* p, integers x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }

#endif

// width pairs of bfloat16: the first of each, the second of each.
inline void split_pairs(const bf16* p, vec& first, vec& second) {
  vec pairs = load(reinterpret_cast<const float*>(p));
  first = number<2, 0>(pairs);
  second = number<2, 1>(pairs);
}

// Subnormal numbers count as zeros, as they do to tile instructions.
class FlushSubnormals {
 public:
  FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
};

// Transposes a square of `width` times `width`.
inline void transpose(vec x[width]) {
#if defined(__AVX512F__)
  vec y[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 16
    for (int j = 0; j < 2; ++j) {
      __m512d a = _mm512_castps_pd(y[i + j]), b = _mm512_castps_pd(y[i + j + 2]);
      x[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      x[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    vec a = _mm512_shuffle_f32x4(x[i], x[i + 4], 0x88), b = _mm512_shuffle_f32x4(x[i], x[i + 4], 0xdd);
    vec c = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0x88), d = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0xdd);
    y[i] = _mm512_shuffle_f32x4(a, c, 0x88);
    y[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
    y[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
    y[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) x[i] = y[i];
#else
  vec y[8];
#pragma GCC unroll 16
  for (int i = 0; i < 8; i += 2) {
    y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 16
    for (int j = 0; j < 2; ++j) {
      __m256d a = _mm256_castps_pd(y[i + j]), b = _mm256_castps_pd(y[i + j + 2]);
      x[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
      x[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
    }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    y[i] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x20);
    y[i + 4] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x31);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 8; ++i) x[i] = y[i];
#endif
}

// e^x with a relative error below 3e-7; 0 below -87, -inf included; NaN stays NaN. Cephes' reduction and degree.
inline vec exp(vec x) {
  const vec low = splat(-87.0f);
  vec clamped = min(splat(88.7f), max(low, x));
  vec n = round_to_integer(mul(clamped, splat(1.44269504088896341f)));
  vec r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  vec p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), splat(1.0f));
  // max() gives its second operand where one is NaN, so NaN has come this far.
  return zero_where_less(scale_by_power(p, n), x, low);
}

inline vec sigmoid(vec x) { return div(splat(1.0f), add(splat(1.0f), exp(sub(zero(), x)))); }

inline vec tanh(vec x) {
  return sub(splat(1.0f), div(splat(2.0f), add(exp(add(x, x)), splat(1.0f))));
}

}  // namespace quire
