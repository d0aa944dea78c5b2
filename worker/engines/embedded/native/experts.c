/* Mixtures of experts: a router chooses a token's experts, whose outputs are added up with its weights.
 *
 * Rows are sorted by expert, so that each weight is read once in a step. A row's experts and weights depend on the row
 * alone, and so does its sum, which goes over its experts in ascending order, in float32: it is batch-invariant.
 */
#include <stdlib.h>

#include "epilogue.h"
#include "kernels.h"
#include "memory.h"

enum {
    ONE_THREAD = 16, /* tokens up to which one thread is faster than several */
    GRAIN = 8,       /* tokens that a thread takes at a time */
};

/* A row for each token, or for each pair of a token and one of its experts; those are sorted by expert. */
typedef struct {
    const experts_t *experts;
    const element *input; /* [tokens, hidden] */
    element *output;      /* the same */
    int64_t hidden;
    float *numbers;   /* of the router, [tokens, count] */
    int32_t *chosen;  /* experts of a token, in ascending order, [tokens, top_k] */
    float *weights;   /* their weights */
    int64_t *pairs;   /* the row of each, [tokens, top_k] */
    int64_t *tokens;  /* the token of a row, [pairs] */
    element *rows;    /* [pairs, hidden], inputs of the experts */
    float *added;     /* [pairs, hidden], their outputs */
} mixture_t;

/* exp(x), with the bits of a lane. */
static inline float
exponential(float x)
{
    return vec_first(vec_exp2(vec_all(x * LOG2_E)));
}

/* Sum of exp(x - highest) over `count` numbers. */
static inline float
sum_exponentials(const float *x, int64_t count, float highest)
{
    vec sum = vec_zero();
    for (int64_t at = 0; at < count; at += LANES) {
        float lanes[LANES];
        for (int64_t i = 0; i < LANES; i++)
            lanes[i] = at + i < count ? x[at + i] - highest : -INFINITY;
        sum = vec_add(sum, vec_exp2(vec_mul(vec_load(lanes), vec_all(LOG2_E))));
    }
    return vec_sum(sum);
}

/* The greatest of a token's numbers, the first one of equals, and their softmax. NaN is greater than none. */
static void
choose(const void *arguments, int64_t first, int64_t stop)
{
    const mixture_t *m = arguments;
    const int64_t count = m->experts->count, top_k = m->experts->top_k;
    for (int64_t token = first; token < stop; token++) {
        const float *x = m->numbers + token * count;
        int32_t *chosen = m->chosen + token * top_k;
        float *weights = m->weights + token * top_k;
        for (int64_t i = 0; i < top_k; i++)
            chosen[i] = -1;
        for (int64_t expert = 0; expert < count; expert++) { /* inserted into a list in descending order */
            int64_t place = top_k;
            while (place > 0 && (chosen[place - 1] < 0 || x[expert] > x[chosen[place - 1]]))
                place--;
            if (place == top_k)
                continue;
            memmove(chosen + place + 1, chosen + place, (top_k - place - 1) * sizeof *chosen);
            chosen[place] = (int32_t)expert;
        }
        const float highest = x[chosen[0]];
        for (int64_t i = 1; i < top_k; i++) { /* ascending, by insertion */
            const int32_t expert = chosen[i];
            int64_t place = i;
            for (; place > 0 && chosen[place - 1] > expert; place--)
                chosen[place] = chosen[place - 1];
            chosen[place] = expert;
        }
        for (int64_t i = 0; i < top_k; i++)
            weights[i] = x[chosen[i]];
        const float sum = m->experts->normalises ? sum_exponentials(weights, top_k, highest)
                                                 : sum_exponentials(x, count, highest);
        for (int64_t i = 0; i < top_k; i++)
            weights[i] = exponential(weights[i] - highest) / sum;
    }
}

/* Sorts pairs by expert; `first` [count + 1] is where the rows of each begin. */
static void
sort_pairs(const mixture_t *m, int64_t tokens, int64_t *first)
{
    const int64_t count = m->experts->count, top_k = m->experts->top_k;
    memset(first, 0, (count + 1) * sizeof *first);
    for (int64_t pair = 0; pair < tokens * top_k; pair++)
        first[m->chosen[pair] + 1]++;
    for (int64_t expert = 0; expert < count; expert++)
        first[expert + 1] += first[expert];
    for (int64_t pair = 0; pair < tokens * top_k; pair++)
        m->pairs[pair] = first[m->chosen[pair]]++;
    for (int64_t expert = count; expert > 0; expert--)
        first[expert] = first[expert - 1];
    first[0] = 0;
    for (int64_t pair = 0; pair < tokens * top_k; pair++)
        m->tokens[m->pairs[pair]] = pair / top_k;
}

static void
gather(const void *arguments, int64_t first, int64_t stop)
{
    const mixture_t *m = arguments;
    for (int64_t row = first; row < stop; row++)
        memcpy(m->rows + row * m->hidden, m->input + m->tokens[row] * m->hidden, m->hidden * sizeof *m->rows);
}

static void
add_up(const void *arguments, int64_t first, int64_t stop)
{
    const mixture_t *m = arguments;
    const int64_t top_k = m->experts->top_k;
    for (int64_t token = first; token < stop; token++)
        for (int64_t at = 0; at < m->hidden; at += LANES) {
            vec sum = vec_zero();
            for (int64_t pair = token * top_k; pair < (token + 1) * top_k; pair++)
                sum = vec_fmadd(load_floats(m->added + m->pairs[pair] * m->hidden + at, m->hidden - at),
                                vec_all(m->weights[pair]), sum);
            store_lanes(m->output + token * m->hidden + at, m->hidden - at, sum);
        }
}

/* The experts, each on its rows: gates and up projections in one job, then the down projections in another. */
static int32_t
compute_experts(const step_t *s, const layer_t *l, const mixture_t *m, const int64_t *first, element *gated,
                linear_t *layers, const threads_t *threads)
{
    const experts_t *e = l->experts;
    const int32_t is_bfloat16 = sizeof(element) == 2;
    int64_t used = 0;
    for (int64_t expert = 0; expert < e->count; expert++) {
        const int64_t row = first[expert], count = first[expert + 1] - row;
        if (!count)
            continue;
        const element *input = s->tokens > 1 ? m->rows + row * s->hidden : m->input; /* each has the only row */
        element *inner = gated + row * e->gates[expert]->columns;
        linear_t *pair = layers + 2 * used++;
        pair[0] = (linear_t){input, count, e->gates[expert], NULL, inner, l->activation, 0, is_bfloat16};
        pair[1] = (linear_t){input, count, e->ups[expert], inner, inner, l->product, 0, is_bfloat16};
        pair[1].follows = have_one_kernel(pair);
    }
    if (apply_all(s, layers, 2 * used, threads))
        return -1;
    used = 0;
    for (int64_t expert = 0; expert < e->count; expert++) {
        const int64_t row = first[expert], count = first[expert + 1] - row;
        if (count)
            layers[used++] = (linear_t){gated + row * e->gates[expert]->columns, count, e->downs[expert], NULL,
                                        m->added + row * s->hidden, NOTHING, 1, is_bfloat16};
    }
    return apply_all(s, layers, used, threads);
}

/* The next `size` bytes of `memory`, which begin a line. */
static inline void *
take(char **memory, int64_t size)
{
    void *part = *memory;
    *memory += (size + 63) / 64 * 64;
    return part;
}

int32_t
mix_experts(const step_t *s, const layer_t *l, const element *input, element *output, const threads_t *threads)
{
    const experts_t *e = l->experts;
    const int64_t tokens = s->tokens, hidden = s->hidden, pairs = tokens * e->top_k, inner = e->gates[0]->columns;
    const int64_t row_bytes = hidden * (int64_t)(sizeof(element) + sizeof(float)) + inner * (int64_t)sizeof(element);
    const int64_t size = tokens * e->count * (int64_t)sizeof(float) + pairs * (row_bytes + 24) +
                         (e->count + 1) * (int64_t)sizeof(int64_t) + 2 * e->count * (int64_t)sizeof(linear_t) + 10 * 64;
    char *memory = allocate(size), *next = memory;
    if (!memory)
        return -1;
    mixture_t m = {.experts = e, .input = input, .output = output, .hidden = hidden};
    m.numbers = take(&next, tokens * e->count * sizeof(float));
    m.chosen = take(&next, pairs * sizeof(int32_t));
    m.weights = take(&next, pairs * sizeof(float));
    m.pairs = take(&next, pairs * sizeof(int64_t));
    m.tokens = take(&next, pairs * sizeof(int64_t));
    m.rows = take(&next, pairs * hidden * sizeof(element));
    m.added = take(&next, pairs * hidden * sizeof(float));
    element *gated = take(&next, pairs * inner * sizeof(element));
    int64_t *first = take(&next, (e->count + 1) * sizeof *first);
    linear_t *layers = take(&next, 2 * e->count * sizeof *layers);
    const linear_t router = {input, tokens, e->router, NULL, m.numbers, NOTHING, 1, sizeof(element) == 2};
    int32_t failed = apply(s, &router, threads);
    if (!failed) {
        parallel_for(threads, tokens, tokens > ONE_THREAD ? GRAIN : ONE_THREAD, choose, &m);
        sort_pairs(&m, tokens, first);
        if (tokens > 1)
            parallel_for(threads, pairs, pairs > ONE_THREAD ? GRAIN : ONE_THREAD, gather, &m);
        failed = compute_experts(s, l, &m, first, gated, layers, threads);
    }
    if (!failed)
        parallel_for(threads, tokens, tokens > ONE_THREAD ? GRAIN : ONE_THREAD, add_up, &m);
    free(memory);
    return failed;
}
