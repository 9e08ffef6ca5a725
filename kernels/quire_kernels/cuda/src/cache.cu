// Norm of queries and keys, rotary embedding and the write into the paged cache, in one pass over a
// projection's output; each of the three may be absent. Define: TYPE BFloat16, Float16 or Float32.
#include <device.cuh>
#include <numbers.cuh>
#include <reductions.cuh>

namespace {

typedef typename TYPE::Storage Storage;
constexpr int WARPS = 4;
constexpr int MAX_HEAD_DIM = 256;
constexpr int PAIRS = MAX_HEAD_DIM / 2 / 32;

struct WriteParams {
    const Storage* query;    // [num_tokens, num_heads, head_dim]; num_heads 0: none
    const Storage* key;      // [num_tokens, num_kv_heads, head_dim]
    const Storage* value;    // the same
    Storage* out;            // [num_tokens, num_heads, head_dim]: rotated queries
    const void* query_norm;  // [head_dim] of TYPE, or of float; null: no norms
    const void* key_norm;
    const float* cos;        // [num_tokens, half]
    const float* sin;
    uint8* data;
    uint16* scales;
    const int64* slots;      // [num_tokens]
    int64 query_token_stride, query_head_stride, key_token_stride, key_head_stride, value_token_stride,
        value_head_stride, angle_stride;
    int64 block_stride, kv_stride, head_stride, scale_block_stride, scale_kv_stride, scale_head_stride;
    float eps;
    int num_heads, num_kv_heads, head_dim, half, block_size, norm_is_float;
    int cache;               // 0: as the operands, 1: int8, 2: e4m3
};

DEVICE float weight_at(const void* weights, int i, int is_float) {
    return is_float ? static_cast<const float*>(weights)[i]
                    : TYPE::to_float(static_cast<const Storage*>(weights)[i]);
}

}  // namespace

// A grid of (tokens, groups of WARPS heads); a warp computes one head of one token. Lane i holds the pairs of
// neighbours 2i + 64j; what it rotates with may be another lane's and goes through shared memory.
KERNEL(norm_rope_write, WriteParams, WARPS * 32, 4) {
    __shared__ float rows[WARPS][MAX_HEAD_DIM];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int64 token = blockIdx.x;
    const int which = blockIdx.y * WARPS + warp;
    if (which >= p.num_heads + 2 * p.num_kv_heads) return;
    const bool is_query = which < p.num_heads;
    const bool is_key = !is_query && which < p.num_heads + p.num_kv_heads;
    const int head = is_query ? which : (which - p.num_heads) % p.num_kv_heads;
    const Storage* const source =
        is_query ? p.query + token * p.query_token_stride + head * p.query_head_stride
        : is_key ? p.key + token * p.key_token_stride + head * p.key_head_stride
                 : p.value + token * p.value_token_stride + head * p.value_head_stride;

    float numbers[PAIRS][2];
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        const int i = 2 * (lane + 32 * j);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            numbers[j][e] = i + e < p.head_dim ? TYPE::to_float(source[i + e]) : 0.0f;
            squares += numbers[j][e] * numbers[j][e];
        }
    }
    const void* const norm = is_query ? p.query_norm : is_key ? p.key_norm : nullptr;
    if (norm) {
        const float factor = 1.0f / sqrtf(warp_reduce<Sum>(squares) / p.head_dim + p.eps);
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
            const int i = 2 * (lane + 32 * j);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if (i + e >= p.head_dim) continue;
                float normed = numbers[j][e] * factor;
                if (!p.norm_is_float) normed = rounded<TYPE>(normed);
                numbers[j][e] = rounded<TYPE>(normed * weight_at(norm, i + e, p.norm_is_float));
            }
        }
    }
    if (p.half > 0 && (is_query || is_key)) {
        float* const row = rows[warp];
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
            const int i = 2 * (lane + 32 * j);
            row[i] = numbers[j][0];
            row[i + 1] = numbers[j][1];
        }
        warp_barrier();
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int i = 2 * (lane + 32 * j) + e;
                if (i >= 2 * p.half) continue;
                const bool is_first = i < p.half;
                const int64 angle = token * p.angle_stride + (is_first ? i : i - p.half);
                const float other = row[is_first ? i + p.half : i - p.half];
                // Products are rounded before they are added, as everywhere else.
                const float turned = multiply(other, p.sin[angle]);
                numbers[j][e] = multiply(numbers[j][e], p.cos[angle]) + (is_first ? -turned : turned);
                numbers[j][e] = rounded<TYPE>(numbers[j][e]);
            }
        }
    }
    if (is_query) {
        Storage* const out = p.out + (token * p.num_heads + head) * p.head_dim;
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int i = 2 * (lane + 32 * j) + e;
                if (i < p.head_dim) out[i] = TYPE::from_float(numbers[j][e]);
            }
        }
        return;
    }

    if (!p.slots) return;
    const int64 slot = p.slots[token], block = slot / p.block_size, offset = slot % p.block_size;
    const int64 place =
        block * p.block_stride + (is_key ? 0 : p.kv_stride) + head * p.head_stride + offset * p.head_dim;
    if (p.cache == 0) {
        Storage* const to = reinterpret_cast<Storage*>(p.data) + place;
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int i = 2 * (lane + 32 * j) + e;
                if (i < p.head_dim) to[i] = TYPE::from_float(numbers[j][e]);
            }
        }
        return;
    }
    // The largest magnitude as an integer: a NaN is larger than all else, and not lost.
    uint32 largest = 0;
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        largest = Max::apply(largest, as_bits(numbers[j][0]) & 0x7fffffff);
        largest = Max::apply(largest, as_bits(numbers[j][1]) & 0x7fffffff);
    }
    largest = warp_reduce<Max>(largest);
    const float quotient = as_float(largest) / (p.cache == 1 ? 127.0f : 448.0f);
    // Zeros have the smallest normal scale, and not none.
    const float smallest = as_float(0x00800000);
    const uint16 scale_bits = BFloat16::from_float(quotient < smallest ? smallest : quotient);
    const float scale = BFloat16::to_float(scale_bits);
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int i = 2 * (lane + 32 * j) + e;
            if (i >= p.head_dim) continue;
            const float x = numbers[j][e] / scale;
            const float number = x == x ? x : 0.0f;
            p.data[place + i] = p.cache == 1 ? uint8(int(rintf(number))) : float_to_e4m3(number);
        }
    }
    if (lane == 0) {
        const int64 at =
            block * p.scale_block_stride + (is_key ? 0 : p.scale_kv_stride) + head * p.scale_head_stride;
        p.scales[at + offset] = scale_bits;
    }
}
