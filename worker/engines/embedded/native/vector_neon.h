/* The vectors of `vector.h` in NEON of 64-bit Arm, which every such processor has: four registers each. Bfloat16 is
 * widened by shifts. A NaN that an operation makes has the processor's sign: Arm's has none, x86's is negative.
 */
#include <arm_neon.h>

enum { FOURS = LANES / 4 };

#define EACH_FOUR _Pragma("GCC unroll 4") for (int i = 0; i < FOURS; i++)

typedef struct {
    float32x4_t four[FOURS];
} vec;
typedef float operand; /* an element of a GEMM's rows, as the micro-kernel reads it: widened */
typedef vec weights;   /* an element of each of 16 columns */
typedef struct {
    uint32x4_t four[FOURS];
} words_t;

enum {
    ROWS = 5,         /* of a tile at most: their accumulators fill 20 of the 32 registers; GCC spills those of six */
    WIDE_ROWS = 2,    /* rows up to which a tile has both halves of a panel's columns */
    PARTS = PER_WORD, /* of a word, each multiplied by one instruction */
};

#define IN_EACH_FOUR(name, instruction)                                                                                \
    INLINED vec name(vec a, vec b)                                                                                     \
    {                                                                                                                  \
        EACH_FOUR a.four[i] = instruction(a.four[i], b.four[i]);                                                       \
        return a;                                                                                                      \
    }
IN_EACH_FOUR(vec_add, vaddq_f32)
IN_EACH_FOUR(vec_sub, vsubq_f32)
IN_EACH_FOUR(vec_mul, vmulq_f32)
IN_EACH_FOUR(vec_div, vdivq_f32)

/* The second one where one is not a number, or both are zero. */
INLINED float32x4_t
higher(float32x4_t a, float32x4_t b)
{
    return vbslq_f32(vcgtq_f32(a, b), a, b);
}
IN_EACH_FOUR(vec_max, higher)

INLINED float32x4_t
lower(float32x4_t a, float32x4_t b)
{
    return vbslq_f32(vcltq_f32(a, b), a, b);
}
IN_EACH_FOUR(vec_min, lower)
#undef IN_EACH_FOUR

INLINED float vec_first(vec x) { return vgetq_lane_f32(x.four[0], 0); }

INLINED vec
vec_all(float x)
{
    vec all;
    EACH_FOUR all.four[i] = vdupq_n_f32(x);
    return all;
}

INLINED vec vec_zero(void) { return vec_all(0.0f); }

INLINED vec
vec_load(const float *from)
{
    vec x;
    EACH_FOUR x.four[i] = vld1q_f32(from + 4 * i);
    return x;
}

INLINED void
vec_store(float *to, vec x)
{
    EACH_FOUR vst1q_f32(to + 4 * i, x.four[i]);
}

INLINED vec
vec_sqrt(vec x)
{
    EACH_FOUR x.four[i] = vsqrtq_f32(x.four[i]);
    return x;
}

INLINED vec
vec_fmadd(vec a, vec b, vec c)
{
    EACH_FOUR c.four[i] = vfmaq_f32(c.four[i], a.four[i], b.four[i]);
    return c;
}

INLINED vec
vec_fmsub(vec a, vec b, vec c)
{
    EACH_FOUR c.four[i] = vfmaq_f32(vnegq_f32(c.four[i]), a.four[i], b.four[i]);
    return c;
}

/* To the nearest whole number, ties to even. */
INLINED vec
vec_round(vec x)
{
    EACH_FOUR x.four[i] = vrndnq_f32(x.four[i]);
    return x;
}

/* 2 ** power, of which the exponent is a normal number's. */
INLINED float32x4_t
power_of_two(int32x4_t power)
{
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(power, vdupq_n_s32(127)), 23));
}

/* x * 2 ** whole, in two steps since 2 ** 128 is no float32; for whole >= -126 and x of about 1. */
INLINED vec
vec_scale(vec x, vec whole)
{
    EACH_FOUR
    {
        const float32x4_t bounded = vminq_f32(vmaxq_f32(whole.four[i], vdupq_n_f32(-252.0f)), vdupq_n_f32(254.0f));
        const int32x4_t power = vcvtq_s32_f32(bounded), half = vshrq_n_s32(power, 1);
        x.four[i] = vmulq_f32(vmulq_f32(x.four[i], power_of_two(half)), power_of_two(vsubq_s32(power, half)));
    }
    return x;
}

INLINED vec
vec_zero_where_below(vec x, float bound, vec y)
{
    EACH_FOUR
    {
        const uint32x4_t is_below = vcltq_f32(x.four[i], vdupq_n_f32(bound));
        y.four[i] = vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y.four[i]), is_below));
    }
    return y;
}

/* The bits of lanes 4 * number to 4 * number + 3 in a mask of 16. */
INLINED uint32x4_t
bits_of_four(int number)
{
    const uint32x4_t first = {1, 2, 4, 8};
    return vshlq_u32(first, vdupq_n_s32(4 * number));
}

/* `yes` in the lanes where a > b, `no` in the others. */
INLINED vec
vec_where_greater(vec a, vec b, vec yes, vec no)
{
    EACH_FOUR no.four[i] = vbslq_f32(vcgtq_f32(a.four[i], b.four[i]), yes.four[i], no.four[i]);
    return no;
}

/* A mask of the lanes that are at least `bound`. */
INLINED uint32_t
vec_at_least(vec x, float bound)
{
    uint32x4_t found = vdupq_n_u32(0);
    EACH_FOUR found = vorrq_u32(found, vandq_u32(vcgeq_f32(x.four[i], vdupq_n_f32(bound)), bits_of_four(i)));
    return vaddvq_u32(found);
}

/* a * b in the lanes of the mask, `otherwise` in the others. */
INLINED vec
vec_mul_where(uint32_t mask, vec a, vec b, vec otherwise)
{
    EACH_FOUR
    {
        const uint32x4_t is_in_mask = vtstq_u32(vdupq_n_u32(mask), bits_of_four(i));
        otherwise.four[i] = vbslq_f32(is_in_mask, vmulq_f32(a.four[i], b.four[i]), otherwise.four[i]);
    }
    return otherwise;
}

/* The sum of all lanes: halves are added until one lane is left. */
INLINED float
vec_sum(vec x)
{
    const float32x4_t low = vaddq_f32(x.four[2], x.four[0]), high = vaddq_f32(x.four[3], x.four[1]);
    const float32x4_t four = vaddq_f32(high, low);
    const float32x2_t two = vadd_f32(vget_high_f32(four), vget_low_f32(four));
    return vget_lane_f32(two, 1) + vget_lane_f32(two, 0);
}

INLINED float
vec_highest(vec x)
{
    const float32x4_t low = higher(x.four[2], x.four[0]), high = higher(x.four[3], x.four[1]);
    const float32x4_t four = higher(high, low), two = higher(four, vextq_f32(four, four, 2));
    return vgetq_lane_f32(higher(two, vextq_f32(two, two, 1)), 0);
}

/* The larger magnitude in each lane; what is not finite is larger than all numbers. */
INLINED vec
vec_max_magnitude(vec magnitude, vec x)
{
    EACH_FOUR
    {
        const int32x4_t bits = vreinterpretq_s32_f32(vabsq_f32(x.four[i]));
        magnitude.four[i] = vreinterpretq_f32_s32(vmaxq_s32(vreinterpretq_s32_f32(magnitude.four[i]), bits));
    }
    return magnitude;
}

/* The largest lane of magnitudes. */
INLINED float
vec_highest_magnitude(vec x)
{
    const vec two = vec_max_magnitude((vec){{x.four[0], x.four[1]}}, (vec){{x.four[2], x.four[3]}});
    const int32x4_t one = vmaxq_s32(vreinterpretq_s32_f32(two.four[0]), vreinterpretq_s32_f32(two.four[1]));
    return vget_lane_f32(vreinterpret_f32_s32(vdup_n_s32(vmaxvq_s32(one))), 0);
}

INLINED vec
load_bfloat16(const uint16_t *from, int64_t count)
{
    uint16_t some[LANES] = {0};
    if (count < LANES) {
        memcpy(some, from, count * sizeof *from);
        from = some;
    }
    vec x;
    EACH_FOUR x.four[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from + 4 * i), 16));
    return x;
}

/* Rounded to bfloat16, ties to even, in the upper half of each lane; subnormal numbers become 0. */
INLINED uint32x4_t
round_four(float32x4_t x)
{
    const uint32x4_t bits = vreinterpretq_u32_f32(x), sign = vandq_u32(bits, vdupq_n_u32(0x80000000));
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t is_small = vcltq_f32(vabsq_f32(x), vdupq_n_f32(0x1p-126f));
    uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    rounded = vbslq_u32(is_small, sign, rounded);
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x00400000));
    rounded = vbslq_u32(vceqq_f32(x, x), rounded, quiet);
    return vandq_u32(rounded, vdupq_n_u32(0xffff0000));
}

INLINED void
store_bfloat16(uint16_t *to, int64_t count, vec x)
{
    uint16_t some[LANES], *at = count < LANES ? some : to;
    EACH_FOUR vst1_u16(at + 4 * i, vshrn_n_u32(round_four(x.four[i]), 16));
    if (count < LANES)
        memcpy(to, some, count * sizeof *to);
}

#ifdef FLOAT32

INLINED vec
load_lanes(const element *from, int64_t count)
{
    float some[LANES] = {0};
    if (count < LANES)
        memcpy(some, from, count * sizeof *from);
    return vec_load(count < LANES ? some : from);
}

INLINED void
store_lanes(element *to, int64_t count, vec x)
{
    float some[LANES];
    vec_store(count < LANES ? some : to, x);
    if (count < LANES)
        memcpy(to, some, count * sizeof *to);
}

INLINED weights
weights_of(words_t w, int part)
{
    (void)part;
    weights x;
    EACH_FOUR x.four[i] = vreinterpretq_f32_u32(w.four[i]);
    return x;
}

#else

/* x, rounded to an element, as operands of a GEMM. */
INLINED void
store_operands(operand *to, vec x)
{
    EACH_FOUR vst1q_f32(to + 4 * i, vreinterpretq_f32_u32(round_four(x.four[i])));
}

/* The second elements of pairs (part 0), then the first ones. */
INLINED weights
weights_of(words_t w, int part)
{
    weights x;
    EACH_FOUR
    {
        const uint32x4_t upper = vandq_u32(w.four[i], vdupq_n_u32(0xffff0000));
        x.four[i] = vreinterpretq_f32_u32(part == 0 ? upper : vshlq_n_u32(w.four[i], 16));
    }
    return x;
}

#endif

INLINED words_t
load_words(const element *from)
{
    words_t w;
    EACH_FOUR w.four[i] = vreinterpretq_u32_u8(vld1q_u8((const uint8_t *)(from + 4 * i * PER_WORD)));
    return w;
}

/* sum + the products of an element of a row, the last of its word first, and of 16 columns. */
INLINED vec
add_products(vec sum, const operand *word, int part, weights w)
{
    return vec_fmadd(w, vec_all(word[PER_WORD - 1 - part]), sum);
}

/* 16 float16. */
INLINED vec
load_halves(const uint16_t *from)
{
    vec x;
    EACH_FOUR x.four[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + 4 * i)));
    return x;
}

/* 16 signed bytes. */
INLINED vec
load_bytes(const int8_t *from)
{
    const int8x16_t bytes = vld1q_s8(from);
    const int16x8_t halves[2] = {vmovl_s8(vget_low_s8(bytes)), vmovl_s8(vget_high_s8(bytes))};
    vec x;
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        x.four[2 * i] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(halves[i])));
        x.four[2 * i + 1] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(halves[i])));
    }
    return x;
}

/* Bits 4 * index to 4 * index + 3 of 16 words, from 0 to 15. */
INLINED vec
nibbles_of(words_t w, int index)
{
    vec x;
    EACH_FOUR x.four[i] = vcvtq_f32_u32(vandq_u32(vshlq_u32(w.four[i], vdupq_n_s32(-4 * index)), vdupq_n_u32(15)));
    return x;
}

#include "vector_neon_integers.h"

/* Transposes up to 16 rows of up to 16 words; missing ones become 0. */
INLINED void
transpose_words(const element *from, int64_t stride, int rows, int words, element *to, int64_t to_stride)
{
    for (int word = 0; word < words; word += 4)
        for (int row = 0; row < 16; row += 4) {
            uint32x4_t a[4] = {{0}};
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
                if (row + i < rows)
                    memcpy(a + i, from + (row + i) * stride + word * PER_WORD, smaller(words - word, 4) * sizeof(int32_t));
            const uint32x4x2_t even = vzipq_u32(a[0], a[2]), odd = vzipq_u32(a[1], a[3]);
            const uint32x4x2_t left = vzipq_u32(even.val[0], odd.val[0]), right = vzipq_u32(even.val[1], odd.val[1]);
            const uint32x4_t columns[4] = {left.val[0], left.val[1], right.val[0], right.val[1]};
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
                if (word + i < words)
                    memcpy(to + (word + i) * to_stride + row * PER_WORD, columns + i, sizeof *columns);
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
#pragma GCC unroll 4
    for (int64_t at = 0; at < COLUMNS; at += 8)
        vst2q_u16(to + 2 * at, ((uint16x8x2_t){{vld1q_u16(even + at), vld1q_u16(odd + at)}})); /* a macro in clang */
}

#undef EACH_FOUR
