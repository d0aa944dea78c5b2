/* Sampling: a token of each row of logits, by temperature, min-p, top-k, top-p and a random number.
 *
 * The rules, and so the tokens, are those of `worker/engines/embedded/sampling/truncation.py`: divided logits, min-p's bound and
 * top-k's, the weight of what is left, the shortest prefix that has top-p's share of it, and of that the token that the number
 * falls on, by rising ids. Weights are integers (`weights.c`), so that it does not matter which of a row's tokens are looked at.
 * A log probability is log(weight) - log(sum of the weights that are left), in float64.
 */
#ifdef FLOAT32
#include <float.h>

#include "highest.h"
#include "weights.h"

enum {
    FEW_LOGITS = 1 << 16, /* whose tokens one thread draws in less time than it takes to wake another */
    LIKELY = 128,         /* of the highest tokens, among which a prefix mostly ends */
};

/* A row that a token is drawn of, and memory for it. */
typedef struct {
    const float *logits;
    int64_t width, blocks;
    float divisor, *divided; /* [width] */
    int64_t *ids, *weights;  /* [width], [2 * width] */
    float *keys, *maxima;    /* [2 * width], [blocks] */
    int64_t *sums;           /* [blocks] */
} row_t;

/* What a token was drawn of: the row's `weights`, which are of `ids`, or, where that is NULL, of all. */
typedef struct {
    const int64_t *ids;
    int64_t count, index; /* of weights, and of the token among them */
} drawn_t;

static int64_t
blocks_of(int64_t width)
{
    return (width + BLOCK - 1) / BLOCK;
}

int64_t
drawing_memory(int64_t width)
{
    return 40 * width + 16 * blocks_of(width); /* a multiple of 8 */
}

static row_t
row_of(const drawing_t *d, int64_t row, int64_t thread)
{
    const int64_t width = d->width, blocks = blocks_of(width);
    row_t r = {.logits = d->logits + row * d->stride, .width = width, .blocks = blocks, .divisor = d->divisors[row]};
    r.weights = (int64_t *)(d->memory + thread * drawing_memory(width));
    r.ids = r.weights + 2 * width;
    r.sums = r.ids + width;
    r.keys = (float *)(r.sums + blocks);
    r.divided = r.keys + 2 * width;
    r.maxima = r.divided + width;
    return r;
}

static float
highest_of(const row_t *r)
{
    float highest = -INFINITY;
    for (int64_t block = 0; block < r->blocks; block++) {
        if (r->maxima[block] != r->maxima[block])
            return NAN;
        highest = r->maxima[block] > highest ? r->maxima[block] : highest;
    }
    return highest;
}

/* Ids and keys of the tokens whose divided logits are at least `bound`; returns their number. */
static int64_t
take_divided(const row_t *r, float divisor, float bound)
{
    int64_t count = 0;
    for (int64_t block = 0; block < r->blocks; block++) {
        if (r->maxima[block] / divisor < bound)
            continue;
        for (int64_t id = block * BLOCK; id < smaller((block + 1) * BLOCK, r->width); id++) {
            const float divided = r->logits[id] / divisor;
            r->ids[count] = id;
            r->keys[count] = divided;
            count += divided >= bound;
        }
    }
    return count;
}

/* The k-th highest of `count` keys. */
static float
kth_highest(const row_t *r, const float *keys, int64_t count, int64_t k)
{
    for (int64_t i = 0; i < count; i++)
        r->weights[i] = 1;
    const uint32_t order = last_order(keys, r->weights, count, &k);
    const uint32_t bits = order >> 31 ? order ^ 0x80000000u : ~order; /* see `order_of` */
    float key;
    memcpy(&key, &bits, sizeof key);
    return key;
}

/* A logit that at least the k highest ones reach: the k-th highest of the blocks' maxima. */
static float
reached_by(const row_t *r, int64_t k)
{
    return k <= r->blocks ? kth_highest(r, r->maxima, r->blocks, k) : -INFINITY;
}

/* The k-th highest logit, divided: -inf where fewer are finite. */
static float
divided_kth(const row_t *r, int64_t k)
{
    const float reached = reached_by(r, k);
    const int64_t count = take_divided(r, 1.0f, reached > -FLT_MAX ? reached : -FLT_MAX);
    return k <= count ? kth_highest(r, r->keys, count, k) / r->divisor : -INFINITY;
}

/* The lowest float that is not below a bound. */
static float
rounded_up(double bound)
{
    const float found = (float)bound;
    return (double)found < bound ? nextafterf(found, INFINITY) : found;
}

/* ceil(total * share), from 1 to the total. */
static int64_t
share_of(int64_t total, double share)
{
    const int64_t wanted = share < 1.0 ? smaller((int64_t)ceil((double)total * share), total) : total;
    return wanted > 1 ? wanted : 1;
}

/* The unit of a total that a random number falls on. */
static int64_t
point_in(int64_t total, double uniform)
{
    return smaller((int64_t)((double)total * uniform), total - 1);
}

/* The index of the weight that includes the unit `point` of their sum, which is reduced by those before it. */
static int64_t
find_unit(const int64_t *weights, int64_t *point)
{
    int64_t index = 0;
    for (; *point >= weights[index]; index++)
        *point -= weights[index];
    return index;
}

/* One of `count` tokens. */
static drawn_t
draw_taken(const row_t *r, int64_t count, double uniform)
{
    int64_t mass = 0;
    for (int64_t i = 0; i < count; i++)
        mass += r->weights[i];
    int64_t point = point_in(mass, uniform);
    return (drawn_t){r->ids, count, find_unit(r->weights, &point)};
}

/* Takes and weighs the tokens whose divided logits are at least `bound`; returns their number. */
static int64_t
take_weighed(const row_t *r, const weighing_t *w, float bound, int64_t *mass)
{
    const int64_t count = take_divided(r, r->divisor, bound);
    *mass = weigh(w, r->keys, count, NULL, r->weights);
    return count;
}

/* One of those that min-p or top-k keep, or that are finite. */
static drawn_t
draw_bounded(const row_t *r, const weighing_t *w, double share, double uniform)
{
    int64_t total, count = take_weighed(r, w, w->lowest, &total);
    const int64_t target = share_of(total, share);
    if (target < total)
        count = keep_prefix(count, target, w->lowest, w->highest, r->ids, r->keys, r->weights);
    return draw_taken(r, count, uniform);
}

/* Takes the shortest prefix of all divided logits whose weight is at least `target`; returns the number of its tokens. */
static int64_t
take_likely_prefix(const row_t *r, const weighing_t *w, const float *divided, int64_t total, int64_t target)
{
    const float bound = reached_by(r, LIKELY) / r->divisor;
    if (bound > -INFINITY) {
        int64_t mass;
        const int64_t count = take_weighed(r, w, bound, &mass);
        if (mass >= target)
            return keep_prefix(count, target, bound, w->highest, r->ids, r->keys, r->weights);
    }
    return take_prefix(w, divided, r->width, total, target, r->ids, r->keys, r->weights);
}

/* The divided logits, once they are computed. */
static const float *
all_divided(const row_t *r)
{
    return r->divisor != 1.0f ? r->divided : r->logits;
}

/* One of all, whose weights are not kept. */
static drawn_t
draw_from_all(const row_t *r, const weighing_t *w, double share, double uniform)
{
    const float *divided = all_divided(r), divisor = r->divisor; /* which no store changes: the loop is in vectors */
    if (divisor != 1.0f)
        for (int64_t i = 0; i < r->width; i++)
            r->divided[i] = r->logits[i] / divisor;
    const int64_t total = weigh(w, divided, r->width, r->sums, NULL), target = share_of(total, share);
    if (target < total)
        return draw_taken(r, take_likely_prefix(r, w, divided, total, target), uniform);
    int64_t point = point_in(total, uniform);
    const int64_t first = find_unit(r->sums, &point) * BLOCK;
    weigh(w, divided + first, smaller(r->width - first, BLOCK), NULL, r->weights);
    return (drawn_t){NULL, r->width, first + find_unit(r->weights, &point)};
}

/* Writes the bits of the tokens that have a weight. */
static void
write_kept(const row_t *r, const drawn_t *drawn, uint32_t *words)
{
    memset(words, 0, (r->width + 31) / 32 * sizeof *words);
    for (int64_t i = 0; drawn->ids && i < drawn->count; i++)
        words[drawn->ids[i] / 32] |= (uint32_t)(r->weights[i] > 0) << drawn->ids[i] % 32;
    for (int64_t first = 0; !drawn->ids && first < r->width; first += 32)
        for (int64_t i = first; i < smaller(first + 32, r->width); i++)
            words[first / 32] |= (uint32_t)(r->weights[i] > 0) << (i - first);
}

/* What is wanted of a row, from the weights that are left. */
static void
score_drawn(const drawing_t *d, int64_t row, const row_t *r, const drawn_t *drawn)
{
    const int64_t *weights = r->weights, chosen = weights[drawn->index];
    int64_t total = 0, rank = 1;
    for (int64_t i = 0; i < drawn->count; i++)
        total += weights[i], rank += weights[i] > chosen;
    for (int64_t i = 0; i < drawn->index; i++)
        rank += weights[i] == chosen;
    highest_t top = {d->counts[row], 0, d->top_ids + row * d->most, d->top_logprobs + row * d->most};
    for (int64_t i = 0; top.wanted && i < drawn->count; i++)
        if ((double)weights[i] > bar_of(&top, 0.0))
            add_value(&top, drawn->ids ? drawn->ids[i] : i, (double)weights[i]);
    sort_highest(&top);
    const double log_total = log((double)total);
    for (int64_t i = 0; i < top.found; i++)
        top.values[i] = log(top.values[i]) - log_total;
    d->logprobs[row] = log((double)chosen) - log_total;
    d->ranks[row] = rank;
    d->found[row] = top.found;
    if (d->kept)
        write_kept(r, drawn, d->kept + row * ((r->width + 31) / 32));
}

/* The first of the tokens with the highest divided logit. */
static int64_t
first_highest(const row_t *r, float highest)
{
    int64_t id = 0;
    while (r->maxima[id / BLOCK] / r->divisor != highest)
        id += BLOCK;
    while (r->logits[id] / r->divisor != highest)
        id++;
    return id;
}

/* Whether few blocks have a finite logit, as where a grammar masks the others, which are not looked at. */
static int
is_mostly_masked(const row_t *r)
{
    int64_t count = 0;
    for (int64_t block = 0; block < r->blocks; block++)
        count += r->maxima[block] > -INFINITY;
    return count < r->blocks / 8;
}

static int64_t
draw_token(const drawing_t *d, int64_t row, const row_t *r)
{
    block_maxima(r->logits, 1, d->stride, r->width, r->maxima, &(threads_t){.count = 1});
    d->highest[row] = highest_of(r);
    const float highest = d->highest[row] / r->divisor;
    if (!isfinite(highest))
        return 0;
    const int is_wanted = d->counts && d->counts[row] >= 0;
    if (d->shares[row] == 0.0) {
        r->ids[0] = first_highest(r, highest), r->weights[0] = 1;
        if (is_wanted)
            score_drawn(d, row, r, &(drawn_t){r->ids, 1, 0});
        return r->ids[0];
    }
    weighing_t w = {.highest = highest, .offset = d->offset, .lowest = -INFINITY};
    if (d->log_min_ps[row] > -INFINITY)
        w.lowest = rounded_up((double)highest + d->log_min_ps[row]);
    if (d->top_ks[row] > 0 && d->top_ks[row] < r->width) {
        const float kth = divided_kth(r, d->top_ks[row]);
        w.lowest = kth > w.lowest ? kth : w.lowest;
    }
    if (w.lowest == -INFINITY && is_mostly_masked(r))
        w.lowest = -FLT_MAX;
    const drawn_t drawn = (w.lowest > -INFINITY ? draw_bounded : draw_from_all)(r, &w, d->shares[row], d->uniforms[row]);
    if (is_wanted) {
        if (!drawn.ids)
            weigh(&w, all_divided(r), r->width, NULL, r->weights);
        score_drawn(d, row, r, &drawn);
    }
    return drawn.ids ? drawn.ids[drawn.index] : drawn.index;
}

typedef struct {
    const drawing_t *drawing;
    _Atomic int64_t *next; /* row that no thread has taken */
} draws_t;

/* Takes rows until none is left: a unit of this job is a thread's memory. */
static void
draw_rows(const void *arguments, int64_t thread, int64_t stop)
{
    const draws_t *draws = arguments;
    const drawing_t *d = draws->drawing;
    for (int64_t row; thread < stop && (row = atomic_fetch_add(draws->next, 1)) < d->rows;) {
        const row_t r = row_of(d, row, thread);
        d->ids[row] = draw_token(d, row, &r);
    }
}

void
draw_tokens(const drawing_t *drawing, const threads_t *threads)
{
    _Atomic int64_t next = 0;
    const int64_t useful = drawing->rows * drawing->width > FEW_LOGITS ? drawing->rows : 1;
    parallel_for(threads, smaller(threads->count, useful), 1, draw_rows, &(draws_t){drawing, &next});
}

#endif
