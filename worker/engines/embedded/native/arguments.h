/* Arguments of kernels: a structure for each, whose fields are listed here and nowhere else.
 *
 * C declares the structures from the lists, and `kernels_arguments` in `linear.c` describes them to Python
 * (`native/libraries.py`), which makes its own from the description: both have the same fields at the same places.
 */
#ifndef ARGUMENTS_H
#define ARGUMENTS_H

#include "vector.h"

/* A query tile: consecutive tokens of one sequence; the heads that share keys make up to 96 queries. */
typedef struct {
    int64_t first, count; /* tokens of the step */
    int64_t position;     /* of the first one in its sequence */
    int64_t pages;        /* where the sequence's pages begin in the page table */
} tile_t;

/* Data type of a matrix of a LoRA. */
typedef enum { LORA_FLOAT32, LORA_BFLOAT16, LORA_FLOAT16 } lora_type_t;

/* B of a LoRA, times its scale, for a panel of a GEMM: of the row's sums, `count` from `first` on meet it. */
typedef struct {
    const void *b;       /* [count][32 columns] */
    int64_t first, count;
    int64_t type;        /* of b, a `lora_type_t` */
} lora_panel_t;

/* A of the LoRAs whose linear layers have one input. */
typedef struct {
    const void *a;       /* panels [width / 16][inner][16] */
    int64_t width;       /* sums of a row, a multiple of 16; 0 for none */
    int64_t type;        /* of a, a `lora_type_t` */
} lora_input_t;

enum { QKV_INPUT, OUTPUT_INPUT, MLP_INPUT, DOWN_INPUT, LORA_INPUTS };
enum { QUERY_GEMM, KEY_GEMM, VALUE_GEMM, OUTPUT_GEMM, GATE_GEMM, UP_GEMM, DOWN_GEMM, LORA_GEMMS }; /* as in a layer */

/* A layer of an adapter; Python makes them of int64. */
typedef struct {
    lora_input_t inputs[LORA_INPUTS];
    const lora_panel_t *gemms[LORA_GEMMS]; /* [panels of the GEMM, and an empty one], NULL for none */
} lora_layer_t;

/* LoRA of the rows of a linear layer. */
typedef struct {
    const lora_layer_t *const *adapters; /* [rows], the layers of each row's adapter, NULL for none */
    int64_t layer;
    const float *sums; /* [rows, stride], the rows times A */
    int64_t stride;
} lora_t;

/* A packed weight and a bias. */
#define GEMM(FIELD)                                                                                                    \
    FIELD(int64_t, columns)                                                                                            \
    FIELD(int64_t, inner)                                                                                              \
    FIELD(const void *, weight)  /* panels [ceil(columns / 32)][inner words][32 columns], or those of codes */         \
    FIELD(const void *, bias)    /* [columns] or NULL */                                                               \
    FIELD(const void *, scales)  /* of a quantised weight, [panels][groups][32 columns] */                             \
    FIELD(const void *, offsets) /* the same; NULL: each is `zero` times its scale */                                  \
    FIELD(int64_t, group)        /* weights of a row with one scale; 0: the weight is not quantised */                 \
    FIELD(int32_t, bits)         /* of a code: 4 or 8 */                                                               \
    FIELD(int32_t, is_half)      /* whether scales and offsets are float16, not float32 */                             \
    FIELD(float, zero)                                                                                                 \
    FIELD(int32_t, has_words)    /* whether codes of 8 bits lie in words of four of a column */                        \
    FIELD(int32_t, is_e2m1)      /* whether codes of 4 bits are numbers of e2m1, which count twice: -12 to 12 */            \
    FIELD(const void *, steps)   /* scales as whole numbers, [panels][steps][32 columns] of int16; with offsets pairs */    \
    FIELD(const float *, units)  /* what they are numbers of, [panels][32 columns]; both for rounded rows */                \
    FIELD(int64_t, step)         /* weights of a row with one step */                                                       \
    FIELD(int64_t, span)         /* elements of a rounded row with one scale: a multiple of `step` */

/* A linear layer. */
#define LINEAR(FIELD)                                                                                                  \
    FIELD(const void *, input) /* [rows, inner] */                                                                     \
    FIELD(int64_t, rows)                                                                                               \
    FIELD(const gemm_t *, gemm)                                                                                        \
    FIELD(const void *, other)     /* [rows, columns], the epilogue's operand */                                       \
    FIELD(void *, output)          /* [rows, columns] */                                                               \
    FIELD(int32_t, epilogue)       /* an `epilogue_t` */                                                               \
    FIELD(int32_t, is_unrounded)   /* whether the output is float32 sums */                                            \
    FIELD(int32_t, is_bfloat16)    /* of a quantised weight: whether all else is bfloat16, not float32 */               \
    FIELD(int32_t, lora_gemm)      /* which of an adapter's it is, if there is any */                                  \
    FIELD(const lora_t *, lora)    /* NULL if no row has an adapter */                                                \
    FIELD(int32_t, follows)        /* whether it reads the output of the layer before it, of as many rows and columns */

#define RMS_NORM(FIELD)                                                                                                \
    FIELD(const element *, x) /* [rows] with this stride, [width] */                                                   \
    FIELD(int64_t, rows)                                                                                               \
    FIELD(int64_t, width)                                                                                              \
    FIELD(int64_t, stride)                                                                                             \
    FIELD(const float *, weight) /* [width] */                                                                         \
    FIELD(element *, y)          /* like x, and may be x */                                                            \
    FIELD(float, epsilon)

/* RMSNorm per head, RoPE, and the writing of keys and values. */
#define ROTATION(FIELD)                                                                                                \
    FIELD(const element *, qkv) /* [tokens, heads + 2 * kv_heads, width] */                                            \
    FIELD(int64_t, tokens)                                                                                             \
    FIELD(int64_t, heads)                                                                                              \
    FIELD(int64_t, kv_heads)                                                                                           \
    FIELD(int64_t, width)                                                                                              \
    FIELD(int64_t, rotary)         /* elements of a head that RoPE rotates, its first ones */                          \
    FIELD(const element *, cosine) /* [tokens, rotary], as is `sine`; NULL for no RoPE */                              \
    FIELD(const element *, sine)                                                                                       \
    FIELD(const float *, query_norm) /* [width] or NULL, as is `key_norm` */                                           \
    FIELD(const float *, key_norm)                                                                                     \
    FIELD(element *, query) /* [tokens, heads, width] */                                                               \
    FIELD(char *, keys)     /* [pages, kv_heads, page_size, row of `kv_rows.h`], as are `values` */                    \
    FIELD(char *, values)                                                                                              \
    FIELD(int64_t, page_size)                                                                                          \
    FIELD(const int64_t *, pages) /* [tokens], the slot mapping, as are `slots` */                                     \
    FIELD(const int64_t *, slots)                                                                                      \
    FIELD(float, epsilon)                                                                                              \
    FIELD(int32_t, is_interleaved) /* whether RoPE rotates neighbours, not the elements of two halves */               \
    FIELD(int32_t, code_bytes)     /* of keys and values: see `kv_rows.h` */

#define ATTENTION(FIELD)                                                                                               \
    FIELD(const element *, query) /* [tokens] with this stride, [kv_heads * group, width] */                           \
    FIELD(int64_t, query_stride)                                                                                       \
    FIELD(element *, output)    /* [tokens, kv_heads * group, width] */                                                \
    FIELD(const char *, keys)   /* [pages, kv_heads, page_size, row of `kv_rows.h`], as are `values` */                \
    FIELD(const char *, values)                                                                                        \
    FIELD(int64_t, kv_heads)                                                                                           \
    FIELD(int64_t, group) /* query heads per key head */                                                               \
    FIELD(int64_t, width)                                                                                              \
    FIELD(int64_t, page_size)                                                                                          \
    FIELD(const int64_t *, page_table) /* of all sequences */                                                          \
    FIELD(const tile_t *, tiles)                                                                                       \
    FIELD(int64_t, num_tiles)                                                                                          \
    FIELD(int64_t, window) /* tokens that a token attends to, itself among them; 0: all before it */                   \
    FIELD(float, scale)                                                                                                \
    FIELD(float, softcap) /* 0 for none */                                                                             \
    FIELD(int32_t, code_bytes) /* of keys and values: see `kv_rows.h` */                                               \
    FIELD(const float *, sinks) /* [kv_heads * group], scores without a value, or NULL */

/* A mixture of experts in place of a layer's MLP: those of the `top_k` greatest numbers of the router. */
#define EXPERTS(FIELD)                                                                                                 \
    FIELD(const gemm_t *, router)                                                                                      \
    FIELD(const gemm_t *const *, gates) /* [count], as are `ups` and `downs` */                                        \
    FIELD(const gemm_t *const *, ups)                                                                                  \
    FIELD(const gemm_t *const *, downs)                                                                                \
    FIELD(int64_t, count)                                                                                              \
    FIELD(int64_t, top_k)                                                                                              \
    FIELD(int32_t, normalises) /* whether the softmax is of a token's experts alone, not of all */

/* A decoder layer: Llama's, and what other architectures do otherwise. */
#define LAYER(FIELD)                                                                                                   \
    FIELD(const float *, input_norm) /* [hidden]; NULL for none, as are all norms */                                   \
    FIELD(const float *, mlp_norm)                                                                                     \
    FIELD(const float *, attention_post_norm) /* of what attention adds to the hidden states */                        \
    FIELD(const float *, mlp_post_norm)                                                                                \
    FIELD(const float *, query_norm) /* [width], or [heads * width] with `norms_whole`; as is `key_norm` */            \
    FIELD(const float *, key_norm)                                                                                     \
    FIELD(float, epsilon)      /* of the norms of hidden states */                                                     \
    FIELD(float, head_epsilon) /* of the others */                                                                     \
    FIELD(float, residual)     /* factor of what attention and MLP add */                                              \
    FIELD(float, scale)        /* of scores */                                                                         \
    FIELD(float, softcap)      /* of scores; 0 for none */                                                             \
    FIELD(int32_t, norms_whole) /* whether a norm is of all heads of a token together */                               \
    FIELD(int32_t, rope)       /* index of its RoPE; -1 for none */                                                    \
    FIELD(int32_t, activation) /* an `epilogue_t`, of `gate` */                                                        \
    FIELD(int32_t, product)    /* an `epilogue_t`, of `up`: MULTIPLY, or another with `gate` */                        \
    FIELD(int64_t, window)                                                                                             \
    FIELD(const float *, sinks)       /* see `attention_t` */                                                          \
    FIELD(const gemm_t *, query_proj) /* the fused QKV projection; or a part, and the following the others */          \
    FIELD(const gemm_t *, key_proj)   /* NULL if the projection is one */                                              \
    FIELD(const gemm_t *, value_proj)                                                                                  \
    FIELD(const gemm_t *, output_proj)                                                                                 \
    FIELD(const experts_t *, experts) /* NULL for the MLP of the following ones */                                     \
    FIELD(const gemm_t *, gate)                                                                                        \
    FIELD(const gemm_t *, up)                                                                                          \
    FIELD(const gemm_t *, down)                                                                                        \
    FIELD(char *, keys) /* pages, as are `values` */                                                                   \
    FIELD(char *, values)

/* Inputs that the layers of a step share. */
#define STEP(FIELD)                                                                                                    \
    FIELD(int64_t, tokens)                                                                                             \
    FIELD(int64_t, hidden)                                                                                             \
    FIELD(int64_t, heads)                                                                                              \
    FIELD(int64_t, kv_heads)                                                                                           \
    FIELD(int64_t, width)                                                                                              \
    FIELD(int64_t, rotary)         /* see `rotation_t`, as for `is_interleaved` */                                     \
    FIELD(int64_t, inner)          /* columns of the widest gate, of an MLP or an expert */                            \
    FIELD(const element *, cosine) /* [ropes, tokens, rotary], as is `sine` */                                         \
    FIELD(const element *, sine)                                                                                       \
    FIELD(const int64_t *, pages) /* [tokens], the slot mapping, as are `slots` */                                     \
    FIELD(const int64_t *, slots)                                                                                      \
    FIELD(const int64_t *, page_table) /* of all sequences */                                                          \
    FIELD(const tile_t *, tiles)                                                                                       \
    FIELD(int64_t, num_tiles)                                                                                          \
    FIELD(int64_t, page_size)                                                                                          \
    FIELD(linear_kernel_t *, quantised) /* NULL if no weight is quantised */                                           \
    FIELD(int32_t, is_interleaved)                                                                                     \
    FIELD(int32_t, code_bytes)          /* of keys and values: see `kv_rows.h` */                                      \
    FIELD(const lora_layer_t *const *, adapters) /* [tokens], as in `lora_t`; NULL if no token has one */              \
    FIELD(const int64_t *, adapted) /* [num_adapted], the tokens that have one, those of one adapter together */       \
    FIELD(int64_t, num_adapted)                                                                                        \
    FIELD(int64_t, lora_width) /* of the widest input of the adapters */                                               \
    FIELD(int64_t, num_unread)   /* tokens whose last hidden states are not read */                                    \
    FIELD(const int64_t *, read) /* [tokens - num_unread], rising: the others, if there are unread ones */             \
    FIELD(const tile_t *, read_tiles) /* those that have a token of `read` */                                          \
    FIELD(int64_t, num_read_tiles)                                                                                     \
    FIELD(const lora_layer_t *const *, read_adapters) /* [tokens - num_unread], as `adapters` */                       \
    FIELD(const int64_t *, read_adapted)              /* [num_read_adapted], as `adapted`, numbers of `read` tokens */ \
    FIELD(int64_t, num_read_adapted)

/* Rows of a quantised weight. */
#define UNPACKING(FIELD)                                                                                               \
    FIELD(const gemm_t *, gemm)                                                                                        \
    FIELD(const int64_t *, ids) /* [count] */                                                                          \
    FIELD(int64_t, count)                                                                                              \
    FIELD(void *, output)        /* [count, inner] */                                                                  \
    FIELD(int32_t, is_bfloat16)  /* the output; otherwise it is float32 */

/* Blocks of weights that are rounded to a type of GGUF, and what was found in them. */
#define BLOCKS(FIELD)                                                                                                  \
    FIELD(const void *, weights) /* [count][weights of a block] */                                                     \
    FIELD(int64_t, count)                                                                                              \
    FIELD(int32_t, source)       /* type of the weights: 0 float32, 1 bfloat16, 2 float16 */                           \
    FIELD(void *, codes)                                                                                               \
    FIELD(void *, scales)                                                                                              \
    FIELD(void *, offsets)       /* NULL for a type without any */                                                     \
    FIELD(int32_t *, found)      /* [2], zeros at first: bits of the largest magnitude, which are more than those of   \
                                    all numbers where a weight is not finite; and 1 where a scale or offset is not */

/* Parameters of a row's weights beside its logits, which the temperature has divided. */
#define WEIGHING(FIELD)                                                                                                \
    FIELD(double, highest) /* logit of the row */                                                                      \
    FIELD(double, offset)  /* which rounds a weight to its unit when it is added */                                    \
    FIELD(float, lowest)   /* lowest logit that has a weight; -inf for none */

/* Log probabilities that are wanted of rows: of a token each with its rank, and of the highest ones. */
#define SCORES(FIELD)                                                                                                  \
    FIELD(const int64_t *, counts)     /* [rows], of the highest ones, `most` at most; below 0: nothing is wanted */   \
    FIELD(int64_t, most)                                                                                               \
    FIELD(double *, logprobs)          /* [rows], of the tokens; NaN where the highest logit is not finite */          \
    FIELD(int64_t *, ranks)            /* [rows], of the tokens, from 1 */                                             \
    FIELD(int64_t *, found)            /* [rows], numbers of highest ones, of which none is masked */                  \
    FIELD(int64_t *, top_ids)          /* [rows, most], by falling logit and rising id */                              \
    FIELD(double *, top_logprobs)      /* [rows, most] */

/* Rows of logits, of which a token each is drawn; numbers of a row are those of `Controls` in `sampling/truncation.py`. */
#define DRAWING(FIELD)                                                                                                 \
    FIELD(const float *, logits)       /* [rows, width], a row `stride` behind the one before */                       \
    FIELD(int64_t, rows)                                                                                               \
    FIELD(int64_t, stride)                                                                                             \
    FIELD(int64_t, width)                                                                                              \
    FIELD(double, offset)              /* as in `weighing_t` */                                                        \
    FIELD(const float *, divisors)     /* [rows] */                                                                    \
    FIELD(const double *, log_min_ps)  /* [rows], -inf: off */                                                         \
    FIELD(const int64_t *, top_ks)     /* [rows], 0: off */                                                            \
    FIELD(const double *, shares)      /* [rows], of the weight that a prefix has; 1: off, 0: the first token */       \
    FIELD(const double *, uniforms)    /* [rows], in [0, 1) */                                                         \
    FIELD(int64_t *, ids)              /* [rows], the tokens; 0 where the highest divided logit is not finite */       \
    FIELD(float *, highest)            /* [rows], the highest logits, not divided; NaN where one of a row is */        \
    FIELD(char *, memory)              /* [threads][drawing_memory(width)], to be overwritten */                       \
    FIELD(uint32_t *, kept)            /* [rows][ceil(width / 32)], bits of what can be drawn of wanted rows, or NULL */ \
    SCORES(FIELD)                      /* of the tokens that are drawn, among all that can be; `counts` may be NULL */

/* Rows of logits, and tokens that are in them. */
#define SCORING(FIELD)                                                                                                 \
    FIELD(const void *, logits)        /* [rows, width], a row `stride` behind the one before */                       \
    FIELD(int32_t, is_float64)         /* the logits; otherwise they are float32 */                                    \
    FIELD(int64_t, rows)                                                                                               \
    FIELD(int64_t, stride)                                                                                             \
    FIELD(int64_t, width)                                                                                              \
    FIELD(const double *, divisors)    /* [rows], of the logits, above 0; NULL for 1 */                                \
    FIELD(int64_t, ranked)             /* ids below it have ranks, but for those of `never` */                         \
    FIELD(const int64_t *, never)      /* [num_never], rising */                                                       \
    FIELD(int64_t, num_never)                                                                                          \
    FIELD(const int64_t *, tokens)     /* [rows] */                                                                    \
    SCORES(FIELD)

/* The threads that compute. */
#define THREADS(FIELD)                                                                                                 \
    FIELD(int32_t, count)                                                                                              \
    FIELD(struct pool *, pool) /* NULL: one is started for each job */

#define DECLARE(type, name) type name;
typedef struct { GEMM(DECLARE) } gemm_t;
typedef struct { LINEAR(DECLARE) } linear_t;
typedef struct { THREADS(DECLARE) } threads_t;
/* Computes linear layers; each but those that follow is independent of the others. Returns 0, or -1 if there is no memory. */
typedef int32_t linear_kernel_t(const linear_t *layers, int64_t count, const threads_t *threads);
typedef struct { RMS_NORM(DECLARE) } rms_norm_t;
typedef struct { ROTATION(DECLARE) } rotation_t;
typedef struct { ATTENTION(DECLARE) } attention_t;
typedef struct { EXPERTS(DECLARE) } experts_t;
typedef struct { LAYER(DECLARE) } layer_t;
typedef struct { STEP(DECLARE) } step_t;
typedef struct { UNPACKING(DECLARE) } unpacking_t;
typedef struct { BLOCKS(DECLARE) } blocks_t;
typedef struct { WEIGHING(DECLARE) } weighing_t;
typedef struct { DRAWING(DECLARE) } drawing_t;
typedef struct { SCORING(DECLARE) } scoring_t;

#define DESCRIBE_FIELD(type, name) #type " " #name ";"
#define DESCRIBE(structure, FIELDS) structure ":" FIELDS(DESCRIBE_FIELD) "\n"
#define ALL_ARGUMENTS                                                                                                  \
    DESCRIBE("gemm", GEMM)                                                                                             \
    DESCRIBE("linear", LINEAR)                                                                                         \
    DESCRIBE("threads", THREADS)                                                                                       \
    DESCRIBE("rms_norm", RMS_NORM)                                                                                     \
    DESCRIBE("rotation", ROTATION)                                                                                     \
    DESCRIBE("attention", ATTENTION)                                                                                   \
    DESCRIBE("experts", EXPERTS)                                                                                       \
    DESCRIBE("layer", LAYER)                                                                                           \
    DESCRIBE("step", STEP)                                                                                             \
    DESCRIBE("unpacking", UNPACKING)                                                                                   \
    DESCRIBE("blocks", BLOCKS)                                                                                         \
    DESCRIBE("weighing", WEIGHING)                                                                                     \
    DESCRIBE("drawing", DRAWING)                                                                                       \
    DESCRIBE("scoring", SCORING)

#endif
