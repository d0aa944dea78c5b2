/* Results of linear layers: the epilogue of a panel's sums, and their only rounding. */
#ifndef FINISH_H
#define FINISH_H

#include "epilogue.h"
#include "kernels.h"
#include "lora.h"

/* Up to 16 numbers of bfloat16, or float32, as float32; the other lanes are 0. */
INLINED vec
read_lanes(const void *from, int64_t at, int64_t count, int is_bfloat16)
{
    return is_bfloat16 ? load_bfloat16((const uint16_t *)from + at, count) : load_floats((const float *)from + at, count);
}

/* `finish_rows` for one epilogue; a `plain` layer has no LoRA, and columns for the whole panel. */
INLINED void
finish_rows_of(int plain, epilogue_t kind, const linear_t *l, int is_bfloat16, int64_t row, int64_t count, int64_t column,
               const float *units, const float *sums)
{
    const int64_t columns = l->gemm->columns;
    const void *bias = l->gemm->bias, *other = l->other;
    for (int64_t stop = row + count; row < stop; row++, sums += COLUMNS) {
        vec delta[2] = {vec_zero(), vec_zero()};
        const int has_lora = !plain && find_lora(l->lora, l->lora_gemm, row, column, delta);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const int64_t first = column + half * LANES, lanes = plain ? LANES : columns - first;
            const int64_t at = row * columns + first;
            if (!plain && lanes <= 0)
                break;
            vec y = vec_load(sums + half * LANES);
            if (units)
                y = vec_mul(y, vec_load(units + half * LANES));
            if (bias)
                y = vec_add(y, read_lanes(bias, first, lanes, is_bfloat16));
            if (has_lora)
                y = vec_add(y, delta[half]);
            y = epilogue(kind, y, takes_other(kind) ? read_lanes(other, at, lanes, is_bfloat16) : y);
            if (is_bfloat16 && !l->is_unrounded)
                store_bfloat16((uint16_t *)l->output + at, lanes, y);
            else
                store_floats((float *)l->output + at, lanes, y);
        }
    }
}

/* Results of `count` rows from `row` on in a panel's columns, from `column` on: their sums [count, 32], times units [32] if
 * there are some, the epilogue, and the only rounding. Bias, operand and results are bfloat16 or float32.
 */
INLINED void
finish_rows(const linear_t *l, int is_bfloat16, int64_t row, int64_t count, int64_t column, const float *units,
            const float *sums)
{
    const int is_plain = !l->lora && l->gemm->columns - column >= COLUMNS;
    if (is_plain && l->epilogue == NOTHING)
        finish_rows_of(1, NOTHING, l, is_bfloat16, row, count, column, units, sums);
    else if (is_plain && l->epilogue == SILU)
        finish_rows_of(1, SILU, l, is_bfloat16, row, count, column, units, sums);
    else if (is_plain && l->epilogue == ADD)
        finish_rows_of(1, ADD, l, is_bfloat16, row, count, column, units, sums);
    else if (is_plain && l->epilogue == MULTIPLY)
        finish_rows_of(1, MULTIPLY, l, is_bfloat16, row, count, column, units, sums);
    else
        finish_rows_of(0, (epilogue_t)l->epilogue, l, is_bfloat16, row, count, column, units, sums);
}

#endif
