// A product of each head: y[token][head] = W[head] x[token][head]. The threads share the products of all heads.
#pragma once

#include "matrix.h"
#include "moe.h"

namespace quire {

// All weights have one shape and one format, without activation. Strides of tokens and of heads are in elements.
template <class T>
void head_linear(const T* x, int64_t x_stride, int64_t x_head_stride, int64_t num_tokens, const Weight* weights,
                 int64_t num_heads, T* y, int64_t y_stride, int64_t y_head_stride) {
  using namespace gemm;
  if (num_tokens == 0) return;
  with_input<T>(*weights, [&](auto* type) {
    using Input = std::remove_pointer_t<decltype(type)>;
    const auto inputs = prepared_inputs<Input>(
        num_heads, [&](int64_t) { return num_tokens; },
        [&](int64_t head) { return Matrix<const T>{x + head * x_head_stride, x_stride}; },
        [&](int64_t head) { return weights[head]; });
    const Split split(num_tokens, *weights, num_heads);
    parallel_for_all(
        num_heads, [&](int64_t) { return split.num_tasks(); },
        [&](int64_t head, int64_t task) {
          const Part part = split.part(int(task));
          Stored<T> to{weights[head], Matrix<T>{y + head * y_head_stride, y_stride}};
          if (part.rows > 0) inputs[head].multiply(part, weights[head], to);
        });
  });
}

}  // namespace quire
