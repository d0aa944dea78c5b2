/* Attention over the paged KV cache, whose pages are read in place; a block that lies in several pages is copied.
 *
 * A token's keys are read in blocks of 64 that begin at multiples of 64 in its sequence, in ascending order, with an
 * online softmax: its maximum, sum and result are carried from block to block (Milakov and Gimelshein, "Online
 * normalizer calculation for softmax", 2018). A token's result depends on nothing else: not on the tokens computed
 * beside it, nor on the page layout or the size of pages. So it is batch-invariant.
 *
 * Keys and values in int8 are dequantised block by block: the result has the bits of attention over their elements.
 */
#include "kernels.h"
#include "kv_panels.h"

enum {
    QUERIES = 64, /* of a tile at most, which share a block once it is packed into panels */
    MULTIPLYING = 8 * sizeof(element), /* lines of keys, and of values, fetched beside multiplying a panel */
#ifdef WITH_AMX
    TOGETHER = QUERIES, /* queries that meet a block at a time: while one tile is multiplied, others are read */
#else
    TOGETHER = ROWS,
#endif
};

/* The queries of a tile, and their online softmax. */
typedef struct {
    int rows;
    operand query[QUERIES * WIDEST] ALIGNED;
    float result[QUERIES * WIDEST] ALIGNED; /* accumulated, not yet divided by `sum` */
    float peak[QUERIES], sum[QUERIES];
} queries_t;

/* The block of a tile's keys that attention begins with: blocks begin at multiples of KEYS, wherever pages do. */
static inline int64_t
first_key(const attention_t *c, const tile_t *tile)
{
    const int64_t seen = c->window && tile->position >= c->window ? tile->position + 1 - c->window : 0;
    return seen - seen % KEYS;
}

/* The mask of a token at `position`: which keys of a block it attends to, one bit each. */
static inline uint64_t
seen_keys(const attention_t *c, const block_t *block, int64_t position)
{
    const int64_t stop = smaller(position + 1 - block->begin, block->count);
    const int64_t start = c->window ? position + 1 - c->window - block->begin : 0;
    if (stop <= 0 || start >= stop)
        return 0;
    const uint64_t before = stop >= KEYS ? UINT64_MAX : (UINT64_C(1) << stop) - 1;
    return start > 0 ? before & (UINT64_MAX << start) : before;
}

/* The scores of a row become those of an online softmax's exponents, of base 2; returns their highest, or `peak`. */
INLINED float
scale_scores(const attention_t *c, float *scores, uint64_t seen, float peak)
{
    vec highest = vec_all(peak);
#pragma GCC unroll 4
    for (int i = 0; i < KEYS / LANES; i++) {
        vec x = vec_mul(vec_load(scores + i * LANES), vec_all(c->scale));
        if (c->softcap > 0)
            x = vec_soft_cap(x, c->softcap);
        x = vec_mul_where((uint16_t)(seen >> (i * LANES)), x, vec_all(LOG2_E), vec_all(-INFINITY));
        vec_store(scores + i * LANES, x);
        highest = vec_max(highest, x);
    }
    return vec_highest(highest);
}

/* Online softmax: the scores of rows, [rows][KEYS], become weights, the rows' maxima and sums are updated; `fades` are the
 * factors of their results. A row that sees no key has weights of 0. Each pass is over all rows, so that a processor
 * computes several at a time.
 */
static inline void
weigh(const attention_t *c, int rows, float *scores, const uint64_t *seen, operand *weights, float *peaks, float *sums,
      float *fades)
{
    float tops[TOGETHER];
    for (int r = 0; r < rows; r++) {
        tops[r] = seen[r] ? scale_scores(c, scores + r * KEYS, seen[r], peaks[r]) : peaks[r];
        fades[r] = peaks[r] - tops[r];
    }
    memset(fades + rows, 0, LANES * sizeof *fades); /* the other lanes; on subnormal numbers processors are slow */
    for (int r = 0; r < rows; r += LANES)
        vec_store(fades + r, vec_exp2(vec_load(fades + r)));
    for (int r = 0; r < rows; r++) {
        if (!seen[r]) {
            memset(weights + r * KEYS, 0, KEYS * sizeof *weights);
            continue;
        }
        vec total = vec_zero();
#pragma GCC unroll 4
        for (int i = 0; i < KEYS / LANES; i++) {
            const vec weight = vec_exp2(vec_sub(vec_load(scores + r * KEYS + i * LANES), vec_all(tops[r])));
            total = vec_add(total, weight);
            store_operands(weights + r * KEYS + i * LANES, weight);
        }
        peaks[r] = tops[r];
        sums[r] = sums[r] * fades[r] + vec_sum(total);
    }
}

/* Rows times the columns of panels, as many as the micro-kernel takes at a time: sums [rows, sums_stride], where there is
 * memory for `whole_tiles` of them.
 */
INLINED void
multiply_each(int rows, const operand *row, int64_t row_stride, const element *panel, int64_t panel_stride,
              int64_t words, float *sums, int64_t sums_stride)
{
    for (int first = 0; first < rows; first += ROWS)
        multiply(whole_tiles((int)smaller(ROWS, rows - first)), row + first * row_stride, row_stride, panel, panel_stride, words,
                 sums + first * sums_stride, sums_stride, 0);
}

static void
attend_to_block(const attention_t *c, const tile_t *tile, const block_t *block, queries_t *q, ahead_t *ahead)
{
    const int width = (int)c->width, padded = (width + COLUMNS - 1) / COLUMNS * COLUMNS;
    float scores[TOGETHER * KEYS] ALIGNED, gains[TOGETHER * WIDEST] ALIGNED, fades[TOGETHER + LANES] ALIGNED;
    operand weights[TOGETHER * KEYS] ALIGNED;
    uint64_t seen[TOGETHER];
    for (int first = 0; first < q->rows; first += TOGETHER) {
        const int rows = (int)smaller(TOGETHER, q->rows - first);
        uint64_t any = 0;
        for (int r = 0; r < rows; r++)
            any |= seen[r] = seen_keys(c, block, tile->position + (first + r) / c->group);
        if (!any)
            continue;
        for (int key = 0; key < KEYS; key += COLUMNS) {
            fetch(ahead, MULTIPLYING);
            if (key < block->count)
                multiply_each(rows, q->query + first * width, width, block->keys + key * width, PANEL_STRIDE,
                              width / PER_WORD, scores + key, KEYS);
        }
        weigh(c, rows, scores, seen, weights, q->peak + first, q->sum + first, fades);
        for (int at = 0; at < width; at += COLUMNS) {
            fetch(ahead, MULTIPLYING);
            multiply_each(rows, weights, KEYS, block->values + at / COLUMNS * block->value_step, block->value_stride,
                          (block->count + PER_WORD - 1) / PER_WORD, gains + at, padded);
        }
        for (int r = 0; r < rows; r++) {
            float *result = q->result + (first + r) * padded;
            for (int at = 0; seen[r] && at < padded; at += LANES)
                vec_store(result + at,
                          vec_fmadd(vec_load(result + at), vec_all(fades[r]), vec_load(gains + r * padded + at)));
        }
    }
}

/* `next` is the tile, and `next_head` its head, that will likely come next; NULL for none. */
static void
attend_tile(const attention_t *c, const tile_t *tile, int64_t head, const tile_t *next, int64_t next_head)
{
    const int width = (int)c->width, padded = (width + COLUMNS - 1) / COLUMNS * COLUMNS;
    queries_t q;
    block_t block;
    q.rows = (int)(tile->count * c->group);
    memset(q.result, 0, q.rows * padded * sizeof *q.result);
    for (int r = 0; r < q.rows; r++) {
        const int64_t token = tile->first + r / c->group, of = head * c->group + r % c->group;
        copy_operands(c->query + token * c->query_stride + of * width, width, q.query + r * width);
        q.peak[r] = c->sinks ? c->sinks[of] * LOG2_E : -INFINITY; /* a sink weighs, and adds nothing */
        q.sum[r] = c->sinks ? 1 : 0;
    }
    const int64_t stop = tile->position + tile->count;
    for (int64_t begin = first_key(c, tile); begin < stop; begin += block.count) {
        begin_block(c, tile, head, begin, (int)smaller(KEYS, stop - begin), &block);
        ahead_t ahead = {0};
        if (begin + block.count < stop)
            ahead = find_block(c, tile, head, begin + block.count);
        else if (next)
            ahead = find_block(c, next, next_head, first_key(c, next));
        lay_out_keys(c, &block, &ahead);
        lay_out_values(c, &block, &ahead);
        attend_to_block(c, tile, &block, &q, &ahead);
        fetch(&ahead, KEYS * WIDEST);
    }
    for (int r = 0; r < q.rows; r++) {
        const int64_t token = tile->first + r / c->group, of = head * c->group + r % c->group;
        element *to = c->output + (token * c->kv_heads * c->group + of) * width;
        for (int at = 0; at < width; at += LANES) {
            const vec result = vec_load(q.result + r * padded + at);
            store_lanes(to + at, width - at, vec_div(result, vec_all(q.sum[r])));
        }
    }
}

/* A unit of work is a tile with the queries of one key head. */
static void
attend_units(const void *arguments, int64_t first, int64_t stop)
{
    const attention_t *c = arguments;
    const int64_t heads = c->kv_heads, units = c->num_tiles * heads;
    for (int64_t unit = first; unit < stop; unit++) {
        const int64_t next = unit + 1;
        attend_tile(c, c->tiles + unit / heads, unit % heads, next < units ? c->tiles + next / heads : NULL,
                    next % heads);
    }
    end_multiplying();
}

void
attend(const attention_t *arguments, const threads_t *threads)
{
    parallel_for(threads, arguments->num_tiles * arguments->kv_heads, 1, attend_units, arguments);
}
