// Numbers as they lie in memory, and their way to float and back.
//
// A type is a structure: `Storage` is what lies in memory, `pack` rounds two floats into one word (16-bit
// types), `mma` multiplies on tensor cores, `from_codes` and `from_nibbles` widen codes of eight and of four
// bits without rounding.
#pragma once

#include <device.cuh>

enum class Codes { INT8, E4M3, INT4 };

struct BFloat16 {
    typedef uint16 Storage;
    static constexpr int MANTISSA_BITS = 7;
    static DEVICE float to_float(Storage bits) { return as_float(uint32(bits) << 16); }
    static DEVICE uint32 pack(float low, float high) { return pack_bfloat16(low, high); }
    static DEVICE Storage from_float(float value) { return Storage(pack_bfloat16(value, 0.0f)); }
    static DEVICE void mma(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
        mma_bfloat16(d, a, b0, b1);
    }
    // Bytes `i` and `i + 1` of a word of codes.
    template <Codes kind>
    static DEVICE uint32 from_codes(uint32 word, int i) {
        if (kind == Codes::INT8) return from_halves<kind>(permute_bytes(word, 0, i == 0 ? 0x4140 : 0x4342));
        return from_halves<kind>(permute_bytes(word, 0, i == 0 ? 0x1404 : 0x3424));
    }
    // The codes in the low bytes (INT8) or the high bytes (E4M3) of both halves, whatever the others hold.
    // Both ways are exact: magic numbers put the code's bits into the mantissa of 128 and 256, or into
    // exponent and mantissa at 2 ** -120 of their value. Every code is finite, also those that are NaN in
    // e4m3: what is no number has a scale that is none.
    template <Codes kind>
    static DEVICE uint32 from_halves(uint32 word) {
        if (kind == Codes::INT8) {
            const uint32 low = and_or(word, 0x007f007f, 0x43004300);
            return fused_bfloat16x2(low, 0x3f803f80, and_or(word, 0x00800080, 0xc300c300));
        }
        const uint32 bits = and_or(word, 0x80008000, (word >> 4) & 0x07f007f0);
        return fused_bfloat16x2(bits, 0x7b807b80, 0x80008000);
    }
    // Nibbles 0 and 4, less 8: 128 + nibble, less 136.
    static DEVICE uint32 from_nibbles(uint32 word) {
        return fused_bfloat16x2(and_or(word, 0x000f000f, 0x43004300), 0x3f803f80, 0xc308c308);
    }
};

struct Float16 {
    typedef uint16 Storage;
    static constexpr int MANTISSA_BITS = 10;
    static DEVICE float to_float(Storage bits) { return float16_to_float(bits); }
    static DEVICE uint32 pack(float low, float high) { return pack_float16(low, high); }
    static DEVICE Storage from_float(float value) { return Storage(pack_float16(value, 0.0f)); }
    static DEVICE void mma(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
        mma_float16(d, a, b0, b1);
    }
    template <Codes kind>
    static DEVICE uint32 from_codes(uint32 word, int i) {
        if (kind == Codes::INT8) return from_halves<kind>(permute_bytes(word, 0, i == 0 ? 0x4140 : 0x4342));
        return from_halves<kind>(permute_bytes(word, 0, i == 0 ? 0x1404 : 0x3424));
    }
    template <Codes kind>
    static DEVICE uint32 from_halves(uint32 word) {
        if (kind == Codes::INT8) {
            // 1024 + code + 128, less 1152.
            return fused_float16x2((word & 0x00ff00ff) ^ 0x64806480, 0x3c003c00, 0xe480e480);
        }
        const uint32 bits = and_or(word, 0x80008000, (word >> 1) & 0x3f803f80);
        return fused_float16x2(bits, 0x5c005c00, 0x80008000);
    }
    // 1024 + nibble, less 1032.
    static DEVICE uint32 from_nibbles(uint32 word) {
        return fused_float16x2(and_or(word, 0x000f000f, 0x64006400), 0x3c003c00, 0xe408e408);
    }
};

struct Float32 {
    typedef float Storage;
    static DEVICE float to_float(Storage value) { return value; }
    static DEVICE Storage from_float(float value) { return value; }
};

// Rounds to the type and back.
template <typename T>
DEVICE float rounded(float value) {
    return T::to_float(T::from_float(value));
}

// e4m3 (no infinity, NaN is 0x7f), to the nearest even; magnitudes from 448 on that round beyond it saturate.
DEVICE uint8 float_to_e4m3(float value) {
    const uint32 bits = as_bits(value);
    const uint32 sign = (bits >> 24) & 0x80;
    const uint32 size = bits & 0x7fffffff;
    if (size > 0x7f800000) return uint8(sign | 0x7f);
    if (size >= 0x43e00000) return uint8(sign | 0x7e);
    if (size < 0x3c800000) {
        // Below 2 ** -6 steps are 2 ** -9: adding 2 ** 14 leaves the number of steps in the last mantissa
        // bits.
        return uint8(sign | (as_bits(as_float(size) + 16384.0f) - 0x46800000));
    }
    const uint32 even = (size >> 20) & 1;
    return uint8(sign | ((size - (120u << 23) + 0x7ffff + even) >> 20));
}
