// A layer of an iteration from the debtor's side: every holder is asked, every answer is received where it belongs,
// and what lies apart is merged. Plain C layouts for ctypes; all pointers are the caller's.
#pragma once

#include <cstdint>

extern "C" {

// Of one message in one layer. Instants are those of the monotonic clock, in ns.
struct kvc_told {
    int64_t began, sending, waits, came;
    int64_t queued_us, computed_us;  // by the holder's own account
};

// Of one layer: while messages were sent, and while answers were waited for.
struct kvc_turn {
    int64_t asks, asked, waits, came;
};

// One message to one holder. Of a layer to the next, nothing of its head changes but `layer` and the deadline.
struct kvc_ask {
    char* head;            // `head_room` bytes to write to, then the layer's segments (data.proto, AttendLayer)
    const char* trace;     // DataRequest.traceparent as it is sent, tag included; empty where there is none
    const int64_t* rows;       // of the batch, in the message's order; ~row: its shifted query
    const int64_t* appended;   // rows whose K and V it takes along
    char* payload;         // of the request; of an answer that Python has to read, all that came
    float* out;            // [rows, heads, dim]
    float* lse;            // [rows, heads]
    kvc_told* told;        // [turns]
    void* parts;           // room for 2 * rows + 2 iovec
    int64_t head_room, segments_bytes, trace_bytes, row_count, appended_count;
    int64_t first_head, heads, first_kv_head, kv_heads;
    int64_t out_row, lse_row;  // strides, in elements
    int64_t descriptor, ask_ns;  // its connection, and how long a wait asks before it sleeps
    int64_t moved;         // bytes that went, where it failed
    int32_t outcome;       // wire.h
    int32_t error;         // errno, where the system has one
    int32_t under_way;     // asked, and not answered
    int32_t reply_head;    // bytes of the last answer's head
    int32_t long_wait;     // the last one was: the next one sleeps at once
};

// Several sources' partials, to one of each row of the batch.
struct kvc_gather {
    const float* const* outs;  // of the sources: [*, heads, dim]
    const float* const* lses;  // [*, heads]
    const int64_t* starts;     // [rows + 1]: of a row's among the next two; null: everything is where it belongs
    const int64_t* sources;
    const int64_t* indices;    // within the source
    float* out;                // [rows, heads, dim]
    float* lse;                // [rows, heads]
    const float** parts;       // [2, the most that a row has], to work with
    int64_t rows, heads;
};

struct kvc_layers {
    kvc_ask* asks;
    kvc_turn* turns;       // one for each layer that is asked for
    const char* q;         // [B, query_heads, dim]; strides in elements, the last is 1
    const char* shifted;
    const char* k;         // [B, kv_heads, dim]
    const char* v;
    char* kv;              // this instance's own, [layers] of `kv_layer_bytes`
    const int64_t* own;        // rows of the batch whose K and V are written there
    const int64_t* own_places; // [own, 2, kv_heads], where: in units of dim elements
    kvc_gather gather;
    int64_t q_row, q_head, shifted_row, shifted_head, k_row, k_head, v_row, v_head;
    int64_t count, dim, kv_heads, own_count, kv_layer_bytes;
    int64_t layer, turn, deadline_ns, until_ns;
    int32_t is_bf16;       // q, k, v and KV; else all are float32
    int32_t variant;       // as in kvc_batch
};

}  // extern "C"
