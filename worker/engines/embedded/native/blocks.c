/* Rounding to GGUF's types of blocks of 32 weights, Q8_0, Q4_0 and Q4_1, with the bits of llama.cpp's reference
 * (`quantize_row_q8_0_ref` and so on, in ggml-quants.c); `model/requantisation.py` is the same for processors without
 * these kernels. Everything belongs to the kernels in float32.
 */
#ifdef FLOAT32
#include "half.h"
#include "kernels.h"

enum {
    BLOCK = 32,
    GRAIN = 256, /* blocks that a thread takes at a time */
};

typedef struct {
    const float *weights;
    void *codes;
    uint16_t *scales, *offsets;
} rounding_t;

static inline float
highest_of(const float *x)
{
    return vec_highest(vec_max(vec_load(x), vec_load(x + LANES)));
}

static inline float
lowest_of(const float *x)
{
    const vec zero = vec_zero();
    return -vec_highest(vec_max(vec_sub(zero, vec_load(x)), vec_sub(zero, vec_load(x + LANES))));
}

static inline float
inverse_of(float scale)
{
    return scale == 0.0f ? 0.0f : 1.0f / scale;
}

/* Whole numbers cut off from x * inverse + shift, from 0 to 15, two to a byte; 0 for NaN. */
INLINED void
write_pairs(const float *x, float base, float inverse, float shift, uint8_t *codes)
{
    int32_t whole[BLOCK];
    for (int k = 0; k < BLOCK; k++) {
        const float code = (x[k] - base) * inverse + shift, least = code > 0.0f ? code : 0.0f;
        whole[k] = (int32_t)(least < 15.0f ? least : 15.0f);
    }
    for (int k = 0; k < BLOCK; k += 2)
        codes[k / 2] = (uint8_t)(whole[k] | whole[k + 1] << 4);
}

/* To the nearest whole number, halves away from zero, as `roundf`; 0 for what is beyond a code. */
INLINED vec
rounded_away(vec x)
{
    const vec zero = vec_zero(), one = vec_all(1.0f), magnitude = vec_max(x, vec_sub(zero, x));
    const vec size = vec_where_greater(vec_all(127.5f), magnitude, magnitude, zero), near = vec_round(size);
    const vec whole = vec_where_greater(near, size, vec_sub(near, one), near);
    const vec up = vec_where_greater(vec_all(0.5f), vec_sub(size, whole), whole, vec_add(whole, one));
    return vec_where_greater(zero, x, vec_sub(zero, up), up);
}

static void
round_to_q8_0(const void *arguments, int64_t first, int64_t stop)
{
    const rounding_t *r = arguments;
    for (int64_t block = first; block < stop; block++) {
        const float *x = r->weights + block * BLOCK;
        int8_t *codes = (int8_t *)r->codes + block * BLOCK;
        const float high = highest_of(x), low = -lowest_of(x), scale = (high > low ? high : low) / 127;
        const vec inverse = vec_all(inverse_of(scale));
        float whole[BLOCK] ALIGNED;
        for (int at = 0; at < BLOCK; at += LANES)
            vec_store(whole + at, rounded_away(vec_mul(vec_load(x + at), inverse)));
        for (int k = 0; k < BLOCK; k++)
            codes[k] = (int8_t)(int32_t)whole[k];
        r->scales[block] = half_of(scale);
    }
}

void
round_q8_0(const float *weights, int64_t count, int8_t *codes, uint16_t *scales, const threads_t *threads)
{
    parallel_for(threads, count, GRAIN, round_to_q8_0, &(rounding_t){weights, codes, scales, NULL});
}

/* The first weight of the largest magnitude. */
static inline float
largest_of(const float *x)
{
    const float high = highest_of(x), low = lowest_of(x);
    if (high != -low)
        return high > -low ? high : low;
    for (int k = 0; k < BLOCK; k++)
        if (fabsf(x[k]) == high)
            return x[k];
    return high;
}

static void
round_to_q4_0(const void *arguments, int64_t first, int64_t stop)
{
    const rounding_t *r = arguments;
    for (int64_t block = first; block < stop; block++) {
        const float *x = r->weights + block * BLOCK, scale = largest_of(x) / -8;
        write_pairs(x, 0.0f, inverse_of(scale), 8.5f, (uint8_t *)r->codes + block * (BLOCK / 2));
        r->scales[block] = half_of(scale);
    }
}

void
round_q4_0(const float *weights, int64_t count, uint8_t *codes, uint16_t *scales, const threads_t *threads)
{
    parallel_for(threads, count, GRAIN, round_to_q4_0, &(rounding_t){weights, codes, scales, NULL});
}

static void
round_to_q4_1(const void *arguments, int64_t first, int64_t stop)
{
    const rounding_t *r = arguments;
    for (int64_t block = first; block < stop; block++) {
        const float *x = r->weights + block * BLOCK, least = lowest_of(x), scale = (highest_of(x) - least) / 15;
        write_pairs(x, least, inverse_of(scale), 0.5f, (uint8_t *)r->codes + block * (BLOCK / 2));
        r->scales[block] = half_of(scale);
        r->offsets[block] = half_of(least);
    }
}

void
round_q4_1(const float *weights, int64_t count, uint8_t *codes, uint16_t *scales, uint16_t *offsets,
           const threads_t *threads)
{
    parallel_for(threads, count, GRAIN, round_to_q4_1, &(rounding_t){weights, codes, scales, offsets});
}
#endif
