// Provides scratch memory: one growing block for each thread, in huge pages.
//
// With small pages, page table walks take 2.5 times as long as the products (in a virtual machine).
#pragma once

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { HUGE = 2 << 20 };

static __thread char* scratch_memory;
static __thread size_t scratch_size;
static pthread_key_t at_exit;  // frees the scratch memory of a thread when it ends
static pthread_once_t at_exit_made = PTHREAD_ONCE_INIT;

static int at_exit_failed;

static void make_at_exit(void) { at_exit_failed = pthread_key_create(&at_exit, free); }

// The thread's scratch memory, with at least `size` bytes; NULL if memory is short. It is valid
// until the thread's next call.
static void* scratch(size_t size) {
  if (size <= scratch_size) return scratch_memory;
  pthread_once(&at_exit_made, make_at_exit);
  free(scratch_memory);
  const size_t rounded = (size + HUGE - 1) / HUGE * HUGE;
  scratch_memory = aligned_alloc(HUGE, rounded);
  scratch_size = scratch_memory ? rounded : 0;
  if (!at_exit_failed) pthread_setspecific(at_exit, scratch_memory);
  if (scratch_memory) madvise(scratch_memory, rounded, MADV_HUGEPAGE);
  return scratch_memory;
}
