/* LoRA: x A^T, which `lora.c` computes, and its product with B, which the epilogue of a GEMM adds to its sums. All sums are
 * float32, each in one order that depends on its row and its adapter alone: matrices of 16 bits give the same bits as if
 * they were float32. A row without an adapter has the sums that it has in a step without adapters.
 */
#ifndef LORA_H
#define LORA_H

#include "kernels.h"

INLINED int64_t
lora_bytes(int64_t type)
{
    return type == LORA_FLOAT32 ? sizeof(float) : sizeof(uint16_t);
}

/* 16 elements of A or B. */
INLINED vec
load_lora(const void *from, int64_t at, int type)
{
    if (type == LORA_FLOAT32)
        return vec_load((const float *)from + at);
    const uint16_t *halves = (const uint16_t *)from + at;
    return type == LORA_BFLOAT16 ? load_bfloat16(halves, LANES) : load_halves(halves);
}

/* A row's sums times the columns of a panel of B. */
INLINED void
multiply_by_b(const lora_panel_t *panel, const float *sums, vec delta[2], int type)
{
    vec left = vec_zero(), right = vec_zero();
    const int64_t count = panel->count;
    for (int64_t rank = 0; rank < count; rank++) {
        const vec sum = vec_all(sums[rank]);
        left = vec_fmadd(sum, load_lora(panel->b, rank * COLUMNS, type), left);
        right = vec_fmadd(sum, load_lora(panel->b, rank * COLUMNS + LANES, type), right);
    }
    delta[0] = left, delta[1] = right;
}

/* What a row's LoRA adds to its sums for the panel of a GEMM that begins at `column`; returns 0 if it adds nothing. */
INLINED int
find_lora(const lora_t *lora, int32_t gemm, int64_t row, int64_t column, vec delta[2])
{
    enum { LINE = 64 };
    const lora_layer_t *adapter = lora ? lora->adapters[row] : NULL;
    const lora_panel_t *panel = adapter ? adapter[lora->layer].gemms[gemm] : NULL;
    if (!panel)
        return 0;
    panel += column / COLUMNS;
    if (row == 0 || lora->adapters[row - 1] != adapter) { /* what is read next comes while the GEMM computes */
        __builtin_prefetch(panel + 3);
        const int64_t size = lora_bytes(panel[1].type);
        for (int64_t byte = 0; byte < panel[1].count * COLUMNS * size; byte += LINE)
            fetch_to_l2((const char *)panel[1].b + byte);
    }
    const float *sums = lora->sums + row * lora->stride + panel->first;
    if (panel->type == LORA_FLOAT32)
        multiply_by_b(panel, sums, delta, LORA_FLOAT32);
    else if (panel->type == LORA_BFLOAT16)
        multiply_by_b(panel, sums, delta, LORA_BFLOAT16);
    else
        multiply_by_b(panel, sums, delta, LORA_FLOAT16);
    return 1;
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
