/* Attention over the paged KV cache, whose pages are read in place; a block that lies in several pages is copied. See
 * `attention.h`.
 *
 * Keys and values in int8 are dequantised block by block: the result has the bits of attention over their elements.
 */
#include "attention.h"
#include "kv_panels.h"

enum {
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
    fade_rows(rows, fades);
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
        if (!see_keys(c, tile, &block->rows, first, rows, seen))
            continue;
        for (int key = 0; key < KEYS; key += COLUMNS) {
            fetch(ahead, MULTIPLYING);
            if (key < block->rows.count)
                multiply_each(rows, q->query + first * width, width, block->keys + key * width, PANEL_STRIDE,
                              width / PER_WORD, scores + key, KEYS);
        }
        weigh(c, rows, scores, seen, weights, q->peak + first, q->sum + first, fades);
        for (int at = 0; at < width; at += COLUMNS) {
            fetch(ahead, MULTIPLYING);
            multiply_each(rows, weights, KEYS, block->values + at / COLUMNS * block->value_step, block->value_stride,
                          (block->rows.count + PER_WORD - 1) / PER_WORD, gains + at, padded);
        }
        for (int r = 0; r < rows; r++) {
            float *result = q->result + (first + r) * padded;
            for (int at = 0; seen[r] && at < padded; at += LANES)
                vec_store(result + at,
                          vec_fmadd(vec_load(result + at), vec_all(fades[r]), vec_load(gains + r * padded + at)));
        }
    }
}

static void
attend_unit(const attention_t *c, const unit_t *u)
{
    const int width = (int)c->width, padded = (width + COLUMNS - 1) / COLUMNS * COLUMNS;
    queries_t q;
    block_t block;
    q.rows = (int)(u->tile->count * c->group);
    memset(q.result, 0, q.rows * padded * sizeof *q.result);
    for (int r = 0; r < q.rows; r++) {
        copy_operands(c->query + token_of(c, u, r) * c->query_stride + head_of(c, u, r) * width, width, q.query + r * width);
        begin_softmax(c, head_of(c, u, r), q.peak + r, q.sum + r);
    }
    for (int64_t begin = first_key(c, u->tile); begin < stop_of(u->tile); begin += block.rows.count) {
        ahead_t ahead = begin_block(c, u, begin, &block.rows);
        choose_panels(c, &block);
        lay_out_keys(c, &block, &ahead);
        lay_out_values(c, &block, &ahead);
        attend_to_block(c, u->tile, &block, &q, &ahead);
        fetch(&ahead, KEYS * WIDEST);
    }
    store_results(c, u, q.rows, q.result, padded, q.sum);
}

static void
attend_units(const void *arguments, int64_t first, int64_t stop)
{
    const attention_t *c = arguments;
    for (int64_t number = first; number < stop; number++) {
        const unit_t unit = unit_of(c, number);
        attend_unit(c, &unit);
    }
    end_multiplying();
}

void
attend(const attention_t *arguments, const threads_t *threads)
{
#ifdef FLOAT32
    if (arguments->code_bytes == sizeof(int16_t)) {
        attend_to_codes(arguments, threads);
        return;
    }
#endif
    parallel_for(threads, arguments->num_tiles * arguments->kv_heads, 1, attend_units, arguments);
}
