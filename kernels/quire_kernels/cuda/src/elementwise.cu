// RMS norm with a residual, gated activations, and rows in eight bits. Define: TYPE BFloat16, Float16 or Float32.
#include <activations.cuh>
#include <device.cuh>
#include <numbers.cuh>
#include <reductions.cuh>

namespace {

typedef typename TYPE::Storage Storage;
constexpr int PER_VECTOR = 16 / sizeof(Storage);
// Vectors of a row that a thread keeps.
constexpr int KEPT = 4;

union Numbers {
    Vector16 vector;
    Storage numbers[PER_VECTOR];
};

struct NormParams {
    const Storage* x;
    const Storage* residual;  // null: none
    const Storage* weight;    // [size]
    Storage* out;             // [rows, size]
    Storage* sum;             // [rows, size], with a residual
    int64 x_stride, residual_stride;
    float eps;
    int size;
};

struct GateParams {
    const Storage* x;  // [rows, 2 * size]
    Storage* out;      // [rows, size]
    int64 x_stride;
    int size, activation;  // see activations.cuh
};

struct QuantizeParams {
    const Storage* x;  // [rows, size]
    uint8* codes;      // [rows, size], e4m3
    float* scales;     // [rows]
    int64 x_stride;
    int size;
};

constexpr float E4M3_MAX = 448.0f;

DEVICE uint32 largest_size(const Numbers& of) {
    uint32 largest = 0;
#pragma unroll
    for (int e = 0; e < PER_VECTOR; e++) {
        largest = Max::apply(largest, as_bits(TYPE::to_float(of.numbers[e])) & 0x7fffffff);
    }
    return largest;
}

// Codes of numbers times `inverse`, none of which is NaN, or zeros.
DEVICE void store_codes(uint8* to, const Numbers& from, float inverse, bool is_finite) {
    uint32 words[2] = {0, 0};
#pragma unroll
    for (int e = 0; e < PER_VECTOR; e++) {
        const float value = multiply(TYPE::to_float(from.numbers[e]), inverse);
        words[e / 4] |= uint32(is_finite ? float_to_e4m3(value) : 0) << (8 * (e % 4));
    }
    if (PER_VECTOR == 8) {
        *reinterpret_cast<Vector8*>(to) = {words[0], words[1]};
    } else {
        *reinterpret_cast<uint32*>(to) = words[0];
    }
}

}  // namespace

// One block per row, of KEPT vectors per thread at most.
KERNEL(rms_norm, NormParams, 1024, 1) {
    __shared__ float scratch[32];
    const int64 row = blockIdx.x;
    const int count = p.size / PER_VECTOR;
    Numbers kept[KEPT];
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        const int i = threadIdx.x + j * blockDim.x;
        if (i >= count) continue;
        kept[j].vector = reinterpret_cast<const Vector16*>(p.x + row * p.x_stride)[i];
        if (p.residual) {
            Numbers other;
            other.vector = reinterpret_cast<const Vector16*>(p.residual + row * p.residual_stride)[i];
#pragma unroll
            for (int e = 0; e < PER_VECTOR; e++) {
                kept[j].numbers[e] =
                    TYPE::from_float(TYPE::to_float(kept[j].numbers[e]) + TYPE::to_float(other.numbers[e]));
            }
            reinterpret_cast<Vector16*>(p.sum + row * p.size)[i] = kept[j].vector;
        }
#pragma unroll
        for (int e = 0; e < PER_VECTOR; e++) {
            const float value = TYPE::to_float(kept[j].numbers[e]);
            squares += value * value;
        }
    }
    const float mean = block_reduce<Sum>(squares, 0.0f, scratch) / p.size;
    const float factor = 1.0f / sqrtf(mean + p.eps);
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        const int i = threadIdx.x + j * blockDim.x;
        if (i >= count) continue;
        Numbers weight;
        weight.vector = reinterpret_cast<const Vector16*>(p.weight)[i];
#pragma unroll
        for (int e = 0; e < PER_VECTOR; e++) {
            // Rounded before the weight multiplies it, as models are trained.
            const float normed = rounded<TYPE>(TYPE::to_float(kept[j].numbers[e]) * factor);
            kept[j].numbers[e] = TYPE::from_float(normed * TYPE::to_float(weight.numbers[e]));
        }
        reinterpret_cast<Vector16*>(p.out + row * p.size)[i] = kept[j].vector;
    }
}

// A grid of (rows, parts of a row), a vector per thread.
KERNEL(gate, GateParams, 256, 1) {
    const int64 row = blockIdx.x;
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= p.size / PER_VECTOR) return;
    Numbers gate, up;
    gate.vector = reinterpret_cast<const Vector16*>(p.x + row * p.x_stride)[i];
    up.vector = reinterpret_cast<const Vector16*>(p.x + row * p.x_stride + p.size)[i];
#pragma unroll
    for (int e = 0; e < PER_VECTOR; e++) {
        const float x = TYPE::to_float(gate.numbers[e]);
        gate.numbers[e] = TYPE::from_float(
            activate(x, p.activation) * factor(TYPE::to_float(up.numbers[e]), p.activation));
    }
    reinterpret_cast<Vector16*>(p.out + row * p.size)[i] = gate.vector;
}

// One block per row: the scale is its largest magnitude by 448, and NaN where that is not finite, whose codes
// are zeros. Magnitudes below 448 times the smallest normal number count as that, so that a row of zeros has a
// scale too, and no inverse is infinite. What the threads cannot keep of a long row they read again.
KERNEL(quantize_rows, QuantizeParams, 1024, 1) {
    __shared__ uint32 scratch[32];
    const int64 row = blockIdx.x;
    const int count = p.size / PER_VECTOR;
    const Vector16* const from = reinterpret_cast<const Vector16*>(p.x + row * p.x_stride);
    uint8* const to = p.codes + row * p.size;
    Numbers kept[KEPT];
    // Of integers: a NaN is larger than all else, and not lost.
    uint32 largest = as_bits(E4M3_MAX) - (126u << 23);
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        const int i = threadIdx.x + j * blockDim.x;
        if (i >= count) continue;
        kept[j].vector = from[i];
        largest = Max::apply(largest, largest_size(kept[j]));
    }
    for (int i = threadIdx.x + KEPT * blockDim.x; i < count; i += blockDim.x) {
        Numbers numbers;
        numbers.vector = from[i];
        largest = Max::apply(largest, largest_size(numbers));
    }
    largest = block_reduce<Max>(largest, 0u, scratch);
    const bool is_finite = largest < 0x7f800000;
    const float inverse = E4M3_MAX / as_float(largest);
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        const int i = threadIdx.x + j * blockDim.x;
        if (i < count) store_codes(to + i * PER_VECTOR, kept[j], inverse, is_finite);
    }
    for (int i = threadIdx.x + KEPT * blockDim.x; i < count; i += blockDim.x) {
        Numbers numbers;
        numbers.vector = from[i];
        store_codes(to + i * PER_VECTOR, numbers, inverse, is_finite);
    }
    if (threadIdx.x == 0) p.scales[row] = is_finite ? as_float(largest) / E4M3_MAX : as_float(0x7fc00000);
}
