/* Rounding to GGUF's types of super-blocks, Q4_K and Q6_K, with the bits of llama.cpp's reference.
 *
 * The search for the scale of a group is that of `make_qkx2_quants` and `make_qx_quants` of ggml-quants.c, without an
 * importance matrix. It adds up the terms of a group one after the other, in float32; here 16 groups are searched at
 * once, each in a lane. `model/super_blocks.py` is the same for processors without these kernels. Everything belongs
 * to the kernels in float32.
 */
#ifdef FLOAT32
#include "given_weights.h"
#include "half.h"

enum {
    SUPER_BLOCK = 256,
    Q4_GROUP = 32, /* weights with one scale */
    Q6_GROUP = 16,
    Q4_GROUPS = SUPER_BLOCK / Q4_GROUP,
    Q6_GROUPS = SUPER_BLOCK / Q6_GROUP,
    Q4_AT_ONCE = LANES / Q4_GROUPS, /* super-blocks whose groups fill the lanes: two, and one of Q6_K */
    GRAIN = 16,                     /* searches that a thread takes at a time */
};

#define LEAST_MAXIMUM 1e-15f /* GROUP_MAX_EPS: a smaller group is zeros */
#define INVALID(x) ((x) != (x))

/* Weights [lanes][group], transposed; missing lanes are 0. */
INLINED void
transpose(int group, const float *weights, int64_t lanes, float *columns)
{
    for (int k = 0; k < group; k++)
        for (int lane = 0; lane < LANES; lane++)
            columns[k * LANES + lane] = lane < lanes ? weights[lane * group + k] : 0.0f;
}

/* `nearest_int`, also beyond 2 ** 22, where it is no rounding any more. */
INLINED int32_t
nearest(float x)
{
    x += 12582912.0f;
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits & 0x007fffff) - 0x00400000;
}

INLINED int32_t
clipped(int32_t x, int32_t least, int32_t most)
{
    return x < least ? least : x > most ? most : x;
}

/* Rounded to a whole number, and clipped; NaN stays. */
INLINED vec
whole_between(vec x, float least, float most)
{
    return vec_min(vec_all(most), vec_max(vec_all(least), vec_round(x)));
}

/* The same of one number; 0 for NaN. */
INLINED int32_t
whole_code(float x, int32_t least, int32_t most)
{
    const float rounded = rintf(x);
    return INVALID(rounded) ? 0 : rounded < (float)least ? least : rounded > (float)most ? most : (int32_t)rounded;
}

/* x, rounded to float16 and widened again. */
static float
through_half(float x)
{
    return float_of_half(half_of(x));
}

/* Results of a search for 16 groups of Q4_K. A weight's code is (weight - base) * inverse. */
typedef struct {
    float scale[LANES], least[LANES], base[LANES], inverse[LANES];
} q4_search_t;

/* `make_qkx2_quants`: the least weighted squared error of 22 scales. */
static void
search_q4_k(const float *x, q4_search_t *found)
{
    const vec zero = vec_zero();
    float w[Q4_GROUP * LANES] ALIGNED, tried[Q4_GROUP * LANES] ALIGNED;
    vec square = zero, least = zero, most = vec_load(x);
    for (int at = 0; at < Q4_GROUP * LANES; at += LANES) {
        const vec weight = vec_load(x + at);
        square = vec_add(square, vec_mul(weight, weight));
        least = vec_min(least, weight);
        most = vec_max(most, weight);
    }
    const vec root = vec_sqrt(vec_div(square, vec_all(32.0f))), lowest = least;
    vec base = least, inverse = vec_div(vec_all(15.0f), vec_sub(most, least));
    vec scale = vec_div(vec_all(1.0f), inverse), error = zero, sum_w = zero, sum_x = zero;
    for (int at = 0; at < Q4_GROUP * LANES; at += LANES) {
        const vec weight = vec_load(x + at), importance = vec_add(root, vec_max(weight, vec_sub(zero, weight)));
        vec_store(w + at, importance);
        sum_w = vec_add(sum_w, importance);
        sum_x = vec_add(sum_x, vec_mul(importance, weight));
        const vec code = whole_between(vec_mul(vec_sub(weight, least), inverse), 0.0f, 15.0f);
        const vec off = vec_sub(vec_add(vec_mul(scale, code), least), weight);
        error = vec_add(error, vec_mul(importance, vec_mul(off, off)));
    }
    for (int step = 0; step < 21; step++) {
        const float widened = -1.0f + 0.1f * (float)step + 15.0f;
        const vec new_inverse = vec_div(vec_all(widened), vec_sub(most, least));
        vec sum_l = zero, sum_xl = zero, sum_l2 = zero;
        for (int at = 0; at < Q4_GROUP * LANES; at += LANES) {
            const vec weight = vec_load(x + at);
            const vec code = whole_between(vec_mul(vec_sub(weight, least), new_inverse), 0.0f, 15.0f);
            const vec product = vec_mul(vec_load(w + at), code);
            vec_store(tried + at, code);
            sum_l = vec_add(sum_l, product);
            sum_xl = vec_add(sum_xl, vec_mul(product, weight));
            sum_l2 = vec_add(sum_l2, vec_mul(product, code));
        }
        const vec divisor = vec_sub(vec_mul(sum_w, sum_l2), vec_mul(sum_l, sum_l));
        vec new_scale = vec_div(vec_sub(vec_mul(sum_w, sum_xl), vec_mul(sum_x, sum_l)), divisor);
        vec new_least = vec_div(vec_sub(vec_mul(sum_l2, sum_x), vec_mul(sum_l, sum_xl)), divisor);
        new_scale = vec_where_greater(new_least, zero, vec_div(sum_xl, sum_l2), new_scale);
        new_least = vec_where_greater(new_least, zero, zero, new_least);
        vec new_error = zero;
        for (int at = 0; at < Q4_GROUP * LANES; at += LANES) {
            const vec value = vec_add(vec_mul(new_scale, vec_load(tried + at)), new_least);
            const vec off = vec_sub(value, vec_load(x + at));
            new_error = vec_add(new_error, vec_mul(vec_load(w + at), vec_mul(off, off)));
        }
        new_error = vec_where_greater(divisor, zero, new_error, vec_all(INFINITY));
        inverse = vec_where_greater(error, new_error, new_inverse, inverse);
        base = vec_where_greater(error, new_error, least, base);
        scale = vec_where_greater(error, new_error, new_scale, scale);
        least = vec_where_greater(error, new_error, new_least, least);
        error = vec_where_greater(error, new_error, new_error, error);
    }
    /* A group of one number has the scale 0, and codes 0. */
    vec_store(found->scale, vec_where_greater(most, lowest, scale, zero));
    vec_store(found->least, least);
    vec_store(found->base, base);
    vec_store(found->inverse, vec_where_greater(most, lowest, inverse, zero));
}

/* Replaces `values` of a super-block by multiples of a step in float16, of which 63 make the largest; see `_sixths` in
 * `model/super_blocks.py`.
 */
static void
round_to_six_bits(float values[Q4_GROUPS])
{
    float largest = 0.0f;
    for (int group = 0; group < Q4_GROUPS; group++)
        largest = values[group] > largest || INVALID(values[group]) ? values[group] : largest;
    const float inverse = largest > 0.0f ? 63.0f / largest : 0.0f, step = through_half(largest / 63.0f);
    for (int group = 0; group < Q4_GROUPS; group++)
        values[group] = step * (float)clipped(nearest(inverse * values[group]) & 0xff, 0, 63);
}

/* Codes of a group whose scale and offset are known: of the search where the scale became 0. */
INLINED void
write_q4_codes(const float *weights, float scale, float minimum, float base, float inverse, uint8_t *codes)
{
    int32_t whole[Q4_GROUP];
    if (scale != 0.0f)
        for (int k = 0; k < Q4_GROUP; k++)
            whole[k] = clipped(nearest((weights[k] + minimum) / scale), 0, 15);
    else
        for (int k = 0; k < Q4_GROUP; k++)
            whole[k] = whole_code((weights[k] - base) * inverse, 0, 15);
    for (int k = 0; k < Q4_GROUP; k += 2)
        codes[k / 2] = (uint8_t)(whole[k] | whole[k + 1] << 4);
}

/* Whether one of some scales or offsets is infinite or not a number. */
INLINED int
are_beyond(const float *numbers, int64_t count)
{
    int found = 0;
    for (int64_t i = 0; i < count; i++)
        found |= !(fabsf(numbers[i]) <= FLT_MAX);
    return found;
}

static void
round_q4_blocks(const void *arguments, int64_t first, int64_t stop)
{
    const blocks_t *b = arguments;
    float buffer[Q4_AT_ONCE * SUPER_BLOCK] ALIGNED, x[Q4_GROUP * LANES] ALIGNED;
    q4_search_t found;
    vec magnitude = vec_zero();
    int is_beyond = 0;
    for (int64_t unit = first; unit < stop; unit++) {
        const int64_t block = unit * Q4_AT_ONCE, blocks = smaller(Q4_AT_ONCE, b->count - block);
        const float *weights = given_weights(b, block * SUPER_BLOCK, blocks * SUPER_BLOCK, buffer, &magnitude);
        transpose(Q4_GROUP, weights, blocks * Q4_GROUPS, x);
        search_q4_k(x, &found);
        for (int64_t at = 0; at < blocks * Q4_GROUPS; at += Q4_GROUPS) {
            float *scales = (float *)b->scales + block * Q4_GROUPS + at;
            float *offsets = (float *)b->offsets + block * Q4_GROUPS + at;
            for (int group = 0; group < Q4_GROUPS; group++) {
                scales[group] = found.scale[at + group];
                offsets[group] = -found.least[at + group];
            }
            round_to_six_bits(scales);
            round_to_six_bits(offsets);
            is_beyond |= are_beyond(scales, Q4_GROUPS) | are_beyond(offsets, Q4_GROUPS);
            for (int group = 0; group < Q4_GROUPS; group++) {
                const int64_t lane = at + group;
                uint8_t *codes = (uint8_t *)b->codes + (block * Q4_GROUPS + lane) * (Q4_GROUP / 2);
                write_q4_codes(weights + lane * Q4_GROUP, scales[group], offsets[group], found.base[lane],
                               found.inverse[lane], codes);
                offsets[group] = -offsets[group];
            }
        }
    }
    add_found(b, magnitude, is_beyond);
}

void
round_q4_k(const blocks_t *blocks, const threads_t *threads)
{
    parallel_for(threads, (blocks->count + Q4_AT_ONCE - 1) / Q4_AT_ONCE, GRAIN, round_q4_blocks, blocks);
}

/* `make_qx_quants` for 16 groups of Q6_K: the scale of each, and the inverse that its codes are found with; 0 both for a
 * group of zeros.
 */
static void
search_q6_k(const float *x, float *scales, float *inverses)
{
    const vec zero = vec_zero();
    float w[Q6_GROUP * LANES] ALIGNED, wx[Q6_GROUP * LANES] ALIGNED;
    vec size = zero, largest = zero;
    for (int at = 0; at < Q6_GROUP * LANES; at += LANES) {
        const vec weight = vec_load(x + at), magnitude = vec_max(weight, vec_sub(zero, weight));
        largest = vec_where_greater(magnitude, size, weight, largest);
        size = vec_max(magnitude, size);
        vec_store(w + at, vec_mul(weight, weight));
        vec_store(wx + at, vec_mul(vec_mul(weight, weight), weight));
    }
    vec inverse = zero, scale = zero, best = zero;
    for (int trial = 0; trial < 19; trial++) { /* 0, then from -9 to 9 */
        const int tenths = trial == 0 ? 0 : trial < 10 ? trial - 10 : trial - 9;
        const vec new_inverse = vec_div(vec_all(-(32.0f + 0.1f * (float)tenths)), largest);
        vec sum_lx = zero, sum_l2 = zero;
        for (int at = 0; at < Q6_GROUP * LANES; at += LANES) {
            const vec code = whole_between(vec_mul(new_inverse, vec_load(x + at)), -32.0f, 31.0f);
            sum_lx = vec_add(sum_lx, vec_mul(vec_load(wx + at), code));
            sum_l2 = vec_add(sum_l2, vec_mul(vec_mul(vec_load(w + at), code), code));
        }
        const vec new_scale = vec_div(sum_lx, sum_l2);
        if (trial == 0) {
            inverse = new_inverse;
            scale = vec_where_greater(sum_l2, zero, new_scale, sum_l2); /* or 0, or NaN */
            best = vec_mul(scale, sum_lx);
            continue;
        }
        /* better if sum_l2 > 0 and sum_lx ** 2 > best * sum_l2 */
        const vec gain = vec_where_greater(sum_l2, zero, vec_mul(sum_lx, sum_lx), vec_all(-INFINITY));
        const vec bound = vec_mul(best, sum_l2);
        inverse = vec_where_greater(gain, bound, new_inverse, inverse);
        scale = vec_where_greater(gain, bound, new_scale, scale);
        best = vec_where_greater(gain, bound, vec_mul(new_scale, sum_lx), best);
    }
    vec_store(scales, vec_where_greater(vec_all(LEAST_MAXIMUM), size, zero, scale));
    vec_store(inverses, vec_where_greater(vec_all(LEAST_MAXIMUM), size, zero, inverse));
}

/* Replaces the scales of a super-block by those of 8 bits, multiples of a step in float16. Returns 0 if all are zero. */
static int
round_to_eight_bits(float scales[Q6_GROUPS])
{
    float largest = 0.0f;
    for (int group = 0; group < Q6_GROUPS; group++)
        largest = fabsf(scales[group]) > fabsf(largest) || INVALID(scales[group]) ? scales[group] : largest;
    if (fabsf(largest) < LEAST_MAXIMUM) {
        memset(scales, 0, Q6_GROUPS * sizeof *scales);
        return 0;
    }
    const float inverse = -128.0f / largest, step = through_half(1.0f / inverse);
    for (int group = 0; group < Q6_GROUPS; group++) {
        const int32_t whole = nearest(inverse * scales[group]);
        scales[group] = step * (float)(whole < 127 ? whole : 127);
    }
    return 1;
}

static void
round_q6_blocks(const void *arguments, int64_t first, int64_t stop)
{
    const blocks_t *b = arguments;
    float buffer[SUPER_BLOCK] ALIGNED, x[SUPER_BLOCK] ALIGNED, inverses[Q6_GROUPS];
    vec magnitude = vec_zero();
    int is_beyond = 0;
    for (int64_t block = first; block < stop; block++) {
        const float *weights = given_weights(b, block * SUPER_BLOCK, SUPER_BLOCK, buffer, &magnitude);
        float *scales = (float *)b->scales + block * Q6_GROUPS;
        int8_t *codes = (int8_t *)b->codes + block * SUPER_BLOCK;
        transpose(Q6_GROUP, weights, Q6_GROUPS, x);
        search_q6_k(x, scales, inverses);
        if (!round_to_eight_bits(scales)) {
            memset(codes, -32, SUPER_BLOCK);
            continue;
        }
        is_beyond |= are_beyond(scales, Q6_GROUPS);
        for (int group = 0; group < Q6_GROUPS; group++) {
            const float *from = weights + group * Q6_GROUP, scale = scales[group], inverse = inverses[group];
            int8_t *to = codes + group * Q6_GROUP;
            if (scale != 0.0f)
                for (int k = 0; k < Q6_GROUP; k++)
                    to[k] = (int8_t)clipped(nearest(from[k] / scale), -32, 31);
            else if (inverse != 0.0f)
                for (int k = 0; k < Q6_GROUP; k++)
                    to[k] = (int8_t)whole_code(inverse * from[k], -32, 31);
            else
                memset(to, -32, Q6_GROUP);
        }
    }
    add_found(b, magnitude, is_beyond);
}

void
round_q6_k(const blocks_t *blocks, const threads_t *threads)
{
    parallel_for(threads, blocks->count, GRAIN, round_q6_blocks, blocks);
}
#endif
