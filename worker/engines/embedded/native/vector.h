/* Vectors of 16 float32, in the instructions that this file is compiled for: AVX-512, AVX2, NEON, or what the compiler
 * makes of plain C (with PLAIN_C defined, whatever they are). All kernels are written in these, so that every sum has one
 * order, whatever the processor: the paths have the same bits, but where a bfloat16 product or sum is subnormal, which
 * AVX512-BF16 takes for 0.
 *
 * The files are compiled once for each path and type of element: bfloat16, or float32 with FLOAT32 defined. Elements
 * are read by the word of 32 bits, which is a pair of bfloat16 or one float32. `count` is of the lanes that are loaded
 * or stored, from 1; all 16 if there are more.
 */
#ifndef VECTOR_H
#define VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef FLOAT32
typedef float element;
enum { PER_WORD = 1 };
#else
typedef uint16_t element; /* the upper half of a float32 */
enum { PER_WORD = 2 };
#endif

enum {
    COLUMNS = 32, /* of a panel */
    LANES = 16,   /* float32 of a vector */
};

#define LOG2_E 1.44269504f
#define ALIGNED __attribute__((aligned(64)))
#define INLINED static inline __attribute__((always_inline))

/* Twice the numbers of e2m1, MXFP4's codes, by their bits: whole ones. */
#define E2M1_TWICE 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12

static inline int64_t
smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Fetches a line that is read some microseconds later: processors prefetch by themselves, but not across computations. */
INLINED void
fetch_to_l2(const void *line)
{
    __builtin_prefetch(line, 0, 2);
}

/* Four signed bytes, the first one lowest. */
INLINED int32_t
word_at(const int8_t *codes)
{
    int32_t word;
    memcpy(&word, codes, sizeof word);
    return word;
}

#if defined(PLAIN_C)
#include "vector_generic.h"
#elif defined(__AVX512F__)
#include "vector_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "vector_avx2.h"
#elif defined(__aarch64__) && defined(__ARM_NEON)
#include "vector_neon.h"
#else
#include "vector_generic.h"
#endif

#ifdef FLOAT32

/* x, rounded to an element, as operands of a GEMM. */
INLINED void
store_operands(operand *to, vec x)
{
    vec_store(to, x);
}

#else

INLINED vec
load_lanes(const element *from, int64_t count)
{
    return load_bfloat16(from, count);
}

INLINED void
store_lanes(element *to, int64_t count, vec x)
{
    store_bfloat16(to, count, x);
}

#endif

#ifdef NIBBLES_ARE_BYTES /* their products are added as those of bytes, which have signs, in 32 bits */

/* Signed bytes, as `add_bytes` reads them. */
INLINED words_t
split_bytes(int has_dot, words_t w)
{
    (void)has_dot;
    return w;
}

/* Adds products of the result of `split_nibbles` and of codes; `nibble_sums` reads the sums of up to 32 of them. */
INLINED ints
add_nibbles(int has_dot, ints sum, words_t nibbles, const int8_t *codes)
{
    return add_bytes(has_dot, sum, nibbles, codes);
}

INLINED ints
nibble_sums(int has_dot, ints sum)
{
    (void)has_dot;
    return sum;
}

#endif

#ifndef CAN_HAVE_DOT /* an instruction for sums of four products of bytes, the first ones without a sign, or DOT_IS_SIGNED */
INLINED int processor_has_dot(void) { return 0; }
#endif

/* Number that is added to a signed byte of a weight before it is multiplied. */
INLINED int32_t
byte_excess(int has_dot)
{
#ifdef DOT_IS_SIGNED
    (void)has_dot;
    return 0;
#else
    return has_dot ? 128 : 0;
#endif
}

/* `count` elements as operands of a GEMM. */
INLINED void
copy_operands(const element *from, int64_t count, operand *to)
{
    if (sizeof *from == sizeof *to) {
        memcpy(to, from, count * sizeof *to);
        return;
    }
    for (int64_t at = 0; at + LANES <= count; at += LANES)
        vec_store((float *)to + at, load_lanes(from + at, LANES));
    for (int64_t at = count / LANES * LANES; at < count; at++)
        ((float *)to)[at] = vec_first(load_lanes(from + at, 1));
}

/* 2 ** x, to about one unit in the last place; 0 below the smallest normal number, NaN for NaN. Of infinity it is infinite on
 * some paths alone: who may have it gives a smaller number.
 */
INLINED vec
vec_exp2(vec x)
{
    const vec whole = vec_round(x), part = vec_sub(x, whole);
    /* the series of exp(part * ln 2), whose next term is below 2 ** -23 for |part| <= 1/2 */
    vec power = vec_all(1.54035304e-4f);
    power = vec_fmadd(power, part, vec_all(1.33335581e-3f));
    power = vec_fmadd(power, part, vec_all(9.61812911e-3f));
    power = vec_fmadd(power, part, vec_all(5.55041087e-2f));
    power = vec_fmadd(power, part, vec_all(2.40226507e-1f));
    power = vec_fmadd(power, part, vec_all(6.93147181e-1f));
    power = vec_fmadd(power, part, vec_all(1.0f));
    return vec_zero_where_below(x, -126.0f, vec_scale(power, whole));
}

/* cap * tanh(x / cap), with tanh(x) = 1 - 2 / (exp(2 x) + 1). */
INLINED vec
vec_soft_cap(vec x, float cap)
{
    const vec one = vec_all(1.0f), exponent = vec_min(vec_all(200.0f), vec_mul(x, vec_all(2 * LOG2_E / cap)));
    const vec power = vec_exp2(exponent); /* NaN stays */
    return vec_mul(vec_sub(one, vec_div(vec_all(2.0f), vec_add(power, one))), vec_all(cap));
}

#endif
