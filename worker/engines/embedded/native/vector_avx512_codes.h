/* Panels of rows of codes of 8 bits, each row with a scale of its own, in AVX-512: elements are codes * scales in float32,
 * rounded to bfloat16. Codes are put in the order of a panel as bytes, which takes fewer shuffles than elements, and are
 * multiplied and rounded there, 32 by one instruction.
 */
#define CODES_BECOME_PANELS

enum { CODES = 64 }; /* of a row that are laid out together, at most */

/* The first codes of a row, 0 for the others. */
INLINED __m512i
load_codes(const int8_t *from, int64_t count)
{
    return _mm512_maskz_loadu_epi8(count >= CODES ? UINT64_MAX : (UINT64_C(1) << count) - 1, from);
}

/* The elements of 32 codes, of which the lanes of `low` and of `high` are the scales. */
INLINED void
store_products(const int8_t *codes, const int8_t *next, __m512 low, __m512 high, element *to)
{
    const __m512 first = _mm512_mul_ps(load_bytes(codes), low), second = _mm512_mul_ps(load_bytes(next), high);
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

/* As `transpose_words`, of the elements of up to 16 rows of up to 64 codes, an even number; missing rows become 0, whose
 * scales are 0. `stride` is in codes.
 */
INLINED void
transpose_codes(const int8_t *from, int64_t stride, const float *scales, int rows, int64_t count, element *to,
                int64_t to_stride)
{
    enum { HALF = LANES / 2, PART = 16 }; /* rows; bytes of a word of theirs */
    int8_t words[2][HALF][CODES] ALIGNED; /* word number HALF * l + i at [half][i][PART * l] */
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        __m512i a[HALF], b[HALF];
#pragma GCC unroll 8
        for (int i = 0, row = half * HALF; i < HALF; i++, row++)
            a[i] = row < rows ? load_codes(from + row * stride, count) : _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int i = 0; i < HALF; i += 2) {
            b[i] = _mm512_unpacklo_epi16(a[i], a[i + 1]);
            b[i + 1] = _mm512_unpackhi_epi16(a[i], a[i + 1]);
        }
#pragma GCC unroll 2
        for (int i = 0; i < HALF; i += 4)
#pragma GCC unroll 2
            for (int j = 0; j < 2; j++) {
                a[i + 2 * j] = _mm512_unpacklo_epi32(b[i + j], b[i + j + 2]);
                a[i + 2 * j + 1] = _mm512_unpackhi_epi32(b[i + j], b[i + j + 2]);
            }
#pragma GCC unroll 4
        for (int i = 0; i < HALF / 2; i++) {
            _mm512_store_si512(words[half][2 * i], _mm512_unpacklo_epi64(a[i], a[i + HALF / 2]));
            _mm512_store_si512(words[half][2 * i + 1], _mm512_unpackhi_epi64(a[i], a[i + HALF / 2]));
        }
    }
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512 all = _mm512_loadu_ps(scales), low = _mm512_permutexvar_ps(twice, all);
    const __m512 high = _mm512_permutexvar_ps(_mm512_add_epi32(twice, _mm512_set1_epi32(HALF)), all);
    for (int64_t word = 0; word < count / PER_WORD; word++) {
        const int64_t at = word / HALF * PART, i = word % HALF;
        store_products(words[0][i] + at, words[1][i] + at, low, high, to + word * to_stride);
    }
}

/* As `interleave`, of the elements of two rows of up to 64 codes; 32 columns, then `to_step` elements further the others. */
INLINED void
interleave_codes(const int8_t *even, const int8_t *odd, const float scales[2], int64_t count, element *to,
                 int64_t to_step)
{
    enum { PART = 16 }; /* bytes, of 8 columns */
    int8_t words[2][CODES] ALIGNED; /* columns 16 * l to 16 * l + 7 at [0][PART * l], the next 8 at [1][PART * l] */
    const __m512i a = load_codes(even, count), b = odd ? load_codes(odd, count) : _mm512_setzero_si512();
    _mm512_store_si512(words[0], _mm512_unpacklo_epi8(a, b));
    _mm512_store_si512(words[1], _mm512_unpackhi_epi8(a, b));
    int64_t pair;
    memcpy(&pair, scales, sizeof pair);
    const __m512 both = _mm512_castsi512_ps(_mm512_set1_epi64(pair));
    for (int64_t at = 0; at < count; at += COLUMNS, to += to_step) {
        store_products(words[0] + at, words[1] + at, both, both, to);
        store_products(words[0] + at + PART, words[1] + at + PART, both, both, to + COLUMNS);
    }
}
