/* Shared by the GEMMs on quantised weights: reading of rows, of scales and of offsets, and the epilogue. */
#ifndef QUANTISED_H
#define QUANTISED_H

#include "epilogue.h"
#include "kernels.h"
#include "lora.h"

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
    int32_t is_bfloat16; /* of bias, other and output */
    const void *bias;
    epilogue_t epilogue;
    const void *other;
    void *output;
    int32_t is_unrounded;
    const lora_t *lora;
    int32_t lora_gemm;
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
                         .bias = g->bias, .epilogue = (epilogue_t)l->epilogue, .other = l->other,
                         .output = l->output, .is_unrounded = l->is_unrounded, .lora = l->lora,
                         .lora_gemm = l->lora_gemm};
}

/* Whether two layers read the same rows. */
static inline int
has_rows_of(const quantised_t *q, const quantised_t *other)
{
    return q->input == other->input && q->rows == other->rows && q->inner == other->inner &&
           q->is_bfloat16 == other->is_bfloat16;
}

/* Bfloat16, or float32, as float32. */
INLINED vec
read_lanes(const void *from, int64_t at, int64_t count, int is_bfloat16)
{
    return is_bfloat16 ? load_bfloat16((const uint16_t *)from + at, count) : load_lanes((const float *)from + at, count);
}

/* Code number `index` of each of 16 words of codes of 4 bits. */
INLINED vec
four_bits_of(words_t w, int index, int is_e2m1)
{
    return is_e2m1 ? e2m1_of(w, index) : nibbles_of(w, index);
}

/* Fetches the lines that `finish` reads and writes of a row, before the sums are computed. */
static inline void
prefetch_row(const quantised_t *q, int64_t row, int64_t column)
{
    enum { LINE = 64 };
    const int64_t size = q->is_bfloat16 ? sizeof(uint16_t) : sizeof(float), at = row * q->columns + column;
    const int64_t output_size = q->is_unrounded ? (int64_t)sizeof(float) : size;
    for (int64_t byte = 0; byte < COLUMNS * output_size; byte += LINE)
        __builtin_prefetch((char *)q->output + at * output_size + byte, 1);
    for (int64_t byte = 0; takes_other(q->epilogue) && byte < COLUMNS * size; byte += LINE)
        __builtin_prefetch((const char *)q->other + at * size + byte);
}

/* `finish_rows` for one epilogue; a `plain` layer has no LoRA, and columns for the whole panel. */
INLINED void
finish_rows_of(int plain, epilogue_t kind, const quantised_t *q, int64_t row, int64_t count, int64_t column,
               const float *units, const float *sums)
{
    for (int64_t stop = row + count; row < stop; row++, sums += COLUMNS) {
        vec delta[2];
        const int has_lora = !plain && find_lora(q->lora, q->lora_gemm, row, column, delta);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            if (!plain && column + half * LANES >= q->columns)
                break;
            const int64_t first = column + half * LANES, lanes = plain ? LANES : q->columns - first;
            const int64_t at = row * q->columns + first;
            vec y = vec_load(sums + half * LANES);
            if (units)
                y = vec_mul(y, vec_load(units + half * LANES));
            if (q->bias)
                y = vec_add(y, read_lanes(q->bias, first, lanes, q->is_bfloat16));
            if (has_lora)
                y = vec_add(y, delta[half]);
            y = epilogue(kind, y, takes_other(kind) ? read_lanes(q->other, at, lanes, q->is_bfloat16) : y);
            if (q->is_bfloat16 && !q->is_unrounded)
                store_bfloat16((uint16_t *)q->output + at, lanes, y);
            else
                store_lanes((float *)q->output + at, lanes, y);
        }
    }
}

/* Results of `count` rows from `row` on in a panel's columns: their sums [count, 32], times units [32] if there are some,
 * the epilogue, and the only rounding.
 */
static inline void
finish_rows(const quantised_t *q, int64_t row, int64_t count, int64_t column, const float *units, const float *sums)
{
    const int is_plain = !q->lora && q->columns - column >= COLUMNS;
    if (is_plain && q->epilogue == NOTHING)
        finish_rows_of(1, NOTHING, q, row, count, column, units, sums);
    else if (is_plain && q->epilogue == SILU)
        finish_rows_of(1, SILU, q, row, count, column, units, sums);
    else if (is_plain && q->epilogue == ADD)
        finish_rows_of(1, ADD, q, row, count, column, units, sums);
    else if (is_plain && q->epilogue == MULTIPLY)
        finish_rows_of(1, MULTIPLY, q, row, count, column, units, sums);
    else
        finish_rows_of(0, q->epilogue, q, row, count, column, units, sums);
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
