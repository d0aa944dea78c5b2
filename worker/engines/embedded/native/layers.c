/* The decoder layers of the Llama family, all of a step in one call: between the kernels of a step on few rows Python
 * would take as long as the kernels themselves. They are called as Python calls them, so that the bits are the same.
 */
#include <stdlib.h>

#include "epilogue.h"
#include "kernels.h"
#include "lora.h"

/* A row for each token. */
typedef struct {
    element *normed, *qkv, *part, *query, *attended, *gated;
    float *sums; /* of LoRA; NULL if no token has an adapter */
} buffers_t;

/* LoRA of the linear layers of a layer that read `x` [tokens, inner], in `found`; NULL if no token has an adapter. */
static const lora_t *
lora_of(const step_t *s, const buffers_t *b, int64_t layer, int input, const element *x, int64_t inner, lora_t *found,
        const threads_t *threads)
{
    if (!b->sums)
        return NULL;
    *found = (lora_t){s->adapters, layer, b->sums, s->lora_width};
    multiply_by_a(&(shrinking_t){s, layer, input, x, inner, b->sums}, threads);
    return found;
}

/* The output of a linear layer, whose quantised weight needs other kernels. */
static int32_t
apply(const step_t *s, const linear_t *l, const threads_t *threads)
{
    return (l->gemm->group ? s->quantised : linear)(l, threads);
}

/* The fused projection; parts in different formats are computed one by one and put beside each other. */
static int32_t
project(const step_t *s, const layer_t *l, const buffers_t *b, const lora_t *lora, const threads_t *threads)
{
    linear_t part = {.input = b->normed, .rows = s->tokens, .gemm = l->query_proj, .output = b->qkv};
    part.is_bfloat16 = sizeof(element) == 2;
    part.lora = lora, part.lora_gemm = QUERY_GEMM;
    if (!l->key_proj)
        return apply(s, &part, threads);
    const gemm_t *const parts[] = {l->query_proj, l->key_proj, l->value_proj};
    const int64_t columns = (s->heads + 2 * s->kv_heads) * s->width;
    int64_t first = 0;
    part.output = b->part;
    for (int i = 0; i < 3 && parts[i]; first += parts[i++]->columns) {
        part.gemm = parts[i], part.lora_gemm = QUERY_GEMM + i;
        if (apply(s, &part, threads))
            return -1;
        for (int64_t token = 0; token < s->tokens; token++)
            memcpy(b->qkv + token * columns + first, b->part + token * parts[i]->columns,
                   parts[i]->columns * sizeof *b->part);
    }
    return 0;
}

static void
attend_qkv(const step_t *s, const layer_t *l, const buffers_t *b, const threads_t *threads)
{
    const rotation_t rotation = {
        .qkv = b->qkv, .tokens = s->tokens, .heads = s->heads, .kv_heads = s->kv_heads, .width = s->width,
        .cosine = s->cosine, .sine = s->sine, .query_norm = l->query_norm, .key_norm = l->key_norm, .query = b->query,
        .keys = l->keys, .values = l->values, .page_size = s->page_size, .pages = s->pages, .slots = s->slots,
        .epsilon = l->head_epsilon, .is_int8 = s->is_int8};
    const attention_t attention = {
        .query = b->query, .query_stride = s->heads * s->width, .output = b->attended, .keys = l->keys,
        .values = l->values, .kv_heads = s->kv_heads, .group = s->heads / s->kv_heads, .width = s->width,
        .page_size = s->page_size, .page_table = s->page_table, .tiles = s->tiles, .num_tiles = s->num_tiles,
        .window = l->window, .scale = l->scale, .is_int8 = s->is_int8};
    rotate_and_store(&rotation, threads);
    attend(&attention, threads);
}

static void
normalise(const step_t *s, const element *hidden, const element *weight, float epsilon, element *normed,
          const threads_t *threads)
{
    const rms_norm_t norm = {hidden, s->tokens, s->hidden, weight, normed, epsilon};
    rms_norm(&norm, threads);
}

/* A layer, by its number; `hidden` [tokens, hidden] is replaced. */
static int32_t
compute_layer(const step_t *s, const layer_t *l, int64_t number, const buffers_t *b, element *hidden,
              const threads_t *threads)
{
    const int32_t is_bfloat16 = sizeof(element) == 2;
    lora_t lora;
    linear_t output = {b->attended, s->tokens, l->output_proj, hidden, hidden, ADD, 0, is_bfloat16, OUTPUT_GEMM};
    linear_t gate = {b->normed, s->tokens, l->gate, NULL, b->gated, SILU, 0, is_bfloat16, GATE_GEMM};
    linear_t up = {b->normed, s->tokens, l->up, b->gated, b->gated, MULTIPLY, 0, is_bfloat16, UP_GEMM};
    linear_t down = {b->gated, s->tokens, l->down, hidden, hidden, ADD, 0, is_bfloat16, DOWN_GEMM};
    normalise(s, hidden, l->input_norm, l->input_epsilon, b->normed, threads);
    if (project(s, l, b, lora_of(s, b, number, QKV_INPUT, b->normed, s->hidden, &lora, threads), threads))
        return -1;
    attend_qkv(s, l, b, threads);
    output.lora = lora_of(s, b, number, OUTPUT_INPUT, b->attended, s->heads * s->width, &lora, threads);
    if (apply(s, &output, threads))
        return -1;
    normalise(s, hidden, l->mlp_norm, l->mlp_epsilon, b->normed, threads);
    gate.lora = up.lora = lora_of(s, b, number, MLP_INPUT, b->normed, s->hidden, &lora, threads);
    if (apply(s, &gate, threads) || apply(s, &up, threads))
        return -1;
    down.lora = lora_of(s, b, number, DOWN_INPUT, b->gated, l->down->inner, &lora, threads);
    return apply(s, &down, threads);
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
compute_layers(const threads_t *threads, void *argument)
{
    all_layers_t *all = argument;
    for (int64_t i = 0; i < all->count && !all->failed; i++)
        all->failed = compute_layer(all->step, all->layers + i, i, all->buffers, all->hidden, threads);
}

int32_t
decoder_layers(const step_t *step, const layer_t *layers, int64_t count, element *hidden, const threads_t *threads)
{
    const int64_t heads = step->heads * step->width, qkv = heads + 2 * step->kv_heads * step->width;
    const int64_t widths[] = {step->hidden, qkv, qkv, heads, heads, layers->gate->columns};
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
    buffers_t buffers = {found[0], found[1], found[2], found[3], found[4], found[5], NULL};
    if (step->adapters && !(buffers.sums = malloc((step->tokens * step->lora_width + 1) * sizeof *buffers.sums))) {
        free(memory);
        return -1;
    }
    all_layers_t all = {step, layers, count, &buffers, hidden, 0};
    with_pool(threads->count, compute_layers, &all);
    free(buffers.sums);
    free(memory);
    return all.failed;
}
