/* Float16, to nearest with ties to even, on processors with and without instructions for it. */
#ifndef HALF_H
#define HALF_H

#include "vector.h"

/* Without branches, so that compilers make vectors of it. */
static inline uint16_t
half_of(float x)
{
    const float size = fabsf(x), shifted = size + 0.5f;
    uint32_t sign, bits, small;
    memcpy(&sign, &x, sizeof sign);
    memcpy(&bits, &size, sizeof bits);
    memcpy(&small, &shifted, sizeof small);
    const uint32_t normal = (bits + 0x0fff + (bits >> 13 & 1) - (UINT32_C(112) << 23)) >> 13;
    /* a small one is a multiple of 2 ** -24, the unit of float32 in [0.5, 1] */
    const uint32_t rounded = size < 0x1p-14f ? small - 0x3f000000 : normal;
    const uint32_t half = size < 65520.0f ? rounded : size != size ? 0x7e00 : 0x7c00;
    return (uint16_t)((sign >> 16 & 0x8000) | half);
}

static inline float
float_of_half(uint16_t half)
{
    const int exponent = half >> 10 & 31, mantissa = half & 0x3ff;
    const float size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                       : exponent     ? ldexpf((float)(mantissa + 0x400), exponent - 25)
                                      : (float)mantissa * 0x1p-24f;
    return half & 0x8000 ? -size : size;
}

#endif
