// What a layer costs between two slices where its KV lies elsewhere too, without the interpreter in between.
#include "ask.h"

#include "attend.h"
#include "wire.h"

using namespace kvc;

extern "C" void kvc_merge_partials(const kvc_merge* merge);

namespace {

constexpr int64_t REPLY_HEAD_MAX = 32;
// Tags of data.proto: DataRequest.deadline_ms, .attend_layer; AttendLayer.layer; DataReply.attend_layer, and its
// queued_us and computed_us.
constexpr unsigned char DEADLINE_MS = 1 << 3, ATTEND_LAYER = 14 << 3 | 2, LAYER = 1 << 3;
constexpr unsigned char ATTENDED_LAYER = 13 << 3 | 2, QUEUED_US = 1 << 3, COMPUTED_US = 2 << 3;

int64_t varint_bytes(uint64_t value) {
    int64_t bytes = 1;
    while (value >>= 7) bytes++;
    return bytes;
}

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

int64_t payload_bytes(const kvc_layers& layers, const kvc_ask& ask) {
    int64_t size = layers.is_bf16 ? 2 : 4;
    return layers.dim * (ask.row_count * ask.heads * 4 + ask.appended_count * 2 * ask.kv_heads * size);
}

void write_payload(const kvc_layers& layers, const kvc_ask& ask) {
    int64_t size = layers.is_bf16 ? 2 : 4, dim = layers.dim;
    float* into = (float*)ask.payload;
    for (int64_t i = 0; i < ask.row_count; i++) {
        int64_t row = ask.rows[i];
        const char* from = layers.q;
        int64_t row_stride = layers.q_row, head_stride = layers.q_head;
        if (row < 0) {
            row = ~row, from = layers.shifted;
            row_stride = layers.shifted_row, head_stride = layers.shifted_head;
        }
        from += (row * row_stride + ask.first_head * head_stride) * size;
        into = widen(from, head_stride, ask.heads, dim, layers.is_bf16, into);
    }
    char* at = (char*)into;
    for (int64_t i = 0; i < ask.appended_count; i++) {
        int64_t row = ask.appended[i];
        for (int64_t h = 0; h < ask.kv_heads; h++, at += dim * size)
            memcpy(at, layers.k + (row * layers.k_row + (ask.first_kv_head + h) * layers.k_head) * size,
                   (size_t)(dim * size));
        for (int64_t h = 0; h < ask.kv_heads; h++, at += dim * size)
            memcpy(at, layers.v + (row * layers.v_row + (ask.first_kv_head + h) * layers.v_head) * size,
                   (size_t)(dim * size));
    }
}

// The frame's header and the head before the segments; where it begins.
char* write_head(const kvc_layers& layers, const kvc_ask& ask, int64_t payload) {
    int64_t left_ms = (layers.until_ns - now_ns() + 999999) / 1000000;
    if (left_ms < 1) left_ms = 1;
    if (left_ms > UINT32_MAX) left_ms = UINT32_MAX;
    int64_t layer_bytes = layers.layer ? 1 + varint_bytes((uint64_t)layers.layer) : 0;
    int64_t words = layer_bytes + ask.segments_bytes;
    int64_t before = 1 + varint_bytes((uint64_t)left_ms) + ask.trace_bytes + 1 + varint_bytes((uint64_t)words);
    char* begin = ask.head + ask.head_room - layer_bytes - before - HEADER_BYTES;
    put_header(begin, (uint32_t)(before + words), (uint64_t)payload);
    char* at = begin + HEADER_BYTES;
    *at++ = (char)DEADLINE_MS;
    at = put_varint(at, (uint64_t)left_ms);
    memcpy(at, ask.trace, (size_t)ask.trace_bytes);
    at += ask.trace_bytes;
    *at++ = (char)ATTEND_LAYER;
    at = put_varint(at, (uint64_t)words);
    if (layers.layer) {
        *at++ = (char)LAYER;
        put_varint(at, (uint64_t)layers.layer);
    }
    return begin;
}

bool send(const kvc_layers& layers, kvc_ask& ask) {
    kvc_told& told = ask.told[layers.turn];
    told.began = now_ns();
    told.waits = told.came = 0;  // of an iteration before
    write_payload(layers, ask);
    int64_t payload = payload_bytes(layers, ask);
    char* begin = write_head(layers, ask, payload);
    iovec parts[2] = {{begin, (size_t)(ask.head + ask.head_room + ask.segments_bytes - begin)},
                      {ask.payload, (size_t)payload}};
    told.sending = now_ns();
    ask.outcome = transfer((int)ask.descriptor, parts, 2, true, Wait{layers.until_ns, 0}, ask.moved);
    ask.error = ask.outcome == GONE ? errno : 0;
    ask.under_way = ask.outcome == DONE;
    return ask.outcome == DONE;
}

// Where an answer goes whose head has so many bytes: how many parts.
int64_t lay_out(const kvc_ask& ask, int64_t dim, char* small, int64_t head_bytes) {
    iovec* parts = (iovec*)ask.parts;
    int64_t count = 0, row = ask.heads * dim;
    parts[count++] = {small, (size_t)(HEADER_BYTES + head_bytes)};
    if (ask.out_row == row)
        parts[count++] = {ask.out, (size_t)(ask.row_count * row * 4)};
    else
        for (int64_t i = 0; i < ask.row_count; i++) parts[count++] = {ask.out + i * ask.out_row, (size_t)(row * 4)};
    if (ask.lse_row == ask.heads)
        parts[count++] = {ask.lse, (size_t)(ask.row_count * ask.heads * 4)};
    else
        for (int64_t i = 0; i < ask.row_count; i++)
            parts[count++] = {ask.lse + i * ask.lse_row, (size_t)(ask.heads * 4)};
    return count;
}

// Between `count` parts and memory in one piece, from the front.
void copy(const iovec* parts, int64_t count, char* whole, int64_t bytes, bool into_parts) {
    for (int64_t i = 0; i < count && bytes > 0; i++) {
        int64_t some = (int64_t)parts[i].iov_len < bytes ? (int64_t)parts[i].iov_len : bytes;
        memcpy(into_parts ? parts[i].iov_base : whole, into_parts ? whole : parts[i].iov_base, (size_t)some);
        whole += some, bytes -= some;
    }
}

// False for anything but a DataReply with an AttendLayerReply alone.
bool read_reply(const char* at, int64_t bytes, kvc_told& told) {
    const char* end = at + bytes;
    uint64_t size, value;
    if (at >= end || (unsigned char)*at++ != ATTENDED_LAYER) return false;
    if (!(at = read_varint(at, end, size)) || at + size != end) return false;
    told.queued_us = told.computed_us = 0;
    while (at < end) {
        unsigned char tag = (unsigned char)*at++;
        if (tag != QUEUED_US && tag != COMPUTED_US) return false;
        if (!(at = read_varint(at, end, value))) return false;
        (tag == QUEUED_US ? told.queued_us : told.computed_us) = (int64_t)value;
    }
    return true;
}

// All of an answer, received as if its head had as many bytes as the last one's, and moved where it has not.
Outcome receive_reply(kvc_ask& ask, int64_t dim, kvc_told& told, const Wait& wait) {
    char small[HEADER_BYTES + REPLY_HEAD_MAX];
    iovec* parts = (iovec*)ask.parts;
    int64_t due = ask.row_count * ask.heads * (dim + 1) * 4, got = 0, guess = ask.reply_head, some;
    int64_t count = lay_out(ask, dim, small, guess);
    Outcome outcome = transfer((int)ask.descriptor, parts, count, false, wait, got, HEADER_BYTES);
    if (outcome != DONE) return outcome;
    uint32_t head_bytes = 0;
    uint64_t payload = 0;
    // Of a frame that is another's business, what came is put in order and left to Python.
    bool mine = got >= HEADER_BYTES && read_header(small, head_bytes, payload) && head_bytes <= REPLY_HEAD_MAX &&
                payload == (uint64_t)due;
    if (mine && head_bytes == guess) {
        outcome = transfer((int)ask.descriptor, parts, count, false, wait, some);
        got += some;
        if (outcome != DONE) return outcome;
        if (read_reply(small + HEADER_BYTES, guess, told)) return DONE;
        mine = false;
    }
    count = lay_out(ask, dim, small, guess);
    copy(parts, count, ask.payload, got, false);
    while (mine && got < HEADER_BYTES + head_bytes) {
        iovec rest{ask.payload + got, (size_t)(HEADER_BYTES + head_bytes - got)};
        outcome = transfer((int)ask.descriptor, &rest, 1, false, wait, some);
        got += some;
        if (outcome != DONE) return outcome;
    }
    // Nothing is sent unasked: more than the frame is not ours to read.
    mine = mine && got <= HEADER_BYTES + (int64_t)head_bytes + due;
    if (!mine || !read_reply(ask.payload + HEADER_BYTES, head_bytes, told)) {
        ask.moved = got;
        return OTHER;
    }
    ask.reply_head = (int32_t)head_bytes;
    count = lay_out(ask, dim, small, head_bytes);
    copy(parts, count, ask.payload, got, true);
    advance(parts, got);
    return transfer((int)ask.descriptor, parts, count, false, wait, some);
}

bool receive(const kvc_layers& layers, kvc_ask& ask) {
    kvc_told& told = ask.told[layers.turn];
    told.waits = now_ns();
    Wait wait{layers.until_ns, ask.long_wait ? 0 : ask.ask_ns};
    ask.moved = 0;
    Outcome outcome = receive_reply(ask, layers.dim, told, wait);
    ask.error = outcome == GONE ? errno : 0;
    ask.outcome = outcome;
    ask.under_way = outcome != DONE;
    told.came = now_ns();
    ask.long_wait = told.came - told.waits > ask.ask_ns + ask.ask_ns / 2;
    return outcome == DONE;
}

// K and V of rows whose newest tokens lie here.
void write_own(const kvc_layers& layers) {
    int64_t size = layers.is_bf16 ? 2 : 4, bytes = layers.dim * size, heads = layers.kv_heads;
    char* kv = layers.kv + layers.layer * layers.kv_layer_bytes;
    const int64_t* place = layers.own_places;
    for (int64_t i = 0; i < layers.own_count; i++) {
        int64_t row = layers.own[i];
        for (int64_t h = 0; h < heads; h++, place++)
            memcpy(kv + *place * bytes, layers.k + (row * layers.k_row + h * layers.k_head) * size, (size_t)bytes);
        for (int64_t h = 0; h < heads; h++, place++)
            memcpy(kv + *place * bytes, layers.v + (row * layers.v_row + h * layers.v_head) * size, (size_t)bytes);
    }
}

void gather(const kvc_layers& layers) {
    const kvc_gather& all = layers.gather;
    int64_t dim = layers.dim, heads = all.heads;
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
        kvc_merge merge{outs, lses, out, lse, nullptr, count, heads, dim, 1, layers.variant};
        kvc_merge_partials(&merge);
    }
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Sizes of the structures, for whoever writes them down a second time.
EXPORTED int64_t kvc_ask_bytes() { return sizeof(kvc_ask); }
EXPORTED int64_t kvc_layers_bytes() { return sizeof(kvc_layers); }

// Asks every holder, and writes what belongs here; how many could not be asked. What it took is told at `number`.
EXPORTED int64_t kvc_ask_all(kvc_layers* layers, int64_t layer, int64_t number) {
    kvc_turn& turn = layers->turns[number];
    turn.asks = now_ns();
    layers->layer = layer, layers->turn = number;
    layers->until_ns = turn.asks + layers->deadline_ns;
    int64_t failed = 0;
    for (int64_t i = 0; i < layers->count; i++) failed += !send(*layers, layers->asks[i]);
    turn.asked = now_ns();
    write_own(*layers);
    return failed;
}

// One of them, in the same layer; 1 where it could not be asked.
EXPORTED int64_t kvc_ask_again(kvc_layers* layers, int64_t number) { return !send(*layers, layers->asks[number]); }

// Receives every answer and puts all together; the number of the first that failed, those behind it are still under
// way, or -1.
EXPORTED int64_t kvc_receive_all(kvc_layers* layers) {
    kvc_turn& turn = layers->turns[layers->turn];
    turn.waits = now_ns();
    for (int64_t i = 0; i < layers->count; i++)
        if (!receive(*layers, layers->asks[i])) return i;
    turn.came = now_ns();
    gather(*layers);
    return -1;
}

// One of them; 1 where it failed.
EXPORTED int64_t kvc_receive_one(kvc_layers* layers, int64_t number) { return !receive(*layers, layers->asks[number]); }
