/* Rounding to GGUF's types of blocks of 32 weights, Q8_0, Q4_0 and Q4_1, with the bits of llama.cpp's reference
 * (`quantize_row_q8_0_ref` and so on, in ggml-quants.c); `model/requantisation.py` is the same for processors without
 * these kernels. The scales of 16 blocks are found at once, each in a lane. Everything belongs to the kernels in float32.
 */
#ifdef FLOAT32
#include "given_weights.h"
#include "half.h"

enum {
    BLOCK = 32,
    GRAIN = 256, /* blocks that a thread takes at a time */
};

/* Up to 16 blocks: their weights, and in a lane for each what their scales follow from. */
typedef struct {
    float buffer[LANES * BLOCK] ALIGNED;
    float low[LANES] ALIGNED, high[LANES] ALIGNED, scales[LANES] ALIGNED, inverses[LANES] ALIGNED;
    const float *weights;
    int64_t count;
    vec magnitude; /* of the weights of these and all before */
    int is_beyond; /* whether a scale or offset of theirs is not finite */
} group_t;

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

/* Reads the blocks from `first` on, before `stop`. */
INLINED void
read_group(group_t *g, const blocks_t *b, int64_t first, int64_t stop)
{
    g->count = smaller(LANES, stop - first);
    g->weights = given_weights(b, first * BLOCK, g->count * BLOCK, g->buffer, &g->magnitude);
    for (int64_t i = 0; i < g->count; i++) {
        g->low[i] = lowest_of(g->weights + i * BLOCK);
        g->high[i] = highest_of(g->weights + i * BLOCK);
    }
}

INLINED void
set_scales(group_t *g, vec scales)
{
    const vec zero = vec_zero(), inverses = vec_div(vec_all(1.0f), scales);
    vec_store(g->scales, scales);
    vec_store(g->inverses, vec_where_greater(scales, zero, inverses, vec_where_greater(zero, scales, inverses, zero)));
}

/* Writes scales or offsets of the blocks. */
INLINED void
write_halves(group_t *g, const float *numbers, uint16_t *to)
{
    uint16_t halves[LANES];
    int is_beyond = 0;
    for (int i = 0; i < LANES; i++)
        halves[i] = half_of(numbers[i]);
    for (int i = 0; i < LANES; i++)
        is_beyond |= i < g->count && (halves[i] & 0x7c00) == 0x7c00;
    g->is_beyond |= is_beyond;
    memcpy(to, halves, g->count * sizeof *halves);
}

/* Whole numbers cut off from 16 of x * inverse + shift, from 0 to 15; 0 for NaN. */
INLINED vec
cut_off(vec x, float inverse, float shift)
{
    const vec code = vec_add(vec_mul(x, vec_all(inverse)), vec_all(shift));
    const vec clipped = vec_min(vec_max(code, vec_zero()), vec_all(15.0f)), near = vec_round(clipped);
    return vec_where_greater(near, clipped, vec_sub(near, vec_all(1.0f)), near);
}

/* Eight codes of a byte each, the first one lowest, in four bytes. */
INLINED uint32_t
paired(uint64_t codes)
{
    codes = (codes | codes >> 4) & UINT64_C(0x00ff00ff00ff00ff);
    codes = (codes | codes >> 8) & UINT64_C(0x0000ffff0000ffff);
    return (uint32_t)(codes | codes >> 16);
}

/* The codes of a block, two to a byte. */
INLINED void
write_pairs(const float *x, float base, float inverse, float shift, uint8_t *codes)
{
    int8_t whole[BLOCK] ALIGNED;
    for (int at = 0; at < BLOCK; at += LANES)
        store_codes(whole + at, cut_off(vec_sub(vec_load(x + at), vec_all(base)), inverse, shift), 0);
    for (int at = 0; at < BLOCK; at += 8) {
        uint64_t eight;
        memcpy(&eight, whole + at, sizeof eight);
        const uint32_t four = paired(eight);
        memcpy(codes + at / 2, &four, sizeof four);
    }
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
    const blocks_t *b = arguments;
    group_t g = {.is_beyond = 0};
    for (int64_t block = first; block < stop; block += g.count) {
        read_group(&g, b, block, stop);
        const vec high = vec_load(g.high), low = vec_sub(vec_zero(), vec_load(g.low));
        set_scales(&g, vec_div(vec_where_greater(high, low, high, low), vec_all(127.0f)));
        for (int64_t i = 0; i < g.count; i++)
            for (int at = 0; at < BLOCK; at += LANES) {
                const vec code = vec_mul(vec_load(g.weights + i * BLOCK + at), vec_all(g.inverses[i]));
                store_codes((int8_t *)b->codes + (block + i) * BLOCK + at, rounded_away(code), 0);
            }
        write_halves(&g, g.scales, (uint16_t *)b->scales + block);
    }
    add_found(b, g.magnitude, g.is_beyond);
}

void
round_q8_0(const blocks_t *blocks, const threads_t *threads)
{
    parallel_for(threads, blocks->count, GRAIN, round_to_q8_0, blocks);
}

/* The first weight of the largest magnitude. */
static inline float
largest_of(const float *x, float low, float high)
{
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
    const blocks_t *b = arguments;
    group_t g = {.is_beyond = 0};
    for (int64_t block = first; block < stop; block += g.count) {
        read_group(&g, b, block, stop);
        for (int64_t i = 0; i < g.count; i++)
            g.scales[i] = largest_of(g.weights + i * BLOCK, g.low[i], g.high[i]);
        set_scales(&g, vec_div(vec_load(g.scales), vec_all(-8.0f)));
        for (int64_t i = 0; i < g.count; i++)
            write_pairs(g.weights + i * BLOCK, 0.0f, g.inverses[i], 8.5f,
                        (uint8_t *)b->codes + (block + i) * (BLOCK / 2));
        write_halves(&g, g.scales, (uint16_t *)b->scales + block);
    }
    add_found(b, g.magnitude, g.is_beyond);
}

void
round_q4_0(const blocks_t *blocks, const threads_t *threads)
{
    parallel_for(threads, blocks->count, GRAIN, round_to_q4_0, blocks);
}

static void
round_to_q4_1(const void *arguments, int64_t first, int64_t stop)
{
    const blocks_t *b = arguments;
    group_t g = {.is_beyond = 0};
    for (int64_t block = first; block < stop; block += g.count) {
        read_group(&g, b, block, stop);
        set_scales(&g, vec_div(vec_sub(vec_load(g.high), vec_load(g.low)), vec_all(15.0f)));
        for (int64_t i = 0; i < g.count; i++)
            write_pairs(g.weights + i * BLOCK, g.low[i], g.inverses[i], 0.5f,
                        (uint8_t *)b->codes + (block + i) * (BLOCK / 2));
        write_halves(&g, g.scales, (uint16_t *)b->scales + block);
        write_halves(&g, g.low, (uint16_t *)b->offsets + block);
    }
    add_found(b, g.magnitude, g.is_beyond);
}

void
round_q4_1(const blocks_t *blocks, const threads_t *threads)
{
    parallel_for(threads, blocks->count, GRAIN, round_to_q4_1, blocks);
}
#endif
