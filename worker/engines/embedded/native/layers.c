/* The decoder layers of a model, all of a step in one call: between the kernels of a step on few rows Python
 * would take as long as the kernels themselves. They are called as Python calls them, so that the bits are the same.
 */
#include <stdlib.h>

#include "epilogue.h"
#include "kernels.h"
#include "lora.h"
#include "memory.h"

/* A row for each token. */
typedef struct {
    element *normed, *qkv, *part, *query, *attended, *gated;
    element *added; /* what attention or MLP adds, before it is added */
    element *read;  /* hidden states of the tokens that are read, behind each other */
    float *sums;    /* of LoRA; NULL if no token has an adapter */
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

int32_t
adapted_linear(const step_t *s, int64_t number, const linear_t *given, const threads_t *threads)
{
    const buffers_t buffers = {.sums = malloc((given->rows * s->lora_width + 1) * sizeof *buffers.sums)};
    if (!buffers.sums)
        return -1;
    linear_t layer = *given;
    lora_t lora;
    layer.lora_gemm = QUERY_GEMM;
    layer.lora = lora_of(s, &buffers, number, QKV_INPUT, given->input, given->gemm->inner, &lora, threads);
    const int32_t failed = apply(s, &layer, threads);
    free(buffers.sums);
    return failed;
}

/* The fused projection; parts in different formats are computed one by one and put beside each other. */
static int32_t
project(const step_t *s, const layer_t *l, const buffers_t *b, const element *input, const lora_t *lora,
        const threads_t *threads)
{
    linear_t part = {.input = input, .rows = s->tokens, .gemm = l->query_proj, .output = b->qkv};
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

/* RMSNorm of all query heads of a token together, or of all key heads, in place. */
static void
normalise_heads(const step_t *s, element *heads, int64_t count, const float *weight, float epsilon,
                const threads_t *threads)
{
    const rms_norm_t norm = {.x = heads, .rows = s->tokens, .width = count * s->width,
                             .stride = (s->heads + 2 * s->kv_heads) * s->width, .weight = weight, .y = heads,
                             .epsilon = epsilon};
    rms_norm(&norm, threads);
}

static void
attend_qkv(const step_t *s, const layer_t *l, const buffers_t *b, const threads_t *threads)
{
    const int64_t angles = l->rope * s->tokens * s->rotary;
    const float *query_norm = l->query_norm, *key_norm = l->key_norm;
    if (l->norms_whole) {
        normalise_heads(s, b->qkv, s->heads, query_norm, l->head_epsilon, threads);
        normalise_heads(s, b->qkv + s->heads * s->width, s->kv_heads, key_norm, l->head_epsilon, threads);
        query_norm = key_norm = NULL;
    }
    const rotation_t rotation = {
        .qkv = b->qkv, .tokens = s->tokens, .heads = s->heads, .kv_heads = s->kv_heads, .width = s->width,
        .rotary = s->rotary, .cosine = l->rope < 0 ? NULL : s->cosine + angles,
        .sine = l->rope < 0 ? NULL : s->sine + angles, .query_norm = query_norm, .key_norm = key_norm,
        .query = b->query, .keys = l->keys, .values = l->values, .page_size = s->page_size, .pages = s->pages,
        .slots = s->slots, .epsilon = l->head_epsilon, .is_interleaved = s->is_interleaved, .code_bytes = s->code_bytes};
    const attention_t attention = {
        .query = b->query, .query_stride = s->heads * s->width, .output = b->attended, .keys = l->keys,
        .values = l->values, .kv_heads = s->kv_heads, .group = s->heads / s->kv_heads, .width = s->width,
        .page_size = s->page_size, .page_table = s->page_table, .tiles = s->tiles, .num_tiles = s->num_tiles,
        .window = l->window, .scale = l->scale, .softcap = l->softcap, .sinks = l->sinks, .code_bytes = s->code_bytes};
    rotate_and_store(&rotation, threads);
    attend(&attention, threads);
}

/* The hidden states, or their RMSNorm. */
static const element *
normalised(const step_t *s, const element *hidden, const float *weight, float epsilon, element *normed,
           const threads_t *threads)
{
    if (!weight)
        return hidden;
    const rms_norm_t norm = {hidden, s->tokens, s->hidden, s->hidden, weight, normed, epsilon};
    rms_norm(&norm, threads);
    return normed;
}

/* Whether a linear layer's epilogue adds its output to the hidden states. */
static inline int
adds_at_once(const layer_t *l, const float *post_norm)
{
    return !post_norm && l->residual == 1;
}

/* Adds to the hidden states what is in `added`, unless that is done. */
static void
add_to_hidden(const step_t *s, const layer_t *l, const buffers_t *b, const float *post_norm, element *hidden,
              const threads_t *threads)
{
    const element *added = normalised(s, b->added, post_norm, l->epsilon, b->added, threads);
    add_rows(hidden, added, s->tokens, s->hidden, l->residual, threads);
}

static int32_t
compute_mlp(const step_t *s, const layer_t *l, int64_t number, const buffers_t *b, const element *input,
            element *hidden, const threads_t *threads)
{
    const int32_t is_bfloat16 = sizeof(element) == 2, at_once = adds_at_once(l, l->mlp_post_norm);
    lora_t lora;
    linear_t inner[] = {{input, s->tokens, l->gate, NULL, b->gated, l->activation, 0, is_bfloat16, GATE_GEMM},
                        {input, s->tokens, l->up, b->gated, b->gated, l->product, 0, is_bfloat16, UP_GEMM}};
    linear_t down = {b->gated, s->tokens, l->down, hidden, at_once ? hidden : b->added, at_once ? ADD : NOTHING,
                     0, is_bfloat16, DOWN_GEMM};
    inner[0].lora = inner[1].lora = lora_of(s, b, number, MLP_INPUT, input, s->hidden, &lora, threads);
    inner[1].follows = have_one_kernel(inner);
    if (apply_all(s, inner, 2, threads))
        return -1;
    down.lora = lora_of(s, b, number, DOWN_INPUT, b->gated, l->down->inner, &lora, threads);
    if (apply(s, &down, threads))
        return -1;
    if (!at_once)
        add_to_hidden(s, l, b, l->mlp_post_norm, hidden, threads);
    return 0;
}

/* The part of a layer behind attention, whose result is in `attended`. */
static int32_t
compute_behind_attention(const step_t *s, const layer_t *l, int64_t number, const buffers_t *b, element *hidden,
                         const threads_t *threads)
{
    const int32_t is_bfloat16 = sizeof(element) == 2, at_once = adds_at_once(l, l->attention_post_norm);
    lora_t lora;
    linear_t output = {b->attended, s->tokens, l->output_proj, hidden, at_once ? hidden : b->added,
                       at_once ? ADD : NOTHING, 0, is_bfloat16, OUTPUT_GEMM};
    const element *input;
    output.lora = lora_of(s, b, number, OUTPUT_INPUT, b->attended, s->heads * s->width, &lora, threads);
    if (apply(s, &output, threads))
        return -1;
    if (!at_once)
        add_to_hidden(s, l, b, l->attention_post_norm, hidden, threads);
    input = normalised(s, hidden, l->mlp_norm, l->epsilon, b->normed, threads);
    if (!l->experts)
        return compute_mlp(s, l, number, b, input, hidden, threads);
    if (mix_experts(s, l, input, b->added, threads))
        return -1;
    add_to_hidden(s, l, b, l->mlp_post_norm, hidden, threads);
    return 0;
}

/* Whether an element is NaN or infinite. */
static int
have_non_finite(const element *row, int64_t count)
{
    int found = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = 0;
        memcpy(&bits, row + i, sizeof *row);
        const uint32_t exponent = sizeof(element) == 2 ? 0x7f80 : 0x7f800000;
        found |= (bits & exponent) == exponent;
    }
    return found;
}

/* Attention and what is behind it, of the tokens that are read. Of the others keys and values are written; their hidden
 * states stay what they are before the layer, or become NaN where a key or a value is not finite.
 */
static int32_t
compute_read_tokens(const step_t *s, const layer_t *l, int64_t number, const buffers_t *b, element *hidden,
                    const threads_t *threads)
{
    const int64_t heads = s->heads * s->width, key_values = 2 * s->kv_heads * s->width;
    const int64_t row = s->hidden * sizeof *hidden, num_read = s->tokens - s->num_unread;
    step_t some = *s;
    some.tiles = s->read_tiles, some.num_tiles = s->num_read_tiles;
    attend_qkv(&some, l, b, threads);
    for (int64_t token = 0, next = 0; token < s->tokens; token++) {
        if (next < num_read && s->read[next] == token) {
            memmove(b->attended + next * heads, b->attended + token * heads, heads * sizeof *hidden);
            memcpy(b->read + next++ * s->hidden, hidden + token * s->hidden, row);
        } else if (have_non_finite(b->qkv + token * (heads + key_values) + heads, key_values)) {
            memset(hidden + token * s->hidden, 0xff, row);
        }
    }
    some.tokens = num_read;
    some.adapters = s->read_adapters, some.adapted = s->read_adapted, some.num_adapted = s->num_read_adapted;
    if (some.tokens && compute_behind_attention(&some, l, number, b, b->read, threads))
        return -1;
    for (int64_t next = 0; next < num_read; next++)
        memcpy(hidden + s->read[next] * s->hidden, b->read + next * s->hidden, row);
    return 0;
}

/* A layer, by its number; `hidden` [tokens, hidden] is replaced, of the last layer where it is read. */
static int32_t
compute_layer(const step_t *s, const layer_t *l, int64_t number, int is_last, const buffers_t *b, element *hidden,
              const threads_t *threads)
{
    lora_t lora;
    const element *input = normalised(s, hidden, l->input_norm, l->epsilon, b->normed, threads);
    if (project(s, l, b, input, lora_of(s, b, number, QKV_INPUT, input, s->hidden, &lora, threads), threads))
        return -1;
    if (is_last && s->num_unread)
        return compute_read_tokens(s, l, number, b, hidden, threads);
    attend_qkv(s, l, b, threads);
    return compute_behind_attention(s, l, number, b, hidden, threads);
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
        all->failed =
            compute_layer(all->step, all->layers + i, i, i == all->count - 1, all->buffers, all->hidden, threads);
}

int32_t
decoder_layers(const step_t *step, const layer_t *layers, int64_t count, element *hidden, const threads_t *threads)
{
    const int64_t heads = step->heads * step->width, qkv = heads + 2 * step->kv_heads * step->width;
    const int64_t sizes[] = {step->tokens * step->hidden, step->tokens * qkv,         step->tokens * qkv,
                             step->tokens * heads,        step->tokens * heads,       step->tokens * step->inner,
                             step->tokens * step->hidden, (step->tokens - step->num_unread) * step->hidden};
    enum { NUMBER = sizeof sizes / sizeof *sizes };
    element *found[NUMBER], *memory;
    int64_t size = 0;
    for (int i = 0; i < NUMBER; i++)
        size += (sizes[i] + 63) / 64 * 64;
    memory = allocate(size * sizeof *memory);
    if (!memory)
        return -1;
    element *next = memory;
    for (int i = 0; i < NUMBER; next += (sizes[i++] + 63) / 64 * 64)
        found[i] = next;
    buffers_t buffers = {found[0], found[1], found[2], found[3], found[4], found[5], found[6], found[7], NULL};
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
