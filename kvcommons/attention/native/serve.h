// AttendLayer served without the interpreter: what Python passes for a connection whose last request it answered.
#pragma once

#include "attend.h"

extern "C" {

// A segment of the requests that are served: what AttendSegment says of it, but for what moves on.
struct kvc_row {
    uint64_t handle, epoch, generation, first_block, appends;
    int64_t reach;  // tokens that its blocks take, from first_block on
};

// The layers of a model over the same rows, one a segment, iteration after iteration.
struct kvc_plan {
    kvc_batch batch;       // `kv` of layer 0; window and scratch are set here
    const kvc_row* rows;   // [batch.batch]
    int64_t* lengths;      // the batch's, which moves them on: of the iteration that was served last
    int64_t* positions;    // likewise, its query positions
    const int64_t* windows;  // [layers]; 0: none
    char* appended;        // [rows that append, 2 * kv_heads, dim], received behind q
    int32_t* stay;         // BUSY, ENDED; whoever changes a segment ends it (kvc_end)
    int64_t layers, layer_bytes, appended_bytes;
};

// What others may have of the cores besides the holder's own work: AttentionBudget's, which writes all but what is
// counted here.
struct kvc_allowance {
    int64_t spent_ns;    // counted here, and never set back
    int64_t under_way;   // requests, counted here
    int64_t others;      // requests under way that Python answers
    int64_t limit_ns;    // spent_ns up to which requests are admitted
    int64_t fresh_ns;    // spent_ns as long as none was computed in this iteration, else -1: one always is
    int32_t bounded;     // own sequences run: there is a limit
    int32_t waiting;     // the own iteration waits: there is none, and nothing is spent
};

// What a connection's requests may be for, and what became of them.
struct kvc_serving {
    kvc_plan* const* plans;  // [count]
    int32_t* turn;         // kvc_take_turn's: one computation at a time
    kvc_allowance* allowance;  // null: no limit ever
    int64_t* took_ns;      // [took_max]: of each request that was served, from its head to its answer's end
    int32_t* took_plan;    // [took_max]: whose
    int64_t count, took_max;
    int64_t ask_ns;        // a wait asks for so long before it sleeps
    int64_t quiet_ns;      // a wait for a request ends
    int64_t operation_ns;  // a request ends, whatever its own deadline says
    int64_t took;          // requests served in this call
    int64_t received;      // bytes of the payload of a request that failed
    int64_t failed_ns;     // what it took
    int32_t descriptor;
    int32_t brief;         // the wait before was; from call to call
    int32_t stage;         // of the request that failed: Stage of serve.py
};

}  // extern "C"
