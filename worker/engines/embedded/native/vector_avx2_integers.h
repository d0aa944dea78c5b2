/* The part of `vector_avx2.h` for GEMMs of integers, in exact sums of 32 bits; with AVX-VNNI, if the processor `has_dot`,
 * in one instruction.
 */
typedef words_t ints; /* of 16 columns */

enum {
    INT_ROWS = 4,      /* of a tile at most: sums of integers fill 8 of the 16 registers; those of float32 are in memory */
    INT_WIDE_ROWS = 1, /* rows up to which a tile has both halves of a panel's columns */
};

#ifdef DOT_IN_EVEX /* in a test, whose processor has the instruction in AVX-512's encoding alone */
#define EVEX_OR_VEX "%{evex%} "
#define HAS_DOT (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl"))
#else
#define EVEX_OR_VEX "%{vex%} "
#define HAS_DOT (__builtin_cpu_supports("avxvnni") != 0)
#endif

/* Compilers whose systems' assemblers know AVX-VNNI; and no test of processors without it. */
#if (__GNUC__ >= 12 || __clang_major__ >= 19) && !defined WITHOUT_VNNI
#define CAN_HAVE_DOT
INLINED int processor_has_dot(void) { return HAS_DOT; }
#endif

INLINED ints
ints_all(int32_t x)
{
    return (ints){_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}

INLINED ints
ints_add(ints a, ints b)
{
    return (ints){_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}

INLINED vec
vec_of_ints(ints x)
{
    return vec_of(_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high));
}

INLINED ints
ints_mul(ints a, ints b)
{
    return (ints){_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)};
}

INLINED ints
high_halves(ints x)
{
    return (ints){_mm256_srai_epi32(x.low, 16), _mm256_srai_epi32(x.high, 16)};
}

INLINED ints
low_halves(ints x)
{
    return high_halves((ints){_mm256_slli_epi32(x.low, 16), _mm256_slli_epi32(x.high, 16)});
}

INLINED ints
load_ints(const int32_t *from)
{
    return (ints){_mm256_loadu_si256((const __m256i *)from), _mm256_loadu_si256((const __m256i *)from + 1)};
}

/* 16 numbers of 16 bits, with or without a sign. */
INLINED ints
load_shorts(const int16_t *from, int has_sign)
{
    const __m128i low = _mm_loadu_si128((const __m128i *)from), high = _mm_loadu_si128((const __m128i *)from + 1);
    return has_sign ? (ints){_mm256_cvtepi16_epi32(low), _mm256_cvtepi16_epi32(high)}
                    : (ints){_mm256_cvtepu16_epi32(low), _mm256_cvtepu16_epi32(high)};
}

/* The lower halves of words and the upper half of a number whose lower half is 0. */
INLINED ints
join_halves(ints low, const int32_t *high)
{
    const __m256i x = _mm256_set1_epi32(*high);
    return (ints){_mm256_blend_epi16(low.low, x, 0xaa), _mm256_blend_epi16(low.high, x, 0xaa)};
}

/* Adds the products of both halves of 8 words, which have signs. */
INLINED __m256i
add_pairs_half(int has_dot, __m256i sum, __m256i a, __m256i b)
{
    if (!has_dot)
        return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
    __asm__(EVEX_OR_VEX "vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
}

INLINED ints
add_pairs(int has_dot, ints sum, ints a, ints b)
{
    return (ints){add_pairs_half(has_dot, sum.low, a.low, b.low), add_pairs_half(has_dot, sum.high, a.high, b.high)};
}

/* Code number `index` of each of 16 words: of 4 bits without a sign, or of 8 with one. */
INLINED vec
code_of(words_t w, int bits, int index)
{
    const __m128i places = _mm_cvtsi32_si128(32 - bits - bits * index);
    const __m256i low = _mm256_sll_epi32(w.low, places), high = _mm256_sll_epi32(w.high, places);
    return vec_of_ints(bits == 4 ? (ints){_mm256_srli_epi32(low, 28), _mm256_srli_epi32(high, 28)}
                                 : (ints){_mm256_srai_epi32(low, 24), _mm256_srai_epi32(high, 24)});
}

/* Numbers of e2m1, twice, by the lowest four bits. */
INLINED __m256
e2m1_half(__m256i bits)
{
    const float numbers[] = {E2M1_TWICE};
    const __m256 above = _mm256_permutevar8x32_ps(_mm256_loadu_ps(numbers), bits); /* reads three bits */
    const __m256 below = _mm256_permutevar8x32_ps(_mm256_loadu_ps(numbers + 8), bits);
    return _mm256_blendv_ps(above, below, _mm256_castsi256_ps(_mm256_slli_epi32(bits, 28)));
}

/* Bits 4 * index to 4 * index + 3 of 16 words as numbers of e2m1, twice. */
INLINED vec
e2m1_of(words_t w, int index)
{
    return vec_of(e2m1_half(_mm256_srli_epi32(w.low, 4 * index)), e2m1_half(_mm256_srli_epi32(w.high, 4 * index)));
}

/* The sums of four products of 8 columns, added to `sum`: of bytes without a sign and of signed codes. */
INLINED __m256i
add_dots_half(__m256i sum, __m256i bytes, __m256i codes)
{
    /* no intrinsic: the files are compiled for processors without it, too */
    __asm__(EVEX_OR_VEX "vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(bytes), "x"(codes));
    return sum;
}

INLINED ints
add_dots(ints sum, words_t bytes, const int8_t *codes)
{
    const __m256i x = _mm256_set1_epi32(word_at(codes));
    return (ints){add_dots_half(sum.low, bytes.low, x), add_dots_half(sum.high, bytes.high, x)};
}

/* Bits 0 to 3 of each byte (part 0), or 4 to 7. */
INLINED words_t
split_nibbles(words_t w, int part)
{
    const __m256i lowest = _mm256_set1_epi8(15);
    return (words_t){_mm256_and_si256(part ? _mm256_srli_epi32(w.low, 4) : w.low, lowest),
                     _mm256_and_si256(part ? _mm256_srli_epi32(w.high, 4) : w.high, lowest)};
}

/* Adds products of the result of `split_nibbles` and of codes; `nibble_sums` reads the sums of up to 32 of them. */
INLINED ints
add_nibbles(int has_dot, ints sum, words_t nibbles, const int8_t *codes)
{
    if (has_dot)
        return add_dots(sum, nibbles, codes);
    const __m256i x = _mm256_set1_epi32(word_at(codes));
    return (ints){_mm256_add_epi16(sum.low, _mm256_maddubs_epi16(nibbles.low, x)), /* within 16 bits */
                  _mm256_add_epi16(sum.high, _mm256_maddubs_epi16(nibbles.high, x))};
}

INLINED ints
nibble_sums(int has_dot, ints sum)
{
    if (has_dot)
        return sum;
    const __m256i one = _mm256_set1_epi16(1);
    return (ints){_mm256_madd_epi16(sum.low, one), _mm256_madd_epi16(sum.high, one)};
}

/* Signed bytes, as `add_bytes` reads them. */
INLINED words_t
split_bytes(int has_dot, words_t w)
{
    const __m256i sign = _mm256_set1_epi8(-128);
    return has_dot ? (words_t){_mm256_xor_si256(w.low, sign), _mm256_xor_si256(w.high, sign)} : w;
}

/* Numbers of e2m1, twice, in the bits that `split_nibbles` takes; as `add_bytes` reads them. */
INLINED words_t
split_e2m1(int has_dot, words_t w, int part)
{
    const __m256i numbers = _mm256_broadcastsi128_si256(_mm_setr_epi8(E2M1_TWICE));
    const words_t table = split_bytes(has_dot, (words_t){numbers, numbers}), nibbles = split_nibbles(w, part);
    return (words_t){_mm256_shuffle_epi8(table.low, nibbles.low), _mm256_shuffle_epi8(table.low, nibbles.high)};
}

/* The sums of four products of 8 columns, in three instructions. */
INLINED __m256i
sums_half(__m256i bytes, __m256i codes)
{
    /* a size has no sign, and the code has that of the product: two of them are within 16 bits */
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(bytes), _mm256_sign_epi8(codes, bytes));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

INLINED ints
add_bytes(int has_dot, ints sum, words_t bytes, const int8_t *codes)
{
    if (has_dot)
        return add_dots(sum, bytes, codes);
    const __m256i x = _mm256_set1_epi32(word_at(codes));
    return ints_add(sum, (ints){sums_half(bytes.low, x), sums_half(bytes.high, x)});
}

/* 16 codes, from -127 to 127; if they `are_paired`, of each eight those with even indices first. */
INLINED void
store_codes(int8_t *to, vec codes, int are_paired)
{
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    const __m256i both = _mm256_packs_epi32(_mm256_cvtps_epi32(codes.low), _mm256_cvtps_epi32(codes.high));
    const __m256i sorted = _mm256_permute4x64_epi64(both, 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(sorted), _mm256_extracti128_si256(sorted, 1));
    _mm_storeu_si128((__m128i *)to, are_paired ? _mm_shuffle_epi8(bytes, order) : bytes);
}

/* 16 whole numbers as ones of 16 bits. */
INLINED void
store_shorts(int16_t *to, vec numbers)
{
    const __m256i both = _mm256_packs_epi32(_mm256_cvtps_epi32(numbers.low), _mm256_cvtps_epi32(numbers.high));
    _mm256_storeu_si256((__m256i *)to, _mm256_permute4x64_epi64(both, 0xd8));
}
