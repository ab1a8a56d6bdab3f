// Mutated frames for both ends of the attention exchange: fuzz_exchange SEED COUNT. It is built with sanitizers
// (tests/contract/test_exchange_fuzz.py), which end it at the first access that is wrong.
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <random>
#include <unistd.h>
#include <vector>

#include "../../kvcommons/attention/native/exchange.h"
#include "../../kvcommons/attention/native/frames.h"

using namespace kvc;

extern "C" {
int32_t kvc_serve(kvc_serving*);
int64_t kvc_send(kvc_layer*, int64_t);
int64_t kvc_receive(kvc_layer*, int64_t);
}

namespace {

constexpr int64_t ROWS = 4, HEADS = 4, KV_HEADS = 2, DIM = 16, BLOCK = 4, BLOCKS = 16, LAYERS = 2, WIDTH = 3;
constexpr int64_t MS = 1000000;

struct Chance {
    std::mt19937_64 source;
    explicit Chance(uint64_t seed) : source(seed) {}
    uint64_t below(uint64_t bound) { return source() % bound; }
    bool once_in(uint64_t bound) { return below(bound) == 0; }
};

using Bytes = std::vector<char>;

template <class Value>
void add(Bytes& bytes, const Value& value) {
    bytes.insert(bytes.end(), (const char*)&value, (const char*)&value + sizeof value);
}

// What a peer may make of good bytes: flipped bits, numbers at their borders, bytes that are missing, doubled or new.
void mutate(Chance& chance, Bytes& bytes) {
    static const uint64_t BORDERS[] = {0, 1, 2, 3, 4, 0x7f, 0xff, 0x7fff, 0xffff, 0x7fffffff, 0xffffffff, ~0ull >> 1, ~0ull};
    for (uint64_t times = chance.below(4); times && !bytes.empty(); times--) {
        size_t at = chance.once_in(2) ? chance.below(bytes.size()) : chance.below(bytes.size() < 60 ? bytes.size() : 60);
        uint64_t border = BORDERS[chance.below(sizeof BORDERS / sizeof *BORDERS)];
        size_t size = (size_t)1 << chance.below(4);
        switch (chance.below(6)) {
            case 0: bytes[at] ^= (char)(1 << chance.below(8)); break;
            case 1:
                if (at + size <= bytes.size()) memcpy(&bytes[at], &border, size);
                break;
            case 2: bytes.resize(at); break;
            case 3: bytes.insert(bytes.end(), bytes.begin() + (long)at, bytes.end()); break;
            case 4: bytes.erase(bytes.begin() + (long)at); break;
            default: bytes.insert(bytes.begin() + (long)at, (char)chance.below(256));
        }
    }
}

void pair_of(int ends[2]) {
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends)) abort();
    for (int i = 0; i < 2; i++) fcntl(ends[i], F_SETFL, O_NONBLOCK);
}

// In pieces of any size, as far as the socket takes them.
void write_some(Chance& chance, int descriptor, const Bytes& bytes, size_t& written) {
    size_t size = chance.once_in(3) ? chance.below(64) + 1 : bytes.size();
    size_t left = bytes.size() - written;
    ssize_t sent = send(descriptor, bytes.data() + written, size < left ? size : left, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) written += (size_t)sent;
}

// As Python does with what is not for the native path: a frame's bytes are thrown away; false for what is none.
bool throw_away(int descriptor) {
    FrameHeader header;
    if (recv(descriptor, &header, sizeof header, MSG_DONTWAIT) != (ssize_t)sizeof header) return false;
    uint64_t payload;
    memcpy(&payload, header.payload_bytes, 8);
    if (memcmp(header.magic, "KVCF", 4) || header.head_bytes > 4096 || payload > 1 << 20) return false;
    for (uint64_t left = header.head_bytes + payload; left;) {
        char scratch[4096];
        ssize_t some = recv(descriptor, scratch, left < sizeof scratch ? left : sizeof scratch, MSG_DONTWAIT);
        if (some <= 0) return false;
        left -= (uint64_t)some;
    }
    return true;
}

// A creditor with one plan, whose second row is lost.
struct Creditor {
    std::vector<float> kv = std::vector<float>(LAYERS * BLOCKS * 2 * KV_HEADS * BLOCK * DIM, 0.5f);
    // Exactly as large as the plan's rows: what is read or written beyond is seen.
    std::vector<int64_t> tables, lengths, positions, first_lengths, first_positions, keys, grows, brings, windows;
    kvc_allowance allowance{};
    kvc_plan plan{};
    kvc_serving serving{};
    int64_t took_ns[8];
    uint32_t took_plan[8];
    char* buffer;
    int64_t request_bytes = (ROWS * HEADS + 3 * 2 * KV_HEADS) * DIM * 4;
    int64_t answer_bytes = ROWS * HEADS * (DIM + 1) * 4;

    Creditor() {
        for (int64_t row = 0; row < ROWS; row++) {
            for (int64_t i = 0; i < WIDTH; i++) tables.push_back(row * WIDTH + i);
            bool lost = row == 1, takes = row != 3;
            first_lengths.push_back(lost ? 0 : 5), first_positions.push_back(4 + row), keys.push_back(0);
            grows.push_back(!lost && takes), brings.push_back(takes), lengths.push_back(0), positions.push_back(0);
        }
        windows = {0, 3};
        allowance.granted_ns = INT64_MAX;
        kvc_batch& batch = plan.batch;
        batch.kv = kv.data(), batch.tables = tables.data(), batch.lengths = lengths.data();
        batch.first_positions = keys.data(), batch.query_positions = positions.data();
        batch.q_row = HEADS * DIM, batch.q_head = DIM, batch.batch = ROWS, batch.heads = HEADS;
        batch.kv_heads = KV_HEADS, batch.dim = DIM, batch.block_tokens = BLOCK, batch.table_width = WIDTH;
        batch.threads = 1, batch.scale = 0.25f;
        plan.lengths = lengths.data(), plan.positions = positions.data();
        plan.first_lengths = first_lengths.data(), plan.first_positions = first_positions.data();
        plan.grows = grows.data(), plan.brings = brings.data(), plan.windows = windows.data();
        plan.first_step = 0, plan.last_step = WIDTH * BLOCK - 5, plan.step = -1, plan.layers = LAYERS;
        plan.layer_bytes = BLOCKS * 2 * KV_HEADS * BLOCK * DIM * 4, plan.appended = 3;
        plan.number = 7, plan.revision = 2, plan.lost = 1;
        int64_t size = (request_bytes + 63) / 64 * 64 + answer_bytes;
        buffer = (char*)aligned_alloc(64, (size_t)(size + 63) / 64 * 64);
        serving.allowance = &allowance, serving.buffer = buffer, serving.buffer_bytes = size;
        serving.took_ns = took_ns, serving.took_plan = took_plan, serving.took_max = 8;
        serving.quiet_ns = MS / 10, serving.operation_ns = MS;
    }
    ~Creditor() { free(buffer); }

    Bytes frame(Chance& chance) const {
        Bytes made;
        add(made, FrameHeader(sizeof(LayerHead), (uint64_t)request_bytes));
        add(made, LayerHead{LAYER_VERSION, (uint16_t)chance.below(LAYERS), 7, 2, (uint32_t)chance.below(8), 1000, ROWS, 3, 0});
        for (int64_t i = 0; i < request_bytes / 4; i++) add(made, (float)chance.below(1000) / 500 - 1);
        return made;
    }

    // How many layers were served.
    int64_t hear(Chance& chance) {
        int ends[2];
        pair_of(ends);
        Bytes bytes;
        for (uint64_t frames = chance.below(3) + 1; frames; frames--) {
            Bytes one = frame(chance);
            if (!chance.once_in(4)) mutate(chance, one);
            bytes.insert(bytes.end(), one.begin(), one.end());
        }
        size_t written = 0;
        int64_t served = 0;
        kvc_plan* plans[] = {&plan};
        serving.plans = plans, serving.count = 1, serving.descriptor = ends[1];
        for (int turns = 0; turns < 40; turns++) {
            if (written < bytes.size()) write_some(chance, ends[0], bytes, written);
            if (written == bytes.size() && chance.once_in(2)) shutdown(ends[0], SHUT_WR);
            plan.access = 0;
            int32_t outcome = kvc_serve(&serving);
            served += serving.took;
            char scratch[4096];
            while (recv(ends[0], scratch, sizeof scratch, MSG_DONTWAIT) > 0) {}
            if (serving.stage || outcome == GONE) break;
            if (outcome == CHANGED && serving.pending) outcome = OTHER;  // its step is not the plan's
            if (outcome == OTHER && !throw_away(ends[1])) break;
            if (outcome == LATE && written == bytes.size()) break;
        }
        close(ends[0]), close(ends[1]);
        return served;
    }
};

// A debtor with two calls, whose answers lie apart from each other in rows and heads.
struct Debtor {
    std::vector<float> q = std::vector<float>(ROWS * HEADS * DIM, 0.5f), kv = std::vector<float>(ROWS * KV_HEADS * DIM, 1);
    std::vector<float> out = std::vector<float>(ROWS * HEADS * DIM), lse = std::vector<float>(ROWS * HEADS);
    std::vector<int64_t> rows{2, ~0, 3}, appended{3, 0};
    Bytes payload[2], unread[2], parts[2];
    kvc_timing timings[2][LAYERS];
    kvc_call calls[2] = {};
    kvc_layer layer{};
    int64_t answer_bytes = 3 * 2 * (DIM + 1) * 4;

    Debtor() {
        for (int i = 0; i < 2; i++) {
            kvc_call& call = calls[i];
            payload[i].resize((size_t)((3 * 2 + 2 * 2) * DIM * 4));
            unread[i].resize((size_t)answer_bytes + 128), parts[i].resize(16 * (2 * 3 + 2));
            call.rows = rows.data(), call.appended = appended.data(), call.payload = payload[i].data();
            call.unread = unread[i].data(), call.parts = parts[i].data(), call.timings = timings[i];
            call.out = out.data() + i * 2 * DIM, call.lse = lse.data() + i * 2;
            call.out_row = HEADS * DIM, call.lse_row = HEADS, call.row_count = 3, call.appended_count = 2;
            call.first_head = i * 2, call.heads = 2, call.first_kv_head = i, call.kv_heads = 1;
            call.plan = 1, call.revision = 4, call.step = 9, call.native = 1;
        }
        layer.calls = calls, layer.count = 2, layer.dim = DIM, layer.kv_heads = KV_HEADS;
        layer.q = layer.shifted = (const char*)q.data(), layer.k = layer.v = (const char*)kv.data();
        layer.q_row = layer.shifted_row = HEADS * DIM, layer.q_head = layer.shifted_head = DIM;
        layer.k_row = layer.v_row = KV_HEADS * DIM, layer.k_head = layer.v_head = DIM;
    }

    Bytes frame(Chance& chance) const {
        Bytes made;
        add(made, FrameHeader(sizeof(LayerReply), (uint64_t)answer_bytes));
        add(made, LayerReply{LAYER_VERSION, (uint16_t)layer.layer, 1, 9, 5, 6, (uint32_t)chance.below(3)});
        made.resize(made.size() + (size_t)answer_bytes, (char)chance.below(256));
        return made;
    }

    // How many answers were received.
    int64_t hear(Chance& chance) {
        int ends[2][2];
        layer.layer = (int64_t)chance.below(LAYERS), layer.timing = layer.layer, layer.until_ns = now_ns() + MS;
        for (int i = 0; i < 2; i++) pair_of(ends[i]), calls[i].descriptor = ends[i][0], calls[i].native = 1;
        if (kvc_send(&layer, 0) != -1) abort();
        for (int i = 0; i < 2; i++) {
            Bytes one = frame(chance);
            if (!chance.once_in(4)) mutate(chance, one);
            for (size_t written = 0, tries = 0; written < one.size() && tries < 4; tries++)
                write_some(chance, ends[i][1], one, written);
            if (chance.once_in(2)) shutdown(ends[i][1], SHUT_WR);
        }
        int64_t received = 2;
        for (int64_t first = 0, stopped; (stopped = kvc_receive(&layer, first)) >= 0; first = stopped + 1) {
            kvc_call& call = calls[stopped];
            if (call.outcome == DONE || call.moved > (int64_t)unread[stopped].size()) abort();
            received--, call.under_way = 0;
        }
        for (int i = 0; i < 2; i++) close(ends[i][0]), close(ends[i][1]);
        return received;
    }
};

}  // namespace

int main(int count, char** arguments) {
    if (count != 3) return 2;
    Chance chance(strtoull(arguments[1], nullptr, 10));
    Creditor creditor;
    Debtor debtor;
    int64_t served = 0, received = 0;
    for (long i = 0, all = atol(arguments[2]); i < all; i++) {
        served += creditor.hear(chance);
        received += debtor.hear(chance);
    }
    printf("%lld layers served, %lld answers received\n", (long long)served, (long long)received);
}
