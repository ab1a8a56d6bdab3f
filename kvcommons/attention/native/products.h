// Products of rows with the model's weights. Plain C layouts, as in attend.h.
#pragma once

#include "attend.h"

extern "C" {

// A weight, to the order in which it is multiplied: panels of so many outputs as two registers have elements (the last
// one filled up with zeros), in a panel word after word of all its outputs. A word is a float, or two neighbouring
// bfloat16. So a row's element is multiplied with whole registers of weights, which lie in memory one behind the other.
struct kvc_packing {
    const void* weight;  // [rows, size]; size is even for bfloat16
    void* packed;        // kvc_packed_bytes, aligned to 64
    int64_t rows, size, threads;
    int32_t is_bf16, variant;
};

// Rows times a packed weight. Sums are float32, one product after another in the order of the row's elements, and are
// rounded once: a row has the same bits whatever others it comes with, and on any number of threads.
struct kvc_product {
    const void* x;       // [count, size]
    const void* packed;  // of [rows, size], by the same variant
    const void* bias;    // [rows]; null: none
    void* out;           // [count, rows]
    void* arranged;      // kvc_arranged_bytes, the caller's memory
    int64_t count, rows, size, threads;
    int32_t is_bf16, variant;
};

}  // extern "C"

namespace kvc {

struct ProductVariant {
    int panel;  // outputs of a panel
    int group;  // rows whose elements lie beside each other once they are arranged
    bool (*supported)();
    void (*pack)(const kvc_packing&, int64_t first_panel, int64_t last_panel);
    void (*arrange)(const kvc_product&, int64_t first_group, int64_t last_group);
    // Of rows that are arranged, and are few enough to stay in a cache beside a panel.
    void (*multiply)(const kvc_product&, int64_t first_row, int64_t last_row, int64_t first_panel, int64_t last_panel);
};

extern const ProductVariant products_portable;
#if defined(__x86_64__)
extern const ProductVariant products_avx2, products_avx512, products_avx512bf16;
#endif

}  // namespace kvc
