/* Packed masks of the vocabulary: -inf is added to every logit whose bit is 0, so that NaN and +inf become NaN. */
#ifdef FLOAT32
#include "weights.h"

enum {
    BITS = 32,            /* of a word */
    FEW_LOGITS = 1 << 19, /* that one thread masks in less time than it takes to wake another */
};

typedef struct {
    float *logits;
    int64_t stride, width;
    const mask_t *masks;
} masking_t;

/* The logits of a word. */
INLINED void
mask_word(float *logits, int64_t count, uint32_t word)
{
    for (int64_t i = 0; i < count; i++)
        logits[i] = word >> i & 1 ? logits[i] : logits[i] - INFINITY;
}

static void
mask_some(const void *arguments, int64_t first, int64_t stop)
{
    const masking_t *m = arguments;
    for (const mask_t *mask = m->masks + first; mask < m->masks + stop; mask++) {
        float *logits = m->logits + mask->row * m->stride;
        for (int64_t at = 0; at < m->width; at += BITS) {
            const uint32_t word = at / BITS < mask->count ? mask->words[at / BITS] : 0;
            if (word == UINT32_MAX)
                continue;
            if (m->width - at >= BITS)
                mask_word(logits + at, BITS, word);
            else
                mask_word(logits + at, m->width - at, word);
        }
    }
}

void
apply_masks(float *logits, int64_t stride, int64_t width, const mask_t *masks, int64_t count, const threads_t *threads)
{
    parallel_for(threads, count, count * width > FEW_LOGITS ? 1 : count, mask_some, &(masking_t){logits, stride, width, masks});
}

#endif
