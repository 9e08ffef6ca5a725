// y = x W^T + b for at most 16 rows of x: the weights are read once, and at that speed.
//
// Weights are the left operand of the tensor cores' product and go from memory to registers, tokens are its
// columns. A block owns 16 or 32 rows of W; its warps share the inputs in steps of 64, block after block of
// the grid's second dimension a slice of them. Partial sums are added in a fixed order that depends on the
// shape of W only, not on the number of tokens. Define: TYPE BFloat16 or Float16.
#include <activations.cuh>
#include <device.cuh>
#include <numbers.cuh>

namespace {

typedef typename TYPE::Storage Storage;
constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
constexpr int STEP = 64;
// Blocks of the kernels of 16 tokens that a multiprocessor holds: on Blackwell, two would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int WIDE_BLOCKS = 1;
#else
constexpr int WIDE_BLOCKS = 2;
#endif

struct LinearParams {
    const Storage* x;       // [num_tokens, num_inputs]
    const Storage* weight;  // [num_rows, num_inputs]
    const Storage* bias;    // [num_rows]; null: none
    void* out;              // [num_tokens, num_columns], of TYPE or float
    float* partial;         // [tiles, slices, 16 * 32], with slices
    int* tickets;           // [tiles], zero before and after
    int64 x_stride, out_stride;
    int num_tokens, num_inputs, num_rows, num_columns, slices;
    int activation;         // below 0: none; else rows num_columns and on are multiplied with it
    int out_is_float;
};

// ROW_TILES of 16 rows (of a gated layer: 16 of the gate and their partners), TOKEN_TILES of 8 tokens.
template <int ROW_TILES, int TOKEN_TILES, bool GATED>
DEVICE void multiply_rows(const LinearParams& p, float* sums, int* flag) {
    // Steps of inputs that are on their way.
    constexpr int DEPTH = ROW_TILES == 1 ? 4 : 2;
    constexpr int SIZE = ROW_TILES * 16 * TOKEN_TILES * 8;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
    const int tile_rows = GATED ? 16 : 16 * ROW_TILES;
    const int first_row = blockIdx.x * tile_rows;

    // Rows and tokens past the end read the last one's numbers, which nothing uses.
    const Vector16* rows[ROW_TILES][2];
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = first_row + (GATED ? 0 : 16 * m) + g + 8 * r;
            row = row < p.num_columns ? row : p.num_columns - 1;
            if (GATED && m == 1) row += p.num_columns;
            rows[m][r] = reinterpret_cast<const Vector16*>(p.weight + int64(row) * p.num_inputs) + c;
        }
    }
    const Vector16* tokens[TOKEN_TILES];
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++) {
        const int token = 8 * n + g < p.num_tokens ? 8 * n + g : p.num_tokens - 1;
        tokens[n] = reinterpret_cast<const Vector16*>(p.x + token * p.x_stride) + c;
    }

    float d[ROW_TILES][TOKEN_TILES][4] = {};
    Vector16 w[DEPTH][ROW_TILES][2][2], x[DEPTH][TOKEN_TILES][2];
    const int steps = p.num_inputs / STEP;
    const int begin = int(int64(steps) * blockIdx.y / p.slices);
    const int end = int(int64(steps) * (blockIdx.y + 1) / p.slices);
    const auto load = [&](int slot, int step) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int offset = step * (STEP / 8) + half * 4;
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
                w[slot][m][0][half] = load_stream(rows[m][0] + offset);
                w[slot][m][1][half] = load_stream(rows[m][1] + offset);
            }
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; n++) x[slot][n][half] = tokens[n][offset];
        }
    };
#pragma unroll
    for (int slot = 0; slot < DEPTH; slot++) {
        if (begin + warp + slot * WARPS < end) load(slot, begin + warp + slot * WARPS);
    }
    for (int first = begin + warp; first < end; first += DEPTH * WARPS) {
#pragma unroll
        for (int slot = 0; slot < DEPTH; slot++) {
            const int step = first + slot * WARPS;
            if (step >= end) break;
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int m = 0; m < ROW_TILES; m++) {
                    const Vector16 low = w[slot][m][0][half], high = w[slot][m][1][half];
                    // A lane's eight inputs stand for four of two products' sixteen, on both sides.
                    const uint32 even[4] = {low.x, high.x, low.y, high.y};
                    const uint32 odd[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
                    for (int n = 0; n < TOKEN_TILES; n++) {
                        TYPE::mma(d[m][n], even, x[slot][n][half].x, x[slot][n][half].y);
                        TYPE::mma(d[m][n], odd, x[slot][n][half].z, x[slot][n][half].w);
                    }
                }
            }
            if (step + DEPTH * WARPS < end) load(slot, step + DEPTH * WARPS);
        }
    }

    // sums: [WARPS][tokens][rows]
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = 16 * m + g + 8 * (e >> 1), token = 8 * n + 2 * c + (e & 1);
                sums[warp * SIZE + token * (16 * ROW_TILES) + row] = d[m][n][e];
            }
        }
    }
    block_barrier();
    for (int i = threadIdx.x; i < SIZE; i += THREADS) {
        float sum = sums[i];
        for (int other = 1; other < WARPS; other++) sum += sums[other * SIZE + i];
        sums[i] = sum;
        if (p.slices > 1) p.partial[(int64(blockIdx.x) * p.slices + blockIdx.y) * SIZE + i] = sum;
    }
    if (p.slices > 1) {
        memory_fence();
        block_barrier();
        if (threadIdx.x == 0) {
            *flag = atomic_add(p.tickets + blockIdx.x, 1) + 1 == p.slices;
            if (*flag) p.tickets[blockIdx.x] = 0;
            memory_fence();
        }
        block_barrier();
        if (*flag == 0) return;
        for (int i = threadIdx.x; i < SIZE; i += THREADS) {
            const float* const source = p.partial + int64(blockIdx.x) * p.slices * SIZE + i;
            float sum = load_shared_by_blocks(source);
            for (int slice = 1; slice < p.slices; slice++) {
                sum += load_shared_by_blocks(source + slice * SIZE);
            }
            sums[i] = sum;
        }
    }
    block_barrier();
    for (int i = threadIdx.x; i < tile_rows * TOKEN_TILES * 8; i += THREADS) {
        const int token = i / tile_rows, local = i % tile_rows, column = first_row + local;
        if (token >= p.num_tokens || column >= p.num_columns) continue;
        float value = sums[token * (16 * ROW_TILES) + local];
        if (p.bias) value += TYPE::to_float(p.bias[column]);
        if (GATED) {
            float up = sums[token * (16 * ROW_TILES) + 16 + local];
            if (p.bias) up += TYPE::to_float(p.bias[p.num_columns + column]);
            value = activate(value, p.activation) * factor(up, p.activation);
        }
        const int64 place = token * p.out_stride + column;
        if (p.out_is_float) static_cast<float*>(p.out)[place] = value;
        else static_cast<Storage*>(p.out)[place] = TYPE::from_float(value);
    }
}

}  // namespace

KERNEL(linear_8, LinearParams, THREADS, 2) {
    __shared__ float sums[WARPS * 16 * 8];
    __shared__ int flag;
    multiply_rows<1, 1, false>(p, sums, &flag);
}
KERNEL(linear_16, LinearParams, THREADS, WIDE_BLOCKS) {
    __shared__ float sums[WARPS * 32 * 16];
    __shared__ int flag;
    multiply_rows<2, 2, false>(p, sums, &flag);
}
KERNEL(gated_linear_8, LinearParams, THREADS, 2) {
    __shared__ float sums[WARPS * 32 * 8];
    __shared__ int flag;
    multiply_rows<2, 1, true>(p, sums, &flag);
}
KERNEL(gated_linear_16, LinearParams, THREADS, WIDE_BLOCKS) {
    __shared__ float sums[WARPS * 32 * 16];
    __shared__ int flag;
    multiply_rows<2, 2, true>(p, sums, &flag);
}
