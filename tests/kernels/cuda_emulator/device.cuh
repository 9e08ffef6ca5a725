// The names of kernels/quire_kernels/cuda/include/device.cuh on a CPU (x86-64, g++).
//
// The threads of a block are fibers that run one at a time, warp by warp in an order that a seed decides: a
// warp goes on until all its lanes wait at a barrier, so what needs a barrier and has none sees stale memory.
// Shared memory begins as NaN. Asynchronous copies land when they are waited for and not earlier. Blocks run
// one after the other, in an order that the seed decides too. What this cannot show: races between blocks,
// bank conflicts, alignment of a warp's accesses, and the rounding of fast instructions.
#pragma once

#include <math.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <type_traits>
#include <vector>

typedef unsigned char uint8;
typedef unsigned short uint16;
typedef unsigned int uint32;
typedef unsigned long long uint64;
typedef long long int64;

#define DEVICE inline
#define __shared__ static
#define __restrict__

struct alignas(16) Vector16 {
    uint32 x, y, z, w;
};
struct alignas(8) Vector8 {
    uint32 x, y;
};

namespace emulator {

struct Index {
    int x, y, z;
};

struct Copy {
    void* to;
    const void* from;
    bool valid;
};

struct Fiber {
    void* stack_pointer = nullptr;
    Index index;
    int warp, lane;
    bool is_done = false;
    std::vector<Copy> open;
    std::deque<std::vector<Copy>> groups;
};

struct Warp {
    int arrived = 0;
    unsigned generation = 0;
    int waiting = 0;  // lanes at a block barrier, or finished
    alignas(16) unsigned char in[32][64];
    alignas(16) unsigned char out[32][64];
};

inline Fiber* current;
inline Index block, grid, threads;
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline std::vector<int> warp_order;
inline std::vector<uint8> shared_storage;
inline uint8* shared;
inline int barrier_arrived, barrier_generation, finished;
inline void* scheduler_stack;
inline void (*body)(const void*);
inline const void* parameters;

// Saves the callee-saved registers and the stack, and continues another fiber.
extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.weak emulator_switch
.type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch, .-emulator_switch
)");

[[noreturn]] inline void fail(const char* message) {
    std::fprintf(stderr, "emulated kernel: %s (block %d, thread %d)\n", message, block.x, current->index.x);
    std::abort();
}

inline void yield() {
    Fiber* self = current;
    emulator_switch(&self->stack_pointer, scheduler_stack);
}

inline void entry() {
    body(parameters);
    current->is_done = true;
    warps[current->warp].waiting++;
    finished++;
    // Threads that are left count as arrived at every barrier.
    yield();
    std::abort();
}

constexpr size_t STACK = 64 << 10;

inline void run_block(std::vector<uint8>& stacks) {
    const int count = threads.x;
    fibers.assign(count, Fiber());
    warps.assign((count + 31) / 32, Warp());
    barrier_arrived = barrier_generation = finished = 0;
    for (int i = 0; i < count; i++) {
        Fiber& fiber = fibers[i];
        fiber.index = {i, 0, 0};
        fiber.warp = i / 32;
        fiber.lane = i % 32;
        uintptr_t top = reinterpret_cast<uintptr_t>(stacks.data() + (i + 1) * STACK) & ~uintptr_t(15);
        void** stack = reinterpret_cast<void**>(top) - 8;
        std::memset(stack, 0, 64);
        // Six registers, then the address that `ret` takes; the stack is 8 off 16, as after a call.
        stack[6] = reinterpret_cast<void*>(&entry);
        fiber.stack_pointer = stack;
    }
    while (finished < count) {
        bool progress = false;
        for (int w : warp_order) {
            const int lanes = std::min(32, count - 32 * w);
            for (int idle = 0; warps[w].waiting < lanes && idle < 2 * lanes;) {
                const unsigned generation = warps[w].generation;
                const int waiting = warps[w].waiting, arrived = warps[w].arrived;
                for (int lane = 0; lane < lanes; lane++) {
                    current = &fibers[32 * w + lane];
                    if (!current->is_done) emulator_switch(&scheduler_stack, current->stack_pointer);
                }
                const bool moved = generation != warps[w].generation || waiting != warps[w].waiting ||
                                   arrived != warps[w].arrived;
                idle = moved ? 0 : idle + 1;
                progress |= moved;
            }
        }
        if (barrier_arrived && barrier_arrived + finished == count) {
            barrier_arrived = 0;
            barrier_generation++;
            for (int w = 0; w < int(warps.size()); w++) {
                warps[w].waiting = 0;
                for (int i = 32 * w; i < std::min(count, 32 * w + 32); i++) {
                    warps[w].waiting += fibers[i].is_done;
                }
            }
            progress = true;
        }
        if (!progress && finished < count) fail("deadlock: not all threads reach a barrier or an exchange");
    }
}

inline void run(const int* grid_size, int thread_count, int shared_bytes, unsigned seed,
                void (*kernel)(const void*), const void* argument) {
    grid = {grid_size[0], grid_size[1], grid_size[2]};
    threads = {thread_count, 1, 1};
    body = kernel;
    parameters = argument;
    static std::vector<uint8> stacks;
    if (stacks.size() < STACK * thread_count + 16) stacks.resize(STACK * thread_count + 16);
    std::mt19937 random(seed);
    std::vector<int> order(grid.x * grid.y);
    for (size_t i = 0; i < order.size(); i++) order[i] = int(i);
    warp_order.resize((thread_count + 31) / 32);
    for (size_t i = 0; i < warp_order.size(); i++) warp_order[i] = int(i);
    const auto shuffle = [&](std::vector<int>& values) {
        for (size_t i = values.size(); i > 1; i--) std::swap(values[i - 1], values[random() % i]);
    };
    if (seed) shuffle(order);
    for (int which : order) {
        if (seed) shuffle(warp_order);
        block = {which % grid.x, which / grid.x, 0};
        // One byte more would be outside: the allocation ends where the kernel's memory does.
        shared_storage.assign(shared_bytes + 128, 0xff);
        const uintptr_t begin = reinterpret_cast<uintptr_t>(shared_storage.data());
        shared = reinterpret_cast<uint8*>((begin + 127) & ~uintptr_t(127));
        run_block(stacks);
    }
}

// All lanes of the warp give `in` and get what `compute` made of all of them.
template <typename In, typename Out, typename Compute>
inline Out exchange(const In& in, Compute compute) {
    static_assert(sizeof(In) <= 64 && sizeof(Out) <= 64, "a slot holds 64 bytes");
    Warp& warp = warps[current->warp];
    const int lane = current->lane;
    const int lanes = std::min(32, threads.x - 32 * current->warp);
    std::memcpy(warp.in[lane], &in, sizeof(In));
    const unsigned generation = warp.generation;
    if (++warp.arrived == lanes) {
        In all[32] = {};
        Out results[32] = {};
        for (int i = 0; i < lanes; i++) std::memcpy(&all[i], warp.in[i], sizeof(In));
        compute(all, results);
        for (int i = 0; i < lanes; i++) std::memcpy(warp.out[i], &results[i], sizeof(Out));
        warp.arrived = 0;
        warp.generation++;
    } else {
        while (warp.generation == generation) yield();
    }
    Out out;
    std::memcpy(&out, warp.out[lane], sizeof(Out));
    return out;
}

inline float half_to_float(uint16 bits) {
    _Float16 h;
    std::memcpy(&h, &bits, 2);
    return float(h);
}
inline uint16 float_to_half(float value) {
    const _Float16 h = _Float16(value);
    uint16 bits;
    std::memcpy(&bits, &h, 2);
    return bits;
}

}  // namespace emulator

#define threadIdx (::emulator::current->index)
#define blockIdx (::emulator::block)
#define gridDim (::emulator::grid)
#define blockDim (::emulator::threads)

#define KERNEL(name, Params, threads, blocks)                                                               \
    static void name##_body(const Params& p);                                                               \
    extern "C" void name(const int* grid, int count, int shared, unsigned seed, const Params* p) {          \
        if (count > (threads)) { std::fprintf(stderr, #name ": too many threads\n"); std::abort(); }        \
        ::emulator::run(grid, count, shared, seed,                                                          \
                        [](const void* q) { name##_body(*static_cast<const Params*>(q)); }, p);             \
    }                                                                                                       \
    static void name##_body(const Params& p)

#define DYNAMIC_SHARED(name) uint8* const name = ::emulator::shared

// ---- barriers and exchanges -------------------------------------------------------------------------------

DEVICE void block_barrier() {
    using namespace emulator;
    const int generation = barrier_generation;
    barrier_arrived++;
    warps[current->warp].waiting++;
    while (generation == barrier_generation) yield();
}
DEVICE void warp_barrier() {
    emulator::exchange<int, int>(0, [](int*, int*) {});
}
template <typename T>
DEVICE T shuffle_xor(T value, int mask) {
    return emulator::exchange<T, T>(value, [mask](T* in, T* out) {
        for (int i = 0; i < 32; i++) out[i] = in[i ^ mask];
    });
}
template <typename T>
DEVICE T shuffle(T value, int lane) {
    struct In {
        T value;
        int lane;
    };
    return emulator::exchange<In, T>(In{value, lane}, [](In* in, T* out) {
        for (int i = 0; i < 32; i++) out[i] = in[in[i].lane & 31].value;
    });
}
template <typename T>
DEVICE T shuffle_up(T value, int delta) {
    return emulator::exchange<T, T>(value, [delta](T* in, T* out) {
        for (int i = 0; i < 32; i++) out[i] = in[i >= delta ? i - delta : i];
    });
}
DEVICE uint32 ballot(bool value) {
    return emulator::exchange<int, uint32>(value, [](int* in, uint32* out) {
        uint32 bits = 0;
        for (int i = 0; i < 32; i++) bits |= uint32(in[i] != 0) << i;
        for (int i = 0; i < 32; i++) out[i] = bits;
    });
}

// ---- memory -----------------------------------------------------------------------------------------------

DEVICE void check_alignment(const void* pointer, int size) {
    if (reinterpret_cast<uintptr_t>(pointer) % size) emulator::fail("misaligned access");
}
DEVICE void copy_async_16(void* shared, const void* global, bool valid) {
    check_alignment(shared, 16);
    check_alignment(global, 16);
    emulator::current->open.push_back({shared, global, valid});
}
DEVICE void copy_async_commit() {
    auto& self = *emulator::current;
    self.groups.push_back(std::move(self.open));
    self.open.clear();
}
template <int N>
DEVICE void copy_async_wait() {
    auto& groups = emulator::current->groups;
    while (groups.size() > N) {
        for (const auto& copy : groups.front()) {
            if (copy.valid) std::memcpy(copy.to, copy.from, 16);
            else std::memset(copy.to, 0, 16);
        }
        groups.pop_front();
    }
}
DEVICE Vector16 load_vector(const void* global) {
    check_alignment(global, 16);
    Vector16 v;
    std::memcpy(&v, global, 16);
    return v;
}
DEVICE Vector16 load_stream(const void* global) { return load_vector(global); }
DEVICE float load_shared_by_blocks(const float* global) { return *global; }
DEVICE void memory_fence() {}
DEVICE int atomic_add(int* global, int value) {
    const int old = *global;
    *global += value;
    return old;
}
DEVICE uint32 atomic_add_shared(uint32* shared, uint32 value) {
    const uint32 old = *shared;
    *shared += value;
    return old;
}

DEVICE Vector16 load_again(const void* shared) { return *static_cast<const Vector16*>(shared); }

// ---- tensor cores -----------------------------------------------------------------------------------------

DEVICE float bits_to_float(uint32 bits) {
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

namespace emulator {

struct MmaIn {
    uint32 a[4], b[2];
    float d[4];
};
struct MmaOut {
    float d[4];
};

// Fragments as the PTX manual draws them for m16n8k16.
template <typename ToFloat>
inline void mma(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, ToFloat to_float) {
    MmaIn in = {{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
    const MmaOut out = exchange<MmaIn, MmaOut>(in, [&](MmaIn* all, MmaOut* results) {
        float left[16][16], right[16][8];
        for (int lane = 0; lane < 32; lane++) {
            const int g = lane / 4, c = lane % 4;
            for (int half = 0; half < 2; half++) {
                for (int r = 0; r < 4; r++)
                    left[g + 8 * (r & 1)][2 * c + half + 8 * (r >> 1)] =
                        to_float(uint16(all[lane].a[r] >> (16 * half)));
                for (int r = 0; r < 2; r++)
                    right[2 * c + half + 8 * r][g] = to_float(uint16(all[lane].b[r] >> (16 * half)));
            }
        }
        for (int lane = 0; lane < 32; lane++) {
            for (int i = 0; i < 4; i++) {
                const int row = lane / 4 + 8 * (i >> 1), column = 2 * (lane % 4) + (i & 1);
                float sum = all[lane].d[i];
                for (int k = 0; k < 16; k++) sum += left[row][k] * right[k][column];
                results[lane].d[i] = sum;
            }
        }
    });
    for (int i = 0; i < 4; i++) d[i] = out.d[i];
}

}  // namespace emulator

DEVICE void mma_bfloat16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    emulator::mma(d, a, b0, b1, [](uint16 bits) { return bits_to_float(uint32(bits) << 16); });
}
DEVICE void mma_float16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    emulator::mma(d, a, b0, b1, emulator::half_to_float);
}
DEVICE void load_matrices_transposed(uint32 (&r)[4], const void* row) {
    struct Out {
        uint32 r[4];
    };
    const Out out = emulator::exchange<const void*, Out>(row, [](const void** rows, Out* results) {
        for (int m = 0; m < 4; m++) {
            uint16 matrix[8][8];
            for (int i = 0; i < 8; i++) {
                check_alignment(rows[8 * m + i], 16);
                std::memcpy(matrix[i], rows[8 * m + i], 16);
            }
            for (int lane = 0; lane < 32; lane++) {
                const int g = lane / 4, c = lane % 4;
                results[lane].r[m] = matrix[2 * c][g] | uint32(matrix[2 * c + 1][g]) << 16;
            }
        }
    });
    for (int m = 0; m < 4; m++) r[m] = out.r[m];
}

// ---- arithmetic -------------------------------------------------------------------------------------------

DEVICE int opaque(int x) { return x; }

DEVICE float as_float(uint32 bits) { return bits_to_float(bits); }
DEVICE uint32 as_bits(float value) {
    uint32 bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
DEVICE float exp2_fast(float x) { return std::exp2(x); }
DEVICE float multiply(float a, float b) { return a * b; }
DEVICE float fused(float a, float b, float c) { return std::fma(a, b, c); }
DEVICE uint16 round_bfloat16(float value) {
    const uint32 bits = as_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return uint16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
DEVICE uint32 pack_bfloat16(float low, float high) {
    return round_bfloat16(low) | uint32(round_bfloat16(high)) << 16;
}
DEVICE uint32 pack_float16(float low, float high) {
    return emulator::float_to_half(low) | uint32(emulator::float_to_half(high)) << 16;
}
DEVICE float float16_to_float(uint16 bits) { return emulator::half_to_float(bits); }
DEVICE uint32 fused_bfloat16x2(uint32 a, uint32 b, uint32 c) {
    const auto one = [](uint32 x, uint32 y, uint32 z) {
        return std::fma(bits_to_float(x), bits_to_float(y), bits_to_float(z));
    };
    return pack_bfloat16(one(a << 16, b << 16, c << 16),
                         one(a & 0xffff0000, b & 0xffff0000, c & 0xffff0000));
}
DEVICE uint32 fused_float16x2(uint32 a, uint32 b, uint32 c) {
    const auto one = [](uint32 x, uint32 y, uint32 z) {
        return std::fma(float16_to_float(uint16(x)), float16_to_float(uint16(y)),
                        float16_to_float(uint16(z)));
    };
    return pack_float16(one(a, b, c), one(a >> 16, b >> 16, c >> 16));
}
DEVICE uint32 permute_bytes(uint32 low, uint32 high, uint32 selector) {
    const uint64 bytes = low | uint64(high) << 32;
    uint32 out = 0;
    for (int i = 0; i < 4; i++) out |= uint32(bytes >> (8 * ((selector >> (4 * i)) & 7)) & 0xff) << (8 * i);
    return out;
}
DEVICE uint32 and_or(uint32 a, uint32 mask, uint32 bits) { return (a & mask) | bits; }
DEVICE uint32 multiply_high(uint32 a, uint32 b) { return uint32((uint64(a) * b) >> 32); }
DEVICE int population(uint32 bits) { return __builtin_popcount(bits); }
