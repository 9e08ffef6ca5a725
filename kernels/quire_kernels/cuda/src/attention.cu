// Paged attention of few query tokens per sequence: split over the context, balanced over a constant grid.
//
// A block multiplies 16 query rows, the heads that share a KV head times consecutive tokens of a sequence,
// with tiles of TILE positions on tensor cores. A (query tile, KV head) pair is cut into chunks of tiles,
// whose number depends on the pair's own length only. The result is defined as the left fold, over the chunks
// in order, of their softmax states (maximum, sum, weighted sum; Milakov and Gimelshein, 2018): whoever
// computes the chunks, the bits are the same. Blocks own equal runs of all chunks, in order. One that owns a
// whole pair folds in registers and writes the result. Otherwise the owner of chunk 0 stores the fold of its
// chunks, others store each chunk's state, and who arrives last, by a counter, folds them (Flash-Decoding
// without its second kernel). Lengths are read on the device: launches repeat in a CUDA graph.
//
// Defines: HEAD_DIM 64, 80, 96, 128 or 256; QUERY BFloat16 or Float16; CACHE 0 (as the query), 1 (int8) or
// 2 (e4m3), with a bfloat16 scale per token and head.
#include <device.cuh>
#include <numbers.cuh>
#include <reductions.cuh>

namespace {

constexpr int THREADS = 128;
constexpr int WARPS = 4;
constexpr int ROWS = 16;
constexpr int MAX_CHUNKS = 32;
constexpr int D = HEAD_DIM;
constexpr bool QUANTIZED = CACHE != 0;
constexpr Codes CODES = CACHE == 1 ? Codes::INT8 : Codes::E4M3;
constexpr int TILE = D > 128 && !QUANTIZED ? 32 : 64;
constexpr int STAGES = QUANTIZED ? 4 : 3;
// Values are cut into one run of columns per warp; those past D are zeros.
constexpr int COLUMNS = (D + 31) / 32 * 8;
constexpr int COLUMN_TILES = COLUMNS / 8;
constexpr int STEPS = D / 16;
constexpr int SCORE_TILES = TILE / 8 / WARPS;

// One row of a tile in shared memory. Rows of 2 ** n bytes are swizzled, others padded, so that the 8 rows
// (or 4 times 4) that a warp reads at once lie in different banks.
constexpr int ELEMENT = QUANTIZED ? 1 : 2;
constexpr int VECTORS = D * ELEMENT / 16;
constexpr bool SWIZZLED = D == 64 || D == 128 || D == 256;
constexpr int ROW_BYTES = SWIZZLED ? D * ELEMENT : 4 * COLUMNS * ELEMENT + 16;
constexpr int TILE_BYTES = TILE * ROW_BYTES;
constexpr int PASSES = TILE * VECTORS / THREADS;
static_assert(SWIZZLED || !QUANTIZED, "eight bits: of these head sizes only");
static_assert(TILE * VECTORS % THREADS == 0 && D % 16 == 0, "whole passes");

// Weights are multiplied in the query's type, unless they carry the values' scales, whose range only bfloat16
// has; a second, small part then keeps the precision of a float16 query.
typedef typename QUERY::Storage Storage;
constexpr bool TWO_PARTS = QUANTIZED && QUERY::MANTISSA_BITS > BFloat16::MANTISSA_BITS;
constexpr int WEIGHT_STRIDE = TILE + 8;

// Fragments of the query rows stay in registers, or, where those do not suffice, in shared memory.
constexpr bool QUERY_IN_SHARED = D > 128;
constexpr int QUERY_OFFSET = STAGES * 2 * TILE_BYTES;
constexpr int SCALES_OFFSET = QUERY_OFFSET + (QUERY_IN_SHARED ? STEPS * 32 * 16 : 0);
constexpr int WEIGHTS_OFFSET = SCALES_OFFSET + (QUANTIZED ? STAGES * 2 * TILE * 4 : 0);
constexpr int MAXIMA_OFFSET = WEIGHTS_OFFSET + (TWO_PARTS ? 2 : 1) * ROWS * WEIGHT_STRIDE * 2;
constexpr int SUMS_OFFSET = MAXIMA_OFFSET + WARPS * ROWS * 4;
constexpr int FLAG_OFFSET = SUMS_OFFSET + WARPS * ROWS * 4;

// What a query tile of a sequence sees: 32 bytes of the plan.
struct Item {
    int first_tile;    // of the sequence's context
    int num_tiles;     // 0: there is no such query tile
    int chunk_tiles;
    int start;         // tiles of all heads of the items before it
    int low, high;     // positions that any of its tokens sees: [low, high]
    int first_token;   // batch row
    int num_tokens;    // of this tile
};

struct Start {
    int item, head, tile, unused;
};

struct PlanParams {
    const int* query_start_loc;
    const int* seq_lens;
    Item* items;       // [num_seqs * query_tiles]
    Start* starts;     // [num_blocks]: where each block's run of chunks begins
    int* total;        // [1]: tiles of all items and heads
    int* tickets;      // [num_blocks]
    int num_seqs, query_tiles, tokens_per_tile, num_heads, window, num_blocks;
};

struct AttentionParams {
    const Storage* query;
    Storage* out;               // [num_tokens, num_heads, D]
    const uint8* data;
    const uint16* scales;
    const int* block_table;
    const Item* items;
    const Start* starts;
    const int* total;
    float* states;              // [num_blocks * MAX_CHUNKS, rows, D + 2]
    int* tickets;               // [num_blocks], zero before and after
    int64 query_token_stride, query_head_stride;  // in elements, as the others
    int64 block_stride, kv_stride, head_stride;
    int64 scale_block_stride, scale_kv_stride, scale_head_stride;
    int64 table_stride;
    float scale, softcap;       // softcap 0: none
    int window;                 // 0: none
    int block_shift, groups, num_kv_heads, head_tiles, rows, tokens_per_tile, query_tiles, num_items;
};

constexpr float LOG2_E = 1.44269504088896340736f;

// First tile that belongs to block `b` of `blocks`; `owner` inverts it.
DEVICE int run_start(int64 total, int b, int blocks) { return int((total * b + blocks - 1) / blocks); }
DEVICE int owner(int64 total, int tile, int blocks) { return int(int64(tile) * blocks / total); }

DEVICE int swizzled_key(int row, int vector) {
    if (!SWIZZLED) return vector;
    if (!QUANTIZED) return vector ^ (2 * (row & 3));
    return D == 64 ? vector ^ ((row >> 1) & 3) : vector ^ (row & 7);
}
DEVICE int swizzled_value(int row, int vector) {
    if (!SWIZZLED) return vector;
    if (!QUANTIZED) return vector ^ (row & 7);
    return vector ^ (((row >> 2) & 3) * (D == 64 ? 1 : 2));
}

// Column of the head that element `half` (0 or 1) of lane quarter `c` holds in column tile `i`.
DEVICE int column(int warp, int i, int c, int half) {
    if (!QUANTIZED) return warp * COLUMNS + i * 8 + 2 * c + half;
    constexpr int WIDTH = COLUMN_TILES < 4 ? COLUMN_TILES : 4;
    return warp * COLUMNS + (i / WIDTH) * (8 * WIDTH) + (2 * c + half) * WIDTH + i % WIDTH;
}

// Walks over the tiles of a run of chunks.
struct Cursor {
    int index, head, tile;  // item, KV head (or part of one), tile within the pair
    int base;               // tiles before the pair
    bool done;
    Item item;

    DEVICE void enter(const AttentionParams& p, int end) {
        const Vector16* raw = reinterpret_cast<const Vector16*>(p.items + index);
        const Vector16 first = raw[0], second = raw[1];
        item = {int(first.x),  int(first.y),  int(first.z),  int(first.w),
                int(second.x), int(second.y), int(second.z), int(second.w)};
        base = item.start + head * item.num_tiles;
        done = base + tile >= end;
    }
    DEVICE void begin(const AttentionParams& p, int end) {
        const Vector16 start = *reinterpret_cast<const Vector16*>(p.starts + blockIdx.x);
        index = int(start.x);
        head = int(start.y);
        tile = int(start.z);
        done = index >= p.num_items;
        if (!done) enter(p, end);
    }
    // Goes to the next tile; `end` bounds where chunks begin.
    DEVICE void advance(const AttentionParams& p, int heads, int end) {
        tile++;
        if (tile < item.num_tiles) {
            if (tile % item.chunk_tiles == 0) done = base + tile >= end;
            return;
        }
        tile = 0;
        head++;
        base += item.num_tiles;
        if (head < heads) {
            done = base >= end;
            return;
        }
        head = 0;
        do {
            index++;
            if (index >= p.num_items) {
                done = true;
                return;
            }
            enter(p, end);
        } while (item.num_tiles == 0);
    }
};

// A row's softmax state: reference exponent and sum of weights.
struct RowState {
    float maximum, sum;
};

// Factors of the two states that are folded; a state without positions has maximum -infinity.
DEVICE void fold_rows(RowState& into, const RowState& next, float& keep, float& add) {
    const float maximum = into.maximum > next.maximum ? into.maximum : next.maximum;
    const float reference = maximum == -INFINITY ? 0.0f : maximum;
    keep = exp2_fast(into.maximum - reference);
    add = exp2_fast(next.maximum - reference);
    into.maximum = maximum;
    into.sum = fused(into.sum, keep, multiply(next.sum, add));
}
DEVICE float fold(float into, float next, float keep, float add) {
    return fused(into, keep, multiply(next, add));
}

DEVICE float finish(float weighted, float sum) { return sum == 0.0f ? 0.0f : weighted / sum; }

}  // namespace

// One block of 256 threads: what each query tile sees, and where each block's run begins.
KERNEL(attention_plan, PlanParams, 256, 1) {
    __shared__ int scratch[32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int count = p.num_seqs * p.query_tiles;
    int before = 0;
    for (int first = 0; first < count; first += blockDim.x) {
        const int i = first + threadIdx.x;
        Item item = {0, 0, 1, 0, 0, -1, 0, 0};
        if (i < count) {
            const int sequence = i / p.query_tiles, offset = i % p.query_tiles * p.tokens_per_tile;
            const int begin = p.query_start_loc[sequence], length = p.query_start_loc[sequence + 1] - begin;
            if (offset < length) {
                const int left = length - offset;
                item.num_tokens = left < p.tokens_per_tile ? left : p.tokens_per_tile;
                item.first_token = begin + offset;
                const int position = p.seq_lens[sequence] - length + offset;
                item.high = position + item.num_tokens - 1;
                item.low = p.window > 0 && position >= p.window ? position - p.window + 1 : 0;
                // A sequence without context, as padding is, gets one tile of which it sees nothing.
                item.first_tile = item.high < 0 ? 0 : item.low / TILE;
                item.num_tiles = item.high < 0 ? 1 : item.high / TILE - item.first_tile + 1;
                while (item.num_tiles > item.chunk_tiles * MAX_CHUNKS) item.chunk_tiles *= 2;
            }
        }
        int sum = item.num_tiles;
        for (int delta = 1; delta < 32; delta *= 2) {
            const int other = shuffle_up(sum, delta);
            if (lane >= delta) sum += other;
        }
        if (lane == 31) scratch[warp] = sum;
        block_barrier();
        int earlier = 0, all = 0;
        for (int w = 0; w < warps; w++) {
            if (w < warp) earlier += scratch[w];
            all += scratch[w];
        }
        block_barrier();
        item.start = (before + earlier + sum - item.num_tiles) * p.num_heads;
        if (i < count) p.items[i] = item;
        before += all;
    }
    const int total = before * p.num_heads;
    if (threadIdx.x == 0) *p.total = total;
    // Items written by other threads of this block are read below.
    memory_fence();
    block_barrier();
    for (int b = threadIdx.x; b < p.num_blocks; b += blockDim.x) {
        const int begin = run_start(total, b, p.num_blocks);
        Start start = {count, 0, 0, 0};
        if (begin < total) {
            int low = 0, high = count - 1;  // the last item that starts at or before `begin`
            while (low < high) {
                const int middle = (low + high + 1) / 2;
                if (p.items[middle].start <= begin) low = middle;
                else high = middle - 1;
            }
            const Item item = p.items[low];
            const int offset = begin - item.start, chunk = item.chunk_tiles;
            start.item = low;
            start.head = offset / item.num_tiles;
            start.tile = (offset % item.num_tiles + chunk - 1) / chunk * chunk;
            if (start.tile >= item.num_tiles) {
                start.tile = 0;
                start.head++;
            }
            if (start.head == p.num_heads) {
                start.head = 0;
                start.item++;
                while (start.item < count && p.items[start.item].num_tiles == 0) start.item++;
            }
        }
        p.starts[b] = start;
        p.tickets[b] = 0;
    }
}

KERNEL(attention, AttentionParams, THREADS, 2) {
    DYNAMIC_SHARED(shared);
    float* const scales = reinterpret_cast<float*>(shared + SCALES_OFFSET);  // [STAGES][keys, values][TILE]
    uint16* const weights = reinterpret_cast<uint16*>(shared + WEIGHTS_OFFSET);
    float* const maxima = reinterpret_cast<float*>(shared + MAXIMA_OFFSET);  // [WARPS][ROWS]
    float* const sums = reinterpret_cast<float*>(shared + SUMS_OFFSET);      // [WARPS][ROWS]
    int* const flag = reinterpret_cast<int*>(shared + FLAG_OFFSET);

    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const int g = lane >> 2, c = lane & 3;
    const int heads = p.num_kv_heads * p.head_tiles;
    const int64 total = *p.total;
    const int end = run_start(total, blockIdx.x + 1, gridDim.x);

    Cursor next;  // what is loaded next
    next.begin(p, end);
    Cursor now = next;
    if (now.done) return;

    if (!SWIZZLED) {
        // Columns past D, which no copy writes.
        for (int i = thread; i < STAGES * 2 * TILE * (ROW_BYTES / 4); i += THREADS) {
            reinterpret_cast<uint32*>(shared)[i] = 0;
        }
        block_barrier();
    }

    int blocks[PASSES];      // of the rows this thread copies for `next`
    int scale_block = 0;     // of the row whose scale it loads
    float pending = 0.0f;    // that scale, of the tile before `next`
    int pending_stage = 0;

    const auto look_up = [&](int position) {
        const bool seen = position >= next.item.low && position <= next.item.high;
        const int sequence = next.index / p.query_tiles;
        return seen ? p.block_table[sequence * p.table_stride + (position >> p.block_shift)] : -1;
    };
    const auto look_up_blocks = [&]() {
        if (next.done) return;
        const int first = (next.item.first_tile + next.tile) * TILE;
#pragma unroll
        for (int j = 0; j < PASSES; j++) blocks[j] = look_up(first + (thread + j * THREADS) / VECTORS);
        if (QUANTIZED) scale_block = look_up(first + thread % TILE);
    };
    const auto store_scale = [&]() {
        if (QUANTIZED) scales[pending_stage * 2 * TILE + thread] = pending;
    };
    const auto start_copies = [&](int stage) {
        if (!next.done) {
            const int first = (next.item.first_tile + next.tile) * TILE;
            const int64 head = next.head / p.head_tiles;
            uint8* const keys = shared + stage * 2 * TILE_BYTES;
#pragma unroll
            for (int j = 0; j < PASSES; j++) {
                const int i = thread + j * THREADS, row = i / VECTORS, vector = i % VECTORS;
                const int64 slot = (first + row) & ((1 << p.block_shift) - 1);
                const bool seen = blocks[j] >= 0;
                const int64 offset =
                    (seen ? blocks[j] : 0) * p.block_stride + head * p.head_stride + slot * D;
                const uint8* const source = p.data + offset * ELEMENT + vector * 16;
                copy_async_16(keys + row * ROW_BYTES + swizzled_key(row, vector) * 16, source, seen);
                copy_async_16(keys + TILE_BYTES + row * ROW_BYTES + swizzled_value(row, vector) * 16,
                              source + p.kv_stride * ELEMENT, seen);
            }
            if (QUANTIZED) {
                // A position that is not seen has finite codes, zeros, and this scale.
                pending = 0.0f;
                if (scale_block >= 0) {
                    const int64 slot = (first + thread % TILE) & ((1 << p.block_shift) - 1);
                    const int64 offset = scale_block * p.scale_block_stride +
                                         (thread / TILE) * p.scale_kv_stride + head * p.scale_head_stride + slot;
                    pending = BFloat16::to_float(p.scales[offset]);
                }
                pending_stage = stage;
            }
            next.advance(p, heads, end);
            look_up_blocks();
        }
        copy_async_commit();
    };

    look_up_blocks();
    for (int stage = 0; stage < STAGES - 1; stage++) {
        start_copies(stage);
        if (stage < STAGES - 2) store_scale();
    }

    Vector16* const shared_query = reinterpret_cast<Vector16*>(shared + QUERY_OFFSET);  // [STEPS][32]
    uint32 query[QUERY_IN_SHARED ? 1 : STEPS][4];
    int limit[2];  // the last position that rows g and g + 8 see; below 0: none
    int64 out_offset[2];
    float accumulated[COLUMN_TILES][4];  // of the chunk: rows g (0, 1) and g + 8 (2, 3)
    float folded[COLUMN_TILES][4];       // of the chunks before it in this block's run of the pair
    RowState state[2], folded_state[2];
    int segment = 0;                     // the chunk's tile at which this block's run of the pair begins
    bool enters = true;

    for (int stage = 0; !now.done; stage = stage + 1 == STAGES ? 0 : stage + 1) {
        if (enters) {
            // A pair begins, or this block's part of it.
            enters = false;
            segment = now.tile;
            const Storage* source[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int row = g + 8 * r;
                const int token = p.head_tiles > 1 ? 0 : row / p.groups;
                const int group = p.head_tiles > 1 ? now.head % p.head_tiles * ROWS + row : row % p.groups;
                const bool used = token < now.item.num_tokens && row < p.rows && group < p.groups;
                const int64 head = (now.head / p.head_tiles) * p.groups + group;
                const int64 batch_row = now.item.first_token + token;
                limit[r] = used ? now.item.high - now.item.num_tokens + 1 + token : -1;
                out_offset[r] = used ? (batch_row * p.num_kv_heads * p.groups + head) * D : -1;
                source[r] = p.query + 4 * c +
                            (used ? batch_row * p.query_token_stride + head * p.query_head_stride : 0);
            }
            // Columns 4c to 4c + 3 take the places of 2c, 2c + 1, 2c + 8 and 2c + 9: keys do, too.
            const auto fragment = [&](uint32 (&into)[4], int k) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const Vector8 four = *reinterpret_cast<const Vector8*>(source[r] + 16 * k);
                    into[r] = out_offset[r] >= 0 ? four.x : 0;
                    into[2 + r] = out_offset[r] >= 0 ? four.y : 0;
                }
            };
            if (QUERY_IN_SHARED) {
                for (int k = warp; k < STEPS; k += WARPS) {
                    uint32 one[4];
                    fragment(one, k);
                    shared_query[k * 32 + lane] = {one[0], one[1], one[2], one[3]};
                }
            } else {
#pragma unroll
                for (int k = 0; k < STEPS; k++) fragment(query[QUERY_IN_SHARED ? 0 : k], k);
            }
        }
        if (now.tile % now.item.chunk_tiles == 0) {
#pragma unroll
            for (int r = 0; r < 2; r++) state[r] = {-INFINITY, 0.0f};
#pragma unroll
            for (int i = 0; i < COLUMN_TILES; i++) {
                accumulated[i][0] = accumulated[i][1] = accumulated[i][2] = accumulated[i][3] = 0.0f;
            }
        }

        copy_async_wait<STAGES - 2>();
        // The tile is here for all threads, and none reads the stage before any more.
        block_barrier();
        // The scale of the tile after this one, whose copies began one turn ago.
        store_scale();
        start_copies(stage == 0 ? STAGES - 1 : stage - 1);

        const uint8* const keys = shared + stage * 2 * TILE_BYTES;
        const uint8* const values = keys + TILE_BYTES;
        const float* const key_scales = scales + stage * 2 * TILE;
        const float* const value_scales = key_scales + TILE;

        float scores[SCORE_TILES][4] = {};
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            if (QUERY_IN_SHARED) {
                const Vector16 one = shared_query[k * 32 + lane];
                query[0][0] = one.x, query[0][1] = one.y, query[0][2] = one.z, query[0][3] = one.w;
            }
            const uint32(&a)[4] = query[QUERY_IN_SHARED ? 0 : k];
#pragma unroll
            for (int j = 0; j < SCORE_TILES; j++) {
                const int row = (warp * SCORE_TILES + j) * 8 + g;
                const uint8* const key = keys + row * ROW_BYTES;
                if (QUANTIZED) {
                    const uint32 four =
                        *reinterpret_cast<const uint32*>(key + swizzled_key(row, k) * 16 + 4 * c);
                    QUERY::mma(scores[j], a, QUERY::template from_codes<CODES>(four, 0),
                               QUERY::template from_codes<CODES>(four, 2));
                } else {
                    const Vector8 four = *reinterpret_cast<const Vector8*>(
                        key + swizzled_key(row, 2 * k + (c >> 1)) * 16 + 8 * (c & 1));
                    QUERY::mma(scores[j], a, four.x, four.y);
                }
            }
        }

        const int first = (now.item.first_tile + now.tile) * TILE;
        float tile_max[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int j = 0; j < SCORE_TILES; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int index = (warp * SCORE_TILES + j) * 8 + 2 * c + (i & 1), position = first + index;
                float score = scores[j][i] * p.scale;
                if (QUANTIZED) score *= key_scales[index];
                if (p.softcap > 0.0f) {
                    const float exponential = exp2_fast(score / p.softcap * (2.0f * LOG2_E));
                    score = p.softcap * (1.0f - 2.0f / (exponential + 1.0f));
                }
                score *= LOG2_E;
                const int last = limit[i >> 1];
                const bool seen = position <= last && (p.window == 0 || position > last - p.window);
                scores[j][i] = seen ? score : -INFINITY;
                // A NaN is not the larger one of two, and reaches the sum all the same.
                tile_max[i >> 1] = Max::apply(scores[j][i], tile_max[i >> 1]);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            tile_max[r] = Max::apply(tile_max[r], shuffle_xor(tile_max[r], 1));
            tile_max[r] = Max::apply(tile_max[r], shuffle_xor(tile_max[r], 2));
            if (c == 0) maxima[warp * ROWS + g + 8 * r] = tile_max[r];
        }
        block_barrier();
        float keep[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float maximum = state[r].maximum;
#pragma unroll
            for (int w = 0; w < WARPS; w++) maximum = Max::apply(maximum, maxima[w * ROWS + g + 8 * r]);
            const float reference = maximum == -INFINITY ? 0.0f : maximum;
            keep[r] = exp2_fast(state[r].maximum - reference);
            state[r] = {maximum, state[r].sum * keep[r]};
            const int row = (g + 8 * r) * WEIGHT_STRIDE;
#pragma unroll
            for (int j = 0; j < SCORE_TILES; j++) {
                const int index = (warp * SCORE_TILES + j) * 8 + 2 * c;
                float low = exp2_fast(scores[j][2 * r] - reference);
                float high = exp2_fast(scores[j][2 * r + 1] - reference);
                state[r].sum += low + high;
                uint32* const place = reinterpret_cast<uint32*>(weights + row + index);
                if (QUANTIZED) {
                    low *= value_scales[index];
                    high *= value_scales[index + 1];
                    *place = pack_bfloat16(low, high);
                    if (TWO_PARTS) {
                        place[ROWS * WEIGHT_STRIDE / 2] =
                            pack_bfloat16(low - rounded<BFloat16>(low), high - rounded<BFloat16>(high));
                    }
                } else {
                    *place = QUERY::pack(low, high);
                }
            }
        }
        block_barrier();

#pragma unroll
        for (int i = 0; i < COLUMN_TILES; i++) {
#pragma unroll
            for (int e = 0; e < 4; e++) accumulated[i][e] *= keep[e >> 1];
        }
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) {
            uint32 a[TWO_PARTS ? 2 : 1][4];
#pragma unroll
            for (int part = 0; part < (TWO_PARTS ? 2 : 1); part++) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const uint16* const row = weights + (part * ROWS + g + 8 * r) * WEIGHT_STRIDE + 16 * k;
                    // Eight bits: positions 4c to 4c + 3 take the places of 2c, 2c + 1, 2c + 8 and 2c + 9.
                    a[part][r] = *reinterpret_cast<const uint32*>(row + (QUANTIZED ? 4 * c : 2 * c));
                    a[part][2 + r] =
                        *reinterpret_cast<const uint32*>(row + (QUANTIZED ? 4 * c + 2 : 2 * c + 8));
                }
            }
            if (!QUANTIZED) {
                const int row = 16 * k + (lane & 15);
#pragma unroll
                for (int i = 0; i < COLUMN_TILES; i++) {
                    uint32 b0, b1;
                    load_matrices_transposed(
                        b0, b1, values + row * ROW_BYTES + swizzled_value(row, warp * COLUMN_TILES + i) * 16);
                    QUERY::mma(accumulated[i], a[0], b0, b1);
                }
            } else {
                // Four positions of WIDTH neighbouring columns, transposed: a word of codes for each column.
                constexpr int WIDTH = COLUMN_TILES < 4 ? COLUMN_TILES : 4;
#pragma unroll
                for (int part = 0; part < COLUMN_TILES / WIDTH; part++) {
                    uint32 word[4];
#pragma unroll
                    for (int t = 0; t < 4; t++) {
                        const int row = 16 * k + 4 * c + t;
                        const int byte = warp * COLUMNS + part * 8 * WIDTH + g * WIDTH;
                        const uint8* const place =
                            values + row * ROW_BYTES + swizzled_value(row, byte / 16) * 16 + byte % 16;
                        word[t] = WIDTH == 4 ? *reinterpret_cast<const uint32*>(place)
                                             : *reinterpret_cast<const uint16*>(place);
                    }
                    const uint32 low01 = permute_bytes(word[0], word[1], 0x5140);
                    const uint32 low23 = permute_bytes(word[2], word[3], 0x5140);
                    const uint32 high01 = permute_bytes(word[0], word[1], 0x7362);
                    const uint32 high23 = permute_bytes(word[2], word[3], 0x7362);
#pragma unroll
                    for (int i = 0; i < WIDTH; i++) {
                        const uint32 codes = permute_bytes(i < 2 ? low01 : high01, i < 2 ? low23 : high23,
                                                           i % 2 == 0 ? 0x5410 : 0x7632);
                        const uint32 b0 = BFloat16::from_codes<CODES>(codes, 0);
                        const uint32 b1 = BFloat16::from_codes<CODES>(codes, 2);
                        BFloat16::mma(accumulated[part * WIDTH + i], a[0], b0, b1);
                        if (TWO_PARTS) {
                            BFloat16::mma(accumulated[part * WIDTH + i], a[TWO_PARTS ? 1 : 0], b0, b1);
                        }
                    }
                }
            }
        }

        const Item item = now.item;
        const int tile = now.tile, base = now.base;
        const bool pair_ends = tile + 1 == item.num_tiles;
        now.advance(p, heads, end);
        if (!pair_ends && (tile + 1) % item.chunk_tiles != 0) continue;

        // The chunk ends. Its sum is completed here and not after the fold, whose bits it would change.
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = state[r].sum;
            sum += shuffle_xor(sum, 1);
            sum += shuffle_xor(sum, 2);
            if (c == 0) sums[warp * ROWS + g + 8 * r] = sum;
        }
        block_barrier();
        const int chunk = tile / item.chunk_tiles;
        const bool is_first = chunk * item.chunk_tiles == segment;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            state[r].sum = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) state[r].sum += sums[w * ROWS + g + 8 * r];
            if (is_first || segment > 0) {
                folded_state[r] = state[r];
#pragma unroll
                for (int i = 0; i < COLUMN_TILES; i++) {
                    folded[i][2 * r] = accumulated[i][2 * r];
                    folded[i][2 * r + 1] = accumulated[i][2 * r + 1];
                }
            } else {
                float kept, added;
                fold_rows(folded_state[r], state[r], kept, added);
#pragma unroll
                for (int i = 0; i < COLUMN_TILES; i++) {
                    folded[i][2 * r] = fold(folded[i][2 * r], accumulated[i][2 * r], kept, added);
                    folded[i][2 * r + 1] = fold(folded[i][2 * r + 1], accumulated[i][2 * r + 1], kept, added);
                }
            }
        }
        const bool run_ends = pair_ends || now.done;
        enters = run_ends;
        if (pair_ends && segment == 0) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                if (out_offset[r] < 0) continue;
#pragma unroll
                for (int i = 0; i < COLUMN_TILES; i++) {
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const int d = column(warp, i, c, half);
                        const float value = finish(folded[i][2 * r + half], folded_state[r].sum);
                        if (d < D) p.out[out_offset[r] + d] = QUERY::from_float(value);
                    }
                }
            }
            continue;
        }
        if (!run_ends && segment == 0) continue;

        // The pair has other owners: this state goes to memory.
        const int64 first_owner = owner(total, base, gridDim.x);
        float* const states = p.states + first_owner * MAX_CHUNKS * p.rows * (D + 2);
        float* const place = states + int64(segment == 0 ? 0 : chunk) * p.rows * (D + 2);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = g + 8 * r;
            if (row >= p.rows) continue;
#pragma unroll
            for (int i = 0; i < COLUMN_TILES; i++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int d = column(warp, i, c, half);
                    if (d < D) place[row * (D + 2) + d] = folded[i][2 * r + half];
                }
            }
            if (warp == 0 && c == 0) {
                place[row * (D + 2) + D] = folded_state[r].maximum;
                place[row * (D + 2) + D + 1] = folded_state[r].sum;
            }
        }
        if (!run_ends) continue;
        memory_fence();
        block_barrier();
        const int num_chunks = (item.num_tiles + item.chunk_tiles - 1) / item.chunk_tiles;
        if (thread == 0) {
            const int arrived = chunk + 1 - segment / item.chunk_tiles;
            *flag = atomic_add(p.tickets + first_owner, arrived) + arrived == num_chunks;
            memory_fence();
        }
        block_barrier();
        if (*flag == 0) continue;
        if (thread == 0) p.tickets[first_owner] = 0;
        const int first_end = run_start(total, int(first_owner) + 1, gridDim.x);
        const int prefix = (first_end - base + item.chunk_tiles - 1) / item.chunk_tiles;
        const int pair_head = (base - item.start) / item.num_tiles;
        for (int e = thread; e < p.rows * D; e += THREADS) {
            const int row = e / D, d = e % D;
            const float* const source = states + row * (D + 2);
            RowState result = {load_shared_by_blocks(source + D), load_shared_by_blocks(source + D + 1)};
            float value = load_shared_by_blocks(source + d);
#pragma unroll 4
            for (int other = prefix; other < num_chunks; other++) {
                const float* const one = source + int64(other) * p.rows * (D + 2);
                const RowState added = {load_shared_by_blocks(one + D), load_shared_by_blocks(one + D + 1)};
                float kept, factor;
                fold_rows(result, added, kept, factor);
                value = fold(value, load_shared_by_blocks(one + d), kept, factor);
            }
            const int token = p.head_tiles > 1 ? 0 : row / p.groups;
            const int group = p.head_tiles > 1 ? pair_head % p.head_tiles * ROWS + row : row % p.groups;
            if (token >= item.num_tokens || group >= p.groups) continue;
            const int64 head = (pair_head / p.head_tiles) * p.groups + group;
            const int64 batch_row = item.first_token + token;
            p.out[(batch_row * p.num_kv_heads * p.groups + head) * D + d] =
                QUERY::from_float(finish(value, result.sum));
        }
    }
    copy_async_wait<0>();
}
