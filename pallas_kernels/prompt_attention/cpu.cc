// A prompt's attention on the CPU, through XLA's FFI: chunks of queries, each to its own row of the
// cache, causal, without the scores ever being whole.
//
// Keys of a chunk are turned about and values brought together once for all of its queries. A row's
// sums run in an order that depends on its own position alone: it has the same bits however prompts
// are cut and whatever else is read with them, in AVX-512, AVX2 or plain loops.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu_lanes.h"
#include "cpu_threads.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using namespace zen;

constexpr int kTile = 4;                         // registers of keys, or of a value, worked on at once
constexpr int64_t kKeys = kTile * kLanes;
constexpr int64_t kRows = 6;                     // queries worked on at once
constexpr int64_t kTask = 8 * kRows;             // queries of one task
constexpr int64_t kParallelWork = 1 << 16;       // products below which one thread is faster

// One layer's heads; `padded` is the size in whole lanes.
struct Shape {
  int64_t group, size, padded, window;
  float scale;
};

// What a row has summed so far.
struct Row {
  float largest = kLowest;
  float total[kLanes] = {};
};

using Attend = void (*)(int64_t, const Shape&, const float* const*, const int64_t*, const float*,
                        const float*, float*, float* const*);

namespace plain {
#define ZEN_TARGET
#include "cpu_lanes_plain.h"
#include "cpu_exponential.h"
#include "cpu_attend.h"
#undef ZEN_TARGET
}  // namespace plain

#if defined(__x86_64__)
namespace avx2 {
#define ZEN_TARGET __attribute__((target("avx2,fma")))
#include "cpu_lanes_avx2.h"
#include "cpu_exponential.h"
#include "cpu_attend.h"
#undef ZEN_TARGET
}  // namespace avx2

namespace avx512 {
#define ZEN_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#include "cpu_lanes_avx512.h"
#include "cpu_exponential.h"
#include "cpu_attend.h"
#undef ZEN_TARGET
}  // namespace avx512
#endif

Attend choose(int64_t level) {
  switch (widest(level)) {
#if defined(__x86_64__)
    case kAvx512: return avx512::attend_some;
    case kAvx2: return avx2::attend_some;
#endif
    default: return plain::attend_some;
  }
}

struct Problem {
  const float* q;          // [chunks, tokens, kv_heads, group, size]
  float* y;                // likewise
  const int32_t* rows;     // [chunks], of the cache
  const int32_t* starts;   // [chunks], the first query's position
  const int32_t* lengths;  // [chunks], queries that exist
  int64_t chunks, tokens, kv_heads, cache_rows, positions;
  Shape shape;

  // Queries of a chunk that exist, and positions that they see.
  int64_t queries(int64_t c) const {
    const bool there = rows[c] >= 0 && rows[c] < cache_rows && starts[c] >= 0;
    const int64_t room = positions - starts[c];
    return there ? std::clamp<int64_t>(std::min<int64_t>(lengths[c], room), 0, tokens) : 0;
  }
  int64_t seen(int64_t c) const { return queries(c) ? starts[c] + queries(c) : 0; }
};

// One kv head of a chunk's row: keys [blocks][size][kKeys], zeros behind the last, values
// [positions][padded].
struct Head {
  float *keys, *values;
};

template <typename T>
void bring(const Problem& p, int64_t c, int64_t head, const T* k, const T* v, const Head& to) {
  const Shape& s = p.shape;
  const int64_t stride = p.kv_heads * s.size, seen = p.seen(c);
  const int64_t first = s.window ? std::max<int64_t>(0, p.starts[c] + 1 - s.window) / kKeys * kKeys : 0;
  const int64_t row = p.rows[c] * p.positions * stride + head * s.size;
  for (int64_t at = first; at < seen; at += kKeys) {
    float* block = to.keys + at * s.size;
    for (int64_t j = 0; j < kKeys; j++) {
      const bool there = at + j < seen;
      const T* from = k + row + (at + j) * stride;
      for (int64_t i = 0; i < s.size; i++) block[i * kKeys + j] = there ? widen(from[i]) : 0.0f;
    }
  }
  for (int64_t at = first; at < seen; at++) {
    float* value = to.values + at * s.padded;
    const T* from = v + row + at * stride;
    for (int64_t i = 0; i < s.size; i++) value[i] = widen(from[i]);
    for (int64_t i = s.size; i < s.padded; i++) value[i] = 0;
  }
}

// Some queries of a chunk and a kv head: numbers [begin, end) of tokens x group.
void attend_task(const Problem& p, Attend attend, int64_t c, int64_t head, const Head& from, int64_t begin,
                 int64_t end) {
  const Shape& s = p.shape;
  thread_local std::vector<float> room;
  room.resize(kRows * (kKeys + s.padded));
  for (int64_t n = begin; n < end; n += kRows) {
    const int64_t count = std::min(kRows, end - n);
    const float* q[kRows];
    float* y[kRows];
    int64_t positions[kRows];
    for (int64_t r = 0; r < count; r++) {
      const int64_t t = (n + r) / s.group, g = (n + r) % s.group;
      const int64_t at = (((c * p.tokens + t) * p.kv_heads + head) * s.group + g) * s.size;
      q[r] = p.q + at;
      y[r] = p.y + at;
      positions[r] = p.starts[c] + t;
    }
    attend(count, s, q, positions, from.keys, from.values, room.data(), y);
  }
}

template <typename T>
void attend_all(const Problem& p, ffi::ThreadPool& pool, int64_t level, const T* k, const T* v) {
  const Shape& s = p.shape;
  std::vector<int64_t> offset(p.chunks + 1);
  int64_t work = 0;
  for (int64_t c = 0; c < p.chunks; c++) {
    const int64_t blocks = (p.seen(c) + kKeys - 1) / kKeys;
    offset[c + 1] = offset[c] + p.kv_heads * blocks * kKeys * (s.size + s.padded);
    work += p.queries(c) * s.group * p.kv_heads * p.seen(c) * s.size;
  }
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < offset.back()) memory = std::vector<float>(offset.back());
  auto of = [&, base = memory.data()](int64_t c, int64_t head) {
    const int64_t room = (p.seen(c) + kKeys - 1) / kKeys * kKeys;
    float* at = base + offset[c] + head * room * (s.size + s.padded);
    return Head{at, at + room * s.size};
  };
  const bool alone = work < kParallelWork;
  share_out(pool, p.chunks * p.kv_heads, alone, [&](int64_t i) {
    const int64_t c = i / p.kv_heads, head = i % p.kv_heads;
    if (p.queries(c)) bring(p, c, head, k, v, of(c, head));
  });
  // The last queries see most: they are begun first.
  const int64_t tasks = (p.tokens * s.group + kTask - 1) / kTask;
  const Attend attend = choose(level);
  share_out(pool, tasks * p.chunks * p.kv_heads, alone, [&](int64_t i) {
    const int64_t unit = i % (p.chunks * p.kv_heads), c = unit / p.kv_heads, head = unit % p.kv_heads;
    const int64_t begin = (tasks - 1 - i / (p.chunks * p.kv_heads)) * kTask;
    const int64_t end = std::min(begin + kTask, p.queries(c) * s.group);
    if (begin < end) attend_task(p, attend, c, head, of(c, head), begin, end);
  });
}

ffi::Error attend_impl(ffi::ThreadPool pool, int64_t window, int64_t level, ffi::Buffer<ffi::F32> q,
                       ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::Buffer<ffi::S32> rows,
                       ffi::Buffer<ffi::S32> starts, ffi::Buffer<ffi::S32> lengths,
                       ffi::ResultBuffer<ffi::F32> y) {
  const auto qd = q.dimensions();
  Problem p{};
  p.q = q.typed_data();
  p.y = y->typed_data();
  p.rows = rows.typed_data();
  p.starts = starts.typed_data();
  p.lengths = lengths.typed_data();
  p.chunks = qd[0];
  p.tokens = qd[1];
  p.kv_heads = qd[2];
  p.cache_rows = k.dimensions()[0];
  p.positions = k.dimensions()[1];
  p.shape.group = qd[3];
  p.shape.size = qd[4];
  p.shape.padded = (qd[4] + kLanes - 1) / kLanes * kLanes;
  p.shape.window = window;
  p.shape.scale = 1.0 / std::sqrt(static_cast<double>(qd[4]));
  const int64_t row = p.kv_heads * p.shape.group * p.shape.size;
  for (int64_t c = 0; c < p.chunks; c++)
    std::fill(p.y + (c * p.tokens + p.queries(c)) * row, p.y + (c + 1) * p.tokens * row, 0.0f);
  const void *keys = k.untyped_data(), *values = v.untyped_data();
  if (k.element_type() == ffi::BF16)
    attend_all(p, pool, level, static_cast<const uint16_t*>(keys), static_cast<const uint16_t*>(values));
  else
    attend_all(p, pool, level, static_cast<const float*>(keys), static_cast<const float*>(values));
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ZenPromptAttention, attend_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("level")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
