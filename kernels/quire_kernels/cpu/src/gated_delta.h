// Linear attention by the gated delta rule, and the causal convolution before it: what is kept of a sequence is a state of
// fixed size, in a block of its own, which each token changes.
//
// Both go over a sequence's tokens one by one, whatever chunk they arrive in, so a token's bits do not depend on its chunk.
// Tasks are (sequence, columns): columns of a state do not depend on each other, and few enough of them stay in the
// first-level cache while the tokens of a row pass. A pass over them applies a token and reads what the next one asks for:
// four operations, a load and a store for each number of a state. A scan over chunks would form products of matrices, three
// operations for each number and those within the chunk, but its sums would depend on where chunks begin.
#pragma once

#include "gemm.h"
#include "layout.h"
#include "pool.h"
#include "simd.h"

namespace quire {

// What a layer with states computes a batch with, beside its inputs; sequence i keeps its state in block block_table[i][0].
struct States {
  void* data;
  int64_t block_stride;  // elements from a block's state to the next
};

namespace delta {

constexpr int max_key_dim = 256;
constexpr int conv_channels = 256;  // of a task
constexpr int state_vectors = 4;  // of columns, of a task: 16 or 32 KiB of a state with 128 rows
constexpr int rows_ahead = 24;    // of a state: asked for before they are read
constexpr int max_tokens = 128;   // whose operands are computed ahead: 128 KiB of a key head of 128

inline bool begins(const Batch& batch, int64_t i) {
  return batch.seq_lens[i] == batch.query_start_loc[i + 1] - batch.query_start_loc[i];
}

template <class T>
T* state_of(const States& states, const Batch& batch, int64_t i) {
  return static_cast<T*>(states.data) + batch.block_table[i * batch.block_table_stride] * states.block_stride;
}

// y of tokens [t, t + N), for `width` channels from c on. input(t) is the row of token t.
template <int N, class T, class Input>
inline void convolve(Input&& input, int64_t t, int64_t c, int64_t num_channels, const T* weight, const T* bias, int num_taps,
                     bool activates, T* y) {
  vec total[N];
  for (int n = 0; n < N; ++n) total[n] = bias ? load(bias + c) : zero();
  for (int j = 0; j < num_taps; ++j) {
    const vec factor = load(weight + j * num_channels + c);
    for (int n = 0; n < N; ++n) total[n] = fma(load(input(t + n - num_taps + 1 + j) + c), factor, total[n]);
  }
  for (int n = 0; n < N; ++n) store(y + (t + n) * num_channels + c, activates ? mul(total[n], sigmoid(total[n])) : total[n]);
}

}  // namespace delta

// y[t][c] = sum of weight[j][c] * input t - (num_taps - 1) + j, plus bias[c] if there is one, then SiLU if it `activates`;
// states hold the last num_taps - 1 inputs, [num_taps - 1][num_channels]. Channels are a multiple of 16.
template <class T>
void causal_conv(const T* x, int64_t ldx, int64_t num_channels, const T* weight, const T* bias, int num_taps, bool activates,
                 const States& states, const Batch& batch, T* y) {
  constexpr int64_t step = delta::conv_channels;
  constexpr int together = 8;  // tokens
  const int64_t num_pieces = (num_channels + step - 1) / step, num_kept = num_taps - 1;
  parallel_for(batch.num_seqs * num_pieces, 1, [&](int64_t task) {
    const int64_t i = task / num_pieces, first = task % num_pieces * step, stop = std::min(num_channels, first + step);
    const int64_t begin = batch.query_start_loc[i], count = batch.query_start_loc[i + 1] - begin;
    T* kept = delta::state_of<T>(states, batch, i);
    if (delta::begins(batch, i))
      for (int64_t t = 0; t < num_kept; ++t) std::memset(kept + t * num_channels + first, 0, (stop - first) * sizeof(T));
    // Input t of the row; those before it are kept ones.
    auto input = [&](int64_t t) { return t < 0 ? kept + (num_kept + t) * num_channels : x + (begin + t) * ldx; };
    auto own = [&](int64_t t) { return x + (begin + t) * ldx; };
    T* to = y + begin * num_channels;
    int64_t t = 0;
    auto convolve_one = [&] {
      for (int64_t c = first; c < stop; c += width)
        delta::convolve<1>(input, t, c, num_channels, weight, bias, num_taps, activates, to);
      ++t;
    };
    while (t < std::min(num_kept, count)) convolve_one();
    for (; t + together <= count; t += together)
      for (int64_t c = first; c < stop; c += width)
        delta::convolve<together>(own, t, c, num_channels, weight, bias, num_taps, activates, to);
    while (t < count) convolve_one();
    // Ascending: what is read lies behind what is written.
    for (int64_t j = 0; j < num_kept; ++j)
      std::memmove(kept + j * num_channels + first, input(count - num_kept + j) + first, (stop - first) * sizeof(T));
  });
}

// The operands of the rule: T query and key [num_tokens][num_key_heads][key_dim], T value [num_tokens][num_heads][value_dim],
// T a and b [num_tokens][num_heads], float32 log_decay and step_bias [num_heads]. Strides are of tokens, in elements.
struct DeltaRule {
  const void *query, *key, *value, *a, *b;
  int64_t query_stride, key_stride, value_stride, a_stride, b_stride;
  const float *log_decay, *step_bias;
  int32_t num_key_heads, num_heads, key_dim, value_dim;  // dims are multiples of 16
};

namespace delta {

// What tokens [begin, end) of a batch bring to the states.
struct Operands {
  float* rows;     // [num_key_heads][max_tokens][2][key_dim]: the key with length 1, then the query with length 1 / sqrt(key_dim)
  float* overlap;  // [num_key_heads][max_tokens]: key times query
  float* gates;    // [num_heads][max_tokens][2]: decay, rate
  int64_t begin, end;
};

// to = x / |x| * scale
template <class T>
void normalise(const T* x, int size, float scale, float* to) {
  vec squares = zero();
  for (int i = 0; i < size; i += width) {
    const vec value = load(x + i);
    squares = fma(value, value, squares);
  }
  const vec factor = splat(scale / std::sqrt(sum(squares) + 1e-6f));
  for (int i = 0; i < size; i += width) store(to + i, mul(load(x + i), factor));
}

template <class T>
void prepare(const DeltaRule& rule, const Operands& operands, int64_t t, int64_t key_head) {
  const int key_dim = rule.key_dim;
  const int64_t place = key_head * max_tokens + t - operands.begin, group = rule.num_heads / rule.num_key_heads;
  float *key = operands.rows + place * 2 * key_dim, *query = key + key_dim;
  normalise(static_cast<const T*>(rule.key) + t * rule.key_stride + key_head * key_dim, key_dim, 1.0f, key);
  normalise(static_cast<const T*>(rule.query) + t * rule.query_stride + key_head * key_dim, key_dim,
            1.0f / std::sqrt(float(key_dim)), query);
  vec products = zero();
  for (int r = 0; r < key_dim; r += width) products = fma(load(key + r), load(query + r), products);
  operands.overlap[place] = sum(products);
  for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
    const float step = to_float(static_cast<const T*>(rule.a)[t * rule.a_stride + head]) + rule.step_bias[head];
    const float softplus = step > 20.0f ? step : std::log1p(std::exp(step));
    float* gates = operands.gates + (head * max_tokens + t - operands.begin) * 2;
    gates[0] = std::exp(-std::exp(rule.log_decay[head]) * softplus);
    gates[1] = 1.0f / (1.0f + std::exp(-to_float(static_cast<const T*>(rule.b)[t * rule.b_stride + head])));
  }
}

// What a token's key and its query find in N vectors of columns of a state, and what the token changes them by.
template <int N>
struct Token {
  vec found[N], asked[N], change[N];
};

// Goes over N vectors of columns of a state, from one place to another: applies a token (CHANGES), whose key and decay are
// `key` and `decay`, and reads the result for the next one (READS), whose key and query lie at `next`.
template <int N, bool CHANGES, bool READS>
inline void pass(const float* from, int64_t from_stride, float* to, int64_t to_stride, int key_dim, const float* key,
                 float decay, const float* next, Token<N>& token) {
  const vec kept = splat(decay);
  Token<N> sums;
  for (int v = 0; v < N; ++v) sums.found[v] = sums.asked[v] = zero(), sums.change[v] = token.change[v];
  for (int r = 0; r < key_dim; ++r, from += from_stride, to += to_stride)
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) {
      if constexpr (!CHANGES)
        _mm_prefetch(reinterpret_cast<const char*>(from + rows_ahead * from_stride + v * width), _MM_HINT_T0);
      vec s = load(from + v * width);
      if constexpr (CHANGES) s = fma(splat(key[r]), sums.change[v], mul(kept, s));
      store(to + v * width, s);
      if constexpr (READS) {
        sums.found[v] = fma(s, splat(next[r]), sums.found[v]);
        sums.asked[v] = fma(s, splat(next[key_dim + r]), sums.asked[v]);
      }
    }
  token = sums;
}

// Columns [first, first + N vectors) of a head's state over tokens [begin, end) of sequence i. Meanwhile the columns lie
// together, as rows of a state share few sets of the first-level cache; a single token changes them where they are.
template <int N, class T>
void scan(const DeltaRule& rule, const Operands& operands, const Batch& batch, int64_t i, int64_t begin, int64_t end,
          int64_t head, int64_t first, float* state, T* y) {
  const FlushSubnormals flush;
  alignas(64) float columns[max_key_dim * N * width];
  const int key_dim = rule.key_dim;
  const int64_t key_head = head / (rule.num_heads / rule.num_key_heads);
  const float* key = operands.rows + (key_head * max_tokens + begin - operands.begin) * 2 * key_dim;
  const float* overlap = operands.overlap + key_head * max_tokens - operands.begin;
  const float* gates = operands.gates + (head * max_tokens - operands.begin) * 2;
  const T* value = static_cast<const T*>(rule.value) + begin * rule.value_stride + head * rule.value_dim + first;
  T* out = y + (begin * rule.num_heads + head) * rule.value_dim + first;
  state += head * key_dim * rule.value_dim + first;
  Token<N> token;
  for (int v = 0; v < N; ++v) token.found[v] = token.asked[v] = token.change[v] = zero();
  const bool is_single = end == begin + 1;
  float* place = is_single ? state : columns;
  const int64_t stride = is_single ? rule.value_dim : N * width;
  if (begins(batch, i) && begin == batch.query_start_loc[i]) {
    for (int r = 0; r < key_dim; ++r)
      for (int v = 0; v < N; ++v) store(place + r * stride + v * width, zero());
  } else {
    pass<N, false, true>(state, rule.value_dim, place, stride, key_dim, nullptr, 1, key, token);
  }
  for (int64_t t = begin; t < end; ++t, key += 2 * key_dim) {
    const float decay = gates[2 * t], rate = gates[2 * t + 1];
    const vec kept = splat(decay);
    for (int v = 0; v < N; ++v) {
      token.change[v] = mul(sub(load(value + v * width), mul(kept, token.found[v])), splat(rate));
      store(out + v * width, fma(splat(overlap[t]), token.change[v], mul(kept, token.asked[v])));
    }
    value += rule.value_stride, out += rule.num_heads * rule.value_dim;
    if (t + 1 < end) {
      // Lines that are written, too: while the processor waits for one, the stores behind it wait.
      for (size_t byte = 0; byte < N * width * sizeof(T); byte += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(value) + byte, _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(out) + byte, _MM_HINT_T0);
      }
      pass<N, true, true>(place, stride, place, stride, key_dim, key, decay, key + 2 * key_dim, token);
    } else {
      pass<N, true, false>(place, stride, state, rule.value_dim, key_dim, key, decay, nullptr, token);
    }
  }
}

}  // namespace delta

// States are float32 [num_heads][key_dim][value_dim], y is [num_tokens][num_heads][value_dim].
template <class T>
void gated_delta_rule(const DeltaRule& rule, const States& states, const Batch& batch, T* y) {
  struct Memory;
  using delta::max_tokens;
  constexpr int64_t step = delta::state_vectors * width;
  const int64_t num_pieces = (rule.value_dim + step - 1) / step, each = rule.num_heads * num_pieces;
  const int64_t num_rows = rule.num_key_heads * max_tokens;
  delta::Operands operands;
  operands.rows = scratch<Memory, float>(num_rows * (2 * rule.key_dim + 1) + rule.num_heads * max_tokens * 2);
  operands.overlap = operands.rows + num_rows * 2 * rule.key_dim;
  operands.gates = operands.overlap + num_rows;
  int64_t row = 0;
  for (int64_t begin = 0; begin < batch.num_tokens; begin = operands.end) {
    const int64_t end = std::min<int64_t>(begin + max_tokens, batch.num_tokens);
    operands.begin = begin, operands.end = end;
    parallel_for(end - begin, 1, [&](int64_t token) {
      for (int64_t head = 0; head < rule.num_key_heads; ++head) delta::prepare<T>(rule, operands, begin + token, head);
    });
    while (batch.query_start_loc[row + 1] <= begin) ++row;
    int64_t last = row;
    while (batch.query_start_loc[last + 1] < end) ++last;
    parallel_for((last + 1 - row) * each, 1, [&](int64_t task) {
      const int64_t i = row + task / each, head = task % each / num_pieces, first = task % num_pieces * step;
      const int64_t from = std::max<int64_t>(begin, batch.query_start_loc[i]);
      const int64_t to = std::min<int64_t>(end, batch.query_start_loc[i + 1]);
      float* state = delta::state_of<float>(states, batch, i);
      if (first + step <= rule.value_dim) {
        delta::scan<delta::state_vectors>(rule, operands, batch, i, from, to, head, first, state, y);
      } else {
        for (int64_t c = first; c < rule.value_dim; c += width)
          delta::scan<1>(rule, operands, batch, i, from, to, head, c, state, y);
      }
    });
  }
}

}  // namespace quire
