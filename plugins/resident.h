/* The part of kernels.h, which includes it, for rounds that follow each other on a device without the host. */
#ifndef SPECBUILD_RESIDENT_H
#define SPECBUILD_RESIDENT_H

#define SPECBUILD_COMMON 0xffffffffu /* the salt of what common texts say; before −1: after one token */

/* The text's continuation as a chain, drafted without the host: takes the last round's tokens into the texts, finds the
 * longest earlier occurrence of a text's end, and drafts what followed it, twice as many tokens as match; or habits, where
 * fewer than two tokens match: what followed the last two in any text of the same salt, or what common texts say. A sequence
 * whose count is 0 is idle; a negative token is none that occurs again, and none that is drafted. */
typedef struct specbuild_text {
  int32_t *texts;               /* [B, S], every token of a text by its position; takes what was emitted */
  const int32_t *most;          /* [B], tokens to draft at most; 0: none */
  const int32_t *root_position; /* [B], of the root, the text's last token */
  const int32_t *roots;         /* [B] */
  const int32_t *length;        /* [B] and [B, N] of specbuild_walk, of the round before; length 0: the texts have it all */
  const int32_t *emitted;
  int32_t *tokens, *parents;    /* [B, N], the chain, root first; padding is token 0 with parent −1 */
  int32_t *counts;              /* [B], its nodes */
  int32_t *fault;               /* [B], CAPACITY where the root lies in no text; null: not reported */
  uint64_t *habits;             /* [H], what followed two tokens the last time, by a hash of them and the salt; null: none */
  const uint32_t *salts;        /* [B], whose habits a text shares; null where habits are */
  int32_t batch, nodes, capacity, slots; /* B, N, S, H: a power of two */
} specbuild_text;

int specbuild_continue_text(const specbuild_text *p, void *stream);

/* A round's end in a loop that stays on the device: its results into entry round % R of a ring, where the host reads them once
 * `published` counts more than `round`, and before R further rounds. Ends the loop, by the value 0 for the conditional handle,
 * where stop is set, `most` rounds are published, a text has reached its end, or no sequence has emitted anything. */
typedef struct specbuild_ring {
  int32_t *ring;                 /* [R, B, N + 3], the host's pinned memory: length, fault, counts, emitted */
  volatile uint64_t *published;  /* [1], the host's: becomes round + 1, once the entry can be read */
  uint64_t *round;               /* [1], how many are published; goes on by one */
  const int32_t *length;         /* [B] and [B, N] of specbuild_walk */
  const int32_t *emitted;
  const int32_t *fault;          /* [B]; null: 0 is published */
  const int32_t *counts;         /* [B], nodes of the trees */
  const int32_t *root_position;  /* [B], the last token's */
  const int32_t *ends;           /* [B], the position of a text's last token at most; null: no text ends */
  const volatile uint32_t *stop; /* [1], the host's, not 0: end; null: it never asks */
  uint64_t handle;               /* a cudaGraphConditionalHandle; 0: none */
  uint64_t most;
  int32_t rounds, batch, nodes; /* R, B, N */
} specbuild_ring;

int specbuild_publish(const specbuild_ring *p, void *stream);

#endif
