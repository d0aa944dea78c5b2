/* Rows packed into panels of 32, whatever their elements are: words of codes, scales, or numbers. It belongs to the kernels
 * in float32.
 */
#ifdef FLOAT32
#include "kernels.h"

typedef struct {
    const char *rows;
    int64_t count, width;
    int32_t size;
    char *panels;
} packing_t;

/* A panel of words: 16 of 16 rows at a time. */
static void
fill_words(const float *rows, int64_t count, int64_t width, float *panel)
{
    for (int64_t at = 0; at < width; at += LANES)
        for (int64_t row = 0; row < COLUMNS; row += LANES) {
            const int64_t some = count > row ? smaller(count - row, LANES) : 0;
            transpose_words(rows + smaller(row, count) * width + at, width, (int)some, (int)smaller(width - at, LANES),
                            panel + at * COLUMNS + row, COLUMNS);
        }
}

/* A panel of smaller elements. */
#define FILL(name, type)                                                                                               \
    static void name(const type *rows, int64_t count, int64_t width, type *panel)                                      \
    {                                                                                                                  \
        for (int64_t at = 0; at < width; at++)                                                                         \
            for (int64_t row = 0; row < COLUMNS; row++)                                                                \
                panel[at * COLUMNS + row] = row < count ? rows[row * width + at] : 0;                                  \
    }
FILL(fill_halves, uint16_t)
FILL(fill_bytes, uint8_t)
#undef FILL

static void
fill_some(const void *arguments, int64_t first, int64_t stop)
{
    const packing_t *p = arguments;
    for (int64_t number = first; number < stop; number++) {
        const int64_t row = number * COLUMNS, count = smaller(COLUMNS, p->count - row), of_row = p->width * p->size;
        const void *rows = p->rows + row * of_row;
        void *panel = p->panels + row * of_row;
        if (p->size == 4)
            fill_words(rows, count, p->width, panel);
        else if (p->size == 2)
            fill_halves(rows, count, p->width, panel);
        else
            fill_bytes(rows, count, p->width, panel);
    }
}

void
fill_panels(const void *rows, int64_t count, int64_t width, int32_t size, void *panels, const threads_t *threads)
{
    const int64_t number = (count + COLUMNS - 1) / COLUMNS;
    const packing_t packing = {rows, count, width, size, panels};
    parallel_for(threads, number, panel_grain(number, threads), fill_some, &packing);
}
#endif
