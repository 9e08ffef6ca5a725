// Reductions over a warp and a block. The order of floating-point sums depends on the thread count only.
#pragma once

#include <device.cuh>

struct Sum {
    template <typename T>
    static DEVICE T apply(T a, T b) { return a + b; }
};
struct Max {
    template <typename T>
    static DEVICE T apply(T a, T b) { return a > b ? a : b; }
};

// Every lane gets the result; the same bits in all of them, as both partners of a step add the same two.
template <typename Operation, typename T>
DEVICE T warp_reduce(T value) {
    for (int mask = 16; mask > 0; mask >>= 1) value = Operation::apply(value, shuffle_xor(value, mask));
    return value;
}

// Every thread gets the result. `scratch` has 32 entries in shared memory, free for reuse after a barrier.
template <typename Operation, typename T>
DEVICE T block_reduce(T value, T identity, T* scratch) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x + 31) >> 5;
    value = warp_reduce<Operation>(value);
    if (lane == 0) scratch[warp] = value;
    block_barrier();
    return warp_reduce<Operation>(lane < warps ? scratch[lane] : identity);
}
