/* The vectors of `vector.h` in AVX2 with FMA: two registers each. Bfloat16 is widened by shifts. */
#include <immintrin.h>

typedef struct {
    __m256 low, high;
} vec;
typedef float operand; /* an element of a GEMM's rows, as the micro-kernel reads it: widened */
typedef vec weights;   /* an element of each of 16 columns */
typedef struct {
    __m256i low, high;
} words_t;

enum {
    ROWS = 6,         /* of a tile at most: their accumulators fill 12 of the 16 registers */
    WIDE_ROWS = 2,    /* rows up to which a tile has both halves of a panel's columns */
    PARTS = PER_WORD, /* of a word, each multiplied by one instruction */
};

INLINED vec
vec_of(__m256 low, __m256 high)
{
    return (vec){low, high};
}

#define EACH_HALF(name, instruction)                                                                                   \
    INLINED vec name(vec a, vec b)                                                                                     \
    {                                                                                                                  \
        return vec_of(instruction(a.low, b.low), instruction(a.high, b.high));                                         \
    }
EACH_HALF(vec_add, _mm256_add_ps)
EACH_HALF(vec_sub, _mm256_sub_ps)
EACH_HALF(vec_mul, _mm256_mul_ps)
EACH_HALF(vec_div, _mm256_div_ps)
EACH_HALF(vec_max, _mm256_max_ps)
EACH_HALF(vec_min, _mm256_min_ps)
#undef EACH_HALF

INLINED vec vec_zero(void) { return vec_of(_mm256_setzero_ps(), _mm256_setzero_ps()); }
INLINED vec vec_all(float x) { return vec_of(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
INLINED vec vec_load(const float *from) { return vec_of(_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)); }
INLINED vec vec_sqrt(vec x) { return vec_of(_mm256_sqrt_ps(x.low), _mm256_sqrt_ps(x.high)); }
INLINED float vec_first(vec x) { return _mm256_cvtss_f32(x.low); }

INLINED void
vec_store(float *to, vec x)
{
    _mm256_storeu_ps(to, x.low);
    _mm256_storeu_ps(to + 8, x.high);
}

INLINED vec
vec_fmadd(vec a, vec b, vec c)
{
    return vec_of(_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high));
}

INLINED vec
vec_fmsub(vec a, vec b, vec c)
{
    return vec_of(_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high));
}

/* To the nearest whole number, ties to even. */
INLINED vec
vec_round(vec x)
{
    enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    return vec_of(_mm256_round_ps(x.low, NEAREST), _mm256_round_ps(x.high, NEAREST));
}

/* x * 2 ** whole of 8 lanes, in two steps since 2 ** 128 is no float32; for whole >= -126 and x of about 1. */
INLINED __m256
scale_half(__m256 x, __m256 whole)
{
    whole = _mm256_min_ps(_mm256_max_ps(whole, _mm256_set1_ps(-252.0f)), _mm256_set1_ps(254.0f));
    const __m256i power = _mm256_cvtps_epi32(whole);
    const __m256i half = _mm256_srai_epi32(power, 1), rest = _mm256_sub_epi32(power, half);
    const __m256i bias = _mm256_set1_epi32(127);
    x = _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
    return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}

INLINED vec
vec_scale(vec x, vec whole)
{
    return vec_of(scale_half(x.low, whole.low), scale_half(x.high, whole.high));
}

INLINED vec
vec_zero_where_below(vec x, float bound, vec y)
{
    const __m256 limit = _mm256_set1_ps(bound);
    return vec_of(_mm256_andnot_ps(_mm256_cmp_ps(x.low, limit, _CMP_LT_OQ), y.low),
                  _mm256_andnot_ps(_mm256_cmp_ps(x.high, limit, _CMP_LT_OQ), y.high));
}

/* `yes` in the lanes where a > b, `no` in the others. */
INLINED vec
vec_where_greater(vec a, vec b, vec yes, vec no)
{
    return vec_of(_mm256_blendv_ps(no.low, yes.low, _mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ)),
                  _mm256_blendv_ps(no.high, yes.high, _mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ)));
}

/* A mask of the lanes that are at least `bound`. */
INLINED uint32_t
vec_at_least(vec x, float bound)
{
    const __m256 limit = _mm256_set1_ps(bound);
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x.low, limit, _CMP_GE_OQ)) |
           (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x.high, limit, _CMP_GE_OQ)) << 8;
}

/* Lanes 8 * half to 8 * half + 7 of a mask of 16. */
INLINED __m256i
mask_half(uint32_t mask, int half)
{
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int32_t)(mask >> (8 * half))), bits), bits);
}

/* a * b in the lanes of the mask, `otherwise` in the others. */
INLINED vec
vec_mul_where(uint32_t mask, vec a, vec b, vec otherwise)
{
    const vec y = vec_mul(a, b);
    return vec_of(_mm256_blendv_ps(otherwise.low, y.low, _mm256_castsi256_ps(mask_half(mask, 0))),
                  _mm256_blendv_ps(otherwise.high, y.high, _mm256_castsi256_ps(mask_half(mask, 1))));
}

/* The sum of all lanes: halves are added until one lane is left. */
INLINED float
vec_sum(vec x)
{
    const __m256 eight = _mm256_add_ps(x.high, x.low);
    const __m128 four = _mm_add_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

INLINED float
vec_highest(vec x)
{
    const __m256 eight = _mm256_max_ps(x.high, x.low);
    const __m128 four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

/* The larger magnitude in each lane; what is not finite is larger than all numbers. */
INLINED vec
vec_max_magnitude(vec magnitude, vec x)
{
    const __m256i low = _mm256_castps_si256(x.low), high = _mm256_castps_si256(x.high);
    const __m256i sign_off = _mm256_set1_epi32(INT32_MAX);
    return vec_of(_mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(magnitude.low), _mm256_and_si256(low, sign_off))),
                  _mm256_castsi256_ps(
                      _mm256_max_epi32(_mm256_castps_si256(magnitude.high), _mm256_and_si256(high, sign_off))));
}

/* The largest lane of magnitudes. */
INLINED float
vec_highest_magnitude(vec x)
{
    const __m256i eight = _mm256_max_epi32(_mm256_castps_si256(x.high), _mm256_castps_si256(x.low));
    const __m128i four = _mm_max_epi32(_mm256_extracti128_si256(eight, 1), _mm256_castsi256_si128(eight));
    const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1))));
}

INLINED vec
load_bfloat16(const uint16_t *from, int64_t count)
{
    uint16_t some[LANES] = {0};
    if (count < LANES) {
        memcpy(some, from, count * sizeof *from);
        from = some;
    }
    const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
    const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(from + 8)));
    return vec_of(_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16)));
}

/* 8 float32 rounded to bfloat16, ties to even, in the upper half of each; subnormal numbers become 0. */
INLINED __m256i
round_half(__m256 x)
{
    const __m256i bits = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256 sign = _mm256_set1_ps(-0.0f);
    const __m256 smallest = _mm256_castsi256_ps(_mm256_set1_epi32(0x00800000));
    const __m256i is_small = _mm256_castps_si256(_mm256_cmp_ps(_mm256_andnot_ps(sign, x), smallest, _CMP_LT_OQ));
    rounded = _mm256_andnot_si256(_mm256_andnot_si256(_mm256_castps_si256(sign), is_small), rounded);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    rounded = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    return _mm256_and_si256(rounded, _mm256_set1_epi32((int32_t)0xffff0000));
}

INLINED void
store_bfloat16(uint16_t *to, int64_t count, vec x)
{
    const __m256i low = _mm256_srli_epi32(round_half(x.low), 16), high = _mm256_srli_epi32(round_half(x.high), 16);
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
    if (count >= LANES) {
        _mm256_storeu_si256((__m256i *)to, both);
        return;
    }
    uint16_t some[LANES];
    _mm256_storeu_si256((__m256i *)some, both);
    memcpy(to, some, count * sizeof *to);
}

#ifdef FLOAT32

INLINED vec
load_lanes(const element *from, int64_t count)
{
    if (count >= LANES)
        return vec_load(from);
    const uint32_t mask = (1u << count) - 1;
    return vec_of(_mm256_maskload_ps(from, mask_half(mask, 0)), _mm256_maskload_ps(from + 8, mask_half(mask, 1)));
}

INLINED void
store_lanes(element *to, int64_t count, vec x)
{
    if (count >= LANES) {
        vec_store(to, x);
        return;
    }
    const uint32_t mask = (1u << count) - 1;
    _mm256_maskstore_ps(to, mask_half(mask, 0), x.low);
    _mm256_maskstore_ps(to + 8, mask_half(mask, 1), x.high);
}

INLINED words_t
load_words(const element *from)
{
    return (words_t){_mm256_loadu_si256((const __m256i *)from), _mm256_loadu_si256((const __m256i *)(from + 8))};
}

INLINED weights
weights_of(words_t w, int part)
{
    (void)part;
    return vec_of(_mm256_castsi256_ps(w.low), _mm256_castsi256_ps(w.high));
}

#else

/* x, rounded to an element, as operands of a GEMM. */
INLINED void
store_operands(operand *to, vec x)
{
    vec_store(to, vec_of(_mm256_castsi256_ps(round_half(x.low)), _mm256_castsi256_ps(round_half(x.high))));
}

INLINED words_t
load_words(const element *from)
{
    return (words_t){_mm256_loadu_si256((const __m256i *)from), _mm256_loadu_si256((const __m256i *)(from + 16))};
}

/* The second elements of pairs (part 0), then the first ones. */
INLINED weights
weights_of(words_t w, int part)
{
    if (part == 0) {
        const __m256i upper = _mm256_set1_epi32((int32_t)0xffff0000);
        return vec_of(_mm256_castsi256_ps(_mm256_and_si256(w.low, upper)),
                      _mm256_castsi256_ps(_mm256_and_si256(w.high, upper)));
    }
    return vec_of(_mm256_castsi256_ps(_mm256_slli_epi32(w.low, 16)),
                  _mm256_castsi256_ps(_mm256_slli_epi32(w.high, 16)));
}

#endif

/* sum + the products of an element of a row, the last of its word first, and of 16 columns. */
INLINED vec
add_products(vec sum, const operand *word, int part, weights w)
{
    return vec_fmadd(vec_all(word[PER_WORD - 1 - part]), w, sum);
}

/* 16 float16. */
INLINED vec
load_halves(const uint16_t *from)
{
    return vec_of(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)),
                  _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 8))));
}

/* 16 signed bytes. */
INLINED vec
load_bytes(const int8_t *from)
{
    return vec_of(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from))),
                  _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(from + 8)))));
}

/* Bits 4 * index to 4 * index + 3 of 16 words, from 0 to 15. */
INLINED vec
nibbles_of(words_t w, int index)
{
    const __m256i lowest = _mm256_set1_epi32(15);
    return vec_of(_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(w.low, 4 * index), lowest)),
                  _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(w.high, 4 * index), lowest)));
}

#include "vector_avx2_integers.h"

/* Transposes 8 rows of 8 words. */
INLINED void
transpose_eight(__m256i a[8])
{
    __m256i b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        b[i] = _mm256_permute2x128_si256(a[i], a[i + 4], 0x20);
        b[i + 4] = _mm256_permute2x128_si256(a[i], a[i + 4], 0x31);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        a[i] = b[i];
}

/* Transposes up to 16 rows of up to 16 words; missing ones become 0. */
INLINED void
transpose_words(const element *from, int64_t stride, int rows, int words, element *to, int64_t to_stride)
{
    for (int word = 0; word < words; word += 8) {
        const __m256i mask = mask_half(words - word >= 8 ? 0xff : (1u << (words - word)) - 1, 0);
        for (int row = 0; row < 16; row += 8) {
            __m256i block[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                const int *at = (const int *)(from + (row + i) * stride + word * PER_WORD);
                block[i] = row + i < rows ? _mm256_maskload_epi32(at, mask) : _mm256_setzero_si256();
            }
            transpose_eight(block);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++)
                if (word + i < words)
                    _mm256_storeu_si256((__m256i *)(to + (word + i) * to_stride + row * PER_WORD), block[i]);
        }
    }
}

/* Words of the numbers of 16 bits of two rows, 32 of them: up to `count` are read, 0 for the others and for a NULL `odd`. */
INLINED void
interleave(const uint16_t *even, const uint16_t *odd, int64_t count, uint16_t *to)
{
    uint16_t some[2][COLUMNS] = {{0}};
    if (count < COLUMNS || !odd) {
        memcpy(some[0], even, smaller(count, COLUMNS) * sizeof *even);
        if (odd)
            memcpy(some[1], odd, smaller(count, COLUMNS) * sizeof *odd);
        even = some[0];
        odd = some[1];
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        const __m256i a = _mm256_loadu_si256((const __m256i *)(even + half * LANES));
        const __m256i b = _mm256_loadu_si256((const __m256i *)(odd + half * LANES));
        const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
        __m256i *at = (__m256i *)(to + half * COLUMNS);
        _mm256_storeu_si256(at, _mm256_permute2x128_si256(low, high, 0x20));
        _mm256_storeu_si256(at + 1, _mm256_permute2x128_si256(low, high, 0x31));
    }
}
