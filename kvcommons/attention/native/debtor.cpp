// A debtor's layers on the native path: every creditor is sent its part, every answer is received where it belongs, and
// what lies apart is merged.
#include "exchange.h"
#include "frames.h"

using namespace kvc;

extern "C" void kvc_merge_partials(const kvc_merge* merge);

namespace {

// `count` heads of a row, as float32.
float* widen(const char* from, int64_t head_stride, int64_t count, int64_t dim, bool is_bf16, float* into) {
    for (int64_t head = 0; head < count; head++, into += dim) {
        if (!is_bf16) {
            memcpy(into, (const float*)from + head * head_stride, (size_t)dim * 4);
            continue;
        }
        const uint16_t* narrow = (const uint16_t*)from + head * head_stride;
        uint32_t* wide = (uint32_t*)into;
        for (int64_t i = 0; i < dim; i++) wide[i] = (uint32_t)narrow[i] << 16;
    }
    return into;
}

// Copies `count` heads of a row to places `to_stride` apart.
char* copy_heads(const char* from, int64_t head_stride, int64_t count, int64_t bytes, char* into) {
    for (int64_t head = 0; head < count; head++, into += bytes) memcpy(into, from + head * head_stride, (size_t)bytes);
    return into;
}

// Queries in float32, then K and V as they are; how many bytes.
int64_t write_payload(const kvc_layer& layer, const kvc_call& call) {
    int64_t size = layer.is_bf16 ? 2 : 4, dim = layer.dim;
    float* into = (float*)call.payload;
    for (int64_t i = 0; i < call.row_count; i++) {
        int64_t row = call.rows[i];
        const char* from = layer.q;
        int64_t row_stride = layer.q_row, head_stride = layer.q_head;
        if (row < 0) {
            row = ~row, from = layer.shifted;
            row_stride = layer.shifted_row, head_stride = layer.shifted_head;
        }
        from += (row * row_stride + call.first_head * head_stride) * size;
        into = widen(from, head_stride, call.heads, dim, layer.is_bf16, into);
    }
    char* at = (char*)into;
    for (int64_t i = 0; i < call.appended_count; i++) {
        int64_t row = call.appended[i], first = call.first_kv_head;
        const char* k = layer.k + (row * layer.k_row + first * layer.k_head) * size;
        const char* v = layer.v + (row * layer.v_row + first * layer.v_head) * size;
        at = copy_heads(k, layer.k_head * size, call.kv_heads, dim * size, at);
        at = copy_heads(v, layer.v_head * size, call.kv_heads, dim * size, at);
    }
    return at - call.payload;
}

bool send(const kvc_layer& layer, kvc_call& call) {
    kvc_timing& timing = call.timings[layer.timing];
    timing = kvc_timing{now_ns(), 0, 0, 0, 0};
    int64_t payload = write_payload(layer, call), left_ms = (layer.until_ns - now_ns() + 999999) / 1000000;
    left_ms = left_ms < 1 ? 1 : left_ms > UINT32_MAX ? UINT32_MAX : left_ms;
    LayerFrame frame{FrameHeader(sizeof(LayerHead), (uint64_t)payload),
                     {LAYER_VERSION, (uint16_t)layer.layer, call.plan, call.revision, call.step, (uint32_t)left_ms,
                      (uint32_t)call.row_count, (uint32_t)call.appended_count, 0}};
    iovec parts[2] = {{&frame, sizeof frame}, {call.payload, (size_t)payload}};
    call.outcome = transfer((int)call.descriptor, parts, 2, true, Wait{layer.until_ns, 0}, call.moved);
    call.error = call.outcome == GONE ? errno : 0;
    call.under_way = call.outcome == DONE;
    return call.outcome == DONE;
}

// Where an answer goes: how many parts.
int64_t lay_out(const kvc_call& call, int64_t dim, ReplyFrame& frame) {
    iovec* parts = (iovec*)call.parts;
    int64_t count = 0, row = call.heads * dim;
    parts[count++] = {&frame, sizeof frame};
    if (call.out_row == row)
        parts[count++] = {call.out, (size_t)(call.row_count * row * 4)};
    else
        for (int64_t i = 0; i < call.row_count; i++) parts[count++] = {call.out + i * call.out_row, (size_t)(row * 4)};
    if (call.lse_row == call.heads)
        parts[count++] = {call.lse, (size_t)(call.row_count * call.heads * 4)};
    else
        for (int64_t i = 0; i < call.row_count; i++)
            parts[count++] = {call.lse + i * call.lse_row, (size_t)(call.heads * 4)};
    return count;
}

// Whether this is the answer that the call waits for.
bool answers(const kvc_layer& layer, const kvc_call& call, const ReplyFrame& frame) {
    uint64_t due = (uint64_t)(call.row_count * call.heads * (layer.dim + 1) * 4);
    return frame.header.is(sizeof(LayerReply), due) && frame.head.version == LAYER_VERSION &&
           frame.head.layer == layer.layer && frame.head.plan == call.plan && frame.head.step == call.step;
}

Outcome receive_reply(const kvc_layer& layer, kvc_call& call, kvc_timing& timing, const Wait& wait) {
    ReplyFrame frame;
    int64_t count = lay_out(call, layer.dim, frame), got = 0, some;
    // An error may be shorter than a head: it is looked at as soon as its header is there.
    Outcome outcome = transfer((int)call.descriptor, (iovec*)call.parts, count, false, wait, got, sizeof frame.header);
    if (outcome != DONE) return outcome;
    if (got < (int64_t)sizeof frame && !memcmp(&frame.header, FrameHeader(sizeof frame.head).magic, 12)) {
        outcome = transfer((int)call.descriptor, (iovec*)call.parts, count, false, wait, some,
                           (int64_t)sizeof frame - got);
        got += some;
        if (outcome != DONE) return outcome;
    }
    if (got < (int64_t)sizeof frame || !answers(layer, call, frame)) {
        // What came is put in order again, for Python.
        lay_out(call, layer.dim, frame);
        const iovec* parts = (const iovec*)call.parts;
        for (int64_t i = 0, at = 0; at < got; at += (int64_t)parts[i++].iov_len) {
            int64_t bytes = (int64_t)parts[i].iov_len < got - at ? (int64_t)parts[i].iov_len : got - at;
            memcpy(call.unread + at, parts[i].iov_base, (size_t)bytes);
        }
        call.moved = got;
        return OTHER;
    }
    outcome = transfer((int)call.descriptor, (iovec*)call.parts, count, false, wait, some);
    timing.queued_us = frame.head.queued_us, timing.computed_us = frame.head.computed_us;
    call.lost = frame.head.lost;
    return outcome;
}

bool receive(const kvc_layer& layer, kvc_call& call) {
    kvc_timing& timing = call.timings[layer.timing];
    timing.waits = now_ns();
    Wait wait{layer.until_ns, call.long_wait ? 0 : call.ask_ns};
    call.moved = 0;
    Outcome outcome = receive_reply(layer, call, timing, wait);
    call.error = outcome == GONE ? errno : 0;
    call.outcome = outcome;
    call.under_way = outcome != DONE;
    timing.came = now_ns();
    call.long_wait = timing.came - timing.waits > call.ask_ns + call.ask_ns / 2;
    return outcome == DONE;
}

// K and V of rows whose newest tokens lie here.
void write_own(const kvc_layer& layer) {
    int64_t size = layer.is_bf16 ? 2 : 4, bytes = layer.dim * size, heads = layer.kv_heads;
    char* kv = layer.kv + layer.layer * layer.kv_layer_bytes;
    const int64_t* place = layer.own_places;
    for (int64_t i = 0; i < layer.own_count; i++) {
        int64_t row = layer.own[i];
        for (int64_t h = 0; h < heads; h++, place++)
            memcpy(kv + *place * bytes, layer.k + (row * layer.k_row + h * layer.k_head) * size, (size_t)bytes);
        for (int64_t h = 0; h < heads; h++, place++)
            memcpy(kv + *place * bytes, layer.v + (row * layer.v_row + h * layer.v_head) * size, (size_t)bytes);
    }
}

// Puts all sources' partials together.
void gather(const kvc_layer& layer) {
    const kvc_gather& all = layer.gather;
    int64_t dim = layer.dim, heads = all.heads;
    for (int64_t row = 0; all.starts && row < all.rows; row++) {
        const float **outs = all.parts, **lses = outs + (all.starts[row + 1] - all.starts[row]);
        int64_t count = 0;
        for (int64_t item = all.starts[row]; item < all.starts[row + 1]; item++, count++) {
            outs[count] = all.outs[all.sources[item]] + all.indices[item] * heads * dim;
            lses[count] = all.lses[all.sources[item]] + all.indices[item] * heads;
        }
        float *out = all.out + row * heads * dim, *lse = all.lse + row * heads;
        if (count == 1) {
            memcpy(out, outs[0], (size_t)(heads * dim * 4));
            memcpy(lse, lses[0], (size_t)(heads * 4));
            continue;
        }
        kvc_merge merge{outs, lses, out, lse, count, heads, dim, 1, layer.variant};
        kvc_merge_partials(&merge);
    }
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Sends the native calls from `first` on, and then writes this instance's own K and V; the number of the first that could
// not be sent, or -1.
EXPORTED int64_t kvc_send(kvc_layer* layer, int64_t first) {
    for (int64_t i = first; i < layer->count; i++)
        if (layer->calls[i].native && !send(*layer, layer->calls[i])) return i;
    write_own(*layer);
    return -1;
}

// Receives the answers of native calls from `first` on that are under way, and then puts all sources' partials together;
// the number of the first that failed, or -1.
EXPORTED int64_t kvc_receive(kvc_layer* layer, int64_t first) {
    for (int64_t i = first; i < layer->count; i++)
        if (layer->calls[i].native && layer->calls[i].under_way && !receive(*layer, layer->calls[i])) return i;
    gather(*layer);
    return -1;
}
