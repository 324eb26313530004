// Sharing a kernel's work out over XLA's own threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "xla/ffi/api/ffi.h"

namespace zen {

// Calls before(i) for each i of 0 .. first - 1 and then block(i) for each i of 0 .. blocks - 1, and
// returns when all are done; no block begins before all of the first are done.
//
// Work is taken by whoever is free, this thread too; it waits only for what another thread has
// begun, so a pool without a free thread holds nothing up. `alone`: the work is too small to wake a
// thread for. Both may hold references to the caller's variables: a thread that comes too late
// finds nothing left and touches none of them.
template <typename Before, typename Block>
void share_out_after(xla::ffi::ThreadPool& pool, int64_t first, const Before& before, int64_t blocks,
                     const Block& block, bool alone) {
  if (alone || blocks < 2) {
    for (int64_t i = 0; i < first; i++) before(i);
    for (int64_t i = 0; i < blocks; i++) block(i);
    return;
  }
  struct Work {
    std::atomic<int64_t> next{0}, done{0};
    void wait_for(int64_t count) const {
      while (done.load(std::memory_order_acquire) < count) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      }
    }
  };
  auto work = std::make_shared<Work>();
  const int64_t all = first + blocks;
  auto take = [&before, &block, first, all](Work& work) {
    for (int64_t i; (i = work.next.fetch_add(1)) < all;) {
      if (i < first) {
        before(i);
      } else {
        work.wait_for(first);
        block(i - first);
      }
      work.done.fetch_add(1, std::memory_order_release);
    }
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), blocks) - 1;
  for (int64_t i = 0; i < helpers; i++) pool.Schedule([work, take] { take(*work); });
  take(*work);
  work->wait_for(all);
}

// Calls block(i) once for each i of 0 .. blocks - 1, as share_out_after does.
template <typename Block>
void share_out(xla::ffi::ThreadPool& pool, int64_t blocks, bool alone, const Block& block) {
  share_out_after(pool, 0, [](int64_t) {}, blocks, block, alone);
}

}  // namespace zen
