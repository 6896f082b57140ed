/* The part of kernels.h, which includes it, for rounds that follow each other on a device without the host. */
#ifndef SPECBUILD_RESIDENT_H
#define SPECBUILD_RESIDENT_H

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
