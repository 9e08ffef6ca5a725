// All layers of a decoder in one call: the operators of a step one after the other, on one pool of threads.
#pragma once

#include <optional>

#include "attention.h"
#include "elementwise.h"
#include "gemm.h"
#include "layout.h"
#include "lora.h"
#include "matrix.h"
#include "moe.h"
#include "pack.h"

namespace quire {

enum class Type : int32_t { float32 = 0, bfloat16 = 1 };

struct DecoderLayer {
  const void *attention_norm, *feed_forward_norm;                // of what goes in; null: none
  const void *attention_output_norm, *feed_forward_output_norm;  // of what comes out, before it is added; null: none
  const void *query_norm, *key_norm;                             // null: none
  NormKind norm_kind;                                            // of these two
  Weight qkv, next_qkv, last_qkv;     // one product, or two or three, whose results lie behind each other: the others have no columns
  Weight out, gate_up, down;          // the last two without experts
  Weight router;                      // with experts, as the two lines that follow
  const Experts* experts;             // null: none
  Routing routing;
  const float* sinks;                 // [num_heads], or null
  float attention_scale, softcap;  // softcap 0: none
  float output_factor;             // of attention's and the feed-forward's output, before it is added
  int32_t window;                  // 0: none
  int32_t rotations;               // which of a step's
  int32_t scales_queries;          // whether a step's factors are for this layer
  int32_t group;                   // KV group: which of a step's batches
  Adapters qkv_adapters, out_adapters, gate_up_adapters, down_adapters;
};

struct Decoder {
  Type type, norm_type;  // the latter: of all norms' weights
  int32_t num_layers, hidden_size, num_heads, head_dim, half_rotary_dim;
  float eps;
  const DecoderLayer* layers;
  const void* final_norm;
  const Weight *embedding, *head;  // null: steps have no token ids; no best tokens are wanted
};

struct Step {
  const int64_t* token_ids;  // [num_tokens]; null: there are embeddings
  void* embeddings;          // [num_tokens][hidden_size], overwritten; or null
  const float *rotations, *other_rotations;  // [positions][2][half_rotary_dim]: cosines, and sines
  const int64_t* positions;  // [num_tokens]: which of them
  const float* query_factors;  // [num_tokens]; null where no layer scales queries
  const KVLayer* kv;       // per layer
  const Batch* batches;    // per KV group
  const int64_t* rows;     // [num_rows]: those whose result is wanted
  int64_t num_rows;
  const int32_t* adapters;  // [num_tokens]: the slot of each one's adapter, -1: it has none; null: none has
  void* out;               // [num_rows][hidden_size], normalised; or null
  int64_t* best;           // [num_rows]: see linear_argmax; or null
};

// N: of norms' weights.
template <class T, class N>
void forward(const Decoder& model, const Step& step) {
  struct Embedded;
  struct Normed;
  struct Heads;
  struct Attended;
  struct Inner;
  struct Output;
  struct Logits;
  struct Chosen;
  struct Shares;
  struct Final;
  int num_tokens = step.batches[0].num_tokens;
  int64_t hidden = model.hidden_size;
  int64_t query_size = int64_t(model.num_heads) * model.head_dim;
  T* residual = step.token_ids ? scratch<Embedded, T>(num_tokens * hidden) : static_cast<T*>(step.embeddings);
  if (step.token_ids) look_up(*model.embedding, step.token_ids, num_tokens, residual);
  T* output = scratch<Output, T>(num_tokens * hidden);
  std::optional<lora::Grouping> grouping;
  if (step.adapters) grouping.emplace(step.adapters, num_tokens);
  // What is computed for a product has the order in which that takes it; adapters take plain rows.
  auto input_of = [&](const Weight& w, T* data) {
    return Matrix<T>{data, w.num_inputs, !grouping && gemm::takes_tiles<T>(num_tokens, w)};
  };
  auto multiply = [&](const Matrix<T>& x, std::initializer_list<const Weight*> weights, const Adapters& adapters,
                      const Matrix<T>& y) {
    adapted_linear(x, num_tokens, weights, adapters, grouping ? &*grouping : nullptr, y);
  };
  auto norm = [&](const T* x, T* to_add, const void* weight, const Matrix<T>& y) {
    if (!weight) return add_rows(x, to_add, int(hidden), y, num_tokens);
    rms_norm_rows(x, hidden, to_add, hidden, static_cast<const N*>(weight), model.eps, int(hidden), y, num_tokens);
  };
  auto scale_output = [&](float factor) {
    if (factor == 1) return;
    parallel_for(num_tokens, 4096 / hidden, [&](int64_t row) { scale(output + row * hidden, factor, hidden); });
  };
  auto size_of = [&](int64_t columns) { return Matrix<T>::tiled_size(num_tokens, columns); };
  T* normed_data = scratch<Normed, T>(size_of(hidden));
  T* attended_data = scratch<Attended, T>(size_of(query_size));
  for (int index = 0; index < model.num_layers; ++index) {
    const DecoderLayer& layer = model.layers[index];
    const KVLayer& kv = step.kv[index];
    const Batch& batch = step.batches[layer.group];
    bool is_last = index == model.num_layers - 1;
    const T* entering = index ? output : residual;
    const Matrix<T> normed = input_of(layer.qkv, normed_data), attended = input_of(layer.out, attended_data);
    norm(entering, index ? residual : nullptr, layer.attention_norm, normed);
    const int64_t heads_size = layer.qkv.num_columns + layer.next_qkv.num_columns + layer.last_qkv.num_columns;
    T* heads = scratch<Heads, T>(num_tokens * heads_size);
    multiply(normed, {&layer.qkv, &layer.next_qkv, &layer.last_qkv}, layer.qkv_adapters, Matrix<T>{heads, heads_size});
    norm_rope_write(heads, heads_size, model.num_heads, layer.norm_kind, static_cast<const N*>(layer.query_norm),
                    static_cast<const N*>(layer.key_norm), model.eps,
                    layer.rotations ? step.other_rotations : step.rotations, step.positions, model.half_rotary_dim,
                    layer.scales_queries ? step.query_factors : nullptr, kv, batch.slot_mapping, num_tokens);
    if (is_last && step.num_rows == 0) return;
    paged_attention(heads, heads_size, model.num_heads, attended, kv, batch, layer.attention_scale, layer.window,
                    layer.softcap, layer.sinks);
    if (is_last) {
      num_tokens = int(step.num_rows);
      if (grouping) {
        std::vector<int32_t> slots;
        for (int64_t i = 0; i < step.num_rows; ++i) slots.push_back(step.adapters[step.rows[i]]);
        grouping.emplace(slots.data(), step.num_rows);
      }
    }
    const Matrix<T> wanted = input_of(layer.out, attended_data);
    const Matrix<T> second = layer.experts ? Matrix<T>{normed_data, hidden} : input_of(layer.gate_up, normed_data);
    if (is_last)
      // Nothing reads the other rows any more. Rows ascend, and a single one may leave the tiles: none is overwritten
      // before it is read.
      for (int64_t i = 0; i < step.num_rows; ++i) {
        const Row<T> from = attended.row(step.rows[i]), to = wanted.row(i);
        for (int64_t c = 0; c < query_size; c += 16) std::memmove(to.at(c), from.at(c), 16 * sizeof(T));
        std::memmove(residual + i * hidden, residual + step.rows[i] * hidden, hidden * sizeof(T));
      }
    const Matrix<T> to_output{output, hidden};
    multiply(wanted, {&layer.out}, layer.out_adapters, to_output);
    if (layer.attention_output_norm) norm(output, nullptr, layer.attention_output_norm, to_output);
    scale_output(layer.output_factor);
    norm(output, residual, layer.feed_forward_norm, second);
    if (layer.experts) {
      const int64_t num_logits = layer.routing.num_logits(), num_routes = layer.routing.num_routes();
      float* logits = scratch<Logits, float>(num_tokens * num_logits);
      int64_t* experts = scratch<Chosen, int64_t>(num_tokens * num_routes);
      float* shares = scratch<Shares, float>(num_tokens * num_routes);
      linear(second, num_tokens, layer.router, Matrix<float>{logits, num_logits});
      route_rows(logits, num_tokens, layer.routing, experts, shares);
      moe<T>(second, num_tokens, experts, shares, *layer.experts, to_output);
    } else {
      const Matrix<T> inner = input_of(layer.down, scratch<Inner, T>(size_of(layer.down.num_inputs)));
      multiply(second, {&layer.gate_up}, layer.gate_up_adapters, inner);
      multiply(inner, {&layer.down}, layer.down_adapters, to_output);
    }
    if (layer.feed_forward_output_norm) norm(output, nullptr, layer.feed_forward_output_norm, to_output);
    scale_output(layer.output_factor);
  }
  const Matrix<T> last{step.out ? static_cast<T*>(step.out) : scratch<Final, T>(num_tokens * hidden), hidden};
  norm(output, residual, model.final_norm, last);
  if (step.best) linear_argmax(Matrix<const T>(last), num_tokens, *model.head, step.best);
}

}  // namespace quire
