/* Calls the native kernels with odd sizes, on buffers of exactly the size that each needs, so that AddressSanitizer
 * sees whatever is read or written beside them. Prints a digest of the results, which is the same on every processor.
 * Compiled with the kernels' sources by `test_native_sanitizers.py`.
 */
#include <stdio.h>
#include <stdlib.h>
#ifdef ASK_FOR_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "epilogue.h"
#include "fuzz_numbers.h"
#include "kv_rows.h"
#include "kernels.h"

#ifdef FLOAT32
#include "half.h"
#include "weights.h"

#ifdef INTEGERS_WITH_AMX
#define integer_linear integer_linear_amx
#endif
#ifdef DEQUANTISES_WITH_AMX
#define quantised_linear dequantised_linear_amx
#endif
#endif

static int64_t
one_of(const int64_t *choices, int64_t count)
{
    return choices[below(count)];
}
#define ONE_OF(...) one_of((const int64_t[]){__VA_ARGS__}, sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t))

static threads_t
some_threads(void)
{
    return (threads_t){(int32_t)(1 + 4 * below(2)), NULL};
}

static element *
some(int64_t count)
{
    element *buffer = malloc(count * sizeof *buffer);
    for (int64_t i = 0; i < count; i++) {
        const float x = (float)below(2001) / 1000.0f - 1.0f;
        memcpy(buffer + i, (const char *)&x + sizeof x - sizeof *buffer, sizeof *buffer); /* little-endian */
    }
    return buffer;
}

static float *
some_floats(int64_t count)
{
    float *buffer = malloc(count * sizeof *buffer);
    for (int64_t i = 0; i < count; i++)
        buffer[i] = (float)below(2001) / 1000.0f - 1.0f;
    return buffer;
}

/* Floats, or as many bfloat16 or float16. */
static void *
some_matrix(int64_t count, int64_t is_narrow)
{
    float *floats = some_floats(count);
    if (!is_narrow)
        return floats;
    uint16_t *narrow = malloc(count * sizeof *narrow);
    for (int64_t i = 0; i < count; i++)
        memcpy(narrow + i, (char *)(floats + i) + sizeof *narrow, sizeof *narrow); /* little-endian */
    free(floats);
    return narrow;
}

static uint64_t digest = 14695981039346656037u;

/* FNV-1a of all results so far. */
static void
add_bytes_to_digest(const void *results, int64_t count)
{
    const unsigned char *bytes = results;
    for (int64_t i = 0; i < count; i++)
        digest = (digest ^ bytes[i]) * 1099511628211u;
}

static void
add_to_digest(const element *results, int64_t count)
{
    add_bytes_to_digest(results, count * (int64_t)sizeof *results);
}

static void
fuzz_linear(void)
{
    const int64_t rows = below(40), inner = PER_WORD * ONE_OF(1, 3, 16, 40, 1100), columns = 1 + below(70);
    const int64_t padded = (columns + COLUMNS - 1) / COLUMNS * COLUMNS;
    element *x = some(rows * inner), *panels = some(padded * inner), *bias = some(columns);
    element *other = some(rows * columns), *y = some(rows * columns);
    float *sums = malloc(rows * columns * sizeof *sums), *norm = some_floats(inner);
    const int64_t epilogue = below(MULTIPLY_CLAMPED + 1), has_bias = below(2);
    const threads_t threads = some_threads();
    const gemm_t gemm = {.columns = columns, .inner = inner, .weight = panels, .bias = has_bias ? bias : NULL};
    for (int32_t is_unrounded = 0; is_unrounded < 2; is_unrounded++)
        linear(&(linear_t){x, rows, &gemm, other, is_unrounded ? (void *)sums : y, (int32_t)epilogue, is_unrounded}, 1,
               &threads);
    rms_norm(&(rms_norm_t){panels, padded, inner, inner, norm, panels, 1e-5f}, &threads);
    add_to_digest(y, rows * columns);
    add_to_digest((const element *)sums, rows * columns * PER_WORD);
#ifdef FLOAT32
    soft_cap(y, rows * columns, 3.0f, &threads);
    add_to_digest(y, rows * columns);
#endif
    add_to_digest(panels, padded * inner);
    void *const all[] = {x, panels, bias, other, y, sums, norm};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

#ifdef FLOAT32
/* Finite numbers, float16 or float32; or bfloat16 or float32. */
static void *
some_numbers(int64_t count, int is_half, int is_bfloat16)
{
    if (!is_half && !is_bfloat16)
        return some(count);
    uint16_t *buffer = malloc(count * sizeof *buffer);
    for (int64_t i = 0; i < count; i++)
        buffer[i] = (uint16_t)(below(2) << 15 | (is_half ? below(0x4000) : 0x3e00 + below(0x200)));
    return buffer;
}

/* Scales of a weight as whole numbers of units, so small that its elements have 16 bits; see `whole_scales.py`. */
static void
add_steps(gemm_t *gemm, int64_t padded)
{
    const int64_t inner = gemm->inner, spans = (inner + 127) / 128;
    int64_t span = (inner + spans * 64 - 1) / (spans * 64) * 64, step = gemm->group;
    for (int64_t rest = span; rest;) {
        const int64_t next = step % rest;
        step = rest;
        rest = next;
    }
    gemm->span = span;
    gemm->step = gemm->group == inner ? span : step;
    const int64_t count = padded * ((inner + gemm->step - 1) / gemm->step) * (gemm->offsets ? 2 : 1);
    int16_t *steps = malloc(count * sizeof *steps);
    for (int64_t i = 0; i < count; i++)
        steps[i] = (int16_t)((int)below(250) - 125);
    gemm->steps = steps;
    gemm->units = some_floats(padded);
}

/* Rows are rounded to 8 bits if it `is_integer`. */
static void
fuzz_quantised(int is_integer)
{
    const int32_t bits = below(2) ? 4 : 8, is_half = (int32_t)below(2), is_bfloat16 = (int32_t)below(2);
    const int32_t is_unrounded = (int32_t)below(2), has_offsets = (int32_t)below(2), has_bias = (int32_t)below(2);
    const int64_t row = ONE_OF(1, 7, 20, 33, 300);
    const int64_t group = bits == 4 ? ONE_OF(8, 16, 32) : is_integer ? ONE_OF(16, 32, row) : ONE_OF(1, 7, 16, 300);
    const int64_t inner = group * (is_integer && group == row ? 1 : ONE_OF(1, 3, 9, 35));
    const int64_t rows = below(40), columns = 1 + below(70), words = (inner * bits + 31) / 32;
    const int64_t padded = (columns + COLUMNS - 1) / COLUMNS * COLUMNS, scales = padded * (inner / group);
    const int64_t size_of_codes = is_integer ? padded * words * 4 : padded * inner * bits / 8;
    unsigned char *codes = malloc(size_of_codes);
    for (int64_t i = 0; i < size_of_codes; i++)
        codes[i] = (unsigned char)below(256);
    void *scale = some_numbers(scales, is_half, 0), *offset = some_numbers(scales, is_half, 0);
    void *x = some_numbers(rows * inner, 0, is_bfloat16), *bias = some_numbers(columns, 0, is_bfloat16);
    void *other = some_numbers(rows * columns, 0, is_bfloat16);
    const int64_t size = is_bfloat16 && !is_unrounded ? 2 : 4;
    void *y = malloc(rows * columns * size);
    const int32_t epilogue = (int32_t)below(RELU + 1);
    const threads_t threads = some_threads();
    const int32_t is_e2m1 = bits == 4 && !has_offsets && below(2);
    gemm_t gemm = {columns, inner, codes,   has_bias ? bias : NULL, scale, has_offsets ? offset : NULL, group,
                   bits,    is_half, is_e2m1 ? 0.0f : -8.0f, is_integer, is_e2m1};
    if (is_integer)
        add_steps(&gemm, padded);
    (is_integer ? integer_linear : quantised_linear)(
        &(linear_t){x, rows, &gemm, other, y, epilogue, is_unrounded, is_bfloat16}, 1, &threads);
    add_bytes_to_digest(y, rows * columns * size);
    const int64_t ids[] = {below(columns), columns - 1, 0, is_unrounded ? columns : 0};
    const int64_t bytes = inner * (is_bfloat16 ? 2 : 4);
    char *unpacked = calloc(4, bytes);
    const int32_t failed = unpack_rows(&(unpacking_t){&gemm, ids, 4, unpacked, is_bfloat16});
    add_bytes_to_digest(&failed, sizeof failed);
    add_bytes_to_digest(unpacked, 4 * bytes);
    free(unpacked);
    void *const all[] = {codes, scale, offset, x, bias, other, y, (void *)gemm.steps, (void *)gemm.units};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}
#endif

#ifdef FLOAT32
/* Masks of two rows, as long as the rows or not. */
static void
fuzz_masks(void)
{
    const int64_t width = ONE_OF(1, 31, 32, 33, 700), rows = 3, size = rows * width, count = below(40);
    float *logits = malloc(size * sizeof *logits);
    uint32_t *words = malloc((count + 1) * sizeof *words);
    for (int64_t i = 0; i < size; i++)
        logits[i] = below(9) ? (float)below(100) : -INFINITY;
    for (int64_t i = 0; i < count; i++)
        words[i] = below(3) ? UINT32_MAX : (uint32_t)below(INT64_C(1) << 31);
    const mask_t masks[] = {{2, words, count}, {0, words, count / 2}};
    const threads_t threads = some_threads();
    apply_masks(logits, width, width, masks, 2, &threads);
    add_bytes_to_digest(logits, size * (int64_t)sizeof *logits);
    free(logits);
    free(words);
}

/* What is found of rows; rounded, since the logarithm is the C library's. */
typedef struct {
    int64_t counts[3], ranks[3], found[3], most, *top_ids;
    double logprobs[3], *top_logprobs;
} scores_t;

static scores_t
some_scores(int64_t rows, int64_t width)
{
    scores_t scores = {.most = ONE_OF(1, 5, width)};
    for (int64_t row = 0; row < rows; row++)
        scores.counts[row] = below(scores.most + 2) - 1;
    scores.top_ids = malloc(rows * scores.most * sizeof *scores.top_ids);
    scores.top_logprobs = malloc(rows * scores.most * sizeof *scores.top_logprobs);
    return scores;
}

static void
add_scores_to_digest(scores_t *scores, int64_t rows)
{
    for (int64_t row = 0; row < rows; row++) {
        if (scores->counts[row] < 0 || !scores->ranks[row])
            continue;
        const float logprob = isfinite(scores->logprobs[row]) ? (float)scores->logprobs[row] : 0.0f;
        add_bytes_to_digest(&logprob, sizeof logprob);
        add_bytes_to_digest(scores->ranks + row, sizeof *scores->ranks);
        add_bytes_to_digest(scores->top_ids + row * scores->most, scores->found[row] * (int64_t)sizeof *scores->top_ids);
        for (int64_t i = 0; i < scores->found[row]; i++) {
            const float each = (float)scores->top_logprobs[row * scores->most + i];
            add_bytes_to_digest(&each, sizeof each);
        }
    }
    free(scores->top_ids);
    free(scores->top_logprobs);
}

/* Tokens of rows, each by controls of its own, and what could be drawn; a row without a finite logit has none. */
static void
fuzz_draws(const float *logits, int64_t rows, int64_t width)
{
    float divisors[3], highest[3];
    double log_min_ps[3], shares[3], uniforms[3];
    int64_t top_ks[3], ids[3];
    const threads_t threads = some_threads();
    const int64_t words = (width + 31) / 32;
    char *memory = malloc(threads.count * drawing_memory(width));
    uint32_t *kept = calloc(rows * words, sizeof *kept);
    scores_t scores = some_scores(rows, width);
    for (int64_t row = 0; row < rows; row++) {
        divisors[row] = (float)ONE_OF(1, 2, 10, 25) / 10.0f;
        log_min_ps[row] = below(2) ? -INFINITY : (double)below(80) / -10.0;
        top_ks[row] = ONE_OF(0, 0, 1, 20, 700, 5000);
        shares[row] = (double)ONE_OF(0, 5, 9, 10, 10) / 10.0;
        uniforms[row] = (double)below(1 << 20) / (1 << 20);
    }
    const drawing_t drawing = {.logits = logits, .rows = rows, .stride = width, .width = width, .offset = 384.0,
                               .divisors = divisors, .log_min_ps = log_min_ps, .top_ks = top_ks, .shares = shares,
                               .uniforms = uniforms, .ids = ids, .highest = highest, .memory = memory,
                               .kept = below(2) ? kept : NULL, .counts = below(4) ? scores.counts : NULL,
                               .most = scores.most, .logprobs = scores.logprobs, .ranks = scores.ranks,
                               .found = scores.found, .top_ids = scores.top_ids, .top_logprobs = scores.top_logprobs};
    draw_tokens(&drawing, &threads);
    add_bytes_to_digest(ids, rows * (int64_t)sizeof *ids);
    add_bytes_to_digest(highest, rows * (int64_t)sizeof *highest);
    add_bytes_to_digest(kept, rows * words * (int64_t)sizeof *kept);
    add_scores_to_digest(&scores, rows);
    free(memory);
    free(kept);
}

/* Log probabilities of tokens of rows, and of the highest ones. */
static void
fuzz_scores(const void *logits, int32_t is_float64, int64_t rows, int64_t width)
{
    int64_t never[3], tokens[3];
    double divisors[3];
    const int64_t num_never = below(width > 3 ? 4 : 1);
    scores_t scores = some_scores(rows, width);
    for (int64_t i = 0; i < num_never; i++)
        never[i] = i ? never[i - 1] + 1 + below((width - 1 - never[i - 1]) / 3 + 1) : below(width / 2);
    for (int64_t row = 0; row < rows; row++) {
        divisors[row] = (double)ONE_OF(1, 2, 10, 25) / 10.0;
        tokens[row] = below(width);
    }
    const scoring_t scoring = {.logits = logits, .is_float64 = is_float64, .rows = rows, .stride = width, .width = width,
                               .divisors = below(2) ? divisors : NULL, .ranked = below(2) ? width : below(width + 1),
                               .never = never, .num_never = num_never, .tokens = tokens, .counts = scores.counts,
                               .most = scores.most, .logprobs = scores.logprobs, .ranks = scores.ranks,
                               .found = scores.found, .top_ids = scores.top_ids, .top_logprobs = scores.top_logprobs};
    const threads_t threads = some_threads();
    score_tokens(&scoring, &threads);
    add_scores_to_digest(&scores, rows);
}

/* A row whose logits are spread, tie or are mostly masked, and its prefixes. The sample of 9001, every
 * third 16 of them, may mislead.
 */
static void
fuzz_weights(void)
{
    const int64_t width = ONE_OF(1, 64, 65, 700, 3000, 9001, 9001), grain = ONE_OF(1, 500), blocks = (width + 63) / 64;
    const int64_t one_in = ONE_OF(1, 1, 1, 5, 50), kept = below(width), misleads = below(2);
    float *logits = malloc(width * sizeof *logits), *keys = malloc(2 * width * sizeof *keys);
    int64_t *ids = malloc(width * sizeof *ids), *weights = malloc(2 * width * sizeof *weights);
    int64_t *sums = malloc(blocks * sizeof *sums);
    double *numbers = malloc(width * sizeof *numbers);
    float highest = -INFINITY;
    for (int64_t i = 0; i < width; i++) {
        logits[i] = i == kept || !below(one_in) ? (float)(below(8001) / grain * grain) / 400.0f - 10.0f : -INFINITY;
        if (misleads)
            logits[i] = (i / 16 % 3 ? 9.5f : 10.0f) + logits[i] / 100.0f;
        numbers[i] = (double)(below(2) ? below(900000) : below(900)) / -1000.0;
        highest = logits[i] > highest ? logits[i] : highest;
    }
    const int64_t rows = width % 3 ? 1 : 3;
    const threads_t threads = some_threads();
    block_maxima(logits, rows, width / rows, width / rows, keys, &threads);
    add_bytes_to_digest(keys, rows * ((width / rows + 63) / 64) * (int64_t)sizeof *keys);
    float *const values = keys;
    highest_ids(logits, rows, width / rows, width / rows, ids, values, &threads);
    add_bytes_to_digest(ids, rows * (int64_t)sizeof *ids);
    add_bytes_to_digest(values, rows * (int64_t)sizeof *values);
    exponentials(numbers, width);
    add_bytes_to_digest(numbers, width * (int64_t)sizeof *numbers);
    const weighing_t w = {highest, 384.0, below(3) ? -INFINITY : highest - (float)ONE_OF(0, 3, 4)};
    const int64_t total = weigh(&w, logits, width, sums, below(2) ? weights : NULL);
    add_bytes_to_digest(sums, blocks * (int64_t)sizeof *sums);
    weigh(&w, logits, width, NULL, weights);
    add_bytes_to_digest(weights, width * (int64_t)sizeof *weights);
    const int64_t targets[] = {0, 1, total / 3, total - total / 3, total - total / 1000, total, total + 1};
    for (size_t i = 0; i < sizeof targets / sizeof *targets; i++) {
        const int64_t count = take_prefix(&w, logits, width, total + 1, targets[i], ids, keys, weights);
        add_bytes_to_digest(&count, sizeof count);
        add_bytes_to_digest(ids, count * (int64_t)sizeof *ids);
        add_bytes_to_digest(weights, count * (int64_t)sizeof *weights);
    }
    fuzz_draws(logits, rows, width / rows);
    fuzz_scores(logits, 0, rows, width / rows);
    fuzz_scores(numbers, 1, rows, width / rows);
    fuzz_masks();
    void *const all[] = {logits, keys, ids, weights, sums, numbers};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}
#endif

#ifdef FLOAT32
/* Super-blocks of small and large numbers, of zeros and of one number, given in each type; what is added to the digest is
 * of no NaN, whose bits are the processor's. Blocks in which a weight is not finite give codes that nobody asks for.
 */
static void
fuzz_super_blocks(void)
{
    static void (*const kernels[])(const blocks_t *, const threads_t *) = {round_q4_k, round_q6_k, round_q8_0, round_q4_0,
                                                                           round_q4_1};
    enum { KERNELS = sizeof kernels / sizeof *kernels };
    static const int of_codes[KERNELS] = {128, 256, 256, 128, 128}, of_scales[KERNELS] = {32, 64, 16, 16, 16};
    static const int of_offsets[KERNELS] = {32, 0, 0, 0, 16}; /* bytes for each 256 weights */
    const int64_t count = ONE_OF(0, 1, 2, 3, 33), size = 256 * count;
    const int32_t source = (int32_t)below(3);
    float *weights = malloc(size * sizeof *weights);
    uint16_t *halves = malloc(size * sizeof *halves);
    const threads_t threads = some_threads();
    for (int64_t group = 0; group < 16 * count; group++) {
        const int64_t kind = below(8), exponent = 2 * below(30) - 50;
        for (int64_t i = 16 * group; i < 16 * (group + 1); i++) {
            const float x = ldexpf((float)below(2001) / 1000.0f - 1.0f, (int)(kind == 0 ? exponent : -4 * kind));
            weights[i] = kind == 1 ? 0.0f : kind == 2 ? 0.25f : x;
            halves[i] = half_of(weights[i]);
            if (source == 1)
                memcpy(halves + i, (char *)(weights + i) + 2, sizeof *halves);
        }
    }
    for (int kernel = 0; kernel < KERNELS; kernel++)
        for (int is_finite = 1; is_finite >= 0; is_finite--) {
            const int64_t blocks = count * (kernel < 2 ? 1 : 8), at = size ? below(size) : 0;
            uint8_t *codes = malloc(count * of_codes[kernel]);
            char *scales = malloc(count * of_scales[kernel]), *offsets = malloc(count * of_offsets[kernel]);
            int32_t found[2] = {0, 0};
            const float kept = size ? weights[at] : 0.0f;
            const uint16_t kept_half = size ? halves[at] : 0;
            if (!is_finite && size) {
                weights[at] = ONE_OF(0, 1, 2) ? NAN : INFINITY;
                halves[at] = (uint16_t)ONE_OF(0x7f80, 0xff81, 0xffff);
            }
            const blocks_t b = {source ? (void *)halves : weights, blocks, source, codes, scales, offsets, found};
            kernels[kernel](&b, &threads);
            if (is_finite) {
                add_bytes_to_digest(codes, count * of_codes[kernel]);
                add_bytes_to_digest(scales, count * of_scales[kernel]);
                add_bytes_to_digest(offsets, count * of_offsets[kernel]);
                add_bytes_to_digest(found, sizeof found);
            } else if (size && found[0] < 0x7f800000) {
                printf("a weight that is not finite is not seen\n");
                exit(1);
            }
            if (size) {
                weights[at] = kept;
                halves[at] = kept_half;
            }
            free(codes);
            free(scales);
            free(offsets);
        }
    free(weights);
    free(halves);
}

static void
fuzz_panels(void)
{
    const int64_t count = ONE_OF(1, 5, 31, 32, 33, 70), width = ONE_OF(1, 7, 15, 16, 17, 50), size = ONE_OF(1, 2, 4);
    const int64_t panels = (count + COLUMNS - 1) / COLUMNS * COLUMNS * width * size;
    const threads_t threads = some_threads();
    uint8_t *rows = malloc(count * width * size), *packed = malloc(panels);
    for (int64_t i = 0; i < count * width * size; i++)
        rows[i] = (uint8_t)below(256);
    fill_panels(rows, count, width, (int32_t)size, packed, &threads);
    add_bytes_to_digest(packed, panels);
    free(rows);
    free(packed);
}
#endif

#ifdef FLOAT32
enum { MOST_CODE_BYTES = 2 };
#else
enum { MOST_CODE_BYTES = 1 };
#endif

/* Rows of the KV cache. */
static char *
some_rows(int64_t count, int64_t width, int32_t code_bytes)
{
    const int64_t bytes = kv_row_bytes(width, code_bytes);
    element *elements = some(count * width);
    if (!code_bytes)
        return (char *)elements;
    char *rows = malloc(count * bytes);
    for (int64_t i = 0; i < count; i++)
        quantise_row(elements + i * width, width, code_bytes, rows + i * bytes);
    free(elements);
    return rows;
}

static void
fuzz_attention(int32_t code_bytes)
{
    const int64_t kv_heads = 1 + below(2), group = 1 + below(3), heads = kv_heads * group;
    const int64_t width = ONE_OF(2, 6, 30, 34, 64), window = ONE_OF(0, 1, 20);
    const threads_t threads = some_threads();
    const int64_t has_norm = below(2), has_softcap = below(2), has_rope = below(4), has_sinks = below(2);
    const int64_t rotary = below(2) ? width : 2;
    const int64_t size = ONE_OF(3, 16, 24, 48, 64, 80, 100), tokens = 1 + below(100), pages = (tokens + size - 1) / size;
    const int64_t most = 96 / group, start = below(tokens), count = 1 + below(smaller(most, tokens - start));
    const tile_t tile = {0, count, start, 0};
    element *qkv = some(tokens * (heads + 2 * kv_heads) * width), *query = some(tokens * heads * width);
    element *cosine = some(tokens * rotary), *sine = some(tokens * rotary);
    float *norm = some_floats(width), *sinks = some_floats(heads);
    char *keys = some_rows(pages * kv_heads * size, width, code_bytes);
    char *values = some_rows(pages * kv_heads * size, width, code_bytes);
    element *y = some(count * heads * width);
    int64_t *table = malloc(pages * sizeof *table), *page = malloc(tokens * sizeof *page);
    int64_t *slot = malloc(tokens * sizeof *slot);
    for (int64_t i = 0; i < pages; i++)
        table[i] = pages - 1 - i;
    for (int64_t i = 0; i < tokens; i++) {
        page[i] = table[i / size];
        slot[i] = i % size;
    }
    const rotation_t rotation = {
        .qkv = qkv, .tokens = tokens, .heads = heads, .kv_heads = kv_heads, .width = width, .rotary = rotary,
        .cosine = has_rope ? cosine : NULL, .sine = has_rope ? sine : NULL, .query_norm = has_norm ? norm : NULL,
        .key_norm = norm, .query = query, .keys = keys, .values = values, .page_size = size, .pages = page,
        .slots = slot, .epsilon = 1e-6f, .is_interleaved = (int32_t)below(2), .code_bytes = code_bytes};
    rotate_and_store(&rotation, &threads);
    const attention_t attention = {
        .query = query, .query_stride = heads * width, .output = y, .keys = keys, .values = values,
        .kv_heads = kv_heads, .group = group, .width = width, .page_size = size, .page_table = table, .tiles = &tile,
        .num_tiles = 1, .window = window, .scale = 0.2f, .softcap = has_softcap ? 5.0f : 0.0f, .code_bytes = code_bytes,
        .sinks = has_sinks ? sinks : NULL};
    attend(&attention, &threads);
    add_to_digest(query, tokens * heads * width);
    add_bytes_to_digest(keys, pages * kv_heads * size * kv_row_bytes(width, code_bytes));
    add_to_digest(y, count * heads * width);
    void *const all[] = {qkv, query, cosine, sine, norm, sinks, keys, values, y, table, page, slot};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static gemm_t *
some_gemm(int64_t columns, int64_t inner)
{
    const int64_t padded = (columns + COLUMNS - 1) / COLUMNS * COLUMNS;
    gemm_t *gemm = calloc(1, sizeof *gemm);
    gemm->columns = columns;
    gemm->inner = inner;
    gemm->weight = some(padded * inner);
    gemm->bias = some(columns);
    return gemm;
}

static void
free_gemm(const gemm_t *gemm)
{
    if (!gemm)
        return;
    free((void *)gemm->weight);
    free((void *)gemm->bias);
    free((void *)gemm);
}

static experts_t *
some_experts(int64_t hidden, int64_t inner)
{
    const int64_t count = 1 + below(5);
    experts_t *experts = calloc(1, sizeof *experts);
    const gemm_t **gemms = malloc(3 * count * sizeof *gemms);
    for (int64_t i = 0; i < count; i++) {
        gemms[i] = some_gemm(inner, hidden);
        gemms[count + i] = some_gemm(inner, hidden);
        gemms[2 * count + i] = some_gemm(hidden, inner);
    }
    *experts = (experts_t){.router = some_gemm(count, hidden), .gates = gemms, .ups = gemms + count,
                           .downs = gemms + 2 * count, .count = count, .top_k = 1 + below(count),
                           .normalises = (int32_t)below(2)};
    return experts;
}

static void
free_experts(const experts_t *experts)
{
    if (!experts)
        return;
    for (int64_t i = 0; i < 3 * experts->count; i++)
        free_gemm(experts->gates[i]);
    free((void *)experts->gates);
    free_gemm(experts->router);
    free((void *)experts);
}

#define MODEL_LAYERS 2

/* The linear layers of a layer, as LoRA numbers them. */
static void
gemms_of(const layer_t *l, const gemm_t *found[LORA_GEMMS])
{
    const gemm_t *const all[LORA_GEMMS] = {l->query_proj, l->key_proj, l->value_proj, l->output_proj,
                                           l->gate,       l->up,       l->down};
    memcpy(found, all, sizeof all);
}

/* B of a linear layer of these columns, of whose panels some have none; `width` sums of A. */
static lora_panel_t *
some_lora_panels(int64_t columns, int64_t width)
{
    const int64_t panels = (columns + COLUMNS - 1) / COLUMNS;
    lora_panel_t *found = calloc(panels + 1, sizeof *found);
    for (int64_t i = 0; i < panels; i++) {
        const int64_t first = below(width), count = 1 + below(width - first), type = below(3);
        if (below(4))
            found[i] = (lora_panel_t){some_matrix(count * COLUMNS, type), first, count, type};
    }
    return found;
}

/* An adapter, whose A have at most `widest` sums each; some linear layers have none. */
static lora_layer_t *
some_adapter(const layer_t *layers, int64_t widest)
{
    static const int inputs[LORA_GEMMS] = {QKV_INPUT, QKV_INPUT, QKV_INPUT, OUTPUT_INPUT, MLP_INPUT, MLP_INPUT, DOWN_INPUT};
    lora_layer_t *adapter = calloc(MODEL_LAYERS, sizeof *adapter);
    for (int i = 0; i < MODEL_LAYERS; i++) {
        const gemm_t *gemms[LORA_GEMMS];
        gemms_of(layers + i, gemms);
        for (int k = 0; k < LORA_GEMMS; k++) {
            if (!gemms[k] || !below(4))
                continue;
            lora_input_t *input = adapter[i].inputs + inputs[k];
            if (!input->width) {
                input->width = LANES * (1 + below(widest / LANES));
                input->type = below(3);
                input->a = some_matrix(input->width * gemms[k]->inner, input->type);
            }
            adapter[i].gemms[k] = some_lora_panels(gemms[k]->columns, input->width);
        }
    }
    return adapter;
}

static void
free_adapter(lora_layer_t *adapter, const layer_t *layers)
{
    for (int i = 0; i < MODEL_LAYERS; i++) {
        const gemm_t *gemms[LORA_GEMMS];
        gemms_of(layers + i, gemms);
        for (int k = 0; k < LORA_GEMMS; k++) {
            const lora_panel_t *panels = adapter[i].gemms[k];
            for (int64_t panel = 0; panels && panel * COLUMNS < gemms[k]->columns; panel++)
                free((void *)panels[panel].b);
            free((void *)panels);
        }
        for (int k = 0; k < LORA_INPUTS; k++)
            free((void *)adapter[i].inputs[k].a);
    }
    free(adapter);
}

/* Layers of a step of which some tokens are read, or none; they have the bits of `whole`, those of a step that is read. */
static void
compute_some(const step_t *whole_step, const layer_t *layers, const element *x, const element *whole,
             const threads_t *threads)
{
    const int64_t tokens = whole_step->tokens, row = whole_step->hidden;
    for (int64_t each = 2; each < 5; each++) {
        step_t step = *whole_step;
        element *found = malloc(tokens * row * sizeof *found);
        int64_t count = 0;
        for (int64_t i = 0; i < tokens; i++)
            count += i % each == 1;
        int64_t *read = malloc(count * sizeof *read), next = 0;
        for (int64_t i = 0; i < tokens; i++)
            if (i % each == 1)
                read[next++] = i;
        const lora_layer_t **adapters = malloc(count * sizeof *adapters);
        int64_t *adapted = malloc(count * sizeof *adapted);
        for (int64_t i = 0; i < count && step.adapters; i++)
            adapters[i] = step.adapters[read[i]];
        for (int64_t i = 0; i < step.num_adapted; i++)
            if (step.adapted[i] % each == 1)
                adapted[step.num_read_adapted++] = step.adapted[i] / each;
        step.read = read, step.num_unread = tokens - count;
        step.read_adapters = step.adapters ? adapters : NULL, step.read_adapted = adapted;
        step.read_tiles = step.tiles, step.num_read_tiles = count ? step.num_tiles : 0;
        memcpy(found, x, tokens * row * sizeof *found);
        decoder_layers(&step, layers, MODEL_LAYERS, found, threads);
        for (int64_t i = 0; i < count; i++)
            if (memcmp(found + read[i] * row, whole + read[i] * row, row * sizeof *found))
                abort();
        free(found);
        free(read);
        free(adapters);
        free(adapted);
    }
}

/* Some tokens at the beginning of a sequence, on one page; without LoRA, or with that of two adapters. */
static void
fuzz_layers(void)
{
    const int64_t kv_heads = 1 + below(2), heads = kv_heads * (1 + below(3)), width = ONE_OF(2, 6, 34);
    const int64_t hidden = ONE_OF(2, 30, 66), inner = ONE_OF(2, 50), tokens = 1 + below(20), size = tokens + below(9);
    const int64_t rotary = below(2) ? width : 2, ropes = 2;
    const int32_t code_bytes = (int32_t)below(MOST_CODE_BYTES + 1);
    const threads_t threads = some_threads();
    const int64_t of_keys = kv_heads * width, qkv = heads * width + 2 * of_keys;
    layer_t layers[MODEL_LAYERS];
    for (int i = 0; i < MODEL_LAYERS; i++) {
        const int64_t has_parts = below(2), is_whole = below(2), is_clamped = below(3) == 0;
        layers[i] = (layer_t){
            .input_norm = below(4) ? some_floats(hidden) : NULL, .mlp_norm = below(4) ? some_floats(hidden) : NULL,
            .attention_post_norm = below(2) ? some_floats(hidden) : NULL,
            .mlp_post_norm = below(2) ? some_floats(hidden) : NULL, .epsilon = 1e-5f, .head_epsilon = 1e-6f,
            .residual = below(2) ? 1.0f : 0.5f, .scale = 0.2f, .softcap = below(2) ? 5.0f : 0.0f,
            .norms_whole = (int32_t)is_whole, .rope = (int32_t)ONE_OF(-1, 0, 1),
            .activation = is_clamped ? CLAMPED : (int32_t)ONE_OF(SILU, GELU, GELU_TANH, RELU),
            .product = is_clamped ? MULTIPLY_CLAMPED : MULTIPLY, .window = ONE_OF(0, 3),
            .sinks = below(2) ? some_floats(heads) : NULL};
        if (below(2)) {
            layers[i].query_norm = some_floats(is_whole ? heads * width : width);
            layers[i].key_norm = some_floats(is_whole ? of_keys : width);
        } else
            layers[i].norms_whole = 0;
        layers[i].query_proj = some_gemm(has_parts ? qkv - 2 * of_keys : qkv, hidden);
        if (has_parts) {
            layers[i].key_proj = some_gemm(of_keys, hidden);
            layers[i].value_proj = some_gemm(of_keys, hidden);
        }
        layers[i].output_proj = some_gemm(hidden, heads * width);
        if (below(3) == 0)
            layers[i].experts = some_experts(hidden, inner);
        else {
            layers[i].gate = some_gemm(inner, hidden);
            layers[i].up = some_gemm(inner, hidden);
            layers[i].down = some_gemm(hidden, inner);
        }
        layers[i].keys = some_rows(kv_heads * size, width, code_bytes);
        layers[i].values = some_rows(kv_heads * size, width, code_bytes);
    }
    int64_t *page = calloc(tokens, sizeof *page), *slot = malloc(tokens * sizeof *slot);
    for (int64_t i = 0; i < tokens; i++)
        slot[i] = i;
    const tile_t tile = {0, tokens, 0, 0};
    element *cosine = some(ropes * tokens * rotary), *sine = some(ropes * tokens * rotary), *x = some(tokens * hidden);
    const int64_t lora_width = ONE_OF(LANES, 3 * LANES);
    lora_layer_t *const adapters[] = {some_adapter(layers, lora_width), some_adapter(layers, LANES)};
    const lora_layer_t **of_tokens = calloc(tokens, sizeof *of_tokens);
    int64_t *adapted = malloc(tokens * sizeof *adapted), num_adapted = 0;
    const int32_t has_lora = below(3) != 0;
    for (int64_t i = 0; i < tokens; i++) {
        const int64_t which = below(3);
        of_tokens[i] = which < 2 ? adapters[which] : NULL;
    }
    for (int which = 0; which < 2; which++)
        for (int64_t i = 0; i < tokens; i++)
            if (of_tokens[i] == adapters[which])
                adapted[num_adapted++] = i;
    const step_t step = {.tokens = tokens, .hidden = hidden, .heads = heads, .kv_heads = kv_heads, .width = width,
                         .rotary = rotary, .inner = inner, .cosine = cosine, .sine = sine, .pages = page,
                         .slots = slot, .page_table = page, .tiles = &tile, .num_tiles = 1, .page_size = size,
                         .is_interleaved = (int32_t)below(2), .code_bytes = code_bytes,
                         .adapters = has_lora && num_adapted ? of_tokens : NULL, .adapted = adapted,
                         .num_adapted = num_adapted, .lora_width = lora_width};
    element *partly = malloc(tokens * hidden * sizeof *partly);
    memcpy(partly, x, tokens * hidden * sizeof *partly);
    decoder_layers(&step, layers, MODEL_LAYERS, x, &threads);
    add_to_digest(x, tokens * hidden);
    compute_some(&step, layers, partly, x, &threads);
    free(partly);
    if (step.adapters) {
        const int64_t columns = layers[0].query_proj->columns;
        element *alone = malloc(tokens * columns * sizeof *alone);
        adapted_linear(&step, 0, &(linear_t){.input = x, .rows = tokens, .gemm = layers[0].query_proj, .output = alone},
                       &threads);
        add_to_digest(alone, tokens * columns);
        free(alone);
    }
    for (int i = 0; i < 2; i++)
        free_adapter(adapters[i], layers);
    for (int i = 0; i < MODEL_LAYERS; i++) {
        const layer_t *l = layers + i;
        const gemm_t *gemms[LORA_GEMMS];
        gemms_of(l, gemms);
        for (int k = 0; k < LORA_GEMMS; k++)
            free_gemm(gemms[k]);
        free_experts(l->experts);
        const void *const all[] = {l->input_norm, l->mlp_norm, l->attention_post_norm, l->mlp_post_norm, l->query_norm,
                                   l->key_norm,   l->sinks,    l->keys,                l->values};
        for (size_t k = 0; k < sizeof all / sizeof *all; k++)
            free((void *)all[k]);
    }
    void *const all[] = {page, slot, cosine, sine, x, of_tokens, adapted};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

#include "fuzz_groups.h"

int
main(int count, char **arguments)
{
    const int rounds = count > 1 ? atoi(arguments[1]) : 100;
    state = count > 2 ? strtoull(arguments[2], NULL, 10) : 1;
#ifdef ASK_FOR_TILES /* as native/libraries.py does */
    if (syscall(SYS_arch_prctl, 0x1023, 18))
        return 1;
#endif
    for (int i = 0; i < rounds; i++) {
        fuzz_linear();
        for (int32_t code_bytes = 0; code_bytes <= MOST_CODE_BYTES; code_bytes++)
            fuzz_attention(code_bytes);
        fuzz_layers();
        fuzz_group(linear, 0, 0);
#ifdef FLOAT32
        fuzz_group(quantised_linear, 1, 0);
        fuzz_group(integer_linear, 1, 1);
        fuzz_quantised(0);
        fuzz_quantised(1);
        fuzz_weights();
        fuzz_super_blocks();
        fuzz_panels();
#endif
    }
    printf("%016llx\n", (unsigned long long)digest);
    return 0;
}
