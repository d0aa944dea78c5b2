/* The shortest prefixes of a mass (top-p), by weights that are integers: see `weights.c`. */
#ifdef FLOAT32
#include "weights.h"

enum {
    SAMPLE = 3000, /* tokens of a row's sample, approximately */
    PIECE = 16,    /* neighbours that are sampled together: a line of the cache */
    BUCKETS = 1024,

    DIGIT = 11, /* bits by which a prefix's end is found */
    DIGITS = 1 << DIGIT,
};

#define ERRORS 3.5 /* standard errors by which the end of a prefix may be higher than the sample says */

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

/* Digit by digit from the highest. */
uint32_t
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
        lowest = ((weights[i] > 0) & (keys[i] < lowest)) ? keys[i] : lowest;
    return lowest;
}

int64_t
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
