/* Rows of the paged KV cache: a head's keys or values of one token.
 *
 * A row is its `width` elements; or `width` codes, zeros, and in the last four bytes a float32 scale, a multiple of 8 bytes
 * in all. Codes have 8 bits, up to 127, and an element is code * scale, rounded to an element; or 16, up to 2047, on which
 * `code_attention.c` computes. See `kv_cache/code_rows.py`, which has the same bits.
 */
#ifndef KV_ROWS_H
#define KV_ROWS_H

#include "rounding.h"

enum {
    WIDEST = 256,                              /* head size at most */
    ROW_BYTES = WIDEST * (int)sizeof(element), /* of a row at most */
    HIGHEST_SHORT = 2047,                      /* highest code of 16 bits: see `code_attention.c` */
};

/* Bytes of a row whose codes have `code_bytes` each, or of its elements if that is 0. */
static inline int64_t
kv_row_bytes(int64_t width, int32_t code_bytes)
{
    if (!code_bytes)
        return width * (int64_t)sizeof(element);
    return (width * code_bytes + (int64_t)sizeof(float) + 7) / 8 * 8;
}

/* The row of codes of `width` elements. */
static inline void
quantise_row(const element *x, int64_t width, int32_t code_bytes, char *row)
{
    float lanes[WIDEST + LANES] ALIGNED;
    for (int64_t at = 0; at < width; at += LANES)
        vec_store(lanes + at, load_lanes(x + at, width - at));
    const float scale = scale_of(magnitude_of(lanes, width), code_bytes == 1 ? HIGHEST_BYTE : HIGHEST_SHORT);
    const int64_t bytes = kv_row_bytes(width, code_bytes), end = bytes - (int64_t)sizeof scale;
    memset(row, 0, end);
    if (scale > 0) {
        for (int64_t at = 0; at < width; at += LANES)
            vec_store(lanes + at, codes_of(vec_load(lanes + at), scale));
        if (code_bytes == 1)
            for (int64_t i = 0; i < width; i++)
                ((int8_t *)row)[i] = (int8_t)lanes[i];
        else
            for (int64_t i = 0; i < width; i++)
                ((int16_t *)row)[i] = (int16_t)lanes[i];
    }
    memcpy(row + end, &scale, sizeof scale);
}

/* The scale of a row of codes, of which it is the end. */
static inline float
kv_row_scale(const char *row, int64_t row_bytes)
{
    float scale;
    memcpy(&scale, row + row_bytes - sizeof scale, sizeof scale);
    return scale;
}

/* The `width` elements of a row of codes of 8 bits. */
static inline void
dequantise_row(const char *row, int64_t width, element *x)
{
    const float scale = kv_row_scale(row, kv_row_bytes(width, 1));
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
