// Sharing a kernel's work out over XLA's own threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "xla/ffi/api/ffi.h"

namespace zen {

// Calls block(i) once for each i of 0 .. blocks - 1 and returns when all are done.
//
// Blocks are taken by whoever is free, this thread too; it waits only for blocks that another
// thread has begun, so a pool without a free thread holds nothing up. `alone`: the work is too
// small to wake a thread for. `block` may hold references to the caller's variables: a thread that
// comes too late finds no block left and touches none of them.
template <typename Block>
void share_out(xla::ffi::ThreadPool& pool, int64_t blocks, bool alone, const Block& block) {
  if (alone || blocks < 2) {
    for (int64_t i = 0; i < blocks; i++) block(i);
    return;
  }
  struct Work {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto work = std::make_shared<Work>();
  const Block* shared = &block;
  auto take = [shared, blocks](Work& work) {
    for (int64_t i; (i = work.next.fetch_add(1)) < blocks;) {
      (*shared)(i);
      work.done.fetch_add(1, std::memory_order_release);
    }
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), blocks) - 1;
  for (int64_t i = 0; i < helpers; i++) pool.Schedule([work, take] { take(*work); });
  take(*work);
  while (work->done.load(std::memory_order_acquire) < blocks) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

}  // namespace zen
