// The arithmetic of products.h, compiled as kernel.cpp is: once for each instruction set, without the standard library.
#include "products.h"
#include "vectors.h"

namespace kvc {
namespace {

constexpr int PANEL = 2 * W;
// Words of a panel that rows are multiplied with before the next ones: they stay in the first caches meanwhile.
constexpr int64_t BLOCK_WORDS = 32 * W;
// Of a call, the most: sums of all of them are kept for a panel.
constexpr int64_t ROWS_MAX = 96;
// Rows whose sums are held in registers at once: of 32 registers, or of 16.
constexpr int TILE_ROWS = W == 16 ? 12 : 6;
// Rows whose elements lie beside each other once they are arranged.
constexpr int GROUP = W == 16 ? 4 : 2;
// The same of ROWS that are multiplied at once: one row lies by itself.
template <int ROWS>
constexpr int BESIDE = ROWS == 1 ? 1 : GROUP;
// With more rows weights of bfloat16 are widened in memory, once for all of them, instead of in registers.
constexpr int64_t WIDEN_ROWS = 2 * TILE_ROWS;

// Ways to multiply. Weights and rows are floats:
struct Plain {
    static constexpr int64_t ELEMENTS = 1;  // of a word of weights
    static constexpr int64_t WORDS = 1;     // of a row, for a word of weights
};
// Weights are bfloat16, widened in registers, and rows floats:
struct Widened {
    static constexpr int64_t ELEMENTS = 2, WORDS = 2;
};
// Both are bfloat16, and are multiplied as they are:
struct Paired {
    static constexpr int64_t ELEMENTS = 2, WORDS = 1;
};

#ifdef KVC_PAIRS
typedef Paired OfBf16;
#else
typedef Widened OfBf16;
#endif

template <int ROWS, int REGISTERS>
inline void add_step(Plain, Floats (&sums)[ROWS][REGISTERS], const Bits* weights, const Word* x, int64_t group) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
        Floats one = every(x[r / GROUP * group + r % GROUP]);
#pragma GCC unroll 8
        for (int i = 0; i < REGISTERS; i++) sums[r][i] += (Floats)weights[i] * one;
    }
}

template <int ROWS, int REGISTERS>
inline void add_step(Widened, Floats (&sums)[ROWS][REGISTERS], const Bits* weights, const Word* x, int64_t group) {
    Bits half[REGISTERS];
#pragma GCC unroll 8
    for (int i = 0; i < REGISTERS; i++) half[i] = weights[i] << 16;
    add_step(Plain{}, sums, half, x, group);
#pragma GCC unroll 8
    for (int i = 0; i < REGISTERS; i++) half[i] = weights[i] & 0xffff0000u;
    add_step(Plain{}, sums, half, x + BESIDE<ROWS>, group);
}

#ifdef KVC_PAIRS
template <int ROWS, int REGISTERS>
inline void add_step(Paired, Floats (&sums)[ROWS][REGISTERS], const Bits* weights, const Word* x, int64_t group) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
        Bits one = (Bits)every(x[r / GROUP * group + r % GROUP]);
#pragma GCC unroll 8
        for (int i = 0; i < REGISTERS; i++) sums[r][i] = add_pairs(sums[r][i], weights[i], one);
    }
}
#endif

// How far ahead weights are asked for: they lie one behind the other, unlike KV. Where a core does less than this with a
// line of them, the processor's own reading ahead is quicker: with one row by 5 to 15%.
constexpr int64_t WEIGHTS_AHEAD_BYTES = AHEAD_BYTES / 2;
constexpr int OPERATIONS_MIN = 5;

// sums[row][register] += over `words` of PANELS panels, `panel` words apart. Of x the groups are `group` words apart.
template <class Way, bool READS_AHEAD, int ROWS, int PANELS>
inline void add_products(
    Floats (&sums)[ROWS][2 * PANELS], const Word* weights, int64_t panel, const Word* x, int64_t group, int64_t words) {
    constexpr bool ASKS = READS_AHEAD && ROWS * Way::WORDS * LINE / (int)sizeof(Bits) >= OPERATIONS_MIN;
    constexpr int64_t AHEAD = WEIGHTS_AHEAD_BYTES / PANELS / (PANEL * sizeof(Word));
    for (int64_t w = 0; w < words; w++) {
        Bits loaded[2 * PANELS];
        // What follows the end of one of several panels is being read already: the next is behind all of them.
        int64_t ahead = AHEAD * PANEL + (w + AHEAD < words ? 0 : (PANELS - 1) * panel);
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) {
            const Word* from = weights + p * panel + w * PANEL;
            if (ASKS) prefetch<PANEL>(from + ahead);
            loaded[2 * p] = load<Bits>(from);
            loaded[2 * p + 1] = load<Bits>(from + W);
        }
        add_step(Way{}, sums, loaded, x + w * Way::WORDS * BESIDE<ROWS>, group);
    }
}

inline float bias_at(const kvc_product& work, int64_t column) {
    if (!work.bias) return 0;
    if (!work.is_bf16) return ((const float*)work.bias)[column];
    uint32_t bits = (uint32_t)((const Bf16*)work.bias)[column].bits << 16;
    float bias;
    __builtin_memcpy(&bias, &bits, sizeof bias);
    return bias;
}

// Sums of a panel's columns to a row of the result.
inline void put(const kvc_product& work, int64_t row, int64_t panel, Floats a, Floats b) {
    int64_t column = panel * PANEL, columns = least(work.rows - column, PANEL);
    if (work.bias) {
        float bias[PANEL] = {};
        for (int64_t i = 0; i < columns; i++) bias[i] = bias_at(work, column + i);
        a += load<Floats>(bias);
        b += load<Floats>(bias + W);
    }
    float wide[PANEL];
    if (work.is_bf16) {
        Bf16* to = (Bf16*)work.out + row * work.rows + column;
        if (columns == PANEL) return narrow(to, evens(a, b), odds(a, b));
        narrow((Bf16*)wide, evens(a, b), odds(a, b));
        __builtin_memcpy(to, wide, columns * sizeof *to);
    } else {
        float* to = (float*)work.out + row * work.rows + column;
        if (columns == PANEL) return narrow(to, a, b);
        narrow(wide, a, b);
        __builtin_memcpy(to, wide, columns * sizeof *to);
    }
}

// All of PANELS panels for ROWS rows at once, of which `count` are there.
template <class Way, int ROWS, int PANELS>
inline void multiply_few(const kvc_product& work, int64_t first_row, int64_t count, int64_t first_panel) {
    int64_t words = work.size / Way::ELEMENTS, group = words * Way::WORDS * GROUP;
    const Word* x = (const Word*)work.arranged + first_row / GROUP * group;
    Floats sums[ROWS][2 * PANELS] = {};
    const Word* weights = (const Word*)work.packed + first_panel * words * PANEL;
    add_products<Way, true, ROWS, PANELS>(sums, weights, words * PANEL, x, group, words);
    for (int r = 0; r < ROWS && r < count; r++)
        for (int p = 0; p < PANELS; p++)
            put(work, first_row + r, first_panel + p, sums[r][2 * p], sums[r][2 * p + 1]);
}

template <class Way, int ROWS, int PANELS>
inline void multiply_panels(const kvc_product& work, int64_t row, int64_t count, int64_t panel, int64_t last_panel) {
    for (; panel + PANELS <= last_panel; panel += PANELS) multiply_few<Way, ROWS, PANELS>(work, row, count, panel);
    for (; panel < last_panel; panel++) multiply_few<Way, ROWS, 1>(work, row, count, panel);
}

// Adds a block of words to the sums of a tile's rows, [ROWS][PANEL].
template <class Way, bool READS_AHEAD, int ROWS>
inline void add_block(float* sums, const Word* weights, const Word* x, int64_t group, int64_t words) {
    Floats held[ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < 2; i++) held[r][i] = load<Floats>(sums + r * PANEL + i * W);
    add_products<Way, READS_AHEAD, ROWS, 1>(held, weights, 0, x, group, words);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < 2; i++) store(sums + r * PANEL + i * W, held[r][i]);
}

// Of as many that are left, those of the next tile.
inline int64_t tile_rows(int64_t left) {
    if (left >= TILE_ROWS) return left > TILE_ROWS && left <= 8 ? 4 : TILE_ROWS;
    return left > 8 ? 12 : left > 6 ? 8 : left > 4 ? 6 : 4;
}

template <class Way, bool READS_AHEAD>
inline void add_tile(int64_t left, float* sums, const Word* weights, const Word* x, int64_t group, int64_t words) {
    int64_t rows = tile_rows(left);
    if constexpr (TILE_ROWS == 12) {
        if (rows == 12) return add_block<Way, READS_AHEAD, 12>(sums, weights, x, group, words);
        if (rows == 8) return add_block<Way, READS_AHEAD, 8>(sums, weights, x, group, words);
    }
    if (rows == 6) return add_block<Way, READS_AHEAD, 6>(sums, weights, x, group, words);
    add_block<Way, READS_AHEAD, 4>(sums, weights, x, group, words);
}

// Floats of `words` of bfloat16 of a panel.
inline void widen_block(const Word* weights, int64_t words, Word* to) {
    for (int64_t i = 0; i < words * PANEL; i += PANEL) {
        Bits a = load<Bits>(weights + i), b = load<Bits>(weights + i + W);
        prefetch<PANEL>(weights + i + AHEAD_BYTES / sizeof *weights);
        store((float*)to + 2 * i, (Floats)(a << 16));
        store((float*)to + 2 * i + W, (Floats)(b << 16));
        store((float*)to + 2 * i + PANEL, (Floats)(a & 0xffff0000u));
        store((float*)to + 2 * i + PANEL + W, (Floats)(b & 0xffff0000u));
    }
}

// Many rows: a panel's words in blocks, each of them for all rows.
template <class Way>
inline void multiply_many(const kvc_product& work, int64_t first_row, int64_t last_row, int64_t panel) {
    constexpr bool WIDENS = Way::ELEMENTS == 2 && Way::WORDS == 2;
    int64_t words = work.size / Way::ELEMENTS, group = words * Way::WORDS * GROUP, count = last_row - first_row;
    const Word* x = (const Word*)work.arranged + first_row / GROUP * group;
    const Word* weights = (const Word*)work.packed + panel * words * PANEL;
    alignas(64) float sums[ROWS_MAX * PANEL];
    alignas(64) Word floats[WIDENS ? BLOCK_WORDS * PANEL : 1];
    // A tile may have more rows than are left, but not more than there is room for.
    __builtin_memset(sums, 0, least(count + TILE_ROWS, ROWS_MAX) * PANEL * sizeof *sums);
    constexpr int64_t STEP = WIDENS ? BLOCK_WORDS / 2 : BLOCK_WORDS;
    for (int64_t w = 0; w < words; w += STEP) {
        int64_t some = least(STEP, words - w);
        const Word* block = weights + w * PANEL;
        bool widens = WIDENS && count > WIDEN_ROWS;
        if (widens) widen_block(block, some, floats);
        for (int64_t row = 0; row < count; row += tile_rows(count - row)) {
            const Word* rows = x + row / GROUP * group + w * Way::WORDS * GROUP;
            float* to = sums + row * PANEL;
            if (widens)
                add_tile<Plain, false>(count - row, to, floats, rows, group, 2 * some);
            else if (row == 0)
                add_tile<Way, true>(count - row, to, block, rows, group, some);
            else
                add_tile<Way, false>(count - row, to, block, rows, group, some);
        }
    }
    for (int64_t row = 0; row < count; row++)
        put(work, first_row + row, panel, load<Floats>(sums + row * PANEL), load<Floats>(sums + row * PANEL + W));
}

template <class Way>
void multiply_by(const kvc_product& work, int64_t row, int64_t last_row, int64_t panel, int64_t last_panel) {
    int64_t count = last_row - row;
    constexpr bool WIDE = TILE_ROWS == 12;
    if (work.count == 1) return multiply_panels<Way, 1, 4>(work, row, count, panel, last_panel);
    if (count <= 2) return multiply_panels<Way, 2, 2>(work, row, count, panel, last_panel);
    if (count <= 4) return multiply_panels<Way, 4, WIDE ? 2 : 1>(work, row, count, panel, last_panel);
    if (count <= 6) return multiply_panels<Way, 6, 1>(work, row, count, panel, last_panel);
    if constexpr (WIDE) {
        if (count <= 8) return multiply_panels<Way, 8, 1>(work, row, count, panel, last_panel);
        if (count <= 12) return multiply_panels<Way, 12, 1>(work, row, count, panel, last_panel);
    }
    for (; panel < last_panel; panel++) multiply_many<Way>(work, row, last_row, panel);
}

void multiply(const kvc_product& work, int64_t row, int64_t last_row, int64_t panel, int64_t last_panel) {
    work.is_bf16 ? multiply_by<OfBf16>(work, row, last_row, panel, last_panel)
                 : multiply_by<Plain>(work, row, last_row, panel, last_panel);
}

// W words of a row as it is multiplied, from the element on that the first of them has.
inline void read_words(Plain, const float* from, Floats* to) { to[0] = load<Floats>(from); }
inline void read_words(Paired, const Bf16* from, Floats* to) { to[0] = load<Floats>(from); }
inline void read_words(Widened, const Bf16* from, Floats* to) {
    Floats even, odd;
    widen(from, even, odd);
    to[0] = interleave_low(even, odd);
    to[1] = interleave_high(even, odd);
}

inline Word word_at(Plain, const float* row, int64_t index) { return ((const Word*)row)[index]; }
inline Word word_at(Widened, const Bf16* row, int64_t index) { return (Word)row[index].bits << 16; }
inline Word word_at(Paired, const Bf16* row, int64_t index) {
    return row[2 * index].bits | (Word)row[2 * index + 1].bits << 16;
}

// Words of one row as they are.
template <class Way, class T>
inline void arrange_one(Way way, const kvc_product& work, const T* row) {
    int64_t words = work.size / Way::ELEMENTS * Way::WORDS, i = 0;
    Word* to = (Word*)work.arranged;
    for (; i + W * Way::WORDS <= words; i += W * Way::WORDS) {
        Floats read[Way::WORDS];
        read_words(way, row + i * Way::ELEMENTS / Way::WORDS, read);
        for (int w = 0; w < Way::WORDS; w++) store((float*)to + i + w * W, read[w]);
    }
    for (; i < words; i++) to[i] = word_at(way, row, i);
}

// Words of GROUP rows beside each other. Of rows that are not there, the last one's.
template <class Way, class T>
inline void arrange_group(Way way, const kvc_product& work, const T* x, int64_t number) {
    if (work.count == 1) return arrange_one(way, work, x);
    int64_t words = work.size / Way::ELEMENTS * Way::WORDS;
    Word* to = (Word*)work.arranged + number * words * GROUP;
    const T* rows[GROUP];
    for (int r = 0; r < GROUP; r++) rows[r] = x + least(number * GROUP + r, work.count - 1) * work.size;
    int64_t i = 0;
    for (; i + W * Way::WORDS <= words; i += W * Way::WORDS) {
        Floats read[GROUP][Way::WORDS];
        for (int r = 0; r < GROUP; r++) read_words(way, rows[r] + i * Way::ELEMENTS / Way::WORDS, read[r]);
        for (int w = 0; w < Way::WORDS; w++) {
            float* at = (float*)to + (i + w * W) * GROUP;
            if constexpr (GROUP == 2) {
                store(at, interleave_low(read[0][w], read[1][w]));
                store(at + W, interleave_high(read[0][w], read[1][w]));
                continue;
            }
            Floats a = interleave_low(read[0][w], read[GROUP / 2][w]), b = interleave_low(read[1][w], read[GROUP - 1][w]);
            Floats c = interleave_high(read[0][w], read[GROUP / 2][w]), d = interleave_high(read[1][w], read[GROUP - 1][w]);
            store(at, interleave_low(a, b));
            store(at + W, interleave_high(a, b));
            store(at + 2 * W, interleave_low(c, d));
            store(at + 3 * W, interleave_high(c, d));
        }
    }
    for (; i < words; i++)
        for (int r = 0; r < GROUP; r++) to[i * GROUP + r] = word_at(way, rows[r], i);
}

void arrange(const kvc_product& work, int64_t first_group, int64_t last_group) {
    for (int64_t group = first_group; group < last_group; group++)
        work.is_bf16 ? arrange_group(OfBf16{}, work, (const Bf16*)work.x, group)
                     : arrange_group(Plain{}, work, (const float*)work.x, group);
}

void pack(const kvc_packing& work, int64_t first_panel, int64_t last_panel) {
    int64_t words = work.is_bf16 ? work.size / 2 : work.size;
    for (int64_t panel = first_panel; panel < last_panel; panel++) {
        const Word* from = (const Word*)work.weight + panel * PANEL * words;
        Word* to = (Word*)work.packed + panel * PANEL * words;
        int64_t rows = least(work.rows - panel * PANEL, PANEL), w = 0;
        if (rows == PANEL)
            for (; w + W <= words; w += W)
                for (int half = 0; half < PANEL; half += W) {
                    Floats square[W];
                    for (int i = 0; i < W; i++) square[i] = load<Floats>(from + (half + i) * words + w);
                    transpose(square);
                    for (int i = 0; i < W; i++) store((float*)to + (w + i) * PANEL + half, square[i]);
                }
        for (; w < words; w++)
            for (int i = 0; i < PANEL; i++) to[w * PANEL + i] = i < rows ? from[i * words + w] : 0;
    }
}

#define JOINED_(a, b) a##b
#define JOINED(a, b) JOINED_(a, b)

}  // namespace

extern const ProductVariant JOINED(products_, KVC_VARIANT) = {PANEL, GROUP, supported, pack, arrange, multiply};

}  // namespace kvc
