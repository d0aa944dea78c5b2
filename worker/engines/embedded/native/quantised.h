/* Shared by the GEMMs on quantised weights: reading of rows, of scales and of offsets, and results. */
#ifndef QUANTISED_H
#define QUANTISED_H

#include "finish.h"

/* The arguments, in one structure. */
typedef struct {
    const char *codes;
    int32_t bits, is_e2m1;
    int64_t group;
    const char *scales, *offsets;
    int32_t is_half;
    const char *steps;
    const float *units;
    int64_t step, steps_of_row, span;
    float zero;
    const void *input;
    int64_t rows, inner, columns;
    int32_t is_bfloat16;   /* of the input, and of what `finish_rows` reads and writes */
    const linear_t *layer; /* for that */
} quantised_t;

static inline quantised_t
quantised_of(const linear_t *l)
{
    const gemm_t *g = l->gemm;
    return (quantised_t){.codes = g->weight, .bits = g->bits, .is_e2m1 = g->is_e2m1, .group = g->group, .scales = g->scales,
                         .offsets = g->offsets, .is_half = g->is_half, .steps = g->steps, .units = g->units,
                         .step = g->step,
                         .steps_of_row = g->step ? (g->inner + g->step - 1) / g->step : 0,
                         .span = g->span, .zero = g->zero, .input = l->input,
                         .rows = l->rows, .inner = g->inner, .columns = g->columns, .is_bfloat16 = l->is_bfloat16,
                         .layer = l};
}

/* Whether two layers read the same rows. */
static inline int
has_rows_of(const quantised_t *q, const quantised_t *other)
{
    return q->input == other->input && q->rows == other->rows && q->inner == other->inner &&
           q->is_bfloat16 == other->is_bfloat16;
}

/* Code number `index` of each of 16 words of codes of 4 bits. */
INLINED vec
four_bits_of(words_t w, int index, int is_e2m1)
{
    return is_e2m1 ? e2m1_of(w, index) : nibbles_of(w, index);
}

/* Fetches the lines that `finish_rows` reads and writes of a row, before the sums are computed. */
static inline void
prefetch_row(const quantised_t *q, int64_t row, int64_t column)
{
    enum { LINE = 64 };
    const linear_t *l = q->layer;
    const int64_t size = q->is_bfloat16 ? sizeof(uint16_t) : sizeof(float), at = row * q->columns + column;
    const int64_t output_size = l->is_unrounded ? (int64_t)sizeof(float) : size;
    for (int64_t byte = 0; byte < COLUMNS * output_size; byte += LINE)
        __builtin_prefetch((char *)l->output + at * output_size + byte, 1);
    for (int64_t byte = 0; takes_other(l->epilogue) && byte < COLUMNS * size; byte += LINE)
        __builtin_prefetch((const char *)l->other + at * size + byte);
}

INLINED vec
load_scales(const char *from, int64_t at, int is_half)
{
    return is_half ? load_halves((const uint16_t *)from + at) : vec_load((const float *)from + at);
}

/* Scales and offsets of a group, of a panel's columns. */
typedef struct {
    vec scale[2], offset[2];
} group_t;

INLINED group_t
load_group(const quantised_t *q, int64_t panel, int64_t group)
{
    group_t g;
    const int64_t at = (panel * (q->inner / q->group) + group) * COLUMNS;
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        g.scale[half] = load_scales(q->scales, at + half * LANES, q->is_half);
        g.offset[half] = q->offsets ? load_scales(q->offsets, at + half * LANES, q->is_half)
                                    : vec_mul(g.scale[half], vec_all(q->zero));
    }
    return g;
}

#endif
