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

/* A scale above 0 that numbers are divided by; and its inverse, or 0 where a division is faster, or remainders would be
 * subnormal.
 */
typedef struct {
    float scale, inverse;
} divisor_t;

static inline divisor_t
divisor_of(float scale)
{
#ifdef PLAIN_C
    return (divisor_t){scale, 0.0f};
#else
    const float lowest = 0x1p-100f;
    return (divisor_t){scale, scale >= lowest ? 1.0f / scale : 0.0f};
#endif
}

/* The codes of 16 numbers: quotients, rounded to float32, then to whole numbers. A product with the inverse is off by up to 1.5
 * units in the last place; the first correction leaves less than one, with which the second one has the bits of a division
 * (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990).
 */
INLINED vec
codes_of(vec numbers, divisor_t d)
{
    if (d.inverse == 0)
        return vec_round(vec_div(numbers, vec_all(d.scale)));
    vec quotient = vec_mul(numbers, vec_all(d.inverse));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        const vec remainder = vec_fmadd(quotient, vec_all(-d.scale), numbers);
        quotient = vec_fmadd(remainder, vec_all(d.inverse), quotient);
    }
    return vec_round(quotient);
}

#endif
