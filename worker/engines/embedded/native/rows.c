/* Row-wise operations: RMSNorm, soft caps, RoPE, and writing keys and values to the paged KV cache. */
#include "kernels.h"
#include "kv_rows.h"

enum {
    FEW = 64,      /* tokens up to which one thread is faster than several */
    TOGETHER = 16, /* that a thread takes at a time */
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

typedef struct {
    const element *x;
    int64_t width;
    const element *weight;
    float epsilon;
    element *y;
} norm_rows_t;

static void
normalise_rows(const void *job, int64_t first, int64_t stop)
{
    const norm_rows_t *n = job;
    for (int64_t row = first; row < stop; row++)
        normalise(n->x + row * n->width, n->weight, n->width, n->epsilon, n->y + row * n->width);
}

void
rms_norm(const element *x, int64_t rows, int64_t width, const element *weight, float epsilon, element *y,
         const team_t *team)
{
    const norm_rows_t job = {x, width, weight, epsilon, y};
    share_work(team, rows, rows > FEW ? TOGETHER : FEW, normalise_rows, &job);
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
soft_cap_spans(const void *job, int64_t first, int64_t stop)
{
    const soft_cap_t *s = job;
    const int64_t end = smaller(stop * SPAN, s->count);
    for (int64_t at = first * SPAN; at < end; at += LANES)
        store_lanes(s->x + at, end - at, vec_soft_cap(load_lanes(s->x + at, end - at), s->cap));
}

/* x = cap * tanh(x / cap) for each of `count` numbers. */
void
soft_cap(float *x, int64_t count, float cap, const team_t *team)
{
    const soft_cap_t job = {x, count, cap};
    share_work(team, (count + SPAN - 1) / SPAN, 4, soft_cap_spans, &job);
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

typedef struct {
    const element *qkv;
    int64_t heads, kv_heads, width;
    const element *cosine, *sine;
    norm_t of_query, of_key;
    element *query;
    char *keys, *values;
    int32_t is_int8;
    int64_t size;
    const int64_t *pages, *slots;
} qkv_t;

static void
rotate_and_store_tokens(const void *job, int64_t first, int64_t stop)
{
    const qkv_t *q = job;
    const int64_t width = q->width, row_bytes = kv_row_bytes(width, q->is_int8);
    for (int64_t token = first; token < stop; token++) {
        const element *c = q->cosine + token * width, *s = q->sine + token * width;
        const element *from = q->qkv + token * (q->heads + 2 * q->kv_heads) * width;
        for (int64_t head = 0; head < q->heads; head++, from += width)
            turn_head(from, q->of_query, c, s, width, q->query + (token * q->heads + head) * width);
        for (int64_t head = 0; head < q->kv_heads; head++, from += width) {
            const int64_t place = ((q->pages[token] * q->kv_heads + head) * q->size + q->slots[token]) * row_bytes;
            element key[WIDEST];
            turn_head(from, q->of_key, c, s, width, key);
            store_row(key, width, q->is_int8, q->keys + place);
            store_row(from + q->kv_heads * width, width, q->is_int8, q->values + place);
        }
    }
}

/* Splits the fused projection `qkv` [tokens, heads + 2 * kv_heads, width]: rotated queries go to `query`
 * [tokens, heads, width], rotated keys and values into the cache, [pages, kv_heads, size, row], as the slot mapping
 * says, `pages` and `slots` [tokens]. `cosine` and `sine` are [tokens, width].
 */
void
rotate_and_store(const element *qkv, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t width,
                 const element *cosine, const element *sine, const element *query_norm, const element *key_norm,
                 float epsilon, element *query, char *keys, char *values, int32_t is_int8, int64_t size,
                 const int64_t *pages, const int64_t *slots, const team_t *team)
{
    const norm_t of_query = {query_norm, epsilon}, of_key = {key_norm, epsilon};
    const qkv_t q = {qkv,  heads,  kv_heads, width, cosine, sine,  of_query, of_key,
                     query, keys, values,   is_int8, size,  pages, slots};
    share_work(team, tokens, tokens > FEW ? TOGETHER : FEW, rotate_and_store_tokens, &q);
}
