/* Rows that are rounded to 8 bits in blocks, as the GEMMs of integers read them. */
#ifndef ROUNDED_ROWS_H
#define ROUNDED_ROWS_H

#include "quantised.h"
#include "rounding.h"

enum {
    BLOCK = 32, /* elements of a row with one scale, at most */
    WORD_BYTES = 4,
};

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

/* `count` elements from `at` on: codes, their scale and their sum. */
INLINED float
round_block(const quantised_t *q, int64_t at, int64_t count, int8_t *codes, float *total)
{
    float lanes[BLOCK] ALIGNED;
    vec sum = vec_zero();
#pragma GCC unroll 2
    for (int64_t i = 0; i < count; i += LANES)
        vec_store(lanes + i, read_lanes(q->input, at + i, count - i, q->is_bfloat16));
    const float scale = scale_of(lanes, count);
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
    int8_t *codes = to->codes + first * to->words * WORD_BYTES + (row - first) * (to->is_for_amx ? BLOCK : WORD_BYTES);
    for (int64_t block = 0; block < to->blocks; block++) {
        int8_t some[BLOCK + LANES] = {0};
        const int64_t begin = block * to->size, at = row * q->inner + begin, count = smaller(to->size, q->inner - begin);
        const int64_t place = first * to->blocks + block * tile_rows + row - first;
        float total;
        if (count == BLOCK) /* a number that the compiler knows */
            to->scales[place] = round_block(q, at, BLOCK, some, &total);
        else
            to->scales[place] = round_block(q, at, count, some, &total);
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

#endif
