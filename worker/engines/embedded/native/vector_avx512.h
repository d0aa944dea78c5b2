/* The vectors of `vector.h` in AVX-512: one register each. Bfloat16 also needs AVX512-BF16. */
#include <immintrin.h>

typedef __m512 vec;
typedef element operand; /* an element of a GEMM's rows, as the micro-kernel reads it */
typedef __m512i weights; /* a word of each of 16 columns */
typedef __m512i words_t;

enum {
#ifdef WITH_AMX
    ROWS = 32, /* two of AMX's tiles */
#else
    ROWS = 12,      /* of a tile at most: their accumulators fill 24 of the 32 registers */
#endif
    WIDE_ROWS = 12, /* rows up to which a tile has both halves of a panel's columns */
    PARTS = 1,      /* of a word, each multiplied by one instruction */
};

INLINED __mmask16
first_lanes(int64_t count)
{
    return count >= LANES ? 0xffff : (__mmask16)((1u << count) - 1);
}

INLINED vec vec_zero(void) { return _mm512_setzero_ps(); }
INLINED vec vec_all(float x) { return _mm512_set1_ps(x); }
INLINED vec vec_load(const float *from) { return _mm512_loadu_ps(from); }
INLINED void vec_store(float *to, vec x) { _mm512_storeu_ps(to, x); }
INLINED vec vec_add(vec a, vec b) { return _mm512_add_ps(a, b); }
INLINED vec vec_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
INLINED vec vec_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
INLINED vec vec_div(vec a, vec b) { return _mm512_div_ps(a, b); }
INLINED vec vec_fmadd(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINED vec vec_fmsub(vec a, vec b, vec c) { return _mm512_fmsub_ps(a, b, c); }
INLINED vec vec_max(vec a, vec b) { return _mm512_max_ps(a, b); }
INLINED vec vec_min(vec a, vec b) { return _mm512_min_ps(a, b); }
INLINED vec vec_sqrt(vec x) { return _mm512_sqrt_ps(x); }
INLINED float vec_first(vec x) { return _mm512_cvtss_f32(x); }

/* To the nearest whole number, ties to even. */
INLINED vec
vec_round(vec x)
{
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* x * 2 ** whole */
INLINED vec
vec_scale(vec x, vec whole)
{
    return _mm512_scalef_ps(x, whole);
}

INLINED vec
vec_zero_where_below(vec x, float bound, vec y)
{
    return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, _mm512_set1_ps(bound), _CMP_LT_OQ), _mm512_setzero_ps());
}

/* `yes` in the lanes where a > b, `no` in the others. */
INLINED vec
vec_where_greater(vec a, vec b, vec yes, vec no)
{
    return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), yes);
}

/* A mask of the lanes that are at least `bound`. */
INLINED uint32_t
vec_at_least(vec x, float bound)
{
    return _mm512_cmp_ps_mask(x, _mm512_set1_ps(bound), _CMP_GE_OQ);
}

/* a * b in the lanes of the mask, `otherwise` in the others. */
INLINED vec
vec_mul_where(uint32_t mask, vec a, vec b, vec otherwise)
{
    return _mm512_mask_mul_ps(otherwise, (__mmask16)mask, a, b);
}

/* The sum of all lanes: halves are added until one lane is left. */
INLINED float
vec_sum(vec x)
{
    const __m256 eight = _mm256_add_ps(_mm512_extractf32x8_ps(x, 1), _mm512_castps512_ps256(x));
    const __m128 four = _mm_add_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

INLINED float
vec_highest(vec x)
{
    return _mm512_reduce_max_ps(x);
}

/* The larger magnitude in each lane; what is not finite is larger than all numbers. */
INLINED vec
vec_max_magnitude(vec magnitude, vec x)
{
    const __m512i bits = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(INT32_MAX));
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(magnitude), bits));
}

/* The largest lane of magnitudes. */
INLINED float
vec_highest_magnitude(vec x)
{
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epi32(_mm512_castps_si512(x)))));
}

INLINED vec
load_bfloat16(const uint16_t *from, int64_t count)
{
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(count), from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}

/* x, rounded to bfloat16, ties to even; subnormal numbers become 0. */
INLINED void
store_bfloat16(uint16_t *to, int64_t count, vec x)
{
#ifdef __AVX512BF16__
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(x);
#else
    const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __mmask16 is_small = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
    __m512i words = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    words = _mm512_mask_and_epi32(words, is_small, bits, _mm512_set1_epi32(INT32_MIN));
    words = _mm512_mask_or_epi32(words, is_nan, bits, _mm512_set1_epi32(0x00400000));
    const __m256i rounded = _mm512_cvtepi32_epi16(_mm512_srli_epi32(words, 16));
#endif
    _mm256_mask_storeu_epi16(to, first_lanes(count), rounded);
}

#ifdef FLOAT32

INLINED vec
load_lanes(const element *from, int64_t count)
{
    return _mm512_maskz_loadu_ps(first_lanes(count), from);
}

INLINED void
store_lanes(element *to, int64_t count, vec x)
{
    _mm512_mask_storeu_ps(to, first_lanes(count), x);
}

#else

/* x, rounded to an element, as operands of a GEMM. */
INLINED void
store_operands(operand *to, vec x)
{
    store_bfloat16(to, LANES, x);
}

#endif

/* A word of each of 16 columns. */
INLINED words_t
load_words(const element *from)
{
    return _mm512_loadu_si512(from);
}

INLINED weights
weights_of(words_t w, int part)
{
    (void)part;
    return w;
}

/* sum + the products of a word of a row and the words of 16 columns; in bfloat16 of its second element first. */
INLINED vec
add_products(vec sum, const operand *word, int part, weights w)
{
    (void)part;
    int32_t x;
    memcpy(&x, word, sizeof x);
#ifdef FLOAT32
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_set1_epi32(x)), _mm512_castsi512_ps(w), sum);
#else
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(x), (__m512bh)w);
#endif
}

/* 16 float16. */
INLINED vec
load_halves(const uint16_t *from)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}

/* 16 signed bytes. */
INLINED vec
load_bytes(const int8_t *from)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
}

/* Bits 4 * index to 4 * index + 3 of 16 words, from 0 to 15. */
INLINED vec
nibbles_of(words_t w, int index)
{
    /* a permutation reads the lowest four bits of its indices */
    const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(w, 4 * index), values);
}

/* The same, as numbers of e2m1, twice. */
INLINED vec
e2m1_of(words_t w, int index)
{
    static const float numbers[] ALIGNED = {E2M1_TWICE};
    return _mm512_permutexvar_ps(_mm512_srli_epi32(w, 4 * index), _mm512_load_ps(numbers));
}

#include "vector_avx512_integers.h"

/* Transposes up to 16 rows of up to 16 words; missing ones become 0. */
INLINED void
transpose_words(const element *from, int64_t stride, int rows, int words, element *to, int64_t to_stride)
{
    const __mmask16 mask = first_lanes(words);
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        a[i] = i < rows ? _mm512_maskz_loadu_epi32(mask, from + i * stride) : _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        a[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
        a[i + 4] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88);
        a[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
        a[i + 12] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        if (i < words)
            _mm512_storeu_si512(to + i * to_stride, a[i]);
}

/* Words of the numbers of 16 bits of two rows, 32 of them: up to `count` are read, 0 for the others and for a NULL `odd`. */
INLINED void
interleave(const uint16_t *even, const uint16_t *odd, int64_t count, uint16_t *to)
{
    /* the first halves of two rows, then the second ones */
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                         37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const __mmask32 mask = count >= 32 ? UINT32_MAX : (1u << count) - 1;
    const __m512i a = _mm512_maskz_loadu_epi16(mask, even), b = _mm512_maskz_loadu_epi16(odd ? mask : 0, odd);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, low, b));
    _mm512_storeu_si512(to + COLUMNS, _mm512_permutex2var_epi16(a, high, b));
}

#if !defined(FLOAT32) && defined(__AVX512BF16__)
#include "vector_avx512_codes.h"
#endif
