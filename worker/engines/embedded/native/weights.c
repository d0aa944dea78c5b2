/* Sampling: maxima of blocks, and weights of tokens as integers.
 *
 * A token's weight is exp(logit - highest) in float64, rounded to a multiple of 2 ** -bits, its unit, by adding
 * `offset`, see `adapters/sampling/weights.py`. Sums are sums of integers: all paths have the same bits, on every
 * processor. Everything belongs to the kernels in float32.
 */
#ifdef FLOAT32
#include "exponential.h"
#include "weights.h"

enum { FEW_LOGITS = 1 << 22 }; /* that one thread searches: 0.7 ms */

void
exponentials(double *values, int64_t count)
{
    for (int64_t at = 0; at < count; at += NUMBERS) {
        doubles x[VECTORS] = {{0}};
        const size_t size = smaller(count - at, NUMBERS) * sizeof *values;
        memcpy(x, values + at, size);
        exponential(x);
        memcpy(values + at, x, size);
    }
}

/* A specialization of weighing, which the compiler knows. */
typedef struct {
    int is_masked, is_kept;
} how_t;

/* The weights of BLOCK logits; returns their sum. */
INLINED uint64_t
weigh_block(how_t how, const weighing_t *w, const float *logits, uint64_t *weights)
{
    const doubles offset = (doubles){0} + w->offset;
    units sum = {0};
    for (int64_t at = 0; at < BLOCK; at += NUMBERS) {
        doubles x[VECTORS];
        units kept[VECTORS];
        EACH
        {
            floats each;
            memcpy(&each, logits + at + i * WIDTH, sizeof each);
            const doubles logit = __builtin_convertvector(each, doubles);
            x[i] = logit - w->highest;
            if (how.is_masked)
                kept[i] = (units)(logit >= (double)w->lowest);
        }
        exponential(x);
        EACH
        {
            units weight = (units)(x[i] + offset) - (units)offset;
            if (how.is_masked)
                weight &= kept[i];
            if (how.is_kept)
                memcpy(weights + at + i * WIDTH, &weight, sizeof weight);
            sum += weight;
        }
    }
    uint64_t total = 0;
    for (int i = 0; i < WIDTH; i++)
        total += sum[i];
    return total;
}

int64_t
weigh(const weighing_t *w, const float *logits, int64_t width, int64_t *sums, int64_t *weights)
{
    const int is_masked = w->lowest > -INFINITY;
    uint64_t total = 0;
    for (int64_t at = 0; at < width; at += BLOCK) {
        const int64_t count = smaller(width - at, BLOCK);
        const float *block = logits + at;
        float padded[BLOCK];
        uint64_t found[BLOCK] ALIGNED;
        if (count < BLOCK) {
            for (int64_t i = 0; i < BLOCK; i++)
                padded[i] = i < count ? block[i] : -INFINITY;
            block = padded;
        }
        uint64_t sum;
        if (weights || is_masked)
            sum = weigh_block((how_t){1, 1}, w, block, found);
        else
            sum = weigh_block((how_t){0, 0}, w, block, NULL);
        if (sums)
            sums[at / BLOCK] = (int64_t)sum;
        if (weights)
            memcpy(weights + at, found, count * sizeof *weights);
        total += sum;
    }
    return (int64_t)total;
}

/* The maximum of BLOCK logits; NaN if one of them is. */
INLINED float
block_maximum(const float *logits)
{
    uint32_t numbers = UINT32_MAX;
    vec highest = vec_all(-INFINITY);
    for (int64_t at = 0; at < BLOCK; at += LANES) {
        const vec each = load_lanes(logits + at, LANES);
        numbers &= vec_at_least(each, -INFINITY);
        highest = vec_max(highest, each);
    }
    return numbers == (1u << LANES) - 1 ? vec_highest(highest) : NAN;
}

/* The maximum of up to BLOCK logits, at least one. */
INLINED float
maximum_of(const float *logits, int64_t count)
{
    if (count >= BLOCK)
        return block_maximum(logits);
    float padded[BLOCK];
    for (int64_t i = 0; i < BLOCK; i++)
        padded[i] = logits[smaller(i, count - 1)];
    return block_maximum(padded);
}

/* Rows of logits, and what is found in them: maxima, or highest ones and their ids. */
typedef struct {
    const float *logits;
    int64_t stride, width;
    float *maxima, *values;
    int64_t *ids;
} search_t;

/* Rows of few logits are read in less time than it takes to wake a thread for some. */
static void
search_rows(const search_t *s, int64_t rows, compute_t *search, const threads_t *threads)
{
    parallel_for(threads, rows, rows * s->width > FEW_LOGITS ? 1 : rows, search, s);
}

static void
find_maxima(const void *arguments, int64_t first, int64_t stop)
{
    const search_t *s = arguments;
    float *maxima = s->maxima + first * ((s->width + BLOCK - 1) / BLOCK);
    for (int64_t row = first; row < stop; row++)
        for (int64_t at = 0; at < s->width; at += BLOCK)
            *maxima++ = maximum_of(s->logits + row * s->stride + at, s->width - at);
}

void
block_maxima(const float *logits, int64_t rows, int64_t stride, int64_t width, float *maxima, const threads_t *threads)
{
    const search_t search = {.logits = logits, .stride = stride, .width = width, .maxima = maxima};
    search_rows(&search, rows, find_maxima, threads);
}

/* The highest of `width` logits, NaN if one of them is, and the first index that has it. */
static float
find_highest(const float *logits, int64_t width, int64_t *index)
{
    float highest = -INFINITY;
    *index = 0;
    int64_t first = 0; /* of the block that has it */
    for (int64_t at = 0; at < width; at += BLOCK) {
        const float maximum = maximum_of(logits + at, width - at);
        if (maximum != maximum)
            return maximum;
        if (maximum > highest)
            highest = maximum, first = at;
    }
    for (*index = first; logits[*index] != highest;)
        ++*index;
    return highest;
}

static void
find_ids(const void *arguments, int64_t first, int64_t stop)
{
    const search_t *s = arguments;
    for (int64_t row = first; row < stop; row++)
        s->values[row] = find_highest(s->logits + row * s->stride, s->width, s->ids + row);
}

void
highest_ids(const float *logits, int64_t rows, int64_t stride, int64_t width, int64_t *ids, float *values,
            const threads_t *threads)
{
    const search_t search = {.logits = logits, .stride = stride, .width = width, .values = values, .ids = ids};
    search_rows(&search, rows, find_ids, threads);
}

#endif
