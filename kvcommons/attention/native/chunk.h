// Attention of a prompt's chunk over paged KV, in one pass over the keys: blocked products, an online softmax, and
// sums in float32 (Mnemosyne, section 4.2: a chunk's attention is bound by arithmetic, whatever its context).
//
// Both products, of queries with keys and of weights with values, are one routine over words of four bytes: a word is
// a float, or two neighbouring bfloat16 that are multiplied together. Keys and values of a tile are brought into that
// form once for all rows of a unit.
#pragma once

#include "vectors.h"

namespace kvc {
namespace {

// Rows and registers of columns whose sums are held in registers at once: of 32 registers, or of 16.
constexpr int CHUNK_ROWS = 6;
constexpr int COLUMNS = W == 16 ? 4 : 2;

template <class K>
inline Floats add_product(K, Floats sums, Floats a, Floats b) {
    return sums + a * b;
}
#ifdef KVC_PAIRS
inline Floats add_product(Pairs, Floats sums, Floats a, Floats b) { return add_pairs(sums, (Bits)a, (Bits)b); }
#endif

template <class K>
constexpr int PER_WORD = 1;
template <>
constexpr int PER_WORD<Pairs> = 2;

// Words that `count` elements of a row are.
template <class K>
constexpr int64_t words(int64_t count) {
    return count / PER_WORD<K>;
}

// c[row][column] (+)= sum over i < depth of a[row][i] * b[i][column], for CHUNK_ROWS rows and REGISTERS * W columns.
template <class K, int REGISTERS, bool ADDS>
inline void product(
    const Word* a, int64_t a_row, const Word* b, int64_t b_row, int64_t depth, float* c, int64_t c_row) {
    Floats sums[CHUNK_ROWS][REGISTERS];
    for (int r = 0; r < CHUNK_ROWS; r++)
        for (int j = 0; j < REGISTERS; j++) sums[r][j] = ADDS ? load<Floats>(c + r * c_row + j * W) : Floats{};
    for (int64_t i = 0; i < depth; i++) {
        Floats columns[REGISTERS];
        for (int j = 0; j < REGISTERS; j++) columns[j] = load<Floats>(b + i * b_row + j * W);
        for (int r = 0; r < CHUNK_ROWS; r++) {
            Floats one = every(a[r * a_row + i]);
            for (int j = 0; j < REGISTERS; j++) sums[r][j] = add_product(K{}, sums[r][j], one, columns[j]);
        }
    }
    for (int r = 0; r < CHUNK_ROWS; r++)
        for (int j = 0; j < REGISTERS; j++) store(c + r * c_row + j * W, sums[r][j]);
}

// Where a key of one head lies, and its value.
template <class T>
struct Paged {
    const kvc_chunk& chunk;
    int64_t head;

    inline const T* key(int64_t index) const {
        int64_t block = chunk.table[index / chunk.block_tokens];
        int64_t row = (block * 2 * chunk.kv_heads + head) * chunk.block_tokens + index % chunk.block_tokens;
        return (const T*)chunk.kv + row * chunk.dim;
    }
    inline int64_t value_after() const { return chunk.kv_heads * chunk.block_tokens * chunk.dim; }
};

// W elements' words at a time of W keys, turned: `to` is [words(dim)][TILE].
inline void turn_keys(float, const float* const* keys, int64_t dim, Word* to) {
    for (int64_t d = 0; d < dim; d += W) {
        Floats square[W];
        for (int i = 0; i < W; i++) square[i] = load<Floats>(keys[i] + d);
        transpose(square);
        for (int i = 0; i < W; i++) store((float*)to + (d + i) * TILE, square[i]);
    }
}
inline void turn_keys(Bf16, const Bf16* const* keys, int64_t dim, Word* to) {
    for (int64_t d = 0; d < dim; d += 2 * W) {
        Floats even[W], odd[W];
        for (int i = 0; i < W; i++) widen(keys[i] + d, even[i], odd[i]);
        transpose(even);
        transpose(odd);
        for (int i = 0; i < W; i++) {
            store((float*)to + (d + i) * TILE, even[i]);
            store((float*)to + (d + W + i) * TILE, odd[i]);
        }
    }
}
inline void turn_keys(Pairs, const Bf16* const* keys, int64_t dim, Word* to) {
    for (int64_t d = 0; d < dim / 2; d += W) {
        Floats square[W];
        for (int i = 0; i < W; i++) square[i] = load<Floats>(keys[i] + 2 * d);
        transpose(square);
        for (int i = 0; i < W; i++) store((float*)to + (d + i) * TILE, square[i]);
    }
}

// Values of a tile as the second factor: [words(TILE)][dim]. Columns of bfloat16 come as even and odd ones.
inline void lay_values(float, const float* const* values, int64_t dim, Word* to) {
    for (int t = 0; t < TILE; t++)
        for (int64_t d = 0; d < dim; d += W) store((float*)to + t * dim + d, load<Floats>(values[t] + d));
}
inline void lay_values(Bf16, const Bf16* const* values, int64_t dim, Word* to) {
    for (int t = 0; t < TILE; t++)
        for (int64_t d = 0; d < dim; d += 2 * W) {
            Floats even, odd;
            widen(values[t] + d, even, odd);
            store((float*)to + t * dim + d, even);
            store((float*)to + t * dim + d + W, odd);
        }
}
inline void lay_values(Pairs, const Bf16* const* values, int64_t dim, Word* to) {
    for (int t = 0; t < TILE; t += 2)
        for (int64_t d = 0; d < dim; d += 2 * W) {
            Bits first = load<Bits>(values[t] + d), second = load<Bits>(values[t + 1] + d);
            float* at = (float*)to + t / 2 * dim + d;
            store(at, (Floats)((first & 0xffffu) | (second << 16)));
            store(at + W, (Floats)((first >> 16) | (second & 0xffff0000u)));
        }
}

// Weights of two registers of neighbouring keys as the first factor.
template <class K>
inline void lay_weights(K, Floats first, Floats second, Word* to) {
    store((float*)to, first);
    store((float*)to + W, second);
}
#ifdef KVC_PAIRS
inline void lay_weights(Pairs, Floats first, Floats second, Word* to) {
    Floats both;
    asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(both) : "v"(second), "v"(first));
    store((float*)to, both);
}
#endif

// What is known of a unit's rows so far.
struct Rows {
    Word* queries;  // [rows, words(dim)]
    float* sums;    // [rows, dim], weighted values
    float* totals;  // [rows, W], sums of the weights in W parts
    float* tops;    // [rows], the scores that weights are relative to, as powers of two
    int64_t dim;
};

// Which keys of a tile a row sees.
struct Seen {
    int64_t first, last;  // counted from the tile's first key
};

__attribute__((noinline)) void raise_row(const Rows& rows, int64_t r, Floats scores) {
    float now = greatest_in(scores);
    Floats factor = power_of_two(all(rows.tops[r] - now));
    float *sums = rows.sums + r * rows.dim, *totals = rows.totals + r * W;
    for (int64_t d = 0; d < rows.dim; d += W) store(sums + d, load<Floats>(sums + d) * factor);
    store(totals, load<Floats>(totals) * factor);
    rows.tops[r] = now;
}

// A row's scores of a tile to weights. `seen`: null where it sees all of them.
template <class K>
inline void weigh_row(const Rows& rows, int64_t r, const float* scores, float scale, const Seen* seen, Word* weights) {
    constexpr int STEPS = TILE / W;
    Floats score[STEPS];
    for (int i = 0; i < STEPS; i++) score[i] = load<Floats>(scores + i * W) * scale;
    if (seen) {
        Ints key;
        for (int i = 0; i < W; i++) key[i] = i;
        for (int i = 0; i < STEPS; i++, key += W) {
            Ints hidden = (key < (int32_t)seen->first) | (key >= (int32_t)seen->last);
            score[i] = hidden ? all(-__builtin_inff()) : score[i];
        }
    }
    Floats top = score[0];
    for (int i = 1; i < STEPS; i++) top = greater(top, score[i]);
    if (any_above(top, all(rows.tops[r] + LEEWAY))) raise_row(rows, r, top);
    Floats total = load<Floats>(rows.totals + r * W);
    for (int i = 0; i < STEPS; i += 2) {
        Floats first = power_of_two(score[i] - rows.tops[r]), second = power_of_two(score[i + 1] - rows.tops[r]);
        total += first + second;
        lay_weights(K{}, first, second, weights + words<K>(i * W));
    }
    store(rows.totals + r * W, total);
}

template <class K, int REGISTERS>
inline int64_t add_values(const Word* weights, const Word* values, int64_t dim, int64_t column, float* sums) {
    for (; column + REGISTERS * W <= dim; column += REGISTERS * W)
        product<K, REGISTERS, true>(
            weights, words<K>(TILE), values + column, dim, words<K>(TILE), sums + column, dim);
    return column;
}

template <class K, class Q>
inline bool prepare_rows(const kvc_chunk& chunk, const ChunkUnit& unit, Word* to) {
    int64_t group = chunk.heads / chunk.kv_heads;
    bool exact = true;
    for (int64_t r = unit.first_row; r < unit.last_row; r++) {
        const Q* q = (const Q*)chunk.q + r / group * chunk.q_row + (unit.head * group + r % group) * chunk.q_head;
        Word* row = to + (r - unit.first_row) * words<K>(chunk.dim);
        for (int64_t d = 0; d < chunk.dim; d += 2 * W) exact &= bring(K{}, q + d, (Query<K>*)(row + words<K>(d)));
    }
    return exact;
}

template <class T>
void finish_rows(const kvc_chunk& chunk, const ChunkUnit& unit, const Rows& rows) {
    int64_t group = chunk.heads / chunk.kv_heads;
    for (int64_t r = unit.first_row; r < unit.last_row; r++) {
        int64_t i = r - unit.first_row, row = r / group * chunk.heads + unit.head * group + r % group;
        float total = sum_of(load<Floats>(rows.totals + i * W)), top = rows.tops[i];
        float divisor = total > 0 ? total : 1;  // of a row that sees nothing, nothing is left
        const float* sums = rows.sums + i * chunk.dim;
        for (int64_t d = 0; d < chunk.dim; d += 2 * W)
            restore(T{}, load<Floats>(sums + d) / divisor, load<Floats>(sums + d + W) / divisor,
                unit.out + row * chunk.dim + d);
        unit.lse[row] = top / LOG2_E + __builtin_logf(total);
    }
}

// Values of type T, and keys as K. False, with nothing done, where queries in that form would not be exact.
template <class T, class K>
bool chunk_over(const kvc_chunk& chunk, const ChunkUnit& unit, float* space) {
    int64_t dim = chunk.dim, group = chunk.heads / chunk.kv_heads, size = unit.last_row - unit.first_row;
    int64_t padded = (size + CHUNK_ROWS - 1) / CHUNK_ROWS * CHUNK_ROWS;
    Word* keys = (Word*)space;                   // [words(dim)][TILE]
    Word* values = keys + TILE * dim;            // [words(TILE)][dim]
    float* scores = (float*)(values + TILE * dim);  // [CHUNK_ROWS][TILE]
    Word* weights = (Word*)(scores + CHUNK_ROWS * TILE);  // the same
    Rows rows{weights + CHUNK_ROWS * TILE, nullptr, nullptr, nullptr, dim};
    rows.sums = (float*)(rows.queries + padded * dim);
    rows.totals = rows.sums + padded * dim;
    rows.tops = rows.totals + padded * W;
    bool exact = chunk.q_is_bf16 ? prepare_rows<K, Bf16>(chunk, unit, rows.queries)
                                 : prepare_rows<K, float>(chunk, unit, rows.queries);
    if (!exact) return false;
    for (int64_t i = size * words<K>(dim); i < padded * words<K>(dim); i++) rows.queries[i] = 0;
    for (int64_t i = 0; i < padded * (dim + W); i++) rows.sums[i] = 0;  // and totals
    for (int64_t r = 0; r < padded; r++) rows.tops[r] = LEAST;

    Paged<T> paged{chunk, unit.head};
    float scale = chunk.scale * LOG2_E;
    for (int64_t begin = unit.first_key; begin < unit.last_key; begin += TILE) {
        int64_t count = least(TILE, unit.last_key - begin);
        const T *key[TILE], *value[TILE];
        for (int64_t t = 0; t < TILE; t++) {
            key[t] = paged.key(begin + (t < count ? t : count - 1));
            value[t] = key[t] + paged.value_after();
        }
        for (int64_t t = 0; t < TILE; t += W) turn_keys(K{}, key + t, dim, keys + t);
        lay_values(K{}, value, dim, values);
        // The next tile is asked for while this one is computed with.
        for (int64_t t = begin + TILE; t < least(begin + 2 * TILE, unit.last_key); t++) {
            const T* next = paged.key(t);
            prefetch((const char*)next, dim * (int64_t)sizeof(T));
            prefetch((const char*)(next + paged.value_after()), dim * (int64_t)sizeof(T));
        }
        for (int64_t r = 0; r < padded; r += CHUNK_ROWS) {
            int64_t from = (unit.first_row + r) / group, to = least(unit.first_row + r + CHUNK_ROWS, unit.last_row) - 1;
            to /= group;
            if (chunk_last(chunk, to) <= begin || chunk_first(chunk, from) >= begin + count) continue;
            bool all_seen = chunk_first(chunk, to) <= begin && chunk_last(chunk, from) >= begin + TILE && count == TILE;
            const Word* queries = rows.queries + r * words<K>(dim);
            for (int64_t t = 0; t < TILE; t += COLUMNS * W)
                product<K, COLUMNS, false>(
                    queries, words<K>(dim), keys + t, TILE, words<K>(dim), scores + t, TILE);
            for (int64_t i = 0; i < CHUNK_ROWS; i++) {
                int64_t token = least(unit.first_row + r + i, unit.last_row - 1) / group;
                Seen seen{chunk_first(chunk, token) - begin, least(chunk_last(chunk, token) - begin, count)};
                weigh_row<K>(
                    rows, r + i, scores + i * TILE, scale, all_seen ? nullptr : &seen, weights + i * words<K>(TILE));
            }
            int64_t column = add_values<K, COLUMNS>(weights, values, dim, 0, rows.sums + r * dim);
            if (COLUMNS > 2) add_values<K, 2>(weights, values, dim, column, rows.sums + r * dim);
        }
    }
    finish_rows<T>(chunk, unit, rows);
    return true;
}

void attend_chunk(const kvc_chunk& chunk, const ChunkUnit& unit, float* space) {
    if (!chunk.kv_is_bf16) {
        chunk_over<float, float>(chunk, unit, space);
        return;
    }
#ifdef KVC_PAIRS
    // Queries of bfloat16 come as float32 from other processes.
    if (chunk_over<Bf16, Pairs>(chunk, unit, space)) return;
#endif
    chunk_over<Bf16, Bf16>(chunk, unit, space);
}

}  // namespace
}  // namespace kvc
