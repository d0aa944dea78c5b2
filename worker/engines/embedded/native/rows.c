/* Row-wise operations: RMSNorm, soft caps, RoPE, and writing keys and values to the paged KV cache. */
#include "epilogue.h"
#include "kernels.h"
#include "kv_rows.h"

enum {
    ONE_THREAD = 6, /* tokens up to which one thread is faster than several */
    FEW_NUMBERS = 1 << 16, /* that one thread normalises where others would have to be woken */
    GRAIN = 4,      /* tokens that a thread takes at a time */
};

/* RMSNorm: y = x / sqrt(mean(x * x) + epsilon) * weight, over `width` elements. */
static inline void
normalise(const element *x, const float *weight, int64_t width, float epsilon, element *y)
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
        store_lanes(y + at, width - at, vec_mul(scaled, load_floats(weight + at, width - at)));
    }
}

static void
normalise_rows(const void *arguments, int64_t first, int64_t stop)
{
    const rms_norm_t *n = arguments;
    for (int64_t row = first; row < stop; row++)
        normalise(n->x + row * n->stride, n->weight, n->width, n->epsilon, n->y + row * n->stride);
}

void
rms_norm(const rms_norm_t *arguments, const threads_t *threads)
{
    const int64_t rows = arguments->rows;
    const int are_few = rows <= ONE_THREAD || (!threads->pool && rows * arguments->width <= FEW_NUMBERS);
    parallel_for(threads, rows, are_few ? rows : GRAIN, normalise_rows, arguments);
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

/* RoPE: rotates the two halves of `width` elements by the angles of the token's position; `y` may be `x`. */
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

/* RMSNorm, if there is a weight, and RoPE, if there are angles, of one query or key head; `y` may be `x`. */
static inline void
rotate_head(const rotation_t *r, const element *x, const float *norm, int64_t token, element *y)
{
    const int64_t rotary = r->cosine ? r->rotary : 0;
    const element *c = r->cosine + token * rotary, *s = r->sine + token * rotary;
    if (norm) {
        normalise(x, norm, r->width, r->epsilon, y);
        x = y;
    } else if (x != y && (r->is_interleaved || rotary < r->width)) {
        memcpy(y, x, r->width * sizeof *y);
        x = y;
    }
    if (!r->is_interleaved) {
        rotate(x, c, s, rotary, y);
        return;
    }
    element apart[WIDEST];
    for (int64_t i = 0; i < rotary; i++)
        apart[i / 2 + i % 2 * (rotary / 2)] = y[i];
    rotate(apart, c, s, rotary, apart);
    for (int64_t i = 0; i < rotary; i++)
        y[i] = apart[i / 2 + i % 2 * (rotary / 2)];
}

/* Writes `width` elements as a row of the cache. */
static inline void
store_row(const element *x, int64_t width, int32_t code_bytes, char *row)
{
    if (code_bytes)
        quantise_row(x, width, code_bytes, row);
    else
        memcpy(row, x, width * sizeof *x);
}

static void
rotate_and_store_tokens(const void *arguments, int64_t first, int64_t stop)
{
    const rotation_t *r = arguments;
    const int64_t width = r->width, row_bytes = kv_row_bytes(width, r->code_bytes);
    for (int64_t token = first; token < stop; token++) {
        const element *from = r->qkv + token * (r->heads + 2 * r->kv_heads) * width;
        for (int64_t head = 0; head < r->heads; head++, from += width)
            rotate_head(r, from, r->query_norm, token, r->query + (token * r->heads + head) * width);
        for (int64_t head = 0; head < r->kv_heads; head++, from += width) {
            const int64_t row = (r->pages[token] * r->kv_heads + head) * r->page_size + r->slots[token];
            element key[WIDEST];
            rotate_head(r, from, r->key_norm, token, key);
            store_row(key, width, r->code_bytes, r->keys + row * row_bytes);
            store_row(from + r->kv_heads * width, width, r->code_bytes, r->values + row * row_bytes);
        }
    }
}

void
rotate_and_store(const rotation_t *arguments, const threads_t *threads)
{
    const int64_t tokens = arguments->tokens;
    parallel_for(threads, tokens, tokens > ONE_THREAD ? GRAIN : ONE_THREAD, rotate_and_store_tokens, arguments);
}

typedef struct {
    element *to;
    const element *rows;
    int64_t width;
    float factor;
} addition_t;

static void
add_each(const void *arguments, int64_t first, int64_t stop)
{
    const addition_t *a = arguments;
    for (int64_t at = first * a->width, end = stop * a->width; at < end; at += LANES) {
        const vec sum = vec_fmadd(load_lanes(a->rows + at, end - at), vec_all(a->factor), load_lanes(a->to + at, end - at));
        store_lanes(a->to + at, end - at, sum);
    }
}

void
add_rows(element *to, const element *rows, int64_t count, int64_t width, float factor, const threads_t *threads)
{
    const addition_t arguments = {to, rows, width, factor};
    parallel_for(threads, count, count > ONE_THREAD ? GRAIN : ONE_THREAD, add_each, &arguments);
}
