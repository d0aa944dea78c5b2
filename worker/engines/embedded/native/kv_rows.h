/* Rows of the paged KV cache: a head's keys or values of one token.
 *
 * A row is its `width` elements; or, in int8, `width` codes, zeros, and in the last four bytes a float32 scale, a
 * multiple of 8 bytes in all. Then an element is code * scale, rounded to an element; see `kv_cache/int8_rows.py`,
 * which has the same bits.
 */
#ifndef KV_ROWS_H
#define KV_ROWS_H

#include "rounding.h"

enum {
    WIDEST = 256,                           /* head size at most */
    ROW_BYTES = WIDEST * (int)sizeof(element), /* of a row at most */
};

static inline int64_t
kv_row_bytes(int64_t width, int32_t is_int8)
{
    return is_int8 ? (width + (int64_t)sizeof(float) + 7) / 8 * 8 : width * (int64_t)sizeof(element);
}

/* The row of `width` elements in int8. */
static inline void
quantise_row(const element *x, int64_t width, char *row)
{
    float lanes[WIDEST + LANES] ALIGNED;
    for (int64_t at = 0; at < width; at += LANES)
        vec_store(lanes + at, load_lanes(x + at, width - at));
    const float scale = scale_of(magnitude_of(lanes, width));
    const int64_t bytes = kv_row_bytes(width, 1), end = bytes - (int64_t)sizeof scale;
    memset(row, 0, end);
    if (scale > 0) {
        for (int64_t at = 0; at < width; at += LANES)
            vec_store(lanes + at, codes_of(vec_load(lanes + at), scale));
        for (int64_t i = 0; i < width; i++)
            ((int8_t *)row)[i] = (int8_t)lanes[i];
    }
    memcpy(row + end, &scale, sizeof scale);
}

/* The scale of a row in int8. */
static inline float
kv_row_scale(const char *row, int64_t width)
{
    float scale;
    memcpy(&scale, row + kv_row_bytes(width, 1) - sizeof scale, sizeof scale);
    return scale;
}

/* The `width` elements of a row in int8. */
static inline void
dequantise_row(const char *row, int64_t width, element *x)
{
    const float scale = kv_row_scale(row, width);
    for (int64_t at = 0; at < width; at += LANES) {
        int8_t some[LANES] = {0};
        const int8_t *codes = (const int8_t *)row + at;
        if (width - at < LANES) {
            memcpy(some, codes, width - at);
            codes = some;
        }
        store_lanes(x + at, width - at, vec_mul(load_bytes(codes), vec_all(scale)));
    }
}

#endif
