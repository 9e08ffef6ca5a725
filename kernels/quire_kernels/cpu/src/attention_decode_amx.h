// Attention of few query rows over bfloat16 keys and values, on the matrix unit.
//
// As attention_decode.h has it, split by split, with the same softmax: what differs are the two products. Sixteen keys
// are a tile as they lie in the cache, times the queries; values are brought into pairs of keys, 32 at a time in the
// first-level cache, and are multiplied by weights that are rounded to bfloat16. Two KV heads, which are neighbours in
// memory, are computed together, and so are sequences whose contexts begin with the same blocks: these are read once
// for all. A row's sums are its own in either product, in the order of its positions: its result does not depend on the
// rows beside it.
#pragma once

#if defined(__AMX_BF16__)

#include "amx.h"
#include "attention_call.h"
#include "attention_decode.h"
#include "gemm.h"

namespace quire {
namespace attention {

constexpr int tile_keys = 16;
constexpr int group_keys = 32;  // two tiles: what is computed, and asked for, at a time
constexpr int max_together = 16;  // rows, and so sequences

// Whether decode_tiles computes splits with so many rows of a sequence.
inline bool decodes_in_tiles(const KVLayer& kv, int rows) {
  const bool is_usual = kv.head_dim == 64 || kv.head_dim == 128 || kv.head_dim == 256;
  return kv.type == KVType::bfloat16 && kv.block_size % tile_keys == 0 && is_usual && rows <= max_together;
}

// Tiles 0 and 1 are sums, 2 and 3 what is multiplied from the left, 4 and 5 from the right.
inline void configure_products(int left_rows, int right_columns) {
  TileConfig config;
  for (int tile = 0; tile < 2; ++tile) {
    config.set(tile, left_rows, right_columns * 4);
    config.set(2 + tile, left_rows, 64);
    config.set(4 + tile, 16, right_columns * 4);
  }
  config.load();
}

// scores[r][k] of sums[16 keys][rows], whose rows are 64 bytes apart if there are three, or more than four.
inline void spread_scores(const float* sums, int rows, float* scores) {
  auto put = [&](int r, vec row) { store(scores + r * split_size, row); };
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  if (rows == 1) {
    put(0, load(sums));
  } else if (rows == 2) {
    vec a = load(sums), b = load(sums + 16);
    put(0, _mm512_permutex2var_ps(a, even, b));
    put(1, _mm512_permutex2var_ps(a, odd, b));
  } else if (rows == 4) {
    vec a = load(sums), b = load(sums + 16), c = load(sums + 32), d = load(sums + 48);
    // Rows 0 and 2, then 1 and 3, of eight keys each.
    for (int r = 0; r < 2; ++r) {
      vec front = _mm512_permutex2var_ps(a, r ? odd : even, b), back = _mm512_permutex2var_ps(c, r ? odd : even, d);
      put(r, _mm512_permutex2var_ps(front, even, back));
      put(r + 2, _mm512_permutex2var_ps(front, odd, back));
    }
  } else {
    vec square[16];
    for (int i = 0; i < 16; ++i) square[i] = load(sums + i * 16);
    transpose(square);
    for (int r = 0; r < rows; ++r) put(r, square[r]);
  }
}

// Asks for memory that several tiles fill, a few lines of each at a time: their blocks lie anywhere, and one alone does
// not keep the processor's prefetchers busy.
template <int SIZE>
class Ahead {
 public:
  explicit Ahead(const bf16* const* tiles) : tiles_(tiles) {}

  // The next LINES of each of four tiles.
  template <int LINES>
  void ask() {
    for (int line = 0; line < LINES; ++line)
      for (int t = 0; t < 4; ++t)
        _mm_prefetch(reinterpret_cast<const char*>(tiles_[t] + (done_ + line) * 32), _MM_HINT_T0);
    done_ += LINES;
    if (done_ == tile_keys * SIZE / 32) tiles_ += 4, done_ = 0;
  }

 private:
  const bf16* const* tiles_;
  int done_ = 0;
};

// A sequence's part of a split: positions [first, stop), of whose softmaxes and sums those of head i go to `to[i]`.
struct Member {
  int sequence, first, stop;
  float* to[2];  // as Partial has it
};

// One or two KV heads from `head` on of a split, for sequences with `rows` rows each, at most max_together in all. Their
// first `shared` positions, a multiple of group_keys and none of them new, are the same blocks. SIZE: of a head.
template <int SIZE, int HEADS>
inline void decode_tiles(const Call<bf16>& call, Member* members, int count, int rows, int shared, int head) {
  struct Query;
  struct Scores;
  struct Weights;
  struct Pairs;
  struct Sums;
  struct Context;
  const KVLayer& kv = call.kv;
  const int all_rows = count * rows;
  constexpr int split_tiles = split_size / tile_keys;

  // Consecutive positions, and whose they are. Sizes are those of whole groups.
  struct Segment {
    int member, members, begin, keys;  // keys [begin, begin + keys) of the split
  };
  Segment segments[max_together + 1];
  int num_segments = 0;
  // Tiles of keys and then of values, in the order in which they are used: of a group those of each head. The last of
  // a segment is repeated up to a group, and the last group for who asks ahead.
  const bf16** tiles = scratch<Context, const bf16*>((max_together + 1) * (split_tiles + 2) * HEADS * 2 + 4);
  int num_tiles = 0;
  auto add_segment = [&](int member, int of, int begin, int stop) {
    if (begin >= stop) return;
    const Member& who = members[member];
    const int32_t* blocks = call.batch.block_table + who.sequence * call.batch.block_table_stride;
    const bf16* data = static_cast<const bf16*>(kv.data) + head * kv.head_stride;
    for (int key = begin; key < (stop + group_keys - 1) / group_keys * group_keys; key += tile_keys) {
      const int position = who.first + std::min(key, (stop - 1) / tile_keys * tile_keys), index = position / kv.block_size;
      const bf16* tile = data + blocks[index] * kv.block_stride + int64_t(position - index * kv.block_size) * SIZE;
      for (int h = 0; h < HEADS; ++h) tiles[num_tiles++] = tile + h * kv.head_stride;
    }
    segments[num_segments++] = {member, of, begin, stop - begin};
  };
  add_segment(0, count, 0, shared);
  for (int m = 0; m < count; ++m) {
    members[m].first = members[m].first / tile_keys * tile_keys;
    add_segment(m, 1, shared, members[m].stop - members[m].first);
  }
  for (int t = 0; t < num_tiles; ++t) tiles[num_tiles + t] = tiles[t] + kv.kv_stride;
  std::fill_n(tiles + 2 * num_tiles, 4, tiles[2 * num_tiles - 1]);
  Ahead<SIZE> ahead(tiles);
  // The first ones are wanted at once.
  ahead.template ask<tile_keys * SIZE / 32>();
  const bf16* const* tile = tiles;

  // [HEADS][SIZE / 2][all_rows][2].
  int32_t* query = scratch<Query, int32_t>(size_t(HEADS) * SIZE / 2 * all_rows);
  for (int h = 0; h < HEADS; ++h)
    for (int r = 0; r < all_rows; ++r) {
      const bf16* from = call.query_row(members[r / rows].sequence, head + h, r % rows);
      int32_t* to = query + h * SIZE / 2 * all_rows + r;
      for (int d = 0; d < SIZE / 2; ++d) std::memcpy(to + d * all_rows, from + 2 * d, 4);
    }
  // [HEADS][all_rows][split_size], as all that follows.
  float* scores = scratch<Scores, float>(size_t(HEADS) * all_rows * split_size);
  alignas(64) float products[2][16 * 16] = {};
  for (int s = 0; s < num_segments; ++s) {
    const Segment& segment = segments[s];
    const int columns = segment.members * rows, stride = columns == 1 || columns == 2 || columns == 4 ? columns : 16;
    const int first_row = segment.member * rows;
    if (s == 0 || segment.members != segments[s - 1].members) configure_products(tile_keys, columns);
    for (int key = segment.begin; key < segment.begin + segment.keys; key += group_keys, tile += 2 * HEADS)
      for (int h = 0; h < HEADS; ++h) {
        // Tiles of a group: the first of each head, then the second.
        const bf16 *upper = tile[h], *lower = tile[HEADS + h];
        const int32_t* right = query + h * SIZE / 2 * all_rows + first_row;
        _tile_zero(0);
        _tile_zero(1);
        for (int d = 0; d < SIZE; d += 32) {
          ahead.template ask<4>();
          _tile_loadd(4, right + d / 2 * all_rows, all_rows * 4);
          _tile_loadd(2, upper + d, SIZE * 2);
          _tile_dpbf16ps(0, 2, 4);
          ahead.template ask<4>();
          _tile_loadd(3, lower + d, SIZE * 2);
          _tile_dpbf16ps(1, 3, 4);
        }
        _tile_stored(0, products[0], stride * 4);
        _tile_stored(1, products[1], stride * 4);
        for (int i = 0; i < 2; ++i)
          spread_scores(products[i], columns, scores + (h * all_rows + first_row) * split_size + key + i * tile_keys);
      }
  }

  // Weights after the last are zeros, up to a whole group.
  bf16* weights = scratch<Weights, bf16>(size_t(HEADS) * all_rows * split_size);
  for (int h = 0; h < HEADS; ++h)
    for (int r = 0; r < all_rows; ++r) {
      const Member& who = members[r / rows];
      const int keys = who.stop - who.first, padded = (keys + width - 1) / width * width;
      const int position = call.batch.seq_lens[who.sequence] - call.num_new(who.sequence) + r % rows / call.groups;
      const int begin = std::clamp(call.seen_from(position) - who.first, 0, keys);
      const int end = std::clamp(position + 1 - who.first, begin, keys);
      float* row = scores + (h * all_rows + r) * split_size;
      const Partial to(who.to[h], rows);
      softmax_row(call, nullptr, nullptr, begin, end, padded, row, to.peaks[r % rows], to.totals[r % rows]);
      for (int k = 0; k < (keys + group_keys - 1) / group_keys * group_keys; k += width)
        store(weights + (h * all_rows + r) * split_size + k, k < padded ? load(row + k) : zero());
    }

  // [HEADS][SIZE / 16][all_rows][16], of every 32 dimensions first the low halves of their four quarters.
  float* sums = scratch<Sums, float>(size_t(HEADS) * all_rows * SIZE);
  std::fill_n(sums, size_t(HEADS) * all_rows * SIZE, 0.0f);
  bf16* pairs = scratch<Pairs, bf16>(size_t(group_keys) * SIZE);  // [SIZE / 16][16 pairs][16][2]
  for (int s = 0; s < num_segments; ++s) {
    const Segment& segment = segments[s];
    const int first_row = segment.member * rows;
    if (s == 0 || segment.members != segments[s - 1].members) configure_products(segment.members * rows, 16);
    for (int done = 0; done < segment.keys; done += group_keys, tile += 2 * HEADS)
      for (int h = 0; h < HEADS; ++h) {
        auto bring = [&](int k, bool both, bool one) {
          const bf16* from = tile[k / tile_keys * HEADS + h] + k % tile_keys * SIZE;
          ahead.template ask<SIZE / 64>();
          for (int d = 0; d < SIZE; d += 32) {
            __m512i a = one ? _mm512_load_si512(from + d) : _mm512_setzero_si512();
            __m512i b = both ? _mm512_load_si512(from + SIZE + d) : _mm512_setzero_si512();
            _mm512_store_si512(pairs + d * group_keys + k * 16, _mm512_unpacklo_epi16(a, b));
            _mm512_store_si512(pairs + (d + 16) * group_keys + k * 16, _mm512_unpackhi_epi16(a, b));
          }
        };
        // Nothing is known of the memory after the last value.
        const int left = segment.keys - done;
        if (left >= group_keys)
          for (int k = 0; k < group_keys; k += 2) bring(k, true, true);
        else
          for (int k = 0; k < group_keys; k += 2) bring(k, k + 1 < left, k < left);
        Tiles::sync();
        _tile_loadd(2, weights + (h * all_rows + first_row) * split_size + segment.begin + done, split_size * 2);
        for (int d = 0; d < SIZE; d += 32) {
          float* low = sums + (h * SIZE + d) * all_rows + first_row * 16;
          float* high = low + 16 * all_rows;
          _tile_loadd(0, low, 64);
          _tile_loadd(4, pairs + d * group_keys, 64);
          _tile_dpbf16ps(0, 2, 4);
          _tile_stored(0, low, 64);
          _tile_loadd(1, high, 64);
          _tile_loadd(5, pairs + (d + 16) * group_keys, 64);
          _tile_dpbf16ps(1, 2, 5);
          _tile_stored(1, high, 64);
        }
      }
  }
  const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i back = _mm512_add_epi32(front, _mm512_set1_epi32(8));
  for (int h = 0; h < HEADS; ++h)
    for (int r = 0; r < all_rows; ++r) {
      float* to = Partial(members[r / rows].to[h], rows).sums + r % rows * SIZE;
      for (int d = 0; d < SIZE; d += 32) {
        const float* low = sums + (h * SIZE + d) * all_rows + r * 16;
        vec first = load(low), second = load(low + 16 * all_rows);
        store(to + d, _mm512_permutex2var_ps(first, front, second));
        store(to + d + 16, _mm512_permutex2var_ps(first, back, second));
      }
    }
}

inline void decode_tiles(const Call<bf16>& call, Member* members, int count, int rows, int shared, int head, int heads) {
  auto with_size = [&](auto size) {
    if (heads == 2) decode_tiles<size, 2>(call, members, count, rows, shared, head);
    else decode_tiles<size, 1>(call, members, count, rows, shared, head);
  };
  switch (call.kv.head_dim) {
    case 64: return with_size(std::integral_constant<int, 64>());
    case 128: return with_size(std::integral_constant<int, 128>());
    default: return with_size(std::integral_constant<int, 256>());
  }
}

}  // namespace attention
}  // namespace quire

#endif
