// Linear attention by the gated delta rule, and the causal convolution before it: what is kept of a sequence is a state of
// fixed size, in a block of its own, which each token changes.
//
// Both go over a sequence's tokens one by one, whatever chunk they arrive in, so a token's bits do not depend on its chunk.
// Tasks are (sequence, columns): columns of a state do not depend on each other, and few enough of them stay in the
// first-level cache while all tokens of a row pass.
#pragma once

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
constexpr int conv_vectors = 4, state_vectors = 4;

inline bool begins(const Batch& batch, int64_t i) {
  return batch.seq_lens[i] == batch.query_start_loc[i + 1] - batch.query_start_loc[i];
}

template <class T>
T* state_of(const States& states, const Batch& batch, int64_t i) {
  return static_cast<T*>(states.data) + batch.block_table[i * batch.block_table_stride] * states.block_stride;
}

}  // namespace delta

// y[t][c] = silu(sum of weight[j][c] * input t - (num_taps - 1) + j); states hold the last num_taps - 1 inputs,
// [num_taps - 1][num_channels]. Channels are a multiple of 16.
template <class T>
void causal_conv(const T* x, int64_t ldx, int64_t num_channels, const T* weight, int num_taps, const States& states,
                 const Batch& batch, T* y) {
  constexpr int64_t step = delta::conv_vectors * width;
  const int64_t num_pieces = (num_channels + step - 1) / step, num_kept = num_taps - 1;
  parallel_for(batch.num_seqs * num_pieces, 1, [&](int64_t task) {
    const int64_t i = task / num_pieces, first = task % num_pieces * step, stop = std::min(num_channels, first + step);
    const int64_t begin = batch.query_start_loc[i], count = batch.query_start_loc[i + 1] - begin;
    T* kept = delta::state_of<T>(states, batch, i);
    if (delta::begins(batch, i))
      for (int64_t t = 0; t < num_kept; ++t) std::memset(kept + t * num_channels + first, 0, (stop - first) * sizeof(T));
    // Input t of the row; those before it are kept ones.
    auto input = [&](int64_t t) { return t < 0 ? kept + (num_kept + t) * num_channels : x + (begin + t) * ldx; };
    for (int64_t t = 0; t < count; ++t)
      for (int64_t c = first; c < stop; c += width) {
        vec total = zero();
        for (int64_t j = 0; j < num_taps; ++j)
          total = fma(load(input(t - num_kept + j) + c), load(weight + j * num_channels + c), total);
        store(y + (begin + t) * num_channels + c, mul(total, sigmoid(total)));
      }
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

// Columns [first, first + N vectors) of a head's state over all tokens of a sequence.
template <int N, class T>
void scan(const DeltaRule& rule, const Batch& batch, int64_t i, int64_t head, int64_t first, float* state, T* y) {
  alignas(64) float query[max_key_dim], key[max_key_dim];
  const int key_dim = rule.key_dim, value_dim = rule.value_dim;
  const int64_t key_place = head / (rule.num_heads / rule.num_key_heads) * key_dim;
  const int64_t place = head * value_dim + first;
  const float speed = std::exp(rule.log_decay[head]), bias = rule.step_bias[head];
  const float scale = 1.0f / std::sqrt(float(key_dim));
  float* columns = state + head * key_dim * value_dim + first;
  if (begins(batch, i))
    for (int r = 0; r < key_dim; ++r)
      for (int v = 0; v < N; ++v) store(columns + int64_t(r) * value_dim + v * width, zero());
  for (int64_t t = batch.query_start_loc[i]; t < batch.query_start_loc[i + 1]; ++t) {
    normalise(static_cast<const T*>(rule.query) + t * rule.query_stride + key_place, key_dim, scale, query);
    normalise(static_cast<const T*>(rule.key) + t * rule.key_stride + key_place, key_dim, 1.0f, key);
    const float step = to_float(static_cast<const T*>(rule.a)[t * rule.a_stride + head]) + bias;
    const float softplus = step > 20.0f ? step : std::log1p(std::exp(step));
    const float decay = std::exp(-speed * softplus);
    const float rate = 1.0f / (1.0f + std::exp(-to_float(static_cast<const T*>(rule.b)[t * rule.b_stride + head])));
    // The state after the token is decay * S + key x delta, so one pass over S gives what the keys find in it and what the
    // query does, and a second one changes it.
    vec found[N], asked[N], delta[N];
    for (int v = 0; v < N; ++v) found[v] = asked[v] = zero();
    for (int r = 0; r < key_dim; ++r)
      for (int v = 0; v < N; ++v) {
        const vec s = load(columns + int64_t(r) * value_dim + v * width);
        found[v] = fma(s, splat(key[r]), found[v]);
        asked[v] = fma(s, splat(query[r]), asked[v]);
      }
    vec products = zero();
    for (int r = 0; r < key_dim; r += width) products = fma(load(key + r), load(query + r), products);
    const vec overlap = splat(sum(products)), kept = splat(decay);
    const T* value = static_cast<const T*>(rule.value) + t * rule.value_stride + place;
    T* out = y + t * rule.num_heads * value_dim + place;
    for (int v = 0; v < N; ++v) {
      delta[v] = mul(sub(load(value + v * width), mul(kept, found[v])), splat(rate));
      store(out + v * width, fma(overlap, delta[v], mul(kept, asked[v])));
    }
    for (int r = 0; r < key_dim; ++r)
      for (int v = 0; v < N; ++v) {
        float* s = columns + int64_t(r) * value_dim + v * width;
        store(s, fma(splat(key[r]), delta[v], mul(kept, load(s))));
      }
  }
}

}  // namespace delta

// States are float32 [num_heads][key_dim][value_dim], y is [num_tokens][num_heads][value_dim].
template <class T>
void gated_delta_rule(const DeltaRule& rule, const States& states, const Batch& batch, T* y) {
  constexpr int64_t step = delta::state_vectors * width;
  const int64_t num_pieces = (rule.value_dim + step - 1) / step, each = rule.num_heads * num_pieces;
  parallel_for(batch.num_seqs * each, 1, [&](int64_t task) {
    const int64_t i = task / each, head = task % each / num_pieces, first = task % num_pieces * step;
    float* state = delta::state_of<float>(states, batch, i);
    if (first + step <= rule.value_dim) {
      delta::scan<delta::state_vectors>(rule, batch, i, head, first, state, y);
    } else {
      for (int64_t c = first; c < rule.value_dim; c += width) delta::scan<1>(rule, batch, i, head, c, state, y);
    }
  });
}

}  // namespace quire
