/* What the GEMMs on quantised weights share: their arguments, and what they do with a sum. */
#ifndef QUANTISED_H
#define QUANTISED_H

#include "epilogue.h"
#include "kernels.h"

typedef struct {
    const char *codes;
    int32_t bits; /* of a code: 4 or 8 */
    int64_t group;
    const char *scales, *offsets; /* `offsets` may be NULL: each is `zero` times its scale */
    int32_t is_half;              /* whether scales and offsets are float16, not float32 */
    float zero;
    const float *input; /* [rows, inner] */
    int64_t rows, inner, columns;
    int32_t is_bfloat16; /* of bias, other and output */
    const void *bias;    /* [columns] or NULL */
    then_t then;
    const void *other;     /* [rows, columns], the epilogue's operand */
    void *output;          /* [rows, columns] */
    int32_t is_unrounded;  /* whether they are float32, even so */
} quantised_t;

/* Bfloat16, or float32, as float32. */
INLINED vec
read_lanes(const void *from, int64_t at, int64_t count, int is_bfloat16)
{
    return is_bfloat16 ? load_bfloat16((const uint16_t *)from + at, count) : load_lanes((const float *)from + at, count);
}

/* Fetches what `finish` reads and writes of a row, before the sums are computed. */
static inline void
prefetch_row(const quantised_t *q, int64_t row, int64_t column)
{
    enum { LINE = 64 };
    const int64_t size = q->is_bfloat16 ? sizeof(uint16_t) : sizeof(float), at = row * q->columns + column;
    const int64_t output_size = q->is_unrounded ? (int64_t)sizeof(float) : size;
    for (int64_t byte = 0; byte < COLUMNS * output_size; byte += LINE)
        __builtin_prefetch((char *)q->output + at * output_size + byte, 1);
    for (int64_t byte = 0; takes_other(q->then) && byte < COLUMNS * size; byte += LINE)
        __builtin_prefetch((const char *)q->other + at * size + byte);
}

/* The epilogue, and the only rounding of the sums. */
static inline void
finish(const quantised_t *q, int64_t row, int64_t column, const float *sums)
{
    for (int half = 0; half < 2 && column < q->columns; half++, column += LANES, sums += LANES) {
        const int64_t count = q->columns - column, at = row * q->columns + column;
        vec y = vec_load(sums);
        if (q->bias)
            y = vec_add(y, read_lanes(q->bias, column, count, q->is_bfloat16));
        y = epilogue(q->then, y, takes_other(q->then) ? read_lanes(q->other, at, count, q->is_bfloat16) : y);
        if (q->is_bfloat16 && !q->is_unrounded)
            store_bfloat16((uint16_t *)q->output + at, count, y);
        else
            store_lanes((float *)q->output + at, count, y);
    }
}

INLINED vec
load_scales(const char *from, int64_t at, int is_half)
{
    return is_half ? load_halves((const uint16_t *)from + at) : vec_load((const float *)from + at);
}

#endif
