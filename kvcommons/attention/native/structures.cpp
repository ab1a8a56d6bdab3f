// How large the structures are that Python reads from the headers (structures.py), so that the loader can compare.
#include "exchange.h"
#include "forward.h"
#include "products.h"
#include "slices.h"

extern "C" {

struct kvc_structure {
    const char* name;
    int64_t bytes;
};

// Ends with one that has no name.
extern __attribute__((visibility("default"))) const kvc_structure kvc_structures[];
#define SIZE(name) {#name, sizeof(name)}
const kvc_structure kvc_structures[] = {
    SIZE(kvc_batch), SIZE(kvc_chunk), SIZE(kvc_merge), SIZE(kvc_allowance), SIZE(kvc_plan), SIZE(kvc_serving), SIZE(kvc_timing),
    SIZE(kvc_call), SIZE(kvc_gather), SIZE(kvc_layer), SIZE(kvc_norm), SIZE(kvc_rotation), SIZE(kvc_gate),
    SIZE(kvc_packing), SIZE(kvc_product), SIZE(kvc_matrix), SIZE(kvc_closing), SIZE(kvc_opening), SIZE(kvc_advance),
    SIZE(kvc_forward),
    {nullptr, 0},
};

}  // extern "C"
