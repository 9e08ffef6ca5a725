// Everything that is a GPU's: instructions without a C++ spelling, memory with a placement, launches.
//
// Kernels include this as <device.cuh> and use no other device-specific construct, so that the same sources
// run on a CPU against tests/kernels/cuda_emulator/device.cuh, which declares the same names.
#pragma once

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

typedef unsigned char uint8;
typedef unsigned short uint16;
typedef unsigned int uint32;
typedef unsigned long long uint64;
typedef long long int64;

#define DEVICE __device__ __forceinline__

// Defines kernel `name` with one parameter `p`, a structure by value. `threads` is the largest block and
// `blocks` how many of them a multiprocessor should hold: together they bound the registers.
#define KERNEL(name, Params, threads, blocks) \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Params p)

// Dynamic shared memory of the block, 128-byte aligned.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) uint8 name[]

struct __align__(16) Vector16 {
    uint32 x, y, z, w;
};
struct __align__(8) Vector8 {
    uint32 x, y;
};

// ---- barriers and exchanges -------------------------------------------------------------------------------

DEVICE void block_barrier() { __syncthreads(); }
DEVICE void warp_barrier() { __syncwarp(); }

template <typename T>
DEVICE T shuffle_xor(T value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}
template <typename T>
DEVICE T shuffle(T value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
}
template <typename T>
DEVICE T shuffle_up(T value, int delta) {
    return __shfl_up_sync(0xffffffffu, value, delta);
}
DEVICE uint32 ballot(bool value) { return __ballot_sync(0xffffffffu, value); }

// ---- memory -----------------------------------------------------------------------------------------------

DEVICE uint32 shared_address(const void* pointer) {
    return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// Starts a copy of 16 aligned bytes; zeros instead, and no read, where `valid` is false.
DEVICE void copy_async_16(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                 "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
}
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the newest N groups of this thread have arrived; other threads need a barrier after it.
template <int N>
DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// 16 aligned bytes that this block may have written.
DEVICE Vector16 load_vector(const void* global) { return *static_cast<const Vector16*>(global); }
// Data that is read once: no place in L1, the first to leave L2.
DEVICE Vector16 load_stream(const void* global) {
    Vector16 v;
    uint64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(global), "l"(policy));
    return v;
}
// Loads from L2, where what another multiprocessor wrote during this kernel is.
DEVICE float load_shared_by_blocks(const float* global) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(global) : "memory");
    return v;
}
DEVICE void memory_fence() { __threadfence(); }
DEVICE int atomic_add(int* global, int value) { return atomicAdd(global, value); }
DEVICE uint32 atomic_add_shared(uint32* shared, uint32 value) { return atomicAdd(shared, value); }

// From shared memory what the thread itself may just have written there.
DEVICE Vector16 load_again(const void* shared) {
    Vector16 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(shared_address(shared))
                 : "memory");
    return v;
}

// ---- tensor cores -----------------------------------------------------------------------------------------

// d[16, 8] += a[16, 16] b[16, 8]. With g = lane / 4 and c = lane % 4: a holds rows g, g + 8, g, g + 8 of
// columns 2c, 2c, 2c + 8, 2c + 8 (two numbers each), b rows 2c and 2c + 8 (two each) of column g, d columns
// 2c, 2c + 1 of row g, then of row g + 8.
DEVICE void mma_bfloat16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_float16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Four 8x8 matrices of 16-bit numbers, transposed: of each, eight lanes in order point at the rows.
DEVICE void load_matrices_transposed(uint32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// ---- arithmetic -------------------------------------------------------------------------------------------

// The same number, of which the compiler does not know that it is: what follows from it is computed where it is
// needed.
DEVICE int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// 2 ** x, to 2 units in the last place; -infinity gives 0.
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Never contracted: the same bits wherever it stands.
DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }
DEVICE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }

// a * b + c of two numbers of 16 bits each.
DEVICE uint32 fused_bfloat16x2(uint32 a, uint32 b, uint32 c) {
    uint32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
DEVICE uint32 fused_float16x2(uint32 a, uint32 b, uint32 c) {
    uint32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
// Four of the eight bytes of (high, low), chosen by the nibbles of `selector`, the lowest first.
DEVICE uint32 permute_bytes(uint32 low, uint32 high, uint32 selector) {
    return __byte_perm(low, high, selector);
}
// (a & mask) | bits in one instruction, which compilers make two of where both are constants.
DEVICE uint32 and_or(uint32 a, uint32 mask, uint32 bits) {
    uint32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
    return d;
}

// Conversions to the nearest, to even in the middle.
DEVICE uint32 pack_bfloat16(float low, float high) {
    uint32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
DEVICE uint32 pack_float16(float low, float high) {
    uint32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
DEVICE float float16_to_float(uint16 bits) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
    return f;
}
DEVICE float as_float(uint32 bits) { return __uint_as_float(bits); }
DEVICE uint32 as_bits(float value) { return __float_as_uint(value); }
DEVICE uint32 multiply_high(uint32 a, uint32 b) { return __umulhi(a, b); }
DEVICE int population(uint32 bits) { return __popc(bits); }
