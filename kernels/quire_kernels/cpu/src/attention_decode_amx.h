// Attention of few query rows over bfloat16 keys and values, on the matrix unit.
//
// As attention_decode.h has it, split by split and unit by unit, with the same softmax: what differs are the two products. Sixteen keys
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

// A sequence's part of a split: positions [first, stop), of whose units' softmaxes and sums those of head i go to `to[i]`.
struct Member {
  int sequence, first, stop;
  float* to[2];  // Partials
};

// One or two KV heads from `head` on of a split, for sequences with `rows` rows each, at most max_together in all. Their
// first `shared` positions, a multiple of group_keys and none of them new, are the same blocks. SIZE: of a head.
// `stride`: numbers between the Partials of two units.
template <int SIZE, int HEADS>
inline void decode_tiles(const Call<bf16>& call, const Member* members, int count, int rows, int shared, int head,
                         int64_t stride) {
  struct Query;
  struct Scores;
  struct Weights;
  struct Pairs;
  struct Sums;
  struct Context;
  const KVLayer& kv = call.kv;
  const int all_rows = count * rows;
  constexpr int split_tiles = split_size / tile_keys, max_units = split_size / unit_size;
  const int split = members[0].first / split_size * split_size;  // all keys count from here

  // Consecutive positions of a unit, and whose they are. A segment begins with a group of keys; the first `skip` of them nobody
  // sees.
  struct Segment {
    int member, members, begin, skip, keys;  // keys [begin + skip, begin + keys) of the split
  };
  Segment segments[(max_together + 1) * max_units];
  int num_segments = 0;
  // Tiles of keys and then of values, in the order in which they are used: of a group those of each head. The last of
  // a segment is repeated up to a group, and the last group for who asks ahead.
  const bf16** tiles = scratch<Context, const bf16*>((max_together + 1) * (split_tiles + 2) * HEADS * 2 + 4);
  int num_tiles = 0;
  auto add_segments = [&](int member, int of, int first, int stop) {
    const int32_t* blocks = call.batch.block_table + members[member].sequence * call.batch.block_table_stride;
    const bf16* data = static_cast<const bf16*>(kv.data) + head * kv.head_stride;
    for (int begin = first / group_keys * group_keys, end; begin < stop; begin = end) {
      end = std::min(begin / unit_size * unit_size + unit_size, stop);
      const int skip = std::max(first - begin, 0);
      for (int key = begin; key < (end + group_keys - 1) / group_keys * group_keys; key += tile_keys) {
        // Where there is no tile the nearest is taken.
        const int there = std::clamp(key, (begin + skip) / tile_keys * tile_keys, (end - 1) / tile_keys * tile_keys);
        const int index = (split + there) / kv.block_size, offset = split + there - index * kv.block_size;
        const bf16* tile = data + blocks[index] * kv.block_stride + int64_t(offset) * SIZE;
        for (int h = 0; h < HEADS; ++h) tiles[num_tiles++] = tile + h * kv.head_stride;
      }
      segments[num_segments++] = {member, of, begin, skip, end - begin};
    }
  };
  add_segments(0, count, 0, shared);
  for (int m = 0; m < count; ++m)
    add_segments(m, 1, std::max(shared, members[m].first - split), members[m].stop - split);
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

  // Weights of keys that a row does not see are zeros, up to whole groups.
  bf16* weights = scratch<Weights, bf16>(size_t(HEADS) * all_rows * split_size);
  // Calls f(unit, its first key, its last) for those of a member's part, whole groups.
  auto for_units = [&](const Member& who, auto&& f) {
    const int first = (who.first - split) / group_keys * group_keys, stop = who.stop - split;
    for (int begin = first, end, u = 0; begin < stop; begin = end, ++u) {
      end = std::min(begin / unit_size * unit_size + unit_size, (stop + group_keys - 1) / group_keys * group_keys);
      f(u, begin, end);
    }
  };
  for (int h = 0; h < HEADS; ++h)
    for (int r = 0; r < all_rows; ++r) {
      const Member& who = members[r / rows];
      const int position = call.batch.seq_lens[who.sequence] - call.num_new(who.sequence) + r % rows / call.groups - split;
      const int seen_from = std::max(call.seen_from(position + split), who.first) - split;
      for_units(who, [&](int u, int begin, int end) {
        const int64_t row = (h * all_rows + r) * split_size + begin;
        const int from = std::clamp(seen_from - begin, 0, end - begin);
        const int to = std::clamp(std::min(position + 1, who.stop - split) - begin, from, end - begin);
        const Partial result(who.to[h] + u * stride, rows);
        softmax_row(call, nullptr, nullptr, from, to, end - begin, scores + row, result.peaks[r % rows],
                    result.totals[r % rows], [&](int k, vec weight) { store(weights + row + k, weight); });
      });
    }

  // [max_units][HEADS][SIZE / 16][all_rows][16], of every 32 dimensions first the low halves of their four quarters.
  const int64_t unit_sums = int64_t(HEADS) * all_rows * SIZE;
  float* sums = scratch<Sums, float>(max_units * unit_sums);
  std::fill_n(sums, max_units * unit_sums, 0.0f);
  bf16* pairs = scratch<Pairs, bf16>(size_t(group_keys) * SIZE);  // [SIZE / 16][16 pairs][16][2]
  for (int s = 0; s < num_segments; ++s) {
    const Segment& segment = segments[s];
    const int first_row = segment.member * rows;
    if (s == 0 || segment.members != segments[s - 1].members) configure_products(segment.members * rows, 16);
    for (int done = 0; done < segment.keys; done += group_keys, tile += 2 * HEADS)
      for (int h = 0; h < HEADS; ++h) {
        auto bring = [&](int k, bool second, bool first) {
          const bf16* from = tile[k / tile_keys * HEADS + h] + k % tile_keys * SIZE;
          ahead.template ask<SIZE / 64>();
          for (int d = 0; d < SIZE; d += 32) {
            __m512i a = first ? _mm512_load_si512(from + d) : _mm512_setzero_si512();
            __m512i b = second ? _mm512_load_si512(from + SIZE + d) : _mm512_setzero_si512();
            _mm512_store_si512(pairs + d * group_keys + k * 16, _mm512_unpacklo_epi16(a, b));
            _mm512_store_si512(pairs + (d + 16) * group_keys + k * 16, _mm512_unpackhi_epi16(a, b));
          }
        };
        // Nothing is known of the memory before the first value and after the last.
        const int skip = segment.skip - done, left = segment.keys - done;
        auto is_there = [&](int k) { return k >= skip && k < left; };
        if (skip <= 0 && left >= group_keys)
          for (int k = 0; k < group_keys; k += 2) bring(k, true, true);
        else
          for (int k = 0; k < group_keys; k += 2) bring(k, is_there(k + 1), is_there(k));
        Tiles::sync();
        _tile_loadd(2, weights + (h * all_rows + first_row) * split_size + segment.begin + done, split_size * 2);
        for (int d = 0; d < SIZE; d += 32) {
          float* low = sums + segment.begin / unit_size * unit_sums + (h * SIZE + d) * all_rows + first_row * 16;
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
    for (int r = 0; r < all_rows; ++r)
      for_units(members[r / rows], [&](int u, int begin, int) {
        float* to = Partial(members[r / rows].to[h] + u * stride, rows).sums + r % rows * SIZE;
        for (int d = 0; d < SIZE; d += 32) {
          const float* low = sums + begin / unit_size * unit_sums + (h * SIZE + d) * all_rows + r * 16;
          vec first = load(low), second = load(low + 16 * all_rows);
          store(to + d, _mm512_permutex2var_ps(first, front, second));
          store(to + d + 16, _mm512_permutex2var_ps(first, back, second));
        }
      });
}

inline void decode_tiles(const Call<bf16>& call, const Member* members, int count, int rows, int shared, int head, int heads,
                         int64_t stride) {
  auto with_size = [&](auto size) {
    if (heads == 2) decode_tiles<size, 2>(call, members, count, rows, shared, head, stride);
    else decode_tiles<size, 1>(call, members, count, rows, shared, head, stride);
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
