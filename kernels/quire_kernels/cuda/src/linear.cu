// y = x W^T + b of quantised weights: for few rows of x the codes are read once, and at that speed, and
// widened in registers; for more rows a matrix product wants the weights widened in memory.
//
// Weights are the left operand of the tensor cores' product and go from memory to registers, tokens are its
// columns. Codes lie in tiles of 16 rows, [tiles of rows, tiles of inputs, 32 lanes, 16 bytes]: a lane's are
// what it gives to the products of a tile (`eight_inputs`). A block owns two tiles of rows; its warps share
// the inputs tile by tile, block after block of the grid's second dimension a slice of them. Partial sums are
// added in an order that depends on W's shape only, neither on the number of tokens nor on time.
//
// Define: TYPE BFloat16 or Float16, CODES of numbers.cuh.
#include <activations.cuh>
#include <device.cuh>
#include <numbers.cuh>

namespace {

typedef typename TYPE::Storage Storage;
constexpr Codes KIND = Codes::CODES;
constexpr int WARPS = 4;
constexpr int THREADS = WARPS * 32;
constexpr int GROUP = 32;
// Groups of inputs in a tile; with four bits each has a scale per row.
constexpr int GROUPS = KIND == Codes::INT4 ? 2 : 1;
constexpr int TILE_VECTORS = GROUPS * GROUP / 8;
constexpr int WIDEN_WARPS = 8;
constexpr int WIDEN_TILES = 4;

struct LinearParams {
    const Storage* x;     // [num_tokens, num_inputs]
    const Vector16* codes;
    const float* scales;  // [num_rows]; INT4: [tiles of rows, tiles of inputs, 8, GROUPS, 2]
    const Storage* bias;  // [num_rows]; null: none
    void* out;            // [num_tokens, num_columns], of TYPE or float
    float* partial;       // [grid, tokens, 32], with slices
    int* tickets;         // [blocks of the grid's first dimension], zero before and after
    int64 x_stride, out_stride;
    int num_tokens, num_inputs, num_columns, input_tiles, slices;
    int activation;       // below 0: none; else rows num_columns and on are multiplied with it
    int out_is_float;
};

// Of the inputs 8 (lane % 4) and on of a group: four pairs of TYPE, of row lane / 4 or, `high`, the eighth
// behind it. Eight bits: a lane has two words of each row, in whose bytes the inputs 0, 2, 1, 3 follow each
// other. Four bits: a word of each row for each group, in whose nibbles the inputs 0, 2, 4, 6, 1, 3, 5, 7 do.
DEVICE void eight_inputs(uint32 (&pairs)[4], const Vector16& codes, int group, bool high) {
    if constexpr (KIND == Codes::INT4) {
        const uint32 word = group == 0 ? (high ? codes.y : codes.x) : (high ? codes.w : codes.z);
#pragma unroll
        for (int i = 0; i < 4; i++) pairs[i] = TYPE::from_nibbles(word >> (4 * i));
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32 word = i == 0 ? (high ? codes.z : codes.x) : (high ? codes.w : codes.y);
            pairs[2 * i] = TYPE::from_halves<KIND>(KIND == Codes::INT8 ? word : word << 8);
            pairs[2 * i + 1] = TYPE::from_halves<KIND>(KIND == Codes::INT8 ? word >> 8 : word);
        }
    }
}

// TOKEN_TILES of 8 tokens; DEPTH tiles of inputs, an even number of groups, are on their way to each warp.
template <int TOKEN_TILES, int DEPTH>
DEVICE void multiply_rows(const LinearParams& p, float* sums, int* flag) {
    constexpr int SIZE = TOKEN_TILES * 8 * 32;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
    const bool is_gated = p.activation >= 0;
    // Its tiles are two that follow each other, or one of the gate and its partner.
    const int first_tile = is_gated ? blockIdx.x : 2 * blockIdx.x;
    const int second_tile = first_tile + (is_gated ? p.num_columns / 16 : 1);
    const int begin = int(int64(p.input_tiles) * blockIdx.y / p.slices) + warp;
    const int end = int(int64(p.input_tiles) * (blockIdx.y + 1) / p.slices);

    // What the tile at hand begins with. Tokens past the end read the last one's numbers, which nothing uses.
    const Vector16* weights[2];
    const float* factors[2];
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const int64 tile = int64(m == 0 ? first_tile : second_tile) * p.input_tiles + begin;
        weights[m] = p.codes + tile * 32 + lane;
        factors[m] = p.scales + tile * 32 + g * 4;
    }
    const Vector16* tokens[TOKEN_TILES];
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++) {
        const int token = 8 * n + g < p.num_tokens ? 8 * n + g : p.num_tokens - 1;
        tokens[n] = reinterpret_cast<const Vector16*>(p.x + token * p.x_stride) + begin * TILE_VECTORS + c;
    }
    int inputs_left = p.num_inputs / 8 - begin * TILE_VECTORS - c;

    float d[2][TOKEN_TILES][4] = {};
    Vector16 codes[DEPTH][2], scales[DEPTH][2], x[2][TOKEN_TILES];
    // `ahead`: tiles of this warp between the one at hand and the one that is loaded.
    const auto load = [&](int slot, int ahead) {
#pragma unroll
        for (int m = 0; m < 2; m++) {
            codes[slot][m] = load_stream(weights[m] + ahead * WARPS * 32);
            if constexpr (KIND == Codes::INT4) scales[slot][m] = load_stream(factors[m] + ahead * WARPS * 32);
        }
    };
    // In one of two places by turns; inputs past the end are zeros.
    const auto load_x = [&](int place, int ahead, int group) {
        const int offset = ahead * WARPS * TILE_VECTORS + group * (GROUP / 8);
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            x[place][n] = offset < inputs_left ? tokens[n][offset] : Vector16{0, 0, 0, 0};
        }
    };
#pragma unroll
    for (int slot = 0; slot < DEPTH; slot++) {
        if (begin + slot * WARPS < end) load(slot, slot);
    }
    load_x(0, 0, 0);
    for (int left = end - begin; left > 0; left -= DEPTH * WARPS) {
#pragma unroll
        for (int slot = 0; slot < DEPTH; slot++) {
            if (left <= slot * WARPS) break;
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                const int place = (slot * GROUPS + group) & 1;
                load_x(place ^ 1, slot + (group + 1) / GROUPS, (group + 1) % GROUPS);
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    uint32 low[4], high[4];
                    eight_inputs(low, codes[slot][m], group, false);
                    eight_inputs(high, codes[slot][m], group, true);
                    // A lane's eight inputs stand for four of two products' sixteen, on both sides.
                    const uint32 even[4] = {low[0], high[0], low[1], high[1]};
                    const uint32 odd[4] = {low[2], high[2], low[3], high[3]};
#pragma unroll
                    for (int n = 0; n < TOKEN_TILES; n++) {
                        const Vector16& b = x[place][n];
                        if constexpr (KIND == Codes::INT4) {
                            float part[4] = {};
                            TYPE::mma(part, even, b.x, b.y);
                            TYPE::mma(part, odd, b.z, b.w);
                            const Vector16& s = scales[slot][m];
                            const float of_low = as_float(group == 0 ? s.x : s.z);
                            const float of_high = as_float(group == 0 ? s.y : s.w);
#pragma unroll
                            for (int e = 0; e < 4; e++) d[m][n][e] += part[e] * (e < 2 ? of_low : of_high);
                        } else {
                            TYPE::mma(d[m][n], even, b.x, b.y);
                            TYPE::mma(d[m][n], odd, b.z, b.w);
                        }
                    }
                }
            }
            if (left > (slot + DEPTH) * WARPS) load(slot, slot + DEPTH);
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
            weights[m] += DEPTH * WARPS * 32;
            factors[m] += DEPTH * WARPS * 32;
        }
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) tokens[n] += DEPTH * WARPS * TILE_VECTORS;
        inputs_left -= DEPTH * WARPS * TILE_VECTORS;
    }

    // sums: [WARPS][tokens][32 rows]
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = 16 * m + g + 8 * (e >> 1), token = 8 * n + 2 * c + (e & 1);
                sums[warp * SIZE + token * 32 + row] = d[m][n][e];
            }
        }
    }
    block_barrier();
    float* const partial = p.partial + int64(blockIdx.x) * p.slices * SIZE;
    for (int i = threadIdx.x; i < SIZE; i += THREADS) {
        float sum = sums[i];
        for (int other = 1; other < WARPS; other++) sum += sums[other * SIZE + i];
        sums[i] = sum;
        if (p.slices > 1) partial[blockIdx.y * SIZE + i] = sum;
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
            float sum = 0.0f;
#pragma unroll 4
            for (int slice = 0; slice < p.slices; slice++) {
                sum += load_shared_by_blocks(partial + slice * SIZE + i);
            }
            sums[i] = sum;
        }
    }
    block_barrier();
    const auto finished = [&](int i, int row) {
        float value = sums[i];
        if constexpr (KIND != Codes::INT4) value = multiply(value, p.scales[row]);
        return p.bias ? value + TYPE::to_float(p.bias[row]) : value;
    };
    const int width = is_gated ? 16 : 32;
    for (int i = threadIdx.x; i < TOKEN_TILES * 8 * width; i += THREADS) {
        const int token = i / width, local = i % width, column = blockIdx.x * width + local;
        if (token >= p.num_tokens || column >= p.num_columns) continue;
        float value = finished(token * 32 + local, column);
        if (is_gated) {
            const float up = finished(token * 32 + 16 + local, p.num_columns + column);
            value = activate(value, p.activation) * factor(up, p.activation);
        }
        const int64 place = token * p.out_stride + column;
        if (p.out_is_float) static_cast<float*>(p.out)[place] = value;
        else static_cast<Storage*>(p.out)[place] = TYPE::from_float(value);
    }
}

struct WidenParams {
    const Vector16* codes;
    const float* scales;
    void* out;  // [num_rows, num_inputs]
    int num_rows, num_inputs, input_tiles;
};

// A grid of (tiles of rows, parts of WIDEN_WARPS * WIDEN_TILES tiles of inputs).
template <typename OUT>
DEVICE void widen_tiles(const WidenParams& p) {
    constexpr int VECTORS = sizeof(typename OUT::Storage) * 8 / 16;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
    const int row_tile = blockIdx.x, first = blockIdx.y * WIDEN_WARPS * WIDEN_TILES + warp;
    Vector16 codes[WIDEN_TILES];
#pragma unroll
    for (int i = 0; i < WIDEN_TILES; i++) {
        const int tile = first + i * WIDEN_WARPS;
        if (tile < p.input_tiles) {
            codes[i] = load_stream(p.codes + (int64(row_tile) * p.input_tiles + tile) * 32 + lane);
        }
    }
#pragma unroll
    for (int i = 0; i < WIDEN_TILES; i++) {
        const int tile = first + i * WIDEN_WARPS;
        if (tile >= p.input_tiles) break;
#pragma unroll
        for (int part = 0; part < 2 * GROUPS; part++) {
            const int group = part / 2, high = part % 2, row = 16 * row_tile + g + 8 * high;
            const int input = (tile * GROUPS + group) * GROUP + 8 * c;
            if (row >= p.num_rows || input >= p.num_inputs) continue;
            const int64 scale = KIND == Codes::INT4
                                    ? (int64(row_tile) * p.input_tiles + tile) * 32 + g * 4 + part
                                    : int64(row);
            uint32 pairs[4];
            eight_inputs(pairs, codes[i], group, high);
            union {
                typename OUT::Storage numbers[8];
                Vector16 vectors[VECTORS];
            } wide;
#pragma unroll
            for (int e = 0; e < 8; e++) {
                const float code = TYPE::to_float(Storage(pairs[e / 2] >> (16 * (e & 1))));
                wide.numbers[e] = OUT::from_float(code * p.scales[scale]);
            }
            Vector16* const target = reinterpret_cast<Vector16*>(
                static_cast<typename OUT::Storage*>(p.out) + int64(row) * p.num_inputs + input);
#pragma unroll
            for (int v = 0; v < VECTORS; v++) target[v] = wide.vectors[v];
        }
    }
}

}  // namespace

KERNEL(linear_8, LinearParams, THREADS, KIND == Codes::INT4 ? 5 : 6) {
    __shared__ float sums[WARPS * 8 * 32];
    __shared__ int flag;
    multiply_rows<1, KIND == Codes::INT4 ? 2 : 4>(p, sums, &flag);
}
KERNEL(linear_16, LinearParams, THREADS, 4) {
    __shared__ float sums[WARPS * 16 * 32];
    __shared__ int flag;
    multiply_rows<2, KIND == Codes::INT4 ? 2 : 4>(p, sums, &flag);
}
KERNEL(linear_32, LinearParams, THREADS, KIND == Codes::INT4 ? 2 : 4) {
    __shared__ float sums[WARPS * 32 * 32];
    __shared__ int flag;
    multiply_rows<4, 2>(p, sums, &flag);
}
// W in TYPE or float32, for products of many rows.
KERNEL(widen, WidenParams, WIDEN_WARPS * 32, 4) { widen_tiles<TYPE>(p); }
KERNEL(widen_float32, WidenParams, WIDEN_WARPS * 32, 4) { widen_tiles<Float32>(p); }
