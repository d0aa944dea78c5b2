/* The part of `vector_neon.h` for GEMMs of integers, in exact sums of 32 bits; with the dot product of Armv8.2 (SDOT),
 * if the processor `has_dot`, in one instruction.
 */
#ifdef __linux__
#include <sys/auxv.h>
#endif

typedef struct {
    int32x4_t four[FOURS];
} ints; /* of 16 columns */

enum {
    INT_ROWS = 4,      /* of a tile at most: sums of integers fill 16 of the 32 registers; those of float32 are in memory */
    INT_WIDE_ROWS = 1, /* rows up to which a tile has both halves of a panel's columns */
};

#define CAN_HAVE_DOT
#define DOT_IS_SIGNED

INLINED int
processor_has_dot(void)
{
#ifdef __linux__
    enum { SDOT = 1 << 20 }; /* HWCAP_ASIMDDP, which older systems' headers do not name */
    return (getauxval(AT_HWCAP) & SDOT) != 0;
#elif defined(__ARM_FEATURE_DOTPROD)
    return 1;
#else
    return 0;
#endif
}

INLINED ints
ints_all(int32_t x)
{
    ints all;
    EACH_FOUR all.four[i] = vdupq_n_s32(x);
    return all;
}

INLINED ints
ints_add(ints a, ints b)
{
    EACH_FOUR a.four[i] = vaddq_s32(a.four[i], b.four[i]);
    return a;
}

INLINED vec
vec_of_ints(ints x)
{
    vec y;
    EACH_FOUR y.four[i] = vcvtq_f32_s32(x.four[i]);
    return y;
}

INLINED ints
ints_mul(ints a, ints b)
{
    EACH_FOUR a.four[i] = vmulq_s32(a.four[i], b.four[i]);
    return a;
}

INLINED ints
high_halves(ints x)
{
    EACH_FOUR x.four[i] = vshrq_n_s32(x.four[i], 16);
    return x;
}

INLINED ints
low_halves(ints x)
{
    EACH_FOUR x.four[i] = vshrq_n_s32(vshlq_n_s32(x.four[i], 16), 16);
    return x;
}

INLINED ints
load_ints(const int32_t *from)
{
    ints x;
    EACH_FOUR x.four[i] = vld1q_s32(from + 4 * i);
    return x;
}

/* 16 numbers of 16 bits, with or without a sign. */
INLINED ints
load_shorts(const int16_t *from, int has_sign)
{
    ints x;
    EACH_FOUR
    {
        const int16x4_t some = vld1_s16(from + 4 * i);
        x.four[i] = has_sign ? vmovl_s16(some) : vreinterpretq_s32_u32(vmovl_u16(vreinterpret_u16_s16(some)));
    }
    return x;
}

/* The lower halves of words and the upper half of a number whose lower half is 0. */
INLINED ints
join_halves(ints low, const int32_t *high)
{
    EACH_FOUR low.four[i] = vorrq_s32(vandq_s32(low.four[i], vdupq_n_s32(0xffff)), vdupq_n_s32(*high));
    return low;
}

/* Adds the products of both halves of words, which have signs. */
INLINED ints
add_pairs(int has_dot, ints sum, ints a, ints b)
{
    (void)has_dot;
    EACH_FOUR
    {
        const int16x8_t x = vreinterpretq_s16_s32(a.four[i]), y = vreinterpretq_s16_s32(b.four[i]);
        const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y)), high = vmull_high_s16(x, y);
        sum.four[i] = vaddq_s32(sum.four[i], vpaddq_s32(low, high));
    }
    return sum;
}

/* Code number `index` of each of 16 words: of 4 bits without a sign, or of 8 with one. */
INLINED vec
code_of(words_t w, int bits, int index)
{
    ints codes;
    EACH_FOUR
    {
        const uint32x4_t top = vshlq_u32(w.four[i], vdupq_n_s32(32 - bits - bits * index));
        codes.four[i] = bits == 4 ? vreinterpretq_s32_u32(vshrq_n_u32(top, 28))
                                  : vshrq_n_s32(vreinterpretq_s32_u32(top), 24);
    }
    return vec_of_ints(codes);
}

/* Bits 4 * index to 4 * index + 3 of 16 words as numbers of e2m1, twice. */
INLINED vec
e2m1_of(words_t w, int index)
{
    const int8x16_t numbers = {E2M1_TWICE};
    ints found;
    EACH_FOUR
    {
        const uint32x4_t nibbles = vandq_u32(vshlq_u32(w.four[i], vdupq_n_s32(-4 * index)), vdupq_n_u32(15));
        const int8x16_t lowest = vqtbl1q_s8(numbers, vreinterpretq_u8_u32(nibbles));
        found.four[i] = vshrq_n_s32(vshlq_n_s32(vreinterpretq_s32_s8(lowest), 24), 24);
    }
    return vec_of_ints(found);
}

/* Bits 0 to 3 of each byte (part 0), or 4 to 7. */
INLINED words_t
split_nibbles(words_t w, int part)
{
    EACH_FOUR
    {
        const uint8x16_t bytes = vreinterpretq_u8_u32(w.four[i]);
        w.four[i] = vreinterpretq_u32_u8(part ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15)));
    }
    return w;
}

/* Numbers of e2m1, twice, in the bits that `split_nibbles` takes; as `add_bytes` reads them. */
INLINED words_t
split_e2m1(int has_dot, words_t w, int part)
{
    (void)has_dot;
    const int8x16_t numbers = {E2M1_TWICE};
    w = split_nibbles(w, part);
    EACH_FOUR w.four[i] = vreinterpretq_u32_s8(vqtbl1q_s8(numbers, vreinterpretq_u8_u32(w.four[i])));
    return w;
}

/* The sums of four products of signed bytes, of 4 columns, added to `sum`. */
INLINED int32x4_t
add_dots_four(int32x4_t sum, int8x16_t bytes, int8x16_t codes)
{
    /* no intrinsic: the files are compiled for processors without it, too */
    __asm__(".arch armv8.2-a+dotprod\n\tsdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(bytes), "w"(codes));
    return sum;
}

/* The same in four instructions. Two products are within 16 bits, since codes are from -127 to 127. */
INLINED int32x4_t
add_pairs_four(int32x4_t sum, int8x16_t bytes, int8x16_t codes)
{
    const int16x8_t low = vmull_s8(vget_low_s8(bytes), vget_low_s8(codes)), high = vmull_high_s8(bytes, codes);
    return vpadalq_s16(sum, vpaddq_s16(low, high));
}

INLINED ints
add_bytes(int has_dot, ints sum, words_t bytes, const int8_t *codes)
{
    const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(word_at(codes)));
    EACH_FOUR
    {
        const int8x16_t y = vreinterpretq_s8_u32(bytes.four[i]);
        sum.four[i] = has_dot ? add_dots_four(sum.four[i], y, x) : add_pairs_four(sum.four[i], y, x);
    }
    return sum;
}

#define NIBBLES_ARE_BYTES 1

/* 16 codes, from -127 to 127; if they `are_paired`, of each eight those with even indices first. */
INLINED void
store_codes(int8_t *to, vec codes, int are_paired)
{
    const uint8x16_t order = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
    int16x4_t fours[FOURS];
    EACH_FOUR fours[i] = vmovn_s32(vcvtq_s32_f32(codes.four[i])); /* whole numbers */
    const int8x8_t low = vmovn_s16(vcombine_s16(fours[0], fours[1])), high = vmovn_s16(vcombine_s16(fours[2], fours[3]));
    const int8x16_t bytes = vcombine_s8(low, high);
    vst1q_s8(to, are_paired ? vqtbl1q_s8(bytes, order) : bytes);
}

/* 16 whole numbers as ones of 16 bits. */
INLINED void
store_shorts(int16_t *to, vec numbers)
{
    EACH_FOUR vst1_s16(to + 4 * i, vmovn_s32(vcvtq_s32_f32(numbers.four[i])));
}
