/* What a step of decoder layers is made of; `native/layers.py` fills it in. */
#ifndef LAYERS_H
#define LAYERS_H

#include "kernels.h"

/* A weight [columns, inner], packed into panels; its codes where it is quantised. */
typedef struct {
    int64_t columns, inner;
    const void *weight, *bias;
    const void *scales, *offsets;
    int64_t group; /* 0: it is not quantised */
    int32_t bits, is_half;
    float zero;
} gemm_t;

enum { PARTS_OF_QKV = 3 };

typedef struct {
    const element *input_norm, *mlp_norm;
    const element *query_norm, *key_norm; /* NULL for none */
    float input_epsilon, mlp_epsilon, head_epsilon;
    float scale; /* of scores */
    int64_t window;
    gemm_t qkv[PARTS_OF_QKV]; /* one below the other; those that are missing have no columns */
    gemm_t output, gate, up, down;
    char *keys, *values; /* pages */
} layer_t;

typedef struct {
    int64_t tokens, hidden, heads, kv_heads, width;
    const element *cosine, *sine;  /* [tokens, width] */
    const int64_t *pages, *slots;  /* [tokens]: where keys and values are written */
    const int64_t *page_table;     /* of all sequences */
    const tile_t *tiles;
    int64_t num_tiles, page_size;
    quantised_linear_t *quantised; /* NULL if no weight is */
    int32_t is_int8;               /* keys and values */
    const team_t *team;
} step_t;

int32_t decoder_layers(const step_t *step, const layer_t *layers, int64_t count, element *hidden);

#endif
