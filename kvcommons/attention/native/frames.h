// Frames over a connected stream socket, on the native path: what the two ends of a partial share. A frame is
// kvcommons/transport/frame.py's, a layer's head kvcommons/holder/layer_head.py's; sockets are not blocking, as
// everywhere, and every wait has an end.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "clock.h"

namespace kvc {

enum Outcome : int32_t {
    DONE = 0,
    LATE = 1,     // the wait's end came first
    GONE = 2,     // the peer's end, or an error of the system
    CHANGED = 3,  // what was served was ended by somebody else
    OTHER = 4,    // something came that Python has to look at; nothing of it was taken
};

// A frame's header, as far as it is that of a layer: docs/formats/data-frame.md.
struct FrameHeader {
    char magic[4] = {'K', 'V', 'C', 'F'};
    uint16_t version = 1, flags = 2;
    uint32_t head_bytes;
    uint32_t payload_bytes[2];  // one number of 8 bytes, which would not be aligned

    explicit FrameHeader(uint32_t head = 0, uint64_t payload = 0) : head_bytes(head) {
        memcpy(payload_bytes, &payload, 8);
    }
    // Whether this is exactly the header of such a frame.
    bool is(uint32_t head, uint64_t payload) const {
        FrameHeader wanted(head, payload);
        return !memcmp(this, &wanted, sizeof *this);
    }
};

// A layer's head: docs/formats/attention-layer.md.
constexpr uint16_t LAYER_VERSION = 1;

struct LayerHead {
    uint16_t version, layer;
    uint32_t plan, revision, step, deadline_ms, rows, appended, reserved;
};

struct LayerReply {
    uint16_t version, layer;
    uint32_t plan, step, queued_us, computed_us, lost;
};

static_assert(sizeof(FrameHeader) == 20 && sizeof(LayerHead) == 32 && sizeof(LayerReply) == 24, "docs/formats");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "heads are sent as they lie");

struct LayerFrame {
    FrameHeader header;
    LayerHead head;
};

struct ReplyFrame {
    FrameHeader header;
    LayerReply head;
};

// To offer the core takes longer than this only where others have work for it.
constexpr int64_t WANTED_NS = 250000;

// A wait: first it asks again and again, as long as `ask_ns`, and lets others have the core between; then it
// sleeps.
struct Wait {
    int64_t until_ns;
    int64_t ask_ns;
};

// Until the socket can be read (or written: `events`), after a try found that it could not. `began_ns`: when the
// wait did, 0 at first; kept by the caller from one try to the next.
inline Outcome pause(int descriptor, short events, const Wait& wait, int64_t& began_ns) {
    int64_t now = now_ns();
    if (!began_ns) began_ns = now;
    if (now >= wait.until_ns) return LATE;
    if (now - began_ns < wait.ask_ns) {
        sched_yield();
        if (now_ns() - now < WANTED_NS) return DONE;
        began_ns -= wait.ask_ns;  // somebody else wants the core: sleep from now on
    }
    int64_t left = wait.until_ns - now;
    timespec time{left / 1000000000LL, left % 1000000000LL};
    pollfd one{descriptor, events, 0};
    ppoll(&one, 1, &time, nullptr);
    return DONE;
}

// Moves `parts` on by `done` bytes; how many of them are finished.
inline int64_t advance(iovec* parts, int64_t done) {
    int64_t finished = 0;
    while (done > 0) {
        int64_t some = (int64_t)parts[finished].iov_len < done ? (int64_t)parts[finished].iov_len : done;
        parts[finished].iov_base = (char*)parts[finished].iov_base + some;
        parts[finished].iov_len -= some;
        done -= some;
        if (!parts[finished].iov_len) finished++;
    }
    return finished;
}

// All of `parts`, which it uses up, or at least so many bytes. DONE, LATE, GONE; `moved` says how many bytes
// went. After GONE errno is 0 where the peer has ended in order.
inline Outcome transfer(int descriptor, iovec* parts, int64_t count, bool sending, const Wait& wait, int64_t& moved,
                        int64_t least = INT64_MAX) {
    int64_t began_ns = 0;
    moved = 0;
    for (;;) {
        while (count && !parts->iov_len) parts++, count--;
        if (!count || moved >= least) return DONE;
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = (size_t)(count < 1024 ? count : 1024);
        ssize_t done = sending ? sendmsg(descriptor, &message, MSG_DONTWAIT | MSG_NOSIGNAL)
                               : recvmsg(descriptor, &message, MSG_DONTWAIT);
        if (done > 0) {
            int64_t finished = advance(parts, done);
            parts += finished, count -= finished, moved += done, began_ns = 0;
            continue;
        }
        if (done == 0) {
            errno = 0;
            return GONE;
        }
        if (errno == EINTR) continue;
        if (errno != EAGAIN && errno != EWOULDBLOCK) return GONE;
        Outcome outcome = pause(descriptor, sending ? POLLOUT : POLLIN, wait, began_ns);
        if (outcome != DONE) return outcome;
    }
}

}  // namespace kvc
