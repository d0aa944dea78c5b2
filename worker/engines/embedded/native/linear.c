/* Linear layers: GEMMs of rows and a weight packed into panels, with an epilogue. */
#include <stdlib.h>

#include "epilogue.h"
#include "kernels.h"
#include "panels.h"

enum {
    TOGETHER = 192, /* rows that share a part of a panel while it is in the cache */
    WORDS = 1024,   /* of a panel in such a part: 128 KiB */
};

typedef struct {
    const operand *input; /* [rows, inner] */
    int64_t rows, inner;
    const element *panels; /* [ceil(columns / 32)][inner words][32 columns] */
    int64_t columns;
    const element *bias; /* [columns] or NULL */
    then_t then;
    const element *other; /* [rows, columns], the epilogue's operand */
    void *output;         /* [rows, columns] of elements, or of float32 */
    int is_unrounded;     /* whether they are float32 */
} linear_t;

/* The epilogue, element by element, and the only rounding. */
static inline void
finish(const linear_t *l, int64_t row, int64_t column, const float *sums)
{
    for (int half = 0; half < 2 && column < l->columns; half++, column += LANES, sums += LANES) {
        const int64_t count = l->columns - column, at = row * l->columns + column;
        vec y = vec_load(sums);
        if (l->bias)
            y = vec_add(y, load_lanes(l->bias + column, count));
        y = epilogue(l->then, y, takes_other(l->then) ? load_lanes(l->other + at, count) : y);
        if (l->is_unrounded)
            store_floats((float *)l->output + at, count, y);
        else
            store_lanes((element *)l->output + at, count, y);
    }
}

static void
compute_panel(const linear_t *l, int64_t number)
{
    float sums[TOGETHER][COLUMNS] ALIGNED;
    const element *panel = l->panels + number * l->inner * COLUMNS;
    const int64_t words = l->inner / PER_WORD;
    for (int64_t first = 0; first < l->rows; first += TOGETHER) {
        const int64_t count = smaller(TOGETHER, l->rows - first);
        const int64_t blocks = (count + ROWS - 1) / ROWS;
        for (int64_t word = 0; word < words; word += WORDS) {
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t start = count * block / blocks, stop = count * (block + 1) / blocks;
                multiply((int)(stop - start), l->input + (first + start) * l->inner + word * PER_WORD, l->inner,
                         panel + word * PANEL_STRIDE, PANEL_STRIDE, smaller(WORDS, words - word), sums[start],
                         COLUMNS, word > 0);
            }
        }
        for (int64_t row = 0; row < count; row++)
            finish(l, first + row, number * COLUMNS, sums[row]);
    }
    end_multiplying();
}

static void
compute_panels(const void *job, int64_t first, int64_t stop)
{
    for (int64_t number = first; number < stop; number++)
        compute_panel(job, number);
}

int32_t
kernels_version(void)
{
    return 12; /* of the functions' arguments; native/__init__.py knows it, too */
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

typedef struct {
    const element *input;
    int64_t inner;
    operand *to;
} widening_t;

/* Widens rows, where the micro-kernel reads wider ones. */
static void
widen(const void *job, int64_t first, int64_t stop)
{
    const widening_t *w = job;
    for (int64_t row = first; row < stop; row++)
        copy_operands(w->input + row * w->inner, w->inner, w->to + row * w->inner);
}

/* The result is of elements or, if it `is_unrounded`, of float32. Returns 0, or -1 if there is no memory for widened
 * rows.
 */
int32_t
linear(const element *input, int64_t rows, int64_t inner, const element *panels, int64_t columns, const element *bias,
       int32_t then, const element *other, void *output, int32_t is_unrounded, const team_t *team)
{
    operand *widened = NULL;
    if (sizeof(operand) != sizeof(element)) {
        widened = malloc((rows * inner + 1) * sizeof *widened);
        if (!widened)
            return -1;
        share_work(team, rows, rows > TOGETHER ? 1 : TOGETHER, widen, &(widening_t){input, inner, widened});
    }
    const operand *from = widened ? widened : (const operand *)input;
    const linear_t l = {from, rows, inner, panels, columns, bias, (then_t)then, other, output,
                        is_unrounded};
    const int64_t number = (columns + COLUMNS - 1) / COLUMNS;
    share_work(team, number, few_of(number, team), compute_panels, &l);
    free(widened);
    return 0;
}
