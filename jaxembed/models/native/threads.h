// Runs the items of a call on the threads of XLA:CPU.
#pragma once

#include <sched.h>
#include <stdatomic.h>
#include <string.h>

#include "scratch.h"
#include "sizes.h"
#include "tiles.h"
#include "xla/ffi/api/c_api.h"

// Tell the core that the thread waits in a loop.
static inline void wait_a_little(void) {
#ifdef __aarch64__
  __asm__ volatile("yield");
#else
  _mm_pause();
#endif
}

// Runs an item. Returns 0, or -1 if memory is short. `before` is the item of this call that the same
// thread ran immediately before it with success, or -1.
typedef int Work(const void* arguments, int64_t item, int64_t before);

enum { PHASES = 3 };

// The items of one call, in phases: an item starts when all items of earlier phases are done. The
// last owner frees it.
typedef struct {
  atomic_int owners;  // the call itself, and each scheduled helper
  atomic_int failed;
  atomic_llong next, done;
  int64_t ends[PHASES];  // the item after the last one of each phase
  Work* work;
  char arguments[];
} Job;

static atomic_int running;  // number of calls of this library that run now, of all programs

// Wait until so many items are done.
static void wait_for_items(Job* job, int64_t items) {
  for (int spins = 0; atomic_load(&job->done) < items; spins++) {
    if (spins < 200) wait_a_little();
    else sched_yield();
  }
}

// Run items until none is left to start.
static void run_items(Job* job) {
  for (int64_t item, before = -1; (item = atomic_fetch_add(&job->next, 1)) < job->ends[PHASES - 1];
       before = item) {
    int64_t earlier = 0;
    for (int phase = 0; phase < PHASES && job->ends[phase] <= item; phase++)
      earlier = job->ends[phase];
    wait_for_items(job, earlier);
    if (job->work(job->arguments, item, before)) {
      atomic_store(&job->failed, 1);
      item = -1;
    }
    atomic_fetch_add(&job->done, 1);
  }
}

// Give up one ownership of a job.
static void disown(Job* job) {
  if (atomic_fetch_sub(&job->owners, 1) == 1) free(job);
}

// The task of a helper thread.
static void help(void* data) {
  Job* job = data;
  if (atomic_load(&job->next) < job->ends[PHASES - 1]) {
    tiles_on();
    run_items(job);
    tiles_off();
  }
  disown(job);
}

// Free an error of XLA.
static void forget(XLA_FFI_CallFrame* frame, XLA_FFI_Error* error) {
  XLA_FFI_Error_Destroy_Args args = {.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE,
                                     .error = error};
  frame->api->XLA_FFI_Error_Destroy(&args);
}

// The number of threads that a call should use now, including its own: a fair share of the pool if
// other calls run at the same time.
static int64_t share_of_threads(XLA_FFI_CallFrame* frame) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args = {
      .struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE,
      .ctx = frame->ctx,
      .num_threads = &threads};
  XLA_FFI_Error* error = frame->api->XLA_FFI_ThreadPool_NumThreads(&args);
  if (error) forget(frame, error), threads = 1;  // no pool: only the calling thread
  return max64(1, threads / (atomic_load(&running) + 1));
}

// Run the items of all phases on some threads, with a copy of the arguments. Returns when all are
// done: 0, or not 0 if memory was short. Helpers that start too late find nothing to do. The call
// does not wait for them, because they may be queued behind another program's work.
static int in_phases(XLA_FFI_CallFrame* frame, Work* work, const void* arguments, size_t size,
                     const int64_t ends[PHASES], int64_t threads) {
  const int64_t items = ends[PHASES - 1];
  Job* job = malloc(sizeof(Job) + size);
  if (!job) return -1;
  atomic_init(&job->owners, 1);
  atomic_init(&job->failed, 0);
  atomic_init(&job->next, 0);
  atomic_init(&job->done, 0);
  memcpy(job->ends, ends, sizeof job->ends);
  job->work = work;
  memcpy(job->arguments, arguments, size);
  atomic_fetch_add(&running, 1);
  for (int64_t helper = 1; helper < min64(threads, items); helper++) {
    atomic_fetch_add(&job->owners, 1);
    XLA_FFI_ThreadPool_Schedule_Args scheduled = {
        .struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE,
        .ctx = frame->ctx,
        .task = help,
        .data = job};
    XLA_FFI_Error* error = frame->api->XLA_FFI_ThreadPool_Schedule(&scheduled);
    if (error) {
      forget(frame, error);
      disown(job);
      break;
    }
  }
  tiles_on();
  run_items(job);
  tiles_off();
  wait_for_items(job, items);
  atomic_fetch_sub(&running, 1);
  int failed = atomic_load(&job->failed);
  disown(job);
  return failed;
}

// The same for items of a single phase.
static int on_threads(XLA_FFI_CallFrame* frame, Work* work, const void* arguments, size_t size,
                      int64_t items, int64_t threads) {
  return in_phases(frame, work, arguments, size, (int64_t[PHASES]){items, items, items}, threads);
}
