// advance.h by the calls that compute its parts: between two of them no time passes, and threads are still awake.
#include "advance.h"
#include "products.h"
#include "slices.h"

extern "C" {
int64_t kvc_arranged_bytes(int64_t count, int64_t size);
void kvc_multiply(const kvc_product* call);
void kvc_norm_rows(const kvc_norm* call);
void kvc_gate_rows(const kvc_gate* call);
void kvc_rotate_rows(const kvc_rotation* call);
}

namespace {

constexpr int64_t LINE = 64;

inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Where the parts of `space` lie, in bytes.
struct Space {
    int64_t arranged, projected, middle, normed, mixed, gated, bytes = 0;

    explicit Space(const kvc_advance& call) {
        const kvc_closing& closing = *call.closing;
        int64_t element = call.is_bf16 ? 2 : 4, hidden = closing.output.rows * element, mlp = closing.down.size * element;
        int64_t widest = most(most(closing.output.size, closing.down.size), closing.output.rows);
        arranged = part(kvc_arranged_bytes(call.count, widest));
        projected = part(call.count * hidden);
        middle = part(call.count * hidden);
        normed = part(call.count * hidden);
        mixed = part(call.count * 2 * mlp);
        gated = part(call.count * mlp);
    }

    int64_t part(int64_t size) {
        int64_t at = bytes;
        bytes += (size + LINE - 1) / LINE * LINE;
        return at;
    }
};

void multiply(const kvc_advance& call, const kvc_matrix& matrix, const void* x, void* out, void* arranged) {
    kvc_product product{
        x, matrix.packed, matrix.bias, out, arranged, call.count, matrix.rows, matrix.size, call.threads,
        call.is_bf16, call.variant};
    kvc_multiply(&product);
}

void norm(
    const kvc_advance& call, const void* x, const void* added, const float* weight, int64_t size, void* sum, void* out) {
    kvc_norm rows{x, added, weight, sum, out, call.count, size, call.threads, call.epsilon, call.is_bf16,
                  call.variant};
    kvc_norm_rows(&rows);
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Of `space`.
EXPORTED int64_t kvc_advance_bytes(const kvc_advance* call) { return Space(*call).bytes; }

EXPORTED void kvc_advance_rows(const kvc_advance* call) {
    const kvc_closing& closing = *call->closing;
    const kvc_opening& opening = *call->opening;
    Space at(*call);
    char* space = (char*)call->space;
    char *arranged = space + at.arranged, *projected = space + at.projected, *middle = space + at.middle;
    char *normed = space + at.normed, *mixed = space + at.mixed, *gated = space + at.gated;
    int64_t hidden = closing.output.rows, mlp = closing.down.size;
    multiply(*call, closing.output, call->attended, projected, arranged);
    norm(*call, call->hidden, projected, closing.norm, hidden, middle, normed);
    multiply(*call, closing.gate_up, normed, mixed, arranged);
    kvc_gate gate{mixed, gated, call->count, mlp, call->threads, call->is_bf16, call->variant};
    kvc_gate_rows(&gate);
    multiply(*call, closing.down, gated, projected, arranged);
    norm(*call, middle, projected, opening.norm, hidden, call->sum, normed);
    multiply(*call, opening.qkv, normed, call->qkv, arranged);
    kvc_rotation rotation{
        call->qkv, opening.qk_norm, call->cos, call->sin, call->rotated, call->count, opening.qkv.rows,
        opening.rotated_heads, opening.dim, call->threads, call->epsilon, call->is_bf16, call->variant};
    kvc_rotate_rows(&rotation);
}
