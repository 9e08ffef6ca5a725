// The C interface, loaded through ctypes: see ../native.py, whose structures mirror those used here.

#include "attention.h"
#include "decoder.h"
#include "elementwise.h"
#include "gated_delta.h"
#include "gemm.h"
#include "gemm_avx2.h"
#include "gemm_grouped.h"
#include "gemm_int8.h"
#include "head_linear.h"
#include "logits.h"
#include "lora.h"
#include "mamba.h"
#include "moe.h"
#include "pack.h"
#include "sampling.h"

using namespace quire;

namespace {

// Calls f with a null pointer of the type that the code names.
template <class F>
void with_type(Type type, F&& f) {
  if (type == Type::float32) f(static_cast<float*>(nullptr));
  else f(static_cast<bf16*>(nullptr));
}

}  // namespace

extern "C" {

// Must be called once before anything else; 0, or -1 if the system does not let this process use AMX.
int quire_init() {
#if defined(__AMX_BF16__)
  constexpr long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0 ? 0 : -1;
#else
  return 0;
#endif
}

void quire_set_num_threads(int num_threads) { pool().resize(num_threads); }

int64_t quire_weight_bytes(const Weight* w) { return w->num_blocks() * w->block_bytes(); }

// `source` is int8, of quantised formats; see pack.
void quire_pack(const int8_t* source, const float* scales, const float* bias, const Weight* w) {
  pack(source, scales, bias, *w);
}

void quire_pack_numbers(Type type, const void* source, const float* bias, const Weight* w) {
  with_type(type, [&](auto* t) { pack(static_cast<const std::remove_pointer_t<decltype(t)>*>(source), nullptr, bias, *w); });
}

void quire_pack_grouped(const GroupedSource* source, const Weight* w) { pack_grouped(*source, *w); }

void quire_unpack_rows(Type type, const Weight* w, const int64_t* rows, int64_t num_rows, void* y) {
  with_type(type, [&](auto* t) { look_up(*w, rows, num_rows, static_cast<decltype(t)>(y)); });
}

void quire_linear(Type x_type, const void* x, int64_t ldx, int64_t num_rows, const Weight* w, Type y_type, void* y,
                  int64_t ldy) {
  with_type(x_type, [&](auto* xt) {
    with_type(y_type, [&](auto* yt) {
      using X = std::remove_pointer_t<decltype(xt)>;
      using Y = std::remove_pointer_t<decltype(yt)>;
      linear(Matrix<const X>{static_cast<const X*>(x), ldx}, num_rows, *w, Matrix<Y>{static_cast<Y*>(y), ldy});
    });
  });
}

void quire_head_linear(Type type, const void* x, int64_t x_stride, int64_t x_head_stride, int64_t num_tokens,
                       const Weight* weights, int num_heads, void* y, int64_t y_stride, int64_t y_head_stride) {
  with_type(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    head_linear(static_cast<const T*>(x), x_stride, x_head_stride, num_tokens, weights, num_heads, static_cast<T*>(y),
                y_stride, y_head_stride);
  });
}

void quire_linear_argmax(Type x_type, const void* x, int64_t ldx, int64_t num_rows, const Weight* w, int64_t* y) {
  with_type(x_type, [&](auto* t) {
    using X = std::remove_pointer_t<decltype(t)>;
    linear_argmax(Matrix<const X>{static_cast<const X*>(x), ldx}, num_rows, *w, y);
  });
}

void quire_rms_norm(Type type, const void* x, int64_t ldx, void* residual, const void* weight, float eps, int size,
                    void* y, int num_rows) {
  with_type(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    rms_norm_rows(static_cast<const T*>(x), ldx, static_cast<T*>(residual), size, static_cast<const T*>(weight), eps,
                  size, Matrix<T>{static_cast<T*>(y), size}, num_rows);
  });
}

void quire_gated_norm(Type type, Type weight_type, const void* x, const void* gate, int64_t gate_stride, const void* weight,
                      float eps, int size, int num_heads, void* y, int num_tokens) {
  with_type(type, [&](auto* t) {
    with_type(weight_type, [&](auto* w) {
      using T = std::remove_pointer_t<decltype(t)>;
      using W = std::remove_pointer_t<decltype(w)>;
      gated_norm(static_cast<const T*>(x), static_cast<const T*>(gate), gate_stride, static_cast<const W*>(weight), eps, size,
                 num_heads, static_cast<T*>(y), num_tokens);
    });
  });
}

void quire_rope(Type type, const void* x, int64_t stride, int64_t head_stride, const float* cosines,
                const float* sines, int half, int num_heads, int head_dim, void* y, int num_tokens) {
  with_type(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    parallel_for(num_tokens, 4096 / (num_heads * head_dim), [&](int64_t token) {
      for (int64_t head = 0; head < num_heads; ++head)
        rope_head(static_cast<const T*>(x) + token * stride + head * head_stride, cosines + token * half,
                  sines + token * half, half, head_dim, static_cast<T*>(y) + (token * num_heads + head) * head_dim);
    });
  });
}

void quire_write_kv(Type type, const void* key, int64_t key_stride, const void* value, int64_t value_stride,
                    const KVLayer* kv, const int64_t* slots, int num_tokens) {
  with_type(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    parallel_for(num_tokens, 2048 / (kv->num_kv_heads * kv->head_dim), [&](int64_t token) {
      for (int head = 0; head < kv->num_kv_heads; ++head) {
        int64_t place = int64_t(head) * kv->head_dim;
        write_head(static_cast<const T*>(key) + token * key_stride + place, *kv, slots[token], 0, head);
        write_head(static_cast<const T*>(value) + token * value_stride + place, *kv, slots[token], 1, head);
      }
    });
  });
}

void quire_argmax(const float* x, int64_t stride, int64_t size, int num_rows, int64_t* y) {
  parallel_for(num_rows, [&](int row) { y[row] = argmax(x + row * stride, size); });
}

// See top_logprobs: y and ids are [num_rows][count + 1], and a given column below zero stands for any.
void quire_top_logprobs(const float* x, int64_t stride, int64_t size, int num_rows, const int64_t* given, int count,
                        float* y, int64_t* ids, int64_t* ranks) {
  parallel_for(num_rows, [&](int row) {
    const int64_t place = int64_t(row) * (count + 1);
    ranks[row] = top_logprobs(x + row * stride, size, std::max<int64_t>(given[row], 0), count, y + place, ids + place);
  });
}

void quire_forbid_others(float* x, int64_t stride, int64_t size, int num_rows, const int32_t* allowed) {
  parallel_for(num_rows, [&](int row) { forbid_others(x + row * stride, size, allowed + row * ((size + 31) / 32)); });
}

// Edits rows of x, unless `edits` is null, and draws a token of each.
void quire_sample(float* x, int64_t stride, int64_t size, int num_rows, const Requests* requests, const Edits* edits,
                  int64_t* y) {
  parallel_for(num_rows, [&](int row) { y[row] = sample(x + row * stride, size, row, num_rows, *requests, edits); });
}

void quire_gate(Type type, Activation activation, const void* gate_up, int64_t stride, int size, void* y,
                int num_rows) {
  with_type(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    gate_rows(static_cast<const T*>(gate_up), stride, size, static_cast<T*>(y), size, num_rows,
              [activation](vec x) { return gemm::activate(x, activation); },
              [activation](vec x) { return gemm::factor(x, activation); });
  });
}

void quire_paged_attention(Type type, const void* query, int64_t query_stride, int num_heads, void* out,
                           const KVLayer* kv, const Batch* batch, float scale, int window, float softcap,
                           const float* sinks) {
  with_type(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    paged_attention(static_cast<const T*>(query), query_stride, num_heads,
                    Matrix<T>{static_cast<T*>(out), int64_t(num_heads) * kv->head_dim}, *kv, *batch, scale, window,
                    softcap, sinks);
  });
}

void quire_route(const float* logits, int64_t num_tokens, const Routing* routing, int64_t* experts, float* shares) {
  route_rows(logits, num_tokens, *routing, experts, shares);
}

void quire_moe(Type type, const void* x, int64_t ldx, int64_t num_tokens, const int64_t* experts, const float* shares,
               const Experts* layer, void* y, int64_t ldy, float* totals) {
  with_type(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    moe(Matrix<const T>{static_cast<const T*>(x), ldx}, num_tokens, experts, shares, *layer,
        Matrix<T>{static_cast<T*>(y), ldy}, totals);
  });
}

void quire_add_lora(Type type, void* y, int64_t ldy, const void* x, int64_t ldx, const int32_t* slots, int64_t num_tokens,
                    const AdapterPart* part, int rank, int64_t num_inputs) {
  with_type(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    add_lora(Matrix<T>{static_cast<T*>(y), ldy}, Matrix<const T>{static_cast<const T*>(x), ldx}, slots, num_tokens, *part,
             rank, num_inputs);
  });
}

// `bias` may be null; `activates`: 1 for SiLU, 0 for none.
void quire_causal_conv(Type type, const void* x, int64_t ldx, int64_t num_channels, const void* weight, const void* bias,
                       int num_taps, int activates, const States* states, const Batch* batch, void* y) {
  with_type(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    causal_conv(static_cast<const T*>(x), ldx, num_channels, static_cast<const T*>(weight), static_cast<const T*>(bias),
                num_taps, activates != 0, *states, *batch, static_cast<T*>(y));
  });
}

void quire_gated_delta_rule(Type type, const DeltaRule* rule, const States* states, const Batch* batch, void* y) {
  with_type(type, [&](auto* t) { gated_delta_rule(*rule, *states, *batch, static_cast<decltype(t)>(y)); });
}

void quire_mamba2(Type type, const StateSpace* space, const States* states, const Batch* batch, float* sums, void* y) {
  with_type(type, [&](auto* t) { mamba2(*space, *states, *batch, sums, static_cast<decltype(t)>(y)); });
}

void quire_decoder_forward(const Decoder* model, const Step* step) {
  with_type(model->type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    if (model->norm_type == model->type) forward<T, T>(*model, *step);
    else forward<T, float>(*model, *step);
  });
}

}  // extern "C"
