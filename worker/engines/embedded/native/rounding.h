/* Numbers rounded to codes of a few bits: each becomes code * scale, with codes up to a highest one. */
#ifndef ROUNDING_H
#define ROUNDING_H

#include <float.h>

#include "vector.h"

/* The largest magnitude of `count` numbers. Behind them are zeros up to a multiple of 16. */
static inline float
magnitude_of(const float *numbers, int64_t count)
{
    vec highest = vec_zero();
    for (int64_t at = 0; at < count; at += LANES)
        highest = vec_max_magnitude(highest, vec_load(numbers + at));
    return vec_highest_magnitude(highest);
}

enum { HIGHEST_BYTE = 127 }; /* highest code of 8 bits */

/* The scale of numbers whose largest magnitude becomes the code `highest`: NaN if that is infinite or not a number, 0 where
 * the scale would be subnormal; then all codes are 0.
 */
static inline float
scale_of(float magnitude, int highest)
{
    const float scale = magnitude / (float)highest;
    return !(magnitude <= FLT_MAX) ? NAN : scale < FLT_MIN ? 0.0f : scale;
}

/* The codes of 16 numbers, for a scale above 0. */
INLINED vec
codes_of(vec numbers, float scale)
{
    return vec_round(vec_div(numbers, vec_all(scale)));
}

#endif
