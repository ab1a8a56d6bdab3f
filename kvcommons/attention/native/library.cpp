// Which instruction set is taken, how the work is divided, and what ctypes calls.
#include "attend.h"
#include "team.h"

using namespace kvc;

namespace {

// From the plainest to the widest.
const Variant* const VARIANTS[] = {
    &portable,
#if defined(__x86_64__)
    &avx2,
    &avx512,
#endif
#if defined(KVC_HAS_avx512bf16)
    &avx512bf16,
#endif
};
constexpr int COUNT = sizeof VARIANTS / sizeof *VARIANTS;

// Keys of a unit, at least. Units follow from their sequence alone, so that its result is the same in every batch
// and on any number of threads.
constexpr int64_t UNIT_TOKENS = 512;
// Less memory than this is not worth another thread.
constexpr int64_t THREAD_BYTES = 65536;
constexpr int64_t ALIGNED = 16;  // floats: a cache line

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

const Variant& chosen(int32_t variant, int64_t dim) {
    int i = (int)least(variant, COUNT - 1);
    while (i > 0 && (!VARIANTS[i]->supported() || dim % (2 * VARIANTS[i]->width))) i--;
    return *VARIANTS[i];
}

// The keys of a row that its query sees, and how they are cut into units.
struct Row {
    int64_t first, last, unit_blocks, units;

    Row(const kvc_batch& batch, int64_t row) {
        int64_t distance = batch.query_positions[row] - batch.first_positions[row];
        first = batch.window ? most(distance - batch.window + 1, 0) : 0;
        int64_t size = batch.block_tokens;
        last = least(least(batch.lengths[row], distance + 1), batch.table_width * size);
        last = most(last, first);
        int64_t blocks = last > first ? (last - 1) / size + 1 - first / size : 0;
        unit_blocks = most(up(UNIT_TOKENS, size), up(blocks, UNITS_MAX));
        units = up(blocks, unit_blocks);
    }
};

int64_t partial_floats(const kvc_batch& batch) {
    return up(batch.heads * (batch.dim + 2), ALIGNED) * ALIGNED;
}

int64_t workspace_floats(const kvc_batch& batch) {
    return up(batch.heads * (batch.dim + TILE + WIDEST), ALIGNED) * ALIGNED;
}

// How a call is divided: units of each row (`starts`), each over all kv heads or, where there are few, over some.
struct Work {
    const kvc_batch* batch;
    const Variant* variant;
    int64_t units, splits, threads;
    int64_t* starts;  // [batch + 1]
    int32_t* left;    // [batch, splits], units that are not computed yet
    float* workspaces;
    float* partials;
    int64_t next, worker;
};

void take_unit(Work& work, int64_t number, const Workspace& space) {
    const kvc_batch& batch = *work.batch;
    int64_t index = number / work.splits, split = number % work.splits;
    int64_t row = 0, above = batch.batch;
    while (above - row > 1) {
        int64_t middle = (row + above) / 2;
        (work.starts[middle] <= index ? row : above) = middle;
    }
    Row keys(batch, row);
    int64_t size = batch.block_tokens, stride = partial_floats(batch), i = index - work.starts[row];
    int64_t block = keys.first / size + i * keys.unit_blocks;
    int64_t head = batch.kv_heads * split / work.splits, head_end = batch.kv_heads * (split + 1) / work.splits;
    float* sums = work.partials + index * stride;
    float *tops = sums + batch.heads * batch.dim, *totals = tops + batch.heads;
    int64_t first = most(keys.first, block * size), last = least(keys.last, (block + keys.unit_blocks) * size);
    work.variant->attend(batch, Unit{row, first, last, head, head_end, sums, tops, totals}, space);
    // Whoever computes a row's last unit merges them, in their order.
    if (__atomic_sub_fetch(&work.left[row * work.splits + split], 1, __ATOMIC_ACQ_REL) == 0) {
        int64_t back = i * stride;
        work.variant->finish(
            batch, Finish{row, head, head_end, keys.units, sums - back, tops - back, totals - back, stride});
    }
}

void take_units(void* argument) {
    Work& work = *(Work*)argument;
    int64_t worker = __atomic_fetch_add(&work.worker, 1, __ATOMIC_RELAXED);
    if (worker >= work.threads) return;
    const kvc_batch& batch = *work.batch;
    float* queries = work.workspaces + worker * workspace_floats(batch);
    float* scores = queries + batch.heads * batch.dim;
    Workspace space{queries, scores, scores + batch.heads * TILE};
    int64_t all = work.units * work.splits;
    for (;;) {
        int64_t number = __atomic_fetch_add(&work.next, 1, __ATOMIC_RELAXED);
        if (number >= all) return;
        take_unit(work, number, space);
    }
}

struct MergeWork {
    const kvc_merge* merge;
    const Variant* variant;
    int64_t rows, next;
};

void take_rows(void* argument) {
    MergeWork& work = *(MergeWork*)argument;
    for (;;) {
        int64_t first = __atomic_fetch_add(&work.next, work.rows, __ATOMIC_RELAXED);
        if (first >= work.merge->rows) return;
        work.variant->merge(*work.merge, first, least(first + work.rows, work.merge->rows));
    }
}

// Rows of a unit of a chunk: so many that what is done once for a tile of keys does not count, and so few that their
// sums stay in the second cache.
constexpr int64_t CHUNK_UNIT_ROWS = 192;
// Units that a chunk is cut into, where keys suffice for it: at least so many each.
constexpr int64_t CHUNK_UNITS = 64;
constexpr int64_t CHUNK_UNIT_KEYS = 4096;

// How a chunk is divided: by kv heads, by rows, and, where these are few, by keys. It follows from the chunk alone, so
// that its result is the same on any number of threads.
struct ChunkWork {
    const kvc_chunk* chunk;
    const Variant* variant;
    int64_t first_key, last_key;  // that some row sees
    int64_t rows, blocks;         // of one kv head
    int64_t splits, split_keys;
    float *outs, *lses;           // a partial for each split, where there are several
    char* spaces;
    int64_t next, worker;

    explicit ChunkWork(const kvc_chunk& call) : chunk(&call), variant(&chosen(call.variant, call.dim)) {
        first_key = chunk_first(call, 0);
        last_key = most(chunk_last(call, call.rows - 1), first_key);
        rows = call.rows * (call.heads / call.kv_heads);
        blocks = up(rows, CHUNK_UNIT_ROWS);
        int64_t keys = last_key - first_key;
        splits = most(least(up(CHUNK_UNITS, blocks * call.kv_heads), keys / CHUNK_UNIT_KEYS), 1);
        split_keys = up(up(keys, splits), TILE) * TILE;
        outs = lses = nullptr;
        spaces = nullptr;
        next = worker = 0;
    }

    int64_t units() const { return chunk->kv_heads * blocks * splits; }
    int64_t threads() const { return most(least(chunk->threads, units()), 1); }
    // Tiles of keys and values, scores and weights, and a unit's queries, sums, totals and tops.
    int64_t space_floats() const {
        int64_t dim = chunk->dim, unit_rows = CHUNK_UNIT_ROWS;
        return 2 * TILE * dim + 2 * 6 * TILE + unit_rows * (2 * dim + WIDEST + 1) + ALIGNED;
    }
    int64_t partial_rows() const { return splits > 1 ? splits * chunk->rows * chunk->heads : 0; }
    int64_t bytes() const {
        return 4 * (up(partial_rows() * (chunk->dim + 1), ALIGNED) * ALIGNED +
                    threads() * up(space_floats(), ALIGNED) * ALIGNED);
    }
};

void take_chunk_units(void* argument) {
    ChunkWork& work = *(ChunkWork*)argument;
    int64_t worker = __atomic_fetch_add(&work.worker, 1, __ATOMIC_RELAXED);
    if (worker >= work.threads()) return;
    const kvc_chunk& chunk = *work.chunk;
    float* space = (float*)work.spaces + worker * (up(work.space_floats(), ALIGNED) * ALIGNED);
    int64_t all_rows = chunk.rows * chunk.heads;
    for (;;) {
        int64_t number = __atomic_fetch_add(&work.next, 1, __ATOMIC_RELAXED);
        if (number >= work.units()) return;
        int64_t split = number % work.splits, rest = number / work.splits;
        // The last rows, which see most, first: what is left at the end is short.
        int64_t head = rest % chunk.kv_heads, block = work.blocks - 1 - rest / chunk.kv_heads;
        ChunkUnit unit{};
        unit.head = head;
        unit.first_row = block * CHUNK_UNIT_ROWS;
        unit.last_row = least(unit.first_row + CHUNK_UNIT_ROWS, work.rows);
        int64_t group = chunk.heads / chunk.kv_heads;
        int64_t first = work.first_key + split * work.split_keys;
        unit.first_key = most(first, chunk_first(chunk, unit.first_row / group));
        unit.last_key = least(first + work.split_keys, chunk_last(chunk, (unit.last_row - 1) / group));
        unit.out = work.splits > 1 ? work.outs + split * all_rows * chunk.dim : chunk.out;
        unit.lse = work.splits > 1 ? work.lses + split * all_rows : chunk.lse;
        work.variant->attend_chunk(chunk, unit, space);
    }
}

struct ReadWork {
    const char* bytes;
    int64_t size, part, next;
    const Variant* variant;
    float result;
};

void take_bytes(void* argument) {
    ReadWork& work = *(ReadWork*)argument;
    for (;;) {
        int64_t first = __atomic_fetch_add(&work.next, work.part, __ATOMIC_RELAXED);
        if (first >= work.size) return;
        float result = work.variant->read(work.bytes + first, least(work.part, work.size - first));
        __atomic_store(&work.result, &result, __ATOMIC_RELAXED);
    }
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// The name of the variant at `index`; null behind the last one, empty where this processor cannot run it.
EXPORTED const char* kvc_variant_name(int32_t index) {
    if (index < 0 || index >= COUNT) return nullptr;
    return VARIANTS[index]->supported() ? VARIANTS[index]->name : "";
}

// What `scratch` of a batch needs for `threads`, in bytes. Reads lengths and positions.
EXPORTED int64_t kvc_scratch_bytes(const kvc_batch* batch) {
    int64_t units = 0;
    for (int64_t row = 0; row < batch->batch; row++) units += Row(*batch, row).units;
    int64_t integers = (batch->batch + 1) * 8 + batch->batch * batch->kv_heads * 4;
    return up(integers, 64) * 64 + 4 * (units * partial_floats(*batch) + batch->threads * workspace_floats(*batch));
}

EXPORTED void kvc_attend(const kvc_batch* batch) {
    Work work{};
    work.batch = batch;
    work.variant = &chosen(batch->variant, batch->dim);
    work.starts = (int64_t*)batch->scratch;
    int64_t tokens = 0;
    for (int64_t row = 0; row < batch->batch; row++) {
        Row keys(*batch, row);
        work.starts[row] = work.units;
        work.units += keys.units;
        tokens += keys.last - keys.first;
    }
    work.starts[batch->batch] = work.units;
    int64_t bytes = tokens * batch->kv_heads * batch->dim * (batch->kv_is_bf16 ? 4 : 8);
    work.threads = most(least(batch->threads, bytes / THREAD_BYTES), 1);
    work.splits = 1;
    if (work.threads > 1 && work.units < 4 * work.threads)
        work.splits = least(batch->kv_heads, up(4 * work.threads, most(work.units, 1)));
    work.left = (int32_t*)(work.starts + batch->batch + 1);
    for (int64_t row = 0; row < batch->batch; row++) {
        int64_t units = work.starts[row + 1] - work.starts[row];
        for (int64_t split = 0; split < work.splits; split++) work.left[row * work.splits + split] = (int32_t)units;
        if (units) continue;
        for (int64_t h = row * batch->heads; h < (row + 1) * batch->heads; h++) {
            batch->lse[h] = -__builtin_inff();
            for (int64_t d = 0; d < batch->dim; d++) batch->out[h * batch->dim + d] = 0;
        }
    }
    int64_t integers = (batch->batch + 1) * 8 + batch->batch * batch->kv_heads * 4;
    work.workspaces = (float*)((char*)batch->scratch + up(integers, 64) * 64);
    work.partials = work.workspaces + batch->threads * workspace_floats(*batch);
    if (work.units) in_parallel(take_units, &work, work.threads);
}

// What `scratch` of a chunk needs for `threads`, in bytes.
EXPORTED int64_t kvc_chunk_scratch_bytes(const kvc_chunk* chunk) { return ChunkWork(*chunk).bytes(); }

EXPORTED void kvc_merge_partials(const kvc_merge* merge);

EXPORTED void kvc_attend_chunk(const kvc_chunk* chunk) {
    ChunkWork work(*chunk);
    int64_t rows = chunk->rows * chunk->heads;
    work.outs = (float*)chunk->scratch;
    work.lses = work.outs + work.partial_rows() * chunk->dim;
    work.spaces = (char*)(work.outs + up(work.partial_rows() * (chunk->dim + 1), ALIGNED) * ALIGNED);
    in_parallel(take_chunk_units, &work, work.threads());
    if (work.splits == 1) return;
    const float *outs[CHUNK_UNITS], *lses[CHUNK_UNITS];
    for (int64_t i = 0; i < work.splits; i++) {
        outs[i] = work.outs + i * rows * chunk->dim;
        lses[i] = work.lses + i * rows;
    }
    kvc_merge merge{
        outs, lses, chunk->out, chunk->lse, work.splits, rows, chunk->dim, chunk->threads,
        chunk->variant};
    kvc_merge_partials(&merge);
}

EXPORTED void kvc_merge_partials(const kvc_merge* merge) {
    int64_t bytes = merge->rows * merge->dim * merge->parts * 4;
    int64_t threads = most(least(merge->threads, bytes / (4 * THREAD_BYTES)), 1);
    MergeWork work{merge, &chosen(merge->variant, 0), most(up(merge->rows, threads * 4), 1), 0};
    in_parallel(take_rows, &work, threads);
}

// Reads memory and does nothing with it: what a benchmark holds attention against.
EXPORTED float kvc_read(const char* bytes, int64_t size, int64_t threads, int32_t variant) {
    ReadWork work{bytes, size, 1 << 20, 0, &chosen(variant, 0), 0};
    in_parallel(take_bytes, &work, threads);
    return work.result;
}
