/* Row-wise operations: RMSNorm, RoPE, and writing keys and values to the paged KV cache. */
#include "kernels.h"
#include "kv_rows.h"

enum { FEW = 64 }; /* tokens up to which one thread is faster than several */

/* RMSNorm: y = x / sqrt(mean(x * x) + epsilon) * weight, over `width` elements. */
static inline void
normalise(const element *x, const element *weight, int64_t width, float epsilon, element *y)
{
    vec squares = vec_zero();
    for (int64_t at = 0; at < width; at += LANES) {
        const vec each = load_lanes(x + at, width - at);
        squares = vec_fmadd(each, each, squares);
    }
    const float mean = vec_sum(squares) / (float)width;
    const vec factor = vec_div(vec_all(1.0f), vec_sqrt(vec_all(mean + epsilon)));
    for (int64_t at = 0; at < width; at += LANES) {
        const vec scaled = vec_mul(load_lanes(x + at, width - at), factor);
        store_lanes(y + at, width - at, vec_mul(scaled, load_lanes(weight + at, width - at)));
    }
}

void
rms_norm(const element *x, int64_t rows, int64_t width, const element *weight, float epsilon, element *y,
         int32_t threads)
{
#pragma omp parallel for num_threads(threads) if (rows > FEW)
    for (int64_t row = 0; row < rows; row++)
        normalise(x + row * width, weight, width, epsilon, y + row * width);
}

/* RoPE: rotates the two halves of a head by the angles of the token's position. */
static inline void
rotate(const element *x, const element *cosine, const element *sine, int64_t width, element *y)
{
    const int64_t half = width / 2;
    for (int64_t at = 0; at < half; at += LANES) {
        const vec c = load_lanes(cosine + at, half - at), s = load_lanes(sine + at, half - at);
        const vec a = load_lanes(x + at, half - at), b = load_lanes(x + half + at, half - at);
        store_lanes(y + at, half - at, vec_fmsub(a, c, vec_mul(b, s)));
        store_lanes(y + half + at, half - at, vec_fmadd(b, c, vec_mul(a, s)));
    }
}

typedef struct {
    const element *weight; /* [width]; NULL for none */
    float epsilon;
} norm_t;

/* RMSNorm, if there is a weight, and RoPE of one query or key head; `y` may be `x`. */
static inline void
turn_head(const element *x, norm_t norm, const element *cosine, const element *sine, int64_t width, element *y)
{
    if (norm.weight) {
        normalise(x, norm.weight, width, norm.epsilon, y);
        x = y;
    }
    rotate(x, cosine, sine, width, y);
}

/* Writes `width` elements as a row of the cache. */
static inline void
store_row(const element *x, int64_t width, int32_t is_int8, char *row)
{
    if (is_int8)
        quantise_row(x, width, row);
    else
        memcpy(row, x, width * sizeof *x);
}

/* Splits the fused projection `qkv` [tokens, heads + 2 * kv_heads, width]: rotated queries go to `query`
 * [tokens, heads, width], rotated keys and values into the cache, [pages, kv_heads, size, row], as the slot mapping
 * says, `pages` and `slots` [tokens]. `cosine` and `sine` are [tokens, width].
 */
void
rotate_and_store(const element *qkv, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t width,
                 const element *cosine, const element *sine, const element *query_norm, const element *key_norm,
                 float epsilon, element *query, char *keys, char *values, int32_t is_int8, int64_t size,
                 const int64_t *pages, const int64_t *slots, int32_t threads)
{
    const norm_t of_query = {query_norm, epsilon}, of_key = {key_norm, epsilon};
    const int64_t row_bytes = kv_row_bytes(width, is_int8);
#pragma omp parallel for num_threads(threads) if (tokens > FEW)
    for (int64_t token = 0; token < tokens; token++) {
        const element *c = cosine + token * width, *s = sine + token * width;
        const element *from = qkv + token * (heads + 2 * kv_heads) * width;
        for (int64_t head = 0; head < heads; head++, from += width)
            turn_head(from, of_query, c, s, width, query + (token * heads + head) * width);
        for (int64_t head = 0; head < kv_heads; head++, from += width) {
            const int64_t place = ((pages[token] * kv_heads + head) * size + slots[token]) * row_bytes;
            element key[WIDEST];
            turn_head(from, of_key, c, s, width, key);
            store_row(key, width, is_int8, keys + place);
            store_row(from + kv_heads * width, width, is_int8, values + place);
        }
    }
}
