/* The vectors of `vector.h` in plain C, in whatever vectors the compiler has for the processor. */
typedef float vec __attribute__((vector_size(64)));
typedef uint32_t words_t __attribute__((vector_size(64)));
typedef int32_t lanes __attribute__((vector_size(64)));
typedef vec weights;   /* an element of each of 16 columns */
typedef float operand; /* an element of a GEMM's rows, as the micro-kernel reads it: widened */

enum {
    ROWS = 3,         /* of a tile at most: their accumulators fill 24 registers of 128 bits */
    WIDE_ROWS = 3,    /* rows up to which a tile has both halves of a panel's columns */
    PARTS = PER_WORD, /* of a word, each multiplied by one instruction */
};

INLINED vec vec_zero(void) { return (vec){0}; }
INLINED vec vec_all(float x) { return (vec){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINED vec vec_add(vec a, vec b) { return a + b; }
INLINED vec vec_sub(vec a, vec b) { return a - b; }
INLINED vec vec_mul(vec a, vec b) { return a * b; }
INLINED vec vec_div(vec a, vec b) { return a / b; }
INLINED float vec_first(vec x) { return x[0]; }

INLINED vec
vec_load(const float *from)
{
    vec x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINED void
vec_store(float *to, vec x)
{
    memcpy(to, &x, sizeof x);
}

/* `yes` in the lanes whose bits are all 1, `no` in those that are 0. */
INLINED vec
vec_choose(lanes which, vec yes, vec no)
{
    return (vec)(((lanes)yes & which) | ((lanes)no & ~which));
}

/* A vector as what compilers compare at once: they split comparisons of longer ones into single numbers. */
typedef float four_floats __attribute__((vector_size(16)));
typedef int32_t four_lanes __attribute__((vector_size(16)));
typedef union {
    vec all;
    four_floats fours[LANES / 4];
} fours_t;

/* `yes` in the lanes where a > b, `no` in the others. */
INLINED vec
vec_where_greater(vec a, vec b, vec yes, vec no)
{
    const fours_t x = {a}, y = {b}, z = {yes};
    fours_t found = {no};
    for (int i = 0; i < LANES / 4; i++) {
        const four_lanes which = x.fours[i] > y.fours[i];
        found.fours[i] = (four_floats)(((four_lanes)z.fours[i] & which) | ((four_lanes)found.fours[i] & ~which));
    }
    return found.all;
}

INLINED vec vec_max(vec a, vec b) { return vec_where_greater(a, b, a, b); }
INLINED vec vec_min(vec a, vec b) { return vec_where_greater(b, a, a, b); }

INLINED vec
vec_sqrt(vec x)
{
    for (int i = 0; i < LANES; i++)
        x[i] = sqrtf(x[i]);
    return x;
}

INLINED vec
vec_fmadd(vec a, vec b, vec c)
{
    for (int i = 0; i < LANES; i++)
        c[i] = fmaf(a[i], b[i], c[i]);
    return c;
}

INLINED vec
vec_fmsub(vec a, vec b, vec c)
{
    return vec_fmadd(a, b, -c);
}

/* To the nearest whole number, ties to even. */
INLINED vec
vec_round(vec x)
{
    for (int i = 0; i < LANES; i++)
        x[i] = rintf(x[i]);
    return x;
}

/* x * 2 ** whole, in two steps since 2 ** 128 is no float32; for whole >= -126 and x of about 1. */
INLINED vec
vec_scale(vec x, vec whole)
{
    whole = vec_choose(whole < 254.0f, whole, vec_all(254.0f));
    whole = vec_choose(whole > -252.0f, whole, vec_all(-252.0f));
    const lanes power = __builtin_convertvector(whole, lanes), half = power >> 1;
    return x * (vec)((half + 127) << 23) * (vec)((power - half + 127) << 23);
}

INLINED vec
vec_zero_where_below(vec x, float bound, vec y)
{
    return vec_choose(x < bound, vec_zero(), y);
}

/* A mask of the lanes that are at least `bound`. */
INLINED uint32_t
vec_at_least(vec x, float bound)
{
    const fours_t y = {x};
    four_lanes found = {0};
    for (int i = 0; i < LANES / 4; i++)
        found |= (y.fours[i] >= bound) & ((four_lanes){1, 2, 4, 8} << (4 * i));
    return (uint32_t)(found[0] | found[1] | found[2] | found[3]);
}

/* a * b in the lanes of the mask, `otherwise` in the others. */
INLINED vec
vec_mul_where(uint32_t mask, vec a, vec b, vec otherwise)
{
    const lanes bits = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    return vec_choose((((lanes){0} + (int32_t)mask) & bits) != 0, a * b, otherwise);
}

/* The sum of all lanes: halves are added until one lane is left. */
INLINED float
vec_sum(vec x)
{
    for (int count = LANES / 2; count; count /= 2)
        for (int i = 0; i < count; i++)
            x[i] += x[i + count];
    return x[0];
}

INLINED float
vec_highest(vec x)
{
    float highest = x[0];
    for (int i = 1; i < LANES; i++)
        highest = highest > x[i] ? highest : x[i];
    return highest;
}

/* The larger magnitude in each lane; what is not finite is larger than all numbers. */
INLINED vec
vec_max_magnitude(vec magnitude, vec x)
{
    const lanes bits = (lanes)x & INT32_MAX;
    return vec_choose((lanes)magnitude > bits, magnitude, (vec)bits);
}

/* The largest lane of magnitudes. */
INLINED float
vec_highest_magnitude(vec x)
{
    const lanes bits = (lanes)x;
    int32_t highest = bits[0];
    for (int i = 1; i < LANES; i++)
        highest = highest > bits[i] ? highest : bits[i];
    float magnitude;
    memcpy(&magnitude, &highest, sizeof magnitude);
    return magnitude;
}

typedef uint16_t halves __attribute__((vector_size(32)));

INLINED vec
load_bfloat16(const uint16_t *from, int64_t count)
{
    halves x = {0};
    memcpy(&x, from, smaller(count, LANES) * sizeof *from);
    return (vec)(__builtin_convertvector(x, words_t) << 16);
}

/* Rounded to bfloat16, ties to even; subnormal numbers become 0. */
INLINED words_t
round_lanes(vec x)
{
    const words_t bits = (words_t)x;
    words_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
    rounded &= ~((words_t)((bits & 0x7f800000) == 0) & 0x7fffffff);
    const words_t is_nan = (words_t)(x != x);
    return ((rounded & ~is_nan) | ((bits | 0x00400000) & is_nan)) & 0xffff0000;
}

INLINED void
store_bfloat16(uint16_t *to, int64_t count, vec x)
{
    const halves rounded = __builtin_convertvector(round_lanes(x) >> 16, halves);
    memcpy(to, &rounded, smaller(count, LANES) * sizeof *to);
}

#ifdef FLOAT32

INLINED vec
load_lanes(const element *from, int64_t count)
{
    vec x = {0};
    memcpy(&x, from, smaller(count, LANES) * sizeof *from);
    return x;
}

INLINED void
store_lanes(element *to, int64_t count, vec x)
{
    memcpy(to, &x, smaller(count, LANES) * sizeof *to);
}

INLINED weights
weights_of(words_t w, int part)
{
    (void)part;
    return (vec)w;
}

#else

/* x, rounded to an element, as operands of a GEMM. */
INLINED void
store_operands(operand *to, vec x)
{
    vec_store(to, (vec)round_lanes(x));
}

/* The second elements of pairs (part 0), then the first ones. */
INLINED weights
weights_of(words_t w, int part)
{
    return (vec)(part == 0 ? w & 0xffff0000 : w << 16);
}

#endif

INLINED words_t
load_words(const element *from)
{
    words_t w;
    memcpy(&w, from, sizeof w);
    return w;
}

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
    uint16_t half __attribute__((vector_size(32)));
    memcpy(&half, from, sizeof half);
    const words_t bits = __builtin_convertvector(half, words_t);
    const vec size = (vec)((bits & 0x7fff) << 13) * 0x1p112f; /* the exponents' biases differ by 112 */
    const words_t not_finite = (words_t)((bits & 0x7c00) == 0x7c00) & 0x7f800000;
    return (vec)((words_t)size | not_finite | (bits & 0x8000) << 16);
}

/* 16 signed bytes. */
INLINED vec
load_bytes(const int8_t *from)
{
    int8_t bytes __attribute__((vector_size(16)));
    memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, vec);
}

/* Bits 4 * index to 4 * index + 3 of 16 words, from 0 to 15. */
INLINED vec
nibbles_of(words_t w, int index)
{
    return __builtin_convertvector(w >> 4 * index & 15, vec);
}

/* The same, as numbers of e2m1, twice. */
INLINED vec
e2m1_of(words_t w, int index)
{
    static const float numbers[] = {E2M1_TWICE};
    vec found;
    for (int i = 0; i < LANES; i++)
        found[i] = numbers[w[i] >> 4 * index & 15];
    return found;
}

#include "vector_generic_integers.h"

/* Transposes up to 16 rows of up to 16 words; missing ones become 0. */
INLINED void
transpose_words(const element *from, int64_t stride, int rows, int words, element *to, int64_t to_stride)
{
    for (int word = 0; word < words; word++)
        for (int row = 0; row < 16; row++) {
            uint32_t x = 0;
            if (row < rows)
                memcpy(&x, from + row * stride + word * PER_WORD, sizeof x);
            memcpy(to + word * to_stride + row * PER_WORD, &x, sizeof x);
        }
}

/* Words of the numbers of 16 bits of two rows, 32 of them: up to `count` are read, 0 for the others and for a NULL `odd`. */
INLINED void
interleave(const uint16_t *even, const uint16_t *odd, int64_t count, uint16_t *to)
{
    for (int64_t i = 0; i < COLUMNS; i++) {
        to[2 * i] = i < count ? even[i] : 0;
        to[2 * i + 1] = i < count && odd ? odd[i] : 0;
    }
}
