/* LoRA: x A^T, which `lora.c` computes, and its product with B, which the epilogue of a GEMM adds to its sums. All in
 * float32, each sum in one order that depends on its row and its adapter alone; a row without an adapter has the sums that
 * it has in a step without adapters.
 */
#ifndef LORA_H
#define LORA_H

#include "kernels.h"

/* The lanes of a row's LoRA that begin at `column`, a multiple of 16, added to its sums y. */
INLINED vec
add_lora(const lora_t *lora, int32_t gemm, int64_t row, int64_t column, vec y)
{
    const lora_layer_t *adapter = lora->adapters[row];
    const lora_panel_t *panel = adapter ? adapter[lora->layer].gemms[gemm] : NULL;
    if (!panel)
        return y;
    panel += column / COLUMNS;
    if (column % COLUMNS == 0) /* the next panel is read while the GEMM computes its sums */
        for (int64_t rank = 0; rank < panel[1].count; rank++) {
            fetch_to_l2(panel[1].b + rank * COLUMNS);
            fetch_to_l2(panel[1].b + rank * COLUMNS + LANES);
        }
    const float *b = panel->b + column % COLUMNS, *sums = lora->sums + row * lora->stride + panel->first;
    vec delta = vec_zero();
    for (int64_t rank = 0; rank < panel->count; rank++)
        delta = vec_fmadd(vec_all(sums[rank]), vec_load(b + rank * COLUMNS), delta);
    return vec_add(y, delta);
}

/* Inputs of a step's linear layers, to be multiplied by A. */
typedef struct {
    const step_t *step;
    int64_t layer;
    int input;
    const element *x; /* [tokens, inner] */
    int64_t inner;
    float *sums; /* [tokens, lora_width] */
} shrinking_t;

/* x A^T of all rows that have an adapter. */
KERNEL void multiply_by_a(const shrinking_t *arguments, const threads_t *threads);

#endif
