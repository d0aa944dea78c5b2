/* Rows that are rounded to 8 bits in blocks, but for their outliers, as the GEMMs of integers read them. */
#ifndef ROUNDED_ROWS_H
#define ROUNDED_ROWS_H

#include "quantised.h"
#include "rounding.h"

enum {
    BLOCK = 32, /* elements of a row with one scale, at most */
    WORD_BYTES = 4,
    OUTLIER = 12, /* times the mean magnitude of its row: an element above is not rounded */
};

/* An element of a row that is not rounded, and would leave the others of its block few codes. */
typedef struct {
    int32_t index;
    float value;
} outlier_t;

/* In tiles of up to `most` rows. A tile of n rows has its codes as [words][n], four of a row to a word, and all else as
 * [blocks][n], so that a GEMM reads it from front to back. Tiles for AMX have their codes as [blocks][n][32], and n
 * is always `most`: missing rows are 0.
 */
typedef struct {
    int64_t size, blocks; /* elements of a block, and blocks of a row */
    int64_t words;        /* of a row's codes; of 4 bits' words, each two have of eight codes those with even indices first */
    int64_t most;
    int is_for_amx;
    int8_t *codes;
    float *scales, *totals; /* of a block; totals are sums of codes */
    int32_t *starts;        /* initial sums of products, for codes that count from a zero of their own */
    outlier_t *outliers;    /* [rows][most_outliers], of a row in ascending order */
    int32_t *num_outliers;  /* of a row */
    int64_t most_outliers;
} rounded_t;

static inline int64_t
tiles_of(const rounded_t *r, int64_t rows)
{
    return (rows + r->most - 1) / r->most;
}

/* The first row of a tile; if it is not for AMX, they have equally many, as far as possible. */
static inline int64_t
first_row(const rounded_t *r, int64_t rows, int64_t tile)
{
    return r->is_for_amx ? smaller(rows, tile * r->most) : rows * tile / tiles_of(r, rows);
}

/* The magnitude above which elements of a row are outliers. It is no number, or infinite, if one of them is. */
static float
outlier_limit(const quantised_t *q, int64_t row)
{
    vec sum = vec_zero();
    for (int64_t at = 0; at < q->inner; at += LANES) {
        const vec x = read_lanes(q->input, row * q->inner + at, q->inner - at, q->is_bfloat16);
        sum = vec_add(sum, vec_max_magnitude(vec_zero(), x));
    }
    return OUTLIER * (vec_sum(sum) / (float)q->inner);
}

/* Takes outliers from a block, whose first element is number `begin` of its row. */
static void
take_outliers(const rounded_t *to, int64_t row, int64_t begin, int64_t count, float limit, float *lanes)
{
    int32_t *number = to->num_outliers + row;
    for (int64_t i = 0; i < count; i++)
        if (fabsf(lanes[i]) > limit && *number < to->most_outliers) {
            to->outliers[row * to->most_outliers + (*number)++] = (outlier_t){(int32_t)(begin + i), lanes[i]};
            lanes[i] = 0;
        }
}

/* `count` elements of a row from `begin` on: codes, their scale and their sum. */
INLINED float
round_block(const quantised_t *q, const rounded_t *to, int64_t row, int64_t begin, int64_t count, float limit,
            int8_t *codes, float *total)
{
    const int64_t at = row * q->inner + begin;
    float lanes[BLOCK] ALIGNED;
    vec sum = vec_zero();
#pragma GCC unroll 2
    for (int64_t i = 0; i < count; i += LANES)
        vec_store(lanes + i, read_lanes(q->input, at + i, count - i, q->is_bfloat16));
    float magnitude = magnitude_of(lanes, count);
    if (magnitude > limit) {
        take_outliers(to, row, begin, count, limit, lanes);
        magnitude = magnitude_of(lanes, count);
    }
    const float scale = scale_of(magnitude);
    if (scale > 0) {
#pragma GCC unroll 2
        for (int64_t i = 0; i < count; i += LANES) {
            const vec rounded = codes_of(vec_load(lanes + i), scale);
            store_codes(codes + i, rounded, q->bits == 4);
            sum = vec_add(sum, rounded);
        }
    } else
        memset(codes, 0, BLOCK);
    *total = vec_sum(sum);
    return scale;
}

/* `zero`: the number that codes of a weight count from. */
static void
round_row(const quantised_t *q, const rounded_t *to, int32_t zero, int64_t row)
{
    const int64_t tile = to->is_for_amx ? row / to->most : ((row + 1) * tiles_of(to, q->rows) - 1) / q->rows;
    const int64_t first = first_row(to, q->rows, tile);
    const int64_t tile_rows = to->is_for_amx ? to->most : first_row(to, q->rows, tile + 1) - first;
    const float limit = outlier_limit(q, row);
    to->num_outliers[row] = 0;
    int8_t *codes = to->codes + first * to->words * WORD_BYTES + (row - first) * (to->is_for_amx ? BLOCK : WORD_BYTES);
    for (int64_t block = 0; block < to->blocks; block++) {
        int8_t some[BLOCK + LANES] = {0};
        const int64_t begin = block * to->size, count = smaller(to->size, q->inner - begin);
        const int64_t place = first * to->blocks + block * tile_rows + row - first;
        float total;
        if (count == BLOCK) /* a number that the compiler knows */
            to->scales[place] = round_block(q, to, row, begin, BLOCK, limit, some, &total);
        else
            to->scales[place] = round_block(q, to, row, begin, count, limit, some, &total);
        if (to->is_for_amx) {
            memcpy(codes, some, BLOCK);
            codes += tile_rows * BLOCK;
        } else
            for (int64_t i = 0; i < count; i += WORD_BYTES, codes += tile_rows * WORD_BYTES)
                memcpy(codes, some + i, WORD_BYTES);
        to->totals[place] = total;
        to->starts[place] = -zero * (int32_t)total;
    }
}

/* Adds products of a row's outliers and a panel's columns to `sums` [32], one after the other, each as `quantised_linear`
 * adds it.
 */
static inline void
add_outliers(const quantised_t *q, const rounded_t *r, int64_t row, int64_t panel, float *sums)
{
    const int64_t per_word = 32 / q->bits, words = (q->inner + per_word - 1) / per_word, groups = q->inner / q->group;
    const outlier_t *outliers = r->outliers + row * r->most_outliers;
    vec sum[2] = {vec_load(sums), vec_load(sums + LANES)};
    for (int32_t i = 0; i < r->num_outliers[row]; i++) {
        const int64_t index = outliers[i].index, group = (panel * groups + index / q->group) * COLUMNS;
        const char *codes = q->codes + (panel * words + index / per_word) * COLUMNS * WORD_BYTES;
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const words_t w = load_words((const element *)(codes + half * LANES * WORD_BYTES));
            const int place = (int)(index % per_word);
            const vec code = q->is_e2m1 ? e2m1_of(w, place) : code_of(w, q->bits, place);
            const vec scale = load_scales(q->scales, group + half * LANES, q->is_half);
            const vec offset = q->offsets ? load_scales(q->offsets, group + half * LANES, q->is_half)
                                          : vec_mul(scale, vec_all(q->zero));
            sum[half] = vec_fmadd(vec_all(outliers[i].value), vec_fmadd(code, scale, offset), sum[half]);
        }
    }
    vec_store(sums, sum[0]);
    vec_store(sums + LANES, sum[1]);
}

#endif
