// The arithmetic, once for each instruction set: compiled with KVC_VARIANT (a name) and KVC_WIDTH (floats in a
// register) and the compiler's flags for it. Nothing of the standard library may be instantiated here: the linker
// would keep one of several copies, and it could be one that the processor does not have instructions for.
#include "attend.h"
#include "vectors.h"

namespace kvc {
namespace {

// Memory that is soon read, asked for in even slices while the present tile is computed with: what is asked for in
// bursts waits for a place among the cache's misses, and computing with it.
struct Ahead {
    const char* next;
    int64_t bytes, slice;

    inline void take() {
        if (bytes <= 0) return;
        prefetch(next, slice);
        next += slice;
        bytes -= slice;
    }
};

// HEADS queries times `rows` keys: a register of sums for HEADS x (W / HEADS) of them at a time. Past the last row
// the last one is taken again, so that nothing behind it is read.
template <class T, int HEADS>
inline void score(const float* q, const T* k, int64_t rows, int64_t dim, float* scores, Ahead& ahead) {
    constexpr int KEYS = W / HEADS;
    for (int64_t t = 0; t < rows; t += KEYS) {
        const T* key[KEYS];
        for (int i = 0; i < KEYS; i++) key[i] = k + (t + i < rows ? t + i : rows - 1) * dim;
        Floats sums[HEADS * KEYS] = {};
        for (int64_t d = 0; d < dim; d += 2 * W) {
            ahead.take();
            Floats a[KEYS], b[KEYS];
            for (int i = 0; i < KEYS; i++) widen(key[i] + d, a[i], b[i]);
            for (int h = 0; h < HEADS; h++) {
                Floats qa = load<Floats>(q + h * dim + d), qb = load<Floats>(q + h * dim + d + W);
                for (int i = 0; i < KEYS; i++) sums[h * KEYS + i] += qa * a[i];
                for (int i = 0; i < KEYS; i++) sums[h * KEYS + i] += qb * b[i];
            }
        }
        Floats result = sums_of(sums);
        for (int h = 0; h < HEADS; h++)
            __builtin_memcpy(scores + h * TILE + t, (const float*)&result + h * KEYS, KEYS * sizeof(float));
    }
}

// As many sums as registers hold beside the values and a weight: of 32 registers, or of 16.
constexpr int SUMS = W == 16 ? 16 : 8;

// Adds HEADS weighted sums of `rows` values to `sums`, PAIRS * 2 W columns at a time from `column` on.
template <class T, int HEADS, int PAIRS>
inline int64_t add(
    const float* weights, const T* v, int64_t rows, int64_t dim, int64_t column, float* sums, Ahead& ahead) {
    constexpr int STEP = PAIRS * 2 * W;
    for (; column + STEP <= dim; column += STEP) {
        Floats a[HEADS][PAIRS], b[HEADS][PAIRS];
        for (int h = 0; h < HEADS; h++)
            for (int p = 0; p < PAIRS; p++) {
                a[h][p] = load<Floats>(sums + h * dim + column + p * 2 * W);
                b[h][p] = load<Floats>(sums + h * dim + column + p * 2 * W + W);
            }
        const T* value = v + column;
        for (int64_t t = 0; t < rows; t++, value += dim) {
            ahead.take();
            Floats x[PAIRS], y[PAIRS];
            for (int p = 0; p < PAIRS; p++) widen(value + p * 2 * W, x[p], y[p]);
            for (int h = 0; h < HEADS; h++) {
                Floats weight = all(weights[h * TILE + t]);
                for (int p = 0; p < PAIRS; p++) {
                    a[h][p] += weight * x[p];
                    b[h][p] += weight * y[p];
                }
            }
        }
        for (int h = 0; h < HEADS; h++)
            for (int p = 0; p < PAIRS; p++) {
                store(sums + h * dim + column + p * 2 * W, a[h][p]);
                store(sums + h * dim + column + p * 2 * W + W, b[h][p]);
            }
    }
    return column;
}

template <class T, int HEADS>
inline void add_all(const float* weights, const T* v, int64_t rows, int64_t dim, float* sums, Ahead& ahead) {
    constexpr int PAIRS = SUMS / (2 * HEADS) > 4 ? 4 : SUMS / (2 * HEADS);
    int64_t column = add<T, HEADS, PAIRS>(weights, v, rows, dim, 0, sums, ahead);
    if (PAIRS > 1) add<T, HEADS, 1>(weights, v, rows, dim, column, sums, ahead);
}

// Scores to weights, in place, for one head; what was summed before is brought to the new greatest score.
inline void weigh(float* scores, int64_t rows, int64_t dim, float* sums, float& top, float& total) {
    int64_t padded = (rows + W - 1) / W * W;
    for (int64_t t = rows; t < padded; t++) scores[t] = -__builtin_inff();
    Floats greatest = load<Floats>(scores);
    for (int64_t t = W; t < padded; t += W) greatest = greater(load<Floats>(scores + t), greatest);
    float now = greatest_in(greatest);
    if (now > top) {
        float factor = exponential_one(top - now);
        for (int64_t d = 0; d < dim; d += W) store(sums + d, load<Floats>(sums + d) * factor);
        total *= factor;
        top = now;
    }
    Floats added = {};
    for (int64_t t = 0; t < padded; t += W) {
        Floats weight = exponential(load<Floats>(scores + t) - top);
        store(scores + t, weight);
        added += weight;
    }
    total += sum_of(added);
}

template <class T, class Q>
inline void prepare(const kvc_batch& batch, const Unit& unit, float* to) {
    int64_t group = batch.heads / batch.kv_heads;
    for (int64_t h = unit.head * group; h < unit.head_end * group; h++) {
        const Q* q = (const Q*)batch.q + unit.row * batch.q_row + h * batch.q_head;
        for (int64_t d = 0; d < batch.dim; d += 2 * W) {
            Floats a, b;
            arrange(T{}, q + d, a, b);
            store(to + h * batch.dim + d, a * batch.scale);
            store(to + h * batch.dim + d + W, b * batch.scale);
        }
    }
}

// Goes over the tiles of a unit in the order of their addresses: within a block the keys of all heads, then the
// values. A block of more than TILE tokens is gone over in slices.
template <class T>
struct Cursor {
    const kvc_batch& batch;
    const Unit& unit;
    int64_t begin;  // the slice's first key
    int64_t rows;   // how many of its keys are seen; 0 behind the last slice
    int64_t head;
    bool values;
    const T* tile;

    Cursor(const kvc_batch& b, const Unit& u) : batch(b), unit(u), begin(u.first) { slice(); }

    inline void next() {
        if (++head < unit.head_end) {
            tile += batch.block_tokens * batch.dim;
        } else if (!values) {
            values = true;
            head = unit.head;
            tile += (batch.kv_heads - (unit.head_end - unit.head) + 1) * batch.block_tokens * batch.dim;
        } else {
            begin += rows;
            slice();
        }
    }

  private:
    inline void slice() {
        head = unit.head;
        values = false;
        rows = 0;
        if (begin >= unit.last) return;
        int64_t block = begin / batch.block_tokens, inside = begin % batch.block_tokens;
        rows = least(least(TILE, batch.block_tokens - inside), unit.last - begin);
        int64_t number = batch.tables[unit.row * batch.table_width + block];
        int64_t row = (number * 2 * batch.kv_heads + head) * batch.block_tokens + inside;
        tile = (const T*)batch.kv + row * batch.dim;
    }
};

template <class T, int HEADS>
inline void score_heads(
    const float* q, const T* k, int64_t rows, int64_t dim, float* scores, int64_t& done, int64_t group, Ahead& ahead) {
    for (; done + HEADS <= group; done += HEADS)
        score<T, HEADS>(q + done * dim, k, rows, dim, scores + done * TILE, ahead);
}

template <class T, int HEADS>
inline void add_heads(
    const float* w, const T* v, int64_t rows, int64_t dim, float* sums, int64_t& done, int64_t group, Ahead& ahead) {
    for (; done + HEADS <= group; done += HEADS)
        add_all<T, HEADS>(w + done * TILE, v, rows, dim, sums + done * dim, ahead);
}

template <class T>
void attend_over(const kvc_batch& batch, const Unit& unit, const Workspace& space) {
    if (batch.q_is_bf16)
        prepare<T, Bf16>(batch, unit, space.queries);
    else
        prepare<T, float>(batch, unit, space.queries);
    int64_t dim = batch.dim, group = batch.heads / batch.kv_heads;
    int64_t first = unit.head * group, last = unit.head_end * group;
    for (int64_t h = first; h < last; h++) {
        unit.tops[h] = -__builtin_inff();
        unit.totals[h] = 0;
        for (int64_t d = 0; d < dim; d++) unit.sums[h * dim + d] = 0;
    }
    Cursor<T> here(batch, unit), soon(batch, unit);
    int64_t tile_rows = least(batch.block_tokens, TILE), tile_bytes = tile_rows * dim * (int64_t)sizeof(T);
    for (int64_t bytes = 0; bytes < AHEAD_BYTES && soon.rows; bytes += tile_bytes) {
        prefetch((const char*)soon.tile, soon.rows * dim * (int64_t)sizeof(T));
        soon.next();
    }
    // A tile's bytes over the steps that it is computed with in, of both kinds.
    int64_t together = least(group, 4);
    int64_t key_slice = lines(tile_bytes / (tile_rows * together * dim / (2 * W * W) + 1));
    int64_t value_slice = lines(tile_bytes / (tile_rows * together * dim / (SUMS * W) + 1));
    for (; here.rows; here.next()) {
        Ahead ahead{nullptr, 0, 0};
        if (soon.rows) {
            ahead.next = (const char*)soon.tile;
            ahead.bytes = soon.rows * dim * (int64_t)sizeof(T);
            ahead.slice = here.values ? value_slice : key_slice;
            soon.next();
        }
        const T* tile = here.tile;
        int64_t head = here.head * group, done = 0, rows = here.rows;
        float* scores = space.scores + head * TILE;
        float* sums = unit.sums + head * dim;
        if (!here.values) {
            const float* q = space.queries + head * dim;
            score_heads<T, 4>(q, tile, rows, dim, scores, done, group, ahead);
            score_heads<T, 2>(q, tile, rows, dim, scores, done, group, ahead);
            score_heads<T, 1>(q, tile, rows, dim, scores, done, group, ahead);
            for (int64_t h = 0; h < group; h++)
                weigh(scores + h * TILE, rows, dim, sums + h * dim, unit.tops[head + h], unit.totals[head + h]);
        } else {
            add_heads<T, 4>(scores, tile, rows, dim, sums, done, group, ahead);
            add_heads<T, 2>(scores, tile, rows, dim, sums, done, group, ahead);
            add_heads<T, 1>(scores, tile, rows, dim, sums, done, group, ahead);
        }
    }
}

void attend(const kvc_batch& batch, const Unit& unit, const Workspace& space) {
    if (batch.kv_is_bf16)
        attend_over<Bf16>(batch, unit, space);
    else
        attend_over<float>(batch, unit, space);
}

template <class T>
void finish_head(const Finish& work, int64_t head, int64_t dim, float* out, float* lse) {
    float top = -__builtin_inff(), total = 0;
    for (int64_t i = 0; i < work.count; i++) {
        float next = work.tops[i * work.stride + head];
        top = next > top ? next : top;
    }
    float shares[UNITS_MAX];
    for (int64_t i = 0; i < work.count; i++) {
        shares[i] = exponential_one(work.tops[i * work.stride + head] - top);
        total += work.totals[i * work.stride + head] * shares[i];
    }
    for (int64_t d = 0; d < dim; d += 2 * W) {
        Floats a = {}, b = {};
        for (int64_t i = 0; i < work.count; i++) {
            const float* sums = work.sums + i * work.stride + head * dim + d;
            a += load<Floats>(sums) * shares[i];
            b += load<Floats>(sums + W) * shares[i];
        }
        restore(T{}, a / total, b / total, out + d);
    }
    *lse = top + __builtin_logf(total);
}

void finish(const kvc_batch& batch, const Finish& work) {
    int64_t group = batch.heads / batch.kv_heads;
    for (int64_t h = work.head * group; h < work.head_end * group; h++) {
        int64_t row = work.row * batch.heads + h;
        float* out = batch.out + row * batch.dim;
        if (batch.kv_is_bf16)
            finish_head<Bf16>(work, h, batch.dim, out, batch.lse + row);
        else
            finish_head<float>(work, h, batch.dim, out, batch.lse + row);
    }
}

void merge(const kvc_merge& work, int64_t first, int64_t last) {
    int64_t dim = work.dim;
    for (int64_t row = first; row < last; row++) {
        float* out = work.out + row * dim;
        float top = -__builtin_inff(), total = 0;
        for (int64_t i = 0; i < work.parts; i++) top = work.lses[i][row] > top ? work.lses[i][row] : top;
        for (int64_t d = 0; d < dim; d++) out[d] = 0;
        work.lse[row] = top;
        if (top == -__builtin_inff()) continue;
        for (int64_t i = 0; i < work.parts; i++) total += exponential_one(work.lses[i][row] - top);
        for (int64_t i = 0; i < work.parts; i++) {
            float share = exponential_one(work.lses[i][row] - top) / total;
            if (share == 0) continue;
            const float* part = work.outs[i] + row * dim;
            int64_t d = 0;
            for (; d + W <= dim; d += W) store(out + d, load<Floats>(out + d) + load<Floats>(part + d) * share);
            for (; d < dim; d++) out[d] += part[d] * share;
        }
        work.lse[row] = top + __builtin_logf(total);
    }
}

// Adds up memory as words: what reading costs where nothing else is done.
float read(const char* bytes, int64_t size) {
    Bits sums[8] = {};
    constexpr int64_t STEP = 8 * sizeof(Bits);
    for (int64_t i = 0; i + STEP <= size; i += STEP) {
        prefetch(bytes + i + AHEAD_BYTES, i + AHEAD_BYTES + STEP <= size ? STEP : 0);
        for (int j = 0; j < 8; j++) sums[j] ^= load<Bits>(bytes + i + j * sizeof(Bits));
    }
    uint32_t all = 0;
    for (int j = 0; j < 8; j++)
        for (int k = 0; k < W; k++) all ^= sums[j][k];
    return (float)all;
}

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

}  // namespace

extern const Variant KVC_VARIANT = {TEXT(KVC_VARIANT), W, supported, attend, finish, merge, read};

}  // namespace kvc
