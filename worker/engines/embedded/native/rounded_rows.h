/* Rows that are rounded to 8 bits in spans, but for their outliers, as the GEMMs of integers read them. */
#ifndef ROUNDED_ROWS_H
#define ROUNDED_ROWS_H

#include "quantised.h"
#include "rounding.h"

enum {
    SPAN = 128, /* elements of a row with one scale, at most */
    BLOCK = 32, /* elements whose products with codes of 4 bits meet one step, at most: their sums are within 16 bits */
    DEPTH = 64, /* elements of a row of a tile for AMX */
    WORD_BYTES = 4,
    NIBBLES_BASE = 8, /* the code of 4 bits whose element is its offset */
    OUTLIER = 12, /* times the mean magnitude of its row: an element above is not rounded */
    PLACES = 127, /* columns of outliers that are unpacked at a time; prime, since heads have theirs at equal distances */
};

/* An element of a row that is not rounded, and would leave the others of its span few codes. */
typedef struct {
    int32_t row;
    int32_t index; /* in its row */
    int32_t step;  /* that it meets in a column of the weight */
    float value;
} outlier_t;

/* In tiles of up to `most` rows. A tile of n rows has its codes as [words][n], four of a row to a word, and all else as
 * [spans][n] or [blocks][n], so that a GEMM reads it from front to back. Tiles for AMX have their codes as
 * [words / 16][n][16 words].
 */
typedef struct {
    int64_t span, spans;  /* elements with one scale, and spans of a row */
    int64_t size, blocks; /* elements of a block, whose products meet one step of a weight; and blocks of a row */
    int64_t words;        /* of a row's codes; of 4 bits' words, each two have of eight codes those with even indices first */
    int64_t most;
    int is_for_amx;
    int8_t *codes;
    float *scales;          /* of a span */
    int32_t *totals;        /* 65536 times the sum of a block's codes */
    int32_t *starts;        /* initial sums of products, for codes that count from a zero of their own */
    outlier_t *outliers;    /* [rows][most_outliers], of a row in ascending order; one behind the other once they are gathered */
    int32_t *num_outliers;  /* [rows + 1], of each row; once they are gathered of all rows before */
    int64_t most_outliers;
} rounded_t;

static inline int64_t
tiles_of(const rounded_t *r, int64_t rows)
{
    return (rows + r->most - 1) / r->most;
}

/* The first row of a tile; tiles that are not for AMX have equally many, as far as possible. */
static inline int64_t
first_row(const rounded_t *r, int64_t rows, int64_t tile)
{
    return r->is_for_amx ? smaller(rows, tile * r->most) : rows * tile / tiles_of(r, rows);
}

/* The largest magnitudes of a row's spans, in `magnitudes`, one each `stride`; and the magnitude above which its elements are
 * outliers. It is no number, or infinite, if one of them is.
 */
static float
read_magnitudes(const quantised_t *q, int64_t row, float *magnitudes, int64_t stride)
{
    vec sum = vec_zero();
    for (int64_t begin = 0; begin < q->inner; begin += q->span, magnitudes += stride) {
        const int64_t end = smaller(begin + q->span, q->inner);
        vec highest = vec_zero();
        for (int64_t at = begin; at < end; at += LANES) {
            const vec x = vec_max_magnitude(vec_zero(), read_lanes(q->input, row * q->inner + at, end - at, q->is_bfloat16));
            sum = vec_add(sum, x);
            highest = vec_max_magnitude(highest, x);
        }
        *magnitudes = vec_highest_magnitude(highest);
    }
    return OUTLIER * (vec_sum(sum) / (float)q->inner);
}

/* Takes outliers from `count` elements of a row, whose first one is number `begin`; the largest magnitude of the others. */
static float
take_outliers(const quantised_t *q, const rounded_t *to, int64_t row, int64_t begin, int64_t count, float limit,
              float *elements)
{
    outlier_t *outliers = to->outliers + row * to->most_outliers;
    int32_t *number = to->num_outliers + row;
    vec highest = vec_zero();
    for (int64_t at = 0; at < count; at += LANES) {
        vec x = vec_load(elements + at);
        uint32_t taken = vec_at_least(vec_max_magnitude(vec_zero(), x), limit);
        for (uint32_t lanes = taken; lanes; lanes &= lanes - 1) {
            const int64_t i = at + __builtin_ctz(lanes);
            const int32_t index = (int32_t)(begin + i);
            if (!(fabsf(elements[i]) > limit) || *number == to->most_outliers)
                taken &= ~(lanes & -lanes);
            else
                outliers[(*number)++] = (outlier_t){(int32_t)row, index, index / (int32_t)q->step, elements[i]};
        }
        x = vec_mul_where(~taken, x, vec_all(1), vec_zero());
        highest = vec_max_magnitude(highest, x);
        vec_store(elements + at, x);
    }
    return vec_highest_magnitude(highest);
}

/* The elements of a span, but for its outliers, which become 0, as does what is behind it up to a multiple of 16: in
 * `elements`, or where they are. Its largest magnitude, in `scale`, becomes its scale.
 */
static const float *
read_span(const quantised_t *q, const rounded_t *to, int64_t row, int64_t begin, int64_t count, float limit, float *elements,
          float *scale)
{
    const int64_t at = row * q->inner + begin;
    const int has_outliers = *scale > limit;
    const float *found = elements;
    if (!has_outliers && !q->is_bfloat16 && count % DEPTH == 0)
        found = (const float *)q->input + at;
    else
        for (int64_t i = 0; i < count; i += LANES)
            vec_store(elements + i, read_lanes(q->input, at + i, count - i, q->is_bfloat16));
    if (has_outliers)
        *scale = take_outliers(q, to, row, begin, count, limit, elements);
    *scale = scale_of(*scale, HIGHEST_BYTE);
    return found;
}

/* The codes of a block of up to 32 elements; their sum, or 0 if it is not `summed`. */
INLINED int32_t
round_block(int summed, const float *elements, int64_t count, float scale, int are_paired, int8_t *codes)
{
    float lanes[BLOCK] ALIGNED;
    vec sum = vec_zero();
    if (count < BLOCK) {
        memset(lanes, 0, sizeof lanes);
        memcpy(lanes, elements, count * sizeof *lanes);
        elements = lanes;
    }
#pragma GCC unroll 2
    for (int64_t i = 0; i < BLOCK; i += LANES) {
        const vec rounded = codes_of(vec_load(elements + i), scale);
        store_codes(codes + i, rounded, are_paired);
        if (summed)
            sum = vec_add(sum, rounded);
    }
    return summed ? (int32_t)vec_sum(sum) : 0;
}

/* A row's codes for AMX, which needs no sums of them. Missing ones of the last 64 are 0. */
static void
round_row_for_amx(const quantised_t *q, const rounded_t *to, int64_t row, int64_t first, int64_t n)
{
    int8_t *codes = to->codes + first * to->words * WORD_BYTES + (row - first) * DEPTH;
    float *scale = to->scales + first * to->spans + row - first;
    const float limit = read_magnitudes(q, row, scale, n);
    for (int64_t begin = 0; begin < q->inner; begin += to->span, scale += n) {
        float own[SPAN] ALIGNED;
        const int64_t count = smaller(to->span, q->inner - begin);
        const float *elements = read_span(q, to, row, begin, count, limit, own, scale);
        for (int64_t at = (count + LANES - 1) / LANES * LANES; at < (count + DEPTH - 1) / DEPTH * DEPTH; at += LANES)
            vec_store(own + at, vec_zero());
        for (int64_t at = 0; at < count; at += DEPTH, codes += n * DEPTH)
            if (*scale > 0)
                for (int64_t i = 0; i < DEPTH; i += BLOCK)
                    round_block(0, elements + at + i, BLOCK, *scale, q->bits == 4, codes + i);
            else
                memset(codes, 0, DEPTH);
    }
}

/* Puts the words of up to 32 codes beside those of a tile's `n` rows; returns where the next one comes. */
INLINED int8_t *
put_words(const int8_t *from, int64_t count, int64_t n, int8_t *to)
{
#pragma GCC unroll 8
    for (int64_t i = 0; i < count; i += WORD_BYTES, to += n * WORD_BYTES)
        memcpy(to, from + i, WORD_BYTES);
    return to;
}

/* `zero`: the number that codes of a weight count from. */
static void
round_row(const quantised_t *q, const rounded_t *to, int32_t zero, int64_t row)
{
    const int64_t tile = to->is_for_amx ? row / to->most : ((row + 1) * tiles_of(to, q->rows) - 1) / q->rows;
    const int64_t first = first_row(to, q->rows, tile), n = first_row(to, q->rows, tile + 1) - first;
    to->num_outliers[row] = 0;
    if (to->is_for_amx) {
        round_row_for_amx(q, to, row, first, n);
        return;
    }
    int8_t *codes = to->codes + (first * to->words + row - first) * WORD_BYTES;
    float *scale = to->scales + first * to->spans + row - first;
    const float limit = read_magnitudes(q, row, scale, n);
    int32_t *total = to->totals + first * to->blocks + row - first, *start = to->starts + first * to->blocks + row - first;
    for (int64_t begin = 0; begin < q->inner; begin += to->span, scale += n) {
        float own[SPAN] ALIGNED;
        const int64_t of_span = smaller(to->span, q->inner - begin);
        const float *elements = read_span(q, to, row, begin, of_span, limit, own, scale);
        for (int64_t at = 0, end; at < of_span; at = end, total += n, start += n) {
            int32_t sum = 0;
            for (end = smaller(at + to->size, of_span); at < end; at += BLOCK) {
                int8_t some[BLOCK];
                const int64_t count = smaller(BLOCK, end - at);
                if (*scale > 0)
                    sum += round_block(1, elements + at, count, *scale, q->bits == 4, some);
                else
                    memset(some, 0, sizeof some);
                codes = count == BLOCK ? put_words(some, BLOCK, n, codes) : put_words(some, count, n, codes);
            }
            *total = sum * 65536;
            *start = -zero * sum;
        }
    }
}

/* Puts the outliers of all rows one behind the other: a panel then meets them in one loop. */
static void
gather_outliers(const rounded_t *r, int64_t rows)
{
    int32_t before = 0;
    for (int64_t row = 0; row < rows; row++) {
        const int32_t number = r->num_outliers[row];
        memmove(r->outliers + before, r->outliers + row * r->most_outliers, number * sizeof *r->outliers);
        r->num_outliers[row] = before;
        before += number;
    }
    r->num_outliers[rows] = before;
}

/* Adds the sum of a span's products to a row's sums. */
INLINED vec
add_span(float scale, ints sum, vec to)
{
    return vec_fmadd(vec_all(scale), vec_of_ints(sum), to);
}

/* Steps of 16 columns. Of codes of 4 bits a step is in the lower half of a word, and its offset, or 0, in the upper one;
 * of others it is the word, if there are no offsets.
 */
INLINED ints
load_steps(const quantised_t *q, int has_offsets, int is_nibbles, int64_t at)
{
    return has_offsets ? load_ints((const int32_t *)q->steps + at) : load_shorts((const int16_t *)q->steps + at, !is_nibbles);
}

/* The weight's elements that an outlier meets in a panel, [32] in units, which is exact. */
INLINED void
unpack_place(int bits, int is_e2m1, const quantised_t *q, const outlier_t *outlier, int64_t panel, float *elements)
{
    const int is_nibbles = bits == 4 && !is_e2m1, per_word = 32 / bits, place = outlier->index % per_word;
    const int64_t words = (q->inner + per_word - 1) / per_word, word = panel * words + outlier->index / per_word;
    const int64_t step_at = (panel * q->steps_of_row + outlier->step) * COLUMNS;
#pragma GCC unroll 2
    for (int first = 0; first < COLUMNS; first += LANES) {
        const words_t w = load_words((const element *)(q->codes + (word * COLUMNS + first) * WORD_BYTES));
        const vec code = is_nibbles ? vec_add(nibbles_of(w, place), vec_all(-NIBBLES_BASE))
                         : is_e2m1  ? e2m1_of(w, place)
                                    : code_of(w, bits, place);
        const ints steps = load_steps(q, q->offsets != NULL, is_nibbles, step_at + first);
        const vec step = vec_of_ints(is_nibbles || q->offsets ? low_halves(steps) : steps);
        const vec offset = q->offsets ? vec_of_ints(high_halves(steps)) : vec_zero();
        vec_store(elements + first, vec_fmadd(code, step, offset));
    }
}

/* Products of the outliers of `count` rows from `row` on and a panel's columns are added to sums [count, 32]. Many rows have
 * theirs at the same few indices: what is unpacked is kept.
 */
INLINED void
add_outliers(int bits, int is_e2m1, const quantised_t *q, const rounded_t *r, int64_t row, int64_t count, int64_t panel,
             float *sums)
{
    const outlier_t *outlier = r->outliers + r->num_outliers[row], *end = r->outliers + r->num_outliers[row + count];
    if (outlier == end)
        return;
    int32_t kept[PLACES];
    float elements[PLACES][COLUMNS] ALIGNED;
    memset(kept, -1, sizeof kept);
    for (; outlier < end; outlier++) {
        const int32_t place = outlier->index % PLACES;
        const vec value = vec_all(outlier->value);
        float *to = sums + (outlier->row - row) * COLUMNS;
        if (kept[place] != outlier->index)
            unpack_place(bits, is_e2m1, q, outlier, panel, elements[place]);
        kept[place] = outlier->index;
        vec_store(to, vec_fmadd(value, vec_load(elements[place]), vec_load(to)));
        vec_store(to + LANES, vec_fmadd(value, vec_load(elements[place] + LANES), vec_load(to + LANES)));
    }
}

/* Results of `count` rows from `row` on in a panel's columns: what outliers add to their sums [count, 32], one after the
 * other, times the units.
 */
static inline void
finish_rounded_rows(const quantised_t *q, const rounded_t *r, int64_t row, int64_t count, int64_t panel, float *sums)
{
    if (q->is_e2m1)
        add_outliers(4, 1, q, r, row, count, panel, sums);
    else if (q->bits == 4)
        add_outliers(4, 0, q, r, row, count, panel, sums);
    else
        add_outliers(8, 0, q, r, row, count, panel, sums);
    finish_rows(q->layer, q->is_bfloat16, row, count, panel * COLUMNS, q->units + panel * COLUMNS, sums);
}

#endif
