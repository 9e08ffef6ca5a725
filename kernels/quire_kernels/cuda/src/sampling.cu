// One token per row of logits, one block per row, without a sort.
//
// A threshold, of the k largest scores or of the mass top_p, is found digit by digit of the scores' integer
// form, from the highest: a histogram of counts or masses says which digit it has (radix selection). Masses
// are integers, 2 ** 40 times exp(score): sums do not depend on their order, so the draw is a pure function
// of the row. It is the inverse of the cumulative distribution at a number of Philox4x32-10 (Salmon et al.,
// SC 2011), as in reference/sampling.py.
//
// Penalties, biases and bans are made in place before that, by the row's block too. Their products are not
// contracted with the differences behind them: the edited logits are the reference's, bit for bit.
#include <device.cuh>
#include <reductions.cuh>

namespace {

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / 32;
constexpr int BINS = 2048;
constexpr float MIN_TEMPERATURE = 1e-6f;
constexpr float LARGEST = 3.402823466e38f;

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

// The largest number, as `peak`, and the first one of these: its index, or -1 if the row holds a NaN (then
// `peak` is NaN) or the largest is not finite.
DEVICE int best_of(const float* row, int size, float& peak, uint64* scratch) {
    uint64 best = 0;
    for (int i = threadIdx.x; i < size; i += blockDim.x) {
        best = Max::apply(best, uint64(ordered(row[i])) << 32 | uint32(~i));
    }
    best = block_reduce<Max>(best, uint64(0), scratch);
    block_barrier();
    const uint32 key = uint32(best >> 32);
    const int index = int(~uint32(best));
    const uint32 lowest = 0x007fffff, highest = 0xff800000;  // of the infinities
    // Not read from the row: a thread that is ahead may change it already.
    peak = number_of(key);
    return key <= lowest || key >= highest ? -1 : index;
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
        for (int e = penalties.begin + threadIdx.x; e < penalties.end; e += THREADS) {
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
        for (int e = biases.begin + threadIdx.x; e < biases.end; e += THREADS) {
            row[edits.bias_ids[e]] += edits.biases[e];
        }
        block_barrier();
    }
    if (bans.begin < bans.end) {
        for (int e = bans.begin + threadIdx.x; e < bans.end; e += THREADS) {
            edits.saved[e] = row[edits.ban_ids[e]];
        }
        // All are saved before any is lost: a token may be banned twice.
        block_barrier();
        for (int e = bans.begin + threadIdx.x; e < bans.end; e += THREADS) {
            row[edits.ban_ids[e]] = -INFINITY;
        }
        block_barrier();
    }
    return bans;
}

DEVICE void lift(float* row, const Edits& edits, const Range& bans) {
    for (int e = bans.begin + threadIdx.x; e < bans.end; e += THREADS) {
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

struct Row {
    const float* logits;
    float peak, temperature;
    uint32 threshold;  // the smallest key that is kept

    DEVICE float score(int i) const { return (logits[i] - peak) / temperature; }
    // exp(score) in units of 2 ** -40; 0 of what is not kept.
    DEVICE uint64 mass(float score) const {
        return ordered(score) >= threshold ? uint64(expf(score) * 1099511627776.0f) : 0;
    }
};

// The largest key such that the keys from it on weigh at least `wanted`; ones or masses are weighed.
template <bool MASSES>
DEVICE uint32 find_threshold(const Row& row, int size, uint64 wanted, uint64* bins, uint64* scratch) {
    const int shifts[3] = {21, 10, 0}, widths[3] = {11, 11, 10};
    __shared__ uint32 chosen;
    __shared__ uint64 remaining;
    uint32 prefix = 0;
#pragma unroll
    for (int digit = 0; digit < 3; digit++) {
        const int shift = shifts[digit], width = widths[digit];
        for (int b = threadIdx.x; b < BINS; b += THREADS) bins[b] = 0;
        block_barrier();
        for (int i = threadIdx.x; i < size; i += THREADS) {
            const float score = row.score(i);
            const uint32 key = ordered(score);
            const bool matches = digit == 0 || key >> (shift + width) == prefix;
            const uint64 weight = matches ? (MASSES ? row.mass(score) : 1) : 0;
            if (weight) atomic_add_shared(&bins[key >> shift & ((1u << width) - 1)], weight);
        }
        block_barrier();
        // Thread t holds the bins 2t and 2t + 1, counted from the highest.
        const uint64 first = bins[BINS - 1 - 2 * threadIdx.x], second = bins[BINS - 2 - 2 * threadIdx.x];
        uint64 sum = first + second;
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        for (int delta = 1; delta < 32; delta *= 2) {
            const uint64 other = shuffle_up(sum, delta);
            if (lane >= delta) sum += other;
        }
        if (lane == 31) scratch[warp] = sum;
        block_barrier();
        for (int w = 0; w < warp; w++) sum += scratch[w];
        const uint64 before = sum - first - second;
        if (before < wanted && sum >= wanted) {
            const bool in_first = before + first >= wanted;
            chosen = BINS - 1 - 2 * threadIdx.x - (in_first ? 0 : 1);
            remaining = wanted - before - (in_first ? 0 : first);
        }
        block_barrier();
        prefix = prefix << width | chosen;
        wanted = remaining;
        block_barrier();
    }
    return prefix;
}

// The mass of all kept tokens; `parts` gets those of each warp's part of the row.
DEVICE uint64 total_mass(const Row& row, int size, uint64* parts) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int part = (size + WARPS - 1) / WARPS;
    const int end = (warp + 1) * part < size ? (warp + 1) * part : size;
    uint64 mass = 0;
    for (int i = warp * part + lane; i < end; i += 32) mass += row.mass(row.score(i));
    mass = warp_reduce<Sum>(mass);
    block_barrier();
    if (lane == 0) parts[warp] = mass;
    block_barrier();
    uint64 total = 0;
    for (int w = 0; w < WARPS; w++) total += parts[w];
    return total;
}

}  // namespace

KERNEL(argmax, ArgmaxParams, THREADS, 1) {
    __shared__ uint64 scratch[WARPS];
    float peak;
    const int best = best_of(p.x + blockIdx.x * p.stride, p.size, peak, scratch);
    if (threadIdx.x == 0) p.out[blockIdx.x] = best;
}

KERNEL(sample, SampleParams, THREADS, 1) {
    __shared__ uint64 bins[BINS];
    __shared__ uint64 scratch[WARPS];
    const int which = blockIdx.x;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float* const logits = p.logits + which * p.stride;
    Range bans = {0, 0};
    if (p.edits.starts) bans = edit(logits, p.edits, scratch);
    Row row;
    row.logits = logits;
    int best = best_of(logits, p.size, row.peak, scratch);
    if (bans.begin < bans.end && row.peak == -INFINITY) {
        lift(logits, p.edits, bans);
        best = best_of(logits, p.size, row.peak, scratch);
    }
    if (best < 0 || p.temperature[which] <= 0.0f) {
        if (threadIdx.x == 0) p.out[which] = best;
        return;
    }
    row.temperature = Max::apply(p.temperature[which], MIN_TEMPERATURE);
    row.threshold = 0;
    const int top_k = p.top_k[which];
    if (top_k > 0 && top_k < p.size) {
        row.threshold = find_threshold<false>(row, p.size, top_k, bins, scratch);
    }
    const float top_p = p.top_p[which];
    if (top_p < 1.0f) {
        const double share = double(top_p) * double(total_mass(row, p.size, scratch));
        // The smallest integer that is not below the share.
        uint64 wanted = uint64(share);
        if (double(wanted) < share) wanted++;
        block_barrier();
        const uint32 found = find_threshold<true>(row, p.size, wanted > 0 ? wanted : 1, bins, scratch);
        row.threshold = Max::apply(row.threshold, found);
    }
    if (p.min_p[which] > 0.0f) row.threshold = Max::apply(row.threshold, ordered(logf(p.min_p[which])));

    const uint64 total = total_mass(row, p.size, scratch);
    const double uniform = double(philox(uint64(p.seeds[which]), uint64(p.positions[which]))) * 0x1p-53;
    uint64 target = uint64(uniform * double(total));
    target = target < total ? target : total - 1;
    // The warp in whose part the cumulative mass passes the target looks for the token.
    uint64 before = 0;
    for (int w = 0; w < warp; w++) before += scratch[w];
    if (target < before || target - before >= scratch[warp]) return;
    const int part = (p.size + WARPS - 1) / WARPS;
    const int end = (warp + 1) * part < p.size ? (warp + 1) * part : p.size;
    for (int first = warp * part; first < end; first += 32) {
        const int i = first + lane;
        uint64 sum = i < end ? row.mass(row.score(i)) : 0;
        for (int delta = 1; delta < 32; delta *= 2) {
            const uint64 other = shuffle_up(sum, delta);
            if (lane >= delta) sum += other;
        }
        const uint32 passed = ballot(before + sum > target);
        if (passed) {
            if (lane == 0) {
                int offset = 0;
                while (!(passed >> offset & 1)) offset++;
                p.out[which] = first + offset;
            }
            return;
        }
        before += shuffle(sum, 31);
    }
}
