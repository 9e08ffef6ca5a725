// Mixture of experts: each token is computed by a few of a layer's gated feed-forward parts, whose results are added.
//
// Tokens are brought together by experts. Then there are two phases, and in each the threads share the products of all
// experts that have tokens: gate and up, split as any product; and down, split by columns alone. There a task computes its
// columns of one expert after the other, and adds what comes of a token, times the expert's share, in float32: a token's
// sum has the order of its experts' numbers, whatever tokens are beside it. Weights of other experts are not touched.
#pragma once

#include <vector>

#include "gemm.h"
#include "gemm_avx2.h"
#include "gemm_grouped.h"
#include "gemm_int8.h"
#include "matrix.h"
#include "pool.h"

namespace quire {

// All have one format of gate_up and of down, and one number of inputs of gate_up, a multiple of 32, which `down`, plain,
// has as columns. A shared expert is the last one.
struct Experts {
  const Weight *gate_up, *down;  // [num_experts]
  int32_t num_experts, num_chosen;
};

enum class Scoring : int32_t { softmax = 0, sigmoid = 1 };
enum class Shared : int32_t { none = 0, whole = 1, gated = 2 };

// How experts are chosen and weighed: see Routing in routing.py.
struct Routing {
  const float* bias;  // [num_experts], or null
  Scoring scoring;
  Shared shared;
  int32_t num_experts, num_chosen;  // without the shared one
  int32_t num_groups, num_chosen_groups, group_best;
  int32_t renormalizes;
  float least_sum, scale, epsilon;  // epsilon: of sums of sigmoids

  int num_logits() const { return num_experts + (shared == Shared::gated); }
  int num_routes() const { return num_chosen + (shared != Shared::none); }
};

namespace gemm {

// Rows of an expert: [first, first + count) of those in the order of experts.
struct ExpertRows {
  const Weight *gate_up, *down;
  int64_t first, count;
};

// Inputs of the products of rows_of(i) rows x_of(i) with weights w_of(i), for every i of [0, num).
template <class Input, class Rows, class X, class W>
std::vector<Input> prepared_inputs(int64_t num, Rows&& rows_of, X&& x_of, W&& w_of) {
  struct Memory;
  Arena sizes, arena;
  std::vector<Input> inputs;
  for (Arena* each : {&sizes, &arena}) {
    inputs.clear();
    if (each == &arena) arena.memory = scratch<Memory, char>(sizes.size);
    for (int64_t i = 0; i < num; ++i) inputs.emplace_back(x_of(i), rows_of(i), w_of(i), *each);
  }
  const int64_t each = std::max<int64_t>(1, inputs[0].pieces_each());
  parallel_for_all(
      num, [&](int64_t i) { return (inputs[i].num_pieces() + each - 1) / each; },
      [&](int64_t i, int64_t task) {
        const int64_t stop = std::min(inputs[i].num_pieces(), (task + 1) * each);
        for (int64_t piece = task * each; piece < stop; ++piece) inputs[i].prepare(piece);
      });
  return inputs;
}

// Adds a product of an expert's rows to the sums of their tokens: [tokens][columns], from `first_block` on.
struct Weighted {
  const Weight& w;
  const int64_t* tokens;  // of each row
  const float* shares;
  float* sums;
  int64_t columns, first_block;

  void take(const Part& part, const float* products) const {
    for (int b = 0; b < part.blocks; ++b)
      for (int r = 0; r < part.rows; ++r, products += block_columns) {
        alignas(64) float values[block_columns];
        finish(w, part.first_block + b, 1, products, values, block_columns);
        const int64_t row = part.first_row + r;
        float* to = sums + tokens[row] * columns + (part.first_block - first_block + b) * block_columns;
        for (int c = 0; c < block_columns; c += width)
          store(to + c, fma(splat(shares[row]), load(values + c), load(to + c)));
      }
  }
};

}  // namespace gemm

// Places in [begin, end) of the largest numbers (of equal ones the first; NaN is the largest), in descending order, merged
// into the `count` of them that are there, of places before; at most `most` stay.
inline int choose(const float* values, int begin, int end, int most, int64_t* chosen, int count) {
  auto is_larger = [](float a, float b) { return a > b || (a != a && b == b); };
  for (int i = begin; i < end; ++i) {
    int place = count;
    while (place > 0 && is_larger(values[i], values[chosen[place - 1]])) --place;
    if (place == most) continue;
    count = std::min(count + 1, most);
    std::copy_backward(chosen + place, chosen + count - 1, chosen + count);
    chosen[place] = i;
  }
  return count;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// The experts of a token, those of the largest scores, in descending order; and their shares.
inline void route(const float* logits, const Routing& routing, int64_t* experts, float* shares) {
  struct Scores;
  struct Groups;
  struct Best;
  const int num_experts = routing.num_experts, num_chosen = routing.num_chosen;
  const bool is_sigmoid = routing.scoring == Scoring::sigmoid, has_groups = routing.num_chosen_groups < routing.num_groups;
  auto total_of = [&](float most) {
    float total = 0;
    for (int expert = 0; expert < num_experts; ++expert) total += std::exp(logits[expert] - most);
    return total;
  };

  const float* choice = logits;  // softmax keeps their order, where nothing is added to or of it
  if (is_sigmoid || has_groups || routing.bias) {
    float* scores = scratch<Scores, float>(num_experts);
    int64_t first;
    if (!is_sigmoid) choose(logits, 0, num_experts, 1, &first, 0);
    const float most = is_sigmoid ? 0 : logits[first], total = is_sigmoid ? 0 : total_of(most);
    for (int expert = 0; expert < num_experts; ++expert) {
      scores[expert] = is_sigmoid ? sigmoid(logits[expert]) : std::exp(logits[expert] - most) / total;
      if (routing.bias) scores[expert] += routing.bias[expert];
    }
    choice = scores;
  }
  if (!has_groups) {
    choose(choice, 0, num_experts, num_chosen, experts, 0);
  } else {
    const int size = num_experts / routing.num_groups;
    float* sums = scratch<Groups, float>(routing.num_groups);
    int64_t* best = scratch<Best, int64_t>(std::max(routing.group_best, routing.num_chosen_groups));
    for (int group = 0; group < routing.num_groups; ++group) {
      const int found = choose(choice, group * size, (group + 1) * size, routing.group_best, best, 0);
      sums[group] = 0;
      for (int i = 0; i < found; ++i) sums[group] += choice[best[i]];
    }
    choose(sums, 0, routing.num_groups, routing.num_chosen_groups, best, 0);
    std::sort(best, best + routing.num_chosen_groups);
    int count = 0;
    for (int i = 0; i < routing.num_chosen_groups; ++i)
      count = choose(choice, int(best[i]) * size, int(best[i] + 1) * size, num_chosen, experts, count);
  }

  float most = 0, total = 0;
  if (!is_sigmoid) {
    int64_t first = experts[0];
    if (choice != logits) choose(logits, 0, num_experts, 1, &first, 0);
    most = logits[first];
  }
  for (int i = 0; i < num_chosen; ++i)
    total += shares[i] = is_sigmoid ? sigmoid(logits[experts[i]]) : std::exp(logits[experts[i]] - most);
  if (is_sigmoid) total = routing.renormalizes ? total + routing.epsilon : 1;
  else if (!routing.renormalizes) total = total_of(most);
  else if (routing.least_sum) total = std::max(total, routing.least_sum * total_of(most));
  for (int i = 0; i < num_chosen; ++i) shares[i] = shares[i] / total * routing.scale;
  if (routing.shared != Shared::none) {
    experts[num_chosen] = num_experts;
    shares[num_chosen] = routing.shared == Shared::gated ? sigmoid(logits[num_experts]) : 1;
  }
}

// The same for rows: logits are [num_tokens][num_logits], experts and shares [num_tokens][num_routes].
inline void route_rows(const float* logits, int64_t num_tokens, const Routing& routing, int64_t* experts, float* shares) {
  parallel_for(num_tokens, 4096 / routing.num_experts, [&](int64_t token) {
    const int64_t place = token * routing.num_routes();
    route(logits + token * routing.num_logits(), routing, experts + place, shares + place);
  });
}

// y[token] = sum of shares[token][i] * expert experts[token][i] of x[token]. x and y are plain matrices; experts of a token
// are different ones. Those below 0 are left out; some token must have another. `totals`: float32 [num_tokens][hidden] to
// which the sums are added, and y is their rounded result; null: zeros.
template <class T>
void moe(const Matrix<const T>& x, int64_t num_tokens, const int64_t* experts, const float* shares, const Experts& layer,
         const Matrix<T>& y, float* totals = nullptr) {
  using namespace gemm;
  struct Tokens;
  struct Shares;
  struct Gathered;
  struct Inner;
  struct Sums;
  if (num_tokens == 0) return;
  const int64_t num_places = num_tokens * layer.num_chosen;
  const int64_t hidden = layer.gate_up->num_inputs;

  // Rows in the order of their experts, those of an expert in the order of tokens.
  std::vector<int64_t> places(layer.num_experts + 1);
  for (int64_t i = 0; i < num_places; ++i)
    if (experts[i] >= 0) ++places[experts[i] + 1];
  std::vector<ExpertRows> used;
  for (int expert = 0; expert < layer.num_experts; ++expert) {
    if (const int64_t count = places[expert + 1])
      used.push_back({layer.gate_up + expert, layer.down + expert, places[expert], count});
    places[expert + 1] += places[expert];
  }
  const int64_t num_used = int64_t(used.size()), num_rows = places.back();
  int64_t* tokens = scratch<Tokens, int64_t>(num_rows);
  float* weights = scratch<Shares, float>(num_rows);
  for (int64_t i = 0; i < num_places; ++i) {
    if (experts[i] < 0) continue;
    const int64_t place = places[experts[i]]++;
    tokens[place] = i / layer.num_chosen;
    weights[place] = shares[i];
  }
  Matrix<const T> gathered{x.data, 0};  // of one token: all rows are the same
  if (num_tokens > 1) {
    T* rows = scratch<Gathered, T>(num_rows * hidden);
    parallel_for(num_rows, 16384 / hidden,
                 [&](int64_t row) { std::memcpy(rows + row * hidden, x.data + tokens[row] * x.ld, hidden * sizeof(T)); });
    gathered = {rows, hidden};
  }
  auto rows_of = [&](int64_t i) { return used[i].count; };

  // Gate and up.
  std::vector<Matrix<T>> inner;
  int64_t inner_total = 0;
  for (const ExpertRows& one : used) inner_total += Matrix<T>::tiled_size(one.count, one.down->num_inputs);
  T* inner_data = scratch<Inner, T>(inner_total);
  for (const ExpertRows& one : used) {
    inner.push_back({inner_data, one.down->num_inputs, takes_tiles<T>(one.count, *one.down)});
    inner_data += Matrix<T>::tiled_size(one.count, one.down->num_inputs);
  }
  with_input<T>(*layer.gate_up, [&](auto* type) {
    using Input = std::remove_pointer_t<decltype(type)>;
    auto x_of = [&](int64_t i) { return Matrix<const T>{gathered.row(used[i].first).data, hidden}; };
    const auto inputs = prepared_inputs<Input>(num_used, rows_of, x_of, [&](int64_t i) { return *used[i].gate_up; });
    std::vector<Split> splits;
    for (const ExpertRows& one : used) splits.emplace_back(one.count, *one.gate_up, num_used);
    parallel_for_all(
        num_used, [&](int64_t i) { return splits[i].num_tasks(); },
        [&](int64_t i, int64_t task) {
          const Part part = splits[i].part(int(task));
          Stored<T> to{*used[i].gate_up, inner[i]};
          if (part.rows > 0) inputs[i].multiply(part, *used[i].gate_up, to);
        });
  });

  // Down, and the sums. Without a task for each thread some would have nothing to do.
  const int64_t num_blocks = layer.down->num_blocks();
  const int64_t blocks_each = std::clamp<int64_t>(num_blocks / (few_tasks * pool().num_threads()), 1,
                                                  num_tokens < 64 ? streams : task_blocks);
  with_input<T>(*layer.down, [&](auto* type) {
    using Input = std::remove_pointer_t<decltype(type)>;
    const auto inputs = prepared_inputs<Input>(
        num_used, rows_of, [&](int64_t i) { return Matrix<const T>(inner[i]); },
        [&](int64_t i) { return *used[i].down; });
    parallel_stretches(int((num_blocks + blocks_each - 1) / blocks_each), [&](int task) {
      const int64_t first = task * blocks_each;
      const int blocks = int(std::min(blocks_each, num_blocks - first));
      const int64_t columns = int64_t(blocks) * block_columns;
      float* sums = scratch<Sums, float>(num_tokens * columns);
      auto total_of = [&](int64_t token) { return totals + token * hidden + first * block_columns; };
      if (!totals) std::memset(sums, 0, num_tokens * columns * sizeof(float));
      for (int64_t token = 0; totals && token < num_tokens; ++token)
        std::memcpy(sums + token * columns, total_of(token), columns * sizeof(float));
      for (int64_t i = 0; i < num_used; ++i) {
        const ExpertRows& one = used[i];
        const Split split(one.count, *one.down);
        Weighted to{*one.down, tokens + one.first, weights + one.first, sums, columns, first};
        for (int64_t turn = 0; turn < split.num_row_tasks(); ++turn) {
          Part part = split.part(int(turn * split.num_columns()));
          part.first_block = first;
          part.blocks = blocks;
          if (part.rows > 0) inputs[i].multiply(part, *one.down, to);
        }
      }
      for (int64_t token = 0; token < num_tokens; ++token)
        for (int64_t c = 0; c < columns; c += width)
          store(y.data + token * y.ld + first * block_columns + c, load(sums + token * columns + c));
      for (int64_t token = 0; totals && token < num_tokens; ++token)
        std::memcpy(total_of(token), sums + token * columns, columns * sizeof(float));
    });
  });
}

}  // namespace quire
