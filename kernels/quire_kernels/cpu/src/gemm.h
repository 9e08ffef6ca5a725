// y = x W^T + bias with weights packed once at load: float32, bfloat16, or two to eight bits.
//
// Packed weights lie in blocks of `block_columns` output features. Within a block, bfloat16 has pairs of input
// features next to each other ([K / 2][32][2], what VDPBF16PS and AMX take), float32 has [K][32]. Quantised
// weights have the order of bfloat16 and are widened to it, a chunk at a time in the first-level cache, just
// before they are used: one kernel computes all formats.
//
// Every number of the result is one chain of additions over K in the same order, whatever the number of rows,
// threads or tasks: a row's result does not depend on the batch around it.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <type_traits>

#include "amx.h"
#include "matrix.h"
#include "pool.h"
#include "simd.h"

namespace quire {

enum class Format : int32_t { float32 = 0, bfloat16 = 1, int8 = 2, int4 = 3, w8a8 = 4, grouped = 5 };

// Of grouped weights. The last two are integers that are multiplied by a factor; nibbles share a byte with the minimum.
enum class ScaleType : int32_t { float32 = 0, float16 = 1, bfloat16 = 2, int8 = 3, nibbles = 4 };

// Gated ones take columns in pairs (gate, up), whose blocks hold 16 of each, and give half as many.
enum class Activation : int32_t { none = 0, silu = 1, gelu = 2, gelu_tanh = 3, clamped_swiglu = 4 };

constexpr int block_columns = 32;
constexpr int half_block = block_columns / 2;
constexpr int int4_group = 32;  // input features that share a scale

// What weights of a group mean: scale * (value - zero) - minimum; and how a block holds them, see gemm_grouped.h.
struct Groups {
  const uint8_t* table;  // [16]: values of four-bit codes; null: a code is its value
  ScaleType scale_type;
  int32_t bits;  // of a code
  int32_t size;  // inputs that share a scale
  int32_t zero;
  int32_t has_minimums;

  bool has_factors() const { return scale_type >= ScaleType::int8; }
  // Of a stretch.
  int inputs() const { return has_factors() ? 256 : std::max(size, 32); }
  int factors_bytes() const { return has_factors() ? 64 * (1 + has_minimums) : 0; }
  int scales_row() const {
    return block_columns * (scale_type == ScaleType::float32 ? 4 : scale_type >= ScaleType::int8 ? 1 : 2);
  }
  int scales_bytes() const { return inputs() / size * scales_row(); }
  int header_bytes() const {
    const int sets = has_minimums && scale_type != ScaleType::nibbles ? 2 : 1;
    return (factors_bytes() + sets * scales_bytes() + 63) / 64 * 64;
  }
  int unit_bytes() const { return 4 * block_columns * bits; }
  int64_t stretch_bytes() const { return header_bytes() + inputs() / 32 * int64_t(unit_bytes()); }
};

struct Weight {
  const void* data;     // blocks, 64-byte aligned
  const float* scales;  // int8, w8a8, grouped (or null): [blocks][32]; int4: [blocks][K / 32][32]
  const float* bias;    // [blocks][32], in packed order, or null
  int64_t num_columns;  // N, output features before a gate
  int64_t num_inputs;   // K, a multiple of 32
  Format format;
  Activation activation;
  Groups groups;  // grouped

  int64_t num_blocks() const { return (num_columns + block_columns - 1) / block_columns; }
  int64_t block_bytes() const {
    switch (format) {
      case Format::float32: return num_inputs * block_columns * 4;
      case Format::bfloat16: return num_inputs * block_columns * 2;
      case Format::int8:
      case Format::w8a8: return num_inputs * block_columns;
      case Format::grouped: return num_inputs / groups.inputs() * groups.stretch_bytes();
      default: return num_inputs * block_columns / 2;
    }
  }
  int64_t num_outputs() const { return activation == Activation::none ? num_columns : num_columns / 2; }
};

// Memory of a thread, for one purpose (`Tag`), that grows and stays.
template <class Tag, class T>
inline T* scratch(size_t count) {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<void, Free> memory;
  thread_local size_t size = 0;
  size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
  if (bytes > size) {
    constexpr size_t huge_page = size_t{1} << 21;
    // Rows lie some KiB apart, and with small pages each would take its own walk through the page tables.
    if (bytes >= huge_page / 2) bytes = (bytes + huge_page - 1) / huge_page * huge_page;
    memory.reset(std::aligned_alloc(bytes >= huge_page ? huge_page : 64, bytes));
    if (bytes >= huge_page) madvise(memory.get(), bytes, MADV_HUGEPAGE);
    size = bytes;
  }
  return static_cast<T*>(memory.get());
}

namespace gemm {

constexpr int room_inputs = 512;    // of K: a chunk of a block, widened to 32 KiB of bfloat16, in the first-level cache
constexpr int chunk_inputs = 1024;  // as they are: fewer rounds over the sums of the rows weigh more than that
constexpr int tiled_inputs = 512;   // where x is in tiles: 32 KiB, which stay in the first-level cache
constexpr int many_rows = 192;      // below, half of that: the next chunk has room beside this one
#if defined(__AMX_BF16__)
constexpr int task_rows = 512;  // rows whose chunk of x stays in the second-level cache
constexpr int task_blocks = 8;  // blocks that use it there
#else
constexpr int task_rows = 256;
constexpr int task_blocks = 4;
#endif
constexpr int64_t streams = 4;  // blocks that are read side by side where rows are few
constexpr int few_tasks = 4, many_tasks = 64;  // of a thread

// acc[rows][32] += x[rows][k] * w, or = with `first`. `prefetch`: w comes from memory.

template <int ROWS>
inline void tile(const float* x, int64_t ldx, const float* w, int k, float* acc, bool first, bool prefetch) {
  constexpr int num = block_columns / width;
  vec sums[ROWS][num];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < num; ++v) sums[r][v] = first ? zero() : load(acc + r * block_columns + v * width);
  for (int i = 0; i < k; ++i, w += block_columns) {
    if (prefetch) prefetch_ahead(w, block_columns * 4);
    vec weights[num];
    for (int v = 0; v < num; ++v) weights[v] = load(w + v * width);
    for (int r = 0; r < ROWS; ++r) {
      vec value = splat(x[r * ldx + i]);
      for (int v = 0; v < num; ++v) sums[r][v] = fma(value, weights[v], sums[r][v]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < num; ++v) store(acc + r * block_columns + v * width, sums[r][v]);
}

#if defined(__AVX512F__)
constexpr int max_tile_rows = 12;
#else
constexpr int max_tile_rows = 3;
#endif

// acc[rows][32] as above, of pairs of bfloat16; for each pair of inputs LINES cache lines from `ahead` on are asked for.
template <int ROWS, int LINES = 0>
inline void tile(const bf16* x, int64_t ldx, const bf16* w, int k, float* acc, bool first, const bf16* ahead = nullptr) {
  constexpr int num = block_columns / width;
  vec sums[ROWS][num];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < num; ++v) sums[r][v] = first ? zero() : load(acc + r * block_columns + v * width);
  for (int i = 0; i < k; i += 2, w += 2 * block_columns) {
    for (int line = 0; line < LINES; ++line, ahead += 32)
      _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T0);
    auto pair = [&](int row) { return x + row * ldx + i; };
#if defined(__AVX512BF16__)
    __m512bh weights[num];
    for (int v = 0; v < num; ++v) weights[v] = (__m512bh)_mm512_loadu_si512(w + 2 * v * width);
    for (int r = 0; r < ROWS; ++r) {
      int32_t bits;
      std::memcpy(&bits, pair(r), 4);
      __m512bh value = (__m512bh)_mm512_set1_epi32(bits);
      for (int v = 0; v < num; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], value, weights[v]);
    }
#else
    for (int r = 0; r < ROWS; ++r) {
      vec even = splat(to_float(pair(r)[0])), odd = splat(to_float(pair(r)[1]));
      for (int v = 0; v < num; ++v) {
        vec low, high;
        split_pairs(w + 2 * v * width, low, high);
        sums[r][v] = fma(odd, high, fma(even, low, sums[r][v]));
      }
    }
#endif
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < num; ++v) store(acc + r * block_columns + v * width, sums[r][v]);
}

// f(number of rows as a constant).
template <int MOST = max_tile_rows, class F>
inline void with_rows(int rows, F&& f) {
  if (rows == MOST) return f(std::integral_constant<int, MOST>());
  if constexpr (MOST > 1) with_rows<MOST - 1>(rows, f);
}

// Rows of the next tile, where tiles are as equal as can be: 13 rows are 7 and 6.
inline int next_tile(int rows) {
  return rows > max_tile_rows && rows < 2 * max_tile_rows ? (rows + 1) / 2 : std::min(rows, max_tile_rows);
}

// `prefetch`: w comes from memory.
inline void vector_rows(int rows, const float* x, int64_t ldx, const float* w, int k, float* acc, bool first, bool prefetch) {
  while (rows > 0) {
    int count = next_tile(rows);
    with_rows(count, [&](auto n) { tile<n>(x, ldx, w, k, acc, first, prefetch); });
    x += count * ldx;
    acc += count * block_columns;
    rows -= count;
    prefetch = false;
  }
}

inline void vector_rows(int rows, const bf16* x, int64_t ldx, const bf16* w, int k, float* acc, bool first) {
  while (rows > 0) {
    int count = next_tile(rows);
    with_rows(count, [&](auto n) { tile<n>(x, ldx, w, k, acc, first); });
    x += count * ldx;
    acc += count * block_columns;
    rows -= count;
  }
}

constexpr int piece_inputs = 256;  // of K: 16 KiB of a block, in the first-level cache with those that come next
#if defined(__AMX_BF16__)
constexpr int max_streamed_rows = 32;  // tiles are read otherwise
#else
constexpr int max_streamed_rows = 6 * max_tile_rows;
#endif

// Products with weights from memory, of up to max_streamed_rows rows: all of them use a piece of the weights before the next,
// and the first two tiles of rows each ask for half of that.
inline void streamed_rows(int rows, const bf16* x, int64_t ldx, const bf16* w, int k, float* acc) {
  if (rows <= max_tile_rows)
    return with_rows(rows, [&](auto n) { tile<n, 2>(x, ldx, w, k, acc, true, w + 4096 / sizeof(bf16)); });
  for (int start = 0; start < k; start += piece_inputs, w += piece_inputs * block_columns) {
    const int size = std::min(piece_inputs, k - start);
    const bf16* next = w + piece_inputs * block_columns;
    for (int row = 0, tiles = 0, count; row < rows; row += count, ++tiles, next += piece_inputs * half_block) {
      count = next_tile(rows - row);
      const bf16* from = x + row * ldx + start;
      float* to = acc + row * block_columns;
      with_rows(count, [&](auto n) {
        if (tiles < 2) tile<n, 1>(from, ldx, w, size, to, start == 0, next);
        else tile<n>(from, ldx, w, size, to, start == 0);
      });
    }
  }
}

#if defined(__AMX_BF16__)

// Tiles 0..3 are sums (2 x 16 rows, 2 x 16 columns), 4 and 5 rows of x, 6 and 7 weights.
inline void configure_tiles(int upper_rows, int lower_rows) {
  lower_rows = std::max(lower_rows, 1);
  const int rows[] = {upper_rows, upper_rows, lower_rows, lower_rows, upper_rows, lower_rows, 16, 16};
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.set(tile, rows[tile], 64);
  config.load();
}

// Brings up to 16 rows of x into the order of a tiled matrix.
inline void to_tiles(const bf16* x, int64_t ldx, int rows, int64_t k, bf16* tiles) {
  for (int64_t i = 0; i < k; i += 32)
    for (int r = 0; r < rows; ++r) _mm512_store_si512(tiles + i * 16 + r * 32, _mm512_loadu_si512(x + r * ldx + i));
}

// A chunk of weights that comes next, asked for little by little. A quarter of it beside the other: one stream alone
// would not reach the memory's rate.
class Ahead {
 public:
  // `chunk` is asked for in `steps` calls of ask(); null: nothing is.
  Ahead(const bf16* chunk, int inputs, int steps)
      : next_(chunk), apart_(chunk ? inputs / 32 * (8 * 32) : 0), left_(apart_ / 32), each_((left_ + steps - 1) / steps) {}

  void ask() {
    for (int line = std::min(each_, left_); line > 0; --line, --left_, next_ += 32)
      for (int q = 0; q < 4; ++q) _mm_prefetch(reinterpret_cast<const char*>(next_ + q * apart_), _MM_HINT_T0);
  }

 private:
  const bf16* next_;
  int64_t apart_;
  int left_, each_;
};

// sums = acc + x w, or = x w with `first`, of a pair of tiles of rows, the lower of which may be missing. STREAM: x is
// not to take the place of weights in the first-level cache. `before(w)` and `after()` are called around the products of
// every 32 inputs.
template <bool LOWER, bool STREAM, class Before, class After>
inline void tiled_pair(const bf16* top, const bf16* bottom, const bf16* w, int k, const float* acc, float* sums, bool first,
                       Before&& before, After&& after) {
  constexpr int stride = block_columns * 4;
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    if (LOWER) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, acc, stride);
    _tile_loadd(1, acc + 16, stride);
    if (LOWER) {
      _tile_loadd(2, acc + 16 * block_columns, stride);
      _tile_loadd(3, acc + 16 * block_columns + 16, stride);
    }
  }
  for (int i = 0; i < k; i += 32, w += 32 * block_columns, top += 512, bottom += 512) {
    before(w);
    _tile_loadd(6, w, stride);
    if (STREAM) _tile_stream_loadd(4, top, 64);
    else _tile_loadd(4, top, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + 32, stride);
    _tile_dpbf16ps(1, 4, 7);
    if (LOWER) {
      if (STREAM) _tile_stream_loadd(5, bottom, 64);
      else _tile_loadd(5, bottom, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    after();
  }
  _tile_stored(0, sums, stride);
  _tile_stored(1, sums + 16, stride);
  if (LOWER) {
    _tile_stored(2, sums + 16 * block_columns, stride);
    _tile_stored(3, sums + 16 * block_columns + 16, stride);
  }
}

// What vector_rows does, for x in tiles, of which `x_rows` is the distance between rows' tiles.
inline void tiled_rows(int rows, const bf16* x, int64_t x_rows, const bf16* w, int k, float* acc, bool first, bool prefetch) {
  Tiles::sync();
  for (int row = 0, shape = -1; row < rows; row += 32, x += 2 * x_rows, acc += 32 * block_columns, prefetch = false) {
    const int count = std::min(rows - row, 32);
    if (shape != count) configure_tiles(std::min(count, 16), count - 16);
    shape = count;
    auto before = [&](const bf16* weights) {
      if (prefetch) prefetch_ahead(weights, 32 * block_columns * 2);
    };
    if (count > 16) tiled_pair<true, false>(x, x + x_rows, w, k, acc, acc, first, before, [] {});
    else tiled_pair<false, false>(x, nullptr, w, k, acc, acc, first, before, [] {});
  }
}

// The same for many rows and weights that stay in the first-level cache: x comes from the second level. `next`: as many
// weights, which come after these; null: none. `sums_of(row, count)`: where the sums of up to 32 rows go. `between()` is
// called for every 32 inputs: the vector units work beside the matrix unit. Tiles are configured for 16 rows, before and
// after.
template <class Sums, class Between>
inline void tiled_many(int rows, const bf16* x, int64_t x_rows, const bf16* w, int k, const float* acc, bool first,
                       const bf16* next, Sums&& sums_of, Between&& between) {
  Ahead ahead(next, k, (rows + 31) / 32 * (k / 32));
  Tiles::sync();
  for (int row = 0; row < rows; row += 32, x += 2 * x_rows, acc += 32 * block_columns) {
    const int count = std::min(rows - row, 32);
    float* sums = sums_of(row, count);
    if (count < 32) configure_tiles(std::min(count, 16), count - 16);
    auto before = [&](const bf16*) { ahead.ask(); };
    if (count > 16) tiled_pair<true, true>(x, x + x_rows, w, k, acc, sums, first, before, between);
    else tiled_pair<false, true>(x, nullptr, w, k, acc, sums, first, before, between);
    if (count < 32) configure_tiles(16, 16);
  }
}

// acc[4][rows][32] = x w of four blocks of bfloat16, `block_size` numbers apart, for up to 32 rows. Tiles load too
// much at a time for the processor's prefetchers to follow, and one stream alone would not reach the memory's rate:
// the four are read side by side, 32 inputs at a time, and what comes next is asked for meanwhile. `begins`: nobody
// has asked for the first of these.
template <bool LOWER>
inline void tiled_blocks(int rows, const bf16* x, int64_t x_rows, const bf16* w, int64_t block_size, int64_t k,
                         float* acc, bool begins) {
  constexpr int stride = block_columns * 4, step = 32 * block_columns;
  if (begins)
    for (int i = 0; i < step; i += 32)
      for (int q = 0; q < 4; ++q) touch(w + q * block_size + i);
  for (int64_t i = 0; i < k; i += 32, w += step) {
    const bf16* next = i + 32 < k ? w + step : w + step + 3 * block_size;
    for (int q = 0; q < 4; ++q) {
      const bf16* weights = w + q * block_size;
      float* sums = acc + q * rows * block_columns;
      float* lower = sums + 16 * block_columns;
      if (i == 0) {
        _tile_zero(0);
        _tile_zero(1);
        if (LOWER) {
          _tile_zero(2);
          _tile_zero(3);
        }
      } else {
        _tile_loadd(0, sums, stride);
        _tile_loadd(1, sums + 16, stride);
        if (LOWER) {
          _tile_loadd(2, lower, stride);
          _tile_loadd(3, lower + 16, stride);
        }
      }
      for (int line = 0; line < 8; ++line, next += 32)
        for (int s = 0; s < 4; ++s)
          _mm_prefetch(reinterpret_cast<const char*>(next + s * block_size), _MM_HINT_T0);
      _tile_loadd(4, x + i * 16, 64);
      _tile_loadd(6, weights, stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, weights + 32, stride);
      _tile_dpbf16ps(1, 4, 7);
      if (LOWER) {
        _tile_loadd(5, x + x_rows + i * 16, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        _tile_stored(2, lower, stride);
        _tile_stored(3, lower + 16, stride);
      }
      _tile_stored(0, sums, stride);
      _tile_stored(1, sums + 16, stride);
    }
  }
}

// The same of a multiple of four blocks that follow each other.
inline void tiled_blocks(int rows, const bf16* x, const bf16* w, int64_t k, int blocks, float* acc) {
  Tiles::sync();
  configure_tiles(std::min(rows, 16), rows - 16);
  for (int b = 0; b < blocks; b += 4, w += 4 * k * block_columns, acc += 4 * rows * block_columns) {
    if (rows > 16) tiled_blocks<true>(rows, x, 16 * k, w, k * block_columns, k, acc, b == 0);
    else tiled_blocks<false>(rows, x, 16 * k, w, k * block_columns, k, acc, b == 0);
  }
  Tiles::sync();
}

#endif

// Whether x is brought into tiles before it is used.
template <class T>
constexpr bool has_tiles() {
#if defined(__AMX_BF16__)
  return sizeof(T) == 2;
#else
  return false;
#endif
}

// Eight-bit integers of pair order as they are, exact in every type; their columns' scales come at the end.
inline void widen(const int8_t* from, int count, bf16* to) {
  for (int i = 0; i < count; i += 2 * width) {
    if (i % 64 == 0) prefetch_ahead(from + i);
    store_two(to + i, load(from + i), load(from + i + width));
  }
}

// Integers of pair order times the scales of their columns, of which one serves a pair.
inline void widen(const int8_t* from, const float* scales, int count, bf16* to) {
  for (int i = 0; i < count; i += 2 * width) {
    const float* scale = scales + i % (2 * block_columns) / 2;
    store_two(to + i, mul(load(from + i), load_twice(scale)),
              mul(load(from + i + width), load_twice(scale + width / 2)));
  }
}

// The same for float32, which has [K][32]: a pair's two inputs go to two rows.
inline void widen(const int8_t* from, const float* scales, int count, float* to) {
  for (int i = 0; i < count; i += 2 * block_columns)
    for (int c = 0; c < block_columns; ++c) {
      to[i + c] = float(from[i + 2 * c]) * (scales ? scales[c] : 1.0f);
      to[i + block_columns + c] = float(from[i + 2 * c + 1]) * (scales ? scales[c] : 1.0f);
    }
}

inline void widen(const int8_t* from, int count, float* to) { widen(from, nullptr, count, to); }

// A row of 64 four-bit numbers (32 columns, pairs): byte i holds numbers i and i + 32, each plus 8.
inline void unpack_nibbles(const uint8_t* from, int8_t* to) {
  const __m256i mask = _mm256_set1_epi8(15), eight = _mm256_set1_epi8(8);
  __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  __m256i low = _mm256_sub_epi8(_mm256_and_si256(bytes, mask), eight);
  __m256i high = _mm256_sub_epi8(_mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask), eight);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), low);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32), high);
}

// Inputs [start, start + k) of a block, in the type that x has; widened into `room` if they are quantised.
template <class T>
inline const T* chunk_of(const Weight& w, int64_t block, int64_t start, int k, T* room) {
  const char* data = static_cast<const char*>(w.data) + block * w.block_bytes();
  if (w.format == Format::int8) {
    widen(reinterpret_cast<const int8_t*>(data) + start * block_columns, k * block_columns, room);
    return room;
  }
  if (w.format == Format::int4) {
    alignas(64) int8_t numbers[int4_group * block_columns];
    const uint8_t* packed = reinterpret_cast<const uint8_t*>(data) + start * block_columns / 2;
    const float* scales = w.scales + (block * w.num_inputs + start) / int4_group * block_columns;
    for (int i = 0; i < k; i += int4_group) {
      prefetch_ahead(packed, int4_group * block_columns / 2);
      for (int pair = 0; pair < int4_group / 2; ++pair)
        unpack_nibbles(packed + pair * block_columns, numbers + pair * 2 * block_columns);
      widen(numbers, scales, int4_group * block_columns, room + i * block_columns);
      packed += int4_group * block_columns / 2;
      scales += block_columns;
    }
    return room;
  }
  return reinterpret_cast<const T*>(data) + start * block_columns;
}

#if defined(__AVX512BF16__)

// Sixteen pairs of inputs [start, start + 2) and columns [16 * half, +16) of a block, as bfloat16; see chunk_of.
template <Format FORMAT>
inline __m512i pairs_of(const char* data, const float* scales, int64_t start, int half) {
  if constexpr (FORMAT == Format::bfloat16) {
    const char* p = data + start * block_columns * 2 + half * 64;
#if defined(__AMX_BF16__)
    // Intel's processors are faster with it, AMD's without.
    prefetch_ahead(p);
#endif
    return _mm512_load_si512(p);
  }
  __m256i numbers;
  if constexpr (FORMAT == Format::int8) {
    const char* p = data + start * block_columns + half * 32;
    if (half == 0) prefetch_ahead(p);
    numbers = _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
    scales = nullptr;
  } else {
    const char* p = data + start * block_columns / 2;
    if (half == 0 && start % 4 == 0) prefetch_ahead(p);
    numbers = _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
    if (half) numbers = _mm256_srli_epi16(numbers, 4);
    numbers = _mm256_sub_epi8(_mm256_and_si256(numbers, _mm256_set1_epi8(15)), _mm256_set1_epi8(8));
  }
  vec low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(numbers)));
  vec high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(numbers, 1)));
  if (FORMAT == Format::int4) {
    low = mul(low, load_twice(scales + half * 16));
    high = mul(high, load_twice(scales + half * 16 + width / 2));
  }
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// acc[STREAMS][32] = x w of as many blocks for one row, bitwise what the products of more rows give. Read side by
// side the blocks occupy more of the processor's prefetchers than one after the other, to the memory's full rate.
template <Format FORMAT, int STREAMS>
inline void one_row(const Weight& w, int64_t block, const bf16* x, float* acc) {
  const char* data = static_cast<const char*>(w.data) + block * w.block_bytes();
  const float* scales = w.scales + block * w.num_inputs;
  vec sums[STREAMS][2];
  for (auto& sum : sums) sum[0] = sum[1] = zero();
  for (int64_t i = 0; i < w.num_inputs; i += 32) {
#if defined(__AMX_BF16__)
    // TDPBF16PS adds the even and the odd inputs of its 32 each in a chain of fused steps, then both to the sum.
    vec even[STREAMS][2], odd[STREAMS][2];
    for (int q = 0; q < STREAMS; ++q) even[q][0] = even[q][1] = odd[q][0] = odd[q][1] = zero();
#endif
    for (int pair = 0; pair < 32; pair += 2) {
      int32_t bits;
      std::memcpy(&bits, x + i + pair, 4);
      const __m512i both = _mm512_set1_epi32(bits);
      for (int q = 0; q < STREAMS; ++q)
        for (int half = 0; half < 2; ++half) {
          __m512i weights = pairs_of<FORMAT>(data + q * w.block_bytes(), scales + q * w.num_inputs + i, i + pair, half);
#if defined(__AMX_BF16__)
          const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
          auto first = [](__m512i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); };
          auto second = [&](__m512i v) { return _mm512_castsi512_ps(_mm512_and_si512(v, upper)); };
          even[q][half] = fma(first(both), first(weights), even[q][half]);
          odd[q][half] = fma(second(both), second(weights), odd[q][half]);
#else
          sums[q][half] = _mm512_dpbf16_ps(sums[q][half], (__m512bh)both, (__m512bh)weights);
#endif
        }
    }
#if defined(__AMX_BF16__)
    for (int q = 0; q < STREAMS; ++q)
      for (int half = 0; half < 2; ++half)
        sums[q][half] = add(sums[q][half], add(even[q][half], odd[q][half]));
#endif
  }
  for (int q = 0; q < STREAMS; ++q)
    for (int half = 0; half < 2; ++half) store(acc + q * block_columns + half * 16, sums[q][half]);
}

template <Format FORMAT>
inline void one_row(const Weight& w, int64_t block, int blocks, const bf16* x, float* acc) {
  for (; blocks >= 4; blocks -= 4, block += 4, acc += 4 * block_columns) one_row<FORMAT, 4>(w, block, x, acc);
  for (; blocks > 0; --blocks, ++block, acc += block_columns) one_row<FORMAT, 1>(w, block, x, acc);
}

inline void one_row(const Weight& w, int64_t block, int blocks, const bf16* x, float* acc) {
#if defined(__AMX_BF16__)
  FlushSubnormals flush;
#endif
  switch (w.format) {
    case Format::int8: return one_row<Format::int8>(w, block, blocks, x, acc);
    case Format::int4: return one_row<Format::int4>(w, block, blocks, x, acc);
    default: return one_row<Format::bfloat16>(w, block, blocks, x, acc);
  }
}

#endif

constexpr float swiglu_limit = 7.0f;

inline vec activate(vec gate, Activation kind) {
  switch (kind) {
    case Activation::silu: return mul(gate, sigmoid(gate));
    case Activation::gelu_tanh: {
      vec inner = mul(splat(0.7978845608028654f), fma(mul(mul(gate, gate), gate), splat(0.044715f), gate));
      return mul(mul(splat(0.5f), gate), add(splat(1.0f), tanh(inner)));
    }
    case Activation::clamped_swiglu: {
      vec clamped = min(splat(swiglu_limit), gate);  // NaN stays NaN
      return mul(clamped, sigmoid(mul(clamped, splat(1.702f))));
    }
    default: {
      alignas(64) float values[width];
      store(values, gate);
      for (float& value : values) value *= 0.5f * (1.0f + std::erf(value * 0.70710678118654752f));
      return load(values);
    }
  }
}

// What the activated gate is multiplied by.
inline vec factor(vec up, Activation kind) {
  if (kind != Activation::clamped_swiglu) return up;
  return add(max(splat(-swiglu_limit), min(splat(swiglu_limit), up)), splat(1.0f));
}

// Sums of a block, bias and activation applied, to y: [rows][outputs of the block]. terms[rows][32] are added before the
// activation; null: none.
template <class Y>
inline void finish(const Weight& w, int64_t block, int rows, const float* acc, Y* y, int64_t ldy,
                   const float* terms = nullptr) {
  const float* bias = w.bias ? w.bias + block * block_columns : nullptr;
  const bool is_scaled = w.scales && w.format >= Format::int8 && w.format != Format::int4;
  const float* scales = is_scaled ? w.scales + block * block_columns : nullptr;
  auto result = [&](const float* row, int c) {
    vec value = load(row + c);
    if (scales) value = mul(value, load(scales + c));
    if (bias) value = add(value, load(bias + c));
    return terms ? add(value, load(terms + c)) : value;
  };
  bool is_gated = w.activation != Activation::none;
  int columns = is_gated ? half_block : block_columns;
  int valid = int(std::min<int64_t>(columns, w.num_outputs() - block * columns));
  alignas(64) Y last[block_columns];
  for (int r = 0; r < rows; ++r, acc += block_columns) {
    Y* to = valid == columns ? y + r * ldy : last;
    for (int c = 0; c < columns; c += width) {
      vec value = result(acc, c);
      if (is_gated) value = mul(activate(value, w.activation), factor(result(acc, half_block + c), w.activation));
      store(to + c, value);
    }
    if (to == last) std::memcpy(y + r * ldy, last, valid * sizeof(Y));
    if (terms) terms += block_columns;
  }
}

// The share of a product that one task computes; `column` is its place among those of the same rows.
struct Part {
  int64_t first_row, first_block, column;
  int rows, blocks;
};

class Split {
 public:
  // `num_products`: of this size, about, whose tasks are shared by all threads together.
  Split(int64_t num_rows, const Weight& w, int64_t num_products = 1) : num_rows_(num_rows), num_blocks_(w.num_blocks()) {
    row_tasks_ = (num_rows + task_rows - 1) / task_rows;
    rows_each_ = ((num_rows + 15) / 16 + row_tasks_ - 1) / row_tasks_ * 16;
    // With many rows the blocks of a task share their cache lines. With few, a task is worth claiming from some 32 k
    // products on, and is small, so that all threads end together: in streams if that leaves each thread a few tasks.
    blocks_each_ = task_blocks;
    if (num_rows < 64) {
      const int64_t share = num_blocks_ * num_products / pool().num_threads(), worth = 1024 / (w.num_inputs * num_rows);
      blocks_each_ = std::max({int64_t{1}, worth, std::min(share / few_tasks, streams), share / many_tasks / streams * streams});
    }
    column_tasks_ = (num_blocks_ + blocks_each_ - 1) / blocks_each_;
  }

  int num_tasks() const { return int(row_tasks_ * column_tasks_); }
  int64_t num_columns() const { return column_tasks_; }
  int64_t num_row_tasks() const { return row_tasks_; }

  // Rows begin at a multiple of 16; there may be none.
  Part part(int task) const {
    int64_t row = task / column_tasks_ * rows_each_, column = task % column_tasks_, block = column * blocks_each_;
    return {row, block, column, int(std::min(rows_each_, num_rows_ - row)),
            int(std::min(blocks_each_, num_blocks_ - block))};
  }

 private:
  int64_t num_rows_, num_blocks_, row_tasks_, rows_each_, blocks_each_, column_tasks_;
};

// What becomes of a product: each task hands over its sums, [blocks][rows][32]. This one writes y.
template <class Y>
struct Stored {
  const Weight& w;
  Matrix<Y> y;

  void begin(const Split&) {}
  void take(const Part& part, const float* sums) const {
    for (int b = 0; b < part.blocks; ++b)
      take(part.first_block + b, part.first_row, part.rows, sums + int64_t(b) * part.rows * block_columns);
  }
  // [rows][32] of one block.
  void take(int64_t block, int64_t row, int rows, const float* sums) const {
    const int64_t column = block * (w.activation == Activation::none ? block_columns : half_block);
    for (int count; rows > 0; row += count, rows -= count, sums += count * block_columns) {
      count = y.is_tiled ? std::min(rows, 16 - int(row % 16)) : rows;
      finish(w, block, count, sums, y.row(row, column).at(0), y.row_stride());
    }
  }
};

// Keeps only the largest result of each row: which column it is in, and whether there was a NaN.
class Largest {
 public:
  Largest(const Weight& w, int64_t num_rows) : w_(w), num_rows_(num_rows) {}

  void begin(const Split& split) {
    struct Entries;
    num_columns_ = split.num_columns();
    entries_ = scratch<Entries, Entry>(num_columns_ * num_rows_);
  }

  void take(const Part& part, const float* sums) const {
    constexpr int num = block_columns / width;
    for (int r = 0; r < part.rows; ++r) {
      vec mosts[num], blocks[num], nans = zero();
      for (int v = 0; v < num; ++v) mosts[v] = splat(lowest), blocks[v] = zero();
      for (int b = 0; b < part.blocks; ++b) {
        // Columns that there are not stay as they are.
        alignas(64) float values[block_columns];
        for (int v = 0; v < num; ++v) store(values + v * width, splat(lowest));
        finish(w_, part.first_block + b, 1, sums + (b * part.rows + r) * block_columns, values, block_columns);
        for (int v = 0; v < num; ++v) {
          vec value = load(values + v * width);
          nans = nan_of(value, nans);
          blocks[v] = where_greater(value, mosts[v], splat(float(b)), blocks[v]);
          mosts[v] = max(mosts[v], value);
        }
      }
      alignas(64) float values[block_columns], places[block_columns];
      for (int v = 0; v < num; ++v) store(values + v * width, mosts[v]), store(places + v * width, blocks[v]);
      Entry best{lowest, 0};
      for (int c = 0; c < block_columns; ++c) {
        int64_t column = (part.first_block + int64_t(places[c])) * block_columns + c;
        if (values[c] > best.value || (values[c] == best.value && column < best.column)) best = {values[c], column};
      }
      float nan = sum(nans);
      if (nan != nan) best.value = nan;
      entries_[part.column * num_rows_ + part.first_row + r] = best;
    }
  }

  // The first of the largest, or -1 where the largest is not finite or one is NaN.
  int64_t column(int64_t row) const {
    Entry best{lowest, -1};
    for (int64_t c = 0; c < num_columns_; ++c) {
      const Entry& entry = entries_[c * num_rows_ + row];
      if (entry.value != entry.value) return -1;
      if (entry.value > best.value) best = entry;
    }
    return std::isfinite(best.value) ? best.column : -1;
  }

 private:
  struct Entry {
    float value;
    int64_t column;
  };
  static constexpr float lowest = -std::numeric_limits<float>::infinity();
  const Weight& w_;
  int64_t num_rows_, num_columns_ = 0;
  Entry* entries_ = nullptr;  // [num_columns_][num_rows_]
};

#if defined(__AMX_BF16__)

template <class Sink, class = void>
constexpr bool takes_blocks = false;
template <class Sink>
constexpr bool takes_blocks<Sink, std::void_t<decltype(std::declval<Sink>().take(0, 0, 0, nullptr))>> = true;

// A part of a product of many rows, in tiles, with unquantised weights. sums: [blocks][rows][32].
template <class Sink>
inline void multiply_many(const Part& part, const bf16* x, const Weight& w, float* sums, const Sink& to) {
  const int64_t k = w.num_inputs;
  // Sums that are complete leave for the sink while the next ones are computed.
  struct Sums {
    int64_t block, row;
    int rows;
    const float* sums;
  } complete{}, current{};
  alignas(64) float room[2][32 * block_columns];
  int turn = 0;
  auto hand_over = [&](int count) {
    count = std::min(count, complete.rows);
    if (count == 0) return;
    if constexpr (takes_blocks<Sink>) to.take(complete.block, complete.row, count, complete.sums);
    complete = {complete.block, complete.row + count, complete.rows - count, complete.sums + count * block_columns};
  };
  auto change = [&](const Sums& next) {
    hand_over(32);
    complete = current;
    current = next;
  };
  configure_tiles(16, 16);
  const int chunk = part.rows < many_rows ? tiled_inputs / 2 : tiled_inputs;
  for (int64_t start = 0; start < k; start += chunk) {
    const int size = int(std::min<int64_t>(chunk, k - start)), rows_each = (32 * 32 + size - 1) / size;
    const bool is_last = start + size == k;
    for (int b = 0; b < part.blocks; ++b) {
      const int64_t block = part.first_block + b;
      const bf16* weights = chunk_of<bf16>(w, block, start, size, nullptr);
      const bf16* next = nullptr;
      if (b + 1 < part.blocks) next = weights + k * block_columns;
      else if (!is_last) next = chunk_of<bf16>(w, part.first_block, start + size, size, nullptr);
      float* acc = sums + int64_t(b) * part.rows * block_columns;
      auto in_turn = [&](int row, int count) {
        turn ^= 1;
        change({block, part.first_row + row, count, room[turn]});
        return room[turn];
      };
      auto in_place = [&](int row, int) { return acc + row * block_columns; };
      auto many = [&](auto&& sums_of, auto&& between) {
        tiled_many(part.rows, x + start * 16, 16 * k, weights, size, acc, start == 0, next, sums_of, between);
      };
      if constexpr (takes_blocks<Sink>) {
        if (is_last) {
          many(in_turn, [&] { hand_over(rows_each); });
          continue;
        }
      }
      many(in_place, [] {});
    }
  }
  if constexpr (takes_blocks<Sink>) {
    change({});
    change({});
  } else {
    to.take(part, sums);
  }
}

#endif

// Memory that is handed out piece by piece; without any, what is asked for is only counted.
struct Arena {
  char* memory = nullptr;
  int64_t size = 0;

  template <class T>
  T* take(int64_t count) {
    T* piece = memory ? reinterpret_cast<T*>(memory + size) : nullptr;
    size += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    return piece;
  }
};

// Rows of x as products with weights of some format take them. Each format's class takes its memory from an Arena; then
// prepare() has to be called for each of num_pieces(), which are independent of each other, and `pieces_each()` of which are
// worth a task; then multiply() computes parts.
//
// This one: float32, and bfloat16 with 512-bit vectors or tiles; x itself unless it has to be brought into tiles.
template <class X>
class PlainInput {
 public:
  PlainInput(const Matrix<const X>& x, int64_t num_rows, const Weight& w, Arena& arena)
      : x_(x), num_rows_(num_rows), k_(w.num_inputs), tiles_(x.data) {
    if (has_tiles<X>() && num_rows > 1 && !x.is_tiled)
      tiles_ = copy_ = arena.take<X>(Matrix<X>::tiled_size(num_rows, k_));
  }

  int64_t num_pieces() const { return copy_ ? (num_rows_ + 15) / 16 : 0; }
  int64_t pieces_each() const { return 16384 / (16 * k_); }

  void prepare(int64_t tile) const {
#if defined(__AMX_BF16__)
    if constexpr (has_tiles<X>())
      to_tiles(x_.data + tile * 16 * x_.ld, x_.ld, int(std::min<int64_t>(16, num_rows_ - tile * 16)), k_,
               copy_ + tile * 16 * k_);
#endif
  }

  template <class Sink>
  void multiply(const Part& part, const Weight& w, Sink& to) const {
    struct Room;
    struct Sums;
    const auto [first_row, first_block, column, rows, num_blocks] = part;
    int blocks = num_blocks;
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<X, bf16>) {
      if (num_rows_ == 1) {
        float* sums = scratch<Sums, float>(blocks * block_columns);
        one_row(w, first_block, blocks, x_.data, sums);
        return to.take(part, sums);
      }
    }
#endif
    X* room = w.format >= Format::int8 ? scratch<Room, X>(room_inputs * block_columns) : nullptr;
    float* sums = scratch<Sums, float>((rows + 15) / 16 * 16 * blocks * block_columns);
#if defined(__AMX_BF16__)
    if constexpr (has_tiles<X>())
      if (rows <= max_streamed_rows && blocks % 4 == 0 && !room) {
        tiled_blocks(rows, tiles_ + first_row * k_, chunk_of<bf16>(w, first_block, 0, int(k_), nullptr), k_, blocks, sums);
        blocks = 0;
      }
    if constexpr (has_tiles<X>())
      if (rows > max_streamed_rows && !room) return multiply_many(part, tiles_ + first_row * k_, w, sums, to);
#endif
    // Few rows need no second pass over x, and unquantised weights no room.
    int64_t chunk = room ? room_inputs : rows <= max_streamed_rows ? k_ : chunk_inputs;
    for (int64_t start = 0; start < k_; start += chunk) {
      int size = int(std::min(chunk, k_ - start));
      for (int b = 0; b < blocks; ++b) {
        const X* weights = chunk_of(w, first_block + b, start, size, room);
        float* acc = sums + b * rows * block_columns;
#if defined(__AMX_BF16__)
        if constexpr (has_tiles<X>()) {
          tiled_rows(rows, tiles_ + first_row * k_ + start * 16, 16 * k_, weights, size, acc, start == 0, !room);
          continue;
        }
#endif
        if constexpr (std::is_same_v<X, float>)
          vector_rows(rows, x_.data + first_row * x_.ld + start, x_.ld, weights, size, acc, start == 0, !room);
        else if (room || rows > max_streamed_rows)
          vector_rows(rows, x_.data + first_row * x_.ld + start, x_.ld, weights, size, acc, start == 0);
        else
          streamed_rows(rows, x_.data + first_row * x_.ld, x_.ld, weights, size, acc);
      }
    }
    to.take(part, sums);
  }

 private:
  Matrix<const X> x_;
  int64_t num_rows_, k_;
  const X* tiles_;
  X* copy_ = nullptr;
};

template <class X>
class Int8Input;
template <class X>
class GroupedInput;
class WideInput;

// f(null pointer to the class of inputs that products of x's type and w's format take)
template <class X, class F>
inline void with_input(const Weight& w, F&& f) {
  if (w.format == Format::w8a8) return f(static_cast<Int8Input<X>*>(nullptr));
  if (w.format == Format::grouped) return f(static_cast<GroupedInput<X>*>(nullptr));
#if !defined(__AVX512F__)
  if constexpr (std::is_same_v<X, bf16>) return f(static_cast<WideInput*>(nullptr));
  else
#endif
  return f(static_cast<PlainInput<X>*>(nullptr));
}

// Whether a product of so many rows takes x in tiles as it is; else it brings a plain matrix into them, or needs none.
template <class X>
inline bool takes_tiles(int64_t num_rows, const Weight& w) {
  return has_tiles<X>() && num_rows > 1 && w.format < Format::w8a8;
}

// x[M][K] w, to a sink; x has the type that the format is computed in (bfloat16 or float32), and is in tiles only if
// takes_tiles() says so.
template <class X, class Sink>
void multiply(const Matrix<const X>& x, int64_t num_rows, const Weight& w, Sink& to) {
  struct Memory;
  if (num_rows == 0) return;
  with_input<X>(w, [&](auto* type) {
    using Input = std::remove_pointer_t<decltype(type)>;
    Arena sizes;
    Input(x, num_rows, w, sizes);
    Arena arena{scratch<Memory, char>(sizes.size)};
    const Input input(x, num_rows, w, arena);
    parallel_for(input.num_pieces(), input.pieces_each(), [&](int64_t piece) { input.prepare(piece); });
    Split split(num_rows, w);
    to.begin(split);
    parallel_stretches(split.num_tasks(), [&](int task) {
      const Part part = split.part(task);
      if (part.rows > 0) input.multiply(part, w, to);
    });
  });
}

}  // namespace gemm

// y[M][outputs] of x[M][K]; for x see gemm::multiply.
template <class X, class Y>
void linear(const Matrix<X>& x, int64_t num_rows, const Weight& w, const Matrix<Y>& y) {
  gemm::Stored<Y> to{w, y};
  gemm::multiply<std::remove_const_t<X>>(x, num_rows, w, to);
}

// y[M]: the first of the largest numbers of each row of that product, in float32, or -1: see argmax in elementwise.h.
template <class X>
void linear_argmax(const Matrix<X>& x, int64_t num_rows, const Weight& w, int64_t* y) {
  gemm::Largest to(w, num_rows);
  gemm::multiply<std::remove_const_t<X>>(x, num_rows, w, to);
  for (int64_t row = 0; row < num_rows; ++row) y[row] = to.column(row);
}

}  // namespace quire
