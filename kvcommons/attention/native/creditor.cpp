// A creditor's layers on the native path: one that is of a known plan is received, appended, attended over and
// answered here. Whatever else comes stays in the socket, for Python.
#include <cstdlib>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "exchange.h"
#include "frames.h"

using namespace kvc;

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int64_t kvc_scratch_bytes(const kvc_batch* batch);
EXPORTED void kvc_attend(const kvc_batch* batch);

namespace {

enum Stage : int32_t { NONE = 0, RECEIVING = 1, QUEUING = 2, SENDING = 3 };

// Bits of a plan's access.
constexpr int32_t BUSY = 1, ENDED = 2;
// Of a lock: whether it is held, and whether somebody may sleep until it is released.
constexpr int32_t FREE = 0, HELD = 1, CONTENDED = 2;

// What a wait for the rest of a head takes at most: longer ones are Python's, which sleeps meanwhile.
constexpr int64_t HEAD_NS = 200000;

// Between looks whether computations have ended, of who gives way to them.
constexpr int64_t NAP_NS = 50000;

// Sleeps while `word` is `value`, until it is woken or the time has come; false where it had come before.
bool sleep_on(int32_t* word, int32_t value, int64_t until_ns) {
    int64_t left = until_ns - now_ns();
    if (left <= 0) return false;
    timespec time{left / 1000000000LL, left % 1000000000LL};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, &time, nullptr, 0);
    return true;
}

bool acquire(int32_t* lock, int64_t until_ns) {
    int32_t free = FREE;
    if (__atomic_compare_exchange_n(lock, &free, HELD, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) return true;
    while (__atomic_exchange_n(lock, CONTENDED, __ATOMIC_ACQUIRE) != FREE)
        if (!sleep_on(lock, CONTENDED, until_ns)) return false;
    return true;
}

void release(int32_t* lock) {
    if (__atomic_exchange_n(lock, FREE, __ATOMIC_RELEASE) == CONTENDED)
        syscall(SYS_futex, lock, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

// What the call needs beside Python's memory.
struct Scratch {
    char* bytes = nullptr;
    int64_t size = 0;

    ~Scratch() { free(bytes); }
    bool hold(int64_t wanted) {
        if (wanted <= size) return true;
        free(bytes);
        size = (wanted + wanted / 2 + 63) / 64 * 64;  // sequences grow
        bytes = (char*)aligned_alloc(64, (size_t)size);
        if (!bytes) size = 0;
        return bytes != nullptr;
    }
};

// The next frame's header and head, looked at where they lie; OTHER for what is no layer's.
Outcome peek(int descriptor, const Wait& wait, LayerFrame& frame) {
    int64_t began_ns = 0, some_ns = 0;
    for (;;) {
        ssize_t seen = recv(descriptor, &frame, sizeof frame, MSG_DONTWAIT | MSG_PEEK);
        if (seen == 0) return GONE;
        if (seen < 0) {
            if (errno == EINTR) continue;
            if (errno != EAGAIN && errno != EWOULDBLOCK) return GONE;
            Outcome outcome = pause(descriptor, POLLIN, wait, began_ns);
            if (outcome != DONE) return outcome;
            continue;
        }
        if (seen >= (ssize_t)sizeof(FrameHeader)) {
            uint64_t payload;
            memcpy(&payload, frame.header.payload_bytes, 8);
            if (!frame.header.is(sizeof(LayerHead), payload)) return OTHER;
            if (seen == (ssize_t)sizeof frame) return frame.head.version == LAYER_VERSION ? DONE : OTHER;
        }
        if (!some_ns) some_ns = now_ns();
        if (now_ns() - some_ns > HEAD_NS) return OTHER;
        sched_yield();
    }
}

int64_t element_bytes(const kvc_plan& plan) { return plan.batch.kv_is_bf16 ? 2 : 4; }

int64_t query_bytes(const kvc_plan& plan) { return plan.batch.batch * plan.batch.heads * plan.batch.dim * 4; }

int64_t appended_bytes(const kvc_plan& plan) {
    return plan.appended * 2 * plan.batch.kv_heads * plan.batch.dim * element_bytes(plan);
}

int64_t answer_bytes(const kvc_plan& plan) { return plan.batch.batch * plan.batch.heads * (plan.batch.dim + 1) * 4; }

int64_t request_bytes(const kvc_plan& plan) { return query_bytes(plan) + appended_bytes(plan); }

// Where the answer begins in the buffer.
int64_t answer_at(const kvc_plan& plan) { return (request_bytes(plan) + 63) / 64 * 64; }

// The plan that such a layer is of, if it can be served here; null: Python says what is wrong with it.
kvc_plan* find_plan(const kvc_serving& serving, const LayerFrame& frame) {
    const LayerHead& head = frame.head;
    for (int64_t i = 0; i < serving.count; i++) {
        kvc_plan& plan = *serving.plans[i];
        if (plan.number != head.plan) continue;
        bool fits = plan.revision == head.revision && head.layer < plan.layers && head.deadline_ms &&
                    head.rows == (uint64_t)plan.batch.batch && head.appended == (uint64_t)plan.appended &&
                    !head.reserved &&
                    frame.header.is(sizeof head, (uint64_t)request_bytes(plan)) &&
                    answer_at(plan) + answer_bytes(plan) <= serving.buffer_bytes;
        return fits ? &plan : nullptr;
    }
    return nullptr;
}

void move_to(kvc_plan& plan, int64_t step) {
    if (plan.step == step) return;
    for (int64_t row = 0; row < plan.batch.batch; row++) {
        plan.lengths[row] = plan.first_lengths[row] + plan.grows[row] * step;
        plan.positions[row] = plan.first_positions[row] + step;
    }
    plan.step = step;
}

// The rows' new keys and values, to the slots of their last tokens.
void append(const kvc_plan& plan, const kvc_batch& call, const char* from) {
    int64_t count = 2 * call.kv_heads, bytes = call.dim * element_bytes(plan);
    for (int64_t row = 0; row < call.batch; row++) {
        if (!plan.brings[row]) continue;
        if (!plan.grows[row]) {
            from += count * bytes;  // the row is lost
            continue;
        }
        int64_t token = call.lengths[row] - 1;
        int64_t block = call.tables[row * call.table_width + token / call.block_tokens];
        char* to = (char*)call.kv + (block * count * call.block_tokens + token % call.block_tokens) * bytes;
        for (int64_t head = 0; head < count; head++, from += bytes, to += call.block_tokens * bytes)
            memcpy(to, from, (size_t)bytes);
    }
}

Outcome failed(kvc_serving& serving, Outcome outcome, Stage stage, int64_t began_ns) {
    serving.stage = stage;
    serving.failed_ns = now_ns() - began_ns;
    return outcome;
}

// For the lock to compute under, with time left of what was granted: when it came, 0 where it has not in time, negative where
// the computation does not count.
int64_t wait_to_begin(kvc_allowance* allowance, int64_t until_ns) {
    for (;;) {
        int64_t began_ns = now_ns();
        int32_t grants = __atomic_load_n(&allowance->grants, __ATOMIC_SEQ_CST);
        if (!acquire(&allowance->lock, until_ns)) return 0;
        bool counts = __atomic_load_n(&allowance->counts, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&allowance->spent_ns, __ATOMIC_SEQ_CST) <
            __atomic_load_n(&allowance->granted_ns, __ATOMIC_SEQ_CST))
            return counts ? began_ns : -began_ns;
        release(&allowance->lock);
        __atomic_add_fetch(&allowance->sleepers, 1, __ATOMIC_SEQ_CST);
        bool slept = sleep_on(&allowance->grants, grants, until_ns);
        __atomic_sub_fetch(&allowance->sleepers, 1, __ATOMIC_SEQ_CST);
        if (!slept) return 0;
    }
}

int64_t take(kvc_allowance* allowance, int64_t until_ns) {
    __atomic_add_fetch(&allowance->outstanding, 1, __ATOMIC_SEQ_CST);
    int64_t taken_ns = wait_to_begin(allowance, until_ns);
    if (!taken_ns) __atomic_sub_fetch(&allowance->outstanding, 1, __ATOMIC_SEQ_CST);
    return taken_ns;
}

void give(kvc_allowance* allowance, int64_t taken_ns) {
    if (taken_ns > 0) __atomic_add_fetch(&allowance->spent_ns, now_ns() - taken_ns, __ATOMIC_SEQ_CST);
    release(&allowance->lock);
    __atomic_sub_fetch(&allowance->outstanding, 1, __ATOMIC_SEQ_CST);
}

// A layer whose frame is there, or begins to be.
Outcome answer(kvc_serving& serving, const kvc_plan& plan, Scratch& scratch, const LayerFrame& frame,
               int64_t began_ns) {
    kvc_batch call = plan.batch;
    int64_t due_ns = frame.head.deadline_ms * 1000000LL;
    Wait wait{began_ns + (due_ns < serving.operation_ns ? due_ns : serving.operation_ns), serving.ask_ns};
    int64_t bytes = request_bytes(plan), moved;
    char* request = serving.buffer;
    LayerFrame taken;
    iovec incoming[] = {{&taken, sizeof taken}, {request, (size_t)bytes}};
    Outcome outcome = transfer(serving.descriptor, incoming, 2, false, wait, moved);
    serving.received = moved > (int64_t)sizeof taken ? moved - (int64_t)sizeof taken : 0;
    if (outcome != DONE) return failed(serving, outcome, RECEIVING, began_ns);

    int64_t asked_ns = now_ns(), taken_ns = take(serving.allowance, wait.until_ns);
    if (!taken_ns) return failed(serving, LATE, QUEUING, began_ns);
    int64_t computes_ns = now_ns();
    call.kv = (const char*)call.kv + frame.head.layer * plan.layer_bytes;
    call.q = request;
    call.out = (float*)(request + answer_at(plan));
    call.lse = call.out + call.batch * call.heads * call.dim;
    call.scratch = scratch.bytes;
    append(plan, call, request + query_bytes(plan));
    kvc_attend(&call);
    int64_t ended_ns = now_ns();
    give(serving.allowance, taken_ns);

    ReplyFrame reply{FrameHeader(sizeof(LayerReply), (uint64_t)answer_bytes(plan)),
                     {LAYER_VERSION, frame.head.layer, frame.head.plan, frame.head.step,
                      (uint32_t)((computes_ns - asked_ns) / 1000), (uint32_t)((ended_ns - computes_ns) / 1000),
                      plan.lost}};
    iovec outgoing[] = {{&reply, sizeof reply}, {call.out, (size_t)answer_bytes(plan)}};
    outcome = transfer(serving.descriptor, outgoing, 2, true, wait, moved);
    if (outcome != DONE) return failed(serving, outcome, SENDING, began_ns);
    return DONE;
}

}  // namespace

// As `take`; `kvc_give` follows, with what it returned.
EXPORTED int64_t kvc_take(kvc_allowance* allowance, int64_t until_ns) { return take(allowance, until_ns); }

EXPORTED void kvc_give(kvc_allowance* allowance, int64_t taken_ns) { give(allowance, taken_ns); }

// Computations may begin until so much is spent; whether those that begin now count.
EXPORTED void kvc_grant(kvc_allowance* allowance, int64_t granted_ns, int32_t counts) {
    __atomic_store_n(&allowance->counts, counts, __ATOMIC_SEQ_CST);
    __atomic_store_n(&allowance->granted_ns, granted_ns, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&allowance->grants, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&allowance->sleepers, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &allowance->grants, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}

// Until no computation is under way and none that may begin waits, or the time has come. It looks again and again: who
// gives way has a layer of a chunk to compute next, of milliseconds, and computations pay for no call to wake it.
EXPORTED void kvc_give_way(kvc_allowance* allowance, int64_t until_ns) {
    while (__atomic_load_n(&allowance->outstanding, __ATOMIC_SEQ_CST) && now_ns() < until_ns) {
        bool exhausted = __atomic_load_n(&allowance->spent_ns, __ATOMIC_SEQ_CST) >=
                         __atomic_load_n(&allowance->granted_ns, __ATOMIC_SEQ_CST);
        if (exhausted && __atomic_load_n(&allowance->lock, __ATOMIC_SEQ_CST) == FREE) return;
        timespec nap{0, NAP_NS};
        nanosleep(&nap, nullptr);
    }
}

// From now on no layer is begun; whether none is under way.
EXPORTED int32_t kvc_end_access(int32_t* access) {
    return !(__atomic_fetch_or(access, ENDED, __ATOMIC_ACQ_REL) & BUSY);
}

// Serves until something comes that is Python's (OTHER), or whose plan has to be looked up again (CHANGED), nothing comes
// for quiet_ns (LATE), the peer's end (GONE), or took_ns is full (DONE). Nothing of a frame was taken then, unless
// `stage` says where a layer failed.
EXPORTED int32_t kvc_serve(kvc_serving* serving) {
    serving->took = serving->received = serving->failed_ns = 0;
    serving->stage = NONE;
    serving->pending = 0;
    Scratch scratch;
    int64_t waits_ns = now_ns();
    while (serving->took < serving->took_max) {
        Wait wait{waits_ns + serving->quiet_ns, serving->brief ? serving->ask_ns : 0};
        LayerFrame frame;
        Outcome outcome = peek(serving->descriptor, wait, frame);
        if (outcome == LATE) serving->brief = 0;
        if (outcome != DONE) return outcome;
        int64_t began_ns = now_ns();
        serving->brief = began_ns - waits_ns < serving->ask_ns * 3 / 2;
        kvc_plan* plan = find_plan(*serving, frame);
        if (!plan) return OTHER;
        int64_t step = frame.head.step;
        int32_t idle = 0, busy = BUSY;
        if (step < plan->first_step || step > plan->last_step ||
            !__atomic_compare_exchange_n(&plan->access, &idle, BUSY, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            serving->pending = 1, serving->plan = plan->number, serving->step = step;
            return CHANGED;
        }
        move_to(*plan, step);
        plan->batch.window = plan->windows[frame.head.layer];
        outcome = scratch.hold(kvc_scratch_bytes(&plan->batch)) ? answer(*serving, *plan, scratch, frame, began_ns)
                                                                : OTHER;
        bool left = __atomic_compare_exchange_n(&plan->access, &busy, 0, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
        if (outcome != DONE) return outcome;
        waits_ns = now_ns();
        serving->took_plan[serving->took] = plan->number;
        serving->took_ns[serving->took++] = waits_ns - began_ns;
        if (!left) return CHANGED;
    }
    return DONE;
}
