/* Numbers rounded to 8 bits: each code * scale, with codes from -127 to 127. */
#ifndef ROUNDING_H
#define ROUNDING_H

#include <float.h>

#include "vector.h"

/* The scale of some numbers, of which the largest becomes 127 or -127: NaN if one is infinite or not a number, 0 where it
 * would be subnormal; then all codes are 0.
 */
static inline float
scale_of(const float *numbers, int64_t count)
{
    uint32_t highest = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, numbers + i, sizeof bits);
        bits &= 0x7fffffff; /* ordered as the sizes are, and NaN is highest */
        highest = highest > bits ? highest : bits;
    }
    float size;
    memcpy(&size, &highest, sizeof size);
    const float scale = size / 127.0f;
    return highest >= 0x7f800000 ? NAN : scale < FLT_MIN ? 0.0f : scale;
}

/* The codes of 16 numbers, for a scale above 0. */
INLINED vec
codes_of(vec numbers, float scale)
{
    return vec_round(vec_div(numbers, vec_all(scale)));
}

#endif
