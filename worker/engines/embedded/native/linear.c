/* Linear layers: GEMMs of rows and a weight packed into panels, with an epilogue. */
#include <stdlib.h>

#include "finish.h"
#include "groups.h"
#include "panels.h"

enum {
    PART_ROWS = 192,   /* rows that share a part of a panel while it is in the cache */
    PART_WORDS = 1024, /* of a panel in such a part: 128 KiB */
#ifndef WITH_AMX
    /* Few rows wait for memory as long as they compute. They share smaller parts, so that what comes next is fetched at an
     * even pace, and not beside the first of them alone.
     */
    EVEN_ROWS = 64,
    EVEN_WORDS = 128,
#else
    EVEN_ROWS = 0,
    EVEN_WORDS = PART_WORDS,
#endif
};

/* All rows, [rows, inner] operands, times a panel. */
static void
compute_panel(const linear_t *l, int64_t number)
{
    float sums[PART_ROWS][COLUMNS] ALIGNED;
    const int64_t inner = l->gemm->inner, words = inner / PER_WORD;
    const element *panel = (const element *)l->gemm->weight + number * inner * COLUMNS;
    const operand *input = l->input;
    for (int64_t first = 0; first < l->rows; first += PART_ROWS) {
        const int64_t count = smaller(PART_ROWS, l->rows - first);
        const int64_t blocks = (count + ROWS - 1) / ROWS;
        const int64_t part = blocks > 1 && count <= EVEN_ROWS ? EVEN_WORDS : PART_WORDS;
        for (int64_t word = 0; word < words; word += part) {
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t start = count * block / blocks, stop = count * (block + 1) / blocks;
                multiply((int)(stop - start), input + (first + start) * inner + word * PER_WORD, inner,
                         panel + word * PANEL_STRIDE, PANEL_STRIDE, smaller(part, words - word), sums[start],
                         COLUMNS, word > 0);
            }
        }
        finish_rows(l, sizeof(element) == sizeof(uint16_t), first, count, number * COLUMNS, NULL, sums[0]);
    }
}

static void
compute_panels(const void *arguments, int64_t first, int64_t stop)
{
    for (int64_t number = first; number < stop; number++)
        compute_panel(arguments, number);
    end_multiplying();
}

/* Changes with the meaning of arguments; `_VERSION` in `native/libraries.py`. */
int32_t
kernels_version(void)
{
    return 28;
}

/* Lets OpenMP compute with one thread for this one, torch's operations in it too if torch has the same OpenMP. */
void
kernels_compute_alone(void)
{
    omp_set_num_threads(1);
}

/* A line for each structure of `arguments.h`: its name and its fields. */
const char *
kernels_arguments(void)
{
    return ALL_ARGUMENTS;
}

/* Whether the path has an instruction for a * b + c with one rounding; without, it is emulated, and slow. */
int32_t
kernels_have_fma(void)
{
#if defined(__FMA__) || defined(__FP_FAST_FMAF) || defined(__ARM_FEATURE_FMA)
    return 1;
#else
    return 0;
#endif
}

/* One element of a word of the test in `kernels_sum_in_order`: of any sign and of many sizes. */
static element
some_element(uint32_t number)
{
    const uint32_t mixed = number * 2654435761u;
    const float x = ((float)(mixed >> 8) / (1 << 23) - 1.0f) * (float)(1 << mixed % 13);
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    element rounded;
    bits >>= 32 - 8 * sizeof rounded;
    memcpy(&rounded, &bits, sizeof rounded);
    return rounded;
}

static float
widened_element(element x)
{
    uint32_t bits = 0;
    memcpy((char *)&bits + sizeof bits - sizeof x, &x, sizeof x); /* little-endian */
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

enum { TEST_WORDS = 72, TEST_LENGTH = TEST_WORDS * PER_WORD };

/* Whether `rows` rows times a panel have the bits of `expected`. */
static int
multiplies_to(int rows, const operand *operands, const element *panel, float expected[][COLUMNS])
{
    float found[ROWS][COLUMNS];
    multiply(rows, operands, TEST_LENGTH, panel, PANEL_STRIDE, TEST_WORDS, found[0], COLUMNS, 0);
    end_multiplying();
    return !memcmp(found, expected, rows * sizeof *found);
}

/* Whether the micro-kernel has the bits of its definition: whether this processor's instructions sum in its order. */
int32_t
kernels_sum_in_order(void)
{
    element row[TEST_LENGTH], panel[TEST_LENGTH * COLUMNS];
    operand operands[ROWS][TEST_LENGTH];
    float expected[ROWS][COLUMNS], wide_row[TEST_LENGTH], wide_column[COLUMNS][TEST_LENGTH];
    for (int i = 0; i < TEST_LENGTH * COLUMNS; i++)
        panel[i] = some_element(i);
    for (int column = 0; column < COLUMNS; column++)
        for (int i = 0; i < TEST_LENGTH; i++)
            wide_column[column][i] = widened_element(panel[(i / PER_WORD * COLUMNS + column) * PER_WORD + i % PER_WORD]);
    for (int r = 0; r < ROWS; r++) {
        for (int i = 0; i < TEST_LENGTH; i++)
            wide_row[i] = widened_element(row[i] = some_element((r + COLUMNS) * TEST_LENGTH + i));
        copy_operands(row, TEST_LENGTH, operands[r]);
        for (int column = 0; column < COLUMNS; column++)
            expected[r][column] = sum_by_definition(wide_row, wide_column[column], TEST_WORDS);
    }
    int is_same = 1;
    for (int rows = 1; rows <= ROWS; rows++)
        is_same &= multiplies_to(rows, operands[0], panel, expected);
    return is_same;
}

/* Rows that are widened, where the micro-kernel reads wider ones. */
typedef struct {
    const element *input;
    int64_t inner;
    operand *to;
} widening_t;

static void
widen(const void *arguments, int64_t first, int64_t stop)
{
    const widening_t *w = arguments;
    for (int64_t row = first; row < stop; row++)
        copy_operands(w->input + row * w->inner, w->inner, w->to + row * w->inner);
}

/* Widened rows of layers, whose inputs they become; layers that read the same rows one after the other share them. */
static void
widen_rows(linear_t *layers, const linear_t *given, int64_t count, operand *to, ready_t *ready, const threads_t *threads)
{
    widening_t *widenings = (widening_t *)(ready + count);
    int64_t rows = 0, number = 0;
    for (int64_t i = 0; i < count; i++)
        if (i && shares_rows(given + i, given + i - 1))
            layers[i].input = layers[i - 1].input;
        else {
            const int64_t inner = given[i].gemm->inner;
            widenings[number] = (widening_t){given[i].input, inner, to};
            ready[number] = (ready_t){widenings + number, given[i].rows, 0};
            layers[i].input = to;
            to += given[i].rows * inner;
            rows += given[i].rows;
            number++;
        }
    const group_job_t job = {ready, number, widen};
    parallel_for(threads, rows, rows > PART_ROWS ? 1 : PART_ROWS, compute_group, &job);
}

/* Returns 0, or -1 if there is no memory for widened rows. */
int32_t
linear(const linear_t *given, int64_t count, const threads_t *threads)
{
    const int widens = sizeof(operand) != sizeof(element);
    int64_t size = 0;
    for (int64_t i = 0; widens && i < count; i++)
        size += given[i].rows * given[i].gemm->inner * (int64_t)sizeof(operand);
    char *memory = malloc(count * (sizeof(linear_t) + sizeof(ready_t) + sizeof(widening_t)) + size);
    if (!memory)
        return -1;
    linear_t *layers = (linear_t *)memory;
    ready_t *ready = (ready_t *)(layers + count);
    memcpy(layers, given, count * sizeof *layers);
    if (widens)
        widen_rows(layers, given, count, (operand *)((widening_t *)(ready + count) + count), ready, threads);
    for (int64_t i = 0; i < count; i++)
        ready[i] = (ready_t){layers + i, (layers[i].gemm->columns + COLUMNS - 1) / COLUMNS, layers[i].follows};
    parallel_for_group(threads, ready, count, compute_panels);
    free(memory);
    return 0;
}
