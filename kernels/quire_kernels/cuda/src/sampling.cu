// One token per row of logits, one block per row, without a sort and with few passes over the row.
//
// How far a token is behind the best one, (peak - x) / temperature, is its distance, and the bits of that
// number its key: keys order tokens, the best first. A threshold, of the k best or of the mass top_p, is the
// key at which their number or mass is reached, found by histograms over ever smaller intervals of keys. Once
// the undecided tokens are few they are listed in shared memory, and the row is not read for them again.
// Masses are integers, 2 ** 40 times exp(-distance): sums do not depend on their order, so the draw is a pure
// function of the row, and the same with any number of threads. It is the inverse of the cumulative
// distribution at a number of Philox4x32-10 (Salmon et al., SC 2011), as in reference/sampling.py.
//
// The row is read once for its peak, and the largest numbers of its pieces are kept: the n-th
// of these is not larger than the n-th of the row, so the best n are among the tokens that are not below it.
// - With a top_k up to LIST / 2 it is read once more, for the list of these: all else is done on it.
// - With top_p alone as well, for the best LIST / 2 and the mass of all, if the pieces say that they will do.
// - Without both, for the masses of chunks, one of which is searched for the token.
// - Else, or if there were too many to list, or too few, for a histogram of the row, and then for the masses
//   of chunks and the undecided tokens at once; two more times whenever those are too many to list.
//
// Penalties, biases and bans are made in place before that, by the row's block too. Their products are not
// contracted with the differences behind them: the edited logits are the reference's, bit for bit.
#include <device.cuh>
#include <reductions.cuh>

namespace {

constexpr int THREADS = 1024;  // at most; a block has this many or half
constexpr int EACH = 16;  // numbers that a thread reads at a time
constexpr int BATCH = 32 * EACH;  // and its warp: they lie behind each other
constexpr int BINS = 2048;
constexpr int CHUNKS = 1024;  // at most: a row's parts, whose masses are summed
constexpr int LIST = 2048;
constexpr int PIECES = 4096;  // of a row, whose largest numbers are kept
constexpr float MIN_TEMPERATURE = 1e-6f;
constexpr float LARGEST = 3.402823466e38f;
// What is farther than this has no mass: exp(-28) * 2 ** 40 is below 1.
constexpr float FARTHEST = 28.0f;
constexpr float BINS_PER_UNIT = 64.0f;
constexpr int LINEAR = -1;
constexpr uint32 NONE = 0xffffffff;
static_assert(FARTHEST * BINS_PER_UNIT < BINS, "a bin for every distance with a mass");
static_assert(PIECES == 2 * LIST, "they share memory");

struct ArgmaxParams {
    const float* x;
    int64* out;  // [rows]
    int64 stride;
    int size;
};

// See LogitEdits in quire_kernels/sampling.py.
struct Edits {
    const int* starts;  // [3, rows + 1]; null: no row has edits
    const float* factors;  // [3, rows]
    const int* penalty_ids;
    const float* output_counts;
    const int* bias_ids;
    const float* biases;
    const int* ban_ids;
    const int64* newest;  // [rows], null: no row has one
    float* saved;  // [number of bans]: logits before the bans
};

struct SampleParams {
    float* logits;
    const float* temperature;  // each [rows]
    const int* top_k;
    const float* top_p;
    const float* min_p;
    const int64* seeds;
    const int64* positions;
    int64* out;
    Edits edits;
    int64 stride;
    int size;
};

// Ordered as the floats are; a NaN of either sign is the largest.
DEVICE uint32 ordered(float x) {
    const uint32 bits = as_bits(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0xffffffff;
    // Both zeros are one number.
    if ((bits & 0x7fffffff) == 0) return 0x80000000;
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

DEVICE float number_of(uint32 key) { return as_float(key & 0x80000000 ? key ^ 0x80000000 : ~key); }

// Numbers of 64 bits, one per bin, in halves: these have additions in shared memory, whole ones have none.
template <int N>
struct Bins {
    uint32 low[N], high[N];

    DEVICE void clear() {
        for (int b = threadIdx.x; b < N; b += blockDim.x) low[b] = high[b] = 0;
    }
    DEVICE uint64 at(int b) const { return uint64(high[b]) << 32 | low[b]; }
    DEVICE void add(int b, uint64 weight) {
        const uint32 part = uint32(weight);
        uint32 rest = uint32(weight >> 32);
        if (part) rest += atomic_add_shared(&low[b], part) + part < part;
        if (rest) atomic_add_shared(&high[b], rest);
    }
};

struct Shared {
    // The largest number of each piece, as bits; later the list: keys, and from LIST on places.
    uint32 words[PIECES];
    uint32 listed;  // how many tokens the list would have to hold
    Bins<BINS> bins;  // zero but between additions and `find_bin`
    Bins<CHUNKS> chunks;
    uint64 scratch[32];
    uint64 remaining;
    int found;
    uint64 wanted;  // of the mass of all tokens, by top_p
    // What the row asks for; here, as registers are few.
    uint32 top_k;  // 0: all
    float top_p;
    double uniform;
    uint32 cut;  // the largest key that min_p keeps
};

// A row as vectors see it: place 0 lies on 16 bytes, the row is from `begin` to before `end`.
struct Places {
    const float* x;
    int begin, end;

    DEVICE Places(const float* row, int size) {
        begin = int(reinterpret_cast<uint64>(row) >> 2 & 3);
        x = row - begin;
        end = begin + size;
    }
    // What is outside is -infinity: never the best, without mass.
    DEVICE float at(int place) const { return place >= begin && place < end ? x[place] : -INFINITY; }
    // Of the j-th number of this thread in the batch that begins at `first`.
    static DEVICE int place(int first, int j) {
        return first + (j >> 2) * 128 + (threadIdx.x & 31) * 4 + (j & 3);
    }

    // Chunks are of 2 ** this places, whole batches.
    DEVICE int chunk_shift() const {
        int shift = 9;
        while (end > CHUNKS << shift) shift++;
        return shift;
    }

    // Calls visit(first, x) for all batches of the warp, with the thread's own numbers.
    template <typename Visit>
    DEVICE void for_each(Visit visit) const {
        for (int first = int(threadIdx.x >> 5) * BATCH; first < end; first += int(blockDim.x) * EACH) {
            float own[EACH];
            if (first >= begin && first + BATCH <= end) {
#pragma unroll
                for (int j = 0; j < EACH; j += 4) {
                    const Vector16 v = load_vector(x + place(first, j));
                    own[j] = as_float(v.x), own[j + 1] = as_float(v.y);
                    own[j + 2] = as_float(v.z), own[j + 3] = as_float(v.w);
                }
            } else {
#pragma unroll
                for (int j = 0; j < EACH; j++) own[j] = at(place(first, j));
            }
            visit(first, own);
        }
    }
};

// The largest number, as `peak`, and the first one of these: its index, or -1 if the row holds a NaN (then
// `peak` is NaN) or the largest is not finite. `pieces`, unless null, gets the largest of each piece.
DEVICE int best_of(const Places& row, float& peak, uint32* pieces, uint64* scratch) {
    float best = -INFINITY;
    int batch = 0;
    bool has_nan = false;
    if (pieces) {
        for (int g = threadIdx.x; g < PIECES; g += blockDim.x) pieces[g] = as_bits(-INFINITY);
    }
    int piece = threadIdx.x;
    row.for_each([&](int first, const float (&x)[EACH]) {
        float largest = -INFINITY;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            largest = x[j] > largest ? x[j] : largest;
            has_nan = has_nan || x[j] != x[j];
        }
        if (largest > best) {
            best = largest;
            batch = first;
        }
        if (pieces) {
            // A thread's own.
            if (largest > as_float(pieces[piece])) pieces[piece] = as_bits(largest);
            piece = (piece + blockDim.x) % PIECES;
        }
    });
    const uint64 highest_key = has_nan ? 0xffffffff : ordered(best);
    const uint32 key = uint32(block_reduce<Max>(highest_key, uint64(0), scratch));
    block_barrier();
    // Not read from the row: a thread that is ahead may change it already.
    peak = number_of(key);
    const uint32 lowest = 0x007fffff, highest = 0xff800000;  // of the infinities
    if (key <= lowest || key >= highest) return -1;
    uint64 before = 0;
    if (best == peak) {
        int j = 0;
        while (row.at(Places::place(batch, j)) != peak) j++;
        before = ~uint32(Places::place(batch, j));
    }
    before = block_reduce<Max>(before, uint64(0), scratch);
    block_barrier();
    return int(~uint32(before)) - row.begin;
}

struct Range {
    int begin, end;
};

// The entries of the block's row in a list: 0 penalties, 1 biases, 2 bans.
DEVICE Range range_of(const Edits& edits, int list) {
    const int* starts = edits.starts + list * (gridDim.x + 1) + blockIdx.x;
    return {starts[0], starts[1]};
}

DEVICE float penalised(float x, float count, float repetition, float presence, float frequency) {
    if (as_bits(x) << 1 == 0xff000000) return x;  // infinite
    float y = x < 0.0f ? multiply(x, repetition) : x / repetition;
    y = y - multiply(frequency, count) - (count > 0.0f ? presence : 0.0f);
    return y > LARGEST ? LARGEST : y;
}

// Edits the block's row and returns its bans. Lists may name a token that another one names, so that a
// barrier stands behind each.
DEVICE Range edit(float* row, const Edits& edits, uint64* scratch) {
    const int which = blockIdx.x, rows = gridDim.x;
    const Range penalties = range_of(edits, 0), biases = range_of(edits, 1), bans = range_of(edits, 2);
    const int64 newest = edits.newest ? edits.newest[which] : -1;
    if (penalties.begin < penalties.end || newest >= 0) {
        const float repetition = edits.factors[which];
        const float presence = edits.factors[rows + which], frequency = edits.factors[2 * rows + which];
        bool is_listed = false;
        for (int e = penalties.begin + threadIdx.x; e < penalties.end; e += int(blockDim.x)) {
            const bool is_newest = edits.penalty_ids[e] == newest;
            is_listed = is_listed || is_newest;
            float& x = row[edits.penalty_ids[e]];
            x = penalised(x, edits.output_counts[e] + is_newest, repetition, presence, frequency);
        }
        if (newest >= 0 && !block_reduce<Max>(uint64(is_listed), uint64(0), scratch) && threadIdx.x == 0) {
            row[newest] = penalised(row[newest], 1.0f, repetition, presence, frequency);
        }
        block_barrier();
    }
    if (biases.begin < biases.end) {
        for (int e = biases.begin + threadIdx.x; e < biases.end; e += int(blockDim.x)) {
            row[edits.bias_ids[e]] += edits.biases[e];
        }
        block_barrier();
    }
    if (bans.begin < bans.end) {
        for (int e = bans.begin + threadIdx.x; e < bans.end; e += int(blockDim.x)) {
            edits.saved[e] = row[edits.ban_ids[e]];
        }
        // All are saved before any is lost: a token may be banned twice.
        block_barrier();
        for (int e = bans.begin + threadIdx.x; e < bans.end; e += int(blockDim.x)) {
            row[edits.ban_ids[e]] = -INFINITY;
        }
        block_barrier();
    }
    return bans;
}

DEVICE void lift(float* row, const Edits& edits, const Range& bans) {
    for (int e = bans.begin + threadIdx.x; e < bans.end; e += int(blockDim.x)) {
        row[edits.ban_ids[e]] = edits.saved[e];
    }
    block_barrier();
}

DEVICE uint64 philox(uint64 key, uint64 counter) {
    uint32 k0 = uint32(key), k1 = uint32(key >> 32);
    uint32 c0 = uint32(counter), c1 = uint32(counter >> 32), c2 = 0, c3 = 0;
    for (int round = 0; round < 10; round++) {
        const uint32 high0 = multiply_high(c0, 0xD2511F53u), low0 = c0 * 0xD2511F53u;
        const uint32 high1 = multiply_high(c2, 0xCD9E8D57u), low1 = c2 * 0xCD9E8D57u;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return uint64(c0) << 21 | c1 >> 11;
}

DEVICE uint64 mass_of(uint32 key) { return uint64(expf(-as_float(key)) * 1099511627776.0f); }

struct Row : Places {
    float peak, temperature, inverse;

    DEVICE Row(const float* row, int size) : Places(row, size) {}
    DEVICE uint32 key_of(float x) const { return as_bits((peak - x) / temperature); }

    // Calls visit(x, key) for the thread's numbers of a batch. Without a mass, their keys may be anything.
    template <typename Visit>
    DEVICE void for_keys(int first, const float (&own)[EACH], Visit visit) const {
        // A correctly rounded inverse, a quotient within one unit in the last place and the exact remainder
        // give the correctly rounded quotient (Markstein), if nothing underflows: two numbers near the peak
        // are no closer than 2 ** -25 of it.
        const float size = peak < 0.0f ? -peak : peak;
        if (size > 0x1p-60f && temperature < 0x1p20f) {
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                const float distance = peak - own[j];
                float quotient = multiply(distance, inverse);
                for (int i = 0; i < 2; i++) {
                    quotient = fused(fused(-quotient, temperature, distance), inverse, quotient);
                }
                visit(own[j], as_bits(quotient));
            }
        } else {
#pragma unroll 1
            for (int j = 0; j < EACH; j++) {
                const float x = at(place(first, j));
                visit(x, key_of(x));
            }
        }
    }

    // The least number whose key is at most `limit`: what is kept can be told without a division. Rounding
    // may give numbers that differ one key; it never changes their order.
    DEVICE float least(uint32 limit) const {
        uint32 low = 0x007fffff, high = ordered(peak);
        while (low < high) {
            const uint32 step = (high - low) / 32 + 1;
            const uint32 tried = low + (threadIdx.x & 31) * step;
            const bool is_kept = tried >= high || key_of(number_of(tried)) <= limit;
            const uint32 dropped = 32 - population(ballot(is_kept));
            if (dropped < 32 && low + dropped * step < high) high = low + dropped * step;
            if (dropped > 0) low += (dropped - 1) * step + 1;
        }
        return number_of(high);
    }
};

// Keys, or places, from `low` to `high`, divided into bins.
struct Interval {
    uint32 low, high;
    int shift;  // of what is divided evenly; LINEAR: distances are

    DEVICE void divide() {
        shift = 0;
        while ((high - low) >> shift >= BINS) shift++;
    }
    DEVICE int bin_of(uint32 key) const {
        // Exact, as BINS_PER_UNIT is a power of two: a bin is an interval of keys.
        return shift == LINEAR ? int(as_float(key) * BINS_PER_UNIT) : int((key - low) >> shift);
    }
    DEVICE void enter(int bin) {
        const bool is_linear = shift == LINEAR;
        const uint32 begin = is_linear ? as_bits(bin / BINS_PER_UNIT) : low + (uint32(bin) << shift);
        const uint32 end = is_linear ? as_bits((bin + 1) / BINS_PER_UNIT) : begin + (1u << shift);
        low = begin;
        high = end - 1 < high ? end - 1 : high;
    }
};

// How much is wanted of the weights, the least key or place first: a number; while that is 0, the share top_p
// of their sum, rounded up, or with `draws` the first that exceeds the drawn share.
struct Amount {
    uint64 number;
    bool draws;

    DEVICE void settle(uint64 total, const Shared& s) {
        if (number) return;
        const double wanted = (draws ? s.uniform : double(s.top_p)) * double(total);
        number = uint64(wanted);
        if (draws) {
            number = (number < total ? number : total - 1) + 1;
        } else if (number == 0 || double(number) < wanted) {
            number++;
        }
    }
};

DEVICE uint64 prefix_sum(uint64 sum) {
    for (int delta = 1; delta < 32; delta *= 2) {
        const uint64 other = shuffle_up(sum, delta);
        if ((threadIdx.x & 31) >= delta) sum += other;
    }
    return sum;
}

// The bin in which the amount is reached, -1 if none; `amount` becomes what is wanted of that bin. All bins
// are zero afterwards.
template <int N>
DEVICE int find_bin(Bins<N>& bins, Amount& amount, Shared& s) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int each = N / blockDim.x, first = threadIdx.x * each;
    block_barrier();
    uint64 own = 0;
    for (int b = first; b < first + each; b++) own += bins.at(b);
    const uint64 up_to = prefix_sum(own);
    if (lane == 31) s.scratch[warp] = up_to;
    if (threadIdx.x == 0) s.found = -1;
    block_barrier();
    const uint64 up_to_warp = prefix_sum(lane < warps ? s.scratch[lane] : 0);
    amount.settle(shuffle(up_to_warp, 31), s);
    uint64 before = up_to - own + (warp ? shuffle(up_to_warp, warp - 1) : 0);
    const bool is_here = before < amount.number && before + own >= amount.number;
#pragma unroll 1
    for (int b = first; b < first + each; b++) {
        const uint64 weight = bins.at(b);
        if (is_here && before < amount.number && before + weight >= amount.number) {
            s.found = b;
            s.remaining = amount.number - before;
        }
        before += weight;
        bins.low[b] = bins.high[b] = 0;
    }
    block_barrier();
    amount.number = s.remaining;
    return s.found;
}

struct Item {
    uint32 key;  // or place
    uint64 weight;
};

// The key or place in the interval at which the amount is reached; NONE if it is not. item(e) is one of the
// `count` that are weighed.
template <typename GetItem>
DEVICE uint32 search(Interval in, Amount amount, Shared& s, uint32 count, GetItem item) {
    for (;;) {
        for (uint32 e = threadIdx.x; e < count; e += blockDim.x) {
            const Item one = item(e);
            if (one.key >= in.low && one.key <= in.high) s.bins.add(in.bin_of(one.key), one.weight);
        }
        const int bin = find_bin(s.bins, amount, s);
        if (bin < 0) return NONE;
        in.enter(bin);
        if (in.low == in.high) return in.low;
        in.divide();
    }
}

// Adds the weights of the row's tokens in the interval to the bins.
DEVICE void weigh(const Row& row, const Interval& in, bool by_mass, Shared& s) {
    const float least = row.least(in.high), above = in.low ? row.least(in.low - 1) : INFINITY;
    // Weights of one bin are added together as long as they follow each other: rows may be all equal.
    int bin = 0;
    uint64 sum = 0;
    row.for_each([&](int first, const float (&own)[EACH]) {
        row.for_keys(first, own, [&](float x, uint32 key) {
            if (x < least || x >= above) return;
            const int now = in.bin_of(key);
            if (now != bin) {
                s.bins.add(bin, sum);
                bin = now;
                sum = 0;
            }
            sum += by_mass ? mass_of(key) : 1;
        });
    });
    s.bins.add(bin, sum);
}

// Lists the tokens whose keys are from `low` to `high`. Chunks get the masses of better ones, or of all.
DEVICE void list(const Row& row, uint32 low, uint32 high, bool sums_all, Shared& s) {
    const float least = row.least(high);
    const float above = low == 0 ? INFINITY : low > high ? least : row.least(low - 1);
    const float summed = sums_all ? row.least(as_bits(FARTHEST)) : above;
    s.chunks.clear();
    if (threadIdx.x == 0) s.listed = 0;
    block_barrier();
    row.for_each([&](int first, const float (&own)[EACH]) {
        bool is_any = false;
#pragma unroll
        for (int j = 0; j < EACH; j++) is_any = is_any || own[j] >= least || own[j] >= summed;
        if (!ballot(is_any)) return;
        uint32 undecided = 0;
#pragma unroll
        for (int j = 0; j < EACH; j++) undecided |= uint32(own[j] >= least && own[j] < above) << j;
        if (undecided) {
            uint32 place = atomic_add_shared(&s.listed, population(undecided));
#pragma unroll 1
            for (int j = 0; j < EACH; j++) {
                if (!(undecided >> j & 1)) continue;
                if (place < LIST) {
                    s.words[place] = row.key_of(row.at(Places::place(first, j)));
                    s.words[LIST + place] = Places::place(first, j);
                }
                place++;
            }
        }
        if (summed == INFINITY) return;
        uint64 mass = 0;
        row.for_keys(first, own, [&](float x, uint32 key) { mass += x >= summed ? mass_of(key) : 0; });
        mass = warp_reduce<Sum>(mass);
        if ((threadIdx.x & 31) == 0) s.chunks.add(first >> row.chunk_shift(), mass);
    });
    block_barrier();
}

// Draws a token of a row with a finite peak: its place.
DEVICE uint32 draw(const Row& row, const SampleParams& p, Shared& s) {
    // The largest key that is kept by top_k and top_p, as far as they are done.
    uint32 limit = as_bits(FARTHEST);
    if (threadIdx.x == 0) {
        const int which = blockIdx.x, top_k = p.top_k[which];
        const float min_p = p.min_p[which];
        s.top_k = top_k > 0 && top_k < p.size ? top_k : 0;
        s.top_p = p.top_p[which];
        s.uniform = double(philox(uint64(p.seeds[which]), uint64(p.positions[which]))) * 0x1p-53;
        // A difference, as a logarithm of 1 must not become -0.
        s.cut = min_p > 0.0f ? as_bits(Max::apply(0.0f, 0.0f - logf(min_p))) : limit;
    }
    s.bins.clear();
    block_barrier();

    // 0 is top_k, 1 top_p, 2 the masses, if neither has summed them.
    int stage = s.top_k ? 0 : s.top_p < 1.0f ? 1 : 2;
    // Whether the list holds all that is kept. If not, it holds what the last stage left undecided, and
    // chunks the masses of the rest.
    bool is_listed = false, is_summed = false;
    // A guess: so many tokens are enough. For top_p it may be wrong.
    const uint32 guess = s.top_k ? s.top_k : LIST / 2;
    bool is_guess = false;
    if (stage < 2 && guess <= LIST / 2) {
        uint32 bound = limit;
        bool is_likely = true;
        // For top_p, once more by masses: whether the pieces' largest would do says whether it pays to try.
#pragma unroll 1
        for (int by_mass = 0; by_mass <= stage; by_mass++) {
            const Amount amount = {by_mass ? 0 : guess, false};
            const uint32 found = search({0, limit, LINEAR}, amount, s, PIECES, [&](uint32 e) {
                const uint32 key = row.key_of(as_float(s.words[e]));
                return Item{key, by_mass ? mass_of(key) : 1};
            });
            if (by_mass) is_likely = found <= bound;
            else bound = found < bound ? found : bound;
        }
        if (is_likely) {
            list(row, 0, bound, stage == 1, s);
            is_listed = s.listed <= LIST;
            if (is_listed && stage == 1) {
                uint64 mass = 0;
                for (int c = threadIdx.x; c < CHUNKS; c += blockDim.x) mass += s.chunks.at(c);
                Amount amount = {0, false};
                amount.settle(block_reduce<Sum>(mass, uint64(0), s.scratch), s);
                if (threadIdx.x == 0) s.wanted = amount.number;
                block_barrier();
                is_guess = true;
            }
        }
    }
#pragma unroll 1
    for (; stage < 3; stage++) {
        const bool by_mass = stage == 1;
        if (by_mass ? s.top_p >= 1.0f : stage == 2 && (is_listed || is_summed)) continue;
        Amount amount = {is_guess ? s.wanted : by_mass ? 0 : s.top_k, false};
        // Of the keys of which one is the answer; the last stage has nothing to ask.
        Interval in = {stage == 2 ? limit : 0, limit, LINEAR};
        while (!is_listed) {
            if (in.low < in.high) {
                weigh(row, in, by_mass, s);
                const int bin = find_bin(s.bins, amount, s);
                if (bin < 0) in.low = in.high;
                if (bin >= 0) in.enter(bin);
                in.divide();
            }
            const bool is_last = stage > 0 || s.top_p >= 1.0f, is_decided = in.low == in.high;
            list(row, in.low + is_decided, is_last && s.cut < in.high ? s.cut : in.high, false, s);
            is_summed = true;
            if (is_decided || s.listed <= LIST) break;
        }
        uint32 found = in.high;
        if (in.low < in.high) {
            found = search(in, amount, s, s.listed, [&](uint32 e) {
                return Item{s.words[e], by_mass ? mass_of(s.words[e]) : 1};
            });
        }
        limit = found < in.high ? found : in.high;
        if (is_guess && found == NONE) {
            is_listed = false;
            stage--;
        }
        is_guess = false;
    }

    limit = s.cut < limit ? s.cut : limit;
    Amount amount = {0, true};
    Interval in = {0, uint32(row.end - 1), 0};
    if (!is_listed) {
        const int chunk_shift = row.chunk_shift();
        for (uint32 e = threadIdx.x; e < s.listed; e += blockDim.x) {
            if (s.words[e] <= limit) s.chunks.add(s.words[LIST + e] >> chunk_shift, mass_of(s.words[e]));
        }
        in.low = uint32(find_bin(s.chunks, amount, s)) << chunk_shift;
        in.high = in.low + (1u << chunk_shift) - 1;
    }
    in.divide();
    const uint32 count = is_listed ? s.listed : in.high - in.low + 1;
    return search(in, amount, s, count, [&](uint32 e) {
        const uint32 place = is_listed ? s.words[LIST + e] : in.low + e;
        const uint32 key = is_listed ? s.words[e] : row.key_of(row.at(place));
        return Item{place, key <= limit ? mass_of(key) : 0};
    });
}

}  // namespace

KERNEL(argmax, ArgmaxParams, THREADS, 1) {
    __shared__ uint64 scratch[32];
    float peak;
    const int best = best_of(Places(p.x + blockIdx.x * p.stride, p.size), peak, nullptr, scratch);
    if (threadIdx.x == 0) p.out[blockIdx.x] = best;
}

KERNEL(sample, SampleParams, THREADS, 1) {
    __shared__ Shared s;
    const int which = blockIdx.x;
    float* const logits = p.logits + which * p.stride;
    Range bans = {0, 0};
    if (p.edits.starts) bans = edit(logits, p.edits, s.scratch);
    Row row(logits, p.size);
    int best = best_of(row, row.peak, s.words, s.scratch);
    if (bans.begin < bans.end && row.peak == -INFINITY) {
        lift(logits, p.edits, bans);
        best = best_of(row, row.peak, s.words, s.scratch);
    }
    row.temperature = Max::apply(p.temperature[which], MIN_TEMPERATURE);
    row.inverse = 1.0f / row.temperature;
    if (best >= 0 && p.temperature[which] > 0.0f) best = int(draw(row, p, s)) - row.begin;
    if (threadIdx.x == 0) p.out[which] = best;
}
