/* Attention over keys and values of 16 bits, computed on integers.
 *
 * Keys and values are codes up to 2047 times a scale for each token and head (`kv_rows.h`). A query becomes codes up to
 * 4095 times a scale. The score of a key is, in float32,
 *
 *     (sum of products of codes) * key's scale * (query's scale * scale of scores)
 *
 * from the left. The online softmax is that of `attention.h`. In a block, the weights of a query times the scales of values
 * become codes up to 16383 times a scale, and the block adds
 *
 *     (sum of products of codes) * scale
 *
 * to the query's result, with one rounding for the multiplication and one for the addition to what was before, times its
 * factor. Sums of products are exact, below 2^31: 256 * 4095 * 2047 and 64 * 16383 * 2047. So a result has the same bits on all
 * paths, in whatever order a kernel adds integers.
 */
#ifdef FLOAT32
#include "attention.h"
#include "code_panels.h"
#include "code_tiles.h"

enum {
    HIGHEST_QUERY = 4095, /* codes */
    HIGHEST_WEIGHT = 16383,
    MANY_QUERIES = 12, /* of a tile, from which on AMX is faster: a block is split into bytes for all of them */
    FETCHED = 16, /* lines of keys, and of values, fetched beside multiplying a panel */
    SOME = TILE_ROWS, /* queries that meet a block together, at most */
};

/* The queries of a tile, and their online softmax. */
typedef struct {
    int rows, has_tiles, has_dot;
    float result[QUERIES * WIDEST] ALIGNED; /* accumulated, not yet divided by `sum` */
    float factors[QUERIES];                 /* of scores: query's scale * scale of scores, * log2(e) without a soft cap */
    float peak[QUERIES], sum[QUERIES];
    union {
        int16_t codes[QUERIES * WIDEST] ALIGNED; /* [rows][width] */
        code_rows_t bytes[QUERIES / TILE_ROWS] ALIGNED; /* with AMX */
    };
} code_queries_t;

/* Weights of some queries as codes, and what a block's sums are multiplied by. */
typedef struct {
    float scales[SOME];
    union {
        int16_t codes[SOME * KEYS] ALIGNED; /* [rows][64 keys] */
        code_rows_t bytes ALIGNED;
    };
} code_weights_t;

/* Rounds the query of a row. */
static void
round_query(const attention_t *c, const element *query, int r, code_queries_t *q)
{
    const int64_t width = c->width;
    float lanes[WIDEST + LANES] ALIGNED;
    int16_t codes[WIDEST + LANES] ALIGNED = {0};
    for (int64_t at = 0; at < width; at += LANES)
        vec_store(lanes + at, load_lanes(query + at, width - at));
    const float scale = scale_of(magnitude_of(lanes, width), HIGHEST_QUERY);
    q->factors[r] = scale * c->scale * (c->softcap > 0 ? 1.0f : LOG2_E);
    for (int64_t at = 0; at < width; at += LANES) {
        const vec rounded = scale > 0 ? codes_of(vec_load(lanes + at), scale) : vec_zero();
        if (q->has_tiles)
            store_row_bytes(q->bytes[r / TILE_ROWS], r % TILE_ROWS, at, rounded);
        else
            store_shorts(codes + at, rounded);
    }
    if (!q->has_tiles)
        memcpy(q->codes + r * width, codes, width * sizeof *codes);
}

/* Sums of products of a row and a block's keys become scores, exponents of base 2; returns their highest, or `peak`. */
INLINED float
scale_sums(const attention_t *c, const code_block_t *block, float *scores, uint64_t seen, float factor, float peak)
{
    vec highest = vec_all(peak);
#pragma GCC unroll 4
    for (int i = 0; i < KEYS / LANES; i++) {
        vec x = vec_mul(vec_load(scores + i * LANES), vec_load(block->key_scales + i * LANES));
        if (c->softcap > 0)
            x = vec_soft_cap(vec_mul(x, vec_all(factor)), c->softcap);
        x = vec_mul_where((uint16_t)(seen >> (i * LANES)), x, vec_all(c->softcap > 0 ? LOG2_E : factor), vec_all(-INFINITY));
        vec_store(scores + i * LANES, x);
        highest = vec_max(highest, x);
    }
    return vec_highest(highest);
}

/* Weights of a row, [64], become codes; `magnitude` is the largest of them. */
INLINED void
round_weights(int has_tiles, const float *weights, float magnitude, int r, code_weights_t *to)
{
    const float scale = scale_of(magnitude, HIGHEST_WEIGHT);
    const vec inverse = vec_all(1.0f / scale);
    to->scales[r] = scale;
#pragma GCC unroll 4
    for (int i = 0; i < KEYS; i += LANES) {
        const vec codes = scale > 0 ? vec_round(vec_mul(vec_load(weights + i), inverse)) : vec_zero();
        if (has_tiles)
            store_row_bytes(to->bytes, r, i, codes);
        else
            store_shorts(to->codes + r * KEYS + i, codes);
    }
}

/* Online softmax: the sums of products of rows, [rows][KEYS], become weights, the rows' maxima and sums are updated; `fades`
 * are the factors of their results. A row that sees no key has no weights. Each pass is over all rows, so that a processor
 * computes several at a time.
 */
INLINED void
weigh_codes(int has_tiles, const attention_t *c, const code_block_t *block, int rows, float *scores, const uint64_t *seen,
            const float *factors, float *peaks, float *sums, float *fades, code_weights_t *weights)
{
    float tops[SOME];
    for (int r = 0; r < rows; r++) {
        tops[r] = seen[r] ? scale_sums(c, block, scores + r * KEYS, seen[r], factors[r], peaks[r]) : peaks[r];
        fades[r] = peaks[r] - tops[r];
    }
    fade_rows(rows, fades);
    for (int r = 0; r < rows; r++) {
        if (!seen[r])
            continue;
        vec total = vec_zero(), highest = vec_zero();
#pragma GCC unroll 4
        for (int i = 0; i < KEYS / LANES; i++) {
            float *at = scores + r * KEYS + i * LANES;
            const vec weight = vec_exp2(vec_sub(vec_load(at), vec_all(tops[r])));
            const vec scaled = vec_mul_where((uint16_t)(seen[r] >> (i * LANES)), weight,
                                             vec_load(block->value_scales + i * LANES), vec_zero());
            total = vec_add(total, weight);
            highest = vec_max_magnitude(highest, scaled);
            vec_store(at, scaled);
        }
        peaks[r] = tops[r];
        sums[r] = sums[r] * fades[r] + vec_sum(total);
        round_weights(has_tiles, scores + r * KEYS, vec_highest_magnitude(highest), r, weights);
    }
}

/* Products of some rows with all columns of a block's keys, [rows, 64], or values, [rows, padded width]. */
typedef struct {
    float scores[SOME * KEYS] ALIGNED, gains[SOME * WIDEST] ALIGNED;
} code_sums_t;

/* Adds what a block gives to the results [rows, stride] of rows that see it. */
static void
add_gains(int rows, const uint64_t *seen, const float *fades, const float *scales, const float *gains, int64_t stride,
          float *results)
{
    for (int r = 0; r < rows; r++) {
        float *result = results + r * stride;
        for (int64_t at = 0; seen[r] && at < stride; at += LANES)
            vec_store(result + at, vec_fmadd(vec_load(result + at), vec_all(fades[r]),
                                             vec_mul(vec_load(gains + r * stride + at), vec_all(scales[r]))));
    }
}

/* Sums of products of rows from `first` on with a block's keys. */
INLINED void
multiply_by_keys(int has_tiles, int width, int first, int rows, const code_queries_t *q, const code_block_t *block,
                 const code_bytes_t *bytes, float *sums, ahead_t *ahead)
{
    const int count = block->rows.count;
    if (has_tiles) {
        fetch(ahead, FETCHED);
        multiply_code_tiles(q->bytes[first / TILE_ROWS], bytes->keys, tiles_of_row(width),
                            (count + LANES - 1) / LANES, sums, KEYS);
        return;
    }
    for (int key = 0; key < count; key += COLUMNS) {
        fetch(ahead, FETCHED);
        multiply_codes(q->has_dot, rows, q->codes + first * width, width, keys_panel(block, key, width), width / CODES_PER_WORD,
                       sums + key, KEYS);
    }
}

/* Sums of products of rows' weights with a block's values. */
INLINED void
multiply_by_values(int has_tiles, int width, int rows, int has_dot, const code_weights_t *weights, const code_block_t *block,
                   const code_bytes_t *bytes, float *sums, int64_t sums_stride, ahead_t *ahead)
{
    if (has_tiles) {
        fetch(ahead, FETCHED);
        multiply_code_tiles(weights->bytes, bytes->values, 1, (width + LANES - 1) / LANES, sums, sums_stride);
        return;
    }
    for (int at = 0; at < width; at += COLUMNS) {
        fetch(ahead, FETCHED);
        multiply_codes(has_dot, rows, weights->codes, KEYS, values_panel(block, at),
                       (block->rows.count + CODES_PER_WORD - 1) / CODES_PER_WORD, sums + at, sums_stride);
    }
}

INLINED void
attend_to_code_block(int has_tiles, const attention_t *c, const tile_t *tile, const code_block_t *block,
                     const code_bytes_t *bytes, code_queries_t *q, ahead_t *ahead)
{
    const int width = (int)c->width, padded = (width + COLUMNS - 1) / COLUMNS * COLUMNS, some = has_tiles ? SOME : ROWS;
    code_sums_t sums;
    code_weights_t weights;
    float fades[SOME + LANES] ALIGNED;
    uint64_t seen[SOME];
    for (int first = 0; first < q->rows; first += some) {
        const int rows = (int)smaller(some, q->rows - first);
        if (!see_keys(c, tile, &block->rows, first, rows, seen))
            continue;
        multiply_by_keys(has_tiles, width, first, rows, q, block, bytes, sums.scores, ahead);
        weigh_codes(has_tiles, c, block, rows, sums.scores, seen, q->factors + first, q->peak + first, q->sum + first, fades,
                    &weights);
        multiply_by_values(has_tiles, width, rows, q->has_dot, &weights, block, bytes, sums.gains, padded,
                           ahead);
        add_gains(rows, seen, fades, weights.scales, sums.gains, padded, q->result + first * padded);
    }
}

static void
attend_code_unit(const attention_t *c, const unit_t *u, int has_tiles, int has_dot)
{
    const int width = (int)c->width, padded = (width + COLUMNS - 1) / COLUMNS * COLUMNS;
    code_queries_t q;
    code_block_t block;
    code_bytes_t bytes;
    q.rows = (int)(u->tile->count * c->group);
    q.has_tiles = has_tiles;
    q.has_dot = has_dot;
    memset(q.result, 0, q.rows * padded * sizeof *q.result);
    if (has_tiles)
        clear_rows(q.bytes, q.rows, width);
    for (int r = 0; r < q.rows; r++) {
        round_query(c, c->query + token_of(c, u, r) * c->query_stride + head_of(c, u, r) * width, r, &q);
        begin_softmax(c, head_of(c, u, r), q.peak + r, q.sum + r);
    }
    for (int64_t begin = first_key(c, u->tile); begin < stop_of(u->tile); begin += block.rows.count) {
        ahead_t ahead = begin_block(c, u, begin, &block.rows);
        lay_out_key_codes(c, &block, &ahead);
        lay_out_value_codes(c, &block, &ahead);
        if (has_tiles)
            split_block(&block, width, &bytes);
        if (has_tiles)
            attend_to_code_block(1, c, u->tile, &block, &bytes, &q, &ahead);
        else
            attend_to_code_block(0, c, u->tile, &block, &bytes, &q, &ahead);
        fetch(&ahead, KEYS * WIDEST);
    }
    store_results(c, u, q.rows, q.result, padded, q.sum);
}

static void
attend_code_units(const void *arguments, int64_t first, int64_t stop)
{
    const attention_t *c = arguments;
    const int has_dot = processor_has_dot();
    int has_tiles = 0;
    for (int64_t number = first; number < stop; number++) {
        const unit_t unit = unit_of(c, number);
        const int wants_tiles = c->has_tiles && unit.tile->count * c->group >= MANY_QUERIES;
        if (wants_tiles && !has_tiles)
            configure_code_tiles();
        has_tiles |= wants_tiles;
        attend_code_unit(c, &unit, wants_tiles, has_dot);
    }
    if (has_tiles)
        release_tiles();
}

void
attend_to_codes(const attention_t *arguments, const threads_t *threads)
{
    parallel_for(threads, arguments->num_tiles * arguments->kv_heads, 1, attend_code_units, arguments);
}
#endif
