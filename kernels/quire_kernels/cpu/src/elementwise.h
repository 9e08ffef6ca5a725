// Norms, rotary embedding, cache writes and gates, one token at a time.
#pragma once

#include "layout.h"
#include "matrix.h"
#include "pool.h"
#include "simd.h"

namespace quire {

// y = x / rms(x) * weight; with `residual` x becomes x + residual first, and is written back there.
// Rounds to T where the operator's definition does: the sum, the normalised x, the product. A float32 weight over a
// narrower T multiplies before the normalised x is rounded (as Gemma does it).
template <class T, class W>
inline void rms_norm(const T* x, T* residual, const W* weight, float eps, int size, const Row<T>& y) {
  vec squares = zero();
  alignas(64) T rounded[width];
  const T* from = x;
  for (int i = 0; i < size; i += width) {
    vec value = load(x + i);
    if (residual) {
      store(residual + i, add(value, load(residual + i)));
      value = load(residual + i);
    }
    squares = fma(value, value, squares);
  }
  if (residual) from = residual;
  vec factor = splat(1.0f / std::sqrt(sum(squares) / float(size) + eps));
  for (int i = 0; i < size; i += width) {
    vec value = mul(load(from + i), factor);
    if constexpr (std::is_same_v<T, W>) {
      store(rounded, value);
      value = load(rounded);
    }
    store(y.at(i), mul(value, load(weight + i)));
  }
}

template <class T, class W>
void rms_norm_rows(const T* x, int64_t ldx, T* residual, int64_t ldr, const W* weight, float eps, int size,
                   const Matrix<T>& y, int num_rows) {
  // Some four thousand numbers are worth a task.
  parallel_for(num_rows, 4096 / size, [&](int64_t row) {
    rms_norm(x + row * ldx, residual ? residual + row * ldr : nullptr, weight, eps, size, y.row(row));
  });
}

// y = rms_norm of each head of x, times silu(gate); the norm is rounded to T first. x and y are [num_tokens][num_heads][size].
template <class T, class W>
void gated_norm(const T* x, const T* gate, int64_t gate_stride, const W* weight, float eps, int size, int num_heads, T* y,
                int num_tokens) {
  parallel_for(num_tokens, 4096 / (size * num_heads), [&](int64_t token) {
    for (int64_t head = 0; head < num_heads; ++head) {
      const T* by = gate + token * gate_stride + head * size;
      const int64_t place = (token * num_heads + head) * size;
      rms_norm<T, W>(x + place, nullptr, weight, eps, size, {y + place, 0, 32});
      for (int i = 0; i < size; i += width) {
        const vec factor = load(by + i);
        store(y + place + i, mul(load(y + place + i), mul(factor, sigmoid(factor))));
      }
    }
  });
}

// residual = x + residual, where there is one; y is the sum.
template <class T>
void add_rows(const T* x, T* residual, int size, const Matrix<T>& y, int num_rows) {
  parallel_for(num_rows, 4096 / size, [&](int64_t row) {
    const Row<T> to = y.row(row);
    T* sum = residual ? residual + row * size : nullptr;
    for (int i = 0; i < size; i += width) {
      vec value = load(x + row * size + i);
      if (sum) {
        store(sum + i, add(value, load(sum + i)));
        value = load(sum + i);
      }
      store(to.at(i), value);
    }
  });
}

template <class T>
void scale(T* x, float factor, int64_t size) {
  for (int64_t i = 0; i < size; i += width) store(x + i, mul(load(x + i), splat(factor)));
}

// Rotates pairs (i, i + half) of one head in place or into y; what lies behind 2 * half is copied.
template <class T>
inline void rope_head(const T* x, const float* cosines, const float* sines, int half, int head_dim, T* y) {
  int i = 0;
  for (; i + width <= half; i += width) {
    vec first = load(x + i), second = load(x + half + i), c = load(cosines + i), s = load(sines + i);
    store(y + i, sub(mul(first, c), mul(second, s)));
    store(y + half + i, add(mul(second, c), mul(first, s)));
  }
  for (; i < half; ++i) {
    float first = to_float(x[i]), second = to_float(x[half + i]);
    y[i] = from_float<T>(first * cosines[i] - second * sines[i]);
    y[half + i] = from_float<T>(second * cosines[i] + first * sines[i]);
  }
  if (y != x && head_dim > 2 * half) std::memcpy(y + 2 * half, x + 2 * half, (head_dim - 2 * half) * sizeof(T));
}

// One token's head into its slot: `which` is 0 for keys, 1 for values.
template <class T>
inline void write_head(const T* x, const KVLayer& kv, int64_t slot, int which, int head) {
  int64_t block = slot / kv.block_size, offset = slot % kv.block_size;
  int64_t place = block * kv.block_stride + which * kv.kv_stride + head * kv.head_stride + offset * kv.head_dim;
  int size = kv.head_dim;
  if (kv.type == KVType::float32) {
    for (int i = 0; i < size; i += width) store(static_cast<float*>(kv.data) + place + i, load(x + i));
    return;
  }
  if (kv.type == KVType::bfloat16) {
    for (int i = 0; i < size; i += width) store(static_cast<bf16*>(kv.data) + place + i, load(x + i));
    return;
  }
  float most = 0;
  bool is_nan = false;
  for (int i = 0; i < size; ++i) {
    float value = std::fabs(to_float(x[i]));
    is_nan |= value != value;
    most = std::max(most, value);
  }
  if (is_nan) most = std::numeric_limits<float>::quiet_NaN();
  // Zeros get the smallest normal scale; an infinity makes the scale infinite and with it the head NaN.
  float smallest = std::numeric_limits<float>::min();
  bf16 scale = to_bf16(most / 127.0f < smallest ? smallest : most / 127.0f);
  float divisor = to_float(scale);
  int8_t* to = static_cast<int8_t*>(kv.data) + place;
  for (int i = 0; i < size; ++i) {
    float q = std::nearbyint(to_float(x[i]) / divisor);
    to[i] = q == q ? int8_t(std::min(127.0f, std::max(-127.0f, q))) : 0;
  }
  kv.scales[block * kv.scale_block_stride + which * kv.scale_kv_stride + head * kv.scale_head_stride + offset] = scale;
}

enum class NormKind : int32_t { each_head = 0, all_heads = 1, behind_rope = 2 };  // the last: of each head

// What lies between the projections and attention, for rows [query heads | key heads | value heads]: norms of
// queries and keys (null: none), rotary embedding in place, factors of queries (null: none), keys and values into
// the cache.
template <class T, class W>
void norm_rope_write(T* qkv, int64_t stride, int num_heads, NormKind kind, const W* query_norm, const W* key_norm,
                     float eps, const float* rotations, const int64_t* positions, int half,
                     const float* query_factors, const KVLayer& kv, const int64_t* slots, int num_tokens) {
  int size = kv.head_dim, num_rotated = num_heads + kv.num_kv_heads;
  parallel_for(num_tokens, 4096 / (size * (num_rotated + kv.num_kv_heads)), [&](int64_t token) {
    T* row = qkv + token * stride;
    const float *c = rotations + positions[token] * 2 * half, *s = c + half;
    auto normed = [&](T* x, const W* norm, int count) { rms_norm<T, W>(x, nullptr, norm, eps, count, {x, 0, 32}); };
    if (query_norm && kind == NormKind::all_heads) {
      normed(row, query_norm, num_heads * size);
      normed(row + num_heads * size, key_norm, kv.num_kv_heads * size);
    }
    for (int head = 0; head < num_rotated; ++head) {
      T* x = row + head * size;
      const W* norm = head < num_heads ? query_norm : key_norm;
      if (norm && kind == NormKind::each_head) normed(x, norm, size);
      rope_head(x, c, s, half, size, x);
      if (norm && kind == NormKind::behind_rope) normed(x, norm, size);
      if (query_factors && head < num_heads) scale(x, query_factors[token], size);
      if (head >= num_heads) write_head(x, kv, slots[token], 0, head - num_heads);
    }
    for (int head = 0; head < kv.num_kv_heads; ++head)
      write_head(row + (num_rotated + head) * size, kv, slots[token], 1, head);
  });
}

template <class T, class F, class G>
void gate_rows(const T* gate_up, int64_t stride, int size, T* y, int64_t ldy, int num_rows, F activate, G factor) {
  parallel_for(num_rows, 4096 / size, [&](int64_t row) {
    const T* gate = gate_up + row * stride;
    alignas(64) T rounded[width];
    for (int i = 0; i < size; i += width) {
      store(rounded, activate(load(gate + i)));
      store(y + row * ldy + i, mul(load(rounded), factor(load(gate + size + i))));
    }
  });
}

// Index of the first of the largest numbers of a row, or -1 where the largest is not finite or one is NaN.
inline int64_t argmax(const float* x, int64_t size) {
  float most = -std::numeric_limits<float>::infinity();
  float nan = 0;  // becomes NaN with the first one: 0 * x is 0 for all other numbers but infinities
  int64_t i = 0;
  vec mosts = splat(most), nans = zero();
  for (; i + width <= size; i += width) {
    vec value = load(x + i);
    mosts = max(mosts, value);
    nans = fma(zero(), value, nans);
  }
  for (; i < size; ++i) {
    most = std::max(most, x[i]);
    nan += 0 * x[i];
  }
  most = std::max(most, largest(mosts));
  nan += sum(nans);
  if (nan != nan) {
    // Banned tokens are at -inf; only NaN and +inf count.
    for (i = 0; i < size; ++i)
      if (x[i] != x[i]) return -1;
  }
  if (!std::isfinite(most)) return -1;
  for (i = 0; x[i] != most;) ++i;
  return i;
}

}  // namespace quire
