// What the Python side passes, and what each instruction set's translation unit offers. Plain C layouts: the
// library is loaded with ctypes, and knows neither Python nor torch.
#pragma once

#include <cstdint>

extern "C" {

// One row a sequence over paged KV. Sizes in elements unless they say bytes; all pointers are the caller's.
struct kvc_batch {
    const void* q;    // [batch, heads, dim], rows contiguous
    const void* kv;   // [blocks, 2, kv_heads, block_tokens, dim]
    const int64_t* tables;           // [batch, table_width]
    const int64_t* lengths;          // [batch]
    const int64_t* first_positions;  // [batch], of key 0
    const int64_t* query_positions;  // [batch]
    float* out;       // [batch, heads, dim]
    float* lse;       // [batch, heads]
    void* scratch;    // kvc_scratch_bytes, aligned to 64
    int64_t q_row, q_head;  // strides
    int64_t batch, heads, kv_heads, dim, block_tokens, table_width;
    int64_t window;   // tokens that a query sees, its own included; 0: all
    int64_t threads;  // at most
    float scale;
    int32_t q_is_bf16, kv_is_bf16;
    int32_t variant;  // the widest that may be taken: an index into kvc_variant_names
};

// The rows of a prompt's chunk over paged KV of one sequence. As above, but where it says otherwise.
struct kvc_chunk {
    const void* q;    // [rows, heads, dim]
    const void* kv;
    const int64_t* table;  // of block numbers
    float* out;       // [rows, heads, dim]
    float* lse;       // [rows, heads]
    void* scratch;    // kvc_chunk_scratch_bytes, aligned to 64
    int64_t q_row, q_head;  // strides
    int64_t rows, heads, kv_heads, dim, block_tokens;
    int64_t length;       // keys that are there
    int64_t first_query;  // which key row 0 is the query of, by index
    int64_t window, threads;
    float scale;
    int32_t q_is_bf16, kv_is_bf16;
    int32_t variant;
};

// Partials of the same rows over different keys, to one over all of them.
struct kvc_merge {
    const float* const* outs;  // [parts] of [rows, dim]
    const float* const* lses;  // [parts] of [rows]
    float* out;
    float* lse;
    int64_t parts, rows, dim, threads;
    int32_t variant;
};

}  // extern "C"

namespace kvc {

// Keys of one block and head that are computed with at once.
constexpr int TILE = 64;
// Floats in a register, at most.
constexpr int WIDEST = 16;
// Units of a row, at most: a partial is written and read again for each.
constexpr int UNITS_MAX = 64;

// What a thread needs beside the partials, made once a thread.
struct Workspace {
    float* queries;  // [heads, dim], scaled, in the order in which keys are widened
    float* scores;   // [heads, TILE]
    float* totals;   // [heads, WIDEST], sums of the weights, of which each is in one element
};

// Keys [first, last) of a sequence for kv heads [head, head_end): the part of the work that one thread takes.
struct Unit {
    int64_t row, first, last, head, head_end;
    float* sums;  // [heads, dim], weighted values, in the order in which values are widened
    float* tops;  // [heads], the greatest score
    float* totals;  // [heads], sum of the weights, exp(score - greatest)
};

// The partials of a row over `count` units of its keys, to the row's result.
struct Finish {
    int64_t row, head, head_end, count;
    const float* sums;  // of the first unit; of the next one after `stride`
    const float* tops;
    const float* totals;
    int64_t stride;
};

// Rows [first_row, last_row) of a chunk, a row being a token and one of the query heads that share a kv head, over
// keys [first_key, last_key).
struct ChunkUnit {
    int64_t head, first_row, last_row, first_key, last_key;
    float* out;  // of all rows, as the call's
    float* lse;
};

// The keys that a token of the chunk sees: from the first on, up to the last one.
inline int64_t chunk_first(const kvc_chunk& chunk, int64_t token) {
    int64_t first = chunk.first_query + token - chunk.window + 1;
    return chunk.window && first > 0 ? first : 0;
}
inline int64_t chunk_last(const kvc_chunk& chunk, int64_t token) {
    int64_t last = chunk.first_query + token + 1;
    last = last < chunk.length ? last : chunk.length;
    return last > 0 ? last : 0;
}

struct Variant {
    const char* name;
    int width;  // floats in a register; dim is a multiple of twice that
    bool (*supported)();
    void (*attend)(const kvc_batch&, const Unit&, const Workspace&);
    void (*finish)(const kvc_batch&, const Finish&);
    void (*merge)(const kvc_merge&, int64_t first_row, int64_t last_row);
    float (*read)(const char* bytes, int64_t size);
    void (*attend_chunk)(const kvc_chunk&, const ChunkUnit&, float* space);
};

extern const Variant portable;
#if defined(__x86_64__)
extern const Variant avx2, avx512, avx512bf16;  // the last one where the compiler knows its instructions
#endif

}  // namespace kvc
