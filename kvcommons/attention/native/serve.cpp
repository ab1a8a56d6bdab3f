// The holder's side of AttendLayer, layer after layer: a request that is what follows the one before is received,
// appended, attended over and answered here. Whatever else comes stays in the socket, for Python.
#include "serve.h"

#include <cstdlib>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "wire.h"

using namespace kvc;

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int64_t kvc_scratch_bytes(const kvc_batch* batch);
EXPORTED void kvc_attend(const kvc_batch* batch);

namespace {

enum Stage : int32_t { NONE = 0, RECEIVING = 1, QUEUING = 2, SENDING = 3 };

// Bits of a stay.
constexpr int32_t BUSY = 1, ENDED = 2;
// Of a turn: whether it is taken, and whether somebody may sleep until it is given back.
constexpr int32_t FREE = 0, TAKEN = 1, WANTED = 2;

// What a wait for the rest of a head takes at most: longer ones are Python's, which sleeps meanwhile.
constexpr int64_t HEAD_NS = 200000;
// Iterations that a plan may be behind.
constexpr int64_t STEPS_MAX = 1 << 20;
// Between two looks whether a request is admitted, where it was before.
constexpr int64_t ADMIT_NS = 200000;
// Of the request's own fields, and of a segment's, at most.
constexpr int64_t REQUEST_BYTES = 64, SEGMENT_BYTES = 80;

struct Request {
    int64_t deadline_ns = 0;
    int64_t layer = 0;
    int64_t step = 0;  // iterations since the one that was served last
};

// A message's fields, in any order; false where it is none.
struct Fields {
    const char *at, *end;
    uint64_t tag = 0, value = 0;  // of a field of bytes, value is their number, and `at` where they begin

    bool next() {
        at = read_varint(at, end, tag);
        if (at) at = read_varint(at, end, value);
        return at != nullptr;
    }
};

bool is_row(const kvc_row& row, const char* at, const char* end, int64_t position, int64_t length, int64_t& step,
            bool first) {
    // By number: handle, epoch, rows, first_position, append, length, generation, first_block.
    uint64_t seen[9] = {};
    for (Fields fields{at, end}; fields.at < end;) {
        if (!fields.next() || fields.tag & 7 || fields.tag < 8 || fields.tag > 64) return false;
        seen[fields.tag >> 3] = fields.value;
    }
    if (seen[1] != row.handle || seen[2] != row.epoch || seen[3] != 1 || (seen[5] != 0) != (row.appends != 0) ||
        seen[7] != row.generation || seen[8] != row.first_block)
        return false;
    if (seen[4] >> 62) return false;  // sums of positions must not overflow
    int64_t moved = (int64_t)(seen[4] - (uint64_t)position);
    if (first) step = moved;
    if (moved != step || step < 0 || step > STEPS_MAX) return false;
    int64_t due = length + (row.appends ? step : 0);
    return seen[6] == (uint64_t)due && due <= row.reach;
}

// Whether this is a request for one of the layers, of this iteration or a later one.
bool follows(const kvc_plan& plan, const char* head, int64_t size, Request& request) {
    bool attends = false;
    const char* end = head + size;
    for (Fields fields{head, end}; fields.at < end;) {
        if (!fields.next()) return false;
        if (fields.tag == 8) {
            request.deadline_ns = (int64_t)(uint32_t)fields.value * 1000000;
            continue;
        }
        if (fields.tag != (14 << 3 | 2) || attends || fields.value > (uint64_t)(end - fields.at)) return false;
        attends = true;
        int64_t row = 0;
        const char* inner_end = fields.at + fields.value;
        for (Fields inner{fields.at, inner_end}; inner.at < inner_end;) {
            if (!inner.next()) return false;
            if (inner.tag == 8) {
                request.layer = (uint32_t)inner.value;
                continue;
            }
            if (inner.tag != (2 << 3 | 2) || inner.value > (uint64_t)(inner_end - inner.at)) return false;
            if (row == plan.batch.batch) return false;
            if (!is_row(plan.rows[row], inner.at, inner.at + inner.value, plan.positions[row],
                        plan.lengths[row], request.step, row == 0))
                return false;
            inner.at += inner.value, row++;
        }
        if (row != plan.batch.batch) return false;
        fields.at = inner_end;
    }
    return attends && request.deadline_ns && request.layer < plan.layers;
}

// What the call needs beside Python's memory.
struct Room {
    char* head = nullptr;
    char* scratch = nullptr;
    int64_t head_size, scratch_size = 0;

    explicit Room(int64_t rows) : head_size(HEADER_BYTES + REQUEST_BYTES + rows * SEGMENT_BYTES) {
        head = (char*)malloc((size_t)head_size);
    }
    ~Room() {
        free(head);
        free(scratch);
    }
    bool scratch_of(int64_t size) {
        if (size <= scratch_size) return true;
        free(scratch);
        scratch_size = (size + size / 2 + 63) / 64 * 64;  // sequences grow
        scratch = (char*)aligned_alloc(64, (size_t)scratch_size);
        if (!scratch) scratch_size = 0;
        return scratch != nullptr;
    }
};

bool take_turn(int32_t* turn, int64_t until_ns) {
    int32_t free = FREE;
    if (__atomic_compare_exchange_n(turn, &free, TAKEN, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) return true;
    while (__atomic_exchange_n(turn, WANTED, __ATOMIC_ACQUIRE) != FREE) {
        int64_t left = until_ns - now_ns();
        if (left <= 0) return false;
        timespec time{left / 1000000000LL, left % 1000000000LL};
        syscall(SYS_futex, turn, FUTEX_WAIT_PRIVATE, WANTED, &time, nullptr, 0);
    }
    return true;
}

void give_turn(int32_t* turn) {
    if (__atomic_exchange_n(turn, FREE, __ATOMIC_RELEASE) == WANTED)
        syscall(SYS_futex, turn, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

// The next frame's header and head, looked at where they lie.
Outcome peek_frame(const kvc_serving& serving, const Room& room, const Wait& wait, uint32_t& head_bytes,
                   uint64_t& payload_bytes) {
    int64_t began_ns = 0, some_ns = 0;
    for (;;) {
        ssize_t seen = recv(serving.descriptor, room.head, (size_t)room.head_size, MSG_DONTWAIT | MSG_PEEK);
        if (seen == 0) return GONE;
        if (seen < 0) {
            if (errno == EINTR) continue;
            if (errno != EAGAIN && errno != EWOULDBLOCK) return GONE;
            Outcome outcome = pause(serving.descriptor, POLLIN, wait, began_ns);
            if (outcome != DONE) return outcome;
            continue;
        }
        if (seen >= HEADER_BYTES) {
            if (!read_header(room.head, head_bytes, payload_bytes)) return OTHER;
            if (head_bytes > (uint64_t)(room.head_size - HEADER_BYTES)) return OTHER;
            if (seen >= HEADER_BYTES + (int64_t)head_bytes) return DONE;
        }
        if (!some_ns) some_ns = now_ns();
        if (now_ns() - some_ns > HEAD_NS) return OTHER;
        sched_yield();
    }
}

template <class Value>
Value seen(const Value& value) {
    return __atomic_load_n(&value, __ATOMIC_RELAXED);
}

// Whether a request may be computed now.
bool admits(const kvc_allowance* allowance) {
    if (!allowance || !seen(allowance->bounded) || seen(allowance->waiting)) return true;
    int64_t spent_ns = seen(allowance->spent_ns);
    if (spent_ns < seen(allowance->limit_ns)) return true;
    return spent_ns == seen(allowance->fresh_ns) && !seen(allowance->under_way) && !seen(allowance->others);
}

// From when a request waits for the cores until it has computed.
struct Spending {
    kvc_allowance* allowance;
    bool counts = false;
    int64_t began_ns;

    explicit Spending(kvc_allowance* of) : allowance(of), began_ns(now_ns()) {
        if (!allowance) return;
        counts = !seen(allowance->waiting);
        __atomic_add_fetch(&allowance->under_way, 1, __ATOMIC_RELAXED);
    }
    ~Spending() {
        if (!allowance) return;
        __atomic_sub_fetch(&allowance->under_way, 1, __ATOMIC_RELAXED);
        if (counts) __atomic_add_fetch(&allowance->spent_ns, now_ns() - began_ns, __ATOMIC_RELAXED);
    }
};

// The rows' new keys and values, to the slots of their last tokens.
void append(const kvc_plan& plan, const kvc_batch& call) {
    int64_t count = 2 * call.kv_heads, bytes = call.dim * (call.kv_is_bf16 ? 2 : 4);
    const char* from = plan.appended;
    for (int64_t row = 0; row < call.batch; row++) {
        if (!plan.rows[row].appends) continue;
        int64_t token = call.lengths[row] - 1;
        int64_t block = call.tables[row * call.table_width + token / call.block_tokens];
        char* to = (char*)call.kv + (block * count * call.block_tokens + token % call.block_tokens) * bytes;
        for (int64_t head = 0; head < count; head++, from += bytes, to += call.block_tokens * bytes)
            memcpy(to, from, (size_t)bytes);
    }
}

// To a later iteration.
void move_on(const kvc_plan& plan, int64_t step) {
    for (int64_t row = 0; row < plan.batch.batch; row++) {
        plan.positions[row] += step;
        plan.lengths[row] += plan.rows[row].appends ? step : 0;
    }
}

Outcome failed(kvc_serving& serving, Outcome outcome, Stage stage, int64_t began_ns) {
    serving.stage = stage;
    serving.failed_ns = now_ns() - began_ns;
    return outcome;
}

// A request whose frame is there, or begins to be.
Outcome answer(kvc_serving& serving, const kvc_plan& plan, Room& room, const Request& request, uint32_t head_bytes,
               int64_t began_ns) {
    kvc_batch call = plan.batch;
    int64_t due_ns = request.deadline_ns < serving.operation_ns ? request.deadline_ns : serving.operation_ns;
    Wait wait{began_ns + due_ns, serving.ask_ns};
    int64_t q_bytes = call.batch * call.heads * call.dim * 4, moved;
    int64_t taken = HEADER_BYTES + (int64_t)head_bytes;
    iovec incoming[] = {
        {room.head, (size_t)taken}, {(void*)call.q, (size_t)q_bytes}, {plan.appended, (size_t)plan.appended_bytes}};
    Outcome outcome = transfer(serving.descriptor, incoming, 3, false, wait, moved);
    serving.received = moved > taken ? moved - taken : 0;
    if (outcome != DONE) return failed(serving, outcome, RECEIVING, began_ns);

    int64_t asked_ns = now_ns();
    // It was admitted when its head was looked at: this is where others have spent the rest since.
    while (!admits(serving.allowance)) {
        if (now_ns() >= wait.until_ns) return failed(serving, LATE, QUEUING, began_ns);
        timespec time{0, ADMIT_NS};
        nanosleep(&time, nullptr);
    }
    int64_t computes_ns;
    {
        Spending spending(serving.allowance);
        if (!take_turn(serving.turn, wait.until_ns)) return failed(serving, LATE, QUEUING, began_ns);
        computes_ns = now_ns();
        call.kv = (const char*)call.kv + request.layer * plan.layer_bytes;
        call.scratch = room.scratch;
        append(plan, call);
        kvc_attend(&call);
        give_turn(serving.turn);
    }
    uint64_t queued_us = (uint64_t)(computes_ns - asked_ns) / 1000;
    uint64_t computed_us = (uint64_t)(now_ns() - computes_ns) / 1000;

    // DataReply{attend_layer{queued_us, computed_us}}
    char frame[HEADER_BYTES + 32], told[24], *end = told;
    if (queued_us) *end++ = 1 << 3, end = put_varint(end, (uint32_t)queued_us);
    if (computed_us) *end++ = 2 << 3, end = put_varint(end, (uint32_t)computed_us);
    char* at = frame + HEADER_BYTES;
    *at++ = 13 << 3 | 2;
    *at++ = (char)(end - told);
    memcpy(at, told, (size_t)(end - told));
    at += end - told;
    int64_t answer_bytes = call.batch * call.heads * (call.dim + 1) * 4;
    put_header(frame, (uint32_t)(at - frame - HEADER_BYTES), (uint64_t)answer_bytes);
    iovec outgoing[] = {{frame, (size_t)(at - frame)}, {call.out, (size_t)answer_bytes}};
    outcome = transfer(serving.descriptor, outgoing, 2, true, wait, moved);
    if (outcome != DONE) return failed(serving, outcome, SENDING, began_ns);
    return DONE;
}

// Of the plan that such a frame is for; `count` where there is none.
int64_t find_plan(const kvc_serving& serving, const char* head, int64_t head_bytes, uint64_t payload_bytes,
                  Request& request) {
    for (int64_t i = 0; i < serving.count; i++) {
        const kvc_plan& plan = *serving.plans[i];
        const kvc_batch& batch = plan.batch;
        request = Request();
        if (payload_bytes == (uint64_t)(batch.batch * batch.heads * batch.dim * 4 + plan.appended_bytes) &&
            follows(plan, head, head_bytes, request))
            return i;
    }
    return serving.count;
}

}  // namespace

// Until `until_ns` for the turn to compute; whether it has come.
EXPORTED int32_t kvc_take_turn(int32_t* turn, int64_t until_ns) { return take_turn(turn, until_ns); }

EXPORTED void kvc_give_turn(int32_t* turn) { give_turn(turn); }

// From now on no request is begun; whether none is under way.
EXPORTED int32_t kvc_end(int32_t* stay) { return !(__atomic_fetch_or(stay, ENDED, __ATOMIC_ACQ_REL) & BUSY); }

// Serves until something comes that does not follow (OTHER), or whose stay was ended (CHANGED), nothing comes for
// quiet_ns (LATE), the peer's end (GONE), or took_ns is full (DONE). Nothing of a frame was taken then, unless `stage`
// says where a request failed.
EXPORTED int32_t kvc_serve(kvc_serving* serving) {
    serving->took = serving->received = serving->failed_ns = 0;
    serving->stage = NONE;
    int64_t rows = 0;
    for (int64_t i = 0; i < serving->count; i++)
        rows = rows > serving->plans[i]->batch.batch ? rows : serving->plans[i]->batch.batch;
    Room room(rows);
    if (!room.head) return OTHER;
    int64_t waits_ns = now_ns();
    while (serving->took < serving->took_max) {
        Wait wait{waits_ns + serving->quiet_ns, serving->brief ? serving->ask_ns : 0};
        uint32_t head_bytes;
        uint64_t payload_bytes;
        Outcome outcome = peek_frame(*serving, room, wait, head_bytes, payload_bytes);
        if (outcome == LATE) serving->brief = 0;
        if (outcome != DONE) return outcome;
        int64_t began_ns = now_ns();
        serving->brief = began_ns - waits_ns < serving->ask_ns * 3 / 2;
        Request request;
        int64_t index = find_plan(*serving, room.head + HEADER_BYTES, head_bytes, payload_bytes, request);
        if (index == serving->count || !admits(serving->allowance)) return OTHER;
        kvc_plan& plan = *serving->plans[index];
        if (request.step) move_on(plan, request.step);
        plan.batch.window = plan.windows[request.layer];
        if (!room.scratch_of(kvc_scratch_bytes(&plan.batch))) return OTHER;
        int32_t idle = 0, busy = BUSY;
        if (!__atomic_compare_exchange_n(plan.stay, &idle, BUSY, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            return CHANGED;
        outcome = answer(*serving, plan, room, request, head_bytes, began_ns);
        if (outcome != DONE) return outcome;
        waits_ns = now_ns();
        serving->took_plan[serving->took] = (int32_t)index;
        serving->took_ns[serving->took++] = waits_ns - began_ns;
        if (!__atomic_compare_exchange_n(plan.stay, &busy, 0, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            return CHANGED;
    }
    return DONE;
}
