/* Float16, to nearest with ties to even, on processors with and without instructions for it. */
#ifndef HALF_H
#define HALF_H

#include "vector.h"

static inline uint16_t
half_of(float x)
{
    const float size = fabsf(x);
    uint32_t sign, bits;
    memcpy(&sign, &x, sizeof sign);
    sign = sign >> 16 & 0x8000;
    if (size != size)
        return (uint16_t)(sign | 0x7e00);
    if (size >= 65520.0f)
        return (uint16_t)(sign | 0x7c00);
    if (size < 0x1p-14f) { /* a multiple of 2 ** -24, the unit of float32 in [0.5, 1] */
        const float shifted = size + 0.5f;
        memcpy(&bits, &shifted, sizeof bits);
        return (uint16_t)(sign | (bits - 0x3f000000));
    }
    memcpy(&bits, &size, sizeof bits);
    bits += 0x0fff + (bits >> 13 & 1);
    return (uint16_t)(sign | (bits - (UINT32_C(112) << 23)) >> 13);
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
