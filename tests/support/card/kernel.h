// What the stand-in knows of a kernel compiled for the host, and the C functions by which other libraries use it.
#pragma once

#include <cstddef>

struct card_kernel {
  const char *name;
  size_t count;
  const size_t *sizes;  // of its parameters
  const char *(*run)(void *const *parameters, int x, int y, int z, int threads, size_t shared);  // null, or what went wrong
};

extern "C" {
// Of the library beside the stand-in: a kernel by its name, or null.
const card_kernel *card_find_kernel(const char *name);

// Enqueues or captures a host function as if it were a kernel. `release` may be null; `overlap`: the kernel may start before
// the one in front of it has ended. A CUresult.
int card_launch(void *stream, void (*run)(void *), void *argument, void (*release)(void *), int overlap);
int card_enqueue(void *stream, void (*run)(void *), void *argument);
// The edge to the next kernel that is captured on this stream is programmatic.
int card_programmatic(void *stream);
// What a kernel does that goes wrong: all that follows is refused.
void card_fail(const char *what);
// Of the calls of an entry point ("cuMemAlloc"), that after `after` others gives `status`, once; null: none does any more.
void card_refuse(const char *entry_point, int status, int after);
// What is there: "memory" and "pinned" in bytes, "streams", "events", "graphs", "execs" by number.
size_t card_count(const char *what);
}
