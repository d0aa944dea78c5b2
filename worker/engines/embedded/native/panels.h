/* The micro-kernel of all GEMMs: a few rows times a panel of 32 columns, with float32 accumulators.
 *
 * These files are compiled once for each type of element: bfloat16, or float32 with FLOAT32 defined. Elements are read
 * by the word of 32 bits, which is a pair of bfloat16 or one float32. A panel holds the weights of 32 columns word by
 * word, [words][32 columns]: one instruction multiplies the same word of 16 columns, and the panel is read from front
 * to back. Each sum runs over the words in order, from the first to the last, whatever number of rows is computed
 * together: the GEMM is batch-invariant.
 */
#ifndef PANELS_H
#define PANELS_H

#include <immintrin.h>
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
    ROWS = 12,    /* of a tile at most: their accumulators fill 24 of the 32 registers */
    LANES = 16,   /* float32 in a register */
};

/* sum + a * b, or the sum and the products of the pairs of a and b. */
static inline __m512
add_products(__m512 sum, __m512i a, __m512i b)
{
#ifdef FLOAT32
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
#else
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#endif
}

/* sums [rows, 32] = rows of `words` words times a panel; added to what `sums` holds if `continues`. */
static inline __attribute__((always_inline)) void
multiply_rows(int rows, const element *row, int64_t row_stride, const element *panel, int64_t words, float *sums,
              int64_t sums_stride, int continues)
{
    __m512 sum[ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++)
            sum[r][half] = continues ? _mm512_loadu_ps(sums + r * sums_stride + half * LANES) : _mm512_setzero_ps();
    for (int64_t word = 0; word < words; word++, panel += COLUMNS * PER_WORD) {
        const __m512i left = _mm512_loadu_si512(panel), right = _mm512_loadu_si512(panel + LANES * PER_WORD);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            int32_t input;
            memcpy(&input, row + r * row_stride + word * PER_WORD, sizeof input);
            sum[r][0] = add_products(sum[r][0], _mm512_set1_epi32(input), left);
            sum[r][1] = add_products(sum[r][1], _mm512_set1_epi32(input), right);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++)
            _mm512_storeu_ps(sums + r * sums_stride + half * LANES, sum[r][half]);
}

/* `multiply_rows` for 1 to ROWS rows, unrolled for each number, so that the accumulators stay in registers. */
static inline void
multiply(int rows, const element *row, int64_t row_stride, const element *panel, int64_t words, float *sums,
         int64_t sums_stride, int continues)
{
#define NUMBER(n)                                                                                                      \
    case n:                                                                                                            \
        multiply_rows(n, row, row_stride, panel, words, sums, sums_stride, continues);                                 \
        break;
    switch (rows) {
        NUMBER(1) NUMBER(2) NUMBER(3) NUMBER(4) NUMBER(5) NUMBER(6)
        NUMBER(7) NUMBER(8) NUMBER(9) NUMBER(10) NUMBER(11) NUMBER(12)
    }
#undef NUMBER
}

static inline int64_t
smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* A mask of the first `count` of 16 or of 32 lanes; all of them if there are more. */
static inline uint32_t
first_lanes(int64_t count)
{
    return count >= 32 ? UINT32_MAX : (1u << count) - 1;
}

static inline __m512
load_lanes(const element *from, __mmask16 mask)
{
#ifdef FLOAT32
    return _mm512_maskz_loadu_ps(mask, from);
#else
    return _mm512_cvtpbh_ps((__m256bh)_mm256_maskz_loadu_epi16(mask, from));
#endif
}

static inline void
store_lanes(element *to, __mmask16 mask, __m512 x)
{
#ifdef FLOAT32
    _mm512_mask_storeu_ps(to, mask, x);
#else
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(x));
#endif
}

/* 2 ** x, to about one unit in the last place; 0 below the smallest normal number, NaN for NaN. */
static inline __m512
exp2_lanes(__m512 x)
{
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 part = _mm512_sub_ps(x, whole);
    /* the series of exp(part * ln 2), whose next term is below 2 ** -23 for |part| <= 1/2 */
    __m512 power = _mm512_set1_ps(1.54035304e-4f);
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(1.33335581e-3f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(9.61812911e-3f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(5.55041087e-2f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(2.40226507e-1f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(6.93147181e-1f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(1.0f));
    power = _mm512_scalef_ps(power, whole);
    return _mm512_mask_mov_ps(power, _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_LT_OQ), _mm512_setzero_ps());
}

#endif
