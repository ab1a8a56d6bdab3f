// The attention exchange, from both ends: what Python passes, and what a layer's frames look like
// (docs/formats/attention-layer.md). Plain C layouts for ctypes, which structures.cpp lets the loader compare; all
// pointers are the caller's.
#pragma once

#include "attend.h"

extern "C" {

// ---- The creditor

// What others may have of the cores beside the holder's own work. Python grants, native code spends.
struct kvc_allowance {
    int64_t spent_ns;    // by computations that counted; never set back
    int64_t granted_ns;  // a computation may begin while less is spent
    int32_t counts;      // whether those that begin now are counted
    int32_t lock;        // one computation at a time: FREE, HELD or CONTENDED
    int32_t grants;      // changes with each grant
    int32_t sleepers;    // that wait for one
    int32_t outstanding; // computations that wait to begin, or are under way
};

// A plan whose rows are one query each: what its layers attend over, whatever the step.
struct kvc_plan {
    kvc_batch batch;          // `kv` of layer 0; step, layer and buffers are filled in here
    int64_t* lengths;         // [rows], the batch's: of `step`
    int64_t* positions;       // [rows], the batch's query positions: of `step`
    const int64_t* first_lengths;    // [rows], as of step 0
    const int64_t* first_positions;  // [rows], as of step 0
    const int64_t* grows;     // [rows], 1 where a token is appended with each step; 0 for rows that are lost
    const int64_t* brings;    // [rows], 1 where K and V come with the queries
    const int64_t* windows;   // [layers]; 0: none
    int64_t first_step, last_step;   // for which its rows' blocks are known
    int64_t step, layers, layer_bytes, appended;  // `appended`: rows that bring K and V
    uint32_t number, revision, lost;
    int32_t access;           // BUSY, ENDED: whoever changes one of its segments ends it (kvc_end)
};

// A connection's plans, and what became of the layers that came.
struct kvc_serving {
    kvc_plan* const* plans;   // [count]
    kvc_allowance* allowance;
    char* buffer;             // aligned to 64: a request's payload, then, aligned likewise, its answer
    int64_t* took_ns;         // [took_max]: of each layer, from its head to its answer's end
    uint32_t* took_plan;      // [took_max]: the number of its plan
    int64_t buffer_bytes, count, took_max;
    int64_t ask_ns;           // a wait asks for so long before it sleeps
    int64_t quiet_ns;         // a wait for a layer ends
    int64_t operation_ns;     // a layer ends, whatever its own deadline says
    int64_t took;             // layers served in this call
    int64_t received;         // bytes of the payload of a layer that failed
    int64_t failed_ns;        // what it took
    int32_t descriptor;
    int32_t brief;            // the wait before was; from call to call
    int32_t stage;            // of the layer that failed: ServingStage of exchange.py
    int64_t step;             // of a layer that is `pending`: its plan has to be looked up again first
    uint32_t plan;            // its number
    int32_t pending;
};

// ---- The debtor

// Of one call in one layer. Instants are those of the monotonic clock, in ns.
struct kvc_timing {
    int64_t began, waits, came;
    int64_t queued_us, computed_us;  // by the creditor's own account
};

// One plan's layer: what is sent for it, and where its answer belongs.
struct kvc_call {
    const int64_t* rows;      // of the batch, in the plan's order; ~row: its shifted query
    const int64_t* appended;  // rows whose K and V it takes along
    char* payload;            // of the request
    char* unread;             // of an answer that Python has to read: all that came
    float* out;               // [rows, heads, dim]
    float* lse;               // [rows, heads]
    kvc_timing* timings;      // [layers]
    void* parts;              // room for 2 * rows + 2 iovec
    int64_t row_count, appended_count, first_head, heads, first_kv_head, kv_heads;
    int64_t out_row, lse_row;  // strides, in elements
    int64_t descriptor, ask_ns;  // its connection, and how long a wait asks before it sleeps
    int64_t moved;            // bytes that went, where it failed
    uint32_t plan, revision, step;
    uint32_t lost;            // of the plan's rows, by the last answer
    int32_t native;           // whether it is sent and received here
    int32_t outcome;          // frames.h
    int32_t error;            // errno, where the system has one
    int32_t under_way;        // sent, and not answered
    int32_t long_wait;        // the last one was: the next one sleeps at once
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

// A layer of an iteration: every creditor's call, and this instance's own new K and V.
struct kvc_layer {
    kvc_call* calls;
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
    int64_t layer, timing, until_ns;  // `timing`: the index of its timings
    int32_t is_bf16;       // q, k, v and KV; else all are float32
    int32_t variant;       // as in kvc_batch
};

}  // extern "C"
