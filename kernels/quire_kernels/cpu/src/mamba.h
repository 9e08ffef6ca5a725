// Mamba-2: linear attention whose state decays by a number per head and token. As with the gated delta rule, a sequence's state
// lies in a block of its own, and its tokens pass one by one, so a token's bits do not depend on its chunk.
#pragma once

#include "gated_delta.h"

namespace quire {

// The operands of Mamba-2: T x and gate [num_tokens][num_heads][head_dim], T b and c [num_tokens][num_groups][state_dim], T step
// [num_tokens][num_heads]; float32 log_decay, step_bias and skip [num_heads], norm [num_heads * head_dim]. Strides are of tokens,
// in elements.
struct StateSpace {
  const void *x, *b, *c, *step, *gate;
  int64_t x_stride, b_stride, c_stride, step_stride, gate_stride;
  const float *log_decay, *step_bias, *skip, *norm;
  float least_step, most_step, eps;
  int32_t num_heads, head_dim, num_groups, state_dim;  // dims are multiples of 16
};

namespace ssm {

constexpr int max_state_dim = 256;

// Columns [first, first + N vectors) of a head's state over all tokens of a sequence; sums are [num_tokens][num_heads][head_dim].
template <int N, class T>
void scan(const StateSpace& space, const Batch& batch, int64_t i, int64_t head, int64_t first, float* state, float* sums) {
  alignas(64) float b[max_state_dim], c[max_state_dim];
  const int state_dim = space.state_dim, head_dim = space.head_dim;
  const int64_t group_place = head / (space.num_heads / space.num_groups) * state_dim, place = head * head_dim + first;
  const float speed = std::exp(space.log_decay[head]), bias = space.step_bias[head];
  const vec skip = splat(space.skip[head]);
  float* columns = state + head * state_dim * head_dim + first;
  if (delta::begins(batch, i))
    for (int r = 0; r < state_dim; ++r)
      for (int v = 0; v < N; ++v) store(columns + int64_t(r) * head_dim + v * width, zero());
  for (int64_t t = batch.query_start_loc[i]; t < batch.query_start_loc[i + 1]; ++t) {
    const T* b_of_token = static_cast<const T*>(space.b) + t * space.b_stride + group_place;
    const T* c_of_token = static_cast<const T*>(space.c) + t * space.c_stride + group_place;
    for (int r = 0; r < state_dim; r += width) {
      store(b + r, load(b_of_token + r));
      store(c + r, load(c_of_token + r));
    }
    const float raw = to_float(static_cast<const T*>(space.step)[t * space.step_stride + head]) + bias;
    const float softplus = raw > 20.0f ? raw : std::log1p(std::exp(raw));
    const float step = std::min(std::max(softplus, space.least_step), space.most_step);
    const vec decay = splat(std::exp(-speed * step));
    const T* x = static_cast<const T*>(space.x) + t * space.x_stride + place;
    float* out = sums + t * space.num_heads * head_dim + place;
    vec input[N], total[N];
    for (int v = 0; v < N; ++v) {
      const vec own = load(x + v * width);
      input[v] = mul(own, splat(step));
      total[v] = mul(own, skip);
    }
    for (int r = 0; r < state_dim; ++r)
      for (int v = 0; v < N; ++v) {
        float* place_in_state = columns + int64_t(r) * head_dim + v * width;
        const vec s = fma(splat(b[r]), input[v], mul(decay, load(place_in_state)));
        store(place_in_state, s);
        total[v] = fma(splat(c[r]), s, total[v]);
      }
    for (int v = 0; v < N; ++v) store(out + v * width, total[v]);
  }
}

// y = norm * (sums * silu(gate)) / the root mean square of that, over the channels of one group of one token.
template <class T>
void norm_of_group(const StateSpace& space, int64_t t, int64_t group, float* sums, T* y) {
  const int64_t all = int64_t(space.num_heads) * space.head_dim, size = all / space.num_groups, first = group * size;
  const T* gate = static_cast<const T*>(space.gate) + t * space.gate_stride + first;
  float* own = sums + t * all + first;
  vec squares = zero();
  for (int64_t c = 0; c < size; c += width) {
    const vec z = load(gate + c);
    const vec gated = mul(load(own + c), mul(z, sigmoid(z)));
    store(own + c, gated);
    squares = fma(gated, gated, squares);
  }
  const vec factor = splat(1.0f / std::sqrt(sum(squares) / float(size) + space.eps));
  for (int64_t c = 0; c < size; c += width) store(y + t * all + first + c, mul(mul(load(own + c), factor), load(space.norm + first + c)));
}

}  // namespace ssm

// States are float32 [num_heads][state_dim][head_dim]; y is [num_tokens][num_heads][head_dim], and so is `sums`, which is
// overwritten.
template <class T>
void mamba2(const StateSpace& space, const States& states, const Batch& batch, float* sums, T* y) {
  constexpr int64_t step = delta::state_vectors * width;
  const int64_t num_pieces = (space.head_dim + step - 1) / step, each = space.num_heads * num_pieces;
  parallel_for(batch.num_seqs * each, 1, [&](int64_t task) {
    const int64_t i = task / each, head = task % each / num_pieces, first = task % num_pieces * step;
    float* state = delta::state_of<float>(states, batch, i);
    if (first + step <= space.head_dim) {
      ssm::scan<delta::state_vectors, T>(space, batch, i, head, first, state, sums);
    } else {
      for (int64_t c = first; c < space.head_dim; c += width) ssm::scan<1, T>(space, batch, i, head, c, state, sums);
    }
  });
  parallel_for(int64_t(batch.num_tokens) * space.num_groups, 1, [&](int64_t task) {
    ssm::norm_of_group(space, task / space.num_groups, task % space.num_groups, sums, y);
  });
}

}  // namespace quire
