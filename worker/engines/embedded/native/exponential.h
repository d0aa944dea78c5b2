/* Exponentials of vectors of doubles, which have the same bits in all paths and on every processor: they are made of single
 * multiplications and additions in one order, none of them fused.
 */
#ifndef EXPONENTIAL_H
#define EXPONENTIAL_H

#include <stdint.h>

#include "vector.h"

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
};

#define EACH _Pragma("GCC unroll 4") for (int i = 0; i < VECTORS; i++)
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

#endif
