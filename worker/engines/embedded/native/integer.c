/* Linear layers on quantised weights and on rows that are rounded to 8 bits: GEMMs of integers.
 *
 * A row is rounded in spans of up to 128 elements: each element becomes code * scale, see `rounding.h`. A weight's scales
 * and offsets are whole numbers of a unit that its column has, see `whole_scales.py`: an element is
 *
 *     unit * ((code - base) * step + offset)
 *
 * with base 8 for codes of 4 bits, and 0 for those of 8 bits and numbers of e2m1, which are twice their values here. The
 * products of a span are added as integers, which is exact: |(code - base) * step + offset| is below 2^15, and the sum of
 * 128 products with codes of 8 bits below 2^30. A span then adds, in float32,
 *
 *     row's scale * sum
 *
 * with one rounding for the sum and one for the multiplication and addition, span after span from the first one on; and
 * all is multiplied by the unit. So a result has the same bits whatever number of rows is computed together, on all paths,
 * in whatever order a kernel adds integers.
 *
 * An element whose magnitude is more than OUTLIER times the mean of its row's is an outlier: it is 0 in its span, and is
 * multiplied as it is, in float32. Outliers are added after all spans, in ascending order.
 *
 * Codes of the weights lie in panels of 32 columns, [panels][words][32 columns]: words of eight codes of 4 bits, the
 * first one lowest, or of four signed bytes. Steps, with their offsets, are [panels][steps of a row][32 columns], and units
 * [panels][32 columns]. They belong to the kernels in float32; rows and results may be bfloat16 too.
 */
#ifdef FLOAT32
#include <stdlib.h>

#include "groups.h"
#include "integer_panels.h"
#include "integer_tiles.h"
#include "memory.h"
#include "rounded_rows.h"

enum {
    MANY = 256, /* blocks from which threads share in rounding them */
    LINE = 64,
};

/* A layer: its weight, its rows once they are rounded, and the number that codes of the weight count from, as they are
 * multiplied.
 */
typedef struct {
    quantised_t q;
    rounded_t r;
    int32_t zero;
} integers_t;

static void
round_rows(const void *arguments, int64_t first, int64_t stop)
{
    const integers_t *j = arguments;
    for (int64_t row = first; row < stop; row++)
        round_row(&j->q, &j->r, j->zero, row);
}

static void
compute_either(const void *arguments, int64_t first, int64_t stop)
{
    const integers_t *j = arguments;
    (j->r.is_for_amx ? compute_panels_in_tiles : compute_panels)(&j->q, &j->r, first, stop);
}

/* A layer, without memory for its rows. */
static integers_t
integers_of(const linear_t *l, int has_tiles)
{
    const quantised_t q = quantised_of(l);
    const int is_for_amx = has_tiles && q.rows > TILE_ROWS; /* VNNI is faster at fewer, which share an unpacked weight */
    const int64_t size = smaller(q.step, q.bits == 4 ? BLOCK : SPAN);
    const rounded_t r = {.span = q.span, .spans = (q.inner + q.span - 1) / q.span,
                         .size = size, .blocks = (q.inner + size - 1) / size,
                         .most = is_for_amx ? PAIR_ROWS : INT_ROWS, .is_for_amx = is_for_amx,
                         .words = is_for_amx ? (q.inner + DEPTH - 1) / DEPTH * DEPTH / WORD_BYTES
                                             : (q.inner + WORD_BYTES - 1) / WORD_BYTES,
                         .most_outliers = q.inner / OUTLIER + 1}; /* fewer, but for what the mean is rounded by */
    return (integers_t){q, r, q.bits == 4 && !q.is_e2m1 ? NIBBLES_BASE : byte_excess(processor_has_dot())};
}

/* Whether a layer reads the rows of another one, rounded in the same way. Outliers name the step that they meet: blocks of
 * one size may have steps of different ones.
 */
static int
shares_rounded(const integers_t *j, const integers_t *other)
{
    return has_rows_of(&j->q, &other->q) && j->q.bits == other->q.bits && j->q.step == other->q.step &&
           j->r.size == other->r.size && j->r.span == other->r.span && j->r.is_for_amx == other->r.is_for_amx &&
           j->zero == other->zero;
}

static int64_t
bytes_of_rows(const integers_t *j)
{
    const rounded_t *r = &j->r;
    const int64_t row_bytes = r->spans * (int64_t)sizeof(float) + (2 * r->blocks + 1) * (int64_t)sizeof(int32_t) +
                              r->words * WORD_BYTES + r->most_outliers * (int64_t)sizeof(outlier_t);
    const int64_t behind = r->is_for_amx ? TILE_ROWS * DEPTH : 0; /* the last rows are read as a whole tile */
    return (j->q.rows * row_bytes + behind + (int64_t)sizeof *r->num_outliers + 2 * LINE - 1) / LINE * LINE;
}

/* Gives a layer the memory of its rows. */
static void
place_rows(integers_t *j, char *memory)
{
    rounded_t *r = &j->r;
    r->codes = (int8_t *)memory; /* whole lines, for AMX */
    r->outliers = (outlier_t *)(memory + (j->q.rows * r->words * WORD_BYTES + LINE - 1) / LINE * LINE);
    r->scales = (float *)(r->outliers + j->q.rows * r->most_outliers);
    r->totals = (int32_t *)(r->scales + j->q.rows * r->spans);
    r->starts = r->totals + j->q.rows * r->blocks;
    r->num_outliers = r->starts + j->q.rows * r->blocks;
}

/* Rounds the rows of layers; those that read the same ones one after the other share them. */
static void
round_all(integers_t *layers, int64_t count, char *memory, ready_t *ready, const threads_t *threads)
{
    int64_t rows = 0, blocks = 0, number = 0;
    for (int64_t i = 0; i < count; i++) {
        integers_t *j = layers + i;
        if (i && shares_rounded(j, j - 1)) {
            j->r = j[-1].r;
            continue;
        }
        place_rows(j, memory);
        memory += bytes_of_rows(j);
        ready[number++] = (ready_t){j, j->q.rows, 0};
        rows += j->q.rows;
        blocks += j->q.rows * j->r.blocks;
    }
    const group_job_t job = {ready, number, round_rows};
    /* rows beside each other are written to the same lines: no thread steals single rows */
    parallel_for(threads, rows, blocks >= MANY ? rows / threads->count + 1 : rows, compute_group, &job);
    for (int64_t i = 0; i < number; i++)
        gather_outliers(&((const integers_t *)ready[i].arguments)->r, ready[i].units);
}

/* A group has a multiple of 8 elements that 32 is a multiple of, or a multiple of 32, or is a whole row; a row is a
 * multiple of 8 elements if codes have 4 bits. Returns 0, or -1 if there is no memory for the rounded rows.
 */
static int32_t
compute_layers(const linear_t *given, int64_t count, int has_tiles, const threads_t *threads)
{
    ready_t *ready = malloc(count * (sizeof *ready + sizeof(integers_t)));
    if (!ready)
        return -1;
    integers_t *layers = (integers_t *)(ready + count);
    int64_t size = 0;
    for (int64_t i = 0; i < count; i++) {
        layers[i] = integers_of(given + i, has_tiles);
        size += i && shares_rounded(layers + i, layers + i - 1) ? 0 : bytes_of_rows(layers + i);
    }
    char *memory = allocate(size);
    if (memory) {
        round_all(layers, count, memory, ready, threads);
        for (int64_t i = 0; i < count; i++)
            ready[i] = (ready_t){layers + i, (layers[i].q.columns + COLUMNS - 1) / COLUMNS, given[i].follows};
        parallel_for_group(threads, ready, count, compute_either);
    }
    const int32_t failed = memory ? 0 : -1;
    free(memory);
    free(ready);
    return failed;
}

typedef struct {
    const linear_t *layers;
    int64_t count;
    int has_tiles;
    int32_t failed;
} computing_t;

static void
compute_in_pool(const threads_t *threads, void *argument)
{
    computing_t *c = argument;
    c->failed = compute_layers(c->layers, c->count, c->has_tiles, threads);
}

/* As `compute_layers`, with one pool for rounding and multiplying. */
static int32_t
compute(const linear_t *layers, int64_t count, int has_tiles, const threads_t *threads)
{
    if (threads->pool || threads->count == 1)
        return compute_layers(layers, count, has_tiles, threads);
    computing_t computing = {layers, count, has_tiles, 0};
    with_pool(threads->count, compute_in_pool, &computing);
    return computing.failed;
}

int32_t
integer_linear(const linear_t *layers, int64_t count, const threads_t *threads)
{
    return compute(layers, count, 0, threads);
}

#ifdef CAN_HAVE_TILES
int32_t
integer_linear_amx(const linear_t *layers, int64_t count, const threads_t *threads)
{
    return compute(layers, count, 1, threads);
}

/* Whether AMX has the bits of the micro-kernel on this processor; 0 if there is no memory, too. */
int32_t
integers_in_tiles_are_exact(void)
{
    enum { TEST_ROWS = PAIR_ROWS + 1, LENGTH = SPAN + DEPTH + BLOCK, BLOCKS = LENGTH / BLOCK };
    int8_t codes[COLUMNS * LENGTH] ALIGNED;
    int16_t steps[2 * COLUMNS * BLOCKS] ALIGNED;
    float input[TEST_ROWS * LENGTH] ALIGNED, units[COLUMNS] ALIGNED;
    float expected[TEST_ROWS * COLUMNS] ALIGNED, found[TEST_ROWS * COLUMNS] ALIGNED;
    for (int i = 0; i < COLUMNS * LENGTH; i++)
        codes[i] = (int8_t)(i * 2654435761u >> 24);
    for (int i = 0; i < TEST_ROWS * LENGTH; i++)
        input[i] = (float)(int32_t)(i * 2246822519u);
    for (int i = 0; i < 2 * COLUMNS * BLOCKS; i++)
        steps[i] = (int16_t)((int32_t)(i * 3266489917u) >> 25); /* products with codes of 8 bits have 15 */
    for (int i = 0; i < COLUMNS; i++)
        units[i] = (float)(int32_t)(i * 668265263u);
    const threads_t alone = {1, NULL};
    for (int kind = 0; kind < 4; kind++) {
        const gemm_t gemm = {.columns = COLUMNS, .inner = LENGTH, .weight = codes,
                             .offsets = kind / 2 ? steps : NULL, /* some or none: they are in the steps */
                             .group = BLOCK, .bits = kind % 2 ? 4 : 8, .steps = steps, .units = units, .step = BLOCK,
                             .span = SPAN};
        linear_t layer = {.input = input, .rows = TEST_ROWS, .gemm = &gemm, .output = expected};
        if (compute(&layer, 1, 0, &alone))
            return 0;
        layer.output = found;
        if (compute(&layer, 1, 1, &alone) || memcmp(found, expected, sizeof found))
            return 0;
    }
    return 1;
}
#endif
#endif
