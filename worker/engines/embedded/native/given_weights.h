/* Weights that are rounded, as they are given: read as float32, and looked through. */
#ifndef GIVEN_WEIGHTS_H
#define GIVEN_WEIGHTS_H

#include <float.h>

#include "kernels.h"

enum { GIVEN_FLOAT32, GIVEN_BFLOAT16, GIVEN_FLOAT16 };

/* `count` weights from `first` on, a multiple of 16; in `buffer` where they are not float32. The largest magnitude in each
 * lane is kept.
 */
INLINED const float *
given_weights(const blocks_t *b, int64_t first, int64_t count, float *buffer, vec *magnitude)
{
    const float *weights = buffer;
    vec highest = *magnitude;
    if (b->source == GIVEN_FLOAT32) {
        weights = (const float *)b->weights + first;
        for (int64_t at = 0; at < count; at += LANES)
            highest = vec_max_magnitude(highest, vec_load(weights + at));
    } else {
        const uint16_t *halves = (const uint16_t *)b->weights + first;
        for (int64_t at = 0; at < count; at += LANES) {
            const vec x = b->source == GIVEN_BFLOAT16 ? load_bfloat16(halves + at, LANES) : load_halves(halves + at);
            highest = vec_max_magnitude(highest, x);
            vec_store(buffer + at, x);
        }
    }
    *magnitude = highest;
    return weights;
}

/* Adds to what was found in the blocks; by any thread. */
static inline void
add_found(const blocks_t *b, vec magnitude, int is_beyond)
{
    const float highest = vec_highest_magnitude(magnitude);
    int32_t bits, found = __atomic_load_n(&b->found[0], __ATOMIC_RELAXED);
    memcpy(&bits, &highest, sizeof bits);
    while (bits > found &&
           !__atomic_compare_exchange_n(&b->found[0], &found, bits, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        continue;
    if (is_beyond)
        __atomic_store_n(&b->found[1], 1, __ATOMIC_RELAXED);
}

#endif
