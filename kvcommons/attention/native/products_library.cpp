// Which instruction set is taken for products.h, how a product is divided, and what ctypes calls.
#include "products.h"
#include "team.h"

using namespace kvc;

namespace {

// As VARIANTS of library.cpp: an index means the same in both.
const ProductVariant* const VARIANTS[] = {
    &products_portable,
#if defined(__x86_64__)
    &products_avx2,
    &products_avx512,
#if defined(KVC_HAS_avx512bf16)
    &products_avx512bf16,
#endif
#endif
};
constexpr int COUNT = sizeof VARIANTS / sizeof *VARIANTS;

// Less memory than this is not worth another thread.
constexpr int64_t THREAD_BYTES = 65536;
// Of rows, which stay in the second cache beside a panel while all panels are multiplied with them.
constexpr int64_t ROWS_BYTES = 768 << 10;
// A whole number of every variant's tiles.
constexpr int64_t TILE_ROWS = 12, ROWS_MAX = 96;
constexpr int64_t GROUP_MAX = 4;
// Panels that one row is multiplied with at the same time.
constexpr int64_t PANELS = 4;

const ProductVariant& chosen(int32_t variant) {
    int i = variant < COUNT ? variant : COUNT - 1;
    while (i > 0 && !VARIANTS[i]->supported()) i--;
    return *VARIANTS[i];
}

inline int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Units [0, count) of work, taken by threads as they become free.
template <class Body>
struct Units {
    const Body* body;
    int64_t count, next;

    static void take(void* argument) {
        Units& units = *(Units*)argument;
        for (;;) {
            int64_t unit = __atomic_fetch_add(&units.next, 1, __ATOMIC_RELAXED);
            if (unit >= units.count) return;
            (*units.body)(unit);
        }
    }
};

template <class Body>
void run(int64_t threads, int64_t count, const Body& body) {
    Units<Body> units{&body, count, 0};
    in_parallel(Units<Body>::take, &units, least(threads, count));
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Of a packed weight.
EXPORTED int64_t kvc_packed_bytes(int64_t rows, int64_t size, int32_t is_bf16, int32_t variant) {
    int64_t panel = chosen(variant).panel;
    return up(rows, panel) * panel * size * (is_bf16 ? 2 : 4);
}

// Outputs of a panel.
EXPORTED int64_t kvc_panel(int32_t variant) { return chosen(variant).panel; }

EXPORTED void kvc_pack_weight(const kvc_packing* call) {
    const ProductVariant& variant = chosen(call->variant);
    int64_t panels = up(call->rows, variant.panel);
    run(call->threads, panels, [&](int64_t panel) { variant.pack(*call, panel, panel + 1); });
}

// Of what kvc_multiply needs beside the result.
EXPORTED int64_t kvc_arranged_bytes(int64_t count, int64_t size) { return up(count, GROUP_MAX) * GROUP_MAX * size * 4; }

EXPORTED void kvc_multiply(const kvc_product* call) {
    const ProductVariant& variant = chosen(call->variant);
    int64_t groups = up(call->count, variant.group), row_bytes = call->size * 4;
    int64_t parts = least(call->threads, up(call->count * row_bytes, 4 * THREAD_BYTES));
    int64_t part = up(groups, parts);
    run(parts, parts, [&](int64_t number) {
        variant.arrange(*call, number * part, least((number + 1) * part, groups));
    });
    int64_t panels = up(call->rows, variant.panel);
    int64_t bytes = call->rows * call->size * (call->is_bf16 ? 2 : 4);
    int64_t threads = least(call->threads, 1 + bytes / THREAD_BYTES);
    int64_t rows = call->count;
    if (rows > TILE_ROWS) {
        rows = least(ROWS_BYTES / row_bytes / TILE_ROWS * TILE_ROWS, ROWS_MAX);
        rows = rows < 2 * TILE_ROWS ? 2 * TILE_ROWS : rows;
    }
    int64_t blocks = up(call->count, rows);
    int64_t some = up(panels, threads > 1 ? 4 * threads : 1);
    if (call->count == 1) some = up(some, PANELS) * PANELS;
    int64_t pieces = up(panels, some);
    run(threads, blocks * pieces, [&](int64_t unit) {
        int64_t first = unit / pieces * rows, panel = unit % pieces * some;
        variant.multiply(*call, first, least(first + rows, call->count), panel, least(panel + some, panels));
    });
}
