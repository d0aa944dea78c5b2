/* The part of `vector_avx512.h` for GEMMs of integers, in exact sums of 32 bits; with AVX512-VNNI, if the processor `has_dot`,
 * in one instruction.
 */
typedef __m512i ints; /* of 16 columns */

enum {
    /* Of a tile at most: sums of blocks and of spans fill 24 of the 32 registers. A tile of 12 rows and one half would load
     * a row's codes for each multiplication, and the processor loads no more than it multiplies.
     */
    INT_ROWS = 6,
    INT_WIDE_ROWS = INT_ROWS, /* rows up to which a tile has both halves of a panel's columns */
};

#define CAN_HAVE_DOT

INLINED int
processor_has_dot(void)
{
#ifdef WITHOUT_VNNI /* in a test, which has no such processor */
    return 0;
#else
    return __builtin_cpu_supports("avx512vnni") != 0;
#endif
}

INLINED ints ints_all(int32_t x) { return _mm512_set1_epi32(x); }
INLINED ints ints_add(ints a, ints b) { return _mm512_add_epi32(a, b); }
INLINED vec vec_of_ints(ints x) { return _mm512_cvtepi32_ps(x); }

INLINED ints ints_mul(ints a, ints b) { return _mm512_mullo_epi32(a, b); }
INLINED ints low_halves(ints x) { return _mm512_srai_epi32(_mm512_slli_epi32(x, 16), 16); }
INLINED ints high_halves(ints x) { return _mm512_srai_epi32(x, 16); }
INLINED ints load_ints(const int32_t *from) { return _mm512_loadu_si512(from); }

/* 16 numbers of 16 bits, with or without a sign. */
INLINED ints
load_shorts(const int16_t *from, int has_sign)
{
    const __m256i x = _mm256_loadu_si256((const __m256i *)from);
    return has_sign ? _mm512_cvtepi16_epi32(x) : _mm512_cvtepu16_epi32(x);
}

/* The lower halves of words and the upper half of a number whose lower half is 0. */
INLINED ints
join_halves(ints low, const int32_t *high)
{
    enum { LOW_AND_MASK_OR_HIGH = 0xea };
    return _mm512_ternarylogic_epi32(low, _mm512_set1_epi32(0xffff), _mm512_set1_epi32(*high), LOW_AND_MASK_OR_HIGH);
}

/* Adds the products of both halves of words, which have signs. */
INLINED ints
add_pairs(int has_dot, ints sum, ints a, ints b)
{
    if (!has_dot)
        return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}

/* Code number `index` of each of 16 words: of 4 bits without a sign, or of 8 with one. */
INLINED vec
code_of(words_t w, int bits, int index)
{
    const __m512i top = _mm512_sll_epi32(w, _mm_cvtsi32_si128(32 - bits - bits * index));
    return vec_of_ints(bits == 4 ? _mm512_srli_epi32(top, 28) : _mm512_srai_epi32(top, 24));
}

/* The sums of four products of a column, added to `sum`: of bytes without a sign and of signed `codes`. */
INLINED ints
add_dots(ints sum, words_t bytes, const int8_t *codes)
{
    /* no intrinsic: the files are compiled for processors without it, too */
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(_mm512_set1_epi32(word_at(codes))));
    return sum;
}

/* Bits 0 to 3 of each byte (part 0), or 4 to 7. */
INLINED words_t
split_nibbles(words_t w, int part)
{
    return _mm512_and_si512(part ? _mm512_srli_epi32(w, 4) : w, _mm512_set1_epi8(15));
}

/* Adds products of the result of `split_nibbles` and of codes; `nibble_sums` reads the sums of up to 32 of them. */
INLINED ints
add_nibbles(int has_dot, ints sum, words_t nibbles, const int8_t *codes)
{
    if (has_dot)
        return add_dots(sum, nibbles, codes);
    return _mm512_add_epi16(sum, _mm512_maddubs_epi16(nibbles, _mm512_set1_epi32(word_at(codes)))); /* within 16 bits */
}

INLINED ints
nibble_sums(int has_dot, ints sum)
{
    return has_dot ? sum : _mm512_madd_epi16(sum, _mm512_set1_epi16(1));
}

/* Signed bytes, as `add_bytes` reads them. */
INLINED words_t
split_bytes(int has_dot, words_t w)
{
    return has_dot ? _mm512_xor_si512(w, _mm512_set1_epi8(-128)) : w;
}

/* Numbers of e2m1, twice, in the bits that `split_nibbles` takes; as `add_bytes` reads them. */
INLINED words_t
split_e2m1(int has_dot, words_t w, int part)
{
    const __m512i numbers = _mm512_broadcast_i32x4(_mm_setr_epi8(E2M1_TWICE));
    return _mm512_shuffle_epi8(split_bytes(has_dot, numbers), split_nibbles(w, part));
}

INLINED ints
add_bytes(int has_dot, ints sum, words_t bytes, const int8_t *codes)
{
    if (has_dot)
        return add_dots(sum, bytes, codes);
    const __m512i x = _mm512_set1_epi32(word_at(codes));
    const __m512i even = _mm512_madd_epi16(_mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8),
                                           _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srai_epi16(bytes, 8), _mm512_srai_epi16(x, 8));
    return _mm512_add_epi32(sum, _mm512_add_epi32(even, odd));
}

/* 16 codes, from -127 to 127; if they `are_paired`, of each eight those with even indices first. */
INLINED void
store_codes(int8_t *to, vec codes, int are_paired)
{
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(codes));
    _mm_storeu_si128((__m128i *)to, are_paired ? _mm_shuffle_epi8(bytes, order) : bytes);
}

/* 16 whole numbers as ones of 16 bits. */
INLINED void
store_shorts(int16_t *to, vec numbers)
{
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(numbers)));
}
