/* The decoder layers of the Llama family, all of a step in one call: between the kernels of a step on few rows Python
 * would take as long as the kernels themselves. They are called as Python calls them, so that the bits are the same.
 */
#include <stdlib.h>

#include "epilogue.h"
#include "layers.h"

/* A row for each token. */
typedef struct {
    element *normed, *qkv, *part, *query, *attended, *gated;
} buffers_t;

static int32_t
apply(const step_t *s, const gemm_t *g, const element *input, then_t then, const element *other, element *output)
{
    if (!g->group)
        return linear(input, s->tokens, g->inner, g->weight, g->columns, g->bias, then, other, output, 0, s->team);
    return s->quantised(input, sizeof(element) == 2, s->tokens, g->inner, g->weight, g->bits, g->group, g->scales,
                        g->offsets, g->is_half, g->zero, g->columns, g->bias, then, other, output, 0, s->team);
}

/* The fused projection; parts in different formats are computed one by one and put beside each other. */
static int32_t
project(const step_t *s, const layer_t *l, const buffers_t *b)
{
    if (!l->qkv[1].columns)
        return apply(s, l->qkv, b->normed, NOTHING, NULL, b->qkv);
    const int64_t columns = (s->heads + 2 * s->kv_heads) * s->width;
    int64_t first = 0;
    for (const gemm_t *g = l->qkv; g < l->qkv + PARTS_OF_QKV && g->columns; first += g++->columns) {
        if (apply(s, g, b->normed, NOTHING, NULL, b->part))
            return -1;
        for (int64_t token = 0; token < s->tokens; token++)
            memcpy(b->qkv + token * columns + first, b->part + token * g->columns, g->columns * sizeof *b->part);
    }
    return 0;
}

/* One layer; `hidden` [tokens, hidden] is replaced. */
static int32_t
compute_layer(const step_t *s, const layer_t *l, const buffers_t *b, element *hidden)
{
    rms_norm(hidden, s->tokens, s->hidden, l->input_norm, l->input_epsilon, b->normed, s->team);
    if (project(s, l, b))
        return -1;
    rotate_and_store(b->qkv, s->tokens, s->heads, s->kv_heads, s->width, s->cosine, s->sine, l->query_norm,
                     l->key_norm, l->head_epsilon, b->query, l->keys, l->values, s->is_int8, s->page_size, s->pages,
                     s->slots, s->team);
    attend(b->query, s->heads * s->width, b->attended, l->keys, l->values, s->is_int8, s->kv_heads,
           s->heads / s->kv_heads, s->width, s->page_size, s->page_table, s->tiles, s->num_tiles, l->window, l->scale,
           0.0f, s->team);
    if (apply(s, &l->output, b->attended, ADD, hidden, hidden))
        return -1;
    rms_norm(hidden, s->tokens, s->hidden, l->mlp_norm, l->mlp_epsilon, b->normed, s->team);
    if (apply(s, &l->gate, b->normed, SILU, NULL, b->gated) ||
        apply(s, &l->up, b->normed, MULTIPLY, b->gated, b->gated))
        return -1;
    return apply(s, &l->down, b->gated, ADD, hidden, hidden);
}

typedef struct {
    const step_t *step;
    const layer_t *layers;
    int64_t count;
    const buffers_t *buffers;
    element *hidden;
    int32_t failed;
} all_layers_t;

static void
compute_layers(const team_t *team, void *argument)
{
    all_layers_t *all = argument;
    step_t step = *all->step;
    step.team = team;
    for (int64_t i = 0; i < all->count && !all->failed; i++)
        all->failed = compute_layer(&step, all->layers + i, all->buffers, all->hidden);
}

/* `hidden` [tokens, hidden] goes through all layers. Returns 0, or -1 if there is no memory. */
int32_t
decoder_layers(const step_t *step, const layer_t *layers, int64_t count, element *hidden)
{
    const int64_t heads = step->heads * step->width, qkv = heads + 2 * step->kv_heads * step->width;
    const int64_t widths[] = {step->hidden, qkv, qkv, heads, heads, layers->gate.columns};
    enum { NUMBER = sizeof widths / sizeof *widths };
    element *found[NUMBER], *memory;
    int64_t size = 0;
    for (int i = 0; i < NUMBER; i++)
        size += (step->tokens * widths[i] + 63) / 64 * 64;
    memory = aligned_alloc(64, size * sizeof *memory);
    if (!memory)
        return -1;
    element *next = memory;
    for (int i = 0; i < NUMBER; next += (step->tokens * widths[i++] + 63) / 64 * 64)
        found[i] = next;
    const buffers_t buffers = {found[0], found[1], found[2], found[3], found[4], found[5]};
    all_layers_t all = {step, layers, count, &buffers, hidden, 0};
    with_crew(step->team->threads, compute_layers, &all);
    free(memory);
    return all.failed;
}
