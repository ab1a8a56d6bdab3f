// forward.h by the calls that compute its parts: Python is not asked between two layers.
#include "forward.h"
#include "clock.h"

extern "C" {
void kvc_attend(const kvc_batch* batch);
void kvc_attend_chunk(const kvc_chunk* chunk);
void kvc_advance_rows(const kvc_advance* call);
void kvc_narrow(const float* from, void* to, int64_t count, int32_t variant);
}

namespace {

// A layer's rows up to its attention, which lie in memory of different calls.
struct Rows {
    const char *hidden, *q, *k, *v;
    int64_t q_row, k_row, v_row;
};

void attend(const kvc_batch& batch) { kvc_attend(&batch); }
void attend(const kvc_chunk& chunk) { kvc_attend_chunk(&chunk); }

// Keys and values to where they stay.
void append(const kvc_forward& call, const Rows& rows, int64_t kv_heads, int64_t dim, char* kv) {
    int64_t element = call.is_bf16 ? 2 : 4, head = dim * element;
    const int64_t* slot = call.slots;
    for (int64_t row = 0; row < call.count; row++) {
        const char *k = rows.k + row * rows.k_row * element, *v = rows.v + row * rows.v_row * element;
        for (int64_t i = 0; i < kv_heads; i++) __builtin_memcpy(kv + *slot++ * head, k + i * head, head);
        for (int64_t i = 0; i < kv_heads; i++) __builtin_memcpy(kv + *slot++ * head, v + i * head, head);
    }
}

template <typename Attention>
void forward(kvc_forward* call, Attention* const* attentions) {
    int64_t element = call->is_bf16 ? 2 : 4;
    Rows rows{(const char*)call->hidden, (const char*)call->q, (const char*)call->k, (const char*)call->v,
              call->q_row,               call->k_row,          call->v_row};
    call->attention_ns = 0;
    for (int64_t layer = 0; layer < call->layers; layer++) {
        Attention& attention = *attentions[layer];
        char* kv = (char*)call->kv + layer * call->layer_bytes;
        append(*call, rows, attention.kv_heads, attention.dim, kv);
        attention.q = rows.q;
        attention.q_row = rows.q_row;
        attention.kv = kv;
        int64_t began_ns = kvc::now_ns();
        attend(attention);
        call->attention_ns += kvc::now_ns() - began_ns;
        const void* attended = attention.out;
        if (call->is_bf16) {
            kvc_narrow(attention.out, call->attended, call->count * attention.heads * attention.dim, call->variant);
            attended = call->attended;
        }
        const kvc_opening& opening = *call->openings[layer];
        kvc_advance advance{
            call->closings[layer], &opening, rows.hidden, attended, call->cos, call->sin, call->sum, call->qkv,
            call->rotated, call->space, call->count, call->threads, call->epsilon, call->is_bf16,
            call->variant};
        kvc_advance_rows(&advance);
        int64_t dim = opening.dim, heads = opening.rotated_heads;
        const char *rotated = (const char*)call->rotated, *qkv = (const char*)call->qkv;
        rows = Rows{(const char*)call->sum, rotated, rotated + attention.heads * dim * element,
                    qkv + heads * dim * element, heads * dim, heads * dim, opening.qkv.rows};
    }
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void kvc_forward_layers(kvc_forward* call) {
    if (call->chunks)
        forward(call, call->chunks);
    else
        forward(call, call->batches);
}
