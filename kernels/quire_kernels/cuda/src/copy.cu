// Rows of bytes by index: blocks of the cache are gathered, then scattered, so that every source is read
// first.
#include <device.cuh>

namespace {

struct CopyParams {
    const uint8* from;
    uint8* to;
    const int64* source;  // [n] rows of `from`; null: 0, 1, ...
    const int64* target;  // [n] rows of `to`; null: 0, 1, ...
    int64 from_stride, to_stride, bytes;
};

constexpr int UNROLL = 4;

}  // namespace

// A grid of (rows, parts of a row).
KERNEL(copy_rows, CopyParams, 256, 1) {
    const int64 i = blockIdx.x;
    const uint8* const from = p.from + (p.source ? p.source[i] : i) * p.from_stride;
    uint8* const to = p.to + (p.target ? p.target[i] : i) * p.to_stride;
    const int64 vectors = p.bytes / 16, step = int64(gridDim.y) * blockDim.x;
    const int64 first = int64(blockIdx.y) * blockDim.x + threadIdx.x;
    for (int64 v = first; v < vectors; v += UNROLL * step) {
        Vector16 kept[UNROLL];
#pragma unroll
        for (int j = 0; j < UNROLL; j++) {
            if (v + j * step < vectors) kept[j] = load_stream(from + (v + j * step) * 16);
        }
#pragma unroll
        for (int j = 0; j < UNROLL; j++) {
            if (v + j * step < vectors) reinterpret_cast<Vector16*>(to)[v + j * step] = kept[j];
        }
    }
    for (int64 b = vectors * 16 + first; b < p.bytes; b += step) to[b] = from[b];
}
