// The arithmetic, once for each instruction set: compiled with KVC_VARIANT (a name) and KVC_WIDTH (floats in a
// register) and the compiler's flags for it. Nothing of the standard library may be instantiated here: the linker
// would keep one of several copies, and it could be one that the processor does not have instructions for.
#include "attend.h"
#include "chunk.h"
#include "vectors.h"

namespace kvc {
namespace {

// Adds to `sums` products of 2 W elements of HEADS queries and KEYS keys.
template <int HEADS, int KEYS, class T>
inline void multiply(const float* q, int64_t dim, const T* const* keys, int64_t d, Floats* sums) {
    Floats a[KEYS], b[KEYS];
    for (int i = 0; i < KEYS; i++) widen(keys[i] + d, a[i], b[i]);
    for (int h = 0; h < HEADS; h++) {
        Floats qa = load<Floats>(q + h * dim + d), qb = load<Floats>(q + h * dim + d + W);
        for (int i = 0; i < KEYS; i++) sums[h * KEYS + i] += qa * a[i];
        for (int i = 0; i < KEYS; i++) sums[h * KEYS + i] += qb * b[i];
    }
}

#ifdef KVC_PAIRS
template <int HEADS, int KEYS>
inline void multiply(const Pairs* q, int64_t dim, const Pairs* const* keys, int64_t d, Floats* sums) {
    Bits key[KEYS];
    for (int i = 0; i < KEYS; i++) key[i] = load<Bits>(keys[i] + d);
    for (int h = 0; h < HEADS; h++) {
        Bits query = load<Bits>(q + h * dim + d);
        for (int i = 0; i < KEYS; i++) sums[h * KEYS + i] = add_pairs(sums[h * KEYS + i], query, key[i]);
    }
}
#endif

// Scores of HEADS queries and keys t to t + W of a tile's `rows`: a register of sums for HEADS x (W / HEADS) of them
// at a time. Past the last row the last one is taken again, so that nothing behind it is read. Of the tile that is
// soon read, `next`, as much is asked for as is read of this one: in the order of its addresses, evenly in time.
template <class K, int HEADS>
inline void score(
    const Query<K>* q, const K* k, const K* next, int64_t t, int64_t rows, int64_t dim, float scale, float* scores) {
    constexpr int KEYS = W / HEADS;
    for (int64_t end = least(t + W, rows); t < end; t += KEYS) {
        const K* keys[KEYS];
        for (int i = 0; i < KEYS; i++) keys[i] = k + (t + i < rows ? t + i : rows - 1) * dim;
        Floats sums[HEADS * KEYS] = {};
        for (int64_t d = 0; d < dim; d += 2 * W) {
            prefetch<KEYS * 2 * W>(next + t * dim + KEYS * d);
            multiply<HEADS, KEYS>(q, dim, keys, d, sums);
        }
        Floats result = sums_of(sums) * scale;
        for (int h = 0; h < HEADS; h++)
            __builtin_memcpy(scores + h * TILE + t, (const float*)&result + h * KEYS, KEYS * sizeof(float));
    }
}

// What is known of the heads of a group so far.
struct Group {
    float* weights;  // [group, TILE], of the present tile; scores at first
    float* sums;     // [group, dim], weighted values
    float* totals;   // [group, W], sums of the weights, in W parts until the end of the unit
    float* tops;     // [group], the scores that weights are relative to
    int64_t dim;
};

// Makes the greatest of `scores` what the head's weights are relative to, the first `count` of the tile included.
__attribute__((noinline)) void raise(const Group& group, int64_t h, Floats scores, int64_t count) {
    float now = greatest_in(scores);
    Floats factor = power_of_two(all(group.tops[h] - now));
    float *sums = group.sums + h * group.dim, *weights = group.weights + h * TILE, *totals = group.totals + h * W;
    for (int64_t d = 0; d < group.dim; d += W) store(sums + d, load<Floats>(sums + d) * factor);
    for (int64_t t = 0; t < count; t += W) store(weights + t, load<Floats>(weights + t) * factor);
    store(totals, load<Floats>(totals) * factor);
    group.tops[h] = now;
}

// Scores of keys t to t + W to weights, for `count` heads from `first` on.
inline void weigh(const Group& group, int64_t first, int64_t count, int64_t t) {
    for (int64_t h = first; h < first + count; h++) {
        float *at = group.weights + h * TILE + t, *totals = group.totals + h * W;
        Floats scores = load<Floats>(at);
        if (any_above(scores, all(group.tops[h] + LEEWAY))) raise(group, h, scores, t);
        Floats weights = power_of_two(scores - group.tops[h]);
        store(at, weights);
        store(totals, load<Floats>(totals) + weights);
    }
}

// As many sums as registers hold beside the values and a weight: of 32 registers, or of 16.
constexpr int SUMS = W == 16 ? 16 : 8;

// Adds HEADS weighted sums of `rows` values to `sums`, PAIRS * 2 W columns at a time from `column` on.
template <class T, int HEADS, int PAIRS>
inline int64_t add(
    const float* weights, const T* v, int64_t rows, int64_t dim, int64_t column, float* sums, const T* next) {
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
            prefetch<STEP>(next + column * rows + t * STEP);
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
inline void add_all(const float* weights, const T* v, int64_t rows, int64_t dim, float* sums, const T* next) {
    constexpr int PAIRS = SUMS / (2 * HEADS) > 4 ? 4 : SUMS / (2 * HEADS);
    int64_t column = add<T, HEADS, PAIRS>(weights, v, rows, dim, 0, sums, next);
    if (PAIRS > 1) add<T, HEADS, 1>(weights, v, rows, dim, column, sums, next);
}

// The unit's queries, in the form that keys of type K are multiplied with; false if that is not exact.
template <class K, class Q>
inline bool prepare(const kvc_batch& batch, const Unit& unit, Query<K>* to) {
    int64_t group = batch.heads / batch.kv_heads;
    bool exact = true;
    for (int64_t h = unit.head * group; h < unit.head_end * group; h++) {
        const Q* q = (const Q*)batch.q + unit.row * batch.q_row + h * batch.q_head;
        for (int64_t d = 0; d < batch.dim; d += 2 * W) exact &= bring(K{}, q + d, to + h * batch.dim + d);
    }
    return exact;
}

template <class K>
inline bool prepare(const kvc_batch& batch, const Unit& unit, const Workspace& space) {
    Query<K>* to = (Query<K>*)space.queries;
    return batch.q_is_bf16 ? prepare<K, Bf16>(batch, unit, to) : prepare<K, float>(batch, unit, to);
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

// A tile of keys to weights, for as many fours, twos or single heads as there are behind `done`.
template <class K, int HEADS>
inline void weigh_heads(
    const Query<K>* q, const K* k, const K* next, int64_t rows, float scale, const Group& group, int64_t& done,
    int64_t count) {
    for (; done + HEADS <= count; done += HEADS) {
        float* scores = group.weights + done * TILE;
        int64_t t = 0;
        for (; t < rows; t += W) {
            score<K, HEADS>(q + done * group.dim, k, next, t, rows, group.dim, scale, scores);
            // One step behind, while products of the next are computed.
            if (t) weigh(group, done, HEADS, t - W);
        }
        for (int h = 0; h < HEADS; h++)
            for (int64_t i = rows; i < t; i++) scores[h * TILE + i] = -__builtin_inff();
        weigh(group, done, HEADS, t - W);
    }
}

template <class T, int HEADS>
inline void add_heads(
    const float* w, const T* v, int64_t rows, int64_t dim, float* sums, int64_t& done, int64_t group, const T* next) {
    for (; done + HEADS <= group; done += HEADS)
        add_all<T, HEADS>(w + done * TILE, v, rows, dim, sums + done * dim, next);
}

// Values of type T, and keys as K.
template <class T, class K>
void attend_over(const kvc_batch& batch, const Unit& unit, const Workspace& space) {
    int64_t dim = batch.dim, count = batch.heads / batch.kv_heads;
    float scale = batch.scale * LOG2_E;
    for (int64_t h = unit.head * count; h < unit.head_end * count; h++) {
        unit.tops[h] = LEAST;
        store(space.totals + h * W, Floats{});
        for (int64_t d = 0; d < dim; d++) unit.sums[h * dim + d] = 0;
    }
    Cursor<T> here(batch, unit), soon(batch, unit);
    int64_t tile_bytes = least(batch.block_tokens, TILE) * dim * (int64_t)sizeof(T);
    for (int64_t bytes = 0; bytes < AHEAD_BYTES && soon.rows; bytes += tile_bytes) {
        prefetch((const char*)soon.tile, soon.rows * dim * (int64_t)sizeof(T));
        soon.next();
    }
    for (; here.rows; here.next()) {
        const T *tile = here.tile, *next = tile;
        if (soon.rows) {
            next = soon.tile;
            soon.next();
        }
        int64_t head = here.head * count, done = 0, rows = here.rows;
        Group group{
            space.scores + head * TILE, unit.sums + head * dim, space.totals + head * W, unit.tops + head, dim};
        if (here.values) {
            add_heads<T, 4>(group.weights, tile, rows, dim, group.sums, done, count, next);
            add_heads<T, 2>(group.weights, tile, rows, dim, group.sums, done, count, next);
            add_heads<T, 1>(group.weights, tile, rows, dim, group.sums, done, count, next);
        } else {
            const Query<K>* q = (const Query<K>*)space.queries + head * dim;
            weigh_heads<K, 4>(q, (const K*)tile, (const K*)next, rows, scale, group, done, count);
            weigh_heads<K, 2>(q, (const K*)tile, (const K*)next, rows, scale, group, done, count);
            weigh_heads<K, 1>(q, (const K*)tile, (const K*)next, rows, scale, group, done, count);
        }
    }
    for (int64_t h = unit.head * count; h < unit.head_end * count; h++)
        unit.totals[h] = sum_of(load<Floats>(space.totals + h * W));
}

void attend(const kvc_batch& batch, const Unit& unit, const Workspace& space) {
    if (!batch.kv_is_bf16) {
        prepare<float>(batch, unit, space);
        attend_over<float, float>(batch, unit, space);
        return;
    }
#ifdef KVC_PAIRS
    // Queries of bfloat16 come as float32 from other processes.
    if (prepare<Pairs>(batch, unit, space)) {
        attend_over<Bf16, Pairs>(batch, unit, space);
        return;
    }
#endif
    prepare<Bf16>(batch, unit, space);
    attend_over<Bf16, Bf16>(batch, unit, space);
}

template <class T>
void finish_head(const Finish& work, int64_t head, int64_t dim, float* out, float* lse) {
    float top = LEAST, total = 0;
    for (int64_t i = 0; i < work.count; i++) {
        float next = work.tops[i * work.stride + head];
        top = next > top ? next : top;
    }
    float shares[UNITS_MAX];
    for (int64_t i = 0; i < work.count; i++) {
        shares[i] = power_of_two(all(work.tops[i * work.stride + head] - top))[0];
        total += work.totals[i * work.stride + head] * shares[i];
    }
    float divisor = total > 0 ? total : 1;  // of a row all of whose scores are minus infinity nothing is left
    for (int64_t d = 0; d < dim; d += 2 * W) {
        Floats a = {}, b = {};
        for (int64_t i = 0; i < work.count; i++) {
            const float* sums = work.sums + i * work.stride + head * dim + d;
            a += load<Floats>(sums) * shares[i];
            b += load<Floats>(sums + W) * shares[i];
        }
        restore(T{}, a / divisor, b / divisor, out + d);
    }
    *lse = top / LOG2_E + __builtin_logf(total);
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

extern const Variant KVC_VARIANT = {TEXT(KVC_VARIANT), W, supported, attend, finish, merge, read, attend_chunk};

}  // namespace kvc
