/* What the kernels of one library call of each other; `native/__init__.py` declares them to Python. */
#ifndef KERNELS_H
#define KERNELS_H

#include "team.h"

/* A call stays within the library: those of the other paths and types have the same names. */
#define KERNEL __attribute__((visibility("protected")))

/* A query tile: consecutive tokens of one sequence; the heads that share keys make up to 64 queries. */
typedef struct {
    int64_t first, count; /* tokens of the step */
    int64_t position;     /* of the first one in its sequence */
    int64_t pages;        /* where the sequence's pages begin in the page table */
} tile_t;

KERNEL int32_t linear(const element *input, int64_t rows, int64_t inner, const element *panels, int64_t columns,
                      const element *bias, int32_t then, const element *other, void *output, int32_t is_unrounded,
                      const team_t *team);

KERNEL void rms_norm(const element *x, int64_t rows, int64_t width, const element *weight, float epsilon, element *y,
                     const team_t *team);

#ifdef FLOAT32
KERNEL void soft_cap(float *x, int64_t count, float cap, const team_t *team);
#endif

KERNEL void rotate_and_store(const element *qkv, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t width,
                             const element *cosine, const element *sine, const element *query_norm,
                             const element *key_norm, float epsilon, element *query, char *keys, char *values,
                             int32_t is_int8, int64_t size, const int64_t *pages, const int64_t *slots,
                             const team_t *team);

KERNEL void attend(const element *query, int64_t query_stride, element *output, const char *keys, const char *values,
                   int32_t is_int8, int64_t kv_heads, int64_t group, int64_t width, int64_t size, const int64_t *pages,
                   const tile_t *tiles, int64_t num_tiles, int64_t window, float scale, float softcap,
                   const team_t *team);

/* Of the library in float32, also for bfloat16. */
typedef int32_t quantised_linear_t(const void *input, int32_t is_bfloat16, int64_t rows, int64_t inner,
                                   const void *codes, int32_t bits, int64_t group, const void *scales,
                                   const void *offsets, int32_t is_half, float zero, int64_t columns,
                                   const void *bias, int32_t then, const void *other, void *output,
                                   int32_t is_unrounded, const team_t *team);

#endif
