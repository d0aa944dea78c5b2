/* GEMMs with AMX in bfloat16 on quantised weights.
 *
 * Rows are rounded to bfloat16, and so are the weights, each code * scale + offset with one rounding to float32 before. A
 * result has the bits of `linear` in bfloat16 with AMX on these rows and weights, before that rounds it: the sum in AMX's
 * order (`panels_amx.h`) depends on the row alone.
 *
 * A part of a panel is unpacked into tiles in the L1 cache, and multiplied by all rows of a chunk, which stay in the L2
 * cache. Rows and results may be float32 too.
 */
#ifdef FLOAT32
#include "quantised.h"

#include "amx.h"

#ifdef CAN_HAVE_TILES
#include "groups.h"
#include "memory.h"

enum {
    STEP = 32,              /* elements of a row that one product of tiles sums */
    PAIRS = STEP / 2,       /* words of a tile */
    PART_STEPS = 8,         /* of a panel, unpacked: 16 KiB */
    BLOCK_ROWS = 2 * TILE_ROWS,
    CHUNK_ROWS = 512,       /* at most */
    CHUNK_BYTES = 1 << 20,  /* of rounded rows */
    HALF = PAIRS * 2 * LANES, /* elements of a tile of columns */
    STEP_SIZE = 2 * HALF,     /* elements of a step of a panel */
    FETCHED = 16384,        /* bytes by which codes are fetched before they are read */
};

#define WITH_BFLOAT16 __attribute__((target("avx512bf16")))

typedef struct {
    const quantised_t *q;
    uint16_t *rows; /* [blocks of up to 32 rows][steps][rows of the block][32] */
    int64_t steps, panels;
    int64_t chunk; /* rows */
} dequantised_t;

/* Two vectors of numbers as bfloat16, those of `low` first. */
INLINED WITH_BFLOAT16 __m512i
rounded(vec low, vec high)
{
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

/* Rows as tiles of bfloat16. */
static WITH_BFLOAT16 void
round_rows(const void *arguments, int64_t first, int64_t stop)
{
    const dequantised_t *d = arguments;
    const quantised_t *q = d->q;
    for (int64_t row = first; row < stop; row++) {
        const int64_t block = row / BLOCK_ROWS * BLOCK_ROWS, count = smaller(BLOCK_ROWS, q->rows - block);
        uint16_t *to = d->rows + (block * d->steps + row - block) * STEP;
        for (int64_t at = 0; at < q->inner; at += STEP, to += count * STEP) {
            const int64_t from = row * q->inner + at, rest = q->inner - at;
            const vec low = read_lanes(q->input, from, rest, q->is_bfloat16);
            const vec high = rest > LANES ? read_lanes(q->input, from + LANES, rest - LANES, q->is_bfloat16) : vec_zero();
            _mm512_storeu_si512(to, rounded(low, high));
        }
    }
}

/* A word of each of 16 columns. */
INLINED WITH_BFLOAT16 void
store_pair(vec first, vec second, const group_t *g, const group_t *next, int half, uint16_t *to)
{
    static const uint16_t order[2 * LANES] ALIGNED = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const vec low = vec_fmadd(first, g->scale[half], g->offset[half]);
    const vec high = vec_fmadd(second, next->scale[half], next->offset[half]);
    _mm512_store_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(order), rounded(low, high)));
}

/* A step of a panel, from element `at` on. Groups `fit` if each is whole steps. */
INLINED WITH_BFLOAT16 void
unpack_step(int bits, int is_e2m1, int fits, const quantised_t *q, int64_t panel, int64_t at, uint16_t *to)
{
    const char *codes = q->codes + (panel * q->inner + at) * COLUMNS * bits / 8;
    const int64_t count = fits ? STEP : smaller(STEP, q->inner - at);
    for (int line = 0; line < STEP * COLUMNS * bits / 8; line += 64)
        fetch_to_l2(codes + FETCHED + line);
    group_t g = load_group(q, panel, at / q->group), next = g;
    if (!fits && count < STEP)
        memset(to, 0, STEP_SIZE * sizeof *to);
    if (bits == 4) {
        for (int64_t k = 0; k < count; k += 8, codes += COLUMNS * sizeof(uint32_t)) {
            if (!fits)
                g = load_group(q, panel, (at + k) / q->group);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                const words_t w = load_words((const element *)codes + half * LANES);
#pragma GCC unroll 4
                for (int i = 0; i < 8; i += 2)
                    store_pair(four_bits_of(w, i, is_e2m1), four_bits_of(w, i + 1, is_e2m1), &g, &g, half,
                               to + half * HALF + (k + i) * LANES);
            }
        }
        return;
    }
    for (int64_t k = 0; k < count; k += 2, codes += 2 * COLUMNS) {
        const int is_last = !fits && k + 1 == count;
        if (!fits) {
            g = load_group(q, panel, (at + k) / q->group);
            next = is_last ? g : load_group(q, panel, (at + k + 1) / q->group);
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const vec first = load_bytes((const int8_t *)codes + half * LANES);
            uint16_t *word = to + half * HALF + k * LANES;
            store_pair(first, is_last ? first : load_bytes((const int8_t *)codes + COLUMNS + half * LANES), &g, &next,
                       half, word);
            for (int column = 0; is_last && column < LANES; column++)
                word[2 * column + 1] = 0;
        }
    }
}

/* `count` steps of a panel from `first` on, as tiles. */
static WITH_BFLOAT16 void
unpack_steps(const quantised_t *q, int64_t panel, int64_t first, int64_t count, uint16_t *to)
{
    const int fits = q->inner % STEP == 0 && q->group % STEP == 0;
    for (int64_t step = first; step < first + count; step++, to += STEP_SIZE)
        if (q->is_e2m1)
            unpack_step(4, 1, fits, q, panel, step * STEP, to);
        else if (q->bits == 4 && fits)
            unpack_step(4, 0, 1, q, panel, step * STEP, to);
        else if (q->bits == 4)
            unpack_step(4, 0, 0, q, panel, step * STEP, to);
        else if (fits)
            unpack_step(8, 0, 1, q, panel, step * STEP, to);
        else
            unpack_step(8, 0, 0, q, panel, step * STEP, to);
}

/* Adds products of some steps of up to 32 rows and of the columns to tiles 0 to 3. */
INLINED void
add_steps(int has_second, int64_t rows, const uint16_t *row, const uint16_t *columns, int64_t steps)
{
    for (int64_t step = 0; step < steps; step++, row += rows * STEP, columns += STEP_SIZE)
        add_tiles(has_second, row, TILE_BYTES, columns, columns + HALF, TILE_BYTES);
}

/* A block of rows times a part of a panel. The sums stay in their tiles if it `is_alone`: the only block. */
INLINED void
multiply_block(int has_second, int64_t rows, const uint16_t *row, const uint16_t *columns, int64_t steps, int is_first,
               int is_last, int is_alone, float *sums)
{
    if (is_first) {
        EACH_SUM(ZERO_SUM, has_second, sums, COLUMNS)
    } else if (!is_alone) {
        EACH_SUM(LOAD_TILE, has_second, sums, COLUMNS)
    }
    add_steps(has_second, rows, row, columns, steps);
    if (is_last || !is_alone) {
        EACH_SUM(STORE_TILE, has_second, sums, COLUMNS)
    }
}

/* A panel times the rows from `first` on, before `stop`. A block of rows is finished while its results are fetched. */
static void
compute_panel(const dequantised_t *d, int64_t panel, int64_t first, int64_t stop, int64_t *configured)
{
    float sums[CHUNK_ROWS * COLUMNS] ALIGNED;
    uint16_t columns[PART_STEPS * STEP_SIZE] ALIGNED;
    const int is_alone = stop - first <= BLOCK_ROWS;
    for (int64_t step = 0; step < d->steps; step += PART_STEPS) {
        const int64_t steps = smaller(PART_STEPS, d->steps - step);
        unpack_steps(d->q, panel, step, steps, columns);
        for (int64_t block = first; block < stop; block += BLOCK_ROWS) {
            const int64_t rows = smaller(BLOCK_ROWS, stop - block);
            const uint16_t *row = d->rows + (block * d->steps + step * rows) * STEP;
            const int is_first = step == 0, is_last = step + steps == d->steps;
            float *block_sums = sums + (block - first) * COLUMNS;
            for (int64_t i = 0; is_last && i < rows; i++)
                prefetch_row(d->q, block + i, panel * COLUMNS);
            if (*configured != rows)
                configure_products(*configured = rows);
            if (rows > TILE_ROWS)
                multiply_block(1, rows, row, columns, steps, is_first, is_last, is_alone, block_sums);
            else
                multiply_block(0, rows, row, columns, steps, is_first, is_last, is_alone, block_sums);
            if (is_last)
                finish_rows(d->q->layer, d->q->is_bfloat16, block, rows, panel * COLUMNS, NULL, block_sums);
        }
    }
}

/* A unit of work is a panel and a chunk of rows. */
static void
compute_units(const void *arguments, int64_t first, int64_t stop)
{
    const dequantised_t *d = arguments;
    int64_t configured = 0;
    for (int64_t unit = first; unit < stop; unit++) {
        const int64_t row = unit / d->panels * d->chunk;
        compute_panel(d, unit % d->panels, row, smaller(row + d->chunk, d->q->rows), &configured);
    }
    release_tiles();
}

/* A layer with rows, whose weight is `q`, without memory for its rounded rows. */
static dequantised_t
dequantised_of(const quantised_t *q)
{
    const int64_t steps = (q->inner + STEP - 1) / STEP, panels = (q->columns + COLUMNS - 1) / COLUMNS;
    const int64_t fitting = CHUNK_BYTES / (steps * STEP * (int64_t)sizeof(uint16_t)) / BLOCK_ROWS * BLOCK_ROWS;
    const int64_t most = fitting < BLOCK_ROWS ? BLOCK_ROWS : smaller(fitting, CHUNK_ROWS);
    const int64_t part = (q->rows - 1) / ((q->rows + most - 1) / most) + 1;
    return (dequantised_t){q, NULL, steps, panels, (part + BLOCK_ROWS - 1) / BLOCK_ROWS * BLOCK_ROWS};
}

/* Returns 0, or -1 if there is no memory for the rounded rows. */
int32_t
dequantised_linear_amx(const linear_t *given, int64_t count, const threads_t *threads)
{
    typedef struct {
        quantised_t q;
        dequantised_t d;
    } one_t;
    ready_t *ready = malloc(count * (sizeof *ready + sizeof(one_t)));
    if (!ready)
        return -1;
    one_t *layers = (one_t *)(ready + count);
    int64_t number = 0, size = 0;
    for (int64_t i = 0; i < count; i++) {
        if (!given[i].rows)
            continue;
        one_t *l = layers + number;
        l->q = quantised_of(given + i);
        l->d = dequantised_of(&l->q);
        ready[number++].follows = given[i].follows;
        size += l->q.rows * l->d.steps * STEP;
    }
    uint16_t *const memory = allocate(size * sizeof *memory), *rows = memory;
    if (!memory) {
        free(ready);
        return -1;
    }
    for (int64_t i = 0; i < number; i++) {
        dequantised_t *d = &layers[i].d;
        const quantised_t *q = d->q;
        d->rows = i && has_rows_of(q, &layers[i - 1].q) ? layers[i - 1].d.rows : rows;
        if (d->rows == rows)
            parallel_for(threads, q->rows, q->rows > BLOCK_ROWS ? BLOCK_ROWS : q->rows, round_rows, d);
        rows += q->rows * d->steps * STEP;
        ready[i] = (ready_t){d, d->panels * ((q->rows + d->chunk - 1) / d->chunk), ready[i].follows};
    }
    parallel_for_group(threads, ready, number, compute_units);
    free(memory);
    free(ready);
    return 0;
}
#endif
#endif
