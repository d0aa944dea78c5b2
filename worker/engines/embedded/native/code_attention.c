/* Attention over keys and values of 16 bits, computed on integers.
 *
 * Keys and values are codes up to 2047 times a scale for each token and head (`kv_rows.h`), and so becomes a query. The score
 * of a key is, in float32,
 *
 *     (sum of products of codes) * key's scale * (query's scale * scale of scores)
 *
 * from the left. The online softmax is that of `attention.h`. In a block, the weights of a query times the scales of values
 * become codes up to 16383 times a scale, and the block adds
 *
 *     (sum of products of codes) * scale
 *
 * to the query's result, with one rounding for the multiplication and one for the addition to what was before, times its
 * factor. Sums of products are exact, below 2^31: 256 * 2047 * 2047 and 64 * 16383 * 2047. So a result has the same bits on all
 * paths, in whatever order a kernel adds integers.
 */
#ifdef FLOAT32
#include "attention.h"
#include "code_panels.h"

enum {
    HIGHEST_WEIGHT = 16383, /* code */
    ROW_CODES = WIDEST + 4, /* of a row at most, with its scale */
    FETCHED = 16, /* lines of keys, and of values, fetched beside multiplying a panel */
    VECTORS = KEYS / LANES,
};

_Static_assert((int64_t)WIDEST * HIGHEST_SHORT * HIGHEST_SHORT <= INT32_MAX, "scores are sums of 32 bits");
_Static_assert((int64_t)KEYS * HIGHEST_WEIGHT * HIGHEST_SHORT <= INT32_MAX, "results are sums of 32 bits");

/* The queries of a tile, and their online softmax. */
typedef struct {
    int rows, has_dot;
    float result[QUERIES * WIDEST] ALIGNED; /* accumulated, not yet divided by `sum` */
    float factors[QUERIES];                 /* of scores: query's scale * scale of scores, * log2(e) without a soft cap */
    float peak[QUERIES], sum[QUERIES];
    int64_t stride; /* of codes, from a row of `kv_rows.h` to the next */
    int16_t codes[QUERIES * ROW_CODES] ALIGNED;
} code_queries_t;

/* Scores of some queries, which become weights; these as codes, whose `scales` and the factors of results, `fades`, belong to
 * a row each.
 */
typedef struct {
    uint64_t seen[ROWS];
    float scores[ROWS * KEYS] ALIGNED;
    float scales[ROWS], fades[ROWS + LANES] ALIGNED;
    int16_t codes[ROWS * KEYS] ALIGNED;
} code_weights_t;

/* Sums of products of a row and a block's keys, times their scales, become scores: exponents of base 2. Returns their highest,
 * or `peak`. `vectors` are those of 16 keys that the block has.
 */
INLINED float
scale_sums(const attention_t *c, int vectors, float *scores, uint64_t seen, float factor, float peak)
{
    vec highest = vec_all(peak);
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i++) {
        vec x = vec_load(scores + i * LANES);
        if (c->softcap > 0)
            x = vec_soft_cap(vec_mul(x, vec_all(factor)), c->softcap);
        x = vec_mul_where((uint16_t)(seen >> (i * LANES)), x, vec_all(c->softcap > 0 ? LOG2_E : factor), vec_all(-INFINITY));
        vec_store(scores + i * LANES, x);
        highest = vec_max(highest, x);
    }
    return vec_highest(highest);
}

/* Weights of a row, of which `magnitude` is the largest, become codes. */
INLINED void
round_weights(int vectors, float magnitude, int r, code_weights_t *w)
{
    const float scale = scale_of(magnitude, HIGHEST_WEIGHT);
    const vec inverse = vec_all(1.0f / scale);
    w->scales[r] = scale;
#pragma GCC unroll 4
    for (int i = 0; i < vectors; i++) {
        const int64_t at = r * KEYS + i * LANES;
        store_shorts(w->codes + at, scale > 0 ? vec_round(vec_mul(vec_load(w->scores + at), inverse)) : vec_zero());
    }
}

/* Online softmax of rows from `first` on: their scores become weights, their maxima and sums are updated, and `fades` are the
 * factors of their results. A row that sees no key gets weights, a scale and a factor that change nothing. Each pass is over
 * all rows, so that a processor computes several at a time.
 */
INLINED void
weigh_vectors(int vectors, const attention_t *c, const code_block_t *block, int first, int rows, code_queries_t *q,
              code_weights_t *w)
{
    float tops[ROWS], magnitudes[ROWS];
    for (int r = 0; r < rows; r++) {
        const float peak = q->peak[first + r];
        tops[r] = w->seen[r] ? scale_sums(c, vectors, w->scores + r * KEYS, w->seen[r], q->factors[first + r], peak) : peak;
        w->fades[r] = w->seen[r] ? peak - tops[r] : 0;
    }
    fade_rows(rows, w->fades);
    for (int r = 0; r < rows; r++) {
        vec total = vec_zero(), highest = vec_zero();
        magnitudes[r] = 0;
        if (!w->seen[r])
            continue;
#pragma GCC unroll 8
        for (int i = 0; i < vectors; i++) {
            float *at = w->scores + r * KEYS + i * LANES;
            const vec weight = vec_exp2(vec_sub(vec_load(at), vec_all(tops[r])));
            const vec value_scales = vec_load(block->value_scales + i * LANES);
            const vec scaled = vec_mul_where((uint16_t)(w->seen[r] >> (i * LANES)), weight, value_scales, vec_zero());
            total = vec_add(total, weight);
            highest = vec_max_magnitude(highest, scaled);
            vec_store(at, scaled);
        }
        q->peak[first + r] = tops[r];
        q->sum[first + r] = q->sum[first + r] * w->fades[r] + vec_sum(total);
        magnitudes[r] = vec_highest_magnitude(highest);
    }
    for (int r = 0; r < rows; r++) {
        round_weights(vectors, magnitudes[r], r, w);
        if (!w->seen[r])
            w->scales[r] = -0.0f; /* results + -0 are themselves, -0 too */
    }
}

static void
weigh_codes(const attention_t *c, const code_block_t *block, int first, int rows, code_queries_t *q, code_weights_t *w)
{
    const int vectors = (block->rows.count + LANES - 1) / LANES;
    if (vectors == VECTORS) /* a number that the compiler knows */
        weigh_vectors(VECTORS, c, block, first, rows, q, w);
    else
        weigh_vectors(vectors, c, block, first, rows, q, w);
}

static void
attend_to_code_block(const attention_t *c, const tile_t *tile, const code_block_t *block, code_queries_t *q, ahead_t *ahead)
{
    const int64_t width = c->width, padded = (width + COLUMNS - 1) / COLUMNS * COLUMNS, count = block->rows.count;
    code_weights_t w;
    for (int first = 0; first < q->rows; first += ROWS) {
        const int rows = (int)smaller(ROWS, q->rows - first);
        if (!see_keys(c, tile, &block->rows, first, rows, w.seen))
            continue;
        const finish_t scores = {.column_scales = block->key_scales, .to = w.scores, .stride = KEYS};
        for (int key = 0; key < count; key += COLUMNS) {
            fetch(ahead, FETCHED);
            multiply_pairs(q->has_dot, rows, q->codes + first * q->stride, q->stride, block->keys + panel_at(key, width),
                           width / CODES_PER_WORD, key, &scores);
        }
        weigh_codes(c, block, first, rows, q, &w);
        const finish_t results = {.scales = w.scales, .fades = w.fades, .to = q->result + first * padded, .stride = padded};
        for (int at = 0; at < width; at += COLUMNS) {
            fetch(ahead, FETCHED);
            multiply_pairs(q->has_dot, rows, w.codes, KEYS, block->values + panel_at(at, KEYS),
                           (count + CODES_PER_WORD - 1) / CODES_PER_WORD, at, &results);
        }
    }
}

static void
attend_code_unit(const attention_t *c, const unit_t *u, int has_dot)
{
    const int64_t width = c->width, padded = (width + COLUMNS - 1) / COLUMNS * COLUMNS;
    code_queries_t q;
    code_block_t block;
    q.rows = (int)(u->tile->count * c->group);
    q.has_dot = has_dot;
    q.stride = row_bytes(c) / (int64_t)sizeof *q.codes;
    memset(q.result, 0, q.rows * padded * sizeof *q.result);
    for (int r = 0; r < q.rows; r++) {
        char *row = (char *)(q.codes + r * q.stride);
        quantise_row(c->query + token_of(c, u, r) * c->query_stride + head_of(c, u, r) * width, width, c->code_bytes, row);
        q.factors[r] = kv_row_scale(row, row_bytes(c)) * c->scale * (c->softcap > 0 ? 1.0f : LOG2_E);
        begin_softmax(c, head_of(c, u, r), q.peak + r, q.sum + r);
    }
    for (int64_t begin = first_key(c, u->tile); begin < stop_of(u->tile); begin += block.rows.count) {
        ahead_t ahead = begin_block(c, u, begin, &block.rows);
        lay_out_key_codes(c, &block, &ahead);
        lay_out_value_codes(c, &block, &ahead);
        attend_to_code_block(c, u->tile, &block, &q, &ahead);
        fetch(&ahead, KEYS * WIDEST);
    }
    store_results(c, u, q.rows, q.result, padded, q.sum);
}

static void
attend_code_units(const void *arguments, int64_t first, int64_t stop)
{
    const attention_t *c = arguments;
    const int has_dot = processor_has_dot();
    for (int64_t number = first; number < stop; number++) {
        const unit_t unit = unit_of(c, number);
        attend_code_unit(c, &unit, has_dot);
    }
}

void
attend_to_codes(const attention_t *arguments, const threads_t *threads)
{
    parallel_for(threads, arguments->num_tiles * arguments->kv_heads, 1, attend_code_units, arguments);
}
#endif
