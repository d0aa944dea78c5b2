/* Row-wise operations: RMSNorm, soft caps, RoPE, and writing keys and values to the paged KV cache. */
#include "kernels.h"
#include "kv_rows.h"

enum {
    ONE_THREAD = 64, /* tokens up to which one thread is faster than several */
    GRAIN = 16,      /* tokens that a thread takes at a time */
};

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

static void
normalise_rows(const void *arguments, int64_t first, int64_t stop)
{
    const rms_norm_t *n = arguments;
    for (int64_t row = first; row < stop; row++)
        normalise(n->x + row * n->width, n->weight, n->width, n->epsilon, n->y + row * n->width);
}

void
rms_norm(const rms_norm_t *arguments, const threads_t *threads)
{
    const int64_t rows = arguments->rows;
    parallel_for(threads, rows, rows > ONE_THREAD ? GRAIN : ONE_THREAD, normalise_rows, arguments);
}

#ifdef FLOAT32
/* Numbers in place, SPAN at a time. */
typedef struct {
    float *x;
    int64_t count;
    float cap;
} soft_cap_t;

enum { SPAN = 4096 };

static void
soft_cap_spans(const void *arguments, int64_t first, int64_t stop)
{
    const soft_cap_t *s = arguments;
    const int64_t end = smaller(stop * SPAN, s->count);
    for (int64_t at = first * SPAN; at < end; at += LANES)
        store_lanes(s->x + at, end - at, vec_soft_cap(load_lanes(s->x + at, end - at), s->cap));
}

void
soft_cap(float *x, int64_t count, float cap, const threads_t *threads)
{
    const soft_cap_t arguments = {x, count, cap};
    parallel_for(threads, (count + SPAN - 1) / SPAN, 4, soft_cap_spans, &arguments);
}
#endif

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
rotate_head(const element *x, norm_t norm, const element *cosine, const element *sine, int64_t width, element *y)
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

static void
rotate_and_store_tokens(const void *arguments, int64_t first, int64_t stop)
{
    const rotation_t *r = arguments;
    const norm_t of_query = {r->query_norm, r->epsilon}, of_key = {r->key_norm, r->epsilon};
    const int64_t width = r->width, row_bytes = kv_row_bytes(width, r->is_int8);
    for (int64_t token = first; token < stop; token++) {
        const element *c = r->cosine + token * width, *s = r->sine + token * width;
        const element *from = r->qkv + token * (r->heads + 2 * r->kv_heads) * width;
        for (int64_t head = 0; head < r->heads; head++, from += width)
            rotate_head(from, of_query, c, s, width, r->query + (token * r->heads + head) * width);
        for (int64_t head = 0; head < r->kv_heads; head++, from += width) {
            const int64_t row = (r->pages[token] * r->kv_heads + head) * r->page_size + r->slots[token];
            element key[WIDEST];
            rotate_head(from, of_key, c, s, width, key);
            store_row(key, width, r->is_int8, r->keys + row * row_bytes);
            store_row(from + r->kv_heads * width, width, r->is_int8, r->values + row * row_bytes);
        }
    }
}

void
rotate_and_store(const rotation_t *arguments, const threads_t *threads)
{
    const int64_t tokens = arguments->tokens;
    parallel_for(threads, tokens, tokens > ONE_THREAD ? GRAIN : ONE_THREAD, rotate_and_store_tokens, arguments);
}
