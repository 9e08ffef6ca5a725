// Rows of logits after the model: what a log-softmax says of a few tokens, and grammars' masks.
#pragma once

#include <algorithm>

#include "pool.h"
#include "simd.h"

namespace quire {

// The `count` largest of what is offered, in descending order; of equals those offered first.
class TopList {
 public:
  TopList(int count, float* values, int64_t* ids) : count_(count), values_(values), ids_(ids) {}

  // What is not above it need not be offered.
  float bound() const { return size_ < count_ ? -std::numeric_limits<float>::infinity() : values_[count_ - 1]; }
  bool is_full() const { return size_ == count_; }

  void offer(float value, int64_t id) {
    if (is_full() && (count_ == 0 || !(value > values_[count_ - 1]))) return;
    int place = is_full() ? count_ - 1 : size_++;
    for (; place > 0 && value > values_[place - 1]; --place) {
      values_[place] = values_[place - 1];
      ids_[place] = ids_[place - 1];
    }
    values_[place] = value;
    ids_[place] = id;
  }

 private:
  int count_, size_ = 0;
  float* values_;
  int64_t* ids_;
};

// Log-probabilities of one row in a single pass over memory: y[0] is that of column `given`, y[1..count] those of the
// `count` most likely ones, whose columns go to ids[1..count]. Returns the given one's rank: 1 and how many are above it.
inline int64_t top_logprobs(const float* x, int64_t size, int64_t given, int count, float* y, int64_t* ids) {
  constexpr int64_t piece = 1024;  // columns: in the first-level cache between its maximum and its sum
  TopList top(count, y + 1, ids + 1);
  const vec value = splat(x[given]);
  int64_t num_above = 0;
  float most = -std::numeric_limits<float>::infinity();
  double total = 0;
  for (int64_t start = 0; start < size; start += piece) {
    const int64_t end = std::min(size, start + piece), whole = start + (end - start) / width * width;
    vec mosts = splat(-std::numeric_limits<float>::infinity()), sums = zero();
    for (int64_t i = start; i < whole; i += width) {
      const vec next = load(x + i);
      mosts = max(next, mosts);  // NaN is passed over: the sum will have it
      num_above += __builtin_popcount(lanes_above(next, value));
    }
    float here = largest(mosts);
    for (int64_t i = whole; i < end; ++i) {
      here = std::max(here, x[i]);
      num_above += x[i] > x[given];
    }
    const bool is_nothing = here == -std::numeric_limits<float>::infinity();
    const float base = is_nothing ? 0 : here;  // -inf less -inf would be NaN
    for (int64_t i = start; i < whole; i += width) sums = add(sums, exp(sub(load(x + i), splat(base))));
    double sum_here = sum(sums);
    for (int64_t i = whole; i < end; ++i) sum_here += std::exp(x[i] - base);
    if (here > most) {
      total = total * std::exp(double(most) - here) + sum_here;
      most = here;
    } else {
      total += is_nothing ? sum_here : sum_here * std::exp(double(here) - most);
    }
    if (count == 0 || (top.is_full() && !(here > top.bound()))) continue;
    for (int64_t i = start; i < end; i += width) {
      if (i < whole && top.is_full() && !lanes_above(load(x + i), splat(top.bound()))) continue;
      for (int64_t c = i; c < std::min(end, i + width); ++c) top.offer(x[c], c);
    }
  }
  const float log_sum = float(most + std::log(total));
  ids[0] = given;
  y[0] = x[given];
  for (int i = 0; i <= count; ++i) y[i] -= log_sum;
  return num_above + 1;
}

// Bit c % 32 of word c / 32 says whether column c stays; the others become -inf.
inline void forbid_others(float* x, int64_t size, const int32_t* allowed) {
  const vec lowest = splat(-std::numeric_limits<float>::infinity());
  for (int64_t start = 0; start < size; start += 32, ++allowed) {
    const uint32_t bits = uint32_t(*allowed);
    if (bits == ~0u) continue;
    if (start + 32 > size) {
      for (int64_t c = start; c < size; ++c)
        if (!(bits >> (c - start) & 1)) x[c] = -std::numeric_limits<float>::infinity();
    } else {
      for (int c = 0; c < 32; c += width) store(x + start + c, where_bits(bits >> c, load(x + start + c), lowest));
    }
  }
}

}  // namespace quire
