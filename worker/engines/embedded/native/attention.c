/* Attention over the paged KV cache, whose pages are read in place.
 *
 * A token's keys are read in blocks of 64 that begin at fixed positions of its sequence, in ascending order, with an
 * online softmax: its maximum, sum and result are carried from block to block (Milakov and Gimelshein, "Online
 * normalizer calculation for softmax", 2018). A token's result depends on nothing else: not on the tokens computed
 * beside it, nor on the page layout. So it is batch-invariant.
 */
#include <math.h>

#include "panels.h"

enum {
    KEYS = 64,     /* of a block */
    TOGETHER = 64, /* queries that share a block once it is packed into panels; the caller's tiles have no more */
    WIDEST = 256,  /* head size at most */
};

#define LOG2_E 1.44269504f
#define ALIGNED __attribute__((aligned(64)))

/* A query tile: consecutive tokens of one sequence; the heads that share keys make up to TOGETHER queries. */
typedef struct {
    int64_t first, count; /* tokens of the step */
    int64_t position;     /* of the first one in its sequence */
    int64_t pages;        /* where the sequence's pages begin in the page table */
} tile_t;

typedef struct {
    const element *query; /* [tokens] with this stride, [kv_heads * group, width] */
    int64_t query_stride;
    element *output;              /* [tokens, kv_heads * group, width] */
    const element *keys, *values; /* [pages, kv_heads, size, width] */
    int64_t kv_heads, group, width, size;
    const int64_t *pages;
    int64_t window; /* tokens that a token attends to, itself among them; 0: all before it */
    float scale, softcap;
} attention_t;

/* One block of keys and values of one head. */
typedef struct {
    int64_t begin; /* position of the first key */
    int count;
    element keys[KEYS * WIDEST] ALIGNED;   /* two panels of 32 keys, [words of the width][32 keys] */
    element values[KEYS * WIDEST] ALIGNED; /* panels of 32 elements, [words of 64 keys][32] */
} block_t;

/* The queries of a tile, and their online softmax. */
typedef struct {
    int rows;
    element query[TOGETHER * WIDEST] ALIGNED;
    float result[TOGETHER * WIDEST] ALIGNED; /* accumulated, not yet divided by `sum` */
    float peak[TOGETHER], sum[TOGETHER];
} queries_t;

/* Transposes up to 16 rows of up to 16 words; missing ones become 0. */
static inline void
transpose_words(const element *from, int64_t stride, int rows, int words, element *to, int64_t to_stride)
{
    const __mmask16 mask = (__mmask16)first_lanes(words);
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        a[i] = i < rows ? _mm512_maskz_loadu_epi32(mask, from + i * stride) : _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        a[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
        a[i + 4] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88);
        a[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
        a[i + 12] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        if (i < words)
            _mm512_storeu_si512(to + i * to_stride, a[i]);
}

/* Prefetches a row of the next block, which lies behind this one unless its page ends. */
static inline void
prefetch_next(const element *row, int width)
{
    for (int at = 0; at < width; at += LANES * PER_WORD) /* a cache line */
        _mm_prefetch((const char *)(row + KEYS * width + at), _MM_HINT_T1);
}

static void
lay_out_keys(const element *keys, int width, block_t *block)
{
    for (int key = 0; key < block->count; key++)
        prefetch_next(keys + key * width, width);
    for (int first = 0; first < (block->count + COLUMNS - 1) / COLUMNS * COLUMNS; first += LANES) {
        element *to = block->keys + first / COLUMNS * COLUMNS * width + first % COLUMNS * PER_WORD;
        const int rows = block->count > first ? (int)smaller(16, block->count - first) : 0;
        for (int at = 0; at < width; at += 16 * PER_WORD)
            transpose_words(keys + first * width + at, width, rows, (int)smaller(16, (width - at) / PER_WORD),
                            to + at * COLUMNS, COLUMNS * PER_WORD);
    }
}

#ifdef FLOAT32
static void
lay_out_values(const element *values, int width, block_t *block)
{
    const int padded = (width + COLUMNS - 1) / COLUMNS * COLUMNS;
    for (int key = 0; key < block->count; key++) {
        prefetch_next(values + key * width, width);
        for (int at = 0; at < padded; at += LANES) {
            element *to = block->values + at / COLUMNS * COLUMNS * KEYS + key * COLUMNS + at % COLUMNS;
            const __mmask16 mask = at < width ? (__mmask16)first_lanes(width - at) : 0;
            _mm512_storeu_ps(to, load_lanes(values + key * width + at, mask));
        }
    }
}
#else
static void
lay_out_values(const element *values, int width, block_t *block)
{
    /* interleaves the first halves of two rows, then the second ones */
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                         37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int key = 0; key < block->count; key++)
        prefetch_next(values + key * width, width);
    element *to = block->values;
    for (int at = 0; at < width; at += COLUMNS, to += KEYS * COLUMNS) {
        const __mmask32 mask = first_lanes(width - at);
        for (int key = 0; key < block->count; key += 2) {
            const element *from = values + key * width + at;
            const __m512i even = _mm512_maskz_loadu_epi16(mask, from);
            const __m512i odd = _mm512_maskz_loadu_epi16(key + 1 < block->count ? mask : 0, from + width);
            _mm512_storeu_si512(to + key * COLUMNS, _mm512_permutex2var_epi16(even, low, odd));
            _mm512_storeu_si512(to + (key + 1) * COLUMNS, _mm512_permutex2var_epi16(even, high, odd));
        }
    }
}
#endif

/* The mask of a token at `position`: which keys of a block it attends to, one bit each. */
static inline uint64_t
seen_keys(const attention_t *c, const block_t *block, int64_t position)
{
    const int64_t stop = smaller(position + 1 - block->begin, block->count);
    const int64_t start = c->window ? position + 1 - c->window - block->begin : 0;
    if (stop <= 0 || start >= stop)
        return 0;
    const uint64_t before = stop >= KEYS ? UINT64_MAX : (UINT64_C(1) << stop) - 1;
    return start > 0 ? before & (UINT64_MAX << start) : before;
}

/* Online softmax: a row's scores become weights, its maximum and sum are updated; returns its result's rescaling. */
static inline float
weigh(const attention_t *c, const float *scores, uint64_t seen, element *weights, float *peak, float *sum)
{
    const __m512 nothing = _mm512_set1_ps(-INFINITY);
    __m512 score[KEYS / LANES], highest = _mm512_set1_ps(*peak), total = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int i = 0; i < KEYS / LANES; i++) {
        __m512 x = _mm512_mul_ps(_mm512_loadu_ps(scores + i * LANES), _mm512_set1_ps(c->scale));
        if (c->softcap > 0) { /* tanh(x) = 1 - 2 / (exp(2 x) + 1) */
            const __m512 one = _mm512_set1_ps(1.0f);
            const __m512 power = exp2_lanes(_mm512_mul_ps(x, _mm512_set1_ps(2 * LOG2_E / c->softcap)));
            x = _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(power, one)));
            x = _mm512_mul_ps(x, _mm512_set1_ps(c->softcap));
        }
        score[i] = _mm512_mask_mul_ps(nothing, (__mmask16)(seen >> (i * LANES)), x, _mm512_set1_ps(LOG2_E));
        highest = _mm512_max_ps(highest, score[i]);
    }
    const float top = _mm512_reduce_max_ps(highest);
#pragma GCC unroll 4
    for (int i = 0; i < KEYS / LANES; i++) {
        const __m512 weight = exp2_lanes(_mm512_sub_ps(score[i], _mm512_set1_ps(top)));
        total = _mm512_add_ps(total, weight);
        store_lanes(weights + i * LANES, 0xffff, weight);
    }
    const float fade = _mm512_cvtss_f32(exp2_lanes(_mm512_set1_ps(*peak - top)));
    *peak = top;
    *sum = *sum * fade + _mm512_reduce_add_ps(total);
    return fade;
}

static void
attend_to_block(const attention_t *c, const tile_t *tile, const block_t *block, queries_t *q)
{
    const int width = (int)c->width, padded = (width + COLUMNS - 1) / COLUMNS * COLUMNS;
    float scores[ROWS * KEYS] ALIGNED, gains[ROWS * WIDEST] ALIGNED, fades[ROWS];
    element weights[ROWS * KEYS] ALIGNED;
    uint64_t seen[ROWS];
    for (int first = 0; first < q->rows; first += ROWS) {
        const int rows = (int)smaller(ROWS, q->rows - first);
        uint64_t any = 0;
        for (int r = 0; r < rows; r++)
            any |= seen[r] = seen_keys(c, block, tile->position + (first + r) / c->group);
        if (!any)
            continue;
        for (int key = 0; key < KEYS; key += COLUMNS)
            if (key < block->count)
                multiply(rows, q->query + first * width, width, block->keys + key * width, width / PER_WORD,
                         scores + key, KEYS, 0);
        for (int r = 0; r < rows; r++)
            if (seen[r])
                fades[r] = weigh(c, scores + r * KEYS, seen[r], weights + r * KEYS, q->peak + first + r,
                                 q->sum + first + r);
            else
                memset(weights + r * KEYS, 0, KEYS * sizeof *weights);
        for (int at = 0; at < width; at += COLUMNS)
            multiply(rows, weights, KEYS, block->values + at * KEYS, (block->count + PER_WORD - 1) / PER_WORD,
                     gains + at, padded, 0);
        for (int r = 0; r < rows; r++) {
            float *result = q->result + (first + r) * padded;
            for (int at = 0; seen[r] && at < padded; at += LANES)
                _mm512_storeu_ps(result + at,
                                 _mm512_fmadd_ps(_mm512_loadu_ps(result + at), _mm512_set1_ps(fades[r]),
                                                 _mm512_loadu_ps(gains + r * padded + at)));
        }
    }
}

static void
attend_tile(const attention_t *c, const tile_t *tile, int64_t head)
{
    const int width = (int)c->width, padded = (width + COLUMNS - 1) / COLUMNS * COLUMNS;
    queries_t q;
    block_t block;
    q.rows = (int)(tile->count * c->group);
    memset(q.result, 0, q.rows * padded * sizeof *q.result);
    for (int r = 0; r < q.rows; r++) {
        const int64_t token = tile->first + r / c->group, of = head * c->group + r % c->group;
        memcpy(q.query + r * width, c->query + token * c->query_stride + of * width, width * sizeof *q.query);
        q.peak[r] = -INFINITY;
        q.sum[r] = 0;
    }
    const int64_t stop = tile->position + tile->count;
    const int64_t start = c->window && tile->position >= c->window ? tile->position + 1 - c->window : 0;
    for (int64_t place = start / c->size; place * c->size < stop; place++) {
        const int64_t base = place * c->size;
        const int64_t from = (c->pages[tile->pages + place] * c->kv_heads + head) * c->size;
        int64_t at = start > base ? (start - base) / KEYS * KEYS : 0;
        for (; at < c->size && base + at < stop; at += KEYS) {
            block.begin = base + at;
            block.count = (int)smaller(KEYS, smaller(c->size - at, stop - block.begin));
            lay_out_keys(c->keys + (from + at) * width, width, &block);
            lay_out_values(c->values + (from + at) * width, width, &block);
            attend_to_block(c, tile, &block, &q);
        }
    }
    for (int r = 0; r < q.rows; r++) {
        const int64_t token = tile->first + r / c->group, of = head * c->group + r % c->group;
        element *to = c->output + (token * c->kv_heads * c->group + of) * width;
        for (int at = 0; at < width; at += LANES) {
            const __m512 result = _mm512_loadu_ps(q.result + r * padded + at);
            store_lanes(to + at, (__mmask16)first_lanes(width - at), _mm512_div_ps(result, _mm512_set1_ps(q.sum[r])));
        }
    }
}

void
attend(const element *query, int64_t query_stride, element *output, const element *keys, const element *values,
       int64_t kv_heads, int64_t group, int64_t width, int64_t size, const int64_t *pages, const tile_t *tiles,
       int64_t num_tiles, int64_t window, float scale, float softcap, int32_t threads)
{
    const attention_t c = {query, query_stride, output, keys,  values, kv_heads, group, width, size,
                           pages, window,       scale,  softcap};
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t i = 0; i < num_tiles * kv_heads; i++)
        attend_tile(&c, tiles + i / kv_heads, i % kv_heads);
}
