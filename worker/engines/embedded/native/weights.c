/* Sampling: maxima of blocks, weights of tokens as integers, and the shortest prefixes of a mass (top-p).
 *
 * A token's weight is exp(logit - highest) in float64, rounded to a multiple of 2 ** -bits, its unit, by adding
 * `offset`, see `adapters/sampling/weights.py`. The exponential is made of single multiplications and
 * additions in one order, none of them fused, and sums are sums of integers: all paths have the same bits, on every
 * processor. Everything belongs to the kernels in float32.
 */
#ifdef FLOAT32
#include "weights.h"

/* Vectors of doubles as wide as the processor's: the compiler splits wider ones into single numbers. */
#if defined(__AVX512F__)
enum { WIDTH = 8 };
#elif defined(__AVX2__)
enum { WIDTH = 4 };
#else
enum { WIDTH = 2 };
#endif

typedef double doubles __attribute__((vector_size(8 * WIDTH)));
typedef uint64_t units __attribute__((vector_size(8 * WIDTH)));
typedef float floats __attribute__((vector_size(4 * WIDTH)));

enum {
    VECTORS = 4, /* whose exponentials are computed in turns: each step waits for the one before */
    NUMBERS = VECTORS * WIDTH,
    BLOCK = 64, /* tokens: `BLOCK` in adapters/sampling/candidates.py */
    FEW_LOGITS = 1 << 22, /* that one thread searches: 0.7 ms */

    SAMPLE = 3000, /* tokens of a row's sample, approximately */
    PIECE = 16,    /* neighbours that are sampled together: a line of the cache */
    BUCKETS = 1024,

    DIGIT = 11, /* bits by which a prefix's end is found */
    DIGITS = 1 << DIGIT,
};

#define EACH _Pragma("GCC unroll 4") for (int i = 0; i < VECTORS; i++)
#define ERRORS 3.5        /* standard errors by which the end of a prefix may be higher than the sample says */
#define SMALLEST -708.0   /* exp of what is lower would be subnormal */
#define TO_WHOLE 0x1.8p52 /* added to a double, it leaves the nearest whole number in the low bits */

/* exp(x) of NUMBERS numbers, none above 709, to one unit in the last place; 1 for 0, and 0 below SMALLEST and for NaN.
 *
 * exp(x) = 2 ** k * exp(r) with the whole number k nearest to x / ln 2 and r = x - k * ln 2, which is high - low.
 * exp(r) = 1 + r + r ** 2 * (1/2 + r * p(r)) with the polynomial p of degree 8 whose result is off by at most 6e-18 of
 * it for |r| <= ln(2) / 2 (minimax, by Remez's algorithm).
 */
INLINED void
exponential(doubles x[VECTORS])
{
    doubles shifted[VECTORS], high[VECTORS], low[VECTORS], r[VECTORS], square[VECTORS];
    doubles even[VECTORS], odd[VECTORS];
    EACH shifted[i] = x[i] * 0x1.71547652b82fep+0 + TO_WHOLE;
    EACH high[i] = x[i] - (shifted[i] - TO_WHOLE) * 0x1.62e42feep-1; /* exact: k has 10 bits, the factor 32 */
    EACH low[i] = (shifted[i] - TO_WHOLE) * 0x1.a39ef35793c76p-33;
    EACH r[i] = high[i] - low[i];
    EACH square[i] = r[i] * r[i];
    EACH even[i] = square[i] * 0x1.ad1fda447c0ffp-26 + 0x1.71df55b256e22p-19;
    EACH odd[i] = square[i] * 0x1.289fb14c72d07p-22 + 0x1.a019ab0993fbcp-16;
    EACH even[i] = even[i] * square[i] + 0x1.a01a011bd30b9p-13;
    EACH odd[i] = odd[i] * square[i] + 0x1.6c16c17ccd801p-10;
    EACH even[i] = even[i] * square[i] + 0x1.11111111289abp-7;
    EACH odd[i] = odd[i] * square[i] + 0x1.55555555531eap-5;
    EACH even[i] = even[i] * square[i] + 0x1.5555555555501p-3;
    EACH even[i] = even[i] + r[i] * odd[i];
    EACH even[i] = square[i] * (0.5 + r[i] * even[i]) - low[i];
    EACH even[i] = 1.0 + (high[i] + even[i]);
    /* k is added to the exponent; its bits are garbage where x is too low, or NaN */
    EACH x[i] = (doubles)(((units)even[i] + ((units)shifted[i] << 52)) & (units)(x[i] >= SMALLEST));
}

/* exp of `count` numbers in place, see above. */
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

/* The logits of at least `bound`, and their rising ids, both [width]; returns their number. */
static int64_t
take_reaching(const float *logits, int64_t width, float bound, int64_t *ids, float *keys)
{
    int64_t count = 0;
    for (int64_t at = 0; at < width; at += BLOCK) {
        uint64_t mask = 0;
        for (int64_t i = at; i < at + BLOCK && i < width; i += LANES)
            mask |= (uint64_t)vec_at_least(load_lanes(logits + i, width - i), bound) << (i - at);
        if (width - at < BLOCK)
            mask &= (UINT64_C(1) << (width - at)) - 1;
        for (; mask; mask &= mask - 1) {
            const int64_t id = at + __builtin_ctzll(mask);
            ids[count] = id;
            keys[count++] = logits[id];
        }
    }
    return count;
}

/* A logit that is likely below the last one of the prefix that leaves out the mass `left_out`: by a sample of the row.
 * `keys` and `weights` [width] are overwritten.
 */
static float
likely_bound(const weighing_t *w, const float *logits, int64_t width, int64_t left_out, float *keys, int64_t *weights)
{
    const int64_t stride = width / SAMPLE;
    if (!stride)
        return -INFINITY;
    int64_t count = 0;
    for (int64_t at = 0; at + PIECE <= width; at += stride * PIECE, count += PIECE)
        memcpy(keys + count, logits + at, PIECE * sizeof *keys);
    weigh(w, keys, count, NULL, weights);
    double masses[BUCKETS] = {0}, squares[BUCKETS] = {0}; /* rising */
    for (int64_t i = 0; i < count; i++) {
        const double weight = (double)weights[i];
        uint64_t bits;
        memcpy(&bits, &weight, sizeof bits);
        weights[i] = weight > 0.0 ? (int64_t)(bits >> 48) - 1023 * 16 + 1 : 0; /* 16 buckets for each power of 2 */
        masses[weights[i]] += weight;
        squares[weights[i]] += weight * weight;
    }
    const double wanted = (double)left_out / (double)stride;
    double mass = 0.0, square = 0.0;
    for (int64_t i = 0; i < BUCKETS && mass < wanted; i++) {
        mass += masses[i];
        square += squares[i];
    }
    const double least = wanted - ERRORS * sqrt(square);
    if (least <= 0.0)
        return -INFINITY;
    int64_t first = 0;
    for (mass = masses[0]; mass < least && first < BUCKETS - 1;)
        mass += masses[++first];
    float bound = INFINITY;
    for (int64_t i = 0; i < count; i++)
        if (weights[i] >= first && keys[i] < bound)
            bound = keys[i];
    return bound;
}

/* Rises with the logit. */
INLINED uint32_t
order_of(float logit)
{
    const float key = logit + 0.0f; /* turns -0.0 into 0.0 */
    uint32_t bits;
    memcpy(&bits, &key, sizeof bits);
    return bits ^ ((bits >> 31) * 0x7fffffff | 0x80000000u);
}

typedef struct {
    double lowest, scale;
} range_t;

/* The bucket of a logit, which rises with it: 0 for the lowest and what is below. */
INLINED int64_t
bucket_of(range_t range, float logit)
{
    const double place = ((double)logit - range.lowest) * range.scale;
    return place > 0.0 ? (int64_t)place : 0;
}

/* The highest index of `masses` from which on they sum to at least `missing`, which is reduced by those after it. */
static int64_t
find_from_end(const int64_t *masses, int64_t count, int64_t *missing)
{
    int64_t index = count - 1;
    for (; index > 0 && masses[index] < *missing; index--)
        *missing -= masses[index];
    return index;
}

/* The order of the last key of the shortest prefix of `count` keys that has the mass `missing`, which is reduced by
 * those of higher keys: digit by digit from the highest.
 */
static uint32_t
last_order(const float *keys, const int64_t *masses, int64_t count, int64_t *missing)
{
    uint32_t last = 0, known = 0;
    for (int shift = 32 - DIGIT; known != UINT32_MAX; shift = shift > DIGIT ? shift - DIGIT : 0) {
        int64_t of_digits[DIGITS] = {0};
        for (int64_t i = 0; i < count; i++) {
            const uint32_t order = order_of(keys[i]);
            if ((order & known) == last)
                of_digits[order >> shift & (DIGITS - 1)] += masses[i];
        }
        last |= (uint32_t)find_from_end(of_digits, DIGITS, missing) << shift;
        known |= (uint32_t)(DIGITS - 1) << shift;
    }
    return last;
}

/* The lowest of `count` keys that has a weight; infinite if none has. */
static float
lowest_weighed(const float *keys, const int64_t *weights, int64_t count)
{
    float lowest = INFINITY;
    for (int64_t i = 0; i < count; i++)
        lowest = (weights[i] > 0) & (keys[i] < lowest) ? keys[i] : lowest;
    return lowest;
}

/* Keeps, of `count` tokens, those of the shortest prefix of mass `target` that have a weight; returns their number.
 * Keys that have one lie from `lowest` to `highest`. There is room for the keys and weights of twice as many.
 */
static int64_t
keep_prefix(int64_t count, int64_t target, double lowest, double highest, int64_t *ids, float *keys, int64_t *weights)
{
    const range_t range = {lowest, highest > lowest ? (BUCKETS - 1) / (highest - lowest) : 0.0};
    int64_t masses[BUCKETS] = {0}, missing = target;
    for (int64_t i = 0; i < count; i++)
        masses[bucket_of(range, keys[i])] += weights[i];
    const int64_t end = find_from_end(masses, BUCKETS, &missing);
    float *const near = keys + count;
    int64_t *const of_near = weights + count;
    int64_t number = 0;
    for (int64_t i = 0; i < count; i++) {
        near[number] = keys[i];
        of_near[number] = weights[i];
        number += bucket_of(range, keys[i]) == end;
    }
    const uint32_t last = last_order(near, of_near, number, &missing);
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) { /* without branches, which would be mispredicted */
        const uint32_t order = order_of(keys[i]);
        const int64_t weight = weights[i], is_last = order == last;
        ids[kept] = ids[i];
        weights[kept] = weight;
        kept += ((order > last) | (is_last & (missing > 0))) & (weight > 0);
        missing -= weight & -is_last;
    }
    return kept;
}

int64_t
take_prefix(const weighing_t *w, const float *logits, int64_t width, int64_t total, int64_t target, int64_t *ids,
            float *keys, int64_t *weights)
{
    if (target < 1 || target > total)
        return -1;
    float bound = likely_bound(w, logits, width, total - target, keys, weights);
    int64_t count = take_reaching(logits, width, bound, ids, keys);
    int64_t mass = weigh(w, keys, count, NULL, weights);
    if (mass < target && bound > -INFINITY) {
        bound = -INFINITY;
        count = take_reaching(logits, width, bound, ids, keys);
        mass = weigh(w, keys, count, NULL, weights);
    }
    if (mass < target)
        return -1;
    if (bound == -INFINITY)
        bound = lowest_weighed(keys, weights, count);
    return keep_prefix(count, target, bound, w->highest, ids, keys, weights);
}

#endif
