// Paged attention of few query tokens per sequence: split over the context, balanced over a constant grid.
//
// A block multiplies 16 query rows, the heads that share a KV head times consecutive tokens of a sequence,
// with tiles of TILE positions on tensor cores. Each warp has 16 positions of a tile for itself (with heads of
// 256, a pair of warps, that divide the columns of the values): it copies them, waits for them alone, and
// keeps a softmax state of its own, with weights in registers. A (query tile, KV head) pair is cut into chunks
// of tiles, whose number depends on the pair's own length only; where a chunk ends its state (maximum, sum,
// weighted sum; Milakov and Gimelshein, 2018) is that of the warps, in their order. The result is defined as the left fold of the chunks' states: whoever computes the chunks, the
// bits are the same. Blocks own equal runs of all chunks, in order. One that owns a whole pair folds in
// registers and writes the result. Otherwise the owner of chunk 0 stores the fold of its chunks, others store
// each chunk's state, and who arrives last, by a counter, folds them (Flash-Decoding without its second
// kernel). Lengths are read on the device: launches repeat in a CUDA graph.
//
// Defines: HEAD_DIM 64, 80, 96, 128 or 256; QUERY BFloat16 or Float16; CACHE 0 (as the query), 1 (int8) or
// 2 (e4m3), with a bfloat16 scale per token and head.
#include <device.cuh>
#include <numbers.cuh>
#include <reductions.cuh>

namespace {

constexpr int ROWS = 16;
constexpr int MAX_CHUNKS = 32;
constexpr int D = HEAD_DIM;
constexpr bool QUANTIZED = CACHE != 0;
constexpr Codes CODES = CACHE == 1 ? Codes::INT8 : Codes::E4M3;
constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int PARTS = D > 128 ? 2 : 1;  // warps that share their positions, each with a part of the columns
constexpr int GROUPS = WARPS / PARTS;
constexpr int GROUP_TILE = 16;
constexpr int TILE = GROUP_TILE * GROUPS;
constexpr int STAGES = QUANTIZED ? 4 : 3;
// Chunks are this long at least: what ends one costs as much as some tiles.
constexpr int CHUNK_TILES = 128 / TILE;
constexpr int COLUMNS = D / PARTS;
constexpr int COLUMN_TILES = COLUMNS / 8;

// One row of a tile in shared memory: vectors of 16 bytes, swizzled so that those that lanes read together
// lie in different banks.
constexpr int ELEMENT = QUANTIZED ? 1 : 2;
constexpr int VECTORS = D * ELEMENT / 16;
constexpr bool IS_POWER = D == 64 || D == 128 || D == 256;
constexpr int ROW_BYTES = IS_POWER ? D * ELEMENT : 192;
// A group's share of a stage: keys, then values; where a chunk ends also the scratch memory of its warps.
constexpr int KEY_BYTES = GROUP_TILE * ROW_BYTES;
constexpr int GROUP_BYTES = 2 * KEY_BYTES;
constexpr int STAGE_BYTES = GROUPS * GROUP_BYTES;
constexpr int PASSES = GROUP_TILE * VECTORS / 32 / PARTS;
constexpr int HALF_ROWS = ROWS / 2;
// Numbers of eight rows that a thread folds.
constexpr int FOLDED = HALF_ROWS * D / THREADS;
static_assert(IS_POWER || (!QUANTIZED && D <= 96), "eight bits: of these head sizes only");
static_assert(GROUP_TILE * VECTORS % (32 * PARTS) == 0 && D % 16 == 0, "whole passes");
static_assert(HALF_ROWS * D * 4 <= GROUP_BYTES && HALF_ROWS * D % THREADS == 0, "room for half of the rows");

// Weights are multiplied in the query's type, unless they carry the values' scales, whose range only bfloat16
// has; a second, small part then keeps the precision of a float16 query.
typedef typename QUERY::Storage Storage;
constexpr bool TWO_PARTS = QUANTIZED && QUERY::MANTISSA_BITS > BFloat16::MANTISSA_BITS;
// Steps of 16 dimensions that a lane's 16 bytes of a key make: each step takes 4 dimensions of every lane.
constexpr int WIDE = QUANTIZED ? 4 : 2;
constexpr int STEPS = (D + 16 * WIDE - 1) / (16 * WIDE) * WIDE;

// Fragments of the query rows stay in registers, or, where those do not suffice, in shared memory.
constexpr bool QUERY_IN_SHARED = D > 128;
constexpr int UNROLLED = QUERY_IN_SHARED ? 1 : STEPS;
static_assert(QUERY_IN_SHARED || STEPS * 512 <= GROUP_BYTES, "room for the query on its way");
constexpr int QUERY_OFFSET = STAGES * STAGE_BYTES;
constexpr int SCALES_OFFSET = QUERY_OFFSET + (QUERY_IN_SHARED ? STEPS * 32 * 16 : 0);
constexpr int STATES_OFFSET = SCALES_OFFSET + (QUANTIZED ? STAGES * 2 * TILE * 4 : 0);
constexpr int FOLDINGS_OFFSET = STATES_OFFSET + WARPS * ROWS * 8;
constexpr int FLAG_OFFSET = FOLDINGS_OFFSET + ROWS * 32;

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
    return IS_POWER && ROW_BYTES > 64 ? vector ^ (4 * (row & 1)) : vector;
}
DEVICE int swizzled_value(int row, int vector) {
    if (!IS_POWER) return vector ^ ((row >> 1) & 3);
    if (!QUANTIZED) return vector ^ (row & 7);
    return vector ^ (((row >> 2) & 3) * (D == 64 ? 1 : 2));
}

// Position, of the group's 16, whose score element `half` (0 or 1) of lane quarter `c` is in tile `j`. Eight
// bits: a lane has four positions that follow each other, as it reads the values' codes.
DEVICE int position_of(int j, int c, int half) { return QUANTIZED ? 4 * c + 2 * j + half : 8 * j + 2 * c + half; }
// Column of the warp's part that element `half` of lane quarter `c` holds in column tile `i`. Eight bits: the
// bytes of a row that a lane reads are a column each of all tiles.
DEVICE int column(int i, int c, int half) {
    return QUANTIZED ? (2 * c + half) * COLUMN_TILES + i : i * 8 + 2 * c + half;
}

// Between the warps that share a tile.
DEVICE void tile_barrier() {
    if (PARTS > 1) block_barrier();
    else warp_barrier();
}

// Walks over the tiles of a run of chunks, whose number of tiles is a power of two.
struct Cursor {
    int index, head, tile;  // item, KV head (or part of one), tile within the pair
    int sequence, kv_head;  // of the item, and of the head
    int base;               // tiles before the pair
    bool done;
    Item item;

    DEVICE void enter(const AttentionParams& p, int end) {
        const Vector16* raw = reinterpret_cast<const Vector16*>(p.items + index);
        const Vector16 first = raw[0], second = raw[1];
        item = {int(first.x),  int(first.y),  int(first.z),  int(first.w),
                int(second.x), int(second.y), int(second.z), int(second.w)};
        sequence = p.query_tiles == 1 ? index : index / p.query_tiles;
        base = item.start + head * item.num_tiles;
        enter_head(p, end);
    }
    DEVICE void enter_head(const AttentionParams& p, int end) {
        kv_head = p.head_tiles == 1 ? head : head / p.head_tiles;
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
    DEVICE bool begins_chunk() const { return (tile & (item.chunk_tiles - 1)) == 0; }
    // Goes to the next tile; `end` bounds where chunks begin.
    DEVICE void advance(const AttentionParams& p, int heads, int end) {
        tile++;
        if (tile < item.num_tiles) {
            if (begins_chunk()) done = base + tile >= end;
            return;
        }
        tile = 0;
        head++;
        base += item.num_tiles;
        if (head < heads) {
            enter_head(p, end);
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

// How a chunk's row is folded: the factors of its groups' parts, then those of the chunks before and of itself;
// and the sum of all so far.
struct Folding {
    float parts[4];
    float keep, add, sum, unused;
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
        Item item = {0, 0, CHUNK_TILES, 0, 0, -1, 0, 0};
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
    float* const scales = reinterpret_cast<float*>(shared + SCALES_OFFSET);  // [STAGES][GROUPS][keys, values][16]
    RowState* const states = reinterpret_cast<RowState*>(shared + STATES_OFFSET);    // [WARPS][ROWS], of a chunk
    Folding* const foldings = reinterpret_cast<Folding*>(shared + FOLDINGS_OFFSET);  // [ROWS]
    int* const flag = reinterpret_cast<int*>(shared + FLAG_OFFSET);

    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const int g = lane >> 2, c = lane & 3, group = warp / PARTS, part = warp % PARTS;
    const int heads = p.num_kv_heads * p.head_tiles;
    const int64 total = *p.total;
    const int end = run_start(total, blockIdx.x + 1, gridDim.x);

    Cursor next;  // what is loaded next
    next.begin(p, end);
    Cursor now = next;
    if (now.done) return;

    // Blocks of 16 positions and more have those of a group in one piece.
    const bool is_whole = p.block_shift >= 4;
    int block = -1;          // of this group in `next`, or else of its position `lane % 16`; -1: it is not seen
    float pending = 0.0f;    // the scale of that position, of the tile before `next`: of keys, or of values
    int pending_stage = 0;

    const auto look_up = [&]() {
        if (next.done) return;
        const int first = (next.item.first_tile + next.tile) * TILE + group * GROUP_TILE;
        const int position = is_whole ? first : first + lane % GROUP_TILE;
        const bool seen = position <= next.item.high &&
                          (is_whole ? first + GROUP_TILE - 1 : position) >= next.item.low;
        block = seen ? p.block_table[next.sequence * p.table_stride + (position >> p.block_shift)] : -1;
    };
    const auto store_scale = [&]() {
        if (QUANTIZED && part == 0) scales[(pending_stage * GROUPS + group) * 32 + lane] = pending;
    };
    const auto start_copies = [&](int stage) {
        if (!next.done) {
            const int first = (next.item.first_tile + next.tile) * TILE + group * GROUP_TILE;
            const int low = next.item.low - first, high = next.item.high - first;  // rows that are seen
            const int slots = (1 << p.block_shift) - 1;
            const int64 head_offset = next.kv_head * p.head_stride;
            uint8* const keys = shared + stage * STAGE_BYTES + group * GROUP_BYTES;
            const auto copy = [&](int j, const uint8* source, bool seen) {
                const int i = lane + (j * PARTS + part) * 32, row = i / VECTORS, vector = i % VECTORS;
                copy_async_16(keys + row * ROW_BYTES + swizzled_key(row, vector) * 16, source, seen);
                copy_async_16(keys + KEY_BYTES + row * ROW_BYTES + swizzled_value(row, vector) * 16,
                              source + p.kv_stride * ELEMENT, seen);
            };
            if (is_whole) {
                const int64 offset =
                    (block < 0 ? 0 : block) * p.block_stride + head_offset + int64(first & slots) * D;
                const uint8* const source = p.data + offset * ELEMENT + (lane + part * 32) * 16;
                if (low <= 0 && high >= GROUP_TILE - 1) {
#pragma unroll
                    for (int j = 0; j < PASSES; j++) copy(j, source + j * PARTS * 512, true);
                } else {
#pragma unroll
                    for (int j = 0; j < PASSES; j++) {
                        const int row = (lane + (j * PARTS + part) * 32) / VECTORS;
                        copy(j, source + j * PARTS * 512, row >= low && row <= high);
                    }
                }
            } else {
#pragma unroll 1
                for (int j = 0; j < PASSES; j++) {
                    const int i = lane + (j * PARTS + part) * 32, row = i / VECTORS;
                    const int found = shuffle(block, row);
                    const int64 offset = (found < 0 ? 0 : found) * p.block_stride + head_offset +
                                         int64((first + row) & slots) * D;
                    copy(j, p.data + offset * ELEMENT + i % VECTORS * 16, found >= 0);
                }
            }
            if (QUANTIZED) {
                // A position that is not seen has finite codes, zeros, and this scale.
                pending = 0.0f;
                const int row = lane % GROUP_TILE;
                if (row >= low && row <= high) {
                    const int64 offset = block * p.scale_block_stride +
                                         (lane / GROUP_TILE) * p.scale_kv_stride +
                                         next.kv_head * p.scale_head_stride + ((first + row) & slots);
                    pending = BFloat16::to_float(p.scales[offset]);
                }
                pending_stage = stage;
            }
            next.advance(p, heads, end);
            look_up();
        }
        copy_async_commit();
    };

    look_up();
    for (int stage = 0; stage < STAGES - 1; stage++) {
        start_copies(stage);
        if (stage < STAGES - 2) store_scale();
    }

    Vector16* const shared_query = reinterpret_cast<Vector16*>(shared + QUERY_OFFSET);  // [STEPS][32]
    Vector16 query[STEPS];
    int limit[2];  // the last position that rows g and g + 8 see; below 0: none
    float accumulated[COLUMN_TILES][4];  // of the chunk, by this warp: rows g (0, 1) and g + 8 (2, 3)
    RowState state[2];
    float folded[2][FOLDED];  // of the chunks before it in this block's run of the pair
    RowState row_state = {-INFINITY, 0.0f};  // of these, of row `thread`
    int segment = 0;          // the chunk's tile at which this block's run of the pair begins
    bool enters = true;
    const float to_exponent = p.softcap > 0.0f ? 1.0f : p.scale * LOG2_E;

    // What a row of the pair of `item` and `head` is: token of the tile, and query head; false: nothing.
    const auto find_row = [&](const Item& item, int head, int row, int& token, int& query_head) {
        token = p.head_tiles > 1 ? 0 : row / p.groups;
        const int member = p.head_tiles > 1 ? head % p.head_tiles * ROWS + row : row % p.groups;
        query_head = head / p.head_tiles * p.groups + member;
        return token < item.num_tokens && row < p.rows && member < p.groups;
    };
    const auto write = [&](const Item& item, int head, int e, float value) {
        int token, query_head;
        if (!find_row(item, head, e / D, token, query_head)) return;
        const int64 row = int64(item.first_token + token) * (p.num_kv_heads * p.groups) + query_head;
        p.out[row * D + e % D] = QUERY::from_float(value);
    };

    const auto begin_chunk = [&]() {
#pragma unroll
        for (int r = 0; r < 2; r++) state[r] = {-INFINITY, 0.0f};
#pragma unroll
        for (int i = 0; i < COLUMN_TILES; i++) {
            accumulated[i][0] = accumulated[i][1] = accumulated[i][2] = accumulated[i][3] = 0.0f;
        }
    };
    begin_chunk();

    for (int stage = 0; !now.done; stage = stage + 1 == STAGES ? 0 : stage + 1) {
        if (enters) {
            // A pair begins, or this block's part of it.
            enters = false;
            segment = now.tile;
            const Storage* source[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int token, query_head;
                const bool used = find_row(now.item, now.head, g + 8 * r, token, query_head);
                limit[r] = used ? now.item.high - now.item.num_tokens + 1 + token : -1;
                source[r] = used ? p.query + (now.item.first_token + token) * p.query_token_stride +
                                       query_head * p.query_head_stride
                                 : nullptr;
            }
            // Four columns that follow each other take the places of 2c, 2c + 1, 2c + 8 and 2c + 9: the keys'
            // do, too.
            const auto fragment = [&](int k) {
                const int first = k / WIDE * (16 * WIDE) + c * (4 * WIDE) + k % WIDE * 4;
                Vector8 four[2] = {};
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    if (source[r] && first < D) four[r] = *reinterpret_cast<const Vector8*>(source[r] + first);
                }
                return Vector16{four[0].x, four[1].x, four[0].y, four[1].y};
            };
            if (QUERY_IN_SHARED) {
                for (int k = warp; k < STEPS; k += WARPS) shared_query[k * 32 + lane] = fragment(k);
                block_barrier();
            } else {
                // By way of the stage that is filled next: what is loaded at once lies in registers that follow
                // each other, as products want them; else each product would begin with four moves.
                Vector16* const own = reinterpret_cast<Vector16*>(
                    shared + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE_BYTES + group * GROUP_BYTES);
#pragma unroll
                for (int k = 0; k < STEPS; k++) own[k * 32 + lane] = fragment(k);
#pragma unroll
                for (int k = 0; k < STEPS; k++) query[k] = load_again(own + k * 32 + lane);
            }
        }

        copy_async_wait<STAGES - 2>();
        // The tile is here for all lanes, and none reads the stage before any more.
        tile_barrier();
        // The scale of the tile after this one, whose copies began one turn ago.
        store_scale();
        start_copies(stage == 0 ? STAGES - 1 : stage - 1);

        uint8* const keys = shared + stage * STAGE_BYTES + group * GROUP_BYTES;
        const uint8* const values = keys + KEY_BYTES;
        const float* const key_scales = scales + (stage * GROUPS + group) * 32;
        const float* const value_scales = key_scales + GROUP_TILE;

        float scores[2][4] = {};
#pragma unroll UNROLLED
        for (int k = 0; k < STEPS; k += WIDE) {
            Vector16 key[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int row = QUANTIZED ? 4 * (g >> 1) + 2 * j + (g & 1) : 8 * j + g;
                key[j] = {0, 0, 0, 0};
                if (D % (16 * WIDE) == 0 || k / WIDE * 4 + c < VECTORS) {
                    key[j] = *reinterpret_cast<const Vector16*>(keys + row * ROW_BYTES +
                                                                swizzled_key(row, k / WIDE * 4 + c) * 16);
                }
            }
#pragma unroll
            for (int i = 0; i < WIDE && k + i < STEPS; i++) {
                const Vector16 rows = QUERY_IN_SHARED ? shared_query[(k + i) * 32 + lane] : query[k + i];
                const uint32 a[4] = {rows.x, rows.y, rows.z, rows.w};
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    if (QUANTIZED) {
                        const uint32 four = i == 0 ? key[j].x : i == 1 ? key[j].y : i == 2 ? key[j].z : key[j].w;
                        QUERY::mma(scores[j], a, QUERY::template from_codes<CODES>(four, 0),
                                   QUERY::template from_codes<CODES>(four, 2));
                    } else {
                        QUERY::mma(scores[j], a, i == 0 ? key[j].x : key[j].z, i == 0 ? key[j].y : key[j].w);
                    }
                }
            }
        }

        const int first = (now.item.first_tile + now.tile) * TILE + group * GROUP_TILE;
        float tile_max[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int j = 0; j < 2; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                scores[j][i] *= to_exponent;
                if (QUANTIZED) scores[j][i] *= key_scales[position_of(j, c, i & 1)];
            }
        }
        if (p.softcap > 0.0f) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float exponential = exp2_fast(scores[j][i] * p.scale / p.softcap * (2.0f * LOG2_E));
                    scores[j][i] = p.softcap * (1.0f - 2.0f / (exponential + 1.0f)) * LOG2_E;
                }
            }
        }
        // Whether every row sees every position of the group.
        const bool is_seen = first + GROUP_TILE - 1 <= now.item.high - now.item.num_tokens + 1 &&
                             (p.window == 0 || first > now.item.high - p.window);
        if (!is_seen) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int position = first + position_of(j, c, i & 1), last = limit[i >> 1];
                    const bool seen = position <= last && (p.window == 0 || position > last - p.window);
                    if (!seen) scores[j][i] = -INFINITY;
                }
            }
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                // A NaN is not the larger one of two, and reaches the sum all the same.
                tile_max[i >> 1] = Max::apply(scores[j][i], tile_max[i >> 1]);
            }
        }
        float reference[2];
        bool rises = false;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            tile_max[r] = Max::apply(tile_max[r], shuffle_xor(tile_max[r], 1));
            tile_max[r] = Max::apply(tile_max[r], shuffle_xor(tile_max[r], 2));
            rises = rises || tile_max[r] > state[r].maximum;
        }
        if (ballot(rises)) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float maximum = Max::apply(tile_max[r], state[r].maximum);
                const float keep = exp2_fast(state[r].maximum - (maximum == -INFINITY ? 0.0f : maximum));
                state[r] = {maximum, state[r].sum * keep};
#pragma unroll
                for (int i = 0; i < COLUMN_TILES; i++) {
                    accumulated[i][2 * r] *= keep;
                    accumulated[i][2 * r + 1] *= keep;
                }
            }
        }
        // The scores' fragments are those of the weights.
        uint32 a[TWO_PARTS ? 2 : 1][4];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            reference[r] = state[r].maximum == -INFINITY ? 0.0f : state[r].maximum;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float low = exp2_fast(scores[j][2 * r] - reference[r]);
                float high = exp2_fast(scores[j][2 * r + 1] - reference[r]);
                state[r].sum += low + high;
                if (QUANTIZED) {
                    low *= value_scales[position_of(j, c, 0)];
                    high *= value_scales[position_of(j, c, 1)];
                    a[0][2 * j + r] = pack_bfloat16(low, high);
                    if (TWO_PARTS) {
                        a[TWO_PARTS ? 1 : 0][2 * j + r] =
                            pack_bfloat16(low - rounded<BFloat16>(low), high - rounded<BFloat16>(high));
                    }
                } else {
                    a[0][2 * j + r] = QUERY::pack(low, high);
                }
            }
        }

        if (!QUANTIZED) {
            const int row = lane & 15;
#pragma unroll
            for (int i = 0; i < COLUMN_TILES; i += 2) {
                uint32 b[4];
                const int vector = part * COLUMN_TILES + i + (lane >> 4);
                load_matrices_transposed(b, values + row * ROW_BYTES + swizzled_value(row, vector) * 16);
                QUERY::mma(accumulated[i], a[0], b[0], b[1]);
                QUERY::mma(accumulated[i + 1], a[0], b[2], b[3]);
            }
        } else {
            // Four positions of neighbouring columns, transposed: a word of codes for each column.
            constexpr int WORDS = COLUMN_TILES / 4;
            uint32 words[4][4];
#pragma unroll
            for (int t = 0; t < 4; t++) {
                const int row = 4 * c + t, byte = (part * 8 + g) * COLUMN_TILES;
                const uint8* const place =
                    values + row * ROW_BYTES + swizzled_value(row, byte / 16) * 16 + byte % 16;
                if (WORDS == 2) {
                    const Vector8 two = *reinterpret_cast<const Vector8*>(place);
                    words[t][0] = two.x, words[t][1] = two.y, words[t][2] = words[t][3] = 0;
                } else {
                    const Vector16 four = *reinterpret_cast<const Vector16*>(place);
                    words[t][0] = four.x, words[t][1] = four.y, words[t][2] = four.z, words[t][3] = four.w;
                }
            }
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                const uint32 low01 = permute_bytes(words[0][w], words[1][w], 0x5140);
                const uint32 low23 = permute_bytes(words[2][w], words[3][w], 0x5140);
                const uint32 high01 = permute_bytes(words[0][w], words[1][w], 0x7362);
                const uint32 high23 = permute_bytes(words[2][w], words[3][w], 0x7362);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const uint32 codes = permute_bytes(i < 2 ? low01 : high01, i < 2 ? low23 : high23,
                                                       i % 2 == 0 ? 0x5410 : 0x7632);
                    const uint32 b0 = BFloat16::from_codes<CODES>(codes, 0);
                    const uint32 b1 = BFloat16::from_codes<CODES>(codes, 2);
                    BFloat16::mma(accumulated[4 * w + i], a[0], b0, b1);
                    if (TWO_PARTS) BFloat16::mma(accumulated[4 * w + i], a[TWO_PARTS ? 1 : 0], b0, b1);
                }
            }
        }

        const Item item = now.item;
        const int tile = now.tile, base = now.base, pair_head = now.head;
        const bool pair_ends = tile + 1 == item.num_tiles;
        now.advance(p, heads, end);
        if (!pair_ends && ((tile + 1) & (item.chunk_tiles - 1)) != 0) continue;

        // The chunk ends: each warp lays down what it has where its tile was, eight rows at a time, and every
        // thread folds some columns of all warps, then into those of the chunks before.
        const int chunk = tile / item.chunk_tiles;
        const bool is_first = segment > 0 || chunk * item.chunk_tiles == segment;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = state[r].sum;
            sum += shuffle_xor(sum, 1);
            sum += shuffle_xor(sum, 2);
            if (c == 0) states[warp * ROWS + g + 8 * r] = {state[r].maximum, sum};
        }
        const auto lay_down = [&](int r) {
            if (g + 8 * r >= p.rows) return;
            float* const scratch = reinterpret_cast<float*>(keys + part * (GROUP_BYTES / PARTS)) + g * COLUMNS;
#pragma unroll
            for (int i = 0; i < COLUMN_TILES; i++) {
                scratch[column(i, c, 0)] = accumulated[i][2 * r];
                scratch[column(i, c, 1)] = accumulated[i][2 * r + 1];
            }
        };
        // All lanes have read the tile.
        tile_barrier();
        lay_down(0);
        block_barrier();
        if (thread < p.rows) {
            RowState one = states[thread];
#pragma unroll
            for (int w = PARTS; w < WARPS; w += PARTS) {
                one.maximum = Max::apply(states[w * ROWS + thread].maximum, one.maximum);
            }
            const float reference = one.maximum == -INFINITY ? 0.0f : one.maximum;
            one.sum = 0.0f;
            Folding folding = {};
#pragma unroll
            for (int w = 0; w < WARPS; w += PARTS) {
                const RowState of_warp = states[w * ROWS + thread];
                folding.parts[w / PARTS] = exp2_fast(of_warp.maximum - reference);
                one.sum = fused(of_warp.sum, folding.parts[w / PARTS], one.sum);
            }
            if (is_first) row_state = one;
            else fold_rows(row_state, one, folding.keep, folding.add);
            folding.sum = row_state.sum;
            foldings[thread] = folding;
        }
        block_barrier();
        // Places are computed here, and not kept in registers from tile to tile.
        const int self = opaque(thread);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (8 * r >= p.rows) break;
            if (r == 1) {
                lay_down(1);
                block_barrier();
            }
#pragma unroll
            for (int j = 0; j < FOLDED; j++) {
                const int e = self + j * THREADS, row = e / D + 8 * r;
                if (row >= p.rows) break;
                const int d = e % D, place = (e / D) * COLUMNS + d % COLUMNS;
                const Folding folding = foldings[row];
                const uint8* const parts = shared + stage * STAGE_BYTES + d / COLUMNS * (GROUP_BYTES / PARTS);
                float value = 0.0f;
#pragma unroll
                for (int w = 0; w < GROUPS; w++) {
                    const float* const scratch = reinterpret_cast<const float*>(parts + w * GROUP_BYTES);
                    value = fused(scratch[place], folding.parts[w], value);
                }
                folded[r][j] = is_first ? value : fold(folded[r][j], value, folding.keep, folding.add);
            }
            block_barrier();
        }
        begin_chunk();
        const bool run_ends = pair_ends || now.done;
        enters = run_ends;
        if (!run_ends && segment == 0) continue;

        if (pair_ends && segment == 0) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
#pragma unroll
                for (int j = 0; j < FOLDED; j++) {
                    const int e = self + j * THREADS, row = e / D + 8 * r;
                    if (row >= p.rows) break;
                    write(item, pair_head, e + 8 * r * D, finish(folded[r][j], foldings[row].sum));
                }
            }
            continue;
        }

        // The pair has other owners: this state goes to memory.
        const int64 first_owner = owner(total, base, gridDim.x);
        float* const stored = p.states + first_owner * MAX_CHUNKS * p.rows * (D + 2);
        float* const place = stored + int64(segment == 0 ? 0 : chunk) * p.rows * (D + 2);
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int j = 0; j < FOLDED; j++) {
                const int e = self + j * THREADS, row = e / D + 8 * r;
                if (row >= p.rows) break;
                place[row * (D + 2) + e % D] = folded[r][j];
            }
        }
        if (thread < p.rows) {
            place[thread * (D + 2) + D] = row_state.maximum;
            place[thread * (D + 2) + D + 1] = row_state.sum;
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
        for (int e = thread; e < p.rows * D; e += THREADS) {
            const int row = e / D, d = e % D;
            const float* const source = stored + row * (D + 2);
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
            write(item, pair_head, e, finish(value, result.sum));
        }
    }
    copy_async_wait<0>();
}
