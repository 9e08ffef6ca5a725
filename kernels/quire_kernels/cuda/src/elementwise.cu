// RMS norm with a residual, and gated activations. Define: TYPE BFloat16, Float16 or Float32.
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
