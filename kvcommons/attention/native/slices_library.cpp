// Which instruction set is taken for slices.h, how rows are divided, and what ctypes calls.
#include "slices.h"
#include "team.h"

using namespace kvc;

namespace {

// As VARIANTS of library.cpp: an index means the same in both, and one behind these the last of them.
const SliceVariant* const VARIANTS[] = {
    &slices_portable,
#if defined(__x86_64__)
    &slices_avx2,
    &slices_avx512,
#endif
};
constexpr int COUNT = sizeof VARIANTS / sizeof *VARIANTS;

// Less memory than this is not worth another thread.
constexpr int64_t THREAD_BYTES = 65536;

const SliceVariant& chosen(int32_t variant, int64_t size) {
    int i = variant < COUNT ? variant : COUNT - 1;
    while (i > 0 && (!VARIANTS[i]->supported() || size % (2 * VARIANTS[i]->width))) i--;
    return *VARIANTS[i];
}

template <class Call>
struct Rows {
    const Call* call;
    void (*body)(const Call&, int64_t first_row, int64_t last_row);
    int64_t part, next;
};

template <class Call>
void take_rows(void* argument) {
    Rows<Call>& work = *(Rows<Call>*)argument;
    for (;;) {
        int64_t first = __atomic_fetch_add(&work.next, work.part, __ATOMIC_RELAXED);
        if (first >= work.call->rows) return;
        int64_t last = first + work.part < work.call->rows ? first + work.part : work.call->rows;
        work.body(*work.call, first, last);
    }
}

template <class Call>
void run(const Call* call, void (*body)(const Call&, int64_t, int64_t), int64_t elements) {
    int64_t threads = elements * (call->is_bf16 ? 2 : 4) / THREAD_BYTES;
    if (threads > call->threads) threads = call->threads;
    if (threads <= 1) return body(*call, 0, call->rows);
    Rows<Call> work{call, body, (call->rows + 4 * threads - 1) / (4 * threads), 0};
    in_parallel(take_rows<Call>, &work, threads);
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void kvc_norm_rows(const kvc_norm* call) {
    run(call, chosen(call->variant, call->size).norm, call->rows * call->size);
}

EXPORTED void kvc_rotate_rows(const kvc_rotation* call) {
    run(call, chosen(call->variant, call->dim / 2).rotate, call->rows * call->heads * call->dim);
}

EXPORTED void kvc_gate_rows(const kvc_gate* call) {
    run(call, chosen(call->variant, call->size).gate, call->rows * call->size * 2);
}

// Floats to bfloat16, to the nearest: of the library's own.
extern "C" void kvc_narrow(const float* from, void* to, int64_t count, int32_t variant) {
    chosen(variant, 0).narrow(from, to, count);
}
